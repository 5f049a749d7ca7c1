"""Collectives: small messages are bound by steps, large ones by bandwidth."""

import pytest

from makespan.emulator import Group, all_reduce_time_s, geometry
from makespan.errors import UnknownNameError
from makespan.hardware import Network, node

NET = Network(latency_s=1e-5)


def group(counts: tuple[int, ...]) -> Group:
    return geometry(counts, (node("a800"),), NET, 1, 1, sum(counts)).data


def test_one_rank_needs_no_collective() -> None:
    assert all_reduce_time_s(1e9, group((1,))) == 0.0


def test_a_small_message_costs_steps() -> None:
    eight = group((1,) * 8)
    ring = all_reduce_time_s(8.0, eight, algorithm="ring")
    tree = all_reduce_time_s(8.0, eight, algorithm="tree")
    assert ring == pytest.approx(8.4e-6 + 14 * 9.6e-6, rel=1e-3)
    assert tree == pytest.approx(8.4e-6 + 6 * 9.6e-6, rel=1e-3)
    assert all_reduce_time_s(8.0, eight) == tree


def test_a_large_message_costs_bytes() -> None:
    inside = group((8,))
    ring = all_reduce_time_s(1e9, inside, algorithm="ring", efficiency_intra=0.5)
    assert ring == pytest.approx(2 * 7 / 8 * 1e9 / 100e9, rel=0.02)


def test_reducing_in_the_node_first_pays_where_cards_are_shared() -> None:
    wide = group((8, 8))
    times = {name: all_reduce_time_s(1e9, wide, algorithm=name) for name in ("ring", "tree", "hier")}
    inside = 2 * 7 / 8 * 1e9 / 200e9
    between = 2 * 1 / 2 * (1e9 / 8) / 25e9
    assert times["hier"] == pytest.approx(inside + between, rel=0.02)
    assert all_reduce_time_s(1e9, wide) == min(times.values())


def test_within_a_node_the_hierarchy_is_the_ring() -> None:
    one = group((4,))
    assert all_reduce_time_s(1e6, one, algorithm="hier") == all_reduce_time_s(1e6, one, algorithm="ring")


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="'butterfly'"):
        all_reduce_time_s(1.0, group((2,)), algorithm="butterfly")  # type: ignore[arg-type]
