"""Laws of the emulator that hold for every workload, plan and placement."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from makespan.emulator import (
    Point,
    emulate,
    explain,
    feature_table,
    iteration_time_s,
    load_calibration,
    read_point,
    trace_points,
)
from makespan.emulator.model import TERM_NAMES, geometry, predict, predict_terms
from makespan.hardware import ClusterSpec, cluster
from makespan.plans import ExecutionPlan, Placement, memory_estimate, resolve_micro_batch
from makespan.workloads import Workload, workload, workload_keys

WHERE = cluster("a800-64")
L1 = load_calibration()
GRIDS = {name: trace_points(workload(name), WHERE) for name in workload_keys()}
NAMES = st.sampled_from(workload_keys())


def times(spec: Workload, points: list[Point], where: ClusterSpec = WHERE) -> np.ndarray:
    return iteration_time_s(spec, points, where, L1)


def rebuilt(**changes: object) -> ClusterSpec:
    """Return the cluster with other numbers in its nodes, devices or network."""
    node, network = WHERE.nodes[0], WHERE.network
    on_gpu = {k: v for k, v in changes.items() if hasattr(node.gpu, k)}
    on_network = {k: v for k, v in changes.items() if hasattr(network, k)}
    on_node = {k: v for k, v in changes.items() if k not in on_gpu and k not in on_network}
    changed = replace(node, gpu=replace(node.gpu, **on_gpu), **on_node)  # type: ignore[arg-type]
    return ClusterSpec("changed", (changed,) * 8, replace(network, **on_network))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", workload_keys())
@pytest.mark.parametrize(
    "better",
    [
        {"peak_flop_per_s": (("fp16", 624e12),)},
        {"memory_bandwidth_bytes_per_s": 4000e9},
        {"intra_bandwidth_bytes_per_s": 400e9},
        {"nic_bandwidth_bytes_per_s": 50e9},
        {"pcie_bandwidth_bytes_per_s": 64e9},
        {"host_bandwidth_bytes_per_s": 400e9},
        {"adam_rate_per_thread": 0.6e9},
        {"n_nics": 8, "gpus_per_nic": 1},
        {"latency_s": 1e-7},
    ],
    ids=lambda change: next(iter(change)),
)
def test_better_hardware_is_never_slower(name: str, better: dict[str, object]) -> None:
    spec, points = workload(name), GRIDS[name]
    before, after = times(spec, points), times(spec, points, rebuilt(**better))
    both = np.isfinite(before) & np.isfinite(after)
    assert np.all(after[both] <= before[both] * (1 + 1e-12))
    assert both.sum() == np.isfinite(before).sum()


def test_each_improvement_matters_somewhere() -> None:
    for change in (
        {"peak_flop_per_s": (("fp16", 624e12),)},
        {"intra_bandwidth_bytes_per_s": 400e9},
        {"nic_bandwidth_bytes_per_s": 50e9},
        {"pcie_bandwidth_bytes_per_s": 64e9},
    ):
        spec, points = workload("gpt2"), GRIDS["gpt2"]
        before, after = times(spec, points), times(spec, points, rebuilt(**change))
        both = np.isfinite(before)
        assert np.any(after[both] < before[both] * 0.99), change


@given(name=NAMES, index=st.integers(0, 10_000))
@settings(max_examples=60)
def test_terms_are_finite_not_negative_and_sum_to_the_total(name: str, index: int) -> None:
    spec, points = workload(name), GRIDS[name]
    point = points[index % len(points)]
    table = feature_table(spec, WHERE)
    x = table.features(table.codes([point]))
    theta = L1.for_workload(spec).vector
    terms = predict_terms(theta, x)
    values = np.array([float(terms[key][0]) for key in TERM_NAMES])
    assert np.all(np.isfinite(values)) and np.all(values >= 0)
    assert values.sum() == pytest.approx(float(predict(theta, x)[0]), rel=1e-12)


def compute_s(spec: Workload, plan: ExecutionPlan, placement: Placement) -> float:
    terms = explain(spec, Point(plan, placement), WHERE, L1).terms_s
    return terms["forward"] + terms["backward"]


@pytest.mark.parametrize("name", ["vit", "bert", "gpt2"])
def test_doubling_the_batch_costs_between_one_and_two_times(name: str) -> None:
    spec = workload(name)
    double = replace(spec, global_batch_size=2 * spec.global_batch_size)
    one, two = (read_point(each, "zero-dp", "8", 8) for each in (spec, double))
    ratio = compute_s(double, two.plan, two.placement) / compute_s(spec, one.plan, one.placement)
    assert 1.0 < ratio < 2.0


def test_doubling_the_micro_batches_doubles_compute_exactly() -> None:
    spec = replace(workload("llama7_b16"), max_microbatches=2)
    double = replace(spec, global_batch_size=32, max_microbatches=4)
    one, two = (read_point(each, "182", "88", 2) for each in (spec, double))
    assert compute_s(double, two.plan, two.placement) == pytest.approx(
        2 * compute_s(spec, one.plan, one.placement), rel=1e-12
    )


@given(counts=st.lists(st.integers(1, 8), min_size=2, max_size=5), seed=st.integers(0, 100))
@settings(max_examples=40)
def test_the_order_of_nodes_does_not_matter_to_data_parallelism(counts: list[int], seed: int) -> None:
    shuffled = list(np.random.default_rng(seed).permutation(counts))
    dp = sum(counts)
    first = geometry(tuple(counts), WHERE.nodes[:1], WHERE.network, 1, 1, dp)
    second = geometry(tuple(int(n) for n in shuffled), WHERE.nodes[:1], WHERE.network, 1, 1, dp)
    assert first.data == second.data


@given(name=NAMES, index=st.integers(0, 10_000))
@settings(max_examples=60)
def test_one_replica_exchanges_nothing_and_one_stage_transfers_nothing(name: str, index: int) -> None:
    spec, points = workload(name), GRIDS[name]
    point = points[index % len(points)]
    found = explain(spec, point, WHERE, L1)
    if point.plan.dp == 1:
        assert found.terms_s["gradient_exchange"] == 0.0 == found.terms_s["parameter_gather"]
    if point.plan.pp == 1:
        assert found.terms_s["stage_transfer"] == 0.0
    if point.plan.tp == 1:
        assert found.terms_s["tensor_exchange"] == 0.0


@pytest.mark.parametrize("name", ["vit", "roberta", "bert", "t5", "gpt2"])
def test_checkpointing_costs_between_nothing_and_one_forward(name: str) -> None:
    spec = workload(name)
    for placement in ("8", "44", "2222"):
        plain = explain(spec, read_point(spec, "ga", placement, 8), WHERE, L1)
        again = explain(spec, read_point(spec, "gc", placement, 8), WHERE, L1)
        extra = again.terms_s["recompute"]
        assert 0.0 < extra <= plain.terms_s["forward"]
        assert again.terms_s["forward"] == pytest.approx(plain.terms_s["forward"])


@given(share=st.floats(0.0, 1.0), method=st.sampled_from(["full", "selective"]))
@settings(max_examples=20)
def test_recomputation_grows_with_the_share_of_layers(share: float, method: str) -> None:
    spec = workload("bert")
    plans = [
        ExecutionPlan(
            dp=8, global_batch_size=32, micro_batch_size=4, checkpoint_fraction=f, checkpoint_method=method
        )
        for f in (share, 1.0)
    ]
    some, full = (explain(spec, Point(plan, Placement((8,))), WHERE, L1).terms_s for plan in plans)
    assert some["recompute"] == pytest.approx(share * full["recompute"])
    assert full["recompute"] <= full["forward"]


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama7", "t5_3B"])
def test_offload_is_never_slower_with_more_threads(name: str) -> None:
    spec = workload(name)
    points = [read_point(spec, "zero-offload", "4", threads) for threads in (1, 2, 4, 8, 12, 24, 48)]
    found = times(spec, points)
    assert np.all(np.diff(found) <= 0)
    assert found[-1] < found[0]


def device_bytes(spec: Workload, **degrees: object) -> float:
    plan = ExecutionPlan(**{"global_batch_size": 16, "micro_batch_size": 1, **degrees})  # type: ignore[arg-type]
    return memory_estimate(plan, spec, WHERE.nodes[0]).device_bytes


def test_memory_shrinks_with_tensor_and_pipeline_degree() -> None:
    spec = workload("llama7_b16")
    for name in ("tp", "pp"):
        found = [
            device_bytes(spec, grad_accum_steps=16, checkpoint_fraction=1.0, **{name: degree})
            for degree in (1, 2, 4, 8)
        ]
        assert found == sorted(found, reverse=True)


def test_memory_shrinks_with_the_partitioning_stage() -> None:
    spec = workload("gpt2")
    found = [device_bytes(spec, dp=16, zero_stage=stage) for stage in (0, 1, 2, 3)]
    assert found == sorted(found, reverse=True)


@given(name=st.sampled_from(["vit", "bert", "gpt2"]), power=st.integers(0, 3))
@settings(max_examples=12)
def test_memory_grows_with_the_micro_batch(name: str, power: int) -> None:
    spec = workload(name)
    base = read_point(spec, "ga", "1", 8).plan
    small, large = base.with_micro_batch(2**power), base.with_micro_batch(2 ** (power + 1))
    node = WHERE.nodes[0]
    assert memory_estimate(small, spec, node).device_bytes < memory_estimate(large, spec, node).device_bytes


@given(name=NAMES, index=st.integers(0, 10_000))
@settings(max_examples=40)
def test_the_micro_batch_rule_keeps_the_batch_and_settles(name: str, index: int) -> None:
    spec, points = workload(name), GRIDS[name]
    plan = points[index % len(points)].plan
    resolved = resolve_micro_batch(plan, spec, WHERE.nodes[0])
    assert resolved.replica_batch_size == plan.replica_batch_size
    assert resolve_micro_batch(resolved, spec, WHERE.nodes[0]) == resolved


@given(seed=st.integers(0, 2**31), name=st.sampled_from(["bert", "llama7"]))
@settings(max_examples=10)
def test_shuffled_input_gives_the_same_rows(seed: int, name: str) -> None:
    spec, points = workload(name), GRIDS[name][:60]
    order = np.random.default_rng(seed).permutation(len(points))
    whole = emulate(spec, points, WHERE, L1, seed=seed, noise=1.0)
    mixed = emulate(spec, [points[i] for i in order], WHERE, L1, seed=seed, noise=1.0)
    back = mixed.iloc[np.argsort(order)].reset_index(drop=True)
    assert whole.to_csv() == back.to_csv()
