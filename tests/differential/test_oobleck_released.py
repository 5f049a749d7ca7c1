"""The simulators as released, on the authors' traces, against what those simulators print."""

from pathlib import Path

import pytest

from makespan.claims import judge
from makespan.oobleck.simulator import Systems, simulate
from makespan.papers.oobleck import PAPER
from makespan.papers.oobleck.simulation import Simulation, failure_tables, published_traces, spot_tables
from makespan.throughput import shipped_register

pytestmark = pytest.mark.xdist_group("released traces")

ROOT = Path(__file__).parents[2]
LEDGER = PAPER.ledger()
SIMULATION = Simulation()
CELLS = {
    name: PAPER.read_published(name, ROOT / f"config/published/oobleck_{name}.csv")
    for name in ("throughput", "fig9", "fig10", "fig12", "fig13")
}
TOLERANCES = {"oobleck": 1e-3, "varuna": 1e-3, "bamboo": 0.07}


@pytest.fixture(scope="module")
def tables(published_dir):
    register = shipped_register()
    failures = published_traces(["6h", "3h", "1h", "30m", "10m"], published_dir, register)
    spot = published_traces(["gcp_scaled", "p3_scaled"], published_dir, register)
    systems, own = SIMULATION.systems(), SIMULATION
    failed = failure_tables(
        failures, CELLS, systems=systems, breakdown_models=own.breakdown_models,
        checkpoint_model=own.checkpoint_model,
    )  # fmt: skip
    return failed | spot_tables(
        spot, CELLS, systems=systems, ablation_traces=own.ablation_traces, ablation_seeds=own.ablation_seeds,
        ablation_judged_seeds=own.ablation_judged_seeds,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "n_printed"), [("fig9", 60), ("fig10", 24), ("fig13", 15)])
def test_every_printed_average_comes_out(tables, name, n_printed):
    table = tables[name]
    rows = table[(table["mode"] == "compat") & table["published_samples_per_s"].notna()]
    assert len(rows) == n_printed
    off = {}
    for row in rows.to_dict("records"):
        printed = row["published_samples_per_s"]
        error = abs(row["throughput_samples_per_s"] - printed)
        tolerance = TOLERANCES[row["system"].partition("-")[0]]
        if error > max(tolerance * printed, 5e-4):  # half a digit of what is printed
            off[row["trace"], row["model"], row["system"]] = error
    assert not off


def test_what_the_paper_states_of_the_released_simulators_holds(tables):
    found = judge(LEDGER, {**tables, "fig12_published": CELLS["fig12"]}, "published", {})
    of_released = found[
        found["statement"].str.contains("released|repairing|with D1") & (found["verdict"] != "not run")
    ]
    assert len(of_released) >= 28
    assert set(of_released["verdict"]) == {"holds"}, of_released[of_released["verdict"] != "holds"].to_dict(
        "records"
    )


def test_mean_numbers_of_nodes_are_those_of_the_released_runs(tables):
    for name, mean in (("fig14", 24.16), ("fig15", 22.15)):
        rows = tables[name][(tables[name]["model"] == "BERT-Large") & (tables[name]["system"] == "oobleck")]
        nodes = rows[(rows["mode"] == "compat") & (rows["n_nodes"] > 0)]["n_nodes"]
        assert nodes.iloc[2:].mean() == pytest.approx(mean, rel=0.02)


def test_the_systems_do_not_fit_where_the_paper_says_so(tables):
    unfit = tables["fig9"][~tables["fig9"]["feasible"]]
    assert set(unfit["system"]) == {"bamboo"}
    assert set(unfit["model"]) == {"GPT-3 Medium", "GPT-3 2.7B", "GPT-3 6.7B"}


def test_released_shares_of_bamboo_are_near_those_printed(published_dir):
    (trace,) = published_traces(["10m"], published_dir, shipped_register())["10m"].values()
    costs = Systems(CELLS["throughput"], **SIMULATION.systems()).costs("bamboo", "BERT-Large")
    found = simulate("bamboo", trace, costs).times_s
    rows = CELLS["fig12"][CELLS["fig12"]["system"] == "bamboo"].set_index("category")["published_time_s"]
    for category, value in rows.items():
        assert found[category] / sum(found.values()) == pytest.approx(value / rows.sum(), abs=0.05)
