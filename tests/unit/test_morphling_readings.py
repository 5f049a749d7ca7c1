"""The readings of the paper's rules: what is exchanged, against what, and the table of the page."""

from dataclasses import fields, replace

import pytest
from toy_cluster import toy_catalogue, toy_job, toy_nodes

from makespan.config import check_settings
from makespan.papers.experiment import Given
from makespan.papers.morphling import PAPER
from makespan.papers.morphling.results_page import page
from makespan.papers.morphling.studies import ALL_BEFORE, ALTERNATIVES
from makespan.policies import REGISTRY
from makespan.policies.morphling import Morphling
from makespan.studies import Scenario, run
from makespan.tables import write_csv

pytestmark = pytest.mark.xdist_group("readings")

# Everything else of the policy says which one it is, what it may choose, or what the paper fixes.
NO_READINGS = {"freedom", "gate_share", "interval_s", "is_clairvoyant", "honours_guarantees"}
NO_READINGS |= {"name", "title", "references"}


@pytest.fixture(scope="module")
def base():
    jobs = tuple(
        toy_job(f"job-{k}", 150.0 * k, workload="t5", n_gpus=(4, 1, 2)[k % 3], steps=(900, 60, 1400)[k % 3])
        for k in range(12)
    )
    return Scenario("base", jobs, toy_nodes(1, 4), toy_catalogue())


@pytest.fixture(scope="module")
def exchanged(base):
    settings = check_settings({})
    changes = {"seeds": (1, 2), "traces": ("base",), "restart_delays_s": (20.0,), "interval_s": 10.0}
    changes["std_s"] = 0.0  # the same jobs on both lists
    readings = settings.morphling.experiments(settings)["readings"].model_copy(update=changes)
    found = readings.simulated({"base": base}, Given("published"))["readings"]
    return found.fillna({"reading": "", "value": ""})


def test_every_reading_of_the_policy_has_alternatives_and_the_first_is_shipped():
    shipped = REGISTRY["morphling"]
    assert set(ALTERNATIVES) == {field.name for field in fields(Morphling)} - NO_READINGS
    for name, values in ALTERNATIVES.items():
        assert values[0] == getattr(shipped, name), name
        assert len(set(values)) == len(values) > 1


def test_each_alternative_is_compared_with_what_is_shipped_on_the_same_list(base, exchanged):
    n_alternatives = sum(len(values) - 1 for values in ALTERNATIVES.values())
    assert len(exchanged) == 1 + n_alternatives + 1 and set(exchanged["lists"]) == {2}
    assert exchanged.loc[0, ["reading", "jct_ratio_mean", "makespan_ratio_mean"]].tolist() == ["", 1.0, 1.0]
    scenario = replace(base, restart_delay_s=20.0, interval_s=10.0)
    shipped = run(scenario, "morphling").metrics
    limit = run(scenario, replace(REGISTRY["morphling"], age_limit_s=900.0)).metrics
    row = exchanged[(exchanged["reading"] == "age_limit_s") & (exchanged["value"] == "900")]
    assert row["jct_ratio_mean"].tolist() == [pytest.approx(limit.avg_jct_s / shipped.avg_jct_s)]
    assert row["makespan_ratio_mean"].tolist() == [pytest.approx(limit.makespan_s / shipped.makespan_s)]
    assert limit.avg_jct_s != shipped.avg_jct_s


def test_the_last_row_exchanges_the_first_four_at_once(base, exchanged):
    before = {name: ALTERNATIVES[name][1] for name in list(ALTERNATIVES)[:4]}
    scenario = replace(base, restart_delay_s=20.0, interval_s=10.0)
    together = run(scenario, replace(REGISTRY["morphling"], **before)).metrics
    row = exchanged[exchanged["reading"] == ALL_BEFORE]
    assert row["jct_mean_s"].tolist() == [pytest.approx(together.avg_jct_s)]


def test_the_page_shows_every_reading(exchanged, tmp_path):
    folder = tmp_path / "published" / "morphling"
    folder.mkdir(parents=True)
    write_csv(exchanged, folder / "readings.csv", PAPER.schema_of("readings"))
    block = page(tmp_path)["readings, published"]
    lines = [line for line in block.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + 1 + len(exchanged)
    assert lines[0] == "| reading | Base, 20 s |"
    assert "| `age_limit_s`: 900 | " in block and "2 lists of each trace, published" in block
