"""The accounts that the validator keeps of each job and each node, from the rows of a table alone."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from makespan.hardware import ClusterSpec
from makespan.plans import Placement
from makespan.sim._catalogue import IDLE_SHARE, Allocation, Catalogue, Configuration
from makespan.sim._costs import RestartCost
from makespan.workloads import JobSpec

__all__ = ["JobAccount", "NodeAccounts", "Row", "Rules", "Violation"]

_SLACK_S = 1e-6  # of rounding, besides
_SLACK = 1e-9  # of the simulated time


@dataclass(frozen=True, slots=True)
class Violation:
    """Something in a schedule that is not possible: the rule that it breaks, and where.

    Where no single row is at fault, ``time_s`` [s] is NaN and ``seq`` is -1.
    """

    rule: str
    time_s: float
    seq: int
    job_id: str
    message: str


class Row(NamedTuple):
    """A row of the events table."""

    time_s: float
    seq: int
    kind: str
    job_id: str
    nodes: str
    n_gpus: int
    plan: str
    reason: str
    family: str
    cpu_threads: int
    iter_time_s: float
    steps_left: float
    shared_nodes: str


@dataclass(slots=True)
class Rules:
    """What a schedule is held to, and what was found against it."""

    catalogue: Catalogue
    restart_cost: RestartCost
    interval_s: float | None
    checkpoint_interval_s: float | None
    extra_steps: float
    keeps_guarantees: bool
    found: list[Violation] = field(default_factory=list)

    def report(self, rule: str, row: Row, message: str) -> None:
        """Note a violation at a row."""
        self.found.append(Violation(rule, row.time_s, row.seq, row.job_id, message))

    def report_job(self, rule: str, job_id: str, message: str) -> None:
        """Note a violation of a job that no single row shows."""
        self.found.append(Violation(rule, math.nan, -1, job_id, message))


class NodeAccounts:
    """Who holds how much of each node."""

    def __init__(self, cluster: ClusterSpec, rules: Rules) -> None:
        self._rules = rules
        self._nodes = cluster.nodes
        self._is_up = [True] * cluster.n_nodes
        self._withdrawn = [0] * cluster.n_nodes
        self._memory = [(Counter[float](), Counter[float]()) for _ in cluster.nodes]  # of holders, of guests
        self._used = [[0.0, 0.0, 0.0, 0.0] for _ in cluster.nodes]
        self._touched: set[int] = set()

    def add(self, shares: dict[int, int], held: Configuration, sign: int, *, is_guest: bool) -> None:
        """Add (+1) or remove (-1) what a job holds, or uses as a guest."""
        for node, count in shares.items():
            self._touched.add(node)
            used = self._used[node]
            self._memory[node][is_guest][held.device_memory_bytes_per_gpu] += sign * count
            if is_guest:
                used[3] += sign * count
            else:
                used[0] += sign * count
                used[1] += sign * count * held.cpu_threads
            used[2] += sign * count * held.host_memory_bytes_per_gpu

    def has(self, node: int) -> bool:
        """Whether there is a node of that number."""
        return 0 <= node < len(self._nodes)

    def gpu_type(self, node: int) -> str:
        """Return the name of a node's devices."""
        return self._nodes[node].gpu.name

    def is_short(self, node: int) -> bool:
        """Whether a node has fewer devices, or memory, at this moment than jobs there need."""
        return (
            max(self._used[node][0], self._used[node][3]) > self._devices(node) or self._crowding(node) != ""
        )

    def _devices(self, node: int) -> int:
        return self._nodes[node].n_gpus - self._withdrawn[node] if self._is_up[node] else 0

    def change(self, row: Row) -> None:
        """Follow a node event."""
        if not (row.nodes.isdigit() and self.has(int(row.nodes))):
            self._rules.report("row", row, f"node {row.nodes!r}; accepted: 0 to {len(self._nodes) - 1}")
            return
        if row.kind.startswith("capacity_"):
            self._change_capacity(row, int(row.nodes))
            return
        node, comes_up = int(row.nodes), row.kind == "node_joined"
        if self._is_up[node] == comes_up:
            state = "up" if comes_up else "down"
            self._rules.report("failure", row, f"node {node} is {state} already")
        self._is_up[node] = comes_up
        self._touched.add(node)

    def _change_capacity(self, row: Row, node: int) -> None:
        if row.kind == "capacity_announced":
            return
        gone = self._withdrawn[node] + row.n_gpus * (1 if row.kind == "capacity_withdrawn" else -1)
        if not 0 <= gone <= self._nodes[node].n_gpus:
            found = f"{gone} of the {self._nodes[node].n_gpus} devices of node {node} are withdrawn"
            self._rules.report("failure", row, f"{found}; accepted: none to all")
        self._withdrawn[node] = gone
        self._touched.add(node)

    def check(self, row: Row) -> None:
        """Compare what is held at the end of an instant with what there is."""
        for node in sorted(self._touched):
            spec, used = self._nodes[node], self._used[node]
            rest = (spec.cpu_threads, spec.host_memory_bytes) if self._is_up[node] else (0, 0)
            n_devices = self._devices(node)
            names = "GPUs", "CPU threads", "B of host memory", "GPUs for guests"
            for name, amount, most in zip(names, used, (n_devices, *rest, n_devices), strict=True):
                if amount > most + _SLACK * max(spec.host_memory_bytes, 1.0) * (name[0] == "B"):
                    state = "" if self._is_up[node] else ", which is down"
                    message = f"node {node}{state}: {amount:g} {name} are held; accepted: at most {most:g}"
                    rule = "capacity" if self._is_up[node] else "failure"
                    self._rules.report(rule, row._replace(job_id=""), message)
            if message := self._crowding(node):
                self._rules.report("capacity", row._replace(job_id=""), message)
        self._touched.clear()

    def _crowding(self, node: int) -> str:
        """Count, from the largest guests down, the devices with memory for them; return what is missing."""
        gpu, (holders, guests) = self._nodes[node].gpu, self._memory[node]
        most, n_guests = (gpu.memory_bytes - gpu.reserved_bytes) * (1 + _SLACK), 0
        for own_bytes in sorted(+guests, reverse=True):
            n_guests += guests[own_bytes]
            n_crowded = sum(n for taken, n in holders.items() if taken + own_bytes > most)
            if n_guests > self._devices(node) - n_crowded:
                found = f"node {node}: too little memory for {n_guests} guest(s) of {own_bytes:g} B or more"
                return f"{found}; accepted: {most:g} B"
        return ""


class JobAccount:
    """What happened to a job so far."""

    def __init__(self, job: JobSpec, rules: Rules, nodes: NodeAccounts) -> None:
        self.job = job
        self.state = "absent"
        self.first_start_s = self.finish_s = math.nan
        self.starts = 0
        self.waiting_s = self.running_s = self.restart_s = self.held_gpu_s = 0.0
        self._rules, self._nodes, self._report = rules, nodes, rules.report
        self._total = float(job.steps + rules.extra_steps)
        self._left = self._total
        self._held: Configuration | None = None
        self._is_guest = False
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
        self._settle(row)
        self._take(row)

    def _share(self, row: Row) -> None:
        before, shares, ready_s, is_guest = self._held, self._shares, self._ready_s, self._is_guest
        saw_ready = self._saw_ready
        self._settle(row)
        self._take(row)
        if (self._held, self._shares, self._is_guest) != (before, shares, not is_guest):
            self._report("row", row, "what is shared differs from what was held, or the other way round")
        self.starts -= 1
        self._ready_s, self._saw_ready = max(ready_s, row.time_s), saw_ready

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
        self._nodes.add(self._shares, self._held, 1, is_guest=self._is_guest)
        if self._rules.keeps_guarantees and self.job.is_guaranteed:
            reference = self._rules.catalogue.requested(self.job)
            if self._step_s(self._held) > reference.iter_time_s * (1 + _SLACK_S):
                found = f"a step takes {self._step_s(self._held)} s"
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
        what = (0 if self._is_guest else held.n_gpus, self._step_s(held), held.family)
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
            self._nodes.add(self._shares, self._held, -1, is_guest=self._is_guest)
        self._held, self._shares = None, {}
        self._since_s = row.time_s

    def _left_at(self, time_s: float) -> float:
        if self._held is None:
            return self._left
        return self._left - max(time_s - self._ready_s, 0.0) / self._step_s(self._held)

    def _step_s(self, held: Configuration) -> float:
        return held.iter_time_s / IDLE_SHARE if self._is_guest else held.iter_time_s

    def _since_checkpoint(self, time_s: float) -> float:
        every_s = self._rules.checkpoint_interval_s
        if every_s is None or self._held is None:
            return 0.0
        lost_s = max(time_s - self._ready_s, 0.0) % every_s
        if every_s - lost_s < _slack_s(time_s):
            lost_s = 0.0  # the checkpoint of this very moment counts as written
        return lost_s / self._step_s(self._held)

    def _tolerance(self, time_s: float) -> float:
        fastest = self._held or self._rules.catalogue.requested(self.job)
        return _SLACK * self._total + _SLACK_S + _slack_s(time_s) / fastest.iter_time_s

    def _check_round(self, row: Row) -> None:
        every_s = self._rules.interval_s
        if every_s is not None and abs(row.time_s / every_s - round(row.time_s / every_s)) > _SLACK_S:
            self._report("round", row, f"a decision at {row.time_s} s; accepted: multiples of {every_s} s")


def _slack_s(time_s: float) -> float:
    return _SLACK_S + _SLACK * abs(time_s)


def _read_shares(text: str) -> dict[int, int]:
    """Read ``node:devices`` pairs; empty if the text is not such a list."""
    shares: dict[int, int] = {}
    for pair in text.split():
        node, colon, count = pair.partition(":")
        if not (colon and node.isdigit() and count.isdigit() and int(count)) or int(node) in shares:
            return {}
        shares[int(node)] = int(count)
    return shares
