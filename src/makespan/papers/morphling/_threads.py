"""Where CPU threads bind: jobs that offload, with the threads of their request and with chosen ones."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd

from makespan.errors import InputError
from makespan.hardware import cluster as cluster_named
from makespan.papers.morphling._pairs import CHOSEN, REQUESTED
from makespan.papers.morphling._tables import THREADS
from makespan.studies import (
    Case,
    PredictionMode,
    Run,
    Scenario,
    generated_jobs,
    knowing,
    predicted_catalogue,
    predictions,
    run_all,
)
from makespan.throughput import EmulatedSource, ReferenceTimes
from makespan.traces import statistics
from makespan.workloads import JobSpec

__all__ = ["threads_study", "with_offload"]

_OFFLOADING = ("llama7", "zero-offload", (1, 2, 4, 8))
"""What offloading jobs train, with which plan, and on how many GPUs."""


def threads_study(
    source: EmulatedSource,
    workloads: Sequence[str],
    form: str,
    mode: PredictionMode,
    policies: Sequence[str],
    shares: Sequence[float],
    seeds: Sequence[int],
    n_jobs: int,
    delay_s: float,
    interval_s: float,
    n_processes: int = 1,
) -> pd.DataFrame:
    """Run every policy on mixes of jobs that offload and others, with the threads of a request and with all.

    Both know the same, and jobs request the same; schema `THREADS`.

    Raises
    ------
    InputError
        What jobs request is not among the numbers of CPU threads of the source.
    """
    asked = statistics().cpus_per_gpu
    if asked not in source.cpu_threads:
        raise InputError(
            f"CPU threads {source.cpu_threads}; accepted: {asked}, which jobs request, among them"
        )
    spec = cluster_named(source.cluster.name)
    tables = {key: source.load(key) for key in workloads}
    known = predictions(tables, spec.name, form)
    as_asked = {key: table[table["cpu_threads"] == asked] for key, table in tables.items()}
    times = ReferenceTimes({key: table.reset_index(drop=True) for key, table in as_asked.items()})
    catalogues = {
        choice: predicted_catalogue(given, known, spec.nodes[0])
        for choice, given in ((REQUESTED, times.tables), (CHOSEN, tables))
    }
    keys = list(product(shares, seeds, policies, catalogues))
    lists = {seed: generated_jobs("base", n_jobs, seed, times, max_gpus=spec.n_gpus).jobs for seed in seeds}
    cases = []
    for share, seed, policy, choice in keys:
        name, jobs = f"offload {share:g}, seed {seed}, threads {choice}", lists[seed]
        mix = with_offload(jobs, share, seed, times, asked)
        given = name, mix, spec, catalogues[choice], delay_s, interval_s
        scenario = knowing(Scenario(*given, source=source.name), mode)
        cases.append(Case(scenario, policy, keeps_tables=True))
    runs = zip(keys, run_all(cases, n_processes), strict=True)
    rows = pd.DataFrame(
        {
            "policy": policy,
            "offload_share": share,
            "seed": seed,
            "threads": choice,
            "avg_jct_s": run.metrics.avg_jct_s,
            "makespan_s": run.metrics.makespan_s,
            "threads_per_gpu": _threads_per_gpu(run),
        }
        for (share, seed, policy, choice), run in runs
    )
    return THREADS.validate(rows, where="threads")


def with_offload(
    jobs: Iterable[JobSpec], share: float, seed: int, times: ReferenceTimes, cpus_per_gpu: int
) -> tuple[JobSpec, ...]:
    """Let a share of the jobs, drawn at random, train a large model offloaded on few GPUs instead.

    They keep submission and GPU time, so that the load stays.
    """
    listed = list(jobs)
    key, plan, sizes = _OFFLOADING
    chosen = np.random.default_rng([seed, len(listed)]).permutation(len(listed))[: round(share * len(listed))]
    for position, number in enumerate(chosen.tolist()):
        job, n_gpus = listed[number], sizes[position % len(sizes)]
        if job.duration_s is None:
            raise InputError(f"job {job.job_id!r}: no nominal duration; accepted: jobs that state one")
        duration_s = job.duration_s * job.n_gpus / n_gpus
        listed[number] = replace(
            job,
            workload=key,
            plan=plan,
            n_gpus=n_gpus,
            n_cpus=cpus_per_gpu * n_gpus,
            duration_s=duration_s,
            steps=times.steps(key, n_gpus, plan, duration_s),
        )
    return tuple(listed)


def _threads_per_gpu(run: Run) -> float:
    """CPU threads that jobs held for each of their GPUs, over the time that they held them."""
    events = run.result.events
    rows = events[events["job_id"] != ""].sort_values(["job_id", "seq"])
    until_s = rows.groupby("job_id")["time_s"].shift(-1)
    held_gpu_s = rows["n_gpus"] * (until_s - rows["time_s"]).fillna(0.0)
    return float((held_gpu_s * rows["cpu_threads"]).sum() / held_gpu_s.sum())
