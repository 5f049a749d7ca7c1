"""Kill nodes of a run at chosen moments, each within a phase that it announced."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from makespan.oobleck.runtime import Event

__all__ = ["KINDS", "PHASES", "Fault", "Faults", "Killed"]

PHASES = {
    "forward": "compute", "backward": "compute", "reduction": "reduction", "prepared": "commit",
    "regroup": "recovery", "group build": "recovery", "copy": "recovery",
}  # fmt: skip
"""Phases in which a node can be killed, and what kind of moment that is."""
KINDS = tuple(dict.fromkeys(PHASES.values()))


@dataclass(frozen=True, slots=True)
class Fault:
    """One loss.

    Parameters
    ----------
    phase
        Where the victim is then; one of `PHASES`. In a phase of a recovery it is the next recovery after the
        fault before it.
    iteration
        Which iteration, or for a phase of a recovery any.
    victim
        Number of the victim among the nodes of the plan, modulo how many there are.
    delay_s
        From the beginning of the phase to the signal [s]; the victim waits for it at the end of the phase.
    number
        Signal, SIGKILL unless a hung process is wanted.
    follows
        Whether it belongs to the fault before it, as those in a phase of a recovery always do. Victims that
        follow each other in one phase are killed at once, ``delay_s`` of the first after all are in it.
    """

    phase: str
    iteration: int = -1
    victim: int = 0
    delay_s: float = 0.0
    number: int = signal.SIGKILL
    follows: bool = False

    @property
    def is_next(self) -> bool:
        """Whether it comes together with, or in the recovery from, the fault before it."""
        return self.follows or PHASES[self.phase] == "recovery"


@dataclass(slots=True)
class Killed:
    """What became of a fault, in seconds of the coordinator's clock; None for what did not happen.

    ``armed`` is the iteration that was next when the victim was chosen, ``phase`` the last that it announced
    before its connection ended, ``iteration`` the one that was begun first after that.
    """

    fault: Fault
    node: int
    armed: int
    killed_s: float | None = None
    phase: str = ""
    is_over: bool = False
    released_s: float | None = None
    first_s: float | None = None
    iteration: int = -1


class Faults:
    """Listens to a coordinator, and carries faults out in turn.

    Parameters
    ----------
    faults
        In order. One whose phase belongs to a recovery is armed by the fault before it, any other when its
        iteration is next and as many nodes train as at the start.
    waits_for
        Nodes that have to train before the next is armed; None for those of the start.
    """

    def __init__(self, faults: Sequence[Fault], waits_for: int | None = None) -> None:
        self.pending, self.done, self.n_nodes = list(faults), list[Killed](), waits_for
        self.hold: Callable[[int, str, int], None] = lambda node, phase, iteration: None
        self._armed: list[list[Killed]] = []  # of each list all are killed at once
        self._reached: set[int] = set()  # victims that are where they shall be killed
        self._pids: dict[int, int] = {}
        self._phases: dict[int, str] = {}
        self._nodes: list[int] = []

    def __call__(self, event: Event) -> None:
        """Take an event."""
        node, values = event.node, event.values
        match event.kind:
            case "hello" if node is not None:
                self._pids[node] = values["pid"]
            case "plan":
                self._nodes = sorted(one for part in values["work"]["plan"] for one in part["nodes"])
                self.n_nodes = self.n_nodes or len(self._nodes)
            case "resume":
                for one in self.done:
                    one.is_over |= bool(one.phase)
                self._arm(values["step"])
            case "commit":
                self._arm(values["iteration"] + 1)
            case "announce" if node is not None:
                self._phases[node] = values["phase"]
                self._strike(node, values["phase"], values["iteration"])
                if values["phase"] == "forward":
                    self._mark_first(event.time_s, values["iteration"])
            case "frozen":
                for one in self.done:
                    if one.phase and not one.is_over:
                        one.released_s = event.time_s
            case "lost":
                for one in self.done:
                    if one.node == node and not one.phase:
                        one.phase = self._phases.get(one.node, "")
                self._armed = [[one for one in group if one.node != node] for group in self._armed]
                self._kill_groups()

    @property
    def is_over(self) -> bool:
        """Whether training goes on after the last fault."""
        return not self.pending and not self._armed and all(one.first_s is not None for one in self.done)

    def _mark_first(self, time_s: float, iteration: int) -> None:
        for one in self.done:
            if one.is_over and one.first_s is None:
                one.first_s, one.iteration = time_s, iteration

    def _arm(self, iteration: int) -> None:
        """Choose the victim of the next fault, if its time has come, and of those that follow from it."""
        is_dying = any(not one.is_over for one in self.done)
        if not self.pending or self._armed or is_dying or len(self._nodes) < (self.n_nodes or 0):
            return
        if self.pending[0].iteration > iteration:
            return
        chosen: set[int] = set()
        self._reached.clear()
        while self.pending and (not chosen or self.pending[0].is_next):
            fault = self.pending.pop(0)
            left = [one for one in self._nodes if one not in chosen]
            victim = left[fault.victim % len(left)]
            chosen.add(victim)
            if not (fault.follows and self._armed and self._armed[-1][0].fault.phase == fault.phase):
                self._armed.append([])
            self._armed[-1].append(Killed(fault, victim, iteration))
            self.hold(victim, fault.phase, iteration)

    def _strike(self, node: int, phase: str, iteration: int) -> None:
        at = (node, phase, iteration)
        if any((one.node, one.fault.phase, one.armed) == at for group in self._armed for one in group):
            self._reached.add(node)
            self._kill_groups()

    def _kill_groups(self) -> None:
        """Kill those that are where they shall be killed, and so are all who shall die at once with them."""
        for group in self._armed:
            if group and self._reached.issuperset(one.node for one in group):
                self.done += group
                threading.Timer(group[0].fault.delay_s, self._kill, [group]).start()
        self._armed = [one for one in self._armed if not self._reached.issuperset(own.node for own in one)]

    def _kill(self, group: Sequence[Killed]) -> None:
        for one in group:
            one.killed_s = time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(self._pids[one.node], one.fault.number)
