"""Launch the processes of a run, on this machine or through Slurm, and watch them.

The launcher and the processes communicate through files in a `RunDirectory`. The launcher kills a run that
exceeds its time limit, makes no progress, or whose processes do not meet. When a process is lost, either all
others are killed and its error is raised, or the others are told.

The first two parts describe the machine: its hardware for the record of a measurement, and the GPUs that
torch can use.
"""

import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Protocol

from makespan.cleanup import temporary_directory
from makespan.errors import InputError, LostWorkerError, MakespanError, WorkerError
from makespan.files import read_json, write_json
from makespan.runtime.forkserver import TUNABLES, Process, can_fork, fork_worker, how_ended

# --- Machine ----------------------------------------------------------------------------------------

_LIBRARIES = ("makespan", "numpy", "torch")
_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION")
_QUERY_LIMIT_S = 30


def describe_machine() -> dict[str, Any]:
    """Describe this machine in plain values, for the record of a measurement.

    ``cpus`` is the number of CPUs usable by this process; ``gpus`` lists all GPUs that the tool of the driver
    reports, ``visible_devices`` those granted to this process (None without a grant); ``load`` is the mean
    number of runnable processes over the last minute.
    """
    versions = {}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "processor": _processor(),
        "cpus": usable_cpus(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpus": _gpus_of_driver(),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "slurm": {name: os.environ[name] for name in _SLURM if name in os.environ},
        "load": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version(), **versions},
    }


def usable_cpus() -> int:
    """Count the CPUs on which this process may run."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Return the memory of the machine [B]."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident_bytes(*, peak: bool = False) -> int:
    """Return the resident memory of this process, now or at its peak since it started its program [B]."""
    # Unlike `resource.getrusage`, whose peak a program inherits from the process that started it.
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


_TRIM, _MMAP = -1, -3  # parameters of mallopt: free memory that the heap keeps, size of blocks outside it
_SMALL_BLOCK, _LARGE_BLOCK, _KEPT = 1 << 18, 1 << 25, 1 << 30
_GROWTH = 1.5  # of a process, by which its heap may have lost places for tensors


def keep_freed(*, keeps: bool = True) -> None:
    """Make the heap of this process keep freed memory, or return large blocks to the system at once.

    Writing into new memory takes longer than adding up gradients that are there. Up to 1 GiB is kept, and no
    block of more than 32 MiB. Has an effect with the GNU C library only.
    """
    with suppress(AttributeError):
        allocator = ctypes.CDLL(None).mallopt
        allocator(_TRIM, _KEPT)
        allocator(_MMAP, _LARGE_BLOCK if keeps else _SMALL_BLOCK)


class KeptHeap:
    """Heap of this process, which keeps freed memory and returns it once it exceeds what is used.

    A tensor does not always get the place where one of its size was freed: a small object that outlives it
    may have taken a part of it. Such gaps cannot be used again, and a long run may collect many. Has an
    effect with the GNU C library only.
    """

    def __init__(self) -> None:
        keep_freed()
        self._trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._most, self._is_trimmed = 0, True

    def check(self) -> None:
        """Return freed memory if there is too much of it; to be called once in each of many equal rounds."""
        if self._trim is None:
            return
        resident = resident_bytes()
        if self._is_trimmed:  # all that this process has now is what one round needs
            self._most, self._is_trimmed = max(self._most, resident), False
        elif resident > _GROWTH * self._most + _LARGE_BLOCK:
            self._trim(0)
            self._is_trimmed = True


def gpu_names(places: Sequence[int]) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for GPUs given by their positions among the granted ones."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _listed(places)
    # Like CUDA, ignore everything from the first empty or negative entry on.
    names = [name.strip() for name in visible.split(",")]
    granted = list(takewhile(lambda name: bool(name) and not name.startswith("-"), names))
    if beyond := [place for place in places if place >= len(granted)]:
        raise InputError(
            f"GPU {beyond[0]}, but {len(granted)} granted; expected positions among the granted GPUs, from "
            "0 on"
        )
    return ",".join(granted[place] for place in places)


def _gpus_of_driver() -> list[dict[str, str]]:
    """Query name, memory and driver of each GPU, with the keys of nvidia-smi; empty without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    fields = ("name", "memory.total", "driver_version")
    try:
        query = [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        listed = subprocess.check_output(query, stderr=subprocess.DEVNULL, text=True, timeout=_QUERY_LIMIT_S)
    except subprocess.SubprocessError:
        return []
    rows = [line.split(", ") for line in listed.splitlines() if line.strip()]
    return [dict(zip(fields, row, strict=False)) for row in rows]


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# --- GPUs as torch counts them ----------------------------------------------------------------------
#
# ``CUDA_VISIBLE_DEVICES`` and the tools of a driver list the granted or installed GPUs. Only torch knows
# whether it can use them (it may be built for the CPU alone), so a process that would use them asks torch.


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of a process.

    Parameters
    ----------
    memory_bytes
        Memory of each GPU [B].
    source
        Version of torch, and a reason why it may see fewer GPUs than the machine has.
    names
        Name of each GPU, as its driver has it.
    """

    memory_bytes: Sequence[float]
    source: str
    names: Sequence[str] = ()

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return len(self.memory_bytes)


def gpus_of_torch() -> Gpus:
    """Return the GPUs that torch can use in this process; loads torch."""
    try:
        import torch
    except ImportError as error:
        return Gpus((), f"torch cannot be imported ({error})")
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties: list[Any] = [torch.cuda.get_device_properties(index) for index in range(n_gpus)]
    if torch.version.cuda or torch.version.hip:
        granted = os.environ.get("CUDA_VISIBLE_DEVICES")
        limit = "" if granted is None else f" with CUDA_VISIBLE_DEVICES={granted}"
        source = f"as torch {torch.__version__} counts them{limit}"
    else:
        source = f"torch {torch.__version__} is built without CUDA"
    return Gpus([float(gpu.total_memory) for gpu in properties], source, [gpu.name for gpu in properties])


def gpu_of(local_rank: int, gpus: Gpus) -> int:
    """Return the index of the GPU that a process uses, from its number among the processes of its node.

    A process that sees a single GPU uses that one: Slurm may have granted each process its own.

    Raises
    ------
    InputError
        There is no GPU for the process.
    """
    index = local_rank if gpus.count > 1 else 0
    if index >= gpus.count:
        raise InputError(
            f"device cuda: process {local_rank} of its node, but found {gpus.count} GPU(s) "
            f"({gpus.source}); expected one GPU for each process, or cpu"
        )
    return index


# --- Run directory ----------------------------------------------------------------------------------

_RUN_FILES = (
    "request.json", "result-*.json", "progress.json", "stop", "met-*.json", "store-*.json", "error-*.json",
    "lost-*.json", "log-*.txt", "alive-*", "ready-*", "beat-*", "gpu-*",
)  # fmt: skip


ProgressListener = Callable[[int, int, str], object]
"""Function that is told how much of some work is done, of how much, and what runs now."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Files through which the launcher sends requests, watches processes and stops a run.

    All processes must see the directory. Every file is written atomically, and values are stored as JSON.
    """

    path: Path

    def prepare(self, request: Any) -> None:
        """Create the directory, remove the files of an earlier run, and write the request of a new one."""
        self.path.mkdir(parents=True, exist_ok=True)
        for pattern in _RUN_FILES:
            for path in self.path.glob(pattern):
                path.unlink()
        write_json(request, self.path / "request.json")

    def request(self) -> Any:
        """Return the request of the run."""
        return read_json(self.path / "request.json")

    def write_result(self, result: Any, number: int = 0) -> None:
        """Write the result of the run, or of one of its jobs by number; only one process may call this."""
        write_json(result, self.path / f"result-{number}.json")

    def result(self, number: int = 0) -> Any:
        """Return the result of the run, or of one of its jobs; None before it is written."""
        return read_json(self.path / f"result-{number}.json")

    def write_progress(self, values: Any) -> None:
        """Write a heartbeat with values, in one process; without any for too long, the run is killed."""
        write_json(values, self.path / "progress.json")

    def progress(self) -> Any:
        """Return the newest heartbeat; None before the first."""
        return read_json(self.path / "progress.json")

    def tell(self, progress: ProgressListener) -> None:
        """Pass the newest heartbeat on, if it has the work ``done``, its ``total`` and what ``doing``."""
        values = self.progress()
        if values is not None:
            progress(values["done"], values["total"], values["doing"])

    def write_beat(self, rank: int) -> None:
        """Record progress of one process between heartbeats; it resets the stall limit too."""
        (self.path / f"beat-{rank}").touch()

    def write_sign_of_life(self, rank: int) -> None:
        """Record that a process is alive, even if it makes no progress."""
        (self.path / f"alive-{rank}").touch()

    def remove_sign_of_life(self, rank: int) -> None:
        """Record that a process gives no more signs of life, because it exits."""
        (self.path / f"alive-{rank}").unlink(missing_ok=True)

    def signs_of_life_ns(self) -> dict[int, int]:
        """Return the time of the newest sign of life of each process that gives some, by rank [ns]."""
        signs = {}
        for path in self.path.glob("alive-*"):
            with suppress(FileNotFoundError):  # removed by a process that exits
                signs[int(path.name.partition("-")[2])] = path.stat().st_mtime_ns
        return signs

    def write_ready(self, rank: int) -> None:
        """Record that a process is about to meet the others for the first time."""
        (self.path / f"ready-{rank}").touch()

    def n_ready(self) -> int:
        """Count the processes that are about to meet, or have met."""
        return sum(1 for _ in self.path.glob("ready-*"))

    def request_stop(self) -> None:
        """Ask the processes to stop at the next opportunity."""
        (self.path / "stop").touch()

    def is_stop_requested(self) -> bool:
        """Return True if the processes were asked to stop."""
        return (self.path / "stop").exists()

    def write_meeting(self, meeting: int, pids: list[int]) -> None:
        """Record that the processes have met, with the id of each; from then on the stall limit applies."""
        write_json(pids, self.path / f"met-{meeting}.json")

    def meeting(self, number: int = 0) -> list[int] | None:
        """Return the ids of the processes that met, by rank in the meeting; None before they have."""
        pids: list[int] | None = read_json(self.path / f"met-{number}.json")
        return pids

    def store_path(self, meeting: int) -> Path:
        """Return the file with the address at which the processes of a meeting find each other."""
        return self.path / f"store-{meeting}.json"

    def log_path(self, rank: int) -> Path:
        """Return the file with the output of a local process."""
        return self.path / f"log-{rank}.txt"

    def write_error(self, rank: int, error: BaseException) -> None:
        """Report why a process failed, with the time and the traceback of the exception being handled.

        A `MakespanError` is reported without its traceback: its message is enough.
        """
        report = {"time_s": time.time(), "error": f"{type(error).__name__}: {error}"}
        trace = "" if isinstance(error, MakespanError) else traceback.format_exc()
        write_json(report | {"traceback": trace}, self.path / f"error-{rank}.json")

    def error(self, rank: int) -> Any:
        """Return the report of a failed process: ``time_s``, ``error``, ``traceback``; None without one."""
        return read_json(self.path / f"error-{rank}.json")

    def write_lost(self, rank: int, reason: str) -> None:
        """Tell the remaining processes that one is lost, and the reason."""
        write_json(reason, self.path / f"lost-{rank}.json")

    def lost(self) -> dict[int, str]:
        """Return the lost processes by rank, with the reason."""
        ranks = sorted(int(path.stem.partition("-")[2]) for path in self.path.glob("lost-*.json"))
        return {rank: read_json(self.path / f"lost-{rank}.json") for rank in ranks}

    def last_beat_ns(self) -> int | None:
        """Return the time of the newest heartbeat or meeting [ns]; None before the processes have met."""
        times = []
        for path in (
            self.path / "progress.json",
            *(path for pattern in ("met-*.json", "beat-*") for path in self.path.glob(pattern)),
        ):
            with suppress(FileNotFoundError):
                times.append(path.stat().st_mtime_ns)
        return max(times, default=None)


# --- Launchers --------------------------------------------------------------------------------------

_SRUN_INTERRUPTS = 2
"""Interrupts within a second that make srun end its tasks."""
_POLL_S = 0.02
_GRACE_S = 0.5
_TERMINATE_S = 5.0
_LOG_LINES = 5
_PYTHON = (sys.executable,)
_GPU_PROBE = "makespan.runtime.gpu_probe"
_HUGE_PAGES = "glibc.malloc.hugetlb"
_PROCESS_VARIABLES = (
    "MAKESPAN_RANK", "MAKESPAN_WORLD_SIZE", "MAKESPAN_LOCAL_RANK", "MAKESPAN_PARENT", "MAKESPAN_CPUS",
)  # fmt: skip
_Processes = Sequence[Process]
OnLoss = Literal["end", "tell"]
_NO_LIMIT_S = 20 * 24 * 3600.0
"""Longest wait of a process in a run without a limit [s]; some libraries count it in 31 bits of ms."""
_PAUSE_S = 5.0
"""Gap between two polls [s] after which the launcher assumes that it was itself paused."""


@dataclass(frozen=True, slots=True)
class _Limits:
    """Time limits of a launcher [s]; see `LocalLauncher`."""

    timeout_s: float | None
    stall_timeout_s: float
    meet_timeout_s: float
    silence_timeout_s: float


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Options of one process of a run.

    Parameters
    ----------
    environment
        Variables in addition to those of all processes.
    threads, cpus
        CPU threads, and CPUs to which it is bound; None for those of the launcher.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """Specification of a run.

    Parameters
    ----------
    worker
        Module of the worker, or its command; the run directory is its last argument.
    request, n_processes, run_dir
        Plain values for the processes; number of processes; run directory, which all of them must see.
    threads
        CPU threads per process if neither the launcher nor the options set them.
    options
        Options of each process, by rank; empty for none. A further process has those of the first.
    on_loss
        ``end``: when one process fails, all are killed. ``tell``: the others find the loss in the directory
        and continue, and the run succeeds if at least one of them does.
    on_beat, is_killed
        Called in the launching process: soon after each heartbeat; and every 20 ms, to kill all processes at
        once as soon as it returns True.
    """

    worker: str | Sequence[str]
    request: Any
    n_processes: int
    run_dir: Path
    threads: int = 1
    options: Sequence[ProcessOptions] = ()
    on_loss: OnLoss = "end"
    on_beat: Callable[[], None] = lambda: None
    is_killed: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        """Check the options."""
        n_options, n_processes = len(self.options), self.n_processes
        if n_options not in (0, n_processes):
            raise InputError(f"options of {n_options} processes; expected none, or those of {n_processes}")

    def command(self, interpreter: Sequence[str]) -> list[str]:
        """Return the command of each process."""
        module = [*interpreter, "-m", self.worker] if isinstance(self.worker, str) else self.worker
        return [*module, str(self.run_dir)]

    def process_variables(self, rank: int, threads: int | None) -> dict[str, str]:
        """Return the variables of one process, in addition to those that all share."""
        options = ProcessOptions()
        if self.options:  # those of the first for a process that is additional to the launch
            options = self.options[rank if rank < len(self.options) else 0]
        variables = {"MAKESPAN_RANK": str(rank), "MAKESPAN_WORLD_SIZE": str(self.n_processes)}
        if options.cpus is not None:
            variables["MAKESPAN_CPUS"] = _listed(options.cpus)
        n_threads = options.threads or threads or self.threads
        return variables | _thread_variables(n_threads) | dict(options.environment)


class Launcher(Protocol):
    """Interface that starts the processes of a run."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Kind of device that each process uses."""

    @property
    def n_devices(self) -> int | None:
        """Number of available devices, None if there is no limit."""

    def run(self, launch: Launch) -> dict[int, str]:
        """Start the processes and wait for their exit.

        Returns the lost processes by rank, with the reason. Raises a `WorkerError` if a process could not
        start, hung, or crashed in a run whose ``on_loss`` is ``end``, or if no process is left.
        """

    def start(self, launch: Launch, rank: int) -> Process:
        """Start one process of a run whose directory is prepared; it may be additional to the launch."""

    def end(self, process: Process) -> None:
        """Kill a process that `start` started, even if it hangs."""


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Processes on this machine.

    Parameters
    ----------
    device
        ``cpu`` (gloo) or ``cuda`` (NCCL, one GPU per process).
    threads_per_process
        CPU threads; None for the number that the launch specifies.
    cpus, gpus
        CPUs to which all processes are bound, None for no binding; GPUs by their position among the granted
        ones, None for all.
    timeout_s
        Time limit of the run [s]; None for no limit.
    stall_timeout_s
        The run is killed when no process has made progress for this long after they met [s].
    meet_timeout_s
        The run is killed when all processes have been ready to meet for this long and have not met [s].
    silence_timeout_s
        A process without a sign of life for this long counts as killed [s]: it is stopped, or its machine
        does not respond. A process that computes or waits gives a sign every second.
    interpreter
        Command that runs the module of a worker.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    threads_per_process: int | None = 1
    cpus: tuple[int, ...] | None = None
    gpus: tuple[int, ...] | None = None
    timeout_s: float | None = None
    stall_timeout_s: float = 300.0
    meet_timeout_s: float = 60.0
    silence_timeout_s: float = 60.0
    interpreter: Sequence[str] = _PYTHON

    @property
    def n_devices(self) -> int | None:
        """Number of GPUs that torch can use; None on CPU, which processes may share."""
        if self.device == "cpu":
            return None
        count = local_gpus(self.interpreter).count
        return count if self.gpus is None else sum(place < count for place in self.gpus)

    def run(self, launch: Launch) -> dict[int, str]:
        """Run processes on this machine, each with its own GPU on ``cuda``; see `Launcher.run`."""
        check_gpus(self, launch.n_processes)
        return _run(launch, launch.n_processes, self.start, _limits(self))

    def start(self, launch: Launch, rank: int) -> Process:
        """Start one process; see `Launcher.start`."""
        shared = _run_variables(self.device, self.timeout_s) | {"MAKESPAN_LOCAL_RANK": str(rank)}
        shared["MAKESPAN_PARENT"] = str(os.getpid())
        if sys.platform == "linux":
            shared |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        if self.gpus is not None:
            shared["CUDA_VISIBLE_DEVICES"] = gpu_names(self.gpus)
        if self.cpus is not None:
            shared["MAKESPAN_CPUS"] = _listed(self.cpus)
        environment = shared | launch.process_variables(rank, self.threads_per_process)
        log = RunDirectory(launch.run_dir).log_path(rank)
        # A process that uses a GPU is not forked: the driver does not survive a fork.
        worker = launch.worker if self.device == "cpu" and tuple(self.interpreter) == _PYTHON else None
        if can_fork(worker):
            return fork_worker(worker, str(launch.run_dir), environment, log)
        return _start(launch.command(self.interpreter), environment, log)

    def end(self, process: Process) -> None:
        """Kill a process that may hang."""
        process.kill()


@dataclass(frozen=True, slots=True)
class SlurmLauncher:
    """Processes started by ``srun``, inside an allocation or with one of their own.

    Each process is a job step of its own if processes have options, or if a run survives their loss;
    otherwise one step starts all.

    Parameters
    ----------
    options
        Further options of ``srun``, for example ``("--nodes=2", "--gres=gpu:a800:8")``.
    device, threads_per_process, timeout_s, stall_timeout_s, meet_timeout_s, silence_timeout_s, interpreter
        As for `LocalLauncher`; the wait for an allocation counts towards ``timeout_s``. The default silence
        limit allows for files of other machines that become visible up to a minute late.
    """

    device: Literal["cpu", "cuda"] = "cuda"
    options: tuple[str, ...] = ()
    threads_per_process: int | None = None
    timeout_s: float | None = None
    stall_timeout_s: float = 1800.0
    meet_timeout_s: float = 60.0
    silence_timeout_s: float = 180.0
    interpreter: Sequence[str] = _PYTHON

    @property
    def n_devices(self) -> int | None:
        """None, because Slurm decides."""
        return None

    def run(self, launch: Launch) -> dict[int, str]:
        """Run tasks of Slurm; see `Launcher.run`."""
        limits = _limits(self)
        if launch.options or launch.on_loss == "tell":
            return _run(launch, launch.n_processes, self.start, limits, _SRUN_INTERRUPTS)
        return _run(launch, 1, self._start_together, limits, _SRUN_INTERRUPTS)

    def start(self, launch: Launch, rank: int) -> Process:
        """Start one process as a job step of its own; see `Launcher.start`."""
        variables = launch.process_variables(rank, self.threads_per_process)
        return self._step(launch, rank, ["--ntasks=1", "--exact"], variables)

    def end(self, process: Process) -> None:
        """Kill a step whose task may hang; srun must end before its task does."""
        _end([process], _SRUN_INTERRUPTS)

    def _start_together(self, launch: Launch, rank: int) -> Process:
        tasks = [f"--ntasks={launch.n_processes}", "--kill-on-bad-exit=1"]
        return self._step(launch, rank, tasks, _thread_variables(self.threads_per_process or launch.threads))

    def _step(self, launch: Launch, rank: int, tasks: Sequence[str], variables: dict[str, str]) -> Process:
        command = ["srun", *tasks, *self.options, *launch.command(self.interpreter)]
        environment = _run_variables(self.device, self.timeout_s) | variables
        return _start(command, environment, RunDirectory(launch.run_dir).log_path(rank))


class GpuSlots:
    """Starts the processes of a run one by one, on this machine each with a GPU of its own.

    Launchers that give out no GPUs of this machine start processes as they do otherwise.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher, self._gpus = launcher, tuple[int, ...]()
        if isinstance(launcher, LocalLauncher) and launcher.device == "cuda":
            named = launcher.gpus
            self._gpus = tuple(range(launcher.n_devices or 0)) if named is None else named
        self._started: dict[int, tuple[int, Process]] = {}  # places among the GPUs and processes, by node

    def start(self, launch: Launch, node: int, replaced: int | None = None) -> Process:
        """Start the process of a node, on the GPU of the lost node that it replaces, or on a free one."""
        if not isinstance(self._launcher, LocalLauncher) or not self._gpus:
            return self._launcher.start(launch, node)
        busy = {place for place, process in self._started.values() if process.poll() is None}
        free = [place for place in range(len(self._gpus)) if place not in busy]
        place = free[0] if free else node % len(self._gpus)
        if replaced in self._started:
            # The lost process may still be ending, and has ended before the new one has loaded torch.
            place, process = self._started.pop(replaced)
            self._launcher.end(process)
        process = replace(self._launcher, gpus=(self._gpus[place],)).start(launch, node)
        self._started[node] = place, process
        return process


def _limits(launcher: LocalLauncher | SlurmLauncher) -> _Limits:
    return _Limits(
        launcher.timeout_s, launcher.stall_timeout_s, launcher.meet_timeout_s, launcher.silence_timeout_s
    )


def _run(
    launch: Launch,
    n_processes: int,
    start: Callable[[Launch, int], Process],
    limits: _Limits,
    interrupts: int = 0,
) -> dict[int, str]:
    """Start ``n_processes`` processes, each of which may stand for several tasks, and watch them."""
    RunDirectory(launch.run_dir).prepare(launch.request)
    processes: list[Process] = []
    try:
        for rank in range(n_processes):
            processes.append(start(launch, rank))
    except BaseException:
        _end(processes, 0)
        raise
    return _watch(launch, processes, limits, interrupts)


def local_gpus(interpreter: Sequence[str] = _PYTHON) -> Gpus:
    """Return the GPUs of this machine that processes started here can use; one such process asks torch."""
    return _probed(tuple(interpreter), os.environ.get("CUDA_VISIBLE_DEVICES"))


@cache
def _probed(interpreter: tuple[str, ...], granted: str | None) -> Gpus:
    """Probe in a separate process; ``granted`` is only a key of the cache, because it changes the answer."""
    with temporary_directory("gpus") as directory:
        LocalLauncher(interpreter=interpreter).run(Launch(_GPU_PROBE, {}, 1, directory))
        return Gpus(**RunDirectory(directory).result()["gpus"])


def slurm_device(launcher: SlurmLauncher, n_processes: int, run_dir: Path) -> Literal["cpu", "cuda"]:
    """Choose the device for Slurm tasks: GPUs if each task has its own GPU that its torch can use.

    A probe runs in every task, possibly on other machines; all tasks must see the ``run_dir``.
    """
    launch = Launch(_GPU_PROBE, {}, n_processes, run_dir)
    launcher.run(launch)
    answers = [RunDirectory(run_dir).result(rank) for rank in range(n_processes)]
    return "cuda" if all(answer["has_own"] for answer in answers) else "cpu"


def local_launcher(device: Literal["auto", "cpu", "cuda"], n_processes: int) -> LocalLauncher:
    """Return a launcher for this machine; ``auto`` uses GPUs if there is one per process, else the CPU."""
    if device == "auto":
        device = "cuda" if local_gpus().count >= n_processes else "cpu"
    return LocalLauncher(device)


def check_gpus(launcher: Launcher, n_processes: int) -> None:
    """Check that each process has a GPU, if the launcher uses GPUs; an `InputError` says what is wrong."""
    if not hasattr(launcher, "n_devices"):
        raise InputError(f"launcher is {launcher!r}; expected a launcher, such as LocalLauncher()")
    if (n_devices := launcher.n_devices) is not None and n_processes > n_devices:
        problem = f"device {launcher.device}: {n_processes} process(es), but found {n_devices} GPU(s)"
        source = (
            f" ({local_gpus(launcher.interpreter).source})" if isinstance(launcher, LocalLauncher) else ""
        )
        raise InputError(f"{problem}{source}; expected one GPU for each process, or cpu")


def _run_variables(device: str, timeout_s: float | None) -> dict[str, str]:
    """Return the environment that all processes of a run share."""
    inherited = {name: value for name, value in os.environ.items() if name not in _PROCESS_VARIABLES}
    return (
        inherited
        | _with_huge_pages(inherited.get(TUNABLES, ""))
        | {
            "MAKESPAN_DEVICE": device,
            # The limit of the whole run: the stall limit does not apply before all have met.
            "MAKESPAN_TIMEOUT_S": repr(_NO_LIMIT_S if timeout_s is None else timeout_s),
            "MAKESPAN_LAUNCHED_AT": repr(time.time()),
            "PYTHONUNBUFFERED": "1",
        }
    )


def _with_huge_pages(tunables: str) -> dict[str, str]:
    """Return the user's tunables with huge pages for the heap, unless they already set these.

    New memory then takes one page fault per 2 MiB instead of one per 4 KiB. Torch can ask for huge pages too
    (``THP_MEM_ALLOC_ENABLE``), but aligns large tensors to a page. Small objects then fill the gaps before
    them, a tensor of the same size no longer fits where one was freed, and the heap grows.
    """
    asked = "" if _HUGE_PAGES in tunables else f"{_HUGE_PAGES}=1"
    return {TUNABLES: ":".join(filter(None, (tunables, asked)))}


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


# --- Watching ---------------------------------------------------------------------------------------
#
# A launcher has one process per rank, or one ``srun`` for all ranks. In the second case the exit status and
# process id of a rank are unknown, and its state is known only from the files in the run directory.
#
# A run passes through three phases: processes start (only ``timeout_s`` applies: libraries load, Slurm
# queues), are ready to meet (``meet_timeout_s``), and have met (``stall_timeout_s`` from the last heartbeat).
# The limit for signs of life applies to each process from its first sign on.


def _watch(launch: Launch, processes: _Processes, limits: _Limits, interrupts: int) -> dict[int, str]:
    """Wait until all processes have exited, or kill a run that hangs; return the lost ranks and reasons."""
    directory, n_processes, begun = RunDirectory(launch.run_dir), launch.n_processes, time.monotonic()
    signs, beat, beat_time, ready_time, looked = _Signs(directory, processes, begun), None, begun, None, begun
    lost: dict[int, str] = {}
    try:
        while True:
            if launch.is_killed():
                raise LostWorkerError("the processes were killed on request")
            states = [process.poll() for process in processes]
            failed = [rank for rank, state in enumerate(states) if state and rank not in lost]
            if failed and launch.on_loss == "end":
                # Processes fail together, and the one that failed first may be detected later: wait for
                # reports.
                time.sleep(_GRACE_S)
                raise _failure(processes, directory, n_processes)
            for rank in failed:
                lost[rank] = signs.silent.get(rank) or _cause(processes[rank], directory, rank, n_processes)
                directory.write_lost(rank, lost[rank])
            if None not in states:
                if len(lost) == len(states):
                    raise WorkerError(f"all processes are lost; the first: {next(iter(lost.values()))}")
                return lost
            now = time.monotonic()
            if now - looked > _PAUSE_S:
                # This process was paused: restart all limits except the time limit of the run.
                beat_time, ready_time = now, None if ready_time is None else now
                signs.forgive(now)
            looked = now
            if (latest := directory.last_beat_ns()) != beat:
                beat, beat_time = latest, now
                launch.on_beat()
            if limits.timeout_s is not None and now - begun > limits.timeout_s:
                raise WorkerError(
                    f"the run took longer than {limits.timeout_s:g} s (timeout_s) and was killed"
                )
            if beat is not None and now - beat_time > limits.stall_timeout_s:
                limit = f"{limits.stall_timeout_s:g} s (stall_timeout_s)"
                raise LostWorkerError(f"no progress within {limit}; the run was killed")
            if beat is None and ready_time is None and directory.n_ready() == n_processes:
                ready_time = now
            if beat is None and ready_time is not None and now - ready_time > limits.meet_timeout_s:
                raise WorkerError(
                    f"{n_processes} processes were ready but did not meet within {limits.meet_timeout_s:g} "
                    "s; check that they can reach each other over the network"
                )
            for rank in signs.look(now, limits.silence_timeout_s, n_processes):
                if launch.on_loss == "end" or len(processes) < n_processes:
                    raise LostWorkerError(signs.silent[rank])
                processes[rank].kill()
            time.sleep(_POLL_S)
    finally:
        _end(processes, interrupts)


class _Signs:
    """Watches signs of life of each process: the file that it touches, and the CPU time that it uses."""

    def __init__(self, directory: RunDirectory, processes: _Processes, begun: float) -> None:
        self._directory, self._processes, self._looked = directory, processes, begun
        self._seen = dict[int, tuple[object, float]]()
        self.silent: dict[int, str] = {}

    def forgive(self, now: float) -> None:
        """Restart the time limits at ``now``, because it was this process that paused."""
        self._seen = {rank: (sign, now) for rank, (sign, _) in self._seen.items()}

    def look(self, now: float, limit_s: float, n_processes: int) -> list[int]:
        """Return the ranks that have newly been silent for too long, and add the reasons to ``silent``."""
        if now - self._looked < min(1.0, limit_s / 4):
            return []
        self._looked, newly_silent = now, []
        for rank, sign_ns in self._directory.signs_of_life_ns().items():
            if rank in self.silent:
                continue
            is_process = len(self._processes) == n_processes and rank < n_processes
            if is_process and self._processes[rank].poll() is not None:
                continue
            # A process that holds the interpreter lock for long, or cannot write, still uses CPU time.
            sign = sign_ns, _cpu_ticks(self._processes[rank].pid) if is_process else None
            before, since = self._seen.get(rank, (None, now))
            if sign != before:
                self._seen[rank] = sign, now
            elif now - since > limit_s:
                self.silent[rank] = (
                    f"process {rank} of {n_processes} gave no sign of life for {limit_s:g} s "
                    "and counts as killed"
                )
                newly_silent.append(rank)
        return newly_silent


def _cpu_ticks(pid: int) -> int | None:
    """Return the CPU time of a process of this machine, in ticks; None if it is unknown."""
    try:
        # The second field, the name of the program, may hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])


def _failure(processes: _Processes, directory: RunDirectory, n_processes: int) -> WorkerError:
    """Build the error of a failed run, with the process that failed first and the reason."""
    # A process that exited without a report was killed, and the errors of the others follow from that.
    killed = [
        rank
        for rank, process in enumerate(processes)
        if len(processes) == n_processes and process.poll() and directory.error(rank) is None
    ]
    if killed:
        text = _cause(processes[killed[0]], directory, killed[0], n_processes)
    elif reports := {rank: report for rank in range(n_processes) if (report := directory.error(rank))}:
        first = min(reports, key=lambda rank: (reports[rank]["time_s"], rank))
        text = _cause(processes[0], directory, first, n_processes)
    else:
        text = f"the launch failed with status {processes[0].poll()}{_last_lines(directory, 0)}"
    is_lost = any((processes[rank].poll() or 0) < 0 for rank in killed)
    return LostWorkerError(text) if is_lost else WorkerError(text)


def _cause(process: Process, directory: RunDirectory, rank: int, n_processes: int) -> str:
    """Describe how one process ended; its report counts more than the exit status."""
    report, state = directory.error(rank), process.poll()
    if report is not None:
        how = f"failed: {report['error']}\n{report['traceback']}".rstrip("\n")
    elif state is not None and state < 0:
        how = f"{how_ended(state)}{_last_lines(directory, rank)}"
    else:
        how = f"ended with status {state} before it could report an error{_last_lines(directory, rank)}"
    return f"process {rank} of {n_processes} {how}"


def _last_lines(directory: RunDirectory, rank: int) -> str:
    try:
        lines = directory.log_path(rank).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "".join(f"\n  {line}" for line in lines[-_LOG_LINES:])


def _end(processes: _Processes, interrupts: int) -> None:
    """End all running processes, finally with SIGKILL: a process in a collective may ignore other signals."""
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
        # A process in an uninterruptible call ends after it; the error of the run must not be lost over that.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERMINATE_S)
