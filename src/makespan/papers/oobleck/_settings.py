"""Block ``oobleck``: options of the paper, checked when a configuration is read."""

from makespan.papers.oobleck._settings_simulation import Simulation
from makespan.settings import PaperSettings, option

__all__ = ["Oobleck"]

_SIMULATED = ("fig9",)


class Oobleck(PaperSettings):
    """Experiments of the Oobleck paper."""

    untimed = frozenset(_SIMULATED)
    contents = {
        "fig9": "average throughput against the frequency of failures, with the paper's values",
        "claims": "the statements of the paper, judged by this source alone",
    }

    simulation: Simulation = option("simulations of systems that lose nodes")

    def tables(self, source: str, is_profiled: bool) -> list[str]:
        """Return the tables that are built: simulations rest on printed throughput."""
        return [] if source == "measured" else list(_SIMULATED)

    def published_datasets(self) -> tuple[str, ...]:
        """Return the names of the authors' traces."""
        return tuple(f"oobleck-trace-{name}" for name in self.simulation.failure_traces)
