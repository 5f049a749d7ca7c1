"""Experiments on failures and on spot traces, at few seeds: tables, figures, and the ledger."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from legible_figures import assert_is_legible

from makespan.claims import judge
from makespan.config import check_settings, load_settings
from makespan.errors import ConfigError
from makespan.oobleck.simulator import DEFECTS, Systems
from makespan.papers.experiment import Given
from makespan.papers.oobleck import PAPER, figures
from makespan.papers.oobleck.simulation import Failures, Simulation, SpotInstances
from makespan.papers.oobleck.studies import analytic_study, interval_study

pytestmark = pytest.mark.xdist_group("failures and spot traces")

ROOT = Path(__file__).parents[2]
LEDGER = PAPER.ledger()
CELLS = {
    name: PAPER.read_published(name, ROOT / f"config/published/oobleck_{name}.csv")
    for name in ("throughput", "fig9", "fig10", "fig12", "fig13")
}


@pytest.fixture(scope="module")
def tables():
    small = {
        "failure_traces": {"6h": 2, "3h": 2, "1h": 2, "30m": 2, "10m": 2},
        "spot_traces": {"gcp_scaled": 2, "p3_scaled": 2},
        "ablation_seeds": 1,
        "ablation_judged_seeds": 2,
    }
    settings = check_settings({"oobleck": {"simulation": small}})
    given = Given("emulated", cells=CELLS)
    return Failures().resolved(settings).run(given) | SpotInstances().resolved(settings).run(given)


@pytest.fixture(scope="module")
def studies():
    simulation = Simulation()
    systems = Systems(CELLS["throughput"], **simulation.systems())
    small = simulation.intervals.model_copy(update={"n_losses": 10, "seeds": 1, "every": (1, 5, 10, 50)})
    rows = [*interval_study(systems, small), *analytic_study(systems, small)]
    return PAPER.schema_of("studies").validate(pd.DataFrame(rows), "studies")


def averages(table, **wanted):
    for column, value in wanted.items():
        table = table[table[column] == value]
    return table.set_index("seed")["throughput_samples_per_s"]


def test_every_system_model_trace_seed_and_mode_has_a_row(tables):
    assert len(tables["fig9"]) == 5 * 5 * 3 * 2 * 2 and len(tables["fig10"]) == 2 * 5 * 3 * 2 * 2
    assert len(tables["fig13"]) == 5 * 3 * 2 * 2
    assert set(tables["fig1"]["trace"]) == {"10m"}
    switched = ["", *(defect.value for defect in DEFECTS), "D1 D6 D11"]
    assert list(dict.fromkeys(tables["ablation"]["defects"])) == switched
    unfit = tables["fig10"][~tables["fig10"]["feasible"]]
    assert set(unfit["system"]) == {"bamboo"} and (unfit["throughput_samples_per_s"] == 0).all()


def test_spot_traces_of_two_seeds_differ_and_failures_do_not_but_for_bamboo(tables):
    one, other = averages(tables["fig10"], trace="p3_scaled", model="GPT-2", system="oobleck", mode="fixed")
    assert one != other
    for system, same in (("oobleck", True), ("varuna", True), ("bamboo", False)):
        one, other = averages(tables["fig9"], trace="10m", model="GPT-2", system=system, mode="compat")
        assert (one == other) == same


def test_shares_sum_to_one_and_printed_times_come_out(tables):
    sums = tables["fig12"][tables["fig12"]["category"] != "idle"].groupby(
        ["trace", "model", "system", "mode"]
    )
    assert sums["share"].sum().to_numpy() == pytest.approx(1.0)
    printed = CELLS["fig12"][CELLS["fig12"]["system"] == "oobleck"].set_index("category")["published_time_s"]
    own = tables["fig1"].set_index(["model", "system", "mode", "category"])["time_s"]
    for category, value in printed.items():
        assert own["BERT-Large", "oobleck", "compat", category] == pytest.approx(value, abs=5e-4)


def test_samples_over_time_are_those_of_the_average(tables):
    for name, trace in (("fig14", "p3_scaled"), ("fig15", "gcp_scaled")):
        series = tables[name]
        own = series[(series["model"] == "BERT-Large") & (series["system"] == "oobleck")]
        own = own[own["mode"] == "fixed"]
        width_s = float(np.diff(own["time_s"])[0])
        assert width_s == 360.0
        samples = own["throughput_samples_per_s"].sum() * width_s
        average = averages(tables["fig10"], trace=trace, model="BERT-Large", system="oobleck", mode="fixed")[
            1
        ]
        first_ready_s = 45.0 if trace == "p3_scaled" else 480.0 + 45.0
        end_s = {"p3_scaled": 40_920.0, "gcp_scaled": 38_760.0}[trace]
        assert samples == pytest.approx(average * (end_s - first_ready_s), rel=1e-9)
        assert own["n_nodes"].between(0, 30).all() and own["n_nodes"].max() > 25


def test_released_series_of_varuna_for_the_largest_model_are_zeros_as_drawn(tables):
    rows = tables["fig15"][
        (tables["fig15"]["model"] == "GPT-3 6.7B") & (tables["fig15"]["system"] == "varuna")
    ]
    by_mode = rows.groupby("mode")["throughput_samples_per_s"].max()
    assert by_mode["compat"] == 0 < by_mode["fixed"]


OURS = {figure.name: figure for kind in (Failures, SpotInstances) for figure in kind.figures}
OURS["intervals"] = PAPER.figures()["intervals"]


@pytest.mark.parametrize("name", OURS)
def test_figures_are_legible(tables, studies, name):
    entry = OURS[name]
    shown = {table: (tables | {"studies": studies})[table] for table in entry.tables}
    figure, table = getattr(figures, entry.draw or name)(shown, "emulated", **entry.values)
    assert_is_legible(figure)
    assert len(table)


@pytest.fixture(scope="module")
def judged(tables, studies):
    results = {**tables, "studies": studies, "fig12_published": CELLS["fig12"]}
    return judge(LEDGER, results, "published", {}).set_index("statement")


def test_statements_about_steady_losses_hold(studies):
    found = judge(LEDGER, {"studies": studies}, "emulated", {})
    ours = found[found["artifact"] == "Checkpoint intervals"]
    assert len(ours) == 3 and set(ours["verdict"]) == {"holds"}, ours.to_dict("records")


def test_statements_about_failures_are_decided(judged):
    of_failures = judged[judged["artifact"].isin(["Fig. 9", "Fig. 13", "Fig. 12"])]
    assert set(of_failures["verdict"]) <= {"holds", "fails"}
    (failing,) = of_failures[of_failures["verdict"] == "fails"].index
    assert failing.startswith("repaired, Oobleck is at least 3.4 times")


def test_a_mean_whose_interval_holds_both_answers_is_undecided(tables):
    table = tables["fig10"].copy()
    rows = (table["system"] == "varuna") & (table["model"] == "GPT-3 2.7B") & (table["mode"] == "compat")
    oobleck = table[(table["system"] == "oobleck") & (table["model"] == "GPT-3 2.7B")]
    near = oobleck[oobleck["mode"] == "compat"]["throughput_samples_per_s"].to_numpy() / 5.0

    def verdict(leads):
        table.loc[rows, "throughput_samples_per_s"] = near - np.resize(leads, len(near))
        found = judge(LEDGER, {"fig10": table}, "emulated", {}).set_index("statement")
        return found["verdict"]["as released, Oobleck is at least 5 times as fast as Varuna for GPT-3 2.7B"]

    assert verdict([0.02, 0.02]) == "holds"
    assert verdict([-0.02, -0.02]) == "fails"
    assert verdict([0.3, -0.2]) == "undecided"


def test_without_tables_nothing_is_decided():
    found = judge(LEDGER, {"fig9": pd.DataFrame(columns=PAPER.schema_of("fig9").names)}, "emulated", {})
    assert set(found["verdict"]) == {"not run"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("failure_traces: {2h: 3}", "2h"),
        ("failure_traces: {1h: 1}", "expected at least 2"),
        ("checkpoint_model: GPT-5", "GPT-5"),
        ("assumptions: {slow_down: 0.5}", "slow_down"),
        ("horizon_s: 3", "horizon_s: unknown key"),
    ],
)
def test_a_wrong_option_is_one_message(tmp_path, text, message):
    (tmp_path / "wrong.yaml").write_text(f"oobleck:\n  simulation:\n    {text}\n")
    with pytest.raises(ConfigError, match=message):
        load_settings([tmp_path / "wrong.yaml"], ROOT)


def test_everything_that_is_measured_decides_statements():
    assert not any(one.is_timed or one.unjudged for one in PAPER.EXPERIMENTS if "measured" in one.sources)
