"""Start the processes of a run, whatever they do, on this machine or through Slurm."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from makespan.errors import InputError, WorkerError
from makespan.runtime._directory import RunDirectory
from makespan.runtime._machine import n_visible_gpus
from makespan.runtime._watch import Limits, OnLoss, watch

__all__ = ["Launcher", "LocalLauncher", "ProcessOptions", "SlurmLauncher", "local_launcher"]

_SRUN_INTERRUPTS = 2
"""Interrupts within a second that make srun end its tasks."""
_PYTHON = (sys.executable,)
_OF_ONE_PROCESS = ("MAKESPAN_RANK", "MAKESPAN_WORLD_SIZE", "MAKESPAN_LOCAL_RANK", "MAKESPAN_PARENT",
                   "MAKESPAN_CPUS")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """What one process of a run gets for itself.

    Parameters
    ----------
    environment
        Variables beside those that all get.
    threads
        CPU threads; None for those of the launcher.
    cpus
        CPUs to which it is bound; None for those of the launcher.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    cpus: tuple[int, ...] | None = None


class Launcher(Protocol):
    """What starts the processes of a run."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Kind of device that each process uses."""

    @property
    def n_devices(self) -> int | None:
        """Devices at hand, None if there is no limit."""

    def run(
        self,
        worker: str | Sequence[str],
        request: Any,
        n_processes: int,
        run_dir: Path,
        *,
        threads: int = 1,
        options: Sequence[ProcessOptions] = (),
        on_loss: OnLoss = "end",
    ) -> dict[int, str]:
        """Run a request in some processes and wait for their end.

        Parameters
        ----------
        worker
            Module of the worker, or its command; the run directory is its last argument.
        request
            What the processes find in the directory: plain values.
        n_processes
            Processes of the run.
        run_dir
            Directory of the run, seen by all; see `RunDirectory`.
        threads
            CPU threads a process where neither the launcher nor its options say.
        options
            What each process gets for itself, by rank; empty for nothing.
        on_loss
            ``end``: when a process fails all end; ``tell``: the others find it in the directory.

        Returns
        -------
        dict
            Processes that were lost, by rank, with the reason; empty under ``end``.

        Raises
        ------
        InputError
            There are options, but not for each process.
        WorkerError
            A process died, hung or could not start, or none is left; none is left running.
        """


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Processes on this machine.

    Parameters
    ----------
    device
        ``cpu`` (gloo) or ``cuda`` (NCCL, one GPU a process).
    threads_per_process
        CPU threads of each process; None for what the run asks for.
    cpus
        CPUs to which all processes are bound, None for no binding; on CPU they are the slots of a
        scheduler.
    gpus
        GPUs to use, by index; None for those that are visible.
    timeout_s
        The run is brought down when it takes longer [s].
    stall_timeout_s
        The run is brought down when nothing was heard for so long after the processes met [s].
    interpreter
        What runs the module of a worker.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    threads_per_process: int | None = 1
    cpus: tuple[int, ...] | None = None
    gpus: tuple[int, ...] | None = None
    timeout_s: float = 3600.0
    stall_timeout_s: float = 300.0
    interpreter: Sequence[str] = _PYTHON

    @property
    def n_devices(self) -> int | None:
        """GPUs at hand; None on CPU, where processes may share one."""
        if self.device == "cpu":
            return None
        return len(self.gpus) if self.gpus is not None else n_visible_gpus()

    def run(
        self,
        worker: str | Sequence[str],
        request: Any,
        n_processes: int,
        run_dir: Path,
        *,
        threads: int = 1,
        options: Sequence[ProcessOptions] = (),
        on_loss: OnLoss = "end",
    ) -> dict[int, str]:
        """Run a request in processes of this machine; see `Launcher.run`."""
        each = _of_each(options, n_processes)
        directory = RunDirectory(run_dir)
        directory.prepare(request)
        shared = _run_variables(self.device, self.stall_timeout_s)
        shared["MAKESPAN_PARENT"] = str(os.getpid())
        if sys.platform == "linux":
            shared |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        if self.gpus is not None:
            shared["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        command = [*_command(worker, self.interpreter), str(run_dir)]
        processes: list[subprocess.Popen[bytes]] = []
        with _ended_on_error(processes):
            for rank, own in enumerate(each):
                variables = _own_variables(rank, n_processes, own, self.threads_per_process or threads)
                if own.cpus is None and self.cpus is not None:
                    variables["MAKESPAN_CPUS"] = _listed(self.cpus)
                variables["MAKESPAN_LOCAL_RANK"] = str(rank)
                processes.append(_start(command, shared | variables, directory.log_path(rank)))
        limits = Limits(self.timeout_s, self.stall_timeout_s)
        return watch(processes, directory, n_processes, limits, on_loss)


@dataclass(frozen=True, slots=True)
class SlurmLauncher:
    """Processes started by ``srun``, inside an allocation or with one of their own.

    Processes that get something for themselves, or that may be lost alone, are one step each.

    Parameters
    ----------
    device
        ``cpu`` (gloo) or ``cuda`` (NCCL, one GPU a process).
    options
        Further options of ``srun``, for example ``("--nodes=2", "--gres=gpu:a800:8")``.
    threads_per_process
        CPU threads of each process; None for what the run asks for.
    timeout_s, stall_timeout_s
        As for `LocalLauncher`; waiting for an allocation counts for the first.
    interpreter
        What runs the module of a worker.
    """

    device: Literal["cpu", "cuda"] = "cuda"
    options: tuple[str, ...] = ()
    threads_per_process: int | None = None
    timeout_s: float = 24 * 3600.0
    stall_timeout_s: float = 1800.0
    interpreter: Sequence[str] = _PYTHON

    @property
    def n_devices(self) -> int | None:
        """Devices at hand; Slurm decides, so None."""
        return None

    def run(
        self,
        worker: str | Sequence[str],
        request: Any,
        n_processes: int,
        run_dir: Path,
        *,
        threads: int = 1,
        options: Sequence[ProcessOptions] = (),
        on_loss: OnLoss = "end",
    ) -> dict[int, str]:
        """Run a request in tasks of Slurm; see `Launcher.run`."""
        each = _of_each(options, n_processes)
        directory = RunDirectory(run_dir)
        directory.prepare(request)
        shared = _run_variables(self.device, self.stall_timeout_s)
        command = [*self.options, *_command(worker, self.interpreter), str(run_dir)]
        count = self.threads_per_process or threads
        processes: list[subprocess.Popen[bytes]] = []
        with _ended_on_error(processes):
            if options or on_loss == "tell":
                for rank, own in enumerate(each):
                    variables = shared | _own_variables(rank, n_processes, own, count)
                    step = ["srun", "--ntasks=1", "--exact", *command]
                    processes.append(_start(step, variables, directory.log_path(rank)))
            else:
                step = ["srun", f"--ntasks={n_processes}", "--kill-on-bad-exit=1", *command]
                processes.append(_start(step, shared | _thread_variables(count), directory.log_path(0)))
        limits = Limits(self.timeout_s, self.stall_timeout_s)
        return watch(processes, directory, n_processes, limits, on_loss, interrupts=_SRUN_INTERRUPTS)


def local_launcher(device: Literal["auto", "cpu", "cuda"], n_processes: int) -> LocalLauncher:
    """Launcher for this machine.

    Parameters
    ----------
    device
        ``auto`` for GPUs where there are enough of them, else CPU.
    n_processes
        Processes that ``auto`` must serve.
    """
    if device == "auto":
        device = "cuda" if n_visible_gpus() >= n_processes else "cpu"
    return LocalLauncher(device)


def _of_each(options: Sequence[ProcessOptions], n_processes: int) -> Sequence[ProcessOptions]:
    if options and len(options) != n_processes:
        raise InputError(f"options of {len(options)} processes; accepted: none, or those of {n_processes}")
    return options or [ProcessOptions()] * n_processes


def _command(worker: str | Sequence[str], interpreter: Sequence[str]) -> list[str]:
    return [*interpreter, "-m", worker] if isinstance(worker, str) else list(worker)


def _run_variables(device: str, timeout_s: float) -> dict[str, str]:
    """Environment that all processes of a run share."""
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_ONE_PROCESS}
    return inherited | {
        "MAKESPAN_DEVICE": device,
        "MAKESPAN_TIMEOUT_S": repr(timeout_s),
        "MAKESPAN_LAUNCHED_AT": repr(time.time()),
        "PYTHONUNBUFFERED": "1",
    }


def _own_variables(rank: int, n_processes: int, own: ProcessOptions, threads: int) -> dict[str, str]:
    found = {"MAKESPAN_RANK": str(rank), "MAKESPAN_WORLD_SIZE": str(n_processes)}
    if own.cpus is not None:
        found["MAKESPAN_CPUS"] = _listed(own.cpus)
    return found | _thread_variables(own.threads or threads) | dict(own.environment)


def _thread_variables(threads: int) -> dict[str, str]:
    return {"MAKESPAN_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
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
