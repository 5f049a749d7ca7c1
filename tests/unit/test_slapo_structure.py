"""Layers, attention, feed-forward parts and vocabulary are found by a run, whatever they are called."""

import ast
import inspect

import pytest

pytest.importorskip("torch")

import odd_transformers
import sequence_models
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional as F

from makespan.cli import main
from makespan.errors import NotationError, PlanError
from makespan.planning import Layout
from makespan.plans import ExecutionPlan
from makespan.slapo import (
    ArgumentError,
    ConflictError,
    StructureError,
    Verify,
    apply_plan,
    create_schedule,
    find_structure,
)
from makespan.slapo.planned import Division, read_division
from makespan.training.zoo import build_family, family_batch, family_spec

NORM, OUT = ("norm", "whole"), ("other weights", "whole")
ROLES = {
    "Forest": {
        "trees.*.stem": ("attention: queries, keys, values", "columns"),
        "trees.*.bark": ("attention: output", "rows"),
        "trees.*.seed": ("feed-forward: in", "columns"),
        "trees.*.fruit": ("feed-forward: out", "rows"),
        "trees.*.leaf": NORM, "trees.*.root": NORM, "last": NORM,
        "moss": ("table of tokens", "vocabulary"),
        "sky": ("head, tied to the table", "vocabulary"),
    },
    "Harbour": {
        "boats.*.braid": ("attention: queries, keys, values", "columns"),
        "boats.*.knot": ("attention: output", "rows"),
        "boats.*.hook": ("attention: queries", "columns"),
        "boats.*.net": ("attention: keys, values", "columns"),
        "boats.*.rope": ("attention: output", "rows"),
        "boats.*.up": ("feed-forward: in", "columns"),
        "boats.*.down": ("feed-forward: out", "rows"),
        "boats.*.one": NORM, "boats.*.two": NORM, "boats.*.three": NORM,
        "bricks": ("table of tokens", "vocabulary"), "quay": OUT, "flag": OUT,
    },
    "Square": {
        "people.*.a": ("attention: queries", "columns"),
        "people.*.b": ("attention: keys", "columns"),
        "people.*.c": ("attention: values", "columns"),
        "people.*.d": ("attention: output", "rows"),
        "people.*.crowd": ("experts", "columns and rows"),
        "people.*.way": OUT, "people.*.before": NORM, "people.*.after": NORM,
        "stones": ("table of tokens", "vocabulary"),
        "voice": ("head", "vocabulary"),
    },
}  # fmt: skip


def _roles(structure):
    return {structure.general(part.path): (part.role, part.how) for part in structure.parts}


@pytest.mark.parametrize("kind", ROLES)
def test_roles_are_found(kind):
    found = find_structure(odd_transformers.seeded(kind), odd_transformers.INPUTS[kind], n_processes=2)
    assert _roles(found) == ROLES[kind]


@pytest.mark.parametrize("kind", ROLES)
def test_names_do_not_matter(kind):
    space, new = odd_transformers.renamed()
    inputs = odd_transformers.INPUTS[kind]
    found = find_structure(odd_transformers.seeded(new[kind], space), inputs, n_processes=2)
    expected = {
        ".".join(new.get(token, token) for token in path.split(".")): role
        for path, role in ROLES[kind].items()
    }
    assert _roles(found) == expected
    plain = find_structure(odd_transformers.seeded(kind), inputs, n_processes=2)
    assert [step.op for step in found.steps] == [step.op for step in plain.steps]


def test_the_model_its_modes_and_the_random_numbers_stay_as_they_are():
    model, inputs = odd_transformers.seeded("Forest"), odd_transformers.INPUTS["Forest"]
    model.trees[1].eval()
    modes = [module.training for module in model.modules()]
    before, state = {n: one.clone() for n, one in model.state_dict().items()}, torch.get_rng_state()
    find_structure(model, inputs, n_processes=2)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_experts_that_no_token_reached_are_cut_like_those_that_some_did():
    few = odd_transformers.words()[:1, :2]
    found = find_structure(odd_transformers.seeded("Market"), few, n_processes=2)
    cut = {part.path for part in found.parts if part.how == "rows"}
    assert cut == {f"streets.{layer}.stalls.{index}.out" for layer in range(2) for index in range(24)}
    synced = [step.path for step in found.steps if dict(step.arguments).get("mode") == "bwd_post"]
    assert len(synced) == len(set(synced)) == 48


def test_one_process_finds_roles_and_cuts_nothing():
    found = find_structure(odd_transformers.seeded("Square"), n_processes=1)
    assert {part.how for part in found.parts} == {"whole"} and not found.steps and not found.kept_whole
    assert "attention: queries" in {part.role for part in found.parts}
    with pytest.raises(ArgumentError, match="n_processes is 0"):
        find_structure(odd_transformers.seeded("Square"), n_processes=0)


def test_a_table_shows_each_kind_of_layer_once():
    text = str(find_structure(odd_transformers.seeded("Square"), n_processes=2))
    assert text.splitlines()[:2] == ["Square, cut among 2 processes", "2 layers: people.0 to people.1"]
    assert text.count("attention: queries") == 1 and "people.*.crowd" in text


def test_attributes_and_arguments_by_heads_are_divided():
    steps = find_structure(odd_transformers.seeded("Square"), n_processes=2).steps
    changed = [(step.path, dict(step.arguments)) for step in steps if step.op in ("set_attr", "take_heads")]
    assert changed[:2] == [
        ("people.0", {"heads": 2}),
        ("people.0", {"places": [[1, 1, 4]]}),
    ]


# --- What stays whole, with the reason ---


def test_what_cannot_be_cut_stays_whole_with_the_reason():
    found = find_structure(odd_transformers.seeded("Blend"), odd_transformers.INPUTS["Blend"], n_processes=2)
    reasons = {part.path: part.reason for part in found.kept_whole}
    assert reasons["layers.0.a"] == "'all' normalises over all features of 'a'"
    assert reasons["layers.1.down"] == "what 'down' reads is not what it should read"
    assert reasons["table"].startswith(
        "33 rows do not divide among 2 processes; pad_vocabulary(model, ['table']"
    )
    assert not found.steps


def test_heads_that_do_not_divide_leave_an_attention_whole():
    found = find_structure(
        odd_transformers.seeded("Forest"), odd_transformers.INPUTS["Forest"], n_processes=4
    )
    reasons = {part.path: part.reason for part in found.kept_whole}
    assert reasons["trees.0.stem"] == "2 heads of keys and values do not divide among 4 processes"
    assert {part.role for part in found.parts if part.how == "rows"} == {"feed-forward: out"}


def test_a_warning_names_what_stays_whole():
    with pytest.warns(
        UserWarning, match=r"apply_plan of Blend: every process holds these whole: layers\.0\.a: 'all'"
    ):
        apply_plan(odd_transformers.seeded("Blend"), "tp2 nosp mb1", odd_transformers.INPUTS["Blend"])


# --- Refusals ---


class Averaged(nn.Module):
    """A layer whose statistics change with each call in training mode."""

    def __init__(self):
        super().__init__()
        self.norm, self.down = nn.BatchNorm1d(6), nn.Linear(16, 8)
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
        self.second = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))

    def forward(self, given):
        given = given + self.second(self.norm(given))
        return given + self.down(F.relu(self.up(given)))


def test_layers_with_running_statistics_and_parametrized_weights_are_cut_and_verified():
    inputs = torch.randn(4, 6, 8)
    model = nn.Sequential(*(Averaged() for _ in range(2)))
    found = find_structure(model, inputs, n_processes=2)
    assert [part.path for part in found.parts if part.how == "rows"] == ["0.second.2", "1.second.2"]
    sch = create_schedule(model)
    with Verify(sch, inputs) as check:
        apply_plan(sch, "mb1 recompute=full", inputs)
    assert check.report.is_equal


class Once(nn.Module):
    """A list of layers side by side, none after the other."""

    def __init__(self):
        super().__init__()
        self.sides = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, given):
        return sum(side(given) for side in self.sides)


def test_models_without_layers_are_refused_by_name_with_the_reason():
    with pytest.raises(
        StructureError, match=r"Once: no repeated layers are found: sides: 'sides.1' does not follow"
    ):
        find_structure(Once(), torch.randn(2, 4))
    with pytest.raises(
        StructureError, match=r"Linear: no repeated layers are found: it has no list of modules"
    ):
        find_structure(nn.Linear(4, 4), torch.randn(2, 4))
    images = family_batch(family_spec("wideresnet"), 2, seed=0).inputs
    with pytest.raises(StructureError, match=r"WideResNet: no repeated layers are found"):
        find_structure(build_family("wideresnet"), images)


def test_models_that_cannot_be_run_are_refused():
    with pytest.raises(StructureError, match=r"Once: it cannot be run on the example inputs: RuntimeError"):
        find_structure(Once(), torch.randn(2, 5))
    with pytest.raises(
        StructureError, match=r"Once: it has no embedding from which token ids could be drawn"
    ):
        find_structure(Once())
    with pytest.raises(StructureError, match=r"Once: its parameters have no values"):
        find_structure(Once().to("meta"), torch.randn(2, 4))


# --- Plans ---


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("tp2 pp2 mb1", Division(2, 2, 0.0, sequence_parallel=True)),
        ("tp2 zero1 mb4 nosp", Division(2, 1, 0.0)),
        ("pp4 fsdp mb1 recompute=full:0.5 ends", Division(1, 4, 0.5, (), True)),
        (Layout(dp=8, tp=2, recompute="full"), Division(2, 1, 1.0, sequence_parallel=True)),
        ("121+sp", Division(2, 1, 0.0, sequence_parallel=True)),
        ("tp2 ep2 nosp mb1", Division(2, 1, 0.0, deal_experts=True)),
        ("dp8 ep4 pp2 mb1", Division(4, 2, deal_experts=True, has_own_samples=True)),
        ("dp8 tp2 ep8 nosp mb1", Division(2, 1, n_data=8)),
        ("dp2 tp2 ep2 nosp mb1", Division(2, 1, n_data=2)),
        ("dp4 tp2 ep8 pp2 mb1", Division(2, 2, sequence_parallel=True, deal_experts=True, n_data=4)),
        (Layout(dp=6, tp=2, ep=4), Division(2, 1, sequence_parallel=True, deal_experts=True, n_data=2)),
        ("tp2 cp2 ep2 nosp mb1", Division(2, 1, cp=2, deal_to_context=True)),
        ("cp2 tp2 ep4 nosp mb1", Division(2, 1, cp=2, deal_experts=True, deal_to_context=True)),
        ("dp4 cp2 ep4 mb1", Division(1, 1, cp=2, n_data=2, deal_to_context=True)),
        ("dp2 cp2 ep2 mb1", Division(1, 1, cp=2, deal_to_context=True)),
        ("pp2 vp3 mb1", Division(1, 6)),
        ("cp4 mb1", Division(1, 1, cp=4)),
        ("tp2 cp2 pp2 nosp mb1", Division(2, 2, cp=2)),
        ("221+gc", Division(2, 2, 1.0)),
        ("211+interleaved2", Division(1, 4)),
        ("214+layers3-1+gc0.5", Division(1, 2, 0.5, (3, 1))),
        ("tp2 mb1 recompute=selective", Division(2, 1, 1.0, recompute="selective", sequence_parallel=True)),
        ("mb1 recompute=operators:0.5", Division(1, 1, 0.5, recompute="operators")),
        ("121+selective", Division(2, 1, 1.0, recompute="selective")),
        (ExecutionPlan(tp=2, dp=2, global_batch_size=4, micro_batch_size=2), Division(2, 1, 0.0)),
    ],
)  # fmt: skip
def test_a_plan_is_read_as_what_a_schedule_realises(plan, expected):
    found = read_division(plan)
    assert found.sequence_parallel == expected.sequence_parallel
    assert (found.deal_experts, found.cp) == (expected.deal_experts, expected.cp)
    assert found.deal_to_context == expected.deal_to_context
    assert (found.has_own_samples, found.n_data) == (expected.has_own_samples, expected.n_data)
    assert (found.tp, found.n_stages, found.recomputed, found.stages, found.ends_as_layers) == (
        expected.tp, expected.n_stages, expected.recomputed, expected.stages, expected.ends_as_layers,
    )  # fmt: skip


def test_what_is_left_to_the_launcher_is_noted():
    assert read_division("dp4 tp2 zero3 mb2").left == ("dp4", "zero3", "mb2")
    assert read_division("dp8 tp2 ep4 mb2").left == ("dp2", "zero1", "mb2")
    assert read_division("pp2 vp2 zero0 mb1").left == ("interleaved order of micro-batches", "mb1")
    chosen = read_division("pp2 vp2 zero0 zero-bubble mb1")
    assert (chosen.left, chosen.order, chosen.n_stages) == (("mb1",), "zero-bubble", 4)
    found = apply_plan(odd_transformers.seeded("Forest"), "pp2 fsdp mb1").metadata.structure
    assert found.notes == ["stages end after trees.0", "left to the launcher: zero3, mb1"]
    sch = apply_plan(odd_transformers.seeded("Forest"), "pp2 zero-bubble mb1")
    assert sch.metadata.order == "zero-bubble"
    assert sch.metadata.structure.notes[1] == "stages run in the order zero-bubble"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("cp4 ep2 mb1", "ep2 cannot be realised .*: experts .* share sequences; a multiple of 4 would do"),
        ("tp4 cp2 ep4 mb1", "ep4 cannot be realised .* all processes that share layers.* ep 2 or 8 would do"),
        ("dp2 tp4 ep4 mb1", "ep4 cannot be realised .* all processes that share layers.* ep 2 or 8 would do"),
        ("tp4 ep2 mb1", "ep2 cannot be realised by a schedule: experts are dealt out to all processes"),
    ],
)
def test_what_cannot_be_realised_is_refused_before_the_model_runs(plan, message):
    with pytest.raises(ArgumentError, match=message):
        apply_plan(Once(), plan)


def test_plans_that_are_no_text_are_refused():
    with pytest.raises(PlanError, match="plan is 2; expected a text such as 'tp2 pp2', a Layout or an"):
        apply_plan(nn.Linear(2, 2), 2, None)


def test_texts_that_are_no_plan_are_refused():
    with pytest.raises(NotationError, match=r"layout 'tp2 fp8': 'fp8' is not understood.*or three degrees"):
        apply_plan(Once(), "tp2 fp8")
    with pytest.raises(NotationError, match="the layout is empty"):
        apply_plan(Once(), "")
    with pytest.raises(PlanError, match="a degree is 0"):
        apply_plan(Once(), "tp0")
    with pytest.raises(
        PlanError, match=r"a stage has 2; .*; add what the planner .*, as in 'dp4 tp2 ep8 mb1'"
    ):
        apply_plan(Once(), "tp2 ep8 mb1")
    for text, message in (
        ("pp4 ep4 mb1", "a stage has 1; expected a divisor; .* as in 'dp4 pp4 ep4 mb1'$"),
        ("dp2 tp2 ep8 mb1", "a stage has 4; expected a divisor$"),
        ("tp2 ep8 vp2 mb1", "2 chunks per stage, but there is one stage$"),
        ("tp2 ep0 mb1", "ep is 0; expected a whole number >= 1$"),
    ):
        with pytest.raises(PlanError, match=message):
            apply_plan(Once(), text)


def test_a_gate_and_numbers_of_heads_are_cut_with_their_attention():
    found = find_structure(odd_transformers.seeded("Canal"), *odd_transformers.INPUTS["Canal"], n_processes=2)
    parts = {part.path.removeprefix("locks.0."): part for part in found.parts if "locks.0" in part.path}
    assert (parts["sluice"].role, parts["sluice"].how) == ("attention: gate", "columns")
    assert (parts["locks.0"].role, parts["locks.0"].how) == ("attention: numbers of heads", "columns")
    assert not found.kept_whole


def test_numbers_of_heads_are_cut_where_functions_read_them_and_what_heads_share_is_summed():
    found = find_structure(sequence_models.seeded("NearLayer"), sequence_models.words(), n_processes=2)
    parts = {part.path.removeprefix("layers.0."): (part.role, part.how) for part in found.parts}
    assert parts["attention.by_head"] == ("attention: numbers of heads", "columns")
    assert parts["attention.called"] == ("attention: numbers of heads", "columns")
    assert parts["attention.made.2"] == ("attention: positions of heads", "columns")
    assert parts["attention"] == ("attention: other weights", "whole")
    steps = [step for step in found.steps if step.path == "layers.0.attention"]
    assert [step.arguments.get("inputs") for step in steps if step.arguments.get("on")] == [["shared"]]
    assert [part.path for part in found.kept_whole] == [f"layers.{n}.attention.made.0" for n in range(2)]


def test_stages_that_do_not_fit_the_layers_are_refused():
    model = odd_transformers.seeded("Forest")
    with pytest.raises(ArgumentError, match="4 stages; the model has 3 layers"):
        apply_plan(model, "pp4 mb1")
    with pytest.raises(ArgumentError, match="4 layers in 2 stages; the model has 3 layers"):
        apply_plan(model, "211+layers3-1")
    with pytest.raises(ArgumentError, match="4 layers leave a stage of 4 without a layer"):
        Division(1, 4, ends_as_layers=True).cuts(4)
    assert Division(1, 2, ends_as_layers=True).cuts(4) == [1]


def test_a_step_that_fails_changes_nothing():
    model = odd_transformers.seeded("Forest")
    model.trees[2].forward = model.trees[2].forward
    sch = apply_plan(model, "tp2 nosp mb1 recompute=full")
    before, text = list(sch.metadata.journal), str(sch)
    with pytest.raises(ConflictError):
        apply_plan(sch, "tp2 nosp mb1")
    assert sch.metadata.journal == before and str(sch) == text


# --- Command line ---


def test_the_command_line_shows_structure_and_schedule_of_a_plan():
    shown = CliRunner().invoke(main, ["slapo", "show", "bert", "--plan", "pp2 mb1 recompute=full"])
    assert shown.exit_code == 0, shown.output
    assert "bert.encoder.layer.*.attention.self.query" in shown.output
    assert "note: stages end after bert.encoder.layer.0" in shown.output
    assert "| checkpoint()" in shown.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["show", "bert", "--plan", "tp2 mb1", "--set", "fuse=true"],
            "--plan and --set fuse exclude each other",
        ),
        (
            ["verify", "bert", "--plan", "tp2 cp2 mb1"],
            "--plan with tp and cp needs two groups of processes; expected one of them",
        ),
        (["verify", "bert", "--plan", "cp2 mb1"], "expected --processes 2"),
        (
            ["verify", "bert", "--plan", "tp2 mb1"],
            "--plan shares layers among 2 processes; expected --processes 2",
        ),
        (["verify", "bert", "--plan", "tp2 fp8"], "'fp8' is not understood"),
    ],
)
def test_the_command_line_refuses_what_does_not_fit(arguments, message):
    refused = CliRunner().invoke(main, ["slapo", *arguments])
    assert refused.exit_code == 2
    assert message in refused.output


# --- Lines ---


def test_a_model_takes_one_line_where_its_schedule_takes_many():
    """Count the statements that a user writes, without the lines that define functions and return."""
    source = inspect.getsource(_by_plan), inspect.getsource(_by_primitives)
    counts = [sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text))) - 1 for text in source]
    assert counts == [1, 17]


def _by_plan(model):
    apply_plan(model, "tp2 nosp mb1")


def _by_primitives(sch):
    for index in range(32):
        layer = sch[f"model.layers.{index}"]
        for name in ("q_proj", "k_proj", "v_proj"):
            layer[f"self_attn.{name}"].shard("weight", axis=0)
        layer["self_attn"].sync("bwd_post", "all_reduce")
        layer["self_attn.o_proj"].shard("weight", axis=1)
        layer["self_attn.o_proj"].sync("fwd_post", "all_reduce")
        layer["mlp.gate_proj"].shard("weight", axis=0)
        layer["mlp.up_proj"].shard("weight", axis=0)
        layer["mlp"].sync("bwd_post", "all_reduce")
        layer["mlp.down_proj"].shard("weight", axis=1)
        layer["mlp.down_proj"].sync("fwd_post", "all_reduce")
    sch["model.embed_tokens"].shard("weight", axis=0)
    sch["model.embed_tokens"].sync("fwd_post", "all_reduce")
    sch["lm_head"].shard("weight", axis=0)
    sch["lm_head"].sync("bwd_post", "all_reduce")
    sch["lm_head"].sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=False)


class Endless(nn.Module):
    """Layers whose results are infinite, so that all parts would look alike."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, hidden):
            return hidden + self.down(self.up(hidden).relu()) * float("inf")

    def __init__(self):
        super().__init__()
        self.words, self.layers = nn.Embedding(8, 16), nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, ids):
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def test_a_layer_without_finite_results_stays_whole_because_nothing_can_be_compared():
    found = find_structure(Endless(), torch.arange(8).view(2, 4), n_processes=2)
    assert {part.how for part in found.parts if part.path.startswith("layers.")} == {"whole"}
    assert any("no finite number" in part.reason for part in found.kept_whole)
