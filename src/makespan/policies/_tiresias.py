"""Tiresias: least attained service with discretised queues, for jobs of unknown length."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import takewhile

from makespan.hardware import ClusterSpec
from makespan.policies._placing import Places
from makespan.policies._queue import Queue, acceptable, serve
from makespan.sim import Catalogue, ClusterView, Configuration, Decision, JobView

__all__ = ["POLICIES", "Tiresias"]


@dataclass(frozen=True, slots=True)
class Tiresias:
    """Serve the jobs that have received the least device time, in a few queues.

    A job sinks a queue at each of ``thresholds_gpu_s``, and returns to the first once it has waited
    ``promotion`` times as long as it has run; None never promotes.
    """

    thresholds_gpu_s: tuple[float, ...] = (14_400.0, 57_600.0)  # ascending
    promotion: float | None = None
    max_slowdown: float = 1.5  # ratio of predicted steps up to which a job accepts more nodes
    name: str = "tiresias"
    title: str = "Tiresias"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = False
    references: tuple[str, ...] = (
        "J. Gu et al. Tiresias: a GPU cluster manager for distributed deep learning. NSDI 2019.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Queue:
        """Return the queue, still empty."""
        return Queue(Places.on(cluster, catalogue))

    def queue(self, job: JobView) -> int:
        """Return the queue of a job, 0 for the one that is served first."""
        level = bisect_right(self.thresholds_gpu_s, job.attained_service_gpu_s)
        if level and self.promotion is not None and job.allocation is None:
            held_s = job.running_time_s + job.restart_time_s
            if job.waiting_time_s > self.promotion * held_s:
                return 0
        return level

    def decide(self, view: ClusterView, state: Queue) -> tuple[Decision, Queue]:
        """Serve queue after queue, first started first."""
        catalogue = view.catalogue
        queues = {job: self.queue(job) for job in view.running}
        candidates = sorted(
            (job for job in view.running if queues[job]),
            key=lambda job: (-queues[job], -_since_s(job), job.index),
        )

        def order(job: JobView) -> tuple[int, float]:
            return (self.queue(job), _since_s(job))

        def options(job: JobView) -> tuple[Configuration, ...]:
            return acceptable(job, catalogue.as_requested(job.spec), 1.0, 0.0, self.max_slowdown)

        def victims(job: JobView) -> list[JobView]:
            level = self.queue(job)
            return list(takewhile(lambda other: queues[other] > level, candidates))

        kept = state if self.promotion is None else Queue(state.places)  # promotion comes with time alone
        return serve(view, order, options, victims, kept), state


def _since_s(job: JobView) -> float:
    return job.spec.submit_time_s if job.first_start_s is None else job.first_start_s


POLICIES = (Tiresias(),)
