"""Schemas of the tables that only this paper has, and of its printed cells."""

from dataclasses import replace
from pathlib import Path

import pandas as pd

from makespan.tables import COMPARISON, TableSchema, printed_schemas, read_printed, table_schema

_MODEL = ("model", "text", "", "key of the workload")
_FAMILY = ("plan_family", "text", "", "family of execution plans")
_FORM = ("form", "text", "", "form of the performance model")
_STRATEGY = ("strategy", "text", "", "how the plan is chosen")
_STAGE = ("stage", "text", "", "resource limit in force")
_SCHEDULER = ("scheduler", "text", "", "who divides the GPUs")
_JOB = ("job", "text", "", "key of the workload")
_GIVEN = "GPUs given to the job"
_TRACE = ("trace", "text", "", "name of the trace")
_POLICY = ("policy", "text", "", "name of the policy")
_JCT, _MAKESPAN = "mean completion time", "last finish minus first submission"
_UNSEEN = "with shared constants that were fitted to other models alone"
_SHIPPED = "with the constants as shipped, some of which were chosen with all published rows in view"
_ERRORS = (
    ("n_validate", "int", "1", "clean rows held out"),
    ("avg_error_pct", "float", "%", f"mean relative error of held-out clean rows, {_UNSEEN}", True),
    ("p95_error_pct", "float", "%", "95th percentile of the same", True),
    ("max_error_pct", "float", "%", "largest of the same", True),
    ("avg_error_all_rows_pct", "float", "%", "mean over all held-out rows", True),
    ("avg_error_shipped_pct", "float", "%", f"mean over held-out clean rows {_SHIPPED}", True),
    ("max_error_shipped_pct", "float", "%", "largest of the same", True),
)
_RUN = (
    ("seed", "int", "1", "seed of the workload"),
    ("avg_jct_s", "float", "s", _JCT),
    ("makespan_s", "float", "s", _MAKESPAN),
)


def _interval(name: str, unit: str, what: str) -> tuple[tuple[str, str, str, str, bool], ...]:
    """Return the columns of a geometric mean over lists and its confidence interval."""
    ending = "" if unit == "1" else f"_{unit}"
    return (
        (f"{name}_mean{ending}", "float", unit, f"{what}, geometric mean over lists", False),
        (f"{name}_low{ending}", "float", unit, "lower end of its 95 % confidence interval", True),
        (f"{name}_high{ending}", "float", unit, "upper end of it", True),
    )


_MEANS = (*_interval("jct", "s", _JCT), *_interval("makespan", "s", "makespan"))
TABLE2 = table_schema(
    "table2", _MODEL, _FAMILY, _FORM, ("n_fit", "int", "1", "rows used in the fit"), *_ERRORS
)
TABLE2_ROWS = table_schema(
    "table2_rows",
    _MODEL,
    ("exec_plan", "text", "", "execution plan in trace notation"),
    ("placement", "text", "", "GPUs on each node"),
    _FORM,
    ("fitted", "bool", "", "whether the row was used in the fit"),
    ("clean", "bool", "", "whether no measurement anomaly was found"),
    ("measured_s", "float", "s", "iteration time in the throughput table"),
    ("predicted_s", "float", "s", f"iteration time of the fitted model, {_UNSEEN}"),
    ("error_pct", "float", "%", "relative error of the prediction"),
    ("predicted_shipped_s", "float", "s", f"iteration time of the fitted model {_SHIPPED}"),
)
TABLE2_SUMMARY = table_schema(
    "table2_summary",
    ("scope", "text", "", "all, all but vit, or the key of a workload"),
    _FORM,
    ("n_fit", "int", "1", "rows used in the fits"),
    *_ERRORS,
    ("n_placements", "int", "1", "placements on which several clean plans were measured"),
    ("best_plan_found_pct", "float", "%", "share of them where the model picks the best", True),
    ("regret_mean_pct", "float", "%", "mean throughput lost by the model's pick", True),
    ("regret_max_pct", "float", "%", "largest of the same", True),
    ("regret_mean_shipped_pct", "float", "%", f"mean throughput lost {_SHIPPED}", True),
    ("regret_max_shipped_pct", "float", "%", "largest of the same", True),
)
FIG7 = table_schema(
    "fig7",
    _STRATEGY,
    _STAGE,
    ("gpus", "int", "1", "GPUs of the stage"),
    ("plan", "text", "", "plan that runs, empty if none can"),
    ("iter_time_s", "float", "s", "iteration time, 0 if nothing can run"),
    ("throughput_samples_per_s", "float", "samples/s", "throughput, 0 if nothing can run"),
    ("published_iter_time_s", "float", "s", "value in the paper's figure", True),
)
FIG8 = table_schema(
    "fig8",
    _SCHEDULER,
    _JOB,
    ("gpus", "int", "1", _GIVEN),
    ("plan", "text", "", "plan that runs"),
    ("speedup", "float", "1", "throughput over that of the job alone on all GPUs"),
    ("published_speedup", "float", "1", "value in the paper's figure", True),
)
BASELINE = "morphling-lookahead"
"""Policy that the ratios of Table 4 compare with."""
_IDLE = ("idle_s", "float", "s", "longest time with over half of the GPUs idle beside a job that ends sooner")
TABLE4 = TableSchema(
    "table4",
    tuple(
        replace(
            one,
            name=f"{one.name}_to_lookahead",
            description=one.description.replace("the baseline", BASELINE),
        )
        if one.name in ("jct_ratio", "makespan_ratio")
        else one
        for one in COMPARISON.columns
    )
    + table_schema("idle", (*_IDLE, True)).columns,
)
JCT = table_schema(
    "jct", _TRACE, _POLICY, ("job_id", "text", "", "job"), ("jct_s", "float", "s", "completion time")
)
ALLOCATION = table_schema(
    "allocation",
    _POLICY,
    ("time_s", "float", "s", "time since the first submission"),
    _FAMILY,
    ("gpus", "int", "1", "devices that its plans hold from then on"),
)
_SETTING = (
    _TRACE,
    ("gpus", "int", "1", "GPUs of the cluster"),
    ("restart_delay_s", "float", "s", "restart delay of every start and change"),
)
LISTS = table_schema(
    "lists",
    _SETTING[0],
    ("draw", "text", "", "shifted arrivals, a subsample of the jobs, or a generated list"),
    ("seed", "int", "1", "seed of the draw"),
    *_SETTING[1:],
    _POLICY,
    ("jobs", "int", "1", "jobs that finished; those that the cluster cannot run as requested are left out"),
    ("avg_jct_s", "float", "s", _JCT),
    ("makespan_s", "float", "s", _MAKESPAN),
    ("sla_attainment", "float", "1", "share of guarantees kept; missing without guarantees", True),
)
LISTS_SUMMARY = table_schema(
    "lists_summary",
    *_SETTING,
    _POLICY,
    ("lists", "int", "1", "how many lists"),
    *_MEANS,
    ("sla_attainment", "float", "1", "share of guarantees kept, the least of all lists", True),
)
LISTS_PAIRS = table_schema(
    "lists_pairs",
    *_SETTING,
    _POLICY,
    ("rival", "text", "", "another policy, which knows no more"),
    ("lists", "int", "1", "how many lists"),
    *_interval("jct_ratio", "1", "mean completion time of the rival over that of the policy"),
    *_interval("makespan_ratio", "1", "makespan of the rival over that of the policy"),
    ("jct_wins", "int", "1", "lists on which the mean completion time of the policy is shorter"),
    ("makespan_wins", "int", "1", "lists on which the makespan of the policy is shorter"),
    ("rival_sla_attainment", "float", "1", "share of guarantees that the rival keeps, the least", True),
)
RIVALS = table_schema(
    "rivals",
    _POLICY,
    ("parameter", "text", "", "parameter that is varied; empty for what is shipped", True),
    ("value", "text", "", "its value, none where it sets no limit", True),
    ("runs", "int", "1", "simulations: lists times restart delays"),
    ("jct_mean_s", "float", "s", f"{_JCT}, geometric mean"),
    ("makespan_mean_s", "float", "s", f"{_MAKESPAN}, geometric mean"),
    *_interval(
        "ratio",
        "1",
        "what the policy makes small, mean completion time or makespan, over that of the "
        "shipped values on the same list",
    ),
)
READINGS = table_schema(
    "readings",
    _TRACE,
    _SETTING[2],
    ("reading", "text", "", "reading of a rule that is exchanged; empty for those that are shipped", True),
    ("value", "text", "", "the alternative", True),
    ("lists", "int", "1", "how many lists"),
    ("jct_mean_s", "float", "s", f"{_JCT}, geometric mean"),
    ("makespan_mean_s", "float", "s", f"{_MAKESPAN}, geometric mean"),
    *_interval("jct_ratio", "1", f"{_JCT} over that with the shipped readings on the same list"),
    *_interval("makespan_ratio", "1", f"{_MAKESPAN} over that with the shipped readings on the same list"),
)
THREADS = table_schema(
    "threads",
    _POLICY,
    ("offload_share", "float", "1", "share of jobs that offload a large model on few GPUs"),
    _RUN[0],
    ("threads", "text", "", "CPU threads: requested, the same for all, or chosen by the policy"),
    *_RUN[1:],
    ("threads_per_gpu", "float", "1", "CPU threads held for each GPU held, mean over time"),
)
KNOWLEDGE = table_schema(
    "knowledge",
    _TRACE,
    _POLICY,
    ("mode", "text", "", "what policies know beforehand: sampled, requests or exact"),
    ("lists", "int", "1", "how many lists"),
    ("known_starts", "float", "1", "share of starts and changes whose time the job knew, mean over lists"),
    *_MEANS,
    *_interval("jct_ratio", "1", f"{_JCT} over that in mode sampled on the same list"),
)
LOAD = table_schema(
    "load", _POLICY, ("load_factor", "float", "1", "arrival rate over that of the trace"), *_RUN
)
LARGE_MODELS = table_schema(
    "large_models", _POLICY, ("large_share", "float", "1", "share of jobs that train large models"), *_RUN
)
ROUNDS = table_schema(
    "rounds",
    _POLICY,
    ("interval_s", "float", "s", "length of a round; missing or 0 if asked after each event", True),
    *_RUN,
)
STUDY = table_schema(
    "study",
    ("parameter", "text", "", "what is varied"),
    ("value", "float", "", "its value"),
    _POLICY,
    ("seeds", "int", "1", "how many seeds"),
    *_MEANS,
)
SCALE = table_schema(
    "scale",
    _POLICY,
    ("jobs", "int", "1", "jobs of the trace"),
    ("gpus", "int", "1", "GPUs of the cluster"),
    (
        "wall_s",
        "float",
        "s",
        "wall clock time of the simulation, median of up to three, one if long",
    ),
    ("fastest_wall_s", "float", "s", "the shortest of these"),
    ("slowest_wall_s", "float", "s", "the longest of these"),
    (
        "decision_wall_s",
        "float",
        "s",
        "wall clock time of the policy, a decision, median of several simulations",
    ),
    ("fastest_decision_wall_s", "float", "s", "the shortest of these"),
    ("slowest_decision_wall_s", "float", "s", "the longest of these"),
)
FIG9 = table_schema(
    "fig9",
    ("run", "text", "", "name of the plan, or of the run that switches or has another seed"),
    ("step", "int", "1", "optimiser steps done before"),
    ("loss", "float", "1", "mean loss of the global batch"),
    ("abs_difference", "float", "1", "distance to the loss of the first run at that step"),
)
FIG9_SUMMARY = table_schema(
    "fig9_summary",
    ("run", "text", "", "name of the run; the paper's runs have its name in front"),
    ("kind", "text", "", "reference, plan, switching, other seed, or published of each"),
    ("mean_abs_difference", "float", "1", "mean distance to the reference"),
    ("max_abs_difference", "float", "1", "largest distance to the reference"),
    ("restarts", "int", "1", "checkpoints from which the run continued"),
    ("restart_s", "float", "s", "mean cost of a restart, from saving to the loaded model", True),
    ("step_s", "float", "s", "median time of an optimiser step", True),
)
SCHEMAS = (
    *(TABLE2, TABLE2_ROWS, TABLE2_SUMMARY, FIG7, FIG8, TABLE4, JCT, ALLOCATION),
    *(
        LISTS,
        LISTS_SUMMARY,
        LISTS_PAIRS,
        RIVALS,
        READINGS,
        THREADS,
        KNOWLEDGE,
        LOAD,
        LARGE_MODELS,
        ROUNDS,
        STUDY,
        SCALE,
        FIG9,
        FIG9_SUMMARY,
    ),
)
"""All of the above, in the order in which a run writes them."""
_PLAN_THERE = ("published_plan", "text", "", "plan that ran, where the paper names it")
_CELLS = {
    "table2": (
        _MODEL,
        _FAMILY,
        ("published_avg_error_pct", "float", "%", "average prediction error"),
        ("published_max_error_pct", "float", "%", "largest prediction error"),
    ),
    "fig7": (
        _STRATEGY,
        _STAGE,
        _PLAN_THERE,
        ("published_iter_time_s", "float", "s", "iteration time, 0 if nothing can run"),
    ),
    "fig8": (
        _SCHEDULER,
        _JOB,
        ("published_gpus", "int", "1", _GIVEN),
        _PLAN_THERE,
        ("published_speedup", "float", "1", "throughput over that of the job alone"),
    ),
    "table4": (
        _TRACE,
        _POLICY,
        ("restart_delay_s", "float", "s", "restart delay"),
        ("interval_s", "float", "s", "length of a round"),
        ("published_avg_jct_s", "float", "s", _JCT),
        ("published_makespan_s", "float", "s", _MAKESPAN),
    ),
    "fig9": (
        ("run", "text", "", "plan, or other seed"),
        ("mean_abs_difference", "float", "1", "mean distance to the loss of TP8"),
        ("max_abs_difference", "float", "1", "largest distance, losses averaged over windows"),
    ),
}
PUBLISHED = printed_schemas(_CELLS)


def read_published(artifact: str, path: str | Path) -> pd.DataFrame:
    """Read the paper's cells of ``table2``, ``table4``, ``fig7``, ``fig8`` or ``fig9``, each with its source.

    Raises
    ------
    UnknownNameError, MissingDataError, TraceError
        No such artifact, no such file, or a column or cell without an accepted value.
    """
    return read_printed(artifact, path, PUBLISHED)
