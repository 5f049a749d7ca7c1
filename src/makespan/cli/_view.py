"""What a terminal or a log shows of simulations while they run."""

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from makespan.errors import bounded
from makespan.sim import Allocation, ClusterView, Event, EventKind, JobView
from makespan.studies import Attempt, RunError
from makespan.units import printable
from makespan.workloads import JobSpec

__all__ = ["Countdown", "LiveView", "Progress", "clock"]

_UP, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[{}F", "\x1b[K", "\x1b[J"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_COLUMNS, _LINES = 80, 24  # of a terminal that does not say

_FRAME_S = 0.1  # least wall time between two frames in a terminal
_HEARTBEAT_S = 5.0  # longest wall time without a line elsewhere
_N_LINES = 20  # lines of a run elsewhere, besides those
_BAR_WIDTH = 20
_LINE_JOBS = 3  # that a line names

_JOB = "{:<14} {:>4}  {:<13} {:<18} {:>8}  {}"
_LINE = "{:>9} {:>9} {:>8} {:>8} {:>9}  {:>9}  {}"
_RUNNING_HEAD = "running jobs: plan @ node:GPUs (restarts)"
_LINE_HEAD = ("time", "done", "waiting", "running", "GPUs", "avg JCT", _RUNNING_HEAD)

_FINISHED, _SUBMITTED, _READY = (
    kind.value for kind in (EventKind.FINISHED, EventKind.SUBMITTED, EventKind.READY)
)

_POLICY_FRAME_S = 0.2
_LINE_S = 10.0  # between two lines where nothing can be replaced
_PROGRESS_WIDTH = 30
_PACE_RUNS = 20  # from which the time that is left is estimated


def clock(time_s: float) -> str:
    """Format a time [s] as hours, minutes and seconds, ``'3:41:20'``; ``'-'`` if it is not a number."""
    if time_s != time_s:
        return "-"
    minutes, seconds = divmod(round(time_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def _one_line(text: str) -> str:
    return bounded(printable(text).replace("\n", "\\n"))


def bar(share: float, width: int) -> str:
    """Draw a share within 0 and 1 as a bar of a number of characters."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return f"[{'#' * full}{'-' * (width - full)}]"


def is_terminal(stream: TextIO) -> bool:
    """Whether text can be replaced where it stands."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Panel:
    """Lines of a terminal that are written again and again."""

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
        kept = [_one_line(line)[:columns] for line in lines[:rows]]
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


class LiveView:
    """An observer that shows the cluster: in place in a terminal, else as lines now and then.

    It looks at every event but draws only when some wall clock time is over, at moments when no
    decision is half carried out. In a terminal it waits so that the whole run takes about ``pace_s``;
    ``spent_s`` is the wall clock time that drawing and waiting took [s].
    """

    def __init__(self, title: str, jobs: Sequence[JobSpec], stream: TextIO, pace_s: float = 0.0) -> None:
        self.spent_s = 0.0
        self._title = title
        self._submit_s = {job.job_id: job.submit_time_s for job in jobs}
        self._first_s = min(self._submit_s.values(), default=0.0)
        self._stream = stream
        self._panel = Panel(stream) if is_terminal(stream) else None
        self._pace_s = pace_s if self._panel else 0.0
        self._n_done = self._n_submitted = self._n_due = self._n_written = 0
        self._jct_sum_s = 0.0
        self._began = time.perf_counter()
        self._next_frame = self._began

    @property
    def _progress(self) -> float:
        return (self._n_done + self._n_submitted) / (2 * max(len(self._submit_s), 1))

    @property
    def _avg_jct_s(self) -> float:
        return self._jct_sum_s / self._n_done if self._n_done else float("nan")

    def observe(self, event: Event, view: ClusterView) -> None:
        """Count, and draw if it is time to."""
        kind = event.kind
        if kind == _FINISHED:
            self._n_done += 1
            self._jct_sum_s += event.time_s - self._submit_s[event.job_id]
        elif kind == _SUBMITTED:
            self._n_submitted += 1
            if len(view.pending) > 1:  # otherwise it shows more once this job is placed
                self._maybe_draw(view)
        elif kind == _READY:
            self._maybe_draw(view)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._panel:
            self._panel.clear()

    def _maybe_draw(self, view: ClusterView) -> None:
        now = time.perf_counter()
        if self._panel is None:
            due = self._progress * _N_LINES >= self._n_due + 1
            if due or now >= self._next_frame + _HEARTBEAT_S:
                self._n_due = int(self._progress * _N_LINES)
                self._next_frame = now
                self._write_line(view)
        else:
            early_s = self._began + self._pace_s * self._progress - now
            if early_s > 0:
                time.sleep(early_s)
            if early_s > 0 or now >= self._next_frame:
                self._panel.show(self._frame(view, self._panel.room()[1]))
                self._next_frame = time.perf_counter() + _FRAME_S
        self.spent_s += time.perf_counter() - now

    def _write_line(self, view: ClusterView) -> None:
        if not self._n_written:
            self._stream.write(f"{_one_line(self._title)}\n{_LINE.format(*_LINE_HEAD)}\n")
        self._n_written += 1
        running = _by_submission(view)
        named = ", ".join(
            f"{job.spec.job_id} {held.configuration.plan} @ {_nodes(held)} ({job.restart_count})"
            for job in running[:_LINE_JOBS]
            if (held := job.allocation) is not None
        )
        more = f", and {len(running) - _LINE_JOBS} more" if len(running) > _LINE_JOBS else ""
        cells = (
            clock(view.time_s),
            f"{self._n_done}/{len(self._submit_s)}",
            len(view.pending),
            len(running),
            f"{view.n_gpus - view.n_free_gpus}/{view.n_gpus}",
            clock(self._avg_jct_s),
            named + more,
        )
        self._stream.write(_one_line(_LINE.format(*cells).rstrip()) + "\n")
        self._stream.flush()

    def _frame(self, view: ClusterView, rows: int) -> list[str]:
        used, n_jobs = view.n_gpus - view.n_free_gpus, len(self._submit_s)
        running = _by_submission(view)
        lines = [
            self._title,
            "",
            f"time      {clock(view.time_s):<12} makespan so far {clock(view.time_s - self._first_s)}",
            _share_line("jobs", "done", self._n_done, n_jobs)
            + f"  {len(view.pending)} waiting, {len(running)} running",
            _share_line("GPUs", "in use", used, view.n_gpus),
            f"avg JCT   {clock(self._avg_jct_s)}",
            "",
            _JOB.format("running job", "GPUs", "plan", "node:GPUs", "restarts", "state"),
        ]
        room = max(rows - len(lines), 1)
        shown = running if len(running) <= room else running[: room - 1]
        lines += [_job_line(job, view.time_s) for job in shown]
        if len(shown) < len(running):
            lines.append(f"and {len(running) - len(shown)} more")
        return lines


def _share_line(name: str, what: str, count: int, total: int) -> str:
    return f"{name:<9} {f'{count}/{total} {what}':<18} {bar(count / max(total, 1), _BAR_WIDTH)}"


def _by_submission(view: ClusterView) -> list[JobView]:
    return sorted(view.running, key=lambda job: job.index)


def _job_line(job: JobView, now_s: float) -> str:
    held = job.allocation
    if held is None:
        return job.spec.job_id
    state = f"guest at {job.pace:.0%}" if held.is_guest else f"since {clock(job.ready_time_s)}"
    if now_s < job.ready_time_s:
        state = "restarting" if job.restart_count else "starting"
    it = held.configuration
    return _JOB.format(job.spec.job_id, it.n_gpus, it.plan, _nodes(held), job.restart_count, state)


def _nodes(held: Allocation) -> str:
    """Return the devices by node with equal neighbours in one, ``'0-3:8 5:4'``."""
    groups: list[list[int]] = []
    for node, count in held.shares:
        if groups and groups[-1][1] == node - 1 and groups[-1][2] == count:
            groups[-1][1] = node
        else:
            groups.append([node, node, count])
    return " ".join(f"{first}:{n}" if first == last else f"{first}-{last}:{n}" for first, last, n in groups)


class _OnErrors:
    """Something on the error stream that is replaced in a terminal, and elsewhere a line now and then."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._panel = Panel(self._stream) if is_terminal(self._stream) else None
        self._began = time.perf_counter()
        self._next = self._began + (0.0 if self._panel else _LINE_S)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._panel is not None:
            self._panel.clear()

    def _write(self, text: str) -> None:
        self._stream.write(f"{clock(time.perf_counter() - self._began):>8}  {text}\n")
        self._stream.flush()


class Countdown(_OnErrors):
    """How far a measurement is, and how long it will take.

    The time that is left follows from the last changes of the count, because a start takes longer than what
    comes after it; from none where the count went back.
    """

    def __init__(self, what: str, *, is_shown: bool = True) -> None:
        super().__init__()
        self._what, self._is_shown = what, is_shown
        self._changes: deque[tuple[int, float]] = deque(maxlen=_PACE_RUNS)

    def __call__(self, done: int, total: int) -> None:
        """Show how much is done, and of how much."""
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
            passed = f"{bar(done / max(total, 1), _PROGRESS_WIDTH)} {clock(now - self._began)}"
            self._panel.show([f"{count}  {passed}  {left}".rstrip()])
            self._next = now + _POLICY_FRAME_S
        else:
            self._write(", ".join(filter(None, (count, left))))
            self._next = now + _LINE_S


def _reached(run: Attempt) -> str:
    return "failed" if isinstance(run, RunError) else f"average JCT {run.metrics.avg_jct_s:.0f} s"


class Progress(_OnErrors):
    """How far several simulations are: a bar a policy in a terminal, else a line now and then.

    Elsewhere a line also tells of every simulation that ends.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names
        self._told: set[int] = set()

    def __call__(self, shares: Sequence[float], done: Sequence[Attempt | None]) -> None:
        """Show the share of finished jobs of each, and what is over; as for `makespan.studies.run_all`."""
        if self._panel is None:
            self._tell(done)
        now = time.perf_counter()
        if now < self._next:
            return
        rows = zip(self._names, shares, done, strict=True)
        if self._panel is not None:
            self._panel.show([self._line(*row) for row in rows])
            self._next = time.perf_counter() + _POLICY_FRAME_S
        else:
            going = [f"{name} {share:.0%}" for name, share, run in rows if share > 0 and run is None]
            self._write(f"{len(self._told)}/{len(self._names)} policies done; {', '.join(going)}")
            self._next = now + _LINE_S

    def _tell(self, done: Sequence[Attempt | None]) -> None:
        for number, run in enumerate(done):
            if run is not None and number not in self._told:
                self._told.add(number)
                count = f"{len(self._told)}/{len(self._names)}"
                self._write(f"{count} {self._names[number]}: {_reached(run)}")

    def _line(self, name: str, share: float, run: Attempt | None) -> str:
        name = f"{name:<{max(map(len, self._names))}}"
        if run is not None:
            if isinstance(run, RunError):
                return f"{name}  {bar(share, _PROGRESS_WIDTH)} failed"
            return f"{name}  {bar(1.0, _PROGRESS_WIDTH)} done, {_reached(run)}"
        return f"{name}  {bar(share, _PROGRESS_WIDTH)} " + (f"{share:4.0%}" if share else "waiting")
