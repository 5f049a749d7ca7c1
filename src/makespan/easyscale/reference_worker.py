"""Process of a reference run: ``python -m makespan.easyscale.reference_worker <run directory>``.

`torch.nn.parallel.DistributedDataParallel` on gloo and `torch.utils.data.DataLoader`, one process per rank,
without restarts. It shares with elastic training the parts of jobs, the rule of seeds, the kernels of devices
and the hashes of results, but not the reduction of gradients, the contexts or the loading of samples.
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
"""Modules that optimizers load."""
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


def _summed_by_rank(group: dist.ProcessGroup, bucket: Any) -> "torch.futures.Future[Tensor]":
    """Sum the gradients of a bucket from rank 0 upwards."""
    scaled = bucket.buffer().cpu() * (1.0 / group.size())
    every = [torch.empty_like(scaled) for _ in range(group.size())]
    dist.all_gather(every, scaled, group=group)
    for other in every[1:]:
        every[0].add_(other)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(every[0].to(bucket.buffer().device))
    return done


class _Rank:
    """One rank of the jobs of a request."""

    def __init__(self, directory: RunDirectory, who: Identity) -> None:
        self.directory, self.who, self.request = directory, who, directory.request()
        self.device, self.beaten = choose_device(who), 0.0
        join(directory, who)
        self.group = dist.new_group(backend="gloo")  # also on GPUs: NCCL does not define the order of sums

    def run(self) -> None:
        """Train every job, and write the results of all ranks at its end."""
        for number, values in enumerate(self.request["jobs"]):
            by_rank: list[Any] = [None] * self.who.size
            dist.all_gather_object(by_rank, self.train(job_from(values), number), group=self.group)
            if self.who.rank == 0:
                self.directory.write_result(by_rank, number)

    def train(self, job: ElasticJob, number: int) -> list[list[Any]]:
        """Train one job; return the loss of each mini-batch, and hashes where they are requested."""
        parts, results = build_parts(job, self.device), []
        trained, rank = parts.trained, self.who.rank
        computing = use_kernels(kernels_of(self.request["devices"][rank], job.level), job.level)
        options: dict[str, Any] = {"process_group": self.group}
        if job.bucket_cap_bytes is not None:
            options["bucket_cap_mb"] = job.bucket_cap_bytes / _MIB
        if job.buffers == "per_rank":
            options["broadcast_buffers"] = False
        model = nn.parallel.DistributedDataParallel(trained.model, **options)
        if job.fold == "rank":  # the order of gloo on this machine is another one
            # A lambda, because torch wants annotations that its own stubs do not know.
            model.register_comm_hook(self.group, lambda group, bucket: _summed_by_rank(group, bucket))
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
            results.append([float(loss.item()), *(self.hashes(trained) if self.is_hashed(step) else [])])
            self.beat(number, step + 1)
        if rank == 0 and (path := self.request["models"][number]) is not None:
            torch.save(trained.model.state_dict(), path)
        return results

    def beat(self, number: int, done: int) -> None:
        """Write the progress at intervals."""
        if self.who.rank == 0 and time.monotonic() - self.beaten > _BEAT_S:
            self.beaten = time.monotonic()
            self.directory.write_progress({"job": number, "step": done})

    def moved(self, values: Any) -> Any:
        """Move the tensors of a batch to the device."""
        return tree_map_only(Tensor, lambda one: one.to(self.device), values)

    def is_hashed(self, step: int) -> bool:
        """Return True if hashes after a mini-batch are requested."""
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
