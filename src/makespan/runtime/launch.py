"""What a measurement was made on: processor, memory, devices, libraries, and who else was busy."""

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
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Protocol

from makespan.cleanup import temporary_directory
from makespan.errors import InputError, LostWorkerError, MakespanError, WorkerError
from makespan.files import read_json, write_json
from makespan.runtime.forkserver import Process, can_fork, fork_worker

# ------------------------------------------------------------------------------------------------
# What a measurement was made on: processor, memory, devices, libraries, and who else was busy.

_LIBRARIES = ("makespan", "numpy", "torch")
_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION")
_QUERY_LIMIT_S = 30


def describe_machine() -> dict[str, Any]:
    """Describe this machine in plain values, for the record beside a measurement.

    ``cpus`` are those usable by this process, ``gpus`` those that the tool of the driver lists, whoever uses
    them, ``visible_devices`` those granted to this process (None without a grant), ``load`` is the mean
    number of processes that wanted to run over the last minute.
    """
    return {
        "processor": _processor(),
        "cpus": usable_cpus(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpus": _gpus_of_driver(),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "slurm": {name: os.environ[name] for name in _SLURM if name in os.environ},
        "load": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def usable_cpus() -> int:
    """CPUs that this process may run on, counted."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Memory of the machine [B]."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gpu_names(places: Sequence[int]) -> str:
    """Name GPUs, given by their places among those granted to this process, as CUDA wants to be told."""
    granted = _granted_gpus()
    if granted is None:
        return ",".join(map(str, places))
    if beyond := [place for place in places if place >= len(granted)]:
        raise InputError(f"GPU {beyond[0]}, but {len(granted)} granted; accepted: places from 0 on")
    return ",".join(granted[place] for place in places)


def _granted_gpus() -> list[str] | None:
    """Names in ``CUDA_VISIBLE_DEVICES``, None where it is not set; like CUDA, none after a number below 0."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return None
    names = [one.strip() for one in named.split(",")]
    return list(takewhile(lambda one: bool(one) and not one.startswith("-"), names))


def _gpus_of_driver() -> list[dict[str, str]]:
    """Name, memory and driver of each GPU, with the keys of nvidia-smi; empty where there is no driver."""
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


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


# ------------------------------------------------------------------------------------------------
# GPUs as torch counts them: the one place that says what there is, asked in a process that would use them.
#
# Variables such as ``CUDA_VISIBLE_DEVICES`` and the tools of a driver say what was granted or built in.
# Whether torch can use it, which may be built for the CPU alone, only torch knows.


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of a process.

    Parameters
    ----------
    memory_bytes
        Memory of each [B].
    source
        Torch as it was found, with its version, and what it was granted.
    """

    memory_bytes: Sequence[float]
    source: str

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return len(self.memory_bytes)


def gpus_of_torch() -> Gpus:
    """GPUs that torch can use in this process, which loads it."""
    try:
        import torch
    except ImportError as error:
        return Gpus((), f"torch cannot be imported ({error})")
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory: list[Any] = [torch.cuda.get_device_properties(index).total_memory for index in range(n_gpus)]
    return Gpus([float(one) for one in memory], _source(torch))


def gpu_of(local_rank: int, gpus: Gpus) -> int:
    """Index of the GPU that a process uses, from its number among those of its node.

    The only GPU is that of each process: Slurm may have granted each its own.

    Raises
    ------
    InputError
        There is none for it.
    """
    index = local_rank if gpus.count > 1 else 0
    if index >= gpus.count:
        found = f"device cuda: process {local_rank} of its node, but {gpus.count} GPU(s) at hand"
        raise InputError(f"{found} ({gpus.source}); accepted: one GPU for each process, or cpu")
    return index


def _source(torch: Any) -> str:
    """Version of torch, and why it may see fewer GPUs than there are."""
    if not (torch.version.cuda or torch.version.hip):
        return f"torch {torch.__version__} is built without CUDA"
    granted = os.environ.get("CUDA_VISIBLE_DEVICES")
    limit = "" if granted is None else f" with CUDA_VISIBLE_DEVICES={granted}"
    return f"as torch {torch.__version__} counts them{limit}"


# ------------------------------------------------------------------------------------------------
# The directory of a run: where its processes, and those that started them, leave word for each other.

_OF_A_RUN = (
    "request.json", "result-*.json", "progress.json", "stop", "met-*.json", "store-*.json", "error-*.json",
    "lost-*.json", "log-*.txt", "alive-*", "ready-*", "beat-*",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Files by which the processes of a run are asked, watched and stopped; all must see them.

    Every file is whole or not there. Values are plain: what JSON can hold.
    """

    path: Path

    def prepare(self, request: Any) -> None:
        """Create the directory, remove what an earlier run left, and write the request of a new one."""
        self.path.mkdir(parents=True, exist_ok=True)
        for pattern in _OF_A_RUN:
            for path in self.path.glob(pattern):
                path.unlink()
        write_json(request, self.path / "request.json")

    def request(self) -> Any:
        """Request of the run."""
        return read_json(self.path / "request.json")

    def write_result(self, result: Any, number: int = 0) -> None:
        """Write what came of the run, or of one of its jobs by number; one process does."""
        write_json(result, self.path / f"result-{number}.json")

    def result(self, number: int = 0) -> Any:
        """Outcome of the run, or of one of its jobs; None before it is written."""
        return read_json(self.path / f"result-{number}.json")

    def write_progress(self, values: Any) -> None:
        """Write a heartbeat; one process does, and the time without one is limited."""
        write_json(values, self.path / "progress.json")

    def progress(self) -> Any:
        """Newest heartbeat; None before the first."""
        return read_json(self.path / "progress.json")

    def write_beat(self, rank: int) -> None:
        """Say that a process has got a piece further; the time without that is limited, too."""
        (self.path / f"beat-{rank}").touch()

    def write_sign_of_life(self, rank: int) -> None:
        """Say that a process is there, whatever it is doing."""
        (self.path / f"alive-{rank}").touch()

    def remove_sign_of_life(self, rank: int) -> None:
        """Say that a process gives no more signs, because it ends."""
        (self.path / f"alive-{rank}").unlink(missing_ok=True)

    def signs_of_life_ns(self) -> dict[int, int]:
        """Time of the newest sign of life of each process that gives some, by rank [ns]."""
        found = {}
        for path in self.path.glob("alive-*"):
            with suppress(FileNotFoundError):
                found[int(path.name.partition("-")[2])] = path.stat().st_mtime_ns
        return found

    def write_ready(self, rank: int) -> None:
        """Say that a process is about to meet the others for the first time."""
        (self.path / f"ready-{rank}").touch()

    def n_ready(self) -> int:
        """Return how many processes are about to meet, or have met."""
        return sum(1 for _ in self.path.glob("ready-*"))

    def request_stop(self) -> None:
        """Ask the processes to end when they can."""
        (self.path / "stop").touch()

    def is_stop_requested(self) -> bool:
        """Whether someone asked the processes to end."""
        return (self.path / "stop").exists()

    def write_meeting(self, meeting: int, pids: list[int]) -> None:
        """Write that the processes have met, with the process id of each; from then on stalls count."""
        write_json(pids, self.path / f"met-{meeting}.json")

    def meeting(self, number: int = 0) -> list[int] | None:
        """Process ids of those who met, by rank in the meeting; None before they have."""
        pids: list[int] | None = read_json(self.path / f"met-{number}.json")
        return pids

    def store_path(self, meeting: int) -> Path:
        """Path of the address at which the processes of a meeting find each other."""
        return self.path / f"store-{meeting}.json"

    def log_path(self, rank: int) -> Path:
        """Path of the output of a local process."""
        return self.path / f"log-{rank}.txt"

    def write_error(self, rank: int, error: BaseException) -> None:
        """Report why a process failed, with the time and the traceback of what is being handled.

        There is none of our own errors, whose message says what was found and what is accepted.
        """
        report = {"time_s": time.time(), "error": f"{type(error).__name__}: {error}"}
        trace = "" if isinstance(error, MakespanError) else traceback.format_exc()
        write_json(report | {"traceback": trace}, self.path / f"error-{rank}.json")

    def error(self, rank: int) -> Any:
        """Report of a process that failed: ``time_s``, ``error``, ``traceback``; None without one."""
        return read_json(self.path / f"error-{rank}.json")

    def write_lost(self, rank: int, reason: str) -> None:
        """Tell the processes that go on that one is gone, and why."""
        write_json(reason, self.path / f"lost-{rank}.json")

    def lost(self) -> dict[int, str]:
        """Who is gone, by rank, with the reason."""
        ranks = sorted(int(path.stem.partition("-")[2]) for path in self.path.glob("lost-*.json"))
        return {rank: read_json(self.path / f"lost-{rank}.json") for rank in ranks}

    def last_beat_ns(self) -> int | None:
        """Time of the newest heartbeat or meeting [ns]; None before the processes have met."""
        times = []
        places = (self.path.glob(pattern) for pattern in ("met-*.json", "beat-*"))
        for path in (self.path / "progress.json", *(path for found in places for path in found)):
            with suppress(FileNotFoundError):
                times.append(path.stat().st_mtime_ns)
        return max(times, default=None)


# ------------------------------------------------------------------------------------------------
# Start the processes of a run, whatever they do, on this machine or through Slurm, and watch them.
#
# When one is lost all end with its error, or the others are told.

_SRUN_INTERRUPTS = 2
"""Interrupts within a second that make srun end its tasks."""
_POLL_S = 0.02
_GRACE_S = 0.5
_TERMINATE_S = 5.0
_LOG_LINES = 5
_PYTHON = (sys.executable,)
_GPU_PROBE = "makespan.runtime.gpu_probe"
_OF_ONE_PROCESS = ("MAKESPAN_RANK", "MAKESPAN_WORLD_SIZE", "MAKESPAN_LOCAL_RANK", "MAKESPAN_PARENT",
                   "MAKESPAN_CPUS")  # fmt: skip
_Processes = Sequence[Process]
OnLoss = Literal["end", "tell"]


_NO_LIMIT_S = 20 * 24 * 3600.0
"""Longest wait of a process where a run has no limit [s]; some libraries count it in 31 bits of ms."""
_PAUSE_S = 5.0
"""If a launcher has not looked at its processes for so long [s], it was paused itself, maybe they too."""


@dataclass(frozen=True, slots=True)
class _Limits:
    """Longest times [s] that a launcher allows; see `LocalLauncher`."""

    timeout_s: float | None
    stall_timeout_s: float
    meet_timeout_s: float
    silence_timeout_s: float


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """What one process of a run gets for itself.

    Parameters
    ----------
    environment
        Variables beside those that all get.
    threads, cpus
        CPU threads, and CPUs to which it is bound; None for those of the launcher.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """What is started.

    Parameters
    ----------
    worker
        Module of the worker, or its command; the run directory is its last argument.
    request, n_processes, run_dir
        Plain values that the processes find in the directory of the run, which all see.
    threads
        CPU threads a process where neither the launcher nor the options say.
    options
        What each process gets for itself, by rank; empty for nothing.
    on_loss
        ``end``: when a process fails all end; ``tell``: the others find it in the directory and go on,
        and the run is well if one of them ends well.
    on_beat
        Called here, in the process that waits, soon after each heartbeat.
    """

    worker: str | Sequence[str]
    request: Any
    n_processes: int
    run_dir: Path
    threads: int = 1
    options: Sequence[ProcessOptions] = ()
    on_loss: OnLoss = "end"
    on_beat: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        """Check the options."""
        found, wanted = len(self.options), self.n_processes
        if found not in (0, wanted):
            raise InputError(f"options of {found} processes; accepted: none, or those of {wanted}")

    def command(self, interpreter: Sequence[str]) -> list[str]:
        """Command of each process."""
        module = [*interpreter, "-m", self.worker] if isinstance(self.worker, str) else self.worker
        return [*module, str(self.run_dir)]

    def own_variables(self, rank: int, threads: int | None) -> dict[str, str]:
        """Environment of one process beside what all share."""
        own = self.options[rank] if self.options else ProcessOptions()
        found = {"MAKESPAN_RANK": str(rank), "MAKESPAN_WORLD_SIZE": str(self.n_processes)}
        if own.cpus is not None:
            found["MAKESPAN_CPUS"] = _listed(own.cpus)
        return found | _thread_variables(own.threads or threads or self.threads) | dict(own.environment)


class Launcher(Protocol):
    """What starts the processes of a run."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Kind of device that each process uses."""

    @property
    def n_devices(self) -> int | None:
        """Devices at hand, None if there is no limit."""

    def run(self, launch: Launch) -> dict[int, str]:
        """Start the processes and wait for their end.

        Returns the processes that were lost, by rank, with the reason. A `WorkerError` says that a
        process died where a loss ends all, hung or could not start, or that none is left.
        """

    def start(self, launch: Launch, rank: int) -> Process:
        """Start one process of a run whose directory is prepared, also one more than the launch has."""

    def end(self, process: Process) -> None:
        """End a process that was started so, even one that hangs."""


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Processes on this machine.

    Parameters
    ----------
    device
        ``cpu`` (gloo) or ``cuda`` (NCCL, one GPU a process).
    threads_per_process
        CPU threads; None for what the run asks for.
    cpus, gpus
        CPUs to which all are bound, None for no binding; GPUs by place among those granted, None for all.
    timeout_s
        The run is brought down when it takes longer [s]; None for no limit.
    stall_timeout_s
        The run is brought down when none of its processes has made progress for so long after they met [s].
    meet_timeout_s
        The run is brought down when all processes are ready to meet and have not met for so long [s].
    silence_timeout_s
        A process that gives no sign of life for so long counts as killed [s]: one that is stopped, or whose
        machine does not answer. A process that computes or waits gives one every second.
    interpreter
        What runs the module of a worker.
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
        """GPUs at hand, as torch counts them; None on CPU, where processes may share one."""
        if self.device == "cpu":
            return None
        count = local_gpus(self.interpreter).count
        return count if self.gpus is None else sum(place < count for place in self.gpus)

    def run(self, launch: Launch) -> dict[int, str]:
        """Run processes of this machine, each with a GPU of its own if any; see `Launcher.run`."""
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
        environment = shared | launch.own_variables(rank, self.threads_per_process)
        log = RunDirectory(launch.run_dir).log_path(rank)
        # What uses a GPU starts from nothing: its driver does not survive a fork.
        worker = launch.worker if self.device == "cpu" and tuple(self.interpreter) == _PYTHON else None
        if can_fork(worker):
            return fork_worker(worker, str(launch.run_dir), environment, log)
        return _start(launch.command(self.interpreter), environment, log)

    def end(self, process: Process) -> None:
        """End a process that may hang."""
        process.kill()


@dataclass(frozen=True, slots=True)
class SlurmLauncher:
    """Processes started by ``srun``, inside an allocation or with one of their own.

    Processes that get something for themselves, or that may be lost alone, are one step each.

    Parameters
    ----------
    options
        Further options of ``srun``, for example ``("--nodes=2", "--gres=gpu:a800:8")``.
    device, threads_per_process, timeout_s, stall_timeout_s, meet_timeout_s, silence_timeout_s, interpreter
        As for `LocalLauncher`; waiting for an allocation counts for ``timeout_s``. Files of other machines
        may be seen a minute late.
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
        """Devices at hand; Slurm decides, so None."""
        return None

    def run(self, launch: Launch) -> dict[int, str]:
        """Run tasks of Slurm; see `Launcher.run`."""
        limits = _limits(self)
        if launch.options or launch.on_loss == "tell":
            return _run(launch, launch.n_processes, self.start, limits, _SRUN_INTERRUPTS)
        return _run(launch, 1, self._start_together, limits, _SRUN_INTERRUPTS)

    def start(self, launch: Launch, rank: int) -> Process:
        """Start one process as a step of its own; see `Launcher.start`."""
        own = launch.own_variables(rank, self.threads_per_process)
        return self._step(launch, rank, ["--ntasks=1", "--exact"], own)

    def end(self, process: Process) -> None:
        """End a step whose task may hang; srun has to end before its task does."""
        _end([process], _SRUN_INTERRUPTS)

    def _start_together(self, launch: Launch, rank: int) -> Process:
        tasks = [f"--ntasks={launch.n_processes}", "--kill-on-bad-exit=1"]
        return self._step(launch, rank, tasks, _thread_variables(self.threads_per_process or launch.threads))

    def _step(self, launch: Launch, rank: int, tasks: Sequence[str], own: dict[str, str]) -> Process:
        command = ["srun", *tasks, *self.options, *launch.command(self.interpreter)]
        environment = _run_variables(self.device, self.timeout_s) | own
        return _start(command, environment, RunDirectory(launch.run_dir).log_path(rank))


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
    """Start so many processes and watch them."""
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
    """GPUs of this machine that processes started here can use; torch is asked in such a process."""
    return _probed(tuple(interpreter), os.environ.get("CUDA_VISIBLE_DEVICES"))


@cache
def _probed(interpreter: tuple[str, ...], granted: str | None) -> Gpus:
    """Answer of a process; ``granted`` is what it inherits, by which answers differ."""
    with temporary_directory("gpus") as directory:
        LocalLauncher(interpreter=interpreter).run(Launch(_GPU_PROBE, {}, 1, directory))
        return Gpus(**RunDirectory(directory).result()["gpus"])


def slurm_device(launcher: SlurmLauncher, n_processes: int, run_dir: Path) -> Literal["cpu", "cuda"]:
    """Device for tasks of Slurm: GPUs if each of so many has one of its own that its torch can use.

    The tasks are asked, which may run on other machines; all see the ``run_dir``.
    """
    launch = Launch(_GPU_PROBE, {}, n_processes, run_dir)
    launcher.run(launch)
    answers = [RunDirectory(run_dir).result(rank) for rank in range(n_processes)]
    return "cuda" if all(answer["has_own"] for answer in answers) else "cpu"


def local_launcher(device: Literal["auto", "cpu", "cuda"], n_processes: int) -> LocalLauncher:
    """Launcher for this machine; ``auto`` takes GPUs where there is one for each process, else the CPU."""
    if device == "auto":
        device = "cuda" if local_gpus().count >= n_processes else "cpu"
    return LocalLauncher(device)


def check_gpus(launcher: Launcher, n_processes: int) -> None:
    """Check that processes have a GPU each, if they use any; an `InputError` says how many there are."""
    if (n_devices := launcher.n_devices) is not None and n_processes > n_devices:
        found = f"device {launcher.device}: {n_processes} process(es), but {n_devices} GPU(s) at hand"
        source = (
            f" ({local_gpus(launcher.interpreter).source})" if isinstance(launcher, LocalLauncher) else ""
        )
        raise InputError(f"{found}{source}; accepted: one GPU for each process, or cpu")


def _run_variables(device: str, timeout_s: float | None) -> dict[str, str]:
    """Environment that all processes of a run share."""
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_ONE_PROCESS}
    return inherited | {
        "MAKESPAN_DEVICE": device,
        # Not that of a stall, which is nobody's before all have met.
        "MAKESPAN_TIMEOUT_S": repr(_NO_LIMIT_S if timeout_s is None else timeout_s),
        "MAKESPAN_LAUNCHED_AT": repr(time.time()),
        "PYTHONUNBUFFERED": "1",
    }


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


def _watch(launch: Launch, processes: _Processes, limits: _Limits, interrupts: int) -> dict[int, str]:
    """Wait for the end of all processes, in the way that the launch asks for, or end a run that hangs."""
    directory, n_processes, begun = RunDirectory(launch.run_dir), launch.n_processes, time.monotonic()
    signs, beat, beat_time, ready_time, looked = _Signs(directory, processes, begun), None, begun, None, begun
    lost: dict[int, str] = {}
    try:
        while True:
            states = [process.poll() for process in processes]
            failed = [rank for rank, state in enumerate(states) if state and rank not in lost]
            if failed and launch.on_loss == "end":
                time.sleep(_GRACE_S)
                raise _failure(processes, directory, n_processes)
            for rank in failed:
                lost[rank] = signs.silent.get(rank) or _cause(processes[rank], directory, rank, n_processes)
                directory.write_lost(rank, lost[rank])
            if None not in states:
                if len(lost) == len(states):
                    raise WorkerError(f"no process is left; the first: {next(iter(lost.values()))}")
                return lost
            now = time.monotonic()
            if now - looked > _PAUSE_S:
                beat_time, ready_time = now, None if ready_time is None else now
                signs.forgive(now)
            looked = now
            if (latest := directory.last_beat_ns()) != beat:
                beat, beat_time = latest, now
                launch.on_beat()
            if limits.timeout_s is not None and now - begun > limits.timeout_s:
                raise WorkerError(f"the run took longer than {limits.timeout_s:g} s and was brought down")
            if beat is not None and now - beat_time > limits.stall_timeout_s:
                limit = f"{limits.stall_timeout_s:g} s (stall_timeout_s)"
                raise LostWorkerError(f"no progress within {limit}; the run was brought down")
            if beat is None and ready_time is None and directory.n_ready() == n_processes:
                ready_time = now
            if beat is None and ready_time is not None and now - ready_time > limits.meet_timeout_s:
                found = f"{n_processes} processes were ready and did not meet"
                raise WorkerError(
                    f"{found} within {limits.meet_timeout_s:g} s; check that they reach each other by network"
                )
            for rank in signs.look(now, limits.silence_timeout_s, n_processes):
                if launch.on_loss == "end" or len(processes) < n_processes:
                    raise LostWorkerError(signs.silent[rank])
                processes[rank].kill()
            time.sleep(_POLL_S)
    finally:
        _end(processes, interrupts)


class _Signs:
    """When each process of a run was last seen alive: by its sign, or by the CPU time that it takes."""

    def __init__(self, directory: RunDirectory, processes: _Processes, begun: float) -> None:
        self._directory, self._processes, self._looked = directory, processes, begun
        self._seen = dict[int, tuple[object, float]]()
        self.silent: dict[int, str] = {}

    def forgive(self, now: float) -> None:
        """Count from now, because it is this process that was away."""
        self._seen = {rank: (sign, now) for rank, (sign, _) in self._seen.items()}

    def look(self, now: float, limit_s: float, n_processes: int) -> list[int]:
        """Return processes that are newly silent for too long; why, is in ``silent``."""
        if now - self._looked < min(1.0, limit_s / 4):
            return []
        self._looked, found = now, []
        for rank, sign_ns in self._directory.signs_of_life_ns().items():
            if rank in self.silent:
                continue
            has_own = len(self._processes) == n_processes and rank < n_processes
            if has_own and self._processes[rank].poll() is not None:
                continue
            sign = sign_ns, _cpu_ticks(self._processes[rank].pid) if has_own else None
            before, since = self._seen.get(rank, (None, now))
            if sign != before:
                self._seen[rank] = sign, now
            elif now - since > limit_s:
                self.silent[rank] = (
                    f"process {rank} of {n_processes} gave no sign of life for {limit_s:g} s "
                    "and counts as killed"
                )
                found.append(rank)
        return found


def _cpu_ticks(pid: int) -> int | None:
    """CPU time of a process of this machine, in ticks; None where it cannot be known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])


def _failure(processes: _Processes, directory: RunDirectory, n_processes: int) -> WorkerError:
    """Build the error of a run of which a process failed."""
    text = _first_cause(processes, directory, n_processes)
    silent = [one.poll() or 0 for rank, one in enumerate(processes) if directory.error(rank) is None]
    is_lost = len(processes) == n_processes and any(state < 0 for state in silent)
    return LostWorkerError(text) if is_lost else WorkerError(text)


def _first_cause(processes: _Processes, directory: RunDirectory, n_processes: int) -> str:
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


def _cause(process: Process, directory: RunDirectory, rank: int, n_processes: int) -> str:
    report, state = directory.error(rank), process.poll()
    if report is not None:
        how = f"failed: {report['error']}\n{report['traceback']}".rstrip("\n")
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


def _end(processes: _Processes, interrupts: int) -> None:
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
