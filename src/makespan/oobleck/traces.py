"""Traces of nodes that fail, leave and join: the authors' files, and generated ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from makespan.arguments import check_range, typed
from makespan.errors import InputError, TraceError
from makespan.files import preset_entry, read_preset
from makespan.traces import read_oobleck_nodes
from makespan.units import MS


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """Addition or removal of a node, whose name is never used again."""

    time_ms: int
    is_added: bool
    node: str


@dataclass(frozen=True, slots=True)
class NodeTrace:
    """Events in order of time.

    Raises
    ------
    TraceError
        There is no event.
    """

    name: str
    events: tuple[NodeEvent, ...]

    def __post_init__(self) -> None:
        """Check that there is an event."""
        if not self.events:
            raise TraceError(f"trace {self.name!r}: no event; expected at least one")

    @property
    def end_ms(self) -> int:
        """Return the time of the last event [ms]."""
        return self.events[-1].time_ms

    def counts(self) -> list[int]:
        """Return the number of nodes present after each event."""
        counts, n_nodes = [], 0
        for event in self.events:
            n_nodes += 1 if event.is_added else -1
            counts.append(n_nodes)
        return counts


@typed
def read_trace(path: str | Path, name: str) -> NodeTrace:
    """Read a file of times [ms], ``add`` or ``remove``, and names of nodes; see `read_oobleck_nodes`."""
    table, _ = read_oobleck_nodes(path)
    rows: Iterable[tuple[float, str, str]] = zip(table["time_s"], table["kind"], table["node"], strict=True)
    return NodeTrace(
        name, tuple(NodeEvent(round(time_s / MS), kind == "joined", node) for time_s, kind, node in rows)
    )


# --- Generated traces -------------------------------------------------------------------------------

_PACKAGE = "makespan.oobleck"
_MINUTE_MS = 60_000
_ATTEMPTS = 1000
FAILURE_TRACES = tuple(read_preset(_PACKAGE, "failures"))
"""Names of the presets of failures, from rare to frequent."""
SPOT_TRACES = tuple(read_preset(_PACKAGE, "spot"))
"""Names of the presets of spot instances."""


@typed
def generate_failures(name: str, seed: int) -> NodeTrace:
    """Generate a trace in which nodes are lost at fixed intervals.

    Parameters
    ----------
    name
        One of `FAILURE_TRACES`.
    seed
        Seed of the choice of lost nodes. The times do not depend on it, so a system that does not distinguish
        nodes has the same run under every seed.

    Returns
    -------
    NodeTrace
        All nodes at time 0, then the losses.

    Raises
    ------
    UnknownNameError
        There is no such preset.
    """
    check_range("seed", seed)
    preset = preset_entry(_PACKAGE, "failures", "failure trace", name)
    n_nodes, n_removals, period_ms = preset["n_nodes"], preset["n_removals"], round(preset["period_s"] / MS)
    lost = np.random.default_rng(seed).permutation(n_nodes)[:n_removals]
    added = [NodeEvent(0, True, f"node{index + 1}") for index in range(n_nodes)]
    removed = [
        NodeEvent(turn * period_ms, False, f"node{index + 1}") for turn, index in enumerate(lost.tolist(), 1)
    ]
    return NodeTrace(name, (*added, *removed))


@dataclass(frozen=True, slots=True)
class _Statistics:
    """Statistics of a preset of spot instances; groups of removed nodes are negative."""

    start: list[int]
    groups: list[int]
    n_joint: int
    dwell_min: list[int]
    min_nodes: int
    max_nodes: int


@typed
def generate_spot(name: str, seed: int) -> NodeTrace:
    """Generate a trace of spot instances that come and go.

    The sizes of groups that are added or removed, and the times between instants, are those of the preset in
    random order, such that the number of nodes stays between the preset's least and most after the start.
    A removed node is any node present.

    Parameters
    ----------
    name
        One of `SPOT_TRACES`.
    seed
        Seed of all random draws.

    Returns
    -------
    NodeTrace
        As many events as the preset has.

    Raises
    ------
    UnknownNameError
        There is no such preset.
    """
    check_range("seed", seed)
    preset = preset_entry(_PACKAGE, "spot", "spot trace", name)
    rng = np.random.default_rng(seed)
    statistics = _Statistics(
        preset["start"],
        [*_repeated(preset["adds"]), *(-size for size in _repeated(preset["removals"]))],
        preset["n_joint"],
        _repeated(preset["dwell_min"]),
        preset["min_nodes"],
        preset["max_nodes"],
    )
    instants = _instants(name, statistics, rng)
    dwell_ms = [_MINUTE_MS * minutes for minutes in rng.permutation(statistics.dwell_min).tolist()]
    times_ms = list(accumulate(dwell_ms, initial=round(preset["first_s"] / MS)))
    return NodeTrace(name, tuple(_events(list(zip(times_ms, instants, strict=True)), rng)))


def _repeated(histogram: Sequence[Sequence[int]]) -> list[int]:
    """Return each value of a histogram as often as it occurs."""
    return [value for value, n in histogram for _ in range(n)]


def _instants(name: str, statistics: _Statistics, rng: np.random.Generator) -> list[list[int]]:
    """Draw the groups of each instant: positive ones are added, negative ones removed."""
    for _ in range(_ATTEMPTS):
        # Draw groups one after the other, among those that the limits allow; the draw may get stuck.
        left, n_nodes, order = rng.permutation(statistics.groups).tolist(), sum(statistics.start), list[int]()
        while left:
            allowed = [
                index
                for index, size in enumerate(left)
                if statistics.min_nodes <= n_nodes + size <= statistics.max_nodes
            ]
            if not allowed:
                break
            size = left.pop(allowed[int(rng.integers(len(allowed)))])
            n_nodes += size
            order.append(size)
        # Some additions and the removals right after them share an instant.
        pairs = [index for index, (size, after) in enumerate(pairwise(order)) if size > 0 > after]
        if not left and len(pairs) >= statistics.n_joint:
            joint = set(rng.permutation(pairs)[: statistics.n_joint].tolist())
            behind = {index + 1 for index in joint}
            rest = [
                order[i : i + 2] if i in joint else [order[i]] for i in range(len(order)) if i not in behind
            ]
            return [[size] for size in statistics.start] + rest
    raise InputError(f"spot trace {name!r}: no order keeps its numbers of nodes; expected wider limits")


def _events(instants: Sequence[tuple[int, list[int]]], rng: np.random.Generator) -> list[NodeEvent]:
    """Name nodes in the order of their arrival, and draw the nodes that are removed."""
    events, alive, n_named = list[NodeEvent](), list[str](), 0
    for time_ms, groups in instants:
        for size in groups:
            for _ in range(abs(size)):
                if size > 0:
                    n_named += 1
                    alive.append(f"node{n_named}")
                    name = alive[-1]
                else:
                    name = alive.pop(int(rng.integers(len(alive))))
                events.append(NodeEvent(time_ms, size > 0, name))
    return events


def _loss_times_ms(mtbf_s: float, n_losses: int, rng: np.random.Generator) -> list[int]:
    """Draw the times of losses that are exponentially distributed, at least a millisecond apart."""
    distances_ms = np.maximum(np.rint(rng.exponential(mtbf_s, n_losses) / MS), 1)
    return [int(time_ms) for time_ms in np.cumsum(distances_ms)]


_MOST = 100_000  # nodes, and losses of a generated trace
_LONGEST_S = 1e12  # milliseconds of it are exact


def _check_sizes(n_nodes: int, n_losses: int, seed: int) -> None:
    check_range("n_nodes", n_nodes, 1, _MOST)
    check_range("n_losses", n_losses, 1, _MOST)
    check_range("seed", seed)


@typed
def generate_steady(n_nodes: int, mtbf_s: float, n_losses: int, seed: int) -> NodeTrace:
    """Generate losses at random times, each with a new node at the same time.

    Parameters
    ----------
    n_nodes
        Nodes at time 0.
    mtbf_s
        Mean time between losses, which is exponentially distributed [s].
    n_losses
        Number of nodes that are lost.
    seed
        Seed of the times and of the choice of lost nodes.

    Returns
    -------
    NodeTrace
        Trace that ends with the last loss.

    Raises
    ------
    InputError
        A number is out of range.
    """
    if n_nodes < 1 or n_losses < 1 or not 0 < mtbf_s < _LONGEST_S:
        raise InputError(
            f"steady losses: {n_nodes} nodes, {n_losses} losses, {mtbf_s} s between them; expected 1 or "
            "more, 1 or more, a time above 0"
        )
    _check_sizes(n_nodes, n_losses, seed)
    rng = np.random.default_rng(seed)
    alive = [f"node{index + 1}" for index in range(n_nodes)]
    events = [NodeEvent(0, True, name) for name in alive]
    for turn, time_ms in enumerate(_loss_times_ms(mtbf_s, n_losses, rng), 1):
        lost, alive = alive, [*alive, f"node{n_nodes + turn}"]
        events.append(NodeEvent(time_ms, True, alive[-1]))
        events.append(NodeEvent(time_ms, False, alive.pop(int(rng.integers(len(lost))))))
    return NodeTrace("steady", tuple(events))


@typed
def generate_repaired(n_nodes: int, mtbf_s: float, repair_s: float, n_losses: int, seed: int) -> NodeTrace:
    """Generate losses at random times, each of which comes back as a new node after a repair.

    Parameters
    ----------
    n_nodes
        Nodes at time 0.
    mtbf_s
        Mean time between losses of the whole cluster, which is exponentially distributed [s].
    repair_s
        Time from a loss to the arrival of the new node [s].
    n_losses
        Number of nodes that are lost. A loss that would find no node is left out.
    seed
        Seed of the times and of the choice of lost nodes.

    Returns
    -------
    NodeTrace
        Trace that ends when the last lost node is back.

    Raises
    ------
    InputError
        A number is out of range.
    """
    if n_nodes < 1 or n_losses < 1 or not (0 < mtbf_s < _LONGEST_S and 0 < repair_s < _LONGEST_S):
        raise InputError(
            f"repaired losses: {n_nodes} nodes, {n_losses} losses, {mtbf_s} s between them, {repair_s} s of "
            "repair; expected 1 or more, 1 or more, and times above 0"
        )
    _check_sizes(n_nodes, n_losses, seed)
    rng = np.random.default_rng(seed)
    alive = [f"node{index + 1}" for index in range(n_nodes)]
    events = [NodeEvent(0, True, name) for name in alive]
    back, repair_ms = list[NodeEvent](), max(1, round(repair_s / MS))
    for turn, time_ms in enumerate(_loss_times_ms(mtbf_s, n_losses, rng), 1):
        while back and back[0].time_ms <= time_ms:
            events.append(back.pop(0))
            alive.append(events[-1].node)
        if not alive:
            continue
        events.append(NodeEvent(time_ms, False, alive.pop(int(rng.integers(len(alive))))))
        back.append(NodeEvent(time_ms + repair_ms, True, f"node{n_nodes + turn}"))
    return NodeTrace("repaired", (*events, *back))
