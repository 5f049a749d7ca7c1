"""Reader of the trace files of the Morphling authors.

One CSV file a model, columns ``exec_plan, placement, iter_time`` [s] and, in most files,
``forward, overlap_sync, optimize``, and in one file ``cpu_threads``. An iteration time of zero
marks a run that failed. The phase columns are in milliseconds in most files and in seconds in
some rows; the numbers of a row decide, see `phase_unit`.
"""

import logging
import math
from pathlib import Path

import numpy as np
import pandas as pd

from makespan.errors import MissingDataError, TraceError
from makespan.tables import THROUGHPUT
from makespan.throughput._rows import RowNames, canonical_rows, check_times
from makespan.units import MS
from makespan.workloads import Workload

__all__ = ["phase_unit", "read_artifact_trace"]

_LOG = logging.getLogger(__name__)

_REQUIRED = ("exec_plan", "placement", "iter_time")
_PHASES = {"forward": "forward_s", "overlap_sync": "overlap_sync_s", "optimize": "optimize_s"}
_THREADS = "cpu_threads"

# Phases are parts of the iteration, so in seconds their sum is near the iteration time or below
# it, and in milliseconds a thousand times that. The gap between the two ranges is rejected.
_SECONDS_RATIO_MAX = 2.0
_MILLISECONDS_RATIO = (20.0, 2000.0)


def phase_unit(phases_total: float, iter_time_s: float) -> float:
    """Decide from the numbers of a row in which unit its phases are.

    Parameters
    ----------
    phases_total
        Sum of the phase columns, as written.
    iter_time_s
        Iteration time [s], positive.

    Returns
    -------
    float
        Seconds per unit: 1 for seconds, 1e-3 for milliseconds, NaN if neither makes the phases
        fit the iteration.
    """
    ratio = phases_total / iter_time_s
    if ratio <= _SECONDS_RATIO_MAX:
        return 1.0
    low, high = _MILLISECONDS_RATIO
    return MS if low <= ratio <= high else math.nan


def read_artifact_trace(
    path: str | Path, workload: Workload, provenance: str, default_cpu_threads: int
) -> pd.DataFrame:
    """Read one trace file of the authors into the canonical throughput table.

    Parameters
    ----------
    path
        The file; a byte order mark, Windows line ends and a missing final newline are accepted.
    workload
        What the file is a trace of.
    provenance
        Text for the column of that name.
    default_cpu_threads
        CPU threads a GPU where the file does not say.

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.THROUGHPUT`; every row ``clean``, see `makespan.traces.flag_anomalies`.

    Raises
    ------
    MissingDataError
        There is no such file.
    TraceError
        The file is empty, lacks a column, or a cell has no accepted value; names row and column.
    """
    raw = _read_text(Path(path))
    names = RowNames(where=str(path), iter_time="iter_time")
    numbers = _numbers(raw, default_cpu_threads, names)
    table = pd.DataFrame(
        {
            "workload": workload.key,
            "exec_plan": raw["exec_plan"].str.strip(),
            "placement": raw["placement"].str.strip(),
            "cpu_threads": numbers[_THREADS].astype("int64"),
            "global_batch_size": workload.global_batch_size,
            **_times(numbers, names),
            "feasible": numbers["iter_time"] > 0,
            "clean": True,
            "flag": "",
            "provenance": provenance,
        }
    )
    return THROUGHPUT.validate(canonical_rows(table, workload, names), where=str(path))


def _read_text(path: Path) -> pd.DataFrame:
    try:
        raw: pd.DataFrame = pd.read_csv(path, dtype=str, encoding="utf-8-sig", keep_default_na=False)
    except FileNotFoundError:
        raise MissingDataError(f"{path}: no such trace file") from None
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read as a trace: {error}") from None
    raw.columns = pd.Index([str(name).strip() for name in raw.columns])
    missing = [name for name in _REQUIRED if name not in raw.columns]
    phases = [name for name in _PHASES if name in raw.columns]
    if phases and len(phases) < len(_PHASES):
        missing += [name for name in _PHASES if name not in phases]
    if missing:
        raise TraceError(
            f"{path}: column(s) {', '.join(missing)} missing; found: {', '.join(raw.columns)}; "
            f"accepted: {', '.join(_REQUIRED)}, optionally {_THREADS}, optionally all of "
            f"{', '.join(_PHASES)}"
        )
    if raw.empty:
        raise TraceError(f"{path}: no rows; accepted: at least one measured run")
    ignored = [name for name in raw.columns if name not in (*_REQUIRED, *_PHASES, _THREADS)]
    if ignored:
        _LOG.warning("%s: column(s) %s are not used", path, ", ".join(ignored))
    return raw


def _numbers(raw: pd.DataFrame, default_cpu_threads: int, names: RowNames) -> pd.DataFrame:
    """Convert the numeric columns; unreadable cells become NaN and are rejected."""
    present = [name for name in ("iter_time", *_PHASES) if name in raw.columns]
    numbers = pd.DataFrame(
        {name: pd.to_numeric(raw[name], errors="coerce").astype("float64") for name in present}
    )
    for name in present:
        for row in np.flatnonzero(numbers[name].isna().to_numpy()):
            raise names.error(int(row), name, raw[name].iloc[row], "a number")
    check_times(
        numbers.rename(columns={"iter_time": "iter_time_s"}),
        {"iter_time_s": "iter_time"} | {name: name for name in present if name in _PHASES},
        names,
    )
    if _THREADS not in raw.columns:
        return numbers.assign(**{_THREADS: default_cpu_threads})
    threads = pd.to_numeric(raw[_THREADS], errors="coerce")
    wrong = ~((threads >= 1) & (threads % 1 == 0))
    for row in np.flatnonzero(wrong.to_numpy()):
        raise names.error(int(row), _THREADS, raw[_THREADS].iloc[row], "a whole number, at least 1")
    return numbers.assign(**{_THREADS: threads})


def _times(numbers: pd.DataFrame, names: RowNames) -> dict[str, "pd.Series[float] | float"]:
    """Convert the times to seconds; NaN where the run failed or the file has no phases."""
    feasible = numbers["iter_time"] > 0
    times: dict[str, pd.Series[float] | float] = {"iter_time_s": numbers["iter_time"].where(feasible)}
    if not set(_PHASES) <= set(numbers.columns):
        return times | dict.fromkeys(_PHASES.values(), math.nan)
    total = numbers[list(_PHASES)].sum(axis=1)
    units = [
        phase_unit(phases, time) if time > 0 else math.nan
        for phases, time in zip(total, numbers["iter_time"], strict=True)
    ]
    for row, unit in enumerate(units):
        if math.isnan(unit) and bool(feasible.iloc[row]):
            raise names.error(
                row,
                "forward + overlap_sync + optimize",
                float(total.iloc[row]),
                f"phases in s or ms that fit the iteration time of {numbers['iter_time'].iloc[row]} s",
            )
    scale = pd.Series(units, index=numbers.index)
    return times | {column: numbers[name] * scale for name, column in _PHASES.items()}
