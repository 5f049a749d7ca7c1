"""Memory model: verdicts, their reasons, and the micro-batch rule."""

from dataclasses import replace

import pytest

from makespan.errors import PlanError
from makespan.hardware import node
from makespan.plans import (
    ExecutionPlan,
    Placement,
    chunk_layers,
    memory_estimate,
    read_plan,
    resolve_micro_batch,
    stages,
)
from makespan.plans.memory import MemoryRules
from makespan.workloads import model, workload

A800 = node("a800")


def plan_of(name: str, text: str, n_gpus: int) -> ExecutionPlan:
    return read_plan(text, n_gpus=n_gpus, global_batch_size=workload(name).global_batch_size)


def test_seven_billion_parameters_do_not_fit_under_plain_data_parallelism() -> None:
    spec = workload("llama7")
    verdict = memory_estimate(plan_of("llama7", "ga", 8), spec, A800)
    assert not verdict.feasible
    assert verdict.bytes_by_component["states"] == pytest.approx(107.8e9, rel=1e-3)
    assert "states" in verdict.reason and "80.0 GB" in verdict.reason


def test_roberta_on_one_gpu_fits_32_samples_and_not_64() -> None:
    spec = workload("roberta")
    whole = plan_of("roberta", "ga", 1)
    assert not memory_estimate(whole, spec, A800).feasible
    assert memory_estimate(whole.with_micro_batch(32), spec, A800).feasible
    assert resolve_micro_batch(whole, spec, A800).micro_batch_size == 32


@pytest.mark.parametrize(
    ("name", "text", "n_gpus", "micro_batch", "passes"),
    [
        ("gpt2", "ga", 2, 4, 2),
        ("llama7", "244", 32, 2, 1),
        ("llama7_b16", "441", 16, 4, 4),
        ("llama7_b16", "418", 32, 1, 2),
        ("t5", "481", 32, 16, 1),
        ("roberta", "gc", 1, 64, 1),
    ],
)
def test_the_micro_batch_follows_the_rule_of_the_stack(
    name: str, text: str, n_gpus: int, micro_batch: int, passes: int
) -> None:
    resolved = resolve_micro_batch(plan_of(name, text, n_gpus), workload(name), A800)
    assert (resolved.micro_batch_size, resolved.grad_accum_steps) == (micro_batch, passes)


def test_a_plan_that_never_fits_keeps_the_smallest_micro_batch() -> None:
    resolved = resolve_micro_batch(plan_of("llama7", "ga", 1), workload("llama7"), A800)
    assert resolved.micro_batch_size == 1
    assert not memory_estimate(resolved, workload("llama7"), A800).feasible


def state_bytes(**options: object) -> float:
    spec = workload("bert")
    plan = ExecutionPlan(dp=4, global_batch_size=32, micro_batch_size=8, **options)  # type: ignore[arg-type]
    return memory_estimate(plan, spec, A800).bytes_by_component["states"]


def test_states_follow_the_partitioning_stage() -> None:
    parameters = model("bert-large").parameters
    assert state_bytes() == pytest.approx(16 * parameters)
    assert state_bytes(zero_stage=1) == pytest.approx(4 * parameters + 12 * parameters / 4)
    assert state_bytes(zero_stage=2) == pytest.approx(2 * parameters + 14 * parameters / 4)
    assert 16 * parameters / 4 < state_bytes(zero_stage=3) < state_bytes(zero_stage=2)
    assert state_bytes(zero_stage=2, offload=True) == pytest.approx(2.5 * parameters + 0.5e9)


def test_accumulation_under_partitioned_gradients_holds_a_second_copy() -> None:
    spec = workload("bert")
    plan = ExecutionPlan(dp=4, global_batch_size=32, micro_batch_size=8, zero_stage=2)
    once = memory_estimate(plan, spec, A800).bytes_by_component["states"]
    twice = memory_estimate(plan.with_micro_batch(4), spec, A800).bytes_by_component["states"]
    assert twice - once == pytest.approx(2 * spec.model.parameters)


def test_offload_is_checked_against_host_memory() -> None:
    spec = workload("bert")
    plan = plan_of("bert", "zero-offload", 8)
    verdict = memory_estimate(plan, spec, A800, Placement.parse("8"))
    assert verdict.host_bytes == pytest.approx(16 * spec.model.parameters)
    assert verdict.device_bytes == pytest.approx(sum(verdict.bytes_by_component.values()))
    small = replace(A800, host_memory_bytes=1e9)
    refused = memory_estimate(plan, spec, small, Placement.parse("8"))
    assert not refused.feasible and "host memory" in refused.reason
    assert memory_estimate(plan, spec, small, Placement.parse("11111111")).feasible


def activations(**options: object) -> float:
    spec = workload("gpt2")
    plan = ExecutionPlan(global_batch_size=16, **options)  # type: ignore[arg-type]
    return memory_estimate(plan, spec, A800).bytes_by_component["activations"]


def test_checkpointing_keeps_inputs_and_one_layer() -> None:
    full = activations(micro_batch_size=1, grad_accum_steps=16)
    none = activations(micro_batch_size=1, grad_accum_steps=16, checkpoint_fraction=1.0)
    half = activations(micro_batch_size=1, grad_accum_steps=16, checkpoint_fraction=0.5)
    assert none == pytest.approx(48 * 2 * 1024 * 1600 + full / 48)
    assert none < half < full
    selective = activations(
        micro_batch_size=1, grad_accum_steps=16, checkpoint_fraction=1.0, checkpoint_method="selective"
    )
    assert none < selective < full


def test_schedules_differ_in_micro_batches_in_flight() -> None:
    common = {"pp": 4, "micro_batch_size": 1, "grad_accum_steps": 16}
    one_f_one_b = activations(**common)
    assert activations(**common, schedule="gpipe") == pytest.approx(4 * one_f_one_b)
    assert activations(**common, schedule="interleaved", interleave=3) == pytest.approx(1.25 * one_f_one_b)
    assert activations(**{**common, "grad_accum_steps": 2, "micro_batch_size": 8}) == pytest.approx(
        8 * one_f_one_b / 2
    )


def test_structure_is_checked_before_memory() -> None:
    spec = workload("bert")
    plan = plan_of("bert", "ga", 8)
    wrong_size = memory_estimate(plan, spec, A800, Placement.parse("4"))
    assert "needs 8 GPUs" in wrong_size.reason and not wrong_size.bytes_by_component
    too_wide = memory_estimate(plan_of("roberta", "ga", 16), workload("roberta"), A800, Placement((16,)))
    assert "more GPUs on a node" in too_wide.reason
    other_batch = memory_estimate(plan, workload("roberta"), A800)
    assert "global batch" in other_batch.reason
    deep = ExecutionPlan(pp=64, global_batch_size=32, micro_batch_size=32)
    assert "24 layers" in memory_estimate(deep, spec, A800).reason
    uneven = ExecutionPlan(pp=2, partition=(4, 4), global_batch_size=32, micro_batch_size=32)
    assert "does not add up" in memory_estimate(uneven, spec, A800).reason


def test_heads_that_do_not_divide_are_a_warning_only() -> None:
    verdict = memory_estimate(plan_of("gpt2", "141", 4), workload("gpt2"), A800)
    assert verdict.feasible
    assert verdict.warnings == ("tp=4 does not divide 25 attention heads",)


def test_fragmentation_is_a_rule_of_the_software() -> None:
    spec, plan = workload("bert"), plan_of("bert", "ga", 8)
    tight = memory_estimate(plan, spec, A800, rules=MemoryRules(fragmentation=1.0))
    loose = memory_estimate(plan, spec, A800)
    assert tight.bytes_by_component["fragmentation"] == 0.0
    assert loose.device_bytes > tight.device_bytes


def pipeline(pp: int, **options: object) -> ExecutionPlan:
    return ExecutionPlan(pp=pp, global_batch_size=8, micro_batch_size=8, **options)  # type: ignore[arg-type]


def test_layers_are_dealt_to_chunks_as_evenly_as_possible() -> None:
    assert [len(part) for part in chunk_layers(6, pipeline(4))] == [2, 1, 2, 1]
    assert chunk_layers(5, pipeline(2, partition=(1, 4))) == (range(1), range(1, 5))
    interleaved = pipeline(2, schedule="interleaved", interleave=2, partition=(1, 2, 3, 4))
    assert [len(part) for part in chunk_layers(10, interleaved)] == [1, 2, 3, 4]
    short = (replace(model("gpt2-1.5b").blocks[0], n_layers=10),)
    ten = replace(model("gpt2-1.5b"), blocks=short, parameters=0)
    assert [stage.n_layers for stage in stages(ten, interleaved)] == [1 + 3, 2 + 4]


def test_stages_share_layers_and_parameters() -> None:
    spec = model("llama-30b")
    held = stages(spec, pipeline(6))
    assert [stage.n_layers for stage in held] == [10] * 6
    assert sum(stage.parameters for stage in held) == pytest.approx(spec.parameters)
    assert held[-1].head_flop > 0 and held[0].head_flop == 0
    assert held[-1].boundary_bytes == 0 and held[0].boundary_bytes > 0
    assert [stage.n_layers for stage in stages(spec, pipeline(2, partition=(20, 40)))] == [20, 40]


def test_stages_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="24 layers"):
        stages(model("bert-large"), pipeline(25))
    with pytest.raises(PlanError, match="partition"):
        stages(model("bert-large"), pipeline(2, partition=(10, 10)))
