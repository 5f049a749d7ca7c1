"""A small job whose parts are found by name, and logical workers whose processes all live in this one.

``python easyscale_job.py <run directory>`` describes the stand-ins of the zoo.
"""

import random
import sys
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from makespan.easyscale.data import LoaderPool, LoaderState, Shards
from makespan.easyscale.hosting import HostedESTs
from makespan.easyscale.job import ElasticJob, RankMapping
from makespan.easyscale.optimizer_shards import OptimizerShards
from makespan.easyscale.parts import build_parts
from makespan.easyscale.randomness import optimizer_sha, parameter_sha, seed_everything
from makespan.easyscale.reduction import Reduction, in_memory
from makespan.files import write_json
from makespan.runtime import end_worker, join, run_worker
from makespan.training.zoo import STAND_INS, StandIn, build_stand_in, stand_in_data

CPU = torch.device("cpu")
HERE = "easyscale_job"
JOB = {
    "model": f"{HERE}:Net", "data": f"{HERE}:Pictures", "loss": f"{HERE}:cross_entropy",
    "optimizer": "sgd", "lr_scheduler": "step",
    "options": {
        "optimizer": {"lr": 0.1, "momentum": 0.9}, "lr_scheduler": {"step_size": 3, "gamma": 0.5},
    },
    "n_logical_workers": 4, "micro_batch_size": 6, "n_loaders": 0, "seed": 11, "bucket_cap_bytes": 1 << 14,
    "fold": "ring",
}  # fmt: skip
WITH_ADAM = {
    "optimizer": "adam", "after_reduce": f"{HERE}:clip",
    "options": {"optimizer": {"lr": 0.01}, "lr_scheduler": {"step_size": 3, "gamma": 0.5}},
}  # fmt: skip


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


class Pictures(Dataset):
    """Images and words, altered with all three random states; an epoch of four ranks has four batches."""

    def __len__(self):
        return 92

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        image = torch.from_numpy(rng.random((3, 8, 8), dtype=np.float32))
        image = image.flip(2) if random.random() < 0.5 else image
        brightness = float(np.random.uniform(0.5, 1))  # noqa: NPY002 - the state that contexts swap
        return (image * brightness + torch.rand(1), int(rng.integers(16))), int(rng.integers(10))


def cross_entropy(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


@dataclass
class Process:
    """What one process has, here one of several in this one."""

    parts: object
    hosted: HostedESTs
    pool: LoaderPool
    shards: OptimizerShards | None


class Elastic:
    """A job whose processes live in this one; what lasts from one mapping to the next is a file.

    With ``copies`` each process holds a part of the optimizer, as so many others do; ``held`` then has the
    elements of each, after each mini-batch.
    """

    def __init__(self, copies=None, **changes):
        self.job, self.saved, self.copies, self.held = ElasticJob(**(JOB | changes)), None, copies, []

    def host(self, mapping, number, stack):
        job, ranks, saved = self.job, mapping.hosted[number], {}
        parts, bucket_map = build_parts(job, CPU), None
        if self.saved is not None:
            saved = torch.load(self.saved, weights_only=True)
            for one in ("model", "optimizer", "scheduler"):
                getattr(parts.trained, one).load_state_dict(saved[one])
            bucket_map = tuple(map(tuple, saved["bucket_map"]))
        reduction = Reduction(job.n_logical_workers, bucket_cap_bytes=job.bucket_cap_bytes)
        part = None
        if self.copies is not None:
            part = OptimizerShards(parts.trained, self.copies)
            part.place(number, mapping.n_processes * ("",))
        hosted = HostedESTs(
            parts.trained, CPU, mapping, number, reduction, job.level,
            seed=job.seed, buffers=job.buffers, bucket_map=bucket_map, shards=part,
        )  # fmt: skip
        shards = Shards(job.n_logical_workers, job.micro_batch_size, job.seed, n_loaders=job.n_loaders)
        states = {rank: shards.start() for rank in ranks}
        if saved:
            states = {rank: LoaderState.from_values(saved["loaders"][rank]) for rank in ranks}
            for rank in ranks:
                hosted.contexts.install(rank, saved["contexts"][rank])
        pool = stack.enter_context(LoaderPool(parts.data, shards, states, n_processes=1, prefetch=3))
        return Process(parts.trained, hosted, pool, part)

    def train(self, mapping, n_steps, path=None):
        """Do mini-batches under a mapping; each as the list of what every virtual rank has after it."""
        mapping, found = RankMapping.parse(mapping), []
        with ExitStack() as stack:
            processes = [self.host(mapping, number, stack) for number in range(mapping.n_processes)]
            for _ in range(n_steps):
                batches = in_memory([one.hosted.mini_batch(one.pool.next) for one in processes])
                if self.copies is not None:
                    self.held.append([elements(one.parts.optimizer) for one in processes])
                    parts = [one.shards.owned() for one in processes]
                    for one in processes:
                        one.shards.complete(parts)
                found.append(self.seen(mapping, processes, batches))
            if path is not None:
                self.save(mapping, processes, path)
        return found

    def seen(self, mapping, processes, batches):
        rows = {}
        for one, ranks, batch in zip(processes, mapping.hosted, batches, strict=True):
            shared = [parameter_sha(one.parts.model), optimizer_sha(one.parts.optimizer)]
            rows |= {
                rank: [batch.losses[rank].hex(), *shared, one.hosted.contexts.sha(rank)] for rank in ranks
            }
        return [rows[rank] for rank in sorted(rows)]

    def save(self, mapping, processes, path):
        first = processes[0]
        saved = {one: getattr(first.parts, one).state_dict() for one in ("model", "optimizer", "scheduler")}
        saved |= {"bucket_map": first.hosted.bucket_map, "contexts": {}, "loaders": {}}
        for one, ranks in zip(processes, mapping.hosted, strict=True):
            saved["contexts"] |= {rank: one.hosted.contexts.values(rank) for rank in ranks}
            saved["loaders"] |= {rank: one.pool.state(rank).values() for rank in ranks}
        torch.save(saved, path)
        self.saved = path


def elements(optimizer):
    """Count the elements of the state of an optimizer, without counts of steps."""
    return sum(each.numel() for state in optimizer.state.values() for each in state.values() if each.dim())


def describe_stand_ins(seed):
    """Hash the parameters of every stand-in of the zoo, and some of its samples."""
    found = {}
    for name in STAND_INS:
        model, samples = build_stand_in(StandIn(name), seed), stand_in_data(StandIn(name), 16, seed)
        seed_everything(seed)
        parts = [torch.as_tensor(part) for index in range(3) for part in tree_leaves(samples[index])]
        found[name] = [parameter_sha(model), *(part.double().numpy().tobytes().hex() for part in parts)]
    return found


def work(directory, who):
    join(directory, who)
    write_json(describe_stand_ins(directory.request()), directory.path / f"found-{who.rank}.json")


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], work))
