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
        self._is_first = place.rank("pp") == 0
        self._is_last = place.rank("pp") == plan.pp - 1
        self._clock = Clock(place.device)
        stages = [
            self._stage(chunk, place.rank("pp") + number * plan.pp, spec, plan, place)
            for number, chunk in enumerate(chunks)
        ]
        self._schedule = _schedule(plan, stages, loss)
        for chunk in chunks:  # recomputation inside its layers is no forward pass
            chunk.register_forward_pre_hook(lambda *_: self._clock.start_forward())
            chunk.register_forward_hook(lambda *_: self._clock.end_forward())

    def _stage(
        self, chunk: SmallTransformer, index: int, spec: SmallModel, plan: ExecutionPlan, place: Place
    ) -> PipelineStage:
        count = plan.pp * plan.interleave
        seq = spec.seq // plan.tp if plan.sequence_parallel else spec.seq
        hidden = tuple(
            torch.empty(plan.micro_batch_size, seq, spec.hidden, device=place.device, requires_grad=True)
            for _ in range(n_hidden_states(spec))
        )
        inputs = (_sample(spec, plan, place.device),) if index == 0 else hidden
        outputs = (_logits(spec, plan, place.device),) if index == count - 1 else hidden
        return PipelineStage(
            chunk, index, count, place.device, input_args=inputs, output_args=outputs, group=place.group("pp")
        )

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


def _schedule(plan: ExecutionPlan, stages: Sequence[PipelineStage], loss: Loss) -> Any:
    if plan.schedule == "interleaved":
        return ScheduleInterleaved1F1B(list(stages), plan.n_microbatches, loss, scale_grads=False)
    kind = Schedule1F1B if plan.schedule == "1f1b" else ScheduleGPipe
    return kind(stages[0], plan.n_microbatches, loss, scale_grads=False)


def _sample(spec: SmallModel, plan: ExecutionPlan, device: torch.device) -> Tensor:
    batch = plan.micro_batch_size
    if spec.family == "vit":
        return torch.empty(batch, spec.seq, spec.patch_features, device=device)
    shape = (batch, 2, spec.seq) if spec.family == "t5" else (batch, spec.seq)
    return torch.empty(shape, dtype=torch.int64, device=device)


def _logits(spec: SmallModel, plan: ExecutionPlan, device: torch.device) -> Tensor:
    batch = plan.micro_batch_size
    shape = (batch, spec.vocab) if spec.family == "vit" else (batch, spec.seq, spec.vocab)
    return torch.empty(shape, device=device, requires_grad=True)
