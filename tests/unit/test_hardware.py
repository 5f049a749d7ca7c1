"""The catalogue of devices, nodes and clusters, and the checks of its records."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from makespan import hardware, planning, scenario
from makespan.errors import InputError, UnknownNameError
from makespan.hardware import ClusterSpec, Network, homogeneous
from makespan.hardware.devices import device_entry, gpu_from
from makespan.planning import Pricer, Training, parse_layout, read_model, software


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
        {"intra_latency_s": -1e-6},
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


# --- one catalogue, and one class of cluster ---------------------------------------------------------


def priced(where: ClusterSpec, text: str = "fsdp mb1") -> planning.Priced:
    """Price a layout of a model on a cluster."""
    training = Training(read_model("llama3-8b"), 4096, 192)
    return Pricer(training, where, software("megatron-bridge")).price(parse_layout(text, where.n_gpus))


def test_a_second_name_means_the_same_device() -> None:
    usual, also = hardware.gpu("h200"), hardware.gpu("h200-141")
    assert (also.name, also.kind) == ("h200-141", "h200") and replace(also, name="h200") == usual
    assert {"h200", "h200-141", "t4-16"} <= set(hardware.gpu_names())
    with_shares = hardware.gpu_names(sustained=True)
    assert {name for name in hardware.gpu_names() if hardware.gpu(name).shares} == {*with_shares, "h200-141"}


def test_nodes_of_the_catalogue_have_what_data_sheets_print_and_texts_what_programs_use() -> None:
    of_node, of_text = hardware.node("a800").gpu, hardware.read_machines("8xa800-80").gpu
    assert of_node.memory_bytes == 80e9
    assert of_text.memory_bytes == of_node.sustained.memory_bytes + of_text.reserved_bytes > 86e9
    assert of_node.shares == of_text.shares
    assert hardware.gpu("v100-32").sustained_peak("bf16") == hardware.gpu("v100-32").peak("fp16")


def test_steps_are_the_same_on_nodes_of_the_catalogue_and_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('device = "h200"\nn_gpus = 64\nlink_latency_s = 3.4e-6\nnetwork_latency_s = 9.6e-6\n')
    ours, theirs = hardware.read_machines(path), hardware.cluster("h200-64")
    for text in ("fsdp mb1", "tp8 pp2 mb1", "tp2 cp2 mb3"):
        assert planning.describe(priced(ours, text)) == planning.describe(priced(theirs, text))
    assert hardware.read_machines("h200-64") == theirs


def test_thousands_of_equal_nodes_are_one_run() -> None:
    large = hardware.read_machines("131072xh100-80")
    assert large.n_nodes == 16_384 and [count for _, count in large.runs] == [16_384]
    assert hash(large) == hash(hardware.read_machines("131072xh100-80")) and len(repr(large)) < 2000
    assert large == replace(large) != large.with_gpus(131_064)
    odd = hardware.read_machines("12xh100-80")
    assert [(node.n_gpus, count) for node, count in odd.runs] == [(8, 1), (4, 1)]
    assert [node.n_gpus for node in odd.with_gpus(11, 4).nodes] == [4, 4, 3]
    assert (odd.n_gpus, odd.gpus_per_node, odd.with_gpus(3).gpus_per_node) == (12, 8, 3)
    with pytest.raises(InputError, match="'0xh100-80': n_gpus is 0"):
        odd.with_gpus(0)


def test_a_device_without_shares_is_named_where_a_step_is_asked_for() -> None:
    words = "cannot be predicted on t4-16; expected one of the devices v100-16, .*mi300x$"
    with pytest.raises(InputError, match=words):
        priced(hardware.cluster("t4-64"))
    own = replace(hardware.node("t4"), gpu=replace(hardware.gpu("t4-16"), shares=hardware.gpu("l4").shares))
    assert priced(homogeneous(own, 16, hardware.cluster("t4-64").network), "tp4 mb1").step_s > 0


def test_a_file_of_several_types_is_refused_where_one_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('[[machines]]\ndevice = "h100-80"\nn_gpus = 8\n')
    with pytest.raises(InputError, match=r"ours\.toml: has \[\[machines\]\] of several types; expected"):
        hardware.read_machines(path)
    assert hardware.read_pools(path)[0].n_gpus == 8


def test_a_device_without_links_needs_them_in_a_file(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="device 't4-16': the catalogue has no link_gb_per_s; expected it in a"
    ):
        hardware.read_machines("8xt4-16")
    path = tmp_path / "ours.toml"
    path.write_text('device = "t4-16"\nn_gpus = 8\nlink_gb_per_s = 12\nnetwork_gb_per_s = 1\n')
    found = hardware.read_machines(path)
    assert (found.gpu.memory_bytes, found.gpu.shares) == (16e9, None)
    assert scenario("naive", n_jobs=2, cluster_name=str(path)).cluster.gpu_types == ("t4-16",)
    path.write_text(path.read_text() + "memory_gib = 14\n")
    assert hardware.read_machines(path).gpu.usable_bytes == pytest.approx(14 * 2**30)
    path.write_text(path.read_text() + "products = { fp16 = [0.5, 100] }\n")
    with pytest.raises(
        InputError, match=r"ours\.toml: device 't4-16': attention is missing; expected memory_gib"
    ):
        hardware.read_machines(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"emulated": None},
            "device 'mine': emulated is missing; expected peak_tflop_per_s, memory_gb_per_s, em",
        ),
        ({"memory_gib": None, "products": None, "attention": None}, "device 'mine': memory_gib is missing"),
        ({"evidence": None}, "device 'mine': evidence is missing; expected memory_gib, products, attention"),
        ({"attention": {"first": [0.4, 10]}}, "device 'mine': attention lacks second, third"),
    ],
)
def test_an_entry_that_lacks_something_is_refused_in_one_line(change: dict[str, object], words: str) -> None:
    entry = {**device_entry("l4"), **change}
    with pytest.raises(InputError, match=words):
        gpu_from("mine", {key: value for key, value in entry.items() if value is not None})


def test_predictions_need_one_type_of_device_on_equal_links() -> None:
    with pytest.raises(
        InputError, match=r"several kinds of device: v100-32, p100-16, t4-16; expected one kind"
    ):
        priced(hardware.cluster("v100-p100-t4-64"))
    node = hardware.node("a800")
    odd = ClusterSpec("odd", (node, replace(node, intra_bandwidth_bytes_per_s=1e9)), Network(latency_s=0.0))
    with pytest.raises(InputError, match="'a800-80' differ in their links"):
        priced(odd)
    parts = hardware.read_pools("16xh100-80+8xl4")
    both = hardware.joined("both", [replace(parts[0], usd_per_gpu_hour=3.0), parts[1]])
    assert (both.n_gpus, both.usd_per_gpu_hour) == (24, 2.0)
    assert {kind: pool.n_gpus for kind, pool in hardware.pools(both).items()} == {"h100-80": 16, "l4": 8}


def test_names_of_the_last_version_are_found_with_a_warning() -> None:
    for old, new in (("Device", hardware.Gpu), ("Machines", ClusterSpec), ("device", hardware.gpu)):
        with pytest.warns(DeprecationWarning, match=f"planning.{old} is now"):
            assert getattr(planning, old) is new
    pricer = Pricer(
        Training(read_model("llama3-8b"), 4096, 64), hardware.read_machines("8xh100-80"), software("fsdp")
    )
    with pytest.warns(DeprecationWarning, match="machines is now cluster"):
        assert pricer.machines is pricer.cluster


def test_devices_and_clusters_load_no_large_library() -> None:
    command = "import sys, makespan.hardware as h; h.read_machines('8xh100-80'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert not {"numpy", "pandas", "scipy", "torch"} & set(done.stdout.split())
