"""Trace files: published layout, explanations, meta data; and the grid behind them."""

import json
from pathlib import Path

import pandas as pd
import pytest

from makespan.emulator import emulate, load_calibration, read_point, trace_points, write_trace
from makespan.emulator.model import legacy_frame
from makespan.emulator.points import data_parallel_placements, equal_placements
from makespan.errors import UnknownNameError
from makespan.hardware import cluster
from makespan.plans import Placement, write_exec_plan
from makespan.workloads import workload

WHERE = cluster("a800-64")


@pytest.fixture
def trace(tmp_path: Path) -> tuple[Path, Path, Path]:
    spec = workload("llama7")
    points = [read_point(spec, "244", "8888", 2), read_point(spec, "ga", "8", 2)]
    return write_trace(tmp_path / "llama7", spec, points, WHERE, load_calibration(), seed=7, noise=1.0)


def test_the_table_has_the_published_columns_and_units(trace: tuple[Path, Path, Path]) -> None:
    table = pd.read_csv(trace[0], dtype={"exec_plan": str, "placement": str})
    assert list(table.columns) == [
        "exec_plan",
        "placement",
        "cpu_threads",
        "iter_time",
        "forward",
        "overlap_sync",
        "optimize",
    ]
    assert 0.3 < table["iter_time"][0] < 3.0
    assert 300 < table["overlap_sync"][0] < 3000
    assert table["iter_time"][1] == 0.0


def test_every_row_is_explained(trace: tuple[Path, Path, Path]) -> None:
    records = [json.loads(line) for line in trace[1].read_text(encoding="utf-8").splitlines()]
    assert [record["exec_plan"] for record in records] == ["244", "ga"]
    good, bad = records
    assert sum(good["terms_s"].values()) == pytest.approx(good["iter_time_s"], rel=1e-12)
    assert good["memory_bytes"]["states"] > 0
    assert bad["iter_time_s"] is None and not bad["feasible"] and "GB" in bad["reason"]


def test_the_meta_data_say_what_made_the_trace(trace: tuple[Path, Path, Path]) -> None:
    meta = json.loads(trace[2].read_text(encoding="utf-8"))
    assert meta["note"] == "emulated, not measured"
    assert (meta["seed"], meta["workload"], meta["cluster"]) == (7, "llama7", "a800-64")
    assert meta["calibration"]["excluded_models"] == ["llama2-7b"]
    assert len(meta["calibration"]["theta"]) > 18
    assert len(meta["preset_digests"]["emulator/L1.toml"]) == 32


def test_equal_inputs_give_equal_bytes(trace: tuple[Path, Path, Path], tmp_path: Path) -> None:
    spec = workload("llama7")
    points = [read_point(spec, "244", "8888", 2), read_point(spec, "ga", "8", 2)]
    again = write_trace(tmp_path / "again", spec, points, WHERE, load_calibration(), seed=7, noise=1.0)
    for first, second in zip(trace, again, strict=True):
        assert first.read_bytes() == second.read_bytes()


def test_phases_can_be_written_in_seconds() -> None:
    spec = workload("bert")
    frame = emulate(spec, [read_point(spec, "ga", "8", 8)], WHERE)
    in_ms, in_s = legacy_frame(frame), legacy_frame(frame, "seconds")
    assert in_ms["forward"][0] == pytest.approx(1000 * in_s["forward"][0])
    with pytest.raises(UnknownNameError, match="hours"):
        legacy_frame(frame, "hours")


def test_the_grid_has_every_placement_of_small_data_parallel_jobs() -> None:
    spec = workload("bert")
    points = trace_points(spec, WHERE)
    places = {point.placement.text for point in points if write_exec_plan(point.plan) == "zero-dp"}
    assert {"1", "11", "2", "112", "1111", "44", "26", "35", "1111112", "11111111"} <= places
    assert len(points) == len(set(points)) == 4 * 33
    assert len(data_parallel_placements(WHERE)) == 1 + 2 + 5 + 22 + 3


def test_the_grid_of_model_parallel_plans_is_packed_and_spread() -> None:
    points = trace_points(workload("llama7"), WHERE)
    found = {(write_exec_plan(point.plan), point.placement.text) for point in points}
    assert {("244", "8888"), ("244", "44444444"), ("188", "88888888"), ("821", "22222222")} <= found
    assert not any(plan.startswith("3") for plan, _ in found)
    straddling = {point.placement.text for point in trace_points(workload("llama30"), WHERE)}
    assert "66666666" in straddling


def test_the_grid_covers_the_threads_of_the_published_traces() -> None:
    spec = workload("llama7_b16")
    rows = {
        (write_exec_plan(p.plan), p.placement.text, p.plan.cpu_threads) for p in trace_points(spec, WHERE)
    }
    for threads in (2, 4):
        assert ("zero-offload+gc", "1", threads) in rows
        assert ("111", "1", threads) in rows
        assert ("zero-offload+gc", "4444", threads) in rows
    assert ("244", "8888", 2) in rows and ("244", "8888", 4) not in rows


def test_tensor_parallelism_with_accumulation_stays_on_one_node() -> None:
    points = trace_points(workload("t5_3B"), WHERE)
    places = [point.placement.text for point in points if write_exec_plan(point.plan) == "tp+ga"]
    assert places == ["1", "2", "3", "4"]


def test_equal_placements_respect_the_cluster() -> None:
    assert [place.text for place in equal_placements(16, WHERE)] == ["88", "4444", "22222222"]
    assert equal_placements(6, WHERE, smallest=3) == (Placement((6,)), Placement((3, 3)))
    assert equal_placements(128, WHERE) == ()
