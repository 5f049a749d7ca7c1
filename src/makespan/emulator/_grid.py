"""Designed grids: which plans in which placements a trace covers, by rule."""

from collections.abc import Iterator
from itertools import product

from makespan.emulator._points import Point, read_point
from makespan.errors import PlanError
from makespan.hardware import ClusterSpec
from makespan.plans import DEFAULT_CPU_THREADS, Placement, PlanFamily, enumerate_placements
from makespan.workloads import Workload

__all__ = ["data_parallel_placements", "equal_placements", "trace_points"]

_MULTISET_GPUS = (1, 2, 4, 8)  # data-parallel plans run in every placement of so many GPUs,
_EQUAL_SPLIT_GPUS = (16,)  # and in equal splits only of so many
_ONE_NODE_GPUS = (1, 2, 3, 4)  # tensor parallelism with accumulation stays on one node
_SMALL_NODES = tuple(Placement((count,)) for count in _ONE_NODE_GPUS)
_DEGREES = range(1, 9)
_REPLICAS = (1, 2, 4, 8)


def equal_placements(n_gpus: int, cluster: ClusterSpec, smallest: int = 1) -> tuple[Placement, ...]:
    """Return the placements with equal counts on all nodes, fewest nodes first.

    Parameters
    ----------
    n_gpus
        Devices to place.
    cluster
        Its size bounds nodes and counts.
    smallest
        Fewest devices a node.
    """
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


def trace_points(workload: Workload, cluster: ClusterSpec) -> list[Point]:
    """Return the points of the emulated trace of a workload.

    Data-parallel families run in every placement of 1, 2, 4 and 8 GPUs and in equal splits of
    16. Model-parallel families run with pipeline degrees that divide the layers and tensor
    degrees that divide the heads, packed and spread over equal nodes; every pipeline stage has
    a node of its own, but for jobs of up to 4 GPUs. Tensor parallelism with accumulation runs
    on 1 to 4 GPUs of a node. Where the published traces cover several numbers
    of CPU threads, offload plans and plans on one GPU run with each of them.

    Parameters
    ----------
    workload
        What is trained.
    cluster
        Where; its size bounds the grid.

    Returns
    -------
    list of Point
        Without duplicates, in a fixed order.
    """
    threads = workload.trace_cpu_threads or (DEFAULT_CPU_THREADS,)
    points: list[Point] = []
    for exec_plan, placement in _texts(workload, cluster):
        try:
            point = read_point(workload, exec_plan, placement.text, threads[0])
        except PlanError:
            continue  # the batch cannot be split over so many replicas
        varied = threads if point.plan.offload or placement.n_gpus == 1 else threads[:1]
        points += [Point(point.plan.with_cpu_threads(count), placement) for count in varied]
    return list(dict.fromkeys(points))


def _texts(workload: Workload, cluster: ClusterSpec) -> Iterator[tuple[str, Placement]]:
    families = [PlanFamily(name) for name in workload.families]
    for family in families:
        if family is PlanFamily.TP_GA:
            for n_gpus in _ONE_NODE_GPUS:
                yield family.word, Placement((n_gpus,))
        elif family.word:
            for placement in data_parallel_placements(cluster):
                yield family.word, placement
    if PlanFamily.TP_PP in families or PlanFamily.DP_TP_PP in families:
        yield from _model_parallel_texts(workload, cluster, families)


def _model_parallel_texts(
    workload: Workload, cluster: ClusterSpec, families: list[PlanFamily]
) -> Iterator[tuple[str, Placement]]:
    model = workload.model
    pipeline = [degree for degree in _DEGREES if model.n_layers % degree == 0]
    tensor = [degree for degree in _DEGREES if model.heads % degree == 0]
    for pp, tp, dp in product(pipeline, tensor, _REPLICAS):
        family = PlanFamily.TP_PP if dp == 1 else PlanFamily.DP_TP_PP
        if family in families:
            for placement in equal_placements(pp * tp * dp, cluster, smallest=tp):
                if placement.n_nodes >= pp or placement in _SMALL_NODES:
                    yield f"{pp}{tp}{dp}", placement
