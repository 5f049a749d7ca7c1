"""Shared sequences and experts of any transformer: where they are joined and cut, and what is refused."""

import copy
import threading

import pytest

torch = pytest.importorskip("torch")

import odd_transformers
import sequence_models
from torch import nn

from makespan.slapo import (
    ArgumentError,
    ShardError,
    StructureError,
    apply_plan,
    create_schedule,
    find_structure,
)
from makespan.slapo.experts import OwnExperts, SharedTokens
from makespan.slapo.layouts import (
    Ranks,
    Rehearsal,
    all_gather,
    all_reduce,
    gather_objects,
    reduce_scatter,
    reshard,
    scatter,
)
from makespan.slapo.sequences import SequenceSplitter
from makespan.training.zoo import build_family, family_batch, family_spec


def found(kind, n=2, **options):
    model = sequence_models.seeded(kind, **options)
    return find_structure(model, sequence_models.words(), n_processes=n, along_sequence=True)


def steps_of(structure, *, op="sync", layer="layers.1"):
    """Return the steps of one layer: path, operation, and what else they are told."""
    return {
        (
            step.path.removeprefix(layer).lstrip("."),
            *(step.arguments[name] for name in ("sync_op_or_fn", "on") if name in step.arguments),
        )
        for step in structure.steps
        if step.op == op and f"{step.path}.".startswith(f"{layer}.")
    }


@pytest.mark.parametrize("n", [2, 4])
def test_sequences_are_joined_where_a_layer_reads_whole_ones_and_cut_after_its_rows(n):
    structure = found("Layer", n)
    # The attention reads the length of what it is given, so it is given whole sequences.
    assert steps_of(structure) == {
        ("attention", "all_gather"),
        ("attention.back", "reduce_scatter"),
        ("up", "all_gather"),
        ("down", "reduce_scatter"),
        ("before", "all_reduce", "parameters"),
        ("after", "all_reduce", "parameters"),
        ("", "all_reduce", "parameters"),
        ("", "SR->RR"),
    }
    paths = [step for step in structure.steps if step.path == "layers.0.attention"]
    joined = next(step for step in paths if step.op == "sync")
    assert joined.arguments["inputs"] == [0]  # not what is added to its result
    assert ("", "RR->SR") in steps_of(structure, layer="layers.0")
    note = "each process holds a part of every sequence between the parts of layers.0 to layers.1"
    assert structure.notes == [note]


def test_dropout_of_parts_draws_apart_and_that_of_whole_attention_does_not():
    assert steps_of(found("Layer"), op="fork_rng") == {("attention",), ("drop",)}
    assert not steps_of(found("ChoiceLayer"), op="fork_rng")
    loose = found("Loose")
    note = "dropout in the layer itself draws the same numbers in all processes (layers like 'layers.0')"
    assert note in loose.notes and steps_of(loose, op="fork_rng") == {("attention",), ("drop",)}


def test_attention_that_stays_whole_computes_all_and_keeps_its_part():
    structure = found("ChoiceLayer")
    assert steps_of(structure, layer="layers.0") == {
        ("", "RR->SR"),
        ("attention", "all_gather"),
        ("attention", "scatter"),
        ("choice.experts", "all_gather"),
        ("choice.experts", "reduce_scatter"),
        ("choice.enter", "all_gather"),
        ("choice.leave", "reduce_scatter"),
        ("before", "all_reduce", "parameters"),
        ("after", "all_reduce", "parameters"),
        ("choice.choice", "all_reduce", "parameters"),
    }
    joined = next(step for step in structure.steps if step.arguments.get("inputs") == [0, 1])
    assert joined.arguments["tensor_parallel_output_grad"] is False


def test_experts_that_are_modules_see_whole_sequences_within_the_module_around_them():
    steps = steps_of(found("StallLayer"), layer="layers.0")
    assert {("stalls", "all_gather"), ("stalls", "scatter"), ("attention", "all_gather")} <= steps
    # Also those that no token of the example has chosen.
    assert {(f"stalls.experts.{index}.2", "all_reduce") for index in range(12)} <= steps
    assert ("stalls.choice", "all_reduce", "parameters") not in steps


@pytest.mark.parametrize("kind", ["Layer", "ChoiceLayer", "NearLayer"])
def test_a_rehearsal_without_one_of_the_steps_does_not_pass(kind, monkeypatch):
    splitters, find = [], SequenceSplitter.find
    monkeypatch.setattr(SequenceSplitter, "find", lambda self: splitters.append(self) or find(self))
    found(kind)
    splitter = splitters[0]
    steps = [step for step in splitter.find() if step.op == "sync"]
    cuts = splitter.steps
    assert not splitter.rehearsal.why_not([*cuts, *steps]) and len(steps) >= 6
    for step in steps:
        assert splitter.rehearsal.why_not([*cuts, *(other for other in steps if other is not step)]), step


def test_one_process_shares_nothing_and_whole_sequences_are_the_default():
    assert not found("Layer", 1).steps
    plain = find_structure(sequence_models.seeded("Layer"), sequence_models.words(), n_processes=2)
    assert not {"all_gather", "reduce_scatter"} & {name for _, name, *_ in steps_of(plain)}
    sch = apply_plan(sequence_models.seeded("Layer"), "121+sp", sequence_models.words())
    assert torch.is_tensor(sch.mod(sequence_models.words()))


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_models_of_other_kinds_share_their_sequences(family):
    inputs = family_batch(family_spec(family), 2, seed=0).inputs
    structure = find_structure(build_family(family), inputs, along_sequence=True)
    cuts = [step for step in structure.steps if step.arguments.get("sync_op_or_fn") == "RR->SR"]
    assert len(cuts) == len(structure.layers)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (lambda: sequence_models.seeded("Layer"), sequence_models.words(7),
         r"Stack: .* in 'layers.0' \(Layer\): 7 tokens of the example do not divide among 2 processes"),
        (lambda: sequence_models.seeded("Inside"), sequence_models.words(),
         r"Stack: .* in 'layers.0' \(Inside\): no module could hand whole sequences to attention in the fo"),
        (lambda: sequence_models.seeded("Layer", between=True), sequence_models.words(),
         r"Stack: .* between 'layers.0' and 'layers.1': more than the next layer reads what one returns"),
        (lambda: odd_transformers.seeded("Forest"), odd_transformers.words(),
         r"Forest: .* in 'trees.0' \(Turning\): with its part of the sequence, a process raises Runtime"),
        (lambda: odd_transformers.seeded("Market"), odd_transformers.words(),
         r"Market: .* in 'streets.0' \(Street\): no module could hand whole sequences to what .*out' reads"),
    ],
)  # fmt: skip
def test_what_cannot_share_sequences_is_refused_and_the_model_stays_as_it_was(model, inputs, message):
    made = model()
    before = {name: id(one) for name, one in made.named_parameters()}
    with pytest.raises(StructureError, match=message + r".*; expected a plan without it \(nosp\)$"):
        apply_plan(made, "tp2 mb1", inputs)
    assert {name: id(one) for name, one in made.named_parameters()} == before


# --- Experts ---


@pytest.mark.parametrize("along_sequence", [False, True])
@pytest.mark.parametrize("n", [2, 4])
def test_experts_are_dealt_out_whole_to_the_processes(n, along_sequence):
    structure = find_structure(
        sequence_models.seeded("ChoiceLayer"), sequence_models.words(), n_processes=n,
        along_sequence=along_sequence, deal_experts=True,
    )  # fmt: skip
    assert [part.path for part in structure.parts if part.how == "experts"] == [
        f"layers.{index}.choice.experts" for index in range(2)
    ]
    steps = [step for step in structure.steps if step.path == "layers.0.choice.experts"]
    assert [step.arguments["axis"] for step in steps if step.op == "shard"] == [0, 0]
    assert [dict(step.arguments) for step in steps if step.op == "set_attr"] == [{"experts": 4 // n}]
    exchanges = {step.arguments["sync_op_or_fn"] for step in steps if step.op == "sync"}
    assert exchanges == ({"all_gather", "reduce_scatter"} if along_sequence else {"all_reduce"})
    text = str(structure)
    assert "layers.*.choice.experts   Experts    experts            experts" in text


@pytest.mark.parametrize("along_sequence", [False, True])
@pytest.mark.parametrize("deal_experts", [False, True])
def test_experts_are_dealt_out_to_data_parallelism_beside_processes_that_share_layers(
    deal_experts, along_sequence
):
    structure = find_structure(
        sequence_models.seeded("SharedLayer"), sequence_models.words(), n_processes=2,
        along_sequence=along_sequence, deal_experts=deal_experts, n_data=2,
    )  # fmt: skip
    over, path = (["tensor", "experts"] if deal_experts else "experts"), "layers.0.choice.experts"
    steps = [step for step in structure.steps if step.path == path]
    assert {str(step.arguments["over"]) for step in steps if step.op == "shard"} == {str(over)}
    assert [dict(step.arguments) for step in steps if step.op == "set_attr"] == [
        {"experts": 1 if deal_experts else 2}
    ]
    first = str(structure).splitlines()[0]
    assert first == "Stack, cut among 2 processes, its experts among 2 with samples of their own"
    taken = next(step.arguments for step in steps if step.op == "take_experts")
    assert taken["over"] == over
    assert taken.get("shares_tokens", False) == (not deal_experts and not along_sequence)
    # Parts of sequences are sent as they are; gradients of experts that several processes hold are summed.
    exchanged = [step.arguments for step in steps if step.op == "sync"]
    through = {of["sync_op_or_fn"] for of in exchanged if of.get("on") != "parameters"}
    joined = {"all_gather", "reduce_scatter"} if deal_experts else set()
    assert through == (joined if along_sequence else {"all_reduce"})
    assert any(of.get("on") == "parameters" for of in exchanged) == (not deal_experts)
    means = [step for step in structure.steps if step.arguments.get("sync_op_or_fn") == "average"]
    assert {step.arguments["over"] for step in means} == {"experts"}
    assert path not in {step.path for step in means} and "layers.0.attention.three" in {
        step.path for step in means
    }
    with pytest.raises(ArgumentError, match="n_data is 2; expected 1, or more with n_processes or n_context"):
        find_structure(sequence_models.seeded("SharedLayer"), n_processes=1, n_data=2)


@pytest.mark.parametrize(
    ("options", "over", "held"),
    [
        ({"n_processes": 1}, "context", 2),
        ({"n_processes": 1, "n_data": 2}, ["experts", "context"], 1),
        ({"n_processes": 2}, "context", 2),
        ({"n_processes": 2, "along_sequence": True}, "context", 2),
        ({"n_processes": 2, "deal_experts": True}, ["tensor", "context"], 1),
    ],
)
def test_experts_are_dealt_out_to_processes_that_hold_parts_of_sequences(options, over, held):
    structure = find_structure(
        sequence_models.seeded("SharedLayer"), sequence_models.words(), n_context=2, deal_to_context=True,
        **options,
    )  # fmt: skip
    path = "layers.1.choice.experts"
    steps = [step for step in structure.steps if step.path == path]
    assert {str(step.arguments["over"]) for step in steps if step.op == "shard"} == {str(over)}
    assert [step.arguments for step in steps if step.op == "set_attr"] == [{"experts": held}]
    assert next(part.how for part in structure.parts if part.path == path) == "experts"
    assert structure.notes[-1] == "each process of context parallelism holds some experts"
    # Gradients of all weights but those of experts are sums over the processes of context parallelism.
    summed = {"sync_op_or_fn": "all_reduce", "over": "context", "on": "parameters", "mode": "bwd_post"}
    paths = {step.path for step in structure.steps if dict(step.arguments) == summed}
    assert path not in paths and "layers.1.choice.choice" in paths
    if options["n_processes"] == 1:  # all else is whole
        assert {step.path for step in structure.steps if step.op == "shard"} == {
            f"layers.{index}.choice.experts" for index in range(2)
        }


def test_experts_need_processes_of_context_parallelism_to_be_dealt_out_to_them():
    for options, said in (
        ({"deal_to_context": True}, "deal_to_context is True and n_context 1"),
        ({"n_context": 2, "has_own_samples": True}, "has_own_samples is True and n_context 2"),
    ):
        with pytest.raises(ArgumentError, match=f"find_structure: {said}; expected one of both"):
            find_structure(sequence_models.seeded("SharedLayer"), **options)


@pytest.mark.parametrize(
    ("model", "inputs", "plan", "message"),
    [
        (lambda: sequence_models.seeded("ChoiceLayer"), sequence_models.words(), "cp8 ep8",
         r"Stack: experts of 'choice.experts' cannot be dealt out in 'layers.0' \(ChoiceLayer\): 4 exp"),
        (lambda: sequence_models.seeded("Layer"), sequence_models.words(), "cp2 ep2",
         "Stack: experts cannot be dealt out of layers.0 to layers.1: no layer has experts in tensors"),
        (lambda: sequence_models.seeded("ChoiceLayer"), sequence_models.words(), "dp4 tp2 ep8",
         r"Stack: experts of 'choice.experts' cannot be dealt out in 'layers.0' \(ChoiceLayer\): 4 exp"),
        (lambda: sequence_models.seeded("Layer"), sequence_models.words(), "dp2 tp2 ep2",
         "Stack: experts cannot be dealt out of layers.0 to layers.1: no layer has experts in tensors"),
        (lambda: sequence_models.seeded("ChoiceLayer"), sequence_models.words(), "tp8 ep8",
         r"Stack: experts of 'choice.experts' cannot be dealt out in 'layers.0' \(ChoiceLayer\): 4 exp"),
        (lambda: sequence_models.seeded("Layer"), sequence_models.words(), "tp2 ep2",
         "Stack: experts cannot be dealt out of layers.0 to layers.1: no layer has experts in tensors"),
        (lambda: odd_transformers.seeded("Market"), odd_transformers.words(), "tp2 ep2 nosp",
         "Market: .*: no layer has experts in tensors that they share"),
        (lambda: odd_transformers.seeded("Square"), odd_transformers.words(), "tp2 ep2 nosp",
         r"Square: .* 'people.0' \(Gathering\): it is not called with a row per token, the chosen ex"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_dealt_out_are_refused(model, inputs, plan, message):
    with pytest.raises(StructureError, match=message + ".*; expected a plan without ep$"):
        apply_plan(model(), f"{plan} mb1", inputs)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Shifted", r"experts of 'choice.experts' .*: its tensors have 4 and 16 rows, not one per expert"),
        ("Kept", r"experts of 'choice.experts' .*: the results of 'choice.experts' do not add up"),
    ],
)
def test_experts_that_share_more_than_tokens_are_refused(kind, message):
    model = sequence_models.seeded("ChoiceLayer")
    for layer in model.layers:
        layer.choice.experts = getattr(sequence_models, kind)()
    with pytest.raises(StructureError, match=message):
        apply_plan(model, "tp2 ep2 mb1", sequence_models.words())


def test_experts_take_three_arguments_that_divide():
    experts = create_schedule(sequence_models.Experts())
    with pytest.raises(ArgumentError, match="tokens, tokens, weights are not three arguments of it"):
        experts.take_experts(4, chosen=0)
    with pytest.raises(ArgumentError, match="no input 'choice'; expected one of tokens, chosen, weights"):
        experts.take_experts(4, chosen="choice")
    with pytest.raises(ShardError, match="0 experts do not divide among 1 processes"):
        experts.take_experts(0)
    with pytest.raises(ArgumentError, match="shares_tokens is not for experts over tensor and experts"):
        experts.take_experts(4, over=["tensor", "experts"], shares_tokens=True)
    with pytest.raises(ArgumentError, match="has_own_tokens is not for experts over experts"):
        experts.take_experts(4, over="experts", has_own_tokens=True)
    for act in (experts.take_experts, lambda n, over: experts.shard("wide", 0, over=over)):
        with pytest.raises(ArgumentError, match="over is 'data'; expected some of tensor, experts, con"):
            act(4, over="data")
        with pytest.raises(ArgumentError, match="; expected some of tensor, experts, context, in this order"):
            act(4, over=["context", "tensor"])
    with pytest.raises(ArgumentError, match="Linear is shared over 'tensor' only, not 'experts'"):
        create_schedule(nn.Sequential(nn.Linear(4, 4)))["0"].shard("weight", 0, over="experts")
    tokens, weights = torch.randn(6, 16), torch.rand(6, 2)
    chosen = torch.tensor([[0, 1], [2, 3], [0, 2], [3, 1], [1, 0], [2, 0]])
    own = torch.where(chosen >= 2, weights, 0.0)
    held = copy.deepcopy(experts.mod)
    held.wide, held.narrow = (nn.Parameter(one.detach()[2:]) for one in (held.wide, held.narrow))
    held.experts, expected = 2, experts.mod(tokens, chosen, own)
    wrapped = OwnExperts(held, 2, 2, "tokens", "chosen", "weights")
    torch.testing.assert_close(wrapped(tokens, weights=weights, chosen=chosen), expected)
    assert not OwnExperts(held, 4, 2, "tokens", "chosen", "weights")(tokens, chosen, weights).any()
    whole, parts = experts.mod(tokens, chosen, weights), []
    for rank in range(4):  # six tokens among four processes
        part = SharedTokens(experts.mod, Ranks(rank, 4, None), "tokens", "chosen", "weights")
        parts.append(part(tokens, weights=weights, chosen=chosen))
        assert 1 <= int(parts[-1].any(1).sum()) <= 2
    torch.testing.assert_close(sum(parts), whole)


# --- Rehearsals ---


def together(size, act):
    """Return what a function of rank and group returns in each thread of a rehearsal, or the errors."""
    group, results = Rehearsal(size), [None] * size

    def run(rank):
        try:
            results[rank] = act(Ranks(rank, size, group))
        except Exception as error:  # noqa: BLE001 - compared by the test
            results[rank] = error
            group.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_exchange_what_processes_would():
    whole = torch.arange(16.0).view(2, 8)
    parts = whole.chunk(4, -1)

    def act(ranks):
        own = whole * (ranks.rank + 1)
        return (
            all_reduce(ranks)(own), reduce_scatter(ranks, -1)(own), scatter(ranks, -1)(whole),
            all_gather(ranks, -1)(parts[ranks.rank]), gather_objects(ranks, ranks.rank),
            reshard(ranks, "SR->RS")(whole.T.reshape(16, 1).chunk(4)[ranks.rank].expand(4, 4)),
        )  # fmt: skip

    for rank, (total, part, own, joined, ranks, swapped) in enumerate(together(4, act)):
        assert torch.equal(total, 10 * whole) and torch.equal(joined, whole) and ranks == [0, 1, 2, 3]
        assert torch.equal(part, 10 * parts[rank]) and torch.equal(own, parts[rank])
        assert torch.equal(swapped, whole.T.reshape(16, 1))


def test_threads_that_exchange_different_tensors_all_raise():
    raised = together(2, lambda ranks: all_reduce(ranks)(torch.ones(2 + ranks.rank)))
    assert all(isinstance(one, ShardError | threading.BrokenBarrierError) for one in raised)
    assert any("exchange different tensors: ('a sum', (2,)), ('a sum', (3,))" in str(one) for one in raised)
