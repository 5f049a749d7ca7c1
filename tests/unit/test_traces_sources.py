"""The three throughput sources give one table and fail in one way."""

import hashlib

import numpy as np
import pandas as pd
import pytest

from makespan.errors import ChecksumError, MissingDataError, TraceError, UnknownNameError
from makespan.hardware import cluster
from makespan.tables import THROUGHPUT, write_csv
from makespan.throughput import (
    SOURCE_NAMES,
    Dataset,
    EmulatedSource,
    MeasuredSource,
    PublishedSource,
)
from makespan.throughput.sources import read_throughput

TRACE = "exec_plan,placement,iter_time\nga,2,0.5\nga,4,0.3\n"


def lay_out(root, layout, folder="bert", text=TRACE):
    target = root / layout / folder / "placements.csv"
    target.parent.mkdir(parents=True)
    target.write_text(text)
    return target


@pytest.mark.parametrize("layout", ["morphling/throughput", "throughput", "simulator/traces"])
@pytest.mark.parametrize(("folder", "key"), [("bert", "bert"), ("llama7b_bsz16", "llama7_b16")])
def test_published_directory_is_read_in_every_layout(tmp_path, layout, folder, key):
    lay_out(tmp_path, layout, folder)
    source = PublishedSource(tmp_path, default_cpu_threads=8)
    assert source.name in SOURCE_NAMES
    assert source.workload_keys() == (key,)
    frame = source.load(key)
    assert set(frame["workload"]) == {key}
    assert set(frame["provenance"]) == {"published"}
    assert frame["iter_time_s"].tolist() == [0.5, 0.3]


def test_published_directory_without_traces_says_what_is_accepted(tmp_path):
    with pytest.raises(MissingDataError, match=r"simulator/traces/<model>.*MAKESPAN_PUBLISHED_DIR"):
        PublishedSource(tmp_path, default_cpu_threads=8).workload_keys()


def test_model_that_the_directory_lacks(tmp_path):
    lay_out(tmp_path, "throughput")
    source = PublishedSource(tmp_path, default_cpu_threads=8)
    with pytest.raises(MissingDataError, match=r"no published trace of 'vit'; it has: bert"):
        source.load("vit")
    with pytest.raises(UnknownNameError, match=r"expected .*roberta"):
        source.load("resnet")


def test_folder_of_an_unknown_model_is_left_out_and_reported(tmp_path, caplog):
    lay_out(tmp_path, "throughput")
    lay_out(tmp_path, "throughput", "resnet")
    assert PublishedSource(tmp_path, default_cpu_threads=8).workload_keys() == ("bert",)
    assert "resnet" in caplog.text


def test_registered_checksum_is_enforced(tmp_path):
    path = lay_out(tmp_path, "simulator/traces")
    entry = Dataset(
        name="bert",
        path="morphling/throughput/bert/placements.csv",
        version="1",
        licence="Apache-2.0",
        size_bytes=len(TRACE),
        sha256=hashlib.sha256(TRACE.encode()).hexdigest(),
        repository="a/b",
        commit="c",
        upstream_path="simulator/traces/bert/placements.csv",
        url="",
        note="",
    )
    source = PublishedSource(tmp_path, default_cpu_threads=8, register=(entry,))
    assert len(source.load("bert")) == 2
    path.write_text(TRACE.replace("0.5", "0.4"))
    with pytest.raises(ChecksumError, match=r"'bert'"):
        source.load("bert")


def test_all_published_files_are_readable(published_dir):
    source = PublishedSource(published_dir, default_cpu_threads=8)
    frames = [source.load(key) for key in source.workload_keys()]
    assert len(frames) == 9
    rows = pd.concat(frames)
    assert len(rows) == 539
    assert int((~rows["feasible"]).sum()) == 4
    phases = rows[["forward_s", "overlap_sync_s", "optimize_s"]].sum(axis=1, min_count=3)
    ratio = (phases / rows["iter_time_s"]).dropna()
    assert ratio.between(0.2, 1.1).all()


def test_emulated_source_gives_the_canonical_table():
    source = EmulatedSource(cluster("a800-64"), calibration="L1", seed=7, noise=1.0)
    assert source.name == "emulated"
    assert "roberta" in source.workload_keys()
    frame = source.load("roberta")
    assert list(frame.columns)[: len(THROUGHPUT.names)] == THROUGHPUT.names
    assert (frame["clean"] == frame["feasible"]).all()
    assert ((frame["flag"] == "") == frame["clean"]).all()
    assert source.load("roberta").equals(frame)


def measured_frame(**changes):
    row = {
        "workload": "bert",
        "exec_plan": "ga",
        "placement": "2",
        "cpu_threads": 8,
        "global_batch_size": 32,
        "iter_time_s": 0.5,
        "forward_s": 0.1,
        "overlap_sync_s": 0.3,
        "optimize_s": np.nan,
        "feasible": True,
        "clean": True,
        "flag": "",
        "provenance": "measured",
    }
    return pd.DataFrame([row | {"placement": "4"}, row | changes])


def test_measured_directory_is_read(tmp_path):
    write_csv(measured_frame(), tmp_path / "bert.csv", THROUGHPUT)
    source = MeasuredSource(tmp_path)
    assert (source.name, source.workload_keys()) == ("measured", ("bert",))
    assert source.load("bert-large").equals(THROUGHPUT.validate(measured_frame(), "test"))


def test_measured_directory_without_files_says_what_to_do(tmp_path):
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(MissingDataError, match=r"<workload>.csv.*measure them first"):
            MeasuredSource(directory).workload_keys()
    write_csv(measured_frame(), tmp_path / "bert.csv", THROUGHPUT)
    with pytest.raises(MissingDataError, match=r"no measured trace vit.csv; it has: bert"):
        MeasuredSource(tmp_path).load("vit")


def test_measured_table_with_a_bad_cell(tmp_path):
    for changes, column, accepted in [
        ({"workload": "vit"}, "workload", "one workload per file"),
        ({"exec_plan": "best"}, "exec_plan", "zero-offload"),
        ({"provenance": "mine"}, "provenance", "emulated, published, measured, interpolated"),
        ({"placement": "a"}, "placement", "one digit per node"),
        ({"placement": "4"}, "exec_plan", "row 1 is the same run"),
        ({"global_batch_size": 16}, "global_batch_size", "32"),
        ({"cpu_threads": 0}, "cpu_threads", "at least 1"),
        ({"iter_time_s": 0.0}, "iter_time_s", "a positive time"),
        ({"iter_time_s": np.nan}, "iter_time_s", "a positive time"),
        ({"feasible": False}, "iter_time_s", "no value where feasible is false"),
        ({"forward_s": -0.1}, "forward_s", "not negative"),
    ]:
        path = tmp_path / "bert.csv"
        write_csv(measured_frame(**changes), path)
        with pytest.raises(TraceError) as caught:
            read_throughput(path)
        message = str(caught.value)
        assert str(path) in message and repr(column) in message and accepted in message
