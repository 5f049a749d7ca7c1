"""The verbs ``simulate`` and ``policies``: what they print, what they write, and what they refuse."""

import io
import json
import math
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from toy_cluster import simulate

from makespan.cli import main, simulate as _view
from makespan.cli.simulate import LiveView
from makespan.emulator import emulate, trace_points
from makespan.hardware import cluster
from makespan.policies import REGISTRY
from makespan.sim import Violation
from makespan.studies import resized, scenario
from makespan.tables import EVENTS, JOBS, OUTCOMES, THROUGHPUT, read_csv, write_csv
from makespan.traces import jobs_table
from makespan.workloads import JobSpec, workload

LINE = re.compile(r"^ *\d+:\d\d:\d\d +\d+/10 +\d+ +\d+ +\d+/64 +(-|\d+:\d\d:\d\d)", re.MULTILINE)
JOBS_LIST = [
    JobSpec("a", 0.0, "roberta", 2, 16, "zero-dp", 4000),
    JobSpec("b", 60.0, "roberta", 8, 64, "zero-dp", 9000, is_guaranteed=True),
    JobSpec("c", 90.0, "bert", 4, 32, "zero-dp", 2000),
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def job_list(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    write_csv(jobs_table(JOBS_LIST), path, JOBS)
    return path


def value(output: str, name: str) -> float:
    """Return a number of the summary."""
    found = re.search(rf"^{name} +([\d.]+)", output, re.MULTILINE)
    assert found, output
    return float(found.group(1))


# --- policies -----------------------------------------------------------------------------------


def test_policies_lists_every_policy_with_what_it_needs() -> None:
    result = run("policies")
    assert result.exit_code == 0
    for name, entry in REGISTRY.items():
        line = next(line for line in result.output.splitlines() if line.startswith(f"{name} "))
        assert f"{entry.title}:" in line
        assert ("knows the steps left" in line) == entry.is_clairvoyant
        assert ("keeps guarantees" in line) == entry.honours_guarantees
        assert ("rounds of" in line) == (entry.interval_s is not None)
        for reference in entry.references:
            assert reference.split()[0] in result.output


# --- simulate -----------------------------------------------------------------------------------


def test_simulate_shows_a_view_and_a_summary() -> None:
    result = run("simulate")
    assert result.exit_code == 0, result.output
    assert "Morphling (work-aware) on naive (emulated), 10 jobs on 8 x 8 GPUs" in result.output
    lines = [match.group() for match in LINE.finditer(result.output)]
    assert 5 <= len(lines) <= 21
    assert re.search(r"[a-z0-9]+-\d @ |[a-z0-9]+-\d \S+ @ \d", result.output)  # a job with its nodes
    assert value(result.output, "jobs finished") == 10
    assert "schedule of morphling-work: possible" in result.output


def test_simulate_writes_both_tables_and_the_summary_agrees_with_them(tmp_path: Path) -> None:
    result = run("simulate", "--workload", "base", "--jobs", "40", "--quiet", "--output", str(tmp_path / "x"))
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["events.csv", "outcomes.csv"]
    outcomes = read_csv(tmp_path / "x" / "outcomes.csv", OUTCOMES)
    events = read_csv(tmp_path / "x" / "events.csv", EVENTS)
    assert len(outcomes) == 40 and (events["kind"] == "finished").sum() == 40
    jct_s = outcomes["finish_time_s"] - outcomes["submit_time_s"]
    assert value(result.output, "average JCT") == pytest.approx(jct_s.mean(), abs=0.06)
    makespan_s = outcomes["finish_time_s"].max() - outcomes["submit_time_s"].min()
    assert value(result.output, "makespan") == pytest.approx(makespan_s, abs=0.06)


def test_the_view_changes_nothing_and_quiet_hides_it(tmp_path: Path) -> None:
    shown = run("simulate", "--output", str(tmp_path / "shown"))
    hidden = run("simulate", "--output", str(tmp_path / "hidden"), "--quiet")
    assert LINE.search(shown.output) and not LINE.search(hidden.output)
    for name in ("events.csv", "outcomes.csv"):
        assert (tmp_path / "shown" / name).read_bytes() == (tmp_path / "hidden" / name).read_bytes()


def test_options_reach_the_simulation(job_list: Path, tmp_path: Path) -> None:
    options = ("--delay", "10", "--interval", "60", "--policy", "fifo", "--output", str(tmp_path / "x"))
    result = run("simulate", "--workload", str(job_list), *options)
    assert result.exit_code == 0, result.output
    assert "FIFO on mine (emulated), 3 jobs on 8 x 8 GPUs" in result.output
    assert "restart delay 10 s, rounds of 60 s, knowledge: sampled" in result.output
    events = read_csv(tmp_path / "x" / "events.csv", EVENTS)
    started = events[events["kind"] == "started"]
    ready = events[events["kind"] == "ready"]
    assert started["time_s"].tolist() == [0.0, 60.0, 120.0]
    assert ready["time_s"].tolist() == [10.0, 70.0, 130.0]
    assert set(read_csv(tmp_path / "x" / "outcomes.csv", OUTCOMES)["job_id"]) == {"a", "b", "c"}


def test_a_load_lets_the_same_jobs_arrive_faster(job_list: Path, tmp_path: Path) -> None:
    for load in ("1", "4"):
        options = ("--load", load, "--quiet", "--output", str(tmp_path / load))
        assert run("simulate", "--workload", str(job_list), *options).exit_code == 0
    usual, faster = (read_csv(tmp_path / load / "outcomes.csv", OUTCOMES) for load in ("1", "4"))
    assert (faster["submit_time_s"] * 4.0).tolist() == usual["submit_time_s"].tolist()
    assert "; load 4" in run("simulate", "--workload", str(job_list), "--load", "4").output


def test_clusters_without_constants_of_the_model_decide_by_exact_times() -> None:
    result = run("simulate", "--cluster", "p3dn-64", "--quiet")
    assert result.exit_code == 0 and "knowledge: exact" in result.output


def test_other_nodes_leave_out_what_cannot_run_and_say_so() -> None:
    result = run("simulate", "--nodes", "2", "--gpus-per-node", "4", "--quiet")
    assert result.exit_code == 0, result.output
    assert "without what cannot run here" in result.output and "llama30 on 24, 40, 48" in result.output
    assert "10 jobs on 2 x 4 GPUs" in result.output


def test_the_nodes_of_a_changed_cluster_keep_their_proportions() -> None:
    base, small = cluster("a800-64"), resized("a800-64", 3, 4)
    assert (small.n_nodes, small.n_gpus) == (3, 12)
    assert small.nodes[0].cpu_threads_per_gpu == base.nodes[0].cpu_threads_per_gpu
    assert small.nodes[0].host_memory_bytes == base.nodes[0].host_memory_bytes / 2
    assert resized("a800-64", None, None) == base


def test_fewer_or_more_nodes_of_a_kind_have_the_same_times() -> None:
    def times_s(nodes: int | None) -> dict[tuple[str, str, str], float]:
        catalogue = scenario(workload="naive", source="emulated", n_nodes=nodes).catalogue
        rows = [item for key in catalogue.workloads for item in catalogue.all(key)]
        return {(item.workload, item.plan, item.placement.text): item.iter_time_s for item in rows}

    usual = times_s(None)
    for nodes in (6, 10):
        other = times_s(nodes)
        common = usual.keys() & other.keys()
        assert len(common) > 100
        assert {key: usual[key] for key in common} == {key: other[key] for key in common}


def test_guarantees_are_reported(job_list: Path) -> None:
    assert value(run("simulate", "--workload", str(job_list)).output, "guarantees kept") == 100.0
    assert re.search(r"guarantees kept +-", run("simulate").output)


@pytest.mark.parametrize("known", ["sampled", "requests", "exact"])
def test_jobs_run_by_true_times_whatever_policies_know(known: str, tmp_path: Path) -> None:
    result = run(
        "simulate", "--jobs", "30", "--workload", "mt", "--predictions", known, "--output", str(tmp_path)
    )
    assert result.exit_code == 0, result.output
    events = read_csv(tmp_path / "events.csv", EVENTS)
    catalogue = scenario(workload="mt", source="emulated", n_jobs=30, predictions=known).catalogue
    keys = {job.rsplit("-", 1)[0] for job in events["job_id"]}
    true_s = {(item.plan, item.iter_time_s) for key in keys for item in catalogue.all(key)}
    held = events[events["nodes"] != ""]  # guests are slower
    assert set(zip(held["plan"], held["iter_time_s"], strict=True)) <= true_s
    differs = any(
        item.iter_time_s != item.predicted_iter_time_s for key in keys for item in catalogue.all(key)
    )
    assert differs == (known != "exact")


def test_an_impossible_schedule_is_said_and_sets_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Violation("capacity", 12.5, 7, "vit-0", "node 3 gives 9 devices; expected 8")
    monkeypatch.setattr("makespan.sim.engine.validate_schedule", lambda *_, **__: [found])
    result = run("simulate", "--quiet")
    assert result.exit_code == 1
    assert "IMPOSSIBLE, 1 violations" in result.output
    assert "capacity at 12.5 s, row 7, job vit-0: node 3 gives 9 devices" in result.output


# --- sources ------------------------------------------------------------------------------------


def test_measured_tables_are_a_source(tmp_path: Path, job_list: Path) -> None:
    where = cluster("a800-64")
    for name in ("roberta", "bert"):
        frame = emulate(workload(name), trace_points(workload(name), where), where)
        write_csv(frame.assign(provenance="measured"), tmp_path / "tables" / f"{name}.csv", THROUGHPUT)
    options = ("--source", "measured", "--measured-dir", str(tmp_path / "tables"))
    result = run("simulate", "--workload", str(job_list), *options)
    assert result.exit_code == 0, result.output
    assert "on mine (measured), 3 jobs" in result.output


def test_the_title_says_what_the_rows_say_and_not_as_what_they_are_given(
    tmp_path: Path, job_list: Path
) -> None:
    where = cluster("a800-64")
    options = ["--workload", str(job_list), "--source", "measured", "--measured-dir", str(tmp_path)]
    frames = {name: emulate(workload(name), trace_points(workload(name), where), where) for name in ROWS_OF}
    kinds = dict.fromkeys(frames, "emulated")
    for changes, expected in (
        ({}, "emulated, given as measured"),
        ({"vit": "published"}, "emulated, given as measured"),  # which no job of the list trains
        ({"bert": "measured"}, "mixed emulated and measured, given as measured"),
    ):
        for name, kind in (kinds | changes).items():
            write_csv(frames[name].assign(provenance=kind), tmp_path / f"{name}.csv", THROUGHPUT)
        for verb in (["simulate"], ["compare", "--policies", "fifo"]):
            result = run(*verb, *options, "--quiet")
            assert result.exit_code == 0, result.output
            assert f"mine ({expected}), 3 jobs" in result.output


ROWS_OF = ("roberta", "bert", "vit")


@pytest.mark.parametrize("name", ["naive", "mt"])
def test_the_authors_lists_belong_to_the_published_source(name: str, published_dir: Path) -> None:
    options = ("--source", "published", "--published-dir", str(published_dir), "--workload", name)
    result = run("simulate", *options, "--quiet")
    assert result.exit_code == 0, result.output
    assert value(result.output, "jobs finished") == {"naive": 10, "mt": 406}[name]
    assert "possible" in result.output


# --- formats ------------------------------------------------------------------------------------

ATTEMPT = {
    "start_time": "2017-10-07 01:10:00",
    "end_time": "2017-10-07 01:20:00",
    "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}],
}
PHILLY = {"status": "Pass", "vc": "v1", "jobid": "j1", "user": "u1", "submitted_time": "2017-10-07 01:00:00"}
FILES = {
    "morphling": (
        "name,submission_time,duration,application,num_gpus,num_cpus,bandwidth,exec_plan,steps,is_sla\r\n"
        "a,5,60,roberta,2,16,0,zero-dp,100,1\r\n",
        "repaired: Windows line ends",
    ),
    "philly": (
        json.dumps([PHILLY | {"attempts": [ATTEMPT]}, PHILLY | {"jobid": "j2", "attempts": []}]),
        "dropped 1 row: never started",
    ),
    "helios": (
        "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
        "1,u1,vc1,2,8,1,COMPLETED,2020-06-09 00:00:00,2020-06-09 00:01:00,2020-06-09 00:03:00,120,0\n"
        "2,u1,vc1,0,8,1,COMPLETED,2020-06-09 00:00:00,2020-06-09 00:01:00,2020-06-09 00:03:00,120,0\n",
        "dropped 1 row: no GPU requested",
    ),
    "pai": (
        "j1,i1,u1,Terminated,100,900\nj3,i3,u1,Running,10,\n",
        "dropped 1 row: running at the end of the trace",
    ),
    "openb": (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,"
        "scheduled_time\np0,12500,1,8,1000,,Burstable,Succeeded,100,400,150\n"
        "p2,4000,1,0,0,,LS,Succeeded,200,300,210\n",
        "dropped 1 row: no GPU requested",
    ),
    "easyscale": (
        "name,time,application,max_parallelism,batch_size,epochs,enable_heterogeneous_deterministic,"
        "preferred_gpu\nbert-0,115,bert,16,8,4,1,v100\nbert-0,100,bert,8,16,3,0,p100\n",
        "repaired 1 row: name occurs again",
    ),
    "requests": (
        "job_id;submit_time_s;n_gpus;duration_s\na;0;0,5;900\n",
        "repaired 1 row (0.25 GPU-hours, 0.12 more than stated): asks for a part of a GPU",
    ),
    "spot": (
        "job_name,gpu_request,worker_num,submit_time,duration,job_type\na,1,2,0,900,HP\nb,1,0,0,900,Spot\n",
        "dropped 1 row: no GPU requested",
    ),
    "tiresias": (
        "job_id,num_gpu,submit_time,model_name,duration\n0,1,0,vgg19,900\n0,1,0,vgg19,900\n",
        "dropped 1 row (0.25 GPU-hours): job name occurs again",
    ),
    "pollux": (
        "name,time,num_replicas,duration\na,0,2,900\nb,0,2,0\n",
        "dropped 1 row: held its GPUs for no time",
    ),
    "gavel": (
        "LM\trun\t-n\t1\t3600\t1\t1\t-1\t0\n",
        "repaired: states steps; durations follow from the throughputs given (whole file)",
    ),
}
OPTIONS = {
    "pai": ("--tasks", "tasks.csv"),
    "gavel": ("--tasks", "rates.json"),
    "easyscale": ("--epoch-time", "60"),
}


@pytest.mark.parametrize("file_format", list(FILES))
def test_every_format_runs_and_reports_what_it_changed(
    file_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    text, reported = FILES[file_format]
    Path("trace.csv").write_text(text, encoding="utf-8", newline="")
    Path("tasks.csv").write_text("j1,worker,2,Terminated,120,880,400,29,100,T4\n", encoding="utf-8")
    Path("rates.json").write_text(json.dumps({"v100": {"('LM', 1)": {"null": 2.0}}}), encoding="utf-8")
    options = OPTIONS.get(file_format, ())
    result = run("simulate", "--workload", "trace.csv", "--format", file_format, *options)
    assert result.exit_code == 0, result.output
    assert result.output.count(reported) == 1
    assert value(result.output, "jobs finished") == (2 if file_format == "easyscale" else 1)


def test_requests_beyond_the_cluster_are_dropped_from_foreign_traces(tmp_path: Path) -> None:
    text = FILES["openb"][0].replace("p2,4000,1,0,", "p2,4000,1,2,")
    (tmp_path / "pods.csv").write_text(text, encoding="utf-8")
    options = ("--workload", str(tmp_path / "pods.csv"), "--format", "openb")
    small = run("simulate", *options, "--nodes", "1", "--gpus-per-node", "4")
    assert small.exit_code == 0, small.output
    assert "asks for more than 4 GPUs" in small.output


def test_a_list_can_be_cut(job_list: Path) -> None:
    result = run("simulate", "--workload", str(job_list), "--jobs", "2")
    assert value(result.output, "jobs finished") == 2


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "fifoo"), "Did you mean 'fifo'?"),
        (("--workload", "bass"), "unknown workload or file 'bass'; expected base, bp, mt, naive"),
        (("--workload", "bass.csv"), "bass.csv: no such file"),
        (("--source", "real"), "Invalid value for '--source'"),
        (("--source", "published"), "--published-dir or by the environment variable MAKESPAN_PUBLISHED_DIR"),
        (("--source", "published", "--published-dir", "gone"), "gone: no such directory"),
        (("--source", "measured"), "--measured-dir"),
        (("--source", "measured", "--measured-dir", "gone"), "gone: no measured traces"),
        (
            ("--workload", "unlisted.csv", "--source", "measured", "--measured-dir", "gone"),
            "gone: no measured traces, as there is no such directory",
        ),
        (
            ("--workload", "large.csv", "--nodes", "4"),
            "large.csv: every job requests more than cluster 'a800-64 as 4 x 8' has (first: row 1, job a: 64",
        ),
        (
            ("--workload", "mine.csv", "--nodes", "1", "--gpus-per-node", "4", "--too-large", "reject"),
            "mine.csv: row 2, job 'b': requests 8 GPUs, more than the 4 of cluster",
        ),
        (("--workload", "broken.csv"), "broken.csv: row 2, column 'steps': found 'many'"),
        (("--workload", "empty.csv"), "empty.csv"),
        (("--workload", "mine.csv", "--format", "philly"), "mine.csv: line 1, column 1: no JSON"),
        (("--workload", "mine.csv", "--format", "easyscale"), "expected --epoch-time"),
        (("--format", "philly"), "naive: no such file"),
        (("--cluster", "dgx"), "unknown cluster 'dgx'"),
        (("--cluster", "p3dn-64", "--steering", "requests"), "expected a800-64, or exact predictions"),
        (("--delay", "-1"), "Invalid value for '--delay'"),
        (("--delay", "nan"), "Invalid value for '--delay': 'nan'"),
        (("--interval", "inf"), "Invalid value for '--interval': 'inf'"),
        (("--interval", "1e-300"), "interval_s is 1e-300; expected a time in s, 1e-06 or more"),
        (("--nodes", "0"), "Invalid value for '--nodes'"),
        (("--output", "mine.csv"), "--output mine.csv: expected a directory"),
        (("--output", "mine.csv/sub"), "is no directory that can be written to"),
    ],
)
def test_mistakes_give_one_message_and_leave_nothing(
    arguments: tuple[str, ...], message: str, tmp_path: Path, job_list: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MAKESPAN_PUBLISHED_DIR", raising=False)
    rows = job_list.read_text(encoding="utf-8").splitlines()
    large = replace(JOBS_LIST[0], n_gpus=64)
    write_csv(jobs_table([large]), tmp_path / "large.csv", JOBS)
    broken = [*rows[:2], rows[2].replace("9000", "many")]
    (tmp_path / "broken.csv").write_text("\n".join(broken) + "\n", encoding="utf-8")
    unlisted = [rows[0], rows[1].replace(JOBS_LIST[0].workload, "unlisted")]
    (tmp_path / "unlisted.csv").write_text("\n".join(unlisted) + "\n", encoding="utf-8")
    (tmp_path / "empty.csv").write_text("", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    result = run("simulate", "--output", "out", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failure_in_the_second_table_leaves_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(frame, path, schema) -> None:
        if schema is OUTCOMES:
            raise OSError(28, "No space left on device", str(path))
        path.write_text("half", encoding="utf-8")

    monkeypatch.setattr("makespan.tables.write_csv", broken)
    result = run("simulate", "--output", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "No space left on device" in result.output
    assert not (tmp_path / "out").exists()


# --- published files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("throughput/roberta/placements.csv", b"\n", b"\r\n"),
        ("throughput/bert/placements.csv", b"0.", b"1."),
        ("workloads/naive.csv", b"1", b"2"),
    ],
)
def test_published_files_are_those_of_the_register(
    file: str, before: bytes, after: bytes, published_dir: Path, tmp_path: Path
) -> None:
    for folder in ("throughput", "workloads"):
        shutil.copytree(published_dir / "morphling" / folder, tmp_path / folder)
    options = ("--source", "published", "--published-dir", str(tmp_path), "--quiet")
    assert run("simulate", *options).exit_code == 0
    changed = tmp_path / file
    changed.chmod(0o644)
    changed.write_bytes(changed.read_bytes().replace(before, after, 1 if before != b"\n" else -1))
    for verb in (("simulate",), ("compare", "--policies", "fifo")):
        result = run(*verb, *options)
        assert result.exit_code == 2
        assert f"{changed}: data set 'morphling-" in result.output and "has sha256" in result.output


def test_a_published_trace_under_another_name_is_held_against_the_register(
    published_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(published_dir / "morphling", tmp_path / "morphling")
    traces = tmp_path / "morphling" / "throughput"
    (traces / "bert").rename(traces / "bert-large")
    changed = traces / "bert-large" / "placements.csv"
    changed.chmod(0o644)
    changed.write_bytes(changed.read_bytes().replace(b"0.", b"1.", 1))
    options = ("--source", "published", "--published-dir", str(tmp_path), "--quiet")
    result = run("simulate", *options)
    assert result.exit_code == 2 and "data set 'morphling-throughput-bert' has sha256" in result.output


# --- the view -----------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def base():
    return scenario(workload="base", source="emulated")


def watch(scenario, stream, pace_s: float = 0.0, policy: str = "fifo") -> LiveView:
    live = LiveView("title", scenario.jobs, stream, pace_s)
    options = {"restart_delay_s": 78.0, "observers": [live]}
    simulate(scenario.jobs, scenario.cluster, scenario.catalogue, REGISTRY[policy], **options)
    live.close()
    return live


def test_lines_are_few_whatever_the_number_of_jobs(base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_view, "_HEARTBEAT_S", math.inf)  # none comes because the machine is slow
    stream = io.StringIO()
    watch(base, stream)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "title" and lines[1].split()[:3] == ["time", "done", "waiting"]
    assert 10 <= len(lines[2:]) <= 21
    done = [int(line.split()[1].split("/")[0]) for line in lines[2:]]
    assert done == sorted(done) and done[-1] > 350


def test_without_progress_a_line_still_comes_now_and_then(base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_view, "_HEARTBEAT_S", 0.0)
    stream = io.StringIO()
    watch(base, stream)
    assert len(stream.getvalue().splitlines()) > 200


def test_frames_replace_each_other_and_the_cursor_comes_back(base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(_view, "_FRAME_S", 0.0)
    stream = Terminal()
    watch(base, stream)
    frames = stream.getvalue().split("\x1b[J")
    assert frames[0].startswith("\x1b[?25l")
    assert stream.getvalue().endswith("\x1b[J\x1b[?25h")
    for before, after in pairwise(frames[:-1]):
        assert after.startswith(f"\x1b[{before.count(chr(10))}F")
    widths = {len(line.removesuffix("\x1b[K")) for frame in frames for line in frame.splitlines()}
    assert max(widths) <= 80
    full = next(frame for frame in frames if "64/64 in use" in frame)
    assert "[####################]" in full and "since" in full


def test_a_frame_says_who_is_a_guest_and_how_fast(base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(_view, "_FRAME_S", 0.0)
    stream = Terminal()
    monkeypatch.setattr("makespan.cli.progress._LINES", 200)
    watch(base, stream, policy="antman")
    assert re.search(r"guest at \d+%\x1b", stream.getvalue())
    assert max(len(line.removesuffix("\x1b[K")) for line in stream.getvalue().splitlines()) <= 80


def test_frames_keep_a_distance_in_time(base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(_view, "_FRAME_S", 3600.0)
    stream = Terminal()
    watch(base, stream)
    assert stream.getvalue().count("\x1b[J") == 2  # one frame, and its removal


def test_a_pace_slows_a_short_run_down_and_is_not_counted(base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    passed_s = [0.0]
    clock = SimpleNamespace(
        perf_counter=lambda: passed_s[0], sleep=lambda wait_s: passed_s.append(passed_s.pop() + wait_s)
    )
    monkeypatch.setattr(_view, "time", clock)
    scenario = replace(base, jobs=base.jobs[:10])
    live = watch(scenario, Terminal(), pace_s=500.0)
    assert live.spent_s == passed_s[0]
    assert 400.0 < passed_s[0] <= 500.0


def test_a_dumb_terminal_gets_lines(base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    watch(base, stream)
    assert "\x1b" not in stream.getvalue()


def test_a_failing_run_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(LiveView, "close", lambda self: closed.append(True))
    monkeypatch.setattr("makespan.studies.run", lambda *given: [][0])
    result = run("simulate")
    assert isinstance(result.exception, IndexError) and closed == [True]


# --- names that could steer a terminal ----------------------------------------------------------

HOSTILE = "\x1b[2J\x1b]0;title\x07\u202e"


@pytest.mark.parametrize("verb", ["simulate", "compare"])
def test_names_in_a_job_list_are_printed_harmlessly(verb: str, tmp_path: Path) -> None:
    jobs = [replace(job, job_id=f"{job.job_id}{HOSTILE}\nx", tenant=HOSTILE) for job in JOBS_LIST]
    path = tmp_path / f"a{HOSTILE}.csv"
    write_csv(jobs_table(jobs), path, JOBS)
    result = run(verb, "--workload", str(path))
    assert result.exit_code == 0, result.output
    assert "\\x1b[2J\\x1b]0;title" in result.output
    assert all(character.isprintable() or character == "\n" for character in result.output)
    write_csv(jobs_table([jobs[0], jobs[0]]), path, JOBS)
    twice = run(verb, "--workload", str(path))
    assert twice.exit_code == 2 and len(twice.output.splitlines()) == 1
    assert twice.output.rstrip("\n").isprintable()


def test_frames_show_hostile_names_as_escapes(base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(_view, "_FRAME_S", 0.0)
    jobs = tuple(replace(job, job_id=f"{HOSTILE}\n{job.job_id}") for job in base.jobs[:10])
    stream = Terminal()
    watch(replace(base, jobs=jobs), stream)
    shown = stream.getvalue()
    assert "\\x1b[2J" in shown and "\x1b[2J" not in shown and "\x07" not in shown and "\n\\x1b" in shown
