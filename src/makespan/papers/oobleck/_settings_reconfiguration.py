"""Options of reconfiguration: which losses are tried."""

from functools import partial
from typing import Annotated

from pydantic import Field

from makespan.settings import Block, Count, option

__all__ = ["Losses"]

_artifact = partial(option, source="Oobleck SOSP'23 artifact, tests", changes="reconfiguration")
_chosen = partial(option, source="a choice", changes="reconfiguration")
_studies = partial(option, source="a choice", changes="studies")

Threshold = Annotated[int, Field(ge=0)]


class Bursts(Block):
    """Several nodes lost at once, again and again."""

    n_nodes: Count = _studies("nodes of the cluster")
    rack_size: Count = _studies("nodes of a rack")
    n0: Count = _studies("least nodes of a pipeline")
    f: tuple[Threshold, ...] = _studies("nodes that may be lost at once", min_length=1)
    burst_nodes: tuple[Count, ...] = _studies("nodes that are lost at once", min_length=1)
    n_bursts: Count = _studies("bursts of each kind")
    gap_s: float = _studies("mean time between bursts", unit="s", gt=0)
    repair_s: float = _studies("time until what was lost is back", unit="s", gt=0)
    n_microbatches: Count = _studies("microbatches of an iteration")
    seed: int = _studies("seed of times and victims", ge=0)


class Losses(Block):
    """Losses of nodes of all plans of a few, and bursts of them."""

    most_nodes: Count = _chosen("nodes of a plan, up to these", le=16)
    most_n0: Count = _artifact("least nodes of a pipeline, up to these")
    most_f: Threshold = _chosen("nodes lost at once, up to these")
    larger_losses: int = _chosen("random losses of more nodes, for each number of nodes, n0 and f", ge=0)
    n_microbatches: Count = _chosen("microbatches of an iteration")
    state_factor: float = _chosen("bytes sent for each byte of parameters: weights and two moments", gt=0)
    seed: int = _chosen("seed of the larger losses", ge=0)
    bursts: Bursts = option("several nodes lost at once, again and again")
