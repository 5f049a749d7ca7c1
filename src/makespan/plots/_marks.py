"""Marks that have one meaning in all figures, each with the entry that explains it in a legend.

- A hollow diamond is a published value, of the paper or of the artifact, never one of ours.
- A thin line with caps is a spread or an interval around a value of ours.
- A cross stands where something cannot run or does not exist.
- A dashed line is a limit, and a dotted one a reference, such as equality.
- A black dot is another value of ours beside the one that a bar shows.
- An arrow at the edge of a panel points to a value beyond it, which is written beside the arrow.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.path import Path

__all__ = [
    "beyond",
    "beyond_handle",
    "cannot_run",
    "cannot_run_handle",
    "compared",
    "compared_handle",
    "limit",
    "limit_handle",
    "published",
    "published_handle",
    "reference",
    "reference_handle",
    "spread",
    "spread_handle",
]

Numbers = npt.ArrayLike

_PUBLISHED: dict[str, Any] = {"ls": "none", "marker": "D", "ms": 3.6, "mfc": "white", "mew": 0.9}
_CANNOT_RUN: dict[str, Any] = {"ls": "none", "marker": "x", "ms": 4.5, "mew": 1.3}
_COMPARED: dict[str, Any] = {"ls": "none", "marker": "o", "ms": 2.8, "mew": 0.0}
_LIMIT: dict[str, Any] = {"color": "#404040", "lw": 0.8, "ls": (0, (4, 2))}
_REFERENCE: dict[str, Any] = {"color": "#404040", "lw": 0.8, "ls": (0, (1, 1.5))}
_SPREAD: dict[str, Any] = {"fmt": "none", "elinewidth": 0.8, "capsize": 1.5, "capthick": 0.8, "zorder": 4}
_CAPPED = Path([(0.0, -1.0), (0.0, 1.0), (-0.35, -1.0), (0.35, -1.0), (-0.35, 1.0), (0.35, 1.0)],
               [Path.MOVETO, Path.LINETO] * 3)  # fmt: skip
_ARROWS = {(True, True): ">", (True, False): "<", (False, True): "^", (False, False): "v"}
_OVER = 6  # drawn over bars and lines
_NUMBER_PT = 26.0  # length of a number beside an arrow


def published(
    axes: Axes, x: Numbers, y: Numbers, colour: str = "black", *, is_joined: bool = False, **more: Any
) -> None:
    """Mark published values; missing ones have no mark, and several series may each have its own colour."""
    line = {"ls": "-", "lw": 0.7, "color": colour} if is_joined else {}
    axes.plot(x, y, **_PUBLISHED | {"mec": colour, "zorder": _OVER} | line | more)


def published_handle(label: str = "published", joined_by: str | None = None) -> Line2D:
    """Return the legend entry of published values; ``joined_by`` is the colour of the line through them."""
    line = {} if joined_by is None else {"ls": "-", "lw": 0.7, "color": joined_by}
    return Line2D([], [], label=label, mec="black", **_PUBLISHED | line)


def spread(
    axes: Axes, place: Numbers, low: Numbers, high: Numbers, colour: str = "black", *, is_across: bool = False
) -> None:
    """Draw lines with caps from ``low`` to ``high`` at places on the other axis; missing ends draw none.

    Times, rates and ratios have no values below zero, so a symmetric interval that reaches below ends there.
    """
    at, ends = (
        np.atleast_1d(np.asarray(place, dtype=float)),
        np.array([low, high], dtype=float).reshape(2, -1),
    )
    known = np.isfinite(ends).all(axis=0)
    at, ends = at[known], np.maximum(ends[:, known], 0.0)
    middle, half = ends.mean(axis=0), np.ptp(ends, axis=0) / 2.0
    drawn: dict[str, Any] = _SPREAD | {"ecolor": colour}
    if is_across:
        axes.errorbar(middle, at, xerr=half, **drawn)
    else:
        axes.errorbar(at, middle, yerr=half, **drawn)


def spread_handle(label: str, colour: str = "black") -> Line2D:
    """Return the legend entry of spreads and intervals."""
    return Line2D([], [], ls="none", marker=_CAPPED, ms=5, mew=0.8, color=colour, label=label)


def cannot_run(axes: Axes, x: Numbers, y: Numbers, colour: str = "black", **more: Any) -> None:
    """Mark what cannot run or does not exist, where its value would be."""
    axes.plot(x, y, **_CANNOT_RUN | {"color": colour, "zorder": _OVER} | more)


def cannot_run_handle(label: str = "cannot run") -> Line2D:
    """Return the legend entry of what cannot run."""
    return Line2D([], [], label=label, color="black", **_CANNOT_RUN)


def compared(axes: Axes, x: Numbers, y: Numbers, **more: Any) -> None:
    """Mark another value of ours beside the one that a bar shows."""
    axes.plot(x, y, **_COMPARED | {"color": "black", "zorder": 5} | more)


def compared_handle(label: str) -> Line2D:
    """Return the legend entry of values beside those of bars."""
    return Line2D([], [], label=label, color="black", **_COMPARED)


def limit(axes: Axes, value: float, is_across: bool = True, **more: Any) -> None:
    """Draw a limit: across the panel at a height, or upwards."""
    (axes.axhline if is_across else axes.axvline)(value, **_LIMIT | {"zorder": 1} | more)


def limit_handle(label: str) -> Line2D:
    """Return the legend entry of a limit."""
    return Line2D([], [], label=label, **_LIMIT)


def reference(axes: Axes, x: Numbers, y: Numbers, **more: Any) -> None:
    """Draw a line to compare with, through the given points."""
    axes.plot(x, y, **_REFERENCE | {"zorder": 1, "label": "_reference"} | more)


def reference_handle(label: str) -> Line2D:
    """Return the legend entry of a line to compare with."""
    return Line2D([], [], label=label, **_REFERENCE)


def beyond(axes: Axes, place: float, value: float, limits: tuple[float, float], colour: str, *,
           is_across: bool = True, row: float | None = None, n_before: int = 0) -> bool:  # fmt: skip
    """Mark a value outside the limits of an axis by an arrow at the edge with its number.

    Parameters
    ----------
    place
        Position on the other axis.
    is_across
        Whether the value lies on the horizontal axis.
    row, n_before
        Position of the number, that of the arrow by default, and how many numbers stand there already.

    Returns
    -------
    bool
        Whether the value is beyond, and has its mark.
    """
    if not np.isfinite(value) or limits[0] <= value <= limits[1]:
        return False
    is_high = value > limits[1]
    edge = 1.0 if is_high else 0.0
    transform = axes.get_yaxis_transform() if is_across else axes.get_xaxis_transform()
    at = (edge, place) if is_across else (place, edge)
    axes.plot(
        [at[0]], [at[1]], ls="none", marker=_ARROWS[is_across, is_high], ms=4, mew=0.0, color=colour,
        transform=transform, clip_on=False, zorder=_OVER,
    )  # fmt: skip
    inwards = -1 if is_high else 1
    stand = (edge, place if row is None else row) if is_across else (place if row is None else row, edge)
    aligned: dict[str, Any] = (
        {
            "xytext": ((5 + _NUMBER_PT * n_before) * inwards, 0),
            "ha": "right" if is_high else "left",
            "va": "center",
        }
        if is_across
        else {
            "xytext": (0, (4 + _NUMBER_PT * n_before) * inwards),
            "ha": "center",
            "va": "top" if is_high else "bottom",
            "rotation": 90,
        }
    )
    axes.annotate(
        f"{value:.3g}", stand, xycoords=transform, textcoords="offset points", zorder=_OVER, color=colour,
        bbox={"fc": "white", "lw": 0, "pad": 0.6}, annotation_clip=False, **aligned,
    )  # fmt: skip
    return True


def beyond_handle(label: str = "beyond the axis, with its value") -> Line2D:
    """Return the legend entry of values beyond an axis."""
    return Line2D([], [], ls="none", marker=">", ms=4, mew=0.0, color="#404040", label=label)
