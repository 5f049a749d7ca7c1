"""Factors of the terms of a step: what is known of them beforehand, what measured rows teach, and intervals.

The logarithm of a factor is a sum: what all stacks share, what differs for one stack, what differs for
one device, and on the user's own ground what the user's rows say. Each part has a normal prior whose spread
is the scatter seen between sources. Residuals are differences of logarithms with heavy tails (Student's t
with four degrees of freedom), so that one odd row does not bend everything. The posterior is the normal
approximation at its mode, found by Gauss-Newton steps with exact derivatives. Rows of the user's own that
scatter further than expected widen it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from makespan.files import read_preset
from makespan.planning.rows import Measured
from makespan.planning.stacks import Training
from makespan.planning.steptime import COMPUTE, NAMES, Grid, ideal_terms

Array = NDArray[np.float64]
_PACKAGE = "makespan.planning"
_N = len(NAMES)
_EXPERTS = NAMES.index("experts")
_FREEDOM = 4.0  # degrees of freedom of the residuals
_NOISE, _NOISE_OF_MIXTURES = (
    0.07,
    0.18,
)  # what no factor explains; kernels of experts change with every release
_SCALE_SPREAD = 0.15  # common scale of the user's ground
_STACK_SCALE, _DEVICE_SPREAD, _NARROW_SPREAD = 0.06, 0.06, 0.12
_MOST_STEPS, _LONGEST_STEP, _CONVERGED = 40, 0.5, 1e-5
_MOST_WEIGHT = 8.0  # rows of one group count as this many at most
_ROWS_OF_NOISE = 2.0  # measured rows that the usual scatter of published ones counts for
_NORMAL_SQUARE = 0.786  # mean of r**2 times its weight, for a normal r


@cache
def _prior() -> tuple[Array, Array, Array]:
    """Return logarithms of the factors before any row, their spread, and their spread between stacks."""
    table = read_preset(_PACKAGE, "factors")
    columns = zip(*(table["prior"][name] for name in NAMES), strict=True)
    value, spread, between = (np.array(column, dtype=float) for column in columns)
    return np.log(value), spread, between


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Factors of stacks and devices, fitted to rows of many sources.

    Parameters
    ----------
    shared
        Logarithms of the factors that stacks have in common, (n_terms,).
    stacks
        By stack, what is added to them, (n_terms,).
    devices, narrow
        By device, and by device for products of 8 bits and less, what is added to the terms of computation.
    rows
        Rows behind them, by stack and device.
    """

    shared: Array
    stacks: dict[str, Array] = field(default_factory=dict)
    devices: dict[str, float] = field(default_factory=dict)
    narrow: dict[str, float] = field(default_factory=dict)
    rows: dict[str, dict[str, int]] = field(default_factory=dict)

    def logs(self, stack: str, device: str, training: Training) -> Array:
        """Return the logarithms of the factors of a stack on a device, (n_terms,)."""
        own = self.devices.get(device, 0.0)
        if training.is_narrow:
            own += self.narrow.get(device, 0.0)
        return self.shared + self.stacks.get(stack, np.zeros(_N)) + own * COMPUTE


@cache
def knowledge() -> Knowledge:
    """Return the factors that ship with the package, fitted to the register of published rows."""
    table = read_preset(_PACKAGE, "knowledge")

    def column(values: dict[str, float]) -> Array:
        return np.log([values.get(name, 1.0) for name in NAMES])

    return Knowledge(
        shared=column(table["shared"]),
        stacks={name: column(values) for name, values in table["stacks"].items()},
        devices={name: math.log(value) for name, value in table["devices"].items()},
        narrow={name: math.log(value) for name, value in table["narrow"].items()},
        rows=table["rows"],
    )


def knowledge_text(known: Knowledge, comment: str) -> str:
    """Return factors as TOML, three digits each, as `knowledge` reads them."""
    lines = [f"# {line}" for line in comment.splitlines()] + ["", "[shared]"]
    lines += [f"{name} = {math.exp(value):.3g}" for name, value in zip(NAMES, known.shared, strict=True)]
    for stack, values in sorted(known.stacks.items()):
        pairs = [(name, f"{math.exp(v):.3g}") for name, v in zip(NAMES, values, strict=True)]
        lines += ["", f'[stacks."{stack}"]', *(f"{name} = {text}" for name, text in pairs if text != "1")]
    for title, table in (("devices", known.devices), ("narrow", known.narrow)):
        lines += [
            "",
            f"[{title}]",
            *(f"{name} = {math.exp(value):.3g}" for name, value in sorted(table.items())),
        ]
    for stack, counts in sorted(known.rows.items()):
        lines += ["", f'[rows."{stack}"]', *(f"{name} = {count}" for name, count in sorted(counts.items()))]
    return "\n".join(lines) + "\n"


def terms_of(rows: Sequence[Measured]) -> Array:
    """Return the ideal terms of measured rows [s], (n_rows, n_terms)."""
    return np.concatenate(
        [ideal_terms(row.training, Grid.of([row.layout]), row.machines, row.stack) for row in rows]
    )


def fit_knowledge(rows: Sequence[Measured], terms: Array | None = None) -> Knowledge:
    """Fit the factors of all stacks and devices to rows; every group of rows has about the same weight."""
    ideal = terms_of(rows) if terms is None else terms
    measured = np.log([row.step_s for row in rows])
    mean, spread, between = _prior()
    names = sorted({row.stack.family for row in rows})
    devices = sorted({row.machines.device.name for row in rows})
    narrow = sorted({row.machines.device.name for row in rows if row.training.is_narrow})
    # Columns: shared, per stack its terms and its scale, per device its scale, and that of narrow products.
    blocks = {name: _N + i * (_N + 1) for i, name in enumerate(names)}
    at_device = {name: _N + len(names) * (_N + 1) + i for i, name in enumerate(devices)}
    at_narrow = {name: _N + len(names) * (_N + 1) + len(devices) + i for i, name in enumerate(narrow)}
    n = _N + len(names) * (_N + 1) + len(devices) + len(narrow)
    centre, sigma = np.zeros(n), np.full(n, _DEVICE_SPREAD)
    centre[:_N], sigma[:_N] = mean, spread
    for start in blocks.values():
        sigma[start : start + _N], sigma[start + _N] = between, _STACK_SCALE
    for column in at_narrow.values():
        sigma[column] = _NARROW_SPREAD
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.group] = sizes.get(row.group, 0) + 1
    weight = np.array([min(1.0, _MOST_WEIGHT / sizes[row.group]) for row in rows])

    def model(theta: Array) -> tuple[Array, Array]:
        total, slopes = np.empty(len(rows)), np.zeros((len(rows), n))
        for i, row in enumerate(rows):
            start, kind = blocks[row.stack.family], row.machines.device.name
            is_narrow = row.training.is_narrow
            scale = theta[at_device[kind]] + (theta[at_narrow[kind]] if is_narrow else 0.0)
            logs = theta[:_N] + theta[start : start + _N] + theta[start + _N] + scale * COMPUTE
            parts = np.exp(logs) * ideal[i]
            total[i] = np.log(parts.sum())
            share = parts / parts.sum()
            slopes[i, :_N] = slopes[i, start : start + _N] = share
            slopes[i, start + _N] = 1.0
            slopes[i, at_device[kind]] = share[COMPUTE].sum()
            if is_narrow:
                slopes[i, at_narrow[kind]] = share[COMPUTE].sum()
        return total, slopes

    theta, _ = _posterior(model, measured, centre, sigma, noise_of(ideal), weight)
    return Knowledge(
        shared=theta[:_N],
        stacks={name: theta[at : at + _N] + theta[at + _N] for name, at in blocks.items()},
        devices={name: float(theta[at]) for name, at in at_device.items()},
        narrow={name: float(theta[at]) for name, at in at_narrow.items()},
        rows={
            name: dict(Counter(row.machines.device.name for row in rows if row.stack.family == name))
            for name in names
        },
    )


def noise_of(terms: Array) -> Array:
    """Return the spread of the logarithm of a step that no factor explains [1], (n_rows,)."""
    return np.where(terms[:, _EXPERTS] > 0, _NOISE_OF_MIXTURES, _NOISE)


def _posterior(
    model: Any, measured: Array, centre: Array, sigma: Array, noise: Array, weight: Array
) -> tuple[Array, Array]:
    """Return mode and covariance of parameters with normal priors and heavy-tailed residuals."""
    theta = centre.copy()
    precision = np.diag(1 / sigma**2)
    for _ in range(_MOST_STEPS):
        predicted, slopes = model(theta)
        residual = predicted - measured
        trust = weight * _trust(residual / noise) / noise**2
        curvature = slopes.T @ (slopes * trust[:, None]) + precision
        gradient = slopes.T @ (trust * residual) + (theta - centre) / sigma**2
        step = np.clip(np.linalg.solve(curvature, gradient), -_LONGEST_STEP, _LONGEST_STEP)
        theta = theta - step
        if np.abs(step).max() < _CONVERGED:
            break
    return theta, np.linalg.inv(curvature)


def _trust(off: Array) -> Array:
    """Return the weights of residuals [1], given over their spread: about 1, and little for odd ones."""
    return np.asarray((_FREEDOM + 1) / (_FREEDOM + off**2))


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What is known of the factors on one ground: the mode of their logarithms, and its covariance.

    Entry 0 is a common scale, the others are the terms; ``n_rows`` rows of this ground stand behind it, and
    scatter around it ``scatter`` times as far as published rows do around theirs [1], at least once.
    """

    offsets: Array
    covariance: Array
    n_rows: int = 0
    scatter: float = 1.0

    def parts_s(self, logs: Array, terms: Array) -> Array:
        """Return the terms of steps [s], (n_layouts, n_terms), from factors and ideal terms."""
        return np.asarray(np.exp(logs + self.offsets[0] + self.offsets[1:]) * terms)

    def spread(self, parts_s: Array) -> Array:
        """Return the spread of the logarithms of steps [1], (n_layouts,)."""
        slopes = slopes_of(parts_s)
        known = np.einsum("ij,jk,ik->i", slopes, self.covariance, slopes)
        return np.asarray(np.sqrt(known + self.noise(parts_s) ** 2))

    def noise(self, parts_s: Array) -> Array:
        """Return the part of `spread` that no factor explains [1], (n_layouts,)."""
        return self.scatter * noise_of(parts_s)


@cache
def uncalibrated() -> Calibrated:
    """Return what is known of a ground before any of its rows is."""
    _, _, between = _prior()
    spread = np.concatenate([[_SCALE_SPREAD], between])
    return Calibrated(np.zeros(_N + 1), np.diag(spread**2))


def slopes_of(parts_s: Array) -> Array:
    """Return the slopes of the logarithm of steps by scale and terms [1], (n_layouts, 1 + n_terms)."""
    slopes = np.ones((len(parts_s), 1 + _N))
    slopes[:, 1:] = parts_s / parts_s.sum(axis=1, keepdims=True)
    return slopes


def calibrate_rows(logs: Array, terms: Array, step_s: Array) -> Calibrated:
    """Refine factors by measured rows of one ground: a common scale, and every factor around its prior.

    Parameters
    ----------
    logs
        Logarithms of the factors known before, (n_rows, n_terms).
    terms
        Ideal terms [s], (n_rows, n_terms).
    step_s
        Measured times [s], (n_rows,).
    """

    def model(theta: Array) -> tuple[Array, Array]:
        parts_s = np.exp(logs + theta[0] + theta[1:]) * terms
        return np.log(parts_s.sum(axis=1)), slopes_of(parts_s)

    prior = uncalibrated()
    sigma = np.sqrt(np.diag(prior.covariance))
    ones = np.ones(len(step_s))
    noise = noise_of(terms)
    mode, known = _posterior(model, np.log(step_s), prior.offsets, sigma, noise, ones)
    predicted, slopes = model(mode)
    off = (np.log(step_s) - predicted) / noise
    # Rows are nearer to the mode than rows to come: each parameter that they decide takes one of them.
    decided = len(mode) - float(np.trace(known / sigma**2))
    scatter = _scatter(off, max(0.0, len(step_s) - decided))
    trust = _trust(off / scatter) / (scatter * noise) ** 2
    curvature = slopes.T @ (slopes * trust[:, None]) + np.diag(1 / sigma**2)
    return Calibrated(mode, np.asarray(np.linalg.inv(curvature)), len(step_s), scatter)


def _scatter(off: Array, freedom: float) -> float:
    """Return how far rows scatter [1], at least once as far as expected; odd rows count for little.

    Parameters
    ----------
    off
        Residuals over the spread that is expected of them, (n_rows,).
    freedom
        Rows less the parameters that were fitted to them.
    """
    scatter = 1.0
    for _ in range(_MOST_STEPS):
        squares = float((_trust(off / scatter) * off**2).sum()) / _NORMAL_SQUARE
        before = scatter
        scatter = max(1.0, math.sqrt((_ROWS_OF_NOISE + squares) / (_ROWS_OF_NOISE + freedom)))
        if abs(scatter - before) < _CONVERGED:
            break
    return scatter
