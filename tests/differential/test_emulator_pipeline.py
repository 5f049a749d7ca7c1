"""Closed form of the pipeline time against the exact event schedule."""

import numpy as np
import pytest

from makespan.emulator import exact_pipeline, explain, load_calibration, read_point
from makespan.emulator.model import closed_form_time_s, pipeline_time_s
from makespan.errors import InputError
from makespan.hardware import cluster
from makespan.oobleck.interleaving import interleaved_time_s
from makespan.plans import one_f_one_b_order
from makespan.workloads import workload


@pytest.mark.parametrize("n_chunks", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8])
def test_the_closed_form_of_chunks_is_the_interleaved_order(m: int, n_chunks: int) -> None:
    forward, backward = [1.0] * 4, [2.0] * 4
    parts = (1.0 / n_chunks,) * (4 * n_chunks)
    exact = interleaved_time_s(parts, tuple(2 * part for part in parts), 4, m)
    assert closed_form_time_s(forward, backward, m, n_chunks) == pytest.approx(exact)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 4, 7, 16])
def test_both_agree_for_balanced_stages_without_transfers(p: int, m: int) -> None:
    forward, backward = [1.0] * p, [2.0] * p
    exact = pipeline_time_s(forward, backward, m)
    assert exact == pytest.approx(closed_form_time_s(forward, backward, m), rel=1e-12)
    assert exact == pytest.approx(3.0 * (m + p - 1), rel=1e-12)


def test_the_bounds_hold_for_imbalanced_stages_and_small_transfers() -> None:
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(1000):
        p, m = int(rng.integers(2, 9)), int(rng.integers(1, 17))
        forward = rng.uniform(0.8, 1.2, p)
        backward = 2.0 * rng.uniform(0.8, 1.2, p)
        transfer = float(rng.uniform(0.0, 0.002))
        exact = pipeline_time_s(list(forward), list(backward), m, transfer)
        closed = closed_form_time_s(list(forward), list(backward), m) + 2 * (p - 1) * transfer
        ratios.append(closed / exact - 1.0)
    assert min(ratios) > -0.003
    assert max(ratios) < 0.093
    assert 0.0 <= float(np.mean(ratios)) < 0.02


def test_a_single_micro_batch_runs_the_stages_one_after_another() -> None:
    assert pipeline_time_s([1.0, 2.0, 3.0], [2.0, 4.0, 6.0], 1, [0.5, 0.25]) == pytest.approx(18.0 + 1.5)


def test_every_stage_runs_each_operation_once_and_backwards_follow_forwards() -> None:
    for stage in range(4):
        order = one_f_one_b_order(stage, 4, 6)
        assert sorted(order) == sorted([("F", k) for k in range(6)] + [("B", k) for k in range(6)])
        for k in range(6):
            assert order.index(("F", k)) < order.index(("B", k))


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="2 forward and 1 backward"):
        pipeline_time_s([1.0, 1.0], [1.0], 2)
    with pytest.raises(InputError, match="0 micro-batches"):
        pipeline_time_s([1.0], [1.0], 0)


@pytest.mark.parametrize(("plan", "placement"), [("441", "4444"), ("242", "4444"), ("281", "88")])
def test_stage_times_of_a_point_add_up_to_its_terms(plan: str, placement: str) -> None:
    spec, where, constants = workload("llama7"), cluster("a800-64"), load_calibration()
    point = read_point(spec, plan, placement, 2)
    terms = explain(spec, point, where, constants).terms_s
    pipeline = exact_pipeline(spec, point, where, constants)
    summed = sum(
        terms[name] for name in ("forward", "backward", "recompute", "tensor_exchange", "stage_transfer")
    )
    assert pipeline.closed_form_s == pytest.approx(summed, rel=1e-9)
    assert pipeline.event_schedule_s == pytest.approx(summed, rel=0.05)
