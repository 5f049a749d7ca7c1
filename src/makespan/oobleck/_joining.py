"""Reach a run that is going on from outside: bring a node in, or let some go."""

import itertools
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

from makespan.errors import InputError, WorkerError
from makespan.files import read_json
from makespan.oobleck._live import PROCESSES, WORKER
from makespan.oobleck.runtime import (
    ADDRESS_FILE,
    JOINING,
    Connection,
    Drain,
    Hello,
    Kill,
    connected,
    host_name,
)
from makespan.runtime import Launch, Launcher, LocalLauncher, RunDirectory, check_gpus

__all__ = ["drain_nodes", "join_run"]

_CONNECT_S = 30.0
_numbers = itertools.count()


def _reached(run_dir: str | Path) -> tuple[Path, str, Connection]:
    """Directory of the processes, token, and a connection to the coordinator of a run."""
    processes = Path(run_dir).resolve() / PROCESSES
    address = read_json(processes / ADDRESS_FILE)
    if address is None:
        raise InputError(f"run_dir is {run_dir}, where no run is going on; accepted: that of one that is")
    try:
        return processes, address["token"], connected(address["host"], address["port"], _CONNECT_S)
    except OSError as error:
        found = f"run_dir is {run_dir}, whose coordinator does not answer ({error})"
        raise InputError(f"{found}; accepted: that of a run that is going on") from None


def join_run(run_dir: str | Path, launcher: Launcher | None = None) -> str:
    """Take part in a run with one more process, until the run is over or the process leaves it.

    Parameters
    ----------
    run_dir
        Directory of a run that is going on, on a file system that this machine sees.
    launcher
        Where the process runs, None for this machine; of its GPUs the process must be left one alone. SIGTERM
        and SIGINT let it leave at the next boundary of iterations; a second SIGINT ends it at once.

    Returns
    -------
    str
        Why it ended.

    Raises
    ------
    InputError
        No run is going on there, or the process does not know which of several GPUs is free.
    WorkerError
        The process failed or was killed.
    """
    launcher = launcher or LocalLauncher()
    check_gpus(launcher, 1)
    if (n_devices := launcher.n_devices or 1) > 1:
        found = f"{n_devices} GPUs, of which this process may have one"
        raise InputError(f"{found}; accepted: its number in CUDA_VISIBLE_DEVICES")
    processes, token, link = _reached(run_dir)
    rank = JOINING + os.getpid() * 1000 + next(_numbers) % 1000
    process = launcher.start(Launch(WORKER, {}, 1, processes), rank)

    def listen() -> None:
        while (messages := link.receive()) is not None:
            if any(isinstance(one, Kill) for one in messages):
                process.kill()

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(signal.SIGTERM)
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if is_main else ()
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, pass_on)
    try:
        with suppress(OSError):
            link.send(Hello(token, process.pid, host_name(), keeps=True))
        threading.Thread(target=listen, daemon=True).start()
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        process.kill()
        link.close()
    directory = RunDirectory(processes)
    if status:
        report = directory.error(rank)
        why = f"ended with status {status}" if report is None else report["error"]
        raise WorkerError(f"the process that joined {run_dir} {why}")
    return str(directory.result(rank))


def drain_nodes(run_dir: str | Path, nodes: tuple[int, ...] = ()) -> None:
    """Let nodes leave a run at the next boundary of iterations, or end it there with a checkpoint.

    Parameters
    ----------
    run_dir, nodes
        Directory of a run that is going on, and who shall leave; none for the end of the run.

    Raises
    ------
    InputError
        No run is going on there.
    """
    _, token, link = _reached(run_dir)
    link.send(Drain(token, tuple(nodes)))
    link.close()
