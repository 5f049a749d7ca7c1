"""What the released simulators do wrong, each with a switch, and the two modes."""

from collections.abc import Iterable
from enum import StrEnum

from makespan.errors import unknown_name

__all__ = ["DEFECTS", "MODES", "Defect", "repairs", "switches"]


class Defect(StrEnum):
    """A defect of the released simulators; the comment says what a repair does."""

    D1 = "D1"  # a second deadline stops a job that has just restarted: a new rendezvous replaces the old
    D2 = "D2"  # joined nodes idle until a removal: the job is planned anew where that pays within a horizon
    D3 = "D3"  # losing a node that nothing runs on restarts all: ignored
    D4 = "D4"  # averages end with the last step: they go from the first ready node to the end of the trace
    D5 = "D5"  # categories of time overlap: each millisecond counts once
    D6 = "D6"  # storage order of a heap decides whether a checkpoint fails, at twice its duration: time does
    D7 = "D7"  # a throughput of 0 becomes an endless step: the job waits for nodes
    D8 = "D8"  # the last event of a trace is dropped: it happens
    D9 = "D9"  # Fig. 10 shows zeros for Varuna on GPT-3 6.7B: it shows what was simulated
    D10 = "D10"  # below 15 nodes a job runs as fast as on 15: it waits for nodes
    D11 = "D11"  # steps go on while a job restarts: the step at a removal is lost
    D12 = "D12"  # rates and times of Varuna's steps get out of step: one record a step


DEFECTS = tuple(Defect)
"""All of them, in order."""

MODES = ("compat", "fixed")
"""As released, and with every defect repaired."""


def switches(text: str) -> frozenset[Defect]:
    """Read names of defects, separated by commas or spaces."""
    return frozenset(_defect(name) for name in text.replace(",", " ").split())


def _defect(name: str) -> Defect:
    try:
        return Defect(name.upper())
    except ValueError:
        raise unknown_name("defect", name, [defect.value for defect in DEFECTS]) from None


def repairs(mode: str, switched: Iterable[Defect] = ()) -> frozenset[Defect]:
    """Return what is repaired: nothing in ``compat`` and all in ``fixed``, but for what is switched."""
    if mode not in MODES:
        raise unknown_name("mode of a simulator", mode, MODES)
    return frozenset(switched) if mode == "compat" else frozenset(DEFECTS) - frozenset(switched)
