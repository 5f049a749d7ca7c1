"""Search for the fastest feasible plan."""

from collections.abc import Iterable
from dataclasses import dataclass

from makespan.errors import InfeasiblePlanError
from makespan.hardware import ClusterSpec, NodeSpec
from makespan.perf._fit import Fit
from makespan.perf._points import points_from_plans
from makespan.plans import (
    ExecutionPlan,
    Placement,
    PlanFamily,
    enumerate_plans,
    memory_estimate,
    resolve_micro_batch,
)
from makespan.workloads import Workload

__all__ = ["RankedPlan", "best_plan", "feasible_plans", "rank_plans"]


@dataclass(frozen=True, slots=True)
class RankedPlan:
    """A feasible plan and its predicted iteration time [s]."""

    plan: ExecutionPlan
    placement: Placement
    iter_time_s: float

    @property
    def throughput_samples_per_s(self) -> float:
        """Predicted throughput."""
        return self.plan.global_batch_size / self.iter_time_s


def feasible_plans(
    workload: Workload,
    placement: Placement,
    node: NodeSpec,
    cpu_threads: int | None = None,
    families: Iterable[PlanFamily | str] | None = None,
) -> list[ExecutionPlan]:
    """Return every plan of a workload that fits in memory on a placement.

    Parameters
    ----------
    workload
        What is trained.
    placement
        Devices on each node.
    node
        Kind of node.
    cpu_threads
        CPU threads a GPU; the node's threads divided by its GPUs if not given.
    families
        Families to search; those of the workload if not given.

    Returns
    -------
    list of ExecutionPlan
        With resolved micro-batches, in the order of `makespan.plans.enumerate_plans`.
    """
    plans = enumerate_plans(
        placement.n_gpus,
        global_batch_size=workload.global_batch_size,
        families=workload.families if families is None else families,
        n_layers=workload.model.n_layers,
        heads=workload.model.heads,
        max_tp=node.n_gpus,
        cpu_threads=cpu_threads or node.cpu_threads_per_gpu,
    )
    return _that_fit(plans, workload, placement, node)


def _that_fit(
    plans: Iterable[ExecutionPlan], workload: Workload, placement: Placement, node: NodeSpec
) -> list[ExecutionPlan]:
    resolved = (resolve_micro_batch(plan, workload, node) for plan in plans)
    return [plan for plan in resolved if memory_estimate(plan, workload, node, placement).feasible]


def rank_plans(
    fit: Fit,
    placement: Placement,
    cluster: ClusterSpec,
    cpu_threads: int | None = None,
    plans: Iterable[ExecutionPlan] | None = None,
) -> list[RankedPlan]:
    """Rank the feasible plans on a placement by predicted iteration time.

    Parameters
    ----------
    fit
        Fitted model of the workload.
    placement
        Devices on each node.
    cluster
        Where it is; decides memory. The nodes must be of one kind.
    cpu_threads
        CPU threads a GPU; the node's threads divided by its GPUs if not given. Ignored for
        ``plans``, which carry their own.
    plans
        Candidates; all structurally valid plans of the workload's families if not given. Those
        that do not fit in memory are left out in either case.

    Returns
    -------
    list of RankedPlan
        Fastest first; of equally fast plans the one that partitions more.
    """
    workload, node = fit.points.workload, cluster.nodes[0]
    if plans is None:
        candidates = feasible_plans(workload, placement, node, cpu_threads)
    else:
        candidates = _that_fit(plans, workload, placement, node)
    if not candidates:
        return []
    pairs = [(plan, placement) for plan in candidates]
    times = fit.predict(points_from_plans(pairs, workload, fit.environment))
    ranked = [RankedPlan(plan, placement, float(time)) for plan, time in zip(candidates, times, strict=True)]
    return sorted(ranked, key=lambda entry: (entry.iter_time_s, -entry.plan.zero_stage))


def best_plan(
    fit: Fit, placement: Placement, cluster: ClusterSpec, cpu_threads: int | None = None
) -> RankedPlan:
    """Return the fastest feasible plan on a placement; arguments as for `rank_plans`.

    Raises
    ------
    InfeasiblePlanError
        No plan of the workload fits in memory there.
    """
    ranked = rank_plans(fit, placement, cluster, cpu_threads)
    if not ranked:
        families = ", ".join(fit.points.workload.families)
        raise InfeasiblePlanError(
            f"no plan of {fit.workload!r} fits on placement {placement.text} of {cluster.name!r}; "
            f"families searched: {families}"
        )
    return ranked[0]
