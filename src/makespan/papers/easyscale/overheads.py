"""Figs 10 to 13: memory and time of logical workers beside those of stock training, measured here.

Medians over all timed steps of all repetitions, which are interleaved; spreads are inter-quartile ranges, of
a ratio over the pairs of steps that ran one after the other.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import model_validator

from makespan.cleanup import temporary_directory
from makespan.easyscale.kernels import (
    CANONICAL,
    KERNEL_SETS,
    DeterminismLevel,
    process_options,
    try_kernel_sets,
)
from makespan.easyscale.requests import TIMING, TimedVariant, TimingSeries
from makespan.errors import MakespanError
from makespan.papers.experiment import Experiment, Figure, Given
from makespan.runtime import Launch, LocalLauncher, ProcessOptions, RunDirectory
from makespan.settings import Block, Count, one_of, option, shared
from makespan.training.zoo import STAND_INS, StandIn

_WORKER = "makespan.easyscale.timing_worker"
_TUNABLES, _SMALL_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=0"
_MIB = float(1 << 20)
_PRINTED_AS = {"neumf": "ncf"}  # stand-ins whose model has another name in the printed cells
_D1, _D1_D2, _NONE = "D1", "D1+D2", "none"
Samples = NDArray[np.float64]
Record = dict[str, Any]


_of_steps = partial(option, changes="fig10, fig11, fig12, fig13")
_of_models = partial(_of_steps, source="a choice: what a core trains in 50 to 100 ms")
_of_sharing = partial(option, changes="fig10")
_Devices = tuple[Annotated[str, one_of(lambda: KERNEL_SETS)], ...]


class Procedure(Block):
    """Numbers of warm-up and timed steps, and repetitions."""

    warmup_steps: int = option(
        "mini-batches that are not timed",
        2,
        source="EasyScale artifact: 4",
        changes="fig11, fig12, fig13",
        ge=0,
    )
    steps: int = option(
        "mini-batches that are timed",
        4,
        source="a choice; the artifact: 16",
        changes="fig11, fig12, fig13",
        ge=1,
    )
    repetitions: int = _of_steps(
        "interleaved repetitions of all measurements of a figure", 2, source="a choice", ge=1
    )
    seed: int = _of_steps("seed of weights, samples and random states", 1, source="a choice", ge=0)


class SizedModel(Block):
    """A stand-in and its sizes."""

    name: Annotated[str, one_of(lambda: STAND_INS)] = _of_models("name of the stand-in")
    width: Count = _of_models("channels of the first layers, or features of an embedding")
    depth: Count = _of_models("blocks at each resolution, or layers")
    extent: Count = _of_models("pixels per side, or tokens per sequence")
    n_rows: Count = _of_models("rows of an embedding")
    micro_batch_size: Count = _of_models("samples per micro-batch", unit="samples")

    @model_validator(mode="after")
    def _can_be_built(self) -> "SizedModel":
        try:
            StandIn(**self.model_dump(include={one.name for one in fields(StandIn)}))
        except MakespanError as error:
            raise ValueError(f"sizes of a stand-in ({error})") from None
        return self


class TimedModel(SizedModel):
    """A stand-in whose steps are timed."""

    small_micro_batch_size: Count = _of_models(
        "samples per micro-batch in Fig. 12", unit="samples", changes="fig12"
    )


class _TimedExperiment(Experiment):
    """A measurement on CPU cores that should run alone on its machine.

    Raises `makespan.errors.WorkerError` if a process fails.
    """

    sources = ("measured",)
    on_profile = True
    trains = True
    minutes, mem_mb = 120, 4000
    unused = frozenset({"ranks"})

    ranks: int = shared("easyscale.overheads.ranks")

    def n_threads(self, all_cores: int) -> int:
        """Return all cores, because runs are timed; on a cluster one per stock process of Fig. 13."""
        return max(all_cores, self.ranks)


def _load_kernel_sets(devices: Sequence[str] = ()) -> None:
    """Load torch for kernel sets on all cores before anything is timed."""
    try_kernel_sets(tuple(dict.fromkeys(("A", *devices, *((CANONICAL.name,) if devices else ())))))


# --- runs -----------------------------------------------------------------------------------------------


def _run_series(series: Sequence[TimingSeries], processes: Sequence[ProcessOptions]) -> list[Record]:
    """Run timing series in turn in the same processes, and return the results."""
    with temporary_directory("timing") as path:
        request = TIMING.dump_python(list(series), mode="json")
        LocalLauncher().run(Launch(_WORKER, request, len(processes), path, options=list(processes)))
        found: list[Record] = RunDirectory(path).result()
    return found


def _timing_series(
    procedure: "Procedure | Sharing",
    model: SizedModel,
    device: str,
    ways: Sequence[TimedVariant],
    budget_bytes: int | None = None,
) -> TimingSeries:
    spec = StandIn(**model.model_dump(include={field.name for field in fields(StandIn)}))
    return TimingSeries(
        spec, model.micro_batch_size, procedure.seed, device, tuple(ways), procedure.warmup_steps,
        procedure.steps, budget_bytes,
    )  # fmt: skip


def _stock_variant(name: str, level: str = _NONE, n: int = 1) -> TimedVariant:
    """Stock data parallelism, ``n`` micro-batches per step in each process."""
    return TimedVariant(name, level, is_stock=True, n=n)


def _est_variant(name: str, n: int, level: str = _D1, *, swaps: bool = True) -> TimedVariant:
    """``n`` logical workers in one process."""
    return TimedVariant(name, level, is_stock=False, n=n, swaps_contexts=swaps)


def _pinned_processes(device: str, level: str, cpus: Sequence[int]) -> list[ProcessOptions]:
    """Bind processes that play a device, one per CPU."""
    options = process_options(device, DeterminismLevel.named(level))
    return [ProcessOptions(options.environment, options.threads, (cpu,)) for cpu in cpus]


def _cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _micro_batch_times_s(found: Record, way: str) -> Samples:
    """Return times by process, step and micro-batch [s]; the last one is the rest of the step."""
    return np.array([times for times in found["times"][way] if any(times)], dtype=np.float64)


def _cpu_share(records: Sequence[Record], ways: Sequence[str]) -> float:
    """Return the CPU time of all processes over the time of a step, median; of several ways the least."""
    shares = []
    for way in ways:
        steps: list[float] = []
        for record in records:
            spent = np.array([times for times in record["spent"][way] if times], dtype=np.float64)
            steps += (spent[:, :, 0].sum(axis=0) / spent[:, :, 1].max(axis=0)).tolist() if spent.size else []
        shares.append(_median(np.array(steps)))
    return min(shares)


# --- statistics -----------------------------------------------------------------------------------------


def _interquartile_range(values: Samples) -> float:
    low, high = np.quantile(values, [0.25, 0.75]) if values.size else (np.nan, np.nan)
    return float(high - low)


def _median(values: Samples) -> float:
    return float(np.median(values)) if values.size else float("nan")


def _median_and_iqr(name: str, values: Samples) -> dict[str, float]:
    return {f"{name}_s": _median(values), f"{name}_iqr_s": _interquartile_range(values)}


def _ratio_of_medians(name: str, own: Samples, base: Samples) -> dict[str, float]:
    """Ratio of two medians, and its spread over pairs."""
    ratio = _median(own) / _median(base)
    return {
        name: ratio,
        f"{name}_iqr": _interquartile_range(own / base) if own.size == base.size else float("nan"),
    }


def _concatenated(parts: Sequence[Samples]) -> Samples:
    return np.concatenate([part.ravel() for part in parts]) if parts else np.empty(0)


def _with_published(
    rows: Sequence[Record], published: pd.DataFrame, keys: Sequence[str], **ratios: tuple[str, str]
) -> pd.DataFrame:
    """Add the printed cells of each row, and ratios of these; rows without printed cells get empty ones."""
    cells = published.drop(columns=["source", "micro_batch_size"], errors="ignore")
    for name, (own, base) in ratios.items():
        cells[f"published_{name}"] = cells[f"published_{own}_s"] / cells[f"published_{base}_s"]
    table = pd.DataFrame(rows)
    printed = table.assign(model=table["model"].replace(_PRINTED_AS))[list(keys)]
    matched = printed.merge(cells, how="left", on=list(keys), validate="many_to_one")
    return pd.concat([table, matched.drop(columns=list(keys))], axis=1)


# --- Fig. 10 --------------------------------------------------------------------------------------------

_PACKING, _EASYSCALE = "packing", "easyscale"


class Sharing(_TimedExperiment):
    """Measure memory and time of packed processes and of logical workers on one CPU with limited memory."""

    name = "fig10"
    tables = {"fig10": "memory and time of packed processes and of logical workers that share a device"}
    cells = ("fig10",)
    figures = (
        Figure(
            "fig10",
            "Fig. 10",
            "Logical workers and packed processes that share one CPU core, which "
            "plays a device with a limited memory, source {source}. Top: median "
            "throughput of {timed micro-batches: largest fig10.samples} over that "
            "of one process, with lines with caps for half the inter-quartile "
            "range either way, cut at 0. Bottom: memory beyond idle processes; "
            "hatched is what logical workers keep as gradient sets. Crosses mark "
            "what exceeded the memory of the device, the dashed line. Hollow "
            "diamonds are published values.",
            tables=("fig10",),
            sources=("measured",),
        ),
    )

    warmup_steps: int = _of_sharing(
        "mini-batches that are not timed", 2, source="EasyScale artifact: 2", ge=0
    )
    steps: int = _of_sharing("mini-batches that are timed", 4, source="a choice; the artifact: 8", ge=1)
    models: tuple[SizedModel, ...] = _of_sharing(
        "stand-ins, with memories in the ratio of those of the paper to its device",
        (
            SizedModel(name="resnet50", width=64, depth=1, extent=16, n_rows=64, micro_batch_size=8),
            SizedModel(name="shufflenetv2", width=32, depth=1, extent=16, n_rows=64, micro_batch_size=128),
        ),
        source="EasyScale, Fig. 10: ResNet50 and ShuffleNetv2",
        min_length=1,
    )
    workers: tuple[Count, ...] = _of_sharing(
        "numbers of workers that share the device; throughput is relative to the smallest",
        (1, 2, 4),
        source="EasyScale artifact: 1 to 16",
        min_length=1,
    )
    memory_mib: float = _of_sharing(
        "memory of the device; a run that exceeds it is recorded as out of memory",
        90.0,
        unit="MiB",
        source="a choice; a V100 of the paper has 32 GB",
        gt=0,
    )
    repetitions: int = shared("easyscale.overheads.procedure.repetitions")
    seed: int = shared("easyscale.overheads.procedure.seed")

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return one row per model, method and number that share the device."""
        _load_kernel_sets()
        found: dict[tuple[int, str, int], list[Record]] = defaultdict(list)
        for _ in range(self.repetitions):
            for number, model in enumerate(self.models):
                for k in self.workers:
                    for method in (_PACKING, _EASYSCALE):
                        found[number, method, k].append(self._measured(model, method, k))
        rows = []
        for number, model in enumerate(self.models):
            alone = _step_times_s(found[number, _PACKING, min(self.workers)], _PACKING)
            for method in (_PACKING, _EASYSCALE):
                for k in self.workers:
                    row: Record = {"model": model.name, "micro_batch_size": model.micro_batch_size}
                    row |= {"method": method, "k": k, "memory_mib": self.memory_mib}
                    rows.append(row | _sharing_row(found[number, method, k], method, k, alone))
        # Printed throughput is relative to one process, as ours is.
        printed = given.cells["fig10"]
        one = printed[(printed["method"] == _PACKING) & (printed["k"] == 1)]
        base_s = printed["model"].map(dict(zip(one["model"], one["published_micro_batch_s"], strict=True)))
        printed = printed.assign(published_norm_throughput=base_s / printed["published_micro_batch_s"])
        return {"fig10": _with_published(rows, printed, ("model", "method", "k"))}

    def _measured(self, model: SizedModel, method: str, k: int) -> Record:
        is_packed = method == _PACKING
        way = _stock_variant(method) if is_packed else _est_variant(method, k)
        # Huge pages would round up what is measured.
        tunables = ":".join(filter(None, (os.environ.get(_TUNABLES), _SMALL_PAGES)))
        processes = [
            replace(each, environment={**each.environment, _TUNABLES: tunables})
            for each in _pinned_processes("A", _D1, _cpus()[:1] * (k if is_packed else 1))
        ]
        series = _timing_series(self, model, "A", [way], budget_bytes=int(self.memory_mib * _MIB))
        (one,) = _run_series([series], processes)
        return one


def _step_times_s(records: Sequence[Record], way: str) -> Samples:
    """Return the time of every step until its last process was done [s]; none if memory did not suffice."""
    if any(record["is_over"] for record in records):
        return np.empty(0)
    return _concatenated([_micro_batch_times_s(record, way).sum(axis=2).max(axis=0) for record in records])


def _sharing_row(records: Sequence[Record], method: str, k: int, alone: Samples) -> Record:
    """Return memory and time of ``k`` workers that share a device, over all repetitions."""
    peaks, sets = (
        np.array([one[name] for one in records]) / _MIB for name in ("held_bytes", "gradient_sets_bytes")
    )
    held, of_sets = float(np.median(peaks)), float(np.median(sets))
    micro_batches = _step_times_s(records, method) / k
    row: Record = {"peak_mem_mib": held, "peak_mem_range_mib": float(np.ptp(peaks))}
    row |= {"gradient_sets_mib": of_sets, "total_mem_mib": held + of_sets}
    row |= _median_and_iqr("micro_batch", micro_batches) | {"samples": micro_batches.size}
    row["cpu_share"] = _cpu_share(records, [method]) if micro_batches.size else float("nan")
    row |= _ratio_of_medians("norm_throughput", alone, micro_batches)
    return row | {"oom": any(one["is_over"] for one in records)}


# --- Fig. 11 --------------------------------------------------------------------------------------------


class Switching(_TimedExperiment):
    """Time micro-batches with and without context switches, in turn."""

    name = "fig11"
    tables = {"fig11": "micro-batches with and without context switches"}
    cells = ("fig11",)
    figures = (
        Figure(
            "fig11",
            "Fig. 11",
            "Median time of a micro-batch with context switches over that "
            "without, source {source}, of {pairs: largest fig11.samples} that are "
            "measured in turn in one process, with half their inter-quartile "
            "range either way as lines with caps. The axis does not start at 0; "
            "the dotted line is 1. Hollow diamonds are published values.",
            tables=("fig11",),
            sources=("measured",),
        ),
    )

    procedure: Procedure = shared("easyscale.overheads.procedure")
    models: tuple[TimedModel, ...] = shared("easyscale.overheads.models")
    logical_workers: int = shared("easyscale.overheads.logical_workers")

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return one row per model."""
        _load_kernel_sets()
        n, modes = self.logical_workers, {"disable": False, "enable": True}
        ways = [_est_variant(name, n, swaps=swaps) for name, swaps in modes.items()]
        series = [_timing_series(self.procedure, model, "A", ways) for model in self.models]
        found = _run_series(series * self.procedure.repetitions, _pinned_processes("A", _D1, _cpus()[:1]))
        rows = []
        for number, model in enumerate(self.models):
            own = found[number :: len(self.models)]
            # The last micro-batch of a step too: what follows it stands in a column of its own.
            disable, enable = (
                _concatenated([_micro_batch_times_s(one, name)[0, :, :-1] for one in own]) for name in modes
            )
            row: Record = {"model": model.name, "micro_batch_size": model.micro_batch_size}
            row |= (
                {"logical_workers": n}
                | _median_and_iqr("disable", disable)
                | _median_and_iqr("enable", enable)
            )
            row |= _ratio_of_medians("ratio", enable, disable)
            rows.append(row | {"samples": enable.size, "cpu_share": _cpu_share(own, list(modes))})
        return {"fig11": _with_published(rows, given.cells["fig11"], ("model",), ratio=("enable", "disable"))}


# --- Fig. 12 --------------------------------------------------------------------------------------------


class Levels(_TimedExperiment):
    """Time stock training, D1 and D1+D2 with the kernel set of each device; D1+D2 has one for all."""

    name = "fig12"
    tables = {"fig12": "micro-batches of stock training, under D1 and under D1+D2, by kernel set"}
    cells = ("fig12",)
    figures = (
        Figure(
            "fig12",
            "Fig. 12",
            "Median time of a micro-batch under determinism levels over that of "
            "stock training on the same kernel set, source {source}, of {timed "
            "micro-batches: largest fig12.samples}. Sets A, B and C play the "
            "types of GPU in brackets; C has the kernels that D1+D2 uses on all "
            "of them, so it is a control. Lines with caps are half the "
            "inter-quartile range either way, hollow diamonds published values.",
            tables=("fig12",),
            sources=("measured",),
        ),
    )

    procedure: Procedure = shared("easyscale.overheads.procedure")
    models: tuple[TimedModel, ...] = shared("easyscale.overheads.models")
    logical_workers: int = shared("easyscale.overheads.logical_workers")
    devices: _Devices = shared("easyscale.overheads.devices")

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return one row per model and device."""
        _load_kernel_sets(self.devices)
        n, cpu, times, shares = self.logical_workers, _cpus()[:1], _Times(list), _Shares(list)
        models = [
            model.model_copy(update={"micro_batch_size": model.small_micro_batch_size})
            for model in self.models
        ]
        own = [_stock_variant("baseline", n=n), _est_variant("d1", n)]
        plans = [(device, _D1, own) for device in self.devices]
        plans.append((self.devices[0], _D1_D2, [_est_variant("d1d2", n, _D1_D2)]))
        cheap: dict[int, bool] = {}
        for _ in range(self.procedure.repetitions):
            for device, level, ways in plans:
                series = [_timing_series(self.procedure, model, device, ways) for model in models]
                for number, one in enumerate(_run_series(series, _pinned_processes(device, level, cpu))):
                    cheap[number] = one["d2_cheap"]
                    for way in ways:
                        where = device if level == _D1 else ""
                        times[number, where, way.name].append(
                            _micro_batch_times_s(one, way.name)[0].sum(axis=1) / n
                        )
                        shares[number, where].append(_cpu_share([one], [way.name]))
        rows = []
        for number, model in enumerate(models):
            both = _concatenated(times[number, "", "d1d2"])
            for device in self.devices:
                baseline, d1 = (_concatenated(times[number, device, name]) for name in ("baseline", "d1"))
                row: Record = {"model": model.name, "micro_batch_size": model.micro_batch_size}
                row |= {"device": device, "gpu": KERNEL_SETS[device].stands_for.lower()}
                row |= {"logical_workers": n, "d2_cheap": cheap[number], "samples": d1.size}
                row["cpu_share"] = min(*shares[number, device], *shares[number, ""])
                row |= (
                    _median_and_iqr("baseline", baseline)
                    | _median_and_iqr("d1", d1)
                    | _median_and_iqr("d1d2", both)
                )
                rows.append(
                    row
                    | _ratio_of_medians("d1_norm", d1, baseline)
                    | _ratio_of_medians("d1d2_norm", both, baseline)
                )
        printed = given.cells["fig12"].drop(columns="published_d1d2_stock_s")
        ratios = {"d1_norm": ("d1", "baseline"), "d1d2_norm": ("d1d2", "baseline")}
        return {"fig12": _with_published(rows, printed, ("model", "gpu"), **ratios)}


_Times = defaultdict[tuple[int, str, str], list[Samples]]
_Shares = defaultdict[tuple[int, str], list[float]]


# --- Fig. 13 --------------------------------------------------------------------------------------------


class Copying(_TimedExperiment):
    """Time stock processes with one CPU each, and as many logical workers in one process, in turn."""

    name = "fig13"
    unused = frozenset()
    tables = {"fig13": "steps of stock processes, and of logical workers with and without the sum"}
    cells = ("fig13",)
    figures = (
        Figure(
            "fig13",
            "Fig. 13",
            "Time of logical workers in one process over a step of as many stock "
            "processes, a core each, source {source}: medians of {timed steps: "
            "largest fig13.samples}, with half the inter-quartile range either "
            "way as lines with caps. The last worker also sums the gradients of "
            "all and updates the model. Hollow diamonds are published values; "
            "that of the other workers has this part in its mean.",
            tables=("fig13",),
            sources=("measured",),
        ),
    )

    procedure: Procedure = shared("easyscale.overheads.procedure")
    models: tuple[TimedModel, ...] = shared("easyscale.overheads.models")

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return one row per model."""
        _load_kernel_sets()
        n, cpus = self.ranks, _cpus()
        ways = [_stock_variant("ddp"), _est_variant("est", n)]
        series = [_timing_series(self.procedure, model, "A", ways) for model in self.models]
        bound = _pinned_processes("A", _D1, [cpus[rank % len(cpus)] for rank in range(n)])
        found = _run_series(series * self.procedure.repetitions, bound)
        rows = []
        for number, model in enumerate(self.models):
            own = found[number :: len(self.models)]
            ddp = _concatenated([_micro_batch_times_s(one, "ddp").sum(axis=2).mean(axis=0) for one in own])
            times = [_micro_batch_times_s(one, "est")[0] for one in own]
            first = _concatenated([one[:, : n - 1].mean(axis=1) for one in times])
            last = _concatenated([one[:, n - 1 :].sum(axis=1) for one in times])
            row: Record = {"model": model.name, "micro_batch_size": model.micro_batch_size}
            row |= {"logical_workers": n, "cores": min(n, len(cpus)), "samples": ddp.size}
            row["cpu_share"] = _cpu_share(own, ["est"])
            row |= (
                _median_and_iqr("ddp", ddp)
                | _median_and_iqr("est_first", first)
                | _median_and_iqr("est_last", last)
            )
            rows.append(
                row | _ratio_of_medians("first_norm", first, ddp) | _ratio_of_medians("last_norm", last, ddp)
            )
        ratios = {"first_norm": ("est_first", "ddp"), "last_norm": ("est_last", "ddp")}
        return {"fig13": _with_published(rows, given.cells["fig13"], ("model",), **ratios)}


# --- options that several of these figures share ----------------------------------------------------------


class Overheads(Block):
    """Memory and time of logical workers, measured here."""

    procedure: Procedure = option("warm-up steps, timed steps and repetitions", Procedure())
    models: tuple[TimedModel, ...] = _of_models(
        "stand-ins of Figs 11 to 13",
        (
            TimedModel(
                name="resnet50",
                width=64,
                depth=1,
                extent=16,
                n_rows=64,
                micro_batch_size=28,
                small_micro_batch_size=4,
            ),
            TimedModel(
                name="neumf",
                width=256,
                depth=2,
                extent=16,
                n_rows=4096,
                micro_batch_size=6144,
                small_micro_batch_size=384,
            ),
            TimedModel(
                name="bert",
                width=256,
                depth=2,
                extent=64,
                n_rows=1024,
                micro_batch_size=12,
                small_micro_batch_size=2,
            ),
        ),
        changes="fig11, fig12, fig13",
        min_length=1,
    )
    logical_workers: Count = option(
        "logical workers of one process", 4, source="EasyScale artifact: 8", changes="fig11, fig12"
    )
    ranks: int = option(
        "stock processes, each on a core of its own, and as many logical workers on one core",
        2,
        source="EasyScale artifact: 8",
        changes="fig13",
        ge=2,
    )
    devices: _Devices = option(
        "kernel sets that play types of GPU",
        ("A", "B", "C"),
        source="EasyScale, Fig. 12",
        changes="fig12",
        min_length=1,
    )
    sharing: Sharing = option("device sharing against packed processes", Sharing())
