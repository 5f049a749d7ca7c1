"""Requests of job lists: honoured, priced on demand, rejected with row and reason, or reported."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner, Result

from makespan.cli import main
from makespan.emulator import emulate, read_point, trace_points
from makespan.errors import InfeasiblePlanError, InputError, TraceError
from makespan.hardware import cluster
from makespan.sim import check_jobs
from makespan.studies import run, scenario
from makespan.tables import EVENTS, JOBS, ON_DEMAND, OUTCOMES, THROUGHPUT, read_csv, write_csv
from makespan.traces import jobs_table, read_jobs
from makespan.workloads import JobSpec, workload

WHERE = cluster("a800-64")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def job(plan: str, model: str = "roberta", n_gpus: int = 8, **changes: object) -> JobSpec:
    given = {"job_id": "a", "submit_time_s": 0.0, "n_cpus": 8 * n_gpus, "steps": 50}
    return JobSpec(**{"workload": model, "n_gpus": n_gpus, "plan": plan, **given, **changes})  # type: ignore[arg-type]


def measured_dir(folder: Path, *plans: str, threads: int = 8) -> Path:
    """Write a table of roberta on 8 GPUs that holds the given plans alone."""
    frame = emulate(workload("roberta"), trace_points(workload("roberta"), WHERE), WHERE)
    kept = frame[frame["exec_plan"].isin(plans) & (frame["placement"].isin(["8", "44"]))]
    write_csv(kept.assign(provenance="measured", cpu_threads=threads), folder / "roberta.csv", THROUGHPUT)
    return folder


# --- a plan that the tables lack ----------------------------------------------------------------

LACKING = [
    ("gc+a4", "roberta", 8),
    ("zero-dp+zero3", "bert", 4),
    ("zero-dp+zero1", "bert", 8),
    ("ga+gc0.5", "roberta", 8),
    ("gc+selective", "roberta", 8),
    ("1-2-4+sp+zero1", "gpt2", 8),
    ("2-1-4+interleaved2", "gpt2", 8),
    ("2-2-2+gpipe", "gpt2", 8),
    ("2-2-2+layers20-28", "gpt2", 8),
    ("1-2-4", "roberta", 8),  # a family that the tables of this model lack
    ("ga", "bert", 32),  # GPUs that they lack
]


@pytest.mark.parametrize(("plan", "model", "n_gpus"), LACKING)
def test_a_plan_that_the_tables_lack_runs_as_requested_at_the_price_of_the_emulator(plan, model, n_gpus):
    plan = plan.replace("gc+selective", "ga+selective")
    found = scenario([job(plan, model, n_gpus)])
    done = run(found, "fifo")
    done.check()
    text = found.jobs[0].plan
    started = done.result.events[done.result.events["kind"] == "started"].iloc[0]
    place = started["nodes"].split()
    assert started["plan"] == text and started["n_gpus"] == n_gpus
    shares = sorted(int(share.split(":")[1]) for share in place)
    point = read_point(
        workload(model), text, "-".join(map(str, shares)) if len(shares) > 1 else f"{n_gpus}", 8
    )
    exact = emulate(workload(model), [point], WHERE, seed=0, noise=1.0)
    assert started["iter_time_s"] == exact["iter_time_s"].iloc[0]
    outcome = done.result.outcomes.iloc[0]
    assert (outcome["plan"], outcome["reference_plan"]) == (text, text)
    assert outcome["reference_provenance"] == ON_DEMAND
    assert "priced 1 job" in found.report and f"{text} of {model} on {n_gpus} GPUs" in found.report
    assert "(emulated)" in found.title


def test_a_plan_that_cannot_run_is_rejected_with_row_and_reason(tmp_path):
    rows = [job("ga"), job("1-1-8+gc", "llama7", job_id="b", submit_time_s=5.0)]
    write_csv(jobs_table(rows), tmp_path / "mine.csv", JOBS)
    result = invoke("simulate", "--workload", str(tmp_path / "mine.csv"), "--output", str(tmp_path / "out"))
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    assert "mine.csv: row 2, job 'b', on cluster 'a800-64': plan '118+gc' of 'llama7'" in result.output
    assert "GB on a device of 80.0 GB" in result.output and len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("plan", "model", "n_gpus", "reason"),
    [
        ("ga", "bert", 3, "cannot be split over 3 replicas"),
        ("ga+a16", "roberta", 8, "cannot be split over 8 replicas in 16 passes"),
        ("2-1-4+layers1-2", "gpt2", 8, "does not add up to the 48 layers"),
        ("1-2-2", "gpt2", 8, "4 GPUs, but the placement has 8"),
        ("ga+cpu4", "roberta", 8, "states 4 CPU threads per GPU, but the job requests 64"),
    ],
)
def test_a_plan_that_contradicts_its_job_is_rejected(plan, model, n_gpus, reason):
    with pytest.raises(InputError, match="row 1, job 'a'") as caught:
        scenario([job(plan, model, n_gpus)])
    assert reason in str(caught.value)


def test_a_file_names_the_row_and_not_the_place_after_sorting(tmp_path):
    rows = [job("ga", job_id="late", submit_time_s=9.0), job("118", "llama7", job_id="early")]
    write_csv(jobs_table(rows), tmp_path / "mine.csv", JOBS)
    with pytest.raises(InfeasiblePlanError, match="row 2, job 'early'"):
        scenario(tmp_path / "mine.csv")


@pytest.mark.parametrize("text", ["ga+gc", "gc", " GC+zero0 "])
def test_two_spellings_of_a_plan_are_one_request(text):
    found = scenario([job(text)])
    assert found.jobs[0].plan == "gc" and "priced" not in found.report
    assert run(found, "fifo").result.outcomes["reference_plan"].tolist() == ["gc"]
    check_jobs([job(text)], WHERE, found.catalogue.on(WHERE))
    assert found.catalogue.requested(job(text)).plan == "gc"


def test_what_one_job_requests_changes_no_time_that_policies_believe_of_others():
    usual, further = scenario([job("ga")]), scenario([job("ga"), job("gc+a4", job_id="b")])
    rows = {item.key: item for item in further.catalogue.all("roberta")}
    common = [item for item in usual.catalogue.all("roberta") if item.key in rows]
    assert len(common) == len(usual.catalogue.all("roberta")) < len(rows)
    for item in common:
        same = rows[item.key]
        assert (item.iter_time_s, item.predicted_iter_time_s) == (
            same.iter_time_s,
            same.predicted_iter_time_s,
        )
    added = [item for item in rows.values() if item.provenance == ON_DEMAND]
    assert added and all(not item.is_known and item.predicted_iter_time_s > 0 for item in added)


def test_a_scenario_without_such_requests_has_the_tables_as_they_are():
    found = scenario([job("ga"), job("zero-offload", job_id="b")])
    assert {item.provenance for item in found.catalogue.all("roberta")} == {"emulated"}
    assert found.report.count("\n") == 0


# --- tables that are all there is ---------------------------------------------------------------


def test_where_tables_are_all_there_is_the_fastest_measured_plan_stands_in_and_is_reported(tmp_path):
    folder = measured_dir(tmp_path, "ga", "zero-dp")
    found = scenario([job("gc"), job("ga", job_id="b")], source="measured", measured_dir=folder)
    outcomes = run(found, "fifo").result.outcomes.set_index("job_id")
    frame = read_csv(folder / "roberta.csv", THROUGHPUT)
    fastest = frame.loc[frame["iter_time_s"].idxmin(), "exec_plan"]
    assert outcomes.loc["a", ["plan", "reference_plan"]].tolist() == ["gc", fastest]
    assert outcomes.loc["b", ["plan", "reference_plan"]].tolist() == ["ga", "ga"]
    assert set(outcomes["reference_provenance"]) == {"measured"}
    assert "replaced 1 job: their plan was not measured" in found.report
    assert f"row 1, job a: gc of roberta on 8 GPUs -> {fastest}" in found.report
    with pytest.raises(
        InputError, match=r"row 1, job 'a'.*no throughput of 'roberta' on 4 GPUs; expected one of 8"
    ):
        scenario([job("ga", n_gpus=4)], source="measured", measured_dir=folder)


def test_other_cpu_threads_than_measured_are_reported_and_are_a_column(tmp_path):
    folder = measured_dir(tmp_path, "ga", "zero-offload", threads=6)
    jobs = [
        job("ga", n_cpus=16),
        job("zero-offload", job_id="b", n_cpus=80),
        job("ga", job_id="c", n_cpus=48),
    ]
    found = scenario(jobs, source="measured", measured_dir=folder)
    assert (
        "replaced 1 job: they request fewer CPU threads" in found.report and "job a: 2 -> 6" in found.report
    )
    assert (
        "replaced 1 job: they request more CPU threads" in found.report and "job b: 10 -> 6" in found.report
    )
    assert "job c" not in found.report
    assert run(found, "fifo").result.outcomes["reference_cpu_threads"].tolist() == [6, 6, 6]


def test_fewer_cpu_threads_than_gpus_are_reported(tmp_path):
    jobs = [job("ga", n_cpus=3), job("zero-offload", job_id="b", n_cpus=7), job("ga", job_id="c", n_cpus=0)]
    folder = measured_dir(tmp_path, "ga", "zero-offload", threads=6)
    for found in (scenario(jobs), scenario(jobs, source="measured", measured_dir=folder)):
        taken = run(found, "fifo").result.outcomes["reference_cpu_threads"].tolist()
        assert "replaced 2 jobs: they request fewer CPU threads than GPUs" in found.report
        assert f"row 1, job a: 3 for 8 GPUs -> {taken[0]} per GPU" in found.report
        assert f"row 2, job b: 7 for 8 GPUs -> {taken[1]} per GPU" in found.report
        assert "job c" not in found.report
    assert "CPU threads than" not in scenario("base", n_jobs=5).report


def test_other_cpu_threads_are_reported_where_the_times_depend_on_them(tmp_path):
    folder = measured_dir(tmp_path, "ga", threads=8)
    rows = read_csv(folder / "roberta.csv", THROUGHPUT)
    asked = [job("ga", job_id=f"j{count}", n_cpus=n_cpus) for count, n_cpus in enumerate((48, 0, 96, 32, 64))]
    for factor in (1.5, 1.0):
        slow = rows.assign(cpu_threads=4, iter_time_s=factor * rows["iter_time_s"])
        write_csv(pd.concat([rows, slow], ignore_index=True), folder / "roberta.csv", THROUGHPUT)
        found = scenario(asked, source="measured", measured_dir=folder)
        threads = run(found, "fifo").result.outcomes["reference_cpu_threads"].tolist()
        assert threads == [4, 4, 8, 4, 8]
        if factor == 1.0:  # both numbers are equally fast
            assert "replaced" not in found.report
            continue
        assert "replaced 1 job: the tables lack their CPU threads per GPU; the next fewer" in found.report
        assert "job j0: 6 -> 4 for ga of roberta on 8 GPUs" in found.report
        assert "replaced 1 job: they request no CPU threads" in found.report
        assert "job j1: none for 8 GPUs -> 4 per GPU" in found.report
        assert "replaced 1 job: they request more CPU threads" in found.report
        assert "job j2: 12 -> 8 for ga" in found.report
        assert "job j3" not in found.report and "job j4" not in found.report


def test_the_emulator_prices_cpu_threads_that_matter():
    jobs = [job("zero-offload", "llama7", job_id=f"j{n}", n_cpus=n * 8) for n in (2, 8, 12)]
    found = scenario(jobs)
    outcomes = run(found, "fifo").result.outcomes
    assert outcomes["reference_cpu_threads"].tolist() == [2, 8, 12]
    slow, usual, fast = outcomes["reference_iter_time_s"]
    assert slow > 1.5 * usual and usual > fast
    assert "priced 2 jobs" in found.report


def test_cpu_threads_in_the_plan_alone_are_a_request(tmp_path):
    write_csv(jobs_table([job("zero-offload+cpu2", n_cpus=0)]), tmp_path / "mine.csv", JOBS)
    assert read_jobs(tmp_path / "mine.csv").jobs[0].plan == "zero-offload+cpu2"
    found = scenario(tmp_path / "mine.csv")
    assert (found.jobs[0].plan, found.jobs[0].n_cpus) == ("zero-offload", 16)
    assert run(found, "fifo").result.outcomes["reference_cpu_threads"].tolist() == [2]
    write_csv(jobs_table([job("zero-offload+cpu2")]), tmp_path / "two.csv", JOBS)
    with pytest.raises(TraceError, match=r"row 1, column 'plan'.*the row requests 64 CPU threads for 8 GPU"):
        read_jobs(tmp_path / "two.csv")


@pytest.mark.parametrize("steps", ["0", "-1"])
def test_a_job_without_steps_is_rejected_by_row(steps, tmp_path):
    write_csv(jobs_table([job("ga")]), tmp_path / "mine.csv", JOBS)
    text = (tmp_path / "mine.csv").read_text(encoding="utf-8").replace(",50,", f",{steps},")
    (tmp_path / "mine.csv").write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=r"mine.csv: row 1, column 'steps'"):
        read_jobs(tmp_path / "mine.csv")


# --- drawn plans ----------------------------------------------------------------------------------


def test_drawn_plans_that_cannot_run_give_way_and_are_reported():
    found = scenario("base", n_jobs=60, cluster_name="p3dn-64")
    assert "their plan was drawn and cannot run here" in found.report
    for item in found.jobs:
        assert found.catalogue.on(found.cluster).requested(item).plan == item.plan


def test_the_first_of_many_replacements_are_shown_and_all_are_counted(tmp_path):
    folder = measured_dir(tmp_path, "ga")
    found = scenario([job("gc", job_id=f"j{n}") for n in range(9)], source="measured", measured_dir=folder)
    line = next(line for line in found.report.splitlines() if "replaced" in line)
    assert "replaced 9 jobs" in line and line.count("row ") == 3 and line.endswith("; ...)")


# --- durations or work ------------------------------------------------------------------------------

HELIOS = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"


def helios(folder: Path, *gpus: int) -> Path:
    day = "2020-05-01"
    rows = []
    for n, count in enumerate(gpus):
        submit, end = f"{day} 00:{n:02}:00", f"{day} 01:{n:02}:00"
        rows.append(f"{n},u,vc,{count},{8 * count},1,COMPLETED,{submit},{submit},{end},3600,0")
    path = folder / "trace.csv"
    path.write_text(HELIOS + "\n".join(rows) + "\n", encoding="utf-8")
    return path


def alone_s(found) -> pd.Series:
    """Return how long each job takes as requested, without restarts [s]."""
    times = [
        found.catalogue.on(found.cluster).requested(item).iter_time_s * item.steps for item in found.jobs
    ]
    return pd.Series(times, [item.job_id for item in found.jobs])


def test_a_foreign_list_keeps_durations_or_work_as_chosen_and_the_title_says_which(tmp_path):
    path = helios(tmp_path, 2, 4, 8)
    lists = {name: scenario(path, file_format="helios", cluster_name=name) for name in ("a800-64", "h200-64")}
    for found in lists.values():
        assert found.title.endswith(", durations kept")
        assert alone_s(found).tolist() == pytest.approx([3600.0] * 3, rel=0.01)
    options = {"file_format": "helios", "keep": "work", "recorded_on": "a800-64"}
    slow, fast = (scenario(path, cluster_name=name, **options) for name in ("a800-64", "h200-64"))
    assert slow.title.endswith(", work on a800-64 kept") and fast.title.endswith(", work on a800-64 kept")
    assert [(item.workload, item.plan, item.steps) for item in slow.jobs] == [
        (item.workload, item.plan, item.steps) for item in fast.jobs
    ]
    assert alone_s(slow).tolist() == pytest.approx([3600.0] * 3, rel=0.01)
    assert (alone_s(fast) < 0.8 * alone_s(slow)).all()


def test_jobs_of_models_that_no_plan_trains_here_are_left_out_if_drawn_and_else_refused_by_row():
    found = scenario("base", n_jobs=40, cluster_name="t4-64", keep="work")
    assert found.jobs and "llama30" not in {item.workload for item in found.jobs}
    assert "no plan can run here on as many GPUs (row" in found.report
    jobs = [job("ga", n_cpus=8), job("1-4-2", "llama30", job_id="b", n_cpus=8)]
    with pytest.raises(
        InputError, match=r"row 2, job 'b', on cluster 't4-64': .*'llama30' on 8 GPUs cannot run"
    ):
        scenario(jobs, cluster_name="t4-64")


def test_a_generated_list_keeps_its_work_on_another_cluster():
    here = scenario("base", n_jobs=30)
    there = scenario("base", n_jobs=30, cluster_name="h200-64", keep="work")
    assert there.title.endswith(", work on a800-64 kept") and here.title.endswith(", durations kept")
    assert there.jobs == here.jobs
    kept = scenario("base", n_jobs=30, cluster_name="h200-64")
    assert [item.duration_s for item in kept.jobs] == [item.duration_s for item in here.jobs]
    assert kept.jobs != here.jobs


def test_a_list_that_states_steps_keeps_them_or_its_durations(tmp_path):
    write_csv(jobs_table([job("ga", duration_s=7200.0)]), tmp_path / "mine.csv", JOBS)
    usual = scenario(tmp_path / "mine.csv", cluster_name="h200-64")
    assert usual.jobs[0].steps == 50 and usual.title.endswith(", steps kept")
    kept = scenario(tmp_path / "mine.csv", cluster_name="h200-64", keep="durations")
    assert alone_s(kept).tolist() == pytest.approx([7200.0], rel=0.01)
    assert kept.title.endswith(", durations kept")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "durations"}, "row 1, job 'a': no duration to keep"),
        ({"keep": "work", "recorded_on": "t4-64"}, "the list states steps"),
        ({"recorded_on": "t4-64"}, "expected keep 'work' with it"),
        ({"keep": "both"}, "unknown keep 'both'"),
        ({"too_large": "shrink"}, "unknown too_large 'shrink'"),
    ],
)
def test_a_choice_that_a_list_cannot_meet_is_rejected(options, message):
    with pytest.raises(InputError) as caught:
        scenario([job("ga")], **options)
    assert message in str(caught.value)


def test_work_of_a_foreign_list_needs_the_cluster_of_its_durations(tmp_path):
    path = helios(tmp_path, 2)
    with pytest.raises(InputError, match=r"give recorded_on .* a800-64"):
        scenario(path, file_format="helios", keep="work")
    with pytest.raises(InputError, match="several kinds of node"):
        scenario(path, file_format="helios", keep="work", recorded_on="v100-p100-t4-64")


# --- jobs too large -----------------------------------------------------------------------------------


def test_lists_of_all_kinds_leave_out_jobs_that_are_too_large_and_say_so(tmp_path):
    write_csv(jobs_table([job("ga"), job("zero-dp", n_gpus=2, job_id="b")]), tmp_path / "mine.csv", JOBS)
    small = {"n_nodes": 1, "gpus_per_node": 4}
    stated = scenario(tmp_path / "mine.csv", **small)
    assert [item.job_id for item in stated.jobs] == ["b"]
    assert "dropped 1 job" in stated.report and "row 1, job a: 8 GPUs, more than the 4" in stated.report
    foreign = scenario(helios(tmp_path, 2, 8), file_format="helios", **small)
    assert len(foreign.jobs) == 1 and "dropped 1 row" in foreign.report
    generated = scenario("base", n_jobs=20, **small)
    assert max(item.n_gpus for item in generated.jobs) <= 4 and "without what cannot run" in generated.report
    listed = scenario([job("ga"), job("zero-dp", n_gpus=2, job_id="b")], **small)
    assert [item.job_id for item in listed.jobs] == ["b"]


@pytest.mark.parametrize("file_format", ["auto", "helios"])
def test_jobs_that_are_too_large_are_rejected_on_request(file_format, tmp_path):
    write_csv(jobs_table([job("ga")]), tmp_path / "mine.csv", JOBS)
    path = tmp_path / "mine.csv" if file_format == "auto" else helios(tmp_path, 8)
    options = {"n_nodes": 1, "gpus_per_node": 4, "too_large": "reject", "file_format": file_format}
    with pytest.raises(InputError, match="requests 8 GPUs, more than the 4"):
        scenario(path, **options)


def test_a_foreign_list_runs_where_some_models_cannot(tmp_path):
    found = scenario(helios(tmp_path, 8, 2, 24), file_format="helios", cluster_name="t4-64")
    assert len(found.jobs) == 3 and "models are drawn without what cannot run here" in found.report


def test_cpu_threads_are_checked_against_the_nodes_that_a_job_can_use():
    where = scenario([job("ga")]).cluster
    assert (where.max_cpu_threads(1), where.max_cpu_threads(3), where.max_cpu_threads(99)) == (96, 288, 768)
    found = scenario([job("ga", n_gpus=1, n_cpus=97), job("ga", n_gpus=2, n_cpus=97, job_id="b")])
    assert [item.job_id for item in found.jobs] == ["b"]
    assert "97 CPU threads for 1 GPU(s) on 1 node(s), more than the 96" in found.report


def test_both_verbs_print_what_was_replaced_and_the_table_has_it(tmp_path):
    write_csv(jobs_table([job("gc+a4")]), tmp_path / "mine.csv", JOBS)
    options = ("--workload", str(tmp_path / "mine.csv"), "--quiet")
    result = invoke("simulate", *options, "--policy", "fifo", "--output", str(tmp_path / "out"))
    assert result.exit_code == 0 and "priced 1 job" in result.output and ", steps kept" in result.output
    outcomes = read_csv(tmp_path / "out" / "outcomes.csv", OUTCOMES)
    assert outcomes["reference_provenance"].tolist() == [ON_DEMAND]
    assert "gc+a4" in read_csv(tmp_path / "out" / "events.csv", EVENTS)["plan"].tolist()
    compared = invoke("compare", *options, "--policies", "fifo,sjf")
    assert compared.exit_code == 0 and "priced 1 job" in compared.output and "steps kept" in compared.output


@pytest.mark.parametrize("policy", ["morphling-work", "sia", "synergy", "antman", "gavel"])
def test_policies_schedule_jobs_whose_plans_are_priced_on_demand(policy):
    jobs = [job("gc+a4"), job("2-1-4+interleaved2", "gpt2", job_id="b"), job("zero-dp", n_gpus=4, job_id="c")]
    done = run(scenario([replace(item, steps=2000) for item in jobs]), policy)
    assert done.violations == () and len(done.result.outcomes) == 3


def test_a_list_with_fewer_jobs_than_asked_for_and_tenants_are_reported(tmp_path):
    path = tmp_path / "jobs.csv"
    rows = "".join(f"{name},0,roberta,8,64,ga,50,false,{who}\n" for name, who in (("a", "x"), ("b", "")))
    path.write_text(f"job_id,submit_time_s,workload,n_gpus,n_cpus,plan,steps,is_guaranteed,tenant\n{rows}")
    found = scenario(path, n_jobs=10)
    assert len(found.jobs) == 2 and "10 jobs are asked for; the list has 2, which all run" in found.report
    assert "ignored: tenants have no effect, as there are no quotas" in found.report
    assert "asked for" not in scenario(path, n_jobs=2).report
    path.write_text(path.read_text().replace(",x\n", ",\n"))
    assert "tenants" not in scenario(path, n_jobs=1).report
    assert "5 jobs are asked for" in scenario([job("ga")], n_jobs=5).report
