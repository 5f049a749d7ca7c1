"""Failures of nodes: read from a file, or generated."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pandas as pd

from makespan.arguments import check_fields, typed
from makespan.errors import InputError, TraceError, cell_error, unknown_name
from makespan.hardware import ClusterSpec
from makespan.sim.state import NodeEvent, NodeEventKind
from makespan.tables import FAILURES
from makespan.traces import read_node_events, read_oobleck_nodes
from makespan.traces.cells import first_cells
from makespan.units import DAY, HOUR

RepairTimes = Literal["exponential", "constant", "lognormal"]
REPAIR_TIMES: tuple[RepairTimes, ...] = get_args(RepairTimes)
"""Distributions of the time until a node is back."""
FailureWeight = Literal["gpu", "node"]
FAILURE_WEIGHTS: tuple[FailureWeight, ...] = get_args(FailureWeight)
"""What fails: GPUs, each at the same rate and with its node, or nodes."""
REPAIR_S = 6 * HOUR
"""Mean time until a node is back [s]: 355 minutes over all failures at LANL (Schroeder and Gibson, DSN 2006,
table 2)."""
REPAIR_SIGMA = 1.94
"""Scale parameter of lognormal repair times: that of a mean of 355 and a median of 54 min (same table)."""
FAILURE_DAYS = 60.0
"""Days for which failures are generated; a choice, more than the lists of this project take."""
_MOST_FAILURES = 10**7


@dataclass(frozen=True, slots=True)
class FailureModel:
    """Random failures: a Poisson process for each GPU or node that is up, and independent repairs.

    Parameters
    ----------
    per_day
        Mean number of failures a day of the whole cluster while all nodes are up, 0 or more.
    repair_s, repair
        Mean time until a node is back [s], above 0, and its distribution, one of `REPAIR_TIMES`.
    weight
        ``gpu``: nodes fail in proportion to their GPUs; ``node``: all nodes alike.
    seed, days
        Seed of all draws, and days for which failures are generated; more of them add failures at the end and
        change none before.

    Raises
    ------
    InputError
        A number is out of range, or a name is unknown.
    """

    per_day: float
    repair_s: float = REPAIR_S
    repair: RepairTimes = "exponential"
    weight: FailureWeight = "gpu"
    seed: int = 1
    days: float = FAILURE_DAYS

    def __post_init__(self) -> None:
        """Check ranges and names."""
        check_fields(self, "failures")
        if not 0 <= self.per_day < math.inf:
            raise InputError(f"failures: per_day is {self.per_day!r}; expected a finite number, 0 or more")
        for name in ("repair_s", "days"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"failures: {name} is {getattr(self, name)!r}; expected a number above 0")
        if self.per_day * self.days > _MOST_FAILURES:
            raise InputError(
                f"failures: per_day is {self.per_day:g} for days {self.days:g}, which are "
                f"{self.per_day * self.days:.3g} failures; expected at most {_MOST_FAILURES:,} in all"
            )
        if self.seed < 0:
            raise InputError(f"failures: seed is {self.seed!r}; expected 0 or more")
        if self.repair not in REPAIR_TIMES:
            raise unknown_name("distribution of repair times", str(self.repair), REPAIR_TIMES)
        if self.weight not in FAILURE_WEIGHTS:
            raise unknown_name("weight of failures", str(self.weight), FAILURE_WEIGHTS)

    @property
    def end_s(self) -> float:
        """Time from which on nothing fails [s]."""
        return self.days * DAY

    def events(self, cluster: ClusterSpec) -> tuple[NodeEvent, ...]:
        """Return failures and returns in order of time; every node that fails returns."""
        found = [event for failure in self._failures(cluster) for event in failure]
        return tuple(sorted(found, key=lambda event: (event.time_s, event.node_id)))

    def _failures(self, cluster: ClusterSpec) -> Iterator[tuple[NodeEvent, NodeEvent]]:
        if not self.per_day:
            return
        rng = np.random.default_rng([self.seed, *b"failures"])
        weights = [node.n_gpus if self.weight == "gpu" else 1 for node in cluster.nodes]
        shares = np.cumsum(weights) / sum(weights)
        up_s = [0.0] * cluster.n_nodes
        now_s = 0.0
        while True:
            now_s += float(rng.exponential(DAY / self.per_day))
            if now_s > self.end_s:
                return
            node = int(np.searchsorted(shares, rng.random(), side="right"))
            repair_s = self._repair_s(rng)
            # A node that is down cannot fail: to leave out its draws keeps the rates of all others.
            if now_s > up_s[node]:
                up_s[node] = now_s + repair_s
                yield (
                    NodeEvent(now_s, node, NodeEventKind.FAILED),
                    NodeEvent(up_s[node], node, NodeEventKind.JOINED),
                )

    def _repair_s(self, rng: np.random.Generator) -> float:
        if self.repair == "constant":
            return self.repair_s
        if self.repair == "exponential":
            return float(rng.exponential(self.repair_s))
        log_median = math.log(self.repair_s) - REPAIR_SIGMA**2 / 2
        return float(rng.lognormal(log_median, REPAIR_SIGMA))


Failures = str | Path | FailureModel | Iterable[NodeEvent]
"""Failures as users give them: a file, a model of random ones, or events."""


@typed
def node_events(failures: Failures, cluster: ClusterSpec) -> tuple[tuple[NodeEvent, ...], str]:
    """Return failures as events, and a line about where they come from.

    A file has the columns ``time_s``, ``node_id`` and ``kind`` (schema `makespan.tables.FAILURES`), in any
    order of rows; nodes count from 0, and a node whose first row is ``joined`` is absent until then. Or it is
    a trace in Oobleck's form without header: time in ms, ``add`` or ``remove``, and the name of a node, which
    takes the lowest free number.

    Raises
    ------
    MissingDataError, TraceError
        The file is missing, or a row cannot be read, names a node that the cluster lacks, or a node fails
        that is down or joins that is up; the message names row and column.
    """
    if isinstance(failures, FailureModel):
        events = failures.events(cluster)
        span = f"{failures.days:g} days" if failures.days >= 1 else f"{failures.days * 24:g} hours"
        text = f"{failures.per_day:g} a day for {span}, seed {failures.seed}"
        return events, f"failures: {_counted(events)}, generated: {text}"
    if isinstance(failures, str | Path):
        events = _read(Path(failures), cluster)
        return events, f"failures: {_counted(events)}, read from {failures}"
    events = tuple(failures)
    return events, f"failures: {_counted(events)}, given"


def _counted(events: tuple[NodeEvent, ...]) -> str:
    n_failed = sum(event.kind is NodeEventKind.FAILED for event in events)
    nodes = len({event.node_id for event in events})
    return f"{n_failed} failures, {len(events) - n_failed} other events, of {nodes} nodes"


def _read(path: Path, cluster: ClusterSpec) -> tuple[NodeEvent, ...]:
    first = first_cells(path, FAILURES.names, "node events")
    if set(FAILURES.names) <= {name.lower() for name in first}:
        table = read_node_events(path)
    elif len(first) == 3 and first[1] in ("add", "remove"):
        table, _ = read_oobleck_nodes(path)
        table = table.assign(row=range(1, len(table) + 1))
    else:
        raise TraceError(
            f"{path}: columns {', '.join(first)} are no node events; expected {', '.join(FAILURES.names)}, "
            "or rows of time in ms, add or remove, and a node, without a header"
        )
    return tuple(_checked(table, cluster, str(path)))


def _checked(table: pd.DataFrame, cluster: ClusterSpec, where: str) -> Iterator[NodeEvent]:
    """Yield the rows of a table in order of time, and check that each node fails and joins in turn."""
    is_up: dict[int, bool] = {}
    ordered = table.sort_values(["time_s", "row"], kind="stable")
    columns = (ordered[name].tolist() for name in ("time_s", "node_id", "kind", "row"))
    for time_s, node, kind, row in zip(*columns, strict=True):
        if node >= cluster.n_nodes:
            accepted = f"0 to {cluster.n_nodes - 1}, the nodes of cluster {cluster.name!r}"
            raise cell_error(where, row, "node_id", node, accepted)
        joins = kind == NodeEventKind.JOINED
        if is_up.get(node, not joins) == joins:
            state, other = ("up", "failed") if joins else ("down", "joined")
            accepted = f"{other}, as node {node} is {state} at {time_s:g} s"
            raise cell_error(where, row, "kind", kind, accepted)
        is_up[node] = joins
        yield NodeEvent(time_s, node, NodeEventKind(kind))
