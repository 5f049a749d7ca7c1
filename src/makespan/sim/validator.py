"""Validator of schedules: replays an events table and reports what could not have happened.

It shares no code with the engine. From the rows, the trace, the nodes and the times of a step alone it
computes who held what, when, and how far that carried each job. The rules are:

- ``order``: time and ``seq`` never decrease.
- ``row``: a row names a job, a kind and a configuration that exist and agree with each other; the speed of a
  guest is the one that its holders leave it.
- ``life``: a job is submitted once, when the trace says, starts only while it waits, changes only while
  it runs, and finishes once.
- ``capacity``: at the end of every instant no node gives more devices, CPU threads or memory than it has,
  and no device to more than one guest, nor to one that does not fit beside its holder.
- ``failure``: nodes fail and join in turn, and no more devices are withdrawn than a node has; jobs on devices
  that disappear lose them at once, and no job is interrupted without reason.
- ``restart``: after every start and change a job makes no progress for as long as the restart costs, and
  its ``ready`` row marks the end of that; no job restarts to hold what it held.
- ``progress``: the steps left follow from the time with progress and the time of a step, and end at zero.
- ``round``: decisions fall on rounds.
- ``guarantee``: guarantees are kept, where they are promised.
- ``outcomes``: the second table agrees with the first.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pandas as pd

from makespan.hardware import ClusterSpec
from makespan.plans import Placement
from makespan.sim.catalogue import Allocation, Catalogue, Configuration, RestartCost, restart_cost
from makespan.sim.sharing import IDLE_SHARE, MIN_SPEED
from makespan.tables import EVENTS, OUTCOMES
from makespan.workloads import JobSpec

_Job = tuple[int, str]  # position by submission, and name
SLACK = 1e-9  # relative, for rounding
_SLACK_S = 1e-6  # absolute, for rounding
_RELATIVE = 1e-6  # for rounding, in the comparison of the two tables


@dataclass(frozen=True, slots=True)
class Violation:
    """Impossible event in a schedule: the rule that it breaks, and where.

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
    found: list[Violation] = field(default_factory=list)

    def report(self, rule: str, row: Row, message: str) -> None:
        """Record a violation at a row."""
        self.found.append(Violation(rule, row.time_s, row.seq, row.job_id, message))

    def report_job(self, rule: str, job_id: str, message: str) -> None:
        """Record a violation of a job that no single row shows."""
        self.found.append(Violation(rule, math.nan, -1, job_id, message))


# --- Accounts of nodes ---


class NodeAccounts:
    """Resources of each node that jobs hold, and the jobs there."""

    def __init__(self, cluster: ClusterSpec, rules: Rules) -> None:
        self._rules = rules
        self._nodes = cluster.nodes
        self._is_up = [True] * cluster.n_nodes
        self._withdrawn = [0] * cluster.n_nodes
        self._memory = [(Counter[float](), Counter[float]()) for _ in cluster.nodes]  # of holders, of guests
        self._used = [[0.0, 0.0, 0.0, 0.0] for _ in cluster.nodes]
        self._here: list[dict[_Job, tuple[int, Configuration, bool]]] = [{} for _ in cluster.nodes]
        self._touched: set[int] = set()

    def add(
        self, job: _Job, shares: dict[int, int], held: Configuration, sign: int, *, is_guest: bool
    ) -> None:
        """Add (+1) or remove (-1) what a job holds, or uses as a guest."""
        for node, count in shares.items():
            self._touched.add(node)
            if sign > 0:
                self._here[node][job] = count, held, is_guest
            else:
                del self._here[node][job]
            used = self._used[node]
            self._memory[node][is_guest][held.device_memory_bytes_per_gpu] += sign * count
            if is_guest:
                used[3] += sign * count
            else:
                used[0] += sign * count
                used[1] += sign * count * held.cpu_threads
            used[2] += sign * count * held.host_memory_bytes_per_gpu

    def has(self, node: int) -> bool:
        """Return whether a node of that number exists."""
        return 0 <= node < len(self._nodes)

    def gpu_type(self, node: int) -> str:
        """Return the name of a node's devices."""
        return self._nodes[node].gpu.name

    def is_short(self, node: int) -> bool:
        """Return whether a node has fewer devices, or less memory, at this moment than its jobs need."""
        return (
            max(self._used[node][0], self._used[node][3]) > self._devices(node) or self._crowding(node) != ""
        )

    def _devices(self, node: int) -> int:
        return self._nodes[node].n_gpus - self._withdrawn[node] if self._is_up[node] else 0

    def change(self, row: Row) -> None:
        """Apply a node event."""
        if not (row.nodes.isdigit() and self.has(int(row.nodes))):
            self._rules.report("row", row, f"node {row.nodes!r}; expected 0 to {len(self._nodes) - 1}")
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
            self._rules.report("failure", row, f"{found}; expected none to all")
        self._withdrawn[node] = gone
        self._touched.add(node)

    def check(self, row: Row) -> None:
        """Compare what is held at the end of an instant with what the nodes have."""
        for node in sorted(self._touched):
            spec, used = self._nodes[node], self._used[node]
            rest = (spec.cpu_threads, spec.host_memory_bytes) if self._is_up[node] else (0, 0)
            n_devices = self._devices(node)
            names = "GPUs", "CPU threads", "B of host memory", "GPUs for guests"
            for name, amount, most in zip(names, used, (n_devices, *rest, n_devices), strict=True):
                # Only memory is a float that rounds; all other amounts are whole and compared exactly.
                if amount > most + SLACK * max(spec.host_memory_bytes, 1.0) * (name[0] == "B"):
                    state = "" if self._is_up[node] else ", which is down"
                    message = f"node {node}{state}: {amount:g} {name} are held; expected at most {most:g}"
                    rule = "capacity" if self._is_up[node] else "failure"
                    self._rules.report(rule, row._replace(job_id=""), message)
            if message := self._crowding(node):
                self._rules.report("capacity", row._replace(job_id=""), message)
        self._touched.clear()

    def speeds(self) -> dict[str, float]:
        """Return the speeds that guests on nodes changed in this instant must have, by job."""
        changed = {
            job for node in self._touched for job, (*_, is_guest) in self._here[node].items() if is_guest
        }
        if not changed:
            return {}
        speeds = dict.fromkeys(sorted(changed), 1.0)
        for node, here in enumerate(self._here):
            if not changed.isdisjoint(here):
                for job, speed in self._speeds_on(node):
                    speeds[job] = min(speeds.get(job, 1.0), speed)
        return {job[1]: speed for job, speed in speeds.items() if job in changed}

    def _speeds_on(self, node: int) -> Iterator[tuple[_Job, float]]:
        """Assign devices to guests one by one: largest memory first, each where it is fastest."""
        gpu, here = self._nodes[node].gpu, self._here[node]
        most = (gpu.memory_bytes - gpu.reserved_bytes) * (1 + SLACK)
        held = {float(job[0]): item for job, (_, item, is_guest) in here.items() if not is_guest}
        free = Counter({float(job[0]): n for job, (n, _, is_guest) in here.items() if not is_guest})
        free[math.inf] = self._devices(node) - free.total()  # devices without a holder come last
        guests = [
            (-it.device_memory_bytes_per_gpu, job, n) for job, (n, it, is_guest) in here.items() if is_guest
        ]
        for minus_bytes, job, count in sorted(guests):
            item = here[job][1]
            for _ in range(count):
                there = [holder for holder, n in free.items() if n > 0]
                offers = [
                    (_slowdown(item, other), holder)
                    for holder, other in ((holder, held.get(holder)) for holder in there)
                    if other is None or other.device_memory_bytes_per_gpu - minus_bytes <= most
                ]
                if not offers:
                    yield job, MIN_SPEED
                    continue
                slowdown, holder = min(offers)
                free[holder] -= 1
                yield job, 1.0 / slowdown

    def _crowding(self, node: int) -> str:
        """Describe the guests of a node that find no device with enough memory; empty if all do.

        By Hall's condition: for each size, guests of that size or more against the devices that can take it.
        """
        gpu, (holders, guests) = self._nodes[node].gpu, self._memory[node]
        if not guests:
            return ""
        most, n_guests = (gpu.memory_bytes - gpu.reserved_bytes) * (1 + SLACK), 0
        for guest_bytes in sorted(+guests, reverse=True):
            n_guests += guests[guest_bytes]
            n_crowded = sum(n for taken, n in holders.items() if taken + guest_bytes > most)
            if n_guests > self._devices(node) - n_crowded:
                found = f"node {node}: too little memory for {n_guests} guest(s) of {guest_bytes:g} B or more"
                return f"{found}; expected {most:g} B"
        return ""


def _slowdown(guest: Configuration, holder: Configuration | None) -> float:
    """Return the ratio of a guest's step beside a holder, or nobody, to one alone, phase by phase."""
    if holder is None:
        return 1.0
    if guest.busy is None or holder.busy is None:
        return 1.0 / IDLE_SHARE
    computing, moving = guest.busy
    phases = (computing, holder.busy[0]), (moving, holder.busy[1]), (1.0 - computing - moving, 0.0)
    if any(own > 0 and taken >= 1.0 for own, taken in phases):
        return 1.0 / MIN_SPEED
    return min(sum(own / (1.0 - taken) for own, taken in phases if own), 1.0 / MIN_SPEED)


# --- Accounts of jobs ---


class JobAccount:
    """State of a job by the rows so far, absent, waiting, running or finished; its times and progress."""

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
        """Apply one row."""
        if row.kind not in self._handlers:
            self._report("row", row, f"kind {row.kind!r}; expected {', '.join(self._handlers)}")
            return
        state, handler = self._handlers[row.kind]
        if row.kind == "finished" and self.state == "waiting" and self._rules.is_live:
            state, handler = self.state, self._finish_late
        if self.state != state:
            self._report("life", row, f"{row.kind} while {self.state}; expected while {state}")
            return
        if row.kind in ("started", "reconfigured", "suspended", "sharing"):
            self._check_round(row)
        handler(row)
        if abs(row.steps_left - self._left_at(row.time_s)) > self._tolerance(row.time_s):
            found = f"{row.steps_left!r} steps are left"
            self._report("progress", row, f"{found}; expected {self._left_at(row.time_s)!r}")

    def close(self) -> None:
        """Check that the job finished."""
        if self.state != "finished":
            self._rules.report_job("life", self.job.job_id, f"is {self.state} at the end; expected finished")

    # --- one method per kind ----------------------------------------------------------------

    def _submit(self, row: Row) -> None:
        if row.time_s != self.job.submit_time_s:
            self._report("life", row, f"submitted at {row.time_s} s; expected {self.job.submit_time_s} s")
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
            self._report("restart", row, "restarted as it was; expected another plan, nodes or threads")

    def _share(self, row: Row) -> None:
        before, shares, ready_s, is_guest = self._held, self._shares, self._ready_s, self._is_guest
        saw_ready = self._saw_ready
        self._settle(row)
        self._take(row)
        if (self._held, self._shares, self._is_guest) != (before, shares, not is_guest):
            self._report("row", row, "what is shared differs from what was held, or the other way round")
        # To share devices, or no longer, is no restart: undo what `_take` counted.
        self.starts -= 1
        self._ready_s, self._saw_ready = max(ready_s, row.time_s), saw_ready

    def _rate(self, row: Row) -> None:
        if not self._is_guest or _read_shares(row.shared_nodes) != self._shares:
            self._report("row", row, "only how fast a guest goes may change, not where it is")
        alone_s = self._held.iter_time_s if self._held is not None else row.iter_time_s
        self._step_times.append((row.time_s, max(alone_s, row.iter_time_s)))

    def check_speed(self, row: Row, speed: float) -> None:
        """Compare the speed of a guest at the end of an instant with the one that it must have."""
        if self._held is not None and self._is_guest:
            found_s, due_s = self._step_times[-1][1], self._held.iter_time_s / speed
            if abs(found_s - due_s) > SLACK * due_s:
                found = f"a step beside others takes {found_s} s"
                self._report("row", row._replace(job_id=self.job.job_id), f"{found}; expected {due_s} s")

    def _ready(self, row: Row) -> None:
        if abs(row.time_s - self._ready_s) > _slack_s(row.time_s):
            self._report("restart", row, f"ready at {row.time_s} s; expected {self._ready_s} s")
        self._saw_ready = True
        if _read_shares(row.shared_nodes if self._is_guest else row.nodes) != self._shares:
            self._report("row", row, f"nodes {row.nodes!r} differ from those that the job was given")

    def _suspend(self, row: Row) -> None:
        if self._rules.keeps_guarantees and self.job.is_guaranteed:
            self._report("guarantee", row, "a guaranteed job must not be suspended")
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
            self._report("restart", row, f"finished without being ready; expected after {self._ready_s} s")
        self._settle(row)
        if abs(self._left) > self._tolerance(row.time_s):
            found = f"finished with {self._left!r} of {self._total} steps left"
            self._report("progress", row, f"{found}; expected 0")
        self._left = 0.0
        self.state, self.finish_s = "finished", row.time_s

    def _finish_late(self, row: Row) -> None:
        """Finish a job that did its last step while its processes were being stopped."""
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
        self._step_times = [(row.time_s, max(alone_s, row.iter_time_s) if self._is_guest else alone_s)]
        self._move(1)
        if self._rules.keeps_guarantees and self.job.is_guaranteed:
            reference = self._rules.catalogue.requested(self.job)
            if self._step_times[-1][1] > reference.iter_time_s * (1 + _SLACK_S):
                found = f"a step takes {self._step_times[-1][1]} s"
                self._report("guarantee", row, f"{found}; expected {reference.iter_time_s} s")

    def _find(self, row: Row) -> Configuration | None:
        """Return the configuration that a row describes, or report that there is none."""
        if (row.nodes and row.shared_nodes) or not (self._shares and all(map(self._nodes.has, self._shares))):
            found = f"nodes {row.nodes!r} and shared_nodes {row.shared_nodes!r}"
            self._report("row", row, f"{found}; expected existing node:devices, each node once, in one")
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
            self._report("row", row, f"{found}; expected {accepted}")
        return held

    def _typed_shares(self) -> list[tuple[int, str, int]]:
        """Return the devices, their type and the node of each share, in the order of `gpu_types`."""
        nodes = self._nodes
        return sorted((count, nodes.gpu_type(node), node) for node, count in self._shares.items())

    def _settle(self, row: Row) -> None:
        """End the present allocation: add up its times and its progress."""
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
        ends_s = [*(start_s for start_s, _ in self._step_times[1:]), time_s]
        spans = zip(self._step_times, ends_s, strict=True)
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
            lost_s = 0.0  # a checkpoint due at this instant counts as written
        return self._steps_between(time_s - lost_s, time_s)

    def _tolerance(self, time_s: float) -> float:
        fastest = self._held or self._rules.catalogue.requested(self.job)
        return SLACK * self._total + _SLACK_S + _slack_s(time_s) / fastest.iter_time_s

    def _check_round(self, row: Row) -> None:
        every_s = self._rules.interval_s
        if every_s is not None and abs(row.time_s / every_s - round(row.time_s / every_s)) > _SLACK_S:
            self._report("round", row, f"a decision at {row.time_s} s; expected multiples of {every_s} s")


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


# --- Replay ---


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
) -> list[Violation]:
    """Check a schedule by the rules of `makespan.sim.validator`; an empty list means that it is possible.

    Parameters
    ----------
    events, outcomes
        Tables of the schemas `makespan.tables.EVENTS` and, which must agree, `makespan.tables.OUTCOMES`.
    jobs, cluster, catalogue, restart_delay_s, checkpoint_interval_s, extra_steps
        Arguments of the simulation.
    interval_s
        Length of a round [s] if decisions must fall on multiples of it, else None or 0.
    keeps_guarantees
        Whether a guaranteed job must not be suspended, nor run slower than requested.
    is_live
        Whether the schedule is of real processes, which may do their last step while they are stopped.

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
    )
    checked = EVENTS.validate(events, where="events")
    nodes = NodeAccounts(cluster, rules)
    ordered = sorted(jobs, key=lambda job: job.submit_time_s)
    accounts = {job.job_id: JobAccount(rank, job, rules, nodes) for rank, job in enumerate(ordered)}
    _replay(checked, accounts, nodes, rules)
    for account in accounts.values():
        account.close()
    if outcomes is not None:
        _check_outcomes(outcomes, accounts, rules)
    return rules.found


def _replay(
    events: pd.DataFrame, accounts: Mapping[str, JobAccount], nodes: NodeAccounts, rules: Rules
) -> None:
    """Apply all rows in order; nodes and speeds are checked once per instant, as jobs may swap devices."""
    columns = (events[name].tolist() for name in EVENTS.names)
    last: Row | None = None
    for values in zip(*columns, strict=True):
        row = Row(*values)
        if last is not None and (row.time_s < last.time_s or row.seq <= last.seq):
            rules.report("order", row, f"follows row {last.seq} at {last.time_s} s; expected later rows")
        if last is not None and row.time_s != last.time_s:
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


def _close_instant(last: Row, accounts: Mapping[str, JobAccount], nodes: NodeAccounts) -> None:
    """Check speeds and nodes once all rows of an instant are applied."""
    for name, speed in nodes.speeds().items():
        accounts[name].check_speed(last, speed)
    nodes.check(last)


def _check_outcomes(outcomes: pd.DataFrame, accounts: Mapping[str, JobAccount], rules: Rules) -> None:
    """Report every cell that differs from the replay, and every job that is missing or too many."""
    checked = OUTCOMES.validate(outcomes, where="outcomes")
    names = checked["job_id"].tolist()
    for job_id in sorted(set(accounts) - set(names)):
        rules.report_job("outcomes", job_id, "has no row; expected one row for each job")
    seen: set[str] = set()
    for row in checked.to_dict("records"):
        job_id = str(row["job_id"])
        if job_id not in accounts or job_id in seen:
            rules.report_job("outcomes", job_id, "is not in the trace or occurs twice")
            continue
        seen.add(job_id)
        account = accounts[job_id]
        values = {
            "submit_time_s": account.job.submit_time_s,
            "n_gpus": float(account.job.n_gpus),
            "steps": float(account.job.steps),
            "is_guaranteed": float(account.job.is_guaranteed),
            "first_start_s": account.first_start_s,
            "finish_time_s": account.finish_s,
            "n_restarts": float(account.starts - 1),
            "attained_service_gpu_s": account.held_gpu_s,
            "waiting_time_s": account.waiting_s,
            "running_time_s": account.running_s,
            "restart_time_s": account.restart_s,
        }
        for name, expected in values.items():
            if not math.isclose(float(row[name]), expected, rel_tol=_RELATIVE, abs_tol=_RELATIVE):
                rules.report_job("outcomes", job_id, f"{name} is {row[name]!r}; expected {expected!r}")
