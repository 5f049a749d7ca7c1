"""The planner off the testbed, in the report: rows and errors, and what is shown without the rows."""

import logging
from pathlib import Path

import pytest
from legible_figures import assert_is_legible
from matplotlib import pyplot
from public_rows import write_rows

from makespan.errors import MissingDataError
from makespan.papers.experiment import Given, with_counts
from makespan.papers.morphling import public_rows
from makespan.papers.morphling.public_rows import PublicRows, draw
from makespan.planning import recorded_errors


def ran(directory):
    return PublicRows().run(Given("published", published=(Path(directory), Path("datasets.csv"))))


def test_every_row_and_every_recorded_error_is_drawn(tmp_path, monkeypatch):
    write_rows(tmp_path / "rows.csv")
    monkeypatch.setattr(public_rows, "find_tables", lambda _: [tmp_path / "rows.csv"])
    tables = ran(tmp_path)
    rows, errors = tables["public_rows"], tables["public_errors"]
    assert set(rows["source"]) == {"torchtitan", "fms-fsdp"} and len(rows) == 12
    assert len(errors) == len(recorded_errors())
    figure, behind = draw(tables, "published")
    assert behind is rows
    scatter, bars = figure.axes
    drawn = {line.get_label(): len(line.get_xdata()) for line in scatter.lines}
    assert drawn["torchtitan"] == drawn["fms-fsdp"] == 6
    assert len(bars.patches) == (errors["drawn"] == 3).sum()
    assert_is_legible(figure)
    pyplot.close("all")
    (one,) = PublicRows.figures
    assert "(12 rows)" in with_counts(one.caption, tables)


def test_without_the_rows_the_reason_is_logged_and_drawn(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        tables = ran(tmp_path)
    assert "published rows are left out" in caplog.text and "public-rows: no such folder" in caplog.text
    assert tables["public_rows"].empty and len(tables["public_errors"])
    figure, behind = draw(tables, "published")
    assert len(behind) == (tables["public_errors"]["drawn"] == 3).sum()
    assert "no published rows" in figure.axes[0].texts[0].get_text()
    assert_is_legible(figure)
    pyplot.close("all")
    with pytest.raises(MissingDataError, match="no directory with published rows"):
        PublicRows().run(Given("published"))
