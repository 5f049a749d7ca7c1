"""Whether guarantees were kept, strictly."""

import pandas as pd

from makespan.sim import EventKind
from makespan.tables import EVENTS, OUTCOMES

__all__ = ["guarantee_breaches", "sla_attainment"]

_TOLERANCE = 1e-9  # of rounding, relative


def guarantee_breaches(events: pd.DataFrame, outcomes: pd.DataFrame) -> pd.DataFrame:
    """Return the events at which a guaranteed job was wronged.

    A guaranteed job is wronged if, once started, it loses its devices by decision, or is given a
    configuration whose step takes longer than the requested one. Devices lost to the failure of
    a node are nobody's decision and do not count, nor does the restart delay of a change to
    something as fast or faster.

    Parameters
    ----------
    events
        Table of schema `makespan.tables.EVENTS`.
    outcomes
        Table of schema `makespan.tables.OUTCOMES`, for guarantees and reference times.

    Returns
    -------
    pandas.DataFrame
        Rows of the events with the further column ``reference_iter_time_s``.

    Raises
    ------
    TraceError
        A table does not follow its schema.
    """
    table = EVENTS.validate(events, where="events")
    jobs = OUTCOMES.validate(outcomes, where="outcomes")
    references = jobs.loc[jobs["is_guaranteed"], ["job_id", "reference_iter_time_s"]]
    rows = table.merge(references, on="job_id", how="inner").sort_values("seq", ignore_index=True)
    limit_s = rows["reference_iter_time_s"] * (1 + _TOLERANCE)
    given = rows["kind"].isin([EventKind.STARTED.value, EventKind.RECONFIGURED.value])
    slower = given & (rows["iter_time_s"] > limit_s)
    return rows[slower | (rows["kind"] == EventKind.SUSPENDED.value)].reset_index(drop=True)


def sla_attainment(events: pd.DataFrame, outcomes: pd.DataFrame) -> float:
    """Return the share of guaranteed jobs that were never wronged; NaN if there are none.

    Raises
    ------
    TraceError
        A table does not follow its schema.
    """
    wronged = set(guarantee_breaches(events, outcomes)["job_id"])
    guaranteed = outcomes.loc[outcomes["is_guaranteed"].astype(bool), "job_id"]
    if guaranteed.empty:
        return float("nan")
    return 1.0 - len(wronged) / len(guaranteed)
