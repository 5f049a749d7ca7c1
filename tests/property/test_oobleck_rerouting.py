"""Laws of re-routed schedules: they can be run, keep to bounds, and are near the best of small cases."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from makespan.emulator import pipeline_time_s
from makespan.errors import InputError
from makespan.oobleck.rerouting import (
    NO_TECHNIQUES,
    StagePasses,
    Techniques,
    lower_bound_s,
    make_schedule,
    normalized,
    plain_time_s,
    rerouted_time_s,
    routes,
    shared_out,
    violations,
)

EVERY_TECHNIQUE = [Techniques(splits, staggers) for splits in (False, True) for staggers in (False, True)]
PICOSECOND = 1e-12


@st.composite
def cases(draw):
    """Draw passes, micro-batches of up to three pipelines, lost workers, and room for activations."""
    n_stages, n_pipelines = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    times = st.lists(st.integers(1, 6).map(float), min_size=n_stages, max_size=n_stages).map(tuple)
    updates = draw(st.one_of(st.just(()), times))
    passes = StagePasses(
        draw(times), draw(times), draw(times), updates, draw(st.sampled_from([0.0, 0.5, 2.0]))
    )
    counts = tuple(draw(st.lists(st.integers(1, 4), min_size=n_pipelines, max_size=n_pipelines)))
    lost = set()
    for stage in range(n_stages):
        lost |= {(i, stage) for i in draw(st.sets(st.integers(0, n_pipelines - 1), max_size=n_pipelines - 1))}
    return passes, counts, frozenset(lost), draw(st.one_of(st.none(), st.integers(1, 8)))


@given(cases(), st.sampled_from(EVERY_TECHNIQUE))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_a_schedule_can_be_run_and_is_not_below_the_bound(case, techniques):
    passes, counts, lost, room = case
    schedule = make_schedule(passes, counts, lost, techniques, room)
    assert violations(schedule) == []
    one_by_one = (
        sum(passes.forward_s) + sum(passes.backward_s) + 2 * (passes.n_stages - 1) * passes.transfer_s
    )
    longest = sum(counts) * one_by_one + max(passes.update_s, default=0.0)
    bound = lower_bound_s(passes, counts, lost, techniques)
    assert bound - PICOSECOND <= schedule.iteration_s <= longest + PICOSECOND


@given(cases())
@settings(max_examples=150, derandomize=True, deadline=None)
def test_no_technique_makes_an_iteration_or_its_bound_longer(case):
    passes, counts, lost, room = case
    times = {one: make_schedule(passes, counts, lost, one, room).iteration_s for one in EVERY_TECHNIQUE}
    bounds = {one: lower_bound_s(passes, counts, lost, one) for one in EVERY_TECHNIQUE}
    for found in (times, bounds):
        for one, time_s in found.items():
            assert found[replace(one, splits_backward=True)] <= time_s + PICOSECOND
            assert found[replace(one, staggers_optimizer=True)] <= time_s + PICOSECOND


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(1, 6))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_without_losses_and_techniques_equal_stages_take_the_time_of_1f1b(p, d, m, forward, backward):
    passes = StagePasses.split((float(forward),) * p, (float(backward),) * p)
    formula = (m + p - 1) * (forward + backward)
    assert make_schedule(passes, (m,) * d, (), NO_TECHNIQUES).iteration_s == formula
    assert plain_time_s(passes, (m,) * d) == formula == pipeline_time_s((forward,) * p, (backward,) * p, m)


@pytest.mark.parametrize("n_stages", [2, 3, 4, 6, 8])
def test_equal_passes_leave_no_bubble_with_room_for_twice_the_activations(n_stages):
    """As the schedule ZB-H2 of Qi et al., which holds up to 2 p - 1 micro-batches."""
    passes = StagePasses((1.0,) * n_stages, (1.0,) * n_stages, (1.0,) * n_stages)
    m = 3 * n_stages
    schedule = make_schedule(passes, (m,), in_flight=2 * n_stages - 1)
    assert schedule.iteration_s == 3.0 * m == lower_bound_s(passes, (m,))
    barrier = Techniques(splits_backward=True, staggers_optimizer=False)
    # With a barrier the warm-up of the last stage is left: a third of the bubble of 1F1B.
    assert make_schedule(passes, (m,), (), barrier, 2 * n_stages - 1).iteration_s == 3.0 * m + n_stages - 1


@given(cases())
@settings(max_examples=150, derandomize=True, deadline=None)
def test_only_micro_batches_of_lost_workers_move_and_loads_stay_even(case):
    passes, counts, lost, _ = case
    routed = routes(counts, passes.n_stages, lost)
    for stage in range(passes.n_stages):
        loads = dict.fromkeys((i for i in range(len(counts)) if (i, stage) not in lost), 0)
        for (pipeline, _), path in routed.items():
            loads[path[stage]] += 1
            assert path[stage] == pipeline or (pipeline, stage) in lost
        most, own = max(loads.values()), max(counts[i] for i in loads)
        assert sum(loads.values()) == sum(counts)
        # The busiest has its own micro-batches, or one more than the least busy.
        assert most == own or most - min(loads.values()) <= 1


def test_lost_workers_gather_in_the_first_pipelines():
    assert normalized((3, 1, 2), 3) == {(0, 1), (1, 1), (0, 2)}
    passes = StagePasses.split((1.0,) * 3, (2.0,) * 3)
    counts = (4, 4, 4)
    bounds = {lower_bound_s(passes, counts, {(i, 1)}) for i in range(3)}
    assert len(bounds) == 1


def test_wrong_input_is_one_line():
    passes = StagePasses.split((1.0, 1.0), (2.0, 2.0))
    for call, message in (
        (lambda: make_schedule(passes, (2,), {(0, 1)}), "stage 1 has no live worker"),
        (
            lambda: make_schedule(passes, (2,), {(1, 0)}),
            r"worker \(1, 0\) is lost; expected pipelines below 1",
        ),
        (lambda: make_schedule(passes, (0, 0)), r"micro-batches \(0, 0\); expected one or more"),
        (
            lambda: make_schedule(passes, (2,), in_flight=0),
            r"room for \(0, 0\) micro-batches; expected 1 or more",
        ),
        (
            lambda: rerouted_time_s(passes, 4, 2, (2, 3)),
            r"\(2, 3\) live workers; expected 1 to 2 in each of 2",
        ),
        (lambda: shared_out(2, 3), "2 micro-batches for 3 pipelines"),
        (lambda: StagePasses((1.0,), (1.0, 1.0), (1.0,)), "passes of 1, 2 and 1 stages"),
        (lambda: StagePasses((0.0,), (1.0,), (1.0,)), "a pass takes no time"),
        (lambda: StagePasses.split((1.0,), (1.0,), 1.0), "weight_share is 1.0"),
    ):
        with pytest.raises(InputError, match=message):
            call()


# --- The validator finds what is wrong --------------------------------------------------------------


def broken(schedule):
    """Return schedules that cannot be run, each with a word of what is said of it."""
    steps, first, last = schedule.steps, schedule.steps[0], schedule.steps[-1]
    later = next(step for step in steps if step.kind == "F" and step.stage == 1)
    yield "never runs", replace(schedule, steps=steps[:-1])
    yield "runs twice", replace(schedule, steps=(*steps, first))
    yield "takes", replace(schedule, steps=(*steps[:-1], replace(last, end_s=last.end_s + 1.0)))
    yield "not on its route", replace(schedule, steps=(replace(first, runs_on=1 - first.runs_on), *steps[1:]))
    early = replace(later, start_s=later.start_s - 0.5, end_s=later.end_s - 0.5)
    yield "has arrived", replace(schedule, steps=tuple(early if step is later else step for step in steps))
    yield "holds", replace(schedule, in_flight=(1, 1, 1))
    moved = [
        replace(step, start_s=first.start_s, end_s=first.start_s + 1.0) for step in steps if step.kind == "F"
    ]
    others = [step for step in steps if step.kind != "F"]
    yield "two passes", replace(schedule, steps=(*moved, *others))
    yield "lost worker", replace(schedule, lost=frozenset({(0, 0)}))
    short = replace(schedule)
    short.__dict__["iteration_s"] = schedule.iteration_s - 1.0
    yield "before its update", short


@pytest.mark.parametrize("techniques", EVERY_TECHNIQUE)
def test_the_validator_finds_what_is_wrong(techniques):
    passes = StagePasses((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, (1.0,) * 3)
    schedule = make_schedule(passes, (3, 3), (), techniques)
    assert violations(schedule) == []
    for text, wrong in broken(schedule):
        assert any(text in problem for problem in violations(wrong)), text


# --- Beside an exhaustive search --------------------------------------------------------------------


def shortest(passes, counts, lost, splits, room):
    """Return the shortest makespan over all schedules on the same routes, by search with dominance.

    Passes are appended in the order of their start, each as early as it can be; of states with the same
    passes done only those are kept that are not later in everything.
    """
    n_stages = passes.n_stages
    routed = routes(counts, n_stages, lost)
    kinds = "FBW" if splits else "FB"
    length = {
        "F": passes.forward_s,
        "B": passes.input_s if splits else passes.backward_s,
        "W": passes.weight_s,
    }
    keys = [(kind, b, s) for b in routed for kind in kinds for s in range(n_stages)]
    index = {key: number for number, key in enumerate(keys)}
    workers = sorted({(path[s], s) for path in routed.values() for s in range(n_stages)}, key=str)
    place = {worker: number for number, worker in enumerate(workers)}
    needs = []
    for kind, b, s in keys:
        if kind == "F":
            before = [("F", b, s - 1)] if s else []
        elif kind == "B":
            before = [("F", b, s)] + ([("B", b, s + 1)] if s < n_stages - 1 else [])
        else:
            before = [("B", b, s)]
        needs.append([(index[one], passes.transfer_s if one[2] != s else 0.0) for one in before])
    on = [place[routed[b][s], s] for _, b, s in keys]
    takes = [length[kind][s] for kind, _, s in keys]
    work = [sum(t for t, w in zip(takes, on, strict=True) if w == worker) for worker in range(len(workers))]
    # A little more than that of the list scheduler, so that the search has to find one as good by itself.
    best = 1.001 * make_schedule(passes, counts, lost, Techniques(splits, False), room).iteration_s
    seen = {}
    everything = (1 << len(keys)) - 1

    def visit(done, ends, free, left, held, now):
        nonlocal best
        if done == everything:
            best = min(best, max(free))
            return
        if max(f + rest for f, rest in zip(free, left, strict=True)) >= best:
            return
        mark = (*free, *(end if end is not None else 0.0 for end in ends), now)
        kept = seen.setdefault(done, [])
        if any(all(a <= b for a, b in zip(old, mark, strict=True)) for old in kept):
            return
        kept[:] = [old for old in kept if not all(b <= a for a, b in zip(old, mark, strict=True))] + [mark]
        starts = []
        for number, (kind, _, _) in enumerate(keys):
            if done >> number & 1 or any(not done >> one & 1 for one, _ in needs[number]):
                continue
            worker = on[number]
            if kind == "F" and held[worker] >= room:
                continue
            start = max([free[worker], *(ends[one] + wait for one, wait in needs[number])])
            if start >= now:
                starts.append((start, number))
        for start, number in sorted(starts):
            worker, end = on[number], start + takes[number]
            change = (keys[number][0] == "F") - (keys[number][0] == kinds[-1])
            visit(
                done | 1 << number,
                (*ends[:number], end, *ends[number + 1 :]),
                (*free[:worker], end, *free[worker + 1 :]),
                (*left[:worker], left[worker] - takes[number], *left[worker + 1 :]),
                (*held[:worker], held[worker] + change, *held[worker + 1 :]),
                start,
            )

    none = (0,) * len(workers)
    visit(0, (None,) * len(keys), tuple(map(float, none)), tuple(work), none, 0.0)
    return best


SHAPES = [(2, (2,)), (2, (3,)), (2, (2, 1)), (3, (2,)), (3, (1, 1)), (2, (1, 1, 1))]
"""Stages, and micro-batches of each pipeline."""


def sample(seed):
    """Draw a case that is small enough for the search."""
    rng = np.random.default_rng(seed)
    n_stages, counts = SHAPES[int(rng.integers(len(SHAPES)))]
    f, b, w = (tuple(map(float, rng.integers(1, 5, n_stages))) for _ in range(3))
    passes = StagePasses(f, b, w, (), float(rng.integers(2)))
    lost = set()
    if len(counts) > 1:
        lost = {(int(rng.integers(len(counts))), stage) for stage in range(n_stages) if rng.random() < 0.6}
    return passes, counts, lost, bool(rng.integers(2)), int(rng.integers(1, n_stages + 2))


def test_schedules_are_close_to_the_shortest_of_small_cases():
    """How many of a seeded sample are the shortest, and the largest gap, stand on the background page."""
    gaps = []
    for seed in range(100):
        passes, counts, lost, splits, room = sample(seed)
        ours = make_schedule(passes, counts, lost, Techniques(splits, False), room).iteration_s
        best = shortest(passes, counts, lost, splits, room)
        bound = lower_bound_s(passes, counts, lost, Techniques(splits, False))
        assert bound - PICOSECOND <= best <= ours + PICOSECOND
        gaps.append(ours / best - 1.0)
    assert sum(gap < 1e-9 for gap in gaps) == 99
    assert max(gaps) == pytest.approx(0.0588, abs=1e-4)


# --- Many micro-batches -----------------------------------------------------------------------------


def test_further_micro_batches_grow_as_the_last_scheduled_ones():
    """The mean and the largest error of pricing them so stand on the background page."""
    errors = []
    rng = np.random.default_rng(1)
    for _ in range(25):
        n_stages, n_pipelines = int(rng.integers(2, 6)), int(rng.integers(2, 7))
        forward = 1.0 + 0.2 * rng.random(n_stages)
        passes = StagePasses.split(tuple(forward), tuple(2.0 * forward))
        live = tuple(int(max(1, n_pipelines - rng.integers(0, 3))) for _ in range(n_stages))
        count = n_pipelines * int(rng.integers(30, 51))
        whole = rerouted_time_s(passes, count, n_pipelines, live)
        priced = rerouted_time_s(passes, count, n_pipelines, live, most_scheduled=12)
        errors.append(abs(priced / whole - 1.0))
    assert np.mean(errors) == pytest.approx(0.0034, abs=1e-4)
    assert max(errors) == pytest.approx(0.022, abs=5e-4)
