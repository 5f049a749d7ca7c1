"""Models that a plan schedules by their structure compute what they computed before, with all gradients."""

import pytest

pytest.importorskip("torch")

import odd_transformers
import torch
from forked import forking_servers
from group_worker import on_processes

from makespan.slapo import (
    SCHEDULES,
    Verify,
    apply_plan,
    apply_schedule,
    create_schedule,
    init_empty_weights,
    partition,
    replay,
)
from makespan.training.zoo import build_family, family_batch, family_spec

pytestmark = pytest.mark.xdist_group("schedules")


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


def test_two_processes_compute_what_one_does():
    on_processes(
        2, "planned_cases", "unusual", "experts_without_tokens", "families", "recomputed", "replayed"
    )


def test_compiled_layers_on_two_processes_compute_what_one_does():
    on_processes(2, "planned_cases", "compiled")


@pytest.mark.parametrize("n_processes", [2, 4])
def test_plans_compose_with_sharded_data_parallelism(n_processes):
    on_processes(n_processes, "planned_cases", "sharded")


def test_four_processes_compute_what_one_does():
    on_processes(4, "planned_cases", "unusual")


@pytest.mark.filterwarnings("ignore:apply_plan of")
def test_stages_and_recomputed_layers_compute_what_the_whole_does():
    inputs = odd_transformers.INPUTS["Forest"]
    sch = create_schedule(odd_transformers.seeded("Forest"))
    with Verify(sch, inputs) as check:
        apply_plan(sch, "pp3 mb1 recompute=full:0.67", inputs)
    assert check.report.is_equal
    assert len(partition(sch).stages) == 3
    assert [entry.path for entry in sch.metadata.journal if entry.op == "checkpoint"] == [
        "trees.1",
        "trees.2",
    ]


@pytest.mark.parametrize("kind", ["Forest", "Square"])
def test_the_journal_of_a_plan_makes_the_same_stages_with_and_without_values(kind):
    # The layers of one model are elements of a list, those of the other of a Sequential that it iterates.
    inputs = odd_transformers.INPUTS[kind]
    sch = create_schedule(odd_transformers.seeded(kind))
    with Verify(sch, inputs) as check:
        apply_plan(sch, "pp2 mb1", inputs)
    assert check.report.is_equal
    again = replay(odd_transformers.seeded(kind).eval(), sch.dump())
    assert str(again) == str(sch) and len(partition(again).stages) == 2
    assert torch.equal(partition(again).run(*inputs), odd_transformers.seeded(kind).eval()(*inputs))
    with init_empty_weights():
        empty = getattr(odd_transformers, kind)()
    assert partition(replay(empty, sch.dump())).values == partition(sch).values


@pytest.mark.filterwarnings("ignore:apply_plan of")
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("Forest", "pp2 mb1 recompute=operators"),
        ("Forest", "mb1 recompute=selective"),
        ("Harbour", "pp2 mb1 recompute=selective"),
        ("Square", "mb1 recompute=operators"),
        ("Square", "112+selective"),
    ],
)
def test_parts_that_are_computed_again_have_the_same_gradients(kind, plan):
    inputs = odd_transformers.INPUTS[kind]
    sch = create_schedule(odd_transformers.seeded(kind))
    with Verify(sch, inputs) as check:
        apply_plan(sch, plan, inputs)
    assert check.report.is_equal and check.report.count("parameter gradient in training")
    assert any(entry.arguments.get("keep") for entry in sch.metadata.journal if entry.op == "checkpoint")


def _cuts(sch):
    """Return path, tensor, axis and blocks of all that is sharded."""
    steps = [(entry.path, entry.arguments) for entry in sch.metadata.journal if entry.op == "shard"]
    return {
        (path, name, given["axis"], given.get("groups", 1))
        for path, given in steps
        for name in (
            [given["tensor_name"]] if isinstance(given["tensor_name"], str) else given["tensor_name"]
        )
    }


@pytest.mark.parametrize("family", [name for name in SCHEDULES if name != "wideresnet"])
def test_the_same_tensors_are_split_as_by_the_schedules_of_the_library(family):
    inputs = family_batch(family_spec(family), 2, seed=0).inputs
    found = apply_plan(build_family(family), "tp2 mb1", inputs)
    written = apply_schedule(build_family(family), family, shard_embedding=True)
    of_heads = {
        (f"{stack}.position_bias.relative_attention_bias", "weight", 1, 1)
        for stack in ("encoder", "decoder")
        if family == "t5"
    }
    assert _cuts(found) | of_heads == _cuts(written)
    # Tables of positions lie outside the layers of T5: layers are handed the scores of all heads.
    taken = [entry.path for entry in found.metadata.journal if entry.op == "take_heads"]
    assert bool(taken) == (family == "t5")


def test_dropout_of_parts_is_drawn_apart_and_other_dropout_is_not():
    sch = apply_plan(odd_transformers.seeded("Forest"), "tp2 nosp mb1", odd_transformers.INPUTS["Forest"])
    assert [entry.path for entry in sch.metadata.journal if entry.op == "fork_rng"] == [
        f"trees.{index}.still" for index in range(3)
    ]
    assert torch.is_tensor(sch.mod(*odd_transformers.INPUTS["Forest"]))
