"""Job lists of the cluster experiments, generated or those of the authors, and what policies know of them."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import pandas as pd

from makespan.errors import MissingDataError, TraceError
from makespan.papers.experiment import SOURCES, Experiment, Given, one_per
from makespan.settings import option, shared
from makespan.studies import generated_jobs, predictions
from makespan.throughput import Dataset, ReferenceTimes, find_dataset, read_register, verify
from makespan.traces import (
    VARIANTS,
    jobs_table,
    read_morphling_jobs,
    subsampled,
    with_perturbed_arrivals,
)
from makespan.workloads import JobSpec

_LOG = logging.getLogger(__name__)
NAIVE = "naive"
"""The short job list for getting started."""
JOB_LISTS = (NAIVE, *VARIANTS)
_DATASETS = {NAIVE: "naive", **{name: f"workload-{name}" for name in VARIANTS}}
_of_lists = partial(option, source="a choice", changes="table4")
_of_naive = partial(option, changes="getting_started")


class _WritesLists(Experiment):
    """Experiment that writes all job lists; only workloads of the simulation are requested."""

    tables = {"workloads/<list>": "job lists: naive, base, bp (best plans), mt (multi-tenant)"}
    on_the_way = frozenset({"workloads"})
    minutes = 5

    workloads: tuple[str, ...] = shared("morphling.simulation.workloads")

    def tables_of(self, source: str, profiled: Sequence[str]) -> Mapping[str, str]:
        """Return a table per list."""
        return one_per("<list>", JOB_LISTS, super().tables_of(source, profiled))

    def policies_run(self) -> Sequence[str]:
        """Return that no policy runs."""
        return ()


class JobLists(_WritesLists):
    """Generated job lists; the published source has the authors' own."""

    name = "generate_workloads"
    sources = ("emulated", "measured")
    is_timed = True

    jobs: int = option("jobs of each list", 406, source="Morphling, section 7.3: 406", changes="table4", ge=2)
    seed: int = _of_lists("seed of models, durations and arrivals", 1, ge=0)
    naive_jobs: int = _of_naive("jobs of the short list", 10, source="artifact, naive list: 10", ge=2)
    naive_span_s: float = _of_naive(
        "time from the first to the last submission of the short list",
        5400.0,
        unit="s",
        source="artifact, naive list: 5586 s",
        gt=0,
    )

    def timed_workloads(self, source: str, profiled: Sequence[str]) -> Sequence[str]:
        """Return the workloads that may be requested."""
        return self.workloads

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a table of jobs per list; the short one has jobs and a span of its own."""
        times = ReferenceTimes(given.times)
        lists = {NAIVE: generated_jobs(NAIVE, self.naive_jobs, self.seed, times, span_s=self.naive_span_s)}
        lists |= {name: generated_jobs(name, self.jobs, self.seed, times) for name in VARIANTS}
        return {f"workloads/{name}": jobs_table(trace.jobs) for name, trace in lists.items()}


class ImportedLists(_WritesLists):
    """Job lists of the authors, checked and converted."""

    name = "import_workloads"
    sources = ("published",)
    reads_files = True
    is_local = True

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a table of jobs per list; errors are those of `published_workloads`."""
        if given.published is None:
            raise MissingDataError("no directory with the job lists of the authors")
        directory, register = given.published
        found = published_workloads(directory, read_register(register), self.workloads)
        return {f"workloads/{name}": table for name, table in found.items()}


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
    entries, lists = tuple(register), {}
    for name, stem in _DATASETS.items():
        dataset = find_dataset(entries, f"morphling-workloads-{stem}")
        jobs = read_morphling_jobs(verify(dataset, directory)).jobs
        kept = [job for job in jobs if job.workload in workloads]
        if not kept:
            raise TraceError(f"{dataset.path}: no job trains {', '.join(sorted(workloads))}")
        if len(kept) < len(jobs):
            n_others = len(jobs) - len(kept)
            _LOG.warning("%s: %d of %d jobs train other workloads", dataset.path, n_others, len(jobs))
        lists[name] = jobs_table(kept)
    return lists


class Predictions(Experiment):
    """Iteration times that policies decide by, and which of them are known."""

    name = "predictions"
    tables = {"predictions": "iteration times that policies decide by"}
    sources = SOURCES
    is_timed = True
    on_the_way = frozenset({"predictions"})

    workloads: tuple[str, ...] = shared("morphling.simulation.workloads")
    cluster: str = shared("cluster")
    form: str = shared("performance_model.experiment_form")

    def timed_workloads(self, source: str, profiled: Sequence[str]) -> Sequence[str]:
        """Return the workloads that jobs train."""
        return self.workloads

    def policies_run(self) -> Sequence[str]:
        """Return that no policy runs."""
        return ()

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per row of the throughput tables that can run."""
        return {"predictions": predictions(given.times, self.cluster, self.form)}


# --- lists like those above, for studies on many ------------------------------------------------

Jobs = tuple[JobSpec, ...]
Draw = Literal["shifted", "subsampled", "generated"]
List = tuple[str, Draw, int]
"""Trace, how the list was drawn, seed."""


def drawn_lists(
    traces: Mapping[str, Jobs],
    times: ReferenceTimes,
    seeds: Mapping[Draw, Sequence[int]],
    is_generated: bool,
    std_s: float,
    share: float = 1.0,
) -> dict[List, Jobs]:
    """Draw job lists like those of the traces, by seed.

    Those of the authors are shifted in time or subsampled; of a trace that is generated itself as many jobs
    are generated again.
    """

    def draw(trace: str, how: Draw, seed: int) -> Jobs:
        jobs = traces[trace]
        if how == "shifted":
            return with_perturbed_arrivals(jobs, std_s, seed)
        if how == "subsampled":
            return subsampled(jobs, share, seed)
        return generated_jobs(trace, len(jobs), seed, times).jobs

    ways = [how for how in seeds if (how == "generated") == is_generated]
    keys = [(trace, how, seed) for trace in traces for how in ways for seed in seeds[how]]
    return {key: draw(*key) for key in keys}
