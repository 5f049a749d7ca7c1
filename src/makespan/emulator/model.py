"""Testbed emulator: iteration times of plans in placements, from features and calibrated constants.

A point is a plan in a placement. Its features depend only on workload, plan, placement and cluster; the time
model combines them with the constants of a calibration into named terms. Noise, stragglers and anomalies are
added afterwards, seeded per row. Trace files have the layout of the published ones.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from makespan import __version__
from makespan.arguments import check_fields, check_range, typed
from makespan.emulator.constants import CONSTANT_NAMES, Calibration, CalibrationSet, load_calibration
from makespan.emulator.points import Point
from makespan.errors import InputError, PlanError, unknown_name
from makespan.files import write_text
from makespan.hardware import ClusterSpec, Network, NodeSpec
from makespan.numerics import named_rng, significant
from makespan.plans import (
    DEFAULT_MEMORY_RULES,
    ExecutionPlan,
    Placement,
    RankGroups,
    Stage,
    Verdict,
    boundary_flows,
    card_loads,
    cards_by_node,
    memory_estimate,
    one_f_one_b_order,
    resolve_micro_batch,
    stages,
    write_exec_plan,
    write_plan,
)
from makespan.tables import THROUGHPUT, write_csv
from makespan.units import MS
from makespan.workloads import BoundWorkload, Workload

# --- Geometry: positions of the ranks of a plan, and the bandwidth of its communication groups ---
#
# Ranks fill the nodes of a placement in order; the rank order is tensor fastest, then data, then pipeline.
# A group that spans nodes spreads its traffic evenly over the network cards of its members on each node,
# and cards are shared by all groups of the same kind that cross the node.

_Position = tuple[int, int]  # node, local index
_PAIR = 2


@dataclass(frozen=True, slots=True)
class Group:
    """The slowest communication group of one kind."""

    n_ranks: int
    n_nodes: int
    n_local: int
    intra_bandwidth_bytes_per_s: float
    inter_bandwidth_bytes_per_s: float
    card_bandwidth_bytes_per_s: float

    @property
    def crosses_nodes(self) -> bool:
        """Tell whether any group of this kind spans more than one node."""
        return self.n_nodes > 1


@dataclass(frozen=True, slots=True)
class Boundary:
    """The slowest transfer between two neighbouring pipeline stages."""

    crosses_nodes: bool
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Geometry:
    """Groups and boundaries of a plan in a placement."""

    tensor: Group
    data: Group
    boundaries: tuple[Boundary, ...]


def intra_bandwidth(node: NodeSpec, n_local: int) -> float:
    """Return the bandwidth [B/s] between ``n_local`` devices; beyond bridged pairs, that of the host link."""
    if node.intra_kind == "pair" and n_local > _PAIR:
        return node.pcie_bandwidth_bytes_per_s
    return node.intra_bandwidth_bytes_per_s


@lru_cache(maxsize=200_000)
def geometry(
    gpus_per_node: tuple[int, ...], nodes: tuple[NodeSpec, ...], network: Network, pp: int, tp: int, dp: int
) -> Geometry:
    """Place the ranks of a plan and compute the bandwidth of its groups."""
    n_gpus = sum(gpus_per_node)
    if pp * tp * dp != n_gpus:
        raise PlanError(f"PP {pp} x TP {tp} x DP {dp} = {pp * tp * dp} GPUs, but {n_gpus} are placed")
    kinds = nodes if len(nodes) == len(gpus_per_node) else (nodes[0],) * len(gpus_per_node)
    groups = RankGroups.of(gpus_per_node, pp, tp, dp)
    width = tp * dp
    boundaries = []
    for first in range(0, (pp - 1) * width, width):
        senders, _ = boundary_flows(groups.ranks, first, width, [kind.gpus_per_nic for kind in kinds])
        # If any rank sends across nodes, the most loaded card sets the rate of the boundary.
        rates = [
            kinds[node].nic_bandwidth_bytes_per_s * network.bandwidth_factor / count
            for (node, _), count in senders.items()
        ] or [intra_bandwidth(kinds[node], _PAIR) for node, _ in groups.ranks[first : first + width]]
        boundaries.append(Boundary(bool(senders), min(rates)))
    return Geometry(
        tensor=_slowest_group(groups.tensor, kinds, network),
        data=_slowest_group(groups.data, kinds, network),
        boundaries=tuple(boundaries),
    )


def _slowest_group(groups: list[list[_Position]], kinds: tuple[NodeSpec, ...], network: Network) -> Group:
    """Return the lowest bandwidths and the largest extent of concurrent groups that share the cards."""
    members = [cards_by_node(group, [kind.gpus_per_nic for kind in kinds]) for group in groups]
    load = card_loads(members)
    inter = card_share = float("inf")
    intra = min(
        intra_bandwidth(kinds[node], count) for by_node in members for node, (_, count) in by_node.items()
    )
    for by_node in members:
        if len(by_node) == 1:
            continue
        for node, (cards, _) in by_node.items():
            bandwidth = kinds[node].nic_bandwidth_bytes_per_s * network.bandwidth_factor
            # A group sends 1 / len(cards) of its traffic through each of its cards. ``share`` is the rate of
            # all its cards together, which a flat ring reaches; each card carries an equal part of it.
            share = bandwidth / max(load[node, index] for index in cards)
            inter = min(inter, share)
            card_share = min(card_share, share / len(cards))
    crosses = inter < float("inf")
    return Group(
        n_ranks=len(groups[0]),
        n_nodes=max(len(by_node) for by_node in members),
        n_local=max(count for by_node in members for _, count in by_node.values()),
        intra_bandwidth_bytes_per_s=intra,
        inter_bandwidth_bytes_per_s=inter if crosses else intra,
        card_bandwidth_bytes_per_s=card_share if crosses else intra,
    )


# --- Features: properties of workload, plan and placement that do not depend on constants ---

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
    """Inputs of one row of features."""

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
    """Return the node of each share of a placement, smallest share first; just one if all nodes are equal.

    On a mixed cluster the largest share is placed first, on the node with the fastest device memory among
    those with enough devices. The order in which the cluster lists its nodes does not matter.
    """
    if cluster.is_homogeneous:
        return cluster.nodes[:1]
    free = sorted(cluster.nodes, key=lambda node: (-node.gpu.memory_bandwidth_bytes_per_s, repr(node)))
    chosen: list[NodeSpec] = []
    for count in reversed(placement.gpus_per_node):
        index = next((i for i, node in enumerate(free) if node.n_gpus >= count), 0)
        chosen.append(free.pop(index))
    return tuple(reversed(chosen))


def _stage_work(stage: Stage, setting: _Setting) -> dict[str, float]:
    """Return the forward work of one micro-batch on one pipeline stage."""
    b, tp = setting.plan.micro_batch_size, setting.plan.tp
    peak, streaming = setting.peak_flop_per_s, setting.streaming_bytes_per_s
    fraction = setting.checkpoint_fraction
    gemm = stage.flop + stage.head_flop
    # The bytes that element-wise kernels move are taken as proportional to those that the stage keeps.
    sequence_parallel = setting.plan.sequence_parallel or setting.bound.stack.sequence_parallel
    replicated = stage.replicated_bytes / (tp if sequence_parallel else 1)
    attention = 0.0 if setting.bound.stack.fused_attention else stage.attention_bytes / tp
    elements = replicated + stage.sharded_bytes / tp + attention + stage.logit_bytes / tp
    if setting.is_selective:
        # Selective checkpointing recomputes the attention cores alone (Korthikanti et al. 2022, section 5).
        again_gemm, again_layers, again_bytes = stage.attention_flop, 0.0, attention
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
    """Return the work along the critical path of the pipeline: all stages once, then the slowest one.

    ``T_pipe = sum_i (f_i + b_i) + (m - 1) max_i (f_i + b_i)``; interleaving shortens the ramp. The slowest
    stage is the one with the most matrix products and element-wise work.
    """
    plan = setting.plan
    works = [_stage_work(stage, setting) for stage in stages(setting.bound.model, plan)]
    slowest = max(works, key=lambda work: 2.0 * work["gemm_s"] + work["elementwise_s"])
    return {
        name: plan.n_microbatches * slowest[name]
        + _ramp(
            sum(work[name] for work in works) - slowest[name], plan.pp, plan.n_microbatches, plan.interleave
        )
        for name in slowest
    }


def _ramp(plain: float, n_stages: int, n_microbatches: int, interleave: int) -> float:
    """Return the ramp of a pipeline with chunks from that without, in its unit.

    Chunks shorten it for as many micro-batches as there are stages; fewer ones wait for their own last stage.
    """
    if interleave == 1 or n_microbatches >= n_stages:
        return plain / interleave
    return plain * (n_stages - n_microbatches + (n_microbatches - 1) / interleave) / (n_stages - 1)


def _transfer_features(setting: _Setting) -> dict[str, float]:
    """Return the transfers on the critical path: two crossings of every boundary, forward and backward."""
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
    """Return the volumes of the gradient exchange: plain ring, partitioned passes, hierarchical exchange."""
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


def _setting(workload: Workload, plan: ExecutionPlan, point: Point, cluster: ClusterSpec) -> _Setting:
    nodes = _stage_nodes(cluster, point.placement)
    layout = geometry(point.placement.gpus_per_node, nodes, cluster.network, plan.pp, plan.tp, plan.dp)
    return _Setting(point, plan, workload.for_plan(plan), nodes, layout, cluster)


def _feature_row(setting: _Setting) -> NDArray[np.float64]:
    plan, point, group = setting.plan, setting.point, setting.layout.tensor
    # Selective recomputation needs no all-reduce, because each rank recomputes its own attention cores.
    again = 0.0 if setting.is_selective else setting.checkpoint_fraction
    local = max(point.placement.gpus_per_node)
    loader_rate = min(node.loader_rate_per_thread for node in setting.nodes)
    decoded = float(setting.bound.model.family == "vit") * plan.replica_batch_size * local
    values = _pipeline_work(setting) | _transfer_features(setting)
    values |= _exchange_features(setting) | _optimizer_features(setting)
    values |= {
        "tensor_passes": 2.0 + again,
        "tensor_intra_bytes_per_s": group.intra_bandwidth_bytes_per_s,
        "tensor_inter_bytes_per_s": group.inter_bandwidth_bytes_per_s,
        "tensor_crosses": float(group.crosses_nodes),
        "microbatches": float(plan.n_microbatches),
        "loader_s": decoded / (loader_rate * (plan.cpu_threads * local)),
        "steps": 1.0,
        "further_nodes": float(point.placement.n_nodes - 1),
        "is_async": float(setting.bound.stack.phase_style == "ddp"),
        "is_3d": float(setting.bound.stack.phase_style == "3d"),
    }
    return np.array([values[name] for name in FEATURE_NAMES])


def stage_features(
    workload: Workload, plan: ExecutionPlan, placement: Placement, cluster: ClusterSpec
) -> list[dict[str, float]]:
    """Return the work of one micro-batch on each pipeline stage of a plan with its micro-batch resolved."""
    setting = _setting(workload, plan, Point(plan, placement), cluster)
    return [_stage_work(stage, setting) for stage in stages(setting.bound.model, plan)]


@dataclass(slots=True)
class FeatureTable:
    """Cached feature rows of one workload on one cluster, computed when a point is first requested."""

    workload: Workload
    cluster: ClusterSpec
    plans: list[ExecutionPlan] = field(default_factory=list)  # with their micro-batch sizes resolved
    verdicts: list[Verdict] = field(default_factory=list)
    _codes: dict[Point, int] = field(default_factory=dict)
    _matrix: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, len(FEATURE_NAMES))))

    def codes(self, points: Sequence[Point]) -> NDArray[np.int64]:
        """Return the row number of each point, (n_points,); new points get new rows."""
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
        """Return a mask of the rows that can run, (n_points,)."""
        return np.array([self.verdicts[code].feasible for code in codes], dtype=bool)

    def _verdict(self, point: Point) -> tuple[ExecutionPlan, Verdict]:
        """Return the plan with its micro-batch resolved, and its memory verdict."""
        placement = point.placement
        wanted, there = placement.n_nodes, self.cluster.n_nodes
        if wanted > there:
            reason = f"placement {placement.text} has {wanted} nodes, cluster {self.cluster.name!r} {there}"
            return point.plan, Verdict(False, {}, {}, reason)
        # On mixed nodes, the plan must fit on a node with the least device and host memory of all of them.
        nodes = _stage_nodes(self.cluster, placement)
        node = min(nodes, key=lambda kind: kind.gpu.memory_bytes)
        if len(nodes) > 1:
            fits = all(
                count <= kind.n_gpus for count, kind in zip(placement.gpus_per_node, nodes, strict=True)
            )
            count = max(kind.n_gpus for kind in nodes) if fits else min(kind.n_gpus for kind in nodes)
            host_bytes = min(kind.host_memory_bytes for kind in nodes)
            node = replace(node, n_gpus=count, gpus_per_nic=count, host_memory_bytes=host_bytes)
        plan = resolve_micro_batch(point.plan, self.workload, node)
        return plan, memory_estimate(plan, self.workload, node, placement)

    def _add(self, point: Point) -> NDArray[np.float64]:
        plan, verdict = self._verdict(point)
        row = np.full(len(FEATURE_NAMES), np.nan)  # stays NaN if the plan does not fit placement or model
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


# --- Time model: named terms of one training iteration from constants and features ---
#
# ``T = T_pipe + T_p2p + T_sync + T_d2h + T_opt + T_data + T_const``, see the background page of the emulator.
# All operations are on arrays, over points and over vectors of constants, and every term is linear in
# something that can be counted.

_Array = NDArray[np.float64]
_TERMS = """
forward backward recompute tensor_exchange stage_transfer gradient_exchange gradient_to_host
device_update host_update host_to_device offload_overhead parameter_gather data_loading node_wait fixed
"""
TERM_NAMES = tuple(_TERMS.split())
"""Names of the terms, in the order in which they are added."""
_OPTIMIZER = ("device_update", "host_update", "host_to_device", "offload_overhead", "parameter_gather")


def _bandwidth(crosses: _Array, inter: _Array, intra: _Array, c: dict[str, _Array]) -> _Array:
    """Return the bandwidth of a ring: that of the cards, at most that of the link inside the node."""
    inside = intra * c["e_nv"]
    return np.where(crosses > 0, np.minimum(inter * c["e_net"], inside), inside)


def _sync_terms(c: dict[str, _Array], x: Features, backward: _Array, forward: _Array) -> dict[str, _Array]:
    link = np.where(
        x["data_crosses"] > 0,
        np.minimum(x["data_inter_bytes_per_s"], x["data_intra_bytes_per_s"]),
        x["data_intra_bytes_per_s"],
    )
    # Plain exchange: a flat ring, or a hierarchical one where the stack allows it and it is faster.
    bandwidth = _bandwidth(x["data_crosses"], x["data_inter_bytes_per_s"], x["data_intra_bytes_per_s"], c)
    hops = c["a_net"] * x["network_hops"] + x["local_hops_s"]
    ring = x["ring_bytes"] / bandwidth + 2.0 * x["plain_buckets"] * hops
    inside = x["hierarchical_intra_bytes"] / (x["data_intra_bytes_per_s"] * c["e_nv"])
    hierarchical = inside + x["hierarchical_card_s"] / c["e_net"] + 2.0 * x["plain_buckets"] * hops
    plain = np.where(x["hierarchical"] > 0, np.minimum(ring, hierarchical), ring)
    # The backward pass of the last micro-batch hides the exchange of all buckets except the last one.
    hidden = np.minimum((1.0 - 1.0 / x["buckets"]) * plain, c["phi"] * backward / x["microbatches"])
    step = x["partitioned_buckets"] * (c["a_zero"] * x["network_hops"] + x["local_hops_s"])
    scatter = x["scatter_bytes"] / (link * c["e_rs"]) + np.where(x["scatter_bytes"] > 0, step, 0.0)
    fully = x["sharded_bytes"] / (link * c["e_rs"]) + np.where(x["sharded_bytes"] > 0, 3.0 * step, 0.0)
    # Sharded parameters (ZeRO-3) move during both passes; the exchange of one bucket is always exposed.
    sharded = np.maximum(fully - c["phi"] * (forward + backward), fully / x["buckets"])
    e_gather = np.where(x["on_host"] > 0, c["e_net"], c["e_ag"])
    gather = x["gather_bytes"] / (link * e_gather) + np.where(x["gather_bytes"] > 0, step, 0.0)
    return {
        "gradient_exchange": plain - x["overlaps"] * hidden + scatter + sharded,
        "parameter_gather": gather,
    }


def predict_terms(theta: _Array, x: Features, compute_scale: _Array | float = 1.0) -> dict[str, _Array]:
    """Compute every term of the iteration time [s].

    Parameters
    ----------
    theta
        Constants in the order of `CONSTANT_NAMES`, (..., n_constants).
    x
        Features, (n_points,) each.
    compute_scale
        Factor on the time of kernels [1].

    Returns
    -------
    dict
        Terms in the order of `TERM_NAMES`, (..., n_points) each.
    """
    c = {name: theta[..., index, np.newaxis] for index, name in enumerate(CONSTANT_NAMES)}
    stack = np.where(x["is_async"] > 0, c["s_async"], np.where(x["is_3d"] > 0, c["s_3d"], 1.0))
    # The factors of stack and anchor apply to kernels, not to the fixed time of the layers.
    scale = compute_scale * stack
    forward = scale * (x["gemm_s"] / c["e_gemm"] + x["elementwise_s"] * c["kappa"])
    again = scale * (x["again_gemm_s"] / c["e_gemm"] + x["again_elementwise_s"] * c["kappa"])
    forward = forward + x["layer_passes"] * c["t_layer"]
    backward = c["k_bwd"] * forward
    again = again + x["again_layer_passes"] * c["t_layer"]
    tensor_bandwidth = _bandwidth(
        x["tensor_crosses"], x["tensor_inter_bytes_per_s"], x["tensor_intra_bytes_per_s"], c
    )
    tensor_pass = x["tensor_bytes"] / tensor_bandwidth + x["tensor_reductions"] * c["a_coll"]
    transfer = x["transfer_inter_s"] / c["e_p2p"] + x["transfer_intra_s"] / c["e_nv"]
    terms = _sync_terms(c, x, backward, forward)
    busy = forward + backward + again + terms["gradient_exchange"]
    host_link = x["host_link_s"] / c["e_pcie"]
    fast = np.minimum(x["host_thread_rate"], c["r_cpu"])
    slow = c["r_slow"] * x["host_threads"]
    host_rate = np.minimum(np.where(x["host_is_slow"] > 0, slow, fast), x["host_memory_rate"])
    terms |= {
        "forward": forward,
        "backward": backward,
        "recompute": again,
        "tensor_exchange": x["tensor_passes"] * tensor_pass,
        "stage_transfer": transfer + x["transfer_latency_s"] + x["hand_overs"] * c["t_stage"],
        "device_update": x["device_update_fused_s_per_b"] * c["bpp_fused"]
        + x["device_update_unfused_s_per_b"] * c["bpp_unfused"],
        "host_update": x["host_parameters"] / host_rate,
        "host_to_device": host_link,
        "offload_overhead": c["c_full"] * x["offloaded_parameters"],
        # Gradients go to the host after every micro-batch; parameters come back once per step.
        "gradient_to_host": host_link * x["microbatches"] + c["c_grad"] * x["offloaded_parameters"],
        # Images are decoded while the devices are busy; only the excess is exposed.
        "data_loading": np.maximum(0.0, x["loader_s"] - busy),
        "node_wait": c["t_node"] * x["further_nodes"],
        "fixed": c["t_const"] * x["steps"],
    }
    # Callers add the terms in this order, so that the last digits of the sum are always the same.
    return {name: terms[name] for name in TERM_NAMES}


def predict(theta: _Array, x: Features, compute_scale: _Array | float = 1.0) -> _Array:
    """Compute the iteration time [s], (..., n_points): the sum of the terms of `predict_terms`."""
    return np.asarray(sum(predict_terms(theta, x, compute_scale).values()))


def _sum(terms: dict[str, _Array], *names: str) -> _Array:
    return np.asarray(sum(terms[name] for name in names))


def _zero_phases(terms: dict[str, _Array], x: Features) -> tuple[_Array, _Array, _Array]:
    in_forward = terms["tensor_exchange"] / x["tensor_passes"]
    backward = _sum(terms, "backward", "recompute", "stage_transfer", "gradient_exchange")
    overlap = backward + terms["gradient_to_host"] + terms["tensor_exchange"] - in_forward
    return terms["forward"] + in_forward, overlap, _sum(terms, *_OPTIMIZER)


def _3d_phases(terms: dict[str, _Array], x: Features) -> tuple[_Array, _Array, _Array]:
    pipeline = _sum(terms, "forward", "backward", "recompute", "tensor_exchange", "stage_transfer")
    return 0.0 * pipeline, pipeline, _sum(terms, *_OPTIMIZER)


def _ddp_phases(terms: dict[str, _Array], x: Features) -> tuple[_Array, _Array, _Array]:
    launch = np.minimum(x["launch_s"], terms["forward"])
    pipeline = ("forward", "backward", "recompute", "tensor_exchange", "stage_transfer")
    compute = _sum(terms, *pipeline, "gradient_to_host")
    return launch, compute - launch, terms["gradient_exchange"] + _sum(terms, *_OPTIMIZER)


_STYLES = {"zero": _zero_phases, "3d": _3d_phases, "ddp": _ddp_phases}


def phases(style: str, terms: dict[str, _Array], x: Features) -> tuple[_Array, _Array, _Array]:
    """Return the columns forward, overlap_sync and optimize [s], each (n_points,).

    They need not add up to the iteration time: style ``3d`` reports the pipeline and the
    optimiser but not the gradient exchange, and no style reports the fixed time.
    """
    return _STYLES[style](terms, x)


# --- Exact event schedule of a pipeline: a slow reference that the closed form is tested against ---


def closed_form_time_s(
    forward_s: Sequence[float], backward_s: Sequence[float], n_microbatches: int, interleave: int = 1
) -> float:
    """Return the pipeline time without transfers: all stages once, the slowest for the rest."""
    both = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    return n_microbatches * max(both) + _ramp(sum(both) - max(both), len(both), n_microbatches, interleave)


_MOST_MICROBATCHES = 1_000_000


@typed
def pipeline_time_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    n_microbatches: int,
    transfer_s: Sequence[float] | float = 0.0,
) -> float:
    """Run the 1F1B schedule event by event and return the time at which the last stage is idle [s]."""
    p, m = len(forward_s), n_microbatches
    edges = [float(transfer_s)] * (p - 1) if isinstance(transfer_s, int | float) else list(transfer_s)
    if p < 1 or m < 1 or len(backward_s) != p or len(edges) != p - 1:
        raise InputError(
            f"schedule of {p} forward and {len(backward_s)} backward times, {len(edges)} transfers and "
            f"{m} micro-batches; expected one or more stages with both times, one transfer fewer, and "
            "one micro-batch or more"
        )
    check_range("n_microbatches", m, 1, _MOST_MICROBATCHES)
    orders = [one_f_one_b_order(stage, p, m) for stage in range(p)]
    finished: dict[tuple[int, str, int], float] = {}
    clock, position = [0.0] * p, [0] * p
    remaining = sum(len(order) for order in orders)
    # Sweep over the stages. Each runs until it needs the result of a pass that has not run yet; a later sweep
    # continues there. At least one stage advances in every sweep, because 1F1B has no cyclic waits.
    while remaining:
        for stage in range(p):
            while position[stage] < len(orders[stage]):
                kind, k = orders[stage][position[stage]]
                ready = _ready_at(finished, edges, stage, kind, k)
                if ready is None:
                    break
                duration = forward_s[stage] if kind == "F" else backward_s[stage]
                clock[stage] = max(clock[stage], ready) + duration
                finished[stage, kind, k] = clock[stage]
                position[stage] += 1
                remaining -= 1
    return max(clock)


def _ready_at(
    finished: dict[tuple[int, str, int], float], edges: list[float], stage: int, kind: str, k: int
) -> float | None:
    """Return the arrival time of the input of a pass [s]; None if the pass that sends it has not run yet."""
    if kind == "F" and stage == 0:
        return 0.0
    if kind == "B" and stage == len(edges):
        return finished.get((stage, "F", k))
    source, edge = (stage - 1, edges[stage - 1]) if kind == "F" else (stage + 1, edges[stage])
    done = finished.get((source, kind, k))
    return None if done is None else done + edge


@dataclass(frozen=True, slots=True)
class ExactPipeline:
    """Pipeline of a point, stage by stage."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    transfer_s: float
    n_microbatches: int

    @property
    def closed_form_s(self) -> float:
        """Closed form, with two transfers per boundary on the critical path [s]."""
        transfers = 2.0 * (len(self.forward_s) - 1) * self.transfer_s
        return closed_form_time_s(self.forward_s, self.backward_s, self.n_microbatches) + transfers

    @property
    def event_schedule_s(self) -> float:
        """Exact event schedule of 1F1B [s]."""
        return pipeline_time_s(self.forward_s, self.backward_s, self.n_microbatches, self.transfer_s)


@typed
def exact_pipeline(
    workload: Workload, point: Point, cluster: ClusterSpec, calibration: CalibrationSet | Calibration
) -> ExactPipeline:
    """Compute the stage times of a point.

    Raises
    ------
    PlanError
        The degrees do not fit the placement or the model.
    """
    constants = calibration.for_workload(workload)
    theta = constants.vector
    table = feature_table(workload, cluster)
    code = table.codes([point])
    plan, whole = table.plans[code[0]], table.features(code)
    per_stage = stage_features(workload, plan, point.placement, cluster)
    x: Features = {name: np.repeat(values, len(per_stage)) for name, values in whole.items()}
    x |= {name: np.array([stage[name] for stage in per_stage]) for name in per_stage[0]}
    terms = predict_terms(theta, x, constants.compute_scale)
    exchange = terms["tensor_exchange"] / x["tensor_passes"]
    backward = terms["backward"] + terms["recompute"] + exchange * (x["tensor_passes"] - 1.0)
    crossings = max(2.0 * (len(per_stage) - 1), 1.0)
    transfer = predict_terms(theta, whole, constants.compute_scale)["stage_transfer"][0] / crossings
    return ExactPipeline(
        forward_s=tuple(float(value) for value in terms["forward"] + exchange),
        backward_s=tuple(float(value) for value in backward),
        transfer_s=float(transfer),
        n_microbatches=plan.n_microbatches,
    )


# --- Emulation: throughput tables with seeded noise, and explanations of points ---

MAX_NOISE = 50.0
"""Largest scale of the noise: at it, the times of a row spread by a factor of e."""
_COMPUTE_TERMS = ("forward", "backward", "recompute")


@dataclass(frozen=True, slots=True)
class NoiseModel:
    """Scatter of measured rows around the value of the model.

    Parameters
    ----------
    sigma_run_single_node, sigma_run_multi_node, samples
        Standard deviation of the logarithm of one measured iteration [1], an assumption; and the number of
        iterations that a row averages, as in the published traces.
    sigma_environment
        Standard deviation of the logarithm of a factor that all iterations of a row share [1]; published rows
        that are equivalent in the model differ by 0.6 to 3.5 %.
    """

    sigma_run_single_node: float = 0.015
    sigma_run_multi_node: float = 0.025
    samples: int = 19
    sigma_environment: float = 0.02

    def __post_init__(self) -> None:
        sigmas = ("sigma_run_single_node", "sigma_run_multi_node", "sigma_environment")
        check_fields(self, "noise", positive=("samples",), not_negative=sigmas)

    def factors(self, rng: np.random.Generator, n_terms: int, *, multi_node: bool, scale: float) -> _Array:
        """Draw one factor for each term of a row, (n_terms,); their mean is 1."""
        run = self.sigma_run_multi_node if multi_node else self.sigma_run_single_node
        sigma = scale * run / math.sqrt(self.samples)
        environment = scale * self.sigma_environment
        draws = rng.standard_normal(n_terms + 1)
        shared = math.exp(environment * draws[0] - environment**2 / 2)
        return np.asarray(shared * np.exp(sigma * draws[1:] - sigma**2 / 2))


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Slow nodes: each node of a row computes slowly with a probability.

    Parameters
    ----------
    probability, mean_slowdown
        Probability of a slow node, and mean of the exponential share by which its compute takes longer [1].
    """

    probability: float
    mean_slowdown: float

    def __post_init__(self) -> None:
        check_fields(self, "stragglers")
        if not 0 <= self.probability <= 1 or self.mean_slowdown < 0:
            raise InputError(
                f"stragglers: probability {self.probability} and mean_slowdown {self.mean_slowdown}; "
                "expected a probability in [0, 1] and a slowdown >= 0"
            )

    def compute_factor(self, rng: np.random.Generator, n_nodes: int) -> float:
        """Draw the factor on compute time, which is that of the slowest node."""
        slow = rng.random(n_nodes) < self.probability
        extra = rng.exponential(self.mean_slowdown, n_nodes) if self.mean_slowdown else np.zeros(n_nodes)
        return float(1.0 + np.max(slow * extra))


@dataclass(frozen=True, slots=True)
class Anomalies:
    """Defects of real measurements, for robustness tests; all off by default.

    Parameters
    ----------
    odd_path_bytes_per_s
        Bandwidth of a slow path on multi-node placements with an odd number of GPUs on some node [B/s]; the
        time in which it moves the gradients is added to the iteration. 0 for no such path.
    half_batch_when_short
        True if a data-parallel run that needs accumulation runs only one micro-batch.
    missing_share
        Share of rows that are left out [1].
    """

    odd_path_bytes_per_s: float = 0.0
    half_batch_when_short: bool = False
    missing_share: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "anomalies")
        if self.odd_path_bytes_per_s < 0 or not 0 <= self.missing_share < 1:
            raise InputError(
                f"anomalies: odd_path_bytes_per_s {self.odd_path_bytes_per_s} and missing_share "
                f"{self.missing_share}; expected >= 0, and in [0, 1)"
            )

    def extra_time_s(self, point: Point, gradient_bytes: float) -> float:
        """Return the time that the slow path adds to a row [s]."""
        counts = point.placement.gpus_per_node
        is_odd = len(counts) > 1 and any(count % 2 for count in counts)
        if not (is_odd and self.odd_path_bytes_per_s and point.plan.dp > 1):
            return 0.0
        return gradient_bytes / self.odd_path_bytes_per_s


def _row_generator(global_seed: int, cluster: str, workload: str, point: Point) -> np.random.Generator:
    """Return a generator whose seed depends on the row alone, not on the other rows."""
    return named_rng(global_seed, cluster, workload, point.text)


@dataclass(frozen=True, slots=True)
class Disturbances:
    """Differences between measured rows and the model: scatter, and optional defects."""

    noise: NoiseModel = field(default_factory=NoiseModel)
    stragglers: Stragglers | None = None
    anomalies: Anomalies | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Explanation:
    """One emulated point, term by term.

    Parameters
    ----------
    point
        The point, with its micro-batch size resolved.
    feasible, reason, warnings, memory_bytes, host_memory_bytes
        The memory verdict, and memory by component [B].
    terms_s
        Terms of the iteration [s]; they add up to `iter_time_s`.
    """

    point: Point
    feasible: bool
    reason: str
    warnings: tuple[str, ...]
    memory_bytes: dict[str, float]
    host_memory_bytes: dict[str, float]
    terms_s: dict[str, float]
    calibration: Calibration

    @property
    def iter_time_s(self) -> float:
        """Iteration time without noise [s]; NaN if the plan cannot run."""
        return sum(self.terms_s.values()) if self.feasible else float("nan")


@typed
def iteration_time_s(
    workload: Workload,
    points: Sequence[Point],
    cluster: ClusterSpec,
    calibration: CalibrationSet | Calibration,
) -> _Array:
    """Return the exact iteration times of points [s], (n_points,); NaN where infeasible."""
    constants = calibration.for_workload(workload)
    table = feature_table(workload, cluster)
    codes = table.codes(points)
    total = predict(constants.vector, table.features(codes), constants.compute_scale)
    return np.where(table.feasible(codes), total, np.nan)


@typed
def emulate(
    workload: Workload,
    points: Sequence[Point],
    cluster: ClusterSpec,
    calibration: CalibrationSet | Calibration | None = None,
    *,
    seed: int = 0,
    noise: float = 0.0,
    disturbances: Disturbances | None = None,
) -> pd.DataFrame:
    """Emulate the throughput table of points.

    Parameters
    ----------
    points
        Plans in placements, for example from `trace_points`.
    calibration
        Constants; the shipped level L1 if not given.
    seed, noise
        Seed of all rows (a row depends only on the seed and its point), and scale of the measurement noise,
        at most `MAX_NOISE`; with 0 a row has the exact value of the model.
    disturbances
        Sizes of the noise, stragglers and anomalies; the defaults if not given.

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.THROUGHPUT`, one row per point in their order; an infeasible point
        has no times.
    """
    if not 0.0 <= noise <= MAX_NOISE:
        raise InputError(f"noise is {noise}; expected a scale from 0 to {MAX_NOISE:g}")
    constants = (calibration or load_calibration()).for_workload(workload)
    kinds = disturbances or Disturbances()
    table = feature_table(workload, cluster)
    codes = table.codes(points)
    x = table.features(codes)
    terms = predict_terms(constants.vector, x, constants.compute_scale)
    if kinds.anomalies is not None and kinds.anomalies.half_batch_when_short:
        # Data-parallel rows that need accumulation run one micro-batch only.
        affected = np.array([not point.plan.is_model_parallel for point in points]) & (x["microbatches"] > 1)
        divisor = np.where(affected, x["microbatches"], 1.0)
        terms = {
            name: values / divisor if name in _COMPUTE_TERMS else values for name, values in terms.items()
        }
    if noise > 0 or kinds.stragglers is not None or kinds.anomalies is not None:
        terms = _disturbed(terms, workload, points, cluster.name, seed, noise, kinds)
    frame = _frame(workload, points, terms, x, table.feasible(codes))
    if kinds.anomalies is not None and kinds.anomalies.missing_share:
        kept = [
            _row_generator(seed, f"missing:{cluster.name}", workload.key, point).random()
            >= kinds.anomalies.missing_share
            for point in points
        ]
        frame = frame[kept].reset_index(drop=True)
    return frame


def _disturbed(
    terms: dict[str, _Array],
    workload: Workload,
    points: Sequence[Point],
    cluster: str,
    seed: int,
    noise: float,
    kinds: Disturbances,
) -> dict[str, _Array]:
    factors = np.ones((len(TERM_NAMES), len(points)))
    extra = np.zeros(len(points))
    compute_rows = [TERM_NAMES.index(name) for name in _COMPUTE_TERMS]
    for column, point in enumerate(points):
        rng = _row_generator(seed, cluster, workload.key, point)
        n_nodes = point.placement.n_nodes
        factors[:, column] = kinds.noise.factors(rng, len(TERM_NAMES), multi_node=n_nodes > 1, scale=noise)
        if kinds.stragglers is not None:
            factors[compute_rows, column] *= kinds.stragglers.compute_factor(rng, n_nodes)
        if kinds.anomalies is not None:
            bound = workload.for_plan(point.plan)
            volume = bound.model.parameters * bound.stack.gradient_bytes
            extra[column] = kinds.anomalies.extra_time_s(point, volume)
    disturbed = {name: terms[name] * factors[row] for row, name in enumerate(TERM_NAMES)}
    disturbed["gradient_exchange"] = disturbed["gradient_exchange"] + extra
    return disturbed


def _frame(
    workload: Workload,
    points: Sequence[Point],
    terms: dict[str, _Array],
    x: Features,
    feasible: NDArray[np.bool_],
) -> pd.DataFrame:
    total = np.asarray(sum(terms[name] for name in TERM_NAMES))
    styles = np.array([workload.for_plan(point.plan).stack.phase_style for point in points], dtype=np.str_)
    columns = np.full((3, len(points)), np.nan)
    for style in sorted(set(styles)):
        columns = np.where(styles == style, np.stack(phases(str(style), terms, x)), columns)
    forward, overlap, optimize = np.where(feasible, columns, np.nan)
    frame = pd.DataFrame(
        {
            "workload": workload.key,
            "exec_plan": [write_plan(point.plan, cpu_threads=point.plan.cpu_threads) for point in points],
            "placement": [point.placement.text for point in points],
            "cpu_threads": [point.plan.cpu_threads for point in points],
            "global_batch_size": workload.global_batch_size,
            "iter_time_s": significant(np.where(feasible, total, np.nan)),
            "forward_s": significant(forward),
            "overlap_sync_s": significant(overlap),
            "optimize_s": significant(optimize),
            "feasible": feasible,
            "clean": True,
            "flag": "",
            "provenance": "emulated",
        }
    )
    return THROUGHPUT.validate(frame, where=f"emulated trace of {workload.key}")


@typed
def explain(
    workload: Workload,
    point: Point,
    cluster: ClusterSpec,
    calibration: CalibrationSet | Calibration | None = None,
) -> Explanation:
    """Emulate one point without noise and keep every term."""
    constants = (calibration or load_calibration()).for_workload(workload)
    table = feature_table(workload, cluster)
    code = table.codes([point])
    verdict = table.verdicts[code[0]]
    software = workload.for_plan(point.plan).stack
    label = () if software.calibrated else (f"no measured row stands behind stack {software.label}",)
    terms = predict_terms(constants.vector, table.features(code), constants.compute_scale)
    return Explanation(
        point=Point(table.plans[code[0]], point.placement),
        feasible=verdict.feasible,
        reason=verdict.reason,
        warnings=verdict.warnings + label,
        memory_bytes=dict(verdict.bytes_by_component),
        host_memory_bytes=dict(verdict.host_bytes_by_component),
        terms_s={name: float(terms[name][0]) for name in TERM_NAMES},
        calibration=constants,
    )


# --- Trace files in the layout of the published ones, with an explanation of every row ---
#
# ``placements.csv`` has the published columns, ``placements.explain.jsonl`` every term of every row, and
# ``placements.meta.json`` their origin. The files are emulated, not measured.

_PACKAGES = ("makespan.hardware", "makespan.workloads", "makespan.emulator")
_DIGEST_BYTES = 16
EMULATED_NOTE = "emulated, not measured"
LEGACY_UNITS = ("milliseconds", "seconds")
_PHASES = {"forward_s": "forward", "overlap_sync_s": "overlap_sync", "optimize_s": "optimize"}


@cache
def preset_digests() -> dict[str, str]:
    """Return the BLAKE2b digest of every preset file, keyed ``package/file``."""
    digests = {}
    for package in _PACKAGES:
        folder = resources.files(package).joinpath("presets")
        for item in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if item.name.endswith(".toml"):
                digest = hashlib.blake2b(item.read_bytes(), digest_size=_DIGEST_BYTES).hexdigest()
                digests[f"{package.rpartition('.')[2]}/{item.name}"] = digest
    return digests


def legacy_frame(frame: pd.DataFrame, units: str = "milliseconds") -> pd.DataFrame:
    """Convert a throughput table to the published columns."""
    if units not in LEGACY_UNITS:
        raise unknown_name("unit of the phase columns", units, LEGACY_UNITS)
    scale = 1.0 if units == "seconds" else 1.0 / MS
    legacy = frame[["exec_plan", "placement", "cpu_threads"]].copy()
    legacy["iter_time"] = frame["iter_time_s"].fillna(0.0)
    for column, name in _PHASES.items():
        legacy[name] = frame[column].fillna(0.0) * scale
    return legacy


def explanation_record(explanation: Explanation) -> dict[str, Any]:
    """Return an explanation as a record of plain values, ready for JSON."""
    plan = explanation.point.plan
    terms = {name: value for name, value in explanation.terms_s.items() if math.isfinite(value)}
    return {
        "exec_plan": write_exec_plan(plan),
        "placement": explanation.point.placement.text,
        "cpu_threads": plan.cpu_threads,
        "micro_batch_size": plan.micro_batch_size,
        "n_microbatches": plan.n_microbatches,
        "feasible": explanation.feasible,
        "reason": explanation.reason,
        "warnings": list(explanation.warnings),
        "iter_time_s": explanation.iter_time_s if explanation.feasible else None,
        "terms_s": terms if explanation.feasible else {},
        "memory_bytes": explanation.memory_bytes,
        "host_memory_bytes": explanation.host_memory_bytes,
        "calibration": explanation.calibration.identifier,
        "calibration_level": explanation.calibration.level,
        "note": EMULATED_NOTE,
    }


@typed
def write_trace(
    directory: str | Path,
    workload: Workload,
    points: Sequence[Point],
    cluster: ClusterSpec,
    calibration: CalibrationSet,
    *,
    seed: int = 0,
    noise: float = 0.0,
    units: str = "milliseconds",
) -> tuple[Path, Path, Path]:
    """Emulate points and write the three files of a trace into a folder, each atomically.

    Further arguments are as for `emulate`; ``units`` are those of the phase columns, one of `LEGACY_UNITS`.

    Returns
    -------
    tuple of pathlib.Path
        The table, the explanations and the meta data.
    """
    frame = emulate(workload, points, cluster, calibration, seed=seed, noise=noise)
    table = legacy_frame(frame, units)
    records = [explanation_record(explain(workload, point, cluster, calibration)) for point in points]
    used = calibration.for_workload(workload)
    stacks = (workload.data_parallel_stack, workload.model_parallel_stack)
    sources = {
        f"workload {workload.key}": workload.source,
        f"model {workload.model.key}": workload.model.source,
    }
    sources |= {f"stack {software.label}": software.source for software in stacks}
    sources |= {f"node {node.name}": node.source for node in cluster.kinds}
    sources |= {f"device {node.gpu.name}": node.gpu.source for node in cluster.kinds}
    meta = {
        "note": EMULATED_NOTE,
        "emulator_version": __version__,
        "cluster": cluster.name,
        "workload": workload.key,
        "stacks": [software.label for software in stacks],
        "sources": sources,
        "seed": seed,
        "noise": noise,
        "phase_units": units,
        "preset_digests": preset_digests(),
        "calibration": {
            "identifier": used.identifier,
            "level": used.level,
            "source": calibration.source,
            "data_digest": calibration.data_digest,
            "excluded_models": list(used.excluded_models),
            "compute_scale": used.compute_scale,
            "theta": dict(used.theta),
        },
    }
    base = Path(directory)
    paths = (base / "placements.csv", base / "placements.explain.jsonl", base / "placements.meta.json")
    write_csv(table, paths[0])
    write_text("".join(json.dumps(record, sort_keys=True) + "\n" for record in records), paths[1])
    write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n", paths[2])
    return paths
