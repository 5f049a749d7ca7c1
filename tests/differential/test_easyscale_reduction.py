"""Sums of gradients against gloo and against stock DistributedDataParallel, bit for bit."""

from itertools import combinations, pairwise, permutations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from forked import forking_servers
from reducing_worker import drawn_sets
from torch import nn

from makespan.easyscale import reduction as gloo_module
from makespan.easyscale.job import RankMapping
from makespan.easyscale.reduction import (
    Buckets,
    GlooThreads,
    GradientSet,
    ReadyOrder,
    Reduction,
    detect_gloo_order,
    in_memory,
    order_by_ring,
    provisional_map,
    rebuilt_map,
    reduce_sets,
    sums_like_gloo,
    trained_parameters,
)
from makespan.runtime import Launch, LocalLauncher

pytestmark = pytest.mark.xdist_group("training")
SEED = 7
MIB = 1 << 18  # elements


def everywhere(sets, mapping, reduction):
    """Return the sum as each process of a mapping has it."""
    return in_memory(
        [
            reduce_sets([sets[rank] for rank in ranks], mapping, process, reduction)
            for process, ranks in enumerate(mapping.hosted)
        ]
    )


def packed(one):
    """Return the scaled vector of each bucket of a set."""
    return [torch.cat(pieces) * one.scale for pieces in one.pieces]


def by_gloo(sets, gloo):
    """Return what gloo makes of scaled sets, bucket by bucket; all its ranks have the same."""
    scaled = [packed(one) for one in sets]
    sums = []
    for vectors in zip(*scaled, strict=True):
        first, *others = gloo.all_reduce(vectors)
        assert all(torch.equal(first, other) for other in others)
        sums.append(first)
    return sums


def in_pieces(rng, n_sets, lengths, scale, magnitudes):
    """Draw sets whose two buckets are in pieces; magnitudes down to numbers that a factor makes inexact."""
    sets = []
    for _ in range(n_sets):
        drawn = [
            rng.standard_normal(length, dtype=np.float32) * rng.choice(magnitudes, length).astype("f4")
            for length in lengths
        ]
        pieces, cut = [torch.from_numpy(one) for one in drawn], len(lengths) // 2
        sets.append(GradientSet([pieces[:cut], pieces[cut:]], torch.ones(1, dtype=torch.bool), scale))
    return sets


def set_partitions(items):
    """Return every way to put items into groups, the order of neither groups nor items mattering."""
    if not items:
        return [()]
    first, *rest = items
    found = []
    for size in range(len(rest) + 1):
        for chosen in combinations(rest, size):
            others = [one for one in rest if one not in chosen]
            found += [((first, *chosen), *groups) for groups in set_partitions(others)]
    return found


def ordered_partitions(n_ranks):
    """Return every mapping, with the order of processes and of ranks in each."""
    return [
        tuple(order[first:last] for first, last in pairwise([0, *cuts, n_ranks]))
        for order in permutations(range(n_ranks))
        for n_cuts in range(n_ranks)
        for cuts in combinations(range(1, n_ranks), n_cuts)
    ]


@pytest.mark.parametrize("n_ranks", range(2, 9))
def test_every_mapping_gives_the_bits_of_gloo(n_ranks):
    """All ways to divide up to seven ranks, and every fifth of those for eight."""
    sets = drawn_sets(n_ranks, (n_ranks - 1, 1001) if n_ranks < 8 else (7, 1001), SEED)
    with GlooThreads(n_ranks) as gloo:
        expected = by_gloo(sets, gloo)
    mappings = set_partitions(list(range(n_ranks))) + (ordered_partitions(n_ranks) if n_ranks <= 5 else [])
    assert len(mappings) >= {2: 2, 3: 5, 4: 15, 5: 52, 6: 203, 7: 877, 8: 4140}[n_ranks]
    for hosted in mappings[:: 5 if n_ranks == 8 else 1]:
        for found in everywhere(sets, RankMapping(hosted), Reduction(n_ranks)):
            assert all(map(torch.equal, found.buckets, expected)), hosted
            assert found.used.tolist() == [True, True]


@pytest.mark.parametrize("n_ranks", [2, 3, 5])
def test_buckets_of_more_than_two_segments_a_rank_give_the_bits_of_gloo(n_ranks):
    sets = drawn_sets(n_ranks, (2 * n_ranks * MIB + 1, 2 * n_ranks * MIB - 1), SEED)
    with GlooThreads(n_ranks) as gloo:
        expected = by_gloo(sets, gloo)
    for n_processes in {1, 2, n_ranks}:
        for found in everywhere(sets, RankMapping.even(n_ranks, n_processes), Reduction(n_ranks)):
            assert all(map(torch.equal, found.buckets, expected))


def test_a_sum_in_another_order_has_other_bits():
    sets = drawn_sets(4, (1001,), SEED)
    mapping = RankMapping.even(4, 2)
    (ring, _), (by_rank, _) = (everywhere(sets, mapping, Reduction(4, fold)) for fold in ("ring", "rank"))
    assert not torch.equal(ring.buckets[0], by_rank.buckets[0])
    a, b, c, d = (one.pieces[0][0] for one in sets)
    assert torch.equal(by_rank.buckets[0], ((a + b) + c) + d)
    assert not torch.equal(by_rank.buckets[0], (a + b) + (c + d))


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_the_check_at_the_start_tells_the_folds_apart(n_ranks):
    assert sums_like_gloo("ring", n_ranks)
    assert sums_like_gloo("rank", n_ranks) == (n_ranks <= 2)


def test_the_fold_of_a_machine_is_tried_once(tmp_path, monkeypatch, caplog):
    assert detect_gloo_order(3, tmp_path / "kept") == "ring"
    monkeypatch.setattr(gloo_module, "sums_like_gloo", lambda fold, n_ranks: False)
    assert detect_gloo_order(3, tmp_path / "kept") == "ring"
    assert not caplog.text
    for _ in range(2):
        assert detect_gloo_order(4, tmp_path / "kept") == "rank"
        assert "gloo does not sum in the order ring on this machine" in caplog.text
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_processes_sum_as_generators_do(tmp_path):
    """Two processes of three logical workers, one hosting two in descending order."""
    request = {"mapping": "2,0/1", "lengths": [5, 1001, 70_001], "seed": SEED}
    with forking_servers():
        LocalLauncher().run(Launch("reducing_worker", request, 2, tmp_path))
    sets = drawn_sets(3, request["lengths"], SEED)
    expected = everywhere(sets, RankMapping.even(3, 1), Reduction(3))[0]
    for process in range(2):
        *sums, used = torch.load(tmp_path / f"sum-{process}.pt", weights_only=True)
        assert all(map(torch.equal, sums, expected.buckets))
        assert used.tolist() == [True, True]


# --- stock DistributedDataParallel, its ranks threads of this process --------------------------------


@pytest.fixture(autouse=True)
def _no_module_is_left_in_a_pass(monkeypatch):
    """Undo what threads leave in torch: the passes of their modules end in another order than they began."""
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("scaling", ["pre", "post"])
def test_gradients_in_pieces_are_scaled_before_they_are_added(n_ranks, scaling):
    rng, reduction = np.random.default_rng(SEED), Reduction(n_ranks, scaling=scaling)
    lengths = [1, 70_000, 3, 5000, 1, 2, 4096, 200_001, 17, 4097]
    sets = in_pieces(rng, n_ranks, lengths, reduction.set_scale, [1e-44, 1e-38, 1e-3, 1.0, 1e3])
    expected = []
    for vectors in zip(*map(packed, sets), strict=True):
        total = torch.empty_like(vectors[0])
        for first, last, ranks in order_by_ring(len(total), n_ranks, 4):
            summed = vectors[ranks[0]][first:last].clone()
            for rank in ranks[1:]:
                summed += vectors[rank][first:last]
            total[first:last] = summed * (1.0 if scaling == "pre" else 1 / n_ranks)
        expected.append(total)
    for hosted in (
        RankMapping.even(n_ranks, 1),
        RankMapping.even(n_ranks, 2),
        RankMapping.even(n_ranks, n_ranks),
    ):
        for found in everywhere(sets, hosted, reduction):
            assert all(map(torch.equal, found.buckets, expected)), hosted


class Ranks(GlooThreads):
    """Stock DistributedDataParallel in every thread of a gloo group."""

    def wrap(self, models, **options):
        self._wrapped = [None] * len(self._groups)
        self._each(lambda rank: self._wrap(rank, models[rank], options))
        return self._wrapped

    def _wrap(self, rank, model, options):
        group = dist.ProcessGroup(dist.HashStore(), rank, len(self._groups))
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._groups[rank])
        self._wrapped[rank] = nn.parallel.DistributedDataParallel(model, process_group=group, **options)

    def backward(self, batches):
        self._each(lambda rank: backward(self._wrapped[rank], batches[rank]))

    def _each(self, do):
        for one in [self._pool.submit(do, rank) for rank in range(len(self._groups))]:
            one.result()


def backward(model, batch):
    model.zero_grad(set_to_none=True)
    model(batch).square().mean().backward()


def build():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 36, 500), nn.ReLU(), nn.Linear(500, 300), nn.ReLU(), nn.Linear(300, 10),
    )  # fmt: skip


def ours(model, batches, bucket_map, reduction, presum=False):
    """Sum the gradients of all batches by the runtime, on two processes; leave them in the model."""
    parameters = trained_parameters(model)
    buckets, mapping = Buckets(parameters, bucket_map), RankMapping.even(len(batches), 2)
    sets = []
    for batch in batches:
        backward(model, batch)
        sets.append(buckets.take(reduction.set_scale))
    if presum:
        halves = [[packed(sets[rank]) for rank in ranks] for ranks in mapping.hosted]
        sums = [[sum(one[1:], one[0]) for one in zip(*half, strict=True)] for half in halves]
        buckets.bind(buckets.views([a + b for a, b in zip(*sums, strict=True)]), sets[0].used)
    else:
        total = everywhere(sets, mapping, reduction)[0]
        buckets.bind(buckets.views(total.buckets), total.used)
    return {name: one.grad.clone() for name, one in parameters.items()}


@pytest.mark.parametrize(("n_ranks", "cap_bytes"), [(3, None), (4, 1 << 18), (5, 1 << 18)])
def test_gradients_are_those_of_stock_data_parallel_training(n_ranks, cap_bytes):
    rng, model, reduction = np.random.default_rng(SEED), build(), Reduction(n_ranks)
    parameters = trained_parameters(model)
    provisional, recorder, differed = provisional_map(parameters), ReadyOrder(parameters), set()
    bucket_map, options = provisional, {} if cap_bytes is None else {"bucket_cap_mb": cap_bytes / (1 << 20)}
    with Ranks(n_ranks) as ranks:
        wrapped = ranks.wrap([build() for _ in range(n_ranks)], **options)
        for step in range(3):
            batches = [torch.from_numpy(rng.random((4, 3, 8, 8), dtype=np.float32)) for _ in range(n_ranks)]
            ranks.backward(batches)
            expected = [{name: one.grad for name, one in one.module.named_parameters()} for one in wrapped]

            def same(found, expected=expected):
                return all(torch.equal(found[name], one[name]) for one in expected for name in found)

            assert same(ours(model, batches, bucket_map, reduction)), step
            if step == 0:
                rebuilt = rebuilt_map(parameters, recorder.finish(), cap_bytes)
                assert len(rebuilt) > 1
                wrong = {"map": (rebuilt, reduction, False)}
            else:
                wrong = {"map": (provisional, reduction, False)}
            bucket_map = rebuilt
            wrong["sum"] = (bucket_map if step else provisional, reduction, True)
            wrong["scaling"] = (
                bucket_map if step else provisional,
                Reduction(n_ranks, scaling="post"),
                False,
            )
            wrong["fold"] = (bucket_map if step else provisional, Reduction(n_ranks, "rank"), False)
            differed |= {what for what, how in wrong.items() if not same(ours(model, batches, *how))}
        sizes = wrapped[0]._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    found = [sum(parameters[name].nbytes for name in names) for names in rebuilt]
    assert [int(size) for size in sizes.split(",")] == found
    assert differed == {"map", "sum", "fold"} | ({"scaling"} if n_ranks in (3, 5) else set())
