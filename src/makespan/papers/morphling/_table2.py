"""Table 2: prediction error of the performance model for every model and plan family."""

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.papers.morphling._tables import TABLE2, TABLE2_ROWS, TABLE2_SUMMARY
from makespan.perf import FORMS, TableFit, fit_table, load_environment, regret
from makespan.plans import Placement, PlanFamily, read_plan
from makespan.tables import FIT

__all__ = ["fit_workload", "table2", "table2_rows", "table2_summary"]

_FAMILIES = [family.title for family in PlanFamily]
_OFFLOAD, _OFFLOAD_GC = PlanFamily.ZERO_OFFLOAD.title, PlanFamily.ZERO_OFFLOAD_GC.title
_GROUP = ["model", "plan_family", "form"]


def fit_workload(
    throughput: pd.DataFrame, environment: str, forms: Iterable[str] = FORMS
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Fit each form to the sampled rows of one workload and predict all of its rows.

    Parameters
    ----------
    throughput
        Schema `makespan.tables.THROUGHPUT`, one workload.
    environment
        Name of the constants that all models of a cluster share, or path of a file with them.
    forms
        Forms of the performance model.

    Returns
    -------
    tuple of pandas.DataFrame
        Fitted parameters (schema `makespan.tables.FIT`, then ``unit`` and further columns, and of
        the fitted rows ``n_observations`` [1], ``residual_rms_pct`` and ``residual_max_pct`` [%]),
        and one row a feasible row and form (schema `TABLE2_ROWS`, then
        ``plan_family`` [text], ``flag`` [text] and ``cpu_threads`` [1]).

    Raises
    ------
    FitError
        The rows do not suffice for a fit.
    """
    workload = str(throughput["workload"].iloc[0])
    constants = load_environment(environment)
    parameters, rows = [], []
    for form in forms:
        result = fit_table(throughput, workload, form, constants)
        parameters.append(result.fit.table().assign(**_residuals(result.fit.residual)))
        rows.append(_rows(result))
    fits = FIT.validate(pd.concat(parameters, ignore_index=True), where=f"fit of {workload}")
    return fits, TABLE2_ROWS.validate(pd.concat(rows, ignore_index=True), where=f"rows of {workload}")


def _residuals(residual: npt.NDArray[np.float64]) -> dict[str, float]:
    """Summarise the residuals of a fit (log of predicted over measured time)."""
    return {
        "n_observations": len(residual),
        "residual_rms_pct": 100.0 * float(np.sqrt(np.mean(residual**2))),
        "residual_max_pct": 100.0 * float(np.max(np.abs(residual))),
    }


def _rows(result: TableFit) -> pd.DataFrame:
    """Put predictions beside measurements, one row a feasible row of the table."""
    frame = result.frame
    cells = zip(frame["exec_plan"], frame["placement"], frame["global_batch_size"], strict=True)
    families = [
        read_plan(plan, n_gpus=Placement.parse(text).n_gpus, global_batch_size=int(batch)).plan_family.title
        for plan, text, batch in cells
    ]
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
            "plan_family": families,
            "flag": frame["flag"],
            "cpu_threads": frame["cpu_threads"],
        }
    )


def table2_rows(rows: Iterable[pd.DataFrame], published: pd.DataFrame) -> pd.DataFrame:
    """Join the rows of several workloads, with plan families called as in the paper.

    Parameters
    ----------
    rows
        Second tables of `fit_workload`.
    published
        Cells of the paper's table: ``model, plan_family, published_avg_error_pct,
        published_max_error_pct`` [%].

    Returns
    -------
    pandas.DataFrame
        Schema `TABLE2_ROWS`, then ``plan_family, flag, cpu_threads``; models that
        the paper's table does not have are left out.
    """
    joined = pd.concat(list(rows), ignore_index=True)
    kept = joined[joined["model"].isin(set(published["model"]))]
    names = [
        _reported_family(model, family, published)
        for model, family in zip(kept["model"], kept["plan_family"], strict=True)
    ]
    return TABLE2_ROWS.validate(kept.assign(plan_family=names), where="table2_rows")


def _reported_family(model: str, family: str, published: pd.DataFrame) -> str:
    """Name a family as the paper does; it calls the offload plans of large models ZeRO-Offload+GC."""
    listed = set(published.loc[published["model"] == model, "plan_family"])
    return _OFFLOAD_GC if family == _OFFLOAD and _OFFLOAD_GC in listed else family


def table2(rows: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Summarise prediction errors for every model, plan family and form.

    Parameters
    ----------
    rows
        Result of `table2_rows`.
    published
        Cells of the paper's table, see `table2_rows`.

    Returns
    -------
    pandas.DataFrame
        Schema `TABLE2`, then ``published_avg_error_pct, published_max_error_pct``
        [%]. Errors are over clean rows that were not fitted, and beside them the average with
        flagged rows. A cell that only the paper has comes with no held-out rows and no error.
    """
    measured = pd.DataFrame(
        [dict(zip(_GROUP, key, strict=True)) | _errors(part) for key, part in rows.groupby(_GROUP)]
    )
    cells = published[["model", "plan_family", "published_avg_error_pct", "published_max_error_pct"]]
    cells = cells[cells["model"].isin(set(rows["model"]))]
    forms = pd.DataFrame({"form": sorted(set(rows["form"]))})
    table = measured.merge(cells.merge(forms, how="cross"), how="outer", on=_GROUP)
    counts = ["n_fit", "n_validate"]
    table[counts] = table[counts].fillna(0)
    models = {model: number for number, model in enumerate(dict.fromkeys(published["model"]))}
    families = {family: number for number, family in enumerate(_FAMILIES)}
    order = pd.DataFrame(
        {
            "model": table["model"].map(models),
            "family": table["plan_family"].map(families),
            "form": table["form"],
        }
    ).sort_values(["model", "family", "form"], kind="stable")
    return TABLE2.validate(table.loc[order.index], where="table2")


def _errors(part: pd.DataFrame) -> dict[str, float]:
    """Errors [%] over held-out rows: clean ones, and all."""
    held_out = part[~part["fitted"]]
    clean = held_out.loc[held_out["clean"], "error_pct"]
    return {
        "n_fit": int(part["fitted"].sum()),
        "n_validate": len(clean),
        "avg_error_pct": clean.mean() if len(clean) else math.nan,
        "p95_error_pct": clean.quantile(0.95) if len(clean) else math.nan,
        "max_error_pct": clean.max() if len(clean) else math.nan,
        "avg_error_all_rows_pct": held_out["error_pct"].mean() if len(held_out) else math.nan,
    }


def table2_summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Summarise prediction error and choice of plan over all rows of a scope.

    Parameters
    ----------
    rows
        Result of `table2_rows`.

    Returns
    -------
    pandas.DataFrame
        Schema `TABLE2_SUMMARY`; scopes are ``all``, ``all but vit``, and each
        model. Regret is the throughput lost when the plan that the model predicts as fastest is
        run, among the clean rows of a placement.
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
    return regret(frame, frame["predicted_s"].to_numpy(dtype=float))


def _choice(lost: pd.DataFrame) -> dict[str, float]:
    if lost.empty:
        nothing = math.nan
        return {
            "n_placements": 0,
            "best_plan_found_pct": nothing,
            "regret_mean_pct": nothing,
            "regret_max_pct": nothing,
        }
    return {
        "n_placements": len(lost),
        "best_plan_found_pct": 100.0 * float((lost["best_plan"] == lost["chosen_plan"]).mean()),
        "regret_mean_pct": float(lost["regret_pct"].mean()),
        "regret_max_pct": float(lost["regret_pct"].max()),
    }
