"""Jobs that train models of the user, on clusters of the user, with predicted steps."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from makespan import compare, scenario, simulate
from makespan.errors import InfeasiblePlanError, InputError, TraceError, UnknownNameError
from makespan.hardware import cluster, homogeneous, read_pools
from makespan.papers.experiment import Given
from makespan.papers.morphling.today import Exchange, Today, exchanged
from makespan.perf import environment_of, load_environment
from makespan.planning import Pricer, parse_layout
from makespan.plans import Placement, read_plan
from makespan.studies import predictions, site, with_models
from makespan.throughput import (
    FASTEST,
    EmulatedSource,
    PlannedSource,
    ReferenceTimes,
    best_plans,
    fitted_workload,
    is_planned,
    planned_workload,
    requested_label,
    sampled_plans,
)
from makespan.traces import read_jobs, write_jobs
from makespan.workloads import JobSpec

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
HEAD = "job_id,submit_time_s,workload,n_gpus,n_cpus,plan,steps,seq,batch,precision,stack\n"


@pytest.fixture
def own(tmp_path):
    """Return a model file."""
    path = tmp_path / "small.json"
    path.write_text(json.dumps(CONFIG))
    return path


def listed(tmp_path, *rows):
    """Return a job list with the given rows."""
    path = tmp_path / "jobs.csv"
    path.write_text(HEAD + "".join(f"{row}\n" for row in rows))
    return path


def source_of(text, key):
    """Return the source of predicted times on machines."""
    place = site(text)
    return with_models(EmulatedSource(place.cluster, "L1", 0, 0.0), place, [key])


def test_a_workload_is_one_text_with_all_facts_of_its_run(own):
    known = planned_workload("llama3-8b", batch=64, stack_name="torchtitan")
    assert known.key == "llama3-8b seq4096 batch64 bf16 torchtitan"
    assert planned_workload(known.key) == known
    assert planned_workload(str(own)).training.seq == 2048  # the model takes no more
    with pytest.raises(UnknownNameError, match=r"stack of workload 'llama3-8b'.*got 'megatrn'|megatrn"):
        planned_workload("llama3-8b", stack_name="megatrn")
    with pytest.raises(InputError, match="seq is stated as 8192, too"):
        planned_workload(known.key, seq=8192)


def test_names_of_the_zoo_come_first_unless_a_text_says_more():
    assert not is_planned("roberta") and not is_planned("llama2-7b") and not is_planned("my-measured-job")
    assert is_planned("llama3-8b") and is_planned("models/config.json")
    assert is_planned("llama2-7b seq4096 batch512 bf16 fsdp")


def test_a_table_has_the_fastest_layout_that_fits_of_each_plan_and_placement(own):
    key = planned_workload(str(own), batch=16).key
    source = source_of("16xh100-80", key)
    assert isinstance(source, PlannedSource) and source.name == "predicted"
    table = source.load(key)
    assert not table.duplicated(["exec_plan", "placement"]).any()
    assert (table["iter_time_s"] > 0).all() and set(table["provenance"]) == {"predicted"}
    layouts = source.layouts(key)
    for row in table.sample(20, random_state=1).to_dict("records"):
        place = Placement.parse(row["placement"])
        read_plan(row["exec_plan"], n_gpus=place.n_gpus, global_batch_size=16)
        layout = parse_layout(layouts[row["exec_plan"], row["placement"]], place.n_gpus)
        assert requested_label(layout.text, place.n_gpus, 16) == row["exec_plan"]
        there = source.pool.with_gpus(place.n_gpus, place.gpus_per_node[0])
        planned = planned_workload(key)
        priced = Pricer(planned.training, there, planned.stack).price(layout)
        assert priced.is_feasible
        assert priced.step_s == pytest.approx(row["iter_time_s"], rel=1e-6)
    fewest = best_plans(table)
    on_eight = table[table["placement"] == "8"]
    assert on_eight.loc[on_eight["iter_time_s"].idxmin(), "exec_plan"] == fewest[8]


def test_plans_that_do_not_fit_are_left_out_and_a_model_that_never_fits_is_an_error():
    key = planned_workload("llama3-8b", batch=64).key
    table = source_of("16xh100-80", key).load(key)
    assert 1 not in best_plans(table) and 8 in best_plans(table)
    assert not {"ga", "zero-dp+zero1"} & set(table[table["placement"] == "2"]["exec_plan"])
    large = planned_workload("llama3-70b", batch=64).key
    with pytest.raises(InfeasiblePlanError, match=r"no layout fits on '8xh100-80': .* needs \d+ GiB"):
        source_of("8xh100-80", large).load(large)


def test_requests_are_layouts_plans_of_tables_or_the_fastest():
    assert requested_label("", 8, 64) == FASTEST
    assert requested_label("tp2 pp2 mb1", 8, 64) == "222+zero1"
    assert requested_label("fsdp recompute=full", 8, 64) == "zero-dp+zero3+gc"
    assert requested_label("cp2 tp2", 8, 64) == "142+zero1"
    assert requested_label("1-2-4", 8, 64) == "124"
    with pytest.raises(InputError, match="not a multiple"):
        requested_label("tp3", 8, 64)


def test_a_list_names_models_by_file_beside_it_with_what_differs_from_the_defaults(tmp_path, own):
    path = listed(
        tmp_path,
        "a,0,small.json,2,0,,10,1024,16,,fsdp",
        "b,5,llama3-8b,8,0,tp2 pp2 mb1,10,,64,,",
        "c,9,roberta,2,16,zero-dp,100,,,,",
    )
    trace = read_jobs(path)
    folder = str(tmp_path / "small.json")
    assert [job.workload for job in trace.jobs] == [
        f"{folder} seq1024 batch16 bf16 fsdp",
        "llama3-8b seq4096 batch64 bf16 megatron-bridge",
        "roberta",
    ]
    assert [job.plan for job in trace.jobs] == [FASTEST, "tp2 pp2 mb1", "zero-dp"]
    assert "those of 'makespan plan' are taken (rows 1, 2)" in trace.report.text
    assert "repaired 1 row: states no plan; the fastest one is taken (row 1)" in trace.report.text
    write_jobs(trace.jobs, tmp_path / "again.csv")
    assert read_jobs(tmp_path / "again.csv").jobs == trace.jobs


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,0,nowhere.json,2,0,,10,,,,", r"row 1.*'workload'.*nowhere\.json: no such file"),
        ("a,0,small.json,2,0,,10,0,,,", r"row 1.*'seq'.*a whole number, 1 or more"),
        ("a,0,small.json,2,0,,10,,,bf17,", r"row 1.*'workload'.*precision of workload.*bf17"),
        ("a,0,roberta,2,0,ga,10,512,,,", r"row 1.*nothing in column 'seq'"),
        ("a,0,small.json,2,0,tp5 pp2,10,,,,", r"row 1.*'plan'.*2 GPUs are not a multiple"),
        ("a,0,small.json,2,0,fastst,10,,,,", r"row 1.*'plan'.*fastest, a layout such as"),
        ("a,0,llama3-9b,2,0,,10,,,,", r"row 1.*'workload'.*a model of your own"),
    ],
)
def test_a_wrong_cell_is_named(tmp_path, own, row, message):
    with pytest.raises(TraceError, match=message):
        read_jobs(listed(tmp_path, row))


def test_all_policies_run_on_machines_of_a_file_and_decide_by_ten_sampled_rows(tmp_path, own):
    machines = tmp_path / "ours.toml"
    machines.write_text('device = "h100-80"\nn_gpus = 16\nnetwork_gb_per_s = 25\n')
    path = listed(
        tmp_path,
        "a,0,small.json,2,0,,4000,1024,64,,",
        "b,5,small.json,16,0,tp2 mb1,1000,1024,64,,",
        "c,9,small.json,4,0,fsdp,3000,1024,64,,fsdp",
    )
    given = scenario(path, cluster_name=machines)
    assert given.cluster.name == "ours" and given.predictions == "sampled" and given.source == "predicted"
    assert "tp2 mb1 of" in given.report and "plan 128+zero1, layout tp2" in given.report
    for key in given.catalogue.workloads:
        items = given.catalogue.all(key)
        assert sum(item.is_known for item in items) == 10
        known = [item for item in items if item.is_known]
        assert all(item.iter_time_s == item.predicted_iter_time_s for item in known)
        assert any(item.iter_time_s != item.predicted_iter_time_s for item in items)
    table = compare(given, ["fifo", "sia", "tiresias", "antman", "morphling", "morphling-work"])
    assert (table["avg_jct_s"] > 0).all()
    exact = scenario(path, cluster_name=machines, predictions="exact")
    assert all(item.is_known for key in exact.catalogue.workloads for item in exact.catalogue.all(key))


def test_a_mixed_cluster_has_times_of_each_type_and_the_zoo_beside_own_models(tmp_path, own):
    machines = tmp_path / "mixed.toml"
    machines.write_text(
        '[[machines]]\ndevice = "h100-80"\nn_gpus = 8\n[[machines]]\ndevice = "l4"\nn_gpus = 8\n'
    )
    path = listed(tmp_path, "a,0,small.json,4,0,,300,1024,64,,", "b,5,roberta,2,16,zero-dp,200,,,,")
    given = scenario(path, cluster_name=machines)
    assert given.predictions == "exact" and given.source == "mixed emulated and predicted, given as emulated"
    own_items = given.catalogue.all(given.jobs[0].workload)
    steps_s = {
        kind: min(item.iter_time_s for item in own_items if item.gpu_types == (kind,))
        for kind in ("h100-80", "l4")
    }
    assert steps_s["h100-80"] < steps_s["l4"]
    done = simulate(given, "gavel")
    assert len(done.result.outcomes) == 2


def test_a_device_that_the_planner_lacks_is_named(own):
    with pytest.raises(InputError, match="cannot be predicted on p100-16; expected one of the devices"):
        scenario([JobSpec("a", 0.0, str(own), 2, 0, FASTEST, 10)], cluster_name="p100-64")


def test_jobs_in_python_run_on_clusters_of_the_catalogue(own):
    given = scenario([JobSpec("a", 0.0, str(own), 2, 0, FASTEST, 10)], cluster_name="a800-64")
    assert given.jobs[0].workload == f"{own} seq2048 batch512 bf16 megatron-bridge"
    assert given.predictions == "sampled"
    with pytest.raises(InfeasiblePlanError, match=r"job 'a', on cluster 'a800-64': plan '124'.*replicates"):
        scenario([JobSpec("a", 0.0, str(own), 8, 0, "124", 10)], cluster_name="a800-64")
    with pytest.raises(InfeasiblePlanError, match=r"no plan of .* fits on 7 GPUs"):
        scenario([JobSpec("a", 0.0, str(own), 7, 0, FASTEST, 10)], cluster_name="a800-64")


def test_pools_come_from_texts_and_files(tmp_path):
    both = read_pools("16xh100-80+8xl4")
    assert [(one.name, one.n_gpus) for one in both] == [("h100-80", 16), ("l4", 8)]
    path = tmp_path / "c.toml"
    path.write_text('[[machines]]\ndevice="h100-80"\nn_gpus=8\n[[machines]]\ndevice="h100-80"\nn_gpus=8\n')
    with pytest.raises(InputError, match="two parts are called 'h100-80'; expected a name for each"):
        read_pools(path)
    path.write_text(path.read_text() + 'name="slow"\nnetwork_gb_per_s=5\n')
    assert [one.name for one in read_pools(path)] == ["h100-80", "slow"]
    assert read_pools(path)[1].gpu.kind == "h100-80"
    path.write_text('[[machines]]\ndevice="h100-80"\nn_gpus=8\n[[machines]]\ndevice="h100-80"\nn_gpu=8\n')
    with pytest.raises(InputError, match=r"c\.toml: machines 2: unknown field 'n_gpu'"):
        read_pools(path)


def test_constants_of_an_unmeasured_cluster_follow_its_links():
    where = site("16xh100-80").cluster
    made, node = environment_of(where).constants, where.node
    assert made.intra_bandwidth_bytes_per_s == pytest.approx(0.8 * node.intra_bandwidth_bytes_per_s)
    assert made.nic_bandwidth_bytes_per_s == pytest.approx(0.8 * node.nic_bandwidth_bytes_per_s)
    neutral = load_environment("a800-64").neutral
    assert made.straggler_s == neutral["straggler_s"].median


def test_the_fitted_model_sees_the_size_of_a_model_and_predicts_what_it_did_not_sample(own):
    planned = planned_workload(str(own), batch=16)
    seen = fitted_workload(planned).model
    assert seen.parameters == pytest.approx(planned.training.model.parameters, rel=0.01)
    table = source_of("16xh100-80", planned.key).load(planned.key)
    assert sampled_plans(table).sum() == 10
    shuffled = table.iloc[::-1].reset_index(drop=True)
    assert set(sampled_plans(shuffled)) == {False, True}
    made = predictions({planned.key: table}, environment_of(site("16xh100-80").cluster), "extended")
    ratio = made["predicted_iter_time_s"] / table["iter_time_s"]
    assert made["known"].sum() == 10 and (ratio[made["known"]] == 1).all()
    assert np.median(np.abs(np.log(ratio))) < 0.5


def test_lists_of_the_testbed_keep_arrivals_and_gpu_time_with_models_of_today(own):
    requests = [("roberta", 1, "ga"), ("roberta", 4, "zero-dp"), ("llama7", 8, "zero-offload")]
    requests.append(("llama7", 16, "182"))
    jobs = tuple(
        JobSpec(f"{n}", float(n), name, n_gpus, 8 * n_gpus, plan, 10, duration_s=900.0)
        for n, (name, n_gpus, plan) in enumerate(requests)
    )
    keys = {
        "roberta": planned_workload(str(own), batch=240).key,
        "llama7": planned_workload("mixtral-8x7b", batch=240).key,
    }
    tables = {name: source_of("32xh100-80", key).load(key) for name, key in keys.items()}
    changed = exchanged(jobs, keys, tables, 8)
    assert [job.submit_time_s for job in changed] == [job.submit_time_s for job in jobs]
    assert [job.n_gpus for job in changed] == [1, 4, 16, 16]  # Mixtral does not fit on 8
    assert [job.plan for job in changed[:2]] == ["zero-dp+zero1", "zero-dp+zero3"]
    for before, after in zip(jobs, changed, strict=True):
        assert after.n_gpus * after.duration_s == pytest.approx(before.n_gpus * before.duration_s)
        step_s = (
            ReferenceTimes({after.workload: tables[before.workload]})
            .requested(after.workload, after.n_gpus, after.plan)
            .iter_time_s
        )
        assert abs(after.steps * step_s - after.duration_s) <= step_s


def test_the_study_of_models_of_today_has_a_row_per_list_and_policy_and_pairs(own):
    testbed = EmulatedSource(cluster("a800-64"), "L1", 0, 1.0)
    times = {"roberta": testbed.load("roberta")}
    study = Today(
        machines="16xh100-80",
        models=(Exchange(workload="roberta", model=str(own)),),
        seq=1024,
        seeds=(1, 2),
        policies=("morphling", "sia", "fifo"),
    ).model_copy(
        update={
            "workloads": ("roberta",),
            "told": "sampled",
            "delay_s": 260.0,
            "interval_s": 60.0,
            "jobs": 12,
        }
    )
    made = study.compute(Given("emulated", times=times))
    assert len(made["today"]) == 6 and set(made["today"]["jobs"]) == {12}
    summary = made["today_summary"].set_index("policy")
    assert (summary["lists"] == 2).all()
    assert (summary["jct_low_s"] <= summary["jct_mean_s"]).all()
    assert len(made["today_pairs"]) == 6
    again = study.compute(Given("emulated", times=times))
    pd.testing.assert_frame_equal(made["today"], again["today"])
    with pytest.raises(InputError, match="models: none in place of roberta"):
        study.model_copy(update={"models": ()}).compute(Given("emulated", times=times))


def test_nodes_of_two_kinds_are_one_pool_of_the_larger():
    place = site("12xh100-80")
    assert [node.n_gpus for node in place.cluster.nodes] == [8, 4]
    same = replace(place.cluster.nodes[0])
    assert homogeneous(same, 2, place.cluster.network).n_gpus == 16
