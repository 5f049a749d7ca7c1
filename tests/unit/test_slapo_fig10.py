"""Searches of the printed grid: tables, statements, the command and the figure."""

import json
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from makespan.claims import judge
from makespan.cli import main
from makespan.config import load_settings
from makespan.papers.experiment import Given
from makespan.papers.slapo import PAPER
from makespan.papers.slapo.figures import searched_grid

pytestmark = pytest.mark.xdist_group("printed grid")

ROOT = Path(__file__).parents[2]
LEDGER = PAPER.ledger()
CELLS = ROOT / "config/published/slapo_fig10.csv"


def tuned(source, *files):
    settings = load_settings(files, ROOT)
    cells = {"fig10": PAPER.read_published("fig10", CELLS)}
    return settings.slapo.experiments(settings)["tuning"].run(Given(source, cells=cells))


@pytest.fixture(scope="module")
def tables():
    return tuned("published")


@pytest.fixture(scope="module")
def emulated():
    return tuned("emulated", ROOT / "config/test/slapo.yaml")


def test_the_printed_grid_is_whole():
    cells = PAPER.read_published("fig10", CELLS)
    assert len(cells) == 91 and cells["published_samples_per_s"].notna().sum() == 63
    assert cells.groupby("global_batch_size")["ckpt_ratio"].nunique().tolist() == [7] * 13
    best = cells.loc[cells["published_samples_per_s"].idxmax()]
    assert (best["global_batch_size"], best["ckpt_ratio"], best["published_samples_per_s"]) == (
        144,
        0.5,
        130.9,
    )


def test_the_frontier_finds_the_printed_optimum_with_seventeen_evaluations(tables):
    searches = tables["fig10_searches"].query("oracle == 'published'").set_index("strategy")
    row = searches.loc["frontier"]
    assert (row["explored"], row["explored_oom"], row["space"], row["optimum_ratio"]) == (17, 10, 91, 1.0)
    assert row["stopped"] == "finished"
    order = tables["fig10"].query("strategy == 'frontier' and oracle == 'published'")
    assert order["explored_order"].tolist() == list(range(1, 18))
    assert order["global_batch_size"].is_monotonic_decreasing and order["ckpt_ratio"].is_monotonic_decreasing


def test_every_start_of_coordinate_descent_has_a_row_and_ends_where_no_symbol_improves(tables):
    searches = tables["fig10_searches"].query("strategy == 'coordinate_descent' and oracle == 'published'")
    assert searches["seed"].tolist() == list(range(20))
    grid = PAPER.read_published("fig10", CELLS).set_index(["global_batch_size", "ckpt_ratio"])[
        "published_samples_per_s"
    ]
    for row in searches.itertuples():
        line = grid.xs(row.best_global_batch_size, level=0).max(), grid.xs(row.best_ckpt_ratio, level=1).max()
        assert max(line) == row.best_samples_per_s


def test_statements_hold_or_fail_as_they_are_marked(tables, emulated):
    for source, found in (("published", tables), ("emulated", emulated)):
        judged = judge(LEDGER, found, source, {})
        own = judged[judged["artifact"].str.endswith("Fig. 10") & (judged["verdict"] != "not run")]
        marked = (
            LEDGER.statements()
            .loc[own.index, "fails_on"]
            .map(lambda names, source=source: source in names.split())
        )
        assert ((own["verdict"] == "fails") == marked).all()
        assert len(own) >= 2


def test_statements_of_the_paper_are_not_decided_by_the_model_that_is_fitted_to_its_grid(tables):
    for name in ("fig10", "fig10_searches"):
        modelled = {**tables, name: tables[name].query("oracle == 'model'")}
        found = judge(LEDGER, modelled, "published", {}).query("artifact == 'Fig. 10'")
        assert "not run" in set(found["verdict"])
    both = {
        name: table.query("oracle == 'model'") if "oracle" in table else table
        for name, table in tables.items()
    }
    assert set(judge(LEDGER, both, "published", {}).query("artifact == 'Fig. 10'")["verdict"]) == {"not run"}


def test_a_search_that_stops_short_is_not_called_a_success(tables):
    searches = tables["fig10_searches"].copy()
    row = (searches["oracle"] == "published") & (searches["strategy"] == "frontier")
    for column, value in (("explored", 18), ("best_global_batch_size", 136)):
        wrong = searches.assign(**{column: searches[column].where(~row, value)})
        found = judge(LEDGER, {**tables, "fig10_searches": wrong}, "published", {})
        (verdict,) = found["verdict"][found["statement"].str.contains("with 17 evaluations")]
        assert verdict == "fails"


def test_the_figure_has_the_grids_and_the_points_of_the_frontier(tables):
    figure, shown = searched_grid({"fig10": tables["fig10"]}, "published")
    assert shown.groupby("oracle")["strategy"].value_counts().to_dict() == {
        (oracle, strategy): n
        for oracle in ("model", "published")
        for strategy, n in (("exhaustive", 91), ("frontier", 17))
    }
    printed, modelled, *_ = figure.axes
    assert (printed.get_title(), modelled.get_title()) == ("printed cells", "hardware model")
    assert len(printed.lines[0].get_xdata()) == 17


def run(*arguments):
    return CliRunner().invoke(main, ["slapo", "tune", "--grid", str(CELLS), *arguments])


def test_the_command_prints_every_evaluation_and_the_share_of_the_optimum():
    done = run()
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert len(lines) == 17 + 2
    assert lines[3].split() == ["4", "batch", "192", "recomputed", "0.67", "out", "of", "memory"]
    assert "130.9 samples/s, 100.0 % of the best of all" in lines[-2]
    assert lines[-1] == "17 of 91 points evaluated, 10 out of memory; finished"


def test_the_command_searches_a_polygon_and_speaks_json(tmp_path):
    polygon = "0.25,104 0.25,176 1.0,176 1.0,120 0.67,120 0.67,104"
    done = run("--polygon", polygon, "--json", "--db", str(tmp_path / "db"), "--strategy", "exhaustive")
    told = json.loads(done.output)
    assert told["space"] == len(told["history"]) == 64
    assert told["best"] == {"global_batch_size": 144, "ckpt_ratio": 0.5}
    assert len((tmp_path / "db").read_text().splitlines()) == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--polygon", "0.25;104"], "--polygon is '0.25;104'; expected corners RATIO,BATCH"),
        (["--polygon", "0,0 1,1"], "a polygon has 2 vertices; expected at least three"),
        (["--polygon", "0,0 0,1 1,1"], "the space has no points"),
    ],
)
def test_the_command_refuses_what_it_cannot_search(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output and "Traceback" not in done.output


def test_the_command_searches_the_settings_of_a_model(tables):
    """On the machine of the paper, and by the emulator."""
    for more in ([], ["--emulator"]):
        done = CliRunner().invoke(main, ["slapo", "tune", "--model", "bert:1b", "--gpus", "4", *more])
        assert done.exit_code == 0, done.output
        assert "100.0 % of the best of all" in done.output
        assert "of 512 points evaluated" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--emulator"], "--emulator needs --model"),
        (["--model", "wideresnet:2.4b", "--emulator"], "the emulator has no convolutions"),
        (["--model", "bert:2b"], "unknown size of bert '2b'; expected 1b, large"),
        (["--model", "bart"], "unknown model family 'bart'"),
    ],
)
def test_the_command_refuses_models_that_it_does_not_know(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2 and message in done.output, done.output


def test_the_command_says_where_nothing_fits(tmp_path):
    cells = pd.read_csv(CELLS).assign(published_samples_per_s=float("nan"))
    cells.to_csv(tmp_path / "full.csv", index=False)
    done = CliRunner().invoke(main, ["slapo", "tune", "--grid", str(tmp_path / "full.csv")])
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, "no point fits into memory")
