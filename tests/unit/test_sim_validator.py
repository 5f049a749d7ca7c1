"""The validator finds what is planted, names the rule, and is silent about what is possible."""

import ast
import importlib
import math
from pathlib import Path

import pandas as pd
import pytest
from toy_cluster import Scripted, find, simulate, toy_catalogue, toy_job, toy_nodes

from makespan.errors import TraceError
from makespan.policies import policy
from makespan.sim import Allocation, NodeEvent, NodeEventKind, validate_schedule

SPEC = toy_nodes(2, 4)
DELAY_S = 5.0
JOBS = [
    toy_job("a", 0.0, n_gpus=2, steps=50, is_guaranteed=True),
    toy_job("b", 4.0, n_gpus=4, steps=30),
    toy_job("c", 9.0, n_gpus=4, steps=10),
]


def script(view):
    """Start everything on the first node with room, and move c once a round later."""
    free, changes = view.free_gpus, {}
    for job in view.pending:
        item = find(view.catalogue, "ga", str(job.spec.n_gpus))
        node = next((node for node, count in enumerate(free) if count >= item.n_gpus), None)
        if node is not None:
            free[node] -= item.n_gpus
            changes[job.spec.job_id] = Allocation(item, (node,))
    for job in view.running:
        if job.spec.job_id == "a" and job.restart_count == 0 and view.time_s == 30.0:
            changes["a"] = Allocation(find(view.catalogue, "gc", "2"), job.allocation.nodes)
    return changes


@pytest.fixture(scope="module")
def good():
    chosen = Scripted(script, asks_every_round=True)
    return simulate(JOBS, SPEC, toy_catalogue(), chosen, restart_delay_s=DELAY_S, interval_s=10.0)


def check(events, **options):
    values = {"restart_delay_s": DELAY_S, "interval_s": 10.0} | options
    return validate_schedule(events, JOBS, SPEC, toy_catalogue(), **values)


def rules(events, **options):
    return {violation.rule for violation in check(events, **options)}


def row(events, job_id, kind):
    return events.index[(events["job_id"] == job_id) & (events["kind"] == kind)][0]


def renumbered(events):
    ordered = events.sort_values("time_s", kind="stable").reset_index(drop=True)
    return ordered.assign(seq=range(len(ordered)))


def test_a_possible_schedule_passes(good):
    assert check(good.events, outcomes=good.outcomes) == []
    assert "reconfigured" in set(good.events["kind"])


def test_a_device_used_twice_is_found(good):
    events = good.events.copy()
    for kind in ("started", "ready"):
        events.loc[row(events, "b", kind), "nodes"] = "0:4"
    found = check(events)
    assert {violation.rule for violation in found} == {"capacity"}
    assert found[0].message == "node 0: 6 GPUs are held; expected at most 4"
    assert found[0].time_s == events.loc[row(events, "b", "started"), "time_s"]


def test_cpu_threads_used_twice_are_found(good):
    events = check_on(good.events, toy_nodes(2, 4, cpu_threads=15))
    assert {violation.rule for violation in events} == {"capacity"}
    assert "16 CPU threads are held; expected at most 15" in events[0].message


class FittingAnywhere:
    """Catalogue of which everything fits on any cluster, so that only the nodes themselves are checked."""

    def on(self, cluster):
        return toy_catalogue().on(SPEC)


def check_on(events, spec):
    """Validate against other nodes, with the catalogue of the large ones."""
    return validate_schedule(events, JOBS, spec, FittingAnywhere(), DELAY_S, interval_s=10.0)


def test_free_progress_is_found(good):
    early = good.events.copy()
    at = row(early, "b", "finished")
    early.loc[at, "time_s"] -= 1.0
    found = check(renumbered(early))
    assert {violation.rule for violation in found} == {"progress"}
    assert found[0].job_id == "b" and "finished with" in found[0].message


def test_steps_left_that_are_missing_are_found(good):
    events = good.events.copy()
    events.loc[row(events, "a", "reconfigured"), "steps_left"] = math.nan
    assert rules(events) == {"progress"}


def test_steps_that_vanish_are_found(good):
    events = good.events.copy()
    events.loc[row(events, "a", "reconfigured"), "steps_left"] -= 0.5
    assert rules(events) == {"progress"}


def test_an_unpaid_change_is_found(good):
    events = good.events.copy()
    events.loc[row(events, "a", "reconfigured") :, "time_s"] -= 0.0
    unpaid = events.drop(index=_second_ready(events))
    assert rules(renumbered(unpaid)) == {"restart"}
    sooner = events.copy()
    sooner.loc[_second_ready(events), "time_s"] -= DELAY_S
    assert rules(renumbered(sooner)) == {"restart"}


def _second_ready(events):
    return events.index[(events["job_id"] == "a") & (events["kind"] == "ready")][1]


def test_a_change_without_delay_and_the_time_gained_by_it_are_found():
    chosen = Scripted(script, asks_every_round=True)
    free = simulate(JOBS, SPEC, toy_catalogue(), chosen, restart_delay_s=0.0, interval_s=10.0)
    assert {"restart", "progress"} <= rules(free.events)


def test_a_schedule_of_a_faster_world_is_found(good):
    slower = validate_schedule(good.events, JOBS, SPEC, toy_catalogue(2.0), DELAY_S, interval_s=10.0)
    assert {violation.rule for violation in slower} == {"row", "progress"}
    longer = rules(good.events, extra_steps=2)
    assert longer == {"progress"}


def test_a_change_between_rounds_is_found(good):
    assert rules(good.events, interval_s=7.0) == {"round"}
    assert rules(good.events, interval_s=None) == set()


@pytest.mark.parametrize("kind", ["submitted", "started", "finished"])
def test_a_missing_row_is_found(good, kind):
    events = good.events.drop(index=row(good.events, "b", kind))
    found = [violation for violation in check(events) if violation.rule == "life"]
    assert found and all(violation.job_id == "b" for violation in found)


@pytest.mark.parametrize("kind", ["submitted", "started", "finished"])
def test_a_row_that_occurs_twice_is_found(good, kind):
    twice = pd.concat([good.events, good.events.loc[[row(good.events, "b", kind)]]])
    assert "life" in rules(renumbered(twice))


def test_a_submission_at_another_time_is_found(good):
    events = good.events.copy()
    events.loc[row(events, "b", "submitted"), "time_s"] = 3.0
    assert rules(events) == {"life"}


def test_time_that_goes_back_is_found(good):
    events = good.events.copy()
    events.loc[[2, 3], "seq"] = [3, 2]
    assert rules(events) == {"order"}
    assert rules(events.iloc[::-1]) >= {"order", "life"}


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("nodes", "0:3", "plan 'ga' on 3 is not in the catalogue"),
        ("nodes", "9:4", "expected node:devices of existing nodes"),
        ("nodes", "0-4", "expected node:devices of existing nodes"),
        ("nodes", "0:2 0:2", "expected node:devices of existing nodes"),
        ("nodes", "", "expected node:devices of existing nodes"),
        ("plan", "zero-offload", "plan 'zero-offload' on 4 is not in the catalogue"),
        ("cpu_threads", 1, "is not in the catalogue"),
        ("n_gpus", 3, "n_gpus 3"),
        ("iter_time_s", 0.01, "iter_time_s 0.01"),
        ("family", "GC", "family GC"),
        ("kind", "begun", "kind 'begun'; expected submitted"),
        ("job_id", "z", "job 'z' is not in the trace"),
    ],
)
def test_a_row_that_cannot_be_is_found(good, column, value, message):
    events = good.events.copy()
    events.loc[row(events, "b", "started"), column] = value
    assert any(v.rule == "row" and message in v.message for v in check(events)), check(events)


def test_devices_that_change_without_a_change_are_found(good):
    events = good.events.copy()
    events.loc[row(events, "b", "ready"), "nodes"] = "0:4"
    assert rules(events) == {"row"}


def test_guarantees_are_checked_where_they_are_promised(good):
    found = check(good.events, keeps_guarantees=True)
    assert {violation.rule for violation in found} == {"guarantee"}  # a changes to a slower plan
    assert found[0].job_id == "a" and "a step takes" in found[0].message

    def pause(view):
        if view.time_s == 20.0:
            return {"a": None}
        return script(view) if view.time_s in (0.0, 10.0, 40.0) or not view.running else {}

    jobs, options = JOBS, {"restart_delay_s": DELAY_S, "interval_s": 10.0}
    paused = simulate(jobs, SPEC, toy_catalogue(), Scripted(pause, asks_every_round=True), **options)
    assert rules(paused.events) == set()
    messages = [violation.message for violation in check(paused.events, keeps_guarantees=True)]
    assert messages == ["a guaranteed job must not be suspended"]


# --- failures ---------------------------------------------------------------------------

EVENTS = (
    NodeEvent(12.0, 0, NodeEventKind.FAILED),
    NodeEvent(30.0, 0, NodeEventKind.JOINED),
    NodeEvent(33.0, 1, NodeEventKind.FAILED),
    NodeEvent(34.0, 1, NodeEventKind.JOINED),
)


@pytest.fixture(scope="module")
def failing():
    options = {"restart_delay_s": DELAY_S, "checkpoint_interval_s": 3.0, "failures": EVENTS}
    return simulate(JOBS, SPEC, toy_catalogue(), policy("fifo"), **options)


def failing_rules(events, checkpoint_interval_s=3.0):
    return rules(events, interval_s=None, checkpoint_interval_s=checkpoint_interval_s)


def test_a_schedule_with_failures_passes_and_the_loss_is_part_of_it(failing):
    assert failing_rules(failing.events) == set()
    assert "interrupted" in set(failing.events["kind"])
    assert failing_rules(failing.events, None) == {"progress"}
    assert failing_rules(failing.events, 100.0) == {"progress"}


def test_a_job_that_outlives_its_node_is_found(failing):
    hit = failing.events[failing.events["kind"] == "interrupted"].iloc[0]
    assert "failure" in failing_rules(failing.events.drop(index=hit.name))


def test_an_interruption_without_a_failure_is_found(failing):
    nodes = failing.events["kind"].isin(["node_failed", "node_joined"])
    assert failing_rules(failing.events[~nodes]) == {"failure"}


def test_node_events_that_contradict_each_other_are_found(failing):
    first = failing.events[failing.events["kind"] == "node_failed"].iloc[[0]]
    assert "failure" in failing_rules(renumbered(pd.concat([failing.events, first])))
    for name in ("7", "x"):
        events = failing.events.copy()
        events.loc[first.index[0], "nodes"] = name
        assert "row" in failing_rules(events)


# --- outcomes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "column",
    [
        "submit_time_s",
        "steps",
        "first_start_s",
        "finish_time_s",
        "n_restarts",
        "attained_service_gpu_s",
        "waiting_time_s",
        "running_time_s",
        "restart_time_s",
    ],
)
def test_an_outcome_that_the_events_do_not_show_is_found(good, column):
    outcomes = good.outcomes.copy()
    outcomes.loc[1, column] += 1
    found = check(good.events, outcomes=outcomes)
    assert [(violation.rule, violation.job_id) for violation in found] == [("outcomes", "b")]
    assert found[0].message.startswith(f"{column} is ")
    assert math.isnan(found[0].time_s) and found[0].seq == -1


def test_a_job_without_an_outcome_or_with_two_is_found(good):
    missing = check(good.events, outcomes=good.outcomes.iloc[1:])
    assert [violation.message for violation in missing] == ["has no row; expected one row for each job"]
    twice = check(good.events, outcomes=pd.concat([good.outcomes, good.outcomes.iloc[:1]]))
    assert [violation.message for violation in twice] == ["is not in the trace or occurs twice"]


def test_a_table_without_its_columns_is_refused(good):
    with pytest.raises(TraceError, match="lacks column"):
        check(good.events.drop(columns="seq"))


def test_the_validator_shares_no_code_with_the_engine():
    module = importlib.import_module("makespan.sim.validator")
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "makespan.sim.catalogue" in imported
    assert not imported & {f"makespan.sim.{part}" for part in ("engine", "state")}


def test_a_restart_on_the_same_nodes_with_the_same_plan_is_found(good):
    """The same job, plan and nodes again, after another delay: nothing changed, so nothing may restart."""
    events = good.events.copy()
    moved = row(events, "a", "reconfigured")
    first = row(events, "a", "started")
    events.loc[moved, ["plan", "iter_time_s"]] = events.loc[first, ["plan", "iter_time_s"]].tolist()
    found = [one for one in check(events) if "restarted as it was" in one.message]
    assert [one.rule for one in found] == ["restart"] and found[0].time_s == events.loc[moved, "time_s"]
