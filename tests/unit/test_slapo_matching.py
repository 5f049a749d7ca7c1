"""Patterns in graphs: what matches, what does not, and what parameters stand for."""

import operator

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

from makespan.slapo import ANY, ModulePattern, Pattern, call_module, create_schedule


class Attention(nn.Module):
    """Attention and what follows it, with modules, functions and methods mixed."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.dropout, self.norm, self.act = nn.Dropout(0.1), nn.LayerNorm(8), nn.GELU()

    def forward(self, hidden, mask):
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        scores = torch.matmul(query, key.transpose(-1, -2)) / 8.0
        shares = self.dropout(F.softmax(scores + mask, dim=-1))
        mixed = self.act(self.out(torch.matmul(shares, value)))
        return self.norm(self.dropout(mixed) + hidden)


def names(matches):
    return [[node.name for _, node in match] for match in matches]


def found(forward, pattern):
    """Matches of a pattern in a forward with two inputs."""
    model = type("Model", (nn.Module,), {"forward": lambda self, x, y: forward(x, y)})()
    return create_schedule(model).find(pattern)


@pytest.fixture
def sch():
    return create_schedule(Attention())


def test_a_pattern_binds_its_parameters_in_their_order(sch):
    def attention(value, query, key, mask, scale):
        scores = query @ key.transpose(-1, -2) / scale
        return F.dropout((mask + scores).softmax(-1), 0.5) @ value

    (match,) = sch.find(attention)
    assert names([match]) == [["transpose", "matmul", "truediv", "add", "softmax", "dropout", "matmul_1"]]
    assert [str(one) for one in match.inputs.values()] == ["value", "query", "key", "mask", "8.0"]
    assert list(match.inputs) == ["value", "query", "key", "mask", "scale"]
    assert all(owner == "" for owner, _ in match)


def test_a_wrong_constant_is_no_match_and_any_stands_for_each(sch):
    def by(number):
        return lambda query, key: torch.matmul(query, key) / number

    assert len(sch.find(by(8))) == 1 and not sch.find(by(4.0))
    assert len(sch.find(lambda query, key: torch.matmul(query, key) / ANY)) == 1
    assert not sch.find(lambda scores: F.softmax(scores, 1))


def test_functions_stand_for_modules_and_modules_for_functions(sch):
    def norm(data, weight, bias):
        return F.layer_norm(data, (8,), weight, bias)

    (match,) = sch.find(norm)
    assert match.inputs["data"].name == "add_1"
    assert match.inputs["weight"].target == "norm.weight"

    class Softmax(Pattern):
        def __init__(self):
            super().__init__()
            self.softmax, self.gelu = nn.Softmax(-1), nn.GELU("tanh")

    class Shares(Softmax):
        def forward(self, scores):
            return self.softmax(scores)

    class Tanh(Softmax):
        def forward(self, scores):
            return self.gelu(scores)

    assert names(sch.find(Shares())) == [["softmax"]]
    assert not sch.find(Tanh())
    assert not sch.find(lambda data, weight: F.layer_norm(data, (4,), weight))


def test_modules_are_found_by_name(sch):
    assert [(owner, node.name) for owner, node in sch.find("query|key")] == [("", "query"), ("", "key")]
    assert not sch.find("tail")

    class Named(Pattern):
        def __init__(self):
            super().__init__()
            self.any, self.linear = ModulePattern("drop"), nn.Linear(1, 1)

        def forward(self, data):
            return self.any(F.gelu(self.linear(data)))

    assert names(sch.find(Named())) == [["out", "act", "dropout_1"]]
    assert names(sch.find(lambda x: (call_module("q", x), call_module("v", x)))) == [["query", "value"]]


def test_nodes_are_found_by_a_condition(sch):
    pairs = sch.find_node(lambda node: node.target is torch.matmul)
    assert [node.name for _, node in pairs] == ["matmul", "matmul_1"]
    for wrong in (3, "matmul", nn.Linear):
        with pytest.raises(TypeError, match="expected a function of a node"):
            sch.find_node(wrong)


def test_finding_traces_what_is_not_traced_and_is_no_step(sch):
    sch.find("query")
    assert [entry.op for entry in sch.metadata.journal] == ["trace"]


def test_the_data_flow_counts_and_not_the_order_of_nodes():
    def pattern(x, y):
        return torch.relu(x) + y

    def apart(x, y):
        first = torch.relu(x)
        torch.sigmoid(y)
        return first + y

    def adjacent(x, y):
        torch.relu(x)
        return y + y

    assert names(found(apart, pattern)) == [["relu", "add"]]
    assert not found(adjacent, pattern)


def test_a_parameter_that_is_used_twice_stands_for_one_value():
    def gated(x):
        return x * torch.sigmoid(x)

    assert names(found(lambda x, y: x * torch.sigmoid(x) + y, gated)) == [["sigmoid", "mul"]]
    assert not found(lambda x, y: x * torch.sigmoid(y), gated)
    assert names(found(lambda x, y: torch.sigmoid(x) * x, gated)) == [["sigmoid", "mul"]]


def test_diamonds_and_both_orders_of_operands_match():
    def diamond(x):
        base = torch.exp(x)
        return torch.tanh(base) + torch.sigmoid(base)

    def target(x, y):
        base = torch.exp(y)
        return torch.sigmoid(base) + torch.tanh(base) - x

    assert len(found(target, diamond)) == 1
    assert not found(lambda x, y: torch.sigmoid(torch.exp(x)) + torch.tanh(torch.exp(y)), diamond)
    assert not found(lambda x, y: y - x.exp(), lambda x, y: x.exp() - y)


@pytest.mark.parametrize(
    "same",
    [lambda x, y: x + y, torch.add, operator.add, lambda x, y: x.add(y), lambda x, y: torch.add(y, other=x)],
)
def test_ways_to_write_one_operation_are_one(same):
    assert len(found(same, lambda one, other: one + other)) == 1
    assert not found(lambda x, y: torch.add(x, y, alpha=2), lambda one, other: one + other)


def test_sizes_are_wildcards_where_they_are_parameters():
    def target(x, y):
        return x.view(x.size(0), -1, 4)

    assert len(found(target, lambda data, rows: data.view(rows, -1, 4))) == 1
    assert not found(target, lambda data, rows: data.view(rows, -1, 8))


def test_matches_do_not_overlap_and_come_in_order():
    def chain(x, y):
        for _ in range(4):
            x = x + y
        return x

    matches = found(chain, lambda one, two, three: (one + two) + three)
    assert names(matches) == [["add", "add_1"], ["add_2", "add_3"]]


def test_owners_below_are_searched_by_their_paths():
    model = nn.Sequential(Attention(), nn.Sequential(Attention()))

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, hidden, mask):
            return self.parts[1][0](self.parts[0](hidden, mask), mask)

    sch = create_schedule(Pair())
    owners = [owner for owner, _ in sch.find("query")]
    assert owners == ["parts.0", "parts.1.0"]
    assert [owner for owner, _ in sch["parts.1.0"].find("query")] == [""]


@pytest.mark.parametrize(
    ("pattern", "kind", "words"),
    [
        (3, TypeError, "expected a regular expression for targets of modules, a function or a Pattern"),
        (nn.GELU(), TypeError, "expected"),
        ("(", ValueError, "not a regular expression"),
        (lambda x: x, ValueError, "must return a computed value"),
        (lambda x, y: x + 1, ValueError, "does not use its parameter 'y'"),
        (lambda x: x if x else -x, ValueError, "cannot be traced"),
    ],
)
def test_what_is_no_pattern_is_refused(sch, pattern, kind, words):
    with pytest.raises(kind, match=words):
        sch.find(pattern)


def test_stand_ins_of_patterns_compute_nothing():
    with pytest.raises(TypeError, match="pattern for find"):
        call_module("x", 3)
    with pytest.raises(TypeError, match="pattern for find"):
        ModulePattern("x")(3)
