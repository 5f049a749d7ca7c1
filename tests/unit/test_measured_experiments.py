"""Table 2 and Fig. 7 on profiled workloads, and the environment files that they read."""

import json

import pandas as pd
import pytest

from makespan.config import check_settings
from makespan.errors import InputError, MissingDataError
from makespan.hardware import cluster_from
from makespan.papers.experiment import Given
from makespan.papers.morphling.adaptation import Fig7Stage
from makespan.papers.morphling.performance import fit_workloads
from makespan.perf import load_environment
from makespan.profiling.rates import MachineRates, environment_text
from makespan.tables import THROUGHPUT

TIMES = {
    "1": {"ga": 80, "gc": 105, "zero-dp": 82, "zero-offload": 86, "zero-offload+gc": 112, "111": 90},
    "2": {"ga": 55, "gc": 68, "zero-dp": 60, "zero-offload": 64, "zero-offload+gc": 77, "112": 58}
    | {"121": 75, "211": 62},
}
STAGES = (
    Fig7Stage(name="both", placement="2", cpu_threads=1),
    Fig7Stage(name="one", placement="1", cpu_threads=1),
)
SETTINGS = check_settings({})
EXPERIMENTS = SETTINGS.morphling.experiments(SETTINGS)
CELLS = pd.DataFrame(
    {"strategy": ["TP+DP"], "stage": ["both"], "published_plan": ["121"], "published_iter_time_s": [1.0]}
)


@pytest.fixture
def profiled(throughput, record, environment, tmp_path):
    """Return what experiments are given of a profile of one workload."""

    def profiled():
        path = tmp_path / "record.json"
        path.write_text(json.dumps(record))
        paths = {"records": [str(path)], "environment": environment}
        cells = {"table2": pd.DataFrame(), "fig7": CELLS}
        return Given("measured", times={"tiny-gpt": throughput}, cells=cells, paths=paths)

    return profiled


@pytest.fixture
def environment(tmp_path):
    path = tmp_path / "environment.toml"
    rates = MachineRates(2, 8e9, 16e9, 1, 1.5e9, 5e8, 6e8, 0.9, 1e10, 2e-3, 4e-3, 2e10)
    path.write_text(environment_text(rates, "made up"))
    return str(path)


@pytest.fixture
def throughput():
    rows = [
        {
            "workload": "tiny-gpt", "exec_plan": plan, "placement": place, "cpu_threads": 1,
            "global_batch_size": 8, "iter_time_s": ms / 1e3, "forward_s": 0.3 * ms / 1e3,
            "overlap_sync_s": 0.65 * ms / 1e3, "optimize_s": 0.05 * ms / 1e3, "feasible": True,
            "clean": True, "flag": "", "provenance": "measured",
        }
        for place, times in TIMES.items()
        for plan, ms in times.items()
    ]  # fmt: skip
    return THROUGHPUT.validate(pd.DataFrame(rows), where="test")


@pytest.fixture
def record(throughput):
    keys = throughput[["exec_plan", "placement", "cpu_threads"]].to_dict("records")
    noise = [4.0 if key["exec_plan"] == "gc" else 2.0 for key in keys]
    points = [key | {"repeatability_pct": one} for key, one in zip(keys, noise, strict=True)]
    return {"workload": "tiny-gpt", "points": points}


def test_errors_stand_beside_the_repeatability_of_their_points(profiled):
    tables = EXPERIMENTS["fit_models"].run(profiled())
    assert list(tables) == ["fits/tiny-gpt", "table2_rows", "table2", "table2_summary"]
    errors, summary = tables["table2"], tables["table2_summary"]
    by_family = errors[errors["form"] == "extended"].set_index("plan_family")["repeatability_pct"]
    assert by_family["GC"] == pytest.approx(4.0)
    assert by_family["DP"] == pytest.approx(2.0)
    assert summary["scope"].tolist() == ["all", "tiny-gpt"] * 2
    assert summary["repeatability_pct"].tolist() == pytest.approx([2 + 2 * 2 / 14] * 4)


def test_regular_times_are_predicted_from_an_environment_file(profiled):
    experiment = EXPERIMENTS["fit_models"].model_copy(update={"forms": ("extended",)})
    summary = experiment.run(profiled())["table2_summary"]
    assert summary["n_validate"].min() >= 4
    assert summary["avg_error_pct"].max() < 15


def test_no_kind_of_plan_is_fitted_for_every_workload(throughput, environment):
    """Of kinds with one row on two processes every second is judged, for the next workload the others."""
    second = throughput.assign(workload="tiny-llama")
    found = fit_workloads([throughput, second], environment, ["extended"], holds_out_kinds=True)
    fitted = [set(rows.loc[rows["fitted"] & (rows["placement"] == "2"), "exec_plan"]) for _, rows in found]
    assert fitted == [{"ga", "zero-offload", "121"}, {"ga", "zero-dp", "zero-offload+gc", "211"}]
    assert [rows["fitted"].sum() for _, rows in found] == [5, 6]
    [(_, alone)] = fit_workloads([throughput], environment, ["extended"])
    assert set(alone.loc[alone["fitted"] & (alone["placement"] == "2"), "exec_plan"]) == set.union(*fitted)


def test_constants_that_were_measured_apart_have_seen_no_model(throughput, environment):
    [(_, rows)] = fit_workloads([throughput], environment)
    assert load_environment(environment).unseen_by("gpt2-1.5b").name == environment
    assert (rows["predicted_s"] == rows["predicted_shipped_s"]).all()


def test_a_point_that_ran_once_has_no_repeatability(profiled, record):
    for point in record["points"]:
        point["repeatability_pct"] = None
    errors = EXPERIMENTS["fit_models"].run(profiled())["table2"]
    assert errors["repeatability_pct"].isna().all()


def test_the_adaptation_experiment_runs_on_a_profiled_workload(profiled):
    table = EXPERIMENTS["fig7"].model_copy(update={"profiled_stages": STAGES}).run(profiled())["fig7"]
    assert table["published_iter_time_s"].isna().all()  # the paper has no such workload
    assert list(dict.fromkeys(table["strategy"])) == [
        "Morphling",
        "TP+DP",
        "TP+PP",
        "Megatron 3D",
        "ZeRO-Offload+GC",
    ]
    chosen = table[table["strategy"] == "Morphling"].set_index("stage")
    assert chosen.loc["both", "plan"] == "ga"
    assert chosen.loc["one", "plan"] == "ga"
    fixed = table[table["strategy"] == "TP+DP"].set_index("stage")
    assert fixed.loc["both", "plan"] == "121"


def test_a_missing_environment_file_is_named(tmp_path):
    with pytest.raises(MissingDataError, match=r"no\.toml: no such file; expected an environment"):
        load_environment(str(tmp_path / "no.toml"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[cluster]\n", "[cluster\n"), "cannot be read as an environment"),
        (("[constants.straggler_s]", "[constants.stragler_s]"), "straggler_s', 'stragler_s'"),
        (("gpus_per_nic", "gpus_per_card"), "gpus_per_card"),
        (("n_nodes = 1\n", ""), "n_nodes"),
    ],
)
def test_a_damaged_environment_file_is_refused(environment, change, message):
    with open(environment) as file:
        text = file.read()
    assert change[0] in text
    with open(environment, "w") as file:
        file.write(text.replace(*change))
    with pytest.raises(InputError, match=message):
        load_environment(environment)


def test_a_cluster_of_ones_own_needs_all_tables():
    with pytest.raises(InputError, match="cluster 'mine': 'gpu'; expected n_nodes, and the tables gpu"):
        cluster_from("mine", {"n_nodes": 1})
