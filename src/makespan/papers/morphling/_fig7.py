"""Fig. 7: one job under a shrinking resource limit, with five ways of choosing its plan."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import pandas as pd

from makespan.errors import PlanError, TraceError
from makespan.papers.morphling._names import MORPHLING
from makespan.papers.morphling._tables import FIG7
from makespan.perf import Fit, Learner, load_cluster, load_environment, rank_plans
from makespan.plans import ExecutionPlan, Placement, PlanFamily, read_plan, write_exec_plan

__all__ = ["STRATEGIES", "Stage", "fig7"]

_TRIED = "tried"


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
    return PlanFamily.ZERO_OFFLOAD_GC.word


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


def fig7(
    throughput: pd.DataFrame,
    stages: Iterable[Stage | Mapping[str, object]],
    published: pd.DataFrame,
    cluster_name: str,
    form: str,
) -> pd.DataFrame:
    """Run one job through the stages under each strategy.

    The fixed strategies choose by rule. Morphling runs the plan that its performance model expects
    to be fastest, adds the run to the observations, and repeats until no plan is expected to be
    faster than one that has run; it starts from the sampled rows of the job. Candidates are the
    plans that the throughput table knows in the placement. In all cases the table says what the
    plan that is chosen then takes.

    Parameters
    ----------
    throughput
        Schema `makespan.tables.THROUGHPUT`, one workload.
    stages
        Resource limits in order, or mappings with the fields of `Stage`.
    published
        Cells of the paper's figure: ``strategy, stage, published_plan, published_iter_time_s`` [s].
    cluster_name
        Cluster on which the job runs, or path of an environment file.
    form
        Form of the performance model that Morphling asks.

    Returns
    -------
    pandas.DataFrame
        Schema `FIG7`, then ``placement, cpu_threads, n_tried`` (plans that
        Morphling ran in the stage to find the one that stays), ``published_plan``. Where nothing
        can run, plan is empty, and time and throughput are 0.

    Raises
    ------
    TraceError
        The table has no row of a stage, or not the plan that a strategy chose there.
    """
    limits = [stage if isinstance(stage, Stage) else _stage(stage) for stage in stages]
    job = _Job(throughput.reset_index(drop=True), int(throughput["global_batch_size"].iloc[0]))
    records = [
        _record(MORPHLING, stage, choice, job)
        for stage, choice in zip(limits, _by_model(job, limits, cluster_name, form), strict=True)
    ]
    records += [
        _record(strategy, stage, _by_rule(job, rule(stage.placement), stage), job)
        for strategy, rule in _RULES.items()
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


@dataclass(frozen=True, slots=True)
class _Choice:
    """A plan, its iteration time [s], and how many plans ran to find it; nothing where none can run."""

    plan: str = ""
    iter_time_s: float = 0.0
    n_tried: int = 0


@dataclass(frozen=True, slots=True)
class _Job:
    throughput: pd.DataFrame
    batch: int

    def rows(self, stage: Stage) -> dict[str, int]:
        """Look up the row of each plan of a stage."""
        table = self.throughput
        here = table[
            (table["placement"] == stage.placement.text) & (table["cpu_threads"] == stage.cpu_threads)
        ]
        if here.empty:
            raise TraceError(
                f"stage {stage.name!r}: the throughput table has no row with placement "
                f"{stage.placement.text} and {stage.cpu_threads} CPU threads a GPU; it has: "
                + ", ".join(sorted(set(table["placement"])))
            )
        return dict(zip(here["exec_plan"], (int(row) for row in here.index), strict=True))

    def times(self, stage: Stage) -> dict[str, float]:
        """Look up the iteration time [s] of each plan of a stage, 0 where it failed."""
        times_s = self.throughput["iter_time_s"].fillna(0.0)
        return {plan: float(times_s[row]) for plan, row in self.rows(stage).items()}

    def read(self, text: str, stage: Stage) -> ExecutionPlan:
        """Read a plan for the GPUs of a stage; PlanError if there is no such plan."""
        return read_plan(
            text,
            n_gpus=stage.placement.n_gpus,
            global_batch_size=self.batch,
            cpu_threads=stage.cpu_threads,
        )


def _record(strategy: str, stage: Stage, choice: _Choice, job: _Job) -> dict[str, object]:
    time_s = choice.iter_time_s
    return {
        "strategy": strategy,
        "stage": stage.name,
        "gpus": stage.placement.n_gpus,
        "plan": choice.plan,
        "iter_time_s": time_s,
        "throughput_samples_per_s": job.batch / time_s if time_s > 0 else 0.0,
        "placement": stage.placement.text,
        "cpu_threads": stage.cpu_threads,
        "n_tried": choice.n_tried,
    }


def _by_rule(job: _Job, text: str, stage: Stage) -> _Choice:
    times = job.times(stage)
    try:
        plan = write_exec_plan(job.read(text, stage))
    except PlanError:
        return _Choice()  # the rule gives no valid plan for this limit
    if plan not in times:
        raise TraceError(
            f"stage {stage.name!r}: the throughput table has no row of plan {plan} on placement "
            f"{stage.placement.text}; it has: {', '.join(sorted(times))}"
        )
    return _Choice(plan, times[plan]) if times[plan] > 0 else _Choice()


def _by_model(job: _Job, stages: Iterable[Stage], cluster_name: str, form: str) -> Iterator[_Choice]:
    learner = Learner.from_table(job.throughput, form, load_environment(cluster_name), runs_by_preset=True)
    for stage in stages:
        chosen, n_tried = learner.learn_until_known(_fastest(job, stage, learner, cluster_name), _TRIED)
        time_s = [float(learner.times_s[row]) for row in chosen]
        plan = [str(job.throughput["exec_plan"][row]) for row in chosen]
        yield _Choice(plan[0], time_s[0], n_tried) if chosen else _Choice(n_tried=n_tried)


def _fastest(job: _Job, stage: Stage, learner: Learner, cluster_name: str) -> Callable[[Fit], list[int]]:
    """Return what chooses the row of a stage that is expected to be fastest, if any can run.

    A plan that has run is expected to take what it took, one that failed is not expected to run, and any
    other takes what the model predicts.
    """
    rows, cluster = job.rows(stage), load_cluster(cluster_name)
    plans = list(_candidates(job, stage, rows).values())

    def choose(fit: Fit) -> list[int]:
        expected: list[tuple[float, int, int]] = []
        ranked = rank_plans(fit, stage.placement, cluster, stage.cpu_threads, plans)
        for rank, entry in enumerate(ranked):
            row = rows[write_exec_plan(entry.plan)]
            time_s = float(learner.times_s[row]) if learner.reasons[row] else entry.iter_time_s
            if time_s > 0:
                expected.append((time_s, rank, row))
        return [min(expected)[2]] if expected else []

    return choose


def _candidates(job: _Job, stage: Stage, texts: Iterable[str]) -> dict[str, ExecutionPlan]:
    """Plans that the table knows in the placement and whose structure is valid."""
    plans: dict[str, ExecutionPlan] = {}
    for text in texts:
        try:
            plans[text] = job.read(text, stage)
        except PlanError:
            continue  # a failed run that asked for more replicas than samples
    return plans
