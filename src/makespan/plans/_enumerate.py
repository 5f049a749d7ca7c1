"""All placements and all structurally valid plans for a number of devices."""

from collections.abc import Iterable, Iterator
from functools import lru_cache

from makespan.errors import PlanError
from makespan.plans._notation import read_plan
from makespan.plans._placement import Placement
from makespan.plans._plan import DEFAULT_CPU_THREADS, ExecutionPlan, PlanFamily

__all__ = ["enumerate_placements", "enumerate_plans"]

_WORDS = {
    PlanFamily.DP: "ga",
    PlanFamily.GC: "gc",
    PlanFamily.ZERO_DP: "zero-dp",
    PlanFamily.ZERO_OFFLOAD: "zero-offload",
    PlanFamily.ZERO_OFFLOAD_GC: "zero-offload+gc",
    PlanFamily.TP_GA: "tp+ga",
}


@lru_cache(maxsize=4096)
def enumerate_placements(n_gpus: int, gpus_per_node: int, n_nodes: int) -> tuple[Placement, ...]:
    """Return every placement of some devices on a cluster of equal nodes.

    Parameters
    ----------
    n_gpus
        Devices to place.
    gpus_per_node, n_nodes
        Size of the cluster.

    Returns
    -------
    tuple of Placement
        All multisets, fewest nodes first, then by counts; empty if they do not fit.
    """
    found = [Placement(counts) for counts in _partitions(n_gpus, gpus_per_node, n_nodes)]
    return tuple(sorted(found, key=lambda p: (p.n_nodes, p.gpus_per_node)))


def _partitions(total: int, largest: int, parts: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
        return
    if parts == 0:
        return
    for first in range(min(total, largest), 0, -1):
        for rest in _partitions(total - first, first, parts - 1):
            yield (first, *rest)


def enumerate_plans(
    n_gpus: int,
    *,
    global_batch_size: int,
    families: Iterable[PlanFamily | str],
    n_layers: int,
    heads: int,
    max_tp: int,
    cpu_threads: int = DEFAULT_CPU_THREADS,
) -> list[ExecutionPlan]:
    """Return every plan of the given families whose structure is valid.

    Memory is not looked at here. Plans come with the whole batch of a replica as one
    micro-batch.

    Parameters
    ----------
    n_gpus
        Devices that each plan must use.
    global_batch_size
        Samples an optimiser step; the data-parallel degree must divide it.
    families
        Families to search.
    n_layers
        Layers of the model, at least the pipeline degree.
    heads
        Attention heads of the model; the tensor-parallel degree must divide them.
    max_tp
        Largest tensor-parallel degree, usually the devices of a node.
    cpu_threads
        CPU threads a GPU.

    Returns
    -------
    list of ExecutionPlan
        In the order of the families, then by pipeline and tensor degree.
    """
    texts: list[str] = []
    for family in dict.fromkeys(PlanFamily(family) for family in families):
        if family in _WORDS:
            if family is not PlanFamily.TP_GA or (n_gpus <= max_tp and heads % n_gpus == 0):
                texts.append(_WORDS[family])
        else:
            texts += _degree_texts(n_gpus, family, n_layers, heads, max_tp)
    plans = []
    for text in texts:
        try:
            plans.append(
                read_plan(
                    text,
                    n_gpus=n_gpus,
                    global_batch_size=global_batch_size,
                    cpu_threads=cpu_threads,
                )
            )
        except PlanError:
            continue  # the batch cannot be split over so many replicas
    return plans


def _degree_texts(n_gpus: int, family: PlanFamily, n_layers: int, heads: int, max_tp: int) -> list[str]:
    texts = []
    for pp in range(1, min(n_gpus, n_layers) + 1):
        for tp in range(1, min(n_gpus // pp, max_tp) + 1):
            dp, rest = divmod(n_gpus, pp * tp)
            if rest or heads % tp or (dp == 1) != (family is PlanFamily.TP_PP):
                continue
            texts.append(f"{pp}-{tp}-{dp}")
    return texts
