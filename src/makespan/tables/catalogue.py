"""The schemas that several papers use; those of one paper alone stand in that paper."""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.tables.schema import TableSchema, table_schema


def _timed_where_feasible(frame: pd.DataFrame) -> tuple[npt.NDArray[np.bool_], str, str]:
    wrong = frame["feasible"].to_numpy(dtype=bool) & ~_is_time(frame["iter_time_s"])
    return wrong, "iter_time_s", "a positive time where feasible is true"


def _predicted(frame: pd.DataFrame) -> tuple[npt.NDArray[np.bool_], str, str]:
    for name in ("computing_share", "moving_share"):
        outside = ~frame[name].between(0.0, 1.0).to_numpy(dtype=bool)
        if outside.any():
            return outside, name, "a share from 0 to 1"
    return ~_is_time(frame["predicted_iter_time_s"]), "predicted_iter_time_s", "a positive time"


def _is_time(values: "pd.Series[float]") -> npt.NDArray[np.bool_]:
    return ((values > 0) & (values < np.inf)).to_numpy(dtype=bool)


THROUGHPUT = table_schema(
    "throughput",
    ("workload", "text", "", "key of the workload"),
    ("exec_plan", "text", "", "execution plan in trace notation"),
    ("placement", "text", "", "GPUs on each node, one digit a node"),
    ("cpu_threads", "int", "1", "CPU threads a GPU"),
    ("global_batch_size", "int", "samples", "samples an optimiser step"),
    ("iter_time_s", "float", "s", "time of one optimiser step; missing if infeasible", True),
    ("forward_s", "float", "s", "reported forward phase, where there is one", True),
    ("overlap_sync_s", "float", "s", "reported backward and synchronisation phase", True),
    ("optimize_s", "float", "s", "reported optimiser phase", True),
    ("feasible", "bool", "", "whether the plan can run in this placement"),
    ("clean", "bool", "", "whether no measurement anomaly was found"),
    ("flag", "text", "", "the anomaly, empty for clean rows"),
    ("provenance", "text", "", "emulated, published, measured, interpolated or emulated on demand"),
    rule=_timed_where_feasible,
)
FIT = table_schema(
    "fit",
    ("workload", "text", "", "key of the workload"),
    ("form", "text", "", "form of the performance model"),
    ("parameter", "text", "", "name of the fitted parameter"),
    ("value", "float", "", "fitted value", True),
    ("std_err", "float", "", "standard error of the value", True),
    ("identified", "bool", "", "whether the observations determine the parameter"),
)
SENSITIVITY = table_schema(
    "sensitivity",
    ("model", "text", "", "key of the workload"),
    ("gpus", "int", "1", "GPUs at the most"),
    ("best_plan", "text", "", "fastest feasible plan, empty if none"),
    ("throughput_samples_per_s", "float", "samples/s", "its throughput, 0 if none"),
)
SENSITIVITY_FAMILIES = table_schema(
    "sensitivity_families",
    ("model", "text", "", "key of the workload"),
    ("plan_family", "text", "", "family of execution plans"),
    ("gpus", "int", "1", "GPUs used"),
    ("cpu_threads", "int", "1", "CPU threads a GPU"),
    ("plan", "text", "", "fastest feasible plan of the family"),
    ("throughput_samples_per_s", "float", "samples/s", "its throughput"),
)
REQUESTS = table_schema(
    "requests",
    ("job_id", "text", "", "name of the job in the trace"),
    ("submit_time_s", "float", "s", "submission, counted from the first one of the trace"),
    ("n_gpus", "int", "1", "GPUs requested"),
    ("n_cpus", "int", "1", "CPUs requested, 0 if the trace does not say"),
    ("duration_s", "float", "s", "time for which the job held its GPUs"),
    ("tenant", "text", "", "virtual cluster, user or class of service"),
    ("status", "text", "", "how the job ended, in the words of the trace"),
)
JOBS = table_schema(
    "jobs",
    ("job_id", "text", "", "name of the job, unique"),
    ("submit_time_s", "float", "s", "when it enters the system"),
    ("workload", "text", "", "key of what it trains"),
    ("n_gpus", "int", "1", "GPUs requested"),
    ("n_cpus", "int", "1", "CPU threads requested"),
    ("plan", "text", "", "execution plan requested, in trace notation"),
    ("steps", "int", "1", "optimiser steps to run"),
    ("is_guaranteed", "bool", "", "whether it must run at least as fast as requested"),
    ("tenant", "text", "", "owner of a quota, empty if there is none"),
    ("duration_s", "float", "s", "run time stated for the request, where there is one", True),
)
PREDICTIONS = table_schema(
    "predictions",
    ("workload", "text", "", "key of the workload"),
    ("exec_plan", "text", "", "execution plan in trace notation"),
    ("placement", "text", "", "GPUs on each node, one digit a node"),
    ("cpu_threads", "int", "1", "CPU threads a GPU"),
    ("predicted_iter_time_s", "float", "s", "time of a step that policies decide by"),
    ("known", "bool", "", "whether that is the true time, so that a guarantee may rest on it"),
    ("computing_share", "float", "1", "share of a step in which devices compute, by the fitted model"),
    ("moving_share", "float", "1", "share of a step in which data move between them"),
    rule=_predicted,
)
FAILURES = table_schema(
    "failures",
    ("time_s", "float", "s", "when"),
    ("node_id", "int", "1", "number of the node in the cluster"),
    ("kind", "text", "", "failed or joined"),
)
EVENTS = table_schema(
    "events",
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
    ("shared_nodes", "text", "", "node:devices that a guest uses after the event beside their holders"),
)
OUTCOMES = table_schema(
    "outcomes",
    ("job_id", "text", "", "job"),
    ("submit_time_s", "float", "s", "submission"),
    ("workload", "text", "", "key of the workload"),
    ("n_gpus", "int", "1", "devices requested"),
    ("plan", "text", "", "plan requested"),
    ("steps", "int", "1", "steps requested"),
    ("is_guaranteed", "bool", "", "whether the job is guaranteed"),
    ("tenant", "text", "", "owner of the job"),
    ("reference_iter_time_s", "float", "s", "time of a step as requested"),
    ("reference_plan", "text", "", "plan of that step: the requested one, or what stands in for it"),
    ("reference_cpu_threads", "int", "1", "CPU threads per GPU of that step"),
    ("reference_provenance", "text", "", "provenance of that time, as in the throughput table"),
    ("first_start_s", "float", "s", "first time with devices"),
    ("finish_time_s", "float", "s", "end of the last step"),
    ("n_restarts", "int", "1", "restart delays begun after the first start"),
    ("attained_service_gpu_s", "float", "GPU s", "device time received, restarts included"),
    ("waiting_time_s", "float", "s", "time without devices"),
    ("running_time_s", "float", "s", "time with devices and progress"),
    ("restart_time_s", "float", "s", "time with devices but without progress"),
)
JOB_METRICS = table_schema(
    "job_metrics",
    ("job_id", "text", "", "job"),
    ("jct_s", "float", "s", "finish minus submission"),
    ("queueing_delay_s", "float", "s", "first start minus submission"),
    ("run_alone_s", "float", "s", "duration alone, at once, as requested"),
    ("slowdown", "float", "1", "completion time over duration alone"),
    ("finish_time_fairness", "float", "1", "completion time over that with an equal static share"),
    ("n_reconfigurations", "int", "1", "restart delays begun, the first start included"),
)
COMPARISON = table_schema(
    "comparison",
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
)
LIVE = table_schema(
    "live",
    ("policy", "text", "", "name of the policy"),
    ("workload", "text", "", "name of the live workload"),
    ("seed", "int", "1", "with which the jobs were drawn"),
    ("jobs", "int", "1", "jobs that finished"),
    ("live_avg_jct_s", "float", "s", "mean completion time of the live run"),
    (
        "predicted_avg_jct_s",
        "float",
        "s",
        "mean completion time as predicted before the first job: the median over simulations",
    ),
    (
        "predicted_low_avg_jct_s",
        "float",
        "s",
        "5th percentile of it over simulations with disturbed step times; empty where that was not foreseen",
        True,
    ),
    ("predicted_high_avg_jct_s", "float", "s", "95th percentile of it over these", True),
    ("jct_difference_pct", "float", "%", "predicted over live mean completion time, less 100"),
    (
        "undisturbed_jct_difference_pct",
        "float",
        "%",
        "the same of the one simulation with step times as profiled",
    ),
    (
        "retrodiction_avg_jct_s",
        "float",
        "s",
        "mean completion time, by the profiles before and after: the median over simulations",
    ),
    ("retrodiction_jct_difference_pct", "float", "%", "that over the live one, less 100"),
    ("live_makespan_s", "float", "s", "last finish minus first submission, live"),
    ("predicted_makespan_s", "float", "s", "last finish minus first submission, predicted"),
    ("makespan_difference_pct", "float", "%", "predicted over live makespan, less 100"),
    ("retrodiction_makespan_s", "float", "s", "makespan, by the profiles before and after"),
    ("retrodiction_makespan_difference_pct", "float", "%", "that over the live one, less 100"),
    ("restart_delay_s", "float", "s", "profiled before, mean over starts and restarts of the live run"),
    ("live_restart_delay_s", "float", "s", "mean of the live run: time held without steps", True),
    ("n_restarts", "int", "1", "restarts after first starts, live"),
    ("predicted_n_restarts", "int", "1", "restarts after first starts, predicted"),
    ("live_gpu_allocation_ratio", "float", "1", "slot time held over slot time present, live"),
    ("profile_drift_pct", "float", "%", "mean change of step times, profile after over before"),
    ("predicted_at", "text", "", "time of day at which the prediction was written, UTC"),
    ("began_at", "text", "", "time of day before the first job started, UTC"),
    ("prediction_sha256", "text", "", "SHA-256 of the file with the prediction"),
)
LIVE_SUMMARY = table_schema(
    "live_summary",
    ("policy", "text", "", "name of the policy, or all"),
    ("runs", "int", "1", "live runs"),
    ("mean_jct_difference_pct", "float", "%", "mean size of the difference of the predicted completion time"),
    ("worst_jct_difference_pct", "float", "%", "largest of them"),
    ("bias_jct_difference_pct", "float", "%", "mean of the differences with their signs"),
    (
        "mean_undisturbed_jct_difference_pct",
        "float",
        "%",
        "the mean size, of the one simulation with step times as profiled",
    ),
    ("worst_undisturbed_jct_difference_pct", "float", "%", "the largest, of that one"),
    ("mean_retrodiction_jct_difference_pct", "float", "%", "the mean size, of the retrodiction"),
    ("worst_retrodiction_jct_difference_pct", "float", "%", "the largest, of the retrodiction"),
    ("mean_makespan_difference_pct", "float", "%", "mean size of the difference of the predicted makespan"),
    ("worst_makespan_difference_pct", "float", "%", "largest of them"),
    ("mean_profile_drift_pct", "float", "%", "mean size of the change from the profile before to that after"),
    ("restart_delay_s", "float", "s", "mean of the restart delays profiled before"),
    ("live_restart_delay_s", "float", "s", "mean of those seen in the live runs", True),
    ("all_predicted_before", "bool", "", "whether each prediction was written before the first job started"),
    ("interval_runs", "int", "1", "runs whose mean completion time lies between the two percentiles"),
)
LIVE_JOBS = table_schema(
    "live_jobs",
    ("policy", "text", "", "name of the policy"),
    ("job_id", "text", "", "job"),
    ("workload", "text", "", "key of the workload"),
    ("steps", "int", "1", "optimiser steps"),
    ("submit_time_s", "float", "s", "submission"),
    ("live_first_start_s", "float", "s", "first time with slots, live"),
    ("predicted_first_start_s", "float", "s", "first time with slots, predicted"),
    ("live_jct_s", "float", "s", "completion time, live"),
    ("predicted_jct_s", "float", "s", "completion time, predicted"),
    ("retrodiction_jct_s", "float", "s", "completion time, simulated by the profiles before and after"),
    ("n_restarts", "int", "1", "restarts after the first start, live"),
    ("predicted_n_restarts", "int", "1", "restarts after the first start, predicted"),
    ("final_loss", "float", "1", "loss of the last step", True),
)
CLAIMS = table_schema(
    "claims",
    ("paper", "text", "", "paper that makes the statement"),
    ("artifact", "text", "", "table or figure"),
    ("statement", "text", "", "the statement in our words"),
    ("published", "text", "", "published value"),
    ("reproduced", "text", "", "value found here"),
    ("tolerance", "text", "", "what counts as agreement"),
    ("verdict", "text", "", "holds, fails, undecided or not run"),
    ("note", "text", "", "explanation"),
)
JOINED_CLAIMS = table_schema(
    "joined_claims",
    ("paper", "text", "", "paper that makes the statement"),
    ("artifact", "text", "", "table or figure"),
    ("statement", "text", "", "the statement in our words"),
    ("published", "text", "", "published value"),
    ("tolerance", "text", "", "what counts as agreement"),
    (
        "verdict",
        "text",
        "",
        "over all sources: fails if one says so, holds if all that decide it do, else undecided where one "
        "has tried, or not run; "
        "reproduced_<source> and verdict_<source> of each source follow",
    ),
    ("note", "text", "", "explanation"),
)
SCHEMAS = (
    THROUGHPUT, FIT, SENSITIVITY, SENSITIVITY_FAMILIES, REQUESTS, JOBS, PREDICTIONS, FAILURES,
    EVENTS, OUTCOMES, JOB_METRICS, COMPARISON, LIVE, LIVE_SUMMARY, LIVE_JOBS, CLAIMS, JOINED_CLAIMS,
)  # fmt: skip
"""All of the above, in the order in which a run writes them."""


# ------------------------------------------------------------------------------------------------
# The reference page of the tables, generated from their schemas.

_HEAD = """# Tables

Every file that one stage writes and another reads follows a schema. Required columns come first and
in this order; further columns may follow. This page is generated from `makespan.tables`.

Beside every result of the workflow, `x.csv`, lies its seal, `.x.csv.sum`: rows and checksum. A stage refuses
a table that is not what was written; one without a seal is yours and is held against the schema alone.
"""


def tables_page(papers: Mapping[str, Iterable[TableSchema]]) -> str:
    """Return the Markdown page of every table and column: the shared ones, then those of each paper."""
    parts = [_HEAD, *(_section(schema) for schema in SCHEMAS)]
    for paper, schemas in papers.items():
        parts += [f"# Tables of {paper}\n", *(_section(schema) for schema in schemas)]
    return "\n".join(parts)


def _section(schema: TableSchema) -> str:
    rows = [
        f"| `{column.name}` | {column.kind}{', may be empty' if column.nullable else ''} "
        f"| {column.unit} | {column.description} |"
        for column in schema.columns
    ]
    head = ["| column | type | unit | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([f"## `{schema.name}`", "", *head, *rows, ""])
