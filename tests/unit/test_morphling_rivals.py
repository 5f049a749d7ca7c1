"""The sweep over the parameters of rivals: its values, its table, its figure and the statement on it."""

from dataclasses import fields, replace

import pandas as pd
import pytest
from legible_figures import assert_is_legible
from toy_cluster import toy_catalogue, toy_job, toy_nodes

from makespan.claims import Claim
from makespan.config import check_settings
from makespan.papers.experiment import Given
from makespan.papers.morphling import PAPER
from makespan.papers.morphling.figures import rivals
from makespan.papers.morphling.studies import AIMS_AT_MAKESPAN, VALUES
from makespan.policies import REGISTRY
from makespan.studies import Scenario, run

LEDGER = PAPER.ledger()
pytestmark = pytest.mark.xdist_group("rivals")


@pytest.fixture(scope="module")
def base():
    jobs = tuple(
        toy_job(f"job-{k}", 20.0 * k, workload="t5", n_gpus=(4, 1, 2)[k % 3], steps=(300, 20, 90)[k % 3])
        for k in range(9)
    )
    return Scenario("base", jobs, toy_nodes(1, 4), toy_catalogue())


@pytest.fixture(scope="module")
def swept(base):
    settings = check_settings({})
    changes = {"seeds": (1, 2), "policies": ("srtf", "gavel-makespan"), "restart_delays_s": (30.0,)}
    changes |= {"interval_s": 10.0, "std_s": 0.0}  # the same jobs on both lists
    experiment = settings.morphling.experiments(settings)["rivals"].model_copy(update=changes)
    return experiment.simulated({"base": base}, Given("published"))["rivals"]


def test_what_is_shipped_is_among_the_values_of_every_parameter():
    for name, parameters in VALUES.items():
        shipped = REGISTRY[name]
        assert set(parameters) <= {field.name for field in fields(shipped)}
        for parameter, values in parameters.items():
            assert getattr(shipped, parameter) in values, (name, parameter)
            assert len(set(values)) == len(values) > 1
    assert set(VALUES) > set(AIMS_AT_MAKESPAN)


def test_a_variant_differs_in_one_parameter_and_is_compared_with_what_is_shipped(base, swept):
    own = swept[swept["policy"] == "srtf"]
    assert own["parameter"].tolist()[0] == "" and own["ratio_mean"].tolist()[0] == 1.0
    assert len(own) == 1 + sum(len(values) - 1 for values in VALUES["srtf"].values())
    assert set(swept["runs"]) == {2}
    eager = replace(REGISTRY["srtf"], min_advantage=0.0)
    scenario = replace(base, restart_delay_s=30.0, interval_s=10.0)
    ratio = run(scenario, eager).metrics.avg_jct_s / run(scenario, "srtf").metrics.avg_jct_s
    row = own[(own["parameter"] == "min_advantage") & (own["value"] == "0")]
    assert row["ratio_mean"].tolist() == [pytest.approx(ratio)] and ratio != 1.0


def test_a_rival_that_aims_at_makespan_is_judged_by_it(base, swept):
    own = swept[swept["policy"] == "gavel-makespan"]
    ratios = own["makespan_mean_s"] / own["makespan_mean_s"].iloc[0]
    assert own["ratio_mean"].tolist() == pytest.approx(ratios.tolist())


def verdict(table, runs=2):
    finding = LEDGER.checks["rivals_at_their_best"]({"rivals": table}, Claim(str(runs), 0.98, {}, "rivals"))
    return finding.holds, finding.reproduced, finding.note


def test_rivals_are_at_their_best_where_no_interval_lies_below_what_is_shipped(swept):
    equal = swept.assign(ratio_mean=1.0, ratio_low=0.9, ratio_high=1.1)
    assert verdict(equal)[0] is True
    assert verdict(equal, runs=10)[0] is None and "at least 10" in verdict(equal, runs=10)[2]
    better = equal.copy()
    better.loc[1, ["ratio_mean", "ratio_low", "ratio_high"]] = (0.9, 0.85, 0.95)
    holds, text, note = verdict(better)
    assert holds is False and text.startswith("1 of ")
    assert f"srtf with {better['parameter'][1]} {better['value'][1]}: 0.900x" in note
    assert (
        LEDGER.checks["rivals_at_their_best"]({"rivals": swept.iloc[:1]}, Claim("2", 0.98, {}, "rivals"))
        is None
    )


@pytest.mark.parametrize("has_intervals", [True, False])
def test_the_figure_has_every_other_value(swept, has_intervals):
    table = swept if has_intervals else swept.assign(ratio_low=float("nan"), ratio_high=float("nan"))
    figure, rows = rivals({"rivals": table}, "emulated")
    assert_is_legible(figure)
    drawn = [text for axes in figure.axes for text in (label.get_text() for label in axes.get_yticklabels())]
    assert len(drawn) == int((rows["parameter"].fillna("") != "").sum()) == len(set(drawn))
    pd.testing.assert_frame_equal(rows[["policy", "runs"]], table[["policy", "runs"]])
