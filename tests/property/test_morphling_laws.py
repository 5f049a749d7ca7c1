"""Laws of Morphling's variants and ablations on random traces with guaranteed jobs."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings, strategies as st
from toy_cluster import simulate, toy_catalogue, toy_nodes, traces

from makespan.policies import REGISTRY
from makespan.policies.lookahead import CLAIRVOYANT, MorphlingWork
from makespan.sim import validate_schedule

CATALOGUE = toy_catalogue()
SPEC = toy_nodes(3, 8)
DELAY_S = 20.0
NAMES = [name for name in REGISTRY if name.startswith("morphling")]
some = settings(max_examples=15, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def tenants(draw):
    """Draw a crowded trace of which about half is guaranteed."""
    jobs = draw(traces(8, max_jobs=14))
    return [
        replace(job, is_guaranteed=draw(st.booleans()), steps=draw(st.sampled_from([5, 80, 900])))
        for job in jobs
    ]


def placed(result):
    return result.events[result.events["kind"].isin(["started", "reconfigured"])]


@given(tenants(), st.sampled_from([0.0, 60.0]))
@some
def test_a_guaranteed_job_once_started_is_never_slower_than_requested_nor_stopped(jobs, interval_s):
    for name in NAMES:
        keep_guarantees(name, jobs, interval_s)


def keep_guarantees(name, jobs, interval_s):
    result = simulate(jobs, SPEC, CATALOGUE, REGISTRY[name], restart_delay_s=DELAY_S, interval_s=interval_s)
    rows = placed(result)
    for job in jobs:
        if job.is_guaranteed:
            limit_s = CATALOGUE.requested(job).iter_time_s * (1 + 1e-9)
            assert (rows.loc[rows["job_id"] == job.job_id, "iter_time_s"] <= limit_s).all()
            kinds = result.events.loc[result.events["job_id"] == job.job_id, "kind"]
            assert "suspended" not in set(kinds)
    violations = validate_schedule(
        result.events, jobs, SPEC, CATALOGUE, DELAY_S, keeps_guarantees=True, outcomes=result.outcomes
    )
    assert violations == []


@given(tenants())
@some
def test_ablations_change_only_what_they_may(jobs):
    for name in NAMES:
        keep_request(name, jobs)


def keep_request(name, jobs):
    rows = placed(simulate(jobs, SPEC, CATALOGUE, REGISTRY[name], restart_delay_s=DELAY_S))
    requests = {job.job_id: job for job in jobs}
    for row in rows.itertuples():
        job = requests[row.job_id]
        if name.endswith(("-e", "-n")):
            where = row.nodes or row.shared_nodes
            assert sum(int(share.split(":")[1]) for share in where.split()) == job.n_gpus
        if name.endswith(("-r", "-n")):
            assert row.plan == CATALOGUE.requested(job).plan


@given(tenants())
@some
def test_watching_threads_that_never_run_out_changes_nothing(jobs):
    roomy, tight = toy_nodes(3, 8, cpu_threads=8 * 4), toy_nodes(3, 8, cpu_threads=8 * 4 - 1)
    ample = simulate(jobs, SPEC, CATALOGUE, MorphlingWork(), restart_delay_s=DELAY_S)
    equal = simulate(jobs, roomy, CATALOGUE, MorphlingWork(), restart_delay_s=DELAY_S)
    assert equal.events.equals(ample.events)
    scarce = simulate(jobs, tight, CATALOGUE, MorphlingWork(), restart_delay_s=DELAY_S)
    assert validate_schedule(scarce.events, jobs, tight, CATALOGUE.on(tight), DELAY_S) == []


@given(tenants())
@some
def test_without_preemption_no_best_effort_job_is_ever_stopped(jobs):
    calm = MorphlingWork(tuning=replace(CLAIRVOYANT, max_preempting=0))
    events = simulate(jobs, SPEC, CATALOGUE, calm, restart_delay_s=DELAY_S).events
    assert "suspended" not in set(events["kind"])
