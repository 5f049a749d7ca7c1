"""What the scheduler knows: predictions, and which times are certain.

A policy decides by predicted times, the simulation runs by true ones. Predictions come from the model that
is fitted to the sampled rows, whose times are known. Of everything else the time is known for a job alone,
once it has run so (`makespan.sim.JobView.has_run`) or, if users state what their requests take, once it is
submitted. No list of jobs teaches another one, and a trial costs its time like any other run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import pandas as pd

from makespan.hardware import NodeSpec
from makespan.perf import Environment, Learner, load_environment, points_from_table
from makespan.rounding import significant
from makespan.sim import Catalogue
from makespan.studies._catalogue import TableCatalogue
from makespan.tables import ON_DEMAND, PREDICTIONS

__all__ = ["PREDICTION_MODES", "PredictionMode", "exactly", "predicted_catalogue", "predictions"]

PredictionMode = Literal["sampled", "requests", "exact"]
PREDICTION_MODES: tuple[PredictionMode, ...] = ("sampled", "requests", "exact")
"""What policies know of times: sampled rows, what users state of their requests too, or everything."""

_PAIR = ["exec_plan", "placement", "cpu_threads"]


def predictions(tables: Mapping[str, pd.DataFrame], cluster: str, form: str) -> pd.DataFrame:
    """Predict the time of every pair of plan and placement, and say which times are known beforehand.

    These are the times of the rows to which the performance model is fitted.

    Parameters
    ----------
    tables
        Throughput table (schema `makespan.tables.THROUGHPUT`) by workload.
    cluster, form
        Name of the cluster, whose constants enter the performance model, and form of that.

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.PREDICTIONS`, one row a feasible row of the tables.
    """
    environment, parts = load_environment(cluster), []
    for table in tables.values():
        rows = table[table["feasible"]].reset_index(drop=True)
        given = _Given(rows, environment, _digest(rows), form, repr(environment))
        parts.append(_predicted(given))
    return PREDICTIONS.validate(pd.concat(parts, ignore_index=True), where="predictions")


@dataclass(frozen=True, slots=True)
class _Given:
    """What a workload's predictions follow from; rows are equal if their digests are, and so on."""

    rows: pd.DataFrame = field(compare=False)
    environment: Environment = field(compare=False)
    digest: bytes
    form: str
    constants: str


def _digest(rows: pd.DataFrame) -> bytes:
    return pd.util.hash_pandas_object(rows, index=False).to_numpy().tobytes()


@lru_cache(maxsize=64)  # scenarios that differ in jobs or delay share them, and a fit takes a while
def _predicted(given: _Given) -> pd.DataFrame:
    """Return true times of the sampled rows, and predictions elsewhere; all shares are predicted.

    Rows computed on demand are predicted but never sampled, so that a request of one job does not change
    what policies believe of all others.
    """
    in_table = (given.rows["provenance"] != ON_DEMAND).to_numpy(dtype=bool)
    learner = Learner.from_table(given.rows[in_table], given.form, given.environment)
    fit = learner.fit()
    points = points_from_table(given.rows, fit.points.workload, given.environment)
    computing, moving = fit.busy_shares(points)
    is_sampled = np.zeros(len(given.rows), dtype=bool)
    is_sampled[in_table] = [bool(reason) for reason in learner.reasons]
    times_s = given.rows["iter_time_s"].to_numpy(dtype=np.float64)
    return given.rows[["workload", *_PAIR]].assign(
        predicted_iter_time_s=np.where(is_sampled, times_s, significant(fit.predict(points))),
        known=is_sampled,
        computing_share=significant(computing),
        moving_share=significant(moving),
    )


def predicted_catalogue(
    tables: Mapping[str, pd.DataFrame], predicted_times: pd.DataFrame, node: NodeSpec
) -> Catalogue:
    """Return the catalogue of throughput tables, predicted as their table of `predictions` says."""
    predicted: dict[str, list[float]] = {}
    known: dict[str, list[bool]] = {}
    busy: dict[str, list[tuple[float, float]]] = {}
    for key, table in tables.items():
        own = predicted_times[predicted_times["workload"] == key]
        joined = table[_PAIR].merge(own, on=_PAIR, how="left")
        predicted[key] = joined["predicted_iter_time_s"].tolist()
        known[key] = joined["known"].eq(True).tolist()
        busy[key] = list(joined[["computing_share", "moving_share"]].itertuples(index=False, name=None))
    return TableCatalogue.from_tables(tables, predicted, known=known, busy=busy, node=node)


def exactly(catalogue: Catalogue) -> TableCatalogue:
    """Return a catalogue with the same configurations, whose true times all policies know."""
    return TableCatalogue(
        replace(item, predicted_iter_time_s=item.iter_time_s, is_known=True)
        for key in catalogue.workloads
        for item in catalogue.all(key)
    )
