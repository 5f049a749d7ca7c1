"""Statements about measured tables, and their figures: what holds, and that it fails on other results."""

import pandas as pd
import pytest
from ledgers import findings
from legible_figures import assert_is_legible

from makespan.papers.oobleck import PAPER, figures

LEDGER = PAPER.ledger()
KINDS = ("compute", "reduction", "commit", "recovery")
MEASURED = ("Section 5", "Execution")


@pytest.fixture(scope="module")
def tables():
    """Return made-up tables of two jobs under both systems, and of predictions that rank well."""
    steps, kills, summary = [], [], []
    for run, pause in (("job 0, oobleck", 0.2), ("job 0, relaunch", 0.4), ("job 1, oobleck", 0.3)):
        for step in range(4):
            steps.append((run, step, 4.0 - step / 8, 4.0 - step / 8, 0.0, 2, 5, "", "", None))
        for number, kind in enumerate(KINDS):
            kills.append((run, number, kind, kind, number, pause / 4, pause + number / 100))
        ours = run.endswith("oobleck")
        waits = (pause, pause + 0.03, pause / 4, pause / 4)
        summary.append((run, 4, 4, 3 if ours else 9, *waits, 30 / pause, True, ours, 0 if ours else 4))
    plans = [(2, 4, n, "2", "4", 2, 0.01 * n, 0.01 * n, 0.02 * n + 0.01) for n in (1, 2, 3)]
    rows = {"hybrid": steps, "hybrid_kills": kills, "hybrid_summary": summary, "predictions": plans}
    schemas = {name: PAPER.schema_of(name) for name in rows}
    return {
        name: schemas[name].validate(pd.DataFrame(values, columns=schemas[name].names), where="a test")
        for name, values in rows.items()
    }


def verdicts(tables):
    """Return the verdicts of the statements about these tables."""
    found = findings(LEDGER, tables, "measured", MEASURED)["verdict"]
    decided = LEDGER.statements().set_index("statement")["sources"]
    return found[decided[found.index] == "measured"].to_dict()


def test_statements_hold_on_results_as_they_should_be(tables):
    found = verdicts(tables)
    assert found == dict.fromkeys(found, "holds")


OTHERWISE = {
    "have the bits of one process": ("hybrid", "abs_difference", 1e-9),
    "costs at most the running iteration": ("hybrid_summary", "repeated", 5),
    "keep their processes": ("hybrid_summary", "checkpoint_reads", 1),
    "kills strike": ("hybrid_kills", "kind", "compute"),
    "first instruction": ("hybrid_kills", "first_wall_s", 30.0),
    "goodput is higher": ("hybrid_summary", "goodput_samples_per_s", 0.1),
    "rank as planning predicts": ("predictions", "predicted_iter_time_s", 0.0),
}


@pytest.mark.parametrize("part", OTHERWISE)
def test_a_statement_fails_on_other_results(tables, part):
    name, column, value = OTHERWISE[part]
    spoiled = tables[name].copy()
    is_own = spoiled["run"].str.endswith("oobleck") if "run" in spoiled else slice(None)
    spoiled.loc[is_own, column] = -spoiled["iter_wall_s"] if name == "predictions" else value
    (found,) = (v for text, v in verdicts(tables | {name: spoiled}).items() if part in text)
    assert found == "fails"


def test_statements_without_rows_are_not_run(tables):
    found = verdicts({name: table.iloc[:0] for name, table in tables.items()})
    assert found == dict.fromkeys(found, "not run")


@pytest.mark.parametrize("draw", [figures.hybrid, figures.predictions])
def test_figures_are_legible(tables, draw):
    figure, data = draw(tables, "measured")
    assert len(data)
    assert_is_legible(figure)


def test_ticks_of_predictions_have_room_whatever_the_range(tables):
    for factor in (1.2, 3.0, 25.0, 400.0):
        times = [0.01, 0.01 * factor**0.5, 0.01 * factor]
        wide = tables["predictions"].assign(predicted_cores_iter_time_s=times, iter_wall_s=times[::-1])
        assert_is_legible(figures.predictions({"predictions": wide}, "measured")[0])
