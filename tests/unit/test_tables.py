"""Tables are checked cell by cell and written whole or not at all."""

from pathlib import Path

import pandas as pd
import pytest

from makespan.errors import MissingDataError, TraceError
from makespan.files import atomic_path, write_text
from makespan.tables import (
    PREDICTIONS,
    REQUESTS,
    SENSITIVITY,
    THROUGHPUT,
    Column,
    TableSchema,
    read_csv,
    write_csv,
    write_result,
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


def test_a_table_that_has_its_types_is_checked_like_any_other() -> None:
    typed = SCHEMA.validate(example().assign(name=["a", None]), "here")
    assert typed["name"].tolist() == ["a", ""]
    again = SCHEMA.validate(typed, "here")
    pd.testing.assert_frame_equal(again, typed)
    again.loc[0, "gpus"] = 9
    assert typed["gpus"].tolist() == [1, 2]  # a copy all the same
    strict = TableSchema("strict", (Column("time_s", "float", "s", "a time"),))
    with pytest.raises(TraceError, match="row 2, column 'time_s': found nan; expected a number in s"):
        strict.validate(typed[["time_s"]], "here")
    missing = pd.DataFrame({"name": pd.Series(["a", None], dtype="str")})
    text = TableSchema("text", (Column("name", "text", "", "a name"),))
    assert text.validate(missing, "here")["name"].tolist() == ["a", ""]


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


# --- results ------------------------------------------------------------------------------------


def test_a_result_has_the_bytes_of_any_table_and_a_seal_beside_it(tmp_path: Path) -> None:
    write_csv(example(), tmp_path / "plain.csv", SCHEMA)
    write_result(example(), tmp_path / "result.csv", SCHEMA)
    assert (tmp_path / "plain.csv").read_bytes() == (tmp_path / "result.csv").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".result.csv.sum", "plain.csv", "result.csv"]
    pd.testing.assert_frame_equal(read_csv(tmp_path / "result.csv", SCHEMA), SCHEMA.validate(example(), "x"))


@pytest.mark.parametrize(
    ("before", "after", "rows"),
    [(b"b,2,,False\n", b"", 1), (b"False\n", b"Fal", 1), (b"a,1", b"a,3", 2), (b"name", b"names", 2)],
)
def test_a_result_that_was_cut_or_changed_is_refused(
    before: bytes, after: bytes, rows: int, tmp_path: Path
) -> None:
    path = tmp_path / "result.csv"
    write_result(example(), path, SCHEMA)
    path.write_bytes(path.read_bytes().replace(before, after))
    with pytest.raises(
        TraceError, match=rf"result\.csv: found {rows} rows, sha256 \w{{12}}; it was written with 2"
    ):
        read_csv(path, SCHEMA)
    write_result(example(), path, SCHEMA)
    assert len(read_csv(path, SCHEMA)) == 2


def test_a_table_without_a_seal_is_anybodys_own(tmp_path: Path) -> None:
    path = tmp_path / "result.csv"
    write_result(example(), path, SCHEMA)
    path.write_text("name,gpus,time_s,clean\nmine,1,,true\n")
    (tmp_path / ".result.csv.sum").unlink()
    assert read_csv(path, SCHEMA)["name"].tolist() == ["mine"]


def row_of(schema: TableSchema) -> dict[str, object]:
    return {one.name: {"text": "", "bool": True}.get(one.kind, 1) for one in schema.columns}


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("feasible", [True, False])
def test_a_run_that_took_no_time_is_refused_with_its_row(
    value: float, feasible: bool, tmp_path: Path
) -> None:
    good = row_of(THROUGHPUT)
    frame = pd.DataFrame([good, good | {"iter_time_s": value, "feasible": feasible}])
    path = tmp_path / "bert.csv"
    write_csv(frame, path)
    if not feasible:
        assert len(read_csv(path, THROUGHPUT)) == 2
        return
    with pytest.raises(TraceError) as caught:
        read_csv(path, THROUGHPUT)
    assert str(caught.value) == (
        f"{path}: row 2, column 'iter_time_s': found {value}; expected a positive time where feasible is true"
    )


def test_a_prediction_is_a_positive_time() -> None:
    frame = pd.DataFrame([row_of(PREDICTIONS) | {"predicted_iter_time_s": 0.0}])
    with pytest.raises(TraceError, match=r"row 1, column 'predicted_iter_time_s': found 0\.0"):
        PREDICTIONS.validate(frame, "here")


def test_a_column_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(",".join([*REQUESTS.names, " status"]) + "\na,0,1,8,10,v,ok,failed\n")
    with pytest.raises(TraceError, match="column\\(s\\) status occur twice; expected each name once"):
        read_csv(path, REQUESTS)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a,0,1,8,10,v,ok,7\n", "row 1, column 'number 8': found '7'; expected 7 cells a row, not 8"),
        ("a,0,1,8,10,v,ok\n\nb,0,1,8,10,v,ok,7\n", "row 2, column 'number 8': found '7'"),
        ("a,0,1,8,10,v\n", "row 1, column 'status': found 'nothing'; expected 7 cells a row, not 6"),
    ],
)
def test_rows_of_another_length_are_named(tmp_path, rows, message):
    path = tmp_path / "requests.csv"
    path.write_text(",".join(REQUESTS.names) + "\n" + rows)
    with pytest.raises(TraceError) as caught:
        read_csv(path, REQUESTS)
    assert str(caught.value).startswith(f"{path}: {message}")
