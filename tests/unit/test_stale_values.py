"""Values that follow from others: checked where they are stated, derived where they are asked for."""

from dataclasses import fields, replace
from itertools import permutations

import pytest

from makespan.emulator import emulate, explain, read_point
from makespan.errors import InputError
from makespan.hardware import ClusterSpec, cluster, homogeneous, node
from makespan.plans import Placement, memory_estimate, read_plan
from makespan.studies import run, scenario, with_predictions
from makespan.workloads import (
    BlockSpec,
    JobSpec,
    ModelSpec,
    Stack,
    head,
    layers,
    parameter_count,
    stack,
    workload,
)

GROUPED = BlockSpec(32, "causal", 8192, 4096, 32, 8, 14336, True, 128)


# --- parameters and layers ---------------------------------------------------------------------------


@pytest.mark.parametrize("stated", [1, 8_030, 803_026_124, 80_302_612_480])
def test_a_parameter_count_that_contradicts_the_layers_is_rejected(stated):
    with pytest.raises(InputError, match=f"parameters is {stated}, but its layers.* have 8030265344"):
        ModelSpec("own", "own", "llama", (GROUPED,), 128_257, False, 0, stated, "own")


@pytest.mark.parametrize(
    ("block", "vocab", "tied", "true"),
    [
        (GROUPED, 128_256, False, 8_030_261_248),  # fewer key and value heads
        (BlockSpec(80, "causal", 8192, 8192, 64, 8, 28_672, True, 128), 128_256, False, 70_553_706_496),
        (
            BlockSpec(28, "causal", 1024, 1024, 16, 8, 3072, True, 128),
            151_936,
            True,
            596_049_920,
        ),  # wide heads
    ],
)
def test_published_counts_of_models_with_grouped_queries_agree_with_their_layers(block, vocab, tied, true):
    stated = ModelSpec("own", "own", "llama", (block,), vocab, tied, 0, true, "own")
    assert stated.parameters == true
    assert parameter_count(stated) == pytest.approx(true, rel=2e-5)


def test_a_model_that_states_no_count_has_that_of_its_layers():
    derived = ModelSpec("own", "own", "llama", (GROUPED,), 128_257, False, 0, 0, "own")
    ends = head(derived)
    total = (
        sum(layer.parameters for layer in layers(derived)) + ends.embedding_parameters + ends.head_parameters
    )
    assert derived.parameters == parameter_count(derived) == total
    with pytest.raises(InputError, match="or 0 for what they have"):
        replace(derived, blocks=(replace(GROUPED, n_layers=16),))
    halved = replace(derived, blocks=(replace(GROUPED, n_layers=16),), parameters=0)
    assert halved.parameters == pytest.approx(total - 16 * layers(derived)[0].parameters)


def test_a_decoder_without_an_encoder_is_rejected():
    with pytest.raises(InputError, match=r"no 'enc' block; add one, or use kind 'causal'"):
        ModelSpec("own", "own", "llama", (replace(GROUPED, kind="dec"),), 128_257, False, 0, 0, "own")


def test_lengths_of_model_parallel_plans_that_the_blocks_contradict_are_rejected():
    with pytest.raises(InputError, match="2 lengths, 1 blocks"):
        replace(workload("gpt2"), model_parallel_seq=(512, 512))


# --- gradients in memory and on the wire -------------------------------------------------------------


def with_stack(software: Stack):
    return replace(workload("gpt2"), data_parallel_stack=software, model_parallel_stack=software)


def states_and_wire(plan: str, software: Stack) -> tuple[float, float]:
    """Return the bytes of all states, and the time of the exchanges [s], on 8 devices of one node."""
    spec, where = with_stack(software), cluster("a800-64")
    point = read_point(spec, plan, "8", 8)
    found = explain(spec, point, where)
    wire_s = found.terms_s["gradient_exchange"] + found.terms_s["parameter_gather"]
    return found.memory_bytes["states"], wire_s


@pytest.mark.parametrize("plan", ["zero-dp", "zero-dp+zero1", "zero-dp+zero3"])
def test_the_width_of_a_partitioned_gradient_is_one_fact(plan):
    narrow, wide = (replace(stack("zero-eager"), partitioned_bytes=width) for width in (2, 4))
    (states, wire_s), (wider, longer_s) = states_and_wire(plan, narrow), states_and_wire(plan, wide)
    assert wider > states and longer_s > 1.5 * wire_s


def test_all_states_of_plain_data_parallelism_take_16_bytes_whatever_the_width_of_a_gradient():
    spec, place = workload("bert"), Placement.parse("4")
    for width in (2, 4):
        software = replace(stack("zero-eager"), gradient_bytes=width)
        changed = replace(spec, data_parallel_stack=software)
        plan = read_plan("ga", n_gpus=4, global_batch_size=spec.global_batch_size)
        found = memory_estimate(plan, changed, node("a800"), place)
        assert found.bytes_by_component["states"] == pytest.approx(16 * spec.model.parameters)


@pytest.mark.parametrize("name", ["gradient_bytes", "partitioned_bytes"])
@pytest.mark.parametrize("width", [0, 8, 2.5, -2])
def test_a_gradient_of_no_width_is_rejected(name, width):
    with pytest.raises(InputError, match=f"{name} is {width}; expected a whole number of bytes from 1 to 4"):
        replace(stack("modern"), **{name: width})


# --- mixed clusters ----------------------------------------------------------------------------------


def mixed(order: tuple[str, ...]) -> ClusterSpec:
    return ClusterSpec("mixed", tuple(node(name) for name in order), cluster("v100-p100-t4-64").network)


@pytest.mark.parametrize("placement", ["1", "4", "8", "44", "48", "88", "448", "488"])
@pytest.mark.parametrize("model", ["bert", "vit", "gpt2"])
def test_emulated_times_do_not_depend_on_the_order_of_nodes(placement, model):
    spec = workload(model)
    rows = []
    for order in sorted(set(permutations(("p3dn", "p100", "t4", "t4")))):
        points = []
        for plan in ("ga", "zero-dp", "zero-offload"):
            try:
                points.append(read_point(spec, plan, placement, 8))
            except InputError:
                continue  # the batch does not divide
        frame = emulate(spec, points, mixed(order), seed=3, noise=1.0)
        rows.append(frame)
    assert all(frame.equals(rows[0]) for frame in rows)
    if placement in ("1", "4", "8"):  # on the node with the fastest memory
        alone = homogeneous(node("p3dn"), 1, mixed(("p3dn",)).network, "mixed")
        assert rows[0].equals(emulate(spec, points, alone, seed=3, noise=1.0))


def test_a_mixed_placement_is_as_slow_as_its_slowest_node_and_fits_shares_where_they_fit():
    spec, order = workload("bert"), ("t4", "p3dn")
    point = read_point(spec, "ga", "44", 8)
    both = emulate(spec, [point], mixed(order))["iter_time_s"].iloc[0]
    fast = emulate(spec, [point], mixed(("p3dn", "p3dn")))["iter_time_s"].iloc[0]
    assert both > fast
    fits = read_point(spec, "zero-dp", "4-12", 8)
    found = explain(spec, fits, mixed(order))
    assert not found.feasible and "more GPUs on a node" in found.reason
    larger = replace(spec, global_batch_size=48)
    assert explain(larger, read_point(larger, "ga", "48", 8), mixed(order)).feasible


def test_a_placement_on_more_nodes_than_there_are_cannot_run():
    spec, where = workload("bert"), cluster("a800-8")
    found = explain(spec, read_point(spec, "ga", "44", 8), where)
    assert not found.feasible and "has 2 nodes, cluster 'a800-8' 1" in found.reason


# --- scenarios -----------------------------------------------------------------------------------------

JOBS = [JobSpec("a", 0.0, "roberta", 2, 16, "zero-dp", 40)]


def test_a_scenario_rejects_a_cluster_for_which_its_times_do_not_hold():
    found = scenario(JOBS)
    for other in (cluster("h200-64"), replace(cluster("a800-64"), network=cluster("p3dn-64").network)):
        with pytest.raises(
            InputError, match="its iteration times hold for nodes and network of cluster 'a800-64'"
        ):
            replace(found, cluster=other)
    more = replace(found, cluster=homogeneous(found.cluster.node, 20, found.cluster.network))
    assert more.cluster.n_gpus == 160 and run(more, "fifo").metrics.n_jobs == 1


def test_a_scenario_rejects_a_label_that_its_catalogue_contradicts():
    found = scenario(JOBS, predictions="sampled")
    with pytest.raises(InputError, match=r"predictions are 'exact'.*with_predictions"):
        replace(found, predictions="exact")
    known = with_predictions(found, "exact")
    assert known.predictions == "exact" and replace(found, predictions="requests").predictions == "requests"


def test_a_scenario_without_a_word_on_its_cluster_is_taken_as_it_is():
    found = replace(scenario(JOBS), made_for=None)
    assert replace(found, cluster=cluster("h200-64")).cluster.name == "h200-64"
    assert "made_for" in {field.name for field in fields(found)}
