"""Kill runs of the workflow at random moments; the same plain command then ends as if nothing had happened.

``python tests/support/killed_runs.py --kills 20 emulated --configfile config/test/morphling.yaml`` works on
a copy of this project. What is killed takes turns: Snakemake, a process of a job, both at once. With
``--each 5`` four of five commands go on where a killed one was, and are killed as well.
"""

import argparse
import csv
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("Snakefile", "rules", "workflow", "config", "envs", "profiles", "slurm", "src", "requirements.txt")
KINDS = ("snakemake", "job", "both")
PATIENCE_S = 3600  # for what must happen, however slow the machine
_LEFT = re.compile(
    r"\..+-[a-z0-9_]{8}\.tmp.*|makespan-.*\.tmp|tmp[a-z0-9_]{8}\..*\.py|\d+\.(in|out)put\.lock|\d+@.*"
)


def copy_project(target):
    """Copy what Snakemake needs of this project, without any product."""
    target.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, target / name)


@dataclass(frozen=True)
class Run:
    """A command that runs Snakemake in a copy of the project, with a folder for temporary files beside it."""

    root: Path
    arguments: tuple[str, ...]

    @property
    def temporary(self):
        return self.root.with_name(f"{self.root.name}-tmp")

    def start(self):
        self.temporary.mkdir(exist_ok=True)
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("COV_", "PYTEST_"))}
        own = {"PYTHONPATH": str(self.root / "src"), "TMPDIR": str(self.temporary)}
        command = [sys.executable, "-m", "snakemake", "--cores", "2", *self.arguments]
        with (self.root / "output.txt").open("wb") as output:
            return subprocess.Popen(
                command, cwd=self.root, env=kept | own, stdout=output, stderr=subprocess.STDOUT
            )

    def complete(self):
        """Run to the end, which must be a good one; seconds."""
        begun, status = time.monotonic(), self.start().wait()
        assert status == 0, (self.root / "output.txt").read_text()
        return time.monotonic() - begun

    def processes(self):
        """Processes that work in the copy, whoever started them."""
        found = set()
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_dead = (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if not is_dead and (path / "cwd").readlink().is_relative_to(self.root):
                    found.add(int(path.name))
        return found

    def jobs(self):
        """Processes that run the script of a rule, and those of their pools."""
        commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in self.processes()}
        found = []
        for pid, path in commands.items():
            with suppress(OSError):
                if b"/.snakemake/scripts/" in path.read_bytes():
                    found.append(pid)
        return sorted(found)

    def kill(self, kind, rng, after_s=None):
        """Start, kill something after a while or beside a job, wait for the end of all; what was killed."""
        process, killed = self.start(), []
        if after_s is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(after_s)
        if after_s is None or kind != "snakemake":
            until(lambda: process.poll() is not None or self.jobs())
        if kind != "snakemake" and (jobs := self.jobs()):
            killed.append(rng.choice(jobs))
        if kind != "job":
            killed.append(process.pid)
        for pid in killed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(PATIENCE_S)
        until(lambda: not self.processes())
        return killed

    def tables(self):
        """Rows of all tables by name, without times on the wall."""
        return {
            str(path.relative_to(self.root)): _without_times(path)
            for path in sorted((self.root / "results").rglob("*.csv"))
        }

    def leftovers(self):
        """What should not be there after a good end."""
        below = [path for path in self.root.rglob("*") if _LEFT.fullmatch(path.name)]
        incomplete = [path for path in (self.root / ".snakemake/incomplete").rglob("*") if path.is_file()]
        return [*below, *incomplete, *self.temporary.rglob("*")]

    def files(self):
        return sorted(str(path.relative_to(self.root)) for path in (self.root / "results").rglob("*"))

    def reset(self):
        for name in ("results", "logs", "benchmarks", ".snakemake"):
            shutil.rmtree(self.root / name, ignore_errors=True)


def _without_times(path):
    with path.open(newline="") as stream:
        rows = list(csv.reader(stream))
    kept = [number for number, name in enumerate(rows[0]) if not name.endswith("wall_s")]
    if len(kept) == len(rows[0]):
        return path.read_bytes()
    return [[row[number] for number in kept] for row in rows]


def _tell(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def check_recovery(run, expected):
    """Run the plain command once more and compare with what undisturbed runs made."""
    run.complete()
    tables = run.tables()
    assert tables and tables == {name: rows for name, rows in expected.items() if name in tables}
    assert not run.leftovers(), run.leftovers()
    assert not run.processes()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--each", type=int, default=1, help="kills before a run may end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("arguments", nargs="*", default=["emulated"])
    given, more = parser.parse_known_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder).resolve() / "project", (*given.arguments, *more))
        copy_project(run.root)
        longest_s = run.complete()
        expected, files = run.tables(), run.files()
        _tell(f"undisturbed: {longest_s:.0f} s, {len(expected)} tables")
        for number in range(given.kills):
            if number % given.each == 0:
                run.reset()
            kind, after_s = KINDS[number % len(KINDS)], rng.uniform(0, longest_s / given.each)
            killed = run.kill(kind, rng, after_s)
            _tell(f"{number + 1}: {kind} after {after_s:.1f} s, {len(killed)} killed")
            if (number + 1) % given.each == 0 or number + 1 == given.kills:
                check_recovery(run, expected)
                assert run.files() == files
                _tell("recovered")


if __name__ == "__main__":
    main()
