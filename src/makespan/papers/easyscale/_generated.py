"""Job lists with the statistics of the authors' own, for any number of jobs and any seed.

Counts are apportioned exactly and epochs are stratified over their quantiles, so a seed decides which job has
which value and when it arrives, but not the statistics of the whole. Values are drawn independently of each
other, but for the home type, which follows the number of logical workers.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.errors import InputError
from makespan.presets import read_preset
from makespan.traces import EASYSCALE_JOBS, apportion

__all__ = ["N_JOBS", "generated_jobs"]

_STATISTICS = read_preset("makespan.papers.easyscale", "jobs")
_QUANTILES = (0.0, 0.5, 1.0)
_MAX_JOBS = 10_000

N_JOBS = sum(entry["jobs"] for entry in _STATISTICS["models"].values())
"""Jobs of the authors' list."""


def generated_jobs(seed: int, n_jobs: int = N_JOBS) -> pd.DataFrame:
    """Generate a job list; schema `makespan.traces.EASYSCALE_JOBS`, in order of submission.

    However many jobs, they arrive at the rate of the authors' list.

    Parameters
    ----------
    seed
        Of all random choices, not negative.
    n_jobs
        From 2 to 10000 or an `InputError`.
    """
    if not (2 <= n_jobs <= _MAX_JOBS and seed >= 0):
        raise InputError(
            f"{n_jobs} jobs with seed {seed}; accepted: from 2 to {_MAX_JOBS} jobs, a seed of 0 or more"
        )
    rng = np.random.default_rng([seed, n_jobs])
    models = _STATISTICS["models"]
    counts = apportion(np.array([entry["jobs"] for entry in models.values()], dtype=float), n_jobs)
    parts = [_of_model(name, int(count), rng) for name, count in zip(models, counts, strict=True) if count]
    table = pd.concat(parts, ignore_index=True)
    for size, rows in table.groupby("max_parallelism"):
        table.loc[rows.index, "home_gpu"] = _shuffled(_STATISTICS["homes"][str(size)], len(rows), rng)
    table = table.iloc[rng.permutation(n_jobs)].assign(submit_time_s=_arrivals(n_jobs, rng))
    table["job_id"] = [f"{model}-{number}" for number, model in enumerate(table["workload"])]
    return EASYSCALE_JOBS.validate(table, where="generated jobs")


def _of_model(name: str, count: int, rng: np.random.Generator) -> pd.DataFrame:
    entry = _STATISTICS["models"][name]
    logs = np.log(np.asarray(entry["epochs"], dtype=float))
    shares = (rng.permutation(count) + rng.uniform(0.0, 1.0, count)) / count
    return pd.DataFrame(
        {
            "workload": name,
            "max_parallelism": [int(size) for size in _shuffled(entry["max_parallelism"], count, rng)],
            "micro_batch_size": [int(size) for size in _shuffled(entry["micro_batch_size"], count, rng)],
            "epochs": np.maximum(np.round(np.exp(np.interp(shares, _QUANTILES, logs))), 1.0),
            "is_heterogeneous": entry["is_heterogeneous"],
            "home_gpu": "",
        }
    )


def _shuffled(weights: Mapping[str, Any], count: int, rng: np.random.Generator) -> list[str]:
    """Return so many names, each as often as its weight says, in random order."""
    parts = apportion(np.array(list(weights.values()), dtype=float), count)
    return [str(name) for name in rng.permutation(np.repeat(np.array(list(weights)), parts))]


def _arrivals(n_jobs: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Spread jobs over the intervals of the list on whole seconds; the first and the last are as there."""
    scale, width = n_jobs / N_JOBS, _STATISTICS["bin_s"]
    first, last = _STATISTICS["first_s"], _STATISTICS["last_s"]
    counts = apportion(np.array(_STATISTICS["arrivals"], dtype=float), n_jobs)
    bounds = [(max(number * width, first), min((number + 1) * width, last)) for number in range(len(counts))]
    drawn = [rng.uniform(low, high, count) for (low, high), count in zip(bounds, counts, strict=True)]
    times = np.sort(np.concatenate(drawn))
    times[0], times[-1] = first, last
    return np.asarray(np.floor(times * scale), dtype=np.float64)
