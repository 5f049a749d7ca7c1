"""Plan search and sensitivity curves: nothing infeasible, nothing slower than it need be."""

import numpy as np
import pytest

from makespan.errors import InfeasiblePlanError, InputError
from makespan.hardware import cluster
from makespan.perf import (
    Measured,
    best_plan,
    envelope,
    fit,
    load_environment,
    points_from_plans,
    rank_plans,
    sensitivity_curve,
    sensitivity_families,
)
from makespan.plans import Placement, memory_estimate, read_plan, resolve_micro_batch
from makespan.tables import SENSITIVITY, SENSITIVITY_FAMILIES
from makespan.workloads import workload

CLUSTER = cluster("a800-64")
ENVIRONMENT = load_environment("a800-64")
COUNTS = (1, 2, 3, 4, 8, 16, 32, 64)


def one_row_fit(key, text, place, time_s):
    spec = workload(key)
    placement = Placement.parse(place)
    plan = read_plan(text, n_gpus=placement.n_gpus, global_batch_size=spec.global_batch_size)
    pairs = [(resolve_micro_batch(plan, spec, ENVIRONMENT.node), placement)]
    points = points_from_plans(pairs, spec, ENVIRONMENT)
    missing = np.array([np.nan])
    return fit("extended", points, Measured(np.array([time_s]), missing, missing, missing), ENVIRONMENT)


@pytest.fixture(scope="module")
def gpt2():
    return one_row_fit("gpt2", "ga", "8", 0.6)


@pytest.fixture(scope="module")
def llama30():
    return one_row_fit("llama30", "444", "88888888", 2.0)


def test_ranking_is_sorted_and_feasible(gpt2):
    placement = Placement.parse("44")
    ranked = rank_plans(gpt2, placement, CLUSTER)
    times = [entry.iter_time_s for entry in ranked]
    assert times == sorted(times)
    assert len(ranked) > 5
    for entry in ranked:
        assert memory_estimate(entry.plan, gpt2.points.workload, CLUSTER.nodes[0], placement).feasible
        assert entry.plan.n_gpus == 8
        assert entry.throughput_samples_per_s == pytest.approx(16 / entry.iter_time_s)


def test_best_plan_is_the_first_of_the_ranking(gpt2):
    placement = Placement.parse("2222")
    assert best_plan(gpt2, placement, CLUSTER) == rank_plans(gpt2, placement, CLUSTER)[0]


def test_a_model_that_does_not_fit_has_no_best_plan(llama30):
    assert rank_plans(llama30, Placement.parse("2"), CLUSTER) == []
    with pytest.raises(InfeasiblePlanError, match="no plan of 'llama30' fits on placement 2"):
        best_plan(llama30, Placement.parse("2"), CLUSTER)


def test_candidates_that_do_not_fit_are_left_out():
    spec = workload("llama7")
    fitted = one_row_fit("llama7", "182", "88", 1.1)
    plans = [read_plan(text, n_gpus=8, global_batch_size=8) for text in ("ga", "zero-offload")]
    ranked = rank_plans(fitted, Placement.parse("8"), CLUSTER, plans=plans)
    assert [entry.plan.plan_family.title for entry in ranked] == ["ZeRO-Offload"]
    assert ranked[0].plan.global_batch_size == spec.global_batch_size


def test_more_cpu_threads_speed_up_the_offloaded_plan():
    fitted = one_row_fit("llama7_b16", "zero-offload+gc", "1", 60.0)
    few = best_plan(fitted, Placement.parse("1"), CLUSTER, cpu_threads=2)
    many = best_plan(fitted, Placement.parse("1"), CLUSTER, cpu_threads=4)
    assert many.iter_time_s < few.iter_time_s
    assert (few.plan.cpu_threads, many.plan.cpu_threads) == (2, 4)


def test_families_follow_their_schema_and_hold_each_best_plan(gpt2):
    families = sensitivity_families(gpt2, CLUSTER, COUNTS)
    assert list(families.columns) == SENSITIVITY_FAMILIES.names
    assert not families.duplicated(["plan_family", "gpus", "cpu_threads"]).any()
    eight = families[families["gpus"] == 8]
    fastest = eight.loc[eight["throughput_samples_per_s"].idxmax()]
    expected = best_plan(gpt2, Placement.packed(8, 8), CLUSTER)
    assert fastest["throughput_samples_per_s"] == pytest.approx(expected.throughput_samples_per_s)


def test_only_offload_families_are_swept_over_threads(gpt2):
    families = sensitivity_families(gpt2, CLUSTER, (4,), cpu_threads=(1, 2, 24))
    swept = families.groupby("plan_family")["cpu_threads"].nunique()
    assert swept["ZeRO-Offload"] == 4
    assert (swept.drop("ZeRO-Offload") == 1).all()
    offload = families[families["plan_family"] == "ZeRO-Offload"].sort_values("cpu_threads")
    assert offload["throughput_samples_per_s"].is_monotonic_increasing


def test_envelope_never_falls_and_covers_every_limit(gpt2):
    curve = sensitivity_curve(gpt2, CLUSTER, range(1, 65))
    assert list(curve.columns) == SENSITIVITY.names
    assert curve["gpus"].tolist() == list(range(1, 65))
    assert curve["throughput_samples_per_s"].is_monotonic_increasing
    families = sensitivity_families(gpt2, CLUSTER, range(1, 65))
    assert curve["throughput_samples_per_s"].iloc[-1] == families["throughput_samples_per_s"].max()


def test_envelope_ignores_the_threads_that_a_job_does_not_have(gpt2):
    plain = sensitivity_families(gpt2, CLUSTER, (1, 2, 4))
    swept = sensitivity_families(gpt2, CLUSTER, (1, 2, 4), cpu_threads=(96,))
    assert envelope(swept).equals(envelope(plain))


def test_no_job_is_given_more_threads_than_its_node_has(gpt2):
    swept = sensitivity_families(gpt2, CLUSTER, (1, 4, 8, 16), cpu_threads=(4, 24, 96))
    offload = swept[swept["plan_family"] == "ZeRO-Offload"]
    found = {gpus: sorted(rows["cpu_threads"]) for gpus, rows in offload.groupby("gpus")}
    assert found == {1: [4, 12, 24, 96], 4: [4, 12, 24], 8: [4, 12], 16: [4, 12]}


def test_envelope_is_zero_where_nothing_can_run(llama30):
    curve = sensitivity_curve(llama30, CLUSTER, (1, 2, 64))
    assert curve["best_plan"].tolist()[:2] == ["", ""]
    assert curve["throughput_samples_per_s"].tolist()[0] == 0.0
    assert curve["throughput_samples_per_s"].tolist()[2] > 0.0


def test_curve_of_a_model_that_never_fits_is_zero_everywhere(llama30):
    curve = sensitivity_curve(llama30, CLUSTER, (1, 2))
    assert curve["gpus"].tolist() == [1, 2]
    assert (curve["throughput_samples_per_s"] == 0).all()


@pytest.mark.parametrize("counts", [(), (0, 1), (65,)])
def test_gpu_counts_outside_the_cluster_are_refused(gpt2, counts):
    with pytest.raises(InputError, match="GPU counts"):
        sensitivity_families(gpt2, CLUSTER, counts)


def test_cpu_threads_below_one_are_refused(gpt2):
    with pytest.raises(InputError, match="cpu_threads is 0"):
        sensitivity_families(gpt2, CLUSTER, (1,), cpu_threads=(0,))
