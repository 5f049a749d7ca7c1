"""Optimizer state divided among the nodes of a layer (ZeRO-1), so that f losses still leave all of it.

Every node of a layer has all its weights, but the optimizer state of a weight lives on f + 1 of these nodes,
its *holders*. They step the weight; the other nodes receive the new one from them before the next passes.

Invariants, whatever is lost, in any phase:

- A step needs no other node, and every node that is left hears of a commit before it hears of a loss. So when
  nodes regroup, all holders that are left have weight and state of the last commit. No step is undone.
- A weight without its state is *behind* from the commit until the new one has arrived. A node does not count
  weights that are behind among what it has: they are copied from nodes that have them, as after a move.
- An iteration is prepared only by nodes that have all weights of the commit before it. So nothing is behind
  by more than one iteration, and only between a commit and the first passes after it.
- A node gives a state up only when training has resumed, and then all new holders have it, with the same
  checksum. So f losses at once leave a holder of every weight, before, during and after a regrouping.

What nodes have is told in *pieces* of a layer: the *frame* (buffers, and weights that are not trained, which
never change), each trained weight, and the optimizer state of each trained weight.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from makespan.oobleck.plan import Hosts, HybridPlan, host_of, owners

PieceKind = Literal["frame", "state", "weight"]
Sizes = Mapping[int, Sequence[int]]
"""Bytes of the trained weights of each layer, in the order of the layer."""


class Piece(NamedTuple):
    """Part of a layer; ``weight`` is the number of a trained weight in its layer, 0 for a frame."""

    layer: int
    kind: PieceKind
    weight: int = 0

    def text(self, sizes: Sequence[int] = ()) -> str:
        """Return the piece as text; that of a frame has the bytes of the trained weights of its layer."""
        numbers = sizes if self.kind == "frame" else (self.weight,)
        return " ".join(map(str, (self.layer, self.kind, *numbers)))


def pieces_of(layer: int, n_weights: int) -> frozenset[Piece]:
    """Return all pieces of a layer."""
    of_weights = {Piece(layer, kind, each) for kind in ("state", "weight") for each in range(n_weights)}
    return frozenset({Piece(layer, "frame"), *of_weights})


def read_piece(text: str) -> tuple[Piece, tuple[int, ...]]:
    """Return a piece from its text, and the sizes in it, which only a frame has."""
    layer, kind, *numbers = text.split()
    if kind == "frame":
        return Piece(int(layer), "frame"), tuple(map(int, numbers))
    return Piece(int(layer), "state" if kind == "state" else "weight", int(numbers[0])), ()


def read_holdings(holdings: Mapping[int, Collection[str]]) -> tuple[dict[int, frozenset[Piece]], Sizes]:
    """Return the pieces of each node, and the sizes of the weights of all layers that some node has."""
    sizes: dict[int, tuple[int, ...]] = {}
    held: dict[int, frozenset[Piece]] = {}
    for node, texts in holdings.items():
        read = [read_piece(text) for text in texts]
        held[node] = frozenset(piece for piece, _ in read)
        sizes |= {piece.layer: of_weights for piece, of_weights in read if piece.kind == "frame"}
    return held, sizes


def whole_layers(held: Mapping[int, Collection[Piece]], sizes: Sizes) -> dict[int, frozenset[int]]:
    """Return the layers of each node, without those of which no node has some piece any more."""
    there = frozenset().union(*held.values())
    whole = {layer for layer, each in sizes.items() if pieces_of(layer, len(each)) <= there}
    return {
        node: frozenset(piece.layer for piece in pieces if piece.kind == "frame" and piece.layer in whole)
        for node, pieces in held.items()
    }


def state_nodes(held: Mapping[int, Collection[Piece]]) -> dict[tuple[int, int], frozenset[int]]:
    """Return the nodes that have the optimizer state of each weight, by layer and number of the weight."""
    found: dict[tuple[int, int], set[int]] = {}
    for node, pieces in held.items():
        for layer, kind, weight in pieces:
            if kind == "state":
                found.setdefault((layer, weight), set()).add(node)
    return {key: frozenset(nodes) for key, nodes in found.items()}


def holders(
    plan: HybridPlan,
    sizes: Sizes,
    n_copies: int,
    hosts: Hosts,
    before: Mapping[tuple[int, int], Collection[int]] | None = None,
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Choose the nodes that hold the optimizer state of each trained weight, by layer and its number there.

    States stay where they are as far as no node has more than its share of the states of those layers that
    the same nodes have. Then each goes to the nodes with the least so far, large ones first. Equal input
    gives equal holders, so that all nodes find the same where no state is held yet.

    Parameters
    ----------
    plan, sizes
        The plan, and the weights of some layers; with a layer, of all that have the same nodes.
    n_copies
        Holders of each weight; all nodes of the layer if there are fewer.
    hosts
        Machine of each node, if several nodes share one: holders are on as many machines as possible.
    before
        Nodes that have each state now; None if no plan has been trained.
    """
    groups: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for layer, of_weights in sizes.items():
        found = groups.setdefault(owners(plan, layer), [])
        found += [(-size, layer, number) for number, size in enumerate(of_weights)]
    chosen: dict[tuple[int, int], list[int]] = {}
    for nodes, weights in groups.items():
        count = min(n_copies, len(nodes))
        load, places = dict.fromkeys(nodes, 0), {node: place for place, node in enumerate(nodes)}
        pairs: Counter[tuple[int, int]] = Counter()
        share = -count * sum(negative for negative, _, _ in weights) / len(nodes)
        for stays in (True, False):
            for negative, layer, number in sorted(weights):
                on = chosen.setdefault((layer, number), [])
                there = (before or {}).get((layer, number), ())
                while len(on) < count:
                    left = _on_new_hosts([node for node in nodes if node not in on], on, hosts)
                    if stays:
                        left = [node for node in left if node in there and load[node] - negative <= share]
                        if not left:
                            break
                    # Other copies of what a node has are on many nodes, which share its load if it is lost.
                    together = {node: sum(pairs[node, other] for other in on) for node in left}
                    node = min(
                        left,
                        key=lambda each: (load[each], each not in there, together[each], places[each]),
                    )
                    for other in on:
                        pairs[node, other] += 1
                        pairs[other, node] += 1
                    on.append(node)
                    load[node] -= negative
    return {weight: tuple(on) for weight, on in chosen.items()}


def _on_new_hosts(nodes: Sequence[int], chosen: Sequence[int], hosts: Hosts) -> list[int]:
    """Return the nodes on machines with the fewest of those that are chosen already."""
    taken = Counter(host_of(hosts, node) for node in chosen)
    counts = {node: taken[host_of(hosts, node)] for node in nodes}
    least = min(counts.values())
    return [node for node in nodes if counts[node] == least]


def senders(nodes: Sequence[int], of_weight: Sequence[int], number: int) -> dict[int, int]:
    """Return who sends a new weight to each of the nodes of its layer that is not among its holders."""
    others = [node for node in nodes if node not in of_weight]
    return {node: of_weight[(place + number) % len(of_weight)] for place, node in enumerate(others)}


def needed_pieces(
    plan: HybridPlan, sizes: Sizes, states: Mapping[tuple[int, int], Collection[int]]
) -> dict[int, frozenset[Piece]]:
    """Return the pieces that each node of a plan has to have, of the layers in ``sizes``.

    ``states`` are the `holders`.
    """
    needed: dict[int, set[Piece]] = {node: set() for node in plan.nodes}
    for layer, of_weights in sizes.items():
        for piece in pieces_of(layer, len(of_weights)):
            for node in states[layer, piece.weight] if piece.kind == "state" else owners(plan, layer):
                needed[node].add(piece)
    return {node: frozenset(pieces) for node, pieces in needed.items()}
