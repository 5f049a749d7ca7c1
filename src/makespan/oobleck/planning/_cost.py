"""What a pipeline costs: latencies of stages in whole picoseconds, and the time that a search compares.

The cost is that of a pipeline which is filled, is held up by its slowest stage, and drains: with latencies
L of S stages, m the largest of them, k the last stage that has it, and N microbatches,

    T = sum(L) + (N - S + k) m + sum(L[k:])

where N is 3 S + 1 unless a number is given, and a single stage counts 4 L, as in the artifact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from makespan.errors import InputError
from makespan.oobleck.planning._profile import PICOSECONDS, ModelProfile

__all__ = ["REFERENCE", "CostRule", "Ints", "MemoryLimit", "StageTimes", "pipeline_cost"]

Ints = NDArray[np.int64]

_Number = TypeVar("_Number", np.int64, np.float64)


@dataclass(frozen=True, slots=True)
class CostRule:
    """How often the slowest stage counts.

    Parameters
    ----------
    n_microbatches
        Microbatches that a pipeline is priced for; None for three times as many as stages and one. Pipelines
        of more stages than microbatches are not considered.
    """

    n_microbatches: int | None = None

    def __post_init__(self) -> None:
        if self.n_microbatches is not None and self.n_microbatches < 1:
            raise InputError(f"cost of {self.n_microbatches} microbatches; accepted: 1 or more")

    def allows(self, n_stages: int) -> bool:
        """Whether a pipeline of so many stages has a price."""
        return self.n_microbatches is None or n_stages <= self.n_microbatches

    def steady(self, n_stages: int) -> int:
        """Return how often the slowest stage counts, beside once for each stage before it."""
        if self.n_microbatches is not None:
            return self.n_microbatches - n_stages
        return 2 * n_stages + 1 if n_stages > 1 else 2


REFERENCE = CostRule()
"""The rule of the artifact."""


def pipeline_cost(latencies: Sequence[int], rule: CostRule = REFERENCE) -> int:
    """Return the cost of stages with these latencies; the last of several slowest ones counts."""
    slowest = max(latencies)
    last = max(index for index, latency in enumerate(latencies) if latency == slowest)
    return sum(latencies) + (rule.steady(len(latencies)) + last) * slowest + sum(latencies[last:])


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory of a GPU, and what training holds of a layer.

    Parameters
    ----------
    device_bytes
        Memory of one GPU [B]; GPUs that share a stage share what it holds.
    state_factor
        Bytes held for each byte of parameters: weights, gradients, two moments and working copies.
    counts_in_flight
        Whether a stage keeps the activations of as many microbatches as there are stages from it to the
        end, as one forward, one backward needs; else those of one, as in the artifact.
    """

    device_bytes: float
    state_factor: float = 6.0
    counts_in_flight: bool = True

    def __post_init__(self) -> None:
        if not (self.device_bytes > 0 and self.state_factor > 0):
            raise InputError(
                f"memory of {self.device_bytes} bytes with {self.state_factor} bytes of state a byte of "
                "parameters; accepted: numbers above 0"
            )


class StageTimes:
    """Latency and memory of every possible stage, ``[first_layer, end_layer]``, (n_layers + 1, n_layers + 1).

    Parameters
    ----------
    profile
        Times of the layers.
    gpus_per_node
        GPUs that a stage may have: 1, 2, 4 ... up to these.
    memory
        What a GPU holds; None for no limit.

    Raises
    ------
    InputError
        A layer has no exchange time for a number of GPUs that a stage may have; layer and key are named.
    """

    def __init__(self, profile: ModelProfile, gpus_per_node: int, memory: MemoryLimit | None = None) -> None:
        if gpus_per_node < 1:
            raise InputError(f"{gpus_per_node} GPUs a node; accepted: 1 or more")
        self.n_layers = profile.n_layers
        self.gpus_per_node = gpus_per_node
        self.memory = memory
        self.widths = tuple(1 << bit for bit in range(gpus_per_node.bit_length()))
        forward = _whole([layer.forward_s for layer in profile.layers])
        both = forward + _whole([layer.backward_s for layer in profile.layers])
        self.latency = {width: _between(both) for width in self.widths[:1]}
        for width in self.widths[1:]:
            exchange = 2 * _between(_whole(list(_exchanges(profile, width))))
            self.latency[width] = (self.latency[1] + width // 2) // width + exchange
        state = memory.state_factor if memory else 0.0
        self._state = _between(np.array([state * layer.parameter_bytes for layer in profile.layers]))
        self._activations = _between(np.array([layer.activation_bytes for layer in profile.layers]))
        order = np.arange(self.n_layers + 1)
        self._is_stage = order[:, None] < order[None, :]

    def allowed(self, width: int, behind: int) -> NDArray[np.bool_]:
        """Return which stages on so many GPUs, with so many stages behind them, fit into memory."""
        if self.memory is None:
            return self._is_stage
        in_flight = behind + 1 if self.memory.counts_in_flight else 1
        held = self._state + in_flight * self._activations
        return np.asarray(self._is_stage & (held <= width * self.memory.device_bytes))

    def stage_counts(self, n_nodes: int, rule: CostRule) -> range:
        """Return how many stages a pipeline on so many nodes may have; a stage has 1, 2, 4 ... GPUs."""
        least = n_nodes * self.gpus_per_node.bit_count()
        most = min(self.n_layers, n_nodes * self.gpus_per_node)
        if rule.n_microbatches is not None:
            most = min(most, rule.n_microbatches)
        return range(least, most + 1)


def _exchanges(profile: ModelProfile, width: int) -> Iterator[float]:
    for index, layer in enumerate(profile.layers):
        if width not in layer.allreduce_in_node_s:
            known = ", ".join(map(str, sorted(layer.allreduce_in_node_s))) or "none"
            raise InputError(
                f"profile {profile.name!r}: layer {index} has no allreduce_in_node_ms for {width} GPUs; "
                f"it has: {known}"
            )
        yield layer.allreduce_in_node_s[width]


def _whole(times_s: list[float]) -> Ints:
    return np.array([round(value * PICOSECONDS) for value in times_s], dtype=np.int64)


def _between(values: NDArray[_Number]) -> NDArray[_Number]:
    """Return sums over layers from row to column, negative below the diagonal."""
    ends = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
    return np.asarray(ends[None, :] - ends[:, None])
