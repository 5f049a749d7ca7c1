"""Modules that are compiled by themselves, equal ones once."""

import copy
import shutil

import pytest

torch = pytest.importorskip("torch")

import odd_transformers
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from makespan.slapo import (
    ArgumentError,
    ConflictError,
    VerificationError,
    Verify,
    apply_plan,
    compiling,
    create_schedule,
    replay,
)

pytestmark = pytest.mark.xdist_group("compiled")
INPUTS = odd_transformers.INPUTS["Harbour"]
GRAPHS = []


def counting(graph, examples):
    GRAPHS.append(graph)
    return aot_eager(graph, examples)


def wrong(graph, examples):
    """Compile a graph to another one."""

    def run(*values):
        return tuple(2 * value if value.is_floating_point() else value for value in graph(*values))

    return run


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    GRAPHS.clear()


def gradients(model):
    model.zero_grad()
    model.eval()(*INPUTS).square().sum().backward()
    return [one.grad.clone() for one in model.parameters()]


def deep(n=4):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return odd_transformers.Harbour(n)


@pytest.mark.parametrize("recomputed", [None, {}, {"keep": "products"}])
def test_layers_that_are_built_alike_are_compiled_once(recomputed):
    sch = create_schedule(deep())
    expected = gradients(copy.deepcopy(sch.mod))
    for index in range(4):
        node = sch[f"boats.{index}"]
        if recomputed is not None:
            node.checkpoint(**recomputed)
        node.compile(counting, fullgraph=True)
    for found, other in zip(gradients(sch.mod), expected, strict=True):
        torch.testing.assert_close(found, other)
    assert len(GRAPHS) == 1


def test_many_kinds_of_modules_are_compiled_however_many_there_are():
    kinds = [type(f"Kind{index}", (odd_transformers.Crossing,), {}) for index in range(10)]
    model = deep(1)
    model.boats = nn.ModuleList(kind() for kind in kinds)
    sch = create_schedule(model)
    for index in range(len(kinds)):
        sch[f"boats.{index}"].compile(counting)
    gradients(model)
    assert len(GRAPHS) == len(kinds)


def test_a_copy_is_compiled_for_itself():
    sch = create_schedule(deep(1))
    sch["boats.0"].compile(counting)
    first = gradients(sch.mod)
    other = copy.deepcopy(sch.mod)
    with torch.no_grad():
        other.boats[0].knot.weight.zero_()
    changed = gradients(other)
    assert not all(torch.equal(*pair) for pair in zip(first, changed, strict=True))
    assert all(torch.equal(*pair) for pair in zip(first, gradients(sch.mod), strict=True))


def test_a_journal_compiles_again():
    first = apply_plan(odd_transformers.seeded("Harbour"), "mb1", INPUTS, compiler="aot_eager")
    first["flag"].compile(counting, dynamic=False)
    again = replay(odd_transformers.seeded("Harbour"), first.dump())
    assert str(again) == str(first) and "compile(" in str(again)
    assert torch.equal(again.mod.eval()(*INPUTS), first.mod.eval()(*INPUTS)) and GRAPHS


def test_what_is_compiled_is_verified():
    sch = create_schedule(odd_transformers.seeded("Harbour"))
    with Verify(sch, INPUTS) as check:
        sch["boats.1"].compile(counting)
    assert check.report.is_equal and len(GRAPHS) >= 1
    with pytest.raises(VerificationError, match="differs from the original"), Verify(sch, INPUTS):
        sch["boats.0"].compile(wrong)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and there is no g++")
def test_inductor_compiles_a_layer():
    sch = create_schedule(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.Tanh()))
    plain, x = copy.deepcopy(sch.mod), torch.randn(2, 4)
    sch["0"].compile()
    torch.testing.assert_close(sch.mod(x), plain(x))


def test_a_plan_compiles_each_layer_after_its_other_steps():
    sch = create_schedule(odd_transformers.seeded("Harbour"))
    with Verify(sch, INPUTS):
        apply_plan(sch, "pp2 mb1 recompute=operators", INPUTS, compiler="aot_eager")
    steps = [(step.op, step.path) for step in sch.metadata.journal if step.op in ("checkpoint", "compile")]
    layers = ["boats.0", "boats.1"]
    assert steps == [("checkpoint", path) for path in layers] + [("compile", path) for path in layers]


def test_what_cannot_be_compiled_is_refused_at_once():
    sch = create_schedule(odd_transformers.seeded("Harbour"))
    node = sch["boats.0"]
    with pytest.raises(ArgumentError, match="torch has no compiler 'inductr'; close: 'inductor'"):
        node.compile("inductr")
    with pytest.raises(ArgumentError, match="mode is 'fast'; expected one of default, reduce-overhead"):
        node.compile("inductor", mode="fast")
    with pytest.raises(ArgumentError, match=r"mode is 'default'; expected .* with inductor"):
        node.compile("aot_eager", mode="default")
    assert not sch.metadata.journal
    node.compile("aot_eager")
    with pytest.raises(ConflictError, match=r"already compiled, conflicts with step 1: compile\(backend="):
        node.compile("aot_eager")
    with pytest.raises(ConflictError, match="'the module' is compiled already, which hides its operators"):
        node.checkpoint(keep="mm")


@pytest.mark.parametrize("is_there", [False, True])
def test_a_machine_without_a_compiler_that_works_is_refused_in_one_line(is_there, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if is_there:
        (tmp_path / "g++").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "g++").chmod(0o755)
    model = odd_transformers.seeded("Harbour")
    with pytest.raises(ArgumentError, match=r"inductor cannot compile here, there is no C\+\+ compiler that"):
        create_schedule(model)["boats.0"].compile()
    with pytest.raises(ArgumentError, match="apply_plan: inductor cannot compile here"):
        apply_plan(model, "mb1", INPUTS, compiler="inductor")
    reason = compiling.why_no_inductor(torch.device("xpu"))
    assert reason in ("", "triton is not installed, for xpu")
