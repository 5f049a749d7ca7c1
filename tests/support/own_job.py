"""A user's own model, as elastic training finds it by name; options let single tests be odd."""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from makespan.papers.easyscale import request_change

N_SAMPLES = 60


class Net(nn.Module):
    """Convolution, BatchNorm, dropout, an embedding; a buffer counts the mini-batches of a logical worker."""

    def __init__(self, kind, width):
        super().__init__()
        norm = nn.SyncBatchNorm(width) if kind == "sync" else nn.BatchNorm2d(width)
        self.kind = kind
        self.features = nn.Sequential(nn.Conv2d(3, width, 3), norm, nn.ReLU(), nn.Dropout(0.2), nn.Flatten())
        self.words = nn.Embedding(12, 16, sparse=kind == "sparse")
        self.head = nn.Linear(width * 16 + 16, 5)
        if kind == "partly used":
            self.odd, self.never = nn.Linear(5, 5), nn.Linear(5, 5)
        self.register_buffer("n_passes", torch.tensor(0))

    def forward(self, inputs):
        images, words = inputs
        self.n_passes += 1
        found = self.head(torch.cat([self.features(images), self.words(words)], 1))
        if self.kind == "partly used" and dist.get_rank() % 2:
            found = found + self.odd(found)
        return found


def build_model(kind="plain", width=4):
    return Net(kind, width)


def build_optimizer(model, lr=0.01):
    return torch.optim.Adam(model.parameters(), lr=lr)


def build_scheduler(optimizer, step_size=3):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size, 0.5)


def loss(outputs, targets, factor=1.0):
    return factor * nn.functional.cross_entropy(outputs, targets)


class Samples:
    """Images and words, altered by draws from all three random states."""

    def __init__(self, n_samples, kills):
        rng = np.random.default_rng(3)
        self.images = rng.random((n_samples, 3, 6, 6), dtype=np.float32)
        self.words, self.targets = rng.integers(0, 12, n_samples), rng.integers(0, 5, n_samples)
        self.kills = kills

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        once(self.kills, index)
        image = torch.from_numpy(self.images[index])
        image = image.flip(2) if random.random() < 0.5 else image
        image = image * float(np.random.uniform(0.5, 1)) + torch.rand(1)  # noqa: NPY002 - what loaders seed
        return (image, int(self.words[index])), int(self.targets[index])


def data_set(n_samples=N_SAMPLES, kills=None):
    return Samples(n_samples, kills)


def once(kills, place):
    """Kill this process the first time that it comes by a place; a file says whether it was."""
    if kills and place == kills["at"] and not Path(kills["file"]).exists():
        Path(kills["file"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def after_reduce(model, asks=(), kills=None, stops=None):
    """Clip gradients; in the middle of a mini-batch ask for changes, or be killed, or hang."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for at, run_dir, change in asks:
        if at == int(model.n_passes):
            request_change(run_dir, **change)
    if kills and kills["process"] == int(os.environ["MAKESPAN_RANK"]):
        once(kills, int(model.n_passes))
    if stops == int(model.n_passes) and os.environ["MAKESPAN_RANK"] == "1":
        time.sleep(600)


def tell_rank(outputs, targets):
    """Return a loss that has the rank and the number of ranks in it, as user code may ask for them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    told = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return outputs.sum() * 0 + 100 * rank + size + (0 if told == (rank, size) else torch.nan)
