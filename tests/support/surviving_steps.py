"""Runs of steps of an allocation that survive losses: ``python surviving_steps.py losses|changes FOLDER``.

The script runs in a job of Slurm. It kills processes of its run, or lets them leave and join, and writes the
bits and the mappings of the run into ``FOLDER/found.json``.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from killers import Gate

from makespan.easyscale import ElasticTrainer
from makespan.runtime import SlurmLauncher

JOB = Path(__file__).with_name("recovering_job.py")
STEPS = 12
LAUNCHER = SlurmLauncher("cpu", ("--nodes=1", "--cpus-per-task=1", "--mem=0"), threads_per_process=1)


def trainer(folder, held=None):
    """Return the job; its file imports from this folder, which ``PYTHONPATH`` must have."""
    names = {name: f"{JOB}:{name}" for name in ("data", "loss", "after_reduce")}
    return ElasticTrainer(
        f"{JOB}:model", "adam", run_dir=folder / "run", n_logical_workers=4, micro_batch_size=4,
        options={"model": {"held": held}} if held else {}, **names,
    )  # fmt: skip


def bits(result):
    """Losses of all logical workers, and parameters, optimizer and contexts at the end, as plain values."""
    steps = result.steps.drop_duplicates(["step", "rank"], keep="last").sort_values(["step", "rank"])
    last = steps[steps["step"] == steps["step"].max()]
    return [
        list(steps["loss_hex"]),
        *(list(last[f"{name}_sha"]) for name in ("parameter", "optimizer", "context")),
    ]


class Steps(Gate):
    """A gate that knows the host of each process, and holds mini-batches until a process has left."""

    def __init__(self, *faults, leaves=(), **options):
        super().__init__(*faults, **options)
        self.hosts, self.leaves = {}, dict(leaves)

    def awaited(self):
        return super().awaited() | self.leaves.keys()

    def __call__(self, event):
        if event.kind == "resume":
            left = {each.node for each in self.events if each.kind == "leaving"}
            self.leaves = {step: node for step, node in self.leaves.items() if node not in left}
        if event.kind == "hello":
            self.hosts[event.node] = event.values["host"]
        super().__call__(event)

    def lose_host(self, node):
        """Kill all processes on the host of one at once."""
        for other, host in self.hosts.items():
            if host == self.hosts[node]:
                with suppress(ProcessLookupError):
                    os.kill(self.pids[other], signal.SIGKILL)

    def notify(self, *nodes):
        """Send SIGTERM to processes through Slurm."""
        for node in nodes:
            variables = Path(f"/proc/{self.pids[node]}/environ").read_text().split("\0")
            step = next(one.partition("=")[2] for one in variables if one.startswith("SLURM_STEP_ID="))
            job = os.environ["SLURM_JOB_ID"]
            # Some versions report an invalid job although they have sent the signal.
            subprocess.run(["scancel", "--signal=TERM", f"{job}.{step}"], check=False)


def losses(folder):
    """Lose a process, which is replaced, and then all processes of one of two hosts."""
    gate = Steps(("sum", 3, [1]), enters={6: 4})
    gate.acts.append(("contexts", 8, lambda: gate.lose_host(3)))
    return gate, {"mapping": "0/1/2/3", "n_replacements": 1}


def changes(folder):
    """Let a process join by a command, and the first leave by a signal of Slurm, then that one, too."""
    joined = []

    def join():
        words = ["easyscale", "join", "--launcher", "slurm", "--run-dir", str(folder / "run")]
        command = [sys.executable, "-c", "from makespan.cli import main; main()", *words]
        joined.append(subprocess.Popen(command))

    gate = Steps(enters={4: 2}, leaves={7: 0, 10: 2})
    gate.acts += [
        ("forward", 2, join),
        ("sum", 7, lambda: gate.notify(0)),
        ("sum", 10, lambda: joined[0].terminate()),
    ]
    return gate, {"mapping": "0,1/2,3"}


if __name__ == "__main__":
    where = Path(sys.argv[2])
    os.environ["PYTHONPATH"] += f":{JOB.parent}"
    made, options = {"losses": losses, "changes": changes}[sys.argv[1]](where)
    job = trainer(where, made.hold(where / "held"))
    ended = job.run(STEPS, survives=1, launcher=LAUNCHER, hang_s=600.0, on_event=made, **options)
    mappings = list(ended.reconfigurations["new_mapping"])
    found = {
        "bits": bits(ended),
        "mappings": mappings,
        "hosts": made.hosts,
        "left": len(made.faults + made.acts),
    }
    (where / "found.json").write_text(json.dumps(found))
