"""The global random states of a process, taken and given back; and generators that are apart from them."""

import random
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import torch
from numpy.random import mtrand

from makespan.errors import CheckpointError, InputError

__all__ = ["apart_from_own", "give_randomness", "own_generators", "take_randomness"]

# Python and NumPy have the same twister: 624 words and a place, and the second of a pair of normal variates.
_WORDS = 624 * 4
_REST = struct.Struct("<I?d")
_TWISTER = _WORDS + _REST.size
_LONG = 1000  # a longer list has samples
_TORCH_BYTES = torch.Generator().get_state().numel()


def take_randomness() -> bytes:
    """Return the global random states of Python, NumPy and torch (CPU); equal states are equal bytes."""
    _, words, second = random.getstate()
    found = mtrand.get_state(legacy=False)
    if found["bit_generator"] != "MT19937":
        raise InputError(f"the global random state of NumPy is {found['bit_generator']}; accepted: MT19937")
    twister = found["state"]
    parts = (
        array("I", words[:-1]).tobytes(),
        _REST.pack(words[-1], second is not None, second or 0.0),
        twister["key"].tobytes(),
        _REST.pack(twister["pos"], bool(found["has_gauss"]), found["gauss"]),
        torch.get_rng_state().numpy().tobytes(),
    )
    return b"".join(parts)


def give_randomness(state: bytes) -> None:
    """Restore what `take_randomness` returned; a `CheckpointError` says that it is something else."""
    if len(state) != 2 * _TWISTER + _TORCH_BYTES:
        wanted = 2 * _TWISTER + _TORCH_BYTES
        raise CheckpointError(f"a random state has {len(state)} bytes; accepted: {wanted}")
    place, is_paired, second = _REST.unpack_from(state, _WORDS)
    random.setstate((3, (*array("I", state[:_WORDS]), place), second if is_paired else None))
    place, is_paired, second = _REST.unpack_from(state, _TWISTER + _WORDS)
    twister = {"key": np.frombuffer(state, np.uint32, 624, _TWISTER), "pos": place}
    mtrand.set_state(
        {"bit_generator": "MT19937", "state": twister, "has_gauss": int(is_paired), "gauss": second}
    )
    torch.set_rng_state(torch.frombuffer(bytearray(state[2 * _TWISTER :]), dtype=torch.uint8))


@contextmanager
def apart_from_own() -> Iterator[None]:
    """Leave all random states of this process, those of GPUs too, as they were before the block."""
    before = take_randomness()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        give_randomness(before)


def own_generators(thing: object) -> list[str]:
    """Return the attributes of an object, and of what it holds, that are random generators of their own."""
    found, seen, left = [], set(), [("", thing)]
    while left:
        name, one = left.pop()
        if id(one) in seen or isinstance(one, type | ModuleType):
            continue
        seen.add(id(one))
        if _is_own(one):
            found.append(name)
        elif isinstance(one, list | tuple | dict) and len(one) <= _LONG:
            items = one.items() if isinstance(one, dict) else enumerate(one)
            left += [(f"{name}[{key!r}]", each) for key, each in items]
        else:
            left += [(f"{name}.{key}", each) for key, each in getattr(one, "__dict__", {}).items()]
    return sorted(found)


def _is_own(one: object) -> bool:
    if isinstance(one, np.random.Generator):
        return one.bit_generator is not mtrand.get_bit_generator()
    is_global = one is mtrand._rand or one is torch.default_generator
    return isinstance(one, random.Random | mtrand.RandomState | torch.Generator) and not is_global
