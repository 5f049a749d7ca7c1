"""The zoo of models, stacks and workloads."""

from dataclasses import replace

import pytest

from makespan import workloads
from makespan.errors import InputError, UnknownNameError
from makespan.plans import PlanFamily, read_plan


@pytest.mark.parametrize("key", workloads.workload_keys())
def test_every_workload_can_be_built_and_names_known_families(key: str) -> None:
    workload = workloads.workload(key)
    assert workload.families
    assert [PlanFamily(family) for family in workload.families]


@pytest.mark.parametrize(
    ("key", "parameters", "batch"),
    [
        ("vit", 85_952_456, 64),
        ("roberta", 355_412_057, 64),
        ("bert", 336_297_858, 32),
        ("t5", 1_240_809_472, 16),
        ("gpt2", 1_557_686_400, 16),
        ("llama7", 6_738_423_808, 8),
        ("llama30", 32_528_943_616, 4),
        ("llama7_b16", 6_738_423_808, 16),
    ],
)
def test_counts_and_batches_are_the_published_ones(key: str, parameters: int, batch: int) -> None:
    workload = workloads.workload(key)
    assert (workload.model.parameters, workload.global_batch_size) == (parameters, batch)


def test_aliases_lead_to_the_same_workload() -> None:
    assert workloads.workload("llama7b_bsz16") is workloads.workload("llama7b_bsz16")
    assert workloads.workload("llama7b_bsz16") == workloads.workload("llama7_b16")
    assert workloads.resolve_workload_key("gpt2-1.5b") == "gpt2"


@pytest.mark.parametrize("look_up", [workloads.workload, workloads.model, workloads.stack])
def test_unknown_names_are_refused_with_the_accepted_ones(look_up) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UnknownNameError, match=r"unknown .* 'nothing'; expected "):
        look_up("nothing")


def test_an_encoder_decoder_counts_the_layers_of_both_parts() -> None:
    model = workloads.model("t5-1.2b")
    assert (model.n_layers, model.hidden, model.heads, model.seq) == (80, 1024, 16, 512)


def test_a_workload_gives_model_parallel_plans_their_own_stack_and_sequence() -> None:
    t5 = workloads.workload("t5")
    pipeline = t5.for_plan(read_plan("221", n_gpus=4, global_batch_size=16))
    replicas = t5.for_plan(read_plan("ga", n_gpus=4, global_batch_size=16))
    assert (pipeline.stack.name, pipeline.model.seq) == ("megatron-ckpt", 768)
    assert (replicas.stack.name, replicas.model.seq) == ("zero-eager", 512)


def test_sequence_lengths_must_match_the_blocks() -> None:
    with pytest.raises(InputError, match="1 lengths, 2 blocks"):
        workloads.model("t5-3b").with_seq(128)


@pytest.mark.parametrize("change", [{"seq": 0}, {"heads": 12, "kv_heads": 5}, {"kind": "perceptron"}])
def test_a_block_with_impossible_numbers_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InputError):
        replace(workloads.model("vit-base").blocks[0], **change)  # type: ignore[arg-type]


def test_a_model_needs_a_block_and_a_workload_a_batch() -> None:
    with pytest.raises(InputError, match="needs one block"):
        replace(workloads.model("vit-base"), blocks=())
    with pytest.raises(InputError, match="global_batch_size"):
        replace(workloads.workload("vit"), global_batch_size=0)


@pytest.mark.parametrize("change", [{"host_optimizer": "none"}, {"phase_style": "2d"}])
def test_a_stack_with_unknown_options_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(UnknownNameError):
        replace(workloads.stack("megatron"), **change)  # type: ignore[arg-type]
