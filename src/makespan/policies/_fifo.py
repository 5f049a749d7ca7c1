"""FIFO: first in, first out, the plainest policy."""

from dataclasses import dataclass

from makespan.hardware import ClusterSpec
from makespan.policies._placing import Places
from makespan.sim import Allocation, Catalogue, ClusterView, Decision

__all__ = ["POLICIES", "Fifo"]


@dataclass(frozen=True, slots=True)
class Fifo:
    """Jobs start in the order of submission, as requested; one that does not fit stops all behind it.

    With ``is_serial`` each has the whole cluster to itself.
    """

    name: str = "fifo"
    title: str = "FIFO"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = False
    references: tuple[str, ...] = ()
    is_serial: bool = False

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Places:
        """Return where what fits, which does not change."""
        return Places.on(cluster, catalogue)

    def decide(self, view: ClusterView, state: Places) -> tuple[Decision, Places]:
        """Start jobs from the head of the queue until one does not fit."""
        changes: dict[str, Allocation | None] = {}
        head = next(iter(view.pending), None)
        if head is None or (self.is_serial and view.running):
            return Decision(changes), state
        if view.catalogue.as_requested(head.spec)[0].n_gpus > view.n_free_gpus:
            return Decision(changes), state
        room = state.room(view)
        for job in view.pending:
            found = room.first_fit(view.catalogue.as_requested(job.spec))
            if found is None:
                break
            room.take(*found)
            changes[job.spec.job_id] = found[0].on(found[1])
            if self.is_serial:
                break
        return Decision(changes), state


POLICIES = (Fifo(), Fifo("fifo-serial", "FIFO, one job at a time", is_serial=True))
