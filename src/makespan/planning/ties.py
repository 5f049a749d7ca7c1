"""Choose among layouts whose predicted intervals overlap: chances, expected regret, and what to measure.

The logarithms of the steps of a few layouts are jointly normal, as `makespan.planning.factors` has it. A
layout that was measured has the step that was measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from makespan.planning.factors import Calibrated

Array = NDArray[np.float64]
_REPEATED = 0.01  # spread of repeated measurements of one layout
_DRAWS, _SEED = 4096, 36
_DIGITS = 6  # to which regrets are compared, so that order does not depend on the processor


@dataclass(frozen=True, slots=True)
class Joint:
    """Joint posterior of the logarithms of the steps of layouts.

    Parameters
    ----------
    mean
        (n_layouts,).
    covariance
        (n_layouts, n_layouts).
    """

    mean: Array
    covariance: Array

    @classmethod
    def of(
        cls,
        calibrated: Calibrated,
        parts_s: Array,
        measured_s: Sequence[float | None],
        has_rows: bool = False,
    ) -> "Joint":
        """Return the joint posterior of layouts of one model.

        Parameters
        ----------
        calibrated
            Factors, refined by measured steps.
        parts_s
            Predicted terms of the layouts [s], (n_layouts, n_terms).
        measured_s
            Measured steps of the layouts [s], None where there is none.
        has_rows
            True if the model is among those measured.
        """
        mean, covariance = np.log(parts_s.sum(axis=1)), calibrated.joint_covariance(parts_s, has_rows)
        for at, step_s in enumerate(measured_s):
            if step_s is not None:
                mean[at], covariance[at], covariance[:, at] = math.log(step_s), 0.0, 0.0
                covariance[at, at] = _REPEATED**2
        return cls(mean, covariance)

    def chances_over(self, first: int) -> Array:
        """Return the probability that each layout is faster than one of them [1], 0.5 for itself."""
        variance = np.diag(self.covariance)
        spread = np.sqrt(np.maximum(variance + variance[first] - 2 * self.covariance[first], 1e-12))
        behind = (self.mean - self.mean[first]) / spread
        return np.array([0.5 * math.erfc(one / math.sqrt(2)) for one in behind])

    def among(self, chosen: NDArray[np.bool_]) -> "Joint":
        """Return the joint posterior of some of the layouts."""
        return Joint(self.mean[chosen], self.covariance[np.ix_(chosen, chosen)])

    def regrets(self) -> Array:
        """Return the expected slowdown of each layout against the fastest of all [1].

        It is a mean over draws with a fixed seed, each with its mirror image.
        """
        values, vectors = np.linalg.eigh(self.covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        draws = np.random.Generator(np.random.PCG64(_SEED)).standard_normal((_DRAWS // 2, len(self.mean)))
        ahead = np.concatenate([draws, -draws]) @ root.T + self.mean
        slower = np.exp(ahead - ahead.min(axis=1, keepdims=True)).mean(axis=0) - 1.0
        return np.asarray(np.round(slower, _DIGITS))

    @property
    def comparison_variance(self) -> float:
        """Mean variance of the logarithm of the ratio of two steps, over all pairs of layouts."""
        n = len(self.mean)
        centred = np.trace(self.covariance) - self.covariance.sum() / n
        return float(2 * centred / (n - 1)) if n > 1 else 0.0

    def expected_falls(self) -> Array:
        """Return by how much measuring each layout lowers `comparison_variance`, in expectation [1].

        In a normal distribution this does not depend on what is measured, so that it is exact.
        """
        n = len(self.mean)
        if n == 1:
            return np.zeros(1)
        centred = (self.covariance**2).sum(axis=0) - self.covariance.sum(axis=0) ** 2 / n
        return np.asarray(2 * centred / (n - 1) / (np.diag(self.covariance) + _REPEATED**2))

    def given(self, measured: int) -> "Joint":
        """Return the posterior after one of the layouts is measured, with its mean where it is now."""
        column = self.covariance[:, measured]
        gained = np.outer(column, column) / (column[measured] + _REPEATED**2)
        return Joint(self.mean, self.covariance - gained)
