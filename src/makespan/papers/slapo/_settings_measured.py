"""Options of what is measured of schedules."""

from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from makespan.settings import Block, Count, option, taken_from, unlike
from makespan.training.zoo import family_sizes

__all__ = ["Fig9Steps", "Tuner"]

_of_steps = partial(option, source="a choice", changes="fig9")
_of_search = partial(option, source="a choice", changes="tuner")
_Ratio = Annotated[float, Field(ge=0, le=1)]
_Counts = Annotated[tuple[Count, ...], unlike("each number once")]


class Fig9Steps(Block):
    """Steps of the schedule of a small BERT, measured on CPU cores."""

    size: Annotated[str, taken_from(lambda: family_sizes("bert"))] = _of_steps("size of the model")
    batch: Count = _of_steps("samples a step", unit="samples")
    processes: _Counts = _of_steps("numbers of processes that share the model", min_length=1)
    compiler: Literal["inductor", "dynamo"] = _of_steps(
        "what compiles fused operations; dynamo captures them only"
    )
    warmup_passes: Count = _of_steps("forward and backward passes that are not timed")
    passes: Count = _of_steps("forward and backward passes that are timed")
    seed: int = _of_steps("seed of weights and samples", ge=0)


class Tuner(Block):
    """Search for the fastest schedule of a small OPT, whose objective is a run."""

    size: Annotated[str, taken_from(lambda: family_sizes("opt"))] = _of_search("size of the model")
    batches: _Counts = _of_search("batch sizes", unit="samples", min_length=2)
    ratios: Annotated[tuple[_Ratio, ...], unlike("each share once")] = _of_search(
        "shares of the layers that are recomputed", min_length=2
    )
    budget_bytes: Count = _of_search(
        "most that the forward pass may keep, which stands for the memory of a device", unit="B"
    )
    warmup_passes: Count = _of_search("forward and backward passes that are not timed")
    passes: Count = _of_search("forward and backward passes that are timed")
    seed: int = _of_search("seed of weights, samples and strategies", ge=0)
