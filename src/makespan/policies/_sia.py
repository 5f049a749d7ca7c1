"""Sia: how many devices each job gets is one multiple-choice knapsack, solved anew whenever jobs change."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from makespan.hardware import ClusterSpec
from makespan.policies._knapsack import Menu, choose
from makespan.policies._placing import Room, fastest_by_placement, keeps_plan
from makespan.sim import Allocation, Catalogue, ClusterView, Configuration, Decision, JobView
from makespan.workloads import JobSpec

__all__ = ["POLICIES", "Sia", "Sizes"]


@dataclass(frozen=True, slots=True)
class Size:
    """One device count of a kind of job: its configurations, fewest nodes first, and normalised speed."""

    n_gpus: int
    options: tuple[Configuration, ...]
    speed: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """All sizes of each kind of request, computed once a kind.

    Inside a node, counts are powers of two; beyond, whole nodes; what the job asked for is always among them.
    Left out are counts that bring no speed, and placements slower than ``max_slowdown`` allows.
    """

    gpus_per_node: int
    max_slowdown: float
    _known: dict[tuple[str, str, int], tuple[Size, ...]] = field(default_factory=dict)

    def of(self, spec: JobSpec, catalogue: Catalogue) -> tuple[Size, ...]:
        """Return the sizes of a job, smallest first, each faster than the one before."""
        key = (spec.workload, spec.plan, spec.n_gpus)
        if key not in self._known:
            self._known[key] = self._look_up(spec, catalogue)
        return self._known[key]

    def _look_up(self, spec: JobSpec, catalogue: Catalogue) -> tuple[Size, ...]:
        reference = catalogue.requested(spec)
        by_count: dict[int, list[Configuration]] = {}
        for item in fastest_by_placement(
            item for item in catalogue.all(reference.workload) if keeps_plan(reference, item)
        ):
            if item.n_gpus == reference.n_gpus or self._is_regular(item.n_gpus):
                by_count.setdefault(item.n_gpus, []).append(item)
        sizes: list[Size] = []
        for n_gpus, items in sorted(by_count.items()):
            step_s = items[0].predicted_iter_time_s
            base = sizes[0].options[0] if sizes else items[0]
            speed = base.n_gpus * base.predicted_iter_time_s / step_s
            if sizes and speed <= sizes[-1].speed:
                continue
            limit_s = self.max_slowdown * step_s
            options = tuple(item for item in items if item.predicted_iter_time_s <= limit_s)
            sizes.append(Size(n_gpus, options, speed))
        return tuple(sizes)

    def _is_regular(self, n_gpus: int) -> bool:
        if n_gpus >= self.gpus_per_node:
            return n_gpus % self.gpus_per_node == 0
        return n_gpus & (n_gpus - 1) == 0


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs that are alike, and the cost of each size less that of none; a running job is alone."""

    jobs: tuple[JobView, ...]
    sizes: tuple[Size, ...]
    costs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sia:
    """Adapt the devices of all jobs to each other; the kind of plan stays as requested.

    Minimises the sum over jobs of worth to the power *p* < 0; with age *T* and *N* restarts of *D* s each, a
    restart damps the worth by (T - N D) / (T + D). A job starts with ``start_factor`` times its least devices
    and grows to ``growth`` times what it holds in a round, or to the next size; None sets no limit.
    Deviation: jobs keep their batch size, so worth is throughput and not goodput. In the original
    ``queueing_penalty`` is 1.1, ``start_factor`` 1 and ``growth`` 2; here restart delays are long.
    """

    power: float = -0.5  # exponent of fairness; the more negative, the more the slowest jobs count
    queueing_penalty: float = 4.0  # what a job without devices contributes
    gap: float = 0.01  # accepted relative distance from the optimum
    max_slowdown: float = 1.5  # ratio of predicted steps up to which a job accepts more nodes
    start_factor: float | None = 1.0  # most devices of a start over the least that the job can have
    growth: float | None = None  # most devices after a change over those before
    name: str = "sia"
    title: str = "Sia"
    interval_s: float | None = 60.0
    is_clairvoyant: bool = False
    honours_guarantees: bool = False
    references: tuple[str, ...] = (
        "S. Jayaram Subramanya et al. Sia: heterogeneity-aware, goodput-optimized ML-cluster scheduling. "
        "SOSP 2023.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Sizes:
        """Return the table of sizes, still empty."""
        return Sizes(max(node.n_gpus for node in cluster.nodes), self.max_slowdown)

    def decide(self, view: ClusterView, state: Sizes) -> tuple[Decision, Sizes]:
        """Solve the knapsack, then find room for what it chose."""
        groups = self._groups(view, state)
        menus = [
            Menu(len(group.jobs), tuple(size.n_gpus for size in group.sizes), group.costs) for group in groups
        ]
        counts = choose(menus, view.n_gpus, self.gap)
        return Decision(_realise(view, groups, counts)), state

    def _groups(self, view: ClusterView, sizes: Sizes) -> list[Group]:
        catalogue = view.catalogue
        groups = [self._running(job, sizes.of(job.spec, catalogue), view) for job in view.running]
        waiting: dict[tuple[Size, ...], list[JobView]] = {}
        for job in view.pending:
            choices = sizes.of(job.spec, catalogue)
            waiting.setdefault(_limited(choices, choices[0].n_gpus, self.start_factor), []).append(job)
        for choices, jobs in waiting.items():
            costs = tuple(self._cost(size.speed) for size in choices)
            groups.append(Group(tuple(jobs), choices, costs))
        return groups

    def _running(self, job: JobView, sizes: tuple[Size, ...], view: ClusterView) -> Group:
        age_s = view.time_s - job.spec.submit_time_s
        delay_s = view.restart_delay_s
        lost_s = (job.restart_count + 1) * delay_s
        damping = max(age_s - lost_s, 0.0) / (age_s + delay_s) if age_s + delay_s > 0 else 1.0
        held = _n_gpus(job)
        sizes = _limited(sizes, held, self.growth)
        costs = tuple(
            self._cost(speed if size.n_gpus == held else max(damping, 1e-6) * speed)
            for size, speed in zip(sizes, _speeds(job, sizes), strict=True)
        )
        return Group((job,), sizes, costs)

    def _cost(self, worth: float) -> float:
        return float(worth**self.power) - self.queueing_penalty


def _limited(sizes: tuple[Size, ...], n_gpus: int, factor: float | None) -> tuple[Size, ...]:
    """Sizes up to a multiple of some devices, and at least the next one if the factor is more than 1."""
    if factor is None:
        return sizes
    most = factor * n_gpus
    if factor > 1:
        most = max(most, min((size.n_gpus for size in sizes if size.n_gpus > n_gpus), default=n_gpus))
    return tuple(size for size in sizes if size.n_gpus <= most) or sizes[:1]


def _speeds(job: JobView, sizes: tuple[Size, ...]) -> list[float]:
    """Speed of a running job at each size, by what it has observed as far as it has."""
    held = job.allocation
    least = sizes[0].n_gpus * job.step_s(sizes[0].options[0])
    return [
        least
        / job.step_s(
            size.options[0] if held is None or held.configuration not in size.options else held.configuration
        )
        for size in sizes
    ]


def _n_gpus(job: JobView) -> int:
    return 0 if job.allocation is None else job.allocation.configuration.n_gpus


def _realise(
    view: ClusterView, groups: Iterable[Group], counts: Iterable[Sequence[int]]
) -> dict[str, Allocation | None]:
    """Place what the knapsack chose, large jobs first; what does not fit stays or shrinks."""
    room = Room.of(view, is_tight=True)
    targets: list[tuple[JobView, tuple[Size, ...]]] = []
    changes: dict[str, Allocation | None] = {}
    for group, numbers in zip(groups, counts, strict=True):
        chosen = [k for k in range(len(numbers))[::-1] for _ in range(numbers[k])]
        for position, job in enumerate(group.jobs):
            size = group.sizes[chosen[position]] if position < len(chosen) else None
            if size is not None and size.n_gpus == _n_gpus(job):
                continue
            if job.allocation is not None:
                changes[job.spec.job_id] = None
                room.give(job.allocation.configuration, job.allocation.nodes[::-1])
            if size is not None:
                targets.append((job, group.sizes[: chosen[position] + 1]))
    targets.sort(key=lambda target: (-target[1][-1].n_gpus, target[0].index))
    left = [(job, sizes) for job, sizes in targets if not _place(job, sizes[-1:], room, changes)]
    for job, sizes in left:
        held = job.allocation
        if held is not None and room.take_if_free(held.configuration, held.nodes[::-1]):
            del changes[job.spec.job_id]
        else:
            _place(job, sizes[-2::-1], room, changes)
    return changes


def _place(job: JobView, sizes: Sequence[Size], room: Room, changes: dict[str, Allocation | None]) -> bool:
    for size in sizes:
        found = room.first_fit(size.options)
        if found is not None:
            room.take(*found)
            changes[job.spec.job_id] = found[0].on(found[1])
            return True
    return False


POLICIES = (Sia(),)
