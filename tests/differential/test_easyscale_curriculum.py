"""Data sets that training code changes: loaders see what stock loaders see, which start with each epoch."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from elastic_job import losses
from forked import forking_servers
from killers import Killer
from torch.utils.data import DataLoader

from makespan.easyscale import ElasticTrainer
from makespan.easyscale.loop_parts import unused_options
from makespan.easyscale.reference import train_stock

pytestmark = pytest.mark.xdist_group("training")
JOB = Path(__file__).parents[1] / "support" / "curriculum_job.py"
STEPS = 14  # of epochs with four mini-batches
LOADED = {"n_logical_workers": 2, "micro_batch_size": 4, "n_loaders": 2, "fold": "ring"}
PARTS = {name: f"{JOB}:{name}" for name in ("model", "data", "loss", "after_reduce")}
PARTS |= {"options": {"optimizer": {"lr": 0.01}}}
KINDS = {"parts": PARTS, "loop": {"loop": f"{JOB}:loop"}}


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    job = ElasticTrainer(**PARTS, **LOADED, run_dir=tmp_path_factory.mktemp("stock")).job
    found = losses(train_stock([job], STEPS)[0].steps)
    assert len(found) == 2 * STEPS
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mapping", "options"), [("0/1", {"prefetch": 5}), ("0,1", {}), ("0,1", {"loader_processes": 0})]
)
def test_loaders_see_what_training_code_has_changed_from_the_next_epoch_on(
    stock, tmp_path, kind, mapping, options
):
    job = ElasticTrainer(**KINDS[kind], **LOADED, run_dir=tmp_path)
    assert losses(job.run(STEPS, mapping, **options).steps) == stock


def test_persistent_loaders_begin_anew_with_each_epoch_too_and_that_is_said(stock, tmp_path, caplog):
    job = ElasticTrainer(loop=f"{JOB}:loop", options={"loop": {"persists": True}}, run_dir=tmp_path, **LOADED)
    assert losses(job.run(STEPS, "0,1").steps) == stock
    assert "persistent_workers=True, which has no effect: loaders begin anew" in caplog.text


def test_other_options_of_a_loader_without_effect_are_named():
    loader = DataLoader(range(8), num_workers=1, timeout=5, multiprocessing_context="spawn")
    assert {notice.partition(", which")[0] for notice in unused_options(loader)} == {
        "data is a DataLoader with timeout=5",
        "data is a DataLoader with a multiprocessing_context",
    }
    assert unused_options(DataLoader(range(8), num_workers=1)) == unused_options(range(8)) == set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_shows_them_what_they_saw_in_this_epoch(stock, tmp_path, kind):
    job = ElasticTrainer(**KINDS[kind], **LOADED, run_dir=tmp_path)
    for steps, mapping in ((3, "0/1"), (8, "0,1"), (9, "0/1"), (STEPS, "0,1")):
        result = job.run(steps, mapping)
    assert losses(result.steps) == stock


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [("forward", 4, [1]), ("contexts", 9, [0]), ("done", 9, [1])])
def test_so_does_one_that_loses_a_process_where_an_epoch_begins(stock, tmp_path, kind, fault):
    killer = Killer(fault)
    held = {"held": killer.hold(tmp_path / "held")}
    options = {"loop": held} if kind == "loop" else PARTS["options"] | {"model": held}
    job = ElasticTrainer(**(KINDS[kind] | {"options": options}), **LOADED, run_dir=tmp_path / "run")
    result = job.run(STEPS, "0/1", survives=1, on_event=killer)
    assert not killer.faults and list(result.reconfigurations["cause"]) == ["start", "recovery"]
    assert losses(result.steps) == stock
