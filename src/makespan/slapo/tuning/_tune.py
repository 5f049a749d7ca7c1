"""The search: asks a strategy for points, evaluates them, and knows when to stop."""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from makespan.errors import InputError
from makespan.slapo.tuning._evaluation import Database, Evaluation, Status, key_of
from makespan.slapo.tuning._space import Point, Space
from makespan.slapo.tuning._strategies import Strategy, strategy_named

__all__ = ["Objective", "Result", "tune"]

Objective = Callable[[Point], tuple[Status, float | None, Mapping[str, Any]]]
OnFail = Literal["skip", "stop-symbol", "stop-all"]
Stop = Literal["finished", "budget", "patience", "fail"]
Optimum = Literal["best", "local", "unknown"]


@dataclass(frozen=True, slots=True)
class Result:
    """What a search found.

    Parameters
    ----------
    best, best_value
        The best point and its value; None where none is ``ok``.
    history
        Every point that was tried or found in the database, in the order in which it was asked for.
    n_space
        Points of the space.
    stopped
        ``finished``, the strategy had no more to ask; or what ended it before: ``budget``, ``patience``,
        which can leave a better point unseen, or ``fail``.
    optimum
        What the best point is: ``best`` of the space, as far as the strategy's assumptions hold; ``local``,
        no symbol alone has a better value, but points that differ in several were not tried; ``unknown``
        where the search ended before its time, or nothing was found.
    spread
        Largest difference between evaluations of one point; None where none was repeated.
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
        """Evaluations, those out of memory among them; what is invalid costs none."""
        return sum(one.status != "invalid" for one in self.history)

    @property
    def n_oom(self) -> int:
        """Evaluations that ran out of memory."""
        return sum(one.status == "oom" for one in self.history)

    @property
    def share(self) -> float:
        """Evaluations as a share of the space."""
        return self.n_eval / self.n_space

    def share_of(self, optimum: float) -> float:
        """Return what was found as a share of the best value of the whole space; 0 if nothing was found."""
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
) -> Result:
    """Search a space for the point with the largest value; the same arguments ask for the same points.

    Parameters
    ----------
    space_fn
        Declares the space, see `Space`.
    eval_fn
        Tells status, value and anything else of a point. Exceptions that say that memory ran out count as
        ``oom``; others pass.
    strategy
        One of `STRATEGIES`, by name or as a value.
    budget
        Evaluations after which the search ends.
    patience
        Rounds without a better point after which it ends, counted from the first point that is ``ok``. What a
        round is depends on the strategy: one point, with ``frontier`` all points of a batch size.
    db
        File of evaluations, see `Database`: its points are not evaluated again, and what is evaluated here is
        added.
    seed
        Seed of strategies that draw.
    on_fail
        After a status ``fail``: ``skip``, go on; ``stop-symbol``, leave out all points that differ from it in
        the last symbol alone; ``stop-all``, end.
    repeats
        Further evaluations of the best point, and of each whose value is no further from it than evaluations
        of one point are from each other; their medians decide. They cost no budget. 0 for an objective that
        always tells the same.

    Raises
    ------
    InputError, TraceError
        The space is empty, or the strategy cannot search it; the database is none.

    Notes
    -----
    After the auto-tuner of Slapo (ASPLOS 2024): spaces that are no rectangle, coordinate descent, and running
    out of memory as a normal result. The frontier is ours.
    """
    points = Space(space_fn).enumerate()
    if not points:
        raise InputError("found a space without points; accepted: at least one")
    chosen = strategy_named(strategy) if isinstance(strategy, str) else strategy
    store = None if db is None else Database(db)
    known = {} if store is None else store.known(points)
    run = _Run(eval_fn, store, dict(known), on_fail)
    stopped = run.follow(chosen, points, np.random.default_rng(seed), budget, patience)
    spread = run.repeat(repeats)
    best = max(run.history, key=lambda one: one.score, default=None)
    if best is None or best.value is None:
        return Result(None, None, tuple(run.history), len(points), stopped, spread=spread)
    optimum: Optimum = "unknown"
    if len(run.history) == len(points):
        optimum = "best"
    elif stopped == "finished":
        optimum = "best" if chosen.finds_best else "local"
    return Result(best.point, best.value, tuple(run.history), len(points), stopped, optimum, spread)


class _Run:
    """One search: what was tried, and what may still be."""

    def __init__(
        self, eval_fn: Objective, store: Database | None, known: dict[str, Evaluation], on_fail: OnFail
    ) -> None:
        self._eval_fn, self._store, self._known, self._on_fail = eval_fn, store, known, on_fail
        self._left_out: set[str] = set()
        self._asked: set[str] = set()
        self.history: list[Evaluation] = []

    def follow(
        self,
        strategy: Strategy,
        points: Collection[Point],
        rng: np.random.Generator,
        budget: int | None,
        patience: int | None,
    ) -> Stop:
        search = strategy.search(list(points), rng, dict(self._known))
        rounds = _Rounds(patience)
        point = next(search, None)
        while point is not None:
            if _line_of(point) in self._left_out:
                found = Evaluation(point, "fail", None, {"left_out": True})
            else:
                if rounds.are_enough_before(strategy.round_of(point)):
                    return "patience"
                if budget is not None and self._costs(point) and self._spent() >= budget:
                    return "budget"
                found = self._evaluated(point)
                rounds.note(found)
                if found.status == "fail" and self._on_fail == "stop-all":
                    return "fail"
                if found.status == "fail" and self._on_fail == "stop-symbol":
                    self._left_out.add(_line_of(point))
            try:
                point = search.send(found)
            except StopIteration:
                point = None
        return "finished"

    def repeat(self, repeats: int) -> float | None:
        """Evaluate again what noise may have put in front; return the largest spread of a point."""
        values = {key_of(one.point): _values_of(one) for one in self.history if one.value is not None}
        if repeats < 1 or not values:
            return None
        while True:
            ranked = sorted(values, key=lambda key: float(np.median(values[key])), reverse=True)
            spread = max((max(one) - min(one) for one in values.values() if len(one) > 1), default=0.0)
            best = float(np.median(values[ranked[0]]))
            # The best and the next one tell how much a value is worth; two that differ tell too little of it.
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
            (place, one) for place, one in enumerate(self.history) if key_of(one.point) == key
        )
        found = _tried(self._eval_fn, known.point)
        if found.value is not None:
            values.append(found.value)
            middle = float(np.median(values))
            found = Evaluation(known.point, "ok", middle, {**found.info, "values": list(values)})
        else:  # it does not always fit
            values[:] = [-np.inf] * (len(values) + 1)
        self.history[place] = self._known[key] = found
        if self._store is not None:
            self._store.append(found)

    def _costs(self, point: Point) -> bool:
        return key_of(point) not in self._asked

    def _spent(self) -> int:
        return sum(one.status != "invalid" for one in self.history)

    def _evaluated(self, point: Point) -> Evaluation:
        key = key_of(point)
        if key not in self._known:
            self._known[key] = _tried(self._eval_fn, point)
            if self._store is not None:
                self._store.append(self._known[key])
        if key not in self._asked:
            self._asked.add(key)
            self.history.append(self._known[key])
        return self._known[key]


class _Rounds:
    """Counts rounds without a better point."""

    def __init__(self, patience: int | None) -> None:
        self._patience = patience
        self._round: Hashable = None
        self._is_better = True
        self._n_idle = 0
        self._best = -np.inf

    def are_enough_before(self, one: Hashable) -> bool:
        """Begin a round if this is a new one; say whether patience is at its end before it."""
        if one != self._round:
            self._n_idle = 0 if self._is_better or self._best == -np.inf else self._n_idle + 1
            self._round, self._is_better = one, False
        return self._patience is not None and self._n_idle >= self._patience

    def note(self, found: Evaluation) -> None:
        if found.score > self._best:
            self._best, self._is_better = found.score, True


def _values_of(found: Evaluation) -> list[float]:
    """Return what evaluations of a point have told, those in a database too."""
    known = found.info.get("values")
    return [float(one) for one in known] if isinstance(known, list) and known else [found.score]


def _line_of(point: Point) -> str:
    """Return what all points share that differ in the last symbol alone."""
    return key_of(dict(list(point.items())[:-1]))


def _tried(eval_fn: Objective, point: Point) -> Evaluation:
    try:
        status, value, info = eval_fn(point)
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        return Evaluation(point, "oom", None, {"error": str(error)})
    return Evaluation(point, status, value, info)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; torch's own error is known by its name, so that torch need not be imported."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool({"MemoryError", "OutOfMemoryError"} & names) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )
