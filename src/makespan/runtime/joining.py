"""Reach an active run that survives losses from another process: join it, and drain processes of it."""

import os
import secrets
import signal
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from makespan.errors import InputError, WorkerError
from makespan.files import read_json
from makespan.runtime.launch import Launch, Launcher, LocalLauncher, RunDirectory, SlurmLauncher, check_gpus
from makespan.runtime.messages import LOOPBACK, Asked, Connection, Drain, Hello, Kill, Leaving, connected
from makespan.runtime.node import ADDRESS_FILE, JOINING, host_name

PROCESSES = "processes"
"""Directory of the processes of a run, within that of the run."""
_CONNECT_S = 30.0


def _reached(run_dir: str | Path, *, from_afar: bool = False) -> tuple[dict[str, Any], Connection]:
    """Return what a run publishes of its coordinator, and a connection to it.

    An `InputError` is raised if the run cannot be reached, or not from other machines with ``from_afar``.
    """
    address = read_json(Path(run_dir).resolve() / PROCESSES / ADDRESS_FILE)
    if address is None:
        raise InputError(
            f"run_dir is {run_dir}, where no run is in progress; expected the directory of an active run"
        )
    if from_afar and address["host"] == LOOPBACK:
        raise InputError(
            f"run_dir is {run_dir}, whose run takes processes of its own machine only; expected a run that "
            "was started in a job of Slurm"
        )
    try:
        return address, connected(address["host"], address["port"], _CONNECT_S)
    except OSError as error:
        problem = f"run_dir is {run_dir}, whose coordinator does not respond ({error})"
        raise InputError(f"{problem}; expected the directory of an active run") from None


def join_with(run_dir: str | Path, launch: Launch, launcher: Launcher | None = None) -> str:
    """Join a run with one more process, until the run is over or the process leaves it.

    SIGTERM and SIGINT make the process leave at the next boundary of iterations; a second SIGINT ends it at
    once.

    Parameters
    ----------
    run_dir
        Directory of an active run, on a file system that this machine sees.
    launch
        Launch of one process in the directory of the processes of the run.
    launcher
        Where the process runs, None for this machine; at most one of its GPUs may be visible.

    Returns
    -------
    str
        Reason for which the process ended.

    Raises
    ------
    InputError
        No run is active there or none that takes processes of other machines, several GPUs are visible, or
        the process rejects what it finds.
    WorkerError
        The process failed or was killed.
    """
    launcher = launcher or LocalLauncher()
    check_gpus(launcher, 1)
    if (n_devices := launcher.n_devices or 1) > 1:
        problem = f"{n_devices} GPUs, of which this process may have one"
        raise InputError(f"{problem}; expected its number in CUDA_VISIBLE_DEVICES")
    address, link = _reached(run_dir, from_afar=isinstance(launcher, SlurmLauncher))
    rank = JOINING + secrets.randbits(48)  # unique among processes of all machines
    process = launcher.start(launch, rank)

    def listen() -> None:
        while (messages := link.receive()) is not None:
            if any(isinstance(message, Kill) for message in messages):
                launcher.end(process)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if isinstance(launcher, SlurmLauncher):  # srun would kill its task
            with suppress(OSError):
                link.send(Leaving())
        else:
            process.send_signal(signal.SIGTERM)
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    with suppress(OSError):
        link.send(Hello(address["token"], process.pid, host_name(), is_watchdog=True, rank=rank))
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if is_main else ()
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, pass_on)
    try:
        threading.Thread(target=listen, daemon=True).start()
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        launcher.end(process)
        link.close()
    directory = RunDirectory(launch.run_dir)
    if status:
        report = directory.error(rank)
        why = f"ended with status {status}" if report is None else report["error"]
        kind, _, text = why.partition(": ")
        if kind == InputError.__name__:
            raise InputError(text)
        raise WorkerError(f"the process that joined {run_dir} {why}")
    return str(directory.result(rank))


def drain(run_dir: str | Path, nodes: Collection[int] = ()) -> tuple[int, ...]:
    """Ask an active run to release nodes at the next boundary of iterations.

    Without nodes the run ends there, with a checkpoint. A run of this process is asked without waiting for
    its answer, since its callbacks may ask; numbers that it does not know are a warning of the run then.

    Returns
    -------
    tuple
        Nodes that the run does not have; the others leave.

    Raises
    ------
    InputError
        No run is active there, it has none of the nodes, or it does not answer.
    """
    address, link = _reached(run_dir)
    try:
        link.send(Drain(address["token"], tuple(nodes)))
        if address["pid"] == os.getpid():
            return ()
        link.link.settimeout(_CONNECT_S)
        answer = next(iter(link.receive() or ()), None)
    except OSError:
        answer = None
    finally:
        link.close()
    if not isinstance(answer, Asked):
        raise InputError(
            f"run_dir is {run_dir}, whose run has not answered; expected one that is still active"
        )
    if nodes and set(nodes) <= set(answer.unknown):
        unknown, known = (", ".join(map(str, some)) for some in (answer.unknown, answer.nodes))
        raise InputError(f"the run in {run_dir} has no {unknown} to drain; expected some of {known}")
    return answer.unknown
