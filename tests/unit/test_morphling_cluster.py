"""The cluster experiments on tiny inputs: job lists, knowledge, simulations, studies."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from toy_cluster import toy_catalogue, toy_job, toy_nodes

from makespan.config import check_settings
from makespan.errors import InputError, TraceError
from makespan.hardware import cluster
from makespan.papers.experiment import Given
from makespan.papers.morphling.cluster import Seeds, of_size
from makespan.papers.morphling.comparisons import CLAIRVOYANT, RECONFIGURING, paired
from makespan.papers.morphling.figures import allocation_by_family
from makespan.papers.morphling.job_lists import drawn_lists, published_workloads
from makespan.papers.morphling.studies import ScaleSize
from makespan.policies import REGISTRY
from makespan.studies import Scenario, run, with_predictions
from makespan.tables import JOBS
from makespan.throughput import EmulatedSource, ReferenceTimes, read_register

TESTBED = cluster("a800-64")
KEYS = ("roberta", "llama7")
LISTS = ("naive", "base", "bp", "mt")
SETTINGS = check_settings({})
EXPERIMENTS = SETTINGS.morphling.experiments(SETTINGS)


def experiment(name, **changes):
    """Return an experiment with other options."""
    return EXPERIMENTS[name].model_copy(update=changes)


def generated(tables):
    """Return short generated lists."""
    chosen = experiment("generate_workloads", seed=1, jobs=30, naive_jobs=4, naive_span_s=5400.0)
    found = chosen.run(Given("emulated", times=tables))
    return {name.removeprefix("workloads/"): table for name, table in found.items()}


@pytest.fixture(scope="module")
def tables():
    source = EmulatedSource(TESTBED, calibration="L1", seed=0, noise=1.0)
    return {key: source.load(key) for key in KEYS}


@pytest.fixture(scope="module")
def lists(tables):
    return generated(tables)


@pytest.fixture(scope="module")
def knowledge(tables):
    return EXPERIMENTS["predictions"].run(Given("emulated", times=tables))["predictions"]


@pytest.fixture(scope="module")
def given(tables, lists, knowledge):
    """Return what the experiments are given of the stages before them."""
    own = {f"workloads/{name}": table for name, table in lists.items()}
    return Given("published", times=tables, tables=own | {"predictions": knowledge})


@pytest.fixture(scope="module")
def scenarios(given):
    return EXPERIMENTS["table4"].sampled(given)


@pytest.fixture
def toys():
    jobs = tuple(toy_job(f"job-{number}", 10.0 * number, steps=40) for number in range(6))
    base = Scenario("base", jobs, toy_nodes(2, 4), toy_catalogue())
    return {"base": base, "naive": replace(base, name="naive", jobs=jobs[:2])}


def test_generated_lists_request_what_the_source_has(tables, lists):
    assert tuple(lists) == LISTS
    assert [len(lists[name]) for name in LISTS] == [4, 30, 30, 30]
    for frame in lists.values():
        JOBS.validate(frame, where="list")
        assert set(frame["workload"]) <= set(KEYS)
    assert lists["naive"]["submit_time_s"].max() == 5400.0
    assert lists["mt"]["is_guaranteed"].any() and not lists["base"]["is_guaranteed"].any()
    pd.testing.assert_frame_equal(generated(tables)["bp"], lists["bp"])


def test_a_source_without_any_requested_workload_is_refused():
    source = EmulatedSource(TESTBED, calibration="L1", seed=0, noise=1.0)
    with pytest.raises(TraceError, match="workloads with throughput: t5_3B; expected at least one of bert"):
        generated({"t5_3B": source.load("t5_3B")})


def test_published_lists_keep_the_configured_workloads(published_dir, root):
    register = read_register(root / "src" / "makespan" / "throughput" / "presets" / "datasets.csv")
    found = published_workloads(published_dir, register, ["roberta", "llama7"])
    assert [len(found[name]) for name in LISTS] == [2, 112, 112, 112]
    assert len(published_workloads(published_dir, register, paper_workloads())["mt"]) == 406
    with pytest.raises(TraceError, match="no job trains t5_3B"):
        published_workloads(published_dir, register, ["t5_3B"])


def paper_workloads():
    return ["vit", "roberta", "bert", "t5", "gpt2", "llama7", "llama30"]


def test_what_was_sampled_is_known_and_the_rest_is_predicted(tables, knowledge):
    truth = pd.concat([table[table["feasible"]] for table in tables.values()], ignore_index=True)
    error = np.abs(knowledge["predicted_iter_time_s"] / truth["iter_time_s"] - 1)
    assert error[knowledge["known"]].max() < 1e-12
    assert 0 < error[~knowledge["known"]].mean() < 0.1
    assert 1 <= knowledge.groupby("workload")["known"].sum().max() <= 10


def test_knowing_everything_is_knowing_the_truth(scenarios):
    less = scenarios["base"]
    stated, everything = with_predictions(less, "requests"), with_predictions(less, "exact")
    assert stated.catalogue is less.catalogue
    assert [told.predictions for told in (less, stated, everything)] == ["sampled", "requests", "exact"]
    for key in KEYS:
        for known, item in zip(everything.catalogue.all(key), less.catalogue.all(key), strict=True):
            assert known.is_known and known.predicted_iter_time_s == known.iter_time_s == item.iter_time_s


def test_the_study_of_knowledge_compares_modes_on_the_same_lists(given):
    chosen = {"traces": ("mt",), "seeds": (1, 2), "policies": ("fifo", "sjf"), "std_s": 300.0}
    table = experiment("knowledge", **chosen).run(given)["knowledge"]
    assert list(zip(table["policy"], table["mode"], strict=True)) == [
        (policy, mode) for mode in ("sampled", "requests", "exact") for policy in ("fifo", "sjf")
    ]
    assert (table["lists"] == 2).all()
    sampled = table[table["mode"] == "sampled"]
    assert (sampled["jct_ratio_mean"] == 1).all() and (sampled["jct_ratio_high"] == 1).all()
    fifo = table[table["policy"] == "fifo"].set_index("mode")
    assert fifo["jct_mean_s"].nunique() == 1  # it decides by no time
    assert fifo.loc["sampled", "known_starts"] < fifo.loc["requests", "known_starts"] == 1.0
    assert (table[table["mode"] == "exact"]["known_starts"] == 1).all()
    logs = table["jct_mean_s"].to_numpy() / table["jct_ratio_mean"].to_numpy()
    assert logs[4:] == pytest.approx(logs[:2])


def test_what_devices_do_in_a_step_comes_from_the_model_and_reaches_whoever_shares_them(scenarios, knowledge):
    shares = knowledge[["computing_share", "moving_share"]]
    alone = knowledge["placement"] == "1"
    moved = knowledge["exec_plan"].str.contains("offload")
    assert shares.ge(0).all(axis=None) and shares.le(1).all(axis=None)
    assert (shares["computing_share"][alone & ~moved] > 0.9).all()  # nobody to wait for
    assert (shares["moving_share"][alone & ~moved] == 0).all()
    assert knowledge.groupby("workload")["computing_share"].mean()["llama7"] < 0.5
    catalogue = scenarios["base"].catalogue
    busy = {(it.plan, it.placement.text, it.cpu_threads): it.busy for it in catalogue.all("roberta")}
    rows = knowledge[knowledge["workload"] == "roberta"]
    keys = rows[["exec_plan", "placement", "cpu_threads"]].itertuples(index=False, name=None)
    assert busy == dict(zip(keys, shares.loc[rows.index].itertuples(index=False, name=None), strict=True))
    known = with_predictions(scenarios["base"], "exact").catalogue.all("roberta")
    assert [it.busy for it in known] == [it.busy for it in catalogue.all("roberta")]


def test_the_catalogue_runs_by_the_truth_and_shows_the_predictions(scenarios, tables):
    items = [item for key in KEYS for item in scenarios["base"].catalogue.all(key)]
    assert any(not item.is_known for item in items)
    for item in items:
        assert (item.predicted_iter_time_s == item.iter_time_s) == item.is_known or not item.is_known
    feasible = sum(int(table["feasible"].sum()) for table in tables.values())
    assert len(items) == feasible


def test_the_comparison_has_a_row_a_setting_and_what_is_drawn_from_it(scenarios):
    names = ("morphling-lookahead", "fifo")
    table4 = experiment("table4", traces=("base", "mt"), policies=names, shown=(*names, "sia"))
    found = table4.simulated(scenarios, Given("emulated", n_threads=2))
    table4 = found["table4"]
    assert len(table4) == 8
    assert table4["n_repeats"].sum() == table4["n_identical"].sum() == 2
    mine = table4[table4["policy"] == "morphling-lookahead"]
    assert (mine["jct_ratio_to_lookahead"] == 1).all()
    assert (mine.loc[mine["trace"] == "mt", "sla_attainment"] == 1).all()
    assert len(found["jct"]) == 4 * 30
    base = table4[(table4["restart_delay_s"] == 260) & (table4["trace"] == "base")]
    means = found["jct"][found["jct"]["trace"] == "base"].groupby("policy")["jct_s"].mean()
    for policy, value in zip(base["policy"], base["avg_jct_s"], strict=True):
        assert means[policy] == pytest.approx(value)
    wide = allocation_by_family(found["allocation"])
    assert list(wide["policy"].unique()) == ["morphling-lookahead", "fifo"]
    held = wide.drop(columns=["policy", "time_s"]).sum(axis=1)
    assert wide["time_s"].min() == 0 and 0 < held.max() <= 64
    assert found["schedule"]["kind"].eq("finished").sum() == 30


def test_getting_started_runs_the_short_list(toys):
    changes = {"policies": ("morphling-lookahead", "fifo"), "restart_delays_s": (5.0,), "interval_s": 0.0}
    short = experiment("getting_started", **changes)
    table = short.simulated(toys, Given("emulated"))["getting_started"]
    assert table["trace"].tolist() == ["naive", "naive"]
    assert table["jobs"].tolist() == [2, 2]


def test_lists_are_drawn_anew_or_from_those_of_the_authors(tables, scenarios):
    times, traces = ReferenceTimes(tables), {"base": scenarios["base"].jobs, "mt": scenarios["mt"].jobs}
    seeds = {"shifted": [1, 2], "subsampled": [1], "generated": [1, 3]}
    new = drawn_lists(traces, times, seeds, is_generated=True, std_s=900.0, share=0.8)
    assert list(new) == [(trace, "generated", seed) for trace in traces for seed in (1, 3)]
    assert new["base", "generated", 1] == traces["base"] != new["base", "generated", 3]
    assert any(job.is_guaranteed for job in new["mt", "generated", 3])
    drawn = drawn_lists(traces, times, seeds, is_generated=False, std_s=900.0, share=0.8)
    ways = [("shifted", 1), ("shifted", 2), ("subsampled", 1)]
    assert list(drawn) == [(trace, *way) for trace in traces for way in ways]
    names = {job.job_id for job in traces["base"]}
    assert {job.job_id for job in drawn["base", "shifted", 1]} == names
    assert drawn["base", "shifted", 1] != drawn["base", "shifted", 2]
    assert len(drawn["base", "subsampled", 1]) == 24 and set(drawn["base", "subsampled", 1]) < set(
        traces["base"]
    )


def test_studies_have_a_row_a_simulation_and_a_summary(tables, scenarios):
    few = {"base": replace(scenarios["base"], jobs=scenarios["base"].jobs[:12])}
    given = Given("published", times=tables)
    names, two = ("fifo", "morphling-lookahead"), {"seeds": (1, 2), "policies": ("fifo",)}
    load = experiment("load", **two | {"policies": names}, factors=(0.5, 2.0)).simulated(few, given)
    rows, means = load["load"], load["load_summary"]
    assert rows.groupby(["load_factor", "policy"]).size().tolist() == [2] * 4
    assert means["parameter"].eq("load_factor").all() and means["seeds"].tolist() == [2] * 4
    one = rows[(rows["policy"] == "fifo") & (rows["load_factor"] == 2)]["avg_jct_s"]
    mean = means[(means["policy"] == "fifo") & (means["value"] == 2)]["jct_mean_s"].iloc[0]
    assert mean == pytest.approx(float(np.exp(np.log(one).mean())))
    shares = experiment("large_models", **two, shares=(0.0, 1.0)).simulated(few, given)["large_models"]
    by_share = shares.groupby("large_share")["avg_jct_s"].mean()
    assert by_share[1.0] > by_share[0.0]
    rounds = experiment("rounds", **two, intervals_s=(0.0, 600.0)).simulated(few, given)["rounds"]
    by_round = rounds.groupby("interval_s")["avg_jct_s"].mean()
    assert by_round[600.0] > by_round[0.0]


def test_a_comparison_on_lists_has_a_row_a_simulation_and_leaves_out_what_cannot_run(scenarios):
    jobs = {name: scenarios[name].jobs[:12] for name in ("base", "mt")}
    known = {name: replace(scenarios[name], jobs=own) for name, own in jobs.items()}
    changes = {"seeds": Seeds.model_construct(shifted=(1, 2), subsampled=(), generated=()), "std_s": 60.0}
    changes |= {"policies": ("morphling", "fifo"), "ablations": ("morphling-n",), "gpus": (64, 8)}
    found = experiment("lists", **changes).simulated(known, Given("published"))
    rows = found["lists"]
    settings = rows.groupby(["trace", "gpus"], sort=False)["policy"].agg(lambda names: sorted(set(names)))
    assert settings["base", 64] == ["fifo", "morphling", "morphling-n"]
    assert [settings[key] for key in (("base", 8), ("mt", 64), ("mt", 8))] == [["fifo", "morphling"]] * 3
    fitting = sum(job.n_gpus <= 8 for job in jobs["base"])
    assert set(rows.loc[rows["gpus"] == 8, "jobs"]) == {fitting} and fitting < 12
    assert (rows.loc[rows["trace"] == "mt", "sla_attainment"] <= 1).all()
    summary = found["lists_summary"]
    own = summary[(summary["policy"] == "fifo") & (summary["gpus"] == 64)]
    logs = np.log(
        rows[(rows["policy"] == "fifo") & (rows["gpus"] == 64)].groupby("trace")["avg_jct_s"].mean()
    )
    assert own["lists"].tolist() == [2, 2] and own["jct_low_s"].lt(own["jct_high_s"]).all()
    assert own["jct_mean_s"].tolist() == pytest.approx(np.exp(logs).tolist(), rel=0.1)
    assert set(found["lists_pairs"]["policy"]) == {"morphling", "fifo"}


def test_pairs_divide_list_by_list_and_only_by_what_knows_no_more():
    rows = pd.DataFrame(
        [
            ("base", policy, seed, jct_s, 1.0)
            for policy, times in PAIRED.items()
            for seed, jct_s in enumerate(times)
        ],
        columns=["trace", "policy", "seed", "avg_jct_s", "makespan_s"],
    )
    pairs = paired(rows, ["trace"], ["seed"]).set_index(["policy", "rival"])
    assert set(pairs.index) == {("sjf", "fifo"), ("sjf", "sia"), ("fifo", "sia"), ("sia", "fifo")}
    one = pairs.loc[("sia", "fifo")]
    assert one["jct_ratio_mean"] == pytest.approx(2.0) and one["jct_ratio_low"] < 1 < one["jct_ratio_high"]
    assert (one["lists"], one["jct_wins"], one["makespan_wins"]) == (3, 2, 0)
    assert pairs.loc[("fifo", "sia"), "jct_ratio_mean"] == pytest.approx(0.5)
    assert paired(rows[rows["policy"] == "sia"], ["trace"], ["seed"]).empty


def test_what_is_said_of_policies_is_true_of_them():
    assert {name for name, one in REGISTRY.items() if one.is_clairvoyant} == CLAIRVOYANT
    assert set(RECONFIGURING) <= set(REGISTRY)


PAIRED = {"sia": [1.0, 4.0, 9.0], "fifo": [4.0, 16.0, 4.5], "sjf": [1.0, 1.0, 1.0]}


def test_a_cluster_has_whole_nodes(toys):
    assert of_size(toys["base"].cluster, 12).n_nodes == 3
    for n_gpus in (0, 6):
        with pytest.raises(InputError, match=f"cluster of {n_gpus} GPUs; expected a multiple of the 4"):
            of_size(toys["base"].cluster, n_gpus)


def test_scale_repeats_jobs_and_nodes(toys):
    sizes = (ScaleSize(jobs=1, gpus=1), ScaleSize(jobs=3, gpus=2))
    scale = experiment("scale", policies=("fifo",), sizes=sizes, delay_s=5.0, interval_s=0.0)
    table = scale.simulated(toys, Given("emulated"))["scale"]
    assert table["jobs"].tolist() == [6, 18] and table["gpus"].tolist() == [8, 16]
    for name in ("wall_s", "decision_wall_s"):
        assert (table[f"fastest_{name}"] > 0).all()
        assert (table[f"fastest_{name}"] <= table[name]).all()
        assert (table[name] <= table[f"slowest_{name}"]).all()
    assert (table["fastest_wall_s"] < table["slowest_wall_s"]).any()
    assert (table["simulations"] == 3).all()  # all are short


def test_guarantees_hold_in_truth_for_every_policy_that_declares_them(scenarios):
    guaranteed = replace(scenarios["mt"], restart_delay_s=260.0, interval_s=60.0)
    for name in sorted(REGISTRY):
        if REGISTRY[name].honours_guarantees:
            assert run(guaranteed, name).metrics.sla_attainment == 1.0, name
