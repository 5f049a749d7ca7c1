"""Failures of nodes: files, generated ones, and what commands and scenarios make of them."""

import json
import logging
import os
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from toy_cluster import toy_nodes

import makespan
from makespan.cli import main
from makespan.errors import InputError, MissingDataError, TraceError, UnknownNameError
from makespan.sim import FailureModel, NodeEvent, NodeEventKind, Recovery, node_events
from makespan.tables import LOSSES, read_csv
from makespan.units import DAY
from makespan.workloads import JobSpec

WHERE = toy_nodes(4, 2)
HEAD = "time_s,node_id,kind\n"


def read(tmp_path, text):
    path = tmp_path / "failures.csv"
    path.write_text(text)
    return node_events(path, WHERE)


# --- files ----------------------------------------------------------------------------------------


def test_a_file_is_read_in_order_of_time_and_counted(tmp_path):
    events, text = read(tmp_path, HEAD + "50,1,joined\n7.5,1,failed\n0,2,joined\n")
    assert events == (
        NodeEvent(0.0, 2, NodeEventKind.JOINED),
        NodeEvent(7.5, 1, NodeEventKind.FAILED),
        NodeEvent(50.0, 1, NodeEventKind.JOINED),
    )
    assert text == f"failures: 1 failures, 2 other events, of 2 nodes, read from {tmp_path}/failures.csv"


def test_a_trace_in_the_form_of_oobleck_is_read(tmp_path):
    events, _ = read(tmp_path, "0,add,a\n0,add,b\n60000,remove,a\n90000,add,c\n")
    assert [(event.time_s, event.node_id, event.kind.value) for event in events] == [
        (0.0, 0, "joined"),
        (0.0, 1, "joined"),
        (60.0, 0, "failed"),
        (90.0, 0, "joined"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "5,0,failed\n6,x,failed\n", "row 2, column 'node_id': found 'x'"),
        (HEAD + "5,0,failed\n-1,1,failed\n", "row 2, column 'time_s': found '-1'"),
        (HEAD + "5,0,failed\n,1,failed\n", "row 2, column 'time_s': found ''"),
        (HEAD + "5,0,failed\n6,1,broke\n", "row 2, column 'kind': found 'broke'; expected failed, joined"),
        (HEAD + "5,0.5,failed\n", "row 1, column 'node_id': found '0.5'"),
        (HEAD + "5,4,failed\n", "row 1, column 'node_id': found 4; expected 0 to 3"),
        (HEAD + "9,0,failed\n5,0,failed\n", "row 1, column 'kind': found 'failed'; expected joined"),
        (HEAD + "5,0,failed\n9,0,joined\n9.5,0,joined\n", "row 3, column 'kind': found 'joined'"),
        ("time,node\n5,0\n", "columns time, node are no node events"),
        (HEAD, "no rows"),
    ],
)
def test_a_broken_file_is_rejected_with_row_and_column(tmp_path, text, message):
    with pytest.raises(TraceError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["-", "/dev/stdin", "pipe"])
def test_a_file_that_cannot_be_read_twice_is_rejected_before_it_is_read(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")  # nobody writes to it, so reading it would block
    with pytest.raises(TraceError, match=f"^{name}: is no regular file; expected node events in one"):
        node_events(name, WHERE)


def test_a_file_that_is_not_there_is_missing(tmp_path):
    with pytest.raises(MissingDataError, match="nowhere"):
        node_events(tmp_path / "nowhere.csv", WHERE)


# --- generated ------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_events_and_more_days_only_add_some():
    short, again = (FailureModel(20, seed=3, days=10).events(WHERE) for _ in range(2))
    long, other = (FailureModel(20, seed=seed, days=20).events(WHERE) for seed in (3, 4))
    assert short == again != other
    failed = [event for event in short if event.kind is NodeEventKind.FAILED]
    assert failed == [event for event in long if event.kind is NodeEventKind.FAILED][: len(failed)]


def test_every_failure_is_of_a_node_that_is_up_and_every_node_returns():
    up = [True] * WHERE.n_nodes
    for event in FailureModel(200, days=30).events(WHERE):
        assert up[event.node_id] == (event.kind is NodeEventKind.FAILED)
        up[event.node_id] = not up[event.node_id]
    assert all(up)


def test_failures_come_at_the_rate_and_repairs_take_the_mean_that_is_asked_for():
    for repair, tolerance in (("constant", 1e-9), ("exponential", 0.05), ("lognormal", 0.3)):
        model = FailureModel(50, repair_s=60.0, repair=repair, days=200)
        events = model.events(WHERE)
        failed_s, repairs_s = {}, []
        for event in events:
            if event.kind is NodeEventKind.FAILED:
                failed_s[event.node_id] = event.time_s
            else:
                repairs_s.append(event.time_s - failed_s[event.node_id])
        assert len(repairs_s) == pytest.approx(50 * 200, rel=0.05)
        assert np.mean(repairs_s) == pytest.approx(60.0, rel=tolerance)
        starts = [event.time_s for event in events if event.kind is NodeEventKind.FAILED]
        assert np.std(np.diff(starts)) == pytest.approx(DAY / 50, rel=0.05)  # as of a Poisson process


def test_nodes_fail_by_their_gpus_or_all_alike():
    large = toy_nodes(1, 8)
    where = replace(large, nodes=(*large.nodes, *toy_nodes(1, 2).nodes))
    shares = {}
    for weight in ("gpu", "node"):
        events = FailureModel(50, repair_s=1.0, weight=weight, days=100).events(where)
        shares[weight] = np.mean([event.node_id == 0 for event in events])
    assert shares["gpu"] == pytest.approx(0.8, abs=0.03)
    assert shares["node"] == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_day": -1}, "per_day is -1; expected a finite number, 0 or more"),
        (
            {"per_day": 1e6},
            "per_day is 1e+06 for days 60, which are 6e+07 failures; expected at most 10,000,",
        ),
        ({"per_day": 1, "repair_s": 0.0}, "repair_s is 0.0; expected a number above 0"),
        ({"per_day": 1, "days": float("inf")}, "days is inf; expected a number above 0"),
        ({"per_day": 1, "seed": -1}, "seed is -1; expected 0 or more"),
    ],
)
def test_numbers_out_of_range_are_rejected(options, message):
    with pytest.raises(InputError) as caught:
        FailureModel(**options)
    assert message in str(caught.value)


def test_unknown_names_are_rejected():
    with pytest.raises(UnknownNameError, match="distribution of repair times 'weibull'"):
        FailureModel(1, repair="weibull")
    with pytest.raises(UnknownNameError, match="weight of failures 'rack'"):
        FailureModel(1, weight="rack")


# --- scenarios ------------------------------------------------------------------------------------


def test_a_scenario_with_failures_restarts_jobs_unless_told_otherwise():
    some = makespan.scenario(n_jobs=3, failures=FailureModel(40))
    assert some.recovery == Recovery("restart")
    assert "generated: 40 a day for 60 days, seed 1" in some.report
    assert makespan.scenario(n_jobs=3, failures=[], recovery="elastic").recovery == Recovery("elastic")
    assert makespan.scenario(n_jobs=3).recovery is None


def two_jobs(tmp_path, monkeypatch):
    """Write a measured model, two nodes that fail together, and two jobs that each fill a node."""
    rows = "".join(
        f"my-model,ga,{n},1,96,{time_s},,,,True,True,,measured\n"
        for n, time_s in ((1, 8.0), (2, 4.5), (4, 2.5), (8, 1.5))
    )
    (tmp_path / "my-model.csv").write_text(
        "workload,exec_plan,placement,cpu_threads,global_batch_size,iter_time_s,forward_s,overlap_sync_s,"
        f"optimize_s,feasible,clean,flag,provenance\n{rows}"
    )
    nodes = "".join(f"n{number},8,96,768e9,a800-80\n" for number in range(2))
    (tmp_path / "nodes.csv").write_text(f"node_id,n_gpus,n_cpus,memory_bytes,gpu\n{nodes}")
    jobs = "".join(f"{name},0,my-model,8,8,ga,1999\n" for name in "ab")
    (tmp_path / "l.csv").write_text(f"job_id,submit_time_s,workload,n_gpus,n_cpus,plan,steps\n{jobs}")
    events = "".join(f"1700,{node},failed\n1800,{node},joined\n" for node in range(2))
    (tmp_path / "f.csv").write_text(HEAD + events)
    monkeypatch.chdir(tmp_path)
    return {
        "source": "measured",
        "measured_dir": tmp_path,
        "cluster_name": "nodes.csv",
        "restart_delay_s": 100,
        "interval_s": 0,
        "failures": "f.csv",
    }


def test_jobs_that_a_mapping_of_recoveries_does_not_name_restart(tmp_path, monkeypatch):
    options = two_jobs(tmp_path, monkeypatch)
    for names in ({}, {"a": Recovery("restart")}):
        scenario = makespan.scenario("l.csv", recovery=names, **options)
        lost = makespan.simulate(scenario, "fifo").result.losses["lost_steps"]
        assert lost.tolist() == pytest.approx([1600 / 1.5] * 2)


def test_a_mapping_of_recoveries_names_jobs_of_the_list_also_those_left_out(tmp_path, monkeypatch):
    options = two_jobs(tmp_path, monkeypatch)
    with pytest.raises(InputError, match="recovery: no job has the name 'c'; expected names of the job list"):
        makespan.scenario("l.csv", recovery={"c": Recovery()}, **options)
    first = makespan.scenario("l.csv", n_jobs=1, recovery={"b": Recovery("elastic")}, **options)
    assert first.recovery == {}


def test_no_failures_a_day_are_no_failures():
    none, without = (
        makespan.simulate(makespan.scenario("base", n_jobs=12, failures=failures, recovery="restart"), "fifo")
        for failures in (FailureModel(0), None)
    )
    assert none.result.events.equals(without.result.events)
    assert none.goodput.n_interruptions == 0


def test_failures_that_end_before_the_jobs_are_reported(caplog):
    few = makespan.scenario("base", n_jobs=12, failures=FailureModel(1, days=0.01))
    with caplog.at_level(logging.WARNING):
        makespan.simulate(few, "fifo")
    assert "failures were generated for 0.0 days only" in caplog.text


@pytest.mark.parametrize("policy", ["morphling-work", "morphling-lookahead"])
def test_a_job_alone_counts_as_holding_what_it_computes_on_also_as_a_guest(policy):
    job = JobSpec("a", 0.0, "roberta", 16, 128, "zero-dp", 20_000)
    failures = [NodeEvent(1000.0, 0, NodeEventKind.FAILED), NodeEvent(4000.0, 0, NodeEventKind.JOINED)]
    scenario = makespan.scenario([job], n_nodes=2, failures=failures)
    run = makespan.simulate(scenario, policy)
    # morphling-work makes the job a guest on the other node, which nobody holds; the other one starts it.
    is_guest = (run.result.events["shared_nodes"] != "").any()
    assert is_guest == (policy == "morphling-work")
    assert run.metrics.gpu_allocation_ratio == pytest.approx(0.995, abs=5e-4)
    assert run.goodput.ratio == pytest.approx(0.653, abs=5e-4)


# --- commands -------------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


BUSY = ("--workload", "base", "--jobs", 30, "--load", 2)


def test_simulate_says_what_failures_cost_and_writes_the_losses(tmp_path):
    result = run(
        "simulate", *BUSY, "--failures-per-day", 200, "--recovery", "resilient", "--output", tmp_path
    )
    assert result.exit_code == 0, result.output
    for line in ("interruptions of jobs", "goodput", "lost work", "time in recovery"):
        assert f"\n{line}" in result.output
    losses = read_csv(tmp_path / "losses.csv", LOSSES)
    assert set(losses["recovery"]) == {"resilient"}
    plain = run("simulate", *BUSY, "--output", tmp_path / "plain")
    assert "goodput" not in plain.output
    assert not (tmp_path / "plain/losses.csv").exists()


def test_seed_repairs_and_interval_have_an_effect():
    base = ("simulate", *BUSY, "--json", "--failures-per-day", 200)
    found = [
        json.loads(run(*base, *more).stdout)[0]
        for more in ((), ("--failure-seed", 2), ("--repair-hours", 1), ("--checkpoint-interval", 60))
    ]
    assert len({(row["goodput"], row["avg_jct_s"]) for row in found}) == len(found)


def test_compare_has_a_column_with_goodput_only_if_there_are_failures():
    fails = run("compare", *BUSY, "--policies", "fifo,sia", "--failures-per-day", 100)
    assert "goodput\n" in fails.output and "goodput: GPU time of steps that were kept" in fails.output
    assert "goodput" not in run("compare", *BUSY, "--policies", "fifo").output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--failures", "f.csv", "--failures-per-day", 3), "both say what fails; leave one of them out"),
        (("--repair-hours", 3), "--repair-hours 3 is for generated failures; use it with --failures-per-day"),
        (("--failure-seed", 3), "--failure-seed 3 is for generated failures"),
        (("--checkpoint-interval", 3), "is for jobs that recover from failures; use it with --failures"),
        (("--failures-per-day", 0), "expected a number above 0"),
        (("--failures", "nowhere.csv"), "nowhere.csv"),
    ],
)
def test_options_without_effect_are_refused_in_one_line(options, message):
    result = run("simulate", *options)
    assert result.exit_code != 0
    assert message in result.output
