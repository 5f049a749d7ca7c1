"""Planner of pipelines against brute force that knows only its definitions."""

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from makespan.errors import InfeasiblePlanError
from makespan.oobleck import instantiation as _choice
from makespan.oobleck.instantiation import (
    choose_plan,
    count_plans,
    distribute,
    enumerate_plans,
    estimated_time_s,
    event_time_s,
    least_time_by_program,
)
from makespan.oobleck.plan import PipelineTemplate, Stage
from makespan.oobleck.profile import LayerProfile, ModelProfile
from makespan.oobleck.templates import (
    CostRule,
    MemoryLimit,
    check_guarantee,
    least_template_count,
    make_templates,
    pipeline_cost,
)

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True)
MANY = settings(max_examples=250, deadline=None, derandomize=True)

PICO = 10**12

# Few different times, so that stages tie; memory in the same spirit.
TIMES = st.lists(st.sampled_from([1, 1, 2, 3, 5]) | st.integers(1, 40), min_size=1, max_size=7)


def profile_of(times, memory=None, exchange=None):
    sizes = memory or [(0, 0)] * len(times)
    in_node = dict.fromkeys((1, 2, 4), (exchange or 0) / PICO)
    layers = (
        LayerProfile(time / PICO, 2 * time / PICO, in_node, {}, *size)
        for time, size in zip(times, sizes, strict=True)
    )
    return ModelProfile("drawn", tuple(layers))


def cost_by_definition(latencies):
    """Fill, steady phase and drain, with 3 S + 1 microbatches; one stage counts four times."""
    n_stages, slowest = len(latencies), max(latencies)
    if n_stages == 1:
        return 4 * slowest
    last = len(latencies) - 1 - latencies[::-1].index(slowest)
    return sum(latencies) + (3 * n_stages + 1 - n_stages + last) * slowest + sum(latencies[last:])


def pipelines(n_layers, n_nodes, gpus_per_node):
    """Yield every pipeline: its boundaries and the GPUs of each stage."""
    widths = [width for width in (1, 2, 4, 8) if width <= gpus_per_node]
    nodes = [
        parts
        for count in range(1, gpus_per_node + 1)
        for parts in itertools.product(widths, repeat=count)
        if sum(parts) == gpus_per_node
    ]
    for chosen in itertools.product(nodes, repeat=n_nodes):
        gpus = tuple(itertools.chain(*chosen))
        for cuts in itertools.combinations(range(1, n_layers), len(gpus) - 1):
            yield (0, *cuts, n_layers), gpus


def brute_force(times, n_nodes, gpus_per_node=1, exchange=0, memory=None, limit=None, in_flight=True):
    """Least cost of all pipelines that fit, None if none does."""
    best = None
    for bounds, gpus in pipelines(len(times), n_nodes, gpus_per_node):
        latencies, fits = [], True
        for index, width in enumerate(gpus):
            layers = range(bounds[index], bounds[index + 1])
            work = 3 * sum(times[layer] for layer in layers)
            latencies.append((work + width // 2) // width + (2 * exchange * len(layers) if width > 1 else 0))
            if limit is not None:
                kept = len(gpus) - index if in_flight else 1
                held = sum(6 * memory[layer][0] + kept * memory[layer][1] for layer in layers)
                fits &= held <= width * limit
        if fits:
            cost = cost_by_definition(latencies)
            best = cost if best is None else min(best, cost)
    return best


def check_template(template, profile, n_nodes, gpus_per_node):
    assert (template.n_nodes, template.gpus_per_node) == (n_nodes, gpus_per_node)
    ends = [0, *(stage.end_layer for stage in template.stages)]
    assert [stage.first_layer for stage in template.stages] == ends[:-1]
    assert ends[-1] == profile.n_layers
    assert all(stage.end_layer > stage.first_layer for stage in template.stages)
    used = list(itertools.accumulate(stage.n_gpus for stage in template.stages))
    assert used[-1] == n_nodes * gpus_per_node
    assert set(range(gpus_per_node, used[-1] + 1, gpus_per_node)) <= set(used)  # no stage crosses nodes
    latencies = [round(stage.latency_s * PICO) for stage in template.stages]
    assert round(template.time_s * PICO) == cost_by_definition(latencies) == pipeline_cost(latencies)


def agrees(times, n_nodes, gpus_per_node=1, exchange=0, memory=None, limit=None, in_flight=True):
    """Check exact search against brute force, and the published one against both."""
    profile = profile_of(times, memory, exchange)
    bound = None if limit is None else MemoryLimit(limit, counts_in_flight=in_flight)
    expected = brute_force(times, n_nodes, gpus_per_node, exchange, memory, limit, in_flight)
    exact = make_templates(profile, [n_nodes], gpus_per_node, memory=bound)
    published = make_templates(profile, [n_nodes], gpus_per_node, "dc", memory=bound)
    if expected is None:
        assert exact == published == {}
        return
    assert round(exact[n_nodes].time_s * PICO) == expected
    check_template(exact[n_nodes], profile, n_nodes, gpus_per_node)
    if n_nodes in published:  # halves that are best by themselves may not fit together, with memory limits
        check_template(published[n_nodes], profile, n_nodes, gpus_per_node)
        assert published[n_nodes].time_s >= exact[n_nodes].time_s
    else:
        assert limit is not None


@given(TIMES, st.integers(1, 5))
@SETTINGS
def test_exact_is_brute_force_up_to_seven_layers_and_five_nodes(times, n_nodes):
    agrees(times, n_nodes)


@pytest.mark.parametrize("n_layers", range(1, 8))
@pytest.mark.parametrize("n_nodes", range(1, 6))
def test_exact_is_brute_force_for_all_chains_of_two_times(n_layers, n_nodes):
    for times in itertools.product((1, 2), repeat=n_layers):
        agrees(times, n_nodes)


@given(st.data(), st.integers(1, 5), st.booleans())
@SETTINGS
def test_exact_is_brute_force_under_memory_limits(data, n_nodes, in_flight):
    times = data.draw(TIMES)
    sizes = st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 5, 20]))
    memory = data.draw(st.lists(sizes, min_size=len(times), max_size=len(times)))
    agrees(times, n_nodes, memory=memory, limit=data.draw(st.integers(1, 90)), in_flight=in_flight)


@given(st.data(), st.sampled_from([(1, 2), (2, 2), (1, 3), (2, 3), (1, 4), (2, 4)]))
@SETTINGS
def test_exact_is_brute_force_with_several_gpus_a_node(data, shape):
    times = data.draw(TIMES)
    limit = data.draw(st.none() | st.integers(1, 60))
    memory = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=7, max_size=7))
    agrees(times, *shape, exchange=data.draw(st.integers(0, 4)), memory=memory[: len(times)], limit=limit)


def divided(times, n_nodes, gpus_per_node, exchange):
    """Divide in two as published, by plain recursion: cut, nodes or GPUs, stages, all ascending."""

    def latency(first, end, width):
        work = 3 * sum(times[first:end])
        return (work + width // 2) // width + (2 * exchange * (end - first) if width > 1 else 0)

    @functools.cache
    def best(n_stages, first, end, nodes, gpus):
        if not (n_stages <= end - first and nodes <= n_stages <= nodes * gpus):
            return None
        if n_stages == 1:
            return ((first, end, gpus),) if gpus in (1, 2, 4) else None
        found = None
        for cut in range(first + 1, end):
            for held in range(1, nodes if nodes > 1 else gpus):
                left_size, right_size = (
                    ((held, gpus), (nodes - held, gpus)) if nodes > 1 else ((1, held), (1, gpus - held))
                )
                for n_left in range(1, n_stages):
                    left = best(n_left, first, cut, *left_size)
                    right = best(n_stages - n_left, cut, end, *right_size)
                    if left and right and (found is None or cost(left + right) < cost(found)):
                        found = left + right
        return found

    def cost(stages):
        return cost_by_definition([latency(*stage) for stage in stages])

    roots = (best(count, 0, len(times), n_nodes, gpus_per_node) for count in range(1, len(times) + 1))
    return min(filter(None, roots), key=cost, default=None)


@given(
    TIMES,
    st.sampled_from([(1, 1), (2, 1), (3, 1), (5, 1), (2, 2), (1, 3), (2, 3), (1, 4)]),
    st.integers(0, 4),
)
@SETTINGS
def test_the_published_search_is_the_plain_recursion_to_the_stage(times, shape, exchange):
    found = make_templates(profile_of(times, None, exchange), [shape[0]], shape[1], "dc")
    stages = [
        tuple((stage.first_layer, stage.end_layer, stage.n_gpus) for stage in one.stages)
        for one in found.values()
    ]
    expected = divided(times, *shape, exchange)
    assert stages == ([] if expected is None else [expected])


@given(st.lists(st.integers(1, 30), min_size=8, max_size=10), st.integers(1, 10))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_exact_is_brute_force_up_to_ten_layers(times, n_nodes):
    expected = brute_force(times, n_nodes)
    found = make_templates(profile_of(times), [n_nodes])
    assert {size: round(one.time_s * PICO) for size, one in found.items()} == (
        {} if expected is None else {n_nodes: expected}
    )


@given(TIMES, st.integers(1, 5), st.integers(1, 20))
@SETTINGS
def test_exact_is_brute_force_for_a_given_number_of_microbatches(times, n_nodes, n_microbatches):
    rule = CostRule(n_microbatches)
    expected = [
        sum(one) + (n_microbatches - n_nodes + last) * max(one) + sum(one[last:])
        for bounds, _ in pipelines(len(times), n_nodes, 1)
        for one in [[3 * sum(times[a:b]) for a, b in itertools.pairwise(bounds)]]
        for last in [max(index for index, time in enumerate(one) if time == max(one))]
        if n_nodes <= n_microbatches
    ]
    found = make_templates(profile_of(times), [n_nodes], rule=rule)
    assert [round(one.time_s * PICO) for one in found.values()] == sorted(expected)[:1]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True), st.integers(0, 24), st.integers(0, 4)
)
@SETTINGS
def test_plans_are_all_vectors_that_use_all_nodes_with_enough_pipelines(sizes, n_nodes, f):
    sizes = sorted(sizes)
    every = itertools.product(*(range(n_nodes // size + 1) for size in sizes))
    expected = {
        counts
        for counts in every
        if sum(a * b for a, b in zip(counts, sizes, strict=True)) == n_nodes and sum(counts) >= f + 1
    }
    found = list(enumerate_plans(sizes, n_nodes, f))
    assert len(found) == len(set(found)) == count_plans(sizes, n_nodes, f)
    assert set(found) == expected
    assert found == sorted(found, key=lambda counts: counts[::-1])


@given(st.integers(1, 8), st.integers(0, 4), st.integers(0, 40))
@SETTINGS
def test_the_least_number_of_sizes_leaves_no_hole_and_one_fewer_does(n0, f, extra):
    enough = least_template_count(n0, f)
    most = (f + 1) * n0 + extra
    assert check_guarantee(range(n0, n0 + enough), n0, f, most) is None
    hole = check_guarantee(range(n0, n0 + enough - 1), n0, f, 200)
    assert hole is not None
    assert not list(enumerate_plans([*range(n0, n0 + enough - 1)], hole, f)) if enough > 1 else True


def template(n_nodes, latencies, cost=None):
    stages = tuple(Stage(index, index + 1, 1, time / 1000) for index, time in enumerate(latencies))
    time_s = pipeline_cost([time * 10**9 for time in latencies]) / PICO if cost is None else cost
    return PipelineTemplate(n_nodes, 1, stages, time_s)


TEMPLATES = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=4).map(
    lambda drawn: tuple(template(index + 1, one) for index, one in enumerate(drawn))
)


def all_distributions(n_pipelines, n_microbatches):
    if n_pipelines == 1:
        yield (n_microbatches,)
        return
    for first in range(1, n_microbatches - n_pipelines + 2):
        for rest in all_distributions(n_pipelines - 1, n_microbatches - first):
            yield (first, *rest)


def needed(one, count, estimator):
    """Milliseconds of a pipeline with so many microbatches."""
    latencies = [stage.latency_s * 1000 for stage in one.stages]
    if estimator == "1f1b":
        return sum(latencies) + (count - 1) * max(latencies)
    return one.time_s * 1000 / one.n_stages * count


@given(TEMPLATES, st.integers(0, 12), st.sampled_from(["1f1b", "compat"]))
@MANY
def test_greedy_batches_are_those_of_brute_force_and_of_an_integer_program(templates, more, estimator):
    n_microbatches = len(templates) + more
    found = distribute(templates, n_microbatches, "per_pipeline", estimator)
    longest = max(needed(one, count, estimator) for one, count in zip(templates, found, strict=True))
    best = min(
        max(needed(one, count, estimator) for one, count in zip(templates, counts, strict=True))
        for counts in all_distributions(len(templates), n_microbatches)
    )
    assert sum(found) == n_microbatches
    assert longest == pytest.approx(best, rel=1e-12)
    assert least_time_by_program(templates, n_microbatches, estimator) == pytest.approx(best / 1000, rel=1e-9)
    # In the published measure nobody waits longer than one microbatch takes.
    if estimator == "compat":
        shortest = min(needed(one, count, estimator) for one, count in zip(templates, found, strict=True))
        assert longest - shortest <= max(needed(one, 1, estimator) for one in templates) * (1 + 1e-9)


@given(TEMPLATES, st.lists(st.integers(1, 4), min_size=4, max_size=4), st.integers(1, 40))
@MANY
def test_equal_batches_a_template_deviate_as_little_as_brute_force_finds(templates, counts, n_microbatches):
    counts = counts[: len(templates)]
    each = [one for one, count in zip(templates, counts, strict=True) for _ in range(count)]
    unit = [one.time_s * 1000 / one.n_stages for one in templates]

    def deviation(numbers):
        times = np.array(unit) * np.array(numbers)
        return float(((times - times.mean()) ** 2).sum())

    possible = [
        numbers
        for numbers in itertools.product(*(range(1, n_microbatches // count + 1) for count in counts))
        if sum(a * b for a, b in zip(counts, numbers, strict=True)) == n_microbatches
    ]
    found = distribute(each, n_microbatches, "per_template")
    if not possible:
        assert found is None
        return
    chosen = [found[each.index(one)] for one in templates]
    assert found == tuple(chosen[templates.index(one)] for one in each)
    assert sum(found) == n_microbatches
    assert deviation(chosen) == pytest.approx(min(map(deviation, possible)), rel=1e-9, abs=1e-9)


@given(TEMPLATES, st.integers(2, 9), st.integers(0, 2), st.integers(2, 30))
@SETTINGS
def test_our_choice_is_the_least_time_of_all_plans_and_batches(templates, n_nodes, f, n_microbatches):
    by_size = {one.n_nodes: one for one in templates}
    times = {
        counts: min(
            max(needed(one, count, "1f1b") for one, count in zip(each, numbers, strict=True))
            for numbers in all_distributions(len(each), n_microbatches)
        )
        for counts in enumerate_plans(sorted(by_size), n_nodes, f)
        if sum(counts) <= min(n_microbatches, 3)
        for each in [[one for one, count in zip(templates, counts, strict=True) for _ in range(count)]]
    }
    if not times:
        return
    choice = choose_plan(by_size, n_nodes, f, n_microbatches, n_runners_up=10**6)
    listed = [choice.best, *choice.runners_up]
    assert [one.iter_time_s for one in listed] == sorted(one.iter_time_s for one in listed)
    assert choice.n_plans - choice.n_infeasible == len(listed)
    for one in listed:
        counts = tuple(one.counts.get(size, 0) for size in sorted(by_size))
        assert sum(one.n_microbatches) == n_microbatches
        assert estimated_time_s(one.templates, one.n_microbatches, "1f1b") == pytest.approx(one.iter_time_s)
        if counts in times:
            assert one.iter_time_s * 1000 == pytest.approx(times[counts], rel=1e-9)


@given(
    TEMPLATES, st.integers(2, 14), st.integers(0, 3), st.integers(1, 40), st.integers(0, 20), st.booleans()
)
@SETTINGS
def test_the_bounded_search_is_the_one_over_all_plans(templates, n_nodes, f, n_microbatches, n_more, syncs):
    """Cut short it still finds the least time, but for differences between the waits for gradients."""
    by_size = {one.n_nodes: one for one in templates}
    exchange = {count: 0.002 * (count % 5) for count in range(1, 15)}
    profile = ModelProfile("waits", (LayerProfile(1.0, 1.0, {}, exchange),)) if syncs else None

    def chosen(**limits):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_choice, "check_profile", lambda *_: None)  # drawn templates are of no one model
            for name, number in limits.items():
                patch.setattr(_choice, name, number)
            try:
                return choose_plan(by_size, n_nodes, f, n_microbatches, profile=profile, n_runners_up=n_more)
            except InfeasiblePlanError:
                return None

    every, bounded = chosen(), chosen(_LISTED=-1, _MOST_PLANS=-1)
    assert bounded == every
    cut = chosen(_LISTED=-1, _MOST_PLANS=-1, _MOST_VISITED=6)
    if every is not None and cut is not None:
        gap_s = cut.best.iter_time_s - every.best.iter_time_s
        assert 0 <= gap_s <= (0.008 + 1e-9 if syncs else 0)


@given(st.lists(st.integers(80, 100), min_size=1, max_size=6), st.integers(4, 8))
@SETTINGS
def test_the_estimate_is_close_to_the_schedule_where_stages_are_alike(latencies, rounds):
    """At most 5 % from four times as many microbatches as stages on, slowest over mean at most 1.2."""
    count = rounds * len(latencies)
    profile = ModelProfile("alike", tuple(LayerProfile(time / 3000, 2 * time / 3000) for time in latencies))
    one = template(1, latencies)
    exact_s = event_time_s([one], [count], profile)
    assert estimated_time_s([one], [count], "1f1b") == pytest.approx(exact_s, rel=0.05)
    assert exact_s >= max(latencies) * count / 1000 * (1 - 1e-9)
    assert math.isfinite(exact_s)
