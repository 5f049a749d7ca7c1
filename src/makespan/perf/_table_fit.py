"""From a throughput table to a fit, its predictions, and what they are worth."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.perf._design import sampling_design
from makespan.perf._environment import Environment
from makespan.perf._fit import Fit, fit
from makespan.perf._points import measured_from_table, points_from_table
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
