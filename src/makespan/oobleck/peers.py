"""Peers that run the microbatches of lost nodes while training goes on, as in ReCycle (SOSP 2024).

A plan with lost nodes (`HybridPlan.lost`) keeps its pipelines, and every microbatch its pipeline. At the
stage of a lost node it runs on another node of that stage. `makespan.oobleck.rerouting` says on which, and
gives the order of all passes.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from makespan.oobleck.plan import HybridPlan, PipelineTemplate, live_workers
from makespan.oobleck.rerouting import ScheduledPass, StagePasses, Techniques, make_schedule, routes

_LEAST_SHARE = 1e-3
"""Least time of a stage in a schedule, as a share of that of the slowest: a pass must take some time."""


@dataclass(frozen=True, slots=True)
class PeerSchedule:
    """One iteration of a plan with lost nodes.

    Parameters
    ----------
    paths
        Nodes that run a microbatch, stage by stage, by pipeline and number of the microbatch in it.
    steps
        All passes in the order of their start; times are shares of the slowest stage.
    apart
        Pipelines and stages whose gradients no single node adds up in the order of the microbatches, so that
        those of each microbatch are kept until they are.
    """

    paths: Mapping[tuple[int, int], tuple[int, ...]]
    steps: tuple[ScheduledPass, ...]
    apart: frozenset[tuple[int, int]]


def _paths(plan: HybridPlan) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the nodes that run each microbatch, stage by stage."""
    counts = [pipeline.n_microbatches for pipeline in plan.pipelines]
    gone = {
        (number, stage)
        for number, pipeline in enumerate(plan.pipelines)
        for stage, node in enumerate(pipeline.nodes)
        if node in plan.lost
    }
    return {
        key: tuple(plan.pipelines[number].nodes[stage] for stage, number in enumerate(path))
        for key, path in routes(counts, len(live_workers(plan)), gone).items()
    }


def rerouted_counts(plan: HybridPlan) -> dict[int, int]:
    """Return the microbatches of lost nodes that each of their peers runs in an iteration, by node."""
    if not plan.lost:
        return {}
    counts = Counter(
        runner
        for (number, _), path in _paths(plan).items()
        for node, runner in zip(plan.pipelines[number].nodes, path, strict=True)
        if runner != node
    )
    return dict(sorted(counts.items()))


def template_passes(template: PipelineTemplate) -> StagePasses:
    """Return passes of the stages as shares of the slowest; backward ones are twice as long as forward."""
    latencies = [stage.latency_s for stage in template.stages]
    longest_s = max(latencies)
    shares = [max(each / longest_s, _LEAST_SHARE) if longest_s > 0 else 1.0 for each in latencies]
    return StagePasses.split([share / 3 for share in shares], [2 * share / 3 for share in shares])


@lru_cache(maxsize=8)
def peer_schedule(plan: HybridPlan, splits_backward: bool) -> PeerSchedule:
    """Return who runs what, and in which order; all nodes of a plan find the same.

    The schedule takes backward passes to be twice as long as forward ones, and a stage to keep as many
    microbatches as there are stages, as the first one does under 1F1B.
    """
    paths = _paths(plan)
    numbers = {
        node: (number, stage)
        for number, pipeline in enumerate(plan.pipelines)
        for stage, node in enumerate(pipeline.nodes)
    }
    schedule = make_schedule(
        template_passes(plan.pipelines[0].template),
        [pipeline.n_microbatches for pipeline in plan.pipelines],
        [numbers[node] for node in plan.lost],
        Techniques(splits_backward=splits_backward, staggers_optimizer=False),
    )
    orders: dict[tuple[int, int], dict[str, list[int]]] = {}
    for step in schedule.steps:
        if step.kind != "F":
            of_kind = orders.setdefault((step.pipeline, step.stage), {})
            of_kind.setdefault(step.kind, []).append(step.microbatch)
    apart = frozenset(
        (number, stage)
        for (number, stage), kinds in orders.items()
        if len({paths[number, each][stage] for each in kinds["B"]}) > 1
        or any(order != sorted(order) for order in kinds.values())
    )
    return PeerSchedule(paths, schedule.steps, apart)
