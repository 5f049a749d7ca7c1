"""A small job in processes: stock DistributedDataParallel, or logical workers that processes share.

``python easyscale_job.py <run directory>``; the request lists jobs. The stock training shares with the other
only what is trained, the rule of seeds, and how results are hashed.
"""

import random
import sys
from functools import partial
from itertools import count

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, default_collate

from makespan.files import write_json
from makespan.papers.easyscale.runtime import (
    DeterminismLevel,
    HostedWorkers,
    LoaderPool,
    LoaderState,
    RankMapping,
    Reduction,
    Shards,
    TrainedParts,
    implicit_sha,
    in_memory,
    kernels_of,
    optimizer_sha,
    over_group,
    parameter_sha,
    seed_everything,
    seed_stream,
    use_kernels,
)
from makespan.runtime import end_worker, join, run_worker
from makespan.training.zoo import STAND_INS, StandIn, build_stand_in, stand_in_data, stand_in_loss

OF_SEVERAL = ("torch._dynamo",)  # what optimizers load
CPU, BATCH = torch.device("cpu"), 6
JOB = {"n": 4, "optimizer": "sgd", "buffers": "per_rank", "cap_bytes": 1 << 14, "seed": 11, "steps": 8}
JOB |= {"loaders": 0, "level": "D1", "first": 0, "resume": None, "devices": "AAAA", "model": None}


class Net(nn.Module):
    """Convolution, BatchNorm, dropout, an embedding, a buffer that each pass moves and one that none does."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()
        )
        self.words = nn.Embedding(16, 32)
        self.mix = nn.Sequential(nn.Linear(8 * 36 + 32, 64), nn.ReLU(), nn.Linear(64, 10))
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("fixed", torch.linspace(0, 1, 32))

    def forward(self, inputs):
        images, words = inputs
        found = torch.cat([self.features(images), self.words(words) * self.fixed], 1)
        hidden = self.mix[1](self.mix[0](found))
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.mix[2](hidden)


def parts(job):
    """Build what is trained; Adam has its gradients clipped."""
    torch.manual_seed(job["seed"])
    spec, loss = job["model"] and StandIn(job["model"], width=16), nn.functional.cross_entropy
    model = build_stand_in(spec, job["seed"]) if spec else Net()
    if spec:
        loss = partial(stand_in_loss, spec)
    if job["optimizer"] == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    clip = (
        (lambda one: nn.utils.clip_grad_norm_(one.parameters(), 0.5)) if job["optimizer"] == "adam" else None
    )
    return TrainedParts(model, optimizer, loss, scheduler, clip)


def samples_of(job):
    """Four batches an epoch for each of four logical workers, the last one of five samples."""
    return stand_in_data(StandIn(job["model"], width=16), 92, job["seed"])


def fetch(job, rank, step):
    """Batch of a virtual rank, altered with all three random states."""
    rng = np.random.default_rng((job["seed"], rank, step))
    if job["model"]:
        samples = samples_of(job)
        return default_collate([samples[index] for index in rng.integers(0, 92, BATCH).tolist()])
    images = torch.from_numpy(rng.random((BATCH, 3, 8, 8), dtype=np.float32))
    images = images.flip(3) if random.random() < 0.5 else images
    brightness = float(np.random.uniform(0.5, 1))  # noqa: NPY002 - the state that contexts swap
    images = images * brightness + torch.rand(BATCH, 1, 1, 1)
    words, targets = (
        torch.from_numpy(rng.integers(0, 16, BATCH)),
        torch.from_numpy(rng.integers(0, 10, BATCH)),
    )
    return (images, words), targets


# --- stock ---------------------------------------------------------------------------------------------


def stock_batches(job, rank):
    """Batches of a rank, altered in the processes of stock data loaders."""
    samples, seed = samples_of(job), job["seed"]
    sampler = DistributedSampler(samples, job["n"], rank, seed=seed)
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from DataLoader(
            samples, BATCH, sampler=sampler, num_workers=job["loaders"], generator=torch.Generator(),
            worker_init_fn=partial(seed_stream, seed, rank, epoch),
        )  # fmt: skip


def train_stock(job, rank, group):
    """Train one rank with DistributedDataParallel and return what it had after every mini-batch."""
    trained = parts(job)
    options = {} if job["cap_bytes"] is None else {"bucket_cap_mb": job["cap_bytes"] / (1 << 20)}
    options |= {} if job["buffers"] == "rank0" else {"broadcast_buffers": False}
    model = nn.parallel.DistributedDataParallel(trained.model, process_group=group, **options)
    computing = use_kernels(kernels_of(job["devices"][rank], level_of(job)), level_of(job))
    seed_everything(job["seed"], "rank", rank)
    found, batches = [], stock_batches(job, rank) if job["loaders"] else None
    for step in range(job["steps"]):
        inputs, targets = next(batches) if batches else fetch(job, rank, step)
        with computing:
            loss = trained.loss(model(inputs), targets)
        loss.backward()
        if trained.after_reduce is not None:
            trained.after_reduce(trained.model)
        trained.optimizer.step()
        trained.scheduler.step()
        trained.optimizer.zero_grad()
        found.append(
            [loss.item().hex(), parameter_sha(trained.model), optimizer_sha(trained.optimizer),
             implicit_sha(trained.model, CPU)]
        )  # fmt: skip
    return found


# --- logical workers -----------------------------------------------------------------------------------


class Elastic:
    """A job whose processes live in this one; what lasts from one mapping to the next is a checkpoint."""

    def __init__(self, job):
        self.job, self.step, self.saved, self.pools = job, job["first"], job["resume"], {}

    def host(self, mapping, process, computing=None):
        job, trained = self.job, parts(self.job)
        bucket_map = None
        if self.saved is not None:
            saved = torch.load(self.saved, weights_only=True)
            for one in ("model", "optimizer", "scheduler"):
                getattr(trained, one).load_state_dict(saved[one])
            bucket_map = tuple(map(tuple, saved["bucket_map"]))
        hosted = HostedWorkers(
            trained, CPU, mapping, process,
            Reduction(job["n"], bucket_cap_bytes=job["cap_bytes"]), level_of(job),
            seed=job["seed"], buffers=job["buffers"], bucket_map=bucket_map, computing=computing,
        )  # fmt: skip
        if self.saved is not None:
            for rank in mapping.hosted[process]:
                hosted.contexts.install(rank, saved["contexts"][rank])
        if job["loaders"]:
            shards = Shards(job["n"], BATCH, job["seed"], n_loaders=job["loaders"])
            states = {rank: shards.start() for rank in mapping.hosted[process]}
            if self.saved is not None:
                states = {rank: LoaderState.from_values(saved["loaders"][rank]) for rank in states}
            pool = LoaderPool(samples_of(job), shards, states, n_processes=1, prefetch=3)
            self.pools |= dict.fromkeys(states, pool)
        return trained, hosted

    def train(self, mapping, n_steps, path=None):
        """Do mini-batches under a mapping; each as the list of what every virtual rank has after it."""
        mapping = RankMapping.parse(mapping)
        processes = [self.host(mapping, number) for number in range(mapping.n_processes)]
        found = []
        for _ in range(n_steps):
            batches = in_memory([hosted.mini_batch(self.fetch) for _, hosted in processes])
            found.append(self.seen(mapping, processes, batches))
            self.step += 1
        if path is not None:
            self.save(mapping, processes, path)
        return found

    def fetch(self, rank):
        return self.pools[rank].next(rank) if self.pools else fetch(self.job, rank, self.step)

    def seen(self, mapping, processes, batches):
        rows = {}
        for (trained, hosted), ranks, batch in zip(processes, mapping.hosted, batches, strict=True):
            for rank in ranks:
                rows[rank] = [
                    batch.losses[rank].hex(), parameter_sha(trained.model), optimizer_sha(trained.optimizer),
                    hosted.contexts.sha(rank),
                ]  # fmt: skip
        return [rows[rank] for rank in sorted(rows)]

    def save(self, mapping, processes, path):
        pairs = zip(processes, mapping.hosted, strict=True)
        save(processes[0], [self.of_ranks(hosted, ranks) for (_, hosted), ranks in pairs], path)
        self.saved = path

    def of_ranks(self, hosted, ranks):
        """Return what a checkpoint has of each rank: its context, and where its loaders are."""
        states = {rank: pool.state(rank).values() for rank, pool in self.pools.items()}
        return {rank: (hosted.contexts.values(rank), states.get(rank)) for rank in ranks}


def save(process, of_ranks, path):
    trained, hosted = process
    of_all = [(rank, *values) for some in of_ranks for rank, values in some.items()]
    saved = {one: getattr(trained, one).state_dict() for one in ("model", "optimizer", "scheduler")}
    saved |= {"bucket_map": hosted.bucket_map, "contexts": {rank: context for rank, context, _ in of_all}}
    torch.save(saved | {"loaders": {rank: state for rank, _, state in of_all}}, path)


def level_of(job):
    return DeterminismLevel.named(job["level"])


def train_hosted(job, process):
    """Train the logical workers of one real process."""
    elastic, mapping = Elastic(job), RankMapping.parse(job["mapping"])
    computing = use_kernels(kernels_of(job["devices"][process], level_of(job)), level_of(job))
    trained, hosted = elastic.host(mapping, process, computing)
    found, ranks = [], mapping.hosted[process]
    for _ in range(job["steps"]):
        batch = over_group(hosted.mini_batch(elastic.fetch))
        shared = [parameter_sha(trained.model), optimizer_sha(trained.optimizer)]
        found.append([[batch.losses[rank].hex(), *shared, hosted.contexts.sha(rank)] for rank in ranks])
        elastic.step += 1
    if "save" in job:
        of_ranks = [None] * mapping.n_processes
        dist.all_gather_object(of_ranks, elastic.of_ranks(hosted, ranks))
        if process == 0:
            save((trained, hosted), of_ranks, job["save"])
    for pool in elastic.pools.values():
        pool.close()
    return found


def describe_stand_ins(job):
    """Hash the parameters of every stand-in of the zoo, and some of its samples."""
    found, seed = {}, job["seed"]
    for name in STAND_INS:
        model, samples = build_stand_in(StandIn(name), seed), stand_in_data(StandIn(name), 16, seed)
        seed_everything(seed)
        parts = [torch.as_tensor(part) for index in range(3) for part in tree_leaves(samples[index])]
        found[name] = [parameter_sha(model), *(part.double().numpy().tobytes().hex() for part in parts)]
    return found


def work(directory, who):
    join(directory, who)
    found = []
    for job in directory.request():
        if "stand_ins" in job:
            found.append(describe_stand_ins(job))
            continue
        if "mapping" in job:
            found.append(train_hosted(job, who.rank))
            continue
        group = dist.new_group(list(range(job["n"])))
        found.append(train_stock(job, who.rank, group) if who.rank < job["n"] else None)
    write_json(found, directory.path / f"found-{who.rank}.json")


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], work))
