"""Readers of job lists that other schedulers are simulated with, and of requests in a table of one's own.

Formats: the simulators released with Gu et al., "Tiresias", NSDI 2019, with Qiao et al., "Pollux", OSDI 2021,
and Jayaram Subramanya et al., "Sia", SOSP 2023 (one form), and with Narayanan et al., "Gavel", OSDI 2020
(traces without header line, separated by tabs; cells grew from six to ten over the years). Times are in
seconds.
"""

import ast
import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from makespan.errors import TraceError
from makespan.files import read_text
from makespan.tables import check_length
from makespan.traces._cells import (
    ROW,
    Finding,
    ReadReport,
    as_text,
    flags,
    further_columns,
    is_missing,
    lacking,
    names,
    numbers,
    read_cells,
    read_raw,
    refuse,
    repair,
    report_further,
)
from makespan.traces._repairs import NO_PROMISE, STEPS
from makespan.traces._requests import RequestTrace, finish_requests

__all__ = [
    "read_gavel_jobs", "read_gavel_throughputs", "read_pollux_jobs", "read_requests", "read_tiresias_jobs",
    "request_trace",
]  # fmt: skip

_REQUESTS = ("job_id", "submit_time_s", "n_gpus", "duration_s")
_REQUESTS_MORE = ("n_cpus", "tenant", "status", "gpu", "is_guaranteed")
_TIRESIAS = ("job_id", "num_gpu", "submit_time", "duration")
_POLLUX = ("name", "time", "num_replicas", "duration")
_GPUS, _CPUS = "a number of GPUs, 0 or more", "a number of CPUs, 0 or more"
_SECONDS, _DURATION = "a time in seconds, or nothing", "a duration in seconds"
_AFTER_FLAG = {
    3: ("total_steps", "arrival_time", "scale_factor"),
    4: ("needs_data_dir", "total_steps", "arrival_time", "scale_factor"),
    5: ("needs_data_dir", "total_steps", "scale_factor", "SLO", "arrival_time"),
    6: ("needs_data_dir", "total_steps", "scale_factor", "priority_weight", "SLO", "arrival_time"),
}


def read_requests(path: str | Path) -> RequestTrace:
    """Read a table of requests: columns ``job_id, submit_time_s, n_gpus, duration_s`` of schema `REQUESTS`.

    Its columns ``n_cpus, tenant, status``, and ``gpu`` and ``is_guaranteed`` of `RequestTrace`, may be there.
    Further columns have no effect, which is reported.
    """
    findings = list[Finding]()
    known = (*_REQUESTS, *_REQUESTS_MORE)
    cells = read_cells(
        path,
        _REQUESTS,
        findings,
        optional=lambda names: [*_REQUESTS_MORE, *further_columns(names, known)],
    )
    return _requests(cells, str(path), findings)


def request_trace(
    table: pd.DataFrame, where: str = "table of requests", *, before: ReadReport | None = None
) -> RequestTrace:
    """Check a table of requests in memory, and repair it as those of files; columns as for `read_requests`.

    ``where`` names the table in the report and in messages, and ``before`` is the report of what made the
    table; rows are then those of the table. Raises `TraceError` as readers do.
    """
    missing = [name for name in _REQUESTS if name not in table]
    if missing:
        raise lacking(missing, [str(name) for name in table.columns], _REQUESTS, where)
    if table.empty:
        raise TraceError(f"{where}: no rows; accepted: a trace with at least one")
    known = (*_REQUESTS, *_REQUESTS_MORE)
    further = further_columns([name for name in table if isinstance(name, str)], known)
    columns = [*(name for name in known if name in table), *further]
    cells = pd.DataFrame({name: as_text(table[name]) for name in columns})
    findings = [] if before is None else list(before.findings)
    return _requests(cells.assign(**{ROW: np.arange(1, len(cells) + 1)}), where, findings, before)


def _requests(
    cells: pd.DataFrame, where: str, findings: list[Finding], before: ReadReport | None = None
) -> RequestTrace:
    report_further(cells, (*_REQUESTS, *_REQUESTS_MORE), findings)
    frame = pd.DataFrame(
        {
            "job_id": names(cells, "job_id", where),
            "submit_time_s": numbers(cells, "submit_time_s", where, _SECONDS, findings=findings),
            "n_gpus": numbers(cells, "n_gpus", where, _GPUS, least=0, findings=findings).fillna(0),
            "n_cpus": 0.0,
            "duration_s": numbers(cells, "duration_s", where, _DURATION, findings=findings),
            "tenant": "",
            "status": "",
            ROW: cells[ROW],
        }
    )
    if "n_cpus" in cells:
        frame["n_cpus"] = numbers(cells, "n_cpus", where, _CPUS, least=0, findings=findings).fillna(0)
    for name in ("tenant", "status", "gpu"):
        if name in cells:
            frame[name] = cells[name].mask(is_missing(cells[name]), "")
    if "is_guaranteed" in cells:
        repair(frame, is_missing(cells["is_guaranteed"]), NO_PROMISE, findings)
        frame["is_guaranteed"] = flags(cells, "is_guaranteed", where)
    n_read = len(cells) if before is None else before.n_read
    return finish_requests(frame, findings, where, n_read, before=before)


def read_tiresias_jobs(path: str | Path) -> RequestTrace:
    """Read a job list of Tiresias: ``job_id, num_gpu, submit_time, duration`` [s] and ``model_name``."""
    findings = list[Finding]()
    cells = read_cells(path, _TIRESIAS, findings, optional=("model_name",))
    usual = {
        "num_gpu": "n_gpus",
        "submit_time": "submit_time_s",
        "duration": "duration_s",
        "model_name": "model",
    }
    return _named(cells, usual, str(path), findings)


def _without_duration(columns: list[str]) -> str:
    return "these lists state what a job trains and no time: add a column duration with its seconds"


def read_pollux_jobs(path: str | Path) -> RequestTrace:
    """Read a job list of Pollux or Sia: ``name, time, num_replicas, duration`` [s] and ``application``.

    The published lists have no column ``duration``, because their simulators look it up in tables of the
    applications; it must be added.
    """
    findings = list[Finding]()
    cells = read_cells(path, _POLLUX, findings, optional=("application",), hint=_without_duration)
    usual = {"name": "job_id", "time": "submit_time_s", "num_replicas": "n_gpus", "duration": "duration_s"}
    return _named(cells, usual | {"application": "model"}, str(path), findings)


def _named(
    cells: pd.DataFrame, usual: Mapping[str, str], where: str, findings: list[Finding]
) -> RequestTrace:
    """Read cells by the names of their own list, which messages have, into requests."""
    of = {ours: theirs for theirs, ours in usual.items()}
    frame = pd.DataFrame(
        {
            "job_id": names(cells, of.get("job_id", "job_id"), where),
            "submit_time_s": numbers(cells, of["submit_time_s"], where, _SECONDS, least=0, findings=findings),
            "n_gpus": numbers(cells, of["n_gpus"], where, _GPUS, least=0, findings=findings).fillna(0),
            "n_cpus": 0.0,
            "duration_s": numbers(cells, of["duration_s"], where, _DURATION, findings=findings),
            "tenant": "",
            "status": "",
            ROW: cells[ROW],
        }
    )
    if of["model"] in cells:
        frame["model"] = cells[of["model"]]
    return finish_requests(frame, findings, where, len(cells))


def read_gavel_jobs(
    path: str | Path, steps_per_s: Mapping[tuple[str, int], float] | None = None
) -> RequestTrace:
    """Read a trace of Gavel; names count from 0 as its simulator does.

    Parameters
    ----------
    path
        The trace.
    steps_per_s
        Throughput of each type of job on a number of GPUs [steps/s], see `read_gavel_throughputs`; traces
        state steps alone.
    """
    where, findings = str(path), list[Finding]()
    if steps_per_s is None:
        raise TraceError(
            f"{where}: traces of Gavel state steps, not durations; expected the table of throughputs that "
            "comes with them, simulation_throughputs.json, beside the list or as --tasks"
        )
    cells = _gavel_cells(read_raw(path, findings), where)
    counts = numbers(
        cells, "scale_factor", where, "GPUs, 1 or more", least=1, is_whole=True, findings=findings
    )
    steps = numbers(cells, "total_steps", where, "a number of steps, 0 or more", least=0, findings=findings)
    refuse(cells, counts.isna(), "scale_factor", "GPUs, 1 or more", where)
    pairs = list(zip(cells["job_type"], counts.astype("int64"), strict=True))
    unknown = pd.Series([pair not in steps_per_s for pair in pairs], index=cells.index)
    refuse(cells, unknown, "job_type", "a type with a throughput for as many GPUs", where)
    rates = np.array([steps_per_s[pair] for pair in pairs])
    frame = pd.DataFrame(
        {
            "job_id": (cells[ROW] - 1).astype("str"),
            "submit_time_s": numbers(cells, "arrival_time", where, _SECONDS, least=0, findings=findings),
            "n_gpus": counts,
            "n_cpus": 0.0,
            "duration_s": steps / rates,
            "tenant": "",
            "status": "",
            "model": cells["job_type"],
            ROW: cells[ROW],
        }
    )
    findings.append(Finding("repaired", STEPS))
    return finish_requests(frame, findings, where, len(cells))


def _gavel_cells(text: str, where: str) -> pd.DataFrame:
    """Name the cells by those around the name of the option for steps, the first that begins with a dash."""
    lines = [line for line in csv.reader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE) if line]
    first = [cell.strip() for cell in lines[0]]
    flag = next((at for at, cell in enumerate(first) if at > 1 and cell.startswith("-")), len(first))
    after = _AFTER_FLAG.get(len(first) - flag - 1)
    if after is None:
        found = f"{len(first)} cells in the first line"
        accepted = (
            "job type, command, working directory where there is one, option for steps, and 3 to 6 numbers"
        )
        raise TraceError(f"{where}: no trace of Gavel: {found}; accepted, separated by tabs: {accepted}")
    columns = ["job_type", *(f"command_{number}" for number in range(1, flag)), "num_steps_arg", *after]
    for row, line in enumerate(lines, 1):
        check_length(row, line, columns, where)
    stripped = [[cell.strip() for cell in line] for line in lines]
    cells = pd.DataFrame(stripped, columns=columns, dtype="str")
    return cells.assign(**{ROW: np.arange(1, len(lines) + 1)})


def read_gavel_throughputs(path: str | Path, gpu: str = "v100") -> dict[tuple[str, int], float]:
    """Read a table of throughputs of Gavel (JSON) [steps/s], by type of job and GPUs, for one type of GPU."""
    where = str(path)
    try:
        table: Any = json.loads(read_text(path, "throughputs of Gavel", TraceError))
        found = {ast.literal_eval(key): float(rates["null"]) for key, rates in table[gpu].items()}
        return {(str(name), int(count)): rate for (name, count), rate in found.items() if rate > 0}
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        SyntaxError,
        RecursionError,
        MemoryError,
    ) as error:
        accepted = f'an object {gpu} with "(\'type of job\', GPUs)": {{"null": steps per second}}'
        raise TraceError(
            f"{where}: no throughputs of Gavel for {gpu}: {type(error).__name__}; accepted: {accepted}"
        ) from None
