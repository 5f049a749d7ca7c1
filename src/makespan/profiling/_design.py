"""Which plans of a workload are profiled, in which job, and the small model behind a workload."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from makespan.errors import InputError, MakespanError
from makespan.hardware import NodeSpec
from makespan.plans import ExecutionPlan, Placement, PlanFamily, read_plan, resolve_micro_batch
from makespan.training import SmallModel
from makespan.workloads import Workload

__all__ = ["ProfilePoint", "model_of", "point_plan", "profile_batches", "profile_points"]

_WORDS = tuple(family.word for family in PlanFamily if family.word and not family.is_model_parallel)
_FAMILIES = {"gpt2": "gpt", "llama": "llama", "bert": "bert", "t5": "t5", "vit": "vit"}


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """One point to measure: execution plan in trace notation, processes on each node, CPU threads of each."""

    exec_plan: str
    placement: Placement
    cpu_threads: int


def model_of(workload: Workload) -> SmallModel:
    """Return the model that trains for a workload; an `InputError` says that it cannot be trained here."""
    spec, first = workload.model, workload.model.blocks[0]
    if spec.family not in _FAMILIES:
        raise InputError(
            f"workload {workload.key!r}: models of family {spec.family!r} cannot be trained here; "
            f"accepted: {', '.join(_FAMILIES)}"
        )
    sizes = {name: getattr(first, name) for name in ("hidden", "heads", "kv_heads", "ffn", "seq")}
    return SmallModel(_FAMILIES[spec.family], spec.n_layers, vocab=spec.vocab, **sizes)


def profile_points(
    workload: Workload, placements: Iterable[Placement], cpu_threads: int
) -> list[ProfilePoint]:
    """List every plan of the families of a workload, the rows of the sampling design and those held out.

    For each placement come the data-parallel families, then all degrees of model parallelism.
    """
    return [
        ProfilePoint(text, placement, cpu_threads)
        for placement in placements
        for text in (*_WORDS, *_degrees(placement.n_gpus))
        if _is_used(workload, text, placement)
    ]


def _degrees(n: int) -> Iterator[str]:
    for pp in range(1, n + 1):
        for tp in range(1, n // pp + 1):
            if n % (pp * tp) == 0:
                degrees = (pp, tp, n // (pp * tp))
                yield ("" if max(degrees) <= 9 else "-").join(map(str, degrees))


def _is_used(workload: Workload, text: str, placement: Placement) -> bool:
    try:
        plan = read_plan(text, n_gpus=placement.n_gpus, global_batch_size=workload.global_batch_size)
    except MakespanError:
        return False
    return plan.plan_family.title in workload.families


def point_plan(point: ProfilePoint, workload: Workload, node: NodeSpec) -> ExecutionPlan:
    """Return the plan of a point with its micro-batch size, as the performance model assumes it."""
    plan = read_plan(
        point.exec_plan,
        n_gpus=point.placement.n_gpus,
        global_batch_size=workload.global_batch_size,
        cpu_threads=point.cpu_threads,
    )
    return resolve_micro_batch(plan, workload, node)


def profile_batches(
    points: Sequence[ProfilePoint], points_per_job: int | None
) -> dict[str, list[ProfilePoint]]:
    """Divide points of a workload into jobs that each need the same processes throughout.

    Jobs are named ``<placement>.<number>``. Without ``points_per_job`` all points of a placement are one
    job, which starts their processes once.
    """
    by_placement: dict[str, list[ProfilePoint]] = {}
    for point in points:
        by_placement.setdefault(point.placement.text, []).append(point)
    return {
        f"{text}.{number}": members[start : start + size]
        for text, members in by_placement.items()
        for size in [points_per_job or len(members)]
        for number, start in enumerate(range(0, len(members), size))
    }
