"""FIFO: first in, first out, the plainest policies."""

from dataclasses import dataclass

from makespan.hardware import ClusterSpec
from makespan.policies._placing import Room, can_starve
from makespan.sim import Allocation, Catalogue, ClusterView, Decision

__all__ = ["POLICIES", "Fifo", "SerialFifo"]


@dataclass(frozen=True, slots=True)
class Fifo:
    """Jobs start in the order of submission, as requested; one that does not fit stops all behind it."""

    name: str = "fifo"
    title: str = "FIFO"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = False
    references: tuple[str, ...] = ()

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> bool:
        """Return whether nodes may run out of CPU threads or host memory."""
        return can_starve(cluster, catalogue)

    def decide(self, view: ClusterView, state: bool) -> tuple[Decision, bool]:
        """Start jobs from the head of the queue until one does not fit."""
        changes: dict[str, Allocation | None] = {}
        head = next(iter(view.pending), None)
        if head is None or view.catalogue.as_requested(head.spec)[0].n_gpus > view.n_free_gpus:
            return Decision(changes), state
        room = Room.of(view, is_tight=state)
        for job in view.pending:
            found = room.first_fit(view.catalogue.as_requested(job.spec))
            if found is None:
                break
            room.take(*found)
            changes[job.spec.job_id] = found[0].on(found[1])
        return Decision(changes), state


@dataclass(frozen=True, slots=True)
class SerialFifo:
    """One job at a time in the whole cluster, in the order of submission, as requested."""

    name: str = "fifo-serial"
    title: str = "FIFO, one job at a time"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = False
    references: tuple[str, ...] = ()

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> None:
        """Return nothing: the queue says it all."""

    def decide(self, view: ClusterView, state: None) -> tuple[Decision, None]:
        """Start the head of the queue once nothing runs."""
        head = next(iter(view.pending), None)
        if head is None or view.running:
            return Decision(), state
        found = Room.of(view, is_tight=True).first_fit(view.catalogue.as_requested(head.spec))
        return Decision({} if found is None else {head.spec.job_id: found[0].on(found[1])}), state


POLICIES = (Fifo(), SerialFifo())
