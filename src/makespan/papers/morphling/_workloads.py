"""The job lists of the cluster experiments: generated, or those of the authors."""

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pandas as pd

from makespan.errors import TraceError
from makespan.studies import generated_jobs
from makespan.throughput import Dataset, ReferenceTimes, find_dataset, verify
from makespan.traces import VARIANTS, jobs_table, read_morphling_jobs

__all__ = ["NAIVE", "generated_workloads", "published_workloads"]

_LOG = logging.getLogger(__name__)

NAIVE = "naive"
"""The short job list for getting started."""

_DATASETS = {NAIVE: "naive", **{name: f"workload-{name}" for name in VARIANTS}}


def generated_workloads(
    tables: Mapping[str, pd.DataFrame], seed: int, n_jobs: int, naive_jobs: int, naive_span_s: float
) -> dict[str, pd.DataFrame]:
    """Generate all job lists; schema `makespan.tables.JOBS`, by name.

    Only workloads of the throughput tables (schema `makespan.tables.THROUGHPUT`, by workload) are requested.
    The short list has jobs and a span of its own, the time from its first to its last submission [s].
    """
    times = ReferenceTimes(tables)
    lists = {NAIVE: generated_jobs(NAIVE, naive_jobs, seed, times, span_s=naive_span_s)}
    lists |= {name: generated_jobs(name, n_jobs, seed, times) for name in VARIANTS}
    return {name: jobs_table(trace.jobs) for name, trace in lists.items()}


def published_workloads(
    directory: str | Path, register: Iterable[Dataset], workloads: Collection[str]
) -> dict[str, pd.DataFrame]:
    """Read the authors' job lists; schema `makespan.tables.JOBS`, by name.

    Parameters
    ----------
    directory, register
        A directory with the published files, and their checksums.
    workloads
        Jobs that train anything else are left out; how many is logged.

    Raises
    ------
    MissingDataError, ChecksumError
        A file is not there or not the registered one.
    TraceError
        No job is left.
    """
    entries = tuple(register)
    return {
        name: _published_list(find_dataset(entries, f"morphling-workloads-{stem}"), directory, workloads)
        for name, stem in _DATASETS.items()
    }


def _published_list(dataset: Dataset, directory: str | Path, workloads: Collection[str]) -> pd.DataFrame:
    jobs = read_morphling_jobs(verify(dataset, directory)).jobs
    kept = [job for job in jobs if job.workload in workloads]
    if not kept:
        raise TraceError(f"{dataset.path}: no job trains {', '.join(sorted(workloads))}")
    if len(kept) < len(jobs):
        others = len(jobs) - len(kept)
        _LOG.warning("%s: %d of %d jobs train other workloads", dataset.path, others, len(jobs))
    return jobs_table(kept)
