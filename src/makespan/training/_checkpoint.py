"""Save and load the state of a run with ``torch.distributed.checkpoint``, under any plan."""

import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as read_state
from torch.distributed.checkpoint.state_dict_saver import save as write_state

from makespan.runtime import finish_checkpoint, start_checkpoint
from makespan.training._engine import Engine
from makespan.training._job import job_values

__all__ = ["load", "save"]


def save(engine: Engine, directory: Path, step: int) -> tuple[Path, float]:
    """Write a checkpoint; all processes must call it.

    Every tensor is stored under its name and in its global shape, so any other plan can read it.
    """
    begun = time.perf_counter()
    answer: list[Path] = []
    if dist.get_rank() == 0:
        answer = [start_checkpoint(directory)]
    partial = _from_first(answer)
    write_state(engine.state(), checkpoint_id=partial)
    answer = []
    if dist.get_rank() == 0:
        values, save_s = {"job": job_values(engine.job)}, time.perf_counter() - begun
        answer = [finish_checkpoint(directory, step, save_s, values)]
    return _from_first(answer), time.perf_counter() - begun


def load(engine: Engine, path: Path, step: int) -> float:
    """Read a checkpoint into a run; all processes must call it, each reads what it holds."""
    begun = time.perf_counter()
    state = engine.state()
    read_state(state, checkpoint_id=path)
    engine.adopt(state, step)
    return time.perf_counter() - begun


def _from_first(answer: list[Path]) -> Path:
    """Send a path from the first process to all."""
    shared: list[Path | None] = [answer[0] if answer else None]
    dist.broadcast_object_list(shared, src=0)
    if shared[0] is None:
        raise RuntimeError("the first process sent no path")
    return shared[0]
