"""The files of a checkpoint: what all logical workers share, what each has for itself, and the bare model.

The model is a plain ``state_dict`` with the buffers of the first logical worker, so a copy of that file is
all that an export takes. Nothing in a checkpoint needs code to be read: tensors, numbers, texts, lists and
dictionaries of them.
"""

import pickle
import shutil
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from makespan.easyscale.runtime._buckets import BucketMap
from makespan.easyscale.runtime._contexts import bind_buffer
from makespan.easyscale.runtime._hosted import HostedWorkers
from makespan.easyscale.runtime._loader import LoaderPool
from makespan.easyscale.runtime._parts import TrainedParts
from makespan.easyscale.runtime._shards import LoaderState
from makespan.easyscale.runtime._user_state import load_optimizer
from makespan.errors import CheckpointError, InputError
from makespan.units import format_bytes

__all__ = ["MODEL_FILE", "SavedJob", "check_can_be_saved", "read_saved", "write_saved"]

MODEL_FILE = "model.pt"
_SHARED_FILE = "shared.pt"
_PROBE_BYTES = 1 << 16
_PLAIN = {bool, int, float, str, bytes, type(None)}


@dataclass(frozen=True, slots=True)
class SavedJob:
    """What a process needs of a checkpoint, beside what `read_saved` has put into model and optimizer."""

    bucket_map: BucketMap | None
    contexts: Mapping[int, Mapping[str, Any]]
    loaders: Mapping[int, LoaderState]
    late_buffers: Mapping[str, bool]
    of_all: Mapping[str, Any]


def check_can_be_saved(parts: TrainedParts, hosted: HostedWorkers, pool: LoaderPool) -> None:
    """Refuse now what a checkpoint could not hold later; nothing is written.

    Raises
    ------
    makespan.errors.InputError
        It names what is neither a tensor nor a plain value, or is not as the model was built with it.
    """
    for rank in hosted.ranks:
        _check("worker", _own_values(rank, hosted, pool))
    _check("shared", _shared_values(parts, hosted))
    _check("model", _model_state(parts, hosted))


def write_saved(directory: Path, parts: TrainedParts, hosted: HostedWorkers, pool: LoaderPool) -> None:
    """Write what this process has: its logical workers, and if the first is among them, what all share."""
    for rank in hosted.ranks:
        _write(_own_values(rank, hosted, pool), directory / _worker_file(rank))
    if 0 not in hosted.ranks:
        return
    with hosted.contexts.live(0):
        _write(_model_state(parts, hosted), directory / MODEL_FILE)
    _write(_shared_values(parts, hosted), directory / _SHARED_FILE)


def _own_values(rank: int, hosted: HostedWorkers, pool: LoaderPool) -> dict[str, Any]:
    return {"context": hosted.contexts.values(rank), "loader": pool.state(rank).values()}


def _model_state(parts: TrainedParts, hosted: HostedWorkers) -> dict[str, Any]:
    state: dict[str, Any] = parts.model.state_dict()
    if odd := [name for name in state if name not in hosted.state_names | set(hosted.contexts.late_buffers)]:
        accepted = "what the model has when it is built, or buffers"
        raise InputError(f"{odd[0]} came into the model while it was trained; accepted: {accepted}")
    for name, value in state.items():
        state[name] = _alone(value)
    return state


def _shared_values(parts: TrainedParts, hosted: HostedWorkers) -> dict[str, Any]:
    return {
        "optimizer": _plain(parts.optimizer.state_dict()),
        "scheduler": None if parts.scheduler is None else _plain(parts.scheduler.state_dict()),
        "scaler": None if parts.scaler is None else _plain(parts.scaler.state_dict()),
        "bucket_map": None if hosted.bucket_map is None else [list(names) for names in hosted.bucket_map],
        "late_buffers": hosted.contexts.late_buffers,
        "frozen": [name for name, one in parts.model.named_parameters() if not one.requires_grad],
        "of_all": hosted.contexts.values_of_all(),
    }


def _plain(value: Any) -> Any:
    """Write a float of NumPy, as learning rates often are, as what it is, a float."""
    if type(value) is dict:
        return {key: _plain(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(one) for one in value)
    return float(value) if isinstance(value, float) else value


def read_saved(directory: Path, parts: TrainedParts, ranks: tuple[int, ...]) -> SavedJob:
    """Put what all share into model, optimizer and scheduler; return the rest for some logical workers."""
    own = {rank: _read(directory / _worker_file(rank)) for rank in ranks}
    shared = _read(directory / _SHARED_FILE)
    state, late = _read(directory / MODEL_FILE), shared.get("late_buffers", {})
    contexts = {rank: one["context"] for rank, one in own.items()}
    values = [*(one["buffers"] for one in contexts.values()), state]
    for name, is_persistent in late.items():
        if (value := next((one[name] for one in values if name in one), None)) is not None:
            bind_buffer(parts.model, name, value.to(_device(parts)), is_persistent=is_persistent)
    try:
        parts.model.load_state_dict(state)
        load_optimizer(parts.optimizer, shared["optimizer"])
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
        contexts,
        {rank: LoaderState.from_values(one["loader"]) for rank, one in own.items()},
        late,
        shared.get("of_all", {}) | {"frozen": shared.get("frozen", [])},
    )


def _device(parts: TrainedParts) -> torch.device:
    return next((one.device for one in parts.model.parameters()), torch.device("cpu"))


def _worker_file(rank: int) -> str:
    return f"worker-{rank}.pt"


def _alone(value: Any) -> Any:
    """Copy a tensor to the CPU: what it is a view of is not written."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _write(values: Any, path: Path) -> None:
    """Write tensors and plain values; anything else could not be read again without running code."""
    _check(path.stem, values)
    try:
        torch.save(values, path)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be written: {_why_not(path, error)}") from error


def _why_not(path: Path, error: Exception) -> str:
    """Say why a file cannot be written: torch does not, so a few more bytes are tried."""
    if not isinstance(error, OSError):
        try:
            with path.open("ab") as stream:
                stream.write(bytes(_PROBE_BYTES))
        except OSError as reason:
            error = reason
    free = shutil.disk_usage(path.parent).free
    what = (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]
    return f"{what}; {format_bytes(free)} are free on the disk; earlier checkpoints stay"


def _check(name: str, values: Any) -> None:
    for leaf, value in _leaves(name, values):
        if type(value) not in _PLAIN and type(value) not in (Tensor, nn.Parameter):
            raise InputError(f"{leaf} is a {type(value).__name__}; accepted: tensors and plain values")


def _leaves(name: str, values: Any) -> list[tuple[str, Any]]:
    if type(values) in (dict, OrderedDict, Counter):
        pairs = [(f"{name}[{key!r}]", value) for key, value in values.items()]
    elif type(values) in (list, tuple):
        pairs = [(f"{name}[{number}]", value) for number, value in enumerate(values)]
    else:
        return [(name, values)]
    return [leaf for inner, value in pairs for leaf in _leaves(inner, value)]


def _read(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: cannot be read as tensors and plain values: {error}") from None
