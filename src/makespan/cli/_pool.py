"""Several simulations at once, and how far each of them is."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, MutableSequence, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from makespan.cli._progress import Progress
from makespan.cli._runs import Run, run
from makespan.cli._setup import Scenario
from makespan.errors import MakespanError
from makespan.sim import ClusterView, Event, EventKind

__all__ = ["run_all"]

_SHORT_JOBS = 2500  # jobs in all up to which starting processes takes longer than it saves
_POLL_S = 0.2
_FINISHED = EventKind.FINISHED.value

Shares = MutableSequence[float]
_worker: dict[str, Any] = {}  # what a worker process was given when it started


class _Share:
    """An observer that notes the share of finished jobs."""

    def __init__(self, shares: Shares, number: int, n_jobs: int) -> None:
        self._shares, self._number, self._n_jobs = shares, number, n_jobs
        self._n_done = 0

    def observe(self, event: Event, view: ClusterView) -> None:
        if event.kind == _FINISHED:
            self._n_done += 1
            self._shares[self._number] = self._n_done / self._n_jobs


def run_all(
    scenario: Scenario,
    names: Sequence[str],
    restart_delay_s: float,
    interval_s: float | None,
    workers: int | None,
    quiet: bool,
) -> list[Run]:
    """Run a scenario under several policies, in processes if that is worth it.

    Parameters
    ----------
    scenario
        Jobs, cluster and catalogue.
    names
        The policies.
    restart_delay_s, interval_s
        As for `makespan.cli._runs.run`.
    workers
        Processes; None to choose.
    quiet
        Show no progress.

    Returns
    -------
    list of Run
        In the order of the names, whoever is ready first.

    Raises
    ------
    MakespanError
        A simulation cannot be done, or a process died.
    """
    if workers is None:
        is_short = len(names) * len(scenario.jobs) <= _SHORT_JOBS
        workers = 1 if is_short else min(len(os.sched_getaffinity(0)), len(names))
    progress = Progress(names, quiet)
    try:
        if workers == 1:
            return _in_turn(scenario, names, restart_delay_s, interval_s, progress)
        return _in_processes(scenario, names, restart_delay_s, interval_s, workers, progress)
    finally:
        progress.close()


def _in_turn(
    scenario: Scenario, names: Sequence[str], delay_s: float, interval_s: float | None, progress: Progress
) -> list[Run]:
    done: list[Run] = []
    for number, name in enumerate(names):
        share = _Share(progress.shares, number, len(scenario.jobs))
        done.append(run(scenario, name, delay_s, interval_s, [share, progress]))
        progress.finish(number, done[-1].metrics.avg_jct_s)
    return done


def _in_processes(
    scenario: Scenario,
    names: Sequence[str],
    delay_s: float,
    interval_s: float | None,
    workers: int,
    progress: Progress,
) -> list[Run]:
    context = multiprocessing.get_context("spawn")
    shares: Any = context.Array("d", len(names), lock=False)
    progress.shares = shares
    began = {child.pid for child in multiprocessing.active_children()}
    pool = ProcessPoolExecutor(workers, context, _start_worker, (scenario, shares, delay_s, interval_s))
    progress.draw()
    with _stopped_at_an_error(pool, began):
        with _interrupts_later():
            futures = {pool.submit(_work, number, name): number for number, name in enumerate(names)}
        waiting = set(futures)
        while waiting:
            ready, waiting = wait(waiting, _POLL_S)
            for future in ready:
                progress.finish(futures[future], _result(future).metrics.avg_jct_s)
            progress.draw()
        return [_result(future) for future in futures]


def _result(future: "Future[Run]") -> Run:
    try:
        return future.result()
    except BrokenProcessPool:
        raise MakespanError(
            "a process of the comparison was killed, perhaps for want of memory; try --workers 1"
        ) from None


@contextmanager
def _stopped_at_an_error(pool: ProcessPoolExecutor, others: set[int | None]) -> Iterator[None]:
    """Leave no process behind, and wait for none that still works when another has failed."""
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            if child.pid not in others:
                child.terminate()
        raise
    pool.shutdown()


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Raise an interrupt after the block only; processes that start in it never hear of one.

    An interrupt between the start of a process and the note of it would leave the process behind. The mask is
    for the new processes, which inherit it. For this one it does not suffice, because another thread
    may receive the signal.

    Raises
    ------
    KeyboardInterrupt
        One came during the block.
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


def _start_worker(scenario: Scenario, shares: Shares, delay_s: float, interval_s: float | None) -> None:
    _worker.update(scenario=scenario, shares=shares, delay_s=delay_s, interval_s=interval_s)


def _work(number: int, name: str) -> Run:
    scenario: Scenario = _worker["scenario"]
    share = _Share(_worker["shares"], number, len(scenario.jobs))
    try:
        return run(scenario, name, _worker["delay_s"], _worker["interval_s"], [share])
    except MakespanError as error:  # some carry what cannot be sent
        raise MakespanError(str(error)) from None
