"""Stages whose backward passes run in two parts, for the zero-bubble schedules of torch.

Only this module needs the runtime of torch when it is imported, which loads a compiler and takes long.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from makespan.slapo.experts import has_exchanged_experts
from makespan.training.split import SplitBackward

_SEED = 7  # of gradients that are tried; any would do
_TOLERANCE = 1e-3  # of values and of the largest one, for sums in another order


class SplitStage(PipelineStage):
    """A stage that gives gradients of its inputs first, and those of its weights later.

    The split is ours (`SplitBackward`): that of torch 2.13 follows the graph to nodes that have no weights.
    The first stage has nothing to give first, and its whole pass is the second part.
    """

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward pass, or a part of it; return gradients of inputs, and what is left to do."""
        if backward_type == "input":
            return self._first_part(**bwd_kwargs)
        if backward_type == "weight":
            bwd_kwargs["param_groups"].finish()
            return (), None
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _first_part(
        self, stage_output: Any, output_grads: Any, input_values: Any
    ) -> tuple[tuple[Tensor | None, ...], SplitBackward]:
        outputs, gradients = list[Tensor](), list[Tensor]()
        given = [None] * len(stage_output) if output_grads is None else output_grads
        for output, gradient in zip(stage_output, given, strict=True):
            if output.requires_grad and (gradient is not None or output_grads is None):  # else of the loss
                outputs.append(output)
                gradients.append(torch.ones_like(output) if gradient is None else gradient)
        inputs = [one for one in input_values if isinstance(one, Tensor) and one.requires_grad]
        split = _split(self.submod, outputs, gradients, inputs)
        found = tuple(one.grad if isinstance(one, Tensor) else None for one in input_values)
        for one in inputs:
            one.grad = None  # so that its memory is free once it is sent
        return found, split


def _split(
    stage: nn.Module, outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> SplitBackward:
    owners = [module for module in stage.modules() if has_exchanged_experts(module)]
    early = [weight for owner in owners for weight in owner.parameters()]
    return SplitBackward(outputs, gradients, inputs, stage.parameters(), early)


def why_not_split(stage: nn.Module, results: Sequence[Tensor], inputs: Sequence[Any]) -> str | None:
    """Return why passes of a stage back from its results cannot run in two parts, None if they can.

    Both parts run, and then a whole pass, whose gradients must be the same. Gradients that are there stay.
    """
    outputs = [one for one in results if one.requires_grad]
    leaves = [one for one in inputs if isinstance(one, Tensor) and one.requires_grad]
    if not outputs or not leaves:
        return None
    draw = torch.Generator().manual_seed(_SEED)
    gradients = [torch.randn(one.shape, generator=draw).to(one) for one in outputs]
    named = {f"its input {place}": one for place, one in enumerate(leaves)} | dict(stage.named_parameters())
    before = {name: one.grad for name, one in named.items()}
    found: list[dict[str, Tensor | None]] = []
    try:
        for is_split in (True, False):
            for one in named.values():
                one.grad = None
            with torch.random.fork_rng():
                if is_split:
                    _split(stage, outputs, gradients, leaves).finish()
                else:
                    torch.autograd.backward(outputs, gradients)
            found.append({name: one.grad for name, one in named.items()})
    except RuntimeError as error:  # of torch, or of a function of the model's own
        return f"its backward pass cannot run in two parts: {str(error).splitlines()[0]}"
    finally:
        for name, one in named.items():
            one.grad = before[name]
    for name, whole in found[1].items():
        ours = found[0][name]
        if whole is None or ours is None:
            is_same = ours is whole
        else:
            is_same = torch.allclose(ours, whole, rtol=_TOLERANCE, atol=_TOLERANCE * float(whole.abs().max()))
        if not is_same:
            return f"its backward pass in two parts gives another gradient of {name} than a whole one"
    return None
