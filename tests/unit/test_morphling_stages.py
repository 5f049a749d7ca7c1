"""Stages that call the performance model: fits and sensitivity curves, on a small emulated table."""

import pandas as pd
import pytest

from makespan.config import check_settings
from makespan.errors import UnknownNameError
from makespan.hardware import cluster
from makespan.papers.experiment import Given
from makespan.papers.morphling import PAPER
from makespan.papers.morphling.figures import family_curves, offload_curves
from makespan.papers.morphling.performance import fit_workloads
from makespan.plots import ENVELOPE
from makespan.tables import FIT, SENSITIVITY, SENSITIVITY_FAMILIES
from makespan.throughput import EmulatedSource

CLUSTER = "a800-64"
SETTINGS = check_settings({})
EXPERIMENTS = SETTINGS.morphling.experiments(SETTINGS)


def ran(name, throughput, **changes):
    """Return the tables of an experiment on one workload."""
    given = Given("emulated", times={"bert": throughput}, cells={"table2": CELLS})
    return EXPERIMENTS[name].model_copy(update=changes).run(given)


CELLS = pd.DataFrame(
    {
        "model": ["bert"],
        "plan_family": ["DP"],
        "published_avg_error_pct": [1.0],
        "published_max_error_pct": [2.0],
    }
)


@pytest.fixture(scope="module")
def throughput():
    return EmulatedSource(cluster(CLUSTER), calibration="L1", seed=0, noise=1.0).load("bert")


@pytest.fixture(scope="module")
def curves(throughput):
    tables = ran("sensitivity", throughput, max_gpus=16, cpu_threads=(2, 24))
    return tables["sensitivity"], tables["sensitivity_families"]


def test_fit_gives_parameters_with_units_and_residuals(throughput):
    tables = ran("fit_models", throughput, forms=("extended",))
    fits, rows = tables["fits/bert"], tables["table2_rows"]
    assert list(fits.columns)[: len(FIT.names)] == FIT.names
    assert set(fits["form"]) == {"extended"} and set(fits["workload"]) == {"bert"}
    assert (fits["unit"] != "").all()
    assert fits["n_observations"].nunique() == 1
    assert fits["n_observations"].iloc[0] == rows["fitted"].sum() <= 10
    fitted = rows[rows["fitted"]]
    ratio = fitted["predicted_shipped_s"] / fitted["measured_s"]
    assert fits["residual_max_pct"].iloc[0] == pytest.approx(
        100 * abs(ratio.map(lambda r: r - 1)).max(), rel=0.2
    )
    assert (fits["residual_rms_pct"] <= fits["residual_max_pct"]).all()


def test_rows_name_their_family_flag_and_threads(throughput):
    rows = ran("fit_models", throughput)["table2_rows"]
    names = PAPER.schema_of("table2_rows").names
    assert list(rows.columns)[: len(names)] == names
    assert len(rows) == 2 * throughput["feasible"].sum()
    family = dict(zip(rows["exec_plan"], rows["plan_family"], strict=True))
    assert family == {
        "ga": "DP",
        "gc": "GC",
        "zero-dp": "ZeRO-DP+GA",
        "zero-offload": "ZeRO-Offload",
    }
    assert (rows["flag"] == "").all() and (rows["cpu_threads"] >= 1).all()


def test_unknown_form_and_unknown_cluster(throughput):
    with pytest.raises(UnknownNameError, match="expected extended, published"):
        fit_workloads([throughput], CLUSTER, ["third"])
    with pytest.raises(UnknownNameError, match=CLUSTER):
        ran("sensitivity", throughput, cluster="a900-64")


def test_curves_follow_their_schemas(curves):
    curve, families = curves
    assert list(curve.columns) == SENSITIVITY.names
    assert list(families.columns) == SENSITIVITY_FAMILIES.names
    assert curve["gpus"].tolist() == list(range(1, 17))
    assert curve["throughput_samples_per_s"].is_monotonic_increasing
    offload = families[families["plan_family"] == "ZeRO-Offload"]
    assert {2, 24} < set(offload["cpu_threads"])
    on_device = families[families["plan_family"] != "ZeRO-Offload"]
    assert on_device["cpu_threads"].nunique() == 1


def test_figure_table_has_one_curve_a_family_and_the_envelope(curves):
    curve, families = curves
    table = family_curves(curve, families)
    assert set(table["plan_family"]) == {"DP", "GC", "ZeRO-DP+GA", "ZeRO-Offload", ENVELOPE}
    assert not table.duplicated(["model", "plan_family", "gpus"]).any()
    best = table[table["plan_family"] == ENVELOPE].set_index("gpus")["throughput_samples_per_s"]
    others = table[table["plan_family"] != ENVELOPE]
    assert (others["throughput_samples_per_s"] <= others["gpus"].map(best) + 1e-9).all()


def test_cpu_figure_table_has_the_best_offload_plan(curves):
    _, families = curves
    faster = families[families["plan_family"] == "ZeRO-Offload"].assign(
        plan_family="ZeRO-Offload+GC",
        plan="zero-offload+gc",
        throughput_samples_per_s=lambda frame: 2 * frame["throughput_samples_per_s"],
    )
    table = offload_curves(pd.concat([families, faster], ignore_index=True))
    assert set(table["plan"]) == {"zero-offload+gc"}
    assert set(table["gpus"]) == {1, 2, 4, 8}
    assert not table.duplicated(["model", "gpus", "cpu_threads"]).any()
    for _, part in table.groupby("gpus"):
        assert part.sort_values("cpu_threads")["throughput_samples_per_s"].is_monotonic_increasing
    assert list(zip(table["gpus"], table["cpu_threads"], strict=True)) == sorted(
        zip(table["gpus"], table["cpu_threads"], strict=True)
    )
