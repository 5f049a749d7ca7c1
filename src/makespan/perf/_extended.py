"""The form that the measured traces ask for: network cards, stragglers, exposed gathers, host contention."""

import numpy as np
import numpy.typing as npt

from makespan.perf._forms import Form, Phases, Terms, p_norm, reported_phases
from makespan.perf._points import Points

__all__ = ["EXTENDED"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Values = dict[str, Floats]


def _phases(theta: Floats, terms: Terms) -> Phases:
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
    reported = pipeline if _exchange_is_apart(terms) else with_exchange
    parallel = points.is_model_parallel
    return Phases(
        np.where(parallel, with_exchange + update + k["k_const3"], total),
        np.where(parallel, reported, compute),
        np.where(parallel, update, optimize),
    )


def _choose(mask: Bools, new: tuple[Floats, Floats], old: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    return np.where(mask, new[0], old[0]), np.where(mask, new[1], old[1])


def _exchange_is_apart(terms: Terms) -> bool:
    return terms.points.workload.model_parallel_stack.phase_style == "3d"


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


def _model_parallel(k: Values, terms: Terms) -> tuple[Floats, Floats, Floats]:
    """Pipeline, gradient exchange and optimiser times."""
    points, constants = terms.points, terms.constants
    samples = points.replica_batch_size * points.tokens_share / points.tp
    forward = k["k_fwd"] * terms.profile.per_sample_s * samples
    passes = 1.0 + k["k_bwd"] + points.checkpoint_fraction
    tensor = terms.tp_bytes * (
        points.tp_local_share / constants.tp_bandwidth_bytes_per_s
        + points.tp_load / constants.tp_inter_bandwidth_bytes_per_s
    )
    hops = terms.boundary_bytes * (
        points.pp_local_hops / constants.intra_bandwidth_bytes_per_s
        + points.pp_load / constants.p2p_bandwidth_bytes_per_s
    )
    pipeline = terms.bubble_factor * (passes * forward + tensor + k["k_pp"] * hops)
    exchange = 2.0 * _ring_s(k, terms, stragglers=False)
    return pipeline, exchange, k["k_opt3"] * terms.parameters / (points.tp * points.pp)


def _comparable(points: Points) -> tuple[Bools, Bools]:
    reported = reported_phases(points)
    return reported, reported


EXTENDED = Form(
    name="extended",
    parameters=(
        "k_bwd",
        "k_sync",
        "k_zero",
        "k_opt",
        "k_cpu",
        "k_off",
        "k_const",
        "k_net",
        "k_fwd",
        "k_pp",
        "k_const3",
        "k_opt3",
    ),
    phases=_phases,
    comparable=_comparable,
)
