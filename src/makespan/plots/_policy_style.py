"""Names, order, colours and line styles of scheduling policies in figures."""

from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.lines import Line2D

from makespan.plots._style import PALETTE

__all__ = ["PolicyStyle", "is_ablation", "policy_handles", "policy_order", "policy_style"]

LineStyle = str | tuple[int, tuple[int, ...]]

_DASHED: LineStyle = (0, (4, 2))
_DOTTED: LineStyle = (0, (1, 1))
_CHAIN: LineStyle = (0, (5, 1, 1, 1))


@dataclass(frozen=True, slots=True)
class PolicyStyle:
    """How a policy looks in every figure.

    Parameters
    ----------
    title
        Name in legends.
    colour
        Of bars and lines.
    marker
        Of points.
    line
        Dash pattern of lines.
    """

    title: str
    colour: str
    marker: str
    line: LineStyle = "-"


_STYLES = {
    "morphling-work": PolicyStyle("Morphling-work", PALETTE["blue"], "o"),
    "morphling": PolicyStyle("Morphling", PALETTE["sky"], "s"),
    "morphling-work-e": PolicyStyle("Morphling-work-E", PALETTE["blue"], "^", _DASHED),
    "morphling-work-r": PolicyStyle("Morphling-work-R", PALETTE["blue"], "v", _CHAIN),
    "morphling-work-n": PolicyStyle("Morphling-work-N", PALETTE["blue"], "x", _DOTTED),
    "morphling-e": PolicyStyle("Morphling-E", PALETTE["sky"], "^", _DASHED),
    "morphling-r": PolicyStyle("Morphling-R", PALETTE["sky"], "v", _CHAIN),
    "morphling-n": PolicyStyle("Morphling-N", PALETTE["sky"], "x", _DOTTED),
    "sia": PolicyStyle("Sia", PALETTE["vermilion"], "D"),
    "synergy": PolicyStyle("Synergy", PALETTE["green"], "^"),
    "antman": PolicyStyle("AntMan", PALETTE["purple"], "v"),
    "gavel": PolicyStyle("Gavel", PALETTE["olive"], "P"),
    "tiresias": PolicyStyle("Tiresias", PALETTE["orange"], "d"),
    "srtf": PolicyStyle("SRTF", PALETTE["black"], "<", _DASHED),
    "sjf": PolicyStyle("SJF", PALETTE["black"], ">", _CHAIN),
    "fifo": PolicyStyle("FIFO", PALETTE["grey"], "h", _DOTTED),
}


def policy_style(name: str) -> PolicyStyle:
    """Return the style of a policy; unknown ones are grey crosses under their own name."""
    return _STYLES.get(name, PolicyStyle(name, PALETTE["grey"], "X"))


def is_ablation(name: str) -> bool:
    """Whether a policy is another one with a part taken away; their names end in -e, -r or -n."""
    return name.endswith(("-e", "-r", "-n"))


def policy_order(names: Iterable[str]) -> list[str]:
    """Return the distinct policies in the order of the figures, unknown ones last."""
    found = set(names)
    return [name for name in _STYLES if name in found] + sorted(found - set(_STYLES))


def policy_handles(names: Iterable[str], *, with_marker: bool = True) -> list[Line2D]:
    """Return legend entries of the policies, in their order."""
    styles = [policy_style(name) for name in policy_order(names)]
    return [
        Line2D(
            [], [], color=style.colour, ls=style.line, marker=style.marker if with_marker else "",
            label=style.title,
        )
        for style in styles
    ]  # fmt: skip
