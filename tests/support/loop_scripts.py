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
    return F.binary_cross_entropy_with_logits(critic(fake), torch.full((len(fake), 1), target))


def contrastive(first, second):
    first, second = F.normalize(first, dim=1), F.normalize(second, dim=1)
    return F.cross_entropy(first @ second.T / 0.5, torch.arange(len(first)))


def spoken(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


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
            loss = F.cross_entropy(model(inputs), targets)
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
        if kind == "hidden average":
            follow(average, model)
        if kind == "hidden number":
            total += 1.0
        if kind == "some stop" and dist.is_initialized() and "1" in str(id_of_process()):
            break


def id_of_process():
    """Return what tells processes apart, which a script should not use."""
    from torch.distributed import distributed_c10d

    return [group.rank() for group in distributed_c10d._world.pg_map if group.name() != "logical"]
