"""Search for a pattern in a graph, along the flow of the data."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from makespan.slapo._operations import IGNORED, Attribute, Operation, operation
from makespan.slapo._patterns import ANY, PatternGraph

__all__ = ["Match", "matches_in"]


class Match(list[tuple[str, fx.Node]]):
    """Nodes that compute what a pattern computes, with the path of their owner, in the order of the graph.

    Parameters
    ----------
    owner
        Path of the traced module, from the node of the schedule that was searched.
    nodes
        Nodes of its graph.
    inputs
        What the parameters of the pattern stand for, by name and in their order: a node, a constant, or a
        tensor of the module that no node reads.
    outputs
        Nodes whose values the pattern returns.
    returns_tuple
        Whether the pattern returns a tuple, even of one value.
    """

    def __init__(
        self,
        owner: str,
        nodes: Sequence[fx.Node],
        inputs: dict[str, Any],
        outputs: Sequence[fx.Node],
        returns_tuple: bool,
    ) -> None:
        super().__init__((owner, node) for node in nodes)
        self.owner, self.inputs = owner, inputs
        self.outputs, self.returns_tuple = tuple(outputs), returns_tuple

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes alone."""
        return [node for _, node in self]


@dataclass(frozen=True, slots=True)
class _State:
    """What parameters and nodes of the pattern stand for so far."""

    inputs: dict[fx.Node, Any] = field(default_factory=dict)
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)


class _Search:
    """One pattern in one graph."""

    def __init__(self, pattern: PatternGraph, owner: nn.Module, graph: fx.Graph) -> None:
        self.pattern, self.owner = pattern, owner
        self.order = {node: place for place, node in enumerate(graph.nodes)}
        self.found = {node: operation(node, owner) for node in graph.nodes}
        self.wanted: dict[fx.Node, Operation | None] = {}

    def all(self) -> list[_State]:
        """Every way in which the first result of the pattern and then the others fit."""
        first, *others = self.pattern.outputs
        states = []
        for node in self.order:
            state = next(self._with_others(self.nodes(first, node, _State()), others), None)
            if state is not None:
                states.append(state)
        return states

    def _with_others(self, states: Iterator[_State], outputs: list[fx.Node]) -> Iterator[_State]:
        for state in states:
            if not outputs:
                yield state
                continue
            first, *others = outputs
            candidates = [state.nodes[first]] if first in state.nodes else list(self.order)
            for node in candidates:
                yield from self._with_others(self.nodes(first, node, state), others)

    def nodes(self, wanted: fx.Node, found: fx.Node, state: _State) -> Iterator[_State]:
        """Ways in which a node fits one of the pattern, with all that leads to it."""
        if wanted in state.nodes:
            if state.nodes[wanted] is found:
                yield state
            return
        if found in state.nodes.values():
            return
        for pairs in self._orders(wanted, found):
            yield from self.operands(pairs, _State(state.inputs, {**state.nodes, wanted: found}))

    def _orders(self, wanted: fx.Node, found: fx.Node) -> Iterator[list[tuple[Any, Any]]]:
        """Operands to compare, in each order that is worth it; none if the operations differ."""
        regex = self.pattern.regex(wanted)
        if regex is not None:
            if found.op == "call_module" and re.match(regex, str(found.target)):
                args = wanted.args[1:] if wanted.op == "call_function" else wanted.args
                if len(args) == len(found.args) and wanted.kwargs.keys() == found.kwargs.keys():
                    named = [(wanted.kwargs[name], found.kwargs[name]) for name in wanted.kwargs]
                    yield [*zip(args, found.args, strict=True), *named]
            return
        if wanted not in self.wanted:
            self.wanted[wanted] = operation(wanted, self.pattern.owner, is_pattern=True)
        one, other = self.wanted[wanted], self.found[found]
        if (
            one is None
            or other is None
            or one.kind != other.kind
            or one.operands.keys() != other.operands.keys()
        ):
            return
        yield [(one.operands[name], other.operands[name]) for name in one.operands]
        if one.is_commutative:
            swapped: dict[str | int, Any] = dict(other.operands)
            swapped["input"], swapped["other"] = swapped["other"], swapped["input"]
            yield [(one.operands[name], swapped[name]) for name in one.operands]

    def operands(self, pairs: list[tuple[Any, Any]], state: _State) -> Iterator[_State]:
        """Ways in which operands fit, one after the other."""
        if not pairs:
            yield state
            return
        (wanted, found), *others = pairs
        for after in self.operand(wanted, found, state):
            yield from self.operands(others, after)

    def operand(self, wanted: Any, found: Any, state: _State) -> Iterator[_State]:
        """Ways in which one operand fits."""
        if wanted is IGNORED or found is IGNORED or wanted is ANY:
            yield state
        elif isinstance(wanted, fx.Node) and wanted.op in ("placeholder", "get_attr"):
            yield from self._bound(wanted, found, state)
        elif isinstance(wanted, fx.Node):
            if isinstance(found, fx.Node):
                yield from self.nodes(wanted, found, state)
        elif isinstance(wanted, tuple | list) and isinstance(found, tuple | list):
            if len(wanted) == len(found):
                yield from self.operands(list(zip(wanted, found, strict=True)), state)
        elif isinstance(wanted, slice) and isinstance(found, slice):
            ends = [(wanted.start, found.start), (wanted.stop, found.stop), (wanted.step, found.step)]
            yield from self.operands(ends, state)
        elif _is_equal(wanted, found):
            yield state

    def _bound(self, wanted: fx.Node, found: Any, state: _State) -> Iterator[_State]:
        reads = isinstance(found, Attribute) or (isinstance(found, fx.Node) and found.op == "get_attr")
        if wanted.op == "get_attr" and not reads:
            return
        if wanted not in state.inputs:
            yield _State({**state.inputs, wanted: found}, state.nodes)
        elif _is_same_value(state.inputs[wanted], found):
            yield state


def _is_same_value(known: Any, found: Any) -> bool:
    if isinstance(known, fx.Node) or isinstance(found, fx.Node):
        return known is found
    return _is_equal(known, found)


def _is_equal(wanted: Any, found: Any) -> bool:
    """Whether two constants are the same; one number stands for as many as there are axes."""
    if isinstance(found, tuple | list) and found and not isinstance(wanted, tuple | list):
        return all(_is_equal(wanted, one) for one in found)
    if isinstance(wanted, tuple | list) and wanted and not isinstance(found, tuple | list):
        return all(_is_equal(one, found) for one in wanted)
    if isinstance(wanted, bool) != isinstance(found, bool):
        return False
    return bool(wanted == found)


def matches_in(pattern: PatternGraph, owner: str, module: nn.Module, graph: fx.Graph) -> list[Match]:
    """Return matches that do not overlap, by the place of their first nodes."""
    search = _Search(pattern, module, graph)
    found = []
    for state in search.all():
        nodes = sorted(state.nodes.values(), key=search.order.__getitem__)
        found.append((search.order[nodes[0]], nodes, state))
    matches, taken = [], set[fx.Node]()
    for _, nodes, state in sorted(found, key=lambda one: one[0]):
        if taken.isdisjoint(nodes):
            taken.update(nodes)
            inputs = {str(one.target): state.inputs.get(one) for one in pattern.parameters}
            outputs = [state.nodes[one] for one in pattern.outputs]
            matches.append(Match(owner, nodes, inputs, outputs, pattern.returns_tuple))
    return matches
