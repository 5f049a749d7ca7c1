"""A worker that dies in the middle of training brings the run down and leaves no process behind."""

import os
import sys
from pathlib import Path

import pytest

from makespan.errors import WorkerError
from makespan.plans import ExecutionPlan
from makespan.runtime import LocalLauncher, RunDirectory
from makespan.training import SmallModel, TrainingJob, read_progress, train

pytest.importorskip("torch")
pytestmark = pytest.mark.xdist_group("training")

ODD = Path(__file__).parents[1] / "support" / "odd_worker.py"
MODEL = SmallModel("llama", n_layers=2, hidden=16, heads=2, kv_heads=2, ffn=16, seq=8, vocab=16)
TWO = ExecutionPlan(tp=2, global_batch_size=4, micro_batch_size=4)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_death_in_the_middle_of_a_step_ends_the_others_who_wait_for_it(tmp_path):
    launcher = LocalLauncher(interpreter=(sys.executable, str(ODD), "kill:1:2"))
    with pytest.raises(WorkerError, match=r"process 1 of 2 was ended by signal SIGKILL"):
        train(TrainingJob(MODEL, TWO, 2000), launcher=launcher, run_dir=tmp_path)
    beat = read_progress(tmp_path)
    assert beat.step == 2
    assert beat.pids == tuple(RunDirectory(tmp_path).meeting())
    assert len(beat.pids) == 2
    assert not any(map(is_running, beat.pids))
