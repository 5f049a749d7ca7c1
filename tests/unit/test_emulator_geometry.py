"""Geometry: the network-card rule on worked examples."""

from dataclasses import replace

import pytest

from makespan.emulator.model import geometry, intra_bandwidth
from makespan.errors import PlanError
from makespan.hardware import Network, node

A800 = node("a800")
NET = Network(latency_s=1e-5)
E_NET = 0.78


def data_bandwidth(placement: str, pp: int = 1, tp: int = 1, dp: int = 8) -> float:
    counts = tuple(int(digit) for digit in placement)
    group = geometry(counts, (A800,), NET, pp, tp, dp).data
    return group.inter_bandwidth_bytes_per_s * E_NET


@pytest.mark.parametrize(
    ("placement", "expected_gb"),
    [("2222", 19.5), ("44", 39.0), ("35", 39.0), ("26", 19.5), ("11111111", 19.5), ("17", 19.5)],
)
def test_cards_of_the_smallest_node_bound_pure_data_parallelism(placement: str, expected_gb: float) -> None:
    assert data_bandwidth(placement) == pytest.approx(expected_gb * 1e9)


def test_eight_rings_share_four_cards() -> None:
    group = geometry((8,) * 8, (A800,), NET, 1, 8, 8).data
    assert group.inter_bandwidth_bytes_per_s == pytest.approx(12.5e9)


def test_straddling_tensor_groups_let_two_rings_meet_on_a_card() -> None:
    layout = geometry((6,) * 8, (A800,), NET, 3, 4, 4)
    assert layout.tensor.crosses_nodes
    assert layout.tensor.inter_bandwidth_bytes_per_s == pytest.approx(25e9)
    assert layout.data.inter_bandwidth_bytes_per_s == pytest.approx(12.5e9)


def test_groups_inside_a_node_use_its_link() -> None:
    layout = geometry((8,), (A800,), NET, 1, 4, 2)
    assert not layout.tensor.crosses_nodes and not layout.data.crosses_nodes
    assert layout.data.inter_bandwidth_bytes_per_s == A800.intra_bandwidth_bytes_per_s
    assert (layout.data.n_ranks, layout.data.n_local, layout.data.n_nodes) == (2, 2, 1)


def test_stage_boundaries_share_cards_between_nodes_only() -> None:
    inside = geometry((8,), (A800,), NET, 2, 4, 1).boundaries
    assert [edge.crosses_nodes for edge in inside] == [False]
    across = geometry((4, 4), (A800,), NET, 2, 4, 1).boundaries
    assert across[0].crosses_nodes
    assert across[0].bandwidth_bytes_per_s == pytest.approx(12.5e9)
    alone = geometry((1, 1), (A800,), NET, 2, 1, 1).boundaries
    assert alone[0].bandwidth_bytes_per_s == pytest.approx(25e9)


def test_transport_and_oversubscription_reduce_the_cards() -> None:
    slow = Network(latency_s=1e-5, oversubscription=2.0, rdma=False, tcp_factor=0.35)
    group = geometry((1, 1), (A800,), slow, 1, 1, 2).data
    assert group.inter_bandwidth_bytes_per_s == pytest.approx(25e9 * 0.35 / 2)


def test_the_slower_kind_of_node_decides() -> None:
    other = replace(A800, name="slow", nic_bandwidth_bytes_per_s=10e9)
    group = geometry((2, 2), (A800, other), NET, 1, 1, 4).data
    assert group.inter_bandwidth_bytes_per_s == pytest.approx(10e9)


def test_bridged_pairs_fall_back_to_the_host_link() -> None:
    a40 = node("a40")
    assert intra_bandwidth(a40, 2) == a40.intra_bandwidth_bytes_per_s
    assert intra_bandwidth(a40, 3) == a40.pcie_bandwidth_bytes_per_s


def test_degrees_must_fill_the_placement() -> None:
    with pytest.raises(PlanError, match="8 GPUs, but 4"):
        geometry((4,), (A800,), NET, 2, 2, 2)
