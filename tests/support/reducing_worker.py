"""A process that adds up drawn gradient sets with others: ``python reducing_worker.py <run directory>``."""

import sys

import numpy as np
import torch

from makespan.easyscale.job import RankMapping
from makespan.easyscale.reduction import GradientSet, Reduction, over_group, reduce_sets
from makespan.runtime import end_worker, join, run_worker


def drawn_sets(n_sets, lengths, seed):
    """Gradient sets that are the same in every process; their magnitudes differ, so that order matters."""
    rng = np.random.default_rng(seed)
    return [
        GradientSet(
            [[torch.from_numpy(_vector(rng, length))] for length in lengths], torch.tensor([True, rank == 1])
        )
        for rank in range(n_sets)
    ]


def _vector(rng, length):
    return rng.standard_normal(length, dtype=np.float32) * rng.choice([1e-3, 1.0, 1e3], length).astype("f4")


def work(directory, who):
    request = directory.request()
    join(directory, who)
    mapping = RankMapping.parse(request["mapping"])
    sets = drawn_sets(mapping.n_logical_workers, request["lengths"], request["seed"])
    own = [sets[rank] for rank in mapping.hosted[who.rank]]
    total = over_group(reduce_sets(own, mapping, who.rank, Reduction(mapping.n_logical_workers)))
    torch.save([*total.buckets, total.used], directory.path / f"sum-{who.rank}.pt")


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], work))
