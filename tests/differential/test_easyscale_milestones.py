"""State that changes late, or lies in what functions hold: it has the bits of stock training all the same."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from elastic_job import losses
from forked import forking_servers
from killers import Killer

from makespan.easyscale import ElasticTrainer
from makespan.easyscale.reference import train_stock
from makespan.errors import InputError

pytestmark = pytest.mark.xdist_group("training")
JOB = Path(__file__).parents[1] / "support" / "milestone_job.py"
STEPS = 11
COMMON = {"n_logical_workers": 2, "micro_batch_size": 4, "n_loaders": 0, "fold": "ring"}
PARTS = {"model": f"{JOB}:model", "optimizer": f"{JOB}:optimizer", "data": f"{JOB}:Samples"}
HELD = ("closure", "decorated", "default", "partial", "method", "slotted", "phased")
MODELS = ("with_attribute", "with_closure", "with_function")
LOST = "changes in the loop, and no checkpoint holds it"


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


def constant(folder, mapping="0,1", **job):
    return losses(ElasticTrainer(**(COMMON | job), run_dir=folder).run(STEPS, mapping).steps)


def changed(folder, *stops, **job):
    """Return the losses of a run that stops after some mini-batches."""
    trainer = ElasticTrainer(**(COMMON | job), run_dir=folder)
    for number, steps in enumerate((*stops, STEPS)):
        result = trainer.run(steps, ("0,1", "0/1")[number % 2])
    return losses(result.steps)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Jobs, and the losses of their stock training, by name."""
    path = tmp_path_factory.mktemp("stock")
    jobs = {name: PARTS | {"loss": f"{JOB}:{name}"} for name in ("loss", *HELD)}
    jobs |= {name: jobs["loss"] | {"model": f"{JOB}:{name}"} for name in MODELS}
    jobs["milestone"] = jobs["loss"] | {"after_reduce": f"{JOB}:at_a_milestone"}
    jobs["part"] = jobs["loss"] | {"data": f"{JOB}:part", "after_reduce": f"{JOB}:alter", "n_loaders": 2}
    trainers = [ElasticTrainer(**(COMMON | job), run_dir=path / name) for name, job in jobs.items()]
    runs = train_stock([trainer.job for trainer in trainers], STEPS)
    return {name: (job, losses(run.steps)) for (name, job), run in zip(jobs.items(), runs, strict=True)}


@pytest.mark.parametrize("stops", [(5,), (6,), (10,), (3, 6, 9)])
def test_what_changed_once_is_kept_by_whatever_checkpoint_follows(stock, tmp_path, stops, caplog):
    job, expected = stock["milestone"]
    assert changed(tmp_path, *stops, **job) == expected
    found = "milestone_job.py:WEIGHT changed in a mini-batch in which nobody looked by what" in caplog.text
    assert found == (stops in ((6,), (10,)))  # others look in mini-batch 5


def test_so_it_is_in_a_loop(tmp_path):
    job = {"loop": f"{JOB}:loop"}
    expected = constant(tmp_path / "constant", **job)
    assert changed(tmp_path / "changed", 10, **job) == expected


@pytest.mark.parametrize("name", [*HELD, *MODELS, "part"])
def test_what_functions_hold_belongs_to_each_logical_worker(stock, tmp_path, name):
    job, expected = stock[name]
    assert constant(tmp_path / "constant", **job) == expected
    assert changed(tmp_path / "changed", 3, 6, **job) == expected


def test_a_variable_that_changed_just_before_a_restart_is_named(tmp_path, caplog):
    job = {"loop": f"{JOB}:loop", "options": {"loop": {"kind": "number"}}}
    trainer = ElasticTrainer(**COMMON, **job, run_dir=tmp_path / "number")
    trainer.run(6)
    assert f"variable weight of loop {LOST}" in caplog.text
    trainer = ElasticTrainer(
        **COMMON, loop=f"{JOB}:loop", options={"loop": {"kind": "tensor"}}, run_dir=tmp_path / "tensor"
    )
    with pytest.raises(InputError, match=f"variable weight of loop {LOST}"):
        trainer.run(6)


def test_and_before_a_loss_that_the_run_survives(tmp_path, monkeypatch, caplog):
    killer = Killer(("forward", 6, [1]))
    monkeypatch.setenv("HELD_MINI_BATCHES", killer.hold(tmp_path / "held"))
    job = {"loop": f"{JOB}:loop", "options": {"loop": {"kind": "number"}}}
    ElasticTrainer(**COMMON, **job, run_dir=tmp_path / "run").run(7, "0/1", survives=1, on_event=killer)
    assert not killer.faults
    assert f"variable weight of loop {LOST}" in caplog.text


@pytest.mark.parametrize("kind", ["object", "partial", "closure"])
def test_loaders_join_samples_by_what_training_code_has_changed_from_the_next_epoch_on(tmp_path, kind):
    expected = constant(tmp_path / "expected", loop=f"{JOB}:harder")
    job = {"loop": f"{JOB}:collating", "n_loaders": 2, "options": {"loop": {"kind": kind}}}
    assert constant(tmp_path / "constant", "0/1", **job) == expected
    assert changed(tmp_path / "changed", 2, 6, **job) == expected


def test_without_loaders_a_restart_keeps_how_samples_are_joined(tmp_path):
    job = {"loop": f"{JOB}:collating", "options": {"loop": {"n_loaders": 0}}}
    expected = constant(tmp_path / "constant", **job)
    assert changed(tmp_path / "changed", 3, 6, **job) == expected
