"""The ledger of any paper: statements that are read and refused, verdicts of a source and over all, goals."""

import shutil
import sys
from string import Formatter

import pandas as pd
import pytest

from makespan.claims import Finding, Ledger, join_claims, judge, measured_targets, read_targets
from makespan.errors import MissingDataError, TraceError, UnknownNameError
from makespan.papers import PAPERS, paper_named
from makespan.tables import CLAIMS, JOINED_CLAIMS, Column, TableSchema, read_csv, write_csv

HEADER = (
    "artifact,statement,published,tolerance,table,rows,pivot,value,operator,limit,shown,"
    "check,subject,sources,fails_on,note\n"
)
ROWS = """\
Table 1,it is small,3,at most 4,,,,,,4,,at_most,size,,,
Table 1,it is green,yes,yes,,,,,,1,,at_most,shade,published,,"a colour; not a shape"
Table 2,it is old,yes,yes,,,,,,,,,,,,needs the year that nobody wrote down
"""
SIZES = TableSchema("sizes", (Column("name", "text", "", "what"), Column("value", "float", "1", "how much")))


def at_most(tables, claim):
    rows = tables["sizes"].set_index("name")["value"]
    if claim.subject not in rows.index:
        return None
    value = rows[claim.subject]
    return Finding(f"{value:g} {claim.options['unit']}", value <= claim.limit, f"{len(rows)} things")


@pytest.fixture
def paper(tmp_path, monkeypatch):
    """Return a function that makes a ledger of a paper that was not there before."""
    numbers = iter(range(100))

    def make(rows=ROWS, header=HEADER):
        name = f"paper_of_a_test_{next(numbers)}"
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "claims.csv").write_text(header + rows)
        return Ledger("Toy", name, {"at_most": at_most}, {"sizes": SIZES, "colours": SIZES})

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for name in [name for name in sys.modules if name.startswith("paper_of_a_test")]:
        del sys.modules[name]
    shutil.rmtree(tmp_path)


def sizes(**values):
    return {"sizes": pd.DataFrame({"name": list(values), "value": list(values.values())})}


def test_a_source_judges_what_its_tables_decide(paper):
    found = judge(paper(), sizes(size=3.0), "emulated", {"unit": "m"})
    assert list(found.columns) == CLAIMS.names
    assert found["verdict"].tolist() == ["holds", "not run", "not run"]
    assert found["reproduced"].tolist() == ["3 m", "", ""]
    assert found["note"].tolist() == [
        "1 things",
        "a colour; not a shape; applies to source published",
        "needs the year that nobody wrote down",
    ]
    other = judge(paper(), sizes(shade=2.0), "published", {"unit": "m"})
    assert other["verdict"].tolist() == ["not run", "fails", "not run"]
    assert other["note"][0] == "the results have no row that decides it"
    assert judge(paper(), {}, "published", {})["note"][0] == "no table sizes of the paper's models"


def test_a_note_says_where_iteration_times_are_not_those_of_the_source(paper):
    shown, tables, options = "emulated, given as measured", sizes(size=3.0), {"unit": "m"}
    found = judge(paper(), tables, "measured", options, shown=shown)
    assert found["note"][0] == "1 things; iteration times: emulated, given as measured"
    assert not found["note"][1:].str.contains("given").any()  # nothing decides these
    for more in ({"shown": "measured"}, {"shown": shown, "untimed": {"sizes"}}):
        assert judge(paper(), tables, "measured", options, **more)["note"][0] == "1 things"


def test_a_check_that_asks_for_a_table_of_no_paper_is_an_error(paper):
    def misspelt(tables, claim):
        return tables["size"]

    ledger = paper()
    with pytest.raises(KeyError, match="size"):
        judge(Ledger("Toy", ledger.package, {"at_most": misspelt}, ledger.tables), {}, "emulated", {})


def compared(paper, values, operator="<=", limit="4", shown="{@value}", rows="", pivot="", **tables):
    """Return verdict, value and note of a statement that is a comparison of the table of sizes."""
    row = f"Table 1,it is so,,,sizes,{rows},{pivot},{values},{operator},{limit},{shown},,,,,\n"
    found = judge(paper(row), tables or sizes(a=1.5, b=3.0, c=4.5), "emulated", {})
    return tuple(found.loc[0, ["verdict", "reproduced", "note"]])


def test_a_comparison_is_judged_on_the_rows_that_count(paper):
    assert compared(paper, "value.max()", shown="{@value:.1f} m")[:2] == ("fails", "4.5 m")
    assert compared(paper, "value", rows="name != 'c'", shown="{value:.2f}")[:2] == ("holds", "1.50 3.00")
    share = "{@holds.sum()} of {@holds.size}, mean {100 * value.mean():.0f} %"
    assert compared(paper, "value", shown='"' + share + '"')[:2] == ("fails", "2 of 3, mean 300 %")
    assert compared(paper, "value > 1", "", "")[0] == "holds"
    assert compared(paper, "(value > 2).mean()", ">", "0.7")[0] == "fails"


def test_a_pivot_puts_rows_beside_each_other(paper):
    ratio = {"pivot": "/ name / value", "shown": "{b / a:.2f} and {@value:.2f}"}
    assert compared(paper, "c / a", ">=", "3", **ratio)[:2] == ("holds", "2.00 and 3.00")
    verdict, _, note = compared(paper, "d / a", ">=", "3", **ratio)
    assert (verdict, note) == ("not run", "the results have no row that decides it")
    twice = {"sizes": pd.concat([sizes(a=1.0, b=2.0)["sizes"], sizes(a=3.0, b=8.0)["sizes"]])}
    assert compared(paper, "b / a", ">=", "3", **ratio | {"shown": "{@value}"}, **twice)[1] == "2.5"


def test_a_missing_number_keeps_no_limit_and_no_numbers_decide_nothing(paper):
    gap = sizes(a=1.0, b=float("nan"))
    assert compared(paper, "value", **gap)[0] == "fails"
    assert compared(paper, "value", rows="value.notna()", **gap)[0] == "holds"
    assert compared(paper, "value.max()", rows="name == 'b'", **gap)[0] == "not run"
    assert compared(paper, "value", rows="name == 'd'", **gap)[0] == "not run"
    assert compared(paper, "value[value > 5]", shown="{value.max()}")[0] == "not run"
    assert compared(paper, "value", colours=gap["sizes"])[2] == "no table sizes of the paper's models"


def test_an_expression_that_names_no_column_is_refused(paper):
    for values, rows in (("width", ""), ("value", "width > 1")):
        with pytest.raises(TraceError, match=r"table sizes, comparison .*'width' is not defined"):
            compared(paper, values, rows=rows)
    with pytest.raises(TraceError, match=r"table sizes, shown as '\{width\}': name 'width' is not defined"):
        compared(paper, "value", shown="{width}")


@pytest.mark.parametrize("name", PAPERS)
def test_expressions_of_a_paper_name_columns_that_there_are(name):
    ledger = paper_named(name).ledger()
    statements = ledger.statements()
    for row in statements[statements["value"] != ""].to_dict("records"):
        columns = ledger.tables[row["table"]].columns
        samples = {"text": "x", "bool": True, "int": 1, "float": 1.0}
        frame = pd.DataFrame({one.name: [samples[one.kind]] for one in columns})
        assert set(row["pivot"].replace("/", " ").split()) <= set(frame)
        if row["rows"]:
            frame.eval(row["rows"], engine="python")
        if not row["pivot"]:
            value = frame.eval(row["value"], engine="python")
            fields = [field for _, field, _, _ in Formatter().parse(row["shown"]) if field]
            given = {"value": pd.Series(value), "holds": pd.Series([True])}
            assert fields and all(
                frame.eval(one, engine="python", local_dict=given) is not None for one in fields
            )


def test_malformed_statements_are_refused(paper):
    good = "Table 1,it is small,3,at most 4,,,,,,4,,at_most,size,,,\n"
    compares = "Table 1,it is small,,,sizes,,,value,<=,4,{@value},,,,,\n"
    for rows, error, message in (
        (good.replace("at_most", "guess"), UnknownNameError, "check 'guess'; expected at_most"),
        (good + good, TraceError, "'it is small' occurs twice"),
        (good.replace("at_most", ""), TraceError, "'it is small' has neither check nor value"),
        (good.replace(",4,,at", ",four,,at"), TraceError, "'it is small': limit 'four'; expected a number"),
        (compares.replace(",,,,,", ",at_most,,,,"), TraceError, "has a check and a value"),
        (compares.replace("sizes", "widths"), UnknownNameError, "table 'widths'; expected colours, sizes"),
        (compares.replace("<=", "=<"), TraceError, "operator '=<'; expected <, <=, ==, >, >="),
        (compares.replace("<=,4", "<=,"), TraceError, "expected both an operator and a limit, or neither"),
        (compares.replace("{@value}", ""), TraceError, "has a value and no text that shows it"),
        (compares.replace(",,,value", ",,name / value,value"), TraceError, "expected index / columns / val"),
    ):
        with pytest.raises(error, match=message):
            paper(rows).statements()
    with pytest.raises(TraceError, match=r"lacks column\(s\) fails_on; required: artifact"):
        paper(header=HEADER.replace("fails_on", "fails")).statements()


def test_a_statement_is_judged_over_all_sources(paper, tmp_path):
    ledger = paper()
    emulated = judge(ledger, sizes(size=3.0), "emulated", {"unit": "m"})
    published = judge(ledger, sizes(size=5.0, shade=0.5), "published", {"unit": "m"})
    absent = judge(ledger, {}, "measured", {})
    joined = join_claims({"emulated": [emulated], "published": [published], "measured": [absent]})
    assert list(joined.columns) == [
        *JOINED_CLAIMS.names,
        *("reproduced_emulated", "verdict_emulated", "reproduced_published", "verdict_published"),
        *("reproduced_measured", "verdict_measured"),
    ]
    # One source that fails is enough; a source that decides nothing has no say.
    assert joined["verdict"].tolist() == ["fails", "holds", "not run"]
    assert joined["verdict_measured"].tolist() == ["not run"] * 3
    assert joined["reproduced_published"].tolist() == ["5 m", "0.5 m", ""]
    assert joined["note"].tolist() == [
        "emulated: 1 things; published: 2 things",
        "a colour; not a shape; 2 things",
        "needs the year that nobody wrote down",
    ]
    write_csv(joined, tmp_path / "claims.csv", JOINED_CLAIMS)
    assert read_csv(tmp_path / "claims.csv", JOINED_CLAIMS).to_csv() == joined.to_csv()


def test_a_statement_that_no_built_source_decides_gives_the_reason(paper):
    emulated = judge(paper(), sizes(size=3.0), "emulated", {"unit": "m"})
    joined = join_claims({"emulated": [emulated]})
    assert joined["verdict"].tolist() == ["holds", "not run", "not run"]
    assert joined["note"][1] == "a colour; not a shape; applies to source published"


def test_results_that_cannot_tell_leave_a_statement_undecided_where_no_source_decides_it(paper):
    def cannot_tell(tables, claim):
        found = at_most(tables, claim)
        return found and Finding(found.reproduced, None, "the spread is too large")

    sure = paper()
    unsure = Ledger(sure.paper, sure.package, {"at_most": cannot_tell}, sure.tables)
    measured = judge(unsure, sizes(size=3.0), "measured", {"unit": "m"})
    assert measured["verdict"].tolist() == ["undecided", "not run", "not run"]
    assert measured["note"][0] == "the spread is too large"
    absent = judge(sure, {}, "published", {})
    joined = join_claims({"published": [absent], "measured": [measured]})
    assert joined["verdict"].tolist() == ["undecided", "not run", "not run"]
    assert joined["note"][0] == "the spread is too large"
    emulated = judge(sure, sizes(size=5.0), "emulated", {"unit": "m"})
    joined = join_claims({"emulated": [emulated], "measured": [measured]})
    assert joined["verdict"][0] == "fails" and joined["note"][0] == "1 things"


def test_papers_that_one_source_alone_builds_stand_in_the_joined_ledger(paper):
    first = judge(paper(), sizes(size=3.0), "emulated", {"unit": "m"})
    second = first.assign(paper="Other")
    joined = join_claims({"emulated": [first, second], "measured": [first]})
    assert joined["paper"].tolist() == ["Toy"] * 3 + ["Other"] * 3
    assert joined.loc[3, ["verdict", "verdict_emulated", "verdict_measured"]].tolist() == [
        *("holds", "holds", "not run"),
    ]


TARGETS = """\
name,table,rows,value,operator,limit,unit,kind
size of a,emulated/toy/sizes,name == "a" and run == 1,value,<=,2,m,small
b over a,emulated/toy/sizes,run == 1,value.iloc[1] / value.iloc[0],>=,3,x,lead
all,emulated/toy/sizes,,value.abs().mean(),<=,2,m,small
absent,emulated/toy/colours,,value.abs().mean(),<=,2,m,small
"""


def test_goals_are_compared_with_what_was_built(tmp_path):
    (tmp_path / "targets.csv").write_text(TARGETS)
    folder = tmp_path / "results/emulated/toy"
    folder.mkdir(parents=True)
    (folder / "sizes.csv").write_text("name,run,value\na,1,1.5\nb,1,-3\na,2,4\n")
    found = measured_targets(read_targets(tmp_path / "targets.csv"), tmp_path / "results")
    assert found["value"].tolist()[:3] == [1.5, -2.0, pytest.approx(8.5 / 3)]
    assert found["state"].tolist() == ["met", "missed", "missed", "not built"]
    assert found["goal"].tolist()[:2] == ["<= 2 m", ">= 3 x"]


def test_goals_that_cannot_be_measured_are_refused(tmp_path):
    path = tmp_path / "targets.csv"
    with pytest.raises(MissingDataError, match="expected a list of targets"):
        read_targets(path)
    for old, new, error, message in (
        ("<=,2,m", "=<,2,m", UnknownNameError, "comparison 'value': operator '=<'"),
        ("<=,2,m", "<=,two,m", TraceError, "limit 'two'; expected a number"),
        ("kind", "sort", TraceError, "found columns name, table.*expected name"),
    ):
        path.write_text(TARGETS.replace(old, new, 1))
        with pytest.raises(error, match=message):
            read_targets(path)
    path.write_text(TARGETS)
    goal = read_targets(path)[0]
    for rows in ([("b", 1, 1.0)], [("a", 1, 1.0), ("a", 1, 2.0)]):
        with pytest.raises(TraceError, match=r"'size of a': table emulated/toy/sizes has [02] values"):
            goal.value(pd.DataFrame(rows, columns=["name", "run", "value"]))
    with pytest.raises(TraceError, match=r"table emulated/toy/sizes, comparison 'value': name 'run' is not"):
        goal.value(pd.DataFrame({"name": ["a"], "value": [1.0]}))
