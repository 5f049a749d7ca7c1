"""Process of an elastic run: ``python -m makespan.easyscale.worker <run directory>``.

The request lists jobs. The same processes train them one after the other, each for one generation: from a
checkpoint to the next with one mapping. In a mini-batch, the EasyScaleThreads (ESTs) of a process, one per
logical worker, take turns with forward and backward passes; then all processes sum the gradients of all ESTs,
and each takes the same optimizer step.
"""

import fcntl
import os
import pickle
import shutil
import signal
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from makespan.easyscale.context import (
    Contexts,
    bind_buffer,
    patch_distributed,
    registered_state,
    virtual_rank,
)
from makespan.easyscale.data import LoaderPool, LoaderState, Shards, loss_of
from makespan.easyscale.job import MODEL_FILE, TRAINING_LOCK, RankMapping
from makespan.easyscale.kernels import DeterminismLevel, kernels_of
from makespan.easyscale.parts import TrainedParts, build_parts, use_kernels
from makespan.easyscale.randomness import optimizer_sha, parameter_sha
from makespan.easyscale.reduction import (
    BucketMap,
    Buckets,
    GradientPacker,
    GradientSet,
    HostCopies,
    ReadyOrder,
    Reduction,
    Steps,
    detect_gloo_order,
    over_group,
    provisional_map,
    rebuilt_map,
    reduce_sets,
    share,
    synchronize,
    trained_parameters,
)
from makespan.easyscale.requests import GENERATIONS, GenerationRequest
from makespan.easyscale.user_state import PLAIN_TYPES, UserState, is_watched, load_optimizer
from makespan.errors import CheckpointError, InputError, TrainingError
from makespan.files import write_json
from makespan.runtime import (
    Identity,
    RunDirectory,
    choose_device,
    end_worker,
    finish_checkpoint,
    join,
    run_worker,
    start_checkpoint,
)
from makespan.training.bits import WordSum, word_sum_of
from makespan.units import format_bytes

# --- One mini-batch: ESTs in turn, one sum, one optimizer step ---

Fetch = Callable[[int], Any]
_HOST = torch.device("cpu")
_WITH_FUNCTIONS = (torch.optim.lr_scheduler.LambdaLR, torch.optim.lr_scheduler.MultiplicativeLR)


@dataclass(frozen=True, slots=True)
class MiniBatch:
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
        Bucket layout from a checkpoint, for levels that keep it; None to determine one as
        DistributedDataParallel does.
    computing
        Context of forward passes and losses.
    swaps_contexts
        Whether each EST has its own random states and buffers; False to measure the cost of swapping.
    user_state, late_buffers
        See `Contexts`.
    on_micro_batch
        Called after each micro-batch.

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
    ) -> None:
        _check_hosting(parts, mapping, reduction, buffers)
        self._parts, self._device, self._process = parts, device, process
        self._reduction, self._buffers, self._swaps = reduction, buffers, swaps_contexts
        self.mapping, self.ranks = mapping, mapping.hosted[process]
        # Without D1, communication uses the place in the mapping instead of the virtual rank.
        self._numbered = mapping if level.pins_communication else mapping.by_position()
        self._copies = HostCopies(device)
        self._computing = nullcontext() if computing is None else computing
        self._trained = trained_parameters(parts.model)
        self._frozen = {
            name: parameter
            for name, parameter in parts.model.named_parameters()
            if not parameter.requires_grad
        }
        self._word_sum = WordSum(parts.model.parameters())
        self._on_micro_batch, self._has_user_step = on_micro_batch, _has_user_step(parts)
        self.contexts = Contexts(parts.model, device, self.ranks, seed, user_state, late_buffers)
        self._n_hooks = _hook_counts(parts.model)
        self.state_names = set(parts.model.state_dict())
        self.notices: list[str] = []
        restored = bucket_map if level.pins_communication else None
        self._must_rebuild = restored is None
        self._bucket_map = restored or provisional_map(self._trained)
        self._packer, self._has_passed = self._packer_of(self._bucket_map), False

    @property
    def bucket_map(self) -> BucketMap | None:
        """Bucket layout for a checkpoint; None until the first mini-batch has determined it."""
        return None if self._must_rebuild else self._bucket_map

    def mini_batch(
        self, fetch: Fetch, *, watches: bool = False, ending: Callable[[], int] = lambda: 0
    ) -> Steps[MiniBatch]:
        """Run one mini-batch.

        Parameters
        ----------
        fetch
            Function that returns the batch of a virtual rank.
        watches
            Whether to look for changes by user code: of values that it keeps in Python, and of parameters in
            a forward pass.
        ending
            Called after the optimizer step; its value goes to all processes.
        """
        if self._buffers == "rank0":
            yield from self.contexts.broadcast_buffers(self.mapping, self._process)
        if watches:
            self.contexts.begin_watching()
        sets, losses, times, ready, changed = [], [], [], list[str](), set[str]()
        # Whatever is found out in a first pass is found out again where a pass is watched.
        is_late = watches or self._must_rebuild or not self._has_passed
        with self._packer.listening(), virtual_rank(self.ranks[0], self.mapping.n_logical_workers):
            for number, rank in enumerate(self.ranks):
                begun = time.perf_counter()
                # As in DistributedDataParallel, rank 0 determines the bucket layout of all.
                recorder = ReadyOrder(self._trained) if self._must_rebuild and rank == 0 else None
                context = self.contexts.live(rank, watches=watches) if self._swaps else nullcontext()
                before = self._checksums() if watches else {}
                self._packer.begin(number, is_late=is_late)
                with virtual_rank(rank, self.mapping.n_logical_workers), context:
                    losses.append(self._forward_backward(fetch(rank)))
                if watches:
                    changed = self._changed_parameters(before, changed)
                    self._check_hooks("a forward pass")
                ready = ready if recorder is None else recorder.finish()
                self._check_frozen()
                # Gradients leave the model here at the latest, so that the next EST starts from none.
                sets.append(self._packer.finish())
                synchronize(self._device)
                times.append(time.perf_counter() - begun)
                self._on_micro_batch()
        self._has_passed = True
        begun = time.perf_counter()
        self._copies.finish()  # the sum reads the copies on the host
        yield from self._sum_and_step(sets, watches)
        if self._must_rebuild:
            yield from self._rebuild(ready)
        by_rank, endings, word_sums = yield from self._gather_results(losses, ending)
        times_s = tuple(times), time.perf_counter() - begun
        return MiniBatch(by_rank, *times_s, max(endings), word_sums)

    def _forward_backward(self, batch: Any) -> Tensor:
        """Run the forward and the backward pass of the live EST, and return its loss."""
        with self._computing:
            loss, unused = loss_of(self._parts.model, self._parts.loss, batch, self._device)
        if unused:
            self.notices.append(f"loss also returns {unused}, which is ignored")
        scaler = self._parts.scaler
        scaled = loss if scaler is None else scaler.scale(loss)
        self._copies.before_reuse()  # of the vectors on the device, which hold the gradients of the last EST
        scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _sum_and_step(self, sets: Sequence[GradientSet], watches: bool) -> Steps[None]:
        """Sum the gradients of all ESTs and take the optimizer step."""
        total = yield from reduce_sets(sets, self._numbered, self._process, self._reduction)
        self._packer.unpack(total)
        # User code that runs here must see the same state in every process.
        has_shared = self._has_user_step and self._swaps
        if has_shared:
            yield from self.contexts.send_first_buffers(self.mapping, self._process)
        shared = self.contexts.active_for_all(watches=watches) if has_shared else nullcontext()
        with virtual_rank(0, self.mapping.n_logical_workers), shared:
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

    def _gather_results(
        self, losses: Sequence[Tensor], ending: Callable[[], int]
    ) -> Steps[tuple[tuple[float, ...], list[int], tuple[int, ...]]]:
        """Return the losses of all ESTs by virtual rank, and endings and word sums by process."""
        word_sum = None
        if self.mapping.n_processes > 1:
            word_sum = self._word_sum()
        own = torch.stack(list(losses)).to(_HOST, torch.float64)
        if word_sum is None:
            by_place = dict(zip(self.ranks, own.tolist(), strict=True))
            return tuple(by_place[rank] for rank in range(len(by_place))), [ending()], ()
        # Without a loss of bits: both halves of the sum are whole numbers below 2^32.
        high, low = divmod(int(word_sum), 1 << 32)
        values = torch.cat([own, torch.tensor([ending(), high, low], dtype=torch.float64)])
        gathered = yield from share(values, [len(ranks) + 3 for ranks in self.mapping.hosted])
        by_rank, endings, word_sums = dict[int, float](), [], []
        for ranks, part in zip(self.mapping.hosted, gathered, strict=True):
            *its_losses, its_ending, high_part, low_part = part.tolist()
            by_rank |= zip(ranks, its_losses, strict=True)
            endings.append(int(its_ending))
            word_sums.append((int(high_part) << 32) + int(low_part))
        return tuple(by_rank[rank] for rank in range(len(by_rank))), endings, tuple(word_sums)

    def _check_hooks(self, by: str) -> None:
        """Reject hooks that a restart would lose."""
        for name, number in _hook_counts(self._parts.model).items():
            if number != self._n_hooks.get(name, 0):
                raise InputError(
                    f"{by} added or removed a hook of module {name or 'model'}, which no checkpoint holds; "
                    "expected hooks that are registered where the model is built"
                )

    def _check_frozen(self) -> None:
        """Reject gradients of frozen parameters, because they are not summed over processes."""
        for name, parameter in self._frozen.items():
            if parameter.grad is not None:
                raise InputError(
                    f"parameter {name} got a gradient but required none when the run began; expected "
                    "requires_grad to be set where the model is built"
                )

    def _checksums(self) -> dict[str, tuple[int, int]]:
        """Return a checksum of each parameter: its address, and the sum of its words."""
        return {
            name: (parameter.data_ptr(), int(word_sum_of([parameter])))
            for name, parameter in self._parts.model.named_parameters()
        }

    def _changed_parameters(self, before: Mapping[str, tuple[int, int]], already: set[str]) -> set[str]:
        """Return the parameters that forward passes have changed, and reject a second change."""
        now = self._checksums()
        if odd := sorted(now.keys() ^ before.keys()):
            raise InputError(
                f"a forward pass added or removed parameter {odd[0]}; expected the parameters that the model "
                "is built with"
            )
        changed = {name for name, checksum in now.items() if before[name] != checksum}
        for name in sorted(changed):
            # A first change may be an initialization that later passes do not repeat.
            problem, expected = (
                f"a forward pass changes parameter {name}",
                "a buffer, or a change in after_reduce",
            )
            if name in already:
                raise InputError(f"{problem}, and the next pass changes it again; expected {expected}")
            self.notices.append(f"{problem}; if later passes change it too, use {expected}")
        return already | changed

    def _rebuild(self, ready: Sequence[str]) -> Steps[None]:
        """Rebuild the buckets in the order in which the gradients of the first EST became ready."""
        names, host = list(self._trained), self.mapping.host(0)
        numbers = torch.full((len(names),), -1)
        numbers[: len(ready)] = torch.tensor([names.index(name) for name in ready], dtype=torch.int64)
        lengths = [len(names) if process == host else 0 for process in range(self.mapping.n_processes)]
        parts = yield from share(numbers[: lengths[self._process]], lengths)
        order = [names[number] for number in parts[host].tolist() if number >= 0]
        self._packer.close()
        self._bucket_map = rebuilt_map(self._trained, order, self._reduction.bucket_cap_bytes)
        self._packer, self._has_passed = self._packer_of(self._bucket_map), False
        self._must_rebuild = False

    def _packer_of(self, bucket_map: BucketMap) -> GradientPacker:
        """Provide vectors for the gradients of all hosted ESTs in a layout."""
        layout = Buckets(self._trained, bucket_map)
        return GradientPacker(
            layout,
            self._reduction.set_scale,
            len(self.ranks),
            self._copies,
            keeps_sums=not self._has_user_step,
        )


def _check_hosting(parts: TrainedParts, mapping: RankMapping, reduction: Reduction, buffers: str) -> None:
    """Check that a model can be trained by ESTs that take turns."""
    if reduction.n_logical_workers != mapping.n_logical_workers:
        raise InputError(
            f"mapping {mapping} has {mapping.n_logical_workers} logical workers; expected "
            f"{reduction.n_logical_workers}, as the reduction has"
        )
    if buffers not in ("per_rank", "rank0"):
        raise InputError(f"buffers {buffers!r}; expected per_rank, rank0")
    for name, module in parts.model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and mapping.n_processes < mapping.n_logical_workers:
            raise InputError(
                f"module {name or 'model'} is a SyncBatchNorm, which communicates within a forward pass; "
                f"expected BatchNorm, or {mapping.n_logical_workers} processes (got {mapping.n_processes})"
            )
    trained = {id(parameter) for parameter in parts.model.parameters()}
    for number, group in enumerate(parts.optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in trained:  # no process would add up its gradients
                raise InputError(
                    f"group {number} of the optimizer has a parameter of shape {tuple(parameter.shape)} "
                    "that the model lacks; expected parameters of the model; register a loss with "
                    "parameters as its module"
                )


def _hook_counts(model: nn.Module) -> dict[str, int]:
    """Count the hooks of each module."""
    kinds = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return {
        path: sum(len(getattr(module, kind, ())) for kind in kinds) for path, module in model.named_modules()
    }


def _has_user_step(parts: TrainedParts) -> bool:
    """Return True if user code runs between the sum of gradients and the next mini-batch."""
    optimizer, scheduler = parts.optimizer, parts.scheduler
    if parts.after_reduce is not None or not type(optimizer).__module__.startswith("torch.optim"):
        return True
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return True
    plain = scheduler is None or type(scheduler).__module__.startswith("torch.optim")
    return not plain or isinstance(scheduler, _WITH_FUNCTIONS)


# --- Files of a checkpoint: the model, the shared state, and a file for each EST ---
#
# The model is a plain ``state_dict`` with the buffers of the first EST, so that an export is a copy of its
# file. Reading a checkpoint runs no code: it holds tensors, numbers, texts, lists, dictionaries.

_SHARED_FILE = "shared.pt"
_PROBE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class SavedJob:
    """State of a checkpoint that `read_saved` has not loaded into model, optimizer and scheduler."""

    bucket_map: BucketMap | None
    contexts: Mapping[int, Mapping[str, Any]]
    loaders: Mapping[int, LoaderState]
    late_buffers: Mapping[str, bool]
    shared: Mapping[str, Any]
    frozen: Sequence[str]


def check_can_be_saved(parts: TrainedParts, hosted: HostedESTs, pool: LoaderPool) -> None:
    """Reject early any state that a checkpoint cannot hold; nothing is written.

    Raises
    ------
    makespan.errors.InputError
        A value is neither a tensor nor a plain value, or an entry was added to the model after it was built.
    """
    for rank in hosted.ranks:
        _check_plain("worker", _est_values(rank, hosted, pool))
    _check_plain("shared", _shared_values(parts, hosted))
    _check_plain("model", _model_state(parts, hosted))


def write_saved(directory: Path, parts: TrainedParts, hosted: HostedESTs, pool: LoaderPool) -> None:
    """Write the ESTs of this process, and the shared state if it hosts the first one."""
    for rank in hosted.ranks:
        _write(_est_values(rank, hosted, pool), directory / _est_file(rank))
    if 0 not in hosted.ranks:
        return
    with hosted.contexts.live(0):
        _write(_model_state(parts, hosted), directory / MODEL_FILE)
    _write(_shared_values(parts, hosted), directory / _SHARED_FILE)


def _est_values(rank: int, hosted: HostedESTs, pool: LoaderPool) -> dict[str, Any]:
    return {"context": hosted.contexts.values(rank), "loader": pool.state(rank).values()}


def _model_state(parts: TrainedParts, hosted: HostedESTs) -> dict[str, Any]:
    state: dict[str, Any] = parts.model.state_dict()
    if odd := [name for name in state if name not in hosted.state_names | set(hosted.contexts.late_buffers)]:
        raise InputError(
            f"{odd[0]} was added to the model during training; expected the entries that the model is built "
            "with, or buffers"
        )
    for name, value in state.items():
        # A copy: torch.save would write the whole storage that the tensor is a view of.
        state[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return state


def _shared_values(parts: TrainedParts, hosted: HostedESTs) -> dict[str, Any]:
    return {
        "optimizer": _plain(parts.optimizer.state_dict()),
        "scheduler": None if parts.scheduler is None else _plain(parts.scheduler.state_dict()),
        "scaler": None if parts.scaler is None else _plain(parts.scaler.state_dict()),
        "bucket_map": None if hosted.bucket_map is None else [list(names) for names in hosted.bucket_map],
        "late_buffers": hosted.contexts.late_buffers,
        "frozen": [name for name, parameter in parts.model.named_parameters() if not parameter.requires_grad],
        "of_all": hosted.contexts.shared_values(),
    }


def _plain(value: Any) -> Any:
    """Convert NumPy floats, which learning rates often are, to floats of Python."""
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return float(value) if isinstance(value, float) else value


def read_saved(directory: Path, parts: TrainedParts, ranks: tuple[int, ...]) -> SavedJob:
    """Load the shared state into model, optimizer and scheduler; return the rest for some ranks."""
    saved = {rank: _read(directory / _est_file(rank)) for rank in ranks}
    shared = _read(directory / _SHARED_FILE)
    # Checkpoints of earlier versions lack the keys that are read with a default.
    state, late = _read(directory / MODEL_FILE), shared.get("late_buffers", {})
    contexts = {rank: values["context"] for rank, values in saved.items()}
    buffers = [*(context["buffers"] for context in contexts.values()), state]
    device = next((parameter.device for parameter in parts.model.parameters()), torch.device("cpu"))
    # Late buffers must exist, in their shape, before the state is loaded.
    for name, is_persistent in late.items():
        if (value := next((values[name] for values in buffers if name in values), None)) is not None:
            bind_buffer(parts.model, name, value.to(device), is_persistent=is_persistent)
    try:
        parts.model.load_state_dict(state)
        load_optimizer(parts.optimizer, shared["optimizer"])
        if parts.scheduler is not None:
            parts.scheduler.load_state_dict(shared["scheduler"])
        if parts.scaler is not None:
            parts.scaler.load_state_dict(shared["scaler"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{directory}: does not fit what the functions of the job return: {error}"
        ) from None
    bucket_map = shared["bucket_map"]
    return SavedJob(
        None if bucket_map is None else tuple(map(tuple, bucket_map)),
        contexts,
        {rank: LoaderState.from_values(values["loader"]) for rank, values in saved.items()},
        late,
        shared.get("of_all", {}),
        shared.get("frozen", []),
    )


def _est_file(rank: int) -> str:
    return f"worker-{rank}.pt"


def _write(values: Any, path: Path) -> None:
    """Write tensors and plain values; other types could not be read again without running code."""
    _check_plain(path.stem, values)
    try:
        torch.save(values, path)
    except (OSError, RuntimeError) as error:
        cause: Exception = error
        if not isinstance(error, OSError):  # torch hides the reason; writing a few more bytes reveals it
            try:
                with path.open("ab") as stream:
                    stream.write(bytes(_PROBE_BYTES))
            except OSError as reason:
                cause = reason
        free = format_bytes(shutil.disk_usage(path.parent).free)
        text = (cause.strerror if isinstance(cause, OSError) else None) or str(cause).splitlines()[0]
        text = f"{text}; {free} are free on the disk; earlier checkpoints are intact"
        raise CheckpointError(f"{path}: cannot be written: {text}") from error


def _check_plain(name: str, values: Any) -> None:
    for leaf, value in _leaves(name, values):
        if type(value) not in PLAIN_TYPES and type(value) not in (Tensor, nn.Parameter):
            raise InputError(f"{leaf} is a {type(value).__name__}; expected tensors and plain values")


def _leaves(name: str, values: Any) -> list[tuple[str, Any]]:
    if type(values) in (dict, OrderedDict, Counter):
        pairs = [(f"{name}[{key!r}]", value) for key, value in values.items()]
    elif type(values) in (list, tuple):
        pairs = [(f"{name}[{number}]", value) for number, value in enumerate(values)]
    else:
        return [(name, values)]
    return [leaf for inner, value in pairs for leaf in _leaves(inner, value)]


def _read(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: cannot be read as tensors and plain values: {error}") from None


# --- Process of a generation ---
#
# A generation is in one of four states after each mini-batch, see `_Ending`. All processes compute the state
# together, so that they write checkpoints and end at the same mini-batch:
#
# - a checkpoint is written by all processes: each writes its ESTs into a directory that readers ignore, then
#   the first process writes the record, completes the checkpoint and renames it
# - rows of mini-batches are kept in memory until then, so that records and checkpoints always match

PRELOAD = ("torch._dynamo",)
"""Modules that optimizers load slowly: a fork server loads them before it forks the first worker."""
_NOTICE = "the run takes this signal as a notice and writes a checkpoint"
_PROGRESS_S = 0.5
_PARAMETERS, _OPTIMIZER = "parameters", "the states of the optimizer"
_MIN_SAVE_RATIO = (
    20.0  # least time between checkpoints that are due by time, in times of writing the last one
)


class _Ending(IntEnum):
    """State after a mini-batch; of several processes the largest value counts."""

    CONTINUE = 0
    CHECKPOINT_DUE = 1
    CHANGE_REQUESTED = 2
    SIGNALLED = 3


_ENDING_NAMES = ("done", "done", "asked", "signalled")


class _Process:
    """State of this process for all jobs of the request: rank, device, and received signals."""

    def __init__(self, directory: RunDirectory, who: Identity) -> None:
        self.directory, self.who = directory, who
        self.requests: list[GenerationRequest] = GENERATIONS.validate_python(directory.request())
        self.is_signalled, self._progress_at, self._micro_batch_at = False, 0.0, 0.0
        self.notices: list[str] = []
        for request in self.requests:
            # Never closed: a run that follows a killed one waits until this process has ended.
            handle = os.open(request.run_dir / TRAINING_LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(handle, fcntl.LOCK_SH)
        self.handlers: dict[signal.Signals, Any] = {signal.SIGTERM: self._on_signal}
        if who.parent is not None:  # a terminal interrupts all its processes; the parent decides
            self.handlers |= dict.fromkeys((signal.SIGINT, signal.SIGHUP), signal.SIG_IGN)
        self.set_handlers()
        self.device = choose_device(who)
        self.pids = join(directory, who)
        self.start_s = time.time() - who.launched_s
        patch_distributed(self.requests[0].job.n_logical_workers)

    def set_handlers(self) -> list[str]:
        """Set the handlers of signals that end a run; return notices of those that user code had replaced."""
        replaced = [
            number for number, handler in self.handlers.items() if signal.getsignal(number) != handler
        ]
        for number in replaced:
            signal.signal(number, self.handlers[number])
        return [
            f"code of the job sets a handler of {number.name}, which is not called: {_NOTICE}"
            for number in replaced
        ]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_signalled = True

    def report_progress(self, step: int, loss: float) -> None:
        """Write the progress at intervals, from the first process."""
        if self.who.rank == 0 and time.monotonic() - self._progress_at > _PROGRESS_S:
            self._progress_at = time.monotonic()
            values = {"step": step, "loss": loss, "pids": self.pids, "notices": self.notices}
            self.directory.write_progress(values)

    def report_micro_batch(self) -> None:
        """Write at intervals that this process makes progress, for the stall limit of the launcher."""
        if time.monotonic() - self._micro_batch_at > _PROGRESS_S:
            self._micro_batch_at = time.monotonic()
            self.directory.write_beat(self.who.rank)


class _Generation:
    """One job from a checkpoint to the end of the generation, in this process."""

    def __init__(self, process: _Process, request: GenerationRequest) -> None:
        self.process, self.request, self.begun = process, request, time.perf_counter()
        self.job, self.mapping = request.job, request.placing.mapping
        self.number = process.who.rank
        self.device_name = request.placing.devices[self.number]
        self.done, self.rows = request.first_step, list[dict[str, Any]]()
        self.saved_at, self.save_s = time.monotonic(), 0.0

    def train(self) -> dict[str, Any]:
        """Train to the last step of the run, or until the end of the generation is requested."""
        request, ending = self.request, _Ending.CONTINUE
        with ExitStack() as stack:
            self._build(stack)
            start_s = self.process.start_s if request.is_first else 0.0
            self.restart_s = request.change.save_s + start_s + time.perf_counter() - self.begun
            check_can_be_saved(self.parts, self.hosted, self.pool)
            first, self.saved_at = self.done, time.monotonic()
            while self.done < request.steps and ending <= _Ending.CHECKPOINT_DUE:
                watches = self._watches(self.done - first)
                steps = self.hosted.mini_batch(self.pool.next, watches=watches, ending=self._ending)
                batch = over_group(steps, self.process.device)
                self.done += 1
                # A signal may reach only some processes in time, so the strongest answer counts for all.
                ending = _Ending(batch.ending)
                self.notices.update(self.process.set_handlers())
                if is_watched(self.done - first - 1):
                    self._check_agreement(self.done - first)
                if len(set(batch.word_sums)) > 1:
                    raise _divergence(self.done, _PARAMETERS, batch.word_sums)
                saves = ending != _Ending.CONTINUE or self._saves_after(self.done)
                self._record(batch, saves)
                self.process.report_progress(self.done, batch.losses[-1])
                if saves:
                    self._save()
        local = sorted(
            {*self.notices, *self.pool.notices, *self.hosted.notices, *self.hosted.contexts.notices}
        )
        notices = sorted({notice for part in self._gather(local) for notice in part})
        return {
            "last_step": self.done,
            "ending": _ENDING_NAMES[ending],
            "fold": self.order,
            "notices": notices,
        }

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in every process."""
        gathered: list[Any] = [None] * self.process.who.size
        dist.all_gather_object(gathered, value)
        return gathered

    def _watches(self, number: int) -> bool:
        """Return True if a mini-batch of the generation, from 0, looks for changes by user code."""
        step, every = self.done + 1, self.request.hash_every
        return is_watched(number) or self._saves_after(step) or bool(every and step % every == 0)

    def _saves_after(self, step: int) -> bool:
        """Return True if a checkpoint is written after a mini-batch, whatever happens until then."""
        every = self.request.checkpoint_every
        return step == self.request.steps or bool(every and step % every == 0)

    def _check_agreement(self, number: int) -> None:
        """Reject shared state that differs between processes; all of them raise the same error."""
        if number == 1:
            check_can_be_saved(self.parts, self.hosted, self.pool)
        if self.process.who.size == 1:
            return
        local = self.hosted.contexts.shared_hashes()
        local |= {
            _PARAMETERS: parameter_sha(self.parts.model),
            _OPTIMIZER: optimizer_sha(self.parts.optimizer),
        }
        gathered = self._gather(local)
        for name in dict.fromkeys(name for hashes in gathered for name in hashes):
            if len({hashes[name] for hashes in gathered if name in hashes}) > 1:
                raise _divergence(self.done, name)

    def _build(self, stack: ExitStack) -> None:
        """Build the parts, ESTs and loaders of the job, from its checkpoint if there is one."""
        job, request, ranks = self.job, self.request, self.mapping.hosted[self.number]
        registered_state().clear()
        computing = use_kernels(kernels_of(self.device_name, job.level), job.level)
        with virtual_rank(0, job.n_logical_workers):
            parts = build_parts(job, self.process.device)
        self.notices = set(self.process.set_handlers())
        self.parts = parts.trained
        others: dict[str, object] = {"optimizer": self.parts.optimizer, "lr_scheduler": self.parts.scheduler}
        others |= {"scaler": self.parts.scaler, "data": parts.data}
        user_state = UserState(self.parts.model, parts.modules, others)
        saved = None if request.checkpoint is None else read_saved(request.checkpoint, self.parts, ranks)
        self.order = request.fold or self._reduction_order()
        reduction = Reduction(job.n_logical_workers, self.order, job.scaling, job.bucket_cap_bytes)
        self.hosted = HostedESTs(
            self.parts, self.process.device, self.mapping, self.number, reduction, job.level,
            seed=job.seed, buffers=job.buffers, computing=computing,
            bucket_map=None if saved is None else saved.bucket_map, user_state=user_state,
            late_buffers=() if saved is None else saved.late_buffers,
            on_micro_batch=self.process.report_micro_batch,
        )  # fmt: skip
        shards = Shards(
            job.n_logical_workers, job.micro_batch_size, job.seed, job.n_loaders, job.shuffle,
            job.drop_last_samples, job.drop_last_batch,
        )  # fmt: skip
        states = {rank: shards.start() if saved is None else saved.loaders[rank] for rank in ranks}
        if saved is not None:
            for rank, context in saved.contexts.items():
                self.hosted.contexts.install(rank, context)
            self.hosted.contexts.install_shared(saved.shared)
            parameters = dict(self.parts.model.named_parameters())
            for name in saved.frozen:
                parameters[name].requires_grad_(False)
        self.pool = stack.enter_context(
            LoaderPool(
                parts.data, shards, states, n_processes=request.loader_processes,
                prefetch=request.prefetch, collate=parts.collate, user_state=user_state,
            )
        )  # fmt: skip

    def _reduction_order(self) -> str:
        """Return the order of sums of the job; for ``auto`` the first process detects it for all."""
        if self.job.fold != "auto":
            return self.job.fold
        n_ranks, order = self.job.n_logical_workers, [""]
        if self.number == 0:
            order = ["ring" if n_ranks == 1 else detect_gloo_order(n_ranks, self.request.gloo_order_dir)]
        dist.broadcast_object_list(order, src=0)
        return order[0]

    def _record(self, batch: MiniBatch, saves: bool) -> None:
        """Record a row for each EST of this process after a mini-batch."""
        every = self.request.hash_every
        hashed = saves if every is None else every and self.done % every == 0
        shared = {
            "parameter_sha": parameter_sha(self.parts.model) if hashed else None,
            "optimizer_sha": optimizer_sha(self.parts.optimizer) if hashed else None,
        }
        for rank, micro_batch_s in zip(self.hosted.ranks, batch.micro_batch_s, strict=True):
            self.rows.append(
                {
                    "stage": self.request.generation, "step": self.done, "rank": rank, "process": self.number,
                    "device": self.device_name,
                    "loss": batch.losses[rank], "loss_hex": batch.losses[rank].hex(), **shared,
                    "context_sha": self.hosted.contexts.sha(rank) if hashed else None,
                    "micro_batch_s": micro_batch_s, "sync_s": batch.sync_s,
                }
            )  # fmt: skip

    def _ending(self) -> _Ending:
        """Return whether this process would continue, checkpoint or end the generation."""
        answer = _Ending.SIGNALLED if self.process.is_signalled else _Ending.CONTINUE
        if self.number == 0 and answer == _Ending.CONTINUE:
            every_s, since_s = self.request.checkpoint_every_s, time.monotonic() - self.saved_at
            if self.request.change_request_path.exists():
                answer = _Ending.CHANGE_REQUESTED
            elif every_s > 0 and since_s > max(every_s, _MIN_SAVE_RATIO * self.save_s):
                answer = _Ending.CHECKPOINT_DUE
        return answer

    def _save(self) -> None:
        """Write a checkpoint; errors of the disk become a `CheckpointError`."""
        directory = self.request.run_dir / "checkpoints"
        try:
            self._write_checkpoint(directory)
        except OSError as error:
            problem = f"{error.filename or directory}: {error.strerror}"
            raise CheckpointError(f"{problem}; earlier checkpoints are intact") from error
        self.saved_at = time.monotonic()

    def _write_checkpoint(self, directory: Path) -> None:
        """Write a checkpoint with all processes, and the records since the last one."""
        begun, size = time.perf_counter(), self.process.who.size
        partial = [str(start_checkpoint(directory)) if self.number == 0 else ""]
        dist.broadcast_object_list(partial, src=0)
        write_saved(Path(partial[0]), self.parts, self.hosted, self.pool)
        gathered: list[Any] | None = [None] * size if self.number == 0 else None
        # Gathering the rows also waits until every process has written its files.
        dist.gather_object(self.rows, gathered)
        if gathered is not None:
            rows = sorted(
                (row for part in gathered for row in part), key=lambda row: (row["step"], row["rank"])
            )
            for row, other in pairwise(rows):
                for name, label in (("parameter_sha", _PARAMETERS), ("optimizer_sha", _OPTIMIZER)):
                    if row["step"] == other["step"] and row[name] != other[name]:
                        raise _divergence(row["step"], label)
            change = asdict(self.request.change) | {"restart_s": self.restart_s}
            record = {"change": change, "rows": rows}
            write_json(record, self.request.run_dir / "records" / f"step-{self.done:08d}.json")
            # The record comes first: a record without checkpoint is removed at the next start, but a
            # checkpoint without record would leave a gap in the tables.
            values = {**self.request.manifest, "fold": self.order}
            self.save_s = time.perf_counter() - begun
            finish_checkpoint(directory, self.done, self.save_s, values)
        self.rows.clear()
        dist.barrier()


def _divergence(step: int, name: str, word_sums: Sequence[int] = ()) -> TrainingError:
    """Build the error for shared state that differs between processes; sums of words tell which ones."""
    (most, count), *_ = Counter(word_sums).most_common(1) or [(0, 0)]
    # Without a majority nobody can tell who is right.
    odd = [number for number, value in enumerate(word_sums) if value != most or 2 * count <= len(word_sums)]
    where = f" (ranks {', '.join(map(str, odd))})" if odd else ""
    return TrainingError(
        f"mini-batch {step}: {name} differ between processes{where}, because of after_reduce, the optimizer, "
        "the scheduler or a forward pass; expected changes that depend only on the sum of gradients and on "
        "seeded draws"
    )


def train_generation(directory: RunDirectory, who: Identity) -> None:
    """Train the jobs of the request, together with the other processes of the generation."""
    process = _Process(directory, who)
    for number, request in enumerate(process.requests):
        result = _Generation(process, request).train()
        if who.rank == 0:
            directory.write_result(result, number)
        if result["ending"] == "signalled":
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], train_generation))
