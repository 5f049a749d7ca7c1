"""What shard and sync do to a model, and which calls they refuse; groups are played by one process."""

import copy
import re
from functools import partial
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch import fx, nn

from makespan.slapo import (
    ArgumentError,
    ConflictError,
    KindError,
    MemberError,
    ShardError,
    build,
    create_schedule,
    init_empty_weights,
    load_full_state_dict,
    pad_vocabulary,
)
from makespan.slapo.layouts import Exchange, TensorShard, cut, joined, sharding_of
from makespan.slapo.sharding import ShardEffect, register_shard_rule
from makespan.slapo.syncing import ExchangeInputs, ExchangeOutput


def scheduled(model, size=2, rank=0):
    """Return a schedule that believes to be one of several processes; what it does needs no others."""
    sch = create_schedule(model)
    for _, node in sch.named_schedules():
        node.world_size, node.rank = size, rank
    return sch


def layer(kind, *sizes, **options):
    return scheduled(nn.ModuleDict({"one": kind(*sizes, **options)}))["one"]


def refused(error, call, *parts):
    """Check that a call is refused with these parts in its message."""
    with pytest.raises(error) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: nn.LSTM(4, 8), "weight_ih_l0"),
        (lambda: nn.GRU(4, 8), "bias_hh_l0"),
        (lambda: nn.MultiheadAttention(8, 2), "in_proj_weight"),
        (lambda: nn.LayerNorm(8), "weight"),
        (lambda: nn.GroupNorm(2, 8), "weight"),
        (lambda: nn.EmbeddingBag(8, 4), "weight"),
    ],
)
def test_a_layer_of_torch_without_a_rule_is_not_sharded(made, name, size):
    """An LSTM reads memory beyond a part of its weight."""
    model = made()
    before = {key: one.clone() for key, one in model.state_dict().items()}
    sch = scheduled(nn.ModuleDict({"one": model}), size)["one"]
    kind = type(model).__name__
    refused(
        ShardError, lambda: sch.shard(name, 0), name, f"{kind} of torch.nn", f"register_shard_rule({kind})"
    )
    assert all(torch.equal(one, before[key]) for key, one in model.state_dict().items())


def test_layers_that_treat_channels_alone_are_sharded_by_channel():
    rows, other = torch.randn(3, 4, 5), torch.randn(3, 6)
    norm, slope, pairs = nn.InstanceNorm1d(4, affine=True), nn.PReLU(4), nn.Bilinear(5, 6, 4)
    nn.init.normal_(norm.weight)
    nn.init.normal_(slope.weight)
    for whole, inputs, names in (
        (norm, (rows,), ["weight", "bias"]),
        (slope, (rows,), ["weight"]),
        (pairs, (rows[:, 0], other), ["weight", "bias"]),
    ):
        parts = []
        for rank in range(2):
            sch = scheduled(nn.ModuleDict({"one": copy.deepcopy(whole)}), 2, rank)["one"]
            sch.shard(names, 0)
            own = inputs if whole is pairs else (inputs[0][:, 2 * rank : 2 * rank + 2],)
            parts.append(sch.mod(*own))
        assert torch.allclose(torch.cat(parts, 1), whole(*inputs), atol=1e-6), type(whole).__name__
    refused(ShardError, lambda: layer(nn.Bilinear, 4, 6, 4).shard("weight", 1), "only outputs")


def test_parts_of_blocks_join_to_the_whole():
    whole = torch.arange(24.0).reshape(12, 2)
    for groups in (1, 2, 3):
        parts = [TensorShard((12, 2), 0, groups, rank, 2).part_of(whole) for rank in range(2)]
        assert torch.equal(joined(parts, 0, groups), whole)
    assert cut(whole, 0, 2, 3)[1][:, 0].tolist() == [4, 6, 12, 14, 20, 22]
    assert TensorShard((12, 2), 0, 3, 1, 2).shape == (6, 2)


def test_blocks_of_different_sizes_are_cut_each_by_itself():
    whole = torch.arange(16).reshape(1, 16)
    parts = cut(whole, 1, 2, (8, 4, 4))
    assert parts[1].tolist() == [[4, 5, 6, 7, 10, 11, 14, 15]]
    assert torch.equal(joined(parts, 1, (8, 4, 4)), whole)
    shard = TensorShard((1, 16), 1, (8, 4, 4), 1, 2)
    assert torch.equal(shard.part_of(whole), parts[1]) and torch.equal(shard.whole_of(parts), whole)
    node = layer(nn.Linear, 4, 16)
    refused(ArgumentError, lambda: node.shard("weight", 0, groups=[8, 4]), "add up to 16")
    refused(ArgumentError, lambda: node.shard("weight", 0, groups=[8, -4, 12]), "[8, -4, 12]", "sizes > 0")
    refused(ArgumentError, lambda: node.shard("weight", 0, groups="three"), "the sizes of blocks")
    refused(ShardError, lambda: node.shard("weight", 0, groups=[8, 5, 3]), "block of size 5", "2 processes")
    refused(ArgumentError, lambda: node.shard("weight", 0, unit=0), "unit is 0")
    node.shard(["weight", "bias"], 0, groups=[8, 4, 4])
    assert str(sharding_of(node.mod).returns) == "partition on axis -1 in groups of 8, 4, 4"
    assert "groups=[8, 4, 4]" in str(node.metadata.journal[0])


def test_heads_are_not_cut_through():
    owner = nn.Module()
    owner.head_dim, owner.k_proj, owner.gate = 8, nn.Linear(8, 16, bias=False), nn.Linear(8, 4, bias=False)
    sch = scheduled(owner, size=4)
    refused(ShardError, lambda: sch["k_proj"].shard("weight", 0), "2 heads or units of 8", "4 processes")
    sch["gate"].shard("weight", 0)  # its outputs are no heads
    sch["k_proj"].shard("weight", 0, unit=1)
    assert sch["k_proj"].mod.out_features == 4


def test_a_part_replaces_the_whole_and_says_what_it_is():
    model = nn.Sequential(nn.Linear(4, 6))
    weight = model[0].weight
    weight.no_decay = True
    sch = scheduled(model, rank=1)
    sch["0"].annotate("weight", "kept", "kept")
    sch["0"].shard("weight", -2)
    sch["0"].shard("bias", -1)
    part = model[0].weight
    assert torch.equal(part, weight[3:]) and part.untyped_storage().nbytes() == 3 * 4 * 4
    assert (part.kept, part.no_decay) == ("kept", True)  # as in a single process
    assert part.shard == TensorShard((6, 4), 0, 1, 1, 2)
    assert part.shard.orig_shape == (6, 4)
    assert isinstance(part, nn.Parameter) and part.requires_grad
    assert (model[0].in_features, model[0].out_features) == (4, 3)


def test_one_process_keeps_the_parameters_that_it_has():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Embedding(5, 4))
    before, kinds = dict(model.named_parameters()), [type(one) for one in model]
    sch = create_schedule(model)
    sch["0"].shard(["weight", "bias"], 0)
    sch["0"].sync("bwd_post", "all_reduce")
    sch["1"].shard("weight", 1)
    sch["1"].sync("fwd_post", "all_reduce")
    sch["2"].shard("weight", 0)
    assert all(before[name] is one for name, one in model.named_parameters())
    assert [type(one) for one in model] == kinds
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model)
    assert sharding_of(model[0]).tensors["weight"].world_size == 1
    with pytest.raises(ArgumentError, match="all_gather, but it returns replicated"):
        sch["1"].sync("fwd_post", "all_gather")


def test_parameters_on_meta_are_sharded_by_shape():
    sch = scheduled(nn.ModuleDict({"one": nn.Linear(4, 6, device="meta")}))["one"]
    sch.shard(["weight", "bias"], 0)
    assert sch.mod.weight.is_meta and sch.mod.weight.shape == (3, 4)


def test_what_cannot_be_sharded_is_refused_with_numbers():
    sch = layer(nn.Linear, 4, 6, bias=False)
    before = copy.deepcopy(vars(sch.mod))
    for call, error, parts in (
        (lambda: sch.shard("weights", 0), MemberError, ("'one'", "Linear", "'weight'")),
        (lambda: sch.shard("bias", 0), MemberError, ("'bias'", "None")),
        (lambda: sch.shard("weight", 2), ArgumentError, ("axis 2", "(6, 4)", "-2 to 1")),
        (lambda: sch.shard("weight", "0"), ArgumentError, ("axis '0'",)),
        (lambda: sch.shard("weight", 0, groups=0), ArgumentError, ("groups is 0",)),
        (lambda: sch.shard("weight", 1, groups=4), ShardError, ("size 4", "in 4 groups", "2 processes")),
        (lambda: sch.shard([], 0), KindError, ("[]",)),
        (lambda: sch.shard(["weight", "weight"], 0), KindError, ("weight",)),
    ):
        refused(error, call, *parts)
        assert vars(sch.mod).keys() == before.keys() and not sch.metadata.journal
    refused(ShardError, lambda: layer(nn.Linear, 4, 5).shard("weight", 0), "'one'", "size 5", "2 processes")


def test_a_second_axis_is_refused_with_the_first_step():
    sch = layer(nn.Linear, 4, 6)
    sch.shard("weight", 0)
    refused(ConflictError, lambda: sch.shard("weight", 1), "axis 0 already", "step 1: shard")
    refused(ConflictError, lambda: sch.shard("weight", 0), "axis 0 already")
    row = layer(nn.Linear, 4, 6)
    row.shard("weight", 1)
    refused(ConflictError, lambda: row.shard("bias", 0), "partition on axis -1", "partial")
    fused = layer(nn.Linear, 4, 6)
    fused.shard("weight", 0, groups=3)
    refused(ConflictError, lambda: fused.shard("bias", 0), "on axis -1, but partition on axis -1 in 3 groups")
    unknown = layer(nn.Linear, 4, 6)
    unknown.sync("fwd_post", "all_reduce")
    refused(ConflictError, lambda: unknown.shard("weight", 1), "shard before sync")


@pytest.mark.parametrize(
    ("kind", "sizes", "options", "call", "error", "text"),
    [
        (nn.Conv2d, (4, 4, 3), {}, ("weight", 2), ShardError, "size 3"),
        (nn.Conv2d, (4, 4, 2), {}, ("weight", 3), ArgumentError, "axis 3 belongs to the kernel"),
        (nn.Conv2d, (6, 6, 3), {"groups": 3}, ("weight", 0), ShardError, "3 groups do not divide"),
        (nn.Conv2d, (4, 4, 3), {"groups": 2}, ("weight", 1), ArgumentError, "2 groups can be cut"),
        (nn.Embedding, (4, 2), {"max_norm": 1.0}, ("weight", 0), ShardError, "max_norm and"),
        (nn.Embedding, (8, 2), {}, ("weight", 0, 2), ArgumentError, "consecutive rows"),
        (nn.BatchNorm2d, (4,), {}, ("weight", 1), ArgumentError, "axis 1"),
    ],
)  # fmt: skip
def test_layers_say_which_axes_they_cannot_be_cut_along(kind, sizes, options, call, error, text):
    refused(error, lambda: layer(kind, *sizes, **options).shard(*call), text, "'one'", kind.__name__)


class OwnForward(nn.Linear):
    def forward(self, data):
        return 2 * super().forward(data)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 2))


def test_users_add_rules():
    refused(ShardError, lambda: layer(OwnForward, 4, 4).shard("weight", 1), "overrides forward")
    layer(OwnForward, 4, 4, bias=False).shard("weight", 1)
    sch = layer(Odd)
    sch.shard("table", 0)
    assert sharding_of(sch.mod).computes is None

    @register_shard_rule(f"{Odd.__module__}.{Odd.__qualname__}")
    def rule(request):
        return ShardEffect(attributes={"n_rows": request.local})

    sch = layer(Odd)
    sch.shard("table", 0)
    assert sch.mod.n_rows == 2
    with pytest.raises(ValueError, match="got no layer"):
        register_shard_rule()


COLUMN, ROW = (lambda: _sharded(0)), (lambda: _sharded(1))


def _sharded(axis):
    sch = layer(nn.Linear, 4, 6)
    sch.shard(["weight", "bias"] if axis == 0 else "weight", axis)
    return sch


@pytest.mark.parametrize(
    ("make", "call", "parts"),
    [
        (COLUMN, ("fwd_post", "all_reduce"), ("partition on axis -1", "all_gather on axis -1")),
        (COLUMN, ("fwd_post", "reduce_scatter", 1), ("partition on axis -1",)),
        (COLUMN, ("fwd_post", "all_gather", 0), ("all_gather on axis 0", "partition on axis -1")),
        (COLUMN, ("fwd_post", "all_gather", -2), ("all_gather on axis -2",)),
        (COLUMN, ("fwd_post", "scatter", 0), ("scatter on axis 0",)),
        (COLUMN, ("fwd_post", "SR->RR"), ("SR->RR",)),
        (ROW, ("fwd_post", "all_gather"), ("returns partial", "all_reduce or reduce_scatter")),
        (ROW, ("fwd_post", "scatter", 0), ("returns partial",)),
        (ROW, ("fwd_post", "RR->RS"), ("returns partial",)),
        (ROW, ("fwd_post", "reduce_scatter"), ("reduce_scatter needs axis",)),
        (ROW, ("fwd_post", "sum"), ("'sum'", "all_reduce, all_gather")),
        (ROW, ("fwd_pre", "all_reduce"), ("'fwd_pre'", "expected one of all_gather")),
        (ROW, ("bwd_pre", "all_reduce"), ("mode is 'bwd_pre'", "fwd_post, fwd_pre, bwd_post")),
        (ROW, ("fwd_post", "all_reduce", 0), ("does not take this axis",)),
    ],
)  # fmt: skip
def test_exchanges_that_contradict_what_a_module_returns_are_refused(make, call, parts):
    sch = make()
    mode, op, *axis = call
    refused(
        ArgumentError, lambda: sch.sync(mode, op, axis=axis[0] if axis else None), "'one'", "Linear", *parts
    )
    assert len(sch.metadata.journal) == 1 and not sch.mod._forward_hooks


def test_a_second_incompatible_exchange_is_refused():
    sch = ROW()
    sch.sync("fwd_post", "all_reduce")
    refused(ArgumentError, lambda: sch.sync("fwd_post", "all_reduce"), "replicated", "step 2: sync")
    sch.sync("bwd_post", "all_reduce")  # not needed here, but legal
    sch.sync("fwd_post", "RR->SR")
    assert sharding_of(sch.mod).returns.axis == -2


def test_other_options_are_refused_where_they_mean_nothing():
    sch = layer(nn.Linear, 4, 6)
    for options in (
        {"mode": "fwd_post", "sync_op_or_fn": "all_reduce", "inputs": ["input"]},
        {"mode": "bwd_post", "sync_op_or_fn": "all_reduce", "output": 0},
        {"mode": "bwd_post", "sync_op_or_fn": "all_reduce", "on": "weights"},
        {"mode": "bwd_post", "sync_op_or_fn": "all_reduce", "tensor_parallel_output_grad": False},
    ):
        refused(ArgumentError, lambda options=options: sch.sync(**options), "does not take this")
    refused(ArgumentError, lambda: sch.sync("bwd_post", "all_reduce", inputs=["x"]), "no input 'x'", "input")
    of_weights = {"mode": "bwd_post", "sync_op_or_fn": "all_reduce", "on": "parameters", "inputs": ["input"]}
    refused(
        ArgumentError, lambda: sch.sync(**of_weights), "no parameter 'input'", "expected one of weight, bias"
    )
    refused(ArgumentError, lambda: sch.sync("bwd_post", "average"), "average is for gradients of parameters")
    refused(KindError, lambda: sch.sync("fwd_post", 3), "got 3")


def test_an_axis_counted_from_the_other_end_is_checked_with_the_first_output():
    sch = COLUMN()
    sch.sync("fwd_post", "all_gather", axis=1)
    with pytest.raises(ArgumentError, match=r"all_gather on axis 1 of an output of shape \(2, 5, 3\)"):
        sch.mod(torch.ones(2, 5, 4))


def test_a_tuple_must_be_taken_apart():
    class Pair(nn.Module):
        def forward(self, data):
            return data, None

    sch = scheduled(nn.ModuleDict({"one": Pair()}))["one"]
    sch.sync("fwd_post", "all_reduce")
    with pytest.raises(
        ShardError,
        match=r"'one'.*returned a tuple; expected a tensor; name the element to exchange by output=",
    ):
        sch.mod(torch.ones(2))


def test_hooks_of_users_are_called_with_what_torch_hands_over():
    sch, seen = layer(nn.Linear, 4, 6), []
    sch.sync("fwd_pre", lambda mod, inputs: seen.append(("pre", len(inputs))))
    sch.sync("fwd_post", lambda mod, inputs, out: seen.append(("post", tuple(out.shape))))
    sch.sync("bwd_post", lambda mod, grads_in, grads_out: seen.append(("grads", len(grads_out))))
    sch.mod(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert seen == [("pre", 1), ("post", (2, 6)), ("grads", 1)]


def test_ties_are_kept_or_refused():
    def tied():
        model = nn.ModuleDict({"words": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
        model["head"].weight = model["words"].weight
        return scheduled(model)

    sch = tied()
    sch["words"].shard("weight", 0)
    sch["head"].shard("weight", 0)
    assert sch.mod["words"].weight is sch.mod["head"].weight
    sch = tied()
    sch["words"].shard("weight", 0)
    refused(ShardError, lambda: sch["head"].shard("weight", 1), "tied to 'words.weight'", "(3, 4)", "(6, 2)")


def test_a_decomposed_layer_shows_what_is_between_product_and_bias():
    for order in ("shard", "decompose"):
        model = nn.ModuleDict({"one": nn.Linear(4, 6)})
        sch = scheduled(model)["one"]
        if order == "decompose":
            sch.decompose()
        sch.shard("weight", 1)
        sch.sync("fwd_post", "all_reduce")
        if order == "shard":
            sch.decompose()
        assert sharding_of(sch.mod).tensors and isinstance(sch.mod, nn.Linear)
        graph = fx.symbolic_trace(sch.mod)
        calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        assert len(calls) == 3 and isinstance(calls[1], Exchange), calls
        assert "all_reduce" in graph.code
        refused(ConflictError, sch.decompose, "already decomposed")


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.words(ids))


def test_a_padded_vocabulary_divides_and_gives_the_same_logits():
    model, ids = Words(), torch.tensor([[0, 4, 2]])
    expected = model(ids)
    refused(ShardError, lambda: scheduled(model)["words"].shard("weight", 0), "size 5", "pad the tensor")
    assert pad_vocabulary(model, ["words", "head"], 4) == 8
    assert model.head.weight is model.words.weight
    assert (model.words.num_embeddings, model.head.out_features, len(model.head.bias)) == (8, 8, 8)
    torch.testing.assert_close(model(ids)[..., :5], expected)
    scheduled(model, 4)["words"].shard("weight", 0)


def test_what_has_no_vocabulary_is_not_padded():
    model = nn.ModuleDict({"words": Words(), "norm": nn.LayerNorm(4), "other": nn.Embedding(6, 4)})
    for paths, multiple, error, text in (
        (["words.worlds"], 4, KeyError, "no module 'words.worlds'"),
        (["norm"], 4, ArgumentError, "'norm' is a LayerNorm; expected an embedding or a linear layer"),
        (["words.words", "other"], 4, ArgumentError, "'words.words' with 5, 'other' with 6"),
        (["other"], 0, ArgumentError, "a multiple of 0"),
        ([], 4, ArgumentError, "no path"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            pad_vocabulary(model, paths, multiple)
    scheduled(model)["other"].shard("weight", 0)
    with pytest.raises(ConflictError, match="'other' is already sharded"):
        pad_vocabulary(model, ["other"], 4)


def test_a_replacement_with_the_same_parameters_knows_how_they_are_sharded():
    class Scaled(nn.Linear):
        def __init__(self, old):
            super().__init__(4, 6)
            self.weight = old.weight

    sch = layer(nn.Linear, 4, 6)
    sch.shard(["weight", "bias"], 0)
    sch.replace(Scaled)
    assert sharding_of(sch.mod).tensors.keys() == {"weight"}


class Pair(NamedTuple):
    """A pair by names, as outputs of models are."""

    one: object
    other: object


def test_exchanged_values_keep_their_classes():
    exchange = Exchange("double", lambda one: 2 * one, lambda one: 2 * one)
    rows = torch.ones(2)
    before = ExchangeInputs(exchange, None, "here", of_gradients=False)
    (pair, by_name), kwargs = before(None, (Pair(rows, "a word"), {"rows": [rows]}), {"rows": (rows, 3)})
    assert isinstance(pair, Pair) and torch.equal(pair.one, 2 * rows) and pair.other == "a word"
    assert torch.equal(by_name["rows"][0], 2 * rows)
    assert type(kwargs["rows"]) is tuple and kwargs["rows"][1] == 3
    after = ExchangeOutput(exchange, 0, None, None, "here")
    found = after(None, (), Pair(rows, None))
    assert isinstance(found, Pair) and torch.equal(found.one, 2 * rows) and found.other is None
    assert type(after(None, (), (rows, None))) is tuple


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameter_with_a_hook_on_its_gradient_is_not_replaced(register):
    node = layer(nn.Linear, 4, 8)
    getattr(node.mod.weight, register)(lambda gradient: None)
    before = node.mod.weight
    refused(ConflictError, lambda: node.shard(["bias", "weight"], 0), "'weight' has a hook on its gradient")
    assert node.mod.weight is before and node.mod.bias.shape == (8,)
    alone = create_schedule(nn.ModuleDict({"one": nn.Linear(4, 8)}))["one"]
    getattr(alone.mod.weight, register)(lambda gradient: None)
    alone.shard("weight", 0)  # a single process keeps the parameter


def test_hooks_and_attributes_of_parameters_without_values():
    def empty():
        with init_empty_weights():
            return create_schedule(nn.Sequential(nn.Linear(4, 8)))

    values = {"0.weight": torch.ones(8, 4), "0.bias": torch.ones(8)}
    for fill in (partial(build, seed=1), partial(load_full_state_dict, state=values)):
        sch = empty()
        sch.mod[0].weight.no_decay = True
        fill(sch)
        assert sch.mod[0].weight.no_decay and not sch.mod[0].weight.is_meta
        sch = empty()
        sch.mod[0].weight.register_hook(lambda gradient: None)
        refused(ConflictError, partial(fill, sch), "weight' has a hook", "register the hook afterwards")


def test_rows_take_the_arguments_of_the_whole_layer_and_return_its_type():
    up, image = nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1), torch.randn(1, 4, 3, 3)
    parts = []
    for rank in range(2):
        sch = scheduled(nn.ModuleDict({"one": copy.deepcopy(up)}), 2, rank)["one"]
        sch.shard("weight", 0)
        own = image[:, 2 * rank : 2 * rank + 2]
        parts.append(sch.mod(input=own, output_size=(6, 6)) - sch.mod.bias.view(-1, 1, 1))
    expected = up(image, output_size=(6, 6))
    torch.testing.assert_close(sum(parts) + up.bias.view(-1, 1, 1), expected)
    for kind, inputs in ((nn.Linear, torch.randn(2, 4)), (nn.Conv1d, torch.randn(2, 4, 5))):
        node = layer(kind, 8, 4, **({"kernel_size": 1} if kind is nn.Conv1d else {}))
        node.shard("weight", 1)
        with torch.autocast("cpu", torch.bfloat16):
            assert node.mod(input=inputs).dtype == torch.bfloat16


def test_a_part_of_a_vocabulary_rejects_ids_that_the_whole_rejects():
    node = layer(nn.Embedding, 8, 4, sparse=True)
    node.shard("weight", 0)
    assert (
        not node.mod(input=torch.tensor([4, 7])).any() and node.mod(torch.tensor([], dtype=int)).numel() == 0
    )
    for ids in ([0, 8], [-1, 0]):
        with pytest.raises(RuntimeError, match="embedding: an id is outside of the 8 rows"):
            node.mod(torch.tensor(ids))
    node.mod(torch.tensor([1, 5])).sum().backward()
    assert node.mod.weight.grad.is_sparse


@pytest.mark.parametrize(
    ("axis", "reason"), [(0, "ids of other processes"), (1, "a part of a row has another")]
)
def test_an_embedding_that_normalises_its_rows_is_not_cut(axis, reason):
    refused(ShardError, lambda: layer(nn.Embedding, 8, 4, max_norm=1.0).shard("weight", axis), reason)
