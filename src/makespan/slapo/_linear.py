"""The primitive that shows the product of a linear layer, and the addition of its bias, by themselves."""

from typing import TYPE_CHECKING

from torch import nn

from makespan.slapo._errors import ConflictError
from makespan.slapo._registry import Primitive, register_primitive
from makespan.slapo._split_layers import LateBiasLinear, become

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["Decompose"]


@register_primitive()
class Decompose(Primitive):
    """Show the product and the addition of the bias of a linear layer as two nodes of a graph."""

    @classmethod
    def name(cls) -> str:
        """Return ``decompose``."""
        return "decompose"

    @classmethod
    def apply(cls, sch: "Schedule") -> None:
        """Let this layer, which must be linear with a bias, add it in a step of its own."""
        mod = sch.mod
        is_late = isinstance(mod, LateBiasLinear)
        if is_late and vars(mod).get("traceable"):
            raise ConflictError(f"decompose of {sch.path!r}: done already, {sch.conflict('decompose')}")
        if not isinstance(mod, nn.Linear) or mod._parameters["bias"] is None:
            found = "Linear without bias" if isinstance(mod, nn.Linear) else type(mod).__name__
            raise ConflictError(f"decompose of {sch.path!r}: found {found}; accepted: nn.Linear with bias")
        if not is_late:
            if type(mod).forward is not nn.Linear.forward:
                raise ConflictError(
                    f"decompose of {sch.path!r}: {type(mod).__name__} has a forward of its own; "
                    "accepted: nn.Linear with bias"
                )
            become(mod, LateBiasLinear)
        vars(mod)["traceable"] = True
