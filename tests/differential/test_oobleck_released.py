"""The simulators as released, on the authors' traces, against what those simulators print."""

from pathlib import Path

import pytest

from makespan.config import load_settings
from makespan.papers.oobleck import fig9_experiment, published_traces, read_published
from makespan.papers.oobleck.simulators import Systems, simulate
from makespan.throughput import shipped_register

ROOT = Path(__file__).parents[2]
OPTIONS = load_settings([], ROOT).oobleck.simulation.systems()
CELLS = {
    name: read_published(name, ROOT / f"config/published/oobleck_{name}.csv")
    for name in ("throughput", "fig9", "fig12")
}
TOLERANCES = {"oobleck": 1e-3, "varuna": 1e-3, "bamboo": 0.07}


@pytest.fixture(scope="module")
def averages(published_dir):
    traces = published_traces(["6h", "3h", "1h", "30m", "10m"], published_dir, shipped_register())
    return fig9_experiment(traces, CELLS, OPTIONS)["fig9"]


def test_every_printed_average_of_figure_9_comes_out(averages):
    rows = averages[(averages["mode"] == "compat") & averages["published_samples_per_s"].notna()]
    assert len(rows) == 60
    off = {}
    for row in rows.to_dict("records"):
        error = abs(row["throughput_samples_per_s"] / row["published_samples_per_s"] - 1.0)
        half_a_digit = 5e-4 / row["published_samples_per_s"]
        if error > max(TOLERANCES[row["system"]], half_a_digit):
            off[row["trace"], row["model"], row["system"]] = error
    assert not off


def test_the_systems_do_not_fit_where_the_paper_says_so(averages):
    unfit = averages[~averages["feasible"]]
    assert set(unfit["system"]) == {"bamboo"}
    assert set(unfit["model"]) == {"GPT-3 Medium", "GPT-3 2.7B", "GPT-3 6.7B"}


def test_released_shares_of_bamboo_are_near_those_printed(published_dir):
    (trace,) = published_traces(["10m"], published_dir, shipped_register())["10m"].values()
    costs = Systems(CELLS["throughput"], **OPTIONS).costs("bamboo", "BERT-Large")
    found = simulate("bamboo", trace, costs).times_s
    rows = CELLS["fig12"][CELLS["fig12"]["system"] == "bamboo"].set_index("category")["published_time_s"]
    for category, value in rows.items():
        assert found[category] / sum(found.values()) == pytest.approx(value / rows.sum(), abs=0.05)
