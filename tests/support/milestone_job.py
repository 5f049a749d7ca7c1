"""A job whose state changes late, or lies in what its functions hold.

Mini-batch 5 is one of those in which nobody compares the values that user code keeps.
"""

import enum
import functools
import os
from pathlib import Path

import torch
from killers import hold_mini_batches
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

LATE = 5
DONE, WEIGHT = 0, 1.0


class Samples(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((4,), index / 32), torch.tensor([index / 32])


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def optimizer(trained):
    return torch.optim.SGD(trained.parameters(), lr=0.05)


def loss(outputs, targets):
    return nn.functional.mse_loss(outputs, targets) * WEIGHT


def at_a_milestone(trained):
    """Change an attribute of a module and a variable, once."""
    global DONE, WEIGHT
    DONE += 1
    if DONE == LATE:
        trained[1].p, WEIGHT = 0.1, 0.5


def loop(run, kind="module"):
    """Change something after mini-batch 5, in the model or in a variable."""
    if folder := os.environ.get("HELD_MINI_BATCHES"):
        hold_mini_batches(Path(folder))
    trained = model()
    weight, steps = 1.0 if kind == "number" else torch.ones(()), optimizer(trained)
    for mini_batch in (batches := run.loop(trained, optimizers=steps, data=Samples())):
        for inputs, targets in mini_batch:
            mini_batch.backward(loss(trained(inputs), targets) * weight)
        mini_batch.step(steps)
        if batches.step == LATE and kind == "module":
            trained[1].p = 0.1
        elif batches.step == LATE:
            weight = weight * 0.5


# --- losses that hold what they change ---


def counting():
    """Return a loss with a number in its closure."""
    calls = 0

    def counted(outputs, targets):
        nonlocal calls
        calls += 1
        return loss(outputs, targets) * (1 + calls / 8)

    return counted


def repeated(function):
    """Decorate a loss, with a list in the closure."""
    calls = []

    @functools.wraps(function)
    def counted(outputs, targets):
        calls.append(0.125)
        return function(outputs, targets) * (1 + sum(calls))

    return counted


def of_list(calls, outputs, targets):
    calls.append(0.125)
    return loss(outputs, targets) * (1 + sum(calls))


class Counter:
    calls = 0

    def loss(self, outputs, targets):
        self.calls += 1
        return loss(outputs, targets) * (1 + self.calls / 8)


closure = counting()
partial = functools.partial(of_list, [])
method = Counter().loss


@repeated
def decorated(outputs, targets):
    return closure(outputs, targets)


def default(outputs, targets, calls=[]):  # noqa: B006 - what is tested
    return of_list(calls, outputs, targets)


class Slotted:
    __slots__ = ("calls",)


class Phase(enum.Enum):
    WARM = 1.25
    COLD = 0.75


slots, phase = Slotted(), Phase.WARM
slots.calls = 0


def slotted(outputs, targets):
    slots.calls += 1
    return loss(outputs, targets) * (1 + slots.calls / 8)


def phased(outputs, targets):
    global phase
    phase = Phase.COLD if phase is Phase.WARM else Phase.WARM
    return loss(outputs, targets) * phase.value


# --- models with hooks, and with functions as attributes ---


def with_attribute():
    """Return a model of torch's modules, of which a hook keeps a mean in an attribute of one."""
    trained = model()
    trained[0].mean = torch.zeros(8)

    def follow(module, inputs, outputs):
        module.mean = module.mean * 0.75 + outputs.detach().mean(0)
        return outputs + module.mean

    trained[0].register_forward_hook(follow)
    return trained


def with_closure():
    trained, kept = model(), [torch.zeros(8)]

    def follow(module, inputs, outputs):
        kept[0] = kept[0] * 0.75 + outputs.detach().mean(0)
        return outputs + kept[0]

    trained[0].register_forward_hook(follow)
    return trained


class Weighted(nn.Module):
    def __init__(self, weigh):
        super().__init__()
        self.inner, self.weigh = model(), weigh

    def forward(self, inputs):
        return self.inner(self.weigh(inputs))


def with_function():
    calls = 0

    def weigh(inputs):
        nonlocal calls
        calls += 1
        return inputs * (1 + calls / 8)

    return Weighted(weigh)


# --- data sets in data sets, and with functions as attributes ---


def doubled(row):
    return row * 2


class Altered(Samples):
    alter, factor = None, 1.0

    def __getitem__(self, index):
        row, target = super().__getitem__(index)
        return (row if self.alter is None else self.alter(row)) * self.factor, target


PART = Subset(Altered(), range(32))


def part():
    return PART


def alter(_):
    """Double the samples from the second epoch on, and make them smaller in each epoch."""
    global DONE
    DONE += 1
    if DONE % 4 == 0:
        PART.dataset.alter = doubled
        PART.dataset.factor *= 0.5


# --- functions that join samples, with state that training code changes ---


class Scaled:
    factor = 1.0

    def __call__(self, samples):
        inputs, targets = default_collate(samples)
        return inputs * self.factor, targets


def scaled_by(factor, samples):
    inputs, targets = default_collate(samples)
    return inputs * factor[0], targets


def collating(run, kind="object", n_loaders=2):
    """Change the function that joins samples in each mini-batch."""
    trained, collate, factor = model(), Scaled(), [1.0]
    joins = {"object": collate, "partial": functools.partial(scaled_by, factor)}
    joins["closure"] = lambda samples: scaled_by(factor, samples)
    steps = optimizer(trained)
    loader = DataLoader(Samples(), 4, shuffle=True, num_workers=n_loaders, collate_fn=joins[kind])
    for mini_batch in run.loop(trained, optimizers=steps, data=loader):
        for inputs, targets in mini_batch:
            mini_batch.backward(loss(trained(inputs), targets))
        mini_batch.step(steps)
        collate.factor *= 0.75
        factor[0] *= 0.75


def harder(run):
    """What `collating` trains, by a factor that follows from the number of the mini-batch."""
    trained = model()
    steps = optimizer(trained)
    for mini_batch in (batches := run.loop(trained, optimizers=steps, data=Samples())):
        factor = 0.75 ** ((batches.step - 1) // 4 * 4)
        for inputs, targets in mini_batch:
            mini_batch.backward(loss(trained(inputs * factor), targets))
        mini_batch.step(steps)
