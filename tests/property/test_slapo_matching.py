"""Laws of matches in random graphs: what a match computes, and that rewriting it changes no value."""

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import example, given, settings, strategies as st
from schedules import check_invariants
from torch import fx, nn

from makespan.slapo import create_schedule

UNARY = (torch.tanh, torch.sigmoid, torch.sin)
BINARY = (torch.add, torch.mul, torch.sub)
N_NODES = 10

steps = st.tuples(st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 99), st.integers(0, 99))
programs = st.lists(steps, min_size=3, max_size=N_NODES)


def chain(x):
    return torch.tanh(torch.sigmoid(x))


def gate(x, y):
    return torch.mul(torch.sigmoid(x), y)


def diamond(x):
    base = torch.sin(x)
    return torch.add(torch.tanh(base), base)


def difference(x, y):
    return torch.sub(torch.tanh(x), torch.add(x, y))


def pair(x, y):
    return torch.sin(x), torch.tanh(y)


PATTERNS = (chain, gate, diamond, difference, pair)


class Program(nn.Module):
    """Operations, each on two of the values before it; returns what nothing else uses."""

    def __init__(self, program):
        super().__init__()
        self.program = program

    def forward(self, x, y):
        values, used = [x, y], set()
        for operation, first, second in self.program:
            places = [first % len(values), second % len(values)]
            if operation < len(UNARY):
                places = places[:1]
            function = (UNARY + BINARY)[operation]
            used.update(places)
            values.append(function(*(values[place] for place in places)))
        return tuple(
            value for place, value in enumerate(values) if place not in used or place == len(values) - 1
        )


class Recorder(fx.Interpreter):
    """Keeps the value of every node."""

    def __init__(self, module):
        super().__init__(module)
        self.values = {}

    def run_node(self, n):
        self.values[n] = super().run_node(n)
        return self.values[n]


def inputs():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(3, generator=draw, dtype=torch.float64) for _ in range(2)]


@settings(max_examples=60, deadline=None)
@given(programs, st.sampled_from(PATTERNS))
@example([(0, 0, 0), (1, 0, 0), (2, 2, 0)], pair)  # what one result is computed from is the other result
def test_a_match_computes_what_the_pattern_computes_and_can_be_rewritten(program, pattern):
    model = Program(program)
    expected = model(*inputs())
    sch = create_schedule(model)
    matches = sch.find(pattern)
    recorder = Recorder(sch.mod)
    recorder.run(*inputs())
    nodes = [node for match in matches for node in match.nodes]
    assert len(nodes) == len(set(nodes))
    order = {node: place for place, node in enumerate(sch.mod.graph.nodes)}
    assert [order[match.nodes[0]] for match in matches] == sorted(order[match.nodes[0]] for match in matches)
    for match in matches:
        found = pattern(*(recorder.values[one] for one in match.inputs.values()))
        for value, node in zip(found if match.returns_tuple else (found,), match.outputs, strict=True):
            assert torch.equal(value, recorder.values[node])
    code, rewritten = sch.mod.code, 0
    for match, rewrite in zip(
        matches, (lambda one: sch.replace(pattern, one), fused(sch), sch.checkpoint) * 4, strict=False
    ):
        try:
            rewrite(match)
            rewritten += 1
        except ValueError as error:  # another node needs what is inside, or waits for it
            assert "is used outside of it" in str(error) or "depends on its value" in str(error)
    assert (sch.mod.code == code) == (rewritten == 0)
    sch.mod.graph.lint()
    check_invariants(sch)
    for value, wanted in zip(sch.mod(*inputs()), expected, strict=True):
        assert torch.equal(value, wanted)


def fused(sch):
    return lambda match: sch.fuse(match, compiler=None)


@settings(max_examples=30, deadline=None)
@given(programs)
def test_every_pattern_that_is_the_program_itself_is_found(program):
    model = Program(program)
    try:
        sch = create_schedule(model)
        sch.trace()
        found = sch.find(lambda x, y: model.forward(x, y))
    except ValueError as error:  # an input that nothing uses cannot be a parameter of a pattern
        assert "does not use its parameter" in str(error) or "must return a computed value" in str(error)
        return
    assert len(found) == 1
    assert len(found[0]) == len(program)
