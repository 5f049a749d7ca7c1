"""What runs the stages of a cut model, one in each process.

Imported by pipelined runs only, because what it needs of torch takes long to load.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from makespan.papers.slapo.language._collectives import Ranks
from makespan.papers.slapo.language._errors import ArgumentError, BuildError
from makespan.papers.slapo.language._partition import Partition, partition
from makespan.papers.slapo.language._state import note_owners

if TYPE_CHECKING:
    from makespan.papers.slapo.language._schedule import Schedule

__all__ = ["Pipeline", "build_pipeline", "stages_of"]

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Pipeline:
    """The stage of this process, and the schedule that runs it with those of the others.

    Parameters
    ----------
    parts
        All stages, of which this process runs the one with its number in the group.
    group
        One process a stage, in order.
    lines
        The processes of this pipeline and of the others, each in order.
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
        lines: Sequence[Sequence[int]],
        replicas: dist.ProcessGroup | None,
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None,
        schedule: str,
    ) -> None:
        self.index, self._group, self._replicas = dist.get_rank(group), group, replicas
        self.module = parts.stages[self.index]
        self.ties = parts.ties
        self._count, self._n_microbatches, self._loss_fn = len(parts.stages), n_microbatches, loss_fn
        self._is_first, self._is_last = self.index == 0, self.index == self._count - 1
        self._kind = _SCHEDULES[schedule]
        self._schedule: Any = None
        self._owners = list(self._groups_of_ties(lines))

    def _groups_of_ties(
        self, lines: Sequence[Sequence[int]]
    ) -> Iterator[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Make the groups of all pipelines, in the same order in every process."""
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for tie in self.ties:
            for line in lines:
                ranks = tuple(line[stage] for stage in sorted(tie.paths))
                made[ranks] = made.get(ranks) or dist.new_group(list(ranks))
                if dist.get_rank() in ranks:
                    yield self.module.get_parameter(tie.paths[self.index]), made[ranks]

    def step(
        self, *args: Any, target: Tensor | None = None, losses: list[Tensor] | None = None, **kwargs: Any
    ) -> Any:
        """Run all micro-batches forward and backward; gradients are added to those that are there.

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
        if self._schedule is None:
            self._schedule = self._prepared(args, kwargs)
        parameters = list(self.module.parameters())
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None  # what is scaled and summed now is of this step alone
        result = self._run(args, kwargs, target, losses)
        if self._loss_fn is not None:
            self._sum_up()
        for parameter, gradient in zip(parameters, before, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        return result

    def _sum_up(self) -> None:
        for parameter, owners in self._owners:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=owners)
        if self._replicas is not None:
            self._average(self._replicas)

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Tensor | None,
        losses: list[Tensor] | None,
    ) -> Any:
        run = self._schedule
        if self._is_first:
            extra = {"target": target, "losses": losses} if self._is_last else {}
            return run.step(*args, **extra, **kwargs)
        return run.step(target=target, losses=losses) if self._is_last else run.step()

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass one micro-batch through all stages, which tells their shapes, and undo what it changed."""
        buffers = [(one, one.clone()) for one in self.module.buffers()]
        inputs, results, failure = self._passed_on(args, kwargs)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        told: list[str | None] = [None] * self._count
        dist.all_gather_object(told, failure, group=self._group)  # or the others would wait for this one
        if found := [one for one in told if one]:
            raise BuildError(found[0])
        device = next((one.device for one in self.module.parameters()), torch.device("cpu"))
        stage = PipelineStage(
            self.module, self.index, self._count, device, tuple(inputs), tuple(results), group=self._group
        )
        return self._kind(stage, self._n_microbatches, self._loss_fn)

    def _passed_on(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[Tensor], str | None]:
        """Return inputs and outputs of this stage, and what went wrong; hand the outputs to the next one."""
        inputs, named, results, failure = [self._part(one) for one in args], {}, list[Tensor](), None
        ranks = dist.get_process_group_ranks(self._group)
        if self._is_first:
            named = {name: self._part(one) for name, one in kwargs.items()}
        else:
            told: list[Any] = [None]
            dist.recv_object_list(told, src=ranks[self.index - 1], group=self._group)
            inputs = [one.requires_grad_(needs) for one, needs in told[0] or ()]
        if self._is_first or inputs:
            try:
                with torch.random.fork_rng():
                    results = self._outputs(inputs, named)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other stages must hear of it
                failure = f"stage {self.index} of {self._count}: {error}"
        if not self._is_last:
            handed = [(one.detach(), one.requires_grad) for one in results]
            dist.send_object_list([handed], dst=ranks[self.index + 1], group=self._group)
        return inputs, results, failure

    def _outputs(self, inputs: list[Any], named: dict[str, Any]) -> list[Tensor]:
        outputs = self.module(*inputs, **named)
        results = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
        for place, one in enumerate(results):
            if not isinstance(one, Tensor):
                raise BuildError(f"output {place} is a {type(one).__name__}; accepted: tensors")
        return results

    def _part(self, value: Any) -> Any:
        return value.chunk(self._n_microbatches)[0] if isinstance(value, Tensor) else value

    def _average(self, replicas: dist.ProcessGroup) -> None:
        count = dist.get_world_size(replicas)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=replicas)
                parameter.grad /= count


def stages_of(
    sch: "Schedule", mesh: DeviceMesh | None, is_shared: bool
) -> tuple[Partition, dist.ProcessGroup]:
    """Return the stages of a schedule, and the processes that have one each."""
    if not dist.is_initialized():
        raise ArgumentError("build: pipeline without a process group; accepted: after init_process_group")
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if "pp" not in names and (mesh is not None or is_shared):
        raise ArgumentError("build: pipeline without pp; accepted: a mesh with a dimension named pp")
    group = dist.group.WORLD if mesh is None else mesh.get_group("pp")
    parts = partition(sch)
    if group is None or dist.get_world_size(group) != len(parts.stages):
        found = 0 if group is None else dist.get_world_size(group)
        raise BuildError(
            f"build: {len(parts.stages)} stages for {found} processes; accepted: one process a stage"
        )
    return parts, group


def build_pipeline(
    sch: "Schedule", mesh: DeviceMesh | None, options: Mapping[str, Any], is_shared: bool
) -> tuple[nn.Module, Pipeline]:
    """Return the stage of this process and what runs it."""
    parts, group = stages_of(sch, mesh, is_shared)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    replicas = mesh.get_group("dp") if mesh is not None and "dp" in names else None
    schedule, count = options.get("schedule", "1f1b"), options.get("n_microbatches")
    if schedule not in _SCHEDULES:
        raise ArgumentError(f"build: schedule {schedule!r}; accepted: {', '.join(_SCHEDULES)}")
    least = len(parts.stages) if schedule == "1f1b" else 1
    if not isinstance(count, int) or count < least:
        raise ArgumentError(
            f"build: n_microbatches {count!r}; accepted: at least {least} for {least} stages of {schedule}"
            if least > 1
            else f"build: n_microbatches {count!r}; accepted: a whole number >= 1"
        )
    lines = [dist.get_process_group_ranks(group)]
    if mesh is not None:
        lines = mesh.mesh.movedim(names.index("pp"), -1).reshape(-1, len(parts.stages)).tolist()
    note_owners(sch, Ranks(dist.get_rank(group), len(parts.stages), group), parts.stages)
    engine = Pipeline(parts, group, lines, replicas, count, options.get("loss_fn"), schedule)
    return engine.module, engine
