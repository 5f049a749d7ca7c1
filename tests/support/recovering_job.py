"""A job for runs that lose processes: random layers and samples, buffers, counts, and code after the sum.

With ``tears`` in the options of the loss, one process sends the results of a mini-batch to the first of the
others alone before it dies, so that these are one mini-batch apart. With ``waits`` in the options of the
model, the forward passes of some mini-batches wait for a file.
"""

import os
import random
import time
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width, waits):
        super().__init__()
        self.waits = waits
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 4)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.3)
        self.register_buffer("n_clipped", torch.zeros(()))
        self.n_passes = 0

    def forward(self, inputs):
        self.n_passes += 1
        while str(self.n_passes) in self.waits and not Path(self.waits[str(self.n_passes)]).exists():
            time.sleep(0.02)
        noise = 0.01 * self.n_passes * torch.randn(inputs.shape[0], 8)
        return self.second(self.drop(torch.relu(self.norm(self.first(inputs + noise)))))


class Samples:
    def __len__(self):
        return 96

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(8, generator=generator) + 0.1 * random.random()
        return inputs, torch.tensor(index % 4)


def model(width=16, waits=None):
    return Net(width, waits or {})


def data():
    return Samples()


def loss(outputs, targets, tears=None):
    if tears and str(tears["process"]) == os.environ["MAKESPAN_RANK"]:
        _tear(tears)
    return nn.functional.cross_entropy(outputs, targets)


def _tear(tears):
    """Let this process die in a mini-batch when only one other process has the last it sends before the step.

    Behind the results that is the kinds of its buffers, which code after the sum sees.
    """
    from makespan.easyscale.hosting import HostedESTs
    from makespan.runtime.links import PeerLinks

    results, finish, left = HostedESTs._results, PeerLinks.finish, [tears["step"]]
    if results.__name__ == "dying":
        return

    def dying(self, *arguments):
        left[0] -= 1
        if not left[0]:
            PeerLinks.finish = whole_first
        return results(self, *arguments)

    def whole_first(self):
        finish(self)
        PeerLinks.finish = half_sent

    def half_sent(self):
        link = next(iter(self._links.values()))
        while link.outgoing:
            link.write()
        time.sleep(0.3)  # until that process has taken its step
        os.kill(os.getpid(), 9)

    HostedESTs._results = dying


def after_reduce(model):
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with torch.no_grad():
        model.n_clipped += total.detach() > 0.5
