"""Kill processes of elastic runs at random moments, compare bits, and time the recoveries from memory.

    python scripts/measure_recovery.py FOLDER [SHARE] [--loop] [--megabytes SIZE]

Four processes train four logical workers with about SIZE (5) MB of parameters, with ``--loop`` in a training
loop of the job's own, which is called again after each loss. The columns ``plain_step_s`` and ``kept_step_s``
are then the median times of a mini-batch of undisturbed runs, without copies in other processes and with them
as in the other runs, of three runs each, in turn. With SHARE 1 there are 80 losses in
55 runs: 50 of one process (two in a run, the second one often within the recovery from the first), 20 of two
processes at once, and 10 of a process that stops and is killed after three seconds without a heartbeat.
Phases, victims and delays are drawn from seeds. Every run must have the losses, parameters and optimizer of
an undisturbed one. Writes ``FOLDER/losses.csv`` with one row per loss, and prints medians and maxima of the
pause minus one step: the time from the signal until all remaining processes have done the next mini-batch,
minus the median time of a mini-batch of the same run. The first loss of each run has four processes; only
these are summarized.
"""

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from makespan.cleanup import temporary_directory
from makespan.easyscale import ElasticTrainer
from makespan.files import write_text
from makespan.runtime.coordinator import Event
from makespan.tables import write_csv

STEPS, PROCESSES, HANG_S = 14, 4, 3.0
REPEATS, WARMUP = 3, 4
PHASES = ("forward", "backward", "sum", "contexts", "step", "done")
OF_LOOP = ("forward", "sum", "contexts", "done")
OF_RECOVERY = ("connect", "copy", "replicate")
COUNTS = {"single": 25, "double": 20, "hang": 10}  # runs
JOB = """
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

WIDTH = 572


def model():
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    middle = [part for layer in layers for part in (layer, nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2))]
    return nn.Sequential(*middle, nn.Linear(WIDTH, 8))


class Samples:
    def __len__(self):
        return 1024

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator) + 0.1 * torch.randn(WIDTH), torch.tensor(index % 8)


def data():
    return Samples()


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def loop(run, times=None):
    built, begun = model(), []
    optimizer = torch.optim.Adam(built.parameters())
    for mini_batch in run.loop(built, optimizers=optimizer, data=data()):
        begun.append(time.perf_counter())
        for inputs, targets in mini_batch:
            mini_batch.backward(loss(built(inputs), targets))
        mini_batch.step(optimizer)
    if times and os.environ["MAKESPAN_RANK"] == "0":
        Path(times).write_text(json.dumps(begun))
"""


@dataclass
class Loss:
    """A loss to inject: a phase of a mini-batch, or of the recovery from the loss before it."""

    kind: str
    phase: str
    step: int
    victims: tuple[int, ...]
    delay_s: float
    killed_s: float | None = None


@dataclass
class Injector:
    """Listens to the events of a run, and sends signals."""

    losses: list[Loss]
    pids: dict[int, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    n_begun: int = 0

    def __call__(self, event: Event) -> None:
        """Handle an event."""
        self.events.append(event)
        if event.kind == "hello" and event.node is not None:
            self.pids[event.node] = event.values["pid"]
        if event.kind != "announce" or self.n_begun == len(self.losses):
            return
        due, phase = self.losses[self.n_begun], event.values["phase"]
        is_next = phase in OF_RECOVERY or event.values["iteration"] >= due.step
        if (
            phase == due.phase
            and event.node == due.victims[0]
            and is_next
            and (self.n_begun or phase in PHASES)
        ):
            self.n_begun += 1
            threading.Timer(due.delay_s, self._send, [due]).start()

    def _send(self, due: Loss) -> None:
        due.killed_s = time.monotonic()
        for victim in due.victims:
            with suppress(ProcessLookupError):
                os.kill(self.pids[victim], signal.SIGSTOP if due.kind == "hang" else signal.SIGKILL)


def drawn(kind: str, seed: int, phases: tuple[str, ...]) -> list[Loss]:
    """Draw the losses of a run."""
    rng = random.Random(f"{kind}/{seed}")
    victims = rng.sample(range(PROCESSES), 2)
    phase, step, delay_s = rng.choice(phases), rng.randrange(2, STEPS - 4), rng.uniform(0.0, 0.02)
    if kind != "single":
        return [Loss(kind, phase, step, tuple(victims[: 1 + (kind == "double")]), delay_s)]
    # The second victim may not yet be in a phase of the first recovery: then that of the mini-batch counts.
    second = rng.choice((*phases, *OF_RECOVERY))
    return [
        Loss(kind, phase, step, (victims[0],), delay_s),
        Loss(kind, second, step + 2, (victims[1],), rng.uniform(0.0, 0.02)),
    ]


def bits(result: Any) -> tuple[Any, ...]:
    """Return all losses, and the hashes of parameters and optimizer at the end."""
    steps = result.steps.sort_values(["step", "rank"])
    last = steps[steps["step"] == STEPS]
    return list(steps["loss_hex"]), set(last["parameter_sha"]), set(last["optimizer_sha"])


def trained(path: Path, folder: Path, has_loop: bool, of_loop: dict[str, Any], **options: Any) -> Any:
    """Train the job once."""
    parts = ("loop",) if has_loop else ("model", "data", "loss")
    names: dict[str, Any] = {name: f"{folder / 'job.py'}:{name}" for name in parts}
    names |= {"options": {"loop": of_loop}} if has_loop else {"optimizer": "adam"}
    job = ElasticTrainer(run_dir=path, n_logical_workers=PROCESSES, micro_batch_size=16, **names)
    return job.run(STEPS, **options)


def rows_of(injector: Injector, seed: int, is_equal: bool) -> list[dict[str, Any]]:
    """Return a row for each loss of a run."""
    begun: dict[int | None, list[float]] = {}
    for event in injector.events:
        if event.kind == "announce" and event.values["phase"] == "forward":
            begun.setdefault(event.node, []).append(event.time_s)
    step_s = median(right - left for left, right in pairwise(max(begun.values(), key=len)))
    rows = []
    for number, loss in enumerate(injector.losses):
        after = [event for event in injector.events if loss.killed_s and event.time_s >= loss.killed_s]
        detected = next((event.time_s for event in after if event.kind in ("lost", "failure")), None)
        later = [each.killed_s for each in injector.losses[number + 1 :] if each.killed_s]
        until_s = min(later, default=float("inf"))
        done = [
            event.time_s
            for event in after
            if event.kind == "announce" and event.values["phase"] == "trained"
            and (detected or until_s) < event.time_s < until_s
        ]  # fmt: skip
        first = done[PROCESSES - number - len(loss.victims) - 1 :]
        pause_s = first[0] - (loss.killed_s or 0.0) if first else None
        rows.append(
            {
                "kind": loss.kind, "seed": seed, "number": number, "phase": loss.phase, "step": loss.step,
                "victims": " ".join(map(str, loss.victims)), "is_sent": loss.killed_s is not None,
                "is_equal": is_equal, "step_s": step_s, "pause_s": pause_s,
                "pause_minus_step_s": None if pause_s is None else pause_s - step_s,
            }
        )  # fmt: skip
    return rows


def step_times(path: Path, folder: Path) -> dict[str, float]:
    """Return the median times of a mini-batch in undisturbed runs, see the module."""
    found: dict[str, list[float]] = {"plain_step_s": [], "kept_step_s": []}
    for number in range(REPEATS):
        for survives, times in enumerate(found.values()):
            name = f"steps-{number}-{survives}"
            file = path / f"{name}.json"
            trained(path / name, folder, True, {"times": str(file)}, survives=2 * survives)
            begun = json.loads(file.read_text())[WARMUP:]
            times.append(median(right - left for left, right in pairwise(begun)))
    return {name: median(times) for name, times in found.items()}


def main(folder: Path, share: float, has_loop: bool, megabytes: float) -> int:
    """Run the protocol; return 1 if a bit differs."""
    folder.mkdir(parents=True, exist_ok=True)
    width = round((megabytes * 1e6 / 16) ** 0.5)  # of four square matrices
    write_text(JOB.replace("WIDTH = 572", f"WIDTH = {width}"), folder / "job.py")
    rows: list[dict[str, Any]] = []
    with temporary_directory("recovery") as path:
        straight = bits(trained(path / "straight", folder, has_loop, {}))
        of_all = {"megabytes": round(megabytes)} | step_times(path, folder) if has_loop else {}
        for kind, count in COUNTS.items():
            for seed in range(max(1, round(share * count))):
                injector = Injector(drawn(kind, seed, OF_LOOP if has_loop else PHASES))
                result = trained(
                    path / f"{kind}-{seed}",
                    folder,
                    has_loop,
                    {},
                    survives=2,
                    hang_s=HANG_S,
                    on_event=injector,
                )
                recoveries = list(result.reconfigurations["cause"])
                rows += [of_all | row for row in rows_of(injector, seed, bits(result) == straight)]
                rows[-1]["causes"] = " ".join(recoveries)
                write_csv(pd.DataFrame(rows), folder / "losses.csv")
    table = pd.DataFrame(rows)
    sent = table[table["is_sent"]]
    lines = [f"{len(sent)} losses, {int(sent['is_equal'].sum())} with equal bits"]
    for kind, part in sent[(sent["number"] == 0) & sent["pause_minus_step_s"].notna()].groupby("kind"):
        times = part["pause_minus_step_s"]
        most = f"median {times.median():.3f} s, most {times.max():.3f} s"
        lines.append(f"{kind}: {len(times)} pauses minus one step: {most}")
    sys.stdout.write("\n".join([*lines, ""]))
    return 0 if bool(sent["is_equal"].all()) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where losses.csv is written")
    parser.add_argument(
        "share", type=float, nargs="?", default=1.0, help="share of the runs, at least one a kind"
    )
    parser.add_argument("--loop", action="store_true", help="train in a loop of the job's own")
    parser.add_argument("--megabytes", type=float, default=5.24, help="size of the parameters [MB]")
    given = parser.parse_args()
    sys.exit(main(given.folder, given.share, given.loop, given.megabytes))
