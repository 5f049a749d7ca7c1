"""Oobleck: every loss regroups the nodes and copies state; nothing but the running step is lost."""

from typing import Any

from makespan.oobleck.simulators._costs import Costs
from makespan.oobleck.simulators._defects import Defect
from makespan.oobleck.simulators._machine import ALL, Machine, Node
from makespan.oobleck.simulators._records import Category
from makespan.oobleck.simulators._traces import NodeTrace

__all__ = ["OobleckMachine"]


class OobleckMachine(Machine):
    """Pipelines from templates."""

    rendezvous_category = Category.REBALANCE

    def __init__(self, trace: NodeTrace, costs: Costs, repaired: frozenset[Defect]) -> None:
        super().__init__(trace, costs, repaired)
        self.sees_storage = Defect.D3 in repaired  # else no matter which nodes are there

    def rendezvous_ms(self) -> int:
        """Return the time of regrouping, copying and building groups."""
        return self.costs.global_ms

    def placed(self, n_nodes: int) -> None:
        """Do nothing: a plan has no memory."""

    def checkpoint_done(self, time_ms: int, what: Any) -> None:
        """Do nothing: there are no checkpoints."""

    def lose(self, time_ms: int, node: Node) -> None:
        """Regroup at once."""
        self.account.released_ms[Category.LOST] += self.step_ms
        self.close_time(time_ms)
        self.meet(time_ms)

    def alike(self) -> int:
        """Return all: nodes only join and leave in between."""
        return ALL

    def step_done(self, time_ms: int) -> None:
        """Go on; take joined nodes in where that pays."""
        self.record(time_ms)
        if self.pays(self.costs.global_ms):
            self.meet(time_ms)
        else:
            self.next_step(time_ms)
