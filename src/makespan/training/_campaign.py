"""Several runs that belong together: one model under many plans, and under one plan after another."""

import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from makespan.errors import InputError
from makespan.plans import ExecutionPlan
from makespan.runtime import Launcher
from makespan.training._job import RunResult, TrainingJob
from makespan.training._run import train, train_all

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["cost_table", "train_compared", "train_grouped", "train_switching"]

_log = logging.getLogger(__name__)


def train_grouped(
    jobs: Mapping[str, TrainingJob], *, launcher: Launcher | None = None
) -> dict[str, RunResult]:
    """Train several jobs; those with equally many processes share one group of processes.

    Parameters
    ----------
    jobs
        Jobs by name.
    launcher
        As for `train`.

    Returns
    -------
    dict
        Results by name, in the order of ``jobs``.

    Raises
    ------
    InfeasiblePlanError, WorkerError
        As for `train`.
    """
    results: dict[str, RunResult] = {}
    for count in sorted({job.plan.n_gpus for job in jobs.values()}):
        group = {name: job for name, job in jobs.items() if job.plan.n_gpus == count}
        results |= zip(group, train_all(list(group.values()), launcher=launcher), strict=True)
    return {name: results[name] for name in jobs}


def train_switching(
    job: TrainingJob,
    switches: Sequence[tuple[int, ExecutionPlan]],
    *,
    launcher: Launcher | None = None,
    checkpoint_dir: str | Path | None = None,
) -> tuple[RunResult, ...]:
    """Train a job that changes its plan on the way, each time through checkpoint and restart.

    Parameters
    ----------
    job
        The job under its first plan.
    switches
        Steps after which the plan changes, in growing order, and the plan from then on.
    launcher
        As for `train`.
    checkpoint_dir
        Directory of checkpoints; None for a temporary one.

    Returns
    -------
    tuple of RunResult
        One for each plan in turn.

    Raises
    ------
    InputError
        The steps of the switches do not grow from 1 to less than those of the job.
    InfeasiblePlanError, CheckpointError, ChecksumError, WorkerError
        As for `train`.
    """
    bounds = [0, *(step for step, _ in switches), job.steps]
    if sorted(set(bounds)) != bounds:
        found = f"plans change after steps {bounds[1:-1]}"
        raise InputError(f"{found}; accepted: growing numbers from 1 to {job.steps - 1}")
    if checkpoint_dir is None:
        with tempfile.TemporaryDirectory(prefix="makespan-checkpoints-") as name:
            return train_switching(job, switches, launcher=launcher, checkpoint_dir=name)
    results: list[RunResult] = []
    plans = [job.plan, *(plan for _, plan in switches)]
    for plan, end in zip(plans, bounds[1:], strict=True):
        part = replace(job, plan=plan, steps=end)
        source = checkpoint_dir if results else None
        results.append(train(part, launcher=launcher, checkpoint_dir=checkpoint_dir, resume=source))
    return tuple(results)


def train_compared(
    job: TrainingJob,
    plans: Mapping[str, ExecutionPlan],
    switches: Sequence[tuple[int, str]],
    other_seed: int,
    names: tuple[str, str],
    *,
    launcher: Launcher,
) -> dict[str, tuple[RunResult, ...]]:
    """Train a job under several plans, under changing plans, and with another seed.

    Plans for which there are too few devices are left out, with their switches; the log names them.

    Parameters
    ----------
    job
        The job under the plan with which the changing run starts.
    plans
        Plans by name.
    switches
        Steps after which the changing run takes up another plan, and its name.
    other_seed
        Seed of the initial weights of the last run.
    names
        Names of the changing run and of the one with another seed.
    launcher
        Where to train.

    Returns
    -------
    dict
        Parts of each run by its name: the plans in order, then the other two.

    Raises
    ------
    InfeasiblePlanError
        There are too few devices for the plan of ``job``.
    WorkerError
        As for `train`.
    """
    available = launcher.n_devices
    fitting = {name: plan for name, plan in plans.items() if available is None or plan.n_gpus <= available}
    for name in [name for name in plans if name not in fitting]:
        _log.warning("plan %s left out: %d devices needed, %s at hand", name, plans[name].n_gpus, available)
    jobs = {name: replace(job, plan=plan) for name, plan in fitting.items()}
    results = train_grouped(jobs | {names[1]: replace(job, seed=other_seed)}, launcher=launcher)
    runs = {name: (result,) for name, result in results.items()}
    changes = [(step, fitting[name]) for step, name in switches if name in fitting]
    return runs | {names[0]: train_switching(job, changes, launcher=launcher)}


def cost_table(runs: Mapping[str, Sequence[RunResult]]) -> "pd.DataFrame":
    """Return what each run cost.

    Parameters
    ----------
    runs
        The parts of each run in order, by the name of the run.

    Returns
    -------
    pandas.DataFrame
        ``run, restarts, restart_s, step_s``: parts that continue from a checkpoint, their mean cost
        [s], median step [s].
    """
    import pandas as pd

    records = []
    for name, parts in runs.items():
        restarts = [part.restart_cost.total_s for part in parts if part.restart_cost is not None]
        steps = [time.step_s for part in parts for time in part.times]
        records.append(
            {
                "run": name,
                "restarts": len(restarts),
                "restart_s": fmean(restarts) if restarts else math.nan,
                "step_s": median(steps),
            }
        )
    return pd.DataFrame(records)
