"""A job whose training code changes what its data set does: an attribute, a variable, and a new one.

``held`` is a folder, see `killers.hold_mini_batches`.
"""

from pathlib import Path

import torch
from killers import hold_mini_batches
from torch import nn
from torch.utils.data import DataLoader, Dataset

NOISE = 0.0


class Samples(Dataset):
    """Rows that become harder."""

    scale = torch.ones(1)

    def __len__(self):
        return 32

    def __getitem__(self, index):
        row = self.scale * torch.full((4,), index / 32) + NOISE * torch.rand(4)
        return row + getattr(self, "shift", 0), torch.tensor([index / 32])


SAMPLES = Samples()


def model(held=None):
    if held:
        hold_mini_batches(Path(held))
    return nn.Linear(4, 1)


def data():
    return SAMPLES


def loss(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)


def harder(samples):
    global NOISE
    NOISE += 0.01
    samples.scale = samples.scale + 0.25
    samples.shift = getattr(samples, "shift", 0) + 1


def after_reduce(_):
    harder(SAMPLES)


def loop(run, held=None, persists=False):
    trained, samples = model(held), Samples()
    loader = DataLoader(samples, 4, shuffle=True, num_workers=2, persistent_workers=persists)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    for mini_batch in run.loop(trained, optimizers=optimizer, data=loader):
        for inputs, targets in mini_batch:
            mini_batch.backward(loss(trained(inputs), targets))
        mini_batch.step(optimizer)
        harder(samples)
