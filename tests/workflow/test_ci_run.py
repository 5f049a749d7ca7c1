"""The entry point of continuous integration on machines that lack something."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAVES_A_NOTE = '#!/bin/sh\necho "$(basename "$0") $* [$MAKESPAN_PUBLISHED_DIR]" >> "$CALLS"\n'


@pytest.fixture
def machine(tmp_path):
    """Return a function that runs ``.ci/run`` where only the tools named exist, and what it called."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sh", "dirname", "basename", "id", "cat"):
        (tools / name).symlink_to(shutil.which(name))
    checkout = tmp_path / "place" / "checkout"
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy2(ROOT / ".ci" / "run", checkout / ".ci" / "run")

    def run(*present, **environment):
        for name in {"apt-get", "sudo", *present}:
            if name == "python3":
                (tools / name).symlink_to(sys.executable)
                continue
            (tools / name).write_text(LEAVES_A_NOTE)
            (tools / name).chmod(0o755)
        calls = tmp_path / "calls"
        calls.touch()
        done = subprocess.run(
            [checkout / ".ci" / "run"],
            env={"PATH": str(tools), "CALLS": str(calls), **environment},
            cwd=os.sep,
            capture_output=True,
            text=True,
            check=False,
        )
        return done, calls.read_text()

    run.place = checkout.parent
    return run


def test_a_complete_machine_installs_nothing_and_runs_make_test(machine):
    done, calls = machine("make", "git", "python3")
    assert done.returncode == 0, done.stderr
    assert calls == "make test PYTHON=python3 []\n"


def test_a_bare_machine_gets_what_is_missing(machine):
    done, calls = machine("make", "python3")
    assert done.returncode == 0, done.stderr
    assert "update -qq" in calls
    assert "install -y -qq --no-install-recommends git" in calls
    assert "python3-venv" not in calls


def test_without_python_python_is_installed(machine):
    done, calls = machine("make", "git")
    assert done.returncode == 0, done.stderr
    assert "--no-install-recommends python3 python3-venv" in calls


def test_published_files_beside_the_checkout_are_used(machine):
    published = machine.place / "shared" / "published"
    published.mkdir(parents=True)
    assert f"[{published}]" in machine("make", "git", "python3")[1]


def test_a_directory_that_is_set_already_is_kept(machine):
    (machine.place / "shared" / "published").mkdir(parents=True)
    assert "[mine]" in machine("make", "git", "python3", MAKESPAN_PUBLISHED_DIR="mine")[1]
