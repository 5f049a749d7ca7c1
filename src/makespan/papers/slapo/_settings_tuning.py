"""Options of searches."""

from functools import partial

from makespan.settings import Block, Count, option

__all__ = ["Fig10"]

_searched = partial(option, source="a choice", changes="fig10, fig10_searches")


class Fig10(Block):
    """Searches of the printed grid of batch sizes and shares of recomputed layers."""

    patience: Count = _searched("batch sizes without a better point after which the frontier ends")
    budget: Count = option(
        "evaluations of random search", source="Slapo, Fig. 10: 17 of 91", changes="fig10, fig10_searches"
    )
    starts: Count = _searched("coordinate descents, each from a random point, and random searches")
