"""The catalogue of devices, nodes and clusters, and the checks of its records."""

from dataclasses import replace

import pytest

from makespan import hardware
from makespan.errors import InputError, UnknownNameError
from makespan.hardware import ClusterSpec, Network, homogeneous


@pytest.mark.parametrize("name", hardware.cluster_names())
def test_every_preset_cluster_can_be_built(name: str) -> None:
    cluster = hardware.cluster(name)
    assert cluster.is_homogeneous == (len(cluster.gpu_types) == 1)
    assert cluster.n_gpus == int(name.rsplit("-", 1)[1])
    assert cluster.gpus_per_node == cluster.nodes[0].n_gpus


def test_the_morphling_testbed_has_the_published_shape() -> None:
    node = hardware.node("a800")
    assert (node.n_gpus, node.cpu_threads, node.host_memory_bytes) == (8, 96, 1600e9)
    assert node.n_nics * node.nic_bandwidth_bytes_per_s == 100e9
    assert node.gpus_per_nic == 2
    assert node.cpu_threads_per_gpu == 12
    assert node.gpu.peak("fp16") == 312e12


def test_peaks_are_dense_figures() -> None:
    assert hardware.gpu("h200-141").peak("bf16") == 989e12


@pytest.mark.parametrize(
    ("kind", "look_up"),
    [("device", hardware.gpu), ("node", hardware.node), ("cluster", hardware.cluster)],
)
def test_unknown_names_are_refused_with_the_accepted_ones(kind: str, look_up) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UnknownNameError, match=f"unknown {kind} 'nothing'; expected a"):
        look_up("nothing")


def test_a_precision_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="precision of device 'v100-32'"):
        hardware.gpu("v100-32").peak("bf16")


@pytest.mark.parametrize(
    "change",
    [
        {"n_gpus": 0},
        {"intra_bandwidth_bytes_per_s": 0.0},
        {"pcie_bandwidth_bytes_per_s": -1.0},
        {"host_memory_bytes": float("nan")},
        {"intra_kind": "carrier-pigeon"},
        {"n_nics": 3},
    ],
)
def test_a_node_with_impossible_numbers_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InputError):
        replace(hardware.node("a800"), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"memory_bytes": 0.0}, {"memory_efficiency": 1.5}])
def test_a_device_with_impossible_numbers_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(InputError):
        replace(hardware.gpu("a800-80"), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"latency_s": -1.0}, {"oversubscription": 0.5}, {"tcp_factor": 0.0}])
def test_a_network_with_impossible_numbers_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Network(**{"latency_s": 1e-5, **change})  # type: ignore[arg-type]


def test_tcp_and_oversubscription_lower_the_bandwidth() -> None:
    assert Network(latency_s=0.0).bandwidth_factor == 1.0
    slow = Network(latency_s=0.0, rdma=False, tcp_factor=0.4, oversubscription=2.0)
    assert slow.bandwidth_factor == pytest.approx(0.2)


def test_nodes_of_a_cluster_may_differ() -> None:
    mixed = ClusterSpec("mixed", (hardware.node("a800"), hardware.node("t4")), Network(latency_s=1e-5))
    assert not mixed.is_homogeneous
    with pytest.raises(InputError, match=r"'mixed' has several kinds of node: .*; expected one kind"):
        _ = mixed.node
    assert (mixed.n_nodes, mixed.n_gpus, mixed.gpus_per_node) == (2, 12, 8)
    preset = hardware.cluster("v100-p100-t4-64")
    devices = {kind: sum(n.n_gpus for n in preset.nodes if n.gpu_type == kind) for kind in preset.gpu_types}
    assert list(devices.values()) == [32, 16, 16] and preset.n_nodes == 10


def test_a_cluster_needs_a_node() -> None:
    with pytest.raises(InputError, match="has no node"):
        homogeneous(hardware.node("a800"), 0, Network(latency_s=0.0))
