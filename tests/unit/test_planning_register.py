"""The register of tables of published rows, the form for rows of one's own, and the record of errors."""

import hashlib
import re
import shutil

import pandas as pd
import pytest
from click.testing import CliRunner
from public_rows import write_rows

from makespan.cli import main, plan as commands
from makespan.errors import ChecksumError, MissingDataError
from makespan.planning import (
    differences,
    find_tables,
    growth,
    judge,
    judged_table,
    predictions,
    public_tables,
    read_rows,
    recorded_errors,
    recorded_text,
    register,
)
from makespan.planning.judging import ALLOWED_GROWTH


def ran(*words, **environment):
    """Run a command; return its exit status, output and error lines."""
    done = CliRunner().invoke(main, list(map(str, words)), env=environment)
    return done.exit_code, done.stdout, done.stderr


def test_every_registered_table_names_documents_a_commit_and_a_licence():
    tables = public_tables()
    assert len({one.file for one in tables}) == len(tables) == 13
    for one in tables:
        assert re.fullmatch("[0-9a-f]{64}", one.sha256)
        assert one.documents and one.licence and len(one.addresses) == len(one.documents)
        if one.repository:
            assert re.fullmatch("[0-9a-f]{40}", one.commit)
            assert all(address.startswith("https://github.com/") for address in one.addresses)


def test_every_table_of_published_rows_is_registered_and_unchanged(published_dir):
    folder = published_dir / "public-rows"
    if not folder.is_dir():
        pytest.skip("there are no public rows")
    assert sorted(find_tables(published_dir)) == sorted(folder.glob("*.csv"))
    # Rows name their commit themselves: most rows of a table have the registered one.
    for one in public_tables():
        commits = pd.read_csv(folder / one.file, dtype=str)["commit"].fillna("")
        assert commits.mode()[0] == one.commit


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Return a directory with one registered table, made by `write_rows`."""
    path = tmp_path / "published/public-rows/fms-fsdp.csv"
    path.parent.mkdir(parents=True)
    write_rows(path)
    table = register.PublicTable(
        "fms-fsdp.csv", hashlib.sha256(path.read_bytes()).hexdigest(), "a/b", "c" * 40, ("README.md",), "MIT"
    )
    monkeypatch.setattr(register, "public_tables", lambda: (table,))
    return path.parents[1]


def test_registered_tables_are_found_if_all_are_there_and_unchanged(published):
    assert [path.name for path in find_tables(published)] == ["fms-fsdp.csv"]
    path = published / "public-rows/fms-fsdp.csv"
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(
        ChecksumError, match=r"fms-fsdp\.csv: differs from the registered table.*copy it again"
    ):
        find_tables(published)
    path.unlink()
    with pytest.raises(MissingDataError, match=r"public-rows: lacks fms-fsdp\.csv; expected the 1 tables"):
        find_tables(published)
    shutil.rmtree(path.parent)
    with pytest.raises(MissingDataError, match=r"public-rows: no such folder"):
        find_tables(published)


def test_a_changed_table_is_reported_in_one_line_and_judged_all_the_same(published):
    folder = published / "public-rows"
    code, text, said = ran("validate-public", folder)
    assert (code, said) == (0, "")
    path = folder / "fms-fsdp.csv"
    path.write_bytes(path.read_bytes() + b"\n")
    assert len(differences([path, folder / "of-my-own.csv"])) == 1
    code, again, said = ran("validate-public", folder)
    assert (code, again) == (0, text)
    assert re.fullmatch(r"\S*fms-fsdp\.csv: differs from the registered table 'fms-fsdp\.csv': .*\n", said)


def test_the_form_for_rows_of_ones_own_is_read_without_an_assumption(root):
    rows, refused = read_rows([root / "examples/measured-rows.csv"])
    assert not refused
    assert [row.assumed for row in rows] == [(), ()]
    assert [row.stack.name for row in rows] == ["megatron-bridge", "torchtitan"]
    assert [row.cluster.gpu.kind for row in rows] == ["h100-80", "h100-80"]
    columns = (root / "examples/measured-rows.csv").read_text().partition("\n")[0].split(",")
    form = (root / "CONTRIBUTING.md").read_text().split("## Measured rows")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", form))
    unused = {"commit", "family", "params", "experts", "topk", "attention", "overlap"}
    assert set(columns) - named == unused


def test_rows_of_one_source_are_judged_by_what_ships(tmp_path):
    write_rows(tmp_path / "rows.csv", source="your-cluster", stack="torchtitan")
    table = judge(read_rows([tmp_path / "rows.csv"])[0])
    assert set(table["group"]) == {"your-cluster h100-80 bf16"}


def test_each_row_is_predicted_from_other_sources_as_the_protocol_does(tmp_path):
    write_rows(tmp_path / "rows.csv")
    rows, _ = read_rows([tmp_path / "rows.csv"])
    table, judged = predictions(rows), judge(rows, seeds=(1,))
    assert len(table) == len(rows)
    assert (table["low_step_s"] < table["predicted_step_s"]).all()
    assert (table["predicted_step_s"] < table["high_step_s"]).all()
    error = (table["predicted_step_s"] / table["measured_step_s"] - 1).abs().groupby(table["group"]).mean()
    drawn = judged[judged["drawn"] == 0].set_index("group")["error"]
    assert error[drawn.index].tolist() == pytest.approx(drawn.tolist())


# --- The record of errors ---


def test_errors_that_are_recorded_are_those_of_the_page(root):
    page = (root / "docs/background/planning.md").read_text()
    shown = page.split("<!-- judged -->\n")[1].split("<!-- end of judged -->")[0]
    assert shown == judged_table(recorded_errors())


def test_an_error_that_grows_is_named_and_a_smaller_one_is_not():
    known = recorded_errors()
    assert growth(known, known) == []
    better, worse = known.copy(), known.copy()
    better["error"] -= 0.01
    assert growth(better, known) == []
    worse.loc[0, "error"] += 2 * ALLOWED_GROWTH
    (line,) = growth(worse, known)
    assert line.startswith(f"{known['group'][0]}, no row: error ")
    worse["error"] = known["error"] + 2 * ALLOWED_GROWTH
    assert sum(line.startswith("mean over groups") for line in growth(worse, known)) == 5
    kept = growth(known[known["group"] != known["group"][0]], known)
    assert sum(line.endswith("is recorded, but it is not judged") for line in kept) == 5


def test_the_command_fails_if_an_error_is_larger_than_recorded(published, monkeypatch, tmp_path):
    judged = judge(read_rows(find_tables(published))[0])
    recorded = tmp_path / "judged.csv"
    for change, status in ((0.0, 0), (-0.02, 1)):
        recorded.write_text(recorded_text(judged.assign(error=judged["error"] + change)))
        monkeypatch.setattr(commands, "recorded_errors", lambda: pd.read_csv(recorded))
        written = tmp_path / "rows.csv"
        code, text, said = ran(
            "validate-public",
            "--against-record",
            "--predictions",
            written,
            MAKESPAN_PUBLISHED_DIR=str(published),
        )
        assert code == status, said
        assert "mean over groups" in text
        assert len(pd.read_csv(written)) == 12
        assert ("torchtitan h100-80 bf16, no row: error" in said) == bool(status)


def test_make_compares_with_the_record(root):
    recipe = (root / "Makefile").read_text().split("validate-public: setup")[1].split("\n\n")[0]
    assert "makespan validate-public --against-record -o results/judged.csv" in recipe
