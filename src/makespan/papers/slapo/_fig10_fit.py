"""How well the printed grid of Fig. 10 is predicted, and what the frontier finds on other grids."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from makespan.papers.slapo._costs import model_costs
from makespan.papers.slapo._fig10 import BATCH, RATIO, Grid, fig10_tables
from makespan.papers.slapo._hardware import constants, recomputed_layers, simulate
from makespan.papers.slapo._hardware_fit import (
    GRID_CAPACITY_BYTES,
    grid_run,
    grid_spec,
    grid_times,
    on_grid_machine,
    predictions,
)
from makespan.papers.slapo._oracles import emulated
from makespan.papers.slapo._tables_modelled import FIG10_FIT, FIG10_GRIDS
from makespan.slapo.tuning import CoordinateDescent, Frontier, Result, tune

__all__ = ["tuning_experiment"]

_RATE = "published_samples_per_s"


def tuning_experiment(
    printed: Mapping[str, pd.DataFrame], source: str, searches: Mapping[str, int], grids: Mapping[str, Any]
) -> dict[str, pd.DataFrame]:
    """Search the printed grid and what an oracle makes of it, predict it, and search other grids.

    Parameters
    ----------
    printed
        The printed cells ``fig10``.
    source
        ``published``: the hardware model, fitted to all cells and to all but those of one batch size;
        ``emulated``: the emulator, which has not seen any.
    searches
        ``budget``: evaluations of random search; ``starts``: seeds of it, and of coordinate descent.
    grids
        ``grids`` with a feasible point, ``noise`` and ``spread``: standard deviation of the logarithm of a
        throughput, and largest factor between fitted and drawn constants [1]; ``seed`` of what is drawn.

    Returns
    -------
    dict of pandas.DataFrame
        ``fig10``, a row an evaluation, ``fig10_searches``, a row a search, ``fig10_fit``, a row a protocol
        and cell; of ``published`` also ``fig10_grids``, a row a synthetic grid.
    """
    cells = printed["fig10"]
    rows = list(predictions(cells, constants())) if source == "published" else _untuned(cells)
    found = fig10_tables(cells, source, **searches)
    found["fig10_fit"] = FIG10_FIT.validate(pd.DataFrame(rows), where="fig10_fit")
    if source == "published":
        found["fig10_grids"] = _grids(cells, **grids)
    return found


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


def _grids(cells: pd.DataFrame, grids: int, noise: float, spread: float, seed: int) -> pd.DataFrame:
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
    return FIG10_GRIDS.validate(pd.DataFrame(rows), where="fig10_grids")
