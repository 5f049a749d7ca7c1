"""Schedules of pipelines whose lost workers are replaced by their peers, as in ReCycle (SOSP 2024).

Every pipeline has one worker per stage. All workers of a stage hold the same parameters, so a micro-batch of
a lost worker can run on any other worker of its stage. Three techniques, named as in the paper's abstract
(arXiv 2405.14009):

- *adaptive pipelining* deals the micro-batches of a lost worker out to the live workers of its stage;
- *decoupled back-propagation* splits the backward pass into the gradients of the input, which the stage
  before waits for, and those of the weights, which may run later (Qi et al., arXiv 2401.10241);
- the *staggered optimizer* updates a stage as soon as its own gradients are complete, so that the idle time
  at the end of an iteration and at the start of the next one overlap.

The schedules come from a list scheduler, not from the integer program of the paper. Times are whole
picoseconds inside, so that ties do not depend on rounding.
"""

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from makespan.emulator import pipeline_time_s
from makespan.errors import InputError
from makespan.oobleck.profile import PICOSECONDS

# --- Input: times of the passes, techniques, routes ---------------------------------------------------

Kind = Literal["F", "B", "W"]
"""Forward pass, gradients of the input, gradients of the weights; of a fused backward pass B has both."""
Worker = tuple[int, int]
"""Pipeline and stage."""
EVEN_SPLIT = 0.5
"""Share of the weights in a backward pass.

An assumption: Qi et al. compare schedules for forward passes, gradients of the input and gradients of the
weights of equal length. Matrix products support it; attention scores, which have no weights, do not.
"""


@dataclass(frozen=True, slots=True)
class StagePasses:
    """Times of one micro-batch in each stage, and of the update of its parameters.

    Parameters
    ----------
    forward_s, input_s, weight_s
        Forward pass, gradients of the input and gradients of the weights [s], (n_stages,).
    update_s
        Exchange of gradients after the last pass of a stage, and optimizer step [s], (n_stages,); empty for
        none.
    transfer_s
        Time of activations or their gradients between two stages [s].

    Raises
    ------
    InputError
        There is no stage, a pass takes no time, or numbers of stages differ.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    update_s: tuple[float, ...] = ()
    transfer_s: float = 0.0

    def __post_init__(self) -> None:
        counts = {len(self.forward_s), len(self.input_s), len(self.weight_s)}
        if len(counts) > 1 or not self.forward_s or len(self.update_s) not in (0, len(self.forward_s)):
            raise InputError(
                f"passes of {len(self.forward_s)}, {len(self.input_s)} and {len(self.weight_s)} stages, "
                f"updates of {len(self.update_s)}; expected one time of each per stage, or no updates"
            )
        passes = [*self.forward_s, *self.input_s, *self.weight_s]
        if (
            not all(value * PICOSECONDS >= 1 for value in passes)
            or min((*self.update_s, self.transfer_s)) < 0
        ):
            raise InputError(
                "a pass takes no time, or an update or a transfer less than none; expected passes above 0"
            )

    @classmethod
    def split(
        cls,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        weight_share: float = EVEN_SPLIT,
        update_s: Sequence[float] = (),
        transfer_s: float = 0.0,
    ) -> "StagePasses":
        """Return passes with backward passes divided by one share for all stages, between 0 and 1."""
        if not 0 < weight_share < 1:
            raise InputError(f"weight_share is {weight_share}; expected a number between 0 and 1")
        input_s = tuple((1.0 - weight_share) * value for value in backward_s)
        weight_s = tuple(weight_share * value for value in backward_s)
        return cls(tuple(forward_s), input_s, weight_s, tuple(update_s), transfer_s)

    @property
    def n_stages(self) -> int:
        """Return the number of stages."""
        return len(self.forward_s)

    @property
    def backward_s(self) -> tuple[float, ...]:
        """Return the whole backward passes [s]."""
        return tuple(b + w for b, w in zip(self.input_s, self.weight_s, strict=True))


@dataclass(frozen=True, slots=True)
class Techniques:
    """Techniques besides adaptive pipelining.

    Parameters
    ----------
    splits_backward
        Whether the gradients of the weights may run later than those of the input.
    staggers_optimizer
        Whether a stage is updated when its own gradients are complete, or only when those of all stages are.
    """

    splits_backward: bool = True
    staggers_optimizer: bool = True


ALL_TECHNIQUES = Techniques()
"""Decoupled back-propagation and the staggered optimizer."""
NO_TECHNIQUES = Techniques(splits_backward=False, staggers_optimizer=False)
"""Adaptive pipelining alone."""


def shared_out(n_microbatches: int, n_pipelines: int) -> tuple[int, ...]:
    """Return the micro-batches of each pipeline, as equal as possible, (n_pipelines,)."""
    if not 1 <= n_pipelines <= n_microbatches:
        raise InputError(
            f"{n_microbatches} micro-batches for {n_pipelines} pipelines; expected one or more per pipeline"
        )
    return tuple(
        n_microbatches // n_pipelines + (pipeline < n_microbatches % n_pipelines)
        for pipeline in range(n_pipelines)
    )


def normalized(live: Sequence[int], n_pipelines: int) -> frozenset[Worker]:
    """Return lost workers for the number of live ones of each stage, gathered in the first pipelines.

    Workers of one stage hold the same parameters, so they can exchange their places in the pipelines without
    copying anything. A schedule therefore depends only on how many workers each stage has lost.
    """
    return frozenset((pipeline, s) for s, n in enumerate(live) for pipeline in range(n_pipelines - n))


Order = list[tuple[int, int]]


def _ordered(microbatches: Sequence[int]) -> Order:
    """Return pipeline and number of every micro-batch: the first of each pipeline, then the second, ..."""
    return sorted(
        ((i, k) for i, count in enumerate(microbatches) for k in range(count)), key=lambda b: b[::-1]
    )


def routes(
    microbatches: Sequence[int], n_stages: int, lost: Collection[Worker]
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the pipelines whose workers run a micro-batch, stage by stage.

    Micro-batches of live workers stay where they are. Those of lost ones go, in order, to the live worker of
    the stage that has the fewest so far; their loads then differ by one at most, unless they did before.

    Parameters
    ----------
    microbatches
        Micro-batches of each pipeline, (n_pipelines,).
    lost
        Workers that are lost.

    Returns
    -------
    dict
        By pipeline and number of the micro-batch, (n_stages,).

    Raises
    ------
    InputError
        A stage has no live worker, or a lost worker does not exist.
    """
    n_pipelines, gone = len(microbatches), frozenset(lost)
    if unknown := sorted(
        worker for worker in gone if not (0 <= worker[0] < n_pipelines and 0 <= worker[1] < n_stages)
    ):
        raise InputError(
            f"worker {unknown[0]} is lost; expected pipelines below {n_pipelines} and stages below {n_stages}"
        )
    order = _ordered(microbatches)
    chosen: dict[tuple[int, int], list[int]] = {key: [] for key in order}
    for stage in range(n_stages):
        # (micro-batches so far, pipeline) of the live workers
        loads = [(count, i) for i, count in enumerate(microbatches) if (i, stage) not in gone]
        if not loads:
            raise InputError(f"stage {stage} has no live worker; expected one or more in every stage")
        heapq.heapify(loads)
        for pipeline, k in order:
            runs_on = pipeline
            if (pipeline, stage) in gone:
                load, runs_on = loads[0]
                heapq.heapreplace(loads, (load + 1, runs_on))
            chosen[pipeline, k].append(runs_on)
    return {key: tuple(path) for key, path in chosen.items()}


# --- Schedules ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScheduledPass:
    """Pass of a micro-batch through a stage: who runs it, and when [s]."""

    kind: Kind
    pipeline: int
    microbatch: int
    stage: int
    runs_on: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Schedule:
    """One iteration of all pipelines.

    Parameters
    ----------
    passes
        Times from which it was made.
    microbatches
        Micro-batches of each pipeline, (n_pipelines,).
    lost
        Workers without which it runs.
    techniques, in_flight
        Techniques in use, and micro-batches whose activations a worker of each stage can hold, (n_stages,).
    steps
        All passes, in order of their start.
    """

    passes: StagePasses
    microbatches: tuple[int, ...]
    lost: frozenset[Worker]
    techniques: Techniques
    in_flight: tuple[int, ...]
    steps: tuple[ScheduledPass, ...]

    @cached_property
    def iteration_s(self) -> float:
        """Time from an iteration to the next one, which repeats the same schedule [s].

        With a barrier it is the end of the last pass and the longest update. With a staggered optimizer the
        next iteration starts in each stage after the update of that stage, so that it is the longest span of
        a stage, from its first pass to the end of its update.
        """
        update_s = self.passes.update_s or (0.0,) * self.passes.n_stages
        if not self.techniques.staggers_optimizer:
            return max(step.end_s for step in self.steps) + max(update_s)
        first, last = dict[int, float](), dict[int, float]()
        for step in self.steps:
            first[step.stage] = min(step.start_s, first.get(step.stage, step.start_s))
            last[step.stage] = max(step.end_s, last.get(step.stage, step.end_s))
        return max(last[stage] + update_s[stage] - first[stage] for stage in first)


_F, _B, _W = range(3)
_KINDS: tuple[Kind, ...] = ("F", "B", "W")
_Raw = list[
    tuple[int, int, int, int, int, int]
]  # start, end, kind, micro-batch, stage, pipeline of the worker


class _Problem:
    """Input of the list scheduler in whole picoseconds."""

    def __init__(self, passes: StagePasses, microbatches: Sequence[int], lost: Collection[Worker]) -> None:
        self.n_stages, self.n_pipelines = passes.n_stages, len(microbatches)
        self.order = _ordered(microbatches)
        routed = routes(microbatches, self.n_stages, lost)
        self.route = [routed[key] for key in self.order]
        times = (passes.forward_s, passes.input_s, passes.weight_s)
        self.forward, self.input, self.weight = (tuple(map(_ps, values)) for values in times)
        self.update = tuple(map(_ps, passes.update_s)) or (0,) * self.n_stages
        self.transfer = _ps(passes.transfer_s)

    def length(self, raw: _Raw, *, is_staggered: bool) -> int:
        """Return the time of an iteration, see `Schedule.iteration_s`."""
        if not is_staggered:
            return max(step[1] for step in raw) + max(self.update)
        first, last = [-1] * self.n_stages, [0] * self.n_stages
        for start, end, _, _, stage, _ in raw:
            if first[stage] < 0 or start < first[stage]:
                first[stage] = start
            if end > last[stage]:
                last[stage] = end
        spans = zip(first, last, self.update, strict=True)
        return max(end + update - start for start, end, update in spans)

    def loads(self) -> dict[Worker, int]:
        """Return the busy time of each live worker."""
        busy = dict[Worker, int]()
        for path in self.route:
            for stage, runs_on in enumerate(path):
                both = self.forward[stage] + self.input[stage] + self.weight[stage]
                busy[runs_on, stage] = busy.get((runs_on, stage), 0) + both
        return busy

    def bound(self, *, splits: bool, is_staggered: bool) -> int:
        """Return a time below which no schedule can be: work of a worker, path of a micro-batch.

        Around the work of a worker, its first micro-batch must pass the stages before it, and if the backward
        pass is whole, the last one must pass them again. The span of the first stage includes the way of a
        micro-batch through all stages and back.
        """
        forward = [value + self.transfer for value in self.forward]
        backward = [
            b + (0 if splits else w) + self.transfer for b, w in zip(self.input, self.weight, strict=True)
        ]
        path = sum(forward) + sum(backward) - 2 * self.transfer + (self.weight[0] if splits else 0)
        bounds = [path + (self.update[0] if is_staggered else max(self.update))]
        for (_, stage), busy in self.loads().items():
            if is_staggered:
                bounds.append(busy + self.update[stage])
            else:
                tail = 0 if splits else sum(backward[:stage])
                bounds.append(sum(forward[:stage]) + busy + tail + max(self.update))
        return max(bounds)

    def run(self, preference: tuple[int, ...], limits: Sequence[int], *, splits: bool) -> _Raw:
        """Return a schedule in which no worker waits while it could run a pass.

        Among the passes that a worker could run, the kind comes first, in the order of ``preference``, then
        the order of micro-batches. A forward pass needs room for its activations, which are kept until the
        last backward pass of the micro-batch is over. Nothing can block for ever: the last stage can always
        run the backward passes of what it holds, and from there on each stage frees the one before it.
        """
        last, transfer, n_pipelines, route = self.n_stages - 1, self.transfer, self.n_pipelines, self.route
        backward = self.input if splits else tuple(map(sum, zip(self.input, self.weight, strict=True)))
        length = (self.forward, backward, self.weight)
        n_workers = n_pipelines * self.n_stages  # worker of pipeline i in stage s: s * n_pipelines + i
        ready: tuple[list[list[int]], ...] = tuple([[] for _ in range(n_workers)] for _ in range(3))
        free_at, held = [0] * n_workers, [0] * n_workers
        done: _Raw = []
        for number, path in enumerate(route):
            ready[_F][path[0]].append(number)  # in order, which is a heap
        # By time, workers that may look for work, and passes that become ready: worker, kind, micro-batch.
        # Few times differ, so a heap of times is much smaller than one of events.
        times, looks = [0], {0: list(range(n_pipelines))}
        arrivals = dict[int, list[tuple[int, int, int]]]()
        while times:
            now = heapq.heappop(times)
            touched = looks.pop(now, [])
            for worker, kind, number in arrivals.pop(now, ()):
                heapq.heappush(ready[kind][worker], number)
                touched.append(worker)
            for worker in touched:
                if free_at[worker] > now:
                    continue
                stage = worker // n_pipelines
                for kind in preference:
                    if ready[kind][worker] and (kind != _F or held[worker] < limits[stage]):
                        break
                else:
                    continue
                number = heapq.heappop(ready[kind][worker])
                end = free_at[worker] = now + length[kind][stage]
                done.append((now, end, kind, number, stage, worker - stage * n_pipelines))
                if end not in looks:
                    looks[end] = []
                    if end not in arrivals:
                        heapq.heappush(times, end)
                looks[end].append(worker)
                # What follows on the same worker is ready at once, as the worker is busy until the end.
                if kind == _F:
                    held[worker] += 1
                    if stage == last:
                        heapq.heappush(ready[_B][worker], number)
                        continue
                    after = (stage + 1) * n_pipelines + route[number][stage + 1]
                elif kind == _B:
                    if splits:
                        heapq.heappush(ready[_W][worker], number)
                    else:
                        held[worker] -= 1
                    if stage == 0:
                        continue
                    after = (stage - 1) * n_pipelines + route[number][stage - 1]
                else:
                    held[worker] -= 1
                    continue
                arrival = end + transfer
                if arrival not in arrivals:
                    arrivals[arrival] = []
                    if arrival not in looks:
                        heapq.heappush(times, arrival)
                arrivals[arrival].append((after, kind, number))
        return done

    def candidates(self, room: tuple[int, ...], *, splits: bool) -> Iterator[_Raw]:
        """Yield schedules by all rules, first those with whole backward passes, which splitting allows."""
        # As many as 1F1B holds: one per stage from here to the end.
        falling = tuple(min(most, self.n_stages - stage) for stage, most in enumerate(room))
        limits = [falling] if room == falling else [falling, room]
        for limit in limits:
            yield self.run((_B, _F), limit, splits=False)
        yield self.run((_F, _B), room, splits=False)
        if splits:
            for limit in limits:
                yield self.run((_B, _F, _W), limit, splits=True)
            yield self.run((_F, _B, _W), room, splits=True)

    def best(self, room: tuple[int, ...], techniques: Techniques) -> tuple[int, _Raw]:
        """Return the shortest of all candidates; the first of equal ones."""
        is_staggered = techniques.staggers_optimizer
        bound = self.bound(splits=techniques.splits_backward, is_staggered=is_staggered)
        candidates = self.candidates(room, splits=techniques.splits_backward)
        best = next(candidates)
        least = self.length(best, is_staggered=is_staggered)
        while least > bound and (raw := next(candidates, None)) is not None:
            length = self.length(raw, is_staggered=is_staggered)
            if length < least:
                least, best = length, raw
        return least, best


def _ps(time_s: float) -> int:
    return round(time_s * PICOSECONDS)


Room = int | tuple[int, ...] | None
"""Micro-batches in flight: of every worker, of those of each stage, or None for the number of stages."""


def _room(in_flight: Room, n_stages: int) -> tuple[int, ...]:
    """Return the micro-batches that a worker holds, by default those of the first stage of 1F1B."""
    if not isinstance(in_flight, tuple):
        in_flight = (n_stages if in_flight is None else in_flight,) * n_stages
    if len(in_flight) != n_stages or min(in_flight) < 1:
        raise InputError(
            f"room for {in_flight} micro-batches; expected 1 or more in each of {n_stages} stages"
        )
    return in_flight


def make_schedule(
    passes: StagePasses,
    microbatches: Sequence[int],
    lost: Collection[Worker] = (),
    techniques: Techniques = ALL_TECHNIQUES,
    in_flight: Room = None,
) -> Schedule:
    """Return the shortest schedule that the rules of the list scheduler give.

    Rules are an order of kinds of passes and a limit of micro-batches in flight per stage: all of
    ``in_flight``, or as many of them as 1F1B uses. Schedules with whole backward passes are among those of
    split ones, so that splitting never makes an iteration longer.

    Parameters
    ----------
    passes
        Times of the passes.
    microbatches
        Micro-batches of each pipeline, (n_pipelines,); one or more in total.
    lost
        Workers that are lost; their micro-batches run on the others of their stage.
    techniques
        Techniques besides adaptive pipelining.
    in_flight
        Micro-batches whose activations a worker can hold, from the start of the forward pass to the end of
        the last backward one: one number for all, or one per stage; None for as many as there are stages,
        what the first stage of 1F1B needs.

    Raises
    ------
    InputError
        A stage has no live worker, there is no micro-batch, or no room for one.
    """
    if not any(microbatches) or min(microbatches) < 0:
        raise InputError(f"micro-batches {tuple(microbatches)}; expected one or more in total")
    room = _room(in_flight, passes.n_stages)
    problem = _Problem(passes, microbatches, lost)
    _, raw = problem.best(room, techniques)
    has_weights = any(kind == _W for _, _, kind, _, _, _ in raw)
    steps = []
    for start, end, kind, number, stage, runs_on in raw:
        pipeline, k = problem.order[number]
        # A whole backward pass is both kinds, one right after the other.
        middle = (
            end
            if has_weights or kind == _F or not techniques.splits_backward
            else start + problem.input[stage]
        )
        spans = [(kind, start, middle)] + ([(_W, middle, end)] if middle < end else [])
        steps += [
            ScheduledPass(_KINDS[kind], pipeline, k, stage, runs_on, first / PICOSECONDS, until / PICOSECONDS)
            for kind, first, until in spans
        ]
    steps.sort(key=lambda step: (step.start_s, step.stage, step.runs_on))
    return Schedule(passes, tuple(microbatches), frozenset(lost), techniques, room, tuple(steps))


def lower_bound_s(
    passes: StagePasses,
    microbatches: Sequence[int],
    lost: Collection[Worker] = (),
    techniques: Techniques = ALL_TECHNIQUES,
) -> float:
    """Return a time that no schedule with these routes can be shorter than, whatever the memory [s].

    It is the larger of the work of the busiest worker and the way of one micro-batch; arguments as in
    `make_schedule`.
    """
    problem = _Problem(passes, microbatches, lost)
    splits, is_staggered = techniques.splits_backward, techniques.staggers_optimizer
    return problem.bound(splits=splits, is_staggered=is_staggered) / PICOSECONDS


def violations(schedule: Schedule) -> list[str]:
    """Return what is wrong with a schedule; nothing, if it can be run again and again.

    Checks that every pass runs once, on the worker of its route and as long as it takes; after what it needs,
    with transfers; one pass at a time per worker; with no more micro-batches in flight than there is room
    for; and that an iteration that starts ``iteration_s`` later finds every stage updated.
    """
    times, splits = schedule.passes, schedule.techniques.splits_backward
    backward_s = times.input_s if splits else times.backward_s
    length_s = {"F": times.forward_s, "B": backward_s, "W": times.weight_s}
    near_s = 2.0 / PICOSECONDS  # times are rounded to whole picoseconds, and a pass may be two of them
    found: list[str] = []
    ends: dict[tuple[str, int, int, int], tuple[float, float]] = {}
    for step in schedule.steps:
        key = (step.kind, step.pipeline, step.microbatch, step.stage)
        if key in ends:
            found.append(f"{key} runs twice")
        ends[key] = step.start_s, step.end_s
        if abs(step.end_s - step.start_s - length_s[step.kind][step.stage]) > near_s:
            found.append(f"{key} takes {step.end_s - step.start_s} s")
        if (step.runs_on, step.stage) in schedule.lost:
            found.append(f"{key} runs on a lost worker")
    routed = routes(schedule.microbatches, times.n_stages, schedule.lost)
    for step in schedule.steps:
        if routed[step.pipeline, step.microbatch][step.stage] != step.runs_on:
            found.append(f"{step} is not on its route")
    kinds = ("F", "B", "W") if splits else ("F", "B")
    expected = {(kind, *key, s) for kind in kinds for key in routed for s in range(times.n_stages)}
    found += [f"{key} never runs" for key in sorted(expected - ends.keys())]
    found += [f"{key} should not run" for key in sorted(ends.keys() - expected)]
    if found:
        return found
    for (kind, i, k, stage), (start_s, _) in ends.items():
        needs = {
            "F": [("F", stage - 1)] if stage else [],
            "B": [("F", stage)] + ([("B", stage + 1)] if stage < times.n_stages - 1 else []),
            "W": [("B", stage)],
        }[kind]
        for before, where in needs:
            transfer_s = times.transfer_s if where != stage else 0.0
            if ends[before, i, k, where][1] + transfer_s > start_s + near_s:
                found.append(f"{(kind, i, k, stage)} starts before {before} in stage {where} has arrived")
    workers: dict[Worker, list[ScheduledPass]] = {}
    for step in schedule.steps:
        workers.setdefault((step.runs_on, step.stage), []).append(step)
    releases = kinds[-1]
    for worker, steps in workers.items():
        held, until_s = 0, 0.0
        for step in sorted(steps, key=lambda step: (step.start_s, step.end_s)):
            if step.start_s < until_s - near_s:
                found.append(f"worker {worker} runs two passes at {step.start_s} s")
            until_s = step.end_s
            held += (step.kind == "F") - (step.kind == releases)
            if held > schedule.in_flight[worker[1]]:
                found.append(f"worker {worker} holds {held} micro-batches at {step.start_s} s")
    update_s = times.update_s or (0.0,) * times.n_stages
    last_s = max(step.end_s for step in schedule.steps)
    for stage in range(times.n_stages):
        of_stage = [step for step in schedule.steps if step.stage == stage]
        complete_s = max(step.end_s for step in of_stage)
        if not schedule.techniques.staggers_optimizer:
            complete_s = last_s
        next_s = min(step.start_s for step in of_stage) + schedule.iteration_s
        if complete_s + update_s[stage] > next_s + near_s:
            found.append(f"stage {stage} starts the next iteration before its update")
    return found


# --- Times of iterations, for simulations of many failures --------------------------------------------


def plain_time_s(passes: StagePasses, microbatches: Sequence[int]) -> float:
    """Return the iteration of 1F1B without failures, the longest pipeline and then the longest update [s]."""
    longest = max(_pipeline_s(passes, count) for count in {count for count in microbatches if count})
    return longest + max(passes.update_s, default=0.0)


@lru_cache(maxsize=4096)
def _pipeline_s(passes: StagePasses, n_microbatches: int) -> float:
    return pipeline_time_s(passes.forward_s, passes.backward_s, n_microbatches, passes.transfer_s)


def rerouted_time_s(
    passes: StagePasses,
    n_microbatches: int,
    n_pipelines: int,
    live: Sequence[int],
    techniques: Techniques = ALL_TECHNIQUES,
    in_flight: Room = None,
    most_scheduled: int | None = None,
) -> float:
    """Return the iteration with so many live workers in each stage [s].

    Parameters
    ----------
    passes, techniques, in_flight
        See `make_schedule`.
    n_microbatches, n_pipelines
        Micro-batches of an iteration, shared out evenly, and pipelines.
    live
        Live workers of each stage, (n_stages,); see `normalized`.
    most_scheduled
        Micro-batches per pipeline that are scheduled one by one, two or more; None for all. Each further one
        adds as much as one of the last of these, and at least its work to the busiest worker. Tests give the
        error.

    Raises
    ------
    InputError
        A stage has no live worker, or more than there are pipelines; or too few are scheduled.
    """
    if most_scheduled is not None and most_scheduled < 2:
        raise InputError(f"{most_scheduled} micro-batches are scheduled; expected 2 or more")
    if len(live) != passes.n_stages or not all(1 <= count <= n_pipelines for count in live):
        raise InputError(
            f"{tuple(live)} live workers; expected 1 to {n_pipelines} in each of {passes.n_stages} stages"
        )
    room = _room(in_flight, passes.n_stages)
    return _rerouted_s(passes, n_microbatches, n_pipelines, tuple(live), techniques, room, most_scheduled)


@lru_cache(maxsize=16384)
def _rerouted_s(
    passes: StagePasses,
    n_microbatches: int,
    n_pipelines: int,
    live: tuple[int, ...],
    techniques: Techniques,
    room: tuple[int, ...],
    most_scheduled: int | None,
) -> float:
    lost = normalized(live, n_pipelines)

    def length(count: int) -> int:
        problem = _Problem(passes, shared_out(count, n_pipelines), lost)
        return problem.best(room, techniques)[0]

    left = 0 if most_scheduled is None else shared_out(n_microbatches, n_pipelines)[-1] - most_scheduled
    if most_scheduled is None or left <= 0:
        return length(n_microbatches) / PICOSECONDS
    both = zip(passes.forward_s, passes.backward_s, live, strict=True)
    work_s, busiest = max(((f + b) * n_pipelines / count, count) for f, b, count in both)
    # The growth over a multiple of the live workers of the busiest stage, to which it adds equal shares.
    last = most_scheduled // 2 // busiest * busiest or most_scheduled // 2
    scheduled = n_microbatches - left * n_pipelines
    whole_s, before_s = (length(count) / PICOSECONDS for count in (scheduled, scheduled - last * n_pipelines))
    return whole_s + left * max((whole_s - before_s) / last, work_s)


@dataclass(frozen=True, slots=True)
class PeerRates:
    """Throughput of equal pipelines by the workers that are live, from one measured or printed rate.

    Parameters
    ----------
    passes, n_microbatches, n_pipelines
        Passes of a pipeline, micro-batches of an iteration, and pipelines if no node is lost.
    full_samples_per_s
        Throughput of all pipelines under 1F1B; iteration times of `rerouted_time_s` only scale it.
    techniques, in_flight, most_scheduled
        See `rerouted_time_s`.
    """

    passes: StagePasses
    n_microbatches: int
    n_pipelines: int
    full_samples_per_s: float
    techniques: Techniques = ALL_TECHNIQUES
    in_flight: Room = None
    most_scheduled: int | None = None

    @property
    def n_stages(self) -> int:
        """Return the stages of a pipeline."""
        return self.passes.n_stages

    def samples_per_s(self, live: Sequence[int], n_pipelines: int) -> float:
        """Return the throughput of so many pipelines with so many live workers in each stage.

        It is never above that of the same pipelines without losses under 1F1B, so that what split backward
        passes gain without losses does not count as resilience.
        """
        plain_s = plain_time_s(self.passes, shared_out(self.n_microbatches, self.n_pipelines))
        here_s = plain_time_s(self.passes, shared_out(self.n_microbatches, n_pipelines))
        rerouted_s = here_s
        if min(live) < n_pipelines:
            rerouted_s = rerouted_time_s(
                self.passes, self.n_microbatches, n_pipelines, live,
                self.techniques, self.in_flight, self.most_scheduled,
            )  # fmt: skip
        return self.full_samples_per_s * plain_s / max(rerouted_s, here_s)
