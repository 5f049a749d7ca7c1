"""Options of training: what is timed beside its prediction."""

from functools import partial
from typing import Annotated, Any

from pydantic import Field

from makespan.settings import Block, Count, option

__all__ = ["Execution"]

_predicted = partial(option, source="a choice", changes="predictions")


class Predictions(Block):
    """Small models that are profiled, planned and trained, each under every plan."""

    n_layers: tuple[Count, ...] = _predicted("layers between embedding and head", min_length=1)
    n_microbatches: tuple[Count, ...] = _predicted("microbatches of an iteration", min_length=1)
    microbatch_size: Count = _predicted("samples of a microbatch", unit="samples")
    most_nodes: Count = _predicted("plans on one node and more, up to these")
    profile_repeats: Annotated[int, Field(ge=5)] = _predicted("timed passes of a layer")
    warm_ups: Count = _predicted("iterations that are not timed")
    iterations: Count = _predicted("iterations that are timed")


class Execution(Block):
    """Training of small models."""

    predictions: Predictions = option("measured iterations beside predicted ones")

    def options_of(self, table: str) -> dict[str, Any]:
        """Return the options of the experiment that makes a table."""
        own: dict[str, Any] = getattr(self, table).model_dump()
        return own
