"""The cache of computed tables: hit by equal inputs alone, and never in the way."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from makespan.hardware import cluster
from makespan.tables import cached_table, table_schema
from makespan.throughput import EmulatedSource

SCHEMA = table_schema(
    "numbers",
    ("name", "text", "", "name"),
    ("count", "int", "1", "count"),
    ("value", "float", "s", "value", True),
    ("is_known", "bool", "", "whether it is known"),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MAKESPAN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def table():
    values = [0.1 + 0.2, 1e-310, np.nan, -1 / 3]
    frame = pd.DataFrame({"name": ["a", "", "nan", "b"], "count": range(4), "value": values})
    return SCHEMA.validate(frame.assign(is_known=[True, False, True, False]), where="test")


def test_a_table_is_computed_once_and_comes_back_with_the_same_bits_and_types(folder):
    calls = []

    def compute():
        calls.append(1)
        return table()

    first, again = (cached_table(SCHEMA, ("x", 1), ("makespan.units",), compute) for _ in range(2))
    assert len(calls) == 1 and len(list(folder.iterdir())) == 1
    pd.testing.assert_frame_equal(first, again, check_exact=True)
    cached_table(SCHEMA, ("x", 2), ("makespan.units",), compute)
    cached_table(SCHEMA, ("x", 1), ("makespan.errors",), compute)
    assert len(calls) == 3


def test_another_process_finds_the_table(folder):
    code = (
        "from makespan.hardware import cluster; from makespan.throughput import EmulatedSource; "
        "EmulatedSource(cluster('a800-64'), 'L1', seed=3, noise=1.0).load('roberta')"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True)
    assert len(list(folder.iterdir())) == 1


def test_a_damaged_file_is_computed_again(folder):
    cached_table(SCHEMA, 1, (), table)
    (path,) = folder.iterdir()
    for text in ("", "name,count\n", "name,count,value,is_known\na,x,1,True\n"):
        path.write_text(text)
        pd.testing.assert_frame_equal(cached_table(SCHEMA, 1, (), table), table(), check_exact=True)


def test_without_a_usable_directory_tables_are_computed(tmp_path, monkeypatch):
    monkeypatch.setenv("MAKESPAN_CACHE_DIR", "")
    assert len(cached_table(SCHEMA, 1, (), table)) == 4
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MAKESPAN_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert len(cached_table(SCHEMA, 1, (), table)) == 4


def test_an_emulated_table_from_the_cache_is_the_one_that_was_emulated(folder):
    source = EmulatedSource(cluster("a800-64"), "L1", seed=3, noise=1.0)
    first, again = (source.load("roberta") for _ in range(2))
    assert len(list(folder.iterdir())) == 1
    pd.testing.assert_frame_equal(first, again, check_exact=True)
    other = EmulatedSource(cluster("a800-64"), "L1", seed=4, noise=1.0).load("roberta")
    assert not other["iter_time_s"].equals(first["iter_time_s"])
