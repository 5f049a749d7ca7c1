"""Schedules of the families: every option leaves outputs and gradients as they were, and refusals say why."""

import pytest

torch = pytest.importorskip("torch")

from schedules import check_invariants, same_state, state_of
from torch import nn

from makespan.slapo import (
    SCHEDULES,
    ArgumentError,
    ConflictError,
    KindError,
    PathError,
    ScheduleError,
    ShardError,
    TracingError,
    Verify,
    apply_schedule,
    create_schedule,
    select_layers,
)
from makespan.training.zoo import FAMILIES, build_family, family_batch, family_sizes, family_spec

FUSED = {"shard_embedding": True, "fuse": True, "compiler": "dynamo", "ckpt_ratio": 0.5}
ALL = [(family, size) for family in FAMILIES for size in family_sizes(family)]


def accepted(family, **options):
    """Options that a family has: WideResNet has no attention, ALBERT no layers to cut between."""
    left_out = {"wideresnet": ("attn",), "albert": ("pipeline_cuts",)}.get(family, ())
    return {name: value for name, value in options.items() if name not in left_out}


def verified(family, **options):
    sch = create_schedule(build_family(family))
    with Verify(sch, family_batch(family_spec(family), 2, 0).inputs):
        apply_schedule(sch, family, **options)
    return sch


def on_meta(family, size, n_processes, **options):
    """Schedule a model without values as the first of several processes does."""
    sch = create_schedule(build_family(family, size, meta=True))
    for _, node in sch.named_schedules():
        node.world_size = n_processes
    return apply_schedule(sch, family, **options)


def steps(sch, op):
    return [entry for entry in sch.metadata.journal if entry.op == op]


# --- results stay ---------------------------------------------------------------------------------------


def test_every_family_has_a_schedule():
    assert set(SCHEDULES) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_fusion_and_recomputation_leave_results_and_names(family):
    sch = verified(family, **accepted(family, **FUSED, attn="sdpa"))
    check_invariants(sch)
    assert list(sch.mod.state_dict()) == list(build_family(family).state_dict())
    assert steps(sch, "fuse")
    assert steps(sch, "checkpoint") or family == "albert"


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_leave_results(family):
    options = accepted(family, shard_embedding=True, attn="sdpa", ckpt_ratio=1.0, pipeline_cuts=2)
    sch = verified(family, **options)
    check_invariants(sch)
    assert len(steps(sch, "cut_pipeline_stage")) == (family != "albert")


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_draws_the_dropout_that_the_model_draws(family):
    spec, model = family_spec(family), build_family(family)
    inputs = family_batch(spec, 2, 0).inputs

    def trained(one):
        torch.manual_seed(3)
        output = one(*inputs)
        (output * torch.linspace(0, 1, output.numel()).view_as(output)).sum().backward()
        gradients = [weight.grad.clone() for weight in one.parameters()]
        one.zero_grad()
        return output, *gradients

    before = trained(model)
    after = trained(apply_schedule(build_family(family), family, ckpt_ratio=1.0).mod)
    for expected, found in zip(before, after, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_schedule_prints_what_was_done(golden):
    options = {"shard_embedding": True, "attn": "sdpa", "fuse": True, "compiler": None, "ckpt_ratio": 0.5}
    sch = on_meta("bert", "tiny", 2, **options, pipeline_cuts=2)
    golden(str(sch), "tree")
    golden("\n".join(str(entry) for entry in sch.metadata.journal), "journal")


# --- what is split --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "size"), ALL)
def test_all_large_matrices_of_layers_are_split(family, size):
    whole = dict(build_family(family, size, meta=True).named_parameters())
    parts = dict(on_meta(family, size, 4).mod.named_parameters())
    names = [name for name, weight in whole.items() if weight.dim() > 1 and is_of_a_layer(name)]
    assert len(names) >= 6
    assert [name for name in names if whole[name].numel() != 4 * parts[name].numel()] == []


def is_of_a_layer(name):
    """Whether a parameter is in an element of a list, and not beside the layers."""
    words = name.split(".")
    return any(word.isdigit() for word in words) and "downsample" not in words


@pytest.mark.parametrize(("family", "size"), [("opt", "2.7b"), ("t5", "2.9b"), ("llama", "7b")])
def test_vocabularies_are_split_where_they_divide(family, size):
    split = on_meta(family, size, 8, shard_embedding=True).mod
    rows = family_spec(family, size).vocab
    tables = [weight for weight in split.parameters() if weight.dim() == 2 and rows // 8 in weight.shape]
    assert tables
    assert not [weight for weight in split.parameters() if weight.dim() == 2 and rows in weight.shape]


def test_vocabularies_that_do_not_divide_are_refused():
    with pytest.raises(ShardError, match=r"word_embeddings.* has size 30522, .* among 8 processes"):
        on_meta("bert", "1b", 8, shard_embedding=True)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(
        ShardError, match=r"'transformer.h.0.attn.attention': num_heads is 4; .*the 8 processes"
    ):
        on_meta("gpt", "tiny", 8)


# --- options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "policy"), [(0.0, "even"), (0.5, "even"), (0.5, "head"), (1.0, "even")])
def test_the_share_of_layers_that_is_asked_for_is_recomputed(ratio, policy):
    sch = apply_schedule(build_family("gpt"), "gpt", ckpt_ratio=ratio, ckpt_policy=policy)
    paths = [f"transformer.h.{index}" for index in select_layers(4, ratio, policy)]
    assert [entry.path for entry in steps(sch, "checkpoint")] == paths


def test_stages_may_end_where_a_user_says():
    sch = verified("t5", pipeline_cuts=["encoder", "decoder.block.0"])
    assert [entry.path for entry in steps(sch, "cut_pipeline_stage")] == ["encoder", "decoder.block.0"]


def test_a_model_may_be_part_of_a_larger_one():
    model = nn.ModuleDict({"student": build_family("opt"), "teacher": build_family("opt")})
    sch = apply_schedule(model, "opt", prefix="student", attn="sdpa", ckpt_ratio=1.0)
    assert {entry.path.partition(".")[0] for entry in sch.metadata.journal} == {"student"}
    (tokens,) = family_batch(family_spec("opt"), 2, 0).inputs
    model.eval()
    torch.testing.assert_close(sch["student"].mod(tokens), model["teacher"](tokens))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_parameters_get_the_type_that_is_asked_for(dtype):
    sch = apply_schedule(build_family("llama"), "llama", dtype=dtype, attn="sdpa")
    expected = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    assert {weight.dtype for weight in sch.mod.parameters()} == {expected}
    assert sch.mod(*family_batch(family_spec("llama"), 2, 0).inputs).dtype == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": ("fp16", "bf16")}, r"dtype is \('fp16', 'bf16'\); expected one of fp32, fp16, bf16"),
        ({"dtype": "fp8"}, "dtype is 'fp8'; expected one of fp32"),
        ({"attn": "flash"}, "attn is 'flash'; expected one of eager, sdpa"),
        ({"ckpt_ratio": 1.5}, "ckpt_ratio is 1.5; expected a number from 0 to 1"),
        ({"ckpt_policy": "tail"}, "ckpt_policy is 'tail'; expected one of even, head"),
        ({"checkpoint_ratio": 1.0}, "no option 'checkpoint_ratio'; .*ckpt_ratio"),
        ({"pipeline_cuts": 5}, "2 layers, 5 stages; expected 1 to 2 stages"),
        ({"pipeline_cuts": 2, "broadcast_input": True}, "broadcast_input and pipeline_cuts"),
        (
            {"compiler": "tvm", "fuse": True},
            "'bert.encoder.layer.0.intermediate': compiler is 'tvm'; expected",
        ),
        ({"fuse": "no"}, "apply_schedule: fuse is 'no'; expected True or False"),
        ({"pipeline_cuts": 2.5}, "apply_schedule: pipeline_cuts is 2.5; expected a whole number or a list"),
    ],
)
def test_options_that_are_not_accepted_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        apply_schedule(build_family("bert"), "bert", **options)
    assert isinstance(caught.value, ValueError)


def test_a_family_without_a_schedule_is_refused():
    with pytest.raises(ArgumentError, match="unknown family 'bart'; expected one of bert, roberta"):
        apply_schedule(build_family("bert"), "bart")


def test_a_model_of_another_family_is_refused_where_it_differs():
    with pytest.raises(PathError, match="transformer"):
        apply_schedule(build_family("bert"), "gpt")


class Attending(nn.Module):
    """Attention that is named as the zoo names it, of another make: its heads are called otherwise."""

    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dropout, self.num_attention_heads = nn.Dropout(0.1), 4


def of_another_make(place):
    """Return a model that a schedule takes at first, and stumbles over in its second layer."""
    model = build_family("bert")
    layer = model.bert.encoder.layer[1]
    if place == "attribute":
        layer.attention.self = Attending(64)
    elif place == "kind":
        layer.output.dense = nn.Identity()
    else:
        del layer.intermediate
    return model


@pytest.mark.parametrize("place", ["attribute", "kind", "path"])
def test_a_model_of_another_make_is_refused_and_left_as_it_was(place):
    sch = create_schedule(of_another_make(place))
    before = state_of(sch)
    with pytest.raises(ScheduleError) as caught:
        apply_schedule(sch, "bert", fuse=True, compiler=None, ckpt_ratio=1.0)
    if place == "attribute":
        assert isinstance(caught.value, KindError)
        assert "Bert is not built like a 'bert' of the zoo: AttributeError" in str(caught.value)
    check_invariants(sch)
    assert same_state(before, state_of(sch))


def test_a_graph_that_was_there_before_is_put_back_with_the_rest():
    sch = create_schedule(of_another_make("attribute"))
    node = sch["bert.encoder.layer.0.attention.self"]
    node.trace()
    graph, children = str(node.mod.graph), list(node.child)
    with pytest.raises(ScheduleError):
        apply_schedule(sch, "bert", attn="sdpa")
    assert str(node.mod.graph) == graph and list(node.child) == children and len(sch.metadata.journal) == 1
    check_invariants(sch)


def test_a_pattern_that_is_not_there_is_refused():
    model = build_family("llama")
    model.model.layers[0].mlp = nn.Sequential()
    model.model.layers[0].mlp.gate_proj = nn.Linear(64, 128, bias=False)
    model.model.layers[0].mlp.up_proj = nn.Linear(128, 128, bias=False)
    model.model.layers[0].mlp.down_proj = nn.Linear(128, 64, bias=False)
    with pytest.raises(
        TracingError, match=r"'model.layers.0.mlp': gated matches 0 times; expected one match"
    ):
        apply_schedule(model, "llama", fuse=True)


def test_a_schedule_is_not_applied_twice():
    sch = apply_schedule(build_family("bert"), "bert")
    with pytest.raises(ConflictError, match=r"conflicts with step 1: shard\("):
        apply_schedule(sch, "bert")
