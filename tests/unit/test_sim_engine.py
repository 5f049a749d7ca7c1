"""The engine: delays, rounds, failures, checks and errors."""

import gc
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from toy_cluster import (
    Scripted,
    find,
    one_gpu_catalogue,
    simulate,
    throughput_rows,
    toy_catalogue,
    toy_job,
    toy_nodes,
)

from makespan.errors import InputError, MakespanError, TraceError, UnknownNameError
from makespan.hardware import ClusterSpec
from makespan.policies import REGISTRY, FreeResources, policy
from makespan.sim import (
    Allocation,
    Decision,
    EventKind,
    InfeasibleDecision,
    NodeEvent,
    NodeEventKind,
    StalledError,
    events_table,
    read_failures,
)
from makespan.studies import TableCatalogue
from makespan.tables import EVENTS, OUTCOMES

FAILED, JOINED = NodeEventKind.FAILED, NodeEventKind.JOINED


def start_all(view):
    """Start every waiting job as requested on the first node with room."""
    free, changes = view.free_gpus, {}
    for job in view.pending:
        item = view.catalogue.requested(job.spec)
        node = next((node for node, count in enumerate(free) if count >= item.n_gpus), None)
        if node is not None:
            free[node] -= item.n_gpus
            changes[job.spec.job_id] = Allocation(item, (node,))
    return changes


def run(jobs, script=start_all, spec=None, catalogue=None, **options):
    own = set(Scripted.__dataclass_fields__) - {"interval_s"}
    fields = {name: options.pop(name) for name in list(options) if name in own}
    values = {"restart_delay_s": 4.0} | options
    chosen = script if not callable(script) else Scripted(script, **fields)
    return simulate(jobs, spec or toy_nodes(1, 2), catalogue or one_gpu_catalogue(), chosen, **values)


def history(result, job_id):
    rows = result.events[result.events["job_id"] == job_id]
    return list(zip(rows["time_s"], rows["kind"], strict=True))


def test_the_delay_is_charged_at_the_first_start_and_one_step_is_added():
    result = run([toy_job(steps=9)])
    assert history(result, "a") == [(0.0, "submitted"), (0.0, "started"), (4.0, "ready"), (14.0, "finished")]
    assert run([toy_job(steps=9)], extra_steps=0).outcomes["finish_time_s"].tolist() == [13.0]


def test_the_tables_follow_their_schemas():
    result = run([toy_job()])
    pd.testing.assert_frame_equal(EVENTS.validate(result.events, "events"), result.events)
    pd.testing.assert_frame_equal(OUTCOMES.validate(result.outcomes, "outcomes"), result.outcomes)
    empty = run([])
    pd.testing.assert_frame_equal(EVENTS.validate(empty.events, "events"), empty.events)
    assert empty.outcomes.dtypes.tolist() == result.outcomes.dtypes.tolist()


def test_progress_survives_a_change_and_every_change_pays():
    def script(view):
        jobs = {job.spec.job_id: job for job in (*view.pending, *view.running)}
        item = find(view.catalogue, "ga", "1")
        if view.time_s == 0.0:
            return {"a": Allocation(item, (0,))}
        return {"a": Allocation(item, (1,)), "b": Allocation(item, (0,))} if len(jobs) == 2 else {}

    jobs = [toy_job("a", steps=9), toy_job("b", 10.0, steps=20)]
    result = run(jobs, script, spec=toy_nodes(2, 1))
    # 6 of 10 steps are done at 10 s; the other 4 begin at 14 s. b takes the device that a leaves.
    assert history(result, "a")[3:] == [(10.0, "reconfigured"), (14.0, "ready"), (18.0, "finished")]
    moved = result.events[result.events["kind"] == "reconfigured"].iloc[0]
    assert (moved["nodes"], moved["steps_left"]) == ("1:1", 4.0)


def test_a_change_during_the_delay_starts_the_delay_anew():
    def script(view):
        held = [job for job in view.running if view.time_s == 3.0]
        return {job.spec.job_id: Allocation(job.allocation.configuration, (1,)) for job in held} or start_all(
            view
        )

    result = run([toy_job(steps=9), toy_job("b", 3.0)], script, spec=toy_nodes(3, 1))
    row = result.outcomes.iloc[0]
    assert (row["finish_time_s"], row["restart_time_s"], row["n_restarts"]) == (17.0, 7.0, 1)


def test_an_equal_allocation_is_no_change():
    def script(view):
        return {job.spec.job_id: job.allocation for job in view.running} | start_all(view)

    result = run([toy_job(), toy_job("b", 5.0)], script)
    assert "reconfigured" not in set(result.events["kind"])


def test_equal_shares_in_another_order_are_no_change():
    item = find(toy_catalogue(), "ga", "1111")
    orders = iter([(4, 3, 2, 0), (3, 0, 4, 2), (0, 2, 3, 4), (2, 3, 4, 0)])

    def script(view):
        jobs = [*view.pending, *view.running]
        return {job.spec.job_id: Allocation(item, next(orders, (0, 2, 3, 4))) for job in jobs}

    chosen = Scripted(script, asks_every_round=True)
    options = {"restart_delay_s": 5.0, "interval_s": 1.0}
    result = simulate([toy_job(n_gpus=4, steps=40)], toy_nodes(5, 1), toy_catalogue(), chosen, **options)
    assert result.n_decisions > 4
    assert "reconfigured" not in set(result.events["kind"])
    assert result.outcomes["restart_time_s"].tolist() == [5.0]


def test_a_suspended_job_returns_to_its_place_in_the_queue():
    queue = []

    def script(view):
        queue.append([job.spec.job_id for job in view.pending])
        if view.time_s == 5.0:
            return {"a": None}
        if view.time_s == 6.0:
            return {"a": Allocation(view.catalogue.requested(toy_job()), (0,))}
        return start_all(view) if view.time_s != 0.5 else {}

    jobs = [toy_job("a"), toy_job("b", 0.5), toy_job("c", 5.0), toy_job("d", 6.0)]
    result = run(jobs, script, spec=toy_nodes(1, 1))
    assert queue[:4] == [["a"], ["b"], ["b", "c"], ["a", "b", "c", "d"]]
    assert history(result, "a")[3:5] == [(5.0, "suspended"), (6.0, "started")]
    assert result.outcomes.iloc[0][["n_restarts", "waiting_time_s"]].tolist() == [1, 1.0]


# --- rounds ------------------------------------------------------------------------------


def asked_at(jobs, **options):
    times = []

    def script(view):
        times.append(view.time_s)
        return start_all(view)

    run(jobs, script, **options)
    return times


def test_without_rounds_the_policy_is_asked_once_an_instant():
    jobs = [toy_job("a", 1.0, steps=9), toy_job("b", 1.0, steps=9), toy_job("c", 15.0)]
    assert asked_at(jobs) == [1.0, 15.0]  # a and b end when c comes


def test_with_rounds_it_is_asked_at_multiples_and_quiet_rounds_are_skipped():
    jobs = [toy_job("a", 1.0, steps=40), toy_job("b", 20.0), toy_job("c", 101.0)]
    assert asked_at(jobs, interval_s=10.0) == [
        10.0,
        20.0,
        40.0,
        110.0,
    ]  # a ends at 55 s, none is left at 60 s


def test_a_policy_that_wants_it_is_asked_in_every_round_with_jobs():
    jobs = [toy_job("a", 1.0, steps=20), toy_job("b", 101.0, steps=1)]
    assert asked_at(jobs, interval_s=10.0, asks_every_round=True) == [10.0, 20.0, 30.0, 110.0]


def test_the_experiment_overrules_the_round_of_the_policy():
    jobs = [toy_job("a", 1.0, steps=1)]
    assert asked_at(jobs, extra_steps=0) == [1.0]
    times = []

    def script(view):
        times.append((view.time_s, view.interval_s))
        return start_all(view)

    chosen = Scripted(script, interval_s=8.0)
    for wanted in (None, 3.0, 0.0):
        run(jobs, chosen, interval_s=wanted)
    assert times == [(8.0, 8.0), (3.0, 3.0), (1.0, None)]


@pytest.mark.parametrize(("interval_s", "expected"), [(0.0, 7.5), (5.0, 10.0)])
def test_a_policy_may_ask_to_be_woken(interval_s, expected):
    times = []

    def script(view):
        times.append(view.time_s)
        late = view.time_s >= 7.5
        return Decision(start_all(view)) if late else Decision(wake_up_s=7.5)

    run([toy_job()], script, interval_s=interval_s)
    assert times[-1] == expected and len(times) == 2


@pytest.mark.parametrize("kind", [np.int64, np.int8, np.uint8])
def test_nodes_may_be_numbers_of_numpy(kind):
    counts = []

    def script(view):
        counts.append(view.free_histogram)
        free = FreeResources.of(view, is_tight=False)
        changes = {}
        for job in view.pending:
            item = view.catalogue.requested(job.spec)
            nodes = tuple(kind(node) for node in free.fit(item))
            free.take(item, nodes)
            changes[job.spec.job_id] = item.on(nodes)
        return changes

    jobs = [toy_job(f"{number}", n_gpus=1) for number in range(70)] + [toy_job("last", 1.0)]
    result = run(jobs, script, toy_nodes(71, 1))
    assert counts[:2] == [[0, 71], [70, 1]]
    assert result.outcomes["first_start_s"].tolist() == [0.0] * 70 + [1.0]


@pytest.mark.parametrize("length_s", [np.float32(0.1), np.int8(60), Fraction(1, 3)])
def test_rounds_of_any_kind_of_number_are_as_exact_as_those_of_a_float(length_s):
    jobs = [toy_job(f"{number}", 90.7 * number) for number in range(9)]
    found, expected = (
        run(jobs, Scripted(start_all, interval_s=value), interval_s=None)
        for value in (length_s, float(length_s))
    )
    pd.testing.assert_frame_equal(found.events, expected.events)


class Cost:
    """A restart cost that is not one delay."""

    expected_s = 4.0

    def __init__(self, delay_s):
        self.delay_s = delay_s

    def __call__(self, job, old, new):
        return self.delay_s


@pytest.mark.parametrize("delay_s", [-5.0, math.nan, math.inf, None, "4"])
def test_a_restart_cost_returns_a_time(delay_s):
    with pytest.raises(
        InputError, match=r"restart_delay_s of job 'a' on 0:1 is .*; expected a finite time in s"
    ):
        run([toy_job()], restart_delay_s=Cost(delay_s))


def test_a_restart_cost_says_what_to_expect():
    with pytest.raises(InputError, match="whose expected_s is None; expected a RestartCost"):
        run([toy_job()], restart_delay_s=lambda job, old, new: 4.0)


def test_a_restart_cost_may_be_a_number_of_numpy():
    found = run([toy_job(steps=1000)], restart_delay_s=Cost(np.float32(3.3)))
    assert found.outcomes["finish_time_s"].tolist() == [float(np.float32(3.3)) + 1001]


def test_waking_up_in_the_past_is_refused():
    with pytest.raises(InfeasibleDecision, match=r"wake_up_s is 0.0; expected a time after"):
        run([toy_job()], lambda view: Decision(wake_up_s=0.0))


# --- nodes that fail and join -----------------------------------------------------------


def test_a_failure_interrupts_and_loses_what_no_checkpoint_holds():
    events = [NodeEvent(11.0, 0, FAILED), NodeEvent(50.0, 0, JOINED)]
    spec = toy_nodes(1, 2)
    kept = run([toy_job(steps=19)], spec=spec, failures=events)
    assert history(kept, "a")[3:] == [
        (11.0, "interrupted"),
        (50.0, "started"),
        (54.0, "ready"),
        (67.0, "finished"),
    ]
    lost = run([toy_job(steps=19)], spec=spec, failures=events, checkpoint_interval_s=3.0)
    assert history(lost, "a")[-1] == (68.0, "finished")  # 7 steps done, 6 of them saved
    kinds = lost.events[lost.events["job_id"] == ""]
    assert kinds["kind"].tolist() == ["node_failed", "node_joined"]


def test_the_view_shows_nodes_that_are_down():
    seen = []

    def script(view):
        up = [view.is_up(node) for node in range(view.n_nodes)]
        seen.append(
            (up, view.gpus_per_node, view.free_gpus, view.n_gpus, view.n_free_gpus, view.free_histogram)
        )
        return start_all(view)

    events = [NodeEvent(5.0, 1, FAILED), NodeEvent(6.0, 1, JOINED), NodeEvent(7.0, 2, JOINED)]
    run([toy_job()], script, spec=toy_nodes(3, 2), failures=events)
    assert seen[0] == ([True, True, False], [2, 2, 0], [2, 2, 0], 4, 4, [1, 0, 2])
    assert seen[1] == ([True, False, False], [2, 0, 0], [1, 0, 0], 2, 1, [2, 1, 0])
    assert seen[3] == ([True] * 3, [2] * 3, [1, 2, 2], 6, 5, [0, 1, 2])


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([NodeEvent(1.0, 7, FAILED)], "node 7; expected 0 to 1"),
        ([NodeEvent(1.0, 0, FAILED), NodeEvent(2.0, 0, FAILED)], "node 0 failed while it is down"),
        ([NodeEvent(1.0, 0, JOINED), NodeEvent(2.0, 0, JOINED)], "node 0 joined while it is up"),
    ],
)
def test_node_events_must_not_contradict_each_other(events, message):
    with pytest.raises(InputError, match=message):
        run([toy_job()], spec=toy_nodes(2, 1), failures=events)


def test_node_events_are_read_from_a_table():
    frame = pd.DataFrame({"time_s": ["3", "9.5"], "node_id": ["0", "0"], "kind": ["failed", "joined"]})
    assert read_failures(frame, "f.csv") == (NodeEvent(3.0, 0, FAILED), NodeEvent(9.5, 0, JOINED))
    with pytest.raises(
        TraceError,
        match=r"f.csv: row 2, column 'kind': found 'gone'; expected failed, joined, w.*, returned",
    ):
        read_failures(frame.assign(kind=["failed", "gone"]), "f.csv")
    with pytest.raises(InputError, match=r"kind 'gone'; expected failed, joined, w.*, returned"):
        NodeEvent(1.0, 0, "gone")
    for time_s, node, message in (
        (-1.0, 0, "time_s is -1.0; expected a number >= 0"),
        (math.nan, 0, "time_s is nan; expected a number"),
        (1.0, -1, "node_id is -1; expected a whole number >= 0"),
    ):
        with pytest.raises(InputError, match=message):
            NodeEvent(time_s, node, FAILED)


# --- what a policy must not do ----------------------------------------------------------


def refused(script, jobs=None, **options):
    with pytest.raises(InfeasibleDecision) as caught:
        run(jobs or [toy_job(steps=99), toy_job("b", 1.0)], script, **options)
    return caught.value


def test_a_device_is_not_given_twice_and_nothing_of_the_decision_stays():
    def script(view):
        item = find(view.catalogue, "ga", "1")
        return {job.spec.job_id: Allocation(item, (0,)) for job in view.pending}

    error = refused(script, [toy_job("a"), toy_job("b"), toy_job("c")])
    assert "job 'c': cannot have 0:1: node 0 has 0 free GPU(s), 1 are needed" in str(error)
    assert "policy 'scripted' at 0.0 s" in str(error)
    assert error.view.free_gpus == [2] and len(error.view.pending) == 3


@pytest.mark.parametrize(
    ("nodes", "options", "message"),
    [
        ((5,), {}, "there is no node 5; expected 0 to 0"),
        ((1,), {"spec": toy_nodes(2, 1), "failures": [NodeEvent(99.0, 1, JOINED)]}, "node 1 is down"),
    ],
)
def test_a_node_must_be_there(nodes, options, message):
    error = refused(lambda view: {"a": Allocation(find(view.catalogue, "ga", "1"), nodes)}, **options)
    assert message in str(error)


def test_cpu_threads_are_counted():
    spec = toy_nodes(1, 4, cpu_threads=7)
    assert "node 0 has 3 free CPU thread(s), 4 are needed" in str(refused(start_all, spec=spec))


def test_host_memory_is_counted():
    rows = throughput_rows("llama7", [("zero-offload", "1", 1.0)])
    heavy = TableCatalogue.from_tables([rows], node=toy_nodes(1, 4).nodes[0])
    base = toy_nodes(1, 4)
    one_fits = heavy.all("llama7")[0].host_memory_bytes_per_gpu * 1.5
    spec = ClusterSpec("small-host", (replace(base.nodes[0], host_memory_bytes=one_fits),), base.network)
    jobs = [toy_job(name, workload="llama7", plan="zero-offload", steps=50) for name in "ab"]
    assert "B of host memory free" in str(refused(start_all, jobs, spec=spec, catalogue=heavy))
    one_by_one = run(jobs, policy("fifo"), spec=spec, catalogue=heavy)
    assert len(one_by_one.outcomes) == 2


def test_only_configurations_of_the_catalogue_run_and_only_for_their_workload():
    alien = find(one_gpu_catalogue(0.1), "ga", "1")
    assert "is not in the catalogue of this cluster" in str(
        refused(lambda view: {"a": Allocation(alien, (0,))})
    )

    def wrong(view):
        return {"a": Allocation(find(view.catalogue, "ga", "1", key="t5"), (0,))}

    assert "trains 'roberta', not 't5'" in str(refused(wrong, catalogue=toy_catalogue()))


def test_only_jobs_that_are_there_change():
    assert "job 'z': is neither pending nor running" in str(refused(lambda view: {"z": None}))


def test_guarantees_bind_a_policy_that_declares_them():
    jobs = [toy_job("a", n_gpus=2, is_guaranteed=True, steps=50), toy_job("b", 1.0)]

    def slow(view):
        return {"a": Allocation(find(view.catalogue, "ga", "1"), (0,))}

    def suspend(view):
        return start_all(view) if view.time_s == 0 else {"a": None}

    options = {"catalogue": toy_catalogue()}
    assert "is guaranteed" in str(refused(slow, jobs, honours_guarantees=True, **options))
    text = "is guaranteed and must not be suspended"
    assert text in str(refused(suspend, jobs, honours_guarantees=True, **options))

    def slow_then_free(view):
        return slow(view) if view.time_s == 0 else start_all(view)

    assert len(run(jobs, slow_then_free, **options).outcomes) == 2  # without the declaration it may


def test_steps_left_are_shown_to_those_who_declare_that_they_need_them():
    seen = []

    def script(view):
        seen.extend(job.steps_left for job in (*view.pending, *view.running))
        return start_all(view)

    jobs = [toy_job(steps=9), toy_job("b", 6.0, steps=4)]
    with pytest.raises(MakespanError, match=r"steps_left is hidden"):
        run(jobs, script)
    run(jobs, script, is_clairvoyant=True)
    assert seen == [10.0, 5.0, 8.0, 1.0]  # a at 0, b and a at 6, b at 14 after its delay and four steps


def test_a_job_shows_what_it_has_had():
    seen = []

    def script(view):
        for job in view.running:
            times = (job.waiting_time_s, job.restart_time_s, job.running_time_s)
            seen.append((view.time_s, *times, job.attained_service_gpu_s, repr(job)))
        for job in view.pending:
            assert job.waiting_time_s == view.time_s - job.spec.submit_time_s
            assert job.restart_time_s == job.running_time_s == job.attained_service_gpu_s == 0
            assert repr(job) == f"JobView({job.spec.job_id!r}, waiting)"
        assert all(view.job(job.spec.job_id) is job for job in (*view.pending, *view.running))
        return {} if view.time_s == 0 else start_all(view)

    run([toy_job("a", steps=50), toy_job("b", 2.0), toy_job("c", 5.0), toy_job("d", 9.0)], script)
    assert seen[0] == (5.0, 2.0, 3.0, 0.0, 3.0, "JobView('a', 0:1)")
    assert (9.0, 2.0, 4.0, 3.0, 7.0, "JobView('a', 0:1)") in seen


def test_the_view_refuses_a_job_that_is_not_there():
    def script(view):
        view.job("z")

    with pytest.raises(MakespanError, match=r"job 'z' is neither pending nor running at 0.0 s"):
        run([toy_job()], script)


def test_a_policy_that_leaves_jobs_behind_is_found_out():
    with pytest.raises(StalledError, match=r"deadlock: 2 pending job.s. and no event left .first job: 'a'"):
        run([toy_job("a"), toy_job("b")], lambda view: {})
    with pytest.raises(StalledError, match=r"deadlock: 1 pending job.s. and none started in 10000 rounds"):
        run([toy_job("a")], lambda view: {}, interval_s=1.0, asks_every_round=True)


def test_a_policy_that_starts_and_stops_a_job_for_ever_is_found_out():
    def stop_and_go(view):
        changes = {job.spec.job_id: None for job in view.running} or start_all(view)
        return Decision(changes, view.time_s + 1.0)

    with pytest.raises(StalledError, match=r"none made progress in 10000 decisions that changed something"):
        run([toy_job("a")], stop_and_go, restart_delay_s=3.0)
    # With some progress each time the job ends.
    assert run([toy_job("a")], stop_and_go, restart_delay_s=0.5).outcomes["n_restarts"].item() > 10

    def restate(view):
        held = {job.spec.job_id: job.allocation for job in view.running}
        return Decision(held or start_all(view), view.time_s + 0.1)

    slow = run([toy_job("a")], restate, restart_delay_s=3000.0)  # 30,000 decisions that change nothing
    assert slow.n_decisions > 20_000


def test_nodes_that_never_return_are_named_where_jobs_wait_for_ever():
    match = r"first job: 'a'., while 1 of 1 nodes are down; expected nodes that return, and a policy"
    with pytest.raises(StalledError, match=match):
        run([toy_job("a")], spec=toy_nodes(1, 2), failures=[NodeEvent(2.0, 0, FAILED)])


# --- what is refused before anything runs -----------------------------------------------


@pytest.mark.parametrize(
    ("jobs", "kind", "message"),
    [
        ([toy_job("a"), toy_job("b"), toy_job("a")], InputError, "row 3: job name 'a' is that of row 1"),
        ([toy_job(workload="bert")], UnknownNameError, "row 1, job 'a'.*'bert'; expected gpt2"),
        (
            [toy_job(plan="zigzag")],
            InputError,
            "row 1, job 'a', on.*'zigzag' cannot be read",
        ),
        ([toy_job(plan="122", n_gpus=2)], InputError, "= 4 GPUs, but the placement has 2"),
        ([toy_job(n_gpus=8)], InputError, "requests 8 GPUs; expected at most 4, those of cluster 'toy-1x4'"),
        (
            [toy_job(n_gpus=3)],
            InputError,
            "on cluster 'toy-1x4': job 'a': no configuration.*expected 1, 2, 4",
        ),
    ],
)
def test_a_trace_that_cannot_run_is_refused(jobs, kind, message):
    with pytest.raises(kind, match=message):
        run(jobs, lambda view: pytest.fail("asked"), spec=toy_nodes(1, 4), catalogue=toy_catalogue())


@pytest.mark.parametrize(
    "options",
    [
        {"restart_delay_s": -1.0},
        {"restart_delay_s": math.nan},
        {"interval_s": -1.0},
        {"interval_s": math.inf},
        {"checkpoint_interval_s": 0.0},
        {"checkpoint_interval_s": math.nan},
        {"extra_steps": -1},
    ],
)
def test_an_option_out_of_range_is_refused(options):
    with pytest.raises(InputError, match=f"{next(iter(options))} is .*; (accepted|expected)"):
        run([toy_job()], lambda view: pytest.fail("asked"), **options)


# --- observers --------------------------------------------------------------------------


class Counter:
    def __init__(self):
        self.events, self.n_running = [], []

    def observe(self, event, view):
        self.events.append(event)
        self.n_running.append((event.kind, len(view.running), view.n_free_gpus))


def test_observers_see_every_event_and_change_nothing():
    jobs = [toy_job(), toy_job("b", 3.0)]
    other, counter = Counter(), Counter()
    watched = run(jobs, observers=[other, counter])
    pd.testing.assert_frame_equal(events_table(other.events), watched.events)
    pd.testing.assert_frame_equal(run(jobs).events, watched.events)
    assert counter.n_running[:2] == [("submitted", 0, 2), ("started", 1, 1)]
    assert counter.n_running[-1] == ("finished", 0, 2)
    assert {event.kind for event in other.events} <= {kind.value for kind in EventKind}


def test_a_result_says_how_long_it_took():
    result = run([toy_job()])
    assert 0 < result.policy_wall_s < result.wall_s
    assert result.n_decisions == 1


def test_simulations_leave_nothing_for_the_collector():
    jobs = [toy_job(f"j{at}", float(at), steps=40, n_gpus=1 + at % 2, plan="ga") for at in range(12)]
    failures = [NodeEvent(30.0, 0, NodeEventKind.FAILED), NodeEvent(60.0, 0, NodeEventKind.JOINED)]
    given = {"restart_delay_s": 2.0, "failures": failures}

    def left(name):
        simulate(jobs, toy_nodes(2, 2), toy_catalogue(), policy(name), **given)
        return gc.collect()

    gc.collect()
    gc.freeze()  # else each collection looks through what all other tests hold
    gc.disable()
    try:
        # The first runs leave what is made once.
        leaving = [name for name in REGISTRY if all(left(name) for _ in range(4))]
    finally:
        gc.enable()
    assert leaving == []
