"""Experiments of Oobleck (SOSP 2023): pipelines from templates that resume training when nodes are lost.

`PAPER` has the options and the experiments: templates and plans (`planning`), every loss of a few nodes
(`reconfiguration`), simulations of systems that lose nodes (`simulation`), ReCycle and dropped replicas
beside them (`recycle`), studies (`studies`), and training whose nodes are killed (`training`). The system
itself is `makespan.oobleck`. `page` makes a table of the paper's page from results.
"""

from typing import Self

from pydantic import model_validator

from makespan.papers.experiment import Paper
from makespan.papers.oobleck.planning import Instantiations, LayerThroughput, Templates
from makespan.papers.oobleck.reconfiguration import Losses
from makespan.papers.oobleck.recycle import ReCycle, page as page
from makespan.papers.oobleck.simulation import Failures, Simulation, SpotInstances, trace_dataset
from makespan.papers.oobleck.studies import Studies
from makespan.papers.oobleck.training import Hybrid, Predictions
from makespan.settings import Block, option


class Planning(Block):
    """Planning of pipelines."""

    templates: Templates = option("templates of made-up layers", Templates())
    instantiation: Instantiations = option("plans of templates of made-up layers", Instantiations())
    studies: Studies = option("which templates are needed, and what fewer cost", Studies())
    layer_throughput: LayerThroughput = option("throughput from emulated times of layers", LayerThroughput())


class Execution(Block):
    """Training of small models."""

    predictions: Predictions = option("measured iterations beside predicted ones", Predictions())


class Oobleck(Paper):
    """Experiments of the Oobleck paper."""

    title = "Oobleck"
    EXPERIMENTS = (
        Templates, Instantiations, Losses, LayerThroughput, Studies,
        Predictions, Hybrid, Failures, SpotInstances, ReCycle,
    )  # fmt: skip
    judged_cells = ("instantiation", "fig12")

    planning: Planning = option("templates of pipelines and plans of them", Planning())
    losses: Losses = option("losses of nodes", Losses())
    execution: Execution = option("training of small models", Execution())
    simulation: Simulation = option("simulations of systems that lose nodes", Simulation())
    recycle: ReCycle = option("ReCycle and dropped replicas beside the other systems", ReCycle())
    hybrid: Hybrid = option("training whose nodes are killed again and again", Hybrid())

    @model_validator(mode="after")
    def _models_are_known(self) -> Self:
        known = [model.name for model in self.simulation.models]
        unknown = set(self.planning.layer_throughput.micro_batch_sizes) - set(known)
        if unknown:
            raise ValueError(
                f"planning.layer_throughput.micro_batch_sizes has {', '.join(sorted(unknown))}; expected "
                f"models of simulation.models, {', '.join(known)}"
            )
        return self

    def published_datasets(self) -> tuple[str, ...]:
        """Return the names of the authors' traces."""
        return tuple(map(trace_dataset, (*self.simulation.failure_traces, *self.simulation.spot_traces)))


PAPER = Oobleck
