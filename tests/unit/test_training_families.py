"""Families have the sizes that are published of them, and are built as they are described."""

from dataclasses import replace

import pytest

from makespan.errors import InputError, UnknownNameError
from makespan.training.zoo import (
    FAMILIES,
    build_family,
    family_batch,
    family_loss,
    family_sizes,
    family_spec,
    family_weights,
    forward_flop,
    parameter_count,
)

torch = pytest.importorskip("torch")

from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.xdist_group("families")

ALL = [(family, size) for family in FAMILIES for size in family_sizes(family)]
PUBLISHED = {
    ("bert", "large"): 0.335e9,
    ("bert", "1b"): 0.87e9,
    ("roberta", "large"): 0.355e9,
    ("roberta", "1.3b"): 1.32e9,
    ("albert", "large"): 0.0168e9,
    ("gpt", "125m"): 0.125e9,
    ("gpt", "1.3b"): 1.32e9,
    ("gpt", "2.9b"): 2.82e9,
    ("gpt", "10b"): 9.88e9,
    ("opt", "350m"): 0.331e9,
    ("opt", "2.7b"): 2.65e9,
    ("t5", "base"): 0.223e9,
    ("t5", "large"): 0.738e9,
    ("t5", "2.9b"): 2.85e9,
    ("llama", "7b"): 6.74e9,
    ("wideresnet", "250m"): 0.250e9,
    ("wideresnet", "2.4b"): 2.36e9,
}


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request):
    spec = family_spec(request.param)
    return spec, build_family(request.param).eval(), family_batch(spec, 2, 0)


# --- sizes ------------------------------------------------------------------------------------------


def test_every_size_but_the_smallest_ones_has_a_published_count():
    assert set(PUBLISHED) == {(family, size) for family, size in ALL if size not in ("tiny", "small")}


@pytest.mark.parametrize(("family", "size"), PUBLISHED)
def test_parameters_are_as_many_as_published(family, size):
    found = parameter_count(family_spec(family, size))
    assert found == pytest.approx(PUBLISHED[family, size], rel=5e-3)


@pytest.mark.parametrize(("family", "size"), ALL)
def test_parameters_are_as_many_as_the_model_has(family, size):
    spec = family_spec(family, size)
    model = build_family(family, size, meta=True)
    assert sum(weight.numel() for weight in model.parameters()) == parameter_count(spec)
    assert all(weight.is_meta for weight in model.parameters())


@pytest.mark.parametrize(("family", "size"), ALL)
def test_flop_are_as_many_as_the_model_computes(family, size):
    spec, model = family_spec(family, size), build_family(family, size, meta=True).eval()
    inputs = [value.to("meta") for value in family_batch(spec, 1, 0).inputs]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs)
    assert counter.get_total_flops() == forward_flop(spec)


@pytest.mark.parametrize(("family", "n_ffn"), [("gpt", 2), ("opt", 2), ("llama", 3)])
def test_flop_of_decoders_follow_the_closed_form(family, n_ffn):
    spec = family_spec(family, family_sizes(family)[-1])
    s, h, f = spec.seq, spec.hidden, spec.ffn
    layer = 8 * s * h**2 + 4 * s**2 * h + 2 * n_ffn * s * h * f
    assert forward_flop(spec) == spec.n_layers * layer + 2 * s * h * spec.vocab


def test_training_opt_350m_takes_the_published_flop_if_its_head_were_as_wide_as_its_layers():
    narrow = family_spec("opt", "350m")
    wide = replace(narrow, embedding_width=narrow.hidden)
    assert 3 * forward_flop(wide) == pytest.approx(2.48e12, rel=2e-3)
    assert forward_flop(narrow) < forward_flop(wide)


def test_tied_weights_are_counted_once():
    tied = [weights for weights in family_weights(family_spec("gpt")) if weights.is_tied]
    assert [weights.parameters for weights in tied] == [0]
    assert all(weights.flop > 0 for weights in tied)


# --- models -----------------------------------------------------------------------------------------


def test_every_weight_matters(tiny):
    _, model, batch = tiny
    model.zero_grad()
    family_loss(model(*batch.inputs), batch.targets).backward()
    unused = [name for name, weight in model.named_parameters() if weight.grad.abs().max() == 0]
    assert unused == []
    assert [name for name, weight in model.named_parameters() if not weight.any()] == []


def test_models_can_be_traced_whole(tiny):
    _, model, batch = tiny
    torch.testing.assert_close(fx.symbolic_trace(model)(*batch.inputs), model(*batch.inputs))


def test_a_few_steps_lower_the_loss(tiny):
    spec, _, batch = tiny
    model = build_family(spec.family, seed=1).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = family_loss(model(*batch.inputs), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]


def test_seeds_decide_weights_and_samples_and_nothing_else_is_touched(tiny):
    spec, model, batch = tiny
    state = torch.random.get_rng_state()
    again, other = build_family(spec.family), build_family(spec.family, seed=7)
    assert torch.equal(torch.random.get_rng_state(), state)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert not any(torch.equal(one, two) for one, two in pairs)
    same = family_batch(spec, 2, 0)
    assert all(torch.equal(one, two) for one, two in zip(batch.inputs, same.inputs, strict=True))
    assert not torch.equal(batch.inputs[0], family_batch(spec, 2, 1).inputs[0])


@pytest.mark.parametrize("family", ["bert", "roberta", "albert", "t5"])
def test_what_fills_samples_up_does_not_change_the_others(family):
    spec, model = family_spec(family), build_family(family).eval()
    tokens, visible, *rest = family_batch(spec, 8, 0).inputs
    assert (visible == 0).any()
    filled = torch.where(visible == 0, 5, tokens)
    if family == "roberta":  # its positions would see another token there
        filled = tokens
        visible = torch.where(tokens == spec.padding, visible - 1000, visible)
    before, after = model(tokens, (visible > 0).long(), *rest), model(filled, visible, *rest)
    seen = slice(None) if family == "t5" else visible > 0
    torch.testing.assert_close(before[seen], after[seen])


@pytest.mark.parametrize("family", ["gpt", "opt", "llama"])
def test_decoders_see_nothing_that_follows(family):
    spec, model = family_spec(family), build_family(family).eval()
    (tokens,) = family_batch(spec, 2, 0).inputs
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % spec.vocab
    torch.testing.assert_close(model(tokens)[:, :9], model(changed)[:, :9])
    assert not torch.allclose(model(tokens)[:, 9:], model(changed)[:, 9:])


@pytest.mark.parametrize("family", FAMILIES)
def test_models_compute_in_half_precision(family):
    model = build_family(family).eval().to(torch.bfloat16)
    inputs = family_batch(family_spec(family), 2, 0).inputs
    images = [value.bfloat16() if value.is_floating_point() else value for value in inputs]
    found, expected = model(*images), build_family(family).eval()(*inputs)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.05 * expected.abs().max().item())


def test_every_second_layer_of_gpt_looks_back_over_a_window_only():
    spec = family_spec("gpt")
    windows = [layer.attn.attention.window for layer in build_family("gpt").transformer.h]
    assert windows == [0, spec.window, 0, spec.window]


def test_heads_share_the_embedding_where_the_originals_do():
    shared = {}
    for family in FAMILIES:
        model = build_family(family)
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        shared[family] = len(names) - len(set(map(id, model.parameters())))
    assert shared == dict.fromkeys(FAMILIES, 1) | {"llama": 0, "wideresnet": 0}


def test_dropout_is_where_the_originals_have_it():
    rates = {
        family: sorted({part.p for part in build_family(family).modules() if isinstance(part, nn.Dropout)})
        for family in FAMILIES
    }
    assert rates == {
        **{family: [0.1] for family in ("bert", "roberta", "albert", "t5")},
        "gpt": [0.0],
        "opt": [0.0, 0.1],
        "llama": [0.0],
        "wideresnet": [],
    }


# --- what is refused --------------------------------------------------------------------------------


def test_unknown_names_are_refused_with_the_accepted_ones():
    with pytest.raises(UnknownNameError, match=r"unknown model family 'bart'; expected .*bert"):
        family_spec("bart")
    with pytest.raises(UnknownNameError, match="unknown size of llama '8b'; expected 7b, tiny"):
        build_family("llama", "8b")


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="LLaMA tiny: 4 heads; expected a multiple of 3"):
        replace(family_spec("llama"), kv_heads=3)
    with pytest.raises(InputError, match="BERT tiny: seq 32; expected at most 16"):
        replace(family_spec("bert"), seq=32)
    with pytest.raises(InputError, match="n_samples is 0; expected"):
        family_batch(family_spec("bert"), 0, 0)
