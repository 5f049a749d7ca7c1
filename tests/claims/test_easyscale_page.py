"""The numbers on the page of EasyScale are those of the tables, where these are built."""

import pandas as pd
import pytest

from makespan.config import load_settings
from makespan.papers.easyscale import PAPER
from makespan.tables import read_csv

pytestmark = pytest.mark.claims


@pytest.fixture
def built(root):
    """Return a function that reads a table of the default run."""

    def read(name, source="measured"):
        path = root / f"results/{source}/easyscale/{name}.csv"
        if not path.is_file():
            pytest.skip(f"{path.relative_to(root)} is not built")
        return read_csv(path, PAPER.schema_of(name))

    return read


@pytest.fixture
def protocol(root):
    return load_settings([], root).easyscale


def skip_unless(is_default):
    if not is_default:
        pytest.skip("the tables were built with another protocol than the default one")


@pytest.fixture
def table(root):
    """Return a function that finds the rows of the table under a heading, by their first cell."""
    page = (root / "docs/papers/easyscale.md").read_text()

    def rows(heading):
        section = page.partition(f"## {heading}")[2].partition("\n## ")[0]
        lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
        return {name.strip().strip("`"): [cell.strip() for cell in cells] for name, *cells in lines[2:]}

    return rows


@pytest.mark.parametrize(("column", "source"), [(0, "published"), (1, "emulated")])
def test_the_page_has_what_training_adds_to_serving(built, table, column, source):
    serving = built("serving", source).set_index("policy")
    shown = table("Training beside")
    needed = serving["serving_ratio"].iloc[0]
    assert shown["GPUs needed by serving"][column] == f"{needed:.1%}".replace("%", " %")
    for policy, row in serving.iterrows():
        cell = shown[f"with training under `{policy}"][column]
        assert cell == f"{100 * row['shared_ratio']:.1f} % (+{row['gain_pct']:.0f} %)"


@pytest.mark.parametrize(("column", "source"), [(0, "published"), (1, "emulated")])
def test_the_page_says_how_often_training_made_way_for_serving(built, table, column, source):
    serving = built("serving", source).set_index("policy")
    assert not serving[["delayed_rounds", "interruptions"]].to_numpy().any()
    shown = table("Training beside")
    for policy, row in serving.iterrows():
        assert int(shown[f"jobs scaled in under `{policy}"][column]) == row["shrinks"]
        assert int(shown[f"jobs suspended under `{policy}"][column]) == row["suspensions"]


def test_the_page_has_the_differences_of_fig9(built, table, protocol):
    """Where losses are the same, exactly; how large a difference is depends on the processor."""
    summary = built("fig9_summary").set_index(["model", "setting", "stage"]).sort_index()
    skip_unless((summary["steps"] == protocol.fig9.steps_per_stage).all())
    for level, cells in table("Fig. 9").items():
        for model, (shown, printed) in {"resnet50": cells[:2], "vgg19": cells[2:]}.items():
            own = summary.loc[(model, level)]
            told = [float(number) for number in shown.split(", ")]
            assert [number == 0 for number in told] == (own["max_abs_diff"] == 0).tolist(), (model, level)
            assert max(told) < 1e-2 and own["published_max_abs_diff"].max() == float(printed)


def test_the_page_has_the_accuracies_and_their_spreads(built, table, protocol):
    """Roundings of another processor may move an accuracy by a few points, and never EasyScale's spread."""
    gap, spreads = built("gap"), built("gap_spread").set_index(["scheme", "class"])
    skip_unless((gap["samples"].max(), gap["seed"].nunique()) == (protocol.gap.held_out_samples, 3))
    whole = gap[gap["class"] == "all"].groupby(["scheme", "devices"])["accuracy_pct"].mean()
    for scheme, cells in table("Accuracy of other").items():
        assert [float(cell) for cell in cells[:3]] == pytest.approx(whole[scheme].tolist(), abs=5.0)
        for name, (spread, over_seeds, printed) in {"all": cells[3:6], "worst": cells[6:9]}.items():
            own = spreads.loc[(scheme, name)]
            assert float(spread) == pytest.approx(own["spread_pct"], abs=15.0 if own["spread_pct"] else 0.0)
            assert float(over_seeds) == pytest.approx(own["seed_spread_pct"], abs=15.0)
            assert printed == (
                "" if pd.isna(own["published_spread_pct"]) else f"{own['published_spread_pct']:g}"
            )
