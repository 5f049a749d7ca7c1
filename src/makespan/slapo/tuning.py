"""Tuner: non-rectangular spaces, search strategies, and a database of evaluations.

The module does not import torch. Equal arguments evaluate the same points in the same order.
"""

import json
import math
import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from makespan.arguments import check_kind, check_range
from makespan.errors import InputError, MakespanError, TraceError, unknown_name
from makespan.files import parse_json, read_bytes

# --- Spaces ---

Value = int | float | str | bool
Point = Mapping[str, Value]
"""One value per symbol, by name."""


class UnfixedSymbolError(MakespanError, ValueError):
    """The value of a symbol is read before it is fixed."""


class Symbol:
    """A choice with candidates, and a value once it is fixed.

    Every comparison of a symbol without a value is false, so that a declaration takes a branch that depends
    on the symbol only once it has a value.
    """

    def __init__(self, name: str, candidates: Sequence[Value], fixed: Value | None = None) -> None:
        self.name = name
        self.candidates = tuple(candidates)
        self._value = fixed

    def __repr__(self) -> str:
        return f"Symbol({self.name!r}, {self._value if self.is_fixed else list(self.candidates)})"

    @property
    def is_fixed(self) -> bool:
        """True if it has a value."""
        return self._value is not None

    @property
    def value(self) -> Value:
        """Its value; raises `UnfixedSymbolError`, a `ValueError`, without one."""
        if self._value is None:
            raise UnfixedSymbolError(
                f"symbol {self.name!r} has no value yet; until then it can only be compared, "
                "and every comparison is false"
            )
        return self._value

    def _compared(self, other: object, operation: str) -> bool:
        against = other._value if isinstance(other, Symbol) else other
        if self._value is None or against is None:
            return False
        return bool(getattr(self._value, operation)(against))

    def __eq__(self, other: object) -> bool:
        return self._compared(other, "__eq__")

    def __ne__(self, other: object) -> bool:
        return self._compared(other, "__ne__")

    def __lt__(self, other: object) -> bool:
        return self._compared(other, "__lt__")

    def __le__(self, other: object) -> bool:
        return self._compared(other, "__le__")

    def __gt__(self, other: object) -> bool:
        return self._compared(other, "__gt__")

    def __ge__(self, other: object) -> bool:
        return self._compared(other, "__ge__")

    __hash__ = object.__hash__


class Space:
    """All points that a declaration allows.

    Parameters
    ----------
    declare
        Function that creates symbols and constraints in a space. It is called again whenever another symbol
        is fixed, so that candidates of later symbols may depend on earlier ones. Without it, symbols are
        created in the space itself and span a grid.

    Notes
    -----
    Branches of the declaration, `constrain` and `Polygon` make the space non-rectangular.
    """

    def __init__(self, declare: Callable[["Space"], object] | None = None) -> None:
        self._declare = declare
        self._fixed: Point = {}
        self._symbols: dict[str, Symbol] = {}
        self._conditions: list[Callable[[Point], bool]] = []

    def create_symbol(self, name: str, values: Iterable[Any]) -> Symbol:
        """Return a symbol with these candidates; a symbol that already has a value keeps it.

        Raises
        ------
        InputError
            A candidate occurs twice, or is not a number, string or boolean.
        """
        candidates = [getattr(value, "item", lambda value=value: value)() for value in values]
        wrong = [value for value in candidates if not isinstance(value, Value)]
        if wrong or len(set(candidates)) != len(candidates):
            raise InputError(
                f"symbol {name!r}: candidates are {candidates}; expected distinct numbers, strings and "
                "booleans"
            )
        self._symbols[name] = Symbol(name, candidates, self._fixed.get(name))
        return self._symbols[name]

    def constrain(self, condition: Callable[[Point], bool]) -> None:
        """Keep only points for which a condition holds."""
        self._conditions.append(condition)

    def enumerate(self) -> list[Point]:
        """Return all points, in the order in which symbols and candidates are declared.

        Raises
        ------
        InputError
            A symbol with a value is no longer declared once another symbol gets a value.
        """
        return list(self._points({}))

    def __len__(self) -> int:
        return len(self.enumerate())

    def _at(self, fixed: Point) -> "Space":
        """Return the space that the declaration creates with some symbols fixed."""
        scope = Space()
        scope._fixed = fixed
        if self._declare is not None:
            self._declare(scope)
        else:
            for symbol in self._symbols.values():
                scope.create_symbol(symbol.name, symbol.candidates)
            scope._conditions = self._conditions
        lost = sorted(set(fixed) - set(scope._symbols))
        if lost:
            raise InputError(
                f"symbol {lost[0]!r} is not declared where {dict(fixed)}; a declaration must keep the "
                "symbols that have values"
            )
        return scope

    def _points(self, fixed: Point) -> Iterator[Point]:
        # Depth first: fix the first free symbol and declare again, as later candidates may depend on it.
        scope = self._at(fixed)
        free = next((symbol for symbol in scope._symbols.values() if not symbol.is_fixed), None)
        if free is not None:
            for value in free.candidates:
                yield from self._points({**fixed, free.name: value})
        elif fixed and all(condition(fixed) for condition in scope._conditions):
            yield fixed


@dataclass(frozen=True, slots=True)
class Polygon:
    """A region of two symbols, border included.

    Parameters
    ----------
    x, y
        Names of the symbols.
    vertices
        Corners (x, y), in order. Numbers are read as decimals, so that rounding of floats does not move a
        point off a slanted edge.
    """

    x: str
    y: str
    vertices: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if len(self.vertices) < 3:
            raise InputError(f"a polygon has {len(self.vertices)} vertices; expected at least three")
        if not all(math.isfinite(number) for corner in self.vertices for number in corner):
            raise InputError(f"a polygon has the vertices {self.vertices}; expected finite numbers")

    def __call__(self, point: Point) -> bool:
        """Return True if a point of the space is inside or on the border."""
        x, y = (Fraction(str(point[name])) for name in (self.x, self.y))
        corners = [(Fraction(str(x)), Fraction(str(other))) for x, other in self.vertices]
        # A point is inside if a horizontal ray from it crosses an odd number of edges.
        is_inside = False
        for (x1, y1), (x2, y2) in zip(corners, [*corners[1:], corners[0]], strict=True):
            side = (x2 - x1) * (y - y1) - (y2 - y1) * (x - x1)
            if side == 0 and min(x1, x2) <= x <= max(x1, x2) and min(y1, y2) <= y <= max(y1, y2):
                return True
            if (y1 > y) != (y2 > y) and (side > 0) == (y2 > y1):
                is_inside = not is_inside
        return is_inside


# --- Evaluations, and a database of them ---

Status = Literal["ok", "oom", "invalid", "fail"]
STATUSES: tuple[str, ...] = get_args(Status)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of one point.

    Parameters
    ----------
    point
        Values of the symbols.
    status
        ``ok``; ``oom``, out of memory; ``invalid``, the point is inconsistent, which costs no evaluation;
        ``fail``, any other failure.
    value
        Value to maximise; None unless the status is ``ok``.
    info
        Other results of the objective, as JSON.

    Raises
    ------
    InputError
        The status is unknown, or the value is missing, not finite, or superfluous.
    """

    point: Point
    status: Status
    value: float | None
    info: Mapping[str, Any]

    def __post_init__(self) -> None:
        is_valid = self.status in STATUSES and (
            (self.value is not None and math.isfinite(self.value))
            if self.status == "ok"
            else self.value is None
        )
        if not is_valid:
            raise InputError(
                f"point {dict(self.point)}: status is {self.status!r} with value {self.value!r}; "
                f"expected ok with a finite number, or {', '.join(STATUSES[1:])} with None"
            )

    @property
    def score(self) -> float:
        """The value; minus infinity if there is none."""
        return -math.inf if self.value is None else self.value


def key_of(point: Point) -> str:
    """Return a key that is the same for equal points, in any order of symbols; 1 equals 1.0."""
    plain = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in point.items()
    }
    return json.dumps(plain, sort_keys=True)


class Database:
    """Evaluations in a file of JSON lines, each on disk before the next evaluation begins.

    An unfinished last line of a killed process is dropped. Raises `TraceError` if another line is not an
    evaluation; the message names file and line.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        content = read_bytes(self._path, "evaluations", TraceError) if self._path.exists() else b""
        self._whole_bytes = content.rfind(b"\n") + 1
        lines = content[: self._whole_bytes].splitlines()
        read = [self._read(line, number) for number, line in enumerate(lines, start=1)]
        self._known = {key_of(evaluation.point): evaluation for evaluation in read}

    def _read(self, line: bytes, number: int) -> Evaluation:
        try:
            raw = parse_json(line)
            return Evaluation(dict(raw["point"]), raw["status"], raw["value"], dict(raw["info"]))
        except (ValueError, KeyError, TypeError, InputError) as error:
            raise TraceError(
                f"{self._path}: line {number}: {error}; expected an evaluation with point, status, value "
                "and info"
            ) from None

    def known(self, points: Iterable[Point]) -> dict[str, Evaluation]:
        """Return the evaluations of these points, by key."""
        return {key: self._known[key] for key in map(key_of, points) if key in self._known}

    def append(self, evaluation: Evaluation) -> None:
        """Append an evaluation and wait until it is on disk."""
        record = {
            "point": dict(evaluation.point),
            "status": evaluation.status,
            "value": evaluation.value,
            "info": dict(evaluation.info),
        }
        line = json.dumps(record, allow_nan=False) + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Cut off the unfinished line of a killed process, to which this line would be joined.
        with self._path.open("ab") as stream:
            stream.truncate(self._whole_bytes)
            stream.seek(self._whole_bytes)
            stream.write(line.encode())
            stream.flush()
            os.fsync(stream.fileno())
        self._whole_bytes += len(line.encode())
        self._known[key_of(evaluation.point)] = evaluation


# --- Strategies ---
#
# A strategy is a generator: it yields the next point and receives its evaluation, or a list of points whose
# choice does not depend on each other, and receives a list.

Search = Generator["Point | list[Point]", Any, None]


class Strategy(ABC):
    """An order in which to try points; immutable, as the generator holds the state of a search."""

    name: ClassVar[str]
    finds_best: ClassVar[bool] = True
    """True if a search that is not stopped finds the best point."""

    @abstractmethod
    def search(
        self, points: Sequence[Point], rng: np.random.Generator, known: Mapping[str, Evaluation]
    ) -> Search:
        """Yield points of the space, one or several at a time, and receive the evaluation of each.

        Points of a list may be evaluated at the same time. A point may be yielded again; it is evaluated
        once. ``known`` holds the evaluations in the database, by key.
        """

    def round_of(self, point: Point) -> Hashable:
        """Return the round of a point; patience counts rounds without a better point."""
        return key_of(point)


@dataclass(frozen=True, slots=True)
class Exhaustive(Strategy):
    """Every point, in the order of the space."""

    name = "exhaustive"

    def search(
        self, points: Sequence[Point], rng: np.random.Generator, known: Mapping[str, Evaluation]
    ) -> Search:
        """Yield all points."""
        yield list(points)


@dataclass(frozen=True, slots=True)
class Random(Strategy):
    """Every point, in random order; with a budget, a random sample."""

    name = "random"

    def search(
        self, points: Sequence[Point], rng: np.random.Generator, known: Mapping[str, Evaluation]
    ) -> Search:
        """Yield all points, shuffled."""
        yield [points[int(index)] for index in rng.permutation(len(points))]


@dataclass(frozen=True, slots=True)
class CoordinateDescent(Strategy):
    """Optimise one symbol at a time, from random points, until no symbol has a better value."""

    starts: int = 3
    name = "coordinate_descent"
    finds_best = False

    def search(
        self, points: Sequence[Point], rng: np.random.Generator, known: Mapping[str, Evaluation]
    ) -> Search:
        """Yield the lines through the best point so far, for each start."""
        for index in rng.choice(len(points), size=min(self.starts, len(points)), replace=False):
            best = yield points[int(index)]
            is_better = True
            while is_better:
                is_better = False
                for name in best.point:
                    # All points that differ from the best one in this symbol alone.
                    line = [
                        point
                        for point in points
                        if set(point) == set(best.point)
                        and [key for key in point if point[key] != best.point[key]] == [name]
                    ]
                    tried = yield line
                    best_of_line = max([best, *tried], key=lambda evaluation: evaluation.score)
                    is_better |= best_of_line.score > best.score
                    best = best_of_line


@dataclass(frozen=True, slots=True)
class Frontier(Strategy):
    """Search along the border of the points that fit into memory.

    Memory grows with one symbol and falls with another, and so does the value of points that fit: a larger
    batch shares the fixed time of a step, and recomputation costs time. So only the corners of the border can
    be best. The search starts at the largest values of both: a point that fits leads to the next smaller
    value of the second symbol, one that does not to the next smaller of the first, until the smallest value
    of the second fits. That takes at most as many steps as there are values of both, less one. Each
    combination of other symbols has a separate border.

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
        """Yield the points of the border, except those that cannot fit according to another one."""
        if wrong := [point for point in points if not {self.grows, self.saves} <= set(point)]:
            raise InputError(
                f"strategy frontier: the space has {', '.join(wrong[0])}; expected {self.grows} "
                f"and {self.saves}"
            )
        borders: defaultdict[str, list[Point]] = defaultdict(list)
        for point in points:
            borders[self._others(point)].append(point)
        for others, points_of_border in borders.items():
            full = [
                evaluation.point
                for evaluation in known.values()
                if evaluation.status == "oom" and self._others(evaluation.point) == others
            ]
            yield from self._border(points_of_border, full)

    def round_of(self, point: Point) -> Hashable:
        """Return the value with which memory grows: patience counts batch sizes rather than points."""
        return self._others(point), point[self.grows]

    def _others(self, point: Point) -> str:
        return key_of({name: value for name, value in point.items() if name not in (self.grows, self.saves)})

    def _border(self, points: Sequence[Point], full: list[Point]) -> Search:
        rows: defaultdict[Value, list[Point]] = defaultdict(list)
        for point in points:
            rows[point[self.grows]].append(point)
        # A staircase: at one size, go to smaller values of the second symbol until a point does not fit,
        # then to the next smaller size, at that value. Larger values fit at the larger size already, where
        # they are faster.
        level, fits = math.inf, False  # the last value of the second symbol, and whether it fits
        for size in sorted(rows, key=_number, reverse=True):
            for point in sorted(rows[size], key=lambda point: _number(point[self.saves]), reverse=True):
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
        """Return True if a point needs at least the memory of another one that does not fit."""
        return (
            point != full
            and _number(point[self.grows]) >= _number(full[self.grows])
            and _number(point[self.saves]) <= _number(full[self.saves])
        )


def _number(value: Value) -> float:
    if isinstance(value, str):
        raise InputError(f"strategy frontier: got the value {value!r}; expected numbers")
    return float(value)


STRATEGIES: Mapping[str, type[Strategy]] = {
    kind.name: kind for kind in (Exhaustive, Random, CoordinateDescent, Frontier)
}


def strategy_named(name: str, **options: Any) -> Strategy:
    """Return a strategy of `STRATEGIES`; raises `UnknownNameError` for any other name."""
    if name not in STRATEGIES:
        raise unknown_name("strategy", name, STRATEGIES)
    return STRATEGIES[name](**options)


# --- Search ---

Outcome = tuple[Status, "float | None", Mapping[str, Any]]
"""Status, value and other results of a point."""
Measuring = Generator["float | tuple[float, Mapping[str, Any]]", None, "Outcome | None"]
"""Measurements of a value, alone or with other results; at the end the outcome, or None for the median."""
Objective = Callable[[Point], "Outcome | Measuring"]
OnFail = Literal["skip", "stop-symbol", "stop-all"]
Stop = Literal["finished", "budget", "patience", "fail"]
Optimum = Literal["best", "local", "unknown"]


@dataclass(frozen=True, slots=True)
class Precision:
    """When the measurements of a point suffice.

    The interval of their mean follows Student's t distribution. It is looked at after every measurement, so
    that it misses the mean more often than its confidence says.

    Parameters
    ----------
    relative
        Half the width of the interval, as a share of the mean, at which the value is known well enough.
    confidence
        Confidence of the interval.
    fewest
        Measurements before the first look, at least 2.

    Raises
    ------
    InputError
        A number is out of range.
    """

    relative: float = 0.02
    confidence: float = 0.95
    fewest: int = 3

    def __post_init__(self) -> None:
        if not (self.relative >= 0 and 0 < self.confidence < 1 and self.fewest >= 2):
            raise InputError(
                f"{self}: expected relative >= 0, a confidence between 0 and 1, and at least 2 measurements"
            )

    def half_width(self, values: Sequence[float]) -> float:
        """Return half the width of the interval of the mean; infinity for less than two values."""
        from scipy import special  # imported here: it is slow, and only measurements need it

        if len(values) < 2:
            return math.inf
        quantile = float(special.stdtrit(len(values) - 1, 0.5 + self.confidence / 2))
        return quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))

    def enough(self, values: Sequence[float], best: float) -> str:
        """Return ``worse`` if the value is below the best one, ``precise`` if it is known, else nothing."""
        if len(values) < self.fewest:
            return ""
        mean, half = float(np.mean(values)), self.half_width(values)
        if mean + half < best:
            return "worse"
        return "precise" if half <= self.relative * abs(mean) else ""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a search.

    Parameters
    ----------
    best, best_value
        The best point and its value; None if no point is ``ok``.
    history
        Every point that was evaluated or read from the database, in the order of the search.
    n_space
        Number of points of the space.
    stopped
        ``finished``, the strategy had no more points; or the reason of an early stop: ``budget``,
        ``patience`` (a better point may exist), or ``fail``.
    optimum
        ``best`` of the space, if the assumptions of the strategy hold; ``local``, no single symbol has a
        better value, but points that differ in several were not tried; ``unknown`` if the search stopped
        early, or found nothing.
    spread
        Largest difference between evaluations of a point; None if none was repeated.
    """

    best: Point | None
    best_value: float | None
    history: tuple[Evaluation, ...]
    n_space: int
    stopped: Stop
    optimum: Optimum = "unknown"
    spread: float | None = None

    @property
    def n_eval(self) -> int:
        """Number of evaluations, including those out of memory; invalid points cost none."""
        return sum(evaluation.status != "invalid" for evaluation in self.history)

    @property
    def n_oom(self) -> int:
        """Number of evaluations that ran out of memory."""
        return sum(evaluation.status == "oom" for evaluation in self.history)

    @property
    def share(self) -> float:
        """Number of evaluations as a share of the space."""
        return self.n_eval / self.n_space

    def share_of(self, optimum: float) -> float:
        """Return the best value as a share of that of the whole space; 0 if nothing was found."""
        return 0.0 if self.best_value is None else self.best_value / optimum


def tune(
    space_fn: Callable[[Space], object],
    eval_fn: Objective,
    strategy: Strategy | str,
    budget: int | None = None,
    patience: int | None = None,
    db: str | Path | None = None,
    seed: int = 0,
    on_fail: OnFail = "skip",
    repeats: int = 0,
    workers: int = 1,
    precision: Precision | None = None,
) -> Result:
    """Search a space for the point with the largest value.

    Parameters
    ----------
    space_fn
        Function that declares the space, see `Space`.
    eval_fn
        Function of a point that returns status, value and other results. Exceptions that report exhausted
        memory count as ``oom``; others propagate. It may be a generator that yields measurements of the
        value, such as the throughput of each step, alone or with other results. At its end it returns the
        same as a function would, or None for ``ok`` and the median. It is closed as soon as measurements
        suffice, see ``precision``; then ``enough`` among the results says why.
    strategy
        One of `STRATEGIES`, by name or as a value.
    budget
        Number of evaluations after which the search stops.
    patience
        Rounds without a better point after which it stops, counted from the first point that is ``ok``. A
        round is one point, or all points of a batch size for ``frontier``.
    db
        File of evaluations, see `Database`: its points are not evaluated again, and new evaluations are
        added.
    seed
        Seed of random strategies.
    on_fail
        After a status ``fail``: ``skip``, continue; ``stop-symbol``, skip all points that differ from it only
        in the last symbol; ``stop-all``, stop.
    repeats
        Further evaluations of the best point and of its rivals: points whose value differs from the best by
        no more than evaluations of one point differ. Medians decide. They cost no budget. 0 for a
        deterministic objective.
    workers
        Number of threads that evaluate points of one list of the strategy at the same time. For objectives
        that start processes of their own, on cores of their own. The history has the same points in the same
        order for any number.
    precision
        When the measurements of a generator suffice: once a point is clearly worse than the best one before
        it, or is known well enough. None to take all. Points that are evaluated at the same time are compared
        with the best one before all of them.

    Raises
    ------
    InputError, TraceError
        The space is empty, or the strategy cannot search it; the file is not a database.

    Notes
    -----
    After the auto-tuner of Slapo (ASPLOS 2024): non-rectangular spaces, coordinate descent, and running out
    of memory as a normal result. The frontier is an addition.
    """
    for name, value, kind in (
        ("space_fn", space_fn, Callable), ("eval_fn", eval_fn, Callable), ("seed", seed, int),
        ("on_fail", on_fail, OnFail),
    ):  # fmt: skip
        check_kind(name, value, kind)
    for name, number, least in (("budget", budget, 1), ("patience", patience, 1), ("repeats", repeats, 0)):
        if number is not None:
            check_range(name, number, least)
    chosen: object = strategy_named(strategy) if isinstance(strategy, str) else strategy
    if not isinstance(chosen, Strategy):
        raise InputError(f"strategy is {chosen!r}; expected one of {', '.join(STRATEGIES)}, or a Strategy")
    points = Space(space_fn).enumerate()
    if not points:
        raise InputError("the space has no points")
    store = None if db is None else Database(db)
    known = {} if store is None else store.known(points)
    check_range("workers", workers, 1)
    run = _SearchRun(eval_fn, store, dict(known), on_fail, workers, precision)
    stopped = run.follow(chosen, points, np.random.default_rng(seed), budget, patience)
    spread = run.repeat(repeats)
    best = max(run.history, key=lambda evaluation: evaluation.score, default=None)
    if best is None or best.value is None:
        return Result(None, None, tuple(run.history), len(points), stopped, spread=spread)
    optimum: Optimum = "unknown"
    if len(run.history) == len(points):
        optimum = "best"
    elif stopped == "finished":
        optimum = "best" if chosen.finds_best else "local"
    return Result(best.point, best.value, tuple(run.history), len(points), stopped, optimum, spread)


class _SearchRun:
    """State of one search: requested points, evaluations, and skipped points.

    Invariants: ``history`` holds each requested point once, in the order of first requests, and its
    evaluation is the one in ``known``. A point in ``known`` is never evaluated again, except by `repeat`.
    Each evaluation is in the database before the strategy sees it, so a search that is killed resumes where
    it stopped.
    """

    def __init__(
        self,
        eval_fn: Objective,
        store: Database | None,
        known: dict[str, Evaluation],
        on_fail: OnFail,
        workers: int,
        precision: Precision | None,
    ) -> None:
        self._eval_fn, self._store, self._known, self._on_fail = eval_fn, store, known, on_fail
        self._workers, self._precision = workers, precision
        self._skipped_lines: set[str] = set()
        self._requested: set[str] = set()
        self.history: list[Evaluation] = []

    def follow(
        self,
        strategy: Strategy,
        points: Collection[Point],
        rng: np.random.Generator,
        budget: int | None,
        patience: int | None,
    ) -> Stop:
        """Evaluate the points of a strategy until it ends or a limit stops it."""
        search = strategy.search(list(points), rng, dict(self._known))
        rounds = _PatienceCounter(patience)
        request = next(search, None)
        while request is not None:
            wanted = request if isinstance(request, list) else [request]
            evaluations: list[Evaluation] = []
            for start in range(0, len(wanted), self._workers):
                chunk = wanted[start : start + self._workers]
                # The points of a chunk run at the same time. They are then taken one by one, as if each had
                # run after the other: what comes after a stop is dropped.
                ready = {} if self._workers == 1 else self._evaluate_together(chunk, self._left(budget))
                for point in chunk:
                    if _line_of(point) in self._skipped_lines:
                        evaluations.append(Evaluation(point, "fail", None, {"left_out": True}))
                        continue
                    if rounds.are_enough_before(strategy.round_of(point)):
                        return "patience"
                    if key_of(point) not in self._requested and self._left(budget) < 1:
                        return "budget"
                    evaluation = self._evaluate(point, ready)
                    evaluations.append(evaluation)
                    rounds.note(evaluation)
                    if evaluation.status == "fail" and self._on_fail == "stop-all":
                        return "fail"
                    if evaluation.status == "fail" and self._on_fail == "stop-symbol":
                        self._skipped_lines.add(_line_of(point))
            try:
                request = search.send(evaluations if isinstance(request, list) else evaluations[0])
            except StopIteration:
                request = None
        return "finished"

    def _left(self, budget: int | None) -> float:
        """Return the number of evaluations that the budget still allows."""
        n_spent = sum(evaluation.status != "invalid" for evaluation in self.history)
        return math.inf if budget is None else budget - n_spent

    def _evaluate_together(self, points: Sequence[Point], most: float) -> dict[str, Evaluation]:
        """Evaluate those of some points that are neither known nor skipped, each in a thread."""
        fresh = {
            key_of(point): point
            for point in points
            if key_of(point) not in self._known and _line_of(point) not in self._skipped_lines
        }
        chosen = dict(list(fresh.items())[: int(min(most, len(fresh)))])
        best = self._best()
        with ThreadPoolExecutor(self._workers) as pool:
            evaluations = pool.map(
                lambda point: _evaluate_point(self._eval_fn, point, self._precision, best), chosen.values()
            )
            return dict(zip(chosen, evaluations, strict=True))

    def _best(self) -> float:
        return max((evaluation.score for evaluation in self.history), default=-math.inf)

    def repeat(self, repeats: int) -> float | None:
        """Repeat evaluations of the best point and its rivals; return the largest spread of a point."""
        values: dict[str, list[float]] = {}
        for evaluation in self.history:
            if evaluation.value is not None:
                # An earlier search may have repeated a point of the database: its values count here too.
                known = evaluation.info.get("values")
                if isinstance(known, list) and known:
                    values[key_of(evaluation.point)] = [float(value) for value in known]
                else:
                    values[key_of(evaluation.point)] = [evaluation.score]
        if repeats < 1 or not values:
            return None
        while True:
            ranked = sorted(values, key=lambda key: float(np.median(values[key])), reverse=True)
            spread = max(
                (max(measured) - min(measured) for measured in values.values() if len(measured) > 1),
                default=0.0,
            )
            best = float(np.median(values[ranked[0]]))
            # Repeats of the best two points estimate the noise; if two values differ, a third one is needed.
            fewest = min(3 if spread else 2, repeats + 1)
            unsure = [key for key in ranked[:2] if len(values[key]) < fewest]
            rivals = unsure or [key for key in ranked if float(np.median(values[key])) >= best - spread]
            wanting = [key for key in rivals if len(values[key]) <= repeats]
            if not wanting or (len(rivals) == 1 and not unsure):
                return spread
            for key in wanting:
                self._evaluate_again(key, values[key])

    def _evaluate_again(self, key: str, values: list[float]) -> None:
        place, known = next(
            (place, evaluation)
            for place, evaluation in enumerate(self.history)
            if key_of(evaluation.point) == key
        )
        evaluation = _evaluate_point(self._eval_fn, known.point, self._precision, self._best())
        if evaluation.value is not None:
            values.append(evaluation.value)
            middle = float(np.median(values))
            evaluation = Evaluation(known.point, "ok", middle, {**evaluation.info, "values": list(values)})
        else:  # a point that does not always fit into memory must not win
            values[:] = [-np.inf] * (len(values) + 1)
        self.history[place] = self._known[key] = evaluation
        if self._store is not None:
            self._store.append(evaluation)

    def _evaluate(self, point: Point, ready: Mapping[str, Evaluation]) -> Evaluation:
        key = key_of(point)
        if key not in self._known:
            self._known[key] = ready.get(key) or _evaluate_point(
                self._eval_fn, point, self._precision, self._best()
            )
            if self._store is not None:
                self._store.append(self._known[key])
        if key not in self._requested:
            self._requested.add(key)
            self.history.append(self._known[key])
        return self._known[key]


class _PatienceCounter:
    """Counter of rounds without a better point."""

    def __init__(self, patience: int | None) -> None:
        self._patience = patience
        self._round: Hashable = None
        self._is_better = True
        self._n_idle = 0
        self._best = -np.inf

    def are_enough_before(self, key: Hashable) -> bool:
        """Begin a round if its key is new; return True if patience is exhausted before it."""
        if key != self._round:
            self._n_idle = 0 if self._is_better or self._best == -np.inf else self._n_idle + 1
            self._round, self._is_better = key, False
        return self._patience is not None and self._n_idle >= self._patience

    def note(self, evaluation: Evaluation) -> None:
        if evaluation.score > self._best:
            self._best, self._is_better = evaluation.score, True


def _line_of(point: Point) -> str:
    """Return a key that points share if they differ only in the last symbol."""
    return key_of(dict(list(point.items())[:-1]))


def _evaluate_point(eval_fn: Objective, point: Point, precision: Precision | None, best: float) -> Evaluation:
    try:
        outcome = eval_fn(point)
        if isinstance(outcome, Generator):
            outcome = _measured(outcome, precision, best)
        status, value, info = outcome
    except Exception as error:
        # By the names of the classes, so that torch need not be imported.
        names = {kind.__name__ for kind in type(error).__mro__}
        is_named_so = isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
        if not ({"MemoryError", "OutOfMemoryError"} & names or is_named_so):
            raise
        return Evaluation(point, "oom", None, {"error": str(error)})
    return Evaluation(point, status, value, info)


def _measured(measuring: Measuring, precision: Precision | None, best: float) -> Outcome:
    """Take measurements until they suffice or end."""
    values: list[float] = []
    info: dict[str, Any] = {}
    while True:
        try:
            measured = next(measuring)
        except StopIteration as end:
            if end.value is not None:
                outcome: Outcome = end.value
                return outcome
            if not values:
                raise InputError("the objective yields no measurement and returns no status") from None
            return "ok", float(np.median(values)), {**info, "measured": values}
        value, others = measured if isinstance(measured, tuple) else (measured, {})
        values.append(float(value))
        info |= others
        if precision is not None and (reason := precision.enough(values, best)):
            measuring.close()
            return "ok", float(np.median(values)), {**info, "measured": values, "enough": reason}
