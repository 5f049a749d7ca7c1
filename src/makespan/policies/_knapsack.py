"""The multiple-choice knapsack of adaptive scheduling: one size a job, no more devices than there are.

A greedy solution is taken where it is within the accepted gap of the linear relaxation. Elsewhere most
variables are settled by the price of a device in the relaxation, before `scipy.optimize.milp` sees the rest:
a variable whose reduced cost exceeds the distance between the bound and a known solution cannot be part of
a better one.

Dynamic programming over the devices solves the same problem, but prefers other solutions among those within
the gap, and so leads to other schedules.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

__all__ = ["Menu", "choose"]

_ROUNDING = 1e-9  # of sums of costs, absolute


@dataclass(frozen=True, slots=True)
class Menu:
    """What each of ``n_jobs`` equal jobs may be given: devices, ascending, and cost relative to nothing."""

    n_jobs: int
    sizes: tuple[int, ...]
    costs: tuple[float, ...]


def choose(menus: Sequence[Menu], n_gpus: int, gap: float) -> list[list[int]]:
    """How many jobs of each menu take each choice, at the least total cost up to a relative gap."""
    counts = _greedy(menus, n_gpus)
    cost = _cost(menus, counts)
    price = _price(menus, n_gpus)
    least = [min(0.0, *(c + price * g for g, c in _choices(menu))) for menu in menus]
    bound = sum(menu.n_jobs * value for menu, value in zip(menus, least, strict=True)) - price * n_gpus
    slack = cost - bound - gap * abs(cost)
    if slack <= _ROUNDING:
        return counts
    kept = [
        [k for k, (g, c) in enumerate(_choices(menu)) if c + price * g - value <= slack]
        for menu, value in zip(menus, least, strict=True)
    ]
    certain = [-value > slack for value in least]
    better = _solve(menus, kept, certain, n_gpus, gap)
    return counts if better is None or _cost(menus, better) >= cost else better


def _choices(menu: Menu) -> Iterator[tuple[int, float]]:
    return zip(menu.sizes, menu.costs, strict=True)


def _cost(menus: Sequence[Menu], counts: Sequence[Sequence[int]]) -> float:
    return sum(
        number * cost
        for menu, numbers in zip(menus, counts, strict=True)
        for number, cost in zip(numbers, menu.costs, strict=True)
    )


def _hull(menu: Menu) -> list[tuple[int, float]]:
    """Choices that a linear programme would mix, by size, beginning with nothing."""
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
    return hull


def _price(menus: Sequence[Menu], n_gpus: int) -> float:
    """Cost that one more device would save in the linear relaxation."""
    steps = []
    for menu in menus:
        for (g0, c0), (g1, c1) in pairwise(_hull(menu)):
            steps.append(((c0 - c1) / (g1 - g0), (g1 - g0) * menu.n_jobs))
    left = n_gpus
    for saving, devices in sorted(steps, reverse=True):
        left -= devices
        if left < 0:
            return saving
    return 0.0


def _greedy(menus: Sequence[Menu], n_gpus: int) -> list[list[int]]:
    """Solution that always takes the step next that saves most a device and still fits."""
    # Place 0 of each row counts the jobs that are given nothing.
    counts = [[menu.n_jobs, *(0 for _ in menu.sizes)] for menu in menus]
    left = n_gpus
    steps = [step for i in range(len(menus)) for step in _steps(menus, i, 0)]
    heapify(steps)
    while steps and left > 0:
        _, i, old, new = heappop(steps)
        new = -new
        more = menus[i].sizes[new - 1] - (menus[i].sizes[old - 1] if old else 0)
        number = min(counts[i][old], left // more)
        if not number:  # what does not fit now never will, and jobs that come later bring their own steps
            continue
        if not counts[i][new]:
            for step in _steps(menus, i, new):
                heappush(steps, step)
        counts[i][old] -= number
        counts[i][new] += number
        left -= number * more
    return [row[1:] for row in counts]


def _steps(menus: Sequence[Menu], i: int, old: int) -> Iterator[tuple[float, int, int, int]]:
    """Next steps of the jobs of a menu: negated saving a device, menu, place, negated new place."""
    menu = menus[i]
    g0, c0 = (menu.sizes[old - 1], menu.costs[old - 1]) if old else (0, 0.0)
    for new in range(old + 1, len(menu.sizes) + 1):
        saved = c0 - menu.costs[new - 1]
        if saved > 0:
            yield -saved / (menu.sizes[new - 1] - g0), i, old, -new


def _solve(
    menus: Sequence[Menu], kept: Sequence[Sequence[int]], certain: Sequence[bool], n_gpus: int, gap: float
) -> list[list[int]] | None:
    """Solution of what is left; None if there is none."""
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
    places = [(i, k) for i in open_menus for k in kept[i]]
    if not places:
        return counts
    numbers = _milp(
        [(menus[i].sizes[k], menus[i].costs[k]) for i, k in places],
        [open_menus.index(i) for i, _ in places],
        [(menus[i].n_jobs if certain[i] else 0, menus[i].n_jobs) for i in open_menus],
        left,
        gap,
    )
    if numbers is None:
        return None
    for (i, k), number in zip(places, numbers, strict=True):
        counts[i][k] = number
    return counts


def _milp(
    choices: Sequence[tuple[int, float]],
    owners: Sequence[int],
    limits: Sequence[tuple[int, int]],
    n_gpus: int,
    gap: float,
) -> list[int] | None:
    sizes, costs = (np.array(values) for values in zip(*choices, strict=True))
    n = len(choices)
    matrix = np.zeros((len(limits) + 1, n))
    matrix[np.array(owners), np.arange(n)] = 1
    matrix[-1] = sizes
    lowest, highest = (np.array(values, dtype=float) for values in zip(*limits, strict=True))
    solution = milp(
        costs,
        integrality=np.ones(n, dtype=np.int64),
        bounds=Bounds(0, np.minimum(highest[np.array(owners)], n_gpus // sizes)),
        constraints=LinearConstraint(matrix, np.append(lowest, -np.inf), np.append(highest, n_gpus)),
        options={"mip_rel_gap": gap},
    )
    return None if solution.x is None else [int(value) for value in np.rint(solution.x)]
