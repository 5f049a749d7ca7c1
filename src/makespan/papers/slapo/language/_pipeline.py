"""What runs the stages of a cut model, one in each process.

Imported by pipelined runs only, because what it needs of torch takes long to load.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from makespan.papers.slapo.language._errors import ArgumentError, BuildError
from makespan.papers.slapo.language._partition import Partition, partition

if TYPE_CHECKING:
    from makespan.papers.slapo.language._schedule import Schedule

__all__ = ["OPTIONS", "Pipeline", "build_pipeline"]

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
OPTIONS = frozenset({"n_microbatches", "loss_fn", "schedule"})


class Pipeline:
    """The stage of this process, and the schedule that runs it with those of the others.

    Parameters
    ----------
    parts
        All stages, of which this process runs the one with its number in the group.
    group
        One process a stage, in order.
    replicas
        Processes that have the same stage, whose gradients are averaged; None for no others.
    n_microbatches
        Parts into which the samples of a step are split.
    loss_fn
        Function of output and target that returns the mean over samples; None for forward passes only.
    schedule
        ``gpipe`` or ``1f1b``.
    """

    def __init__(
        self,
        parts: Partition,
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None,
        schedule: str,
    ) -> None:
        self.index, self._replicas = dist.get_rank(group), replicas
        self.module = parts.stages[self.index]
        self.ties = parts.ties
        device = next((one.device for one in self.module.parameters()), torch.device("cpu"))
        self._is_first, self._is_last = self.index == 0, self.index == len(parts.stages) - 1
        stage = PipelineStage(self.module, self.index, len(parts.stages), device, group=group)
        self._schedule = _SCHEDULES[schedule](stage, n_microbatches, loss_fn)
        self._is_ready = False
        ranks = dist.get_process_group_ranks(group)
        self._owners: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        for tie in parts.ties:
            if self.index in tie.paths:
                owners = dist.new_group(
                    [ranks[one] for one in sorted(tie.paths)], use_local_synchronization=True
                )
                self._owners.append((self.module.get_parameter(tie.paths[self.index]), owners))

    def step(
        self, *args: Any, target: Tensor | None = None, losses: list[Tensor] | None = None, **kwargs: Any
    ) -> Any:
        """Run all micro-batches forward and backward, and bring gradients of shared parameters together.

        Parameters
        ----------
        args, kwargs
            Inputs of the model, of which the first stage takes notice.
        target
            What the loss compares with, of which the last stage takes notice.
        losses
            Gets the loss of each micro-batch in the last stage.

        Returns
        -------
        The output of the model in the last stage, None in the others.
        """
        if not self._is_ready:
            self._prepare(args, kwargs, target)
        result = self._run(args, kwargs, target, losses)
        for parameter, owners in self._owners:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=owners)
        if self._replicas is not None:
            self._average(self._replicas)
        return result

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Tensor | None,
        losses: list[Tensor] | None,
    ) -> Any:
        inputs = (args, kwargs) if self._is_first else ((), {})
        if self._is_last:
            return self._schedule.step(*inputs[0], target=target, losses=losses, **inputs[1])
        return self._schedule.step(*inputs[0], **inputs[1])

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor | None) -> None:
        """Let the stages run once to tell each other their shapes, and undo what that changed."""
        buffers = [(one, one.clone()) for one in self.module.buffers()]
        gradients = [(one, one.grad) for one in self.module.parameters()]
        with torch.random.fork_rng():
            self._run(args, kwargs, target, None)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        self._is_ready = True

    def _average(self, replicas: dist.ProcessGroup) -> None:
        count = dist.get_world_size(replicas)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=replicas)
                parameter.grad /= count


def build_pipeline(
    sch: "Schedule", mesh: DeviceMesh | None, options: dict[str, Any], is_shared: bool
) -> tuple[nn.Module, Pipeline]:
    """Return the stage of this process and what runs it."""
    if not dist.is_initialized():
        raise ArgumentError("build: pipeline without a process group; accepted: after init_process_group")
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if "pp" not in names and (mesh is not None or is_shared):
        raise ArgumentError("build: pipeline without pp; accepted: a mesh with a dimension named pp")
    group = dist.group.WORLD if mesh is None else mesh.get_group("pp")
    replicas = mesh.get_group("dp") if mesh is not None and "dp" in names else None
    schedule, count = options.get("schedule", "1f1b"), options.get("n_microbatches")
    if schedule not in _SCHEDULES:
        raise ArgumentError(f"build: schedule {schedule!r}; accepted: {', '.join(_SCHEDULES)}")
    if not isinstance(count, int) or count < 1:
        raise ArgumentError(f"build: n_microbatches {count!r}; accepted: a number of parts of at least 1")
    parts = partition(sch)
    if group is None or dist.get_world_size(group) != len(parts.stages):
        found = 0 if group is None else dist.get_world_size(group)
        raise BuildError(
            f"build: {len(parts.stages)} stages for {found} processes; accepted: one process a stage"
        )
    engine = Pipeline(parts, group, replicas, count, options.get("loss_fn"), schedule)
    return engine.module, engine
