"""Reading the authors' trace files: units, line ends, failures, and what is rejected."""

import math

import numpy as np
import pytest

from makespan.errors import MissingDataError, TraceError
from makespan.tables import THROUGHPUT
from makespan.throughput.sources import phase_unit, read_artifact_trace
from makespan.workloads import workload

HEADER = "exec_plan,placement,iter_time,forward,overlap_sync,optimize"
GOOD = "ga,11,0.5,100,300,50"


def write(tmp_path, *lines, end="\n", encoding="utf-8", final=True):
    path = tmp_path / "placements.csv"
    text = end.join(lines) + (end if final else "")
    path.write_bytes(text.encode(encoding))
    return path


def read(path, key="bert"):
    return read_artifact_trace(path, workload(key), "published", 8)


def test_row_is_converted_to_the_canonical_table(tmp_path):
    frame = read(write(tmp_path, HEADER, "ga,31,0.5,100,300,50"))
    assert list(frame.columns) == THROUGHPUT.names
    row = frame.iloc[0]
    assert (row["workload"], row["exec_plan"], row["placement"]) == ("bert", "ga", "13")
    assert (row["cpu_threads"], row["global_batch_size"]) == (8, 32)
    assert row["iter_time_s"] == 0.5
    assert row[["forward_s", "overlap_sync_s", "optimize_s"]].tolist() == pytest.approx([0.1, 0.3, 0.05])
    assert row["feasible"] and row["clean"]
    assert row["provenance"] == "published"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("final", [True, False])
def test_byte_order_mark_line_ends_and_final_newline_do_not_matter(tmp_path, end, encoding, final):
    plain = read(write(tmp_path, HEADER, GOOD, "gc,2,0.4,90,200,40"))
    other = read(write(tmp_path, HEADER, GOOD, "gc,2,0.4,90,200,40", end=end, encoding=encoding, final=final))
    assert other.equals(plain)


def test_unit_of_the_phases_is_decided_row_by_row(tmp_path):
    frame = read(write(tmp_path, HEADER, "ga,11,0.5,100,300,50", "ga,2,0.5,0.1,0.3,0.05", "gc,2,0.5,0,0,0"))
    assert frame["forward_s"].tolist() == pytest.approx([0.1, 0.1, 0.0])
    assert frame["overlap_sync_s"].tolist() == pytest.approx([0.3, 0.3, 0.0])


def test_phase_unit():
    for ratio, unit in [
        (0.0, 1.0),
        (0.7, 1.0),
        (1.04, 1.0),
        (2.0, 1.0),
        (20.0, 1e-3),
        (246.0, 1e-3),
        (998.0, 1e-3),
    ]:
        assert phase_unit(ratio * 3.0, 3.0) == unit


def test_phases_that_fit_no_unit_have_none():
    for ratio in [2.1, 10.0, 19.0, 2500.0]:
        assert math.isnan(phase_unit(ratio, 1.0))


def test_zero_iteration_time_is_infeasible_and_never_a_duration(tmp_path):
    frame = read(write(tmp_path, HEADER, GOOD, "ga,8,0,0,0,0"))
    failed = frame.iloc[1]
    assert not failed["feasible"]
    assert np.isnan(failed["iter_time_s"]) and np.isnan(failed["overlap_sync_s"])


def test_failed_run_may_have_more_replicas_than_samples(tmp_path):
    lines = ("exec_plan,placement,cpu_threads,iter_time", "zero-offload+gc,8888,2,0")
    frame = read(write(tmp_path, *lines), "llama7_b16")
    assert not frame["feasible"].iloc[0]
    with pytest.raises(TraceError, match=r"row 1, column 'exec_plan'.*32 replicas"):
        read(write(tmp_path, lines[0], "zero-offload+gc,8888,2,15"), "llama7_b16")


def test_phases_are_optional_and_threads_are_read(tmp_path):
    frame = read(write(tmp_path, "exec_plan,placement,cpu_threads,iter_time", "ga,2,4,0.5", "ga,2,2,0.6"))
    assert frame["cpu_threads"].tolist() == [4, 2]
    assert frame["forward_s"].isna().all()


def test_further_columns_are_reported_and_left_out(tmp_path, caplog):
    frame = read(write(tmp_path, HEADER + ",remark", GOOD + ",nice"))
    assert "remark" not in frame.columns
    assert "remark" in caplog.text


def test_bad_cell_names_file_row_column_and_what_is_accepted(tmp_path):
    for line, column, found, accepted in [
        ("gaa,11,0.5,100,300,50", "exec_plan", "gaa", "zero-offload"),
        ("2440,11,0.5,100,300,50", "exec_plan", "2440", "three degrees"),
        ("122,11,0.5,100,300,50", "exec_plan", "122", "2 GPU"),
        ("ga,3,0.5,100,300,50", "exec_plan", "ga", "3 replicas"),
        ("ga,,0.5,100,300,50", "placement", "", "one digit per node"),
        ("ga,1x,0.5,100,300,50", "placement", "1x", "one digit per node"),
        ("ga,20,0.5,100,300,50", "placement", "20", "one digit per node"),
        ("ga,2,-0.5,100,300,50", "iter_time", "-0.5", "not negative"),
        ("ga,2,nan,100,300,50", "iter_time", "nan", "a number"),
        ("ga,2,,100,300,50", "iter_time", "", "a number"),
        ("ga,2,inf,100,300,50", "iter_time", "inf", "0 marks a run that failed"),
        ("ga,2,fast,100,300,50", "iter_time", "fast", "a number"),
        ("ga,2,0.5,-100,300,50", "forward", "-100", "not negative"),
        ("ga,2,0.5,100,NaN,50", "overlap_sync", "NaN", "a number"),
        ("ga,2,0.5,1,4,0", "forward + overlap_sync + optimize", "5.0", "s or ms"),
    ]:
        path = write(tmp_path, HEADER, GOOD, line)
        with pytest.raises(TraceError) as caught:
            read(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: row 2, column {column!r}: found ")
        assert found in message and accepted in message.split("expected", 1)[1]


def test_bad_thread_count(tmp_path):
    for threads in ["0", "-2", "1.5", "many", ""]:
        path = write(tmp_path, "exec_plan,placement,cpu_threads,iter_time", f"ga,2,{threads},0.5")
        with pytest.raises(TraceError, match=r"row 1, column 'cpu_threads'.*whole number"):
            read(path)


def test_the_same_run_twice_is_rejected_in_any_order_of_nodes(tmp_path):
    path = write(tmp_path, HEADER, "ga,13,0.5,100,300,50", GOOD, "ga,31,0.6,100,300,50")
    with pytest.raises(TraceError, match=r"row 3, column 'exec_plan'.*row 1 is the same run \(ga on 13"):
        read(path)


def test_missing_columns_are_named_with_the_accepted_ones(tmp_path):
    for header, missing in [
        ("exec_plan,placement", "iter_time"),
        ("plan,placement,iter_time", "exec_plan"),
        ("exec_plan,placement,iter_time,forward", "overlap_sync, optimize"),
    ]:
        path = write(tmp_path, header, ",".join("1" for _ in header.split(",")))
        with pytest.raises(
            TraceError, match=rf"column\(s\) {missing} missing; found: .*; expected exec_plan"
        ):
            read(path)


def test_empty_file_and_file_without_rows(tmp_path):
    path = tmp_path / "placements.csv"
    path.write_text("")
    with pytest.raises(TraceError, match=r"cannot be read as a trace"):
        read(path)
    with pytest.raises(TraceError, match=r"no rows"):
        read(write(tmp_path, HEADER))


def test_binary_file_is_one_clear_error(tmp_path):
    path = tmp_path / "placements.csv"
    path.write_bytes(b"\xff\xfe\x00\x01\x80")
    with pytest.raises(TraceError, match=r"cannot be read as a trace"):
        read(path)


def test_missing_file(tmp_path):
    with pytest.raises(MissingDataError, match=r"no such file; expected a trace"):
        read(tmp_path / "none.csv")
