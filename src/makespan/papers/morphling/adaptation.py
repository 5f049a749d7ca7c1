"""Fig. 7: one job under a shrinking resource limit, with five ways of choosing its plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import pandas as pd
from pydantic import model_validator

from makespan.errors import PlanError, TraceError
from makespan.hardware import ClusterSpec
from makespan.papers.experiment import SOURCES, Figure, Given
from makespan.papers.morphling.performance import OnMachine, WorkloadKey, is_profiled
from makespan.perf import Fit, Learner, load_cluster, load_environment, rank_plans
from makespan.plans import ExecutionPlan, Placement, PlanFamily, read_plan, write_exec_plan
from makespan.settings import Block, option, parsed_by, shared

MORPHLING = "Morphling"
"""The strategy and scheduler that asks the performance model and learns from its runs."""
_TRIED = "tried"

PlacementText = Annotated[
    str, parsed_by(lambda text: Placement.parse(text).text, "GPUs on each node, for example 4444")
]
_of_fig7 = partial(option, source="Morphling, Fig. 7", changes="fig7")


class Fig7Stage(Block):
    """One resource limit of the adaptation experiment."""

    name: str = _of_fig7("label of the stage", min_length=1)
    placement: PlacementText = _of_fig7("GPUs on each node", unit="GPU")
    cpu_threads: int = _of_fig7(
        "CPU threads per GPU", unit="threads", source="trace of the batch-16 runs of the artifact", ge=1
    )

    @property
    def place(self) -> Placement:
        """GPUs on each node, equal on all nodes."""
        return Placement.parse(self.placement)


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


class Fig7(OnMachine):
    """Adaptation of one job to a shrinking resource limit.

    The fixed strategies choose by rule. Morphling runs the plan that its performance model expects
    to be fastest, adds the run to the observations, and repeats until no plan is expected to be
    faster than one that has run; it starts from the sampled rows of the job. Candidates are the
    plans that the throughput table knows in the placement, and the table says what the plan then takes.
    """

    name = "fig7"
    tables = {"fig7": "adaptation of one job to changing limits"}
    figures = (
        Figure(
            "fig7",
            "Fig. 7",
            "Adaptation of one job to a limit that changes from stage to stage, "
            "one schedule per strategy on {source} iteration times. Hollow "
            "diamonds in the colour of a strategy are its published values; "
            "crosses mark stages in which it cannot run.",
            tables=("fig7",),
            options={
                "workload_key": "morphling.fig7.workload",
                "stage_duration_s": "morphling.fig7.stage_duration_s",
            },
        ),
    )
    cells = ("fig7",)
    sources = SOURCES
    on_profile = True
    is_timed = True
    group = "experiments"
    unused = frozenset({"stage_duration_s"})

    form: str = shared("performance_model.experiment_form")
    known: tuple[str, ...] = shared("morphling.workloads")
    workload: WorkloadKey = _of_fig7(
        "workload of the job", "llama7_b16", source="Morphling, Fig. 7: LLaMA-2-7B, global batch 16"
    )
    stage_duration_s: float = _of_fig7(
        "how long each limit lasts", 1800.0, unit="s", source="Morphling, Fig. 7: 30 minutes", gt=0
    )
    stages: tuple[Fig7Stage, ...] = _of_fig7(
        "the limits in order",
        (
            Fig7Stage(name="4x8", placement="8888", cpu_threads=2),
            Fig7Stage(name="4x4", placement="4444", cpu_threads=2),
            Fig7Stage(name="1x4", placement="4", cpu_threads=2),
            Fig7Stage(name="1x1", placement="1", cpu_threads=2),
            Fig7Stage(name="1x1 2xCPU", placement="1", cpu_threads=4),
        ),
        min_length=1,
    )
    profiled_stages: tuple[Fig7Stage, ...] = option(
        "the limits of the workload that is profiled where no tables of measurements are given",
        (
            Fig7Stage(name="two slots", placement="2", cpu_threads=1),
            Fig7Stage(name="one slot", placement="1", cpu_threads=1),
            Fig7Stage(name="two again", placement="2", cpu_threads=1),
        ),
        source="after Morphling, Fig. 7",
        changes="measured fig7",
        min_length=1,
    )

    @model_validator(mode="after")
    def _names_differ(self) -> "Fig7":
        for stages in (self.stages, self.profiled_stages):
            if len({stage.name for stage in stages}) != len(stages):
                raise ValueError("stages with different names")
        return self

    def timed_workloads(self, source: str, profiled: Sequence[str]) -> Sequence[str]:
        """Return the workload of the job if its iteration times are read; the first one of a profile."""
        return profiled[:1] or tuple({self.workload} & set(self.known))

    def tables_of(self, source: str, profiled: Sequence[str]) -> Mapping[str, str]:
        """Return the table if there is a workload."""
        return super().tables_of(source, profiled) if self.timed_workloads(source, profiled) else {}

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Run one job through the stages under each strategy.

        Returns
        -------
        dict of str to pandas.DataFrame
            A row per strategy and stage, with the columns ``placement, cpu_threads, n_tried`` (plans that
            Morphling ran in the stage) and ``published_plan`` behind those of the schema. Where nothing can
            run, plan is empty, and time and throughput are 0. Only the paper's job has published cells, and
            only in the paper's stages.

        Raises
        ------
        TraceError
            The table has no row of a stage, or not the plan that a strategy chose there.
        """
        (throughput,) = given.times.values()
        stages = self.profiled_stages if is_profiled(given) else self.stages
        job = _Job(throughput.reset_index(drop=True), int(throughput["global_batch_size"].iloc[0]))
        constants = self.constants(given)
        environment, cluster = load_environment(constants), load_cluster(constants)
        learner = Learner.from_table(job.throughput, self.form, environment, runs_by_preset=True)
        records = []
        for stage in stages:
            rows, n_tried = learner.learn_until_known(_fastest(job, stage, learner, cluster), _TRIED)
            choice = _Choice(n_tried=n_tried)
            if rows:
                plan, time_s = str(job.throughput["exec_plan"][rows[0]]), float(learner.times_s[rows[0]])
                choice = _Choice(plan, time_s, n_tried)
            records.append(_fig7_record(MORPHLING, stage, choice, job))
        records += [
            _fig7_record(strategy, stage, _by_rule(job, rule(stage.place), stage), job)
            for strategy, rule in _RULES.items()
            for stage in stages
        ]
        printed = given.cells["fig7"].drop(columns="source", errors="ignore")
        # Published are values of the paper's job in the paper's stages, not of others with their names.
        defaults = type(self).model_fields
        is_papers = not is_profiled(given) and self.workload == defaults["workload"].default
        alike = {stage.name for stage in stages if is_papers and stage in defaults["stages"].default}
        printed = printed[printed["stage"].isin(alike)]
        table = pd.DataFrame(records).merge(printed, how="left", on=["strategy", "stage"])
        table["published_plan"] = table["published_plan"].fillna("")
        return {"fig7": table}


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

    def rows(self, stage: Fig7Stage) -> dict[str, int]:
        """Look up the row of each plan of a stage."""
        table = self.throughput
        at_threads = table["cpu_threads"] == stage.cpu_threads
        here = table[(table["placement"] == stage.placement) & at_threads]
        if here.empty:
            raise TraceError(
                f"stage {stage.name!r}: the throughput table has no row with placement "
                f"{stage.placement} and {stage.cpu_threads} CPU threads per GPU; it has: "
                + ", ".join(sorted(set(table["placement"])))
            )
        return dict(zip(here["exec_plan"], (int(row) for row in here.index), strict=True))

    def times(self, stage: Fig7Stage) -> dict[str, float]:
        """Look up the iteration time [s] of each plan of a stage, 0 where it failed."""
        times_s = self.throughput["iter_time_s"].fillna(0.0)
        return {plan: float(times_s[row]) for plan, row in self.rows(stage).items()}

    def read(self, text: str, stage: Fig7Stage) -> ExecutionPlan:
        """Read a plan for the GPUs of a stage; PlanError if there is no such plan."""
        return read_plan(
            text, n_gpus=stage.place.n_gpus, global_batch_size=self.batch, cpu_threads=stage.cpu_threads
        )


def _fig7_record(strategy: str, stage: Fig7Stage, choice: _Choice, job: _Job) -> dict[str, object]:
    time_s = choice.iter_time_s
    return {
        "strategy": strategy,
        "stage": stage.name,
        "gpus": stage.place.n_gpus,
        "plan": choice.plan,
        "iter_time_s": time_s,
        "throughput_samples_per_s": job.batch / time_s if time_s > 0 else 0.0,
        "placement": stage.placement,
        "cpu_threads": stage.cpu_threads,
        "n_tried": choice.n_tried,
    }


def _by_rule(job: _Job, text: str, stage: Fig7Stage) -> _Choice:
    """Look up the plan that a rule gives for a stage."""
    times = job.times(stage)
    try:
        plan = write_exec_plan(job.read(text, stage))
    except PlanError:
        return _Choice()  # the rule gives no valid plan for this limit
    if plan not in times:
        raise TraceError(
            f"stage {stage.name!r}: the throughput table has no row of plan {plan} on placement "
            f"{stage.placement}; it has: {', '.join(sorted(times))}"
        )
    return _Choice(plan, times[plan]) if times[plan] > 0 else _Choice()


def _fastest(
    job: _Job, stage: Fig7Stage, learner: Learner, cluster: ClusterSpec
) -> Callable[[Fit], list[int]]:
    """Return a function that chooses the row of a stage with the least expected time, if any can run."""
    rows, plans = job.rows(stage), []
    for text in rows:
        try:
            plans.append(job.read(text, stage))
        except PlanError:
            continue  # a failed run that asked for more replicas than samples

    def choose(fit: Fit) -> list[int]:
        expected: list[tuple[float, int, int]] = []
        ranked = rank_plans(fit, stage.place, cluster, stage.cpu_threads, plans)
        for rank, entry in enumerate(ranked):
            row = rows[write_exec_plan(entry.plan)]
            time_s = float(learner.times_s[row]) if learner.reasons[row] else entry.iter_time_s
            if time_s > 0:
                expected.append((time_s, rank, row))
        return [min(expected)[2]] if expected else []

    return choose
