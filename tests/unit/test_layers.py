"""Layers derived from model shapes: counts against published ones and worked examples."""

import pytest

from makespan.errors import UnknownNameError
from makespan.workloads import ModelSpec, head, layers, model, model_keys


@pytest.mark.parametrize("key", model_keys())
def test_the_parameter_count_agrees_with_the_published_one(key: str) -> None:
    spec = model(key)
    ends = head(spec)
    counted = sum(layer.parameters for layer in layers(spec))
    counted += ends.embedding_parameters + ends.head_parameters
    assert counted == pytest.approx(spec.parameters, rel=0.005)


def test_a_bert_layer_has_the_flop_of_the_closed_form() -> None:
    layer = layers(model("bert-large"))[0]
    s, h, f = 512, 1024, 4096
    assert layer.flop == 2 * s * (4 * h * h + 2 * h * f) + 4 * s * s * h
    assert layer.attention_flop == 4 * s * s * h


def test_a_bert_layer_keeps_the_bytes_of_the_published_count() -> None:
    layer = layers(model("bert-large"))[0]
    s, h, a = 512, 1024, 16
    for tp in (1, 2, 8):
        expected = s * h * (10 + 24 / tp) + 5 * a * s * s / tp
        assert layer.kept_bytes(tp) == pytest.approx(expected)
    assert layer.kept_bytes(4, sequence_parallel=True) == pytest.approx(34 * s * h / 4 + 5 * a * s * s / 4)
    assert layer.kept_bytes(1, fused_attention=True) == pytest.approx(34 * s * h)


def test_a_gated_feed_forward_counts_three_matrices() -> None:
    layer = layers(model("llama2-7b"))[0]
    h, f = 4096, 11008
    assert layer.parameters == pytest.approx(4 * h * h + 3 * h * f, rel=1e-3)


def test_a_decoder_layer_adds_cross_attention() -> None:
    encoder, decoder = layers(model("t5-1.2b"))[0], layers(model("t5-1.2b"))[-1]
    s, h = 512, 1024
    assert decoder.flop - encoder.flop == 2 * s * 4 * h * h + 4 * s * s * h
    assert (encoder.n_all_reduces, decoder.n_all_reduces) == (2, 3)
    assert encoder.boundary_bytes == 2 * s * h
    assert decoder.boundary_bytes == 2 * encoder.boundary_bytes


def test_the_head_is_on_text_models_only() -> None:
    assert head(model("gpt2-1.5b")).flop == 2 * 1024 * 1600 * 50304
    assert head(model("gpt2-1.5b")).head_parameters == 0
    assert head(model("llama2-7b")).head_parameters == 32000 * 4096
    assert head(model("vit-base")).logit_bytes == 0


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    spec = model("bert-large")
    with pytest.raises(UnknownNameError, match=r"model family 'mamba'.*bert"):
        ModelSpec("x", "X", "mamba", spec.blocks, 10, True, 0, 10, "test")
