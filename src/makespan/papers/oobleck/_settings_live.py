"""Block ``oobleck.hybrid``: training whose nodes are killed again and again."""

from functools import partial
from typing import Annotated

from pydantic import Field, model_validator

from makespan.settings import Block, Count, option

__all__ = ["Hybrid"]

_chosen = partial(option, source="a choice", changes="hybrid, hybrid_kills, hybrid_summary")
_Number = Annotated[int, Field(ge=0)]


class Kills(Block):
    """Kills of each kind, over all jobs."""

    compute: Count = _chosen("in a forward or backward pass")
    reduction: _Number = _chosen("while gradients are added up")
    commit: _Number = _chosen("between prepared and committed")
    recovery: _Number = _chosen("during regroup, group build and copy after another kill")

    @model_validator(mode="after")
    def _recoveries_have_a_cause(self) -> "Kills":
        if self.recovery > self.compute:
            raise ValueError(f"at most as many kills in recoveries as in passes, {self.compute}")
        return self


class Hybrid(Block):
    """Pipelines of different shapes that lose nodes."""

    jobs: Count = _chosen("jobs, each with a seed and a share of the kills")
    nodes: Count = _chosen("processes of a job; a new one joins for each that is killed")
    f: _Number = _chosen("losses at once that must be survived")
    kills: Kills = _chosen("how many processes are killed, and when")
    most_delay_s: float = _chosen("longest time from the beginning of a phase to the kill", unit="s", gt=0)
    most_pipelines: Count = _chosen("pipelines above which an exchange of gradients is taken to be slow")
    layers: Count = _chosen("blocks of the model, besides embedding and head")
    hidden: Count = _chosen("its width; 4 heads")
    sequence: Count = _chosen("tokens of a sample")
    microbatches: Count = _chosen("microbatches of an iteration")
    microbatch_size: Count = _chosen("samples of each", unit="samples")
    checkpoint_every: Count = _chosen("iterations between checkpoints of the baseline, which relaunches")
    baseline_jobs: _Number = _chosen("jobs that the baseline repeats under the same kills")

    @model_validator(mode="after")
    def _nodes_suffice(self) -> "Hybrid":
        if self.nodes < self.f + 3:
            raise ValueError(f"nodes that are at least f + 3, {self.f + 3}, as two can be lost at once")
        return self
