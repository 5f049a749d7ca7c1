"""Features of the time model: what depends on workload, plan and placement, not on constants."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from makespan.emulator._geometry import Geometry, geometry
from makespan.emulator._points import Point
from makespan.hardware import ClusterSpec, NodeSpec
from makespan.plans import (
    DEFAULT_MEMORY_RULES,
    ExecutionPlan,
    Placement,
    Stage,
    Verdict,
    memory_estimate,
    resolve_micro_batch,
    stages,
)
from makespan.workloads import BoundWorkload, Workload

__all__ = [
    "FEATURE_NAMES",
    "FeatureTable",
    "Features",
    "feature_table",
    "stage_features",
]

Features = dict[str, NDArray[np.float64]]
_FIRST_BUCKET_BYTES = 1e6  # the first bucket of a bucketed exchange is small, so that it starts early
_HOST_BYTES_PER_PARAMETER = 24.0  # fp32 weight and two moments, each read and written
_RING_PASSES = 2  # reduce-scatter and all-gather
_NAMES = """
gemm_s elementwise_s layer_passes again_gemm_s again_elementwise_s again_layer_passes tensor_bytes
tensor_reductions launch_s tensor_passes tensor_intra_bytes_per_s tensor_inter_bytes_per_s
tensor_crosses transfer_inter_s transfer_intra_s transfer_latency_s hand_overs ring_bytes
scatter_bytes gather_bytes sharded_bytes plain_buckets partitioned_buckets buckets network_hops
local_hops_s data_intra_bytes_per_s data_inter_bytes_per_s data_crosses overlaps hierarchical
hierarchical_intra_bytes hierarchical_card_s device_update_fused_s_per_b
device_update_unfused_s_per_b host_parameters host_threads host_thread_rate host_memory_rate
host_is_slow host_link_s offloaded_parameters on_host microbatches loader_s steps further_nodes
is_async is_3d
"""

FEATURE_NAMES = tuple(_NAMES.split())
"""Names of the features, in the order of their columns."""


@dataclass(frozen=True, slots=True)
class _Setting:
    """Everything that one row of features is computed from."""

    point: Point
    plan: ExecutionPlan
    bound: BoundWorkload
    nodes: tuple[NodeSpec, ...]
    layout: Geometry
    cluster: ClusterSpec

    @property
    def peak_flop_per_s(self) -> float:
        return min(node.gpu.peak(self.bound.precision) for node in self.nodes)

    @property
    def streaming_bytes_per_s(self) -> float:
        return min(node.gpu.memory_bandwidth_bytes_per_s * node.gpu.memory_efficiency for node in self.nodes)

    @property
    def intra_latency_s(self) -> float:
        return max(node.intra_latency_s for node in self.nodes)

    @property
    def checkpoint_fraction(self) -> float:
        return 1.0 if self.bound.stack.full_checkpointing else self.plan.checkpoint_fraction

    @property
    def is_selective(self) -> bool:
        return self.plan.checkpoint_method == "selective" and not self.bound.stack.full_checkpointing

    @property
    def held_parameters(self) -> float:
        return self.bound.model.parameters / (self.plan.tp * self.plan.pp)


def _stage_nodes(cluster: ClusterSpec, placement: Placement) -> tuple[NodeSpec, ...]:
    """Return the kind of node of each share of a placement, smallest share first; one for all if equal.

    On a mixed cluster the largest share comes first to the node with the fastest device memory that has as
    many devices, so that the order in which the nodes are listed does not matter.
    """
    if cluster.is_homogeneous:
        return cluster.nodes[:1]
    free = sorted(cluster.nodes, key=lambda node: (-node.gpu.memory_bandwidth_bytes_per_s, repr(node)))
    chosen: list[NodeSpec] = []
    for count in reversed(placement.gpus_per_node):
        index = next((i for i, node in enumerate(free) if node.n_gpus >= count), 0)
        chosen.append(free.pop(index))
    return tuple(reversed(chosen))


def _tightest(nodes: tuple[NodeSpec, ...], placement: Placement) -> NodeSpec:
    """Return a node by which memory is judged: the least of each kind of memory that a placement meets."""
    smallest = min(nodes, key=lambda node: node.gpu.memory_bytes)
    if len(nodes) == 1:
        return smallest
    fits = all(count <= node.n_gpus for count, node in zip(placement.gpus_per_node, nodes, strict=True))
    count = max(node.n_gpus for node in nodes) if fits else min(node.n_gpus for node in nodes)
    host_bytes = min(node.host_memory_bytes for node in nodes)
    return replace(smallest, n_gpus=count, gpus_per_nic=count, host_memory_bytes=host_bytes)


def _element_bytes(stage: Stage, setting: _Setting) -> float:
    """Kept bytes of a stage on one tensor rank, per sample, logits included."""
    tp = setting.plan.tp
    sequence_parallel = setting.plan.sequence_parallel or setting.bound.stack.sequence_parallel
    replicated = stage.replicated_bytes / (tp if sequence_parallel else 1)
    attention = 0.0 if setting.bound.stack.fused_attention else stage.attention_bytes / tp
    return replicated + stage.sharded_bytes / tp + attention + stage.logit_bytes / tp


def _stage_work(stage: Stage, setting: _Setting) -> dict[str, float]:
    """Forward work of one micro-batch on one stage."""
    b, tp = setting.plan.micro_batch_size, setting.plan.tp
    peak, streaming = setting.peak_flop_per_s, setting.streaming_bytes_per_s
    fraction = setting.checkpoint_fraction
    gemm, elements = stage.flop + stage.head_flop, _element_bytes(stage, setting)
    if setting.is_selective:
        again_gemm, again_layers = stage.attention_flop, 0.0
        again_bytes = 0.0 if setting.bound.stack.fused_attention else stage.attention_bytes / tp
    else:
        again_gemm, again_layers = stage.flop, float(stage.n_layers)
        again_bytes = elements - stage.logit_bytes / tp
    has_tensor = 1.0 if tp > 1 else 0.0
    return {
        "gemm_s": b * gemm / (tp * peak),
        "elementwise_s": b * elements / streaming,
        "layer_passes": float(stage.n_layers),
        "again_gemm_s": fraction * b * again_gemm / (tp * peak),
        "again_elementwise_s": fraction * b * again_bytes / streaming,
        "again_layer_passes": fraction * again_layers,
        "tensor_bytes": b * stage.all_reduce_bytes * _RING_PASSES * (tp - 1) / tp,
        "tensor_reductions": has_tensor * stage.n_all_reduces,
        "launch_s": stage.n_kernels * max(node.gpu.launch_gap_s for node in setting.nodes),
    }


def _pipeline_work(setting: _Setting) -> dict[str, float]:
    """Work along the critical path of the pipeline: all stages once, the slowest for the rest.

    ``T_pipe = sum_i (f_i + b_i) + (m - 1) max_i (f_i + b_i)``; interleaving divides the ramp by
    the chunks. The slowest stage is the one with most matrix products and element-wise work.
    """
    plan = setting.plan
    works = [_stage_work(stage, setting) for stage in stages(setting.bound.model, plan)]
    slowest = max(works, key=lambda work: 2.0 * work["gemm_s"] + work["elementwise_s"])
    chunks = plan.interleave
    return {
        name: plan.n_microbatches * slowest[name]
        + (sum(work[name] for work in works) - slowest[name]) / chunks
        for name in slowest
    }


def _tensor_features(setting: _Setting) -> dict[str, float]:
    group = setting.layout.tensor
    fraction = 0.0 if setting.is_selective else setting.checkpoint_fraction
    return {
        "tensor_passes": 2.0 + fraction,
        "tensor_intra_bytes_per_s": group.intra_bandwidth_bytes_per_s,
        "tensor_inter_bytes_per_s": group.inter_bandwidth_bytes_per_s,
        "tensor_crosses": float(group.crosses_nodes),
    }


def _transfer_features(setting: _Setting) -> dict[str, float]:
    """Two crossings, forward and backward, of every boundary on the critical path."""
    plan, cluster = setting.plan, setting.cluster
    held = stages(setting.bound.model, plan)
    crossings = 2.0 * plan.interleave
    latency_s = inter_s = intra_s = 0.0
    for stage, boundary in zip(held[:-1], setting.layout.boundaries, strict=True):
        volume = crossings * plan.micro_batch_size * stage.boundary_bytes
        if boundary.crosses_nodes:
            inter_s += volume / boundary.bandwidth_bytes_per_s
            latency_s += crossings * cluster.network.latency_s
        else:
            intra_s += volume / boundary.bandwidth_bytes_per_s
            latency_s += crossings * setting.intra_latency_s
    return {
        "transfer_inter_s": inter_s,
        "transfer_intra_s": intra_s,
        "transfer_latency_s": latency_s,
        "hand_overs": plan.interleave * float(plan.pp - 1),
    }


def _exchange_features(setting: _Setting) -> dict[str, float]:
    """Gradient exchange: plain ring, partitioned passes, and the hierarchical alternative."""
    plan, stack, group = setting.plan, setting.bound.stack, setting.layout.data
    held, share = setting.held_parameters, (plan.dp - 1) / plan.dp
    is_plain, is_partitioned = float(plan.zero_stage == 0), float(plan.zero_stage in (1, 2))
    one_pass = share * held * stack.partitioned_bytes
    local, across = group.n_local, group.n_nodes
    volume = held * stack.gradient_bytes
    rest = max(volume - _FIRST_BUCKET_BYTES, 0.0)  # in buckets of equal size
    buckets = 1 + int(np.ceil(rest / DEFAULT_MEMORY_RULES.bucket_bytes))
    card_bytes = _RING_PASSES * (across - 1) / across * (volume / local)
    return {
        "ring_bytes": is_plain * _RING_PASSES * share * volume,
        "scatter_bytes": is_partitioned * one_pass,
        "gather_bytes": is_partitioned * one_pass,
        "sharded_bytes": float(plan.zero_stage == 3) * 3.0 * one_pass,
        "plain_buckets": is_plain * buckets * float(plan.dp > 1),
        "partitioned_buckets": (1.0 - is_plain) * buckets * float(plan.dp > 1),
        "buckets": float(buckets),
        "network_hops": float(across - 1),
        "local_hops_s": setting.intra_latency_s * (plan.dp - across),
        "data_intra_bytes_per_s": group.intra_bandwidth_bytes_per_s,
        "data_inter_bytes_per_s": group.inter_bandwidth_bytes_per_s,
        "data_crosses": float(group.crosses_nodes),
        "overlaps": float(stack.overlaps_gradients),
        "hierarchical": is_plain * float(stack.hierarchical_collectives and group.crosses_nodes),
        "hierarchical_intra_bytes": _RING_PASSES * (local - 1) / local * volume,
        "hierarchical_card_s": card_bytes / group.card_bandwidth_bytes_per_s,
    }


def _optimizer_features(setting: _Setting) -> dict[str, float]:
    plan, stack = setting.plan, setting.bound.stack
    on_host, is_fused = float(plan.offload), float(stack.fused_optimizer)
    on_device = 1.0 - on_host
    shard = setting.held_parameters / (plan.dp if plan.zero_stage else 1)
    streaming = setting.streaming_bytes_per_s
    local = max(setting.point.placement.gpus_per_node)
    node = min(setting.nodes, key=lambda kind: kind.cpu_threads)
    threads = min(float(plan.cpu_threads), node.cpu_threads / local)
    pcie = min(kind.pcie_bandwidth_bytes_per_s for kind in setting.nodes)
    host_bandwidth = min(kind.host_bandwidth_bytes_per_s for kind in setting.nodes)
    return {
        "device_update_fused_s_per_b": on_device * is_fused * shard / streaming,
        "device_update_unfused_s_per_b": on_device * (1.0 - is_fused) * shard / streaming,
        "host_parameters": on_host * shard,
        "host_threads": threads,
        "host_thread_rate": min(node.adam_rate_per_thread * threads, node.adam_rate_cap),
        "host_memory_rate": host_bandwidth / (_HOST_BYTES_PER_PARAMETER * local),
        "host_is_slow": float(stack.host_optimizer == "slow"),
        "host_link_s": on_host * stack.partitioned_bytes * shard / pcie,
        "offloaded_parameters": on_host * setting.held_parameters,
        "on_host": on_host,
    }


def _constant_features(setting: _Setting) -> dict[str, float]:
    plan = setting.plan
    local = max(setting.point.placement.gpus_per_node)
    loader_rate = min(node.loader_rate_per_thread for node in setting.nodes)
    decoded = float(setting.bound.model.family == "vit") * plan.replica_batch_size * local
    return {
        "microbatches": float(plan.n_microbatches),
        "loader_s": decoded / (loader_rate * (plan.cpu_threads * local)),
        "steps": 1.0,
        "further_nodes": float(setting.point.placement.n_nodes - 1),
        "is_async": float(setting.bound.stack.phase_style == "ddp"),
        "is_3d": float(setting.bound.stack.phase_style == "3d"),
    }


def _setting(workload: Workload, plan: ExecutionPlan, point: Point, cluster: ClusterSpec) -> _Setting:
    nodes = _stage_nodes(cluster, point.placement)
    layout = geometry(point.placement.gpus_per_node, nodes, cluster.network, plan.pp, plan.tp, plan.dp)
    return _Setting(point, plan, workload.for_plan(plan), nodes, layout, cluster)


def _feature_row(setting: _Setting) -> NDArray[np.float64]:
    values = _pipeline_work(setting) | _tensor_features(setting) | _transfer_features(setting)
    values |= _exchange_features(setting) | _optimizer_features(setting) | _constant_features(setting)
    return np.array([values[name] for name in FEATURE_NAMES])


def stage_features(
    workload: Workload, plan: ExecutionPlan, placement: Placement, cluster: ClusterSpec
) -> list[dict[str, float]]:
    """Return the work of one micro-batch on each pipeline stage of a plan with its micro-batch resolved."""
    setting = _setting(workload, plan, Point(plan, placement), cluster)
    return [_stage_work(stage, setting) for stage in stages(setting.bound.model, plan)]


@dataclass(slots=True)
class FeatureTable:
    """Cached feature rows of one workload on one cluster; they grow as points are asked for."""

    workload: Workload
    cluster: ClusterSpec
    plans: list[ExecutionPlan] = field(default_factory=list)  # with their micro-batch sizes resolved
    verdicts: list[Verdict] = field(default_factory=list)
    _codes: dict[Point, int] = field(default_factory=dict)
    _matrix: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, len(FEATURE_NAMES))))

    def codes(self, points: Sequence[Point]) -> NDArray[np.int64]:
        """Return the row number of each point, adding the rows that are new, (n_points,)."""
        known = self._codes
        missing = [point for point in dict.fromkeys(points) if point not in known]
        if missing:
            self._matrix = np.vstack([self._matrix, *(self._add(point) for point in missing)])
        return np.fromiter((known[point] for point in points), dtype=np.int64, count=len(points))

    def features(self, codes: NDArray[np.int64]) -> Features:
        """Return the features of rows as named arrays, each (n_points,)."""
        chosen = self._matrix[codes]
        return {name: chosen[:, index] for index, name in enumerate(FEATURE_NAMES)}

    def feasible(self, codes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each row can run, (n_points,)."""
        return np.array([self.verdicts[code].feasible for code in codes], dtype=bool)

    def _verdict(self, point: Point) -> tuple[ExecutionPlan, Verdict]:
        """Return the plan with its micro-batch resolved, and whether it can run."""
        wanted, there = point.placement.n_nodes, self.cluster.n_nodes
        if wanted > there:
            reason = (
                f"placement {point.placement.text} has {wanted} nodes, cluster {self.cluster.name!r} {there}"
            )
            return point.plan, Verdict(False, {}, {}, reason)
        node = _tightest(_stage_nodes(self.cluster, point.placement), point.placement)
        plan = resolve_micro_batch(point.plan, self.workload, node)
        return plan, memory_estimate(plan, self.workload, node, point.placement)

    def _add(self, point: Point) -> NDArray[np.float64]:
        plan, verdict = self._verdict(point)
        row = np.full(len(FEATURE_NAMES), np.nan)  # stays so if the structure alone forbids the plan
        if verdict.bytes_by_component:
            row = _feature_row(_setting(self.workload, plan, point, self.cluster))
        self._codes[point] = len(self.plans)
        self.plans.append(plan)
        self.verdicts.append(verdict)
        return row


@lru_cache(maxsize=64)
def feature_table(workload: Workload, cluster: ClusterSpec) -> FeatureTable:
    """Return the cached feature table of a workload on a cluster."""
    return FeatureTable(workload, cluster)
