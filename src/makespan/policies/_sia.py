"""Sia: how many devices each job gets is one multiple-choice knapsack, solved anew whenever jobs change."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from makespan.hardware import ClusterSpec
from makespan.policies._knapsack import Menu, choose
from makespan.policies._pool import Pool
from makespan.policies._sizes import Size, Sizes
from makespan.sim import Allocation, Catalogue, ClusterView, Decision, JobView

__all__ = ["POLICIES", "Sia"]


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs that are alike, so that only the number of them at each size counts.

    Parameters
    ----------
    jobs
        Running jobs are alone in their group; waiting jobs of one kind share one, first come first.
    sizes
        Sizes of each of them.
    costs
        Contribution to the objective of a job at each size, less than that of a job without devices.
    """

    jobs: tuple[JobView, ...]
    sizes: tuple[Size, ...]
    costs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sia:
    """Adapt the devices of all jobs to each other; the kind of plan stays as requested.

    The worth of a size is its normalised speed, damped for a running job that would have to restart:
    with age *T* and *N* restarts of *D* seconds each, the factor is (T - N D) / (T + D). The sum
    over all jobs of worth to the power *p* is minimised, *p* < 0, where a job without devices
    counts as ``queueing_penalty``. Unlike in the original, jobs do not change their batch size
    (the plan keeps the global batch), so worth is throughput and not goodput.

    Parameters
    ----------
    power
        Exponent *p* of fairness; the more negative, the more the slowest jobs count.
    queueing_penalty
        What a job without devices contributes. Deviation: the original uses 1.1; with long restart
        delays a larger one shortens the average completion time.
    gap
        Accepted relative distance of a solution from the optimum.
    max_slowdown
        A job accepts a placement on more nodes if its steps are predicted at most this many times as
        long there.
    """

    power: float = -0.5
    queueing_penalty: float = 4.0
    gap: float = 0.01
    max_slowdown: float = 1.5
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
            waiting.setdefault(sizes.of(job.spec, catalogue), []).append(job)
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
        costs = tuple(
            self._cost(size.speed if size.n_gpus == held else max(damping, 1e-6) * size.speed)
            for size in sizes
        )
        return Group((job,), sizes, costs)

    def _cost(self, worth: float) -> float:
        return float(worth**self.power) - self.queueing_penalty


def _n_gpus(job: JobView) -> int:
    return 0 if job.allocation is None else job.allocation.configuration.n_gpus


def _realise(
    view: ClusterView, groups: Iterable[Group], counts: Iterable[Sequence[int]]
) -> dict[str, Allocation | None]:
    """Place what the knapsack chose; jobs whose size stays keep their nodes.

    Large jobs are placed first. A job that does not fit at its size keeps what it holds, or takes the
    largest smaller size that fits.
    """
    pool = Pool.of(view)
    targets: list[tuple[JobView, tuple[Size, ...]]] = []
    released: list[JobView] = []
    for group, numbers in zip(groups, counts, strict=True):
        chosen = [k for k in range(len(numbers))[::-1] for _ in range(numbers[k])]
        for position, job in enumerate(group.jobs):
            size = group.sizes[chosen[position]] if position < len(chosen) else None
            if size is not None and size.n_gpus == _n_gpus(job):
                continue
            if job.allocation is not None:
                released.append(job)
                pool.give(job.allocation)
            if size is not None:
                targets.append((job, group.sizes[: chosen[position] + 1]))
    changes: dict[str, Allocation | None] = {job.spec.job_id: None for job in released}
    targets.sort(key=lambda target: (-target[1][-1].n_gpus, target[0].index))
    left: list[tuple[JobView, tuple[Size, ...]]] = []
    for job, sizes in targets:
        if not _place(job, sizes[-1:], pool, changes):
            left.append((job, sizes))
    for job, sizes in left:
        if job.allocation is not None and pool.take_if_free(job.allocation):
            del changes[job.spec.job_id]
        else:
            _place(job, sizes[-2::-1], pool, changes)
    return changes


def _place(job: JobView, sizes: Sequence[Size], pool: Pool, changes: dict[str, Allocation | None]) -> bool:
    for size in sizes:
        allocation = pool.fit_first(size.options)
        if allocation is not None:
            pool.take(allocation)
            changes[job.spec.job_id] = allocation
            return True
    return False


POLICIES = (Sia(),)
