"""What the scheduler knows before the first job runs: predictions, and which times are certain.

A policy decides by predicted times, the simulation runs by true ones. Predictions come from the fitted
model; known exactly are

- the rows that were sampled for the fit,
- what users request: they have run it before, or they would not ask for it,
- for each number of GPUs the plan that is expected to be fastest on the fewest nodes. A scheduler tries
  that before anything else and knows its time from then on, so it is found as in Fig. 7: look it up, fit
  again with what was learned, until the expected fastest is known.

All of this is decided before the simulation and stays as it is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.hardware import NodeSpec
from makespan.perf import Environment, Fit, Learner, load_environment, points_from_table
from makespan.plans import Placement
from makespan.sim import Catalogue
from makespan.studies._catalogue import TableCatalogue
from makespan.tables import PREDICTIONS
from makespan.workloads import JobSpec

__all__ = ["PredictionMode", "predicted_catalogue", "predictions"]

PredictionMode = Literal["fitted", "exact"]
Floats = npt.NDArray[np.float64]
_Pair = tuple[str, str, int]
_PAIR = ["exec_plan", "placement", "cpu_threads"]
_TRUSTED, _REQUESTED, _TRIED = "trusted", "requested", "tried first"


def predictions(
    tables: Mapping[str, pd.DataFrame], jobs: Iterable[JobSpec], cluster: str, form: str, mode: PredictionMode
) -> pd.DataFrame:
    """Predict the time of every pair of plan and placement, and say which times are known.

    Parameters
    ----------
    tables, jobs
        Throughput table (schema `makespan.tables.THROUGHPUT`) by workload, and jobs whose requests are known.
    cluster, form
        Name of the cluster, whose constants enter the performance model, and form of that.
    mode
        ``fitted`` as described above; ``exact`` if all times are known, which no scheduler could.

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.PREDICTIONS`, one row a feasible row of the tables.
    """
    catalogue, environment = TableCatalogue.from_tables(tables), load_environment(cluster)
    requested: dict[str, set[_Pair]] = {key: set() for key in tables}
    for job in jobs:
        item = catalogue.requested(job)
        requested[job.workload].add((item.plan, item.placement.text, item.cpu_threads))
    parts = []
    for key, table in tables.items():
        rows = table[table["feasible"]].reset_index(drop=True)
        given = _Given(rows, environment, _digest(rows), frozenset(requested[key]), form, repr(environment))
        parts.append(_exact(rows) if mode == "exact" else _learned(given))
    return PREDICTIONS.validate(pd.concat(parts, ignore_index=True), where="predictions")


def _exact(rows: pd.DataFrame) -> pd.DataFrame:
    return _table(rows, rows["iter_time_s"].to_numpy(dtype=np.float64), [_TRUSTED] * len(rows))


def _table(rows: pd.DataFrame, predicted_s: Floats, reasons: list[str]) -> pd.DataFrame:
    return rows[["workload", *_PAIR]].assign(
        predicted_iter_time_s=predicted_s, known=[bool(reason) for reason in reasons], reason=reasons
    )


@dataclass(frozen=True, slots=True)
class _Given:
    """What a workload's predictions follow from; rows are equal if their digests are, and so on."""

    rows: pd.DataFrame = field(compare=False)
    environment: Environment = field(compare=False)
    digest: bytes
    requested: frozenset[_Pair]
    form: str
    constants: str


def _digest(rows: pd.DataFrame) -> bytes:
    return pd.util.hash_pandas_object(rows, index=False).to_numpy().tobytes()


@lru_cache(maxsize=64)  # scenarios that differ in jobs or delay share them, and a fit takes a while
def _learned(given: _Given) -> pd.DataFrame:
    rows, requested = given.rows, given.requested
    learner = Learner.from_table(rows, given.form, given.environment)
    pairs = zip(*(rows[name].tolist() for name in _PAIR), strict=True)
    learner.learn([row for row, pair in enumerate(pairs) if pair in requested], _REQUESTED)
    learner.learn_until_known(lambda fit: _first_choices(rows, _expected_s(learner, fit)), _TRIED)
    return _table(rows, _expected_s(learner, learner.fit()), learner.reasons)


def _expected_s(learner: Learner, fit: Fit) -> Floats:
    """Return true times where they are known, and predictions elsewhere."""
    everywhere = fit.predict(points_from_table(learner.rows, fit.points.workload, fit.environment))
    return np.where([bool(reason) for reason in learner.reasons], learner.times_s, everywhere)


def _first_choices(rows: pd.DataFrame, predicted_s: Floats) -> list[int]:
    """Return for each number of GPUs the row expected to be fastest on the fewest nodes."""
    placements = [Placement.parse(text) for text in rows["placement"]]
    frame = pd.DataFrame(
        {
            "gpus": [placement.n_gpus for placement in placements],
            "nodes": [placement.n_nodes for placement in placements],
            "time_s": predicted_s,
        }
    )
    densest = frame[frame["nodes"] == frame.groupby("gpus")["nodes"].transform("min")]
    return [int(str(row)) for row in densest.groupby("gpus")["time_s"].idxmin()]


def predicted_catalogue(
    tables: Mapping[str, pd.DataFrame], predicted_times: pd.DataFrame, node: NodeSpec
) -> Catalogue:
    """Return the catalogue of throughput tables, predicted as their table of `predictions` says."""
    predicted: dict[str, list[float]] = {}
    known: dict[str, list[bool]] = {}
    for key, table in tables.items():
        own = predicted_times[predicted_times["workload"] == key]
        joined = table[_PAIR].merge(own, on=_PAIR, how="left")
        predicted[key] = joined["predicted_iter_time_s"].tolist()
        known[key] = joined["known"].eq(True).tolist()
    return TableCatalogue.from_tables(tables, predicted, known=known, node=node)
