"""Measure the CPU time of recoveries from memory, and of keeping contexts.

    python scripts/measure_recovery_cost.py [FOLDER]

Writes ``FOLDER/recovery_costs.csv``, by default the preset of `makespan.easyscale.recovery_cost`, with one
row per measurement. CPU times are those that the system counts for each process. The machine has to be idle
all the same: beside other load caches are shared, and CPU times up to twice as long.

- ``loss``: of sixteen processes of a small job one after the other is lost until one is left.
  ``coordinator_s`` is the CPU time of the launching process from the detection until all resume, ``worker_s``
  the mean of the remaining processes from the plan until then.
- ``agree``: one of up to 2,049 members that only answer the coordinator is lost. ``coordinator_s`` is the CPU
  time of the coordinator from the detection until all resume.
- ``step``: a job trains undisturbed. ``worker_s`` is the CPU time of a process per mini-batch, ``pack_s`` the
  part in which it packs its contexts, and ``copy_s`` that in which it receives those of others.
- ``join``: one process more joins two. ``worker_s`` is the CPU time of the process that joins, from the plan
  until all resume, ``coordinator_s`` that of the process which sends the parameters and the optimizer.
"""

import argparse
import base64
import json
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from makespan.cleanup import temporary_directory
from makespan.easyscale import ElasticTrainer, join_run, request_change
from makespan.easyscale.job import RankMapping
from makespan.easyscale.recovery import ASSEMBLY, RecoveryPlanner, RecoveryProtocol, holdings
from makespan.easyscale.recovery_cost import MEASUREMENTS, PRESET
from makespan.files import write_text
from makespan.runtime.coordinator import Coordinator, Event, Timeouts
from makespan.runtime.messages import (
    Connection,
    Copied,
    Form,
    Freeze,
    Frozen,
    Hello,
    Leave,
    Message,
    Offered,
    Ready,
    Shared,
    Welcome,
    connected,
)
from makespan.runtime.protocol import End
from makespan.tables import write_csv

REPEATS, LARGEST, STEPS, FIRST = 3, 16, 100, 20
MEMBERS = (16, 64, 256, 1024, 2048)
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

    def __getattr__(self, name):
        return getattr(self.replication, name)


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


class Members:
    """Members of a run that compute nothing: one thread answers the coordinator, over a connection for each.

    It starts and ends them, too, as `makespan.runtime.coordinator.ProcessStarter` and as their processes.
    """

    pid = 0
    address = b"a-host-of-the-cluster 45678 " + 16 * b"ab"

    def __init__(self, path: Path, n_members: int) -> None:
        self.path, self.n_members, self.links = path, n_members, dict[int, Connection]()
        self.held: dict[int, tuple[int, ...]] = dict.fromkeys(range(n_members), ())
        threading.Thread(target=self.serve, daemon=True).start()

    def start(self, node: int, replaced: int | None = None) -> "Members":
        """Return the process of a member."""
        return self

    def end(self, process: object) -> None:
        """Kill nothing: no member hangs."""

    def poll(self) -> None:
        """Say that the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status."""
        return 0

    def lose(self, node: int) -> None:
        """End a member: the coordinator detects the end of its connection."""
        self.links[node].link.shutdown(socket.SHUT_RDWR)

    def serve(self) -> None:
        """Connect all members, and answer until all have left."""
        while not (address := self.path / "coordinator.json").exists():
            time.sleep(0.01)
        known, ready = json.loads(address.read_text()), selectors.DefaultSelector()
        for node in range(self.n_members):
            self.links[node] = connected(known["host"], known["port"], 30.0)
            ready.register(self.links[node], selectors.EVENT_READ, node)
            self.links[node].send(Hello(known["token"], 0, f"host-{node // 8}", node))
        while ready.get_map():
            for key, _ in ready.select():
                received = self.links[key.data].receive()
                for message in received or ():
                    with suppress(OSError):  # it was lost a moment ago
                        self.answer(key.data, message)
                if received is None or any(isinstance(message, Leave) for message in received):
                    ready.unregister(key.fileobj)
                    self.links[key.data].close()

    def answer(self, node: int, message: Message) -> None:
        """Answer as a process does; all begin with the addresses of all others."""
        link = self.links[node]
        match message:
            case Welcome():
                link.send(Ready())
            case Freeze():
                link.send(Frozen(message.generation, 0, holdings(5, {5: self.held[node]})))
            case Form():
                assembly = ASSEMBLY.validate_python(message.work)
                place, hosted = assembly.nodes.index(node), RankMapping.parse(assembly.mapping).hosted
                self.held[node] = (*hosted[place], *hosted[place - 1])
                value = base64.b64encode(self.address).decode()
                link.send(Offered(message.generation, {f"link/{place}": value}))
            case Shared():
                link.send(Copied(message.generation, {f"worker-{rank}": "" for rank in self.held[node]}))


def agree(path: Path, n_members: int) -> dict[str, Any]:
    """Lose one more of members that only answer than shall remain."""
    begun_s, rows = [0.0], list[dict[str, Any]]()

    def watch(event: Event) -> None:
        if event.kind == "lost":
            begun_s[0] = time.thread_time()
        if event.kind == "resume" and begun_s[0]:
            rows.append({"n_processes": n_members, "coordinator_s": time.thread_time() - begun_s[0]})
            coordinator.ending = End(None)
        elif event.kind == "resume":
            members.lose(n_members)

    mapping = RankMapping.even(n_members + 1, n_members + 1)
    planner = RecoveryPlanner(mapping)
    protocol = RecoveryProtocol(planner, range(n_members + 1), 1 << 30, suspend=lambda: None)
    members = Members(path, n_members + 1)
    coordinator = Coordinator(protocol, path, {}, members, watch, limits=Timeouts(hang_s=3600.0))
    planner.hosts = coordinator.hosts
    coordinator.run()
    return {**rows[0], "n_logical_workers": n_members + 1}


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
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
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
        for n_members in MEMBERS:
            with temporary_directory("cost") as path:
                add("agree", agree(path, n_members) | {"repeat": repeat})
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
