"""Plans and placements as arrays: what a form of the model needs to know of each point."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.errors import FitError, TraceError
from makespan.perf._environment import Environment
from makespan.plans import (
    ExecutionPlan,
    Placement,
    RankGroups,
    boundary_flows,
    card_loads,
    cards_by_node,
    read_plan,
    resolve_micro_batch,
)
from makespan.workloads import Workload
from makespan.workloads import workload as load_workload

__all__ = [
    "Geometry",
    "Measured",
    "Points",
    "geometry",
    "measured_from_table",
    "plans_from_table",
    "points_from_plans",
    "points_from_table",
]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]
_FLAGS = ("is_zero", "is_offload", "is_model_parallel")


class Geometry(NamedTuple):
    """Load of network cards under the groups of a plan: 1 is the rate of one card, 2 half of it."""

    ring_load: float
    tp_load: float
    tp_local_share: float
    pp_load: float
    pp_local_hops: float


@lru_cache(maxsize=65536)
def geometry(gpus_per_node: tuple[int, ...], pp: int, tp: int, dp: int, gpus_per_nic: int) -> Geometry:
    """Derive the card loads of a plan on a placement; the most loaded card sets the rate of a group."""
    groups = RankGroups.of(gpus_per_node, pp, tp, dp)
    cards = [gpus_per_nic] * len(gpus_per_node)
    tensor = _group_loads(groups.tensor, cards).reshape(pp, dp).max(axis=1)
    flows = [boundary_flows(groups.ranks, stage * tp * dp, tp * dp, cards) for stage in range(pp - 1)]
    boundary = np.array([max([0, *sent.values(), *received.values()]) for sent, received in flows])
    return Geometry(
        ring_load=float(_group_loads(groups.data, cards).max()),
        tp_load=float(tensor.mean()),
        tp_local_share=float((tensor == 0).mean()),
        pp_load=float(boundary.sum()),
        pp_local_hops=float((boundary == 0).sum()),
    )


def _group_loads(groups: Sequence[Sequence[tuple[int, int]]], gpus_per_nic: Sequence[int]) -> Floats:
    """Return the largest card load that each group meets, 0 inside a node."""
    members = [cards_by_node(group, gpus_per_nic) for group in groups]
    load = card_loads(members)
    return np.array(
        [
            max(load[node, card] for node, (cards, _) in by_node.items() for card in cards)
            if len(by_node) > 1
            else 0.0
            for by_node in members
        ]
    )


@dataclass(frozen=True, slots=True)
class Points:
    """Struct of arrays over n points of one workload; every array has shape (n,).

    Parameters
    ----------
    workload
        What is trained; the same for all points.
    n_gpus, n_nodes, gpus_on_largest_node, dp, tp, pp, cpu_threads
        Size and shape of the placement, degrees of the plan, and CPU threads a GPU.
    replica_batch_size, n_micro
        Samples and passes of one replica in one optimiser step; micro-batches under a pipeline.
    checkpoint_fraction
        Share of the layers that recompute their activations, by the plan or by its stack.
    tokens_share
        Tokens of a sample over those of the plain data-parallel plans of the workload.
    is_zero, is_offload, is_model_parallel
        Partitioned optimiser, optimiser on the host, family with tensor or pipeline parallelism.
    ring_load, tp_load, tp_local_share, pp_load, pp_local_hops
        Loads of network cards.
    """

    workload: Workload
    n_gpus: Floats
    n_nodes: Floats
    gpus_on_largest_node: Floats
    dp: Floats
    tp: Floats
    pp: Floats
    replica_batch_size: Floats
    n_micro: Floats
    cpu_threads: Floats
    checkpoint_fraction: Floats
    tokens_share: Floats
    is_zero: Bools
    is_offload: Bools
    is_model_parallel: Bools
    ring_load: Floats
    tp_load: Floats
    tp_local_share: Floats
    pp_load: Floats
    pp_local_hops: Floats

    def __len__(self) -> int:
        return len(self.n_gpus)

    def take(self, index: Index | Bools) -> "Points":
        """Select points by index or mask."""
        arrays: dict[str, Any] = {name: getattr(self, name)[index] for name in _ARRAYS}
        return replace(self, **arrays)

    def join(self, other: "Points") -> "Points":
        """Append points; raises `FitError` where they are of another workload."""
        if other.workload.key != self.workload.key:
            raise FitError(
                f"points of {other.workload.key!r} cannot be added to points of {self.workload.key!r}"
            )
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in _ARRAYS
        }
        return replace(self, **arrays)

    @property
    def is_data_parallel(self) -> Bools:
        """Whether the plan is neither model parallel nor partitioned."""
        return ~(self.is_zero | self.is_offload | self.is_model_parallel)


_ARRAYS = tuple(field.name for field in fields(Points) if field.name != "workload")


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured times of n points, each (n,) in seconds; phases are NaN where not reported."""

    iter_time_s: Floats
    forward_s: Floats
    overlap_sync_s: Floats
    optimize_s: Floats

    def __len__(self) -> int:
        return len(self.iter_time_s)

    def take(self, index: Index | Bools) -> "Measured":
        """Select observations by index or mask."""
        return Measured(*(getattr(self, name)[index] for name in _TIMES))

    def join(self, other: "Measured") -> "Measured":
        """Append observations."""
        return Measured(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in _TIMES))


_TIMES = tuple(field.name for field in fields(Measured))


def points_from_plans(
    pairs: Sequence[tuple[ExecutionPlan, Placement]], workload: str | Workload, environment: Environment
) -> Points:
    """Build points of a workload or its key; the environment says which GPUs share a network card.

    Parameters
    ----------
    pairs
        Plan, with its micro-batch size resolved, and placement of each point.
    """
    spec = load_workload(workload) if isinstance(workload, str) else workload
    per_nic = environment.node.gpus_per_nic
    rows = [_row(plan, placement, spec, per_nic) for plan, placement in pairs]
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(_ARRAYS)).T
    arrays: dict[str, Any] = dict(zip(_ARRAYS, columns, strict=True))
    arrays |= {name: arrays[name].astype(bool) for name in _FLAGS}
    return Points(workload=spec, **arrays)


def _row(plan: ExecutionPlan, placement: Placement, spec: Workload, gpus_per_nic: int) -> tuple[float, ...]:
    bound = spec.for_plan(plan)
    loads = geometry(placement.gpus_per_node, plan.pp, plan.tp, plan.dp, gpus_per_nic)
    return (
        plan.n_gpus,
        placement.n_nodes,
        placement.gpus_per_node[-1],
        plan.dp,
        plan.tp,
        plan.pp,
        plan.replica_batch_size,
        plan.n_microbatches,
        plan.cpu_threads,
        1.0 if bound.stack.full_checkpointing else plan.checkpoint_fraction,
        bound.model.seq / spec.model.seq,
        plan.zero_stage > 0 and not plan.offload,
        plan.offload,
        plan.is_model_parallel,
        *loads,
    )


def plans_from_table(frame: pd.DataFrame, spec: Workload) -> list[tuple[ExecutionPlan, Placement]]:
    """Read plan and placement of every row of a throughput table; micro-batches stay unresolved."""
    pairs, batch = [], spec.global_batch_size
    rows = zip(frame["exec_plan"], frame["placement"], frame["cpu_threads"], strict=True)
    for text, place, threads in rows:
        placement = Placement.parse(str(place))
        n_gpus, count = placement.n_gpus, int(threads)
        plan = read_plan(str(text), n_gpus=n_gpus, global_batch_size=batch, cpu_threads=count)
        pairs.append((plan, placement))
    return pairs


def points_from_table(frame: pd.DataFrame, workload: str | Workload, environment: Environment) -> Points:
    """Read the points of a throughput table, in its order, for a workload or its key.

    Parameters
    ----------
    frame
        Schema `makespan.tables.THROUGHPUT`; feasible rows of one workload.
    environment
        Supplies the node for the micro-batch rule and the network cards.

    Raises
    ------
    TraceError
        A row is infeasible or of another workload.
    """
    spec = load_workload(workload) if isinstance(workload, str) else workload
    wrong = ~frame["feasible"].to_numpy(dtype=bool) | (frame["workload"] != spec.key).to_numpy()
    if wrong.any():
        row = frame.iloc[int(np.flatnonzero(wrong)[0])]
        raise TraceError(
            f"throughput table: row {row['exec_plan']!r} on {row['placement']!r} of {row['workload']!r} "
            f"cannot be fitted; accepted: feasible rows of {spec.key!r}"
        )
    pairs = [
        (resolve_micro_batch(plan, spec, environment.node), placement)
        for plan, placement in plans_from_table(frame, spec)
    ]
    return points_from_plans(pairs, spec, environment)


def measured_from_table(frame: pd.DataFrame) -> Measured:
    """Read the measured columns of a throughput table; a phase of 0 was not reported."""
    time, *phases = (frame[name].to_numpy(dtype=np.float64) for name in _TIMES)
    return Measured(time, *(np.where(phase > 0, phase, np.nan) for phase in phases))
