"""What is measured here of schedules: the steps of Fig. 9, and a search whose objective is a real run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from makespan.leftovers import temporary_directory
from makespan.papers.slapo._tables_measured import FIG9, TUNER
from makespan.runtime import Launch, LocalLauncher, RunDirectory

__all__ = ["fig9_measured_experiment", "tuner_experiment"]

_WORKER = "makespan.papers.slapo.language._measuring_worker"
_STRATEGIES = ("frontier", "coordinate_descent", "exhaustive")
Record = dict[str, Any]


def fig9_measured_experiment(
    printed: Mapping[str, pd.DataFrame], steps: Sequence[Mapping[str, Any]], **asked: Any
) -> dict[str, pd.DataFrame]:
    """Verify, weigh and time a small BERT after each step of its schedule.

    Parameters
    ----------
    printed
        No cells are printed of this figure.
    steps
        Name, ``options`` of the schedule and numbers of ``processes`` of each step, in order.
    **asked
        ``family``, ``size`` and ``batch`` [samples] of the model, ``warmup_steps``, ``steps_timed``, ``seed``.

    Returns
    -------
    dict of pandas.DataFrame
        ``fig9``: a row a step and number of processes.

    Raises
    ------
    makespan.errors.WorkerError
        A step does not compute what the original model does, or a process failed.
    """
    rows = []
    for n_processes in sorted({number for step in steps for number in step["processes"]}):
        own = [step for step in steps if n_processes in step["processes"]]
        ways = [{"name": step["name"], "options": step["options"]} for step in own]
        for step, found in zip(own, _run({"task": "steps", "ways": ways, **asked}, n_processes), strict=True):
            rows.append(_step_row(step, found, n_processes, asked["batch"]))
    return {"fig9": FIG9.validate(pd.DataFrame(rows), where="fig9")}


def tuner_experiment(printed: Mapping[str, pd.DataFrame], **asked: Any) -> dict[str, pd.DataFrame]:
    """Search for the fastest schedule of a small OPT that keeps no more than a budget of bytes.

    Each point is trained for a few steps when a strategy asks for it, and not again when another one does;
    the exhaustive search, which tells how good the others are, comes last.

    Parameters
    ----------
    printed
        No cells are printed of this search.
    **asked
        ``family``, ``size``, ``batches``, ``ratios``, ``budget_bytes``, ``options`` of the schedule,
        ``warmup_steps``, ``steps``, ``seed``.

    Returns
    -------
    dict of pandas.DataFrame
        ``tuner``: a row an evaluation of a search.

    Raises
    ------
    makespan.errors.WorkerError
        The process failed.
    """
    found = _run({"task": "search", "strategies": list(_STRATEGIES), **asked}, 1)
    table = pd.DataFrame(found).assign(oracle="measured", budget_bytes=asked["budget_bytes"])
    return {"tuner": TUNER.validate(table, where="tuner")}


def _run(request: Record, n_processes: int) -> list[Record]:
    with temporary_directory("schedules") as path:
        LocalLauncher().run(Launch(_WORKER, request, n_processes, path))
        found: list[Record] = RunDirectory(path).result()
    return found


def _step_row(step: Mapping[str, Any], found: Record, n_processes: int, batch: int) -> Record:
    processes = found["processes"]
    times = np.array([one["times_s"] for one in processes])
    seconds = times.max(axis=0)  # a step ends with its last process
    low, high = np.quantile(batch / seconds, [0.25, 0.75])
    return {
        "oracle": "measured", "step": step["name"], "n_processes": n_processes,
        "compiler": step["options"].get("compiler", ""), "global_batch_size": batch,
        "throughput_samples_per_s": float(np.median(batch / seconds)),
        "throughput_iqr_samples_per_s": float(high - low),
        "saved_bytes": max(one["saved_bytes"] for one in processes),
        "parameter_bytes": max(one["parameter_bytes"] for one in processes),
        "output_error": max(one["output_error"] for one in processes),
        "gradient_error": max(one["gradient_error"] for one in processes),
    }  # fmt: skip
