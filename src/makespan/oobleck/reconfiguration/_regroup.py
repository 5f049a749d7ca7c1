"""Who trains with whom after a loss: pipelines shrink, borrow single nodes, or merge."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from makespan.oobleck.reconfiguration._errors import InsufficientNodes

__all__ = ["Regrouping", "regroup"]

Groups = list[list[int]]


@dataclass(frozen=True, slots=True)
class Regrouping:
    """Nodes of each pipeline by ascending number, and what was done, each thing once."""

    groups: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]


def regroup(groups: Sequence[Sequence[int]], lost: Collection[int], n0: int) -> Regrouping:
    """Give every pipeline that is left ``n0`` nodes or more, with as few moves as that takes.

    Oobleck, section 5.1. A pipeline that still has enough nodes takes a smaller template. One that has too
    few borrows the last nodes of the largest; where nobody can spare one, whole pipelines merge.

    Parameters
    ----------
    groups
        Nodes of each pipeline, in order.
    lost
        Nodes that are gone.
    n0
        Fewest nodes of a pipeline.

    Returns
    -------
    Regrouping
        ``min(len(groups), nodes // n0)`` pipelines, empty ones not counted.

    Raises
    ------
    InsufficientNodes
        Fewer than ``n0`` nodes are left.
    """
    gone = frozenset(lost)
    left = [rest for group in groups if (rest := [node for node in group if node not in gone])]
    n_nodes = sum(map(len, left))
    if n_nodes < n0:
        raise InsufficientNodes(n_nodes, n0)
    found, done = _grouped(left, n0, lend_again=False)
    if len(found) < min(len(left), n_nodes // n0):
        found, done = _grouped(left, n0, lend_again=True)
    n_left = [len(group) - len(gone.intersection(group)) for group in groups]
    kinds = {
        "drop": len(left) < len(groups),
        "re-instantiate": any(n0 <= n < len(group) for n, group in zip(n_left, groups, strict=True)),
        "borrow": "borrow" in done,
        "merge": "merge" in done,
    }
    return Regrouping(
        tuple(map(tuple, sorted(found, key=len))), tuple(kind for kind, is_done in kinds.items() if is_done)
    )


def _grouped(left: Groups, n0: int, lend_again: bool) -> tuple[Groups, set[str]]:
    """Borrow, then merge; with ``lend_again`` what a merged pipeline can spare is lent before the next.

    Deviation: the published order never lends what merging made larger, and then may end with fewer
    pipelines than the nodes allow; `regroup` falls back to lending there.
    """
    groups, kinds = [list(group) for group in left], set[str]()
    _borrow(groups, n0, kinds)
    short = [group for group in groups if len(group) < n0]
    good = [group for group in groups if len(group) >= n0]
    while short:
        merged = short.pop(0)
        kinds.add("merge")
        while len(merged) < n0:
            merged = merged + (short or good).pop(0)
        good.append(merged)
        if lend_again:
            _borrow(whole := short + good, n0, kinds)
            short = [group for group in whole if len(group) < n0]
            good = [group for group in whole if len(group) >= n0]
    return good, kinds


def _borrow(groups: Groups, n0: int, kinds: set[str]) -> None:
    """Fill short pipelines, in order, with the last nodes of the largest, the last of equals."""
    for short in groups:
        while len(short) < n0:
            donor = max(reversed(groups), key=len)
            if len(donor) <= n0:
                return
            kinds.add("borrow")
            while len(short) < n0 < len(donor):
                short.append(donor.pop())
