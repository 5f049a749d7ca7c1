"""Which few rows of a throughput table are sampled for the fit."""

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.perf._points import plans_from_table
from makespan.plans import ExecutionPlan, Placement, PlanFamily
from makespan.workloads import workload as load_workload

__all__ = ["sampling_design"]

Bools = npt.NDArray[np.bool_]
Pair = tuple[ExecutionPlan, Placement]

_OFFLOAD = (PlanFamily.ZERO_OFFLOAD, PlanFamily.ZERO_OFFLOAD_GC)
_WANTED: tuple[tuple[tuple[PlanFamily, ...], tuple[str, ...]], ...] = (
    ((PlanFamily.DP,), ("2", "8", "2222")),
    ((PlanFamily.ZERO_DP,), ("44",)),
    (_OFFLOAD, ("2", "8", "2222")),
)
_MIXED_DEGREE = 4  # both degrees of the third model-parallel row, if it exists


def sampling_design(frame: pd.DataFrame, workload: str) -> Bools:
    """Choose the rows to fit: at most seven data-parallel ones and three model-parallel ones.

    The rule looks at plans and placements, never at times. Of plain data parallelism it takes two
    and eight GPUs of one node and eight GPUs on four nodes, of the partitioned optimiser
    eight GPUs on two nodes, of offload the same three as of data parallelism. A family of which
    fewer than two of its rows exist (fewer than one, if one is wanted) is spread over what
    there is: fewest, most and middle number of GPUs and CPU threads. Of model-parallel plans it
    takes the shallowest with the widest tensor parallelism on most GPUs, the deepest with the
    narrowest on fewest GPUs, and the one nearest to tensor and pipeline degree four.

    Parameters
    ----------
    frame
        Schema `makespan.tables.THROUGHPUT`, rows of one workload. Infeasible and flagged rows are
        not sampled.
    workload
        Key of the workload.

    Returns
    -------
    numpy.ndarray
        Mask of the sampled rows, (n_rows,).
    """
    usable = np.flatnonzero((frame["feasible"] & frame["clean"]).to_numpy(dtype=bool))
    pairs = dict(
        zip(usable.tolist(), plans_from_table(frame.iloc[usable], load_workload(workload)), strict=True)
    )
    chosen: list[int] = []
    for families, placements in _WANTED:
        members = {row: pair for row, pair in pairs.items() if pair[0].plan_family in families}
        chosen += _data_parallel_rows(members, placements)
    chosen += _model_parallel_rows({row: pair for row, pair in pairs.items() if pair[0].is_model_parallel})
    mask = np.zeros(len(frame), dtype=bool)
    mask[chosen] = True
    return mask


def _data_parallel_rows(members: dict[int, Pair], placements: tuple[str, ...]) -> list[int]:
    exact = [
        row
        for text in placements
        for row, (_, placement) in members.items()
        if placement == Placement.parse(text)
    ]
    if len(exact) >= min(2, len(placements)) or not members:
        return exact[: len(placements)]
    ordered = sorted(members, key=lambda row: (*_size(members[row]), row))
    return list(dict.fromkeys((ordered[-1], ordered[0], ordered[(len(ordered) - 1) // 2])))[: len(placements)]


def _size(pair: Pair) -> tuple[int, int, int]:
    plan, placement = pair
    return placement.n_gpus, placement.n_nodes, plan.cpu_threads


def _model_parallel_rows(members: dict[int, Pair]) -> list[int]:
    if not members:
        return []

    def shallow(row: int) -> tuple[int, ...]:
        plan, place = members[row]
        return plan.pp, -plan.tp, -plan.n_gpus, -place.n_nodes, row

    def deep(row: int) -> tuple[int, ...]:
        plan, place = members[row]
        return -plan.pp, plan.tp, plan.n_gpus, place.n_nodes, row

    def mixed(row: int) -> tuple[float, ...]:
        plan, place = members[row]
        distance = abs(np.log2(plan.pp / _MIXED_DEGREE)) + abs(np.log2(plan.tp / _MIXED_DEGREE))
        return float(distance), plan.n_gpus, place.n_nodes, row

    chosen: list[int] = [min(members, key=shallow)]
    for order in (deep, mixed):
        left = [row for row in members if row not in chosen]
        chosen += [min(left, key=order)] if left else []
    return chosen
