"""What a stage of a pipeline does in an iteration, one instruction after the other.

Whoever carries them out may block in every transfer until the other side does the same one: where a stage
sends an activation and receives a gradient between two passes, it does first what its neighbour does first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from makespan.plans import one_f_one_b_order

__all__ = ["Instruction", "instructions", "n_buffers"]

Kind = Literal["load", "recv_act", "fwd", "send_act", "recv_grad", "bwd", "send_grad"]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One thing to do for a microbatch, whose activations lie in a buffer."""

    kind: Kind
    microbatch: int
    buffer: int


def n_buffers(stage: int, n_stages: int, n_microbatches: int) -> int:
    """Return how many microbatches a stage has room for, between their passes."""
    return max(2, min(n_stages - stage, n_microbatches))


def instructions(stage: int, n_stages: int, n_microbatches: int) -> Iterator[Instruction]:
    """Yield the instructions of a stage in order; neither sums over pipelines nor steps are among them."""
    room = n_buffers(stage, n_stages, n_microbatches)
    first, last = stage == 0, stage == n_stages - 1
    passes = one_f_one_b_order(stage, n_stages, n_microbatches)
    beyond = [] if last else one_f_one_b_order(stage + 1, n_stages, n_microbatches)
    for before, after in pairwise([("", -1), *passes, ("", -1)]):
        around: list[tuple[Kind, int]] = []
        if before[0] == "B" and not first:
            around.append(("send_grad", before[1]))
        with_next: list[tuple[Kind, int]] = []
        if after[0] == "B" and not last:
            with_next.append(("recv_grad", after[1]))
        if before[0] == "F" and not last:
            with_next.append(("send_act", before[1]))
        if len(with_next) == 2 and beyond.index(before) < beyond.index(after):
            with_next.reverse()
        around += with_next
        if after[0] == "F" and (first or last):
            around.append(("load", after[1]))
        if after[0] == "F" and not first:
            around.append(("recv_act", after[1]))
        if after[0]:
            around.append(("fwd" if after[0] == "F" else "bwd", after[1]))
        for kind, microbatch in around:
            yield Instruction(kind, microbatch, microbatch % room)
