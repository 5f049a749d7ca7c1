"""Measurement noise, stragglers and anomalies, seeded row by row."""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from makespan.emulator._points import Point
from makespan.errors import InputError

__all__ = ["Anomalies", "NoiseModel", "Stragglers", "row_generator", "row_seed"]

_SEED_BYTES = 8


@dataclass(frozen=True, slots=True)
class NoiseModel:
    """Scatter of measured rows around the value of the model.

    Parameters
    ----------
    sigma_run_single_node, sigma_run_multi_node
        Standard deviation of the logarithm of one measured iteration [1]; assumptions.
    samples
        Iterations averaged in a row; that of the published traces.
    sigma_environment
        Standard deviation of the logarithm that a whole row shares [1]; published rows that the
        model considers equivalent differ by 0.6 to 3.5 %.
    """

    sigma_run_single_node: float = 0.015
    sigma_run_multi_node: float = 0.025
    samples: int = 19
    sigma_environment: float = 0.02

    def factors(
        self, rng: np.random.Generator, n_terms: int, *, multi_node: bool, scale: float
    ) -> NDArray[np.float64]:
        """Draw one factor for each term of a row, (n_terms,); their mean is 1.

        Terms scatter independently, beside the environment that a row shares.
        """
        run = self.sigma_run_multi_node if multi_node else self.sigma_run_single_node
        sigma = scale * run / math.sqrt(self.samples)
        environment = scale * self.sigma_environment
        draws = rng.standard_normal(n_terms + 1)
        shared = math.exp(environment * draws[0] - environment**2 / 2)
        return np.asarray(shared * np.exp(sigma * draws[1:] - sigma**2 / 2))


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Nodes that compute slowly, with some probability a node and row.

    Parameters
    ----------
    probability
        Of a node being slow in a row [1].
    mean_slowdown
        Mean of the exponential share by which its compute takes longer [1].
    """

    probability: float
    mean_slowdown: float

    def __post_init__(self) -> None:
        """Check ranges."""
        if not 0 <= self.probability <= 1 or self.mean_slowdown < 0:
            raise InputError(
                f"stragglers: probability {self.probability} and mean_slowdown {self.mean_slowdown}; "
                "accepted: a probability in [0, 1] and a slowdown >= 0"
            )

    def compute_factor(self, rng: np.random.Generator, n_nodes: int) -> float:
        """Draw the factor on compute: that of the slowest node."""
        slow = rng.random(n_nodes) < self.probability
        extra = rng.exponential(self.mean_slowdown, n_nodes) if self.mean_slowdown else np.zeros(n_nodes)
        return float(1.0 + np.max(slow * extra))


@dataclass(frozen=True, slots=True)
class Anomalies:
    """Defects of real measurements, for robustness tests; all off by default.

    Parameters
    ----------
    odd_path_bytes_per_s
        Bandwidth of a slow path on multi-node placements with an odd number of GPUs on some
        node: the gradient volume over this adds to the iteration [B/s]; 0 for none.
    half_batch_when_short
        Whether a data-parallel run that would need accumulation runs one micro-batch only.
    missing_share
        Share of rows that are left out [1].
    """

    odd_path_bytes_per_s: float = 0.0
    half_batch_when_short: bool = False
    missing_share: float = 0.0

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.odd_path_bytes_per_s < 0 or not 0 <= self.missing_share < 1:
            raise InputError(
                f"anomalies: odd_path_bytes_per_s {self.odd_path_bytes_per_s} and missing_share "
                f"{self.missing_share}; accepted: >= 0, and in [0, 1)"
            )

    def extra_time_s(self, point: Point, gradient_bytes: float) -> float:
        """Return the time that the slow path adds to a row [s]."""
        counts = point.placement.gpus_per_node
        is_odd = len(counts) > 1 and any(count % 2 for count in counts)
        if not (is_odd and self.odd_path_bytes_per_s and point.plan.dp > 1):
            return 0.0
        return gradient_bytes / self.odd_path_bytes_per_s


def row_seed(global_seed: int, cluster: str, workload: str, point: Point) -> int:
    """Return a 64-bit seed that depends on the row alone, not on what else is emulated."""
    text = "\x1f".join((str(global_seed), cluster, workload, point.text))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_SEED_BYTES).digest(), "big")


def row_generator(global_seed: int, cluster: str, workload: str, point: Point) -> np.random.Generator:
    """Return the random generator of a row."""
    return np.random.Generator(np.random.PCG64(row_seed(global_seed, cluster, workload, point)))
