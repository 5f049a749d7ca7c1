"""Pipeline templates: stage costs, the exact and the published search, coverage of node counts, and files.

The cost of a pipeline is the time to fill it, to be held up by its slowest stage, and to drain. With
latencies L of S stages, m the largest of them, k the last stage that has it, and N microbatches,

    T = sum(L) + (N - S + k) m + sum(L[k:])

where N is 3 S + 1 unless a number is given, and a single stage counts 4 L, as in the artifact. Latencies are
whole picoseconds, so that equal costs compare equal.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from makespan.arguments import check_fields, check_range, typed
from makespan.errors import InfeasiblePlanError, InputError, unknown_name
from makespan.files import parse_json, read_json, read_text, write_json
from makespan.oobleck.plan import PipelineTemplate, Stage
from makespan.oobleck.profile import PICOSECONDS, ModelProfile, as_plain
from makespan.units import format_bytes

# --- Costs ------------------------------------------------------------------------------------------

Ints = NDArray[np.int64]
_Number = TypeVar("_Number", np.int64, np.float64)


@dataclass(frozen=True, slots=True)
class CostRule:
    """Number of microbatches for which pipelines are priced.

    Parameters
    ----------
    n_microbatches
        Microbatches per pipeline; None for 3 S + 1 in a pipeline of S stages. Pipelines of more stages than
        microbatches are not considered.
    """

    n_microbatches: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.n_microbatches is not None and self.n_microbatches < 1:
            raise InputError(f"cost of {self.n_microbatches} microbatches; expected 1 or more")

    def allows(self, n_stages: int) -> bool:
        """Tell whether a pipeline of this number of stages has a price."""
        return self.n_microbatches is None or n_stages <= self.n_microbatches

    def steady(self, n_stages: int) -> int:
        """Return how often the slowest stage counts, besides once for each stage before it."""
        if self.n_microbatches is not None:
            return self.n_microbatches - n_stages
        return 2 * n_stages + 1 if n_stages > 1 else 2


REFERENCE = CostRule()
"""Rule of the artifact."""


def pipeline_cost(latencies: Sequence[int], rule: CostRule = REFERENCE) -> int:
    """Return the cost of stages with these latencies; of equal slowest stages the last one counts."""
    slowest = max(latencies)
    last = max(index for index, latency in enumerate(latencies) if latency == slowest)
    return sum(latencies) + (rule.steady(len(latencies)) + last) * slowest + sum(latencies[last:])


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory of a GPU, and the memory that training needs for a layer.

    Parameters
    ----------
    device_bytes
        Memory of one GPU [B]; GPUs that share a stage share its memory.
    state_factor
        Bytes held per byte of parameters: weights, gradients, two moments and working copies.
    counts_in_flight
        Whether a stage keeps the activations of one microbatch per stage from it to the end, as the schedule
        one forward, one backward needs; if not, those of one microbatch, as in the artifact.
    """

    device_bytes: float
    state_factor: float = 6.0
    counts_in_flight: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "memory limit")
        if not (self.device_bytes > 0 and self.state_factor > 0):
            raise InputError(
                f"memory of {self.device_bytes} bytes with {self.state_factor} bytes of state per byte of "
                "parameters; expected numbers above 0"
            )


class StageTimes:
    """Latency and memory of every possible stage, ``[first_layer, end_layer]``, (n_layers + 1, n_layers + 1).

    Parameters
    ----------
    profile
        Times of the layers.
    gpus_per_node
        Largest number of GPUs of a stage, which has 1, 2, 4 ...
    memory
        Memory of a GPU; None for no limit.

    Raises
    ------
    InputError
        A layer has no exchange time for a number of GPUs that a stage may have; layer and key are named.
    """

    def __init__(self, profile: ModelProfile, gpus_per_node: int, memory: MemoryLimit | None = None) -> None:
        if gpus_per_node < 1:
            raise InputError(f"{gpus_per_node} GPUs per node; expected 1 or more")
        self.n_layers = profile.n_layers
        self.gpus_per_node = gpus_per_node
        self.memory = memory
        self.widths = tuple(1 << bit for bit in range(gpus_per_node.bit_length()))
        forward = _whole([layer.forward_s for layer in profile.layers])
        both = forward + _whole([layer.backward_s for layer in profile.layers])
        self.latency = {width: _between(both) for width in self.widths[:1]}
        for width in self.widths[1:]:
            for index, layer in enumerate(profile.layers):
                if width not in layer.allreduce_in_node_s:
                    known = ", ".join(map(str, sorted(layer.allreduce_in_node_s))) or "none"
                    raise InputError(
                        f"profile {profile.name!r}: layer {index} has no allreduce_in_node_ms for {width} "
                        f"GPUs; it has: {known}"
                    )
            # Once in the forward and once in the backward pass; the quotient is rounded to the nearest.
            exchange = 2 * _between(_whole([layer.allreduce_in_node_s[width] for layer in profile.layers]))
            self.latency[width] = (self.latency[1] + width // 2) // width + exchange
        state = memory.state_factor if memory else 0.0
        self._state = _between(np.array([state * layer.parameter_bytes for layer in profile.layers]))
        self._activations = _between(np.array([layer.activation_bytes for layer in profile.layers]))
        order = np.arange(self.n_layers + 1)
        self._is_stage = order[:, None] < order[None, :]

    def allowed(self, width: int, behind: int) -> NDArray[np.bool_]:
        """Return which stages on ``width`` GPUs, with ``behind`` stages behind them, fit into memory."""
        if self.memory is None:
            return self._is_stage
        in_flight = behind + 1 if self.memory.counts_in_flight else 1
        held = self._state + in_flight * self._activations
        return np.asarray(self._is_stage & (held <= width * self.memory.device_bytes))

    def stage_counts(self, n_nodes: int, rule: CostRule) -> range:
        """Return the possible numbers of stages of a pipeline on so many nodes."""
        # A stage has 1, 2, 4 ... GPUs of one node, so a node has at least as many stages as its number of
        # GPUs has binary ones.
        least = n_nodes * self.gpus_per_node.bit_count()
        most = min(self.n_layers, n_nodes * self.gpus_per_node)
        if rule.n_microbatches is not None:
            most = min(most, rule.n_microbatches)
        return range(least, most + 1)


def _whole(times_s: list[float]) -> Ints:
    return np.array([round(value * PICOSECONDS) for value in times_s], dtype=np.int64)


def _between(values: NDArray[_Number]) -> NDArray[_Number]:
    """Return sums over layers from row to column, negative below the diagonal."""
    ends = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
    return np.asarray(ends[None, :] - ends[:, None])


# --- Exact search over the slowest stage ------------------------------------------------------------
#
# Fix the slowest stage: its layers and GPUs, and the number of stages before it and of their GPUs. Stages
# before it take at most its latency m, stages behind it less, so that ties have one price. The cost is then
#
#     2 m + (sum of those before) + 2 (sum of those behind) + (steady + number before) m
#
# and dynamic programming over layers, stages and GPUs used minimises the two sums. Without the bound m the
# same program gives a lower bound for every choice; choices are tried from the lowest bound on until none
# can win.

_NEVER = np.int64(1 << 60)
_KEPT = 64  # matrices of costs, each of all stages
Cut = tuple[int, int, int]
"""First layer, end layer and GPUs of a stage."""
_Tables = dict[tuple[int, int], Ints]  # by stages and GPUs used: least sum of latencies, (n_layers + 1,)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Choice of the slowest stage, and of the numbers of stages and GPUs before it."""

    bound: int
    latency: int
    first: int
    end: int
    width: int
    n_before: int
    gpus_before: int


class _Search:
    """Search among pipelines with a number of stages on a number of nodes."""

    def __init__(self, times: StageTimes, n_nodes: int, n_stages: int, steady: int) -> None:
        self.times, self.n_stages, self.steady = times, n_stages, steady
        self.n_gpus = n_nodes * times.gpus_per_node
        self.allowed = {
            (width, behind): times.allowed(width, behind)
            for width in times.widths
            for behind in range(n_stages)
        }
        self._tables: dict[int, tuple[_Tables, _Tables]] = {}
        self._costs: dict[tuple[int, int], dict[int, Ints]] = {}
        self.free = self._before(int(_NEVER)), self._behind(int(_NEVER))

    def tables(self, slowest: int) -> tuple[_Tables, _Tables]:
        """Return the least sums before and behind a slowest stage of this latency."""
        if slowest not in self._tables:
            self._tables[slowest] = self._before(slowest), self._behind(slowest - 1)
        return self._tables[slowest]

    def costs(self, width: int, behind: int, longest: int) -> Ints:
        """Return latencies of stages that are allowed there and take at most ``longest``, else never."""
        latency = self.times.latency[width]
        return np.where(self.allowed[width, behind] & (latency <= longest), latency, _NEVER)

    def fits(self, gpus_used: int, width: int) -> bool:
        """Tell whether a stage stays within a node if ``gpus_used`` GPUs are used before it."""
        return gpus_used % self.times.gpus_per_node + width <= self.times.gpus_per_node

    def _before(self, longest: int) -> _Tables:
        tables: _Tables = {(0, 0): self._nothing(0)}
        level = {0: tables[0, 0]}
        for n_before in range(self.n_stages):
            costs = self._by_width(self.n_stages - 1 - n_before, longest)
            level = self._extended(level, {width: cost.T for width, cost in costs.items()})
            tables |= {(n_before + 1, gpus): sums for gpus, sums in level.items()}
        return tables

    def _behind(self, longest: int) -> _Tables:
        tables: _Tables = {(0, 0): self._nothing(-1)}
        level = {0: tables[0, 0]}
        for n_behind in range(self.n_stages):
            level = self._extended(level, self._by_width(n_behind, longest))
            tables |= {(n_behind + 1, gpus): sums for gpus, sums in level.items()}
        return tables

    def _nothing(self, layer: int) -> Ints:
        """Return the sums of no stage, which reach one layer."""
        sums = np.full(self.times.n_layers + 1, _NEVER)
        sums[layer] = 0
        return sums

    def _by_width(self, behind: int, longest: int) -> dict[int, Ints]:
        # Without a memory limit the number of stages behind does not matter.
        key = behind if self.times.memory else 0, longest
        if key not in self._costs:
            if len(self._costs) > _KEPT:
                self._costs.clear()
            self._costs[key] = {width: self.costs(width, behind, longest) for width in self.times.widths}
        return self._costs[key]

    def _extended(self, level: dict[int, Ints], costs: dict[int, Ints]) -> dict[int, Ints]:
        """Return the sums with one more stage, by GPUs; ``costs`` has a row for each layer reached."""
        extended: dict[int, Ints] = {}
        for gpus, sums in level.items():
            for width, cost in costs.items():
                if gpus + width <= self.n_gpus and self.fits(gpus, width):
                    # Two costs of never add up to more: cap them, so that they cannot overflow.
                    least = np.minimum((cost + sums).min(axis=1), _NEVER)
                    other = extended.get(gpus + width)
                    extended[gpus + width] = least if other is None else np.minimum(other, least)
        return extended

    def choices(self, below: int | None) -> Iterator[_Choice]:
        """Yield the choices of a slowest stage that may cost less than ``below``, lowest bound first."""
        before, behind = self.free
        candidates = []
        for (n_before, gpus), sums in before.items():
            n_behind = self.n_stages - 1 - n_before
            for width in self.times.widths:
                other = behind.get((n_behind, self.n_gpus - gpus - width))
                if other is None or not self.fits(gpus, width):
                    continue
                latency = self.times.latency[width]
                bound = sums[:, None] + (self.steady + n_before + 2) * latency + 2 * other[None, :]
                # Prune choices whose other stages cannot all be as fast as this one.
                ok = self.allowed[width, n_behind] & (sums[:, None] <= n_before * latency)
                ok &= other[None, :] <= n_behind * (latency - 1)
                if below is not None:
                    ok &= bound < below
                first, end = np.nonzero(ok)
                same = (np.full(len(first), value) for value in (width, n_before, gpus))
                candidates.append(np.stack([bound[first, end], latency[first, end], first, end, *same]))
        if candidates:
            listed = np.concatenate(candidates, axis=1)
            for index in np.lexsort(listed[::-1]):  # by the first row, ties by the next ones
                yield _Choice(*listed[:, index].tolist())

    def cost(self, choice: _Choice) -> int:
        """Return the cost of the best pipeline with this slowest stage."""
        before, behind = self.tables(choice.latency)
        ahead = int(before[choice.n_before, choice.gpus_before][choice.first])
        after = int(behind[self._after(choice)][choice.end])
        return ahead + (self.steady + choice.n_before + 2) * choice.latency + 2 * after

    def _after(self, choice: _Choice) -> tuple[int, int]:
        return self.n_stages - 1 - choice.n_before, self.n_gpus - choice.gpus_before - choice.width

    def cuts(self, choice: _Choice) -> tuple[Cut, ...]:
        """Return the stages of the best pipeline; among equal ones every cut is as far left as possible."""
        before, behind = self.tables(choice.latency)
        ahead = self._walk_back(before, choice)
        return (*ahead, (choice.first, choice.end, choice.width), *self._walk_on(behind, choice))

    def _walk_back(self, tables: _Tables, choice: _Choice) -> Iterator[Cut]:
        n_used, gpus, end = choice.n_before, choice.gpus_before, choice.first
        stages: list[Cut] = []
        while n_used:
            goal = tables[n_used, gpus][end]
            first, width = min(
                (int(first), width)
                for width, cost in self._by_width(self.n_stages - n_used, choice.latency).items()
                if (n_used - 1, gpus - width) in tables and self.fits(gpus - width, width)
                for first in np.flatnonzero(tables[n_used - 1, gpus - width] + cost[:, end] == goal)
            )
            stages.append((first, end, width))
            n_used, gpus, end = n_used - 1, gpus - width, first
        return reversed(stages)

    def _walk_on(self, tables: _Tables, choice: _Choice) -> Iterator[Cut]:
        first = choice.end
        n_left, gpus = self._after(choice)
        while n_left:
            goal = tables[n_left, gpus][first]
            end, width = min(
                (int(end), width)
                for width, cost in self._by_width(n_left - 1, choice.latency - 1).items()
                if (n_left - 1, gpus - width) in tables and self.fits(gpus - width, width)
                for end in np.flatnonzero(tables[n_left - 1, gpus - width] + cost[first] == goal)
            )
            yield first, end, width
            n_left, gpus, first = n_left - 1, gpus - width, end


def exact_cuts(times: StageTimes, n_nodes: int, rule: CostRule) -> tuple[Cut, ...] | None:
    """Return the stages of the cheapest pipeline on so many nodes, None if there is none.

    Ties in cost go to the fewest stages, then to the choice with the lowest bound and latency.
    """
    best: int | None = None
    cuts = None
    for n_stages in times.stage_counts(n_nodes, rule):
        search = _Search(times, n_nodes, n_stages, rule.steady(n_stages))
        winner = None
        for choice in search.choices(best):
            if best is not None and choice.bound >= best:
                break
            cost = search.cost(choice)
            if cost < (best if best is not None else _NEVER):
                best, winner = cost, choice
        cuts = search.cuts(winner) if winner else cuts
    return cuts


# --- Published search: divide and conquer -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Key:
    """Numbers of stages, of nodes, of GPUs per node, and of stages behind if memory is limited (else 0)."""

    n_stages: int
    n_nodes: int
    n_gpus: int
    behind: int


@dataclass(slots=True)
class _Best:
    """Best pipeline of every range of layers, all arrays (n_layers + 1, n_layers + 1).

    ``last`` is the index of its slowest stage, ``tail`` the sum of latencies from that stage on; ``cut`` is
    the layer between its halves, and ``split`` their index in the list of splits.
    """

    cost: Ints
    total: Ints
    slowest: Ints
    last: Ints
    tail: Ints
    cut: Ints
    split: Ints


class DivideAndConquer:
    """Published search: divide layers and nodes in two, and each half again, as the artifact does.

    Each half is the best by its own cost, which does not determine its cost within the whole, so the result
    may be worse than the optimum of `exact_cuts`. Results for one number of nodes are reused for others.

    Parameters
    ----------
    times
        Latencies and memory of the stages.
    rule
        Rule by which pipelines are priced.
    """

    def __init__(self, times: StageTimes, rule: CostRule) -> None:
        self._times, self._rule = times, rule
        self._found: dict[_Key, _Best | None] = {}

    def cuts(self, n_nodes: int) -> tuple[Cut, ...] | None:
        """Return the stages found for so many nodes, None if there are none."""
        n_layers, best, winner = self._times.n_layers, int(_NEVER), None
        for n_stages in self._times.stage_counts(n_nodes, self._rule):
            key = _Key(n_stages, n_nodes, self._times.gpus_per_node, 0)
            pipeline = self._best(key)
            if pipeline is not None and pipeline.cost[0, n_layers] < best:
                best, winner = int(pipeline.cost[0, n_layers]), key
        return None if winner is None else self._stages(winner, 0, n_layers)

    def _best(self, key: _Key) -> _Best | None:
        if key not in self._found:
            possible = key.n_nodes <= key.n_stages <= min(key.n_nodes * key.n_gpus, self._times.n_layers)
            if not possible:
                self._found[key] = None
            elif key.n_stages == 1:
                self._found[key] = self._leaf(key)
            else:
                self._found[key] = self._joined(key)
        return self._found[key]

    def _leaf(self, key: _Key) -> _Best | None:
        if key.n_gpus not in self._times.widths:
            return None
        latency = self._times.latency[key.n_gpus]
        cost = (2 + self._rule.steady(1)) * latency
        allowed = self._times.allowed(key.n_gpus, key.behind)
        nothing = np.zeros_like(latency)
        return _Best(
            np.where(allowed, cost, _NEVER), latency, latency, nothing, latency, nothing, nothing
        )  # fmt: skip

    def _splits(self, key: _Key) -> list[tuple[_Key, _Key]]:
        """Return the halves in the order in which they are tried: nodes or GPUs on the left, then stages."""
        several = key.n_nodes > 1
        limited = self._times.memory is not None
        splits = []
        for held in range(1, key.n_nodes if several else key.n_gpus):
            for n_left in range(1, key.n_stages):
                n_right = key.n_stages - n_left
                behind = key.behind + n_right if limited else 0
                if several:
                    left = _Key(n_left, held, key.n_gpus, behind)
                    right = _Key(n_right, key.n_nodes - held, key.n_gpus, key.behind)
                else:
                    left = _Key(n_left, 1, held, behind)
                    right = _Key(n_right, 1, key.n_gpus - held, key.behind)
                splits.append((left, right))
        return splits

    def _joined(self, key: _Key) -> _Best | None:
        best = None
        steady = self._rule.steady(key.n_stages)
        for index, (left_key, right_key) in enumerate(self._splits(key)):
            left, right = self._best(left_key), self._best(right_key)
            if left is None or right is None:
                continue
            joined = _join(left, right, left_key.n_stages, steady, index)
            if best is None:
                best = joined
                continue
            # Per range of layers the cheaper one wins, of equal ones the earlier cut, then the earlier split.
            wins = (joined.cost < best.cost) | ((joined.cost == best.cost) & (joined.cut < best.cut))
            best = _Best(
                *(
                    np.where(wins, getattr(joined, field.name), getattr(best, field.name))
                    for field in fields(_Best)
                )
            )
        return best

    def _stages(self, key: _Key, first: int, end: int) -> tuple[Cut, ...]:
        best = self._best(key)
        if best is None or key.n_stages == 1:
            return ((first, end, key.n_gpus),)
        left, right = self._splits(key)[int(best.split[first, end])]
        cut = int(best.cut[first, end])
        return self._stages(left, first, cut) + self._stages(right, cut, end)


def _join(left: _Best, right: _Best, n_left: int, steady: int, index: int) -> _Best:
    """Join two halves at the cheapest cut of every range of layers, the first of equal cuts."""

    def at(values: Ints, is_left: bool) -> Ints:
        """Return values by (first layer, cut, end layer)."""
        return values[:, :, None] if is_left else values[None, :, :]

    ahead = at(right.slowest, False) >= at(left.slowest, True)
    total = at(left.total, True) + at(right.total, False)
    slowest = np.maximum(at(left.slowest, True), at(right.slowest, False))
    last = np.where(ahead, n_left + at(right.last, False), at(left.last, True))
    tail = np.where(ahead, at(right.tail, False), at(left.tail, True) + at(right.total, False))
    possible = (at(left.cost, True) < _NEVER) & (at(right.cost, False) < _NEVER)
    cost = np.where(possible, total + (steady + last) * slowest + tail, _NEVER)
    cut = cost.argmin(axis=1)

    def chosen(values: Ints) -> Ints:
        return np.asarray(np.take_along_axis(values, cut[:, None, :], axis=1)[:, 0, :])

    return _Best(
        cost=chosen(cost),
        total=chosen(total),
        slowest=chosen(slowest),
        last=chosen(last),
        tail=chosen(tail),
        cut=cut,
        split=np.full_like(cut, index),
    )


# --- Template sizes that cover every number of nodes ------------------------------------------------
#
# With templates of n0 to n0 + p - 1 nodes, x pipelines use any number of nodes from x n0 to x (n0 + p - 1).
# From f + 1 pipelines on, these ranges leave no gap if and only if p >= 1 + ceil((n0 - 1) / (f + 1)).

TemplateSet = Literal["full", "minimal"]


class GuaranteeUnsatisfiable(InputError):
    """Some number of nodes cannot be used by f + 1 pipelines; the message names the first."""


@typed
def least_template_count(n0: int, f: int) -> int:
    """Return the number of consecutive sizes from n0 on that cover every number of nodes from (f + 1) n0."""
    check_range("n0", n0, 1)
    check_range("f", f)
    return 1 + -(-(n0 - 1) // (f + 1))


def check_guarantee(sizes: Iterable[int], n0: int, f: int, n_nodes: int) -> int | None:
    """Return the first number of nodes that these templates cannot use with f + 1 pipelines, None if none.

    Parameters
    ----------
    sizes
        Nodes of each template.
    n0, f
        Least nodes that hold the model, and nodes that may be lost at once.
    n_nodes
        Most nodes; every number from (f + 1) n0 to this is tried.
    """
    usable = sorted(set(sizes))
    most: list[int | None] = [0]  # most pipelines that use exactly so many nodes
    for count in range(1, n_nodes + 1):
        options = [
            before + 1 for size in usable if size <= count and (before := most[count - size]) is not None
        ]
        most.append(max(options, default=None))
    for count in range((f + 1) * n0, n_nodes + 1):
        if (most[count] or 0) < f + 1:
            return count
    return None


@typed
def template_sizes(
    n0: int,
    f: int,
    n_nodes: int,
    template_set: TemplateSet = "full",
    largest: int | None = None,
    most_possible: int | None = None,
) -> range:
    """Return the numbers of nodes for which templates are needed.

    Parameters
    ----------
    n0, f, n_nodes
        Least nodes that hold the model, nodes that may be lost at once, and nodes at the start.
    template_set
        ``full``: up to the most nodes of one pipeline, which leaves most choice; ``minimal``: the fewest that
        cover every number of nodes.
    largest
        Nodes of the largest template; None for ``n_nodes - f * n0``.
    most_possible
        Most nodes of any template, because each node has a stage and each stage a layer; None for no limit.

    Raises
    ------
    InputError
        A number is too small, or there are fewer nodes than (f + 1) n0.
    GuaranteeUnsatisfiable
        The sizes leave a hole.
    """
    if template_set not in get_args(TemplateSet):
        raise unknown_name("template set", template_set, get_args(TemplateSet))
    if n0 < 1 or f < 0:
        raise InputError(f"n0 = {n0} and f = {f}; expected n0 of 1 or more, f of 0 or more")
    if n_nodes < (f + 1) * n0:
        raise InputError(
            f"{n_nodes} nodes; expected at least (f + 1) n0 = {(f + 1) * n0}, for {f + 1} pipelines"
        )
    end = (n_nodes - f * n0 if largest is None else largest) + 1
    if template_set == "minimal":
        end = min(end, n0 + least_template_count(n0, f))
    if most_possible is not None:
        end = min(end, most_possible + 1)
    sizes = range(n0, max(end, n0))
    hole = check_guarantee(sizes, n0, f, n_nodes)
    if hole is not None:
        named = f"{sizes.start} to {sizes.stop - 1} nodes" if sizes else "no size"
        raise GuaranteeUnsatisfiable(f"templates of {named} cannot use {hole} nodes with {f + 1} pipelines")
    return sizes


# --- Templates of a model ---------------------------------------------------------------------------

SearchMode = Literal["exact", "dc"]


class TemplateSearch:
    """Finds the templates of a model one by one, as in Oobleck, section 4.1.

    Parameters
    ----------
    profile
        Times of the layers.
    gpus_per_node
        GPUs of each node, all of which are used; a stage has 1, 2, 4 ... of one node.
    mode
        ``exact``: the least cost; ``dc``: the published divide and conquer, at most as good, which reuses
        results for other numbers of nodes.
    memory
        Memory of a GPU; None for no limit.
    rule
        Rule by which pipelines are priced.

    Raises
    ------
    InputError
        The number of GPUs is less than 1, or the profile lacks an exchange time.
    """

    def __init__(
        self,
        profile: ModelProfile,
        gpus_per_node: int = 1,
        mode: SearchMode = "exact",
        memory: MemoryLimit | None = None,
        rule: CostRule = REFERENCE,
    ) -> None:
        if mode not in get_args(SearchMode):
            raise unknown_name("search", mode, get_args(SearchMode))
        self._times, self._rule = StageTimes(profile, gpus_per_node, memory), rule
        self._published = DivideAndConquer(self._times, rule) if mode == "dc" else None

    def template(self, n_nodes: int) -> PipelineTemplate | None:
        """Return the template for so many nodes, None if none fits; raise `InputError` for less than 1."""
        if n_nodes < 1:
            raise InputError(f"a template for {n_nodes} nodes; expected 1 or more")
        if self._published is None:
            cuts = exact_cuts(self._times, n_nodes, self._rule)
        else:
            cuts = self._published.cuts(n_nodes)
        if cuts is None:
            return None
        latencies = [int(self._times.latency[width][first, end]) for first, end, width in cuts]
        stages = (
            Stage(first, end, width, latency / PICOSECONDS)
            for (first, end, width), latency in zip(cuts, latencies, strict=True)
        )
        cost_s = pipeline_cost(latencies, self._rule) / PICOSECONDS
        return PipelineTemplate(n_nodes, self._times.gpus_per_node, tuple(stages), cost_s)


@typed
def make_templates(
    profile: ModelProfile,
    sizes: Iterable[int],
    gpus_per_node: int = 1,
    mode: SearchMode = "exact",
    memory: MemoryLimit | None = None,
    rule: CostRule = REFERENCE,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> dict[int, PipelineTemplate]:
    """Find a pipeline for each number of nodes.

    Parameters
    ----------
    profile, gpus_per_node, mode, memory, rule
        See `TemplateSearch`.
    sizes
        Numbers of nodes; those for which no pipeline fits are left out of the result.
    progress
        Called before each size with the number of finished sizes and the total.

    Returns
    -------
    dict
        Templates by number of nodes, ascending.

    Raises
    ------
    InputError
        A size or the number of GPUs is less than 1, or the profile lacks an exchange time.
    """
    search = TemplateSearch(profile, gpus_per_node, mode, memory, rule)
    templates = {}
    ascending = sorted(set(sizes))
    for number, size in enumerate(ascending):
        progress(number, len(ascending))
        template = search.template(size)
        if template is not None:
            templates[size] = template
    return templates


@typed
def smallest_node_count(
    profile: ModelProfile, memory: MemoryLimit | None, n_nodes: int, gpus_per_node: int = 1
) -> int:
    """Return n0, the least number of nodes on which a pipeline of the model fits into memory.

    Raises
    ------
    InfeasiblePlanError
        It does not fit on ``n_nodes``; the message names the bytes needed and the largest layer.
    """
    held = [0.0] * profile.n_layers
    first = 1
    if memory is not None:
        held = [
            memory.state_factor * layer.parameter_bytes + layer.activation_bytes for layer in profile.layers
        ]
        first = max(1, int(-(-sum(held) // (gpus_per_node * memory.device_bytes))))
    for count in range(first, n_nodes + 1):
        if make_templates(profile, [count], gpus_per_node, memory=memory):
            return count
    largest = max(range(profile.n_layers), key=lambda index: held[index])
    limit = "" if memory is None else f" of {format_bytes(memory.device_bytes)}"
    raise InfeasiblePlanError(
        f"profile {profile.name!r}: no pipeline on up to {n_nodes} nodes with {gpus_per_node} GPUs{limit}; "
        f"its {profile.n_layers} layers hold {format_bytes(sum(held))} or more, the largest, layer "
        f"{largest}, {format_bytes(held[largest])}"
    )


@typed
def covering_templates(
    profile: ModelProfile,
    n_nodes: int,
    f: int,
    n0: int | None = None,
    gpus_per_node: int = 1,
    template_set: TemplateSet = "full",
    mode: SearchMode = "exact",
    memory: MemoryLimit | None = None,
) -> dict[int, PipelineTemplate]:
    """Find the templates with which a job survives the loss of f nodes at once.

    Parameters
    ----------
    profile, gpus_per_node, mode, memory
        See `make_templates`.
    n_nodes, f
        Nodes at the start, and nodes that may be lost at once.
    n0
        Least number of nodes of a pipeline; None for the least that memory allows.
    template_set
        See `template_sizes`.

    Raises
    ------
    InfeasiblePlanError
        The model does not fit.
    GuaranteeUnsatisfiable
        The templates that exist cannot use every number of nodes from (f + 1) n0 on.
    """
    check_range("n_nodes", n_nodes, 1, _LARGEST)
    check_range("gpus_per_node", gpus_per_node, 1, _WIDEST)
    least = smallest_node_count(profile, memory, n_nodes, gpus_per_node) if n0 is None else n0
    most = profile.n_layers // gpus_per_node.bit_count()
    sizes = template_sizes(least, f, n_nodes, template_set, most_possible=most)
    templates = make_templates(profile, sizes, gpus_per_node, mode, memory)
    hole = check_guarantee(templates, least, f, n_nodes)
    if hole is not None:
        named = ", ".join(map(str, templates)) or "none"
        raise GuaranteeUnsatisfiable(
            f"templates exist for {named} nodes, which cannot use {hole} nodes with {f + 1} pipelines"
        )
    return templates


# --- Files and cache --------------------------------------------------------------------------------

_VERSION = 1  # of the searches and of the format; a change makes all cached files stale
_MS = PICOSECONDS // 1000
_LARGEST = 100_000  # nodes, stages, layers or GPUs of a template
_WIDEST = 1024  # GPUs of a stage; each layer is divided into as many parts
_EXPECTED = "templates (JSON), as 'makespan oobleck plan' writes them"
_Plain = dict[str, Any]


def template_rows(templates: Iterable[PipelineTemplate]) -> list[_Plain]:
    """Return templates as plain values, times in milliseconds: ``n`` nodes, ``S`` stages, cost ``T``."""
    return [
        {
            "n": template.n_nodes,
            "S": template.n_stages,
            "T": round(template.time_s * PICOSECONDS) / _MS,
            "layers_per_stage": [len(stage.layers) for stage in template.stages],
            "gpus_per_stage": [stage.n_gpus for stage in template.stages],
            "latencies": [round(stage.latency_s * PICOSECONDS) / _MS for stage in template.stages],
        }
        for template in templates
    ]


@typed
def write_templates(templates: Mapping[int, PipelineTemplate], path: str | Path) -> None:
    """Write templates as a list with one entry each, by number of nodes, times in milliseconds."""
    rows = template_rows(templates[size] for size in sorted(templates))
    write_json(rows, path, indent=1)


@typed
def read_templates(path: str | Path) -> dict[int, PipelineTemplate]:
    """Read templates of `write_templates`, or entries with only ``n``, ``S`` and ``T``.

    The latter are taken to have equal stages of one layer. Raises `InputError`, which names the file, the
    entry and the accepted values.
    """
    try:
        content = parse_json(read_text(path, _EXPECTED))
    except ValueError as error:
        raise InputError(f"{path}: cannot be read as {_EXPECTED}: {error}") from None
    if not isinstance(content, list) or not content:
        raise InputError(f"{path}: has no list of templates; expected {_EXPECTED}")
    return _from_rows(content, str(path))


def _from_rows(rows: list[Any], where: str) -> dict[int, PipelineTemplate]:
    templates: dict[int, PipelineTemplate] = {}
    for index, row in enumerate(rows):
        place = f"{where}: template {index}"
        if not isinstance(row, dict):
            raise InputError(f"{place}: is {row!r}; expected an object with n, S and T")
        template = _template(row, place)
        if template.n_nodes in templates:
            raise InputError(f"{place}: is the second for {template.n_nodes} nodes; expected one")
        templates[template.n_nodes] = template
    if len({template.n_layers for template in templates.values()}) > 1 and all(
        "latencies" in row for row in rows
    ):
        counts = ", ".join(f"{template.n_layers} on {size} nodes" for size, template in templates.items())
        raise InputError(f"{where}: templates of different models: layers {counts}; expected one model")
    return dict(sorted(templates.items()))


def _template(row: _Plain, where: str) -> PipelineTemplate:
    n_nodes, n_stages = (_count(row.get(key), f"{where}: {key}") for key in ("n", "S"))
    cost = _time(row.get("T"), f"{where}: T")
    if "latencies" not in row:
        # The cost of equal stages is a multiple of the latency of one.
        each = round(cost / pipeline_cost([1] * n_stages))
        return _assembled(n_nodes, cost, [1] * n_stages, [1] * n_stages, [each] * n_stages)
    lists = {key: row.get(key) for key in ("layers_per_stage", "gpus_per_stage", "latencies")}
    for key, values in lists.items():
        if not isinstance(values, list) or len(values) != n_stages:
            raise InputError(f"{where}: {key} is {values!r}; expected a list of {n_stages} numbers")
    layers, gpus = (
        [_count(value, f"{where}: {key}", most) for value in row[key]]
        for key, most in (("layers_per_stage", _LARGEST), ("gpus_per_stage", _WIDEST))
    )
    if sum(gpus) % n_nodes:
        raise InputError(f"{where}: {sum(gpus)} GPUs on {n_nodes} nodes; expected as many on each")
    latencies = [_time(value, f"{where}: latencies") for value in row["latencies"]]
    return _assembled(n_nodes, cost, layers, gpus, latencies)


def _assembled(
    n_nodes: int, cost: int, layers: list[int], gpus: list[int], latencies: list[int]
) -> PipelineTemplate:
    bounds = pairwise(accumulate(layers, initial=0))
    stages = (
        Stage(first, end, width, latency / PICOSECONDS)
        for (first, end), width, latency in zip(bounds, gpus, latencies, strict=True)
    )
    return PipelineTemplate(n_nodes, sum(gpus) // n_nodes or 1, tuple(stages), cost / PICOSECONDS)


def _count(value: Any, where: str, most: int = _LARGEST) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InputError(f"{where} is {value!r}; expected a whole number, 1 to {most}")
    return value


def _time(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise InputError(f"{where} is {value!r}; expected milliseconds, above 0")
    return round(value * _MS)


@typed
def cached_templates(
    folder: str | Path,
    profile: ModelProfile,
    sizes: Iterable[int],
    gpus_per_node: int = 1,
    mode: SearchMode = "exact",
    memory: MemoryLimit | None = None,
    rule: CostRule = REFERENCE,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> dict[int, PipelineTemplate]:
    """Return the templates of `make_templates`, and cache them in a folder.

    Parameters
    ----------
    folder
        Folder with one file per profile and search, named by a checksum of these.
    profile, sizes, gpus_per_node, mode, memory, rule, progress
        See `make_templates`.
    """
    made_of = {
        "version": _VERSION,
        "profile": as_plain(profile),
        "gpus_per_node": gpus_per_node,
        "mode": mode,
        "memory": None if memory is None else asdict(memory),
        "rule": asdict(rule),
    }
    key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
    path = Path(folder, f"{key[:16]}.json")
    cached: dict[int, PipelineTemplate] = {}
    tried: set[int] = set()
    with suppress(InputError, OSError, KeyError, TypeError):  # a damaged file is made anew
        content = read_json(path)
        if content is not None and content["key"] == key:
            cached, tried = _from_rows(content["templates"], str(path)), set(content["tried"])
    wanted = sorted(set(sizes))
    missing = [size for size in wanted if size not in tried]
    if missing:
        cached |= make_templates(profile, missing, gpus_per_node, mode, memory, rule, progress)
        rows = template_rows(cached[size] for size in sorted(cached))
        content = {"key": key, "tried": sorted({*tried, *missing}), "templates": rows, "made_of": made_of}
        write_json(content, path, indent=1)
    return {size: cached[size] for size in wanted if size in cached}
