"""Models of the transformers package, made small: every type that its class can be made of."""

import transformers
from transformers.models.auto import modeling_auto

SMALL = {
    "hidden_size": 64, "d_model": 64, "dim": 64, "num_hidden_layers": 4, "n_layers": 4, "n_heads": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16, "intermediate_size": 96,
    "hidden_dim": 96, "intermediate_size_mlp": 80, "vocab_size": 100, "max_position_embeddings": 64,
    "max_seq_len": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32, "shared_intermediate_size": 40, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "word_embed_proj_dim": 64, "sliding_window": 16,
    "window_size": 16, "rotary_dim": 8, "encoder_layers": 3, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 80,
    "num_decoder_layers": 2, "image_size": 32, "patch_size": 8, "num_mel_bins": 8, "layer_types": None,
    "attention_types": [[["global", "local"], 2]], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
OF_FAMILY = {
    "gpt_neo": {"num_layers": 4},
    "deepseek_v2": {"num_key_value_heads": 4, "head_dim": 4},  # the channels that are turned
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 4},
    # Layers of all kinds, and sizes that belong together; some types have no list of layers to leave out.
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2},
    "falcon_h1": {"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 16, "mamba_n_groups": 2},
    "granitemoehybrid": {
        "mamba_n_heads": 8, "mamba_d_state": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0},
    "lfm2": {"full_attn_idxs": [1, 3]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "nemotron_h": {
        "mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
        "moe_shared_expert_intermediate_size": 48, "sliding_window": None,
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
    },
    **{
        kind: {
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
        }
        for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    },
}  # fmt: skip
WITHOUT_LIST = ("bamba", "falcon_h1")
"""Types whose kinds of layers follow from other fields and cannot be set."""
HEADS = (
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)


LANGUAGE = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,)


def class_of(kind, heads=HEADS):
    """Return the class with the usual head of a model type; None for parts of multimodal models."""
    found = next((names[kind] for names in heads if kind in names), None)
    return getattr(transformers, found if isinstance(found, str) else found[0]) if found else None


def config_of(kind, **switches):
    made = transformers.CONFIG_MAPPING[kind]
    known = made().to_dict().keys() | getattr(made, "attribute_map", {}).keys()
    known = known - {"layer_types"} if kind in WITHOUT_LIST else known
    sizes = {name: value for name, value in SMALL.items() if name in known} | OF_FAMILY.get(kind, {})
    return made(**sizes | switches)
