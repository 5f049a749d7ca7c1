"""Block ``oobleck``: options of the paper, checked when a configuration is read."""

from typing import Any, Self

from pydantic import model_validator

from makespan.papers.oobleck._settings_live import Hybrid
from makespan.papers.oobleck._settings_planning import Planning
from makespan.papers.oobleck._settings_simulation import Simulation
from makespan.settings import PaperSettings, option

__all__ = ["Oobleck"]

_SIMULATED = ("fig9",)
_LIVE = ("hybrid", "hybrid_kills", "hybrid_summary")
_PLANNED = ("templates", "instantiation", "layer_throughput", "studies")


class Oobleck(PaperSettings):
    """Experiments of the Oobleck paper."""

    untimed = frozenset({*_SIMULATED, *_PLANNED, *_LIVE})
    unjudged = frozenset({"layer_throughput"})
    judged_cells = ("instantiation",)
    contents = {
        "templates": "pipeline templates of made-up layers, by the exact and the published search",
        "instantiation": "plans of templates, chosen as published and by us, by the simulated schedule",
        "layer_throughput": "throughput from emulated times of layers beside the artifact's",
        "studies": "which templates are needed at least, and what fewer cost",
        "hybrid": "losses of training through kills beside one process that repeats it",
        "hybrid_kills": "each kill, the phase it struck, and how long training paused",
        "hybrid_summary": "pauses, repeated iterations and goodput, beside checkpoint and relaunch",
        "fig9": "average throughput against the frequency of failures, with the paper's values",
        "claims": "the statements of the paper, judged by this source alone",
    }

    planning: Planning = option("templates of pipelines and plans of them")
    simulation: Simulation = option("simulations of systems that lose nodes")
    hybrid: Hybrid = option("training whose nodes are killed again and again")

    @model_validator(mode="after")
    def _models_are_known(self) -> Self:
        unknown = set(self.planning.layer_throughput.micro_batch_sizes) - set(self.simulation.batches())
        if unknown:
            raise ValueError(
                f"planning.layer_throughput.micro_batch_sizes has {', '.join(sorted(unknown))}; accepted: "
                f"models of simulation.models, {', '.join(self.simulation.batches())}"
            )
        return self

    def tables(self, source: str, is_profiled: bool) -> list[str]:
        """Return the tables that are built: simulations on printed throughput, plans, and real training."""
        built = {"emulated": [*_PLANNED, *_SIMULATED], "published": list(_SIMULATED), "measured": list(_LIVE)}
        return built.get(source, [])

    def options_of(self, table: str) -> dict[str, Any]:
        """Return the options of the experiment that makes a table without a trace."""
        return self.planning.options_of(table, self.simulation.batches())

    def published_datasets(self) -> tuple[str, ...]:
        """Return the names of the authors' traces."""
        return tuple(f"oobleck-trace-{name}" for name in self.simulation.failure_traces)
