"""The tree of a schedule, its paths, the registry of primitives, the journal and the printed form."""

import copy
import json
import re

import pytest

torch = pytest.importorskip("torch")

from schedules import Block, Toy, check_invariants, same_state, state_of, tokens, toy
from torch import nn

from makespan.errors import MakespanError
from makespan.slapo import (
    ConflictError,
    KindError,
    MemberError,
    PathError,
    Primitive,
    ReplayError,
    create_schedule,
    list_primitives,
    register_primitive,
    replay,
    schedule as _registry,
)
from makespan.slapo.schedule import digest


@pytest.fixture
def sch():
    return create_schedule(toy())


@pytest.fixture
def registered(monkeypatch):
    """Return the decorator; what it registers is forgotten after the test."""
    list_primitives()
    monkeypatch.setattr(_registry, "_PRIMITIVES", dict(_registry._PRIMITIVES))
    return register_primitive()


def primitive(called, apply, **members):
    body = {"name": classmethod(lambda cls: called), "apply": classmethod(apply), **members}
    return type(called.title(), (Primitive,), body)


# --- tree and paths ----------------------------------------------------------------------


def test_the_tree_has_a_node_for_every_module_that_is_called(sch):
    check_invariants(sch)
    assert list(sch.child) == ["embedding", "stages.0", "stages.1", "heads.words", "heads.pairs"]
    assert list(sch["stages.1.blocks.0"].child) == ["attention", "norm", "ffn"]
    assert list(sch["stages.1.blocks.0.ffn"].child) == ["0", "1", "2"]
    assert sch["stages.1.blocks.0.ffn.1"].mod is sch.mod.stages[1].blocks[0].ffn[1]
    assert sch["stages.1"]["blocks.0"]["ffn"]["1"] is sch["stages.1.blocks.0.ffn.1"]
    assert sch[""] is sch and sch["stages.0"][""] is sch["stages.0"]
    assert sch["stages.0.blocks.1"].root is sch.get_top_schedule() is sch
    assert sch.get_module("heads.words") is sch.mod.heads["words"]
    assert (sch.group, sch.world_size, sch.rank) == (None, 1, 0)
    assert sch.metadata.ties == [("embedding.weight", "heads.words.weight")]


def test_nodes_are_listed_owners_first(sch):
    paths = [path for path, _ in sch["stages.0.blocks.0"].named_schedules()]
    head = "stages.0.blocks.0"
    assert paths[:4] == [head, f"{head}.attention", f"{head}.attention.query", f"{head}.attention.key"]


def test_a_list_of_lists_and_a_root_that_is_a_list_have_nodes_for_their_elements():
    root = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]), nn.ModuleList([])])
    sch = create_schedule(root)
    check_invariants(sch)
    assert list(sch.child) == ["0.0", "0.1"]
    assert sch["0.1"].mod is root[0][1]


def test_layers_of_torch_are_leaves_and_subclasses_are_not():
    class Own(nn.MultiheadAttention):
        pass

    model = nn.Sequential(nn.MultiheadAttention(4, 2), Own(4, 2), nn.TransformerEncoderLayer(4, 2))
    assert [path for path, _ in create_schedule(model).named_schedules()] == ["", "0", "1", "1.out_proj", "2"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("stages", "ModuleList.*index an element, 'stages.0', 'stages.1'"),
        ("stages.0.blocks", "'stages.0.blocks'.*index an element, 'stages.0.blocks.0'"),
        ("heads", "ModuleDict.*'heads.words', 'heads.pairs'"),
        ("stages.2", "ModuleList at 'stages' has no '2'"),
        (
            "stages.0.blocks.1.attentions",
            "Block at 'stages.0.blocks.1' has no 'attentions'; close: 'attention'",
        ),
        ("stage.0", "Toy has no 'stage'; close: 'stages"),
        ("stages.0.blocks.0.ffn.3", "Sequential at 'stages.0.blocks.0.ffn' has no '3'; known: '0', '1', '2'"),
        ("embedding.weight", "Embedding at 'embedding' has no 'weight'"),
        ("xyz", "Toy has no 'xyz'; known: 'embedding', 'stages.0'"),
        (".", "no module '.'"),
        ("stages..blocks", "no module 'stages..blocks'"),
    ],
)
def test_a_wrong_path_says_where_it_stops_and_what_is_near(sch, path, words):
    with pytest.raises(KeyError, match=words) as caught:
        sch[path]
    assert isinstance(caught.value, PathError) and isinstance(caught.value, MakespanError)
    assert not str(caught.value).startswith(("'", '"'))
    assert path not in sch


def test_the_inside_of_a_layer_of_torch_is_named_as_such():
    sch = create_schedule(nn.Sequential(nn.MultiheadAttention(4, 2)))
    with pytest.raises(
        PathError, match=r"'0.out_proj'.*MultiheadAttention at '0' is a layer of torch.nn or a script"
    ):
        sch["0.out_proj"]


def test_membership_agrees_with_indexing(sch):
    paths = [path for path, _ in sch.mod.named_modules()]
    for path in [*paths, "stages.9", "embedding.0", "heads.", 3, None]:
        try:
            sch[path]
        except (KeyError, TypeError):
            assert path not in sch
        else:
            assert path in sch
    with pytest.raises(KindError, match="not with 3"):
        sch[3]


def test_a_module_at_two_places_has_one_node_that_both_paths_lead_to():
    act, block = nn.ReLU(), Block(4)
    model = nn.Sequential(block, act, nn.Sequential(act, block))
    sch = create_schedule(model)
    check_invariants(sch)
    assert sch["2.0"] is sch["1"] and sch["2.1.attention.query"] is sch["0.attention.query"]
    sch["2.0"].replace(nn.GELU())
    check_invariants(sch)
    assert model[1] is model[2][0] and isinstance(model[1], nn.GELU)
    with pytest.raises(PathError):
        sch["2.1.attention.nothing"]


def test_a_schedule_is_made_of_modules_only_and_below_a_parent_that_holds_them(sch):
    with pytest.raises(TypeError, match=r"got dict; expected a torch.nn.Module"):
        create_schedule({})
    with pytest.raises(ValueError, match="need a parent"):
        create_schedule(nn.ReLU(), path="a")
    with pytest.raises(KeyError, match="has no ReLU 'act'"):
        create_schedule(nn.ReLU(), name="act", parent=sch)
    sch.mod.extra = nn.ReLU()
    assert create_schedule(sch.mod.extra, name="extra", parent=sch) is sch["extra"]
    check_invariants(sch)


def test_parameters_are_neither_copied_nor_made(sch):
    before = {name: id(one) for name, one in sch.mod.named_parameters()}
    with torch.device("meta"):
        create_schedule(Toy())
    create_schedule(sch.mod)
    assert before == {name: id(one) for name, one in sch.mod.named_parameters()}


def test_a_deep_copy_is_a_tree_of_its_own(sch):
    sch["stages.0.blocks.0"].checkpoint()
    sch["stages.0.blocks.0.attention"].set_attr(heads=4)
    new = copy.deepcopy(sch)
    check_invariants(new)
    assert new.mod is not sch.mod and str(new) == str(sch)
    assert new["stages.0.blocks.0"].mod.forward.inner.__self__ is new["stages.0.blocks.0"].mod
    new["stages.0.blocks.1"].checkpoint()
    assert len(sch.metadata.journal) == 2 and len(new.metadata.journal) == 3
    below = copy.deepcopy(sch["stages.0.blocks.0"])
    assert below.path == "stages.0.blocks.0" and below.root is not sch
    data = tokens()
    for one, other in zip(sch.mod.eval()(data), new.mod.eval()(data), strict=True):
        assert torch.equal(one, other)


# --- registry ----------------------------------------------------------------------------


def test_own_primitives_are_methods_of_every_schedule(sch, registered):
    def apply(cls, sch, times, *, name="w"):
        sch.metadata.slots[cls.name()].setdefault(sch.path, []).append((times, name))
        return times * 2

    own = registered(primitive("double_it", apply))
    assert "double_it" in list_primitives() and list_primitives(name_only=False)["double_it"] is own
    assert sch["stages.0"].double_it(4, name="v") == 8
    assert sch.metadata.slots["double_it"] == {"stages.0": [(4, "v")]}
    (entry,) = sch.metadata.journal
    assert (entry.op, entry.path, dict(entry.arguments)) == (
        "double_it",
        "stages.0",
        {"times": 4, "name": "v"},
    )
    assert str(entry) == "double_it(times=4, name='v') at 'stages.0'" and entry.seconds > 0


def test_every_built_in_primitive_is_on_its_page_and_shown_by_its_module(root):
    page = (root / "docs" / "reference" / "primitives.md").read_text()
    built_in = {
        name: one
        for name, one in list_primitives(name_only=False).items()
        if one.__module__.startswith("makespan.")
    }
    assert re.findall(r"^## (\w+)$", page, re.M) == list(built_in)
    for name, one in built_in.items():
        assert one.name() == name and one.__doc__ and one.apply.__doc__


def test_what_is_no_primitive_cannot_be_registered(registered):
    with pytest.raises(ValueError, match="expected a subclass of Primitive"):
        registered(int)
    with pytest.raises(ValueError, match="'replace' is registered already, by Replace"):
        registered(primitive("replace", lambda cls, sch: None))
    for name in ("child", "mod", "rebuild", "dump"):
        with pytest.raises(ValueError, match="member of that name"):
            registered(primitive(name, lambda cls, sch: None))
    for name in ("a b", "_hidden", ""):
        with pytest.raises(ValueError, match="expected an identifier"):
            registered(primitive(name, lambda cls, sch: None))


def test_an_unknown_primitive_is_named_with_close_ones(sch):
    with pytest.raises(AttributeError, match="no primitive 'checkpoints'; close: 'checkpoint'"):
        sch.checkpoints()
    with pytest.raises(MemberError):
        sch.metadata.slots["nothing"]
    assert not hasattr(sch, "_private")


def test_a_call_that_does_not_fit_names_the_arguments_that_do(sch):
    with pytest.raises(
        TypeError, match=r"annotate of 'embedding': missing.*expected annotate\(param: str, key"
    ):
        sch["embedding"].annotate("weight", "role")
    assert sch.metadata.journal == []


def test_only_the_outer_of_nested_primitives_is_a_step_and_a_query_is_none(sch, registered):
    registered(
        primitive("both", lambda cls, sch: [sch.bind(x=1), sch["embedding"].annotate("weight", "role", 1)])
    )
    registered(primitive("look", lambda cls, sch: sch.bind(y=2), is_query=classmethod(lambda cls: True)))
    sch.both()
    sch.look()
    assert [entry.op for entry in sch.metadata.journal] == ["both", "bind"]


def test_a_failed_primitive_leaves_no_trace(sch, registered):
    def ruin(cls, sch, error):
        mod = sch.mod
        mod.attention, mod.heads = nn.Linear(2, 2), 3
        del mod.ffn
        mod.norm.weight.tag = "lost"
        mod.norm.weight.requires_grad_(False)
        mod.norm.__class__ = nn.GroupNorm
        mod.norm.register_forward_hook(lambda *_: None)
        mod.register_buffer("noise", torch.ones(2))
        sch.bind(inner=1)
        sch.rebuild()
        sch.metadata.tags.add("lost")
        sch.metadata.slots[cls.name()]["x"] = 1
        sch.metadata.ties.clear()
        raise error

    registered(primitive("ruin", ruin))
    node = sch["stages.1.blocks.1"]
    handle = node.mod.norm.register_forward_hook(lambda *_: None)
    node.bind(before=1)
    before, keys = state_of(sch), list(sch.mod.state_dict())
    for error in (ValueError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            node.ruin(error)
        check_invariants(sch)
        assert same_state(before, state_of(sch))
        assert list(sch.mod.state_dict()) == keys
    handle.remove()
    assert not node.mod.norm._forward_hooks


def test_a_node_that_is_gone_or_bypassed_is_refused(sch):
    inner = sch["stages.0.blocks.0.ffn.1"]
    sch["stages.0.blocks.0.ffn"].replace(nn.Linear(8, 8))
    with pytest.raises(ConflictError, match=r"checkpoint of 'stages.0.blocks.0.ffn.1'.*step 1: replace\("):
        inner.checkpoint()
    sch.mod.stages[0].blocks[1].ffn = nn.Linear(8, 8)
    with pytest.raises(RuntimeError, match="changed there without the schedule; call rebuild"):
        sch["stages.0.blocks.1.ffn"].checkpoint()
    sch.rebuild()
    check_invariants(sch)
    sch["stages.0.blocks.1.ffn"].checkpoint()


def test_nodes_that_stay_keep_their_identity(sch):
    before = dict(sch.named_schedules())
    sch["stages.0.blocks.0.ffn.1"].replace(nn.ReLU())
    sch.rebuild()
    assert before == dict(sch.named_schedules())


# --- printing, journal, replay -----------------------------------------------------------


def relu_for(path, old, inplace=False):
    return nn.ReLU(inplace)


def scheduled(model):
    sch = create_schedule(model)
    sch.bind(batch=8, ckpt_ratio=0.5)
    sch.replace_all(nn.GELU, relu_for, inplace=True)
    for index in (0, 1):
        block = sch[f"stages.{index}.blocks.0"]
        block["attention"].set_attr(heads=1)
        block["attention.query"].annotate("weight", "role", "projection")
        block["ffn.0"].decompose()
        block.fork_rng()
    sch["heads.pairs"].replace(widened)
    sch["stages.1.blocks.1"].checkpoint(preserve_rng=False)
    return sch


def widened(old):
    return nn.Sequential(old, nn.Identity())


def test_a_schedule_prints_readably(golden):
    golden(str(scheduled(toy())))


def test_equal_siblings_are_printed_once(golden):
    sch = create_schedule(toy(n_stages=1, n_blocks=12))
    for index in range(6):
        sch[f"stages.0.blocks.{index}"].checkpoint()
    golden(str(sch))


def test_what_was_done_to_a_module_that_is_gone_is_printed_at_its_owner(sch):
    sch["heads.pairs"].checkpoint()
    sch["stages.0.blocks.0.ffn.0"].decompose()
    sch["stages.0.blocks.0.ffn"].replace(nn.Identity())
    lines = [line.strip() for line in str(sch).splitlines()]
    assert "| 0: decompose()" in lines and "| checkpoint()" in lines
    assert repr(sch["stages.0"]) == "<Schedule 'stages.0': Stage>"
    assert str(sch["heads.pairs"]).splitlines()[0] == repr(sch.mod.heads["pairs"])


def test_the_journal_repeats_a_schedule_on_a_fresh_model():
    first = scheduled(toy())
    text = first.dump()
    assert json.loads(text)["steps"][0]["arguments"] == {"batch": 8, "ckpt_ratio": 0.5}
    for journal in (text, first.metadata.journal):
        second = replay(toy(), journal)
        check_invariants(second)
        assert str(second) == str(first)
        assert digest(second.metadata.journal) == digest(first.metadata.journal)
        data = tokens()
        for one, other in zip(first.mod.eval()(data), second.mod.eval()(data), strict=True):
            assert torch.equal(one, other)


def test_steps_that_differ_have_another_digest(sch):
    empty = digest(sch.metadata.journal)
    sch.bind(x=1)
    one = digest(sch.metadata.journal)
    sch["stages.0"].bind(y=1)
    assert len({empty, one, digest(sch.metadata.journal)}) == 3


def test_what_a_journal_cannot_hold_must_be_given(sch):
    sch["heads.pairs"].replace(nn.Linear(8, 3))
    sch.replace_all(nn.GELU, lambda path, old: nn.ReLU())
    with pytest.raises(
        ReplayError, match=r"step 1 of the journal, replace at 'heads.pairs'.*cannot hold a .*Linear"
    ):
        replay(toy(), sch.dump())
    with pytest.raises(RuntimeError, match=r"step 2.*defined inside a function"):
        replay(toy(), sch.dump(), given={1: {"new_mod_or_func": nn.Linear(8, 3)}})
    given = {1: {"new_mod_or_func": nn.Linear(8, 3)}, 2: {"make_mod_fn": relu_for}}
    assert replay(toy(), sch.dump(), given=given)["heads.pairs"].mod.out_features == 3


def test_a_journal_holds_small_tensors_and_no_large_ones(sch):
    kept = {
        "words": torch.tensor([[1, 2], [3, -4]]), "seen": torch.tensor([True, False]),
        "half": torch.tensor([0.1, float("nan")], dtype=torch.bfloat16), "none": torch.empty(0, 3),
        "one": torch.tensor(1.5),
    }  # fmt: skip
    sch.bind(example=kept)
    assert str(sch.metadata.journal[0]).count("<Tensor>") == len(kept)
    again = replay(toy(), sch.dump())
    for name, tensor in again.metadata.slots["bind"]["example"].items():
        assert tensor.dtype == kept[name].dtype
        torch.testing.assert_close(tensor, kept[name], rtol=0, atol=0, equal_nan=True)
    other = create_schedule(toy())
    other.bind(example={name: torch.zeros_like(tensor) for name, tensor in kept.items()})
    assert digest(other.metadata.journal) == digest(sch.metadata.journal) != digest([])
    damaged = json.loads(sch.dump())
    damaged["steps"][0]["arguments"]["example"]["words"]["$tensor"]["shape"] = [3, 3]
    with pytest.raises(ReplayError, match=r"step 1.*a tensor of shape \[3, 3\] and type 'int64' is damaged"):
        replay(toy(), json.dumps(damaged))
    large = create_schedule(toy())
    large.bind(example=torch.zeros(2**19))
    with pytest.raises(ReplayError, match="cannot hold a torch:Tensor; pass it in given"):
        replay(toy(), large.dump())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no", "not a journal"),
        ("{}", "not a journal"),
        ('{"steps": [{"op": "fly", "path": "", "arguments": {}}]}', "step 1.*no primitive 'fly'"),
        ('{"steps": [{"op": "bind", "path": "x", "arguments": {}}]}', "step 1.*Toy has no 'x'"),
        ('{"steps": [{"op": "checkpoint", "path": "", "arguments": {"a": 1}}]}', "step 1.*unexpected"),
    ],
)
def test_a_bad_journal_is_refused_with_its_step(text, words):
    with pytest.raises(ReplayError, match=words):
        replay(toy(), text)


def test_a_conflict_quotes_the_nearest_step(sch):
    block = sch["stages.0.blocks.0"]
    block["ffn.0"].decompose()
    block.checkpoint()
    sch["stages.0"].bind(x=1)
    assert block.conflict("checkpoint") == "conflicts with step 2: checkpoint() at 'stages.0.blocks.0'"
    assert block["ffn"].conflict("checkpoint").endswith("step 2: checkpoint() at 'stages.0.blocks.0'")
    assert sch["heads.pairs"].conflict("shard") == "conflicts with shard of 'heads.pairs' in the same step"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_modules_of_any_make_can_stand_in_a_model(registered):
    class Frozen(dict):
        """A dictionary as configurations use them."""

        def _refuse(self, *args):
            raise TypeError("frozen")

        clear = update = copy = _refuse

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.options = Frozen(width=2)
            self.scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
            self.lazy = nn.LazyLinear(2)
            self.compiled = torch.compile(nn.Linear(2, 2), backend="eager")

        def forward(self, data):
            return self.compiled(self.lazy(self.normed(self.scripted(data))))

    registered(primitive("failing", lambda cls, sch: sch.bind(nothing=[].pop())))
    sch = create_schedule(Odd())
    check_invariants(sch)
    assert {"scripted", "normed", "lazy", "compiled"} <= set(sch.child)
    assert not sch["normed"].child and not sch["scripted"].child
    with pytest.raises(PathError, match=r"'scripted' is a layer of torch.nn or a script"):
        sch["scripted.0"]
    for _, node in list(sch.named_schedules()):
        with pytest.raises(IndexError):
            node.failing()
    sch["scripted"].replace(nn.Identity())
    sch["lazy"].checkpoint()
    sch.mod(torch.ones(1, 2)).sum().backward()
    check_invariants(sch)


# --- warnings ----------------------------------------------------------------------------


def replaced(sch):
    sch["heads.words"].replace(copy.deepcopy(sch["heads.words"].mod).double())


def renamed(sch):
    sch["heads.words"].replace(copy.deepcopy(sch["heads.words"].mod), name="other")


def recomputed_twice(sch):
    sch["stages.0"].checkpoint()
    sch["stages.0.blocks.0"].checkpoint()


def untraced(sch):
    sch["stages.0.blocks.0.attention"].replace(Branch())
    sch["stages.0.blocks.0.attention"].trace(strict=False)


class Branch(nn.Module):
    """A forward that depends on values, which no graph can hold."""

    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("steps", [replaced, renamed, recomputed_twice, untraced])
def test_a_warning_names_the_line_of_the_schedule(sch, steps):
    with pytest.warns(UserWarning) as caught:
        steps(sch)
    lines = range(steps.__code__.co_firstlineno, steps.__code__.co_firstlineno + 5)
    assert all(one.filename == __file__ and one.lineno in lines for one in caught)
