"""Models that are read from a ``config.json`` have the parameters that the ``transformers`` package makes.

Each family is made small, and then once more with each of its switches turned.
"""

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.auto import modeling_auto

from makespan.errors import InputError
from makespan.planning import model_types, read_model

pytestmark = pytest.mark.hf

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
OF_FAMILY = {"gpt_neo": {"num_layers": 4}}
BUFFERS = {"deepseek_v3", "glm4_moe", "dots1", "solar_open"}
"""Families whose routers have selection biases that transformers keeps as buffers."""
ALIKE = (
    "output_",
    "use_cache",
    "return_dict",
    "scale_",
    "norm_topk_prob",
    "is_gated_act",
    "is_encoder_decoder",
)
"""Switches that do not change a model, or that another field decides."""
AS_STATED = {("mpt", "no_bias")}
"""Switches that transformers ignores, and the library that trained these models does not."""
NOT_OF_A_FILE = {"kimi_k2"}  # the publisher's own code reads these

HEADS = (
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)


def class_of(kind):
    """Return the class with the usual head of a model type; None for parts of multimodal models."""
    found = next((names[kind] for names in HEADS if kind in names), None)
    return getattr(transformers, found if isinstance(found, str) else found[0]) if found else None


KINDS = [kind for kind in model_types() if class_of(kind) is not None and kind not in NOT_OF_A_FILE]


def config_of(kind, **switches):
    made = transformers.CONFIG_MAPPING[kind]
    known = made().to_dict().keys() | getattr(made, "attribute_map", {}).keys()
    sizes = {name: value for name, value in SMALL.items() if name in known} | OF_FAMILY.get(kind, {})
    return made(**sizes | switches)


def counted(kind, config):
    """Return the parameters of the model that transformers makes; None if it makes none."""
    try:
        with torch.device("meta"):
            model = class_of(kind)(config)
    except Exception:  # noqa: BLE001 - whatever a class does not support
        return None
    n_routers = sum(name.endswith("e_score_correction_bias") for name, _ in model.named_buffers())
    return sum(one.numel() for one in model.parameters()) + (n_routers * 4 if kind in BUFFERS else 0)


def read(folder, config):
    path = folder / "config.json"
    path.write_text(json.dumps(config.to_dict(), default=str))
    return read_model(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_has_the_parameters_of_transformers_with_each_of_its_switches(kind, tmp_path):
    plain = config_of(kind)
    expected = counted(kind, plain)
    assert expected is not None
    assert read(tmp_path, plain).parameters == expected
    for name, value in plain.to_dict().items():
        if not isinstance(value, bool) or name.startswith(ALIKE) or (kind, name) in AS_STATED:
            continue
        try:
            turned = config_of(kind, **{name: not value})
        except Exception:  # noqa: BLE001 - a value that the class refuses
            continue
        expected = counted(kind, turned)
        if expected is not None:
            try:
                found = read(tmp_path, turned).parameters
            except InputError as error:
                assert name in str(error)  # what is not counted is refused by its name
            else:
                assert found == expected, name


@pytest.mark.parametrize("kind", ["cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "olmo3"])
def test_windows_that_a_file_leaves_out_are_those_of_transformers(kind, tmp_path):
    config = config_of(kind, num_hidden_layers=9)
    whole = read(tmp_path, config)
    assert len(whole.layers) > 1
    table = config.to_dict()
    del table["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(table, default=str))
    assert read_model(tmp_path / "config.json").layers == whole.layers
