"""One mini-batch of a job in a process: logical workers in turn, one sum, one step of the optimizer."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from makespan.easyscale.runtime._batches import loss_of
from makespan.easyscale.runtime._buckets import (
    BucketMap,
    Buckets,
    GradientSet,
    ReadyOrder,
    provisional_map,
    rebuilt_map,
    trained_parameters,
)
from makespan.easyscale.runtime._contexts import Contexts
from makespan.easyscale.runtime._exchange import Reduction, Steps, reduce_sets, share
from makespan.easyscale.runtime._levels import DeterminismLevel
from makespan.easyscale.runtime._mapping import RankMapping
from makespan.easyscale.runtime._offload import HostCopies, settle
from makespan.easyscale.runtime._parts import TrainedParts
from makespan.easyscale.runtime._user_state import UserState
from makespan.easyscale.runtime._virtual import seen_as
from makespan.errors import InputError

__all__ = ["HostedWorkers", "MiniBatch"]

Fetch = Callable[[int], Any]
_HOST = torch.device("cpu")
_WITH_FUNCTIONS = (torch.optim.lr_scheduler.LambdaLR, torch.optim.lr_scheduler.MultiplicativeLR)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


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
    user_state, late_buffers
        See `Contexts`.
    on_micro_batch
        Called after each micro-batch.

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
        user_state: UserState | None = None,
        late_buffers: Collection[str] = (),
        on_micro_batch: Callable[[], object] = lambda: None,
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
        self._frozen = {name: one for name, one in parts.model.named_parameters() if not one.requires_grad}
        _check_optimizer(parts)
        self._on_micro_batch, self._has_user_step = on_micro_batch, _has_user_step(parts)
        self.contexts = Contexts(parts.model, device, self.ranks, seed, user_state, late_buffers)
        self._n_hooks = _hook_counts(parts.model)
        self.state_names = set(parts.model.state_dict())
        self.notices: list[str] = []
        restored = bucket_map if level.pins_communication else None
        self._must_rebuild = restored is None
        self._layout = Buckets(self._trained, restored or provisional_map(self._trained))

    @property
    def bucket_map(self) -> BucketMap | None:
        """Layout for a restart; None before it is known."""
        return None if self._must_rebuild else self._layout.bucket_map

    def mini_batch(self, fetch: Fetch, *, watches: bool = False) -> Steps[MiniBatch]:
        """Do one mini-batch.

        Parameters
        ----------
        fetch
            Returns the batch of a virtual rank.
        watches
            Whether what code of the user changes in this mini-batch is looked for: values that it keeps in
            Python, and parameters that a forward pass changes.
        """
        if self._buffers == "rank0":
            yield from self.contexts.from_first(self.mapping, self._process)
        if watches:
            self.contexts.begin_watching()
        own, losses, times, ready, changed = [], [], [], list[str](), set[str]()
        for rank in self.ranks:
            begun = time.perf_counter()
            recorder = ReadyOrder(self._trained) if self._must_rebuild and rank == 0 else None
            own_context = self.contexts.live(rank, watches=watches) if self._swaps else nullcontext()
            before = self._checksums() if watches else {}
            with seen_as(rank, self.mapping.n_logical_workers), own_context:
                losses.append(self._micro_batch(fetch(rank)))
            if watches:
                changed = self._changed_parameters(before, changed)
                self._check_hooks("a forward pass")
            ready = ready if recorder is None else recorder.finish()
            self._check_gradients()
            own.append(self._layout.pack(self._reduction.set_scale, self._copies))
            settle(self._device)
            times.append(time.perf_counter() - begun)
            self._on_micro_batch()
        begun = time.perf_counter()
        self._copies.finish()
        yield from self._update(own, watches)
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

    def _micro_batch(self, batch: Any) -> Tensor:
        with self._computing:
            loss, unused = loss_of(self._parts.model, self._parts.loss, batch, self._device)
        if unused:
            self.notices.append(f"loss returns {unused} beside the loss, of which nothing is kept")
        scaler = self._parts.scaler
        scaled = loss if scaler is None else scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _update(self, own: Sequence[GradientSet], watches: bool) -> Steps[None]:
        """Sum the gradients of all logical workers and let the optimizer take its step."""
        total = yield from reduce_sets(own, self._numbered, self._process, self._reduction)
        self._layout.unpack(total.buckets, total.used)
        has_shared = self._has_user_step and self._swaps
        if has_shared:
            yield from self.contexts.first_for_all(self.mapping, self._process)
        shared = self.contexts.live_for_all(watches=watches) if has_shared else nullcontext()
        with seen_as(0, self.mapping.n_logical_workers), shared:
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
        if watches:
            self._check_hooks("after_reduce")

    def _check_hooks(self, by: str) -> None:
        """Refuse hooks that a restart would not know."""
        for name, number in _hook_counts(self._parts.model).items():
            if number != self._n_hooks.get(name, 0):
                found = f"module {name or 'model'} got or lost a hook in {by}, which no checkpoint holds"
                raise InputError(f"{found}; accepted: hooks of where the model is built")

    def _check_gradients(self) -> None:
        """Refuse gradients that nobody would add up."""
        for name, one in self._frozen.items():
            if one.grad is not None:
                found = f"parameter {name} got a gradient and required none when the run began"
                raise InputError(f"{found}; accepted: one that requires it when the model is built")

    def _checksums(self) -> dict[str, tuple[int, int]]:
        """Return what tells whether a parameter changed: its place in memory, and a sum of its words."""
        found = {}
        for name, one in self._parts.model.named_parameters():
            words = one.detach().contiguous().view(_WORDS[one.element_size()])
            found[name] = one.data_ptr(), int(words.sum(dtype=torch.int64))
        return found

    def _changed_parameters(self, before: Mapping[str, tuple[int, int]], already: set[str]) -> set[str]:
        """Find parameters that a forward pass changed or made."""
        now = self._checksums()
        if odd := sorted(now.keys() ^ before.keys()):
            found = f"parameter {odd[0]} came or went in a forward pass"
            raise InputError(f"{found}; accepted: those that the model is built with")
        changed = {name for name, one in now.items() if before[name] != one}
        accepted = "a buffer, or a change in after_reduce"
        for name in sorted(changed):
            found = f"parameter {name} is changed by a forward pass"
            if name in already:
                raise InputError(f"{found}, and again by the next; accepted: {accepted}")
            self.notices.append(f"{found}; unless a second one changes nothing more, use {accepted}")
        return already | changed

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


def _check_optimizer(parts: TrainedParts) -> None:
    """Check that an optimizer holds parameters of the model alone, whose gradients are added up."""
    known = {id(one) for one in parts.model.parameters()}
    for number, group in enumerate(parts.optimizer.param_groups):
        for one in group["params"]:
            if id(one) not in known:
                found = f"group {number} of the optimizer has a parameter of shape {tuple(one.shape)}"
                accepted = "parameters of the model, of which a loss with parameters can be a module"
                raise InputError(f"{found} that the model lacks; accepted: {accepted}")


def _hook_counts(model: nn.Module) -> dict[str, int]:
    """Count the hooks of each module."""
    kinds = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return {
        path: sum(len(getattr(module, kind, ())) for kind in kinds) for path, module in model.named_modules()
    }


def _has_user_step(parts: TrainedParts) -> bool:
    """Whether code that is not torch's runs between the sum of gradients and the next mini-batch."""
    optimizer, scheduler = parts.optimizer, parts.scheduler
    if parts.after_reduce is not None or not type(optimizer).__module__.startswith("torch.optim"):
        return True
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return True
    plain = scheduler is None or type(scheduler).__module__.startswith("torch.optim")
    return not plain or isinstance(scheduler, _WITH_FUNCTIONS)
