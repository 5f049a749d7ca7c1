"""A temporary copy of the project in which Snakemake runs, and one such copy with a small run in it."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked_snakemake import run_snakemake
from hidden_packages import hiding_all_but, run_set
from killed_runs import copy_project

SMALL = tuple(f"config/test/{paper}.yaml" for paper in ("morphling", "easyscale", "oobleck", "slapo"))
LONGEST_S = 3600  # against runs that hang; a small one takes a minute or two, more on a busy machine


@dataclass(frozen=True)
class Done:
    """How a run of Snakemake ended, and what it wrote on its output and error stream."""

    returncode: int
    stdout: str


@dataclass(frozen=True)
class Project:
    """A copy of the project; its own ``src`` is what jobs import and what rules hash."""

    root: Path

    def snakemake(self, *arguments, published=None, small=True, proxy=None):
        """Run Snakemake here and return how it ended."""
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("COV_", "PYTEST_"))
        }
        environment["PYTHONPATH"] = str(self.root / "src")
        environment.pop("MAKESPAN_PUBLISHED_DIR", None)
        if published is not None:
            environment["MAKESPAN_PUBLISHED_DIR"] = str(published)
        if proxy is not None:
            environment["https_proxy"] = proxy
        files = ["--configfile", *SMALL] if small else []
        output = self.root.with_name(f"{self.root.name}.txt")
        status = run_snakemake([*arguments, *files], self.root, environment, output, LONGEST_S)
        return Done(status, output.read_text())

    def planned(self, *arguments, **options):
        """Return the rules that a dry run plans, with the number of jobs of each."""
        done = self.snakemake("-n", *arguments, **options)
        assert done.returncode == 0, done.stdout
        table = done.stdout.partition("Job stats:")[2].partition("total")[0]
        return {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}

    def built(self, *arguments, **options):
        """Run the workflow and fail with its output if it fails."""
        done = self.snakemake("--cores", "2", *arguments, **options)
        assert done.returncode == 0, done.stdout
        return done

    def python(self, *arguments):
        """Run Python with the run set alone, the developer set hidden; fail if it fails."""
        environment = hiding_all_but(run_set(), self.root / "src")
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def build_small_run(self):
        """Build everything at the sizes of the small configuration."""
        self.python("-m", "snakemake", "--cores", "2", "--configfile", *SMALL)

    def copy(self, target):
        """Return a copy that keeps times, Snakemake's records, and what was read of code."""
        shutil.copytree(self.root, target, symlinks=True)
        memory = target / ".snakemake" / "makespan-code.json"  # by path, with the time of each file
        memory.write_text(memory.read_text().replace(f'"{self.root}/', f'"{target}/'))
        return Project(target)


@pytest.fixture(scope="session")
def unbuilt(tmp_path_factory, worker_id):
    """Return a copy of the project whose code one dry run has read and compiled; never to be changed."""

    def plan(copy):
        assert copy.planned()

    return shared(tmp_path_factory, worker_id, "unbuilt", plan)


@pytest.fixture
def project(unbuilt, tmp_path):
    """Return a copy of the project without any product."""
    return unbuilt.copy(tmp_path / "project")


def shared(tmp_path_factory, worker_id, name, prepare):
    """Return a prepared copy of the project, one for all processes: one prepares, others wait."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / name
    copy = Project(folder / "project")
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            shutil.rmtree(copy.root, ignore_errors=True)
            copy_project(copy.root)
            prepare(copy)
            (folder / "ready").touch()
    return copy


@pytest.fixture(scope="session")
def small_run(tmp_path_factory, worker_id):
    """Return a copy of the project after a complete small run; never to be changed."""
    return shared(tmp_path_factory, worker_id, "small", Project.build_small_run)


@pytest.fixture
def finished(small_run, tmp_path):
    """Return a copy of the project after a complete small run; free to be changed."""
    return small_run.copy(tmp_path / "finished")
