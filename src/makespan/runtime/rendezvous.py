"""Worker side of a run: identity of the process, rendezvous with the others, and final report.

Rank and number of processes come from the launcher (``MAKESPAN_RANK``, ...) or from ``srun``
(``SLURM_PROCID``, ...). Only the functions that need torch import it.
"""

import fcntl
import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from makespan.cleanup import end_with_parent
from makespan.errors import InputError
from makespan.files import read_json, write_json
from makespan.runtime.launch import RunDirectory, gpu_of, gpus_of_torch
from makespan.runtime.links import PeerLinks

if TYPE_CHECKING:
    import torch

_LIFE_S = 1.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Rank and resources of one process of a run.

    Parameters
    ----------
    rank, size, local_rank
        Its number, the number of processes, and its number among the processes of its node.
    device, threads
        ``cpu`` or ``cuda``; CPU threads.
    timeout_s, launched_s
        Longest wait for other processes, which is the limit of the run [s]; time of the launch [s since the
        epoch].
    parent, cpus
        Process id of a launcher on the same machine, None for a remote one; CPUs to which the process is
        bound, None for all.
    """

    rank: int
    size: int
    local_rank: int
    device: str
    threads: int
    timeout_s: float
    launched_s: float
    parent: int | None
    cpus: tuple[int, ...] | None


def identity(environment: Mapping[str, str] = os.environ) -> Identity:
    """Return the identity of this process, from the variables of the launcher or of ``srun``."""
    by_launcher = "MAKESPAN_RANK" in environment
    rank, size = ("MAKESPAN_RANK", "MAKESPAN_WORLD_SIZE") if by_launcher else ("SLURM_PROCID", "SLURM_NTASKS")
    local_rank = "MAKESPAN_LOCAL_RANK" if "MAKESPAN_LOCAL_RANK" in environment else "SLURM_LOCALID"
    parent, cpus = environment.get("MAKESPAN_PARENT"), environment.get("MAKESPAN_CPUS")
    return Identity(
        rank=int(environment[rank]),
        size=int(environment[size]),
        local_rank=int(environment[local_rank]),
        device=environment["MAKESPAN_DEVICE"],
        threads=int(environment["MAKESPAN_THREADS"]),
        timeout_s=float(environment["MAKESPAN_TIMEOUT_S"]),
        launched_s=float(environment["MAKESPAN_LAUNCHED_AT"]),
        parent=None if parent is None else int(parent),
        cpus=tuple(map(int, cpus.split(","))) if cpus else None,
    )


def choose_device(who: Identity) -> "torch.device":
    """Return the device of this process: the CPU, or the GPU of its rank within the node.

    Raises an `InputError` if torch has no GPU for it.
    """
    import torch

    if who.device == "cpu":
        return torch.device("cpu")
    index = gpu_of(who.local_rank, gpus_of_torch())
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def check_device(device: "torch.device") -> None:
    """Compute something on a device, and raise the error if it cannot: some errors make a GPU unusable."""
    import torch

    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        with module.stream(module.Stream(device)):  # others may wait for processes that are lost
            torch.zeros(1, device=device).item()


def gpu_name(device: "torch.device") -> str:
    """Return the name of a GPU, as its driver has it; empty for a CPU."""
    return "" if device.type == "cpu" else str(_properties(device).name)


def hold_gpu(directory: RunDirectory, device: "torch.device", *, is_free: bool) -> None:
    """Hold the GPU of this process until it has ended; on a CPU, do nothing.

    With ``is_free``, an `InputError` is raised if another process of the run holds that GPU. Only a launcher
    on this machine gives processes GPUs by number, and may give several the same one.
    """
    if device.type == "cpu":
        return
    gpu = _properties(device)
    handle = os.open(directory.path / f"gpu-{gpu.uuid}", os.O_RDWR | os.O_CREAT, 0o644)  # never closed
    if is_free:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"another process of the run has the GPU of this one, {gpu.name} ({gpu.uuid}); expected a "
                "free one, by its number in CUDA_VISIBLE_DEVICES or by --gres=gpu:1 for each step of Slurm"
            ) from None
    fcntl.flock(handle, fcntl.LOCK_SH)


def _properties(device: "torch.device") -> Any:
    import torch

    return torch.get_device_module(device).get_device_properties(device)


def join(
    directory: RunDirectory, who: Identity, *, members: Sequence[int] | None = None, meeting: int = 0
) -> list[int]:
    """Form the process group of ``torch.distributed`` with other processes, and return their process ids.

    With GPUs, NCCL handles tensors on the GPU of each process and gloo tensors in host memory. The first
    member opens a free port and writes its address into the directory; the others raise a `TimeoutError`
    without an address. Processes that survive the loss of one destroy the group and call this again.

    Parameters
    ----------
    members, meeting
        Ranks of the processes that meet, in the order of their ranks in the group, None for all; number of
        the meeting, a new number each time.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(who.threads)
    choose_device(who)  # before the group forms, or all processes of a node would meet on its first GPU
    ranks = list(range(who.size)) if members is None else list(members)
    timeout, rank = timedelta(seconds=who.timeout_s), ranks.index(who.rank)
    if members is None:
        directory.write_ready(who.rank)
    store = _store(directory.store_path(meeting), who, rank, len(ranks), timeout)
    backend = "gloo" if who.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=len(ranks), timeout=timeout)
    pids: list[Any] = [None] * len(ranks)
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        directory.write_meeting(meeting, pids)
    return pids


def linked(who: Identity) -> PeerLinks | None:
    """Return links between the processes that `join` has brought together, on the CPUs of one machine.

    Links are faster there than the collectives of gloo, see `makespan.runtime.memory`. The answer is None for
    processes with GPUs and for those of `srun`, which may be on several machines: the group serves them.
    """
    if who.device != "cpu" or who.parent is None:
        return None
    return PeerLinks(who.rank, who.size, _GroupBoard(), 0, who.timeout_s)


class _GroupBoard:
    """Values that processes share through their process group, which lasts as long as they do."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def offer(self, generation: int, key: str, value: bytes) -> None:
        """Set a value, together with all others."""
        import torch.distributed as dist

        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (key, value))
        self._values.update(every)

    def wait(self, generation: int, key: str, timeout_s: float) -> bytes:
        """Return a value."""
        return self._values[key]

    def has(self, generation: int, key: str) -> bool:
        """Tell whether a value is set; no generation follows."""
        return key in self._values


def _store(path: Path, who: Identity, rank: int, size: int, timeout: timedelta) -> Any:
    """Open, or connect to, the key-value store of a meeting, where processes exchange addresses."""
    # The stubs of torch lack the public TCPStore.
    tcp_store = importlib.import_module("torch.distributed").TCPStore
    if rank == 0:
        # Port 0 requests a free port, so runs on one machine never collide; the file has its number.
        host = "127.0.0.1" if who.parent is not None else socket.gethostname()
        store = tcp_store(host, 0, size, True, timeout, wait_for_workers=False)
        write_json({"host": host, "port": store.port}, path)
        return store
    deadline = time.monotonic() + who.timeout_s
    while (address := read_json(path)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out after {who.timeout_s:g} s waiting for the address in {path}")
        time.sleep(0.01)
    return tcp_store(address["host"], address["port"], size, False, timeout)


def run_worker(run_dir: str | Path, body: Callable[[RunDirectory, Identity], None]) -> int:
    """Run ``body``, the main function of this process, and return the exit status.

    The process is bound to its CPUs, gives signs of life, and exits when the launcher has ended. An exception
    is written into the directory for the launcher.
    """
    who, directory = identity(), RunDirectory(Path(run_dir))
    if who.cpus is not None:
        os.sched_setaffinity(0, who.cpus)
    if who.parent is not None:
        end_with_parent(who.parent)
    ended = threading.Event()
    directory.write_sign_of_life(who.rank)  # the first sign does not depend on the thread
    threading.Thread(target=_live, args=(directory, who.rank, ended), daemon=True).start()
    try:
        body(directory, who)
    except BaseException as error:  # noqa: BLE001 - every failure must reach the launcher
        directory.write_error(who.rank, error)
        return 1
    finally:
        ended.set()
        with suppress(OSError):
            directory.remove_sign_of_life(who.rank)
    return 0


def _live(directory: RunDirectory, rank: int, ended: threading.Event) -> None:
    """Give signs of life until this process has finished."""
    while not ended.is_set():
        with suppress(OSError):  # the thread survives a full disk and a removed directory
            directory.write_sign_of_life(rank)
        ended.wait(_LIFE_S)


def end_worker(status: int) -> NoReturn:
    """Exit at once; the usual clean-up could wait for processes that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
