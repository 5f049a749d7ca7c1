"""Where a model is cut into pipeline stages, what the stages hand on, and which cuts are refused."""

import copy

import pytest

pytest.importorskip("torch")

import torch
from pipeline_cases import CUTS, EncoderDecoder, cut, sample, seeded
from schedules import check_invariants, same_state, state_of
from torch import nn
from torch.nn import functional as F

from makespan.slapo import build, create_schedule
from makespan.slapo.pipelining import default_cuts, partition


@pytest.mark.parametrize(
    ("paths", "values"),
    [
        ([], []),
        (["encoder.block.1"], [("target", "to", "block_1")]),
        (["encoder"], [("target", "to", "getitem")]),
        # The norm behind the last block of the encoder is a stage of its own only if the encoder is cut, too.
        (["encoder.block.2", "decoder.block.1"], [("target", "to", "block_2"), ("to", "block_4")]),
        (CUTS[4], [("target", "to", "block_1"), ("target", "to", "norm"), ("to", "block_4")]),
    ],
)
def test_stages_hand_on_what_they_and_later_ones_need(paths, values):
    model = seeded()
    reference, keys = copy.deepcopy(model), set(model.state_dict())
    sch = cut(model, paths)
    check_invariants(sch)
    parts = partition(sch)
    assert len(parts.stages) == len(paths) + 1
    found = [tuple(name for name in one if name != "source") for one in parts.values]
    assert len(found) == len(values)
    source, target, _ = sample()
    assert torch.equal(parts.run(source, target), reference(source, target))
    assert set().union(*(stage.state_dict() for stage in parts.stages)) == keys
    assert [len(one) for one in found] == [len(one) for one in values]


def test_ties_across_stages_are_reported():
    (tie,) = partition(cut(seeded(), CUTS[4])).ties
    assert tie.paths == {0: "words.weight", 2: "words.weight", 3: "head.weight"}
    assert not partition(cut(seeded(), [])).ties


def test_numbers_are_computed_where_they_are_needed_and_do_not_travel():
    parts = partition(cut(seeded(), ["encoder"]))
    assert not any("size" in name for values in parts.values for name in values)
    assert len(parts.stages[1].graph.find_nodes(op="call_method", target="size")) == 1


def test_cuts_are_refused_where_no_stage_can_end():
    sch = create_schedule(EncoderDecoder())
    with pytest.raises(
        RuntimeError, match=r"'encoder' above it is not traced; call trace_until\('encoder'\)"
    ):
        sch["encoder.block.0"].cut_pipeline_stage()
    sch.trace_until("encoder")
    sch["encoder.block.0"].cut_pipeline_stage()
    before = state_of(sch)
    for path, kind, words in (
        ("", ValueError, "nothing follows the whole model"),
        ("encoder.block.0", RuntimeError, r"a stage already ends here, conflicts with step 2: cut_pipeline"),
        ("encoder.block.0.up", RuntimeError, r"'encoder\.block\.0' above it is not traced"),
        ("words", ValueError, "its owner calls it 2 times; expected one call"),
    ):
        with pytest.raises(kind, match=words):
            sch[path].cut_pipeline_stage()
    assert same_state(before, state_of(sch))


def test_a_stage_computes_something():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, data):
            return self.inner(self.first(data))

    sch = create_schedule(Chain())
    sch.trace_until("inner")
    for path in ("inner", "inner.1"):
        with pytest.raises(
            ValueError, match=rf"cut_pipeline_stage of '{path}': stage 1 of 2 would compute nothing"
        ):
            sch[path].cut_pipeline_stage()
    sch["first"].cut_pipeline_stage()


def test_nothing_is_cut_inside_what_is_wrapped_or_hooked():
    sch = create_schedule(EncoderDecoder())
    sch.trace_until(["encoder", "decoder"])
    sch["encoder"].checkpoint()
    sch["decoder"].mod.register_forward_hook(lambda *_: None)
    with pytest.raises(
        RuntimeError, match=r"'encoder' above it is wrapped, conflicts with step 2: checkpoint\(\)"
    ):
        sch["encoder.block.0"].cut_pipeline_stage()
    with pytest.raises(RuntimeError, match="'decoder' above it has hooks, which stages do not run"):
        sch["decoder.block.0"].cut_pipeline_stage()


def test_parts_that_were_fused_take_their_tensors_along():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
            self.register_buffer("shift", torch.ones(4), persistent=False)

        def forward(self, data):
            return self.norm(torch.relu(self.linear(data))) + self.shift

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, data):
            for layer in self.layers:
                data = layer(data)
            return data

    model = Chain()
    data, keys = torch.randn(3, 4), set(model.state_dict())
    expected = model(data)
    sch = create_schedule(model)
    sch.trace()
    for match in sch.find(lambda x, w, b: F.layer_norm(torch.relu(x), (4,), w, b)):
        sch.fuse(match, compiler=None)
    sch["layers.0.linear"].cut_pipeline_stage()
    parts = partition(sch)
    torch.testing.assert_close(parts.run(data), expected)
    assert set().union(*(stage.state_dict() for stage in parts.stages)) == keys
    assert "layers.0.norm.weight" in dict(parts.stages[1].named_parameters())


def test_layers_are_spread_over_stages():
    assert default_cuts(24, 4) == [5, 11, 17]
    assert default_cuts(7, 3) == [1, 3]
    assert default_cuts(3, 3) == [0, 1] and default_cuts(3, 1) == []
    for layers, stages in ((3, 4), (3, 0)):
        with pytest.raises(
            ValueError, match=f"{layers} layers, {stages} stages; expected 1 to {layers} stages"
        ):
            default_cuts(layers, stages)


def test_a_pipeline_needs_processes():
    with pytest.raises(ValueError, match="pipeline without a process group; call init_process_group"):
        build(cut(seeded(), CUTS[2]), "pipeline", n_microbatches=2)
