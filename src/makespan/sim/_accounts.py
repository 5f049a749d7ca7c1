"""The accounts that the validator keeps of each job, from the rows of a table alone."""

import math
from collections.abc import Callable

from makespan.plans import Placement
from makespan.sim._catalogue import Allocation, Configuration
from makespan.sim._node_accounts import SLACK, NodeAccounts, Row, Rules
from makespan.workloads import JobSpec

__all__ = ["JobAccount"]

_SLACK_S = 1e-6  # of rounding, besides


class JobAccount:
    """What happened to a job so far."""

    def __init__(self, index: int, job: JobSpec, rules: Rules, nodes: NodeAccounts) -> None:
        self.job = job
        self._index = index
        self.state = "absent"
        self.first_start_s = self.finish_s = math.nan
        self.starts = 0
        self.waiting_s = self.running_s = self.restart_s = self.held_gpu_s = 0.0
        self._rules, self._nodes, self._report = rules, nodes, rules.report
        self._total = float(job.steps + rules.extra_steps)
        self._left = self._total
        self._held: Configuration | None = None
        self._is_guest = False
        self._paces: list[tuple[float, float]] = []  # since when [s] a step takes how long [s]
        self._last: Allocation | None = None
        self._shares: dict[int, int] = {}
        self._since_s = job.submit_time_s
        self._ready_s = math.nan
        self._saw_ready = False
        self._handlers: dict[str, tuple[str, Callable[[Row], None]]] = {
            "submitted": ("absent", self._submit),
            "started": ("waiting", self._start),
            "reconfigured": ("running", self._reconfigure),
            "sharing": ("running", self._share),
            "rated": ("running", self._rate),
            "ready": ("running", self._ready),
            "suspended": ("running", self._suspend),
            "interrupted": ("running", self._interrupt),
            "finished": ("running", self._finish),
        }

    def follow(self, row: Row) -> None:
        """Take in one row."""
        if row.kind not in self._handlers:
            self._report("row", row, f"kind {row.kind!r}; accepted: {', '.join(self._handlers)}")
            return
        state, handler = self._handlers[row.kind]
        if row.kind == "finished" and self.state == "waiting" and self._rules.is_live:
            state, handler = self.state, self._finish_late
        if self.state != state:
            self._report("life", row, f"{row.kind} while {self.state}; accepted: while {state}")
            return
        if row.kind in ("started", "reconfigured", "suspended", "sharing"):
            self._check_round(row)
        handler(row)
        if abs(row.steps_left - self._left_at(row.time_s)) > self._tolerance(row.time_s):
            found = f"{row.steps_left!r} steps are left"
            self._report("progress", row, f"{found}; accepted: {self._left_at(row.time_s)!r}")

    def close(self) -> None:
        """Check that the job came to its end."""
        if self.state != "finished":
            self._rules.report_job("life", self.job.job_id, f"is {self.state} at the end; accepted: finished")

    # --- one method a kind ------------------------------------------------------------------

    def _submit(self, row: Row) -> None:
        if row.time_s != self.job.submit_time_s:
            self._report("life", row, f"submitted at {row.time_s} s; accepted: {self.job.submit_time_s} s")
        self.state, self._since_s = "waiting", row.time_s

    def _start(self, row: Row) -> None:
        self.waiting_s += row.time_s - self._since_s
        if self.starts == 0:
            self.first_start_s = row.time_s
        self._take(row)
        self.state = "running"

    def _reconfigure(self, row: Row) -> None:
        before = (self._held, self._shares, self._is_guest)
        self._settle(row)
        self._take(row)
        if self._held is not None and (self._held, self._shares, self._is_guest) == before:
            self._report("restart", row, "restarted as it was; accepted: another plan, nodes or threads")

    def _share(self, row: Row) -> None:
        before, shares, ready_s, is_guest = self._held, self._shares, self._ready_s, self._is_guest
        saw_ready = self._saw_ready
        self._settle(row)
        self._take(row)
        if (self._held, self._shares, self._is_guest) != (before, shares, not is_guest):
            self._report("row", row, "what is shared differs from what was held, or the other way round")
        self.starts -= 1
        self._ready_s, self._saw_ready = max(ready_s, row.time_s), saw_ready

    def _rate(self, row: Row) -> None:
        if not self._is_guest or _read_shares(row.shared_nodes) != self._shares:
            self._report("row", row, "only how fast a guest goes may change, not where it is")
        alone_s = self._held.iter_time_s if self._held is not None else row.iter_time_s
        self._paces.append((row.time_s, max(alone_s, row.iter_time_s)))

    def check_pace(self, row: Row, pace: float) -> None:
        """Compare how fast a guest goes at the end of an instant with how fast it must."""
        if self._held is not None and self._is_guest:
            found_s, due_s = self._paces[-1][1], self._held.iter_time_s / pace
            if abs(found_s - due_s) > SLACK * due_s:
                found = f"a step beside others takes {found_s} s"
                self._report("row", row._replace(job_id=self.job.job_id), f"{found}; accepted: {due_s} s")

    def _ready(self, row: Row) -> None:
        if abs(row.time_s - self._ready_s) > _slack_s(row.time_s):
            self._report("restart", row, f"ready at {row.time_s} s; accepted: {self._ready_s} s")
        self._saw_ready = True
        if _read_shares(row.shared_nodes if self._is_guest else row.nodes) != self._shares:
            self._report("row", row, f"nodes {row.nodes!r} differ from those that the job was given")

    def _suspend(self, row: Row) -> None:
        if self._rules.keeps_guarantees and self.job.is_guaranteed:
            self._report("guarantee", row, "a guaranteed job is suspended; accepted: never")
        self._settle(row)
        self.state = "waiting"

    def _interrupt(self, row: Row) -> None:
        if not any(self._nodes.is_short(node) for node in self._shares):
            self._report("failure", row, "interrupted while its nodes have all devices that are held")
        lost = self._since_checkpoint(row.time_s)
        self._settle(row)
        self._left += lost
        self.state = "waiting"

    def _finish(self, row: Row) -> None:
        if not self._saw_ready:
            self._report("restart", row, f"finished without being ready; accepted: after {self._ready_s} s")
        self._settle(row)
        if abs(self._left) > self._tolerance(row.time_s):
            found = f"finished with {self._left!r} of {self._total} steps left"
            self._report("progress", row, f"{found}; accepted: 0")
        self._left = 0.0
        self.state, self.finish_s = "finished", row.time_s

    def _finish_late(self, row: Row) -> None:
        """Close the account of a job whose last step was done when its processes were told to stop."""
        self.waiting_s += row.time_s - self._since_s
        self._left, self.state, self.finish_s = 0.0, "finished", row.time_s

    # --- what is held -----------------------------------------------------------------------

    def _take(self, row: Row) -> None:
        self.starts += 1
        self._since_s, self._ready_s = row.time_s, row.time_s + self._rules.restart_cost.expected_s
        self._saw_ready = False
        self._is_guest = bool(row.shared_nodes)
        self._shares = _read_shares(row.shared_nodes or row.nodes)
        self._held = self._find(row)
        if self._held is None:
            self._shares = {}
            return
        new = Allocation(self._held, tuple(node for _, _, node in self._typed_shares()), self._is_guest)
        self._ready_s = row.time_s + self._rules.restart_cost(self.job, self._last, new)
        self._last = new
        alone_s = self._held.iter_time_s
        self._paces = [(row.time_s, max(alone_s, row.iter_time_s) if self._is_guest else alone_s)]
        self._move(1)
        if self._rules.keeps_guarantees and self.job.is_guaranteed:
            reference = self._rules.catalogue.requested(self.job)
            if self._paces[-1][1] > reference.iter_time_s * (1 + _SLACK_S):
                found = f"a step takes {self._paces[-1][1]} s"
                self._report("guarantee", row, f"{found}; accepted: {reference.iter_time_s} s")

    def _find(self, row: Row) -> Configuration | None:
        """Return the configuration that a row describes, or report that there is none."""
        if (row.nodes and row.shared_nodes) or not (self._shares and all(map(self._nodes.has, self._shares))):
            found = f"nodes {row.nodes!r} and shared_nodes {row.shared_nodes!r}"
            self._report("row", row, f"{found}; accepted: existing node:devices, each node once, in one")
            return None
        placement = Placement(tuple(self._shares.values()))
        types = tuple(name for _, name, _ in self._typed_shares())
        key = (self.job.workload, row.plan, placement.text, row.cpu_threads)
        held = self._rules.catalogue.find(*key, types)
        if held is None:
            self._report("row", row, f"plan {row.plan!r} on {placement.text} is not in the catalogue")
            return None
        step_s = max(held.iter_time_s, row.iter_time_s) if self._is_guest else held.iter_time_s
        what = (0 if self._is_guest else held.n_gpus, step_s, held.family)
        if (row.n_gpus, row.iter_time_s, row.family) != what:
            accepted = f"{what[0]}, {what[1]} and {what[2]}"
            found = f"n_gpus {row.n_gpus}, iter_time_s {row.iter_time_s}, family {row.family}"
            self._report("row", row, f"{found}; accepted: {accepted}")
        return held

    def _typed_shares(self) -> list[tuple[int, str, int]]:
        """Return devices, their type and node of each share, in the order of `Configuration.gpu_types`."""
        nodes = self._nodes
        return sorted((count, nodes.gpu_type(node), node) for node, count in self._shares.items())

    def _settle(self, row: Row) -> None:
        """Close the account of what is held: its time and its progress."""
        held_s = row.time_s - self._since_s
        progress_s = max(row.time_s - self._ready_s, 0.0)
        self.running_s += progress_s
        self.restart_s += held_s - progress_s
        self._left = self._left_at(row.time_s)
        if self._held is not None:
            self.held_gpu_s += held_s * (0 if self._is_guest else self._held.n_gpus)
            self._move(-1)
        self._held, self._shares = None, {}
        self._since_s = row.time_s

    def _left_at(self, time_s: float) -> float:
        if self._held is None:
            return self._left
        return self._left - self._steps_between(self._ready_s, time_s)

    def _steps_between(self, since_s: float, time_s: float) -> float:
        """Return the steps done in a time [s] in which the job makes progress."""
        ends_s = [*(start_s for start_s, _ in self._paces[1:]), time_s]
        spans = zip(self._paces, ends_s, strict=True)
        return sum(max(end_s - max(start_s, since_s), 0.0) / step_s for (start_s, step_s), end_s in spans)

    def _move(self, sign: int) -> None:
        if self._held is not None:
            who = (self._index, self.job.job_id)
            self._nodes.add(who, self._shares, self._held, sign, is_guest=self._is_guest)

    def _since_checkpoint(self, time_s: float) -> float:
        every_s = self._rules.checkpoint_interval_s
        if every_s is None or self._held is None:
            return 0.0
        lost_s = max(time_s - self._ready_s, 0.0) % every_s
        if every_s - lost_s < _slack_s(time_s):
            lost_s = 0.0  # the checkpoint of this very moment counts as written
        return self._steps_between(time_s - lost_s, time_s)

    def _tolerance(self, time_s: float) -> float:
        fastest = self._held or self._rules.catalogue.requested(self.job)
        return SLACK * self._total + _SLACK_S + _slack_s(time_s) / fastest.iter_time_s

    def _check_round(self, row: Row) -> None:
        every_s = self._rules.interval_s
        if every_s is not None and abs(row.time_s / every_s - round(row.time_s / every_s)) > _SLACK_S:
            self._report("round", row, f"a decision at {row.time_s} s; accepted: multiples of {every_s} s")


def _slack_s(time_s: float) -> float:
    return _SLACK_S + SLACK * abs(time_s)


def _read_shares(text: str) -> dict[int, int]:
    """Read ``node:devices`` pairs; empty if the text is not such a list."""
    shares: dict[int, int] = {}
    for pair in text.split():
        node, colon, count = pair.partition(":")
        if not (colon and node.isdigit() and count.isdigit() and int(count)) or int(node) in shares:
            return {}
        shares[int(node)] = int(count)
    return shares
