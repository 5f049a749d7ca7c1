"""Text of execution plans, as traces and tables write it.

``abc`` is pipeline degree a, tensor degree b, data degree c; degrees above nine are joined by
``-`` (``1-8-16``). ``ga``, ``gc``, ``zero-dp``, ``zero-offload``, ``zero-offload+gc`` and
``tp+ga`` name families whose degree follows from the number of devices.
"""

import re

from makespan.errors import NotationError, PlanError
from makespan.plans._plan import DEFAULT_CPU_THREADS, ExecutionPlan, PlanFamily

__all__ = ["read_plan", "write_plan"]

_DIGITS = re.compile(r"[1-9][1-9][1-9]|[1-9]\d*-[1-9]\d*-[1-9]\d*", re.ASCII)

_FAMILY_OF_WORD = {
    "ga": PlanFamily.DP,
    "gc": PlanFamily.GC,
    "zero-dp": PlanFamily.ZERO_DP,
    "zero-offload": PlanFamily.ZERO_OFFLOAD,
    "zero-offload+gc": PlanFamily.ZERO_OFFLOAD_GC,
    "tp+ga": PlanFamily.TP_GA,
}
_WORD_OF_FAMILY = {family: word for word, family in _FAMILY_OF_WORD.items()}
_ZERO_STAGE = 2  # the stage of the published zero-dp and zero-offload rows


def read_plan(
    text: str,
    *,
    n_gpus: int,
    global_batch_size: int,
    cpu_threads: int = DEFAULT_CPU_THREADS,
) -> ExecutionPlan:
    """Read a plan in trace notation.

    The plan comes back with the whole batch of a replica as one micro-batch; how much of it
    fits in memory is decided by the micro-batch rule of the workload.

    Parameters
    ----------
    text
        The notation, for example ``"244"`` or ``"zero-dp"``.
    n_gpus
        Devices of the placement beside it.
    global_batch_size
        Samples an optimiser step.
    cpu_threads
        CPU threads a GPU.

    Raises
    ------
    NotationError
        The text is not a plan.
    PlanError
        The degrees do not multiply to ``n_gpus``, or the batch cannot be split over the
        replicas.
    """
    word = text.strip().lower()
    if word in _FAMILY_OF_WORD:
        family = _FAMILY_OF_WORD[word]
        pp, tp, dp = (1, n_gpus, 1) if family is PlanFamily.TP_GA else (1, 1, n_gpus)
    elif _DIGITS.fullmatch(word):
        pp, tp, dp = (int(part) for part in (word.split("-") if "-" in word else word))
        family = PlanFamily.TP_PP if dp == 1 else PlanFamily.DP_TP_PP
    else:
        raise NotationError(
            f"execution plan {text!r} cannot be read; accepted: {', '.join(_FAMILY_OF_WORD)}, or "
            "three degrees PP TP DP such as '244' or '1-8-16'"
        )
    if pp * tp * dp != n_gpus:
        raise PlanError(
            f"execution plan {text!r} needs PP {pp} x TP {tp} x DP {dp} = {pp * tp * dp} GPUs, "
            f"but the placement has {n_gpus}"
        )
    if global_batch_size % dp:
        raise PlanError(
            f"execution plan {text!r}: global batch of {global_batch_size} samples cannot be "
            f"split over {dp} replicas; accepted: a data-parallel degree that divides it"
        )
    return _build(family, pp, tp, dp, global_batch_size, cpu_threads)


def _build(
    family: PlanFamily, pp: int, tp: int, dp: int, global_batch_size: int, cpu_threads: int
) -> ExecutionPlan:
    offload = family in (PlanFamily.ZERO_OFFLOAD, PlanFamily.ZERO_OFFLOAD_GC)
    checkpointed = family in (PlanFamily.GC, PlanFamily.ZERO_OFFLOAD_GC)
    return ExecutionPlan(
        dp=dp,
        tp=tp,
        pp=pp,
        global_batch_size=global_batch_size,
        micro_batch_size=global_batch_size // dp,
        zero_stage=_ZERO_STAGE if offload or family is PlanFamily.ZERO_DP else 0,
        offload=offload,
        checkpoint_fraction=1.0 if checkpointed else 0.0,
        cpu_threads=cpu_threads,
        family=family,
    )


def write_plan(plan: ExecutionPlan) -> str:
    """Write a plan in trace notation.

    The notation holds family and degrees; micro-batch size, schedule and partition are not
    part of it. A model-parallel plan with checkpointing or a partitioned optimiser is written
    by its degrees alone.

    Examples
    --------
    >>> write_plan(ExecutionPlan(dp=4, tp=4, pp=2, global_batch_size=16, micro_batch_size=4))
    '244'
    """
    family = plan.plan_family
    if family in _WORD_OF_FAMILY:
        return _WORD_OF_FAMILY[family]
    degrees = (plan.pp, plan.tp, plan.dp)
    joint = "" if max(degrees) <= 9 else "-"
    return joint.join(str(degree) for degree in degrees)
