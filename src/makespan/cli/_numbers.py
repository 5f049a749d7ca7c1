"""Numbers of the command line: finite, and within bounds that say why they are there."""

from typing import Any

import click

__all__ = ["Bounded", "COUNT", "CPU_THREADS", "PROCESSES", "SECONDS", "SEED", "real", "whole"]

_SHOWN = 40  # characters of what was given


class Bounded(click.FloatRange):
    """Reads a number and checks it; the message names what is accepted and the reason for the upper bound."""

    def __init__(
        self, kind: type[int] | type[float], least: float, most: float, why: str, *, above: bool = False
    ) -> None:
        super().__init__(least, most, min_open=above)
        self.name = "integer" if kind is int else "float"
        self._kind, self._least, self._most = kind, least, most
        what = "a whole number" if kind is int else "a number"
        end = str(most) if kind is int else f"{most:g}"
        self._accepted = f"{what} {'above' if above else 'from'} {least:g} to {end} ({why})"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; anything else fails with one message."""
        try:
            number = self._kind(value)
        except (ValueError, OverflowError):
            number = float("nan")  # which no comparison holds for
        is_enough = number > self._least if self.min_open else number >= self._least
        if not (is_enough and number <= self._most):
            self.fail(f"{str(value)[:_SHOWN]!r}; accepted: {self._accepted}", param, ctx)
        return number


def whole(least: int, most: int, why: str) -> "Bounded":
    """Accept whole numbers from one to another, with the reason for the upper bound."""
    return Bounded(int, least, most, why)


def real(most: float, why: str, *, above: bool = False) -> "Bounded":
    """Accept numbers from 0 to an upper bound, with the reason; ``above``: 0 is left out."""
    return Bounded(float, 0, most, why, above=above)


SECONDS: dict[str, Any] = {
    "type": real(10**9, "later times do not resolve a microsecond"),
    "metavar": "SECONDS",
}
"""Type and name of a simulated time."""

COUNT = whole(1, 10**6, "larger simulations take days and more memory than there is")
CPU_THREADS = whole(1, 4096, "no node has more")
PROCESSES = whole(1, 1024, "all of them run on one machine")
SEED = whole(0, 2**63 - 1, "seeds have 64 bits")
