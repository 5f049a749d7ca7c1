"""Emulation: tables, phases, noise, disturbances, heterogeneous nodes, explanation."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from makespan.emulator import (
    Anomalies,
    Disturbances,
    Stragglers,
    emulate,
    explain,
    iteration_time_s,
    load_calibration,
    read_point,
    trace_points,
)
from makespan.emulator.points import points_from_frame
from makespan.errors import InputError, PlanError, TraceError
from makespan.hardware import ClusterSpec, cluster, cluster_names
from makespan.numerics import named_seed, significant
from makespan.plans import Placement
from makespan.tables import THROUGHPUT
from makespan.workloads import workload, workload_keys

WHERE = cluster("a800-64")


@pytest.fixture(scope="module")
def bert() -> pd.DataFrame:
    return emulate(workload("bert"), trace_points(workload("bert"), WHERE), WHERE)


@pytest.mark.parametrize("name", workload_keys())
def test_every_workload_has_a_trace(name: str) -> None:
    spec = workload(name)
    frame = emulate(spec, trace_points(spec, WHERE), WHERE, noise=1.0, seed=3)
    assert list(frame.columns) == THROUGHPUT.names
    assert frame["feasible"].any()
    times = frame["iter_time_s"].to_numpy()
    assert np.array_equal(np.isfinite(times), frame["feasible"].to_numpy())
    assert np.nanmin(times) > 0
    assert not frame.duplicated(["exec_plan", "placement", "cpu_threads"]).any()
    assert set(frame["provenance"]) == {"emulated"}


def test_an_infeasible_row_has_no_times() -> None:
    spec = workload("llama7")
    frame = emulate(spec, [read_point(spec, "ga", "8", 2)], WHERE)
    assert not frame["feasible"].iloc[0]
    assert frame[["iter_time_s", "forward_s", "overlap_sync_s", "optimize_s"]].isna().all(axis=None)


def test_a_placement_that_no_node_can_hold_is_infeasible() -> None:
    spec = workload("roberta")
    points = [read_point(spec, "ga", "16-", 8), read_point(spec, "ga", "88", 8)]
    frame = emulate(spec, points, WHERE)
    assert frame["feasible"].tolist() == [False, True]
    assert "more GPUs on a node" in explain(spec, points[0], WHERE).reason


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_of_the_catalogue_can_be_emulated(name: str) -> None:
    where, spec = cluster(name), workload("bert")
    frame = emulate(spec, trace_points(spec, where), where)
    assert frame["feasible"].any()
    assert all(Placement.parse(text).fits(where.gpus_per_node, where.n_nodes) for text in frame["placement"])


def test_phases_follow_the_style_of_the_stack(bert: pd.DataFrame) -> None:
    spec = workload("bert")
    row = bert[(bert["exec_plan"] == "zero-dp") & (bert["placement"] == "44")].iloc[0]
    terms = explain(spec, read_point(spec, "zero-dp", "44", 8), WHERE).terms_s
    assert row["forward_s"] == pytest.approx(terms["forward"])
    assert row["overlap_sync_s"] == pytest.approx(terms["backward"] + terms["gradient_exchange"])
    assert row["optimize_s"] == pytest.approx(terms["device_update"] + terms["parameter_gather"])


def test_model_parallel_rows_report_pipeline_and_optimiser_only() -> None:
    spec = workload("llama7")
    row = emulate(spec, [read_point(spec, "244", "8888", 2)], WHERE).iloc[0]
    terms = explain(spec, read_point(spec, "244", "8888", 2), WHERE).terms_s
    assert row["forward_s"] == 0.0
    assert row["optimize_s"] == pytest.approx(terms["device_update"])
    gap = row["iter_time_s"] - row["overlap_sync_s"] - row["optimize_s"]
    assert gap == pytest.approx(terms["gradient_exchange"] + terms["fixed"] + terms["node_wait"])


def test_an_asynchronous_stack_reports_launches_as_forward() -> None:
    spec = workload("roberta")
    row = emulate(spec, [read_point(spec, "ga", "8", 8)], WHERE).iloc[0]
    terms = explain(spec, read_point(spec, "ga", "8", 8), WHERE).terms_s
    assert row["forward_s"] == pytest.approx(24 * 24 * 5e-6)
    assert row["forward_s"] + row["overlap_sync_s"] == pytest.approx(terms["forward"] + terms["backward"])
    assert row["optimize_s"] == pytest.approx(terms["device_update"] + terms["gradient_exchange"])


def test_without_noise_the_value_of_the_model_is_returned_to_nine_digits(bert: pd.DataFrame) -> None:
    spec = workload("bert")
    points = trace_points(spec, WHERE)
    exact = iteration_time_s(spec, points, WHERE, load_calibration())
    np.testing.assert_array_equal(bert["iter_time_s"].to_numpy(), significant(exact, 9))
    found = explain(spec, points[5], WHERE)
    assert found.iter_time_s == pytest.approx(exact[5], rel=1e-12)


def test_noise_depends_on_the_row_alone() -> None:
    spec = workload("bert")
    points = trace_points(spec, WHERE)
    rng = np.random.default_rng(1)
    order = rng.permutation(len(points))[:40]
    whole = emulate(spec, points, WHERE, seed=5, noise=1.0)
    part = emulate(spec, [points[index] for index in order], WHERE, seed=5, noise=1.0)
    pd.testing.assert_frame_equal(whole.iloc[order].reset_index(drop=True), part)
    other = emulate(spec, points, WHERE, seed=6, noise=1.0)
    assert not np.allclose(whole["iter_time_s"], other["iter_time_s"])


def test_noise_has_the_stated_size_and_no_bias(bert: pd.DataFrame) -> None:
    spec = workload("bert")
    points = trace_points(spec, WHERE)
    logs = [
        np.log(emulate(spec, points, WHERE, seed=seed, noise=1.0)["iter_time_s"] / bert["iter_time_s"])
        for seed in range(30)
    ]
    scatter = np.concatenate(logs)
    assert 0.018 < scatter.std() < 0.024
    assert abs(scatter.mean()) < 0.002


def test_columns_of_a_noisy_row_stay_consistent() -> None:
    spec = workload("bert")
    frame = emulate(spec, trace_points(spec, WHERE), WHERE, seed=2, noise=1.0)
    phases = frame[["forward_s", "overlap_sync_s", "optimize_s"]].sum(axis=1)
    assert (phases < frame["iter_time_s"]).all()


def test_seeds_differ_between_rows_and_are_pinned() -> None:
    spec = workload("bert")
    first, second = read_point(spec, "ga", "44", 8), read_point(spec, "ga", "35", 8)
    assert named_seed(0, "a800-64", "bert", first.text) == 12187137607031412932
    assert first.text != second.text


def test_stragglers_slow_compute_and_nothing_else() -> None:
    spec = workload("bert")
    points = [read_point(spec, "ga", "11111111", 8)]
    always = Disturbances(stragglers=Stragglers(probability=1.0, mean_slowdown=0.5))
    slow = emulate(spec, points, WHERE, disturbances=always).iloc[0]
    exact = emulate(spec, points, WHERE).iloc[0]
    assert slow["forward_s"] > 1.2 * exact["forward_s"]
    assert slow["optimize_s"] == pytest.approx(exact["optimize_s"])
    never = Disturbances(stragglers=Stragglers(probability=0.0, mean_slowdown=0.5))
    assert emulate(spec, points, WHERE, disturbances=never).iloc[0]["iter_time_s"] == pytest.approx(
        exact["iter_time_s"]
    )


def test_a_slow_path_hits_odd_placements_only(bert: pd.DataFrame) -> None:
    spec = workload("bert")
    points = trace_points(spec, WHERE)
    odd_path = Disturbances(anomalies=Anomalies(odd_path_bytes_per_s=2e9))
    slow = emulate(spec, points, WHERE, disturbances=odd_path)
    extra = slow["iter_time_s"] - bert["iter_time_s"]
    counts = [point.placement.gpus_per_node for point in points]
    is_odd = np.array([len(c) > 1 and any(n % 2 for n in c) for c in counts])
    assert extra[is_odd].to_numpy() == pytest.approx(4 * spec.model.parameters / 2e9)
    assert np.allclose(extra[~is_odd], 0.0)


def test_half_batches_run_one_micro_batch() -> None:
    spec = workload("roberta")
    points = [read_point(spec, "ga", "1", 8), read_point(spec, "ga", "8", 8)]
    half = Disturbances(anomalies=Anomalies(half_batch_when_short=True))
    short, exact = emulate(spec, points, WHERE, disturbances=half), emulate(spec, points, WHERE)
    assert short["iter_time_s"].iloc[0] < 0.6 * exact["iter_time_s"].iloc[0]
    assert short["iter_time_s"].iloc[1] == exact["iter_time_s"].iloc[1]


def test_missing_rows_are_left_out_whatever_the_order() -> None:
    spec = workload("bert")
    points = trace_points(spec, WHERE)
    gaps = Disturbances(anomalies=Anomalies(missing_share=0.3))
    kept = emulate(spec, points, WHERE, disturbances=gaps)
    assert 0.5 * len(points) < len(kept) < 0.9 * len(points)
    again = emulate(spec, points[::-1], WHERE, disturbances=gaps)
    assert set(zip(kept["exec_plan"], kept["placement"], strict=True)) == set(
        zip(again["exec_plan"], again["placement"], strict=True)
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda: Stragglers(probability=1.5, mean_slowdown=0.1),
        lambda: Stragglers(probability=0.5, mean_slowdown=-0.1),
        lambda: Anomalies(missing_share=1.0),
        lambda: Anomalies(odd_path_bytes_per_s=-1.0),
    ],
)
def test_impossible_disturbances_are_refused(build: object) -> None:
    with pytest.raises(InputError, match="expected"):
        build()  # type: ignore[operator]


def test_on_mixed_nodes_the_slowest_decides() -> None:
    fast = WHERE.nodes[0]
    slow_gpu = replace(fast.gpu, name="half", peak_flop_per_s=(("fp16", 156e12),))
    mixed = ClusterSpec("mixed", (fast, replace(fast, name="b", gpu=slow_gpu)), WHERE.network)
    all_slow = ClusterSpec("slow", (replace(fast, name="b", gpu=slow_gpu),) * 2, WHERE.network)
    spec = workload("bert")
    points = [read_point(spec, "ga", "44", 8)]
    times = [
        iteration_time_s(spec, points, where, load_calibration())[0] for where in (WHERE, mixed, all_slow)
    ]
    assert times[0] < times[1] == times[2]


def test_an_explanation_names_what_is_wrong() -> None:
    spec = workload("llama7")
    found = explain(spec, read_point(spec, "ga", "8", 2), WHERE)
    assert not found.feasible and "80.0 GB" in found.reason
    assert math.isnan(found.iter_time_s)
    assert found.calibration.identifier == "L1/without-llama2-7b"


def test_rows_that_cannot_be_read_are_named() -> None:
    frame = pd.DataFrame({"exec_plan": ["ga", "244"], "placement": ["8", "8"], "cpu_threads": [8, 8]})
    with pytest.raises(TraceError, match=r"mine: row 2: execution plan '244'"):
        points_from_frame(workload("bert"), frame, where="mine")
    with pytest.raises(PlanError):
        read_point(workload("bert"), "ga", "333", 8)
