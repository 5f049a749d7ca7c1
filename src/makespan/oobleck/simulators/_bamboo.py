"""Bamboo: nodes do part of their successor's work in advance, so that one loss is absorbed."""

from dataclasses import dataclass
from typing import Any

from makespan.oobleck.simulators._machine import ALL, Machine, Node, State
from makespan.oobleck.simulators._records import Category

__all__ = ["BambooMachine"]


@dataclass(slots=True)
class _SlowDown:
    """Since when a step is slower: after how many steps, at what time, and whether that step paid for it."""

    n_steps: int
    time_ms: int
    has_paid: bool = False


class BambooMachine(Machine):
    """Redundant computation."""

    slow_down: _SlowDown | None = None
    n_double = 0  # nodes that do the work of two

    def rendezvous_ms(self) -> int:
        """Return the time of a restart."""
        return self.costs.global_ms

    def placed(self, n_nodes: int) -> None:
        """Let steps be as fast as they should be."""
        self.slow_down, self.n_double = None, 0

    def count_released_steps(self, n_steps: int) -> None:
        """Split steps by the share that the release has for all."""
        useful_ms = round(self.costs.useful_share * self.step_ms)
        self.account.released_ms[Category.USEFUL] += n_steps * useful_ms
        self.account.released_ms[Category.REDUNDANT] += n_steps * (self.step_ms - useful_ms)

    def spend_steps(self, time_ms: int, n_steps: int) -> None:
        """Count as useful what the same samples take without redundant work; double stages are not."""
        plain = self.costs.plain_throughput
        if plain is None:
            super().spend_steps(time_ms, n_steps)
            return
        n_nodes = min(max(self.n_used, min(plain)), max(plain))
        useful_ms = int(1000 * self.costs.samples_per_step / plain[n_nodes])
        self.account.spend(Category.REDUNDANT, time_ms, n_steps * useful_ms)

    def needs(self, node: Node) -> bool:
        """Tell whether a node has a stage or takes part in the rendezvous."""
        return bool(node.coordinates) if self.state is State.RUNNING else super().needs(node)

    def checkpoint_done(self, time_ms: int, what: Any) -> None:
        """Do nothing: there are no checkpoints."""

    def lose(self, time_ms: int, node: Node) -> None:
        """Let the predecessor take over, or restart if it does the work of two already."""
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
        """Return all, unless the next one is still to pay for a slow-down."""
        return 0 if self._has_to_pay(self.slow_down) or self._plans_anew() else ALL

    def _has_to_pay(self, slow: _SlowDown | None) -> bool:
        return slow is not None and slow.n_steps == self.n_steps and not slow.has_paid

    def step_done(self, time_ms: int) -> None:
        """Go on, or plan anew where spare nodes or too many double ones ask for it."""
        slow = self.slow_down
        if slow is not None and self._has_to_pay(slow):
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
