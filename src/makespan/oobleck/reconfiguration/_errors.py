"""What ends training when nodes are lost."""

from collections.abc import Iterable

from makespan.errors import TrainingError

__all__ = ["InsufficientNodes", "StateLost"]


class StateLost(TrainingError):
    """No node that is left has the state of some layer; training can go on from a checkpoint only.

    Parameters
    ----------
    layers
        The layers that nobody holds.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        self.layers = tuple(sorted(layers))
        named = ", ".join(map(str, self.layers))
        super().__init__(f"no node is left that holds layer(s) {named}; go on from the last checkpoint")


class InsufficientNodes(TrainingError):
    """So few nodes are left that the losses asked for could not be survived; the state is complete.

    Parameters
    ----------
    n_nodes, n_needed
        Nodes that are left, and the fewest on which training goes on.
    """

    def __init__(self, n_nodes: int, n_needed: int) -> None:
        self.n_nodes, self.n_needed = n_nodes, n_needed
        super().__init__(f"{n_nodes} node(s) are left; accepted: {n_needed} or more; write a checkpoint")
