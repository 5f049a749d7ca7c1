"""Which pipelines a job runs: all ways to use its nodes, each with its batches, and the fastest of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from makespan.errors import InfeasiblePlanError, InputError
from makespan.papers.oobleck.planning._batches import (
    BatchMode,
    Estimator,
    check_modes,
    distribute,
    linear_times,
)
from makespan.papers.oobleck.planning._cost import Ints
from makespan.papers.oobleck.planning._enumeration import count_plans, enumerate_plans
from makespan.papers.oobleck.planning._profile import PICOSECONDS, ModelProfile
from makespan.papers.oobleck.planning._template import HybridPlan, Pipeline, PipelineTemplate

__all__ = ["Instantiation", "PlanChoice", "choose_plan", "estimated_time_s"]

_MOST_PLANS = 1_000_000
_AT_ONCE = 20_000  # plans that are priced together

_Key = tuple[int, int, int, tuple[int, ...]]  # time, distinct templates, minus pipelines, counts


@dataclass(frozen=True, slots=True)
class Instantiation:
    """Pipelines with their batches, before nodes are named.

    Parameters
    ----------
    templates, n_microbatches
        Of each pipeline, by ascending number of nodes, (n_pipelines,).
    iter_time_s
        Estimated time of an iteration, with the wait for gradients where a profile says it [s].
    """

    templates: tuple[PipelineTemplate, ...]
    n_microbatches: tuple[int, ...]
    iter_time_s: float

    @property
    def counts(self) -> dict[int, int]:
        """Return the pipelines of each number of nodes."""
        return dict(Counter(template.n_nodes for template in self.templates))

    def on(self, nodes: Sequence[int]) -> HybridPlan:
        """Give each pipeline its nodes, in order; `InputError` unless there are as many as are needed."""
        needed = sum(template.n_nodes for template in self.templates)
        if len(set(nodes)) != needed or len(nodes) != needed:
            raise InputError(f"nodes {list(nodes)}; accepted: {needed} different ones")
        left = iter(nodes)
        return HybridPlan(
            tuple(
                Pipeline(tuple(islice(left, template.n_nodes)), template, count)
                for template, count in zip(self.templates, self.n_microbatches, strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """The plan that was chosen, and those that come next.

    Parameters
    ----------
    best, runners_up
        The fastest by its estimate, and the following ones in order.
    n_plans, n_infeasible
        All plans that use the nodes, and those for which the batch cannot be distributed.
    """

    best: Instantiation
    runners_up: tuple[Instantiation, ...]
    n_plans: int
    n_infeasible: int


def estimated_time_s(
    templates: Sequence[PipelineTemplate], n_microbatches: Sequence[int], estimator: Estimator
) -> float:
    """Return what the longest pipeline is taken to need [s], without any wait for gradients.

    ``1f1b``: all stages once, then the slowest for each further microbatch; ``compat``: the whole cost of a
    template for each microbatch, as the artifact compares plans.
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

    Parameters
    ----------
    templates
        By number of nodes.
    n_nodes, f
        Nodes to use, by f + 1 pipelines or more.
    n_microbatches, batch_mode, estimator
        Of an iteration. ``per_pipeline`` with ``1f1b`` is the least estimated time of all plans,
        ``per_template`` with ``compat`` the published choice; see `distribute` and `estimated_time_s`.
    profile, n_runners_up
        Times of the layers, for the wait for gradients, None for none; how many of the next best to return.

    Returns
    -------
    PlanChoice
        Of equal times the plan with fewer distinct templates, then with more pipelines, then with fewer of
        the smallest templates.

    Raises
    ------
    InputError
        No template, an unknown name, too many plans to try, or no exchange time in the profile.
    InfeasiblePlanError
        No plan uses all nodes, or the batch can be distributed in none of them.
    """
    check_modes(batch_mode, estimator)
    used = [templates[size] for size in sorted(templates)]
    sizes = [template.n_nodes for template in used]
    plans = _plans(sizes, n_nodes, f)
    if batch_mode == "per_pipeline" and estimator == "1f1b":
        times = _least_times(used, plans, n_microbatches)
    else:
        times = [_time(_each(used, counts), n_microbatches, batch_mode, estimator) for counts in plans]
    keys = sorted(
        (time + _sync(profile, sum(counts)), sum(map(bool, counts)), -sum(counts), counts)
        for time, counts in zip(times, plans, strict=True)
        if time is not None
    )
    if not keys:
        found = (
            f"{len(plans)} plans of templates for {sizes} nodes use {n_nodes} with {f + 1} pipelines or more"
        )
        raise InfeasiblePlanError(f"{found}; none takes {n_microbatches} microbatches {batch_mode}")
    best, *others = (
        _instantiation(used, key, n_microbatches, batch_mode, estimator) for key in keys[: n_runners_up + 1]
    )
    return PlanChoice(best, tuple(others), len(plans), len(plans) - len(keys))


def _plans(sizes: Sequence[int], n_nodes: int, f: int) -> list[tuple[int, ...]]:
    """Return all plans, unless there are too many to price."""
    n_plans = count_plans(sizes, n_nodes, f)
    if n_plans > _MOST_PLANS:
        raise InputError(
            f"{n_plans} plans of templates for {list(sizes)} nodes use {n_nodes}; accepted: at most "
            f"{_MOST_PLANS}, fewer templates have fewer"
        )
    return list(enumerate_plans(sizes, n_nodes, f))


def _each(templates: Sequence[PipelineTemplate], counts: Sequence[int]) -> tuple[PipelineTemplate, ...]:
    return tuple(one for one, count in zip(templates, counts, strict=True) for _ in range(count))


def _sync(profile: ModelProfile | None, n_pipelines: int) -> int:
    return 0 if profile is None else round(profile.sync_time_s(n_pipelines) * PICOSECONDS)


def _time(
    templates: Sequence[PipelineTemplate], n_microbatches: int, mode: BatchMode, estimator: Estimator
) -> int | None:
    counts = distribute(templates, n_microbatches, mode, estimator)
    return None if counts is None else _estimate(templates, counts, estimator)


def _instantiation(
    used: Sequence[PipelineTemplate], key: _Key, n_microbatches: int, mode: BatchMode, estimator: Estimator
) -> Instantiation:
    templates = _each(used, key[-1])
    counts = distribute(templates, n_microbatches, mode, estimator) or ()
    return Instantiation(templates, counts, key[0] / PICOSECONDS)


def _least_times(
    used: Sequence[PipelineTemplate], plans: Sequence[tuple[int, ...]], n_microbatches: int
) -> list[int | None]:
    """Return the time of each plan under its best distribution; None for more pipelines than microbatches.

    A time is enough if the pipelines finish so many microbatches by then; bisection finds the least such
    time, for thousands of plans at once.
    """
    if not plans:
        return []
    first, further, _ = (np.array(one, dtype=np.int64) for one in linear_times(used, "1f1b"))
    found: list[int | None] = []
    for start in range(0, len(plans), _AT_ONCE):
        counts = np.array(plans[start : start + _AT_ONCE], dtype=np.int64)
        low = np.where(counts > 0, first, 0).max(axis=1)
        high = low + n_microbatches * further.max()
        while np.any(low < high):
            middle = (low + high) // 2
            done = _finished(middle, counts, first, further) >= n_microbatches
            low, high = np.where(done, low, middle + 1), np.where(done, middle, high)
        enough = counts.sum(axis=1) <= n_microbatches
        found += [int(time) if ok else None for time, ok in zip(low, enough, strict=True)]
    return found


def _finished(time: Ints, counts: Ints, first: Ints, further: Ints) -> Ints:
    """Return how many microbatches the pipelines of each plan finish by a time, (n_plans,)."""
    each = np.maximum((time[:, None] - first) // further + 1, 0)
    return np.asarray((counts * each).sum(axis=1))
