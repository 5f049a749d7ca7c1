"""Best fit on numbers whose bits are nodes."""

import random

import pytest
from toy_cluster import find, throughput_rows, toy_catalogue, toy_nodes

from makespan.policies._placing import Room, can_starve
from makespan.studies import TableCatalogue


def best_fit(free, counts):
    """Return what the plain loop over nodes finds."""
    nodes = []
    for count in counts:
        able = [(room, node) for node, room in enumerate(free) if room >= count and node not in nodes]
        if not able:
            return None
        nodes.append(min(able)[1])
    return tuple(nodes)


def test_placing_agrees_with_the_plain_loop():
    rng = random.Random(5)
    items = toy_catalogue().all("roberta")
    outcomes = set()
    for _ in range(300):
        free = [rng.randint(0, 8) for _ in range(rng.randint(1, 9))]
        item = rng.choice(items)
        found = Room(free.copy()).fit(item)
        assert found == best_fit(free, item.counts)
        outcomes.add(found is None)
    assert outcomes == {True, False}


def test_giving_undoes_taking_and_refusals_are_forgotten():
    catalogue = toy_catalogue()
    pair, whole = find(catalogue, "ga", "2"), find(catalogue, "ga", "8")
    room = Room([8, 8])
    held = [room.fit(pair), (1,)]
    for nodes in held:
        room.take(pair, nodes)
    assert room.gpus == [6, 6] and room.n_gpus == 12
    assert room.fit(whole) is None
    room.give(pair, held[1])
    assert room.gpus == [6, 8]
    assert room.fit(whole) == (1,)


def test_a_copy_is_independent():
    item = find(toy_catalogue(), "ga", "4")
    room = Room([4])
    other = room.copy()
    other.take(item, (0,))
    assert (room.gpus, other.gpus) == ([4], [0])
    assert room.fit(item) == (0,)


def test_the_first_configuration_that_fits_is_taken():
    catalogue = toy_catalogue()
    eight, two = find(catalogue, "ga", "8"), find(catalogue, "ga", "2")
    assert Room([3, 2]).first_fit((eight, two)) == (two, (1,))
    assert Room([1]).first_fit((eight, two)) is None


def test_cpu_threads_limit_a_placement_where_they_may_run_out():
    hungry = TableCatalogue.from_tables([throughput_rows("roberta", [("ga", "2", 1.0)], cpu_threads=30)])
    item = hungry.all("roberta")[0]
    room = Room([2, 8], cpus=[24, 96], host_bytes=[0.0, 0.0])
    assert room.fit(item) == (1,)
    room.take(item, (1,))
    assert room.fit(item) is None
    assert not room.has_shortage()
    room.take(item, (1,))
    assert room.has_shortage()


@pytest.mark.parametrize(("threads", "starves"), [(12, False), (13, True)])
def test_whether_threads_can_run_out_follows_from_the_hungriest_configuration(threads, starves):
    catalogue = TableCatalogue.from_tables(
        [throughput_rows("roberta", [("ga", "2", 1.0)], cpu_threads=threads)]
    )
    assert can_starve(toy_nodes(2, 8), catalogue) is starves
