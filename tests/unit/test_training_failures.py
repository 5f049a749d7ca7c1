"""A worker that dies brings the run down with its own error, soon, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from makespan.errors import WorkerError
from makespan.plans import ExecutionPlan
from makespan.runtime import LocalLauncher, RunDirectory, SlurmLauncher
from makespan.training import SmallModel, TrainingJob, read_progress, train

pytest.importorskip("torch")
pytestmark = pytest.mark.xdist_group("training")

ODD = Path(__file__).parents[1] / "support" / "odd_worker.py"
MODEL = SmallModel("llama", n_layers=2, hidden=16, heads=2, kv_heads=2, ffn=16, seq=8, vocab=16)
TWO = ExecutionPlan(dp=2, global_batch_size=4, micro_batch_size=2)
JOB = TrainingJob(MODEL, TWO, 2000)
SOON_S = 6.0


def launcher(what, **limits):
    return LocalLauncher(interpreter=(sys.executable, str(ODD), what), timeout_s=120.0, **limits)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", r"process 1 of 2 failed: ValueError: the data are bad"),
        ("kill", r"process 1 of 2 was ended by signal SIGKILL"),
    ],
)
def test_the_error_is_that_of_the_process_that_failed(tmp_path, what, message):
    with pytest.raises(WorkerError, match=message):
        train(JOB, launcher=launcher(what), run_dir=tmp_path)
    beat = read_progress(tmp_path)
    assert beat.step == 2
    assert time.time() - beat.time_s < SOON_S
    assert len(beat.pids) == 2
    assert not any(map(is_running, beat.pids))


def test_a_process_that_ends_before_it_can_report_is_named(tmp_path):
    with pytest.raises(WorkerError, match="process 0 of 2 ended with status 7 before it could report"):
        train(JOB, launcher=launcher("exit"), run_dir=tmp_path)


def test_a_run_without_progress_is_brought_down(tmp_path):
    with pytest.raises(WorkerError, match="no progress within 3 s"):
        train(JOB, launcher=launcher("hang", stall_timeout_s=3.0), run_dir=tmp_path)
    assert not any(map(is_running, RunDirectory(tmp_path).meeting()))


def test_a_run_may_not_take_longer_than_allowed():
    with pytest.raises(WorkerError, match=r"longer than 0.2 s"):
        train(JOB, launcher=LocalLauncher(timeout_s=0.2))


def test_a_command_that_does_not_exist_is_named():
    with pytest.raises(WorkerError, match="cannot start no-such-command"):
        train(JOB, launcher=LocalLauncher(interpreter=("no-such-command",)))


def test_workers_do_not_outlive_the_process_that_started_them(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from test_training_failures import JOB, train\n"
        "train(JOB, run_dir=sys.argv[1])"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)])
    try:
        until(lambda: (beat := read_progress(tmp_path)) is not None and beat.step >= 1)
        pids = read_progress(tmp_path).pids
        assert all(map(is_running, pids))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        until(lambda: not any(map(is_running, pids)), seconds=SOON_S)
    finally:
        parent.kill()
        parent.wait()


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_ranks_of_srun_are_understood(tmp_path, monkeypatch):
    """A stand-in for srun that starts the tasks with the variables that srun sets."""
    stand_in = tmp_path / "srun"
    stand_in.write_text(
        "#!/bin/sh\n"
        'tasks=$(echo "$1" | sed s/--ntasks=//); shift 3; i=0\n'
        'while [ $i -lt "$tasks" ]; do\n'
        '  SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NTASKS=$tasks "$@" & i=$((i + 1))\n'
        "done\nwait\n"
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    chosen = SlurmLauncher("cpu", options=("--exclusive",), threads_per_process=1, timeout_s=100.0)
    result = train(TrainingJob(MODEL, TWO, 3), launcher=chosen)
    assert result.losses == train(TrainingJob(MODEL, TWO, 3)).losses


def test_without_srun_the_launch_fails_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WorkerError, match="cannot start srun"):
        train(JOB, launcher=SlurmLauncher())
