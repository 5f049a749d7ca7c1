"""The five rules of Morphling, each on a cluster that is small enough to work out by hand."""

from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest
from toy_cluster import simulate, throughput_rows, toy_job, toy_nodes

from makespan.policies import REGISTRY
from makespan.policies.morphling import Curve, Curves, Draft, Freedom, Morphling, Task
from makespan.policies.placing import FreeResources
from makespan.studies import TableCatalogue

DELAY_S = 10.0
POLICY = Morphling()
PLACED = ["started", "reconfigured"]
# Speeds by devices: roberta 1, 1.8, 2.4 (steep at first), t5 1, 1.9, 3.6 (almost linear).
STEPS_S = {"roberta": {"1": 7.2, "2": 4.0, "4": 3.0}, "t5": {"1": 7.2, "2": 7.2 / 1.9, "4": 2.0}}


def catalogue_of(*rows, key="roberta", known=None, cpu_threads=4):
    marks = None if known is None else {key: known}
    return TableCatalogue.from_tables([throughput_rows(key, list(rows), cpu_threads)], known=marks)


BOTH = TableCatalogue.from_tables(
    throughput_rows(key, [("ga", placement, time_s) for placement, time_s in times.items()])
    for key, times in STEPS_S.items()
)


def view_of(index=0, catalogue=BOTH, observed=(), **spec):
    """Return what the rules read of a job that waits and has run some configurations."""
    job = toy_job(f"job-{index}", **spec)
    reference = catalogue.requested(job)

    def step_s(item):
        return item.iter_time_s if item in observed else item.predicted_iter_time_s

    def guarantees(item):
        is_certain = all(one.is_known or one in observed for one in (item, reference))
        return item is reference or (is_certain and step_s(item) <= step_s(reference) * (1 + 1e-9))

    return SimpleNamespace(
        spec=job,
        index=index,
        allocation=None,
        generation=0,
        first_start_s=None,
        restart_count=0,
        running_time_s=0.0,
        restart_time_s=0.0,
        waiting_since_s=job.submit_time_s,
        has_observed=lambda item: item in observed,
        step_s=step_s,
        guarantees=guarantees,
    )


def task_of(index=0, catalogue=BOTH, is_open=True, observed=(), freedom=Freedom(), now_s=0.0, **spec):  # noqa: B008
    job = view_of(index, catalogue, observed, **spec)
    is_starving = POLICY.starves_from_s(job, SimpleNamespace(time_s=now_s)) <= now_s
    curve = Curves(catalogue, freedom).of(job)
    return Task(job, curve, is_open=is_open, yields=is_open, is_starving=is_starving)


def holding(free, *held):
    """Return a draft in which tasks hold configurations beside free devices: (task, placement, nodes)."""
    gpus, fits = list(free), []
    for task, placement, nodes in held:
        item = next(item for item in task.curve.speeds if item.placement.text == placement)
        fits.append((task, (item, nodes)))
        for node, count in zip(nodes, item.counts, strict=True):
            gpus[node] += count
    draft = Draft(FreeResources(gpus), {})
    for task, fit in fits:
        draft.place(task, fit)
        task.held = fit
    return draft


def sizes(draft):
    return {task.index: fit[0].n_gpus for task, fit in draft.slots.items()}


# --- the curve ------------------------------------------------------------------------------


def test_a_curve_is_speed_over_that_of_the_request():
    curve = task_of(n_gpus=2).curve
    assert [curve.speeds[item] for item in BOTH.all("roberta")] == pytest.approx([1 / 1.8, 1.0, 2.4 / 1.8])
    assert [(step.n_gpus, step.slope) for step in curve.starts] == [
        (1, pytest.approx(1 / 1.8)),
        (2, pytest.approx(0.5)),
        (4, pytest.approx(2.4 / 1.8 / 4)),
    ]


def test_a_job_goes_by_the_times_that_it_has_seen_itself():
    frames = [throughput_rows("roberta", [("ga", "1", 4.0), ("gc", "1", 6.0)])]
    catalogue = TableCatalogue.from_tables(frames, {"roberta": [4.0, 3.0]}, known={"roberta": [False, False]})
    slow = next(item for item in catalogue.all("roberta") if item.plan == "gc")
    for observed, best in (((), "gc"), ((slow,), "ga")):
        (step,) = task_of(catalogue=catalogue, observed=observed).curve.starts
        assert step.items[0].plan == best


def test_the_minimum_of_a_guaranteed_job_is_its_request_until_more_is_known():
    rows = [("gc", "1", 3.0), ("ga", "2", 4.0), ("ga", "4", 2.0)]
    for known, least in (([True, True, True], 1), ([True, False, True], 2), ([False, True, True], 2)):
        catalogue = catalogue_of(*rows, known=known)
        guaranteed = task_of(catalogue=catalogue, n_gpus=2, is_guaranteed=True)
        assert guaranteed.curve.least_gpus == least == guaranteed.curve.starts[0].n_gpus
    unsure = catalogue_of(*rows, known=[True, False, True])
    after = task_of(
        catalogue=unsure, n_gpus=2, is_guaranteed=True, observed=(unsure.requested(toy_job(n_gpus=2)),)
    )
    assert after.curve.least_gpus == 1
    assert task_of(catalogue=unsure, n_gpus=2).curve.least_gpus == 0


# --- rule 1: order --------------------------------------------------------------------------


def test_guaranteed_jobs_come_first_then_those_that_starve_then_steep_ones():
    now_s = 10_000.0
    tasks = [
        task_of(
            0, n_gpus=4, now_s=now_s, submit_time_s=now_s
        ),  # speeds relative to four devices: the flattest curve
        task_of(1, n_gpus=1, now_s=now_s, submit_time_s=now_s),
        task_of(2, n_gpus=4, now_s=now_s, submit_time_s=now_s - POLICY.age_limit_s),
        task_of(3, n_gpus=4, now_s=now_s, submit_time_s=now_s - POLICY.age_limit_s - 1.0),
        task_of(4, n_gpus=4, is_guaranteed=True, now_s=now_s, submit_time_s=now_s),
        task_of(5, n_gpus=1, is_guaranteed=True, now_s=now_s, submit_time_s=now_s),
        task_of(6, n_gpus=4, is_guaranteed=True, now_s=now_s, submit_time_s=0.0),
        task_of(7, n_gpus=1, now_s=now_s, submit_time_s=now_s - POLICY.age_limit_s + 1.0),
    ]
    served = sorted(tasks, key=POLICY.rank)
    assert [task.index for task in served] == [6, 5, 4, 3, 2, 1, 7, 0]


# --- rule 2: room ---------------------------------------------------------------------------


def test_a_job_starts_at_its_steepest_size_on_the_fewest_nodes():
    catalogue = catalogue_of(("ga", "11", 3.0), ("ga", "2", 3.5), ("gc", "2", 3.2), ("ga", "1", 9.0))
    draft = holding([1, 1, 2])
    job = task_of(catalogue=catalogue, n_gpus=2)
    assert draft.start(job)
    item, nodes = draft.slots[job]
    assert (item.plan, item.counts, nodes) == ("gc", (2,), (2,))
    by_speed = Curve(job.job, catalogue.all("roberta"), catalogue.requested(job.job.spec), by_speed=True)
    assert [item.counts for item in by_speed.starts[0].items] == [(1, 1), (2,)]
    assert [item.counts for item in job.curve.starts[0].items] == [(2,), (1, 1)]
    spread = holding([1, 1, 0])
    assert spread.start(job) and spread.slots[job][0].counts == (1, 1)
    assert not holding([0, 0]).start(job)


def test_the_lowest_slope_shrinks_first_and_only_as_far_as_needed():
    flat, steep = task_of(0), task_of(1, workload="t5")
    draft = holding([0, 0], (flat, "4", (0,)), (steep, "4", (1,)))
    newcomer = task_of(2, is_guaranteed=True, n_gpus=2)
    assert flat.curve.down(flat.held[0])[0].slope == pytest.approx(0.3)
    assert draft.make_room(newcomer, POLICY)
    assert sizes(draft) == {0: 2, 1: 4, 2: 2}


def test_what_turns_out_not_to_be_needed_is_given_back():
    flat = task_of(0, n_gpus=4)
    rigid = task_of(1, workload="t5", n_gpus=4, freedom=Freedom(resources=False))
    draft = holding([0, 0], (flat, "4", (0,)), (rigid, "4", (1,)))
    lost = [task.curve.down(task.held[0])[0].slope for task in (flat, rigid)]
    assert lost == pytest.approx([0.125, 0.25])  # so the first shrinks first, in vain
    newcomer = task_of(2, workload="t5", is_guaranteed=True, n_gpus=4)
    assert draft.make_room(newcomer, POLICY)
    assert sizes(draft) == {0: 4, 2: 4}
    assert draft.slots[flat] is flat.held


def test_nobody_shrinks_below_a_minimum_and_what_is_in_vain_changes_nothing():
    sure = task_of(0, is_guaranteed=True, n_gpus=2)
    draft = holding([0], (sure, "4", (0,)))
    assert [step.n_gpus for step in sure.curve.down(sure.held[0])] == [2]
    assert draft.make_room(task_of(1, is_guaranteed=True, n_gpus=2), POLICY)
    assert sizes(draft) == {0: 2, 1: 2}
    assert not draft.make_room(task_of(2, is_guaranteed=True, n_gpus=1), POLICY)
    assert sizes(draft) == {0: 2, 1: 2} and draft.free.gpus == [0]
    assert not sure.curve.down(next(item for item in sure.curve.speeds if item.n_gpus == 2))


def test_a_best_effort_job_takes_only_from_lower_slopes_with_an_open_gate():
    steep_request, flat_request = {"n_gpus": 1}, {"n_gpus": 4}
    for mine, is_open, expected in (
        (steep_request, True, True),  # 1 a device against 0.3
        (flat_request, True, True),  # 1 / 2.4 a device against 0.3
        (steep_request, False, False),
    ):
        victim = task_of(0, is_open=is_open)
        draft = holding([0], (victim, "4", (0,)))
        assert draft.make_room(task_of(1, **mine), POLICY) is expected
    weak = task_of(1, n_gpus=4)  # 0.42 a device, and the victim loses 0.8 with its second one
    draft = holding([0], (task_of(0), "2", (0,)))
    assert not draft.make_room(weak, POLICY)
    assert draft.make_room(task_of(2, n_gpus=4, is_guaranteed=False, workload="t5"), POLICY) is False
    assert sizes(draft) == {0: 2}


def test_a_starving_job_takes_from_steeper_curves_too():
    now_s = 2 * POLICY.age_limit_s
    old = {"now_s": now_s, "submit_time_s": now_s - POLICY.age_limit_s, "n_gpus": 4}
    flat = task_of(1, **old | {"submit_time_s": now_s})  # 0.42 a device, and the victim loses 0.8
    for job, policy, expected in (
        (flat, POLICY, False),
        (task_of(1, **old), POLICY, True),
        (task_of(1, **old), replace(POLICY, starving_takes=False), False),
    ):
        draft = holding([0], (task_of(0), "2", (0,)))
        assert draft.make_room(job, policy) is expected
        assert sizes(draft) == ({0: 1, 1: 1} if expected else {0: 2})


def test_a_starving_job_waits_for_gates_and_for_guarantees():
    now_s = 2 * POLICY.age_limit_s
    starving = task_of(1, now_s=now_s)
    assert starving.is_starving
    closed = holding([0], (task_of(0, is_open=False), "2", (0,)))
    assert not closed.make_room(starving, POLICY)
    assert closed.make_room(starving, replace(POLICY, starving_passes_gates=True))
    sure = holding([0], (task_of(0, is_guaranteed=True, n_gpus=2), "2", (0,)))
    assert not sure.make_room(starving, POLICY)


def test_age_counts_from_submission_whatever_a_job_has_run():
    view, job = SimpleNamespace(time_s=9000.0), view_of(submit_time_s=100.0)
    job.waiting_since_s = 8000.0
    assert POLICY.starves_from_s(job, view) == 100.0 + POLICY.age_limit_s
    waiting = replace(POLICY, age_since="waiting")
    assert waiting.starves_from_s(job, view) == 8000.0 + POLICY.age_limit_s
    job.allocation = object()
    assert waiting.starves_from_s(job, view) == 9000.0 + POLICY.age_limit_s


def test_starving_jobs_with_gpus_are_ordered_by_slope_and_index_if_age_counts_from_waiting():
    # The time since which a job with GPUs waits is NaN, which must not decide which job is stopped.
    policy, tasks = replace(POLICY, age_since="waiting"), [task_of(index, now_s=1e9) for index in range(4)]
    for task in tasks:
        task.job.allocation, task.job.waiting_since_s = object(), float("nan")
    tasks[3].job.allocation, tasks[3].job.waiting_since_s = None, 5.0
    assert [task.index for task in sorted((tasks[k] for k in (2, 0, 3, 1)), key=policy.rank)] == [3, 0, 1, 2]


def test_room_is_forced_for_a_smaller_size_where_the_steepest_cannot_be_reached():
    """The steepest size of the job takes four GPUs; a guaranteed job keeps two of them."""
    superlinear = catalogue_of(("ga", "1", 8.0), ("ga", "2", 4.0), ("ga", "4", 1.0))
    job = task_of(2, catalogue=superlinear, n_gpus=1)
    assert [step.n_gpus for step in job.curve.starts] == [4, 1, 2]
    for forces_smaller, expected in ((True, {0: 2, 1: 1, 2: 1}), (False, {0: 2, 1: 2})):
        sure, flat = task_of(0, is_guaranteed=True, n_gpus=2), task_of(1)
        draft = holding([0], (sure, "2", (0,)), (flat, "2", (0,)))
        assert draft.make_room(job, replace(POLICY, forces_smaller=forces_smaller)) is forces_smaller
        assert sizes(draft) == expected


def test_a_guarantee_needs_no_open_gate_and_may_stop_a_best_effort_job():
    victim = task_of(0, is_open=False)
    draft = holding([0], (victim, "1", (0,)))
    assert draft.make_room(task_of(1, is_guaranteed=True), POLICY)
    assert sizes(draft) == {1: 1}


# --- rule 3: CPU threads and host memory ----------------------------------------------------


def test_a_plan_with_fewer_threads_is_taken_where_a_node_lacks_them():
    catalogue = TableCatalogue.from_tables(
        [
            throughput_rows("t5", [("zero-offload", "1", 2.0)], cpu_threads=8),
            throughput_rows("t5", [("zero-offload", "1", 3.0)], cpu_threads=2),
            throughput_rows("t5", [("zero-offload", "1", 3.5)], cpu_threads=4),
        ]
    )
    job = task_of(catalogue=catalogue, workload="t5", plan="zero-offload")
    (step,) = job.curve.starts
    assert [item.cpu_threads for item in step.items] == [8, 2]  # four threads are slower than two
    for cpus, expected in ((8, 8), (7, 2), (1, None)):
        draft = Draft(FreeResources([1], [cpus], [1e15]), {})
        assert draft.start(job) is (expected is not None)
        assert expected is None or draft.slots[job][0].cpu_threads == expected


# --- rule 4: what is left -------------------------------------------------------------------


def test_free_devices_go_to_the_steepest_curve_until_nobody_gains():
    flat, steep = task_of(0), task_of(1, workload="t5")
    draft = holding([1, 2], (flat, "1", (0,)), (steep, "2", (1,)))
    draft.grow()
    assert sizes(draft) == {0: 2, 1: 4}
    assert draft.free.n_gpus == 0
    alone = holding([8, 8], (flat, "4", (0,)))
    alone.grow()
    assert alone.slots[flat] is flat.held and alone.free.n_gpus == 16


def test_a_running_job_does_not_grow_before_its_gate_opens_but_a_newcomer_does():
    closed = task_of(0, is_open=False)
    draft = holding([3], (closed, "1", (0,)))
    draft.grow()
    assert sizes(draft) == {0: 1}
    newcomer = task_of(1)
    assert draft.start(newcomer)
    draft.grow()
    assert sizes(draft) == {0: 1, 1: 2}


# --- rule 5: gate ---------------------------------------------------------------------------


def test_the_gate_opens_when_restarts_are_three_percent_of_the_time_on_devices():
    view = SimpleNamespace(time_s=1000.0, restart_delay_s=30.0)
    never = POLICY.initial_state(toy_nodes(1, 4), BOTH)
    once = replace(never, own_changes={"job-0": 1})
    job = view_of()
    assert POLICY.opens_s(job, view, never) == 1000.0
    job.first_start_s, job.running_time_s, job.restart_time_s, job.restart_count = 0.0, 900.0, 30.0, 0
    assert POLICY.opens_s(job, view, never) == pytest.approx(1000.0 + 30.0 / 0.03 - 930.0)
    assert POLICY.opens_s(job, view, once) == pytest.approx(1000.0 + 60.0 / 0.03 - 930.0)
    assert POLICY.opens_s(job, view, once, n_more=0) == POLICY.opens_s(job, view, never)
    job.running_time_s = 1970.0
    assert POLICY.opens_s(job, view, once) == 1000.0


def test_restarts_that_others_caused_do_not_close_the_gate():
    view = SimpleNamespace(time_s=1000.0, restart_delay_s=30.0)
    state = POLICY.initial_state(toy_nodes(1, 4), BOTH)
    job = view_of()
    job.first_start_s, job.running_time_s, job.restart_time_s, job.restart_count = 0.0, 900.0, 100.0, 5
    assert POLICY.opens_s(job, view, state) == 1000.0
    all_count = replace(POLICY, gate_counts="all")
    assert all_count.opens_s(job, view, state) == pytest.approx(1000.0 + 6 * 30.0 / 0.03 - 1000.0)


def test_a_job_that_was_shrunk_grows_back_as_soon_as_its_own_changes_allow():
    """A guaranteed job takes one of two GPUs for a while; the other job gets it back when that one ends."""
    jobs = [
        toy_job("long", steps=3000, n_gpus=2),
        toy_job("taker", 2000.0, n_gpus=1, steps=20, is_guaranteed=True),
    ]
    sizes_of = {}
    for counts in ("own", "all"):
        policy = replace(POLICY, gate_counts=counts)
        events = simulate(jobs, toy_nodes(1, 2), BOTH, policy, restart_delay_s=60.0).events
        mine = events[(events["job_id"] == "long") & events["kind"].isin(PLACED)]
        ends_s = events.loc[(events["job_id"] == "taker") & (events["kind"] == "finished"), "time_s"].iloc[0]
        sizes_of[counts] = mine["n_gpus"].tolist(), mine["time_s"].iloc[-1] - ends_s
    assert sizes_of["own"][0][-2:] == sizes_of["all"][0][-2:] == [1, 2]
    assert sizes_of["own"][1] < sizes_of["all"][1]


def test_a_lone_job_grows_when_its_gate_opens_although_nothing_happens():
    jobs = [toy_job("long", steps=1000), toy_job("other", workload="t5", n_gpus=2, steps=5)]
    # Both start at one device and share the node; the other leaves long before the gate opens.
    result = simulate(jobs, toy_nodes(1, 2), BOTH, POLICY, restart_delay_s=DELAY_S)
    mine = result.events[(result.events["job_id"] == "long") & result.events["kind"].isin(PLACED)]
    assert mine["n_gpus"].tolist() == [1, 2]
    grown_s = mine["time_s"].tolist()[1]
    assert grown_s == pytest.approx(DELAY_S / 0.03, rel=1e-6)
    never = simulate(jobs, toy_nodes(1, 2), BOTH, Morphling(gate_share=0.9999), restart_delay_s=DELAY_S)
    assert never.events.loc[never.events["job_id"] == "long", "n_gpus"].max() == 1


def test_a_job_that_starts_to_starve_is_looked_at():
    spec = toy_nodes(1, 1)
    jobs = [toy_job("long", steps=10_000), toy_job("late", 1.0, steps=10)]
    result = simulate(jobs, spec, BOTH, POLICY, restart_delay_s=DELAY_S)
    assert result.n_decisions >= 5  # two arrivals, two ends, and the moment at which it starves


# --- ablations ------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", "-e", "-r", "-n"])
def test_ablations_are_registered_and_know_nothing_of_the_work_left(suffix):
    entry = REGISTRY[f"morphling{suffix}"]
    assert not entry.is_clairvoyant and entry.honours_guarantees
    assert entry.freedom == Freedom(plan=suffix in ("", "-e"), resources=suffix in ("", "-r"))


def test_without_freedom_of_resources_a_job_can_only_be_stopped():
    fixed = task_of(0, freedom=Freedom(resources=False), n_gpus=2)
    item = fixed.curve.starts[0].items[0]
    assert item.n_gpus == 2 and not fixed.curve.up(item)
    assert [step.n_gpus for step in fixed.curve.down(item)] == [0]


def test_jobs_of_one_kind_share_a_curve_until_one_of_them_learns():
    curves = Curves(BOTH, Freedom())
    first, second = view_of(0), view_of(1)
    assert curves.of(first) is curves.of(second)
    wiser = view_of(2, observed=(BOTH.requested(toy_job()),))
    assert isinstance(curves.of(wiser), Curve) and curves.of(wiser) is not curves.of(first)
    assert POLICY.initial_state(toy_nodes(1, 4), BOTH).curves.catalogue is BOTH
    assert inf > POLICY.age_limit_s > 0
