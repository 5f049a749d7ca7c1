"""Plan search: the fastest feasible plan on a placement, and sensitivity to GPUs and CPU threads."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from makespan.errors import InfeasiblePlanError, InputError
from makespan.hardware import ClusterSpec, NodeSpec
from makespan.perf.fitting import Fit
from makespan.perf.forms import points_from_plans
from makespan.plans import (
    ExecutionPlan,
    Placement,
    PlanFamily,
    enumerate_plans,
    memory_estimate,
    resolve_micro_batch,
    write_exec_plan,
)
from makespan.tables import SENSITIVITY, SENSITIVITY_FAMILIES
from makespan.workloads import Workload

_OFFLOAD = (PlanFamily.ZERO_OFFLOAD, PlanFamily.ZERO_OFFLOAD_GC)


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
    workload: Workload, placement: Placement, node: NodeSpec, cpu_threads: int | None = None
) -> list[ExecutionPlan]:
    """Return the plans of a workload that fit in memory on a placement, with resolved micro-batches."""
    plans = enumerate_plans(
        placement.n_gpus,
        global_batch_size=workload.global_batch_size,
        families=workload.families,
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
    cluster
        Cluster (sets the memory limit); its nodes must be of one kind.
    cpu_threads
        CPU threads per GPU (default: the node's threads divided by its GPUs). Has no effect on ``plans``,
        which have their own.
    plans
        Candidates (default: all plans of the workload's families); those that do not fit in memory are left
        out.

    Returns
    -------
    list of RankedPlan
        Fastest first; ties go to the plan that partitions more.
    """
    workload, node = fit.points.workload, cluster.node
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


def sensitivity_families(
    fit: Fit, cluster: ClusterSpec, gpu_counts: Iterable[int], cpu_threads: Iterable[int] = ()
) -> pd.DataFrame:
    """Predict the best plan of each family at each number of GPUs.

    Parameters
    ----------
    cluster, gpu_counts
        Nodes of one kind, and exact numbers of GPUs to use, on as few nodes as possible.
    cpu_threads
        Further CPU threads per GPU at which the offload families are predicted, in addition to the
        node's threads divided by its GPUs; numbers for which a node lacks threads are left out.

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.SENSITIVITY_FAMILIES`, one row per family, number of GPUs and number of
        CPU threads for which a feasible plan exists.

    Raises
    ------
    InputError
        A number of GPUs or threads is below 1, or the cluster has fewer GPUs.
    """
    counts = sorted(set(gpu_counts))
    if not counts or counts[0] < 1 or counts[-1] > cluster.n_gpus:
        raise InputError(
            f"GPU counts {counts}; expected one or more, each from 1 to the {cluster.n_gpus} GPUs of "
            f"{cluster.name!r}"
        )
    threads = sorted(set(cpu_threads))
    if threads and threads[0] < 1:
        raise InputError(f"cpu_threads is {threads[0]}; expected at least 1 per GPU")
    node, workload = cluster.node, fit.points.workload
    pairs: list[tuple[ExecutionPlan, Placement]] = []
    for count in counts:
        placement = Placement.packed(count, node.n_gpus)
        plans = feasible_plans(workload, placement, node)
        usual, most = node.cpu_threads_per_gpu, node.cpu_threads // placement.gpus_per_node[-1]
        others = [number for number in threads if number != usual and number <= most]
        # Further threads help only where the optimiser runs on the host.
        for plan in [plan for plan in plans if plan.plan_family in _OFFLOAD]:
            plans += [plan.with_cpu_threads(number) for number in others]
        pairs += [(plan, placement) for plan in plans]
    schema = SENSITIVITY_FAMILIES
    if not pairs:
        return schema.validate(pd.DataFrame(columns=schema.names), where="sensitivity")
    times = fit.predict(points_from_plans(pairs, workload, fit.environment))
    frame = pd.DataFrame(
        {
            "model": fit.workload,
            "plan_family": [plan.plan_family.title for plan, _ in pairs],
            "order": [list(PlanFamily).index(plan.plan_family) for plan, _ in pairs],
            "gpus": [plan.n_gpus for plan, _ in pairs],
            "cpu_threads": [plan.cpu_threads for plan, _ in pairs],
            "plan": [write_exec_plan(plan) for plan, _ in pairs],
            "throughput_samples_per_s": workload.global_batch_size / times,
        }
    )
    keys = ["order", "gpus", "cpu_threads"]
    by = [*keys, "throughput_samples_per_s"]
    frame = frame.sort_values(by, ascending=[True, True, True, False], kind="stable")
    return schema.validate(frame.drop_duplicates(keys)[schema.names], where="sensitivity")


def envelope(families: pd.DataFrame, gpu_counts: Iterable[int] | None = None) -> pd.DataFrame:
    """Find the best plan with at most g GPUs.

    Parameters
    ----------
    families
        Result of `sensitivity_families`; rows with further CPU threads are left out.
    gpu_counts
        Limits g; all numbers from 1 to the largest one in the table if not given.

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.SENSITIVITY`; throughput never falls with g. Where nothing can run
        the plan is empty and the throughput 0.
    """
    # Keep plans on the device, and offload plans with the same number of threads as those.
    usual = families
    if len(families):
        on_device = families[~families["plan_family"].isin([family.title for family in _OFFLOAD])]
        threads = on_device["cpu_threads"] if len(on_device) else families["cpu_threads"]
        usual = families[families["cpu_threads"] == threads.max()]
    largest = int(usual["gpus"].max()) if len(usual) else 0
    limits = sorted(set(gpu_counts)) if gpu_counts is not None else list(range(1, largest + 1))
    records = []
    for model, part in usual.groupby("model", sort=False):
        columns = ["gpus", "throughput_samples_per_s"]
        part = part.sort_values(columns, ascending=[True, False], kind="stable")
        gpus, rate, plans = (part[name].to_numpy() for name in (*columns, "plan"))
        best = np.maximum.accumulate(rate)
        for limit in limits:
            end = int(np.searchsorted(gpus, limit, side="right"))
            winner = int(np.argmax(rate[:end])) if end else -1
            records.append((model, limit, plans[winner] if end else "", best[end - 1] if end else 0.0))
    return SENSITIVITY.validate(pd.DataFrame(records, columns=SENSITIVITY.names), where="sensitivity")


def sensitivity_curve(fit: Fit, cluster: ClusterSpec, gpu_counts: Iterable[int]) -> pd.DataFrame:
    """Return the envelope over all families; arguments as for `sensitivity_families`.

    A model that fits on none of the GPU counts has throughput 0 everywhere.
    """
    counts = sorted(set(gpu_counts))
    families = sensitivity_families(fit, cluster, counts)
    if families.empty:
        nothing = [(fit.workload, count, "", 0.0) for count in counts]
        return SENSITIVITY.validate(pd.DataFrame(nothing, columns=SENSITIVITY.names), where="sensitivity")
    return envelope(families, counts)
