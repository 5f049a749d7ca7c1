"""Fig. 10: searches of the grid of batch sizes and shares of recomputed layers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from makespan.papers.slapo._tables_tuning import FIG10, FIG10_SEARCHES
from makespan.papers.slapo.tuning import (
    CoordinateDescent,
    Exhaustive,
    Frontier,
    Objective,
    Point,
    Random,
    Result,
    Space,
    Status,
    Strategy,
    tune,
)

__all__ = ["BATCH", "RATIO", "Grid", "fig10_experiment", "searches"]

BATCH, RATIO = "global_batch_size", "ckpt_ratio"


@dataclass(frozen=True, slots=True)
class Grid:
    """Throughput [samples/s] by batch size and share of recomputed layers, None out of memory."""

    cells: Mapping[tuple[int, float], float | None]

    @classmethod
    def printed(cls, table: pd.DataFrame) -> "Grid":
        """Return the printed cells."""
        values = table["published_samples_per_s"]
        rates = [None if pd.isna(rate) else float(rate) for rate in values]
        return cls(dict(zip(zip(table[BATCH], table[RATIO], strict=True), rates, strict=True)))

    def declare(self, space: Space) -> None:
        """Declare batch sizes and shares as symbols, from the smallest batch and the largest share."""
        batches, ratios = (set(values) for values in zip(*self.cells, strict=True))
        space.create_symbol(BATCH, sorted(batches))
        space.create_symbol(RATIO, sorted(ratios, reverse=True))
        space.constrain(lambda point: (point[BATCH], point[RATIO]) in self.cells)

    def look_up(self, point: Point) -> tuple[Status, float | None, Mapping[str, Any]]:
        """Return what the grid says of a point."""
        value = self.cells[int(point[BATCH]), float(point[RATIO])]
        return ("oom" if value is None else "ok"), value, {}


def searches(
    declare: Callable[[Space], object], objective: Objective, patience: int, budget: int, starts: int
) -> list[tuple[str, int, Result]]:
    """Search a space by every strategy; each with its name and seed, the exhaustive one first."""
    chosen: list[tuple[Strategy, Sequence[int], int | None, int | None]] = [
        (Exhaustive(), [0], None, None),
        (Frontier(BATCH, RATIO), [0], None, patience),
        (CoordinateDescent(1), range(starts), None, None),
        (Random(), range(starts), budget, None),
    ]
    return [
        (strategy.name, seed, tune(declare, objective, strategy, most, patient, seed=seed))
        for strategy, seeds, most, patient in chosen
        for seed in seeds
    ]


def _evaluations(oracle: str, found: Iterable[tuple[str, int, Result]]) -> list[dict[str, Any]]:
    return [
        {
            "oracle": oracle, "strategy": strategy, "seed": seed, "explored_order": order,
            BATCH: one.point[BATCH], RATIO: one.point[RATIO], "status": one.status,
            "throughput_samples_per_s": one.value,
        }
        for strategy, seed, result in found
        for order, one in enumerate(result.history, start=1)
    ]  # fmt: skip


def _summaries(oracle: str, found: Sequence[tuple[str, int, Result]]) -> list[dict[str, Any]]:
    optimum = found[0][2].best_value
    if optimum is None:
        return []
    return [
        {
            "oracle": oracle, "strategy": strategy, "seed": seed, "explored": result.n_eval,
            "explored_oom": result.n_oom, "space": result.n_space, "explored_ratio": result.share,
            "stopped": result.stopped, "best_global_batch_size": result.best[BATCH],
            "best_ckpt_ratio": result.best[RATIO], "best_samples_per_s": result.best_value,
            "optimum_ratio": result.share_of(optimum),
        }
        for strategy, seed, result in found
        if result.best is not None
    ]  # fmt: skip


def fig10_experiment(
    printed: Mapping[str, pd.DataFrame], patience: int, budget: int, starts: int
) -> dict[str, pd.DataFrame]:
    """Search the paper's grid, whose cells stand for runs.

    Parameters
    ----------
    printed
        The printed cells ``fig10``.
    patience
        Batch sizes without a better point after which the frontier ends.
    budget
        Evaluations of random search.
    starts
        Seeds of coordinate descent, one random start each, and of random search.

    Returns
    -------
    dict of pandas.DataFrame
        ``fig10``, a row an evaluation, and ``fig10_searches``, a row a search that found a point.
    """
    grid = Grid.printed(printed["fig10"])
    found = searches(grid.declare, grid.look_up, patience, budget, starts)
    return {
        "fig10": FIG10.validate(pd.DataFrame(_evaluations("published", found)), where="fig10"),
        "fig10_searches": FIG10_SEARCHES.validate(
            pd.DataFrame(_summaries("published", found)), where="fig10_searches"
        ),
    }
