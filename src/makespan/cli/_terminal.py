"""Writing to a terminal, in place."""

import os
from collections.abc import Sequence
from typing import TextIO

__all__ = ["Panel", "bar", "clock", "is_terminal"]

_UP, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[{}F", "\x1b[K", "\x1b[J"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_COLUMNS, _LINES = 80, 24  # of a terminal that does not say


def clock(time_s: float) -> str:
    """Format a time [s] as hours, minutes and seconds, ``'3:41:20'``; ``'-'`` if it is not a number."""
    if time_s != time_s:
        return "-"
    minutes, seconds = divmod(round(time_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def bar(share: float, width: int) -> str:
    """Draw a share within 0 and 1 as a bar of a number of characters."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return f"[{'#' * full}{'-' * (width - full)}]"


def is_terminal(stream: TextIO) -> bool:
    """Whether text can be replaced where it stands."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Panel:
    """Lines of a terminal that are written again and again.

    Parameters
    ----------
    stream
        The terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._height = 0

    def room(self) -> tuple[int, int]:
        """Return columns and lines that may be used."""
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except OSError:
            columns, lines = 0, 0
        return (columns or _COLUMNS) - 1, (lines or _LINES) - 1

    def show(self, lines: Sequence[str]) -> None:
        """Replace what is shown."""
        columns, rows = self.room()
        kept = [line[:columns] for line in lines[:rows]]
        above = _UP.format(self._height) if self._height else _HIDE_CURSOR
        body = "".join(f"{line}{_CLEAR_LINE}\n" for line in kept)
        self._height = len(kept)
        self._stream.write(above + body + _CLEAR_BELOW)
        self._stream.flush()

    def clear(self) -> None:
        """Remove what is shown and give the cursor back."""
        if self._height:
            self._stream.write(_UP.format(self._height) + _CLEAR_BELOW + _SHOW_CURSOR)
            self._stream.flush()
            self._height = 0
