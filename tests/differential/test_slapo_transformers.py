"""Models of the transformers package, which know nothing of schedules, are scheduled by module path."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers package is missing; make hf-test installs it")

import hf_models
import torch
from forked import forking_servers
from group_worker import on_processes

from makespan.slapo import TracingError, Verify, create_schedule, partition

pytestmark = [pytest.mark.hf, pytest.mark.xdist_group("schedules")]


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


@pytest.mark.parametrize("n_processes", [1, 2])
def test_models_that_are_split_fused_and_recomputed_compute_the_same(n_processes):
    on_processes(n_processes, "hf_cases", "bert", "llama", "llama_with_cache", "gpt2")


def test_models_that_are_cut_in_two_have_the_same_loss_and_gradients():
    on_processes(2, "hf_cases", "cut_bert", "cut_llama", "cut_gpt2")


def test_the_cut_of_gpt2_with_a_mask_is_refused_with_the_reason():
    sch = create_schedule(hf_models.gpt2())
    with pytest.raises(TracingError, match=r"'transformer'.*GPT2Model.*it branches on the value of .*4"):
        hf_models.trace_to_layers(sch)
    assert not sch.metadata.journal


def test_attention_has_no_graph_and_is_replaced_as_a_module():
    sch = create_schedule(hf_models.bert())
    with Verify(sch, (hf_models.tokens(), hf_models.visible())):
        for layer in hf_models.layers_of(sch):
            node = layer["attention.self"]
            with pytest.raises(
                TracingError, match=r"BertSelfAttention .*modeling_bert.py:\d+.*leaf_functions"
            ):
                node.trace()
            node.replace(hf_models.Attention(node.mod))
    assert [one.op for one in sch.metadata.journal] == ["replace"] * hf_models.LAYERS


PICTURES, SOUNDS = torch.randn(2, 3, 16, 16), torch.randn(2, 8, 32)
BY_KEYWORD = {
    "vit": {"pixel_values": PICTURES},
    "opt": {"input_ids": hf_models.tokens()},
    "whisper": {"input_features": SOUNDS, "decoder_input_ids": hf_models.tokens()[:, :4]},
    "llama_with_cache": {"input_ids": hf_models.tokens()},
}


@pytest.mark.parametrize("name", BY_KEYWORD)
def test_models_that_branch_on_types_and_lengths_are_cut_with_an_example(name):
    model, inputs = getattr(hf_models, name)().eval(), BY_KEYWORD[name]
    expected = model(**inputs)
    sch = create_schedule(model)
    with pytest.raises(TracingError):
        sch.trace()
    path = next(one for one in sch.named_schedules() if one[0].endswith(("layers.0", "layer.0")))[0]
    sch.trace_until(sch[path].parent.path, example_inputs=inputs)
    sch[path].cut_pipeline_stage()
    stages = partition(sch)
    for _ in range(2):  # what a call keeps does not reach the next one
        found = stages.run(**inputs)
        assert type(found) is type(expected) and torch.equal(found[0], expected[0])
    assert len(stages.stages) == 2


def test_attention_is_traced_with_an_example():
    model, hidden = hf_models.llama().eval(), torch.randn(2, hf_models.SEQ, hf_models.WIDTH)
    turns = model.model.rotary_emb(hidden, torch.arange(hf_models.SEQ)[None])
    attention = create_schedule(model)["model.layers.0.self_attn"]
    given = {"hidden_states": hidden, "position_embeddings": turns, "attention_mask": None}
    expected = attention.mod(**given)[0]
    attention.trace(example_inputs=given)
    assert torch.equal(attention.mod(**given)[0], expected)
    with pytest.raises(TracingError, match=r"got \(a tensor of shape"):
        attention.mod(hidden_states=hidden, position_embeddings=turns, attention_mask=turns)
