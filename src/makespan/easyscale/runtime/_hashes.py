"""SHA-256 of what must have the same bits in two runs."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from makespan.easyscale.runtime._randomness import take_randomness

__all__ = ["implicit_sha", "optimizer_sha", "parameter_sha", "raw_bytes", "value_sha"]


def raw_bytes(tensor: Tensor) -> Tensor:
    """Bytes of a tensor, flat and on the CPU; its values are copied only if they do not lie so."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def parameter_sha(model: nn.Module) -> str:
    """Hash of the parameters in the order of their names."""
    return _sha(sorted(model.named_parameters()))


def optimizer_sha(optimizer: torch.optim.Optimizer) -> str:
    """Hash of the state and the options of an optimizer, the learning rate among them."""
    state = optimizer.state_dict()
    kept = [(f"{key}/{name}", value) for key, one in state["state"].items() for name, value in one.items()]
    options = [(f"group {number}", one) for number, one in enumerate(state["param_groups"])]
    return _sha([*sorted(kept, key=lambda pair: pair[0]), *options])


def implicit_sha(model: nn.Module, device: torch.device) -> str:
    """Hash of the buffers of a model and of all random states, as they are now in this process."""
    states: list[tuple[str, Any]] = [("random", take_randomness().hex())]
    if device.type == "cuda":
        states.append(("cuda", torch.cuda.get_rng_state(device)))
    return _sha([*sorted(model.named_buffers()), *states])


def value_sha(value: Any) -> str:
    """Hash of tensors and plain values in lists, tuples and dictionaries."""
    return _sha(_leaves("", value))


def _leaves(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(f"{name}/{key!r}", one)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _leaves(f"{name}/{number}", one)
    else:
        yield name, value


def _sha(named: Iterable[tuple[str, Any]]) -> str:
    found = hashlib.sha256()
    for name, value in named:
        found.update(f"{name}\0".encode())
        if isinstance(value, Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)}\0".encode())
            found.update(raw_bytes(value).numpy().data)
        else:
            found.update(json.dumps(value, default=_plain, sort_keys=True).encode())
    return found.hexdigest()


def _plain(value: Any) -> Any:
    """Write what JSON does not know; a float keeps all its bits there."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic | Tensor) else repr(value)
