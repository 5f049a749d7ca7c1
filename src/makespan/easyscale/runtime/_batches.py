"""What a batch is to a model and a loss, and what a loss may return."""

import copy
import inspect
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from makespan.errors import InputError, short_path

__all__ = ["loss_of"]

_PAIR = 2


def loss_of(
    model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any, device: torch.device
) -> tuple[Tensor, str]:
    """Do a forward pass.

    A batch that is a pair consists of inputs and targets. Any other goes whole to the model and, as the
    targets, to the loss. A mapping whose keys are names of arguments of the model is spread over them.

    Returns
    -------
    tuple
        The loss, and what of the value that the loss function returned is not used, empty for nothing.

    Raises
    ------
    makespan.errors.InputError
        The model does not take such batches, or the loss returned something that cannot be trained.
    """
    is_pair = isinstance(batch, list | tuple) and len(batch) == _PAIR
    inputs, targets = batch if is_pair else (batch, batch)
    inputs = _moved(inputs, device)
    targets = _moved(targets, device) if is_pair else inputs
    try:
        spread = isinstance(inputs, Mapping) and _takes(model, inputs)
        outputs = model(**inputs) if spread else model(inputs)
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        if is_pair and not isinstance(inputs, Mapping):
            raise
        found = f"model {type(model).__name__} does not take a batch that is {_told(batch)}"
        accepted = (
            "a pair of inputs and targets, which collate can make; or a model whose arguments are named as "
            "the keys, or that takes the batch as it is"
        )
        raise InputError(f"{found} ({_line(error)}); accepted: {accepted}") from error
    return _checked(loss(outputs, targets))


def _takes(model: nn.Module, inputs: Mapping[Any, Any]) -> bool:
    """Whether the keys of a mapping are names of arguments; a single one that is, is the mapping itself."""
    if not all(isinstance(key, str) for key in inputs):
        return False
    try:
        signature = inspect.signature(model.forward)
        signature.bind(**inputs)
    except (TypeError, ValueError):
        return False
    named = [
        one.name
        for one in signature.parameters.values()
        if one.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    return len(named) > 1 and set(inputs) <= set(named)


def _checked(found: Any) -> tuple[Tensor, str]:
    accepted = "a scalar tensor with a gradient, first of a tuple or under the key 'loss' if there is more"
    loss, unused = found, ""
    if isinstance(found, Mapping) and "loss" in found:
        loss, unused = found["loss"], ", ".join(str(key) for key in found if key != "loss")
    elif isinstance(found, list | tuple) and found:
        loss, unused = found[0], f"{len(found) - 1} further value(s)" if len(found) > 1 else ""
    if not isinstance(loss, Tensor):
        raise InputError(f"loss returned a {_told(found)}; accepted: {accepted}")
    if loss.numel() != 1:
        raise InputError(f"loss returned a tensor of shape {tuple(loss.shape)}; accepted: {accepted}")
    if not loss.requires_grad:
        raise InputError(f"loss returned a tensor that requires no gradient; accepted: {accepted}")
    return loss.reshape(()) if loss.ndim else loss, unused


def _told(value: Any) -> str:
    """Say in a few words what a batch is."""
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(repr, list(value)[:6]))}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _line(error: BaseException) -> str:
    """Say in a line what went wrong, and where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    lines = str(error).splitlines()
    what = f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
    return f"{what}, at {short_path(frame.filename)}, line {frame.lineno}"


def _moved(values: Any, device: torch.device) -> Any:
    """Tensors of a batch on a device, whatever they lie in; the kinds of what they lie in are kept."""
    return tree_map(lambda one: _leaf(one, device), values)


def _leaf(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor) or callable(getattr(value, "to", None)):
        return value.to(device)
    if isinstance(value, MutableMapping):
        moved = copy.copy(value)
        for key in value:
            moved[key] = _moved(value[key], device)
        return moved
    return value
