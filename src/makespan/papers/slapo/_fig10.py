"""Fig. 10: searches of the grid of batch sizes and shares of recomputed layers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from makespan.papers.slapo._hardware import constants
from makespan.papers.slapo._hardware_fit import GRID_CAPACITY_BYTES, grid_run, grid_spec, on_grid_machine
from makespan.papers.slapo._oracles import Oracle, emulated, modelled
from makespan.papers.slapo._tables_tuning import FIG10, FIG10_SEARCHES
from makespan.slapo.tuning import (
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

__all__ = ["BATCH", "RATIO", "Grid", "fig10_tables", "searches"]

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
    declare: Callable[[Space], object], objective: Objective, budget: int, starts: int
) -> list[tuple[str, int, Result]]:
    """Search a space by every strategy; each with its name and seed, the exhaustive one first."""
    chosen: list[tuple[Strategy, Sequence[int], int | None]] = [
        (Exhaustive(), [0], None),
        (Frontier(BATCH, RATIO), [0], None),
        (CoordinateDescent(1), range(starts), None),
        (Random(), range(starts), budget),
    ]
    return [
        (strategy.name, seed, tune(declare, objective, strategy, most, seed=seed))
        for strategy, seeds, most in chosen
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


def _asked(cells: pd.DataFrame, ask: Oracle) -> Grid:
    """Return what an oracle says of every printed point."""
    answers = {}
    for batch, ratio in zip(cells[BATCH], cells[RATIO], strict=True):
        answer = ask(grid_spec(), grid_run(int(batch), float(ratio)))
        is_known = answer is not None and answer.is_feasible
        answers[int(batch), float(ratio)] = answer.throughput_samples_per_s if answer and is_known else None
    return Grid(answers)


def _grids(cells: pd.DataFrame, source: str) -> dict[str, Grid]:
    """Return the grids of a source by the oracle that they come from."""
    if source == "emulated":
        return {"emulator": _asked(cells, emulated(GRID_CAPACITY_BYTES))}
    fitted = on_grid_machine(constants())
    return {"published": Grid.printed(cells), "model": _asked(cells, modelled(fitted, bounds=False))}


def fig10_tables(cells: pd.DataFrame, source: str, budget: int, starts: int) -> dict[str, pd.DataFrame]:
    """Search the printed grid, whose cells stand for runs, and what an oracle makes of it."""
    rows: list[dict[str, Any]] = []
    summaries: list[dict[str, Any]] = []
    for oracle, grid in _grids(cells, source).items():
        found = searches(grid.declare, grid.look_up, budget, starts)
        rows += _evaluations(oracle, found)
        summaries += _summaries(oracle, found)
    return {
        "fig10": FIG10.validate(pd.DataFrame(rows), where="fig10"),
        "fig10_searches": FIG10_SEARCHES.validate(pd.DataFrame(summaries), where="fig10_searches"),
    }
