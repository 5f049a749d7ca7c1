"""Process of an elastic run: ``python -m makespan.easyscale.worker <run directory>``.

The request lists jobs. The same processes train them one after the other, each for one generation: from a
checkpoint to the next with one mapping. Mini-batches are those of `HostedESTs`, or of the loop of a job.
"""

import fcntl
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from makespan.easyscale.context import patch_distributed, registered_state, virtual_rank
from makespan.easyscale.data import LoaderPool, LoaderState, Shards
from makespan.easyscale.hosting import HostedESTs, MiniBatchResult
from makespan.easyscale.job import TRAINING_LOCK
from makespan.easyscale.kernels import kernels_of
from makespan.easyscale.loop import LoopRun, LoopSuspended
from makespan.easyscale.optimizer_shards import OptimizerShards
from makespan.easyscale.parts import build_parts, loop_function, use_kernels
from makespan.easyscale.randomness import optimizers_sha, parameter_sha, seed_everything, value_sha
from makespan.easyscale.reduction import (
    BucketMap,
    Reduction,
    Steps,
    detect_gloo_order,
    over_group,
    over_links,
)
from makespan.easyscale.requests import GENERATIONS, GenerationRequest
from makespan.easyscale.saved import (
    Data,
    Hosted,
    SavedJob,
    SharedParts,
    check_can_be_saved,
    read_saved,
    write_saved,
)
from makespan.easyscale.user_state import UserState, is_watched
from makespan.errors import CheckpointError, TrainingError
from makespan.files import write_json
from makespan.runtime import (
    Identity,
    KeptHeap,
    RunDirectory,
    choose_device,
    end_worker,
    finish_checkpoint,
    join,
    linked,
    run_worker,
    start_checkpoint,
)
from makespan.runtime.links import PeerLinks

# --- Process of a generation ---
#
# A generation is in one of six states after each mini-batch, see `Ending`. All processes compute the state
# together, so that they write checkpoints and end at the same mini-batch:
#
# - a checkpoint is written by all processes: each writes its ESTs into a directory that readers ignore, then
#   the first process writes the record, completes the checkpoint and renames it
# - rows of mini-batches are kept in memory until then, so that records and checkpoints always match

T = TypeVar("T")
PRELOAD = ("torch._dynamo",)
"""Modules that optimizers load slowly: a fork server loads them before it forks the first worker."""
_NOTICE = "the run takes this signal as a notice"
_PROGRESS_S = 0.5
_PARAMETERS, _OPTIMIZER = "parameters", "the states of the optimizer"
_MIN_SAVE_RATIO = (
    20.0  # least time between checkpoints that are due by time, in times of writing the last one
)


class Ending(IntEnum):
    """State after a mini-batch; of several processes the largest value counts."""

    CONTINUE = 0
    REGROUP_DUE = 1
    CHECKPOINT_DUE = 2
    CHANGE_REQUESTED = 3
    SIGNALLED = 4
    STOPPED = 5


ENDING_NAMES = ("done", "done", "done", "asked", "signalled", "stopped")


class TrainingProcess:
    """State of this process for all jobs of the request: rank, device, and received signals."""

    def __init__(self, directory: RunDirectory, who: Identity) -> None:
        self.directory, self.who = directory, who
        self.requests: list[GenerationRequest] = GENERATIONS.validate_python(directory.request())
        self.is_signalled, self._progress_at, self._micro_batch_at = False, 0.0, 0.0
        self.reports, self._progress_s = who.rank == 0, self.requests[0].progress_s
        self.notices: list[str] = []
        for request in self.requests:
            # Never closed: a run that follows a killed one waits until this process has ended.
            handle = os.open(request.run_dir / TRAINING_LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(handle, fcntl.LOCK_SH)
        self.handlers: dict[signal.Signals, Any] = {signal.SIGTERM: self._on_signal}
        if who.parent is not None:  # a terminal interrupts all its processes; the parent decides
            self.handlers |= dict.fromkeys((signal.SIGINT, signal.SIGHUP), signal.SIG_IGN)
        self.set_handlers()
        self.device, self.pids, self.start_s = choose_device(who), list[int](), 0.0
        self.links: PeerLinks | None = None  # None: vectors go through the process group
        self.heap = KeptHeap()  # gradients are new tensors in each mini-batch

    def meet(self) -> None:
        """Form the process group with the other processes."""
        self.pids = join(self.directory, self.who)
        self.links = linked(self.who)
        self.start_s = time.time() - self.who.launched_s
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

    def report_progress(self, step: int, loss: float) -> bool:
        """Write the progress at intervals, from the first process; return whether it is written now."""
        is_due = self.reports and time.monotonic() - self._progress_at > self._progress_s
        if is_due:
            self._progress_at = time.monotonic()
            values = {"step": step, "loss": loss, "pids": self.pids, "notices": self.notices}
            self.directory.write_progress(values)
        return is_due

    def report_micro_batch(self) -> None:
        """Write at intervals that this process makes progress, for the stall limit of the launcher."""
        if time.monotonic() - self._micro_batch_at > _PROGRESS_S:
            self._micro_batch_at = time.monotonic()
            self.directory.write_beat(self.who.rank)


class Generation:
    """One job from a checkpoint to the end of the generation, in this process."""

    sums_on_host = False  # whether gradients of a device are summed in host memory, see `HostCopies`

    def __init__(self, process: TrainingProcess, request: GenerationRequest) -> None:
        self.process, self.request, self.begun = process, request, time.perf_counter()
        self.job, self.mapping = request.job, request.placing.mapping
        self.number, self.device = process.who.rank, process.device
        self.device_name = request.placing.device(self.number)
        self.order = request.fold
        self.done, self.rows, self.stage = request.first_step, list[dict[str, Any]](), request.generation
        self.first_step = request.first_step  # mini-batches done when these processes met
        self.saved_at, self.save_s = time.monotonic(), 0.0
        self.ending, self.notices = Ending.CONTINUE, set[str]()
        self.hosts: tuple[str, ...] = ("",) * self.mapping.n_processes
        self.shards: OptimizerShards | None = None

    @property
    def goes_on(self) -> bool:
        """True if the generation has another mini-batch."""
        return self.done < self.request.steps and self.ending <= Ending.CHECKPOINT_DUE

    @property
    def is_run_over(self) -> bool:
        """True if no later generation trains the job any further."""
        return self.done >= self.request.steps or self.ending == Ending.STOPPED

    def train(self) -> dict[str, Any]:
        """Train to the last step of the run, or until the end of the generation is requested."""
        with ExitStack() as stack:
            if self.job.loop is None:
                self._train_parts(stack)
            else:
                self._train_loop(stack)
        return self.result()

    def result(self) -> dict[str, Any]:
        """Return the values that the launching process needs, with the notices of all processes."""
        local = sorted(
            {*self.notices, *self.data.notices, *self.hosted.notices, *self.hosted.contexts.notices}
        )
        notices = sorted({notice for part in self.gather(local) for notice in part})
        return {
            "last_step": self.done,
            "ending": ENDING_NAMES[self.ending],
            "fold": self.order,
            "notices": notices,
        }

    def _train_parts(self, stack: ExitStack) -> None:
        """Train a job whose functions are given by name."""
        hosted, pool = self.build(stack)
        self.begin(hosted, pool)
        while self.goes_on:
            steps = hosted.mini_batch(pool.next, watches=self.watches(), ending=self.ending_now)
            self.finish(self.over(steps))

    def _train_loop(self, stack: ExitStack) -> None:
        """Train a job that has a training loop of its own."""
        self.load_loop()
        self.call_loop(stack)

    def load_loop(self) -> None:
        """Load the function of a job that has a training loop of its own."""
        registered_state().clear()
        self.computing = use_kernels(kernels_of(self.device_name, self.job.level), self.job.level)
        with virtual_rank(0, self.job.n_logical_workers), self.computing:
            self.function, self.modules = loop_function(self.job)

    def call_loop(self, stack: ExitStack) -> bool:
        """Call that function; return False if it ended inside its loop, where a later generation goes on."""
        with virtual_rank(0, self.job.n_logical_workers), self.computing:
            seed_everything(self.job.seed)
            run = LoopRun(self, self.modules, stack)
            try:
                try:
                    self.function(run)
                finally:
                    run.close()
                run.end()
            except LoopSuspended as error:
                run.suspended(error)
                return False
        return True

    def over(self, steps: Steps[T]) -> T:
        """Carry out the steps of this process together with the other processes."""
        links = self.process.links
        if links is None:
            return over_group(steps, self.device)
        return over_links(steps, links, range(self.mapping.n_processes), self.number)

    def tell(self, phase: str) -> None:
        """Announce a phase; nobody listens here."""

    def replicate(self) -> None:
        """Copy contexts to other processes; here checkpoints have them."""

    def between(self) -> None:
        """Do what is due between two mini-batches, which `finish` does here."""

    def begin(self, hosted: Hosted, data: Data) -> None:
        """Take what mini-batches are made of; their time starts now."""
        self.hosted, self.data = hosted, data
        start_s = self.process.start_s if self.request.is_first else 0.0
        self.restart_s = self.request.change.save_s + start_s + time.perf_counter() - self.begun
        if self.shards is not None:
            self.shards.place(self.number, self.hosts)
        check_can_be_saved(self.parts, self.hosted, self.data)
        self.saved_at = time.monotonic()

    def finish(self, batch: MiniBatchResult, *, stops: bool = False) -> None:
        """Check and record a mini-batch, and write a checkpoint if one is due.

        ``stops`` ends the run here, in all processes.
        """
        self.parts.groups(may_grow=self.shards is None)
        self.done += 1
        # A signal may reach only some processes in time, so the strongest answer counts for all.
        self.ending = Ending.STOPPED if stops else Ending(batch.ending)
        self.notices.update(self.process.set_handlers())
        if is_watched(self.done - self.first_step - 1):
            self.check_agreement(self.done - self.first_step)
        if len(set(batch.word_sums)) > 1:
            raise divergence(self.done, _PARAMETERS, batch.word_sums)
        saves = self.ending != Ending.CONTINUE or self.saves_after(self.done)
        self.collect_optimizer(saves)
        self.rows += self.rows_of(batch, saves, self.shared_hashes(saves))
        self.process.heap.check()
        self.process.report_progress(self.done, batch.losses[-1])
        if saves:
            self._save()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in every process."""
        gathered: list[Any] = [None] * self.process.who.size
        dist.all_gather_object(gathered, value)
        return gathered

    def collect(self, value: Any, target: int) -> list[Any]:
        """Return the values of all processes in one of them, and nothing in the others."""
        gathered: list[Any] | None = [None] * self.process.who.size if self.number == target else None
        dist.gather_object(value, gathered, target)
        return gathered or []

    def collect_optimizer(self, saves: bool) -> None:
        """Make an optimizer in shards whole for hashes or a checkpoint, in the process that writes it."""
        if self.shards is not None and (saves or self.is_hashed(saves)):
            self.shards.complete(self.collect(self.shards.owned(), self.mapping.host(0)))

    def check_equal(self, name: str, value: Any) -> None:
        """Raise a `TrainingError` if a value differs between processes."""
        if len(set(self.gather(value))) > 1:
            raise TrainingError(
                f"{name} differ between processes before mini-batch {self.done + 1}; expected values that "
                "depend only on the seed and on files that are the same everywhere"
            )

    def watches(self) -> bool:
        """Return True if the next mini-batch looks for changes by user code."""
        step, every = self.done + 1, self.request.hash_every
        number = self.done - self.first_step
        return is_watched(number) or self.saves_after(step) or bool(every and step % every == 0)

    def saves_after(self, step: int) -> bool:
        """Return True if a checkpoint is written after a mini-batch, whatever happens until then."""
        every = self.request.checkpoint_every
        return step == self.request.steps or bool(every and step % every == 0)

    def check_agreement(self, number: int) -> None:
        """Reject shared state that differs between processes; all of them raise the same error."""
        if number == 1:
            check_can_be_saved(self.parts, self.hosted, self.data)
        if self.mapping.n_processes == 1:
            return
        local = self.hosted.contexts.shared_hashes()
        local |= {
            _PARAMETERS: parameter_sha(self.parts.model, by_sum=True),
        }
        if self.shards is None:
            local[_OPTIMIZER] = optimizers_sha(self.parts.optimizers, by_sum=True)
        else:
            local |= self.shards.hashes()
        local |= {
            name: value_sha(self.parts.states[name].state_dict(), by_sum=True) for name in self.parts.compared
        }
        gathered = self.gather(local)
        for name in dict.fromkeys(name for hashes in gathered for name in hashes):
            if len({hashes[name] for hashes in gathered if name in hashes}) > 1:
                raise divergence(self.done, name)

    def build(self, stack: ExitStack) -> tuple[HostedESTs, LoaderPool]:
        """Build the parts, ESTs and loaders of the job, from its checkpoint if there is one."""
        self.load_parts()
        pool = self.loaders(stack, self.data_set, self.collate, self.user_state)
        saved = self.saved(self.mapping.hosted[self.number])
        if saved is None:
            hosted = self.host()
        else:
            layout = None if saved.layout is None else tuple(map(tuple, saved.layout))
            hosted = self.host(layout, saved.late_buffers)
            saved.install(self.parts.model, hosted.contexts)
        pool.move(self.loader_states(None if saved is None else saved.positions))
        return hosted, pool

    def saved(self, ranks: tuple[int, ...]) -> SavedJob | None:
        """Load the checkpoint into the parts; return the rest of it for some ranks, None without one."""
        path = self.request.checkpoint
        return None if path is None else read_saved(path, self.parts, ranks)

    def load_parts(self) -> None:
        """Build model, optimizer, data set and the other parts of the job, in their first state."""
        job = self.job
        registered_state().clear()
        self.computing = use_kernels(kernels_of(self.device_name, job.level), job.level)
        with virtual_rank(0, job.n_logical_workers):
            parts = build_parts(job, self.device)
        self.notices.update(self.process.set_handlers())
        self.trained = trained = parts.trained
        states = {
            "optimizer": trained.optimizer,
            "scheduler": trained.scheduler,
            "scaler": trained.scaler,
        }
        self.parts = SharedParts(trained.model, states)
        if self.request.zero_stage:
            self.shards = OptimizerShards(trained, self.request.survives)
        others: dict[str, object] = {"optimizer": trained.optimizer, "lr_scheduler": trained.scheduler}
        others |= {"scaler": trained.scaler, "data": parts.data}
        self.data_set, self.collate = parts.data, parts.collate
        self.user_state = UserState(trained.model, parts.modules, others)

    def host(self, layout: BucketMap | None = None, late_buffers: Collection[str] = ()) -> HostedESTs:
        """Host the ESTs of this process with the parts of the job, from a layout of buckets if given."""
        job = self.job
        return HostedESTs(
            self.trained, self.device, self.mapping, self.number, self.reduction(), job.level,
            seed=job.seed, buffers=job.buffers, computing=self.computing, bucket_map=layout,
            user_state=self.user_state, late_buffers=late_buffers,
            on_micro_batch=self.process.report_micro_batch, shards=self.shards,
            sums_on_host=self.sums_on_host,
        )  # fmt: skip

    def loaders(self, stack: ExitStack, data: Any, collate: Any, user_state: UserState) -> LoaderPool:
        """Start the loaders of a map-style data set, which have no ESTs yet."""
        job, request = self.job, self.request
        shards = Shards(
            job.n_logical_workers, job.micro_batch_size, job.seed, job.n_loaders, job.shuffle,
            job.drop_last_samples, job.drop_last_batch,
        )  # fmt: skip
        return stack.enter_context(
            LoaderPool(
                data, shards, n_processes=request.loader_processes, prefetch=request.prefetch,
                collate=collate, user_state=user_state, private=self.private,
            )
        )  # fmt: skip

    def loader_states(self, positions: Mapping[int, Mapping[str, Any]] | None) -> dict[int, LoaderState]:
        """Return the states of the loaders of this process, at the start or from positions in the data."""
        start = LoaderState(0, 0, (None,) * self.job.n_loaders)
        return {
            rank: start if positions is None else LoaderState.from_values(positions[rank])
            for rank in self.mapping.hosted[self.number]
        }

    def private(self) -> Iterable[Tensor]:
        """Return large tensors that no code of the user sees."""
        return ()

    def reduction(self) -> Reduction:
        """Return the order and scaling of the sum of gradients."""
        self.order = self.order or self._reduction_order()
        job = self.job
        return Reduction(
            job.n_logical_workers, self.order, job.scaling, job.bucket_cap_bytes, job.find_unused_parameters
        )

    def _reduction_order(self) -> str:
        """Return the order of sums of the job; for ``auto`` the first process detects it for all."""
        if self.job.fold != "auto":
            return self.job.fold
        n_ranks, order = self.job.n_logical_workers, ""
        if self.number == 0:
            order = "ring" if n_ranks == 1 else detect_gloo_order(n_ranks, self.request.gloo_order_dir)
        return str(self.gather(order)[0])

    def is_hashed(self, saves: bool) -> bool:
        """Return True if the rows of the last mini-batch have hashes; ``saves`` if a checkpoint follows."""
        every = self.request.hash_every
        return saves if every is None else bool(every and self.done % every == 0)

    def shared_hashes(self, saves: bool) -> dict[str, str | None]:
        """Return the hashes of parameters and optimizer for the rows of the last mini-batch."""
        if not self.is_hashed(saves):
            return {"parameter_sha": None, "optimizer_sha": None}
        if self.shards is None:
            optimizer = optimizers_sha(self.parts.optimizers)
        else:
            writer = self.mapping.host(0)
            own = optimizers_sha(self.parts.optimizers) if self.number == writer else ""
            optimizer = str(self.gather(own)[writer])
        return {"parameter_sha": parameter_sha(self.parts.model), "optimizer_sha": optimizer}

    def rows_of(
        self, batch: MiniBatchResult, saves: bool, shared: Mapping[str, str | None]
    ) -> list[dict[str, Any]]:
        """Return a row for each EST of this process after a mini-batch, with `shared_hashes`."""
        hashed = self.is_hashed(saves)
        return [
            {
                "stage": self.stage, "step": self.done, "rank": rank, "process": self.number,
                "device": self.device_name,
                "loss": batch.losses[rank], "loss_hex": batch.losses[rank].hex(), **shared,
                "context_sha": self.hosted.contexts.sha(rank) if hashed else None,
                "micro_batch_s": micro_batch_s, "sync_s": batch.sync_s,
            }
            for rank, micro_batch_s in zip(self.hosted.ranks, batch.micro_batch_s, strict=True)
        ]  # fmt: skip

    def ending_now(self) -> int:
        """Return whether this process would continue, checkpoint or end the generation."""
        return Ending.SIGNALLED if self.process.is_signalled else self.requested_ending()

    def requested_ending(self) -> Ending:
        """Return whether a change is requested or a checkpoint is due by time; the first process knows."""
        if self.number == 0:
            every_s, since_s = self.request.checkpoint_every_s, time.monotonic() - self.saved_at
            if self.request.change_request_path.exists():
                return Ending.CHANGE_REQUESTED
            if every_s > 0 and since_s > max(every_s, _MIN_SAVE_RATIO * self.save_s):
                return Ending.CHECKPOINT_DUE
        return Ending.CONTINUE

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
        write_saved(Path(partial[0]), self.parts, self.hosted, self.data)
        gathered: list[Any] | None = [None] * size if self.number == 0 else None
        # Gathering the rows also waits until every process has written its files.
        dist.gather_object(self.rows, gathered)
        if gathered is not None:
            rows = sorted(
                (row for part in gathered for row in part), key=lambda row: (row["step"], row["rank"])
            )
            check_equal_hashes(rows)
            change = asdict(self.request.change) | {"restart_s": self.restart_s}
            record = {"change": change, "rows": rows}
            write_json(record, self.request.run_dir / "records" / f"step-{self.done:08d}.json")
            # The record comes first: a record without checkpoint is removed at the next start, but a
            # checkpoint without record would leave a gap in the tables.
            values = {**self.request.manifest, "fold": self.order}
            if self.ending == Ending.STOPPED:
                values["is_stopped"] = True
            self.save_s = time.perf_counter() - begun
            finish_checkpoint(directory, self.done, self.save_s, values)
        self.rows.clear()
        dist.barrier()


def check_equal_hashes(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise a `TrainingError` if rows of one mini-batch, which follow each other, have different hashes."""
    for row, other in pairwise(rows):
        for name, label in (("parameter_sha", _PARAMETERS), ("optimizer_sha", _OPTIMIZER)):
            if row["step"] == other["step"] and row[name] != other[name]:
                raise divergence(row["step"], label)


def divergence(step: int, name: str, word_sums: Sequence[int] = ()) -> TrainingError:
    """Build the error for shared state that differs between processes; sums of words tell which ones."""
    (most, count), *_ = Counter(word_sums).most_common(1) or [(0, 0)]
    # Without a majority nobody can tell who is right.
    odd = [number for number, value in enumerate(word_sums) if value != most or 2 * count <= len(word_sums)]
    where = f" (ranks {', '.join(map(str, odd))})" if odd else ""
    return TrainingError(
        f"mini-batch {step}: {name} differ between processes{where}, because of after_reduce, the optimizer, "
        "the scheduler, a forward pass or a loop; expected changes that depend only on the sum of gradients "
        "and on seeded draws"
    )


def train_generation(directory: RunDirectory, who: Identity) -> None:
    """Train the jobs of the request, together with the other processes of the generation."""
    process = TrainingProcess(directory, who)
    process.meet()
    for number, request in enumerate(process.requests):
        result = Generation(process, request).train()
        if who.rank == 0:
            directory.write_result(result, number)
        if result["ending"] == "signalled":
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], train_generation))
