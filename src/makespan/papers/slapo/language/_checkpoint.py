"""Recomputation of activations in the backward pass, and the choice of layers for it."""

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from makespan.papers.slapo.language._errors import ArgumentError, ConflictError
from makespan.papers.slapo.language._registry import Primitive, register_primitive
from makespan.papers.slapo.language._subgraphs import checkpoint_subgraph
from makespan.papers.slapo.language._trace import check_is_called
from makespan.papers.slapo.language._wrapping import ForwardWrapper, wrap_forward, wrapped_forward

if TYPE_CHECKING:
    from makespan.papers.slapo.language._schedule import Schedule

__all__ = ["Checkpoint", "Checkpointed", "select_layers"]


class Checkpointed(ForwardWrapper):
    """A forward whose activations are recomputed."""

    op = "checkpoint"

    def __init__(self, module: nn.Module, preserve_rng: bool) -> None:
        super().__init__(module)
        self.preserve_rng = preserve_rng

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward now, and again when its gradients are needed."""
        return checkpoint(
            self.inner, *args, use_reentrant=False, preserve_rng_state=self.preserve_rng, **kwargs
        )


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
            Whether the second pass draws the same random numbers as the first.
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
