"""Process of a reference run: ``python -m makespan.easyscale.reference_worker <run directory>``.

It trains with `torch.nn.parallel.DistributedDataParallel` on gloo and `torch.utils.data.DataLoader`, one
process per rank, without restarts. It shares with elastic training the parts of jobs, the seeding, the
kernels of devices and the hashes of results, but not the reduction of gradients, the contexts or the loading
of samples.
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

from makespan.easyscale.job import ElasticJob
from makespan.easyscale.kernels import kernels_of
from makespan.easyscale.parts import JobParts, TrainedParts, build_parts, use_kernels
from makespan.easyscale.randomness import (
    implicit_sha,
    optimizer_sha,
    parameter_sha,
    seed_everything,
    seed_stream,
)
from makespan.easyscale.requests import STOCK, StockRequest
from makespan.runtime import Identity, RunDirectory, choose_device, end_worker, join, run_worker

PRELOAD = ("torch._dynamo",)
"""Modules that optimizers load slowly: a fork server loads them before it forks the first worker."""
_MIB = 1 << 20
_PROGRESS_S = 0.5


def _batches(job: ElasticJob, parts: JobParts, rank: int) -> Iterator[Any]:
    """Yield the batches of a rank, epoch after epoch."""
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
    gathered = [torch.empty_like(scaled) for _ in range(group.size())]
    dist.all_gather(gathered, scaled, group=group)
    total = gathered[0]
    for other in gathered[1:]:
        total.add_(other)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(total.to(bucket.buffer().device))
    return done


class _Rank:
    """One rank of the jobs of a request."""

    def __init__(self, directory: RunDirectory, who: Identity) -> None:
        self.directory, self.who = directory, who
        self.request: StockRequest = STOCK.validate_python(directory.request())
        self.device, self._progress_at = choose_device(who), 0.0
        join(directory, who)
        self.group = dist.new_group(backend="gloo")  # also on GPUs: NCCL does not define the order of sums

    def run(self) -> None:
        """Train every job, and write the results of all ranks at its end."""
        for number, job in enumerate(self.request.jobs):
            by_rank: list[Any] = [None] * self.who.size
            dist.all_gather_object(by_rank, self.train(job, number), group=self.group)
            if self.who.rank == 0:
                self.directory.write_result(by_rank, number)

    def train(self, job: ElasticJob, number: int) -> list[list[Any]]:
        """Train one job; return the loss of each mini-batch, and hashes where they are requested."""
        parts, results = build_parts(job, self.device), []
        trained, rank = parts.trained, self.who.rank
        computing = use_kernels(kernels_of(self.request.device, job.level), job.level)
        options: dict[str, Any] = {
            "process_group": self.group,
            "find_unused_parameters": job.find_unused_parameters,
        }
        if job.bucket_cap_bytes is not None:
            options["bucket_cap_mb"] = job.bucket_cap_bytes / _MIB
        if job.buffers == "per_rank":
            options["broadcast_buffers"] = False
        model = nn.parallel.DistributedDataParallel(trained.model, **options)
        if job.fold == "rank":  # gloo sums in another order on this machine
            # A lambda, because torch requires annotations that its own stubs do not know.
            model.register_comm_hook(self.group, lambda group, bucket: _summed_by_rank(group, bucket))
        seed_everything(job.seed, "rank", rank)
        for step, (inputs, targets) in enumerate(islice(_batches(job, parts, rank), self.request.steps)):
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
            self.report_progress(number, step + 1)
        if rank == 0 and (path := self.request.models[number]) is not None:
            torch.save(trained.model.state_dict(), path)
        return results

    def report_progress(self, number: int, done: int) -> None:
        """Write the progress at intervals."""
        if self.who.rank == 0 and time.monotonic() - self._progress_at > _PROGRESS_S:
            self._progress_at = time.monotonic()
            self.directory.write_progress({"job": number, "step": done})

    def moved(self, values: Any) -> Any:
        """Move the tensors of a batch to the device."""
        return tree_map_only(Tensor, lambda tensor: tensor.to(self.device), values)

    def is_hashed(self, step: int) -> bool:
        """Return True if hashes after a mini-batch are requested."""
        every = self.request.hash_every
        return every > 0 and (step + 1) % every == 0

    def hashes(self, trained: TrainedParts) -> list[str]:
        """Return hashes of parameters, of the optimizer, and of buffers and random states."""
        model = trained.model
        return [parameter_sha(model), optimizer_sha(trained.optimizer), implicit_sha(model, self.device)]


def _work(directory: RunDirectory, who: Identity) -> None:
    _Rank(directory, who).run()


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], _work))
