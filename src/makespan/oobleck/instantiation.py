"""Choose how many pipelines of which template use all nodes, and how many microbatches each runs.

Times are compared as whole numbers, so that equal times are equal and ties are resolved the same way on
every machine. The published formulation gives pipelines of one template equal numbers of microbatches, such
that the times of templates deviate least; it has no solution where the numbers do not divide. The default
here gives every pipeline its own number, such that the longest takes the least time.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from makespan.arguments import check_range, typed
from makespan.emulator import pipeline_time_s
from makespan.errors import InfeasiblePlanError, InputError, unknown_name
from makespan.oobleck.interleaving import interleaved_time_s, linear_interleaved
from makespan.oobleck.plan import HybridPlan, Pipeline, PipelineTemplate, Stage, cut
from makespan.oobleck.profile import PICOSECONDS, ModelProfile
from makespan.oobleck.templates import Ints
from makespan.units import MS

# --- Simulated schedules ----------------------------------------------------------------------------

_SAME_TIMES = 0.01  # relative difference within which times are those of one profile, perhaps rounded


def check_profile(templates: Iterable[PipelineTemplate], profile: ModelProfile) -> None:
    """Reject a profile that is not the one from which templates were made.

    Raises
    ------
    InputError
        It has another number of layers, no exchange time for the GPUs of a stage, or other times.
    """
    sums = {1: [0.0, *accumulate(layer.forward_s + layer.backward_s for layer in profile.layers)]}
    for template in templates:
        where = f"template for {template.n_nodes} node(s)"
        if template.n_layers != profile.n_layers:
            raise InputError(
                f"profile {profile.name!r} has {profile.n_layers} layers; expected those of the {where}, "
                f"{template.n_layers}"
            )
        for stage in template.stages:
            if stage.n_gpus not in sums:
                sums[stage.n_gpus] = [0.0, *accumulate(_shared_s(profile, stage.n_gpus))]
            time_s = sums[stage.n_gpus][stage.end_layer] - sums[stage.n_gpus][stage.first_layer]
            slack_s = _SAME_TIMES * stage.latency_s + profile.n_layers / PICOSECONDS
            if abs(time_s - stage.latency_s) > slack_s:
                raise InputError(
                    f"profile {profile.name!r}: layers {stage.first_layer} to {stage.end_layer - 1} take "
                    f"{time_s / MS:.6g} ms; expected {stage.latency_s / MS:.6g} ms as in the {where}, which "
                    "was made from another profile"
                )


def _shared_s(profile: ModelProfile, n_gpus: int) -> Iterator[float]:
    """Yield forward and backward pass of each layer on several GPUs, with the exchange after each [s]."""
    for index, layer in enumerate(profile.layers):
        if n_gpus not in layer.allreduce_in_node_s:
            known = ", ".join(map(str, sorted(layer.allreduce_in_node_s))) or "none"
            raise InputError(
                f"profile {profile.name!r}: layer {index} has no allreduce_in_node_ms for {n_gpus} GPUs; it "
                f"has: {known}"
            )
        yield (layer.forward_s + layer.backward_s) / n_gpus + 2 * layer.allreduce_in_node_s[n_gpus]


def stage_passes_s(stage: Stage, profile: ModelProfile) -> tuple[float, float]:
    """Return forward and backward pass of one microbatch through a stage [s]."""
    layers = profile.layers[stage.first_layer : stage.end_layer]
    exchange = sum(layer.allreduce_in_node_s[stage.n_gpus] for layer in layers) if stage.n_gpus > 1 else 0.0
    forward = sum(layer.forward_s for layer in layers) / stage.n_gpus + exchange
    return forward, sum(layer.backward_s for layer in layers) / stage.n_gpus + exchange


@typed
def event_time_s(
    templates: Sequence[PipelineTemplate], n_microbatches: Sequence[int], profile: ModelProfile
) -> float:
    """Return the iteration time of pipelines by simulating their schedules [s].

    It is the time of the longest pipeline, without transfers between stages, and the wait for gradients of
    layer 0 after it.

    Parameters
    ----------
    templates, n_microbatches
        Template and microbatches of each pipeline, (n_pipelines,).
    profile
        Times of the layers from which the templates were made.

    Raises
    ------
    InputError
        The profile is another one, or has no exchange time for so many pipelines.
    """
    longest = max(schedule_times_s(templates, n_microbatches, profile))
    return longest + profile.sync_time_s(len(templates))


def schedule_times_s(
    templates: Sequence[PipelineTemplate], n_microbatches: Sequence[int], profile: ModelProfile
) -> tuple[float, ...]:
    """Return the time of each pipeline by simulating its schedule, without the wait for gradients [s].

    The schedule is 1F1B, or interleaved 1F1B where nodes run several stages.

    Parameters
    ----------
    templates, n_microbatches, profile
        See `event_time_s`.

    Returns
    -------
    tuple of float
        Time of each pipeline, (n_pipelines,).

    Raises
    ------
    InputError
        The profile is not the one from which the templates were made.
    """
    check_profile(dict.fromkeys(templates), profile)
    passes = {
        template: tuple(stage_passes_s(stage, profile) for stage in template.stages)
        for template in set(templates)
    }
    if len(templates) != len(n_microbatches):
        raise InputError(
            f"{len(templates)} templates and {len(n_microbatches)} numbers of microbatches; expected one each"
        )
    pairs = zip(templates, n_microbatches, strict=True)
    return tuple(_schedule_s(passes[template], template.interleave, count) for template, count in pairs)


@lru_cache(maxsize=4096)
def _schedule_s(passes: tuple[tuple[float, float], ...], interleave: int, n_microbatches: int) -> float:
    forward, backward = zip(*passes, strict=True)
    if interleave > 1:
        return interleaved_time_s(forward, backward, len(passes) // interleave, n_microbatches)
    return pipeline_time_s(forward, backward, n_microbatches)


# --- Microbatches of each pipeline ------------------------------------------------------------------

BatchMode = Literal["per_pipeline", "per_template"]
Estimator = Literal["1f1b", "compat"]
_CLOSE = 1e-9  # relative slack, because the bounds of a search within a radius are rounded


@typed
def microbatches(global_batch_size: int, micro_batch_size: int) -> int:
    """Return the microbatches per iteration; raise `InputError` if they do not divide the batch."""
    if global_batch_size < 1 or micro_batch_size < 1 or global_batch_size % micro_batch_size:
        raise InputError(
            f"global batch of {global_batch_size} in microbatches of {micro_batch_size}; expected 1 or "
            "more, of which the second divides the first"
        )
    return global_batch_size // micro_batch_size


def check_modes(mode: str, estimator: str) -> None:
    """Reject unknown names."""
    if mode not in get_args(BatchMode):
        raise unknown_name("batch mode", mode, get_args(BatchMode))
    if estimator not in get_args(Estimator):
        raise unknown_name("estimator", estimator, get_args(Estimator))


def linear_times(
    templates: Sequence[PipelineTemplate], estimator: Estimator
) -> tuple[list[int], list[int], int]:
    """Return the times of the first and of each further microbatch by template, and their units per second.

    ``1f1b``: all stages once, then the slowest, or the line of `linear_interleaved` where nodes run several;
    ``compat``: the cost over the number of stages, each time.
    """
    if estimator == "1f1b":
        first, further = list[int](), list[int]()
        for template in templates:
            latencies = [round(stage.latency_s * PICOSECONDS) for stage in template.stages]
            times = sum(latencies), max(latencies)
            if template.interleave > 1:
                times = linear_interleaved(template)
            first.append(times[0])
            further.append(times[1])
        return first, further, PICOSECONDS
    # A unit that the numbers of stages divide keeps the quotients whole.
    common = math.lcm(*(template.n_stages for template in templates))
    each = [round(template.time_s * PICOSECONDS) * (common // template.n_stages) for template in templates]
    return each, each, PICOSECONDS * common


@typed
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
        Microbatches of all pipelines together.
    mode
        ``per_pipeline``: every pipeline has its own number, which minimises the time of the longest;
        ``per_template``: pipelines of one template have the same number, which minimises the sum of squared
        deviations of the times of templates from their mean.
    estimator
        Estimate of the time of a pipeline in mode ``per_pipeline``, see `linear_times`. The published
        formulation always uses ``compat``.

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
        raise InputError("a distribution over no pipeline; expected one or more")
    if n_microbatches < len(templates):
        return None
    if mode == "per_template":
        n_pipelines = Counter(templates)
        used = list(n_pipelines)
        each = [template.time_s / template.n_stages for template in used]
        alike = _most_alike(each, [n_pipelines[template] for template in used], n_microbatches)
        return None if alike is None else tuple(alike[used.index(template)] for template in templates)
    # Greedy is exact here: each microbatch goes to the pipeline that would finish it first, and that time
    # only grows with the microbatches of a pipeline.
    first, further, _ = linear_times(templates, estimator)
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
    """Return the least time of the longest pipeline, found by an integer program [s].

    An independent check of `distribute`.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import, and planning does without

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
            f"{n_microbatches} microbatches for {n_pipelines} pipelines; expected one each or more"
        )
    counts = [round(float(value)) for value in result.x[:n_pipelines]]
    return max(a + (b - 1) * c for a, b, c in zip(first, counts, further, strict=True)) / unit


def _most_alike(each: Sequence[float], counts: Sequence[int], n_microbatches: int) -> tuple[int, ...] | None:
    """Return microbatches of a pipeline of each template for which the times deviate least, None if none.

    Around the real-valued optimum the deviations are a quadratic form; all whole numbers within a radius are
    tried, and the radius grows until there is one.
    """
    # Without any solution the radius would grow for ever: test first whether the numbers divide at all, with
    # 1 or more for each pipeline.
    left = n_microbatches - sum(counts)
    reachable = [True] + [False] * max(left, 0)
    for count in counts:
        for amount in range(count, left + 1):
            reachable[amount] = reachable[amount] or reachable[amount - count]
    if left < 0 or not reachable[left]:
        return None
    if len(each) == 1:
        return (n_microbatches // counts[0],)
    # One template takes what the others leave; the one with the fewest pipelines divides it most often.
    rest = min(range(len(each)), key=lambda index: counts[index])
    search = _Deviations(np.array(each), np.array(counts), n_microbatches, rest)
    radius = float(max(each)) ** 2
    while (numbers := search.best_within(radius)) is None:
        radius *= 4.0
    return numbers


class _Deviations:
    """Search for whole numbers of microbatches whose times deviate little from their mean.

    The deviations are a quadratic form around the real-valued optimum. Its triangular factor bounds one
    template after the other, as in a search for close lattice points.
    """

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
            ordered = tuple(whole[index] for index in range(len(self.each)))
            times = self.each * np.array(ordered)
            candidate = float(np.sum((times - times.mean()) ** 2)), ordered
            if candidate[0] <= radius and (best is None or candidate < best):
                best = candidate
        return best[1] if best else None

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


# --- Enumeration of plans ---------------------------------------------------------------------------


def _check_sizes(sizes: Sequence[int], n_nodes: int, f: int) -> None:
    if list(sizes) != sorted(set(sizes)) or not sizes or sizes[0] < 1:
        raise InputError(f"template sizes {list(sizes)}; expected one or more ascending numbers from 1 on")
    if n_nodes < 0 or f < 0:
        raise InputError(f"{n_nodes} nodes and f = {f}; expected 0 or more of both")


def enumerate_plans(sizes: Sequence[int], n_nodes: int, f: int = 0) -> Iterator[tuple[int, ...]]:
    """Yield all plans that use all nodes with f + 1 pipelines or more, as counts by template.

    Parameters
    ----------
    sizes
        Nodes of each template, ascending, (n_templates,).
    n_nodes, f
        Nodes to use, and nodes that may be lost at once.

    Yields
    ------
    tuple of int
        Pipelines of each template, (n_templates,); fewer of the largest first.

    Raises
    ------
    InputError
        Sizes are not ascending, or a number is negative.
    """
    _check_sizes(sizes, n_nodes, f)
    # Row k marks the numbers of nodes that the first k templates can use exactly: the recursion enters no
    # branch without a plan.
    reachable = [[left == 0 for left in range(n_nodes + 1)]]
    for size in sizes:
        row = list(reachable[-1])
        for count in range(size, n_nodes + 1):
            row[count] = row[count] or row[count - size]
        reachable.append(row)

    def below(n_templates: int, left: int) -> Iterator[tuple[int, ...]]:
        if n_templates == 0:
            yield ()
            return
        size = sizes[n_templates - 1]
        for count in range(left // size + 1):
            rest = left - count * size
            if reachable[n_templates - 1][rest]:
                for first in below(n_templates - 1, rest):
                    yield (*first, count)

    return (counts for counts in below(len(sizes), n_nodes) if sum(counts) >= f + 1)


def count_plans(sizes: Sequence[int], n_nodes: int, f: int = 0) -> int:
    """Return the number of plans without listing them; arguments and errors as for `enumerate_plans`."""
    _check_sizes(sizes, n_nodes, f)
    if sizes[0] * (f + 1) > n_nodes:
        return 0
    # Columns: plans of 0, 1, ... f pipelines, and all plans, by nodes used. Python integers never overflow.
    ways = np.zeros((n_nodes + 1, f + 2), dtype=object)
    ways[0, [0, -1]] = 1
    for size in sizes:
        for used in range(size, n_nodes + 1):
            ways[used, 1:-1] += ways[used - size, :-2]
            ways[used, -1] += ways[used - size, -1]
    return int(ways[n_nodes, -1] - ways[n_nodes, :-1].sum())


# --- Choice of a plan -------------------------------------------------------------------------------

_MOST_PLANS = 1_000_000
_LARGEST, MOST_MICROBATCHES = 100_000, 1_000_000  # nodes and microbatches of a plan
_AT_ONCE = 20_000  # plans that are priced together
_LISTED = 20_000  # most plans that are all listed and priced
_MOST_VISITED = 20_000  # most plans and parts of plans that a bounded search visits
_MOST_SLACK = 1e3  # relative slack beyond which a bounded search considers all plans
_NONE = -(1 << 60)  # microbatches by a time where there is no plan
_Key = tuple[int, int, int, tuple[int, ...]]  # time, distinct templates, minus pipelines, counts


@dataclass(frozen=True, slots=True)
class Instantiation:
    """Pipelines with their batches, before nodes are assigned.

    Parameters
    ----------
    templates, n_microbatches
        Template and microbatches of each pipeline, by ascending number of nodes, (n_pipelines,).
    iter_time_s
        Estimated iteration time, with the wait for gradients if there was a profile [s].
    """

    templates: tuple[PipelineTemplate, ...]
    n_microbatches: tuple[int, ...]
    iter_time_s: float

    @property
    def counts(self) -> dict[int, int]:
        """Return the number of pipelines by number of nodes."""
        return dict(Counter(template.n_nodes for template in self.templates))

    def on(self, nodes: Sequence[int]) -> HybridPlan:
        """Give each pipeline its nodes, in order; raise `InputError` unless their number fits."""
        needed = sum(template.n_nodes for template in self.templates)
        if len(set(nodes)) != needed or len(nodes) != needed:
            raise InputError(f"nodes {list(nodes)}; expected {needed} different ones")
        groups = cut(nodes, [template.n_nodes for template in self.templates])
        return HybridPlan(tuple(map(Pipeline, groups, self.templates, self.n_microbatches)))


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """The chosen plan, and the next best ones.

    Parameters
    ----------
    best, runners_up
        The fastest plan by its estimate, and the following ones in order.
    n_plans, n_infeasible
        Number of plans that use the nodes, and of those for which the batch cannot be distributed.
    is_exact
        True if no other plan comes before these. Otherwise the search was cut short: without a profile the
        time of the best plan is still the least of all, and only ties may be resolved differently.
    """

    best: Instantiation
    runners_up: tuple[Instantiation, ...]
    n_plans: int
    n_infeasible: int
    is_exact: bool = True


def estimated_time_s(
    templates: Sequence[PipelineTemplate], n_microbatches: Sequence[int], estimator: Estimator
) -> float:
    """Return the estimated time of the longest pipeline, without the wait for gradients [s].

    ``1f1b``: all stages once, then the slowest for each further microbatch, see `linear_times`; ``compat``:
    the whole cost of a template for each microbatch, as the artifact compares plans.
    """
    return _estimate(templates, n_microbatches, estimator) / PICOSECONDS


def _estimate(
    templates: Sequence[PipelineTemplate], n_microbatches: Sequence[int], estimator: Estimator
) -> int:
    if estimator == "compat":
        first = further = [round(template.time_s * PICOSECONDS) for template in templates]
    else:
        first, further, _ = linear_times(templates, estimator)
    return max(a + (count - 1) * b for a, b, count in zip(first, further, n_microbatches, strict=True))


@typed
def choose_plan(
    templates: Mapping[int, PipelineTemplate],
    n_nodes: int,
    f: int,
    n_microbatches: int,
    batch_mode: BatchMode = "per_pipeline",
    estimator: Estimator = "1f1b",
    profile: ModelProfile | None = None,
    n_runners_up: int = 0,
) -> PlanChoice:
    """Choose the pipelines that use all nodes and take the least time, as in Oobleck, section 4.2.

    ``per_pipeline`` with ``1f1b`` is a bounded search that takes about a second for 1,024 nodes: it finds the
    least time by dynamic programming, and lists the plans that have it. Other modes price every plan.

    Parameters
    ----------
    templates
        Templates by number of nodes.
    n_nodes, f
        Nodes to use, by f + 1 pipelines or more.
    n_microbatches, batch_mode, estimator
        Microbatches per iteration, and their distribution: ``per_pipeline`` with ``1f1b`` gives the least
        estimated time of all plans, ``per_template`` with ``compat`` the published choice; see `distribute`
        and `estimated_time_s`.
    profile, n_runners_up
        Times of the layers, to add the wait for gradients (None for no wait); number of next best plans to
        return.

    Returns
    -------
    PlanChoice
        Ties in time go to the plan with fewer distinct templates, then with more pipelines, then with fewer
        of the smallest templates.

    Raises
    ------
    InputError
        No template, an unknown name, more than a million plans in a mode that prices every plan, or a
        profile that is not the one of the templates or has no exchange time.
    InfeasiblePlanError
        No plan uses all nodes, or the batch can be distributed in none of them.
    """
    check_modes(batch_mode, estimator)
    check_range("n_nodes", n_nodes, 1, _LARGEST)
    check_range("f", f)
    check_range("n_microbatches", n_microbatches, 1, MOST_MICROBATCHES)
    check_range("n_runners_up", n_runners_up)
    used = [templates[size] for size in sorted(templates)]
    if profile is not None:
        check_profile(used, profile)
    sizes = [template.n_nodes for template in used]
    n_plans = count_plans(sizes, n_nodes, f)
    is_monotone = batch_mode == "per_pipeline" and estimator == "1f1b"
    bounded = None
    if is_monotone and n_plans > _LISTED:
        bounded = _Bounded(used, n_nodes, f, n_microbatches, profile).ranked(n_runners_up + 1)
    if bounded is not None and (bounded[1] or n_plans > _MOST_PLANS):
        keys, is_exact = bounded
        n_infeasible = count_plans(sizes, n_nodes, max(f, n_microbatches))
    else:
        if n_plans > _MOST_PLANS:
            raise InputError(
                f"{n_plans} plans of templates for {sizes} nodes use {n_nodes}; expected at most "
                f"{_MOST_PLANS}, fewer templates have fewer"
            )
        plans = list(enumerate_plans(sizes, n_nodes, f))
        times: list[int | None] = []
        if is_monotone:
            times = _least_times(used, plans, n_microbatches)
        else:
            for counts in plans:
                each = _each(used, counts)
                batches = distribute(each, n_microbatches, batch_mode, estimator)
                times.append(None if batches is None else _estimate(each, batches, estimator))
        keys, is_exact = _ranked(times, plans, profile), True
        n_infeasible = n_plans - len(keys)
    if not keys:
        text = f"{n_plans} plans of templates for {sizes} nodes use {n_nodes} with {f + 1} pipelines or more"
        raise InfeasiblePlanError(f"{text}; none takes {n_microbatches} microbatches {batch_mode}")
    chosen = []
    for time, *_, counts in keys[: n_runners_up + 1]:
        each = _each(used, counts)
        batches = distribute(each, n_microbatches, batch_mode, estimator) or ()
        chosen.append(Instantiation(each, batches, time / PICOSECONDS))
    return PlanChoice(chosen[0], tuple(chosen[1:]), n_plans, n_infeasible, is_exact)


def _ranked(
    times: Sequence[int | None], plans: Sequence[tuple[int, ...]], profile: ModelProfile | None
) -> list[_Key]:
    """Return the keys of plans, the best first; plans without a time are left out."""
    return sorted(
        (time + _sync(profile, sum(counts)), sum(map(bool, counts)), -sum(counts), counts)
        for time, counts in zip(times, plans, strict=True)
        if time is not None
    )


class _Bounded:
    """Search for the fastest plans among more than can be listed.

    A plan is done by a time if its pipelines finish all microbatches by then, and the number that a pipeline
    finishes depends on its template alone. So the most that pipelines on a number of nodes finish is a
    knapsack problem, and bisection finds the least time of all plans. The plans with this time are then
    listed, size by size; every partial plan that the knapsack excludes is pruned.
    """

    def __init__(
        self,
        used: Sequence[PipelineTemplate],
        n_nodes: int,
        f: int,
        n_microbatches: int,
        profile: ModelProfile | None,
    ) -> None:
        self._used, self._n_nodes, self._n_microbatches = used, n_nodes, n_microbatches
        self._sizes = [template.n_nodes for template in used]
        first, further, _ = linear_times(used, "1f1b")
        self._first, self._further = np.array(first, dtype=np.int64), np.array(further, dtype=np.int64)
        # Pipelines that the nodes allow, and those of them that f and the microbatches allow. If they differ,
        # some plans have too few or too many pipelines, and the knapsack must count pipelines as well.
        fewest, most = -(-n_nodes // self._sizes[-1]), n_nodes // self._sizes[0]
        self._fewest, self._most = max(f + 1, fewest), min(n_microbatches, most)
        self._counts_pipelines = (self._fewest, self._most) != (fewest, most)
        self._longest = max(first) + n_microbatches * max(further)
        self._profile = profile

    def ranked(self, n_wanted: int) -> tuple[list[_Key], bool]:
        """Return the keys of the best plans, and True if no other plan comes before them."""
        if self._fewest > self._most:
            return [], True
        least = self._least_time()
        if least is None:
            return [], True
        least_sync = min(_sync(self._profile, count) for count in range(self._fewest, self._most + 1))
        limit, slack, candidates = least, 1e-4, list[tuple[int, ...]]()
        while True:
            plans, is_whole = self._done_by(limit)
            candidates = plans if is_whole else [*candidates, *plans, *self._even(), self._fastest(least)]
            keys = self._priced(candidates)
            last = keys[n_wanted - 1][0] if len(keys) >= n_wanted else None
            if not is_whole or limit >= self._longest or (last is not None and limit + least_sync >= last):
                return keys, is_whole
            # The order counts the wait for gradients, and more plans may be wanted: list slower ones too.
            limit = int(least * (1 + slack)) if last is None else last - least_sync
            slack *= 10
            limit = self._longest if slack > _MOST_SLACK else min(limit, self._longest)

    def _priced(self, plans: Sequence[tuple[int, ...]]) -> list[_Key]:
        listed = sorted(set(plans))
        return _ranked(_least_times(self._used, listed, self._n_microbatches), listed, self._profile)

    def _finished(self, time: int) -> list[int]:
        """Return the microbatches that a pipeline of each template finishes by a time."""
        each = np.minimum((time - self._first) // self._further + 1, self._n_microbatches)
        return [int(count) for count in np.where(time >= self._first, each, _NONE)]

    def _most_finished(self, finished: Sequence[int]) -> list[Ints]:
        """Return the most that pipelines of the first templates finish, by the nodes that they use exactly.

        Entry k is the knapsack of the first k templates, (n_nodes + 1,).
        """
        row = np.full(self._n_nodes + 1, _NONE, dtype=np.int64)
        row[0] = 0
        rows = [row]
        for size, count in zip(self._sizes, finished, strict=True):
            if count > 0:
                # Numbers of nodes that differ by multiples of the size form a column. Along it, the best
                # number of further pipelines is a running maximum once their linear gain is subtracted.
                n_rows = -(-len(row) // size)
                block = np.full(n_rows * size, _NONE, dtype=np.int64)
                block[: len(row)] = row
                gained = count * np.arange(n_rows, dtype=np.int64)[:, None]
                block = np.maximum.accumulate(block.reshape(n_rows, size) - gained, axis=0) + gained
                row = block.reshape(-1)[: len(row)]
                row = np.where(row < 0, _NONE, row)
            rows.append(row)
        return rows

    def _is_done(self, time: int) -> bool:
        """Tell whether some plan is done by a time."""
        finished = self._finished(time)
        if self._most_finished(finished)[-1][-1] < self._n_microbatches:
            return False
        if not self._counts_pipelines:
            return True
        return any(done for done, _ in self._by_pipelines(finished))

    def _by_pipelines(self, finished: Sequence[int]) -> Iterator[tuple[bool, Ints]]:
        """Yield for 1, 2, ... pipelines if they finish all, and the template of the last by nodes used."""
        row = np.full(self._n_nodes + 1, _NONE, dtype=np.int64)
        row[0] = 0
        for n_pipelines in range(1, self._most + 1):
            longer, last = np.full_like(row, _NONE), np.zeros_like(row)
            for place, (size, count) in enumerate(zip(self._sizes, finished, strict=True)):
                if count > 0 and size < len(row):
                    more = row[: len(row) - size] + count
                    is_better = more > longer[size:]
                    longer[size:][is_better] = more[is_better]
                    last[size:][is_better] = place
            row = longer
            yield n_pipelines >= self._fewest and bool(row[-1] >= self._n_microbatches), last

    def _fastest(self, time: int) -> tuple[int, ...]:
        """Return a plan that is done by a time, of which `_is_done` holds."""
        chosen = list[Ints]()
        for done, last in self._by_pipelines(self._finished(time)):
            chosen.append(last)
            if done:
                break
        counts, nodes = [0] * len(self._sizes), self._n_nodes
        for last in reversed(chosen):
            place = int(last[nodes])
            counts[place] += 1
            nodes -= self._sizes[place]
        return tuple(counts)

    def _least_time(self) -> int | None:
        """Return the least time of all plans by bisection; None if no plan takes the microbatches."""
        low, high = int(self._first.min()), self._longest
        even = self._priced(self._even()) if self._profile is None else []
        high = min(high, even[0][0]) if even else high
        if not self._is_done(high):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_done(middle) else (middle + 1, high)
        return low

    def _even(self) -> list[tuple[int, ...]]:
        """Return the plans whose pipelines are as equal as possible, one for each number of pipelines."""
        places = {size: place for place, size in enumerate(self._sizes)}
        plans = []
        for n_pipelines in range(self._fewest, self._most + 1):
            size, n_larger = divmod(self._n_nodes, n_pipelines)
            if size in places and (not n_larger or size + 1 in places):
                counts = [0] * len(self._sizes)
                counts[places[size]] = n_pipelines - n_larger
                if n_larger:
                    counts[places[size + 1]] = n_larger
                plans.append(tuple(counts))
        return plans

    def _done_by(self, time: int) -> tuple[list[tuple[int, ...]], bool]:
        """Return plans that are done by a time, and True if these are all."""
        finished = self._finished(time)
        most = self._most_finished(finished)
        plans, n_visited = list[tuple[int, ...]](), 0
        # Number of templates left, nodes left, microbatches still to finish, pipelines, counts of the others.
        todo = [(len(self._sizes), self._n_nodes, self._n_microbatches, 0, tuple[int, ...]())]
        while todo and n_visited < _MOST_VISITED:
            n_visited += 1
            n_left, nodes, missing, n_pipelines, counts = todo.pop()
            if n_left == 0:
                if nodes == 0 and self._fewest <= n_pipelines <= self._most:
                    plans.append(counts)
                continue
            size, count = self._sizes[n_left - 1], finished[n_left - 1]
            tried = np.arange(nodes // size + 1 if count > 0 else 1)
            rest = nodes - size * tried
            # Prune what the templates left cannot finish, and what leads to too many or too few pipelines.
            fits = most[n_left - 1][rest] + tried * max(count, 0) >= missing
            fits &= n_pipelines + tried <= self._most
            fits &= n_pipelines + tried + rest // self._sizes[0] >= self._fewest
            for number in reversed(tried[fits].tolist()):  # those with the fewest large pipelines come first
                left = missing - number * max(count, 0)
                todo.append(
                    (n_left - 1, nodes - size * number, left, n_pipelines + number, (number, *counts))
                )
        return plans, not todo


def _each(templates: Sequence[PipelineTemplate], counts: Sequence[int]) -> tuple[PipelineTemplate, ...]:
    return tuple(template for template, count in zip(templates, counts, strict=True) for _ in range(count))


def _sync(profile: ModelProfile | None, n_pipelines: int) -> int:
    return 0 if profile is None else round(profile.sync_time_s(n_pipelines) * PICOSECONDS)


def _least_times(
    used: Sequence[PipelineTemplate], plans: Sequence[tuple[int, ...]], n_microbatches: int
) -> list[int | None]:
    """Return the time of each plan under its best distribution; None for more pipelines than microbatches.

    Bisection finds the least time by which the pipelines finish all microbatches, for thousands of plans at
    once; it is the time of the longest pipeline in the distribution of `distribute`.
    """
    if not plans:
        return []
    first, further, _ = (np.array(times, dtype=np.int64) for times in linear_times(used, "1f1b"))
    times: list[int | None] = []
    for start in range(0, len(plans), _AT_ONCE):
        counts = np.array(plans[start : start + _AT_ONCE], dtype=np.int64)
        low = np.where(counts > 0, first, 0).max(axis=1)
        high = low + n_microbatches * further.max()
        while np.any(low < high):
            middle = (low + high) // 2
            each = np.maximum((middle[:, None] - first) // further + 1, 0)  # finished per pipeline
            done = (counts * each).sum(axis=1) >= n_microbatches
            low, high = np.where(done, low, middle + 1), np.where(done, middle, high)
        is_enough = counts.sum(axis=1) <= n_microbatches
        times += [int(time) if ok else None for time, ok in zip(low, is_enough, strict=True)]
    return times
