"""The schemas of what goes into the simulator besides the trace, and of what comes out of it."""

from typing import Any

from makespan.tables._schema import Column, TableSchema

__all__ = [
    "ALLOCATION",
    "EVENTS",
    "FAILURES",
    "JCT",
    "JOB_METRICS",
    "OUTCOMES",
    "PERTURBED",
    "PREDICTIONS",
    "TABLE4",
    "COMPARISON",
]


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

JOB_METRICS = TableSchema(
    "job_metrics",
    _columns(
        ("job_id", "text", "", "job"),
        ("jct_s", "float", "s", "finish minus submission"),
        ("queueing_delay_s", "float", "s", "first start minus submission"),
        ("run_alone_s", "float", "s", "duration alone, at once, as requested"),
        ("slowdown", "float", "1", "completion time over duration alone"),
        ("finish_time_fairness", "float", "1", "completion time over that with an equal static share"),
        ("n_reconfigurations", "int", "1", "restart delays begun, the first start included"),
    ),
)

COMPARISON = TableSchema(
    "comparison",
    _columns(
        ("trace", "text", "", "name of the trace"),
        ("policy", "text", "", "name of the policy"),
        ("restart_delay_s", "float", "s", "restart delay of every start and change"),
        ("interval_s", "float", "s", "length of a round; missing if asked after each event", True),
        ("jobs", "int", "1", "jobs that finished"),
        ("avg_jct_s", "float", "s", "mean completion time", True),
        ("p50_jct_s", "float", "s", "median completion time", True),
        ("p99_jct_s", "float", "s", "99th percentile of completion time", True),
        ("makespan_s", "float", "s", "last finish minus first submission", True),
        ("gpu_allocation_ratio", "float", "1", "device time held over device time present", True),
        ("reconfigurations_per_job", "float", "1", "restart delays a job, first start included", True),
        ("sla_attainment", "float", "1", "share of guarantees kept; missing without guarantees", True),
        ("jct_ratio", "float", "1", "mean completion time over that of the baseline", True),
        ("makespan_ratio", "float", "1", "makespan over that of the baseline", True),
        ("wall_s", "float", "s", "wall clock time of the simulation"),
    ),
)

TABLE4 = TableSchema(
    "table4",
    _columns(
        ("trace", "text", "", "name of the trace"),
        ("policy", "text", "", "name of the policy"),
        ("restart_delay_s", "float", "s", "restart delay of every start and change"),
        ("interval_s", "float", "s", "length of a round; missing if asked after each event", True),
        ("jobs", "int", "1", "jobs that finished"),
        ("avg_jct_s", "float", "s", "mean completion time", True),
        ("p50_jct_s", "float", "s", "median completion time", True),
        ("p99_jct_s", "float", "s", "99th percentile of completion time", True),
        ("makespan_s", "float", "s", "last finish minus first submission", True),
        ("gpu_allocation_ratio", "float", "1", "device time held over device time present", True),
        ("reconfigurations_per_job", "float", "1", "restart delays a job, first start included", True),
        ("sla_attainment", "float", "1", "share of guarantees kept; missing without guarantees", True),
        ("jct_ratio_to_morphling", "float", "1", "mean completion time over that of morphling", True),
        ("makespan_ratio_to_morphling", "float", "1", "makespan over that of morphling", True),
        ("wall_s", "float", "s", "wall clock time of the simulation"),
    ),
)

PREDICTIONS = TableSchema(
    "predictions",
    _columns(
        ("workload", "text", "", "key of the workload"),
        ("exec_plan", "text", "", "execution plan in trace notation"),
        ("placement", "text", "", "GPUs on each node, one digit a node"),
        ("cpu_threads", "int", "1", "CPU threads a GPU"),
        ("predicted_iter_time_s", "float", "s", "time of a step that policies decide by"),
        ("known", "bool", "", "whether that is the true time, so that a guarantee may rest on it"),
        ("reason", "text", "", "why it is known: sampled, requested, tried first, trusted; empty if not"),
    ),
)

JCT = TableSchema(
    "jct",
    _columns(
        ("trace", "text", "", "name of the trace"),
        ("policy", "text", "", "name of the policy"),
        ("job_id", "text", "", "job"),
        ("jct_s", "float", "s", "completion time"),
    ),
)

ALLOCATION = TableSchema(
    "allocation",
    _columns(
        ("policy", "text", "", "name of the policy"),
        ("time_s", "float", "s", "time since the first submission"),
        ("plan_family", "text", "", "family of execution plans"),
        ("gpus", "int", "1", "devices that its plans hold from then on"),
    ),
)

PERTURBED = TableSchema(
    "perturbed",
    _columns(
        ("trace", "text", "", "name of the trace"),
        ("policy", "text", "", "name of the policy"),
        ("restart_delay_s", "float", "s", "restart delay of every start and change"),
        ("seeds", "int", "1", "how many shifts of the arrivals"),
        ("avg_jct_s", "float", "s", "mean completion time, mean over shifts"),
        ("avg_jct_std_s", "float", "s", "its standard deviation", True),
        ("makespan_s", "float", "s", "last finish minus first submission, mean over shifts"),
        ("makespan_std_s", "float", "s", "its standard deviation", True),
        ("sla_attainment", "float", "1", "share of guarantees kept, the least of all shifts", True),
    ),
)
