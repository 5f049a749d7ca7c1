"""Schemas of the tables that only this paper has, and of its printed cells."""

from pathlib import Path
from typing import Any

import pandas as pd

from makespan.errors import unknown_name
from makespan.tables import read_csv, table_schema

__all__ = [
    "FIG10",
    "FIG11",
    "FIG12",
    "FIG13",
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

_STAND_IN = ("model", "text", "", "stand-in, by the name of the model whose part it plays")
_LOGICAL = ("logical_workers", "int", "1", "logical workers in one process")
_SAMPLES = ("samples", "int", "1", "timed values behind each median")


def _timed(name: str, what: str, *, may_lack: bool = False) -> tuple[tuple[Any, ...], ...]:
    return (
        (f"{name}_s", "float", "s", f"{what}, median", may_lack),
        (f"{name}_iqr_s", "float", "s", "inter-quartile range of the same", may_lack),
    )


def _related(name: str, what: str, *, may_lack: bool = False) -> tuple[tuple[Any, ...], ...]:
    return (
        (name, "float", "1", what, may_lack),
        (f"{name}_iqr", "float", "1", "inter-quartile range over pairs of values", may_lack),
    )


def _printed(*columns: tuple[str, str, str]) -> tuple[tuple[Any, ...], ...]:
    return tuple((f"published_{name}", "float", unit, what, True) for name, unit, what in columns)


FIG10 = table_schema(
    "fig10",
    *(_STAND_IN, _BATCH),
    ("method", "text", "", "packing: stock processes; easyscale: logical workers in one process"),
    ("k", "int", "1", "how many share the device"),
    ("memory_mib", "float", "MiB", "memory of the device"),
    ("peak_mem_mib", "float", "MiB", "largest memory of all processes beyond idle ones, no gradient sets"),
    ("gradient_sets_mib", "float", "MiB", "gradient sets that logical workers keep apart"),
    ("total_mem_mib", "float", "MiB", "sum of both"),
    *_timed("micro_batch", "step over k; none out of memory", may_lack=True),
    *_related("norm_throughput", "throughput over that of one packed process", may_lack=True),
    ("oom", "bool", "", "whether the memory of the device did not suffice"),
    _SAMPLES,
    *_printed(
        ("peak_mem_mib", "MiB", "memory on a V100; beyond its end no more than that it was full"),
        ("micro_batch_s", "s", "micro-batch on a V100; none out of memory"),
        ("norm_throughput", "1", "throughput over that of one process"),
    ),
)
FIG11 = table_schema(
    "fig11",
    *(_STAND_IN, _BATCH, _LOGICAL),
    *_timed("disable", "micro-batch without keeping contexts apart"),
    *_timed("enable", "micro-batch with context switches"),
    *_related("ratio", "the second over the first"),
    _SAMPLES,
    *_printed(
        ("disable_s", "s", "on a V100"), ("enable_s", "s", "on a V100"), ("ratio", "1", "of these two")
    ),
)
FIG12 = table_schema(
    "fig12",
    *(_STAND_IN, _BATCH),
    ("device", "text", "", "kernel set"),
    ("gpu", "text", "", "type of GPU whose part it plays"),
    _LOGICAL,
    ("d2_cheap", "bool", "", "whether the scan of the model expects D2 to cost little"),
    *_timed("baseline", "micro-batch of stock training without determinism"),
    *_timed("d1", "micro-batch under D1"),
    *_timed("d1d2", "micro-batch under D1+D2, by the kernels of all devices"),
    *_related("d1_norm", "D1 over the baseline"),
    *_related("d1d2_norm", "D1+D2 over the baseline"),
    _SAMPLES,
    *_printed(
        *((f"{name}_s", "s", "on that GPU") for name in ("baseline", "d1", "d1d2")),
        *((f"{name}_norm", "1", "over the baseline") for name in ("d1", "d1d2")),
    ),
)
FIG13 = table_schema(
    "fig13",
    *(_STAND_IN, _BATCH, _LOGICAL),
    ("cores", "int", "1", "cores over which as many stock processes are spread"),
    *_timed("ddp", "step of stock data parallelism"),
    *_timed("est_first", "micro-batch of logical workers but the last"),
    *_timed("est_last", "the last one, with sum and update"),
    *_related("first_norm", "the first ones over a stock step"),
    *_related("last_norm", "the last one over a stock step"),
    _SAMPLES,
    *_printed(
        ("ddp_s", "s", "on 8 V100"),
        ("est_first_s", "s", "on one V100, the last of 8 included"),
        ("est_last_s", "s", "on one V100"),
        ("first_norm", "1", "first over stock"),
        ("last_norm", "1", "last over stock"),
    ),
)
SCHEMAS = (FIG10, FIG11, FIG12, FIG13, FIG14, FIG14_JOBS, FIG15, SENSITIVITY, SERVING, SERVING_ROUNDS)

_CELLS = {
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
PUBLISHED = {
    artifact: table_schema(
        f"published_{artifact}", *cells, ("source", "text", "", "where the cell is printed")
    )
    for artifact, cells in _CELLS.items()
}


def read_published(artifact: str, path: str | Path) -> pd.DataFrame:
    """Read the paper's cells of ``fig10`` to ``fig15`` or ``serving``, each with its source.

    Raises
    ------
    UnknownNameError, MissingDataError, TraceError
        No such artifact, no such file, or a column or cell without an accepted value.
    """
    if artifact not in PUBLISHED:
        raise unknown_name("artifact", artifact, PUBLISHED)
    return read_csv(path, PUBLISHED[artifact])
