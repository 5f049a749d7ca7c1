"""Forms of the performance model, and their inputs: shared constants of a cluster, and points as arrays."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.errors import FitError, InputError, TraceError
from makespan.files import preset_entry, read_preset, read_toml
from makespan.hardware import ClusterSpec, NodeSpec, cluster, cluster_from
from makespan.plans import (
    ExecutionPlan,
    Placement,
    RankGroups,
    boundary_flows,
    card_loads,
    cards_by_node,
    read_plan,
    resolve_micro_batch,
)
from makespan.workloads import Workload, workload as load_workload

# --- Environment: constants of a cluster that all fitted models share ---

_PACKAGE = "makespan.perf"
_OPEN_FORM = "extended"  # its priors may have been centred with measured rows in view


@dataclass(frozen=True, slots=True)
class Prior:
    """Weak log-normal prior and bounds of one fitted parameter."""

    unit: str
    median: float
    log_sd: float
    low: float
    high: float
    meaning: str

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.median <= self.high or self.log_sd <= 0:
            raise InputError(f"prior {self.meaning!r}: needs 0 < low <= median <= high and log_sd > 0")


@dataclass(frozen=True, slots=True)
class Constants:
    """Physical constants shared by all models of a cluster, and the weights of the loss.

    ``presets/environments.toml`` has values, units and sources; the background page of the model has reasons.
    """

    flat_bandwidth_bytes_per_s: float
    intra_bandwidth_bytes_per_s: float
    nic_bandwidth_bytes_per_s: float
    pcie_bandwidth_bytes_per_s: float
    tp_bandwidth_bytes_per_s: float
    tp_inter_bandwidth_bytes_per_s: float
    p2p_bandwidth_bytes_per_s: float
    gather_efficiency: float
    straggler_s: float
    straggler_s_per_byte: float
    zero_straggler_s: float
    zero_straggler_s_per_byte: float
    forward_launch_s: float
    backward_launch_s: float
    async_launch_s: float
    recompute_share: float
    host_update_s: float
    host_contention_s: float
    reference_cpu_threads: float
    assumed_backward_ratio: float
    time_log_sd: float
    phase_weight: float


_CONSTANT_NAMES = frozenset(field.name for field in fields(Constants))


@dataclass(frozen=True, slots=True)
class Environment:
    """Constants and priors that all models fitted on one cluster share.

    Parameters
    ----------
    name, cluster
        Key in the presets, or path of the file; and the cluster, whose nodes are equal.
    constants, priors
        Shared constants, and the prior of every fitted parameter, by form and name.
    neutral
        Priors that no measured row has influenced, by name, for those constants and centres of priors of the
        form ``extended`` that were chosen with the rows of all models in view. Empty if none were.
    without
        By model, values of the same names that were fitted to the rows of the other models alone.
    """

    name: str
    cluster: ClusterSpec
    constants: Constants
    priors: Mapping[str, Mapping[str, Prior]]
    neutral: Mapping[str, Prior]
    without: Mapping[str, Mapping[str, float]]

    @property
    def node(self) -> NodeSpec:
        """Kind of node: decides memory feasibility and which GPUs share a network card."""
        return self.cluster.node

    def with_shared(self, values: Mapping[str, float]) -> "Environment":
        """Return the environment with other constants and centres of priors, by name."""
        constants = {name: value for name, value in values.items() if name in _CONSTANT_NAMES}
        centred = {
            name: replace(prior, median=values[name]) if name in values else prior
            for name, prior in self.priors[_OPEN_FORM].items()
        }
        return replace(
            self,
            constants=replace(self.constants, **constants),
            priors=MappingProxyType({**self.priors, _OPEN_FORM: MappingProxyType(centred)}),
        )

    def unseen_by(self, model: str) -> "Environment":
        """Return the environment fitted without the rows of a model, or itself if they had no influence."""
        return self.with_shared(self.without[model]) if model in self.without else self


def environment_names() -> tuple[str, ...]:
    """Return the names of all environments in the presets."""
    return tuple(read_preset(_PACKAGE, "environments"))


def load_environment(name: str) -> Environment:
    """Load the shared constants and priors of a cluster.

    Parameters
    ----------
    name
        Name of the environment, the same as that of its cluster; or path of a ``.toml`` file with one. In a
        file the cluster is a table (see `makespan.hardware.cluster_from`) in place of a name.

    Raises
    ------
    UnknownNameError, MissingDataError, InputError
        No environment has that name; there is no such file; it cannot be read, or constants are
        missing or not known.
    """
    if not name.endswith(".toml"):
        return _from_presets(name)
    # Files are read anew on every call, presets only once.
    entry = read_toml(name, "an environment")
    try:
        return _environment(name, cluster_from(Path(name).stem, entry["cluster"]), entry)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{name}: cannot be read as an environment: {error}; expected tables cluster, constants, priors"
        ) from None


def load_cluster(name: str) -> ClusterSpec:
    """Return a cluster of the catalogue, or the one that an environment file describes."""
    return load_environment(name).cluster if name.endswith(".toml") else cluster(name)


_TESTBED = "a800-64"
_EXCHANGE, _HOST_COPIES = 0.8, 0.6  # shares of a rate that exchanges and host copies reach, as of `neutral`


def environment_of(spec: ClusterSpec) -> Environment:
    """Return constants and priors for a cluster of equal nodes on which nothing has been measured.

    Bandwidths are those of its links, at the shares that no measured row has influenced; all other values are
    the medians of the neutral priors.
    """
    base, node = load_environment(_TESTBED), spec.node
    link_rate = _EXCHANGE * node.intra_bandwidth_bytes_per_s
    card_rate = _EXCHANGE * node.nic_bandwidth_bytes_per_s * spec.network.bandwidth_factor
    values = {name: prior.median for name, prior in base.neutral.items()} | {
        "flat_bandwidth_bytes_per_s": card_rate,
        "intra_bandwidth_bytes_per_s": link_rate,
        "nic_bandwidth_bytes_per_s": card_rate,
        "pcie_bandwidth_bytes_per_s": _HOST_COPIES * node.pcie_bandwidth_bytes_per_s,
        "tp_bandwidth_bytes_per_s": link_rate,
        "tp_inter_bandwidth_bytes_per_s": card_rate / _EXCHANGE,
        "p2p_bandwidth_bytes_per_s": card_rate,
    }
    nothing: Mapping[str, Any] = MappingProxyType({})
    return replace(base.with_shared(values), name=spec.name, cluster=spec, neutral=nothing, without=nothing)


@cache
def _from_presets(name: str) -> Environment:
    entry = preset_entry(_PACKAGE, "environments", "environment", name)
    without = read_preset(_PACKAGE, "unseen").get(name, {})
    return _environment(name, cluster(entry["cluster"]), {**entry, "without": without})


def _environment(name: str, spec: ClusterSpec, entry: Mapping[str, Any]) -> Environment:
    values = {key: float(item["value"]) for key, item in entry["constants"].items()}
    if values.keys() != _CONSTANT_NAMES:
        raise InputError(
            f"environment {name!r}: constants {sorted(values.keys() ^ _CONSTANT_NAMES)} are missing or "
            f"not known; expected exactly {', '.join(sorted(_CONSTANT_NAMES))}"
        )
    if wrong := [key for key, value in values.items() if not 0 <= value < math.inf]:
        raise InputError(f"environment {name!r}: {', '.join(wrong)}: expected numbers, 0 or more")
    priors = {
        form: MappingProxyType({key: Prior(**item) for key, item in table.items()})
        for form, table in entry["priors"].items()
    }
    neutral = {key: Prior(**item) for key, item in entry.get("neutral", {}).items()}
    without = entry.get("without", {})
    open_names = _CONSTANT_NAMES | priors.get(_OPEN_FORM, {}).keys()
    for where, table in {"neutral": neutral, **without}.items():
        if unknown := sorted(set(table) - open_names):
            raise InputError(f"environment {name!r}: {where}: {', '.join(unknown)} are not known")
    return Environment(
        name=name,
        cluster=spec,
        constants=Constants(**values),
        priors=MappingProxyType(priors),
        neutral=MappingProxyType(neutral),
        without=MappingProxyType(without),
    )


# --- Points: plans and placements as arrays ---

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]
_FLAGS = ("is_zero", "is_offload", "is_model_parallel")


class Geometry(NamedTuple):
    """Load of network cards under the groups of a plan: 1 is the rate of one card, 2 half of it."""

    ring_load: float
    tp_load: float
    tp_local_share: float
    pp_load: float
    pp_local_hops: float


@lru_cache(maxsize=65536)
def geometry(gpus_per_node: tuple[int, ...], pp: int, tp: int, dp: int, gpus_per_nic: int) -> Geometry:
    """Compute the card loads of a plan on a placement; the most loaded card sets the rate of a group."""
    groups = RankGroups.of(gpus_per_node, pp, tp, dp)
    cards = [gpus_per_nic] * len(gpus_per_node)
    tensor = _group_loads(groups.tensor, cards).reshape(pp, dp).max(axis=1)
    flows = [boundary_flows(groups.ranks, stage * tp * dp, tp * dp, cards) for stage in range(pp - 1)]
    boundary = np.array([max([0, *sent.values(), *received.values()]) for sent, received in flows])
    return Geometry(
        ring_load=float(_group_loads(groups.data, cards).max()),
        tp_load=float(tensor.mean()),
        tp_local_share=float((tensor == 0).mean()),
        pp_load=float(boundary.sum()),
        pp_local_hops=float((boundary == 0).sum()),
    )


def _group_loads(groups: Sequence[Sequence[tuple[int, int]]], gpus_per_nic: Sequence[int]) -> Floats:
    """Return the largest card load that each group meets, 0 inside a node."""
    members = [cards_by_node(group, gpus_per_nic) for group in groups]
    load = card_loads(members)
    return np.array(
        [
            max(load[node, card] for node, (cards, _) in by_node.items() for card in cards)
            if len(by_node) > 1
            else 0.0
            for by_node in members
        ]
    )


@dataclass(frozen=True, slots=True)
class Points:
    """Struct of arrays over n points of one workload; every array has shape (n,).

    Parameters
    ----------
    workload
        The workload of all points.
    n_gpus, n_nodes, gpus_on_largest_node, dp, tp, pp, cpu_threads
        Size and shape of the placement, degrees of the plan, and CPU threads per GPU.
    replica_batch_size, n_micro
        Samples and passes of one replica in one optimiser step; micro-batches under a pipeline.
    checkpoint_fraction
        Share of the layers that recompute their activations, because of the plan or its stack.
    tokens_share
        Tokens per sample over those under plain data-parallel plans of the workload.
    is_zero, is_offload, is_model_parallel
        Partitioned optimiser, optimiser on the host, family with tensor or pipeline parallelism.
    ring_load, tp_load, tp_local_share, pp_load, pp_local_hops
        Loads of network cards.
    """

    workload: Workload
    n_gpus: Floats
    n_nodes: Floats
    gpus_on_largest_node: Floats
    dp: Floats
    tp: Floats
    pp: Floats
    replica_batch_size: Floats
    n_micro: Floats
    cpu_threads: Floats
    checkpoint_fraction: Floats
    tokens_share: Floats
    is_zero: Bools
    is_offload: Bools
    is_model_parallel: Bools
    ring_load: Floats
    tp_load: Floats
    tp_local_share: Floats
    pp_load: Floats
    pp_local_hops: Floats

    def __len__(self) -> int:
        return len(self.n_gpus)

    def take(self, index: Index | Bools) -> "Points":
        """Select points by index or mask."""
        arrays: dict[str, Any] = {name: getattr(self, name)[index] for name in _ARRAYS}
        return replace(self, **arrays)

    def join(self, other: "Points") -> "Points":
        """Append points; raises `FitError` where they are of another workload."""
        if other.workload.key != self.workload.key:
            raise FitError(
                f"points of {other.workload.key!r} cannot be added to points of {self.workload.key!r}"
            )
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in _ARRAYS
        }
        return replace(self, **arrays)

    @property
    def is_data_parallel(self) -> Bools:
        """Mask of the plans that are neither model parallel nor partitioned."""
        return ~(self.is_zero | self.is_offload | self.is_model_parallel)


_ARRAYS = tuple(field.name for field in fields(Points) if field.name != "workload")


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured times of n points, each (n,) in seconds; phases are NaN where not reported."""

    iter_time_s: Floats
    forward_s: Floats
    overlap_sync_s: Floats
    optimize_s: Floats

    def __len__(self) -> int:
        return len(self.iter_time_s)

    def take(self, index: Index | Bools) -> "Measured":
        """Select observations by index or mask."""
        return Measured(*(getattr(self, name)[index] for name in _TIMES))

    def join(self, other: "Measured") -> "Measured":
        """Append observations."""
        return Measured(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in _TIMES))


_TIMES = tuple(field.name for field in fields(Measured))


def points_from_plans(
    pairs: Sequence[tuple[ExecutionPlan, Placement]], workload: str | Workload, environment: Environment
) -> Points:
    """Build points of a workload or its key; the environment says which GPUs share a network card.

    Parameters
    ----------
    pairs
        Plan, with its micro-batch size resolved, and placement of each point.
    """
    spec = load_workload(workload) if isinstance(workload, str) else workload
    rows: list[tuple[float, ...]] = []
    for plan, placement in pairs:
        bound = spec.for_plan(plan)
        loads = geometry(placement.gpus_per_node, plan.pp, plan.tp, plan.dp, environment.node.gpus_per_nic)
        row = (  # in the order of the fields of `Points`
            plan.n_gpus,
            placement.n_nodes,
            placement.gpus_per_node[-1],
            plan.dp,
            plan.tp,
            plan.pp,
            plan.replica_batch_size,
            plan.n_microbatches,
            plan.cpu_threads,
            1.0 if bound.stack.full_checkpointing else plan.checkpoint_fraction,
            bound.model.seq / spec.model.seq,
            plan.zero_stage > 0 and not plan.offload,
            plan.offload,
            plan.is_model_parallel,
            *loads,
        )
        rows.append(row)
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(_ARRAYS)).T
    arrays: dict[str, Any] = dict(zip(_ARRAYS, columns, strict=True))
    arrays |= {name: arrays[name].astype(bool) for name in _FLAGS}
    return Points(workload=spec, **arrays)


def plans_from_table(frame: pd.DataFrame, spec: Workload) -> list[tuple[ExecutionPlan, Placement]]:
    """Read plan and placement of every row of a throughput table; micro-batch sizes are not resolved."""
    pairs, batch = [], spec.global_batch_size
    rows = zip(frame["exec_plan"], frame["placement"], frame["cpu_threads"], strict=True)
    for text, place, threads in rows:
        placement = Placement.parse(str(place))
        n_gpus, count = placement.n_gpus, int(threads)
        plan = read_plan(str(text), n_gpus=n_gpus, global_batch_size=batch, cpu_threads=count)
        pairs.append((plan, placement))
    return pairs


def points_from_table(frame: pd.DataFrame, workload: str | Workload, environment: Environment) -> Points:
    """Read the points of a throughput table, in its order, for a workload or its key.

    Parameters
    ----------
    frame
        Schema `makespan.tables.THROUGHPUT`; feasible rows of one workload.
    environment
        Supplies the node for the micro-batch rule and the network cards.

    Raises
    ------
    TraceError
        A row is infeasible or of another workload.
    """
    spec = load_workload(workload) if isinstance(workload, str) else workload
    wrong = ~frame["feasible"].to_numpy(dtype=bool) | (frame["workload"] != spec.key).to_numpy()
    if wrong.any():
        row = frame.iloc[int(np.flatnonzero(wrong)[0])]
        raise TraceError(
            f"throughput table: row {row['exec_plan']!r} on {row['placement']!r} of {row['workload']!r} "
            f"cannot be fitted; expected feasible rows of {spec.key!r}"
        )
    pairs = [
        (resolve_micro_batch(plan, spec, environment.node), placement)
        for plan, placement in plans_from_table(frame, spec)
    ]
    return points_from_plans(pairs, spec, environment)


def measured_from_table(frame: pd.DataFrame) -> Measured:
    """Read the measured columns of a throughput table; a phase of 0 was not reported."""
    time, *phases = (frame[name].to_numpy(dtype=np.float64) for name in _TIMES)
    return Measured(time, *(np.where(phase > 0, phase, np.nan) for phase in phases))


# --- Forms: the published form of the paper, and the extended form that the traces need ---

_PARAMETER_UNIT = 1e9  # costs per parameter are fitted per 1e9 parameters, so that they are of order one
_HALF = 2  # bytes of one 16-bit activation
_ALL_REDUCES = 4  # per layer: two forward, two backward (Shoeybi et al. 2019, section 3)
_ALL_REDUCE_PASSES = 2  # reduce-scatter and all-gather
_DIRECTIONS = 2  # activations forward, their gradients back
_MOST_FIXED = 0.8  # largest share of fixed cost in a profile, or further samples would take no time
Values = dict[str, Floats]


@dataclass(frozen=True, slots=True)
class Profile:
    """Forward time of a number of samples of a model on one device, from one profiled run."""

    time_s: float
    samples: float
    n_micro: float  # passes in which it was measured; 0 if the time is free of the fixed cost of a pass
    origin: str

    @property
    def per_sample_s(self) -> float:
        """Forward time per sample, with the fixed cost of the passes."""
        return self.time_s / self.samples

    def marginal_s(self, launch_s: float) -> float:
        """Forward time of one more sample, given the fixed cost of a pass."""
        fixed = min(self.n_micro * launch_s, _MOST_FIXED * self.time_s)
        return (self.time_s - fixed) / self.samples


class Phases(NamedTuple):
    """Predicted times in seconds, each of shape (..., n)."""

    iter_time_s: Floats
    compute_s: Floats
    """Forward, backward and synchronisation, as the traces report them together."""
    optimize_s: Floats


@dataclass(frozen=True)
class Terms:
    """Inputs of a form that do not depend on the fitted parameters: volumes [B], arrays (n,)."""

    points: Points
    profile: Profile
    constants: Constants

    @cached_property
    def parameters(self) -> float:
        """Parameters of the model, in 1e9."""
        return self.points.workload.model.parameters / _PARAMETER_UNIT

    @cached_property
    def gradient_bytes(self) -> Floats:
        """Bytes of the gradients that one device exchanges."""
        stack = self.points.workload.data_parallel_stack
        whole = stack.gradient_bytes * self.points.workload.model.parameters
        return whole / (self.points.tp * self.points.pp)

    @cached_property
    def ring_share(self) -> Floats:
        """Share of a volume that one ring pass moves, (d-1)/d."""
        return (self.points.dp - 1.0) / self.points.dp

    @cached_property
    def tp_bytes(self) -> Floats:
        """Bytes of all tensor-parallel all-reduces of one replica's batch."""
        volume = _HALF * _ALL_REDUCES * _ALL_REDUCE_PASSES * self._tokens_times_hidden(every_layer=True)
        return volume * self.points.replica_batch_size * (self.points.tp - 1.0) / self.points.tp

    @cached_property
    def boundary_bytes(self) -> Floats:
        """Bytes that cross one stage boundary in both directions for one replica's batch."""
        volume = _HALF * _DIRECTIONS * self._tokens_times_hidden(every_layer=False)
        return volume * self.points.replica_batch_size

    @cached_property
    def bubble_factor(self) -> Floats:
        """Time of a pipeline over that of all its work on one stage, (m+p-1)/(m p)."""
        m, p = self.points.n_micro, self.points.pp
        return np.where(self.points.is_model_parallel, (m + p - 1.0) / (m * p), 1.0)

    @cached_property
    def straggler_factor(self) -> Floats:
        """Expected largest of n exponential delays over their mean, less that of one node: H(n) - 1."""
        nodes = self.points.n_nodes.astype(np.intp)
        harmonic = np.cumsum(1.0 / np.arange(1, nodes.max(initial=1) + 1))
        return np.asarray(harmonic[nodes - 1] - 1.0)

    def _tokens_times_hidden(self, every_layer: bool) -> float:
        workload = self.points.workload
        model = workload.model
        if workload.model_parallel_seq:
            model = model.with_seq(*workload.model_parallel_seq)
        if every_layer:
            return float(sum(block.n_layers * block.seq * block.hidden for block in model.blocks))
        return float(max(block.seq * block.hidden for block in model.blocks))


@dataclass(frozen=True, slots=True)
class Form:
    """One form of the performance model: `Phases` of n points from parameters (..., n_parameters).

    ``comparable`` returns masks of the points whose reported compute and optimiser phases contain the same
    work as the predicted ones. ``work`` returns two times per step [s]: in the first the devices of a job
    compute, fixed costs included, and in the second its data move. Pipeline bubbles, waiting for stragglers
    and updates on the host count as neither.
    """

    name: str
    parameters: tuple[str, ...]
    phases: Callable[[Floats, Terms], Phases]
    work: Callable[[Floats, Terms], tuple[Floats, Floats]]
    comparable: Callable[[Points], tuple[Bools, Bools]]

    def named(self, theta: Floats) -> dict[str, Floats]:
        """Split parameters into arrays of shape (..., 1) that broadcast against points."""
        return {name: theta[..., i, None] for i, name in enumerate(self.parameters)}


def reported_phases(points: Points) -> Bools:
    """Return a mask of the points whose phase columns describe their plan.

    An asynchronous stack reports the exposed exchange of replicated plans under the optimiser, and
    the model-parallel stacks report nothing useful of plans without model parallelism.
    """
    style = points.workload.data_parallel_stack.phase_style
    if style == "ddp":
        return ~points.is_data_parallel
    return np.full(len(points), True) if style == "zero" else points.is_model_parallel


def p_norm(x: Floats, y: Floats, k: Floats) -> Floats:
    """Return the time of two overlapping activities, ``(x^k + y^k)^(1/k)`` (Morphling, section 4).

    With k = 1 one follows the other; for large k the longer one hides the other.
    """
    # Both are divided by the larger one first, because its power alone could overflow or underflow.
    largest = np.maximum(np.maximum(x, y), np.finfo(np.float64).tiny)
    smaller = np.minimum(x, y) / largest
    return np.asarray(largest * (1.0 + smaller**k) ** (1.0 / k))


def _published_phases(theta: Floats, terms: Terms) -> Phases:
    """Predict iteration times (Morphling, section 4, iteration time)."""
    points, k = terms.points, PUBLISHED.named(theta)
    samples = points.replica_batch_size * points.tokens_share
    forward = terms.profile.per_sample_s * samples / points.tp
    backward = k["k_bwd"] * forward + points.checkpoint_fraction * forward
    forward, backward = forward * terms.bubble_factor, backward * terms.bubble_factor
    # Only the last of *a* micro-steps overlaps the exchange; a pipeline exchanges once, at its end.
    overlapped = np.where(points.is_model_parallel, 1.0, 1.0 / points.n_micro) * backward
    sync = p_norm(overlapped, _exchange_s(terms), k["k_sync"])
    compute = forward + (backward - overlapped) + sync + _model_parallel_s(terms)
    shards = np.where(points.is_zero, points.dp, points.tp * points.pp)
    optimize = k["k_opt"] * terms.parameters / shards
    swap = terms.gradient_bytes / points.dp / terms.constants.pcie_bandwidth_bytes_per_s
    host = k["k_opt_off"] * terms.parameters / (points.dp * points.cpu_threads)
    off_compute = compute - sync + p_norm(sync, swap, k["k_off"])
    compute = np.where(points.is_offload, off_compute, compute)
    optimize = np.where(points.is_offload, p_norm(host, swap, k["k_swap"]), optimize)
    return Phases(compute + optimize + k["k_const"], compute, optimize)


def _bandwidth(terms: Terms) -> Floats:
    constants = terms.constants
    inside = terms.points.n_nodes == 1
    return np.where(inside, constants.intra_bandwidth_bytes_per_s, constants.flat_bandwidth_bytes_per_s)


def _exchange_s(terms: Terms) -> Floats:
    return np.asarray(2.0 * terms.ring_share * terms.gradient_bytes / _bandwidth(terms))


def _model_parallel_s(terms: Terms) -> Floats:
    tensor = terms.tp_bytes / terms.constants.intra_bandwidth_bytes_per_s
    point_to_point = (terms.points.pp - 1.0) * terms.boundary_bytes / _bandwidth(terms)
    return np.asarray(terms.bubble_factor * (tensor + point_to_point))


def _published_work(theta: Floats, terms: Terms) -> tuple[Floats, Floats]:
    points, k = terms.points, PUBLISHED.named(theta)
    samples = points.replica_batch_size * points.tokens_share
    forward = terms.profile.per_sample_s * samples / (points.tp * points.pp)
    passes = 1.0 + k["k_bwd"] + points.checkpoint_fraction
    shards = np.where(points.is_zero, points.dp, points.tp * points.pp)
    update = np.where(points.is_offload, 0.0, k["k_opt"] * terms.parameters / shards)
    swap = 2.0 * terms.gradient_bytes / points.dp / terms.constants.pcie_bandwidth_bytes_per_s
    stage = _model_parallel_s(terms) / terms.bubble_factor / points.pp
    moving = _exchange_s(terms) + stage + np.where(points.is_offload, swap, 0.0)
    return np.asarray(passes * forward + update + k["k_const"]), moving


def _published_comparable(points: Points) -> tuple[Bools, Bools]:
    """Compare the optimiser phase of replicated and model-parallel plans; in others it contains gathers."""
    none = np.zeros(len(points), dtype=bool)
    return none, reported_phases(points) & (points.is_data_parallel | points.is_model_parallel)


PUBLISHED = Form(
    name="published",
    parameters=("k_bwd", "k_sync", "k_opt", "k_opt_off", "k_off", "k_swap", "k_const"),
    phases=_published_phases,
    work=_published_work,
    comparable=_published_comparable,
)


def _extended_phases(theta: Floats, terms: Terms) -> Phases:
    """Predict iteration times; the terms are derived on the background page of the model."""
    points, constants, k = terms.points, terms.constants, EXTENDED.named(theta)
    forward, backward = _forward_backward(k, terms)
    # Replicated: the backward pass overlaps two ring passes, and every device updates all weights.
    compute = forward + p_norm(backward, 2.0 * _ring_s(k, terms), k["k_sync"])
    optimize = k["k_opt"] * terms.parameters + np.zeros_like(compute)
    is_partitioned = points.is_zero | points.is_offload
    if is_partitioned.any():
        scatter = _ring_s(k, terms, partitioned=True)
        gather = scatter / constants.gather_efficiency
    if points.is_zero.any():
        # Partitioned: one pass scatters gradients in the backward pass, one gathers updated weights.
        partitioned = forward + p_norm(backward, scatter, k["k_zero"])
        update = gather + k["k_opt"] * terms.parameters / points.n_gpus
        compute, optimize = _choose(points.is_zero, (partitioned, update), (compute, optimize))
    if points.is_offload.any():
        # Offloaded: scatter and copy overlap with nothing, and the processes of a node share its host.
        copy = terms.gradient_bytes / points.n_gpus / constants.pcie_bandwidth_bytes_per_s
        offloaded = forward + backward + scatter + copy + k["k_off"] * terms.parameters
        alone = k["k_cpu"] * constants.reference_cpu_threads / points.cpu_threads
        shared = constants.host_contention_s * (points.gpus_on_largest_node - 1.0)
        on_host = constants.host_update_s + (alone + shared) / points.n_gpus
        update = gather + on_host * terms.parameters
        compute, optimize = _choose(points.is_offload, (offloaded, update), (compute, optimize))
    total = compute + optimize + k["k_const"]
    if not points.is_model_parallel.any():
        return Phases(total, compute, optimize)
    # Model parallel: the exchange follows the pipeline; some stacks do not report it in the pipeline phase.
    pipeline = terms.bubble_factor * (_passes_s(k, terms) + _activations_s(k, terms))
    update = k["k_opt3"] * terms.parameters / (points.tp * points.pp)
    with_exchange = pipeline + 2.0 * _ring_s(k, terms, stragglers=False)
    is_apart = points.workload.model_parallel_stack.phase_style == "3d"
    reported = pipeline if is_apart else with_exchange
    parallel = points.is_model_parallel
    return Phases(
        np.where(parallel, with_exchange + update + k["k_const3"], total),
        np.where(parallel, reported, compute),
        np.where(parallel, update, optimize),
    )


def _choose(mask: Bools, new: tuple[Floats, Floats], old: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    return np.where(mask, new[0], old[0]), np.where(mask, new[1], old[1])


def _ring_s(k: Values, terms: Terms, stragglers: bool = True, partitioned: bool = False) -> Floats:
    """Return the time of one ring pass: the slower of device link and cards, plus waiting for stragglers."""
    constants = terms.constants
    moved = terms.ring_share * terms.gradient_bytes
    cards = k["k_net"] * moved * terms.points.ring_load / constants.nic_bandwidth_bytes_per_s
    wire = np.maximum(moved / constants.intra_bandwidth_bytes_per_s, cards)
    if not stragglers:
        return wire
    fixed = constants.zero_straggler_s if partitioned else constants.straggler_s
    per_byte = constants.zero_straggler_s_per_byte if partitioned else constants.straggler_s_per_byte
    return np.asarray(wire + (fixed + per_byte * terms.gradient_bytes) * terms.straggler_factor)


def _forward_backward(k: Values, terms: Terms) -> tuple[Floats, Floats]:
    """Return forward and backward time of all micro-steps of a replica without model parallelism."""
    points, constants = terms.points, terms.constants
    is_async = points.workload.data_parallel_stack.phase_style == "ddp"
    launch = constants.async_launch_s if is_async else constants.forward_launch_s
    growing = terms.profile.marginal_s(launch) * points.replica_batch_size
    forward = points.n_micro * launch + growing
    again = constants.recompute_share * points.checkpoint_fraction * forward
    backward = k["k_bwd"] * growing + points.n_micro * constants.backward_launch_s + again
    return forward, backward


def _passes_s(k: Values, terms: Terms) -> Floats:
    """Return forward plus backward time of a replica's batch on a tensor group, summed over stages."""
    samples = terms.points.replica_batch_size * terms.points.tokens_share / terms.points.tp
    passes = 1.0 + k["k_bwd"] + terms.points.checkpoint_fraction
    return np.asarray(passes * (k["k_fwd"] * terms.profile.per_sample_s * samples))


def _activations_s(k: Values, terms: Terms) -> Floats:
    """Return the transfer time of a replica's activations and their gradients, summed over stages."""
    points, constants = terms.points, terms.constants
    tensor = terms.tp_bytes * (
        points.tp_local_share / constants.tp_bandwidth_bytes_per_s
        + points.tp_load / constants.tp_inter_bandwidth_bytes_per_s
    )
    hops = terms.boundary_bytes * (
        points.pp_local_hops / constants.intra_bandwidth_bytes_per_s
        + points.pp_load / constants.p2p_bandwidth_bytes_per_s
    )
    return tensor + k["k_pp"] * hops


def _extended_work(theta: Floats, terms: Terms) -> tuple[Floats, Floats]:
    points, constants, k = terms.points, terms.constants, EXTENDED.named(theta)
    forward, backward = _forward_backward(k, terms)
    shards = np.where(points.is_zero, points.n_gpus, 1)
    update = np.where(points.is_offload, 0.0, k["k_opt"] * terms.parameters / shards)
    computing = forward + backward + update + k["k_const"]
    ring = _ring_s(k, terms, stragglers=False)
    is_partitioned = points.is_zero | points.is_offload
    moving = ring * np.where(is_partitioned, 1.0 + 1.0 / constants.gather_efficiency, 2.0)
    copy = terms.gradient_bytes / points.n_gpus / constants.pcie_bandwidth_bytes_per_s
    moving = moving + np.where(points.is_offload, copy + k["k_off"] * terms.parameters, 0.0)
    if not points.is_model_parallel.any():
        return computing, moving
    passes, activations = _passes_s(k, terms) / points.pp, _activations_s(k, terms) / points.pp
    parallel = passes + k["k_opt3"] * terms.parameters / (points.tp * points.pp) + k["k_const3"]
    return _choose(points.is_model_parallel, (parallel, activations + 2.0 * ring), (computing, moving))


def _extended_comparable(points: Points) -> tuple[Bools, Bools]:
    reported = reported_phases(points)
    return reported, reported


_EXTENDED = "k_bwd k_sync k_zero k_opt k_cpu k_off k_const k_net k_fwd k_pp k_const3 k_opt3"
EXTENDED = Form(
    name="extended",
    parameters=tuple(_EXTENDED.split()),
    phases=_extended_phases,
    work=_extended_work,
    comparable=_extended_comparable,
)
