"""Digests of what a process draws before it trains: weights, first batches and, as a control, gradients.

Run as a program it prints one line a stand-in; a test runs it under several kernel sets.
"""

import hashlib
import os
import random
import sys

import torch
from numpy.random.mtrand import _rand
from torch.utils.data import DataLoader

from makespan.training.zoo import STAND_INS, StandIn, build_stand_in, stand_in_data, stand_in_loss

__all__ = ["digests", "flat", "seed_all"]


def seed_all(python, numpy, of_torch):
    """Seed the three global random states."""
    random.seed(python)
    _rand.seed(numpy)
    torch.manual_seed(of_torch)


def flat(values):
    """All tensors of nested tuples and lists, in order."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in flat(value)]


def _digest(tensors):
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().numpy().tobytes())
    return whole.hexdigest()[:16]


def digests(name, seed=0):
    """Digests of weights, of the first two batches and of the gradients of the first."""
    spec = StandIn(name, width=16)
    model = build_stand_in(spec, seed)
    seed_all(seed, seed, seed)
    data = stand_in_data(spec, 16, seed)
    batches = list(DataLoader(data, 8, generator=torch.Generator().manual_seed(seed)))
    weights = _digest(model.parameters())
    stand_in_loss(spec, model(batches[0][0]), batches[0][1]).backward()
    return weights, _digest(flat(batches)), _digest(weight.grad for weight in model.parameters())


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = os.environ.get("ONEDNN") != "off"
    lines = [
        torch.backends.cpu.get_cpu_capability(),
        *(" ".join([each, *digests(each)]) for each in STAND_INS),
    ]
    sys.stdout.write("\n".join(lines))
