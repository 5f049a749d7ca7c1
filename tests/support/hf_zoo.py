"""Small models of many architectures of the transformers package, unmodified, with inputs for them."""

import hf_models
import torch
import transformers
from hf_models import SEQ, VOCAB, WIDTH

HEADS, WIDE = 4, 2 * WIDTH
SIZES = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "intermediate_size": WIDE, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
PLACES = SIZES | {"max_position_embeddings": 2 * SEQ}
IMAGES = SIZES | {"image_size": 16, "patch_size": 4}
SMALL = IMAGES | {"image_size": 12}  # nine patches and one token: a length that divides
OF_GPT = {
    "vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": SEQ,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
STACKS = {
    "vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": WIDE,
    "decoder_ffn_dim": WIDE, "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "num_key_value_heads": HEADS,
}  # fmt: skip
SOUND = {
    "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip

WINDOWS = {
    "image_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": [2, 2],
    "num_heads": [2, 4],
}  # fmt: skip

CONFIGS = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 8}),
    "Mistral": ("MistralForCausalLM", GROUPED),
    "Mixtral": ("MixtralForCausalLM", GROUPED | {"num_local_experts": 4}),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", GROUPED | EXPERTS | {"head_dim": 8, "num_experts": 4}),
    "DeepseekV3": ("DeepseekV3ForCausalLM", SIZES | EXPERTS | LATENT),
    "Gemma2": ("Gemma2ForCausalLM", GROUPED | {"head_dim": 8}),
    "Phi3": ("Phi3ForCausalLM", GROUPED | {"pad_token_id": 0}),
    "GPTNeoX": ("GPTNeoXForCausalLM", SIZES),
    "GPT2": ("GPT2LMHeadModel", OF_GPT),
    "GPTJ": ("GPTJForCausalLM", OF_GPT | {"rotary_dim": 4}),
    "OPT": ("OPTForCausalLM", PLACES | {"ffn_dim": WIDE, "word_embed_proj_dim": WIDTH}),
    "Bloom": ("BloomForCausalLM", SIZES | {"n_layer": 2, "n_head": HEADS}),
    "Mpt": (
        "MptForCausalLM",
        {"vocab_size": VOCAB, "d_model": WIDTH, "n_layers": 2, "n_heads": HEADS, "max_seq_len": SEQ},
    ),
    "Falcon": ("FalconForCausalLM", SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "T5": (
        "T5ForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": WIDE, "num_layers": 2, "num_heads": HEADS},
    ),
    "Bart": ("BartForConditionalGeneration", STACKS | {"max_position_embeddings": 2 * SEQ}),
    "Whisper": (
        "WhisperForConditionalGeneration",
        STACKS | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
    ),
    "Bert": ("BertForMaskedLM", PLACES),
    "Roberta": ("RobertaForMaskedLM", PLACES),
    "DistilBert": (
        "DistilBertForMaskedLM",
        {"vocab_size": VOCAB, "dim": WIDTH, "hidden_dim": WIDE, "n_layers": 2, "n_heads": HEADS},
    ),
    "Electra": ("ElectraForMaskedLM", PLACES | {"embedding_size": 16}),
    "Albert": ("AlbertForMaskedLM", PLACES | {"embedding_size": 16}),
    "ViT": ("ViTForImageClassification", SMALL),
    "DeiT": ("DeiTForImageClassification", IMAGES),
    "Beit": ("BeitForImageClassification", SMALL),
    "CLIP": (
        "CLIPModel",
        {"text_config": PLACES | {"pad_token_id": 0}, "vision_config": SMALL, "projection_dim": 16},
    ),
    "Swin": ("SwinForImageClassification", WINDOWS),
    "SamVision": (
        "SamVisionModel",
        IMAGES
        | {"patch_size": 2, "mlp_dim": WIDE, "output_channels": 16, "num_pos_feats": 8}
        | {"window_size": 4, "global_attn_indexes": [1]},
    ),
    "Wav2Vec2": ("Wav2Vec2ForCTC", SIZES | SOUND),
    "Wav2Vec2Conformer": ("Wav2Vec2ConformerForCTC", SIZES | SOUND),
    "Starcoder2": ("Starcoder2ForCausalLM", GROUPED),
    "StableLm": ("StableLmForCausalLM", GROUPED),
    "Cohere": ("CohereForCausalLM", GROUPED),
    "Olmo2": ("Olmo2ForCausalLM", GROUPED),
}
"""Class of each model, and the arguments of its configuration."""

LINE = {"input_ids": hf_models.tokens()}
PAIR = LINE | {"decoder_input_ids": hf_models.tokens()[:, :4]}
_DRAWN = torch.Generator().manual_seed(0)
PICTURE = {"pixel_values": torch.randn(2, 3, 16, 16, generator=_DRAWN)}
SMALL_PICTURE = {"pixel_values": PICTURE["pixel_values"][..., :12, :12]}
SOUNDS = {"input_values": torch.randn(2, 410, generator=_DRAWN)}
INPUTS = {
    "T5": PAIR,
    "Bart": PAIR,
    "Whisper": {"input_features": torch.randn(2, 8, 32, generator=_DRAWN)}
    | {"decoder_input_ids": PAIR["decoder_input_ids"]},
    "ViT": SMALL_PICTURE,
    "DeiT": PICTURE,
    "Beit": SMALL_PICTURE,
    "CLIP": LINE | SMALL_PICTURE,
    "Swin": PICTURE,
    "SamVision": PICTURE,
    "Wav2Vec2": SOUNDS,
    "Wav2Vec2Conformer": SOUNDS,
}


def model(name):
    """Return a model with its own initial values, which are drawn from one seed."""
    kind, sizes = CONFIGS[name]
    config = getattr(transformers, f"{name}Config")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return getattr(transformers, kind)(config(**sizes))


def inputs(name):
    return INPUTS.get(name, LINE)
