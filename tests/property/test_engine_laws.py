"""Laws that hold for the engine under every registered policy."""

import itertools
import math
from collections import defaultdict
from dataclasses import replace

import pandas as pd
import pytest
from fixed_step import simulate_fixed_step
from hypothesis import HealthCheck, given, settings, strategies as st
from toy_cluster import (
    catalogue_of,
    clusters,
    misjudged_catalogue,
    mixed_nodes,
    scaled_policy,
    simulate,
    toy_job,
    toy_nodes,
    traces,
)

from makespan.policies import REGISTRY
from makespan.sim import NodeEvent, NodeEventKind, validate_schedule

policies = pytest.mark.parametrize("policy", REGISTRY.values(), ids=list(REGISTRY))
few = settings(max_examples=6, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
DELAY_S = 7.0


@st.composite
def cases(draw, **options):
    """Draw a cluster and a trace that fits the devices of one type there."""
    spec = draw(clusters())
    n_types = len({node.gpu.name for node in spec.nodes})
    return spec, draw(traces(min(spec.n_gpus // n_types, 8), **options))


def run(case, policy, catalogue=None, **options):
    spec, jobs = case
    return simulate(
        jobs, spec, catalogue or catalogue_of(spec), policy, **({"restart_delay_s": DELAY_S} | options)
    )


def devices(text):
    return {int(node): int(count) for node, count in (pair.split(":") for pair in text.split())}


@policies
@given(cases())
@few
def test_law_1_no_node_gives_more_than_it_has(policy, case):
    held, shared = {}, {}
    result = run(case, policy)
    for _, instant in result.events.groupby("time_s", sort=False):
        for row in instant.itertuples():
            held[row.job_id] = (devices(row.nodes), row.cpu_threads)
            shared[row.job_id] = devices(row.shared_nodes)
        for number, node in enumerate(case[0].nodes):
            shares = [(share.get(number, 0), threads) for share, threads in held.values()]
            assert sum(count for count, _ in shares) <= node.n_gpus
            assert sum(share.get(number, 0) for share in shared.values()) <= node.n_gpus
            assert sum(count * threads for count, threads in shares) <= node.cpu_threads


@policies
@given(cases())
@few
def test_law_2_time_goes_on_jobs_finish_once_and_progress_is_conserved(policy, case):
    events = run(case, policy).events
    assert events["time_s"].is_monotonic_increasing
    assert events["seq"].is_monotonic_increasing and events["seq"].is_unique
    for job in case[1]:
        rows = list(events[events["job_id"] == job.job_id].itertuples())
        kinds = [row.kind for row in rows]
        assert kinds[0] == "submitted" and kinds[-1] == "finished"
        assert kinds.count("submitted") == kinds.count("finished") == 1
        steps, is_ready = 0.0, False
        for row, after in itertools.pairwise(rows):
            is_ready = row.kind == "ready" or (is_ready and row.kind in ("sharing", "rated"))
            if is_ready:
                steps += (after.time_s - row.time_s) / row.iter_time_s
        assert steps == pytest.approx(job.steps + 1, rel=1e-9)


@policies
@given(cases())
@few
def test_law_3_the_times_of_a_job_add_up_to_its_completion_time(policy, case):
    outcomes = run(case, policy).outcomes
    parts = outcomes["running_time_s"] + outcomes["waiting_time_s"] + outcomes["restart_time_s"]
    total = outcomes["finish_time_s"] - outcomes["submit_time_s"]
    assert parts.to_numpy() == pytest.approx(total.to_numpy(), rel=1e-9, abs=1e-9)


@policies
@given(cases(distinct_times=True), st.randoms(use_true_random=False))
@few
def test_law_4_equal_inputs_give_equal_tables_in_whatever_order_the_trace_is(policy, case, random):
    spec, jobs = case
    shuffled = list(jobs)
    random.shuffle(shuffled)
    first, again, other = run(case, policy), run(case, policy), run((spec, shuffled), policy)
    for result in (again, other):
        assert result.events.to_csv(index=False) == first.events.to_csv(index=False)
        assert result.outcomes.to_csv(index=False) == first.outcomes.to_csv(index=False)


@policies
@given(cases())
@few
def test_law_5_scaling_all_times_scales_the_results(policy, case):
    factor = 4.0
    spec, jobs = case
    longer = [replace(job, submit_time_s=job.submit_time_s * factor) for job in jobs]
    base = run(case, policy)
    scaled = simulate(
        longer,
        spec,
        catalogue_of(spec, factor),
        scaled_policy(policy, factor),
        restart_delay_s=DELAY_S * factor,
    )
    assert scaled.events["kind"].tolist() == base.events["kind"].tolist()
    assert scaled.events["nodes"].tolist() == base.events["nodes"].tolist()
    for name in ("first_start_s", "finish_time_s", "attained_service_gpu_s", "waiting_time_s"):
        expected = (base.outcomes[name] * factor).to_numpy()
        assert scaled.outcomes[name].to_numpy() == pytest.approx(expected, rel=1e-9)


@policies
@given(cases())
@few
def test_law_6_a_node_without_devices_changes_nothing(policy, case):
    spec, jobs = case
    known = catalogue_of(spec).on(spec)
    wider = replace(spec, nodes=(*spec.nodes, spec.nodes[0]))
    never = [NodeEvent(1e9, spec.n_nodes, NodeEventKind.JOINED)]
    without = run(case, policy, catalogue=known)
    with_it = run((wider, jobs), policy, catalogue=known, failures=never)
    pd.testing.assert_frame_equal(without.outcomes, with_it.outcomes)
    of_jobs = with_it.events[with_it.events["job_id"] != ""].drop(columns="seq").reset_index(drop=True)
    pd.testing.assert_frame_equal(without.events.drop(columns="seq"), of_jobs)


@policies
def test_law_6_an_empty_trace_gives_empty_tables(policy):
    result = run((toy_nodes(2, 4), []), policy)
    assert result.events.empty and result.outcomes.empty
    assert result.n_decisions == 0
    assert list(result.events.columns)[:4] == ["time_s", "seq", "kind", "job_id"]


@pytest.mark.parametrize("name", [name for name, policy in REGISTRY.items() if policy.honours_guarantees])
@given(cases())
@few
def test_law_7_a_guaranteed_job_is_never_slower_than_its_guarantee_while_it_runs(name, case):
    spec, jobs = case[0], [replace(case[1][0], is_guaranteed=True), *case[1][1:]]
    events = run((spec, jobs), REGISTRY[name]).events
    for job in jobs:
        if job.is_guaranteed:
            rows = events[events["job_id"] == job.job_id]
            reference_s = catalogue_of(spec).on(spec).requested(job).iter_time_s
            assert (rows["kind"] == "started").any()
            assert not (rows["iter_time_s"] > reference_s * (1 + 1e-9)).any()
            assert not (rows["kind"] == "suspended").any()


TIMED = [
    toy_job("a", 0.4, workload="t5", n_gpus=2, plan="zero-dp", steps=40),
    toy_job("b", 3.3, n_gpus=4, plan="ga", steps=90, is_guaranteed=True),
    toy_job("c", 11.7, workload="gpt2", n_gpus=2, plan="tp+ga", steps=12),
    toy_job("d", 23.1, n_gpus=1, steps=35, is_guaranteed=True),
    toy_job("e", 24.6, workload="t5", n_gpus=4, plan="ga", steps=25),
]


@policies
def test_law_8_the_engine_agrees_with_a_fixed_step_engine_as_the_step_goes_to_zero(policy):
    options = {"restart_delay_s": 3.0, "interval_s": 0.0}
    for spec in (toy_nodes(2, 2), mixed_nodes(2, 2)):
        errors = []
        outcomes = simulate(TIMED, spec, catalogue_of(spec), policy, **options).outcomes
        exact_s = dict(zip(outcomes["job_id"], outcomes["finish_time_s"], strict=True))
        for step_s in (0.1, 0.02):
            found_s = simulate_fixed_step(TIMED, spec, catalogue_of(spec), policy, step_s=step_s, **options)
            errors.append(max(abs(found_s[name] - exact_s[name]) for name in exact_s))
        assert errors[1] <= 12 * step_s  # a decision that two times decide by little may differ before
        assert errors[1] < max(errors[0] / 2, 0.06)


@st.composite
def node_events(draw, spec):
    """Draw failures of all nodes but the first, each followed by a return."""
    events = []
    for node in range(1, spec.n_nodes):
        times = sorted(draw(st.lists(st.integers(1, 300), max_size=4, unique=True)))
        kinds = (NodeEventKind.FAILED, NodeEventKind.JOINED)
        events += [NodeEvent(float(time), node, kinds[turn % 2]) for turn, time in enumerate(times)]
        if len(times) % 2:
            events.append(NodeEvent(400.0, node, NodeEventKind.JOINED))
        if draw(st.booleans()):
            at_s, notice_s = draw(st.integers(1, 200)), draw(st.sampled_from((0.0, 20.0)))
            events.append(NodeEvent(float(at_s), node, NodeEventKind.WITHDRAWN, 1, notice_s))
            events.append(NodeEvent(float(at_s) + 99.0, node, NodeEventKind.RETURNED))
    return events


@policies
@given(cases(), st.sampled_from((0.0, 1.5, 30.0)), st.sampled_from((None, 4.0, 60.0)), st.data())
@settings(max_examples=10, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_every_schedule_is_possible_with_rounds_delays_and_failures(policy, case, delay_s, interval_s, data):
    spec, jobs = case
    failures = data.draw(node_events(spec))
    checkpoint_s = data.draw(st.sampled_from((None, 5.0, 1e6)))
    options = {"restart_delay_s": delay_s, "checkpoint_interval_s": checkpoint_s}
    result = run(case, policy, failures=failures, interval_s=interval_s, **options)
    found = validate_schedule(
        result.events,
        jobs,
        spec,
        catalogue_of(spec),
        interval_s=policy.interval_s if interval_s is None else interval_s,
        keeps_guarantees=policy.honours_guarantees,
        outcomes=result.outcomes,
        **options,
    )
    assert found == []


@policies
@given(cases())
@few
def test_every_schedule_is_possible_where_predictions_are_wrong(policy, case):
    spec, jobs = case
    result = run(case, policy, catalogue=misjudged_catalogue())
    options = {"keeps_guarantees": policy.honours_guarantees, "outcomes": result.outcomes}
    assert validate_schedule(result.events, jobs, spec, misjudged_catalogue(), DELAY_S, **options) == []


@policies
def test_a_policy_writes_to_nothing_that_it_sees(policy):
    watched = _Watched(policy)
    run((toy_nodes(2, 4), TIMED), watched)
    assert watched.n_calls >= 2


class _Watched:
    """A policy that compares the view before and after each decision, and asks twice."""

    def __init__(self, policy):
        self._policy, self.n_calls = policy, 0

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def decide(self, view, state):
        before = _picture(view)
        decision, after = self._policy.decide(view, state)
        assert _picture(view) == before
        self.n_calls += 1
        return decision, after


def _picture(view):
    jobs = defaultdict(list)
    for job in (*view.pending, *view.running):
        jobs[job.spec.job_id] = [
            job.spec,
            job.index,
            job.allocation,
            job.restart_count,
            job.first_start_s,
            None if math.isnan(job.waiting_since_s) else job.waiting_since_s,
            None if math.isnan(job.ready_time_s) else job.ready_time_s,
            job.attained_service_gpu_s,
        ]
    return (dict(jobs), view.time_s, view.free_gpus, view.free_cpus, view.free_histogram, list(view._pending))
