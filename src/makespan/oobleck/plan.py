"""Pipeline stages, templates and plans: the values that planner, reconfiguration and runtime exchange."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from makespan.errors import InputError

Hosts = Mapping[int, object]
"""Machine of each node; a node that is not named is a machine of its own."""


def host_of(hosts: Hosts, node: int) -> object:
    """Return the machine of a node."""
    return hosts.get(node, ("node", node))


def cut(nodes: Iterable[int], sizes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Cut the nodes into groups of these sizes."""
    left = iter(nodes)
    return tuple(tuple(islice(left, size)) for size in sizes)


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers of a model on GPUs of one node.

    Parameters
    ----------
    first_layer, end_layer
        First layer, and the layer after the last.
    n_gpus
        GPUs that share the stage.
    latency_s
        Forward and backward pass of one microbatch [s].
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
    """Pipeline for a number of nodes that are not yet named.

    Parameters
    ----------
    n_nodes, gpus_per_node
        Number of nodes, and GPUs of each.
    stages
        All layers of the model, in order.
    time_s
        Cost by which the search compares pipelines, for 3 S + 1 microbatches in S stages; with
        interleaved stages the simulated time of as many on S nodes [s].
    interleave
        Stages that a node with one GPU runs one at a time: stage k is on node k mod ``n_nodes``.
    """

    n_nodes: int
    gpus_per_node: int
    stages: tuple[Stage, ...]
    time_s: float
    interleave: int = 1

    @property
    def n_stages(self) -> int:
        """Return the number of stages."""
        return len(self.stages)

    @property
    def n_layers(self) -> int:
        """Return the number of layers of the model."""
        return self.stages[-1].end_layer

    def stages_of(self, place: int) -> tuple[Stage, ...]:
        """Return the stages of a node with one GPU, given its place in the pipeline."""
        return self.stages[place :: self.n_nodes]

    @property
    def imbalance(self) -> float:
        """Return the latency of the slowest stage over the mean of all."""
        latencies = [stage.latency_s for stage in self.stages]
        return max(latencies) * len(latencies) / sum(latencies)

    def rank_grid(self, ranks: Sequence[int], n_slots: int | None = None) -> dict[int, tuple[int, ...]]:
        """Return the ranks that hold each layer, given the ranks of all GPUs in order.

        With ``n_slots`` every layer is divided into so many equal parts, a unit that stages with different
        numbers of GPUs have in common; the result then has one rank per part.
        """
        n_gpus = sum(stage.n_gpus for stage in self.stages) // self.interleave
        if len(ranks) != n_gpus:
            raise InputError(f"{len(ranks)} ranks for a template of {n_gpus} GPUs; expected one each")
        widest = max(stage.n_gpus for stage in self.stages)
        if n_slots is not None and (n_slots < widest or n_slots % widest):
            raise InputError(f"{n_slots} slots for stages of up to {widest} GPUs; expected multiples of that")
        left = cycle(ranks)
        grid: dict[int, tuple[int, ...]] = {}
        for stage in self.stages:
            held = tuple(islice(left, stage.n_gpus))
            count = n_slots or stage.n_gpus
            parts = tuple(held[slot * stage.n_gpus // count] for slot in range(count))
            grid |= dict.fromkeys(stage.layers, parts)
        return grid


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Template on nodes, with its number of microbatches per iteration.

    The number of a node is never used again for another node.
    """

    nodes: tuple[int, ...]
    template: PipelineTemplate
    n_microbatches: int


@dataclass(frozen=True, slots=True)
class HybridPlan:
    """Pipelines that train one model together, in the order in which their gradients are added.

    Parameters
    ----------
    pipelines
        All pipelines; those of a plan with lost nodes have the same stages.
    lost
        Nodes of the pipelines that are lost, ascending. Their microbatches run on other nodes of their stage.
    """

    pipelines: tuple[Pipeline, ...]
    lost: tuple[int, ...] = ()

    @property
    def nodes(self) -> tuple[int, ...]:
        """Return all nodes but lost ones, pipeline by pipeline."""
        return tuple(node for pipeline in self.pipelines for node in pipeline.nodes if node not in self.lost)

    def nodes_text(self) -> str:
        """Return the nodes stage by stage and pipeline by pipeline, ``-`` for a lost one: ``0/-+2/3``."""
        return "+".join(
            "/".join("-" if node in self.lost else str(node) for node in pipeline.nodes)
            for pipeline in self.pipelines
        )


def check_plan(plan: HybridPlan, n_layers: int, n_microbatches: int) -> None:
    """Reject a plan that cannot be run, with an `InputError`."""
    nodes = [node for pipeline in plan.pipelines for node in pipeline.nodes]
    if len(set(nodes)) != len(nodes):
        raise InputError(f"plan with nodes {tuple(nodes)}; expected each node once")
    if unknown := sorted(set(plan.lost) - set(nodes)):
        raise InputError(f"plan without node(s) {unknown}; expected nodes of its pipelines, {sorted(nodes)}")
    if (total := sum(pipeline.n_microbatches for pipeline in plan.pipelines)) != n_microbatches:
        raise InputError(f"plan of {total} microbatches; expected those of the job, {n_microbatches}")
    for number, pipeline in enumerate(plan.pipelines):
        stages, where = pipeline.template.stages, f"pipeline {number} on nodes {pipeline.nodes}"
        if pipeline.n_microbatches < 1:
            raise InputError(f"{where} has {pipeline.n_microbatches} microbatches; expected 1 or more")
        if many := [stage.n_gpus for stage in stages if stage.n_gpus != 1]:
            raise InputError(f"{where} has a stage on {many[0]} GPUs; expected one GPU per stage")
        each, n_nodes = pipeline.template.interleave, pipeline.template.n_nodes
        if len(stages) != len(pipeline.nodes) * each or len(pipeline.nodes) != n_nodes:
            expected = f"{'one' if each == 1 else each} per node"
            raise InputError(f"{where} has {len(stages)} stages; expected {expected}")
        if n_nodes == 1 < len(stages):
            raise InputError(f"{where} has {len(stages)} stages on a single node; expected one")
        bounds = [0, *(stage.end_layer for stage in stages)]
        if [stage.first_layer for stage in stages] != bounds[:-1] or bounds[-1] != n_layers:
            raise InputError(f"{where} has stages that end at {bounds[1:]}; expected all {n_layers} layers")
    if plan.lost and 0 in (live := live_workers(plan)):
        raise InputError(f"stage {live.index(0)} has no live worker; expected one or more in every stage")


def live_workers(plan: HybridPlan) -> tuple[int, ...]:
    """Return the nodes that are left of each stage.

    Raises `InputError` if pipelines have different stages, or nodes run several.
    """
    if len({pipeline.template.stages for pipeline in plan.pipelines}) != 1:
        raise InputError("pipelines have different stages; expected the same in all of them")
    if plan.pipelines[0].template.interleave > 1:
        raise InputError("nodes run several stages each; expected one, without interleave")
    stages = zip(*(pipeline.nodes for pipeline in plan.pipelines), strict=True)
    return tuple(sum(node not in plan.lost for node in stage) for stage in stages)


def owners(plan: HybridPlan, layer: int) -> tuple[int, ...]:
    """Return the nodes that hold a layer, in the order of their pipelines."""
    return tuple(
        node
        for pipeline in plan.pipelines
        for place, node in enumerate(pipeline.nodes)
        if any(layer in stage.layers for stage in pipeline.template.stages_of(place))
        and node not in plan.lost
    )
