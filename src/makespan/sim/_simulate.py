"""Running a trace under a policy.

Job semantics follow the simulator released with Morphling, except that progress is conserved: a job runs
while, and only while, it holds devices.
"""

import gc
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from makespan.errors import InputError
from makespan.hardware import ClusterSpec
from makespan.sim._catalogue import Catalogue
from makespan.sim._costs import RestartCost, restart_cost
from makespan.sim._engine import Engine
from makespan.sim._events import NodeEvent, Observer, ordered_node_events
from makespan.sim._policy import Policy, check_policy
from makespan.sim._view import JobView
from makespan.sim._watch import DECISION_LIMIT_S
from makespan.tables import EVENTS, OUTCOMES, TableSchema
from makespan.workloads import JobSpec

__all__ = ["SimulationResult", "check_jobs", "events_table", "outcomes_table", "round_length", "simulate"]

_DTYPES: dict[str, Any] = {"int": "int64", "float": "float64", "bool": bool}


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What a simulation leaves behind.

    Parameters
    ----------
    events, outcomes
        Tables of the schemas `EVENTS` and, a row a job in the order of submission, `OUTCOMES`.
    wall_s, policy_wall_s, n_decisions
        Wall time of it all and of the policy's share [s]; how often the policy was asked.
    known_starts
        Share of all starts and changes to something whose time the job knew before (`JobView.knows`) [1].
    """

    events: pd.DataFrame
    outcomes: pd.DataFrame
    wall_s: float
    policy_wall_s: float
    n_decisions: int
    known_starts: float


def simulate(
    jobs: Sequence[JobSpec],
    cluster: ClusterSpec,
    catalogue: Catalogue,
    policy: Policy,
    *,
    restart_delay_s: float | RestartCost,
    interval_s: float | None = None,
    failures: Iterable[NodeEvent] = (),
    checkpoint_interval_s: float | None = None,
    extra_steps: float = 1,
    observers: Sequence[Observer] = (),
    decision_limit_s: float | None = DECISION_LIMIT_S,
    reveals_requests: bool = False,
    shares_devices: bool = True,
) -> SimulationResult:
    """Run a trace under a policy; equal arguments give equal tables.

    Parameters
    ----------
    jobs, catalogue
        The trace, in which jobs of the same time queue in the order given; what they may run as.
    restart_delay_s, interval_s
        Cost of each start and each change [s], or a function of job, old and new allocation; length of a
        round [s], None for the policy's own choice, 0 to ask after each event.
    failures, checkpoint_interval_s
        Nodes that fail and join, and capacity that is withdrawn and returned; running time between
        checkpoints [s], as an interruption loses what was done since the last one, None if nothing.
    extra_steps, observers
        Work of every job beyond what it asked for, as in the released simulator; who is told of events.
    decision_limit_s
        Wall time after which one call of the policy is interrupted [s], None or 0 for no limit; nothing in
        the result depends on it.
    reveals_requests, shares_devices
        Whether users state with a job how long a step takes as requested; whether jobs may be guests.

    Raises
    ------
    InputError
        Before anything runs: a job, a node event or an option cannot be used.
    PolicyError
        The policy is none, raised, took too long or, an `InfeasibleDecision`, decided what cannot be done.
    StalledError
        The policy left jobs behind for ever.
    """
    began = time.perf_counter()
    check_policy(policy)
    _check_options(checkpoint_interval_s, extra_steps)
    fitting, cost = catalogue.on(cluster), restart_cost(restart_delay_s)
    check_jobs(jobs, cluster, fitting)
    flags = {"reveals_requests": reveals_requests, "shares_devices": shares_devices}
    limits = checkpoint_interval_s, decision_limit_s
    engine = Engine(cluster, fitting, policy, cost, round_length(policy, interval_s), *limits, **flags)
    engine.observers += observers
    engine.load(jobs, extra_steps, ordered_node_events(failures, cluster))
    _run_to_the_end(engine)
    finished = sorted(engine.finished, key=lambda entry: entry[0].index)
    tables = events_table(engine.rows), outcomes_table(finished, fitting)
    wall_s = time.perf_counter() - began
    return SimulationResult(*tables, wall_s, engine.policy_wall_s, engine.n_decisions, engine.known_starts)


def _run_to_the_end(engine: Engine) -> None:
    # What is there now stays: the collector need not look through it again and again.
    gc.freeze()
    try:
        engine.run()
    finally:
        gc.unfreeze()


def events_table(rows: Sequence[tuple[Any, ...]]) -> pd.DataFrame:
    """Return rows in the order of the fields of `Event` as a table of schema `EVENTS`."""
    return _table(rows, EVENTS)


def outcomes_table(jobs: Sequence[tuple[JobView, float]], catalogue: Catalogue) -> pd.DataFrame:
    """Return finished jobs with their finish times [s], in order, as a table of schema `OUTCOMES`."""
    references = [catalogue.requested(job.spec) for job, _ in jobs]
    rows = [
        (
            job.spec.job_id,
            job.spec.submit_time_s,
            job.spec.workload,
            job.spec.n_gpus,
            job.spec.plan,
            job.spec.steps,
            job.spec.is_guaranteed,
            job.spec.tenant,
            reference.iter_time_s,
            reference.plan,
            reference.cpu_threads,
            reference.provenance,
            job.first_start_s,
            finish_time_s,
            job.restart_count,
            job._held_gpu_s,
            job._waiting_s,
            job._running_s,
            job._restart_s,
        )
        for (job, finish_time_s), reference in zip(jobs, references, strict=True)
    ]
    return _table(rows, OUTCOMES)


def _table(rows: Sequence[tuple[Any, ...]], schema: TableSchema) -> pd.DataFrame:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema.columns)
    pairs = zip(schema.columns, columns, strict=True)
    return pd.DataFrame({column.name: _array(values, column.kind) for column, values in pairs}, copy=False)


def _array(values: Sequence[Any], kind: str) -> Any:
    # Through an array of numpy, which takes a third of the time of pandas' own conversion.
    if kind == "text":
        return pd.array(np.array(values, dtype=object), dtype="str")
    return np.array(values, dtype=_DTYPES[kind])


def check_jobs(
    jobs: Sequence[JobSpec], cluster: ClusterSpec, catalogue: Catalogue, where: str = "trace"
) -> None:
    """Check that every job can be run as requested on the empty cluster.

    Parameters
    ----------
    catalogue, where
        What fits on the cluster, see `Catalogue.on`; file or producer of the trace, for messages.

    Raises
    ------
    InputError
        A name occurs twice or a request cannot be met; names the row (the first is 1) and the job.
    UnknownNameError
        The catalogue lacks a workload.
    """
    rows: dict[str, int] = {}
    known: set[tuple[str, str, int, int]] = set()
    for row, job in enumerate(jobs, start=1):
        if job.job_id in rows:
            found = f"job name {job.job_id!r} is that of row {rows[job.job_id]}"
            raise InputError(f"{where}: row {row}: {found}; accepted: one row for each name")
        rows[job.job_id] = row
        key = (job.workload, job.plan, job.n_gpus, job.n_cpus)
        if key not in known:
            _check_request(f"{where}: row {row}, job {job.job_id!r}", job, cluster, catalogue)
            known.add(key)


def _check_request(where: str, job: JobSpec, cluster: ClusterSpec, catalogue: Catalogue) -> None:
    if job.n_gpus > cluster.n_gpus:
        raise InputError(
            f"{where}: asks for {job.n_gpus} GPUs; accepted: at most the {cluster.n_gpus} of cluster "
            f"{cluster.name!r}, or it would wait for ever"
        )
    threads = cluster.max_cpu_threads(job.n_gpus)
    if job.n_cpus > threads:
        raise InputError(
            f"{where}: asks for {job.n_cpus} CPU threads; accepted: at most the {threads} of the "
            f"{min(job.n_gpus, cluster.n_nodes)} node(s) of {cluster.name!r} that {job.n_gpus} GPU(s) can use"
        )
    try:
        catalogue.requested(job)
    except InputError as error:
        raise type(error)(f"{where}, on cluster {cluster.name!r}: {error}") from error


def _check_options(checkpoint_interval_s: float | None, extra_steps: float) -> None:
    if checkpoint_interval_s is not None and not checkpoint_interval_s > 0:
        raise InputError(f"checkpoint_interval_s is {checkpoint_interval_s!r}; accepted: positive, or None")
    if not (math.isfinite(extra_steps) and extra_steps >= 0):
        raise InputError(f"extra_steps is {extra_steps!r}; accepted: a finite number >= 0")


def round_length(policy: Policy, interval_s: float | None) -> float | None:
    """Return the length of a round [s], or None if the policy is asked after each event.

    ``interval_s`` is what the experiment wants: None for the policy's own choice, 0 for no rounds. An
    InputError says that it is negative or not finite.
    """
    length_s = policy.interval_s if interval_s is None else interval_s
    if length_s is not None and not (math.isfinite(length_s) and length_s >= 0):
        raise InputError(f"interval_s is {length_s!r}; accepted: a finite time in s, or 0 for no rounds")
    return length_s or None
