"""Models of the transformers package, which know nothing of schedules, are scheduled by module path."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers package is missing; make hf-test installs it")

import hf_models
from forked import forking_servers
from group_worker import on_processes

from makespan.papers.slapo.language import TracingError, Verify, create_schedule

pytestmark = [pytest.mark.hf, pytest.mark.xdist_group("training")]


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


@pytest.mark.parametrize("n_processes", [1, 2])
def test_models_that_are_split_fused_and_recomputed_compute_the_same(n_processes):
    on_processes(n_processes, "hf_cases", "bert", "llama", "gpt2")


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
