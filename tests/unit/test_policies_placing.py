"""Best and worst fit on numbers whose bits are nodes."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from toy_cluster import (
    FAST,
    SLOW,
    find,
    mixed_nodes,
    throughput_rows,
    toy_catalogue,
    toy_nodes,
    typed_catalogue,
)

from makespan.policies import placing as _placing
from makespan.policies.placing import FreeResources, PlacementCache, can_starve, uneven_first
from makespan.studies import TableCatalogue


def best_fit(free, counts, of_type=None, types=()):
    """Return what the plain loop over nodes finds."""
    nodes = []
    for rank, count in enumerate(counts):
        able = [
            (n_free, node)
            for node, n_free in enumerate(free)
            if n_free >= count and node not in nodes and (not types or types[rank] in ("", of_type[node]))
        ]
        if not able:
            return None
        nodes.append(min(able)[1])
    # Equal shares are listed in the order of an allocation, largest share first.
    shares = sorted(zip(counts, types or [""] * len(counts), nodes, strict=True), reverse=True)
    return tuple(node for _, _, node in shares)


def test_placing_agrees_with_the_plain_loop():
    rng = random.Random(5)
    items = toy_catalogue().all("roberta")
    outcomes = set()
    for _ in range(300):
        free = [rng.randint(0, 8) for _ in range(rng.randint(1, 9))]
        item = rng.choice(items)
        found = FreeResources(free.copy()).fit(item)
        assert found == best_fit(free, item.counts)
        outcomes.add(found is None)
    assert outcomes == {True, False}


@pytest.mark.parametrize("most", [8, 127, 128, 300])
def test_places_remember_and_change_no_answer(most):
    rng, items = random.Random(most), toy_catalogue().all("roberta")
    placements = PlacementCache(6, most)
    for _ in range(2):  # the second time everything is known
        for seed in range(100):
            draw = random.Random(seed)
            free = [draw.choice((0, draw.randint(0, most))) for _ in range(6)]
            choices = tuple(draw.sample(items, 3))
            known = placements.packed(free)
            assert placements.unpacked(known) == free
            expected = [(item, best_fit(free, item.counts)) for item in choices]
            assert [(item, placements.fit(known, item)) for item in choices] == expected
            first = next((fit for fit in expected if fit[1] is not None), None)
            assert placements.first_fit(known, sum(free), choices) == first
    free = FreeResources([most] * 6, placements=placements)
    for _ in range(50):
        item = rng.choice(items)
        nodes = free.fit(item)
        if nodes is not None:
            free.take(item, nodes)
    assert placements.packed(free.gpus) == free._free and sum(free.gpus) == free.n_gpus


def test_a_place_has_the_type_of_device_that_is_asked_for():
    placements, catalogue = PlacementCache.on(mixed_nodes(2, 8), typed_catalogue()), typed_catalogue()
    of_type = [FAST, FAST, SLOW, SLOW]
    assert [list(placements.nodes_of_type(name)) for name in (FAST, SLOW, "")] == [
        [0, 1],
        [2, 3],
        [0, 1, 2, 3],
    ]
    rng, outcomes = random.Random(7), set()
    for _ in range(300):
        free = [rng.randint(0, 8) for _ in of_type]
        item = rng.choice(catalogue.all("roberta"))
        found = placements.fit(placements.packed(free), item)
        assert found == best_fit(free, item.counts, of_type, item.types_by_count)
        outcomes.add((found is None, item.types_by_count[0]))
    assert len(outcomes) == 4


def worst_fit(free, n_gpus):
    """Return devices by node: all of the emptiest node, then all of the next one, the first of equal ones."""
    left, taken = list(free), {}
    while n_gpus and max(left):
        node = max(range(len(left)), key=lambda it: (left[it], -it))
        taken[node] = min(n_gpus, left[node])
        n_gpus, left[node] = n_gpus - taken[node], 0
    return None if n_gpus else taken


def test_worst_fit_fills_the_emptiest_nodes_one_after_the_other():
    rng, outcomes = random.Random(9), set()
    places = PlacementCache(6, 8, rule="worst-fit")
    for n_gpus in (1, 2, 4, 8):
        items = tuple(it for it in toy_catalogue().all("roberta") if (it.plan, it.n_gpus) == ("ga", n_gpus))
        for _ in range(200):
            free = [rng.choice((0, 0, 1, 2, 3, rng.randint(0, 8))) for _ in range(6)]
            expected = worst_fit(free, n_gpus)
            fit = places.first_fit(places.packed(free), sum(free), items)
            if expected is None or len(expected) > 4:  # the catalogue has placements on up to 4 nodes
                assert fit is None
            else:
                assert dict(zip(fit[1], fit[0].counts, strict=True)) == expected
            outcomes.add((fit is None, fit is not None and fit[0].n_nodes > 1))
    assert len(outcomes) == 3


def test_worst_fit_looks_at_supplies_too():
    item = replace(find(toy_catalogue(), "ga", "2"), host_memory_bytes_per_gpu=2.0)
    worst = PlacementCache(3, 8, rule="worst-fit")
    plenty, scarce = [8.0, 8.0, 8.0], [8.0, 8.0, 3.0]
    assert FreeResources([4, 6, 8], [99] * 3, plenty, worst).fit(item) == (2,)
    assert FreeResources([4, 6, 8], [99] * 3, scarce, worst).fit(item) == (1,)
    assert FreeResources([4, 6, 8], [99] * 3, plenty).fit(item) == (0,)


def test_worst_fit_keeps_the_order_of_what_differs_in_more_than_shares():
    items = toy_catalogue().all("roberta")
    ordered = uneven_first(items)
    assert sorted(map(id, ordered)) == sorted(map(id, items))
    kinds = [(item.n_gpus, item.n_nodes, item.plan) for item in items]
    assert [(item.n_gpus, item.n_nodes, item.plan) for item in ordered] == kinds


def test_the_view_says_by_which_rule_a_cache_places():
    places = PlacementCache(2, 8)
    views = [
        SimpleNamespace(placement=rule, free_gpus=[4, 8], free_cpus=[9, 9], free_host_memory_bytes=[0.0, 0.0])
        for rule in ("best-fit", "worst-fit", "best-fit")
    ]
    item = find(toy_catalogue(), "ga", "2")
    assert [places.free_resources(view).fit(item) for view in views] == [(0,), (1,), (0,)]


def test_supplies_are_looked_at_where_they_may_run_out():
    rng = random.Random(3)
    item = replace(find(toy_catalogue(), "ga", "22"), host_memory_bytes_per_gpu=2.0)
    outcomes = set()
    for _ in range(300):
        free = [rng.randint(0, 8) for _ in range(5)]
        cpus, host = [rng.randint(0, 16) for _ in free], [float(rng.randint(0, 8)) for _ in free]
        supplied = [
            count if cpus[node] >= 2 * item.cpu_threads and host[node] >= 4.0 else 0
            for node, count in enumerate(free)
        ]
        found = FreeResources(free, cpus, host).fit(item)
        assert found == best_fit(supplied, item.counts)
        outcomes.add(found is None)
    assert outcomes == {True, False}


def test_places_forget_everything_before_they_grow_without_bounds(monkeypatch):
    monkeypatch.setattr(_placing, "_MAX_REMEMBERED", 5)
    placements, item = PlacementCache(2, 8), find(toy_catalogue(), "ga", "2")
    for free in range(9):
        assert placements.fit(placements.packed([free, 0]), item) == ((0,) if free >= 2 else None)
        assert sum(len(known) for known in placements._fits.values()) <= 5


def test_what_is_larger_than_any_node_fits_nowhere():
    assert (
        PlacementCache(2, 4).fit(PlacementCache(2, 4).packed([4, 4]), find(toy_catalogue(), "ga", "8"))
        is None
    )


def test_giving_undoes_taking_and_refusals_are_forgotten():
    catalogue = toy_catalogue()
    pair, whole = find(catalogue, "ga", "2"), find(catalogue, "ga", "8")
    free = FreeResources([8, 8])
    held = [free.fit(pair), (1,)]
    for nodes in held:
        free.take(pair, nodes)
    assert free.gpus == [6, 6] and free.n_gpus == 12
    assert free.fit(whole) is None
    free.give(pair, held[1])
    assert free.gpus == [6, 8]
    assert free.fit(whole) == (1,)


def test_a_copy_is_independent():
    item = find(toy_catalogue(), "ga", "4")
    free = FreeResources([4])
    other = free.copy()
    other.take(item, (0,))
    assert (free.gpus, other.gpus) == ([4], [0])
    assert free.fit(item) == (0,)


def test_the_first_configuration_that_fits_is_taken():
    catalogue = toy_catalogue()
    eight, two = find(catalogue, "ga", "8"), find(catalogue, "ga", "2")
    assert FreeResources([3, 2]).first_fit((eight, two)) == (two, (1,))
    assert FreeResources([1]).first_fit((eight, two)) is None


def test_cpu_threads_limit_a_placement_where_they_may_run_out():
    hungry = TableCatalogue.from_tables([throughput_rows("roberta", [("ga", "2", 1.0)], cpu_threads=30)])
    item = hungry.all("roberta")[0]
    free = FreeResources([2, 8], cpus=[24, 96], host_bytes=[0.0, 0.0])
    assert free.fit(item) == (1,)
    free.take(item, (1,))
    assert free.fit(item) is None
    assert not free.has_shortage()
    free.take(item, (1,))
    assert free.has_shortage()


@pytest.mark.parametrize(("threads", "starves"), [(12, False), (13, True)])
def test_whether_threads_can_run_out_follows_from_the_hungriest_configuration(threads, starves):
    catalogue = TableCatalogue.from_tables(
        [throughput_rows("roberta", [("ga", "2", 1.0)], cpu_threads=threads)]
    )
    assert can_starve(toy_nodes(2, 8), catalogue) is starves
