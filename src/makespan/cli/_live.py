"""The live view of a simulation."""

import time
from collections.abc import Sequence
from typing import TextIO

from makespan.cli._terminal import Panel, bar, clock, is_terminal
from makespan.sim import Allocation, ClusterView, Event, EventKind, JobView
from makespan.workloads import JobSpec

__all__ = ["LiveView"]

_FRAME_S = 0.1  # least wall time between two frames in a terminal
_HEARTBEAT_S = 5.0  # longest wall time without a line elsewhere
_N_LINES = 20  # lines of a run elsewhere, besides those
_BAR_WIDTH = 20
_LINE_JOBS = 3  # that a line names

_JOB = "{:<14} {:>4}  {:<13} {:<18} {:>8}  {}"
_LINE = "{:>9} {:>9} {:>8} {:>8} {:>9}  {:>9}  {}"
_LINE_HEAD = (
    "time",
    "done",
    "waiting",
    "running",
    "GPUs",
    "avg JCT",
    "running jobs: plan @ node:GPUs (restarts)",
)

_FINISHED, _SUBMITTED, _READY = (
    kind.value for kind in (EventKind.FINISHED, EventKind.SUBMITTED, EventKind.READY)
)


class LiveView:
    """An observer that shows the cluster: in place in a terminal, else as lines now and then.

    It looks at every event but draws only when some wall clock time is over, at moments when no
    decision is half carried out.

    Parameters
    ----------
    title
        First line.
    jobs
        The trace.
    stream
        Where to write.
    pace_s
        In a terminal, wait so that the whole run takes about this long [s]; 0 for full speed.

    Attributes
    ----------
    spent_s
        Wall clock time that drawing and waiting took [s].
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
            self._stream.write(f"{self._title}\n{_LINE.format(*_LINE_HEAD)}\n")
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
        self._stream.write(_LINE.format(*cells).rstrip() + "\n")
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
    state = f"since {clock(job.ready_time_s)}"
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
