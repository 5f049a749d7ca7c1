"""The files of a checkpoint: what all logical workers share, what each has for itself, and the bare model.

The model is a plain ``state_dict`` with the buffers of the first logical worker, so a copy of that file is
all that an export takes. Nothing in a checkpoint needs code to be read: tensors, numbers, texts, lists and
dictionaries of them.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from makespan.errors import CheckpointError, InputError
from makespan.papers.easyscale.runtime._buckets import BucketMap
from makespan.papers.easyscale.runtime._hosted import HostedWorkers
from makespan.papers.easyscale.runtime._loader import LoaderPool
from makespan.papers.easyscale.runtime._parts import TrainedParts
from makespan.papers.easyscale.runtime._shards import LoaderState

__all__ = ["MODEL_FILE", "SavedJob", "read_saved", "write_saved"]

MODEL_FILE = "model.pt"
_SHARED_FILE = "shared.pt"
_PLAIN = {bool, int, float, str, bytes, type(None)}


@dataclass(frozen=True, slots=True)
class SavedJob:
    """What a process needs of a checkpoint, beside what `read_saved` has put into model and optimizer."""

    bucket_map: BucketMap | None
    contexts: Mapping[int, Mapping[str, Any]]
    loaders: Mapping[int, LoaderState]


def write_saved(directory: Path, parts: TrainedParts, hosted: HostedWorkers, pool: LoaderPool) -> None:
    """Write what this process has: its logical workers, and if the first is among them, what all share."""
    for rank in hosted.ranks:
        own = {"context": hosted.contexts.values(rank), "loader": pool.state(rank).values()}
        _write(own, directory / _worker_file(rank))
    if 0 not in hosted.ranks:
        return
    with hosted.contexts.live(0):
        state = parts.model.state_dict()
        for name, value in state.items():
            state[name] = _alone(value)
    shared = {
        "optimizer": parts.optimizer.state_dict(),
        "scheduler": None if parts.scheduler is None else parts.scheduler.state_dict(),
        "scaler": None if parts.scaler is None else parts.scaler.state_dict(),
        "bucket_map": None if hosted.bucket_map is None else [list(names) for names in hosted.bucket_map],
    }
    _write(state, directory / MODEL_FILE)
    _write(shared, directory / _SHARED_FILE)


def read_saved(directory: Path, parts: TrainedParts, ranks: tuple[int, ...]) -> SavedJob:
    """Put what all share into model, optimizer and scheduler; return the rest for some logical workers."""
    own = {rank: _read(directory / _worker_file(rank)) for rank in ranks}
    shared = _read(directory / _SHARED_FILE)
    try:
        parts.model.load_state_dict(_read(directory / MODEL_FILE))
        parts.optimizer.load_state_dict(shared["optimizer"])
        if parts.scheduler is not None:
            parts.scheduler.load_state_dict(shared["scheduler"])
        if parts.scaler is not None:
            parts.scaler.load_state_dict(shared["scaler"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{directory}: does not fit what the functions of the job return: {error}"
        ) from None
    buckets = shared["bucket_map"]
    return SavedJob(
        None if buckets is None else tuple(map(tuple, buckets)),
        {rank: one["context"] for rank, one in own.items()},
        {rank: LoaderState.from_values(one["loader"]) for rank, one in own.items()},
    )


def _worker_file(rank: int) -> str:
    return f"worker-{rank}.pt"


def _alone(value: Any) -> Any:
    """Copy a tensor to the CPU: what it is a view of is not written."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _write(values: Any, path: Path) -> None:
    """Write tensors and plain values; anything else could not be read again without running code."""
    for name, value in _leaves(path.stem, values):
        if type(value) not in _PLAIN and not isinstance(value, Tensor):
            raise InputError(f"{name} is a {type(value).__name__}; accepted: tensors and plain values")
    torch.save(values, path)


def _leaves(name: str, values: Any) -> list[tuple[str, Any]]:
    if isinstance(values, dict):
        pairs = [(f"{name}[{key!r}]", value) for key, value in values.items()]
    elif isinstance(values, list | tuple):
        pairs = [(f"{name}[{number}]", value) for number, value in enumerate(values)]
    else:
        return [(name, values)]
    return [leaf for inner, value in pairs for leaf in _leaves(inner, value)]


def _read(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: cannot be read as tensors and plain values: {error}") from None
