"""Which pipelines a job runs: all ways to use its nodes, each with its batches, and the fastest of them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from makespan.errors import InfeasiblePlanError, InputError
from makespan.oobleck.planning._batches import BatchMode, Estimator, check_modes, distribute, linear_times
from makespan.oobleck.planning._cost import Ints
from makespan.oobleck.planning._enumeration import count_plans, enumerate_plans
from makespan.oobleck.planning._profile import PICOSECONDS, ModelProfile
from makespan.oobleck.planning._template import HybridPlan, Pipeline, PipelineTemplate

__all__ = ["Instantiation", "PlanChoice", "choose_plan", "estimated_time_s"]

_MOST_PLANS = 1_000_000
_AT_ONCE = 20_000  # plans that are priced together
_LISTED = 20_000  # up to so many plans all are listed and priced
_MOST_VISITED = 20_000  # plans and parts of plans that a bounded search looks at
_MOST_SLACK = 1e3  # a search for slower plans ends with all of them
_NONE = -(1 << 60)  # microbatches by a time where there is no plan

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
    is_exact
        Whether no other plan comes before these. Otherwise the search was cut short: without a profile the
        time of the best is still the least of all, and only ties may be resolved in another way.
    """

    best: Instantiation
    runners_up: tuple[Instantiation, ...]
    n_plans: int
    n_infeasible: int
    is_exact: bool = True


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

    ``per_pipeline`` with ``1f1b`` is a bounded search that takes about a second for 1,024 nodes: it finds the
    least time by dynamic programming, and lists the plans that have it. Other modes price every plan.

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
        No template, an unknown name, more than a million plans in a mode that prices every plan, or no
        exchange time in the profile.
    InfeasiblePlanError
        No plan uses all nodes, or the batch can be distributed in none of them.
    """
    check_modes(batch_mode, estimator)
    used = [templates[size] for size in sorted(templates)]
    sizes = [template.n_nodes for template in used]
    n_plans = count_plans(sizes, n_nodes, f)
    is_bounded = batch_mode == "per_pipeline" and estimator == "1f1b" and n_plans > _LISTED
    found = (
        _Bounded(used, n_nodes, f, n_microbatches, profile).ranked(n_runners_up + 1) if is_bounded else None
    )
    if found is not None and (found[1] or n_plans > _MOST_PLANS):
        keys, is_exact = found
        n_infeasible = count_plans(sizes, n_nodes, max(f, n_microbatches))
    else:
        plans = _plans(sizes, n_nodes, f)
        if batch_mode == "per_pipeline" and estimator == "1f1b":
            times = _least_times(used, plans, n_microbatches)
        else:
            times = [_time(_each(used, counts), n_microbatches, batch_mode, estimator) for counts in plans]
        keys, is_exact = _ranked(times, plans, profile), True
        n_infeasible = n_plans - len(keys)
    if not keys:
        text = f"{n_plans} plans of templates for {sizes} nodes use {n_nodes} with {f + 1} pipelines or more"
        raise InfeasiblePlanError(f"{text}; none takes {n_microbatches} microbatches {batch_mode}")
    best, *others = (
        _instantiation(used, key, n_microbatches, batch_mode, estimator) for key in keys[: n_runners_up + 1]
    )
    return PlanChoice(best, tuple(others), n_plans, n_infeasible, is_exact)


def _ranked(
    times: Sequence[int | None], plans: Sequence[tuple[int, ...]], profile: ModelProfile | None
) -> list[_Key]:
    """Return the keys of plans with their times, the best first; those without a time are left out."""
    return sorted(
        (time + _sync(profile, sum(counts)), sum(map(bool, counts)), -sum(counts), counts)
        for time, counts in zip(times, plans, strict=True)
        if time is not None
    )


def _plans(sizes: Sequence[int], n_nodes: int, f: int) -> list[tuple[int, ...]]:
    """Return all plans, unless there are too many to price."""
    n_plans = count_plans(sizes, n_nodes, f)
    if n_plans > _MOST_PLANS:
        raise InputError(
            f"{n_plans} plans of templates for {list(sizes)} nodes use {n_nodes}; accepted: at most "
            f"{_MOST_PLANS}, fewer templates have fewer"
        )
    return list(enumerate_plans(sizes, n_nodes, f))


class _Bounded:
    """Search for the fastest plans among more than can be listed.

    A plan is done by a time if its pipelines finish all microbatches by then, and how many a pipeline
    finishes depends on its template alone. So the most that pipelines with a number of nodes finish is a
    knapsack problem, and the least time of all plans follows by bisection. The plans that have this time are
    then listed, size by size, leaving out every part that the knapsack says cannot be completed in time.
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
        self._fewest = max(f + 1, -(-n_nodes // self._sizes[-1]))
        self._most = min(n_microbatches, n_nodes // self._sizes[0])
        # Whether plans with too few or too many pipelines exist, so that their number has to be counted.
        self._counts = self._fewest * self._sizes[-1] > n_nodes + self._sizes[-1] - 1 or (
            self._most < n_nodes // self._sizes[0]
        )
        self._longest = max(first) + n_microbatches * max(further)
        self._profile = profile

    def ranked(self, n_wanted: int) -> tuple[list[_Key], bool]:
        """Return the best plans by their keys, and whether no other plan comes before them."""
        if self._fewest > self._most:
            return [], True
        least = self._least_time()
        if least is None:
            return [], True
        least_sync = min(_sync(self._profile, count) for count in range(self._fewest, self._most + 1))
        limit, slack, known = least, 1e-4, list[tuple[int, ...]]()
        while True:
            plans, is_whole = self._done_by(limit)
            known = plans if is_whole else [*known, *plans, *self._even(), self._fastest(least)]
            keys = self._priced(known)
            last = keys[n_wanted - 1][0] if len(keys) >= n_wanted else None
            if not is_whole or limit >= self._longest or (last is not None and limit + least_sync >= last):
                return keys, is_whole
            # Waits for gradients, and further plans that are wanted, ask for slower ones too.
            limit = int(least * (1 + slack)) if last is None else last - least_sync
            slack *= 10
            limit = self._longest if slack > _MOST_SLACK else min(limit, self._longest)

    def _priced(self, plans: Sequence[tuple[int, ...]]) -> list[_Key]:
        listed = sorted(set(plans))
        return _ranked(_least_times(self._used, listed, self._n_microbatches), listed, self._profile)

    def _finished(self, time: int) -> list[int]:
        """Return how many microbatches a pipeline of each template finishes by a time."""
        each = (time - self._first) // self._further + 1
        return [
            int(one) for one in np.where(time >= self._first, np.minimum(each, self._n_microbatches), _NONE)
        ]

    def _most_finished(self, finished: Sequence[int]) -> list[Ints]:
        """Return the most that pipelines with exactly so many nodes finish, by the first templates."""
        row = np.full(self._n_nodes + 1, _NONE, dtype=np.int64)
        row[0] = 0
        rows = [row]
        for size, count in zip(self._sizes, finished, strict=True):
            if count > 0:
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
        """Whether some plan is done by a time."""
        finished = self._finished(time)
        if self._most_finished(finished)[-1][-1] < self._n_microbatches:
            return False
        if not self._counts:
            return True
        return any(done for done, _ in self._by_pipelines(finished))

    def _by_pipelines(self, finished: Sequence[int]) -> Iterator[tuple[bool, Ints]]:
        """Yield for 1, 2, ... pipelines whether they do all, and the template of the last by nodes used."""
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
        """Return one plan that is done by a time by which some plan is."""
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
        """Return the least time of all plans; None if there is none that takes the microbatches."""
        low, high = (
            int(self._first.min()),
            int(self._first.max() + self._n_microbatches * self._further.max()),
        )
        even = self._priced(self._even()) if self._profile is None else []
        high = min(high, even[0][0]) if even else high
        if not self._is_done(high):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_done(middle) else (middle + 1, high)
        return low

    def _even(self) -> list[tuple[int, ...]]:
        """Return the plans whose pipelines are as equal as can be, one for each number of pipelines."""
        places = {size: place for place, size in enumerate(self._sizes)}
        found = []
        for n_pipelines in range(self._fewest, self._most + 1):
            size, n_larger = divmod(self._n_nodes, n_pipelines)
            if size in places and (not n_larger or size + 1 in places):
                counts = [0] * len(self._sizes)
                counts[places[size]] = n_pipelines - n_larger
                if n_larger:
                    counts[places[size + 1]] = n_larger
                found.append(tuple(counts))
        return found

    def _done_by(self, time: int) -> tuple[list[tuple[int, ...]], bool]:
        """Return the plans that are done by a time, and whether these are all."""
        finished = self._finished(time)
        most = self._most_finished(finished)
        found, n_visited = list[tuple[int, ...]](), 0
        # Number of templates left, nodes left, microbatches still to finish, pipelines, counts of the others.
        todo = [(len(self._sizes), self._n_nodes, self._n_microbatches, 0, tuple[int, ...]())]
        while todo and n_visited < _MOST_VISITED:
            n_visited += 1
            n_left, nodes, missing, n_pipelines, counts = todo.pop()
            if n_left == 0:
                if nodes == 0 and self._fewest <= n_pipelines <= self._most:
                    found.append(counts)
                continue
            size, count = self._sizes[n_left - 1], finished[n_left - 1]
            tried = np.arange(nodes // size + 1 if count > 0 else 1)
            rest = nodes - size * tried
            fits = most[n_left - 1][rest] + tried * max(count, 0) >= missing
            fits &= n_pipelines + tried <= self._most
            fits &= n_pipelines + tried + rest // self._sizes[0] >= self._fewest
            for number in reversed(tried[fits].tolist()):  # those with the fewest large pipelines come first
                left = missing - number * max(count, 0)
                todo.append(
                    (n_left - 1, nodes - size * number, left, n_pipelines + number, (number, *counts))
                )
        return found, not todo


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
