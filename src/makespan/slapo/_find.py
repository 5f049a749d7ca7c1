"""The primitives that look for nodes and patterns in traced graphs, and what others take from them."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import fx

from makespan.slapo._errors import ArgumentError, KindError
from makespan.slapo._matcher import Match, matches_in
from makespan.slapo._patterns import checked_regex, pattern_graph
from makespan.slapo._registry import Primitive, register_primitive
from makespan.slapo._trace import ensure_traced
from makespan.slapo._traced import TracedModule

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["Find", "FindNode", "FindSubgraph", "as_matches"]


def _graphs(sch: "Schedule") -> Iterator[tuple[str, TracedModule]]:
    """Go through the traced modules at and below a node, by their paths from it."""
    ensure_traced(sch)
    for path, node in sch.named_schedules():
        if isinstance(node.mod, TracedModule):
            yield path[len(sch.path) :].lstrip("."), node.mod


class _Query(Primitive):
    @classmethod
    def is_query(cls) -> bool:
        """Say that the model stays as it is; a trace that was needed is journalled."""
        return True


@register_primitive()
class Find(_Query):
    """Find calls of modules by their names, or a pattern by its data flow."""

    @classmethod
    def name(cls) -> str:
        """Return ``find``."""
        return "find"

    @classmethod
    def apply(cls, sch: "Schedule", pattern: str | Callable[..., Any]) -> list[Any]:
        """Search the graphs of this module and of those below it; trace it first if it is not traced.

        Parameters
        ----------
        pattern
            A regular expression, matched from the start of the targets of called modules; the result is a
            list of pairs of owner and node. Or a function or `Pattern`, whose parameters stand for any
            value; the result is a list of matches, each a list of such pairs in the order of the graph.
        """
        if not isinstance(pattern, str):
            return list(FindSubgraph.apply(sch, pattern))
        regex = checked_regex(pattern, f"find of {sch.path!r}")
        found: list[tuple[str, fx.Node]] = sch.find_node(
            lambda node: node.op == "call_module" and regex.match(str(node.target)) is not None
        )
        return found


@register_primitive()
class FindNode(_Query):
    """Find nodes of graphs by a condition."""

    @classmethod
    def name(cls) -> str:
        """Return ``find_node``."""
        return "find_node"

    @classmethod
    def apply(cls, sch: "Schedule", condition: Callable[[fx.Node], bool]) -> list[tuple[str, fx.Node]]:
        """Return pairs of owner and node for which a condition holds, of any kind of node.

        Parameters
        ----------
        condition
            Called with each node.
        """
        if not _is_function(condition):
            raise KindError(f"find_node of {sch.path!r}: found {condition!r}; accepted: a function of a node")
        return [(owner, node) for owner, mod in _graphs(sch) for node in mod.graph.nodes if condition(node)]


@register_primitive()
class FindSubgraph(_Query):
    """Find a pattern in graphs by its data flow."""

    @classmethod
    def name(cls) -> str:
        """Return ``find_subgraph``."""
        return "find_subgraph"

    @classmethod
    def apply(cls, sch: "Schedule", pattern: Callable[..., Any]) -> list[Match]:
        """Return the matches of a pattern, which do not overlap, in the order of their first nodes.

        Parameters
        ----------
        pattern
            A function or a `Pattern`; its parameters stand for any value.
        """
        wanted = pattern_graph(pattern)
        found = [matches_in(wanted, owner, mod, mod.graph) for owner, mod in _graphs(sch)]
        return [match for matches in found for match in matches]


def as_matches(sch: "Schedule", primitive: str, targets: object) -> list[Match]:
    """Check what a user passes on from a search: one match or several, one pair or several."""
    where = f"{primitive} of {sch.path!r}"
    if isinstance(targets, Match) or _is_pair(targets):
        targets = [targets]
    if not isinstance(targets, list | tuple):
        raise KindError(f"{where}: found {targets!r}; accepted: what find or find_node returned")
    if not targets:
        raise ArgumentError(
            f"{where}: there is no match; accepted: what find or find_node returned, not empty"
        )
    matches = [_as_match(where, one) for one in targets]
    for match in matches:
        _check_is_current(sch, where, match)
    nodes = [node for match in matches for node in match.nodes]
    if len(set(nodes)) < len(nodes):
        raise ArgumentError(
            f"{where}: two of the matches share a node; accepted: matches that do not overlap"
        )
    return matches


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def _is_pair(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], fx.Node)
    )


def _as_match(where: str, value: Any) -> Match:
    """Make a match of nodes that were not found by a pattern: inputs in the order of their first use."""
    if isinstance(value, Match):
        return value
    pairs = [value] if _is_pair(value) else value
    if not isinstance(pairs, list) or not pairs or not all(map(_is_pair, pairs)):
        raise KindError(f"{where}: found {value!r}; accepted: pairs of owner and node, or lists of them")
    if len({owner for owner, _ in pairs}) > 1:
        raise ArgumentError(f"{where}: nodes of several owners in one match; accepted: nodes of one graph")
    chosen = {node for _, node in pairs}
    if bad := [node.name for node in chosen if not node.op.startswith("call_")]:
        raise ArgumentError(f"{where}: node {bad[0]!r} computes nothing; accepted: nodes that call something")
    nodes = [node for node in pairs[0][1].graph.nodes if node in chosen]
    inputs: dict[str, Any] = {}
    for node in nodes:
        for one in node.all_input_nodes:
            if one not in chosen:
                inputs.setdefault(one.name, one)
    outputs = [node for node in nodes if all(user not in chosen for user in node.users)]
    return Match(pairs[0][0], nodes, inputs, outputs, returns_tuple=len(outputs) > 1)


def _check_is_current(sch: "Schedule", where: str, match: Match) -> None:
    owner = sch[match.owner].mod
    graph = owner.graph if isinstance(owner, TracedModule) else None
    gone = [
        node
        for node in match.nodes
        if graph is None or node.graph is not graph or node not in set(graph.nodes)
    ]
    if gone:
        raise ArgumentError(
            f"{where}: node {gone[0].name!r} is not in the graph of {match.owner!r} any more; accepted:"
            " matches that are still there, so search again"
        )
