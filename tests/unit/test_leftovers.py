"""Killed processes: what they leave behind goes away, and nothing else does."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from makespan.cleanup import sweep, temporary_directory
from makespan.files import write_text

HOST = socket.gethostname()
HOLDING = (
    "import sys, tempfile; from pathlib import Path\n"
    "from makespan.cleanup import temporary_directory, temporary_file\n"
    "folder = Path(sys.argv[1])\n"
    "tempfile.tempdir = str(folder)\n"
    "with temporary_directory('run') as one, temporary_file(folder, '.table-', '.csv') as two:\n"
    "    (one / 'inside').touch(); print(one, two, sep='\\n', flush=True); sys.stdin.read()"
)
RUNNING = (
    "import subprocess, sys; from makespan.cleanup import register_run\n"
    "register_run(); print('registered', flush=True)\n"
    "subprocess.run(['sh', '-c', sys.argv[1] + '; true']) if sys.argv[1:] else sys.stdin.read()"
)
ASKING = "from makespan.cleanup import register_run; print(register_run())"
JOB = (
    "import os, time; from pathlib import Path; from makespan.logs import logged_to\n"
    "with logged_to('job.log'):\n    Path('pid').write_text(str(os.getpid())); time.sleep(600)"
)
POOL = (
    "import time; from pathlib import Path; from makespan.studies import runs, run_all, scenario\n"
    "from makespan.studies import SimulationSpec\n"
    "runs._run_case = lambda *_: (Path('started').touch(), time.sleep(600))\n"
    "few = scenario('base', n_jobs=2)\n"
    "run_all([SimulationSpec(few, 'fifo'), SimulationSpec(few, 'sjf')], 2)"
)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that starts Python code in ``tmp_path``; what still runs at the end is killed."""
    monkeypatch.chdir(tmp_path)
    started = []

    def run(code, *arguments):
        piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], **piped))
        return started[-1]

    yield run
    for process in started:
        end(process)


def end(process):
    process.kill()
    process.communicate()


def until(condition, process=None):
    """Wait for what a process is to do; a process that has ended does nothing any more."""
    deadline = time.monotonic() + 3600
    while not condition():
        assert process is None or process.poll() is None or condition(), "ended before"
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def locked():
    """Put a lock into the directory of Snakemake as a run leaves it, and return its path."""
    lock = Path(".snakemake/locks/0.output.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_text("results/claims.csv\n")
    return lock


# --- files and directories --------------------------------------------------------------------------


def test_only_what_belongs_to_a_dead_process_is_swept(start, tmp_path):
    kept = [tmp_path / name for name in (".table-12345678.csv", ".table-my.tmp.csv", "makespan-run-mine")]
    for path in kept:
        path.touch()
    process = start(HOLDING, tmp_path)
    held = [Path(process.stdout.readline().rstrip("\n")) for _ in range(2)]
    sweep(tmp_path)
    assert all(path.exists() for path in held)
    end(process)
    assert all(path.exists() for path in held)
    sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_the_next_to_write_there_sweeps_by_itself(start, tmp_path):
    process = start(HOLDING, tmp_path)
    held = [Path(process.stdout.readline().rstrip("\n")) for _ in range(2)]
    end(process)
    write_text("whole", tmp_path / "table.csv")
    assert not any(path.exists() for path in held)
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


def test_a_temporary_directory_is_gone_after_the_block(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with temporary_directory("run") as path:
        assert path.is_relative_to(tmp_path) and path.name.startswith("makespan-run-")
        (path / "file").touch()
    assert not list(tmp_path.iterdir())


# --- runs of the workflow ---------------------------------------------------------------------------


def test_locks_of_a_killed_run_are_removed_and_those_of_a_live_one_are_not(start):
    process = start(RUNNING)
    process.stdout.readline()
    lock = locked()
    script = Path(".snakemake/scripts/tmpabcdefgh.draw_figure.py")
    script.parent.mkdir()
    script.touch()
    (mark,) = Path(".snakemake/makespan-runs").iterdir()
    assert mark.name == f"{process.pid}@{HOST}"
    other = start(RUNNING)
    other.stdout.readline()
    assert lock.exists() and script.exists() and mark.exists()
    end(other)
    told, _ = start(ASKING).communicate()
    assert (
        told == f"this directory is in use by process {process.pid} on {HOST}; wait for its end, or end it\n"
    )
    end(process)
    assert lock.exists()
    told, _ = start(ASKING).communicate()
    assert told == "\n"
    assert not lock.exists() and not script.exists()
    assert not list(mark.parent.iterdir())


def test_locks_of_another_host_stay_and_the_message_says_what_to_do(start):
    lock, mark = locked(), Path(".snakemake/makespan-runs/17@elsewhere")
    mark.parent.mkdir()
    mark.touch()
    told, _ = start(ASKING).communicate()
    cure = f"rm {mark}; snakemake --unlock"
    assert told == f"this directory is locked by process 17 on elsewhere; if that run is over: {cure}\n"
    assert lock.exists() and mark.exists()


def test_locks_of_which_nothing_is_known_stay(start):
    lock = locked()
    told, _ = start(ASKING).communicate()
    assert "snakemake --unlock" in told
    assert lock.exists()


def test_temporary_directories_of_a_killed_snakemake_go_and_no_others(start, tmp_path):
    paths = [tmp_path / "snakemakeabcdefgh", tmp_path / "tmp12345678", tmp_path / "documents"]
    for path in paths:
        path.mkdir()
    code = RUNNING.replace("register_run()", f"register_run(*{[str(path) for path in paths]})", 1)
    process = start(code)
    process.stdout.readline()
    end(process)
    start(RUNNING).stdout.readline()
    assert [path.exists() for path in paths] == [False, False, True]


def test_a_job_ends_with_the_run_that_started_it_even_through_a_shell(start):
    process = start(RUNNING, f'{sys.executable} -c "{JOB}"')
    until(lambda: Path("pid").exists() and Path("pid").read_text(), process)
    job = int(Path("pid").read_text())
    assert is_alive(job)
    end(process)
    until(lambda: not is_alive(job))
    assert "the run of the workflow that started this job is gone" in Path("job.log").read_text()


def test_processes_of_a_pool_end_with_the_one_that_started_them(start):
    process = start(POOL)
    until(Path("started").exists, process)
    children = [
        int(one) for one in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]
    assert children and all(map(is_alive, children))
    end(process)
    until(lambda: not any(map(is_alive, children)))
