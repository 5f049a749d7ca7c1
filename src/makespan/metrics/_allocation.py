"""Devices held by jobs over time."""

import numpy as np
import pandas as pd

from makespan.errors import TraceError
from makespan.hardware import ClusterSpec
from makespan.metrics._steps import level, time_average
from makespan.sim import EventKind
from makespan.tables import EVENTS

__all__ = ["allocation_by_family", "allocation_over_time", "gpu_allocation_ratio"]


def allocation_over_time(events: pd.DataFrame, cluster: ClusterSpec) -> pd.DataFrame:
    """Return the devices held and present after each instant at which something happened.

    Parameters
    ----------
    events
        Table of schema `makespan.tables.EVENTS`.
    cluster
        The nodes of the simulation.

    Returns
    -------
    pandas.DataFrame
        ``time_s``, ``gpus_held``, ``gpus_present`` and ``gpu_allocation_ratio``, the first over the
        second (0 where no device is present); each row holds until the next.

    Raises
    ------
    TraceError
        The table does not follow its schema, or a node event names no node of the cluster.
    """
    table = EVENTS.validate(events, where="events")
    of_jobs = table[table["job_id"] != ""]
    change = of_jobs["n_gpus"] - of_jobs.groupby("job_id")["n_gpus"].shift(fill_value=0)
    held = level(of_jobs["time_s"], change)
    start, failures = _presence(table, cluster)
    moves = level(failures["time_s"], failures["gpus"]) + start
    times = pd.Index(np.unique(table["time_s"].to_numpy(dtype=float)), name="time_s")
    result = pd.DataFrame(
        {
            "gpus_held": held.reindex(times, method="ffill").fillna(0).astype("int64"),
            "gpus_present": moves.reindex(times, method="ffill").fillna(start).astype("int64"),
        },
        index=times,
    )
    present = result["gpus_present"].where(result["gpus_present"] > 0)
    result["gpu_allocation_ratio"] = (result["gpus_held"] / present).fillna(0.0)
    return result.reset_index()


def allocation_by_family(events: pd.DataFrame) -> pd.DataFrame:
    """Return the devices held after each instant by family of the execution plan, for stacking.

    Returns
    -------
    pandas.DataFrame
        ``time_s`` and one column a family, sorted by name, with the devices that its plans hold; each
        row holds until the next.

    Raises
    ------
    TraceError
        The table does not follow its schema.
    """
    table = EVENTS.validate(events, where="events")
    of_jobs = table[table["job_id"] != ""]
    before = of_jobs.groupby("job_id")[["n_gpus", "family"]].shift()
    gained = of_jobs[["time_s", "family", "n_gpus"]]
    lost = pd.DataFrame(
        {"time_s": of_jobs["time_s"], "family": before["family"], "n_gpus": -before["n_gpus"].fillna(0)}
    )
    changes = pd.concat([gained, lost], ignore_index=True)
    changes = changes[changes["n_gpus"] != 0]
    times = pd.Index(np.unique(table["time_s"].to_numpy(dtype=float)), name="time_s")
    columns = {
        str(family): level(group["time_s"], group["n_gpus"]).reindex(times, method="ffill").fillna(0)
        for family, group in changes.groupby("family")
    }
    return pd.DataFrame(columns, index=times).astype("int64").reset_index()


def gpu_allocation_ratio(events: pd.DataFrame, cluster: ClusterSpec) -> float:
    """Return the device time held over that present, from the first submission to the last finish.

    NaN if nothing happened or no device was there.

    Raises
    ------
    TraceError
        As `allocation_over_time`.
    """
    series = allocation_over_time(events, cluster)
    kinds = events["kind"].astype(str)
    submitted_s = events.loc[kinds == EventKind.SUBMITTED.value, "time_s"]
    finished_s = events.loc[kinds == EventKind.FINISHED.value, "time_s"]
    if submitted_s.empty or finished_s.empty:
        return float("nan")
    span = (float(submitted_s.min()), float(finished_s.max()))
    present = time_average(series["time_s"], series["gpus_present"], *span)
    held = time_average(series["time_s"], series["gpus_held"], *span)
    return held / present if present > 0 else float("nan")


def _presence(table: pd.DataFrame, cluster: ClusterSpec) -> tuple[int, pd.DataFrame]:
    """Return the devices present before the first node event, and how each event changes them."""
    failed, joined = EventKind.NODE_FAILED.value, EventKind.NODE_JOINED.value
    withdrawn, returned = EventKind.CAPACITY_WITHDRAWN.value, EventKind.CAPACITY_RETURNED.value
    rows = table[table["kind"].isin([failed, joined, withdrawn, returned])]
    nodes = pd.to_numeric(rows["nodes"], errors="coerce")
    if nodes.isna().any() or (nodes < 0).any() or (nodes >= cluster.n_nodes).any():
        raise TraceError(
            f"events: node events name nodes {rows['nodes'].tolist()!r}; accepted: 0 to {cluster.n_nodes - 1}"
        )
    whole = nodes[rows["kind"].isin([failed, joined])]
    absent = whole[~whole.duplicated() & (rows["kind"] == joined)].astype(int).tolist()
    start = cluster.n_gpus - sum(cluster.nodes[node].n_gpus for node in absent)
    there = [node.n_gpus for node in cluster.nodes]  # of each node, while it is up
    up = [number not in absent for number in range(cluster.n_nodes)]
    gpus = []
    for kind, node, count in zip(rows["kind"], nodes.astype(int), rows["n_gpus"], strict=True):
        if kind in (failed, joined):
            up[node] = kind == joined
            gpus.append(there[node] if up[node] else -there[node])
        else:
            change = -int(count) if kind == withdrawn else int(count)
            there[node] += change
            gpus.append(change if up[node] else 0)
    return start, pd.DataFrame({"time_s": rows["time_s"].to_numpy(), "gpus": gpus}, dtype=float)
