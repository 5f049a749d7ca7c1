"""Fig. 10: searches of the grid of batch sizes and recomputed shares, and predictions of it."""

from collections.abc import Callable, Mapping, Sequence
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
# Searches of the printed grid, and of an oracle's prediction of it.

BATCH, RATIO = "global_batch_size", "ckpt_ratio"


@dataclass(frozen=True, slots=True)
class Grid:
    """Throughput [samples/s] by batch size and recomputed share; None if out of memory."""

    cells: Mapping[tuple[int, float], float | None]

    @classmethod
    def printed(cls, table: pd.DataFrame) -> "Grid":
        """Return the grid of the printed cells."""
        values = table["published_samples_per_s"]
        rates = [None if pd.isna(rate) else float(rate) for rate in values]
        return cls(dict(zip(zip(table[BATCH], table[RATIO], strict=True), rates, strict=True)))

    def declare(self, space: Space) -> None:
        """Declare symbols for batch sizes, in rising order, and recomputed shares, in falling order."""
        batches, ratios = (set(values) for values in zip(*self.cells, strict=True))
        space.create_symbol(BATCH, sorted(batches))
        space.create_symbol(RATIO, sorted(ratios, reverse=True))
        space.constrain(lambda point: (point[BATCH], point[RATIO]) in self.cells)

    def look_up(self, point: Point) -> tuple[Status, float | None, Mapping[str, Any]]:
        """Return status and throughput of a point."""
        value = self.cells[int(point[BATCH]), float(point[RATIO])]
        return ("oom" if value is None else "ok"), value, {}


def searches(
    declare: Callable[[Space], object], objective: Objective, budget: int, starts: int
) -> list[tuple[str, int, Result]]:
    """Search a space by every strategy; return name, seed and result of each, the exhaustive search first."""
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


def _predicted(cells: pd.DataFrame, ask: Oracle) -> Grid:
    """Return the prediction of every printed point by an oracle."""
    rates = {}
    for batch, ratio in zip(cells[BATCH], cells[RATIO], strict=True):
        answer = ask(grid_spec(), grid_run(int(batch), float(ratio)))
        fits = answer is not None and answer.is_feasible
        rates[int(batch), float(ratio)] = answer.throughput_samples_per_s if answer and fits else None
    return Grid(rates)


def search_tables(
    cells: pd.DataFrame, source: str, budget: int, starts: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Search the grids of a source: all evaluations, and the result of each search.

    The published source has the printed grid, whose cells stand for runs, and the prediction of the hardware
    model; the emulated source has the prediction of the emulator.
    """
    if source == "emulated":
        grids = {"emulator": _predicted(cells, emulated(GRID_CAPACITY_BYTES))}
    else:
        fitted = modelled(on_grid_machine(constants()), bounds=False)
        grids = {"published": Grid.printed(cells), "model": _predicted(cells, fitted)}
    evaluations: list[dict[str, Any]] = []
    summaries: list[dict[str, Any]] = []
    for oracle, grid in grids.items():
        results = searches(grid.declare, grid.look_up, budget, starts)
        evaluations += [
            {
                "oracle": oracle, "strategy": strategy, "seed": seed, "explored_order": order,
                BATCH: trial.point[BATCH], RATIO: trial.point[RATIO], "status": trial.status,
                "throughput_samples_per_s": trial.value,
            }
            for strategy, seed, result in results
            for order, trial in enumerate(result.history, start=1)
        ]  # fmt: skip
        optimum = results[0][2].best_value
        if optimum is None:
            continue
        summaries += [
            {
                "oracle": oracle, "strategy": strategy, "seed": seed, "explored": result.n_eval,
                "explored_oom": result.n_oom, "space": result.n_space, "explored_ratio": result.share,
                "stopped": result.stopped, "best_global_batch_size": result.best[BATCH],
                "best_ckpt_ratio": result.best[RATIO], "best_samples_per_s": result.best_value,
                "optimum_ratio": result.share_of(optimum),
            }
            for strategy, seed, result in results
            if result.best is not None
        ]  # fmt: skip
    return pd.DataFrame(evaluations), pd.DataFrame(summaries)


# ------------------------------------------------------------------------------------------------
# Synthetic grids: does the frontier find the optimum where memory and times differ from the printed grid?

_RATE = "published_samples_per_s"


def _optimum_ratios(result: Result, *grids: Grid) -> list[float]:
    """Return the throughput of the best point of a search over that of each grid; 0 if nothing fits."""
    if result.best is None:
        return [0.0] * len(grids)
    at = int(result.best[BATCH]), float(result.best[RATIO])
    return [(grid.cells[at] or 0.0) / max(filter(None, grid.cells.values())) for grid in grids]


def synthetic_grids(cells: pd.DataFrame, grids: int, noise: float, spread: float, seed: int) -> pd.DataFrame:
    """Search grids with random constants and noise, along the border of memory and by coordinate descent.

    Constants are drawn around the fitted ones, each by a factor of at most ``spread``, and usable memory by
    the root of such a factor. Searches see throughput with noise; their results are compared with both
    grids. Grids in which no point fits do not count.
    """
    rng = np.random.default_rng(seed)
    times_s = grid_times(cells[cells[_RATE].notna()])
    c, costs = on_grid_machine(constants()), model_costs(grid_spec())
    rows: list[dict[str, Any]] = []
    while len(rows) < grids:
        factors = np.exp(rng.uniform(-np.log(spread), np.log(spread), 4))
        fixed_s, sample_s, again_s = (float(time * by) for time, by in zip(times_s, factors, strict=False))
        usable_ratio = float(np.sqrt(factors[3]))
        usable_bytes = c.usable_share * GRID_CAPACITY_BYTES * usable_ratio
        rates: dict[tuple[int, float], float | None] = {}
        for batch, ratio in zip(cells[BATCH].astype(int), cells[RATIO].astype(float), strict=True):
            run = grid_run(batch, ratio)
            time_s = fixed_s + batch * (sample_s + again_s * (recomputed_layers(costs, run) / costs.n_layers))
            fits = simulate(grid_spec(), run, c).needed_bytes <= usable_bytes
            rates[batch, ratio] = batch / time_s if fits else None
        errors = np.exp(noise * rng.standard_normal(len(rates))).tolist()
        pairs = zip(rates.items(), errors, strict=True)
        true, measured = Grid(rates), Grid({at: rate and rate * error for (at, rate), error in pairs})
        frontier = tune(measured.declare, measured.look_up, Frontier(BATCH, RATIO))
        if frontier.best is None:
            continue
        descent = tune(measured.declare, measured.look_up, CoordinateDescent(1), seed=len(rows))
        true_ratio, measured_ratio = _optimum_ratios(frontier, true, measured)
        rows.append(
            {
                "grid": len(rows), "fixed_s": fixed_s, "sample_s": sample_s, "recomputed_s": again_s,
                "usable_ratio": usable_ratio, "feasible": sum(rate is not None for rate in rates.values()),
                "explored": frontier.n_eval, "optimum_ratio": true_ratio,
                "measured_optimum_ratio": measured_ratio,
                "descent_optimum_ratio": _optimum_ratios(descent, true)[0],
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


# --- the experiment ---------------------------------------------------------------------------------

_searched = partial(option, source="a choice", changes="fig10, fig10_searches")


class Fig10(Block):
    """Searches of the printed grid of batch sizes and recomputed shares."""

    budget: Count = option(
        "evaluations of random search", 17, source="Slapo, Fig. 10: 17 of 91", changes="fig10, fig10_searches"
    )
    starts: Count = _searched("coordinate descents, each from a random point, and random searches", 20)


_synthetic = partial(option, source="a choice", changes="fig10_grids")


class SyntheticGrids(Block):
    """Grids with random constants."""

    grids: Count = _synthetic("grids in which a point fits", 50)
    noise: Annotated[float, Field(ge=0, le=0.1)] = _synthetic(
        "relative standard deviation of measured throughput", 0.01
    )
    spread: Annotated[float, Field(ge=1)] = _synthetic(
        "largest factor between a fitted and a drawn constant", 2.0
    )
    seed: Annotated[int, Field(ge=0)] = _synthetic("seed of constants and noise", 2)


class Tuning(Experiment):
    """Search the printed grid of Fig. 10 and an oracle's prediction of it, and search synthetic grids.

    The oracle of the published source is the hardware model, fitted to all cells and to all but those of one
    batch size. The oracle of the emulated source is the emulator, which is not fitted to any cell. Synthetic
    grids belong to the published source.
    """

    name = "tuning"
    tables = {
        "fig10": "points of the tuning grid that each search tries, in its order",
        "fig10_searches": "best point of each search of that grid, and number of evaluations",
        "fig10_fit": "predictions of that grid, fitted, with a batch size left out, and untuned",
        "fig10_grids": "searches of grids with random constants and noise",
    }
    cells = ("fig10",)
    figures = (
        Figure(
            "fig10",
            "Fig. 10",
            "Throughput of OPT-350M on eight GPUs of 16 GB over batch size and "
            "share of recomputed layers, source {source}: published are the "
            "printed cells and a hardware model fitted to them, emulated is the "
            "emulator as it is. Stars are the points that one search along the "
            "border of memory tries, circles the best points.",
            tables=("fig10",),
            draw="searched_grid",
        ),
        Figure(
            "fig10_fit",
            "Fig. 10, predicted",
            "Predicted against printed throughput of the grid of Fig. 10, source "
            "{source}, a point per cell. For published the prediction is a "
            "hardware model fitted to all cells, or to all but those of one batch "
            "size; for emulated it is the emulator as it is. On the dotted line "
            "both agree.",
            tables=("fig10_fit",),
            draw="predicted_grid",
        ),
    )

    searches: Fig10 = shared("slapo.fig10")
    grids: SyntheticGrids = shared("slapo.fig10_grids")

    def tables_of(self, source: str, profiled: Sequence[str]) -> Mapping[str, str]:
        """Return the tables of a source: synthetic grids, drawn around the fit, are of the published one."""
        built = super().tables_of(source, profiled)
        return {name: text for name, text in built.items() if source == "published" or name != "fig10_grids"}

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per evaluation, per search, per protocol and cell, and per synthetic grid."""
        cells = given.cells["fig10"]
        evaluations, found = search_tables(cells, given.source, self.searches.budget, self.searches.starts)
        tables = {"fig10": evaluations, "fig10_searches": found}
        if given.source == "published":
            tables["fig10_fit"] = pd.DataFrame(predictions(cells, constants()))
            tables["fig10_grids"] = synthetic_grids(cells, **self.grids.model_dump())
            return tables
        ask, rows = emulated(GRID_CAPACITY_BYTES), list[Mapping[str, object]]()
        for batch, ratio, printed in zip(cells[BATCH], cells[RATIO], cells[_RATE], strict=True):
            answer = ask(grid_spec(), grid_run(int(batch), float(ratio)))
            if answer is not None:
                rate = answer.throughput_samples_per_s
                rows.append(
                    {
                        "oracle": "emulator", "protocol": "untuned", BATCH: batch, RATIO: ratio,
                        _RATE: printed, "is_feasible": answer.is_feasible,
                        "published_is_feasible": bool(np.isfinite(printed)),
                        "predicted_samples_per_s": rate, "relative_error": abs(rate / printed - 1.0),
                    }
                )  # fmt: skip
        return tables | {"fig10_fit": pd.DataFrame(rows)}
