"""Training scripts with loops of their own, as people write them: each function trains one kind of task.

`stock_scripts` has the same tasks as stock scripts; both share the models, data and losses of this file.
"""

import copy
import math
import os
import random
import signal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

CLASSES, WIDTH = 4, 12


class Rows(Dataset):
    """Vectors whose largest group of entries decides the class; samples draw from all random states."""

    def __init__(self, n=60, seed=0):
        self.inputs = torch.from_numpy(np.random.default_rng(seed).random((n, WIDTH), dtype=np.float32))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = 0.01 * random.random() + 0.01 * float(np.random.uniform())  # noqa: NPY002 - state that is swapped
        row = self.inputs[index]
        return row + noise + 0.01 * torch.rand(WIDTH), int(row.view(CLASSES, -1).sum(1).argmax())


class Sentences(Dataset):
    """Sequences of tokens of different lengths."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.from_numpy(np.random.default_rng(index).integers(1, 11, 3 + index % 4))


class Stream:
    """Endless work dealt out by rank, with the state protocol of torchdata; epochs are not equally long."""

    def __init__(self, rank, n):
        self.rank, self.n, self.epoch, self.place = rank, n, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.place, self.epoch = state["place"], state["epoch"]

    def __iter__(self):
        while self.place < 3 + self.rank:
            self.place += 1
            rng = np.random.default_rng((self.epoch, self.place * self.n + self.rank))
            inputs = torch.from_numpy(rng.random((4, WIDTH), dtype=np.float32)) + 0.01 * torch.rand(4, WIDTH)
            yield inputs, inputs.view(4, CLASSES, -1).sum(2).argmax(1)
        self.place = 0


class Net(nn.Module):
    """A classifier with BatchNorm and dropout."""

    def __init__(self, width=16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, width), nn.BatchNorm1d(width), nn.ReLU())
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, inputs):
        return self.head(self.dropout(self.body(inputs)))


class Mixture(nn.Module):
    """Experts with a gate; every expert sees every row, so that all have a gradient."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(3))

    def forward(self, inputs):
        share = self.gate(inputs).softmax(-1)
        outputs = torch.stack([expert(inputs) for expert in self.experts], 1)
        chosen = F.one_hot(share.argmax(-1), 3).to(share.dtype)
        balance = 3 * (chosen.mean(0) * share.mean(0)).sum()
        return (outputs * (share * chosen + 0.1 * share)[..., None]).sum(1), balance


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, inputs):
        return self.base(inputs) + inputs @ self.down.T @ self.up.T


class Speaker(nn.Module):
    """A language model whose last layer has the weights of the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.mix = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.mix(self.embedding(tokens))[0])


class Descent(torch.optim.Optimizer):
    """An optimizer of one's own: signs of an average of gradients."""

    def __init__(self, params, lr=0.01, decay=0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.mul_(group["decay"]).add_(parameter.grad, alpha=1 - group["decay"])
                parameter.sub_(average.sign(), alpha=group["lr"])


class Masked(nn.Module):
    """A small transformer whose layers are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 12)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return self.head(hidden)


class Coder(nn.Module):
    """A variational autoencoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 6), nn.Linear(3, WIDTH)

    def forward(self, inputs):
        mean, spread = self.encoder(inputs).chunk(2, -1)
        code = mean + spread.exp() * torch.randn_like(mean)
        return self.decoder(code), (mean**2 + (2 * spread).exp() - 2 * spread - 1).sum() / 2


class Deep(nn.Module):
    """Layers that are left out at random in training, so that their parameters have no gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            if not self.training or random.random() < 0.5:
                hidden = hidden + block(hidden).relu()
        return self.head(hidden)


class Queued(nn.Module):
    """A classifier with a queue of former outputs in a buffer, one for each rank."""

    def __init__(self):
        super().__init__()
        self.body = Net()
        self.register_buffer("queue", torch.randn(8, CLASSES))

    def forward(self, inputs):
        first, second = self.body(inputs), self.body(inputs + 0.05 * torch.randn_like(inputs)).detach()
        logits = torch.cat([(first * second).sum(1, keepdim=True), first @ self.queue.T], 1)
        self.queue = torch.cat([second, self.queue])[:8]
        return F.cross_entropy(logits, torch.zeros(len(first), dtype=torch.long))


class Spread(nn.Module):
    """The logarithms of the variances of two tasks."""

    def __init__(self):
        super().__init__()
        self.of_classes, self.of_size = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, outputs, targets):
        """Return the loss of both tasks together."""
        first = F.cross_entropy(outputs, targets) * (-self.of_classes).exp() + self.of_classes
        return first + outputs.pow(2).mean() * (-self.of_size).exp() + self.of_size


class Slow:
    """Weights that follow those of an optimizer half the way every two steps, and pull them back."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0
        self.weights = [each.detach().clone() for each in self.trained()]

    def trained(self):
        return [each for group in self.optimizer.param_groups for each in group["params"]]

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, fast in zip(self.weights, self.trained(), strict=True):
                fast.copy_(slow.lerp_(fast, 0.5))

    def state_dict(self):
        return {"steps": self.steps, "weights": self.weights}

    def load_state_dict(self, state):
        self.steps, self.weights = state["steps"], state["weights"]


def padded(sentences):
    return nn.utils.rnn.pad_sequence(sentences, batch_first=True)


def gan():
    generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, WIDTH))
    critic = nn.Sequential(nn.Linear(WIDTH, 16), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    return critic, generator


def adapted():
    model = nn.Sequential(Adapted(nn.Linear(WIDTH, 16)), nn.ReLU(), Adapted(nn.Linear(16, CLASSES)))
    return model, [each for each in model.parameters() if each.requires_grad]


def adversarial(critic, fake, target):
    logits = critic(fake)
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def contrastive(first, second):
    first, second = F.normalize(first, dim=1), F.normalize(second, dim=1)
    return F.cross_entropy(first @ second.T / 0.5, torch.arange(len(first)))


def spoken(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


def distilling(teacher, student, inputs):
    with torch.no_grad():
        wanted = teacher(inputs).softmax(-1)
    return F.cross_entropy(student(inputs), wanted)


def mixing(model, inputs, targets):
    """Return the loss of rows that are mixed with others of the batch."""
    share = float(np.random.beta(0.4, 0.4))  # noqa: NPY002 - state that is swapped
    order = torch.randperm(len(inputs))
    outputs = model(share * inputs + (1 - share) * inputs[order])
    losses = [F.cross_entropy(outputs, each, label_smoothing=0.1) for each in (targets, targets[order])]
    return share * losses[0] + (1 - share) * losses[1]


def guessing(model, tokens):
    """Return the loss of tokens that are hidden at random, the first one always."""
    hidden = (torch.rand(tokens.shape) < 0.3) & (tokens > 0)
    hidden[:, 0] = True
    return F.cross_entropy(model(tokens.masked_fill(hidden, 11))[hidden], tokens[hidden])


def coding(model, inputs, weight):
    outputs, divergence = model(inputs)
    return F.mse_loss(outputs, inputs, reduction="sum") + weight * divergence


def steepness(critic, real, fake):
    """Return the gradient penalty of a critic, whose backward pass is a second derivative."""
    between = torch.lerp(real, fake, torch.rand(len(real), 1)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return 10 * ((slope.norm(dim=1) - 1) ** 2).mean()


def denoiser():
    return nn.Sequential(nn.Linear(WIDTH + 1, 16), nn.SiLU(), nn.Linear(16, WIDTH)).double()


def denoising(model, inputs):
    """Return the loss of a diffusion model, in double precision."""
    inputs, time = inputs.double(), torch.randint(1, 10, (len(inputs), 1)).double() / 10
    noise = torch.randn_like(inputs)
    return F.mse_loss(model(torch.cat([(1 - time).sqrt() * inputs + time.sqrt() * noise, time], 1)), noise)


def acting(model, inputs, targets, baseline):
    """Return the loss of a policy whose actions are drawn, and the mean reward."""
    choice = torch.distributions.Categorical(logits=model(inputs))
    action = choice.sample()
    reward = (action == targets).float()
    return -(choice.log_prob(action) * (reward - baseline)).mean(), reward.mean()


@torch.no_grad()
def climb(model, size=0.05):
    """Move the weights along their gradients, and return what they were."""
    before = [each.clone() for each in model.parameters()]
    norm = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
    for each in model.parameters():
        each.add_(each.grad, alpha=size / float(norm))
    return before


@torch.no_grad()
def put_back(model, before):
    for each, was in zip(model.parameters(), before, strict=True):
        each.copy_(was)


def warm_up(optimizer, steps=3):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))


@torch.no_grad()
def follow(average, model, decay=0.8):
    for own, new in zip(average.parameters(), model.parameters(), strict=True):
        own.lerp_(new, 1 - decay)
    for own, new in zip(average.buffers(), model.buffers(), strict=True):
        own.copy_(new)


@torch.no_grad()
def evaluate(model):
    """Return the mean loss on other rows, which are drawn anew."""
    model.eval()
    inputs, targets = torch.utils.data.default_collate([Rows(16, seed=9)[index] for index in range(16)])
    loss = F.cross_entropy(model(inputs), targets).item()
    model.train()
    return loss


def groups_of(model):
    """Return the parameters that are matrices, and the others."""
    parameters = list(model.parameters())
    return [each for each in parameters if each.ndim == 2], [each for each in parameters if each.ndim != 2]


# --- scripts ------------------------------------------------------------------------------------------------


def ema(run):
    """An average of weights and statistics, which is evaluated every two mini-batches."""
    model = Net()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loop = run.loop(model, optimizers=optimizer, data=Rows(), shared={"ema": average})
    for mini_batch in loop:
        for inputs, targets in mini_batch:
            mini_batch.backward(F.cross_entropy(model(inputs), targets))
        mini_batch.step(optimizer)
        follow(average, model)
        if loop.step % 2 == 0:
            loop.state.setdefault("scores", []).append(evaluate(average))


def two_players(run):
    """A GAN: two models, two optimizers, two passes over the same mini-batch."""
    critic, generator = gan()
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.9))
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9))
    loop = run.loop(
        {"critic": critic, "generator": generator},
        optimizers={"critic": of_critic, "generator": of_generator},
        data=Rows(),
    )
    for mini_batch in loop:
        for real, _ in mini_batch:
            fake = generator(torch.randn(len(real), 3)).detach()
            mini_batch.backward(adversarial(critic, real, 1.0) + adversarial(critic, fake, 0.0))
        mini_batch.step(of_critic)
        for real, _ in mini_batch:
            fake = generator(torch.randn(len(real), 3))
            mini_batch.backward(adversarial(critic, fake, 1.0))
        mini_batch.step(of_generator)


def accumulation(run):
    """Two micro-batches in a turn, a warm-up, and clipped gradients."""
    model = Mixture()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = warm_up(optimizer)
    loop = run.loop(model, optimizers=optimizer, schedulers=scheduler, data=Rows())
    for mini_batch in loop:
        optimizer.zero_grad()
        for inputs, targets in mini_batch:
            for part, labels in zip(inputs.chunk(2), targets.chunk(2), strict=True):
                outputs, balance = model(part)
                mini_batch.backward((F.cross_entropy(outputs, labels) + balance) / 2)
        mini_batch.sum(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()


def frozen(run):
    """The first layer keeps its weights, and classes have weights in the loss."""
    model, weights = Net(), torch.tensor([1.0, 2.0, 0.5, 1.0])
    model.body[0].requires_grad_(False)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for mini_batch in run.loop(model, optimizers=optimizer, data=Rows()):
        for inputs, targets in mini_batch:
            mini_batch.backward(F.cross_entropy(model(inputs), targets, weight=weights))
        mini_batch.step(optimizer)


def mixture(run):
    """Experts with a loss that balances them."""
    model = Mixture()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for mini_batch in run.loop(model, optimizers=optimizer, data=Rows()):
        for inputs, targets in mini_batch:
            outputs, balance = model(inputs)
            mini_batch.backward(F.cross_entropy(outputs, targets) + 0.1 * balance)
        mini_batch.step(optimizer)


def low_rank(run):
    """Adapters of low rank beside frozen weights."""
    model, trained = adapted()
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    for mini_batch in run.loop(model, optimizers=optimizer, data=Rows()):
        for inputs, targets in mini_batch:
            mini_batch.backward(F.cross_entropy(model(inputs), targets))
        mini_batch.step(optimizer)


def streamed(run):
    """Iterable data with a state."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for mini_batch in run.loop(model, optimizers=optimizer, data=Stream):
        for inputs, targets in mini_batch:
            mini_batch.backward(F.cross_entropy(model(inputs), targets))
        mini_batch.step(optimizer)


def half(run):
    """Forward passes in bfloat16."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for mini_batch in run.loop(model, optimizers=optimizer, data=Rows()):
        for inputs, targets in mini_batch:
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(inputs), targets)
            mini_batch.backward(loss)
        mini_batch.step(optimizer)


def scaled(run):
    """Scaled losses, one of which overflows; clipped gradients and an optimizer of one's own."""
    model = Net()
    optimizer = Descent(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    loop = run.loop(model, optimizers=optimizer, data=Rows(), scaler=scaler)
    for mini_batch in loop:
        for inputs, targets in mini_batch:
            loss = F.cross_entropy(model(inputs), targets)
            mini_batch.backward(loss * (1e36 if loop.step == 3 else 1.0))
        mini_batch.sum(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        mini_batch.step(optimizer)


def stopped(run, enough=8):
    """Ends when the accuracy of all logical workers together is high enough."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loop = run.loop(model, optimizers=optimizer, data=Rows())
    for mini_batch in loop:
        for inputs, targets in mini_batch:
            outputs = model(inputs)
            mini_batch.backward(F.cross_entropy(outputs, targets))
            mini_batch.report(hits=(outputs.argmax(1) == targets).sum())
        mini_batch.step(optimizer)
        loop.state["best"] = max(loop.state.get("best", 0), sum(mini_batch.reported("hits")))
        if loop.state["best"] >= enough:
            break


def tied(run):
    """Tied weights, and batches joined by a function of one's own."""
    model = Speaker()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for mini_batch in run.loop(model, optimizers=optimizer, data=Sentences(), collate=padded):
        for tokens in mini_batch:
            mini_batch.backward(spoken(model, tokens))
        mini_batch.step(optimizer)


def scheduled(run):
    """Dropout that grows, batches that grow, and two optimizers with a schedule each on one model."""
    model = Net()
    matrices, others = groups_of(model)
    optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 10),
        torch.optim.lr_scheduler.StepLR(optimizers[1], 2, gamma=0.5),
    ]
    loop = run.loop(model, optimizers=optimizers, schedulers=schedulers, data=Rows())
    for mini_batch in loop:
        model.dropout.p = 0.1 * math.sqrt(loop.step)
        for inputs, targets in mini_batch:
            size = 2 if loop.step < 3 else 4
            mini_batch.backward(F.cross_entropy(model(inputs[:size]), targets[:size]))
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            mini_batch.step(optimizer)
            scheduler.step()


def views(run):
    """A contrastive loss over the batch of each logical worker."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for mini_batch in run.loop(model, optimizers=optimizer, data=Rows()):
        for inputs, _ in mini_batch:
            first, second = (model(inputs + 0.05 * torch.randn_like(inputs)) for _ in range(2))
            mini_batch.backward(contrastive(first, second))
        mini_batch.step(optimizer)


def given(run, path=None):
    """A start from given weights, whose file only the first start needs."""
    model = Net()
    if run.step == 0:
        model.load_state_dict(torch.load(path, weights_only=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for mini_batch in run.loop(model, optimizers=optimizer, data=Rows()):
        for inputs, targets in mini_batch:
            mini_batch.backward(F.cross_entropy(model(inputs), targets))
        mini_batch.step(optimizer)


def distilled(run):
    """A student learns from a frozen teacher, which no checkpoint has to hold."""
    teacher, student = Net(24).eval().requires_grad_(False), Net(8)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    for mini_batch in run.loop(student, optimizers=optimizer, data=Rows()):
        for inputs, _ in mini_batch:
            mini_batch.backward(distilling(teacher, student, inputs))
        mini_batch.step(optimizer)


def plateau(run):
    """torch's average of weights, and a learning rate that falls where its evaluation gets no better."""
    model = Net()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
    loop = run.loop(
        model, optimizers=optimizer, schedulers=scheduler, data=Rows(), shared={"average": average}
    )
    for mini_batch in loop:
        for inputs, targets in mini_batch:
            mini_batch.backward(F.cross_entropy(model(inputs), targets))
        mini_batch.step(optimizer)
        average.update_parameters(model)
        scheduler.step(evaluate(average))


def mixed(run):
    """Rows that are mixed with each other, smoothed labels, and one clipped rate for two groups."""
    model = Net()
    matrices, others = groups_of(model)
    groups = [{"params": matrices, "weight_decay": 0.1, "lr": 0.02}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, amsgrad=True)
    for mini_batch in run.loop(model, optimizers=optimizer, data=Rows()):
        for inputs, targets in mini_batch:
            mini_batch.backward(mixing(model, inputs, targets))
        mini_batch.sum(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()


def masked(run):
    """A masked language model with recomputed layers and a one-cycle schedule."""
    model = Masked()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)
    loop = run.loop(model, optimizers=optimizer, schedulers=scheduler, data=Sentences(), collate=padded)
    for mini_batch in loop:
        for tokens in mini_batch:
            mini_batch.backward(guessing(model, tokens))
        mini_batch.step(optimizer)
        scheduler.step()


def variational(run):
    """A variational autoencoder whose divergence counts more and more."""
    model = Coder()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loop = run.loop(model, optimizers=optimizer, data=Rows())
    for mini_batch in loop:
        weight = min(1.0, loop.step / 5)
        for inputs, _ in mini_batch:
            mini_batch.backward(coding(model, inputs, weight))
        mini_batch.step(optimizer)


def penalised(run):
    """A GAN with a gradient penalty."""
    critic, generator = gan()
    models = {"critic": critic, "generator": generator}
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in models.values()]
    for mini_batch in run.loop(
        {"critic": critic, "generator": generator}, optimizers=optimizers, data=Rows()
    ):
        for real, _ in mini_batch:
            fake = generator(torch.randn(len(real), 3)).detach()
            loss = critic(fake).mean() - critic(real).mean()
            mini_batch.backward(loss + steepness(critic, real, fake))
        mini_batch.step(optimizers[0])
        for real, _ in mini_batch:
            mini_batch.backward(-critic(generator(torch.randn(len(real), 3))).mean())
        mini_batch.step(optimizers[1])


def sharpness(run):
    """A step by the gradients of a second pass, at weights that the first pass made worse."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for mini_batch in run.loop(model, optimizers=optimizer, data=Rows()):
        for inputs, targets in mini_batch:
            mini_batch.backward(F.cross_entropy(model(inputs), targets))
        mini_batch.sum(optimizer)
        before = climb(model)
        for inputs, targets in mini_batch:
            mini_batch.backward(F.cross_entropy(model(inputs), targets))
        mini_batch.sum(optimizer)
        put_back(model, before)
        optimizer.step()


def skipped(run):
    """Layers that each logical worker leaves out at random."""
    model = Deep()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for mini_batch in run.loop(model, optimizers=optimizer, data=Rows()):
        for inputs, targets in mini_batch:
            mini_batch.backward(F.cross_entropy(model(inputs), targets))
        mini_batch.step(optimizer)


def weighed(run):
    """Two tasks whose weights in the loss are trained as well."""
    model, spread = Net(), Spread()
    optimizer = torch.optim.Adam([*model.parameters(), *spread.parameters()], lr=0.01)
    for mini_batch in run.loop({"model": model, "spread": spread}, optimizers=optimizer, data=Rows()):
        for inputs, targets in mini_batch:
            mini_batch.backward(spread(model(inputs), targets))
        mini_batch.step(optimizer)


def diffusion(run):
    """A diffusion model, and slow weights that follow its own every two steps."""
    model = denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    slow = Slow(optimizer)
    for mini_batch in run.loop(model, optimizers=optimizer, data=Rows(), shared={"slow": slow}):
        for inputs, _ in mini_batch:
            mini_batch.backward(denoising(model, inputs))
        mini_batch.sum(optimizer)
        slow.step()


def rewarded(run):
    """A policy gradient, whose baseline follows the rewards of all logical workers."""
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    loop = run.loop(model, optimizers=optimizer, data=Rows())
    for mini_batch in loop:
        baseline = loop.state.setdefault("baseline", 0.0)
        for inputs, targets in mini_batch:
            loss, reward = acting(model, inputs, targets, baseline)
            mini_batch.backward(loss)
            mini_batch.report(reward=reward)
        mini_batch.step(optimizer)
        loop.state["baseline"] = (
            0.9 * baseline + 0.1 * sum(mini_batch.reported("reward")) / run.n_logical_workers
        )


def queued(run):
    """A contrastive loss against former outputs, kept in a buffer for each logical worker."""
    model = Queued()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for mini_batch in run.loop(model, optimizers=optimizer, data=Rows()):
        for inputs, _ in mini_batch:
            mini_batch.backward(model(inputs))
        mini_batch.step(optimizer)


def loaded(run, kind):
    """A loop over a data loader, or over its data set."""
    model, data = Net(), Rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "loader":
        data = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    for mini_batch in run.loop(model, optimizers=optimizer, data=data):
        for inputs, targets in mini_batch:
            mini_batch.backward(F.cross_entropy(model(inputs), targets))
        mini_batch.step(optimizer)


def killed(run, place=None, file="unused"):
    """A loop in which a process kills itself once, or gets a signal; it evaluates and keeps a best score."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loop = run.loop(model, optimizers=optimizer, data=Rows())

    def perhaps(where):
        if where != place or loop.step != 3:
            return
        try:
            open(file, "x").close()
        except FileExistsError:  # another process was faster, or it was before a restart
            return
        os.kill(os.getpid(), signal.SIGTERM if place == "signal" else signal.SIGKILL)

    for mini_batch in loop:
        for inputs, targets in mini_batch:
            perhaps("turn")
            mini_batch.backward(F.cross_entropy(model(inputs), targets))
        mini_batch.sum(optimizer)
        perhaps("between")
        perhaps("signal")
        optimizer.step()
        score = evaluate(model)
        perhaps("evaluation")
        loop.state["best"] = min(score, loop.state.get("best", score))
        loop.state.setdefault("before", []).append(sum(loop.losses))
    if place == "signal" and dist.get_rank() == 0:
        with open(f"{file}.done", "a") as stream:
            stream.write(f"{loop.step}\n")


class Fitting:
    """A loop in a class, which counts and keeps a constant tensor."""

    def __init__(self, run):
        self.run, self.count, self.weights = run, 0, torch.ones(CLASSES)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def fit(self):
        for mini_batch in self.run.loop(self.model, optimizers=self.optimizer, data=Rows()):
            for inputs, targets in mini_batch:
                mini_batch.backward(F.cross_entropy(self.model(inputs), targets, weight=self.weights))
            mini_batch.step(self.optimizer)
            self.count += 1


def fitted(run):
    Fitting(run).fit()


# --- scripts that are refused ------------------------------------------------------------------------------


def plain_parts():
    model = nn.Linear(WIDTH, CLASSES)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def gathered(run):
    """A contrastive loss over the batches of all processes."""
    model, optimizer = plain_parts()
    for mini_batch in run.loop(model, optimizers=optimizer, data=Rows()):
        for inputs, _ in mini_batch:
            first, second = model(inputs), model(inputs + torch.randn_like(inputs))
            every = [torch.empty_like(second) for _ in range(dist.get_world_size())]
            dist.all_gather(every, second)
            mini_batch.backward(contrastive(first, torch.cat(every)))
        mini_batch.step(optimizer)


class Doubling(torch.utils.data.DataLoader):
    def __iter__(self):
        return ((2 * inputs, targets) for inputs, targets in super().__iter__())


def wrong(run, kind):
    """A loop with one mistake."""
    model, optimizer = plain_parts()
    other = nn.Linear(2, 2)
    arguments = {"model": model, "optimizers": optimizer, "data": Rows()}
    if kind == "no loop":
        return
    if kind == "other parameters":
        arguments["optimizers"] = torch.optim.SGD(other.parameters(), lr=0.1)
    if kind == "unknown scheduler":
        arguments["schedulers"] = warm_up(torch.optim.SGD(other.parameters(), lr=0.1))
    if kind == "hidden scheduler":
        warm_up(optimizer)
    if kind == "no length":
        arguments["data"] = iter(Rows())
    if kind == "class":
        arguments["data"] = Rows
    if kind == "no state":
        arguments["data"] = lambda rank, n: iter([])
    if kind == "loader":
        arguments["data"] = torch.utils.data.DataLoader(Rows(), batch_size=8)
    if kind == "sampler":
        sampler = torch.utils.data.WeightedRandomSampler(torch.ones(60), 60)
        arguments["data"] = torch.utils.data.DataLoader(Rows(), batch_size=4, sampler=sampler)
    if kind in ("replacement", "fewer samples", "own order"):
        options = {"replacement": {"replacement": True}, "fewer samples": {"num_samples": 8}}
        options["own order"] = {"generator": torch.Generator()}
        sampler = torch.utils.data.RandomSampler(Rows(), **options[kind])
        arguments["data"] = torch.utils.data.DataLoader(Rows(), batch_size=4, sampler=sampler)
    if kind == "own loader":
        arguments["data"] = Doubling(Rows(), batch_size=4, shuffle=True)
    if kind == "synchronised":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(model, nn.BatchNorm1d(CLASSES)))
        arguments["model"] = model
    if kind == "sparse":
        model = nn.EmbeddingBag(WIDTH, CLASSES, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters())
        arguments |= {"model": model, "optimizers": optimizer}
    if kind == "thawed":
        model.bias.requires_grad_(False)
    if kind in ("late group", "grown group"):
        arguments["optimizers"] = optimizer = torch.optim.SGD([model.weight], lr=0.1)
    if kind == "scheduler in a turn":
        arguments["schedulers"] = scheduler = warm_up(optimizer)
    if kind == "batches":
        sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(Rows()), 4, False)
        arguments["data"] = torch.utils.data.DataLoader(Rows(), batch_sampler=sampler)
    if kind == "history":
        history = []
    if kind == "number of turns":
        total = 0.0
    if kind == "carried":
        carried = torch.zeros(CLASSES)
    if kind == "shared number":
        arguments["shared"] = {"average": 0.5}
    if kind == "no optimizer":
        arguments["optimizers"] = []
    if kind == "closure":
        arguments["optimizers"] = torch.optim.LBFGS(model.parameters())
    if kind == "differs":
        with torch.no_grad():
            model.weight += random.SystemRandom().random()
    if kind == "hidden average":
        average = copy.deepcopy(model)
    if kind == "shared in a turn":
        arguments["shared"] = {"average": other}
    if kind == "hidden number":
        total = 0.0
    loop = run.loop(**arguments)
    if kind == "thawed":
        model.bias.requires_grad_(True)
    if kind == "two loops":
        run.loop(**arguments)
    if kind == "late weights":
        model.load_state_dict(plain_parts()[0].state_dict())
    if kind == "no iteration":
        return
    for mini_batch in loop:
        if kind == "step first":
            mini_batch.step(optimizer)
        for inputs, targets in mini_batch:
            outputs = model(inputs.long() if kind == "sparse" else inputs)
            loss = F.cross_entropy(outputs, targets)
            if kind == "carried":
                carried = carried + outputs.detach().mean(0)
            if kind == "plain backward":
                loss.backward()
            if kind == "no backward":
                continue
            mini_batch.backward(loss)
            if kind == "left":
                break
            if kind == "clip in a turn":
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            if kind == "step in a turn":
                optimizer.step()
            if kind == "shared in a turn":
                with torch.no_grad():
                    other.weight += 1
            if kind == "scheduler in a turn":
                scheduler.step()
            if kind == "rate in a turn" or (kind == "late rate in a turn" and loop.step == 5):
                optimizer.param_groups[0]["lr"] *= 0.9
            if kind == "late option in a turn" and loop.step == 5:
                optimizer.param_groups[0]["betas"] = (0.8, 0.9)
            if kind == "written in turns" or (kind == "late weights in turns" and loop.step == 5):
                with torch.no_grad():
                    model.weight *= 1.0 if kind == "written in turns" else 0.9
            if kind == "state in a turn":
                loop.state["seen"] = loop.state.get("seen", 0) + 1
            if kind == "number of turns":
                total += 1.0
            if kind == "loop in a turn":
                next(iter(loop))
        if kind == "no step":
            continue
        if kind == "unsummed":
            for inputs, targets in mini_batch:
                mini_batch.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()
        if kind == "outside":
            mini_batch.backward(loss)
        if kind == "unknown optimizer":
            mini_batch.step(torch.optim.SGD(model.parameters(), lr=0.1))
        if kind == "unreported":
            mini_batch.reported("accuracy")
        mini_batch.step(optimizer)
        if kind == "late group":
            optimizer.add_param_group({"params": list(other.parameters())})
        if kind == "grown group":
            optimizer.param_groups[0]["params"].append(model.bias)
        if kind == "history":
            history.append(loss.detach())
        if kind == "hidden average":
            follow(average, model)
        if kind == "hidden number":
            total += 1.0
        if kind == "some stop" and dist.is_initialized() and "1" in str(id_of_process()):
            break


def regrouped(run, is_known):
    """A bias that a group of its own trains from the third mini-batch on, maybe known to a restart."""
    model, _ = plain_parts()
    optimizer = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9)
    late = {"params": [model.bias], "lr": 0.05}
    if is_known and run.step >= 2:
        optimizer.add_param_group(late)
    loop = run.loop(model, optimizers=optimizer, data=Rows())
    for mini_batch in loop:
        for inputs, targets in mini_batch:
            mini_batch.backward(F.cross_entropy(model(inputs), targets))
        mini_batch.step(optimizer)
        if loop.step == 2:
            optimizer.add_param_group(late)


def id_of_process():
    """Return what tells processes apart, which a script should not use."""
    from torch.distributed import distributed_c10d

    return [group.rank() for group in distributed_c10d._world.pg_map if group.name() != "logical"]
