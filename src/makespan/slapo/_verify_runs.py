"""One forward and one backward pass of a model on given inputs, of which nothing remains outside."""

import functools
import inspect
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo._errors import ArgumentError, KindError
from makespan.slapo._kept_state import copied_object, opened

__all__ = [
    "Call",
    "Inputs",
    "LossFunction",
    "Outcome",
    "without_dropout",
    "call_from",
    "checked_call",
    "run_backward",
    "run_forward",
]

Inputs: TypeAlias = "Tensor | Sequence[Any] | Mapping[str, Any] | Callable[[torch.Generator], Any]"
LossFunction: TypeAlias = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a forward pass, the names of the positional ones, and of those that want a gradient."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...] = ()
    wanting: frozenset[str] | None = None

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors among the arguments by name."""
        return named_tensors(self.named())

    def named(self) -> dict[str, Any]:
        """Return all arguments by name."""
        return dict(zip(self.names, self.args, strict=True)) | self.kwargs

    def fresh(self, device: torch.device) -> "Call":
        """Return copies; those of real numbers want a gradient, or those among them that are named."""

        def copied(name: str, value: Any) -> Any:
            wants = self.wanting is None or name in self.wanting

            def copy(one: Any) -> Any:
                if not isinstance(one, Tensor):
                    return copied_object(one)  # a cache grows in each model by itself
                new = one.detach().to(device, copy=True)
                return new.requires_grad_(wants and (new.is_floating_point() or new.is_complex()))

            return pytree.tree_map(copy, value)

        args = tuple(copied(name, one) for name, one in zip(self.names, self.args, strict=True))
        kwargs = {name: copied(name, one) for name, one in self.kwargs.items()}
        return Call(args, kwargs, self.names, self.wanting)


@dataclass(slots=True)
class Outcome:
    """What came of a forward pass.

    ``held`` names the tensors that are inside of objects, such as a cache: what a model keeps there for
    itself may be the part of a process, and no gradient starts from it.
    """

    leaves: dict[str, Tensor]
    passed: dict[str, Tensor]
    structure: pytree.TreeSpec
    tensors: dict[str, Tensor]
    loss: Tensor | None = None
    others: dict[str, Any] = field(default_factory=dict)
    held: frozenset[str] = frozenset()

    def changed_inputs(self) -> list[str]:
        """Return which arguments the model has changed in place."""
        return [
            name
            for name, leaf in self.leaves.items()
            if not torch.equal(self.passed[name].detach().nan_to_num(), leaf.detach().nan_to_num())
        ]


def call_from(inputs: Inputs, seed: int) -> Call:
    """Return the arguments that a user gave: positional ones, keyword ones, or what a function draws."""
    given = inputs(torch.Generator().manual_seed(seed)) if callable(inputs) else inputs
    if isinstance(given, Tensor):
        return Call((given,), {})
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return Call((), dict(given))
    if isinstance(given, Sequence) and not isinstance(given, str):
        return Call(tuple(given), {})
    raise KindError(
        f"Verify: example inputs are {type(given).__name__}; accepted: a tensor, a sequence of positional "
        "arguments, a mapping of keyword arguments, or a function of a generator that returns one of these"
    )


def checked_call(model: nn.Module, call: Call, path: str, wanting: Sequence[str] | None) -> Call:
    """Name the arguments; refuse those that the forward pass does not take."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise KindError(
            f"Verify of {path!r}: the example inputs do not fit {type(model).__name__}.forward"
            f"{signature}: {error}"
        ) from None
    known = [one.name for one in signature.parameters.values() if one.kind is not one.VAR_POSITIONAL]
    names = tuple([*known, *map(str, range(len(call.args)))][: len(call.args)])
    if isinstance(wanting, str) or (wanting is not None and set(wanting) - {*names, *call.kwargs}):
        accepted = ", ".join([*names, *call.kwargs])
        raise ArgumentError(f"Verify of {path!r}: input_grads {wanting!r}; accepted: names among {accepted}")
    return Call(call.args, call.kwargs, names, None if wanting is None else frozenset(wanting))


def named_tensors(tree: Any) -> dict[str, Tensor]:
    """Return the tensors in a tree by their place."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {_named(place): one for place, one in leaves if isinstance(one, Tensor)}


def _named(place: tuple[Any, ...]) -> str:
    if not place:
        return "itself"
    first, others = place[:1], place[1:]
    return pytree.keystr(first).strip("[].'") + pytree.keystr(others).replace("'", "")


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers from a seed, those of Python and NumPy too; leave the generators as they were."""
    devices = [device] if device.type == "cuda" else []
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - models may draw from it
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


@contextmanager
def without_dropout() -> Iterator[None]:
    """Let dropout of models in training mode drop nothing, and draw nothing.

    So that they can be compared: which values are dropped depends on the order of all that draws, and on how
    tensors are split. The functions are exchanged rather than intercepted, because no interception of torch
    reaches what is recomputed in a backward pass. What is compiled runs as it was written meanwhile.
    """
    compiler = sys.modules.get("torch._dynamo")  # not loaded as long as nothing compiled has run
    with ExitStack() as stack:
        if compiler is not None:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for space, rates in ((torch.nn.functional, _RATES), (torch, _RATES), (torch._VF, _RATES_OF_LAYERS)):
            for name, place in rates.items():
                if callable(dropping := getattr(space, name, None)):
                    stack.enter_context(mock.patch.object(space, name, _at_rate_of_zero(dropping, place)))
        yield


_RATES: Mapping[str, tuple[str, int | None]] = {
    name: ("p", 1)
    for plain in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
                  "feature_alpha_dropout", "native_dropout")
    for name in (plain, f"{plain}_")
} | {
    "scaled_dot_product_attention": ("dropout_p", 4),
    "multi_head_attention_forward": ("dropout_p", 10),
}  # fmt: skip
"""Functions that drop something: name and place of the rate."""
_RATES_OF_LAYERS: Mapping[str, tuple[str, int | None]] = dict.fromkeys(
    ("lstm", "gru", "rnn_tanh", "rnn_relu"), ("dropout", None)
)
"""The same of recurrent layers, whose only fraction is the rate."""


def _at_rate_of_zero(dropping: Callable[..., Any], rate: tuple[str, int | None]) -> Callable[..., Any]:
    name, place = rate

    @functools.wraps(dropping)
    def keep_all(*args: Any, **kwargs: Any) -> Any:
        if place is None:
            return dropping(*(0.0 if isinstance(one, float) else one for one in args), **kwargs)
        if len(args) > place:
            return dropping(*args[:place], 0.0, *args[place + 1 :], **kwargs)
        return dropping(*args, **kwargs | {name: 0.0})

    return keep_all


def run_forward(
    model: nn.Module, call: Call, seed: int, device: torch.device, loss_fn: LossFunction | None
) -> Outcome:
    """Run a model forward on copies of the arguments."""
    own = call.fresh(device)
    # What a model does in place it may not do to a leaf.
    passed = pytree.tree_map_only(Tensor, Tensor.clone, (own.args, own.kwargs))
    seen = Call(passed[0], passed[1], own.names)
    with _seeded(seed, device), torch.enable_grad():
        outputs = model(*passed[0], **passed[1])
        loss = None if loss_fn is None else loss_fn(outputs)
    direct = named_tensors(outputs)
    contents = pytree.tree_map(opened, outputs)
    leaves, structure = pytree.tree_flatten_with_path(contents)
    others = {_named(place): one for place, one in leaves if not isinstance(one, Tensor)}
    tensors = named_tensors(contents)
    held = frozenset(tensors.keys() - direct.keys())
    return Outcome(own.leaves(), seen.leaves(), structure, tensors, loss, others, held)


def run_backward(outcome: Outcome, seed: int, device: torch.device) -> None:
    """Run backward from the loss, or from all outputs with gradients that the seed decides."""
    if outcome.loss is not None:
        ends = {"loss": outcome.loss}
    else:
        results = {name: one for name, one in outcome.tensors.items() if name not in outcome.held}
        ends = {name: one for name, one in results.items() if one.requires_grad}
    starts = []
    for name, one in ends.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        drawn = torch.randn(one.shape, generator=generator, dtype=torch.float32)
        starts.append(torch.ones_like(one) if outcome.loss is not None else drawn.to(one))
    if ends:
        with _seeded(seed, device):
            torch.autograd.backward(list(ends.values()), starts)
