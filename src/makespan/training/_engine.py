"""A training run inside one process: model, passes and optimiser of this process, and their clock.

What only some plans need of torch is imported by their runs alone: it takes up to a second to load.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from makespan.plans import ExecutionPlan, chunk_layers
from makespan.training._job import PhaseTimes, TrainingJob
from makespan.training._optimizer import (
    Optimizer,
    average_gradients,
    complete_gradients,
    gradient_of,
    is_distributed,
)
from makespan.training.zoo._data import IGNORED, global_batch, targets_per_sample
from makespan.training.zoo._models import SmallTransformer, build_model

__all__ = ["Clock", "Engine", "Loss", "Place", "place"]

_AXES = ("pp", "dp", "tp")
_MESHES: dict[tuple[str, int, int, int], DeviceMesh] = {}
_SHARDED_STAGES = (2, 3)

Loss = Callable[[Tensor, Tensor], Tensor]
"""From logits and targets of a micro-batch to its share of the loss."""
Mark = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands in the mesh of its plan."""

    mesh: DeviceMesh
    device: torch.device

    def rank(self, axis: str) -> int:
        """Coordinate of this process along an axis."""
        return self.mesh.get_local_rank(axis)

    def group(self, axis: str) -> ProcessGroup:
        """Return the processes that differ from this one along one axis only."""
        return self.mesh.get_group(axis)


def place(plan: ExecutionPlan, device: torch.device) -> Place:
    """Arrange all processes as a plan asks; all must call it, with the same plan.

    Meshes are kept, because each axis of one costs communication groups.
    """
    key = (device.type, plan.pp, plan.dp, plan.tp)
    if key not in _MESHES:
        if plan.n_gpus != dist.get_world_size():
            raise RuntimeError(f"the plan needs {plan.n_gpus} processes, found {dist.get_world_size()}")
        _MESHES[key] = init_device_mesh(device.type, key[1:], mesh_dim_names=_AXES)
    return Place(_MESHES[key], device)


class Clock:
    """Marks of one optimiser step."""

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
        """Return the times of the finished step; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        start, gradients, optimizer, end = self._marks
        forward = sum(_elapsed(first, last) for first, last in self._passes)
        backward = _elapsed(start, gradients) - forward
        return PhaseTimes(_elapsed(start, end), forward, backward, _elapsed(gradients, optimizer))


def _elapsed(first: Mark, last: Mark) -> float:
    """Seconds between two marks of one kind."""
    if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
        return float(first.elapsed_time(last)) / 1e3
    if isinstance(first, float) and isinstance(last, float):
        return last - first
    raise TypeError("marks of different kinds")


class Passes(Protocol):
    """What computes the gradients of a replica's share of the batch."""

    def run(self, inputs: Tensor, targets: Tensor, clock: Clock) -> Tensor:
        """Leave gradients in the parameters and return the summed loss, 0 where it is not computed."""


class Accumulation:
    """One model after another over the micro-batches; gradients are exchanged in the last pass.

    Models under ``fully_shard`` exchange theirs in every pass, so that they never hold a whole one.
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
    averaged by DistributedDataParallel, or by one all-reduce a step where the model is split too; under
    stage 1 each parameter's optimiser state and update are with one owner. Stages 2 and 3 are
    ``fully_shard``; stage 3 also frees parameters between forward and backward pass.
    """

    def __init__(self, job: TrainingJob, place: Place) -> None:
        self.job, self.place = job, place
        plan = job.plan
        self._chunks = list(self._build_chunks())
        self._sharded = plan.zero_stage in _SHARDED_STAGES
        if self._sharded:
            for chunk in self._chunks:
                _fully_shard(chunk, place, keep=plan.zero_stage == 2)
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for chunk in self._chunks for name, parameter in chunk.named_parameters()
        }
        self._uses_ddp = plan.dp > 1 and plan.tp * plan.pp == 1 and not self._sharded
        self._passes = self._build_passes()
        replicas = place.group("dp") if plan.zero_stage == 1 and plan.dp > 1 else None
        self.optimizer = Optimizer(self.parameters, job, replicas, plan.offload)

    def _build_chunks(self) -> Iterator[SmallTransformer]:
        plan, mesh = self.job.plan, self.place.mesh
        stages = chunk_layers(self.job.model.n_layers, plan)
        for index in range(self.place.rank("pp"), len(stages), plan.pp):
            chunk = build_model(self.job.model, self.job.seed)
            chunk.set_recomputation(plan)
            chunk.keep_stage(stages[index], index == 0, index == len(stages) - 1)
            chunk.to(self.place.device)
            if plan.tp > 1:
                from makespan.training.zoo._tensor import shard_tensors

                shard_tensors(chunk, mesh["tp"], plan.sequence_parallel)
            yield chunk

    def _build_passes(self) -> Passes:
        plan = self.job.plan
        if plan.pp > 1:
            from makespan.training._pipeline import Pipeline

            return Pipeline(self._chunks, self.job.model, plan, self.place, self._loss)
        model: nn.Module = self._chunks[0]
        if self._uses_ddp:
            model = DistributedDataParallel(model, process_group=self.place.group("dp"))
        return Accumulation(model, plan.grad_accum_steps, self._loss)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return a micro-batch's share of the mean loss, times the replicas that are averaged over."""
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
            average_gradients(self.parameters, self.place.group("dp"))
        return loss / (plan.dp * plan.tp)

    def _samples(self, step: int) -> tuple[Tensor, Tensor]:
        job, device = self.job, self.place.device
        batch = global_batch(job.model, job.plan.global_batch_size, job.data_seed, step)
        rank, share = self.place.rank("dp"), job.plan.replica_batch_size
        own = slice(rank * share, (rank + 1) * share)
        return torch.from_numpy(batch.inputs[own]).to(device), torch.from_numpy(batch.targets[own]).to(device)

    def step(self, step: int, stop: bool) -> tuple[float, bool, PhaseTimes]:
        """Do one optimiser step."""
        clock = Clock(self.place.device)
        loss = self.gradients(step, clock)
        clock.next_phase()
        self.optimizer.step(step)
        clock.next_phase()
        shared = torch.stack([loss.double(), torch.tensor(float(stop), device=loss.device).double()])
        dist.all_reduce(shared)
        clock.next_phase()
        total, stops = shared.tolist()
        return total, stops > 0, clock.times()

    def full_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this process's parameters, whole and on the CPU."""
        found = {name: gradient_of(name, parameter) for name, parameter in self.parameters.items()}
        return {
            name: (one.full_tensor() if is_distributed(one) else one).detach().cpu()
            for name, one in found.items()
        }

    def state(self) -> dict[str, Tensor]:
        """Return parameters and moments by name, ready to be saved or to be read into."""
        weights: dict[str, Tensor] = {name: one.detach() for name, one in self.parameters.items()}
        return weights | self.optimizer.moments()

    def adopt(self, state: dict[str, Tensor], steps_done: int) -> None:
        """Take over a state that was read into what `state` returned."""
        self.optimizer.set_moments(state)
        self.optimizer.set_steps_done(steps_done)
        self.optimizer.adopt()


def _fully_shard(chunk: SmallTransformer, place: Place, keep: bool) -> None:
    """Shard a model over the replicas, layer by layer; ``keep`` parameters until the backward pass."""
    from torch.distributed.fsdp import fully_shard

    axis = place.mesh["dp"]
    for layer in chunk.layers.values():
        fully_shard(layer, mesh=axis, reshard_after_forward=not keep)
    fully_shard(chunk, mesh=axis, reshard_after_forward=not keep)
