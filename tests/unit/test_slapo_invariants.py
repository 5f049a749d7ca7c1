"""Primitives leave a model that runs and a tree that agrees with it; one that fails leaves no trace."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")

from schedules import Attention, check_invariants, same_state, state_of, tokens, toy
from torch import nn

from makespan.slapo import (
    ConflictError,
    PathError,
    ScheduleError,
    call_module,
    create_schedule,
    list_primitives,
)

STAGE, BLOCK = "stages.0", "stages.0.blocks.1"


def residual(hidden, update):
    return hidden + update


def fused(sch, compiler=None):
    (match,) = sch[BLOCK].find(residual_norm)
    sch[BLOCK].fuse(match, compiler=compiler, name="AddNorm")


def residual_norm(hidden, update):
    return call_module("norm", hidden + update)


def traced(sch):
    sch[STAGE].trace()


def cut(sch):
    sch[f"{STAGE}.blocks.0"].cut_pipeline_stage()


def untraceable(sch):
    class Choosy(nn.Module):
        def forward(self, data):
            return data if data.sum() > 0 else -data

    sch[f"{BLOCK}.ffn"].replace(Choosy())


# What comes before, the primitive, and calls of it that must fail then.
class Chosen(Attention):
    """A module with the arguments of experts."""

    def forward(self, hidden, chosen=None, mask=None):
        return super().forward(hidden, mask)


CASES = {
    "annotate": (
        None,
        lambda sch: sch.annotate("scale", "role", 1),
        [lambda sch: sch.annotate("x", "role", 1)],
    ),
    "bind": (None, lambda sch: sch.bind(batch=8), [lambda sch: sch.bind(batch=9)]),
    "checkpoint": (
        None,
        lambda sch: sch[BLOCK].checkpoint(),
        [lambda sch: sch[BLOCK].checkpoint(), lambda sch: sch[STAGE].checkpoint(order_args_fn=print)],
    ),
    "compile": (
        None,
        lambda sch: sch[BLOCK].compile("eager"),
        [
            lambda sch: sch[BLOCK].compile("eager"),
            lambda sch: sch[STAGE].compile("ager"),
            lambda sch: sch[STAGE].checkpoint(keep="mm"),
        ],
    ),
    "cut_pipeline_stage": (
        lambda sch: sch.trace_until([f"{STAGE}.blocks.0"]),
        cut,
        [cut, lambda sch: sch.cut_pipeline_stage(), lambda sch: sch[f"{BLOCK}.ffn"].cut_pipeline_stage()],
    ),
    "decompose": (
        None,
        lambda sch: sch[f"{BLOCK}.ffn.0"].decompose(),
        [lambda sch: sch[f"{BLOCK}.ffn.0"].decompose(), lambda sch: sch[f"{BLOCK}.norm"].decompose()],
    ),
    "find": (None, lambda sch: sch[BLOCK].find(residual), [lambda sch: sch[BLOCK].find(3)]),
    "find_node": (
        None,
        lambda sch: sch[BLOCK].find_node(lambda node: node.op == "call_module"),
        [lambda sch: sch[BLOCK].find_node("ffn")],
    ),
    "find_subgraph": (
        None,
        lambda sch: sch[BLOCK].find_subgraph(residual),
        [lambda sch: sch[BLOCK].find_subgraph("ffn")],
    ),
    "fork_rng": (None, lambda sch: sch[BLOCK].fork_rng(), []),
    "fuse": (
        traced,
        fused,
        [
            lambda sch: sch[STAGE + ".blocks.0"].fuse(sch[STAGE + ".blocks.0"].find(residual), compiler=None),
            lambda sch: sch[STAGE + ".blocks.0"].fuse(
                sch[STAGE + ".blocks.0"].find(residual_norm)[0], compiler="none"
            ),
        ],
    ),
    "replace": (
        traced,
        lambda sch: sch[f"{BLOCK}.attention"].replace(Attention(8)),
        [
            lambda sch: sch[BLOCK].replace(3),
            lambda sch: sch[BLOCK].replace(lambda one: one, sch[BLOCK].find(residual_norm)[0]),
            lambda sch: sch[BLOCK].replace(residual, sch[BLOCK].find(residual)),
        ],
    ),
    "replace_all": (
        None,
        lambda sch: sch.replace_all(nn.GELU, lambda path, old: nn.ReLU()),
        [
            lambda sch: sch.replace_all(
                nn.Linear, lambda path, old: None if "query" in path else copy.copy(old)
            )
        ],
    ),
    "set_attr": (
        None,
        lambda sch: sch[f"{BLOCK}.attention"].set_attr(heads=1),
        [lambda sch: sch[f"{BLOCK}.attention"].set_attr(heads=2, head=1)],
    ),
    "shard": (
        None,
        lambda sch: sch[f"{BLOCK}.ffn.0"].shard(["weight", "bias"], 0),
        [
            lambda sch: sch[f"{BLOCK}.ffn.0"].shard("weight", 1),
            lambda sch: sch[f"{BLOCK}.ffn.2"].shard("weight", 2),
            lambda sch: sch[f"{BLOCK}.ffn.2"].shard("weights", 0),
        ],
    ),
    "share_context": (None, lambda sch: sch[f"{BLOCK}.attention"].share_context(), []),
    "take_experts": (
        lambda sch: sch[f"{BLOCK}.attention"].replace(Chosen(8)),
        lambda sch: sch[f"{BLOCK}.attention"].take_experts(2, chosen="chosen"),
        [
            lambda sch: sch[f"{BLOCK}.attention"].take_experts(0),
            lambda sch: sch[f"{BLOCK}.attention"].take_experts(2, chosen="choice"),
            lambda sch: sch[f"{BLOCK}.attention"].take_experts(2, tokens=1),
        ],
    ),
    "take_heads": (
        None,
        lambda sch: sch[f"{BLOCK}.attention"].take_heads([[0, -1, 2]]),
        [
            lambda sch: sch[f"{BLOCK}.attention"].take_heads([["bias", 1, 2]]),
            lambda sch: sch[f"{BLOCK}.attention"].take_heads([[0, 1, 0]]),
            lambda sch: sch[f"{BLOCK}.attention"].take_heads([0]),
        ],
    ),
    "sync": (
        lambda sch: sch[f"{BLOCK}.ffn.2"].shard("weight", 1),
        lambda sch: sch[f"{BLOCK}.ffn.2"].sync("fwd_post", "all_reduce"),
        [
            lambda sch: sch[f"{BLOCK}.ffn.2"].sync("fwd_post", "all_gather", axis=-1),
            lambda sch: sch[f"{BLOCK}.ffn.0"].sync("forward", "all_reduce"),
            lambda sch: sch[f"{BLOCK}.ffn.0"].sync("fwd_post", "sum"),
        ],
    ),
    "trace": (untraceable, lambda sch: sch["stages.1"].trace(), [lambda sch: sch[f"{BLOCK}.ffn"].trace()]),
    "trace_until": (
        None,
        lambda sch: sch.trace_until([f"{STAGE}.blocks.0"]),
        [lambda sch: sch.trace_until([BLOCK]), lambda sch: sch["stages.1"].trace_until(["blocks.0"])],
    ),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_tree_and_model_agree_after_it_and_after_it_failed(name):
    before, apply, failing = CASES[name]
    sch = create_schedule(toy())
    keys = list(sch.mod.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if before is not None:
            before(sch)
        check_invariants(sch)
        apply(sch)
        check_invariants(sch)
        for fails in failing:
            state = state_of(sch)
            with pytest.raises(ScheduleError):
                fails(sch)
            check_invariants(sch)
            assert same_state(state, state_of(sch)), "what failed left a trace"
    assert name in {entry.op for entry in sch.metadata.journal} or name.startswith("find")
    if name != "trace":
        assert list(sch.mod.state_dict()) == keys
        words, _ = sch.mod(tokens())
        words.sum().backward()


def test_every_primitive_is_among_the_cases():
    built_in = list_primitives(name_only=False)
    ours = {name for name, one in built_in.items() if one.__module__.startswith("makespan.")}
    assert ours == set(CASES)


@pytest.mark.parametrize("flatten", [False, True])
def test_modes_states_and_copies_pass_through_a_graph(flatten):
    sch = create_schedule(toy())
    keys, model = set(sch.mod.state_dict()), copy.deepcopy(sch.mod)
    sch[STAGE].trace(flatten=flatten)
    check_invariants(sch)
    assert set(sch.mod.state_dict()) == keys
    copied = copy.deepcopy(sch)
    check_invariants(copied)
    for one in (sch.mod, copied.mod):
        one.load_state_dict(model.state_dict())
        one.eval()
        for found, expected in zip(one(tokens()), model.eval()(tokens()), strict=True):
            torch.testing.assert_close(found, expected)
        one.train()
        assert all(module.training for module in one.modules())


def test_a_path_that_a_flat_graph_swallowed_says_so_and_leaves_of_it_are_found():
    sch = create_schedule(toy())
    sch[STAGE].trace(flatten=True)
    words = rf"no module '{BLOCK}.*' in the schedule: step 1 flattened it, trace\(flatten=True\) at '{STAGE}'"
    for path in (BLOCK, f"{BLOCK}.attention"):
        with pytest.raises(PathError, match=words):
            sch[path]
    assert isinstance(sch[f"{BLOCK}.attention.query"].mod, nn.Linear)


def test_attributes_of_a_captured_graph_are_refused_with_the_step():
    sch = create_schedule(toy())
    sch[f"{BLOCK}.attention"].trace()
    with pytest.raises(
        ConflictError, match=r"the attributes of the time of its capture, conflicts with step 1: trace\(\)"
    ):
        sch[f"{BLOCK}.attention"].set_attr(heads=1)
