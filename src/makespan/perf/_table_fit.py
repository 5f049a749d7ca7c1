"""From a throughput table to a fit, its predictions, and what they are worth."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.perf._design import sampling_design
from makespan.perf._environment import Environment
from makespan.perf._fit import Fit, fit
from makespan.perf._points import measured_from_table, plans_from_table, points_from_table
from makespan.plans import PlanFamily
from makespan.tables import TABLE2, TABLE2_ROWS
from makespan.workloads import Workload
from makespan.workloads import workload as load_workload

__all__ = ["TableFit", "fit_table", "regret"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_TIE = 1e-9  # relative difference below which two predictions count as equal


@dataclass(frozen=True, slots=True)
class TableFit:
    """A fit to the sampled rows of a throughput table and its predictions of all of them.

    Parameters
    ----------
    fit
        The fit.
    frame
        The feasible rows of the table, with a new index.
    fitted
        Which of them were sampled, (n,).
    predicted_s
        Predicted iteration times [s], (n,).
    """

    fit: Fit
    frame: pd.DataFrame
    fitted: Bools
    predicted_s: Floats

    @property
    def error_pct(self) -> Floats:
        """Relative error of each prediction [%], not negative, (n,)."""
        measured = self.frame["iter_time_s"].to_numpy(dtype=np.float64)
        return np.asarray(100.0 * np.abs(self.predicted_s - measured) / measured)

    def rows(self) -> pd.DataFrame:
        """Return one row a feasible row of the table, schema `makespan.tables.TABLE2_ROWS`."""
        table = pd.DataFrame(
            {
                "model": self.frame["workload"],
                "exec_plan": self.frame["exec_plan"],
                "placement": self.frame["placement"],
                "form": self.fit.form.name,
                "fitted": self.fitted,
                "clean": self.frame["clean"],
                "measured_s": self.frame["iter_time_s"],
                "predicted_s": self.predicted_s,
                "error_pct": self.error_pct,
            }
        )
        return TABLE2_ROWS.validate(table, where=f"rows of {self.fit.workload}")

    def errors(self) -> pd.DataFrame:
        """Return errors a plan family and, as ``all``, of every family; schema `makespan.tables.TABLE2`."""
        pairs = plans_from_table(self.frame, self.fit.points.workload)
        families = np.array([plan.plan_family.title for plan, _ in pairs])
        present = [family.title for family in PlanFamily if (families == family.title).any()]
        masks = {title: families == title for title in present} | {"all": families != ""}
        return TABLE2.validate(
            pd.DataFrame([self._error_row(name, mask) for name, mask in masks.items()]),
            where=f"errors of {self.fit.workload}",
        )

    def _error_row(self, family: str, mask: Bools) -> dict[str, object]:
        held_out = mask & ~self.fitted
        clean = self.error_pct[held_out & self.frame["clean"].to_numpy(dtype=bool)]
        every = self.error_pct[held_out]
        return {
            "model": self.fit.workload,
            "plan_family": family,
            "form": self.fit.form.name,
            "n_fit": int((mask & self.fitted).sum()),
            "n_validate": len(clean),
            "avg_error_pct": float(clean.mean()) if clean.size else float("nan"),
            "p95_error_pct": float(np.quantile(clean, 0.95)) if clean.size else float("nan"),
            "max_error_pct": float(clean.max()) if clean.size else float("nan"),
            "avg_error_all_rows_pct": float(every.mean()) if every.size else float("nan"),
        }


def fit_table(frame: pd.DataFrame, workload: str, form: str, environment: Environment) -> TableFit:
    """Sample, fit and predict the rows of one workload in a throughput table.

    Parameters
    ----------
    frame
        Schema `makespan.tables.THROUGHPUT`; other workloads and infeasible rows are left out.
    workload
        Key of the workload.
    form
        Form of the model, a key of `makespan.perf.FORMS`.
    environment
        Shared constants and priors.

    Returns
    -------
    TableFit
        Fit and predictions.

    Raises
    ------
    FitError
        No clean feasible row can be sampled.
    """
    spec = load_workload(workload)
    kept = frame[(frame["workload"] == spec.key) & frame["feasible"].astype(bool)].reset_index(drop=True)
    measured, fitted = measured_from_table(kept), sampling_design(kept, spec.key)
    candidates = []
    for variant in _micro_batch_variants(spec):
        points = points_from_table(kept, variant, environment)
        result = fit(form, points.take(fitted), measured.take(fitted), environment)
        candidates.append(TableFit(result, kept, fitted, result.predict(points)))
    return min(candidates, key=lambda candidate: candidate.fit.cost)


def _micro_batch_variants(spec: Workload) -> list[Workload]:
    """Return the workload with each cap on the micro-batches of a pipeline that its trace may have used.

    Traces do not record it. Where pipelines split the batch at all, the cap of the preset and
    one micro-batch a sample are tried, and the better fit is kept.
    """
    if spec.max_microbatches == 1:
        return [spec]
    return [spec, replace(spec, max_microbatches=spec.global_batch_size)]


def regret(frame: pd.DataFrame, predicted_s: Floats) -> pd.DataFrame:
    """Evaluate the choice of the plan: what is lost when the plan predicted as fastest is run.

    Of plans predicted as equally fast the one that partitions most is chosen, because it needs
    no more memory.

    Parameters
    ----------
    frame
        Columns ``workload, exec_plan, placement, clean, feasible, iter_time_s`` [s], and
        ``cpu_threads`` where the table has them; one workload.
    predicted_s
        Predicted iteration time of each row [s], (n_rows,).

    Returns
    -------
    pandas.DataFrame
        ``workload, placement, best_plan, chosen_plan, regret_pct``, one row a placement (and number
        of CPU threads) on which at least two clean plans were measured; regret is the share [%]
        of the best throughput that is lost.
    """
    usable = (frame["clean"] & frame["feasible"]).to_numpy(dtype=bool)
    kept = frame[usable].assign(predicted_s=np.asarray(predicted_s)[usable])
    keys = ["workload", "placement"] + (["cpu_threads"] if "cpu_threads" in kept else [])
    records = [
        {"workload": key[0], "placement": key[1]} | _choice(group)
        for key, group in kept.groupby(keys, sort=True)
        if len(group) > 1
    ]
    names = ["workload", "placement", "best_plan", "chosen_plan", "regret_pct"]
    return pd.DataFrame(records, columns=names)


def _choice(group: pd.DataFrame) -> dict[str, object]:
    measured = group["iter_time_s"].to_numpy(dtype=np.float64)
    predicted = group["predicted_s"].to_numpy(dtype=np.float64)
    plans = [str(text) for text in group["exec_plan"]]
    tied = np.flatnonzero(predicted <= predicted.min() * (1.0 + _TIE))
    chosen = min(tied.tolist(), key=lambda row: (-_partitioning(plans[row]), plans[row]))
    best = int(np.argmin(measured))
    lost = 100.0 * (1.0 - measured[best] / measured[chosen])
    return {"best_plan": plans[best], "chosen_plan": plans[chosen], "regret_pct": float(lost)}


def _partitioning(text: str) -> int:
    return int(text.startswith("zero"))
