"""Laws of the performance model that hold for every plan, placement and parameter."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from makespan.perf import FORMS, load_environment, points_from_plans
from makespan.perf.forms import Profile, Terms, geometry, p_norm
from makespan.plans import Placement, read_plan
from makespan.workloads import workload

ENVIRONMENT = load_environment("a800-64")
PROFILE = Profile(0.16, 16.0, 0.0, "given")
BANDWIDTHS = {
    "published": ("flat_bandwidth_bytes_per_s", "intra_bandwidth_bytes_per_s", "pcie_bandwidth_bytes_per_s"),
    "extended": (
        "intra_bandwidth_bytes_per_s",
        "nic_bandwidth_bytes_per_s",
        "pcie_bandwidth_bytes_per_s",
        "tp_bandwidth_bytes_per_s",
        "tp_inter_bandwidth_bytes_per_s",
        "p2p_bandwidth_bytes_per_s",
    ),
}
CASES = [
    ("bert", text, place)
    for text in ("ga", "gc", "zero-dp", "zero-offload")
    for place in ("1", "8", "44", "2222", "35")
] + [
    ("llama7", text, place)
    for text, place in (("182", "88"), ("441", "4444"), ("818", "8" * 8), ("224", "4444"))
]

forms = st.sampled_from(sorted(FORMS))
cases = st.sampled_from(CASES)
factors = st.floats(min_value=1.01, max_value=8.0)
positive = st.floats(min_value=1e-6, max_value=1e3)


def build_points(key, text, place, threads=12):
    spec = workload(key)
    placement = Placement.parse(place)
    plan = read_plan(
        text, n_gpus=placement.n_gpus, global_batch_size=spec.global_batch_size, cpu_threads=threads
    )
    return points_from_plans([(plan, placement)], spec, ENVIRONMENT)


@st.composite
def parameters(draw, form):
    priors = ENVIRONMENT.priors[form]
    shares = draw(st.lists(st.floats(-1.5, 1.5), min_size=len(priors), max_size=len(priors)))
    values = [
        np.clip(
            priors[name].median * np.exp(share * priors[name].log_sd), priors[name].low, priors[name].high
        )
        for name, share in zip(FORMS[form].parameters, shares, strict=True)
    ]
    return np.array(values)


def phases(form, theta, points, constants=ENVIRONMENT.constants, profile=PROFILE):
    return FORMS[form].phases(theta, Terms(points, profile, constants))


@given(x=positive, y=positive, k=st.floats(1.0, 200.0))
def test_overlap_lies_between_maximum_and_sum(x, y, k):
    value = float(p_norm(np.array([x]), np.array([y]), np.array([k]))[0])
    assert max(x, y) * (1 - 1e-12) <= value <= (x + y) * (1 + 1e-12)


@given(x=positive, y=positive, k=st.floats(1.0, 50.0), more=factors)
def test_overlap_only_helps_more_with_a_larger_exponent(x, y, k, more):
    one, other = (float(p_norm(np.array([x]), np.array([y]), np.array([e]))[0]) for e in (k, k * more))
    assert other <= one * (1 + 1e-9)


@settings(max_examples=60)
@given(data=st.data(), form=forms, case=cases, factor=factors)
def test_time_never_rises_with_a_bandwidth(data, form, case, factor):
    theta, name = data.draw(parameters(form)), data.draw(st.sampled_from(BANDWIDTHS[form]))
    points = build_points(*case)
    faster = dataclasses.replace(
        ENVIRONMENT.constants, **{name: factor * getattr(ENVIRONMENT.constants, name)}
    )
    before = phases(form, theta, points).iter_time_s[0]
    assert phases(form, theta, points, faster).iter_time_s[0] <= before * (1 + 1e-9)


@settings(max_examples=60)
@given(data=st.data(), form=forms, case=cases)
def test_never_faster_than_compute_alone(data, form, case):
    """Forward and backward of a replica's samples, spread over its devices, bound every plan from below."""
    theta = data.draw(parameters(form))
    points = build_points(*case)
    k = dict(zip(FORMS[form].parameters, theta, strict=True))
    share = k.get("k_fwd", 1.0) if points.is_model_parallel[0] else 1.0
    work = share * PROFILE.per_sample_s * points.replica_batch_size[0] * (1.0 + k["k_bwd"])
    assert phases(form, theta, points).iter_time_s[0] >= work / (points.tp[0] * points.pp[0]) * (1 - 1e-9)


@settings(max_examples=60)
@given(data=st.data(), form=forms, case=cases)
def test_phases_are_positive_and_part_of_the_whole(data, form, case):
    result = phases(form, data.draw(parameters(form)), build_points(*case))
    assert result.compute_s[0] > 0
    assert result.optimize_s[0] > 0
    assert result.compute_s[0] + result.optimize_s[0] < result.iter_time_s[0]


@settings(max_examples=60)
@given(data=st.data(), form=forms, case=cases, factor=factors)
def test_devices_compute_and_data_move_for_a_part_of_the_step(data, form, case, factor):
    theta, points = data.draw(parameters(form)), build_points(*case)
    faster = dataclasses.replace(
        ENVIRONMENT.constants,
        **{name: factor * getattr(ENVIRONMENT.constants, name) for name in BANDWIDTHS[form]},
    )
    slow, fast = (Terms(points, PROFILE, constants) for constants in (ENVIRONMENT.constants, faster))
    step_s = FORMS[form].phases(theta, slow).iter_time_s[0]
    before, after = ([part_s[0] for part_s in FORMS[form].work(theta, terms)] for terms in (slow, fast))
    assert 0 < before[0] <= step_s * (1 + 1e-12) and 0 <= before[1] <= step_s * (1 + 1e-12)
    assert after[0] == before[0] and after[1] <= before[1]  # no bandwidth changes how much is computed
    if points.n_gpus[0] == 1 and not points.is_offload[0]:
        assert before[1] == 0


@settings(max_examples=40)
@given(data=st.data(), form=forms, place=st.sampled_from(("1", "8", "2222")), threads=st.integers(1, 48))
def test_more_threads_never_slow_the_offloaded_step(data, form, place, threads):
    theta = data.draw(parameters(form))
    few = phases(form, theta, build_points("bert", "zero-offload", place, threads)).iter_time_s[0]
    many = phases(form, theta, build_points("bert", "zero-offload", place, threads + 1)).iter_time_s[0]
    assert many <= few * (1 + 1e-12)


@settings(max_examples=40)
@given(data=st.data(), form=forms, case=cases, factor=factors)
def test_a_slower_forward_slows_every_plan(data, form, case, factor):
    theta, points = data.draw(parameters(form)), build_points(*case)
    slower = Profile(PROFILE.time_s * factor, PROFILE.samples, 0.0, "given")
    before = phases(form, theta, points).iter_time_s[0]
    assert phases(form, theta, points, profile=slower).iter_time_s[0] > before


@settings(max_examples=40)
@given(data=st.data(), form=forms)
def test_a_batch_of_parameter_vectors_equals_one_at_a_time(data, form):
    several = np.stack([data.draw(parameters(form)) for _ in range(3)])
    points = build_points("bert", "zero-offload", "44").join(build_points("bert", "ga", "2222"))
    together = phases(form, several, points)
    for row, theta in enumerate(several):
        alone = phases(form, theta, points)
        for batched, single in zip(together, alone, strict=True):
            assert batched[row] == pytest.approx(single, rel=1e-12)


@given(case=cases)
def test_points_keep_the_batch_identity(case):
    points = build_points(*case)
    assert points.replica_batch_size[0] * points.dp[0] == workload(case[0]).global_batch_size
    assert points.dp[0] * points.tp[0] * points.pp[0] == points.n_gpus[0]


@given(counts=st.lists(st.integers(1, 8), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_card_loads_of_pure_data_parallelism_ignore_the_order_of_nodes(counts, seed):
    shuffled = np.random.default_rng(seed).permutation(counts).tolist()
    loads = [geometry(tuple(c), 1, 1, sum(c), 2).ring_load for c in (counts, shuffled)]
    assert loads[0] == pytest.approx(loads[1])
    cards = min((count + 1) // 2 for count in counts)
    assert loads[0] == pytest.approx(1.0 / cards if len(counts) > 1 else 0.0)
