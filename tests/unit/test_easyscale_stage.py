"""What a process of a stage does, in the process of the test: from the request to checkpoint and records."""

import os
import signal

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from elastic_job import OWN, bits, trainer
from stage_here import only_process, requested

from makespan.easyscale.context import register_generator, registered_state, virtual_rank
from makespan.easyscale.job import ElasticJob, Placing, RunOptions
from makespan.easyscale.parts import build_parts
from makespan.easyscale.reduction import HostCopies
from makespan.easyscale.saved import _leaves, _read, _write
from makespan.easyscale.trainer import _ElasticRun
from makespan.easyscale.worker import train_generation
from makespan.errors import CheckpointError, InputError
from makespan.runtime import RunDirectory

pytestmark = pytest.mark.xdist_group("training")
CPU = torch.device("cpu")


@pytest.fixture
def alone():
    """Let this process be the only one of a stage."""
    with only_process() as who:
        yield who


def test_a_stage_needs_no_launcher(alone, tmp_path):
    ours, options = trainer(tmp_path), RunOptions(loader_processes=0, checkpoint_every=1)
    run = _ElasticRun(ours.job, ours.folder, 2, Placing.of(ours.job, "0,1,2,3", None), options)
    run.begin()
    for last in (1, 2):
        run.steps, directory = last, RunDirectory(tmp_path / "processes")
        directory.prepare(requested(run, tmp_path))
        train_generation(directory, alone)
        result = directory.result()
        assert (result["last_step"], result["ending"], result["fold"]) == (last, "done", "ring")
        run.end_generation(result)
    found = run.result()
    assert (found.step, found.reconfigurations["cause"].tolist()) == (2, ["start", "run"])
    assert bits(found) == bits(trainer(tmp_path / "launched").run(2, "0,1,2,3"))


def test_a_signal_ends_a_stage_with_a_checkpoint(alone, tmp_path):
    signals = {"at": 2, "number": signal.SIGTERM}
    ours = trainer(tmp_path, options={"after_reduce": {"signals": signals}})
    run = _ElasticRun(ours.job, ours.folder, 5, Placing.of(ours.job, "0,1,2,3", None), RunOptions())
    run.begin()
    directory = RunDirectory(tmp_path / "processes")
    directory.prepare(requested(run, tmp_path) * 2)
    train_generation(directory, alone)
    run.end_generation(directory.result())
    assert (run.is_suspended, run.done) == (True, 2)
    assert directory.result(1) is None


# --- what is trained ------------------------------------------------------------------------------------


def test_built_in_parts_take_the_options_of_the_job():
    job = ElasticJob(
        "neumf", "adamw", lr_scheduler="step", scaler="grad", seed=3,
        options={
            "model": {"width": 16}, "optimizer": {"lr": 0.5}, "lr_scheduler": {"step_size": 2},
            "data": {"n_samples": 24, "noise": 0.5}, "scaler": {"init_scale": 8.0},
        },
    )  # fmt: skip
    parts = build_parts(job, CPU)
    trained = parts.trained
    assert (len(parts.data), trained.optimizer.defaults["lr"], trained.scheduler.step_size) == (24, 0.5, 2)
    assert trained.scaler.get_scale() == 8.0
    inputs, targets = parts.collate([parts.data[index] for index in range(4)])
    assert trained.loss(trained.model(inputs), targets).ndim == 0
    again = build_parts(job, CPU).trained.model.state_dict()
    assert all(torch.equal(one, again[name]) for name, one in trained.model.state_dict().items())


def test_own_functions_come_from_files_and_modules():
    job = ElasticJob(
        f"{OWN}:build_model", data=f"{OWN}:data_set", loss="torch.nn.functional:cross_entropy",
        collate="torch.utils.data:default_collate", options={"loss": {"label_smoothing": 0.5}},
    )  # fmt: skip
    parts = build_parts(job, CPU)
    outputs, targets = torch.tensor([[9.0, 0.0]]), torch.tensor([0])
    assert parts.trained.loss(outputs, targets) > torch.nn.functional.cross_entropy(outputs, targets) + 1.0
    assert parts.collate is torch.utils.data.default_collate


def test_a_module_is_run_anew_for_every_job_of_a_process(tmp_path, monkeypatch):
    text = "calls = []\n\n\ndef loss(outputs, targets):\n    calls.append(1)\n    return len(calls)\n"
    (tmp_path / "counting_losses.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    job = ElasticJob("neumf", loss="counting_losses:loss")
    found = [build_parts(job, CPU).trained.loss for _ in range(2)]
    assert [one(None, None) for one in (found[0], found[0], found[1])] == [1, 2, 1]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"options": {"optimizer": {"speed": 1}}}, "options of optimizer are {'speed': 1}"),
        ({"options": {"data": {"samples": 1}}}, "options of data are .*samples"),
        ({"lr_scheduler": f"{OWN}:build_model"}, "lr_scheduler: .* returned Net; expected a torch.optim"),
        ({"after_reduce": f"{OWN}:N_SAMPLES"}, "N_SAMPLES is 60 there; expected a function"),
        ({"loss": "makespan.nowhere:loss"}, "makespan.nowhere"),
    ],
)
def test_parts_that_cannot_be_built_are_refused(changes, told):
    with pytest.raises(InputError, match=told):
        build_parts(ElasticJob("neumf", **changes), CPU)


# --- files ----------------------------------------------------------------------------------------------


def test_only_tensors_and_plain_values_are_written(tmp_path):
    values = {"a": [1, 2.5, None, ("b", True)], "c": {3: torch.ones(2)}}
    _write(values, tmp_path / "good.pt")
    assert [name for name, _ in _leaves("good", values)][-1] == "good['c'][3]"
    assert _read(tmp_path / "good.pt")["a"][3] == ("b", True)
    for odd in (object(), np.float64(1), {1}):
        with pytest.raises(InputError, match=r"bad\['a'\]\[1\] is a .*; expected tensors and plain values"):
            _write({"a": [0, odd]}, tmp_path / "bad.pt")
    assert not (tmp_path / "bad.pt").exists()
    torch.save({"a": Samples}, tmp_path / "code.pt")
    with pytest.raises(CheckpointError, match="cannot be read as tensors and plain values"):
        _read(tmp_path / "code.pt")


class Samples:
    """A class, which a checkpoint must not name."""


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_registered_generators_of_every_kind_go_through_a_file(tmp_path, bits):
    generator = np.random.Generator(bits(5))
    registered_state().clear()
    register_generator("mine", generator)
    hook = registered_state().pop("mine")
    _write({"mine": hook.get()}, tmp_path / "state.pt")
    drawn = generator.random(4)
    hook.set(_read(tmp_path / "state.pt")["mine"])
    assert generator.random(4).tolist() == drawn.tolist()


def test_the_environment_has_a_rank_for_as_long_as_somebody_looks(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "9")
    with virtual_rank(2, 3):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("2", "3")
    assert ("RANK" in os.environ, os.environ["WORLD_SIZE"]) == (False, "9")


# --- copies of gradients --------------------------------------------------------------------------------


def test_on_a_cpu_gradients_stay_where_they_are():
    copies, vectors = HostCopies(CPU), [torch.ones(3)]
    assert copies.start(vectors)[0] is vectors[0]
    copies.finish()
