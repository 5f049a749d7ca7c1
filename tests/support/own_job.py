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

from makespan.easyscale import request_change
from makespan.runtime import links

links._LEAST_LENT = 128  # most of what is sent here is short, and takes the way of long pieces

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
        if kind == "large":  # gradients of 8 MiB, more than two segments of gloo's ring for three ranks
            self.head = nn.Sequential(
                nn.Linear(width * 16 + 16, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.Linear(1024, 5)
            )
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


def build_fragile(moments, width=4):
    """Build the model, and be killed once at each of some moments of training; see `Moment`."""
    model = Net("plain", width)
    for moment in moments:
        if moment["process"] == int(os.environ["MAKESPAN_RANK"]):
            _PLACES[moment["place"]](model, moment)
    return model


def in_backward(model, moment):
    """Be killed while the gradient of a parameter, of one of the logical workers, is computed."""
    parameters = list(model.parameters())
    count = counted(model, moment)
    parameters[moment["nth"] % len(parameters)].register_hook(lambda gradient: count())


def in_exchange(model, moment):
    """Be killed before the nth piece of a sum is sent, or when all pieces are there that came with it."""
    count, kind = counted(model, moment), links.PeerLinks
    send, finish, waiting = kind.send, kind.finish, []

    def counted_send(self, *piece):
        if moment["nth"] % 2:
            waiting.append(piece)
        else:
            count()
        send(self, *piece)

    def counted_finish(self):
        finish(self)
        while waiting:
            waiting.pop()
            count()

    kind.send, kind.finish = counted_send, counted_finish


def in_checkpoint(model, moment):
    """Be killed with the nth file of a checkpoint written in part, or before it is on the disk."""
    count, save, to_disk = counted(model, moment), torch.save, os.fsync

    def torn(values, path):
        save(values, path)
        content = Path(path).read_bytes()
        Path(path).write_bytes(content[: len(content) // 2])
        count()
        Path(path).write_bytes(content)

    def fsync(handle):
        count()
        to_disk(handle)

    torch.save, os.fsync = (torn, to_disk) if moment["is_torn"] else (save, fsync)


_PLACES = {"backward": in_backward, "exchange": in_exchange, "checkpoint": in_checkpoint}


def counted(model, moment):
    """Return a function that kills this process once, when it is called for the nth time in a mini-batch."""

    def count():
        # Kept where no state of user code is looked for: each logical worker would count for itself.
        seen, step = vars(links).setdefault(f"_counted {moment['file']}", {}), int(model.n_passes)
        seen[step] = seen.get(step, 0) + 1
        if step == moment["step"] and seen[step] >= moment["count"]:
            once({"at": 0, "file": moment["file"]}, 0)

    return count


def build_optimizer(model, lr=0.01):
    return torch.optim.Adam(model.parameters(), lr=lr)


class Halving(torch.optim.SGD):
    """Changes its learning rate in place, as code of users does."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5


def halving(model):
    return Halving(model.parameters(), lr=0.5, momentum=0.9)


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
    """Kill this process, and before it maybe another, the first time that it comes by a place."""
    if kills and place == kills["at"] and not Path(kills["file"]).exists():
        Path(kills["file"]).touch()
        if "too" in kills:
            os.kill(int(Path(kills["too"]).read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def after_reduce(model, asks=(), kills=None, stops=None, signals=None):
    """Clip gradients; in the middle of a mini-batch ask for changes, send signals, or be killed, or hang."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for at, run_dir, change in asks:
        if at == int(model.n_passes):
            request_change(run_dir, **change)
    if kills and kills["process"] == int(os.environ["MAKESPAN_RANK"]):
        once(kills, int(model.n_passes))
    if signals and signals["at"] == int(model.n_passes):
        if os.environ["MAKESPAN_RANK"] == "0" and "to" in signals:
            os.kill(signals["to"], signals["number"])
        os.kill(os.getpid(), signals["number"])
        # The caller decides when the run ends, and may take its time.
        while "until" in signals and not Path(signals["until"]).exists():
            time.sleep(0.01)
    if stops == int(model.n_passes) and os.environ["MAKESPAN_RANK"] == "1":
        time.sleep(600)


def overflowing(outputs, targets):
    """Return a loss whose gradients are not finite for the last logical worker and at the first scale."""
    found = loss(outputs, targets)
    return found * 1e18 if dist.get_rank() == dist.get_world_size() - 1 else found


def tell_rank(outputs, targets):
    """Return a loss that has the rank and the number of ranks in it, as user code may ask for them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    told = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return outputs.sum() * 0 + 100 * rank + size + (0 if told == (rank, size) else torch.nan)
