"""Processes of any kind: what each gets, who hears of a loss, and what no one needs to import."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from makespan.errors import InputError, WorkerError
from makespan.files import read_json
from makespan.runtime import (
    Launch,
    LocalLauncher,
    ProcessOptions,
    RunDirectory,
    SlurmLauncher,
    finish_checkpoint,
    latest_checkpoint,
    start_checkpoint,
)

TOY = [sys.executable, str(Path(__file__).parents[1] / "support" / "toy_worker.py")]


def launch(do, run_dir, n_processes=2, **more):
    return Launch(TOY, {"do": do}, n_processes, run_dir, **more)


def seen(run_dir):
    return [read_json(run_dir / f"seen-{rank}.json") for rank in range(2)]


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(condition):
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.fixture
def srun(tmp_path, monkeypatch):
    """Put a stand-in for srun in the way, which starts tasks with the variables that srun sets."""
    stand_in = tmp_path / "srun"
    stand_in.write_text(
        "#!/bin/sh\n"
        'tasks=$(echo "$1" | sed s/--ntasks=//); how=$2; [ "$3" = --exclusive ] || exit 9; shift 3; i=0\n'
        '[ "$how" = --exact ] && { SLURM_LOCALID=0 exec "$@"; }\n'
        'while [ $i -lt "$tasks" ]; do\n'
        '  SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NTASKS=$tasks "$@" & i=$((i + 1))\n'
        "done\nwait\n"
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return SlurmLauncher("cpu", options=("--exclusive",), threads_per_process=3)


# --- one dies, the others are told ------------------------------------------------------------------


@pytest.mark.xdist_group("training")
def test_processes_with_something_of_their_own_meet_anew_without_a_lost_one(srun, tmp_path):
    """Steps of Slurm, which find each other by the name of the host."""
    pytest.importorskip("torch")
    run_dir, cpu = tmp_path / "run", min(os.sched_getaffinity(0))
    options = [ProcessOptions({"GREETING": "hello"}), ProcessOptions({"GREETING": "bye"}, 2, (cpu,))]
    lost = srun.run(launch("meet_anew", run_dir, options=options, on_loss="tell"))
    assert lost == {0: "process 0 of 2 was ended by signal SIGKILL"}
    directory, (first, second) = RunDirectory(run_dir), seen(run_dir)
    pids = [first["pid"], second["pid"]]
    assert directory.result() == {"lost": {"0": lost[0]}, "alone": pids[1:], "sum": 3}
    assert (directory.meeting(), directory.meeting(1)) == (pids, pids[1:])
    assert read_json(run_dir / "sum.json") == [pids, 3, 2]
    assert [(one["greeting"], one["threads"]) for one in (first, second)] == [("hello", 3), ("bye", 2)]
    assert second["cpus"] == [cpu]


def test_on_one_machine_the_others_are_told_too(tmp_path):
    options = [ProcessOptions({"GREETING": "hello"}), ProcessOptions(threads=2)]
    lost = LocalLauncher().run(launch("survive", tmp_path, options=options, on_loss="tell"))
    assert RunDirectory(tmp_path).lost() == lost == {0: "process 0 of 2 was ended by signal SIGKILL"}
    assert RunDirectory(tmp_path).result() == {"0": lost[0]}
    assert [(one["greeting"], one["threads"]) for one in seen(tmp_path)] == [("hello", 1), (None, 2)]


def test_a_run_of_which_no_process_is_left_has_failed(tmp_path):
    with pytest.raises(
        WorkerError, match="no process is left; the first: process 0 of 1 ended with status 7"
    ):
        LocalLauncher().run(launch("leave", tmp_path, 1, on_loss="tell"))


# --- one dies, all end ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("fail", r"process 1 of 2 failed: ValueError: the data are bad\nTraceback"),
        ("kill", r"process 1 of 2 was ended by signal SIGKILL"),
        ("leave", r"process 0 of 2 ended with status 7 before it could report"),
        ("hang", r"no progress within 0\.5 s; the run was brought down"),
    ],
)
def test_all_end_with_the_error_of_the_first(tmp_path, do, message):
    with pytest.raises(WorkerError, match=message):
        LocalLauncher(stall_timeout_s=0.5).run(launch(do, tmp_path))
    assert RunDirectory(tmp_path).result() is None
    assert not any(is_running(one["pid"]) for one in seen(tmp_path))


def test_before_the_processes_have_met_no_time_is_too_long(tmp_path):
    assert LocalLauncher(stall_timeout_s=0.1).run(launch("start_slowly", tmp_path)) == {}


def test_a_run_may_not_take_longer_than_allowed(tmp_path):
    with pytest.raises(WorkerError, match=r"longer than 0.2 s"):
        LocalLauncher(timeout_s=0.2).run(launch("hang", tmp_path))


def test_workers_do_not_outlive_the_process_that_started_them(tmp_path):
    code = (
        "import sys; from pathlib import Path; from makespan.runtime import Launch, LocalLauncher\n"
        "LocalLauncher().run(Launch(sys.argv[2:], {'do': 'hang'}, 2, Path(sys.argv[1])))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *TOY])
    try:
        until(lambda: RunDirectory(tmp_path).meeting())
        pids = [one["pid"] for one in seen(tmp_path)]
        assert all(map(is_running, pids))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        until(lambda: not any(map(is_running, pids)))
    finally:
        parent.kill()
        parent.wait()


def test_what_cannot_start_is_named(tmp_path, monkeypatch):
    with pytest.raises(WorkerError, match="cannot start no-such-command"):
        LocalLauncher(interpreter=("no-such-command",)).run(Launch("some.module", {}, 1, tmp_path))
    with pytest.raises(InputError, match="options of 1 processes; accepted: none, or those of 3"):
        launch("end", tmp_path, 3, options=[ProcessOptions()])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WorkerError, match="cannot start srun"):
        SlurmLauncher().run(launch("end", tmp_path))


def test_ranks_of_srun_are_understood(srun, tmp_path):
    assert srun.run(launch("end", tmp_path / "run")) == {}
    found = [(one["rank"], one["size"], one["local_rank"], one["threads"]) for one in seen(tmp_path / "run")]
    assert found == [(0, 2, 0, 3), (1, 2, 1, 3)]


# --- files and imports ------------------------------------------------------------------------------


def test_the_newest_checkpoints_of_anything_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        (start_checkpoint(tmp_path) / "state").write_text(str(step))
        finish_checkpoint(tmp_path, step, 0.5, {"stages": [step]}, keep=2 if step > 3 else 3)
        found = latest_checkpoint(tmp_path)
        assert (found.step, found.save_s, found.values) == (step, 0.5, {"stages": [step]})
        found.verify()
    start_checkpoint(tmp_path)
    assert latest_checkpoint(tmp_path) == found
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000010"]


def test_saving_the_same_step_again_keeps_the_old_one_until_then(tmp_path):
    for expected in ("step-00000004", "step-00000004.1"):
        (start_checkpoint(tmp_path) / "state").write_text(expected)
        assert finish_checkpoint(tmp_path, 4, 0.5, {}).name == expected
        assert latest_checkpoint(tmp_path).path.name == expected
    assert (tmp_path / "step-00000004" / "state").read_text() == "step-00000004"


def test_faces_are_read_without_what_only_workers_and_tables_need():
    code = (
        "import sys, makespan.runtime\n"
        "from makespan.training import TrainingJob, check_supported, train\n"
        "from makespan.profiling import profile_batches, profile_points\n"
        "print(sorted({'torch', 'pandas', 'scipy', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
