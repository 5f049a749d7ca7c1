"""The performance model: fits, prediction errors as in Table 2, and sensitivity curves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.files import read_json
from makespan.hardware import cluster
from makespan.papers.experiment import SOURCES, Experiment, Figure, Given, one_per
from makespan.perf import (
    FORMS,
    TableFit,
    envelope,
    fit_table,
    load_environment,
    regret,
    sampling_design,
    sensitivity_families,
)
from makespan.plans import Placement, PlanFamily, read_plan
from makespan.settings import Count, one_of, option, shared
from makespan.workloads import workload as load_workload, workload_keys

WorkloadKey = Annotated[str, one_of(workload_keys)]
Bools = npt.NDArray[np.bool_]
_FAMILIES = [family.title for family in PlanFamily]
_OFFLOAD, _OFFLOAD_GC = PlanFamily.ZERO_OFFLOAD.title, PlanFamily.ZERO_OFFLOAD_GC.title
_GROUP = ["model", "plan_family", "form"]
_PRINTED = ["published_avg_error_pct", "published_max_error_pct"]
_CHOICE = (
    "best_plan_found_pct", "regret_mean_pct", "regret_max_pct", "regret_mean_shipped_pct",
    "regret_max_shipped_pct",
)  # fmt: skip


def is_profiled(given: Given) -> bool:
    """Tell whether iteration times are a profile of small workloads, which takes the place of the paper's."""
    return "records" in given.paths


class OnMachine(Experiment):
    """Experiment that needs the constants of the machine: those of the cluster, or of a profile."""

    cluster: str = shared("cluster")
    environment: str | None = shared("throughput.measured.profile.environment")

    def constants(self, given: Given) -> str:
        """Return the name or the file of the constants."""
        return str(given.paths["environment"] or self.environment) if is_profiled(given) else self.cluster


class FitModels(OnMachine):
    """Fit every form of the performance model to every workload, and compare its predictions with Table 2.

    On profiled workloads, of which the paper has no cells, the repeatability stands beside the errors.
    """

    name = "fit_models"
    tables = {
        "fits/<workload>": "fitted parameters of both forms with standard errors",
        "table2": "prediction error by model, plan family and form",
        "table2_rows": "prediction and error of every row",
        "table2_summary": "error and choice of plan over all models",
    }
    figures = (
        Figure(
            "table2",
            "Table 2",
            "Prediction error of the performance model on rows that were not "
            "fitted, by model and plan family, on {source} iteration times; one "
            "fit per model and form. Bars are the form that policies use, "
            "outlines the other one, hollow diamonds the published values, and "
            "the dashed line the bound that the paper claims for the average.",
            tables=("table2",),
            options={"forms": "performance_model.forms", "shown": "performance_model.experiment_form"},
        ),
        Figure(
            "prediction",
            "Prediction",
            "Predicted against {source} iteration times, one panel per model; on the dotted line "
            "both agree. Each mark is one plan on one placement: plus signs were used in the fit, "
            "filled marks were held out, and hollow ones are flagged as anomalies.",
            tables=("table2_rows",),
            options={"form": "performance_model.experiment_form"},
        ),
    )
    cells = ("table2",)
    sources = SOURCES
    on_profile = True
    is_timed = True
    unjudged = frozenset({"table2_rows", "table2_summary"})
    on_the_way = frozenset({"fits"})
    group = "experiments"

    workloads: tuple[str, ...] = shared("morphling.workloads")
    forms: tuple[str, ...] = shared("performance_model.forms")

    def timed_workloads(self, source: str, profiled: Sequence[str]) -> Sequence[str]:
        """Return the workloads that are fitted."""
        return profiled or self.workloads

    def tables_of(self, source: str, profiled: Sequence[str]) -> Mapping[str, str]:
        """Return the tables, with one of fitted parameters per workload."""
        workloads = self.timed_workloads(source, profiled)
        return one_per("<workload>", workloads, super().tables_of(source, profiled))

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Fit every form to every workload, predict every row and summarise the errors.

        Returns
        -------
        dict of str to pandas.DataFrame
            Fitted parameters of each workload; all rows, errors per plan family, beside the paper's cells,
            and errors per workload and over all, the last two with ``repeatability_pct`` [%] if profiled.
        """
        throughput, is_own = list(given.times.values()), is_profiled(given)
        fitted = fit_workloads(throughput, self.constants(given), self.forms, holds_out_kinds=is_own)
        fits = {f"fits/{key}": found for key, (found, _) in zip(given.times, fitted, strict=True)}
        rows = [found for _, found in fitted]
        if is_own:
            records = [read_json(path) for path in given.paths["records"]]
            return fits | measured_table2(rows, throughput, records)
        cells = given.cells["table2"]
        joined = table2_rows(rows, cells)
        table, summary = table2(joined, cells), table2_summary(joined)
        return fits | {"table2_rows": joined, "table2": table, "table2_summary": summary}


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
        Schema `makespan.tables.THROUGHPUT`, one table per workload.
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
        ``residual_max_pct`` [%]), and one row per feasible row and form (those of ``table2_rows``, then
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
    fitted = []
    for table, key, rows in zip(tables, keys, sampled, strict=True):
        unseen = shipped.unseen_by(load_workload(key).model.key)
        parameters, predicted = [], []
        for form in forms:
            as_shipped, as_unseen = (
                fit_table(table, key, form, constants, sampled=rows) for constants in (shipped, unseen)
            )
            residual = as_shipped.fit.residual  # log of predicted over measured time
            parameters.append(
                as_shipped.fit.table().assign(
                    n_observations=len(residual),
                    residual_rms_pct=100.0 * float(np.sqrt(np.mean(residual**2))),
                    residual_max_pct=100.0 * float(np.max(np.abs(residual))),
                )
            )
            predicted.append(_rows(as_unseen, as_shipped))
        fitted.append((pd.concat(parameters, ignore_index=True), pd.concat(predicted, ignore_index=True)))
    return fitted


def _without_kinds(throughput: pd.DataFrame, sampled: Bools, number: int) -> Bools:
    """Keep every second kind out of the sample, of those that would be fitted wherever they span devices.

    Plain data parallelism stays. Kinds are taken in the order of the table, from the first for the workloads
    with an even ``number`` and from the second for the others.
    """
    # Family of a plan on several devices, and whether it divides tensors and layers.
    kinds: list[tuple[str, bool, bool] | None] = []
    for text, placement, batch in _cells(throughput):
        n_gpus = Placement.parse(placement).n_gpus
        plan = read_plan(text, n_gpus=n_gpus, global_batch_size=batch)
        is_plain = n_gpus == 1 or plan.plan_family is PlanFamily.DP
        kinds.append(None if is_plain else (plan.plan_family.title, plan.tp > 1, plan.pp > 1))
    judged = throughput["feasible"].to_numpy(dtype=bool) & ~sampled
    left = {kind for kind, is_judged in zip(kinds, judged, strict=True) if is_judged}
    fitted = dict.fromkeys(kind for kind, chosen in zip(kinds, sampled, strict=True) if kind and chosen)
    kept_out = [kind for kind in fitted if kind not in left][number % 2 :: 2]
    return np.asarray(sampled & np.array([kind not in kept_out for kind in kinds]))


def _cells(frame: pd.DataFrame) -> Iterable[tuple[str, str, int]]:
    return zip(
        frame["exec_plan"], frame["placement"], frame["global_batch_size"].astype(int).tolist(), strict=True
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

    Takes the second tables of `fit_workloads`; models of which the paper has no cells are left out.
    """
    joined = pd.concat(list(rows), ignore_index=True)
    kept = joined[joined["model"].isin(set(published["model"]))]
    # The paper calls the offload plans of large models ZeRO-Offload+GC.
    renamed = set(published.loc[published["plan_family"] == _OFFLOAD_GC, "model"])
    names = [
        _OFFLOAD_GC if family == _OFFLOAD and model in renamed else family
        for model, family in zip(kept["model"], kept["plan_family"], strict=True)
    ]
    return kept.assign(plan_family=names).reset_index(drop=True)


def table2(rows: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Summarise prediction errors for every model, plan family and form.

    Takes the result of `table2_rows`. The last columns are ``published_avg_error_pct`` and
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
    return table.loc[order]


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
    """Summarise prediction error and choice of plan of the rows of `table2_rows`.

    Scopes are ``all``, ``all but vit``, and each model. Regret is the throughput lost when the plan that the
    model predicts as fastest is run, among the clean rows of a placement.
    """
    models = list(dict.fromkeys(rows["model"]))
    scopes = {"all": models, "all but vit": [name for name in models if name != "vit"]}
    scopes |= {name: [name] for name in models}
    records: list[dict[str, object]] = []
    for form in dict.fromkeys(rows["form"]):
        of_form = rows[rows["form"] == form]
        of_models = []
        for name in models:
            frame = of_form[of_form["model"] == name].assign(feasible=True)
            frame = frame.rename(columns={"model": "workload", "measured_s": "iter_time_s"})
            unseen, shipped = (
                regret(frame, frame[column].to_numpy(dtype=float))
                for column in ("predicted_s", "predicted_shipped_s")
            )
            of_models.append(unseen.assign(regret_shipped_pct=shipped["regret_pct"]))
        losses = pd.concat(of_models)
        for scope, members in scopes.items():
            part = of_form[of_form["model"].isin(members)]
            if part.empty:
                continue
            lost = losses[losses["workload"].isin(members)]
            choice = dict.fromkeys(_CHOICE, math.nan)
            if len(lost):
                values = [100.0 * (lost["best_plan"] == lost["chosen_plan"]).mean()]
                for name in ("regret_pct", "regret_shipped_pct"):
                    values += [lost[name].mean(), lost[name].max()]
                choice = dict(zip(_CHOICE, map(float, values), strict=True))
            setting = {"scope": scope, "form": form}
            records.append(setting | _errors(part) | {"n_placements": len(lost)} | choice)
    return pd.DataFrame(records)


def measured_table2(
    rows: Sequence[pd.DataFrame], throughput: Iterable[pd.DataFrame], records: Iterable[Mapping[str, Any]]
) -> dict[str, pd.DataFrame]:
    """Summarise prediction errors on profiled workloads, with the repeatability beside them.

    Parameters
    ----------
    rows, throughput
        Second tables of `fit_workloads`, and the throughput table, of each workload.
    records
        Record beside each throughput table: ``workload``, and ``points`` with their keys and
        ``repeatability_pct``, the mean relative difference between two runs [%].
    """
    joined = pd.concat(rows, ignore_index=True)
    parts = []
    for table, record in zip(throughput, records, strict=True):
        batch = int(table["global_batch_size"].iloc[0])
        points = pd.DataFrame(record["points"], columns=["exec_plan", "placement", "repeatability_pct"])
        places = zip(points["exec_plan"], points["placement"], strict=True)
        parts.append(
            points.assign(model=record["workload"], plan_family=[_family(*place, batch) for place in places])
        )
    noise = pd.concat(parts, ignore_index=True).astype({"repeatability_pct": float})
    cells = joined[["model", "plan_family"]].drop_duplicates().assign(**dict.fromkeys(_PRINTED, math.nan))
    by_family = noise.groupby(["model", "plan_family"], as_index=False)["repeatability_pct"].mean()
    errors = table2(joined, cells).merge(by_family, how="left", on=["model", "plan_family"])
    summary = table2_summary(joined)
    by_model = noise.groupby("model")["repeatability_pct"].mean()
    scopes = {"all": noise["repeatability_pct"].mean(), **by_model}
    summary = summary[summary["scope"].isin(scopes)].reset_index(drop=True)
    summary = summary.assign(repeatability_pct=summary["scope"].map(scopes))
    return {"table2_rows": joined, "table2": errors, "table2_summary": summary}


_of_curves = partial(option, source="Morphling, motivation", changes="sensitivity")


class Sensitivity(Experiment):
    """Throughput of the best plan against the number of GPUs, of every plan family and over all."""

    name = "sensitivity"
    tables = {
        "sensitivity": "best plan and throughput against GPUs",
        "sensitivity_families": "the same for every plan family and number of CPU threads",
    }
    figures = (
        Figure(
            "sensitivity",
            "Sensitivity",
            "Throughput of every plan family against the number of GPUs, and of "
            "the best plan with at most that many GPUs, by the performance model, "
            "fitted once per model to {source} iteration times. Counts at which a "
            "family is slower than with fewer GPUs are left out.",
            tables=("sensitivity", "sensitivity_families"),
        ),
        Figure(
            "sensitivity_cpu",
            "Sensitivity to CPU threads",
            "Throughput of the best offload plan against the number of CPU threads per GPU, by the "
            "performance model fitted to {source} iteration times. A line that rises shows a plan "
            "that waits for the CPU.",
            tables=("sensitivity_families",),
        ),
    )
    sources = SOURCES
    is_timed = True
    group = "experiments"

    cluster: str = shared("cluster")
    form: str = shared("performance_model.experiment_form")
    workloads: tuple[WorkloadKey, ...] = _of_curves(
        "workloads whose curves are drawn", ("vit", "roberta", "bert", "t5", "gpt2", "llama7", "llama30")
    )
    max_gpus: int = option(
        "the curve is computed at 1, 2, ..., max_gpus GPUs",
        64,
        unit="GPU",
        source="Morphling, motivation: the 64 GPUs of the cluster",
        changes="sensitivity",
        ge=1,
    )
    cpu_threads: tuple[Count, ...] = option(
        "CPU threads per GPU at which offload plans are computed, besides the node's even share",
        (2, 4, 8, 24, 48),
        unit="threads",
        source="Morphling, motivation",
        changes="sensitivity_families",
    )

    def timed_workloads(self, source: str, profiled: Sequence[str]) -> Sequence[str]:
        """Return the workloads whose curves are drawn."""
        return self.workloads

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return the best plan with at most g GPUs, and the best plan of each family at each GPU count."""
        hardware, constants = cluster(self.cluster), load_environment(self.cluster)
        counts = range(1, self.max_gpus + 1)
        curves, families = [], []
        for table in given.times.values():
            fit = fit_table(table, str(table["workload"].iloc[0]), self.form, constants).fit
            of_workload = sensitivity_families(fit, hardware, counts, self.cpu_threads)
            families.append(of_workload)
            curves.append(envelope(of_workload, counts))
        return {
            "sensitivity": pd.concat(curves, ignore_index=True),
            "sensitivity_families": pd.concat(families, ignore_index=True),
        }
