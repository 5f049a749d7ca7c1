"""The published search: divide layers and nodes in two, and each half again, as the artifact does.

Each half is the best by its own cost, which says little of its cost within the whole, so the result may be
worse than the best; `exact_cuts` finds that.
"""

from dataclasses import dataclass

import numpy as np

from makespan.oobleck.planning._cost import CostRule, Ints, StageTimes
from makespan.oobleck.planning._exact import Cut

__all__ = ["DivideAndConquer"]

_NEVER = np.int64(1 << 60)


@dataclass(frozen=True, slots=True)
class _Key:
    """How many stages, nodes and GPUs of each, and how many stages come behind where memory is limited."""

    n_stages: int
    n_nodes: int
    n_gpus: int
    behind: int


@dataclass(slots=True)
class _Best:
    """The best pipeline of every range of layers, all (n_layers + 1, n_layers + 1).

    ``last`` is the index of its slowest stage, ``tail`` the sum from that on; ``cut`` and ``split`` say how
    it is put together.
    """

    cost: Ints
    total: Ints
    slowest: Ints
    last: Ints
    tail: Ints
    cut: Ints
    split: Ints


class DivideAndConquer:
    """Templates of a model by the published search; what is found for one number of nodes serves the others.

    Parameters
    ----------
    times
        Latencies and memory of the stages.
    rule
        How pipelines are priced.
    """

    def __init__(self, times: StageTimes, rule: CostRule) -> None:
        self._times, self._rule = times, rule
        self._found: dict[_Key, _Best | None] = {}

    def cuts(self, n_nodes: int) -> tuple[Cut, ...] | None:
        """Return the stages that are found for so many nodes, None if there are none."""
        n_layers, best, winner = self._times.n_layers, int(_NEVER), None
        for n_stages in self._times.stage_counts(n_nodes, self._rule):
            key = _Key(n_stages, n_nodes, self._times.gpus_per_node, 0)
            found = self._best(key)
            if found is not None and found.cost[0, n_layers] < best:
                best, winner = int(found.cost[0, n_layers]), key
        return None if winner is None else self._stages(winner, 0, n_layers)

    def _best(self, key: _Key) -> _Best | None:
        if key not in self._found:
            possible = key.n_nodes <= key.n_stages <= min(key.n_nodes * key.n_gpus, self._times.n_layers)
            if not possible:
                self._found[key] = None
            elif key.n_stages == 1:
                self._found[key] = self._leaf(key)
            else:
                self._found[key] = self._joined(key)
        return self._found[key]

    def _leaf(self, key: _Key) -> _Best | None:
        if key.n_gpus not in self._times.widths:
            return None
        latency = self._times.latency[key.n_gpus]
        cost = (2 + self._rule.steady(1)) * latency
        allowed = self._times.allowed(key.n_gpus, key.behind)
        nothing = np.zeros_like(latency)
        return _Best(
            np.where(allowed, cost, _NEVER), latency, latency, nothing, latency, nothing, nothing
        )  # fmt: skip

    def _splits(self, key: _Key) -> list[tuple[_Key, _Key]]:
        """Return the halves in the order in which they are tried: nodes or GPUs on the left, then stages."""
        several = key.n_nodes > 1
        limited = self._times.memory is not None
        found = []
        for held in range(1, key.n_nodes if several else key.n_gpus):
            for n_left in range(1, key.n_stages):
                n_right = key.n_stages - n_left
                behind = key.behind + n_right if limited else 0
                if several:
                    left = _Key(n_left, held, key.n_gpus, behind)
                    right = _Key(n_right, key.n_nodes - held, key.n_gpus, key.behind)
                else:
                    left = _Key(n_left, 1, held, behind)
                    right = _Key(n_right, 1, key.n_gpus - held, key.behind)
                found.append((left, right))
        return found

    def _joined(self, key: _Key) -> _Best | None:
        best = None
        steady = self._rule.steady(key.n_stages)
        for index, (left_key, right_key) in enumerate(self._splits(key)):
            left, right = self._best(left_key), self._best(right_key)
            if left is None or right is None:
                continue
            found = _join(left, right, left_key.n_stages, steady, index)
            best = found if best is None else _better(best, found)
        return best

    def _stages(self, key: _Key, first: int, end: int) -> tuple[Cut, ...]:
        best = self._best(key)
        if best is None or key.n_stages == 1:
            return ((first, end, key.n_gpus),)
        left, right = self._splits(key)[int(best.split[first, end])]
        cut = int(best.cut[first, end])
        return self._stages(left, first, cut) + self._stages(right, cut, end)


def _join(left: _Best, right: _Best, n_left: int, steady: int, index: int) -> _Best:
    """Put two halves together at the cheapest cut of every range, of equal ones the first."""

    def at(values: Ints, is_left: bool) -> Ints:
        """Values by (first layer, cut, end layer)."""
        return values[:, :, None] if is_left else values[None, :, :]

    ahead = at(right.slowest, False) >= at(left.slowest, True)
    total = at(left.total, True) + at(right.total, False)
    slowest = np.maximum(at(left.slowest, True), at(right.slowest, False))
    last = np.where(ahead, n_left + at(right.last, False), at(left.last, True))
    tail = np.where(ahead, at(right.tail, False), at(left.tail, True) + at(right.total, False))
    possible = (at(left.cost, True) < _NEVER) & (at(right.cost, False) < _NEVER)
    cost = np.where(possible, total + (steady + last) * slowest + tail, _NEVER)
    cut = cost.argmin(axis=1)

    def chosen(values: Ints) -> Ints:
        return np.asarray(np.take_along_axis(values, cut[:, None, :], axis=1)[:, 0, :])

    return _Best(
        cost=chosen(cost),
        total=chosen(total),
        slowest=chosen(slowest),
        last=chosen(last),
        tail=chosen(tail),
        cut=cut,
        split=np.full_like(cut, index),
    )


def _better(one: _Best, other: _Best) -> _Best:
    """Take of every range the cheaper of two, of equal ones that with the earlier cut, then the first."""
    wins = (other.cost < one.cost) | ((other.cost == one.cost) & (other.cut < one.cut))
    names = ("cost", "total", "slowest", "last", "tail", "cut", "split")
    return _Best(*(np.where(wins, getattr(other, name), getattr(one, name)) for name in names))
