"""The performance model: fits, prediction errors as in Table 2, and sensitivity curves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.hardware import cluster
from makespan.papers.morphling._tables import TABLE2, TABLE2_ROWS, TABLE2_SUMMARY, read_published
from makespan.perf import (
    FORMS,
    Environment,
    TableFit,
    envelope,
    fit_table,
    load_environment,
    regret,
    sampling_design,
    sensitivity_families,
)
from makespan.plans import Placement, PlanFamily, read_plan
from makespan.tables import FIT, SENSITIVITY, SENSITIVITY_FAMILIES
from makespan.workloads import workload as load_workload

__all__ = [
    "fit_workloads",
    "measured_table2",
    "sensitivity",
    "table2",
    "table2_results",
    "table2_rows",
    "table2_summary",
]

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
