"""Small models of the transformers package, built from configurations, and their schedules by module path."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, GPT2Config, LlamaConfig, OPTConfig, ViTConfig, WhisperConfig
from transformers.models.bert.modeling_bert import BertForMaskedLM
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.opt.modeling_opt import OPTForCausalLM
from transformers.models.vit.modeling_vit import ViTModel
from transformers.models.whisper.modeling_whisper import WhisperModel

from makespan.slapo import call_module

VOCAB, WIDTH, HEADS, LAYERS, SEQ = 64, 32, 4, 2, 12

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_PLAIN = {"attn_implementation": "eager", "use_cache": False}


def bert():
    sizes = _SIZES | {"intermediate_size": 2 * WIDTH, "max_position_embeddings": SEQ}
    return _seeded(BertForMaskedLM, BertConfig(**sizes, **_PLAIN))


def llama():
    sizes = _SIZES | {"intermediate_size": 2 * WIDTH, "num_key_value_heads": 4}
    return _seeded(LlamaForCausalLM, LlamaConfig(**sizes, **_PLAIN))


def llama_with_cache():
    """The defaults of the package: a cache is kept, and two heads share one of keys and values."""
    sizes = _SIZES | {"intermediate_size": 2 * WIDTH, "num_key_value_heads": 2}
    return _seeded(LlamaForCausalLM, LlamaConfig(**sizes, attn_implementation="eager"))


def vit():
    sizes = {name: _SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    shapes = {"intermediate_size": 2 * WIDTH, "image_size": 16, "patch_size": 4}
    return _seeded(ViTModel, ViTConfig(**sizes, **shapes, attn_implementation="eager"))


def opt():
    sizes = _SIZES | {"ffn_dim": 2 * WIDTH, "max_position_embeddings": 2 * SEQ, "word_embed_proj_dim": WIDTH}
    return _seeded(OPTForCausalLM, OPTConfig(**sizes, attn_implementation="eager"))


def whisper():
    stacks = {
        f"{stack}_{what}": number
        for stack in ("encoder", "decoder")
        for what, number in (("layers", LAYERS), ("attention_heads", HEADS), ("ffn_dim", 2 * WIDTH))
    }
    sizes = {"vocab_size": VOCAB, "d_model": WIDTH, "num_mel_bins": 8, "max_source_positions": 16}
    words = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"max_target_positions": 16}
    config = WhisperConfig(**stacks, **sizes, **words, **lengths, attn_implementation="eager")
    return _seeded(WhisperModel, config)


def gpt2():
    sizes = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": SEQ}
    return _seeded(GPT2LMHeadModel, GPT2Config(**sizes, **_PLAIN, bos_token_id=0, eos_token_id=0))


def _seeded(kind, config):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = kind(config)
        with torch.no_grad():
            for one in model.parameters():  # biases and norms too: what is 0 or 1 is not missed
                one.add_(0.02 * torch.randn_like(one))
    return model


def tokens(n=2, seed=0):
    """Return token ids and, where a model takes them, what is to be seen of each sample."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (n, SEQ), generator=generator)


def visible(n=2):
    """Return what is to be seen of each sample; all are shorter, because whole ones get no mask."""
    return (torch.arange(SEQ) < torch.arange(n)[:, None] % 3 + SEQ // 2).long()


def split_columns(node):
    node.shard(["weight", "bias"] if node.mod.bias is not None else "weight", axis=0)


def split_rows(node):
    node.shard("weight", axis=1)
    node.sync("fwd_post", "all_reduce")


def split_vocabulary(table, head):
    """Split the table, and the head that is tied to it or has the same shape."""
    table.shard("weight", axis=0)
    table.sync("fwd_post", "all_reduce")
    split_columns(head)
    head.sync("bwd_post", "all_reduce")
    head.sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=False)


LAYERS_AT = {
    "BertForMaskedLM": "bert.encoder.layer",
    "LlamaForCausalLM": "model.layers",
    "GPT2LMHeadModel": "transformer.h",
}


def layers_of(sch):
    """Return the nodes of all layers, wherever the class of the root has them."""
    at = next(path for path in LAYERS_AT.values() if f"{path}.0" in sch)
    return [sch[f"{at}.{index}"] for index in range(LAYERS)]


def shard_bert(sch):
    for layer in layers_of(sch):
        for name in ("query", "key", "value"):
            split_columns(layer[f"attention.self.{name}"])
        layer["attention.self"].sync("bwd_post", "all_reduce")
        split_rows(layer["attention.output.dense"])
        split_columns(layer["intermediate.dense"])
        layer["intermediate.dense"].sync("bwd_post", "all_reduce")
        split_rows(layer["output.dense"])
    split_vocabulary(sch["bert.embeddings.word_embeddings"], sch["cls.predictions.decoder"])
    sch["cls.predictions"].shard("bias", axis=0)  # tied to the bias of the decoder


def shard_llama(sch):
    for layer in layers_of(sch):
        for name in ("q_proj", "k_proj", "v_proj"):
            split_columns(layer[f"self_attn.{name}"])
        layer["self_attn"].sync("bwd_post", "all_reduce")
        split_rows(layer["self_attn.o_proj"])
        split_columns(layer["mlp.gate_proj"])
        split_columns(layer["mlp.up_proj"])
        layer["mlp"].sync("bwd_post", "all_reduce")
        split_rows(layer["mlp.down_proj"])
    split_vocabulary(sch["model.embed_tokens"], sch["lm_head"])


def shard_gpt2(sch):
    for layer in layers_of(sch):
        layer["attn.c_attn"].shard(["weight"], axis=1, groups=3)
        layer["attn.c_attn"].shard("bias", axis=0, groups=3)
        layer["attn.c_attn"].sync("bwd_post", "all_reduce")
        layer["attn"].set_attr(split_size=layer["attn"].mod.split_size // sch.world_size)
        layer["attn.c_proj"].shard("weight", axis=0)
        layer["attn.c_proj"].sync("fwd_post", "all_reduce")
        layer["mlp.c_fc"].shard("weight", axis=1)
        layer["mlp.c_fc"].shard("bias", axis=0)
        layer["mlp.c_fc"].sync("bwd_post", "all_reduce")
        layer["mlp.c_proj"].shard("weight", axis=0)
        layer["mlp.c_proj"].sync("fwd_post", "all_reduce")


def bias_gelu(product, bias):
    return F.gelu(product + bias)


def residual_norm(features, residual):
    return call_module("LayerNorm", F.dropout(features, 0.1) + residual)


def gated(gate, up):
    return F.silu(gate) * up


def tanh_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _fuse(node, pattern):
    (match,) = node.find(pattern)
    node.fuse(match, compiler="dynamo")


def fuse_bert(sch):
    for layer in layers_of(sch):
        layer["intermediate.dense"].decompose()
        layer["intermediate"].trace(flatten=True)  # its activation is a module of the package
        _fuse(layer["intermediate"], bias_gelu)
        for name in ("attention.output", "output"):
            _fuse(layer[name], residual_norm)


def fuse_llama(sch):
    for layer in layers_of(sch):
        layer["mlp"].trace(flatten=True)
        _fuse(layer["mlp"], gated)


def fuse_gpt2(sch):
    for layer in layers_of(sch):
        _fuse(layer["mlp.act"], tanh_gelu)


MASKS = {
    "BertForMaskedLM": "transformers.models.bert.modeling_bert.create_bidirectional_mask",
    "LlamaForCausalLM": "transformers.models.llama.modeling_llama.create_causal_mask",
    "GPT2LMHeadModel": "transformers.models.gpt2.modeling_gpt2.create_causal_mask",
}


def trace_to_layers(sch, inputs=("input_ids", "attention_mask")):
    """Capture what leads to the layers, which stay as they are; masks are made when the model runs."""
    kind = type(sch.mod).__name__
    sch.trace_until(LAYERS_AT[kind].rpartition(".")[0], inputs=inputs, leaf_functions=[MASKS[kind]])


class Attention(nn.Module):
    """Attention of BERT in one kernel, with the projections that the model has."""

    def __init__(self, old):
        super().__init__()
        self.query, self.key, self.value, self.size = old.query, old.key, old.value, old.attention_head_size

    def forward(self, hidden_states, attention_mask=None, **others):
        heads = (*hidden_states.shape[:-1], -1, self.size)
        projections = (one(hidden_states) for one in (self.query, self.key, self.value))
        query, key, value = (one.view(heads).transpose(1, 2) for one in projections)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        return seen.transpose(1, 2).flatten(2), None
