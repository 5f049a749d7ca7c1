"""Logical workers on any number of processes against stock DistributedDataParallel, bit for bit."""

import random
from itertools import product

import pytest

torch = pytest.importorskip("torch")

from easyscale_job import JOB, Elastic, level_of  # noqa: E402
from forked import forking_servers  # noqa: E402

from makespan.files import read_json  # noqa: E402
from makespan.papers.easyscale.runtime import (  # noqa: E402
    Contexts,
    GradientSet,
    RankMapping,
    process_options,
    reduce_sets,
    try_kernel_sets,
)
from makespan.papers.easyscale.runtime import _contexts as contexts_module  # noqa: E402
from makespan.papers.easyscale.runtime import _hosted as hosted_module  # noqa: E402
from makespan.runtime import Launch, LocalLauncher  # noqa: E402
from makespan.training.zoo import STAND_INS  # noqa: E402

pytestmark = pytest.mark.xdist_group("training")
OF_THREE = JOB | {"n": 3, "optimizer": "adam", "buffers": "rank0", "cap_bytes": None, "steps": 5}
OF_THE_ZOO = [
    JOB | {"n": 3, "model": name, "steps": 2, "optimizer": optimizer}
    for name, optimizer in zip(
        STAND_INS, ("sgd", "sgd", "sgd", "sgd", "adam", "adam", "adam", "adam"), strict=True
    )
]


@pytest.fixture(scope="module")
def run():
    """Return a function that runs jobs in processes and returns what each of them found."""
    with forking_servers():

        def run(jobs, n_processes, run_dir):
            options = [process_options(name, level_of(jobs[0])) for name in jobs[0]["devices"][:n_processes]]
            LocalLauncher().run(Launch("easyscale_job", jobs, n_processes, run_dir, options=options))
            return [read_json(run_dir / f"found-{rank}.json") for rank in range(n_processes)]

        yield run


@pytest.fixture(scope="module")
def references(run, tmp_path_factory):
    """Return what every rank of stock training had, for all jobs: by step, then by rank."""
    jobs = [JOB, OF_THREE, *OF_THE_ZOO]
    by_rank = run(jobs, JOB["n"], tmp_path_factory.mktemp("stock"))
    return [
        [[by_rank[rank][number][step] for rank in range(job["n"])] for step in range(job["steps"])]
        for number, job in enumerate(jobs)
    ]


@pytest.fixture
def reference(references):
    return references[0]


@pytest.mark.parametrize(
    "mapping", ["0/1/2/3", "0,1/2,3", "0,1/2/3", "0,1,2/3", "3,1/0,2", "2/3,0/1", "0,1,2,3", "3,0,2,1"]
)
def test_every_mapping_trains_with_the_bits_of_stock_training(reference, mapping):
    assert Elastic(JOB).train(mapping, 5) == reference[:5]


@pytest.mark.parametrize("mapping", ["0,1,2", "2,0/1", "1/2/0"])
def test_three_logical_workers_with_buffers_of_the_first_do_so_too(references, mapping):
    assert Elastic(OF_THREE).train(mapping, 5) == references[1]


@pytest.mark.parametrize("number", range(len(OF_THE_ZOO)), ids=STAND_INS)
def test_every_model_of_the_zoo_does_so_too(references, number):
    """Grouped convolutions, residuals, embeddings, attention in windows, stochastic depth."""
    job = OF_THE_ZOO[number]
    for mapping in ("2,0/1", "0,1,2"):
        assert Elastic(job).train(mapping, 2) == references[2 + number]


def test_processes_train_with_the_bits_of_stock_training(reference, run, tmp_path):
    mapping = RankMapping.parse("3,1/0,2")
    by_process = run([JOB | {"mapping": str(mapping), "steps": 3}], 2, tmp_path)
    for ranks, (found,) in zip(mapping.hosted, by_process, strict=True):
        assert found == [[row[rank] for rank in ranks] for row in reference[:3]]


def test_a_random_schedule_of_restarts_changes_no_bit(reference, tmp_path):
    rng, elastic, found = random.Random(5), Elastic(JOB), []
    for number in range(JOB["steps"]):
        ranks = list(range(4))
        rng.shuffle(ranks)
        cuts = sorted(rng.sample((1, 2, 3), rng.randint(0, 3)))
        hosted = tuple(tuple(ranks[a:b]) for a, b in zip([0, *cuts], [*cuts, 4], strict=True))
        found += elastic.train(str(RankMapping(hosted)), 1, tmp_path / f"{number}.pt")
    assert found == reference


def test_a_restart_twice_from_the_same_place_goes_on_in_the_same_way(reference, tmp_path):
    elastic = Elastic(JOB)
    elastic.train("0,1/2,3", 2, tmp_path / "saved.pt")
    for mapping in ("0,1,2,3", "1/0,2,3"):
        elastic.step = 2
        assert elastic.train(mapping, 3) == reference[2:5]


# --- what must make a difference ----------------------------------------------------------------------


def test_without_the_layout_of_before_a_restart_is_summed_differently(reference, tmp_path):
    elastic = Elastic(JOB | {"level": "D0"})
    assert elastic.train("0/1/2/3", 3, tmp_path / "saved.pt") == reference[:3]
    after = elastic.train("0,1/2,3", 2)
    assert [row[0] for row in after[0]] == [row[0] for row in reference[3]]
    assert all(ours[1] != theirs[1] for ours, theirs in zip(after[0], reference[3], strict=True))


def test_the_place_in_the_mapping_decides_without_d1():
    permuted, straight = (
        Elastic(JOB | {"level": "D0"}).train(mapping, 2) for mapping in ("3,1/0,2", "0,1/2,3")
    )
    assert permuted[0][0][1] != straight[0][0][1]


def test_gradients_must_not_be_added_up_before_they_are_exchanged(reference, monkeypatch):
    def summed_first(own, mapping, process, reduction):
        sums = [torch.stack(bucket).sum(0) for bucket in zip(*(one.buckets for one in own), strict=True)]
        each = RankMapping.even(mapping.n_processes, mapping.n_processes)
        return reduce_sets([GradientSet(sums, own[0].used)], each, process, reduction)

    monkeypatch.setattr(hosted_module, "reduce_sets", summed_first)
    found = Elastic(JOB).train("0,1/2,3", 1)
    assert [row[0] for row in found[0]] == [row[0] for row in reference[0]]
    assert found[0][0][1] != reference[0][0][1]


def test_random_states_must_be_swapped(reference, monkeypatch):
    monkeypatch.setattr(contexts_module, "_give_states", lambda states, device: None)
    found = Elastic(JOB).train("0,1/2,3", 2)
    assert found[0][1][0] != reference[0][1][0]


def test_buffers_must_be_swapped(reference, monkeypatch):
    monkeypatch.setattr(Contexts, "_put_buffers", lambda self, context: None)
    found = Elastic(JOB).train("0,1/2,3", 2)
    # Training never reads the running statistics, so nothing but their hash can tell.
    assert [row[:3] for row in found[1]] == [row[:3] for row in reference[1]]
    assert [row[3] for row in found[1]] != [row[3] for row in reference[1]]


# --- determinism levels, in processes that end with every stage ------------------------------------------

STAGES = (("0/1/2/3", "AAAA"), ("0,1/2,3", "AA"), ("0,1/2/3", "ABB"))
IN_A_STAGE = 3  # of four batches in an epoch: stages end within epochs, and epochs within stages
MODELS = ("resnet50", "vgg19")


@pytest.fixture(scope="module")
def equal(run, tmp_path_factory):
    """Return, by level and stage, whether what ranks had after each mini-batch is what stock ranks had."""
    folder = tmp_path_factory.mktemp("levels")
    first, second = try_kernel_sets(("A", "B", "seq", "tree")).different_pair()
    found = {}
    for levels in (("D0", "D1"), ("D0+D2", "D1+D2")):
        for number, (mapping, letters) in enumerate(STAGES):
            devices = [first if letter == "A" else second for letter in letters]
            shared, asked = JOB | {"devices": devices, "loaders": 2}, list(product(MODELS, levels))
            paths = [f"{{}}-{{}}-{stage}.pt" for stage in (number - 1, number)]
            jobs = [
                shared | {
                    "model": model, "level": level, "mapping": mapping,
                    "first": number * IN_A_STAGE, "steps": IN_A_STAGE,
                    "save": str(folder / paths[1].format(model, level)),
                    "resume": str(folder / paths[0].format(model, level)) if number else None,
                }
                for model, level in asked
            ]  # fmt: skip
            if number == 0:
                whole = shared | {"level": levels[0], "steps": len(STAGES) * IN_A_STAGE}
                jobs += [whole | {"model": model} for model in MODELS]
            by_process = run(jobs, len(devices), folder / f"{levels[0]}-{number}")
            if number == 0:
                ranks = [[one[place] for one in by_process] for place in range(len(asked), len(jobs))]
                stock = {
                    model: list(zip(*rows, strict=True)) for model, rows in zip(MODELS, ranks, strict=True)
                }
            for place, (model, level) in enumerate(asked):
                steps = zip(*(one[place] for one in by_process), strict=True)
                rows = [tuple(row for rows in step for row in rows) for step in steps]
                found[model, level, number] = rows == stock[model][number * IN_A_STAGE :][:IN_A_STAGE]
    return found


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("D0", [True, False, False]),
        ("D1", [True, True, False]),
        ("D0+D2", [True, False, False]),
        ("D1+D2", [True, True, True]),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_each_level_keeps_the_bits_for_as_long_as_it_promises(equal, model, level, expected):
    assert [equal[model, level, stage] for stage in range(len(STAGES))] == expected


def test_models_and_samples_do_not_depend_on_the_kernels(run, tmp_path):
    names = ["A", "B", "C", "canonical"]
    by_kernels = run([JOB | {"stand_ins": True, "devices": names}], len(names), tmp_path)
    assert len(by_kernels[0][0]) == 8
    assert all(found == by_kernels[0] for found in by_kernels)
