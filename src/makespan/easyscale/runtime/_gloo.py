"""Whether a fold adds up as gloo does on this machine, tried with ranks that are threads of this process."""

import hashlib
import importlib
import logging
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from makespan.easyscale.runtime._folds import fold_named
from makespan.files import read_json, write_json
from makespan.runtime import describe_machine

__all__ = ["GlooThreads", "checked_lengths", "fold_of_machine", "folds_like_gloo"]

_TIMEOUT = timedelta(seconds=60)
_SEED = 20231114
_log = logging.getLogger(__name__)


class GlooThreads(AbstractContextManager["GlooThreads"]):
    """Ranks of one gloo group, each a thread; a process group of its own keeps them apart from any other."""

    def __init__(self, n_ranks: int) -> None:
        # The stubs of torch hide the public HashStore, and what a group of one's own can do.
        dist: Any = importlib.import_module("torch.distributed")
        self._pool, store = ThreadPoolExecutor(n_ranks), dist.HashStore()
        joined = [
            self._pool.submit(dist.ProcessGroupGloo, store, rank, n_ranks, _TIMEOUT)
            for rank in range(n_ranks)
        ]
        self._groups = [one.result() for one in joined]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the threads and leave the group."""
        self._pool.shutdown()
        self._groups.clear()

    def all_reduce(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Sum of one vector a rank, as each rank has it."""
        copies = [one.clone() for one in vectors]
        running = [
            self._pool.submit(lambda group, one: group.allreduce([one]).wait(), group, one)
            for group, one in zip(self._groups, copies, strict=True)
        ]
        for one in running:
            one.result()
        return copies


def checked_lengths(n_ranks: int) -> tuple[int, ...]:
    """Lengths that gloo cuts in different ways: empty chunks, short ones, more than two segments a rank."""
    return 7, 1001, 100_003, n_ranks * 524_288 + 1


def folds_like_gloo(fold: str, n_ranks: int) -> bool:
    """Whether a fold gives the bits of gloo's all-reduce on this machine, with this torch.

    It takes parts of a second. The answer holds for a machine and a version of torch, so it is asked once
    and not at each start.
    """
    add, rng = fold_named(fold), np.random.default_rng(_SEED)
    with GlooThreads(n_ranks) as gloo:
        for length in checked_lengths(n_ranks):
            drawn = rng.standard_normal((n_ranks, length), dtype=np.float32)
            vectors = list(torch.from_numpy(drawn))
            expected = add(vectors, 0, length)
            if not all(torch.equal(one, expected) for one in gloo.all_reduce(vectors)):
                return False
    return True


def fold_of_machine(n_ranks: int, directory: Path) -> str:
    """Return the fold with which stock training on this machine can be met: ``ring``, else ``rank``.

    Parameters
    ----------
    n_ranks
        Number of logical workers.
    directory
        Where the answer is kept for the next start, one file a machine, version of torch and number.
    """
    system = [describe_machine()["processor"], platform.system(), torch.__version__]
    key = hashlib.sha256("/".join(map(str, [*system, n_ranks])).encode()).hexdigest()[:16]
    path = directory / f"fold-{key}.json"
    if (known := read_json(path)) is None:
        known = {"system": system, "n_ranks": n_ranks, "ring": folds_like_gloo("ring", n_ranks)}
        directory.mkdir(parents=True, exist_ok=True)
        write_json(known, path)
    if known["ring"]:
        return "ring"
    _log.warning("gloo adds up in another order than the fold ring here; the fold rank takes its place, and "
                 "only training that sums by the same fold has its bits")  # fmt: skip
    return "rank"
