"""Fig. 7: one job under a shrinking resource limit, with five ways of choosing its plan."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.errors import InputError, PlanError, TraceError
from makespan.hardware import cluster
from makespan.papers.morphling.tables import (
    FIG7,
    FIG8,
    FIG9,
    FIG9_SUMMARY,
    TABLE2,
    TABLE2_ROWS,
    TABLE2_SUMMARY,
    read_published,
)
from makespan.perf import (
    FORMS,
    Environment,
    Fit,
    Learner,
    TableFit,
    envelope,
    fit_table,
    load_cluster,
    load_environment,
    rank_plans,
    regret,
    sampling_design,
    sensitivity_families,
)
from makespan.plans import ExecutionPlan, Placement, PlanFamily, read_plan, write_exec_plan
from makespan.tables import FIT, SENSITIVITY, SENSITIVITY_FAMILIES
from makespan.workloads import workload as load_workload

# ------------------------------------------------------------------------------------------------
# Fig. 7: one job under a shrinking resource limit, with five ways of choosing its plan.

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
        _fig7_record(MORPHLING, stage, choice, job)
        for stage, choice in zip(limits, _by_model(job, limits, cluster_name, form), strict=True)
    ]
    records += [
        _fig7_record(strategy, stage, _by_rule(job, rule(stage.placement), stage), job)
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


def _fig7_record(strategy: str, stage: Stage, choice: _Choice, job: _Job) -> dict[str, object]:
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


# ------------------------------------------------------------------------------------------------
# Fig. 8: two jobs share the GPUs of a node, divided equally or by their sensitivity.


@dataclass(frozen=True, slots=True)
class _Best:
    """Fastest plan of a job with some GPUs, and the same among clean rows only."""

    plan: str
    throughput: float
    clean: bool
    flag: str
    clean_throughput: float


def fig8(tables: Mapping[str, pd.DataFrame], gpus: int, published: pd.DataFrame) -> pd.DataFrame:
    """Divide the GPUs of one node between jobs under each scheduler.

    Parameters
    ----------
    tables
        Throughput table of each job, schema `makespan.tables.THROUGHPUT`; the key is the job.
    gpus
        GPUs to divide; each job gets at least one.

    Returns
    -------
    pandas.DataFrame
        Schema `FIG8`, then ``clean, flag`` of the row behind the speed-up, ``clean_speedup`` (from clean
        rows only, NaN if there are none), ``published_gpus, published_plan``. Speed-ups are relative to
        the job alone on all GPUs with its best plan.

    Raises
    ------
    InputError
        There are fewer GPUs than jobs.
    TraceError
        A job has no feasible row on one node with a number of GPUs that it may get.
    """
    jobs = list(tables)
    if gpus < len(jobs):
        raise InputError(f"{gpus} GPUs for {len(jobs)} jobs; accepted: at least one GPU a job")
    curves = {job: _curve(job, table, gpus) for job, table in tables.items()}
    divisions = {"Simple": _equal_division(jobs, gpus), "Morphling": _best_division(jobs, gpus, curves)}
    records = [
        _fig8_record(scheduler, job, count, curves[job])
        for scheduler, division in divisions.items()
        for job, count in zip(jobs, division, strict=True)
    ]
    printed = published.drop(columns="source", errors="ignore")
    table = pd.DataFrame(records).merge(printed, how="left", on=["scheduler", "job"])
    table["published_plan"] = table["published_plan"].fillna("")
    return FIG8.validate(table, where="fig8")


def _curve(job: str, table: pd.DataFrame, gpus: int) -> dict[int, _Best]:
    """Best plan of a job with 1, 2, ... GPUs of one node; where none can run, that with fewer GPUs."""
    curve: dict[int, _Best] = {}
    for count in range(1, gpus + 1):
        rows = table[(table["placement"] == Placement((count,)).text) & table["feasible"]]
        if len(rows):
            curve[count] = _best(rows)
        elif count - 1 in curve:
            curve[count] = curve[count - 1]
        else:
            raise TraceError(
                f"job {job!r}: the throughput table has no feasible plan on one node with {count} GPU(s)"
            )
    return curve


def _best(rows: pd.DataFrame) -> _Best:
    ordered = rows.sort_values(["iter_time_s", "exec_plan"], kind="stable")
    first = ordered.iloc[0]
    clean = ordered[ordered["clean"]]
    batch = float(first["global_batch_size"])
    return _Best(
        plan=str(first["exec_plan"]),
        throughput=batch / float(first["iter_time_s"]),
        clean=bool(first["clean"]),
        flag=str(first["flag"]),
        clean_throughput=batch / float(clean["iter_time_s"].iloc[0]) if len(clean) else math.nan,
    )


def _equal_division(jobs: Sequence[str], gpus: int) -> tuple[int, ...]:
    share, rest = divmod(gpus, len(jobs))
    return tuple(share + (number < rest) for number in range(len(jobs)))


def _best_division(
    jobs: Sequence[str], gpus: int, curves: Mapping[str, Mapping[int, _Best]]
) -> tuple[int, ...]:
    """Maximise the summed speed-up; of equal divisions the most even one."""

    def gain(division: tuple[int, ...]) -> tuple[float, int]:
        pairs = zip((curves[job] for job in jobs), division, strict=True)
        return sum(curve[n].throughput / curve[gpus].throughput for curve, n in pairs), -max(division)

    cuts = itertools.combinations(range(1, gpus), len(jobs) - 1)
    ends = ((0, *between, gpus) for between in cuts)
    return max((tuple(b - a for a, b in itertools.pairwise(cut)) for cut in ends), key=gain)


def _fig8_record(scheduler: str, job: str, count: int, curve: Mapping[int, _Best]) -> dict[str, object]:
    best, alone = curve[count], curve[max(curve)]
    return {
        "scheduler": scheduler,
        "job": job,
        "gpus": count,
        "plan": best.plan,
        "speedup": best.throughput / alone.throughput,
        "clean": best.clean,
        "flag": best.flag,
        "clean_speedup": best.clean_throughput / alone.clean_throughput,
    }


# ------------------------------------------------------------------------------------------------
# Fig. 9: losses of real training runs under several plans, under one that changes, and of another seed.

SWITCHING = "switching"
"""The run that changes its plan through checkpoint and restart."""
OTHER_SEED = "other seed"
"""The run that differs from the reference by its seed alone."""


def fig9(losses: Mapping[str, Sequence[float]]) -> pd.DataFrame:
    """Compare the losses of runs, step by step, with those of the first one; schema `FIG9`.

    Parameters
    ----------
    losses
        Losses of each run from the first step on, by the name of the run; the reference comes first.

    Raises
    ------
    TraceError
        The runs have different numbers of steps.
    """
    arrays = {name: np.asarray(values, dtype=float) for name, values in losses.items()}
    first, reference = next(iter(arrays.items()))
    records: list[pd.DataFrame] = []
    for name, values in arrays.items():
        if len(values) != len(reference):
            raise TraceError(
                f"fig9: run {name!r} has {len(values)} steps, run {first!r} has {len(reference)}"
            )
        distance = np.abs(values - reference)
        columns = {"run": name, "step": range(len(values)), "loss": values, "abs_difference": distance}
        records.append(pd.DataFrame(columns))
    return FIG9.validate(pd.concat(records, ignore_index=True), where="fig9")


def fig9_summary(table: pd.DataFrame, costs: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Sum up every run of `fig9`, with the paper's runs below; schema `FIG9_SUMMARY`.

    Costs have one row a run: ``run, restarts, restart_s, step_s``.
    """
    grouped = table.groupby("run", sort=False)["abs_difference"]
    own = grouped.agg(mean_abs_difference="mean", max_abs_difference="max").reset_index()
    own["kind"] = [_workload_kind(name, number == 0) for number, name in enumerate(own["run"])]
    own = own.merge(costs, on="run", how="left", validate="one_to_one")
    paper = published.drop(columns="source", errors="ignore").assign(restarts=0)
    paper["kind"] = [f"published {_workload_kind(name, False)}" for name in paper["run"]]
    paper["run"] = "Morphling " + paper["run"]
    return FIG9_SUMMARY.validate(pd.concat([own, paper], ignore_index=True), where="fig9_summary")


def _workload_kind(run: str, is_reference: bool) -> str:
    if is_reference:
        return "reference"
    return run if run in (SWITCHING, OTHER_SEED) else "plan"


# ------------------------------------------------------------------------------------------------
# The performance model: fits, prediction errors as in Table 2, and sensitivity curves.

Bools = npt.NDArray[np.bool_]
_FAMILIES = [family.title for family in PlanFamily]
_OFFLOAD, _OFFLOAD_GC = PlanFamily.ZERO_OFFLOAD.title, PlanFamily.ZERO_OFFLOAD_GC.title
_GROUP = ["model", "plan_family", "form"]
_PRINTED = ["published_avg_error_pct", "published_max_error_pct"]
_CHOICE = (
    "best_plan_found_pct", "regret_mean_pct", "regret_max_pct", "regret_mean_shipped_pct",
    "regret_max_shipped_pct",
)  # fmt: skip


def fit_workloads(
    throughput: Iterable[pd.DataFrame],
    environment: str,
    forms: Sequence[str] = tuple(FORMS),
    *,
    holds_out_kinds: bool = False,
) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Fit each form to the sampled rows of each workload and predict all of its rows.

    A workload is predicted twice: with the shared constants of the environment, some of which may have been
    chosen with all models in view, and with those that have not seen its model.

    Parameters
    ----------
    throughput
        Schema `makespan.tables.THROUGHPUT`, one table a workload.
    environment
        Name of the constants that all models of a cluster share, or path of a file with them.
    holds_out_kinds
        Whether kinds of plans of which every row on several devices would be sampled are in turn kept out
        of the fits: with two workloads, each such kind is fitted for the one and judged for the other.

    Returns
    -------
    list of tuple of pandas.DataFrame
        For each workload: fitted parameters with the constants as shipped (schema `makespan.tables.FIT`,
        then further columns, of the fitted rows ``n_observations``, ``residual_rms_pct`` and
        ``residual_max_pct`` [%]), and one row a feasible row and form (schema `TABLE2_ROWS`, then
        ``plan_family``, ``flag`` and ``cpu_threads``).

    Raises
    ------
    FitError
        The rows do not suffice for a fit.
    """
    tables, shipped = list(throughput), load_environment(environment)
    keys = [str(table["workload"].iloc[0]) for table in tables]
    sampled = [sampling_design(table, key) for table, key in zip(tables, keys, strict=True)]
    if holds_out_kinds:
        sampled = [
            _without_kinds(*both, number) for number, both in enumerate(zip(tables, sampled, strict=True))
        ]
    return [
        _both_ways(table, key, forms, (shipped, shipped.unseen_by(load_workload(key).model.key)), rows)
        for table, key, rows in zip(tables, keys, sampled, strict=True)
    ]


def _both_ways(
    table: pd.DataFrame, key: str, forms: Iterable[str], environments: Iterable[Environment], rows: Bools
) -> tuple[pd.DataFrame, pd.DataFrame]:
    results = [[fit_table(table, key, form, one, sampled=rows) for one in environments] for form in forms]
    parameters = pd.concat([_parameters(shipped) for shipped, _ in results], ignore_index=True)
    predictions = pd.concat([_rows(unseen, shipped) for shipped, unseen in results], ignore_index=True)
    return (
        FIT.validate(parameters, where=f"fit of {key}"),
        TABLE2_ROWS.validate(predictions, where=f"rows of {key}"),
    )


def _without_kinds(throughput: pd.DataFrame, sampled: Bools, number: int) -> Bools:
    """Keep every second kind out of the sample, of those that would be fitted wherever they span devices.

    Plain data parallelism stays. Kinds are taken in the order of the table, from the first for the workloads
    with an even ``number`` and from the second for the others.
    """
    kinds = [_kind(*cell) for cell in _cells(throughput)]
    judged = throughput["feasible"].to_numpy(dtype=bool) & ~sampled
    left = {kind for kind, is_judged in zip(kinds, judged, strict=True) if is_judged}
    fitted = dict.fromkeys(kind for kind, chosen in zip(kinds, sampled, strict=True) if kind and chosen)
    kept_out = [kind for kind in fitted if kind not in left][number % 2 :: 2]
    return np.asarray(sampled & np.array([kind not in kept_out for kind in kinds]))


def _kind(plan: str, placement: str, batch: int) -> tuple[str, bool, bool] | None:
    """Family of a plan on several devices, and whether it divides tensors and layers."""
    n_gpus = Placement.parse(placement).n_gpus
    read = read_plan(plan, n_gpus=n_gpus, global_batch_size=batch)
    if n_gpus == 1 or read.plan_family is PlanFamily.DP:
        return None
    return read.plan_family.title, read.tp > 1, read.pp > 1


def _cells(frame: pd.DataFrame) -> Iterable[tuple[str, str, int]]:
    return zip(
        frame["exec_plan"], frame["placement"], frame["global_batch_size"].astype(int).tolist(), strict=True
    )


def _parameters(result: TableFit) -> pd.DataFrame:
    residual = result.fit.residual  # log of predicted over measured time
    return result.fit.table().assign(
        n_observations=len(residual),
        residual_rms_pct=100.0 * float(np.sqrt(np.mean(residual**2))),
        residual_max_pct=100.0 * float(np.max(np.abs(residual))),
    )


def _rows(result: TableFit, shipped: TableFit) -> pd.DataFrame:
    frame = result.frame
    return pd.DataFrame(
        {
            "model": frame["workload"],
            "exec_plan": frame["exec_plan"],
            "placement": frame["placement"],
            "form": result.fit.form.name,
            "fitted": result.fitted,
            "clean": frame["clean"],
            "measured_s": frame["iter_time_s"],
            "predicted_s": result.predicted_s,
            "error_pct": result.error_pct,
            "predicted_shipped_s": shipped.predicted_s,
            "plan_family": [_family(*cell) for cell in _cells(frame)],
            "flag": frame["flag"],
            "cpu_threads": frame["cpu_threads"],
        }
    )


def _family(plan: str, placement: str, batch: int) -> str:
    n_gpus = Placement.parse(placement).n_gpus
    return read_plan(plan, n_gpus=n_gpus, global_batch_size=batch).plan_family.title


def table2_rows(rows: Iterable[pd.DataFrame], published: pd.DataFrame) -> pd.DataFrame:
    """Join the rows of several workloads, with plan families called as in the paper.

    Takes the second tables of `fit_workloads`; models of which the paper has no cells are left out. Returns
    schema `TABLE2_ROWS`, then ``plan_family, flag, cpu_threads``.
    """
    joined = pd.concat(list(rows), ignore_index=True)
    kept = joined[joined["model"].isin(set(published["model"]))]
    cells = zip(kept["model"], kept["plan_family"], strict=True)
    names = [_reported_family(model, family, published) for model, family in cells]
    return TABLE2_ROWS.validate(kept.assign(plan_family=names), where="table2_rows")


def _reported_family(model: str, family: str, published: pd.DataFrame) -> str:
    """Name a family as the paper does; it calls the offload plans of large models ZeRO-Offload+GC."""
    listed = set(published.loc[published["model"] == model, "plan_family"])
    return _OFFLOAD_GC if family == _OFFLOAD and _OFFLOAD_GC in listed else family


def table2(rows: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Summarise prediction errors for every model, plan family and form.

    Takes the result of `table2_rows`. Returns schema `TABLE2`, then ``published_avg_error_pct`` and
    ``published_max_error_pct`` [%]. Errors are over clean rows that were not fitted. A cell that only the
    paper has comes with no held-out rows and no error.
    """
    measured = pd.DataFrame(
        [dict(zip(_GROUP, key, strict=True)) | _errors(part) for key, part in rows.groupby(_GROUP)]
    )
    cells = published[["model", "plan_family", *_PRINTED]]
    cells = cells[cells["model"].isin(set(rows["model"]))]
    forms = pd.DataFrame({"form": sorted(set(rows["form"]))})
    table = measured.merge(cells.merge(forms, how="cross"), how="outer", on=_GROUP)
    counts = ["n_fit", "n_validate"]
    table[counts] = table[counts].fillna(0)
    models = {model: number for number, model in enumerate(dict.fromkeys(published["model"]))}
    families = {family: number for number, family in enumerate(_FAMILIES)}
    ranks = {"model": table["model"].map(models), "plan_family": table["plan_family"].map(families)}
    order = table.assign(**ranks).sort_values(_GROUP, kind="stable").index
    return TABLE2.validate(table.loc[order], where="table2")


def _errors(part: pd.DataFrame) -> dict[str, float]:
    """Errors [%] over held-out rows: clean ones, and all."""
    held_out = part[~part["fitted"]]
    judged = held_out[held_out["clean"].astype(bool)]
    clean = judged["error_pct"]
    shipped = 100.0 * (judged["predicted_shipped_s"] / judged["measured_s"] - 1.0).abs()
    return {  # of no rows pandas makes NaN
        "n_fit": int(part["fitted"].sum()),
        "n_validate": len(judged),
        "avg_error_pct": float(clean.mean()),
        "p95_error_pct": float(clean.quantile(0.95)),
        "max_error_pct": float(clean.max()),
        "avg_error_all_rows_pct": float(held_out["error_pct"].mean()),
        "avg_error_shipped_pct": float(shipped.mean()),
        "max_error_shipped_pct": float(shipped.max()),
    }


def table2_summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Summarise prediction error and choice of plan of the rows of `table2_rows`; schema `TABLE2_SUMMARY`.

    Scopes are ``all``, ``all but vit``, and each model. Regret is the throughput lost when the plan that the
    model predicts as fastest is run, among the clean rows of a placement.
    """
    models = list(dict.fromkeys(rows["model"]))
    scopes = {"all": models, "all but vit": [name for name in models if name != "vit"]}
    scopes |= {name: [name] for name in models}
    records: list[dict[str, object]] = []
    for form in dict.fromkeys(rows["form"]):
        of_form = rows[rows["form"] == form]
        losses = pd.concat([_regret(of_form[of_form["model"] == name]) for name in models])
        for scope, members in scopes.items():
            part = of_form[of_form["model"].isin(members)]
            if len(part):
                lost = losses[losses["workload"].isin(members)]
                records.append({"scope": scope, "form": form} | _errors(part) | _choice(lost))
    return TABLE2_SUMMARY.validate(pd.DataFrame(records), where="table2_summary")


def _regret(rows: pd.DataFrame) -> pd.DataFrame:
    frame = rows.rename(columns={"model": "workload", "measured_s": "iter_time_s"}).assign(feasible=True)
    unseen, shipped = (
        regret(frame, frame[name].to_numpy(dtype=float)) for name in ("predicted_s", "predicted_shipped_s")
    )
    return unseen.assign(regret_shipped_pct=shipped["regret_pct"])


def _choice(lost: pd.DataFrame) -> dict[str, float]:
    if lost.empty:
        return {"n_placements": 0} | dict.fromkeys(_CHOICE, math.nan)
    found = 100.0 * (lost["best_plan"] == lost["chosen_plan"]).mean()
    losses = [lost[name] for name in ("regret_pct", "regret_shipped_pct")]
    values = [found, *(value for loss in losses for value in (loss.mean(), loss.max()))]
    return {"n_placements": len(lost)} | dict(zip(_CHOICE, map(float, values), strict=True))


def table2_results(
    rows: Sequence[pd.DataFrame],
    throughput: Iterable[pd.DataFrame],
    published: str | None,
    records: Iterable[Mapping[str, Any]],
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Summarise prediction errors of the paper's workloads, or of profiled ones without a file of its cells.

    Parameters
    ----------
    rows, throughput
        Second tables of `fit_workloads`, and the throughput table, of each workload.
    published
        Path of the paper's cells.
    records
        Record beside each throughput table: ``workload``, and ``points`` with their keys and
        ``repeatability_pct``, the mean relative difference between two runs [%].

    Returns
    -------
    tuple of pandas.DataFrame
        All rows (schema `TABLE2_ROWS`), errors a plan family (`TABLE2`, then the paper's cells) and errors a
        workload and over all (`TABLE2_SUMMARY`); the last two with ``repeatability_pct`` [%] if profiled.
    """
    if published is None:
        return measured_table2(rows, throughput, records)
    cells = read_published("table2", published)
    joined = table2_rows(rows, cells)
    return joined, table2(joined, cells), table2_summary(joined)


def measured_table2(
    rows: Sequence[pd.DataFrame], throughput: Iterable[pd.DataFrame], records: Iterable[Mapping[str, Any]]
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Summarise prediction errors on profiled workloads, with the repeatability beside them."""
    joined = TABLE2_ROWS.validate(pd.concat(rows, ignore_index=True), where="table2_rows")
    parts = [_noise(frame, record) for frame, record in zip(throughput, records, strict=True)]
    noise = pd.concat(parts, ignore_index=True)
    cells = joined[["model", "plan_family"]].drop_duplicates().assign(**dict.fromkeys(_PRINTED, math.nan))
    by_family = noise.groupby(["model", "plan_family"], as_index=False)["repeatability_pct"].mean()
    errors = table2(joined, cells).merge(by_family, how="left", on=["model", "plan_family"])
    summary = table2_summary(joined)
    by_model = noise.groupby("model")["repeatability_pct"].mean()
    scopes = {"all": noise["repeatability_pct"].mean(), **by_model}
    summary = summary[summary["scope"].isin(scopes)].reset_index(drop=True)
    return joined, errors, summary.assign(repeatability_pct=summary["scope"].map(scopes))


def _noise(throughput: pd.DataFrame, record: Mapping[str, Any]) -> pd.DataFrame:
    batch = int(throughput["global_batch_size"].iloc[0])
    points = pd.DataFrame(record["points"], columns=["exec_plan", "placement", "repeatability_pct"])
    cells = zip(points["exec_plan"], points["placement"], strict=True)
    named = points.assign(model=record["workload"], plan_family=[_family(*cell, batch) for cell in cells])
    return named.astype({"repeatability_pct": float})


def sensitivity(
    tables: Iterable[pd.DataFrame],
    cluster_name: str,
    form: str,
    max_gpus: int,
    cpu_threads: Sequence[int] = (),
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compute throughput against resources for several workloads: every plan family, and their envelope.

    Parameters
    ----------
    tables
        One throughput table a workload, schema `makespan.tables.THROUGHPUT`.
    cluster_name, form
        Where plans run, whose constants enter the performance model, and form of that.
    max_gpus
        Curves go from 1 to this many GPUs.
    cpu_threads
        CPU threads a GPU at which offload plans are computed besides the even share of a node.

    Returns
    -------
    tuple of pandas.DataFrame
        Best plan with at most g GPUs (schema `makespan.tables.SENSITIVITY`), and best plan of each
        family at each GPU count (schema `makespan.tables.SENSITIVITY_FAMILIES`).
    """
    hardware = cluster(cluster_name)
    constants = load_environment(cluster_name)
    counts = range(1, max_gpus + 1)
    curves, families = [], []
    for table in tables:
        fit = fit_table(table, str(table["workload"].iloc[0]), form, constants).fit
        of_workload = sensitivity_families(fit, hardware, counts, cpu_threads)
        families.append(of_workload)
        curves.append(envelope(of_workload, counts))
    return (
        SENSITIVITY.validate(pd.concat(curves, ignore_index=True), where="sensitivity"),
        SENSITIVITY_FAMILIES.validate(pd.concat(families, ignore_index=True), where="sensitivity_families"),
    )
