"""Schemas of what goes into the engine and comes out of it."""

from typing import Any

import pandas as pd

from makespan.errors import TraceError
from makespan.sim._events import NodeEvent, NodeEventKind
from makespan.tables import Column, TableSchema

__all__ = ["EVENTS", "FAILURES", "OUTCOMES", "read_failures"]


def _columns(*rows: tuple[Any, ...]) -> tuple[Column, ...]:
    return tuple(Column(*row) for row in rows)


EVENTS = TableSchema(
    "events",
    _columns(
        ("time_s", "float", "s", "simulated time"),
        ("seq", "int", "1", "running number; makes the order total"),
        ("kind", "text", "", "what happened, a value of EventKind"),
        ("job_id", "text", "", "job concerned, empty for node events"),
        ("nodes", "text", "", "node:devices held after the event, joined by spaces"),
        ("n_gpus", "int", "1", "devices held after the event"),
        ("plan", "text", "", "execution plan after the event, empty without devices"),
        ("reason", "text", "", "why it happened"),
        ("family", "text", "", "family of the plan"),
        ("cpu_threads", "int", "1", "CPU threads a GPU after the event"),
        ("iter_time_s", "float", "s", "time of a step after the event; missing without devices", True),
        ("steps_left", "float", "1", "steps still to run; missing for node events", True),
    ),
)

OUTCOMES = TableSchema(
    "outcomes",
    _columns(
        ("job_id", "text", "", "job"),
        ("submit_time_s", "float", "s", "submission"),
        ("workload", "text", "", "key of the workload"),
        ("n_gpus", "int", "1", "devices requested"),
        ("plan", "text", "", "plan requested"),
        ("steps", "int", "1", "steps requested"),
        ("is_guaranteed", "bool", "", "whether the job is guaranteed"),
        ("tenant", "text", "", "owner of the job"),
        ("reference_iter_time_s", "float", "s", "time of a step as requested"),
        ("first_start_s", "float", "s", "first time with devices"),
        ("finish_time_s", "float", "s", "end of the last step"),
        ("n_restarts", "int", "1", "restart delays begun after the first start"),
        ("attained_service_gpu_s", "float", "GPU s", "device time received, restarts included"),
        ("waiting_time_s", "float", "s", "time without devices"),
        ("running_time_s", "float", "s", "time with devices and progress"),
        ("restart_time_s", "float", "s", "time with devices but without progress"),
    ),
)

FAILURES = TableSchema(
    "failures",
    _columns(
        ("time_s", "float", "s", "when"),
        ("node_id", "int", "1", "number of the node in the cluster"),
        ("kind", "text", "", "failed or joined"),
    ),
)


def read_failures(frame: pd.DataFrame, where: str) -> tuple[NodeEvent, ...]:
    """Return the node events of a table of schema `FAILURES`.

    Raises
    ------
    TraceError
        The table does not follow the schema or a kind is unknown; names row and column.
    """
    checked = FAILURES.validate(frame, where=where)
    accepted = [kind.value for kind in NodeEventKind]
    events = []
    columns = (checked[name].tolist() for name in FAILURES.names)
    for row, (time_s, node_id, kind) in enumerate(zip(*columns, strict=True)):
        if kind not in accepted:
            raise TraceError(
                f"{where}: row {row + 1}, column 'kind': found {kind!r}; accepted: {', '.join(accepted)}"
            )
        events.append(NodeEvent(time_s, node_id, NodeEventKind(kind)))
    return tuple(events)
