"""Progress on a terminal and in a log, in one form for all commands."""

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

import click

from makespan.errors import bounded
from makespan.units import printable

if TYPE_CHECKING:
    from makespan.studies import Attempt

_UP, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[{}F", "\x1b[K", "\x1b[J"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_WIDTH, _LINES = 80, 24  # of a terminal that does not say
_FRAME_S = 0.2  # between two frames in a terminal
_LINE_S = 10.0  # between two lines elsewhere
_BAR_WIDTH = 30
_PACE_COUNTS = 20  # last changes of a count that the estimate of the remaining time uses
_LEAST_SHARE = 0.02  # of the work, before which an estimate says nothing
_QUIET = "makespan.quiet"


def _note_quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta[_QUIET] = value


def quiet_option() -> click.Option:
    """Return the option ``--quiet``, which `is_quiet` reads; commands get no argument for it."""
    return click.Option(
        ["--quiet"],
        is_flag=True,
        expose_value=False,
        callback=_note_quiet,
        help="Show no progress, only the result.",
    )


def is_quiet() -> bool:
    """Return True if the running command was given ``--quiet``."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET))


def clock(time_s: float) -> str:
    """Format a time [s] as hours, minutes and seconds, ``'3:41:20'``; ``'-'`` if it is not a number."""
    if time_s != time_s:
        return "-"
    minutes, seconds = divmod(round(time_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def one_line(text: str) -> str:
    """Return a text in one line: control characters escaped, length bounded."""
    return bounded(printable(text).replace("\n", "\\n"))


def bar(share: float, width: int) -> str:
    """Draw a share within 0 and 1 as a bar of a number of characters."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return f"[{'#' * full}{'-' * (width - full)}]"


def is_terminal(stream: TextIO) -> bool:
    """Return True if the stream is a terminal in which text can be overwritten."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Panel:
    """Block of lines in a terminal that is rewritten in place."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._height = 0

    def room(self) -> tuple[int, int]:
        """Return columns and lines that may be used."""
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except OSError:
            columns, lines = 0, 0
        return (columns or _WIDTH) - 1, (lines or _LINES) - 1

    def show(self, lines: Sequence[str]) -> None:
        """Replace what is shown."""
        columns, rows = self.room()
        kept = [one_line(line)[:columns] for line in lines[:rows]]
        above = _UP.format(self._height) if self._height else _HIDE_CURSOR
        body = "".join(f"{line}{_CLEAR_LINE}\n" for line in kept)
        self._height = len(kept)
        self._stream.write(above + body + _CLEAR_BELOW)
        self._stream.flush()

    def clear(self) -> None:
        """Remove the lines and show the cursor again."""
        if self._height:
            self._stream.write(_UP.format(self._height) + _CLEAR_BELOW + _SHOW_CURSOR)
            self._stream.flush()
            self._height = 0


class _Display:
    """Display on the error stream: rewritten in place in a terminal, elsewhere occasional lines."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._is_shown = not is_quiet()
        self._panel = Panel(self._stream) if self._is_shown and is_terminal(self._stream) else None
        self._began = time.perf_counter()
        self._next = self._began + (0.0 if self._panel else _LINE_S)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._panel is not None:
            self._panel.clear()

    def _write(self, text: str) -> None:
        self._stream.write(one_line(f"{clock(time.perf_counter() - self._began):>8}  {text}") + "\n")
        self._stream.flush()


class Countdown(_Display):
    """Progress of work that is counted: how much is done, what runs now, and the time that is left.

    The estimate uses the last changes of the count only, because starting takes longer than continuing; when
    the count goes back, it begins anew.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self._changes: deque[tuple[int, float]] = deque(maxlen=_PACE_COUNTS)

    def __call__(self, done: int, total: int, doing: str = "") -> None:
        """Show the number of finished items, the total, and what runs now."""
        now = time.perf_counter()
        if self._changes and done < self._changes[-1][0]:
            self._changes.clear()
        if not self._changes or done > self._changes[-1][0]:
            self._changes.append((done, now))
        if not self._is_shown or now < self._next:
            return
        before, since = self._changes[0]
        left_s = (now - since) * (total - done) / (done - before) if done > before else float("nan")
        count, left = f"{done}/{total} {self._what}", f"about {clock(left_s)} left" if done > before else ""
        if self._panel is not None:
            passed = f"{bar(done / max(total, 1), _BAR_WIDTH)} {clock(now - self._began)}"
            self._panel.show(["  ".join(filter(None, (count, passed, left, doing)))])
            self._next = now + _FRAME_S
        else:
            self._write(", ".join(filter(None, (count, doing, left))))
            self._next = now + _LINE_S


def _ending(run: "Attempt") -> str:
    return "failed" if isinstance(run, Exception) else f"average JCT {run.metrics.avg_jct_s:.0f} s"


class PolicyProgress(_Display):
    """Progress of several simulations: one bar per policy in a terminal, elsewhere occasional lines.

    Outside a terminal, every simulation that ends has a line, too. The time that is left assumes that
    simulations continue as fast as they did on average.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names
        self._told: set[int] = set()

    def __call__(self, shares: Sequence[float], done: Sequence["Attempt | None"]) -> None:
        """Show the share of finished jobs of each, and finished runs; as for `makespan.studies.run_all`."""
        if not self._is_shown:
            return
        if self._panel is None:
            self._tell(done)
        now = time.perf_counter()
        if now < self._next:
            return
        finished = [1.0 if run is not None else share for share, run in zip(shares, done, strict=True)]
        share = sum(finished) / max(len(finished), 1)
        left_s = (now - self._began) * (1 - share) / share if share > _LEAST_SHARE else float("nan")
        left = [f"about {clock(left_s)} left"] if left_s == left_s else []
        rows = zip(self._names, shares, done, strict=True)
        if self._panel is not None:
            passed = "  ".join([f"{clock(now - self._began)} passed", *left])
            self._panel.show([*(self._line(*row) for row in rows), passed])
            self._next = time.perf_counter() + _FRAME_S
        else:
            going = [f"{name} {share:.0%}" for name, share, run in rows if share > 0 and run is None]
            count = f"{len(self._told)}/{len(self._names)} policies done"
            self._write("; ".join(filter(None, (count, ", ".join(going), *left))))
            self._next = now + _LINE_S

    def _tell(self, done: Sequence["Attempt | None"]) -> None:
        for number, run in enumerate(done):
            if run is not None and number not in self._told:
                self._told.add(number)
                count = f"{len(self._told)}/{len(self._names)}"
                self._write(f"{count} {self._names[number]}: {_ending(run)}")

    def _line(self, name: str, share: float, run: "Attempt | None") -> str:
        name = f"{name:<{max(map(len, self._names))}}"
        if run is not None:
            if isinstance(run, Exception):
                return f"{name}  {bar(share, _BAR_WIDTH)} failed"
            return f"{name}  {bar(1.0, _BAR_WIDTH)} done, {_ending(run)}"
        return f"{name}  {bar(share, _BAR_WIDTH)} " + (f"{share:4.0%}" if share else "waiting")
