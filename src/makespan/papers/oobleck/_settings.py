"""Block ``oobleck``: options of the paper, checked when a configuration is read."""

from makespan.papers.oobleck._settings_reconfiguration import Losses
from makespan.papers.oobleck._settings_simulation import Simulation
from makespan.settings import PaperSettings, option

__all__ = ["Oobleck"]

_SIMULATED = ("fig9",)
_ONCE = ("reconfiguration",)  # they rest on no source, and are built under the first


class Oobleck(PaperSettings):
    """Experiments of the Oobleck paper."""

    untimed = frozenset({*_SIMULATED, *_ONCE})
    contents = {
        "fig9": "average throughput against the frequency of failures, with the paper's values",
        "reconfiguration": "what becomes of every plan of a few nodes after every loss",
        "claims": "the statements of the paper, judged by this source alone",
    }

    simulation: Simulation = option("simulations of systems that lose nodes")

    losses: Losses = option("losses of nodes of all plans of a few")

    def tables(self, source: str, is_profiled: bool) -> list[str]:
        """Return the tables that are built: simulations rest on printed throughput."""
        once = _ONCE if source == "emulated" else ()
        return [] if source == "measured" else [*_SIMULATED, *once]

    def published_datasets(self) -> tuple[str, ...]:
        """Return the names of the authors' traces."""
        return tuple(f"oobleck-trace-{name}" for name in self.simulation.failure_traces)
