"""The fit of the hardware model to the printed grid of Fig. 10, and what it predicts of unseen cells."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from makespan.errors import FitError
from makespan.papers.slapo._costs import model_costs
from makespan.papers.slapo._hardware import (
    IMPLEMENTATIONS,
    Constants,
    Run,
    forward_s,
    needed_bytes,
    recomputed_layers,
    simulate,
)
from makespan.training.zoo import FamilySpec, family_spec

__all__ = [
    "GRID_CAPACITY_BYTES",
    "fit_grid",
    "grid_run",
    "grid_spec",
    "grid_times",
    "on_grid_machine",
    "predictions",
]

GRID_CAPACITY_BYTES = 16e9
"""Memory of the devices of Fig. 10, V100 with 16 GB; inferred from the batch sizes that fit."""
_N_GPUS = 8
_BATCH, _RATIO, _RATE = "global_batch_size", "ckpt_ratio", "published_samples_per_s"


def grid_spec() -> FamilySpec:
    """Return the model of the grid."""
    return family_spec("opt", "350m")


def grid_run(batch: int, ratio: float) -> Run:
    """Return a point of the grid: ZeRO-3 on eight devices with Slapo's kernels."""
    return Run("slapo-zero3", _N_GPUS, batch, ratio)


def on_grid_machine(c: Constants) -> Constants:
    """Return the constants of the machine that the grid was measured on."""
    return replace(c, capacity_bytes=GRID_CAPACITY_BYTES)


def fit_grid(cells: pd.DataFrame, c: Constants) -> Constants:
    """Fit the least time of a step, the time of a sample and its recomputation, and the usable memory.

    Parameters
    ----------
    cells
        Printed cells of the grid, at least four that fit and one that does not.
    c
        Constants; those of `FITTED` do not matter.

    Returns
    -------
    Constants
        Time is linear in the batch, with and without the recomputed layers, so relative errors are least
        where a linear system says; the border of memory is in the middle between the two points that it
        separates, of all that classify most points right.

    Raises
    ------
    FitError
        The cells do not determine the constants.
    """
    fits = cells[cells[_RATE].notna()]
    if len(fits) < 4 or len(fits) == len(cells):
        raise FitError(
            f"found {len(fits)} of {len(cells)} points that fit; accepted: four or more, and one not"
        )
    fixed_s, sample_s, again_s = grid_times(fits)
    return _border(cells, _scaled(c, fixed_s, sample_s, again_s))


def grid_times(fits: pd.DataFrame) -> tuple[float, float, float]:
    """Return the time of a step, a sample, and the recomputation of a sample, by least relative squares."""
    batch = fits[_BATCH].to_numpy(float)
    time_s = batch / fits[_RATE].to_numpy(float)
    share = np.array([_share(float(ratio)) for ratio in fits[_RATIO]])
    features = np.stack([np.ones_like(batch), batch, batch * share], axis=1)
    solution, _, rank, _ = np.linalg.lstsq(features / time_s[:, None], np.ones_like(time_s), rcond=None)
    if rank < 3 or (solution <= 0).any():
        raise FitError(f"found times {solution.tolist()}; accepted: cells that decide three positive times")
    fixed_s, sample_s, again_s = solution.tolist()
    return fixed_s, sample_s, again_s


def _share(ratio: float) -> float:
    costs = model_costs(grid_spec())
    return recomputed_layers(costs, grid_run(_N_GPUS, ratio)) / costs.n_layers


def _scaled(c: Constants, fixed_s: float, sample_s: float, again_s: float) -> Constants:
    """Turn times of the grid into constants that hold for other models."""
    costs, run = model_costs(grid_spec()), grid_run(_N_GPUS, 0.0)
    traits = IMPLEMENTATIONS[run.implementation]
    plain = replace(c, zero_layer_s=0.0, best_efficiency=1.0, recomputed_share=0.0, usable_share=1.0)
    step = simulate(grid_spec(), run, plain)
    zero_layer_s = (fixed_s - step.times_s["data_exchange"] - step.times_s["optimizer"]) / costs.n_layers
    # Efficiency depends on the width alone as soon as a device has more tokens than the model is wide.
    one = sum(forward_s(costs, traits, run, plain))
    without = sum(forward_s(costs, traits, run, replace(plain, best_efficiency=np.inf)))
    products_s = sample_s * _N_GPUS / 3.0 - without
    if products_s <= 0:
        raise FitError("element-wise traffic alone takes longer than a sample does")
    found = replace(plain, zero_layer_s=zero_layer_s, best_efficiency=(one - without) / products_s)
    layers_s, _ = forward_s(costs, traits, run, found)
    return replace(found, recomputed_share=again_s * _N_GPUS / layers_s)


def _border(cells: pd.DataFrame, c: Constants) -> Constants:
    needed = _needed(cells, c)
    is_ok = cells[_RATE].notna().to_numpy()
    order = np.sort(np.unique(needed))
    borders = np.concatenate([[order[0] / 2], (order[1:] + order[:-1]) / 2, [2 * order[-1]]])
    right = np.array([((needed <= border) == is_ok).sum() for border in borders])
    best = borders[right == right.max()]
    return replace(c, usable_share=float(best[len(best) // 2]) / GRID_CAPACITY_BYTES)


def _needed(cells: pd.DataFrame, c: Constants) -> NDArray[np.float64]:
    pairs = zip(cells[_BATCH], cells[_RATIO], strict=True)
    return np.array([needed_bytes(grid_spec(), grid_run(int(b), float(r)), c) for b, r in pairs])


def predictions(cells: pd.DataFrame, c: Constants) -> list[Mapping[str, object]]:
    """Return what the model predicts of every printed cell, in sample and leaving one batch size out.

    Parameters
    ----------
    cells
        Printed cells of the grid.
    c
        Constants; those of `FITTED` do not matter.

    Returns
    -------
    list
        One row a protocol and cell.
    """
    batches = cells[_BATCH].to_numpy()
    everywhere = np.ones(len(cells), dtype=bool)
    left_out = [batches == batch for batch in np.unique(batches)]
    rows: list[Mapping[str, object]] = []
    for name, parts in (("in sample", [everywhere]), ("one batch size left out", left_out)):
        for part in parts:
            seen = cells if part.all() else cells[~part]
            found = on_grid_machine(fit_grid(seen, c))
            rows += [_predicted(name, row, found) for _, row in cells[part].iterrows()]
    return rows


def _predicted(protocol: str, row: "pd.Series[Any]", c: Constants) -> Mapping[str, object]:
    batch, ratio, printed = int(row[_BATCH]), float(row[_RATIO]), float(row[_RATE])
    step = simulate(grid_spec(), grid_run(batch, ratio), c)
    rate = batch / step.iter_time_s
    return {
        "oracle": "model", "protocol": protocol, _BATCH: batch, _RATIO: ratio, _RATE: printed,
        "is_feasible": bool(step.fits), "published_is_feasible": bool(np.isfinite(printed)),
        "predicted_samples_per_s": rate, "relative_error": abs(rate / printed - 1.0),
    }  # fmt: skip
