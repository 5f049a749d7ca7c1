"""What a run leaves: its steps, and where its time went."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from makespan.units import MS

__all__ = ["Account", "Category", "PairedLists", "StepRecord", "Steps"]


class Category(StrEnum):
    """Where time goes, in the order of the figures."""

    USEFUL = "useful"
    REDUNDANT = "redundant"
    CHECKPOINT = "checkpoint"
    RESTART = "restart"
    REBALANCE = "rebalance"
    LOST = "lost"
    STALLED = "stalled"
    IDLE = "idle"  # of GPUs beside those that work; no part of the wall time


@dataclass(slots=True)
class StepRecord:
    """A step from the end of the one before to its own, with the samples that count."""

    start_ms: int
    end_ms: int
    samples: float


class Steps:
    """One record a step."""

    def __init__(self) -> None:
        self._steps: list[StepRecord] = []

    def add(self, start_ms: int, end_ms: int, samples: int) -> None:
        """Enter a finished step."""
        self._steps.append(StepRecord(min(start_ms, end_ms), end_ms, samples))

    def lose_from(self, time_ms: int | None) -> int:
        """Let steps from then on count nothing, all if None; return twice their number less one."""
        n_lost = 0
        for step in reversed(self._steps):
            if time_ms is not None and step.start_ms < time_ms:
                break
            step.samples = 0.0
            n_lost += 1
        return max(2 * n_lost - 1, 0)

    def lose_last(self, n_steps: int) -> None:
        """Let the last steps count nothing."""
        for step in self._steps[-n_steps:]:
            step.samples = 0.0

    def records(self) -> list[StepRecord]:
        """Return all steps."""
        return self._steps


class PairedLists:
    """As released: start and end of every step in one list, its rate twice in another (defect D12)."""

    def __init__(self) -> None:
        self._times_ms: list[int] = []
        self._rates: list[float] = []

    def add(self, start_ms: int, end_ms: int, samples: int) -> None:
        """Enter a finished step; an interval may have any sign."""
        rate = samples / (end_ms - start_ms) if end_ms != start_ms else 0.0
        self._times_ms += [start_ms, end_ms]
        self._rates += [rate, rate]

    def lose_from(self, time_ms: int | None) -> int:
        """Set rates behind the first entry of that time to 0, all if None; return how many."""
        first = 0
        if time_ms is not None:
            first = self._found(time_ms) + 1
        n_lost = max(len(self._rates) - first, 0)
        self._rates[first:] = [0.0] * n_lost
        return n_lost

    def _found(self, time_ms: int) -> int:
        try:
            return self._times_ms.index(time_ms)
        except ValueError:
            return len(self._times_ms) - 1

    def lose_last(self, n_steps: int) -> None:
        """Set the last rates to 0; where there are fewer, the list grows."""
        self._rates[-2 * n_steps :] = [0.0] * (2 * n_steps)

    def records(self) -> list[StepRecord]:
        """Return the intervals with the second rate of each pair, as the averages take them."""
        times, rates = self._times_ms, self._rates
        n_pairs = min(len(times), len(rates)) // 2
        return [
            StepRecord(times[2 * i], times[2 * i + 1], (times[2 * i + 1] - times[2 * i]) * rates[2 * i + 1])
            for i in range(n_pairs)
        ]


@dataclass(slots=True)
class Account:
    """Where time goes: as the released simulators count it, and millisecond by millisecond.

    Released categories overlap. Of the others each millisecond from the first ready node on has one; it
    is known when it is over, so a category may be held in advance up to some time.
    """

    released_ms: Counter[Category] = field(default_factory=Counter)
    spent_ms: Counter[Category] = field(default_factory=Counter)
    _cursor_ms: int | None = None
    _held: tuple[Category, int] | None = None
    _uncommitted_ms: int = 0

    def open(self, time_ms: int) -> None:
        """Begin with the first ready node."""
        if self._cursor_ms is None:
            self._cursor_ms = time_ms

    def hold(self, category: Category, until_ms: int) -> None:
        """Say in advance what time is spent on up to some time, unless the run ends before."""
        self._held = category, until_ms

    def spend(self, category: Category, until_ms: int, useful_ms: int | None = None) -> None:
        """Close the time up to now; ``useful_ms``: how much of it is useful, the rest has the category."""
        if self._cursor_ms is None:
            return
        if self._held is not None:
            held, end_ms = self._held
            self._held = None if end_ms <= until_ms else self._held
            self._take(held, min(end_ms, until_ms))
        start_ms = self._cursor_ms
        if useful_ms is not None:
            self._take(Category.USEFUL, min(start_ms + useful_ms, until_ms))
        self._take(category, until_ms)
        if category is Category.USEFUL:
            self._uncommitted_ms += max(until_ms - start_ms, 0)

    def _take(self, category: Category, until_ms: int) -> None:
        if self._cursor_ms is not None and until_ms > self._cursor_ms:
            self.spent_ms[category] += until_ms - self._cursor_ms
            self._cursor_ms = until_ms

    def drop_held(self) -> None:
        """Forget what was said in advance."""
        self._held = None

    def commit(self) -> None:
        """Make useful time safe."""
        self._uncommitted_ms = 0

    def lose_uncommitted(self) -> None:
        """Turn useful time since the last commit into lost time."""
        self.spent_ms[Category.USEFUL] -= self._uncommitted_ms
        self.spent_ms[Category.LOST] += self._uncommitted_ms
        self._uncommitted_ms = 0

    def times_s(self, *, is_conservative: bool) -> dict[str, float]:
        """Return the time of each category [s]."""
        found = self.spent_ms if is_conservative else self.released_ms
        idle = self.released_ms[Category.IDLE]
        times = {category.value: found[category] * MS for category in Category}
        return times | {Category.IDLE.value: idle * MS}
