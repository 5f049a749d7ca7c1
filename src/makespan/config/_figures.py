"""Block ``figures``: how figures are drawn."""

from makespan.config._fields import Block, option

__all__ = ["Figures"]


class Figures(Block):
    """How figures are drawn."""

    dpi: int = option(
        "resolution of the PNG files", unit="dots/inch", source="a choice", changes="figures", ge=50, le=1200
    )
