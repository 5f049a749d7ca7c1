"""Logical workers on any number of processes against stock DistributedDataParallel, bit for bit."""

import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from easyscale_job import JOB, WITH_ADAM, Elastic, Net
from forked import forking_servers

from makespan.easyscale import ElasticTrainer, context as contexts_module, reduction as reduction_module
from makespan.easyscale.context import Contexts
from makespan.easyscale.data import LoaderPool
from makespan.easyscale.job import ElasticJob, RankMapping
from makespan.easyscale.kernels import DeterminismLevel, process_options
from makespan.easyscale.reduction import GradientSet, reduce_sets
from makespan.easyscale.reference import train_stock
from makespan.errors import InputError
from makespan.files import read_json
from makespan.runtime import Launch, LocalLauncher
from makespan.training.zoo import STAND_INS

pytestmark = pytest.mark.xdist_group("training")
OF_THREE = WITH_ADAM | {"n_logical_workers": 3, "buffers": "rank0", "bucket_cap_bytes": None}
OF_STAND_INS = {"data": None, "loss": None, "n_logical_workers": 3}
SMALL = {"model": {"width": 16}, "data": {"n_samples": 92}}


def of_the_zoo(name, **changes):
    """Fields of a job that trains a stand-in, an even one with SGD and an odd one with Adam."""
    further = WITH_ADAM if STAND_INS.index(name) % 2 else {"options": JOB["options"]}
    return OF_STAND_INS | further | {"model": name, "options": further["options"] | SMALL} | changes


WITH_LOADERS = {
    name: of_the_zoo(name, n_loaders=2) for name in ("resnet50", "vgg19", "swintransformer")
}  # BatchNorm, dropout, stochastic depth


def by_step(steps):
    """Bits of a run, by mini-batch and rank."""
    table = steps.assign(loss_hex=[float(loss).hex() for loss in steps["loss"]])
    names = ["loss_hex", "parameter_sha", "optimizer_sha", "context_sha"]
    ordered = table.sort_values(["step", "rank"]).groupby("step")
    return [rows[names].to_numpy().tolist() for _, rows in ordered]


def stock(jobs, steps, **options):
    """Bits of stock runs of jobs, by their fields."""
    built = [ElasticJob(**(JOB | job)) for job in jobs]
    return [by_step(one.steps) for one in train_stock(built, steps, **options)]


@pytest.fixture(scope="module", autouse=True)
def servers():
    """Let processes find the job of this test, and be forked."""
    with forking_servers():
        yield


@pytest.fixture(scope="module")
def reference():
    (found,) = stock([{}], 14)
    return found


@pytest.fixture(scope="module")
def reference_of_three():
    (found,) = stock([OF_THREE], 5)
    return found


@pytest.fixture(scope="module")
def reference_of_the_zoo():
    return dict(zip(STAND_INS, stock([of_the_zoo(name) for name in STAND_INS], 2), strict=True))


@pytest.fixture(scope="module")
def reference_with_loaders():
    return dict(zip(WITH_LOADERS, stock(list(WITH_LOADERS.values()), 9), strict=True))


@pytest.mark.parametrize(
    "mapping", ["0/1/2/3", "0,1/2,3", "0,1/2/3", "0,1,2/3", "3,1/0,2", "2/3,0/1", "0,1,2,3", "3,0,2,1"]
)
def test_every_mapping_trains_with_the_bits_of_stock_training(reference, mapping):
    assert Elastic().train(mapping, 5) == reference[:5]


@pytest.mark.parametrize(
    ("mapping", "copies"),
    [("0/1/2/3", 0), ("0/1/2/3", 1), ("0,1/2/3", 0), ("0,1/2/3", 1), ("3,1/0,2", 0), ("0,1,2,3", 0)],
)
def test_optimizers_in_shards_train_with_the_bits_of_stock_training(reference, mapping, copies):
    elastic = Elastic(copies)
    assert elastic.train(mapping, 5) == reference[:5]
    n_processes, sizes = mapping.count("/") + 1, [each.numel() for each in Net().parameters()]
    share = (copies + 1) / n_processes * sum(sizes)
    assert len(elastic.held) == 5
    for held in elastic.held:
        assert sum(held) == (copies + 1) * sum(sizes)
        assert max(held) <= share + max(sizes)


def test_shards_move_with_the_mapping_and_with_the_buffers_of_the_first(reference_of_three, tmp_path):
    elastic, found = Elastic(1, **OF_THREE), []
    for number, (mapping, n_steps) in enumerate((("1/2/0", 2), ("2,0/1", 1), ("0/1/2", 2))):
        found += elastic.train(mapping, n_steps, tmp_path / f"{number}.pt")
    assert found == reference_of_three


@pytest.mark.parametrize("mapping", ["0,1,2", "2,0/1", "1/2/0"])
def test_three_logical_workers_with_buffers_of_the_first_do_so_too(reference_of_three, mapping):
    assert Elastic(**OF_THREE).train(mapping, 5) == reference_of_three


@pytest.mark.parametrize("name", STAND_INS)
def test_every_model_of_the_zoo_does_so_too(reference_of_the_zoo, name):
    """Grouped convolutions, residuals, embeddings, attention in windows, stochastic depth."""
    for mapping in ("2,0/1", "0,1,2"):
        assert Elastic(**of_the_zoo(name)).train(mapping, 2) == reference_of_the_zoo[name]


@pytest.mark.parametrize("name", WITH_LOADERS)
def test_changes_of_the_mapping_amid_an_epoch_change_no_bit(reference_with_loaders, name, tmp_path):
    """Epochs have six mini-batches, and loaders are ahead at each of the changes."""
    trainer = ElasticTrainer(**(JOB | WITH_LOADERS[name]), run_dir=tmp_path)
    for steps, mapping, n_processes in ((2, "0/1/2", 2), (5, "2,0/1", 1), (9, "1,2,0", 2)):
        found = trainer.run(steps, mapping, hash_every=1, loader_processes=n_processes, prefetch=3)
    assert by_step(found.steps) == reference_with_loaders[name]


def test_ten_changes_at_random_boundaries_change_no_bit(reference, tmp_path):
    rng, elastic, found = random.Random(5), Elastic(), []
    for end in [*sorted(rng.sample(range(1, len(reference)), 10)), len(reference)]:
        ranks = list(range(4))
        rng.shuffle(ranks)
        cuts = sorted(rng.sample((1, 2, 3), rng.randint(0, 3)))
        hosted = tuple(tuple(ranks[a:b]) for a, b in zip([0, *cuts], [*cuts, 4], strict=True))
        found += elastic.train(str(RankMapping(hosted)), end - len(found), tmp_path / f"{end}.pt")
    assert found == reference


def test_a_restart_twice_from_the_same_place_goes_on_in_the_same_way(reference, tmp_path):
    elastic = Elastic()
    elastic.train("0,1/2,3", 2, tmp_path / "saved.pt")
    for mapping in ("0,1,2,3", "1/0,2,3"):
        assert elastic.train(mapping, 3) == reference[2:5]


# --- what must make a difference ----------------------------------------------------------------------


def test_without_the_layout_of_before_a_restart_is_summed_differently(reference, tmp_path):
    elastic = Elastic(determinism="D0")
    assert elastic.train("0/1/2/3", 3, tmp_path / "saved.pt") == reference[:3]
    after = elastic.train("0,1/2,3", 2)
    assert [row[0] for row in after[0]] == [row[0] for row in reference[3]]
    assert all(ours[1] != theirs[1] for ours, theirs in zip(after[0], reference[3], strict=True))


def test_the_place_in_the_mapping_decides_without_d1():
    permuted, straight = (Elastic(determinism="D0").train(mapping, 2) for mapping in ("3,1/0,2", "0,1/2,3"))
    assert permuted[0][0][1] != straight[0][0][1]


def test_gradients_must_not_be_added_up_before_they_are_exchanged(reference, monkeypatch):
    def summed_first(own, mapping, process, reduction, room):
        packed = [[torch.cat(pieces) * one.scale for pieces in one.pieces] for one in own]
        sums = [[torch.stack(bucket).sum(0)] for bucket in zip(*packed, strict=True)]
        each = RankMapping.even(mapping.n_processes, mapping.n_processes)
        return reduce_sets([GradientSet(sums, own[0].used)], each, process, reduction, room)

    monkeypatch.setattr(reduction_module, "reduce_sets", summed_first)
    found = Elastic().train("0,1/2,3", 1)
    assert [row[0] for row in found[0]] == [row[0] for row in reference[0]]
    assert found[0][0][1] != reference[0][0][1]


def test_random_states_must_be_swapped(reference, monkeypatch):
    monkeypatch.setattr(contexts_module, "_restore_states", lambda states, device: None)
    found = Elastic().train("0,1/2,3", 2)
    assert found[0][1][0] != reference[0][1][0]


def test_buffers_must_be_swapped(reference, monkeypatch):
    monkeypatch.setattr(Contexts, "_put_buffers", lambda self, context: None)
    found = Elastic().train("0,1/2,3", 2)
    # Training never reads the running statistics, so nothing but their hash can tell.
    assert [row[:3] for row in found[1]] == [row[:3] for row in reference[1]]
    assert [row[3] for row in found[1]] != [row[3] for row in reference[1]]


def test_batches_made_ahead_must_be_forgotten(reference_with_loaders, tmp_path, monkeypatch):
    def ahead(self, feed, key):
        while any(request.answer is None for request in feed.ahead):
            self._collect(None)
        return self._streams[key].state

    monkeypatch.setattr(LoaderPool, "_before_next", ahead)
    job, expected = Elastic(**WITH_LOADERS["resnet50"]), reference_with_loaders["resnet50"]
    assert job.train("0/1/2", 2, tmp_path / "saved.pt") == expected[:2]
    assert job.train("2,0/1", 1)[0][0] != expected[2][0]


# --- the reference --------------------------------------------------------------------------------------


def test_where_gloo_folds_otherwise_a_hook_adds_up_by_rank(reference, tmp_path):
    hooked = {"fold": "rank", "n_loaders": 1}
    (found,) = stock([hooked], 3)
    trainer = ElasticTrainer(**(JOB | hooked), run_dir=tmp_path)
    assert by_step(trainer.run(3, "3,1/0,2", hash_every=1).steps) == found
    (by_gloo,) = stock([{"n_loaders": 1}], 1)
    assert [row[0] for row in found[0]] == [row[0] for row in by_gloo[0]]
    assert found[0][0][1] != by_gloo[0][0][1]


def test_hashes_are_taken_as_often_as_they_are_asked_for_and_models_are_saved(tmp_path):
    job = ElasticJob(**(JOB | {"n_logical_workers": 1}))
    (found,) = train_stock([job], 4, hash_every=2, models=[tmp_path / "model.pt"])
    assert found.steps["parameter_sha"].notna().tolist() == [False, True, False, True]
    assert not found.is_hooked
    assert "words.weight" in torch.load(tmp_path / "model.pt", weights_only=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{"fold": "auto"}], "fold is 'auto'; expected ring or rank"),
        ([{"scaling": "post"}], "scaling is 'post'; expected 'pre'"),
        ([{}, {"n_logical_workers": 3}], "expected equally many"),
        ([{}, {"determinism": "D1+D2"}], "expected equally many logical workers and the same kernels"),
    ],
)
def test_jobs_that_stock_training_cannot_have_are_refused(changes, message):
    base = ElasticJob(**JOB)
    with pytest.raises(InputError, match=message):
        train_stock([replace(base, **one) for one in changes], 1)


def test_models_and_samples_do_not_depend_on_the_kernels(tmp_path):
    names, level = ["A", "B", "C", "canonical"], DeterminismLevel.named("D1")
    options = [process_options(name, level) for name in names]
    LocalLauncher().run(Launch("easyscale_job", 11, len(names), tmp_path, options=options))
    by_kernels = [read_json(tmp_path / f"found-{rank}.json") for rank in range(len(names))]
    assert len(by_kernels[0]) == 8
    assert all(found == by_kernels[0] for found in by_kernels)
