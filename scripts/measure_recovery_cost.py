"""Measure the CPU time of recoveries from memory, and of keeping contexts, on 2 to 16 processes.

    python scripts/measure_recovery_cost.py [FOLDER]

Writes ``FOLDER/recovery_costs.csv``, by default the preset of `makespan.easyscale.recovery_cost`, with one
row per measurement. CPU times are those that the system counts for each process. The machine has to be idle
all the same: beside other load caches are shared, and CPU times up to twice as long.

- ``loss``: of sixteen processes of a small job one after the other is lost until one is left.
  ``coordinator_s`` is the CPU time of the launching process from the detection until all resume, ``worker_s``
  the mean of the remaining processes from the plan until then.
- ``step``: a job trains undisturbed. ``worker_s`` is the CPU time of a process per mini-batch, ``pack_s`` the
  part in which it packs its contexts, and ``copy_s`` that in which it receives those of others.
- ``join``: one process more joins two. ``worker_s`` is the CPU time of the process that joins, from the plan
  until all resume, ``coordinator_s`` that of the process which sends the parameters and the optimizer.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from makespan.cleanup import temporary_directory
from makespan.easyscale import ElasticTrainer, join_run, request_change
from makespan.easyscale.recovery_cost import MEASUREMENTS, PRESET
from makespan.files import write_text
from makespan.runtime.coordinator import Event
from makespan.tables import write_csv

REPEATS, LARGEST, STEPS, FIRST = 3, 16, 100, 20
BUFFERS = (1 << 12, 1 << 20)  # bytes of a buffer that every pass changes
MODELS = (1 << 20, 1 << 23, 1 << 25)  # bytes of parameters
JOB = """
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

from makespan.easyscale.hosting import HostedESTs


class Timed:
    def __init__(self, replication):
        self.replication = replication

    def after_passes(self):
        begun = time.thread_time()
        self.replication.after_passes()
        HostedESTs.packing_s += time.thread_time() - begun

    def after_sum(self):
        begun = time.thread_time()
        self.replication.after_sum()
        HostedESTs.copying_s += time.thread_time() - begun

    def before_step(self):
        self.replication.before_step()


def time_packing(folder):
    plain, HostedESTs.packing_s, HostedESTs.copying_s = HostedESTs.mini_batch, 0.0, 0.0
    HostedESTs.n_packed = 0
    path = Path(folder, os.environ["MAKESPAN_RANK"])

    def timed(self, *arguments, replication=None, **options):
        result = yield from plain(self, *arguments, replication=Timed(replication), **options)
        HostedESTs.n_packed += 1
        if HostedESTs.n_packed % 20 == 0:
            path.write_text(json.dumps([HostedESTs.packing_s, HostedESTs.copying_s, HostedESTs.n_packed]))
        return result

    HostedESTs.mini_batch = timed


class Net(nn.Module):
    def __init__(self, width, buffer):
        super().__init__()
        self.wide, self.last = nn.Linear(8, width), nn.Linear(width, 4)
        self.register_buffer("state", torch.zeros(buffer))

    def forward(self, inputs):
        self.state += 1.0
        return self.last(self.wide(inputs))


class Samples:
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.full((8,), float(index % 7)), torch.tensor(index % 4)


def model(parameter_bytes=1024, buffer_bytes=4096, folder=None):
    if folder:
        time_packing(folder)
    return Net(parameter_bytes // 52, buffer_bytes // 4)


def data():
    return Samples()


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
"""


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of a process [s]."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return float("nan")


class Watch:
    """Listens to a run, and reads CPU times at its events; ``act`` is called after each event."""

    def __init__(self, act: Callable[["Watch", Event], object]) -> None:
        self.act, self.pids, self.alive = act, dict[int, int](), set[int]()
        self.at: dict[str, tuple[float, dict[int, float]]] = {}
        self.rows, self.reading_s = list[dict[str, Any]](), 0.0

    def read(self) -> dict[int, float]:
        """Return the CPU time of each process."""
        return {node: cpu_s(self.pids[node]) for node in sorted(self.alive)}

    def __call__(self, event: Event) -> None:
        """Handle an event."""
        if event.kind == "hello" and event.node is not None:
            self.pids[event.node] = event.values["pid"]
            self.alive.add(event.node)
        if event.kind in ("lost", "gone") and event.node is not None:
            self.alive.discard(event.node)
        if event.kind in ("lost", "plan", "resume"):
            begun = time.thread_time()
            self.at[event.kind] = begun - self.reading_s, self.read()
            self.reading_s += time.thread_time() - begun  # which no run without this script takes
        self.act(self, event)

    def between(self, first: str, last: str) -> tuple[float, dict[int, float]]:
        """Return the CPU time of the coordinator and of the processes between two events."""
        (before_s, before), (after_s, after) = self.at[first], self.at[last]
        spent = {node: after[node] - before[node] for node in after.keys() & before.keys()}
        return after_s - before_s, spent


def trained(path: Path, steps: int, watch: Watch, n: int, mapping: str | None = None, **options: Any) -> None:
    """Train the job once; ``options`` are those of the model, besides ``survives``."""
    write_text(JOB, path / "job.py")
    names = {name: f"{path / 'job.py'}:{name}" for name in ("model", "data", "loss")}
    survives = options.pop("survives", 1)
    trainer = ElasticTrainer(
        optimizer="adam", run_dir=path / "run", n_logical_workers=n, micro_batch_size=4,
        options={"model": options}, **names,
    )  # fmt: skip
    trainer.run(steps, mapping, survives=survives, hang_s=300.0, on_event=watch)


def losses(path: Path) -> list[dict[str, Any]]:
    """Lose one process after the other."""
    last = [0]

    def act(watch: Watch, event: Event) -> None:
        if event.kind == "resume" and "lost" in watch.at:
            coordinator_s, _ = watch.between("lost", "resume")
            _, spent = watch.between("plan", "resume")
            row = {"n_processes": len(spent), "n_logical_workers": LARGEST, "coordinator_s": coordinator_s}
            watch.rows.append(row | {"worker_s": sum(spent.values()) / len(spent)})
            last[0] = -1
        phase, victim = event.values.get("phase"), max(watch.alive, default=0)
        if event.kind == "announce" and phase == "trained" and last[0] < 0:
            last[0] = event.values["iteration"]
        is_due = last[0] >= 0 and event.values.get("iteration", 0) >= last[0] + 4
        if phase == "sum" and is_due and event.node == victim and len(watch.alive) > 1:
            last[0] = 1 << 30  # until all have resumed
            os.kill(watch.pids[victim], signal.SIGKILL)

    watch = Watch(act)
    trained(path, 8 * LARGEST, watch, LARGEST)
    return watch.rows


def steps(path: Path, n_processes: int, survives: int, buffer_bytes: int) -> dict[str, Any]:
    """Train undisturbed."""
    read = dict[int, dict[int, float]]()

    def act(watch: Watch, event: Event) -> None:
        if event.kind == "announce" and event.values["phase"] == "done":
            step = event.values["iteration"]
            if step in (FIRST, STEPS) and step not in read:
                read[step] = watch.read()

    watch = Watch(act)
    options = {"buffer_bytes": buffer_bytes, "folder": str(path)}
    trained(path, STEPS + 10, watch, n_processes, survives=survives, **options)
    spent = [read[STEPS][node] - read[FIRST][node] for node in read[FIRST]]
    parts = [json.loads((path / str(node)).read_text()) for node in range(n_processes)]
    return {
        "n_processes": n_processes, "n_logical_workers": n_processes, "survives": survives,
        "buffer_bytes": buffer_bytes,
        "worker_s": sum(spent) / len(spent) / (STEPS - FIRST),
        "pack_s": sum(pack_s / n_steps for pack_s, _, n_steps in parts) / n_processes,
        "copy_s": sum(copy_s / n_steps for _, copy_s, n_steps in parts) / n_processes,
    }  # fmt: skip


def join(path: Path, parameter_bytes: int) -> dict[str, Any]:
    """Let one process join two, and suspend the run then."""

    def act(watch: Watch, event: Event) -> None:
        if (
            event.kind == "announce"
            and event.values == {"phase": "trained", "iteration": 1}
            and event.node == 0
        ):
            threading.Thread(target=join_run, args=(path / "run",), daemon=True).start()
        if event.kind == "resume" and 2 in watch.at["plan"][1]:
            _, spent = watch.between("plan", "resume")
            if 2 in spent and not watch.rows:
                watch.rows.append({"coordinator_s": spent[0], "worker_s": spent[2]})
                request_change(path / "run", devices="")

    watch = Watch(act)
    trained(path, 100_000, watch, 4, "0,1/2,3", parameter_bytes=parameter_bytes)
    return {"n_processes": 3, "n_logical_workers": 4, "parameter_bytes": parameter_bytes, **watch.rows[0]}


def main(folder: Path) -> None:
    """Measure everything."""
    rows: list[dict[str, Any]] = []

    def add(kind: str, measured: Mapping[str, Any]) -> None:
        usual = {"survives": 1, "buffer_bytes": BUFFERS[0], "parameter_bytes": 1024}
        rows.append({"kind": kind, **usual, **measured})
        table = MEASUREMENTS.validate(pd.DataFrame(rows, columns=MEASUREMENTS.names), "measurements")
        write_csv(table, folder / PRESET.name)

    for repeat in range(REPEATS):
        with temporary_directory("cost") as path:
            for row in losses(path):
                add("loss", row | {"repeat": repeat})
        for buffer_bytes in BUFFERS:
            for n_processes, survives in ((2, 1), (4, 1), (4, 2), (4, 3), (8, 1), (8, 3), (16, 1), (16, 3)):
                with temporary_directory("cost") as path:
                    add("step", steps(path, n_processes, survives, buffer_bytes) | {"repeat": repeat})
        for parameter_bytes in MODELS:
            with temporary_directory("cost") as path:
                add("join", join(path, parameter_bytes) | {"repeat": repeat})
        sys.stdout.write(f"repetition {repeat + 1} of {REPEATS}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", default=PRESET.parent, help="where the table is written"
    )
    main(parser.parse_args().folder)
