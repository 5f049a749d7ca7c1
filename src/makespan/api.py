"""Top-level API: functions that take names or paths and return tables."""

import logging
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from makespan.emulator import emulate as emulate_points, load_calibration, trace_points
from makespan.errors import InputError, MakespanError
from makespan.hardware import cluster
from makespan.perf import TableFit, fit_table, load_environment, rank_plans as rank_fitted
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
    done = run(scenario, policy)
    done.check()
    return done


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
        No policy is given or one is unknown.
    """
    chosen = [load_policy(policy) for policy in policies]
    if not chosen:
        raise InputError("no policies to compare; expected at least one")
    names = [policy.name for policy in chosen]
    if baseline is not None and baseline not in names:
        raise InputError(f"baseline {baseline!r} is not among the policies; expected {', '.join(names)}")
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


def fit(
    table: pd.DataFrame,
    cluster_name: str = "a800-64",
    *,
    form: str = "extended",
    parameters: float | None = None,
) -> TableFit:
    """Fit a performance model to a few rows of a throughput table, sampled by a fixed design.

    Parameters
    ----------
    table
        Schema `makespan.tables.THROUGHPUT`, of one workload.
    cluster_name, form
        Cluster whose constants enter the model, and form of the model, a key of `makespan.perf.FORMS`.
    parameters
        Number of parameters of a model that the zoo lacks (default: the size that fits best, which is
        logged). A decoder of usual proportions stands in for such a model.

    Returns
    -------
    TableFit
        ``fit``, and predictions of all rows with their errors.

    Raises
    ------
    MakespanError
        The table has several workloads or global batches or no row that can be sampled, or a name is
        unknown.
    """
    keys = sorted(set(table["workload"]))
    if len(keys) != 1:
        raise InputError(f"table of workloads {', '.join(keys) or 'none'}; expected exactly one")
    batches = sorted(set(table["global_batch_size"]))
    if len(batches) != 1:
        shown = ", ".join(map(str, batches))
        raise InputError(
            f"table of workload {keys[0]!r} has global batches of {shown} samples; expected exactly one"
        )
    return fit_table(table, keys[0], form, load_environment(cluster_name), parameters=parameters)


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
