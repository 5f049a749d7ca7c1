"""The multiple-choice knapsack of adaptive scheduling: one size a job, no more devices than there are.

A greedy solution is taken where it is within the accepted gap of the linear relaxation. Elsewhere most
choices are settled by the price of a device in the relaxation: one whose reduced cost exceeds the distance
between the bound and a known solution cannot be part of a better one. What is left is solved exactly, by
dynamic programming over the devices, so that schedules do not depend on the version of a solver.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["Menu", "choose"]

_ROUNDING = 1e-9  # of sums of costs, absolute

_Costs = NDArray[np.float64]  # least cost of so many devices, exactly; infinite where they cannot be given


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
    menus: Sequence[Menu], kept: Sequence[Sequence[int]], certain: Sequence[bool], n_gpus: int
) -> list[list[int]] | None:
    """Best solution of the choices that are left, with the fewest devices; None if there is none."""
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
    tables: list[_Costs] = [_nothing(left)]
    doubled: list[list[_Costs]] = []
    for i in open_menus:
        doubled.append(_doubled(_one_job(menus[i], kept[i], certain[i], left), menus[i].n_jobs))
        for j in _bits(menus[i].n_jobs):
            tables.append(_sum(tables[-1], doubled[-1][j]))
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


def _nothing(n_gpus: int) -> _Costs:
    """No job: no devices, no cost."""
    costs = np.full(n_gpus + 1, np.inf)
    costs[0] = 0.0
    return costs


def _one_job(menu: Menu, choices: Sequence[int], is_certain: bool, n_gpus: int) -> _Costs:
    costs = np.full(n_gpus + 1, np.inf) if is_certain else _nothing(n_gpus)
    for k in choices:
        if menu.sizes[k] <= n_gpus:
            costs[menu.sizes[k]] = menu.costs[k]
    return costs


def _bits(number: int) -> list[int]:
    """Places of the ones of a number in base two, lowest first."""
    return [j for j in range(number.bit_length()) if number >> j & 1]


def _doubled(one: _Costs, n_jobs: int) -> list[_Costs]:
    """Costs of 1, 2, 4 ... equal jobs, as many as there are."""
    powers = [one]
    while len(powers) < n_jobs.bit_length():
        powers.append(_sum(powers[-1], powers[-1]))
    return powers


def _sum(a: _Costs, b: _Costs) -> _Costs:
    """Least cost of two sets of jobs together."""
    total = np.full_like(a, np.inf)
    for devices in np.flatnonzero(np.isfinite(b)):
        np.minimum(total[devices:], a[: len(a) - devices] + b[devices], out=total[devices:])
    return total


def _split(a: _Costs, b: _Costs, devices: int) -> int:
    """How many of so many devices the second set of jobs has where the cost of both is least."""
    return int(np.argmin(a[devices::-1] + b[: devices + 1]))


def _shares(powers: Sequence[_Costs], j: int, devices: int) -> Iterator[int]:
    """Devices of each job that is given any."""
    if not devices:
        return
    if j == 0:
        yield devices
        return
    second = _split(powers[j - 1], powers[j - 1], devices)
    yield from _shares(powers, j - 1, devices - second)
    yield from _shares(powers, j - 1, second)
