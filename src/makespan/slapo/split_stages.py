"""Stages whose backward passes run in two parts, for the zero-bubble schedules of torch.

Only this module needs the runtime of torch when it is imported, which loads a compiler and takes long.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from makespan.slapo.experts import has_exchanged_experts
from makespan.training.split import SplitBackward


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
        early = [
            weight
            for module in self.submod.modules()
            if has_exchanged_experts(module)
            for weight in module.parameters()
        ]
        split = SplitBackward(outputs, gradients, inputs, self.submod.parameters(), early)
        found = tuple(one.grad if isinstance(one, Tensor) else None for one in input_values)
        for one in inputs:
            one.grad = None  # so that its memory is free once it is sent
        return found, split
