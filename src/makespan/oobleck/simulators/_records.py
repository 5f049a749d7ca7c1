"""What a run leaves: its steps, and where its time went."""

from dataclasses import dataclass, field
from enum import StrEnum

from makespan.units import MS

__all__ = ["Account", "Category", "PairedLists", "Run", "Steps"]


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


Run = tuple[int, int, int, float]
"""Start and end of consecutive equal steps [ms], how many they are, and samples of each that count."""


class Steps:
    """One record for each step, or for several that nothing came between."""

    def __init__(self) -> None:
        self._runs: list[Run] = []

    def add(self, start_ms: int, end_ms: int, samples: int, n_steps: int = 1) -> None:
        """Enter finished steps."""
        self._runs.append((min(start_ms, end_ms), end_ms, n_steps, samples))

    def lose_from(self, time_ms: int | None) -> int:
        """Let steps from then on count nothing, all if None; return twice their number less one."""
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
        """Let the last steps count nothing."""
        index = len(self._runs)
        while n_steps > 0 and index > 0:
            index -= 1
            n_steps -= self._lose(index)

    def runs(self) -> list[Run]:
        """Return all steps."""
        return self._runs


class PairedLists:
    """As released: start and end of every step in one list, its rate twice in another (defect D12)."""

    def __init__(self) -> None:
        self._times_ms: list[int] = []
        self._rates: list[float] = []

    def add(self, start_ms: int, end_ms: int, samples: int, n_steps: int = 1) -> None:
        """Enter finished steps; an interval may have any sign."""
        step_ms = (end_ms - start_ms) // n_steps
        rate = samples / step_ms if step_ms else 0.0
        for step in range(n_steps):
            self._times_ms += (start_ms + step * step_ms, start_ms + (step + 1) * step_ms)
        self._rates += [rate] * (2 * n_steps)

    def lose_from(self, time_ms: int | None) -> int:
        """Set rates behind the first entry of that time to 0, all if None; return how many."""
        first = 0 if time_ms is None else self._found(time_ms) + 1
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

    def runs(self) -> list[Run]:
        """Return the intervals with the second rate of each pair, as the averages take them."""
        times, rates = self._times_ms, self._rates
        pairs = zip(times[::2], times[1::2], rates[1::2], strict=False)
        return [(start, end, 1, (end - start) * rate) for start, end, rate in pairs]


@dataclass(slots=True)
class Account:
    """Where time goes: as the released simulators count it, and millisecond by millisecond.

    Released categories overlap. Of the others each millisecond from the first ready node on has one; it
    is known when it is over, so a category may be held in advance up to some time.
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
        """Say in advance what time is spent on up to some time, unless the run ends before."""
        self._held = category, until_ms

    def spend(self, category: Category, until_ms: int, useful_ms: int | None = None) -> None:
        """Close the time up to now; ``useful_ms``: how much of it is useful, the rest has the category."""
        start_ms = self._cursor_ms
        if start_ms is None:
            return
        if self._held is not None:
            start_ms = self._spend_held(until_ms)
        if until_ms <= start_ms:
            return
        if useful_ms is not None and start_ms + useful_ms < until_ms:
            self.spent_ms[Category.USEFUL] += useful_ms
            start_ms += useful_ms
        self.spent_ms[category] += until_ms - start_ms
        self._cursor_ms = until_ms
        if category is Category.USEFUL:
            self._uncommitted_ms += until_ms - start_ms

    def _spend_held(self, until_ms: int) -> int:
        """Spend what was said in advance, and return from when on the time is free."""
        category, end_ms = self._held or (Category.STALLED, until_ms)
        if end_ms <= until_ms:
            self._held = None
        self._take(category, min(end_ms, until_ms))
        return self._cursor_ms or 0

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
