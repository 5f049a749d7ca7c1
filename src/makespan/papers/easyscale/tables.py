"""Schemas of what training keeps: bits of Fig. 9, and the accuracy of other elastic schemes."""

from pathlib import Path
from typing import Any

import pandas as pd

from makespan.easyscale.trainer import ELASTIC_STEPS, RECONFIGURATIONS
from makespan.tables import printed_schemas, read_printed, table_schema

# ------------------------------------------------------------------------------------------------
# Schemas of what training keeps: bits of Fig. 9, and the accuracy of other elastic schemes.

_ACCURACY_MODEL = ("model", "text", "", "stand-in, by the name of the model whose part it plays")
_SETTING = ("setting", "text", "", "determinism level")
_STAGE = ("stage", "int", "1", "part of the run with one mapping, from 0")
_REFERENCE = (
    *("reference", "text", ""),
    "stock training: ddp-homo, or under D2 ddp-heter; hooked where a hook adds up instead of gloo",
)
_SCHEME = ("scheme", "text", "", "what follows from the number of devices: linear, adaptive, easyscale")
_DEVICES = ("devices", "int", "1", "processes that train")
_CLASS = ("class", "text", "", "class of the held-out samples, or all")
FIG9 = table_schema(
    "easyscale_fig9",
    *(_ACCURACY_MODEL, _SETTING, _STAGE),
    ("step", "int", "1", "mini-batches done, from 1"),
    ("loss", "float", "1", "loss of the last logical worker"),
    ("loss_hex", "text", "", "the same with all bits, as a hexadecimal number"),
    ("ref_loss", "float", "1", "loss of the last rank of the reference"),
    ("diff", "float", "1", "loss minus that of the reference"),
    ("param_sha", "text", "", "hash of the parameters after the step"),
    ("ref_param_sha", "text", "", "hash of those of the reference"),
    ("opt_sha", "text", "", "hash of the state of the optimizer"),
    ("ref_opt_sha", "text", "", "hash of that of the reference"),
    ("context_sha", "text", "", "hash of buffers and random states of all logical workers, by rank"),
    ("ref_context_sha", "text", "", "hash of those of the ranks of the reference"),
    _REFERENCE,
    ("equal", "bool", "", "whether the loss has the bits of the reference and all hashes are the same"),
)
FIG9_SUMMARY = table_schema(
    "easyscale_fig9_summary",
    *(_ACCURACY_MODEL, _SETTING, _STAGE),
    ("mapping", "text", "", "virtual ranks by process"),
    ("devices", "text", "", "kernel set that each process runs"),
    _REFERENCE,
    ("steps", "int", "1", "mini-batches of the stage"),
    ("different_steps", "int", "1", "those with other bits than the reference"),
    ("max_abs_diff", "float", "1", "largest difference of the losses"),
    ("published_max_abs_diff", "float", "1", "largest difference in the paper's curve", True),
)
GAP = table_schema(
    "easyscale_gap",
    *(_SCHEME, _DEVICES),
    ("seed", "int", "1", "seed of weights, order of samples and random states; the task is the same"),
    ("batch_size", "int", "samples", "samples of an optimizer step"),
    ("learning_rate", "float", "1", "learning rate at the start"),
    _CLASS,
    ("samples", "int", "1", "held-out samples of that class"),
    ("accuracy_pct", "float", "%", "share of them that the trained model gets right"),
    ("param_sha", "text", "", "hash of the trained parameters"),
)
GAP_SPREAD = table_schema(
    "easyscale_gap_spread",
    *(_SCHEME, _CLASS),
    ("spread_pct", "float", "%", "largest minus smallest accuracy over devices, mean over seeds"),
    ("max_spread_pct", "float", "%", "the same, largest over seeds"),
    ("seed_spread_pct", "float", "%", "largest minus smallest accuracy over seeds, mean over devices"),
    ("published_spread_pct", "float", "%", "spread over devices in the paper", True),
)
GAP_CURVES = table_schema(
    "easyscale_gap_curves",
    *(_SCHEME, _DEVICES),
    ("gamma", "float", "1", "what the learning rate is multiplied by when it decays"),
    ("epoch", "int", "1", "epochs done"),
    ("learning_rate", "float", "1", "learning rate in the epoch"),
    ("loss", "float", "1", "mean loss of the epoch"),
    ("param_sha", "text", "", "hash of the parameters after it"),
)
ACCURACY_SCHEMAS = (FIG9, FIG9_SUMMARY, GAP, GAP_SPREAD, GAP_CURVES)
ACCURACY_CELLS = {
    "fig9": (
        *(_ACCURACY_MODEL, _SETTING, _STAGE),
        ("published_max_abs_diff", "float", "1", "largest difference to plain data parallelism"),
    ),
    "gap": (
        *(_SCHEME, ("class", "text", "", "all, or worst for the one that spreads most")),
        ("published_spread_pct", "float", "%", "spread of the accuracy over numbers of GPUs"),
    ),
}


# ------------------------------------------------------------------------------------------------
# Schemas of the tables of what is measured of logical workers, Figs 10 to 13.

_BATCH = ("micro_batch_size", "int", "samples", "samples a micro-batch")
_STAND_IN = ("model", "text", "", "stand-in, by the name of the model whose part it plays")
_LOGICAL = ("logical_workers", "int", "1", "logical workers in one process")
_SAMPLES = (
    ("samples", "int", "1", "timed values behind each median"),
    (
        "cpu_share",
        "float",
        "1",
        "CPU time over time of processes on a core; else others used it",
        True,
    ),
)


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
    *_SAMPLES,
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
    *_SAMPLES,
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
    *_SAMPLES,
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
    *_SAMPLES,
    *_printed(
        ("ddp_s", "s", "on 8 V100"),
        ("est_first_s", "s", "on one V100, the last of 8 included"),
        ("est_last_s", "s", "on one V100"),
        ("first_norm", "1", "first over stock"),
        ("last_norm", "1", "last over stock"),
    ),
)
OVERHEADS = {"fig10": FIG10, "fig11": FIG11, "fig12": FIG12, "fig13": FIG13}
"""By the name of the figure."""


# ------------------------------------------------------------------------------------------------
# Schemas of the tables that only this paper has, and of its printed cells.

_MODEL = ("model", "text", "", "model, by its name in the authors' job list")
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
