"""Which template sizes are needed so that every number of nodes can be used, and f lost at once.

With templates of n0 up to n0 + p - 1 nodes, x pipelines take any number of nodes from x n0 to x (n0 + p - 1).
From f + 1 pipelines on these ranges leave no gap if and only if p >= 1 + ceil((n0 - 1) / (f + 1)).
"""

from collections.abc import Iterable
from typing import Literal, get_args

from makespan.errors import InputError, unknown_name

__all__ = [
    "GuaranteeUnsatisfiable",
    "TemplateSet",
    "check_guarantee",
    "least_template_count",
    "template_sizes",
]

TemplateSet = Literal["full", "minimal"]


class GuaranteeUnsatisfiable(InputError):
    """Some number of nodes cannot be used by f + 1 pipelines; the message names the first."""


def least_template_count(n0: int, f: int) -> int:
    """Return how many consecutive sizes from n0 on cover every number of nodes with f + 1 pipelines."""
    return 1 + -(-(n0 - 1) // (f + 1))


def check_guarantee(sizes: Iterable[int], n0: int, f: int, n_nodes: int) -> int | None:
    """Return the first number of nodes that these templates cannot use with f + 1 pipelines, None if none.

    Parameters
    ----------
    sizes
        Nodes of each template.
    n0, f
        Least nodes that hold the model, and nodes that may be lost at once.
    n_nodes
        Most nodes; every number from (f + 1) n0 to this is tried.
    """
    usable = sorted(set(sizes))
    most: list[int | None] = [0]  # pipelines that use exactly so many nodes
    for count in range(1, n_nodes + 1):
        found = [
            before + 1 for size in usable if size <= count and (before := most[count - size]) is not None
        ]
        most.append(max(found, default=None))
    for count in range((f + 1) * n0, n_nodes + 1):
        if (most[count] or 0) < f + 1:
            return count
    return None


def template_sizes(
    n0: int,
    f: int,
    n_nodes: int,
    template_set: TemplateSet = "full",
    largest: int | None = None,
    most_possible: int | None = None,
) -> range:
    """Return the nodes of each template that is needed.

    Parameters
    ----------
    n0, f, n_nodes
        Least nodes that hold the model, nodes that may be lost at once, and nodes at the start.
    template_set
        ``full``: up to what one pipeline can have, which leaves most choice; ``minimal``: as few as cover
        every number of nodes.
    largest
        Nodes of the largest template, instead of ``n_nodes - f * n0``.
    most_possible
        Nodes beyond which there is no template, since a node has a stage and a stage a layer.

    Raises
    ------
    InputError
        A number is too small, or there are fewer nodes than (f + 1) n0.
    GuaranteeUnsatisfiable
        The sizes leave a hole.
    """
    if template_set not in get_args(TemplateSet):
        raise unknown_name("template set", template_set, get_args(TemplateSet))
    if n0 < 1 or f < 0:
        raise InputError(f"n0 = {n0} and f = {f}; accepted: n0 of 1 or more, f of 0 or more")
    if n_nodes < (f + 1) * n0:
        raise InputError(
            f"{n_nodes} nodes; accepted: at least (f + 1) n0 = {(f + 1) * n0}, for {f + 1} pipelines"
        )
    end = (n_nodes - f * n0 if largest is None else largest) + 1
    if template_set == "minimal":
        end = min(end, n0 + least_template_count(n0, f))
    if most_possible is not None:
        end = min(end, most_possible + 1)
    sizes = range(n0, max(end, n0))
    hole = check_guarantee(sizes, n0, f, n_nodes)
    if hole is not None:
        found = f"{sizes.start} to {sizes.stop - 1} nodes" if sizes else "no size"
        raise GuaranteeUnsatisfiable(f"templates of {found} cannot use {hole} nodes with {f + 1} pipelines")
    return sizes
