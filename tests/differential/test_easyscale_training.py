"""Logical workers on any number of processes against stock DistributedDataParallel, bit for bit."""

import random

import pytest

torch = pytest.importorskip("torch")

from easyscale_job import JOB, Elastic  # noqa: E402
from forked import forking_servers  # noqa: E402

from makespan.files import read_json  # noqa: E402
from makespan.papers.easyscale.runtime import Contexts, RankMapping  # noqa: E402
from makespan.papers.easyscale.runtime import _contexts as contexts_module  # noqa: E402
from makespan.runtime import Launch, LocalLauncher  # noqa: E402

pytestmark = pytest.mark.xdist_group("training")
OF_THREE = JOB | {"n": 3, "optimizer": "adam", "buffers": "rank0", "cap_bytes": None, "steps": 5}


@pytest.fixture(scope="module")
def run():
    """Return a function that runs jobs in processes and returns what each of them found."""
    with forking_servers():

        def run(jobs, n_processes, run_dir):
            LocalLauncher().run(Launch("easyscale_job", jobs, n_processes, run_dir))
            return [read_json(run_dir / f"found-{rank}.json") for rank in range(n_processes)]

        yield run


@pytest.fixture(scope="module")
def references(run, tmp_path_factory):
    """Return what every rank of stock training had, for both jobs: by step, then by rank."""
    jobs = [JOB, OF_THREE]
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
    elastic = Elastic(JOB, "D0")
    assert elastic.train("0/1/2/3", 3, tmp_path / "saved.pt") == reference[:3]
    after = elastic.train("0,1/2,3", 2)
    assert [row[0] for row in after[0]] == [row[0] for row in reference[3]]
    assert all(ours[1] != theirs[1] for ours, theirs in zip(after[0], reference[3], strict=True))


def test_the_place_in_the_mapping_decides_without_d1():
    permuted, straight = (Elastic(JOB, "D0").train(mapping, 2) for mapping in ("3,1/0,2", "0,1/2,3"))
    assert permuted[0][0][1] != straight[0][0][1]


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
