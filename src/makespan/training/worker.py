"""Worker process of a training run: ``python -m makespan.training.worker <run directory>``."""

import signal
import sys
import time
from dataclasses import dataclass, field
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
    resident_bytes,
    run_worker,
    start_checkpoint,
)
from makespan.training.engine import Engine, mesh_coordinate
from makespan.training.run import (
    JOB,
    REQUEST,
    RESULT,
    PhaseTimes,
    RestartCost,
    ResumePoint,
    RunResult,
    TrainingJob,
    TrainingRequest,
)

PRELOAD = ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict_loader", "torch._dynamo")
"""Modules that load slowly and that runs with several processes use: a fork server loads them once."""
_TIMES = ("step_s", "forward_s", "backward_sync_s", "optimizer_s")


@dataclass(slots=True)
class _Steps:
    """Results of the steps of a job so far, see `RunResult`; ``times`` are those of this process."""

    losses: list[float] = field(default_factory=list)
    times: list[PhaseTimes] = field(default_factory=list)
    paces_s: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)
    stopped: bool = False
    checkpoint: str | None = None
    gradients: str | None = None


class _TrainingProcess:
    """Jobs of a request, as this process runs them."""

    def __init__(self, directory: RunDirectory, who: Identity) -> None:
        self.directory, self.who = directory, who
        self.request: TrainingRequest = REQUEST.validate_python(directory.request())
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
        for number, job in enumerate(self.request.jobs):
            result = self._train(job, number)
            if self.who.rank == 0:
                self.directory.write_result(RESULT.dump_python(result, mode="json"), number)
            if result.stopped:
                break

    def _train(self, job: TrainingJob, number: int) -> RunResult:
        begun, on_gpu = time.perf_counter(), self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)  # forget the peak of the previous job
        engine = Engine(job, mesh_coordinate(job.plan, self.device))
        build_s, point = time.perf_counter() - begun, self.request.resume
        first_step, restart_cost = 0, None
        if point is not None:
            first_step = point.step
            restart_cost = RestartCost(point.save_s, self.started_s, build_s, self._resume(engine, point))
        self._progress(first_step, float("nan"))
        steps = self._run_steps(engine, first_step, number)
        return RunResult(
            first_step=first_step,
            losses=tuple(steps.losses),
            times=tuple(self._mean_times(steps.times)),
            paces_s=tuple(steps.paces_s),
            stopped=steps.stopped,
            device=torch.cuda.get_device_name(self.device) if on_gpu else "cpu",
            process_start_s=self.started_s,
            build_s=build_s,
            save_s=tuple(steps.save_s),
            restart_cost=restart_cost,
            checkpoint=steps.checkpoint,
            gradients=steps.gradients,
            peak_memory_bytes=self._peak_memory(),
        )

    def _resume(self, engine: Engine, point: ResumePoint) -> float:
        """Load a checkpoint, and return the time that checking and loading it took [s]."""
        from torch.distributed.checkpoint.state_dict_loader import load  # slow to import

        begun = time.perf_counter()
        state = engine.state()
        load(state, checkpoint_id=point.path)  # each process reads the parts that it holds
        engine.adopt(state, point.step)
        return time.perf_counter() - begun + point.verify_s

    def _run_steps(self, engine: Engine, first_step: int, number: int) -> _Steps:
        """Run steps up to the last one or a stop request, with the checkpoints that are due."""
        job, steps = engine.job, _Steps()
        for step in range(first_step, job.steps):
            begun = time.perf_counter()
            loss, stop, time_s = engine.step(step, self._must_stop())
            steps.losses.append(loss)
            steps.times.append(time_s)
            if len(steps.losses) == 1 and self.request.keep_gradients:
                steps.gradients = self._keep_gradients(engine, number)
            done = step + 1
            self._progress(done, loss)
            steps.paces_s.append(time.perf_counter() - begun)
            steps.stopped = stop and done < job.steps
            ends = steps.stopped or done == job.steps
            due = job.checkpoint_every > 0 and done % job.checkpoint_every == 0
            # All processes agree on this: the stop flag was exchanged together with the loss of the step.
            if self.request.checkpoint_dir is not None and (ends or due):
                saving = time.perf_counter()
                steps.checkpoint = str(self._save(engine, self.request.checkpoint_dir, done))
                steps.save_s.append(time.perf_counter() - saving)
            if ends:
                break
        return steps

    def _save(self, engine: Engine, directory: Path, done: int) -> Path:
        """Write a checkpoint with all processes, and return its directory."""
        from torch.distributed.checkpoint.state_dict_saver import save  # slow to import

        # Tensors are saved by name in their global shape, which a process under any plan can load.
        begun, is_first = time.perf_counter(), dist.get_rank() == 0
        partial = _from_first(start_checkpoint(directory) if is_first else None)
        save(engine.state(), checkpoint_id=partial)
        save_s, values = time.perf_counter() - begun, {"job": JOB.dump_python(engine.job, mode="json")}
        return _from_first(finish_checkpoint(directory, done, save_s, values) if is_first else None)

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

    def _mean_times(self, times: list[PhaseTimes]) -> list[PhaseTimes]:
        """Return the times of each step as means over the processes."""
        rows = [[getattr(step, name) for name in _TIMES] for step in times]
        total = torch.tensor(rows, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [PhaseTimes(*row) for row in (total / self.who.size).tolist()]

    def _peak_memory(self) -> int:
        if self.device.type == "cuda":
            used = torch.cuda.max_memory_allocated(self.device)
        else:
            used = resident_bytes(peak=True)
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
    """Train the jobs of the request together with the other processes."""
    _TrainingProcess(directory, who).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], run_jobs))
