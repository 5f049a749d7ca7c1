"""Idle devices beside a running job that they would speed up: what a schedule left undone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from math import inf
from typing import NamedTuple

import pandas as pd

from makespan.errors import TraceError
from makespan.hardware import ClusterSpec
from makespan.metrics._devices import NodeState, fits
from makespan.plans import Placement
from makespan.sim import Catalogue, Configuration, EventKind
from makespan.tables import EVENTS
from makespan.workloads import JobSpec

__all__ = ["IdleSpell", "idle_spells"]

_CHANGES = {
    kind.value
    for kind in (
        *(EventKind.STARTED, EventKind.RECONFIGURED, EventKind.SHARING),
        *(EventKind.SUSPENDED, EventKind.INTERRUPTED, EventKind.FINISHED),
    )
}


@dataclass(frozen=True, slots=True)
class IdleSpell:
    """A time in which many devices were idle and a running job could have ended earlier on them.

    Attributes
    ----------
    start_s, end_s
        When it began and ended [s].
    gpus_free
        Devices that were free at its beginning.
    job_id
        A job that they would have sped up then.
    """

    start_s: float
    end_s: float
    gpus_free: int
    job_id: str


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

    More than a ``share`` of the devices present is free, and what a running job has left would be shorter by
    a share ``saving``, the restart counted, in a configuration with more devices for which there is room.
    True times decide, but only among configurations whose time could be known then: those that were
    sampled, and those that the job has run. Spells without a break between them are one.

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
    """What is read of a row of the events table."""

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
    """What a job holds, progress from ``ready_s`` on [s] with so many steps left."""

    item: Configuration
    nodes: dict[int, int]
    ready_s: float
    steps: float

    def gains_until(self, other: Configuration, delay_s: float, saving: float) -> float:
        """When a change to a faster configuration no longer shortens what is left by a share [s]."""
        kept, step_s = 1.0 - saving, self.item.iter_time_s
        end_s = self.ready_s + self.steps * step_s
        moment_s = end_s - delay_s / (kept - other.iter_time_s / step_s)
        if moment_s >= self.ready_s:
            return moment_s
        # Before it is ready it loses no steps by waiting, only the time until then.
        return end_s - (delay_s + self.steps * other.iter_time_s) / kept


@dataclass(slots=True)
class _Replay:
    """The schedule so far: devices, what jobs hold, and what each has run."""

    state: NodeState
    cluster: ClusterSpec
    catalogue: Catalogue
    workloads: dict[str, str]
    delay_s: float
    held: dict[str, _Held] = field(default_factory=dict)
    seen: dict[str, set[Configuration]] = field(default_factory=dict)

    def read(self, row: _Row) -> None:
        """Apply what happened; a guest holds nothing."""
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
                f"events: job {row.job_id!r} runs as {labels} at {row.time_s} s; accepted: a configuration "
                "of the catalogue"
            )
        return _Held(item, nodes, row.time_s + delay_s, row.steps_left)

    def gains_until(self, job_id: str, now_s: float, saving: float) -> float:
        """When the best change for which there is room now no longer pays for a job [s]."""
        held, seen = self.held[job_id], self.seen.get(job_id, set())
        free = [count + held.nodes.get(node, 0) for node, count in enumerate(self.state.free())]
        larger = [
            item
            for item in self.catalogue.all(held.item.workload)
            if held.item.n_gpus < item.n_gpus
            and item.iter_time_s < (1.0 - saving) * held.item.iter_time_s
            and (item.is_known or item in seen)
        ]
        for item in sorted(larger, key=lambda item: item.iter_time_s):
            moment_s = held.gains_until(item, self.delay_s, saving)
            if moment_s <= now_s or _has_room(item, free, self.cluster):
                return moment_s
        return -inf


def _has_room(item: Configuration, free: Sequence[int], cluster: ClusterSpec) -> bool:
    """Whether devices of the right type are free for every share."""
    for name in dict.fromkeys(item.types_by_count):
        counts = [n for n, its in zip(item.counts, item.types_by_count, strict=True) if its == name]
        there = [n for n, node in zip(free, cluster.nodes, strict=True) if name in ("", node.gpu.name)]
        if not fits(there, counts):
            return False
    return True
