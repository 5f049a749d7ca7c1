"""Random states: seeds by purpose, capture and restore, and hashes of all state that must be equal.

Reference runs share the rule of seeds and the hashes with elastic runs.
"""

import ctypes
import hashlib
import json
import random
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor, nn

from makespan.errors import CheckpointError, InputError
from makespan.training.bits import raw_bytes, word_sum_of


def seed_everything(*words: object) -> None:
    """Seed Python, NumPy and torch (all its devices) from words such as a seed and a virtual rank."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big") >> 1
    random.seed(number)
    mtrand.seed(number & 0xFFFF_FFFF)
    torch.manual_seed(number)


def seed_stream(seed: int, rank: int, epoch: int, stream: int) -> None:
    """Seed the draws of one loader of a logical worker in an epoch; they do not depend on the process."""
    seed_everything(seed, "loader", rank, epoch, stream)


# --- Global random states of a process, and generators beside them ---

# Python and NumPy have the same Mersenne Twister: 624 words and a position, and the second of a pair of
# normal variates.
_WORDS = 624 * 4
_REST = struct.Struct("<I?d")
_TWISTER = _WORDS + _REST.size
_LONG = 1000  # items; a longer container holds samples and is not searched
_TORCH_BYTES = torch.Generator().get_state().numel()


class _Twister:
    """The global generator of NumPy, whose words are read where they lie.

    NumPy's own functions convert each of the 624 words on its own, which takes a quarter of a millisecond a
    swap; contexts are swapped in every micro-batch. They are needed only if a second normal variate is kept,
    which cannot be read anywhere else.
    """

    def __init__(self) -> None:
        self._state = _NumpyState(b"", b"")  # that was captured or restored last
        self._generator: object = None
        self._address: int | None = None

    def capture(self) -> "_NumpyState":
        """Return the state."""
        # Nothing was drawn if the words are those of the last time, unless a pair was begun then.
        if self._unchanged() is not None:
            return self._state
        numpy_state = mtrand.get_state(legacy=False)
        if numpy_state["bit_generator"] != "MT19937":
            raise InputError(
                f"the global random state of NumPy is {numpy_state['bit_generator']}; expected MT19937"
            )
        twister = numpy_state["state"]
        second = _SECOND.pack(bool(numpy_state["has_gauss"]), numpy_state["gauss"])
        self._state = _NumpyState(twister["key"].tobytes() + _POSITION.pack(twister["pos"]), second)
        return self._state

    def restore(self, state: "_NumpyState") -> None:
        """Restore what `capture` returned."""
        address = self._unchanged()
        if address is not None and state.second == _NO_SECOND:
            ctypes.memmove(address, state.words, len(state.words))
        else:
            is_paired, second = _SECOND.unpack(state.second)
            words = np.frombuffer(state.words, np.uint32, 624)
            twister = {"key": words, "pos": _POSITION.unpack_from(state.words, _WORDS)[0]}
            mtrand.set_state(
                {"bit_generator": "MT19937", "state": twister, "has_gauss": int(is_paired), "gauss": second}
            )
        self._state = state

    def _unchanged(self) -> int | None:
        """Return where the words lie if the state is surely that of the last time, otherwise None."""
        generator = mtrand.get_bit_generator()
        if generator is not self._generator:
            is_twister = type(generator) is np.random.MT19937
            self._generator = generator
            self._address = int(generator.ctypes.state_address) if is_twister else None
        words, second = self._state
        if self._address is None or second != _NO_SECOND:
            return None
        return self._address if ctypes.string_at(self._address, len(words)) == words else None


class _NumpyState(NamedTuple):
    """State of NumPy's global generator: words and position, and the second of a pair, as they are stored."""

    words: bytes
    second: bytes


_POSITION, _SECOND = struct.Struct("=i"), struct.Struct("<?d")
_NO_SECOND = _SECOND.pack(False, 0.0)
_twister = _Twister()


@dataclass(frozen=True, slots=True)
class RandomStates:
    """Global random states of Python, NumPy and torch (CPU), in forms that are read and restored fast."""

    python: tuple[Any, ...]
    numpy: _NumpyState
    torch: Tensor

    @staticmethod
    def capture() -> "RandomStates":
        """Read the current states."""
        return RandomStates(random.getstate(), _twister.capture(), torch.get_rng_state())

    def restore(self) -> None:
        """Make these the current states."""
        random.setstate(self.python)
        _twister.restore(self.numpy)
        torch.set_rng_state(self.torch)

    def to_bytes(self) -> bytes:
        """Return the states as bytes; equal states are equal bytes."""
        _, words, second = self.python
        rest = _REST.pack(words[-1], second is not None, second or 0.0)
        return b"".join((array("I", words[:-1]).tobytes(), rest, *self.numpy, self.torch.numpy().tobytes()))

    @staticmethod
    def from_bytes(state: bytes) -> "RandomStates":
        """Read what `to_bytes` returned; other bytes raise a `CheckpointError`."""
        if len(state) != 2 * _TWISTER + _TORCH_BYTES:
            wanted = 2 * _TWISTER + _TORCH_BYTES
            raise CheckpointError(f"a random state has {len(state)} bytes; expected {wanted}")
        place, is_paired, second = _REST.unpack_from(state, _WORDS)
        python = 3, (*array("I", state[:_WORDS]), place), second if is_paired else None
        torch_state = torch.frombuffer(bytearray(state[2 * _TWISTER :]), dtype=torch.uint8)
        words, end = state[_TWISTER : _TWISTER + _WORDS + _POSITION.size], 2 * _TWISTER
        numpy_state = _NumpyState(words, state[end - _SECOND.size : end])
        return RandomStates(python, numpy_state, torch_state)


def capture_random_states() -> bytes:
    """Return the global random states of Python, NumPy and torch (CPU); equal states are equal bytes."""
    return RandomStates.capture().to_bytes()


def restore_random_states(state: bytes) -> None:
    """Restore what `capture_random_states` returned; other bytes raise a `CheckpointError`."""
    RandomStates.from_bytes(state).restore()


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Restore all random states of this process, those of GPUs too, after the block."""
    before = capture_random_states()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        restore_random_states(before)


def private_generators(thing: object) -> list[str]:
    """Return the attributes of an object, and of the objects in it, that are separate random generators."""
    names, seen, left = [], set(), [("", thing)]
    while left:
        name, value = left.pop()
        if id(value) in seen or isinstance(value, type | ModuleType):
            continue
        seen.add(id(value))
        # Objects that stand for the global states are no generators of their own.
        if isinstance(value, np.random.Generator):
            is_own = value.bit_generator is not mtrand.get_bit_generator()
        else:
            is_global = value is mtrand._rand or value is torch.default_generator
            is_own = isinstance(value, random.Random | mtrand.RandomState | torch.Generator) and not is_global
        if is_own:
            names.append(name)
        elif isinstance(value, list | tuple | dict) and len(value) <= _LONG:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            left += [(f"{name}[{key!r}]", each) for key, each in items]
        else:
            left += [(f"{name}.{key}", each) for key, each in getattr(value, "__dict__", {}).items()]
    return sorted(names)


# --- Hashes of state that must have equal bits in two runs ---
#
# With ``by_sum`` they are hashes of the sums of the words of tensors, for replicas that are compared often: a
# tenth of the time, and a change of one word is seen.


def parameter_sha(model: nn.Module, *, by_sum: bool = False) -> str:
    """Hash of the parameters in the order of their names."""
    return _sha(sorted(model.named_parameters()), by_sum)


def optimizer_sha(optimizer: torch.optim.Optimizer, *, by_sum: bool = False) -> str:
    """Hash of the state and the options of an optimizer, including the learning rate."""
    state = optimizer.state_dict()
    kept = [
        (f"{key}/{name}", value) for key, values in state["state"].items() for name, value in values.items()
    ]
    options = [(f"group {number}", group) for number, group in enumerate(state["param_groups"])]
    return _sha([*sorted(kept, key=lambda pair: pair[0]), *options], by_sum)


def optimizers_sha(optimizers: Sequence[torch.optim.Optimizer], *, by_sum: bool = False) -> str:
    """Hash of several optimizers; that of a single one is its `optimizer_sha`."""
    hashes = [optimizer_sha(optimizer, by_sum=by_sum) for optimizer in optimizers]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("/".join(hashes).encode()).hexdigest()


def implicit_sha(model: nn.Module, device: torch.device) -> str:
    """Hash of the buffers of a model and the current random states of this process."""
    states: list[tuple[str, Any]] = [("random", capture_random_states().hex())]
    if device.type != "cpu":
        states.append(("cuda", torch.get_device_module(device).get_rng_state(device)))
    return _sha([*sorted(model.named_buffers()), *states])


def value_sha(value: Any, *, by_sum: bool = False) -> str:
    """Hash of tensors and plain values in lists, tuples and dictionaries."""
    return _sha(_leaves("", value), by_sum)


def _leaves(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}/{key!r}", item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(f"{name}/{number}", item)
    else:
        yield name, value


def _sha(named: Iterable[tuple[str, Any]], by_sum: bool = False) -> str:
    digest = hashlib.sha256()
    for name, value in named:
        digest.update(f"{name}\0".encode())
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}\0".encode())
            digest.update(raw_bytes(word_sum_of([value]) if by_sum else value).numpy().data)
        else:
            digest.update(json.dumps(value, default=_plain, sort_keys=True).encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Encode values that JSON does not know; floats keep all their bits."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic | Tensor) else repr(value)
