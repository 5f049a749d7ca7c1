"""The engine against closed forms, hand calculation and exhaustive search."""

import itertools
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings, strategies as st
from toy_cluster import (
    Scripted,
    find,
    one_gpu_catalogue,
    simulate,
    throughput_rows,
    toy_catalogue,
    toy_job,
    toy_nodes,
)

from makespan.policies import REGISTRY, policy
from makespan.sim import Allocation, Decision
from makespan.studies import TableCatalogue

quick = settings(max_examples=40, derandomize=True)
gaps = st.integers(0, 80).map(lambda quarter: quarter / 4)


def finish_times(result):
    return dict(zip(result.outcomes["job_id"], result.outcomes["finish_time_s"], strict=True))


def mean_jct(result):
    return float((result.outcomes["finish_time_s"] - result.outcomes["submit_time_s"]).mean())


@given(st.lists(st.tuples(gaps, st.integers(1, 30)), min_size=1, max_size=25), st.sampled_from((0.0, 2.5)))
@quick
def test_fifo_on_one_device_is_the_lindley_recursion(jobs, delay_s):
    trace, submit_s = [], 0.0
    for index, (gap_s, steps) in enumerate(jobs):
        submit_s += gap_s
        trace.append(toy_job(str(index), submit_s, steps=steps))
    options = {"restart_delay_s": delay_s}
    outcomes = simulate(trace, toy_nodes(1, 1), one_gpu_catalogue(0.75), policy("fifo"), **options).outcomes
    wait_s = 0.0
    for job, before, found in zip(trace, [None, *trace], outcomes.itertuples(), strict=False):
        if before is not None:
            service_s = delay_s + 0.75 * (before.steps + 1)
            wait_s = max(0.0, wait_s + service_s - (job.submit_time_s - before.submit_time_s))
        assert found.waiting_time_s == pytest.approx(wait_s, abs=1e-9)


def test_two_jobs_by_hand():
    catalogue = TableCatalogue.from_tables(
        [throughput_rows("roberta", [("ga", "1", 2.0), ("ga", "2", 1.25), ("ga", "11", 1.5)])]
    )

    def script(view):
        one, both = find(catalogue, "ga", "1"), find(catalogue, "ga", "2")
        jobs = {job.spec.job_id: job for job in (*view.pending, *view.running)}
        if view.time_s == 0.0:
            return {"a": Allocation(both, (0,))}
        if view.time_s == 30.0:  # b arrives: each gets one device
            return {name: Allocation(one, (0,)) for name in jobs}
        if "a" not in jobs:  # a is done: b grows
            return {"b": Allocation(both, (0,))}
        return {}

    trace = [toy_job("a", 0.0, n_gpus=2, steps=19), toy_job("b", 30.0, n_gpus=2, steps=39)]
    result = simulate(trace, toy_nodes(1, 2), catalogue, Scripted(script), restart_delay_s=10.0)
    # a: ready at 10, runs 20 s = 16 steps of 1.25 s; 4 are left; ready again at 40, 4 x 2 s, done at 48.
    # b: ready at 40, runs 8 s = 4 steps; at 48 it grows, ready at 58, 36 x 1.25 s = 45 s, done at 103.
    assert finish_times(result) == {"a": 48.0, "b": 103.0}
    a, b = result.outcomes.itertuples()
    assert (a.running_time_s, a.restart_time_s, a.waiting_time_s, a.n_restarts) == (28.0, 20.0, 0.0, 1)
    assert (b.running_time_s, b.restart_time_s, b.waiting_time_s, b.n_restarts) == (53.0, 20.0, 0.0, 1)
    assert (a.attained_service_gpu_s, b.attained_service_gpu_s) == (2 * 30 + 18, 18 + 2 * 55)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
@quick
def test_shortest_job_first_is_the_best_order_on_one_device(steps):
    trace = [toy_job(str(index), 0.0, steps=count) for index, count in enumerate(steps)]
    best_s = min(
        sum(itertools.accumulate(3.0 + count + 1 for count in order)) / len(order)
        for order in itertools.permutations(steps)
    )
    for name in ("sjf", "srtf"):
        result = simulate(trace, toy_nodes(1, 1), one_gpu_catalogue(), policy(name), restart_delay_s=3.0)
        assert mean_jct(result) == pytest.approx(best_s)


def alone(name):
    """Return a policy under which no two jobs share a device: bounds count device time once."""
    chosen = policy(name)
    return replace(chosen, shares=False) if hasattr(chosen, "shares") else chosen


@pytest.mark.parametrize("name", REGISTRY)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4))
@settings(max_examples=8, derandomize=True)
def test_no_policy_beats_the_best_order_on_one_device(name, steps):
    chosen = alone(name)
    trace = [toy_job(str(index), 0.0, steps=count) for index, count in enumerate(steps)]
    best_s = sum(itertools.accumulate(3.0 + count + 1 for count in sorted(steps))) / len(steps)
    options = {"restart_delay_s": 3.0, "interval_s": 0.0}
    result = simulate(trace, toy_nodes(1, 1), one_gpu_catalogue(), chosen, **options)
    assert mean_jct(result) >= best_s - 1e-9


@pytest.mark.parametrize("name", REGISTRY)
@given(st.lists(st.sampled_from((4, 20, 60)), min_size=1, max_size=3))
@settings(max_examples=6, derandomize=True)
def test_no_policy_beats_the_least_device_time_of_all_jobs(name, steps):
    """Brute force over configurations: devices times makespan cannot be less than the least area."""
    chosen, spec, delay_s = alone(name), toy_nodes(1, 4), 5.0
    catalogue = toy_catalogue().on(spec)
    trace = [toy_job(str(index), 0.0, workload="t5", n_gpus=2, steps=n) for index, n in enumerate(steps)]
    every = catalogue.all("t5")
    least_gpu_s = sum(min(i.n_gpus * (delay_s + (n + 1) * i.iter_time_s) for i in every) for n in steps)
    longest_s = max(min(delay_s + (n + 1) * i.iter_time_s for i in every) for n in steps)
    options = {"restart_delay_s": delay_s, "interval_s": 0.0}
    outcomes = simulate(trace, spec, catalogue, chosen, **options).outcomes
    assert outcomes["finish_time_s"].max() >= max(longest_s, least_gpu_s / spec.n_gpus) - 1e-9
    assert outcomes["attained_service_gpu_s"].sum() >= least_gpu_s - 1e-9


@given(st.lists(st.sampled_from((1, 2)), min_size=1, max_size=6), st.lists(gaps, min_size=6, max_size=6))
@quick
def test_fifo_equals_a_search_over_all_start_times(sizes, times):
    """On one node of two devices every job starts at the earliest instant that keeps the order."""
    catalogue = TableCatalogue.from_tables([throughput_rows("roberta", [("ga", "1", 1.0), ("ga", "2", 0.5)])])
    submitted = sorted(times[: len(sizes)])
    trace = [
        toy_job(str(index), at, n_gpus=size, steps=9 + index)
        for index, (at, size) in enumerate(zip(submitted, sizes, strict=True))
    ]
    started: list[tuple[float, float, int]] = []  # start, end, devices
    for job in trace:
        length_s = 1.5 + (job.steps + 1) * (1.0 if job.n_gpus == 1 else 0.5)
        floor_s = max([job.submit_time_s, *(start for start, _, _ in started)])
        instants = sorted({floor_s, *(end for _, end, _ in started if end > floor_s)})
        for at in instants:
            used = sum(count for start, end, count in started if start <= at < end)
            if used + job.n_gpus <= 2:
                started.append((at, at + length_s, job.n_gpus))
                break
    result = simulate(trace, toy_nodes(1, 2), catalogue, policy("fifo"), restart_delay_s=1.5)
    assert result.outcomes["first_start_s"].tolist() == pytest.approx([start for start, _, _ in started])


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """One device in turns of one round; without a delay this tends to equal sharing."""

    interval_s: float
    name: str = "round-robin"
    title: str = "Round robin"
    is_clairvoyant: bool = False
    honours_guarantees: bool = False
    references: tuple[str, ...] = ()

    def initial_state(self, cluster, catalogue):
        return 0

    def decide(self, view, state):
        least = min((*view.pending, *view.running), key=lambda job: (job.attained_service_gpu_s, job.index))
        changes = {job.spec.job_id: None for job in view.running if job is not least}
        if least.allocation is None:
            changes[least.spec.job_id] = Allocation(view.catalogue.requested(least.spec), (0,))
        return Decision(changes, view.time_s + self.interval_s), state


def processor_sharing(works_s):
    """Finish times of jobs that are all there at time 0 and share one device equally."""
    order = sorted(range(len(works_s)), key=lambda index: works_s[index])
    now_s, done_s, finish_s = 0.0, 0.0, {}
    for rank, index in enumerate(order):
        now_s += (works_s[index] - done_s) * (len(order) - rank)
        done_s = works_s[index]
        finish_s[str(index)] = now_s
    return finish_s


def test_short_turns_on_one_device_tend_to_processor_sharing():
    steps = (9, 24, 24, 49)
    trace = [toy_job(str(index), 0.0, steps=count) for index, count in enumerate(steps)]
    expected = processor_sharing([count + 1.0 for count in steps])
    worst = []
    for turn_s in (2.0, 0.5, 0.125):
        result = simulate(
            trace, toy_nodes(1, 1), one_gpu_catalogue(), RoundRobin(turn_s), restart_delay_s=0.0
        )
        found = finish_times(result)
        worst.append(max(abs(found[name] - expected[name]) for name in expected))
        assert worst[-1] <= len(steps) * turn_s
    assert worst[2] < worst[0]
