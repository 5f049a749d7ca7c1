"""One process of a stage: ``python -m <this module> <run directory>``.

The request lists jobs, which the same processes train one after the other, each from a checkpoint to the next
with one mapping.
"""

import fcntl
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from makespan.easyscale.runtime._contexts import registered_state
from makespan.easyscale.runtime._exchange import Reduction, over_group
from makespan.easyscale.runtime._gloo import fold_of_machine
from makespan.easyscale.runtime._hashes import optimizer_sha, parameter_sha
from makespan.easyscale.runtime._hosted import HostedWorkers, MiniBatch
from makespan.easyscale.runtime._job import TRAINING_LOCK, ElasticJob, job_from
from makespan.easyscale.runtime._kernels import kernels_of
from makespan.easyscale.runtime._loader import LoaderPool
from makespan.easyscale.runtime._mapping import RankMapping
from makespan.easyscale.runtime._parts import build_parts
from makespan.easyscale.runtime._process import use_kernels
from makespan.easyscale.runtime._saved import check_can_be_saved, read_saved, write_saved
from makespan.easyscale.runtime._shards import Shards
from makespan.easyscale.runtime._user_state import UserState
from makespan.easyscale.runtime._virtual import hide_processes, seen_as
from makespan.errors import CheckpointError, TrainingError
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

__all__ = ["train_stage"]

OF_SEVERAL = ("torch._dynamo",)
"""What optimizers load, and takes long: a fork server has it before the first worker is forked."""

_GO_ON, _DUE, _ASKED, _SIGNALLED = range(4)
_ENDINGS = ("done", "done", "asked", "signalled")
_NOTICE = "the run takes this signal as a notice and writes a checkpoint"
_BEAT_S = 0.5
_PARAMETERS, _OPTIMIZER = "parameters", "the states of the optimizer"
_WATCHED_FIRST = 3  # mini-batches; later ones are watched at powers of two, and where hashes are taken
_MOST_SAVING = 20.0  # a checkpoint that is due by time waits for so many times what the last one took


class _Process:
    """What this process has for all jobs of the stage: its place, its device, and signals to it."""

    def __init__(self, directory: RunDirectory, who: Identity) -> None:
        self.directory, self.who = directory, who
        self.is_signalled, self._beaten, self._moved = False, 0.0, 0.0
        self.notices: list[str] = []
        for request in directory.request():
            # Never closed: who comes after a killed run waits for the end of this process.
            handle = os.open(Path(request["run_dir"], TRAINING_LOCK), os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(handle, fcntl.LOCK_SH)
        self.handlers: dict[signal.Signals, Any] = {signal.SIGTERM: self._on_signal}
        if who.parent is not None:  # a terminal interrupts all its processes; who launched this one decides
            self.handlers |= dict.fromkeys((signal.SIGINT, signal.SIGHUP), signal.SIG_IGN)
        self.take_signals()
        self.device = choose_device(who)
        self.pids = join(directory, who)
        self.start_s = time.time() - who.launched_s
        hide_processes(directory.request()[0]["job"]["n_logical_workers"])

    def take_signals(self) -> list[str]:
        """Handle the signals that end a run, and name those that code of the user has taken since."""
        taken = [one for one, handler in self.handlers.items() if signal.getsignal(one) != handler]
        for one in taken:
            signal.signal(one, self.handlers[one])
        return [
            f"code of the job sets a handler of {one.name}, which is not called: {_NOTICE}" for one in taken
        ]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_signalled = True

    def beat(self, step: int, loss: float) -> None:
        """Say now and then that there is progress."""
        if self.who.rank == 0 and time.monotonic() - self._beaten > _BEAT_S:
            self._beaten = time.monotonic()
            values = {"step": step, "loss": loss, "pids": self.pids, "notices": self.notices}
            self.directory.write_progress(values)

    def move(self) -> None:
        """Say now and then that this process has got a piece further."""
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
        """Train to the last step of the stage, or until somebody asks for its end."""
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
                if _is_early(self.done - first - 1):
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
        """Whether what code of the user changes is looked for in a mini-batch of the stage, from 0."""
        step = self.done + 1
        every = [every for name in ("hash_every", "checkpoint_every") if (every := self.request[name])]
        return _is_early(number) or any(step % one == 0 for one in every)

    def _compare(self, number: int) -> None:
        """Refuse to go on where what all share differs between processes; the same answer in each."""
        if number == 1:
            check_can_be_saved(self.parts, self.hosted, self.pool)
        if self.process.who.size == 1:
            return
        own = self.hosted.contexts.sha_of_all()
        own |= {_PARAMETERS: parameter_sha(self.parts.model), _OPTIMIZER: optimizer_sha(self.parts.optimizer)}
        everywhere: list[Any] = [None] * self.process.who.size
        dist.all_gather_object(everywhere, own)
        for name in dict.fromkeys(name for one in everywhere for name in one):
            if len({one[name] for one in everywhere if name in one}) > 1:
                raise _parted(self.done, name)

    def _told_to_first(self, notices: list[str]) -> list[str]:
        """Return the notices of all processes."""
        everywhere: list[Any] = [None] * self.process.who.size
        dist.all_gather_object(everywhere, notices)
        return sorted({one for part in everywhere for one in part})

    def _build(self, stack: ExitStack) -> None:
        """Build what is trained, from the checkpoint if there is one."""
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
        """Order of sums of this machine, found out by the first process for all."""
        if self.job.fold != "auto":
            return self.job.fold
        n_ranks, found = self.job.n_logical_workers, [""]
        if self.number == 0:
            found = ["ring" if n_ranks == 1 else fold_of_machine(n_ranks, Path(self.request["fold_dir"]))]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def _record(self, batch: MiniBatch) -> None:
        """Keep what each logical worker of this process has after a mini-batch."""
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
        """Whether somebody asks for the end of the stage; the same answer in every process."""
        own = _SIGNALLED if self.process.is_signalled else _GO_ON
        if self.number == 0 and own == _GO_ON and Path(self.request["asked"]).exists():
            own = _ASKED
        if self.number == 0 and own == _GO_ON and self._is_due():
            own = _DUE
        agreed = torch.tensor(own, device=self.process.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return int(agreed.item())

    def _is_due(self) -> bool:
        """Whether the last checkpoint is so old that the next one is written."""
        every_s: float = self.request["checkpoint_every_s"]
        return every_s > 0 and time.monotonic() - self.saved_at > max(every_s, _MOST_SAVING * self.save_s)

    def _save(self) -> None:
        """Write a checkpoint; a `CheckpointError` says that the disk is full or the like."""
        directory = self.run_dir / "checkpoints"
        try:
            self._write(directory)
        except OSError as error:
            what = f"{error.filename or directory}: {error.strerror}"
            raise CheckpointError(f"{what}; earlier checkpoints stay") from error
        self.saved_at = time.monotonic()

    def _write(self, directory: Path) -> None:
        """Write a checkpoint with all processes, and before it what was recorded since the last one."""
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
            values = self.request["manifest"] | {"fold": self.fold}
            self.save_s = time.perf_counter() - begun
            finish_checkpoint(directory, self.done, self.save_s, values)
        self.rows.clear()
        dist.barrier()


def _is_early(number: int) -> bool:
    """Whether a mini-batch of a stage, from 0, is among the first ones, or at a power of two."""
    return number < _WATCHED_FIRST or number & (number + 1) == 0


def _parted(step: int, name: str) -> TrainingError:
    """Build the error for what all share and differs between processes."""
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
