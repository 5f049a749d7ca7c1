"""Models that are read from a ``config.json`` have the parameters that the ``transformers`` package makes.

Each family is made small, and then once more with each of its switches turned.
"""

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from small_models import class_of, config_of

from makespan.errors import InputError
from makespan.planning import model_types, read_model

pytestmark = pytest.mark.hf

BUFFERS = {"deepseek_v3", "glm4_moe", "dots1", "solar_open", "nemotron_h", "lfm2_moe", "minimax_m2"}
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

KINDS = [kind for kind in model_types() if class_of(kind) is not None and kind not in NOT_OF_A_FILE]


def counted(kind, config):
    """Return the parameters of the model that transformers makes; None if it makes none."""
    try:
        with torch.device("meta"):
            model = class_of(kind)(config)
    except Exception:  # noqa: BLE001 - whatever a class does not support
        return None
    biases = ("e_score_correction_bias", "expert_bias")
    n_routers = sum(name.endswith(biases) for name, _ in model.named_buffers())
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


@pytest.mark.parametrize(
    "kind", ["cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "modernbert", "olmo3"]
)
def test_windows_that_a_file_leaves_out_are_those_of_transformers(kind, tmp_path):
    config = config_of(kind, num_hidden_layers=9)
    whole = read(tmp_path, config)
    assert len(whole.layers) > 1
    table = config.to_dict()
    del table["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(table, default=str))
    assert read_model(tmp_path / "config.json").layers == whole.layers


@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize("kind", ["dots1", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen3", "smollm3"])
def test_windows_follow_the_switches_of_transformers(kind, is_used, tmp_path):
    switches = {"use_sliding_window": is_used, "sliding_window": 16 if is_used else None}
    config = config_of(kind, num_hidden_layers=9, max_window_layers=4, **switches)
    found = [run.attention.window for run in read(tmp_path, config).layers for _ in range(run.n_layers)]
    assert found == [16 if one == "sliding_attention" else 0 for one in config.layer_types]
    assert any(found) == is_used
