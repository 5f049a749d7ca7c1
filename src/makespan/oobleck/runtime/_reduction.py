"""The sum of gradients over pipelines whose stages begin and end at different layers.

Every process goes through the same buckets in the same order, by descending layer, and takes part in those of
layers that it holds. Layers in a row with the same owners make one bucket; weights that are tied make one of
their own, to which each of their layers contributes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from makespan.oobleck.planning import HybridPlan
from makespan.oobleck.runtime._links import Links, Transfer
from makespan.oobleck.runtime._plans import owners

__all__ = ["Bucket", "all_reduce", "buckets", "classes", "ordered_sums", "sum_groups"]

_GRADIENT, _SUM = 16, 17
Ties = Sequence[tuple[tuple[int, str], tuple[int, str]]]
Weight = tuple[int, str]
Held = Mapping[int, Mapping[str, nn.Parameter]]
"""Weights by layer and name."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are added up together.

    Parameters
    ----------
    layers
        Their layers, descending; of tied weights, ascending.
    tied
        The weights that are tied, None for all of the layers that are not.
    contributions
        Node and layers of each summand, in the order of the sum.
    """

    layers: tuple[int, ...]
    tied: tuple[Weight, ...] | None
    contributions: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Return all who take part, the one that adds up first."""
        return tuple(dict.fromkeys(node for node, _ in self.contributions))

    def weights(self, layers: tuple[int, ...], held: Held, tied: frozenset[Weight]) -> list[nn.Parameter]:
        """Return the weights that a contribution is made of."""
        if self.tied is not None:
            return [held[layer][name] for layer, name in self.tied if layer in layers]
        return [
            one for layer in layers for name, one in held[layer].items() if (layer, name) not in tied
        ]  # fmt: skip


def classes(ties: Ties) -> list[tuple[Weight, ...]]:
    """Return the sets of weights that are tied to each other, each ascending."""
    found: list[set[Weight]] = []
    for pair in ties:
        joined = set(pair).union(*(one for one in found if one & set(pair)))
        found = [one for one in found if not one & joined] + [joined]
    return sorted(tuple(sorted(one)) for one in found)


def buckets(plan: HybridPlan, n_layers: int, ties: Ties, bucketed: bool) -> list[Bucket]:
    """Return all buckets in the order in which every process goes through them."""
    runs: list[tuple[tuple[int, ...], list[int]]] = []
    for layer in reversed(range(n_layers)):
        nodes = owners(plan, layer)
        if bucketed and runs and runs[-1][0] == nodes:
            runs[-1][1].append(layer)
        else:
            runs.append((nodes, [layer]))
    plain = [
        Bucket(tuple(layers), None, tuple((node, tuple(layers)) for node in nodes)) for nodes, layers in runs
    ]
    return plain + [_tied(plan, weights) for weights in reversed(classes(ties))]


def _tied(plan: HybridPlan, weights: tuple[Weight, ...]) -> Bucket:
    places = [owners(plan, layer) for layer, _ in weights]
    summands = [
        (node, (layer,)) for nodes in zip(*places, strict=True)
        for node, (layer, _) in zip(nodes, weights, strict=True)
    ]  # fmt: skip
    return Bucket(tuple(layer for layer, _ in weights), weights, tuple(summands))


def sum_groups(found: Sequence[Bucket]) -> list[tuple[int, ...]]:
    """Return the sets of nodes that add up together, each once, in an order that all share."""
    return list(dict.fromkeys(one.nodes for one in found if len(one.nodes) > 1))


def _flat(weights: Sequence[nn.Parameter]) -> Tensor:
    parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in weights]
    return torch.cat([one.reshape(-1) for one in parts])


def _scatter(total: Tensor, weights: Sequence[nn.Parameter]) -> None:
    start = 0
    for one in weights:
        one.grad = total[start : start + one.numel()].view_as(one)
        start += one.numel()


@dataclass(frozen=True, slots=True)
class _Own:
    """The part of this process in a bucket: its summands by their number, and where the sum goes."""

    bucket: Bucket
    summands: dict[int, Tensor]
    weights: list[list[nn.Parameter]]


def _parts(found: Sequence[Bucket], node: int, held: Held, ties: Ties) -> Iterator[_Own]:
    tied = frozenset(weight for one in classes(ties) for weight in one)
    for bucket in found:
        numbers = [number for number, (one, _) in enumerate(bucket.contributions) if one == node]
        weights = [bucket.weights(bucket.contributions[one][1], held, tied) for one in numbers]
        if weights and weights[0]:
            summands = {number: _flat(one) for number, one in zip(numbers, weights, strict=True)}
            yield _Own(bucket, summands, weights)


def all_reduce(
    found: Sequence[Bucket], links: Links, held: Held, ties: Ties, divisor: int, begin: Callable[[], object]
) -> int:
    """Add up with the sum of the backend.

    Gradients become their sum over all pipelines, divided by ``divisor``; ``begin`` is called before each
    sum. Returns in how many sums with others this process took part.
    """
    running: list[tuple[_Own, Tensor, Transfer | None]] = []
    for own in _parts(found, links.own, held, ties):
        begin()
        total, nodes = _added(list(own.summands.values())), own.bucket.nodes
        running.append((own, total, links.all_reduce(total, nodes) if len(nodes) > 1 else None))
    for own, total, transfer in running:
        if transfer is not None:
            transfer.finish()
        total /= divisor
        for weights in own.weights:
            _scatter(total, weights)
    return sum(transfer is not None for _, _, transfer in running)


def ordered_sums(
    found: Sequence[Bucket], links: Links, held: Held, ties: Ties, divisor: int, begin: Callable[[], object]
) -> int:
    """Add up in the order of the pipelines, at the first owner; otherwise as `all_reduce`."""
    parts = list(_parts(found, links.own, held, ties))
    sent = [
        links.send(one, own.bucket.nodes[0], _GRADIENT)
        for own in parts if own.bucket.nodes[0] != links.own
        for one in own.summands.values()
    ]  # fmt: skip
    for own in parts:
        begin()
        root, *others = own.bucket.nodes
        empty = torch.empty_like(next(iter(own.summands.values())))
        if root != links.own:
            total = links.receive(empty, root, _SUM)
        else:
            total = _added(
                [
                    own.summands[number] if node == root
                    else links.receive(torch.empty_like(empty), node, _GRADIENT)
                    for number, (node, _) in enumerate(own.bucket.contributions)
                ]
            )  # fmt: skip
            total /= divisor
            sent += [links.send(total, node, _SUM) for node in others]
        for weights in own.weights:
            _scatter(total, weights)
    for transfer in sent:
        transfer.finish()
    return sum(len(own.bucket.nodes) > 1 for own in parts)


def _added(summands: Sequence[Tensor]) -> Tensor:
    total = summands[0].clone()
    for one in summands[1:]:
        total += one
    return total
