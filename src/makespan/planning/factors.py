"""Factors of the terms of a step: what is known of them beforehand, what measured rows teach, and intervals.

The logarithm of a factor is a sum: what all stacks share, what differs for one stack, what differs for
one device, and on the user's own ground what the user's rows say. Each part has a normal prior whose spread
is the scatter seen between sources. Residuals are differences of logarithms with heavy tails (Student's t
with four degrees of freedom), so that one odd row does not bend everything. The posterior is the normal
approximation at its mode, found by Gauss-Newton steps with exact derivatives. Rows of the user's own that
scatter further than expected widen it.

What no factor explains is mostly the same for layouts that spend their time alike: a Gaussian process over
the logarithms of the shares of the terms. A measured row therefore moves its neighbours further than the
factors alone would move them.

Columns of terms are those of the models at hand: those of recurrent layers come last, and are absent where no
model has such layers. No published row has, so that their factors are those known beforehand.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from makespan.files import read_preset
from makespan.planning.rows import Measured
from makespan.planning.stacks import Training
from makespan.planning.steptime import ALL_NAMES, COMPUTE, NAMES, Grid, ideal_terms, names_of

Array = NDArray[np.float64]
_PACKAGE = "makespan.planning"
_N = len(ALL_NAMES)
_EXPERTS = NAMES.index("experts")
_OF_HOST = np.array([name in ("step", "launches", "expert_launches") for name in ALL_NAMES])
Z90 = 1.645
"""Half width of an interval of 90 %, in spreads."""
_FREEDOM = 4.0  # degrees of freedom of the residuals
# What no factor explains; kernels of experts change with every release.
_NOISE, _NOISE_OF_MIXTURES = 0.07, 0.18
_SCALE_SPREAD = 0.15  # common scale of the user's ground
_STACK_SCALE, _DEVICE_SPREAD, _NARROW_SPREAD = 0.06, 0.06, 0.12
_MOST_STEPS, _LONGEST_STEP, _CONVERGED = 40, 0.5, 1e-5
_MOST_WEIGHT = 8.0  # rows of one group count as this many at most
_ROWS_OF_NOISE = 2.0  # measured rows that the usual scatter of published ones counts for
_NORMAL_SQUARE = 0.786  # mean of r**2 times its weight, for a normal r
_COMMON, _ALIKE = 0.9, 2.0  # of what no factor explains: variance common to layouts, and factors of 2 apart
_LEAST_SHARE = 1e-3  # of a step: shorter terms do not tell layouts apart
_MOST_ROUNDS = 8  # in which rows are trusted more or less


@cache
def _prior() -> tuple[Array, Array, Array]:
    """Return logarithms of the factors before any row, their spread, and their spread between stacks."""
    table = read_preset(_PACKAGE, "factors")
    columns = zip(*(table["prior"][name] for name in ALL_NAMES), strict=True)
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
        """Return the logarithms of the factors of a stack on a device, by the terms of a run, (n_terms,)."""
        own = self.devices.get(device, 0.0)
        if training.is_narrow:
            own += self.narrow.get(device, 0.0)
        logs = self.shared + self.stacks.get(stack, np.zeros(_N)) + own * COMPUTE
        return logs[: len(names_of(training.model))]


@cache
def knowledge() -> Knowledge:
    """Return the factors that ship with the package, fitted to the register of published rows."""
    table = read_preset(_PACKAGE, "knowledge")

    def column(values: dict[str, float]) -> Array:
        return np.log([values.get(name, 1.0) for name in ALL_NAMES])

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
    lines += [f"{name} = {math.exp(value):.3g}" for name, value in zip(ALL_NAMES, known.shared, strict=True)]
    for stack, values in sorted(known.stacks.items()):
        pairs = [(name, f"{math.exp(v):.3g}") for name, v in zip(ALL_NAMES, values, strict=True)]
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
        [ideal_terms(row.training, Grid.of([row.layout]), row.cluster, row.stack) for row in rows]
    )


def fit_knowledge(rows: Sequence[Measured], terms: Array | None = None) -> Knowledge:
    """Fit the factors of all stacks and devices to rows; every group of rows has about the same weight."""
    ideal = terms_of(rows) if terms is None else terms
    measured = np.log([row.step_s for row in rows])
    n_terms = ideal.shape[1]
    mean, spread, between = (column[:n_terms] for column in _prior())
    names = sorted({row.stack.family for row in rows})
    devices = sorted({row.cluster.gpu.kind for row in rows})
    narrow = sorted({row.cluster.gpu.kind for row in rows if row.training.is_narrow})
    # Columns: shared, per stack its terms and its scale, per device its scale, and that of narrow products.
    blocks = {name: n_terms + i * (n_terms + 1) for i, name in enumerate(names)}
    at_device = {name: n_terms + len(names) * (n_terms + 1) + i for i, name in enumerate(devices)}
    at_narrow = {
        name: n_terms + len(names) * (n_terms + 1) + len(devices) + i for i, name in enumerate(narrow)
    }
    n = n_terms + len(names) * (n_terms + 1) + len(devices) + len(narrow)
    centre, sigma = np.zeros(n), np.full(n, _DEVICE_SPREAD)
    centre[:n_terms], sigma[:n_terms] = mean, spread
    for start in blocks.values():
        sigma[start : start + n_terms], sigma[start + n_terms] = between, _STACK_SCALE
    for column in at_narrow.values():
        sigma[column] = _NARROW_SPREAD
    sizes = Counter(row.group for row in rows)
    weight = np.array([min(1.0, _MOST_WEIGHT / sizes[row.group]) for row in rows])

    def model(theta: Array) -> tuple[Array, Array]:
        total, slopes = np.empty(len(rows)), np.zeros((len(rows), n))
        for i, row in enumerate(rows):
            start, kind = blocks[row.stack.family], row.cluster.gpu.kind
            is_narrow = row.training.is_narrow
            scale = theta[at_device[kind]] + (theta[at_narrow[kind]] if is_narrow else 0.0)
            logs = (
                theta[:n_terms]
                + theta[start : start + n_terms]
                + theta[start + n_terms]
                + scale * COMPUTE[:n_terms]
            )
            parts = np.exp(logs) * ideal[i]
            total[i] = np.log(parts.sum())
            share = parts / parts.sum()
            slopes[i, :n_terms] = slopes[i, start : start + n_terms] = share
            slopes[i, start + n_terms] = 1.0
            slopes[i, at_device[kind]] = share[COMPUTE[:n_terms]].sum()
            if is_narrow:
                slopes[i, at_narrow[kind]] = share[COMPUTE[:n_terms]].sum()
        return total, slopes

    noise = noise_of(ideal)

    def weights(residual: Array) -> Array:
        return weight * _trust(residual / noise) / noise**2

    theta, *_ = _posterior(model, measured, centre, sigma, weights)
    unseen, none = _prior()[0][n_terms:], np.zeros(_N - n_terms)  # terms that no row has
    return Knowledge(
        shared=np.concatenate([theta[:n_terms], unseen]),
        stacks={
            name: np.concatenate([theta[at : at + n_terms], none]) + theta[at + n_terms]
            for name, at in blocks.items()
        },
        devices={name: float(theta[at]) for name, at in at_device.items()},
        narrow={name: float(theta[at]) for name, at in at_narrow.items()},
        rows={
            name: dict(Counter(row.cluster.gpu.kind for row in rows if row.stack.family == name))
            for name in names
        },
    )


def noise_of(terms: Array) -> Array:
    """Return the spread of the logarithm of a step that no factor explains [1], (n_rows,)."""
    return np.where(terms[:, _EXPERTS] > 0, _NOISE_OF_MIXTURES, _NOISE)


def _posterior(
    model: Callable[[Array], tuple[Array, Array]],
    measured: Array,
    centre: Array,
    sigma: Array,
    weights: Callable[[Array], Array],
) -> tuple[Array, Array, Array, Array]:
    """Return the mode of parameters with normal priors, its covariance, and residuals and slopes there.

    ``model`` returns logarithms of steps and their slopes, ``weights`` the inverse covariance of residuals,
    (n_rows, n_rows), or its diagonal, (n_rows,).
    """
    theta = centre.copy()
    precision = np.diag(1 / sigma**2)
    for _ in range(_MOST_STEPS):
        predicted, slopes = model(theta)
        residual = predicted - measured
        weight = weights(residual)
        weighted = (weight[:, None] * slopes if weight.ndim == 1 else weight @ slopes).T
        curvature = weighted @ slopes + precision
        gradient = weighted @ residual + (theta - centre) / sigma**2
        step = np.clip(np.linalg.solve(curvature, gradient), -_LONGEST_STEP, _LONGEST_STEP)
        theta = theta - step
        if np.abs(step).max() < _CONVERGED:
            break
    return theta, np.asarray(np.linalg.inv(curvature)), residual, slopes


def _trust(off: Array) -> Array:
    """Return the weights of residuals [1], given over their spread: about 1, and little for odd ones."""
    return np.asarray((_FREEDOM + 1) / (_FREEDOM + off**2))


def alike(parts_s: Array, others_s: Array) -> Array:
    """Return the covariance of what no factor explains, of layouts that spend their time alike.

    Parameters
    ----------
    parts_s, others_s
        Terms of steps [s] before any row of the ground, (n_layouts, n_terms) and (n_others, n_terms).

    Returns
    -------
    Array
        (n_layouts, n_others) [1].
    """
    own, other = (
        np.log2(np.maximum(parts / parts.sum(axis=1, keepdims=True), _LEAST_SHARE))
        for parts in (parts_s, others_s)
    )
    squares = (own**2).sum(axis=1)[:, None] + (other**2).sum(axis=1) - 2 * own @ other.T
    correlation = np.exp(-np.maximum(squares, 0.0) / (2 * _ALIKE**2))
    return np.asarray(_COMMON * np.outer(noise_of(parts_s), noise_of(others_s)) * correlation)


def _own_variance(parts_s: Array) -> Array:
    """Return the variance of what no factor explains and no other layout shares [1], (n_layouts,)."""
    return np.asarray((1 - _COMMON) * noise_of(parts_s) ** 2)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Measured rows of a ground, as their neighbours see them.

    Parameters
    ----------
    parts_s
        Terms of their steps before any row [s], (n_rows, n_terms).
    slopes
        Slopes of the logarithms of their steps at the mode, (n_rows, 1 + n_terms).
    ahead
        Logarithms of their measured steps, less those of the factors at the mode, (n_rows,).
    weights
        Inverse covariance of ``ahead``, (n_rows, n_rows).
    """

    parts_s: Array
    slopes: Array
    ahead: Array
    weights: Array


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What is known of steps on one ground: the mode of the logarithms of the factors, and its covariance.

    Entry 0 is a common scale, the others are the terms. ``rows`` of this ground stand behind it; they scatter
    around it ``scatter`` times as far as published rows do around theirs [1], at least once.
    """

    offsets: Array
    covariance: Array
    rows: _Rows | None = None
    scatter: float = 1.0

    @property
    def n_rows(self) -> int:
        """Number of the rows."""
        return 0 if self.rows is None else len(self.rows.ahead)

    def with_terms(self, n_terms: int) -> "Calibrated":
        """Return what is known of the first terms, and of further ones what is known before any row."""
        n, rows = len(self.offsets) - 1, self.rows
        if n_terms == n:
            return self
        prior, more, kept = uncalibrated(n_terms), max(n_terms - n, 0), min(n_terms, n) + 1
        offsets, covariance = prior.offsets.copy(), prior.covariance.copy()
        offsets[:kept], covariance[:kept, :kept] = self.offsets[:kept], self.covariance[:kept, :kept]
        if rows is not None:
            parts_s, slopes = (
                np.pad(table, ((0, 0), (0, more)))[:, :width]
                for table, width in ((rows.parts_s, n_terms), (rows.slopes, n_terms + 1))
            )
            rows = replace(rows, parts_s=parts_s, slopes=slopes)
        return Calibrated(offsets, covariance, rows, self.scatter)

    def parts_s(self, logs: Array, terms: Array) -> Array:
        """Return the terms of steps [s], (n_layouts, n_terms), from factors and ideal terms."""
        parts_s = np.exp(logs + self.offsets[0] + self.offsets[1:]) * terms
        if self.rows is None:
            return np.asarray(parts_s)
        ahead = self._common(parts_s, self.rows) @ self.rows.weights @ self.rows.ahead
        return np.asarray(parts_s * np.exp(ahead)[:, None])

    def spread(self, parts_s: Array, has_rows: NDArray[np.bool_] | bool = False) -> Array:
        """Return the spread of the logarithms of steps [1], (n_layouts,).

        ``has_rows`` marks layouts of models that are among the rows: what the host takes is known of these.
        """
        slopes, variance = slopes_of(parts_s), (self.scatter * noise_of(parts_s)) ** 2
        if self.rows is not None:
            common = self._common(parts_s, self.rows)
            pull = common @ self.rows.weights
            slopes, variance = slopes - pull @ self.rows.slopes, variance - (pull * common).sum(axis=1)
            variance = variance + ~np.asarray(has_rows) * (_host_slopes(parts_s) ** 2).sum(axis=1)
        return np.asarray(np.sqrt(np.einsum("ij,jk,ik->i", slopes, self.covariance, slopes) + variance))

    def joint_covariance(self, parts_s: Array, has_rows: bool = False) -> Array:
        """Return the covariance of the logarithms of steps of one model [1], (n_layouts, n_layouts).

        ``has_rows`` is true if the model is among the rows.
        """
        slopes, before_s = slopes_of(parts_s), self._before_rows(parts_s)
        noise = self.scatter**2 * (alike(before_s, before_s) + np.diag(_own_variance(parts_s)))
        if self.rows is not None:
            common = self._common(parts_s, self.rows)
            pull = common @ self.rows.weights
            slopes, noise = slopes - pull @ self.rows.slopes, noise - pull @ common.T
            if not has_rows:
                noise = noise + _host_slopes(parts_s) @ _host_slopes(parts_s).T
        covariance = slopes @ self.covariance @ slopes.T + noise
        return np.asarray((covariance + covariance.T) / 2)

    def _before_rows(self, parts_s: Array) -> Array:
        """Return the shares that predicted terms had before any row, times a scale."""
        return np.asarray(parts_s * np.exp(-self.offsets[1:]))

    def _common(self, parts_s: Array, rows: _Rows) -> Array:
        """Return the covariance of what no factor explains, of layouts and rows, (n_layouts, n_rows)."""
        return np.asarray(self.scatter**2 * alike(self._before_rows(parts_s), rows.parts_s))


@cache
def uncalibrated(n_terms: int = len(NAMES)) -> Calibrated:
    """Return what is known of a ground before any of its rows is, by terms."""
    _, _, between = _prior()
    spread = np.concatenate([[_SCALE_SPREAD], between[:n_terms]])
    return Calibrated(np.zeros(n_terms + 1), np.diag(spread**2))


def slopes_of(parts_s: Array) -> Array:
    """Return the slopes of the logarithm of steps by scale and terms [1], (n_layouts, 1 + n_terms)."""
    slopes = np.ones((len(parts_s), 1 + parts_s.shape[1]))
    slopes[:, 1:] = parts_s / parts_s.sum(axis=1, keepdims=True)
    return slopes


def _host_slopes(parts_s: Array) -> Array:
    """Return by how much the host moves logarithms of steps of another model [1], (n_layouts, n_host_terms).

    How long Python, its data and the launches of kernels take differs between models as it does between
    stacks, so that rows of one model say little about another. It is common to all layouts of a model.
    """
    _, _, between = _prior()
    is_host = _OF_HOST[: parts_s.shape[1]]
    return np.asarray(slopes_of(parts_s)[:, 1:][:, is_host] * between[_OF_HOST])


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

    def weights(residual: Array, scatter: float = 1.0) -> Array:
        # Heavy tails: what a row has in common with no other is weighed by how odd it looks.
        trust = np.ones(len(residual))
        for _ in range(_MOST_ROUNDS):
            inverse = np.linalg.inv(scatter**2 * (common + np.diag(own / trust)))
            alone = scatter**2 * own / trust * (inverse @ residual)
            trust = _trust(alone / (scatter * np.sqrt(own)))
        return np.asarray(np.linalg.inv(scatter**2 * (common + np.diag(own / trust))))

    prior = uncalibrated(terms.shape[1])
    sigma = np.sqrt(np.diag(prior.covariance))
    before_s = np.exp(logs) * terms
    common, own = alike(before_s, before_s), _own_variance(before_s)
    mode, known, residual, slopes = _posterior(model, np.log(step_s), prior.offsets, sigma, weights)
    # Rows are nearer to the mode than rows to come: each parameter that they decide takes one of them.
    decided = len(mode) - float(np.trace(known / sigma**2))
    values, vectors = np.linalg.eigh(common + np.diag(own))
    scatter = _scatter(vectors / np.sqrt(values) @ vectors.T @ residual, max(0.0, len(step_s) - decided))
    inverse = weights(residual, scatter)
    curvature = slopes.T @ inverse @ slopes + np.diag(1 / sigma**2)
    return Calibrated(
        mode, np.asarray(np.linalg.inv(curvature)), _Rows(before_s, slopes, -residual, inverse), scatter
    )


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
