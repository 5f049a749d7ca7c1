"""Fig. 10: searches of the grid of batch sizes and shares of recomputed layers, and its prediction."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import Field

from makespan.papers.experiment import Experiment, Figure, Given
from makespan.papers.slapo.performance import (
    GRID_CAPACITY_BYTES,
    Oracle,
    constants,
    emulated,
    grid_run,
    grid_spec,
    grid_times,
    model_costs,
    modelled,
    on_grid_machine,
    predictions,
    recomputed_layers,
    simulate,
)
from makespan.settings import Block, Count, option, shared
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

# ------------------------------------------------------------------------------------------------
# Fig. 10: searches of the grid of batch sizes and shares of recomputed layers.

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
    return {"fig10": pd.DataFrame(rows), "fig10_searches": pd.DataFrame(summaries)}


# ------------------------------------------------------------------------------------------------
# How well the printed grid of Fig. 10 is predicted, and what the frontier finds on other grids.

_RATE = "published_samples_per_s"


def _untuned(cells: pd.DataFrame) -> list[Mapping[str, object]]:
    ask, rows = emulated(GRID_CAPACITY_BYTES), list[Mapping[str, object]]()
    for batch, ratio, printed in zip(cells[BATCH], cells[RATIO], cells[_RATE], strict=True):
        answer = ask(grid_spec(), grid_run(int(batch), float(ratio)))
        if answer is not None:
            rate = answer.throughput_samples_per_s
            rows.append(
                {
                    "oracle": "emulator", "protocol": "untuned", BATCH: batch, RATIO: ratio, _RATE: printed,
                    "is_feasible": answer.is_feasible, "published_is_feasible": bool(np.isfinite(printed)),
                    "predicted_samples_per_s": rate, "relative_error": abs(rate / printed - 1.0),
                }
            )  # fmt: skip
    return rows


# --- synthetic grids --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Times of a synthetic grid [s], and its memory over that of the fit."""

    fixed_s: float
    sample_s: float
    recomputed_s: float
    usable_ratio: float


def _drawn(rng: np.random.Generator, times_s: tuple[float, float, float], spread: float) -> _Drawn:
    """Draw constants around the fitted ones, each by a factor of at most ``spread``, memory by its root."""
    factors = np.exp(rng.uniform(-np.log(spread), np.log(spread), 4))
    fixed_s, sample_s, recomputed_s = (float(one * two) for one, two in zip(times_s, factors, strict=False))
    return _Drawn(fixed_s, sample_s, recomputed_s, float(np.sqrt(factors[3])))


def _grid(cells: pd.DataFrame, drawn: _Drawn) -> Grid:
    c = on_grid_machine(constants())
    usable_bytes = c.usable_share * GRID_CAPACITY_BYTES * drawn.usable_ratio
    n_layers, values = model_costs(grid_spec()).n_layers, {}
    for batch, ratio in zip(cells[BATCH].astype(int), cells[RATIO].astype(float), strict=True):
        run = grid_run(batch, ratio)
        share = recomputed_layers(model_costs(grid_spec()), run) / n_layers
        time_s = drawn.fixed_s + batch * (drawn.sample_s + drawn.recomputed_s * share)
        fits = simulate(grid_spec(), run, c).needed_bytes <= usable_bytes
        values[batch, ratio] = batch / time_s if fits else None
    return Grid(values)


def _measured(grid: Grid, rng: np.random.Generator, noise: float) -> Grid:
    """Return what measuring every point of a grid gives."""
    factors = np.exp(noise * rng.standard_normal(len(grid.cells))).tolist()
    rates = zip(grid.cells.items(), factors, strict=True)
    return Grid({at: rate and rate * factor for (at, rate), factor in rates})


def _shares(grid: Grid, measured: Grid, found: Result) -> tuple[float, float]:
    """Return what a search found over the best, by true and by measured throughput."""
    if found.best is None:
        return 0.0, 0.0
    at = int(found.best[BATCH]), float(found.best[RATIO])
    true, seen = ((one.cells[at] or 0.0) / max(filter(None, one.cells.values())) for one in (grid, measured))
    return true, seen


def _fitted_grids(cells: pd.DataFrame, grids: int, noise: float, spread: float, seed: int) -> pd.DataFrame:
    """Search grids with random constants and noise, along the border of memory and by coordinates."""
    rng = np.random.default_rng(seed)
    times_s = grid_times(cells[cells[_RATE].notna()])
    rows: list[dict[str, Any]] = []
    while len(rows) < grids:
        drawn = _drawn(rng, times_s, spread)
        grid = _grid(cells, drawn)
        measured = _measured(grid, rng, noise)
        border = tune(measured.declare, measured.look_up, Frontier(BATCH, RATIO))
        if border.best is None:
            continue
        descent = tune(measured.declare, measured.look_up, CoordinateDescent(1), seed=len(rows))
        true, seen = _shares(grid, measured, border)
        rows.append(
            {
                "grid": len(rows), "fixed_s": drawn.fixed_s, "sample_s": drawn.sample_s,
                "recomputed_s": drawn.recomputed_s, "usable_ratio": drawn.usable_ratio,
                "feasible": sum(rate is not None for rate in grid.cells.values()),
                "explored": border.n_eval, "optimum_ratio": true, "measured_optimum_ratio": seen,
                "descent_optimum_ratio": _shares(grid, measured, descent)[0],
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


# --- the experiment ---------------------------------------------------------------------------------

_searched = partial(option, source="a choice", changes="fig10, fig10_searches")


class Fig10(Block):
    """Searches of the printed grid of batch sizes and shares of recomputed layers."""

    budget: Count = option(
        "evaluations of random search", 17, source="Slapo, Fig. 10: 17 of 91", changes="fig10, fig10_searches"
    )
    starts: Count = _searched("coordinate descents, each from a random point, and random searches", 20)


_synthetic = partial(option, source="a choice", changes="fig10_grids")


class SyntheticGrids(Block):
    """Grids with random constants, of which no search has seen any."""

    grids: Count = _synthetic("grids in which a point fits", 50)
    noise: Annotated[float, Field(ge=0, le=0.1)] = _synthetic(
        "standard deviation of measured throughput, relative", 0.01
    )
    spread: Annotated[float, Field(ge=1)] = _synthetic(
        "largest factor between a fitted and a drawn constant", 2.0
    )
    seed: Annotated[int, Field(ge=0)] = _synthetic("seed of everything that is drawn", 2)


class Tuning(Experiment):
    """Search the printed grid of Fig. 10 and an oracle's version of it, predict it, and search other grids.

    The published source has a hardware model, fitted to all cells and to all but those of one batch size, and
    the synthetic grids; the emulated one has the emulator, which has not seen any cell.
    """

    name = "tuning"
    tables = {
        "fig10": "points of the tuning grid in the order in which each search tries them",
        "fig10_searches": "what each search finds of that grid, with how many evaluations",
        "fig10_fit": "predictions of that grid, fitted, with a batch size left out, and untuned",
        "fig10_grids": "searches of grids with random constants and noise",
    }
    cells = ("fig10",)
    figures = (
        Figure(
            "fig10",
            "Fig. 10",
            "Throughput of OPT-350M on eight GPUs of 16 GB over batch size and share of recomputed "
            "layers, source {source}: published means printed cells and a hardware model fitted to "
            "them, emulated the emulator as it is. Stars are the points that the search along the "
            "border of memory tries, circles the best points.",
            tables=("fig10",),
            draw="searched_grid",
        ),
        Figure(
            "fig10_fit",
            "Fig. 10, predicted",
            "Predicted against printed throughput of the grid of Fig. 10, source {source}: "
            "published means a hardware model fitted to all cells, or to all but those of one batch "
            "size; emulated the emulator as it is. On the dotted line both agree.",
            tables=("fig10_fit",),
            draw="predicted_grid",
        ),
    )

    searches: Fig10 = shared("slapo.fig10")
    grids: SyntheticGrids = shared("slapo.fig10_grids")

    def tables_of(self, source: str, profiled: Sequence[str]) -> Mapping[str, str]:
        """Return the tables of a source; synthetic grids are drawn around the fitted model."""
        built = super().tables_of(source, profiled)
        return {name: what for name, what in built.items() if source == "published" or name != "fig10_grids"}

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per evaluation, per search, per protocol and cell, and per synthetic grid."""
        cells = given.cells["fig10"]
        tables = fig10_tables(cells, given.source, self.searches.budget, self.searches.starts)
        if given.source != "published":
            return tables | {"fig10_fit": pd.DataFrame(_untuned(cells))}
        tables["fig10_fit"] = pd.DataFrame(list(predictions(cells, constants())))
        tables["fig10_grids"] = _fitted_grids(cells, **self.grids.model_dump())
        return tables
