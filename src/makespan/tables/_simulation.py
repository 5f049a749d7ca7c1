"""The schemas of what goes into the simulator besides the trace, and of what comes out of it."""

from typing import Any

from makespan.tables._schema import Column, TableSchema

__all__ = ["EVENTS", "FAILURES", "OUTCOMES"]


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
