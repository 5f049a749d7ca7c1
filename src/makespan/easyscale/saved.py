"""Files of a checkpoint: the model, the shared state, and a file for each EST.

The model is a plain ``state_dict`` with the buffers of the first EST, so that an export is a copy of its
file. Reading a checkpoint runs no code: it holds tensors, numbers, texts, lists, dictionaries.
"""

import copy
import pickle
import shutil
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from makespan.easyscale.context import Contexts, bind_buffer
from makespan.easyscale.job import MODEL_FILE
from makespan.easyscale.user_state import PLAIN_TYPES, load_optimizer
from makespan.errors import CheckpointError, InputError
from makespan.units import format_bytes

_SHARED_FILE = "shared.pt"
_PROBE_BYTES = 1 << 16


class Position(Protocol):
    """Position of an EST in its data."""

    def values(self) -> dict[str, Any]:
        """Return the position as tensors and plain values."""


class Data(Protocol):
    """Batches of the hosted ESTs."""

    notices: set[str]

    def next(self, rank: int) -> Any:
        """Return the next batch of an EST."""

    def state(self, rank: int) -> Position:
        """Return the position of an EST."""


class Hosted(Protocol):
    """The ESTs of a process, as far as a checkpoint holds them."""

    ranks: tuple[int, ...]
    contexts: Contexts
    state_names: set[str]

    @property
    def notices(self) -> list[str]:
        """Notices about what user code does."""

    def layout(self) -> Any:
        """Return the layout of buckets as plain values; None if it is not determined yet."""


@dataclass(slots=True)
class SharedParts:
    """Objects that all ESTs share and a checkpoint holds.

    Parameters
    ----------
    model
        Its ``state_dict`` is the file of the model.
    states
        Further objects with ``state_dict`` and ``load_state_dict``, by their names in the checkpoint; None
        for one that the job does not have.
    compared
        Names of states that consist of tensors and plain values and are compared between processes, besides
        those of optimizers.
    """

    model: nn.Module
    states: Mapping[str, Any]
    compared: Sequence[str] = ()
    _group_names: dict[str, list[list[str]]] = field(init=False)

    def __post_init__(self) -> None:
        self._group_names = self._named_groups()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All optimizers."""
        return list(self._optimizers().values())

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {name: each for name, each in self.states.items() if isinstance(each, torch.optim.Optimizer)}

    def _named_groups(self) -> dict[str, list[list[str]]]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return {
            name: [[names.get(id(each), "") for each in group["params"]] for group in one.param_groups]
            for name, one in self._optimizers().items()
        }

    def groups(self, *, may_grow: bool = True) -> dict[str, list[list[str]]]:
        """Return the names of the parameters in the groups of each optimizer.

        Raises
        ------
        makespan.errors.InputError
            Groups were added in training though they may not grow, or one was changed in another way.
        """
        for name, one in self._optimizers().items():
            before, sizes = self._group_names[name], [len(group["params"]) for group in one.param_groups]
            if sizes == [len(group) for group in before]:
                continue
            now = self._named_groups()[name]
            problem = f"{name} got {len(now)} parameter groups in training, and had {len(before)}"
            if not may_grow:
                raise InputError(f"{problem}; expected all groups from the start where zero_stage is 1")
            if now[: len(before)] != before:
                raise InputError(
                    f"the parameters in a group of {name} changed in training; expected another group for "
                    "them, by add_param_group"
                )
            if any("" in group for group in now):
                raise InputError(
                    f"{problem}, one of them with a parameter that no model has; expected parameters of the "
                    "models"
                )
            self._group_names[name] = now
        return self._group_names

    def add_groups(self, saved: Mapping[str, Sequence[Sequence[str]]]) -> None:
        """Give optimizers the groups that they got in training, before their states are loaded."""
        parameters = dict(self.model.named_parameters())
        for name, one in self._optimizers().items():
            for group in saved.get(name, [])[len(one.param_groups) :]:
                one.add_param_group({"params": [parameters[each] for each in group]})


@dataclass(frozen=True, slots=True)
class SavedJob:
    """State of a checkpoint that `read_saved` has not loaded.

    Parameters
    ----------
    layout
        Value of `Hosted.layout`.
    contexts, positions
        Values of the contexts and the positions in the data, by virtual rank.
    late_buffers, shared, frozen
        Buffers that appeared in training, shared values of the contexts, and names of the parameters that
        required no gradient.
    """

    layout: Any
    contexts: Mapping[int, Mapping[str, Any]]
    positions: Mapping[int, Mapping[str, Any]]
    late_buffers: Mapping[str, bool]
    shared: Mapping[str, Any]
    frozen: Sequence[str]

    def install(self, model: nn.Module, contexts: Contexts) -> None:
        """Restore contexts, and freeze the parameters that were frozen."""
        for rank, context in self.contexts.items():
            contexts.install(rank, context)
        contexts.install_shared(self.shared)
        parameters = dict(model.named_parameters())
        for name in self.frozen:
            parameters[name].requires_grad_(False)


def check_can_be_saved(parts: SharedParts, hosted: Hosted, data: Data) -> None:
    """Reject early any state that a checkpoint cannot hold; nothing is written.

    Raises
    ------
    makespan.errors.InputError
        A value is neither a tensor nor a plain value, or an entry was added to the model after it was built.
    """
    for rank in hosted.ranks:
        _check_plain("worker", est_values(rank, hosted, data))
    _check_plain("shared", shared_values(parts, hosted))
    _check_plain("model", _model_state(parts, hosted))


def write_saved(directory: Path, parts: SharedParts, hosted: Hosted, data: Data) -> None:
    """Write the ESTs of this process, and the shared state if it hosts the first one."""
    ests = {rank: est_values(rank, hosted, data) for rank in hosted.ranks}
    if 0 not in hosted.ranks:
        write_values(directory, ests)
        return
    with hosted.contexts.live(0):
        model = _model_state(parts, hosted)
    write_values(directory, ests, model, shared_values(parts, hosted))


def write_values(directory: Path, ests: Mapping[int, Any], model: Any = None, shared: Any = None) -> None:
    """Write the values of ESTs by rank, and those of the model and the shared state unless they are None."""
    for rank, values in ests.items():
        _write(values, directory / _est_file(rank))
    if model is not None:
        _write(model, directory / MODEL_FILE)
        _write(shared, directory / _SHARED_FILE)


def est_values(rank: int, hosted: Hosted, data: Data) -> dict[str, Any]:
    """Return context and position in the data of an EST as tensors and plain values."""
    return {"context": hosted.contexts.values(rank), "loader": data.state(rank).values()}


def model_values(parts: SharedParts, hosted: Hosted) -> dict[str, Any]:
    """Return the ``state_dict`` of the model, without copies."""
    state: dict[str, Any] = parts.model.state_dict()
    if odd := [name for name in state if name not in hosted.state_names | set(hosted.contexts.late_buffers)]:
        raise InputError(
            f"{odd[0]} was added to the model during training; expected the entries that the model is built "
            "with, or buffers"
        )
    return state


def _model_state(parts: SharedParts, hosted: Hosted) -> dict[str, Any]:
    state = model_values(parts, hosted)
    for name, value in state.items():
        # A copy: torch.save would write the whole storage that the tensor is a view of.
        state[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return state


def shared_values(parts: SharedParts, hosted: Hosted, *, records: bool = True) -> dict[str, Any]:
    """Return the state that all ESTs share, besides the model, as tensors and plain values.

    See `Contexts.shared_values` for ``records``.
    """
    states = {
        name: None if each is None else _plain(each.state_dict()) for name, each in parts.states.items()
    }
    return {
        **states,
        "groups": parts.groups(),
        "bucket_map": hosted.layout(),
        "late_buffers": hosted.contexts.late_buffers,
        "frozen": [name for name, parameter in parts.model.named_parameters() if not parameter.requires_grad],
        "of_all": hosted.contexts.shared_values(records=records),
    }


def copied(value: Any, old: Any = None) -> Any:
    """Return a copy of tensors and plain values in host memory, that of an earlier copy where they fit."""
    kind = type(value)
    if isinstance(value, Tensor):
        if type(old) is kind and (old.dtype, old.shape) == (value.dtype, value.shape):
            old.detach().copy_(value.detach())
            return old
        made = value.detach().to("cpu", copy=True)
        return nn.Parameter(made, value.requires_grad) if kind is nn.Parameter else made
    if isinstance(value, dict):
        before, result = old if isinstance(old, dict) else {}, copy.copy(value)  # with versions of modules
        for key, item in value.items():
            result[key] = copied(item, before.get(key))
        return result
    if kind in (list, tuple):
        olds = old if type(old) is kind and len(old) == len(value) else [None] * len(value)
        return kind(map(copied, value, olds))
    return value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Return the tensors among plain values."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(item)


def _plain(value: Any) -> Any:
    """Convert NumPy floats, which learning rates often are, to floats of Python."""
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return float(value) if isinstance(value, float) else value


def read_saved(directory: Path, parts: SharedParts, ranks: tuple[int, ...]) -> SavedJob:
    """Load the shared state into the model and the other objects; return the rest for some ranks."""
    ests = {rank: _read(directory / _est_file(rank)) for rank in ranks}
    shared, model = _read(directory / _SHARED_FILE), _read(directory / MODEL_FILE)
    try:
        return load_values(parts, ests, model, shared)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{directory}: does not fit what the functions of the job return: {error}"
        ) from None


def load_values(
    parts: SharedParts, ests: Mapping[int, Any], model: Mapping[str, Any], shared: Mapping[str, Any]
) -> SavedJob:
    """Load model and shared state, see `write_values`; objects may keep these values. Return the rest."""
    # Checkpoints of earlier versions lack the keys that are read with a default.
    late = shared.get("late_buffers", {})
    contexts = {rank: values["context"] for rank, values in ests.items()}
    bind_late_buffers(parts.model, late, [*(context["buffers"] for context in contexts.values()), model])
    parts.model.load_state_dict(model)
    load_states(parts, shared)
    return SavedJob(
        shared["bucket_map"],
        contexts,
        {rank: values["loader"] for rank, values in ests.items()},
        late,
        shared.get("of_all", {}),
        shared.get("frozen", []),
    )


def bind_late_buffers(
    model: nn.Module, late: Mapping[str, bool], values: Sequence[Mapping[str, Any]]
) -> None:
    """Add buffers that appeared in training: they must exist, in their shape, before state is loaded."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    for name, is_persistent in late.items():
        if (value := next((each[name] for each in values if name in each), None)) is not None:
            bind_buffer(model, name, value.to(device), is_persistent=is_persistent)


def load_states(parts: SharedParts, shared: Mapping[str, Any]) -> None:
    """Load optimizer, scheduler and the like from `shared_values`."""
    parts.add_groups(shared.get("groups", {}))
    for name, each in parts.states.items():
        if isinstance(each, torch.optim.Optimizer):
            load_optimizer(each, shared[name])
        elif each is not None:
            each.load_state_dict(shared[name])


def _est_file(rank: int) -> str:
    return f"worker-{rank}.pt"


def _write(values: Any, path: Path) -> None:
    """Write tensors and plain values; other types could not be read again without running code."""
    _check_plain(path.stem, values)
    try:
        torch.save(values, path)
    except (OSError, RuntimeError) as error:
        cause: Exception = error
        if not isinstance(error, OSError):  # torch hides the reason; writing a few more bytes reveals it
            try:
                with path.open("ab") as stream:
                    stream.write(bytes(_PROBE_BYTES))
            except OSError as reason:
                cause = reason
        free = format_bytes(shutil.disk_usage(path.parent).free)
        text = (cause.strerror if isinstance(cause, OSError) else None) or str(cause).splitlines()[0]
        text = f"{text}; {free} are free on the disk; earlier checkpoints are intact"
        raise CheckpointError(f"{path}: cannot be written: {text}") from error


def _check_plain(name: str, values: Any) -> None:
    for leaf, value in _leaves(name, values):
        if type(value) not in PLAIN_TYPES and type(value) not in (Tensor, nn.Parameter):
            raise InputError(f"{leaf} is a {type(value).__name__}; expected tensors and plain values")


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
