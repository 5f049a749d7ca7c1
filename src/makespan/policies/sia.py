"""Sia: every decision chooses the devices of all jobs together, as one multiple-choice knapsack.

Each job takes one size, a number of devices of one type, and all jobs together no more devices than exist.
With several types this is left to a solver of integer programs. With one type, a greedy solution is accepted
if its cost is within a gap of a lower bound, the Lagrangian bound at the price of a device in the linear
relaxation. Otherwise the same price rules out most choices: a choice whose reduced cost exceeds the distance
between the bound and the greedy solution cannot be part of a better one. The remaining choices are solved
exactly, by dynamic programming over the devices, so these schedules do not depend on the version of a solver.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from makespan.hardware import ClusterSpec
from makespan.policies.placing import FreeResources, fastest_by_placement, keeps_plan
from makespan.sim import Allocation, Catalogue, ClusterView, Configuration, Decision, JobView
from makespan.workloads import JobSpec

# --- Knapsack ---

_ROUNDING = 1e-9  # of sums of costs, absolute
_Costs = NDArray[np.float64]  # least cost of using exactly so many devices; infinite if that is impossible


@dataclass(frozen=True, slots=True)
class Menu:
    """Choices of each of ``n_jobs`` equal jobs: devices, ascending, and cost relative to no devices."""

    n_jobs: int
    sizes: tuple[int, ...]
    costs: tuple[float, ...]


def choose(menus: Sequence[Menu], n_gpus: int, gap: float) -> list[list[int]]:
    """Return how many jobs of each menu take each choice: the least total cost, up to a relative gap."""
    counts = _greedy(menus, n_gpus)
    cost = _cost(menus, counts)
    price = _price(menus, n_gpus)
    # Lagrangian bound at this price: each job takes its best choice with devices paid for.
    least = [min(0.0, *(c + price * g for g, c in _choices(menu))) for menu in menus]
    bound = sum(menu.n_jobs * value for menu, value in zip(menus, least, strict=True)) - price * n_gpus
    slack = cost - bound - gap * abs(cost)
    if slack <= _ROUNDING:
        return counts
    # A choice that exceeds the best of its menu by more than the slack is part of no better solution. If that
    # also rules out the choice of no devices, the job is certain to get some.
    kept = [
        [k for k, (g, c) in enumerate(_choices(menu)) if c + price * g - value <= slack]
        for menu, value in zip(menus, least, strict=True)
    ]
    certain = [-value > slack for value in least]
    better = _solve(menus, kept, certain, n_gpus)
    return counts if better is None or _cost(menus, better) >= cost else better


def _choices(menu: Menu) -> Iterator[tuple[int, float]]:
    return zip(menu.sizes, menu.costs, strict=True)


def _cost(menus: Sequence[Menu], counts: Sequence[Sequence[int]]) -> float:
    return sum(
        number * cost
        for menu, numbers in zip(menus, counts, strict=True)
        for number, cost in zip(numbers, menu.costs, strict=True)
    )


def _price(menus: Sequence[Menu], n_gpus: int) -> float:
    """Return the cost that one more device would save in the linear relaxation."""
    steps = []
    for menu in menus:
        # Only the lower convex hull of the choices, from no devices on, can be part of a relaxed solution.
        hull = [(0, 0.0)]
        for g, c in _choices(menu):
            if c >= hull[-1][1]:
                continue
            while len(hull) > 1:
                (g0, c0), (g1, c1) = hull[-2:]
                if (c1 - c0) * (g - g1) < (c - c1) * (g1 - g0):
                    break
                hull.pop()
            hull.append((g, c))
        for (g0, c0), (g1, c1) in pairwise(hull):
            steps.append(((c0 - c1) / (g1 - g0), (g1 - g0) * menu.n_jobs))
    # The relaxation takes the steps of all hulls by their saving; the first that does not fit sets the price.
    left = n_gpus
    for saving, devices in sorted(steps, reverse=True):
        left -= devices
        if left < 0:
            return saving
    return 0.0


def _greedy(menus: Sequence[Menu], n_gpus: int) -> list[list[int]]:
    """Return the solution of repeatedly taking the step that saves most per device and still fits."""
    # Position 0 of each row counts the jobs without devices.
    counts = [[menu.n_jobs, *(0 for _ in menu.sizes)] for menu in menus]
    left = n_gpus
    steps = [step for i in range(len(menus)) for step in _steps(menus, i, 0)]
    heapify(steps)
    while steps and left > 0:
        _, i, old, new = heappop(steps)
        new = -new
        more = menus[i].sizes[new - 1] - (menus[i].sizes[old - 1] if old else 0)
        number = min(counts[i][old], left // more)
        # A step that does not fit now never will. One without jobs at its start is pushed again, as a step of
        # the jobs that arrive there.
        if not number:
            continue
        if not counts[i][new]:
            for step in _steps(menus, i, new):
                heappush(steps, step)
        counts[i][old] -= number
        counts[i][new] += number
        left -= number * more
    return [row[1:] for row in counts]


def _steps(menus: Sequence[Menu], i: int, old: int) -> Iterator[tuple[float, int, int, int]]:
    """Yield the steps of jobs at a position of a menu: negated saving per device, menu, old, negated new.

    The new position is negated so that a heap takes the larger of two steps with equal savings.
    """
    menu = menus[i]
    g0, c0 = (menu.sizes[old - 1], menu.costs[old - 1]) if old else (0, 0.0)
    for new in range(old + 1, len(menu.sizes) + 1):
        saved = c0 - menu.costs[new - 1]
        if saved > 0:
            yield -saved / (menu.sizes[new - 1] - g0), i, old, -new


def _solve(
    menus: Sequence[Menu], kept: Sequence[Sequence[int]], certain: Sequence[bool], n_gpus: int
) -> list[list[int]] | None:
    """Return the cheapest solution of the remaining choices, on the fewest devices; None if there is none."""
    counts = [[0] * len(menu.sizes) for menu in menus]
    left, open_menus = n_gpus, []
    for i, (menu, choices) in enumerate(zip(menus, kept, strict=True)):
        if certain[i] and len(choices) == 1:
            counts[i][choices[0]] = menu.n_jobs
            left -= menu.n_jobs * menu.sizes[choices[0]]
        elif choices:
            open_menus.append(i)
    if left < 0:
        return None
    # Equal jobs are added by the binary digits of their number: tables of 1, 2, 4 ... jobs, each the sum of
    # two of the one before. All partial tables are kept to trace the solution back.
    nothing = np.full(left + 1, np.inf)
    nothing[0] = 0.0
    tables: list[_Costs] = [nothing]
    doubled: list[list[_Costs]] = []
    for i in open_menus:
        single = np.full(left + 1, np.inf) if certain[i] else nothing.copy()
        for k in kept[i]:
            if menus[i].sizes[k] <= left:
                single[menus[i].sizes[k]] = menus[i].costs[k]
        powers = [single]
        while len(powers) < menus[i].n_jobs.bit_length():
            powers.append(_sum(powers[-1], powers[-1]))
        doubled.append(powers)
        for j in _bits(menus[i].n_jobs):
            tables.append(_sum(tables[-1], powers[j]))
    used = int(np.argmin(tables[-1]))
    if not np.isfinite(tables[-1][used]):
        return None
    for i, powers in zip(reversed(open_menus), reversed(doubled), strict=True):
        choice_of = {menus[i].sizes[k]: k for k in kept[i]}
        for j in reversed(_bits(menus[i].n_jobs)):
            tables.pop()
            share = _split(tables[-1], powers[j], used)
            used -= share
            for size in _shares(powers, j, share):
                counts[i][choice_of[size]] += 1
    return counts


def _bits(number: int) -> list[int]:
    """Return the positions of the set bits of a number, lowest first."""
    return [j for j in range(number.bit_length()) if number >> j & 1]


def _sum(a: _Costs, b: _Costs) -> _Costs:
    """Return the least cost of two sets of jobs together, for each number of devices."""
    total = np.full_like(a, np.inf)
    for devices in np.flatnonzero(np.isfinite(b)):
        np.minimum(total[devices:], a[: len(a) - devices] + b[devices], out=total[devices:])
    return total


def _split(a: _Costs, b: _Costs, devices: int) -> int:
    """Return the devices of the second of two sets of jobs that share ``devices`` at the least cost."""
    return int(np.argmin(a[devices::-1] + b[: devices + 1]))


def _shares(powers: Sequence[_Costs], j: int, devices: int) -> Iterator[int]:
    """Yield the devices of each of ``2**j`` equal jobs, without those that get none."""
    if not devices:
        return
    if j == 0:
        yield devices
        return
    second = _split(powers[j - 1], powers[j - 1], devices)
    yield from _shares(powers, j - 1, devices - second)
    yield from _shares(powers, j - 1, second)


# --- Policy ---


@dataclass(frozen=True, slots=True)
class Size:
    """A number of devices of a type, empty for any: configurations, fewest nodes first, normalised speed."""

    n_gpus: int
    gpu_type: str
    options: tuple[Configuration, ...]
    speed: float

    def is_held(self, job: JobView) -> bool:
        """Return whether a job holds as many devices of this type now."""
        held = job.allocation
        return held is not None and _size_of(held.configuration) == (self.n_gpus, self.gpu_type)


def _size_of(item: Configuration) -> tuple[int, str]:
    return item.n_gpus, item.types_by_count[0]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of each kind of request, computed once per kind.

    Device counts are powers of two within a node and multiples of a node beyond; the requested count is
    always considered. Left out are counts that are no faster than a smaller one of the same type, and
    placements more than ``max_slowdown`` times slower than the one with the fewest nodes.
    """

    gpus_per_node: int
    max_slowdown: float
    _known: dict[tuple[str, str, int], tuple[Size, ...]] = field(default_factory=dict)

    def of(self, spec: JobSpec, catalogue: Catalogue) -> tuple[Size, ...]:
        """Return the sizes of a job, fewest devices first, and of equally many the slowest first."""
        key = (spec.workload, spec.plan, spec.n_gpus)
        if key not in self._known:
            self._known[key] = self._look_up(spec, catalogue)
        return self._known[key]

    def _look_up(self, spec: JobSpec, catalogue: Catalogue) -> tuple[Size, ...]:
        reference = catalogue.requested(spec)
        by_size: dict[tuple[int, str], list[Configuration]] = {}
        for item in fastest_by_placement(
            item for item in catalogue.all(reference.workload) if keeps_plan(reference, item)
        ):
            if item.n_gpus == reference.n_gpus or self._is_regular(item.n_gpus):
                by_size.setdefault(_size_of(item), []).append(item)
        slowest_first = sorted(
            by_size.items(), key=lambda entry: (entry[0][0], -entry[1][0].predicted_iter_time_s)
        )
        sizes: list[Size] = []
        fastest: dict[str, float] = {}
        for (n_gpus, gpu_type), items in slowest_first:
            step_s = items[0].predicted_iter_time_s
            base = sizes[0].options[0] if sizes else items[0]
            speed = base.n_gpus * base.predicted_iter_time_s / step_s
            if speed <= fastest.get(gpu_type, 0.0):
                continue
            fastest[gpu_type] = speed
            limit_s = self.max_slowdown * step_s
            options = tuple(item for item in items if item.predicted_iter_time_s <= limit_s)
            sizes.append(Size(n_gpus, gpu_type, options, speed))
        return tuple(sizes)

    def _is_regular(self, n_gpus: int) -> bool:
        if n_gpus >= self.gpus_per_node:
            return n_gpus % self.gpus_per_node == 0
        return n_gpus & (n_gpus - 1) == 0


@dataclass(frozen=True, slots=True)
class Group:
    """Equal jobs, and the cost of each size relative to no devices; every running job is its own group."""

    jobs: tuple[JobView, ...]
    sizes: tuple[Size, ...]
    costs: tuple[float, ...]


_TIE = 1e-4  # relative, by which a size that a job holds counts as better than it is


def choose_by_type(groups: Sequence[Group], present: Mapping[str, int]) -> list[list[int]]:
    """Return how many jobs of each group take each size, with ``present`` devices of each type.

    The solution is optimal, because a gap, or a tie that is broken anew in each round, would restart jobs for
    nothing. Of equally good ones it keeps what jobs hold.
    """
    from scipy.optimize import LinearConstraint, milp  # loads slowly, and most clusters have one type

    choices = [(row, size) for row, group in enumerate(groups) for size in group.sizes]
    limits = dict(present)
    if any(not size.gpu_type for _, size in choices):
        limits[""] = sum(present.values())  # devices of any type, which those of all types count against
    row_of_type = {name: len(groups) + number for number, name in enumerate(limits)}
    uses = np.zeros((len(groups) + len(limits), len(choices)))
    for column, (row, size) in enumerate(choices):
        uses[row, column] = 1
        for name in {size.gpu_type, ""} & limits.keys():
            uses[row_of_type[name], column] = size.n_gpus
    costs = np.array([cost for group in groups for cost in group.costs])
    is_held = np.array([size.is_held(groups[row].jobs[0]) for row, size in choices])
    found = milp(
        np.where(is_held, costs * (1 + _TIE), costs),
        integrality=np.ones(len(choices), dtype=int),
        constraints=LinearConstraint(uses, ub=[*(len(group.jobs) for group in groups), *limits.values()]),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise RuntimeError(f"no devices for any job is a solution, but: {found.message}")
    numbers = iter(np.rint(found.x).astype(int).tolist())
    return [[next(numbers) for _ in group.sizes] for group in groups]


@dataclass(frozen=True, slots=True)
class Sia:
    """Choose the devices of all jobs together; the kind of plan stays as requested.

    The objective is the sum over jobs of normalised throughput to the power *p* < 0, to be minimised. A
    restart multiplies the throughput by (T - N D) / (T + D), for a job of age *T* and *N* restarts, the next
    one included, of *D* s each. A job starts with at most ``start_factor`` times its fewest devices, and
    grows in one decision to at most ``growth`` times what it holds, or to the next size; None sets no limit.

    Deviation: jobs keep their batch size, so the objective has throughput in place of goodput. In the
    original ``queueing_penalty`` is 1.1, ``start_factor`` 1 and ``growth`` 2; restart delays are longer here.
    """

    power: float = -0.5  # exponent of fairness; the more negative, the more the slowest jobs count
    queueing_penalty: float = 4.0  # contribution of a job without devices to the objective
    gap: float = 0.01  # accepted relative distance from the optimum
    max_slowdown: float = 1.25  # ratio of predicted steps up to which a job accepts more nodes
    start_factor: float | None = 1.0  # most devices of a start over the fewest that the job can have
    growth: float | None = 4.0  # most devices after a change over those before
    name: str = "sia"
    title: str = "Sia"
    interval_s: float = 60.0
    is_clairvoyant: bool = False
    honours_guarantees: bool = False
    references: tuple[str, ...] = (
        "S. Jayaram Subramanya et al. Sia: heterogeneity-aware, goodput-optimized ML-cluster scheduling. "
        "SOSP 2023.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Sizes:
        """Return an empty table of sizes."""
        return Sizes(max(node.n_gpus for node in cluster.nodes), self.max_slowdown)

    def decide(self, view: ClusterView, state: Sizes) -> tuple[Decision, Sizes]:
        """Solve the knapsack, then place the sizes that it chose."""
        groups = self._groups(view, state)
        changes = _realise(view, groups, self._counts(groups, view))
        # Damping ends as a job grows older, so the next round may change sizes even if nothing happens.
        may_change = any(len(group.sizes) > 1 for group in groups if group.jobs[0].allocation is not None)
        round_s = view.interval_s or self.interval_s
        again_s = (math.floor(view.time_s / round_s * (1 + 1e-12)) + 1) * round_s
        return Decision(changes, again_s if may_change or changes else None), state

    def _counts(self, groups: Sequence[Group], view: ClusterView) -> list[list[int]]:
        """Return how many jobs of each group take each size."""
        types = {size.gpu_type for group in groups for size in group.sizes}
        if len(types) > 1:
            return choose_by_type(groups, view.gpus_by_type)
        menus = [
            Menu(len(group.jobs), tuple(size.n_gpus for size in group.sizes), group.costs) for group in groups
        ]
        return choose(menus, view.gpus_by_type.get("".join(types), view.n_gpus), self.gap)

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
        present = None if job.allocation is None else job.allocation.configuration
        sizes = _limited(sizes, 0 if present is None else present.n_gpus, self.growth)
        # Speeds are relative to the smallest size; the size that the job holds counts on its present nodes.
        least_s = sizes[0].n_gpus * job.step_s(sizes[0].options[0])
        costs = []
        for size in sizes:
            item = size.options[0] if present is None or present not in size.options else present
            speed = least_s / job.step_s(item)
            costs.append(self._cost(speed if size.is_held(job) else max(damping, 1e-6) * speed))
        return Group((job,), sizes, tuple(costs))

    def _cost(self, worth: float) -> float:
        return float(worth**self.power) - self.queueing_penalty


def _limited(sizes: tuple[Size, ...], n_gpus: int, factor: float | None) -> tuple[Size, ...]:
    """Return the sizes up to a multiple of ``n_gpus`` devices, and the next size if the factor exceeds 1.

    The smallest of each type is always among them.
    """
    if factor is None:
        return sizes
    most = factor * n_gpus
    if factor > 1:
        most = max(most, min((size.n_gpus for size in sizes if size.n_gpus > n_gpus), default=n_gpus))
    smallest = {size.gpu_type: size for size in reversed(sizes)}
    return tuple(size for size in sizes if size.n_gpus <= most or size is smallest[size.gpu_type])


def _realise(
    view: ClusterView, groups: Iterable[Group], counts: Iterable[Sequence[int]]
) -> dict[str, Allocation | None]:
    """Place the chosen sizes, large jobs first; a job whose size fits on no nodes stays or shrinks.

    The knapsack counts devices and knows no nodes, so fragmentation can make a size impossible.
    """
    free = FreeResources.of(view, is_tight=True)
    targets: list[tuple[JobView, tuple[Size, ...]]] = []
    changes: dict[str, Allocation | None] = {}
    for group, numbers in zip(groups, counts, strict=True):
        # Of equal jobs, those submitted first get the largest sizes.
        chosen = [k for k in range(len(numbers))[::-1] for _ in range(numbers[k])]
        for position, job in enumerate(group.jobs):
            size = group.sizes[chosen[position]] if position < len(chosen) else None
            if size is not None and size.is_held(job):
                continue
            if job.allocation is not None:
                changes[job.spec.job_id] = None
                free.give(job.allocation.configuration, job.allocation.nodes[::-1])
            if size is not None:
                targets.append((job, group.sizes[: chosen[position] + 1]))
    targets.sort(key=lambda target: (-target[1][-1].n_gpus, target[0].index))
    left = [(job, sizes) for job, sizes in targets if not _place(job, sizes[-1:], free, changes)]
    for job, sizes in left:
        held = job.allocation
        if held is not None and free.take_if_free(held.configuration, held.nodes[::-1]):
            del changes[job.spec.job_id]
        else:
            _place(job, sizes[-2::-1], free, changes)
    return changes


def _place(
    job: JobView, sizes: Sequence[Size], free: FreeResources, changes: dict[str, Allocation | None]
) -> bool:
    for size in sizes:
        fit = free.first_fit(size.options)
        if fit is not None:
            free.take(*fit)
            changes[job.spec.job_id] = fit[0].on(fit[1])
            return True
    return False


POLICIES = (Sia(),)
