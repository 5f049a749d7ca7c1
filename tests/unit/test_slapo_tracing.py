"""Static graphs of modules: what is captured, what stays opaque, and what a captured module still accepts."""

import copy
import functools
import random
import re
import sys
import types
import warnings
from collections import OrderedDict
from dataclasses import dataclass

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from schedules import Toy, check_invariants, same_state, state_of, tokens, toy
from torch import nn
from torch.nn import functional as F

from makespan.slapo import ArgumentError, TracingError, call_module, create_schedule, partition
from makespan.slapo.graphs import TracedModule


class Mixed(nn.Module):
    """Buffers, constants, an unused parameter, modes, and an argument that may be missing."""

    def __init__(self):
        super().__init__()
        self.linear, self.width = nn.Linear(4, 4), 4
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, data, mask=None, *, scaled=True):
        hidden = self.linear(data) + self.shift * torch.tensor(2.0)
        if mask is not None:
            hidden = hidden + mask
        if scaled:
            hidden = hidden / self.width
        return F.dropout(hidden, 0.5, self.training)


class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rest = Mixed(), nn.ModuleList(Mixed() for _ in range(2))

    def forward(self, data, mask=None):
        hidden = self.first(data, mask, scaled=False)
        for one in self.rest:
            hidden = one(hidden)
        return hidden


class Branches(nn.Module):
    """Branches on a value: it has no static graph."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, data):
        if data.sum() > 0:
            return self.inner(data)
        return data


class ByMode(Branches):
    def forward(self, data):
        return self.inner(data) if self.training else data


class Draws(Branches):
    def forward(self, data):
        return self.inner(data) * torch.rand(4)


class Assigns(nn.Module):
    """Its forward writes a buffer and an attribute of a module in it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(4, 4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, data):
        self.seen = self.seen + data.sum(0)
        self.linear.last = data
        return self.linear(data)


class Counts(Branches):
    """Its forward counts its calls in an attribute, a list and a dictionary."""

    def __init__(self):
        super().__init__()
        self.calls, self.log, self.totals = 0, [], {"calls": 0}

    def forward(self, data):
        self.calls += 1
        self.log.append(data)
        self.totals["calls"] += 1
        return self.inner(data) * self.calls


class Decays(Branches):
    """Its forward changes a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.share = torch.ones(4)

    def forward(self, data):
        return self.inner(data) * self.share.mul_(0.5)


class Skips(Branches):
    """It skips its layer at random, as with layer drop."""

    def forward(self, data):
        return data if random.random() < 0.5 else self.inner(data)


class DrawsInNumpy(Branches):
    def forward(self, data):
        return self.inner(data) * np.random.rand()  # noqa: NPY002 - models draw from it


class Detaches(Branches):
    def forward(self, data):
        with torch.no_grad():
            share = self.inner(data)
        return self.inner(data) * share


class Lowers(Branches):
    def forward(self, data):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(data)


class Masks(Branches):
    """It makes a mask without gradients, of what has none."""

    def forward(self, data):
        with torch.no_grad():
            places = torch.arange(data.size(-1), device=data.device)
            mask = (places < 3) & (data != 0)
        return self.inner(data) * mask


@pytest.fixture
def data():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def owner(kind=Owner):
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("inputs", [(), ("mask",)])
def test_a_traced_model_computes_the_same_in_both_modes(data, flatten, inputs):
    model = owner()
    reference, keys = copy.deepcopy(model), list(model.state_dict())
    sch = create_schedule(model)
    assert sch.trace(flatten=flatten, inputs=inputs) is True
    check_invariants(sch)
    given = (data,) * (1 + len(inputs))
    for training in (True, False):
        for module in (reference.train(training), sch.mod.train(training)):
            torch.manual_seed(3)
            module.zero_grad()
            module(*given).sum().backward()
        torch.manual_seed(4)
        wanted = reference(*given)
        torch.manual_seed(4)
        assert torch.equal(sch.mod(*given), wanted)
    assert list(sch.mod.state_dict()) == keys
    grads = dict(reference.named_parameters())
    for name, one in sch.mod.named_parameters():
        assert torch.equal(one.grad, grads[name].grad) if one.grad is not None else grads[name].grad is None
    assert torch.equal(copy.deepcopy(sch.mod)(*given), wanted)


def test_the_hierarchy_stays_and_every_level_has_its_graph():
    sch = create_schedule(toy())
    paths = [path for path, _ in sch.named_schedules()]
    sch.trace()
    assert [path for path, _ in sch.named_schedules()] == paths
    assert isinstance(sch["stages.1.blocks.0.attention"].mod, TracedModule)
    assert type(sch["stages.1.blocks.0.attention"].mod).__name__ == "Attention"
    assert not isinstance(sch["embedding"].mod, TracedModule)
    torch.testing.assert_close(sch.mod.eval()(tokens()), toy().eval()(tokens()))


def test_tracing_twice_changes_nothing():
    sch = create_schedule(toy())
    sch.trace()
    before = state_of(sch)
    assert sch.trace(flatten=True) is True
    after = state_of(sch)
    assert before[0][:3] == after[0][:3]


def test_only_the_module_itself_is_traced_without_recursion():
    sch = create_schedule(toy())
    sch.trace(recursive=False)
    assert [path for path, node in sch.named_schedules() if isinstance(node.mod, TracedModule)] == [""]


def test_flattening_swallows_nodes_and_says_so():
    sch = create_schedule(toy())
    sch["stages.0"].trace(flatten=True)
    check_invariants(sch)
    assert list(sch["stages.0"].child)[:2] == ["blocks.0.attention.query", "blocks.0.attention.key"]
    with pytest.raises(KeyError, match=r"step 1 flattened it, trace\(flatten=True\) at 'stages\.0'"):
        sch["stages.0.blocks.0.attention"]


def test_a_node_below_an_untraced_owner_is_traced_alone():
    model = owner()
    sch = create_schedule(model)
    sch["rest.1"].trace(concrete_args={"scaled": False})
    check_invariants(sch)
    assert not isinstance(sch.mod, TracedModule)
    assert sch["rest.1"].mod.argument_names == ("data", "mask", "scaled")
    with pytest.raises(RuntimeError, match=r"Mixed: the argument 'scaled' was fixed to False .* got True"):
        sch["rest.1"].mod(torch.ones(4), scaled=True)
    sch["rest.1"].mod(torch.ones(4), None, False)


def test_fixed_and_varying_arguments_are_checked_at_every_call(data):
    sch = create_schedule(owner())
    sch.trace()
    with pytest.raises(RuntimeError, match=r"'mask' was fixed to None .* got a tensor of shape \(3, 4\)"):
        sch.mod(data, data)
    other = create_schedule(owner())
    other.trace(inputs="mask")
    with pytest.raises(RuntimeError, match=r"Owner: called without 'mask'; expected .* data, mask"):
        other.mod(data)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (Branches, "branches on the value of"),
        (ByMode, r"branches on self\.training"),
        (Draws, "draws random numbers"),
        (Assigns, r"it assigns seen, linear\.last, which a graph would not do"),
        (Counts, "it assigns calls, log, totals, which a graph would not do"),
        (Decays, "it assigns share, which a graph would not do"),
        (Skips, "draws random numbers"),
        (DrawsInNumpy, "draws random numbers"),
        (Detaches, r"it computes inner without gradients, as in torch\.no_grad"),
        (Lowers, r"it enters torch\.autocast"),
    ],
)
def test_what_has_no_static_graph_is_explained_and_left_alone(kind, cause):
    model = nn.Sequential(owner(kind), nn.Linear(4, 4))
    sch = create_schedule(model)
    before, rng, held = state_of(sch), torch.get_rng_state(), copy.deepcopy(vars(model[0]))
    drawn = random.getstate()
    with pytest.raises(RuntimeError) as caught:
        sch["0"].trace()
    for name in ("calls", "log", "totals", "share"):
        assert str(vars(model[0]).get(name)) == str(held.get(name))
    assert drawn == random.getstate()
    message = str(caught.value)
    assert re.search(rf"trace of '0': the forward of .*{kind.__name__} \(.*\.py:\d+\) .*{cause}", message)
    assert "concrete_args" in message and "leaf_modules" in message and "smaller subtree" in message
    assert same_state(before, state_of(sch)) and torch.equal(rng, torch.get_rng_state())
    with pytest.warns(UserWarning, match="has no static graph"):
        assert sch["0"].trace(strict=False) is False
    sch.trace()
    assert re.search(cause, sch.metadata.slots["trace"]["0"])
    assert isinstance(sch["0"].mod, kind)


def test_values_without_a_gradient_are_traced_where_gradients_are_off(data):
    sch = create_schedule(owner(Masks))
    expected = sch.mod(data)
    sch.trace()
    assert isinstance(sch.mod, TracedModule) and torch.equal(sch.mod(data), expected)


class Scaled(nn.Module):
    """An argument with a default comes before one that is passed by name."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, data, skip=None, *, scale):
        return self.linear(data) * scale if skip is None else skip


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Scaled(), Scaled()

    def forward(self, data, scale):
        return self.second(self.first(data, scale=scale), scale=scale)


def test_arguments_that_are_left_out_before_one_by_name_keep_their_default(data):
    model = owner(Scales)
    expected = model(data, data)
    sch = create_schedule(model)
    sch.trace_until(["first", "second"])
    sch["first"].cut_pipeline_stage()
    assert torch.equal(sch.mod(data, data), expected) and torch.equal(
        partition(sch).run(data, data), expected
    )
    with pytest.raises(RuntimeError, match="Scaled: called without 'scale'"):
        sch["first"].mod(data)


class Marked(Branches):
    traceable = False


@pytest.mark.parametrize("leaf", ["Branches", f"{Branches.__module__}.Branches", Branches])
def test_listed_modules_are_leaves(leaf):
    sch = create_schedule(nn.Sequential(Branches(), Mixed(), Marked()))
    sch.trace(flatten=True, leaf_modules=[leaf, "Marked"])
    assert list(sch.child) == ["0", "1.linear", "2"]


def test_what_is_wrapped_or_hooked_is_a_leaf():
    sch = create_schedule(toy())
    sch["stages.0.blocks.0"].checkpoint()
    sch["stages.0.blocks.1"].mod.register_forward_hook(lambda *_: None)
    sch["stages.0"].trace(flatten=True)
    assert [name for name in sch["stages.0"].child if name.count(".") == 1] == ["blocks.0", "blocks.1"]
    with pytest.raises(RuntimeError, match=r"its forward is wrapped, conflicts with step 1: checkpoint\(\)"):
        sch["stages.0.blocks.0"].trace()


def test_hooks_run_once_and_their_handles_work_after_tracing(data):
    model, calls = owner(), []
    handle = model.first.register_forward_hook(lambda *_: calls.append("after"))
    model.first.register_forward_pre_hook(lambda *_: calls.append("before"))
    sch = create_schedule(model)
    sch.trace()
    sch.mod(data)
    assert calls == ["before", "after"]
    handle.remove()
    sch.mod(data)
    assert calls == ["before", "after", "before"]


def test_a_decomposed_layer_with_hooks_stands_in_the_graph_of_its_owner(data):
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), []
    expected = model(data + 1)
    sch = create_schedule(model)
    sch["0"].decompose()
    sch["0"].mod.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    sch["0"].mod.register_forward_hook(lambda _, args, kwargs, output: calls.append(output), with_kwargs=True)
    sch.trace()
    assert len(sch.find_node(lambda node: "linear" in str(node.target))) == 1
    torch.testing.assert_close(sch.mod(data), expected)
    assert len(calls) == 1


def test_a_module_that_is_called_in_different_ways_stays_opaque():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = Mixed()

        def forward(self, data):
            return self.one(data) + self.one(data, data)

    sch = create_schedule(Twice())
    sch.trace()
    assert "calls pass different arguments" in sch.metadata.slots["trace"]["one"]


def test_a_module_may_be_named_self():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.self, self.output = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, data):
            return self.output(self.self(data))

    sch = create_schedule(Named())
    expected = sch.mod(torch.ones(4))
    sch.trace()
    assert torch.equal(sch.mod(torch.ones(4)), expected)
    sch.fuse(sch.find(lambda x: call_module("output", call_module("self", x))), compiler=None)
    assert torch.equal(sch.mod(torch.ones(4)), expected)


def test_a_shared_module_has_one_graph():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = Mixed()
            self.again = nn.ModuleList([self.one])

        def forward(self, data):
            return self.again[0](self.one(data))

    sch = create_schedule(Shared().eval())
    expected = sch.mod(torch.ones(4))
    sch.trace()
    check_invariants(sch)
    assert sch.mod.again[0] is sch.mod.one
    assert torch.equal(sch.mod(torch.ones(4)), expected)


# --- structured outputs, functions that are leaves ------------------------------------------


@dataclass
class Output(OrderedDict):
    hidden: torch.Tensor
    extra: torch.Tensor | None = None

    def __post_init__(self):
        self.update(hidden=self.hidden)


def test_a_structured_output_keeps_its_class():
    class Model(nn.Module):
        def forward(self, data):
            return Output(hidden=data + 1)

    sch = create_schedule(Model())
    sch.trace()
    found = sch.mod(torch.ones(2))
    assert type(found) is Output and torch.equal(found.hidden, torch.full((2,), 2.0)) and found.extra is None


@pytest.fixture
def helpers():
    """Two modules: the second has its own name for a function of the first."""
    spaces = {}
    for name, source in {
        "slapo_masks": (
            "def build(data, config):\n    return data if float(data.sum()) > config.limit else -data\n"
        ),
        "slapo_models": (
            "from slapo_masks import build as make\n"
            "def inner(self, data):\n    return make(data, self.config) * 2\n"
        ),
    }.items():
        module = spaces[name] = sys.modules[name] = types.ModuleType(name)
        exec(source, vars(module))
    yield spaces["slapo_models"]
    for name in spaces:
        del sys.modules[name]


def test_leaf_functions_are_recorded_behind_decorators_and_under_other_names(helpers):
    def decorated(function):
        @functools.wraps(function)
        def call(self, *args):
            return function(self, *args)

        return call

    class Model(nn.Module):
        config = types.SimpleNamespace(limit=0.0)
        forward = decorated(helpers.inner)

    before = helpers.make
    sch = create_schedule(Model())
    with pytest.raises(RuntimeError):
        sch.trace()
    sch.trace(leaf_functions=["slapo_masks.build"])
    assert helpers.make is before
    for sign in (1.0, -1.0):
        assert torch.equal(sch.mod(torch.full((2,), sign)), torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"concrete_args": {"masc": None}}, ValueError, r"no argument 'masc'; close: 'mask'"),
        ({"concrete_args": {"mask": None}, "inputs": ["mask"]}, ValueError, "in concrete_args and in inputs"),
        ({"tracer": "jit"}, ValueError, r"tracer is 'jit'; expected 'fx'"),
        ({"leaf_modules": [3]}, TypeError, "leaf_modules has 3; expected"),
        ({"leaf_functions": [3]}, TypeError, "leaf_functions has 3; expected"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_traced(arguments, kind, words):
    sch = create_schedule(owner())
    before = state_of(sch)
    with pytest.raises(kind, match=words):
        sch.trace(**arguments)
    assert same_state(before, state_of(sch))


# --- what models of other packages do -----------------------------------------------------


@dataclass
class Config:
    """Options of a model; what is no field of it counts, too."""

    width: int = 4

    def __post_init__(self):
        self.offset = 0.0


def with_defaults(forward):
    """Fill in an argument by its name, as decorators of model libraries do."""

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        kwargs["cached"] = self.config.width > 0
        return forward(self, *args, **kwargs)

    return wrapper


def masked(config, hidden):
    """Make a mask, as a function that no graph looks into."""
    return torch.full_like(hidden, config.offset)


class Library(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.linear = Config(), nn.Linear(4, 4)

    @with_defaults
    def forward(self, data=None, mask=None, cached=None, **more):
        hidden = self.linear(data) + masked(self.config, data)
        return hidden * (2.0 if more.get("doubled") else 1.0) + (1.0 if cached else 0.0)


class User(nn.Module):
    def __init__(self):
        super().__init__()
        self.library = Library()
        self.library.config.offset = 3.0

    def forward(self, data):
        return self.library(data, mask=None, doubled=True)


def test_further_keyword_arguments_names_and_configurations_reach_a_forward():
    model, data = User(), torch.randn(2, 4)
    expected = model(data)
    sch = create_schedule(model)
    sch.trace_until("library", leaf_functions=[masked])
    assert [one.target for one in sch["library"].mod.graph.find_nodes(op="call_function", target=masked)]
    torch.testing.assert_close(sch.mod(data), expected)
    with pytest.raises(RuntimeError, match="'doubled' was fixed to True when it was traced; got False"):
        sch["library"].mod(data, doubled=False)


# --- on the way to a cut -----------------------------------------------------------------


def test_only_what_leads_to_the_paths_is_traced():
    sch = create_schedule(toy())
    assert sch.trace_until(["stages.1.blocks.0", "stages.0"])
    check_invariants(sch)
    traced = [path for path, node in sch.named_schedules() if isinstance(node.mod, TracedModule)]
    assert traced == ["", "stages.0", "stages.1", "stages.1.blocks.0"]
    torch.testing.assert_close(sch.mod.eval()(tokens()), toy().eval()(tokens()))


def test_the_way_is_refused_where_it_does_not_start_or_end():
    sch = create_schedule(nn.Sequential(OrderedDict(a=nn.Sequential(Branches()), b=nn.Linear(4, 4))))
    with pytest.raises(RuntimeError, match=r"trace_until of 'a': expected the root"):
        sch["a"].trace_until("")
    with pytest.raises(RuntimeError, match=r"trace of 'a\.0': .* has no static graph"):
        sch.trace_until("a.0")
    assert not isinstance(sch.mod, TracedModule)
    sch.trace_until("a")
    with pytest.raises(
        RuntimeError, match=r"traced already, conflicts with step 1: trace_until\(paths='a'\)"
    ):
        sch.trace_until("a")


def test_the_modules_of_a_large_model_are_traced_on_meta():
    with torch.device("meta"):
        model = Toy(hidden=64, n_stages=3, n_blocks=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sch = create_schedule(model)
        sch.trace()
    check_invariants(sch)
    assert not sch.metadata.slots["trace"]


class ByKeyword(nn.Module):
    """A model as libraries write them: every argument has a default."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, ids=None, embeds=None, flags=None, scale=1.0):
        return self.inner(embeds if ids is None else ids) * scale


def test_a_model_of_which_nothing_would_vary_is_refused_at_once():
    words = "every argument has a default, so that all would be fixed.*vary in inputs.*ids, embeds, flags"
    for start in (
        lambda sch: sch.trace(),
        lambda sch: sch.trace(flatten=True),
        lambda sch: sch.trace(concrete_args={"scale": 2.0}),
        lambda sch: sch.trace_until("inner"),
        lambda sch: sch.find(lambda x: x + 1),
    ):
        sch = create_schedule(ByKeyword())
        with pytest.raises(TracingError, match=words):
            start(sch)
        assert isinstance(sch.mod, ByKeyword) and not sch.metadata.journal
    sch = create_schedule(ByKeyword())
    with pytest.warns(UserWarning, match=words):
        assert sch.trace(strict=False) is False
    assert sch.trace(inputs="ids")
    rows = torch.randn(2, 4)
    assert torch.equal(sch.mod(ids=rows), ByKeyword.forward(sch.mod, rows))


def test_a_model_without_arguments_is_traced():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self):
            return self.weight * 2

    sch = create_schedule(Table())
    assert sch.trace() and torch.equal(sch.mod(), 2 * torch.ones(3))


def test_messages_name_shapes_and_never_print_tensors():
    class Turns(nn.Module):
        def forward(self, hidden, angles=None, table=None):
            return hidden if angles is None else hidden * angles[0] + angles[1]

    sch = create_schedule(Turns())
    sch.trace()
    pair = (torch.randn(50, 50), torch.randn(50, 50))
    with pytest.raises(TracingError) as caught:
        sch.mod(torch.randn(50, 50), angles=pair)
    assert "got (a tensor of shape (50, 50), float32, a tensor of shape (50, 50), float32)" in str(
        caught.value
    )
    for value in ({"one": pair, "more": list(range(100))}, [*pair, *pair, *pair], "long " * 1000):
        with pytest.raises(TracingError) as caught:
            sch.mod(torch.randn(50, 50), angles=value)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize("make", ["ones", "zeros", "empty", "randn", "rand", "full", "arange"])
def test_tensors_of_sizes_that_stand_by_themselves_are_traced(make):
    class Makes(nn.Module):
        def forward(self, rows):
            sizes = (rows.shape[0], rows.shape[1])
            if make == "full":
                made = torch.full(sizes, 2.0)
            elif make == "arange":
                made = torch.arange(rows.shape[1], device=rows.device)
            else:
                made = getattr(torch, make)(*sizes, device=rows.device)
            return rows + 0 * made.nan_to_num() + (made if make in ("ones", "full", "arange") else 0)

    sch = create_schedule(Makes())
    assert sch.trace()
    for shape in ((2, 3), (4, 5)):
        rows = torch.randn(shape)
        assert torch.equal(sch.mod(rows), Makes()(rows))
    assert torch.ones(2).sum() == 2  # torch is as it was


class Decides(nn.Module):
    """Branches on a length, a type and a number of axes, and unpacks shapes, as models do."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(4), nn.ModuleList([Heads(), Heads()])

    def forward(self, rows, mask=None, scale=1.0):
        if rows.shape[1] != 4:
            raise ValueError("of another width")
        if rows.dtype != torch.float32:
            rows = rows.float()
        if mask is not None and mask.dim() == 2:
            mask = mask[:, None]
        rows = self.norm(rows) * scale
        for one in self.inner:
            rows = one(rows)
        return rows if mask is None else rows * mask.flatten(1)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, rows):
        *sizes, width = rows.shape
        heads = self.linear(rows).view(*sizes, 2, -1)
        return heads.flip(-1).reshape(*sizes, width) if len(sizes) < 3 else heads


def test_a_forward_that_branches_on_shapes_and_types_is_traced_with_an_example():
    torch.manual_seed(0)
    model = Decides()
    rows, mask = torch.randn(3, 4), torch.ones(3, 1)
    sch = create_schedule(copy.deepcopy(model))
    with pytest.raises(TracingError, match="it branches on the value of"):
        sch.trace(inputs=["mask"])
    generator = torch.get_rng_state()
    assert sch.trace(example_inputs={"rows": rows, "mask": mask, "scale": 2.0})
    check_invariants(sch)
    assert torch.equal(generator, torch.get_rng_state()) and sch["norm"].mod.num_batches_tracked == 0
    assert isinstance(sch["inner.0"].mod, TracedModule)
    other, seen = torch.randn(5, 4), torch.rand(5, 1)
    assert torch.equal(sch.mod(other, seen, scale=2.0), model(other, seen, scale=2.0))
    for wrong in ((torch.randn(5, 4).double(), seen), (other, seen[None])):
        with pytest.raises(TracingError, match="traced with an example for which this is"):
            sch.mod(*wrong, scale=2.0)
    with pytest.raises(TracingError, match="scale"):
        sch.mod(other, seen, scale=3.0)
    model.train(), sch.mod.train()
    copied = copy.deepcopy(sch.mod)
    assert torch.equal(copied(other, seen, scale=2.0), model(other, seen, scale=2.0))


def test_examples_are_checked_and_elements_decide_nothing():
    class OnElements(nn.Module):
        def forward(self, rows):
            return rows if rows.sum() > 0 else -rows

    with pytest.raises(TracingError, match="branches on the elements of"):
        create_schedule(OnElements()).trace(example_inputs=torch.ones(2))
    for example, words in (((), "missing a required argument: 'rows'"), ({"ro": 1}, "rows")):
        sch = create_schedule(Decides())
        with pytest.raises(ArgumentError, match=words):
            sch.trace(example_inputs=example)
        assert isinstance(sch.mod, Decides)
    assert create_schedule(Decides()).trace(example_inputs=torch.ones(3, 4))


class Cache:
    """What a model keeps of earlier calls."""

    def __init__(self):
        self.rows = []


def test_an_object_that_a_forward_makes_is_made_anew_in_every_call():
    class Keeps(nn.Module):
        def forward(self, rows, cache):
            cache.rows.append(rows)
            return torch.stack(cache.rows).sum(0)

    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = Keeps(), Keeps()

        def forward(self, rows):
            cache = Cache()
            return self.other(self.one(rows, cache), cache), cache

    sch = create_schedule(Caches())
    sch.trace(leaf_modules=["Keeps"])
    for _ in range(2):
        result, cache = sch.mod(torch.ones(2))
        assert len(cache.rows) == 2 and result.tolist() == [2.0, 2.0]


def test_an_object_that_a_forward_makes_reaches_graphs_below_with_an_example():
    class Adds(nn.Module):
        def forward(self, rows, cache):
            return rows + len(cache.rows) if cache is not None else rows

    class Makes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Adds()

        def forward(self, rows):
            return self.inner(rows, Cache()) if rows.dim() > 1 else rows

    sch = create_schedule(Makes())
    sch.trace_until("inner", example_inputs=torch.ones(2, 3))
    assert sch.mod(torch.ones(2, 3)).tolist() == torch.ones(2, 3).tolist()


def test_a_holder_that_is_never_called_needs_no_graph():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, rows):
            for one in self.layers:
                rows = one(rows)
            return rows

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = Decoder()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.head = Holder(), nn.Linear(4, 2)

        def forward(self, rows):
            return self.head(self.model.decoder(rows))

    sch = create_schedule(Outer())
    rows = torch.randn(3, 4)
    expected = sch.mod(rows)
    sch.trace_until("model.decoder")
    sch["model.decoder.layers.0"].cut_pipeline_stage()
    parts = partition(sch)
    assert len(parts.stages) == 2 and torch.equal(parts.run(rows), expected)
