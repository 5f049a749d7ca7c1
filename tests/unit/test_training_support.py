"""What can train is decided before a process starts, with the reason."""

import pytest

from makespan.errors import InfeasiblePlanError, InputError, UnknownNameError
from makespan.plans import ExecutionPlan
from makespan.runtime import LocalLauncher
from makespan.training import (
    SmallModel,
    TrainingJob,
    check_supported,
    train,
    train_all,
    train_switching,
    unsupported_reasons,
)
from makespan.training.run import JOB

LLAMA = SmallModel("llama", n_layers=4, hidden=64, heads=4, kv_heads=2)


def plan(dp=1, accumulate=1, batch=8, **options):
    return ExecutionPlan(
        dp=dp,
        global_batch_size=batch,
        micro_batch_size=batch // dp // accumulate,
        grad_accum_steps=accumulate,
        **options,
    )


@pytest.mark.parametrize(
    ("chosen", "model", "reason"),
    [
        (plan(tp=4), LLAMA, "tp=4 does not divide kv_heads=2"),
        (plan(tp=3), LLAMA, "tp=3 does not divide heads=4"),
        (plan(pp=8, accumulate=8), LLAMA, "8 pipeline stages need at least one layer each, the model has 4"),
        (plan(pp=2), LLAMA, "at least as many micro-batches in flight, found 1"),
        (plan(pp=2, accumulate=2, partition=(1, 2)), LLAMA, r"covers 3 of 4 layers"),
        (
            plan(pp=2, accumulate=3, batch=9, schedule="interleaved", interleave=2),
            LLAMA,
            "micro-batches in multiples of 2",
        ),
        (plan(tp=2, sequence_parallel=True), SmallModel("vit"), "vit averages over them"),
        (plan(tp=2, sequence_parallel=True), SmallModel("gpt", seq=31), "does not divide seq=31"),
    ],
)
def test_an_impossible_combination_says_why(chosen, model, reason):
    with pytest.raises(InfeasiblePlanError, match=reason):
        check_supported(chosen, model)


def test_all_reasons_come_at_once_and_devices_count():
    reasons = unsupported_reasons(plan(tp=4, pp=2), LLAMA, n_devices=4)
    assert len(reasons) == 3
    assert reasons[0] == "dp=1 x tp=4 x pp=2 needs 8 devices, found 4"
    assert unsupported_reasons(plan(tp=2, pp=2, accumulate=2), LLAMA, n_devices=4) == []


def test_an_impossible_run_starts_no_process(tmp_path):
    launcher = LocalLauncher(interpreter=("no-such-command",))
    with pytest.raises(InfeasiblePlanError, match="kv_heads"):
        train(TrainingJob(LLAMA, plan(tp=4), 1), launcher=launcher, run_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_gpus_that_are_not_there_are_the_reason(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InfeasiblePlanError, match="needs 1 devices, found 0"):
        train(TrainingJob(LLAMA, plan(), 1), launcher=LocalLauncher("cuda"))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 66}, "hidden 66 must be an even multiple of heads 4"),
        ({"kv_heads": 3}, "kv_heads 3 must divide heads 4"),
        ({"n_layers": 0}, "n_layers is 0"),
        ({"vocab": 1}, "vocab is 1; expected a whole number >= 2"),
    ],
)
def test_sizes_are_checked(sizes, message):
    with pytest.raises(InputError, match=message):
        SmallModel("gpt", **sizes)


def test_families_are_known_by_name():
    with pytest.raises(UnknownNameError, match=r"model family 'llamas'.*Did you mean 'llama'"):
        SmallModel("llamas")


@pytest.mark.parametrize("numbers", [{"steps": 0}, {"learning_rate": 0.0}, {"weight_decay": -1.0}])
def test_numbers_of_a_job_are_checked(numbers):
    with pytest.raises(InputError, match=next(iter(numbers))):
        TrainingJob(LLAMA, plan(), **{"steps": 1, **numbers})


def test_a_job_survives_the_way_to_another_process():
    job = TrainingJob(LLAMA, plan(pp=2, accumulate=2, partition=(1, 3)), 3, seed=5)
    assert JOB.validate_python(JOB.dump_python(job, mode="json")) == job


def test_jobs_that_train_together_need_equally_many_processes():
    with pytest.raises(InputError, match="found 1, 2"):
        train_all([TrainingJob(LLAMA, plan(), 1), TrainingJob(LLAMA, plan(dp=2), 1)])
    with pytest.raises(InputError, match="found no job"):
        train_all([])


def test_gradients_are_kept_only_where_someone_finds_them():
    with pytest.raises(InputError, match="keep_gradients needs run_dir"):
        train(TrainingJob(LLAMA, plan(), 1), keep_gradients=True)


@pytest.mark.parametrize("steps", [(5, 3), (0,), (10,)])
def test_plans_change_in_order_and_within_the_run(steps):
    with pytest.raises(InputError, match="expected increasing numbers from 1 to 9"):
        train_switching(TrainingJob(LLAMA, plan(), 10), [(step, plan()) for step in steps])
