"""The entry point of continuous integration on machines that lack something."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAVES_A_NOTE = '#!/bin/sh\necho "$(basename "$0") $* [$MAKESPAN_PUBLISHED_DIR]" >> "$CALLS"\n'
MAKE = (
    LEAVES_A_NOTE
    + """
echo "=== $1 says $2 ==="
echo "===== 7 passed, 1 skipped in 0.0${#1}s ====="
[ "$1" != "$FAILS" ]
"""
)
GATES = ("report-test", "docs", "slurm-test", "gpu-test", "bench-test", "test", "hf-test")


@pytest.fixture
def machine(tmp_path):
    """Return a function that runs ``.ci/run`` where only the tools named exist, and what it called."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sh", "dirname", "basename", "id", "cat", "mktemp", "rm", "tee", "grep", "tail"):
        (tools / name).symlink_to(shutil.which(name))
    checkout = tmp_path / "place" / "checkout"
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy2(ROOT / ".ci" / "run", checkout / ".ci" / "run")

    def run(*present, lacks=(), **environment):
        for name in {"apt-get", "sudo", "chromium", "chromedriver", *present} - set(lacks):
            if name == "python3":
                (tools / name).symlink_to(sys.executable)
                continue
            (tools / name).write_text(MAKE if name == "make" else LEAVES_A_NOTE)
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

    run.place, run.tools = checkout.parent, tools
    return run


def test_a_complete_machine_installs_nothing_and_runs_every_gate(machine):
    done, calls = machine("make", "git", "python3")
    assert done.returncode == 0, done.stderr
    assert calls == "".join(f"make {gate} PYTHON=python3 []\n" for gate in GATES)


def test_every_gate_is_a_target_of_make_that_help_lists():
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(GATES) <= set(re.findall(r"^  make (\S+)", listed, re.MULTILINE))


def test_the_end_of_the_output_has_times_and_the_closing_lines_of_pytest(machine):
    done, _ = machine("make", "git", "python3")
    report = done.stdout.partition("=== all checks\n")[2].splitlines()
    times = [re.fullmatch(r"make (\S+) +passed +\d+ s", line) for line in report[: len(GATES)]]
    assert tuple(one and one.group(1) for one in times) == GATES
    assert re.fullmatch(r"together +\d+ s", report[len(GATES)])
    closings = report[len(GATES) + 1 :]
    assert closings[::2] == [f"make {gate}:" for gate in (*GATES[:5], "hf-test", "test")]
    assert closings[-1] == "===== 7 passed, 1 skipped in 0.04s ====="


@pytest.mark.parametrize("gate", ["docs", "slurm-test", "test"])
def test_a_gate_that_fails_fails_the_run_and_stops_no_other(machine, gate):
    done, calls = machine("make", "git", "python3", FAILS=gate)
    assert done.returncode == 1
    assert calls.count("make ") == len(GATES)
    assert re.search(rf"^make {gate} +FAILED", done.stdout, re.MULTILINE)
    assert done.stdout.count("FAILED") == 1
    end = done.stdout.partition(f"=== the end of make {gate}, which failed\n")[2]
    assert end.startswith(f"=== {gate} says PYTHON=python3 ===\n")
    assert "=== all checks" in end


@pytest.mark.parametrize(("version", "is_taken"), [("3.10", False), ("3.13", True), ("3.14", False)])
def test_a_python_that_is_not_supported_is_passed_over(machine, version, is_taken):
    other = machine.tools / "python3"
    other.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; sys.version_info = '
        f'({version.replace(".", ", ")}, 0, \'final\', 0); exec(sys.argv[1])" "$2"\n'
    )
    other.chmod(0o755)
    (machine.tools / "python3.11").symlink_to(sys.executable)
    _, calls = machine("make", "git")
    assert f"PYTHON={'python3' if is_taken else 'python3.11'} " in calls


def test_a_bare_machine_gets_what_is_missing(machine):
    done, calls = machine("make", "python3")
    assert done.returncode == 0, done.stderr
    assert "update -qq" in calls
    assert "install -y -qq --no-install-recommends git" in calls
    assert "python3-venv" not in calls


@pytest.mark.parametrize(
    ("lacks", "installed"),
    [(["chromedriver"], "chromium-driver"), (["chromium", "chromedriver"], "chromium chromium-driver")],
)
def test_without_a_browser_one_is_installed(machine, lacks, installed):
    done, calls = machine("make", "git", "python3", lacks=lacks)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"--no-install-recommends {installed} \[", calls)


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
