"""Running a trace under a policy.

Job semantics follow the simulator released with Morphling, except that progress is conserved: a job runs
while, and only while, it holds devices.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from makespan.hardware import ClusterSpec
from makespan.sim._catalogue import Catalogue
from makespan.sim._engine import Engine
from makespan.sim._events import NodeEvent, Observer
from makespan.sim._inputs import check_jobs, check_times, ordered_failures, round_length
from makespan.sim._policy import Policy
from makespan.sim._recorder import events_table, outcomes_table
from makespan.workloads import JobSpec

__all__ = ["SimulationResult", "simulate"]


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What a simulation leaves behind.

    Parameters
    ----------
    events
        Table of schema `makespan.sim.EVENTS`.
    outcomes
        Table of schema `makespan.sim.OUTCOMES`, one row a job in the order of submission.
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
    restart_delay_s: float,
    interval_s: float | None = None,
    failures: Iterable[NodeEvent] = (),
    checkpoint_interval_s: float | None = None,
    extra_steps: int = 1,
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
        Time without progress after each start and each change [s]; length of a round [s], None for the
        policy's own choice, 0 to ask after each event.
    failures, checkpoint_interval_s
        Nodes that fail and join; running time between checkpoints [s]. A failure loses what was done
        since the last one, a reconfiguration nothing. None if a failure loses nothing either.
    extra_steps
        Steps that every job runs beyond those it asked for; the released simulator runs one.
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
    check_times(restart_delay_s, checkpoint_interval_s, extra_steps)
    fitting = catalogue.on(cluster)
    check_jobs(jobs, cluster, fitting)
    engine = Engine(
        cluster, fitting, policy, restart_delay_s, round_length(policy, interval_s), checkpoint_interval_s
    )
    engine.observers += observers
    engine.load(jobs, extra_steps, ordered_failures(failures, cluster))
    engine.run()
    finished = sorted(engine.finished, key=lambda entry: entry[0].index)
    events, outcomes = events_table(engine.rows), outcomes_table(finished, fitting)
    wall_s = time.perf_counter() - began
    return SimulationResult(events, outcomes, wall_s, engine.policy_wall_s, engine.n_decisions)
