"""In which order points are tried: each strategy asks for one and is told what came of it."""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from makespan.errors import InputError, unknown_name
from makespan.slapo.tuning._evaluation import Evaluation, key_of
from makespan.slapo.tuning._space import Point, Value

__all__ = [
    "STRATEGIES",
    "CoordinateDescent",
    "Exhaustive",
    "Frontier",
    "Random",
    "Search",
    "Strategy",
    "strategy_named",
]

Search = Generator[Point, Evaluation, None]


class Strategy(ABC):
    """An order of trying points; immutable, the state of a search is that of its generator."""

    name: ClassVar[str]
    finds_best: ClassVar[bool] = True
    """Whether no better point is left where the search has nothing more to ask."""

    @abstractmethod
    def search(
        self, points: Sequence[Point], rng: np.random.Generator, known: Mapping[str, Evaluation]
    ) -> Search:
        """Yield points of the space, one at a time, and take what came of each.

        A point may be asked for again, it is not evaluated twice. ``known``: what a database says already,
        by key.
        """

    def round_of(self, point: Point) -> Hashable:
        """Return what a round of the search has in common; patience counts rounds without a better point."""
        return key_of(point)


@dataclass(frozen=True, slots=True)
class Exhaustive(Strategy):
    """Every point, in the order of the space."""

    name = "exhaustive"

    def search(
        self, points: Sequence[Point], rng: np.random.Generator, known: Mapping[str, Evaluation]
    ) -> Search:
        """Yield all points."""
        for index in range(len(points)):
            yield points[index]


@dataclass(frozen=True, slots=True)
class Random(Strategy):
    """Every point, in random order; a budget makes it a sample."""

    name = "random"

    def search(
        self, points: Sequence[Point], rng: np.random.Generator, known: Mapping[str, Evaluation]
    ) -> Search:
        """Yield all points, shuffled."""
        for index in rng.permutation(len(points)):
            yield points[int(index)]


@dataclass(frozen=True, slots=True)
class CoordinateDescent(Strategy):
    """From random points: the best value of one symbol at a time, until no symbol has a better one."""

    starts: int = 3
    name = "coordinate_descent"
    finds_best = False

    def search(
        self, points: Sequence[Point], rng: np.random.Generator, known: Mapping[str, Evaluation]
    ) -> Search:
        """Yield the lines through the best point so far, from each start."""
        for index in rng.choice(len(points), size=min(self.starts, len(points)), replace=False):
            best = yield points[int(index)]
            is_better = True
            while is_better:
                is_better = False
                for name in best.point:
                    line = [point for point in points if _differ_only_in(name, point, best.point)]
                    found = best
                    for point in line:
                        tried = yield point
                        found = max(found, tried, key=lambda one: one.score)
                    is_better |= found.score > best.score
                    best = found


def _differ_only_in(name: str, one: Point, other: Point) -> bool:
    return set(one) == set(other) and [key for key in one if one[key] != other[key]] == [name]


@dataclass(frozen=True, slots=True)
class Frontier(Strategy):
    """Along the border of what fits into memory.

    Memory grows with one symbol and falls with another, and so does the value of points that fit: a larger
    batch shares the fixed time of a step, and what is recomputed costs time. So only the corners of the
    border can be best. From the largest values of both: a point that fits leads to the next smaller value of
    the second, one that does not to the next smaller of the first, until the smallest value of the second
    fits. That takes at most as many steps as there are values of both, less one. Each combination of other
    symbols has a border of its own.

    Parameters
    ----------
    grows, saves
        Names of the symbols with which memory grows and falls.
    """

    grows: str = "global_batch_size"
    saves: str = "ckpt_ratio"
    name = "frontier"

    def search(
        self, points: Sequence[Point], rng: np.random.Generator, known: Mapping[str, Evaluation]
    ) -> Search:
        """Yield the points of the border; those that another one out of memory implies are left out."""
        if wrong := [point for point in points if not {self.grows, self.saves} <= set(point)]:
            raise InputError(
                f"strategy frontier: found a space of {', '.join(wrong[0])}; accepted: one with "
                f"{self.grows} and {self.saves}"
            )
        borders: defaultdict[str, list[Point]] = defaultdict(list)
        for point in points:
            borders[self._others(point)].append(point)
        for others, own in borders.items():
            full = [
                one.point
                for one in known.values()
                if one.status == "oom" and self._others(one.point) == others
            ]
            yield from self._border(own, full)

    def round_of(self, point: Point) -> Hashable:
        """Return the value with which memory grows, so that patience counts batches, not runs."""
        return self._others(point), point[self.grows]

    def _others(self, point: Point) -> str:
        return key_of({name: value for name, value in point.items() if name not in (self.grows, self.saves)})

    def _border(self, points: Sequence[Point], full: list[Point]) -> Search:
        rows: defaultdict[Value, list[Point]] = defaultdict(list)
        for point in points:
            rows[point[self.grows]].append(point)
        level, fits = math.inf, False  # the last value of the second symbol, and whether it fitted
        for size in sorted(rows, key=_number, reverse=True):
            for point in sorted(rows[size], key=lambda one: _number(one[self.saves]), reverse=True):
                saved = _number(point[self.saves])
                if saved > level or (saved == level and fits):
                    continue
                level, fits = saved, False
                if any(self._is_implied(point, other) for other in full):
                    break
                tried = yield point
                if tried.status == "oom":
                    full.append(point)
                    break
                fits = True

    def _is_implied(self, point: Point, full: Point) -> bool:
        """Whether a point needs at least the memory of another one, which did not fit."""
        return (
            point != full
            and _number(point[self.grows]) >= _number(full[self.grows])
            and _number(point[self.saves]) <= _number(full[self.saves])
        )


def _number(value: Value) -> float:
    if isinstance(value, str):
        raise InputError(f"strategy frontier: found the value {value!r}; accepted: numbers")
    return float(value)


STRATEGIES: Mapping[str, type[Strategy]] = {
    kind.name: kind for kind in (Exhaustive, Random, CoordinateDescent, Frontier)
}


def strategy_named(name: str, **options: Any) -> Strategy:
    """Return a strategy of `STRATEGIES`; raises `UnknownNameError` for any other name."""
    if name not in STRATEGIES:
        raise unknown_name("strategy", name, STRATEGIES)
    return STRATEGIES[name](**options)
