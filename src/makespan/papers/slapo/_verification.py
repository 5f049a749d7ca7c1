"""Schedules of the library against the models that they are written for, on one process and on several."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas as pd

from makespan.leftovers import temporary_directory
from makespan.papers.slapo._tables_verification import VERIFY
from makespan.runtime import Launch, Launcher, RunDirectory, local_launcher

__all__ = ["verify_experiment", "verify_schedules"]

_WORKER = "makespan.slapo._verify_worker"
_NOT_IN_TABLE = ("report",)


def verify_schedules(
    cases: Sequence[Mapping[str, Any]],
    n_processes: int,
    launcher: Launcher,
    *,
    size: str = "tiny",
    samples: int = 2,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Verify schedules of the library, all in the same processes.

    Parameters
    ----------
    cases
        ``family`` of the zoo and ``options`` of its schedule, of each.
    n_processes, launcher
        Processes that share each model, and what starts them.
    size, samples, seed
        Size of the models, samples of a batch, seed of weights, samples and gradients of outputs.

    Returns
    -------
    list
        Of each case what `VERIFY` has of it, from ``steps`` on, and ``report``, the text of the report.

    Raises
    ------
    makespan.errors.WorkerError
        A schedule could not be applied, or a process died.
    """
    request = {"cases": [dict(case) for case in cases], "size": size, "samples": samples, "seed": seed}
    with temporary_directory("verify") as path:
        launcher.run(Launch(_WORKER, request, n_processes, path))
        rows: list[dict[str, Any]] = RunDirectory(path).result()
    return rows


def verify_experiment(
    cells: Mapping[str, pd.DataFrame],
    *,
    families: Sequence[str],
    processes: Sequence[int],
    schedules: Mapping[str, Mapping[str, Any]],
    left_out: Mapping[str, Sequence[str]],
    device: Literal["auto", "cpu", "cuda"],
    size: str,
    samples: int,
    seed: int,
) -> dict[str, pd.DataFrame]:
    """Verify every schedule of every family; one launch for each number of processes.

    Parameters
    ----------
    cells
        Printed cells; none are read.
    families, processes, schedules
        Families of the zoo, numbers of processes, and options of schedules by a name for them.
    left_out
        Schedules that a family does not have.
    device
        Where models run; ``auto`` takes GPUs where there is one for each process.
    size, samples, seed
        As for `verify_schedules`.

    Returns
    -------
    dict
        ``verify``, schema `VERIFY`: a row a number of processes, family and schedule.

    Raises
    ------
    makespan.errors.WorkerError
        A schedule could not be applied, or a process died.
    """
    cases: list[dict[str, Any]] = [
        {"family": family, "schedule": name, "options": dict(options)}
        for family in families
        for name, options in schedules.items()
        if name not in left_out.get(family, ())
    ]
    rows = []
    for count in processes:
        launcher = local_launcher(device, count)
        found = verify_schedules(cases, count, launcher, size=size, samples=samples, seed=seed)
        for case, row in zip(cases, found, strict=True):
            key = {"oracle": "measured", "n_processes": count, "family": case["family"]}
            options = " ".join(f"{name}={value}" for name, value in case["options"].items())
            values = {name: value for name, value in row.items() if name not in _NOT_IN_TABLE}
            rows.append({**key, "schedule": case["schedule"], "options": options, **values})
    return {"verify": VERIFY.validate(pd.DataFrame(rows), "verify")}
