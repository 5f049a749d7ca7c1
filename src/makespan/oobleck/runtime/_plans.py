"""Plans as plain values, those that cannot be run, and who holds what under one."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from makespan.errors import InputError
from makespan.oobleck.planning import HybridPlan, Pipeline, PipelineTemplate, Stage

__all__ = ["check_plan", "owners", "plan_from", "plan_values"]


def plan_values(plan: HybridPlan) -> list[dict[str, Any]]:
    """Return a plan as plain values."""
    return [asdict(one) for one in plan.pipelines]


def plan_from(values: Sequence[Mapping[str, Any]]) -> HybridPlan:
    """Build a plan from the values of `plan_values`."""
    return HybridPlan(
        tuple(
            Pipeline(tuple(one["nodes"]), _template(one["template"]), one["n_microbatches"]) for one in values
        )
    )


def _template(values: Mapping[str, Any]) -> PipelineTemplate:
    return PipelineTemplate(**{**values, "stages": tuple(Stage(**one) for one in values["stages"])})


def check_plan(plan: HybridPlan, n_layers: int, n_microbatches: int) -> None:
    """Refuse a plan that cannot be run; an `InputError` names what it is."""
    if len(set(plan.nodes)) != len(plan.nodes):
        raise InputError(f"plan with nodes {plan.nodes}; accepted: each node once")
    if (found := sum(one.n_microbatches for one in plan.pipelines)) != n_microbatches:
        raise InputError(f"plan of {found} microbatches; accepted: those of the job, {n_microbatches}")
    for number, one in enumerate(plan.pipelines):
        stages, where = one.template.stages, f"pipeline {number} on nodes {one.nodes}"
        if one.n_microbatches < 1:
            raise InputError(f"{where} has {one.n_microbatches} microbatches; accepted: 1 or more")
        if many := [stage.n_gpus for stage in stages if stage.n_gpus != 1]:
            raise InputError(f"{where} has a stage on {many[0]} GPUs; accepted in a run: one GPU a stage")
        if len(stages) != len(one.nodes):
            raise InputError(f"{where} has {len(stages)} stages; accepted in a run: one a node")
        bounds = [0, *(stage.end_layer for stage in stages)]
        if [stage.first_layer for stage in stages] != bounds[:-1] or bounds[-1] != n_layers:
            raise InputError(f"{where} has stages that end at {bounds[1:]}; accepted: all {n_layers} layers")


def owners(plan: HybridPlan, layer: int) -> tuple[int, ...]:
    """Return the nodes that hold a layer, in the order of their pipelines."""
    return tuple(
        node
        for one in plan.pipelines
        for node, stage in zip(one.nodes, one.template.stages, strict=True)
        if layer in stage.layers
    )
