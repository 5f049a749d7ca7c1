"""Stages, templates and plans: what planning, reconfiguration and training hand to each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from makespan.errors import InputError

__all__ = ["HybridPlan", "Pipeline", "PipelineTemplate", "Stage"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers of a model on GPUs of one node.

    Parameters
    ----------
    first_layer, end_layer
        The layers, from the first to the one behind the last.
    n_gpus
        GPUs that share the stage.
    latency_s
        Forward and backward pass of one microbatch.
    """

    first_layer: int
    end_layer: int
    n_gpus: int
    latency_s: float

    @property
    def layers(self) -> range:
        """Return the indices of the layers."""
        return range(self.first_layer, self.end_layer)


@dataclass(frozen=True, slots=True)
class PipelineTemplate:
    """A pipeline for a number of nodes, none of them named.

    Parameters
    ----------
    n_nodes, gpus_per_node
        For what it is made.
    stages
        All layers of the model, in order.
    time_s
        Cost of the search, of three times as many microbatches as stages and one.
    """

    n_nodes: int
    gpus_per_node: int
    stages: tuple[Stage, ...]
    time_s: float

    @property
    def n_stages(self) -> int:
        """Return the number of stages."""
        return len(self.stages)

    @property
    def n_layers(self) -> int:
        """Return the number of layers of the model."""
        return self.stages[-1].end_layer

    @property
    def imbalance(self) -> float:
        """Return the latency of the slowest stage over the mean of all."""
        latencies = [stage.latency_s for stage in self.stages]
        return max(latencies) * len(latencies) / sum(latencies)

    def rank_grid(self, ranks: Sequence[int], n_slots: int | None = None) -> dict[int, tuple[int, ...]]:
        """Return which ranks hold each layer, given those of all GPUs in order.

        With a number of slots every layer is so many equal parts, which stages with different numbers of GPUs
        have in common, and the ranks are those of its parts.
        """
        n_gpus = sum(stage.n_gpus for stage in self.stages)
        if len(ranks) != n_gpus:
            raise InputError(f"{len(ranks)} ranks for a template of {n_gpus} GPUs; accepted: one each")
        widest = max(stage.n_gpus for stage in self.stages)
        if n_slots is not None and (n_slots < widest or n_slots % widest):
            raise InputError(
                f"{n_slots} slots for stages of up to {widest} GPUs; accepted: multiples of that"
            )
        left = iter(ranks)
        grid: dict[int, tuple[int, ...]] = {}
        for stage in self.stages:
            held = tuple(islice(left, stage.n_gpus))
            count = n_slots or stage.n_gpus
            parts = tuple(held[slot * stage.n_gpus // count] for slot in range(count))
            grid |= dict.fromkeys(stage.layers, parts)
        return grid


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A template on nodes; an iteration gives it so many microbatches.

    Nodes are numbers that are never used for another node.
    """

    nodes: tuple[int, ...]
    template: PipelineTemplate
    n_microbatches: int


@dataclass(frozen=True, slots=True)
class HybridPlan:
    """Pipelines that train one model together, in the order in which their gradients are added."""

    pipelines: tuple[Pipeline, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Return all nodes, pipeline by pipeline."""
        return tuple(node for one in self.pipelines for node in one.nodes)
