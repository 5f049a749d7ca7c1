"""Recomputation of activations in the backward pass, and the choice of layers for it."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from makespan.slapo._errors import ArgumentError, ConflictError
from makespan.slapo._kept_state import KeptState, kept_arguments
from makespan.slapo._registry import Primitive, register_primitive
from makespan.slapo._subgraphs import checkpoint_subgraph
from makespan.slapo._trace import check_is_called
from makespan.slapo._wrapping import ForwardWrapper, wrap_forward, wrapped_forward

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["Checkpoint", "Checkpointed", "select_layers"]


class Checkpointed(ForwardWrapper):
    """A forward whose activations are recomputed, and whose state is not changed by that.

    The second pass starts from the state that the first one found: buffers, attributes, generators of random
    numbers, and objects, lists and dictionaries among the arguments, such as a cache. What it changes of them
    is dropped when it ends. So batch norm counts a batch once, spectral norm multiplies by the same vectors,
    a cache does not grow twice, and a layer that Python's generator leaves out is left out again.
    """

    op = "checkpoint"

    def __init__(self, module: nn.Module, preserve_rng: bool) -> None:
        super().__init__(module)
        self.module, self.preserve_rng = module, preserve_rng

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward now, and again when its gradients are needed."""
        inner = self.inner
        # Without gradients nothing is run again, and a compiler keeps state out of what it repeats.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return checkpoint(
                inner, *args, use_reentrant=False, preserve_rng_state=self.preserve_rng, **kwargs
            )
        before = KeptState(self.module, (args, kwargs), with_global_draws=self.preserve_rng)
        kept = kept_arguments(args, kwargs)
        versions = [(name, one, one._version) for name, one in _frozen(self.module)]
        passes = 0

        def run(*own: Any, **named: Any) -> Any:
            nonlocal passes
            passes += 1
            if kept is not None and passes > 1:
                own, named = kept(own, named)
            return inner(*own, **named)

        try:
            output = checkpoint(
                run,
                *args,
                use_reentrant=False,
                preserve_rng_state=self.preserve_rng,
                context_fn=lambda: (nullcontext(), before.put_back()),
                **kwargs,
            )
        finally:
            before.forget_what_is_the_same()
        for name, one, version in versions:
            if one._version != version:
                raise ConflictError(
                    f"checkpoint: the forward of {type(self.module).__name__} changes its parameter {name!r},"
                    " and would change it again when it is recomputed; accepted: a buffer in its place, or"
                    " checkpoint of a module that does not change it"
                )
        return output


def _frozen(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Go through the parameters that no optimizer changes, so that a forward may do it.

    Those layers are left out that bring their weights into a form in which a second pass leaves them.
    """
    for path, one in module.named_modules():
        if not isinstance(one, nn.Embedding | nn.EmbeddingBag | nn.RNNBase):
            for name, parameter in one.named_parameters(path, recurse=False):
                if not parameter.requires_grad and not parameter.is_inference():
                    yield name, parameter


@register_primitive()
class Checkpoint(Primitive):
    """Keep no activations of a module, or of nodes of its graph; recompute them for the backward pass."""

    @classmethod
    def name(cls) -> str:
        """Return ``checkpoint``."""
        return "checkpoint"

    @classmethod
    def apply(
        cls,
        sch: "Schedule",
        subgraph: object = None,
        order_args_fn: Callable[..., Any] | None = None,
        preserve_rng: bool = True,
    ) -> None:
        """Recompute the whole module, or one match of `find`.

        Parameters
        ----------
        subgraph
            A match of `find`; None for the whole module.
        order_args_fn
            Called with the inputs of the match, returns them in the order in which they are passed.
        preserve_rng
            Whether the second pass draws the same random numbers as the first, also from the generators of
            Python and NumPy. From generators that the module holds it always does.
        """
        if subgraph is not None:
            part = checkpoint_subgraph(sch, subgraph, order_args_fn)
            wrap_forward(part, Checkpointed(part, preserve_rng))
            return
        if order_args_fn is not None:
            raise ArgumentError(f"checkpoint of {sch.path!r}: order_args_fn needs a subgraph")
        check_is_called(sch, cls.name())
        if wrapped_forward(sch.mod, Checkpointed):
            raise ConflictError(
                f"checkpoint of {sch.path!r}: it is recomputed already, {sch.conflict('checkpoint')}"
            )
        above = sch.parent
        while above is not None:
            if wrapped_forward(above.mod, Checkpointed):
                warnings.warn(
                    f"checkpoint of {sch.path!r}: {above.path!r} above it is recomputed already, "
                    "so this module runs three times",
                    stacklevel=3,
                )
                break
            above = above.parent
        wrap_forward(sch.mod, Checkpointed(sch.mod, preserve_rng))


def select_layers(n: int, ratio: float, policy: str = "even") -> list[int]:
    """Return the indices of the layers to recompute: exactly ``floor(n * ratio)`` of them.

    Parameters
    ----------
    n
        Number of layers.
    ratio
        Share of them, in [0, 1].
    policy
        ``even`` spreads them over the model, ``head`` takes the first.

    Raises
    ------
    ArgumentError
        A value is out of range; also a `ValueError`.
    """
    if n < 0 or not 0 <= ratio <= 1:
        raise ArgumentError(f"select_layers got n = {n}, ratio = {ratio}; accepted: n >= 0, ratio in [0, 1]")
    if policy not in ("even", "head"):
        raise ArgumentError(f"select_layers got policy {policy!r}; accepted: 'even', 'head'")
    count = math.floor(n * ratio + 1e-9)
    if policy == "head":
        return list(range(count))
    return [index for index in range(n) if (index + 1) * count // n > index * count // n]
