"""The tasks of `loop_scripts` as stock scripts: one process per rank, DistributedDataParallel over gloo.

``python stock_scripts.py <run directory>`` trains the tasks of the request one after the other. What a script
does outside of a rank's own batches is done with random states of its own, the same in all ranks.
"""

import copy
import math
import sys
from contextlib import contextmanager
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
import torch.nn.functional as F
from loop_scripts import (
    CLASSES,
    WIDTH,
    Coder,
    Deep,
    Descent,
    Masked,
    Mixture,
    Net,
    Queued,
    Rows,
    Sentences,
    Slow,
    Speaker,
    Spread,
    Stream,
    acting,
    adapted,
    adversarial,
    climb,
    coding,
    contrastive,
    denoiser,
    denoising,
    distilling,
    evaluate,
    follow,
    gan,
    groups_of,
    guessing,
    mixing,
    padded,
    put_back,
    spoken,
    steepness,
    warm_up,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, default_collate

from makespan.easyscale.job import ElasticJob
from makespan.easyscale.kernels import kernels_of
from makespan.easyscale.parts import use_kernels
from makespan.easyscale.randomness import (
    capture_random_states,
    implicit_sha,
    optimizers_sha,
    parameter_sha,
    restore_random_states,
    seed_everything,
    seed_stream,
    value_sha,
)
from makespan.runtime import end_worker, join, run_worker

CPU = torch.device("cpu")


class Script:
    """What all scripts of a rank share: how data are dealt out, models wrapped, and results written down."""

    def __init__(self, job, steps, options):
        self.job, self.steps, self.options = job, steps, options
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.rows, self.kept = [], {}

    def wrapped(self, *models, **options):
        """Wrap models, and seed the rank."""
        options |= {"broadcast_buffers": False, "bucket_cap_mb": self.job.bucket_cap_bytes / 2**20}
        wrapped = [DistributedDataParallel(each, **options) for each in models]
        seed_everything(self.job.seed, "shared")
        self.outside = capture_random_states()
        seed_everything(self.job.seed, "rank", self.rank)
        return wrapped[0] if len(wrapped) == 1 else wrapped

    @contextmanager
    def aside(self):
        """Run a block with the random states of all ranks together."""
        own = capture_random_states()
        restore_random_states(self.outside)
        yield
        self.outside = capture_random_states()
        restore_random_states(own)

    def batches(self, data, collate=default_collate):
        """Yield numbers of mini-batches and batches of the rank, epoch after epoch."""
        done = 0
        sampler = DistributedSampler(data, self.n, self.rank, seed=self.job.seed)
        for epoch in count():
            sampler.set_epoch(epoch)
            for batch in DataLoader(
                data, self.job.micro_batch_size, sampler=sampler, num_workers=self.job.n_loaders,
                collate_fn=collate, generator=torch.Generator(),
                worker_init_fn=partial(seed_stream, self.job.seed, self.rank, epoch),
            ):  # fmt: skip
                if done == self.steps:
                    return
                done += 1
                yield done, batch

    def note(self, loss, model, *optimizers):
        """Write down what must have equal bits after a mini-batch."""
        shas = parameter_sha(model), optimizers_sha(optimizers), implicit_sha(model, CPU)
        self.rows.append([float(loss.detach()).hex(), *shas])


def ema(run):
    model = Net()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapped, scores = run.wrapped(model), []
    for step, (inputs, targets) in run.batches(Rows()):
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(inputs), targets)
        loss.backward()
        optimizer.step()
        with run.aside():
            statistics = [buffer.clone() for buffer in model.buffers()]
            of_first(model)
            follow(average, model)
            for buffer, own in zip(model.buffers(), statistics, strict=True):
                buffer.copy_(own)
            if step % 2 == 0:
                scores.append(evaluate(average))
        run.note(loss, model, optimizer)
    run.kept = {"shared ema": value_sha(average.state_dict()), "loop.state": value_sha({"scores": scores})}


def of_first(model):
    """Copy the buffers of rank 0 into the model."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def two_players(run):
    critic, generator = gan()
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.9))
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9))
    wrapped_critic, wrapped_generator = run.wrapped(critic, generator)
    both = nn.Module()
    both.critic, both.generator = critic, generator
    for _, (real, _) in run.batches(Rows()):
        of_critic.zero_grad()
        fake = generator(torch.randn(len(real), 3)).detach()
        first = adversarial(wrapped_critic, real, 1.0) + adversarial(wrapped_critic, fake, 0.0)
        first.backward()
        of_critic.step()
        of_generator.zero_grad()
        fake = wrapped_generator(torch.randn(len(real), 3))
        second = adversarial(critic, fake, 1.0)
        second.backward()
        of_generator.step()
        run.note(first.detach() + second.detach(), both, of_critic, of_generator)


def accumulation(run):
    model = Mixture()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = warm_up(optimizer)
    wrapped = run.wrapped(model)
    for _, (inputs, targets) in run.batches(Rows()):
        optimizer.zero_grad()
        with wrapped.no_sync():
            outputs, balance = wrapped(inputs[:2])
            first = (F.cross_entropy(outputs, targets[:2]) + balance) / 2
            first.backward()
        outputs, balance = wrapped(inputs[2:])
        second = (F.cross_entropy(outputs, targets[2:]) + balance) / 2
        second.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        run.note(first.detach() + second.detach(), model, optimizer)


def simple(run, model, optimizer, loss_of, data=None, collate=default_collate, **options):
    """Train a model by one optimizer, one pass per mini-batch."""
    wrapped = run.wrapped(model, **options)
    for step, batch in run.batches(Rows() if data is None else data, collate):
        optimizer.zero_grad()
        loss = loss_of(wrapped, batch, step)
        loss.backward()
        optimizer.step()
        run.note(loss, model, optimizer)


def classified(model, batch, step):
    return F.cross_entropy(model(batch[0]), batch[1])


def frozen(run):
    model, weights = Net(), torch.tensor([1.0, 2.0, 0.5, 1.0])
    model.body[0].requires_grad_(False)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    simple(
        run, model, optimizer, lambda net, batch, _: F.cross_entropy(net(batch[0]), batch[1], weight=weights)
    )


def mixture(run):
    model = Mixture()

    def loss_of(net, batch, _):
        outputs, balance = net(batch[0])
        return F.cross_entropy(outputs, batch[1]) + 0.1 * balance

    simple(run, model, torch.optim.Adam(model.parameters(), lr=0.01), loss_of)


def low_rank(run):
    model, trained = adapted()
    simple(run, model, torch.optim.AdamW(trained, lr=0.02), classified)


def streamed(run):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, stream, done = run.wrapped(model), Stream(run.rank, run.n), 0
    for epoch in count():
        stream.set_epoch(epoch)
        for batch in stream:
            if done == run.steps:
                return
            done += 1
            optimizer.zero_grad()
            loss = classified(wrapped, batch, done)
            loss.backward()
            optimizer.step()
            run.note(loss, model, optimizer)


def half(run):
    model = Net()

    def loss_of(net, batch, step):
        with torch.autocast("cpu", torch.bfloat16):
            return classified(net, batch, step)

    simple(run, model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_of)


def scaled(run):
    model = Net()
    optimizer = Descent(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    wrapped = run.wrapped(model)
    for step, (inputs, targets) in run.batches(Rows()):
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(inputs), targets)
        loss = loss * (1e36 if step == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        run.note(loss, model, optimizer)
    run.kept = {"scaler": value_sha(scaler.state_dict())}


def stopped(run):
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    wrapped, best = run.wrapped(model), 0
    for _, (inputs, targets) in run.batches(Rows()):
        optimizer.zero_grad()
        outputs = wrapped(inputs)
        loss = F.cross_entropy(outputs, targets)
        loss.backward()
        optimizer.step()
        hits = (outputs.argmax(1) == targets).sum().double()
        dist.all_reduce(hits)
        best = max(best, float(hits))
        run.note(loss, model, optimizer)
        if best >= 8:
            break
    run.kept = {"loop.state": value_sha({"best": best})}


def tied(run):
    model = Speaker()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    simple(run, model, optimizer, lambda net, tokens, _: spoken(net, tokens), Sentences(), padded)


def scheduled(run):
    model = Net()
    matrices, others = groups_of(model)
    optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 10),
        torch.optim.lr_scheduler.StepLR(optimizers[1], 2, gamma=0.5),
    ]
    wrapped = run.wrapped(model)
    for step, (inputs, targets) in run.batches(Rows()):
        model.dropout.p = 0.1 * math.sqrt(step)
        size = 2 if step < 3 else 4
        wrapped.zero_grad()
        loss = F.cross_entropy(wrapped(inputs[:size]), targets[:size])
        loss.backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        run.note(loss, model, *optimizers)


def views(run):
    model = Net()

    def loss_of(net, batch, _):
        return contrastive(*(net(batch[0] + 0.05 * torch.randn_like(batch[0])) for _ in range(2)))

    simple(run, model, torch.optim.Adam(model.parameters(), lr=0.01), loss_of)


def given(run):
    model = Net()
    model.load_state_dict(torch.load(run.options["path"], weights_only=True))
    simple(run, model, torch.optim.SGD(model.parameters(), lr=0.1), classified)


def distilled(run):
    teacher, student = Net(24).eval().requires_grad_(False), Net(8)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    simple(run, student, optimizer, lambda net, batch, _: distilling(teacher, net, batch[0]))


def plateau(run):
    model = Net()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
    wrapped = run.wrapped(model)
    for step, batch in run.batches(Rows()):
        optimizer.zero_grad()
        loss = classified(wrapped, batch, step)
        loss.backward()
        optimizer.step()
        with run.aside():
            statistics = [buffer.clone() for buffer in model.buffers()]
            of_first(model)
            average.update_parameters(model)
            for buffer, own in zip(model.buffers(), statistics, strict=True):
                buffer.copy_(own)
            scheduler.step(evaluate(average))
        run.note(loss, model, optimizer)
    run.kept = {"shared average": value_sha(average.state_dict())}


def mixed(run):
    model = Net()
    matrices, others = groups_of(model)
    groups = [{"params": matrices, "weight_decay": 0.1, "lr": 0.02}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, amsgrad=True)
    wrapped = run.wrapped(model)
    for _, batch in run.batches(Rows()):
        optimizer.zero_grad()
        loss = mixing(wrapped, *batch)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        run.note(loss, model, optimizer)


def masked(run):
    model = Masked()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)
    wrapped = run.wrapped(model)
    for _, tokens in run.batches(Sentences(), padded):
        optimizer.zero_grad()
        loss = guessing(wrapped, tokens)
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.note(loss, model, optimizer)


def variational(run):
    model = Coder()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    simple(run, model, optimizer, lambda net, batch, step: coding(net, batch[0], min(1.0, step / 5)))


def penalised(run):
    critic, generator = gan()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (critic, generator)]
    wrapped_critic, wrapped_generator = run.wrapped(critic, generator)
    both = nn.Module()
    both.critic, both.generator = critic, generator
    for _, (real, _) in run.batches(Rows()):
        optimizers[0].zero_grad()
        fake = generator(torch.randn(len(real), 3)).detach()
        first = wrapped_critic(fake).mean() - critic(real).mean() + steepness(critic, real, fake)
        first.backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        second = -critic(wrapped_generator(torch.randn(len(real), 3))).mean()
        second.backward()
        optimizers[1].step()
        run.note(first.detach() + second.detach(), both, *optimizers)


def sharpness(run):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = run.wrapped(model)
    for step, batch in run.batches(Rows()):
        optimizer.zero_grad()
        first = classified(wrapped, batch, step)
        first.backward()
        before = climb(model)
        optimizer.zero_grad()
        second = classified(wrapped, batch, step)
        second.backward()
        put_back(model, before)
        optimizer.step()
        run.note(first.detach() + second.detach(), model, optimizer)


def skipped(run):
    model = Deep()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    simple(run, model, optimizer, classified, find_unused_parameters=True)


def weighed(run):
    model, spread = Net(), Spread()
    optimizer = torch.optim.Adam([*model.parameters(), *spread.parameters()], lr=0.01)
    wrapped, wrapped_spread = run.wrapped(model, spread)
    both = nn.Module()
    both.model, both.spread = model, spread
    for _, (inputs, targets) in run.batches(Rows()):
        optimizer.zero_grad()
        loss = wrapped_spread(wrapped(inputs), targets)
        loss.backward()
        optimizer.step()
        run.note(loss, both, optimizer)


def diffusion(run):
    model = denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    slow = Slow(optimizer)
    wrapped = run.wrapped(model)
    for _, (inputs, _) in run.batches(Rows()):
        optimizer.zero_grad()
        loss = denoising(wrapped, inputs)
        loss.backward()
        slow.step()
        run.note(loss, model, optimizer)
    run.kept = {"shared slow": value_sha(slow.state_dict())}


def rewarded(run):
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    wrapped, baseline = run.wrapped(model), 0.0
    for _, batch in run.batches(Rows()):
        optimizer.zero_grad()
        loss, reward = acting(wrapped, *batch, baseline)
        loss.backward()
        optimizer.step()
        rewards = [torch.empty(()) for _ in range(run.n)]
        dist.all_gather(rewards, reward)
        baseline = 0.9 * baseline + 0.1 * sum(map(float, rewards)) / run.n
        run.note(loss, model, optimizer)
    run.kept = {"loop.state": value_sha({"baseline": baseline})}


def queued(run):
    model = Queued()
    simple(run, model, torch.optim.SGD(model.parameters(), lr=0.1), lambda net, batch, _: net(batch[0]))


def work(directory, who):
    request = directory.request()
    join(directory, who)
    for number, (name, options) in enumerate(request["scripts"].items()):
        job = ElasticJob(**request["job"])
        with use_kernels(kernels_of("A", job.level), job.level):
            script = Script(job, request["steps"], options)
            seed_everything(job.seed)
            globals()[name](script)
        by_rank = [None] * who.size
        dist.all_gather_object(by_rank, script.rows)
        if who.rank == 0:
            directory.write_result({"rows": by_rank, "kept": script.kept}, number)


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], work))
