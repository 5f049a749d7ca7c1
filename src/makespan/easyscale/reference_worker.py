"""Process of a reference run: ``python -m makespan.easyscale.reference_worker <run directory>``.

`torch.nn.parallel.DistributedDataParallel` on gloo and `torch.utils.data.DataLoader`, one process a rank,
without a stop. It shares with elastic training what is trained, the rule of seeds, the kernels of devices and
how results are hashed; how that adds up gradients, swaps contexts and loads samples is unknown here.
"""

import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, DistributedSampler

from makespan.easyscale.job import ElasticJob, job_from
from makespan.easyscale.kernels import kernels_of
from makespan.easyscale.parts import JobParts, TrainedParts, build_parts, use_kernels
from makespan.easyscale.randomness import (
    implicit_sha,
    optimizer_sha,
    parameter_sha,
    seed_everything,
    seed_stream,
)
from makespan.runtime import Identity, RunDirectory, choose_device, end_worker, join, run_worker

OF_SEVERAL = ("torch._dynamo",)
"""What optimizers load."""
_MIB = 1 << 20
_BEAT_S = 0.5


def _batches(job: ElasticJob, parts: JobParts, rank: int) -> Iterator[Any]:
    """Batches of a rank, epoch after epoch."""
    sampler: DistributedSampler[Any] = DistributedSampler(
        parts.data, job.n_logical_workers, rank, job.shuffle, job.seed, drop_last=job.drop_last_samples
    )
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from DataLoader(
            parts.data, job.micro_batch_size, sampler=sampler, num_workers=job.n_loaders,
            collate_fn=parts.collate, drop_last=job.drop_last_batch, generator=torch.Generator(),
            worker_init_fn=partial(seed_stream, job.seed, rank, epoch),
        )  # fmt: skip


def _wrapped(job: ElasticJob, model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Wrap a model as a user would; the hook stands in where gloo's own order cannot be met."""
    options: dict[str, Any] = {"process_group": group}
    if job.bucket_cap_bytes is not None:
        options["bucket_cap_mb"] = job.bucket_cap_bytes / _MIB
    if job.buffers == "per_rank":
        options["broadcast_buffers"] = False
    wrapped = nn.parallel.DistributedDataParallel(model, **options)
    if job.fold == "rank":
        # A lambda, because torch wants annotations that its own stubs do not know.
        wrapped.register_comm_hook(group, lambda group, bucket: _summed_by_rank(group, bucket))
    return wrapped


def _summed_by_rank(group: dist.ProcessGroup, bucket: Any) -> "torch.futures.Future[Tensor]":
    """Sum the gradients of a bucket from rank 0 upwards."""
    scaled = bucket.buffer().cpu() * (1.0 / group.size())
    every = [torch.empty_like(scaled) for _ in range(group.size())]
    dist.all_gather(every, scaled, group=group)
    for one in every[1:]:
        every[0].add_(one)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(every[0].to(bucket.buffer().device))
    return done


class _Rank:
    """One rank of the jobs of a request."""

    def __init__(self, directory: RunDirectory, who: Identity) -> None:
        self.directory, self.who, self.request = directory, who, directory.request()
        self.device, self.beaten = choose_device(who), 0.0
        join(directory, who)
        self.group = dist.new_group(backend="gloo")  # also on GPUs: the order of NCCL's sums is not laid down

    def run(self) -> None:
        """Train every job, and write at its end what all ranks had."""
        for number, values in enumerate(self.request["jobs"]):
            found: list[Any] = [None] * self.who.size
            dist.all_gather_object(found, self.train(job_from(values), number), group=self.group)
            if self.who.rank == 0:
                self.directory.write_result(found, number)

    def train(self, job: ElasticJob, number: int) -> list[list[Any]]:
        """Train one job; for each mini-batch its loss, and hashes where they are asked for."""
        parts, found = build_parts(job, self.device), []
        trained, rank = parts.trained, self.who.rank
        computing = use_kernels(kernels_of(self.request["devices"][rank], job.level), job.level)
        model = _wrapped(job, trained.model, self.group)
        seed_everything(job.seed, "rank", rank)
        for step, (inputs, targets) in enumerate(islice(_batches(job, parts, rank), self.request["steps"])):
            with computing:
                loss = trained.loss(model(self.moved(inputs)), self.moved(targets))
            loss.backward()  # type: ignore[no-untyped-call]
            if trained.after_reduce is not None:
                trained.after_reduce(trained.model)
            trained.optimizer.step()
            if trained.scheduler is not None:
                trained.scheduler.step()
            trained.optimizer.zero_grad()
            found.append([float(loss.item()), *(self.hashes(trained) if self.is_hashed(step) else [])])
            self.beat(number, step + 1)
        if rank == 0 and (path := self.request["models"][number]) is not None:
            torch.save(trained.model.state_dict(), path)
        return found

    def beat(self, number: int, done: int) -> None:
        """Say now and then that there is progress."""
        if self.who.rank == 0 and time.monotonic() - self.beaten > _BEAT_S:
            self.beaten = time.monotonic()
            self.directory.write_progress({"job": number, "step": done})

    def moved(self, values: Any) -> Any:
        """Return a batch with its tensors on the device."""
        return tree_map_only(Tensor, lambda one: one.to(self.device), values)

    def is_hashed(self, step: int) -> bool:
        """Whether the bits after a mini-batch are asked for."""
        every = int(self.request["hash_every"])
        return every > 0 and (step + 1) % every == 0

    def hashes(self, trained: TrainedParts) -> list[str]:
        """Hashes of parameters, of the optimizer, and of buffers and random states."""
        model = trained.model
        return [parameter_sha(model), optimizer_sha(trained.optimizer), implicit_sha(model, self.device)]


def _work(directory: RunDirectory, who: Identity) -> None:
    _Rank(directory, who).run()


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], _work))
