"""The machine that the systems share: nodes that come and go, rendezvous, one step after the other.

Times are whole milliseconds, as in the released simulators, so that sums are exact.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from makespan.oobleck.simulators._costs import Costs
from makespan.oobleck.simulators._defects import Defect
from makespan.oobleck.simulators._events import HeapList, Kind, Queue, SharedQueue
from makespan.oobleck.simulators._records import Account, Category, PairedLists, Steps
from makespan.oobleck.simulators._traces import NodeTrace

__all__ = ["ALL", "Machine", "Node", "State"]

ALL = 10**18
"""So many that there is no limit."""


class State(Enum):
    """What the job does."""

    STOPPED = "stopped"  # waits for nodes
    RENDEZVOUS = "rendezvous"
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class Node:
    """A node that is there.

    Attributes
    ----------
    is_ready, is_used
        Whether it has been created, and takes part in the plan or in the rendezvous.
    coordinates
        Pipelines and stages that it runs.
    """

    is_ready: bool = False
    is_used: bool = False
    coordinates: list[tuple[int, int]] = field(default_factory=list)


class Machine(ABC):
    """One system on one trace; `run` is called once."""

    rendezvous_category = Category.RESTART

    def __init__(self, trace: NodeTrace, costs: Costs, repaired: frozenset[Defect]) -> None:
        self.trace, self.costs, self.repaired = trace, costs, repaired
        self.heap = None if Defect.D6 in repaired else HeapList()
        self.queue: Queue = SharedQueue() if self.heap is None else self.heap
        self.steps = Steps() if Defect.D12 in repaired else self._released_steps()
        self.account = Account()
        self.sees_storage = True  # whether a heap's storage order counts: then each step must pass through it
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

    def _released_steps(self) -> Steps | PairedLists:
        return Steps()

    def is_repaired(self, defect: Defect) -> bool:
        """Tell whether a defect is repaired."""
        return defect in self.repaired

    def run(self) -> None:
        """Let everything happen up to the time of the last event of the trace."""
        for event in self.trace.events:
            self.queue.push(event.time_ms, Kind.ADD if event.is_added else Kind.REMOVE, event.node)
        handle: dict[Kind, Callable[[int, Any], None]] = {
            Kind.ADD: self._add,
            Kind.REMOVE: self._remove,
            Kind.READY: self._ready,
            Kind.DEADLINE: self._deadline_over,
            Kind.LOCAL_DEADLINE: self._local_deadline_over,
            Kind.STEP_DONE: self._step_done,
            Kind.CHECKPOINT_DONE: self.checkpoint_done,
        }
        last_ms = self.trace.end_ms - (not self.is_repaired(Defect.D8))
        while self.queue:
            time_ms, kind, what = self.queue.pop()
            if time_ms > last_ms:
                break
            handle[kind](time_ms, what)
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
        """React to the loss of a node, which is out of `nodes` already."""

    @abstractmethod
    def rendezvous_ms(self) -> int:
        """Return how long a rendezvous of all nodes takes."""

    @abstractmethod
    def placed(self, n_nodes: int) -> None:
        """Note the new plan."""

    @abstractmethod
    def checkpoint_done(self, time_ms: int, what: Any) -> None:
        """React to the end of a checkpoint."""

    @abstractmethod
    def step_done(self, time_ms: int) -> None:
        """React to the end of a step of the present plan."""

    def meet(self, time_ms: int, delay_ms: int | None = None) -> None:
        """Start a rendezvous, of all nodes unless a shorter time is given [ms]."""
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

    def _deadline_over(self, time_ms: int, what: tuple[int, int | None]) -> None:
        deadline, delay_ms = what
        if self.is_repaired(Defect.D1) and deadline != self.deadline:
            return
        self.close_time(time_ms, is_local=delay_ms is not None)
        if self.has_lost_member and self.members:
            self.meet(time_ms, delay_ms)
        else:
            self._place(time_ms)

    _local_deadline_over = _deadline_over

    def _place(self, time_ms: int) -> None:
        """Give the nodes that met their stages; too few of them stop the job."""
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
        self.placed(self.n_ready)
        self.next_step(time_ms)

    def next_step(self, time_ms: int) -> None:
        """Start a step; before it, take all those at once that nothing can come between."""
        is_free = self.heap is None or not self.sees_storage
        if is_free and self.previous_ms == time_ms:
            time_ms = self._take_steps(time_ms)
        self.count_released_steps(1)
        self.end_step_at(time_ms + self.step_ms)

    def _take_steps(self, time_ms: int) -> int:
        """Take steps that end before anything else happens; return when the last one does [ms]."""
        free_ms = min(self.queue.next_ms(), self.trace.end_ms) - time_ms - 1
        n_steps = min(free_ms // self.step_ms, self.alike())
        if n_steps < 1:
            return time_ms
        self.count_released_steps(n_steps)
        self.record(time_ms + n_steps * self.step_ms, n_steps)
        return self.previous_ms

    @abstractmethod
    def alike(self) -> int:
        """Return how many steps would come now at whose end nothing else is done."""

    def end_step_at(self, time_ms: int) -> None:
        """Let the step end then."""
        self.queue.push(time_ms, Kind.STEP_DONE, self.version)

    def count_released_steps(self, n_steps: int) -> None:
        """Count steps that start as useful."""
        self.account.released_ms[Category.USEFUL] += n_steps * self.step_ms

    def _step_done(self, time_ms: int, version: int) -> None:
        if version == self.version:
            self.step_done(time_ms)

    def record(self, time_ms: int, n_steps: int = 1) -> None:
        """Enter finished steps."""
        self.steps.add(self.previous_ms, time_ms, self.costs.samples_per_step, n_steps)
        self.spend_steps(time_ms, n_steps)
        self.previous_ms = self.last_step_ms = time_ms
        self.n_steps += n_steps

    def spend_steps(self, time_ms: int, n_steps: int) -> None:
        """Account for steps that end now."""
        self.account.spend(Category.USEFUL, time_ms)

    def close_time(self, time_ms: int, *, is_local: bool = False) -> None:
        """Account for the time up to now by what the job did; a step that did not end is lost."""
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
