"""The validator: replays an events table on its own and reports what could not have happened.

It shares no code with the engine, and computes from the rows, the trace, the nodes and the times of a step
alone who held what, when and how far that carried each job. The rules are:

- ``order``: time and ``seq`` never go back.
- ``row``: a row names a job, a kind and a configuration that exist and agree with each other; a guest goes as
  fast as its holders leave it room.
- ``life``: a job is submitted once, when the trace says, starts only while it waits, changes only while it
  runs, and finishes once.
- ``capacity``: at the end of every instant no node gives more devices, CPU threads or memory than it has, and
  no device to more than one guest, nor to one that does not fit beside its holder.
- ``failure``: nodes fail and join in turn, and no more devices are withdrawn than there are; whoever holds
  what goes away loses it at once, and nobody is interrupted without reason.
- ``restart``: after every start and change a job makes no progress for as long as the restart costs, and its
  ``ready`` row stands at the end of it; nobody restarts to hold what it held.
- ``progress``: the steps left follow from the time with progress and the time of a step, and end at zero.
- ``round``: decisions fall on rounds.
- ``guarantee``: guarantees are kept, where they are promised.
- ``outcomes``: the second table agrees with the first.
"""

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from makespan.hardware import ClusterSpec
from makespan.sim._accounts import JobAccount
from makespan.sim._catalogue import Catalogue
from makespan.sim._costs import RestartCost, restart_cost
from makespan.sim._node_accounts import NodeAccounts, Row, Rules, Violation
from makespan.tables import EVENTS, OUTCOMES
from makespan.workloads import JobSpec

__all__ = ["validate_schedule"]

_RELATIVE = 1e-6  # of rounding, in the comparison of the two tables


def validate_schedule(
    events: pd.DataFrame,
    jobs: Sequence[JobSpec],
    cluster: ClusterSpec,
    catalogue: Catalogue,
    restart_delay_s: float | RestartCost,
    *,
    interval_s: float | None = None,
    checkpoint_interval_s: float | None = None,
    extra_steps: float = 1,
    keeps_guarantees: bool = False,
    is_live: bool = False,
    outcomes: pd.DataFrame | None = None,
) -> list[Violation]:
    """Check a schedule by the rules of `makespan.sim._validator`; an empty list means that it is possible.

    Parameters
    ----------
    events, outcomes
        Tables of the schemas `makespan.tables.EVENTS` and, which must agree, `makespan.tables.OUTCOMES`.
    jobs, cluster, catalogue, restart_delay_s, checkpoint_interval_s, extra_steps
        What the simulation was given.
    interval_s
        Length of a round [s] if decisions must fall on multiples of it, else None or 0.
    keeps_guarantees
        Whether a guaranteed job must not be suspended, nor run slower than requested.
    is_live
        Whether the schedule is of real processes, of which one may do its last step while it is stopped.

    Raises
    ------
    TraceError
        The table does not follow its schema.
    """
    rules = Rules(
        catalogue.on(cluster),
        restart_cost(restart_delay_s),
        interval_s or None,
        checkpoint_interval_s,
        extra_steps,
        keeps_guarantees,
        is_live,
    )
    checked = EVENTS.validate(events, where="events")
    nodes = NodeAccounts(cluster, rules)
    ordered = sorted(jobs, key=lambda job: job.submit_time_s)
    accounts = {job.job_id: JobAccount(rank, job, rules, nodes) for rank, job in enumerate(ordered)}
    _replay(checked, accounts, nodes, rules)
    for account in accounts.values():
        account.close()
    if outcomes is not None:
        _check_outcomes(outcomes, accounts, rules)
    return rules.found


def _replay(
    events: pd.DataFrame, accounts: Mapping[str, JobAccount], nodes: NodeAccounts, rules: Rules
) -> None:
    columns = (events[name].tolist() for name in EVENTS.names)
    last: Row | None = None
    for values in zip(*columns, strict=True):
        row = Row(*values)
        if last is not None and (row.time_s < last.time_s or row.seq <= last.seq):
            rules.report("order", row, f"follows row {last.seq} at {last.time_s} s; accepted: later rows")
        if last is not None and row.time_s != last.time_s:
            _close_instant(last, accounts, nodes)
        last = row
        if row.kind.startswith(("node_", "capacity_")):
            nodes.change(row)
        elif row.job_id in accounts:
            accounts[row.job_id].follow(row)
        else:
            rules.report("row", row, f"job {row.job_id!r} is not in the trace")
    if last is not None:
        _close_instant(last, accounts, nodes)


def _close_instant(last: Row, accounts: Mapping[str, JobAccount], nodes: NodeAccounts) -> None:
    """Check what holds once everything of an instant has happened."""
    for name, pace in nodes.paces().items():
        accounts[name].check_pace(last, pace)
    nodes.check(last)


def _check_outcomes(outcomes: pd.DataFrame, accounts: Mapping[str, JobAccount], rules: Rules) -> None:
    """Report every cell that differs from the replay, and every job that is missing or too many."""
    checked = OUTCOMES.validate(outcomes, where="outcomes")
    names = checked["job_id"].tolist()
    for job_id in sorted(set(accounts) - set(names)):
        rules.report_job("outcomes", job_id, "has no row; accepted: one row for each job")
    seen: set[str] = set()
    for row in checked.to_dict("records"):
        job_id = str(row["job_id"])
        if job_id not in accounts or job_id in seen:
            rules.report_job("outcomes", job_id, "is not in the trace or occurs twice")
            continue
        seen.add(job_id)
        for name, expected in _expected_outcome(accounts[job_id]).items():
            if not math.isclose(float(row[name]), expected, rel_tol=_RELATIVE, abs_tol=_RELATIVE):
                rules.report_job("outcomes", job_id, f"{name} is {row[name]!r}; accepted: {expected!r}")


def _expected_outcome(account: JobAccount) -> dict[str, float]:
    return {
        "submit_time_s": account.job.submit_time_s,
        "n_gpus": float(account.job.n_gpus),
        "steps": float(account.job.steps),
        "is_guaranteed": float(account.job.is_guaranteed),
        "first_start_s": account.first_start_s,
        "finish_time_s": account.finish_s,
        "n_restarts": float(account.starts - 1),
        "attained_service_gpu_s": account.held_gpu_s,
        "waiting_time_s": account.waiting_s,
        "running_time_s": account.running_s,
        "restart_time_s": account.restart_s,
    }
