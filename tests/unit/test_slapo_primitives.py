"""Primitives that need no graph: what each does to a model, and what it refuses."""

import copy
import gc
import logging
import random
import types
import weakref
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from schedules import Attention, Block, check_invariants, same_state, state_of, tokens, toy
from torch import nn

from makespan.slapo import (
    ArgumentError,
    ConflictError,
    KindError,
    MemberError,
    create_schedule,
    replay,
    select_layers,
)
from makespan.slapo.layers import LateBiasLinear, become
from makespan.slapo.memory import Forked
from makespan.slapo.schedule import wrap_forward, wrapped_forward

BLOCK = "stages.0.blocks.1"


@pytest.fixture
def sch():
    return create_schedule(toy())


def refused(sch, error, words, apply):
    """Check that a primitive refuses with one message and leaves everything as it was."""
    before = state_of(sch)
    with pytest.raises(error, match=words):
        apply()
    check_invariants(sch)
    assert same_state(before, state_of(sch))


def loss_and_gradients(model, data):
    model.zero_grad()
    words, pairs = model(data)
    loss = words.square().mean() + pairs.square().mean()
    loss.backward()
    return loss.detach(), [one.grad.clone() for one in model.parameters()]


def assert_equal_training(model, other):
    """Compare loss and gradients bit by bit in training mode, dropout included."""
    data = tokens()
    torch.manual_seed(5)
    loss, gradients = loss_and_gradients(model, data)
    torch.manual_seed(5)
    expected, others = loss_and_gradients(other, data)
    assert torch.equal(loss, expected)
    assert all(torch.equal(*pair) for pair in zip(gradients, others, strict=True))


# --- replace -----------------------------------------------------------------------------


def test_a_new_module_takes_the_place_of_a_node(sch):
    node, new = sch[BLOCK], Block(8)
    calls = []
    node.replace(new)
    check_invariants(sch)
    assert sch[BLOCK] is node and node.mod is new is sch.mod.stages[0].blocks[1]
    assert (node.name, node.path) == ("blocks.1", BLOCK)
    assert list(node.child) == ["attention", "norm", "ffn"]
    sch[f"{BLOCK}.ffn"].replace(lambda old: calls.append(old) or nn.Linear(8, 8))
    check_invariants(sch)
    assert calls and f"{BLOCK}.ffn.0" not in sch
    sch.mod(tokens())


def test_the_root_can_be_replaced(sch):
    new = toy(seed=1)
    sch.replace(new)
    check_invariants(sch)
    assert sch.mod is new


def test_hooks_move_to_the_new_module_and_their_handles_still_remove_them(sch):
    old, new, seen = sch[BLOCK].mod, Block(8), []
    handles = [
        old.register_forward_pre_hook(lambda *_: seen.append("pre")),
        old.register_forward_hook(lambda *_, **__: seen.append("post"), with_kwargs=True, always_call=True),
        old.register_full_backward_pre_hook(lambda *_: seen.append("backward pre")),
        old.register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    new.register_forward_hook(lambda *_: seen.append("its own"))
    sch[BLOCK].replace(new)
    sch.mod(tokens())[0].sum().backward()
    assert seen == ["pre", "post", "its own", "backward pre", "backward"]
    for handle in handles:
        handle.remove()
    seen.clear()
    sch.mod(tokens())[0].sum().backward()
    assert seen == ["its own"]
    assert not old._forward_hooks and not old._backward_hooks


def test_differences_of_the_new_module_are_warned_of(sch):
    sch.mod.eval()
    with pytest.warns(UserWarning) as seen:
        sch[BLOCK].replace(Block(8).double())
    mode, dtype = (str(one.message) for one in seen)
    assert mode.startswith(
        f"replace of '{BLOCK}': training mode of the old module is False, of the new one True"
    )
    assert dtype.endswith("dtype of the old module is torch.float32, of the new one torch.float64")
    assert not sch[BLOCK].mod.training and not sch[f"{BLOCK}.attention.dropout"].mod.training
    with pytest.warns(UserWarning, match="device of the old module is cpu, of the new one meta"):
        sch["heads.pairs"].replace(nn.Linear(8, 2, device="meta").eval())
    with pytest.warns(UserWarning, match="the name 'other' is ignored"):
        sch["stages.1"].replace(nn.Identity().eval(), name="other")


def test_what_is_no_module_is_refused(sch):
    node = sch[BLOCK]
    refused(
        sch, TypeError, f"replace of '{BLOCK}': got str; expected a module, or", lambda: node.replace("x")
    )
    refused(sch, KindError, "got function, which returned int", lambda: node.replace(_integer))
    refused(sch, ArgumentError, "need target_ops", lambda: node.replace(Block(8), each=True))
    refused(sch, ArgumentError, "holds the whole model", lambda: node.replace(nn.Sequential(sch.mod)))
    node.checkpoint()
    node.bind(x=1)
    words = r"its forward is wrapped, conflicts with step 1: checkpoint\(\) at"
    refused(sch, RuntimeError, words, lambda: node.replace(Block(8)))


def _integer(old):
    return 3


def test_tags_stay_with_a_parameter_that_is_replaced_by_one_of_the_same_shape(sch):
    node = sch[f"{BLOCK}.attention.query"]
    node.annotate("weight", "role", "query")
    node.annotate("bias", "role", "offset")
    node.mod.weight.untold = 1
    node.replace(nn.Linear(8, 8))
    assert (node.mod.weight.role, node.mod.bias.role) == ("query", "offset")
    assert not hasattr(node.mod.weight, "untold")
    node.replace(nn.Linear(8, 4))
    assert not hasattr(node.mod.weight, "role")


def test_all_modules_of_a_type_are_replaced_once(sch):
    assert sch.replace_all(nn.Dropout, lambda path, old, n: nn.Sequential(*[copy.copy(old)] * n), n=2) == 4
    check_invariants(sch)
    assert sch.replace_all(nn.Linear, lambda path, old: nn.Sequential(old, nn.Identity())) == 22
    check_invariants(sch)
    assert isinstance(sch["heads.pairs.0"].mod, nn.Linear)
    assert sch.replace_all(nn.Conv2d, lambda path, old: old) == 0
    assert [entry.op for entry in sch.metadata.journal] == ["replace_all"] * 3


def test_modules_inside_each_other_are_replaced_from_the_inside():
    sch = create_schedule(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU()))
    seen = []

    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, data):
            return self.inner(data)

    assert sch.replace_all(nn.Sequential, lambda path, old: seen.append(path) or Wrapped(old)) == 2
    check_invariants(sch)
    assert seen == ["0", ""] and isinstance(sch["inner.0.inner.0"].mod, nn.Linear)
    refused(sch, TypeError, "got 3; expected a class of modules", lambda: sch.replace_all(3, lambda *_: None))


def test_a_factory_that_fails_half_way_leaves_the_model_as_it_was(sch):
    made = iter([nn.Identity(), nn.Identity(), None])
    words = "replace of 'stages.0.blocks.1.norm': got NoneType"
    refused(sch, TypeError, words, lambda: sch.replace_all(nn.LayerNorm, lambda path, old: next(made)))


# --- checkpoint --------------------------------------------------------------------------


def test_recomputation_changes_neither_names_nor_results(sch):
    model, keys = copy.deepcopy(sch.mod), list(sch.mod.state_dict())
    for path in ("stages.0.blocks.0", f"{BLOCK}.attention", "stages.1"):
        sch[path].checkpoint()
        check_invariants(sch)
    assert list(sch.mod.state_dict()) == keys
    sch["stages.0.blocks.0.attention.query"].annotate("weight", "role", 1)
    assert_equal_training(sch.mod, model)
    sch.mod.load_state_dict(model.state_dict())


def test_what_is_recomputed_runs_twice_and_keeps_fewer_tensors(sch):
    node, runs = sch["stages.1"], []
    node["blocks.0"].mod.register_forward_hook(lambda *_: runs.append(1))

    def kept():
        bytes_kept = []
        pack = lambda one: bytes_kept.append(one.nbytes) or one  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            words, _ = sch.mod(tokens())
        return words, sum(bytes_kept)

    _, before = kept()
    node.checkpoint()
    runs.clear()
    words, after = kept()
    assert len(runs) == 1 and after < 0.75 * before
    words.sum().backward()
    assert len(runs) == 2


def test_keyword_arguments_and_what_is_no_tensor_pass_a_recomputed_module(sch):
    mod = sch[f"{BLOCK}.attention"].mod
    hidden, mask = torch.randn(2, 4, 8, requires_grad=True), torch.zeros(4, 4)
    expected = mod.eval()(hidden, mask=mask)
    sch[f"{BLOCK}.attention"].checkpoint()
    assert torch.equal(mod(hidden, mask=mask), expected) and torch.equal(mod(hidden, mask=None), expected)


class Stateful(nn.Module):
    """What a forward may change beside its result: buffers in place and anew, numbers, lists, vectors."""

    def __init__(self):
        super().__init__()
        self.norm, self.scaled = nn.BatchNorm1d(4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.kept = nn.InstanceNorm1d(4, track_running_stats=True)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("total", torch.zeros(4))
        self.calls, self.log = 0, []

    def forward(self, rows, seen=None):
        self.calls += 1
        self.log.append(self.calls)
        self.average.mul_(0.9).add_(rows.detach().mean(0))
        self.total = 0.5 * self.total + rows.detach().sum(0)
        spread = self.kept(rows.unsqueeze(-1) * torch.arange(1.0, 4.0)).mean(-1)
        if seen is not None:
            seen.rows = torch.cat([seen.rows, rows])
            spread = spread + seen.rows.mean(0)
        return self.scaled(self.norm(rows)) * self.average * self.calls + self.total * rows + spread


class Seen:
    """An object that grows when it is passed on, as a cache of keys and values does."""

    def __init__(self):
        self.rows = torch.zeros(1, 4)


def trained_stateful(model, passes=2):
    """Run forward passes, then backward through each of them, the last one first and twice."""
    generator, losses, inputs = torch.Generator().manual_seed(1), [], []
    for _ in range(passes):
        inputs.append(torch.randn(5, 4, generator=generator, requires_grad=True))
        hidden, seen = inputs[-1], Seen()
        for part in model:
            hidden = part(hidden, seen=seen)
        assert len(seen.rows) == 1 + len(model) * len(hidden)
        losses.append((hidden**2).sum())
    # What was used in place is another one after the next pass, which only recomputation overcomes.
    for loss in losses[::-1]:
        loss.backward(retain_graph=loss is losses[-1])
    losses[-1].backward()
    assert all(len(part.log) == part.calls == passes for part in model)
    return [one.grad for one in inputs], [one.grad for one in model.parameters()], list(model.buffers())


def test_recomputation_starts_from_the_state_of_the_first_pass_and_changes_none():
    torch.manual_seed(0)
    model = nn.ModuleList([Stateful(), Stateful()])
    plain, sch = copy.deepcopy(model), create_schedule(nn.Sequential(*model))
    sch["0"].checkpoint()
    sch["1"].checkpoint()
    found, expected = trained_stateful(model, passes=1), trained_stateful(plain, passes=1)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    trained_stateful(nn.ModuleList([Stateful().requires_grad_()]), passes=1)


class Draws(nn.Module):
    """Drops values, and a second layer, as numbers say that no default generator of torch has drawn."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.source = {
            "torch": lambda: torch.Generator().manual_seed(2),
            "a list": lambda: [torch.Generator().manual_seed(2)],
            "numpy": lambda: np.random.default_rng(2),
            "an old one of numpy": lambda: np.random.RandomState(2),
            "python": lambda: random.Random(2),
        }.get(kind, lambda: kind)()

    def drawn(self, given):
        source = given or (self.source[0] if isinstance(self.source, list) else self.source)
        if isinstance(source, torch.Generator):
            return torch.rand(8, generator=source)
        if source == "everybody's of numpy":
            return torch.from_numpy(np.random.rand(8)).float()  # noqa: NPY002
        if source == "everybody's of python":
            return torch.tensor([random.random() for _ in range(8)])
        return torch.tensor([float(source.random()) for _ in range(8)]).float()

    def forward(self, rows, source=None):
        drawn = self.drawn(source)
        rows = self.first(rows * (drawn[:4] > 0.5)) ** 2
        return self.second(rows) ** 2 if drawn[4] < 0.5 else rows


@pytest.mark.parametrize(
    "kind",
    ["torch", "a list", "numpy", "an old one of numpy", "python", "everybody's of numpy",
     "everybody's of python", "given"],
)  # fmt: skip
def test_recomputation_draws_again_what_the_first_pass_drew_whoever_draws(kind):
    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - what layers of users draw from
        sch = create_schedule(nn.ModuleList([Draws(kind), Draws(kind)]))
        given = torch.Generator().manual_seed(5) if kind == "given" else None
        if recomputes:
            sch["0"].checkpoint()
            sch["1"].checkpoint()
        rows = torch.ones(3, 4)
        for _ in range(3):
            hidden = sch["1"].mod(sch["0"].mod(rows, given), given)
            hidden.sum().backward()
        found.append([one.grad for one in sch.mod.parameters() if one.grad is not None])
    assert all(map(torch.equal, *found))


@dataclass(slots=True)
class Slotted:
    """A cache whose class lists its attributes."""

    rows: object = None
    n: int = 0


class Grows(nn.Module):
    """Reads what earlier calls have left in a cache, and leaves its own."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, rows, cache):
        keys = self.project(rows) ** 2
        if isinstance(cache, Slotted):
            keys = keys if cache.rows is None else torch.cat([cache.rows, keys])
            cache.rows, cache.n = keys, cache.n + len(rows)
        elif isinstance(cache, dict):
            keys = torch.cat([*cache.get("keys", []), keys])
            cache.setdefault("keys", []).append(keys)
        else:
            cache.append(keys)
            keys = torch.cat(list(cache))
        return rows + keys.mean(0) ** 2


@pytest.mark.parametrize("make", [list, dict, Slotted])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_cache_of_any_form_grows_once_under_recomputation(make, by_name):
    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        sch, cache = create_schedule(nn.ModuleList([Grows(), Grows()])), make()
        if recomputes:
            sch["0"].checkpoint()
            sch["1"].checkpoint()
        hidden = torch.ones(3, 4)
        for layer in (*sch.mod, *sch.mod):
            hidden = layer(hidden, cache=cache) if by_name else layer(hidden, cache)
        hidden.sum().backward()
        found.append([*(one.grad for one in sch.mod.parameters()), hidden.detach()])
        found[-1].append(torch.tensor(getattr(cache, "n", 0) or len(cache.get("keys", [])
                                      if isinstance(cache, dict) else cache)))  # fmt: skip
    assert all(map(torch.equal, *found))


class Remembers(nn.Module):
    """Keeps a cache that others share, a log and a logger as attributes."""

    def __init__(self, cache):
        super().__init__()
        self.project, self.cache, self.log = nn.Linear(4, 4), cache, {"rows": []}
        self.logger = logging.getLogger("of a module")

    def forward(self, rows):
        keys = self.project(rows) ** 2
        self.cache.keys.append(keys)
        self.cache.seen["n"] = self.cache.seen.get("n", 0) + 1
        self.log["rows"].append(len(rows))
        return rows * len(self.log["rows"]) + torch.cat(self.cache.keys).mean(0) * self.cache.seen["n"]


class Cache:
    """Keys and counts, in containers."""

    def __init__(self):
        self.keys, self.seen = [], {}


def test_objects_that_modules_hold_change_once_under_recomputation():
    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        cache = Cache()
        sch = create_schedule(nn.Sequential(Remembers(cache), Remembers(cache)))
        if recomputes:
            sch["0"].checkpoint()
            sch["1"].checkpoint()
        handlers = sch.mod[0].logger.handlers
        for _ in range(2):
            hidden = sch.mod(torch.ones(3, 4))
        hidden.sum().backward()
        assert cache.seen["n"] == len(cache.keys) == 4 and sch.mod[0].log["rows"] == [3, 3]
        assert sch.mod[1].cache is cache and sch.mod[0].logger.handlers is handlers
        found.append([*(one.grad for one in sch.mod.parameters()), hidden.detach()])
    assert all(map(torch.equal, *found))


class Follows(nn.Module):
    """A target network that follows its model by a little in every forward."""

    def __init__(self):
        super().__init__()
        self.model, self.target = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, rows):
        with torch.no_grad():
            self.target.weight.lerp_(self.model.weight, 0.1)
        return self.model(rows) * self.target(rows)


def test_a_forward_that_changes_a_parameter_is_not_recomputed():
    sch = create_schedule(nn.Sequential(Follows(), nn.Linear(4, 4)))
    sch["0"].checkpoint()
    with pytest.raises(
        ConflictError, match=r"forward of Follows changes its parameter 'target.weight'.*buffer"
    ):
        sch.mod(torch.ones(3, 4))
    within = create_schedule(nn.Sequential(Follows(), nn.Linear(4, 4)))
    within["0.model"].checkpoint()
    within.mod(torch.ones(3, 4)).sum().backward()


def test_passes_that_wait_for_their_backward_passes_are_recomputed_each_from_its_own_state():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
    plain, sch = copy.deepcopy(model), create_schedule(nn.ModuleDict({"part": model}))
    sch["part"].checkpoint()
    rows = [torch.randn(5, 4) for _ in range(3)]
    for one in (model, plain):
        losses = [(one(part) ** 2).sum() for part in rows]
        for loss in losses:
            loss.backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name
    assert all(map(torch.equal, model.buffers(), plain.buffers()))
    assert model[0].num_batches_tracked == 3


def test_a_part_of_a_graph_that_is_recomputed_counts_a_batch_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    sch = create_schedule(model)
    sch.trace()
    pattern = sch.find_node(lambda node: node.op == "call_module" and node.target in ("1", "2"))
    sch.checkpoint([pattern])
    sch.mod(torch.randn(5, 4)).sum().backward()
    assert sch.mod.get_submodule("1").num_batches_tracked == 1


def test_without_gradients_a_recomputed_module_runs_once_and_counts():
    sch = create_schedule(nn.Sequential(nn.BatchNorm1d(4)))
    sch["0"].checkpoint()
    with torch.no_grad():
        sch.mod(torch.randn(5, 4))
    assert sch["0"].mod.num_batches_tracked == 1


def test_recomputing_twice_is_refused_and_nested_recomputation_warned_of(sch):
    node = sch[BLOCK]
    node.checkpoint()
    words = rf"checkpoint of '{BLOCK}': it is already recomputed, conflicts with step 1: checkpoint\(\)"
    refused(sch, ConflictError, words, node.checkpoint)
    with pytest.warns(
        UserWarning, match=f"checkpoint of '{BLOCK}.ffn': '{BLOCK}' above it is already recomputed"
    ):
        node["ffn"].checkpoint()
    refused(sch, ArgumentError, "needs a subgraph", lambda: sch.checkpoint(order_args_fn=lambda *_: _))


@pytest.mark.parametrize(
    ("ratio", "count"),
    [(1.0, 24), (0.92, 22), (0.84, 20), (0.67, 16), (0.5, 12), (0.34, 8), (0.25, 6), (0.0, 0)],
)
def test_the_share_of_recomputed_layers_is_exact_and_spread(ratio, count):
    even, head = select_layers(24, ratio), select_layers(24, ratio, "head")
    assert len(even) == len(head) == count and head == list(range(count))
    gaps = {after - before for before, after in pairwise(even)}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


@pytest.mark.parametrize(
    ("n", "ratio", "policy"), [(4, 1.1, "even"), (4, -0.1, "even"), (-1, 0.5, "even"), (4, 0.5, "tail")]
)
def test_a_share_that_makes_no_sense_is_refused(n, ratio, policy):
    with pytest.raises(ValueError, match=r"select_layers got .*; expected"):
        select_layers(n, ratio, policy)


# --- random numbers ----------------------------------------------------------------------


def forked(rank):
    """Return a dropout that draws from the generator of one process of several."""
    module = nn.Dropout(0.5)
    wrap_forward(module, Forked(module, rank))
    return module


def test_processes_draw_other_masks_and_stay_in_step():
    masks, states = [], []
    for rank in (0, 1):
        torch.manual_seed(3)
        module = forked(rank)
        masks.append([module(torch.ones(64)) for _ in range(2)])
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    different = [masks[0][0], masks[0][1], masks[1][0], masks[1][1]]
    assert len({tuple(one.tolist()) for one in different}) == 4
    torch.manual_seed(3)
    assert torch.equal(forked(1)(torch.ones(64)), masks[1][0])


@pytest.mark.parametrize("outer", [True, False])
def test_a_recomputed_module_sees_the_masks_of_its_first_pass(outer):
    sch = create_schedule(nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))))
    inner = sch["1.1"].mod
    wrap_forward(inner, Forked(inner, 1))
    plain = copy.deepcopy(sch.mod)
    (sch["1"] if outer else sch["1.1"]).checkpoint()
    results = []
    for model in (sch.mod, plain):
        torch.manual_seed(7)
        data = torch.ones(4, 8, requires_grad=True)
        out = model(data)
        torch.rand(3)
        out.square().sum().backward()
        results.append((out.detach(), data.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_one_process_draws_what_the_unscheduled_model_draws(sch):
    model = copy.deepcopy(sch.mod)
    sch[f"{BLOCK}.attention"].fork_rng()
    assert_equal_training(sch.mod, model)
    assert wrapped_forward(sch[f"{BLOCK}.attention"].mod) is None


def test_a_module_is_forked_once(sch):
    sch.world_size, sch["stages.0"].world_size = 2, 2
    sch["stages.0"].fork_rng()
    words = r"fork_rng of 'stages.0': it is already forked, conflicts with step 1: fork_rng\(\)"
    with pytest.raises(ConflictError, match=words):
        sch["stages.0"].fork_rng()


# --- notes -------------------------------------------------------------------------------


def test_tags_are_set_on_parameters_of_the_module_itself(sch):
    sch["heads.pairs"].annotate("weight", "role", {"kind": "head"})
    assert sch.mod.heads["pairs"].weight.role == {"kind": "head"} and sch.metadata.tags == {"role"}
    words = "annotate of 'heads.words': no parameter 'bias'; known: 'weight'"
    refused(sch, AttributeError, words, lambda: sch["heads.words"].annotate("bias", "role", 1))
    for key in ("data", "grad", "a b"):
        refused(sch, ValueError, "cannot tag 'scale' with", lambda key=key: sch.annotate("scale", key, 1))


def test_attributes_of_a_module_are_changed_and_others_refused(sch):
    node = sch[f"{BLOCK}.attention"]
    node.set_attr(heads=1)
    assert node.mod.heads == 1 and str(sch.metadata.journal[0]) == f"set_attr(heads=1) at '{BLOCK}.attention'"
    refused(
        sch, AttributeError, "no attribute 'haeds'; close: 'heads'", lambda: node.set_attr(heads=2, haeds=1)
    )
    refused(sch, ValueError, "'query' is a tensor or a module", lambda: node.set_attr(query=nn.Identity()))
    refused(sch, ValueError, "'scale' is a tensor", lambda: sch.set_attr(scale=1))
    for name in ("training", "_modules", "forward"):
        refused(sch, MemberError, f"no attribute '{name}'", lambda name=name: node.set_attr(**{name: 1}))
    node.checkpoint()
    refused(sch, MemberError, "no attribute 'forward'", lambda: node.set_attr(forward=1))


def test_attributes_of_what_a_module_holds_are_changed_in_a_copy(sch):
    node, sizes = sch[f"{BLOCK}.attention"], types.SimpleNamespace(heads=2, width=8)
    node.mod.sizes = sch.mod.sizes = sizes
    node.set_attr(**{"heads": 1, "sizes.heads": 1, "sizes.width": 4})
    assert vars(node.mod.sizes) == {"heads": 1, "width": 4} and sch.mod.sizes.heads == 2
    again = toy()
    again.get_submodule(node.path).sizes = sizes
    assert replay(again, sch.dump())[node.path].mod.sizes.width == 4
    words = "'sizes' has no attribute 'haeds'; close: 'heads'"
    refused(sch, AttributeError, words, lambda: node.set_attr(**{"sizes.haeds": 1}))
    refused(sch, AttributeError, "no attribute 'size'", lambda: node.set_attr(**{"size.heads": 1}))
    refused(sch, ValueError, "'query' is a tensor", lambda: node.set_attr(**{"query.out_features": 1}))


def test_attributes_of_classes_count_and_methods_and_captured_graphs_do_not():
    class Scaled(nn.Module):
        factor, activation = 2, None

        @property
        def half(self):
            return self.factor / 2

        def forward(self, data):
            return self.factor * data

    sch = create_schedule(nn.Sequential(Scaled(), torch.fx.symbolic_trace(Scaled())))
    sch["0"].set_attr(factor=3, activation=nn.functional.relu)
    sch["0"].set_attr(activation=nn.functional.gelu)
    assert (sch.mod[0].factor, Scaled.factor) == (3, 2)
    refused(sch, MemberError, "no attribute 'half'", lambda: sch["0"].set_attr(half=1))
    sch.mod[1].factor = 2
    words = r"set_attr of '1': its graph holds the attributes of the time.*call set_attr before trace"
    refused(sch, ConflictError, words, lambda: sch["1"].set_attr(factor=3))


def test_symbols_have_one_value(sch):
    sch.bind(batch=8, ratio=0.5)
    sch["stages.0"].bind(batch=8)
    refused(sch, ValueError, "batch is 4, but was bound to 8", lambda: sch.bind(batch=4))
    assert sch.metadata.slots["bind"] == {"batch": 8, "ratio": 0.5}


# --- decompose ---------------------------------------------------------------------------


def test_a_decomposed_layer_has_the_same_parameters_and_two_nodes(sch):
    node, model = sch[f"{BLOCK}.ffn.0"], copy.deepcopy(sch.mod)
    weight, bias, keys = node.mod.weight, node.mod.bias, list(sch.mod.state_dict())
    node.decompose()
    check_invariants(sch)
    assert node.mod.weight is weight and node.mod.bias is bias and list(sch.mod.state_dict()) == keys
    assert isinstance(node.mod, nn.Linear) and (node.mod.in_features, node.mod.out_features) == (8, 16)
    graph = torch.fx.symbolic_trace(nn.Sequential(node.mod)).graph
    calls = [one.target.__name__ for one in graph.nodes if one.op == "call_function"]
    assert calls == ["linear", "add"]
    model.load_state_dict(sch.mod.state_dict())
    for one, other in zip(sch.mod.eval()(tokens()), model.eval()(tokens()), strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_reduced_comes_before_the_bias():
    linear, data = nn.Linear(3, 2), torch.randn(4, 3)
    sch = create_schedule(nn.Sequential(linear))
    become(linear, LateBiasLinear)
    linear.reduce = lambda product: 2 * product
    check_invariants(sch)
    expected = 2 * (data @ linear.weight.T) + linear.bias
    torch.testing.assert_close(sch.mod(data), expected)
    sch["0"].decompose()
    check_invariants(sch)
    torch.testing.assert_close(sch.mod(data), expected)
    assert sch["0"].mod.reduce is not None and list(sch.mod.state_dict()) == ["0.weight", "0.bias"]


def test_only_linear_layers_with_bias_are_decomposed_and_only_once(sch):
    for path, found in (("heads.words", "Linear without bias"), (f"{BLOCK}.norm", "LayerNorm"), ("", "Toy")):
        words = f"decompose of '{path}': got {found}; expected nn.Linear with bias"
        refused(sch, RuntimeError, words, sch[path].decompose)
    sch["heads.pairs"].decompose()
    words = r"decompose of 'heads.pairs': it is already decomposed, conflicts with step 1: decompose\(\)"
    refused(sch, RuntimeError, words, sch["heads.pairs"].decompose)

    class Own(nn.Linear):
        def forward(self, data):
            return super().forward(data) * 2

    own = create_schedule(nn.Sequential(Own(2, 2)))
    refused(own, RuntimeError, "Own overrides forward", own["0"].decompose)


# --- laws of all -------------------------------------------------------------------------


PRIMITIVES = {
    "replace": lambda sch: sch[f"{BLOCK}.attention"].replace(Attention(8)),
    "replace_all": lambda sch: sch.replace_all(nn.GELU, lambda path, old: nn.ReLU()),
    "checkpoint": lambda sch: sch[BLOCK].checkpoint(),
    "fork_rng": lambda sch: sch[BLOCK].fork_rng(),
    "annotate": lambda sch: sch.annotate("scale", "role", 1),
    "bind": lambda sch: sch.bind(x=1),
    "set_attr": lambda sch: sch[f"{BLOCK}.attention"].set_attr(heads=1),
    "decompose": lambda sch: sch[f"{BLOCK}.ffn.2"].decompose(),
    "trace": lambda sch: sch.trace(),
    "trace_until": lambda sch: sch.trace_until("stages.0"),
    "cut_pipeline_stage": lambda sch: (sch.trace_until("stages.0"), sch[BLOCK].cut_pipeline_stage()),
    "find": lambda sch: sch.find("stages"),
    "fuse": lambda sch: sch[BLOCK].fuse(sch[BLOCK].find(residual), compiler="dynamo"),
    "checkpoint of nodes": lambda sch: sch[BLOCK].checkpoint(sch[BLOCK].find(residual)),
    "replace of nodes": lambda sch: sch[BLOCK].replace(torch.add, sch[BLOCK].find_node(is_sum)[0]),
}


def residual(one, other, weight, bias):
    return nn.functional.layer_norm(one + other, (8,), weight, bias)


def is_sum(node):
    return node.name == "add"


@pytest.mark.parametrize("name", PRIMITIVES)
def test_modes_and_states_pass_through_every_primitive(sch, name):
    keys = list(sch.mod.state_dict())
    shapes = [one.shape for one in sch.mod.state_dict().values()]
    PRIMITIVES[name](sch)
    check_invariants(sch)
    assert list(sch.mod.state_dict()) == keys
    assert [one.shape for one in sch.mod.state_dict().values()] == shapes
    sch.mod.eval()
    assert not any(module.training for module in sch.mod.modules())
    other = create_schedule(copy.deepcopy(sch.mod))
    state = toy(seed=9).state_dict()
    sch.mod.load_state_dict(state)
    other.mod.load_state_dict(sch.mod.state_dict())
    assert all(torch.equal(one, state[key]) for key, one in other.mod.state_dict().items())
    sch.mod.train()
    assert all(module.training for module in sch.mod.modules())
    assert_equal_training(sch.mod, other.mod.train())


def test_a_schedule_that_is_dropped_frees_the_model():
    sch = create_schedule(toy())
    sch[BLOCK].checkpoint()
    gone = weakref.ref(sch.mod)
    del sch
    gc.collect()
    assert gone() is None
