"""How many microbatches each pipeline gets.

The published formulation gives equal ones to pipelines of one template, so that their times are as alike as
possible; it has no solution where the numbers do not divide. Ours gives every pipeline its own number.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from makespan.errors import InputError, unknown_name
from makespan.oobleck.planning._profile import PICOSECONDS
from makespan.oobleck.planning._template import PipelineTemplate

__all__ = [
    "BatchMode", "Estimator", "check_modes", "distribute", "least_time_by_program", "linear_times",
    "microbatches",
]  # fmt: skip

BatchMode = Literal["per_pipeline", "per_template"]
Estimator = Literal["1f1b", "compat"]

_CLOSE = 1e-9  # relative, where the radius of a search is rounded


def microbatches(global_batch_size: int, micro_batch_size: int) -> int:
    """Return the microbatches of an iteration; `InputError` if the batch cannot be cut into such."""
    if global_batch_size < 1 or micro_batch_size < 1 or global_batch_size % micro_batch_size:
        raise InputError(
            f"global batch of {global_batch_size} in microbatches of {micro_batch_size}; accepted: 1 or "
            "more, of which the second divides the first"
        )
    return global_batch_size // micro_batch_size


def check_modes(mode: str, estimator: str) -> None:
    """Refuse names that are not known."""
    if mode not in get_args(BatchMode):
        raise unknown_name("batch mode", mode, get_args(BatchMode))
    if estimator not in get_args(Estimator):
        raise unknown_name("estimator", estimator, get_args(Estimator))


def linear_times(
    templates: Sequence[PipelineTemplate], estimator: Estimator
) -> tuple[list[int], list[int], int]:
    """Return the time of one microbatch and of each further one, and how many of their unit a second has.

    ``1f1b``: all stages once, then the slowest; ``compat``: the cost over the number of stages, each time.
    Whole numbers, so that equal times are equal.
    """
    if estimator == "1f1b":
        stages = [[round(one.latency_s * PICOSECONDS) for one in template.stages] for template in templates]
        return [sum(one) for one in stages], [max(one) for one in stages], PICOSECONDS
    common = math.lcm(*(template.n_stages for template in templates))
    each = [round(one.time_s * PICOSECONDS) * (common // one.n_stages) for one in templates]
    return each, each, PICOSECONDS * common


def distribute(
    templates: Sequence[PipelineTemplate],
    n_microbatches: int,
    mode: BatchMode = "per_pipeline",
    estimator: Estimator = "1f1b",
) -> tuple[int, ...] | None:
    """Distribute the microbatches of an iteration over pipelines, as in Oobleck, section 4.2.

    Parameters
    ----------
    templates
        Template of each pipeline, (n_pipelines,).
    n_microbatches
        Of all pipelines together.
    mode
        ``per_pipeline``: every pipeline has its own number, so that the longest takes as little time as
        possible; ``per_template``: those of one template have the same, so that the squared deviations of
        the times of templates from their mean add up to as little as possible.
    estimator
        What a pipeline is taken to need, where each has its own number; see `linear_times`. The published
        formulation always counts as ``compat``.

    Returns
    -------
    tuple of int or None
        Microbatches of each pipeline, 1 or more, (n_pipelines,); None if there is no such distribution.

    Raises
    ------
    InputError
        There is no pipeline, or an unknown mode or estimator.
    """
    check_modes(mode, estimator)
    if not templates:
        raise InputError("a distribution over no pipeline; accepted: one or more")
    if n_microbatches < len(templates):
        return None
    if mode == "per_pipeline":
        return _least_longest(*linear_times(templates, estimator)[:2], n_microbatches)
    counts = Counter(templates)
    used = list(counts)
    each = [one.time_s / one.n_stages for one in used]
    found = _most_alike(each, [counts[one] for one in used], n_microbatches)
    return None if found is None else tuple(found[used.index(one)] for one in templates)


def _least_longest(first: Sequence[int], further: Sequence[int], n_microbatches: int) -> tuple[int, ...]:
    """Give one microbatch after the other to the pipeline that would be done with it first."""
    counts = [1] * len(first)
    queue = [(first[index] + further[index], index) for index in range(len(first))]
    heapq.heapify(queue)
    for _ in range(n_microbatches - len(first)):
        time, index = queue[0]
        counts[index] += 1
        heapq.heapreplace(queue, (time + further[index], index))
    return tuple(counts)


def least_time_by_program(
    templates: Sequence[PipelineTemplate], n_microbatches: int, estimator: Estimator = "1f1b"
) -> float:
    """Return the least time of the longest pipeline as an integer program finds it [s].

    The answer of a solver that knows nothing of how `distribute` goes about it.
    """
    first, further, unit = linear_times(templates, estimator)
    n_pipelines, scale = len(templates), max(first)
    steps = np.array(further) / scale
    # Variables are the microbatches of each pipeline and the longest time, which is minimised.
    longest = np.hstack([np.diag(steps), -np.ones((n_pipelines, 1))])
    together = np.append(np.ones(n_pipelines), 0.0)
    result = milp(
        np.append(np.zeros(n_pipelines), 1.0),
        constraints=[
            LinearConstraint(longest, -np.inf, steps - np.array(first) / scale),
            LinearConstraint(together, n_microbatches, n_microbatches),
        ],
        integrality=np.append(np.ones(n_pipelines), 0.0),
        bounds=Bounds(np.append(np.ones(n_pipelines), 0.0), np.inf),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        raise InputError(
            f"{n_microbatches} microbatches for {n_pipelines} pipelines; accepted: one each or more"
        )
    counts = [round(float(value)) for value in result.x[:n_pipelines]]
    return max(a + (b - 1) * c for a, b, c in zip(first, counts, further, strict=True)) / unit


# --- the published formulation ----------------------------------------------------------------------


def _most_alike(each: Sequence[float], counts: Sequence[int], n_microbatches: int) -> tuple[int, ...] | None:
    """Return microbatches of a pipeline of each template for which the times deviate least, None if none.

    Around the real-valued optimum the deviations are a quadratic form; all whole numbers within a radius are
    looked at, and the radius grows until there is one.
    """
    if not _adds_up(counts, n_microbatches):
        return None
    if len(each) == 1:
        return (n_microbatches // counts[0],)
    rest = min(range(len(each)), key=lambda index: counts[index])  # what the others leave, most often whole
    search = _Deviations(np.array(each), np.array(counts), n_microbatches, rest)
    radius = float(max(each)) ** 2
    while (found := search.best_within(radius)) is None:
        radius *= 4.0
    return found


def _adds_up(counts: Sequence[int], n_microbatches: int) -> bool:
    """Whether the batch can be cut so that pipelines of one template have equal numbers, of 1 or more."""
    left = n_microbatches - sum(counts)
    reachable = [True] + [False] * max(left, 0)
    for count in counts:
        for amount in range(count, left + 1):
            reachable[amount] = reachable[amount] or reachable[amount - count]
    return left >= 0 and reachable[left]


class _Deviations:
    """Whole numbers in the order of how much the times of templates deviate from their mean."""

    def __init__(
        self, each: NDArray[np.float64], counts: NDArray[np.int64], n_microbatches: int, rest: int
    ) -> None:
        self.each, self.counts, self.n_microbatches, self.rest = each, counts, n_microbatches, rest
        self.free = [index for index in range(len(each)) if index != rest]
        self.centre = n_microbatches / (each * np.sum(counts / each))
        times = np.diag(each)[:, self.free]
        times[rest] = -each[rest] * counts[self.free] / counts[rest]
        self.form = np.linalg.qr(times - times.mean(axis=0)).R

    def best_within(self, radius: float) -> tuple[int, ...] | None:
        """Return the numbers with the least sum of squared deviations up to a radius, None if none."""
        best: tuple[float, tuple[int, ...]] | None = None
        for numbers in self._within(radius, len(self.free) - 1, {}):
            left = self.n_microbatches - sum(int(self.counts[i]) * n for i, n in numbers.items())
            if left < self.counts[self.rest] or left % self.counts[self.rest]:
                continue
            whole = numbers | {self.rest: left // int(self.counts[self.rest])}
            found = tuple(whole[index] for index in range(len(self.each)))
            candidate = self._deviation(found), found
            if candidate[0] <= radius and (best is None or candidate < best):
                best = candidate
        return best[1] if best else None

    def _deviation(self, numbers: tuple[int, ...]) -> float:
        times = self.each * np.array(numbers)
        return float(np.sum((times - times.mean()) ** 2))

    def _within(self, radius: float, row: int, chosen: dict[int, int]) -> Iterator[dict[int, int]]:
        """Yield numbers of the free templates, the last first, whose deviations stay within a radius."""
        if row < 0:
            yield chosen
            return
        index = self.free[row]
        shift = sum(
            self.form[row, later] * (chosen[self.free[later]] - self.centre[self.free[later]])
            for later in range(row + 1, len(self.free))
        )
        middle = self.centre[index] - shift / self.form[row, row]
        reach = math.sqrt(max(radius, 0.0)) / abs(self.form[row, row])
        slack = _CLOSE * (1.0 + abs(middle) + reach)
        most = self.n_microbatches // int(self.counts[index])
        for number in range(
            max(1, math.ceil(middle - reach - slack)), min(most, math.floor(middle + reach + slack)) + 1
        ):
            spent = (self.form[row, row] * (number - middle)) ** 2
            yield from self._within(radius - spent, row - 1, chosen | {index: number})
