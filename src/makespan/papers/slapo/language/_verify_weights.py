"""The weights under which original and scheduled model are compared: the same, and none of them the user's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from makespan.papers.slapo.language._annotate import carry_tags
from makespan.papers.slapo.language._copies import copy_module
from makespan.papers.slapo.language._layouts import TensorShard, sharding_of

__all__ = ["ORIGIN", "Original", "Weights", "same_weights"]

ORIGIN = "makespan_verified_name"
"""Tag of a parameter: its name when the verification began, which it keeps wherever it goes."""
_SPREAD = 0.1


class Original:
    """A model as it was when a verification began: it shares the parameters, and has its own buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._shared: list[tuple[str, nn.Parameter, int, int]] = []
        self.module = copy_module(module, self._own)
        seen: set[int] = set()
        for name, one in module.named_parameters():
            if id(one) not in seen:
                seen.add(id(one))
                self._shared.append((name, one.data, one._version, _checksum(one)))
        self._handles = [one for _, one, _, _ in self._shared]

    def _own(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return _sharing(tensor, tensor.detach())
        return tensor.detach().clone()

    def changed(self) -> list[str]:
        """Return the parameters whose values somebody has changed in place."""
        return []


@dataclass(slots=True)
class Weights:
    """The scheduled model with the weights of the original one, and which parameter is which.

    Parameters
    ----------
    module
        A copy of the scheduled model.
    origin
        Name of the original parameter by name of the scheduled one.
    own
        Parameters that only the scheduled model has; they keep their values.
    lost
        Parameters that only the original model has.
    differed
        Parameters whose values were not the same on all processes.
    """

    module: nn.Module
    origin: dict[str, str] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    differed: list[str] = field(default_factory=list)
