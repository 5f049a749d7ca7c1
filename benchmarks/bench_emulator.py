"""Cost of the emulator: prediction from ready features, warm and cold features, one trace, one fit."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from makespan.emulator import (
    Point,
    calibrate,
    emulate,
    feature_table,
    iteration_time_s,
    load_calibration,
    observe,
    read_point,
    trace_points,
)
from makespan.emulator.model import FeatureTable, geometry, predict
from makespan.hardware import cluster
from makespan.plans import enumerate_placements
from makespan.workloads import workload

CLUSTER = cluster("a800-64")
L1 = load_calibration("L1")
N_POINTS = 100_000
N_GEOMETRIES = 2_000


def note_rate(benchmark: Any, n: int) -> None:
    """Note how many of ``n`` things a second the fastest round did; it depends on the machine."""
    if benchmark.stats is not None:  # None where nothing is timed
        benchmark.extra_info["per_second"] = round(n / benchmark.stats.stats.min)


def many_points(n: int) -> list[Point]:
    """Return a trace repeated until it has ``n`` points."""
    points = trace_points(workload("t5"), CLUSTER)
    return [points[index % len(points)] for index in range(n)]


def test_prediction_from_ready_features(benchmark: Any) -> None:
    """Target: 1e6 points a second."""
    spec = workload("t5")
    table = feature_table(spec, CLUSTER)
    features = table.features(table.codes(many_points(N_POINTS)))
    theta = L1.for_workload(spec).vector
    assert len(benchmark(predict, theta, features)) == N_POINTS
    note_rate(benchmark, N_POINTS)


def test_points_with_features_on_a_warm_cache(benchmark: Any) -> None:
    """Target: 1e5 points a second, from point objects to times."""
    spec, points = workload("t5"), many_points(N_POINTS)
    iteration_time_s(spec, points, CLUSTER, L1)
    assert len(benchmark(iteration_time_s, spec, points, CLUSTER, L1)) == N_POINTS
    note_rate(benchmark, N_POINTS)


def cold_points() -> Iterator[Point]:
    """Yield distinct (plan, placement) pairs, none of them seen before."""
    spec = workload("llama7")
    for (pp, tp, dp), spread in product(
        [(p, t, d) for p in (1, 2, 4, 8) for t in (1, 2, 4, 8) for d in (1, 2, 4, 8)], (True, False)
    ):
        n_gpus = pp * tp * dp
        if n_gpus > CLUSTER.n_gpus:
            continue
        placements = enumerate_placements(n_gpus, 8, 8)
        for placement in placements if spread else placements[::-1]:
            yield read_point(spec, f"{pp}{tp}{dp}", placement.text, 2)


def test_points_with_features_on_a_cold_cache(benchmark: Any) -> None:
    """Target: 2e3 distinct geometries a second."""
    spec = workload("llama7")
    points = list(dict.fromkeys(cold_points()))[:N_GEOMETRIES]

    def setup() -> tuple[tuple[FeatureTable, list[Point]], dict[str, Any]]:
        geometry.cache_clear()
        return (FeatureTable(spec, CLUSTER), points), {}

    codes = benchmark.pedantic(lambda table, asked: table.codes(asked), setup=setup, rounds=3)
    assert len(np.unique(codes)) == N_GEOMETRIES
    note_rate(benchmark, N_GEOMETRIES)


def test_one_trace_with_noise(benchmark: Any) -> None:
    """A whole designed grid with a random generator of its own for each row."""
    spec = workload("t5")
    points = trace_points(spec, CLUSTER)
    assert len(benchmark(emulate, spec, points, CLUSTER, L1, seed=1, noise=1.0)) == len(points)


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    """Return emulated tables of two stacks; no data are needed."""
    return {
        key: emulate(workload(key), trace_points(workload(key), CLUSTER), CLUSTER, L1, noise=1.0)
        for key in ("vit", "bert", "llama7")
    }


def test_one_calibration(benchmark: Any, tables: dict[str, Any]) -> None:
    """A fit of all constants to some four hundred rows."""
    data = observe(tables, CLUSTER)
    assert benchmark(calibrate, data).n_rows == len(data)
