"""Requests of jobs, settled before a simulation: kept, emulated, replaced, dropped or rejected.

A catalogue has the rows of throughput tables, but a job may request something else: a plan that was never
run, other CPU threads, or more devices than the cluster has. This module settles every such request and adds
a line for each change to the report of the scenario.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import pandas as pd

from makespan.emulator import Point, equal_placements
from makespan.errors import InfeasiblePlanError, InputError, TraceError
from makespan.hardware import ClusterSpec
from makespan.plans import (
    DEFAULT_CPU_THREADS,
    ExecutionPlan,
    Placement,
    enumerate_placements,
    read_plan,
    stated_cpu_threads,
)
from makespan.sim import Configuration
from makespan.studies.catalogue import TableCatalogue, canonical_plan
from makespan.studies.clusters import TypedSource, exact_catalogue, largest_pool
from makespan.tables import ON_DEMAND
from makespan.throughput import (
    FASTEST,
    EmulatedSource,
    PlannedSource,
    ReferenceTimes,
    ThroughputSource,
    best_plans,
    is_planned,
    reference_plan,
    requested_label,
)
from makespan.workloads import JobSpec, workload

Kept = Literal["durations", "work"]
"""Quantity that jobs keep on any cluster: the durations of their list, or their work."""
KEPT: tuple[Kept, ...] = ("durations", "work")
"""All values of `Kept`."""
TooLarge = Literal["drop", "reject"]
"""Jobs that request more than the cluster has: left out and reported, or an error."""
TOO_LARGE: tuple[TooLarge, ...] = ("drop", "reject")
"""All values of `TooLarge`."""
_SHOWN = 3  # jobs named in a line of the report
_MULTISET_GPUS = (1, 2, 4, 8)  # tables have data-parallel plans in every placement of so many devices


def line_of(what: str, reason: str, items: Iterable[str]) -> str:
    """Return a line of a report: the change, the number of jobs, the reason, and the first few jobs."""
    listed = list(items)
    shown = "; ".join(listed[:_SHOWN]) + ("; ..." if len(listed) > _SHOWN else "")
    return f"  {what} {len(listed)} job{'s' if len(listed) != 1 else ''}: {reason} ({shown})"


def fitting(
    jobs: Sequence[JobSpec], rows: Sequence[int], where: ClusterSpec, too_large: TooLarge, origin: str
) -> tuple[tuple[JobSpec, ...], tuple[int, ...], list[str]]:
    """Return the jobs, and their rows, that request no more than the cluster has, and lines about the others.

    Parameters
    ----------
    rows, origin
        Row of each job in its file, and that file, for messages.
    too_large
        ``drop`` leaves the others out, ``reject`` raises.

    Raises
    ------
    InputError
        A job requests too much and ``too_large`` is ``reject``.
    TraceError
        No job is left.
    """
    kept: list[tuple[JobSpec, int]] = []
    dropped: list[str] = []
    held_h = 0.0
    most_gpus = largest_pool(where)
    for job, row in zip(jobs, rows, strict=True):
        if job.n_gpus > most_gpus:
            excess = f"{job.n_gpus} GPUs, more than the {most_gpus}"
        elif job.n_cpus > (threads := where.max_cpu_threads(job.n_gpus)):
            nodes = f"{job.n_gpus} GPU(s) on {min(job.n_gpus, where.n_nodes)} node(s)"
            excess = f"{job.n_cpus} CPU threads for {nodes}, more than the {threads}"
        else:
            kept.append((job, row))
            continue
        if too_large == "reject":
            raise InputError(
                f"{origin}: row {row}, job {job.job_id!r}: requests {excess} of cluster {where.name!r}; "
                "leave it out, choose a larger cluster, or let such jobs be dropped"
            )
        dropped.append(f"row {row}, job {job.job_id}: {excess}")
        held_h += job.n_gpus * (job.duration_s or 0.0) / 3600.0
    if jobs and not kept:
        raise TraceError(
            f"{origin}: every job requests more than cluster {where.name!r} has (first: {dropped[0]})"
        )
    if not dropped:
        return tuple(jobs), tuple(rows), []
    reason = f"more than cluster {where.name!r} has, {held_h:.1f} GPU hours as stated"
    specs, numbers = zip(*kept, strict=True)
    return specs, numbers, [line_of("dropped", reason, dropped)]


def with_steps(
    jobs: Sequence[JobSpec], rows: Sequence[int], times: ReferenceTimes, origin: str
) -> tuple[JobSpec, ...]:
    """Return jobs whose steps fill their stated durations by the given times.

    Raises
    ------
    InputError
        A job states no duration; names its row in file ``origin``.
    """
    for job, row in zip(jobs, rows, strict=True):
        if job.duration_s is None:
            raise InputError(
                f"{origin}: row {row}, job {job.job_id!r}: no duration to keep; state "
                "duration_s, or keep the work"
            )
    return tuple(
        replace(job, steps=times.steps(job.workload, job.n_gpus, job.plan, job.duration_s or 0.0))
        for job in jobs
    )


def with_planned(
    jobs: Sequence[JobSpec],
    rows: Sequence[int],
    times: ReferenceTimes,
    source: ThroughputSource,
    where: ClusterSpec,
    origin: str,
) -> tuple[tuple[JobSpec, ...], list[str]]:
    """Return jobs with plans as tables name them, and a line for each request of a model of the user.

    Raises
    ------
    InputError
        The plan of such a job does not fit into memory, or nothing does on so many GPUs; names its row.
    """
    answers: dict[tuple[str, str, int], str] = {}
    lines: list[str] = []
    found: list[JobSpec] = []
    for job, row in zip(jobs, rows, strict=True):
        if not is_planned(job.workload):
            found.append(job)
            continue
        request = (job.workload, job.plan, job.n_gpus)
        if request not in answers:
            table = times.tables[job.workload]
            try:
                batch = int(table["global_batch_size"].iloc[0])
                answers[request] = _planned(requested_label(job.plan, job.n_gpus, batch), job, table)
            except InputError as error:
                raise type(error)(
                    f"{origin}: row {row}, job {job.job_id!r}, on cluster {where.name!r}: {error}"
                ) from error
            shown = _layout_of(source, job, answers[request], table)
            what = f"{job.plan or FASTEST} of {job.workload} on {job.n_gpus} GPUs"
            lines.append(f"  {what}: plan {answers[request]}, {shown}")
        found.append(replace(job, plan=answers[request]))
    return tuple(found), lines


def _planned(label: str, job: JobSpec, table: pd.DataFrame) -> str:
    """Return the plan of a request; raises `InfeasiblePlanError` if it does not fit into memory."""
    best = best_plans(table)
    if job.n_gpus not in best:
        sizes = ", ".join(map(str, best))
        raise InfeasiblePlanError(
            f"no plan of {job.workload!r} fits on {job.n_gpus} GPUs, or divides its batch; expected {sizes}"
        )
    if label == FASTEST:
        return best[job.n_gpus]
    there = {
        str(plan)
        for plan, text in zip(table["exec_plan"], table["placement"], strict=True)
        if Placement.parse(str(text)).n_gpus == job.n_gpus
    }
    if label not in there:
        raise InfeasiblePlanError(
            f"plan {job.plan!r} of {job.workload!r}, {label} in tables, does not fit into memory on "
            f"{job.n_gpus} GPUs, has stages of unequal layers, or replicates the optimizer; expected "
            f"{FASTEST}, or one of {', '.join(sorted(there))}"
        )
    return label


def _layout_of(source: ThroughputSource, job: JobSpec, label: str, table: pd.DataFrame) -> str:
    """Return the layout that runs under a plan where it is fastest on the fewest nodes, with its time."""
    of_plan = table[table["exec_plan"] == label]
    rows = [
        (Placement.parse(str(text)), float(time_s))
        for text, time_s in zip(of_plan["placement"], of_plan["iter_time_s"], strict=True)
    ]
    place, time_s = min(
        (row for row in rows if row[0].n_gpus == job.n_gpus), key=lambda row: (row[0].n_nodes, row[1])
    )
    parts = source.parts if isinstance(source, TypedSource) else {"": source}
    shown = []
    for gpu_type, part in parts.items():
        if isinstance(part, PlannedSource):
            with suppress(InfeasiblePlanError):  # the model may fit on other devices only
                layout = part.layouts(job.workload).get((label, place.text), "")
                shown += [f"{layout} on {gpu_type}" if gpu_type else layout] if layout else []
    return f"layout {'; '.join(shown)}, {time_s:.3g} s a step"


_PRICED = "the throughput tables lack what they request; the emulator computes it on demand"
_STANDS_IN = "their plan was not measured; the fastest one measured with as many GPUs stands in for it"
_GIVES_WAY = "their plan was drawn and cannot run here; it gives way to the fastest one that can"
_NOWHERE = "no plan can run here on as many GPUs"
_FEWER = "they request fewer CPU threads per GPU than the tables have; the fewest of the tables are taken"
_NO_THREAD = "they request fewer CPU threads than GPUs; the fewest per GPU of the tables are taken"
_NONE = "they request no CPU threads, on which their times depend; the fewest of the tables are taken"
_BETWEEN = "the tables lack their CPU threads per GPU; the next fewer of the tables are taken"
_MORE = "they request more CPU threads per GPU than the tables have; the most of the tables are taken"


@dataclass(frozen=True, slots=True)
class _Answer:
    """A request as it will run: plan and CPU threads, and the change, empty if there is none."""

    plan: str
    n_cpus: int
    what: str = ""
    reason: str = ""
    detail: str = ""


def settled(
    jobs: Sequence[JobSpec],
    rows: Sequence[int],
    times: ReferenceTimes,
    source: ThroughputSource,
    where: ClusterSpec,
    origin: str,
    *,
    is_drawn: bool,
    states_cpus: bool = True,
) -> tuple[tuple[JobSpec, ...], tuple[int, ...], ReferenceTimes, list[str]]:
    """Return jobs with canonical plans, their rows, times with all that they need, and lines on changes.

    A plan that the tables lack is computed if the source is the emulator. Other sources have nothing but
    their tables: there the fastest plan with as many devices stands in for it.

    Parameters
    ----------
    rows, origin
        Row of each job in its file, and that file, for messages.
    times, source, where
        Throughput tables, where they come from, and the cluster on which the jobs run.
    is_drawn
        Whether plans were drawn, not requested: a drawn plan that cannot run is replaced by the fastest that
        can.
    states_cpus
        Whether the list states CPU threads; changes of drawn ones are not reported.

    Raises
    ------
    InputError
        A plan cannot be read, does not divide the batch, contradicts the CPU threads or cannot run here.
    """
    settler = _Settler(dict(times.tables), source, where, is_drawn, states_cpus)
    answers: dict[tuple[str, str, int, int], _Answer] = {}
    lines: dict[tuple[str, str], list[str]] = {}
    result: list[JobSpec] = []
    left: list[int] = []
    for job, row in zip(jobs, rows, strict=True):
        key = (job.workload, job.plan, job.n_gpus, job.n_cpus)
        if key not in answers:
            try:
                answers[key] = settler.answer(job)
            except InputError as error:
                place = f"{origin}: row {row}, job {job.job_id!r}, on cluster {where.name!r}"
                raise type(error)(f"{place}: {error}") from error
        answer = answers[key]
        if answer.what:
            text = f"row {row}, job {job.job_id}: {answer.detail}"
            lines.setdefault((answer.what, answer.reason), []).append(text)
        if answer.what != "dropped":
            result.append(replace(job, plan=answer.plan, n_cpus=answer.n_cpus))
            left.append(row)
    report = [line_of(what, reason, items) for (what, reason), items in lines.items()]
    if jobs and not result:
        raise TraceError(f"{origin}: no job can run on cluster {where.name!r}:{report[0]}")
    return tuple(result), tuple(left), ReferenceTimes(settler.tables), report


def _depend_on_threads(items: Iterable[Configuration]) -> bool:
    """Return whether the times of a plan with one placement differ with its CPU threads."""
    times_s: dict[tuple[Placement, tuple[str, ...]], set[float]] = {}
    for item in items:
        times_s.setdefault((item.placement, item.gpu_types), set()).add(item.iter_time_s)
    return any(len(found) > 1 for found in times_s.values())


@dataclass(slots=True)
class _Settler:
    """Throughput tables that are extended by the rows that jobs request."""

    tables: dict[str, pd.DataFrame]
    source: ThroughputSource
    where: ClusterSpec
    is_drawn: bool
    states_cpus: bool
    _catalogues: dict[str, TableCatalogue] = field(default_factory=dict)

    def answer(self, job: JobSpec) -> _Answer:
        """Settle one request; raises `InputError` if it cannot be met."""
        text, n_cpus = canonical_plan(job), job.n_cpus
        stated = stated_cpu_threads(job.plan)
        if stated is not None:  # by the plan: the job must request as many, or none
            if n_cpus and n_cpus // job.n_gpus != stated:
                raise InputError(
                    f"plan {job.plan!r} states {stated} CPU threads per GPU, but the job requests {n_cpus} "
                    f"CPU threads for {job.n_gpus} GPU(s); make them agree"
                )
            n_cpus = stated * job.n_gpus
        threads = n_cpus // job.n_gpus
        batch = int(self.tables[job.workload]["global_batch_size"].iloc[0])
        plan = read_plan(text, n_gpus=job.n_gpus, global_batch_size=batch)
        same_size = self._with_size(job.workload, job.n_gpus)
        known = {item.cpu_threads for item in same_size if item.plan == text}
        emulator = self._emulator(job.workload)
        if not known and emulator is not None and not self.is_drawn:
            return _Answer(text, n_cpus, "priced", _PRICED, self._compute(emulator, job, plan, threads))
        if not same_size:
            sizes = sorted({item.n_gpus for item in self._runnable(job.workload)})
            if self.is_drawn:
                return _Answer(text, n_cpus, "dropped", _NOWHERE, f"{job.workload} on {job.n_gpus} GPUs")
            if not sizes:
                raise InputError(f"workload {job.workload!r}: no row of its table is feasible; expected one")
            raise InputError(
                f"no throughput of {job.workload!r} on {job.n_gpus} GPUs; expected one of "
                f"{', '.join(map(str, sizes))}"
            )
        if not known:
            measured = ((item.plan, item.counts, item.iter_time_s) for item in same_size)
            stand_in = reference_plan(text, measured)
            detail = f"{text} of {job.workload} on {job.n_gpus} GPUs -> {stand_in}"
            if self.is_drawn:
                return _Answer(stand_in, n_cpus, "replaced", _GIVES_WAY, detail)
            return _Answer(text, n_cpus, "replaced", _STANDS_IN, detail)
        return self._with_threads(job, plan, text, n_cpus, known)

    def _with_threads(
        self, job: JobSpec, plan: ExecutionPlan, text: str, n_cpus: int, known: set[int]
    ) -> _Answer:
        """Settle the CPU threads of a plan that the tables have.

        Fewer threads than any row has always matter, others only if the optimizer runs on the host, or if the
        times of the tables depend on threads.
        """
        threads = n_cpus // job.n_gpus
        items = [item for item in self._with_size(job.workload, job.n_gpus) if item.plan == text]
        is_sensitive = plan.offload or _depend_on_threads(items)
        matters = threads < min(known) or (is_sensitive and threads not in known)
        if not self.states_cpus or threads == 0 or not matters:
            if self.states_cpus and threads == 0 and n_cpus:
                detail = f"{n_cpus} for {job.n_gpus} GPUs -> {min(known)} per GPU"
                return _Answer(text, n_cpus, "replaced", _NO_THREAD, detail)
            if self.states_cpus and not n_cpus and _depend_on_threads(items):
                detail = f"none for {job.n_gpus} GPUs -> {min(known)} per GPU"
                return _Answer(text, n_cpus, "replaced", _NONE, detail)
            if any(item.provenance != ON_DEMAND for item in items):
                return _Answer(text, n_cpus)
            detail = f"{text} of {job.workload} on {job.n_gpus} GPUs, as an earlier job"
            return _Answer(text, n_cpus, "priced", _PRICED, detail)
        emulator = self._emulator(job.workload)
        if emulator is not None and not self.is_drawn:
            return _Answer(text, n_cpus, "priced", _PRICED, self._compute(emulator, job, plan, threads))
        taken = max((count for count in known if count <= threads), default=min(known))
        detail = f"{threads} -> {taken} for {text} of {job.workload} on {job.n_gpus} GPUs"
        # Drawn jobs may be written as a list, which should then request what runs.
        n_cpus = taken * job.n_gpus if self.is_drawn else n_cpus
        reason = _FEWER if threads < taken else _MORE if taken == max(known) else _BETWEEN
        return _Answer(text, n_cpus, "replaced", reason, detail)

    def _emulator(self, key: str) -> EmulatedSource | None:
        """Return the emulator if it has the times of a workload."""
        source = self.source.base if isinstance(self.source, PlannedSource) else self.source
        return source if isinstance(source, EmulatedSource) and not is_planned(key) else None

    def _compute(self, source: EmulatedSource, job: JobSpec, plan: ExecutionPlan, threads: int) -> str:
        """Add the rows of a plan to the table of its workload and return what was added, in words."""
        spec, key = workload(job.workload), job.workload
        usual = (*spec.trace_cpu_threads, DEFAULT_CPU_THREADS)[0]
        points = [Point(plan.with_cpu_threads(threads or usual), place) for place in self._placements(plan)]
        rows = source.on_demand(key, points)
        rows = rows[rows["feasible"].astype(bool)]
        shown = f"{rows['exec_plan'].iloc[0] if len(rows) else job.plan} of {key} on {job.n_gpus} GPUs"
        if rows.empty:
            first = source.explain(key, points[0])
            raise InfeasiblePlanError(
                f"plan {job.plan!r} of {key!r} on {job.n_gpus} GPUs cannot run: {first.reason}"
            )
        self.tables[key] = pd.concat([self.tables[key], rows], ignore_index=True)
        self._catalogues.pop(key, None)
        if not any(item.plan == rows["exec_plan"].iloc[0] for item in self._with_size(key, job.n_gpus)):
            raise InfeasiblePlanError(
                f"plan {job.plan!r} of {key!r} on {job.n_gpus} GPUs with {points[0].plan.cpu_threads} CPU "
                f"threads per GPU fits no placement of {self.where.name!r}"
            )
        warnings = source.explain(key, points[0]).warnings
        if plan.checkpoint_fraction and spec.for_plan(plan).stack.full_checkpointing:
            warnings += (f"its software, {spec.for_plan(plan).stack.name}, recomputes every layer anyway",)
        return ", ".join([shown, f"{points[0].plan.cpu_threads} CPU threads per GPU", *warnings])

    def _placements(self, plan: ExecutionPlan) -> list[Placement]:
        """Return the placements of a plan: packed, spread evenly and, for sizes as in the tables, all."""
        n_gpus, most, where = plan.n_gpus, self.where.gpus_per_node, self.where
        places = [Placement.packed(n_gpus, most), *equal_placements(n_gpus, where, min(plan.tp, most))]
        if not plan.is_model_parallel and n_gpus in _MULTISET_GPUS:
            places += enumerate_placements(n_gpus, most, where.n_nodes)
        return list(dict.fromkeys(place for place in places if place.n_nodes <= where.n_nodes))

    def _with_size(self, key: str, n_gpus: int) -> list[Configuration]:
        return [item for item in self._runnable(key) if item.n_gpus == n_gpus]

    def _runnable(self, key: str) -> tuple[Configuration, ...]:
        """Return the configurations of a workload's table that fit the empty cluster."""
        if key not in self._catalogues:
            table = exact_catalogue({key: self.tables[key]}, self.source, self.where)
            self._catalogues[key] = table.on(self.where)
        catalogue = self._catalogues[key]
        return catalogue.all(key) if key in catalogue.workloads else ()
