"""Normalised speed of configurations, and what a device more or less means for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from makespan.sim import Configuration

__all__ = ["Curve"]


@dataclass(frozen=True, slots=True)
class Curve:
    """Sensitivity of a job: speed relative to its request by configuration.

    Parameters
    ----------
    options
        What the job may run as, by devices.
    reference_s
        Predicted time of a step as requested [s].
    """

    options: tuple[Configuration, ...]
    reference_s: float

    def speed(self, item: Configuration) -> float:
        """Return the speed relative to the request."""
        return self.reference_s / item.predicted_iter_time_s

    def efficiency(self, item: Configuration) -> float:
        """Return the relative speed a device: the slope from nothing to a configuration."""
        return self.speed(item) / item.n_gpus

    def slope(self, low: Configuration, high: Configuration) -> float:
        """Return the relative speed gained a device between two configurations."""
        return (self.speed(high) - self.speed(low)) / (high.n_gpus - low.n_gpus)

    def efficient(self, tolerance: float) -> tuple[Configuration, ...]:
        """Return the options near the best efficiency, the most efficient first.

        Parameters
        ----------
        tolerance
            Least accepted share of the best efficiency.
        """
        least = tolerance * max(self.efficiency(item) for item in self.options)
        chosen = [item for item in self.options if self.efficiency(item) >= least]
        return tuple(sorted(chosen, key=lambda item: (-self.efficiency(item), item.n_gpus, item.n_nodes)))

    def smaller(self, item: Configuration) -> Sequence[Configuration]:
        """Return the options with fewer devices, the one that loses least a device first."""
        found = [option for option in self.options if option.n_gpus < item.n_gpus]
        return sorted(found, key=lambda option: (self.slope(option, item), -option.n_gpus, option.n_nodes))
