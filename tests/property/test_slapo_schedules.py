"""Whatever is done to whatever model, in any order: tree and model agree, and what fails leaves no trace."""

import warnings

import pytest
from hypothesis import given, settings, strategies as st

torch = pytest.importorskip("torch")

from schedules import check_invariants, same_state, state_of
from torch import nn

from makespan.slapo import PathError, ScheduleError, call_module, create_schedule, replay


class Owner(nn.Module):
    """Calls what it holds one after the other, lists and dictionaries too."""

    def __init__(self, parts):
        super().__init__()
        self.width = 4
        for index, part in enumerate(parts):
            self.add_module(f"part{index}", part)

    def forward(self, data):
        for part in self.children():
            data = called(part, data)
        return data


def is_list(part):
    return isinstance(part, nn.ModuleList | nn.ModuleDict)


def called(part, data):
    if is_list(part):
        for inner in part.children():
            data = called(inner, data)
        return data
    return part(data)


LEAVES = {
    "linear": lambda: nn.Linear(4, 4),
    "bare": lambda: nn.Linear(4, 4, bias=False),
    "norm": lambda: nn.LayerNorm(4),
    "dropout": lambda: nn.Dropout(0.5),
    "gelu": nn.GELU,
}
OWNERS = {
    "owner": Owner,
    "sequential": lambda parts: nn.Sequential(*(Owner([one]) if is_list(one) else one for one in parts)),
    "list": nn.ModuleList,
    "dict": lambda parts: nn.ModuleDict({f"key{index}": part for index, part in enumerate(parts)}),
}
KINDS = st.recursive(
    st.sampled_from(sorted(LEAVES)),
    lambda inner: st.tuples(st.sampled_from(sorted(OWNERS)), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=12,
)


def built(kind, shared):
    """Build a model; leaves of a kind that is shared are one object."""
    if isinstance(kind, str):
        return shared[kind] if kind in shared else LEAVES[kind]()
    name, inner = kind
    return OWNERS[name]([built(one, shared) for one in inner])


def model_of(kinds, shared):
    torch.manual_seed(0)
    pool = {name: LEAVES[name]() for name in sorted(shared)}
    return Owner([built(one, pool) for one in kinds])


def wrapped(path, old):
    return nn.Sequential(old, nn.Identity())


def nothing(path, old):
    return None


def first_chain(node):
    """Return the first two layers that follow each other in the graph of a node, none if there are none."""
    try:
        return next(iter(node.find(chain)), [])
    except ScheduleError:  # no graph, or not one of its own
        return []


def chain(data):
    return call_module(".*", call_module(".*", data))


def smaller(old):
    return Owner([nn.Linear(4, 4), nn.ModuleList([nn.GELU()])])


STEPS = {
    "checkpoint": lambda node: node.checkpoint(),
    "fork_rng": lambda node: node.fork_rng(),
    "decompose": lambda node: node.decompose(),
    "annotate": lambda node: node.annotate("weight", "role", 1),
    "set_attr": lambda node: node.set_attr(width=2),
    "bind": lambda node: node.bind(last=node.path),
    "replace": lambda node: node.replace(smaller),
    "trace": lambda node: node.trace(),
    "flat trace": lambda node: node.trace(flatten=True),
    "fuse": None,
    "shard": lambda node: node.shard("weight", 0),
    "sync": lambda node: node.sync("bwd_post", "all_reduce"),
    "wrap norms": lambda node: node.replace_all(nn.LayerNorm, wrapped),
    "wrap linears": lambda node: node.replace_all(nn.Linear, wrapped),
    "spoil": lambda node: node.replace_all(nn.GELU, nothing),
}


@given(
    st.lists(KINDS, min_size=1, max_size=3),
    st.sets(st.sampled_from(sorted(LEAVES))),
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 10_000)), max_size=8),
)
@settings(max_examples=60, derandomize=True)
def test_any_steps_keep_tree_and_model_together(kinds, shared, steps):
    sch = create_schedule(model_of(kinds, shared))
    check_invariants(sch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, where in steps:
            nodes = [node for _, node in sch.named_schedules()]
            node = nodes[where % len(nodes)]
            found = first_chain(node) if name == "fuse" else None
            before, n_steps = state_of(sch), len(sch.metadata.journal)
            try:
                STEPS[name](node) if found is None else node.fuse(found, compiler=None)
            except ScheduleError as error:
                assert any(repr(path) in str(error) for path, _ in node.named_schedules())
                assert same_state(before, state_of(sch))
                assert len(sch.metadata.journal) == n_steps
            else:
                assert len(sch.metadata.journal) == n_steps + 1
            check_invariants(sch)
        again = replay(model_of(kinds, shared), sch.metadata.journal)
    assert str(again) == str(sch)
    assert list(again.mod.state_dict()) == list(sch.mod.state_dict())
    data = torch.ones(2, 4)
    torch.testing.assert_close(again.mod.eval()(data), sch.mod.eval()(data), equal_nan=True)


@given(st.lists(KINDS, min_size=1, max_size=3), st.sets(st.sampled_from(sorted(LEAVES))), st.data())
@settings(max_examples=60, derandomize=True)
def test_a_path_leads_to_the_module_of_that_path_or_to_an_error(kinds, shared, data):
    model = model_of(kinds, shared)
    sch = create_schedule(model)
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    start = data.draw(st.sampled_from([node for _, node in sch.named_schedules()]))
    path = data.draw(st.sampled_from(paths) | st.text("part0.key1", max_size=12))
    try:
        node = start[path]
    except PathError as error:
        assert path not in start and path in str(error)
        full = f"{start.path}.{path}" if start.path else path
        module = dict(model.named_modules(remove_duplicate=False)).get(full)
        assert not path or module is None or isinstance(module, nn.ModuleList | nn.ModuleDict)
    else:
        assert path in start
        assert node.mod is start.mod.get_submodule(path)
