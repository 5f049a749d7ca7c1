"""The jobs of a scenario that are read: a trace of any known format, and where the authors' lists lie."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd

from makespan.errors import InputError, unknown_name
from makespan.throughput import find_dataset, shipped_register, verify
from makespan.traces import (
    Finding,
    JobTrace,
    RequestTrace,
    read_easyscale_jobs,
    read_gavel_jobs,
    read_gavel_throughputs,
    read_helios_jobs,
    read_jobs,
    read_morphling_jobs,
    read_openb_pods,
    read_pai_jobs,
    read_philly_jobs,
    read_pollux_jobs,
    read_requests,
    read_spot_jobs,
    read_tiresias_jobs,
    request_trace,
)

__all__ = ["FORMATS", "published_list", "read_trace", "refuse_unused"]

FORMATS = (
    "auto", "morphling", "requests", "philly", "helios", "pai", "openb", "spot", "tiresias", "pollux",
    "gavel", "easyscale",
)  # fmt: skip
"""Formats of traces; jobs of those after the second name no workload known here."""

_PAI_TASKS, _GAVEL_THROUGHPUTS = "pai_task_table.csv", "simulation_throughputs.json"
_WITH_SECOND_FILE = ("pai", "gavel")
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_NAMING = {"auto": read_jobs, "morphling": read_morphling_jobs}  # lists that name what jobs train
_READERS: Mapping[str, Callable[[Path], JobTrace | RequestTrace]] = {
    "philly": read_philly_jobs,
    "helios": read_helios_jobs,
    "openb": read_openb_pods,
    "requests": read_requests,
    "spot": read_spot_jobs,
    "tiresias": read_tiresias_jobs,
    "pollux": read_pollux_jobs,
}


def read_trace(
    path: str | Path,
    file_format: str = "auto",
    *,
    tasks: Path | None = None,
    epoch_time_s: float | None = None,
    batch_of: Callable[[str], int | None] | None = None,
) -> JobTrace | RequestTrace:
    """Read a trace.

    Parameters
    ----------
    path
        The job list.
    file_format
        ``auto`` (the table ``jobs`` or a list of the Morphling artifact), ``morphling``, ``requests`` (the
        table of that name), ``philly``, ``helios``, ``pai``, ``openb``, ``spot`` (Alibaba 2026),
        ``tiresias``, ``pollux`` (also Sia), ``gavel`` or ``easyscale``.
    tasks
        Second file of formats that have one, beside the first unless given, packed or not: the task table of
        pai, the table of throughputs of gavel.
    epoch_time_s
        Format easyscale: how long an epoch takes with all logical workers [s]; its lists give epochs only.

    batch_of
        Formats auto and morphling: global batch of workloads with measurements of their own, see
        `makespan.traces.read_jobs`.

    Returns
    -------
    JobTrace or RequestTrace
        Jobs that are ready to run, or, from formats after the second, requests that name no workload known
        here (`makespan.traces.map_requests` chooses). Both have a report of what was dropped and repaired.

    Raises
    ------
    MakespanError
        The format is unknown, a file is missing or broken, or something that the format needs is not given.
    """
    place = Path(path)
    if file_format in FORMATS:
        refuse_unused(f"{path}: format {file_format!r}", file_format, tasks, epoch_time_s)
    if file_format in _NAMING:
        return _NAMING[file_format](place, batch_of)
    if file_format in _READERS:
        return _READERS[file_format](place)
    if file_format == "pai":
        return read_pai_jobs(place, tasks or _beside(place, _PAI_TASKS))
    if file_format == "gavel":
        rates = tasks or _beside(place, _GAVEL_THROUGHPUTS)
        is_there = tasks is not None or rates.is_file()
        return read_gavel_jobs(place, read_gavel_throughputs(rates) if is_there else None)
    if file_format != "easyscale":
        raise unknown_name("format of a trace", file_format, FORMATS)
    if epoch_time_s is None:
        raise InputError(
            f"{path}: lists of this format state epochs, not durations; accepted: --epoch-time "
            "(epoch_time_s) with the seconds of an epoch"
        )
    return _easyscale(place, epoch_time_s)


def refuse_unused(what: str, file_format: str, tasks: Path | None, epoch_time_s: float | None) -> None:
    """Raise `InputError` for an argument of `read_trace` that has no effect; ``what`` is read, in words."""
    if tasks is not None and file_format not in _WITH_SECOND_FILE:
        accepted = "leave tasks out (--tasks), or choose format pai or gavel"
        raise InputError(f"{what} has no second file, got tasks '{tasks}'; {accepted}")
    if epoch_time_s is not None and file_format != "easyscale":
        accepted = "leave epoch_time_s out (--epoch-time), or choose format easyscale"
        raise InputError(f"{what} states no epochs, got epoch_time_s {epoch_time_s}; {accepted}")


def _beside(path: Path, name: str) -> Path:
    """Return the second file of a trace, packed or not; the plain name if there is none."""
    stem = name.partition(".")[0]
    names = (name, stem, *(f"{packed}{end}" for packed in (name, stem) for end in _PACKED))
    found = (path.with_name(text) for text in names)
    return next((place for place in found if place.is_file()), path.with_name(name))


def _easyscale(path: Path, epoch_time_s: float) -> RequestTrace:
    table, report = read_easyscale_jobs(path)
    requests = pd.DataFrame(
        {
            "job_id": table["job_id"],
            "submit_time_s": table["submit_time_s"],
            "n_gpus": table["max_parallelism"],
            "duration_s": table["epochs"] * epoch_time_s,
            "tenant": table["home_gpu"],
        }
    )
    reason = "what a row trains, its batch size and where it may run have no effect: models are drawn"
    told = replace(report, findings=(*report.findings, Finding("ignored", reason)))
    return request_trace(requests, str(path), before=told)


def published_list(directory: Path, name: str) -> Path:
    """Return where a directory with published files has a job list; refuses one that was changed."""
    stem = name if name == "naive" else f"workload-{name}"
    return verify(find_dataset(shipped_register(), f"morphling-workloads-{stem}"), directory)
