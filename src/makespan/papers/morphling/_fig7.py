"""Fig. 7: one job under a shrinking resource limit, with five ways of choosing its plan."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import pandas as pd

from makespan.errors import PlanError, TraceError
from makespan.papers.morphling._tables import FIG7
from makespan.perf import Fit, Learner, load_cluster, load_environment, rank_plans
from makespan.plans import ExecutionPlan, Placement, PlanFamily, read_plan, write_exec_plan

__all__ = ["MORPHLING", "Stage", "fig7", "measured_fig7"]

MORPHLING = "Morphling"
"""The strategy and scheduler that asks the performance model and learns from its runs."""

_TRIED = "tried"


@dataclass(frozen=True, slots=True)
class Stage:
    """A resource limit: a name, GPUs on each node, equal on all nodes, and CPU threads a GPU."""

    name: str
    placement: Placement
    cpu_threads: int

    @classmethod
    def read(cls, fields: Mapping[str, object]) -> "Stage":
        """Read a stage from its fields."""
        threads = int(str(fields["cpu_threads"]))
        return cls(str(fields["name"]), Placement.parse(str(fields["placement"])), threads)


def _degrees(pp: int, tp: int, dp: int) -> str:
    joint = "" if max(pp, tp, dp) <= 9 else "-"
    return joint.join(str(degree) for degree in (pp, tp, dp))


# With fewer than four GPUs the degrees of Megatron 3D do not multiply to the GPUs and nothing runs.
_RULES: dict[str, Callable[[Placement], str]] = {
    "TP+DP": lambda place: _degrees(1, max(place.gpus_per_node), place.n_nodes),
    "TP+PP": lambda place: _degrees(place.n_nodes, max(place.gpus_per_node), 1),
    "Megatron 3D": lambda place: _degrees(2, 2, max(place.n_gpus // 4, 1)),
    "ZeRO-Offload+GC": lambda place: PlanFamily.ZERO_OFFLOAD_GC.word,
}


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
    plans that the throughput table knows in the placement, and the table says what the plan then takes.

    Parameters
    ----------
    throughput
        Schema `makespan.tables.THROUGHPUT`, one workload.
    stages
        Resource limits in order, or mappings with the fields of `Stage`.
    cluster_name, form
        Cluster on which the job runs, or path of an environment file, and form of the performance model.

    Returns
    -------
    pandas.DataFrame
        Schema `FIG7`, then ``placement, cpu_threads, n_tried`` (plans that Morphling ran in the stage),
        ``published_plan``. Where nothing can run, plan is empty, and time and throughput are 0.

    Raises
    ------
    TraceError
        The table has no row of a stage, or not the plan that a strategy chose there.
    """
    limits = [stage if isinstance(stage, Stage) else Stage.read(stage) for stage in stages]
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
    printed = published.drop(columns="source", errors="ignore")
    table = pd.DataFrame(records).merge(printed, how="left", on=["strategy", "stage"])
    table["published_plan"] = table["published_plan"].fillna("")
    return FIG7.validate(table, where="fig7")


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
        at_threads = table["cpu_threads"] == stage.cpu_threads
        here = table[(table["placement"] == stage.placement.text) & at_threads]
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
            text, n_gpus=stage.placement.n_gpus, global_batch_size=self.batch, cpu_threads=stage.cpu_threads
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
    """Return what chooses the row of a stage that is expected to be fastest, if any can run."""
    rows, cluster = job.rows(stage), load_cluster(cluster_name)
    plans = list(_candidates(job, stage, rows))

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


def _candidates(job: _Job, stage: Stage, texts: Iterable[str]) -> Iterator[ExecutionPlan]:
    """Read the plans of a table whose structure is valid."""
    for text in texts:
        try:
            yield job.read(text, stage)
        except PlanError:
            continue  # a failed run that asked for more replicas than samples


def measured_fig7(
    throughput: pd.DataFrame, stages: Iterable[Mapping[str, object]], environment: str, form: str
) -> pd.DataFrame:
    """Run a profiled workload, which the paper does not have, through resource limits; as `fig7`."""
    kinds = {"strategy": str, "stage": str, "published_plan": str, "published_iter_time_s": float}
    nothing = pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in kinds.items()})
    return fig7(throughput, stages, nothing, environment, form)
