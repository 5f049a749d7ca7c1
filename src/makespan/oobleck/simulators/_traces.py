"""Traces of nodes that come and go: the authors' files."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from makespan.errors import TraceError
from makespan.traces import read_oobleck_nodes
from makespan.units import MS

__all__ = ["NodeEvent", "NodeTrace", "read_trace"]


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """A node is added or removed; its name is never used again."""

    time_ms: int
    is_added: bool
    node: str


@dataclass(frozen=True, slots=True)
class NodeTrace:
    """Events in order of time.

    Raises
    ------
    TraceError
        There is none.
    """

    name: str
    events: tuple[NodeEvent, ...]

    def __post_init__(self) -> None:
        """Check that there is something to simulate."""
        if not self.events:
            raise TraceError(f"trace {self.name!r}: no event; accepted: at least one")

    @property
    def end_ms(self) -> int:
        """Return the time of the last event [ms]."""
        return self.events[-1].time_ms

    def counts(self) -> list[int]:
        """Return the number of nodes that are there after each event."""
        counts, n_nodes = [], 0
        for event in self.events:
            n_nodes += 1 if event.is_added else -1
            counts.append(n_nodes)
        return counts


def read_trace(path: str | Path, name: str) -> NodeTrace:
    """Read a file of times [ms], ``add`` or ``remove``, and names of nodes; see `read_oobleck_nodes`."""
    table, _ = read_oobleck_nodes(path)
    rows: Iterable[tuple[float, str, str]] = zip(table["time_s"], table["kind"], table["node"], strict=True)
    return NodeTrace(
        name, tuple(NodeEvent(round(time_s / MS), kind == "joined", node) for time_s, kind, node in rows)
    )
