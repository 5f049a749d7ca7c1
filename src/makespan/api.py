"""Top-level API: functions that take names or paths and return tables."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from makespan.arguments import typed
from makespan.emulator import emulate as emulate_points, load_calibration, trace_points
from makespan.errors import InputError, MakespanError, shown, unknown_name
from makespan.hardware import cluster
from makespan.perf import (
    TableFit,
    fit_table,
    intervals as fitted_intervals,
    load_environment,
    next_runs as choose_next_runs,
    points_from_plans,
    points_from_table,
    rank_plans as rank_fitted,
    sequential_design,
    warnings_of,
)
from makespan.plans import Placement, write_exec_plan
from makespan.sim import Policy
from makespan.studies import (
    Run,
    RunError,
    Scenario,
    SimulationSpec,
    attempt_all,
    comparison,
    demand,
    load_policy,
    nobody_waited,
    run,
)
from makespan.tables import THROUGHPUT
from makespan.workloads import workload as load_workload

_LOG = logging.getLogger(__name__)


def simulate(scenario: Scenario, policy: str | Path | Policy = "morphling-work") -> Run:
    """Simulate a scenario under a policy, given itself, by name or by file, and validate the schedule.

    Returns
    -------
    Run
        ``metrics``, and ``result`` with the tables ``events`` and ``outcomes``.

    Raises
    ------
    ImpossibleScheduleError
        The schedule breaks a rule of the validator.
    MakespanError
        The policy is unknown or broken, or the simulation cannot be done.
    """
    _check_scenario(scenario)
    done = run(scenario, policy)
    done.check()
    return done


def _check_scenario(scenario: object) -> None:
    if not isinstance(scenario, Scenario):
        raise InputError(
            f"scenario is {shown(scenario)}; expected a Scenario, such as makespan.scenario('base') returns"
        )


def compare(
    scenario: Scenario,
    policies: Iterable[str | Path | Policy],
    *,
    baseline: str | None = None,
    n_processes: int | None = None,
) -> pd.DataFrame:
    """Simulate a scenario under several policies and validate every schedule.

    Parameters
    ----------
    policies, baseline
        Policies, or names or files of them, and the name of the baseline of ratios (default: the first).
    n_processes
        Number of simulations at a time (default: by processors and jobs).

    Returns
    -------
    pandas.DataFrame
        One row per policy, see `makespan.studies.comparison`, and the column ``offered_load``, see
        `makespan.studies.Demand`.

    Raises
    ------
    ComparisonError
        A simulation failed; ``table`` has the rows of the others.
    ImpossibleScheduleError
        A schedule breaks a rule of the validator.
    MakespanError
        No policy is given, one is unknown, or two have the same name.
    """
    _check_scenario(scenario)
    if isinstance(policies, str | Path | bytes) or not isinstance(policies, Iterable):
        raise InputError(f"policies is {shown(policies)}; expected a list of them, such as ['fifo', 'sia']")
    chosen = [load_policy(policy) for policy in policies]
    if not chosen:
        raise InputError("no policies to compare; expected at least one")
    names = [policy.name for policy in chosen]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InputError(
            f"two of the policies are named {repeated!r}; expected different names, as given by "
            f"dataclasses.replace(policy, name='{repeated}-2')"
        )
    asked: object = baseline
    if asked is not None and not (isinstance(asked, str) and asked in names):
        raise InputError(f"baseline {shown(baseline)} is not among the policies; expected {', '.join(names)}")
    done = attempt_all([SimulationSpec(scenario, policy) for policy in chosen], n_processes)
    runs = [item for item in done if not isinstance(item, RunError)]
    requested = demand(scenario)
    table = comparison(runs, baseline or names[0]).assign(offered_load=requested.load)
    failures = [item for item in done if isinstance(item, RunError)]
    if failures:
        raise ComparisonError("; ".join(map(str, failures)), table)
    for item in runs:
        item.check()
    if nobody_waited(runs):
        _LOG.warning(
            "no job waited for longer than a round, so this comparison says nothing about queueing; jobs "
            "request at most %d of %d GPUs at a time",
            requested.most_gpus,
            scenario.cluster.n_gpus,
        )
    return table


class ComparisonError(MakespanError):
    """Some of several policies failed; ``table`` has the rows of the others, as `compare` returns them."""

    def __init__(self, message: str, table: pd.DataFrame) -> None:
        super().__init__(message)
        self.table = table


@typed
def emulate(
    workload: str,
    cluster_name: str = "a800-64",
    *,
    calibration: str = "L1",
    seed: int = 0,
    noise: float = 0.0,
) -> pd.DataFrame:
    """Emulate the iteration time of a workload under every plan on a grid of placements.

    Parameters
    ----------
    workload, cluster_name
        Names, for example ``"llama7"`` and ``"a800-64"``.
    calibration
        Shipped constants (``L0``, ``L1``), or a file written by ``makespan calibrate``.
    seed, noise
        Seed and scale of measurement noise; scale 0 gives the exact value of the model.

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.THROUGHPUT`. Its numbers are emulated, not measured.
    """
    spec, where = load_workload(workload), cluster(cluster_name)
    constants = load_calibration(calibration)
    return emulate_points(spec, trace_points(spec, where), where, constants, seed=seed, noise=noise)


@typed
def fit(
    table: pd.DataFrame,
    cluster_name: str = "a800-64",
    *,
    form: str = "extended",
    parameters: float | None = None,
    design: Literal["fixed", "sequential"] = "fixed",
    runs: int | None = None,
    seed: int = 0,
) -> TableFit:
    """Fit a performance model to a few rows of a throughput table, and log what the fit leaves open.

    Parameters
    ----------
    table
        Schema `makespan.tables.THROUGHPUT`, of one workload.
    cluster_name, form
        Cluster whose constants enter the model, and form of the model, a key of `makespan.perf.FORMS`.
    parameters
        Number of parameters of a model that the zoo lacks (default: the size that fits best, which is
        logged). A decoder of usual proportions stands in for such a model.
    design
        How rows are sampled: ``fixed``, a rule that reads plans and placements; ``sequential``, the first at
        random and each further one where it narrows the predictions most, given the times of those before.
    runs, seed
        Rows of the sequential design (default: as many as the fixed one), and seed of its first row.

    Returns
    -------
    TableFit
        ``fit``, and predictions of all rows with their errors.

    Raises
    ------
    MakespanError
        The table has several workloads or global batches or no row that can be sampled, a name is
        unknown, or ``runs`` is given for the fixed design or exceeds the rows of the table.
    """
    columns: Sequence[object] = list(getattr(table, "columns", ()))
    needed = [name for name in THROUGHPUT.names if name not in ("flag", "provenance")]
    if missing := [name for name in needed if name not in columns]:
        raise InputError(
            f"table lacks column(s) {', '.join(missing)}; expected a table of iteration times, such as "
            "makespan.emulate returns"
        )
    absent = {name: "" for name in THROUGHPUT.names if name not in columns}
    table = THROUGHPUT.validate(table.assign(**absent), "table")
    keys = sorted(set(table["workload"]))
    if len(keys) != 1:
        raise InputError(f"table of workloads {', '.join(keys) or 'none'}; expected exactly one")
    batches = sorted(set(table["global_batch_size"]))
    if len(batches) != 1:
        shown = ", ".join(map(str, batches))
        raise InputError(
            f"table of workload {keys[0]!r} has global batches of {shown} samples; expected exactly one"
        )
    if design not in ("fixed", "sequential"):
        raise unknown_name("design", design, ("fixed", "sequential"))
    if design == "fixed" and runs is not None:
        raise InputError(f"runs is {runs}, but the fixed design has its own number; use design='sequential'")
    environment, sampled = load_environment(cluster_name), None
    if design == "sequential":
        rows = sequential_design(
            table, keys[0], form, environment, n_runs=runs, seed=seed, parameters=parameters
        )
        sampled = np.isin(np.arange(len(table)), rows) & table["clean"].to_numpy(dtype=bool)
    result = fit_table(table, keys[0], form, environment, sampled=sampled, parameters=parameters)
    for warning in warnings_of(result):
        _LOG.warning("%s: %s", keys[0], warning)
    return result


@typed
def intervals(fitted: TableFit, level: float = 0.9) -> pd.DataFrame:
    """Return the predictions of all rows of a fitted table with intervals.

    Parameters
    ----------
    fitted
        Result of `fit`.
    level
        Share of the times that the intervals should hold, between 0 and 1.

    Returns
    -------
    pandas.DataFrame
        One row per feasible row of the table: ``exec_plan``, ``placement``, ``cpu_threads``, ``predicted_s``,
        ``low_s``, ``high_s`` [s], and ``is_outside``, which says that nothing similar ran.
    """
    points = points_from_table(fitted.frame, fitted.fit.points.workload, fitted.fit.environment)
    named = fitted.frame[["exec_plan", "placement", "cpu_threads"]]
    return named.join(fitted_intervals(fitted.fit, points, level))


@typed
def next_runs(
    fitted: TableFit, placements: Sequence[str | int], cluster_name: str = "a800-64", n_runs: int = 1
) -> pd.DataFrame:
    """Choose the plans and placements to measure next, so that predictions narrow most.

    Parameters
    ----------
    fitted
        Result of `fit`.
    placements
        Placements that matter: GPUs on each node, for example ``["8", "44"]``. Every plan of the workload
        that fits into memory there counts, and may be chosen.
    cluster_name
        Cluster (sets the memory limit).
    n_runs
        Runs to choose.

    Returns
    -------
    pandas.DataFrame
        The most valuable first: ``exec_plan``, ``placement``, and ``predicted_s``, ``low_s`` and ``high_s``
        [s] before the run.

    Raises
    ------
    InputError
        Fewer plans fit than runs are wanted.
    """
    model, where = fitted.fit, cluster(cluster_name)
    places = [Placement.parse(str(text)) for text in placements]
    pairs = [(ranked.plan, place) for place in places for ranked in rank_fitted(model, place, where)]
    points = points_from_plans(pairs, model.points.workload, model.environment)
    named = pd.DataFrame(
        {
            "exec_plan": [write_exec_plan(plan) for plan, _ in pairs],
            "placement": [place.text for _, place in pairs],
        }
    )
    chosen = choose_next_runs(model, points, n_runs)
    limits = fitted_intervals(model, points)[["predicted_s", "low_s", "high_s"]]
    return named.join(limits).iloc[chosen].reset_index(drop=True)


@typed
def rank_plans(
    fitted: TableFit, placement: str | int, cluster_name: str = "a800-64", *, cpu_threads: int | None = None
) -> pd.DataFrame:
    """Rank the feasible plans of a workload on a placement by predicted iteration time.

    Parameters
    ----------
    fitted
        Result of `fit`.
    placement
        GPUs on each node, for example ``"44"``.
    cluster_name, cpu_threads
        Cluster (sets the memory limit), and CPU threads per GPU (default: an even share of the node's
        threads).

    Returns
    -------
    pandas.DataFrame
        Fastest first: ``exec_plan``, ``placement``, ``iter_time_s`` and ``throughput_samples_per_s``.
    """
    place = Placement.parse(str(placement))
    ranked = rank_fitted(fitted.fit, place, cluster(cluster_name), cpu_threads)
    rows = [
        (write_exec_plan(item.plan), place.text, item.iter_time_s, item.throughput_samples_per_s)
        for item in ranked
    ]
    return pd.DataFrame(rows, columns=["exec_plan", "placement", "iter_time_s", "throughput_samples_per_s"])
