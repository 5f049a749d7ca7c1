"""What takes the place of matches: modules, functions, compiled parts and recomputed ones."""

import copy
import shutil
import warnings

import pytest

pytest.importorskip("torch")

import torch
from schedules import check_invariants, same_state, state_of
from torch import nn
from torch.nn import functional as F

from makespan.slapo import call_module, create_schedule, replay
from makespan.slapo.graphs import FusedModule


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.dropout, self.norm = nn.Dropout(0.5), nn.LayerNorm(8)

    def forward(self, hidden, mask):
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        shares = torch.softmax(query @ key.transpose(-1, -2) / 2.0 + mask, -1)
        return self.norm(self.dropout(shares @ value) + hidden)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, hidden, mask):
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden


def attention(query, key, value, mask, scale):
    return torch.softmax(query @ key.transpose(-1, -2) / scale + mask, -1) @ value


def efficient(query, key, value, mask, scale):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1 / scale)


def tail(data, residual, weight, bias):
    return F.layer_norm(F.dropout(data) + residual, (8,), weight, bias)


class Fused(nn.Module):
    """Queries, keys and values by one product."""

    def __init__(self, layer, index=None):
        super().__init__()
        parts = [layer.query, layer.key, layer.value]
        self.all = nn.Linear(8, 24)
        with torch.no_grad():
            self.all.weight.copy_(torch.cat([one.weight for one in parts]))
            self.all.bias.copy_(torch.cat([one.bias for one in parts]))

    def forward(self, hidden):
        return self.all(hidden).chunk(3, -1)


@pytest.fixture
def sch():
    torch.manual_seed(0)
    return create_schedule(Model().eval())


@pytest.fixture
def inputs():
    draw = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 8, generator=draw), torch.randn(3, 3, generator=draw)


def gradients(model, inputs):
    model.zero_grad()
    output = model(*inputs)
    output.square().sum().backward()
    return output, {name: one.grad.clone() for name, one in model.named_parameters()}


@pytest.fixture
def same(sch, inputs):
    """Return a function that compares a schedule's model with the one that it was made of."""
    expected, grads = gradients(copy.deepcopy(sch.mod), inputs)
    keys = list(sch.mod.state_dict())

    def compare(other=sch, renamed=False):
        check_invariants(other)
        output, found = gradients(other.mod, inputs)
        torch.testing.assert_close(output, expected)
        if not renamed:
            assert list(other.mod.state_dict()) == keys
            for name, one in found.items():
                torch.testing.assert_close(one, grads[name])

    return compare


def test_a_function_takes_the_place_of_each_match_by_the_order_of_the_pattern(sch, same):
    for layer in sch.find(attention):
        sch.replace(efficient, layer)
    assert not sch.find(attention)
    assert len(sch.find_node(lambda node: node.target is efficient)) == 2
    same()


def test_several_matches_with_different_inputs_need_a_factory(sch, same):
    matches = sch.find(attention)
    before = state_of(sch)
    with pytest.raises(ValueError, match=r"replace of '': got 2 matches with different inputs; .* each=True"):
        sch.replace(efficient, matches)
    with pytest.raises(TypeError, match="each=True with a module"):
        sch.replace(nn.GELU(), matches, each=True)
    assert same_state(before, state_of(sch))
    made = []
    sch.replace(lambda index: made.append(index) or efficient, matches, each=True)
    assert made == [0, 1]
    same()


@pytest.mark.parametrize(
    "pattern",
    ["query|key|value", lambda x: tuple(call_module(name, x) for name in ("query", "key", "value"))],
)
def test_matches_with_the_same_input_become_one_call(sch, same, pattern):
    for path in ("layers.0", "layers.1"):
        layer = sch[path]
        fused = Fused(layer.mod)
        layer.replace(fused, layer.find(pattern), name="qkv")
        assert layer["qkv_0"].mod is fused and "query" not in layer
    same(renamed=True)


def test_names_are_fresh_and_owners_below_are_reached(sch, same):
    for match in sch.find(attention):
        sch.replace(type("Efficient", (nn.Module,), {"forward": staticmethod(efficient)})(), match)
    assert "layers.0.Efficient_0" in sch and "layers.1.Efficient_0" in sch
    layer = sch["layers.0"]
    layer.replace(nn.Dropout(0.5), layer.find("dropout"), name="Efficient")
    assert "layers.0.Efficient_1" in sch
    same()


def test_values_for_further_parameters_and_counts_that_do_not_fit(sch, same):
    def more(query, key, value, mask, scale, factor, *, twice=False):
        return efficient(query, key, value, mask, scale) * factor

    match = sch.find(attention)[0]
    before = state_of(sch)
    words = r"the match gives \(query, key, value, mask, scale\), but more takes \(query, .*factor.*\)"
    with pytest.raises(ValueError, match=words):
        sch.replace(more, match)
    with pytest.raises(ValueError, match=r"and concrete_args \(missing\)"):
        sch.replace(more, match, concrete_args={"missing": 1})
    assert same_state(before, state_of(sch))
    sch.replace(more, match, concrete_args={"factor": 1.0, "twice": True})
    same()


def test_a_value_that_others_use_is_not_taken_away():
    class Escapes(nn.Module):
        def forward(self, x):
            inner = torch.exp(x)
            return torch.tanh(inner) + inner

    sch = create_schedule(Escapes())
    match = sch.find(lambda x: torch.tanh(torch.exp(x)))
    code = sch.mod.code
    words = "the value 'exp' inside the match is used outside of it, by 'add'"
    for attempt in (sch.fuse, sch.checkpoint, lambda one: sch.replace(torch.sin, one)):
        with pytest.raises(ValueError, match=words):
            attempt(match)
    assert sch.mod.code == code and [entry.op for entry in sch.metadata.journal] == ["trace"]


def test_a_match_that_waits_for_its_own_result_is_refused_and_late_inputs_are_waited_for():
    class Waits(nn.Module):
        def forward(self, x):
            first = torch.exp(x)
            return first, torch.tanh(torch.sin(first) + x)

    def both(x, y):
        return torch.exp(x), torch.tanh(y)

    sch = create_schedule(Waits())
    with pytest.raises(ValueError, match="an input of the match depends on its value 'exp'"):
        sch.replace(both, sch.find(both))

    class Late(nn.Module):
        def forward(self, x):
            first = torch.exp(x)
            used = first + 1
            return used, torch.tanh(torch.sin(x))

    sch = create_schedule(Late())
    expected = sch.mod(torch.ones(2))
    sch.replace(both, sch.find(both))
    sch.mod.graph.lint()
    torch.testing.assert_close(sch.mod(torch.ones(2)), expected)


def test_hooks_at_the_ends_of_a_match_move_and_others_are_refused(sch, inputs):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)

        def forward(self, x):
            return self.three(self.two(self.one(x)))

    def pattern(x):
        return call_module("three", call_module("two", call_module("one", x)))

    calls = []
    sch = create_schedule(Two())
    sch["one"].mod.register_forward_pre_hook(lambda *_: calls.append("before"))
    sch["three"].mod.register_forward_hook(lambda *_: calls.append("after"))
    with pytest.raises(ValueError, match="has hooks, which a function cannot carry"):
        sch.replace(torch.sin, sch.find(pattern))
    sch.replace(nn.Tanh(), sch.find(pattern))
    sch.mod(torch.ones(4))
    assert calls == ["before", "after"]

    sch = create_schedule(Two())
    sch["two"].mod.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"replace of '': a ReLU in the match has hooks; expected"):
        sch.replace(nn.Tanh(), sch.find(pattern))


# --- fusion and recomputation ------------------------------------------------------------


@pytest.mark.parametrize("compiler", [None, "dynamo"])
def test_a_fused_part_keeps_names_modes_and_gradients(sch, same, inputs, compiler):
    for match in sch.find(tail):
        sch.fuse(match, compiler=compiler, name="Tail")
    assert type(sch["layers.0.Tail_0"].mod).__name__ == "Tail"
    assert [node.name for node in sch["layers.0.Tail_0"].mod.graph.nodes][:2] == ["data", "residual"]
    same()
    sch.mod.train()
    assert not torch.equal(sch.mod(*inputs), sch.mod(*inputs))
    sch.mod.eval()
    same()
    copied = copy.deepcopy(sch)
    layer = copied["layers.0"].mod
    assert layer.Tail_0.norm is layer.norm and layer.norm is not sch["layers.0"].mod.norm
    same(copied)


def test_a_fused_part_is_captured_as_one_graph(sch, inputs):
    sch.fuse(sch.find(tail)[0], compiler=None)
    captured = []

    def counting(graph, example):
        captured.append(graph)
        return graph.forward

    part = sch["layers.0.FusedModule_0"].mod
    torch.compile(part, backend=counting, fullgraph=True)(torch.ones(2, 3, 8), inputs[0])
    assert len(captured) == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and there is no g++")
def test_inductor_compiles_a_part(inputs):
    class Bias(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(8, 8)

        def forward(self, data):
            return F.gelu(self.dense(data))

    torch.manual_seed(0)
    sch = create_schedule(Bias())
    expected, grads = gradients(sch.mod, inputs[:1])
    sch["dense"].decompose()
    sch.fuse(sch.find(lambda product, bias: F.gelu(product + bias)))
    output, found = gradients(sch.mod, inputs[:1])
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(found, grads)


def test_without_a_compiler_the_part_runs_eagerly_and_says_so(sch, same, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler"):
        sch.fuse(sch.find(tail)[0])
    assert sch["layers.0.FusedModule_0"].mod.backend is None
    same()


def test_what_cannot_be_fused_is_refused(sch):
    matches, before = sch.find(tail), state_of(sch)
    for wrong, words in (
        (matches, "got 2 matches; expected one match of at least two nodes"),
        (sch.find("norm")[:1], "got a match of one node"),
        ([], "got no match"),
    ):
        with pytest.raises(ValueError, match=words):
            sch.fuse(wrong)
    with pytest.raises(
        ValueError, match=r"compiler is 'xla'; expected one of 'inductor', 'dynamo', 'torchscript', None"
    ):
        sch.fuse(matches[0], compiler="xla")
    with pytest.raises(TypeError, match="expected the result of find or find_node"):
        sch.fuse(3)
    assert same_state(before, state_of(sch))


def test_a_match_that_was_used_is_refused(sch):
    match = sch.find(tail)[0]
    sch.fuse(match, compiler=None)
    with pytest.raises(ValueError, match=r"is no longer in the graph of 'layers\.0'; search again"):
        sch.fuse(match, compiler=None)


def test_tensors_of_a_fused_part_are_not_sharded_and_its_modules_can_be_replaced(sch, inputs):
    sch.fuse(sch.find(tail)[0], compiler=None)
    with pytest.raises(RuntimeError, match=r"shard of 'layers\.0\.norm': .* conflicts with step 2: fuse\("):
        sch["layers.0.norm"].shard("weight", 0)
    before = sch.mod(*inputs)
    sch["layers.0.norm"].replace(nn.Identity().eval())
    assert not torch.equal(sch.mod(*inputs), before)


def test_recomputed_parts_keep_fewer_tensors(sch, same, inputs):
    def kept():
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one: sizes.append(one.numel()) or one, lambda one: one
        ):
            sch.mod(*inputs).sum()
        return sum(sizes)

    whole = kept()
    for match in sch.find(attention):
        sch.checkpoint(match)
    assert kept() < whole
    assert isinstance(sch["layers.0.Recomputed_0"].mod, FusedModule)
    same()


def test_the_order_of_inputs_can_be_chosen(sch, same):
    first = sch.find(attention)[0]
    with pytest.raises(ValueError, match="order_args_fn returned"):
        sch.checkpoint(first, order_args_fn=lambda nodes: nodes[:-1])
    sch.checkpoint(first, order_args_fn=lambda nodes: nodes[::-1])
    assert sch["layers.0.Recomputed_0"].mod.argument_names == ("mask", "value", "key", "query")
    same()


def test_a_wrapped_module_keeps_its_graph(sch):
    sch.trace()
    sch["layers.0"].checkpoint()
    for attempt in (lambda one: sch.fuse(one, compiler=None), lambda one: sch.replace(efficient, one)):
        with pytest.raises(
            RuntimeError, match=r"its forward is wrapped, conflicts with step 2: checkpoint\(\)"
        ):
            attempt(sch.find(tail if attempt is sch.fuse else attention)[0])


def test_what_stands_in_the_graph_of_its_owner_takes_no_hooks():
    sch = create_schedule(nn.Sequential(nn.Linear(4, 4)))
    sch["0"].decompose()
    sch.trace()
    for primitive in (lambda node: node.sync("bwd_post", "all_reduce"), lambda node: node.checkpoint()):
        with pytest.raises(RuntimeError, match=r"conflicts with step 2: trace\(\)"):
            primitive(sch["0"])


def test_a_journal_with_matches_is_replayed(sch, same):
    sch.replace(efficient, sch.find(attention)[1])
    sch.fuse(sch.find(tail)[0], compiler=None)
    sch.checkpoint(sch.find(attention)[0])
    torch.manual_seed(0)
    again = replay(Model().eval(), sch.dump())
    assert [str(one) for one in again.metadata.journal] == [str(one) for one in sch.metadata.journal]
    assert again["layers.1"].mod.code == sch["layers.1"].mod.code
    same(again)


def test_a_rewritten_schedule_prints_readably(sch, golden):
    sch.replace(efficient, sch.find(attention)[0])
    sch["layers.1"].checkpoint(sch["layers.1"].find(attention))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sch.fuse(sch.find(tail)[0], compiler="dynamo", name="Tail")
    golden(str(sch))
