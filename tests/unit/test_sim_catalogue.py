"""Jobs, configurations and the catalogue."""

import math

import pytest
from toy_cluster import find, throughput_rows, toy_catalogue, toy_job, toy_nodes, toy_tables

from makespan.errors import InputError, TraceError, UnknownNameError
from makespan.hardware import ClusterSpec, node
from makespan.plans import Placement
from makespan.sim import Allocation, Configuration
from makespan.studies import TableCatalogue


def configuration(**changes):
    values = {
        "workload": "roberta",
        "plan": "ga",
        "family": "DP",
        "placement": Placement((1, 3)),
        "cpu_threads": 4,
        "host_memory_bytes_per_gpu": 0.0,
        "iter_time_s": 1.0,
        "predicted_iter_time_s": 1.0,
        "provenance": "measured",
    }
    return Configuration(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"job_id": ""}, "job_id is ''"),
        ({"workload": ""}, "workload is ''"),
        ({"plan": ""}, "plan is ''"),
        ({"submit_time_s": -1.0}, "submit_time_s is -1.0"),
        ({"submit_time_s": math.nan}, "submit_time_s is nan"),
        ({"submit_time_s": math.inf}, "submit_time_s is inf"),
        ({"duration_s": -2.0}, "duration_s is -2.0"),
        ({"duration_s": math.nan}, "duration_s is nan"),
        ({"n_gpus": 0}, "n_gpus is 0"),
        ({"n_gpus": 1.5}, "n_gpus is 1.5"),
        ({"n_cpus": -1}, "n_cpus is -1"),
        ({"steps": -1}, "steps is -1"),
        ({"steps": math.nan}, "steps is nan"),
        ({"steps": math.inf}, "steps is inf"),
    ],
)
def test_a_job_names_the_field_that_cannot_be(changes, message):
    with pytest.raises(InputError, match=f"{message}; expected"):
        toy_job(**({"job_id": "a"} | changes))


def test_a_configuration_counts_its_devices_largest_share_first():
    item = configuration(placement=Placement.parse("131"))
    assert (item.counts, item.n_gpus, item.n_nodes) == ((3, 1, 1), 5, 3)


def test_equal_shares_on_the_same_nodes_are_one_allocation_in_whatever_order():
    item = configuration(placement=Placement.parse("1133"))
    allocation = item.on((4, 3, 2, 0))
    assert allocation == item.on((3, 4, 0, 2)) and hash(allocation) == hash(item.on((3, 4, 0, 2)))
    assert allocation.nodes == (0, 2, 3, 4) and allocation.shares == ((0, 1), (2, 1), (3, 3), (4, 3))
    assert allocation != item.on((2, 3, 4, 0))


def test_shares_of_other_devices_are_not_exchanged():
    item = configuration(placement=Placement.parse("22"), gpu_types=("a800-80", "v100-32"))
    assert item.on((1, 0)).nodes == (0, 1) and item.on((0, 1)).nodes == (1, 0)


def test_an_allocation_pairs_nodes_with_shares_and_writes_them_by_node():
    allocation = configuration().on((5, 2))  # three devices on node 5
    assert allocation.nodes == (2, 5)
    assert allocation.shares == ((2, 1), (5, 3))
    assert allocation.text == "2:1 5:3"


@pytest.mark.parametrize("nodes", [(1,), (1, 1), (0, 1, 2)])
def test_an_allocation_needs_one_node_for_each_share(nodes):
    with pytest.raises(InputError, match=r"expected 2 different node"):
        Allocation(configuration(), nodes)


def test_rows_that_cannot_run_are_left_out():
    catalogue = TableCatalogue.from_tables([throughput_rows("roberta", [("ga", "1", 0.0), ("ga", "2", 0.5)])])
    assert [item.placement.text for item in catalogue.all("roberta")] == ["2"]
    assert len(catalogue) == 1 and catalogue.workloads == ("roberta",)


def test_tables_may_come_by_workload():
    tables = {"any": toy_tables()[0]}
    assert TableCatalogue.from_tables(tables).workloads == ("roberta",)


def test_configurations_come_by_devices_nodes_counts_and_plan():
    items = toy_catalogue().all("t5")
    keys = [(item.n_gpus, item.n_nodes, item.counts, item.plan) for item in items]
    assert keys == sorted(keys)
    assert {item.family for item in items} == {"DP", "ZeRO-DP+GA", "ZeRO-Offload"}


def test_predictions_stand_beside_the_truth():
    table = throughput_rows("roberta", [("ga", "2", 1.0), ("zero-dp", "2", 2.0), ("gc", "2", 0.0)])
    believed = TableCatalogue.from_tables([table], {"roberta": [3.0, 1.5, math.nan]})
    assert [item.predicted_iter_time_s for item in believed.all("roberta")] == [3.0, 1.5]
    assert [item.iter_time_s for item in believed.all("roberta")] == [1.0, 2.0]


def test_predictions_are_one_for_each_row_and_positive():
    table = throughput_rows("roberta", [("ga", "2", 1.0), ("ga", "1", 2.0)])
    with pytest.raises(TraceError, match=r"1 predicted times for the 2 rows of 'roberta'"):
        TableCatalogue.from_tables([table], {"roberta": [1.0]})
    for wrong in (math.nan, 0.0, -1.0, math.inf):
        with pytest.raises(InputError, match=r"predicted_iter_time_s is"):
            TableCatalogue.from_tables([table], {"roberta": [1.0, wrong]})


def test_a_plan_that_does_not_make_the_devices_of_its_placement_is_named():
    with pytest.raises(TraceError, match=r"'122' on '11' of 'roberta'.*but the placement has 2"):
        TableCatalogue.from_tables([throughput_rows("roberta", [("122", "11", 1.0)])])
    with pytest.raises(TraceError, match=r"'ga' on 'x1' of 'roberta'"):
        TableCatalogue.from_tables([throughput_rows("roberta", [("ga", "x1", 1.0)])])


def test_a_configuration_occurs_once():
    with pytest.raises(InputError, match=r"ga on 13 with 4 thread.*occurs twice"):
        TableCatalogue([configuration(), configuration()])


def test_the_request_is_its_plan_on_the_fewest_nodes():
    wide_first = [("ga", "11", 0.1), ("ga", "2", 1.0), ("zero-dp", "2", 0.5)]
    catalogue = TableCatalogue.from_tables([throughput_rows("roberta", wide_first)])
    job = toy_job(n_gpus=2)
    assert catalogue.requested(job) is find(catalogue, "ga", "2")
    assert [item.placement.text for item in catalogue.as_requested(job)] == ["2", "11"]


def test_a_request_that_was_not_measured_is_the_fastest_plan_with_as_many_devices():
    rows = [("ga", "11", 0.9), ("zero-dp", "2", 1.0), ("zero-dp", "11", 0.8), ("gc", "1", 0.1)]
    catalogue = TableCatalogue.from_tables([throughput_rows("roberta", rows)])
    job = toy_job(n_gpus=2, plan="zero-offload")
    assert catalogue.requested(job).plan == "zero-dp"
    assert catalogue.requested(job).placement.text == "2"


def test_the_request_does_not_depend_on_the_predictions():
    rows = [("ga", "2", 1.0), ("zero-dp", "2", 2.0)]
    catalogue = TableCatalogue.from_tables([throughput_rows("roberta", rows)], {"roberta": [5.0, 1.0]})
    assert catalogue.requested(toy_job(n_gpus=2, plan="gc")).plan == "ga"


def test_a_size_that_was_not_measured_is_an_error_with_the_sizes_that_were():
    with pytest.raises(InputError, match=r"no configuration of 'roberta' with 3 GPUs.*1, 2, 4, 8"):
        toy_catalogue().requested(toy_job(n_gpus=3))


def test_an_unknown_workload_is_an_error_with_the_known_ones():
    with pytest.raises(
        UnknownNameError, match=r"'robert'; expected gpt2, roberta, t5. Did you mean 'roberta'"
    ):
        toy_catalogue().all("robert")


def test_a_cluster_keeps_what_fits_it():
    small = toy_catalogue().on(toy_nodes(2, 4))
    texts = {item.placement.text for item in small.all("roberta")}
    assert {"1", "4", "44", "13"} <= texts
    assert not texts & {"8", "1111", "2222", "17", "35"}
    assert toy_catalogue().on(toy_nodes(4, 8)) is toy_catalogue()
    assert small.on(toy_nodes(2, 4)) is small


def test_cpu_threads_and_host_memory_limit_what_fits():
    few_threads = toy_catalogue().on(toy_nodes(4, 8, cpu_threads=9))
    assert max(max(item.counts) for item in few_threads.all("roberta")) == 2
    rows = throughput_rows("llama7", [("zero-offload", "8", 1.0), ("zero-offload", "44", 1.0)])
    heavy = TableCatalogue.from_tables([rows], node=node("a800"))
    needed = heavy.all("llama7")[0].host_memory_bytes_per_gpu
    assert needed * 8 > 50e9
    assert TableCatalogue.from_tables([rows]).all("llama7")[0].host_memory_bytes_per_gpu == 0.0


def test_nodes_of_two_kinds_hold_what_fits_the_larger_ones():
    large, small = toy_nodes(1, 8), toy_nodes(1, 2)
    mixed = ClusterSpec("mixed", (*small.nodes, *large.nodes), large.network)
    texts = {item.placement.text for item in toy_catalogue().on(mixed).all("roberta")}
    assert {"8", "4", "13", "2"} <= texts
    assert not texts & {"44", "35", "112"}


def test_what_was_measured_beforehand_is_predicted_exactly_and_known():
    tables = toy_tables()
    key = str(tables[0]["workload"].iloc[0])
    known = [number % 2 == 0 for number in range(len(tables[0]))]
    wrong = [2.0 * time_s for time_s in tables[0]["iter_time_s"]]
    catalogue = TableCatalogue.from_tables(tables, {key: wrong}, known={key: known})
    items = catalogue.all(key)
    assert {item.is_known for item in items} == {True, False}
    for item in items:
        assert item.predicted_iter_time_s == (1.0 if item.is_known else 2.0) * item.iter_time_s
    others = [name for name in catalogue.workloads if name != key]
    assert all(item.is_known for name in others for item in catalogue.all(name))


def test_marks_must_be_as_many_as_rows():
    tables = toy_tables()
    key = str(tables[0]["workload"].iloc[0])
    with pytest.raises(TraceError, match="1 marks for the"):
        TableCatalogue.from_tables(tables, known={key: [True]})
