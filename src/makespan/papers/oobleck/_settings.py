"""Block ``oobleck``: options of the paper, checked when a configuration is read."""

from makespan.papers.oobleck._settings_simulation import Simulation, trace_dataset
from makespan.settings import PaperSettings, option

__all__ = ["Oobleck"]

_SIMULATED = ("fig1", "fig9", "fig10", "fig12", "fig13", "fig14", "fig15", "ablation")


class Oobleck(PaperSettings):
    """Experiments of the Oobleck paper."""

    untimed = frozenset(_SIMULATED)
    unjudged = frozenset({"fig1", "fig14", "fig15"})
    judged_cells = ("fig12",)
    contents = {
        "fig1": "where time goes with a failure every ten minutes",
        "fig9": "average throughput against the frequency of failures, with the paper's values",
        "fig10": "average throughput on spot traces, with the paper's values",
        "fig12": "where time goes at every frequency of failures",
        "fig13": "average throughput of a large model, with and without the cost of checkpoints",
        "fig14": "throughput and nodes over time on spot instances of EC2",
        "fig15": "throughput and nodes over time on spot instances of GCP",
        "ablation": "average throughput as released, with one defect repaired at a time",
        "claims": "the statements of the paper, judged by this source alone",
    }

    simulation: Simulation = option("simulations of systems that lose nodes")

    def tables(self, source: str, is_profiled: bool) -> list[str]:
        """Return the tables that are built: simulations rest on printed throughput."""
        return [] if source == "measured" else list(_SIMULATED)

    def published_datasets(self) -> tuple[str, ...]:
        """Return the names of the authors' traces."""
        return tuple(map(trace_dataset, (*self.simulation.failure_traces, *self.simulation.spot_traces)))
