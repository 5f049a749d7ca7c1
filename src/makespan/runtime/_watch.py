"""Watch the processes of a run: when one is lost all end with its error, or the others are told."""

import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from makespan.errors import WorkerError
from makespan.runtime._directory import RunDirectory

__all__ = ["Limits", "OnLoss", "watch"]

_POLL_S = 0.02
_GRACE_S = 0.5
_TERMINATE_S = 5.0
_LOG_LINES = 5

Processes = Sequence[subprocess.Popen[bytes]]
OnLoss = Literal["end", "tell"]
"""What a lost process means: all end, or the others are told and go on."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest run, and longest time without a heartbeat once the processes have met [s]."""

    timeout_s: float
    stall_timeout_s: float


def watch(
    processes: Processes,
    directory: RunDirectory,
    n_processes: int,
    limits: Limits,
    on_loss: OnLoss = "end",
    *,
    interrupts: int = 0,
) -> dict[int, str]:
    """Wait for the end of all processes; end them all when one fails or the run hangs.

    With ``on_loss="tell"`` a failed process is written into the directory, the others go on, and the
    run is well if one of them ends well.
    """
    begun = time.monotonic()
    beat, beat_time = None, begun
    lost: dict[int, str] = {}
    try:
        while True:
            states = [process.poll() for process in processes]
            failed = [rank for rank, state in enumerate(states) if state and rank not in lost]
            if failed and on_loss == "end":
                time.sleep(_GRACE_S)
                raise WorkerError(_first_cause(processes, directory, n_processes))
            for rank in failed:
                lost[rank] = _cause(processes[rank], directory, rank, n_processes)
                directory.write_lost(rank, lost[rank])
            if None not in states:
                if len(lost) == len(states):
                    raise WorkerError(f"no process is left; the first: {next(iter(lost.values()))}")
                return lost
            now = time.monotonic()
            if (latest := directory.last_beat_ns()) != beat:
                beat, beat_time = latest, now
            if now - begun > limits.timeout_s:
                raise WorkerError(f"the run took longer than {limits.timeout_s:g} s and was brought down")
            if beat is not None and now - beat_time > limits.stall_timeout_s:
                passed = f"no progress within {limits.stall_timeout_s:g} s"
                raise WorkerError(f"{passed}; the run was brought down")
            time.sleep(_POLL_S)
    finally:
        _end(processes, interrupts)


def _first_cause(processes: Processes, directory: RunDirectory, n_processes: int) -> str:
    """Say which process failed first, and why; one that was killed comes before all others."""
    if len(processes) == n_processes:
        for rank, process in enumerate(processes):
            if process.poll() and directory.error(rank) is None:
                return _cause(process, directory, rank, n_processes)
    reports = {rank: report for rank in range(n_processes) if (report := directory.error(rank))}
    if reports:
        rank = min(reports, key=lambda rank: (reports[rank]["time_s"], rank))
        return _cause(processes[0], directory, rank, n_processes)
    return f"the launch failed with status {processes[0].poll()}{_last_lines(directory, 0)}"


def _cause(process: subprocess.Popen[bytes], directory: RunDirectory, rank: int, n_processes: int) -> str:
    report, state = directory.error(rank), process.poll()
    if report is not None:
        how = f"failed: {report['error']}\n{report['traceback']}"
    elif state is not None and state < 0:
        how = f"was ended by signal {signal.Signals(-state).name}{_last_lines(directory, rank)}"
    else:
        how = f"ended with status {state} before it could report an error{_last_lines(directory, rank)}"
    return f"process {rank} of {n_processes} {how}"


def _last_lines(directory: RunDirectory, rank: int) -> str:
    try:
        lines = directory.log_path(rank).read_text(encoding="utf-8", errors="replace").splitlines()
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
