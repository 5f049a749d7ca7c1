"""Tables are checked cell by cell and written whole or not at all."""

from pathlib import Path

import pandas as pd
import pytest

from makespan.errors import MissingDataError, TraceError
from makespan.tables import (
    SENSITIVITY,
    Column,
    TableSchema,
    atomic_path,
    read_csv,
    write_csv,
    write_text,
)

SCHEMA = TableSchema(
    "example",
    (
        Column("name", "text", "", "a name"),
        Column("gpus", "int", "1", "a count"),
        Column("time_s", "float", "s", "a time", nullable=True),
        Column("clean", "bool", "", "a flag"),
    ),
)


def example() -> pd.DataFrame:
    return pd.DataFrame({"name": ["a", "b"], "gpus": [1, 2], "time_s": [0.1, None], "clean": [True, False]})


def test_a_table_survives_the_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.csv"
    write_csv(example(), path, SCHEMA)
    pd.testing.assert_frame_equal(read_csv(path, SCHEMA), SCHEMA.validate(example(), "here"))


def test_equal_tables_give_equal_bytes_and_unix_line_ends(tmp_path: Path) -> None:
    for name in ("one.csv", "two.csv"):
        write_csv(example(), tmp_path / name, SCHEMA)
    first = (tmp_path / "one.csv").read_bytes()
    assert first == (tmp_path / "two.csv").read_bytes()
    assert b"\r" not in first


def test_columns_come_in_schema_order_with_further_ones_after() -> None:
    frame = example().assign(extra=1.0)[["extra", "clean", "time_s", "gpus", "name"]]
    assert list(SCHEMA.validate(frame, "here").columns) == [*SCHEMA.names, "extra"]


def test_a_missing_column_is_named_with_the_file() -> None:
    with pytest.raises(TraceError, match=r"rows\.csv: table 'example' lacks column\(s\) gpus"):
        SCHEMA.validate(example().drop(columns="gpus"), "rows.csv")


@pytest.mark.parametrize(
    ("column", "value", "accepted"),
    [
        ("gpus", "two", "a whole number"),
        ("gpus", 1.5, "a whole number"),
        ("gpus", None, "a whole number"),
        ("time_s", "fast", "a number in s"),
        ("clean", "maybe", "true or false"),
    ],
)
def test_a_wrong_value_is_named_with_row_and_column(column: str, value: object, accepted: str) -> None:
    frame = example().astype(object)
    frame.loc[1, column] = value
    with pytest.raises(TraceError) as caught:
        SCHEMA.validate(frame, "rows.csv")
    assert str(caught.value).startswith(f"rows.csv: row 2, column '{column}': found")
    assert accepted in str(caught.value)


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xef\xbb\xbfname,gpus,time_s,clean\r\na,1,0.5,true\r\n")
    assert read_csv(path, SCHEMA).loc[0, "time_s"] == 0.5


def test_an_empty_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text("")
    with pytest.raises(TraceError, match=r"empty\.csv: cannot be read as table 'example'"):
        read_csv(path, SCHEMA)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"none\.csv: no such file"):
        read_csv(tmp_path / "none.csv", SCHEMA)


def test_an_empty_table_keeps_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_csv(example().iloc[:0], path, SCHEMA)
    assert list(read_csv(path, SCHEMA).columns) == SCHEMA.names


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_text("old", path)
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError("disk full")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.csv"]


def test_written_files_are_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_text("text", path)
    plain = tmp_path / "plain.csv"
    plain.write_text("text")
    assert path.stat().st_mode == plain.stat().st_mode


def test_every_column_of_a_result_table_has_a_description() -> None:
    assert all(column.description for column in SENSITIVITY.columns)
