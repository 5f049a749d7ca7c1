"""Training engine: one process of a run under any execution plan.

The optimiser, the engine with its passes, pipeline parallelism, and clipping by the norm of all gradients.
Parts of torch that only some plans need are imported where those plans use them: loading them takes up to
several seconds of CPU time.
"""

import functools
import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad as torchs
from torch.optim.adamw import adamw

from makespan.errors import InputError, MakespanError
from makespan.plans import ExecutionPlan, chunk_layers
from makespan.training.run import PhaseTimes, TrainingJob
from makespan.training.zoo import SmallModel
from makespan.training.zoo.small import (
    IGNORED,
    SmallTransformer,
    build_model,
    global_batch,
    n_hidden_states,
    targets_per_sample,
)

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.tensor import DTensor


# --- Optimiser --------------------------------------------------------------------------------------
#
# AdamW on the local part of each parameter: whole, partitioned over replicas, or on the host.

ADAMW_BETAS = (0.9, 0.95)
ADAMW_EPS = 1e-8
_MOMENTS = ("exp_avg", "exp_avg_sq")
Parameters = Mapping[str, torch.nn.Parameter]


def is_distributed(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return True if a tensor is spread over processes."""
    # If nothing has loaded the module, no tensor is of its type: do not load it for this check.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, sharing its memory."""
    return tensor.to_local().detach() if is_distributed(tensor) else tensor.detach()


def gradient_of(name: str, parameter: torch.nn.Parameter) -> Tensor:
    """Return the gradient that a backward pass has left in a parameter."""
    if parameter.grad is None:
        raise RuntimeError(f"the backward pass left no gradient for {name}")
    return parameter.grad


def complete_gradients(parameters: Parameters) -> None:
    """Sum the gradients that tensor parallelism left as one summand per process."""
    for parameter in parameters.values():
        gradient = parameter.grad
        if gradient is not None and is_distributed(gradient) and is_distributed(parameter):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def average_gradients(parameters: Parameters, group: ProcessGroup) -> None:
    """Replace each gradient by its mean over the replicas, in one all-reduce."""
    gradients = [local_part(gradient_of(name, parameter)) for name, parameter in parameters.items()]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= group.size()
    _scatter(flat, gradients)


def _scatter(flat: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy consecutive pieces of a flat tensor into tensors of any shape."""
    start = 0
    for part in parts:
        part.copy_(flat[start : start + part.numel()].view_as(part))
        start += part.numel()


class Optimizer:
    """AdamW whose state may be partitioned over replicas and kept on the host.

    Under ZeRO stage 1, which partitions by whole parameters, the owner of a parameter updates it and then
    sends it to the other replicas. AdamW is called as a function, because its class loads the compiler of
    torch, which takes a third of the start of a process.
    """

    def __init__(
        self, parameters: Parameters, job: TrainingJob, replicas: ProcessGroup | None, offload: bool
    ) -> None:
        self._parameters, self._job = parameters, job
        self._replicas, self._offload = replicas, offload
        self._owners = _owners(parameters, replicas.size() if replicas is not None else 1)
        here = dist.get_rank(replicas) if replicas is not None else 0
        owned = [name for name in parameters if self._owners[name] == here]
        self._leaves = {name: local_part(parameters[name]) for name in owned}
        if offload:
            self._leaves = {name: leaf.to("cpu", copy=True) for name, leaf in self._leaves.items()}
        self._moments = {
            f"{name}/{moment}": torch.zeros_like(leaf)
            for name, leaf in self._leaves.items()
            for moment in _MOMENTS
        }
        self.set_steps_done(0)

    def set_steps_done(self, steps: int) -> None:
        """Set the step count of AdamW."""
        self._done = {
            name: torch.tensor(float(steps), device=leaf.device) for name, leaf in self._leaves.items()
        }

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Update all parameters of this process; the number of the step sets the learning rate."""
        rate = min(1.0, (step + 1) / max(1, self._job.warmup_steps)) * self._job.learning_rate
        # Only matrices decay, not biases and the weights of normalisation.
        matrices = [name for name, leaf in self._leaves.items() if leaf.dim() >= 2]
        self._update(matrices, rate, self._job.weight_decay)
        self._update([name for name in self._leaves if name not in matrices], rate, 0.0)
        if self._offload:  # the host's parameters go back to the device
            for name, leaf in self._leaves.items():
                local_part(self._parameters[name]).copy_(leaf)
        if self._replicas is not None:
            self._exchange(self._replicas)

    def _update(self, names: Sequence[str], rate: float, decay: float) -> None:
        leaves = [self._leaves[name] for name in names]
        first, second = ([self._moments[f"{name}/{moment}"] for name in names] for moment in _MOMENTS)
        gradients = [
            local_part(gradient_of(name, self._parameters[name])).to(leaf.device)
            for name, leaf in zip(names, leaves, strict=True)
        ]
        adamw(
            leaves, gradients, first, second, [], [self._done[name] for name in names], fused=True,
            amsgrad=False, beta1=ADAMW_BETAS[0], beta2=ADAMW_BETAS[1], lr=rate, weight_decay=decay,
            eps=ADAMW_EPS, maximize=False,
        )  # fmt: skip

    def adopt(self) -> None:
        """Copy the device's parameters to the host, after they were loaded."""
        if self._offload:
            for name, leaf in self._leaves.items():
                leaf.copy_(local_part(self._parameters[name]))

    def _exchange(self, replicas: ProcessGroup) -> None:
        """Send every parameter from its owner to all replicas, with one message per owner."""
        for owner in range(replicas.size()):
            owned = [name for name, rank in self._owners.items() if rank == owner]
            parts = [local_part(self._parameters[name]) for name in owned]
            if not parts:
                continue
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.broadcast(flat, group_src=owner, group=replicas)
            _scatter(flat, parts)

    def moments(self) -> dict[str, Tensor]:
        """Return the moments owned here by name, distributed like their parameters and on their device."""
        return {
            key: _like(self._parameters[key.rpartition("/")[0]], moment)
            for key, moment in self._moments.items()
        }

    def set_moments(self, tensors: Mapping[str, Tensor]) -> None:
        """Adopt moments that were loaded into the tensors returned by `moments`."""
        for key, moment in self._moments.items():
            moment.copy_(local_part(tensors[key]))


def _like(parameter: torch.nn.Parameter, local: Tensor) -> Tensor:
    """Return a local tensor as one that is distributed like its parameter."""
    on_device = local.to(local_part(parameter).device)
    if not is_distributed(parameter):
        return on_device
    from torch.distributed.tensor import DTensor

    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(
        on_device, mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def _owners(parameters: Parameters, count: int) -> dict[str, int]:
    """Assign each parameter to the owner with the least load so far, largest parameters first."""
    loads, owners = [0] * count, dict.fromkeys(parameters, 0)
    sizes = {name: local_part(parameter).numel() for name, parameter in parameters.items()}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


# --- Engine -----------------------------------------------------------------------------------------

_AXES = ("pp", "dp", "tp")
_MESHES: dict[tuple[str, int, int, int], DeviceMesh] = {}
_SHARDED_STAGES = (2, 3)
Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps logits and targets of a micro-batch to its share of the loss."""
Mark = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class MeshCoordinate:
    """Position of a process in the device mesh of its plan."""

    mesh: DeviceMesh
    device: torch.device

    def rank(self, axis: str) -> int:
        """Coordinate of this process along an axis."""
        return self.mesh.get_local_rank(axis)

    def group(self, axis: str) -> ProcessGroup:
        """Return the group of processes that differ from this one along one axis only."""
        return self.mesh.get_group(axis)


def mesh_coordinate(plan: ExecutionPlan, device: torch.device) -> MeshCoordinate:
    """Arrange all processes in the mesh of a plan; all must call this, with the same plan.

    Meshes are cached, because each axis of a mesh costs communication groups.
    """
    key = (device.type, plan.pp, plan.dp, plan.tp)
    if key not in _MESHES:
        if plan.n_gpus != dist.get_world_size():
            raise RuntimeError(f"the plan needs {plan.n_gpus} processes, found {dist.get_world_size()}")
        _MESHES[key] = init_device_mesh(device.type, key[1:], mesh_dim_names=_AXES)
    return MeshCoordinate(_MESHES[key], device)


class Clock:
    """Time marks of one optimiser step: wall clock on the CPU, events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._passes: list[tuple[Mark, Mark]] = []
        self._open: Mark = 0.0
        self._marks = [self._mark()]

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def start_forward(self) -> None:
        """Begin a forward pass."""
        self._open = self._mark()

    def end_forward(self) -> None:
        """End the forward pass that was begun last."""
        self._passes.append((self._open, self._mark()))

    def next_phase(self) -> None:
        """End a phase: gradients first, then the optimiser, then the exchange of the loss."""
        self._marks.append(self._mark())

    def times(self) -> PhaseTimes:
        """Return the times of the finished step, after waiting for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        start, gradients, optimizer, end = self._marks
        forward = sum(_elapsed(first, last) for first, last in self._passes)
        backward = _elapsed(start, gradients) - forward
        return PhaseTimes(_elapsed(start, end), forward, backward, _elapsed(gradients, optimizer))


def _elapsed(first: Mark, last: Mark) -> float:
    """Return the time between two marks of one kind [s]."""
    if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
        return float(first.elapsed_time(last)) / 1e3
    if isinstance(first, float) and isinstance(last, float):
        return last - first
    raise TypeError("marks of different kinds")


class Passes(Protocol):
    """Computes the gradients of a replica's share of the batch."""

    def run(self, inputs: Tensor, targets: Tensor, clock: Clock) -> Tensor:
        """Leave gradients in the parameters and return the summed loss, 0 where it is not computed."""


class Accumulation:
    """Gradient accumulation over micro-batches; gradients are exchanged in the last pass.

    Models under ``fully_shard`` exchange gradients in every pass, so that no process holds a whole one.
    """

    def __init__(self, model: nn.Module, n_microbatches: int, loss: Loss) -> None:
        self._model, self._count, self._loss = model, n_microbatches, loss

    def run(self, inputs: Tensor, targets: Tensor, clock: Clock) -> Tensor:
        """Run all micro-batches."""
        total = torch.zeros((), device=inputs.device)
        parts = zip(inputs.chunk(self._count), targets.chunk(self._count), strict=True)
        for number, (samples, wanted) in enumerate(parts):
            with self._exchange(last=number == self._count - 1):
                clock.start_forward()
                loss = self._loss(self._model(samples), wanted)
                clock.end_forward()
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _exchange(self, last: bool) -> AbstractContextManager[None]:
        if isinstance(self._model, DistributedDataParallel) and not last:
            return self._model.no_sync()
        return nullcontext()


class Engine:
    """One process of a training run.

    Without ZeRO and with stage 1 each replica holds the whole model of its position, and gradients are
    averaged by DistributedDataParallel, or by one all-reduce per step if the model is split too; under
    stage 1 one owner holds the optimiser state of each parameter and updates it. Stages 2 and 3 use
    ``fully_shard``; stage 3 also frees parameters between forward and backward pass.
    """

    def __init__(self, job: TrainingJob, coordinate: MeshCoordinate) -> None:
        self.job, self.coordinate = job, coordinate
        plan = job.plan
        self._chunks = list(self._build_chunks())
        self._sharded = plan.zero_stage in _SHARDED_STAGES
        if self._sharded:
            from torch.distributed.fsdp import fully_shard

            axis, is_freed = coordinate.mesh["dp"], plan.zero_stage != 2
            for chunk in self._chunks:
                # Layer by layer, so that only one layer at a time is gathered; the rest goes with the root.
                for layer in chunk.layers.values():
                    fully_shard(layer, mesh=axis, reshard_after_forward=is_freed)
                fully_shard(chunk, mesh=axis, reshard_after_forward=is_freed)
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for chunk in self._chunks for name, parameter in chunk.named_parameters()
        }
        self._uses_ddp = plan.dp > 1 and plan.tp * plan.pp == 1 and not self._sharded
        self._passes = self._build_passes()
        replicas = coordinate.group("dp") if plan.zero_stage == 1 and plan.dp > 1 else None
        self.optimizer = Optimizer(self.parameters, job, replicas, plan.offload)

    def _build_chunks(self) -> Iterator[SmallTransformer]:
        plan, mesh = self.job.plan, self.coordinate.mesh
        stages = chunk_layers(self.job.model.n_layers, plan)
        for index in range(self.coordinate.rank("pp"), len(stages), plan.pp):
            chunk = build_model(self.job.model, self.job.seed)
            chunk.set_recomputation(plan)
            chunk.keep_stage(stages[index], index == 0, index == len(stages) - 1)
            chunk.to(self.coordinate.device)
            if plan.tp > 1:
                from makespan.training.zoo.small import shard_tensors

                shard_tensors(chunk, mesh["tp"], plan.sequence_parallel)
            yield chunk

    def _build_passes(self) -> Passes:
        plan = self.job.plan
        if plan.pp > 1:
            return Pipeline(self._chunks, self.job.model, plan, self.coordinate, self._loss)
        model: nn.Module = self._chunks[0]
        if self._uses_ddp:
            model = DistributedDataParallel(model, process_group=self.coordinate.group("dp"))
        return Accumulation(model, plan.grad_accum_steps, self._loss)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return a micro-batch's share of the mean loss, times the number of replicas averaged over."""
        plan, flat = self.job.plan, logits.flatten(0, -2)
        total = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        count = plan.global_batch_size * targets_per_sample(self.job.model)
        return total * (plan.dp / count)

    def gradients(self, step: int, clock: Clock) -> Tensor:
        """Compute the gradients of a step and return this process's share of its mean loss."""
        for parameter in self.parameters.values():
            parameter.grad = None
        loss = self._passes.run(*self._samples(step), clock)
        plan = self.job.plan
        if plan.tp > 1:
            complete_gradients(self.parameters)
        if plan.dp > 1 and not self._uses_ddp and not self._sharded:
            average_gradients(self.parameters, self.coordinate.group("dp"))
        return loss / (plan.dp * plan.tp)

    def _samples(self, step: int) -> tuple[Tensor, Tensor]:
        job, device = self.job, self.coordinate.device
        batch = global_batch(job.model, job.plan.global_batch_size, job.data_seed, step)
        rank, share = self.coordinate.rank("dp"), job.plan.replica_batch_size
        part = slice(rank * share, (rank + 1) * share)
        inputs, targets = torch.from_numpy(batch.inputs[part]), torch.from_numpy(batch.targets[part])
        return inputs.to(device), targets.to(device)

    def step(self, step: int, stop: bool) -> tuple[float, bool, PhaseTimes]:
        """Do one optimiser step; return the mean loss, whether any process wants to stop, and the times."""
        clock = Clock(self.coordinate.device)
        loss = self.gradients(step, clock)
        clock.next_phase()
        self.optimizer.step(step)
        clock.next_phase()
        # One all-reduce for both: every process learns of a stop request at the same step.
        shared = torch.stack([loss.double(), torch.tensor(float(stop), device=loss.device).double()])
        dist.all_reduce(shared)
        clock.next_phase()
        total, stops = shared.tolist()
        return total, stops > 0, clock.times()

    def full_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this process's parameters, whole and on the CPU."""
        gradients = {name: gradient_of(name, parameter) for name, parameter in self.parameters.items()}
        return {
            name: (gradient.full_tensor() if is_distributed(gradient) else gradient).detach().cpu()
            for name, gradient in gradients.items()
        }

    def state(self) -> dict[str, Tensor]:
        """Return parameters and moments by name, ready to be saved or to be loaded into."""
        weights: dict[str, Tensor] = {name: value.detach() for name, value in self.parameters.items()}
        return weights | self.optimizer.moments()

    def adopt(self, state: dict[str, Tensor], steps_done: int) -> None:
        """Adopt a state that was loaded into the tensors returned by `state`."""
        self.optimizer.set_moments(state)
        self.optimizer.set_steps_done(steps_done)
        self.optimizer.adopt()


# --- Pipeline parallelism ---------------------------------------------------------------------------


class Pipeline:
    """A pipeline schedule over the stages of this process."""

    def __init__(
        self,
        chunks: Sequence[SmallTransformer],
        spec: SmallModel,
        plan: ExecutionPlan,
        coordinate: MeshCoordinate,
        loss: Loss,
    ) -> None:
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

        rank, self._clock = coordinate.rank("pp"), Clock(coordinate.device)
        self._is_first, self._is_last = rank == 0, rank == plan.pp - 1
        indices = range(rank, plan.pp * plan.interleave, plan.pp)
        stages = [
            _stage(chunk, index, spec, plan, coordinate) for chunk, index in zip(chunks, indices, strict=True)
        ]
        self._schedule: Any
        if plan.schedule == "interleaved":
            self._schedule = ScheduleInterleaved1F1B(
                list(stages), plan.n_microbatches, loss, scale_grads=False
            )
        else:
            kind = Schedule1F1B if plan.schedule == "1f1b" else ScheduleGPipe
            self._schedule = kind(stages[0], plan.n_microbatches, loss, scale_grads=False)
        # Hooks on the chunk, not on its layers: recomputation runs layers again but is no forward pass.
        for chunk in chunks:
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
    chunk: SmallTransformer, index: int, spec: SmallModel, plan: ExecutionPlan, coordinate: MeshCoordinate
) -> "PipelineStage":
    """Build a pipeline stage with example inputs and outputs, which spare torch a run to infer shapes."""
    from torch.distributed.pipelining import PipelineStage

    device, count, batch = coordinate.device, plan.pp * plan.interleave, plan.micro_batch_size
    seq = spec.seq // plan.tp if plan.sequence_parallel else spec.seq
    inputs = outputs = tuple(
        torch.empty(batch, seq, spec.hidden, device=device, requires_grad=True)
        for _ in range(n_hidden_states(spec))
    )
    if index == 0 and spec.family == "vit":
        inputs = (torch.empty(batch, spec.seq, spec.patch_features, device=device),)
    elif index == 0:
        shape = (batch, 2, spec.seq) if spec.family == "t5" else (batch, spec.seq)
        inputs = (torch.empty(shape, dtype=torch.int64, device=device),)
    if index == count - 1:
        shape = (batch, spec.vocab) if spec.family == "vit" else (batch, spec.seq, spec.vocab)
        outputs = (torch.empty(shape, device=device, requires_grad=True),)
    return PipelineStage(
        chunk, index, count, device, input_args=inputs, output_args=outputs, group=coordinate.group("pp")
    )


# --- Clipping ---------------------------------------------------------------------------------------
#
# `torch.nn.utils.clip_grad_norm_` sees the gradients of one process only. If processes hold different parts
# of a model, it takes the norm of a part for the norm of the whole, and each process scales by another
# factor.

_REMEDY = "clipped_by"
"""Attribute that marks a parameter whose gradients torch's own clipping would scale by a partial norm."""


class PartialNormError(MakespanError, RuntimeError):
    """Gradients would be clipped by the norm of one process's part; the message says what to call instead."""


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    counted: Collection[int] | None = None,
    groups: Sequence[dist.ProcessGroup | None] = (),
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that the norm of all of them, over all processes, is at most ``max_norm``.

    All processes of the groups must call this. Gradients that torch itself distributes, as `fully_shard`
    does, are added up over their mesh. Without such gradients and without groups the result is bitwise that
    of `torch.nn.utils.clip_grad_norm_`.

    Parameters
    ----------
    parameters
        Parameters that this process holds; those without a gradient are ignored.
    max_norm
        Largest norm.
    norm_type
        Order of the norm, > 0; ``inf`` for the largest magnitude.
    counted
        Identities (`id`) of the parameters whose gradients this process counts, so that a gradient held by
        several processes counts once; None for all. The others are scaled, too.
    groups
        Groups of processes that hold other parts of the model, summed over one after the other; a group of
        None is all processes.
    error_if_nonfinite
        Whether a norm that is not finite is an error.

    Returns
    -------
    The norm before scaling, a scalar, the same on all processes.

    Raises
    ------
    InputError
        The limit or the order of the norm is not accepted.
    RuntimeError
        The norm is not finite and ``error_if_nonfinite`` is set; no gradient has changed.
    """
    if not max_norm > 0 or not norm_type > 0:
        raise InputError(
            f"clip_grad_norm: found max_norm {max_norm}, norm_type {norm_type}; expected numbers > 0"
        )
    held = list(parameters)
    trained = [parameter for parameter in held if parameter.grad is not None]
    gradients: list[Tensor] = [parameter.grad for parameter in trained if parameter.grad is not None]
    if not groups and not any(map(is_distributed, gradients)):
        return torchs.clip_grad_norm_(trained, max_norm, norm_type, error_if_nonfinite)
    device = next((tensor.device for tensor in (*gradients, *held)), torch.device("cpu"))
    chosen = [
        gradient
        for parameter, gradient in zip(trained, gradients, strict=True)
        if counted is None or id(parameter) in counted
    ]
    is_largest = math.isinf(norm_type)
    # In doubles, and summed before the root is taken, so that the order of processes hardly matters.
    total = _over_meshes(chosen, norm_type, device)
    for group in groups:
        dist.all_reduce(total, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=group)
    norm = total if is_largest else total ** (1.0 / norm_type)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(f"clip_grad_norm: the norm of order {norm_type} is {norm.item()}")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        part = _local(gradient)
        part.mul_(factor.to(device=part.device, dtype=torch.promote_types(part.dtype, torch.float32)))
    kinds = {gradient.dtype for gradient in gradients}
    return norm.to(functools.reduce(torch.promote_types, kinds, torch.float32))


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if is_distributed(gradient) else gradient


def _over_meshes(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of powers, or the largest magnitude, of gradients with all parts on their meshes."""
    is_largest = math.isinf(norm_type)
    # Gradients are grouped by mesh and by the axes that cut them, so that each group needs one all-reduce per
    # axis. Along other axes they are replicated and count once.
    parts: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        where: tuple[Any, tuple[int, ...]] = (None, ())
        if is_distributed(gradient):
            if any(placement.is_partial() for placement in gradient.placements):
                raise InputError(
                    "clip_grad_norm: a gradient is a sum that is not complete; expected after the exchange"
                )
            cut = tuple(axis for axis, placement in enumerate(gradient.placements) if placement.is_shard())
            where = (gradient.device_mesh, cut)
        local = _local(gradient)
        norm = torch.linalg.vector_norm(
            local, norm_type, dtype=torch.promote_types(local.dtype, torch.float32)
        )
        parts.setdefault(where, []).append(norm.double().to(device))
    totals = []
    for (mesh, cut), norms in parts.items():
        all_norms = torch.stack(norms)
        total = all_norms.max() if is_largest else (all_norms**norm_type).sum()
        for axis in cut:
            operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
            dist.all_reduce(total, operation, group=mesh.get_group(axis))
        totals.append(total)
    if not totals:
        return torch.zeros((), dtype=torch.float64, device=device)
    together = torch.stack(totals)
    return together.max() if is_largest else together.sum()


def refuse_plain_clipping(parameters: Iterable[nn.Parameter], remedy: str) -> str:
    """Make torch's own clipping of any of these parameters raise a `PartialNormError` that says what to call.

    Clipping is rejected wherever it was imported from, before a gradient changes. Returns the name of the
    attribute that marks a parameter; a parameter that replaces a marked one must have it, too.
    """
    for parameter in parameters:
        vars(parameter)[_REMEDY] = remedy
    scale: Any = torchs._clip_grads_with_norm_
    if hasattr(scale, _REMEDY):
        return _REMEDY

    # `clip_grad_norm_` looks this function up in its module, so one replacement reaches every import of it.
    @functools.wraps(scale)
    def scale_if_whole(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if remedies := [vars(each)[_REMEDY] for each in held if _REMEDY in getattr(each, "__dict__", {})]:
            raise PartialNormError(
                "clip_grad_norm_: this process holds a part of the model, whose norm is not that of the "
                f"whole; expected {remedies[0]}"
            )
        return scale(held, *args, **kwargs)

    setattr(scale_if_whole, _REMEDY, True)
    torchs._clip_grads_with_norm_ = scale_if_whole
    return _REMEDY
