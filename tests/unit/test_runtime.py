"""Processes of any kind: what each gets, who hears of a loss, and what no one needs to import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from makespan.errors import InputError, WorkerError
from makespan.files import read_json
from makespan.runtime import (
    LocalLauncher,
    ProcessOptions,
    RunDirectory,
    SlurmLauncher,
    checkpoints,
    finish_checkpoint,
    prune_checkpoints,
    start_checkpoint,
)

TOY = [sys.executable, str(Path(__file__).parents[1] / "support" / "toy_worker.py")]
OPTIONS = [ProcessOptions({"GREETING": "hello"}), ProcessOptions({"GREETING": "bye"}, threads=2)]


def seen(run_dir):
    return [read_json(run_dir / f"seen-{rank}.json") for rank in range(2)]


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.xdist_group("training")
def test_a_process_that_is_told_of_a_loss_meets_anew_and_ends_well(tmp_path):
    pytest.importorskip("torch")
    cpu = min(os.sched_getaffinity(0))
    options = [OPTIONS[0], ProcessOptions({"GREETING": "bye"}, threads=2, cpus=(cpu,))]
    lost = LocalLauncher(timeout_s=300).run(
        TOY, {"meet": True, "dies": 0}, 2, tmp_path, options=options, on_loss="tell"
    )
    assert lost == {0: "process 0 of 2 was ended by signal SIGKILL"}
    directory = RunDirectory(tmp_path)
    assert directory.lost() == lost
    assert directory.result() == {"lost": {"0": lost[0]}, "by": 1}
    first, second = seen(tmp_path)
    assert [one["greeting"] for one in (first, second)] == ["hello", "bye"]
    assert [one["threads"] for one in (first, second)] == [1, 2]
    assert [one["torch_threads"] for one in (first, second)] == [1, 2]
    assert second["cpus"] == [cpu]
    assert directory.meeting() == [first["pid"], second["pid"]]
    assert directory.meeting(1) == [second["pid"]]
    assert first["sum"] == second["sum"] == 3


def test_by_default_all_end_with_the_error_of_the_one(tmp_path):
    with pytest.raises(WorkerError, match="process 1 of 2 was ended by signal SIGKILL"):
        LocalLauncher().run(TOY, {"meet": False, "dies": 1}, 2, tmp_path)
    assert RunDirectory(tmp_path).result() is None
    assert not any(is_running(one["pid"]) for one in seen(tmp_path))


def test_on_slurm_a_process_with_something_of_its_own_is_a_step_of_its_own(tmp_path, monkeypatch):
    """A stand-in for srun that starts one task with the variable that srun sets."""
    stand_in = tmp_path / "srun"
    stand_in.write_text('#!/bin/sh\n[ "$1 $2 $3" = "--ntasks=1 --exact --mem=1" ] || exit 9\n'
                        'shift 3; SLURM_LOCALID=0 exec "$@"\n')  # fmt: skip
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    launcher = SlurmLauncher("cpu", options=("--mem=1",), threads_per_process=3)
    request = {"meet": False, "dies": 1}
    lost = launcher.run(TOY, request, 2, tmp_path / "run", options=OPTIONS, on_loss="tell")
    assert list(lost) == [1]
    assert [(one["greeting"], one["threads"]) for one in seen(tmp_path / "run")] == [("hello", 3), ("bye", 2)]


def test_a_run_of_which_no_process_is_left_has_failed(tmp_path):
    broken = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(
        WorkerError, match="no process is left; the first: process 0 of 1 ended with status 3"
    ):
        LocalLauncher().run(broken, {}, 1, tmp_path, on_loss="tell")


def test_options_are_for_every_process_or_none(tmp_path):
    with pytest.raises(InputError, match="options of 2 processes; accepted: none, or those of 3"):
        LocalLauncher().run(TOY, {}, 3, tmp_path, options=OPTIONS)


def test_checkpoints_of_anything_are_listed_and_pruned(tmp_path):
    for step in (1, 2, 3):
        (start_checkpoint(tmp_path) / "state").write_text(str(step))
        finish_checkpoint(tmp_path, step, 0.5, {"stages": [step]}, keep=3)
    start_checkpoint(tmp_path)
    found = checkpoints(tmp_path)
    assert [(one.step, one.save_s, one.values) for one in found] == [
        (step, 0.5, {"stages": [step]}) for step in (1, 2, 3)
    ]
    found[0].verify()
    prune_checkpoints(tmp_path, 1)
    assert checkpoints(tmp_path) == found[2:]


def test_faces_are_read_without_what_only_workers_and_tables_need():
    code = (
        "import sys, makespan.runtime, makespan.training, makespan.profiling\n"
        "print(sorted({'torch', 'pandas', 'scipy', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
