"""The schemas of job traces, and of the studies that vary them."""

from typing import Any

from makespan.tables._schema import Column, TableSchema

__all__ = ["JOBS", "LARGE_MODELS", "LOAD", "REQUESTS", "ROUNDS", "SCALE", "STUDY"]


def _columns(*rows: tuple[Any, ...]) -> tuple[Column, ...]:
    return tuple(Column(*row) for row in rows)


JOBS = TableSchema(
    "jobs",
    _columns(
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
    ),
)

REQUESTS = TableSchema(
    "requests",
    _columns(
        ("job_id", "text", "", "name of the job in the trace"),
        ("submit_time_s", "float", "s", "submission, counted from the first one of the trace"),
        ("n_gpus", "int", "1", "GPUs requested"),
        ("n_cpus", "int", "1", "CPUs requested, 0 if the trace does not say"),
        ("duration_s", "float", "s", "time for which the job held its GPUs"),
        ("tenant", "text", "", "virtual cluster, user or class of service"),
        ("status", "text", "", "how the job ended, in the words of the trace"),
    ),
)

_RUN = (
    ("seed", "int", "1", "seed of the workload"),
    ("avg_jct_s", "float", "s", "mean completion time"),
    ("makespan_s", "float", "s", "last finish minus first submission"),
)

LOAD = TableSchema(
    "load",
    _columns(
        ("policy", "text", "", "name of the policy"),
        ("load_factor", "float", "1", "arrival rate over that of the trace"),
        *_RUN,
    ),
)

LARGE_MODELS = TableSchema(
    "large_models",
    _columns(
        ("policy", "text", "", "name of the policy"),
        ("large_share", "float", "1", "share of jobs that train large models"),
        *_RUN,
    ),
)

ROUNDS = TableSchema(
    "rounds",
    _columns(
        ("policy", "text", "", "name of the policy"),
        ("interval_s", "float", "s", "length of a round; missing or 0 if asked after each event", True),
        *_RUN,
    ),
)

SCALE = TableSchema(
    "scale",
    _columns(
        ("policy", "text", "", "name of the policy"),
        ("jobs", "int", "1", "jobs of the trace"),
        ("gpus", "int", "1", "GPUs of the cluster"),
        ("wall_s", "float", "s", "wall clock time of the simulation"),
        ("decision_wall_s", "float", "s", "wall clock time of the policy, a decision"),
    ),
)

STUDY = TableSchema(
    "study",
    _columns(
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
