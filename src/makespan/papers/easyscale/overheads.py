"""Figs 10 to 13: memory and time of logical workers beside those of stock training, measured here.

Medians over all timed steps of all repetitions, which are interleaved; spreads are inter-quartile ranges, of
a ratio over the pairs of steps that ran one after the other.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from makespan.cleanup import temporary_directory
from makespan.easyscale.kernels import (
    CANONICAL,
    KERNEL_SETS,
    DeterminismLevel,
    process_options,
    try_kernel_sets,
)
from makespan.errors import unknown_name
from makespan.papers.easyscale.tables import FIG10, FIG11, FIG12, FIG13
from makespan.runtime import Launch, LocalLauncher, ProcessOptions, RunDirectory

_WORKER = "makespan.easyscale.timing_worker"
_MIB = float(1 << 20)
_PRINTED_AS = {"neumf": "ncf"}  # stand-ins whose model has another name in the printed cells
_D1, _D1_D2, _NONE = "D1", "D1+D2", "none"
Options = Mapping[str, Any]
Samples = NDArray[np.float64]
Record = dict[str, Any]


def measure_overheads(
    cells: Mapping[str, pd.DataFrame], *, figures: Mapping[str, Options]
) -> dict[str, pd.DataFrame]:
    """Measure what figures show, with the printed cells beside it; nothing else should run meanwhile.

    Parameters
    ----------
    cells
        The paper's cells by figure, see `read_published`.
    figures
        Options of each that is measured: ``fig10``, device sharing against packed processes; ``fig11``,
        context switches; ``fig12``, levels of determinism; ``fig13``, gradient copies and synchronisation.
        ``procedure``: ``warmup_steps, steps, repetitions, seed``; ``models``: sizes of stand-ins with
        ``micro_batch_size``; and what only this figure has.

    Returns
    -------
    dict
        A table for each figure, with its schema.

    Raises
    ------
    UnknownNameError, makespan.errors.WorkerError
        No such figure; a process failed.
    """
    for name in figures:
        if name not in _FIGURES:
            raise unknown_name("figure", name, _FIGURES)
    devices = figures.get("fig12", {}).get("devices", ())
    # Torch is loaded for all kernel sets on all cores before anything is timed.
    try_kernel_sets(tuple(dict.fromkeys(("A", *devices, *((CANONICAL.name,) if devices else ())))))
    return {name: _FIGURES[name](options, cells[name]) for name, options in figures.items()}


# --- runs -----------------------------------------------------------------------------------------------


def _run(series: Sequence[Record], processes: Sequence[ProcessOptions]) -> list[Record]:
    """Let processes do series one after the other; what they found."""
    with temporary_directory("timing") as path:
        LocalLauncher().run(Launch(_WORKER, list(series), len(processes), path, options=list(processes)))
        found: list[Record] = RunDirectory(path).result()
    return found


def _series(options: Options, model: Options, device: str, ways: Sequence[Record], **more: Any) -> Record:
    procedure = {name: options["procedure"][name] for name in ("warmup_steps", "steps", "seed")}
    spec = {name: value for name, value in model.items() if not name.endswith("micro_batch_size")}
    own = {"spec": spec, "micro_batch_size": model["micro_batch_size"], "device": device, "ways": list(ways)}
    return procedure | {"budget_bytes": None} | own | more


def _stock(name: str, level: str = _NONE, n: int = 1) -> Record:
    """Stock data parallelism, ``n`` micro-batches a step in each process."""
    return {"name": name, "is_stock": True, "n": n, "level": level}


def _hosted(name: str, n: int, level: str = _D1, *, swaps: bool = True) -> Record:
    """``n`` logical workers in one process."""
    return {"name": name, "is_stock": False, "n": n, "level": level, "swaps_contexts": swaps}


def _bound(device: str, level: str, cpus: Sequence[int]) -> list[ProcessOptions]:
    """Bind processes that play a device, one a CPU."""
    own = process_options(device, DeterminismLevel.named(level))
    return [ProcessOptions(own.environment, own.threads, (cpu,)) for cpu in cpus]


def _cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _times(found: Record, way: str) -> Samples:
    """Return times of a way by process, step and micro-batch, last what follows these [s]."""
    return np.array([one for one in found["times"][way] if any(one)], dtype=np.float64)


def _cpu_share(records: Sequence[Record], ways: Sequence[str]) -> float:
    """Return the CPU time of all processes over the time of a step, median; of several ways the least."""
    shares = []
    for way in ways:
        steps: list[float] = []
        for one in records:
            spent = np.array([some for some in one["spent"][way] if some], dtype=np.float64)
            steps += (spent[:, :, 0].sum(axis=0) / spent[:, :, 1].max(axis=0)).tolist() if spent.size else []
        shares.append(_median(np.array(steps)))
    return min(shares)


# --- statistics -----------------------------------------------------------------------------------------


def _spread(values: Samples) -> float:
    low, high = np.quantile(values, [0.25, 0.75]) if values.size else (np.nan, np.nan)
    return float(high - low)


def _median(values: Samples) -> float:
    return float(np.median(values)) if values.size else float("nan")


def _timed(name: str, values: Samples) -> dict[str, float]:
    return {f"{name}_s": _median(values), f"{name}_iqr_s": _spread(values)}


def _related(name: str, own: Samples, base: Samples) -> dict[str, float]:
    """Ratio of two medians, and its spread over pairs."""
    ratio = _median(own) / _median(base)
    return {name: ratio, f"{name}_iqr": _spread(own / base) if own.size == base.size else float("nan")}


def _joined(parts: Sequence[Samples]) -> Samples:
    return np.concatenate([part.ravel() for part in parts]) if parts else np.empty(0)


def _beside(
    rows: Sequence[Record], published: pd.DataFrame, keys: Sequence[str], **ratios: tuple[str, str]
) -> pd.DataFrame:
    """Put printed cells beside rows, and ratios of them; rows without printed cells keep empty ones."""
    cells = published.drop(columns=["source", "micro_batch_size"], errors="ignore")
    for name, (own, base) in ratios.items():
        cells[f"published_{name}"] = cells[f"published_{own}_s"] / cells[f"published_{base}_s"]
    table = pd.DataFrame(rows)
    printed = table.assign(model=table["model"].replace(_PRINTED_AS))[list(keys)]
    found = printed.merge(cells, how="left", on=list(keys), validate="many_to_one")
    return pd.concat([table, found.drop(columns=list(keys))], axis=1)


# --- Fig. 10 --------------------------------------------------------------------------------------------

_PACKING, _EASYSCALE = "packing", "easyscale"


def _fig10(options: Options, published: pd.DataFrame) -> pd.DataFrame:
    """Weigh and time packed processes, and logical workers, on one device: one CPU, and so much memory."""
    found: dict[tuple[int, str, int], list[Record]] = defaultdict(list)
    budget = {"budget_bytes": int(options["memory_mib"] * _MIB)}
    for _ in range(options["procedure"]["repetitions"]):
        for number, model in enumerate(options["models"]):
            for k in options["workers"]:
                for method in (_PACKING, _EASYSCALE):
                    is_packed = method == _PACKING
                    way = _stock(method) if is_packed else _hosted(method, k)
                    processes = _bound("A", _D1, _cpus()[:1] * (k if is_packed else 1))
                    (one,) = _run([_series(options, model, "A", [way], **budget)], processes)
                    found[number, method, k].append(one)
    rows = []
    for number, model in enumerate(options["models"]):
        alone = _steps_s(found[number, _PACKING, min(options["workers"])], _PACKING)
        for method in (_PACKING, _EASYSCALE):
            for k in options["workers"]:
                row = {"model": model["name"], "micro_batch_size": model["micro_batch_size"]}
                row |= {"method": method, "k": k, "memory_mib": options["memory_mib"]}
                rows.append(row | _shared(found[number, method, k], method, k, alone))
    table = _beside(rows, _with_throughput(published), ("model", "method", "k"))
    return FIG10.validate(table, where="fig10")


def _steps_s(records: Sequence[Record], way: str) -> Samples:
    """Time of every step until its last process was done [s]; none where memory did not suffice."""
    if any(one["is_over"] for one in records):
        return np.empty(0)
    return _joined([_times(one, way).sum(axis=2).max(axis=0) for one in records])


def _shared(records: Sequence[Record], method: str, k: int, alone: Samples) -> Record:
    names = ("held_bytes", "gradient_sets_bytes")
    held, sets = (float(np.median([one[name] for one in records])) / _MIB for name in names)
    micro_batches = _steps_s(records, method) / k
    row: Record = {"peak_mem_mib": held, "gradient_sets_mib": sets, "total_mem_mib": held + sets}
    row |= _timed("micro_batch", micro_batches) | {"samples": micro_batches.size}
    row["cpu_share"] = _cpu_share(records, [method]) if micro_batches.size else float("nan")
    row |= _related("norm_throughput", alone, micro_batches)
    return row | {"oom": any(one["is_over"] for one in records)}


def _with_throughput(published: pd.DataFrame) -> pd.DataFrame:
    """Add the printed throughput relative to one process."""
    alone = published[(published["method"] == _PACKING) & (published["k"] == 1)]
    base = published["model"].map(dict(zip(alone["model"], alone["published_micro_batch_s"], strict=True)))
    return published.assign(published_norm_throughput=base / published["published_micro_batch_s"])


# --- Fig. 11 --------------------------------------------------------------------------------------------


def _fig11(options: Options, published: pd.DataFrame) -> pd.DataFrame:
    """Time micro-batches with and without context switches, in turn."""
    n, modes = options["logical_workers"], {"disable": False, "enable": True}
    ways = [_hosted(name, n, swaps=swaps) for name, swaps in modes.items()]
    series = [_series(options, model, "A", ways) for model in options["models"]]
    found = _run(series * options["procedure"]["repetitions"], _bound("A", _D1, _cpus()[:1]))
    rows = []
    for number, model in enumerate(options["models"]):
        own = found[number :: len(options["models"])]
        # The last micro-batch of a step too: what follows it stands in a column of its own.
        disable, enable = (_joined([_times(one, name)[0, :, :-1] for one in own]) for name in modes)
        row = {"model": model["name"], "micro_batch_size": model["micro_batch_size"], "logical_workers": n}
        row |= _timed("disable", disable) | _timed("enable", enable) | _related("ratio", enable, disable)
        rows.append(row | {"samples": enable.size, "cpu_share": _cpu_share(own, list(modes))})
    table = _beside(rows, published, ("model",), ratio=("enable", "disable"))
    return FIG11.validate(table, where="fig11")


# --- Fig. 12 --------------------------------------------------------------------------------------------


def _fig12(options: Options, published: pd.DataFrame) -> pd.DataFrame:
    """Time stock training, D1 and D1+D2 with the kernel set of each device; D1+D2 has one for all."""
    n, cpu = options["logical_workers"], _cpus()[:1]
    models = [model | {"micro_batch_size": model["small_micro_batch_size"]} for model in options["models"]]
    own = [_stock("baseline", n=n), _hosted("d1", n)]
    plans = [(device, _D1, own) for device in options["devices"]]
    plans.append((options["devices"][0], _D1_D2, [_hosted("d1d2", n, _D1_D2)]))
    found: dict[tuple[int, str, str], list[Samples]] = defaultdict(list)
    shares: dict[tuple[int, str], list[float]] = defaultdict(list)
    cheap: dict[int, bool] = {}
    for _ in range(options["procedure"]["repetitions"]):
        for device, level, ways in plans:
            series = [_series(options, model, device, ways) for model in models]
            for number, one in enumerate(_run(series, _bound(device, level, cpu))):
                cheap[number] = one["d2_cheap"]
                for way in ways:
                    where = device if level == _D1 else ""
                    found[number, where, way["name"]].append(_times(one, way["name"])[0].sum(axis=1) / n)
                    shares[number, where].append(_cpu_share([one], [way["name"]]))
    rows = []
    for number, model in enumerate(models):
        both = _joined(found[number, "", "d1d2"])
        for device in options["devices"]:
            baseline, d1 = (_joined(found[number, device, name]) for name in ("baseline", "d1"))
            row: Record = {"model": model["name"], "micro_batch_size": model["micro_batch_size"]}
            row |= {"device": device, "gpu": KERNEL_SETS[device].stands_for.lower()}
            row |= {"logical_workers": n, "d2_cheap": cheap[number], "samples": d1.size}
            row["cpu_share"] = min(*shares[number, device], *shares[number, ""])
            row |= _timed("baseline", baseline) | _timed("d1", d1) | _timed("d1d2", both)
            rows.append(row | _related("d1_norm", d1, baseline) | _related("d1d2_norm", both, baseline))
    printed = published.drop(columns="published_d1d2_stock_s")
    ratios = {"d1_norm": ("d1", "baseline"), "d1d2_norm": ("d1d2", "baseline")}
    return FIG12.validate(_beside(rows, printed, ("model", "gpu"), **ratios), where="fig12")


# --- Fig. 13 --------------------------------------------------------------------------------------------


def _fig13(options: Options, published: pd.DataFrame) -> pd.DataFrame:
    """Time stock processes, a CPU each, and as many logical workers in one process, in turn."""
    n, cpus = options["ranks"], _cpus()
    ways = [_stock("ddp"), _hosted("est", n)]
    series = [_series(options, model, "A", ways) for model in options["models"]]
    bound = _bound("A", _D1, [cpus[rank % len(cpus)] for rank in range(n)])
    found = _run(series * options["procedure"]["repetitions"], bound)
    rows = []
    for number, model in enumerate(options["models"]):
        own = found[number :: len(options["models"])]
        ddp = _joined([_times(one, "ddp").sum(axis=2).mean(axis=0) for one in own])
        times = [_times(one, "est")[0] for one in own]
        first = _joined([one[:, : n - 1].mean(axis=1) for one in times])
        last = _joined([one[:, n - 1 :].sum(axis=1) for one in times])
        row = {"model": model["name"], "micro_batch_size": model["micro_batch_size"], "logical_workers": n}
        row |= {"cores": min(n, len(cpus)), "samples": ddp.size, "cpu_share": _cpu_share(own, ["est"])}
        row |= _timed("ddp", ddp) | _timed("est_first", first) | _timed("est_last", last)
        rows.append(row | _related("first_norm", first, ddp) | _related("last_norm", last, ddp))
    ratios = {"first_norm": ("est_first", "ddp"), "last_norm": ("est_last", "ddp")}
    return FIG13.validate(_beside(rows, published, ("model",), **ratios), where="fig13")


_FIGURES: dict[str, Callable[[Options, pd.DataFrame], pd.DataFrame]] = {
    "fig10": _fig10,
    "fig11": _fig11,
    "fig12": _fig12,
    "fig13": _fig13,
}
