"""Microbatches of lost nodes on other nodes of their stage: same bits, no deadlock, and where it is refused.

Runs whose processes are killed: ``differential/test_oobleck_rerouted_runs.py``; the schedules themselves:
``property/test_oobleck_rerouting.py``.
"""

from collections import Counter
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from chain_nodes import Nodes, carry_out, plan_of, small_job, template
from hypothesis import given, settings, strategies as st

from makespan.errors import InfeasiblePlanError, InputError
from makespan.oobleck.oracle import ReferenceTrainer
from makespan.oobleck.peers import peer_schedule, rerouted_counts
from makespan.oobleck.plan import HybridPlan, check_plan, owners
from makespan.oobleck.planner import ReconfigurationPlanner, reroutable_sizes
from makespan.oobleck.profile import LayerProfile, ModelProfile
from makespan.oobleck.reconfiguration import InsufficientNodes, StateLost, reroute, tolerated
from makespan.oobleck.stage import rerouted_instructions, stage_place
from makespan.oobleck.templates import covering_templates
from makespan.runtime.protocol import Abort, ClusterState

ORDERS = ["1f1b", "zero-bubble"]
MOMENTUM = {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}, "learning_rate": 0.05}


def equal_plan(ends, counts, lost=()):
    """Return pipelines with the same stages: nodes 0, 1, ... pipeline by pipeline."""
    nodes = [tuple(range(first * len(ends), (first + 1) * len(ends))) for first in range(len(counts))]
    pipelines = plan_of(*((those, ends, count) for those, count in zip(nodes, counts, strict=True)))
    return HybridPlan(pipelines.pipelines, tuple(sorted(lost)))


@st.composite
def plans(draw):
    """Draw pipelines with unequal stages and batches, and lost nodes, none of a stage all."""
    n_stages, n_pipelines = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    counts = draw(st.lists(st.integers(1, 6), min_size=n_pipelines, max_size=n_pipelines))
    lost = set()
    for stage in range(n_stages):
        gone = draw(st.sets(st.integers(0, n_pipelines - 1), max_size=n_pipelines - 1))
        lost |= {number * n_stages + stage for number in gone}
    plan = equal_plan(range(1, n_stages + 1), counts, lost or {0})
    latencies = draw(st.lists(st.sampled_from([0.0, 1.0, 2.5, 3.0]), min_size=n_stages, max_size=n_stages))
    stages = plan.pipelines[0].template.stages
    stages = tuple(replace(one, latency_s=time) for one, time in zip(stages, latencies, strict=True))
    timed = replace(plan.pipelines[0].template, stages=stages)
    return replace(plan, pipelines=tuple(replace(one, template=timed) for one in plan.pipelines))


# --- who runs what, and in which order --------------------------------------------------------------


@given(plans(), st.sampled_from(ORDERS))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_passes_and_transfers_of_rerouted_plans_fit_and_never_wait_for_each_other(plan, pass_order):
    """Even if every transfer blocks until the other side takes part in it."""
    total = sum(one.n_microbatches for one in plan.pipelines)
    waiting = {node: rerouted_instructions(plan, node, pass_order) for node in plan.nodes}
    places = {node: stage_place(plan, node, pass_order) for node in plan.nodes}
    kinds = ["fwd", "bwd", *(["bwd_weights"] if pass_order == "zero-bubble" else [])]
    passes = [
        (places[node].index, one.kind, one.microbatch)
        for node, stream in waiting.items()
        for one in stream
        if one.kind in kinds
    ]
    n_stages = plan.pipelines[0].template.n_stages
    assert sorted(passes) == sorted(
        (s, kind, k) for s in range(n_stages) for kind in kinds for k in range(total)
    )
    for node, stream in waiting.items():
        kept, ends = {}, {one.microbatch: number for number, one in enumerate(stream)}
        for number, one in enumerate(stream):
            assert kept.setdefault(one.buffer, one.microbatch) == one.microbatch, "a buffer in use is taken"
            if ends[one.microbatch] == number:
                del kept[one.buffer]
        is_end = places[node].index in (0, n_stages - 1)
        assert Counter(one.kind for one in stream)["load"] == is_end * len(ends)

    def receiver(node, sent):
        return places[node].neighbours(sent.microbatch)[sent.kind == "send_act"], 0

    carry_out(waiting, receiver)


@given(plans(), st.sampled_from(ORDERS))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_gradients_are_kept_apart_only_where_no_node_can_add_them_up_in_order(plan, pass_order):
    schedule = peer_schedule(plan, pass_order == "zero-bubble")
    assert sum(rerouted_counts(plan).values()) == sum(
        one.n_microbatches * len(set(one.nodes) & set(plan.lost)) for one in plan.pipelines
    )
    starts = [sum(one.n_microbatches for one in plan.pipelines[:number]) for number in range(9)]
    for number, pipeline in enumerate(plan.pipelines):
        for stage in range(len(pipeline.nodes)):
            runners = {schedule.paths[number, each][stage] for each in range(pipeline.n_microbatches)}
            if (number, stage) in schedule.apart or len(runners) > 1:
                assert (number, stage) in schedule.apart
                continue
            (runner,) = runners
            assert not set(runners) & set(plan.lost) and stage_place(plan, runner, pass_order).index == stage
            for kind in ("bwd", "bwd_weights"):
                order = [
                    one.microbatch - starts[number]
                    for one in rerouted_instructions(plan, runner, pass_order)
                    if one.kind == kind and 0 <= one.microbatch - starts[number] < pipeline.n_microbatches
                ]
                assert order == sorted(order)


def test_microbatches_of_a_lost_node_are_dealt_out_evenly():
    plan = equal_plan((3, 6), (6, 6, 6), lost=(1, 2))
    assert rerouted_counts(plan) == {0: 3, 3: 3, 4: 3, 5: 3}
    assert plan.nodes == (0, 3, 4, 5) and plan.nodes_text() == "0/-+-/3+4/5"
    assert owners(plan, 0) == (0, 4) and owners(plan, 5) == (3, 5)
    assert rerouted_counts(equal_plan((3, 6), (6, 6))) == {}
    assert peer_schedule(plan, False).apart == {(0, 1), (1, 0)}
    with pytest.raises(InputError, match="node 1; expected one of the plan, 0, 3, 4, 5"):
        stage_place(plan, 1)


# --- bits -------------------------------------------------------------------------------------------


def trained(job, plan, losses, pass_order="1f1b"):
    """Train an iteration whole, then one after each loss; the nodes, and the reference without losses."""
    nodes, oracle = Nodes(job, pass_order=pass_order), ReferenceTrainer(job)
    for step, lost in enumerate(((), *losses)):
        nodes.connect(replace(plan, lost=lost))
        facts, expected = nodes.iterate(step), oracle.iterate(step, plan)
        assert [one.loss for each in facts.values() for one in each] == [expected] * len(facts)
        assert nodes.checksums() == {layer: {oracle.checksum(layer)} for layer in range(6)}
    return nodes, oracle


@pytest.mark.parametrize("pass_order", ORDERS)
@pytest.mark.parametrize(
    ("ends", "counts", "losses"),
    [
        ((3, 6), (3, 3), [(1,), (1, 2)]),
        ((3, 6), (3, 2, 4), [(0,), (0, 3), (0, 2, 3)]),
        ((2, 4, 6), (2, 3), [(1,), (1, 3, 5)]),
        ((6,), (4, 2, 3), [(0,), (0, 2)]),
    ],
)
def test_losses_change_no_bit(ends, counts, losses, pass_order):
    job = small_job(n_microbatches=sum(counts), clip_norm=0.3, **MOMENTUM)
    trained(job, equal_plan(ends, counts), losses, pass_order)


def test_losses_change_no_bit_of_a_model_with_several_states_between_its_stages():
    trained(small_job(n_microbatches=6, model="t5", bucketed=False), equal_plan((3, 6), (2, 2, 2)), [(0, 3)])


TWICE = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from makespan.oobleck.chain import Chain

class Twice(nn.Module):
    def __init__(self, is_reentrant):
        super().__init__()
        self.inner, self.how = nn.Linear(4, 4), is_reentrant
    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=self.how)
        return x

class Rows:
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.full((4,), float(index)), torch.ones(4)

def build(is_reentrant):
    return Chain([lambda: nn.Linear(4, 4), lambda: Twice(is_reentrant)] * 3, nn.functional.mse_loss, Rows())
"""


@pytest.mark.parametrize("is_reentrant", [True, False])
@pytest.mark.parametrize("pass_order", ORDERS)
def test_layers_whose_gradients_of_a_microbatch_are_no_single_summand_are_refused(
    is_reentrant, pass_order, tmp_path
):
    """A reentrant checkpoint adds to the weights while the pass runs; others, and runs that regroup, may."""
    (tmp_path / "twice.py").write_text(TWICE)
    own = {"model": f"{tmp_path / 'twice.py'}:build", "model_options": {"is_reentrant": is_reentrant}}
    for reroutes in (False, True):
        nodes = Nodes(small_job(**own), pass_order=pass_order, reroutes=reroutes)
        nodes.connect(equal_plan((6,), (3, 3)))
        if not (is_reentrant and reroutes):
            nodes.iterate(0)
            continue
        message = (
            "layer [135]: a backward pass adds to the gradient of 'inner.(weight|bias)' 2 times; expected"
        )
        with pytest.raises(InputError, match=message):
            nodes.iterate(0)


def test_sums_by_the_backend_are_near():
    job = small_job(n_microbatches=9, reduction="allreduce", dtype="float64", **MOMENTUM)
    plan = equal_plan((3, 6), (3, 3, 3), lost=(1, 2))
    nodes, oracle = Nodes(job), ReferenceTrainer(job)
    nodes.connect(plan)
    facts = nodes.iterate(0, 3)
    expected = [oracle.iterate(iteration, plan) for iteration in range(3)]
    assert [one.loss for one in facts[0]] == pytest.approx(expected, rel=1e-12)
    for layer in range(6):
        for node in owners(plan, layer):
            state = nodes.executors[node].layer_state(layer)
            assert all(torch.allclose(one, oracle.state(layer)[name]) for name, one in state.items())


def test_pipelines_of_other_stages_begin_with_the_state_of_a_rerouted_plan():
    """The layers are where they were, and are copied from there."""
    job = small_job(n_microbatches=6, **MOMENTUM)
    nodes, oracle = trained(job, equal_plan((3, 6), (3, 3)), [(1, 2)])
    whole = plan_of(((0,), (6,), 2), ((3,), (6,), 4))
    copies = [(layer, 3, 0) for layer in (3, 4, 5)] + [(layer, 0, 3) for layer in (0, 1, 2)]
    nodes.connect(whole, copies=copies)
    losses = [one.loss for one in nodes.iterate(2, 2)[0]]
    assert losses == [oracle.iterate(iteration, whole) for iteration in (2, 3)]
    assert nodes.checksums() == {layer: {oracle.checksum(layer)} for layer in range(6)}


# --- decisions --------------------------------------------------------------------------------------

HELD = {node: range(3) if node % 2 == 0 else range(3, 6) for node in range(6)}


def test_a_loss_moves_nothing():
    plan = equal_plan((3, 6), (4, 4, 4))
    found = reroute(plan, [1], 1, HELD)
    assert found.plan == replace(plan, lost=(1,)) and found.action == "reroute"
    assert found.copies == () and found.waiting == () and found.f == 1
    second = reroute(found.plan, [1, 2], 1, HELD, drained=[])
    assert second.plan.lost == (1, 2)
    left = reroute(found.plan, [1], 1, HELD, drained=[4])
    assert left.plan.lost == (1, 4) and left.kinds == ("reroute", "drain")
    assert reroute(found.plan, [1], 1, HELD).kinds == ()  # a failure without a loss
    # One host has all nodes of stage 0 anyway, and one node of stage 1 is enough for f = 0.
    hosts = {0: "a", 2: "a", 4: "a", 1: "b", 3: "c", 5: "c"}
    assert reroute(plan, [1, 3, 2], 0, HELD, hosts=hosts).plan.lost == (1, 2, 3)


@pytest.mark.parametrize(
    ("plan", "lost", "more", "message"),
    [
        (equal_plan((3, 6), (6, 6)), [1], {}, r"1 node\(s\) are left of stage 1; f = 1 needs 2"),
        (equal_plan((3, 6), (4, 4, 4)), [1, 3, 5], {}, r"0 node\(s\) are left of stage 1"),
        (plan_of(((0, 1), (3, 6), 6), ((2, 3), (2, 6), 6)), [1], {}, "pipelines have different stages$"),
        (
            equal_plan((3, 6), (4, 4, 4)), [1], {"held": HELD | {3: range(4, 6)}},
            "node 3 lacks layers of its stage",
        ),
        (
            equal_plan((3, 6), (4, 4, 4)), [1],
            {"hosts": {0: "a", 1: "a", 2: "b", 3: "b", 4: "b", 5: "b"}},
            "the nodes that are left of stage 1 are all on one host$",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_rerouted_says_why(plan, lost, more, message):
    held = more.pop("held", HELD)
    with pytest.raises(InfeasiblePlanError, match=message):
        reroute(plan, lost, 1, held, **more)


def test_a_plan_without_a_worker_of_a_stage_or_with_unknown_nodes_is_refused():
    plan = equal_plan((3, 6), (4, 4))
    for lost, message in (((1, 3), "stage 1 has no live worker"), ((9,), r"plan without node\(s\) \[9\]")):
        with pytest.raises(InputError, match=message):
            check_plan(replace(plan, lost=lost), 6, 8)
    with pytest.raises(InputError, match="pipelines have different stages"):
        check_plan(HybridPlan(plan_of(((0, 1), (3, 6), 4), ((2,), (6,), 4)).pipelines, (1,)), 6, 8)


def test_losses_that_can_be_survived():
    assert [tolerated(6, 2, 2, "stop"), tolerated(4, 2, 2, "degrade"), tolerated(2, 2, 2, "degrade")] == [
        2,
        1,
        0,
    ]
    for n_nodes, policy, message in ((5, "stop", "expected 6"), (1, "degrade", "expected 2")):
        with pytest.raises(InsufficientNodes, match=message):
            tolerated(n_nodes, 2, 2, policy)


def planner(**changes):
    """Return the planner of six nodes that re-routes."""
    profile = ModelProfile("even", (LayerProfile(1e-3, 2e-3, parameter_bytes=1.0),) * 6)
    n_nodes, f = changes.pop("n_nodes", 6), changes.pop("f", 1)
    return ReconfigurationPlanner(
        profile, covering_templates(profile, n_nodes, f, 1), n_nodes, f, 1, 12, [1] * 6,
        **({"recovery": "reroute", "first_sizes": (2, 2, 2)} | changes),
    )  # fmt: skip


def decided(decide, plan, members, leaving=(), held=HELD):
    """Return the decision, and its plain values."""
    holdings = {node: tuple(map(str, held.get(node, ()))) for node in members}
    found = decide(ClusterState(plan, tuple(members), tuple(leaving), 3, holdings))
    return found, None if isinstance(found, Abort) else found.work


def test_the_planner_reroutes_and_falls_back_with_a_reason():
    decide = planner()
    first, _ = decided(decide, None, range(6), held={})
    assert [one.nodes for one in first.plan.pipelines] == [(0, 1), (2, 3), (4, 5)]
    decide.hosts = dict.fromkeys(range(7), "here")
    one, work = decided(decide, first.plan, [0, 2, 3, 4, 5])
    assert (work["kinds"], work["lost"], work["copies"], work["fallback"]) == (["reroute"], [1], [], "")
    assert one.plan.lost == (1,) and one.spare == ()
    _, work = decided(decide, one.plan, [0, 2, 4, 5])
    assert "reroute" not in work["kinds"] and work["lost"] == [] and work["copies"]
    assert work["fallback"] == "1 node(s) are left of stage 1; f = 1 needs 2"
    joined, work = decided(decide, one.plan, [0, 2, 3, 4, 5, 6])
    assert work["fallback"] == "node(s) 6 join" and sorted(joined.plan.nodes) == [0, 2, 3, 4, 5, 6]
    drained, work = decided(decide, one.plan, [0, 2, 3, 4, 5], leaving=[2])
    assert work["kinds"] == ["reroute", "drain"] and drained.plan.lost == (1, 2)
    # The last of a stage may leave: the others get its layers first.
    alone = planner(f=0, first_sizes=(3, 3))
    held = {0: range(2), 1: range(2, 4), 2: range(4, 6), 3: range(2), 4: range(2, 4), 5: range(4, 6)}
    start, _ = decided(alone, None, range(6), held={})
    lost, _ = decided(alone, start.plan, [0, 1, 3, 4, 5], held=held)
    assert lost.plan.lost == (2,)
    _, work = decided(alone, lost.plan, [0, 1, 3, 4, 5], leaving=[5], held=held)
    assert {copy[1] for copy in work["copies"] if copy[0] >= 4} == {5} and "drain" in work["kinds"]
    ended, _ = decided(alone, lost.plan, [0, 1, 3, 4], held=held)
    assert isinstance(ended, Abort) and isinstance(ended.error, StateLost) and not ended.saves


def test_first_plans_that_cannot_reroute_are_refused_and_the_fastest_equal_one_is_found():
    profile = ModelProfile("even", (LayerProfile(1e-3, 2e-3, parameter_bytes=1.0),) * 6)
    templates = covering_templates(profile, 6, 1, 1)
    assert reroutable_sizes(templates, 6, 1, 12, (2, 2, 2)) == (2, 2, 2)
    assert reroutable_sizes(templates, 6, 0, 12, (3, 3)) == (3, 3)
    assert reroutable_sizes(templates, 6, 1, 12) == (1,) * 6
    assert reroutable_sizes({2: template(3, 6)}, 6, 1, 12) == (2, 2, 2)
    needed = r"expected f \+ 2 = 3 or more equal pipelines, so that f \+ 1 nodes of a stage are left"
    for sizes, message in (
        ((2, 4), f"first_sizes are 2,4; {needed}"),
        ((3, 3), f"first_sizes are 3,3; {needed}"),
        ((1, 1, 1), "first_sizes are 1,1,1; expected 6 nodes in total"),
    ):
        with pytest.raises(InputError, match=message):
            reroutable_sizes(templates, 6, 1, 12, sizes)
    with pytest.raises(InputError, match=f"5 nodes and 4 microbatches; {needed}"):
        reroutable_sizes(templates, 5, 1, 4)


def test_nodes_of_several_hosts_hold_each_layer_on_two_of_them():
    """First plans with given sizes are spread over hosts, too."""
    decide = planner(f=0, first_sizes=(2, 2, 2), hosts={0: "a", 2: "a", 4: "a", 1: "b", 3: "b", 5: "b"})
    first, _ = decided(decide, None, range(6), held={})
    for stage in (0, 1):
        assert len({decide.hosts[one.nodes[stage]] for one in first.plan.pipelines}) == 2
