"""One mini-batch of a job in a process: logical workers in turn, one sum, one step of the optimizer."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from makespan.errors import InputError
from makespan.papers.easyscale.runtime._buckets import (
    BucketMap,
    Buckets,
    GradientSet,
    ReadyOrder,
    provisional_map,
    rebuilt_map,
    trained_parameters,
)
from makespan.papers.easyscale.runtime._contexts import Contexts
from makespan.papers.easyscale.runtime._exchange import Reduction, Steps, reduce_sets, share
from makespan.papers.easyscale.runtime._levels import DeterminismLevel
from makespan.papers.easyscale.runtime._mapping import RankMapping
from makespan.papers.easyscale.runtime._offload import HostCopies, settle
from makespan.papers.easyscale.runtime._parts import TrainedParts
from makespan.papers.easyscale.runtime._virtual import seen_as

__all__ = ["HostedWorkers", "MiniBatch"]

Fetch = Callable[[int], tuple[Any, Any]]
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What came of a mini-batch.

    Parameters
    ----------
    losses
        By virtual rank, of all logical workers.
    micro_batch_s, sync_s
        Time of each hosted logical worker, and of sum and optimizer step [s].
    """

    losses: tuple[float, ...]
    micro_batch_s: tuple[float, ...]
    sync_s: float


class HostedWorkers:
    """The logical workers that one process hosts; every process of the mapping has one of these.

    Parameters
    ----------
    parts, device
        What is trained, and where.
    mapping, process
        Who hosts whom, and the number of this process there.
    reduction, level
        How gradients are added up, and what a change of the mapping may change.
    seed
        Seed of the random states of the logical workers.
    buffers
        ``per_rank``: every logical worker keeps its own; ``rank0``: all start a mini-batch from those of
        the first.
    bucket_map
        Layout to go on with after a restart, if the level wants it; None to find one as
        DistributedDataParallel does.
    computing
        What forward passes and losses run in.
    swaps_contexts
        Whether each logical worker has its own random states and buffers; False to see what that costs.

    Raises
    ------
    makespan.errors.InputError
        The model cannot be trained so, or sizes disagree.
    """

    def __init__(
        self,
        parts: TrainedParts,
        device: torch.device,
        mapping: RankMapping,
        process: int,
        reduction: Reduction,
        level: DeterminismLevel,
        *,
        seed: int,
        buffers: Literal["per_rank", "rank0"] = "per_rank",
        bucket_map: BucketMap | None = None,
        computing: AbstractContextManager[object] | None = None,
        swaps_contexts: bool = True,
    ) -> None:
        _check(parts.model, mapping, reduction, buffers)
        self._parts, self._device, self._process = parts, device, process
        self._reduction, self._buffers, self._swaps = reduction, buffers, swaps_contexts
        self.mapping, self.ranks = mapping, mapping.hosted[process]
        # Without D1 the place in the mapping takes the part of the virtual rank in communication.
        self._numbered = mapping if level.pins_communication else mapping.by_position()
        self._copies = HostCopies(device)
        self._computing = nullcontext() if computing is None else computing
        self._trained = trained_parameters(parts.model)
        self.contexts = Contexts(parts.model, device, self.ranks, seed)
        restored = bucket_map if level.pins_communication else None
        self._must_rebuild = restored is None
        self._layout = Buckets(self._trained, restored or provisional_map(self._trained))

    @property
    def bucket_map(self) -> BucketMap | None:
        """Layout for a restart; None before it is known."""
        return None if self._must_rebuild else self._layout.bucket_map

    def mini_batch(self, fetch: Fetch) -> Steps[MiniBatch]:
        """Do one mini-batch; ``fetch`` returns inputs and targets of a virtual rank."""
        if self._buffers == "rank0":
            yield from self.contexts.from_first(self.mapping, self._process)
        own, losses, times, ready = [], [], [], list[str]()
        for rank in self.ranks:
            begun = time.perf_counter()
            recorder = ReadyOrder(self._trained) if self._must_rebuild and rank == 0 else None
            own_context = self.contexts.live(rank) if self._swaps else nullcontext()
            with seen_as(rank, self.mapping.n_logical_workers), own_context:
                losses.append(self._micro_batch(*fetch(rank)))
            ready = ready if recorder is None else recorder.finish()
            own.append(self._layout.pack(self._reduction.set_scale, self._copies))
            settle(self._device)
            times.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        self._copies.finish()
        yield from self._update(own)
        if self._must_rebuild:
            yield from self._rebuild(ready)
        values = torch.stack(losses).to(_HOST, torch.float64)
        everywhere = yield from share(values, [len(ranks) for ranks in self.mapping.hosted])
        by_rank = dict(
            zip(
                (rank for ranks in self.mapping.hosted for rank in ranks),
                torch.cat(everywhere).tolist(),
                strict=True,
            )
        )
        ordered = tuple(by_rank[rank] for rank in range(len(by_rank)))
        return MiniBatch(ordered, tuple(times), time.perf_counter() - begun)

    def _micro_batch(self, inputs: Any, targets: Any) -> Tensor:
        with self._computing:
            outputs = self._parts.model(_moved(inputs, self._device))
            loss = self._parts.loss(outputs, _moved(targets, self._device))
        scaler = self._parts.scaler
        scaled = loss if scaler is None else scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _update(self, own: Sequence[GradientSet]) -> Steps[None]:
        """Sum the gradients of all logical workers and let the optimizer take its step."""
        total = yield from reduce_sets(own, self._numbered, self._process, self._reduction)
        self._layout.unpack(total.buckets, total.used)
        with seen_as(0, self.mapping.n_logical_workers):
            if self._parts.scaler is not None:
                self._parts.scaler.unscale_(self._parts.optimizer)
            if self._parts.after_reduce is not None:
                self._parts.after_reduce(self._parts.model)
            if self._parts.scaler is None:
                self._parts.optimizer.step()
            else:
                self._parts.scaler.step(self._parts.optimizer)
                self._parts.scaler.update()
            if self._parts.scheduler is not None:
                self._parts.scheduler.step()
        self._parts.optimizer.zero_grad(set_to_none=True)

    def _rebuild(self, ready: Sequence[str]) -> Steps[None]:
        """Lay out buckets in the order in which gradients of the first logical worker became ready."""
        names, host = list(self._trained), self.mapping.host(0)
        numbers = torch.full((len(names),), -1)
        numbers[: len(ready)] = torch.tensor([names.index(name) for name in ready], dtype=torch.int64)
        lengths = [len(names) if process == host else 0 for process in range(self.mapping.n_processes)]
        parts = yield from share(numbers[: lengths[self._process]], lengths)
        order = [names[number] for number in parts[host].tolist() if number >= 0]
        self._layout = Buckets(
            self._trained, rebuilt_map(self._trained, order, self._reduction.bucket_cap_bytes)
        )
        self._must_rebuild = False


def _check(model: nn.Module, mapping: RankMapping, reduction: Reduction, buffers: str) -> None:
    """Check that a model can be trained by logical workers that take turns."""
    if reduction.n_logical_workers != mapping.n_logical_workers:
        found = f"mapping {mapping} has {mapping.n_logical_workers} logical workers"
        raise InputError(f"{found}; accepted: those of the reduction, {reduction.n_logical_workers}")
    if buffers not in ("per_rank", "rank0"):
        raise InputError(f"buffers {buffers!r}; accepted: per_rank, rank0")
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and mapping.n_processes < mapping.n_logical_workers:
            found = f"module {name or 'model'} is a SyncBatchNorm, which communicates within a forward pass"
            wanted = f"BatchNorm, or {mapping.n_logical_workers} processes (found {mapping.n_processes})"
            raise InputError(f"{found}; accepted: {wanted}")


def _moved(values: Any, device: torch.device) -> Any:
    """Tensors of a batch on a device, whatever lists, tuples and dictionaries they lie in."""
    if isinstance(values, Tensor):
        return values.to(device)
    if isinstance(values, dict):
        return {name: _moved(one, device) for name, one in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_moved(one, device) for one in values)
    return values
