"""Features and time model: terms against formulas written out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from makespan.emulator import (
    CONSTANTS,
    explain,
    feature_table,
    load_calibration,
    read_point,
    trace_points,
)
from makespan.emulator.constants import CONSTANT_NAMES, prior_theta, theta_array, theta_mapping
from makespan.emulator.model import FEATURE_NAMES, TERM_NAMES, predict, predict_terms
from makespan.errors import InputError, UnknownNameError
from makespan.hardware import cluster
from makespan.workloads import Workload, workload

WHERE = cluster("a800-64")
L1 = load_calibration()


def terms_of(name: str, plan: str, placement: str, threads: int = 8) -> dict[str, float]:
    spec = workload(name)
    return explain(spec, read_point(spec, plan, placement, threads), WHERE, L1).terms_s


def constants_of(name: str) -> dict[str, float]:
    return dict(L1.for_workload(workload(name)).theta)


def test_forward_is_products_element_wise_kernels_and_layers() -> None:
    c, terms = constants_of("bert"), terms_of("bert", "ga", "8")
    s, h, f, n = 512, 1024, 4096, 4
    gemm = n * (24 * (2 * s * (4 * h * h + 2 * h * f) + 4 * s * s * h) + 2 * s * h * 30592) / 312e12
    kept = n * (24 * (34 * s * h + 5 * 16 * s * s) + 6 * s * 30592)
    expected = gemm / c["e_gemm"] + kept * c["kappa"] / (2039e9 * 0.85) + 24 * c["t_layer"]
    assert terms["forward"] == pytest.approx(expected, rel=1e-9)
    assert terms["backward"] == pytest.approx(c["k_bwd"] * expected, rel=1e-9)


def test_placements_are_as_alike_as_the_page_on_the_emulator_says() -> None:
    of = {text: terms_of("bert", "zero-dp", text) for text in ("2222", "44", "35", "26", "17")}
    assert of["35"] == of["44"]
    assert of["26"] == of["17"]
    few, many = of["26"], of["2222"]
    assert 1 < many["gradient_exchange"] / few["gradient_exchange"] < 1.015
    assert many["node_wait"] / few["node_wait"] == pytest.approx(3)
    assert {name for name in few if few[name] != many[name]} == {
        "gradient_exchange",
        "parameter_gather",
        "node_wait",
    }
    assert many["gradient_exchange"] / of["44"]["gradient_exchange"] == pytest.approx(2, rel=0.02)


def test_the_plain_exchange_is_a_ring_over_the_cards_of_the_smallest_node() -> None:
    c, terms = constants_of("bert"), terms_of("bert", "ga", "2222")
    volume = 2 * 7 / 8 * 336297858 * 4
    buckets = 1 + -(-(336297858 * 4 - 1e6) // 25e6)
    hops = 2 * buckets * (3 * c["a_net"] + 4 * 3.4e-6)
    assert terms["gradient_exchange"] == pytest.approx(volume / (25e9 * c["e_net"]) + hops, rel=1e-9)


def test_an_overlapped_exchange_hides_behind_the_last_backward_pass_but_for_one_bucket() -> None:
    c = constants_of("roberta")
    hidden = terms_of("roberta", "ga", "4")
    volume = 2 * 3 / 4 * 355412057 * 4 / (200e9 * c["e_nv"])
    buckets = 1 + -(-(355412057 * 4 - 1e6) // 25e6)
    ring = volume + 2 * buckets * 3 * 3.4e-6
    assert hidden["gradient_exchange"] == pytest.approx(ring / buckets, rel=1e-9)
    exposed = terms_of("roberta", "ga", "11111111")
    full = 2 * 7 / 8 * 355412057 * 4 / (25e9 * c["e_net"]) + 2 * buckets * 7 * c["a_net"]
    left = full - c["phi"] * exposed["backward"]
    assert exposed["gradient_exchange"] == pytest.approx(left, rel=1e-9)


def test_tensor_parallelism_pays_in_every_pass() -> None:
    c, terms = constants_of("llama7"), terms_of("llama7", "182", "88")
    one_pass = 64 * (4 * 2 * 2048 * 4096 * 2 * 7 / 8 / (200e9 * c["e_nv"]) + c["a_coll"])
    assert terms["tensor_exchange"] == pytest.approx(2 * one_pass, rel=1e-9)
    checkpointed = terms_of("t5", "181", "8")
    cc = constants_of("t5")
    reductions = 40 * 2 + 40 * 3
    one_pass = reductions * (16 * 2 * 768 * 1024 * 2 * 7 / 8 / (200e9 * cc["e_nv"]) + cc["a_coll"])
    assert checkpointed["tensor_exchange"] == pytest.approx(3 * one_pass, rel=1e-9)


def test_transfers_cross_every_boundary_twice() -> None:
    c, terms = constants_of("llama7"), terms_of("llama7", "242", "88")
    volume = 2 * 4 * 2 * 2048 * 4096
    expected = volume / (12.5e9 * c["e_p2p"]) + 2 * 9.6e-6 + c["t_stage"]
    assert terms["stage_transfer"] == pytest.approx(expected, rel=1e-9)


def test_chunks_do_not_hasten_a_single_micro_batch() -> None:
    spec = workload("llama7")
    point = read_point(spec, "441", "4444", 2)

    def forward_s(micro_batch_size: int, n_chunks: int) -> float:
        plan = replace(
            point.plan,
            micro_batch_size=micro_batch_size,
            grad_accum_steps=8 // micro_batch_size,
            interleave=n_chunks,
            schedule="interleaved" if n_chunks > 1 else "1f1b",
        )
        return explain(spec, replace(point, plan=plan), WHERE, L1).terms_s["forward"]

    assert forward_s(8, 4) == pytest.approx(forward_s(8, 1))
    assert 0.8 * forward_s(4, 1) < forward_s(4, 4) < 0.9 * forward_s(4, 1)  # 4.25 of 5 passes of a stage
    assert forward_s(1, 4) < 0.82 * forward_s(1, 1)  # 8.75 of 11


def test_offload_pays_for_the_shard_and_for_the_whole_model() -> None:
    c, terms = constants_of("gpt2"), terms_of("gpt2", "zero-offload", "4", 12)
    p = 1557686400
    rate = min(c["r_cpu"], 12 * 0.3e9, 200e9 / 24 / 4)
    assert terms["host_update"] == pytest.approx(p / 4 / rate, rel=1e-9)
    assert terms["host_to_device"] == pytest.approx(2 * p / 4 / (32e9 * c["e_pcie"]), rel=1e-9)
    assert terms["offload_overhead"] == pytest.approx(c["c_full"] * p, rel=1e-9)
    expected = terms["host_to_device"] + c["c_grad"] * p
    assert terms["gradient_to_host"] == pytest.approx(expected, rel=1e-9)
    assert terms["device_update"] == 0.0


def test_a_slow_host_optimiser_scales_with_threads() -> None:
    two, four = (terms_of("llama7_b16", "zero-offload+gc", "1", threads) for threads in (2, 4))
    assert two["host_update"] == pytest.approx(2 * four["host_update"], rel=1e-9)
    assert two["recompute"] == four["recompute"] > 0.9 * two["forward"]


def test_one_replica_has_no_exchange_and_one_stage_no_transfer() -> None:
    terms = terms_of("gpt2", "ga", "2")
    assert terms["stage_transfer"] == 0.0 == terms["tensor_exchange"]
    alone = terms_of("bert", "zero-dp", "1")
    assert alone["gradient_exchange"] == 0.0 == alone["parameter_gather"] == alone["node_wait"]


def image_terms(threads: int) -> dict[str, float]:
    return terms_of("vit", "ga", "8", threads)


def test_decoding_is_hidden_unless_it_is_slower_than_the_step() -> None:
    assert image_terms(8)["data_loading"] == 0.0
    slow = image_terms(1)
    busy = slow["forward"] + slow["backward"] + slow["gradient_exchange"]
    assert slow["data_loading"] == pytest.approx(8 * 8 / (400.0 * 8) - busy)


def test_terms_sum_to_the_total() -> None:
    spec = workload("t5")
    table = feature_table(spec, WHERE)
    x = table.features(table.codes(trace_points(spec, WHERE)))
    theta = L1.for_workload(spec).vector
    terms = predict_terms(theta, x)
    assert tuple(terms) == TERM_NAMES
    total = predict(theta, x)
    np.testing.assert_allclose(np.sum(list(terms.values()), axis=0), total, rtol=1e-12)


def test_many_constants_at_once_equal_one_at_a_time() -> None:
    spec = workload("llama7")
    table = feature_table(spec, WHERE)
    x = table.features(table.codes(trace_points(spec, WHERE)))
    thetas = np.stack([prior_theta(), L1.for_workload(spec).vector])
    both = predict(thetas, x)
    assert both.shape == (2, len(x["gemm_s"]))
    for row, theta in enumerate(thetas):
        np.testing.assert_array_equal(both[row], predict(theta, x))


def test_features_are_cached_and_named() -> None:
    spec = workload("bert")
    table = feature_table(spec, WHERE)
    points = [read_point(spec, "ga", "44", 8), read_point(spec, "ga", "44", 8)]
    codes = table.codes(points)
    assert codes[0] == codes[1]
    assert tuple(table.features(codes)) == FEATURE_NAMES
    assert table.plans[codes[0]].micro_batch_size == 4


@pytest.mark.parametrize("name", ["modern"])
def test_a_stack_may_reduce_inside_the_nodes_first(name: str) -> None:
    spec = _with_stack(workload("gpt2"), name)
    point = read_point(spec, "ga", "88", 8)
    hierarchical = explain(spec, point, WHERE, L1).terms_s["gradient_exchange"]
    c = constants_of("gpt2")
    volume = 2 * 1557686400
    inside = 2 * 7 / 8 * volume / (200e9 * c["e_nv"])
    ring = 2 * 15 / 16 * volume / (100e9 * c["e_net"])
    assert hierarchical < inside + ring


def _with_stack(spec: Workload, name: str) -> Workload:
    from dataclasses import replace

    from makespan.workloads import stack

    return replace(spec, data_parallel_stack=stack(name), global_batch_size=64)


def test_constants_round_trip_by_name() -> None:
    values = theta_mapping(prior_theta())
    assert tuple(values) == CONSTANT_NAMES
    np.testing.assert_array_equal(theta_array(values), prior_theta())
    assert len({constant.meaning for constant in CONSTANTS}) == len(CONSTANTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"e_nv": 1.2}, r"e_nv is 1.2; expected in \(0, 1\]"),
        ({"t_const": -1.0}, "t_const is -1.0; expected a positive number"),
        ({"t_const": float("nan")}, "t_const is nan"),
    ],
)
def test_constants_out_of_range_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        theta_array({**theta_mapping(prior_theta()), **change})


def test_missing_and_unknown_constants_are_refused() -> None:
    values = theta_mapping(prior_theta())
    with pytest.raises(UnknownNameError, match="e_gem"):
        theta_array({**values, "e_gem": 1.0})
    del values["phi"]
    with pytest.raises(InputError, match="constants missing: phi"):
        theta_array(values)
