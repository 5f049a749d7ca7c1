"""Parts of a traced graph in the hands of primitives that also work on whole modules."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from makespan.papers.slapo.language._errors import TracingError

if TYPE_CHECKING:
    from makespan.papers.slapo.language._schedule import Schedule

__all__ = ["checkpoint_subgraph", "replace_subgraph"]


def replace_subgraph(
    sch: "Schedule",
    new: nn.Module | Callable[..., Any],
    target_ops: object,
    name: str | None,
    concrete_args: Mapping[str, Any] | None,
    each: bool,
) -> None:
    """Replace matches in the graph of a module."""
    raise TracingError(f"replace of {sch.path!r}: graphs are not captured yet; accepted: whole modules")


def checkpoint_subgraph(
    sch: "Schedule", subgraph: object, order_args_fn: Callable[..., Any] | None, preserve_rng: bool
) -> None:
    """Recompute a match in the graph of a module."""
    raise TracingError(f"checkpoint of {sch.path!r}: graphs are not captured yet; accepted: whole modules")
