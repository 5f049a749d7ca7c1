"""Points of the emulator: plans in placements, and the grid of them that makes up a trace."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pandas as pd

from makespan.arguments import check_fields, check_range, typed
from makespan.errors import InputError, PlanError, TraceError
from makespan.hardware import ClusterSpec
from makespan.plans import (
    DEFAULT_CPU_THREADS,
    ExecutionPlan,
    Placement,
    PlanFamily,
    enumerate_placements,
    read_plan,
    write_plan,
)
from makespan.workloads import Workload

_MULTISET_GPUS = (1, 2, 4, 8)  # data-parallel plans run in every placement of these numbers of GPUs,
_EQUAL_SPLIT_GPUS = (16,)  # and only in equal splits of these
# Tensor parallelism with accumulation stays on one node.
_ONE_NODE = tuple(Placement((count,)) for count in (1, 2, 3, 4))
_DEGREES, _REPLICAS = range(1, 9), (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Point:
    """One plan in one placement; its micro-batch size follows from the rule of the workload."""

    plan: ExecutionPlan
    placement: Placement

    def __post_init__(self) -> None:
        check_fields(self, "point")

    @property
    def text(self) -> str:
        """Plan, placement and CPU threads in trace notation."""
        threads = self.plan.cpu_threads
        return f"{write_plan(self.plan, cpu_threads=threads)} on {self.placement.text} with {threads} threads"


@typed
def read_point(workload: Workload, exec_plan: str, placement: str, cpu_threads: int) -> Point:
    """Read a point in trace notation.

    Raises
    ------
    NotationError, PlanError
        A text cannot be read; plan, placement and batch contradict each other.
    """
    place = Placement.parse(placement)
    plan = read_plan(
        exec_plan, n_gpus=place.n_gpus, global_batch_size=workload.global_batch_size, cpu_threads=cpu_threads
    )
    return Point(plan, place)


def points_from_frame(workload: Workload, frame: pd.DataFrame, where: str = "points") -> list[Point]:
    """Read the columns ``exec_plan``, ``placement`` and ``cpu_threads`` of a table."""
    points = []
    columns = (frame[name] for name in ("exec_plan", "placement", "cpu_threads"))
    for number, (exec_plan, placement, threads) in enumerate(zip(*columns, strict=True), start=1):
        try:
            points.append(read_point(workload, str(exec_plan), str(placement), int(threads)))
        except InputError as error:
            raise TraceError(f"{where}: row {number}: {error}") from error
    return points


@typed
def equal_placements(n_gpus: int, cluster: ClusterSpec, smallest: int = 1) -> tuple[Placement, ...]:
    """Return the placements with equal counts on all nodes, fewest nodes first."""
    check_range("n_gpus", n_gpus, 1)
    check_range("smallest", smallest, 1)
    counts = range(min(n_gpus, cluster.gpus_per_node), smallest - 1, -1)
    return tuple(
        Placement((count,) * (n_gpus // count))
        for count in counts
        if n_gpus % count == 0 and n_gpus // count <= cluster.n_nodes
    )


def data_parallel_placements(cluster: ClusterSpec) -> tuple[Placement, ...]:
    """Return the placements that data-parallel plans are traced in."""
    everywhere = (
        placement
        for n_gpus in _MULTISET_GPUS
        for placement in enumerate_placements(n_gpus, cluster.gpus_per_node, cluster.n_nodes)
    )
    equal = (placement for n_gpus in _EQUAL_SPLIT_GPUS for placement in equal_placements(n_gpus, cluster))
    return (*everywhere, *equal)


@typed
def trace_points(workload: Workload, cluster: ClusterSpec) -> list[Point]:
    """Return the points of the emulated trace of a workload, without duplicates, in a fixed order.

    Data-parallel families run in every placement of 1, 2, 4 and 8 GPUs and in equal splits of 16.
    Model-parallel families run with pipeline degrees that divide the layers and tensor degrees that divide
    the heads, packed and spread over equal nodes; no two pipeline stages share a node, except in jobs of up
    to 4 GPUs. Tensor parallelism with accumulation runs on 1 to 4 GPUs of a node. If the published traces
    have several numbers of CPU threads, offload plans and plans on one GPU run with each of them. The size of
    the cluster bounds the grid.
    """
    threads = workload.trace_cpu_threads or (DEFAULT_CPU_THREADS,)
    points: list[Point] = []
    for exec_plan, placement in _trace_texts(workload, cluster):
        try:
            point = read_point(workload, exec_plan, placement.text, threads[0])
        except PlanError:
            continue  # the batch cannot be split over so many replicas
        varied = threads if point.plan.offload or placement.n_gpus == 1 else threads[:1]
        points += [Point(point.plan.with_cpu_threads(count), placement) for count in varied]
    return list(dict.fromkeys(points))


def _trace_texts(workload: Workload, cluster: ClusterSpec) -> Iterator[tuple[str, Placement]]:
    families = [PlanFamily(name) for name in workload.families]
    for family in families:
        if family is PlanFamily.TP_GA:
            for placement in _ONE_NODE:
                yield family.word, placement
        elif family.word:
            for placement in data_parallel_placements(cluster):
                yield family.word, placement
    if PlanFamily.TP_PP not in families and PlanFamily.DP_TP_PP not in families:
        return
    model = workload.model
    pipeline = [degree for degree in _DEGREES if model.n_layers % degree == 0]
    tensor = [degree for degree in _DEGREES if model.heads % degree == 0]
    for pp, tp, dp in product(pipeline, tensor, _REPLICAS):
        family = PlanFamily.TP_PP if dp == 1 else PlanFamily.DP_TP_PP
        if family in families:
            for placement in equal_placements(pp * tp * dp, cluster, smallest=tp):
                if placement.n_nodes >= pp or placement in _ONE_NODE:
                    yield f"{pp}{tp}{dp}", placement
