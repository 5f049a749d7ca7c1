"""EasyScale's cluster experiments on a short list, their figures, and the ledger on made-up tables."""

import os
from pathlib import Path

import pandas as pd
import pytest
from legible_figures import assert_is_legible

from makespan.claims import judge
from makespan.config import check_settings
from makespan.errors import ChecksumError, MissingDataError
from makespan.papers.easyscale import PAPER
from makespan.papers.easyscale.cluster import JobList, generated_jobs, published_jobs
from makespan.papers.easyscale.figures import fig14, fig15, sensitivity, serving
from makespan.papers.experiment import Given
from makespan.tables import read_csv, write_csv
from makespan.throughput import shipped_register

pytestmark = pytest.mark.xdist_group("clusters of elastic jobs")

ROOT = Path(__file__).parents[2]
PUBLISHED = Path(os.environ.get("MAKESPAN_PUBLISHED_DIR", "/none"))
HAS_LIST = (PUBLISHED / "easyscale/workload.csv").is_file()
LEDGER = PAPER.ledger()
CELLS = {
    name: PAPER.read_published(name, ROOT / f"config/published/easyscale_{name}.csv")
    for name in ("fig11", "fig12", "fig14", "fig15", "serving")
}
SHORT = {"intervals_s": [120.0], "restart_delays_s": []}


def experiment(name, **options):
    """Return an experiment of the cluster with some options of its group changed."""
    group = {"simulate": "simulation"}.get(name, name)
    settings = check_settings({"easyscale": {group: options}})
    return settings.easyscale.experiments(settings)[name]


def given(table, **more):
    return Given("emulated", cells=CELLS, tables={"jobs": table}, **more)


@pytest.fixture(scope="module")
def tables():
    return experiment("simulate", **SHORT).run(given(generated_jobs(3, 14)))


@pytest.fixture(scope="module")
def beside():
    return experiment("serving", copies=2, hours=3.0).run(given(generated_jobs(3, 14)))


def test_all_jobs_complete_under_every_policy(tables):
    table = tables["fig14"].set_index("policy")
    simulated = experiment("simulate")
    assert list(table.index) == [*simulated.gang_policies, *simulated.elastic_policies]
    assert (table["jobs"] == 14).all() and len(tables["fig14_jobs"]) == 14 * 5
    assert table["jct_gain"]["fifo"] == 1.0 and table["jct_gain_to_serial"]["fifo-serial"] == 1.0
    assert (table["makespan_round_s"] % 60 == 0).all()
    assert (table["makespan_round_s"] >= table["makespan_from_zero_s"]).all()
    first_s = tables["fig14_jobs"]["submit_time_s"].min()
    assert (table["makespan_from_zero_s"] - table["makespan_s"]).to_numpy() == pytest.approx(first_s)
    assert table["published_avg_jct_s"].dropna().to_dict() == {
        "fifo-serial": 8904.97, "easyscale-homo": 1070.5, "easyscale-heter": 676.75,
    }  # fmt: skip


def test_a_mean_is_that_of_the_jobs(tables):
    jobs = tables["fig14_jobs"].groupby("policy")
    own = tables["fig14"].set_index("policy")
    assert jobs["jct_s"].mean().to_dict() == pytest.approx(own["avg_jct_s"].to_dict())
    restarts = jobs["n_restarts"].mean() + 1
    assert restarts.to_dict() == pytest.approx(own["reconfigurations_per_job"].to_dict())


def test_what_is_held_never_exceeds_the_cluster_and_adds_up(tables):
    table = tables["fig15"]
    assert (table["v100"] <= 32).all() and (table["p100"] <= 16).all() and (table["t4"] <= 16).all()
    assert (table[["v100", "p100", "t4"]].sum(axis=1) == table["gpus"]).all()
    for _, rows in table.groupby("policy"):
        assert rows["time_s"].tolist() == [60.0 * number for number in range(len(rows))]
        assert rows["gpus"].iloc[0] == rows["gpus"].iloc[-1] == 0
    homo = table[table["policy"] == "easyscale-homo"]
    assert homo["published_gpus"].max() == 52 and homo["time_s"].max() >= 6720


def test_one_thing_is_varied_at_a_time(tables):
    table = tables["sensitivity"]
    settings = list(table.groupby(["parameter", "value"], sort=False).groups)
    assert settings == [("default", ""), ("interval_s", "120"), ("charge", "first_only")]
    default = table[table["parameter"] == "default"].set_index("policy")["avg_jct_s"]
    assert default.to_dict() == tables["fig14"].set_index("policy")["avg_jct_s"].to_dict()


def test_equal_inputs_give_equal_tables(tables):
    again = experiment("simulate", **SHORT).run(given(generated_jobs(3, 14), n_threads=2))
    assert {name: table.to_csv() for name, table in again.items()} == {
        name: table.to_csv() for name, table in tables.items()
    }


def test_training_beside_serving_uses_what_is_idle_and_gives_it_back(beside):
    table, rounds = beside["serving"].set_index("policy"), beside["serving_rounds"]
    assert (table["jobs"] == 28).all() and (table["interruptions"] == 0).all()
    assert (table["shared_ratio"] > table["serving_ratio"]).all()
    ratio = 100 * (table["shared_ratio"] / table["serving_ratio"] - 1)
    assert table["gain_pct"].to_numpy() == pytest.approx(ratio.to_numpy())
    assert (rounds["serving_gpus"] <= rounds["reserved_gpus"]).all()
    assert (rounds["reserved_gpus"] + rounds["training_gpus"] <= 64).all()
    assert table["published_gain_pct"].dropna().to_dict() == {"easyscale-heter": 62.1}


def test_serving_waits_where_it_keeps_no_headroom_and_nothing_in_hand():
    demand = {"headroom_share": 0.0, "hold_rounds": 1, "noise_std": 0.1}
    tight = experiment("serving", copies=1, hours=1.0, demand=demand)
    found = tight.run(given(generated_jobs(3, 14)))["serving"]
    assert (found["delayed_rounds"] > 0).all() and (found["interruptions"] == 0).all()


def test_figures_are_drawn_from_the_saved_tables(tables, beside, tmp_path):
    saved = {}
    for name, table in (tables | beside).items():
        write_csv(table, tmp_path / f"{name}.csv")
        saved[name] = read_csv(tmp_path / f"{name}.csv", PAPER.schema_of(name))
    shown = ["easyscale-homo", "easyscale-heter"]
    drawn = (fig14(saved, "emulated"), fig15(saved, "emulated", shown), sensitivity(saved, "published"))
    for figure, table in (*drawn, serving(saved, "emulated")):
        assert len(figure.axes) >= 2 and len(table)
        assert_is_legible(figure)


@pytest.mark.parametrize(
    ("ours", "printed", "side"),
    [(1800.0, 17000.0, "right"), (17000.0, 1800.0, "left"), (1800.0, None, "left")],
)
def test_a_value_stands_beside_its_point_and_away_from_the_published_mark(ours, printed, side):
    schema = PAPER.schema_of("fig14")
    numbers = dict.fromkeys(schema.names[1:], 1.0) | {"jobs": 3, "avg_jct_s": 90.0}
    numbers |= {"published_makespan_s": None, "published_avg_jct_s": None}
    values = {"makespan_from_zero_s": ours, "published_makespan_s": printed}
    rows = pd.DataFrame([{"policy": "fifo"} | numbers | values, {"policy": "easyscale-homo"} | numbers])
    figure, table = fig14({"fig14": schema.validate(rows, where="test")}, "emulated")
    label = figure.axes[0].texts[0]
    assert (label.get_text(), label.get_ha(), label.xy) == (f"{ours:.0f}", side, (ours, 0))
    assert_is_legible(figure)
    assert len(table) == 2


# --- the ledger -----------------------------------------------------------------------------------


def made_up(jct, makespan, heter=64, homo=32, gain=30.0, lost=0):
    """Tables in which policies have these times, and two of them hold so many GPUs all the time."""
    policies = ["easyscale-heter", "easyscale-heter-growth", "easyscale-homo", "fifo", "fifo-serial"]
    times = {"avg_jct_s": jct, "makespan_from_zero_s": makespan}
    one = pd.DataFrame({"policy": policies} | times)
    series = (("easyscale-heter", heter), ("easyscale-homo", homo))
    rows = [(name, 60.0 * number, gpus) for name, gpus in series for number in range(100)]
    held = pd.DataFrame(rows, columns=["policy", "time_s", "gpus"])
    values = {"policy": "easyscale-heter", "gain_pct": gain, "delayed_rounds": 0, "interruptions": lost}
    other = pd.DataFrame([values])
    return {
        "fig14": one,
        "fig15": held,
        "serving": other,
        "sensitivity": one.assign(parameter="interval_s", value="30"),
    }


def verdicts(tables):
    found = judge(LEDGER, tables, "emulated", {})
    simulated = found["artifact"].isin(["Fig. 14", "Fig. 15", "Sensitivity", "Serving"])
    return found[simulated]["verdict"].tolist()


def test_statements_hold_where_the_tables_say_so():
    good = made_up([1.0, 1.5, 2.0, 5.0, 9.0], [10.0, 11.0, 12.0, 20.0, 30.0])
    assert verdicts(good) == ["holds"] * 11


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({"jct": [2.5, 1.5, 2.0, 5.0, 9.0]}, [0, 8]),
        ({"jct": [1.0, 1.5, 2.0, 3.0, 3.5]}, [1, 2]),
        ({"makespan": [13.0, 11.0, 12.0, 20.0, 30.0]}, [3, 8]),
        ({"makespan": [10.0, 12.5, 12.0, 20.0, 30.0]}, [4]),
        ({"heter": 63}, [5]),
        ({"heter": 30}, [5, 6, 7]),
        ({"gain": 19.0}, [9]),
        ({"lost": 1}, [10]),
    ],
)
def test_statements_fail_where_the_tables_say_so(changes, failing):
    given = {"jct": [1.0, 1.5, 2.0, 5.0, 9.0], "makespan": [10.0, 11.0, 12.0, 20.0, 30.0]} | changes
    found = verdicts(made_up(**given))
    assert [number for number, verdict in enumerate(found) if verdict == "fails"] == failing


def test_statements_of_policies_that_did_not_run_are_not_judged():
    tables = {name: table[table["policy"] == "fifo"] for name, table in made_up([1.0] * 5, [1.0] * 5).items()}
    assert set(verdicts(tables)) == {"not run"}


# --- the authors' list ----------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_LIST, reason="MAKESPAN_PUBLISHED_DIR has no easyscale/workload.csv")
def test_the_authors_list_gives_what_the_project_promises():
    """Goals of our own: they were written down before any policy was run."""
    table = published_jobs(PUBLISHED, shipped_register(), "rename")
    assert len(table) == 68 and table["job_id"].is_unique
    assert len(published_jobs(PUBLISHED, shipped_register(), "artifact")) == 62
    whole = experiment("simulate", intervals_s=[], restart_delays_s=[])
    found = whole.run(given(table))["fig14"].set_index("policy")
    jct, makespan = found["avg_jct_s"], found["makespan_from_zero_s"]
    assert jct["easyscale-heter"] < jct["easyscale-homo"] < jct["fifo"] < jct["fifo-serial"]
    assert makespan["easyscale-heter"] < makespan["easyscale-homo"] < makespan["fifo"]
    assert jct["easyscale-homo"] <= 740 and makespan["easyscale-homo"] <= 6050
    assert jct["easyscale-heter"] <= 600 and makespan["easyscale-heter"] <= 5500


def test_another_file_in_the_place_of_the_authors_list_is_refused(tmp_path):
    path = tmp_path / "easyscale/workload.csv"
    path.parent.mkdir()
    path.write_text("name,time\n")
    with pytest.raises(ChecksumError):
        published_jobs(tmp_path, shipped_register(), "rename")


def test_the_job_list_is_generated_or_that_of_the_authors(tmp_path):
    jobs = JobList(jobs=14, seed=3).model_copy(update={"dedup": "rename"})
    assert jobs.run(Given("emulated"))["jobs"].equals(
        PAPER.schema_of("jobs").validate(generated_jobs(3, 14), where="test")
    )
    register = ROOT / "src/makespan/throughput/presets/datasets.csv"
    with pytest.raises(MissingDataError, match=r"easyscale/workload\.csv"):
        jobs.run(Given("published", published=(tmp_path, register)))
