"""Decisions of the baseline policies on clusters small enough to decide by hand."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import linprog
from toy_cluster import FAST, SLOW, find, mixed_nodes, simulate, throughput_rows, toy_job, toy_nodes

from makespan.errors import UnknownNameError
from makespan.policies import REGISTRY
from makespan.policies.base import Queue, preempt, serve
from makespan.policies.gavel import Matrix, fair_shares, needed_shares
from makespan.policies.placing import FreeResources
from makespan.policies.queues import CpuDemands
from makespan.policies.sia import Group, Menu, Size, Sizes, choose, choose_by_type
from makespan.sim import Decision, NodeEvent, NodeEventKind, Scenario
from makespan.studies import TableCatalogue, run as run_scenario

ROWS = [
    ("ga", "1", 1.0),
    ("ga", "2", 0.6),
    ("ga", "11", 0.8),
    ("ga", "4", 0.4),
    ("ga", "22", 1.0),
    ("gc", "8", 0.3),
    ("gc", "4", 0.5),
]
CATALOGUE = TableCatalogue.from_tables([throughput_rows("roberta", ROWS)])


def job(name, submit_time_s=0.0, steps=10, n_gpus=1, **changes):
    return toy_job(name, submit_time_s, steps=steps, n_gpus=n_gpus, **changes)


def run(policy, jobs, cluster=None, delay_s=0.0, catalogue=CATALOGUE, interval_s=0.0):
    chosen = REGISTRY[policy] if isinstance(policy, str) else policy
    return simulate(
        jobs,
        cluster or toy_nodes(1, 1),
        catalogue,
        chosen,
        restart_delay_s=delay_s,
        interval_s=interval_s,
        extra_steps=0,
    )


def story(result, *kinds):
    """Return what happened as (time, job), for events of some kinds."""
    rows = result.events[result.events["kind"].isin(kinds)]
    return list(zip(rows["time_s"].tolist(), rows["job_id"].tolist(), strict=True))


# --- placing and preemption -----------------------------------------------------------------


def test_best_fit_takes_the_node_with_the_least_room_and_the_first_of_equals() -> None:
    free = FreeResources([4, 2, 2, 8], [64] * 4, [0.0] * 4)
    assert free.fit(find(CATALOGUE, "ga", "2")) == (1,)
    assert set(free.fit(find(CATALOGUE, "ga", "22"))) == {1, 2}
    assert free.fit(find(CATALOGUE, "gc", "8")) == (3,)


def test_a_node_without_threads_is_passed_over() -> None:
    free = FreeResources([2, 4], [7, 8], [0.0, 0.0])  # two GPUs want four threads each
    assert free.fit(find(CATALOGUE, "ga", "2")) == (1,)
    assert free.fit(find(CATALOGUE, "ga", "22")) is None


def test_a_node_without_host_memory_is_passed_over() -> None:
    hungry = replace(find(CATALOGUE, "ga", "2"), host_memory_bytes_per_gpu=3.0)
    free = FreeResources([2, 4], [64, 64], [5.0, 6.0])
    nodes = free.fit(hungry)
    assert nodes == (1,)
    free.take(hungry, nodes)
    assert free.fit(hungry) is None
    assert not free.take_if_free(hungry, [1])  # two GPUs are left, but no memory
    assert not free.take_if_free(hungry, [0])
    free.give(hungry, nodes)
    assert free.n_gpus == 6
    assert free.take_if_free(hungry, nodes) and free.n_gpus == 4


class _Running:
    def __init__(self, plan, placement, node):
        self.allocation = find(CATALOGUE, plan, placement).on([node])


def test_room_is_made_by_as_few_victims_as_needed() -> None:
    small, large = _Running("ga", "1", 0), _Running("ga", "2", 1)
    pair = find(CATALOGUE, "ga", "2")
    before = FreeResources([1, 0], [64, 64], [0.0, 0.0])
    _, found, gone = preempt(before, (pair,), [large, small])
    assert (found, gone) == ((pair, (1,)), [large])
    free, found, gone = preempt(before, (pair,), [small, large])
    assert (found, gone, free.gpus) == ((pair, (0,)), [small], [2, 0])
    assert before.gpus == [1, 0]


def test_nobody_goes_if_all_together_are_not_enough() -> None:
    free = FreeResources([0, 0], [64, 64], [0.0, 0.0])
    assert preempt(free, (find(CATALOGUE, "ga", "4"),), [_Running("ga", "2", 0)]) is None
    assert free.gpus == [0, 0]


# --- the queue ------------------------------------------------------------------------------


def plain_serve(view, order, options, victims=None, queue=None, kept_threads=0):
    """Serve all jobs, sorted anew at every decision: what `serve` must come to."""
    free = FreeResources.of(view, is_tight=True, kept_threads=kept_threads)
    waiting = sorted((*order(job), job.index, job) for job in view.pending)
    changes, refused = {}, set()
    while waiting:
        candidate = waiting.pop(0)[-1]
        choices = options(candidate)
        if choices in refused:
            continue
        found = free.first_fit(choices)
        if found is None and victims is not None:
            others = [other for other in victims(candidate) if other.spec.job_id not in changes]
            made = preempt(free, choices, others)
            if made is not None:
                free, found, gone = made
                changes |= dict.fromkeys((other.spec.job_id for other in gone), None)
                waiting = sorted([*waiting, *((*order(other), other.index, other) for other in gone)])
        if found is None:
            refused.add(choices)
        else:
            free.take(*found)
            changes[candidate.spec.job_id] = found[0].on(found[1])
    return Decision(changes)


QUEUED = {
    "sjf": "queues",
    "srtf": "queues",
    "tiresias": "queues",
    "gavel": "gavel",
    "synergy": "queues",
}


def busy_list():
    """Return many jobs of several sizes, some guaranteed, and a node that fails twice."""
    rng = np.random.default_rng(1)
    jobs = [
        job(f"j{i}", float(at_s), int(steps), n_gpus=int(size), is_guaranteed=bool(i % 5 == 0))
        for i, (at_s, steps, size) in enumerate(
            zip(rng.integers(0, 300, 120), rng.integers(1, 90, 120), rng.choice([1, 2, 4], 120), strict=True)
        )
    ]
    down, up = NodeEventKind.FAILED, NodeEventKind.JOINED
    times = ((90.0, down), (130.0, up), (200.0, down), (260.0, up))
    return jobs, [NodeEvent(at_s, 1, kind) for at_s, kind in times]


@pytest.mark.parametrize("name", QUEUED)
def test_a_kept_queue_gives_the_schedules_of_one_that_is_sorted_anew(name, monkeypatch) -> None:
    jobs, failures = busy_list()
    short = {"tiresias": {"thresholds_gpu_s": (20.0, 60.0)}, "gavel": {"turn_s": 20.0, "turn_delays": 1.0}}
    policy = replace(REGISTRY[name], **short.get(name, {}))
    options = {"restart_delay_s": 2.0, "interval_s": 0.0, "failures": failures}
    kept = simulate(jobs, toy_nodes(3, 4), CATALOGUE, policy, **options).events
    monkeypatch.setattr(f"makespan.policies.{QUEUED[name]}.serve", plain_serve)
    assert kept.equals(simulate(jobs, toy_nodes(3, 4), CATALOGUE, policy, **options).events)
    assert (kept["kind"] == "interrupted").any()
    assert (kept["kind"] == "suspended").any() == (name not in ("sjf", "synergy"))


@pytest.mark.parametrize("shares", [True, False])
def test_antman_decides_as_if_it_had_sorted_its_queue_anew(shares) -> None:
    kind = type(REGISTRY["antman"])

    class Forgetful(kind):
        def decide(self, view, state):
            return kind.decide(self, view, Queue())

    jobs, failures = busy_list()
    options = {"restart_delay_s": 2.0, "interval_s": 0.0, "failures": failures}
    kept, anew = (
        simulate(jobs, toy_nodes(3, 4), CATALOGUE, one(shares=shares), **options).events
        for one in (kind, Forgetful)
    )
    assert kept.equals(anew)
    assert (kept["kind"] == "interrupted").any() and (kept["kind"] == "sharing").any() == shares
    assert (kept["kind"] == "suspended").any()


def test_a_decision_asks_no_waiting_job_that_it_has_sorted_before() -> None:
    asked = []

    def order(job):
        asked.append(job.spec.job_id)
        return (job.spec.submit_time_s,)

    class Served(type(REGISTRY["sjf"])):
        def decide(self, view, state):
            catalogue = view.catalogue
            return serve(view, order, lambda job: catalogue.as_requested(job.spec), queue=state), state

    jobs = [job(f"j{i:03}", float(i), 5) for i in range(200)]
    run(Served(), jobs)
    assert sorted(asked) == [item.job_id for item in jobs]


# --- SJF and SRTF ---------------------------------------------------------------------------


def test_sjf_starts_the_shortest_first_and_displaces_nobody() -> None:
    jobs = [job("long", 0.0, 50), job("mid", 1.0, 20), job("short", 2.0, 5)]
    result = run("sjf", jobs)
    assert story(result, "started") == [(0.0, "long"), (50.0, "short"), (55.0, "mid")]
    assert story(result, "suspended") == []


def test_sjf_lets_a_short_job_pass_one_that_does_not_fit() -> None:
    jobs = [job("first", 0.0, 50), job("wide", 1.0, 10, n_gpus=2), job("narrow", 2.0, 30)]
    assert story(run("sjf", jobs, toy_nodes(1, 2)), "started") == [
        (0.0, "first"),
        (2.0, "narrow"),
        (50.0, "wide"),
    ]


def test_sjf_spreads_a_job_only_if_it_may_take_longer() -> None:
    # From 5 s on, one GPU is free on each node; from 30 s on, two on the first.
    jobs = [job("a", 0.0, 30), job("b", 0.0, 5), job("c", 0.0, 40), job("wide", 1.0, 100, n_gpus=2)]
    assert story(run("sjf", jobs, toy_nodes(2, 2)), "started")[-1] == (30.0, "wide")
    hasty = replace(REGISTRY["sjf"], max_stretch=1.5)
    assert story(run(hasty, jobs, toy_nodes(2, 2)), "started")[-1] == (5.0, "wide")


def test_srtf_displaces_the_longest_and_brings_it_back() -> None:
    result = run("srtf", [job("long", 0.0, 50), job("short", 10.0, 5)])
    assert story(result, "started") == [(0.0, "long"), (10.0, "short"), (15.0, "long")]
    assert story(result, "finished") == [(15.0, "short"), (55.0, "long")]


def test_srtf_leaves_a_job_alone_if_the_gain_is_less_than_its_delays() -> None:
    # At 10 s the running job has 1 + 20 - 10 = 11 s left; the other needs 1 + 8 = 9 s.
    policy = replace(REGISTRY["srtf"], min_advantage=2.0)
    result = run(policy, [job("long", 0.0, 20), job("short", 10.0, 8)], delay_s=1.0)
    assert story(result, "suspended") == []
    result = run(policy, [job("long", 0.0, 20), job("short", 10.0, 7)], delay_s=1.0)
    assert story(result, "suspended") == [(10.0, "long")]


# --- Tiresias -------------------------------------------------------------------------------


def test_tiresias_displaces_a_job_once_it_has_sunk_to_a_later_queue() -> None:
    policy = replace(REGISTRY["tiresias"], thresholds_gpu_s=(20.0,))
    jobs = [job("old", 0.0, 50), job("early", 10.0, 5), job("late", 30.0, 5)]
    result = run(policy, jobs)
    # At 10 s the first job has had 10 GPU s and stays; at 30 s it has had 30 and yields to both.
    assert story(result, "suspended") == [(30.0, "old")]
    assert story(result, "started") == [(0.0, "old"), (30.0, "early"), (35.0, "late"), (40.0, "old")]


def test_tiresias_counts_devices_times_time() -> None:
    policy = replace(REGISTRY["tiresias"], thresholds_gpu_s=(20.0,))
    jobs = [job("wide", 0.0, 50, n_gpus=2), job("new", 12.0, 5, n_gpus=2)]
    assert story(run(policy, jobs, toy_nodes(1, 2)), "suspended") == [(12.0, "wide")]


def test_tiresias_promotes_a_job_that_waits_too_long() -> None:
    policy = replace(REGISTRY["tiresias"], thresholds_gpu_s=(20.0,), promotion=1.0)
    jobs = [job("old", 0.0, 50), *(job(f"new{i}", 30.0 + i, 15) for i in range(5))]
    plain = run(replace(policy, promotion=None), jobs)
    promoted = run(policy, jobs)
    assert story(plain, "started")[-1][1] == "old"
    assert [name for _, name in story(promoted, "started")].index("old", 1) < 5


def test_tiresias_of_pollux_admits_jobs_by_rank_wherever_devices_are() -> None:
    nodes = toy_nodes(2, 2)
    jobs = [job("a", 0.0, 20, n_gpus=2), job("wide", 1.0, 5, n_gpus=4), job("b", 2.0, 50, n_gpus=2)]
    # b passes the wide job, which does not fit beside a, and yields to it once a has finished.
    result = run(REGISTRY["tiresias-pollux"], jobs, nodes)
    assert story(result, "suspended") == [(12.0, "b")]
    started = [name for _, name in story(result, "started")]
    assert started == ["a", "b", "wide", "b"]
    assert story(run("tiresias", jobs, nodes), "suspended") == []


def test_tiresias_of_pollux_demotes_a_job_though_nothing_else_happens_then() -> None:
    policy = replace(REGISTRY["tiresias-pollux"], thresholds_gpu_s=(20.0,))
    jobs = [job("old", 0.0, 50), job("new", 12.0, 5)]
    result = run(policy, jobs)
    assert story(result, "suspended") == [(20.0, "old")]
    assert story(run(replace(REGISTRY["tiresias"], thresholds_gpu_s=(20.0,)), jobs), "suspended") == []


# --- Every rule of placement ----------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("fifo", "sjf", "srtf", "tiresias", "tiresias-pollux", "gavel", "synergy", "antman", "sia"),
        *("morphling", "morphling-work"),
    ],
)
def test_every_policy_places_by_the_rule_of_the_scenario(name) -> None:
    jobs = [job(f"j{i}", 5.0 * (i // 2), 40 + i, n_gpus=1 + i % 2) for i in range(8)]
    scenario = Scenario("toy", tuple(jobs), toy_nodes(3, 4), CATALOGUE, 2.0, placement="worst-fit")
    done = run_scenario(scenario, REGISTRY[name])
    assert done.violations == ()
    best = run_scenario(replace(scenario, placement="best-fit"), REGISTRY[name])
    nodes = [list(it.result.events["nodes"]) for it in (done, best)]
    assert nodes[0] != nodes[1] or name == "morphling-work"  # which gives whole nodes to jobs here


def test_an_unknown_rule_of_placement_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="unknown placement 'first-fit'"):
        Scenario("toy", (), toy_nodes(1, 4), CATALOGUE, placement="first-fit")


# --- AntMan and Synergy ---------------------------------------------------------------------


def test_antman_makes_the_latest_best_effort_job_a_guest_and_no_more_than_needed() -> None:
    jobs = [job("a", 0.0, 50), job("b", 1.0, 50), job("sure", 5.0, 10, is_guaranteed=True)]
    result = run("antman", jobs, toy_nodes(1, 2), delay_s=3.0)
    assert story(result, "sharing") == [(5.0, "b"), (18.0, "b")]
    assert story(result, "suspended", "reconfigured") == []
    # b does one step by 5 s, 0.34 a second until 18 s, and the rest of 50 alone.
    assert story(result, "finished")[-1] == (pytest.approx(18.0 + 49.0 - 0.34 * 13.0), "b")


def test_antman_without_sharing_suspends_the_latest_best_effort_job() -> None:
    jobs = [job("a", 0.0, 50), job("b", 1.0, 50), job("sure", 5.0, 10, is_guaranteed=True)]
    result = run(replace(REGISTRY["antman"], shares=False), jobs, toy_nodes(1, 2))
    assert story(result, "suspended") == [(5.0, "b")]
    assert story(result, "started")[-1] == (15.0, "b")


def test_antman_begins_best_effort_jobs_as_guests_one_a_device_and_guaranteed_ones_never() -> None:
    jobs = [
        job("sure", 0.0, 30, is_guaranteed=True),
        job("too", 1.0, 5, is_guaranteed=True),
        job("c", 2.0, 1),
        job("d", 2.0, 1),
    ]
    result = run("antman", jobs)
    rows = result.events[result.events["kind"] == "started"]
    assert rows["shared_nodes"].tolist() == ["", "0:1", "0:1", ""]
    shared_s = 1 / 0.34
    assert story(result, "started") == [
        (0.0, "sure"), (2.0, "c"), (pytest.approx(2.0 + shared_s), "d"), (30.0, "too"),
    ]  # fmt: skip
    assert story(result, "suspended") == []


def test_a_guest_of_antman_moves_to_free_devices_after_as_long_as_a_restart_takes() -> None:
    jobs = [job("sure", 0.0, 200, is_guaranteed=True), job("short", 0.0, 14, is_guaranteed=True), job("c")]
    result = run("antman", jobs, toy_nodes(1, 2), delay_s=10.0)
    # It shares one of two devices; which of them is nobody's business, so it has one to itself in the end.
    assert story(result, "sharing") == [(24.0, "c")]
    jobs = [job("sure", 0.0, 200, is_guaranteed=True), job("other", 0.0, 14, is_guaranteed=True)]
    jobs += [job("c", 1.0, 60), job("d", 1.0, 60)]
    result = run("antman", jobs, toy_nodes(2, 1), delay_s=10.0)
    assert story(result, "sharing") == [(24.0, "d")]  # where "other" was; c is beside the one that goes on
    d_end_s = 24.0 + 60 - 0.34 * 13
    assert story(result, "finished")[1] == (pytest.approx(d_end_s), "d")
    assert story(result, "reconfigured") == [(pytest.approx(d_end_s), "c")]


def test_a_guest_of_antman_needs_memory_on_the_device_and_none_on_the_host() -> None:
    cluster = toy_nodes(1, 4)
    rows = [("ga", "4", 1.0), ("zero-offload", "4", 1.2)]
    catalogue = TableCatalogue.from_tables([throughput_rows("roberta", rows)], node=cluster.node)
    lean, hungry = (find(catalogue, plan, "4") for plan in ("ga", "zero-offload"))
    assert lean.host_memory_bytes_per_gpu == 0 < lean.device_memory_bytes_per_gpu
    assert hungry.host_memory_bytes_per_gpu > 0
    holder = job("sure", 0.0, 30, n_gpus=4, is_guaranteed=True)
    for other, is_guest in ((job("c", n_gpus=4), True), (job("c", n_gpus=4, plan="zero-offload"), False)):
        result = run("antman", [holder, other], cluster, catalogue=catalogue)
        assert (result.events["shared_nodes"] != "").any() == is_guest
    small = replace(cluster.node.gpu, memory_bytes=1.5 * lean.device_memory_bytes_per_gpu)
    cramped = replace(cluster, nodes=(replace(cluster.node, gpu=small),))
    result = run("antman", [holder, job("c", n_gpus=4)], cramped, catalogue=catalogue)
    assert (result.events["shared_nodes"] == "").all()
    early = [job("c", n_gpus=4), replace(holder, submit_time_s=1.0)]
    assert story(run("antman", early, cramped, catalogue=catalogue), "suspended") == [(1.0, "c")]


def test_antman_displaces_a_guest_of_the_same_decision_before_one_that_was_there() -> None:
    cluster = toy_nodes(1, 4)
    rows = {"t5": [("ga", "1", 1.0), ("ga", "2", 1.0)], "roberta": [("ga", "1", 1.0)]}
    tables = [throughput_rows(key, own) for key, own in rows.items()]
    catalogue = TableCatalogue.from_tables(tables, node=cluster.node)
    guest, small, large = (
        find(catalogue, "ga", placement, key).device_memory_bytes_per_gpu
        for placement, key in (("2", "t5"), ("1", "t5"), ("1", "roberta"))
    )
    whole, there_bytes = (
        cluster.node.gpu,
        guest + (small + large) / 2,
    )  # for a small holder, not for a large one
    tight = replace(whole, memory_bytes=there_bytes * whole.memory_bytes / whole.usable_bytes)
    jobs = [job("pair", 0.0, 90, n_gpus=2, workload="t5", is_guaranteed=True)]
    jobs += [
        job(name, 0.0, steps, workload="t5", is_guaranteed=True) for name, steps in (("a", 90), ("b", 5))
    ]
    jobs += [job("old", 1.0, 50, n_gpus=2, workload="t5")]
    # At 5 s "new" becomes a guest of the two other devices, and "large" gets the free one of them.
    jobs += [job("new", 5.0, 50, n_gpus=2, workload="t5"), job("large", 5.0, 50)]
    cramped = replace(cluster, nodes=(replace(cluster.node, gpu=tight),))
    result = run("antman", jobs, cramped, catalogue=catalogue)
    assert [one for one in story(result, "started") if one[0] <= 5.0][3:] == [(1.0, "old"), (5.0, "large")]
    assert (5.0, "old") not in story(result, "suspended")


def test_antman_gives_a_guaranteed_job_no_slower_placement() -> None:
    jobs = [job("a", 0.0, 30, is_guaranteed=True), job("b", 0.0, 9, n_gpus=2, is_guaranteed=True)]
    result = run("antman", jobs, toy_nodes(2, 2))
    assert set(result.events["iter_time_s"].dropna()) == {1.0, 0.6}


def cpu_catalogue():
    rows = [
        throughput_rows("roberta", [("ga", "1", step_s)], threads)
        for threads, step_s in ((2, 2.0), (4, 1.5), (8, 1.02), (16, 1.0))
    ]
    return TableCatalogue.from_tables(rows)


def test_synergy_asks_for_the_fewest_threads_that_are_fast_enough_and_falls_back() -> None:
    options = CpuDemands(4).options(job("a"), cpu_catalogue(), REGISTRY["synergy"])
    assert [item.cpu_threads for item in options] == [8, 4]  # 16 gain nothing, 2 are below the fair share


def test_synergy_takes_fewer_threads_than_its_share_if_more_gain_nothing() -> None:
    policy = replace(REGISTRY["synergy"], tolerance=2.0)
    assert [item.cpu_threads for item in CpuDemands(4).options(job("a"), cpu_catalogue(), policy)] == [2]


def test_synergy_serves_guaranteed_jobs_first_and_no_slower_than_they_asked() -> None:
    jobs = [job("first", 0.0, 20), job("plain", 1.0, 9), job("sure", 2.0, 9, is_guaranteed=True)]
    assert [name for _, name in story(run("synergy", jobs), "started")] == ["first", "sure", "plain"]
    pair = [job("a", 0.0, 30), job("b", 0.0, 30), job("c", 1.0, 30, n_gpus=2, is_guaranteed=True)]
    assert story(run("synergy", pair, toy_nodes(2, 2)), "started")[-1] == (1.0, "c")
    apart = run("synergy", [job("x", 0.0, 30, n_gpus=2), *pair[:2], pair[2]], toy_nodes(2, 2))
    assert set(apart.events.loc[apart.events["job_id"] == "c", "iter_time_s"].dropna()) == {0.6}


def test_synergy_gives_more_than_a_fair_share_only_where_others_leave_it() -> None:
    jobs = [job(name, 0.0) for name in "abcd"]
    for threads, held in ((16, [4, 4, 4, 4]), (24, [4, 8, 4, 8]), (64, [8, 8, 8, 8])):
        result = run("synergy", jobs, toy_nodes(1, 4, cpu_threads=threads), catalogue=cpu_catalogue())
        started = result.events[result.events["kind"] == "started"]
        assert started["cpu_threads"].tolist() == held
        assert started["time_s"].tolist() == [0.0] * 4


def test_a_job_that_needs_more_than_its_share_gets_it_as_nothing_smaller_would_do() -> None:
    large = TableCatalogue.from_tables([throughput_rows("roberta", [("ga", "1", 1.0)], 16)])
    result = run("synergy", [job("a")], toy_nodes(1, 4, cpu_threads=16), catalogue=large)
    assert story(result, "finished") == [(10.0, "a")]


# --- Sia ------------------------------------------------------------------------------------


def test_sizes_keep_the_plan_and_leave_out_what_is_no_faster() -> None:
    sizes = Sizes(8, 1.5).of(job("a"), CATALOGUE)
    assert [(size.n_gpus, size.speed) for size in sizes] == [
        (1, 1.0),
        (2, pytest.approx(1 / 0.6)),
        (4, pytest.approx(1 / 0.4)),
    ]
    assert [item.placement.text for item in sizes[1].options] == ["2", "11"]
    assert [item.placement.text for item in sizes[2].options] == ["4"]  # 22 is more than 1.5 times slower


def test_sizes_of_a_split_model_change_its_replicas_only() -> None:
    rows = [("222", "8", 1.0), ("221", "4", 1.8), ("124", "8", 0.9), ("224", "88", 0.6), ("tp+ga", "4", 1.7)]
    catalogue = TableCatalogue.from_tables([throughput_rows("gpt2", rows)])
    sizes = Sizes(8, 1.5).of(job("a", workload="gpt2", n_gpus=8, plan="222"), catalogue)
    assert [[item.plan for item in size.options] for size in sizes] == [["221"], ["222"], ["224"]]


def held_by(result):
    rows = result.events[result.events["kind"].isin(["started", "reconfigured"])]
    return rows[["time_s", "job_id", "n_gpus"]].values.tolist()


def test_sia_lets_a_job_alone_grow_and_shrinks_it_for_a_second() -> None:
    jobs = [job("a", 0.0, 400), job("b", 100.0, 400)]
    policy = replace(REGISTRY["sia"], start_factor=None, growth=None)
    assert held_by(run(policy, jobs, toy_nodes(1, 4)))[:3] == [
        [0.0, "a", 4],
        [100.0, "a", 2],
        [100.0, "b", 2],
    ]


def test_sia_starts_small_and_at_most_doubles_in_a_round() -> None:
    jobs = [job("a", 0.0, 4000), job("late", 30.0, 1, n_gpus=1)]
    original = replace(REGISTRY["sia"], start_factor=1.0, growth=2.0)
    steps = held_by(run(original, jobs, toy_nodes(1, 8), interval_s=10.0))
    assert [row for row in steps if row[1] == "a"][:2] == [[0.0, "a", 1], [10.0, "a", 2]]
    at_once = held_by(run(replace(original, growth=None), jobs, toy_nodes(1, 8), interval_s=10.0))
    assert [row for row in at_once if row[1] == "a"][:2] == [[0.0, "a", 1], [10.0, "a", 4]]
    assert (
        held_by(run(replace(original, start_factor=2.0), jobs, toy_nodes(1, 8), interval_s=10.0))[0][2] == 2
    )


def test_sia_decides_in_every_round_in_which_a_running_job_could_grow() -> None:
    alone = run("sia", [job("a", 0.0, 4000)], toy_nodes(1, 8), delay_s=50.0, interval_s=10.0)
    steps = held_by(alone)
    # No event makes the job grow, only its age: the damping of a change ends.
    assert steps[0] == [0.0, "a", 1] and steps[1][1:] == ["a", 4]
    assert 50.0 < steps[1][0] < 1000.0 and alone.n_decisions == 175
    # Where it has one size only, nothing can change: the policy is asked at the start and once after.
    assert run("sia", [job("a", 0.0, 4000)], toy_nodes(1, 1), interval_s=10.0).n_decisions == 2


def test_sia_leaves_a_young_job_alone_because_a_restart_would_cost_too_much() -> None:
    jobs = [job("a", 0.0, 400), job("b", 1.0, 400)]
    result = run("sia", jobs, toy_nodes(1, 4), delay_s=50.0)
    first = result.events[result.events["time_s"] <= 1.0]
    assert "reconfigured" not in first["kind"].tolist()


@st.composite
def programmes(draw):
    menus = []
    for _ in range(draw(st.integers(1, 4))):
        sizes = sorted(draw(st.sets(st.integers(1, 9), min_size=1, max_size=3)))
        costs = [draw(st.integers(-40, 5)) / 8 for _ in sizes]
        menus.append(Menu(draw(st.integers(1, 3)), tuple(sizes), tuple(costs)))
    return menus, draw(st.integers(1, 14))


def _cost(menus, counts):
    return sum(
        n * c for menu, row in zip(menus, counts, strict=True) for n, c in zip(row, menu.costs, strict=True)
    )


def _least_cost(menus, n_gpus):
    """Dynamic programming: costs by devices used, job after job."""
    best = {0: 0.0}
    for menu in menus:
        for _ in range(menu.n_jobs):
            choices = [(0, 0.0), *zip(menu.sizes, menu.costs, strict=True)]
            grown = {}
            for (used, cost), (size, more) in product(best.items(), choices):
                if used + size <= n_gpus:
                    grown[used + size] = min(grown.get(used + size, 1e9), cost + more)
            best = grown
    return min(best.values())


@given(programmes())
@settings(max_examples=60, derandomize=True)
def test_the_integer_knapsack_finds_the_least_cost(case) -> None:
    menus, n_gpus = case
    counts = choose(menus, n_gpus, gap=0.0)
    used = sum(
        n * g for menu, row in zip(menus, counts, strict=True) for n, g in zip(row, menu.sizes, strict=True)
    )
    cost = _cost(menus, counts)
    assert used <= n_gpus
    assert all(sum(row) <= menu.n_jobs and min(row) >= 0 for menu, row in zip(menus, counts, strict=True))
    least = _least_cost(menus, n_gpus)
    assert cost == pytest.approx(least)
    assert _cost(menus, choose(menus, n_gpus, gap=0.05)) <= least + 0.05 * abs(least) + 1e-9


@st.composite
def typed_programmes(draw):
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        kinds = st.tuples(st.integers(1, 6), st.sampled_from(["a", "b", ""]))
        sizes = sorted(draw(st.sets(kinds, min_size=1, max_size=4)))
        costs = [draw(st.integers(-40, 5)) / 8 for _ in sizes]
        jobs = (SimpleNamespace(allocation=None),) * draw(st.integers(1, 3))
        groups.append(Group(jobs, tuple(Size(*size, (), 1.0) for size in sizes), tuple(costs)))
    return groups, {"a": draw(st.integers(0, 9)), "b": draw(st.integers(1, 9))}


def _least_cost_by_type(groups, present):
    """Dynamic programming: costs by devices used of both types, and of any, job after job."""
    best = {(0, 0, 0): 0.0}
    for group in groups:
        for _ in group.jobs:
            grown = dict(best)
            for (used, cost), (size, more) in product(
                best.items(), zip(group.sizes, group.costs, strict=True)
            ):
                a, b, c = (
                    n + size.n_gpus * (size.gpu_type == name)
                    for n, name in zip(used, ("a", "b", ""), strict=True)
                )
                if a <= present["a"] and b <= present["b"] and a + b + c <= sum(present.values()):
                    grown[a, b, c] = min(grown.get((a, b, c), 1e9), cost + more)
            best = grown
    return min(best.values())


@given(typed_programmes())
@settings(max_examples=60, derandomize=True)
def test_the_knapsack_of_several_types_finds_the_least_cost(case) -> None:
    groups, present = case
    counts = choose_by_type(groups, present)
    taken = [
        (number, size, cost)
        for group, row in zip(groups, counts, strict=True)
        for number, size, cost in zip(row, group.sizes, group.costs, strict=True)
    ]
    assert all(
        sum(row) <= len(group.jobs) and min(row) >= 0 for group, row in zip(groups, counts, strict=True)
    )
    for name, most in present.items():
        assert sum(number * size.n_gpus for number, size, _ in taken if size.gpu_type == name) <= most
    assert sum(number * size.n_gpus for number, size, _ in taken) <= sum(present.values())
    assert sum(number * cost for number, _, cost in taken) == pytest.approx(
        _least_cost_by_type(groups, present)
    )


def test_sia_uses_all_types_and_moves_a_job_to_a_faster_one_that_becomes_free() -> None:
    jobs = [job("a", 0.0, 100), job("b", 0.0, 1000), job("c", 1.0, 1000)]
    result = run("sia", jobs, mixed_nodes(1, 1), 5.0, typed({SLOW: 3.0, FAST: 1.0}), interval_s=10.0)
    first = result.events[result.events["time_s"] == 0.0]
    assert set(first.loc[first["kind"] == "started", "iter_time_s"]) == {1.0, 3.0}
    steps = result.events[result.events["kind"].isin(["started", "reconfigured"])]
    assert steps.loc[steps["job_id"] == "b", "iter_time_s"].tolist() == [3.0, 1.0]


def test_sia_places_workloads_with_times_of_a_type_beside_those_that_run_on_any() -> None:
    free = TableCatalogue.from_tables([throughput_rows("t5", [("ga", "1", 1.0)])])
    both = TableCatalogue.joined([typed({FAST: 1.0}), free])
    jobs = [job("a"), job("b", workload="t5"), job("c", workload="t5")]
    result = run("sia", jobs, mixed_nodes(1, 1), 0.0, both)
    first = result.events[(result.events["time_s"] == 0.0) & (result.events["kind"] == "started")]
    assert sorted(first["nodes"]) == ["0:1", "1:1"]


def test_sia_keeps_what_jobs_hold_where_others_would_gain_as_much() -> None:
    jobs = [job(name, 0.0, 1000) for name in "abcd"]  # equal jobs, two of which wait
    result = run("sia", jobs, mixed_nodes(1, 1), 5.0, typed({SLOW: 1.0, FAST: 1.0}), interval_s=10.0)
    assert story(result, "suspended", "reconfigured") == []


def test_sizes_of_each_type_are_relative_to_the_smallest_and_slowest() -> None:
    rows = [("ga", "1", 1.0), ("ga", "2", 0.6), ("ga", "4", 0.7)]
    catalogue = TableCatalogue(
        replace(item, gpu_types=(name,) * item.n_nodes, key=None)
        for name, scale in ((FAST, 1.0), (SLOW, 3.0))
        for item in TableCatalogue.from_tables(
            [throughput_rows("roberta", [(plan, place, step_s * scale) for plan, place, step_s in rows])]
        ).all("roberta")
    )
    sizes = Sizes(8, 1.5).of(job("a"), catalogue)
    assert [(size.n_gpus, size.gpu_type, size.speed) for size in sizes] == [
        (1, SLOW, 1.0),
        (1, FAST, pytest.approx(3.0)),
        (2, SLOW, pytest.approx(1 / 0.6)),
        (2, FAST, pytest.approx(3 / 0.6)),  # four are slower on either type
    ]


# --- Gavel ----------------------------------------------------------------------------------


def test_fair_shares_rise_together_until_a_job_runs_all_the_time() -> None:
    # Two jobs of 1 GPU take 1 each; the 2 GPUs left over are half of what the job of 4 wants.
    assert fair_shares({1: 2, 4: 1}, 4) == {1: 1.0, 4: pytest.approx(0.5)}
    # Five jobs share 4 GPUs: 0.8 each.
    assert fair_shares({1: 4, 2: 1}, 4) == {1: pytest.approx(0.8), 2: pytest.approx(0.4)}
    assert fair_shares({1: 1, 2: 1}, 4) == {1: 1.0, 2: 1.0}


@given(st.dictionaries(st.integers(1, 64), st.integers(1, 12), max_size=9), st.integers(0, 128))
@settings(max_examples=60, derandomize=True)
def test_fair_shares_solve_the_linear_programme(sizes, n_gpus) -> None:
    # The level is cut at the sizes; lower cuts are worth more a device, so that they fill first.
    levels = np.array(sorted(sizes))
    rising = np.array([sum(n for size, n in sizes.items() if size >= level) for level in levels])
    shares = fair_shares(sizes, n_gpus)
    if not sizes:
        assert shares == {}
        return
    worth = rising * np.arange(len(levels), 0, -1)
    bounds = np.column_stack([np.zeros(len(levels)), np.diff(levels, prepend=0)])
    solution = linprog(-worth, A_ub=rising.reshape(1, -1), b_ub=[n_gpus], bounds=bounds)
    level = solution.x.sum()
    assert shares == pytest.approx({size: min(level / size, 1.0) for size in sizes})


def matrix(rates, sizes, n_gpus):
    return Matrix(*(np.array(values, dtype=float) for values in (rates, sizes, n_gpus)))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 24))
@settings(max_examples=40, derandomize=True)
def test_the_search_for_the_best_level_finds_the_fair_shares(sizes, n_gpus) -> None:
    found = needed_shares(
        matrix([[1.0]] * len(sizes), sizes, [n_gpus]), lambda level: level * max(sizes) / np.array(sizes)
    )
    shares = fair_shares(Counter(sizes), n_gpus)
    assert found[:, 0] == pytest.approx([shares[size] for size in sizes], abs=1e-6)


def test_shares_for_the_makespan_let_all_jobs_end_together() -> None:
    left = np.array([100.0, 300.0])
    found = needed_shares(matrix([[1.0], [1.0]], [1, 1], [1]), lambda level: level * left)
    assert found[:, 0] == pytest.approx([0.25, 0.75])


def test_each_job_runs_on_the_type_that_it_gains_most_from() -> None:
    # The first is three times as fast on the first type, the second as fast on both.
    found = needed_shares(
        matrix([[3.0, 1.0], [1.0, 1.0]], [1, 1], [1, 1]), lambda level: level * np.array([3, 1])
    )
    assert found == pytest.approx(np.eye(2), abs=1e-6)


def typed(rows):
    """A catalogue of steps [s] by type of device, on one GPU."""
    return TableCatalogue(
        replace(item, gpu_types=(name,), key=None)
        for name, step_s in rows.items()
        for item in TableCatalogue.from_tables([throughput_rows("roberta", [("ga", "1", step_s)])]).all(
            "roberta"
        )
    )


@pytest.mark.parametrize("name", ["gavel", "gavel-ftf", "gavel-makespan"])
def test_gavel_starts_a_job_on_the_faster_type(name) -> None:
    cluster = mixed_nodes(1, 1)
    result = run(name, [job("a")], cluster, catalogue=typed({SLOW: 3.0, FAST: 1.0}))
    assert story(result, "finished") == [(10.0, "a")]
    jobs = [job("a"), job("b"), job("c", 1.0, 5)]
    result = run(name, jobs, cluster, catalogue=typed({SLOW: 3.0, FAST: 1.0}))
    assert set(result.events["iter_time_s"].dropna()) == {1.0, 3.0}  # nothing is left idle


def test_gavel_for_finish_times_lets_a_short_job_pass_and_for_fairness_of_time_does_not() -> None:
    jobs = [job("long", 0.0, 1000), job("mid", 1.0, 900), job("short", 2.0, 20)]
    first = {
        name: story(run(replace(REGISTRY[name], turn_s=20.0), jobs, interval_s=10.0), "started")[1][1]
        for name in ("gavel", "gavel-ftf")
    }
    assert first == {"gavel": "mid", "gavel-ftf": "short"}


def test_gavel_takes_turns_and_displaces_nobody_before_its_turn_is_over() -> None:
    policy = replace(REGISTRY["gavel"], turn_s=20.0)
    result = run(policy, [job("a", 0.0, 200), job("b", 5.0, 200)], interval_s=1.0)
    suspended = story(result, "suspended")
    assert suspended[0] == (20.0, "a")
    turns = [time_s for time_s, _ in suspended]
    assert all(later - earlier >= 20.0 for earlier, later in pairwise(turns))
    assert {name for _, name in suspended} == {"a", "b"}


def test_gavel_suspends_nobody_while_there_is_room_for_all() -> None:
    policy = replace(REGISTRY["gavel"], turn_s=1.0)
    jobs = [job(name, float(i), 40) for i, name in enumerate("abcd")]
    assert story(run(policy, jobs, toy_nodes(2, 2), interval_s=1.0), "suspended") == []


def test_a_guest_of_antman_is_moved_in_time_though_nothing_else_happens() -> None:
    sure = job("sure", 0.0, 1000, n_gpus=2, is_guaranteed=True)
    jobs = [sure, job("short", 0.0, 6, n_gpus=2, is_guaranteed=True), job("c", 30.0, 400, n_gpus=2)]
    result = run("antman", jobs, toy_nodes(2, 2), delay_s=60.0)
    # "short" leaves its devices at 64 s, too early to move, and nobody else ends before 600 s.
    assert story(result, "reconfigured", "sharing") == [(90.0, "c")]
