"""The best pipeline for a number of nodes, with proof: a search over its slowest stage.

Fix the slowest stage: its layers, its GPUs, how many stages stand before it and how many GPUs those have. All
before it take at most its latency m, all behind it less, so that ties have one price. The cost is then

    2 m + (sum of those before) + 2 (sum of those behind) + (steady + number before) m

and the two sums are least by dynamic programming over layers, stages and GPUs used. Without the bound m the
same programme gives a lower bound of every choice; they are tried from the lowest on until none can win.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from makespan.oobleck.planning._cost import CostRule, Ints, StageTimes

__all__ = ["Cut", "exact_cuts"]

_NEVER = np.int64(1 << 60)
_KEPT = 64  # matrices of costs, each of all stages

Cut = tuple[int, int, int]
"""First layer, end layer and GPUs of a stage."""

_Tables = dict[tuple[int, int], Ints]  # by stages and GPUs used: least sum of latencies, (n_layers + 1,)


@dataclass(frozen=True, slots=True)
class _Choice:
    """A slowest stage, and how many stages and GPUs come before it."""

    bound: int
    latency: int
    first: int
    end: int
    width: int
    n_before: int
    gpus_before: int


class _Search:
    """Pipelines of so many stages on so many nodes."""

    def __init__(self, times: StageTimes, n_nodes: int, n_stages: int, steady: int) -> None:
        self.times, self.n_stages, self.steady = times, n_stages, steady
        self.n_gpus = n_nodes * times.gpus_per_node
        self.allowed = {
            (width, behind): times.allowed(width, behind)
            for width in times.widths
            for behind in range(n_stages)
        }
        self._tables: dict[int, tuple[_Tables, _Tables]] = {}
        self._costs: dict[tuple[int, int], dict[int, Ints]] = {}
        self.free = self._before(int(_NEVER)), self._behind(int(_NEVER))

    def tables(self, slowest: int) -> tuple[_Tables, _Tables]:
        """Return least sums before and behind a slowest stage of this latency."""
        if slowest not in self._tables:
            self._tables[slowest] = self._before(slowest), self._behind(slowest - 1)
        return self._tables[slowest]

    def costs(self, width: int, behind: int, longest: int) -> Ints:
        """Return latencies of stages that are allowed there and take no longer, else never."""
        latency = self.times.latency[width]
        return np.where(self.allowed[width, behind] & (latency <= longest), latency, _NEVER)

    def fits(self, gpus_used: int, width: int) -> bool:
        """Whether a stage on so many GPUs stays within a node when so many are used."""
        return gpus_used % self.times.gpus_per_node + width <= self.times.gpus_per_node

    def _before(self, longest: int) -> _Tables:
        tables: _Tables = {(0, 0): self._nothing(0)}
        level = {0: tables[0, 0]}
        for n_before in range(self.n_stages):
            costs = self._by_width(self.n_stages - 1 - n_before, longest)
            level = self._extended(level, {width: cost.T for width, cost in costs.items()})
            tables |= {(n_before + 1, gpus): sums for gpus, sums in level.items()}
        return tables

    def _behind(self, longest: int) -> _Tables:
        tables: _Tables = {(0, 0): self._nothing(-1)}
        level = {0: tables[0, 0]}
        for n_behind in range(self.n_stages):
            level = self._extended(level, self._by_width(n_behind, longest))
            tables |= {(n_behind + 1, gpus): sums for gpus, sums in level.items()}
        return tables

    def _nothing(self, layer: int) -> Ints:
        """Return the sums of no stage, which reach one layer."""
        sums = np.full(self.times.n_layers + 1, _NEVER)
        sums[layer] = 0
        return sums

    def _by_width(self, behind: int, longest: int) -> dict[int, Ints]:
        # Without a limit of memory it does not matter how many stages come behind.
        key = behind if self.times.memory else 0, longest
        if key not in self._costs:
            if len(self._costs) > _KEPT:
                self._costs.clear()
            self._costs[key] = {width: self.costs(width, behind, longest) for width in self.times.widths}
        return self._costs[key]

    def _extended(self, level: dict[int, Ints], costs: dict[int, Ints]) -> dict[int, Ints]:
        """Return what one stage more reaches, by GPUs; ``costs`` has a row for each layer that is reached."""
        found: dict[int, Ints] = {}
        for gpus, sums in level.items():
            for width, cost in costs.items():
                if gpus + width <= self.n_gpus and self.fits(gpus, width):
                    least = np.minimum((cost + sums).min(axis=1), _NEVER)
                    other = found.get(gpus + width)
                    found[gpus + width] = least if other is None else np.minimum(other, least)
        return found

    def choices(self, below: int | None) -> Iterator[_Choice]:
        """Yield the choices of a slowest stage that may cost less than given, lowest bound first."""
        before, behind = self.free
        found = []
        for (n_before, gpus), sums in before.items():
            n_behind = self.n_stages - 1 - n_before
            for width in self.times.widths:
                other = behind.get((n_behind, self.n_gpus - gpus - width))
                if other is None or not self.fits(gpus, width):
                    continue
                latency = self.times.latency[width]
                bound = sums[:, None] + (self.steady + n_before + 2) * latency + 2 * other[None, :]
                ok = self.allowed[width, n_behind] & (sums[:, None] <= n_before * latency)
                ok &= other[None, :] <= n_behind * (latency - 1)
                if below is not None:
                    ok &= bound < below
                first, end = np.nonzero(ok)
                same = (np.full(len(first), value) for value in (width, n_before, gpus))
                found.append(np.stack([bound[first, end], latency[first, end], first, end, *same]))
        if found:
            listed = np.concatenate(found, axis=1)
            for index in np.lexsort(listed[::-1]):
                yield _Choice(*listed[:, index].tolist())

    def cost(self, choice: _Choice) -> int:
        """Return what the best pipeline with this slowest stage costs."""
        before, behind = self.tables(choice.latency)
        ahead = int(before[choice.n_before, choice.gpus_before][choice.first])
        after = int(behind[self._after(choice)][choice.end])
        return ahead + (self.steady + choice.n_before + 2) * choice.latency + 2 * after

    def _after(self, choice: _Choice) -> tuple[int, int]:
        return self.n_stages - 1 - choice.n_before, self.n_gpus - choice.gpus_before - choice.width

    def cuts(self, choice: _Choice) -> tuple[Cut, ...]:
        """Return its stages; among equal ones every cut is as far left as it can be."""
        before, behind = self.tables(choice.latency)
        ahead = self._walk_back(before, choice)
        return (*ahead, (choice.first, choice.end, choice.width), *self._walk_on(behind, choice))

    def _walk_back(self, tables: _Tables, choice: _Choice) -> Iterator[Cut]:
        n_used, gpus, end = choice.n_before, choice.gpus_before, choice.first
        found: list[Cut] = []
        while n_used:
            first, width = self._previous(tables, n_used, gpus, end, choice.latency)
            found.append((first, end, width))
            n_used, gpus, end = n_used - 1, gpus - width, first
        return reversed(found)

    def _previous(self, tables: _Tables, n_used: int, gpus: int, end: int, longest: int) -> tuple[int, int]:
        goal = tables[n_used, gpus][end]
        return min(
            (int(first), width)
            for width, cost in self._by_width(self.n_stages - n_used, longest).items()
            if (n_used - 1, gpus - width) in tables and self.fits(gpus - width, width)
            for first in np.flatnonzero(tables[n_used - 1, gpus - width] + cost[:, end] == goal)
        )

    def _walk_on(self, tables: _Tables, choice: _Choice) -> Iterator[Cut]:
        first = choice.end
        n_left, gpus = self._after(choice)
        while n_left:
            goal = tables[n_left, gpus][first]
            end, width = min(
                (int(end), width)
                for width, cost in self._by_width(n_left - 1, choice.latency - 1).items()
                if (n_left - 1, gpus - width) in tables and self.fits(gpus - width, width)
                for end in np.flatnonzero(tables[n_left - 1, gpus - width] + cost[first] == goal)
            )
            yield first, end, width
            n_left, gpus, first = n_left - 1, gpus - width, end


def exact_cuts(times: StageTimes, n_nodes: int, rule: CostRule) -> tuple[Cut, ...] | None:
    """Return the stages of the cheapest pipeline on so many nodes, None if there is none.

    Of equal costs the fewest stages win, then the choice with the lowest bound and latency.
    """
    best: int | None = None
    cuts = None
    for n_stages in times.stage_counts(n_nodes, rule):
        search = _Search(times, n_nodes, n_stages, rule.steady(n_stages))
        winner = None
        for choice in search.choices(best):
            if best is not None and choice.bound >= best:
                break
            cost = search.cost(choice)
            if cost < (best if best is not None else _NEVER):
                best, winner = cost, choice
        cuts = search.cuts(winner) if winner else cuts
    return cuts
