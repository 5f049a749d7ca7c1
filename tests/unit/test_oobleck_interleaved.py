"""Interleaved stages: the order of passes, who holds which layers, the cut, bits, and what is refused.

Runs whose processes are killed: ``differential/test_oobleck_interleaved_runs.py``.
"""

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from chain_nodes import Nodes, carry_out, interleaved, plan_of, small_job
from hypothesis import given, settings, strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from makespan.errors import InputError
from makespan.oobleck.instantiation import distribute, estimated_time_s, schedule_times_s
from makespan.oobleck.interleaving import interleaved_passes, interleaved_templates, interleaved_time_s
from makespan.oobleck.oracle import ReferenceTrainer
from makespan.oobleck.plan import HybridPlan, Pipeline, check_plan, live_workers, owners
from makespan.oobleck.planner import ReconfigurationPlanner
from makespan.oobleck.profile import LayerProfile, ModelProfile, random32, uniform24
from makespan.oobleck.reconfiguration import node_layers, reconfigure
from makespan.oobleck.requests import WORK, Work
from makespan.oobleck.stage import interleaved_instructions, stage_place
from makespan.oobleck.templates import covering_templates, make_templates
from makespan.oobleck.trainer import LiveOptions
from makespan.plans import interleaved_order
from makespan.runtime.protocol import ClusterState

ORDERS = ["1f1b", "zero-bubble"]
PASSES = {"fwd": "F", "bwd": "B", "bwd_weights": "W"}
SIZES = list(itertools.product(range(2, 6), (2, 3)))


# --- order of the passes ----------------------------------------------------------------------------


@pytest.mark.parametrize(("n_nodes", "n_chunks"), SIZES)
def test_an_iteration_takes_as_long_as_the_interleaved_order_promises(n_nodes, n_chunks):
    """Stages are equal, and a node takes a unit of time per forward pass; a cycle of waits would not end."""
    template, each = _equal(n_nodes, n_chunks), (1.0 / n_chunks,) * (n_nodes * n_chunks)
    for count in range(1, 3 * n_nodes + 2):
        whole = interleaved_time_s(each, tuple(2 * one for one in each), n_nodes, count)
        # Times are shares of the longest stage, of which a third is a forward pass.
        parts = max(step.end_s for step in interleaved_passes(template, count, True)) * 3 / n_chunks
        if count >= n_nodes:
            assert whole == pytest.approx(3 * count + 3 * (n_nodes - 1) / n_chunks)
            assert parts == pytest.approx(3 * count + (n_nodes - 1) / n_chunks)
        else:
            assert whole == pytest.approx(3 * n_nodes + 3 * (count - 1) / n_chunks)
            late, crossing = 2 * count + n_nodes, 2 * n_nodes
            assert parts == pytest.approx(
                max(late + (n_nodes - 1) / n_chunks, crossing + (2 * count - 1) / n_chunks)
            )


def _equal(n_nodes, n_chunks):
    return interleaved(n_nodes, *range(1, n_nodes * n_chunks + 1))


@pytest.mark.parametrize(("n_nodes", "n_chunks"), SIZES)
def test_a_node_keeps_what_it_warms_up_with_and_its_stages_take_microbatches_in_order(n_nodes, n_chunks):
    for count, place in itertools.product(range(1, 3 * n_nodes + 2), range(n_nodes)):
        longest = -(-count // max(1, count // n_nodes))
        assert longest < 2 * n_nodes
        order = interleaved_order(place, n_nodes, n_chunks, count, splits_backward=True)
        whole = [each for each in order if each[0] != "W"]
        assert whole == interleaved_order(place, n_nodes, n_chunks, count)
        kept = itertools.accumulate({"F": 1, "B": -1}[kind] for kind, _, _ in whole)
        assert max(kept) <= 2 * (n_nodes - 1 - place) + (n_chunks - 1) * longest + 1
        left = itertools.accumulate({"F": 0, "B": 1, "W": -1}[kind] for kind, _, _ in order)
        assert max(left) <= place + 1
        for kind, chunk in itertools.product("FBW", range(n_chunks)):
            found = [k for one, c, k in order if (one, c) == (kind, chunk)]
            assert found == list(range(count))


@pytest.mark.parametrize(("n_nodes", "n_chunks"), SIZES)
def test_the_order_is_that_of_torch_where_torch_has_one(n_nodes, n_chunks):
    counts = [n for n in range(1, 4 * n_nodes) if n % max(1, n // n_nodes) == 0]
    for count, place in itertools.product(counts, range(n_nodes)):
        schedule = SimpleNamespace(
            n_local_stages=n_chunks, microbatches_per_round=count // max(1, count // n_nodes),
            pp_group_size=n_nodes, _n_microbatches=count,
        )  # fmt: skip
        theirs = [
            (one.computation_type.name, one.stage_index // n_nodes, one.microbatch_index)
            for one in ScheduleInterleaved1F1B._calculate_single_rank_operations(schedule, place)
            if one is not None
        ]
        ours = interleaved_order(place, n_nodes, n_chunks, count)
        names = {"F": "FORWARD", "B": "FULL_BACKWARD"}
        assert [(names[kind], *rest) for kind, *rest in ours] == theirs


@st.composite
def pipelines(draw):
    """Draw a pipeline with interleaved stages of any latency."""
    n_nodes, n_chunks = draw(st.integers(2, 4)), draw(st.integers(2, 3))
    template, n_stages = _equal(n_nodes, n_chunks), n_nodes * n_chunks
    latencies = draw(st.lists(st.sampled_from([0.0, 1.0, 2.5, 3.0]), min_size=n_stages, max_size=n_stages))
    stages = tuple(replace(one, latency_s=time) for one, time in zip(template.stages, latencies, strict=True))
    nodes = tuple(draw(st.permutations(range(5, 5 + n_nodes))))
    return Pipeline(nodes, replace(template, stages=stages), draw(st.integers(1, 11)))


@given(pipelines(), st.sampled_from(ORDERS))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_passes_and_transfers_fit_and_never_wait_for_each_other(pipeline, pass_order):
    """Even if every transfer blocks until the other side takes part in it."""
    plan, n_stages = HybridPlan((pipeline,)), pipeline.template.n_stages
    waiting = {node: interleaved_instructions(pipeline, node, pass_order) for node in plan.nodes}
    places = {
        node: [stage_place(plan, node, pass_order, each) for each in range(pipeline.template.interleave)]
        for node in plan.nodes
    }
    kinds = ["fwd", "bwd", *(["bwd_weights"] if pass_order == "zero-bubble" else [])]
    passes = [
        (places[node][one.chunk].index, one.kind, one.microbatch)
        for node, stream in waiting.items()
        for one in stream
        if one.kind in kinds
    ]
    everything = itertools.product(range(n_stages), kinds, range(pipeline.n_microbatches))
    assert sorted(passes) == sorted(everything)
    for node, stream in waiting.items():
        kept, ends = {}, {(one.microbatch, one.chunk): number for number, one in enumerate(stream)}
        free = []
        for number, one in enumerate(stream):
            each = one.microbatch, one.chunk
            if one.buffer in free:  # what it sent last should have arrived
                assert free.index(one.buffer) == 0 and len(free) > 2
                free.remove(one.buffer)
            assert kept.setdefault(one.buffer, each) == each, "a buffer in use is taken"
            if ends[each] == number:
                del kept[one.buffer]
                free.append(one.buffer)
            assert one.kind != "load" or places[node][one.chunk].index in (0, n_stages - 1)
        order = [(PASSES[one.kind], one.chunk, one.microbatch) for one in stream if one.kind in kinds]
        wanted = interleaved_order(
            pipeline.nodes.index(node), len(pipeline.nodes), pipeline.template.interleave,
            pipeline.n_microbatches, pass_order == "zero-bubble",
        )  # fmt: skip
        assert order == wanted

    def receiver(node, sent):
        place, step = places[node][sent.chunk], 1 if sent.kind == "send_act" else -1
        there = place.neighbours(sent.microbatch)[step == 1]
        return there, (place.index + step) // len(pipeline.nodes)

    carry_out(waiting, receiver)


# --- layers of the nodes, and the cut ---------------------------------------------------------------


def test_layers_of_a_node_are_several_ranges():
    plan = plan_of(((4, 7), (1, 3, 4, 6), 5), ((2,), (6,), 1))
    check_plan(plan, 6, 6)
    template = plan.pipelines[0].template
    assert template.interleave == 2 and plan.pipelines[1].template.interleave == 1
    assert node_layers(template) == ((0, 3), (1, 2, 4, 5))
    assert [owners(plan, layer) for layer in range(6)] == [(4, 2), (7, 2), (7, 2), (4, 2), (7, 2), (7, 2)]
    assert template.rank_grid([8, 9]) == {0: (8,), 1: (9,), 2: (9,), 3: (8,), 4: (9,), 5: (9,)}
    places = [stage_place(plan, 4, chunk=chunk) for chunk in range(2)]
    assert [(one.index, one.layers, one.previous, one.following) for one in places] == [
        (0, range(1), None, 7), (2, range(3, 4), 7, 7),
    ]  # fmt: skip
    assert places[0].is_first and not places[1].is_last and stage_place(plan, 7, chunk=1).is_last


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of(((0, 1), (1, 2, 6), 6)), "has 3 stages; expected one per node"),
        (
            HybridPlan((Pipeline((0, 1, 2), interleaved(2, 1, 2, 3, 4, 5, 6), 6),)),
            "has 6 stages; expected 3 per node",
        ),
        (plan_of(((0,), (3, 6), 6)), "has 2 stages on a single node; expected one"),
        (
            replace(plan_of(((0, 1), (1, 2, 4, 6), 3), ((2, 3), (1, 2, 4, 6), 3)), lost=(0,)),
            "nodes run several stages each; expected one, without interleave",
        ),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(plan, message):
    with pytest.raises(InputError, match=message):
        check_plan(plan, 6, 6)


def _held(pipelines):
    """Return the layers of each node."""
    return {
        node: set(layers)
        for one in pipelines
        for node, layers in zip(one.nodes, node_layers(one.template), strict=True)
    }


def _busiest_s(template):
    return max(
        sum(stage.latency_s for stage in template.stages_of(place)) for place in range(template.n_nodes)
    )


@pytest.mark.parametrize("profile", [uniform24(), random32(3)])
@pytest.mark.parametrize("interleave", [2, 3])
def test_templates_are_cut_evenly_and_priced_by_simulation(profile, interleave):
    plain = make_templates(profile, range(1, 13))
    templates = interleaved_templates(plain, profile, interleave)
    assert templates.keys() == plain.keys() and templates[1] == plain[1]
    for size, template in templates.items():
        if size == 1:
            continue
        assert template.interleave == min(interleave, profile.n_layers // size)
        bounds = [0, *(stage.end_layer for stage in template.stages)]
        assert bounds[-1] == profile.n_layers and [one.first_layer for one in template.stages] == bounds[:-1]
        assert all(stage.layers for stage in template.stages)
        # No node has much more to do than under the best plain plan.
        assert _busiest_s(template) <= 1.05 * max(stage.latency_s for stage in plain[size].stages)
        for count in (size, 2 * size + 1, 40):
            (time_s,), (plain_s,) = (
                schedule_times_s([one], [count], profile) for one in (template, plain[size])
            )
            assert estimated_time_s([template], [count], "1f1b") == pytest.approx(time_s, rel=0.15)
            # Where layers do not divide, stages are unequal: three of a node make stages of one and two.
            assert time_s < 1.13 * plain_s
            if profile.name == "uniform24" and profile.n_layers % template.n_stages == 0:
                assert time_s < plain_s


def test_faster_pipelines_get_more_microbatches():
    """With stages of one layer, two nodes in a row lose half of what plain ones lose to fill and drain."""
    profile = ModelProfile("equal", (LayerProfile(1.0, 2.0),) * 4)
    plain = make_templates(profile, [1, 2])
    templates = interleaved_templates(plain, profile, 2)
    assert [len(stage.layers) for stage in templates[2].stages] == [1, 1, 1, 1]
    assert schedule_times_s([plain[2], templates[2]], [4, 4], profile) == pytest.approx([30.0, 27.0])
    assert estimated_time_s([templates[2]], [4], "1f1b") == pytest.approx(27.0)
    both = [distribute((one[1], one[2]), 11) for one in (plain, templates)]
    assert both == [(4, 7), (4, 7)] and templates[2].time_s == pytest.approx(6.0 * 7 + 3.0)


@pytest.mark.parametrize(
    ("n_layers", "n_nodes", "interleave", "message"),
    [
        (6, 3, 4, "interleave is 4 with 6 layers on pipelines of 1 to 2 nodes; expected a size of 2 nodes"),
        (6, 2, 2, "interleave is 2 with 6 layers on pipelines of 1 to 1 nodes"),
    ],
)
def test_stages_for_which_there_are_no_layers_or_nodes_are_refused(n_layers, n_nodes, interleave, message):
    profile = ModelProfile("equal", (LayerProfile(1.0, 2.0),) * n_layers)
    with pytest.raises(InputError, match=message):
        interleaved_templates(covering_templates(profile, n_nodes, 1, 1), profile, interleave)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interleave": 0}, "interleave is 0; expected a whole number >= 1"),
        ({"f": True}, "f is True; expected a whole number"),
        ({"policy": "halt"}, "unknown policy 'halt'; expected degrade, relaunch, stop"),
        ({"template_set": None}, "unknown template_set None; expected full, minimal"),
        ({"resume": "no"}, "resume is 'no'; expected True or False"),
        ({"hang_s": "10"}, "hang_s is '10'; expected a number"),
        ({"first_sizes": "1,2"}, "first_sizes is '1,2'; expected a list, each a whole number"),
        (
            {"interleave": 2, "recovery": "reroute"},
            "recovery is 'reroute' and interleave 2; expected 1 stage",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        LiveOptions(4, **options)


def test_a_loss_copies_the_layers_that_nodes_lack_and_no_others():
    profile = ModelProfile("equal", (LayerProfile(1.0, 2.0),) * 8)
    templates = interleaved_templates(covering_templates(profile, 5, 1, 1), profile, 2)
    before = (Pipeline((0, 1), templates[2], 4), Pipeline((2, 3, 4), templates[3], 4))
    outcome = reconfigure(before, [3], [], templates, 1, 1, 8, layer_bytes=[100] * 8)
    assert [one.nodes for one in outcome.plan.pipelines] == [(0, 1), (2, 4)]
    held, needed = _held(before), _held(outcome.plan.pipelines)
    copies = {(copy.layer, copy.dst.node) for copy in outcome.copies}
    assert copies == {(layer, node) for node in needed for layer in needed[node] - held[node]}
    assert all(copy.layer in held[copy.src.node] and copy.src.node != 3 for copy in outcome.copies)
    with pytest.raises(InputError, match="several stages each"):
        live_workers(outcome.plan)


def test_a_run_that_grows_beyond_its_templates_gets_further_interleaved_ones():
    profile = ModelProfile("equal", (LayerProfile(1.0, 2.0),) * 8)
    templates = interleaved_templates(covering_templates(profile, 3, 0, 3), profile, 2)
    assert sorted(templates) == [3]
    decider = ReconfigurationPlanner(profile, templates, 3, 0, 3, 4, [100] * 8, interleave=2)
    first = decider(ClusterState(None, (0, 1, 2), (), 0, dict.fromkeys(range(3), ())))
    held = {
        node: tuple(map(str, layers))
        for node, layers in enumerate(node_layers(first.plan.pipelines[0].template))
    }
    more = decider(ClusterState(first.plan, (0, 1, 2, 3), (), 1, held | {3: ()}))
    (pipeline,) = more.plan.pipelines
    assert len(pipeline.nodes) == 4 and pipeline.template.interleave == 2
    work = WORK.validate_python(more.work)
    assert isinstance(work, Work) and work.hybrid_plan == more.plan


# --- bits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pass_order", ORDERS)
@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        (plan_of(((0, 1), (1, 3, 4, 6), 6)), {"model": "t5"}),
        (plan_of(((0, 1, 2), (1, 2, 3, 4, 5, 6), 5), ((3,), (6,), 1)), {"clip_norm": 0.3}),
        (plan_of(((0, 1), (1, 2, 3, 4, 5, 6), 4), ((2, 3), (3, 6), 2)), {"bucketed": False}),
        (plan_of(((0, 1), (1, 2, 4, 6), 3), ((2, 3), (1, 2, 4, 6), 3)), {"reduction": "allreduce"}),
    ],
)
def test_interleaved_stages_give_the_bits_of_the_oracle(plan, changes, pass_order):
    job = small_job(warmup_steps=2, **changes)
    nodes, oracle = Nodes(job, pass_order=pass_order), ReferenceTrainer(job)
    nodes.connect(plan)
    facts = nodes.iterate(0, 2)
    assert [one.loss for one in facts[0]] == [oracle.iterate(iteration, plan) for iteration in range(2)]
    assert nodes.checksums() == {layer: {oracle.checksum(layer)} for layer in range(6)}


def test_a_sequence_of_interleaved_plans_with_copies_gives_the_bits_of_the_oracle():
    """Pipelines grow, shrink, and are cut otherwise; layers move alone, wherever they lie."""
    plans = (
        plan_of(((0, 1), (1, 3, 4, 6), 3), ((2, 3), (1, 2, 4, 6), 3)),
        plan_of(((0, 1), (1, 3, 4, 6), 4), ((2,), (6,), 2)),  # node 3 is gone
        plan_of(((2, 0, 1), (1, 2, 3, 4, 5, 6), 6)),
    )
    job = small_job(optimizer="adamw", clip_norm=1.0)
    nodes, oracle, held = Nodes(job), ReferenceTrainer(job), {}
    for number, plan in enumerate(plans):
        needed = _held(plan.pipelines)
        copies = [
            (layer, min(source for source in held if source != 3 and layer in held[source]), node)
            for node, layers in needed.items()
            for layer in sorted(layers - held.get(node, layers))
        ]
        assert bool(copies) == bool(number)
        nodes.connect(plan, copies=copies)
        facts = nodes.iterate(2 * number, 2)[plan.nodes[0]]
        assert [one.loss for one in facts] == [oracle.iterate(2 * number + each, plan) for each in range(2)]
        assert nodes.checksums() == {layer: {oracle.checksum(layer)} for layer in range(6)}
        held = needed


def test_optimizer_state_of_interleaved_stages_is_divided_among_the_nodes_of_each_layer():
    plan = plan_of(((0, 1), (1, 3, 4, 6), 2), ((2, 3), (1, 2, 4, 6), 2), ((4,), (6,), 2))
    job = small_job(optimizer="adamw")
    nodes, oracle = Nodes(job, is_divided=True), ReferenceTrainer(job)
    nodes.connect(plan, n_copies=2)
    facts = nodes.iterate(0, 3)[0]
    assert [one.loss for one in facts] == [oracle.iterate(each, plan) for each in range(3)]
    states = Counter(
        (int(layer), int(weight))
        for node in plan.nodes
        for layer, _, weight in map(str.split, _pieces(nodes.executors[node], "state"))
    )
    assert set(states.values()) == {2}
    assert {layer for layer, _ in states} == set(range(6))
    pieces = {node: {int(text.split()[0]) for text in nodes.executors[node].pieces()} for node in plan.nodes}
    assert pieces[0] == {0, 3} and pieces[3] == {1, 4, 5}


def _pieces(executor, kind):
    return [text for text in executor.pieces() if text.split()[1] == kind]
