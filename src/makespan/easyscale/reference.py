"""Reference runs under stock DistributedDataParallel, with one process per logical worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from makespan.cleanup import temporary_directory
from makespan.easyscale.job import ElasticJob
from makespan.easyscale.kernels import process_options
from makespan.easyscale.requests import STOCK, StockRequest
from makespan.errors import InputError, TrainingError
from makespan.runtime import Launch, Launcher, LocalLauncher, RunDirectory

_WORKER = "makespan.easyscale.reference_worker"
_HASHES = ("parameter_sha", "optimizer_sha", "context_sha")


@dataclass(frozen=True, slots=True)
class StockRun:
    """Results of the ranks of a stock run.

    Parameters
    ----------
    steps
        One row per mini-batch and rank: ``step`` from 1, ``rank``, ``loss`` and the hashes
        ``parameter_sha``, ``optimizer_sha`` and ``context_sha``, None where they were not requested.
    is_hooked
        True if a communication hook summed gradients by rank, because gloo's order differs on this machine.
    """

    steps: pd.DataFrame
    is_hooked: bool


def train_stock(
    jobs: Sequence[ElasticJob],
    steps: int,
    *,
    device: str = "A",
    hash_every: int = 1,
    models: Sequence[str | Path | None] = (),
    launcher: Launcher | None = None,
    run_dir: str | Path | None = None,
) -> list[StockRun]:
    """Train jobs one after another with stock DistributedDataParallel and stock data loaders.

    Parameters
    ----------
    jobs
        Jobs with equally many logical workers and with levels that need the same kernels; each logical worker
        is a process. Their ``fold`` is ``ring``, gloo's order, or ``rank``, which uses a communication hook.
    steps
        Mini-batches.
    device
        Kernel set of all processes, if the levels do not pin one.
    hash_every
        Mini-batches from one set of hashes to the next; 0 for none.
    models
        Files for the trained models, as plain state dictionaries; empty to save none.
    launcher, run_dir
        Launcher of the processes, None for this machine; their directory, None for a temporary one.

    Raises
    ------
    makespan.errors.InputError
        The jobs cannot share processes, or stock training cannot sum gradients as one of them requires.
    makespan.errors.WorkerError
        A process failed.
    """
    kinds = {(job.n_logical_workers, job.level.pins_algorithms, job.level.pins_kernels) for job in jobs}
    if len(kinds) != 1:
        problem = f"jobs with {len(kinds)} pairs of logical workers and kernels"
        raise InputError(f"{problem}; expected equally many logical workers and the same kernels")
    if len(models) not in (0, len(jobs)):
        raise InputError(
            f"models has {len(models)} files; expected none, or one for each of {len(jobs)} jobs"
        )
    for job in jobs:
        if job.scaling != "pre":
            raise InputError(
                f"scaling is {job.scaling!r}; expected 'pre', which DistributedDataParallel uses"
            )
        if job.fold == "auto":
            raise InputError("fold is 'auto'; expected ring or rank, see detect_gloo_order")
    if run_dir is None:
        with temporary_directory("stock") as path:
            more: dict[str, Any] = {"device": device, "hash_every": hash_every, "models": models}
            return train_stock(jobs, steps, **more, launcher=launcher, run_dir=path)
    n_ranks, paths = jobs[0].n_logical_workers, models or [None] * len(jobs)
    resolved = tuple(None if path is None else Path(path).resolve() for path in paths)
    request = StockRequest(tuple(jobs), steps, device, hash_every, resolved)
    options = [process_options(device, jobs[0].level)] * n_ranks
    values = STOCK.dump_python(request, mode="json")
    launch = Launch(_WORKER, values, n_ranks, Path(run_dir), options=options)
    (launcher if launcher is not None else LocalLauncher()).run(launch)
    directory = RunDirectory(launch.run_dir)
    runs = []
    for number, job in enumerate(jobs):
        rows: list[dict[str, Any]] = []
        # Results are by rank, then by mini-batch; rows are by mini-batch, then by rank.
        for step, results in enumerate(zip(*directory.result(number), strict=True), start=1):
            # Parameters and optimizer are shared; contexts differ between ranks.
            if len({tuple(values[1:3]) for values in results}) != 1:
                raise TrainingError(f"ranks of stock training differ after mini-batch {step}")
            for rank, (loss, *hashes) in enumerate(results):
                named = zip(_HASHES, hashes or [None] * len(_HASHES), strict=True)
                rows.append({"step": step, "rank": rank, "loss": loss, **dict(named)})
        runs.append(StockRun(pd.DataFrame(rows), job.fold == "rank"))
    return runs
