"""The rules of Morphling on clusters that are small enough to work out by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from toy_cluster import find, throughput_rows, toy_catalogue, toy_job, toy_nodes, toy_tables

from makespan.policies import REGISTRY
from makespan.policies._placing import Room
from makespan.policies.morphling import (
    CLAIRVOYANT,
    NON_CLAIRVOYANT,
    Freedom,
    MorphlingLookahead,
    MorphlingWork,
)
from makespan.policies.morphling._growth import grow, passes_gate
from makespan.policies.morphling._options import OptionTable, undominated
from makespan.policies.morphling._policies import _next_multiple
from makespan.policies.morphling._preemption import displace, look_ahead, preempt
from makespan.policies.morphling._schedule import (
    Arrivals,
    Context,
    Schedule,
    Slot,
    Task,
    critical,
    price_tasks,
    rank_tasks,
)
from makespan.sim import simulate
from makespan.studies import TableCatalogue

DELAY_S = 10.0
CATALOGUE = toy_catalogue()
ROBERTA = undominated(CATALOGUE.all("roberta"))
VARIANTS = ("morphling-lookahead", "morphling-work")


def table(*rows, key="roberta"):
    return TableCatalogue.from_tables([throughput_rows(key, list(rows))])


def view_of(index, **spec):
    """Return what tasks read of a job."""
    job = toy_job(f"job-{index}", **spec)
    return SimpleNamespace(
        spec=job, index=index, allocation=None, first_start_s=None, restart_count=0, ready_time_s=0.0
    )


def task(index=0, steps=100.0, options=ROBERTA, **spec):
    return Task(view_of(index, **spec), options, steps, 0.0)


def context(now_s=0.0, price=0.0, tuning=CLAIRVOYANT):
    return Context(now_s, DELAY_S, price, tuning)


def scheduled(free, *held, now_s=0.0):
    """Return a schedule with jobs that have been running: (task, configuration, nodes)."""
    room, slots = Room(list(free)), {}
    for owner, item, nodes in held:
        room.take(item, nodes)
        owner.held = slots[owner] = Slot(item, nodes, now_s + owner.steps * item.predicted_iter_time_s)
    return Schedule(room, slots, now_s + DELAY_S)


def weighing(last_weight, **changes):
    return context(tuning=replace(CLAIRVOYANT, last_weight=last_weight, grain_s=0.0, **changes))


def admitted(*tasks, price=0.0, now_s=0.0, tuning=CLAIRVOYANT):
    context(now_s, price, tuning).admit(tasks)
    return list(tasks)


# --- options --------------------------------------------------------------------------------


def test_options_leave_out_what_is_slower_in_more_room():
    catalogue = table(
        ("ga", "4", 1.0), ("ga", "22", 0.9), ("ga", "8", 1.1), ("ga", "2", 1.8), ("ga", "11", 1.9)
    )
    kept = {item.placement.text for item in undominated(catalogue.all("roberta"))}
    assert kept == {"4", "22", "2", "11"}


def test_a_guaranteed_job_has_only_options_as_fast_as_its_request():
    job = toy_job(n_gpus=4, plan="gc", is_guaranteed=True)
    limit_s = CATALOGUE.requested(job).predicted_iter_time_s
    options = OptionTable(CATALOGUE, Freedom()).of(job)
    assert all(item.predicted_iter_time_s <= limit_s for item in options)
    assert len(options) < len(OptionTable(CATALOGUE, Freedom()).of(replace(job, is_guaranteed=False)))
    assert min(item.n_gpus for item in options) == 4  # another plan is faster on as many devices
    assert {item.plan for item in options} == {"ga"}


def test_ablations_take_choices_away():
    for freedom, n_gpus, plans in (
        (Freedom(resources=False), {4}, {"ga"}),
        (Freedom(plan=False), {1, 2, 4, 8}, {"gc"}),
        (Freedom(plan=False, resources=False), {4}, {"gc"}),
        (Freedom(), {1, 2, 4, 8}, {"ga"}),
    ):
        options = OptionTable(CATALOGUE, freedom).of(toy_job(n_gpus=4, plan="gc"))
        assert {item.n_gpus for item in options} == n_gpus, freedom
        assert {item.plan for item in options} == plans, freedom


def test_a_plan_in_digits_scales_along_data_parallelism_only():
    rows = [("141", "4", 3.0), ("142", "8", 1.6), ("281", "88", 1.0), ("118", "8", 1.2)]
    options = OptionTable(table(*rows, key="llama7"), Freedom(plan=False)).of(
        toy_job(workload="llama7", n_gpus=4, plan="141")
    )
    assert {item.plan for item in options} == {"141", "142"}


# --- prices and order -----------------------------------------------------------------------


def test_a_free_device_buys_speed_and_a_dear_one_buys_efficiency():
    cheap, dear = task(), task(1)
    price_tasks([cheap], DELAY_S, 0.0, 1.0)
    price_tasks([dear], DELAY_S, 100.0, 1.0)
    assert cheap.choices[0].n_gpus == 8
    assert dear.choices[0].n_gpus == 1
    area = min(item.n_gpus * (DELAY_S + 100.0 * item.predicted_iter_time_s) for item in ROBERTA)
    assert cheap.area_gpu_s == dear.area_gpu_s == pytest.approx(area)


def test_the_queue_serves_critical_jobs_then_little_work_and_guarantees_weigh_more():
    small, large, guaranteed, vital = task(0, 10), task(1, 90), task(2, 14, is_guaranteed=True), task(3, 500)
    tasks = [small, large, guaranteed, vital]
    price_tasks(tasks, DELAY_S, 0.0, 1.0)
    rank_tasks(tasks, 0.0, CLAIRVOYANT, frozenset([vital]))
    assert sorted(tasks, key=lambda t: t.rank) == [vital, guaranteed, small, large]


def test_waiting_moves_a_job_forward():
    old, new = task(0, 60), task(1, 50, submit_time_s=20_000.0)
    price_tasks([old, new], DELAY_S, 0.0, 1.0)
    rank_tasks([old, new], 20_000.0, CLAIRVOYANT, frozenset())
    assert old.rank < new.rank
    rank_tasks([old, new], 20_000.0, replace(CLAIRVOYANT, ageing_s=1e12), frozenset())
    assert new.rank < old.rank


def test_a_job_is_critical_if_it_outlasts_all_other_work():
    long, short = task(0, 5000), task(1, 10)
    price_tasks([long, short], DELAY_S, 0.0, 1.0)
    assert critical([long, short], [], context(), 8) == {long}
    crowd = [task(index, 5000) for index in range(2, 12)]
    price_tasks(crowd, DELAY_S, 0.0, 1.0)
    assert critical([long, short, *crowd], [], context(), 8) == frozenset()
    assert critical([long, short], [], context(tuning=NON_CLAIRVOYANT), 8) == frozenset()


def test_the_arrival_rate_counts_each_job_once_and_forgets():
    first = Arrivals().updated([task(0), task(1)], 0.0, 100.0)
    assert first.per_s == pytest.approx(0.02)
    again = first.updated([task(0), task(1), task(2)], 100.0, 100.0)
    assert again.per_s == pytest.approx(0.02 / 2.718281828 + 0.01)
    assert again.last_index == 2


def test_a_job_pays_the_delay_if_it_starts_or_changes_and_not_if_it_goes_on():
    one = find(CATALOGUE, "ga", "1")
    running, new = task(0, 100), task(1, 100)
    now = scheduled([8], (running, one, (0,)), now_s=50.0)
    now.place(new, one, (0,))
    run_s = 100 * one.predicted_iter_time_s
    assert now.slots[running].finish_s == pytest.approx(50.0 + run_s)
    assert now.slots[new].finish_s == pytest.approx(50.0 + DELAY_S + run_s)
    changes = now.decision([running, new]).changes
    assert list(changes) == ["job-1"]
    now.remove(running)
    assert now.decision([running, new]).changes["job-0"] is None


# --- lookahead -----------------------------------------------------------------------------


def test_the_lookahead_starts_blocked_jobs_when_devices_become_free():
    item = find(CATALOGUE, "ga", "8")
    running, waiting = task(0, 100), task(1, 50, options=(item,))
    admitted(waiting)
    now = scheduled([8], (running, item, (0,)))
    ahead = look_ahead(now, [waiting], weighing(2.0))
    first_s = 100 * item.predicted_iter_time_s
    last_s = first_s + DELAY_S + 50 * item.predicted_iter_time_s
    assert ahead.waits_s == {waiting: pytest.approx(first_s)}
    assert ahead.cost_s == pytest.approx(first_s + 3.0 * last_s)
    assert look_ahead(now, [waiting], weighing(2.0), ahead.cost_s) is None
    assert now.room.gpus == [0]


def test_a_job_that_never_fits_waits_until_the_others_are_done():
    item, pair = find(CATALOGUE, "ga", "8"), find(CATALOGUE, "ga", "11")
    running, waiting = task(0, 100), task(1, 50, options=(pair,))
    admitted(waiting)
    ahead = look_ahead(scheduled([8], (running, item, (0,))), [waiting], weighing(0.0))
    assert ahead.waits_s[waiting] == pytest.approx(100 * item.predicted_iter_time_s)


def test_jobs_far_back_in_the_queue_count_as_ending_when_the_last_before_them_starts():
    item = find(CATALOGUE, "ga", "8")
    running, *queue = (task(index, 100, options=(item,)) for index in range(4))
    admitted(*queue)
    now = scheduled([8], (running, item, (0,)))
    run_s = 100 * item.predicted_iter_time_s
    near = look_ahead(now, queue, weighing(0.0, max_foreseen=1))
    assert near.cost_s == pytest.approx(run_s + (2 * run_s + DELAY_S) + 2 * run_s)
    assert set(near.waits_s) == {queue[0]}


# --- preemption -------------------------------------------------------------------------


def test_a_large_job_moves_a_small_one_aside():
    one, whole = find(CATALOGUE, "ga", "1"), find(CATALOGUE, "ga", "8")
    small, large = task(0, 5000), task(1, 50, options=(whole,))
    admitted(large)
    after, blocked = preempt(scheduled([8, 4], (small, one, (0,))), [large], context())
    assert not blocked
    assert after.slots[large].nodes == (0,)
    assert after.slots[small].nodes == (1,) and after.slots[small] is not small.held


def test_nobody_preempts_where_waiting_is_cheaper():
    one, whole = find(CATALOGUE, "ga", "1"), find(CATALOGUE, "ga", "8")
    small, large = task(0, 3), task(1, 50, options=(whole,))
    admitted(large)
    before = scheduled([8, 4], (small, one, (0,)))
    after, blocked = preempt(before, [large], context())
    assert after is before
    assert blocked == [large]


@pytest.mark.parametrize("is_guaranteed", [False, True])
def test_only_a_best_effort_job_loses_everything(is_guaranteed):
    whole = find(CATALOGUE, "ga", "8")
    victim = task(0, 5000, options=(whole,), is_guaranteed=is_guaranteed)
    newcomer = task(1, 5, options=(whole,))
    admitted(newcomer)
    after, blocked = preempt(scheduled([8], (victim, whole, (0,))), [newcomer], context())
    assert (newcomer in after.slots) is not is_guaranteed
    assert blocked == ([newcomer] if is_guaranteed else [victim])


def test_the_nodes_on_which_least_is_destroyed_are_taken():
    one, whole = find(CATALOGUE, "ga", "1"), find(CATALOGUE, "ga", "8")
    many = [(task(index, 5000), one, (0,)) for index in range(4)]
    few = (task(9, 5000), one, (1,))
    large = task(10, 50, options=(whole,))
    trial, suspended = displace(scheduled([8, 8, 2], *many, few), large, whole, (), DELAY_S)
    assert trial.slots[large].nodes == (1,)
    assert suspended == []
    assert trial.slots[few[0]].nodes == (2,)


def test_a_winner_does_not_lose_its_devices_in_the_same_decision():
    whole = find(CATALOGUE, "ga", "8")
    victim, winner = task(0, 5000, options=(whole,)), task(1, 5, options=(whole,))
    now = scheduled([8], (victim, whole, (0,)))
    assert displace(now, winner, whole, {victim}, DELAY_S) is None
    assert displace(now, winner, whole, (), DELAY_S) is not None


# --- handing out ----------------------------------------------------------------------------


def test_free_devices_go_to_the_steepest_job():
    steep = undominated(table(("ga", "1", 1.0), ("ga", "2", 0.5)).all("roberta"))
    flat = undominated(table(("ga", "1", 1.0), ("ga", "2", 0.9)).all("roberta"))
    jobs = [task(0, 1000, options=flat), task(1, 1000, options=steep)]
    now = scheduled([3], (jobs[0], flat[0], (0,)), (jobs[1], steep[0], (0,)))
    grow(now, OptionTable(CATALOGUE, Freedom()), 0.0, context())
    assert [now.slots[job].item.n_gpus for job in jobs] == [1, 2]


def test_a_running_job_grows_only_where_the_restart_pays():
    options = undominated(table(("ga", "1", 1.0), ("ga", "2", 0.6)).all("roberta"))
    for steps, expected in ((50, 1), (1000, 2)):
        job = task(0, steps, options=options)
        now = scheduled([2], (job, options[0], (0,)))
        grow(now, OptionTable(CATALOGUE, Freedom()), 0.0, context())
        assert now.slots[job].item.n_gpus == expected


def test_growth_stops_where_device_time_is_dear():
    options = undominated(table(("ga", "1", 1.0), ("ga", "2", 0.8)).all("roberta"))
    for price, expected in ((0.0, 2), (1.0, 1)):
        job = task(0, 1000, options=options)
        now = scheduled([2], (job, options[0], (0,)))
        grow(now, OptionTable(CATALOGUE, Freedom()), price, context())
        assert now.slots[job].item.n_gpus == expected


def test_the_gate_bounds_the_share_of_time_lost_to_restarts():
    tuning = replace(NON_CLAIRVOYANT, gate_share=0.99)
    for ran_s, restarts, passes in ((999.0, 0, False), (1001.0, 0, True), (1001.0, 1, False)):
        job = SimpleNamespace(first_start_s=500.0, restart_count=restarts)
        assert passes_gate(job, context(500.0 + ran_s, tuning=tuning)) is passes
        assert passes_gate(job, context(500.0 + ran_s, tuning=CLAIRVOYANT))


def test_the_gate_keeps_a_running_job_as_it_is():
    options = undominated(table(("ga", "1", 1.0), ("ga", "2", 0.5)).all("roberta"))
    job = task(0, 1000, options=options)
    job.job.first_start_s = -100.0
    now = scheduled([2], (job, options[0], (0,)))
    grow(now, OptionTable(CATALOGUE, Freedom()), 0.0, context(tuning=NON_CLAIRVOYANT))
    assert now.slots[job].item.n_gpus == 1
    job.job.first_start_s = -10_000.0
    grow(now, OptionTable(CATALOGUE, Freedom()), 0.0, context(tuning=NON_CLAIRVOYANT))
    assert now.slots[job].item.n_gpus == 2


# --- whole runs -----------------------------------------------------------------------------


def finish_times(jobs, policy, spec, **options):
    result = simulate(jobs, spec, CATALOGUE, policy, restart_delay_s=DELAY_S, **options)
    return result.outcomes.set_index("job_id")["finish_time_s"]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_lone_job_runs_on_its_fastest_configuration(name):
    finished = finish_times([toy_job(steps=1000)], REGISTRY[name], toy_nodes(2, 8))
    fastest_s = min(item.iter_time_s for item in CATALOGUE.all("roberta"))
    if name == "morphling-work":
        assert finished["a"] == pytest.approx(DELAY_S + 1001 * fastest_s)
    else:  # expects less work and so may find a smaller start good enough
        assert finished["a"] <= DELAY_S + 1001 * CATALOGUE.requested(toy_job()).iter_time_s


def test_only_the_work_aware_variant_reads_the_work_left():
    assert REGISTRY["morphling-work"].is_clairvoyant
    assert not REGISTRY["morphling-lookahead"].is_clairvoyant
    short, long = [toy_job("a", steps=10)], [toy_job("a", steps=10_000)]
    first = [
        simulate(jobs, toy_nodes(2, 8), CATALOGUE, MorphlingLookahead(), restart_delay_s=DELAY_S)
        for jobs in (short, long)
    ]
    starts = [result.events[result.events["kind"] == "started"]["nodes"].tolist()[0] for result in first]
    assert starts[0] == starts[1]


def test_a_job_that_has_run_for_long_is_expected_to_run_on():
    policy = MorphlingLookahead(expected_s=60.0, expected_share=0.5)
    job = SimpleNamespace(spec=toy_job(), running_time_s=200.0)
    steps = policy.expected_steps(job, SimpleNamespace(catalogue=CATALOGUE))
    assert steps * CATALOGUE.requested(job.spec).predicted_iter_time_s == pytest.approx(160.0)


def test_short_jobs_do_not_wait_for_a_long_one():
    long = toy_job("long", 0.0, steps=20_000, n_gpus=8)
    short = [toy_job(f"short-{k}", 100.0 + k, steps=20) for k in range(3)]
    for policy in (MorphlingLookahead(), MorphlingWork()):
        finished = finish_times([long, *short], policy, toy_nodes(1, 8))
        assert max(finished[f"short-{k}"] for k in range(3)) < finished["long"] / 10


def test_names_of_all_ablations_are_registered():
    names = {f"{base}{suffix}" for base in VARIANTS for suffix in ("", "-e", "-r", "-n")}
    assert names <= set(REGISTRY)


def test_a_guaranteed_job_is_offered_what_is_known_to_be_fast_enough_and_its_request():
    tables = toy_tables()
    (rows,) = (table for table in tables if table["workload"].iloc[0] == "roberta")
    request = toy_job("a", n_gpus=2, is_guaranteed=True)
    reference = toy_catalogue().requested(request)
    known = [number % 3 != 0 for number in range(len(rows))]
    catalogue = TableCatalogue.from_tables(tables, known={"roberta": known})
    mine = catalogue.requested(request)
    for freedom in (Freedom(), Freedom(plan=False), Freedom(resources=False), Freedom(False, False)):
        options = OptionTable(catalogue, freedom).of(request)
        assert options
        for item in options:
            assert item is mine or item.is_known
            assert item.iter_time_s <= reference.iter_time_s


def test_the_last_job_grows_although_nothing_happens():
    jobs = [toy_job("long", steps=40_000), toy_job("other", n_gpus=8, steps=60)]
    result = simulate(
        jobs, toy_nodes(1, 8), toy_catalogue(), REGISTRY["morphling-lookahead"], restart_delay_s=60.0
    )
    mine = result.events[result.events["job_id"] == "long"]
    assert mine["n_gpus"].max() == 8
    blind = MorphlingLookahead(look_again_s=1e9)
    slow = simulate(jobs, toy_nodes(1, 8), toy_catalogue(), blind, restart_delay_s=60.0)
    assert result.outcomes["finish_time_s"].max() < slow.outcomes["finish_time_s"].max()


def test_the_next_look_is_later():
    for time_s, every_s in ((0.0, 900.0), (900.0, 900.0), (1.0, 0.1), (0.3, 0.1), (899.9, 900.0)):
        found = _next_multiple(time_s, every_s)
        assert time_s < found <= time_s + every_s * (1 + 1e-9)
