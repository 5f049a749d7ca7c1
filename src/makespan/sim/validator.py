"""Validator of schedules: replays an events table and reports events that could not have happened.

It shares no code with the engine. From the rows, the trace, the nodes and the times of a step alone it
computes who held what, when, and how far that carried each job. The rules are:

- ``order``: time and ``seq`` never decrease.
- ``row``: a row names a job, a kind and a configuration that exist and agree with each other; the speed of a
  guest follows from the holders of its devices.
- ``life``: a job is submitted once, when the trace says, starts only while it waits, changes only while
  it runs, and finishes once.
- ``capacity``: at the end of every instant no node is over its devices, CPU threads or memory, no device has
  more than one guest, and every guest fits into memory beside the holder.
- ``failure``: nodes fail and join in turn, and no more devices are withdrawn than a node has; jobs lose
  devices that fail or are withdrawn at once, and no job of a simulation is interrupted without such a cause.
- ``restart``: after every start and change a job makes no progress for as long as the restart costs, and
  its ``ready`` row marks the end of that; no job restarts with an unchanged allocation.
- ``recovery``: an interrupted job loses what its recovery says, goes on from memory only where a node has its
  state and before the next decision is over, and the table of losses has a row for each loss.
- ``progress``: the steps left follow from the time with progress and the time of a step, and end at zero.
- ``round``: decisions fall on rounds.
- ``guarantee``: guarantees are kept if the policy promises that.
- ``outcomes``: the second table agrees with the first.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import gt
from typing import NamedTuple

import numpy as np
import pandas as pd

from makespan.arguments import typed
from makespan.hardware import ClusterSpec
from makespan.plans import Placement
from makespan.sim.catalogue import Allocation, Catalogue, Configuration, RestartCost, restart_cost
from makespan.sim.recovery import Recovery
from makespan.sim.sharing import IDLE_SHARE, MIN_SPEED
from makespan.tables import EVENTS, LOSSES, OUTCOMES
from makespan.units import whole
from makespan.workloads import JobSpec

_Job = tuple[int, str]  # position by submission, and name
SLACK = 1e-9  # relative, for rounding
_SLACK_S = 1e-6  # absolute, for rounding
_RELATIVE = 1e-6  # for rounding, in the comparison of the two tables


@dataclass(frozen=True, slots=True)
class Violation:
    """Impossible event in a schedule: the rule that it breaks, the row, and the job.

    If no single row is at fault, ``time_s`` [s] is NaN and ``seq`` is -1.
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
    """Rules for a schedule, and the violations found so far."""

    catalogue: Catalogue
    restart_cost: RestartCost
    interval_s: float | None
    checkpoint_interval_s: float | None
    extra_steps: float
    keeps_guarantees: bool
    is_live: bool = False
    recovery_of: Callable[[JobSpec], Recovery | None] = lambda job: None
    found: list[Violation] = field(default_factory=list)

    def report(self, rule: str, row: Row, message: str) -> None:
        """Record a violation at a row."""
        self.found.append(Violation(rule, row.time_s, row.seq, row.job_id, message))

    def report_job(self, rule: str, job_id: str, message: str) -> None:
        """Record a violation of a job as a whole."""
        self.found.append(Violation(rule, math.nan, -1, job_id, message))


# --- Accounts of nodes ---


class Shares(NamedTuple):
    """Devices that a cell of the events table lists, ``node:devices`` pairs.

    ``by_node`` is empty if the cell is not such a list. ``placement``, ``gpu_types`` and ``nodes`` are in the
    order of `Configuration.gpu_types`; the placement is empty if a node does not exist.
    """

    by_node: Mapping[int, int]
    placement: str
    gpu_types: tuple[str, ...]
    nodes: tuple[int, ...]


class NodeAccounts:
    """Resources of each node that jobs hold, and the jobs on it."""

    def __init__(self, cluster: ClusterSpec, rules: Rules) -> None:
        self._rules = rules
        self._nodes = cluster.nodes
        self._is_up = [True] * cluster.n_nodes
        self._withdrawn = [0] * cluster.n_nodes
        # Per node: GPUs, CPU threads and host memory [B] that are held, and GPUs that guests use.
        self._used = [[0.0, 0.0, 0.0, 0.0] for _ in cluster.nodes]
        self._here: list[dict[_Job, tuple[int, Configuration, bool]]] = [{} for _ in cluster.nodes]
        self._touched: set[int] = set()  # nodes that changed in this instant
        self._guests: dict[_Job, Mapping[int, int]] = {}
        # Per node, speed of each guest and its devices without a holder; None: to be computed.
        self._speeds: list[dict[_Job, tuple[float, int]] | None] = [None] * cluster.n_nodes
        self._read: dict[str, Shares] = {}
        self.failed: list[int] = []  # nodes in the order in which they failed
        self.last_changed = -1

    def shares(self, text: str) -> Shares:
        """Return the devices that a cell lists; the same few texts occur again and again."""
        shares = self._read.get(text)
        if shares is None:
            by_node = _read_shares(text)
            exist = bool(by_node) and max(by_node) < len(self._nodes)
            typed = [(n, self._nodes[node].gpu.name if exist else "", node) for node, n in by_node.items()]
            typed.sort()
            placement = Placement(tuple(by_node.values())).text if exist else ""
            types, nodes = tuple(name for _, name, _ in typed), tuple(node for _, _, node in typed)
            shares = self._read[text] = Shares(by_node, placement, types, nodes)
        return shares

    def add(
        self, job: _Job, shares: Mapping[int, int], held: Configuration, sign: int, *, is_guest: bool
    ) -> None:
        """Allocate (+1) or release (-1) the devices of a job, which it holds or uses as a guest."""
        if is_guest:
            if sign > 0:
                self._guests[job] = shares
            else:
                del self._guests[job]
        for node, count in shares.items():
            self._touch(node)
            if sign > 0:
                self._here[node][job] = count, held, is_guest
            else:
                del self._here[node][job]
            used, change = self._used[node], sign * count
            if is_guest:
                used[3] += change
            else:
                used[0] += change
                used[1] += change * held.cpu_threads
            used[2] += change * held.host_memory_bytes_per_gpu

    def _touch(self, node: int) -> None:
        self._touched.add(node)
        self._speeds[node] = None

    def is_short(self, node: int) -> bool:
        """Return whether the jobs on a node need more devices or memory than it has at the moment."""
        return (
            max(self._used[node][0], self._used[node][3]) > self._devices(node) or self._crowding(node) != ""
        )

    def left_of(self, node: int, count: int, *, is_guest: bool) -> int:
        """Return how many of the devices of a job on a node are left after the node lost some.

        A guest that only lacks memory has none left.
        """
        missing = self._used[node][3 if is_guest else 0] - self._devices(node)
        return max(count - int(missing), 0) if missing > 0 else 0

    def _devices(self, node: int) -> int:
        return self._nodes[node].n_gpus - self._withdrawn[node] if self._is_up[node] else 0

    def change(self, row: Row) -> None:
        """Apply a node event."""
        node = whole(row.nodes)
        if node is None or node >= len(self._nodes):
            self._rules.report("row", row, f"node {row.nodes!r}; expected 0 to {len(self._nodes) - 1}")
            return
        if row.kind == "capacity_announced":
            return
        self.last_changed = node
        if row.kind == "node_failed":
            self.failed.append(node)
        if row.kind.startswith("capacity_"):
            withdrawn = self._withdrawn[node] + row.n_gpus * (1 if row.kind == "capacity_withdrawn" else -1)
            if not 0 <= withdrawn <= self._nodes[node].n_gpus:
                found = f"{withdrawn} of the {self._nodes[node].n_gpus} devices of node {node} are withdrawn"
                self._rules.report("failure", row, f"{found}; expected none to all")
            had_any = self._devices(node) > 0
            self._withdrawn[node] = withdrawn
            if had_any and not self._devices(node):
                self.failed.append(node)
        else:
            joins = row.kind == "node_joined"
            if self._is_up[node] == joins:
                state = "up" if joins else "down"
                self._rules.report("failure", row, f"node {node} is {state} already")
            self._is_up[node] = joins
        self._touch(node)

    def check(self, row: Row) -> None:
        """Compare the resources that are held at the end of an instant with those of the nodes."""
        for node in sorted(self._touched):
            spec, used = self._nodes[node], self._used[node]
            rest = (spec.cpu_threads, spec.host_memory_bytes) if self._is_up[node] else (0, 0)
            n_devices = self._devices(node)
            # Only memory is a float that rounds; all other amounts are whole and compared exactly.
            slack_bytes = SLACK * max(spec.host_memory_bytes, 1.0)
            limits = n_devices, rest[0], rest[1] + slack_bytes, n_devices
            if any(map(gt, used, limits)):
                names = "GPUs", "CPU threads", "B of host memory", "GPUs for guests"
                for name, amount, most, limit in zip(
                    names, used, (n_devices, *rest, n_devices), limits, strict=True
                ):
                    if amount > limit:
                        state = "" if self._is_up[node] else ", which is down"
                        message = f"node {node}{state}: {amount:g} {name} are held; expected at most {most:g}"
                        rule = "capacity" if self._is_up[node] else "failure"
                        self._rules.report(rule, row._replace(job_id=""), message)
            if self._guests and (message := self._crowding(node)):
                self._rules.report("capacity", row._replace(job_id=""), message)
        self._touched.clear()

    def speeds(self) -> dict[str, tuple[float, int]]:
        """Return the speeds that guests on nodes changed in this instant must have, by job.

        With each comes the number of its devices that nobody holds.
        """
        if not self._guests:
            return {}
        changed = [job for job, shares in self._guests.items() if not self._touched.isdisjoint(shares)]
        found: dict[str, tuple[float, int]] = {}
        for job in sorted(changed):
            parts = [self._speeds_on(node).get(job, (1.0, 0)) for node in self._guests[job]]
            found[job[1]] = min(speed for speed, _ in parts), sum(n_unheld for _, n_unheld in parts)
        return found

    def _speeds_on(self, node: int) -> dict[_Job, tuple[float, int]]:
        """Return the speeds that a node leaves its guests, each that of its slowest device, and free devices.

        Guests take devices one after another, the largest memory first, each those on which it is fastest.
        """
        speeds = self._speeds[node]
        if speeds is not None:
            return speeds
        gpu, here = self._nodes[node].gpu, self._here[node]
        most = (gpu.memory_bytes - gpu.reserved_bytes) * (1 + SLACK)
        held = {float(job[0]): item for job, (_, item, is_guest) in here.items() if not is_guest}
        free = Counter({float(job[0]): n for job, (n, _, is_guest) in here.items() if not is_guest})
        free[math.inf] = self._devices(node) - free.total()  # devices without a holder come last
        guests = [
            (-it.device_memory_bytes_per_gpu, job, n) for job, (n, it, is_guest) in here.items() if is_guest
        ]
        speeds = self._speeds[node] = {}
        for minus_bytes, job, count in sorted(guests):
            item = here[job][1]
            offers = []
            for holder, n in free.items():
                other = held.get(holder)
                if n > 0 and (other is None or other.device_memory_bytes_per_gpu - minus_bytes <= most):
                    offers.append((_slowdown(item, other), holder))
            speed, missing, unheld = 1.0, count, free[math.inf]
            for slowdown, holder in sorted(offers):
                taken = min(free[holder], missing)
                free[holder] -= taken
                missing -= taken
                speed = min(speed, 1.0 / slowdown)
                if not missing:
                    break
            speeds[job] = min(speed, MIN_SPEED) if missing else speed, unheld - free[math.inf]
        return speeds

    def _crowding(self, node: int) -> str:
        """Describe the guests of a node that find no device with enough memory; empty if all do.

        By Hall's condition: for each size, guests of that size or more against the devices that can take it.
        """
        gpu, (holders, guests) = self._nodes[node].gpu, (Counter[float](), Counter[float]())
        for count, item, is_guest in self._here[node].values():
            (guests if is_guest else holders)[item.device_memory_bytes_per_gpu] += count
        most, n_guests = (gpu.memory_bytes - gpu.reserved_bytes) * (1 + SLACK), 0
        for guest_bytes in sorted(guests, reverse=True):
            n_guests += guests[guest_bytes]
            n_crowded = sum(n for taken, n in holders.items() if taken + guest_bytes > most)
            if n_guests > self._devices(node) - n_crowded:
                found = f"node {node}: too little memory for {n_guests} guest(s) of {guest_bytes:g} B or more"
                return f"{found}; expected {most:g} B"
        return ""


def _slowdown(guest: Configuration, holder: Configuration | None) -> float:
    """Return how much longer a step of a guest takes beside a holder, or nobody, than alone [1].

    The holder comes first: each phase of the guest gets the rest of the resource that the phase uses.
    """
    if holder is None:
        return 1.0
    if guest.busy is None or holder.busy is None:
        return 1.0 / IDLE_SHARE
    computing, moving = guest.busy
    phases = (computing, holder.busy[0]), (moving, holder.busy[1]), (1.0 - computing - moving, 0.0)
    if any(share > 0 and taken >= 1.0 for share, taken in phases):
        return 1.0 / MIN_SPEED
    return min(sum(share / (1.0 - taken) for share, taken in phases if share), 1.0 / MIN_SPEED)


# --- Accounts of jobs ---


class ReplayedLoss(NamedTuple):
    """Loss that a row of the events table stands for, with the rounding to allow for steps and GPU s."""

    row: Row
    recovery: str
    outcome: str
    steps: float
    gpu_s: float
    steps_tolerance: float
    gpu_s_tolerance: float


class _InMemory(NamedTuple):
    """Nodes that have the state of a waiting job, its devices there, and failures until its interruption."""

    nodes: Set[int]
    devices: Mapping[int, int]
    n_failed: int


class JobAccount:
    """Account of a job by the rows so far: its state, its allocation, its times and its progress.

    ``state`` is absent, waiting, running or finished.
    """

    __slots__ = (
        "_held", "_in_memory", "_index", "_is_guest", "_last", "_left", "_n_lost", "_nodes", "_ready_s",
        "_recovery", "_report", "_restarts", "_rules", "_saw_ready", "_shares", "_since_s", "_step_times",
        "_total", "_unheld", "_unsaved", "finish_s", "first_start_s", "held_gpu_s", "job", "losses",
        "restart_s", "running_s", "starts", "state", "waiting_s",
    )  # fmt: skip

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
        self._step_times: list[tuple[float, float]] = []  # from a time [s] on, time of a step [s]
        self._unheld: list[tuple[float, int]] = []  # of a guest, from a time [s] on, devices nobody holds
        self._last: Allocation | None = None
        self._shares: Mapping[int, int] = {}
        self._since_s = job.submit_time_s
        self._ready_s = math.nan
        self._saw_ready = False
        self._recovery = rules.recovery_of(job)
        self.losses: list[ReplayedLoss] = []
        # Steps of earlier allocations that are in no checkpoint, and their device time each [GPU s].
        self._unsaved: list[tuple[float, float]] = []
        self._in_memory: _InMemory | None = None  # while the job waits with its state in memory
        self._n_lost = 0  # nodes lost since the job had last recovered
        self._restarts = False  # from a checkpoint, the next time

    def follow(self, row: Row) -> None:
        """Apply one row."""
        handled = _HANDLERS.get(row.kind)
        if handled is None:
            self._report("row", row, f"kind {row.kind!r}; expected {', '.join(_HANDLERS)}")
            return
        state, is_decision, handler = handled
        if self.state != state:
            if not (row.kind == "finished" and self.state == "waiting" and self._rules.is_live):
                self._report("life", row, f"{row.kind} while {self.state}; expected while {state}")
                return
            handler = JobAccount._finish_late
        every_s = self._rules.interval_s
        if is_decision and every_s is not None:
            rounds = row.time_s / every_s
            if abs(rounds - round(rounds)) > _SLACK_S:
                found = f"a decision at {row.time_s} s"
                self._report("round", row, f"{found}; expected multiples of {every_s} s")
        handler(self, row)
        left = self._left_at(row.time_s)
        if row.steps_left != left and not abs(row.steps_left - left) <= self._tolerance(row.time_s):
            self._report("progress", row, f"{row.steps_left!r} steps are left; expected {left!r}")

    def close(self) -> None:
        """Check that the job finished."""
        if self.state != "finished":
            self._rules.report_job("life", self.job.job_id, f"is {self.state} at the end; expected finished")

    # --- one method per kind of event -------------------------------------------------------

    def _submit(self, row: Row) -> None:
        # A job that arrives while a live run is being stopped is submitted when it goes on.
        is_late = self._rules.is_live and row.time_s > self.job.submit_time_s
        if row.time_s != self.job.submit_time_s and not is_late:
            self._report("life", row, f"submitted at {row.time_s} s; expected {self.job.submit_time_s} s")
        self.state, self._since_s = "waiting", row.time_s

    def _start(self, row: Row) -> None:
        if self._in_memory is not None:
            self._check_memory(row)
            due_s, every_s = self._since_s, self._rules.interval_s
            if every_s is not None:
                due_s = math.ceil(due_s / every_s - _SLACK_S) * every_s
            if row.time_s > due_s + _slack_s(row.time_s):
                found = f"goes on from memory at {row.time_s} s"
                self._report(
                    "recovery", row, f"{found}; expected at the decision of {due_s} s, or a rollback"
                )
        self._hold_again(row)

    def _hold_again(self, row: Row) -> None:
        self.waiting_s += row.time_s - self._since_s
        if self.starts == 0:
            self.first_start_s = row.time_s
        self._take(row)
        self._in_memory, self._restarts = None, False
        self.state = "running"

    def _regroup(self, row: Row) -> None:
        memory, kind = self._in_memory, "" if self._recovery is None else self._recovery.kind
        if memory is None or kind != "resilient" or row.time_s != self._since_s:
            found = f"regrouped at {row.time_s} s with recovery {kind!r}"
            self._report("recovery", row, f"{found}; expected a resilient job, interrupted at this instant")
        else:
            self._check_memory(row)
            taken = self._nodes.shares(row.nodes).by_node
            if outside := sorted(node for node, n in taken.items() if n > memory.devices.get(node, 0)):
                left = f"expected devices that it has left, {dict(memory.devices)} by node"
                self._report("recovery", row, f"regrouped on node(s) {outside}; {left}")
        self._hold_again(row)

    def _check_memory(self, row: Row) -> None:
        """Report a job that goes on from memory although too many of its nodes are gone."""
        memory, recovery = self._in_memory, self._recovery
        if memory is None or recovery is None:
            return
        gone = [node for node in self._nodes.failed[memory.n_failed :] if node in memory.nodes]
        if not memory.nodes - set(gone) or self._n_lost + len(gone) > recovery.survives:
            found = f"goes on from the memory of nodes {sorted(memory.nodes)}, of which {gone} failed since"
            self._report("recovery", row, f"{found}; expected a rollback")
        self._n_lost += len(gone)

    def _roll_back(self, row: Row) -> None:
        if self._in_memory is None:
            self._report(
                "recovery", row, "rolled back without state in memory; expected one rollback at most"
            )
        self._in_memory, self._n_lost, self._restarts = None, 0, True
        self._lose(row, math.inf, "checkpoint")

    def _reconfigure(self, row: Row) -> None:
        before = (self._held, self._shares, self._is_guest)
        self._settle(row)
        self._save()
        self._take(row)
        if self._held is not None and (self._held, self._shares, self._is_guest) == before:
            self._report("restart", row, "restarted as it was; expected another plan, nodes or threads")

    def _share(self, row: Row) -> None:
        before, shares, ready_s, is_guest = self._held, self._shares, self._ready_s, self._is_guest
        saw_ready = self._saw_ready
        self._settle(row)
        self._save()
        self._take(row)
        if (self._held, self._shares, self._is_guest) != (before, shares, not is_guest):
            self._report("row", row, "a change of sharing moved the job; expected the same devices and plan")
        # To share devices, or no longer, is no restart: undo what `_take` counted.
        self.starts -= 1
        self._ready_s, self._saw_ready = max(ready_s, row.time_s), saw_ready

    def _rate(self, row: Row) -> None:
        if not self._is_guest or self._nodes.shares(row.shared_nodes).by_node != self._shares:
            self._report(
                "row", row, "moved or not a guest; expected a new speed of a guest on the same devices"
            )
        alone_s = self._held.iter_time_s if self._held is not None else row.iter_time_s
        self._step_times.append((row.time_s, max(alone_s, row.iter_time_s)))
        self._unheld.append((row.time_s, row.n_gpus))

    def check_speed(self, row: Row, speed: float, n_unheld: int) -> None:
        """Compare speed and devices of a guest at the end of an instant with those that it must have."""
        if self._held is not None and self._is_guest:
            if self._unheld[-1][1] != n_unheld:
                found = f"n_gpus {self._unheld[-1][1]} of a guest"
                accepted = f"expected the {n_unheld} of its devices that nobody holds"
                self._report("row", row._replace(job_id=self.job.job_id), f"{found}; {accepted}")
            found_s, due_s = self._step_times[-1][1], self._held.iter_time_s / speed
            if abs(found_s - due_s) > SLACK * due_s:
                found = f"a step as a guest takes {found_s} s"
                self._report("row", row._replace(job_id=self.job.job_id), f"{found}; expected {due_s} s")

    def _ready(self, row: Row) -> None:
        if abs(row.time_s - self._ready_s) > _slack_s(row.time_s):
            self._report("restart", row, f"ready at {row.time_s} s; expected {self._ready_s} s")
        self._saw_ready = True
        if self._nodes.shares(row.shared_nodes if self._is_guest else row.nodes).by_node != self._shares:
            self._report(
                "row", row, f"nodes {row.nodes!r} differ from the allocation; expected {dict(self._shares)}"
            )

    def _suspend(self, row: Row) -> None:
        if self._rules.keeps_guarantees and self.job.is_guaranteed:
            self._report("guarantee", row, "a guaranteed job must not be suspended")
        self._settle(row)
        self._save()
        self.state = "waiting"

    def _interrupt(self, row: Row) -> None:
        # The processes of a live run may crash, and those of another node may hold what a job has not saved.
        if not (self._rules.is_live or any(self._nodes.is_short(node) for node in self._shares)):
            self._report("failure", row, "interrupted, but no node of the job lost devices")
        self._count_unsaved(row.time_s)
        recovery, node = self._recovery, self._nodes.last_changed
        n_left = self._nodes.left_of(node, self._shares.get(node, 0), is_guest=self._is_guest)
        left = {one: n_left if one == node else n for one, n in self._shares.items() if one != node or n_left}
        is_recovering = self._n_lost > 0 and row.time_s < self._ready_s
        self._settle(row)
        self.state = "waiting"
        if recovery is None:
            self._lose(row, math.inf, "checkpoint")
            return
        self._n_lost = self._n_lost + 1 if is_recovering else 1
        if not left or self._n_lost > recovery.survives:
            self._n_lost, self._restarts = 0, True
            self._lose(row, math.inf, "checkpoint")
            return
        self._in_memory = _InMemory(left.keys(), left, len(self._nodes.failed))
        done = self._total - self._left
        running = done - math.floor(done)
        if min(running, 1.0 - running) <= self._tolerance(row.time_s):
            # Between two steps up to rounding: the row says whether the last one counts as done.
            said = row.steps_left - self._left
            running = min((0.0, running, 1.0), key=lambda steps: abs(steps - said))
        self._lose(row, running, "in memory")

    def _finish(self, row: Row) -> None:
        if not self._saw_ready:
            self._report("restart", row, f"finished without being ready; expected after {self._ready_s} s")
        self._settle(row)
        if abs(self._left) > self._tolerance(row.time_s):
            found = f"finished with {self._left!r} of {self._total} steps left"
            self._report("progress", row, f"{found}; expected 0")
        self._left = 0.0
        self.state, self.finish_s = "finished", row.time_s

    def _finish_late(self, row: Row) -> None:
        """Finish a job that completed its last step while its processes were stopping."""
        self.waiting_s += row.time_s - self._since_s
        self._left, self.state, self.finish_s = 0.0, "finished", row.time_s

    # --- allocations and progress -----------------------------------------------------------

    def _take(self, row: Row) -> None:
        self.starts += 1
        self._since_s = row.time_s
        self._saw_ready = False
        self._is_guest = is_guest = bool(row.shared_nodes)
        shares = self._nodes.shares(row.shared_nodes or row.nodes)
        self._held = held = self._find(row, shares)
        if held is None:
            self._shares, self._ready_s = {}, row.time_s + self._rules.restart_cost.expected_s
            return
        self._shares = shares.by_node
        new = Allocation(held, shares.nodes, is_guest)
        delay_s, recovery = None, self._recovery
        if recovery is not None and self._in_memory is not None:
            delay_s = recovery.paused_s
        elif recovery is not None and self._restarts:
            delay_s = recovery.restart_s
        if delay_s is None:
            delay_s = float(self._rules.restart_cost(self.job, self._last, new))
        self._ready_s = row.time_s + delay_s
        self._last = new
        step_s = max(held.iter_time_s, row.iter_time_s) if is_guest else held.iter_time_s
        self._step_times, self._unheld = [(row.time_s, step_s)], [(row.time_s, row.n_gpus)]
        self._move(1)
        if self._rules.keeps_guarantees and self.job.is_guaranteed:
            reference = self._rules.catalogue.requested(self.job)
            if step_s > reference.iter_time_s * (1 + _SLACK_S):
                found = f"a step takes {step_s} s"
                self._report("guarantee", row, f"{found}; expected {reference.iter_time_s} s")

    def _find(self, row: Row, shares: Shares) -> Configuration | None:
        """Return the configuration that a row describes, or report that there is none."""
        if (row.nodes and row.shared_nodes) or not shares.placement:
            found = f"nodes {row.nodes!r} and shared_nodes {row.shared_nodes!r}"
            self._report("row", row, f"{found}; expected node:devices of existing nodes, in one of the two")
            return None
        key = (self.job.workload, row.plan, shares.placement, row.cpu_threads)
        held = self._rules.catalogue.find(*key, shares.gpu_types)
        if held is None:
            self._report(
                "row", row, f"plan {row.plan!r} on {shares.placement} is not in the catalogue of the cluster"
            )
            return None
        step_s = max(held.iter_time_s, row.iter_time_s) if self._is_guest else held.iter_time_s
        # Devices of a guest that nobody holds are known at the end of the instant.
        due = (row.n_gpus if self._is_guest else held.n_gpus, step_s, held.family)
        if (row.n_gpus, row.iter_time_s, row.family) != due:
            accepted = f"{due[0]}, {due[1]} and {due[2]}"
            found = f"n_gpus {row.n_gpus}, iter_time_s {row.iter_time_s}, family {row.family}"
            self._report("row", row, f"{found}; expected {accepted}")
        return held

    def _settle(self, row: Row) -> None:
        """End the present allocation: add its times and its progress to the totals."""
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
        """Return the steps done between two times [s] at which the job makes progress."""
        steps, times = 0.0, self._step_times
        for number, (start_s, step_s) in enumerate(times, start=1):
            end_s = times[number][0] if number < len(times) else time_s
            begin_s = max(start_s, since_s)
            if end_s > begin_s:
                steps += (self._trained_s(end_s) - self._trained_s(begin_s)) / step_s
        return steps

    def _trained_s(self, time_s: float) -> float:
        """Return the time without checkpoints until a time since the job was ready, plus a constant [s]."""
        every_s = self._checkpoint_every_s()
        if self._recovery is None or every_s is None or not self._recovery.written_s:
            return time_s
        n_written, since_s = self._since_written(time_s)
        return n_written * every_s + min(since_s, every_s)

    def _since_written(self, time_s: float) -> tuple[int, float]:
        """Return the checkpoints written on the present allocation, and the time since the last [s]."""
        every_s, elapsed_s = self._checkpoint_every_s(), max(time_s - self._ready_s, 0.0)
        if every_s is None:
            return 0, elapsed_s
        cycle_s = every_s + (0.0 if self._recovery is None else self._recovery.written_s)
        since_s = elapsed_s % cycle_s
        n_written = round((elapsed_s - since_s) / cycle_s)
        if cycle_s - since_s < _slack_s(time_s):
            return n_written + 1, 0.0  # a checkpoint due at this instant counts as written
        return n_written, since_s

    def _checkpoint_every_s(self) -> float | None:
        if self._recovery is not None:
            return self._recovery.checkpoint_interval_s
        return self._rules.checkpoint_interval_s

    def _move(self, sign: int) -> None:
        if self._held is not None:
            who = (self._index, self.job.job_id)
            self._nodes.add(who, self._shares, self._held, sign, is_guest=self._is_guest)

    # --- losses -----------------------------------------------------------------------------

    def _save(self) -> None:
        """Put all progress into a checkpoint, as a change does."""
        self._unsaved, self._n_lost = [], 0

    def _count_unsaved(self, time_s: float) -> None:
        """Add the progress since the last checkpoint to that which an interruption may lose."""
        held = self._held
        if held is None or (self._recovery is None and self._rules.checkpoint_interval_s is None):
            return
        n_written, since_s = self._since_written(time_s)
        if n_written:
            self._unsaved = []
        saved_s = max(time_s - since_s, self._ready_s)
        steps = self._steps_between(saved_s, time_s)
        if steps > 0:
            own_gpu_s = held.n_gpus * self._step_times[-1][1]
            each_gpu_s = self._unheld_gpu_s(saved_s, time_s) / steps if self._is_guest else own_gpu_s
            self._unsaved.append((steps, each_gpu_s))

    def _unheld_gpu_s(self, since_s: float, time_s: float) -> float:
        """Return the device time that a guest trained between two times [s], where nobody held devices."""
        gpu_s = 0.0
        for number, (start_s, count) in enumerate(self._unheld, start=1):
            end_s = self._unheld[number][0] if number < len(self._unheld) else time_s
            begin_s = max(start_s, since_s)
            if end_s > begin_s:
                gpu_s += count * (self._trained_s(end_s) - self._trained_s(begin_s))
        return gpu_s

    def _lose(self, row: Row, steps: float, outcome: str) -> None:
        """Take back the newest progress that is in no checkpoint, up to so many steps."""
        lost, gpu_s, most_gpu_s = 0.0, 0.0, 0.0
        while self._unsaved and steps - lost > 0:
            done, each_gpu_s = self._unsaved.pop()
            part = min(done, steps - lost)
            if part < done:
                self._unsaved.append((done - part, each_gpu_s))
            lost, gpu_s, most_gpu_s = lost + part, gpu_s + part * each_gpu_s, max(most_gpu_s, each_gpu_s)
        self._left += lost
        kind, near = "" if self._recovery is None else self._recovery.kind, self._tolerance(row.time_s)
        near_gpu_s = _SLACK_S + SLACK * gpu_s + near * most_gpu_s
        self.losses.append(ReplayedLoss(row, kind, outcome, lost, gpu_s, near, near_gpu_s))

    def _tolerance(self, time_s: float) -> float:
        fastest = self._held or self._rules.catalogue.requested(self.job)
        return SLACK * self._total + _SLACK_S + _slack_s(time_s) / fastest.iter_time_s


# State in which each kind of event may happen to a job, whether it is a decision, and what it does.
_HANDLERS: Mapping[str, tuple[str, bool, Callable[[JobAccount, Row], None]]] = {
    "submitted": ("absent", False, JobAccount._submit),
    "started": ("waiting", True, JobAccount._start),
    "reconfigured": ("running", True, JobAccount._reconfigure),
    "sharing": ("running", True, JobAccount._share),
    "rated": ("running", False, JobAccount._rate),
    "ready": ("running", False, JobAccount._ready),
    "suspended": ("running", True, JobAccount._suspend),
    "interrupted": ("running", False, JobAccount._interrupt),
    "regrouped": ("waiting", False, JobAccount._regroup),
    "rolled_back": ("waiting", False, JobAccount._roll_back),
    "finished": ("running", False, JobAccount._finish),
}


def _slack_s(time_s: float) -> float:
    return _SLACK_S + SLACK * abs(time_s)


def _read_shares(text: str) -> dict[int, int]:
    """Read ``node:devices`` pairs; empty if the text is not such a list."""
    shares: dict[int, int] = {}
    for pair in text.split():
        node, n_devices = (whole(part) for part in pair.partition(":")[::2])
        if node is None or not n_devices or node in shares:
            return {}
        shares[node] = n_devices
    return shares


# --- Replay ---


@typed
def validate_schedule(
    events: pd.DataFrame,
    jobs: Sequence[JobSpec],
    cluster: ClusterSpec,
    catalogue: Catalogue,
    restart_delay_s: float | RestartCost,
    *,
    interval_s: float | None = None,
    checkpoint_interval_s: float | None = None,
    extra_steps: float = 1,
    keeps_guarantees: bool = False,
    is_live: bool = False,
    outcomes: pd.DataFrame | None = None,
    recovery_of: Callable[[JobSpec], Recovery | None] = lambda job: None,
    losses: pd.DataFrame | None = None,
) -> list[Violation]:
    """Return the violations of a schedule by the rules of `makespan.sim.validator`; none if it is possible.

    Parameters
    ----------
    events, outcomes, losses
        Tables of the schemas `makespan.tables.EVENTS` and, which must agree, `makespan.tables.OUTCOMES` and
        `makespan.tables.LOSSES`.
    jobs, cluster, catalogue, restart_delay_s, checkpoint_interval_s, extra_steps
        Arguments of the simulation.
    interval_s
        Length of a round [s] if decisions must fall on multiples of it, else None or 0.
    keeps_guarantees
        Whether a guaranteed job must not be suspended, nor run slower than requested.
    is_live
        Whether real processes ran the schedule; they may crash, and complete the last step while stopping.
    recovery_of
        Recovery of each job from failures, or None.

    Raises
    ------
    TraceError
        The table does not follow its schema.
    """
    rules = Rules(
        catalogue.on(cluster),
        restart_cost(restart_delay_s),
        interval_s or None,
        checkpoint_interval_s,
        extra_steps,
        keeps_guarantees,
        is_live,
        recovery_of,
    )
    checked = EVENTS.validate(events, where="events")
    nodes = NodeAccounts(cluster, rules)
    ordered = sorted(jobs, key=lambda job: job.submit_time_s)
    accounts = {job.job_id: JobAccount(rank, job, rules, nodes) for rank, job in enumerate(ordered)}
    last: Row | None = None
    for row in map(Row._make, zip(*(checked[name].tolist() for name in EVENTS.names), strict=True)):
        if last is not None:
            if row.time_s < last.time_s or row.seq <= last.seq:
                rules.report("order", row, f"follows row {last.seq} at {last.time_s} s; expected later rows")
            if row.time_s != last.time_s:
                _close_instant(last, accounts, nodes)
        last = row
        if row.kind.startswith(("node_", "capacity_")):
            nodes.change(row)
        elif row.job_id in accounts:
            accounts[row.job_id].follow(row)
        else:
            rules.report("row", row, f"job {row.job_id!r} is not in the trace")
    if last is not None:
        _close_instant(last, accounts, nodes)
    for account in accounts.values():
        account.close()
    if outcomes is not None:
        _check_outcomes(outcomes, accounts, rules)
    if losses is not None:
        _check_losses(losses, accounts, rules)
    return rules.found


def _close_instant(last: Row, accounts: Mapping[str, JobAccount], nodes: NodeAccounts) -> None:
    """Check speeds and nodes after all rows of an instant: within one, jobs may swap devices."""
    for name, (speed, n_unheld) in nodes.speeds().items():
        accounts[name].check_speed(last, speed, n_unheld)
    nodes.check(last)


def _check_outcomes(outcomes: pd.DataFrame, accounts: Mapping[str, JobAccount], rules: Rules) -> None:
    """Report every cell that differs from the replay, and every missing, unknown or repeated job."""
    checked = OUTCOMES.validate(outcomes, where="outcomes")
    names = checked["job_id"].tolist()
    for job_id in sorted(set(accounts) - set(names)):
        rules.report_job("outcomes", job_id, "has no row; expected one row for each job")
    first_rows: dict[str, int] = {}
    for number, job_id in enumerate(names):
        if job_id in accounts:
            first_rows.setdefault(job_id, number)
    due: dict[str, Callable[[JobAccount], float]] = {
        "submit_time_s": lambda account: account.job.submit_time_s,
        "n_gpus": lambda account: account.job.n_gpus,
        "steps": lambda account: account.job.steps,
        "is_guaranteed": lambda account: account.job.is_guaranteed,
        "first_start_s": lambda account: account.first_start_s,
        "finish_time_s": lambda account: account.finish_s,
        "n_restarts": lambda account: account.starts - 1,
        "attained_service_gpu_s": lambda account: account.held_gpu_s,
        "waiting_time_s": lambda account: account.waiting_s,
        "running_time_s": lambda account: account.running_s,
        "restart_time_s": lambda account: account.restart_s,
    }
    # All cells at once: almost always all of them agree.
    listed, numbers = [accounts[job_id] for job_id in first_rows], list(first_rows.values())
    wrong: dict[int, list[str]] = {}
    for name, value_of in due.items():
        values = checked[name].to_numpy()[numbers].astype(np.float64)
        expected = np.array([value_of(account) for account in listed], dtype=np.float64)
        sizes = np.maximum(np.abs(values), np.abs(expected))
        is_near = np.isfinite(sizes) & (np.abs(values - expected) <= _RELATIVE * np.maximum(sizes, 1.0))
        for rank in np.flatnonzero((values != expected) & ~is_near):
            found = f"{name} is {checked[name].tolist()[numbers[rank]]!r}"
            message = f"{found}; expected {float(expected[rank])!r}"
            wrong.setdefault(numbers[rank], []).append(message)
    for number, job_id in enumerate(names):
        if first_rows.get(job_id) != number:
            rules.report_job("outcomes", job_id, "is not in the trace or occurs twice")
        for message in wrong.get(number, ()):
            rules.report_job("outcomes", job_id, message)


def _check_losses(losses: pd.DataFrame, accounts: Mapping[str, JobAccount], rules: Rules) -> None:
    """Report every loss that differs from the replay, is missing, or never happened."""
    checked = LOSSES.validate(losses, where="losses")
    due = {loss.row.seq: loss for account in accounts.values() for loss in account.losses}
    columns = (checked[name].tolist() for name in LOSSES.names)
    for time_s, seq, job_id, _, kind, outcome, steps, gpu_s in zip(*columns, strict=True):
        loss = due.pop(seq, None)
        if loss is None:
            found = f"a loss at {time_s} s of row {seq} of the events"
            rules.report_job(
                "recovery", job_id, f"{found}; expected one row for each interruption or rollback"
            )
            continue
        expected = (loss.row.time_s, loss.row.job_id, loss.recovery, loss.outcome)
        if (time_s, job_id, kind, outcome) != expected:
            found = f"a loss of {(time_s, job_id, kind, outcome)}"
            rules.report("recovery", loss.row, f"{found}; expected {expected}")
        near = (
            abs(steps - loss.steps) <= loss.steps_tolerance
            and abs(gpu_s - loss.gpu_s) <= loss.gpu_s_tolerance
        )
        if not near:
            found = f"lost {steps!r} steps and {gpu_s!r} GPU s"
            rules.report("recovery", loss.row, f"{found}; expected {loss.steps!r} and {loss.gpu_s!r}")
    for loss in due.values():
        rules.report("recovery", loss.row, f"no row for the loss of {loss.steps!r} steps; expected one")
