"""Options of planning: which profiles, nodes and batches are tried."""

from functools import partial
from typing import Annotated, Any

from pydantic import Field

from makespan.settings import Block, Count, option

__all__ = ["Planning"]

_templates = partial(option, source="Oobleck SOSP'23 artifact, tests", changes="templates")
_instantiation = partial(option, source="Oobleck SOSP'23 artifact, tests", changes="instantiation")
_studies = partial(option, source="a choice", changes="studies")
_throughput = partial(option, source="a choice", changes="layer_throughput")

Threshold = Annotated[int, Field(ge=0)]


class Templates(Block):
    """Templates of made-up layers."""

    random_seeds: Count = _templates("profiles of random layers, seeds from 0")
    n_nodes: Count = _templates("nodes of the job")
    f: tuple[Threshold, ...] = _templates("nodes that may be lost at once", min_length=1)
    n0: tuple[Count, ...] = _templates("least nodes that hold the model", min_length=1)
    scaled_layers: tuple[Count, ...] = option(
        "further models, of equal and of skewed layers, for the time of the search",
        source="a choice", changes="templates",
    )  # fmt: skip


class Instantiations(Block):
    """Plans of templates of made-up layers."""

    n_nodes: tuple[Count, ...] = _instantiation("nodes to use", min_length=1)
    global_microbatches: tuple[Count, ...] = _instantiation("microbatches of an iteration", min_length=1)
    f: Threshold = _instantiation("nodes that may be lost at once")
    n0: Count = _instantiation("nodes of the smallest template")
    n_templates: Count = _instantiation("templates, each with a node more")


class PlanningStudies(Block):
    """Which templates are needed, and what fewer cost."""

    most_n0: Count = _studies("least nodes that hold the model, up to these")
    most_f: Threshold = _studies("nodes that may be lost at once, up to these")
    most_nodes: Count = _studies("nodes of a job, up to these")
    compared_nodes: Count = _studies("nodes at the start where all and few templates are compared")
    compared_microbatches: Count = _studies("microbatches of an iteration there")
    random_seeds: Count = _studies("profiles of random layers there, seeds from 0")


class LayerThroughput(Block):
    """Throughput from emulated times of layers."""

    cluster: str = _throughput("cluster of the catalogue whose node, with one GPU, and network are taken")
    f: Threshold = _throughput("nodes that may be lost at once")
    least_nodes: Count = _throughput("nodes, from")
    most_nodes: Count = _throughput("nodes, up to")
    state_factor: float = _throughput("bytes held for each byte of a 16-bit weight", gt=0)
    micro_batch_sizes: dict[str, Count] = _throughput(
        "samples of a microbatch, by model: divisors of the batch that leave room for activations"
    )


class Planning(Block):
    """Planning of pipelines."""

    templates: Templates = option("templates of made-up layers")
    instantiation: Instantiations = option("plans of templates of made-up layers")
    studies: PlanningStudies = option("which templates are needed, and what fewer cost")
    layer_throughput: LayerThroughput = option("throughput from emulated times of layers")

    def options_of(self, table: str, samples_per_step: dict[str, int]) -> dict[str, Any]:
        """Return the options of the experiment that makes a table."""
        own: dict[str, Any] = getattr(self, table).model_dump()
        if table == "instantiation":
            own |= {"random_seeds": self.templates.random_seeds}
        elif table == "studies":
            own |= {"f": self.templates.f, "n0": self.templates.n0}
        elif table == "layer_throughput":
            own |= {"samples_per_step": samples_per_step}
        return own
