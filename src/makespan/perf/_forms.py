"""The forms of the performance model: what a form is, the one of the paper and the one the traces ask for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from makespan.perf._environment import Constants
from makespan.perf._points import Points

__all__ = [
    "EXTENDED",
    "Form",
    "PUBLISHED",
    "Phases",
    "Profile",
    "Terms",
    "p_norm",
    "reported_phases",
]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
_PARAMETER_UNIT = 1e9  # costs a parameter are fitted per 1e9 parameters, so that they are of order one

_HALF = 2  # bytes of one 16-bit activation
_ALL_REDUCES = 4  # a layer: two forward, two backward (Shoeybi et al. 2019, section 3)
_ALL_REDUCE_PASSES = 2  # reduce-scatter and all-gather
_DIRECTIONS = 2  # activations forward, their gradients back
_MOST_FIXED = 0.8  # a profile that is all fixed cost says nothing of a sample
Values = dict[str, Floats]


@dataclass(frozen=True, slots=True)
class Profile:
    """The forward time of so many samples of a model on one device, from one profiled run."""

    time_s: float
    samples: float
    n_micro: float  # passes it was taken in; 0 if the time is free of the fixed cost of a pass
    origin: str

    @property
    def per_sample_s(self) -> float:
        """Forward time of a sample, the fixed cost of the passes included."""
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
        """Expected largest of n exponential delays over their mean, less that of one node."""
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

    ``comparable`` says where the reported compute and optimiser phases mean what the form predicts. ``work``
    gives the times in a step [s] in which the devices of a job compute, fixed costs included, and in which
    its data move; pipeline bubbles, waiting for stragglers and updates on the host are neither.
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
    """Whether the phase columns of a point are those of its plan.

    An asynchronous stack reports the exposed exchange of replicated plans under the optimiser, and
    the model-parallel stacks report nothing useful of plans without model parallelism.
    """
    style = points.workload.data_parallel_stack.phase_style
    if style == "ddp":
        return ~points.is_data_parallel
    return np.full(len(points), True) if style == "zero" else points.is_model_parallel


def p_norm(x: Floats, y: Floats, k: Floats) -> Floats:
    """Overlap of two activities, ``(x^k + y^k)^(1/k)``: 1 in turn, large hidden (Morphling, section 4)."""
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
    # Only the last of a micro-steps overlaps the exchange; a pipeline exchanges once, at its end.
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
    """Compare the optimiser phase of replicated and model-parallel plans: others contain gathers."""
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
    points, k = terms.points, EXTENDED.named(theta)
    compute, optimize = _replicated(k, terms)
    if points.is_zero.any():
        compute, optimize = _choose(points.is_zero, _partitioned(k, terms), (compute, optimize))
    if points.is_offload.any():
        compute, optimize = _choose(points.is_offload, _offloaded(k, terms), (compute, optimize))
    total = compute + optimize + k["k_const"]
    if not points.is_model_parallel.any():
        return Phases(total, compute, optimize)
    pipeline, exchange, update = _model_parallel(k, terms)
    with_exchange = pipeline + exchange
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
    """Time of one ring pass: the slower of device link and cards, plus waiting for stragglers."""
    constants = terms.constants
    moved = terms.ring_share * terms.gradient_bytes
    cards = k["k_net"] * moved * terms.points.ring_load / constants.nic_bandwidth_bytes_per_s
    wire = np.maximum(moved / constants.intra_bandwidth_bytes_per_s, cards)
    if not stragglers:
        return wire
    fixed = constants.zero_straggler_s if partitioned else constants.straggler_s
    a_byte = constants.zero_straggler_s_per_byte if partitioned else constants.straggler_s_per_byte
    return np.asarray(wire + (fixed + a_byte * terms.gradient_bytes) * terms.straggler_factor)


def _forward_backward(k: Values, terms: Terms) -> tuple[Floats, Floats]:
    """Forward and backward time of all micro-steps of a replica without model parallelism."""
    points, constants = terms.points, terms.constants
    is_async = points.workload.data_parallel_stack.phase_style == "ddp"
    launch = constants.async_launch_s if is_async else constants.forward_launch_s
    growing = terms.profile.marginal_s(launch) * points.replica_batch_size
    forward = points.n_micro * launch + growing
    again = constants.recompute_share * points.checkpoint_fraction * forward
    backward = k["k_bwd"] * growing + points.n_micro * constants.backward_launch_s + again
    return forward, backward


def _replicated(k: Values, terms: Terms) -> tuple[Floats, Floats]:
    forward, backward = _forward_backward(k, terms)
    compute = forward + p_norm(backward, 2.0 * _ring_s(k, terms), k["k_sync"])
    return compute, k["k_opt"] * terms.parameters + np.zeros_like(compute)


def _partitioned(k: Values, terms: Terms) -> tuple[Floats, Floats]:
    forward, backward = _forward_backward(k, terms)
    scatter = _ring_s(k, terms, partitioned=True)
    compute = forward + p_norm(backward, scatter, k["k_zero"])
    gather = scatter / terms.constants.gather_efficiency
    return compute, gather + k["k_opt"] * terms.parameters / terms.points.n_gpus


def _offloaded(k: Values, terms: Terms) -> tuple[Floats, Floats]:
    points, constants = terms.points, terms.constants
    forward, backward = _forward_backward(k, terms)
    scatter = _ring_s(k, terms, partitioned=True)
    copy = terms.gradient_bytes / points.n_gpus / constants.pcie_bandwidth_bytes_per_s
    compute = forward + backward + scatter + copy + k["k_off"] * terms.parameters
    own = k["k_cpu"] * constants.reference_cpu_threads / points.cpu_threads
    shared = constants.host_contention_s * (points.gpus_on_largest_node - 1.0)
    update = constants.host_update_s + (own + shared) / points.n_gpus
    return compute, scatter / constants.gather_efficiency + update * terms.parameters


def _passes_s(k: Values, terms: Terms) -> Floats:
    """Forward and backward time of a replica's batch on one tensor-parallel group, all stages in turn."""
    samples = terms.points.replica_batch_size * terms.points.tokens_share / terms.points.tp
    passes = 1.0 + k["k_bwd"] + terms.points.checkpoint_fraction
    return np.asarray(passes * (k["k_fwd"] * terms.profile.per_sample_s * samples))


def _activations_s(k: Values, terms: Terms) -> Floats:
    """Time in which the activations of a replica's batch and their gradients move, all stages in turn."""
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


def _model_parallel(k: Values, terms: Terms) -> tuple[Floats, Floats, Floats]:
    """Pipeline, gradient exchange and optimiser times."""
    points = terms.points
    pipeline = terms.bubble_factor * (_passes_s(k, terms) + _activations_s(k, terms))
    exchange = 2.0 * _ring_s(k, terms, stragglers=False)
    return pipeline, exchange, k["k_opt3"] * terms.parameters / (points.tp * points.pp)


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
