"""The rules of Morphling on clusters that are small enough to work out by hand."""

import random
from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest
from toy_cluster import find, simulate, throughput_rows, toy_catalogue, toy_job, toy_nodes

from makespan.policies import REGISTRY
from makespan.policies.lookahead import (
    CLAIRVOYANT,
    NON_CLAIRVOYANT,
    Arrivals,
    Context,
    Lookahead,
    MorphlingLookahead,
    MorphlingWork,
    Residents,
    Schedule,
    Slot,
    Task,
    _next_multiple,
    displace,
    grow,
    preempt,
)
from makespan.policies.morphling import FULL_FREEDOM, Freedom, Options, OptionTable
from makespan.policies.placing import FreeResources
from makespan.studies import TableCatalogue

DELAY_S = 10.0
CATALOGUE = toy_catalogue()
VARIANTS = ("morphling-lookahead", "morphling-work")


def table(*rows, key="roberta"):
    return TableCatalogue.from_tables([throughput_rows(key, list(rows))])


def view_of(index=0, ran=(), **spec):
    """Return what policies read of a job that has run in some configurations."""
    job = toy_job(f"job-{index}", **spec)
    reference = CATALOGUE.requested(job) if job.workload in CATALOGUE.workloads else None
    return SimpleNamespace(
        spec=job,
        index=index,
        allocation=None,
        generation=len(ran),
        ready_time_s=0.0,
        observed=frozenset(ran),
        has_observed=lambda item: item in ran,
        step_s=lambda item: item.iter_time_s if item in ran else item.predicted_iter_time_s,
        guarantees=lambda item: item is reference or item.predicted_iter_time_s <= reference.iter_time_s,
    )


def options_of(catalogue, freedom=FULL_FREEDOM, **spec):
    """Return the options of a job that has not run."""
    spec.setdefault("n_gpus", min(item.n_gpus for item in catalogue.all(spec.get("workload", "roberta"))))
    return OptionTable(catalogue, freedom).of(view_of(**spec))


def only(*items):
    """Return options that are just these configurations, as predicted."""
    return Options(items, {item: item.predicted_iter_time_s for item in items})


def task(index=0, steps=100.0, options=None, **spec):
    return Task(view_of(index, **spec), options_of(CATALOGUE) if options is None else options, steps, 0.0)


def context(now_s=0.0, price=0.0, tuning=CLAIRVOYANT, preempt_price=0.0, last_weight=1.0):
    return Context(now_s, DELAY_S, price, preempt_price, last_weight, 8, tuning)


def scheduled(free, *held, now_s=0.0):
    """Return a schedule with jobs that have been running: (task, configuration, nodes)."""
    free, slots = FreeResources(list(free)), {}
    for owner, item, nodes in held:
        free.take(item, nodes)
        step_s = item.predicted_iter_time_s
        owner.held = slots[owner] = Slot(item, nodes, step_s, now_s + owner.steps * step_s)
    return Schedule(free, slots, now_s + DELAY_S, DELAY_S)


def weighing(last_weight, **changes):
    return context(tuning=replace(CLAIRVOYANT, grain_s=0.0, **changes), last_weight=last_weight)


def admitted(*tasks, price=0.0, now_s=0.0, tuning=CLAIRVOYANT):
    return context(now_s, price, tuning).admit(tasks)


def cleared(schedule, task, item, protected=()):
    """Return the schedule in which a job takes the devices of others, and who lost everything, or None."""
    chosen = Residents(schedule, protected).cheapest(item)
    return None if chosen is None else displace(schedule, task, item, *chosen)


# --- options --------------------------------------------------------------------------------


def test_options_leave_out_what_is_slower_in_more_room():
    catalogue = table(
        ("ga", "4", 1.0), ("ga", "22", 0.9), ("ga", "8", 1.1), ("ga", "2", 1.8), ("ga", "11", 1.9)
    )
    kept = {item.placement.text for item in options_of(catalogue).items}
    assert kept == {"4", "22", "2", "11"}


def test_a_guaranteed_job_has_only_options_as_fast_as_its_request():
    limit_s = CATALOGUE.requested(toy_job(n_gpus=4, plan="gc")).predicted_iter_time_s
    options = options_of(CATALOGUE, n_gpus=4, plan="gc", is_guaranteed=True)
    assert all(options.step_s[item] <= limit_s for item in options.items)
    assert len(options.items) < len(options_of(CATALOGUE, n_gpus=4, plan="gc").items)
    assert min(item.n_gpus for item in options.items) == 4  # another plan is faster on as many devices
    assert {item.plan for item in options.items} == {"ga"}


def test_ablations_take_choices_away():
    for freedom, n_gpus, plans in (
        (Freedom(resources=False), {4}, {"ga"}),
        (Freedom(plan=False), {1, 2, 4, 8}, {"gc"}),
        (Freedom(plan=False, resources=False), {4}, {"gc"}),
        (Freedom(), {1, 2, 4, 8}, {"ga"}),
    ):
        options = options_of(CATALOGUE, freedom, n_gpus=4, plan="gc").items
        assert {item.n_gpus for item in options} == n_gpus, freedom
        assert {item.plan for item in options} == plans, freedom


def test_what_a_job_has_run_counts_as_observed_and_changes_nothing_for_others():
    rows = [("ga", "4", 1.0), ("ga", "8", 0.8), ("gc", "8", 0.7)]
    frame = throughput_rows("roberta", rows)
    hopes = TableCatalogue.from_tables([frame], {"roberta": [1.0, 0.8, 0.5]}, known={"roberta": [False] * 3})
    table_ = OptionTable(hopes, FULL_FREEDOM)
    slow = find(hopes, "gc", "8")
    assert table_.of(view_of(n_gpus=4)).step_s[slow] == 0.5
    assert table_.of(view_of(n_gpus=4, ran=[slow])).step_s[slow] == 0.7
    assert table_.of(view_of(1, n_gpus=4)).step_s[slow] == 0.5


def test_a_plan_in_digits_scales_along_data_parallelism_only():
    rows = [("141", "4", 3.0), ("142", "8", 1.6), ("281", "88", 1.0), ("118", "8", 1.2)]
    catalogue = table(*rows, key="llama7")
    options = options_of(catalogue, Freedom(plan=False), workload="llama7", n_gpus=4, plan="141")
    assert {item.plan for item in options.items} == {"141", "142"}


# --- prices and order -----------------------------------------------------------------------


def test_a_free_device_buys_speed_and_a_dear_one_buys_efficiency():
    cheap, dear = task(), task(1)
    admitted(cheap)
    admitted(dear, price=100.0)
    assert cheap.choices[0].n_gpus == 8
    assert dear.choices[0].n_gpus == 1
    items = options_of(CATALOGUE).items
    area = min(item.n_gpus * (DELAY_S + 100.0 * item.predicted_iter_time_s) for item in items)
    assert cheap.rank[0] == dear.rank[0] == pytest.approx(area)


@pytest.mark.parametrize(("factor", "order"), [(1.0, [1, 2, 0]), (0.01, [2, 1, 0])])
def test_the_queue_serves_little_work_first_and_guarantees_weigh_by_their_factor(factor, order):
    waiting = [task(0, 90), task(1, 10), task(2, 50, is_guaranteed=True)]
    tuning = replace(CLAIRVOYANT, guarantee_factor=factor)
    assert [found.index for found in admitted(*waiting, tuning=tuning)] == order


def test_the_arrival_rate_counts_each_job_once_and_forgets():
    first = Arrivals().updated([task(0), task(1)], 0.0, 100.0)
    assert first.per_s == pytest.approx(0.02)
    again = first.updated([task(0), task(1), task(2)], 100.0, 100.0)
    assert again.per_s == pytest.approx(0.02 / 2.718281828 + 0.01)
    assert again.last_index == 2
    assert again.sizes == {1: 3}
    assert again.updated([task(2)], 200.0, 100.0).sizes is again.sizes


def test_the_share_of_arrivals_between_two_sizes_leaves_out_the_lower_one():
    arrivals = Arrivals(sizes={1: 5, 4: 3, 8: 2})
    assert arrivals.share_between(0, 8) == 1.0
    assert arrivals.share_between(1, 4) == pytest.approx(0.3)
    assert arrivals.share_between(4, 64) == pytest.approx(0.2)
    assert arrivals.share_between(8, 64) == Arrivals().share_between(0, 8) == 0.0


@pytest.mark.parametrize("is_guaranteed", [True, False])
def test_a_guaranteed_job_is_held_back_while_it_would_keep_arrivals_waiting_for_longer(is_guaranteed):
    item = find(CATALOGUE, "ga", "8")
    steps = (1000.0 - DELAY_S) / item.predicted_iter_time_s  # 1000 s with the restart
    large = task(0, steps, only(item), is_guaranteed=is_guaranteed)
    rate = {
        "sizes": {1: 1, 8: 1}
    }  # all wait for 500 s: at 1/500 s two jobs, 1000 s in all, as long as the job runs
    limit = replace(CLAIRVOYANT, blocking_limit=1.0)
    for per_s, is_held in ((1.01 / 500, True), (0.99 / 500, False)):
        queue = admitted(large)
        starting, held = context(tuning=limit).held_back(queue, [], Arrivals(per_s, **rate))
        assert held == ([large] if is_held and is_guaranteed else [])
        assert starting == ([] if held else queue)
    waited = context(now_s=100.0, tuning=limit)
    assert waited.held_back(admitted(large), [], Arrivals(1.01 / 500, **rate))[1] == []
    assert context(tuning=NON_CLAIRVOYANT).held_back(queue, [], Arrivals(1.0, **rate)) == (queue, [])


def test_who_would_not_fit_anyway_is_not_kept_waiting_by_another_guaranteed_job():
    four = find(CATALOGUE, "ga", "4")
    first, second = (task(index, 1e6, only(four), is_guaranteed=True) for index in range(2))
    scheduled([8], (first, four, (0,)))
    at_rate = {4: Arrivals(1.0, sizes={4: 1}), 8: Arrivals(1.0, sizes={8: 1})}
    for size, arrivals in at_rate.items():
        held = context().held_back(admitted(second), [first], arrivals)[1]
        assert held == ([second] if size == 4 else [])  # 8 devices are not left to anybody as it is


def test_a_long_guaranteed_job_starts_when_arrivals_become_rare():
    long = toy_job("long", 150.0, n_gpus=8, steps=20_000, is_guaranteed=True)
    short = [toy_job(f"short-{k}", 100.0 * k, n_gpus=8, steps=20) for k in range(40)]
    ends = {}
    for limit in (inf, 1.0):
        policy = MorphlingWork(tuning=replace(CLAIRVOYANT, blocking_limit=limit), shares=False)
        result = simulate([long, *short], toy_nodes(1, 8), CATALOGUE, policy, restart_delay_s=DELAY_S)
        jobs = ends[limit] = result.outcomes.set_index("job_id")
        assert (jobs.loc["long", "first_start_s"] < 4000) == (limit == inf)
        assert set(result.events.query("job_id == 'long'")["kind"]) >= {"started", "finished"}
    mean_s = {limit: (jobs["finish_time_s"] - jobs["submit_time_s"]).mean() for limit, jobs in ends.items()}
    assert mean_s[1.0] < mean_s[inf]


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
    running, waiting = task(0, 100), task(1, 50, options=only(item))
    admitted(waiting)
    now = scheduled([8], (running, item, (0,)))
    ahead = Lookahead(now, [waiting], weighing(2.0))
    cost_s = ahead.cost_s()
    first_s = 100 * item.predicted_iter_time_s
    last_s = first_s + DELAY_S + 50 * item.predicted_iter_time_s
    assert ahead.ends_s == {waiting: pytest.approx(last_s)}
    assert cost_s == ahead.cost_s() == pytest.approx(first_s + 3.0 * last_s)
    assert Lookahead(now, [waiting], weighing(2.0)).cost_s(cost_s) is None
    assert now.free.gpus == [0]


def test_a_job_that_never_fits_waits_until_the_others_are_done():
    item, pair = find(CATALOGUE, "ga", "8"), find(CATALOGUE, "ga", "11")
    running, waiting = task(0, 100), task(1, 50, options=only(pair))
    admitted(waiting)
    ahead = Lookahead(scheduled([8], (running, item, (0,))), [waiting], weighing(0.0))
    ahead.follow([waiting])
    assert ahead.ends_s[waiting] == pytest.approx(100 * item.predicted_iter_time_s)


def test_jobs_far_back_in_the_queue_count_as_ending_when_the_last_before_them_starts():
    item = find(CATALOGUE, "ga", "8")
    running, *queue = (task(index, 100, options=only(item)) for index in range(4))
    admitted(*queue)
    now = scheduled([8], (running, item, (0,)))
    run_s = 100 * item.predicted_iter_time_s
    near = Lookahead(now, queue, weighing(0.0, max_foreseen=1))
    assert near.cost_s() == pytest.approx(run_s + (2 * run_s + DELAY_S) + 2 * run_s)
    assert set(near.ends_s) == {queue[0]}


@pytest.mark.parametrize("seed", range(20))
def test_jobs_with_other_choices_pass_those_for_which_there_is_no_room_and_no_others(seed):
    draw = random.Random(seed)
    sizes = [find(CATALOGUE, "ga", text) for text in ("1", "2", "4", "8")]
    running = [task(index, draw.randint(50, 200)) for index in range(4)]
    held = [(one, draw.choice(sizes), (node,)) for node, one in enumerate(running)]
    queue = [
        task(4 + place, draw.randint(20, 300), options=only(*sorted(draw.sample(sizes, 2), key=sizes.index)))
        for place in range(12)
    ]
    admitted(*queue)
    now = scheduled([8, 8, 8, 8], *held)
    ahead = Lookahead(now, queue, weighing(1.0))
    cost_s = ahead.cost_s()
    expected = one_by_one(now, queue)
    assert {one: ahead.ends_s[one] for one in queue} == {one: pytest.approx(expected[one]) for one in queue}
    ends = [*expected.values(), *(slot.finish_s for slot in now.slots.values())]
    assert cost_s == pytest.approx(sum(ends) + max(ends))


def test_the_lookahead_goes_no_further_than_it_is_asked_to():
    item = find(CATALOGUE, "ga", "8")
    running, *queue = (task(index, 100, options=only(item)) for index in range(5))
    admitted(*queue)
    now = scheduled([8], (running, item, (0,)))
    ahead = Lookahead(now, queue, weighing(1.0))
    assert ahead.ends_s == {}
    ahead.follow(queue[:2])
    assert set(ahead.ends_s) == set(queue[:2])
    known = dict(ahead.ends_s)
    assert ahead.cost_s() == Lookahead(now, queue, weighing(1.0)).cost_s()
    assert set(ahead.ends_s) == set(queue) and known.items() <= ahead.ends_s.items()


@pytest.mark.parametrize("is_guaranteed", [False, True])
def test_devices_have_their_price_until_jobs_end(is_guaranteed):
    item = find(CATALOGUE, "ga", "8")
    running = task(0, 100, options=only(item))
    waiting = task(1, 50, options=only(item), is_guaranteed=is_guaranteed)
    admitted(waiting)
    now = scheduled([8], (running, item, (0,)))
    half = replace(CLAIRVOYANT, preempt_factor=0.5)
    free, dear = (
        Lookahead(now, [waiting], context(preempt_price=price, tuning=half)) for price in (0.0, 0.25)
    )
    step_s = item.predicted_iter_time_s
    held_s = 100 * step_s + (0.5 if is_guaranteed else 1.0) * (DELAY_S + 50 * step_s)
    assert dear.cost_s() - free.cost_s() == pytest.approx(0.25 * 8 * held_s)


def one_by_one(schedule, queue):
    """Return when each job of a queue ends [s], if at each end all that wait are tried in their order."""
    free = schedule.free.copy()
    left = [(slot.finish_s, one.index, slot.item, slot.nodes) for one, slot in schedule.slots.items()]
    found = {}
    while left:
        left.sort(key=lambda run: run[:2])
        now_s, _, item, nodes = left.pop(0)
        free.give(item, nodes)
        for one in queue:
            chosen = None if one in found else free.first_fit(one.choices)
            if chosen is not None:
                free.take(*chosen)
                found[one] = now_s + DELAY_S + one.steps * one.options.step_s[chosen[0]]
                left.append((found[one], one.index, *chosen))
    return found


# --- preemption -------------------------------------------------------------------------


def test_a_large_job_moves_a_small_one_aside():
    one, whole = find(CATALOGUE, "ga", "1"), find(CATALOGUE, "ga", "8")
    small, large = task(0, 5000), task(1, 50, options=only(whole))
    admitted(large)
    after, blocked = preempt(scheduled([8, 4], (small, one, (0,))), [large], context())
    assert not blocked
    assert after.slots[large].nodes == (0,)
    assert after.slots[small].nodes == (1,) and after.slots[small] is not small.held


def test_nobody_preempts_where_waiting_is_cheaper():
    one, whole = find(CATALOGUE, "ga", "1"), find(CATALOGUE, "ga", "8")
    small, large = task(0, 3), task(1, 50, options=only(whole))
    admitted(large)
    before = scheduled([8, 4], (small, one, (0,)))
    after, blocked = preempt(before, [large], context())
    assert after is before
    assert blocked == [large]


def test_nobody_takes_devices_that_those_who_wait_or_arrive_would_miss_for_longer():
    whole = find(CATALOGUE, "ga", "8")
    victim, newcomer = (task(index, steps, options=only(whole)) for index, steps in enumerate((5000, 400)))
    others = [task(index, 900, options=only(whole)) for index in range(2, 50)]
    now, first_only = scheduled([8], (victim, whole, (0,))), replace(CLAIRVOYANT, max_preempting=1)
    for n_others, price, is_taken in ((0, 0.0, True), (0, 4.0, False), (10, 0.0, True), (40, 0.0, False)):
        queue = admitted(newcomer, *others[:n_others])
        after, waiting = preempt(now, queue, context(preempt_price=price, tuning=first_only))
        assert (newcomer in after.slots) is is_taken, (n_others, price)
        assert (after is now) is not is_taken and len(waiting) == len(queue)


@pytest.mark.parametrize("is_guaranteed", [False, True])
def test_only_a_best_effort_job_loses_everything(is_guaranteed):
    whole = find(CATALOGUE, "ga", "8")
    victim = task(0, 5000, options=only(whole), is_guaranteed=is_guaranteed)
    newcomer = task(1, 5, options=only(whole))
    admitted(newcomer)
    after, blocked = preempt(scheduled([8], (victim, whole, (0,))), [newcomer], context())
    assert (newcomer in after.slots) is not is_guaranteed
    assert blocked == ([newcomer] if is_guaranteed else [victim])


def test_the_nodes_on_which_least_is_destroyed_are_taken():
    one, whole = find(CATALOGUE, "ga", "1"), find(CATALOGUE, "ga", "8")
    many = [(task(index, 5000), one, (0,)) for index in range(4)]
    few = (task(9, 5000), one, (1,))
    large = task(10, 50, options=only(whole))
    trial, suspended = cleared(scheduled([8, 8, 2], *many, few), large, whole)
    assert trial.slots[large].nodes == (1,)
    assert suspended == []
    assert trial.slots[few[0]].nodes == (2,)


def test_a_winner_does_not_lose_its_devices_in_the_same_decision():
    whole = find(CATALOGUE, "ga", "8")
    victim, winner = task(0, 5000, options=only(whole)), task(1, 5, options=only(whole))
    now = scheduled([8], (victim, whole, (0,)))
    assert cleared(now, winner, whole, {victim}) is None
    assert cleared(now, winner, whole) is not None


# --- handing out ----------------------------------------------------------------------------


def test_free_devices_go_to_the_steepest_job():
    steep = options_of(table(("ga", "1", 1.0), ("ga", "2", 0.5)))
    flat = options_of(table(("ga", "1", 1.0), ("ga", "2", 0.9)))
    jobs = [task(0, 1000, options=flat), task(1, 1000, options=steep)]
    now = scheduled([3], (jobs[0], flat.items[0], (0,)), (jobs[1], steep.items[0], (0,)))
    grow(now, 0.0, context())
    assert [now.slots[job].item.n_gpus for job in jobs] == [1, 2]


def test_a_running_job_grows_only_where_the_restart_pays():
    options = options_of(table(("ga", "1", 1.0), ("ga", "2", 0.6)))
    for steps, expected in ((30, 1), (1000, 2)):
        job = task(0, steps, options=options)
        now = scheduled([2], (job, options.items[0], (0,)))
        grow(now, 0.0, context())
        assert now.slots[job].item.n_gpus == expected


def test_growth_stops_where_device_time_is_dear():
    options = options_of(table(("ga", "1", 1.0), ("ga", "2", 0.8)))
    for price, expected in ((0.0, 2), (1.0, 1)):
        job = task(0, 1000, options=options)
        now = scheduled([2], (job, options.items[0], (0,)))
        grow(now, price, context())
        assert now.slots[job].item.n_gpus == expected


def test_a_job_changes_its_plan_where_another_is_faster_on_as_many_devices():
    options = options_of(table(("ga", "2", 1.0), ("gc", "11", 0.5)))
    job = task(0, 1000, options=options)
    now = scheduled([2, 1], (job, options.items[0], (0,)))
    grow(now, 0.0, context())
    assert now.slots[job].item.plan == "gc"


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
    job = view_of()
    job.running_time_s = 200.0
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


@pytest.mark.parametrize("name", VARIANTS)
def test_a_guaranteed_job_runs_as_requested_before_anything_else_is_sure(name):
    frame = throughput_rows("roberta", [("ga", "2", 2.0), ("gc", "2", 1.5), ("ga", "8", 0.2)])
    sampled = [False, True, True]
    catalogue = TableCatalogue.from_tables([frame], {"roberta": [2.0, 1.5, 0.2]}, known={"roberta": sampled})
    job = toy_job("a", n_gpus=2, plan="ga", steps=2000, is_guaranteed=True)
    result = simulate([job], toy_nodes(1, 8), catalogue, REGISTRY[name], restart_delay_s=DELAY_S)
    held = result.events[result.events["kind"].isin(["started", "reconfigured"])]["n_gpus"].tolist()
    assert held == [2, 8]


@pytest.mark.parametrize("policy", [MorphlingLookahead(), MorphlingWork()])
def test_the_last_job_grows_although_nothing_happens(policy):
    jobs = [toy_job("long", steps=40_000), toy_job("other", n_gpus=8, steps=60)]
    spec = toy_nodes(1, 8)
    result = simulate(jobs, spec, toy_catalogue(), policy, restart_delay_s=60.0)
    mine = result.events[result.events["job_id"] == "long"]
    assert mine["n_gpus"].max() == 8


def test_jobs_that_nobody_expected_to_be_long_are_looked_at_again():
    jobs = [toy_job("long", steps=40_000), toy_job("other", n_gpus=8, steps=60)]
    seldom = MorphlingLookahead(tuning=replace(NON_CLAIRVOYANT, look_again_s=1e9))
    often, never = (
        simulate(jobs, toy_nodes(1, 8), toy_catalogue(), policy, restart_delay_s=60.0)
        for policy in (MorphlingLookahead(), seldom)
    )
    assert often.outcomes["finish_time_s"].max() < never.outcomes["finish_time_s"].max()


def test_the_next_look_is_later():
    for time_s, every_s in ((0.0, 900.0), (900.0, 900.0), (1.0, 0.1), (0.3, 0.1), (899.9, 900.0)):
        found = _next_multiple(time_s, every_s)
        assert time_s < found <= time_s + every_s * (1 + 1e-9)
