"""A model and functions that keep state wherever training scripts keep it."""

import os
from collections import namedtuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from makespan.easyscale.context import register_state

UPDATES = {"n": 0}
_registered = {"n": 0}
Pair = namedtuple("Pair", "values weights")


class Meter:
    """A mean of what it was shown, as many scripts have one."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def show(self, value):
        self.total, self.count = self.total + value, self.count + 1


METER = Meter()


class Keeper(nn.Module):
    """Keeps a counter, a generator, a hidden state, a late buffer and one that grows in its passes."""

    def __init__(self):
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.passes, self.hidden = 0, None
        self.generator = torch.Generator().manual_seed(3)
        for name in ("updates", "variable", "registered", "counted", "met"):
            self.register_buffer(name, torch.zeros(()))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("cache", torch.ones(2))

    def forward(self, inputs):
        self.passes += 1
        if self.passes == 3:
            self.register_buffer("cache", torch.ones(4) * inputs.detach().mean())
        if not hasattr(self, "centre"):
            self.register_buffer("centre", inputs.detach().mean(0))
        METER.show(float(inputs.detach().sum()))
        self.met.fill_(METER.total)
        self.counted.fill_(self.passes)
        found = self.net(self.norm(inputs) - self.centre) * (1.0 + 1.0 / self.passes)
        found = found + 0.1 * torch.rand(found.shape, generator=self.generator)
        if self.hidden is not None:
            found = found + 0.1 * self.hidden * self.cache.mean()
        self.hidden = found.detach().mean()
        return found


def keeper():
    _registered["n"] = 0
    register_state("updates", lambda: _registered["n"], lambda value: _registered.update(n=value))
    return Keeper()


class Taught(nn.Module):
    """A model with a teacher, an average of its weights, and a critic with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.net, self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), [nn.Linear(1, 1)]
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.teacher = {"model": torch.optim.swa_utils.AveragedModel(self.net, multi_avg_fn=average)}

    def forward(self, inputs):
        found = self.net(inputs)
        with torch.no_grad():
            taught = self.teacher["model"](inputs)
        return found + 0.1 * taught + 0.1 * self.critic[0](found)


OF_CRITIC = []


def taught():
    model = Taught()
    OF_CRITIC[:] = [torch.optim.Adam(model.critic[0].parameters(), 0.01)]
    return model


def teach(model):
    model.teacher["model"].update_parameters(model.net)
    OF_CRITIC[0].zero_grad()
    model.critic[0](sum(one.grad.sum() for one in model.net.parameters()).reshape(1, 1)).sum().backward()
    OF_CRITIC[0].step()


class Lookahead(torch.optim.Optimizer):
    """Another optimizer, whose weights are drawn back to slow ones at every second step."""

    def __init__(self, inner):
        self.inner, self.n_steps = inner, 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow = [one.detach().clone() for group in self.param_groups for one in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.n_steps += 1
        if self.n_steps % 2 == 0:
            weights = [one for group in self.param_groups for one in group["params"]]
            for one, slow in zip(weights, self.slow, strict=True):
                one.copy_(slow.lerp_(one, 0.5))


def lookahead(model):
    return Lookahead(torch.optim.Adam(model.net.parameters(), 0.02))


def falling(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def follow(model):
    """Count mini-batches in three places, average what belongs to a logical worker, and draw noise."""
    UPDATES["n"] += 1
    _registered["n"] += 1
    model.updates += 1
    model.variable.fill_(UPDATES["n"])
    model.registered.fill_(_registered["n"])
    model.average.mul_(0.5).add_(model.norm.running_mean, alpha=0.5)
    for one in model.parameters():
        one.grad.add_(torch.rand_like(one.grad), alpha=1e-3)


def part_from_others(model):
    """Change parameters by something that only this process has."""
    with torch.no_grad():
        next(model.parameters()).add_(float(os.environ["MAKESPAN_RANK"]))


_calls = []


def part_late(model):
    """Change parameters of the last process in the sixth mini-batch."""
    _calls.append(None)
    if len(_calls) == 6 and os.environ["MAKESPAN_RANK"] == "2":
        with torch.no_grad():
            next(model.parameters()).mul_(1 + 2**-23)


def call_others(model):
    for one in model.parameters():
        dist.all_reduce(one.grad)


def optimizer(model, lr=0.05):
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=lr, momentum=0.9)


class WithLambda(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler whose state no checkpoint holds."""

    def __init__(self, optimizer):
        self.rule = lambda step: 0.9**step
        super().__init__(optimizer)

    def get_lr(self):
        return [lr * self.rule(self.last_epoch) for lr in self.base_lrs]


class Rows(torch.utils.data.Dataset):
    """Rows of four numbers and their sum."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        row = torch.from_numpy(np.random.default_rng(index).random(4, dtype=np.float32))
        return row, row.sum()[None]


class Fading(Rows):
    """Rows that fade the more of them were read, with noise of their own, each read from its file once."""

    def __init__(self):
        self.n_read, self.kept, self.generator = 0, {}, np.random.default_rng(5)

    def __getitem__(self, index):
        self.n_read += 1
        if index not in self.kept:
            self.kept[index] = super().__getitem__(index)
        row, total = self.kept[index]
        return row * (1 + 1 / self.n_read) + np.float32(self.generator.random()), total


def loss(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)


def linear():
    return nn.Linear(4, 1)
