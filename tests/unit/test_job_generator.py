"""Synthetic workloads: facts of the Base trace, variants, transformations, mapping, checks."""

import collections
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from makespan.errors import InputError, TraceError, UnknownNameError
from makespan.hardware import cluster
from makespan.sim import check_jobs
from makespan.studies import TableCatalogue
from makespan.throughput import PublishedSource, ReferenceTimes
from makespan.traces import (
    JobTrace,
    ReadReport,
    Request,
    RequestTrace,
    WorkloadMapping,
    generate_jobs,
    map_requests,
    read_jobs,
    scaled,
    statistics,
    subsampled,
    with_best_plan,
    with_guarantees,
    with_large_share,
    with_load,
    with_perturbed_arrivals,
)
from makespan.traces.synthetic import apportion

TOLERANCE = 0.10
MODELS = {"bert": 64, "gpt2": 69, "llama30": 51, "llama7": 54, "roberta": 58, "t5": 62, "vit": 48}
GPUS = {
    "bert": {1, 2, 4, 8},
    "roberta": {1, 2, 4, 8},
    "t5": {1, 2, 4, 8},
    "vit": {1, 2, 4, 8},
    "gpt2": {2, 4, 5, 8},
    "llama7": {8, 16, 32},
    "llama30": {24, 40, 48},
}
QUANTILES = {0.10: 0.24, 0.25: 1.08, 0.5: 7.6, 0.75: 162, 0.90: 1217, 0.99: 6352, 1.0: 13473}
ARRIVALS = [3, 16, 6, 9, 15, 33, 31, 83, 51, 34, 24, 4, 68, 29]


def throughput(rows):
    return pd.DataFrame(
        [(plan, placement, time, True) for plan, placement, time in rows],
        columns=["exec_plan", "placement", "iter_time_s", "feasible"],
    )


@pytest.fixture(scope="module")
def times():
    """Return round numbers: 1 / GPUs for every request, a faster plan and a spread placement beside it."""
    requests = collections.defaultdict(list)
    for request in statistics().requests:
        n = request.n_gpus
        full, rest = divmod(n, 8)
        placement = str(rest) * bool(rest) + "8" * full
        requests[request.workload].append((request.plan, placement, 1.0 / n))
        if n > 1:
            requests[request.workload].append((request.plan, "1" * n, 0.8 / n))
        requests[request.workload].append(("zero-offload+gc", placement, 0.5 / n))
    return ReferenceTimes({key: throughput(rows) for key, rows in requests.items()})


def assert_facts(jobs, n_jobs=406):
    """Compare jobs with the facts of the Base trace, scaled to their number."""
    share = n_jobs / 406
    durations = np.array([job.duration_s for job in jobs])
    gpus = np.array([job.n_gpus for job in jobs])
    for model, count in collections.Counter(job.workload for job in jobs).items():
        assert count == pytest.approx(MODELS[model] * share, rel=TOLERANCE, abs=1)
    for model, counts in GPUS.items():
        assert {job.n_gpus for job in jobs if job.workload == model} == counts
    for quantile, value in QUANTILES.items():
        assert np.quantile(durations, quantile) == pytest.approx(value, rel=TOLERANCE), quantile
    assert durations.mean() == pytest.approx(495, rel=TOLERANCE)
    assert durations @ gpus / 3600 == pytest.approx(618 * share, rel=TOLERANCE)
    hours = np.bincount([int(job.submit_time_s // 3600) for job in jobs], minlength=14)
    assert hours == pytest.approx(np.array(ARRIVALS) * share, rel=TOLERANCE, abs=1)
    assert max(job.submit_time_s for job in jobs) == pytest.approx(13.2 * 3600, rel=0.01)
    plans = collections.Counter(job.plan for job in jobs)
    assert {plan for plan, _ in plans.most_common(2)} == {"zero-dp", "ga"}


@pytest.mark.parametrize("seed", range(5))
def test_base_workload_has_the_facts_of_the_published_trace(times, seed):
    trace = generate_jobs("base", 406, seed, times)
    assert len(trace.jobs) == 406
    assert_facts(trace.jobs)
    assert all(job.n_cpus == 8 * job.n_gpus and not job.is_guaranteed for job in trace.jobs)
    assert not trace.report.findings


@pytest.mark.parametrize("n_jobs", [1000, 4060])
def test_other_sizes_have_the_same_statistics(times, n_jobs):
    assert_facts(generate_jobs("base", n_jobs, 3, times).jobs, n_jobs)


def test_small_sizes_are_whole_workloads(times):
    for n_jobs in [1, 2, 10, 100]:
        jobs = generate_jobs("base", n_jobs, 1, times).jobs
        assert len(jobs) == len({job.job_id for job in jobs}) == n_jobs
        submissions = [job.submit_time_s for job in jobs]
        assert submissions == sorted(submissions)
        assert submissions[0] == 0.0


def test_published_trace_has_the_facts_that_the_generator_holds(published_dir):
    folder = published_dir / "morphling" / "workloads"
    assert_facts(read_jobs(folder / "workload-base.csv").jobs)
    stats = statistics()
    base = read_jobs(folder / "workload-base.csv").jobs
    asked = collections.Counter((job.workload, job.n_gpus, job.plan) for job in base)
    assert asked == {(r.workload, r.n_gpus, r.plan): r.weight for r in stats.requests}
    guaranteed = sum(job.is_guaranteed for job in read_jobs(folder / "workload-mt.csv").jobs)
    assert guaranteed == round(stats.guaranteed_share * 406)


def test_steps_follow_from_published_durations_by_the_reference_time(published_dir):
    source = PublishedSource(Path(published_dir), default_cpu_threads=12)
    keys = list(MODELS)
    known = ReferenceTimes({key: source.load(key) for key in keys})
    base = [
        job
        for job in read_jobs(published_dir / "morphling/workloads/workload-base.csv").jobs
        if job.steps > 50
    ]
    ratios = [
        job.steps * known.requested(job.workload, job.n_gpus, job.plan).iter_time_s / job.duration_s
        for job in base
    ]
    assert np.median(ratios) == pytest.approx(1.0, abs=0.01)
    trace = generate_jobs("base", 406, 1, known)
    assert_facts(trace.jobs)
    catalogue = TableCatalogue.from_tables(known.tables)
    check_jobs(trace.jobs, cluster("a800-64"), catalogue.on(cluster("a800-64")))


def test_steps_fill_the_nominal_duration_on_the_placement_with_the_fewest_nodes(times):
    for job in generate_jobs("base", 406, 1, times).jobs:
        assert job.steps == max(1, round(job.duration_s * job.n_gpus))


def test_equal_seeds_give_equal_workloads_and_other_seeds_others(times):
    one, two, other = (generate_jobs("base", 50, seed, times).jobs for seed in (7, 7, 8))
    assert one == two
    assert one != other
    assert sorted(job.plan for job in one) == sorted(job.plan for job in other)


def test_variants_differ_from_base_in_what_they_are_named_for_only(times):
    base, bp, mt = (generate_jobs(variant, 406, 4, times).jobs for variant in ("base", "bp", "mt"))
    assert {job.plan for job in bp} == {"zero-offload+gc"}
    assert tuple(replace(job, plan=old.plan) for job, old in zip(bp, base, strict=True)) == base
    assert sum(job.is_guaranteed for job in mt) == 194
    assert tuple(replace(job, is_guaranteed=False) for job in mt) == base


def test_generator_refuses_what_it_cannot_make(times):
    with pytest.raises(InputError, match="expected 1 or more, of base, bp, mt"):
        generate_jobs("other", 10, 1, times)
    with pytest.raises(InputError, match="cannot generate 0 jobs"):
        generate_jobs("base", 0, 1, times)
    with pytest.raises(UnknownNameError, match="workload with throughput"):
        generate_jobs("base", 100, 1, ReferenceTimes({}))
    with pytest.raises(UnknownNameError, match="expected base"):
        statistics("other")


# --- reference times --------------------------------------------------------------------------


def test_requested_plan_counts_on_fewest_nodes_else_the_fastest_with_the_same_gpus():
    known = ReferenceTimes(
        {"vit": throughput([("ga", "22", 1.0), ("ga", "4", 2.0), ("gc", "1111", 0.5), ("ga", "2", 3.0)])}
    )
    assert known.requested("vit", 4, "ga").placement == "4"
    assert known.requested("vit", 4, "zero-dp").plan == "gc"
    assert known.best("vit", 4).iter_time_s == 0.5
    assert known.gpu_counts("vit") == (2, 4)
    with pytest.raises(TraceError, match="no throughput on 8 GPUs; expected 2, 4"):
        known.requested("vit", 8, "ga")


def test_failed_rows_are_no_reference():
    table = throughput([("ga", "1", 1.0), ("gc", "1", 2.0)]).assign(feasible=[False, True])
    assert ReferenceTimes({"vit": table}).best("vit", 1).plan == "gc"


# --- transformations --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(times):
    return generate_jobs("base", 200, 1, times).jobs


def test_load_divides_submission_times(base):
    faster = with_load(base, 2.0)
    assert [job.submit_time_s * 2 for job in faster] == [job.submit_time_s for job in base]
    assert with_load(with_load(base, 4.0), 0.25) == base
    with pytest.raises(InputError, match="above 0"):
        with_load(base, 0.0)


def test_large_share_is_met_by_replacing_as_few_jobs_as_necessary(base, times):
    for share in [0.0, 0.25, 0.5, 0.75, 1.0]:
        large = {"llama7", "llama30"}
        changed = with_large_share(base, share, 5, times)
        assert sum(job.workload in large for job in changed) == round(share * len(base))
        before = sum(job.workload in large for job in base)
        assert sum(new != old for new, old in zip(changed, base, strict=True)) == abs(
            round(share * 200) - before
        )
        assert [job.submit_time_s for job in changed] == [job.submit_time_s for job in base]
        assert [job.duration_s for job in changed] == [job.duration_s for job in base]
        assert len({job.job_id for job in changed}) == len(base)
        assert all(job.steps == max(1, round(job.duration_s * job.n_gpus)) for job in changed)
        assert changed == with_large_share(base, share, 5, times)


def test_large_share_needs_durations(base, times):
    bare = [replace(job, duration_s=None) for job in base]
    with pytest.raises(InputError, match="no nominal duration"):
        with_large_share(bare, 1.0, 1, times)


def test_guarantees_are_a_seeded_share(base):
    half = with_guarantees(base, 0.5, 1)
    assert sum(job.is_guaranteed for job in half) == 100
    assert half == with_guarantees(half, 0.5, 1)
    assert half != with_guarantees(base, 0.5, 2)
    with pytest.raises(InputError, match="from 0 to 1"):
        with_guarantees(base, 1.5, 1)


def test_best_plan_keeps_steps(base, times):
    best = with_best_plan(base, times)
    assert [job.steps for job in best] == [job.steps for job in base]
    assert {job.plan for job in best} == {"zero-offload+gc"}


def test_perturbed_arrivals_keep_everything_but_time_and_order(base):
    moved = with_perturbed_arrivals(base, 300.0, 1)
    assert with_perturbed_arrivals(base, 0.0, 1) == base
    times_ = [job.submit_time_s for job in moved]
    assert times_ == sorted(times_)
    assert min(times_) >= 0.0
    old = {job.job_id: job for job in base}
    shifts = [job.submit_time_s - old[job.job_id].submit_time_s for job in moved]
    assert all(
        replace(job, submit_time_s=0.0) == replace(old[job.job_id], submit_time_s=0.0) for job in moved
    )
    assert 200 < np.std(shifts) < 400
    assert moved != with_perturbed_arrivals(base, 300.0, 2)
    with pytest.raises(InputError, match="0 or more"):
        with_perturbed_arrivals(base, float("nan"), 1)


def test_a_subsample_keeps_a_seeded_share_of_the_jobs_as_they_are(base):
    kept = subsampled(base, 0.8, 1)
    assert len(kept) == 160 and set(kept) < set(base)
    assert [job.submit_time_s for job in kept] == sorted(job.submit_time_s for job in kept)
    assert kept == subsampled(base, 0.8, 1) != subsampled(base, 0.8, 2)
    assert subsampled(base, 1.0, 1) == base
    assert len(subsampled(base, 0.001, 1)) == 1 and subsampled((), 0.5, 1) == ()
    for share in (0.0, 1.5, float("nan")):
        with pytest.raises(InputError, match="above 0, up to 1"):
            subsampled(base, share, 1)


def test_scaling_multiplies_jobs_under_new_names(base):
    tripled = scaled(base, 3, 1)
    assert len(tripled) == len({job.job_id for job in tripled}) == 600
    assert sum(job.steps for job in tripled) == 3 * sum(job.steps for job in base)
    assert scaled(base, 1, 1) == base
    with pytest.raises(InputError, match="1 or more"):
        scaled(base, 0, 1)


def without_each_in_turn(jobs):
    for number in (0, 7, len(jobs) // 2, len(jobs) - 1):
        yield jobs[number].job_id, (*jobs[:number], *jobs[number + 1 :])


def test_leaving_a_job_out_shifts_no_other(base):
    for draw in (lambda jobs: with_perturbed_arrivals(jobs, 300.0, 1), lambda jobs: scaled(jobs, 3, 1)):
        whole = {job.job_id: job for job in draw(base)}
        for gone, rest in without_each_in_turn(base):
            less = {job.job_id: job for job in draw(rest)}
            assert less == {name: job for name, job in whole.items() if name.split("/")[0] != gone}


def test_leaving_a_job_out_changes_at_most_who_stands_at_the_border_of_a_share(base, times):
    draws = (
        lambda jobs: with_guarantees(jobs, 0.4, 1),
        lambda jobs: subsampled(jobs, 0.4, 1),
        lambda jobs: with_large_share(jobs, 0.6, 1, times),
    )
    for draw in draws:
        whole = set(draw(base))
        for gone, rest in without_each_in_turn(base):
            less = set(draw(rest))
            others = {job for job in whole if job.job_id.removeprefix("llama7-for-") != gone}
            others = {job for job in others if not job.job_id.endswith(f"-for-{gone}")}
            assert len(others - less) <= 1 and len(less - others) <= 1


def test_a_larger_share_keeps_what_a_smaller_one_drew(base, times):
    small, large = (set(with_large_share(base, share, 1, times)) - set(base) for share in (0.5, 0.8))
    assert small < large
    assert set(subsampled(base, 0.3, 1)) < set(subsampled(base, 0.6, 1))
    more = {job.job_id: job for job in scaled(base, 4, 1)}
    assert all(more[job.job_id] == job for job in scaled(base, 3, 1))


def test_generated_lists_are_those_of_earlier_versions(times):
    mt = generate_jobs("mt", 40, 1, times).jobs
    guaranteed = [number for number, job in enumerate(mt) if job.is_guaranteed]
    assert guaranteed == [1, 2, 5, 6, 10, 11, 13, 15, 16, 18, 21, 25, 26, 28, 29, 32, 33, 34, 39]


# --- mapping ----------------------------------------------------------------------------------


def foreign(*gpus, tenant="t", cpus=0):
    n = len(gpus)
    table = pd.DataFrame(
        {
            "job_id": [f"j{i}" for i in range(n)],
            "submit_time_s": np.arange(n, dtype=float),
            "n_gpus": list(gpus),
            "n_cpus": cpus,
            "duration_s": 100.0,
            "tenant": tenant,
            "status": "Pass",
        }
    )
    return RequestTrace(table, ReadReport("foreign", n, n), 0.0)


def test_requests_become_jobs_with_as_many_gpus_and_steps_that_fill_the_duration(times):
    trace = map_requests(foreign(1, 2, 8, 48), WorkloadMapping.like_base(1), times)
    assert isinstance(trace, JobTrace)
    assert [job.n_gpus for job in trace.jobs] == [1, 2, 8, 48]
    assert [job.steps for job in trace.jobs] == [100, 200, 800, 4800]
    assert trace.jobs[3].workload == "llama30"
    assert [job.n_cpus for job in trace.jobs] == [8, 16, 64, 384]
    assert not trace.report.findings


def test_mapping_is_seeded_and_follows_the_weights(times):
    offers = (Request("vit", 1, "ga", 3.0), Request("bert", 1, "ga", 1.0))
    many = foreign(*[1] * 2000)
    trace = map_requests(many, WorkloadMapping(offers, seed=1), times)
    assert trace == map_requests(many, WorkloadMapping(offers, seed=1), times)
    assert trace.jobs != map_requests(many, WorkloadMapping(offers, seed=2), times).jobs
    share = sum(job.workload == "vit" for job in trace.jobs) / 2000
    assert share == pytest.approx(0.75, abs=0.05)


def test_leaving_a_request_out_changes_what_no_other_trains(times):
    trace = foreign(*[1, 2, 4, 8, 1, 3, 2] * 20)
    mapping = WorkloadMapping.like_base(3)
    whole = {job.job_id: job for job in map_requests(trace, mapping, times).jobs}
    for gone in (0, 5, 70, 139):
        table = trace.table.drop(index=gone).reset_index(drop=True)
        less = RequestTrace(table, ReadReport("foreign", 139, 139), 0.0)
        for mapped in (less, replace(less, table=table.iloc[::-1].reset_index(drop=True))):
            found = {job.job_id: job for job in map_requests(mapped, mapping, times).jobs}
            assert found == {name: job for name, job in whole.items() if name != f"j{gone}"}


def test_requests_beyond_the_cluster_change_what_no_other_trains(times):
    trace, mapping = foreign(1, 64, 2, 64, 4, 8), WorkloadMapping.like_base(1)
    whole = {job.job_id: job for job in map_requests(trace, mapping, times).jobs}
    fitting = map_requests(trace, replace(mapping, max_gpus=32), times).jobs
    assert [job.job_id for job in fitting] == ["j0", "j2", "j4", "j5"]
    assert all(whole[job.job_id] == job for job in fitting)


def test_counts_without_offer_and_too_large_requests_are_reported(times):
    offers = (Request("vit", 2, "zero-dp", 1.0), Request("vit", 4, "zero-dp", 1.0))
    trace = map_requests(foreign(1, 3, 4, 64), WorkloadMapping(offers, seed=1, max_gpus=16), times)
    assert [job.n_gpus for job in trace.jobs] == [2, 2, 4]
    assert [(finding.action, finding.rows) for finding in trace.report.findings] == [
        ("dropped", (4,)),
        ("repaired", (1, 2)),
    ]
    with pytest.raises(TraceError, match="no job left"):
        map_requests(foreign(64), WorkloadMapping(offers, seed=1, max_gpus=16), times)


def test_tenants_can_be_guaranteed_and_stated_cpus_are_kept(times):
    mapping = WorkloadMapping.like_base(1)
    mapping = replace(mapping, guaranteed=frozenset({"gold"}))
    assert map_requests(foreign(1, tenant="gold", cpus=3), mapping, times).jobs[0].is_guaranteed
    job = map_requests(foreign(1, tenant="tin", cpus=3), mapping, times).jobs[0]
    assert (job.is_guaranteed, job.n_cpus, job.tenant) == (False, 3, "tin")
    with pytest.raises(InputError, match="at least one offer"):
        WorkloadMapping((), seed=1)


# --- parts ------------------------------------------------------------------------------------


def test_apportioned_parts_add_up_and_are_within_one_of_the_exact_share():
    weights = np.array([3.0, 1.0, 0.0, 2.5])
    for total in range(40):
        parts = apportion(weights, total)
        assert parts.sum() == total
        assert (abs(parts - weights / weights.sum() * total) < 1).all()
    with pytest.raises(InputError, match="not all 0"):
        apportion(np.zeros(2), 3)


def test_a_report_must_account_for_every_row():
    with pytest.raises(TraceError, match="an account without a remainder"):
        ReadReport("file", 3, 2)
    assert ReadReport("file", 3, 3).text == "file: 3 rows read, 3 kept"
