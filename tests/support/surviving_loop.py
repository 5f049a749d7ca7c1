"""A training loop for runs that lose processes: two models, two steps in a mini-batch, much state outside.

``faults`` are triples of a place in the loop, a mini-batch and a process, which kills itself there once. For
``held``, a folder, see `killers.hold_mini_batches`. With ``tears``, one process sends the results of a
mini-batch to the first of the others alone and then stops. Files of ``folder`` tell what ran how often.
"""

import copy
import math
import os
import signal
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from killers import hold_mini_batches
from loop_scripts import WIDTH, Rows, adversarial, follow, warm_up
from torch import nn

from makespan.runtime import links

links._LEAST_LENT = 128  # most of what is sent here is short, and takes the way of long pieces

best = math.inf  # kept in a variable of the module, as scripts do


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.LeakyReLU(), nn.Dropout(0.1))
        self.head, self.n_passes = nn.Linear(16, 1), 0

    def forward(self, inputs):
        self.n_passes += 1
        return self.head(self.body(inputs + 0.001 * self.n_passes * torch.rand_like(inputs)))


@torch.no_grad()
def score_of(critic, average, device):
    critic.eval()
    score = float(adversarial(critic, average(torch.rand(16, 3, device=device)), 1.0))
    critic.train()
    return score


def train(run, folder="", faults=(), held=None, raises="", tears=None, stops=0):
    global best
    rank = os.environ["MAKESPAN_RANK"]
    if held:
        hold_mini_batches(Path(held))
    if tears and str(tears["process"]) == rank:
        _tear(tears["step"])

    def note(name):
        if folder:
            with open(f"{folder}/{name}-{rank}", "a") as stream:
                stream.write("x")

    note("calls")
    critic, generator = Critic(), nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, WIDTH))
    critic, generator = critic.to(run.device), generator.to(run.device)
    average = copy.deepcopy(generator).requires_grad_(False)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.05, momentum=0.9)
    scheduler = warm_up(of_critic)
    loop = run.loop(
        {"critic": critic, "generator": generator},
        optimizers={"critic": of_critic, "generator": of_generator},
        schedulers=scheduler, data=Rows(), shared={"average": average},
    )  # fmt: skip

    def perhaps(place):
        for where, step, victim in faults:
            if (where, step, str(victim)) == (place, loop.step, rank):
                with suppress(FileExistsError):
                    open(f"{folder}/{place}-{step}-{victim}", "x").close()
                    os.kill(os.getpid(), signal.SIGKILL)

    try:
        for mini_batch in loop:
            perhaps("begin")
            loop.state.setdefault("begun", []).append(loop.step)
            critic.body[3].p = 0.1 + 0.01 * loop.step
            for real, _ in mini_batch:
                perhaps("turn")
                fake = generator(torch.rand(len(real), 3, device=run.device)).detach()
                mini_batch.backward(adversarial(critic, real, 1.0) + adversarial(critic, fake, 0.0))
            mini_batch.sum(of_critic)
            nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
            with suppress(Exception):  # the loss of a process is none of these
                mini_batch.step(of_critic)
            perhaps("step")
            for real, _ in mini_batch:
                perhaps("second turn")
                noise = torch.rand(len(real), 3, device=run.device)
                mini_batch.backward(adversarial(critic, generator(noise), 1.0))
            with suppress(Exception):
                mini_batch.step(of_generator)
            scheduler.step()
            follow(average, generator)
            if loop.step % 2 == 0:
                score = score_of(critic, average, run.device)
                perhaps("evaluation")
                best = min(best, score)
                loop.state["best"] = best
            perhaps("end")
            if loop.step == stops:
                loop.stop()
    finally:
        note("ends")
    if raises:
        raise ValueError(raises)
    note(f"left-{loop.step}")
    perhaps("behind")
    with torch.no_grad():
        F.relu_(critic.head.weight)  # what code behind the loop does is no part of the run


def _tear(step):
    from makespan.easyscale.loop_turns import LoopESTs

    finish = LoopESTs.finish

    def stopping(self, *arguments, **options):
        if self._number == step:
            links.PeerLinks.finish = half_sent
        return finish(self, *arguments, **options)

    def half_sent(self):
        link = next(iter(self._links.values()))
        while link.outgoing:
            link.write()
        signal.pause()

    LoopESTs.finish = stopping
