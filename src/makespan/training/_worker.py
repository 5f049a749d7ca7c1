"""One process of a run: ``python -m makespan.training._worker <run directory>``.

Rank and number of processes come from the launcher (``MAKESPAN_RANK``, ...) or from ``srun``
(``SLURM_PROCID``, ...). A process that fails writes why and exits with status 1; the launcher then
brings down the others.
"""

import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from makespan.training._engine import Engine
from makespan.training._files import (
    GRADIENTS,
    PROGRESS,
    REQUEST,
    RESULT,
    STOP,
    STORE,
    read_json,
    write_error,
    write_json,
)
from makespan.training._job import PhaseTimes, TrainingJob, job_from
from makespan.training._mesh import place

__all__ = ["Identity", "choose_device", "identity", "join", "main"]

_STORE_TIMEOUT_S = 120.0
_ORPHAN_CHECK_S = 0.5


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is among those of the run."""

    rank: int
    size: int
    local_rank: int
    parent: int | None


def identity(environment: Mapping[str, str] = os.environ) -> Identity:
    """Read rank, number of processes and rank within the node from the environment."""
    if "MAKESPAN_RANK" in environment:
        rank, size, parent = (
            int(environment[f"MAKESPAN_{name}"]) for name in ("RANK", "WORLD_SIZE", "PARENT")
        )
        return Identity(rank, size, rank, parent)
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    rank, size, local_rank = (int(environment[name]) for name in names)
    return Identity(rank, size, local_rank, None)


class _Run:
    """The jobs of a request, in this process."""

    def __init__(self, run_dir: Path, who: Identity) -> None:
        """Read the request and join the other processes."""
        self.run_dir, self.who = run_dir, who
        self.request: dict[str, Any] = read_json(run_dir / REQUEST)
        self.stop = False
        signal.signal(signal.SIGTERM, self._on_signal)
        torch.set_num_threads(self.request["threads"])
        torch.set_float32_matmul_precision("highest")
        self.device = choose_device(self.request["device"], who)
        join(run_dir, who, self.device, self.request["stall_timeout_s"])
        self.started_s = time.time() - float(os.environ["MAKESPAN_LAUNCHED_AT"])
        pids: list[Any] = [None] * who.size
        dist.all_gather_object(pids, os.getpid())
        self.pids = pids

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop = True

    def run(self) -> None:
        """Train every job and write what came of them."""
        results = []
        for number, values in enumerate(self.request["jobs"]):
            results.append(self._train(job_from(values), number))
            if results[-1]["stopped"]:
                break
        if self.who.rank == 0:
            write_json(results, self.run_dir / RESULT)

    def _train(self, job: TrainingJob, number: int) -> dict[str, Any]:
        begun = time.perf_counter()
        engine = Engine(job, place(job.plan, self.device))
        result: dict[str, Any] = {
            "stopped": False, "process_start_s": self.started_s, "build_s": time.perf_counter() - begun,
            "restart_cost": None, "checkpoint": None, "gradients": None, "first_step": 0, "save_s": [],
        }  # fmt: skip
        if self.request["resume"] is not None:
            self._resume(engine, result)
        self._progress(result["first_step"], float("nan"))
        losses, times = self._steps(engine, result, number)
        names = ("step_s", "forward_s", "backward_sync_s", "optimizer_s")
        result |= {
            "losses": losses,
            "times": [dict(zip(names, row, strict=True)) for row in self._means(times)],
        }
        result |= {"device": self._device_name(), "peak_memory_bytes": self._peak_memory()}
        return result

    def _resume(self, engine: Engine, result: dict[str, Any]) -> None:
        from makespan.training._checkpoint import load

        source = self.request["resume"]
        load_s = load(engine, Path(source["path"]), source["step"]) + source["verify_s"]
        result["first_step"] = source["step"]
        result["restart_cost"] = {
            "save_s": source["save_s"],
            "process_start_s": result["process_start_s"],
            "build_s": result["build_s"],
            "load_s": load_s,
        }

    def _steps(
        self, engine: Engine, result: dict[str, Any], number: int
    ) -> tuple[list[float], list[PhaseTimes]]:
        job, losses, times = engine.job, [], []
        for step in range(result["first_step"], job.steps):
            loss, stop, time_s = engine.step(step, self._must_stop())
            losses.append(loss)
            times.append(time_s)
            if len(losses) == 1 and self.request["keep_gradients"]:
                result["gradients"] = self._keep_gradients(engine, number)
            done = step + 1
            self._progress(done, loss)
            result["stopped"] = stop and done < job.steps
            ends = result["stopped"] or done == job.steps
            due = job.checkpoint_every > 0 and done % job.checkpoint_every == 0
            if self.request["checkpoint_dir"] is not None and (ends or due):
                from makespan.training._checkpoint import save

                path, save_s = save(engine, Path(self.request["checkpoint_dir"]), done)
                result["checkpoint"] = str(path)
                result["save_s"].append(save_s)
            if ends:
                break
        return losses, times

    def _must_stop(self) -> bool:
        return self.stop or (self.who.rank == 0 and (self.run_dir / STOP).exists())

    def _progress(self, step: int, loss: float) -> None:
        if self.who.rank == 0:
            values = {"step": step, "loss": loss, "time_s": time.time(), "pids": self.pids}
            write_json(values, self.run_dir / PROGRESS)

    def _keep_gradients(self, engine: Engine, number: int) -> str:
        """Write the gradients of all processes into one file; those held twice are equal."""
        gathered: list[Any] | None = [None] * self.who.size if self.who.rank == 0 else None
        dist.gather_object(engine.full_gradients(), gathered)
        path = self.run_dir / f"{number}-{GRADIENTS}"
        if gathered is not None:
            arrays = {name: tensor.numpy() for part in gathered for name, tensor in part.items()}
            np.savez(path, allow_pickle=False, **arrays)
        return str(path)

    def _means(self, times: list[PhaseTimes]) -> list[list[float]]:
        rows = [[one.step_s, one.forward_s, one.backward_sync_s, one.optimizer_s] for one in times]
        total = torch.tensor(rows, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        means: list[list[float]] = (total / self.who.size).tolist()
        return means

    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def _peak_memory(self) -> int:
        if self.device.type == "cuda":
            used = torch.cuda.max_memory_allocated(self.device)
        else:
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        largest = torch.tensor(used, dtype=torch.int64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest.item())


def choose_device(kind: str, who: Identity) -> torch.device:
    """Return the device of this process: the CPU, or the GPU of its rank within the node."""
    if kind == "cpu":
        return torch.device("cpu")
    index = who.local_rank if torch.cuda.device_count() > 1 else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def join(run_dir: Path, who: Identity, device: torch.device, timeout_s: float) -> None:
    """Meet the other processes: the first one opens a port that is free and writes its address."""
    timeout = timedelta(seconds=timeout_s)
    if who.rank == 0:
        host = "127.0.0.1" if who.parent is not None else socket.gethostname()
        store = TCPStore(host, 0, who.size, True, timeout, wait_for_workers=False)
        write_json({"host": host, "port": store.port}, run_dir / STORE)
    else:
        address = _wait_for(run_dir / STORE)
        store = TCPStore(address["host"], address["port"], who.size, False, timeout)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=who.rank, world_size=who.size, timeout=timeout)


def _wait_for(path: Path) -> dict[str, Any]:
    deadline = time.monotonic() + _STORE_TIMEOUT_S
    while time.monotonic() < deadline:
        values: dict[str, Any] | None = read_json(path)
        if values is not None:
            return values
        time.sleep(0.01)
    raise TimeoutError(f"the first process wrote no address within {_STORE_TIMEOUT_S:g} s")


def _watch_parent(parent: int) -> None:
    """End this process when the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_S)
    os._exit(1)


def main(run_dir: Path) -> int:
    """Run this process's part of the request in a directory and return its exit status."""
    who = identity()
    if os.environ.get("MAKESPAN_CPUS"):
        os.sched_setaffinity(0, {int(cpu) for cpu in os.environ["MAKESPAN_CPUS"].split(",")})
    if who.parent is not None:
        threading.Thread(target=_watch_parent, args=(who.parent,), daemon=True).start()
    try:
        _Run(run_dir, who).run()
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the launcher must hear of it
        write_error(error, run_dir, who.rank)
        return 1
    return 0


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the usual clean-up, which may wait for processes that are gone.
    os._exit(status)
