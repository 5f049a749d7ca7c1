"""Metrics of schedules, computed from the events and outcomes tables alone.

Quantities over time are step functions, constant between the instants at which something happens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby, pairwise
from math import inf, nan
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from makespan.arguments import typed
from makespan.errors import TraceError
from makespan.hardware import ClusterSpec
from makespan.plans import Placement
from makespan.sim import Catalogue, Configuration, EventKind
from makespan.tables import EVENTS, JOB_GOODPUT, LIVE_SUMMARY, LOSSES, OUTCOMES
from makespan.workloads import JobSpec

# --- Step functions ---


def integral(times_s: ArrayLike, values: ArrayLike, at_s: ArrayLike) -> NDArray[np.float64]:
    """Integrate a step function, 0 before its first time, up to each of ``at_s`` [s], of any shape."""
    times, heights, ends = (np.asarray(x, dtype=np.float64) for x in (times_s, values, at_s))
    areas = np.concatenate([[0.0], np.cumsum(np.diff(times) * heights[:-1])])  # up to each time
    last = np.searchsorted(times, ends, side="right") - 1
    inside = np.maximum(last, 0)
    return np.where(last < 0, 0.0, areas[inside] + (ends - times[inside]) * heights[inside])


def time_average(times_s: ArrayLike, values: ArrayLike, start_s: float, end_s: float) -> float:
    """Return the mean of a step function over a span of time [s]; NaN if the span is empty."""
    if not end_s > start_s:
        return float("nan")
    start, end = integral(times_s, values, np.array([start_s, end_s]))
    return float((end - start) / (end_s - start_s))


def level(times_s: pd.Series, changes: pd.Series) -> pd.Series:
    """Return the sum of all changes up to and including each instant, by time [s]; any order of rows."""
    return changes.groupby(times_s.to_numpy()).sum().sort_index().cumsum().rename_axis("time_s")


# --- Devices over time ---

_NODE_CHANGES = [
    EventKind.NODE_FAILED.value,
    EventKind.NODE_JOINED.value,
    EventKind.CAPACITY_WITHDRAWN.value,
    EventKind.CAPACITY_RETURNED.value,
]
# Devices per node, largest first, and their types, empty for any, of each placement of a job.
Shapes = tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]


@typed
def allocation_over_time(events: pd.DataFrame, cluster: ClusterSpec) -> pd.DataFrame:
    """Return the devices held and present after each instant at which something happened.

    Devices that a guest uses and nobody holds count as held, as jobs compute on them.

    Takes a table of schema `makespan.tables.EVENTS`. Returns ``time_s``, ``gpus_held``, ``gpus_present`` and
    ``gpu_allocation_ratio``, held over present (0 where no device is); each row holds until the next.

    Raises
    ------
    TraceError
        The table does not follow its schema, or a node event names no node of the cluster.
    """
    times_s, held, present = _devices_over_time(EVENTS.validate(events, where="events"), cluster)
    ratio = np.divide(held, present, out=np.zeros(len(held)), where=present > 0)
    return pd.DataFrame(
        {"time_s": times_s, "gpus_held": held, "gpus_present": present, "gpu_allocation_ratio": ratio}
    )


def _devices_over_time(
    table: pd.DataFrame, cluster: ClusterSpec
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the instants of a validated events table [s], and the devices held and present after each."""
    times_s, instants = np.unique(table["time_s"].to_numpy(dtype=float), return_inverse=True)
    n_gpus, kinds = table["n_gpus"].to_numpy(), table["kind"]
    # A row states what its job holds from now on; the change is against the previous row of that job.
    jobs = pd.factorize(table["job_id"])[0]
    rows = np.argsort(jobs, kind="stable")
    is_first = np.diff(jobs[rows], prepend=-1) != 0
    change = np.zeros(len(rows), dtype=np.int64)
    change[rows] = n_gpus[rows] - np.where(is_first, 0, np.roll(n_gpus[rows], 1))
    change[(table["job_id"] == "").to_numpy()] = 0
    held = _sums_by_instant(instants, change, len(times_s))
    node_events = table[kinds.isin(_NODE_CHANGES)]
    start, changes = _presence(node_events, cluster)
    present = start + _sums_by_instant(instants[node_events.index], changes, len(times_s))
    return times_s, held, present


def _sums_by_instant(instants: NDArray[np.intp], changes: ArrayLike, n: int) -> NDArray[np.int64]:
    """Return the sum of whole changes up to and including each of ``n`` instants."""
    return np.cumsum(np.bincount(instants, weights=changes, minlength=n)).astype(np.int64)


@typed
def allocation_by_family(events: pd.DataFrame) -> pd.DataFrame:
    """Return the devices held after each instant, one column per family of the execution plan, by name.

    Devices count as in `allocation_over_time`.
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


@typed
def gpu_allocation_ratio(events: pd.DataFrame, cluster: ClusterSpec) -> float:
    """Return the device time held over that present, from the first submission to the last finish.

    Devices that a guest uses and nobody holds count as held. NaN if nothing happened or no device was
    present. The table is as for `allocation_over_time`.
    """
    table = EVENTS.validate(events, where="events")
    times_s, n_held, n_present = _devices_over_time(table, cluster)
    event_s, kinds = table["time_s"].to_numpy(), table["kind"]
    submitted_s = event_s[(kinds == EventKind.SUBMITTED.value).to_numpy()]
    finished_s = event_s[(kinds == EventKind.FINISHED.value).to_numpy()]
    if not len(submitted_s) or not len(finished_s):
        return float("nan")
    span = (float(submitted_s.min()), float(finished_s.max()))
    present = time_average(times_s, n_present, *span)
    held = time_average(times_s, n_held, *span)
    return held / present if present > 0 else float("nan")


def _presence(rows: pd.DataFrame, cluster: ClusterSpec) -> tuple[int, list[int]]:
    """Return the devices present before the first of some node events, and how each event changes them."""
    if rows.empty:
        return cluster.n_gpus, []
    failed, joined = EventKind.NODE_FAILED.value, EventKind.NODE_JOINED.value
    withdrawn = EventKind.CAPACITY_WITHDRAWN.value
    nodes = pd.to_numeric(rows["nodes"], errors="coerce")
    if nodes.isna().any() or (nodes < 0).any() or (nodes >= cluster.n_nodes).any():
        raise TraceError(
            f"events: node events name nodes {rows['nodes'].tolist()!r}; expected 0 to {cluster.n_nodes - 1}"
        )
    # A node that joins before it fails was absent at the start.
    whole = nodes[rows["kind"].isin([failed, joined])]
    absent = whole[~whole.duplicated() & (rows["kind"] == joined)].astype(int).tolist()
    start = cluster.n_gpus - sum(cluster.nodes[node].n_gpus for node in absent)
    sizes = [node.n_gpus for node in cluster.nodes]  # devices of each node while it is up
    up = [number not in absent for number in range(cluster.n_nodes)]
    gpus: list[int] = []
    for kind, node, count in zip(rows["kind"], nodes.astype(int), rows["n_gpus"], strict=True):
        if kind in (failed, joined):
            up[node] = kind == joined
            gpus.append(sizes[node] if up[node] else -sizes[node])
        else:
            change = -int(count) if kind == withdrawn else int(count)
            sizes[node] += change
            gpus.append(change if up[node] else 0)
    return start, gpus


@typed
def fragmentation_over_time(
    events: pd.DataFrame, jobs: Iterable[JobSpec], cluster: ClusterSpec, catalogue: Catalogue
) -> pd.DataFrame:
    """Return the free devices that no waiting job can use, after each instant.

    All free devices count while jobs wait and none of them could start as requested on any placement for
    which its plan is known; none count while no job waits or one could start. Guests do not wait, and devices
    that they use and nobody holds are free, as jobs that wait could hold them.

    Takes a table of schema `makespan.tables.EVENTS`. Returns ``time_s``, ``gpus_free``, ``gpus_fragmented``
    and ``fragmentation_ratio``, the fragmented over all devices present; each row holds until the next.

    Raises
    ------
    TraceError
        The table does not follow its schema.
    """
    table = EVENTS.validate(events, where="events")
    fitting = catalogue.on(cluster)
    shapes = {
        job.job_id: tuple((c.counts, c.types_by_count) for c in fitting.as_requested(job)) for job in jobs
    }
    state = NodeState(table, cluster, shapes)
    rows = []
    for time_s, instant in table.groupby("time_s", sort=True):
        columns = (instant[name] for name in ("kind", "job_id", "nodes", "n_gpus", "shared_nodes"))
        for kind, job_id, nodes, n_gpus, shared_nodes in zip(*columns, strict=True):
            state.apply(kind, job_id, nodes, n_gpus, shared_nodes)
        rows.append((time_s, *state.free_and_fragmented()))
    frame = pd.DataFrame(rows, columns=["time_s", "gpus_free", "gpus_fragmented", "gpus_present"])
    present = frame.pop("gpus_present")
    ratio = (frame["gpus_fragmented"] / present.where(present > 0)).astype(float)
    return frame.assign(fragmentation_ratio=ratio.fillna(0.0))


@typed
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
        self._types = [node.gpu.name for node in cluster.nodes]
        self._shapes = shapes
        self._free = self._sizes.copy()
        self._up = [True] * len(self._sizes)
        self._held: dict[str, dict[int, int]] = {}
        self._queue: set[str] = set()  # waiting jobs
        self._waiting: dict[Shapes, int] = {}  # how many of them want one of some shapes
        joined, failed = EventKind.NODE_JOINED.value, EventKind.NODE_FAILED.value
        of_nodes = table[table["kind"].isin([joined, failed])]
        for node, kind in of_nodes.groupby("nodes")["kind"].first().items():
            self._up[int(str(node))] = kind == failed

    def apply(self, kind: str, job_id: str, nodes: str, n_gpus: int, shared_nodes: str = "") -> None:
        """Apply one event; a guest holds nothing, but does not wait."""
        if not job_id:
            self._apply_to_node(kind, int(nodes), n_gpus)
            return
        before = self._held.get(job_id, {})
        after = {int(node): int(n) for node, n in (share.split(":") for share in nodes.split())}
        for shares, sign in ((before, 1), (after, -1)):
            for node, count in shares.items():
                self._free[node] += sign * count
        self._held[job_id] = after
        waits = not (nodes or shared_nodes or kind == EventKind.FINISHED.value)
        if waits != (job_id in self._queue):
            shapes = self._shapes[job_id]
            self._waiting[shapes] = self._waiting.get(shapes, 0) + (1 if waits else -1)
            (self._queue.add if waits else self._queue.remove)(job_id)

    def free(self) -> list[int]:
        """Return the free devices of every node, 0 where it is down."""
        return [count if up else 0 for count, up in zip(self._free, self._up, strict=True)]

    def free_and_fragmented(self) -> tuple[int, int, int]:
        """Return devices free, fragmented and present."""
        free = self.free()
        present = sum(size for size, up in zip(self._sizes, self._up, strict=True) if up)
        wanted = [shapes for shapes, number in self._waiting.items() if number]
        usable = any(fits_by_type(free, self._types, *shape) for shapes in wanted for shape in shapes)
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
    """Return whether shares, largest first, fit on as many different nodes."""
    largest = np.sort(np.asarray(free))[::-1]
    return len(counts) <= len(largest) and bool((largest[: len(counts)] >= np.asarray(counts)).all())


def fits_by_type(
    free: Sequence[int], types: Sequence[str], counts: Sequence[int], wanted: Sequence[str]
) -> bool:
    """Return whether shares of wanted types, empty for any, fit on as many different nodes."""
    # Types of device do not compete for nodes, so each can be placed by itself.
    return all(
        fits(
            [n for n, found in zip(free, types, strict=True) if name in ("", found)],
            [n for n, kind in zip(counts, wanted, strict=True) if kind == name],
        )
        for name in dict.fromkeys(wanted)
    )


# --- Metrics of jobs and of a simulation ---

_TOLERANCE = 1e-9  # relative, for rounding


@typed
def job_metrics(
    outcomes: pd.DataFrame, *, n_gpus: int, restart_delay_s: float, extra_steps: float = 1
) -> pd.DataFrame:
    """Return the metrics of each job, schema `makespan.tables.JOB_METRICS`, in the order of the outcomes.

    Alone, a job starts at its submission with what it asked for, so it takes one restart delay and its
    steps at the reference time.

    Finish-time fairness compares with a cluster that is split evenly and permanently: the share of a job
    is the devices of the cluster over the mean number of jobs in the system during its own stay, itself
    included. With a share below its request the job would run as requested, but only for the same part
    of the time; with a larger one it runs as alone. 1 is fair, more is worse than the equal split
    (the measure of Themis, NSDI 2020, with this definition of the share).

    Parameters
    ----------
    outcomes
        Table of schema `makespan.tables.OUTCOMES`.
    n_gpus, restart_delay_s
        Devices of the cluster, and delay of the first start in the simulation [s].
    extra_steps
        Steps that each job ran beyond its own.

    Raises
    ------
    TraceError
        The table does not follow its schema.
    """
    table = OUTCOMES.validate(outcomes, where="outcomes")
    submit_s, finish_s = (table[name].to_numpy(dtype=float) for name in ("submit_time_s", "finish_time_s"))
    jct_s = finish_s - submit_s
    steps = table["steps"].to_numpy(dtype=float) + extra_steps
    work_s = steps * table["reference_iter_time_s"].to_numpy(dtype=float)
    alone_s = restart_delay_s + work_s
    share = n_gpus / _mean_jobs_in_system(submit_s, finish_s)
    shared_s = restart_delay_s + work_s * np.maximum(table["n_gpus"].to_numpy(dtype=float) / share, 1.0)
    return pd.DataFrame(
        {
            "job_id": table["job_id"],
            "jct_s": jct_s,
            "queueing_delay_s": table["first_start_s"].to_numpy(dtype=float) - submit_s,
            "run_alone_s": alone_s,
            "slowdown": _ratio(jct_s, alone_s),
            "finish_time_fairness": _ratio(jct_s, shared_s),
            "n_reconfigurations": table["n_restarts"].to_numpy(dtype=np.int64) + 1,
        }
    )


@typed
def guarantee_breaches(events: pd.DataFrame, outcomes: pd.DataFrame) -> pd.DataFrame:
    """Return the events that breach a guarantee, with the column ``reference_iter_time_s``.

    A guarantee is breached if the job, once started, is suspended by a decision, or gets a configuration
    whose step takes longer than the requested one. Devices lost with a node are no decision and do not
    count, nor does the restart delay of a change to a configuration as fast or faster.

    Raises
    ------
    TraceError
        A table does not follow its schema, `makespan.tables.EVENTS` or `makespan.tables.OUTCOMES`.
    """
    table = EVENTS.validate(events, where="events")
    jobs = OUTCOMES.validate(outcomes, where="outcomes")
    references = jobs.loc[jobs["is_guaranteed"], ["job_id", "reference_iter_time_s"]]
    rows = table.merge(references, on="job_id", how="inner").sort_values("seq", ignore_index=True)
    limit_s = rows["reference_iter_time_s"] * (1 + _TOLERANCE)
    changes = EventKind.STARTED, EventKind.RECONFIGURED, EventKind.SHARING
    given = rows["kind"].isin([kind.value for kind in changes])
    slower = given & (rows["iter_time_s"] > limit_s)
    return rows[slower | (rows["kind"] == EventKind.SUSPENDED.value)].reset_index(drop=True)


@typed
def sla_attainment(events: pd.DataFrame, outcomes: pd.DataFrame) -> float:
    """Return the share of guaranteed jobs whose guarantee was never breached; NaN if there are none."""
    n_guaranteed = int(outcomes["is_guaranteed"].astype(bool).sum())
    if not n_guaranteed:
        return float("nan")
    return 1.0 - guarantee_breaches(events, outcomes)["job_id"].nunique() / n_guaranteed


def _ratio(value: NDArray[np.float64], base: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide; a job without work has ratio 1 if it took no time, else infinity."""
    empty = np.where(value > 0, np.inf, 1.0)
    return np.divide(value, base, out=empty, where=base > 0)


def _mean_jobs_in_system(submit_s: NDArray[np.float64], finish_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean number of jobs in the system over each job's stay, itself included, at least 1."""
    if len(submit_s) == 0:
        return np.ones(0)
    times_s = np.concatenate([submit_s, finish_s])
    changes = np.concatenate([np.ones(len(submit_s)), -np.ones(len(finish_s))])
    order = np.argsort(times_s, kind="stable")
    times_s, present = times_s[order], np.cumsum(changes[order])
    stay_s = finish_s - submit_s
    area = integral(times_s, present, finish_s) - integral(times_s, present, submit_s)
    mean = np.divide(area, stay_s, out=np.ones(len(stay_s)), where=stay_s > 0)
    return np.maximum(mean, 1.0)


@dataclass(frozen=True, slots=True)
class Summary:
    """Metrics of one simulation; NaN where there is nothing to average.

    Parameters
    ----------
    n_jobs, makespan_s
        Jobs that finished; last finish minus first submission [s].
    avg_jct_s, p50_jct_s, p95_jct_s, p99_jct_s
        Completion time: mean and percentiles, interpolated linearly [s].
    avg_queueing_delay_s, avg_waiting_time_s, max_waiting_time_s
        Mean of first start minus submission; mean and largest time without devices, also after a
        suspension [s].
    avg_slowdown, avg_finish_time_fairness, max_finish_time_fairness
        Mean completion time over duration alone; mean and worst fairness, see `job_metrics` for the share.
    gpu_allocation_ratio
        Device time held, by guests alone too, over device time present, from first submission to last finish.
    reconfigurations_per_job
        Restart delays per job, the first start included.
    sla_attainment
        Share of guaranteed jobs whose guarantee was never breached.
    """

    n_jobs: int
    avg_jct_s: float
    p50_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    makespan_s: float
    avg_queueing_delay_s: float
    avg_waiting_time_s: float
    max_waiting_time_s: float
    avg_slowdown: float
    avg_finish_time_fairness: float
    max_finish_time_fairness: float
    gpu_allocation_ratio: float
    reconfigurations_per_job: float
    sla_attainment: float


@typed
def summary(
    events: pd.DataFrame,
    outcomes: pd.DataFrame,
    cluster: ClusterSpec,
    *,
    restart_delay_s: float,
    extra_steps: float = 1,
) -> Summary:
    """Return all metrics of one simulation from its tables, nodes and options.

    Raises
    ------
    TraceError
        A table does not follow its schema.
    """
    jobs = job_metrics(
        outcomes, n_gpus=cluster.n_gpus, restart_delay_s=restart_delay_s, extra_steps=extra_steps
    )
    jct_s = jobs["jct_s"].to_numpy(dtype=float)
    p50_s, p95_s, p99_s = np.percentile(jct_s, (50, 95, 99)) if len(jct_s) else (float("nan"),) * 3
    return Summary(
        n_jobs=len(jobs),
        avg_jct_s=float(jobs["jct_s"].mean()),
        p50_jct_s=float(p50_s),
        p95_jct_s=float(p95_s),
        p99_jct_s=float(p99_s),
        makespan_s=float(outcomes["finish_time_s"].max() - outcomes["submit_time_s"].min()),
        avg_queueing_delay_s=float(jobs["queueing_delay_s"].mean()),
        avg_waiting_time_s=float(outcomes["waiting_time_s"].mean()),
        max_waiting_time_s=float(outcomes["waiting_time_s"].max()),
        avg_slowdown=float(jobs["slowdown"].mean()),
        avg_finish_time_fairness=float(jobs["finish_time_fairness"].mean()),
        max_finish_time_fairness=float(jobs["finish_time_fairness"].max()),
        gpu_allocation_ratio=gpu_allocation_ratio(events, cluster),
        reconfigurations_per_job=float(jobs["n_reconfigurations"].mean()),
        sla_attainment=sla_attainment(events, outcomes),
    )


# --- Goodput under failures ---


@dataclass(slots=True)
class _Account:
    """Device time of a job by its use [GPU s], while its rows are read.

    Without devices, and until it is ready, a job makes no progress; ``broken_s`` is when it was interrupted,
    NaN once it has recovered.
    """

    submitted_s: float = nan
    finished_s: float = nan
    n_interruptions: int = 0
    lost_steps: float = 0.0
    lost_gpu_s: float = 0.0
    recovery_s: float = 0.0
    trained_gpu_s: float = 0.0
    checkpoint_gpu_s: float = 0.0
    recovery_gpu_s: float = 0.0
    restart_gpu_s: float = 0.0
    since_s: float = nan
    broken_s: float = nan
    n_gpus: int = 0
    step_s: float = nan
    steps_left: float = 0.0
    is_ready: bool = False

    def read(self, time_s: float, kind: str, n_gpus: int, step_s: float, left: float, lost: float) -> None:
        """Apply a row, after which ``left`` steps are left, ``lost`` ones of which were done before."""
        held_gpu_s = (time_s - self.since_s) * self.n_gpus if self.n_gpus else 0.0
        if self.is_ready and self.n_gpus:
            trained_gpu_s = (self.steps_left - (left - lost)) * self.step_s * self.n_gpus
            self.trained_gpu_s += trained_gpu_s
            self.checkpoint_gpu_s += max(held_gpu_s - trained_gpu_s, 0.0)
        else:
            if kind == EventKind.READY and self.n_gpus:
                # A live job is found to be ready when its processes have reported steps, perhaps several.
                trained_gpu_s = (self.steps_left - left) * self.step_s * self.n_gpus
                self.trained_gpu_s += trained_gpu_s
                held_gpu_s = max(held_gpu_s - trained_gpu_s, 0.0)
            if self.broken_s == self.broken_s:
                self.recovery_gpu_s += held_gpu_s
            else:
                self.restart_gpu_s += held_gpu_s
        if kind == EventKind.SUBMITTED:
            self.submitted_s = time_s
        elif kind == EventKind.FINISHED:
            self.finished_s = time_s
        elif kind == EventKind.INTERRUPTED:
            self.n_interruptions += 1
            self.broken_s = self.broken_s if self.broken_s == self.broken_s else time_s
        elif kind == EventKind.READY and self.broken_s == self.broken_s:
            self.recovery_s += time_s - self.broken_s
            self.broken_s = nan
        if kind not in (EventKind.SHARING, EventKind.SPEED_CHANGED):
            self.is_ready = kind == EventKind.READY
        self.since_s, self.n_gpus, self.step_s, self.steps_left = time_s, n_gpus, step_s, left


@typed
def job_goodput(events: pd.DataFrame, losses: pd.DataFrame) -> pd.DataFrame:
    """Return the device time of each job by its use, schema `makespan.tables.JOB_GOODPUT`, by submission.

    Goodput is the device time of steps that were not lost over all device time that a job held. Devices that
    a guest uses count while nobody holds them; beside a holder, whose time they are, they count for nothing.

    Parameters
    ----------
    events, losses
        Tables of the schemas `makespan.tables.EVENTS` and `makespan.tables.LOSSES`.

    Raises
    ------
    TraceError
        A table does not follow its schema.
    """
    table, gone = EVENTS.validate(events, where="events"), LOSSES.validate(losses, where="losses")
    lost_steps = dict(zip(gone["seq"].tolist(), gone["lost_steps"].tolist(), strict=True))
    lost_gpu_s = dict(zip(gone["seq"].tolist(), gone["lost_gpu_s"].tolist(), strict=True))
    accounts: dict[str, _Account] = {}
    columns = ("time_s", "seq", "kind", "job_id", "n_gpus", "iter_time_s", "steps_left")
    rows = zip(*(table[name].tolist() for name in columns), strict=True)
    for time_s, seq, kind, job_id, n_gpus, step_s, left in rows:
        if job_id:
            account = accounts.setdefault(job_id, _Account())
            lost = lost_steps.get(seq, 0.0)
            account.read(time_s, kind, n_gpus, step_s, left, lost)
            account.lost_steps += lost
            account.lost_gpu_s += lost_gpu_s.get(seq, 0.0)
    listed = []
    for job_id, one in accounts.items():
        useful_gpu_s = one.trained_gpu_s - one.lost_gpu_s
        parts = (one.lost_gpu_s, one.checkpoint_gpu_s, one.recovery_gpu_s, one.restart_gpu_s)
        held_gpu_s = useful_gpu_s + sum(parts)
        head = (job_id, one.finished_s - one.submitted_s, one.n_interruptions, one.lost_steps, one.recovery_s)
        goodput = useful_gpu_s / held_gpu_s if held_gpu_s > 0 else nan
        listed.append((*head, held_gpu_s, useful_gpu_s, *parts, goodput))
    return JOB_GOODPUT.validate(pd.DataFrame(listed, columns=JOB_GOODPUT.names), where="goodput")


@dataclass(frozen=True, slots=True)
class Goodput:
    """Device time of all jobs of a simulation by its use [GPU s], see `job_goodput`.

    Parameters
    ----------
    n_interruptions, lost_steps, recovery_s
        Interruptions, steps lost in them, and time from each until the job was ready again [s], in total.
    held_gpu_s, useful_gpu_s, lost_gpu_s, checkpoint_gpu_s, recovery_gpu_s, restart_gpu_s
        Time of devices that jobs held, or that guests used while nobody did, and its parts: steps that were
        kept, steps that were lost, checkpoints, restarts and pauses after interruptions, other starts and
        changes.
    """

    n_interruptions: int
    lost_steps: float
    recovery_s: float
    held_gpu_s: float
    useful_gpu_s: float
    lost_gpu_s: float
    checkpoint_gpu_s: float
    recovery_gpu_s: float
    restart_gpu_s: float

    @classmethod
    def of(cls, jobs: pd.DataFrame) -> "Goodput":
        """Return the totals of a table of `job_goodput`."""
        totals = {item.name: float(jobs[item.name].sum()) for item in fields(cls)}
        return cls(**totals | {"n_interruptions": int(jobs["n_interruptions"].sum())})  # type: ignore[arg-type]

    @property
    def ratio(self) -> float:
        """Useful over held [1]; NaN if nothing was held."""
        return self.useful_gpu_s / self.held_gpu_s if self.held_gpu_s > 0 else nan


# --- Idle devices that would speed up a running job ---

_CHANGES = {
    kind.value
    for kind in (
        *(EventKind.STARTED, EventKind.RECONFIGURED, EventKind.SHARING),
        *(EventKind.SUSPENDED, EventKind.INTERRUPTED, EventKind.REGROUPED, EventKind.FINISHED),
    )
}


@dataclass(frozen=True, slots=True)
class IdleSpell:
    """Time in which many devices were idle and a running job could have ended earlier on them.

    Attributes
    ----------
    start_s, end_s
        Start and end [s].
    gpus_free
        Devices that were free at the start.
    job_id
        A job that they would have sped up then.
    """

    start_s: float
    end_s: float
    gpus_free: int
    job_id: str


@typed
def idle_spells(
    events: pd.DataFrame,
    jobs: Iterable[JobSpec],
    cluster: ClusterSpec,
    catalogue: Catalogue,
    restart_delay_s: float,
    *,
    share: float = 0.5,
    saving: float = 0.1,
) -> list[IdleSpell]:
    """Return the times in which a running job could have ended earlier on devices that were idle.

    More than a ``share`` of the devices present is free, and the remaining time of a running job would be
    shorter by a share ``saving``, restart included, in a configuration with more devices for which there is
    room. True times decide, but only among configurations whose time could be known then: those that were
    sampled, and those that the job has run. Adjacent spells are joined.

    Takes a table of schema `makespan.tables.EVENTS`; the restart delay is in s.

    Raises
    ------
    TraceError
        The table does not follow its schema, or a job runs as something that the catalogue does not have.
    """
    table = EVENTS.validate(events, where="events")
    workloads = {job.job_id: job.workload for job in jobs}
    state = NodeState(table, cluster, dict.fromkeys(workloads, ()))
    replay = _Replay(state, cluster, catalogue.on(cluster), workloads, restart_delay_s)
    rows = map(_Row._make, zip(*(table[name].tolist() for name in _Row._fields), strict=True))
    spells: list[IdleSpell] = []
    instants = [(now_s, list(group)) for now_s, group in groupby(rows, key=lambda row: row.time_s)]
    for (now_s, group), (next_s, _) in pairwise(instants):
        for row in group:
            replay.read(row)
        free, _, present = state.free_and_fragmented()
        if free <= share * present or not replay.held:
            continue
        until_s, job_id = max((replay.gains_until(name, now_s, saving), name) for name in replay.held)
        if until_s <= now_s:
            continue
        spell = IdleSpell(now_s, min(until_s, next_s), free, job_id)
        if spells and spells[-1].end_s == now_s:
            last = spells.pop()
            spell = IdleSpell(last.start_s, spell.end_s, last.gpus_free, last.job_id)
        spells.append(spell)
    return spells


class _Row(NamedTuple):
    """Columns of the events table that are read."""

    time_s: float
    kind: str
    job_id: str
    nodes: str
    n_gpus: int
    plan: str
    cpu_threads: int
    steps_left: float


@dataclass(slots=True)
class _Held:
    """Allocation of a job, with progress from ``ready_s`` on [s] and ``steps`` left then."""

    item: Configuration
    nodes: dict[int, int]
    ready_s: float
    steps: float

    def gains_until(self, other: Configuration, delay_s: float, saving: float) -> float:
        """Return when a change to a faster configuration no longer shortens the rest by a share [s]."""
        # At time t the rest is end - t, and after a change delay + (end - t) * other / step; solve for t.
        kept, step_s = 1.0 - saving, self.item.iter_time_s
        end_s = self.ready_s + self.steps * step_s
        moment_s = end_s - delay_s / (kept - other.iter_time_s / step_s)
        if moment_s >= self.ready_s:
            return moment_s
        # Until the job is ready its steps stay the same, and only the time until its end shrinks.
        return end_s - (delay_s + self.steps * other.iter_time_s) / kept


@dataclass(slots=True)
class _Replay:
    """State of the schedule so far: devices, allocations of jobs, and configurations that each has run."""

    state: NodeState
    cluster: ClusterSpec
    catalogue: Catalogue
    workloads: dict[str, str]
    delay_s: float
    held: dict[str, _Held] = field(default_factory=dict)
    seen: dict[str, set[Configuration]] = field(default_factory=dict)

    def read(self, row: _Row) -> None:
        """Apply a row; a guest holds nothing."""
        self.state.apply(row.kind, row.job_id, row.nodes, row.n_gpus)
        if row.kind == EventKind.READY.value:
            if row.job_id in self.held:
                self.held[row.job_id].ready_s = row.time_s
        elif row.kind in _CHANGES:
            before = self.held.pop(row.job_id, None)
            if before is not None and row.time_s - before.ready_s >= before.item.iter_time_s:
                self.seen.setdefault(row.job_id, set()).add(before.item)
            if row.nodes:
                delay_s = 0.0 if row.kind == EventKind.SHARING.value else self.delay_s
                self.held[row.job_id] = self._placed(row, delay_s)

    def _placed(self, row: _Row, delay_s: float) -> _Held:
        nodes = {int(node): int(count) for node, count in (pair.split(":") for pair in row.nodes.split())}
        shares = sorted((count, self.cluster.nodes[node].gpu.name) for node, count in nodes.items())
        placement = Placement(tuple(count for count, _ in shares)).text
        labels = self.workloads[row.job_id], row.plan, placement, row.cpu_threads
        item = self.catalogue.find(*labels, tuple(name for _, name in shares))
        if item is None:
            raise TraceError(
                f"events: job {row.job_id!r} runs as {labels} at {row.time_s} s; expected a configuration "
                "of the catalogue"
            )
        return _Held(item, nodes, row.time_s + delay_s, row.steps_left)

    def gains_until(self, job_id: str, now_s: float, saving: float) -> float:
        """Return when the best change for which there is room now no longer pays for a job [s]."""
        held, seen = self.held[job_id], self.seen.get(job_id, set())
        free = [count + held.nodes.get(node, 0) for node, count in enumerate(self.state.free())]
        larger = [
            item
            for item in self.catalogue.all(held.item.workload)
            if held.item.n_gpus < item.n_gpus
            and item.iter_time_s < (1.0 - saving) * held.item.iter_time_s
            and (item.is_known or item in seen)
        ]
        types = [node.gpu.name for node in self.cluster.nodes]
        for item in sorted(larger, key=lambda item: item.iter_time_s):
            moment_s = held.gains_until(item, self.delay_s, saving)
            if moment_s <= now_s:
                return moment_s  # slower configurations pay even less
            if fits_by_type(free, types, item.counts, item.types_by_count):
                return moment_s
        return -inf


# --- Live runs ---


@typed
def live_summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Summarise runs of schema `LIVE`: one row of schema `LIVE_SUMMARY` per policy, and one over all.

    Absolute differences are averaged, so that those of both signs do not cancel.
    """
    rows: list[dict[str, object]] = []
    for policy, group in (*runs.groupby("policy", sort=False), ("all", runs)):
        row: dict[str, object] = {"policy": str(policy), "runs": len(group)}
        for name in ("jct", "undisturbed_jct", "retrodiction_jct", "makespan"):
            sizes = group[f"{name}_difference_pct"].abs()
            row |= {f"mean_{name}_difference_pct": sizes.mean(), f"worst_{name}_difference_pct": sizes.max()}
        live_s = group["live_avg_jct_s"]
        is_within = live_s.between(group["predicted_low_avg_jct_s"], group["predicted_high_avg_jct_s"])
        row |= {
            "bias_jct_difference_pct": group["jct_difference_pct"].mean(),
            "mean_profile_drift_pct": group["profile_drift_pct"].abs().mean(),
            "restart_delay_s": group["restart_delay_s"].mean(),
            "live_restart_delay_s": group["live_restart_delay_s"].mean(),
            "all_predicted_before": bool((group["predicted_at"] < group["began_at"]).all()),
            "interval_runs": int(is_within.sum()),
        }
        rows.append(row)
    return LIVE_SUMMARY.validate(pd.DataFrame(rows), where="live runs")
