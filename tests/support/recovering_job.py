"""A job for runs that lose processes: random layers and samples, buffers, counts, and code after the sum.

With ``tears`` in the options of the loss, one process sends the results of a mini-batch to the first of the
others alone and then stops, so that these are one mini-batch apart when it is killed. With ``held`` in the
options of the model, a folder, a mini-batch does not end while a file with its number is there, unless the
processes are asked to let somebody in or out. With ``counts`` in the options of the code after the sum, a
folder, each process writes there how many elements its optimizer has, in each mini-batch. With ``breaks`` in
the options of the loss, a process and a number of calls, the GPU of that process is of no use after these.
"""

import gc
import os
import random
import signal
from pathlib import Path

import torch
from killers import hold_mini_batches
from torch import nn

from makespan.files import write_text
from makespan.runtime import links

links._LEAST_LENT = 128  # most of what is sent here is short, and takes the way of long pieces


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 4)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.3)
        self.register_buffer("n_clipped", torch.zeros(()))
        self.n_passes = 0

    def forward(self, inputs):
        self.n_passes += 1
        noise = 0.01 * self.n_passes * torch.randn(inputs.shape[0], 8, device=inputs.device)
        return self.second(self.drop(torch.relu(self.norm(self.first(inputs + noise)))))


class Samples:
    def __len__(self):
        return 96

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(8, generator=generator) + 0.1 * random.random()
        return inputs, torch.tensor(index % 4)


def model(width=16, held=None):
    if held:
        hold_mini_batches(Path(held))
    return Net(width)


def data():
    return Samples()


def loss(outputs, targets, tears=None, breaks=None):
    if breaks and str(breaks["process"]) == os.environ["MAKESPAN_RANK"]:
        breaks["calls"] -= 1
        if breaks["calls"] < 0:
            os.environ["STAND_IN_BROKEN"] = "yes"
            outputs = outputs[torch.full((1,), 1 << 20, device=outputs.device)]  # CUDA does not forgive that
    if tears and str(tears["process"]) == os.environ["MAKESPAN_RANK"]:
        _tear(tears)
    return nn.functional.cross_entropy(outputs, targets)


def _tear(tears):
    """Let this process stop in a mini-batch when one other process alone has its results."""
    from makespan.easyscale.hosting import HostedESTs

    results, left = HostedESTs._results, [tears["step"]]
    if results.__name__ == "stopping":
        return

    def stopping(self, *arguments):
        left[0] -= 1
        if not left[0]:
            links.PeerLinks.finish = half_sent
        return results(self, *arguments)

    def half_sent(self):
        link = next(iter(self._links.values()))
        while link.outgoing:
            link.write()
        signal.pause()

    HostedESTs._results = stopping


def after_reduce(model, counts=None):
    if counts:
        _count(Path(counts), int(model.norm.num_batches_tracked))
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with torch.no_grad():
        model.n_clipped += total.detach() > 0.5


def _count(folder, step):
    """Write the elements that the optimizer of this process has, which no function of a job gets."""
    optimizers = [each for each in gc.get_objects() if isinstance(each, torch.optim.Adam)]
    states = [state for each in optimizers for state in each.state.values()]
    n_elements = sum(each.numel() for state in states for each in state.values() if each.dim())
    # Atomically, as the process may be killed amid it.
    write_text(str(n_elements), folder / f"{step}-{os.getpid()}")
