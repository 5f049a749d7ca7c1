"""How far several simulations are, on the error stream."""

import sys
import time
from collections.abc import MutableSequence, Sequence

from makespan.cli._terminal import Panel, bar, clock, is_terminal
from makespan.sim import ClusterView, Event

__all__ = ["Progress"]

_FRAME_S = 0.2
_LINE_S = 10.0  # between two lines where nothing can be replaced
_BAR_WIDTH = 30


class Progress:
    """One bar a policy in a terminal, else a line whenever one ends and now and then between.

    It is an observer too, so that a run in this process keeps it moving.

    Parameters
    ----------
    names
        The policies.
    quiet
        Show nothing.

    Attributes
    ----------
    shares
        Share of finished jobs of each policy.
    """

    def __init__(self, names: Sequence[str], quiet: bool) -> None:
        self.shares: MutableSequence[float] = [0.0] * len(names)
        self._names = names
        self._quiet = quiet
        self._avg_jct_s: dict[int, float] = {}
        self._stream = sys.stderr
        self._panel = Panel(self._stream) if is_terminal(self._stream) else None
        self._began = time.perf_counter()
        self._next = self._began + (0.0 if self._panel else _LINE_S)

    def observe(self, event: Event, view: ClusterView) -> None:
        """Draw if it is time to."""
        self.draw()

    def draw(self) -> None:
        """Draw if it is time to."""
        now = time.perf_counter()
        if self._quiet or now < self._next:
            return
        if self._panel is not None:
            self._panel.show([self._line(number) for number in range(len(self._names))])
            self._next = time.perf_counter() + _FRAME_S
        else:
            going = [
                f"{name} {share:.0%}"
                for number, (name, share) in enumerate(zip(self._names, self.shares, strict=True))
                if share > 0 and number not in self._avg_jct_s
            ]
            self._write(f"{len(self._avg_jct_s)}/{len(self._names)} policies done; {', '.join(going)}")
            self._next = now + _LINE_S

    def finish(self, number: int, avg_jct_s: float) -> None:
        """Note that a policy is done."""
        self._avg_jct_s[number] = avg_jct_s
        if self._panel is None and not self._quiet:
            done = f"{len(self._avg_jct_s)}/{len(self._names)}"
            self._write(f"{done} {self._names[number]}: average JCT {avg_jct_s:.0f} s")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._panel is not None:
            self._panel.clear()

    def _line(self, number: int) -> str:
        name = f"{self._names[number]:<{max(map(len, self._names))}}"
        if number in self._avg_jct_s:
            return f"{name}  {bar(1.0, _BAR_WIDTH)} done, average JCT {self._avg_jct_s[number]:.0f} s"
        share = self.shares[number]
        return f"{name}  {bar(share, _BAR_WIDTH)} " + (f"{share:4.0%}" if share else "waiting")

    def _write(self, text: str) -> None:
        self._stream.write(f"{clock(time.perf_counter() - self._began):>8}  {text}\n")
        self._stream.flush()
