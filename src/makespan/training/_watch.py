"""Watch the processes of a run: the first failure ends all of them, with the error that caused it."""

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from makespan.errors import WorkerError
from makespan.training._files import PROGRESS, error_file, log_file, read_json

__all__ = ["watch"]

_POLL_S = 0.02
_GRACE_S = 0.5
_TERMINATE_S = 5.0
_LOG_LINES = 5

Processes = Sequence[subprocess.Popen[bytes]]


def watch(
    processes: Processes,
    run_dir: Path,
    n_processes: int,
    timeout_s: float,
    stall_timeout_s: float,
    *,
    interrupts: int = 0,
) -> None:
    """Wait for the end of all processes; end them all when one fails or the run hangs.

    Parameters
    ----------
    processes
        Processes of the run, or the one that starts them on other machines.
    run_dir
        Where they write heartbeat and errors.
    n_processes
        Ranks of the run.
    timeout_s
        Longest run.
    stall_timeout_s
        Longest time without a step.
    interrupts
        Interrupts that a process gets before it is killed, for one that must end others first.

    Raises
    ------
    WorkerError
        A process failed, or a time limit passed. The message is the first error that was reported;
        a process that was killed comes before errors of those that then missed it.
    """
    begun = time.monotonic()
    beat, beat_time = None, begun
    try:
        while True:
            states = [process.poll() for process in processes]
            if any(state not in (None, 0) for state in states):
                time.sleep(_GRACE_S)
                raise WorkerError(_cause(processes, run_dir, n_processes))
            if all(state == 0 for state in states):
                return
            now = time.monotonic()
            if (latest := _beat(run_dir)) != beat:
                beat, beat_time = latest, now
            if now - begun > timeout_s:
                raise WorkerError(f"the run took longer than {timeout_s:g} s and was brought down")
            if now - beat_time > stall_timeout_s:
                raise WorkerError(f"no step ended within {stall_timeout_s:g} s; the run was brought down")
            time.sleep(_POLL_S)
    finally:
        _end(processes, interrupts)


def _beat(run_dir: Path) -> int | None:
    try:
        return (run_dir / PROGRESS).stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _cause(processes: Processes, run_dir: Path, n_processes: int) -> str:
    """Say which process failed first, and why."""
    reports: Mapping[int, Any] = {
        rank: report for rank in range(n_processes) if (report := read_json(error_file(run_dir, rank)))
    }
    one_each = len(processes) == n_processes
    for rank, process in enumerate(processes if one_each else ()):
        state = process.poll()
        if state not in (None, 0) and rank not in reports:
            return f"process {rank} of {n_processes} {_end_of(state)}{_last_lines(run_dir, rank)}"
    if reports:
        rank, report = min(reports.items(), key=lambda item: (item[1]["time_s"], item[0]))
        return f"process {rank} of {n_processes} failed: {report['error']}\n{report['traceback']}"
    return f"the launch failed with status {processes[0].poll()}{_last_lines(run_dir, 0)}"


def _end_of(state: int | None) -> str:
    if state is not None and state < 0:
        return f"was ended by signal {signal.Signals(-state).name}"
    return f"ended with status {state} before it could report an error"


def _last_lines(run_dir: Path, rank: int) -> str:
    try:
        lines = log_file(run_dir, rank).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "".join(f"\n  {line}" for line in lines[-_LOG_LINES:])


def _end(processes: Processes, interrupts: int) -> None:
    """End what still runs; SIGKILL, because a process in a collective does not react to less."""
    running = [process for process in processes if process.poll() is None]
    for _ in range(interrupts):
        for process in running:
            process.send_signal(signal.SIGINT)
        time.sleep(_POLL_S)
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERMINATE_S if interrupts else 0)
        process.kill()
    for process in running:
        process.wait(_TERMINATE_S)
