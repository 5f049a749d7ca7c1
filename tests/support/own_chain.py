"""A user's own chain of layers, with all that could depend on where it is cut."""

import random
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from makespan.oobleck.chain import Chain

WIDTH, WORDS, LENGTH = 16, 24, 6


class Table(nn.Module):
    """Words to features; the table is also that of `Scores`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(WORDS, WIDTH))

    def forward(self, words, lengths):
        return nn.functional.embedding(words, self.weight), lengths


class Mixed(nn.Module):
    """Dropout, a buffer, and a second state without a gradient that only passes by."""

    def __init__(self):
        super().__init__()
        self.mix, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, features, lengths):
        # The result lies in memory as no transfer would leave it.
        mixed = torch.tanh(self.mix(features.transpose(0, 1) * self.scale)).transpose(0, 1)
        return features + self.drop(mixed), lengths


class Frozen(nn.Module):
    """Weights that are not trained."""

    def __init__(self):
        super().__init__()
        self.rotate = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, features, lengths):
        return features + 0.1 * self.rotate(features), lengths


class Scores(nn.Module):
    """Features to scores of words."""

    def __init__(self):
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(WIDTH), nn.Parameter(torch.zeros(WORDS, WIDTH))

    def forward(self, features, lengths):
        places = torch.arange(LENGTH) < lengths[:, None]
        return self.norm(features) @ self.weight.T, places


class Words:
    """Sequences that count upwards, with noise from torch."""

    def __init__(self, n_samples):
        self.n_samples = n_samples

    def __len__(self):
        return self.n_samples

    def __getitem__(self, index):
        words = (index + torch.arange(LENGTH + 1)) % WORDS
        noisy = torch.where(torch.rand(LENGTH) < 0.05, torch.randint(WORDS, (LENGTH,)), words[:-1])
        return (noisy, torch.tensor(2 + index % (LENGTH - 1))), words[1:]


def loss(outputs, targets):
    scores, places = outputs
    return nn.functional.cross_entropy(scores[places], targets[places])


def chain(n_samples=64, tied=True):
    return Chain(
        layers=[Table, Mixed, Frozen, Mixed, Mixed, Scores],
        loss=loss,
        samples=Words(n_samples),
        tied=[((0, "weight"), (5, "weight"))] if tied else [],
        optimizer=lambda weights: torch.optim.SGD(weights, lr=1.0, momentum=0.9, nesterov=True),
        rate=lambda iteration: 0.2 / (1 + 0.1 * iteration),
    )


class Averages(nn.Module):
    """Keeps a mean of what it saw."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, features):
        self.mean = 0.9 * self.mean + 0.1 * features.detach().mean()
        return features


class Ragged(nn.Module):
    """Returns one row of odd samples and two of even ones."""

    def forward(self, features):
        return features[: 2 - int(features[0, 0]) % 2]


class FromNumPyAndPython(nn.Module):
    """Draws from the global generators of NumPy and Python."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = self.drawn()

    def drawn(self):
        return float(np.random.uniform(0.9, 1.1)) * random.uniform(0.9, 1.1)  # noqa: NPY002

    def forward(self, features):
        return self.linear(features) * self.drawn() * self.scale


class OwnGenerator(nn.Module):
    """Draws from a generator of its own, which no position decides."""

    def __init__(self):
        super().__init__()
        self.linear, self.generator = nn.Linear(4, 4), np.random.default_rng(3)

    def forward(self, features):
        return self.linear(features) * float(self.generator.uniform(0.9, 1.1))


class Counting(nn.Module):
    """Anneals with a count of its passes that is kept in Python."""

    def __init__(self):
        super().__init__()
        self.linear, self.n_passes = nn.Linear(4, 4), 0

    def forward(self, features):
        self.n_passes += 1
        return self.linear(features) / self.n_passes


class WithMask(nn.Module):
    """Returns no mask beside its features."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, features, mask=None):
        return self.linear(features), None


class Silent(nn.Module):
    """Returns nothing."""

    def forward(self, features):
        return None


class Late(nn.Module):
    """Registers a buffer in its first pass."""

    def forward(self, features):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", features.detach().mean(0))
        return features


class Looked(nn.Module):
    """Looks rows up, with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)

    def forward(self, features):
        return features + self.table(features.detach().abs().long().clamp(max=7)).sum(1)


class Extra(nn.Linear):
    """Keeps state that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__(4, 4)

    def get_extra_state(self):
        return {"passes": 0}

    def set_extra_state(self, state):
        pass


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(context, features):
        return features.view_as(features)

    @staticmethod
    def backward(context, *gradients):
        return gradients[0] + torch.rand_like(gradients[0])


class NoisyBackward(nn.Module):
    """Adds noise to gradients in its backward pass, and in a hook of its weight."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.mix.weight.register_hook(lambda gradient: gradient + random.random())

    def forward(self, features):
        return torch.tanh(self.mix(_Noise.apply(features)))


class Numbered(torch.optim.SGD):
    """Keeps the number of its steps beside its weights."""

    def __init__(self, weights):
        super().__init__(weights, lr=0.1)
        self.n_steps = 0

    def step(self, closure=None):
        self.n_steps += 1
        super().step()


class Grouped(torch.optim.SGD):
    """Keeps the number of its steps in its groups of weights."""

    def __init__(self, weights):
        super().__init__(weights, lr=0.1)
        self.param_groups[0]["k"] = 0

    def step(self, closure=None):
        self.param_groups[0]["k"] += 1
        super().step()


class Wrapping(torch.optim.Optimizer):
    """Steps by another optimizer."""

    def __init__(self, weights):
        self.inner = torch.optim.Adam(weights)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step()


class CountingWeights(torch.optim.SGD):
    """Keeps a number per weight that is no tensor."""

    def step(self, closure=None):
        super().step()
        for one in self.param_groups[0]["params"]:
            self.state[one]["n"] = self.state[one].get("n", 0) + 1


class Counted:
    """Samples that depend on how many were read."""

    n_read = 0

    def __len__(self):
        return 16

    def __getitem__(self, index):
        self.n_read += 1
        return torch.ones(4) / self.n_read, torch.ones(1)


def _plain(*middle, loss=nn.functional.mse_loss):
    layers = [lambda: nn.Linear(4, 4), *middle, lambda: nn.Linear(4, 1)]
    samples = [(torch.randn(4), torch.randn(1)) for _ in range(16)]
    return Chain(layers, loss, samples)


def with_statistics():
    return _plain(lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4)))


def with_averages():
    return _plain(Averages)


def with_ragged_rows():
    samples = [(torch.full((4,), float(index)), torch.zeros(1)) for index in range(16)]
    layers = [nn.Identity, Ragged, lambda: nn.Linear(4, 1)]
    return Chain(layers, lambda outputs, targets: outputs.square().mean(), samples)


def with_draws():
    return _even(FromNumPyAndPython, FromNumPyAndPython)


def with_generator():
    return _even(OwnGenerator)


def with_count():
    return _even(Counting)


def with_mask():
    return _even(WithMask)


def with_nothing():
    return _even(Silent)


def with_late_buffer():
    return _even(Late)


def with_sparse_gradients():
    return _even(Looked)


def with_extra_state():
    return _even(Extra)


def with_double():
    return _even(lambda: nn.Linear(4, 4).double())


def with_lazy_layer():
    return _even(lambda: nn.LazyLinear(4))


def with_loss_and_logs():
    return _even(loss=lambda outputs, targets: (nn.functional.mse_loss(outputs, targets), {"n": 1}))


def with_triples():
    return _even(samples=[(torch.ones(4), torch.ones(1), torch.ones(1)) for _ in range(16)])


def with_dictionaries():
    return _even(samples=[{"inputs": torch.ones(4), "targets": torch.ones(1)} for _ in range(16)])


def with_noisy_backward():
    return _even(NoisyBackward, NoisyBackward)


def with_optimizer(name):
    known = {
        "lbfgs": torch.optim.LBFGS, "attribute": Numbered, "group": Grouped, "inner": Wrapping,
        "number": CountingWeights, "none": lambda weights: None, "adam": torch.optim.Adam,
    }  # fmt: skip
    return replace(_even(), optimizer=known[name])


def with_annealed_loss():
    calls = []

    def annealed(outputs, targets):
        calls.append(1)
        return nn.functional.mse_loss(outputs, targets) / len(calls)

    return _even(loss=annealed)


def with_random_loss():
    def drawn(outputs, targets):
        return nn.functional.mse_loss(outputs, targets + random.random() * torch.rand(targets.shape))

    return _even(loss=drawn)


class _Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, outputs, targets):
        return self.weight.square().sum() * nn.functional.mse_loss(outputs, targets)


def with_trained_loss():
    return _even(loss=_Weighted())


def with_counted_rate():
    calls = []

    def halved(iteration):
        calls.append(iteration)
        return 0.5 ** len(calls)

    return replace(_even(), rate=halved)


def with_counted_samples():
    return _even(samples=Counted())


def _even(*middle, loss=nn.functional.mse_loss, samples=None):
    """Return a chain whose samples are the same in every process."""
    layers = [lambda: nn.Linear(4, 4), *middle, lambda: nn.Linear(4, 1)]
    drawn = torch.Generator().manual_seed(5)
    own = [(torch.randn(4, generator=drawn), torch.randn(1, generator=drawn)) for _ in range(16)]
    return Chain(layers, loss, own if samples is None else samples)


def without_layers():
    return Chain([], loss, Words(64))


def of_numbers():
    return _plain(lambda: 3)


def no_chain():
    return nn.Linear(2, 2)
