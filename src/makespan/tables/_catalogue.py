"""The schemas of all tables that cross a workflow stage."""

from typing import Any

from makespan.tables._live import LIVE, LIVE_JOBS
from makespan.tables._schema import Column, TableSchema
from makespan.tables._simulation import (
    ALLOCATION,
    COMPARISON,
    EVENTS,
    FAILURES,
    JCT,
    JOB_METRICS,
    OUTCOMES,
    PERTURBED,
    PREDICTIONS,
    TABLE4,
)
from makespan.tables._training import FIG9, FIG9_SUMMARY
from makespan.tables._workloads import JOBS, LARGE_MODELS, LOAD, REQUESTS, ROUNDS, SCALE, STUDY

__all__ = [
    "CLAIMS",
    "FIG7",
    "FIG8",
    "FIT",
    "JOINED_CLAIMS",
    "SCHEMAS",
    "SENSITIVITY",
    "SENSITIVITY_FAMILIES",
    "TABLE2",
    "TABLE2_ROWS",
    "TABLE2_SUMMARY",
    "THROUGHPUT",
]


def _columns(*rows: tuple[Any, ...]) -> tuple[Column, ...]:
    return tuple(Column(*row) for row in rows)


THROUGHPUT = TableSchema(
    "throughput",
    _columns(
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
        ("provenance", "text", "", "emulated, published, measured or interpolated"),
    ),
)

FIT = TableSchema(
    "fit",
    _columns(
        ("workload", "text", "", "key of the workload"),
        ("form", "text", "", "form of the performance model"),
        ("parameter", "text", "", "name of the fitted parameter"),
        ("value", "float", "", "fitted value", True),
        ("std_err", "float", "", "standard error of the value", True),
        ("identified", "bool", "", "whether the observations determine the parameter"),
    ),
)

TABLE2 = TableSchema(
    "table2",
    _columns(
        ("model", "text", "", "key of the workload"),
        ("plan_family", "text", "", "family of execution plans"),
        ("form", "text", "", "form of the performance model"),
        ("n_fit", "int", "1", "rows used in the fit"),
        ("n_validate", "int", "1", "clean rows held out"),
        ("avg_error_pct", "float", "%", "mean relative error of held-out clean rows", True),
        ("p95_error_pct", "float", "%", "95th percentile of the same", True),
        ("max_error_pct", "float", "%", "largest of the same", True),
        ("avg_error_all_rows_pct", "float", "%", "mean over all held-out rows", True),
    ),
)

TABLE2_ROWS = TableSchema(
    "table2_rows",
    _columns(
        ("model", "text", "", "key of the workload"),
        ("exec_plan", "text", "", "execution plan in trace notation"),
        ("placement", "text", "", "GPUs on each node"),
        ("form", "text", "", "form of the performance model"),
        ("fitted", "bool", "", "whether the row was used in the fit"),
        ("clean", "bool", "", "whether no measurement anomaly was found"),
        ("measured_s", "float", "s", "iteration time in the throughput table"),
        ("predicted_s", "float", "s", "iteration time of the fitted model"),
        ("error_pct", "float", "%", "relative error of the prediction"),
    ),
)

TABLE2_SUMMARY = TableSchema(
    "table2_summary",
    _columns(
        ("scope", "text", "", "all, all but vit, or the key of a workload"),
        ("form", "text", "", "form of the performance model"),
        ("n_fit", "int", "1", "rows used in the fits"),
        ("n_validate", "int", "1", "clean rows held out"),
        ("avg_error_pct", "float", "%", "mean relative error of held-out clean rows", True),
        ("p95_error_pct", "float", "%", "95th percentile of the same", True),
        ("max_error_pct", "float", "%", "largest of the same", True),
        ("avg_error_all_rows_pct", "float", "%", "mean over all held-out rows", True),
        ("n_placements", "int", "1", "placements on which several clean plans were measured"),
        ("best_plan_found_pct", "float", "%", "share of them where the model picks the best", True),
        ("regret_mean_pct", "float", "%", "mean throughput lost by the model's pick", True),
        ("regret_max_pct", "float", "%", "largest of the same", True),
    ),
)

SENSITIVITY = TableSchema(
    "sensitivity",
    _columns(
        ("model", "text", "", "key of the workload"),
        ("gpus", "int", "1", "GPUs at the most"),
        ("best_plan", "text", "", "fastest feasible plan, empty if none"),
        ("throughput_samples_per_s", "float", "samples/s", "its throughput, 0 if none"),
    ),
)

SENSITIVITY_FAMILIES = TableSchema(
    "sensitivity_families",
    _columns(
        ("model", "text", "", "key of the workload"),
        ("plan_family", "text", "", "family of execution plans"),
        ("gpus", "int", "1", "GPUs used"),
        ("cpu_threads", "int", "1", "CPU threads a GPU"),
        ("plan", "text", "", "fastest feasible plan of the family"),
        ("throughput_samples_per_s", "float", "samples/s", "its throughput"),
    ),
)

FIG7 = TableSchema(
    "fig7",
    _columns(
        ("strategy", "text", "", "how the plan is chosen"),
        ("stage", "text", "", "resource limit in force"),
        ("gpus", "int", "1", "GPUs of the stage"),
        ("plan", "text", "", "plan that runs, empty if none can"),
        ("iter_time_s", "float", "s", "iteration time, 0 if nothing can run"),
        ("throughput_samples_per_s", "float", "samples/s", "throughput, 0 if nothing can run"),
        ("published_iter_time_s", "float", "s", "value in the paper's figure", True),
    ),
)

FIG8 = TableSchema(
    "fig8",
    _columns(
        ("scheduler", "text", "", "who divides the GPUs"),
        ("job", "text", "", "key of the workload"),
        ("gpus", "int", "1", "GPUs given to the job"),
        ("plan", "text", "", "plan that runs"),
        ("speedup", "float", "1", "throughput over that of the job alone on all GPUs"),
        ("published_speedup", "float", "1", "value in the paper's figure", True),
    ),
)

CLAIMS = TableSchema(
    "claims",
    _columns(
        ("paper", "text", "", "paper that makes the statement"),
        ("artifact", "text", "", "table or figure"),
        ("statement", "text", "", "the statement in our words"),
        ("published", "text", "", "published value"),
        ("reproduced", "text", "", "value found here"),
        ("tolerance", "text", "", "what counts as agreement"),
        ("verdict", "text", "", "holds, fails or not run"),
        ("note", "text", "", "explanation"),
    ),
)

JOINED_CLAIMS = TableSchema(
    "joined_claims",
    _columns(
        ("paper", "text", "", "paper that makes the statement"),
        ("artifact", "text", "", "table or figure"),
        ("statement", "text", "", "the statement in our words"),
        ("published", "text", "", "published value"),
        ("tolerance", "text", "", "what counts as agreement"),
        (
            "verdict",
            "text",
            "",
            "over all sources: fails if one says so, holds if all that decide it do, else not run; "
            "reproduced_<source> and verdict_<source> of each source follow",
        ),
        ("note", "text", "", "explanation"),
    ),
)

SCHEMAS = (
    THROUGHPUT,
    FIT,
    TABLE2,
    TABLE2_ROWS,
    TABLE2_SUMMARY,
    SENSITIVITY,
    SENSITIVITY_FAMILIES,
    FIG7,
    FIG8,
    REQUESTS,
    JOBS,
    PREDICTIONS,
    FAILURES,
    EVENTS,
    OUTCOMES,
    JOB_METRICS,
    COMPARISON,
    TABLE4,
    JCT,
    ALLOCATION,
    PERTURBED,
    LOAD,
    LARGE_MODELS,
    ROUNDS,
    STUDY,
    SCALE,
    FIG9,
    FIG9_SUMMARY,
    LIVE,
    LIVE_JOBS,
    CLAIMS,
    JOINED_CLAIMS,
)
"""All of the above, in the order in which a run writes them."""
