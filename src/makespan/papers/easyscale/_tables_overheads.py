"""Schemas of the tables of what is measured of logical workers, Figs 10 to 13."""

from typing import Any

from makespan.tables import table_schema

__all__ = ["FIG10", "FIG11", "FIG12", "FIG13", "OVERHEADS"]

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
