"""One worker, run inside the test: its request, its result, its report of an error."""

import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest

from makespan.plans import ExecutionPlan
from makespan.runtime import RunDirectory, latest_checkpoint, run_worker
from makespan.training import SmallModel, TrainingJob, read_progress, request_stop
from makespan.training.run import JOB, RESULT

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.xdist_group("training")

SIZES = {"n_layers": 2, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 16, "seq": 8, "vocab": 16}
ALONE = ExecutionPlan(global_batch_size=4, micro_batch_size=4)
PLANS = [
    ALONE,
    replace(ALONE, micro_batch_size=1, grad_accum_steps=4, family=None),
    replace(ALONE, checkpoint_fraction=1.0, family=None),
    replace(ALONE, checkpoint_fraction=1.0, checkpoint_method="selective", family=None),
    replace(ALONE, zero_stage=1, offload=True, family=None),
    replace(ALONE, zero_stage=3, family=None),
]


LOCAL = {"MAKESPAN_RANK": 0, "MAKESPAN_WORLD_SIZE": 1, "MAKESPAN_LOCAL_RANK": 0}


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Return a function that runs a request as the only process."""
    from makespan.training import worker as _worker
    from makespan.training.engine import _MESHES

    handler, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    variables = LOCAL | {"MAKESPAN_PARENT": os.getppid(), "MAKESPAN_LAUNCHED_AT": time.time()}
    variables |= {"MAKESPAN_DEVICE": "cpu", "MAKESPAN_THREADS": 1, "MAKESPAN_TIMEOUT_S": 60.0}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))

    def run(jobs, stop=False, **changes):
        request = {
            "jobs": [JOB.dump_python(job, mode="json") for job in jobs],
            "checkpoint_dir": None,
            "resume": None,
            "keep_gradients": False,
        }
        directory = RunDirectory(tmp_path)
        directory.prepare(request | changes)
        if stop:
            request_stop(tmp_path)
        _MESHES.clear()
        status = run_worker(tmp_path, _worker.run_jobs)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if status:
            return status, directory.error(0)
        found = map(directory.result, range(len(jobs)))
        return status, [RESULT.validate_python(values) for values in found if values is not None]

    yield run
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", ["llama", "gpt", "bert", "t5", "vit"])
def test_plans_of_one_process_agree(worker, family):
    jobs = [TrainingJob(SmallModel(family, **SIZES), plan, 3) for plan in PLANS]
    status, results = worker(jobs, keep_gradients=True)
    assert status == 0
    wanted = dict(np.load(results[0].gradients))
    for result in results[1:]:
        np.testing.assert_allclose(result.losses, results[0].losses, rtol=1e-5)
        found = np.load(result.gradients)
        for name, gradient in wanted.items():
            assert np.linalg.norm(found[name] - gradient) <= 1e-5 * np.linalg.norm(gradient)
    assert results[0].device == "cpu"
    assert results[0].peak_memory_bytes > 0


def test_longer_training_lowers_the_loss(worker):
    model = SmallModel("gpt", **{**SIZES, "hidden": 32})
    plan = ExecutionPlan(global_batch_size=16, micro_batch_size=16)
    _, (result,) = worker([TrainingJob(model, plan, 60)])
    assert np.mean(result.losses[-10:]) < 0.8 * result.losses[0]


def test_a_run_goes_on_from_its_checkpoint_under_another_plan(worker, tmp_path):
    job = TrainingJob(SmallModel("llama", **SIZES), ALONE, 6)
    _, (whole,) = worker([job])
    directory = str(tmp_path / "checkpoints")
    worker([replace(job, steps=3, plan=PLANS[4])], checkpoint_dir=directory)
    found = latest_checkpoint(directory)
    source = {"path": str(found.path), "step": found.step, "save_s": found.save_s, "verify_s": 0.0}
    _, (rest,) = worker([replace(job, plan=PLANS[5])], resume=source)
    np.testing.assert_allclose(rest.losses, whole.losses[3:], rtol=1e-5)
    assert rest.restart_cost.load_s > 0


def test_a_stop_request_ends_the_job_and_those_after_it(worker, tmp_path):
    job = TrainingJob(SmallModel("llama", **SIZES), ALONE, 50)
    _, results = worker([job, job], stop=True, checkpoint_dir=str(tmp_path / "checkpoints"))
    assert [(result.stopped, result.last_step) for result in results] == [(True, 1)]
    assert read_progress(tmp_path).step == 1


def test_an_error_is_reported_with_its_traceback(worker):
    two = ExecutionPlan(dp=2, global_batch_size=4, micro_batch_size=2)
    status, report = worker([TrainingJob(SmallModel("llama", **SIZES), two, 1)])
    assert status == 1
    assert report["error"] == "RuntimeError: the plan needs 2 processes, found 1"
    assert "Traceback" in report["traceback"]


def test_an_error_in_the_middle_of_training_is_reported_with_its_message(worker, monkeypatch, tmp_path):
    from makespan.training.engine import Engine

    proper = Engine.step

    def step(self, number, stop):
        if number == 2:
            raise ValueError("the data are bad")
        return proper(self, number, stop)

    monkeypatch.setattr(Engine, "step", step)
    status, report = worker([TrainingJob(SmallModel("llama", **SIZES), ALONE, 4)])
    assert (status, report["error"]) == (1, "ValueError: the data are bad")
    assert read_progress(tmp_path).step == 2


def test_a_task_of_srun_trains_like_a_process_of_the_local_launcher(worker, monkeypatch):
    job = TrainingJob(SmallModel("gpt", **SIZES), ALONE, 3)
    _, (local,) = worker([job])
    for name in (*LOCAL, "MAKESPAN_PARENT"):
        monkeypatch.delenv(name)
    for name, value in {"SLURM_PROCID": 0, "SLURM_NTASKS": 1, "SLURM_LOCALID": 0}.items():
        monkeypatch.setenv(name, str(value))
    status, (by_srun,) = worker([job])
    assert status == 0
    assert by_srun.losses == local.losses
