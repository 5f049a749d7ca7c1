"""Devices over time: held by jobs, and free ones that no waiting job can use."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from makespan.errors import TraceError
from makespan.hardware import ClusterSpec
from makespan.metrics._steps import level, time_average
from makespan.sim import Catalogue, EventKind
from makespan.tables import EVENTS
from makespan.workloads import JobSpec

__all__ = [
    "NodeState",
    "allocation_by_family",
    "allocation_over_time",
    "fragmentation_over_time",
    "fragmentation_ratio",
    "fits",
    "gpu_allocation_ratio",
]

Shapes = tuple[tuple[int, ...], ...]


def allocation_over_time(events: pd.DataFrame, cluster: ClusterSpec) -> pd.DataFrame:
    """Return the devices held and present after each instant at which something happened.

    Takes a table of schema `makespan.tables.EVENTS`. Returns ``time_s``, ``gpus_held``, ``gpus_present`` and
    ``gpu_allocation_ratio``, held over present (0 where no device is); each row holds until the next.

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
    """Return the devices held after each instant, one column a family of the execution plan, by name."""
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

    NaN if nothing happened or no device was there. The table is as for `allocation_over_time`.
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


def fragmentation_over_time(
    events: pd.DataFrame, jobs: Iterable[JobSpec], cluster: ClusterSpec, catalogue: Catalogue
) -> pd.DataFrame:
    """Return the free devices that no waiting job can use, after each instant.

    Free devices count while jobs wait and none of them could start as requested on any placement for
    which its plan is known; while nobody waits, or somebody could start, none count.

    Takes a table of schema `makespan.tables.EVENTS`. Returns ``time_s``, ``gpus_free``, ``gpus_fragmented``
    and ``fragmentation_ratio``, the fragmented over all devices present; each row holds until the next.

    Raises
    ------
    TraceError
        The table does not follow its schema.
    """
    table = EVENTS.validate(events, where="events")
    fitting = catalogue.on(cluster)
    shapes = {job.job_id: tuple(c.counts for c in fitting.as_requested(job)) for job in jobs}
    state = NodeState(table, cluster, shapes)
    rows = []
    for time_s, instant in table.groupby("time_s", sort=True):
        columns = (instant[name] for name in ("kind", "job_id", "nodes", "n_gpus"))
        for kind, job_id, nodes, n_gpus in zip(*columns, strict=True):
            state.apply(kind, job_id, nodes, n_gpus)
        rows.append((time_s, *state.free_and_fragmented()))
    frame = pd.DataFrame(rows, columns=["time_s", "gpus_free", "gpus_fragmented", "gpus_present"])
    present = frame.pop("gpus_present")
    ratio = (frame["gpus_fragmented"] / present.where(present > 0)).astype(float)
    return frame.assign(fragmentation_ratio=ratio.fillna(0.0))


def fragmentation_ratio(series: pd.DataFrame) -> float:
    """Return the time average of a table of `fragmentation_over_time`; NaN if it spans no time."""
    if len(series) < 2:
        return float("nan")
    times = series["time_s"].to_numpy(dtype=float)
    return time_average(times, series["fragmentation_ratio"], float(times[0]), float(times[-1]))


class NodeState:
    """Free devices and waiting jobs while the events are read."""

    def __init__(self, table: pd.DataFrame, cluster: ClusterSpec, shapes: Mapping[str, Shapes]) -> None:
        self._sizes = [node.n_gpus for node in cluster.nodes]
        self._shapes = shapes
        self._free = self._sizes.copy()
        self._up = [True] * len(self._sizes)
        self._held: dict[str, dict[int, int]] = {}
        self._waiting: dict[Shapes, int] = {}
        joined, failed = EventKind.NODE_JOINED.value, EventKind.NODE_FAILED.value
        of_nodes = table[table["kind"].isin([joined, failed])]
        for node, kind in of_nodes.groupby("nodes")["kind"].first().items():
            self._up[int(str(node))] = kind == failed

    def apply(self, kind: str, job_id: str, nodes: str, n_gpus: int) -> None:
        """Apply one event."""
        if not job_id:
            self._apply_to_node(kind, int(nodes), n_gpus)
            return
        before = self._held.get(job_id)
        after = {int(node): int(n) for node, n in (share.split(":") for share in nodes.split())}
        for shares, sign in ((before or {}, 1), (after, -1)):
            for node, count in shares.items():
                self._free[node] += sign * count
        self._held[job_id] = after
        is_over = kind == EventKind.FINISHED.value
        waits, waited = not after and not is_over, before == {}
        shapes = self._shapes[job_id]
        self._waiting[shapes] = self._waiting.get(shapes, 0) + int(waits) - int(waited)

    def free(self) -> list[int]:
        """Return the free devices of every node, 0 where it is down."""
        return [count if up else 0 for count, up in zip(self._free, self._up, strict=True)]

    def free_and_fragmented(self) -> tuple[int, int, int]:
        """Return devices free, fragmented and present."""
        free = self.free()
        present = sum(size for size, up in zip(self._sizes, self._up, strict=True) if up)
        wanted = [shapes for shapes, number in self._waiting.items() if number]
        usable = any(fits(free, counts) for shapes in wanted for counts in shapes)
        total = sum(free)
        return total, total if wanted and not usable else 0, present

    def _apply_to_node(self, kind: str, node: int, n_gpus: int) -> None:
        signs = {EventKind.CAPACITY_WITHDRAWN.value: -1, EventKind.CAPACITY_RETURNED.value: 1}
        if kind in (EventKind.NODE_FAILED.value, EventKind.NODE_JOINED.value):
            self._up[node] = kind == EventKind.NODE_JOINED.value
        elif kind in signs:
            self._sizes[node] += signs[kind] * n_gpus
            self._free[node] += signs[kind] * n_gpus


def fits(free: Sequence[int], counts: Sequence[int]) -> bool:
    """Whether shares, largest first, fit on as many different nodes."""
    largest = np.sort(np.asarray(free))[::-1]
    return len(counts) <= len(largest) and bool((largest[: len(counts)] >= np.asarray(counts)).all())
