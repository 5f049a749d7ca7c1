"""Running a trace under a policy.

Job semantics follow the simulator released with Morphling, except that progress is conserved: a job runs
while, and only while, it holds devices.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from makespan.hardware import ClusterSpec
from makespan.sim._catalogue import Catalogue
from makespan.sim._costs import RestartCost, restart_cost
from makespan.sim._engine import Engine
from makespan.sim._events import Event, NodeEvent, Observer, ordered_node_events
from makespan.sim._inputs import check_jobs, check_options, round_length
from makespan.sim._policy import Policy
from makespan.sim._view import ClusterView, JobView
from makespan.tables import EVENTS, OUTCOMES, TableSchema
from makespan.workloads import JobSpec

__all__ = ["Recorder", "SimulationResult", "events_table", "outcomes_table", "simulate"]

_DTYPES: dict[str, Any] = {"text": "str", "int": "int64", "float": "float64", "bool": bool}


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What a simulation leaves behind.

    Parameters
    ----------
    events
        Table of schema `makespan.tables.EVENTS`.
    outcomes
        Table of schema `makespan.tables.OUTCOMES`, one row a job in the order of submission.
    wall_s
        Wall clock time of the whole simulation [s].
    policy_wall_s
        Share of it spent in the policy [s].
    n_decisions
        How often the policy was asked.
    """

    events: pd.DataFrame
    outcomes: pd.DataFrame
    wall_s: float
    policy_wall_s: float
    n_decisions: int


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
) -> SimulationResult:
    """Run a trace under a policy; equal arguments give equal tables.

    Parameters
    ----------
    jobs
        The trace, in any order; jobs submitted at the same time queue in the order given.
    cluster
        The nodes.
    catalogue
        What jobs may run as, and how fast.
    policy
        Who decides.
    restart_delay_s, interval_s
        Time without progress after each start and each change [s], or a function of job, old and new
        allocation; length of a round [s], None for the policy's own choice, 0 to ask after each event.
    failures, checkpoint_interval_s
        Nodes that fail and join, and capacity that is withdrawn and returned; running time between
        checkpoints [s]. An interruption loses what was done since the last one, a reconfiguration
        nothing. None if an interruption loses nothing either.
    extra_steps
        Work of every job beyond what it asked for; the released simulator runs one step more.
    observers
        Who is told of every event.

    Raises
    ------
    InputError
        Before anything runs: a job, a node event or an option cannot be used.
    InfeasibleDecision
        The policy decided what cannot be done.
    StalledError
        The policy left jobs behind for ever.
    """
    began = time.perf_counter()
    check_options(checkpoint_interval_s, extra_steps)
    fitting, cost = catalogue.on(cluster), restart_cost(restart_delay_s)
    check_jobs(jobs, cluster, fitting)
    rounds_s = round_length(policy, interval_s)
    engine = Engine(cluster, fitting, policy, cost, rounds_s, checkpoint_interval_s)
    engine.observers += observers
    engine.load(jobs, extra_steps, ordered_node_events(failures, cluster))
    engine.run()
    finished = sorted(engine.finished, key=lambda entry: entry[0].index)
    events, outcomes = events_table(engine.rows), outcomes_table(finished, fitting)
    wall_s = time.perf_counter() - began
    return SimulationResult(events, outcomes, wall_s, engine.policy_wall_s, engine.n_decisions)


class Recorder:
    """An observer that keeps every event; the engine keeps its own record, this one is for others.

    Attributes
    ----------
    events
        What happened so far, in order.
    """

    __slots__ = ("events",)

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, event: Event, view: ClusterView) -> None:
        """Keep the event."""
        self.events.append(event)

    def table(self) -> pd.DataFrame:
        """Return the events as a table of schema `EVENTS`."""
        return events_table(self.events)


def events_table(rows: Sequence[tuple[Any, ...]]) -> pd.DataFrame:
    """Return rows in the order of the fields of `Event` as a table of schema `EVENTS`."""
    return _table(rows, EVENTS)


def outcomes_table(jobs: Sequence[tuple[JobView, float]], catalogue: Catalogue) -> pd.DataFrame:
    """Return one row a job, in the order of submission, as a table of schema `OUTCOMES`.

    Parameters
    ----------
    jobs
        Finished jobs with their finish times [s].
    catalogue
        Where the references of the jobs are.
    """
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
            catalogue.requested(job.spec).iter_time_s,
            job.first_start_s,
            finish_time_s,
            job.restart_count,
            job._held_gpu_s,
            job._waiting_s,
            job._running_s,
            job._restart_s,
        )
        for job, finish_time_s in jobs
    ]
    return _table(rows, OUTCOMES)


def _table(rows: Sequence[tuple[Any, ...]], schema: TableSchema) -> pd.DataFrame:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema.columns)
    return pd.DataFrame(
        {
            column.name: pd.Series(list(values), dtype=_DTYPES[column.kind])
            for column, values in zip(schema.columns, columns, strict=True)
        }
    )
