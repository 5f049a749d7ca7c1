"""Options of searches."""

from functools import partial
from typing import Annotated

from pydantic import Field

from makespan.settings import Block, Count, option

__all__ = ["Fig10", "SyntheticGrids"]

_searched = partial(option, source="a choice", changes="fig10, fig10_searches")


class Fig10(Block):
    """Searches of the printed grid of batch sizes and shares of recomputed layers."""

    budget: Count = option(
        "evaluations of random search", source="Slapo, Fig. 10: 17 of 91", changes="fig10, fig10_searches"
    )
    starts: Count = _searched("coordinate descents, each from a random point, and random searches")


_drawn = partial(option, source="a choice", changes="fig10_grids")


class SyntheticGrids(Block):
    """Grids with random constants, of which no search has seen any."""

    grids: Count = _drawn("grids in which a point fits")
    noise: Annotated[float, Field(ge=0, le=0.1)] = _drawn(
        "standard deviation of measured throughput, relative"
    )
    spread: Annotated[float, Field(ge=1)] = _drawn("largest factor between a fitted and a drawn constant")
    seed: Annotated[int, Field(ge=0)] = _drawn("seed of everything that is drawn")
