"""The validator: replays an events table on its own and reports what could not have happened.

It shares no code with the engine. It knows the trace, the nodes and the times of a step, follows
every row of the table, and computes from the rows alone who held what, when and how far that
carried each job. The rules are:

``order``
    Time and ``seq`` never go back.
``row``
    A row names a job, a kind and a configuration that exist and agree with each other.
``life``
    A job is submitted once, when the trace says, starts only while it waits, changes only while it
    runs, and finishes once.
``capacity``
    At the end of every instant no node gives more devices, CPU threads or host memory than it has.
``failure``
    Nodes fail and join in turn; whoever holds a node that fails loses it at once, and nobody is
    interrupted without reason.
``restart``
    After every start and change a job makes no progress for the restart delay, and its ``ready`` row
    stands at the end of it.
``progress``
    The steps left follow from the time with progress and the time of a step, and are zero at the end.
``round``
    Decisions fall on rounds.
``guarantee``
    Guarantees are kept, where they are promised.
``outcomes``
    The second table agrees with the first.
"""

from collections.abc import Sequence

import pandas as pd

from makespan.hardware import ClusterSpec
from makespan.sim._books import JobBook, NodeBook, Row, Rules, Violation
from makespan.sim._catalogue import Catalogue
from makespan.sim._outcome_check import check_outcomes
from makespan.tables import EVENTS
from makespan.workloads import JobSpec

__all__ = ["validate_schedule"]


def validate_schedule(
    events: pd.DataFrame,
    jobs: Sequence[JobSpec],
    cluster: ClusterSpec,
    catalogue: Catalogue,
    restart_delay_s: float,
    *,
    interval_s: float | None = None,
    checkpoint_interval_s: float | None = None,
    extra_steps: int = 1,
    keeps_guarantees: bool = False,
    outcomes: pd.DataFrame | None = None,
) -> list[Violation]:
    """Check a schedule; an empty list means that it is possible.

    Parameters
    ----------
    events
        Table of schema `makespan.sim.EVENTS`.
    jobs, cluster, catalogue, restart_delay_s, checkpoint_interval_s, extra_steps
        What the simulation was given.
    interval_s
        Length of a round [s] if decisions must fall on multiples of it, else None or 0.
    keeps_guarantees
        Whether a guaranteed job must not be suspended, nor run slower than requested.
    outcomes
        Table of schema `makespan.sim.OUTCOMES`; if given, it must say what the events say.

    Returns
    -------
    list of Violation
        In the order of the table, rules as described in `makespan.sim._validator`.

    Raises
    ------
    TraceError
        The table does not follow its schema.
    """
    rules = Rules(
        catalogue.on(cluster),
        restart_delay_s,
        interval_s or None,
        checkpoint_interval_s,
        extra_steps,
        keeps_guarantees,
    )
    checked = EVENTS.validate(events, where="events")
    nodes = NodeBook(cluster, rules)
    books = {job.job_id: JobBook(job, rules, nodes) for job in jobs}
    _replay(checked, books, nodes, rules)
    for book in books.values():
        book.close()
    if outcomes is not None:
        check_outcomes(outcomes, books, rules)
    return rules.found


def _replay(events: pd.DataFrame, books: dict[str, JobBook], nodes: NodeBook, rules: Rules) -> None:
    columns = [events[name].tolist() for name in EVENTS.names]
    last: Row | None = None
    for values in zip(*columns, strict=True):
        row = Row(*values)
        if last is not None and (row.time_s < last.time_s or row.seq <= last.seq):
            rules.report("order", row, f"follows row {last.seq} at {last.time_s} s; accepted: later rows")
        if last is not None and row.time_s != last.time_s:
            nodes.check(last)
        last = row
        if row.kind in ("node_failed", "node_joined"):
            nodes.change(row)
        elif row.job_id in books:
            books[row.job_id].follow(row)
        else:
            rules.report("row", row, f"job {row.job_id!r} is not in the trace")
    if last is not None:
        nodes.check(last)
