"""Sequences that processes share throughout layers: what is found, what each step is for, what is refused."""

import pytest

torch = pytest.importorskip("torch")

import context_models
import odd_transformers
import sequence_models
from torch import nn

from makespan.slapo import (
    ArgumentError,
    ConflictError,
    ShardError,
    StructureError,
    apply_plan,
    create_schedule,
    find_structure,
)
from makespan.slapo.contexts import ContextSplitter, _Gathering
from makespan.slapo.layouts import Ranks, Rehearsal


def found(kind, source=context_models, n=2, **options):
    inputs = source.inputs(kind) if source is context_models else sequence_models.words()
    return find_structure(source.seeded(kind), inputs, n_processes=1, n_context=n, **options)


def steps_of(structure, layer):
    """Return what the steps of a layer do, but for sums of gradients of weights."""
    return {
        (
            step.op,
            step.path.removeprefix(layer).lstrip("."),
            step.arguments.get("sync_op_or_fn", ""),
            *step.arguments.get("inputs", ()),
        )
        for step in structure.steps
        if f"{step.path}.".startswith(f"{layer}.") and step.arguments.get("on") != "parameters"
    }


@pytest.mark.parametrize("n", [2, 4])
def test_arguments_with_an_axis_of_tokens_are_cut_and_attention_is_handed_all_keys(n):
    structure = found("Turning", n=n)
    each = {
        ("share_context", "attention", ""),
        ("sync", "", "RR->SR", "turns"),
        ("sync", "", "RR->RS", "weights"),
    }
    assert steps_of(structure, "layers.0") == each | {("sync", "", "RR->SR", 0)}
    assert steps_of(structure, "layers.1") == each | {("sync", "", "SR->RR")}
    summed = [step.path for step in structure.steps if step.arguments.get("on") == "parameters"]
    assert [path.removeprefix("layers.0.") for path in summed[:6]] == [
        "norm", "attention.query", "attention.back", "attention.both", "up", "down",
    ]  # fmt: skip
    assert all(step.arguments["over"] == "context" for step in structure.steps if step.op == "sync")
    assert str(structure).startswith(f"Turning, cut among 1 processes, its sequences among {n}\n")
    assert structure.notes == [
        "each process of context parallelism holds a part of every sequence in layers.0 to layers.1"
    ]


def test_a_second_sequence_stays_whole_and_the_gradients_of_its_readers_are_summed():
    structure = found("Translator")
    assert steps_of(structure, "decoder.1") == {
        ("share_context", "own", ""),  # not the attention to the second sequence
        ("sync", "", "all_reduce", 1),
        ("sync", "", "SR->RR"),
    }
    assert ("fork_rng", "", "") in steps_of(structure, "encoder.0")


def test_attention_in_the_forward_of_a_layer_is_handed_all_keys_there():
    assert ("share_context", "", "") in steps_of(found("Inside", sequence_models), "layers.0")


@pytest.mark.parametrize("kind", ["Turning", "Translator", "Layer"])
def test_a_rehearsal_without_one_of_the_steps_does_not_pass(kind, monkeypatch):
    splitters, find = [], ContextSplitter.find
    monkeypatch.setattr(ContextSplitter, "find", lambda self: splitters.append(self) or find(self))
    found(kind, sequence_models if kind == "Layer" else context_models)
    splitter = splitters[-1]
    steps = [step for step in splitter.find() if step.op != "fork_rng"]
    assert not splitter.rehearsal.why_not(steps) and len(steps) >= 6
    # A bias of keys has no gradient, as it moves all scores of a query alike.
    for step in [step for step in steps if not step.path.endswith(".key")]:
        assert splitter.rehearsal.why_not([other for other in steps if other is not step]), step


def test_processes_that_share_layers_are_rehearsed_together_with_those_that_share_sequences():
    for along_sequence in (False, True):
        structure = find_structure(
            sequence_models.seeded("Layer"), sequence_models.words(), n_context=2,
            along_sequence=along_sequence,
        )  # fmt: skip
        first = [step for step in structure.steps if step.path == "layers.0" and step.op == "sync"]
        assert first[0].arguments.get("over") == "context"
        assert [step.op for step in structure.steps].count("share_context") == 2
        assert any(step.op == "shard" for step in structure.steps)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (lambda: context_models.seeded("Written"), context_models.inputs("Written"),
         r"in 'layers.0' \(Turned\): attention in 'attention' is written out, not a call of scaled_dot_prod"),
        (lambda: context_models.seeded("Local"), context_models.inputs("Local"),
         r".*: share_context of 'attention' \(Local\): a mask of shape \(4, 4\) for 8 keys of all processes"),
        (lambda: context_models.seeded("Counting"), context_models.inputs("Counting"),
         r"in 'layers.0' \(Turned\): the result of the layer is not as before"),
        (lambda: odd_transformers.seeded("Forest"), sequence_models.words(),
         r"in 'trees.0' \(Turning\): the result of the layer is not as before"),
        (lambda: context_models.seeded("Folded"), context_models.inputs("Folded"),
         r"in 'layers.0' \(Folded\): no module 'inner.self_attn' in the schedule"),
        (lambda: context_models.seeded("Tied"), context_models.inputs("Tied"),
         r"in 'layers.0': its parameter 'weight' is that of 'head', too"),
        (lambda: sequence_models.seeded("StallLayer"), sequence_models.words(),
         r"in 'layers.0' \(StallLayer\): tokens choose whether 'stalls.experts.\d+.0' is called"),
        (lambda: sequence_models.seeded("Layer", between=True), sequence_models.words(),
         r"between 'layers.0' and 'layers.1': more than the next layer reads what one returns"),
        (lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))),
         torch.zeros(2, 3, 8, 4), r"in '0' \(Sequential\): it reads a tensor of shape \(2, 3, 8, 4\); exp"),
        (lambda: sequence_models.seeded("Layer"), sequence_models.words(7),
         r"in 'layers.0' \(Layer\): 7 tokens of the example do not divide among 2 processes"),
        (lambda: sequence_models.seeded("Layer"), sequence_models.words(2),
         r"in 'layers.0' \(Layer\): 2 tokens of the example for 2 processes; use two or more for each"),
    ],
)  # fmt: skip
def test_what_cannot_share_sequences_is_refused_and_the_model_stays_as_it_was(model, inputs, message):
    made = model()
    before = {name: id(one) for name, one in made.named_parameters()}
    with pytest.raises(
        StructureError, match=rf": context parallelism cannot be placed {message}.*; expected a plan .* cp$"
    ):
        apply_plan(made, "cp2 mb1", inputs)
    assert {name: id(one) for name, one in made.named_parameters()} == before


def test_a_process_alone_computes_the_same_with_a_plan_for_several():
    model, words = context_models.seeded("Turning"), context_models.inputs("Turning")
    expected = model(*words)
    sch = apply_plan(model, "tp2 nosp cp2 mb1", words)
    assert torch.equal(sch.mod(*words), expected)


def test_exchanges_name_the_kind_of_parallelism():
    sch = create_schedule(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ArgumentError, match="over is 'sequence'; expected tensor or context"):
        sch["0"].sync("fwd_post", "all_reduce", over="sequence")
    with pytest.raises(ArgumentError, match="fork_rng of '0': over is 'data'; expected tensor or context"):
        sch["0"].fork_rng(over="data")
    with pytest.raises(ArgumentError, match="n_context is 0; expected a number >= 1"):
        find_structure(sch.mod, n_context=0)


@pytest.mark.parametrize(
    ("plan", "n_context", "message"),
    [
        ("mb1", 3, "a context_group of 3 processes, but the plan has no cp3"),
        ("cp2 mb1", 3, "shares sequences among 2 processes, the group has 3; pass the group of context"),
        ("cp2 mb1", 2, "shares sequences among 2 processes, the group has 1; pass the group .* to create_"),
    ],
)
def test_groups_of_other_sizes_than_the_plan_has_are_refused(plan, n_context, message):
    sch = create_schedule(context_models.seeded("Turning"))
    sch.metadata.context = Ranks(0, n_context, Rehearsal(n_context))
    with pytest.raises(ArgumentError, match=message):
        apply_plan(sch, plan, context_models.inputs("Turning"))
    assert not sch.metadata.journal


def test_causal_attention_to_another_number_of_tokens_is_refused():
    query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    with (
        pytest.raises(ShardError, match=r"share_context of 'it': causal attention from 4 tokens to 6"),
        _Gathering(Ranks(0, 1, Rehearsal(1)), "share_context of 'it'"),
    ):
        nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True)


def test_a_module_shares_its_context_once():
    sch = create_schedule(nn.Sequential(nn.Linear(2, 2)))
    sch.metadata.context = Ranks(0, 2, Rehearsal(2))
    sch["0"].share_context()
    with pytest.raises(ConflictError, match=r"it sees whole sequences already, conflicts with step 1"):
        sch["0"].share_context()
    sch["0"].fork_rng("context")
    with pytest.raises(ConflictError, match="already forked"):
        sch["0"].fork_rng("context")
