"""All ways to use a number of nodes: how many pipelines of each template, at least f + 1 in all."""

from collections.abc import Iterator, Sequence

import numpy as np

from makespan.errors import InputError

__all__ = ["count_plans", "enumerate_plans"]


def _checked(sizes: Sequence[int], n_nodes: int, f: int) -> None:
    if list(sizes) != sorted(set(sizes)) or not sizes or sizes[0] < 1:
        raise InputError(f"template sizes {list(sizes)}; accepted: one or more ascending numbers from 1 on")
    if n_nodes < 0 or f < 0:
        raise InputError(f"{n_nodes} nodes and f = {f}; accepted: 0 or more of both")


def enumerate_plans(sizes: Sequence[int], n_nodes: int, f: int = 0) -> Iterator[tuple[int, ...]]:
    """Yield how many pipelines of each template use all nodes, in numbers of f + 1 pipelines or more.

    Parameters
    ----------
    sizes
        Nodes of each template, ascending, (n_templates,).
    n_nodes, f
        Nodes to use, and nodes that may be lost at once.

    Yields
    ------
    tuple of int
        Pipelines of each template, (n_templates,); fewer of the largest first.

    Raises
    ------
    InputError
        Sizes are not ascending, or a number is negative.
    """
    _checked(sizes, n_nodes, f)
    reachable = [[left == 0 for left in range(n_nodes + 1)]]  # by the first templates
    for size in sizes:
        row = list(reachable[-1])
        for count in range(size, n_nodes + 1):
            row[count] = row[count] or row[count - size]
        reachable.append(row)

    def below(n_templates: int, left: int) -> Iterator[tuple[int, ...]]:
        if n_templates == 0:
            yield ()
            return
        size = sizes[n_templates - 1]
        for count in range(left // size + 1):
            rest = left - count * size
            if reachable[n_templates - 1][rest]:
                for first in below(n_templates - 1, rest):
                    yield (*first, count)

    return (counts for counts in below(len(sizes), n_nodes) if sum(counts) >= f + 1)


def count_plans(sizes: Sequence[int], n_nodes: int, f: int = 0) -> int:
    """Return how many there are, without making them; arguments and errors as for `enumerate_plans`."""
    _checked(sizes, n_nodes, f)
    if sizes[0] * (f + 1) > n_nodes:
        return 0
    # By nodes used, the plans of 0, 1, ... f pipelines, and of all; whole numbers of any length.
    ways = np.zeros((n_nodes + 1, f + 2), dtype=object)
    ways[0, [0, -1]] = 1
    for size in sizes:
        for used in range(size, n_nodes + 1):
            ways[used, 1:-1] += ways[used - size, :-2]
            ways[used, -1] += ways[used - size, -1]
    return int(ways[n_nodes, -1] - ways[n_nodes, :-1].sum())
