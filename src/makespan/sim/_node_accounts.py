"""What the validator is told, what it finds, and its accounts of each node."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from makespan.hardware import ClusterSpec
from makespan.sim._catalogue import Catalogue, Configuration
from makespan.sim._costs import RestartCost
from makespan.sim._sharing import IDLE_SHARE, LEAST_PACE

__all__ = ["SLACK", "NodeAccounts", "Row", "Rules", "Violation"]

_Job = tuple[int, str]  # its position by submission, and its name

SLACK = 1e-9  # of rounding, relative


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
    is_live: bool = False
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
                if amount > most + SLACK * max(spec.host_memory_bytes, 1.0) * (name[0] == "B"):
                    state = "" if self._is_up[node] else ", which is down"
                    message = f"node {node}{state}: {amount:g} {name} are held; accepted: at most {most:g}"
                    rule = "capacity" if self._is_up[node] else "failure"
                    self._rules.report(rule, row._replace(job_id=""), message)
            if message := self._crowding(node):
                self._rules.report("capacity", row._replace(job_id=""), message)
        self._touched.clear()

    def paces(self) -> dict[str, float]:
        """Return how fast guests on the nodes that changed in this instant must go, by job."""
        changed = {
            job for node in self._touched for job, (*_, is_guest) in self._here[node].items() if is_guest
        }
        found = dict.fromkeys(sorted(changed), 1.0)
        for node, here in enumerate(self._here):
            if not changed.isdisjoint(here):
                for job, pace in self._paces_on(node):
                    found[job] = min(found.get(job, 1.0), pace)
        return {job[1]: pace for job, pace in found.items() if job in changed}

    def _paces_on(self, node: int) -> Iterator[tuple[_Job, float]]:
        """Give each guest its devices one by one: the neediest chooses first, and where it is fastest."""
        gpu, here = self._nodes[node].gpu, self._here[node]
        most = (gpu.memory_bytes - gpu.reserved_bytes) * (1 + SLACK)
        held = {float(job[0]): item for job, (_, item, is_guest) in here.items() if not is_guest}
        free = Counter({float(job[0]): n for job, (n, _, is_guest) in here.items() if not is_guest})
        free[math.inf] = self._devices(node) - free.total()  # nobody's come last
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
                    yield job, LEAST_PACE
                    continue
                slowdown, holder = min(offers)
                free[holder] -= 1
                yield job, 1.0 / slowdown

    def _crowding(self, node: int) -> str:
        """Count, from the largest guests down, the devices with memory for them; return what is missing."""
        gpu, (holders, guests) = self._nodes[node].gpu, self._memory[node]
        most, n_guests = (gpu.memory_bytes - gpu.reserved_bytes) * (1 + SLACK), 0
        for own_bytes in sorted(+guests, reverse=True):
            n_guests += guests[own_bytes]
            n_crowded = sum(n for taken, n in holders.items() if taken + own_bytes > most)
            if n_guests > self._devices(node) - n_crowded:
                found = f"node {node}: too little memory for {n_guests} guest(s) of {own_bytes:g} B or more"
                return f"{found}; accepted: {most:g} B"
        return ""


def _slowdown(guest: Configuration, holder: Configuration | None) -> float:
    """Return how many times as long a step takes beside a holder or nobody, phase by phase."""
    if holder is None:
        return 1.0
    if guest.busy is None or holder.busy is None:
        return 1.0 / IDLE_SHARE
    computing, moving = guest.busy
    phases = (computing, holder.busy[0]), (moving, holder.busy[1]), (1.0 - computing - moving, 0.0)
    if any(own > 0 and taken >= 1.0 for own, taken in phases):
        return 1.0 / LEAST_PACE
    return min(sum(own / (1.0 - taken) for own, taken in phases if own), 1.0 / LEAST_PACE)
