"""ESTs that one process hosts: their turns, the sum of their gradients, and one mini-batch of a job.

In a mini-batch, the EasyScaleThreads (ESTs) of a process, one per logical worker, take turns with forward and
backward passes; then all processes sum the gradients of all ESTs, and each takes the same optimizer step.
`ModelGradients` and `ModelChecks` do this for one model, whoever runs the passes; `HostedESTs` runs those of
a job whose functions are given by name.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from makespan.easyscale.context import Contexts, virtual_rank
from makespan.easyscale.data import loss_of
from makespan.easyscale.job import RankMapping
from makespan.easyscale.kernels import DeterminismLevel
from makespan.easyscale.optimizer_shards import OptimizerShards
from makespan.easyscale.parts import TrainedParts
from makespan.easyscale.reduction import (
    BucketMap,
    Buckets,
    GradientSet,
    GradientTaker,
    HostCopies,
    ReadyOrder,
    Reduction,
    Steps,
    provisional_map,
    rebuilt_map,
    share,
    synchronize,
    trained_parameters,
    unordered_map,
)
from makespan.easyscale.user_state import UserState
from makespan.errors import InputError
from makespan.training.bits import WordSum, word_sum_of

# --- Pieces: the gradients of a model, checks of a model, and the results of all ESTs ---

_HOST = torch.device("cpu")


class ModelGradients:
    """Gradients of one model, taken EST by EST in a pass over all hosted ESTs, then summed over all ESTs.

    The bits of the sums are those of one `torch.nn.parallel.DistributedDataParallel` around the model.

    Parameters
    ----------
    model
        The model; parameters that require no gradient are left out.
    mapping, process
        Mapping of ESTs to processes, and the number of this process in it.
    reduction, level
        Order of the sum of gradients, and determinism level.
    copies
        Copies to the host; all models of a process may share them.
    bucket_map
        Bucket layout from a checkpoint, for levels that keep it; None to determine one as
        DistributedDataParallel does.
    keeps_sums, accumulates
        See `GradientTaker`.
    """

    def __init__(
        self,
        model: nn.Module,
        mapping: RankMapping,
        process: int,
        reduction: Reduction,
        level: DeterminismLevel,
        copies: HostCopies,
        bucket_map: BucketMap | None = None,
        *,
        keeps_sums: bool,
        accumulates: bool = False,
    ) -> None:
        self._reduction, self._copies, self._level = reduction, copies, level
        self._kept = {"keeps_sums": keeps_sums, "accumulates": accumulates}
        self._trained = trained_parameters(model)
        self._place(mapping, process, bucket_map)

    def move(self, mapping: RankMapping, process: int, bucket_map: BucketMap | None) -> None:
        """Continue with another mapping, from a bucket layout; gradients of a running pass are dropped."""
        self._taker.close()
        for parameter in self._trained.values():
            parameter.grad = None
        self._place(mapping, process, bucket_map)

    def _place(self, mapping: RankMapping, process: int, bucket_map: BucketMap | None) -> None:
        self._mapping, self._process = mapping, process
        # Without D1, communication uses the place in the mapping instead of the virtual rank.
        self._numbered = mapping if self._level.pins_communication else mapping.by_position()
        restored = bucket_map if self._level.pins_communication else None
        if self._reduction.find_unused_parameters:
            restored = unordered_map(self._trained, self._reduction.bucket_cap_bytes)
        self.must_rebuild = restored is None
        self._bucket_map = restored or provisional_map(self._trained)
        self._taker = self._taker_of(self._bucket_map)
        self._sets: list[GradientSet] = []
        self._ready: list[str] = []
        self._recorder: ReadyOrder | None = None
        self._unused: list[str] = []

    @property
    def bucket_map(self) -> BucketMap | None:
        """Bucket layout for a checkpoint; None until the first sum has determined it."""
        return None if self.must_rebuild else self._bucket_map

    def layout(self) -> list[list[str]] | None:
        """Return the bucket layout as plain values; None until it is determined."""
        return None if self.must_rebuild else [list(names) for names in self._bucket_map]

    @property
    def notices(self) -> list[str]:
        """Notices about parameters that a turn leaves out although the job does not expect it."""
        if not self._unused:
            return []
        more = f" and {len(self._unused) - 1} more" if self._unused[1:] else ""
        return [
            f"parameter {self._unused[0]}{more} got no gradient in a turn; stock training fails there "
            "without find_unused_parameters=True, which gives a job the bits that it then has"
        ]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take gradients in a pass over all hosted ESTs, between `begin` and `finish` of each."""
        self._sets, self._ready = [], []
        with self._taker.listening():
            yield

    def begin(self, rank: int) -> None:
        """Begin the turn of an EST."""
        # As in DistributedDataParallel, rank 0 determines the bucket layout of all.
        self._recorder = ReadyOrder(self._trained) if self.must_rebuild and rank == 0 else None

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Let one of several backward passes of a turn add to its gradients."""
        if self._recorder is not None:
            self._recorder.restart()
        with self._taker.passing():
            yield

    def finish(self) -> None:
        """End the turn of an EST; no gradient is left in the model."""
        if self._recorder is not None:
            self._ready = self._recorder.finish()
        self._sets.append(self._taker.take(len(self._sets)))

    def sum(self) -> Steps[None]:
        """Make the sum over all ESTs the gradients of the model; the first sum determines the layout."""
        self._copies.finish()  # the sum reads the copies on the host
        if not (self._unused or self._reduction.find_unused_parameters):
            self._unused = self._left_out()
        yield from self._taker.sum(self._sets, self._numbered, self._process, self._reduction)
        self._sets = []
        if self.must_rebuild:
            yield from self._rebuild()

    def _left_out(self) -> list[str]:
        """Return the parameters without a gradient in the turn of some EST."""
        lacking = [each.used for each in self._sets if not each.used.all()]
        return [
            name for number, name in enumerate(self._trained) if not all(used[number] for used in lacking)
        ]

    def _rebuild(self) -> Steps[None]:
        """Rebuild the buckets in the order in which the gradients of the first EST became ready."""
        names, host = list(self._trained), self._mapping.host(0)
        numbers = torch.full((len(names),), -1)
        numbers[: len(self._ready)] = torch.tensor(
            [names.index(name) for name in self._ready], dtype=torch.int64
        )
        lengths = [len(names) if process == host else 0 for process in range(self._mapping.n_processes)]
        parts = yield from share(numbers[: lengths[self._process]], lengths)
        order = [names[number] for number in parts[host].tolist() if number >= 0]
        self._taker.close()
        self._bucket_map = rebuilt_map(self._trained, order, self._reduction.bucket_cap_bytes)
        self._taker = self._taker_of(self._bucket_map)
        self.must_rebuild = False

    def _taker_of(self, bucket_map: BucketMap) -> GradientTaker:
        """Provide memory for the sums of gradients in a layout."""
        buckets = Buckets(self._trained, bucket_map)
        return GradientTaker(buckets, self._reduction.set_scale, self._copies, **self._kept)


class ModelChecks:
    """Checks that passes leave a model as it was built, apart from its gradients and buffers.

    Parameters
    ----------
    model
        The model, before its first pass.
    outside
        Where changes belong instead of a forward pass, for messages.
    """

    def __init__(self, model: nn.Module, outside: str = "after_reduce") -> None:
        self._model, self._outside = model, outside
        self._frozen = {
            name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad
        }
        self._n_hooks = _hook_counts(model)
        self._parameters = dict(model.named_parameters())
        self._before: dict[str, tuple[int, int]] = {}
        self._versions: list[tuple[int, int]] = []
        self._written: set[str] = set()  # parameters that some turn has written to, if only what they had
        self._changed: set[str] = set()
        self.notices: list[str] = []

    def check_hooks(self, by: str) -> None:
        """Reject hooks that a restart would lose."""
        for name, number in _hook_counts(self._model).items():
            if number != self._n_hooks.get(name, 0):
                raise InputError(
                    f"{by} added or removed a hook of module {name or 'model'}, which no checkpoint holds; "
                    "expected hooks that are registered where the model is built"
                )

    def check_frozen(self) -> None:
        """Reject gradients of frozen parameters, because they are not summed over processes."""
        for name, parameter in self._frozen.items():
            if parameter.grad is not None:
                raise InputError(
                    f"parameter {name} got a gradient but required none when the run began; expected "
                    "requires_grad to be set where the model is built"
                )

    def begin(self) -> None:
        """Begin a pass over all hosted ESTs."""
        self._changed = set()

    def before_turn(self, *, watches: bool) -> None:
        """Record the parameters before a turn: if it is watched, the values, otherwise versions."""
        model = self._model.named_parameters() if watches else self._chosen(self._written)
        self._before, self._versions = _checksums(model), self._versions_now()

    def after_turn(self, *, watches: bool) -> None:
        """Check what a turn has changed."""
        versions = zip(self._parameters, self._versions, self._versions_now(), strict=True)
        written = {name for name, before, now in versions if before != now}
        if watches:
            self._check_parameters(_checksums(self._model.named_parameters()), set())
            self.check_hooks("a forward pass")
        elif written:
            # Of a parameter that is written to for the first time, the value before is not known.
            self._check_parameters(_checksums(self._chosen(self._written)), written - self._written)
        self._written |= written

    def _chosen(self, names: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, self._parameters[name]) for name in sorted(names))

    def _versions_now(self) -> list[tuple[int, int]]:
        """Return the address of each parameter, and a number that grows with each operation in place."""
        return [(each.data_ptr(), each._version) for each in self._parameters.values()]

    def _check_parameters(self, now: Mapping[str, tuple[int, int]], changed: set[str]) -> None:
        """Find the parameters that forward passes have changed, and reject a second change."""
        before = self._before
        if odd := sorted(now.keys() ^ before.keys()):
            raise InputError(
                f"a forward pass added or removed parameter {odd[0]}; expected the parameters that the model "
                "is built with"
            )
        changed = changed | {name for name, checksum in now.items() if before[name] != checksum}
        for name in sorted(changed):
            # A first change may be an initialization that later passes do not repeat.
            problem, expected = (
                f"a forward pass changes parameter {name}",
                f"a buffer, or a change in {self._outside}",
            )
            if name in self._changed:
                raise InputError(f"{problem}, and the next pass changes it again; expected {expected}")
            notice = f"{problem}; if later passes change it too, use {expected}"
            if notice not in self.notices:
                self.notices.append(notice)
        self._changed |= changed


def _checksums(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, tuple[int, int]]:
    """Return a checksum of each parameter by name: its address, and the sum of its words."""
    return {name: (each.data_ptr(), int(word_sum_of([each]))) for name, each in parameters}


def _hook_counts(model: nn.Module) -> dict[str, int]:
    """Count the hooks of each module."""
    kinds = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return {
        path: sum(len(getattr(module, kind, ())) for kind in kinds) for path, module in model.named_modules()
    }


def check_modules(model: nn.Module, mapping: RankMapping) -> None:
    """Raise an `InputError` if a module cannot be trained by ESTs that take turns."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            tensors = (*module.parameters(), *module.buffers())
            on_cpu = any(tensor.device.type == "cpu" for tensor in tensors)
            if not on_cpu and mapping.n_logical_workers == 1:
                continue  # has nobody to communicate with
            limit = ", and only between GPUs" if on_cpu else ""
            problem = "is a SyncBatchNorm, which communicates within a forward pass"
            raise InputError(
                f"module {name or 'model'} {problem}{limit}; "
                "expected BatchNorm, whose statistics are those of a logical worker"
            )


@dataclass(frozen=True, slots=True)
class MiniBatchResult:
    """Results of a mini-batch.

    Parameters
    ----------
    losses
        Losses of all ESTs, by virtual rank.
    micro_batch_s, sync_s
        Time of each hosted EST, and of the sum and the optimizer step [s].
    ending
        Largest of the values that the processes gave as their ``ending``.
    word_sums
        Sum of the words of all parameters after the step, by process, modulo 2^64; it differs if a bit of a
        replica differs, unless several differences cancel out. Empty for a single process.
    """

    losses: tuple[float, ...]
    micro_batch_s: tuple[float, ...]
    sync_s: float
    ending: int = 0
    word_sums: tuple[int, ...] = ()


def gather_results(
    own: Tensor, further: Sequence[float], mapping: RankMapping
) -> Steps[tuple[Tensor, list[list[float]]]]:
    """Gather the results of all ESTs, and further numbers of each process.

    Parameters
    ----------
    own
        One row per hosted EST, on the host: float64, (hosted ESTs, numbers per EST).
    further
        Numbers of this process; equally many in each.

    Returns
    -------
    tuple
        One row per EST by virtual rank, (N, numbers per EST), and the further numbers by process.
    """
    width = own.shape[1]
    vector = torch.cat([own.reshape(-1), torch.tensor(further, dtype=torch.float64)])
    gathered = yield from share(vector, [len(ranks) * width + len(further) for ranks in mapping.hosted])
    by_rank, by_process = own.new_empty(mapping.n_logical_workers, width), []
    for ranks, part in zip(mapping.hosted, gathered, strict=True):
        rows, more = torch.split(part, [len(ranks) * width, len(further)])
        by_rank[list(ranks)] = rows.view(len(ranks), width)
        by_process.append(more.tolist())
    return by_rank, by_process


def word_halves(word_sum: Tensor) -> tuple[int, int]:
    """Return the halves of a `WordSum`, whole numbers below 2^32, which float64 holds without a loss."""
    high, low = divmod(int(word_sum), 1 << 32)
    return high, low


def joined_halves(high: float, low: float) -> int:
    """Return the word sum of `word_halves`."""
    return (int(high) << 32) + int(low)


# --- One mini-batch of a job whose functions are given by name ---

Fetch = Callable[[int], Any]


class Replication(Protocol):
    """Copies the contexts of ESTs to other processes within a mini-batch."""

    def after_passes(self) -> None:
        """Start to send the contexts of the hosted ESTs, while gradients are summed."""

    def after_sum(self) -> None:
        """Wait for the contexts that other processes send here."""

    def before_results(self) -> None:
        """Take notice that `HostedESTs.take_step` needs nothing more from other processes."""

    def before_step(self) -> None:
        """Take notice that all have the results of all, and that parameters and optimizer change now."""


_WITH_FUNCTIONS = (torch.optim.lr_scheduler.LambdaLR, torch.optim.lr_scheduler.MultiplicativeLR)


class HostedESTs:
    """The ESTs that one process hosts; every process of the mapping has one such object.

    Between two mini-batches, parameters and optimizer have equal bits in every process, gradients are None,
    and the contexts of all hosted ESTs are stored in ``contexts``.

    Parameters
    ----------
    parts, device
        Trained objects, and their device.
    mapping, process
        Mapping of ESTs to processes, and the number of this process in it.
    reduction, level
        Order of the sum of gradients, and determinism level.
    seed
        Seed of the random states of the ESTs.
    buffers
        ``per_rank``: every EST keeps its own; ``rank0``: all start a mini-batch from those of the first.
    bucket_map
        See `ModelGradients`.
    computing
        Context of forward passes and losses.
    swaps_contexts
        Whether each EST has its own random states and buffers; False to measure the cost of swapping.
    user_state, late_buffers
        See `Contexts`.
    on_micro_batch
        Called after each micro-batch.
    shards
        The part of the optimizer state that this process holds; None if it holds all.
    sums_on_host
        See `HostCopies`.

    Raises
    ------
    makespan.errors.InputError
        The model cannot be trained by ESTs that take turns, or sizes disagree.
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
        shards: OptimizerShards | None = None,
        sums_on_host: bool = False,
    ) -> None:
        _check_hosting(parts, mapping, reduction, buffers)
        self._parts, self._device, self._process = parts, device, process
        self._buffers, self._swaps, self._shards = buffers, swaps_contexts, shards
        self.mapping, self.ranks = mapping, mapping.hosted[process]
        self._computing = nullcontext() if computing is None else computing
        self._word_sum = WordSum(parts.model.parameters())
        self._on_micro_batch, self._has_user_step = on_micro_batch, _has_user_step(parts)
        self._gradients = ModelGradients(
            parts.model, mapping, process, reduction, level, HostCopies(device, sums_on_host=sums_on_host),
            bucket_map, keeps_sums=not self._has_user_step,
        )  # fmt: skip
        self._checks = ModelChecks(parts.model)
        self.contexts = Contexts(parts.model, device, self.ranks, seed, user_state, late_buffers)
        self.state_names = set(parts.model.state_dict())
        self._notices: list[str] = []
        self._watches = False

    def move(
        self,
        mapping: RankMapping,
        process: int,
        bucket_map: BucketMap | None,
        contexts: Mapping[int, Mapping[str, Any]],
        changes: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Continue with another mapping after a mini-batch; what passes have done since then is dropped.

        Parameters
        ----------
        mapping, process, bucket_map
            See `ModelGradients`.
        contexts, changes
            See `makespan.easyscale.context.Contexts.rehost`; those of the ESTs of this process.
        """
        self.mapping, self.ranks, self._process = mapping, mapping.hosted[process], process
        self._parts.optimizer.zero_grad(set_to_none=True)
        self._gradients.move(mapping, process, bucket_map)
        self.contexts.rehost(contexts, changes)

    @property
    def bucket_map(self) -> BucketMap | None:
        """Bucket layout for a checkpoint; None until the first mini-batch has determined it."""
        return self._gradients.bucket_map

    def layout(self) -> list[list[str]] | None:
        """Return the bucket layout as plain values; None until it is determined."""
        return self._gradients.layout()

    @property
    def notices(self) -> list[str]:
        """Notices about what user code does."""
        return [*self._notices, *self._checks.notices, *self._gradients.notices]

    def mini_batch(
        self,
        fetch: Fetch,
        *,
        watches: bool = False,
        ending: Callable[[], int] = lambda: 0,
        replication: Replication | None = None,
    ) -> Steps[MiniBatchResult]:
        """Run one mini-batch.

        Parameters
        ----------
        fetch
            Function that returns the batch of a virtual rank.
        watches
            Whether to look for changes by user code: of values that it keeps in Python, and of parameters in
            a forward pass.
        ending
            Called when results are gathered; its value goes to all processes.
        replication
            Copies contexts to other processes. With it, results are gathered before the optimizer step, not
            after it, so that no process steps before all have the results and the contexts of all; the sums
            of words are then those from before the step. With shards of the optimizer, parameters that other
            processes hold are left to the caller (`OptimizerShards.share`).
        """
        self._watches = watches
        if self._buffers == "rank0":
            yield from self.contexts.broadcast_buffers(self.mapping, self._process)
        if watches:
            self.contexts.begin_watching()
        self._checks.begin()
        losses, times, n_workers = [], [], self.mapping.n_logical_workers
        with self._gradients.listening(), virtual_rank(self.ranks[0], n_workers) as show:
            for rank in self.ranks:
                begun = time.perf_counter()
                show(rank)
                context = self.contexts.live(rank, watches=watches) if self._swaps else nullcontext()
                self._checks.before_turn(watches=watches)
                self._gradients.begin(rank)
                with context:
                    losses.append(self._forward_backward(fetch(rank)))
                self._checks.after_turn(watches=watches)
                self._checks.check_frozen()
                # Gradients leave the model here, so that the next EST starts from none.
                self._gradients.finish()
                synchronize(self._device)
                times.append(time.perf_counter() - begun)
                self._on_micro_batch()
        begun = time.perf_counter()
        if replication is not None:
            replication.after_passes()
            yield from self._gradients.sum()
            replication.after_sum()
            yield from self._send_first_buffers()
            replication.before_results()
            result = yield from self._results(losses, ending)
            replication.before_step()
            self.take_step()
        else:
            yield from self._gradients.sum()
            yield from self._send_first_buffers()
            self.take_step()
            if self._shards is not None:
                yield from self._shards.share()
            result = yield from self._results(losses, ending)
        return replace(result, micro_batch_s=tuple(times), sync_s=time.perf_counter() - begun)

    def _results(self, losses: Sequence[Tensor], ending: Callable[[], int]) -> Steps[MiniBatchResult]:
        """Gather the results of all ESTs, without times."""
        own = torch.stack(list(losses)).to(_HOST, torch.float64)
        if self.mapping.n_processes == 1:
            by_rank = dict(zip(self.ranks, own.tolist(), strict=True))
            return MiniBatchResult(tuple(by_rank[rank] for rank in sorted(by_rank)), (), 0.0, ending())
        further = [ending(), *word_halves(self._word_sum())]
        rows, by_process = yield from gather_results(own[:, None], further, self.mapping)
        word_sums = tuple(joined_halves(high, low) for _, high, low in by_process)
        ending_of_all = max(int(each[0]) for each in by_process)
        return MiniBatchResult(tuple(rows[:, 0].tolist()), (), 0.0, ending_of_all, word_sums)

    def _forward_backward(self, batch: Any) -> Tensor:
        """Run the forward and the backward pass of the live EST, and return its loss."""
        with self._computing:
            loss, unused = loss_of(self._parts.model, self._parts.loss, batch, self._device)
        if unused:
            self._notices.append(f"loss also returns {unused}, which is ignored")
        scaler = self._parts.scaler
        scaled = loss if scaler is None else scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _send_first_buffers(self) -> Steps[None]:
        """Send the buffers of the first EST, if user code runs in the step, which must see the same state."""
        if self._has_user_step and self._swaps:
            yield from self.contexts.send_first_buffers(self.mapping, self._process)

    def take_step(self) -> None:
        """Take the optimizer step from the sum of gradients; with shards, that of what this process holds."""
        watches, has_shared = self._watches, self._has_user_step and self._swaps
        shared = self.contexts.active_for_all(watches=watches) if has_shared else nullcontext()
        held = nullcontext() if self._shards is None else self._shards.stepping()
        with virtual_rank(0, self.mapping.n_logical_workers), shared:
            if self._parts.scaler is not None:
                self._parts.scaler.unscale_(self._parts.optimizer)
            if self._parts.after_reduce is not None:
                self._parts.after_reduce(self._parts.model)
            with held:
                if self._parts.scaler is None:
                    self._parts.optimizer.step()
                else:
                    self._parts.scaler.step(self._parts.optimizer)
            if self._parts.scaler is not None:
                self._parts.scaler.update()
            if self._parts.scheduler is not None:
                self._parts.scheduler.step()
        self._parts.optimizer.zero_grad(set_to_none=True)
        if watches:
            self._checks.check_hooks("after_reduce")


def _check_hosting(parts: TrainedParts, mapping: RankMapping, reduction: Reduction, buffers: str) -> None:
    """Check that a model can be trained by ESTs that take turns."""
    if reduction.n_logical_workers != mapping.n_logical_workers:
        raise InputError(
            f"mapping {mapping} has {mapping.n_logical_workers} logical workers; expected "
            f"{reduction.n_logical_workers}, as the reduction has"
        )
    if buffers not in ("per_rank", "rank0"):
        raise InputError(f"buffers {buffers!r}; expected per_rank, rank0")
    check_modules(parts.model, mapping)
    trained = {id(parameter) for parameter in parts.model.parameters()}
    for number, group in enumerate(parts.optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in trained:  # no process would add up its gradients
                raise InputError(
                    f"group {number} of the optimizer has a parameter of shape {tuple(parameter.shape)} "
                    "that the model lacks; expected parameters of the model; register a loss with "
                    "parameters as its module"
                )


def _has_user_step(parts: TrainedParts) -> bool:
    """Return True if user code runs between the sum of gradients and the next mini-batch."""
    optimizer, scheduler = parts.optimizer, parts.scheduler
    if parts.after_reduce is not None or not type(optimizer).__module__.startswith("torch.optim"):
        return True
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return True
    plain = scheduler is None or type(scheduler).__module__.startswith("torch.optim")
    return not plain or isinstance(scheduler, _WITH_FUNCTIONS)
