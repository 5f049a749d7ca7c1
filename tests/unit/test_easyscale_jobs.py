"""EasyScale's job lists: profile from printed cells, catalogue planned on demand, generated lists."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from toy_cluster import simulate

from makespan.easyscale import IntraJobPlanner, JobKind, PlannedCatalogue
from makespan.errors import InputError, TraceError, UnknownNameError
from makespan.hardware import cluster
from makespan.papers.easyscale import PAPER
from makespan.papers.easyscale.cluster import cluster_jobs, generated_jobs, pooled, published_profile
from makespan.policies import policy
from makespan.sim import RestartDelays, validate_schedule
from makespan.traces import EASYSCALE_JOBS, read_easyscale_jobs
from makespan.workloads import JobSpec

CELLS = Path(__file__).parents[2] / "config/published"
AUTHORS = Path(os.environ.get("MAKESPAN_PUBLISHED_DIR", "")) / "easyscale/workload.csv"
MIXED = pooled(cluster("v100-p100-t4-64"))
V100, P100, T4 = MIXED.gpu_types
SAMPLES = {"resnet50": 12800.0, "bert": 886.41, "ncf": 49708.45}
TIMES = ((P100, 0.6), (T4, 0.75), (V100, 0.4))


@pytest.fixture(scope="module")
def profile():
    cells = [PAPER.read_published(name, CELLS / f"easyscale_{name}.csv") for name in ("fig11", "fig12")]
    return published_profile(*cells)


def job_list(*rows):
    columns = [
        *("job_id", "submit_time_s", "workload", "max_parallelism"),
        *("micro_batch_size", "epochs", "is_heterogeneous", "home_gpu"),
    ]
    return EASYSCALE_JOBS.validate(pd.DataFrame(rows, columns=columns), where="test")


# --- profile --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "alpha_s", "beta_s", "p100", "t4"),
    [
        ("shufflenetv2", 0.094660, 9.5344e-04, 1.5275, 1.8560),
        ("resnet50", 0.031200, 3.7125e-03, 1.6343, 2.4520),
        ("yolov3", 0.045900, 5.1638e-02, 1.5619, 1.7719),
        ("ncf", 0.010195, 2.9805e-07, 1.2381, 1.0476),
        ("electra", 0.225200, 2.7075e-02, 1.3633, 1.5512),
    ],
)
def test_the_profile_passes_through_the_printed_cells(profile, model, alpha_s, beta_s, p100, t4):
    assert profile.alpha_s[model] == pytest.approx(alpha_s, rel=1e-4)
    assert profile.beta_s_per_sample[model] == pytest.approx(beta_s, rel=1e-3)
    assert profile.slowdown[model] == pytest.approx({"v100": 1.0, "p100": p100, "t4": t4}, rel=1e-4)


def test_a_micro_batch_takes_what_is_printed_where_something_is(profile):
    assert profile.micro_batch_s("bert", "v100", 8) == pytest.approx(0.4406)
    assert profile.micro_batch_s("bert", "t4", 8) == pytest.approx(0.6819)
    assert profile.micro_batch_s("bert", "v100", 16) == pytest.approx(0.65097)
    assert profile.micro_batch_s("vgg19", "p100", 32, under_d2=True) == pytest.approx(2.0655)


def test_what_the_profile_does_not_have_is_refused(profile):
    with pytest.raises(UnknownNameError, match="model of the profile 'gpt'"):
        profile.micro_batch_s("gpt", "v100", 8)
    with pytest.raises(UnknownNameError, match="'a800'"):
        profile.micro_batch_s("bert", "a800", 8)
    with pytest.raises(InputError, match="0 samples; expected 1 or more"):
        profile.micro_batch_s("bert", "v100", 0)
    fig11, fig12 = (
        PAPER.read_published(name, CELLS / f"easyscale_{name}.csv") for name in ("fig11", "fig12")
    )
    with pytest.raises(TraceError, match="bert; expected models with a time in both"):
        published_profile(fig11[fig11["model"] != "bert"], fig12)


# --- catalogue ------------------------------------------------------------------------------------


def kind(key="k", n=8, **changes):
    return JobKind(
        key,
        **({"n_logical_workers": n, "home": V100, "micro_batch_s": TIMES, "mini_batches": 10.3} | changes),
    )


def test_a_configuration_takes_as_long_as_its_plan_and_is_planned_once():
    catalogue = PlannedCatalogue([kind()]).on(MIXED)
    (found,) = catalogue.holding("k", ((T4, 1), (V100, 2)))
    planner = IntraJobPlanner([1 / time_s for _, time_s in TIMES], 8)
    assert found.iter_time_s * 10 == pytest.approx(planner.plan((0, 1, 2)).step_time_s * 10.3)
    assert found is catalogue.holding("k", ((T4, 1), (V100, 2)))[0] and catalogue.accepts(found)
    assert not catalogue.accepts(replace(found))
    labels = ("k", found.plan, found.placement.text, found.cpu_threads)
    assert catalogue.find(*labels, found.gpu_types) is found
    assert catalogue.find("k", "tp", *labels[2:], found.gpu_types) is None
    assert catalogue.holding("k", ((T4, 5), (V100, 4))) == ()


def test_all_of_a_planned_catalogue_is_every_vector_that_the_job_may_hold():
    catalogue = PlannedCatalogue([kind(n=3), kind("home", 3, micro_batch_s=TIMES[2:])]).on(MIXED)
    assert len({item.devices for item in catalogue.all("k")}) == len(catalogue.all("k")) == 19
    assert [item.devices for item in catalogue.all("home")] == [((V100, count),) for count in (1, 2, 3)]
    assert catalogue.workloads == ("home", "k")
    with pytest.raises(UnknownNameError, match="'other'"):
        catalogue.all("other")


def test_a_gang_has_a_gpu_for_each_logical_worker_or_all_there_are():
    catalogue = PlannedCatalogue([kind(n=32, home=P100)]).on(MIXED)
    gang = catalogue.requested(JobSpec("j", 0.0, "k", 32, 0, "ga", 9))
    assert gang.devices == ((P100, 16),) and gang.iter_time_s * 10 == pytest.approx(2 * 0.6 * 10.3)
    held = PlannedCatalogue([kind(n=32, home=P100)]).gangs().on(MIXED)
    assert [item.devices for item in held.all("k")] == [((P100, 16),)]
    assert held.holding("k", ((P100, 1),)) == () and len(held.holding("k", ((P100, 16),))) == 1
    without = replace(MIXED, nodes=MIXED.nodes[:1])
    with pytest.raises(InputError, match="no GPU of type 'p100-16'"):
        catalogue.on(without).requested(JobSpec("j", 0.0, "k", 32, 0, "ga", 9))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"home": "a40-48"}, "expected positive times, one on the home type"),
        ({"mini_batches": 0.0}, "mini_batches is 0.0; expected a number above 0"),
        ({"micro_batch_s": ((V100, 0.0),)}, "expected positive times, one on the home type"),
    ],
)
def test_a_kind_of_job_is_checked(wrong, told):
    with pytest.raises(InputError, match=told):
        kind(**wrong)


# --- from lists to jobs ---------------------------------------------------------------------------


def test_a_list_becomes_jobs_with_real_valued_work(profile):
    table = job_list(
        ("a", 115.0, "bert", 16, 8, 4.0, True, "v100"),
        ("b", 230.0, "resnet50", 8, 64, 2.0, False, "t4"),
        ("c", 240.0, "ncf", 32, 4096, 1.0, True, "p100"),
    )
    found = cluster_jobs(table, MIXED, profile, SAMPLES)
    assert [(job.job_id, job.submit_time_s, job.n_gpus) for job in found.jobs] == [
        ("a", 115.0, 16), ("b", 230.0, 8), ("c", 240.0, 32),
    ]  # fmt: skip
    assert (found.clamped, found.rejected) == (("c",), ())
    catalogue = found.catalogue.on(MIXED)
    for job, work, home, time_s in zip(
        found.jobs,
        (886.41 * 4 / (16 * 8), 12800 * 2 / (8 * 64), 49708.45 / (32 * 4096)),
        (V100, T4, P100),
        (0.4406, 0.6591, profile.micro_batch_s("ncf", "p100", 4096)),
        strict=True,
    ):
        (alone,) = catalogue.holding(job.workload, ((home, 1),))
        total_s = alone.iter_time_s * (job.steps + 1)
        assert total_s == pytest.approx(work * job.n_gpus * time_s, rel=1e-6)
    assert not catalogue.holding(found.jobs[1].workload, ((V100, 1),))
    rejected = cluster_jobs(table, MIXED, profile, SAMPLES, infeasible="reject")
    assert (len(rejected.jobs), rejected.clamped, rejected.rejected) == (2, (), ("c",))


def test_mixed_types_may_be_charged_the_price_of_d2(profile):
    table = job_list(("a", 0.0, "bert", 4, 8, 4.0, True, "v100"))
    times = []
    for d2_penalty in (False, True):
        found = cluster_jobs(table, MIXED, profile, SAMPLES, d2_penalty=d2_penalty)
        held = [((V100, 2),), ((T4, 1), (V100, 1))]
        times.append([found.catalogue.holding(found.jobs[0].workload, one)[0].iter_time_s for one in held])
    assert times[0][0] == times[1][0]
    assert times[1][1] / times[0][1] == pytest.approx(0.439 / 0.4406)


def test_what_the_list_cannot_ask_for_is_refused(profile):
    with pytest.raises(InputError, match="'a800' of a job list; expected v100, p100, t4"):
        cluster_jobs(job_list(("a", 0.0, "bert", 4, 8, 4.0, True, "a800")), MIXED, profile, SAMPLES)
    with pytest.raises(UnknownNameError, match="'vgg19'"):
        cluster_jobs(job_list(("a", 0.0, "vgg19", 4, 8, 4.0, True, "v100")), MIXED, profile, SAMPLES)
    large = job_list(("a", 0.0, "bert", 64, 8, 4.0, True, "t4"))
    with pytest.raises(TraceError, match="no job; expected"):
        cluster_jobs(large, MIXED, profile, SAMPLES, infeasible="reject")


def test_the_pools_have_the_devices_of_the_cluster():
    assert [(node.gpu_type, node.n_gpus) for node in MIXED.nodes] == [(V100, 32), (P100, 16), (T4, 16)]


# --- lists ----------------------------------------------------------------------------------------


def marginals(table):
    """Return everything that the statistics fix."""
    counts = [
        table.groupby("workload")[column].value_counts().sort_index().to_dict()
        for column in ("max_parallelism", "micro_batch_size", "is_heterogeneous")
    ]
    homes = table.groupby("max_parallelism")["home_gpu"].value_counts().sort_index().to_dict()
    bins = np.histogram(table["submit_time_s"], np.arange(0.0, 5401.0, 600.0))[0].tolist()
    return *counts, homes, bins, table["submit_time_s"].min(), table["submit_time_s"].max()


def test_a_generated_list_has_its_statistics_whatever_the_seed():
    first, second = generated_jobs(1), generated_jobs(2)
    assert marginals(first) == marginals(second) and not first.equals(second)
    pd.testing.assert_frame_equal(first, generated_jobs(1))
    assert len(first) == 68 and first["job_id"].is_unique and first["submit_time_s"].is_monotonic_increasing
    assert first[first["workload"] == "electra"]["epochs"].between(1, 200).all()
    longer = generated_jobs(3, 204)
    assert longer["submit_time_s"].max() == 3 * 4814 and len(longer) == 204


@pytest.mark.parametrize(("seed", "n_jobs"), [(0, 1), (0, 10**6), (-1, 68)])
def test_a_list_of_no_sensible_size_is_refused(seed, n_jobs):
    with pytest.raises(InputError, match="expected from 2 to 10000 jobs, a seed of 0 or more"):
        generated_jobs(seed, n_jobs)


@pytest.mark.skipif(not AUTHORS.is_file(), reason="MAKESPAN_PUBLISHED_DIR has no easyscale/workload.csv")
def test_the_statistics_are_those_of_the_authors_list():
    table, _ = read_easyscale_jobs(AUTHORS)
    assert marginals(table) == marginals(generated_jobs(1))
    drawn = generated_jobs(1).groupby("workload")["epochs"].agg(["min", "max"])
    known = table.groupby("workload")["epochs"].agg(["min", "max"])
    assert (known["min"] <= drawn["min"]).all() and (drawn["max"] <= known["max"]).all()


@pytest.mark.parametrize("name", ["fifo", "fifo-serial", "easyscale-homo", "easyscale-heter"])
def test_schedules_of_a_generated_list_are_possible(profile, name):
    samples = dict.fromkeys(profile.alpha_s, 886.41)
    found = cluster_jobs(generated_jobs(5, 12), MIXED, profile, samples)
    catalogue = found.catalogue.gangs() if name.startswith("fifo") else found.catalogue
    cost = RestartDelays.constant(20.0)
    options = {"restart_delay_s": cost, "interval_s": 60.0}
    result = simulate(found.jobs, MIXED, catalogue, policy(name), **options)
    violations = validate_schedule(
        result.events, found.jobs, MIXED, catalogue, cost, interval_s=60.0, outcomes=result.outcomes
    )
    assert violations == [] and len(result.outcomes) == 12
