"""How runs to fit are chosen: one after the other, by the fixed design, or at random."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.numerics import named_rng
from makespan.papers.experiment import Experiment, Figure, Given
from makespan.papers.morphling.performance import WorkloadKey
from makespan.perf import (
    Environment,
    TableFit,
    fit_table,
    intervals,
    load_environment,
    points_from_table,
    regret,
    sampling_design,
    sequential_design,
)
from makespan.settings import Count, option, shared
from makespan.workloads import workload as load_workload

Rows = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]
DESIGNS = ("sequential", "fixed", "random")
METRICS = (
    "avg_error_pct",
    "p95_error_pct",
    "max_error_pct",
    "regret_mean_pct",
    "regret_max_pct",
    "coverage_pct",
)
"""Columns that summarise a start; the last is the share of held-out times within their interval."""
_LEVEL = 0.9  # of the intervals
_APART = "vit"  # its errors are reported by themselves, as in Table 2
_of_sampling = partial(option, source="a choice", changes="sampling")


class Sampling(Experiment):
    """Compare sequential, fixed and random designs with the same number of runs, over random starts."""

    name = "sampling"
    tables = {
        "sampling": "prediction error and choice of plan by how runs are chosen, over random starts",
        "sampling_starts": "the same for every start",
    }
    figures = (
        Figure(
            "sampling",
            "Choice of runs",
            "Prediction error on held-out rows and throughput lost by the choice of plan, by how "
            "the runs of a fit are chosen, with the same number of runs per model, on {source} "
            "iteration times. Marks are medians over {starts: values sampling_starts.start}, lines with caps "
            "run from the 10th to the 90th percentile. Sequential: the first run is drawn at random, each "
            "later one is the run that narrows the predictions most.",
            tables=("sampling", "sampling_starts"),
        ),
    )
    is_timed = True
    unjudged = frozenset({"sampling", "sampling_starts"})
    group = "experiments"

    cluster: str = shared("cluster")
    form: str = shared("performance_model.experiment_form")
    workloads: tuple[WorkloadKey, ...] = _of_sampling(
        "workloads that are fitted",
        ("vit", "roberta", "bert", "t5", "gpt2", "llama7", "llama30"),
        min_length=1,
    )
    starts: Count = _of_sampling("random starts; their seeds are 0, 1, ...", 6)

    def timed_workloads(self, source: str, profiled: Sequence[str]) -> Sequence[str]:
        """Return the workloads that are fitted."""
        return self.workloads

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return the errors of every start, and their medians and percentiles."""
        shipped = load_environment(self.cluster)
        parts = []
        for key, table in given.times.items():
            environment = shipped.unseen_by(load_workload(key).model.key)
            for design, start, result in designs(table, key, self.form, environment, range(self.starts)):
                parts.append(judged(result, key, design, start))
        starts = over_workloads(pd.concat(parts, ignore_index=True))
        return {"sampling": summary(starts), "sampling_starts": starts}


def designs(
    table: pd.DataFrame, key: str, form: str, environment: Environment, seeds: Sequence[int]
) -> Iterator[tuple[str, int, TableFit]]:
    """Fit a workload by every design; yields the design, the seed and the fit, with the runs as fitted rows.

    All designs have as many runs as the fixed one, which needs no start and is fitted once. The others do not
    know which rows are flagged before they run; such a row counts as a run, but is not fitted.
    """
    fixed, clean = sampling_design(table, key), table["clean"].to_numpy(dtype=bool)
    fitted_once = fit_table(table, key, form, environment, sampled=fixed)
    feasible = np.flatnonzero(table["feasible"].to_numpy(dtype=bool))
    for seed in seeds:
        yield "fixed", seed, fitted_once
        n_runs, rng = int(fixed.sum()), named_rng(seed, "sampling", key)
        chosen = {
            "sequential": sequential_design(table, key, form, environment, n_runs=n_runs, seed=seed),
            "random": _random_rows(feasible, clean, n_runs, rng),
        }
        for design, rows in chosen.items():
            ran = np.isin(np.arange(len(table)), rows)
            yield design, seed, fit_table(table, key, form, environment, sampled=ran & clean)


def _random_rows(feasible: Rows, clean: Bools, n_runs: int, rng: np.random.Generator) -> list[int]:
    """Draw rows without replacement; beyond ``n_runs`` only until one of them can be fitted."""
    drawn = rng.choice(feasible, n_runs, replace=False).tolist()
    while not clean[drawn].any():
        drawn.append(int(rng.choice(np.setdiff1d(feasible, drawn))))
    return [int(row) for row in drawn]


def judged(result: TableFit, key: str, design: str, start: int) -> pd.DataFrame:
    """Return a row per held-out clean row, with its error, and one per placement, with its regret."""
    held_out = ~result.fitted & result.frame["clean"].to_numpy(dtype=bool)
    points = points_from_table(result.frame, result.fit.points.workload, result.fit.environment)
    limits = intervals(result.fit, points, _LEVEL)
    measured = result.frame["iter_time_s"]
    within = measured.between(limits["low_s"], limits["high_s"])
    errors = pd.DataFrame(
        {"error_pct": result.error_pct[held_out], "is_within": within.to_numpy()[held_out].astype(float)}
    )
    lost = regret(result.frame, result.predicted_s)[["regret_pct"]]
    return pd.concat([errors, lost], ignore_index=True).assign(
        design=design, start=start, model=key, n_fit=int(result.fitted.sum())
    )


def over_workloads(rows: pd.DataFrame) -> pd.DataFrame:
    """Pool the rows of all workloads, as the page of the performance model does: errors without ViT."""
    records = []
    for (design, start), part in rows.groupby(["design", "start"], sort=False):
        judged_models = part["model"] != _APART
        errors = (part[judged_models] if judged_models.any() else part)["error_pct"].dropna()
        records.append(
            {
                "design": design,
                "start": start,
                "n_fit": int(part.groupby("model")["n_fit"].first().sum()),
                "n_validate": len(errors),
                "avg_error_pct": errors.mean(),
                "p95_error_pct": errors.quantile(0.95),
                "max_error_pct": errors.max(),
                "regret_mean_pct": part["regret_pct"].mean(),
                "regret_max_pct": part["regret_pct"].max(),
                "coverage_pct": 100.0 * part["is_within"].mean(),
            }
        )
    table = pd.DataFrame(records)
    order = table["design"].map({name: number for number, name in enumerate(DESIGNS)})
    return table.loc[order.sort_values(kind="stable").index].reset_index(drop=True)


def summary(starts: pd.DataFrame) -> pd.DataFrame:
    """Return median, 10th and 90th percentile over the starts of every metric and design."""
    records = [
        {
            "design": design,
            "metric": metric,
            "starts": len(part),
            "median": part[metric].median(),
            "p10": part[metric].quantile(0.1),
            "p90": part[metric].quantile(0.9),
        }
        for metric in METRICS
        for design, part in starts.groupby("design", sort=False)
    ]
    return pd.DataFrame(records)
