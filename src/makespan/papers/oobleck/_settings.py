"""Block ``oobleck``: options of the paper, checked when a configuration is read."""

from typing import Any, Self

from pydantic import model_validator

from makespan.papers.oobleck._settings_execution import Execution
from makespan.papers.oobleck._settings_live import Hybrid
from makespan.papers.oobleck._settings_planning import Planning
from makespan.papers.oobleck._settings_reconfiguration import Losses
from makespan.papers.oobleck._settings_simulation import Simulation, trace_dataset
from makespan.settings import PaperSettings, option

__all__ = ["Oobleck"]

_SIMULATED = ("fig1", "fig9", "fig10", "fig12", "fig13", "fig14", "fig15", "ablation")
_PLANNED = ("templates", "instantiation", "reconfiguration", "layer_throughput", "studies")
_EXECUTED = ("predictions",)
_LIVE = ("hybrid", "hybrid_kills", "hybrid_summary")


class Oobleck(PaperSettings):
    """Experiments of the Oobleck paper."""

    judged_on_profile = frozenset({*_EXECUTED, *_LIVE})
    untimed = frozenset({*_SIMULATED, *_PLANNED, *_EXECUTED, *_LIVE})
    unjudged = frozenset({"layer_throughput", "fig1", "fig14", "fig15"})
    judged_cells = ("instantiation", "fig12")
    contents = {
        "templates": "pipeline templates of made-up layers, by the exact and the published search",
        "instantiation": "plans of templates, chosen as published and by us, by the simulated schedule",
        "reconfiguration": "what becomes of every plan of a few nodes after every loss",
        "layer_throughput": "throughput from emulated times of layers beside the artifact's",
        "studies": "which templates are needed at least; nodes lost at once; intervals between checkpoints",
        "predictions": "measured iterations of small models beside the times that planning predicts",
        "hybrid": "losses of training through kills beside one process that repeats it",
        "hybrid_kills": "each kill, the phase it struck, and how long training paused",
        "hybrid_summary": "pauses, repeated iterations and goodput, beside checkpoint and relaunch",
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

    planning: Planning = option("templates of pipelines and plans of them")
    losses: Losses = option("losses of nodes")
    execution: Execution = option("training of small models")
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
        """Return the tables that are built: simulations rest on printed throughput, plans on no source."""
        built = {
            "emulated": [*_PLANNED, *_SIMULATED], "published": list(_SIMULATED),
            "measured": [*_EXECUTED, *_LIVE],
        }  # fmt: skip
        return built.get(source, [])

    def options_of(self, table: str) -> dict[str, Any]:
        """Return the options of the experiment that makes a table without a trace."""
        if table == "reconfiguration":
            return self.losses.model_dump(exclude={"bursts"})
        if table in _EXECUTED:
            return self.execution.options_of(table)
        own = self.planning.options_of(table, self.simulation.batches())
        if table == "studies":
            own |= {"bursts": self.losses.bursts.model_dump(), "intervals": self.simulation.steady()}
        return own

    def published_datasets(self) -> tuple[str, ...]:
        """Return the names of the authors' traces."""
        return tuple(map(trace_dataset, (*self.simulation.failure_traces, *self.simulation.spot_traces)))
