"""Every plan trains like one process: gradients and losses agree to 1e-5 relative in float32."""

import numpy as np
import pytest

from makespan.plans import ExecutionPlan
from makespan.runtime import LocalLauncher
from makespan.training import MODEL_FAMILIES as FAMILIES, SmallModel, TrainingJob, train_all

pytest.importorskip("torch")

BATCH, STEPS, TOLERANCE = 8, 4, 1e-5
LAUNCHER = LocalLauncher()


def plan(dp=1, accumulate=1, **options):
    return ExecutionPlan(
        dp=dp,
        global_batch_size=BATCH,
        micro_batch_size=BATCH // dp // accumulate,
        grad_accum_steps=accumulate,
        **options,
    )


ALONE = plan()
PLANS = {
    "GA": plan(accumulate=4),
    "GC": plan(checkpoint_fraction=1.0),
    "half GC, selective": plan(checkpoint_fraction=0.5, checkpoint_method="selective"),
    "ZeRO-1 alone, offload": plan(zero_stage=1, offload=True),
    "ZeRO-3 alone, offload, GA": plan(zero_stage=3, offload=True, accumulate=2),
    "DP": plan(dp=2),
    "DP, GA": plan(dp=2, accumulate=2),
    "ZeRO-1, GA": plan(dp=2, zero_stage=1, accumulate=2),
    "ZeRO-2": plan(dp=2, zero_stage=2),
    "ZeRO-3, GA": plan(dp=2, zero_stage=3, accumulate=2),
    "ZeRO-3, offload, GC": plan(dp=2, zero_stage=3, offload=True, checkpoint_fraction=1.0),
    "TP": plan(tp=2),
    "TP, sequence, GA": plan(tp=2, sequence_parallel=True, accumulate=2),
    "PP": plan(pp=2, accumulate=4),
    "PP, partition": plan(pp=2, accumulate=2, partition=(1, 3)),
    "PP, GPipe, GC": plan(pp=2, accumulate=2, schedule="gpipe", checkpoint_fraction=1.0),
    "PP, interleaved": plan(pp=2, accumulate=4, schedule="interleaved", interleave=2),
    "TP x PP": plan(tp=2, pp=2, accumulate=2),
    "DP x TP": plan(dp=2, tp=2),
    "DP x PP": plan(dp=2, pp=2, accumulate=2),
    "DP x TP, ZeRO-1, sequence": plan(dp=2, tp=2, zero_stage=1, sequence_parallel=True),
    "DP x TP, ZeRO-3": plan(dp=2, tp=2, zero_stage=3),
    "DP x PP, ZeRO-2, interleaved": plan(
        dp=2, pp=2, accumulate=2, zero_stage=2, schedule="interleaved", interleave=2
    ),
    "TP x PP, sequence, GC": plan(tp=2, pp=2, accumulate=2, sequence_parallel=True, checkpoint_fraction=1.0),
}
SOME = ("GA", "ZeRO-3, GA", "TP", "PP", "TP x PP")
CASES = [("llama", name) for name in PLANS]
CASES += [(family, name) for family in ("gpt", "bert", "t5", "vit") for name in SOME]
SIZES = {"llama": {"kv_heads": 2}, "vit": {"seq": 16, "vocab": 10}}


def job(family, chosen):
    return TrainingJob(SmallModel(family, **SIZES.get(family, {})), chosen, STEPS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Result of every case, and of one process for every family; one group of processes a size."""
    jobs = {(family, "alone"): job(family, ALONE) for family in FAMILIES}
    jobs |= {case: job(case[0], PLANS[case[1]]) for case in CASES}
    results = {}
    for size in (1, 2, 4):
        group = {name: one for name, one in jobs.items() if one.plan.n_gpus == size}
        directory = tmp_path_factory.mktemp(f"run-{size}")
        done = train_all(list(group.values()), launcher=LAUNCHER, run_dir=directory, keep_gradients=True)
        results |= zip(group, done, strict=True)
    return results


@pytest.mark.xdist_group("training")
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_one_process(runs, family):
    alone = runs[family, "alone"]
    wanted = np.load(alone.gradients)
    assert min(np.linalg.norm(wanted[weight]) for weight in wanted) > 0
    for name in (name for its_family, name in CASES if its_family == family):
        other = runs[family, name]
        np.testing.assert_allclose(other.losses, alone.losses, rtol=TOLERANCE, err_msg=name)
        found = np.load(other.gradients)
        assert set(found) == set(wanted), name
        for weight in wanted:
            distance = np.linalg.norm(found[weight] - wanted[weight])
            assert distance <= TOLERANCE * np.linalg.norm(wanted[weight]), (name, weight)


@pytest.mark.xdist_group("training")
def test_every_step_changes_the_loss(runs):
    for family in FAMILIES:
        assert len(set(runs[family, "alone"].losses)) == STEPS, family


@pytest.mark.xdist_group("training")
def test_phases_add_up_to_the_step(runs):
    for name in ("GA", "ZeRO-3, GA", "TP x PP"):
        for time in runs["llama", name].times:
            parts = (time.forward_s, time.backward_sync_s, time.optimizer_s)
            assert min(parts) > 0, name
            assert sum(parts) <= time.step_s, name
