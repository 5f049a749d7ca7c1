"""Architectures read from configuration files: exact counts of published models, and every error message."""

import json
import logging

import pytest

from makespan.errors import InputError, MissingDataError, UnknownNameError
from makespan.planning import Experts, FeedForward, read_model


def _sizes(hidden, layers, heads, vocab, ffn=None, **others):
    """Fields under the names that most families use."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return sizes | {"vocab_size": vocab} | ({"intermediate_size": ffn} if ffn else {}) | others


# Facts of the config.json that the publisher of each model offers on the hub of Hugging Face under the name
# given, and the number of parameters of transformers 5.24 for the class with the usual head. For DeepSeek-V3
# and GLM-4.5 the selection biases of the routers are added, which it keeps as buffers; for Flan-T5 the head
# is that of the released weights, which are not tied.
LLAMA3_8B = {"model_type": "llama"} | _sizes(4096, 32, 32, 128256, 14336, num_key_value_heads=8)
PUBLISHED = {
    "meta-llama/Meta-Llama-3-8B": (LLAMA3_8B, 8_030_261_248),
    "meta-llama/Llama-2-70b-hf": (
        {"model_type": "llama"} | _sizes(8192, 80, 64, 32000, 28672, num_key_value_heads=8),
        68_976_648_192,
    ),
    "meta-llama/Llama-3.1-405B": (
        {"model_type": "llama"} | _sizes(16384, 126, 128, 128256, 53248, num_key_value_heads=8),
        405_853_388_800,
    ),
    "Qwen/Qwen2.5-7B": (
        {"model_type": "qwen2", "tie_word_embeddings": False, "sliding_window": 131072}
        | _sizes(3584, 28, 28, 152064, 18944, num_key_value_heads=4, use_sliding_window=False),
        7_615_616_512,
    ),
    "Qwen/Qwen2.5-0.5B": (
        {"model_type": "qwen2", "tie_word_embeddings": True}
        | _sizes(896, 24, 14, 151936, 4864, num_key_value_heads=2),
        494_032_768,
    ),
    "Qwen/Qwen3-8B": (
        {"model_type": "qwen3", "attention_bias": False}
        | _sizes(4096, 36, 32, 151936, 12288, num_key_value_heads=8, head_dim=128),
        8_190_735_360,
    ),
    "Qwen/Qwen3-30B-A3B": (
        {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": []}
        | {"moe_intermediate_size": 768, "decoder_sparse_step": 1, "head_dim": 128}
        | _sizes(2048, 48, 32, 151936, 6144, num_key_value_heads=4),
        30_532_122_624,
    ),
    "mistralai/Mistral-7B-v0.1": (
        {"model_type": "mistral", "sliding_window": 4096}
        | _sizes(4096, 32, 32, 32000, 14336, num_key_value_heads=8),
        7_241_732_096,
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
        | _sizes(4096, 32, 32, 32000, 14336, num_key_value_heads=8),
        46_702_792_704,
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        {"model_type": "qwen2_moe", "num_experts": 60, "num_experts_per_tok": 4}
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
        | _sizes(2048, 24, 16, 151936, 5632, num_key_value_heads=16),
        14_315_784_192,
    ),
    "deepseek-ai/DeepSeek-V2-Lite": (
        {"model_type": "deepseek_v2", "n_routed_experts": 64, "n_shared_experts": 2, "q_lora_rank": None}
        | {"num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1}
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        | _sizes(2048, 27, 16, 102400, 10944, moe_layer_freq=1),
        15_706_484_224,
    ),
    "deepseek-ai/DeepSeek-V2": (
        {"model_type": "deepseek_v2", "n_routed_experts": 160, "n_shared_experts": 2, "q_lora_rank": 1536}
        | {"num_experts_per_tok": 6, "moe_intermediate_size": 1536, "first_k_dense_replace": 1}
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        | _sizes(5120, 60, 128, 102400, 12288, moe_layer_freq=1),
        235_741_434_880,
    ),
    "deepseek-ai/DeepSeek-V3": (
        {"model_type": "deepseek_v3", "n_routed_experts": 256, "n_shared_experts": 1, "q_lora_rank": 1536}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3}
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        | {"num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8"}}
        | _sizes(7168, 61, 128, 129280, 18432),
        671_026_419_200,
    ),
    "google/gemma-7b": (
        {"model_type": "gemma", "head_dim": 256}
        | _sizes(3072, 28, 16, 256000, 24576, num_key_value_heads=16),
        8_537_680_896,
    ),
    "google/gemma-2-9b": (
        {"model_type": "gemma2", "head_dim": 256, "sliding_window": 4096}
        | _sizes(3584, 42, 16, 256000, 14336, num_key_value_heads=8),
        9_241_705_984,
    ),
    "google/gemma-3-1b-pt": (
        {"model_type": "gemma3_text", "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6}
        | _sizes(1152, 26, 4, 262144, 6912, num_key_value_heads=1),
        999_885_952,
    ),
    "microsoft/phi-2": (
        {"model_type": "phi", "tie_word_embeddings": False}
        | _sizes(2560, 32, 32, 51200, 10240, num_key_value_heads=32),
        2_779_683_840,
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        {"model_type": "phi3", "sliding_window": 2047}
        | _sizes(3072, 32, 32, 32064, 8192, num_key_value_heads=32),
        3_821_079_552,
    ),
    "openai-community/gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
        | {"vocab_size": 50257, "n_ctx": 1024},
        124_439_808,
    ),
    "EleutherAI/gpt-neox-20b": (
        {"model_type": "gpt_neox"} | _sizes(6144, 44, 64, 50432, 24576, max_position_embeddings=2048),
        20_554_567_680,
    ),
    "EleutherAI/gpt-j-6b": (
        {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048}
        | {"vocab_size": 50400, "n_inner": None, "tie_word_embeddings": False},
        6_050_882_784,
    ),
    "facebook/opt-6.7b": (
        {"model_type": "opt", "ffn_dim": 16384, "do_layer_norm_before": True, "word_embed_proj_dim": 4096}
        | _sizes(4096, 32, 32, 50272, max_position_embeddings=2048),
        6_658_473_984,
    ),
    "facebook/opt-350m": (
        {"model_type": "opt", "ffn_dim": 4096, "do_layer_norm_before": False, "word_embed_proj_dim": 512}
        | _sizes(1024, 24, 16, 50272, max_position_embeddings=2048),
        331_196_416,
    ),
    "bigscience/bloom": (
        {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112}
        | {"vocab_size": 250880, "seq_length": 2048},
        176_247_271_424,
    ),
    "mosaicml/mpt-7b": (
        {"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "expansion_ratio": 4}
        | {"vocab_size": 50432, "max_seq_len": 2048, "no_bias": True, "learned_pos_emb": True}
        | {"attn_config": {"alibi": True, "attn_type": "multihead_attention", "qk_ln": False}},
        6_649_286_656,
    ),
    "tiiuae/falcon-7b": (
        {"model_type": "falcon", "multi_query": True, "parallel_attn": True, "bias": False}
        | _sizes(4544, 32, 71, 65024, new_decoder_architecture=False),
        6_921_720_704,
    ),
    "tiiuae/falcon-40b": (
        {"model_type": "falcon", "num_kv_heads": 8, "parallel_attn": True, "bias": False}
        | _sizes(8192, 60, 128, 65024, new_decoder_architecture=True),
        41_303_293_952,
    ),
    "google-bert/bert-base-uncased": (
        {"model_type": "bert", "type_vocab_size": 2}
        | _sizes(768, 12, 12, 30522, 3072, max_position_embeddings=512),
        109_514_298,
    ),
    "FacebookAI/roberta-base": (
        {"model_type": "roberta", "type_vocab_size": 1}
        | _sizes(768, 12, 12, 50265, 3072, max_position_embeddings=514),
        124_697_433,
    ),
    "google-t5/t5-large": (
        {"model_type": "t5", "d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_layers": 24, "num_heads": 16}
        | {"num_decoder_layers": 24, "vocab_size": 32128, "n_positions": 512},
        737_668_096,
    ),
    "google/flan-t5-base": (
        {"model_type": "t5", "d_model": 768, "d_ff": 2048, "d_kv": 64, "num_layers": 12, "num_heads": 12}
        | {"num_decoder_layers": 12, "vocab_size": 32128, "feed_forward_proj": "gated-gelu"}
        | {"tie_word_embeddings": False},
        247_577_856,
    ),
    "google/vit-base-patch16-224": (
        {"model_type": "vit", "image_size": 224, "patch_size": 16, "num_channels": 3, "qkv_bias": True}
        | {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
        | {"intermediate_size": 3072, "id2label": {str(label): f"class {label}" for label in range(1000)}},
        86_567_656,
    ),
    "openai/whisper-large-v3": (
        {"model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32}
        | {"encoder_attention_heads": 20, "decoder_attention_heads": 20, "vocab_size": 51866}
        | {"encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "num_mel_bins": 128}
        | {"max_source_positions": 1500, "max_target_positions": 448},
        1_543_490_560,
    ),
    "openai/gpt-oss-120b": (
        {"model_type": "gpt_oss", "num_local_experts": 128, "num_experts_per_tok": 4, "head_dim": 64}
        | {"attention_bias": True, "sliding_window": 128}
        | {"layer_types": ["sliding_attention", "full_attention"] * 18}
        | _sizes(2880, 36, 64, 201088, 2880, num_key_value_heads=8),
        116_829_156_672,
    ),
    "THUDM/GLM-4-9B-0414": (
        {"model_type": "glm4", "attention_bias": True, "head_dim": 128}
        | _sizes(4096, 40, 32, 151552, 13696, num_key_value_heads=2),
        9_400_279_040,
    ),
    "zai-org/GLM-4.5-Air": (
        {"model_type": "glm4_moe", "n_routed_experts": 128, "n_shared_experts": 1, "use_qk_norm": False}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 1408, "first_k_dense_replace": 1}
        | {"attention_bias": True, "head_dim": 128}
        | _sizes(4096, 46, 96, 151552, 10944, num_key_value_heads=8),
        106_852_251_264,
    ),
    "allenai/OLMo-2-1124-7B": (
        {"model_type": "olmo2"} | _sizes(4096, 32, 32, 100352, 11008),
        7_298_617_344,
    ),
    "allenai/OLMoE-1B-7B-0924": (
        {"model_type": "olmoe", "num_experts": 64, "num_experts_per_tok": 8}
        | _sizes(2048, 16, 16, 50304, 1024, num_key_value_heads=16),
        6_919_161_856,
    ),
    "CohereForAI/c4ai-command-r-plus": (
        {"model_type": "cohere", "use_qk_norm": True}
        | _sizes(12288, 64, 96, 256000, 33792, num_key_value_heads=8),
        103_810_674_688,
    ),
    "bigcode/starcoder2-7b": (
        {"model_type": "starcoder2"} | _sizes(4608, 32, 36, 49152, 18432, num_key_value_heads=4),
        7_173_923_840,
    ),
    "stabilityai/stablelm-3b-4e1t": (
        {"model_type": "stablelm", "tie_word_embeddings": False}
        | _sizes(2560, 32, 32, 50304, 6912, num_key_value_heads=32),
        2_795_443_200,
    ),
    "EleutherAI/gpt-neo-1.3B": (
        {"model_type": "gpt_neo", "num_layers": 24, "num_heads": 16, "hidden_size": 2048}
        | {"vocab_size": 50257, "max_position_embeddings": 2048, "window_size": 256}
        | {"attention_layers": ["global", "local"] * 12},
        1_315_575_808,
    ),
    "microsoft/Phi-3.5-MoE-instruct": (
        {"model_type": "phimoe", "attention_bias": True, "lm_head_bias": True}
        | {"num_local_experts": 16, "num_experts_per_tok": 2}
        | _sizes(4096, 32, 32, 32064, 6400, num_key_value_heads=8),
        41_873_153_344,
    ),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": (
        {"model_type": "seed_oss"} | _sizes(5120, 64, 80, 155136, 27648, num_key_value_heads=8, head_dim=128),
        36_151_104_512,
    ),
    "HuggingFaceTB/SmolLM3-3B": (
        {"model_type": "smollm3"} | _sizes(2048, 36, 16, 128256, 11008, num_key_value_heads=4),
        3_075_098_624,
    ),
    "MiniMaxAI/MiniMax-M2": (
        {"model_type": "minimax_m2", "num_local_experts": 256, "num_experts_per_tok": 8, "head_dim": 128}
        | {"use_qk_norm": True, "use_routing_bias": True, "attn_type_list": [1] * 62}
        | _sizes(3072, 62, 48, 200064, 1536, num_key_value_heads=8),
        228_689_748_992 + 62 * 256,  # with the selection biases of its routers
    ),
    "answerdotai/ModernBERT-base": (
        {"model_type": "modernbert"} | _sizes(768, 22, 12, 50368, 1152),
        149_655_232,
    ),
    "distilbert/distilbert-base-uncased": (
        {"model_type": "distilbert", "dim": 768, "hidden_dim": 3072, "n_heads": 12, "n_layers": 6}
        | {"vocab_size": 30522, "max_position_embeddings": 512},
        66_985_530,
    ),
    "facebook/bart-large": (
        {"model_type": "bart", "d_model": 1024, "vocab_size": 50265, "max_position_embeddings": 1024}
        | {"encoder_layers": 12, "decoder_layers": 12, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096}
        | {"encoder_attention_heads": 16, "decoder_attention_heads": 16},
        406_291_456,
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        {"model_type": "qwen3_next", "num_experts": 512, "num_experts_per_tok": 10, "mlp_only_layers": []}
        | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
        | {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
        | _sizes(2048, 48, 16, 151936, 5120, num_key_value_heads=2, head_dim=256),
        79_674_391_296,
    ),
    "nvidia/Nemotron-H-8B-Base-8K": (
        {"model_type": "nemotron_h", "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128}
        | {"n_groups": 8, "conv_kernel": 4, "chunk_size": 128, "use_conv_bias": True}
        | {"hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"}
        | _sizes(4096, 52, 32, 131072, 21504, num_key_value_heads=8, head_dim=128),
        8_100_852_736,
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        {"model_type": "nemotron_h", "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128}
        | {"n_groups": 8, "conv_kernel": 4, "chunk_size": 128, "n_routed_experts": 128}
        | {"num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_group": 1, "topk_group": 1}
        | {"moe_shared_expert_intermediate_size": 3712}
        | {"hybrid_override_pattern": "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME"}
        | _sizes(2688, 52, 32, 131072, 1856, num_key_value_heads=2, head_dim=128),
        31_577_937_344 + 23 * 128,  # with the selection biases of its routers
    ),
    "ibm-granite/granite-4.0-h-small": (
        {"model_type": "granitemoehybrid", "num_local_experts": 72, "num_experts_per_tok": 10}
        | {"shared_intermediate_size": 1536, "tie_word_embeddings": True, "mamba_n_heads": 128}
        | {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_chunk_size": 256}
        | {"layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)]}
        | _sizes(4096, 40, 32, 100352, 768, num_key_value_heads=8),
        32_207_337_984,
    ),
    "ibm-ai-platform/Bamba-9B-v1": (
        {"model_type": "bamba", "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128}
        | {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_chunk_size": 256}
        | _sizes(4096, 32, 32, 128256, 14336, num_key_value_heads=8),
        9_780_235_392,
    ),
    "tiiuae/Falcon-H1-7B-Base": (
        {"model_type": "falcon_h1", "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128}
        | {"mamba_d_state": 256, "mamba_n_groups": 1, "mamba_rms_norm": False, "projectors_bias": False}
        | _sizes(3072, 44, 12, 130048, 12288, num_key_value_heads=2, head_dim=128),
        7_585_513_568,
    ),
    "ai21labs/Jamba-v0.1": (
        {"model_type": "jamba", "num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2}
        | {"expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_dt_rank": 256}
        | {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True}
        | _sizes(4096, 32, 32, 65536, 14336, num_key_value_heads=8),
        51_570_323_328,
    ),
    "mistralai/Mamba-Codestral-7B-v0.1": (
        {"model_type": "mamba2", "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8}
        | {"hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 32768, "chunk_size": 256},
        7_285_403_648,
    ),
    "state-spaces/mamba-2.8b-hf": (
        {"model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280}
        | {"intermediate_size": 5120, "state_size": 16, "time_step_rank": 160, "use_conv_bias": True},
        2_768_345_600,
    ),
    "tiiuae/falcon-mamba-7b": (
        {"model_type": "falcon_mamba", "hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 65024}
        | {"intermediate_size": 8192, "expand": 16, "state_size": 16, "time_step_rank": 256}
        | {"tie_word_embeddings": False},
        7_272_665_088,
    ),
    "LiquidAI/LFM2-1.2B": (
        {"model_type": "lfm2", "block_ff_dim": 12288, "block_multiple_of": 256, "conv_L_cache": 3}
        | {"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True, "conv_bias": False}
        | {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}
        | _sizes(2048, 16, 32, 65536, num_key_value_heads=8),
        1_170_340_608,
    ),
    "LiquidAI/LFM2-8B-A1B": (
        {"model_type": "lfm2_moe", "num_experts": 32, "num_experts_per_tok": 4, "conv_L_cache": 3}
        | {"moe_intermediate_size": 1792, "num_dense_layers": 2, "use_expert_bias": True}
        | {"layer_types": [("conv", "full_attention")[n in (2, 6, 10, 14, 18, 21)] for n in range(24)]}
        | _sizes(2048, 24, 32, 65536, 7168, num_key_value_heads=8),
        8_339_929_856 + 22 * 32,  # with the selection biases of its routers
    ),
}
MEGATRON_LLAMA3 = """\
#!/bin/bash
# Llama 3 8B
torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
    --group-query-attention --num-query-groups 8 --ffn-hidden-size 14336 --swiglu \\
    --untie-embeddings-and-output-weights --disable-bias-linear --normalization RMSNorm \\
    --position-embedding-type rope --vocab-size 128256 --seq-length 8192 --lr 1.0e-5
"""
OWN = """\
name = "small-mixture"
family = "mixtral"
hidden = 64
vocab = 100
extra_parameters = 64

[[layers]]
n_layers = 2
[layers.attention]
heads = 4
kv_heads = 2
head_dim = 16
value_dim = 16
[layers.ffn]
size = 96
is_gated = true

[[layers]]
n_layers = 3
[layers.attention]
heads = 4
kv_heads = 4
head_dim = 24
value_dim = 16
window = 32
[layers.attention.latent]
query_rank = 0
kv_rank = 8
rope_dim = 8
[layers.ffn]
n_experts = 4
per_token = 2
size = 48
capacity = 1.25
"""


def _write(folder, content, name="config.json"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_of_published_models_are_exact(tmp_path, name):
    config, parameters = PUBLISHED[name]

    model = read_model(_write(tmp_path, config))

    assert model.parameters == parameters
    assert model.family == config["model_type"]


def test_a_folder_names_the_model_and_a_path_may_be_text(tmp_path):
    folder = tmp_path / "Meta-Llama-3-8B"
    folder.mkdir()
    path = _write(folder, LLAMA3_8B | {"max_position_embeddings": 8192})

    model = read_model(str(folder))

    assert model == read_model(path)
    assert (model.name, model.source, model.max_seq) == ("Meta-Llama-3-8B", str(path), 8192)
    assert (model.n_layers, len(model.layers), model.is_tied) == (32, 1, False)


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("google/gemma-2-9b", {}, [4096, 0] * 21),
        ("google/gemma-3-1b-pt", {}, ([512] * 5 + [0]) * 4 + [512] * 2),
        ("google/gemma-3-1b-pt", {"sliding_window_pattern": 2}, [512, 0] * 13),
        ("openai/gpt-oss-120b", {}, [128, 0] * 18),
        ("openai/gpt-oss-120b", {"layer_types": None}, [128, 0] * 18),
        ("mistralai/Mistral-7B-v0.1", {}, [4096] * 32),
        ("mistralai/Mistral-7B-v0.1", {"sliding_window": None}, [0] * 32),
        ("microsoft/Phi-3-mini-4k-instruct", {}, [2047] * 32),
        ("Qwen/Qwen2.5-7B", {}, [0] * 28),
        ("Qwen/Qwen2.5-7B", {"use_sliding_window": True, "max_window_layers": 20}, [0] * 20 + [131072] * 8),
        (
            "Qwen/Qwen1.5-MoE-A2.7B",
            {"use_sliding_window": True, "max_window_layers": 3},
            [4096, 0] * 2 + [0] * 20,
        ),
        ("Qwen/Qwen3-30B-A3B", {"use_sliding_window": True, "sliding_window": 64}, [64] * 48),
        ("EleutherAI/gpt-neo-1.3B", {}, [0, 256] * 12),
        ("EleutherAI/gpt-neo-1.3B", {"attention_layers": None}, [0, 256] * 12),
        (
            "EleutherAI/gpt-neo-1.3B",
            {"attention_types": [[["global"], 20], [["local"], 4]]},
            [0] * 20 + [256] * 4,
        ),
        ("answerdotai/ModernBERT-base", {}, ([0] + [129] * 2) * 7 + [0]),
        ("answerdotai/ModernBERT-base", {"local_attention": 64}, ([0] + [65] * 2) * 7 + [0]),
        ("answerdotai/ModernBERT-base", {"global_attn_every_n_layers": 2}, [0, 129] * 11),
        ("google/gemma-3-1b-pt", {"use_bidirectional_attention": True}, ([513] * 5 + [0]) * 4 + [513] * 2),
        ("google/gemma-2-9b", {"is_causal": False}, [8193, 0] * 21),
        ("HuggingFaceTB/SmolLM3-3B", {}, [0] * 36),
        ("HuggingFaceTB/SmolLM3-3B", {"sliding_window": 64}, [0] * 36),
        (
            "HuggingFaceTB/SmolLM3-3B",
            {"use_sliding_window": True, "sliding_window": 64},
            [0, 0, 0, 64] * 9,
        ),
        (
            "HuggingFaceTB/SmolLM3-3B",
            {"use_sliding_window": True, "sliding_window": 64, "no_rope_layers": [0, 1] * 18},
            [64, 0] * 18,
        ),
        (
            "HuggingFaceTB/SmolLM3-3B",
            {"use_sliding_window": True, "sliding_window": 64}
            | {"layer_types": ["sliding_attention"] + ["full_attention"] * 35},
            [64] + [0] * 35,
        ),
        ("HuggingFaceTB/SmolLM3-3B", {"model_type": "exaone4"}, ([4096] * 3 + [0]) * 9),
        # Layers are listed, but the switch is off.
        ("Qwen/Qwen2.5-7B", {"layer_types": ["sliding_attention"] * 28}, [0] * 28),
        (
            "meta-llama/Meta-Llama-3-8B",
            {"model_type": "dots1", "n_routed_experts": 8, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 64, "sliding_window": 64}
            | {"layer_types": ["sliding_attention", "full_attention"] * 16},
            [64, 0] * 16,
        ),
        (
            "meta-llama/Meta-Llama-3-8B",
            {"model_type": "dots1", "n_routed_experts": 8, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 64, "sliding_window": 64, "max_window_layers": 30},
            [0] * 30 + [64] * 2,
        ),
        ("CohereForAI/c4ai-command-r-plus", {"model_type": "cohere2"}, ([4096] * 3 + [0]) * 16),
        ("allenai/OLMo-2-1124-7B", {"model_type": "olmo3"}, ([4096] * 3 + [0]) * 8),
        (
            "HuggingFaceTB/SmolLM3-3B",
            {"model_type": "exaone4", "sliding_window_pattern": "LLG", "sliding_window": 64},
            [64, 64, 0] * 12,
        ),
    ],
)
def test_windows_follow_the_pattern_of_the_family(tmp_path, name, changes, windows):
    model = read_model(_write(tmp_path, PUBLISHED[name][0] | changes))

    assert [run.attention.window for run in model.layers for _ in range(run.n_layers)] == windows


@pytest.mark.parametrize(
    ("config", "ffns"),
    [
        (
            {"model_type": "llama4_text", "num_local_experts": 16, "num_experts_per_tok": 1}
            | {"intermediate_size_mlp": 512, "interleave_moe_layer_step": 2},
            [FeedForward(512, is_gated=True), Experts(16, 1, 256, shared_size=256)] * 2,
        ),
        (
            {"model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64}
            | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2},
            [FeedForward(256, True), *2 * [Experts(8, 2, 64, shared_size=128)], FeedForward(256, True)],
        ),
        (
            {"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": [2, 2, 4, 4]},
            [Experts(8, k, 256, shared_size=256) for k in (2, 2, 4, 4)],
        ),
        (
            {"model_type": "granitemoeshared", "num_local_experts": 8, "num_experts_per_tok": 2}
            | {"shared_intermediate_size": 64},
            [Experts(8, 2, 256, shared_size=64)] * 4,
        ),
    ],
)  # fmt: skip
def test_layers_with_experts_follow_the_fields_of_the_family(tmp_path, config, ffns):
    model = read_model(_write(tmp_path, config | _sizes(64, 4, 4, 100, 256, num_key_value_heads=2)))

    assert [run.ffn for run in model.layers for _ in range(run.n_layers)] == ffns


@pytest.mark.parametrize(
    ("changes", "chunks"),
    [
        ({}, [8192, 8192, 8192, 0]),  # the defaults of transformers
        ({"attention_chunk_size": 512, "no_rope_layer_interval": 2}, [512, 0, 512, 0]),
        ({"no_rope_layers": [0, 1, 1, 0]}, [0, 8192, 8192, 0]),
        ({"attention_chunk_size": None}, [0] * 4),
        ({"layer_types": ["full_attention"] * 4}, [0] * 4),
        ({"layer_types": ["full_attention", "chunked_attention"] * 2}, [0, 8192] * 2),
    ],
)
def test_layers_of_llama_4_with_rotary_positions_have_chunks(tmp_path, changes, chunks):
    config = {"model_type": "llama4_text", "num_local_experts": 4, "num_experts_per_tok": 1}
    sizes = _sizes(64, 4, 4, 100, 256, num_key_value_heads=2, intermediate_size_mlp=64)

    model = read_model(_write(tmp_path, config | sizes | changes))

    attentions = [run.attention for run in model.layers for _ in range(run.n_layers)]
    assert [attention.chunk for attention in attentions] == chunks
    assert {attention.window for attention in attentions} == {0}


def test_mixtures_have_dense_layers_shared_experts_and_latent_attention(tmp_path):
    model = read_model(_write(tmp_path, PUBLISHED["deepseek-ai/DeepSeek-V3"][0]))
    dense, sparse = model.layers

    assert (dense.n_layers, dense.ffn) == (3, FeedForward(18432, is_gated=True))
    experts = Experts(256, 8, 2048, shared_size=2048, n_groups=8, groups_per_token=4)
    assert (sparse.n_layers, sparse.ffn) == (58, experts)
    assert (sparse.attention.head_dim, sparse.attention.value_dim) == (192, 128)
    assert sparse.attention.latent.query_rank == 1536
    assert model.active_parameters == 671_026_419_200 - 58 * 248 * 3 * 7168 * 2048


@pytest.mark.parametrize(
    ("name", "changes", "groups"),
    [
        ("deepseek-ai/DeepSeek-V3", {}, (8, 4)),
        ("deepseek-ai/DeepSeek-V3", {"n_group": 1, "topk_group": 1}, (1, 1)),
        ("deepseek-ai/DeepSeek-V3", {"n_group": 16, "topk_group": 2}, (16, 2)),
        # Greedy, unless the configuration says otherwise.
        ("deepseek-ai/DeepSeek-V2", {"n_group": 8, "topk_group": 3}, (1, 1)),
        (
            "deepseek-ai/DeepSeek-V2",
            {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
            (8, 3),
        ),
        ("zai-org/GLM-4.5-Air", {}, (1, 1)),
        ("Qwen/Qwen3-30B-A3B", {}, (1, 1)),
    ],
)
def test_groups_of_experts_are_those_of_the_configuration(tmp_path, name, changes, groups):
    ffn = read_model(_write(tmp_path, PUBLISHED[name][0] | changes)).layers[-1].ffn

    assert (ffn.n_groups, ffn.groups_per_token) == groups


def test_every_second_layer_is_sparse_except_those_named(tmp_path):
    config = PUBLISHED["Qwen/Qwen3-30B-A3B"][0] | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}

    runs = read_model(_write(tmp_path, config)).layers

    assert [(run.n_layers, isinstance(run.ffn, Experts)) for run in runs[:4]] == [
        (1, False),
        (1, True),
        (3, False),
        (1, True),
    ]


def test_encoders_see_all_tokens_and_have_their_own_length(tmp_path):
    whisper = read_model(_write(tmp_path, PUBLISHED["openai/whisper-large-v3"][0]))
    encoder, decoder = whisper.layers
    bert = read_model(_write(tmp_path, PUBLISHED["google-bert/bert-base-uncased"][0]))
    vit = read_model(_write(tmp_path, PUBLISHED["google/vit-base-patch16-224"][0]))

    assert (encoder.seq, encoder.attention.is_causal, encoder.cross_attention) == (1500, False, None)
    assert (decoder.seq, decoder.attention.is_causal, decoder.cross_attention.is_causal) == (0, True, False)
    assert (bert.head, bert.layers[0].attention.is_causal, bert.positions) == ("masked-lm", False, 512)
    assert (vit.head, vit.vocab, vit.layers[0].seq) == ("classes", 1000, 197)


@pytest.mark.parametrize(
    ("name", "changes", "is_causal"),
    [
        ("google-bert/bert-base-uncased", {}, False),
        ("google-bert/bert-base-uncased", {"is_decoder": True}, True),
        ("FacebookAI/roberta-base", {"is_decoder": True}, True),
        ("FacebookAI/roberta-base", {"model_type": "camembert", "is_decoder": True}, True),
        ("google/gemma-7b", {"use_bidirectional_attention": True}, False),
        ("google/gemma-3-1b-pt", {"use_bidirectional_attention": True}, False),
        ("google/gemma-3-1b-pt", {}, True),
        ("meta-llama/Meta-Llama-3-8B", {"is_causal": False}, False),
        ("deepseek-ai/DeepSeek-V3", {"is_causal": False}, False),
        ("answerdotai/ModernBERT-base", {"is_causal": True}, False),  # which transformers does not read
    ],
)
def test_fields_decide_whether_tokens_see_later_ones(tmp_path, name, changes, is_causal):
    model = read_model(_write(tmp_path, PUBLISHED[name][0] | changes))

    assert {run.attention.is_causal for run in model.layers} == {is_causal}
    assert model.parameters == PUBLISHED[name][1]
    if "is_decoder" in changes:
        assert model.head == "lm"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sliding_window": 512}, "sliding_window 512 is ignored: transformers has no windows in llama"),
        (
            {"layer_types": ["sliding_attention"] * 32},
            "sliding_attention in layer_types is ignored: transformers has no windows in llama",
        ),
        ({"sliding_window": 512, "use_sliding_window": False}, ""),
        (
            PUBLISHED["ai21labs/Jamba-v0.1"][0] | {"sliding_window": 512},
            "sliding_window 512 is ignored: transformers has no windows in jamba",
        ),
        (
            PUBLISHED["google-bert/bert-base-uncased"][0]
            | {"position_embedding_type": "relative_key", "num_key_value_heads": None},
            "position_embedding_type relative_key is counted as absolute",
        ),
        (
            PUBLISHED["MiniMaxAI/MiniMax-M2"][0] | {"num_mtp_modules": 3},
            "3 layers that predict further tokens are left out",
        ),
        ({"num_local_experts": 8}, "num_local_experts 8 is ignored: no layer of llama has experts"),
        ({"num_experts": 1}, ""),
        (
            {"kv_lora_rank": 512, "q_lora_rank": 1536},
            "kv_lora_rank 512 is ignored: no layer of llama has latent attention",
        ),
        ({"kv_lora_rank": 512, "q_lora_rank": 1536, "use_mla": False}, ""),
        (
            {"mamba_d_state": 128},
            "mamba_d_state 128 is ignored: no layer of llama is recurrent",
        ),
        (
            {"layer_types": ["linear_attention", "full_attention"] * 16},
            "layer_types linear_attention are ignored: all layers of llama have attention",
        ),
        (
            {"use_cla": True},
            "use_cla True is ignored: no layer of llama shares keys and values",
        ),
        (
            {"cross_attention_layers": [3]},
            "cross_attention_layers [3] is ignored: no layer of llama has cross attention",
        ),
        (
            PUBLISHED["deepseek-ai/DeepSeek-V2-Lite"][0] | {"index_topk": 2048},
            "index_topk 2048 is ignored: no layer of deepseek_v2 has sparse attention",
        ),
        (
            PUBLISHED["mistralai/Mixtral-8x7B-v0.1"][0] | {"n_shared_experts": 2},
            "n_shared_experts 2 is ignored: no layer of mixtral has shared experts",
        ),
        (
            PUBLISHED["mistralai/Mixtral-8x7B-v0.1"][0] | {"first_k_dense_replace": 1},
            "first_k_dense_replace 1 is ignored: no layer of mixtral is dense",
        ),
    ],
)
def test_fields_without_effect_are_named(tmp_path, caplog, changes, said):
    read_model(_write(tmp_path, LLAMA3_8B | changes))

    assert [said in record.getMessage() for record in caplog.records] == [True] * bool(said)


def test_selection_biases_count_where_a_router_has_them(tmp_path):
    config, parameters = PUBLISHED["MiniMaxAI/MiniMax-M2"]

    assert (
        parameters - read_model(_write(tmp_path, config | {"use_routing_bias": False})).parameters == 62 * 256
    )


def test_a_pretraining_head_of_bert_counts_its_pooler(tmp_path):
    config = PUBLISHED["google-bert/bert-base-uncased"][0] | {"architectures": ["BertForPreTraining"]}

    assert read_model(_write(tmp_path, config)).parameters == 110_106_428


def test_a_multimodal_configuration_is_read_as_its_text_model(tmp_path, caplog):
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    text |= {"num_hidden_layers": 34, "sliding_window": 1024}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}

    model = read_model(_write(tmp_path, config))

    assert model.parameters == 3_880_263_168  # gemma-3-4b without its vision tower
    assert "reading text_config, the text model of gemma3; other parts are left out" in caplog.text
    assert "text_config leaves out fields; using the defaults of transformers: " in caplog.text
    assert "'head_dim': 256" in caplog.text


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_text_model_is_tied_as_the_whole_says_unless_it_says_itself(tmp_path, is_tied):
    text = PUBLISHED["Qwen/Qwen3-8B"][0]
    whole = {"model_type": "qwen3_vl", "tie_word_embeddings": is_tied, "text_config": text}
    text_says = whole | {"text_config": text | {"tie_word_embeddings": not is_tied}}

    assert read_model(_write(tmp_path, whole)).is_tied is is_tied
    assert read_model(_write(tmp_path, text_says)).is_tied is not is_tied


def test_other_names_of_a_model_type_are_read_as_their_family(tmp_path, caplog):
    qwen, parameters = PUBLISHED["Qwen/Qwen2.5-7B"]

    flat = read_model(_write(tmp_path, qwen | {"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}}))

    assert (flat.parameters, flat.family) == (parameters, "qwen2_5_vl")
    assert "reading the text model of qwen2_5_vl; other parts are left out" in caplog.text


def test_learned_positions_and_biases_of_mpt_follow_its_options(tmp_path):
    config, parameters = PUBLISHED["mosaicml/mpt-7b"]
    attention = {"alibi": False, "attn_type": "multiquery_attention"}

    model = read_model(_write(tmp_path, config | {"attn_config": attention, "no_bias": False}))

    assert (model.positions, model.layers[0].attention.kv_heads) == (2048, 1)
    fewer = 2 * 31 * 128 * 4096
    biases = (2 * 4096 + 2 * 128) + (4 * 4096 + 4096) + 2 * 4096
    assert model.parameters == parameters + 2048 * 4096 + 4096 + 32 * (biases - fewer)


@pytest.mark.parametrize("tokenizer", ["--tokenizer-type GPT2BPETokenizer", "--merge-file bpe/merges.txt"])
def test_the_vocabulary_of_the_gpt2_tokenizer_need_not_be_stated(tmp_path, caplog, tokenizer):
    options = MEGATRON_LLAMA3.replace("--vocab-size 128256", tokenizer)

    assert read_model(_write(tmp_path, options, "run.sh")).vocab == 50304
    assert "no vocab_size is stated; using 50257, that of the tokenizer of GPT-2" in caplog.text


def test_a_padded_vocabulary_is_taken_as_it_is(tmp_path):
    options = MEGATRON_LLAMA3.rstrip() + " --padded-vocab-size 131072\n"

    assert read_model(_write(tmp_path, options, "run.sh")).vocab == 131072


def test_what_is_left_out_is_logged(tmp_path, caplog):
    config = PUBLISHED["deepseek-ai/DeepSeek-V3"][0] | {"architectures": ["DeepseekV3ForTokenClassification"]}

    read_model(_write(tmp_path, config))

    assert "'quantization_config' is ignored" in caplog.text
    assert "1 layers that predict further tokens are left out" in caplog.text
    assert "counting the usual head of deepseek_v3" in caplog.text


def test_nothing_is_logged_for_a_plain_configuration(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)

    read_model(_write(tmp_path, LLAMA3_8B | {"architectures": ["LlamaForCausalLM"]}))

    assert not caplog.records


@pytest.mark.parametrize("name", ["run.sh", "arguments.txt", "arguments"])
def test_options_of_megatron_describe_a_model(tmp_path, name):
    model = read_model(_write(tmp_path, MEGATRON_LLAMA3, name))

    assert model.parameters == 8_030_261_248
    assert (model.max_seq, model.layers[0].attention.kv_heads, model.is_tied) == (8192, 8, False)


def test_a_script_may_keep_options_in_variables(tmp_path):
    script = """\
#!/bin/bash
SEQ_LENGTH=8192
export LAYERS=32
MODEL_ARGS=(
    --num-layers ${LAYERS}
    --hidden-size 4096 --num-attention-heads 32  # of 128 channels
    --group-query-attention
    --num-query-groups 8
    --ffn-hidden-size=14336
    --seq-length $SEQ_LENGTH
    --position-embedding-type rope
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --swiglu
)
DATA_ARGS="
    --vocab-size 128256 \\
"
DATA_ARGS+=("--normalization RMSNorm")
torchrun pretrain_gpt.py ${MODEL_ARGS[@]} $DATA_ARGS
"""

    model = read_model(_write(tmp_path, script, "train.sh"))

    assert (model.parameters, model.max_seq) == (8_030_261_248, 8192)


@pytest.mark.parametrize("name", ["model.yaml", "model.json"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_file_of_arguments_is_as_good_as_options(tmp_path, name, is_nested):
    arguments = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8}
    arguments |= {"ffn_hidden_size": 14336, "gated_linear_unit": True, "add_bias_linear": False}
    arguments |= {"normalization": "RMSNorm", "position_embedding_type": "rope", "vocab_size": 128256}
    arguments |= {"share_embeddings_and_output_weights": False}
    if is_nested:
        options = {"--" + key.replace("_", "-"): value for key, value in arguments.items()}
        arguments = {"ENV_VARS": {"NCCL_ALGO": "Ring"}, "MODEL_ARGS": options}

    assert read_model(_write(tmp_path, arguments, name)).parameters == 8_030_261_248  # JSON is YAML


def test_defaults_of_megatron_are_those_of_gpt(tmp_path):
    options = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --vocab-size 50257"
    options += " --max-position-embeddings 1024 --make-vocab-size-divisible-by 1"

    assert read_model(_write(tmp_path, options, "gpt.txt")).parameters == 124_439_808
    # Without the option, groups are not used; the vocabulary is padded to a multiple of 128 per rank.
    options = options.replace(" --make-vocab-size-divisible-by 1", " --tensor-model-parallel-size 4")
    padded = read_model(_write(tmp_path, options + " --num-query-groups 4", "gpt.txt"))
    assert padded.parameters == 124_439_808 + (50688 - 50257) * 768
    assert padded.layers[0].attention.kv_heads == 12


def test_megatron_options_of_a_mixture_give_the_count_of_deepseek(tmp_path):
    arguments = {"num_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "swiglu": True}
    arguments |= {"ffn_hidden_size": 18432, "disable_bias_linear": True, "normalization": "RMSNorm"}
    arguments |= {"position_embedding_type": "rope", "untie_embeddings_and_output_weights": True}
    arguments |= {"num_experts": 256, "moe_router_topk": 8, "moe_ffn_hidden_size": 2048}
    arguments |= {"moe_shared_expert_intermediate_size": 2048, "moe_layer_freq": "([0]*3+[1]*58)"}
    arguments |= {"multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512}
    arguments |= {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "mtp_num_layers": 1}
    arguments |= {"vocab_size": 129280, "moe_expert_capacity_factor": 1.5}
    arguments |= {"moe_router_num_groups": 8, "moe_router_group_topk": 4}

    model = read_model(_write(tmp_path, arguments, "model.json"))

    assert model.parameters == 671_026_404_352  # selection biases are buffers there
    assert [run.n_layers for run in model.layers] == [3, 58]
    assert model.layers[1].ffn.capacity == 1.5
    assert model.layers[1].ffn.reach == 0.5
    unlimited = read_model(_write(tmp_path, arguments | {"moe_router_group_topk": None}, "model.json"))
    assert unlimited.layers[1].ffn.reach == 1
    with pytest.raises(InputError, match="'moe_router_num_groups' is missing"):
        read_model(_write(tmp_path, arguments | {"moe_router_num_groups": None}, "model.json"))


@pytest.mark.parametrize(
    ("frequency", "sparse"),
    [(1, [1] * 6), (2, [1, 0] * 3), ([0, 1, 1, 1, 1, 1], [0] + [1] * 5), ("[0,1]*3", [0, 1] * 3)],
)
def test_megatron_names_sparse_layers_by_interval_or_list(tmp_path, frequency, sparse):
    arguments = {"num_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}
    arguments |= {"position_embedding_type": "rope", "num_experts": 4, "moe_layer_freq": frequency}

    runs = read_model(_write(tmp_path, arguments, "model.yml")).layers

    assert [int(isinstance(run.ffn, Experts)) for run in runs for _ in range(run.n_layers)] == sparse


def test_megatron_windows_count_the_token_itself(tmp_path):
    options = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 128 --swiglu"
    options += " --position-embedding-type rope --window-size 127,0 --window-attn-skip-freq 2"

    runs = read_model(_write(tmp_path, options, "model.txt")).layers

    assert [run.attention.window for run in runs] == [128, 0, 128, 0]
    assert runs[0].ffn.size == 128  # two thirds of four times the hidden size, in multiples of 64


@pytest.mark.parametrize(
    "script", ["pretrain_llama.py", "/data/multimodal/megatron/pretrain_gpt.py", "train.py"]
)
def test_scripts_of_ones_own_are_those_of_a_gpt(tmp_path, script):
    options = MEGATRON_LLAMA3.replace("pretrain_gpt.py", script)

    assert read_model(_write(tmp_path, options, "run.sh")).parameters == 8_030_261_248


def test_a_bert_of_megatron_sees_all_tokens_and_has_its_head(tmp_path):
    options = "python pretrain_bert.py --num-layers 12 --hidden-size 768 --num-attention-heads 12"
    options += " --vocab-size 30522 --make-vocab-size-divisible-by 1 --max-position-embeddings 512"

    model = read_model(_write(tmp_path, options, "bert.sh"))
    single = read_model(_write(tmp_path, options + " --bert-no-binary-head", "bert.sh"))

    assert model.parameters == 110_106_428  # as BertForPreTraining, whose norms are placed otherwise
    assert (model.head, model.layers[0].attention.is_causal) == ("masked-lm", False)
    assert model.parameters - single.parameters == 2 * 768 + 768 * 769 + 2 * 769


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ("--attention-output-gate", 32 * 4096 * 4096),
        ("--quick-geglu", 0),  # gated, as is --swiglu
    ],
)
def test_further_options_of_megatron_change_the_counts(tmp_path, options, difference):
    model = read_model(_write(tmp_path, MEGATRON_LLAMA3.rstrip() + f" {options}\n", "run.sh"))

    assert model.parameters - 8_030_261_248 == difference


def test_a_file_with_the_defaults_of_all_arguments_is_that_of_a_gpt(tmp_path):
    arguments = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}
    arguments |= {"position_embedding_type": "rope"}
    defaults = {"is_hybrid_model": False, "hybrid_attention_ratio": 0.0, "hybrid_override_pattern": None}
    defaults |= {"mamba_state_dim": 128, "mamba_num_groups": 8, "encoder_num_layers": 2, "img_h": 224}
    defaults |= {"spec": None, "decoder_num_layers": None, "attention_output_gate": False}

    plain = read_model(_write(tmp_path, arguments, "model.yaml"))

    assert read_model(_write(tmp_path, arguments | defaults, "model.yaml")) == plain


@pytest.mark.parametrize(
    ("flavor", "parameters"), [("8B", 8_030_261_248), ("70B", 70_553_706_496), ("405B", 405_853_388_800)]
)
def test_flavors_of_torchtitan_are_the_published_models(tmp_path, flavor, parameters):
    text = f'[model]\nname = "llama3"\nflavor = "{flavor}"\n[training]\nseq_len = 8192\n'

    model = read_model(_write(tmp_path, text, "train.toml"))

    assert model.parameters == parameters
    assert (model.name, model.max_seq) == (f"llama3-{flavor}", 8192)


def test_our_own_format_has_the_fields_of_the_types(tmp_path):
    model = read_model(_write(tmp_path, 'head = "masked-lm"\n' + OWN, "small.toml"))
    dense, sparse = model.layers

    assert (model.name, model.family, model.head) == ("small-mixture", "mixtral", "masked-lm")
    assert (dense.n_layers, dense.ffn) == (2, FeedForward(96, is_gated=True))
    assert sparse.ffn == Experts(4, 2, 48, capacity=1.25)
    assert (sparse.attention.latent.kv_rank, sparse.attention.window) == (8, 32)
    attention_dense = 64 * 64 + 2 * 64 * 32 + 64 * 64
    attention_sparse = 64 * 96 + 64 * 16 + 8 * 4 * 32 + 8 + 64 * 64
    experts = 4 * 64 + 4 * 3 * 64 * 48
    assert model.parameters == (
        2 * 6400 + 64 + 2 * (attention_dense + 3 * 64 * 96 + 128) + 3 * (attention_sparse + experts + 128)
    )


@pytest.mark.parametrize(
    ("name", "changes", "kinds"),
    [
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {}, "RRRA" * 12),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"full_attention_interval": 2}, "RA" * 24),
        (
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
            {"layer_types": ["full_attention"] * 47 + ["linear_attention"]},
            "A" * 47 + "R",
        ),
        ("nvidia/Nemotron-H-8B-Base-8K", {"hybrid_override_pattern": "M-*" * 17 + "M"}, "R-A" * 17 + "R"),
        ("nvidia/Nemotron-H-8B-Base-8K", {"layers_block_type": ["mamba", "mlp"] * 26}, "R-" * 26),
        ("ibm-granite/granite-4.0-h-small", {}, "RRRRRARRRR" * 4),
        ("ibm-granite/granite-4.0-h-small", {"layer_types": None}, "R" * 40),
        ("ibm-ai-platform/Bamba-9B-v1", {}, "R" * 9 + "A" + "R" * 8 + "A" + "R" * 8 + "A" + "R" * 4),
        ("tiiuae/Falcon-H1-7B-Base", {}, "B" * 44),
        ("ai21labs/Jamba-v0.1", {}, "RRRRARRR" * 4),
        ("LiquidAI/LFM2-1.2B", {}, "RRARRARRARARARAR"),
        ("LiquidAI/LFM2-1.2B", {"full_attn_idxs": None}, "A" * 16),
        ("LiquidAI/LFM2-1.2B", {"full_attn_idxs": []}, "R" * 16),
    ],
)  # fmt: skip
def test_kinds_of_layers_follow_the_fields_of_the_type(tmp_path, name, changes, kinds):
    model = read_model(_write(tmp_path, PUBLISHED[name][0] | changes))

    letters = {(True, False): "A", (False, True): "R", (True, True): "B", (False, False): "-"}
    found = [
        letters[run.attention is not None, run.recurrent is not None] * run.n_layers for run in model.layers
    ]
    assert "".join(found) == kinds


@pytest.mark.parametrize(
    ("name", "changes", "difference"),
    [
        # Biases and norms per layer; the inner size of a state space where it is not stated.
        ("tiiuae/Falcon-H1-7B-Base", {"mamba_proj_bias": True}, 44 * (2 * 3072 + 2 * 256 + 24)),
        ("tiiuae/Falcon-H1-7B-Base", {"projectors_bias": True}, 44 * 3072),
        ("tiiuae/Falcon-H1-7B-Base", {"mamba_rms_norm": True}, 44 * 3072),
        ("tiiuae/Falcon-H1-7B-Base", {"mamba_conv_bias": False}, -44 * (3072 + 2 * 256)),
        (
            "tiiuae/Falcon-H1-7B-Base",
            {"mamba_d_ssm": None, "mamba_n_heads": 48},
            44 * (24 * 3072 + 3072 * 3072 * 3 + 3072 * 5 + 24 * 3),
        ),
        ("ibm-granite/granite-4.0-h-small", {"num_local_experts": 0}, -40 * 72 * 4096 * (3 * 768 + 1)),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"attention_bias": True}, 12 * (8192 + 2 * 512 + 2048)),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"mlp_bias": True}, 23 * (3712 + 2688)),
        ("LiquidAI/LFM2-1.2B", {"block_auto_adjust_ff_dim": False}, 16 * 3 * 2048 * 4096),
        ("LiquidAI/LFM2-1.2B", {"block_ffn_dim_multiplier": 1.01}, 16 * 3 * 2048 * 256),
        ("LiquidAI/LFM2-1.2B", {"tie_embedding": False}, 65536 * 2048),
        ("LiquidAI/LFM2-8B-A1B", {"use_expert_bias": False}, -22 * 32),
    ],
)  # fmt: skip
def test_switches_of_recurrent_layers_change_the_counts(tmp_path, name, changes, difference):
    config, parameters = PUBLISHED[name]

    assert read_model(_write(tmp_path, config | changes)).parameters - parameters == difference


BROKEN = [
    (
        PUBLISHED["nvidia/Nemotron-H-8B-Base-8K"][0] | {"moe_latent_size": 1024},
        "field 'moe_latent_size': found 1024; expected it unset",
    ),
    (
        PUBLISHED["nvidia/Nemotron-H-8B-Base-8K"][0] | {"tie_word_embeddings": True},
        "field 'tie_word_embeddings': found True; expected it unset",
    ),
    (
        PUBLISHED["nvidia/Nemotron-H-8B-Base-8K"][0] | {"hybrid_override_pattern": "MX"},
        "field 'hybrid_override_pattern': found 'MX'; expected a letter of M * - E per layer",
    ),
    (
        PUBLISHED["nvidia/Nemotron-H-8B-Base-8K"][0] | {"hybrid_override_pattern": "MM"},
        "expected 52 of linear_attention, full_attention, mlp, moe",
    ),
    (
        PUBLISHED["LiquidAI/LFM2-8B-A1B"][0] | {"layer_types": None},
        "field 'layer_types' is missing; expected a list of full_attention, conv",
    ),
    (
        PUBLISHED["LiquidAI/LFM2-1.2B"][0] | {"block_ffn_dim_multiplier": "1"},
        "field 'block_ffn_dim_multiplier': found '1'; expected a number above 0",
    ),
    (
        PUBLISHED["mistralai/Mamba-Codestral-7B-v0.1"][0] | {"num_heads": 64},
        "64 heads of 64 channels in a state space of 8,192; expected as many in all",
    ),
    (
        PUBLISHED["ibm-ai-platform/Bamba-9B-v1"][0] | {"mamba_n_groups": 3},
        "Recurrent: 128 heads are not a multiple of 3 groups",
    ),
    (
        {"model_type": "opt", "layer_norm_elementwise_affine": False},
        "field 'layer_norm_elementwise_affine': found False; expected True",
    ),
    (
        PUBLISHED["deepseek-ai/DeepSeek-V2-Lite"][0] | {"attention_bias": True},
        "field 'attention_bias': found True; expected False with latent attention",
    ),
    (
        {"add_cross_attention": True},
        "field 'add_cross_attention': found True; expected False, or a model with",
    ),
    (
        json.dumps(PUBLISHED["facebook/bart-large"][0] | {"tie_word_embeddings": False}),
        "field 'tie_word_embeddings': found False; expected True",
    ),
    (
        PUBLISHED["answerdotai/ModernBERT-base"][0] | {"mlp_bias": True},
        "field 'mlp_bias': found True; expected False",
    ),
    (
        PUBLISHED["ByteDance-Seed/Seed-OSS-36B-Instruct"][0]
        | {"attention_bias": False, "attention_out_bias": True},
        "field 'attention_out_bias': found True without attention_bias; expected False",
    ),
    (
        {"model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": [1, 1]},
        "field 'moe_topk': found 2 numbers; expected one per layer",
    ),
    *(
        (
            {"model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": 1, name: value},
            f"field {name!r}: found {value!r}; expected {usual}, as transformers counts",
        )
        for name, value, usual in (
            ("num_shared_expert", [2] * 32, 1),
            ("moe_intermediate_size", 1024, 14336),
            ("moe_layer_num_skipped", 2, 0),
        )
    ),
    (
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts": 16, "num_experts_per_tok": 2},
        "field 'num_experts': found 16, but 'num_local_experts' is 8; expected one of them, or equal values",
    ),
    (
        json.dumps(PUBLISHED["EleutherAI/gpt-neo-1.3B"][0] | {"attention_types": [[["global", "local"], 6]]}),
        "field 'attention_types': found 12 of global, local; expected 24 of global, local",
    ),
    (
        json.dumps(PUBLISHED["EleutherAI/gpt-neo-1.3B"][0] | {"attention_types": [["global", "local"], 12]}),
        "expected lists with repetitions, as in [[['global', 'local'], 12]]",
    ),
    (
        json.dumps(PUBLISHED["EleutherAI/gpt-neo-1.3B"][0] | {"attention_layers": ["global"]}),
        "field 'attention_layers': found 1 of global; expected 24 of global, local",
    ),
    (
        PUBLISHED["HuggingFaceTB/SmolLM3-3B"][0] | {"no_rope_layers": [1]},
        "field 'no_rope_layers': found 1 numbers; expected one per layer",
    ),
    (
        PUBLISHED["google/gemma-2-9b"][0] | {"use_bidirectional_attention": True},
        "field 'use_bidirectional_attention': found True; expected False",
    ),
    (
        PUBLISHED["mosaicml/mpt-7b"][0] | {"attn_config": {"prefix_lm": True}},
        "field 'prefix_lm': found True; expected it unset",
    ),
    (
        PUBLISHED["mosaicml/mpt-7b"][0] | {"attn_config": {"sliding_window_size": 512}},
        "field 'sliding_window_size': found 512; expected it unset",
    ),
    (
        PUBLISHED["MiniMaxAI/MiniMax-M2"][0] | {"attn_type_list": [0, 1] * 31},
        "field 'attn_type_list': found layers of linear attention; expected 1 for each",
    ),
    (
        PUBLISHED["facebook/bart-large"][0] | {"is_decoder": True},
        "field 'is_decoder': found True; expected False: both stacks are counted",
    ),
    (
        PUBLISHED["google-t5/t5-large"][0] | {"is_encoder_decoder": False},
        "field 'is_encoder_decoder': found False; expected True: both stacks are counted",
    ),
    (
        {"pruned_heads": {"0": [1, 2]}},
        "field 'pruned_heads': found {'0': [1, 2]}; expected it empty or unset",
    ),
    # Content of config.json, or its changes to Llama 3 8B, and the message after the path.
    (
        {"hidden_size": None},
        "field 'hidden_size' (or n_embd, n_embed, d_model, dim) is missing; expected a whole number from 1 ",
    ),
    ({"model_type": "lllama"}, "unknown model_type 'lllama'; expected "),
    ({"model_type": "lllama"}, "Did you mean 'llama'?"),
    ({"model_type": 3}, "field 'model_type': found 3; expected text"),
    ({"num_key_value_heads": 5}, "Attention: 32 heads are not a multiple of 5 kv_heads; "),
    ({"num_attention_heads": 33}, "the hidden size 4,096 is not a multiple of 33 attention heads"),
    ({"hidden_size": "4096"}, "field 'hidden_size': found '4096'; expected a whole number from 1 to "),
    ({"hidden_size": 4096.5}, "field 'hidden_size': found 4096.5; expected a whole number from 1 to "),
    ({"vocab_size": float("nan")}, "field 'vocab_size': found nan; expected a whole number from 1 to "),
    ({"intermediate_size": -1}, "field 'intermediate_size': found -1; expected a whole number from 1 to "),
    (
        {"num_hidden_layers": 10**6},
        "field 'num_hidden_layers': found 1000000; expected a whole number from 1 to 10,000",
    ),
    ({"attention_bias": "no"}, "field 'attention_bias': found 'no'; expected true or false"),
    (
        {"model_type": "gemma2", "layer_types": ["full"] * 32},
        "field 'layer_types': found 32 of full; expected 32 of full_attention, sliding_attention",
    ),
    (
        {"model_type": "gemma2", "layer_types": ["full_attention"] * 31},
        "field 'layer_types': found 31 of full_attention; expected 32 of full_attention, sliding_attention",
    ),
    (
        {"model_type": "gpt2", "num_hidden_layers": None},
        "field 'num_hidden_layers' (or n_layer, n_layers, num_layers) is missing; expected ",
    ),
    (
        {"model_type": "mistral", "num_key_value_heads": None},
        "field 'num_key_value_heads' is missing; expected ",
    ),
    (
        {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4},
        "Experts: 4 per token, but there are 2",
    ),
    (
        {"model_type": "qwen3_moe", "mlp_only_layers": ["a"]},
        "field 'mlp_only_layers': found ['a']; expected a list of whole numbers",
    ),
    (
        {"model_type": "vit", "patch_size": 512},
        "field 'patch_size': found 512; expected at most the image size, 224",
    ),
    ("", "the file is empty; expected config.json of a model, arguments of Megatron-LM, or TOML"),
    ("{'model_type': 'llama'}", "cannot be read as JSON: Expecting property name enclosed in double quotes"),
    ("[1, 2]", "holds a list; expected a table of named fields"),
    ("[" * 100_000, "cannot be read as JSON: it is nested too deeply"),
    (
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n",
        "is a pointer of Git LFS, not the file; fetch it with 'git lfs pull'",
    ),
    (
        '{"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}',
        "describes a tokenizer; expected config.json of the model, beside it",
    ),
    (
        '{"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 8}',
        "describes a LORA adapter; expected config.json of its base (org/base)",
    ),
    (
        '{"hidden_size": 64}',
        "field 'model_type' is missing; expected that of a transformers model, or the Megatron-LM arguments",
    ),
    (
        '{"model_type": "llava", "text_config": {"hidden_size": 64}}',
        "field 'model_type' is missing; expected text",
    ),
]
BROKEN_OTHERS = [
    (
        "a.toml",
        OWN.replace("vocab = 100", f"vocab = {10**14}"),
        "vocab: found 100000000000000; expected at most ",
    ),
    (
        "a.toml",
        'name = "a"\nlayers = [{attention = 3}]',
        "layers[1].attention: found 3; expected a table of fields",
    ),
    (
        "a.yaml",
        "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nmoe_layer_freq: '"
        + "+".join(["[1]*99999"] * 999)
        + "'",
        "; expected a whole number >= 1, or a list of 0 and 1 for 2 layers",
    ),
    (
        "a.txt",
        "a model with 7B parameters",
        "has neither JSON nor command-line options; expected config.json",
    ),
    (
        "a.txt",
        "--num-layers $LAYERS --hidden-size 64",
        "field 'num_layers': found '$LAYERS'; expected a whole number",
    ),
    (
        "a.txt",
        "--num-layers 2",
        "field 'hidden_size' (or n_embd, n_embed, d_model, dim) is missing; expected a whole number from ",
    ),
    (
        "a.sh",
        MEGATRON_LLAMA3.replace("RMSNorm", "BatchNorm"),
        "field 'normalization': found 'BatchNorm'; expected LayerNorm or RMSNorm",
    ),
    (
        "a.sh",
        MEGATRON_LLAMA3.replace("rope", "learned_absolute"),
        "field 'max_position_embeddings' (or n_positions, max_seq_len) is missing; expected ",
    ),
    (
        "a.sh",
        MEGATRON_LLAMA3 + " --num-experts 8 --moe-layer-freq [0]*3",
        "field 'moe_layer_freq': found '[0]*3'; expected a whole number >= 1, or a list of 0 and 1",
    ),
    (
        "a.sh",
        MEGATRON_LLAMA3 + " --num-experts 8 --moe-expert-capacity-factor nan",
        "field 'moe_expert_capacity_factor': found nan; expected a number",
    ),
    (
        "a.sh",
        MEGATRON_LLAMA3 + " --window-size 5",
        "field 'window_size': found 5; expected two whole numbers, as in '127,0'",
    ),
    *(
        (
            "a.sh",
            MEGATRON_LLAMA3.replace("pretrain_gpt", script),
            f"script '{script}.py': expected a GPT or BERT",
        )
        for script in (
            "pretrain_mamba",
            "pretrain_hybrid",
            "pretrain_t5",
            "pretrain_vlm",
            "pretrain_vision_classify",
            "pretrain_ict",
            "pretrain_retro",
            "examples/multimodal/train",
        )
    ),
    *(
        (
            "a.sh",
            f"{MEGATRON_LLAMA3.rstrip()} {option} {value}",
            f"option '{option}': found {value or True}; expected a GPT or BERT of Megatron-LM; ",
        )
        for option, value in (
            ("--hybrid-attention-ratio", "0.08"),
            ("--hybrid-mlp-ratio", "0.5"),
            ("--is-hybrid-model", ""),
            ("--mamba-num-heads", "64"),
            ("--mamba-state-dim", "128"),
            ("--linear-attention-freq", "4"),
            ("--encoder-num-layers", "32"),
            ("--decoder-num-layers", "12"),
            ("--decoder-seq-length", "128"),
            ("--img-h", "224"),
            ("--retro-add-retriever", ""),
            ("--moe-latent-size", "64"),
        )
    ),
    (
        "a.sh",
        f"{MEGATRON_LLAMA3.rstrip()} --hybrid-override-pattern M-M*-",
        "option '--hybrid-override-pattern': found 'M-M*-'; expected a GPT",
    ),
    (
        "a.sh",
        f"{MEGATRON_LLAMA3.rstrip()} --experimental-attention-variant gated_delta_net",
        "option '--experimental-attention-variant': found 'gated_delta_net'; expected a GPT",
    ),
    (
        "a.sh",
        f"{MEGATRON_LLAMA3.rstrip()} --heterogeneous-layers-config-path a.json",
        "option '--heterogeneous-layers-config-path': found 'a.json'; expected a GPT",
    ),
    (
        "a.sh",
        f"{MEGATRON_LLAMA3.rstrip()} --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
        "option --spec: found ['megatron.core.models.mamba.mamba_layer_specs', 'mamba_stack_spec']; expected",
    ),
    (
        "a.sh",
        f"{MEGATRON_LLAMA3} python pretrain_bert.py",
        "runs pretrain_gpt.py and pretrain_bert.py; expected one of them",
    ),
    (
        "a.sh",
        f"{MEGATRON_LLAMA3.rstrip()} --multi-latent-attention --attention-output-gate",
        "field 'attention_output_gate': found True; expected False with multi_latent_attention",
    ),
    (
        "a.yaml",
        "num_layers: 2\nhidden_size: 64\nhybrid_attention_ratio: 0.1",
        "field 'hybrid_attention_ratio': found 0.1; expected a GPT or BERT",
    ),
    (
        "a.yaml",
        "model:\n  _target_: megatron.bridge.MambaModelProvider\n  num_layers: 2\n  hidden_size: 64",
        "field '_target_': found 'MambaModelProvider'; expected a GPT or BERT",
    ),
    ("a.yaml", "", "the file is empty; expected "),
    ("a.yaml", "- 1", "holds a list; expected a table of named fields"),
    (
        "a.yaml",
        "num_layers: 2\nnum_layers: 3\n",
        "cannot be read as YAML: line 2: key 'num_layers' is given twice; expected once",
    ),
    ("a.toml", "", "the file is empty; expected "),
    ("a.toml", "hidden = ", "cannot be read as TOML of a model: Invalid value"),
    ("a.toml", "model = 3", "field 'model': found 3; expected a table of fields"),
    (
        "a.toml",
        '[model]\nname = "llama4"\nflavor = "8B"',
        "unknown name of a torchtitan model 'llama4'; expected llama3.",
    ),
    (
        "a.toml",
        '[model]\nname = "llama3"\nflavor = "80B"',
        "unknown flavor of llama3 '80B'; expected 405B, 70B, 8B. Did you mean '8",
    ),
    (
        "a.toml",
        OWN.replace("kv_heads = 2", "kv_head = 2"),
        "layers[1].attention: unknown field 'kv_head'; expected ",
    ),
    ("a.toml", OWN.replace("kv_heads = 2", "kv_head = 2"), "Did you mean 'kv_heads'?"),
    (
        "a.toml",
        OWN.replace("kv_heads = 2", ""),
        "layers[1].attention: field 'kv_heads' is missing; expected heads, kv_heads, ",
    ),
    (
        "a.toml",
        OWN.replace("kv_heads = 2", "kv_heads = 3"),
        "layers[1].attention: Attention: 4 heads are not a multiple of 3 kv_heads",
    ),
    ("a.toml", OWN.replace("vocab = 100", 'vocab = "100"'), "vocab: found '100'; expected a whole number"),
    (
        "a.toml",
        OWN.replace("vocab = 100", "vocab = -100"),
        "the file: Architecture: vocab is -100; expected a whole number >= 1",
    ),
    (
        "a.toml",
        OWN.replace("vocab = 100", 'vocab = 100\nhead = "dog"'),
        "head: found 'dog'; expected lm, masked-lm, classes, none",
    ),
    (
        "a.toml",
        OWN.replace("capacity = 1.25", "capacity = nan"),
        "layers[2].ffn.capacity: found nan; expected a number",
    ),
    (
        "a.toml",
        OWN.replace("is_gated = true", "is_gated = 1"),
        "layers[1].ffn.is_gated: found 1; expected true or false",
    ),
    (
        "a.toml",
        OWN.replace("window = 32", "window = -1"),
        "layers[2].attention: Attention: window is -1; expected a whole number >= 0",
    ),
    (
        "a.toml",
        OWN.replace("vocab = 100", "vocab = 100\nstated_parameters = 7_000_000"),
        "the file: architecture 'small-mixture': 7,000,000 parameters are stated, ",
    ),
    (
        "a.toml",
        'name = "a"\nfamily = "b"\nhidden = 1\nvocab = 1\nlayers = 3',
        "layers: found 3; expected tables [[layers]]",
    ),
    (
        "a.toml",
        'name = "a"\nfamily = "b"\nhidden = 1\nvocab = 1\nlayers = []',
        "the file: architecture 'a': has no layers",
    ),
]


def _message(path, error=InputError):
    with pytest.raises(error) as caught:
        read_model(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("content", "expected"), BROKEN)
def test_errors_in_configurations_name_file_field_and_what_is_accepted(tmp_path, content, expected):
    path = _write(tmp_path, content if isinstance(content, str) else LLAMA3_8B | content)

    message = _message(path)

    assert message.startswith(f"{path}: ")
    assert message.count(str(path)) == 1
    assert expected in message


@pytest.mark.parametrize(("name", "content", "expected"), BROKEN_OTHERS)
def test_errors_in_other_formats_name_file_field_and_what_is_accepted(tmp_path, name, content, expected):
    path = _write(tmp_path, content, name)

    message = _message(path)

    assert message.startswith(f"{path}: ")
    assert message.count(str(path)) == 1
    assert expected in message


def test_unknown_names_keep_their_type(tmp_path):
    assert _message(_write(tmp_path, LLAMA3_8B | {"model_type": "gemma5"}), UnknownNameError)
    assert _message(_write(tmp_path, OWN + "top_k = 1\n", "a.toml"), UnknownNameError)


def test_paths_that_lead_nowhere_are_rejected(tmp_path):
    missing = _message(tmp_path / "meta-llama" / "Llama-3-8B", MissingDataError)
    assert "no such file or folder; expected config.json of a model" in missing
    assert "nothing is downloaded" in missing
    assert "the folder has no config.json; expected " in _message(tmp_path, MissingDataError)
    assert _message(LLAMA3_8B) == "model: expected the path to a file or folder, got dict"


def test_a_folder_with_an_adapter_alone_names_the_base_model(tmp_path):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    path = _write(tmp_path, adapter, "adapter_config.json")

    assert _message(tmp_path) == (
        f"{path}: describes a LORA adapter; expected config.json of its base (org/base)"
    )


@pytest.mark.parametrize("name", ["config.json", "a.toml", "a.yaml", "a.sh"])
def test_huge_files_are_rejected_before_they_are_read(tmp_path, name):
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(1 << 30)  # no space is taken

    assert "or more; expected " in _message(path)


def test_weights_given_for_a_model_are_rejected(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x58\0\0\0\0\0\0\0{}" * 8)

    assert "it has zero bytes; expected text" in _message(path)


ODD_VALUES = [None, True, 0, -3, 2**70, 1.5, float("nan"), "text", [], [1, "a"], {}, {"a": [1]}]


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-ai/DeepSeek-V3",
        "google/gemma-2-9b",
        "google-bert/bert-base-uncased",
        "google-t5/t5-large",
        "google/vit-base-patch16-224",
        "mosaicml/mpt-7b",
        "openai/whisper-large-v3",
        "Qwen/Qwen1.5-MoE-A2.7B",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "nvidia/Nemotron-H-8B-Base-8K",
        "tiiuae/Falcon-H1-7B-Base",
        "ai21labs/Jamba-v0.1",
        "LiquidAI/LFM2-1.2B",
    ],
)
def test_any_value_of_any_field_is_read_or_rejected_in_one_line(tmp_path, name):
    config = PUBLISHED[name][0] | {"architectures": ["X"], "layer_types": None}
    n_rejected = 0
    for field in config:
        for value in ODD_VALUES:
            path = _write(tmp_path, config | {field: value})
            try:
                assert read_model(path).parameters > 0
            except InputError as wrong:
                n_rejected += 1
                assert str(wrong).startswith(f"{path}: ")
                assert "\n" not in str(wrong)
    assert n_rejected > len(config)
