"""Schemas of the tables that only this paper has, and of its printed cells."""

from pathlib import Path

import pandas as pd

from makespan.easyscale._tables import ELASTIC_STEPS, RECONFIGURATIONS
from makespan.papers.easyscale._tables_accuracy import ACCURACY_CELLS, ACCURACY_SCHEMAS
from makespan.papers.easyscale._tables_overheads import OVERHEADS
from makespan.tables import printed_schemas, read_printed, table_schema

__all__ = [
    "FIG14",
    "FIG14_JOBS",
    "FIG15",
    "PUBLISHED",
    "SCHEMAS",
    "SENSITIVITY",
    "SERVING",
    "SERVING_ROUNDS",
    "read_published",
]

_MODEL = ("model", "text", "", "model, by its name in the authors' job list")
_BATCH = ("micro_batch_size", "int", "samples", "samples a micro-batch")
_POLICY = ("policy", "text", "", "name of the policy")

_TIMES = (
    ("avg_jct_s", "float", "s", "mean completion time"),
    ("p50_jct_s", "float", "s", "median of the same"),
    ("p95_jct_s", "float", "s", "95th percentile of the same"),
    ("makespan_s", "float", "s", "last finish minus first submission"),
    ("makespan_from_zero_s", "float", "s", "last finish"),
    ("reconfigurations_per_job", "float", "1", "starts and changes a job"),
)

FIG14 = table_schema(
    "fig14",
    _POLICY,
    ("jobs", "int", "1", "jobs that completed, all of the list but rejected ones"),
    *_TIMES,
    ("makespan_round_s", "float", "s", "round after the last finish"),
    ("jct_gain", "float", "1", "mean completion time under fifo over this one"),
    ("makespan_gain", "float", "1", "makespan from time 0 under fifo over this one"),
    ("jct_gain_to_serial", "float", "1", "mean completion time under fifo-serial over this one"),
    ("published_avg_jct_s", "float", "s", "mean completion time", True),
    ("published_makespan_s", "float", "s", "round of the last completion", True),
)
FIG14_JOBS = table_schema(
    "fig14_jobs",
    _POLICY,
    ("job_id", "text", "", "name of the job"),
    ("submit_time_s", "float", "s", "when it enters the system"),
    ("first_start_s", "float", "s", "when it first holds GPUs"),
    ("finish_time_s", "float", "s", "when it ends"),
    ("jct_s", "float", "s", "finish minus submission"),
    ("n_restarts", "int", "1", "changes of GPUs after the first start"),
    ("is_clamped", "bool", "", "whether the cluster has fewer GPUs of its home type than it asks for"),
)
FIG15 = table_schema(
    "fig15",
    _POLICY,
    ("time_s", "float", "s", "round"),
    ("v100", "int", "1", "V100 GPUs held after its decisions"),
    ("p100", "int", "1", "P100 GPUs"),
    ("t4", "int", "1", "T4 GPUs"),
    ("gpus", "int", "1", "GPUs of all types"),
    ("published_gpus", "float", "1", "GPUs of all types in the paper", True),
)
SENSITIVITY = table_schema(
    "easyscale_sensitivity",
    ("parameter", "text", "", "what differs from the default"),
    ("value", "text", "", "its value, in s where it is a time"),
    _POLICY,
    *_TIMES,
)
SERVING = table_schema(
    "serving",
    _POLICY,
    ("jobs", "int", "1", "jobs of all copies of the list"),
    ("serving_ratio", "float", "1", "mean share of the GPUs that serving needs"),
    ("shared_ratio", "float", "1", "the same with what training holds"),
    ("gain_pct", "float", "%", "by how much the second is larger"),
    ("delayed_rounds", "int", "1", "rounds in which serving needs more GPUs than it has"),
    ("shrinks", "int", "1", "changes to fewer GPUs"),
    ("suspensions", "int", "1", "jobs that lost all GPUs by a decision"),
    ("interruptions", "int", "1", "jobs that held GPUs when these were withdrawn"),
    ("avg_jct_s", "float", "s", "mean completion time"),
    ("published_gain_pct", "float", "%", "improvement of utilisation in the paper's own cluster", True),
)
SERVING_ROUNDS = table_schema(
    "serving_rounds",
    _POLICY,
    ("time_s", "float", "s", "round, every tenth minute"),
    ("serving_gpus", "int", "1", "GPUs that serving needs"),
    ("reserved_gpus", "int", "1", "GPUs that are withdrawn from training"),
    ("training_gpus", "int", "1", "GPUs that jobs hold"),
)
SCHEMAS = (
    *ACCURACY_SCHEMAS,
    *OVERHEADS.values(),
    FIG14,
    FIG14_JOBS,
    FIG15,
    SENSITIVITY,
    SERVING,
    SERVING_ROUNDS,
    ELASTIC_STEPS,
    RECONFIGURATIONS,
)

_CELLS = {
    **ACCURACY_CELLS,
    "fig10": (
        _MODEL,
        ("method", "text", "", "packing or easyscale"),
        ("k", "int", "1", "processes or logical workers on the GPU"),
        ("published_peak_mem_mib", "float", "MiB", "memory in use"),
        ("published_micro_batch_s", "float", "s", "micro-batch; none out of memory", True),
    ),
    "fig11": (
        *(_MODEL, _BATCH),
        ("published_disable_s", "float", "s", "micro-batch without keeping contexts apart"),
        ("published_enable_s", "float", "s", "micro-batch with context switches"),
    ),
    "fig12": (
        *(_MODEL, _BATCH),
        ("gpu", "text", "", "type of GPU"),
        ("published_baseline_s", "float", "s", "step without determinism"),
        ("published_d1_s", "float", "s", "step under D1"),
        ("published_d1d2_s", "float", "s", "step under D1+D2"),
        ("published_d1d2_stock_s", "float", "s", "the same with the stock kernels of reduction and dropout"),
    ),
    "fig13": (
        *(_MODEL, _BATCH),
        ("published_ddp_s", "float", "s", "step of data parallelism on 8 GPUs"),
        (
            "published_est_first_s",
            "float",
            "s",
            "micro-batch of 8 logical workers on one GPU, with the last",
        ),
        ("published_est_last_s", "float", "s", "micro-batch of the last, with sum and update"),
    ),
    "fig14": (
        _POLICY,
        ("published_avg_jct_s", "float", "s", "mean completion time"),
        ("published_makespan_s", "float", "s", "round of the last completion, from time 0"),
    ),
    "fig15": (
        _POLICY,
        ("time_s", "float", "s", "round"),
        ("published_gpus", "int", "1", "GPUs held"),
    ),
    "serving": (_POLICY, ("published_gain_pct", "float", "%", "improvement of the utilisation of a cluster")),
}
PUBLISHED = printed_schemas(_CELLS)


def read_published(artifact: str, path: str | Path) -> pd.DataFrame:
    """Read the paper's cells of an artifact, one of `PUBLISHED`, each with its source.

    Raises
    ------
    UnknownNameError, MissingDataError, TraceError
        No such artifact, no such file, or a column or cell without an accepted value.
    """
    return read_printed(artifact, path, PUBLISHED)
