"""Execution plans, placements and their notations."""

from dataclasses import replace

import pytest

from makespan.errors import InputError, NotationError, PlanError
from makespan.plans import (
    ExecutionPlan,
    Placement,
    PlanFamily,
    enumerate_placements,
    enumerate_plans,
    read_plan,
    write_exec_plan,
    write_plan,
)


def plan(**fields: object) -> ExecutionPlan:
    return ExecutionPlan(**{"global_batch_size": 8, "micro_batch_size": 8, **fields})  # type: ignore[arg-type]


def test_the_batch_identity_is_checked_and_shown() -> None:
    with pytest.raises(PlanError, match=r"2 x grad_accum_steps 2 x dp 4 = 16, but .* is 8"):
        plan(micro_batch_size=2, grad_accum_steps=2, dp=4)


@pytest.mark.parametrize(
    "fields",
    [
        {"dp": 0},
        {"tp": -1},
        {"zero_stage": 4},
        {"zero_stage": -1},
        {"checkpoint_fraction": 1.5},
        {"offload": True},
        {"interleave": 2},
        {"schedule": "zigzag"},
        {"checkpoint_method": "half"},
        {"pp": 2, "partition": (3,)},
        {"pp": 2, "partition": (3, 0)},
        {"pp": 2, "partition": (3, 3), "schedule": "interleaved", "interleave": 2},
        {"cpu_threads": 0},
        {"family": PlanFamily.TP_GA, "pp": 2},
        {"family": PlanFamily.DP_TP_PP},
        {"family": PlanFamily.GC},
    ],
)
def test_contradictions_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InputError):
        plan(**fields)


@pytest.mark.parametrize(
    ("fields", "family"),
    [
        ({}, PlanFamily.DP),
        ({"checkpoint_fraction": 0.5}, PlanFamily.GC),
        ({"zero_stage": 2}, PlanFamily.ZERO_DP),
        ({"zero_stage": 2, "offload": True}, PlanFamily.ZERO_OFFLOAD),
        (
            {"zero_stage": 2, "offload": True, "checkpoint_fraction": 1.0},
            PlanFamily.ZERO_OFFLOAD_GC,
        ),
        ({"tp": 4}, PlanFamily.TP_PP),
        ({"tp": 4, "family": PlanFamily.TP_GA}, PlanFamily.TP_GA),
        ({"pp": 4, "dp": 2, "micro_batch_size": 4}, PlanFamily.DP_TP_PP),
    ],
)
def test_the_family_follows_from_the_degrees(fields: dict[str, object], family: PlanFamily) -> None:
    assert plan(**fields).plan_family is family


def test_smaller_micro_batches_keep_the_global_batch() -> None:
    smaller = plan(dp=2, micro_batch_size=4).with_micro_batch(1)
    assert (smaller.micro_batch_size, smaller.n_microbatches, smaller.global_batch_size) == (1, 4, 8)
    with pytest.raises(PlanError, match="does not divide the replica's batch of 4"):
        smaller.with_micro_batch(3)


def test_cpu_threads_can_be_replaced() -> None:
    assert plan().with_cpu_threads(4).cpu_threads == 4


@pytest.mark.parametrize(
    ("text", "n_gpus", "degrees"),
    [
        ("244", 32, (2, 4, 4)),
        ("1-8-16", 128, (1, 8, 16)),
        ("ga", 4, (1, 1, 4)),
        ("ZERO-DP ", 4, (1, 1, 4)),
        ("tp+ga", 3, (1, 3, 1)),
        ("111", 1, (1, 1, 1)),
    ],
)
def test_plans_are_read(text: str, n_gpus: int, degrees: tuple[int, int, int]) -> None:
    found = read_plan(text, n_gpus=n_gpus, global_batch_size=64)
    assert (found.pp, found.tp, found.dp) == degrees
    assert found.grad_accum_steps == 1
    assert found.global_batch_size == 64


def test_three_degrees_of_one_are_still_a_model_parallel_plan() -> None:
    assert read_plan("111", n_gpus=1, global_batch_size=4).is_model_parallel
    assert not read_plan("ga", n_gpus=1, global_batch_size=4).is_model_parallel


@pytest.mark.parametrize(
    "text", ["", "24", "2444", "0-1-2", "24a", "zero", "1-2", "٢٤٤", "ga+", "gc+gc", "244+a", "ga+zero4"]
)
def test_text_that_is_no_plan_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(NotationError, match="multiply to the GPUs, ga, gc, zero-dp"):
        read_plan(text, n_gpus=8, global_batch_size=8)


def test_degrees_must_multiply_to_the_devices() -> None:
    with pytest.raises(PlanError, match=r"PP 2 x TP 4 x DP 4 = 32 GPUs, but the placement has 16"):
        read_plan("244", n_gpus=16, global_batch_size=16)


def test_the_batch_must_be_splittable_over_the_replicas() -> None:
    with pytest.raises(PlanError, match="8 samples cannot be split over 3 replicas"):
        read_plan("ga", n_gpus=3, global_batch_size=8)


def test_texts_of_published_tables_are_canonical() -> None:
    for text in ("244", "1-8-16", "ga", "gc", "zero-dp", "zero-offload", "zero-offload+gc", "tp+ga"):
        n_gpus = {"244": 32, "1-8-16": 128}.get(text, 4)
        assert write_plan(read_plan(text, n_gpus=n_gpus, global_batch_size=16)) == text


SUFFIXES: dict[str, dict[str, object]] = {
    "ga+a4": {"grad_accum_steps": 4, "micro_batch_size": 1},
    "gc+a2": {"checkpoint_fraction": 1.0, "family": PlanFamily.GC},
    "ga+selective0.5": {"checkpoint_method": "selective", "checkpoint_fraction": 0.5},
    "zero-dp+zero1": {"zero_stage": 1, "family": PlanFamily.ZERO_DP},
    "zero-offload+zero3+gc": {"zero_stage": 3, "offload": True},
    "tp+ga+sp": {"tp": 4, "sequence_parallel": True},
    "212+zero1+gc": {"zero_stage": 1, "checkpoint_fraction": 1.0},
    "221+zero2+offload": {"offload": True},
    "411+gpipe+layers1-2-1-2": {"partition": (1, 2, 1, 2)},
    "221+interleaved2": {"schedule": "interleaved", "interleave": 2},
    "ga+cpu4": {"cpu_threads": 4},
}
ALIASES = {"ga+gc+a2": "gc+a2", "ga+zero1": "zero-dp+zero1", "212+gc+zero1": "212+zero1+gc", "gc+a1": "gc"}


def test_suffixes_name_what_the_plain_plan_lacks() -> None:
    for text, fields in SUFFIXES.items():
        found = read_plan(text, n_gpus=4, global_batch_size=16)
        assert write_plan(found) == text
        assert {name: getattr(found, name) for name in fields} == fields
    for text, canonical in ALIASES.items():
        assert write_plan(read_plan(text, n_gpus=4, global_batch_size=16)) == canonical


def test_tables_leave_micro_batches_and_threads_to_their_columns() -> None:
    chosen = read_plan("zero-dp+a4+cpu2", n_gpus=4, global_batch_size=16)
    assert write_exec_plan(chosen) == "zero-dp"
    assert write_plan(chosen, cpu_threads=2) == "zero-dp+a4"


def test_placements_are_multisets_with_a_canonical_text() -> None:
    assert Placement.parse("53") == Placement.parse("35")
    assert Placement.parse("53").text == "35"
    assert hash(Placement((2, 1))) == hash(Placement((1, 2)))
    assert (Placement.parse("4444").n_gpus, Placement.parse("4444").n_nodes) == (16, 4)


def test_nodes_with_ten_devices_or_more_have_a_notation() -> None:
    for counts in ((16,), (16, 16), (2, 16)):
        assert Placement.parse(Placement(counts).text) == Placement(counts)


@pytest.mark.parametrize("text", ["", "4x", "04", "-4", "4--4", "1.5", "-", "٤"])
def test_text_that_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(NotationError, match="expected one digit 1-9 per node"):
        Placement.parse(text)


def test_placements_need_devices() -> None:
    for counts in ((), (0,), (4, -1)):
        with pytest.raises(PlanError, match="each >= 1"):
            Placement(counts)


def test_packing_uses_the_fewest_nodes() -> None:
    assert Placement.packed(20, 8).text == "488"
    assert Placement.packed(16, 8).text == "88"
    with pytest.raises(PlanError):
        Placement.packed(0, 8)


def test_a_placement_knows_whether_it_fits_an_empty_cluster() -> None:
    assert Placement.parse("88").fits(gpus_per_node=8, n_nodes=2)
    assert not Placement.parse("88").fits(gpus_per_node=4, n_nodes=4)
    assert not Placement.parse("11").fits(gpus_per_node=8, n_nodes=1)


def test_all_placements_of_four_devices() -> None:
    assert [p.text for p in enumerate_placements(4, 8, 8)] == ["4", "13", "22", "112", "1111"]
    assert [p.text for p in enumerate_placements(4, 2, 8)] == ["22", "112", "1111"]
    assert enumerate_placements(9, 8, 1) == ()


def test_enumeration_honours_batch_heads_layers_and_node_size() -> None:
    plans = enumerate_plans(
        8,
        global_batch_size=4,
        families=list(PlanFamily),
        n_layers=4,
        heads=4,
        max_tp=4,
    )
    texts = [write_plan(p) for p in plans]
    assert texts == ["241", "421", "124", "142", "214", "222", "412"]
    assert all(p.n_gpus == 8 for p in plans)


def test_enumeration_names_each_family_once() -> None:
    families = ["DP", "ZeRO-Offload", "DP", "TP+GA"]
    plans = enumerate_plans(2, global_batch_size=4, families=families, n_layers=2, heads=2, max_tp=8)
    assert [write_plan(p) for p in plans] == ["ga", "zero-offload", "tp+ga"]


def test_plans_are_values() -> None:
    assert plan() == plan()
    assert replace(plan(), cpu_threads=2) != plan()
