"""Elastic training of a user's own model against stock training, in processes that come and go.

The model has convolution, BatchNorm, dropout and an embedding, is trained by Adam with a falling learning
rate and clipped gradients, and its samples are altered in loader processes by draws from all random states.
"""

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from elastic_job import BITS, bits, trainer

from makespan.config import load_settings
from makespan.easyscale import run_together
from makespan.easyscale.job import RankMapping
from makespan.easyscale.reference import train_stock
from makespan.papers.easyscale import PAPER
from makespan.papers.experiment import Given

pytestmark = pytest.mark.xdist_group("training")

ROOT = Path(__file__).parents[2]
LARGE = {"options": {"model": {"kind": "large"}}}
KINDS = {
    "buckets of an explicit size": {},
    "buckets of the usual sizes": {"bucket_cap_bytes": None} | LARGE,
    "one bucket of more than 2 N MiB": {"bucket_cap_bytes": 1 << 25} | LARGE,
    "buffers of the first": {"buffers": "rank0", "n_loaders": 1},
}
SCHEDULES = {3: ((2, "2,0/1"), (3, "1,2,0")), 5: ((2, "4,1/0,3,2"), (3, "0,3/1/2/4"))}


def compared(kinds, n, folder):
    """Return stock and elastic training of kinds of the job, by name."""
    shared = {"n_logical_workers": n, "fold": "ring"}
    trainers = [trainer(folder / str(number), **(shared | KINDS[kind])) for number, kind in enumerate(kinds)]
    stock = train_stock([one.job for one in trainers], SCHEDULES[n][-1][0], run_dir=folder / "stock")
    for steps, mapping in SCHEDULES[n]:
        elastic = run_together(trainers, steps, mapping, hash_every=1)
    rows = [run.steps.sort_values(["step", "rank"]) for run in stock]
    rows = [one.assign(loss_hex=one["loss"].map(float.hex))[BITS].to_numpy().tolist() for one in rows]
    return dict(zip(kinds, zip(rows, map(bits, elastic), strict=True), strict=True))


@pytest.fixture(scope="module")
def of_three(tmp_path_factory):
    return compared(KINDS, 3, tmp_path_factory.mktemp("three"))


@pytest.mark.parametrize("kind", KINDS)
def test_three_logical_workers_train_with_the_bits_of_stock_training(of_three, kind):
    stock, elastic = of_three[kind]
    assert elastic == stock
    assert len(stock) == 3 * SCHEDULES[3][-1][0]


def test_kinds_of_buckets_differ_in_bits(of_three):
    """Otherwise nothing would tell whether their sizes are those of stock training."""
    usual, large = (of_three[kind][0] for kind in list(KINDS)[1:3])
    assert [row[:3] for row in usual[:3]] == [row[:3] for row in large[:3]]
    assert usual[-1][3] != large[-1][3]


def test_five_do_so_too_on_uneven_permuted_processes(tmp_path):
    ((stock, elastic),) = compared(list(KINDS)[:1], 5, tmp_path).values()
    assert elastic == stock


# --- what takes minutes ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_random_schedule_of_processes_changes_no_bit(tmp_path):
    rng, n, steps = random.Random(10), 4, 24
    ours = trainer(tmp_path / "elastic", n_logical_workers=n, fold="ring")
    (stock,) = train_stock([ours.job], steps, run_dir=tmp_path / "stock")
    for end in [*sorted(rng.sample(range(1, steps), 10)), steps]:
        ranks = rng.sample(range(n), n)
        cuts = sorted(rng.sample(range(1, n), rng.randint(0, n - 1)))
        hosted = tuple(tuple(ranks[a:b]) for a, b in zip([0, *cuts], [*cuts, n], strict=True))
        result = ours.run(end, str(RankMapping(hosted)))
    assert len(result.reconfigurations) == 11
    rows = stock.steps.sort_values(["step", "rank"])
    assert bits(result) == rows.assign(loss_hex=rows["loss"].map(float.hex))[BITS].to_numpy().tolist()


@pytest.mark.slow
def test_each_level_keeps_its_promise_over_a_hundred_mini_batches_a_stage():
    """Equal where it says so, and only there; stages end amid epochs of 13 mini-batches."""
    small = load_settings([ROOT / "config/test/easyscale.yaml"], ROOT).easyscale.fig9
    changes = {"models": ("resnet50", "vgg19"), "steps_per_stage": 100}
    changes["samples"] = 4 * small.micro_batch_size * 13 - 1
    cells = {"fig9": PAPER.read_published("fig9", ROOT / "config/published/easyscale_fig9.csv")}
    table = small.model_copy(update=changes).run(Given("measured", cells=cells))["fig9"]
    found = table.groupby(["model", "setting", "stage"])["equal"].all()
    expected = {"D0": [True, False, False], "D1": [True, True, False], "D0+D2": [True, False, False]}
    for model in changes["models"]:
        for level, wanted in (expected | {"D1+D2": [True, True, True]}).items():
            assert found[model, level].tolist() == wanted
