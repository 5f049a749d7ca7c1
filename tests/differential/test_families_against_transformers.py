"""With the same weights, the families compute what the ``transformers`` package computes."""

import pytest

from makespan.training.zoo import build_family, family_batch, family_spec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.hf

RELATIVE = "relative_attention_bias.weight"


def encoder_sizes(spec):
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.heads,
        "intermediate_size": spec.ffn,
        "max_position_embeddings": spec.max_positions,
        "type_vocab_size": spec.n_types,
        "pad_token_id": spec.padding,
    }


def bert(spec):
    return transformers.BertForMaskedLM(transformers.BertConfig(**encoder_sizes(spec)))


def roberta(spec):
    config = transformers.RobertaConfig(**encoder_sizes(spec), layer_norm_eps=1e-5)
    return transformers.RobertaForMaskedLM(config)


def albert(spec):
    config = transformers.AlbertConfig(**encoder_sizes(spec), embedding_size=spec.embedding_width)
    return transformers.AlbertForMaskedLM(config)


def gpt(spec):
    config = transformers.GPTNeoConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        num_layers=spec.n_layers,
        num_heads=spec.heads,
        intermediate_size=spec.ffn,
        max_position_embeddings=spec.max_positions,
        window_size=spec.window,
        attention_types=[[["global", "local"], spec.n_layers // 2]],
    )
    return transformers.GPTNeoForCausalLM(config)


def opt(spec):
    config = transformers.OPTConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        num_hidden_layers=spec.n_layers,
        num_attention_heads=spec.heads,
        ffn_dim=spec.ffn,
        max_position_embeddings=spec.max_positions,
        word_embed_proj_dim=spec.embedding_width,
        do_layer_norm_before=spec.norm_first,
        pad_token_id=spec.padding,
    )
    return transformers.OPTForCausalLM(config)


def llama(spec):
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        num_hidden_layers=spec.n_layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        intermediate_size=spec.ffn,
        rms_norm_eps=1e-6,
    )
    return transformers.LlamaForCausalLM(config)


def t5(spec):
    config = transformers.T5Config(
        vocab_size=spec.vocab,
        d_model=spec.hidden,
        d_kv=spec.head_size,
        d_ff=spec.ffn,
        num_layers=spec.n_layers,
        num_decoder_layers=spec.n_decoder_layers,
        num_heads=spec.heads,
        relative_attention_num_buckets=spec.n_buckets,
        relative_attention_max_distance=spec.max_distance,
    )
    return transformers.T5ForConditionalGeneration(config)


NAMES = ("input_ids", "attention_mask", "decoder_input_ids")
ORIGINALS = {one.__name__: one for one in (bert, roberta, albert, gpt, opt, llama, t5)}


def their_name(name):
    return name.replace("position_bias", "block.0.layer.0.SelfAttention")


@pytest.mark.parametrize("family", ORIGINALS)
def test_logits_and_gradients_agree_under_equal_weights(family):
    spec, ours = family_spec(family), build_family(family).eval()
    theirs = ORIGINALS[family](spec).eval()
    state = {their_name(name): value for name, value in ours.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert unexpected == []
    parameters = dict(theirs.named_parameters(remove_duplicate=False))
    loaded = {id(parameters[name]) for name in state if name in parameters}
    assert {id(parameters[name]) for name in missing if name in parameters} <= loaded  # tied ones
    inputs = family_batch(spec, 3, 0).inputs
    found = ours(*inputs)
    expected = theirs(**dict(zip(NAMES, inputs, strict=False))).logits
    visible = inputs[1] > 0 if len(inputs) == 2 else slice(None)
    torch.testing.assert_close(found[visible], expected[visible], rtol=1e-5, atol=1e-5)
    cotangent = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
    (found * cotangent)[visible].sum().backward()
    (expected * cotangent)[visible].sum().backward()
    for name, weight in ours.named_parameters():
        other = parameters[their_name(name)]
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-4, atol=1e-4, msg=name)
