"""Cases that elastic training must survive or refuse, each by the test that tries it."""

import ast
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from elastic_job import OWN, bits, trainer

from makespan.easyscale import run_together
from makespan.easyscale.kernels import CANONICAL, LEVELS
from makespan.easyscale.parts import use_kernels
from makespan.errors import InputError, WorkerError
from makespan.runtime import LocalLauncher, RunDirectory

pytestmark = pytest.mark.xdist_group("training")

TESTS = Path(__file__).parents[1]
TRIED = {
    "N is no multiple of M": "stages_on_other_processes_train_with_the_same_bits",
    "N is no multiple of M: the loss of time":
        "uneven_numbers_of_equal_gpus_waste_and_surplus_leaves_the_last_gpu_first",
    "more devices than logical workers": "places_that_do_not_fit_are_refused",
    "one device": "stages_on_other_processes_train_with_the_same_bits",
    "no device": "a_request_takes_effect_at_the_next_boundary_and_no_device_suspends",
    "a change is asked for in a mini-batch":
        "a_request_takes_effect_at_the_next_boundary_and_no_device_suspends",
    "a process is killed": "no_kill_costs_a_bit",
    "a checkpoint is torn": "after_a_damaged_checkpoint_comes_the_one_before",
    "all checkpoints are torn": "without_a_sound_checkpoint_nothing_is_begun_anew",
    "a checkpoint of another job": "a_checkpoint_of_another_job_is_refused_with_every_field",
    "a checkpoint of another torch": "another_format_is_refused_and_another_torch_is_warned_of",
    "batches made ahead": "batches_made_ahead_must_be_forgotten",
    "a loader dies": "a_batch_whose_maker_was_killed_is_made_again_with_the_same_bits",
    "dropout": "dropout_draws_the_same_whatever_the_number_of_threads",
    "BatchNorm": "buffers_of_the_first_reach_every_logical_worker",
    "SyncBatchNorm": "what_only_a_process_can_know_is_told_in_one_line",
    "BatchNorm and one sample": "one_sample_under_batch_norm_fails_as_it_does_in_torch",
    "parameters that some do not use": "parameters_that_some_logical_workers_do_not_use",
    "gradients that are no numbers": "what_is_not_a_number_goes_through_the_sum",
    "gradients that are no numbers, scaled": "all_skip_a_step_in_which_one_overflows",
    "sparse gradients": "what_only_a_process_can_know_is_told_in_one_line",
    "the learning rate is changed in place": "a_learning_rate_that_is_changed_in_place_lasts",
    "several runs at a time": "runs_side_by_side_do_not_meet",
    "a process hangs": "a_process_that_hangs_brings_the_run_down",
    "no GPU": "gpus_that_are_not_there_are_refused",
    "an operator without deterministic kernel": "an_operator_without_a_deterministic_kernel_is_named",
}  # fmt: skip
NAMES = {
    node.name
    for path in TESTS.glob("*/test_easyscale_*.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef)
}


@pytest.mark.parametrize("case", TRIED)
def test_every_case_is_tried_by_a_test(case):
    assert f"test_{TRIED[case]}" in NAMES


ODD = {
    "partly used": {"options": {"model": {"kind": "partly used"}}},
    "overflowing": {
        "loss": f"{OWN}:overflowing", "scaler": "grad",
        "options": {"scaler": {"init_scale": 2.0**80, "backoff_factor": 1e-6}},
    },
    "halving": {"optimizer": f"{OWN}:halving", "lr_scheduler": None},
}  # fmt: skip


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Results of odd jobs by name, without changes and with: 2 mini-batches on three processes, 2 on one."""
    whole, changed = (
        [trainer(tmp_path_factory.mktemp(kind) / "run", **changes) for changes in ODD.values()]
        for kind in ("whole", "changed")
    )
    results = run_together(whole, 4, hash_every=1)
    run_together(changed, 2, "0,3/2/1", hash_every=1)
    others = run_together(changed, 4, "2,0,1,3", hash_every=1)
    return dict(zip(ODD, zip(results, others, strict=True), strict=True))


def shared(result):
    """Return what all logical workers share, from the checkpoint at the end."""
    return torch.load(result.checkpoint / "shared.pt", weights_only=True)


@pytest.mark.parametrize("name", ODD)
def test_odd_jobs_keep_their_bits(odd, name):
    """Where some do not use a parameter stock training refuses, so the reference is a process for each."""
    whole, changed = odd[name]
    assert bits(changed) == bits(whole)


def test_parameters_that_some_logical_workers_do_not_use(odd):
    whole, _ = odd["partly used"]
    saved = torch.load(whole.checkpoint / "model.pt", weights_only=True)
    names = [name for name in saved if name not in ("n_passes",) and not name.startswith("features.1.")]
    names[2:2] = ["features.1.weight", "features.1.bias"]
    moved = {names[number] for number in shared(whole)["optimizer"]["state"]}
    assert set(names) - moved == {"never.weight", "never.bias"}


def test_all_skip_a_step_in_which_one_overflows(odd):
    whole, _ = odd["overflowing"]
    by_step = whole.steps.groupby("step")["parameter_sha"].first()
    assert len(set(by_step)) == 4
    assert shared(whole)["scaler"]["scale"] == pytest.approx(2.0**80 * 1e-6)
    assert shared(whole)["optimizer"]["state"][0]["step"] == 3


def test_a_learning_rate_that_is_changed_in_place_lasts(odd):
    assert shared(odd["halving"][1])["optimizer"]["param_groups"][0]["lr"] == 0.5**5


def test_runs_side_by_side_do_not_meet(tmp_path):
    found = {}

    def run(seed):
        found[seed] = trainer(tmp_path / str(seed), seed=seed).run(3, "0,1/2,3")

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bits(found[1]) == bits(trainer(tmp_path / "alone", seed=1).run(3, "0,1/2,3"))
    assert bits(found[1]) != bits(found[2])


def test_a_process_that_hangs_brings_the_run_down(tmp_path):
    ours = trainer(tmp_path, options={"after_reduce": {"stops": 2}})
    with pytest.raises(WorkerError, match=r"no progress within 2 s \(stall_timeout_s\); the run was killed"):
        ours.run(3, "0,1/2,3", launcher=LocalLauncher(stall_timeout_s=2.0))
    for pid in RunDirectory(tmp_path / "processes").meeting():
        assert not Path(f"/proc/{pid}").exists()


def test_gpus_that_are_not_there_are_refused(tmp_path):
    launcher = LocalLauncher("cuda", gpus=(0,))
    with pytest.raises(InputError, match=r"2 process\(es\), but found [01] GPU\(s\)"):
        trainer(tmp_path).run(1, "0,1/2,3", launcher=launcher)


def test_dropout_draws_the_same_whatever_the_number_of_threads():
    values, before, found = torch.ones(1 << 18), torch.get_num_threads(), []
    try:
        for n_threads in (1, 3):
            torch.set_num_threads(n_threads)
            torch.manual_seed(3)
            found.append(torch.nn.functional.dropout(values, 0.3))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_an_operator_without_a_deterministic_kernel_is_named():
    before = torch.get_deterministic_debug_mode(), torch.backends.mkldnn.flags, torch.get_num_threads()
    values = torch.zeros(4), torch.tensor([0]), torch.tensor([1.0])
    try:
        for name in ("D0", "D1", "D1+D2"):
            use_kernels(CANONICAL.__class__("A", "any"), LEVELS[name])
            with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
                values[0].put_(*values[1:])
        use_kernels(CANONICAL.__class__("A", "any"), LEVELS["none"])
        values[0].put_(*values[1:])
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.set_num_threads(before[2])
