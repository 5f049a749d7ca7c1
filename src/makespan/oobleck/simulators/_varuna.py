"""Varuna: every loss restarts the job from the last checkpoint, on the nodes that are left."""

from typing import Any

from makespan.oobleck.simulators._costs import Costs
from makespan.oobleck.simulators._defects import Defect
from makespan.oobleck.simulators._events import Kind
from makespan.oobleck.simulators._machine import Machine, Node
from makespan.oobleck.simulators._records import Category, PairedLists, Steps
from makespan.oobleck.simulators._traces import NodeTrace

__all__ = ["VarunaMachine"]


class VarunaMachine(Machine):
    """Checkpoints and restarts."""

    committed_ms: int | None = None  # where training goes on after a restart
    writing_ms: int | None = None  # end of the checkpoint that is being written (repair of D6)
    has_removal = False  # since the last finished step
    n_nodes = 0

    def __init__(self, trace: NodeTrace, costs: Costs, repaired: frozenset[Defect]) -> None:
        super().__init__(trace, costs, repaired)
        self.sees_storage = costs.falls_back and costs.charges_checkpoints

    def _released_steps(self) -> Steps | PairedLists:
        return PairedLists()

    def rendezvous_ms(self) -> int:
        """Return the time of a restart without the checkpoint that it includes."""
        by_nodes = self.costs.restart_by_nodes_ms
        restart_ms = by_nodes[self.n_nodes] if by_nodes and self.n_nodes else self.costs.restart_ms
        return restart_ms - self.costs.checkpoint_ms

    def placed(self, n_nodes: int) -> None:
        """Note how long the next restart takes."""
        self.n_nodes = self.costs.known(n_nodes)

    def spend_steps(self, time_ms: int, n_steps: int) -> None:
        """Account for steps, and for the GPUs that they leave idle."""
        idle = self.costs.idle_gpus[self.n_nodes] if self.costs.idle_gpus else 0
        self.account.released_ms[Category.IDLE] += (time_ms - self.previous_ms) * idle // self.n_nodes
        super().spend_steps(time_ms, n_steps)

    def lose(self, time_ms: int, node: Node) -> None:
        """Fall back to the last checkpoint and restart."""
        self.has_removal = True
        self._settle(time_ms)
        if self.costs.falls_back:
            lost_ms = self.account.released_ms
            n_lost = self.steps.lose_from(self.committed_ms)
            lost_ms[Category.LOST] += time_ms if self.committed_ms is None else self.step_ms * n_lost
        self.close_time(time_ms)
        self.account.drop_held()
        if self.costs.falls_back:
            self.account.lose_uncommitted()
        self.meet(time_ms)

    def _settle(self, time_ms: int) -> None:
        """Decide what becomes of a checkpoint that is being written when a node is lost."""
        if self.writing_ms is not None and self.writing_ms <= time_ms:
            self.checkpoint_done(self.writing_ms, self.writing_ms)
        self.writing_ms = None

    def alike(self) -> int:
        """Return those before the next checkpoint."""
        every = self.costs.checkpoint_every
        return 0 if self.has_removal else every - 1 - self.n_steps % every

    def step_done(self, time_ms: int) -> None:
        """Go on, with a checkpoint after so many steps and after the first one of a restart."""
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
        """Write a checkpoint and return when the next step starts [ms]."""
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
        """Let storage order decide, with a marker twice the cost behind the step; the first marker counts."""
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

    def checkpoint_done(self, time_ms: int, what: Any) -> None:
        """Commit the checkpoint, unless a removal came first."""
        if what is not None and what == self.writing_ms:
            self.writing_ms = None
            self._commit(time_ms)

    def _commit(self, time_ms: int) -> None:
        self.committed_ms = time_ms
        self.account.commit()
