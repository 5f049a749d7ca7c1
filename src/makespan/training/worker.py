"""Worker process of a training run: ``python -m makespan.training.worker <run directory>``."""

import resource
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from makespan.runtime import (
    Identity,
    RunDirectory,
    choose_device,
    end_worker,
    finish_checkpoint,
    join,
    run_worker,
    start_checkpoint,
)
from makespan.training.engine import Engine, mesh_coordinate
from makespan.training.run import PhaseTimes, TrainingJob, job_from, job_values

PRELOAD = ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict_loader", "torch._dynamo")
"""Modules that load slowly and that runs with several processes use: a fork server loads them once."""
_TIMES = ("step_s", "forward_s", "backward_sync_s", "optimizer_s")


class _Run:
    """Jobs of a request, as this process runs them."""

    def __init__(self, directory: RunDirectory, who: Identity) -> None:
        self.directory, self.who = directory, who
        self.request: dict[str, Any] = directory.request()
        self.stop = False
        signal.signal(signal.SIGTERM, self._on_signal)
        torch.set_float32_matmul_precision("highest")
        self.device = choose_device(who)
        self.pids = join(directory, who)
        self.started_s = time.time() - who.launched_s

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop = True

    def run(self) -> None:
        """Train every job and write its result at its end."""
        for number, values in enumerate(self.request["jobs"]):
            result = self._train(job_from(values), number)
            if self.who.rank == 0:
                self.directory.write_result(result, number)
            if result["stopped"]:
                break

    def _train(self, job: TrainingJob, number: int) -> dict[str, Any]:
        begun = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # forget the peak of the previous job
        engine = Engine(job, mesh_coordinate(job.plan, self.device))
        result: dict[str, Any] = {
            "stopped": False, "process_start_s": self.started_s, "build_s": time.perf_counter() - begun,
            "restart_cost": None, "checkpoint": None, "gradients": None, "first_step": 0, "save_s": [],
            "paces_s": [],
        }  # fmt: skip
        if self.request["resume"] is not None:
            self._resume(engine, result)
        self._progress(result["first_step"], float("nan"))
        losses, times = self._steps(engine, result, number)
        result |= {"losses": losses, "times": self._means(times), "peak_memory_bytes": self._peak_memory()}
        on_gpu = self.device.type == "cuda"
        return result | {"device": torch.cuda.get_device_name(self.device) if on_gpu else "cpu"}

    def _resume(self, engine: Engine, result: dict[str, Any]) -> None:
        source = self.request["resume"]
        from torch.distributed.checkpoint.state_dict_loader import load  # takes long to load

        begun = time.perf_counter()
        state = engine.state()
        load(state, checkpoint_id=Path(source["path"]))  # each process reads the parts that it holds
        engine.adopt(state, source["step"])
        load_s = time.perf_counter() - begun + source["verify_s"]
        result["first_step"] = source["step"]
        times = {name: result[name] for name in ("process_start_s", "build_s")}
        result["restart_cost"] = times | {"save_s": source["save_s"], "load_s": load_s}

    def _steps(
        self, engine: Engine, result: dict[str, Any], number: int
    ) -> tuple[list[float], list[PhaseTimes]]:
        job, losses, times = engine.job, [], []
        for step in range(result["first_step"], job.steps):
            begun = time.perf_counter()
            loss, stop, time_s = engine.step(step, self._must_stop())
            losses.append(loss)
            times.append(time_s)
            if len(losses) == 1 and self.request["keep_gradients"]:
                result["gradients"] = self._keep_gradients(engine, number)
            done = step + 1
            self._progress(done, loss)
            result["paces_s"].append(time.perf_counter() - begun)
            result["stopped"] = stop and done < job.steps
            ends = result["stopped"] or done == job.steps
            due = job.checkpoint_every > 0 and done % job.checkpoint_every == 0
            # All processes agree on this: the stop flag was exchanged with the loss of the step.
            if self.request["checkpoint_dir"] is not None and (ends or due):
                from torch.distributed.checkpoint.state_dict_saver import save  # takes long to load

                # Tensors by name in global shape, which any plan can load.
                saving, directory = time.perf_counter(), Path(self.request["checkpoint_dir"])
                is_first, values = dist.get_rank() == 0, {"job": job_values(job)}
                partial = _from_first(start_checkpoint(directory) if is_first else None)
                save(engine.state(), checkpoint_id=partial)
                save_s = time.perf_counter() - saving
                path = _from_first(finish_checkpoint(directory, done, save_s, values) if is_first else None)
                result["checkpoint"] = str(path)
                result["save_s"].append(time.perf_counter() - saving)
            if ends:
                break
        return losses, times

    def _must_stop(self) -> bool:
        return self.stop or (self.who.rank == 0 and self.directory.is_stop_requested())

    def _progress(self, step: int, loss: float) -> None:
        if self.who.rank == 0:
            values = {"step": step, "loss": loss, "time_s": time.time(), "pids": self.pids}
            self.directory.write_progress(values)

    def _keep_gradients(self, engine: Engine, number: int) -> str:
        """Write the gradients of all processes into one file; gradients held twice are equal."""
        gathered: list[Any] | None = [None] * self.who.size if self.who.rank == 0 else None
        dist.gather_object(engine.full_gradients(), gathered)
        path = self.directory.path / f"{number}-gradients.npz"
        if gathered is not None:
            arrays = {name: tensor.numpy() for part in gathered for name, tensor in part.items()}
            np.savez(path, allow_pickle=False, **arrays)
        return str(path)

    def _means(self, times: list[PhaseTimes]) -> list[dict[str, float]]:
        """Return the times of each step as means over the processes."""
        rows = [[getattr(step, name) for name in _TIMES] for step in times]
        total = torch.tensor(rows, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [dict(zip(_TIMES, row, strict=True)) for row in (total / self.who.size).tolist()]

    def _peak_memory(self) -> int:
        if self.device.type == "cuda":
            used = torch.cuda.max_memory_allocated(self.device)
        else:
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        largest = torch.tensor(used, dtype=torch.int64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest.item())


def _from_first(answer: Path | None) -> Path:
    """Send a path from the first process to all."""
    shared: list[Path | None] = [answer]
    dist.broadcast_object_list(shared, src=0)
    if shared[0] is None:
        raise RuntimeError("the first process sent no path")
    return shared[0]


def run_jobs(directory: RunDirectory, who: Identity) -> None:
    """Run this process's part of the jobs in the request."""
    _Run(directory, who).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], run_jobs))
