"""Many simulations, several at the same time."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from makespan.errors import MakespanError
from makespan.leftovers import end_with_parent
from makespan.sim import ClusterView, Event, EventKind
from makespan.studies._runs import Case, Run, repeated, resolved, run

__all__ = ["Attempt", "Progress", "RunError", "attempt_all", "run_all"]

_SHORT_JOBS = 2500  # jobs in all up to which starting processes takes longer than it saves
_POLL_S = 0.2
_CAN_COPY = sys.platform == "linux"
_FINISHED = EventKind.FINISHED.value

Shares = MutableSequence[float]


class RunError(MakespanError):
    """One of several simulations cannot be done; says which."""


Attempt = Run | RunError
Progress = Callable[[Sequence[float], Sequence[Attempt | None]], None]
"""Told now and then of the share of jobs that each simulation has finished, and of those that are over."""


def run_all(
    cases: Iterable[Case],
    n_processes: int | None = 1,
    *,
    progress: Progress | None = None,
    is_strict: bool = True,
    can_spawn: bool = False,
) -> list[Run]:
    """Run simulations, several at the same time, and validate every schedule; runs stay in order.

    Parameters
    ----------
    n_processes, progress
        Simulations at the same time, None to choose by processors and jobs; who is told how far they are.
    is_strict
        Whether an impossible schedule is an error, or left to the caller in `Run.violations`.
    can_spawn
        Whether the main module may be imported again, which is how processes start where they cannot be
        copies of this one. Without it everything runs in this process there.

    Raises
    ------
    UnknownNameError, PolicyError
        No policy has a name, or its file is broken; before anything runs.
    ImpossibleScheduleError
        A schedule breaks a rule of the validator.
    RunError
        A simulation cannot be done, or a process died.
    """
    found = _all(cases, n_processes, progress, keeps_going=False, can_spawn=can_spawn)
    done = [item for item in found if not isinstance(item, RunError)]  # the first one would have been raised
    if is_strict:
        for item in done:
            item.check()
    return done


def attempt_all(
    cases: Iterable[Case],
    n_processes: int | None = 1,
    *,
    progress: Progress | None = None,
    can_spawn: bool = False,
) -> list[Attempt]:
    """Run simulations as `run_all`, and go on where one cannot be done; its `RunError` takes its place.

    Impossible schedules are left to the caller, in `Run.violations`. Raises as `run_all` does before
    anything runs.
    """
    return _all(cases, n_processes, progress, keeps_going=True, can_spawn=can_spawn)


def _all(
    cases: Iterable[Case],
    n_processes: int | None,
    progress: Progress | None,
    *,
    keeps_going: bool,
    can_spawn: bool,
) -> list[Attempt]:
    """Run simulations; without ``keeps_going`` the first error is raised."""
    listed = list(cases)
    for case in listed:
        # Only to see whether it can be; where processes are no copies of this one, each loads its policies.
        resolved(case.policy)
    if n_processes is None:
        is_short = sum(len(case.scenario.jobs) for case in listed) <= _SHORT_JOBS
        n_processes = 1 if is_short else len(os.sched_getaffinity(0))
    n_processes = min(n_processes, len(listed))
    if n_processes < 2 or not (_CAN_COPY or can_spawn):
        return _in_turn(listed, progress, keeps_going)
    return _in_processes(listed, n_processes, progress, keeps_going)


@dataclass(slots=True)
class _Share:
    """An observer that notes the share of finished jobs."""

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


def _one(case: Case, number: int, shares: Shares | None, tell: Callable[[], None]) -> Run:
    observers = () if shares is None else (_Share(shares, number, len(case.scenario.jobs), tell),)
    try:
        done = run(case.scenario, case.policy, observers)
        done = repeated(case, done)
    except MakespanError as error:  # some carry what cannot be sent to another process
        raise _failure(case, str(error)) from None
    if case.keeps_tables:
        return done
    result = done.result
    bare = replace(result, events=result.events.iloc[:0], outcomes=result.outcomes.iloc[:0])
    return replace(done, result=bare)


def _failure(case: Case, problem: str) -> RunError:
    return RunError(f"policy {resolved(case.policy).name!r} on {case.scenario.name!r}: {problem}")


def _in_turn(cases: Sequence[Case], progress: Progress | None, keeps_going: bool) -> list[Attempt]:
    shares = [0.0] * len(cases)
    done: list[Attempt] = []

    def tell() -> None:
        if progress is not None:
            progress(shares, [*done, *([None] * (len(cases) - len(done)))])

    for number, case in enumerate(cases):
        try:
            done.append(_one(case, number, None if progress is None else shares, tell))
        except RunError as error:
            if not keeps_going:
                raise
            done.append(error)
        tell()
    return done


def _in_processes(
    cases: Sequence[Case], n_processes: int, progress: Progress | None, keeps_going: bool
) -> list[Attempt]:
    context = multiprocessing.get_context("fork" if _CAN_COPY else "spawn")
    shares: Any = None if progress is None else context.Array("d", len(cases), lock=False)
    began = {child.pid for child in multiprocessing.active_children()}
    pool = ProcessPoolExecutor(n_processes, context, _start_worker, (os.getpid(), cases, shares))
    done: list[Attempt | None] = [None] * len(cases)
    with _stopped_at_an_error(pool, began):
        with _interrupts_later():
            futures = {pool.submit(_work, number): number for number in range(len(cases))}
        waiting = set(futures)
        while waiting:
            ready, waiting = wait(waiting, _POLL_S)
            for future in sorted(ready, key=futures.__getitem__):
                number = futures[future]
                done[number] = _result(future, cases[number], keeps_going)
            if progress is not None:
                progress(shares, done)
        return [item for item in done if item is not None]


def _result(future: "Future[Run]", case: Case, keeps_going: bool) -> Attempt:
    try:
        return future.result()
    except BrokenProcessPool:
        killed = "a process of the simulations was killed, perhaps for want of memory; run fewer at a time"
        error = _failure(case, killed)
    except RunError as failed:
        error = failed
    if not keeps_going:
        raise error
    return error


@contextmanager
def _stopped_at_an_error(pool: ProcessPoolExecutor, others: set[int | None]) -> Iterator[None]:
    """Leave no process behind, and wait for none that still works when another has failed."""
    try:
        yield
    except BaseException:
        for child in multiprocessing.active_children():
            if child.pid not in others:
                child.terminate()
        # The thread of the pool ends with its processes; one that still ended when the interpreter does would
        # have its pipe closed under it.
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Raise an interrupt after the block only; processes that start in it never hear of one.

    An interrupt between the start of a process and the note of it would leave the process behind. The mask is
    for the new processes, which inherit it. For this one it does not suffice, because another thread
    may receive the signal.
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


_given: tuple[Sequence[Case], Shares | None] = ((), None)  # what a worker process works on


def _start_worker(parent: int, cases: Sequence[Case], shares: Shares | None) -> None:
    global _given
    end_with_parent(parent)
    _given = cases, shares


def _work(number: int) -> Run:
    cases, shares = _given
    return _one(cases[number], number, shares, lambda: None)
