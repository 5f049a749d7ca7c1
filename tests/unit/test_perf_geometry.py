"""Card loads of communication groups against worked examples of the node with two GPUs a card."""

import pytest

from makespan.perf.forms import geometry

PER_NIC = 2


@pytest.mark.parametrize(
    ("placement", "load"),
    [
        ((8,), 0.0),
        ((2, 2, 2, 2), 1.0),
        ((4, 4), 0.5),
        ((3, 5), 0.5),
        ((2, 6), 1.0),
        ((1, 1), 1.0),
        ((8, 8), 0.25),
    ],
)
def test_pure_data_parallel_ring_is_limited_by_the_node_with_fewest_cards(placement, load):
    assert geometry(placement, 1, 1, sum(placement), PER_NIC).ring_load == pytest.approx(load)


def test_eight_rings_share_four_cards():
    assert geometry((8,) * 8, 1, 8, 8, PER_NIC).ring_load == pytest.approx(2.0)


def test_replicas_inside_a_node_need_no_card():
    loads = geometry((8,) * 5, 5, 2, 4, PER_NIC)
    assert loads.ring_load == 0.0
    assert loads.tp_local_share == 1.0


def test_tensor_groups_that_straddle_nodes_meet_a_card():
    loads = geometry((6,) * 8, 6, 4, 2, PER_NIC)
    assert 0.0 < loads.tp_local_share < 1.0
    assert loads.tp_load > 0.0
    assert loads.ring_load == pytest.approx(2.0)


def test_pipeline_inside_a_node_has_local_hops_only():
    loads = geometry((4,), 2, 2, 1, PER_NIC)
    assert (loads.pp_load, loads.pp_local_hops) == (0.0, 1.0)


@pytest.mark.parametrize(("tp", "flows"), [(1, 1.0), (4, 2.0)])
def test_tensor_ranks_share_the_card_of_a_stage_boundary(tp, flows):
    loads = geometry((tp,) * 4, 4, tp, 1, PER_NIC)
    assert loads.pp_load == pytest.approx(3 * flows)
    assert loads.pp_local_hops == 0.0


def test_one_gpu_has_no_traffic():
    loads = geometry((1,), 1, 1, 1, PER_NIC)
    assert (loads.ring_load, loads.tp_load, loads.pp_load, loads.pp_local_hops) == (0.0, 0.0, 0.0, 0.0)
