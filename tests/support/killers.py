"""Losses, notices and arrivals at chosen phases of an elastic run, however fast or slow its processes are."""

import os
import signal
import time
from contextlib import suppress


class Killer:
    """Kills processes in phases that they announce: triples of phase, mini-batch and victims.

    Mini-batches that something happens in are held until it has happened, however fast the processes are.
    """

    def __init__(self, *faults, number=signal.SIGKILL):
        self.faults, self.number, self.pids = list(faults), number, {}
        self.events = []

    def hold(self, folder):
        """Hold mini-batches by files in a folder; return it for a job that looks there."""
        self.folder = folder
        folder.mkdir(exist_ok=True)
        for step in self.awaited():
            (folder / str(step)).touch()
        return str(folder)

    def awaited(self):
        """Mini-batches in which something has yet to happen."""
        return {held(phase, step) for phase, step, _ in self.faults}

    def release(self):
        for path in self.folder.iterdir():
            if int(path.name) not in self.awaited():
                path.unlink()

    def __call__(self, event):
        self.events.append(event)
        if event.kind == "hello":
            self.pids[event.node] = event.values["pid"]
        if event.kind != "announce" or not self.faults:
            return
        phase, step, victims = self.faults[0]
        if (event.values["phase"], event.values["iteration"]) == (phase, step) and event.node in victims:
            self.faults.pop(0)
            for victim in victims:
                with suppress(ProcessLookupError):
                    os.kill(self.pids[victim], self.number)
            self.release()


def held(phase, step):
    """Return the first mini-batch whose end comes after a phase that is announced with a number."""
    if phase in ("prepared", "committed"):  # numbers of transactions, which nobody need be held for
        return 0
    return step if phase in ("forward", "backward", "sum", "contexts", "done") else step + 1


class Gate(Killer):
    """Acts at events, too, and holds mini-batches until a process may enter: processes by mini-batch.

    ``acts`` are triples of phase, mini-batch and a function; each is called once, when a process announces
    that.
    """

    def __init__(self, *faults, enters=(), acts=()):
        super().__init__(*faults)
        self.node_by_step, self.acts = dict(enters), list(acts)

    def awaited(self):
        acts = {held(phase, step) for phase, step, _ in self.acts}
        return super().awaited() | acts | self.node_by_step.keys()

    def __call__(self, event):
        super().__call__(event)
        if event.kind == "resume":  # whoever was ready before is among the processes, or a spare
            ready = {each.node for each in self.events if each.kind == "ready"}
            for step in [step for step, node in self.node_by_step.items() if node in ready]:
                del self.node_by_step[step]
        announced = (event.values["phase"], event.values["iteration"]) if event.kind == "announce" else ()
        for act in [act for act in self.acts if act[:2] == announced]:
            self.acts.remove(act)
            act[2]()
        self.release()

    def notify(self, *nodes):
        for node in nodes:
            os.kill(self.pids[node], signal.SIGTERM)


def hold_mini_batches(folder):
    """Let no mini-batch end while a file with its number is there, unless somebody is to be let in or out.

    This is for the processes of a run, whose number of the current one is that of mini-batches done plus one.
    """
    from makespan.easyscale.worker import Ending, Generation

    requested = Generation.requested_ending

    def when_released(self):
        path = folder / str(self.done + 1)
        with suppress(RuntimeError):  # the processes have been asked to meet again
            while path.exists():
                if self.board.has(self.generation, self.boundary):
                    return max(Ending.REGROUP_DUE, requested(self))
                time.sleep(0.02)
        return requested(self)

    if requested.__name__ != "when_released":
        Generation.requested_ending = when_released
