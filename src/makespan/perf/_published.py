"""The form of the paper: seven parameters, one flat bandwidth between nodes."""

import numpy as np
import numpy.typing as npt

from makespan.perf._forms import Form, Phases, Terms, p_norm, reported_phases
from makespan.perf._points import Points

__all__ = ["PUBLISHED"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def _phases(theta: Floats, terms: Terms) -> Phases:
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
    optimize = k["k_opt"] * terms.parameters / _shards(terms)
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


def _shards(terms: Terms) -> Floats:
    points = terms.points
    return np.asarray(np.where(points.is_zero, points.dp, points.tp * points.pp))


def _comparable(points: Points) -> tuple[Bools, Bools]:
    """Compare the optimiser phase of replicated and model-parallel plans alone.

    The other phases contain exposed gathers, or lack the exchange, which this form does not tell
    apart.
    """
    none = np.zeros(len(points), dtype=bool)
    return none, reported_phases(points) & (points.is_data_parallel | points.is_model_parallel)


PUBLISHED = Form(
    name="published",
    parameters=("k_bwd", "k_sync", "k_opt", "k_opt_off", "k_off", "k_swap", "k_const"),
    phases=_phases,
    comparable=_comparable,
)
