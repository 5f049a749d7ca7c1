"""Free devices that no waiting job can use."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from makespan.hardware import ClusterSpec
from makespan.metrics._steps import time_average
from makespan.sim import Catalogue, EventKind
from makespan.tables import EVENTS
from makespan.workloads import JobSpec

__all__ = ["fragmentation_over_time", "fragmentation_ratio"]

Shapes = tuple[tuple[int, ...], ...]


def fragmentation_over_time(
    events: pd.DataFrame, jobs: Iterable[JobSpec], cluster: ClusterSpec, catalogue: Catalogue
) -> pd.DataFrame:
    """Return the free devices that no waiting job can use, after each instant.

    Free devices count while jobs wait and none of them could start as requested on any placement for
    which its plan is known; while nobody waits, or somebody could start, none count.

    Parameters
    ----------
    events
        Table of schema `makespan.tables.EVENTS`.
    jobs
        The trace.
    cluster, catalogue
        Of the simulation.

    Returns
    -------
    pandas.DataFrame
        ``time_s``, ``gpus_free``, ``gpus_fragmented`` and ``fragmentation_ratio``, the fragmented
        over all devices present; each row holds until the next.

    Raises
    ------
    TraceError
        The table does not follow its schema.
    """
    table = EVENTS.validate(events, where="events")
    fitting = catalogue.on(cluster)
    shapes = {job.job_id: tuple(c.counts for c in fitting.as_requested(job)) for job in jobs}
    state = _State(table, cluster, shapes)
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


class _State:
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
            self._set_up(int(str(node)), is_up=kind == failed)

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

    def free_and_fragmented(self) -> tuple[int, int, int]:
        """Return devices free, fragmented and present."""
        free = [count for count, up in zip(self._free, self._up, strict=True) if up]
        present = sum(size for size, up in zip(self._sizes, self._up, strict=True) if up)
        wanted = [shapes for shapes, number in self._waiting.items() if number]
        usable = any(_fits(free, counts) for shapes in wanted for counts in shapes)
        total = sum(free)
        return total, total if wanted and not usable else 0, present

    def _apply_to_node(self, kind: str, node: int, n_gpus: int) -> None:
        signs = {EventKind.CAPACITY_WITHDRAWN.value: -1, EventKind.CAPACITY_RETURNED.value: 1}
        if kind in (EventKind.NODE_FAILED.value, EventKind.NODE_JOINED.value):
            self._set_up(node, is_up=kind == EventKind.NODE_JOINED.value)
        elif kind in signs:
            self._sizes[node] += signs[kind] * n_gpus
            self._free[node] += signs[kind] * n_gpus

    def _set_up(self, node: int, *, is_up: bool) -> None:
        self._up[node] = is_up


def _fits(free: Sequence[int], counts: Sequence[int]) -> bool:
    """Whether shares, largest first, fit on as many different nodes."""
    largest = np.sort(np.asarray(free))[::-1]
    return len(counts) <= len(largest) and bool((largest[: len(counts)] >= np.asarray(counts)).all())
