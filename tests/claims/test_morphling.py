"""Statements of the Morphling paper on complete runs of the experiments, for both built-in sources."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from makespan.claims import judge, read_targets
from makespan.config import check_settings
from makespan.hardware import cluster
from makespan.papers.experiment import Given
from makespan.papers.morphling import PAPER
from makespan.throughput import EmulatedSource, PublishedSource, read_register

pytestmark = [pytest.mark.claims, pytest.mark.xdist_group("complete runs")]

TARGETS = Path(__file__).parents[2] / "benchmarks" / "targets.csv"
LEDGER, SETTINGS = PAPER.ledger(), check_settings({})
CLUSTER, FORM = "a800-64", "extended"
NAMES = ("fit_models", "sensitivity", "fig7", "fig8")


def run(source, root):
    """Run every experiment on one source, as the workflow does."""
    frames = {key: source.load(key) for key in SETTINGS.morphling.workloads}
    tables = {}
    for name in NAMES:
        experiment = SETTINGS.morphling.experiments(SETTINGS)[name]
        times = {key: frames[key] for key in experiment.timed_workloads(source.name, ())}
        folder = root / "config" / "published"
        cells = {one: PAPER.read_published(one, folder / f"morphling_{one}.csv") for one in experiment.cells}
        tables |= experiment.run(Given(source.name, times=times, cells=cells))
    claims = judge(LEDGER, tables, source.name, {"form": FORM})
    return SimpleNamespace(tables=tables, rows=tables["table2_rows"], claims=claims)


@pytest.fixture(scope="module")
def emulated(root):
    return run(EmulatedSource(cluster(CLUSTER), calibration="L1", seed=0, noise=1.0), root)


@pytest.fixture(scope="module")
def published(root, published_dir):
    register = read_register(root / "src" / "makespan" / "throughput" / "presets" / "datasets.csv")
    return run(PublishedSource(published_dir, 12, register), root)


@pytest.mark.parametrize("source", ["emulated", "published"])
def test_statements_hold_on_complete_runs_unless_they_are_marked(source, request):
    claims = request.getfixturevalue(source).claims
    marked = LEDGER.statements()["fails_on"].str.split().map(lambda names: source in names)
    judged = claims["verdict"] != "not run"
    assert set(claims["artifact"][judged]) == {"Table 2", "Sensitivity curves", "Fig. 7", "Fig. 8"}
    assert (claims["verdict"] == "fails").equals(marked & judged)


def test_published_source_fig7_and_fig8_equal_the_paper(published):
    stages = published.tables["fig7"]
    assert (stages["iter_time_s"] == stages["published_iter_time_s"]).all()
    assert stages.loc[stages["strategy"] == "Morphling", "plan"].tolist() == [
        "244",
        "441",
        "221",
        "zero-offload+gc",
        "zero-offload+gc",
    ]
    shares = published.tables["fig8"]
    assert (shares["speedup"] - shares["published_speedup"]).abs().max() <= 0.005
    assert shares["gpus"].tolist() == shares["published_gpus"].tolist()


GOALS = [
    goal for goal in read_targets(TARGETS) if goal.comparison.table == "published/morphling/table2_summary"
]


# With constants that have not seen the model; those as shipped reach them, see test_perf_targets.
MISSED = {"max_error_pct", "regret_mean_pct", "regret_max_pct"}


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.comparison.value)
def test_published_source_extended_form_reaches_its_goals_unless_they_are_marked(published, goal):
    summary = published.tables["table2_summary"]
    extended = goal.value(summary)
    assert goal.is_met(extended) == (goal.comparison.value not in MISSED)
    assert extended <= 1.15 * goal.comparison.limit
    rows = goal.comparison.rows.replace('form == "extended"', 'form == "published"')
    assert extended < replace(goal, comparison=replace(goal.comparison, rows=rows)).value(summary)


def test_validated_rows_were_not_fitted_and_every_row_is_accounted_for(published):
    table, rows = published.tables["table2"], published.rows
    for form, part in rows.groupby("form"):
        own = table[table["form"] == form]
        assert own["n_fit"].sum() == part["fitted"].sum()
        assert own["n_validate"].sum() == (part["clean"] & ~part["fitted"]).sum()
    assert rows.groupby(["model", "form"])["fitted"].sum().max() <= 10
    assert not (rows["fitted"] & ~rows["clean"]).any()


@pytest.mark.parametrize("source", ["emulated", "published"])
def test_envelope_is_the_best_family_and_never_falls(source, request):
    result = request.getfixturevalue(source)
    families = result.tables["sensitivity_families"]
    for model, curve in result.tables["sensitivity"].groupby("model"):
        values = curve.sort_values("gpus")["throughput_samples_per_s"]
        assert values.is_monotonic_increasing
        assert values.max() == families.loc[families["model"] == model, "throughput_samples_per_s"].max()
        assert curve["gpus"].tolist() == list(range(1, 65))


def test_runs_are_repeatable(emulated, root):
    again = run(EmulatedSource(cluster(CLUSTER), calibration="L1", seed=0, noise=1.0), root)
    for name, table in emulated.tables.items():
        pd.testing.assert_frame_equal(again.tables[name], table)
    pd.testing.assert_frame_equal(again.claims, emulated.claims)
