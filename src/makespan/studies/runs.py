"""Validated simulations of scenarios, many at a time in a pool of processes, and their comparison."""

import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from makespan.arguments import typed
from makespan.cleanup import end_with_parent
from makespan.errors import InputError, MakespanError
from makespan.metrics import Goodput, Summary, job_goodput, summary
from makespan.notebook import Display, Displayed
from makespan.policies import policy as policy_named
from makespan.sim import (
    ClusterView,
    Event,
    EventKind,
    Observer,
    Policy,
    RestartDelays,
    Scenario,
    Schedule,
    Violation,
    check_policy,
    restart_cost,
    round_length,
    simulate,
)
from makespan.tables import COMPARISON
from makespan.units import DAY

_LOG = logging.getLogger(__name__)

# --- Runs ---

_SHOWN = 5  # violations named in an error


class ImpossibleScheduleError(MakespanError):
    """The validator found that a schedule could not have happened."""


@dataclass(frozen=True, slots=True)
class SimulationSpec:
    """One simulation of several.

    Parameters
    ----------
    scenario, policy
        Scenario, and policy: itself, or its name or file.
    keeps_tables, repeats
        Whether its tables are returned, and how often it is repeated to compare the schedules.
    repeat_within_s
        Total time of the simulations of the case after which none is repeated [s, wall clock].
    """

    scenario: Scenario
    policy: str | Path | Policy
    keeps_tables: bool = False
    repeats: int = 0
    repeat_within_s: float = math.inf


@dataclass(frozen=True, slots=True, repr=False)
class Run(Displayed):
    """Result of a simulation: metrics, tables and violations.

    Parameters
    ----------
    scenario, policy
        Names.
    restart_delay_s, interval_s
        Restart delay that policies assume, and length of a round [s]; None if asked after each event.
    given_interval_s
        Length of a round that the scenario gives [s]; None if it leaves that to the policy.
    metrics, result
        Its metrics; tables, empty if the case does not keep them, and wall clock times.
    violations, n_events
        Violations found by the validator; rows of the events table.
    goodput
        Device time by its use, if the scenario has failures or a recovery; else None.
    n_repeats, n_identical, repeat_walls_s
        Number of repeats, number of these with the same events, and wall clock times of each [s]: of the
        whole simulation, and of the policy.
    """

    scenario: str
    policy: str
    restart_delay_s: float
    interval_s: float | None
    given_interval_s: float | None
    metrics: Summary
    result: Schedule
    violations: tuple[Violation, ...]
    n_events: int
    goodput: Goodput | None = None
    n_repeats: int = 0
    n_identical: int = 0
    repeat_walls_s: tuple[tuple[float, float], ...] = ()

    @property
    def decision_wall_s(self) -> float:
        """Wall clock time of the policy per decision [s]."""
        return self.result.policy_wall_s / max(self.result.n_decisions, 1)

    def display(self) -> Display:
        """Return metrics, the verdict of the validator, and the schedule as a chart."""
        metrics = self.metrics
        row = {
            "average JCT [s]": metrics.avg_jct_s,
            "99th percentile [s]": metrics.p99_jct_s,
            "makespan [s]": metrics.makespan_s,
            "GPU allocation ratio": metrics.gpu_allocation_ratio,
            "starts and restarts per job": metrics.reconfigurations_per_job,
            "guarantees kept": metrics.sla_attainment,
            "jobs": metrics.n_jobs,
        }
        if self.goodput is not None:
            row |= {"goodput": self.goodput.ratio, "interruptions": self.goodput.n_interruptions}
        found = f"{len(self.violations)} violations" if self.violations else "no violation"
        verdict = f"{self.n_events} events replayed by the validator: {found}"
        chart = self.result._repr_html_() if len(self.result.events) else ""
        return Display(f"{self.policy} on {self.scenario}", [row], verdict, chart)

    def check(self) -> None:
        """Raise `ImpossibleScheduleError` with the setting and the first violations, if there are any."""
        if self.violations:
            raise ImpossibleScheduleError(
                f"policy {self.policy!r} on {self.scenario!r} with delay {self.restart_delay_s} s and rounds "
                f"of {self.interval_s or 0} s: {len(self.violations)} violation(s): "
                f"{'; '.join(violation_lines(self))}"
            )


def run(scenario: Scenario, policy: str | Path | Policy, observers: Sequence[Observer] = ()) -> Run:
    """Simulate a scenario under a policy, given itself, by name or by file, and validate the schedule.

    Observers receive every event.

    Raises
    ------
    MakespanError
        The policy is unknown, or the simulation cannot be done.
    """
    chosen = load_policy(policy)
    schedule = simulate(scenario, chosen, observers)
    fails = bool(scenario.failures) or scenario.recovery is not None
    end_s, last_s = scenario.failures_end_s, float(schedule.outcomes["finish_time_s"].max())
    if end_s is not None and last_s > end_s:
        _LOG.warning(
            "policy %r on %r: the last job ends after %.1f days, but failures were generated for %.1f days "
            "only; generate them for longer",
            chosen.name,
            scenario.name,
            last_s / DAY,
            end_s / DAY,
        )
    cost = restart_cost(scenario.restart_delay_s)
    first_s = cost.first_start_s if isinstance(cost, RestartDelays) else cost.expected_s
    return Run(
        scenario=scenario.name,
        policy=chosen.name,
        restart_delay_s=cost.expected_s,
        interval_s=round_length(chosen, scenario.interval_s),
        given_interval_s=scenario.interval_s,
        metrics=summary(
            schedule.events,
            schedule.outcomes,
            scenario.cluster,
            restart_delay_s=first_s,
            extra_steps=scenario.extra_steps,
        ),
        result=schedule,
        violations=tuple(schedule.violations(scenario, chosen)),
        n_events=len(schedule.events),
        goodput=Goodput.of(job_goodput(schedule.events, schedule.losses)) if fails else None,
    )


def load_policy(policy: str | Path | Policy) -> Policy:
    """Return a policy that may be given by name or file."""
    if isinstance(policy, str | Path):
        return policy_named(policy)
    check_policy(policy)
    return policy


def rerun(case: SimulationSpec, first: Run) -> Run:
    """Run a case again as often as it asks for, and add the results to its first run."""
    n_identical, walls_s = 0, list[tuple[float, float]]()
    while (
        len(walls_s) < case.repeats
        and first.result.wall_s + sum(wall_s for wall_s, _ in walls_s) < case.repeat_within_s
    ):
        again = simulate(case.scenario, load_policy(case.policy))
        n_identical += again.events.equals(first.result.events)
        walls_s.append((again.wall_s, again.policy_wall_s))
    return replace(first, n_repeats=len(walls_s), n_identical=n_identical, repeat_walls_s=tuple(walls_s))


def violation_lines(done: Run) -> list[str]:
    """Return the first violations of a run in words, one per line."""
    return [
        f"{item.rule} at {item.time_s:.1f} s, row {item.seq}, job {item.job_id or '-'}: {item.message}"
        for item in done.violations[:_SHOWN]
    ]


# --- Many runs at a time ---

_SHORT_JOBS = 2500  # total jobs up to which starting processes takes longer than it saves
_POLL_S = 0.2
_CAN_COPY = sys.platform == "linux"
_FINISHED = EventKind.FINISHED.value
Shares = MutableSequence[float]


class RunError(MakespanError):
    """One of several simulations failed; names it."""


Attempt = Run | RunError
Progress = Callable[[Sequence[float], Sequence[Attempt | None]], None]
"""Callback with the share of jobs that each simulation has finished, and with the finished simulations."""


@typed
def run_all(
    cases: Iterable[SimulationSpec],
    n_processes: int | None = 1,
    *,
    progress: Progress | None = None,
    is_strict: bool = True,
    can_spawn: bool = False,
) -> list[Run]:
    """Run simulations, several at a time, and validate every schedule; runs are in the order of cases.

    Parameters
    ----------
    n_processes, progress
        Number of simulations at a time, None to choose by processors and jobs; progress callback.
    is_strict
        Whether an impossible schedule is an error, or left to the caller in `Run.violations`.
    can_spawn
        Whether the main module may be imported again, as processes need where they cannot be forked. If
        not, everything runs in this process there.

    Raises
    ------
    UnknownNameError, PolicyError
        No policy has a name, or its file is broken; before anything runs.
    ImpossibleScheduleError
        A schedule breaks a rule of the validator.
    RunError
        A simulation failed, or a process died.
    """
    attempts = _all(cases, n_processes, progress, keeps_going=False, can_spawn=can_spawn)
    done = [item for item in attempts if not isinstance(item, RunError)]  # all: errors have been raised
    if is_strict:
        for item in done:
            item.check()
    return done


@typed
def attempt_all(
    cases: Iterable[SimulationSpec],
    n_processes: int | None = 1,
    *,
    progress: Progress | None = None,
    can_spawn: bool = False,
) -> list[Attempt]:
    """Run simulations as `run_all`, and continue if one fails; its `RunError` takes its place.

    Impossible schedules are left to the caller, in `Run.violations`. Raises as `run_all` does before
    anything runs.
    """
    return _all(cases, n_processes, progress, keeps_going=True, can_spawn=can_spawn)


def _all(
    cases: Iterable[SimulationSpec],
    n_processes: int | None,
    progress: Progress | None,
    *,
    keeps_going: bool,
    can_spawn: bool,
) -> list[Attempt]:
    """Run simulations; unless ``keeps_going``, the first error is raised."""
    listed = list(cases)
    if n_processes is not None and n_processes < 1:
        raise InputError(f"n_processes is {n_processes}; expected 1 or more, or None")
    for case in listed:
        load_policy(case.policy)  # only to raise early; processes that are no forks load their policies again
    if n_processes is None:
        is_short = sum(len(case.scenario.jobs) for case in listed) <= _SHORT_JOBS
        n_processes = 1 if is_short else len(os.sched_getaffinity(0))
    n_processes = min(n_processes, len(listed))
    if n_processes < 2 or not (_CAN_COPY or can_spawn):
        return _in_turn(listed, progress, keeps_going)
    return _in_processes(listed, n_processes, progress, keeps_going)


@dataclass(slots=True)
class _Share:
    """Observer of the share of finished jobs."""

    shares: Shares
    number: int
    n_jobs: int
    tell: Callable[[], None]
    n_done: int = 0

    def observe(self, event: Event, view: ClusterView) -> None:
        if event.kind == _FINISHED:
            self.n_done += 1
            self.shares[self.number] = self.n_done / self.n_jobs
            self.tell()


def _run_case(case: SimulationSpec, number: int, shares: Shares | None, tell: Callable[[], None]) -> Run:
    observers = () if shares is None else (_Share(shares, number, len(case.scenario.jobs), tell),)
    try:
        done = run(case.scenario, case.policy, observers)
        done = rerun(case, done)
    except MakespanError as error:  # as text, since some errors cannot be sent to another process
        raise _failure(case, str(error)) from None
    if case.keeps_tables:
        return done
    result = done.result
    tables = {name: getattr(result, name).iloc[:0] for name in ("events", "outcomes", "losses")}
    bare = replace(result, **tables)
    return replace(done, result=bare)


def _failure(case: SimulationSpec, problem: str) -> RunError:
    return RunError(f"policy {load_policy(case.policy).name!r} on {case.scenario.name!r}: {problem}")


def _in_turn(cases: Sequence[SimulationSpec], progress: Progress | None, keeps_going: bool) -> list[Attempt]:
    shares = [0.0] * len(cases)
    done: list[Attempt] = []

    def tell() -> None:
        if progress is not None:
            progress(shares, [*done, *([None] * (len(cases) - len(done)))])

    for number, case in enumerate(cases):
        try:
            done.append(_run_case(case, number, None if progress is None else shares, tell))
        except RunError as error:
            if not keeps_going:
                raise
            done.append(error)
        tell()
    return done


def _in_processes(
    cases: Sequence[SimulationSpec], n_processes: int, progress: Progress | None, keeps_going: bool
) -> list[Attempt]:
    context = multiprocessing.get_context("fork" if _CAN_COPY else "spawn")
    shares: Any = None if progress is None else context.Array("d", len(cases), lock=False)
    earlier = {child.pid for child in multiprocessing.active_children()}
    pool = ProcessPoolExecutor(n_processes, context, _start_worker, (os.getpid(), cases, shares))
    done: list[Attempt | None] = [None] * len(cases)
    with _stopped_at_an_error(pool, earlier):
        with _interrupts_later():
            futures = {pool.submit(_work, number): number for number in range(len(cases))}
        waiting = set(futures)
        while waiting:
            ready, waiting = wait(waiting, _POLL_S)
            for future in sorted(ready, key=futures.__getitem__):  # of failed ones the first case raises
                number = futures[future]
                try:
                    done[number] = future.result()
                    continue
                except BrokenProcessPool:
                    killed = "a process of the simulations was killed, perhaps because memory ran out"
                    error = _failure(cases[number], f"{killed}; use fewer processes")
                except RunError as failed:
                    error = failed
                if not keeps_going:
                    raise error
                done[number] = error
            if progress is not None:
                progress(shares, done)
        return [item for item in done if item is not None]


@contextmanager
def _stopped_at_an_error(pool: ProcessPoolExecutor, earlier: set[int | None]) -> Iterator[None]:
    """Leave no process behind, and do not wait for those that still work when another has failed."""
    try:
        yield
    except BaseException:
        for child in multiprocessing.active_children():
            if child.pid not in earlier:
                child.terminate()
        # The thread of the pool ends once its processes have. Without waiting for it, the end of the
        # interpreter would close its pipe while it still runs.
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Defer an interrupt to the end of the block; processes started in it ignore interrupts.

    An interrupt between the start of a process and its registration would leave the process behind. New
    processes inherit the signal mask. For this process the mask does not suffice, because another thread may
    receive the signal.
    """
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number)) if is_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_main:
            signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt


_given: tuple[Sequence[SimulationSpec], Shares | None] = ((), None)  # cases and shares of a worker process


def _start_worker(parent: int, cases: Sequence[SimulationSpec], shares: Shares | None) -> None:
    global _given
    end_with_parent(parent)
    _given = cases, shares


def _work(number: int) -> Run:
    cases, shares = _given
    return _run_case(cases[number], number, shares, lambda: None)


# --- Comparisons ---

_SETTING = ["trace", "restart_delay_s", "rounds"]
_FURTHER = (
    *("p95_jct_s", "avg_queueing_delay_s", "avg_waiting_time_s", "avg_slowdown"),
    *("avg_finish_time_fairness", "max_finish_time_fairness"),
)
_OF_GOODPUT = ("n_interruptions", "lost_gpu_s", "recovery_s")
_RATIOS = {"jct_ratio": "avg_jct_s", "makespan_ratio": "makespan_s"}
_MEASURES = (
    *("avg_jct_s", "makespan_s", "p50_jct_s", "p99_jct_s"),
    *("gpu_allocation_ratio", "reconfigurations_per_job"),
)


@typed
def comparison(runs: Iterable[Run], baseline: str) -> pd.DataFrame:
    """Return one row per simulation, with ratios to a baseline.

    The baseline is the policy of this name in the same scenario, restart delay and given round. Ratios are
    missing where it did not run; above 1, a policy takes longer. Returns schema
    `makespan.tables.COMPARISON`, then further metrics of `makespan.metrics.Summary`, and those of
    `makespan.metrics.Goodput` if a run has them.
    """
    listed = list(runs)
    rows: list[dict[str, Any]] = []
    for run in listed:
        row: dict[str, Any] = {
            "trace": run.scenario,
            "policy": run.policy,
            "restart_delay_s": float(run.restart_delay_s),
            "interval_s": float(run.interval_s) if run.interval_s else float("nan"),
            "jobs": run.metrics.n_jobs,
            "wall_s": float(run.result.wall_s),
            **dict.fromkeys(_RATIOS, float("nan")),
        }
        names = [name for name in (*COMPARISON.names, *_FURTHER) if name not in row]
        rows.append(row | {name: getattr(run.metrics, name) for name in names})
        if run.goodput is not None:
            rows[-1] |= {name: getattr(run.goodput, name) for name in _OF_GOODPUT}
            rows[-1]["goodput"] = run.goodput.ratio
    fails = any(run.goodput is not None for run in listed)
    columns = [*COMPARISON.names, *_FURTHER, *(("goodput", *_OF_GOODPUT) if fails else ())]
    table = pd.DataFrame(rows, columns=columns)
    rounds = [float("nan") if run.given_interval_s is None else run.given_interval_s for run in listed]
    settings = table[["trace", "restart_delay_s", *_RATIOS.values()]].assign(rounds=rounds)
    base = settings[table["policy"] == baseline].drop_duplicates(_SETTING)
    joined = settings[_SETTING].merge(base, on=_SETTING, how="left")
    for ratio, column in _RATIOS.items():
        table[ratio] = (table[column] / joined[column]).astype(float)
    return COMPARISON.validate(table, where="comparison")


def measures(run: Run) -> dict[str, float]:
    """Return the metrics that studies report of every simulation, by column."""
    return {name: getattr(run.metrics, name) for name in _MEASURES}


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of the jobs of a scenario for GPUs if each starts at its submission and runs as requested.

    Parameters
    ----------
    load
        Device time over that of the cluster between the first and the last submission [1]; NaN if all jobs
        are submitted at once.
    most_gpus
        Largest number of GPUs at a time.
    """

    load: float
    most_gpus: int


def demand(scenario: Scenario) -> Demand:
    """Return the demand of the jobs of a scenario."""
    jobs, fitting = scenario.jobs, scenario.catalogue.on(scenario.cluster)
    start_s = np.array([job.submit_time_s for job in jobs])
    gpus = np.array([job.n_gpus for job in jobs], dtype=np.int64)
    work_s = np.array([job.steps * fitting.requested(job).iter_time_s for job in jobs])
    span_s = float(np.ptp(start_s)) if len(jobs) else 0.0
    load = float(gpus @ work_s) / (scenario.cluster.n_gpus * span_s) if span_s > 0 else float("nan")
    times_s, changes = np.concatenate([start_s, start_s + work_s]), np.concatenate([gpus, -gpus])
    order = np.lexsort((changes, times_s))  # at the same time, devices are given back first
    return Demand(load, int(np.cumsum(changes[order]).max(initial=0)))


def nobody_waited(runs: Iterable[Run]) -> bool:
    """Return whether no job of any of these runs waited for longer than a round of its policy."""
    return all(run.metrics.max_waiting_time_s <= (run.interval_s or 0.0) for run in runs)
