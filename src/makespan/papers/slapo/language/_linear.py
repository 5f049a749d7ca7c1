"""A linear layer that adds its bias in a step of its own, after what is left to do with the product."""

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from makespan.papers.slapo.language._errors import ConflictError
from makespan.papers.slapo.language._registry import Primitive, register_primitive
from makespan.papers.slapo.language._replace import put_in_place

if TYPE_CHECKING:
    from makespan.papers.slapo.language._schedule import Schedule

__all__ = ["Decompose", "LateBiasLinear"]


class LateBiasLinear(nn.Linear):
    """``reduce(input @ weight.T) + bias``, with the parameters of the layer that it stands in for.

    Parameters
    ----------
    linear
        Where the parameters come from, the same objects.
    reduce
        Applied to the product before the bias is added, such as a sum over processes; a module without
        parameters, so that names in the state do not change.
    traceable
        Whether a tracer looks inside and sees product and addition apart.
    """

    def __init__(self, linear: nn.Linear, reduce: nn.Module | None = None, traceable: bool = False) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear._parameters["bias"])
        self.reduce, self.traceable = reduce, traceable
        self.train(linear.training)

    def forward(self, data: Tensor) -> Tensor:
        """Multiply, reduce, add."""
        product = F.linear(data, self.weight)
        if self.reduce is not None:
            product = self.reduce(product)
        return product if self._parameters["bias"] is None else product + self.bias


@register_primitive()
class Decompose(Primitive):
    """Show the product and the addition of the bias of a linear layer as two nodes of a graph."""

    @classmethod
    def name(cls) -> str:
        """Return ``decompose``."""
        return "decompose"

    @classmethod
    def apply(cls, sch: "Schedule") -> None:
        """Put a layer with the same parameters in the place of this one, which must be linear with bias."""
        mod = sch.mod
        if isinstance(mod, LateBiasLinear) and mod.traceable:
            raise ConflictError(f"decompose of {sch.path!r}: done already, {sch.conflict('decompose')}")
        if not isinstance(mod, nn.Linear) or mod._parameters["bias"] is None:
            found = "Linear without bias" if isinstance(mod, nn.Linear) else type(mod).__name__
            raise ConflictError(f"decompose of {sch.path!r}: found {found}; accepted: nn.Linear with bias")
        if isinstance(mod, LateBiasLinear):
            mod.traceable = True
        elif type(mod).forward is not nn.Linear.forward:
            raise ConflictError(
                f"decompose of {sch.path!r}: {type(mod).__name__} has a forward of its own; "
                "accepted: nn.Linear with bias"
            )
        else:
            put_in_place(sch, LateBiasLinear(mod, traceable=True))
