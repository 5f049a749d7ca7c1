"""Policies that choose only the order of a queue and keep requests: FIFO, SJF, SRTF, Tiresias and Synergy."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from math import inf

from makespan.hardware import ClusterSpec
from makespan.policies.base import Queue, acceptable, serve
from makespan.policies.placing import PlacementCache
from makespan.sim import Allocation, Catalogue, ClusterView, Configuration, Decision, JobView
from makespan.workloads import JobSpec

# --- FIFO ---


@dataclass(frozen=True, slots=True)
class Fifo:
    """Start jobs in the order of submission, as requested; a job that does not fit blocks all behind it.

    With ``is_serial`` only one job runs at a time.
    """

    name: str = "fifo"
    title: str = "FIFO"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = False
    references: tuple[str, ...] = ()
    is_serial: bool = False

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> PlacementCache:
        """Return the placement cache of the cluster."""
        return PlacementCache.on(cluster, catalogue)

    def decide(self, view: ClusterView, state: PlacementCache) -> tuple[Decision, PlacementCache]:
        """Start jobs from the head of the queue until one does not fit."""
        changes: dict[str, Allocation | None] = {}
        head = next(iter(view.pending), None)
        if head is None or (self.is_serial and view.running):
            return Decision(changes), state
        if view.catalogue.as_requested(head.spec)[0].n_gpus > view.n_free_gpus:
            return Decision(changes), state
        free = state.free_resources(view)
        for job in view.pending:
            fit = free.first_fit(view.catalogue.as_requested(job.spec))
            if fit is None:
                break
            free.take(*fit)
            changes[job.spec.job_id] = fit[0].on(fit[1])
            if self.is_serial:
                break
        return Decision(changes), state


# --- SJF and SRTF ---


@dataclass(frozen=True, slots=True)
class ShortestJobFirst:
    """Start waiting jobs by their run time as requested, shortest first; a job that fits may pass others."""

    max_stretch: float = 1.0  # ratio of predicted whole runs up to which a job accepts more nodes
    name: str = "sjf"
    title: str = "SJF"
    interval_s: float | None = None
    is_clairvoyant: bool = True
    honours_guarantees: bool = False
    references: tuple[str, ...] = (
        "W. E. Smith. Various optimizers for single-stage production. Naval Research Logistics "
        "Quarterly 3, 1956.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Queue:
        """Return an empty queue."""
        return Queue(PlacementCache.on(cluster, catalogue))

    def decide(self, view: ClusterView, state: Queue) -> tuple[Decision, Queue]:
        """Serve the queue by run time."""
        catalogue, delay_s, stretch = view.catalogue, view.restart_delay_s, self.max_stretch

        def order(job: JobView) -> tuple[float]:
            return (job.steps_left * job.step_s(catalogue.requested(job.spec)),)

        def options(job: JobView) -> tuple[Configuration, ...]:
            return acceptable(job, catalogue.as_requested(job.spec), job.steps_left, delay_s, stretch)

        return serve(view, order, options, queue=state), state


@dataclass(frozen=True, slots=True)
class ShortestRemainingTimeFirst:
    """Serve jobs by remaining time, and displace running jobs with more time left.

    A displaced job restarts later, so its time left must be longer by several restart delays.
    """

    min_advantage: float = 6.0  # restart delays by which the time left of a displaced job must be longer
    max_stretch: float = 1.0  # ratio of predicted whole runs up to which a job accepts more nodes
    name: str = "srtf"
    title: str = "SRTF"
    interval_s: float | None = None
    is_clairvoyant: bool = True
    honours_guarantees: bool = False
    references: tuple[str, ...] = (
        "L. Schrage. A proof of the optimality of the shortest remaining processing time discipline. "
        "Operations Research 16(3), 1968.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Queue:
        """Return an empty queue."""
        return Queue(PlacementCache.on(cluster, catalogue))

    def decide(self, view: ClusterView, state: Queue) -> tuple[Decision, Queue]:
        """Serve the queue by remaining time; the running job with most time left is displaced first."""
        catalogue, delay_s, stretch = view.catalogue, view.restart_delay_s, self.max_stretch
        left_s = {job: _remaining_time_s(job, view) for job in view.running}
        longest_first = sorted(view.running, key=lambda job: (-left_s[job], job.index))
        advantage_s = self.min_advantage * delay_s

        def order(job: JobView) -> tuple[float]:
            return (_remaining_time_s(job, view),)

        def options(job: JobView) -> tuple[Configuration, ...]:
            return acceptable(job, catalogue.as_requested(job.spec), job.steps_left, delay_s, stretch)

        def victims(job: JobView) -> list[JobView]:
            limit_s = _remaining_time_s(job, view) + advantage_s
            return list(takewhile(lambda other: left_s[other] > limit_s, longest_first))

        return serve(view, order, options, victims, state), state


def _remaining_time_s(job: JobView, view: ClusterView) -> float:
    """Return the predicted time for which a job still needs devices, its restart included [s]."""
    if job.allocation is None:
        step_s = job.step_s(view.catalogue.requested(job.spec))
        return view.restart_delay_s + job.steps_left * step_s
    step_s = job.step_s(job.allocation.configuration)
    return max(job.ready_time_s - view.time_s, 0.0) + job.steps_left * step_s


# --- Tiresias ---


@dataclass(frozen=True, slots=True)
class Tiresias:
    """Serve jobs by least attained service, discretised to a few queues.

    A job is demoted by one queue at each of ``thresholds_gpu_s``, and promoted to the first queue once it has
    waited for more than ``promotion`` times the time that it held devices; with None it is never promoted.

    With ``preempts_within_queue`` a job may also displace jobs of its own queue that were submitted later, as
    in the simulators released with Tiresias and Pollux: each decision ranks all jobs by queue and submission,
    and admits them in this order as long as there are devices for them, wherever these are.
    """

    thresholds_gpu_s: tuple[float, ...] = (14_400.0, 57_600.0)  # ascending
    promotion: float | None = None
    max_slowdown: float = 1.5  # ratio of predicted steps up to which a job accepts more nodes
    preempts_within_queue: bool = False
    name: str = "tiresias"
    title: str = "Tiresias"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = False
    references: tuple[str, ...] = (
        "J. Gu et al. Tiresias: a GPU cluster manager for distributed deep learning. NSDI 2019.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Queue:
        """Return an empty queue."""
        return Queue(PlacementCache.on(cluster, catalogue))

    def queue(self, job: JobView) -> int:
        """Return the number of a job's queue; queue 0 is served first."""
        level = bisect_right(self.thresholds_gpu_s, job.attained_service_gpu_s)
        if level and self.promotion is not None and job.allocation is None:
            held_s = job.running_time_s + job.restart_time_s
            if job.waiting_time_s > self.promotion * held_s:
                return 0
        return level

    def decide(self, view: ClusterView, state: Queue) -> tuple[Decision, Queue]:
        """Serve queue after queue, first started first, or first submitted first if that preempts."""
        catalogue = view.catalogue
        if self.preempts_within_queue:
            return self._admitted(view, state), state
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

        # Waiting jobs are promoted as time passes, so with promotion a kept queue would be out of order.
        kept = state if self.promotion is None else Queue(state.placements)
        return serve(view, order, options, victims, kept), state

    def _admitted(self, view: ClusterView, state: Queue) -> Decision:
        """Admit jobs by rank, preempt running jobs that are not admitted, and start those that wait."""

        def rank(job: JobView) -> tuple[int, float, int]:
            return (self.queue(job), job.spec.submit_time_s, job.index)

        free, n_left = state.free_resources(view), view.n_gpus
        changes: dict[str, Allocation | None] = {}
        starting = list[tuple[JobView, tuple[Configuration, ...]]]()
        demotions_s = list[float]()  # times at which admitted jobs change their queue
        for job in sorted((*view.running, *view.pending), key=rank):
            requested, held = view.catalogue.as_requested(job.spec), job.allocation
            n_gpus = requested[0].n_gpus if held is None else held.n_gpus
            if n_gpus <= n_left:
                n_left -= n_gpus
                level, service = rank(job)[0], job.attained_service_gpu_s
                left = (it - service for it in self.thresholds_gpu_s[level:])
                demotions_s += [view.time_s + it / n_gpus for it in left if it > 0][:1]
                if held is None:
                    starting.append((job, acceptable(job, requested, 1.0, 0.0, self.max_slowdown)))
            elif held is not None:
                free.give(held.configuration, held.nodes[::-1])
                changes[job.spec.job_id] = None
        for job, options in starting:
            fit = free.first_fit(options)
            if fit is not None:
                free.take(*fit)
                changes[job.spec.job_id] = fit[0].on(fit[1])
        # Nothing else happens when a job is demoted, so the policy asks to be called then.
        return Decision(changes, min(demotions_s, default=None))


def _since_s(job: JobView) -> float:
    return job.spec.submit_time_s if job.first_start_s is None else job.first_start_s


# --- Synergy ---


@dataclass(frozen=True, slots=True)
class CpuDemands:
    """Options of each kind of request, best first; ``fair_threads`` is the even share of each GPU."""

    fair_threads: int
    _known: dict[tuple[str, str, int], tuple[Configuration, ...]] = field(default_factory=dict)

    def options(self, spec: JobSpec, catalogue: Catalogue, policy: "Synergy") -> tuple[Configuration, ...]:
        """Return the options of a job: fewest nodes first, and on each placement its demand first."""
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
        """Yield the demand on one placement, then options with fewer threads, down to the fair share.

        The demand is the fewest threads with which a step takes at most ``1 + tolerance`` times the least.
        """
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

    Deviations: the original takes threads back from running jobs at no cost. Here every change costs a
    restart, so a job keeps the threads that it started with, and gets more than its fair share only if
    others use less than theirs. The original knows no guarantees; here a guaranteed job runs only in
    configurations that are known to be as fast as its request.
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
        """Return an empty table of demands and an empty queue."""
        fair_threads = min(node.cpu_threads // max(node.n_gpus, 1) for node in cluster.nodes)
        return CpuDemands(fair_threads), Queue(PlacementCache.on(cluster, catalogue))

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
            sure = tuple(item for item in tuned if job.guarantees(item))
            return sure or (view.catalogue.requested(job.spec),)

        return serve(view, order, options, queue=queue, kept_threads=demands.fair_threads), state


POLICIES = (
    Fifo(),
    Fifo("fifo-serial", "FIFO, one job at a time", is_serial=True),
    ShortestJobFirst(),
    ShortestRemainingTimeFirst(),
    Tiresias(),
    Tiresias(
        (57_600.0,),
        max_slowdown=inf,
        preempts_within_queue=True,
        name="tiresias-pollux",
        title="Tiresias, as in the simulator of Pollux",
    ),
    Synergy(),
)
