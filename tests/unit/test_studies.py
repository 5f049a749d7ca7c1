"""Studies: scenarios, the pool that runs them, comparisons and intervals."""

import inspect
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace

import click
import numpy as np
import pandas as pd
import pytest
from toy_cluster import throughput_rows, toy_catalogue, toy_job, toy_nodes

from makespan.cli import main
from makespan.config import load_settings
from makespan.emulator import emulate, load_calibration, trace_points
from makespan.errors import MakespanError, UnknownNameError
from makespan.hardware import cluster
from makespan.numerics import intervals
from makespan.papers.experiment import Given
from makespan.policies import REGISTRY
from makespan.sim import RestartDelays, Violation
from makespan.studies import (
    ImpossibleScheduleError,
    RunError,
    Scenario,
    SimulationSpec,
    TableCatalogue,
    comparison,
    predicted_catalogue,
    predictions,
    run,
    run_all,
    runs as _pool,
    runs as _runs,
    scenario,
)
from makespan.tables import COMPARISON, JOBS, write_csv
from makespan.traces import listed_jobs, read_jobs
from makespan.workloads import JobSpec, workload


@pytest.fixture
def toys():
    jobs = tuple(toy_job(f"job-{number}", 10.0 * number, steps=40) for number in range(6))
    return Scenario("toys", jobs, toy_nodes(2, 4), toy_catalogue(), 5.0, 0.0)


def ended(patience_s=3600.0):
    """Wait until no process is left."""
    until = time.monotonic() + patience_s
    while multiprocessing.active_children() and time.monotonic() < until:
        time.sleep(0.05)
    return not multiprocessing.active_children()


def test_a_title_names_scenario_source_and_size(toys):
    assert toys.title == "toys, 6 jobs on 2 x 4 GPUs"
    assert replace(toys, source="emulated").title == "toys (emulated), 6 jobs on 2 x 4 GPUs"


def test_runs_come_in_order_whatever_the_processes_and_progress_tells_of_each(toys):
    cases = [SimulationSpec(toys, name, repeats=1) for name in ("fifo", "sjf", "morphling-lookahead")]
    found = []
    for processes in (1, 2):
        told = []
        runs = run_all(
            cases, processes, progress=lambda shares, done, to=told: to.append((list(shares), list(done)))
        )
        assert [item.policy for item in runs] == ["fifo", "sjf", "morphling-lookahead"]
        assert all(item.n_identical == 1 and item.result.events.empty and item.n_events > 6 for item in runs)
        assert told[-1][0] == [1.0, 1.0, 1.0]
        assert [item.policy for item in told[-1][1]] == ["fifo", "sjf", "morphling-lookahead"]
        found.append([repr(item.metrics) for item in runs])
    assert found[0] == found[1]
    assert len(told) >= 1 and ended()
    assert not run_all([SimulationSpec(toys, "fifo", keeps_tables=True)])[0].result.events.empty


def test_a_policy_may_be_given_by_name_or_as_it_is(toys):
    @dataclass(frozen=True)
    class Own:
        """FIFO under a name of its own, which no registry knows."""

        name: str = "own"

        def __getattr__(self, name):
            return getattr(REGISTRY["fifo"], name)

    own, fifo = run_all([SimulationSpec(toys, Own()), SimulationSpec(toys, "fifo")], 2)
    assert own.policy == "own" and repr(own.metrics) == repr(fifo.metrics)


def test_a_restart_may_cost_what_the_kind_of_change_says(toys):
    first_only = run(
        replace(toys, restart_delay_s=RestartDelays.first_start_only(5.0)), "morphling-lookahead"
    )
    always, never = (
        run(replace(toys, restart_delay_s=delay_s), "morphling-lookahead") for delay_s in (5.0, 0.0)
    )
    assert first_only.violations == () and first_only.restart_delay_s == 5.0
    assert never.metrics.avg_jct_s < first_only.metrics.avg_jct_s <= always.metrics.avg_jct_s


def test_unknown_policies_are_refused_before_anything_runs(toys, monkeypatch):
    monkeypatch.setattr(_runs, "simulate", None)
    with pytest.raises(UnknownNameError, match="magic"):
        run_all([SimulationSpec(toys, "fifo"), SimulationSpec(toys, "magic")])


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_names_policy_and_scenario_and_ends_the_other_processes(toys, processes):
    impossible = replace(toys, jobs=(*toys.jobs, toy_job("large", 0.0, n_gpus=64)))
    with pytest.raises(RunError, match=r"policy '(fifo|sjf|srtf)' on 'toys': .*64"):
        run_all([SimulationSpec(impossible, name) for name in ("fifo", "sjf", "srtf")], processes)
    assert ended()


@pytest.mark.parametrize("processes", [1, 2])
def test_an_impossible_schedule_is_an_error_unless_it_is_asked_for(toys, monkeypatch, processes):
    planted = Violation("capacity", 3.0, 7, "job-0", "node 0 gives 9 of 4 GPUs")
    monkeypatch.setattr("makespan.sim.engine.validate_schedule", lambda *_, **__: [planted])
    with pytest.raises(ImpossibleScheduleError, match=r"'fifo' on 'toys'.*1 violation.*capacity at 3.0 s"):
        run_all([SimulationSpec(toys, "fifo"), SimulationSpec(toys, "sjf")], processes)
    assert run_all([SimulationSpec(toys, "fifo")], is_strict=False)[0].violations == (planted,)
    assert run(toys, "fifo").violations == (planted,)


def test_a_killed_process_is_told_apart(toys):
    def kill(shares, done):
        for child in multiprocessing.active_children():
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)

    long = replace(toys, jobs=tuple(toy_job(f"job-{number}", float(number)) for number in range(3000)))
    with pytest.raises(RunError, match="was killed"):
        run_all([SimulationSpec(long, "fifo")] * 8, 2, progress=kill)
    assert ended()


def test_without_copies_of_this_process_everything_runs_in_turn_unless_it_may_be_imported(toys, monkeypatch):
    monkeypatch.setattr(_pool, "_CAN_COPY", False)
    monkeypatch.setattr(_pool, "_in_processes", lambda *_: ["processes"])
    cases = [SimulationSpec(toys, "fifo"), SimulationSpec(toys, "sjf")]
    assert [item.policy for item in run_all(cases, 2)] == ["fifo", "sjf"]
    assert run_all(cases, 2, can_spawn=True, is_strict=False) == ["processes"]


def test_ratios_compare_with_the_baseline_in_the_same_setting_only(toys):
    slow, fast = replace(toys, restart_delay_s=60.0), replace(toys, interval_s=None)
    runs = [run(scenario, name) for scenario in (toys, slow) for name in ("fifo", "sjf")]
    table = comparison([*runs, run(replace(fast, name="other"), "sjf")], "fifo")
    assert list(table)[: len(COMPARISON.names)] == list(COMPARISON.names)
    for first, second in ((0, 1), (2, 3)):
        assert table["jct_ratio"][first] == table["makespan_ratio"][first] == 1.0
        assert table["jct_ratio"][second] == table["avg_jct_s"][second] / table["avg_jct_s"][first]
    assert table.loc[4, ["jct_ratio", "makespan_ratio"]].isna().all()
    assert table["interval_s"].isna().all()
    assert table["p95_jct_s"].tolist()[:1] == [runs[0].metrics.p95_jct_s]
    assert table["avg_slowdown"].tolist()[:1] == [runs[0].metrics.avg_slowdown]


def test_an_interval_is_symmetric_in_logarithms_and_missing_for_a_single_row():
    rows = pd.DataFrame({"policy": ["a", "a", "b"], "x": 1.0, "time_s": [10.0, 40.0, 5.0]})
    table = intervals(rows, ["x", "policy"], ["time_s"]).set_index("policy")
    assert table["n"].tolist() == [2, 1]
    assert table.loc["a", "time_s_mean"] == pytest.approx(20.0)
    assert table.loc["a", "time_s_low"] * table.loc["a", "time_s_high"] == pytest.approx(400.0)
    quantile = 12.706204736  # of Student's t, one degree of freedom
    assert np.log(table.loc["a", "time_s_high"] / 20.0) == pytest.approx(quantile * np.log(4.0) / 2)
    assert np.isnan(table.loc["b", "time_s_low"]) and table.loc["b", "time_s_mean"] == pytest.approx(5.0)


JOB = JobSpec("a", 0.0, "vit", 2, 16, "zero-dp", 10)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([], "jobs: no jobs; expected at least one"),
        ([JOB, replace(JOB, submit_time_s=3.0)], "jobs: row 2: job name 'a' is that of row 1"),
        ([replace(JOB, n_gpus=65)], "jobs: every job requests more than cluster 'a800-64' has"),
        ([replace(JOB, n_cpus=10_000)], "10000 CPU threads for 2 GPU(s) on 2 node(s), more than the 192"),
        ([replace(JOB, workload="t5_4B")], "unknown model or workload 't5_4B'"),
        ([replace(JOB, n_gpus=48)], "jobs: row 1, job 'a', on cluster 'a800-64': execution plan 'zero-dp'"),
    ],
)
def test_jobs_that_cannot_run_are_refused_before_a_simulation(jobs, message):
    with pytest.raises(MakespanError) as caught:
        scenario(jobs)
    assert message in str(caught.value)


def test_a_scenario_of_jobs_has_a_catalogue_of_what_they_train():
    found = scenario([JOB], n_nodes=2, interval_s=0.0)
    assert (found.name, found.jobs, found.cluster.n_nodes) == ("jobs", (JOB,), 2)
    assert found.catalogue.workloads == ("vit",) and found.interval_s == 0.0
    assert found.report.startswith("jobs: ")


def test_published_files_are_found_by_the_environment_too(monkeypatch, published_dir):
    monkeypatch.setenv("MAKESPAN_PUBLISHED_DIR", str(published_dir))
    assert len(scenario("naive", source="published").jobs) == 10
    monkeypatch.setenv("MAKESPAN_PUBLISHED_DIR", "")
    with pytest.raises(MakespanError, match="expected a directory with the published files"):
        scenario("naive", source="published")
    monkeypatch.delenv("MAKESPAN_PUBLISHED_DIR")
    with pytest.raises(MakespanError, match="expected a directory with the published files"):
        scenario("naive", source="published")
    with pytest.raises(UnknownNameError, match="unknown source of throughput 'real'"):
        scenario("naive", source="real")


# --- one result, whoever asks -------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables_of_the_workflow(root):
    """Emulated iteration times as the stages of the workflow make them by the default configuration."""
    settings = load_settings([], root)
    emulated, where = settings.throughput.emulated, cluster(settings.cluster)
    constants = load_calibration(emulated.calibration)
    tables = {}
    for key in settings.morphling.simulation.workloads:
        spec = workload(key)
        points = trace_points(spec, where)
        tables[key] = emulate(spec, points, where, constants, seed=emulated.seed, noise=emulated.noise)
    return settings, tables


def test_a_scenario_without_options_is_that_of_the_workflow(tables_of_the_workflow, tmp_path):
    settings, tables = tables_of_the_workflow
    simulation = settings.morphling.simulation
    experiments, given = settings.morphling.experiments(settings), Given("emulated", times=tables)
    lists = experiments["generate_workloads"].run(given)
    jobs = {}
    for path, table in lists.items():
        name = path.removeprefix("workloads/")
        write_csv(table, tmp_path / f"{name}.csv", JOBS)
        jobs[name] = read_jobs(tmp_path / f"{name}.csv").jobs
        assert listed_jobs(table) == jobs[name]
    known = experiments["predictions"].run(given)["predictions"]
    for name in ("naive", "mt"):
        found = scenario(name)
        assert found.jobs == jobs[name]
        assert (found.interval_s, found.restart_delay_s) == (60.0, simulation.restart_delays_s[0])
        assert (found.interval_s, found.predictions) == (simulation.interval_s, simulation.predictions)
        catalogue = predicted_catalogue(tables, known, found.cluster.nodes[0])
        expected = run(replace(found, catalogue=catalogue), "morphling-lookahead").result.events
        pd.testing.assert_frame_equal(run(found, "morphling-lookahead").result.events, expected)


def test_the_command_line_and_the_library_have_the_same_defaults(monkeypatch):
    monkeypatch.delenv("MAKESPAN_PUBLISHED_DIR", raising=False)
    library = inspect.signature(scenario).parameters
    for verb in ("simulate", "compare"):
        command = main.get_command(click.Context(main), verb)
        parent = click.Context(main, **main.context_settings)
        options = command.make_context(verb, [], parent).params
        shared = library.keys() & options.keys()
        assert {"interval_s", "restart_delay_s", "predictions", "seed", "load", "workload"} <= shared
        assert {name: options[name] for name in shared} == {name: library[name].default for name in shared}


@pytest.mark.parametrize("name", ["naive", "base"])
def test_fewer_or_more_jobs_arrive_at_the_rate_of_the_whole_list(name):
    usual = scenario(name, predictions="exact")
    rate = (len(usual.jobs) - 1) / usual.jobs[-1].submit_time_s
    for n_jobs in (20, 900):
        jobs = scenario(name, n_jobs=n_jobs, predictions="exact").jobs
        assert len(jobs) == n_jobs
        assert n_jobs / jobs[-1].submit_time_s == pytest.approx(rate, rel=0.12)
        busy = sum(job.n_gpus * job.duration_s for job in jobs) / jobs[-1].submit_time_s
        whole = sum(job.n_gpus * job.duration_s for job in usual.jobs) / usual.jobs[-1].submit_time_s
        assert name == "naive" or busy == pytest.approx(whole, rel=0.15)


def test_a_load_divides_the_times_of_arrival_and_nothing_else():
    usual, faster = (scenario("naive", load=load, predictions="exact") for load in (1.0, 2.5))
    assert [job.submit_time_s * 2.5 for job in faster.jobs] == [job.submit_time_s for job in usual.jobs]
    assert [replace(job, submit_time_s=0.0) for job in faster.jobs] == [
        replace(job, submit_time_s=0.0) for job in usual.jobs
    ]
    for load in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(MakespanError, match="load factor"):
            scenario("naive", load=load)


def test_equal_tables_are_fitted_once(tables_of_the_workflow, monkeypatch):
    _, tables = tables_of_the_workflow
    few = {"vit": tables["vit"]}
    first = predictions(few, "a800-64", "extended")
    monkeypatch.setattr("makespan.studies.catalogue.Learner", None)
    again = predictions({"vit": tables["vit"].copy()}, "a800-64", "extended")
    pd.testing.assert_frame_equal(first, again)
    other = tables["vit"].assign(iter_time_s=tables["vit"]["iter_time_s"] * 2.0)
    with pytest.raises(AttributeError):
        predictions({"vit": other}, "a800-64", "extended")


def test_a_request_means_the_threads_that_it_names_or_the_most_below() -> None:
    catalogue = TableCatalogue.from_tables(
        throughput_rows("roberta", [("ga", "1", step_s), ("ga", "2", step_s / 2)], threads)
        for threads, step_s in ((2, 2.0), (4, 1.5), (16, 1.0))
    )
    for n_cpus, n_gpus, threads in ((4, 1, 4), (8, 1, 4), (1, 1, 2), (99, 1, 16), (8, 2, 4)):
        job = replace(toy_job("a", n_gpus=n_gpus), n_cpus=n_cpus)
        assert [item.cpu_threads for item in catalogue.as_requested(job)] == [threads]
