"""Process of an elastic run: ``python -m makespan.easyscale.worker <run directory>``.

The request lists jobs. The same processes train them one after the other, each from a checkpoint to the next
with one mapping. In a mini-batch, the logical workers of a process take turns with forward and backward
passes; then all processes sum the gradients of all logical workers, and each takes the same step.
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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from makespan.easyscale.context import Contexts, bind_buffer, hide_processes, registered_state, seen_as
from makespan.easyscale.data import LoaderPool, LoaderState, Shards, loss_of
from makespan.easyscale.job import MODEL_FILE, TRAINING_LOCK, ElasticJob, RankMapping, job_from
from makespan.easyscale.kernels import DeterminismLevel, kernels_of
from makespan.easyscale.parts import TrainedParts, build_parts, use_kernels
from makespan.easyscale.randomness import optimizer_sha, parameter_sha
from makespan.easyscale.reduction import (
    BucketMap,
    Buckets,
    GradientSet,
    HostCopies,
    ReadyOrder,
    Reduction,
    Steps,
    fold_of_machine,
    over_group,
    provisional_map,
    rebuilt_map,
    reduce_sets,
    settle,
    share,
    trained_parameters,
)
from makespan.easyscale.user_state import PLAIN_TYPES, UserState, is_early, load_optimizer
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
from makespan.units import format_bytes

# --- One mini-batch: logical workers in turn, one sum, one step of the optimizer ---

Fetch = Callable[[int], Any]
_HOST = torch.device("cpu")
_WITH_FUNCTIONS = (torch.optim.lr_scheduler.LambdaLR, torch.optim.lr_scheduler.MultiplicativeLR)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Results of a mini-batch.

    Parameters
    ----------
    losses
        By virtual rank, of all logical workers.
    micro_batch_s, sync_s
        Time of each hosted logical worker, and of the sum and the optimizer step [s].
    """

    losses: tuple[float, ...]
    micro_batch_s: tuple[float, ...]
    sync_s: float


class HostedWorkers:
    """The logical workers that one process hosts; every process of the mapping has one of these.

    Parameters
    ----------
    parts, device
        Trained objects, and their device.
    mapping, process
        Mapping of logical workers to processes, and the number of this process in it.
    reduction, level
        Order of the sum of gradients, and the guarantee of equal bits.
    seed
        Seed of the random states of the logical workers.
    buffers
        ``per_rank``: every logical worker keeps its own; ``rank0``: all start a mini-batch from those of
        the first.
    bucket_map
        Layout of a checkpoint, for levels that keep it; None to determine one as DistributedDataParallel
        does.
    computing
        Context of forward passes and losses.
    swaps_contexts
        Whether each logical worker has its own random states and buffers; False to measure their cost.
    user_state, late_buffers
        See `Contexts`.
    on_micro_batch
        Called after each micro-batch.

    Raises
    ------
    makespan.errors.InputError
        The model cannot be trained by logical workers that take turns, or sizes disagree.
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
        _check_hosting(parts.model, mapping, reduction, buffers)
        self._parts, self._device, self._process = parts, device, process
        self._reduction, self._buffers, self._swaps = reduction, buffers, swaps_contexts
        self.mapping, self.ranks = mapping, mapping.hosted[process]
        # Without D1, communication uses the place in the mapping instead of the virtual rank.
        self._numbered = mapping if level.pins_communication else mapping.by_position()
        self._copies = HostCopies(device)
        self._computing = nullcontext() if computing is None else computing
        self._trained = trained_parameters(parts.model)
        self._frozen = {name: one for name, one in parts.model.named_parameters() if not one.requires_grad}
        known = {id(one) for one in parts.model.parameters()}
        for number, group in enumerate(parts.optimizer.param_groups):
            for one in group["params"]:
                if id(one) not in known:  # no process would add up its gradients
                    problem = f"group {number} of the optimizer has a parameter of shape {tuple(one.shape)}"
                    accepted = "parameters of the model, of which a loss with parameters can be a module"
                    raise InputError(f"{problem} that the model lacks; accepted: {accepted}")
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
        """Layout for a checkpoint; None until the first mini-batch has determined it."""
        return None if self._must_rebuild else self._layout.bucket_map

    def mini_batch(self, fetch: Fetch, *, watches: bool = False) -> Steps[MiniBatch]:
        """Run one mini-batch.

        Parameters
        ----------
        fetch
            Returns the batch of a virtual rank.
        watches
            Whether this mini-batch looks for changes by user code: of values that it keeps in Python, and of
            parameters in a forward pass.
        """
        if self._buffers == "rank0":
            yield from self.contexts.from_first(self.mapping, self._process)
        if watches:
            self.contexts.begin_watching()
        sets, losses, times, ready, changed = [], [], [], list[str](), set[str]()
        for rank in self.ranks:
            begun = time.perf_counter()
            # As in DistributedDataParallel, rank 0 determines the layout of all.
            recorder = ReadyOrder(self._trained) if self._must_rebuild and rank == 0 else None
            context = self.contexts.live(rank, watches=watches) if self._swaps else nullcontext()
            before = self._checksums() if watches else {}
            with seen_as(rank, self.mapping.n_logical_workers), context:
                losses.append(self._micro_batch(fetch(rank)))
            if watches:
                changed = self._changed_parameters(before, changed)
                self._check_hooks("a forward pass")
            ready = ready if recorder is None else recorder.finish()
            self._check_gradients()
            sets.append(self._layout.pack(self._reduction.set_scale, self._copies))
            settle(self._device)
            times.append(time.perf_counter() - begun)
            self._on_micro_batch()
        begun = time.perf_counter()
        self._copies.finish()  # the sum reads the copies on the host
        yield from self._update(sets, watches)
        if self._must_rebuild:
            yield from self._rebuild(ready)
        values = torch.stack(losses).to(_HOST, torch.float64)
        everywhere = yield from share(values, [len(ranks) for ranks in self.mapping.hosted])
        ranks_by_place = [rank for ranks in self.mapping.hosted for rank in ranks]
        by_rank = dict(zip(ranks_by_place, torch.cat(everywhere).tolist(), strict=True))
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

    def _update(self, sets: Sequence[GradientSet], watches: bool) -> Steps[None]:
        """Sum the gradients of all logical workers and take the step of the optimizer."""
        total = yield from reduce_sets(sets, self._numbered, self._process, self._reduction)
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
        """Reject hooks that a restart would lose."""
        for name, number in _hook_counts(self._parts.model).items():
            if number != self._n_hooks.get(name, 0):
                found = f"module {name or 'model'} got or lost a hook in {by}, which no checkpoint holds"
                raise InputError(f"{found}; accepted: hooks of where the model is built")

    def _check_gradients(self) -> None:
        """Reject gradients that no process would add up."""
        for name, one in self._frozen.items():
            if one.grad is not None:
                found = f"parameter {name} got a gradient and required none when the run began"
                raise InputError(f"{found}; accepted: one that requires it when the model is built")

    def _checksums(self) -> dict[str, tuple[int, int]]:
        """Return a checksum of each parameter: its address, and the sum of its words."""
        checksums = {}
        for name, one in self._parts.model.named_parameters():
            words = one.detach().contiguous().view(_WORDS[one.element_size()])
            checksums[name] = one.data_ptr(), int(words.sum(dtype=torch.int64))
        return checksums

    def _changed_parameters(self, before: Mapping[str, tuple[int, int]], already: set[str]) -> set[str]:
        """Find the parameters that a forward pass changed."""
        now = self._checksums()
        if odd := sorted(now.keys() ^ before.keys()):
            found = f"parameter {odd[0]} came or went in a forward pass"
            raise InputError(f"{found}; accepted: those that the model is built with")
        changed = {name for name, one in now.items() if before[name] != one}
        accepted = "a buffer, or a change in after_reduce"
        for name in sorted(changed):
            # A first change may be an initialization that later passes do not repeat.
            problem = f"parameter {name} is changed by a forward pass"
            if name in already:
                raise InputError(f"{problem}, and again by the next; accepted: {accepted}")
            self.notices.append(f"{problem}; unless a second one changes nothing more, use {accepted}")
        return already | changed

    def _rebuild(self, ready: Sequence[str]) -> Steps[None]:
        """Rebuild the buckets in the order in which gradients of the first logical worker became ready."""
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


def _check_hosting(model: nn.Module, mapping: RankMapping, reduction: Reduction, buffers: str) -> None:
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


# --- Files of a checkpoint: the model, the shared state, and a file for each logical worker ---
#
# The model is a plain ``state_dict`` with the buffers of the first logical worker, so that an export is a
# copy of its file. Reading a checkpoint runs no code: it holds tensors, numbers, texts, lists, dictionaries.

_SHARED_FILE = "shared.pt"
_PROBE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class SavedJob:
    """State of a checkpoint that `read_saved` has not loaded into model, optimizer and scheduler."""

    bucket_map: BucketMap | None
    contexts: Mapping[int, Mapping[str, Any]]
    loaders: Mapping[int, LoaderState]
    late_buffers: Mapping[str, bool]
    of_all: Mapping[str, Any]


def check_can_be_saved(parts: TrainedParts, hosted: HostedWorkers, pool: LoaderPool) -> None:
    """Reject early any state that a checkpoint cannot hold; nothing is written.

    Raises
    ------
    makespan.errors.InputError
        A value is neither a tensor nor a plain value, or an entry came into the model after it was built.
    """
    for rank in hosted.ranks:
        _check_plain("worker", _own_values(rank, hosted, pool))
    _check_plain("shared", _shared_values(parts, hosted))
    _check_plain("model", _model_state(parts, hosted))


def write_saved(directory: Path, parts: TrainedParts, hosted: HostedWorkers, pool: LoaderPool) -> None:
    """Write the logical workers of this process, and the shared state if it hosts the first one."""
    for rank in hosted.ranks:
        _write(_own_values(rank, hosted, pool), directory / _worker_file(rank))
    if 0 not in hosted.ranks:
        return
    with hosted.contexts.live(0):
        _write(_model_state(parts, hosted), directory / MODEL_FILE)
    _write(_shared_values(parts, hosted), directory / _SHARED_FILE)


def _own_values(rank: int, hosted: HostedWorkers, pool: LoaderPool) -> dict[str, Any]:
    return {"context": hosted.contexts.values(rank), "loader": pool.state(rank).values()}


def _model_state(parts: TrainedParts, hosted: HostedWorkers) -> dict[str, Any]:
    state: dict[str, Any] = parts.model.state_dict()
    if odd := [name for name in state if name not in hosted.state_names | set(hosted.contexts.late_buffers)]:
        accepted = "what the model has when it is built, or buffers"
        raise InputError(f"{odd[0]} came into the model while it was trained; accepted: {accepted}")
    for name, value in state.items():
        # A copy: torch.save would write the whole storage that the tensor is a view of.
        state[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return state


def _shared_values(parts: TrainedParts, hosted: HostedWorkers) -> dict[str, Any]:
    return {
        "optimizer": _plain(parts.optimizer.state_dict()),
        "scheduler": None if parts.scheduler is None else _plain(parts.scheduler.state_dict()),
        "scaler": None if parts.scaler is None else _plain(parts.scaler.state_dict()),
        "bucket_map": None if hosted.bucket_map is None else [list(names) for names in hosted.bucket_map],
        "late_buffers": hosted.contexts.late_buffers,
        "frozen": [name for name, one in parts.model.named_parameters() if not one.requires_grad],
        "of_all": hosted.contexts.values_of_all(),
    }


def _plain(value: Any) -> Any:
    """Convert NumPy floats, which learning rates often are, to floats of Python."""
    if type(value) is dict:
        return {key: _plain(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(one) for one in value)
    return float(value) if isinstance(value, float) else value


def read_saved(directory: Path, parts: TrainedParts, ranks: tuple[int, ...]) -> SavedJob:
    """Load the shared state into model, optimizer and scheduler; return the rest for some ranks."""
    saved = {rank: _read(directory / _worker_file(rank)) for rank in ranks}
    shared = _read(directory / _SHARED_FILE)
    state, late = _read(directory / MODEL_FILE), shared.get("late_buffers", {})
    contexts = {rank: one["context"] for rank, one in saved.items()}
    values = [*(one["buffers"] for one in contexts.values()), state]
    device = next((one.device for one in parts.model.parameters()), torch.device("cpu"))
    # Buffers that came late must be there, in their shape, before the state is loaded.
    for name, is_persistent in late.items():
        if (value := next((one[name] for one in values if name in one), None)) is not None:
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
    buckets = shared["bucket_map"]
    return SavedJob(
        None if buckets is None else tuple(map(tuple, buckets)),
        contexts,
        {rank: LoaderState.from_values(one["loader"]) for rank, one in saved.items()},
        late,
        shared.get("of_all", {}) | {"frozen": shared.get("frozen", [])},
    )


def _worker_file(rank: int) -> str:
    return f"worker-{rank}.pt"


def _write(values: Any, path: Path) -> None:
    """Write tensors and plain values; other types could not be read again without running code."""
    _check_plain(path.stem, values)
    try:
        torch.save(values, path)
    except (OSError, RuntimeError) as error:
        cause: Exception = error
        if not isinstance(error, OSError):  # torch hides the reason, so writing a few more bytes is tried
            try:
                with path.open("ab") as stream:
                    stream.write(bytes(_PROBE_BYTES))
            except OSError as reason:
                cause = reason
        free = format_bytes(shutil.disk_usage(path.parent).free)
        text = (cause.strerror if isinstance(cause, OSError) else None) or str(cause).splitlines()[0]
        text = f"{text}; {free} are free on the disk; earlier checkpoints stay"
        raise CheckpointError(f"{path}: cannot be written: {text}") from error


def _check_plain(name: str, values: Any) -> None:
    for leaf, value in _leaves(name, values):
        if type(value) not in PLAIN_TYPES and type(value) not in (Tensor, nn.Parameter):
            raise InputError(f"{leaf} is a {type(value).__name__}; accepted: tensors and plain values")


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


# --- Process of a stage ---

OF_SEVERAL = ("torch._dynamo",)
"""Modules that optimizers load slowly: a fork server loads them before the first worker is forked."""
_GO_ON, _DUE, _ASKED, _SIGNALLED = range(4)
_ENDINGS = ("done", "done", "asked", "signalled")
_NOTICE = "the run takes this signal as a notice and writes a checkpoint"
_BEAT_S = 0.5
_PARAMETERS, _OPTIMIZER = "parameters", "the states of the optimizer"
_MOST_SAVING = 20.0  # least time between checkpoints that are due by time, in times of writing the last one


class _Process:
    """State of this process for all jobs of the stage: rank, device, and received signals."""

    def __init__(self, directory: RunDirectory, who: Identity) -> None:
        self.directory, self.who = directory, who
        self.is_signalled, self._beaten, self._moved = False, 0.0, 0.0
        self.notices: list[str] = []
        for request in directory.request():
            # Never closed: a run that follows a killed one waits until this process has ended.
            handle = os.open(Path(request["run_dir"], TRAINING_LOCK), os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(handle, fcntl.LOCK_SH)
        self.handlers: dict[signal.Signals, Any] = {signal.SIGTERM: self._on_signal}
        if who.parent is not None:  # a terminal interrupts all its processes; the parent decides
            self.handlers |= dict.fromkeys((signal.SIGINT, signal.SIGHUP), signal.SIG_IGN)
        self.take_signals()
        self.device = choose_device(who)
        self.pids = join(directory, who)
        self.start_s = time.time() - who.launched_s
        hide_processes(directory.request()[0]["job"]["n_logical_workers"])

    def take_signals(self) -> list[str]:
        """Set the handlers of signals that end a run; return notices of those that user code had replaced."""
        taken = [one for one, handler in self.handlers.items() if signal.getsignal(one) != handler]
        for one in taken:
            signal.signal(one, self.handlers[one])
        return [
            f"code of the job sets a handler of {one.name}, which is not called: {_NOTICE}" for one in taken
        ]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_signalled = True

    def beat(self, step: int, loss: float) -> None:
        """Write the progress at intervals, from the first process."""
        if self.who.rank == 0 and time.monotonic() - self._beaten > _BEAT_S:
            self._beaten = time.monotonic()
            values = {"step": step, "loss": loss, "pids": self.pids, "notices": self.notices}
            self.directory.write_progress(values)

    def move(self) -> None:
        """Write a sign of life of this process at intervals."""
        if time.monotonic() - self._moved > _BEAT_S:
            self._moved = time.monotonic()
            self.directory.write_beat(self.who.rank)


class _Stage:
    """One job from a checkpoint to the next, in this process."""

    def __init__(self, process: _Process, request: Mapping[str, Any]) -> None:
        self.process, self.request, self.begun = process, request, time.perf_counter()
        self.job: ElasticJob = job_from(request["job"])
        self.mapping = RankMapping.parse(request["mapping"])
        self.run_dir, self.number = Path(request["run_dir"]), process.who.rank
        self.kernels = kernels_of(request["devices"][self.number], self.job.level)
        self.done, self.rows = int(request["first_step"]), list[dict[str, Any]]()
        self.saved_at, self.save_s = time.monotonic(), 0.0

    def train(self) -> dict[str, Any]:
        """Train to the last step of the stage, or until its end is requested."""
        ending = _GO_ON
        with ExitStack() as stack:
            self._build(stack)
            start_s = self.process.start_s if self.request["is_first"] else 0.0
            self.restart_s = self.request["change"]["save_s"] + start_s + time.perf_counter() - self.begun
            check_can_be_saved(self.parts, self.hosted, self.pool)
            first, self.saved_at = self.done, time.monotonic()
            while self.done < self.request["steps"] and ending in (_GO_ON, _DUE):
                watches = self._watches(self.done - first)
                steps = self.hosted.mini_batch(self.pool.next, watches=watches)
                batch = over_group(steps, self.process.device)
                self.done += 1
                self.notices.update(self.process.take_signals())
                if is_early(self.done - first - 1):
                    self._compare(self.done - first)
                self._record(batch)
                self.process.beat(self.done, batch.losses[-1])
                ending = self._ending()
                every = self.request["checkpoint_every"]
                if ending or self.done == self.request["steps"] or (every and self.done % every == 0):
                    self._save()
        notices = sorted(
            {*self.notices, *self.pool.notices, *self.hosted.notices, *self.hosted.contexts.notices}
        )
        result = {"last_step": self.done, "ending": _ENDINGS[ending], "fold": self.fold}
        return result | {"notices": self._told_to_first(notices)}

    def _watches(self, number: int) -> bool:
        """Return True if a mini-batch of the stage, from 0, looks for changes by user code."""
        step = self.done + 1
        every = [every for name in ("hash_every", "checkpoint_every") if (every := self.request[name])]
        return is_early(number) or any(step % one == 0 for one in every)

    def _compare(self, number: int) -> None:
        """Reject shared state that differs between processes; all of them raise the same error."""
        if number == 1:
            check_can_be_saved(self.parts, self.hosted, self.pool)
        if self.process.who.size == 1:
            return
        local = self.hosted.contexts.sha_of_all()
        local |= {
            _PARAMETERS: parameter_sha(self.parts.model),
            _OPTIMIZER: optimizer_sha(self.parts.optimizer),
        }
        everywhere: list[Any] = [None] * self.process.who.size
        dist.all_gather_object(everywhere, local)
        for name in dict.fromkeys(name for one in everywhere for name in one):
            if len({one[name] for one in everywhere if name in one}) > 1:
                raise _parted(self.done, name)

    def _told_to_first(self, notices: list[str]) -> list[str]:
        """Return the notices of all processes."""
        everywhere: list[Any] = [None] * self.process.who.size
        dist.all_gather_object(everywhere, notices)
        return sorted({one for part in everywhere for one in part})

    def _build(self, stack: ExitStack) -> None:
        """Build the parts, logical workers and loaders of the job, from its checkpoint if there is one."""
        job, ranks = self.job, self.mapping.hosted[self.number]
        registered_state().clear()
        computing = use_kernels(self.kernels, job.level)
        with seen_as(0, job.n_logical_workers):
            parts = build_parts(job, self.process.device)
        self.notices = set(self.process.take_signals())
        self.parts, source = parts.trained, self.request["checkpoint"]
        others: dict[str, object] = {"optimizer": self.parts.optimizer, "lr_scheduler": self.parts.scheduler}
        others |= {"scaler": self.parts.scaler, "data": parts.data}
        user_state = UserState(self.parts.model, parts.modules, others)
        saved = None if source is None else read_saved(Path(source), self.parts, ranks)
        self.fold = self.request["fold"] or self._fold()
        reduction = Reduction(job.n_logical_workers, self.fold, job.scaling, job.bucket_cap_bytes)
        self.hosted = HostedWorkers(
            self.parts, self.process.device, self.mapping, self.number, reduction, job.level,
            seed=job.seed, buffers=job.buffers, computing=computing,
            bucket_map=None if saved is None else saved.bucket_map, user_state=user_state,
            late_buffers=() if saved is None else saved.late_buffers, on_micro_batch=self.process.move,
        )  # fmt: skip
        shards = Shards(
            job.n_logical_workers, job.micro_batch_size, job.seed, job.n_loaders, job.shuffle,
            job.drop_last_samples, job.drop_last_batch,
        )  # fmt: skip
        states = {rank: shards.start() if saved is None else saved.loaders[rank] for rank in ranks}
        for rank, context in ({} if saved is None else saved.contexts).items():
            self.hosted.contexts.install(rank, context)
        if saved is not None:
            self.hosted.contexts.install_for_all(saved.of_all)
            parameters = dict(self.parts.model.named_parameters())
            for name in saved.of_all["frozen"]:
                parameters[name].requires_grad_(False)
        self.pool = stack.enter_context(
            LoaderPool(
                parts.data, shards, states, n_processes=self.request["loader_processes"],
                prefetch=self.request["prefetch"], collate=parts.collate,
                user_state=user_state,
            )
        )  # fmt: skip

    def _fold(self) -> str:
        """Order of sums of the job; ``auto`` is tried on this machine by the first process, for all."""
        if self.job.fold != "auto":
            return self.job.fold
        n_ranks, fold = self.job.n_logical_workers, [""]
        if self.number == 0:
            fold = ["ring" if n_ranks == 1 else fold_of_machine(n_ranks, Path(self.request["fold_dir"]))]
        dist.broadcast_object_list(fold, src=0)
        return fold[0]

    def _record(self, batch: MiniBatch) -> None:
        """Record a row for each logical worker of this process after a mini-batch."""
        hashed = self.request["hash_every"] and self.done % self.request["hash_every"] == 0
        shared = {
            "parameter_sha": parameter_sha(self.parts.model) if hashed else None,
            "optimizer_sha": optimizer_sha(self.parts.optimizer) if hashed else None,
        }
        for rank, micro_batch_s in zip(self.hosted.ranks, batch.micro_batch_s, strict=True):
            self.rows.append(
                {
                    "stage": self.request["stage"], "step": self.done, "rank": rank, "process": self.number,
                    "device": self.request["devices"][self.number],
                    "loss": batch.losses[rank], "loss_hex": batch.losses[rank].hex(), **shared,
                    "context_sha": self.hosted.contexts.sha(rank) if hashed else None,
                    "micro_batch_s": micro_batch_s, "sync_s": batch.sync_s,
                }
            )  # fmt: skip

    def _ending(self) -> int:
        """Return whether to continue, checkpoint or end the stage; the same answer in every process."""
        answer = _SIGNALLED if self.process.is_signalled else _GO_ON
        if self.number == 0 and answer == _GO_ON and Path(self.request["asked"]).exists():
            answer = _ASKED
        if self.number == 0 and answer == _GO_ON and self._is_due():
            answer = _DUE
        # A signal may reach only some processes in time, so the strongest answer counts for all.
        agreed = torch.tensor(answer, device=self.process.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return int(agreed.item())

    def _is_due(self) -> bool:
        """Return True if a checkpoint is due by time."""
        every_s: float = self.request["checkpoint_every_s"]
        return every_s > 0 and time.monotonic() - self.saved_at > max(every_s, _MOST_SAVING * self.save_s)

    def _save(self) -> None:
        """Write a checkpoint; errors of the disk become a `CheckpointError`."""
        directory = self.run_dir / "checkpoints"
        try:
            self._write(directory)
        except OSError as error:
            what = f"{error.filename or directory}: {error.strerror}"
            raise CheckpointError(f"{what}; earlier checkpoints stay") from error
        self.saved_at = time.monotonic()

    def _write(self, directory: Path) -> None:
        """Write a checkpoint with all processes, and the records since the last one."""
        begun, size = time.perf_counter(), self.process.who.size
        partial = [str(start_checkpoint(directory)) if self.number == 0 else ""]
        dist.broadcast_object_list(partial, src=0)
        write_saved(Path(partial[0]), self.parts, self.hosted, self.pool)
        gathered: list[Any] | None = [None] * size if self.number == 0 else None
        dist.gather_object(self.rows, gathered)
        if gathered is not None:
            rows = sorted(
                (row for part in gathered for row in part), key=lambda row: (row["step"], row["rank"])
            )
            for row, other in pairwise(rows):
                for name, what in (("parameter_sha", _PARAMETERS), ("optimizer_sha", _OPTIMIZER)):
                    if row["step"] == other["step"] and row[name] != other[name]:
                        raise _parted(row["step"], what)
            change = self.request["change"] | {"restart_s": self.restart_s}
            record = {"change": change, "rows": rows}
            write_json(record, self.run_dir / "records" / f"step-{self.done:08d}.json")
            # The record comes first: a record without checkpoint is removed at the next start, but a
            # checkpoint without record would leave a gap in the tables.
            values = self.request["manifest"] | {"fold": self.fold}
            self.save_s = time.perf_counter() - begun
            finish_checkpoint(directory, self.done, self.save_s, values)
        self.rows.clear()
        dist.barrier()


def _parted(step: int, name: str) -> TrainingError:
    """Build the error for shared state that differs between processes."""
    by = "after_reduce, the optimizer, the scheduler or a forward pass"
    accepted = "only what follows from the sum of gradients and from seeded draws"
    return TrainingError(f"mini-batch {step}: {name} differ between processes, by {by}; accepted: {accepted}")


def train_stage(directory: RunDirectory, who: Identity) -> None:
    """Take part in the jobs of a stage."""
    process = _Process(directory, who)
    for number, request in enumerate(directory.request()):
        result = _Stage(process, request).train()
        if who.rank == 0:
            directory.write_result(result, number)
        if result["ending"] == "signalled":
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], train_stage))
