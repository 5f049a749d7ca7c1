"""Figures of what was built can be read, as drawn again from the tables behind them."""

from importlib import import_module

import pytest
from legible_figures import assert_is_legible
from matplotlib import pyplot

from makespan.config import check_settings
from makespan.papers import PAPERS, paper_named
from makespan.tables import read_csv

pytestmark = pytest.mark.claims

SETTINGS = check_settings({})
FIGURES = [
    (source, paper, name)
    for source in ("emulated", "published", "measured")
    for paper in PAPERS
    for name in paper_named(paper).figures()
]


@pytest.mark.parametrize(("source", "paper", "name"), FIGURES, ids=["/".join(one) for one in FIGURES])
def test_a_figure_that_was_built_is_legible(root, source, paper, name):
    kind, results = paper_named(paper), root / "results" / source / paper
    if not (results / "figures" / f"{name}.png").is_file():
        pytest.skip("it is not built")
    figure = kind.figures()[name]
    tables = {table: read_csv(results / f"{table}.csv", kind.schema_of(table)) for table in figure.tables}
    for cells in figure.cells:
        path = root / "config" / "published" / f"{paper}_{cells}.csv"
        tables[f"published_{cells}"] = kind.read_published(cells, path)
    module, function = figure.function(paper).split(":")
    drawn, _ = getattr(import_module(module), function)(tables, source, **figure.arguments(SETTINGS))
    assert_is_legible(drawn)
    pyplot.close("all")
