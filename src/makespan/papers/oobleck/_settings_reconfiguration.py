"""Options of reconfiguration: which losses are tried."""

from functools import partial
from typing import Annotated

from pydantic import Field

from makespan.settings import Block, Count, option

__all__ = ["Losses"]

_artifact = partial(option, source="Oobleck SOSP'23 artifact, tests", changes="reconfiguration")
_chosen = partial(option, source="a choice", changes="reconfiguration")


class Losses(Block):
    """Losses of nodes of all plans of a few."""

    most_nodes: Count = _chosen("nodes of a plan, up to these", le=16)
    most_n0: Count = _artifact("least nodes of a pipeline, up to these")
    most_f: Annotated[int, Field(ge=0)] = _chosen("nodes lost at once, up to these")
    larger_losses: int = _chosen("random losses of more nodes, for each number of nodes, n0 and f", ge=0)
    n_microbatches: Count = _chosen("microbatches of an iteration")
    state_factor: float = _chosen("bytes sent for each byte of parameters: weights and two moments", gt=0)
    seed: int = _chosen("seed of the larger losses", ge=0)
