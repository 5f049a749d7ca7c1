"""Checkpoints: complete or absent, checked when read, and independent of the plan that wrote them."""

import json
import pickle
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from makespan.errors import CheckpointError, ChecksumError, WorkerError
from makespan.plans import ExecutionPlan
from makespan.runtime import LocalLauncher, checkpoints as _checkpoints, latest_checkpoint
from makespan.training import (
    SmallModel,
    TrainingJob,
    read_progress,
    request_stop,
    train,
    train_switching,
)
from makespan.training.run import JOB as CODEC

pytest.importorskip("torch")
pytestmark = pytest.mark.xdist_group("training")

ODD = Path(__file__).parents[1] / "support" / "odd_worker.py"
MODEL = SmallModel("llama", n_layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, seq=16, vocab=32)
ALONE = ExecutionPlan(global_batch_size=8, micro_batch_size=8)
ZERO = ExecutionPlan(dp=2, zero_stage=3, global_batch_size=8, micro_batch_size=4)
OWNERS = ExecutionPlan(
    dp=2, zero_stage=1, offload=True, global_batch_size=8, micro_batch_size=2, grad_accum_steps=2
)
SPLIT = ExecutionPlan(tp=2, pp=2, global_batch_size=8, micro_batch_size=4, grad_accum_steps=2)
JOB = TrainingJob(MODEL, ALONE, 4, checkpoint_every=2)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Directory with the checkpoints after 2 and 4 steps of a run in one process, and its result."""
    directory = tmp_path_factory.mktemp("checkpoints")
    return directory, train(JOB, checkpoint_dir=directory)


@pytest.fixture
def copied(written, tmp_path):
    return shutil.copytree(written[0], tmp_path / "copied")


def test_changing_plans_and_processes_does_not_change_the_losses(written, tmp_path):
    """A run that went on with fresh moments would have other losses from the second step on."""
    job = replace(JOB, checkpoint_every=0)
    parts = train_switching(job, [(1, ZERO), (2, SPLIT), (3, OWNERS)], checkpoint_dir=tmp_path)
    losses = [loss for part in parts for loss in part.losses]
    np.testing.assert_allclose(losses, written[1].losses, rtol=1e-5)
    assert [part.first_step for part in parts] == [0, 1, 2, 3]
    assert [part.last_step for part in parts] == [1, 2, 3, 4]
    assert parts[0].restart_cost is None
    for part in parts[1:]:
        cost = part.restart_cost
        assert min(cost.save_s, cost.process_start_s, cost.build_s, cost.load_s) > 0
        assert cost.total_s > cost.process_start_s


def test_the_newest_two_are_kept_with_what_a_reader_needs(written):
    directory, result = written
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000002", "step-00000004"]
    newest = latest_checkpoint(directory)
    assert newest.step == 4
    assert CODEC.validate_python(newest.values["job"]) == JOB
    assert str(newest.path) == result.checkpoint
    assert len(result.save_s) == 2
    newest.verify()


@pytest.mark.parametrize("harm", ["change", "remove"])
def test_a_damaged_file_is_refused_before_a_process_starts(copied, harm):
    victim = next((copied / "step-00000004").glob("*.distcp"))
    if harm == "change":
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    else:
        victim.unlink()
    with pytest.raises(ChecksumError, match=victim.name):
        train(replace(JOB, steps=6), resume=copied, launcher=NO_PROCESS)


NO_PROCESS = LocalLauncher(interpreter=("no-such-command",))


class Planted:
    """An object whose unpickling leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def rewrite(path, change, *, with_digest):
    """Change a manifest, with or without the digest that goes with the change."""
    manifest = json.loads(path.read_text())
    change(manifest)
    if with_digest:
        del manifest["digest"]
        manifest["digest"] = _checkpoints._digest_of(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("harm", ["no manifest", "swapped", "swapped and left out", "added", "linked"])
def test_a_checkpoint_that_is_not_as_written_is_never_unpickled(copied, tmp_path, harm):
    newest, proof = copied / "step-00000004", tmp_path / "unpickled"
    shutil.rmtree(copied / "step-00000002")
    metadata, manifest = newest / ".metadata", newest / "manifest.json"
    planted = pickle.dumps(Planted(proof))
    if harm == "added":
        (newest / "other").mkdir()
        (newest / "other" / ".metadata").write_bytes(planted)
    elif harm == "linked":
        metadata.rename(tmp_path / "metadata")
        metadata.symlink_to(tmp_path / "metadata")
    else:
        metadata.write_bytes(planted)
    if harm == "no manifest":
        manifest.unlink()
    if harm == "swapped and left out":
        rewrite(manifest, lambda values: values["files"].pop(".metadata"), with_digest=True)
    named = "no complete checkpoint" if harm == "no manifest" else r"\.metadata: (is no|checksum)"
    with pytest.raises((CheckpointError, ChecksumError), match=named):
        train(replace(JOB, steps=6), resume=copied)  # with processes that could load it
    assert not proof.exists()
    pickle.loads(planted)
    assert proof.exists()


@pytest.mark.parametrize(
    ("change", "with_digest", "message"),
    [
        (lambda values: values.update(step=1), False, "the manifest was written with"),
        (lambda values: values["files"].popitem(), False, "the manifest was written with"),
        (lambda values: values.update(step=3), True, "written for step 3, not for this directory"),
        (lambda values: values.pop("files"), True, "is not a manifest of a checkpoint; expected"),
        (lambda values: values.pop("digest"), False, "is not a manifest of a checkpoint; expected"),
        (lambda values: values.pop("job"), True, "has no job of makespan.training"),
        (lambda values: values["files"].popitem(), True, "is not in the manifest"),
        (
            lambda values: values["files"].update({"../x": "0"}),
            True,
            "x: the file of the checkpoint is missing",
        ),
    ],
)
def test_a_manifest_that_was_altered_is_refused(copied, change, with_digest, message):
    rewrite(copied / "step-00000004/manifest.json", change, with_digest=with_digest)
    with pytest.raises((CheckpointError, ChecksumError), match=message):
        train(replace(JOB, steps=6), resume=copied, launcher=NO_PROCESS)


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"step": ', "null"])
def test_what_is_no_manifest_is_refused_with_its_name(copied, text):
    (copied / "step-00000004/manifest.json").write_text(text)
    with pytest.raises(
        CheckpointError, match=r"step-00000004/manifest\.json: (is not a manifest|cannot be read)"
    ):
        latest_checkpoint(copied)


def test_another_run_cannot_continue_from_it(written):
    for change, message in [
        ({"seed": 1}, "written with seed 0, but the job has 1"),
        ({"model": SmallModel("gpt")}, "written with model"),
        (
            {"plan": ExecutionPlan(global_batch_size=4, micro_batch_size=4)},
            "global batch 8, but the plan has 4",
        ),
        ({"steps": 4}, "4 steps are done; expected a job of more, got 4"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            train(replace(JOB, **{"steps": 6, **change}), resume=written[0])


def test_without_a_checkpoint_nothing_continues(tmp_path):
    (tmp_path / "step-00000009").mkdir()
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        train(JOB, resume=tmp_path)


def test_a_kill_during_saving_leaves_the_previous_one(copied):
    before = {path: path.read_bytes() for path in sorted(copied.rglob("*")) if path.is_file()}
    killed = LocalLauncher(interpreter=(sys.executable, str(ODD), "kill-in-save"))
    longer = replace(JOB, steps=6)
    with pytest.raises(WorkerError, match="SIGKILL"):
        train(longer, launcher=killed, checkpoint_dir=copied, resume=copied)
    assert (copied / ".partial").is_dir()
    assert {path: path.read_bytes() for path in before} == before
    assert latest_checkpoint(copied).step == 4
    result = train(longer, checkpoint_dir=copied, resume=copied)
    assert result.last_step == latest_checkpoint(copied).step == 6
    assert not (copied / ".partial").exists()


def test_a_run_can_be_stopped_from_outside_and_continued(tmp_path):
    job = replace(JOB, steps=100_000, checkpoint_every=0)
    run_dir, checkpoints, results = tmp_path / "run", tmp_path / "checkpoints", []
    thread = threading.Thread(
        target=lambda: results.append(train(job, run_dir=run_dir, checkpoint_dir=checkpoints))
    )
    thread.start()
    deadline = time.monotonic() + 3600
    while ((beat := read_progress(run_dir)) is None or beat.step < 3) and time.monotonic() < deadline:
        time.sleep(0.02)
    request_stop(run_dir)
    thread.join(3600)
    (result,) = results
    assert result.stopped
    assert 3 <= result.last_step < job.steps
    assert latest_checkpoint(checkpoints).step == result.last_step
    more = train(replace(job, steps=result.last_step + 2), resume=checkpoints)
    assert not more.stopped
    assert more.losses == train(replace(job, steps=result.last_step + 2)).losses[-2:]
