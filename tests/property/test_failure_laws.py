"""Laws of failures and of recovery from them, which hold under every registered policy."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from toy_cluster import catalogue_of, mixed_nodes, one_gpu_catalogue, simulate, toy_job, toy_nodes, traces

from makespan.metrics import job_goodput
from makespan.policies import REGISTRY
from makespan.sim import NodeEvent, NodeEventKind, Recovery, validate_schedule

pytestmark = pytest.mark.filterwarnings("error")
policies = pytest.mark.parametrize("policy", REGISTRY.values(), ids=list(REGISTRY))
some = settings(max_examples=10, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
DELAY_S = 7.0


@st.composite
def recoveries(draw):
    """Draw a recovery of any kind, with and without checkpoints that cost time."""
    kind = draw(st.sampled_from(("restart", "elastic", "resilient")))
    every_s = draw(st.sampled_from((None, 4.0, 25.0)))
    return Recovery(
        kind,
        every_s,
        None if every_s is None else draw(st.sampled_from((0.0, 1.5))),
        draw(st.sampled_from((None, 3.0))),
        None if kind == "restart" else draw(st.sampled_from((0.0, 2.0, 20.0))),
        draw(st.sampled_from((1, 2))) if kind == "resilient" else None,
    )


@st.composite
def failure_schedules(draw, spec):
    """Draw failures of any nodes, all of them at once too; each node returns in the end."""
    events = []
    for node in range(spec.n_nodes):
        times = sorted(draw(st.lists(st.integers(1, 200), max_size=6, unique=True)))
        kinds = (NodeEventKind.FAILED, NodeEventKind.JOINED)
        events += [NodeEvent(float(time), node, kinds[turn % 2]) for turn, time in enumerate(times)]
        if len(times) % 2:
            events.append(NodeEvent(400.0, node, NodeEventKind.JOINED))
        if draw(st.booleans()):
            at_s, count = draw(st.integers(1, 200)), draw(st.integers(1, spec.nodes[node].n_gpus))
            events.append(NodeEvent(float(at_s), node, NodeEventKind.WITHDRAWN, count))
            events.append(NodeEvent(400.0, node, NodeEventKind.RETURNED))
    return events


@st.composite
def cases(draw):
    """Draw a cluster of small nodes, a trace whose jobs take several, failures and a recovery."""
    if draw(st.booleans()):
        spec = mixed_nodes(2, draw(st.sampled_from((2, 4))))
    else:
        spec = toy_nodes(draw(st.integers(1, 4)), draw(st.sampled_from((2, 4))))
    n_types = len({node.gpu.name for node in spec.nodes})
    jobs = draw(traces(min(spec.n_gpus // n_types, 8), max_jobs=5))
    return spec, jobs, draw(failure_schedules(spec)), draw(recoveries()), draw(st.sampled_from((None, 6.0)))


def run(case, policy, **changes):
    spec, jobs, failures, recovery, interval_s = case
    options = {
        "failures": failures,
        "recovery": recovery,
        "interval_s": interval_s,
        "restart_delay_s": DELAY_S,
    }
    return simulate(jobs, spec, catalogue_of(spec), policy, **(options | changes))


def violations(case, policy, result):
    spec, jobs, _, recovery, interval_s = case
    return validate_schedule(
        result.events,
        jobs,
        spec,
        catalogue_of(spec),
        DELAY_S,
        interval_s=policy.interval_s if interval_s is None else interval_s,
        keeps_guarantees=policy.honours_guarantees,
        outcomes=result.outcomes,
        recovery_of=lambda job: recovery,
        losses=result.losses,
    )


@policies
@given(cases())
@some
def test_every_job_ends_and_no_law_is_broken_whatever_fails(policy, case):
    result = run(case, policy)
    assert sorted(result.outcomes["job_id"]) == sorted(job.job_id for job in case[1])
    assert violations(case, policy, result) == []


@policies
@given(cases())
@settings(max_examples=4, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_device_time_adds_up_and_progress_is_lost_only_where_a_row_says_so(policy, case):
    result = run(case, policy)
    jobs = job_goodput(result.events, result.losses).set_index("job_id")
    outcomes = result.outcomes.set_index("job_id").loc[jobs.index]
    parts = ["useful_gpu_s", "lost_gpu_s", "checkpoint_gpu_s", "recovery_gpu_s", "restart_gpu_s"]
    of_jobs = result.events[result.events["job_id"] != ""]
    until_s = of_jobs.groupby("job_id")["time_s"].shift(-1)
    as_guest_gpu_s = (until_s - of_jobs["time_s"]) * of_jobs["n_gpus"] * (of_jobs["shared_nodes"] != "")
    alone_gpu_s = as_guest_gpu_s.groupby(of_jobs["job_id"]).sum().loc[jobs.index]
    held = (outcomes["attained_service_gpu_s"] + alone_gpu_s).to_numpy()
    assert jobs["held_gpu_s"].to_numpy() == pytest.approx(held, rel=1e-6, abs=1e-6)
    assert jobs[parts].sum(axis=1).to_numpy() == pytest.approx(held, rel=1e-6, abs=1e-6)
    assert (jobs[parts] >= -1e-6).all(axis=None)
    spent = outcomes["running_time_s"] + outcomes["waiting_time_s"] + outcomes["restart_time_s"]
    assert spent.to_numpy() == pytest.approx(jobs["jct_s"].to_numpy(), rel=1e-9, abs=1e-6)
    lost = dict(zip(result.losses["seq"], result.losses["lost_steps"], strict=True))
    assert all(steps >= 0 for steps in lost.values())
    for _, rows in result.events[result.events["job_id"] != ""].groupby("job_id"):
        before = rows["steps_left"].shift().fillna(np.inf)
        given_back = rows["seq"].map(lost).fillna(0.0)
        assert (rows["steps_left"] <= before + given_back + 1e-9).all()


@policies
@given(cases())
@settings(max_examples=3, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_equal_inputs_give_equal_bytes_and_no_failures_are_as_if_there_was_no_recovery(policy, case):
    first, again = run(case, policy), run(case, policy)
    for name in ("events", "outcomes", "losses"):
        assert getattr(again, name).to_csv(index=False) == getattr(first, name).to_csv(index=False)
    free = replace(case[3], checkpoint_interval_s=None, checkpoint_s=None)
    quiet, without = (
        run(case, policy, failures=(), recovery=free),
        run(case, policy, failures=(), recovery=None),
    )
    assert quiet.losses.empty
    for name in ("events", "outcomes"):
        pd.testing.assert_frame_equal(getattr(quiet, name), getattr(without, name))


@given(st.floats(0.5, 200.0), st.sampled_from((4.0, 10.0, 64.0)), st.integers(2, 5))
@settings(max_examples=60, derandomize=True)
def test_a_part_of_the_interval_never_loses_more_work_to_a_failure(failed_s, every_s, parts):
    """Checkpoints cost nothing here: if they do, the shorter interval has done less work by then."""
    lost = []
    for interval_s in (every_s, every_s / parts):
        failures = [NodeEvent(failed_s, 0, NodeEventKind.FAILED), NodeEvent(900.0, 0, NodeEventKind.JOINED)]
        result = simulate(
            [toy_job(steps=300)],
            toy_nodes(1, 2),
            one_gpu_catalogue(),
            REGISTRY["fifo"],
            failures=failures,
            recovery=Recovery("restart", interval_s, 0.0),
        )
        (steps,) = result.losses["lost_steps"]
        assert 0 <= steps <= interval_s * (1 + 1e-9)  # a step takes a second
        lost.append(steps)
    assert lost[1] <= lost[0] + 1e-9


@policies
@given(cases())
@settings(max_examples=3, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_a_restart_loses_no_more_training_than_the_interval(policy, case):
    result = run(case, policy, recovery=Recovery("restart", 4.0, 1.5))
    steps_s = dict(
        zip(result.events["seq"], result.events.groupby("job_id")["iter_time_s"].ffill(), strict=True)
    )
    for seq, steps in zip(result.losses["seq"], result.losses["lost_steps"], strict=True):
        # A guest may have been faster before: its speed on devices of its own is at most 100 times higher.
        assert steps * steps_s[seq] <= 4.0 * 100 * (1 + 1e-9)
        if policy.name != "antman":
            assert steps * steps_s[seq] <= 4.0 * (1 + 1e-9)
