"""The study of how runs are chosen: sequential, fixed and random designs over random starts."""

import numpy as np
import pandas as pd
import pytest

from makespan.config import check_settings
from makespan.emulator import emulate, trace_points
from makespan.hardware import cluster
from makespan.papers.experiment import Given
from makespan.papers.morphling import figures
from makespan.papers.morphling.sampling import DESIGNS, METRICS, over_workloads, summary
from makespan.perf import sampling_design
from makespan.workloads import workload

SETTINGS = check_settings({})


@pytest.fixture(scope="module")
def throughput():
    where = cluster("a800-64")
    rows = emulate(workload("bert"), trace_points(workload("bert"), where), where)
    return rows.iloc[::3].reset_index(drop=True)


@pytest.fixture(scope="module")
def tables(throughput):
    experiment = SETTINGS.morphling.experiments(SETTINGS)["sampling"].model_copy(update={"starts": 2})
    return experiment.run(Given("emulated", times={"bert": throughput}))


def test_every_design_has_every_start_and_as_many_runs(tables, throughput):
    starts = tables["sampling_starts"]
    assert [*starts["design"]] == [name for name in DESIGNS for _ in range(2)]
    n_runs = int(sampling_design(throughput, "bert").sum())
    assert set(starts["n_fit"]) == {n_runs}
    assert set(starts["n_validate"]) == {int(throughput["feasible"].sum()) - n_runs}


def test_the_fixed_design_needs_no_start(tables):
    fixed = tables["sampling_starts"].query("design == 'fixed'").drop(columns="start")
    assert len(fixed.drop_duplicates()) == 1


def test_medians_are_those_of_the_starts(tables):
    table, starts = tables["sampling"], tables["sampling_starts"]
    assert len(table) == len(DESIGNS) * len(METRICS)
    for row in table.itertuples():
        assert row.median == pytest.approx(starts.loc[starts["design"] == row.design, row.metric].median())
    assert (table["p10"] <= table["median"]).all() and (table["median"] <= table["p90"]).all()


def test_errors_leave_vit_out_and_regret_does_not():
    rows = pd.DataFrame(
        {
            "design": "fixed", "start": 0, "model": ["vit", "bert", "vit", "bert"], "n_fit": 7,
            "error_pct": [50.0, 2.0, np.nan, np.nan], "is_within": [0.0, 1.0, np.nan, np.nan],
            "regret_pct": [np.nan, np.nan, 4.0, 1.0],
        }
    )  # fmt: skip
    (row,) = over_workloads(rows).to_dict("records")
    assert row["n_fit"] == 14 and row["n_validate"] == 1
    assert row["avg_error_pct"] == row["max_error_pct"] == 2.0
    assert (row["regret_mean_pct"], row["regret_max_pct"], row["coverage_pct"]) == (2.5, 4.0, 50.0)
    assert summary(over_workloads(rows)).set_index("metric")["median"]["regret_max_pct"] == 4.0


def test_the_figure_has_a_panel_per_metric_and_its_table(tables):
    figure, table = figures.sampling(tables, "emulated")
    assert [axes.get_title() for axes in figure.axes] == [*figures._CHOICE_METRICS.values()]
    assert table.equals(tables["sampling"])
