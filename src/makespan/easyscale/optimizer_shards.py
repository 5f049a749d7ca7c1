"""Optimizer state in shards (ZeRO stage 1): who holds which part, steps of a part, exchange of parameters.

Each parameter has an owner among the processes, and with ``survives=f`` f processes that follow the owner
hold its optimizer state, too. Every process has all gradients; a holder takes the step of what it holds, and
the owner sends the new parameters to the processes that do not hold them.

With ``survives`` the state of a whole mini-batch must remain after f losses, although no process can finish a
step alone and nobody keeps a copy of the state before. Let B be the moment in which a process has the results
of all for mini-batch s + 1. Before it sends its own results, a process has the sum of gradients, the contexts
that it keeps, and the buffers that code after the sum sees: it is ready. The invariants are:

1. A process changes its shard only after B, or in a recovery after it has received the shared state after
   s + 1 of another process. So a process whose shard is only there after s + 1 has all else after s + 1.
2. If any process is past B, all others have sent their results, so they are ready or past B, too. Those that
   are ready can take the step of their shards alone, in the recovery. They can supply them after s and s + 1.
3. Nobody is past B of s + 2 before all have received the parameters of s + 1.

So with the highest number of mini-batches that any process has done, each process supplies all that it holds;
as each shard is on f + 1 processes, the union is whole after f losses, also if some of them are lost amid the
recovery: shards that go to other processes are dropped only when all of these have theirs. Parameters that a
loss has left half received come from their holders.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from makespan.easyscale.parts import TrainedParts
from makespan.easyscale.randomness import value_sha
from makespan.easyscale.recovery import backups
from makespan.easyscale.reduction import Broadcast, Steps
from makespan.errors import InputError

_ELEMENTWISE = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD",
)  # fmt: skip
"""Optimizers of torch whose step of one parameter depends on no other parameter."""
_SMALL_BYTES = 1 << 16
"""Smaller parameters travel in one vector, larger ones from where they are to where they are needed."""
_ALIGNED = 8  # bytes


def owners_of(sizes: Sequence[int], n_processes: int) -> list[int]:
    """Return the process that owns each parameter.

    Neighbours have one owner, so that few move when the number of processes changes. The elements of two
    processes differ by at most about one parameter.

    Parameters
    ----------
    sizes
        Elements of each parameter.
    """
    total = max(sum(sizes), 1)
    # The owner is the process in whose share of the elements the middle of the parameter lies.
    middles = [2 * end - size for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return [min(middle * n_processes // (2 * total), n_processes - 1) for middle in middles]


def holders_of(sizes: Sequence[int], hosts: Sequence[str], survives: int) -> list[tuple[int, ...]]:
    """Return the processes that hold the optimizer state of each parameter, the owner first.

    Parameters
    ----------
    sizes, hosts
        Elements of each parameter, and host of each process.
    survives
        Copies besides that of the owner, see `makespan.easyscale.recovery.backups`.
    """
    owners = owners_of(sizes, len(hosts))
    by_owner = {owner: (owner, *backups(owner, hosts, survives)) for owner in set(owners)}
    return [by_owner[owner] for owner in owners]


class OptimizerShards:
    """The part of the optimizer state that this process holds.

    Parameters are numbered as in the ``state_dict`` of the optimizer.

    Parameters
    ----------
    parts
        Trained objects. An `InputError` names an optimizer, a hook or a scaler whose step of one parameter
        may depend on others.
    survives
        Processes that hold each part besides its owner.

    Attributes
    ----------
    numbers
        Parameters that this process holds.
    is_whole
        True while the optimizer has the state of all parameters, from `complete` to the next step.
    """

    def __init__(self, parts: TrainedParts, survives: int) -> None:
        _check_elementwise(parts)
        self._optimizer, self._survives = parts.optimizer, survives
        self.parameters = [each for group in parts.optimizer.param_groups for each in group["params"]]
        names = {id(parameter): name for name, parameter in parts.model.named_parameters()}
        self.names = [names[id(parameter)] for parameter in self.parameters]
        # A frozen parameter never changes; its state, if there is any, has an owner all the same.
        self._is_trained = [parameter.requires_grad for parameter in self.parameters]
        self._flat: dict[int, Tensor] = {}
        self.numbers, self.is_whole = set[int](), True
        self._process, self._holders = 0, list[tuple[int, ...]]()
        self._targets = list[tuple[int, ...]]()

    def holders(self, hosts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the processes that hold each parameter if there is one process on each of some hosts."""
        return holders_of([each.numel() for each in self.parameters], hosts, self._survives)

    def place(self, process: int, hosts: Sequence[str]) -> None:
        """Keep what a process holds and drop the rest; its own number, and the host of each process."""
        self._process, self._holders = process, self.holders(hosts)
        self.numbers = {number for number, each in enumerate(self._holders) if process in each}
        holding = {each[0]: each for each in self._holders}
        everybody = range(len(hosts))
        self._targets = [
            tuple(other for other in everybody if owner in holding and other not in holding[owner])
            for owner in everybody
        ]
        self._flat.clear()
        self.is_whole = True  # as far as this object knows
        self._prune()

    def _prune(self) -> None:
        """Drop the state of parameters that this process does not hold."""
        if self.is_whole:
            for number, parameter in enumerate(self.parameters):
                if number not in self.numbers:
                    self._optimizer.state.pop(parameter, None)
            self.is_whole = len(self.numbers) == len(self.parameters)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Show the optimizer only the gradients of what this process holds."""
        self._prune()
        others = [each for number, each in enumerate(self.parameters) if number not in self.numbers]
        hidden = [(parameter, parameter.grad) for parameter in others]
        for parameter in others:
            parameter.grad = None
        yield
        for parameter, gradient in hidden:
            parameter.grad = gradient

    # --- parameters ---

    def share(self) -> Steps[None]:
        """Send the parameters that this process owns to those that do not hold them, and receive others."""
        if not any(self._targets):
            return
        vectors: list[list[Tensor]] = [[] for _ in self._targets]
        copies = []
        for owner, targets in enumerate(self._targets):
            if not targets or self._process not in (owner, *targets):
                continue
            small = []
            for number, parameter in enumerate(self.parameters):
                if self._holders[number][0] == owner and self._is_trained[number] and parameter.numel():
                    memory = _memory_of(parameter)
                    if memory is None or parameter.nbytes < _SMALL_BYTES:
                        small.append(parameter.detach())
                    else:
                        vectors[owner].append(memory)
            if small:
                flat, places = self._flat_of(owner, small)
                vectors[owner].append(flat)
                if owner == self._process:
                    for place, value in zip(places, small, strict=True):
                        place.copy_(value)
                else:
                    copies += list(zip(small, places, strict=True))
        yield Broadcast(vectors, self._targets)
        for value, place in copies:
            value.copy_(place)

    def _flat_of(self, owner: int, small: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return a kept vector of bytes for the small parameters of an owner, and the place of each in it."""
        ends = list(accumulate((-(-value.nbytes // _ALIGNED) * _ALIGNED for value in small), initial=0))
        flat = self._flat.get(owner)
        if flat is None or flat.numel() != ends[-1]:
            flat = self._flat[owner] = torch.zeros(ends[-1], dtype=torch.uint8, device=small[0].device)
        return flat, [
            flat[begin : begin + value.nbytes].view(value.dtype).view(value.shape)
            for begin, value in zip(ends, small, strict=False)
        ]

    # --- state ---

    def state(self, numbers: Sequence[int] | None = None) -> dict[int, Any]:
        """Return the state of some parameters, or all that this process holds, by number.

        A parameter that the optimizer has no state of, because it never had a gradient, is left out.
        """
        chosen = sorted(self.numbers) if numbers is None else numbers
        known = self._optimizer.state
        return {
            number: known[self.parameters[number]] for number in chosen if self.parameters[number] in known
        }

    def owned(self) -> dict[int, Any]:
        """Return the state of the parameters that this process owns, for `complete`.

        Values are on the host, each with whether it was on another device.
        """
        numbers = [number for number, each in enumerate(self._holders) if each[0] == self._process]
        return {
            number: {
                name: (each.cpu(), each.device.type != "cpu") if isinstance(each, Tensor) else (each, False)
                for name, each in values.items()
            }
            for number, values in self.state(numbers).items()
        }

    def complete(self, parts: Sequence[Mapping[int, Any]]) -> None:
        """Make the optimizer whole until its next step, from `owned` of all processes."""
        if self.is_whole:
            return
        state: dict[int, Any] = {}
        for number, values in (each for part in parts for each in part.items()):
            device = self.parameters[number].device
            state[number] = {
                name: each.to(device) if moves else each for name, (each, moves) in values.items()
            }
        self._install(state | self.state())
        self.is_whole = True

    def receive(self, state: Mapping[int, Any], numbers: Iterable[int]) -> None:
        """Hold some parameters more, with their state from another process."""
        self._install(self.state() | dict(state))
        self.numbers |= set(numbers)

    def _install(self, state: Mapping[int, Any]) -> None:
        """Replace the state of the optimizer; entries are in the order of the parameters.

        Not by ``load_state_dict``, which may convert values to another type.
        """
        self._optimizer.state.clear()
        for number in sorted(state):
            # Names that came from another process are objects of their own, which a checkpoint would repeat.
            values = {sys.intern(name): value for name, value in state[number].items()}
            self._optimizer.state[self.parameters[number]] = values

    def hashes(self) -> dict[str, str]:
        """Return hashes of what all that hold it must have in common, by name."""
        hashes = {
            f"the state of the optimizer for {self.names[number]}": value_sha(values, by_sum=True)
            for number, values in self.state().items()
        }
        return hashes | {
            "the options of the optimizer": value_sha(self._optimizer.state_dict()["param_groups"])
        }


def _memory_of(parameter: Tensor) -> Tensor | None:
    """Return the elements of a parameter in the order of its memory; None if they have gaps."""
    strides = zip(parameter.shape, parameter.stride(), strict=True)
    extent = 1 + sum((size - 1) * step for size, step in strides)
    return parameter.detach().as_strided((extent,), (1,)) if extent == parameter.numel() else None


def _check_elementwise(parts: TrainedParts) -> None:
    """Reject what may step one parameter with the gradient or the state of another."""
    optimizer, scaler = parts.optimizer, parts.scaler
    kind = type(optimizer)
    problem = ""
    if kind.__name__ not in _ELEMENTWISE or getattr(torch.optim, kind.__name__, None) is not kind:
        problem = f"the optimizer is {kind.__module__}.{kind.__qualname__}"
        expected = f"one of torch.optim: {', '.join(_ELEMENTWISE)}"
    elif any(hooks for name, hooks in vars(optimizer).items() if name.endswith("_hooks")):
        problem = f"the optimizer, {kind.__name__}, has hooks, which may see the state of all parameters"
        expected = "none"
    elif scaler is not None and not type(scaler).__module__.startswith("torch."):
        problem = f"the scaler is {type(scaler).__module__}.{type(scaler).__qualname__}"
        expected = "torch.amp.GradScaler"
    if problem:
        raise InputError(
            f"zero_stage is 1 and {problem}; expected {expected}, or zero_stage=0: with 1, a process steps "
            "only the parameters that it holds"
        )


__all__ = ["OptimizerShards", "holders_of", "owners_of"]
