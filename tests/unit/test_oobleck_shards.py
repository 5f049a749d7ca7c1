"""Optimizer state that is divided among the nodes of a layer: who holds what, bits, losses after a commit.

Processes that are killed: ``tests/differential/test_oobleck_divided_runs.py``; all orders of events:
``tests/property/test_oobleck_every_order.py``.
"""

from itertools import combinations

import pytest

torch = pytest.importorskip("torch")

from chain_nodes import Nodes, plan_of, small_job
from oobleck_templates import even_templates, pipelines_of

from makespan.errors import InputError
from makespan.oobleck.oracle import ReferenceTrainer
from makespan.oobleck.plan import HybridPlan
from makespan.oobleck.planner import ReconfigurationPlanner, piece_copies
from makespan.oobleck.profile import LayerProfile, ModelProfile
from makespan.oobleck.reconfiguration import StateLost
from makespan.oobleck.shards import (
    Piece,
    holders,
    needed_pieces,
    pieces_of,
    read_holdings,
    read_piece,
    senders,
    state_nodes,
    whole_layers,
)
from makespan.oobleck.stage import LostPeerError, PeerGroups, StageExecutor
from makespan.oobleck.trainer import LiveOptions
from makespan.runtime.protocol import Abort, ClusterState

pytestmark = pytest.mark.xdist_group("training")

SIZES = dict.fromkeys(range(6), (400, 40, 400, 40))
FOUR = plan_of(((0,), (6,), 2), ((1, 2), (2, 6), 1), ((3,), (6,), 2), ((4, 5), (3, 6), 1))


def joined(text, folder):
    """Save a chain of one line in a folder, and return a job with it."""
    file = folder / "chain.py"
    file.write_text(f"import torch\nfrom torch import nn\nfrom makespan.oobleck.chain import Chain\n{text}")
    return small_job(model=f"{file}:chain", model_options={})


def divided(plan, n_copies):
    """Return the pieces of all nodes at the start of a plan."""
    return needed_pieces(plan, SIZES, holders(plan, SIZES, n_copies, {}))


# --- who holds what ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n_copies", [1, 2, 3, 9])
def test_holders_are_nodes_of_the_layer_and_have_equal_loads(n_copies):
    found = holders(FOUR, SIZES, n_copies, {})
    of_layer = {0: {0, 1, 3, 4}, 2: {0, 2, 3, 4}, 3: {0, 2, 3, 5}}
    assert found.keys() == {(layer, number) for layer in SIZES for number in range(4)}
    for layer, nodes in of_layer.items():
        for number in range(4):
            on = found[layer, number]
            assert set(on) <= nodes and len(set(on)) == len(on) == min(n_copies, 4)
    for layers in ((0, 1), (3, 4, 5)):  # those that the same nodes have
        loads = dict.fromkeys(of_layer[layers[0]], 0)
        for layer in layers:
            for number, size in enumerate(SIZES[layer]):
                for node in found[layer, number]:
                    loads[node] += size
        assert max(loads.values()) - min(loads.values()) <= 400
    stage = {layer: SIZES[layer] for layer in (3, 4, 5)}  # what node 5 knows
    assert holders(FOUR, stage, n_copies, {}).items() <= found.items()


def test_holders_are_on_several_hosts_where_there_are_several():
    hosts = {0: "a", 1: "a", 2: "a", 3: "b", 4: "a", 5: "a"}
    found = holders(FOUR, SIZES, 2, hosts)
    assert all({hosts[node] for node in on} == {"a", "b"} for on in found.values())


@pytest.mark.parametrize(("n_nodes", "n_copies"), [(4, 2), (6, 2), (8, 3)])
def test_states_stay_where_they_are_as_far_as_loads_allow(n_nodes, n_copies):
    """A loss moves what is lost and no more; for a joiner less moves than two shares."""
    plans = {
        name: plan_of(*(((node,), (6,), 2) for node in nodes))
        for name, nodes in {
            "all": range(n_nodes), "lost": range(1, n_nodes), "joined": range(n_nodes + 1)
        }.items()
    }  # fmt: skip
    held, whole = divided(plans["all"], n_copies), sum(map(sum, SIZES.values()))
    for name, plan in plans.items():
        left = {node: pieces for node, pieces in held.items() if node in plan.nodes}
        states = holders(plan, SIZES, n_copies, {}, state_nodes(left))
        after = needed_pieces(plan, SIZES, states)
        bytes_of = {
            node: sum(SIZES[piece.layer][piece.weight] for piece in pieces if piece.kind == "state")
            for node, pieces in after.items()
        }
        new = {node: after[node] - left.get(node, frozenset()) for node in after}
        moved = sum(
            SIZES[piece.layer][piece.weight]
            for each in new.values()
            for piece in each
            if piece.kind == "state"
        )
        assert sum(bytes_of.values()) == n_copies * whole
        assert max(bytes_of.values()) <= n_copies * whole / len(plan.nodes) + 400  # the largest weight
        lost = n_copies * whole - sum(
            SIZES[piece.layer][piece.weight]
            for each in left.values()
            for piece in each
            if piece.kind == "state"
        )
        if name == "joined":
            assert 0 < bytes_of[n_nodes] <= moved <= 2 * n_copies * whole / len(plan.nodes)
        else:
            assert moved == lost


def test_every_node_without_the_state_of_a_weight_receives_it_from_a_holder():
    counts = dict.fromkeys((0, 1), 0)
    for number in range(4):
        found = senders((0, 1, 2, 3), (0, 1), number)
        assert found.keys() == {2, 3} and set(found.values()) == {0, 1}
        for source in found.values():
            counts[source] += 1
    assert counts == {0: 4, 1: 4} and senders((0, 1), (1, 0), 0) == {}


def test_pieces_are_read_from_their_text():
    for piece in pieces_of(3, 2):
        assert read_piece(piece.text((8, 4))) == (piece, (8, 4) if piece.kind == "frame" else ())
    held, sizes = read_holdings({0: ["3 frame 8 4", "3 weight 1"], 1: []})
    assert held == {0: {Piece(3, "frame"), Piece(3, "weight", 1)}, 1: frozenset()} and sizes == {3: (8, 4)}


def test_any_losses_that_are_to_be_survived_leave_all_pieces():
    for n_copies in (2, 3):
        held = divided(FOUR, n_copies)
        every = frozenset().union(*(pieces_of(layer, 4) for layer in SIZES))
        for lost in combinations(held, n_copies - 1):
            left = {node: pieces for node, pieces in held.items() if node not in lost}
            assert frozenset().union(*left.values()) == every
            assert set().union(*whole_layers(left, SIZES).values()) == set(SIZES)


def decide(holdings, members, before, **changes):
    """Decide with pieces of six layers in three equal pipelines."""
    profile = ModelProfile("even", (LayerProfile(1e-3, 2e-3, parameter_bytes=880.0),) * 6)
    templates = even_templates(6, range(1, 7))
    planner = ReconfigurationPlanner(profile, templates, 6, 1, 1, 12, [2640] * 6, is_divided=True, **changes)
    texts = {node: [piece.text(SIZES[piece.layer]) for piece in sorted(holdings[node])] for node in members}
    return planner(ClusterState(before, tuple(members), (), 3, texts))


@pytest.mark.parametrize("recovery", ["reconfigure", "reroute"])
def test_a_loss_moves_the_states_that_lost_a_holder_and_what_is_behind(recovery):
    before = HybridPlan(tuple(pipelines_of(((0, 1), (2, 3), (4, 5)), even_templates(6, (2,)))))
    held = dict(divided(before, 2))
    behind = {Piece(layer, "weight", number) for layer in range(3) for number in range(4)}
    behind -= {Piece(layer, "weight", number) for layer, kind, number in held[2] if kind == "state"}
    assert behind
    held[2] -= behind
    found = decide(held, [0, 1, 2, 3, 4], before, recovery=recovery)
    kinds = {"reroute": ["reroute"], "reconfigure": ["re-instantiate"]}
    assert list(found.work["copies"]) == [] and list(found.work["kinds"]) == kinds[recovery]
    for text, source, target in found.work["pieces"]:
        piece, _ = read_piece(text)
        assert piece in held[source] and piece not in held[target]
        held[target] |= {piece}
    states = {(layer, number): nodes for layer, number, nodes in found.work["holders"]}
    assert all(len(set(nodes)) == 2 for nodes in states.values()) and len(states) == 24
    needed = needed_pieces(found.plan, SIZES, states)
    assert all(needed[node] <= held[node] for node in found.plan.nodes)
    sent = {read_piece(text)[0] for text, _, target in found.work["pieces"] if target == 2}
    assert behind <= sent and found.work["copies_bytes"] > 0
    assert {piece for piece in sent if piece.kind == "frame"} == set() or recovery == "reconfigure"


def test_a_state_without_a_holder_is_lost_although_the_weights_are_there():
    before = HybridPlan(tuple(pipelines_of(((0, 1), (2, 3), (4, 5)), even_templates(6, (2,)))))
    held = divided(before, 2)
    found = decide(held, [0, 1, 3, 5], before)  # of two holders of three, both are lost for some weights
    assert isinstance(found, Abort) and not found.saves and isinstance(found.error, StateLost)
    assert set(found.error.layers) <= {0, 1, 2}
    assert not isinstance(decide(held, [0, 1, 2, 5], before), Abort)  # two losses, in different stages


# --- bits -------------------------------------------------------------------------------------------


def whole_states(nodes, n_copies):
    """Return the state of each layer, put together from the states of all nodes, which have equal copies."""
    found, counts = {}, {}
    for node in nodes.plan.nodes:
        executor = nodes.executors[node]
        for text in executor.pieces():
            piece, _ = read_piece(text)
            counts[piece] = counts.get(piece, 0) + 1
            for name, tensor in executor.piece_state(piece).items():
                other = found.setdefault(piece.layer, {}).setdefault(name, tensor)
                assert torch.equal(other, tensor), (piece, name)
    of_states = [count for piece, count in counts.items() if piece.kind == "state"]
    assert set(of_states) == {n_copies}
    return found


def assert_oracle(nodes, oracle, n_copies):
    for layer, state in whole_states(nodes, n_copies).items():
        wanted = oracle.state(layer)
        assert state.keys() == wanted.keys() and any("optimizer/" in name for name in state)
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("changes", "n_copies"),
    [
        ({"clip_norm": 0.3}, 1),
        ({"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}, "reduction": "allreduce"}, 3),
        ({"model": "t5", "optimizer": "adamw", "dtype": "float64", "bucketed": False}, 2),
    ],
)
def test_bits_are_those_of_the_oracle_and_the_state_is_divided(changes, n_copies):
    job = small_job(**changes)
    nodes, oracle = Nodes(job, is_divided=True), ReferenceTrainer(job)
    n_layers = oracle.n_layers
    ends = [(n_layers,), (2, n_layers), (n_layers,), (3, n_layers)]
    groups = [pipeline.nodes for pipeline in FOUR.pipelines]
    plan = plan_of(*zip(groups, ends, (2, 1, 2, 1), strict=True))
    nodes.connect(plan, n_copies=n_copies)
    facts = nodes.iterate(0, 3)
    losses = [oracle.iterate(iteration, plan) for iteration in range(3)]
    if job.reduction == "ordered":
        assert [one.loss for one in facts[0]] == losses
        assert_oracle(nodes, oracle, n_copies)
    else:
        whole_states(nodes, n_copies)
    kept = {
        node: sum(
            tensor.nbytes
            for layer in executor.layers
            for name, tensor in executor.layer_state(layer).items()
            if name.startswith("optimizer/")
        )
        for node, executor in nodes.executors.items()
    }
    whole = sum(
        tensor.nbytes
        for layer in range(n_layers)
        for name, tensor in oracle.state(layer).items()
        if name.startswith("optimizer/")
    )
    assert sum(kept.values()) == n_copies * whole
    largest = max(tensor.nbytes for layer in range(n_layers) for tensor in oracle.state(layer).values())
    assert abs(kept[0] - kept[3]) <= 4 * 2 * largest  # four sets of layers, each balanced to a weight


def test_sums_go_only_to_those_who_step_a_weight_and_send_it_to_the_others(monkeypatch):
    """Only a weight that the node that adds up does not step is sent once more than with whole state."""
    plan, n_bytes, send = plan_of(*(((node,), (6,), 2) for node in range(3))), [], PeerGroups.send

    def count(self, tensor, node, tag):
        n_bytes.append(tensor.nbytes)
        return send(self, tensor, node, tag)

    monkeypatch.setattr(PeerGroups, "send", count)
    found, again = [], []
    for n_copies in (3, 2, 1):
        nodes = Nodes(small_job(), is_divided=True)
        nodes.connect(plan, n_copies=n_copies)
        nodes.iterate(0, 1)
        n_bytes.clear()
        nodes.iterate(1, 1)
        found.append(sum(n_bytes))
        held, sizes = read_holdings({0: nodes.executors[0].pieces()})
        here = {(piece.layer, piece.weight) for piece in held[0] if piece.kind == "state"}
        again.append(
            sum(
                size
                for layer, each in sizes.items()
                for number, size in enumerate(each)
                if (layer, number) not in here
            )
        )
    assert found == [found[0] + each for each in again] and 0 == again[0] < again[1] < again[2]


def test_survivors_that_lack_weights_of_the_last_commit_get_them_from_holders():
    """Node 0 is lost after a commit, before it sends its new weights; others have sent theirs."""
    job = small_job()
    first = plan_of(*(((node,), (6,), count) for node, count in enumerate((2, 1, 1, 2))))
    second = plan_of(((3,), (6,), 2), ((1, 2), (4, 6), 4))
    reached = []

    def announce(node):
        def take(phase):
            if (node, phase) == (0, "weights") and reached:
                raise LostPeerError("node 0 is lost")

        return take

    nodes, oracle = Nodes(job, announce, is_divided=True), ReferenceTrainer(job)
    nodes.connect(first, n_copies=2)
    nodes.iterate(0, 2)
    reached.append(True)
    found = nodes.each(first.nodes, lambda node, executor: executor.compute(2))
    assert {type(found[node]) for node in (1, 2, 3)} <= {LostPeerError, type(None)}
    del nodes.executors[0]
    held, sizes = read_holdings({node: one.pieces() for node, one in nodes.executors.items()})
    needed = needed_pieces(first, sizes, holders(first, sizes, 2, {}))
    behind = {node: needed[node] - pieces for node, pieces in held.items()}
    assert any(behind.values()) and {piece.kind for each in behind.values() for piece in each} == {"weight"}
    for node, executor in nodes.executors.items():
        for piece in behind[node]:  # one iteration behind, and not reported
            name, tensor = next(iter(executor.piece_state(piece).items()))
            other = next(each for each in held if Piece(piece.layer, "state", piece.weight) in held[each])
            assert not torch.equal(nodes.executors[other].piece_state(piece)[name], tensor)
    states = holders(second, sizes, 2, {}, state_nodes(held))
    copies, n_bytes = piece_copies(second, held, sizes, states, {})
    assert n_bytes > 0
    nodes.connect(second, pieces=copies, n_copies=2, states=states)
    nodes.iterate(2, 2)
    for iteration, plan in enumerate([first, first, second, second]):
        oracle.iterate(iteration, plan)
    assert_oracle(nodes, oracle, 2)


# --- what cannot be divided -------------------------------------------------------------------------

MIXES = """
class Mixes(torch.optim.SGD):
    def step(self, closure=None):
        weights = [weight for weight in self.param_groups[0]["params"] if weight.grad is not None]
        norm = sum(weight.grad.norm() for weight in weights)
        for weight in weights:
            weight.grad /= norm + 1
        super().step()
"""
NEEDS_ALL = """
class Mixes(torch.optim.SGD):
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            weight.data -= 0.1 * weight.grad
"""
CHAIN = """
def chain():
    samples = [(torch.ones(4), torch.ones(1)) for _ in range(16)]
    layers = [lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 1)]
    return Chain(layers, nn.functional.mse_loss, samples, optimizer=lambda weights: Mixes(weights, lr=0.1))
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MIXES, "steps a weight otherwise where others of its layer have no gradient"),
        (NEEDS_ALL, r"a step without the gradients of some weights fails \(TypeError"),
    ],
    ids=["mixes", "needs all"],
)
def test_optimizers_that_mix_weights_are_refused_where_state_is_divided(text, message, tmp_path):
    job = joined(text + CHAIN, tmp_path)
    StageExecutor(job).hold([0])
    with pytest.raises(
        InputError, match=f"optimizer Mixes of the chain: {message}.*; expected .* zero_stage=0"
    ):
        StageExecutor(job, is_divided=True).hold([0])


def test_a_node_that_lacks_a_piece_says_so():
    nodes = Nodes(small_job(), is_divided=True)
    nodes.connect(plan_of(((0, 1), (3, 6), 6)), n_copies=2)
    with pytest.raises(InputError, match="node 0 lacks pieces of its layers: 3 state 0, 3 state 1"):
        nodes.connect(plan_of(((0,), (6,), 6)), also=[1], pieces=[("3 frame", 1, 0)], n_copies=2)


@pytest.mark.parametrize("stage", [2, -1, True, "1"])
def test_other_stages_are_refused(stage):
    with pytest.raises(InputError, match=f"zero_stage is {stage!r}; expected 0, or 1 to divide"):
        LiveOptions(n_nodes=4, zero_stage=stage)
