"""Recovery from failures: cases computed by hand, refusals, and what the validator finds."""

import math
from dataclasses import replace

import numpy as np
import pytest
from toy_cluster import (
    Scripted,
    find,
    one_gpu_catalogue,
    simulate,
    throughput_rows,
    toy_job,
    toy_nodes,
)

from makespan.errors import InputError, UnknownNameError
from makespan.metrics import Goodput, job_goodput
from makespan.policies import REGISTRY
from makespan.sim import (
    Allocation,
    NodeEvent,
    NodeEventKind,
    Recovery,
    expected_goodput,
    validate_schedule,
)
from makespan.studies import TableCatalogue

FAILED, JOINED = NodeEventKind.FAILED, NodeEventKind.JOINED
WITHDRAWN, RETURNED = NodeEventKind.WITHDRAWN, NodeEventKind.RETURNED


def halves():
    """Return a catalogue with a step of 1 s on two nodes of one GPU, and of 2 s on one of them."""
    return TableCatalogue.from_tables([throughput_rows("roberta", [("ga", "11", 1.0), ("ga", "1", 2.0)])])


def on_two_nodes(recovery, failures, steps=100, policy="fifo", n_nodes=2, **options):
    """Run a job of so many steps, one more than requested, on two nodes of one GPU."""
    job = toy_job(n_gpus=2, steps=steps - 1)
    where = toy_nodes(n_nodes, 1)
    values = {"restart_delay_s": 10.0, "interval_s": 0.0} | options
    result = simulate(
        [job], where, halves(), REGISTRY[policy], failures=failures, recovery=recovery, **values
    )
    assert violations(result, job, recovery, n_nodes) == []
    return result


def violations(result, job, recovery, n_nodes=2, events=None, losses=None):
    return validate_schedule(
        result.events if events is None else events,
        [job],
        toy_nodes(n_nodes, 1),
        halves(),
        10.0,
        outcomes=result.outcomes,
        recovery_of=lambda job: recovery,
        losses=result.losses if losses is None else losses,
    )


def rows(result, *names):
    of_jobs = result.events[result.events["job_id"] != ""]
    return [tuple(row) for row in of_jobs[list(names)].itertuples(index=False)]


def losses(result):
    names = ["time_s", "node_id", "outcome", "lost_steps", "lost_gpu_s"]
    return [tuple(row) for row in result.losses[names].itertuples(index=False)]


def test_checkpoints_take_time_and_the_last_one_is_not_written():
    result = on_two_nodes(Recovery("restart", 30.0, 5.0), ())
    # 100 s of training after 10 s of restart: checkpoints after 30, 60 and 90 s.
    assert result.outcomes["finish_time_s"].tolist() == [10.0 + 100.0 + 3 * 5.0]
    goodput = Goodput.of(job_goodput(result.events, result.losses))
    assert (goodput.held_gpu_s, goodput.useful_gpu_s) == pytest.approx((250.0, 200.0))
    assert (goodput.checkpoint_gpu_s, goodput.restart_gpu_s) == pytest.approx((30.0, 20.0))
    assert goodput.ratio == pytest.approx(200 / 250)


def test_a_restart_returns_to_the_last_checkpoint_and_waits_for_devices():
    recovery = Recovery("restart", 30.0, 5.0, restart_s=20.0)
    result = on_two_nodes(recovery, [NodeEvent(62.5, 1, FAILED), NodeEvent(100.0, 1, JOINED)])
    # Ready at 10 s; the checkpoint of 30 steps is complete at 45 s; 17.5 steps later the node fails.
    assert rows(result, "time_s", "kind", "steps_left") == [
        (0.0, "submitted", 100.0),
        (0.0, "started", 100.0),
        (10.0, "ready", 100.0),
        (62.5, "interrupted", 70.0),
        (100.0, "started", 70.0),
        (120.0, "ready", 70.0),
        (200.0, "finished", 0.0),  # 70 s of training and checkpoints after 30 and 60 s
    ]
    assert losses(result) == [(62.5, 1, "checkpoint", 17.5, 35.0)]
    (job,) = job_goodput(result.events, result.losses).to_dict("records")
    assert (job["jct_s"], job["n_interruptions"], job["recovery_s"]) == (200.0, 1, 57.5)
    assert (job["held_gpu_s"], job["useful_gpu_s"]) == pytest.approx((2 * (62.5 + 100.0), 200.0))
    assert (job["lost_gpu_s"], job["checkpoint_gpu_s"]) == pytest.approx((35.0, 2 * 15.0))
    assert (job["recovery_gpu_s"], job["restart_gpu_s"]) == pytest.approx((40.0, 20.0))
    assert job["goodput"] == pytest.approx(200.0 / 325.0)


def test_a_checkpoint_that_is_being_written_does_not_count():
    result = on_two_nodes(
        Recovery("restart", 30.0, 5.0), [NodeEvent(44.0, 0, FAILED), NodeEvent(60.0, 0, JOINED)]
    )
    assert losses(result) == [(44.0, 0, "checkpoint", 30.0, 60.0)]


def test_a_resilient_job_goes_on_with_the_devices_that_are_left():
    recovery = Recovery("resilient", 30.0, 5.0, pause_s=4.0)
    result = on_two_nodes(recovery, [NodeEvent(62.5, 1, FAILED), NodeEvent(500.0, 1, JOINED)])
    assert rows(result, "time_s", "kind", "nodes", "steps_left")[3:] == [
        (62.5, "interrupted", "", 53.0),  # half a step is lost
        (62.5, "regrouped", "0:1", 53.0),
        (66.5, "ready", "0:1", 53.0),
        (187.5, "finished", "", 0.0),  # 106 s of training and checkpoints after 30, 60 and 90 s
    ]
    assert losses(result) == [(62.5, 1, "in memory", 0.5, 1.0)]


def test_a_resilient_job_survives_f_losses_before_it_has_recovered():
    events = [NodeEvent(62.5, 1, FAILED), NodeEvent(64.5, 0, FAILED)]
    events += [NodeEvent(90.0, 0, JOINED), NodeEvent(90.0, 1, JOINED)]
    result = on_two_nodes(Recovery("resilient", 30.0, 5.0, pause_s=4.0), events)
    # The second node takes all that was trained since the checkpoint at 45 s: 17 steps on two devices.
    assert losses(result) == [(62.5, 1, "in memory", 0.5, 1.0), (64.5, 0, "checkpoint", 17.0, 34.0)]
    again = on_two_nodes(
        Recovery("resilient", 30.0, 5.0, pause_s=4.0),
        [NodeEvent(62.5, 1, FAILED), NodeEvent(80.5, 0, FAILED), *events[2:]],
    )
    # 7 steps more on one device, at 2 s each.
    assert losses(again)[1] == (80.5, 0, "checkpoint", 24.0, 34.0 + 14.0)


@pytest.mark.parametrize(("kind", "goes_on"), [("elastic", "started"), ("resilient", "regrouped")])
def test_a_job_goes_on_with_the_devices_of_a_node_that_are_left(kind, goes_on):
    """Of two jobs with two devices each, the later one loses one, or both and the other job one."""
    catalogue = TableCatalogue.from_tables([throughput_rows("roberta", [("ga", "2", 1.0), ("ga", "1", 2.0)])])
    jobs = [toy_job(name, n_gpus=2, steps=99) for name in "ab"]
    recovery = Recovery(kind, 1000.0, pause_s=4.0)

    def script(view):
        changes, n_free = {}, view.n_free_gpus
        for job in view.pending:
            count = min(n_free, 2)
            if count:
                changes[job.spec.job_id] = find(catalogue, "ga", str(count)).on((0,))
            n_free -= count
        return changes

    for count, after in ((1, {"a": None, "b": "0:1"}), (3, {"a": "0:1", "b": None})):
        events = [NodeEvent(62.5, 0, WITHDRAWN, count, notice_s=5.0), NodeEvent(150.0, 0, RETURNED)]
        result = simulate(
            jobs,
            toy_nodes(1, 4),
            catalogue,
            Scripted(script) if kind == "elastic" else REGISTRY["fifo"],
            failures=events,
            recovery=recovery,
            restart_delay_s=10.0,
            interval_s=0.0,
        )
        table = result.events
        assert (
            validate_schedule(
                table,
                jobs,
                toy_nodes(1, 4),
                catalogue,
                10.0,
                recovery_of=lambda job: recovery,
                losses=result.losses,
            )
            == []
        )
        now = table[(table["time_s"] == 67.5) & (table["kind"] == goes_on)].set_index("job_id")["nodes"]
        assert now.to_dict() == {name: nodes for name, nodes in after.items() if nodes}
        lost = result.losses.set_index("job_id")
        kept = "b" if count == 1 else "a"
        assert lost.loc[kept, ["outcome", "lost_steps"]].tolist() == ["in memory", 0.5]
        if count == 3:  # the other job has no device left there, and returns to its start
            assert lost.loc["b", ["outcome", "lost_steps"]].tolist() == ["checkpoint", 57.5]


def test_the_validator_finds_a_job_that_regroups_on_devices_that_it_lost():
    catalogue = TableCatalogue.from_tables([throughput_rows("roberta", [("ga", "2", 1.0), ("ga", "1", 2.0)])])
    jobs, recovery = [toy_job(n_gpus=2, steps=99)], Recovery("resilient", None, pause_s=4.0)
    spec, events = toy_nodes(1, 3), [NodeEvent(62.5, 0, WITHDRAWN, 2), NodeEvent(150.0, 0, RETURNED)]
    result = simulate(jobs, spec, catalogue, REGISTRY["fifo"], failures=events, recovery=recovery)
    given = {"recovery_of": lambda job: recovery, "losses": result.losses}
    assert result.events["kind"].tolist().count("regrouped") == 1
    assert validate_schedule(result.events, jobs, spec, catalogue, 0.0, **given) == []
    changed = result.events.copy()
    later = changed["kind"].isin(["regrouped", "ready"]) & (changed["time_s"] >= 62.5)
    changed.loc[later, ["nodes", "n_gpus", "iter_time_s"]] = ["0:2", 2, 1.0]
    found = validate_schedule(changed, jobs, spec, catalogue, 0.0, **given)
    assert "recovery" in {item.rule for item in found}


def test_an_elastic_job_goes_on_where_the_policy_has_devices_for_it():
    recovery = Recovery("elastic", 30.0, 5.0, pause_s=4.0)
    events = [NodeEvent(62.5, 1, FAILED), NodeEvent(500.0, 1, JOINED)]
    spare = on_two_nodes(recovery, events, n_nodes=3)
    assert rows(spare, "time_s", "kind", "nodes", "steps_left")[3:6] == [
        (62.5, "interrupted", "", 53.0),
        (62.5, "started", "0:1 2:1", 53.0),
        (66.5, "ready", "0:1 2:1", 53.0),
    ]
    shrunk = on_two_nodes(recovery, events, policy="morphling", shares_devices=False)
    assert rows(shrunk, "time_s", "kind", "nodes")[3:6] == [
        (62.5, "interrupted", ""),
        (62.5, "started", "0:1"),
        (66.5, "ready", "0:1"),
    ]
    # FIFO runs jobs as requested only, and has no second device.
    stuck = on_two_nodes(recovery, events)
    assert rows(stuck, "time_s", "kind", "steps_left")[3:6] == [
        (62.5, "interrupted", 53.0),
        (62.5, "rolled_back", 70.0),
        (500.0, "started", 70.0),
    ]
    assert losses(stuck) == [(62.5, 1, "in memory", 0.5, 1.0), (62.5, -1, "checkpoint", 17.0, 34.0)]


def test_a_job_on_the_node_that_fails_has_nothing_left_in_memory():
    failures = [NodeEvent(15.0, 0, FAILED), NodeEvent(20.0, 0, JOINED)]
    for kind in ("elastic", "resilient"):
        result = simulate(
            [toy_job(steps=99)],
            toy_nodes(1, 2),
            one_gpu_catalogue(),
            REGISTRY["fifo"],
            failures=failures,
            recovery=Recovery(kind, None),
        )
        assert losses(result) == [(15.0, 0, "checkpoint", 15.0, 15.0)]


def test_jobs_may_recover_in_different_ways():
    jobs = [toy_job("a", n_gpus=2, steps=99), toy_job("b", n_gpus=2, steps=99)]
    failures = [NodeEvent(30.0, node, FAILED) for node in (0, 2)]
    failures += [NodeEvent(40.0, node, JOINED) for node in (0, 2)]
    result = simulate(
        jobs,
        toy_nodes(4, 1),
        halves(),
        REGISTRY["fifo"],
        failures=failures,
        recovery={"a": Recovery("resilient", None, pause_s=1.0)},
        checkpoint_interval_s=None,
        interval_s=0.0,
    )
    found = result.losses[["job_id", "recovery", "outcome", "lost_steps"]].to_dict("records")
    assert found[0] == {"job_id": "a", "recovery": "resilient", "outcome": "in memory", "lost_steps": 0.0}
    # A job without a name in the mapping restarts, and has lost all since its start.
    assert found[1] == {"job_id": "b", "recovery": "restart", "outcome": "checkpoint", "lost_steps": 30.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint_interval_s": 0.0}, "checkpoint_interval_s is 0.0; expected a finite time"),
        ({"checkpoint_interval_s": math.inf}, "expected a finite time"),
        ({"checkpoint_s": -1.0}, "checkpoint_s is -1.0; expected"),
        ({"restart_s": math.nan}, "restart_s is nan; expected"),
        (
            {"checkpoint_interval_s": None, "checkpoint_s": 5.0},
            "no checkpoint is written; leave checkpoint_s out",
        ),
        ({"pause_s": 3.0}, "pause_s is 3.0 but kind 'restart' always returns"),
        ({"f": 1}, "f is 1 but kind is 'restart'; use kind 'resilient'"),
        ({"kind": "resilient", "f": 0}, "f is 0; expected a whole number"),
    ],
)
def test_values_out_of_range_and_contradictions_are_refused_in_one_line(options, message):
    with pytest.raises(InputError) as caught:
        Recovery(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_kind_and_an_unknown_job_are_refused():
    with pytest.raises(UnknownNameError, match="kind of recovery 'restrat'"):
        Recovery("restrat")
    with pytest.raises(InputError, match="no job has the name 'z'"):
        on_two_nodes({"z": Recovery()}, ())
    with pytest.raises(InputError, match="leave one of them out"):
        on_two_nodes(Recovery(), (), checkpoint_interval_s=5.0)


def test_the_validator_finds_losses_that_do_not_add_up():
    recovery, job = Recovery("elastic", 30.0, 5.0, pause_s=4.0), toy_job(n_gpus=2, steps=99)
    events = [NodeEvent(62.5, 1, FAILED), NodeEvent(500.0, 1, JOINED)]
    result = on_two_nodes(recovery, events)
    for column, value in (("lost_steps", 0.25), ("lost_gpu_s", 2.0), ("outcome", "checkpoint"), ("seq", 3)):
        changed = result.losses.copy()
        changed.loc[0, column] = value
        assert {item.rule for item in violations(result, job, recovery, losses=changed)} == {"recovery"}
    assert {item.rule for item in violations(result, job, recovery, losses=result.losses[:1])} == {"recovery"}


def test_the_validator_finds_progress_that_was_lost_but_is_kept():
    recovery, job = Recovery("elastic", 30.0, 5.0, pause_s=4.0), toy_job(n_gpus=2, steps=99)
    result = on_two_nodes(recovery, [NodeEvent(62.5, 1, FAILED), NodeEvent(500.0, 1, JOINED)])
    kept = result.events[result.events["kind"] != "rolled_back"].reset_index(drop=True)
    assert "recovery" in {item.rule for item in violations(result, job, recovery, events=kept)}
    # The same events under another recovery: what is lost and how long it takes differ.
    for other in (
        replace(recovery, kind="restart", pause_s=None),
        Recovery("elastic", 7.0, 5.0, pause_s=4.0),
    ):
        assert {"progress", "recovery"} & {item.rule for item in violations(result, job, other)}


def test_the_validator_finds_a_job_that_regroups_on_a_dead_node_or_without_being_resilient():
    recovery, job = Recovery("resilient", 30.0, 5.0, pause_s=4.0), toy_job(n_gpus=2, steps=99)
    result = on_two_nodes(recovery, [NodeEvent(62.5, 1, FAILED), NodeEvent(500.0, 1, JOINED)])
    moved = result.events.copy()
    later = moved["kind"].isin(["regrouped", "ready"]) & (moved["time_s"] > 60)
    moved.loc[later, "nodes"] = "1:1"
    assert {"recovery", "failure"} <= {item.rule for item in violations(result, job, recovery, events=moved)}
    elastic = Recovery("elastic", 30.0, 5.0, pause_s=4.0)
    assert "recovery" in {item.rule for item in violations(result, job, elastic)}


def test_expected_goodput_is_that_of_daly_and_best_near_the_interval_of_young():
    mtbf_s, cost_s = 40_000.0, 50.0

    def at(every_s):
        return expected_goodput(Recovery("restart", every_s, cost_s), mtbf_s, 200.0)

    best_s = math.sqrt(2 * cost_s * mtbf_s)  # Young, CACM 17, 1974
    assert at(best_s) > max(at(best_s / 2), at(best_s * 2))
    # First order: the checkpoint, half a cycle and a restart for each failure.
    assert at(best_s) == pytest.approx(1 - 50 / 2050 - (1025 + 200) / mtbf_s, abs=2e-3)
    assert expected_goodput(Recovery("restart", 100.0, 25.0), math.inf, 9.0) == 0.8
    assert expected_goodput(Recovery("restart", None), 1e6, 9.0) == 0.0
    assert expected_goodput(Recovery("restart", 1e9, 0.0), 1.0, 0.0) == 0.0


def test_a_simulated_job_reaches_the_expected_goodput():
    """Many failures of one node that is back at once: the mean of the simulation meets Daly's formula."""
    recovery = Recovery("restart", 30.0, 5.0, restart_s=20.0)
    mtbf_s = 150.0
    times = np.cumsum(np.random.default_rng(7).exponential(mtbf_s, 3000))
    failures = [NodeEvent(float(time), 0, kind) for time in times for kind in (FAILED, JOINED)]
    result = simulate(
        [toy_job(steps=100_000)],
        toy_nodes(1, 1),
        one_gpu_catalogue(),
        REGISTRY["fifo"],
        failures=failures,
        recovery=recovery,
    )
    found = Goodput.of(job_goodput(result.events, result.losses))
    assert found.n_interruptions > 1000
    assert found.ratio == pytest.approx(expected_goodput(recovery, mtbf_s, 20.0), rel=0.03)


def test_a_job_that_regroups_leaves_its_guests_their_memory():
    """On one of two nodes `ga` needs nearly all memory of the device; `gc` is slower and leaves room."""
    usable = toy_nodes(2, 1).nodes[0].gpu.usable_bytes
    wide = throughput_rows("roberta", [("ga", "11", 1.0), ("ga", "1", 2.0), ("gc", "1", 3.0)])
    small = throughput_rows("bert", [("ga", "1", 1.0)])
    needs = {("ga", 2): 0.3, ("ga", 1): 0.9, ("gc", 1): 0.4}
    tables = TableCatalogue.from_tables([wide, small])
    catalogue = TableCatalogue(
        replace(
            item,
            device_memory_bytes_per_gpu=usable
            * (0.5 if item.workload == "bert" else needs[item.plan, item.n_gpus]),
        )
        for key in tables.workloads
        for item in tables.all(key)
    )
    jobs = [toy_job("a", n_gpus=2, steps=99), toy_job("b", workload="bert", steps=99)]

    wanted = {"a": ("ga", "11", (0, 1), False), "b": ("ga", "1", (0,), True)}

    def script(view):
        changes = {}
        for job in view.pending if not view.time_s else ():
            plan, placement, nodes, is_guest = wanted[job.spec.job_id]
            item = find(catalogue, plan, placement, job.spec.workload)
            changes[job.spec.job_id] = Allocation(item, nodes, is_guest)
        return changes

    recovery = Recovery("resilient", None, pause_s=4.0)
    for chosen, plan in ((jobs, "gc"), (jobs[:1], "ga")):
        result = simulate(
            chosen,
            toy_nodes(2, 1),
            catalogue,
            Scripted(script),
            failures=[NodeEvent(30.0, 1, FAILED), NodeEvent(40.0, 1, JOINED)],
            recovery=recovery,
        )
        regrouped = result.events[result.events["kind"] == "regrouped"]
        assert regrouped["plan"].tolist() == [plan]
        found = validate_schedule(
            result.events,
            chosen,
            toy_nodes(2, 1),
            catalogue,
            0.0,
            recovery_of=lambda job: recovery,
            losses=result.losses,
        )
        assert found == []
