"""Start the processes of a run, watch them, and bring all of them down when one dies."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

__all__ = ["Launcher", "LocalLauncher", "SlurmLauncher"]

WORKER = (sys.executable, "-m", "makespan.training.worker")


class Launcher(Protocol):
    """What starts the processes of a run."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Kind of device that each process uses."""

    @property
    def n_devices(self) -> int | None:
        """Devices at hand, None if there is no limit."""

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
        """Devices at hand, None if there is no limit."""
        raise NotImplementedError

    def run(self, n_processes: int, run_dir: Path) -> None:
        """Run the request in ``run_dir``; see `Launcher.run`."""
        raise NotImplementedError


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
        raise NotImplementedError
