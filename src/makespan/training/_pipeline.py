"""Pipeline parallelism: stages of a model and the schedule that runs them.

Imported by pipelined runs only, because what it needs of torch takes long to load.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from makespan.plans import ExecutionPlan
from makespan.training._engine import Clock, Loss, Place
from makespan.training.zoo import SmallModel
from makespan.training.zoo._models import SmallTransformer, n_hidden_states

__all__ = ["Pipeline"]


class Pipeline:
    """A pipeline schedule over the stages of this process."""

    def __init__(
        self,
        chunks: Sequence[SmallTransformer],
        spec: SmallModel,
        plan: ExecutionPlan,
        place: Place,
        loss: Loss,
    ) -> None:
        rank, self._clock = place.rank("pp"), Clock(place.device)
        self._is_first, self._is_last = rank == 0, rank == plan.pp - 1
        indices = range(rank, plan.pp * plan.interleave, plan.pp)
        parts = zip(chunks, indices, strict=True)
        self._schedule = _schedule(
            plan, [_stage(one, index, spec, plan, place) for one, index in parts], loss
        )
        for chunk in chunks:  # recomputation inside its layers is no forward pass
            chunk.register_forward_pre_hook(lambda *_: self._clock.start_forward())
            chunk.register_forward_hook(lambda *_: self._clock.end_forward())

    def run(self, inputs: Tensor, targets: Tensor, clock: Clock) -> Tensor:
        """Run the schedule once over all micro-batches."""
        self._clock = clock
        losses: list[Tensor] = []
        arguments = (inputs,) if self._is_first else ()
        if self._is_last:
            self._schedule.step(*arguments, target=targets, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*arguments, return_outputs=False)
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=inputs.device)


def _stage(
    chunk: SmallTransformer, index: int, spec: SmallModel, plan: ExecutionPlan, place: Place
) -> PipelineStage:
    device, count, batch = place.device, plan.pp * plan.interleave, plan.micro_batch_size
    seq = spec.seq // plan.tp if plan.sequence_parallel else spec.seq
    hidden = tuple(
        torch.empty(batch, seq, spec.hidden, device=device, requires_grad=True)
        for _ in range(n_hidden_states(spec))
    )
    inputs = (_sample(spec, batch, device),) if index == 0 else hidden
    outputs = (_logits(spec, batch, device),) if index == count - 1 else hidden
    return PipelineStage(
        chunk, index, count, device, input_args=inputs, output_args=outputs, group=place.group("pp")
    )


def _schedule(plan: ExecutionPlan, stages: Sequence[PipelineStage], loss: Loss) -> Any:
    if plan.schedule == "interleaved":
        return ScheduleInterleaved1F1B(list(stages), plan.n_microbatches, loss, scale_grads=False)
    kind = Schedule1F1B if plan.schedule == "1f1b" else ScheduleGPipe
    return kind(stages[0], plan.n_microbatches, loss, scale_grads=False)


def _sample(spec: SmallModel, batch: int, device: torch.device) -> Tensor:
    if spec.family == "vit":
        return torch.empty(batch, spec.seq, spec.patch_features, device=device)
    shape = (batch, 2, spec.seq) if spec.family == "t5" else (batch, spec.seq)
    return torch.empty(shape, dtype=torch.int64, device=device)


def _logits(spec: SmallModel, batch: int, device: torch.device) -> Tensor:
    shape = (batch, spec.vocab) if spec.family == "vit" else (batch, spec.seq, spec.vocab)
    return torch.empty(shape, device=device, requires_grad=True)
