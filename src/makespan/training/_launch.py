"""Start the processes of a run, watch them, and bring all of them down when one dies."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from makespan.errors import WorkerError
from makespan.training._files import log_file
from makespan.training._watch import watch

__all__ = ["Launcher", "LocalLauncher", "SlurmLauncher", "local_launcher"]

_SRUN_INTERRUPTS = 2
"""Interrupts within a second that make srun end its tasks."""

WORKER = (sys.executable, "-m", "makespan.training._worker")


class Launcher(Protocol):
    """What starts the processes of a run."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Kind of device that each process uses."""

    @property
    def n_devices(self) -> int | None:
        """Devices at hand, None if there is no limit."""

    @property
    def threads_per_process(self) -> int | None:
        """Threads of each process; None for the plan's CPU threads a GPU."""

    @property
    def stall_timeout_s(self) -> float:
        """Longest time without a step."""

    def run(self, n_processes: int, run_dir: Path) -> None:
        """Run the request in ``run_dir`` with some processes and wait for their end.

        Raises
        ------
        WorkerError
            A process died, hung or could not start; none is left running.
        """


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Processes on this machine.

    Parameters
    ----------
    device
        ``cpu`` (gloo) or ``cuda`` (NCCL, one GPU a process).
    threads_per_process
        Threads of each process; None for the plan's CPU threads a GPU.
    cpus
        CPUs to which all processes are bound, None for no binding; on CPU they are the slots of a
        scheduler.
    gpus
        GPUs to use, by index; None for those that are visible.
    timeout_s
        The run is brought down when it takes longer.
    stall_timeout_s
        The run is brought down when no step ends for so long (start and checkpoints included).
    command
        How a worker is started.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    threads_per_process: int | None = 1
    cpus: tuple[int, ...] | None = None
    gpus: tuple[int, ...] | None = None
    timeout_s: float = 3600.0
    stall_timeout_s: float = 300.0
    command: Sequence[str] = WORKER

    @property
    def n_devices(self) -> int | None:
        """GPUs at hand; None on CPU, where processes may share one."""
        if self.device == "cpu":
            return None
        return len(self.gpus) if self.gpus is not None else _visible_gpus()

    def run(self, n_processes: int, run_dir: Path) -> None:
        """Run the request in ``run_dir``; see `Launcher.run`."""
        shared = os.environ | _run_variables(self.threads_per_process)
        shared |= {"MAKESPAN_WORLD_SIZE": str(n_processes), "MAKESPAN_PARENT": str(os.getpid())}
        if sys.platform == "linux":
            shared |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        if self.cpus is not None:
            shared["MAKESPAN_CPUS"] = ",".join(map(str, self.cpus))
        if self.gpus is not None:
            shared["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        processes: list[subprocess.Popen[bytes]] = []
        with _ended_on_error(processes):
            for rank in range(n_processes):
                own = shared | {"MAKESPAN_RANK": str(rank)}
                processes.append(_start([*self.command, str(run_dir)], own, log_file(run_dir, rank)))
        watch(processes, run_dir, n_processes, self.timeout_s, self.stall_timeout_s)


@dataclass(frozen=True, slots=True)
class SlurmLauncher:
    """Processes started by ``srun``, inside an allocation or with one of their own.

    Parameters
    ----------
    device
        ``cpu`` (gloo) or ``cuda`` (NCCL, one GPU a process).
    options
        Further options of ``srun``, for example ``("--nodes=2", "--gres=gpu:a800:8")``.
    threads_per_process
        Threads of each process; None for the plan's CPU threads a GPU.
    timeout_s, stall_timeout_s
        As for `LocalLauncher`; waiting for an allocation counts.
    command
        How a worker is started.
    """

    device: Literal["cpu", "cuda"] = "cuda"
    options: tuple[str, ...] = ()
    threads_per_process: int | None = None
    timeout_s: float = 24 * 3600.0
    stall_timeout_s: float = 1800.0
    command: Sequence[str] = WORKER

    @property
    def n_devices(self) -> int | None:
        """Devices at hand; Slurm decides, so None."""
        return None

    def run(self, n_processes: int, run_dir: Path) -> None:
        """Run the request in ``run_dir``; see `Launcher.run`. The directory must be seen by all nodes."""
        command = ["srun", f"--ntasks={n_processes}", "--kill-on-bad-exit=1", *self.options]
        environment = os.environ | _run_variables(self.threads_per_process)
        own = {name: value for name, value in environment.items() if name != "MAKESPAN_RANK"}
        process = _start([*command, *self.command, str(run_dir)], own, log_file(run_dir, 0))
        watch(
            [process], run_dir, n_processes, self.timeout_s, self.stall_timeout_s, interrupts=_SRUN_INTERRUPTS
        )


def local_launcher(device: Literal["auto", "cpu", "cuda"], n_processes: int) -> LocalLauncher:
    """Return a launcher for this machine.

    Parameters
    ----------
    device
        ``auto`` for GPUs where there are enough of them, else CPU.
    n_processes
        Processes that ``auto`` must serve.
    """
    if device == "auto":
        device = "cuda" if _visible_gpus() >= n_processes else "cpu"
    return LocalLauncher(device)


def _run_variables(threads: int | None) -> dict[str, str]:
    """Return what all processes of a run find in their environment."""
    count = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {"MAKESPAN_LAUNCHED_AT": repr(time.time()), "PYTHONUNBUFFERED": "1"} | count


def _start(command: Sequence[str], environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as stream:
        try:
            return subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)
        except OSError as error:
            raise WorkerError(f"cannot start {command[0]}: {error.strerror}") from None


@contextmanager
def _ended_on_error(processes: Sequence["subprocess.Popen[bytes]"]) -> Iterator[None]:
    """End the processes that were started when a later one cannot be."""
    try:
        yield
    except BaseException:
        for process in processes:
            process.kill()
            process.wait()
        raise


def _visible_gpus() -> int:
    """Count the GPUs that processes will see, without torch."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len([one for one in named.split(",") if one.strip()])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
