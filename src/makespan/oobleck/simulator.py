"""Simulators of Oobleck, Varuna and Bamboo over a trace of nodes, as released and with defects repaired.

Each system is a `SystemSimulator` that reacts to nodes that come and go. Each defect of the released
simulators has a switch, see `Defect`; without repairs the results are those of the release. Times are whole
milliseconds, as there, so that sums are exact. ReCycle and dropped replicas run in the same engine, repaired.
"""

import heapq
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.arguments import check_fields, typed
from makespan.errors import InputError, unknown_name
from makespan.oobleck.traces import NodeTrace
from makespan.sim import EventQueue
from makespan.units import MS

# --- Events and queues ------------------------------------------------------------------------------

_BITS = 4  # low bits of a key, for the kind


class Kind(IntEnum):
    """Kind of an event; events of one instant happen in this order."""

    ADD = 1
    REMOVE = 2
    READY = 4
    DEADLINE = 5
    LOCAL_DEADLINE = 6
    STEP_DONE = 7
    CHECKPOINT_DONE = 8


class Queue(Protocol):
    """Events to come, each with its subject."""

    def __len__(self) -> int:
        """Return the number of events."""

    def push(self, time_ms: int, kind: Kind, subject: Any) -> None:
        """Enter an event."""

    def pop(self) -> tuple[int, Kind, Any]:
        """Remove and return the next event."""

    def next_ms(self) -> int:
        """Return the time of the next event [ms]; there must be one."""


class _Entry(int):
    """Key that compares as a number, time before kind, with the subject of the event."""

    subject: Any


class HeapList:
    """Binary heap whose storage order can be read, as the released simulators do; it also breaks ties."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, time_ms: int, kind: Kind, subject: Any) -> None:
        """Enter an event."""
        entry = _Entry((time_ms << _BITS) | kind)
        entry.subject = subject
        heapq.heappush(self._heap, entry)

    def pop(self) -> tuple[int, Kind, Any]:
        """Remove and return the next event."""
        entry = heapq.heappop(self._heap)
        return entry >> _BITS, _KINDS[entry & _MASK], entry.subject

    def next_ms(self) -> int:
        """Return the time of the next event [ms]."""
        return self._heap[0] >> _BITS

    def comes_first(self, kind: Kind, other: Kind) -> bool:
        """Tell whether one kind precedes the first of another in storage, which is no order in time."""
        for entry in self._heap:
            if entry & _MASK == other:
                return False
            if entry & _MASK == kind:
                return True
        return False


_MASK = (1 << _BITS) - 1
_KINDS = {int(kind): kind for kind in Kind}


class SharedQueue:
    """Queue of the cluster simulator: equal times and kinds come in the order of entry."""

    def __init__(self) -> None:
        self._queue: EventQueue[tuple[int, Kind, Any]] = EventQueue()

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, time_ms: int, kind: Kind, subject: Any) -> None:
        """Enter an event."""
        self._queue.push(time_ms * MS, kind, (time_ms, kind, subject))

    def pop(self) -> tuple[int, Kind, Any]:
        """Remove and return the next event."""
        return self._queue.pop()[1]

    def next_ms(self) -> int:
        """Return the time of the next event [ms]."""
        return round(self._queue.next_time_s() / MS)


# --- Defects of the released simulators -------------------------------------------------------------


class Defect(StrEnum):
    """Defect of the released simulators; each comment has the defect, then its repair."""

    D1 = "D1"  # a second deadline stops a job that has just restarted: a new rendezvous replaces the old
    D2 = "D2"  # joined nodes idle until a removal: the job is planned anew where that pays within a horizon
    D3 = "D3"  # losing an idle node restarts all: it is ignored
    D4 = "D4"  # averages end with the last step: they span the first ready node to the end of the trace
    D5 = "D5"  # categories of time overlap: each millisecond counts once
    D6 = "D6"  # storage order of a heap decides whether a checkpoint fails, at twice its duration: time does
    D7 = "D7"  # a throughput of 0 becomes an endless step: the job waits for nodes
    D8 = "D8"  # the last event of a trace is dropped: it happens
    D9 = "D9"  # Fig. 10 shows zeros for Varuna on GPT-3 6.7B: it shows what was simulated
    D10 = "D10"  # below 15 nodes a job runs as fast as on 15: it waits for nodes
    D11 = "D11"  # steps continue while a job restarts: the step at a removal is lost
    D12 = "D12"  # rates and times of Varuna's steps diverge: one record per step


DEFECTS = tuple(Defect)
"""All of them, in order."""
MODES = ("compat", "fixed")
"""As released, and with every defect repaired."""


def switches(text: str) -> frozenset[Defect]:
    """Read names of defects, separated by commas or spaces."""
    defects = {defect.value: defect for defect in DEFECTS}
    names = text.replace(",", " ").split()
    for name in names:
        if name.upper() not in defects:
            raise unknown_name("defect", name, list(defects))
    return frozenset(defects[name.upper()] for name in names)


@typed
def repairs(mode: str, switched: Iterable[Defect] = ()) -> frozenset[Defect]:
    """Return the repaired defects: none in ``compat``, all in ``fixed``, except for those switched."""
    if mode not in MODES:
        raise unknown_name("mode of a simulator", mode, MODES)
    return frozenset(switched) if mode == "compat" else frozenset(DEFECTS) - frozenset(switched)


# --- Costs of a system on a model -------------------------------------------------------------------

SYSTEMS = ("bamboo", "varuna", "oobleck")
"""Systems of the released simulators, in the order of the figures."""
PEER_SYSTEMS = ("recycle", "replica-drop")
"""Systems of equal pipelines whose workers stand in for each other; all defects must be repaired."""
_ENDLESS_MS = 10**12  # the released step of a job that cannot run
_Number = TypeVar("_Number", int, float)


class PeerPipelines(Protocol):
    """Equal pipelines and their throughput; see `makespan.oobleck.rerouting.PeerRates`."""

    @property
    def n_stages(self) -> int:
        """Stages of a pipeline."""

    @property
    def n_pipelines(self) -> int:
        """Pipelines if no node is lost."""

    @property
    def full_samples_per_s(self) -> float:
        """Samples per second if no node is lost."""

    def samples_per_s(self, live: Sequence[int], n_pipelines: int) -> float:
        """Return the samples per second of so many pipelines with so many live workers in each stage."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Input of a simulation, besides the trace.

    Parameters
    ----------
    samples_per_step
        Global batch.
    throughput
        Samples per second by number of nodes; empty if the model never fits, 0 if it does not run on so many.
    creation_ms
        Time from the arrival of a node until it is ready.
    global_ms, local_ms
        Rendezvous of all nodes, and the one by which Bamboo takes in spare nodes.
    checkpoint_ms, checkpoint_every
        Time to write a checkpoint, and steps between checkpoints.
    charges_checkpoints
        Whether writing a checkpoint takes that time; if not, no checkpoint fails.
    restart_ms, restart_by_nodes_ms
        Varuna: restart from a checkpoint, including the checkpoint, at first and by number of nodes of
        the last rendezvous.
    idle_gpus
        GPUs that Varuna's plan leaves idle, by number of nodes.
    falls_back
        Whether Varuna loses the steps since the last checkpoint.
    n_stages, slow_down, overload_limit, useful_share
        Stages of a pipeline; Bamboo: factor of a step while a node does the work of two, share of such nodes
        above which it plans anew, share of a step that the release counts as useful.
    plain_throughput
        Samples per second without redundant work; where it is unknown or 0, such work counts as useful.
    horizon_ms
        Time within which joined nodes must pay for a new plan (repair of D2).
    peers
        Pipelines and their throughput by live workers; only `PEER_SYSTEMS` have them.
    model
        Name of the model, for messages.
    """

    samples_per_step: int
    throughput: Mapping[int, float]
    creation_ms: int
    global_ms: int
    local_ms: int = 0
    checkpoint_ms: int = 0
    checkpoint_every: int = 10
    charges_checkpoints: bool = True
    restart_ms: int = 0
    restart_by_nodes_ms: Mapping[int, int] | None = None
    idle_gpus: Mapping[int, int] | None = None
    falls_back: bool = True
    n_stages: int = 12
    slow_down: float = 1.5
    overload_limit: float = 0.05
    useful_share: float = 1.0
    plain_throughput: Mapping[int, float] | None = None
    horizon_ms: int = 3_600_000
    peers: PeerPipelines | None = None
    model: str = ""

    def __post_init__(self) -> None:
        times = ("creation_ms", "global_ms", "local_ms", "checkpoint_ms", "restart_ms", "horizon_ms")
        counts = ("samples_per_step", "checkpoint_every", "n_stages")
        check_fields(
            self,
            "costs",
            positive=(*counts, "slow_down"),
            not_negative=(*times, "overload_limit", "useful_share"),
        )

    def known(self, n_nodes: int) -> int:
        """Return the nearest number of nodes in the table of throughput."""
        return _nearest(self.throughput, n_nodes)

    def samples_per_s(self, n_nodes: int, repaired: frozenset[Defect]) -> float:
        """Return the throughput; nodes beyond the table are idle, too few nodes give 0 (repair of D10)."""
        if Defect.D10 in repaired and n_nodes < min(self.throughput):
            return 0.0
        return _entry(self.throughput, self.known(n_nodes), "throughput", self.model)

    def plain_samples_per_s(self, n_nodes: int) -> float:
        """Return the throughput without redundant work, that of the nearest number of nodes; 0 if unknown."""
        plain = self.plain_throughput
        if not plain:
            return 0.0
        name = "varuna's throughput, that without redundant work,"
        return _entry(plain, _nearest(plain, n_nodes), name, self.model)

    def step_ms(self, n_nodes: int, repaired: frozenset[Defect]) -> int | None:
        """Return the time of a step; None if the job must wait for nodes."""
        rate = self.samples_per_s(n_nodes, repaired)
        if rate > 0:
            return max(int(1000 * self.samples_per_step / rate), 1)
        # As released, fewer nodes than in the table run at the rate of its first row, even if that is 0.
        waits_below = Defect.D10 in repaired and n_nodes < min(self.throughput)
        return None if Defect.D7 in repaired or waits_below else _ENDLESS_MS


def _nearest(table: Mapping[int, object], n_nodes: int) -> int:
    """Return a number of nodes, limited to the range that a table covers."""
    return min(max(n_nodes, min(table)), max(table))


def _entry(table: Mapping[int, _Number], n_nodes: int, name: str, model: str) -> _Number:
    """Return the entry of a table for a number of nodes; raise an `InputError` if it has none."""
    if n_nodes not in table:
        of = f" of {model!r}" if model else ""
        known = ", ".join(map(str, sorted(table)))
        raise InputError(f"{name}{of} on {n_nodes} nodes is missing in the table; it has: {known}")
    return table[n_nodes]


def check_restarts(system: str, costs: Costs) -> None:
    """Reject restarts that are shorter than the checkpoint that they include.

    Only Varuna and `PEER_SYSTEMS` restart from checkpoints. Raises `InputError`, which names both times.
    """
    if system not in ("varuna", *PEER_SYSTEMS):
        return
    restarts = [(costs.restart_ms, "restart_s")]
    if system == "varuna":
        by_nodes = costs.restart_by_nodes_ms or {}
        restarts += [(ms, f"published_restart_s on {n} nodes") for n, ms in sorted(by_nodes.items())]
    for restart_ms, name in restarts:
        if restart_ms < costs.checkpoint_ms:
            raise InputError(
                f"{system}: {name} of {restart_ms * MS:g} s, which includes a checkpoint, and checkpoint_s "
                f"of {costs.checkpoint_ms * MS:g} s; expected a restart that is as long or longer"
            )


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Configured costs of one model; times [s]."""

    name: str
    samples_per_step: int
    regroup_s: float
    checkpoint_s: float
    restart_s: float
    local_rebalance_s: float
    falls_back_on_spot: bool


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Configured assumptions about the systems; times [s]."""

    node_creation_s: float
    n_stages: int
    checkpoint_every: int
    bamboo_restart_s: float
    slow_down: float
    overload_limit: float
    useful_share: float
    horizon_s: float


_COLUMNS = ("published_samples_per_s", "published_restart_s", "published_idle_gpus")
_LARGEST = 1e12  # of any of them


class Systems:
    """Costs of every system on every model, from printed cells and configuration.

    Parameters
    ----------
    cells
        Throughput, restart times and idle GPUs by model, system and number of nodes, schema
        ``published_throughput``; a model that does not fit under a system has no rows.
    models, assumptions
        Entries of the configuration; see `ModelCosts` and `Assumptions`.

    Raises
    ------
    InputError
        A model has no throughput under any system, or a row of the table is invalid.
    """

    def __init__(
        self, cells: pd.DataFrame, models: Sequence[Mapping[str, Any]], assumptions: Mapping[str, Any]
    ) -> None:
        self.models = {model["name"]: ModelCosts(**model) for model in models}
        self._assumed = Assumptions(**assumptions)
        again = cells.duplicated(["model", "system", "n_nodes"])
        rate, restart_s, idle = (cells[name] for name in _COLUMNS)
        for problem, is_wrong in (
            ("occurs twice; expected once", again),
            (f"has an unknown system; expected {', '.join(SYSTEMS)}", ~cells["system"].isin(SYSTEMS)),
            ("has too few nodes; expected 1 or more", cells["n_nodes"] < 1),
            ("is below 0 or not finite; expected 0 or more", ~rate.between(0, _LARGEST)),
            (f"has a {_COLUMNS[1]} below 0 or not finite", ~restart_s.fillna(0).between(0, _LARGEST)),
            (
                f"has {_COLUMNS[2]} that are not a whole number >= 0",
                ~idle.fillna(0).between(0, _LARGEST) | (idle.fillna(0) % 1 != 0),
            ),
        ):
            rows = cells[is_wrong]
            for model, system, n_nodes in rows[["model", "system", "n_nodes"]].to_numpy().tolist()[:1]:
                raise InputError(f"throughput of {model!r}, {system}, {n_nodes} nodes {problem}")
        self._cells = dict(list(cells.groupby(["model", "system"])))
        for name in self.models:
            if not any((name, system) in self._cells for system in SYSTEMS):
                known = ", ".join(sorted({str(model) for model, _ in self._cells}))
                raise InputError(f"model {name!r} has no throughput; there is one of: {known}")

    def costs(
        self, system: str, model: str, *, falls_back: bool = True, checkpoint_every: int | None = None,
        charges_checkpoints: bool = True, n_stages: int | None = None,
    ) -> Costs:  # fmt: skip
        """Return the costs of a system on a model.

        Parameters
        ----------
        system, model
            Their names.
        falls_back, checkpoint_every, charges_checkpoints
            Varuna's, see `Costs`.
        n_stages
            Stages of a pipeline; None for the configured number.

        Raises
        ------
        UnknownNameError
            There is no such system or model.
        InputError
            A restart is shorter than its checkpoint.
        """
        if system not in SYSTEMS:
            raise unknown_name("system", system, SYSTEMS)
        if model not in self.models:
            raise unknown_name("model", model, self.models)
        configured, assumed = self.models[model], self._assumed
        global_s = {"bamboo": assumed.bamboo_restart_s, "oobleck": configured.regroup_s}.get(system, 0.0)
        restarts = self._column(system, model, _COLUMNS[1])
        costs = Costs(
            samples_per_step=configured.samples_per_step,
            throughput=self._column(system, model, _COLUMNS[0]),
            creation_ms=_ms(assumed.node_creation_s),
            global_ms=_ms(global_s),
            local_ms=_ms(configured.local_rebalance_s),
            checkpoint_ms=_ms(configured.checkpoint_s),
            checkpoint_every=checkpoint_every or assumed.checkpoint_every,
            charges_checkpoints=charges_checkpoints,
            restart_ms=_ms(configured.restart_s),
            restart_by_nodes_ms={n: _ms(value) for n, value in restarts.items()},
            idle_gpus={n: int(value) for n, value in self._column(system, model, _COLUMNS[2]).items()},
            falls_back=falls_back,
            n_stages=assumed.n_stages if n_stages is None else n_stages,
            slow_down=assumed.slow_down,
            overload_limit=assumed.overload_limit,
            useful_share=assumed.useful_share,
            plain_throughput=self._column("varuna", model, _COLUMNS[0]),
            horizon_ms=_ms(assumed.horizon_s),
            model=model,
        )
        check_restarts(system, costs)
        return costs

    def _column(self, system: str, model: str, column: str) -> dict[int, float]:
        """Return a column by number of nodes, without missing values."""
        rows = self._cells.get((model, system))
        if rows is None:
            return {}
        pairs = zip(rows["n_nodes"].tolist(), rows[column].tolist(), strict=True)
        return {int(n): float(value) for n, value in pairs if value == value}  # NaN differs from itself


def _ms(time_s: float) -> int:
    return round(time_s / MS)


# --- Records of a run: its steps, and where its time went -------------------------------------------


class Category(StrEnum):
    """Category of time, in the order of the figures."""

    USEFUL = "useful"
    REDUNDANT = "redundant"
    CHECKPOINT = "checkpoint"
    RESTART = "restart"
    REBALANCE = "rebalance"
    LOST = "lost"
    STALLED = "stalled"
    IDLE = "idle"  # of GPUs without work while others train; no part of the wall time


Run = tuple[int, int, int, float]
"""Start and end of consecutive equal steps [ms], their number, and the samples of each that count."""


class Steps:
    """One record for each step, or for several steps without an event between them."""

    def __init__(self) -> None:
        self._runs: list[Run] = []

    def add(self, start_ms: int, end_ms: int, samples: float, n_steps: int = 1) -> None:
        """Enter finished steps."""
        self._runs.append((min(start_ms, end_ms), end_ms, n_steps, samples))

    def lose_from(self, time_ms: int | None) -> int:
        """Void the steps that start at a time or later, all if None; return twice their number less one.

        The result is the number of entries that the released lists would set to 0.
        """
        n_lost = 0
        for index in range(len(self._runs) - 1, -1, -1):
            if time_ms is not None and self._runs[index][0] < time_ms:
                break
            n_lost += self._lose(index)
        return max(2 * n_lost - 1, 0)

    def _lose(self, index: int) -> int:
        start_ms, end_ms, n_steps, _ = self._runs[index]
        self._runs[index] = start_ms, end_ms, n_steps, 0.0
        return n_steps

    def lose_last(self, n_steps: int) -> None:
        """Void the last steps."""
        index = len(self._runs)
        while n_steps > 0 and index > 0:
            index -= 1
            n_steps -= self._lose(index)

    def lose_steps(self, n_steps: int) -> int:
        """Void exactly the last steps that count, and return the time that they took [ms]."""
        lost_ms, index = 0, len(self._runs)
        while n_steps > 0 and index > 0:
            index -= 1
            start_ms, end_ms, count, samples = self._runs[index]
            if not samples:
                continue
            part = min(n_steps, count)
            middle_ms = end_ms - (end_ms - start_ms) // count * part
            kept = [(start_ms, middle_ms, count - part, samples)] if part < count else []
            self._runs[index : index + 1] = [*kept, (middle_ms, end_ms, part, 0.0)]
            lost_ms += end_ms - middle_ms
            n_steps -= part
        return lost_ms

    def runs(self) -> list[Run]:
        """Return all steps."""
        return self._runs


class ReleasedStepLog:
    """Steps as released: start and end of every step in one list, its rate twice in another (defect D12)."""

    def __init__(self) -> None:
        self._times_ms: list[int] = []
        self._rates: list[float] = []

    def add(self, start_ms: int, end_ms: int, samples: float, n_steps: int = 1) -> None:
        """Enter finished steps; an interval may have any sign."""
        step_ms = (end_ms - start_ms) // n_steps
        rate = samples / step_ms if step_ms else 0.0
        for step in range(n_steps):
            self._times_ms += (start_ms + step * step_ms, start_ms + (step + 1) * step_ms)
        self._rates += [rate] * (2 * n_steps)

    def lose_from(self, time_ms: int | None) -> int:
        """Set rates after the first entry of that time to 0, all if None; return their number."""
        try:
            first = 0 if time_ms is None else self._times_ms.index(time_ms) + 1
        except ValueError:
            first = len(self._times_ms)
        n_lost = max(len(self._rates) - first, 0)
        self._rates[first:] = [0.0] * n_lost
        return n_lost

    def lose_last(self, n_steps: int) -> None:
        """Set the last rates to 0; if there are fewer, the list grows, as released."""
        self._rates[-2 * n_steps :] = [0.0] * (2 * n_steps)

    def runs(self) -> list[Run]:
        """Return the intervals with the second rate of each pair, as the averages take them."""
        times, rates = self._times_ms, self._rates
        pairs = zip(times[::2], times[1::2], rates[1::2], strict=False)
        return [(start, end, 1, (end - start) * rate) for start, end, rate in pairs]


@dataclass(slots=True)
class Account:
    """Time by category, counted as in the released simulators, and with each millisecond counted once.

    Released categories overlap (defect D5). In ``spent_ms`` each millisecond from the first ready node on has
    exactly one category; it is entered when the time is over, but may be held in advance up to some time.
    """

    released_ms: dict[Category, int] = field(default_factory=lambda: dict.fromkeys(Category, 0))
    spent_ms: dict[Category, int] = field(default_factory=lambda: dict.fromkeys(Category, 0))
    _cursor_ms: int | None = None
    _held: tuple[Category, int] | None = None
    _uncommitted_ms: int = 0

    def open(self, time_ms: int) -> None:
        """Begin with the first ready node."""
        if self._cursor_ms is None:
            self._cursor_ms = time_ms

    def hold(self, category: Category, until_ms: int) -> None:
        """Set in advance the category of the time up to ``until_ms``, unless the run ends before."""
        self._held = category, until_ms

    def spend(self, category: Category, until_ms: int, useful_ms: int | None = None) -> None:
        """Close the time up to now; the first ``useful_ms`` of it are useful, the rest has the category."""
        start_ms = self._cursor_ms
        if start_ms is None:
            return
        if self._held is not None:
            # The time held in advance comes first.
            held, end_ms = self._held
            if end_ms <= until_ms:
                self._held = None
            if min(end_ms, until_ms) > start_ms:
                self.spent_ms[held] += min(end_ms, until_ms) - start_ms
                self._cursor_ms = start_ms = min(end_ms, until_ms)
        if until_ms <= start_ms:
            return
        if useful_ms is not None and start_ms + useful_ms < until_ms:
            self.spent_ms[Category.USEFUL] += useful_ms
            start_ms += useful_ms
        self.spent_ms[category] += until_ms - start_ms
        self._cursor_ms = until_ms
        if category is Category.USEFUL:
            self._uncommitted_ms += until_ms - start_ms

    def drop_held(self) -> None:
        """Forget the category set in advance."""
        self._held = None

    def commit(self) -> None:
        """Protect the useful time so far from later losses, as a checkpoint does."""
        self._uncommitted_ms = 0

    def lose_uncommitted(self) -> None:
        """Turn useful time since the last commit into lost time."""
        self.spent_ms[Category.USEFUL] -= self._uncommitted_ms
        self.spent_ms[Category.LOST] += self._uncommitted_ms
        self._uncommitted_ms = 0

    def lose(self, useful_ms: int) -> None:
        """Turn so much of the useful time into lost time."""
        self.spent_ms[Category.USEFUL] -= useful_ms
        self.spent_ms[Category.LOST] += useful_ms

    def times_s(self, *, counts_once: bool) -> dict[str, float]:
        """Return the time of each category [s], each millisecond counted once, or as released."""
        chosen_ms = self.spent_ms if counts_once else self.released_ms
        times = {category.value: chosen_ms[category] * MS for category in Category}
        return times | {Category.IDLE.value: self.released_ms[Category.IDLE] * MS}


# --- Base of the simulated systems -------------------------------------------------------------------

ALL = 10**18
"""Number of steps that means no limit."""


class State(Enum):
    """State of the job."""

    STOPPED = "stopped"  # waits for nodes
    RENDEZVOUS = "rendezvous"
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class Node:
    """Node that is present.

    Attributes
    ----------
    is_ready, is_used
        Whether it has been created, and whether it takes part in the plan or in the rendezvous.
    coordinates
        Pipelines and stages that it runs.
    """

    is_ready: bool = False
    is_used: bool = False
    coordinates: list[tuple[int, int]] = field(default_factory=list)


class SystemSimulator(ABC):
    """One system on one trace: nodes that come and go, rendezvous, and steps; call `run` once.

    A rendezvous ends at a deadline, which places the nodes that met and starts steps. `version` changes with
    every plan, so that the end of a step of an earlier plan is ignored.
    """

    rendezvous_category = Category.RESTART

    def __init__(self, trace: NodeTrace, costs: Costs, repaired: frozenset[Defect]) -> None:
        self.trace, self.costs, self.repaired = trace, costs, repaired
        self.heap = None if Defect.D6 in repaired else HeapList()
        self.queue: Queue = SharedQueue() if self.heap is None else self.heap
        self.steps = Steps() if Defect.D12 in repaired else self._released_steps()
        self.account = Account()
        self.sees_storage = True  # if the storage order of the heap counts, each step must pass through it
        self.nodes: dict[str, Node] = {}
        self.state, self.has_lost_member = State.STOPPED, False
        self.members: list[Node] = []
        self.waiting = self.n_pipelines = self.n_used = 0
        self.version = self.deadline = 0
        self.n_ready = self.n_steps = self.n_failures = 0
        self.step_ms = 0
        self.first_ready_ms: int | None = None
        self.start_ms: int | None = None
        self.previous_ms = self.last_step_ms = 0

    def _released_steps(self) -> Steps | ReleasedStepLog:
        return Steps()

    def is_repaired(self, defect: Defect) -> bool:
        """Tell whether a defect is repaired."""
        return defect in self.repaired

    def run(self) -> None:
        """Process events up to the time of the last event of the trace."""
        for event in self.trace.events:
            self.queue.push(event.time_ms, Kind.ADD if event.is_added else Kind.REMOVE, event.node)
        handle: dict[Kind, Callable[[int, Any], None]] = {
            Kind.ADD: self._add,
            Kind.REMOVE: self._remove,
            Kind.READY: self._ready,
            Kind.DEADLINE: self._deadline_over,
            Kind.LOCAL_DEADLINE: self._deadline_over,
            Kind.STEP_DONE: self._step_done,
            Kind.CHECKPOINT_DONE: self.checkpoint_done,
        }
        last_ms = self.trace.end_ms - (not self.is_repaired(Defect.D8))
        while self.queue:
            time_ms, kind, subject = self.queue.pop()
            if time_ms > last_ms:
                break
            handle[kind](time_ms, subject)
        self.close_time(self.trace.end_ms)

    def _add(self, time_ms: int, name: str) -> None:
        self.nodes[name] = Node()
        self.queue.push(time_ms + self.costs.creation_ms, Kind.READY, name)

    def _ready(self, time_ms: int, name: str) -> None:
        node = self.nodes.get(name)
        if node is None:
            return
        node.is_ready = True
        self.n_ready += 1
        if self.first_ready_ms is None:
            self.first_ready_ms = time_ms
            self.account.open(time_ms)
        if self.state is State.STOPPED:
            self.close_time(time_ms)
            self.meet(time_ms)
        elif self.state is State.RENDEZVOUS:
            node.is_used = True
            self.members.append(node)
        else:
            self.waiting += 1

    def _remove(self, time_ms: int, name: str) -> None:
        node = self.nodes.pop(name)
        self.n_failures += 1
        self.n_ready -= node.is_ready
        self.has_lost_member |= node.is_used
        if not self.is_repaired(Defect.D3) or self.needs(node):
            self.lose(time_ms, node)
        elif node.is_ready and self.state is State.RUNNING:
            self.waiting -= 1

    def needs(self, node: Node) -> bool:
        """Tell whether a node takes part in the plan or in the rendezvous."""
        return node.is_used and self.state is not State.STOPPED

    @abstractmethod
    def lose(self, time_ms: int, node: Node) -> None:
        """React to the loss of a node, which has already been removed from `nodes`."""

    @abstractmethod
    def rendezvous_ms(self) -> int:
        """Return how long a rendezvous of all nodes takes."""

    @abstractmethod
    def placed(self, n_nodes: int) -> None:
        """React to a new plan."""

    @abstractmethod
    def checkpoint_done(self, time_ms: int, subject: Any) -> None:
        """React to the end of a checkpoint."""

    def step_done(self, time_ms: int) -> None:
        """React to the end of a step of the present plan: take in joined nodes if that pays, and continue."""
        self.record(time_ms)
        if self.pays(self.costs.global_ms):
            self.meet(time_ms)
        else:
            self.next_step(time_ms)

    def meet(self, time_ms: int, delay_ms: int | None = None) -> None:
        """Start a rendezvous: a global one, or a local one that takes ``delay_ms``."""
        self.state, self.has_lost_member = State.RENDEZVOUS, False
        self.members = [node for node in self.nodes.values() if node.is_ready]
        for node in self.nodes.values():
            node.is_used = node.is_ready
        if self.is_repaired(Defect.D11):
            self.version += 1
        self.deadline += 1
        is_local = delay_ms is not None
        length_ms = self.rendezvous_ms() if delay_ms is None else delay_ms
        category = Category.REBALANCE if is_local else self.rendezvous_category
        self.account.released_ms[category] += length_ms
        kind = Kind.LOCAL_DEADLINE if is_local else Kind.DEADLINE
        self.queue.push(time_ms + length_ms, kind, (self.deadline, delay_ms))

    def _deadline_over(self, time_ms: int, subject: tuple[int, int | None]) -> None:
        deadline, delay_ms = subject
        if self.is_repaired(Defect.D1) and deadline != self.deadline:
            return
        self.close_time(time_ms, is_local=delay_ms is not None)
        if self.has_lost_member and self.members:
            self.meet(time_ms, delay_ms)
        else:
            self._place(time_ms)

    def _place(self, time_ms: int) -> None:
        """Assign stages to the nodes that met; too few nodes stop the job."""
        members, n_stages = self.members, self.costs.n_stages
        self.n_pipelines = len(members) // n_stages
        n_placed = n_stages * self.n_pipelines
        for index, node in enumerate(members):
            node.coordinates = [divmod(index, n_stages)] if index < n_placed else []
        if self.is_repaired(Defect.D10):
            for node in members[max(self.costs.throughput) :]:
                node.is_used = False  # beyond what throughput is known for: a spare
        self.waiting = len(members) - n_placed
        self.n_used, self.members = len(members), []
        self.version += 1
        step_ms = self.costs.step_ms(self.n_ready, self.repaired) if self.n_pipelines else None
        if step_ms is None:
            self.state = State.STOPPED
            return
        self.state, self.step_ms = State.RUNNING, step_ms
        if self.start_ms is None:
            self.start_ms = self.previous_ms = time_ms
        elif self.is_repaired(Defect.D11) and isinstance(self.steps, Steps):
            self.previous_ms = time_ms
        self.placed(self.n_ready)
        self.next_step(time_ms)

    def next_step(self, time_ms: int) -> None:
        """Start a step; before it, record at once all steps that end before anything else happens."""
        is_free = self.heap is None or not self.sees_storage
        if is_free and self.previous_ms == time_ms:
            free_ms = min(self.queue.next_ms(), self.trace.end_ms) - time_ms - 1
            n_steps = min(free_ms // self.step_ms, self.alike())
            if n_steps >= 1:
                self.count_released_steps(n_steps)
                self.record(time_ms + n_steps * self.step_ms, n_steps)
                time_ms = self.previous_ms
        self.count_released_steps(1)
        self.end_step_at(time_ms + self.step_ms)

    def alike(self) -> int:
        """Return the number of steps from now on that end without an action unless nodes have joined."""
        return ALL

    def end_step_at(self, time_ms: int) -> None:
        """Schedule the end of the step."""
        self.queue.push(time_ms, Kind.STEP_DONE, self.version)

    def count_released_steps(self, n_steps: int) -> None:
        """Count starting steps as useful time, as released."""
        self.account.released_ms[Category.USEFUL] += n_steps * self.step_ms

    def _step_done(self, time_ms: int, version: int) -> None:
        if version == self.version:
            self.step_done(time_ms)

    def record(self, time_ms: int, n_steps: int = 1) -> None:
        """Enter finished steps."""
        self.steps.add(self.previous_ms, time_ms, self.step_samples(), n_steps)
        self.spend_steps(time_ms, n_steps)
        self.previous_ms = self.last_step_ms = time_ms
        self.n_steps += n_steps

    def step_samples(self) -> float:
        """Return the samples of a step."""
        return self.costs.samples_per_step

    def spend_steps(self, time_ms: int, n_steps: int) -> None:
        """Account for steps that end now."""
        self.account.spend(Category.USEFUL, time_ms)

    def close_time(self, time_ms: int, *, is_local: bool = False) -> None:
        """Account for the time up to now by the state of the job; a step that did not end is lost."""
        category = {
            State.RUNNING: Category.LOST,
            State.STOPPED: Category.STALLED,
            State.RENDEZVOUS: Category.REBALANCE if is_local else self.rendezvous_category,
        }[self.state]
        self.account.spend(category, time_ms)

    def pays(self, cost_ms: int) -> bool:
        """Tell whether a new plan for the nodes that have joined is worth its cost (repair of D2)."""
        if self.n_ready == self.n_used or not self.is_repaired(Defect.D2):
            return False
        new, old = (self.costs.samples_per_s(n, self.repaired) for n in (self.n_ready, self.n_used))
        return new * (self.costs.horizon_ms - cost_ms) > old * self.costs.horizon_ms


# --- The systems ------------------------------------------------------------------------------------


class OobleckMachine(SystemSimulator):
    """Oobleck: every loss regroups the nodes and copies state; only the running step is lost."""

    rendezvous_category = Category.REBALANCE

    def __init__(self, trace: NodeTrace, costs: Costs, repaired: frozenset[Defect]) -> None:
        super().__init__(trace, costs, repaired)
        self.sees_storage = Defect.D3 in repaired  # else it does not matter which nodes are present

    def rendezvous_ms(self) -> int:
        """Return the time of regrouping, copying and building groups."""
        return self.costs.global_ms

    def placed(self, n_nodes: int) -> None:
        """Do nothing: a plan has no memory."""

    def checkpoint_done(self, time_ms: int, subject: Any) -> None:
        """Do nothing: there are no checkpoints."""

    def lose(self, time_ms: int, node: Node) -> None:
        """Regroup at once."""
        self.account.released_ms[Category.LOST] += self.step_ms
        self.close_time(time_ms)
        self.meet(time_ms)


class VarunaMachine(SystemSimulator):
    """Varuna: every loss restarts the job from the last checkpoint, on the nodes that are left."""

    committed_ms: int | None = None  # time of the checkpoint from which a restart resumes
    writing_ms: int | None = None  # end of the checkpoint that is being written (repair of D6)
    has_removal = False  # since the last finished step
    n_nodes = 0

    def __init__(self, trace: NodeTrace, costs: Costs, repaired: frozenset[Defect]) -> None:
        super().__init__(trace, costs, repaired)
        self.sees_storage = costs.falls_back and costs.charges_checkpoints

    def _released_steps(self) -> Steps | ReleasedStepLog:
        return ReleasedStepLog()

    def rendezvous_ms(self) -> int:
        """Return the time of a restart, without the checkpoint that it includes."""
        by_nodes = self.costs.restart_by_nodes_ms
        restart_ms = self.costs.restart_ms
        if by_nodes and self.n_nodes:
            restart_ms = _entry(by_nodes, self.n_nodes, "varuna's restart time", self.costs.model)
        return restart_ms - self.costs.checkpoint_ms

    def placed(self, n_nodes: int) -> None:
        """Store the number of nodes, which sets the time of the next restart."""
        self.n_nodes = self.costs.known(n_nodes)

    def spend_steps(self, time_ms: int, n_steps: int) -> None:
        """Account for steps, and for the GPUs that they leave idle."""
        idle, by_nodes = 0, self.costs.idle_gpus
        if by_nodes:
            idle = _entry(by_nodes, self.n_nodes, "varuna's number of idle GPUs", self.costs.model)
        self.account.released_ms[Category.IDLE] += (time_ms - self.previous_ms) * idle // self.n_nodes
        super().spend_steps(time_ms, n_steps)

    def lose(self, time_ms: int, node: Node) -> None:
        """Fall back to the last checkpoint and restart."""
        self.has_removal = True
        # A checkpoint that ends now counts, even if its event comes after that of the removal.
        if self.writing_ms is not None and self.writing_ms <= time_ms:
            self.checkpoint_done(self.writing_ms, self.writing_ms)
        self.writing_ms = None
        if self.costs.falls_back:
            lost_ms = self.account.released_ms
            n_lost = self.steps.lose_from(self.committed_ms)
            lost_ms[Category.LOST] += time_ms if self.committed_ms is None else self.step_ms * n_lost
        self.close_time(time_ms)
        self.account.drop_held()
        if self.costs.falls_back:
            self.account.lose_uncommitted()
        self.meet(time_ms)

    def alike(self) -> int:
        """Return the number of steps before the next checkpoint."""
        every = self.costs.checkpoint_every
        return 0 if self.has_removal else every - 1 - self.n_steps % every

    def step_done(self, time_ms: int) -> None:
        """Continue, with a checkpoint when one is due, and after the first step of a restart."""
        self.record(time_ms)
        joins = self.pays(self.rendezvous_ms() + self.costs.checkpoint_ms)
        next_ms = time_ms
        if self.n_steps % self.costs.checkpoint_every == 0 or self.has_removal or joins:
            next_ms = self._checkpoint(time_ms)
        if joins:
            self.meet(next_ms)
        else:
            self.next_step(next_ms)

    def _checkpoint(self, time_ms: int) -> int:
        """Write a checkpoint and return the start of the next step [ms]."""
        self.has_removal = False
        cost_ms = self.costs.checkpoint_ms
        if not self.costs.charges_checkpoints:
            self._commit(time_ms)
            return time_ms
        end_ms = self.previous_ms = time_ms + cost_ms
        self.account.released_ms[Category.CHECKPOINT] += cost_ms
        self.account.hold(Category.CHECKPOINT, end_ms)
        if self.is_repaired(Defect.D6):
            self.writing_ms = end_ms
            self.queue.push(end_ms, Kind.CHECKPOINT_DONE, end_ms)
        else:
            self._released_checkpoint(end_ms)
        return end_ms

    def _released_checkpoint(self, end_ms: int) -> None:
        """Decide by storage order if a checkpoint fails, as released (defect D6).

        A marker is pushed at twice the duration of the checkpoint; the checkpoint fails if a removal precedes
        the first marker in the storage of the heap, whenever that removal happens.
        """
        self.queue.push(end_ms + self.costs.checkpoint_ms, Kind.CHECKPOINT_DONE, None)
        every, heap = self.costs.checkpoint_every, self.heap
        is_late = heap is not None and heap.comes_first(Kind.REMOVE, Kind.CHECKPOINT_DONE)
        if self.costs.falls_back and is_late:
            self.n_steps = max(self.n_steps - every, 0)
            self.steps.lose_last(every)
            self.account.released_ms[Category.LOST] += every * self.step_ms
            self.account.lose_uncommitted()
        else:
            self._commit(end_ms)

    def checkpoint_done(self, time_ms: int, subject: Any) -> None:
        """Commit the checkpoint, unless a removal came first."""
        if subject is not None and subject == self.writing_ms:
            self.writing_ms = None
            self._commit(time_ms)

    def _commit(self, time_ms: int) -> None:
        self.committed_ms = time_ms
        self.account.commit()


@dataclass(slots=True)
class _SlowDown:
    """Begin of slower steps: steps done and time then, and whether the running step was extended."""

    n_steps: int
    time_ms: int
    has_paid: bool = False


class BambooMachine(SystemSimulator):
    """Bamboo: nodes do part of their successor's work in advance, so that one loss is absorbed."""

    slow_down: _SlowDown | None = None
    n_double = 0  # nodes that do the work of two

    def rendezvous_ms(self) -> int:
        """Return the time of a restart."""
        return self.costs.global_ms

    def placed(self, n_nodes: int) -> None:
        """Reset the speed of steps: no node does the work of two."""
        self.slow_down, self.n_double = None, 0

    def count_released_steps(self, n_steps: int) -> None:
        """Split steps into useful and redundant time by one share for all, as released."""
        useful_ms = round(self.costs.useful_share * self.step_ms)
        self.account.released_ms[Category.USEFUL] += n_steps * useful_ms
        self.account.released_ms[Category.REDUNDANT] += n_steps * (self.step_ms - useful_ms)

    def spend_steps(self, time_ms: int, n_steps: int) -> None:
        """Count as useful the time that the same samples take without redundant work."""
        rate = self.costs.plain_samples_per_s(self.n_used)
        if not rate:
            super().spend_steps(time_ms, n_steps)
            return
        useful_ms = int(1000 * self.costs.samples_per_step / rate)
        self.account.spend(Category.REDUNDANT, time_ms, n_steps * useful_ms)

    def needs(self, node: Node) -> bool:
        """Tell whether a node has a stage or takes part in the rendezvous."""
        return bool(node.coordinates) if self.state is State.RUNNING else super().needs(node)

    def checkpoint_done(self, time_ms: int, subject: Any) -> None:
        """Do nothing: there are no checkpoints."""

    def lose(self, time_ms: int, node: Node) -> None:
        """Hand the work to the predecessor, or restart if one of the two did the work of two already."""
        self.account.released_ms[Category.LOST] += self.step_ms
        if node.coordinates and not self._taken_over(node):
            self.close_time(time_ms)
            self.meet(time_ms)
        elif self.state is State.RUNNING and self.slow_down is None:
            self.slow_down = _SlowDown(self.n_steps, time_ms)
            self.step_ms = int(self.costs.slow_down * self.step_ms)

    def _taken_over(self, lost: Node) -> bool:
        if len(lost.coordinates) > 1:
            self.n_double -= 1
            return False
        pipeline, stage = lost.coordinates[0]
        before = pipeline, (stage - 1) % self.costs.n_stages
        heir = next((node for node in self.nodes.values() if before in node.coordinates), None)
        if heir is None or len(heir.coordinates) > 1:
            return False
        heir.coordinates.append((pipeline, stage))
        self.n_double += 1
        return True

    def alike(self) -> int:
        """Return no limit, unless the next step must be extended for a slow-down or ends with a new plan."""
        return 0 if self._has_to_pay(self.slow_down) or self._plans_anew() else ALL

    def _has_to_pay(self, slow: _SlowDown | None) -> bool:
        return slow is not None and slow.n_steps == self.n_steps and not slow.has_paid

    def step_done(self, time_ms: int) -> None:
        """Continue, or plan anew if spare nodes or too many doubly loaded ones require it."""
        slow = self.slow_down
        if slow is not None and self._has_to_pay(slow):
            # The step that ran at the loss is extended by the slow-down of its remaining part.
            slow.has_paid = True
            self.end_step_at(time_ms + int((self.costs.slow_down - 1.0) * (time_ms - slow.time_ms)))
            return
        self.record(time_ms)
        if self._plans_anew():
            self.meet(time_ms, self.costs.local_ms)
        else:
            self.next_step(time_ms)

    def _plans_anew(self) -> bool:
        n_double = self.n_double
        n_placed = self.costs.n_stages * self.n_pipelines - n_double
        if n_double and (self.waiting >= n_double or 2 * n_double / n_placed > self.costs.overload_limit):
            return True
        return (n_placed + self.waiting) // self.costs.n_stages > self.n_pipelines


# --- Systems of equal pipelines whose workers stand in for each other ---------------------------------


class PeerMachine(SystemSimulator):
    """Equal pipelines whose places stay empty when a node is lost, until another node takes them.

    A loss costs the running step and a regrouping as long as Oobleck's; taking in nodes costs a regrouping.
    Where what is left cannot continue, the job restarts from a checkpoint on as many whole pipelines as there
    are nodes for, and steps since the last checkpoint are lost. Writing checkpoints takes no time, in favour
    of these systems. The job is never reshaped by choice.
    """

    def __init__(self, trace: NodeTrace, costs: Costs, repaired: frozenset[Defect]) -> None:
        super().__init__(trace, costs, repaired)
        if costs.peers is None or len(repaired) < len(DEFECTS):
            raise InputError(
                f"simulation with {'no' if costs.peers is None else 'its'} throughput by live workers and "
                f"{len(repaired)} repaired defects; expected this throughput, and all {len(DEFECTS)} repaired"
            )
        self.peers = costs.peers
        self.steps = self.counted = Steps()  # one object; `counted` has the type that can lose single steps
        self.safe_steps = 0  # steps at the last restart
        self.samples = 0.0  # of a step of the present plan

    # The two systems differ in these methods.

    @abstractmethod
    def rate(self, taken: Collection[tuple[int, int]], n_pipelines: int) -> float:
        """Return samples per second with these places taken; 0 if the job cannot continue."""

    @abstractmethod
    def first_hole(self, taken: Collection[tuple[int, int]]) -> tuple[int, int] | None:
        """Return the place that the next node should take, None if all are taken."""

    # They share the rest.

    def taken(self) -> set[tuple[int, int]]:
        """Return the places, pipeline and stage, that have a node."""
        return {place for node in self.nodes.values() for place in node.coordinates}

    def filled(self, n_nodes: int) -> tuple[list[tuple[int, int]], int]:
        """Return the places that so many more nodes would take, in order, and the pipelines then."""
        taken, found, n_pipelines = self.taken(), list[tuple[int, int]](), self.n_pipelines
        while len(found) < n_nodes and (hole := self.first_hole(taken)) is not None:
            taken.add(hole)
            found.append(hole)
        # Nodes that are left make new pipelines, as long as they are enough for whole ones.
        while len(found) + self.peers.n_stages <= n_nodes and n_pipelines < self.peers.n_pipelines:
            found += [(n_pipelines, stage) for stage in range(self.peers.n_stages)]
            n_pipelines += 1
        return found, n_pipelines

    @property
    def continues(self) -> bool:
        """True if the job regroups, and false if it restarts; the first start counts as regrouping."""
        return self.n_pipelines > 0 or self.start_ms is None

    def meet(self, time_ms: int, delay_ms: int | None = None) -> None:
        """Regroup, or restart if the job could not continue."""
        self.rendezvous_category = Category.REBALANCE if self.continues else Category.RESTART
        super().meet(time_ms, delay_ms)

    def rendezvous_ms(self) -> int:
        """Return the time of regrouping, or of a restart without the checkpoint that it includes."""
        return self.costs.global_ms if self.continues else self.costs.restart_ms - self.costs.checkpoint_ms

    def placed(self, n_nodes: int) -> None:
        """Do nothing: places are remembered by the nodes."""

    def checkpoint_done(self, time_ms: int, subject: Any) -> None:
        """Do nothing: checkpoints take no time."""

    def needs(self, node: Node) -> bool:
        """Tell whether a node has a place or takes part in the rendezvous."""
        return bool(node.coordinates) if self.state is State.RUNNING else super().needs(node)

    def lose(self, time_ms: int, node: Node) -> None:
        """Regroup without the node, or restart from the last checkpoint."""
        self.account.released_ms[Category.LOST] += self.step_ms
        self.close_time(time_ms)
        if self.n_pipelines and not self.rate(self.taken(), self.n_pipelines):
            n_lost = (self.n_steps - self.safe_steps) % self.costs.checkpoint_every
            self.account.lose(self.counted.lose_steps(n_lost))
            self.safe_steps, self.n_pipelines = self.n_steps, 0
            for other in self.nodes.values():
                other.coordinates = []
        self.meet(time_ms)

    def _place(self, time_ms: int) -> None:
        """Give places to the nodes that met and have none; too few nodes stop the job."""
        free = [node for node in self.members if not node.coordinates]
        places, self.n_pipelines = self.filled(len(free))
        for node, place in zip(free, places, strict=False):
            node.coordinates = [place]
        self.waiting = len(free) - len(places)
        self.n_used, self.members = len(self.members), []
        self.version += 1
        if not self.n_pipelines:
            self.state = State.STOPPED
            return
        self.state = State.RUNNING
        taken = self.taken()
        self.samples = self.samples_of(taken)
        self.step_ms = max(int(1000 * self.samples / self.rate(taken, self.n_pipelines)), 1)
        if self.start_ms is None:
            self.start_ms = self.previous_ms = time_ms
        self.previous_ms = time_ms
        self.next_step(time_ms)

    def samples_of(self, taken: Collection[tuple[int, int]]) -> float:
        """Return the samples of a step with these places taken."""
        return self.costs.samples_per_step

    def step_samples(self) -> float:
        """Return the samples of a step of the present plan."""
        return self.samples

    def pays(self, cost_ms: int) -> bool:
        """Tell whether taking in the nodes that wait is worth its cost."""
        if not self.waiting:
            return False
        places, n_pipelines = self.filled(self.waiting)
        now = self.rate(self.taken(), self.n_pipelines)
        then = self.rate(self.taken() | set(places), n_pipelines)
        return then * (self.costs.horizon_ms - cost_ms) > now * self.costs.horizon_ms


class ReCycleMachine(PeerMachine):
    """ReCycle: micro-batches of a lost worker run on the others of its stage, as long as there is one."""

    def live(self, taken: Collection[tuple[int, int]]) -> list[int]:
        """Return the live workers of each stage."""
        counts = [0] * self.peers.n_stages
        for _, stage in taken:
            counts[stage] += 1
        return counts

    def rate(self, taken: Collection[tuple[int, int]], n_pipelines: int) -> float:
        """Return samples per second; 0 if a stage has no worker, because its parameters are gone."""
        live = self.live(taken)
        return self.peers.samples_per_s(live, n_pipelines) if min(live) else 0.0

    def first_hole(self, taken: Collection[tuple[int, int]]) -> tuple[int, int] | None:
        """Return a place of the stage with the fewest workers."""
        live = self.live(taken)
        stage = live.index(min(live))
        holes = (pipeline for pipeline in range(self.n_pipelines) if (pipeline, stage) not in taken)
        return next(((pipeline, stage) for pipeline in holes), None)


class ReplicaDropMachine(PeerMachine):
    """Dropped replicas: a pipeline that lacks a node sits out, and steps have fewer samples.

    As torchft does with replica groups: those that are whole form a quorum, and the next step has only their
    samples. Nodes of a pipeline that sits out wait; a new node goes where the fewest are missing.
    """

    def whole(self, taken: Collection[tuple[int, int]], n_pipelines: int) -> int:
        """Return the pipelines that lack no node."""
        stages = range(self.peers.n_stages)
        return sum(all((i, stage) in taken for stage in stages) for i in range(n_pipelines))

    def rate(self, taken: Collection[tuple[int, int]], n_pipelines: int) -> float:
        """Return samples per second, a share of the full ones; 0 without a whole pipeline."""
        return self.peers.full_samples_per_s * self.whole(taken, n_pipelines) / self.peers.n_pipelines

    def samples_of(self, taken: Collection[tuple[int, int]]) -> float:
        """Return the samples of the pipelines that are whole."""
        n_whole = self.whole(taken, self.n_pipelines)
        return self.costs.samples_per_step * n_whole / self.peers.n_pipelines

    def first_hole(self, taken: Collection[tuple[int, int]]) -> tuple[int, int] | None:
        """Return a place of the pipeline that lacks the fewest nodes."""
        holes = {
            pipeline: [stage for stage in range(self.peers.n_stages) if (pipeline, stage) not in taken]
            for pipeline in range(self.n_pipelines)
        }
        broken = [pipeline for pipeline, missing in holes.items() if missing]
        first = min(broken, key=lambda pipeline: len(holes[pipeline]), default=None)
        return None if first is None else (first, holes[first][0])


# --- Expectation for rare losses, without a simulation ----------------------------------------------


@typed
def expected_share(system: str, costs: Costs, n_nodes: int, mtbf_s: float) -> float:
    """Return the share of full throughput that remains under rare losses of single nodes.

    The time between losses must be much longer than the cost of each. Losses are assumed to be evenly
    distributed within a step, or between two checkpoints.

    Parameters
    ----------
    system, costs
        ``bamboo``, ``varuna`` or ``oobleck``, and its costs; the throughput on ``n_nodes`` is the full one.
    mtbf_s
        Mean time between losses of the whole job [s].

    Returns
    -------
    float
        Between 0 and 1.

    Raises
    ------
    UnknownNameError
        There is no such system.
    InputError
        A restart is shorter than its checkpoint, or the job cannot run on so many nodes.
    """
    step_s = _step_s(costs, n_nodes)
    check_restarts(system, costs)
    if system == "oobleck":
        return max(0.0, mtbf_s - costs.global_ms * MS - step_s / 2.0) / mtbf_s
    if system == "bamboo":
        return max(0.0, mtbf_s - costs.local_ms * MS) / mtbf_s
    if system != "varuna":
        raise unknown_name("system", system, SYSTEMS)
    checkpoint_s, work_s = costs.checkpoint_ms * MS, costs.checkpoint_every * step_s
    cycle_s = work_s + checkpoint_s
    restart_s = (costs.restart_ms - costs.checkpoint_ms) * MS
    return work_s / cycle_s * max(0.0, mtbf_s - restart_s - cycle_s / 2.0) / mtbf_s


@typed
def young_daly_steps(costs: Costs, n_nodes: int, mtbf_s: float) -> int:
    """Return the steps between checkpoints that lose least, by the estimate of Young and Daly; 1 or more.

    Parameters
    ----------
    costs, n_nodes, mtbf_s
        As for `expected_share`.

    Returns
    -------
    int
        The square root of twice the cost of a checkpoint times the time between losses, in steps.
    """
    interval_s = math.sqrt(2.0 * costs.checkpoint_ms * MS * mtbf_s)
    return max(1, round(interval_s / _step_s(costs, n_nodes)))


def _step_s(costs: Costs, n_nodes: int) -> float:
    rate = costs.throughput.get(n_nodes, 0.0)
    if rate <= 0:
        raise InputError(f"no throughput on {n_nodes} nodes; expected a number of nodes that can run")
    return costs.samples_per_step / rate


# --- Simulation -------------------------------------------------------------------------------------

Floats = npt.NDArray[np.float64]
_MACHINES: dict[str, type[SystemSimulator]] = {
    "bamboo": BambooMachine,
    "varuna": VarunaMachine,
    "oobleck": OobleckMachine,
    "recycle": ReCycleMachine,
    "replica-drop": ReplicaDropMachine,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a simulation.

    Parameters
    ----------
    is_feasible
        Whether the model fits; if not, nothing was simulated.
    throughput_samples_per_s
        Average over the run, 0 if no step ended.
    n_steps, n_failures
        Steps that the system counts, and nodes removed.
    times_s
        Time by category [s].
    runs
        Steps, consecutive equal ones together; see `steps`.
    """

    is_feasible: bool
    throughput_samples_per_s: float = 0.0
    n_steps: int = 0
    n_failures: int = 0
    times_s: dict[str, float] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()

    def steps(self) -> Floats:
        """Return start and end [s] and samples that count, one row per step, (n_steps, 3)."""
        parts = [
            np.column_stack([edges[:-1], edges[1:], np.full(n_steps, samples)])
            for start_ms, end_ms, n_steps, samples in self.runs
            for edges in (np.linspace(start_ms, end_ms, n_steps + 1) * MS,)
        ]
        return np.concatenate(parts) if parts else np.zeros((0, 3))


@typed
def simulate(system: str, trace: NodeTrace, costs: Costs, repaired: Collection[Defect] = ()) -> Outcome:
    """Simulate a system from the first event of a trace to the time of the last.

    Parameters
    ----------
    system
        ``bamboo``, ``varuna`` or ``oobleck``, or one of `PEER_SYSTEMS`, whose costs have ``peers``.
    repaired
        Defects of the released simulators that are repaired, see `repairs`.

    Returns
    -------
    Outcome
        Result; a model without throughput has ``is_feasible`` false, and is not simulated.

    Raises
    ------
    UnknownNameError
        There is no such system.
    InputError
        One of `PEER_SYSTEMS` without ``peers``, or with defects; a restart that is shorter than its
        checkpoint; a table that has no entry for a number of nodes that are ready at some time, and has some
        for fewer and for more.
    """
    if system not in _MACHINES:
        raise unknown_name("system", system, _MACHINES)
    if not costs.throughput:
        return Outcome(is_feasible=False)
    check_restarts(system, costs)
    if system not in PEER_SYSTEMS:
        _check_entries(system, trace, costs)
    machine = _MACHINES[system](trace, costs, frozenset(repaired))
    machine.run()
    runs = machine.steps.runs()
    # As released the average ends with the last step (defect D4), else with the trace.
    start_ms, end_ms = machine.start_ms, machine.last_step_ms
    if machine.is_repaired(Defect.D4):
        start_ms, end_ms = machine.first_ready_ms, trace.end_ms
    throughput_samples_per_s = 0.0
    if start_ms is not None and end_ms > start_ms:
        n_samples = sum(n_steps * samples for *_, n_steps, samples in runs)
        throughput_samples_per_s = n_samples / ((end_ms - start_ms) * MS)
    return Outcome(
        is_feasible=True,
        throughput_samples_per_s=throughput_samples_per_s,
        n_steps=machine.n_steps,
        n_failures=machine.n_failures,
        times_s=machine.account.times_s(counts_once=Defect.D5 in machine.repaired),
        runs=tuple(runs),
    )


def unused_nodes(trace: NodeTrace, costs: Costs) -> int:
    """Return the number of nodes of a trace that stay idle because the table of throughput ends before.

    Parameters
    ----------
    trace, costs
        Trace and costs of a simulation.

    Returns
    -------
    int
        The most nodes present at once, less the most of the table; at least 0.
    """
    return max(0, max(trace.counts()) - max(costs.throughput, default=0)) if costs.throughput else 0


def _ready_counts(trace: NodeTrace, costs: Costs) -> list[int]:
    """Return the numbers of nodes that are ready at some time of a trace, ascending."""
    added_ms: dict[str, int] = {}
    changes = Counter[int]()  # of the number of ready nodes, by time
    for event in trace.events:
        if event.is_added:
            added_ms[event.node] = event.time_ms
        elif (ready_ms := added_ms.pop(event.node) + costs.creation_ms) < event.time_ms:
            changes[ready_ms] += 1
            changes[event.time_ms] -= 1
    for time_ms in added_ms.values():
        if time_ms + costs.creation_ms <= trace.end_ms:
            changes[time_ms + costs.creation_ms] += 1
    return sorted({0, *accumulate(changes[time_ms] for time_ms in sorted(changes))})


def _check_entries(system: str, trace: NodeTrace, costs: Costs) -> None:
    """Reject tables that lack an entry for a number of nodes that are ready at some time."""
    for n_ready in _ready_counts(trace, costs):
        n_nodes = costs.known(n_ready)
        rate = _entry(costs.throughput, n_nodes, f"{system}'s throughput", costs.model)
        if system == "varuna":
            for name, by_nodes in (
                ("restart time", costs.restart_by_nodes_ms),
                ("number of idle GPUs", costs.idle_gpus),
            ):
                if by_nodes:
                    _entry(by_nodes, n_nodes, f"varuna's {name}", costs.model)
        elif system == "bamboo" and rate > 0:
            costs.plain_samples_per_s(n_ready)


def no_step_because(trace: NodeTrace, costs: Costs, repaired: Collection[Defect] = ()) -> str:
    """Return in one line why no step of a simulation is completed.

    Parameters
    ----------
    trace, costs, repaired
        Those of a simulation of a model that fits, without a step.
    """
    ready, fixed = _ready_counts(trace, costs), frozenset(repaired)
    most, fewest = max(trace.counts()), min(costs.throughput)
    if Defect.D10 in fixed and most < fewest:
        return f"at most {most} nodes are present at once, and the throughput table starts at {fewest}"
    if most < costs.n_stages:
        return f"at most {most} nodes are present at once, and a pipeline has {costs.n_stages} stages"
    placed = [n_nodes for n_nodes in ready if n_nodes >= costs.n_stages]
    if placed and all(costs.samples_per_s(n_nodes, fixed) <= 0 for n_nodes in placed):
        return f"the throughput table has 0 for up to {placed[-1]} nodes"
    return "no step fits between the events of the trace"
