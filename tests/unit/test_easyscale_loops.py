"""Training loops of one's own: what is refused by name, restarts after kills, and the command line."""

import json
import re
import shutil

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from forked import SUPPORT
from stage_here import train_here

from makespan.cli import main
from makespan.easyscale import ElasticTrainer, export_model
from makespan.easyscale.job import ElasticJob
from makespan.errors import CheckpointError, InputError, TrainingError

pytestmark = pytest.mark.xdist_group("training")

FILE = SUPPORT / "loop_scripts.py"
JOB = {"n_logical_workers": 2, "micro_batch_size": 4, "n_loaders": 0, "fold": "ring"}
BITS = ["step", "rank", "loss_hex", "parameter_sha", "optimizer_sha", "context_sha"]


def trainer(run_dir, name, **options):
    return ElasticTrainer(loop=f"{FILE}:{name}", run_dir=run_dir, options={"loop": options}, **JOB)


def bits(result):
    return result.steps.sort_values(["step", "rank"])[BITS].to_numpy().tolist()


# --- what is refused ------------------------------------------------------------------------------------

BEFORE = {
    "no loop": "returned without calling run.loop",
    "no iteration": "returned before its first mini-batch",
    "other parameters": r"group 0 of optimizer has a parameter of shape \(2, 2\) that no model",
    "unknown scheduler": "scheduler is a LambdaLR of an optimizer that the loop does not have",
    "hidden scheduler": "optimizer has a scheduler that the loop does not know",
    "no length": "data is a iterator without length",
    "class": "data is the class Rows; expected an object of it",
    "no state": "has no state_dict; expected an iterable with state_dict",
    "loader": "sets micro_batch_size to 8, and the job has 4",
    "sampler": "a DataLoader with a WeightedRandomSampler; expected shuffle=True or False",
    "replacement": "a DataLoader with a RandomSampler with replacement=True; expected shuffle=True",
    "fewer samples": "a DataLoader with a RandomSampler with another number of samples; expected shuffle",
    "own order": "a DataLoader with a RandomSampler with a generator; expected shuffle=True",
    "batches": "data is a DataLoader with a batch_sampler; expected batch_size",
    "own loader": "data is a Doubling, a DataLoader with an __iter__ of its own; expected a plain",
    "synchronised": "module 1 is a SyncBatchNorm, which communicates within a forward pass",
    "shared number": "shared 'average' is a float; expected an object with state_dict",
    "no optimizer": "run.loop got no optimizer",
    "closure": "optimizer is a LBFGS, whose step needs an argument",
    "two loops": "run.loop is called twice",
    "late weights": "parameters changed between run.loop and the first mini-batch",
}
WITHIN = {
    "step first": "gradients are summed before a pass",
    "plain backward": r"expected mini_batch.backward\(loss\) instead of loss.backward\(\)",
    "no backward": "the turn of logical worker 0 ended without mini_batch.backward",
    "left": "the turns were left in that of logical worker 0",
    "clip in a turn": "the gradient of bias was changed in the turn of a logical worker",
    "step in a turn": "optimizer steps in the turn of a logical worker",
    "shared in a turn": "the turn of a logical worker changes shared average, which all share",
    "loop in a turn": "a second iteration of the loop began inside the first",
    "no step": "ended in mini-batch 1 without mini_batch.step",
    "unsummed": "optimizer steps before the gradients are summed",
    "outside": "mini_batch.backward is called outside of a turn",
    "unknown optimizer": "SGD is no optimizer of the loop",
    "unreported": "no turn reported 'accuracy'; expected loss",
    "sparse": "parameter weight has a sparse gradient",
    "thawed": "parameter bias got a gradient but required none when the run began",
    "late group": "optimizer got 2 parameter groups in training, and had 1, one of them with a parameter",
    "grown group": "the parameters in a group of optimizer changed in training",
    "scheduler in a turn": "the turn of a logical worker changes optimizer, which all share",
    "rate in a turn": "the turn of a logical worker changes optimizer, which all share",
    "state in a turn": r"the turn of a logical worker changes loop\.state, which all share",
    "history": "variable history of wrong changes in the loop, and no checkpoint holds it",
    "carried": "variable carried of wrong changes in turns, and all logical workers of a process share it",
    "hidden average": "variable average of wrong changes in the loop, and no checkpoint holds it",
}


@pytest.mark.parametrize("kind", BEFORE | WITHIN)
def test_a_mistake_is_named_in_one_line_before_a_mini_batch_is_done(tmp_path, kind):
    ours = trainer(tmp_path, "wrong", kind=kind)
    with pytest.raises(InputError, match=(BEFORE | WITHIN)[kind]) as error:
        train_here(ours, 3, "0,1")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "records").glob("*"))


@pytest.mark.parametrize(
    ("kind", "mapping", "problem"),
    [
        ("late rate in a turn", "0,1", "the turn of a logical worker changes optimizer, which all share"),
        ("late rate in a turn", "0/1", "the turn of a logical worker changes optimizer, which all share"),
        ("late option in a turn", "0,1", "the turn of a logical worker changes optimizer, which all share"),
        ("late weights in turns", "0,1", "a forward pass changes parameter weight, and the next pass"),
    ],
)  # fmt: skip
def test_turns_change_nothing_shared_where_values_are_not_compared(tmp_path, kind, mapping, problem):
    with pytest.raises((InputError, TrainingError), match=problem):
        trainer(tmp_path, "wrong", kind=kind).run(7, mapping)


def test_turns_that_write_the_values_that_parameters_have_are_accepted(tmp_path, caplog):
    assert len(trainer(tmp_path, "wrong", kind="written in turns").run(7, "0,1").steps) == 14
    assert "changes parameter" not in caplog.text


def test_processes_that_differ_are_named(tmp_path):
    with pytest.raises(TrainingError, match="parameters differ between processes before mini-batch 1"):
        trainer(tmp_path / "weights", "wrong", kind="differs").run(3, "0/1")
    with pytest.raises(TrainingError, match="mini-batch 1: the loop stops in process 1 only"):
        trainer(tmp_path / "stops", "wrong", kind="some stop").run(3, "0/1")


def test_a_loss_over_all_processes_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"calls torch.distributed.all_gather; expected no communication"):
        train_here(trainer(tmp_path, "gathered"), 3, "0,1")


def test_a_number_that_a_restart_would_lose_is_a_warning(tmp_path, caplog):
    trainer(tmp_path, "wrong", kind="hidden number").run(2, "0,1")
    assert "variable total of wrong changes in the loop, and no checkpoint holds it" in caplog.text
    caplog.clear()
    trainer(tmp_path / "turns", "wrong", kind="number of turns").run(2, "0,1")
    assert (
        "variable total of wrong changes in turns, and all logical workers of a process share" in caplog.text
    )
    assert "no checkpoint holds it" not in caplog.text
    trainer(tmp_path / "class", "fitted").run(2, "0,1")
    assert "variable self of fit changes in the loop, and no checkpoint holds it" in caplog.text


@pytest.mark.parametrize("is_known", [False, True])
def test_a_restart_has_the_groups_that_an_optimizer_got_in_training(tmp_path, is_known):
    whole = trainer(tmp_path / "whole", "regrouped", is_known=False).run(5, "0,1", hash_every=1)
    options = {"is_known": is_known}
    trainer(tmp_path / "parts", "regrouped", **options).run(3, "0,1", hash_every=1)
    assert bits(trainer(tmp_path / "parts", "regrouped", **options).run(5, "0/1", hash_every=1)) == bits(
        whole
    )


def test_layers_that_turns_leave_out_are_a_warning_unless_the_job_expects_them(tmp_path, caplog):
    trainer(tmp_path / "plain", "skipped").run(2, "0,1")
    assert re.search(r"parameter blocks\S+ and \d+ more got no gradient in a turn", caplog.text)
    caplog.clear()
    ours = ElasticTrainer(
        loop=f"{FILE}:skipped", run_dir=tmp_path / "unused", find_unused_parameters=True, **JOB
    )
    ours.run(2, "0,1")
    assert "gradient" not in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "resnet50"}, "model is 'resnet50' and loop is"),
        ({"optimizer": "adam"}, "optimizer is 'adam' and loop is"),
        ({"determinism": "auto"}, "determinism is 'auto' and loop is"),
        ({"buffers": "rank0"}, "buffers is 'rank0' and loop is"),
        ({"loop": "ema"}, "loop is 'ema'; expected the name of a function"),
        ({"loop": f"{FILE}:emma"}, r"unknown name in .*'emma'"),
        ({"options": {"model": {"width": 3}}}, "unknown part in options 'model'"),
    ],
)
def test_fields_of_a_job_that_do_not_go_with_a_loop_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        ElasticJob(**({"loop": f"{FILE}:ema"} | changes))


def test_options_that_the_function_does_not_take_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"options of loop are \{'rate': 1\}"):
        train_here(trainer(tmp_path, "ema", rate=1), 1, "0,1")


# --- what goes on ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Directory and result of the loop whose processes nobody kills."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    return run_dir, trainer(run_dir, "killed").run(5, "0/1", hash_every=1)


@pytest.mark.parametrize("place", ["turn", "between", "evaluation"])
def test_a_kill_costs_no_bit(straight, tmp_path, place):
    """Of a process in a turn, after the sum, and in the evaluation."""
    ours = trainer(tmp_path / "run", "killed", place=place, file=str(tmp_path / "killed"))
    result = ours.run(5, "0/1", hash_every=1, checkpoint_every=2)
    assert (tmp_path / "killed").exists()
    assert bits(result) == bits(straight[1])
    assert result.reconfigurations["cause"].tolist() == ["start", "failure"]
    states = [torch.load(one.checkpoint / "shared.pt", weights_only=True) for one in (result, straight[1])]
    assert states[0]["loop.state"] == states[1]["loop.state"]


def test_a_signal_suspends_the_function_inside_its_loop(straight, tmp_path):
    """Code behind the loop runs once, after the last mini-batch."""
    ours = trainer(tmp_path / "run", "killed", place="signal", file=str(tmp_path / "signalled"))
    pending = ours.run(5, "0/1", hash_every=1)
    assert (pending.state, pending.step) == ("pending", 3)
    assert not (tmp_path / "signalled.done").exists()
    result = ours.run(5, "0,1", hash_every=1)
    assert bits(result) == bits(straight[1])
    assert (tmp_path / "signalled.done").read_text() == "5\n"


def test_a_plain_data_loader_trains_like_its_data_set(tmp_path):
    found = [
        train_here(trainer(tmp_path / kind, "loaded", kind=kind), 3, "0,1", hash_every=1).result()
        for kind in ("data set", "loader")
    ]
    assert bits(found[0]) == bits(found[1])


def test_a_run_that_its_loop_stopped_is_finished(tmp_path):
    ours = trainer(tmp_path, "stopped", enough=5)
    result = ours.run(30, "0,1")
    assert result.state == "finished" and result.step < 30
    again = ours.run(30, "0,1")
    assert (again.step, len(again.reconfigurations)) == (result.step, 1)


def test_the_model_is_exported_and_an_altered_job_refused(straight, tmp_path):
    run_dir = shutil.copytree(straight[0], tmp_path / "run")
    state = torch.load(export_model(run_dir, tmp_path / "model.pt"), weights_only=True)
    assert "body.0.weight" in state
    with pytest.raises(CheckpointError, match=r"loop: found .*killed.*expected .*ema"):
        trainer(run_dir, "ema").run(6, "0,1")


def test_the_command_line_trains_a_loop(tmp_path):
    words = ["easyscale", "run", f"--loop={FILE}:frozen", "--steps=2", "--mapping=0,1",
             "--n-logical-workers=2", "--micro-batch-size=4", "--n-loaders=0",
             f"--run-dir={tmp_path}", "--json"]  # fmt: skip
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert json.loads(re.search(r"^\{.*\}$", done.output, re.DOTALL | re.MULTILINE)[0])["steps"] == 2
    both = CliRunner().invoke(main, [*words[:2], "resnet50", *words[2:]])
    assert "model is 'resnet50' and loop is" in str(both.output) + str(both.exception)
