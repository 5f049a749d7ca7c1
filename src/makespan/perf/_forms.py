"""What a form of the performance model is, and the pieces that both forms share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from makespan.perf._environment import Constants
from makespan.perf._points import Points

__all__ = ["PARAMETER_UNIT", "Form", "Phases", "Profile", "Terms", "p_norm", "reported_phases"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

PARAMETER_UNIT = 1e9
"""Costs a parameter are fitted in seconds per 1e9 parameters, so that they are of order one."""

_HALF = 2  # bytes of one 16-bit activation
_ALL_REDUCES = 4  # a layer: two forward, two backward (Shoeybi et al. 2019, section 3)
_ALL_REDUCE_PASSES = 2  # reduce-scatter and all-gather
_DIRECTIONS = 2  # activations forward, their gradients back


@dataclass(frozen=True, slots=True)
class Profile:
    """The forward time of a model, from one profiled run.

    Parameters
    ----------
    time_s
        Forward time of ``samples`` samples on one device.
    samples
        Samples that it is for.
    n_micro
        Passes it was taken in; 0 if the time is free of the fixed cost of a pass.
    origin
        How it was obtained.
    """

    time_s: float
    samples: float
    n_micro: float
    origin: str

    @property
    def per_sample_s(self) -> float:
        """Forward time of a sample, the fixed cost of the passes included."""
        return self.time_s / self.samples

    def marginal_s(self, launch_s: float) -> float:
        """Forward time of one more sample, given the fixed cost of a pass."""
        fixed = min(self.n_micro * launch_s, _MOST_FIXED * self.time_s)
        return (self.time_s - fixed) / self.samples


_MOST_FIXED = 0.8  # a profile that is all fixed cost says nothing of a sample


class Phases(NamedTuple):
    """Predicted times in seconds, each of shape (..., n)."""

    iter_time_s: Floats
    compute_s: Floats
    """Forward, backward and synchronisation, as the traces report them together."""
    optimize_s: Floats


@dataclass(frozen=True)
class Terms:
    """Inputs of a form that do not depend on the fitted parameters.

    Volumes are in bytes, arrays have shape (n,).
    """

    points: Points
    profile: Profile
    constants: Constants

    @cached_property
    def parameters(self) -> float:
        """Parameters of the model in `PARAMETER_UNIT`."""
        return self.points.workload.model.parameters / PARAMETER_UNIT

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
        return (
            _HALF
            * _DIRECTIONS
            * self._tokens_times_hidden(every_layer=False)
            * self.points.replica_batch_size
        )

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
    """One form of the performance model.

    Parameters
    ----------
    name
        ``published`` or ``extended``.
    parameters
        Names of the fitted parameters, in the order of the last axis of ``theta``.
    phases
        From parameters of shape (..., n_parameters) and terms of n points to `Phases`.
    comparable
        For which points the reported compute and optimiser phases mean what the form predicts.
    """

    name: str
    parameters: tuple[str, ...]
    phases: Callable[[Floats, Terms], Phases]
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
    """Overlap of two activities, ``(x^k + y^k)^(1/k)``.

    ``k = 1`` is one after the other, ``k -> inf`` fully hidden (Morphling, section 4).

    Parameters
    ----------
    x, y
        Times, not negative, broadcastable.
    k
        Exponent, at least 1.
    """
    largest = np.maximum(np.maximum(x, y), np.finfo(np.float64).tiny)
    smaller = np.minimum(x, y) / largest
    return np.asarray(largest * (1.0 + smaller**k) ** (1.0 / k))
