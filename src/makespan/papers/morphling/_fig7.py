"""Fig. 7: one job under a shrinking resource limit, with five ways of choosing its plan."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from makespan.errors import PlanError, TraceError
from makespan.hardware import cluster
from makespan.perf import fit_table, load_environment, rank_plans
from makespan.plans import ExecutionPlan, Placement, read_plan, write_plan
from makespan.tables import FIG7

__all__ = ["MORPHLING", "STRATEGIES", "Stage", "fig7"]

MORPHLING = "Morphling"
"""The strategy that asks the performance model."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A resource limit.

    Parameters
    ----------
    name
        Label.
    placement
        GPUs on each node, equal on all nodes.
    cpu_threads
        CPU threads a GPU.
    """

    name: str
    placement: Placement
    cpu_threads: int


def _tensor_in_node_data_across(placement: Placement) -> str:
    return _degrees(1, max(placement.gpus_per_node), placement.n_nodes)


def _tensor_in_node_pipeline_across(placement: Placement) -> str:
    return _degrees(placement.n_nodes, max(placement.gpus_per_node), 1)


def _megatron_3d(placement: Placement) -> str:
    # With fewer than four GPUs the degrees do not multiply to the GPUs and nothing runs.
    return _degrees(2, 2, max(placement.n_gpus // 4, 1))


def _offload_with_checkpointing(placement: Placement) -> str:
    return "zero-offload+gc"


def _degrees(pp: int, tp: int, dp: int) -> str:
    joint = "" if max(pp, tp, dp) <= 9 else "-"
    return joint.join(str(degree) for degree in (pp, tp, dp))


_RULES = {
    "TP+DP": _tensor_in_node_data_across,
    "TP+PP": _tensor_in_node_pipeline_across,
    "Megatron 3D": _megatron_3d,
    "ZeRO-Offload+GC": _offload_with_checkpointing,
}

STRATEGIES = (MORPHLING, *_RULES)
"""All strategies, in the order of the paper."""


@dataclass(frozen=True, slots=True)
class _Run:
    plan: str
    iter_time_s: float


_NOTHING = _Run("", 0.0)


def fig7(
    throughput: pd.DataFrame,
    stages: Iterable[Stage | Mapping[str, object]],
    published: pd.DataFrame,
    cluster_name: str,
    form: str,
) -> pd.DataFrame:
    """Run one job through the stages under each strategy.

    Plans are chosen without looking at the throughput table, by rule or by the fitted performance
    model; the time that the choice then takes is the one in the table.

    Parameters
    ----------
    throughput
        Schema `makespan.tables.THROUGHPUT`, one workload.
    stages
        Resource limits in order, or mappings with the fields of `Stage`.
    published
        Cells of the paper's figure: ``strategy, stage, published_plan, published_iter_time_s`` [s].
    cluster_name
        Cluster on which the job runs.
    form
        Form of the performance model that Morphling asks.

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.FIG7`, then ``placement, cpu_threads, published_plan``. Where
        nothing can run, plan is empty, and time and throughput are 0.

    Raises
    ------
    TraceError
        The table has no row of a stage, or not the plan that a strategy chose there.
    """
    limits = [stage if isinstance(stage, Stage) else _stage(stage) for stage in stages]
    workload = str(throughput["workload"].iloc[0])
    batch = int(throughput["global_batch_size"].iloc[0])
    chooser = _Chooser(throughput, workload, batch, cluster_name, form)
    records = [
        _record(strategy, stage, chooser.run(strategy, stage), batch)
        for strategy in STRATEGIES
        for stage in limits
    ]
    table = pd.DataFrame(records).merge(
        published.drop(columns="source", errors="ignore"), how="left", on=["strategy", "stage"]
    )
    table["published_plan"] = table["published_plan"].fillna("")
    return FIG7.validate(table, where="fig7")


def _stage(fields: Mapping[str, object]) -> Stage:
    return Stage(
        name=str(fields["name"]),
        placement=Placement.parse(str(fields["placement"])),
        cpu_threads=int(str(fields["cpu_threads"])),
    )


def _record(strategy: str, stage: Stage, run: _Run, batch: int) -> dict[str, object]:
    return {
        "strategy": strategy,
        "stage": stage.name,
        "gpus": stage.placement.n_gpus,
        "plan": run.plan,
        "iter_time_s": run.iter_time_s,
        "throughput_samples_per_s": batch / run.iter_time_s if run.iter_time_s > 0 else 0.0,
        "placement": stage.placement.text,
        "cpu_threads": stage.cpu_threads,
    }


class _Chooser:
    """Chooses a plan for each strategy and stage and looks its time up."""

    def __init__(
        self, throughput: pd.DataFrame, workload: str, batch: int, cluster_name: str, form: str
    ) -> None:
        self._table = throughput
        self._batch = batch
        self._cluster = cluster(cluster_name)
        self._fit = fit_table(throughput, workload, form, load_environment(cluster_name)).fit

    def run(self, strategy: str, stage: Stage) -> _Run:
        times = self._times(stage)
        if strategy == MORPHLING:
            return self._best(stage, times)
        return self._by_rule(_RULES[strategy](stage.placement), stage, times)

    def _times(self, stage: Stage) -> dict[str, float]:
        """Look up the iteration time [s] of each plan of a stage, 0 where it failed."""
        here = self._table[
            (self._table["placement"] == stage.placement.text)
            & (self._table["cpu_threads"] == stage.cpu_threads)
        ]
        if here.empty:
            raise TraceError(
                f"stage {stage.name!r}: the throughput table has no row with placement "
                f"{stage.placement.text} and {stage.cpu_threads} CPU threads a GPU; it has: "
                + ", ".join(sorted(set(self._table["placement"])))
            )
        return dict(zip(here["exec_plan"], here["iter_time_s"].fillna(0.0), strict=True))

    def _read(self, text: str, stage: Stage) -> ExecutionPlan:
        return read_plan(
            text,
            n_gpus=stage.placement.n_gpus,
            global_batch_size=self._batch,
            cpu_threads=stage.cpu_threads,
        )

    def _by_rule(self, text: str, stage: Stage, times: Mapping[str, float]) -> _Run:
        try:
            plan = write_plan(self._read(text, stage))
        except PlanError:
            return _NOTHING  # the rule gives no valid plan for this limit
        if plan not in times:
            raise TraceError(
                f"stage {stage.name!r}: the throughput table has no row of plan {plan} on placement "
                f"{stage.placement.text}; it has: {', '.join(sorted(times))}"
            )
        return _Run(plan, times[plan]) if times[plan] > 0 else _NOTHING

    def _best(self, stage: Stage, times: Mapping[str, float]) -> _Run:
        """Take the fastest predicted plan that runs; a plan that failed when tried is not tried again."""
        ranked = rank_plans(
            self._fit, stage.placement, self._cluster, stage.cpu_threads, self._candidates(stage, times)
        )
        for entry in ranked:
            plan = write_plan(entry.plan)
            if times.get(plan, 0.0) > 0:
                return _Run(plan, times[plan])
        return _NOTHING

    def _candidates(self, stage: Stage, times: Mapping[str, float]) -> Sequence[ExecutionPlan]:
        """Plans that the table knows on this placement and whose structure is valid."""
        plans = []
        for text in times:
            try:
                plans.append(self._read(text, stage))
            except PlanError:
                continue  # a failed run that asked for more replicas than samples
        return plans
