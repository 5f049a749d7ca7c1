"""The ledger on what was built: complete, and statements hold or fail as they are marked."""

import pandas as pd
import pytest
from missed_goals import MISSED

from makespan.claims import measured_targets, read_targets
from makespan.papers import PAPERS, paper_named
from makespan.tables import JOINED_CLAIMS, read_csv

pytestmark = pytest.mark.claims

# What is measured here depends on the machine and on whatever else it does.
SAME_EVERYWHERE = ("emulated", "published")


ledgers = pytest.mark.parametrize("ledger", [paper_named(name).ledger() for name in PAPERS], ids=PAPERS)


@pytest.fixture
def joined(root):
    path = root / "results" / "claims.csv"
    if not path.is_file():
        pytest.skip("results/claims.csv is not built")
    return read_csv(path, JOINED_CLAIMS)


@ledgers
def test_every_statement_is_in_the_ledger_and_says_why_it_is_not_judged(joined, ledger):
    statements = ledger.statements()
    own = joined[joined["paper"] == ledger.paper]
    columns = ["artifact", "statement", "published", "tolerance"]
    pd.testing.assert_frame_equal(own[columns].reset_index(drop=True), statements[columns], check_dtype=False)
    assert (own["note"][own["verdict"] == "not run"] != "").all()


@ledgers
def test_statements_hold_or_fail_as_they_are_marked(joined, ledger):
    built = [name for name in SAME_EVERYWHERE if f"verdict_{name}" in joined.columns]
    statements = ledger.statements()
    marked = statements["fails_on"].str.split()
    for source in built:
        verdicts = joined.loc[joined["paper"] == ledger.paper, f"verdict_{source}"].reset_index(drop=True)
        # Marks are those of the full configuration; the default one makes fewer comparisons.
        expected = marked.map(lambda names, source=source: source in names)
        is_decided = ~verdicts.isin(["not run", "undecided"])
        wrong = statements["statement"].to_numpy()[is_decided & ((verdicts == "fails") != expected)]
        assert not wrong.size, (source, list(wrong))


def test_goals_are_met_by_what_was_built_but_for_what_is_said(root):
    goals = [goal for goal in read_targets(root / "benchmarks" / "targets.csv") if goal.kind != "live"]
    found = measured_targets(goals, root / "results")
    if (found["state"] == "not built").all():
        pytest.skip("no table that a goal is about is built")
    built = found[found["state"] != "not built"]
    assert set(built["name"][built["state"] == "missed"]) == MISSED & set(built["name"])
