"""What runs the stages of a cut model, one in each process.

Imported by pipelined runs only, because what it needs of torch takes long to load.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from makespan.slapo._collectives import Ranks
from makespan.slapo._errors import ArgumentError, BuildError
from makespan.slapo._kept_state import is_object, opened
from makespan.slapo._partition import Partition, partition
from makespan.slapo._shard import CLIPPING
from makespan.slapo._state import note_owners
from makespan.training import refuse_plain_clipping

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["Pipeline", "build_pipeline", "stages_of"]

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass(frozen=True, slots=True)
class _Structure:
    """Values of which tensors alone can be sent: what else there is, and where tensors belong."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    is_tensor: tuple[bool, ...]

    @classmethod
    def of(cls, values: Any) -> tuple["_Structure", tuple[Tensor, ...]]:
        """Take values apart."""
        leaves, spec = tree_flatten(values)
        places = tuple(isinstance(one, Tensor) for one in leaves)
        others = tuple(None if place else one for one, place in zip(leaves, places, strict=True))
        return cls(spec, others, places), tuple(one for one in leaves if isinstance(one, Tensor))

    def filled(self, tensors: Tensor | Sequence[Tensor]) -> Any:
        """Put values together again."""
        rest = iter([tensors] if isinstance(tensors, Tensor) else tensors)
        pairs = zip(self.leaves, self.is_tensor, strict=True)
        return tree_unflatten([next(rest) if place else one for one, place in pairs], self.spec)


class _TensorStage(nn.Module):
    """A stage that takes and returns tensors alone, as the runtime wants."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.takes: _Structure | None = None
        self.gives: _Structure | None = None

    def forward(self, *tensors: Tensor, **named: Any) -> tuple[Tensor, ...]:
        """Run the stage."""
        args = tensors if self.takes is None else self.takes.filled(tensors)
        gives, results = _Structure.of(self.module(*args, **named))
        if self.gives is not None and gives.is_tensor != self.gives.is_tensor:
            found, expected = (sum(one.is_tensor) for one in (gives, self.gives))
            raise BuildError(
                f"a stage returns {found} tensors and returned {expected} before; accepted: as many for every"
                " micro-batch, so what samples decide, such as whether there is a mask, comes as an input"
            )
        self.gives = gives
        return tuple(one.contiguous() for one in results)

    def output(self, tensors: Tensor | Sequence[Tensor]) -> Any:
        """Return what the stage returned, of these tensors."""
        return tensors if self.gives is None else self.gives.filled(tensors)


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
        run, stage = self._schedule
        if not self._is_last:
            return run.step(*args, **kwargs) if self._is_first else run.step()
        inputs, named = (args, kwargs) if self._is_first else ((), {})
        return stage.output(run.step(*inputs, target=target, losses=losses, **named))

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass one micro-batch through all stages, which tells their shapes, and undo what it changed."""
        buffers = [(one, one.clone()) for one in self.module.buffers()]
        stage = _TensorStage(self.module)
        inputs, results, failure = self._passed_on(stage, args, kwargs)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        told: list[str | None] = [None] * self._count
        dist.all_gather_object(told, failure, group=self._group)  # or the others would wait for this one
        if found := [one for one in told if one]:
            raise BuildError(found[0])
        part = PipelineStage(
            stage, self.index, self._count, self._device(), tuple(inputs), tuple(results), group=self._group
        )
        user = self._loss_fn

        def loss(outputs: Any, target: Any) -> Tensor:
            return user(stage.output(outputs), target) if user else torch.zeros(())

        return self._kind(part, self._n_microbatches, loss if user else None), stage

    def _passed_on(
        self, stage: _TensorStage, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], Sequence[Tensor], str | None]:
        """Return inputs and outputs of this stage, and what went wrong; hand the outputs to the next one."""
        inputs, named, failure = [self._part(one) for one in args], {}, None
        results: Sequence[Tensor] = ()
        ranks = dist.get_process_group_ranks(self._group)
        if self._is_first:
            named = {name: self._part(one) for name, one in kwargs.items()}
        else:
            told: list[Any] = [None]
            dist.recv_object_list(told, src=ranks[self.index - 1], group=self._group)
            stage.takes, handed = told[0]
            inputs = [one.to(self._device()).requires_grad_(needs) for one, needs in handed]
        if self._is_first or stage.takes is not None:
            try:
                with torch.random.fork_rng():
                    results = stage(*inputs, **named)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other stages must hear of it
                failure = f"stage {self.index} of {self._count}: {error}"
        if not self._is_last and failure is None and stage.gives is not None:
            failure = self._of_objects(stage.gives)
        if not self._is_last:
            # By way of the host: a tensor of a GPU would come out on the GPU of the same number.
            handed = [(one.detach().cpu(), one.requires_grad) for one in results]
            dist.send_object_list([(stage.gives, handed)], dst=ranks[self.index + 1], group=self._group)
        return inputs, results, failure

    def _of_objects(self, gives: "_Structure") -> str | None:
        """Say of an object with tensors in it, such as a cache, that a stage cannot hand it on."""
        held = [one for one in gives.leaves if is_object(one)]
        for one in held:
            if any(isinstance(part, Tensor) for part in tree_flatten(opened(one))[0]):
                return (
                    f"stage {self.index} of {self._count} hands on a {type(one).__name__}, whose tensors are "
                    "not sent; accepted: stages that hand on tensors, so no cache (use_cache=False)"
                )
        return None

    def _device(self) -> torch.device:
        return next((one.device for one in self.module.parameters()), torch.device("cpu"))

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
    refuse_plain_clipping(parts.stages[dist.get_rank(group)].parameters(), CLIPPING)
    engine = Pipeline(parts, group, lines, replicas, count, options.get("loss_fn"), schedule)
    return engine.module, engine
