"""Exact event schedule of a pipeline: the slow reference for the closed form.

Non-interleaved 1F1B: each stage runs ``min(m, p - 1 - i)`` forwards to warm up, then one forward
and one backward in turn, then drains the backwards.
"""

from collections.abc import Sequence

from makespan.errors import InputError

__all__ = ["closed_form_time_s", "one_f_one_b_order", "pipeline_time_s"]


def closed_form_time_s(
    forward_s: Sequence[float], backward_s: Sequence[float], n_microbatches: int, interleave: int = 1
) -> float:
    """Return the pipeline time without transfers: all stages once, the slowest for the rest.

    Parameters
    ----------
    forward_s, backward_s
        Time of one micro-batch on each stage [s].
    n_microbatches
        Micro-batches.
    interleave
        Model chunks a stage; divides the ramp.
    """
    both = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    return n_microbatches * max(both) + (sum(both) - max(both)) / interleave


def one_f_one_b_order(stage: int, n_stages: int, n_microbatches: int) -> list[tuple[str, int]]:
    """Return the operations of a stage in order: ``("F", k)`` and ``("B", k)`` of micro-batch k."""
    warm_up = min(n_microbatches, n_stages - 1 - stage)
    order = [("F", k) for k in range(warm_up)]
    for k in range(n_microbatches - warm_up):
        order += [("F", warm_up + k), ("B", k)]
    return order + [("B", k) for k in range(n_microbatches - warm_up, n_microbatches)]


def pipeline_time_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    n_microbatches: int,
    transfer_s: Sequence[float] | float = 0.0,
) -> float:
    """Run the 1F1B schedule event by event and return when the last stage is idle.

    Parameters
    ----------
    forward_s, backward_s
        Time of one micro-batch on each stage [s].
    n_microbatches
        Micro-batches, at least 1.
    transfer_s
        Time of one transfer over each boundary, or the same for all [s].

    Raises
    ------
    InputError
        There is no stage or no micro-batch, or the lengths do not fit.
    """
    p, m = len(forward_s), n_microbatches
    edges = [float(transfer_s)] * (p - 1) if isinstance(transfer_s, int | float) else list(transfer_s)
    if p < 1 or m < 1 or len(backward_s) != p or len(edges) != p - 1:
        raise InputError(
            f"schedule of {p} forward and {len(backward_s)} backward times, {len(edges)} transfers and "
            f"{m} micro-batches; accepted: one or more stages with both times, one transfer fewer, and "
            "one micro-batch or more"
        )
    orders = [one_f_one_b_order(stage, p, m) for stage in range(p)]
    finished: dict[tuple[int, str, int], float] = {}
    clock, position = [0.0] * p, [0] * p
    remaining = sum(len(order) for order in orders)
    while remaining:
        for stage in range(p):
            while position[stage] < len(orders[stage]):
                kind, k = orders[stage][position[stage]]
                ready = _ready_at(finished, edges, stage, p, kind, k)
                if ready is None:
                    break
                duration = forward_s[stage] if kind == "F" else backward_s[stage]
                clock[stage] = max(clock[stage], ready) + duration
                finished[stage, kind, k] = clock[stage]
                position[stage] += 1
                remaining -= 1
    return max(clock)


def _ready_at(
    finished: dict[tuple[int, str, int], float],
    edges: list[float],
    stage: int,
    n_stages: int,
    kind: str,
    k: int,
) -> float | None:
    """Return when the input of an operation has arrived; None if it is not known yet."""
    if kind == "F":
        source, edge = stage - 1, edges[stage - 1] if stage else 0.0
    else:
        source, edge = stage + 1, edges[stage] if stage < n_stages - 1 else 0.0
    if source in (-1, n_stages):
        return 0.0 if kind == "F" else finished.get((stage, "F", k))
    done = finished.get((source, kind, k))
    return None if done is None else done + edge
