"""Sharded checkpoints of scheduled models, in the distributed format of torch.

Keys and shapes are those of the original model. Each process writes the parts that it holds, as boxes of the
whole tensors. So any number of processes reads them, under another schedule or none, with this module or with
`torch.distributed.checkpoint` alone.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from makespan.errors import CheckpointError, MakespanError
from makespan.runtime.checkpoints import Checkpoint, finish_checkpoint, sound_checkpoint, start_checkpoint
from makespan.slapo.errors import ArgumentError, ShardError, close_names
from makespan.slapo.layouts import TensorShard, block_sizes, sharding_of
from makespan.slapo.state import owners_of, state_entries

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

    from makespan.slapo.schedule import Schedule

_Value = TypeVar("_Value")


# --- Parts of tensors ---


class SavedPart(Tensor):
    """The part of a whole tensor that a process holds, as `torch.distributed.checkpoint` saves and loads it.

    It has the shape of the whole tensor and no values of its own; nothing can be computed with it.

    Parameters
    ----------
    part
        The part, which a load fills in place; data parallelism may have cut it again.
    shard
        How the whole tensor is cut.
    """

    local: Tensor
    boxes: "list[tuple[ChunkStorageMetadata, Tensor]]"

    def __new__(cls, part: Tensor, shard: TensorShard) -> "SavedPart":
        """Create a tensor without memory."""
        made: SavedPart = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shard.orig_shape), dtype=part.dtype, device=part.device
        )
        return made

    def __init__(self, part: Tensor, shard: TensorShard) -> None:
        self.local = part
        self.boxes = list(_boxes(part, shard))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without the class and the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse to compute."""
        raise ArgumentError(f"{func}: a part of a checkpoint can be saved and loaded, not computed with")

    def __repr__(self) -> str:  # type: ignore[override]  # of a tensor it may be given its values
        """Return shape and boxes."""
        where = ", ".join(f"{tuple(chunk.sizes)} at {tuple(chunk.offsets)}" for chunk, _ in self.boxes)
        return f"SavedPart of {tuple(self.shape)}: {where}"

    # Torch looks for the next three methods in whatever it saves or loads.

    def __create_write_items__(self, name: str, value: object) -> list[Any]:
        """Return what to write: one item per box."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk, _ in self.boxes
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """Return the boxes to read."""
        return [chunk for chunk, _ in self.boxes]

    def __get_tensor_shard__(self, index: "MetadataIndex") -> Tensor:
        """Return the memory of a box."""
        return next(piece for chunk, piece in self.boxes if chunk.offsets == index.offset)


def _boxes(part: Tensor, shard: TensorShard) -> "Iterator[tuple[ChunkStorageMetadata, Tensor]]":
    """Yield the boxes of the whole tensor that a process holds, each with its values."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.tensor import DTensor

    offsets, local = [0] * part.dim(), part
    if isinstance(part, DTensor):  # data parallelism has cut the part again, along its first axis
        described: Any = part
        (chunk,) = described.__create_chunk_list__()
        offsets, local = list(chunk.offsets), part.to_local()
    axis, n = shard.axis, shard.world_size
    begin, end = offsets[axis], offsets[axis] + local.shape[axis]
    of_block, of_piece = 0, 0  # where a block begins in the whole tensor, and its piece in the part
    for size in block_sizes(shard.groups, shard.orig_shape[axis]):
        piece = size // n
        first, last = max(of_piece, begin), min(of_piece + piece, end)
        if first < last and local.numel():
            place = [*offsets]
            place[axis] = of_block + shard.rank * piece + first - of_piece
            values = local.narrow(axis, first - begin, last - first)
            yield ChunkStorageMetadata(torch.Size(place), values.shape), values
        of_block, of_piece = of_block + size, of_piece + piece


def _saved(tensor: Tensor, shard: TensorShard | None) -> Tensor:
    return tensor if shard is None or shard.world_size == 1 else SavedPart(tensor, shard)


# --- State ---


def sharded_state_dict(
    sch: "Schedule", optimizer: torch.optim.Optimizer | None = None
) -> dict[str, dict[str, Any]]:
    """Return what this process holds, for `torch.distributed.checkpoint.save` and ``load``.

    A load fills the tensors of the model in place. State of an optimizer is loaded by `load_sharded`, or by
    `torch.distributed.checkpoint.state_dict.set_optimizer_state_dict` from the parts.

    Parameters
    ----------
    sch
        Schedule of a whole model that is built.
    optimizer
        Optimizer of parameters of the model; one without state gets it by a step without gradients.

    Returns
    -------
    Under ``model``, tensors by the keys of the original model, those of other pipeline stages left out; with
    an optimizer, its state under ``optimizer``, by the keys of parameters.

    Raises
    ------
    ArgumentError
        The schedule is not that of a whole model, or a parameter has no values yet; also a `ValueError`.
    """
    owners, model = owners_of(sch), dict[str, Any]()
    shards = dict[str, TensorShard]()
    for key, module, name, tensor in state_entries(sch):
        if owners.is_elsewhere(key):
            continue
        if tensor.is_meta:
            raise ArgumentError(f"sharded_state_dict: {key!r} has no values; build the model first")
        shard = sharding_of(module).tensors.get(name)
        model[key] = _saved(tensor.detach(), shard)
        if shard is not None:
            shards[key] = shard
    state = {"model": model}
    if optimizer is not None:
        state["optimizer"] = {
            key: _saved(value, _shard_of(key, value, shards))
            for key, value in _of_optimizer(sch, optimizer).items()
        }
    return state


def _of_optimizer(sch: "Schedule", optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer with one entry per parameter and name."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    return dict(get_optimizer_state_dict(sch.mod, optimizer, options=flat))


def _shard_of(key: str, value: Any, shards: Mapping[str, TensorShard]) -> TensorShard | None:
    """Return how a value of an optimizer is cut: as its parameter, if it has the shape of its part."""
    if not isinstance(value, Tensor):
        return None
    path = key.removeprefix("state.").rpartition(".")[0]
    shard = shards.get(path)
    return shard if shard is not None and tuple(value.shape) == shard.shape else None


# --- Files ---


def save_sharded(
    sch: "Schedule",
    directory: str | Path,
    *,
    step: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    keep: int = 2,
) -> Path:
    """Write a checkpoint of a scheduled model with all processes, each its parts.

    A killed save leaves earlier checkpoints as they were. Every file has a checksum in a manifest.

    Parameters
    ----------
    sch
        Schedule of a whole model that is built.
    directory
        Directory of checkpoints that all processes see.
    step
        Number of steps done, which names the checkpoint.
    optimizer
        Optimizer whose state is saved, too.
    keep
        Number of newest checkpoints to keep.

    Returns
    -------
    Directory of the checkpoint, which `torch.distributed.checkpoint` reads.

    Raises
    ------
    ArgumentError
        As of `sharded_state_dict`.
    CheckpointError
        The files cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save  # slow to import

    target, begun = Path(directory), time.perf_counter()
    state = sharded_state_dict(sch, optimizer)
    partial = _by_first(lambda: start_checkpoint(target))
    try:
        with _quiet_alone():
            save(state, checkpoint_id=partial, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise CheckpointError(f"{directory}: cannot write a checkpoint: {_first_cause(error)}") from error
    save_s = time.perf_counter() - begun
    return _by_first(lambda: finish_checkpoint(target, step, save_s, {}, keep))


def _first_cause(error: Any) -> str:
    return next((str(failure) for failure, _ in error.failures.values()), str(error))


def load_sharded(
    sch: "Schedule", directory: str | Path, *, optimizer: torch.optim.Optimizer | None = None
) -> int:
    """Load the newest sound checkpoint of a directory; the schedule may be another than that which saved it.

    Torch unpickles a part of a checkpoint, which can run code: load what someone you trust has written.

    Parameters
    ----------
    sch
        Schedule of a whole model that is built.
    directory
        Directory that `save_sharded` was given.
    optimizer
        Optimizer whose state is loaded, too.

    Returns
    -------
    Number of steps done.

    Raises
    ------
    CheckpointError
        There is no checkpoint, or all are damaged.
    ArgumentError
        A key of the model or of the optimizer is not in the checkpoint, or one of the checkpoint not in the
        model; also a `ValueError`. Nothing is loaded then.
    ShardError
        A tensor has another shape than in the checkpoint; also a `RuntimeError`. Nothing is loaded then.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load  # slow to import

    found = _by_first(lambda: _newest(Path(directory)))
    state = sharded_state_dict(sch, optimizer)
    reader = FileSystemReader(found.path)
    _check(state, sch, reader.read_metadata())
    with _quiet_alone():
        load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    if optimizer is not None:
        parts: dict[str, Any] = {
            key: value.local if isinstance(value, SavedPart) else value
            for key, value in state["optimizer"].items()
        }
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        set_optimizer_state_dict(sch.mod, optimizer, parts, options=flat)
    return found.step


def _newest(directory: Path) -> Checkpoint:
    found = sound_checkpoint(directory)
    if found is None:
        raise CheckpointError(
            f"{directory}: has no checkpoint; expected a directory that save_sharded was given"
        )
    return found


def _check(state: Mapping[str, Mapping[str, Any]], sch: "Schedule", saved: "Metadata") -> None:
    """Reject a checkpoint with other keys or shapes than the model."""
    known: Mapping[str, Any] = saved.state_dict_metadata
    wanted = {f"{part}.{key}": value for part, values in state.items() for key, value in values.items()}
    if missing := [key for key in wanted if key not in known]:
        close = close_names(missing[0], known)
        raise ArgumentError(f"load_sharded: the checkpoint has no {missing[0]!r}; {close}")
    every = {f"model.{key}" for key, *_ in state_entries(sch)}
    if unknown := [key for key in known if key.startswith("model.") and key not in every]:
        close = close_names(unknown[0].removeprefix("model."), [key.removeprefix("model.") for key in every])
        raise ArgumentError(f"load_sharded: the model has no {unknown[0].removeprefix('model.')!r}; {close}")
    for key, value in wanted.items():
        size = getattr(known[key], "size", None)
        if isinstance(value, Tensor) and size is not None and tuple(size) != tuple(value.shape):
            raise ShardError(
                f"load_sharded: {key!r} has shape {tuple(size)} in the checkpoint; expected "
                f"{tuple(value.shape)}"
            )


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """Leave out the warning of torch that a process alone saves or loads for itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _by_first(act: Callable[[], _Value]) -> _Value:
    """Return what the first process gets, or raise its error, in all processes."""
    results: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            results[0] = act()
        except (MakespanError, OSError) as error:
            results[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(results)
    if isinstance(results[1], OSError):
        raise CheckpointError(str(results[1])) from results[1]
    if results[1] is not None:
        raise results[1]
    return results[0]  # type: ignore[no-any-return]
