"""A user's own chain of layers, with all that could depend on where it is cut."""

import torch
from torch import nn

from makespan.papers.oobleck.runtime import Chain

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
    """Returns another number of rows each time."""

    count = 0

    def forward(self, features):
        self.count += 1
        return features[: self.count]


def _plain(*middle, loss=nn.functional.mse_loss):
    layers = [lambda: nn.Linear(4, 4), *middle, lambda: nn.Linear(4, 1)]
    samples = [(torch.randn(4), torch.randn(1)) for _ in range(16)]
    return Chain(layers, loss, samples)


def with_statistics():
    return _plain(lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4)))


def with_averages():
    return _plain(Averages)


def with_ragged_rows():
    return _plain(Ragged, loss=lambda outputs, targets: outputs.square().mean())


def without_layers():
    return Chain([], loss, Words(64))


def of_numbers():
    return _plain(lambda: 3)


def no_chain():
    return nn.Linear(2, 2)
