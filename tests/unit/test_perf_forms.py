"""The formulas of both forms against numbers worked out by hand."""

import math

import numpy as np
import pytest

from makespan.errors import InputError, UnknownNameError
from makespan.perf import FORMS, load_environment
from makespan.perf.forms import Prior, Profile, Terms, p_norm, points_from_plans
from makespan.plans import Placement, read_plan
from makespan.workloads import workload

ENVIRONMENT = load_environment("a800-64")
CONSTANTS = ENVIRONMENT.constants


def terms(text, place, key="bert", threads=12, profile=None):
    spec = workload(key)
    placement = Placement.parse(place)
    plan = read_plan(
        text,
        n_gpus=placement.n_gpus,
        global_batch_size=spec.global_batch_size,
        cpu_threads=threads,
    )
    points = points_from_plans([(plan, placement)], spec, ENVIRONMENT)
    return Terms(points, profile or Profile(0.16, 16.0, 0.0, "given"), CONSTANTS)


def evaluate(form, given, **values):
    priors = ENVIRONMENT.priors[form]
    theta = np.array([values.get(name, priors[name].median) for name in FORMS[form].parameters])
    return FORMS[form].phases(theta, given)


@pytest.mark.parametrize(("k", "expected"), [(1.0, 7.0), (2.0, 5.0), (500.0, 4.0)])
def test_overlap_goes_from_sum_to_maximum(k, expected):
    assert p_norm(np.array([3.0]), np.array([4.0]), np.array([k]))[0] == pytest.approx(expected, rel=1e-3)


def test_overlap_with_nothing_is_free():
    assert p_norm(np.array([3.0]), np.array([0.0]), np.array([1.7]))[0] == pytest.approx(3.0)
    assert p_norm(np.array([0.0]), np.array([0.0]), np.array([1.7]))[0] == pytest.approx(0.0)


def test_published_data_parallel_time_by_hand():
    """One node, 8 samples a replica, nothing overlapped: every term of the paper's sum."""
    given = terms("ga", "4")
    time = evaluate("published", given, k_bwd=2.0, k_sync=1.0, k_opt=0.1, k_const=0.01).iter_time_s[0]
    parameters = workload("bert").model.parameters
    exchange = 2 * 3 / 4 * 4 * parameters / CONSTANTS.intra_bandwidth_bytes_per_s
    assert time == pytest.approx(0.08 + 0.16 + exchange + 0.1 * parameters / 1e9 + 0.01)


def test_published_form_knows_one_rate_between_nodes():
    times = [evaluate("published", terms("ga", place)).iter_time_s[0] for place in ("44", "2222", "11111111")]
    assert times[0] == pytest.approx(times[1])
    assert times[1] == pytest.approx(times[2])


def test_published_offload_overlaps_copies_with_both_neighbours():
    given = terms("zero-offload", "1", threads=10)
    phases = evaluate("published", given, k_bwd=1.0, k_off=1.0, k_swap=1.0, k_opt_off=5.0, k_const=0.01)
    parameters = workload("bert").model.parameters
    copy = 4 * parameters / CONSTANTS.pcie_bandwidth_bytes_per_s
    assert phases.compute_s[0] == pytest.approx(0.32 + 0.32 + copy)
    assert phases.optimize_s[0] == pytest.approx(5.0 * parameters / 1e9 / 10 + copy)


def test_published_optimiser_is_sharded_by_the_partition():
    plain = evaluate("published", terms("ga", "8")).optimize_s[0]
    assert evaluate("published", terms("zero-dp", "8")).optimize_s[0] == pytest.approx(plain / 8)
    assert evaluate("published", terms("241", "8", key="t5")).optimize_s[0] == pytest.approx(
        evaluate("published", terms("ga", "8", key="t5")).optimize_s[0] / 8
    )


def test_extended_data_parallel_time_by_hand():
    given = terms("ga", "2222")
    values = {"k_bwd": 2.0, "k_sync": 1.0, "k_opt": 0.1, "k_const": 0.01, "k_net": 1.0}
    time = evaluate("extended", given, **values).iter_time_s[0]
    volume = 4 * workload("bert").model.parameters
    harmonic = 1 / 2 + 1 / 3 + 1 / 4
    ring = 7 / 8 * volume / CONSTANTS.nic_bandwidth_bytes_per_s
    ring += (CONSTANTS.straggler_s + CONSTANTS.straggler_s_per_byte * volume) * harmonic
    forward = CONSTANTS.forward_launch_s + 4 * 0.01
    backward = CONSTANTS.backward_launch_s + 2 * 4 * 0.01
    optimizer = 0.1 * volume / 4e9
    assert time == pytest.approx(forward + backward + 2 * ring + optimizer + 0.01)


def test_checkpointing_adds_the_recomputed_share_of_a_forward():
    fixed = {"k_sync": 1.0}
    plain = evaluate("extended", terms("ga", "1"), **fixed).iter_time_s[0]
    again = evaluate("extended", terms("gc", "1"), **fixed).iter_time_s[0]
    forward = CONSTANTS.forward_launch_s + 32 * 0.01
    assert again - plain == pytest.approx(CONSTANTS.recompute_share * forward)


def test_partitioned_exchange_exposes_its_gather():
    phases = evaluate("extended", terms("zero-dp", "44"), k_zero=1.0, k_opt=0.08, k_net=1.0)
    volume = 4 * workload("bert").model.parameters
    scatter = 7 / 8 * volume / (2 * CONSTANTS.nic_bandwidth_bytes_per_s)
    scatter += (CONSTANTS.zero_straggler_s + CONSTANTS.zero_straggler_s_per_byte * volume) / 2
    expected = scatter / CONSTANTS.gather_efficiency + 0.08 * volume / 4e9 / 8
    assert phases.optimize_s[0] == pytest.approx(expected)


def test_offloaded_step_counts_threads_and_neighbours():
    given = terms("zero-offload", "8", threads=6)
    step = evaluate("extended", given, k_cpu=0.6).optimize_s[0]
    parameters = workload("bert").model.parameters / 1e9
    gather = 7 / 8 * 4e9 * parameters / CONSTANTS.intra_bandwidth_bytes_per_s / CONSTANTS.gather_efficiency
    own = 0.6 * CONSTANTS.reference_cpu_threads / 6 / 8
    shared = CONSTANTS.host_contention_s * 7 / 8
    assert step == pytest.approx(gather + (CONSTANTS.host_update_s + own + shared) * parameters)


def test_pipeline_fills_and_drains_by_the_bubble_formula():
    given = terms("441", "4444", key="llama7_b16")
    assert given.points.n_micro[0] == 1.0
    values = {"k_bwd": 2.0, "k_fwd": 1.0, "k_pp": 1.0, "k_const3": 0.01, "k_opt3": 0.04, "k_net": 1.0}
    one = evaluate("extended", given, **values)
    volume = 4 * workload("llama7_b16").model.parameters
    token = 2048 * 4096
    tensor = 16 * 32 * 16 * token * 3 / 4 / CONSTANTS.tp_bandwidth_bytes_per_s
    hops = 3 * 2.0 * 4 * 16 * token / CONSTANTS.p2p_bandwidth_bytes_per_s
    pipeline = 3 * 16 * 0.01 / 4 + tensor + hops
    assert one.compute_s[0] == pytest.approx(pipeline)
    assert one.iter_time_s[0] == pytest.approx(pipeline + 0.04 * volume / 4e9 / 16 + 0.01)


def test_model_parallel_rows_of_a_checkpointing_stack_recompute_longer_samples():
    points = terms("181", "8", key="t5").points
    assert points.checkpoint_fraction[0] == 1.0
    assert points.tokens_share[0] == pytest.approx(768 / 512)


def test_profile_separates_the_fixed_cost_of_its_passes():
    profile = Profile(0.5, 10.0, 2.0, "given")
    assert profile.per_sample_s == pytest.approx(0.05)
    assert profile.marginal_s(0.1) == pytest.approx(0.03)
    assert profile.marginal_s(9.0) == pytest.approx(0.01)


def test_unknown_environment_names_the_accepted_ones():
    with pytest.raises(UnknownNameError, match="a800-64"):
        load_environment("a100-64")


def test_prior_outside_its_bounds_is_refused():
    with pytest.raises(InputError, match="low <= median <= high"):
        Prior("1", 9.0, 0.5, 1.0, 2.0, "broken")


def test_every_parameter_of_a_form_has_a_prior():
    for form in FORMS.values():
        assert set(form.parameters) == set(ENVIRONMENT.priors[form.name])
        assert all(math.isfinite(prior.median) for prior in ENVIRONMENT.priors[form.name].values())
