"""Many simulations at once: what they share, what differs, and what each leaves behind."""

import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pandas as pd

from makespan.errors import MakespanError
from makespan.hardware import ClusterSpec
from makespan.metrics import Summary, summary
from makespan.policies import policy
from makespan.sim import Catalogue, SimulationResult, simulate, validate_schedule
from makespan.workloads import JobSpec

__all__ = ["Bench", "ImpossibleScheduleError", "Run", "Setting", "run_all", "run_one"]

_SHOWN = 3


class ImpossibleScheduleError(MakespanError):
    """The validator found that a schedule could not have happened."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What simulations share.

    Parameters
    ----------
    cluster
        The nodes.
    catalogue
        What may run, how fast, and what policies know of it.
    jobs
        Job lists by name.
    n_processes
        Simulations that run at the same time.
    """

    cluster: ClusterSpec
    catalogue: Catalogue
    jobs: Mapping[str, tuple[JobSpec, ...]]
    n_processes: int = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """One simulation.

    Parameters
    ----------
    trace
        Name of the job list.
    policy
        Name of the policy.
    restart_delay_s, interval_s
        Restart delay and length of a round [s]; 0 to ask the policy after each event.
    keeps_tables
        Whether events and outcomes are handed back.
    repeats
        How often the simulation is run again to see whether it gives the same schedule.
    """

    trace: str
    policy: str
    restart_delay_s: float
    interval_s: float
    keeps_tables: bool = False
    repeats: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """What one simulation left behind.

    Parameters
    ----------
    setting
        What was run.
    found
        Its metrics.
    wall_s, decision_wall_s
        Wall clock time of the simulation, and of the policy a decision [s].
    n_decisions
        How often the policy was asked.
    n_identical
        How many repetitions gave the same events.
    events, outcomes
        Its tables, empty unless the setting keeps them.
    """

    setting: Setting
    found: Summary
    wall_s: float
    decision_wall_s: float
    n_decisions: int
    n_identical: int
    events: pd.DataFrame
    outcomes: pd.DataFrame


def run_all(settings: Iterable[Setting], bench: Bench) -> list[Run]:
    """Run simulations, several at the same time, and validate every schedule.

    Parameters
    ----------
    settings
        What to run.
    bench
        What they share.

    Returns
    -------
    list of Run
        In the order of the settings, whatever the number of processes.

    Raises
    ------
    ImpossibleScheduleError
        A schedule breaks a rule of the validator.
    UnknownNameError
        No policy has a name; before anything runs.
    """
    listed = list(settings)
    for name in dict.fromkeys(setting.policy for setting in listed):
        policy(name)
    # Processes are copies of this one; elsewhere they would start anew and run the calling script again.
    if min(bench.n_processes, len(listed)) < 2 or sys.platform != "linux":
        return [run_one(setting, bench) for setting in listed]
    with _shared(bench):
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(bench.n_processes, mp_context=context) as pool:
            return list(pool.map(_run_shared, listed))


_BENCH: list[Bench] = []


@contextmanager
def _shared(bench: Bench) -> Iterator[None]:
    """Let processes inherit what all simulations share instead of sending it to each."""
    _BENCH.append(bench)
    try:
        yield
    finally:
        _BENCH.pop()


def _run_shared(setting: Setting) -> Run:
    return run_one(setting, _BENCH[-1])


def run_one(setting: Setting, bench: Bench) -> Run:
    """Run one simulation and validate its schedule.

    Raises
    ------
    ImpossibleScheduleError
        The schedule breaks a rule of the validator.
    """
    result = _simulate(setting, bench)
    _check(result, setting, bench)
    again = [_simulate(setting, bench).events for _ in range(setting.repeats)]
    keeps = setting.keeps_tables
    return Run(
        setting=setting,
        found=summary(result.events, result.outcomes, bench.cluster, restart_delay_s=setting.restart_delay_s),
        wall_s=result.wall_s,
        decision_wall_s=result.policy_wall_s / max(result.n_decisions, 1),
        n_decisions=result.n_decisions,
        n_identical=sum(events.equals(result.events) for events in again),
        events=result.events if keeps else result.events.iloc[:0],
        outcomes=result.outcomes if keeps else result.outcomes.iloc[:0],
    )


def _simulate(setting: Setting, bench: Bench) -> SimulationResult:
    return simulate(
        bench.jobs[setting.trace],
        bench.cluster,
        bench.catalogue,
        policy(setting.policy),
        restart_delay_s=setting.restart_delay_s,
        interval_s=setting.interval_s,
    )


def _check(result: SimulationResult, setting: Setting, bench: Bench) -> None:
    found = validate_schedule(
        result.events,
        bench.jobs[setting.trace],
        bench.cluster,
        bench.catalogue,
        setting.restart_delay_s,
        interval_s=setting.interval_s,
        keeps_guarantees=policy(setting.policy).honours_guarantees,
        outcomes=result.outcomes,
    )
    if found:
        shown: Sequence[str] = [f"{item.rule} at {item.time_s} s: {item.message}" for item in found[:_SHOWN]]
        raise ImpossibleScheduleError(
            f"policy {setting.policy!r} on {setting.trace!r} with delay {setting.restart_delay_s} s and "
            f"rounds of {setting.interval_s} s: {len(found)} violation(s): {'; '.join(shown)}"
        )
