"""Backward passes in two parts: the gradients of a stage's inputs first, those of its weights later.

The stage before waits for the first part alone, and the second part fills what would be idle time. Both run
the same operators as one whole pass, each of them once: an operator on the way to an input that also has
weights, such as a product, is run in the first part for its input, and in the second for its weights.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

Node = Any  # of the graph; the class of torch lacks annotations of what is used here


class SplitBackward:
    """Backward pass of one microbatch; creating it runs the first part, `finish` the second.

    Weights that several operators on the way to the inputs use get their gradients in the first part, because
    a later pass from one of these operators would run through the others again. The second part goes through
    the weights from the last to the first one, whatever the graph looks like, so that processes that exchange
    gradients do so in one order. The graph keeps what it saved until the second part is done.

    Parameters
    ----------
    outputs, gradients
        Outputs of the stage that require gradients, or its loss, and the gradient of each.
    inputs
        Leaf tensors whose gradients come first. Without any, the whole pass is run at once.
    weights
        Weights of the stage, in the order of the model.
    early
        Those of them that get their gradients in the first part in any case.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        weights: Iterable[nn.Parameter],
        early: Iterable[nn.Parameter] = (),
    ) -> None:
        self._later: list[_Operator] = []
        if not inputs:
            torch.autograd.backward(outputs, gradients)
            return
        roots = [output.grad_fn for output in outputs]
        named = {id(weight): weight for weight in weights}
        first, self._later = _divided(roots, inputs, named, {id(weight) for weight in early})
        handles = [
            operator.node.register_prehook(operator.take)
            for operator in self._later
            if operator.is_on_the_way
        ]
        for operator in self._later:
            if not operator.is_on_the_way:  # an output that follows from weights alone
                operator.take(_given(operator.node, outputs, gradients))
        try:
            torch.autograd.backward(outputs, gradients, inputs=[*inputs, *first], retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()

    def finish(self) -> None:
        """Add the gradients of the weights to those of earlier microbatches."""
        for operator in self._later:
            operator.run()
        self._later = []


class _Operator:
    """Operator whose weights get their gradients later, and the gradients of its outputs."""

    def __init__(self, node: Node, weights: list[nn.Parameter], *, is_on_the_way: bool) -> None:
        self.node, self.weights, self.is_on_the_way = node, weights, is_on_the_way
        self._gradients: tuple[Tensor | None, ...] = ()

    def take(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Keep the gradients of the outputs."""
        self._gradients = gradients

    def run(self) -> None:
        """Run the operator once more, for its weights alone."""
        known = [(place, each) for place, each in enumerate(self._gradients) if each is not None]
        if not known:  # no gradient has reached it
            return
        edges = [GradientEdge(self.node, place) for place, _ in known]
        torch.autograd.backward(edges, [each for _, each in known], inputs=self.weights, retain_graph=True)


def _given(node: Node, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of the outputs that an operator made, by their place among its outputs."""
    given = {
        output.output_nr: gradient
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.grad_fn is node
    }
    return tuple(given.get(place) for place in range(max(given) + 1))


def _divided(
    roots: Sequence[Node], inputs: Sequence[Tensor], weights: dict[int, nn.Parameter], early: set[int]
) -> tuple[list[nn.Parameter], list[_Operator]]:
    """Return the weights whose gradients have to come first, and the operators that run later."""
    below = _below(roots)
    wanted = {id(each) for each in inputs}
    reached: dict[Node, set[int]] = {}  # weights that an operator leads to without a way to the inputs
    is_on_the_way: dict[Node, bool] = {}
    for node in below:
        variable = getattr(node, "variable", None)
        following = [each for each, _ in node.next_functions if each is not None]
        is_on_the_way[node] = id(variable) in wanted or any(is_on_the_way[each] for each in following)
        reached[node] = {id(variable)} & weights.keys()
        reached[node] |= {weight for each in following if not is_on_the_way[each] for weight in reached[each]}
    users = [node for node in below if is_on_the_way[node] and reached[node]]
    users += [node for node in dict.fromkeys(roots) if not is_on_the_way[node] and reached[node]]
    n_users: dict[int, int] = {}
    for node in users:
        for weight in reached[node]:
            n_users[weight] = n_users.get(weight, 0) + 1
    first = [weights[number] for number, count in n_users.items() if count > 1 or number in early]
    later: list[tuple[int, _Operator]] = []
    places = {number: place for place, number in enumerate(weights)}
    is_first = {id(weight) for weight in first}
    for node in users:
        own = sorted(reached[node] - is_first, key=places.__getitem__)
        if own:
            held = [weights[number] for number in own]
            later.append((places[own[0]], _Operator(node, held, is_on_the_way=is_on_the_way[node])))
    return first, [operator for _, operator in sorted(later, key=lambda pair: -pair[0])]


def _below(roots: Sequence[Node]) -> list[Node]:
    """Return all operators of a graph, each after those whose gradients follow from its own."""
    order: list[Node] = []
    seen: set[Node] = set()
    left: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while left:
        node, is_done = left.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            left.append((node, True))
            left += [(each, False) for each, _ in node.next_functions if each is not None]
    return order
