"""Synergy: devices as requested, CPU threads by how much a job gains from them, in FIFO order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from makespan.hardware import ClusterSpec
from makespan.policies._placing import Places
from makespan.policies._queue import Queue, serve
from makespan.sim import Catalogue, ClusterView, Configuration, Decision, JobView
from makespan.workloads import JobSpec

__all__ = ["POLICIES", "CpuDemands", "Synergy"]


@dataclass(frozen=True, slots=True)
class CpuDemands:
    """What each kind of request may run as, most wanted first; ``fair_threads`` belong to each GPU."""

    fair_threads: int
    _known: dict[tuple[str, str, int], tuple[Configuration, ...]] = field(default_factory=dict)

    def options(self, spec: JobSpec, catalogue: Catalogue, policy: "Synergy") -> tuple[Configuration, ...]:
        """Return the options of a job: fewest nodes first, on each placement first its demand."""
        key = (spec.workload, spec.plan, spec.n_gpus)
        if key not in self._known:
            reference = catalogue.requested(spec)
            variants = [
                item
                for item in catalogue.all(spec.workload)
                if item.n_gpus == reference.n_gpus and item.plan == reference.plan
            ]
            by_placement = groupby(variants, key=lambda item: item.counts)
            tuned = [list(self._tuned(list(group), policy.tolerance)) for _, group in by_placement]
            fastest_s = tuned[0][0].predicted_iter_time_s
            self._known[key] = tuple(
                item
                for group in tuned
                if group[0].predicted_iter_time_s <= policy.max_slowdown * fastest_s
                for item in group
            )
        return self._known[key]

    def _tuned(self, variants: Sequence[Configuration], tolerance: float) -> Iterator[Configuration]:
        """Yield the demand of one placement, then what is below it, down to what a fair share pays for."""
        limit_s = (1 + tolerance) * min(item.predicted_iter_time_s for item in variants)
        enough = [item for item in variants if item.predicted_iter_time_s <= limit_s]
        demand = min(enough, key=lambda item: item.cpu_threads)
        yield demand
        fair = [item.cpu_threads for item in variants if item.cpu_threads <= self.fair_threads]
        floor = max(fair, default=min(item.cpu_threads for item in variants))
        for item in sorted(variants, key=lambda item: -item.cpu_threads):
            if floor <= item.cpu_threads < demand.cpu_threads:
                yield item


@dataclass(frozen=True, slots=True)
class Synergy:
    """Start jobs in the order of submission, guaranteed ones first, with the fewest CPU threads that suffice.

    Deviations: the original takes threads back from running jobs at no cost; here any change costs a restart,
    so a job keeps what it started with, and takes more than a fair share only of what others left of theirs.
    It knows no guarantees; here a guaranteed job runs only as what is sure to be as fast as its request.
    """

    tolerance: float = 0.05  # loss of speed at which a job counts as running at its best
    max_slowdown: float = 1.25  # ratio of predicted steps up to which a job accepts more nodes
    name: str = "synergy"
    title: str = "Synergy"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = True
    references: tuple[str, ...] = (
        "J. Mohan et al. Looking beyond GPUs for DNN scheduling on multi-tenant clusters. OSDI 2022.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> tuple[CpuDemands, Queue]:
        """Return the table of demands and the queue, still empty."""
        fair_threads = min(node.cpu_threads // max(node.n_gpus, 1) for node in cluster.nodes)
        return CpuDemands(fair_threads), Queue(Places.on(cluster, catalogue))

    def decide(
        self, view: ClusterView, state: tuple[CpuDemands, Queue]
    ) -> tuple[Decision, tuple[CpuDemands, Queue]]:
        """Serve the queue by submission."""
        demands, queue = state

        def order(job: JobView) -> tuple[bool, float]:
            return (not job.spec.is_guaranteed, job.spec.submit_time_s)

        def options(job: JobView) -> tuple[Configuration, ...]:
            tuned = demands.options(job.spec, view.catalogue, self)
            if not job.spec.is_guaranteed:
                return tuned
            sure = tuple(item for item in tuned if job.assures(item))
            return sure or (view.catalogue.requested(job.spec),)

        return serve(view, order, options, queue=queue, kept_threads=demands.fair_threads), state


POLICIES = (Synergy(),)
