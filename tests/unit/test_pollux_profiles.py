"""Profiles and job lists in the form of the simulators of Pollux and Sia, as small samples of our own."""

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import makespan
from makespan.cli import main
from makespan.errors import InputError, MissingDataError, TraceError
from makespan.throughput import ProfiledSource
from makespan.traces import read_profiled_jobs

LIST = "name,time,application,num_replicas,batch_size\n"
SHAPES = ("1", "2", "4", "11", "12", "21", "22", "24", "44", "123", "132")


def write(path: Path, header: str, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


def sync_s(shape: str) -> float:
    """Order of nodes matters in the sample: 132 is slower than 123."""
    return 0.01 * len(shape) + (0.05 if shape == "132" else 0.0)


def profile(folder: Path, ending: str = "", factor: float = 1.0) -> None:
    steps = [
        (shape, size, factor * (0.01 * size + sync_s(shape)), factor * sync_s(shape))
        for shape in SHAPES
        for size in (8, 16)
    ]
    write(folder / f"placements{ending}.csv", "placement,local_bsz,step_time,sync_time", steps)
    header = "num_nodes,num_replicas,local_bsz,step_time,sync_time"
    write(folder / f"scalability{ending}.csv", header, [(6, 8, 8, 0.3, 0.2), (6, 8, 16, 0.4, 0.2)])
    # At 16 samples a step does a unit of progress, at 64 samples 64 / 16 * (1 + 3) / (4 + 3) of that.
    for batch, progress in ((16, (100.0, 200.0, 300.0)), (64, (110.0, 190.0, 300.0))):
        rows = [(at, 1, 0.5, 1.0, 3.0) for at in progress]
        write(folder / f"validation-{batch}.csv", "progress,iteration,metric,grad_sqr,grad_var", rows)


@pytest.fixture
def traces(tmp_path):
    profile(tmp_path / "traces" / "net")
    return tmp_path / "traces"


def source(traces, gpu="t4-16"):
    return ProfiledSource(traces, gpu)


def times(traces, key, plan, placement):
    table = source(traces).load(key)
    rows = table[(table["exec_plan"] == plan) & (table["placement"] == placement)]
    return rows["iter_time_s"].item(), rows["provenance"].item()


def test_times_of_a_step_come_from_placement_batch_and_passes(traces):
    assert source(traces).workload_keys() == ("net-16", "net-64")
    # 64 samples on 4 GPUs: 16 each in one pass, or twice 8, of which one synchronises.
    assert times(traces, "net-64", "ga", "4") == (pytest.approx(0.17), "measured")
    assert times(traces, "net-64", "ga+a2", "4") == (pytest.approx(0.09 + 0.08), "measured")
    # 12 samples a GPU lie between two profiled numbers.
    assert times(traces, "net-48", "ga", "22") == (pytest.approx(0.12 + 0.02), "interpolated")
    # Several orders of the same shares: that of falling counts, 3-2-1, is a turn of 132.
    assert times(traces, "net-96", "ga", "123")[0] == pytest.approx(0.16 + 0.08)
    # What is known by numbers of nodes and GPUs alone is the most even placement.
    assert times(traces, "net-64", "ga", "111122") == (pytest.approx(0.3), "measured")
    assert set(source(traces).load("net-64")["placement"]) == {"1", "2", "11", "4", "22", "44", "111122"}


def test_work_is_the_progress_of_all_epochs_over_the_gain_of_the_batch(traces):
    net = source(traces).profile("net")
    # Epochs end at 100, 190 and 300; a step of 64 samples is worth (3 + 1) / (3 / 4 + 1).
    assert net.steps(16) == 300
    assert net.steps(64) == round(300 / (4 / 1.75))
    assert net.steps(40) == round(300 / (4 / (3 / 2.5 + 1)))


@pytest.mark.parametrize(
    ("batch", "n_gpus", "found"),
    [
        (64, 4, (16, 1, 64)), (64, 2, (16, 2, 64)), (64, 3, (10, 2, 60)), (16, 1, (16, 1, 16)),
        (20, 1, (10, 2, 20)),
    ],
)  # fmt: skip
def test_a_batch_is_split_into_few_equal_passes(traces, batch, n_gpus, found):
    # 64 samples on 3 GPUs are 22 each, twice 11, which is more than the largest batch of 64: twice 10.
    split = source(traces).profile("net").split(batch, n_gpus)
    assert (split.micro_batch_size, split.grad_accum_steps, split.global_batch_size) == found


def test_a_list_runs_from_its_file_and_its_profiles(traces, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("list.csv").write_text(LIST + "net-0,30,net,4,64\nnet-1,40.5,net,3,64\nnet-2,50,net,8,64\n")
    trace = read_profiled_jobs("list.csv", source(traces).profile)
    assert [(job.workload, job.plan, job.n_gpus, job.steps) for job in trace.jobs] == [
        ("net-64", "ga", 4, 131), ("net-60", "ga+a2", 3, 135), ("net-64", "ga", 8, 131),
    ]  # fmt: skip
    assert "repaired 1 row: its GPUs cannot share the batch evenly; rounded (row 2)" in trace.report.text
    assert "batch sizes never change" in trace.report.text
    done = CliRunner().invoke(
        main,
        ["simulate", "--quiet", "--format", "pollux", "--workload", "list.csv", "--source", "measured",
         "--measured-dir", "traces", "--cluster", "t4-64", "--policy", "tiresias-pollux",
         "--placement", "worst-fit", "--delay", "30", "--output", "out"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "placement: worst-fit" in done.output and "schedule of tiresias-pollux: possible" in done.output
    scenario = makespan.scenario(
        "list.csv", file_format="pollux", source="measured", measured_dir=traces, cluster_name="t4-64",
        restart_delay_s=30.0,
    )  # fmt: skip
    outcomes = makespan.simulate(scenario, "tiresias").result.outcomes.set_index("job_id")
    # It starts in the first round after 30 s, restarts for 30 s, and does one step more than its work.
    assert outcomes.loc["net-0", "finish_time_s"] == pytest.approx(60 + 30 + 132 * 0.17)
    assert makespan.compare(scenario, ["fifo", "srtf", "gavel"])["jobs"].tolist() == [3, 3, 3]


def test_profiles_by_type_of_gpu_are_found_by_the_names_of_sia(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile(tmp_path / "traces" / "net", "-aws")
    profile(tmp_path / "traces" / "net", "-azure", factor=0.5)
    Path("list.csv").write_text(LIST + "net-0,0,net,4,64\n")
    assert source(tmp_path / "traces").load("net-64")["iter_time_s"].min() == pytest.approx(0.17 - 0.07)
    scenario = makespan.scenario(
        "list.csv", file_format="pollux", source="measured", measured_dir="traces",
        cluster_name="v100-p100-t4-64", keep=None,
    )  # fmt: skip
    types = {item.gpu_types for item in scenario.catalogue.all("net-64")}
    assert {name for names in types for name in names} == {"t4-16", "v100-32"}
    with pytest.raises(
        MissingDataError, match=r"no profiles for a800-80; expected .*placements-a800-80.csv, fo"
    ):
        source(tmp_path / "traces", "a800-80").load("net-64")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("a,0,other,1,16", r"row 1, column 'application': .*no profile of 'other' on t4-16; it has: net"),
        ("a,0,net,1,128", r"row 1, column 'batch_size': .*16 to 64 samples"),
        ("a,0,net,16,64", r"row 1, column 'num_replicas': .*8 to 16 samples per GPU, as profiled; batch 64"),
        ("a,0,net,0,64", r"row 1, column 'num_replicas': .*GPUs, 1 or more"),
        ("a,x,net,1,64", r"row 1, column 'time': .*s"),
    ],
)
def test_requests_that_no_profile_covers_are_errors(traces, tmp_path, row, problem):
    path = tmp_path / "list.csv"
    path.write_text(LIST + row + "\n")
    with pytest.raises(TraceError, match=problem):
        read_profiled_jobs(path, source(traces).profile)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("placements.csv", "placement,local_bsz\n1,8\n", r"column\(s\) step_time, sync_time missing"),
        (
            "placements.csv",
            "placement,local_bsz,step_time,sync_time\n1a,8,1,0\n",
            "a digit, 1 to 9, for each",
        ),
        (
            "placements.csv",
            "placement,local_bsz,step_time,sync_time\n8,1,0.1,0.3\n",
            "longer than its synchr",
        ),
        ("placements.csv", "placement,local_bsz,step_time,sync_time\n8,1,x,0.3\n", "numbers"),
        ("placements.csv", "placement,local_bsz,step_time,sync_time\n", "no rows"),
        (
            "scalability.csv",
            "num_nodes,num_replicas,local_bsz,step_time,sync_time\n4,2,8,1,0\n",
            "one GPU per",
        ),
        ("validation-x.csv", "progress,grad_sqr,grad_var\n1,1,1\n", "a name such as validation-128.csv"),
        ("validation-16.csv", "progress,grad_sqr,grad_var\n1,,1\n", "a finite number"),
    ],
)
def test_broken_profiles_are_errors_that_name_the_file(traces, name, text, problem):
    (traces / "net" / name).write_text(text)
    with pytest.raises((InputError, TraceError), match=rf"{name}.*{problem}"):
        source(traces).load("net-64")


def test_profiles_without_progress_state_no_work(traces):
    for path in (traces / "net").glob("validation-*.csv"):
        path.unlink()
    with pytest.raises(MissingDataError, match=r"no validation-<batch>\.csv, which states the work of a job"):
        source(traces).load("net-64")


def test_another_measured_directory_is_read_as_before(tmp_path, traces, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(traces / "net")
    assert not ProfiledSource.is_there(traces)
    Path("list.csv").write_text(LIST + "net-0,30,net,4,64\n")
    with pytest.raises((MissingDataError, TraceError)):
        makespan.scenario(
            "list.csv", file_format="pollux", source="measured", measured_dir=traces, cluster_name="t4-64"
        )


PUBLIC = Path(os.environ.get("MAKESPAN_PUBLISHED_DIR", "")) / "pollux" / "simulator"


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="MAKESPAN_PUBLISHED_DIR has no pollux/simulator")
def test_the_published_list_takes_the_published_times():
    """Workload 6 under Tiresias; the artifact states an average of 3469.69 s."""
    scenario = makespan.scenario(
        PUBLIC / "workloads" / "workload-6.csv", file_format="pollux", source="measured",
        measured_dir=PUBLIC / "traces", cluster_name="t4-64", restart_delay_s=30.0, placement="worst-fit",
    )  # fmt: skip
    done = makespan.simulate(scenario, "tiresias-pollux")
    assert done.metrics.avg_jct_s == pytest.approx(3469.69, rel=0.05)
