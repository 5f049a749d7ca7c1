"""From what happened to the two tables that a simulation leaves behind, and a recorder for others."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from makespan.sim._catalogue import Catalogue
from makespan.sim._events import Event
from makespan.sim._view import ClusterView, JobView
from makespan.tables import EVENTS, OUTCOMES, TableSchema

__all__ = ["Recorder", "events_table", "outcomes_table"]

_DTYPES: dict[str, Any] = {"text": "str", "int": "int64", "float": "float64", "bool": bool}


class Recorder:
    """An observer that keeps every event; the engine keeps its own record, this one is for others.

    Attributes
    ----------
    events
        What happened so far, in order.
    """

    __slots__ = ("events",)

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, event: Event, view: ClusterView) -> None:
        """Keep the event."""
        self.events.append(event)

    def table(self) -> pd.DataFrame:
        """Return the events as a table of schema `EVENTS`."""
        return events_table(self.events)


def events_table(rows: Sequence[tuple[Any, ...]]) -> pd.DataFrame:
    """Return rows in the order of the fields of `Event` as a table of schema `EVENTS`."""
    return _table(rows, EVENTS)


def outcomes_table(jobs: Sequence[tuple[JobView, float]], catalogue: Catalogue) -> pd.DataFrame:
    """Return one row a job, in the order of submission, as a table of schema `OUTCOMES`.

    Parameters
    ----------
    jobs
        Finished jobs with their finish times [s].
    catalogue
        Where the references of the jobs are.
    """
    rows = [
        (
            job.spec.job_id,
            job.spec.submit_time_s,
            job.spec.workload,
            job.spec.n_gpus,
            job.spec.plan,
            job.spec.steps,
            job.spec.is_guaranteed,
            job.spec.tenant,
            catalogue.requested(job.spec).iter_time_s,
            job.first_start_s,
            finish_time_s,
            job.restart_count,
            job._held_gpu_s,
            job._waiting_s,
            job._running_s,
            job._restart_s,
        )
        for job, finish_time_s in jobs
    ]
    return _table(rows, OUTCOMES)


def _table(rows: Sequence[tuple[Any, ...]], schema: TableSchema) -> pd.DataFrame:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema.columns)
    return pd.DataFrame(
        {
            column.name: pd.Series(list(values), dtype=_DTYPES[column.kind])
            for column, values in zip(schema.columns, columns, strict=True)
        }
    )
