"""Schemas of the tables that only this paper has."""

from makespan.tables import Column, TableSchema, columns

__all__ = [
    "ALLOCATION",
    "FIG7",
    "FIG8",
    "FIG9",
    "FIG9_SUMMARY",
    "JCT",
    "LARGE_MODELS",
    "LOAD",
    "PERTURBED",
    "ROUNDS",
    "SCALE",
    "SCHEMAS",
    "STUDY",
    "TABLE2",
    "TABLE2_ROWS",
    "TABLE2_SUMMARY",
    "TABLE4",
]

_RUN = (
    ("seed", "int", "1", "seed of the workload"),
    ("avg_jct_s", "float", "s", "mean completion time"),
    ("makespan_s", "float", "s", "last finish minus first submission"),
)

TABLE2 = TableSchema(
    "table2",
    columns(
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
    columns(
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
    columns(
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

FIG7 = TableSchema(
    "fig7",
    columns(
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
    columns(
        ("scheduler", "text", "", "who divides the GPUs"),
        ("job", "text", "", "key of the workload"),
        ("gpus", "int", "1", "GPUs given to the job"),
        ("plan", "text", "", "plan that runs"),
        ("speedup", "float", "1", "throughput over that of the job alone on all GPUs"),
        ("published_speedup", "float", "1", "value in the paper's figure", True),
    ),
)

TABLE4 = TableSchema(
    "table4",
    columns(
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

JCT = TableSchema(
    "jct",
    columns(
        ("trace", "text", "", "name of the trace"),
        ("policy", "text", "", "name of the policy"),
        ("job_id", "text", "", "job"),
        ("jct_s", "float", "s", "completion time"),
    ),
)

ALLOCATION = TableSchema(
    "allocation",
    columns(
        ("policy", "text", "", "name of the policy"),
        ("time_s", "float", "s", "time since the first submission"),
        ("plan_family", "text", "", "family of execution plans"),
        ("gpus", "int", "1", "devices that its plans hold from then on"),
    ),
)

PERTURBED = TableSchema(
    "perturbed",
    columns(
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

LOAD = TableSchema(
    "load",
    columns(
        ("policy", "text", "", "name of the policy"),
        ("load_factor", "float", "1", "arrival rate over that of the trace"),
        *_RUN,
    ),
)

LARGE_MODELS = TableSchema(
    "large_models",
    columns(
        ("policy", "text", "", "name of the policy"),
        ("large_share", "float", "1", "share of jobs that train large models"),
        *_RUN,
    ),
)

ROUNDS = TableSchema(
    "rounds",
    columns(
        ("policy", "text", "", "name of the policy"),
        ("interval_s", "float", "s", "length of a round; missing or 0 if asked after each event", True),
        *_RUN,
    ),
)

STUDY = TableSchema(
    "study",
    columns(
        ("parameter", "text", "", "what is varied"),
        ("value", "float", "", "its value"),
        ("policy", "text", "", "name of the policy"),
        ("seeds", "int", "1", "how many seeds"),
        ("jct_mean_s", "float", "s", "mean completion time, geometric mean over seeds"),
        ("jct_low_s", "float", "s", "lower end of its 95 % confidence interval", True),
        ("jct_high_s", "float", "s", "upper end of it", True),
        ("makespan_mean_s", "float", "s", "makespan, geometric mean over seeds"),
        ("makespan_low_s", "float", "s", "lower end of its 95 % confidence interval", True),
        ("makespan_high_s", "float", "s", "upper end of it", True),
    ),
)

SCALE = TableSchema(
    "scale",
    columns(
        ("policy", "text", "", "name of the policy"),
        ("jobs", "int", "1", "jobs of the trace"),
        ("gpus", "int", "1", "GPUs of the cluster"),
        ("wall_s", "float", "s", "wall clock time of the simulation"),
        ("decision_wall_s", "float", "s", "wall clock time of the policy, a decision"),
    ),
)

FIG9 = TableSchema(
    "fig9",
    (
        Column("run", "text", "", "name of the plan, or of the run that switches or has another seed"),
        Column("step", "int", "1", "optimiser steps done before"),
        Column("loss", "float", "1", "mean loss of the global batch"),
        Column("abs_difference", "float", "1", "distance to the loss of the first run at that step"),
    ),
)

FIG9_SUMMARY = TableSchema(
    "fig9_summary",
    (
        Column("run", "text", "", "name of the run; the paper's runs have its name in front"),
        Column("kind", "text", "", "reference, plan, switching, other seed, or published of each"),
        Column("mean_abs_difference", "float", "1", "mean distance to the reference"),
        Column("max_abs_difference", "float", "1", "largest distance to the reference"),
        Column("restarts", "int", "1", "checkpoints from which the run continued"),
        Column("restart_s", "float", "s", "mean cost of a restart, from saving to the loaded model", True),
        Column("step_s", "float", "s", "median time of an optimiser step", True),
    ),
)

SCHEMAS = (
    TABLE2,
    TABLE2_ROWS,
    TABLE2_SUMMARY,
    FIG7,
    FIG8,
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
)
"""All of the above, in the order in which a run writes them."""
