"""Text of execution plans: one lossless notation, and the enumeration of plans for a number of devices.

A text starts with a word or three degrees. ``ga``, ``gc``, ``zero-dp``, ``zero-offload`` and ``tp+ga`` take
their degree from the number of devices; ``abc`` is pipeline degree a, tensor degree b, data degree c,
joined by ``-`` above nine (``1-8-16``). Differences from the plain plan of that text follow as suffixes:

| suffix | meaning |
| --- | --- |
| ``+zero3`` | ZeRO stage; 2 for the ``zero`` words, 0 elsewhere |
| ``+offload`` | optimiser on the host, for plans written by degrees or ``tp+ga`` |
| ``+gc``, ``+gc0.5`` | activation checkpointing of all layers, or of that share |
| ``+selective``, ``+selective0.5`` | the same, selective |
| ``+gpipe``, ``+interleaved2`` | pipeline schedule, with the model chunks per stage |
| ``+layers1-3`` | layers of each model chunk |
| ``+sp`` | sequence parallelism |
| ``+a4`` | gradient accumulation steps (micro-batches in flight) |
| ``+cpu4`` | CPU threads per GPU, where they are not the usual ones |

The number of devices, the global batch size and the usual CPU threads are given beside the text. Published
traces use the notation of plain plans, whose micro-batch the rule of the workload sets
(`resolve_micro_batch`).
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from makespan.arguments import typed
from makespan.errors import NotationError, PlanError
from makespan.plans.plan import DEFAULT_CPU_THREADS, ExecutionPlan, PlanFamily

_WORDS = tuple(family.word for family in PlanFamily if family.word)
PLAN_TEXTS = "three degrees PP, TP, DP such as 244 (1-8-16 above nine) that multiply to the GPUs, "
PLAN_TEXTS += ", ".join(_WORDS)
"""Accepted starts of a text, for messages."""
_DEGREES = re.compile(r"[1-9][1-9][1-9]|[1-9]\d{0,14}-[1-9]\d{0,14}-[1-9]\d{0,14}", re.ASCII)
_SUFFIX = re.compile(
    r"zero(?P<zero_stage>[0-3])|(?P<offload>offload)"
    r"|(?P<method>gc|selective)(?P<fraction>\d[\d.e-]*)?"
    r"|(?P<gpipe>gpipe)|interleaved(?P<interleave>\d{1,15})|layers(?P<partition>\d{1,15}(-\d{1,15})*)"
    r"|(?P<sequence_parallel>sp)|a(?P<grad_accum_steps>\d{1,15})|cpu(?P<cpu_threads>\d{1,15})",
    re.ASCII,
)
_METHODS = {"gc": "full", "selective": "selective"}
_ZERO_STAGE = 2  # of the words zero-dp and zero-offload, as in the published traces
_OFFLOADED = (PlanFamily.ZERO_OFFLOAD, PlanFamily.ZERO_OFFLOAD_GC)


@typed
def read_plan(
    text: str, *, n_gpus: int, global_batch_size: int | None, cpu_threads: int = DEFAULT_CPU_THREADS
) -> ExecutionPlan:
    """Read a plan.

    Without ``+a`` the plan comes back with the whole batch of a replica as one micro-batch; the micro-batch
    rule of the workload decides how much of it fits in memory.

    Parameters
    ----------
    text
        The notation, for example ``"244"``, ``"zero-dp"`` or ``"122+zero1+gc+a2"``.
    n_gpus, global_batch_size
        Devices of the placement beside it, and samples per optimiser step; None for one sample per replica
        and pass, where only the form of the plan matters.
    cpu_threads
        CPU threads per GPU, unless the text states them.

    Raises
    ------
    NotationError, PlanError
        The text is not a plan; the degrees do not multiply to ``n_gpus``, the batch cannot be split over the
        replicas and their passes, or the options contradict each other.
    """
    start, options = _parse(text)
    fields: dict[str, Any] = {"cpu_threads": cpu_threads, **_start_fields(start, n_gpus), **options}
    pp, tp, dp = (fields[name] for name in ("pp", "tp", "dp"))
    if pp * tp * dp != n_gpus:
        raise PlanError(
            f"execution plan {text!r} needs PP {pp} x TP {tp} x DP {dp} = {pp * tp * dp} GPUs, "
            f"but the placement has {n_gpus}"
        )
    steps = fields.get("grad_accum_steps", 1)
    if global_batch_size is None:
        global_batch_size = dp * max(steps, 1)
    if steps < 1 or global_batch_size % (dp * steps):
        passes = f" in {steps} passes" if steps != 1 else ""
        raise PlanError(
            f"execution plan {text!r}: global batch of {global_batch_size} samples cannot be "
            f"split over {dp} replicas{passes}; expected a data-parallel degree that divides it, "
            f"at most {global_batch_size}"
        )
    micro_batch_size = global_batch_size // (dp * steps)
    return ExecutionPlan(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, **fields)


def stated_cpu_threads(text: str) -> int | None:
    """Return the CPU threads per GPU that the text of a plan states by ``+cpu``, None if it does not."""
    threads: int | None = _parse(text)[1].get("cpu_threads")
    return threads


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[str, dict[str, Any]]:
    """Split a text into its start and the fields that its suffixes set, which callers must not modify."""
    start, *suffixes = text.strip().lower().split("+")
    if start == "tp" and suffixes[:1] == ["ga"]:
        start, suffixes = "tp+ga", suffixes[1:]
    if start == "gc":
        start, suffixes = "ga", ["gc", *suffixes]
    if start not in _WORDS and not _DEGREES.fullmatch(start):
        raise _unreadable(text)
    fields: dict[str, Any] = {}
    for suffix in suffixes:
        match = _SUFFIX.fullmatch(suffix)
        options = _suffix_field(match) if match else {}
        if not options or options.keys() & fields.keys():
            raise _unreadable(text)
        fields |= options
    return start, fields


def _unreadable(text: str) -> NotationError:
    return NotationError(
        f"execution plan {text!r} cannot be read; expected {PLAN_TEXTS}, each with suffixes such as "
        "+zero1, +gc, +interleaved2, +layers1-3, +a4"
    )


def _start_fields(start: str, n_gpus: int) -> dict[str, Any]:
    if start == PlanFamily.TP_GA.word:
        return {"pp": 1, "tp": n_gpus, "dp": 1, "family": PlanFamily.TP_GA}
    if _DEGREES.fullmatch(start):
        pp, tp, dp = (int(part) for part in (start.split("-") if "-" in start else start))
        return {"pp": pp, "tp": tp, "dp": dp, "family": _degrees_family(dp)}
    offload = start == PlanFamily.ZERO_OFFLOAD.word
    stage = _ZERO_STAGE if offload or start == PlanFamily.ZERO_DP.word else 0
    return {"pp": 1, "tp": 1, "dp": n_gpus, "zero_stage": stage, "offload": offload}


def _degrees_family(dp: int) -> PlanFamily:
    return PlanFamily.TP_PP if dp == 1 else PlanFamily.DP_TP_PP


def _suffix_field(match: re.Match[str]) -> dict[str, Any]:
    groups = {name: value for name, value in match.groupdict().items() if value is not None}
    if "method" in groups:
        try:
            fraction = float(groups.get("fraction", "1"))
        except ValueError:
            return {}
        return {"checkpoint_method": _METHODS[groups["method"]], "checkpoint_fraction": fraction}
    if "gpipe" in groups:
        return {"schedule": "gpipe"}
    if "interleave" in groups:
        return {"schedule": "interleaved", "interleave": int(groups["interleave"])}
    if "partition" in groups:
        return {"partition": tuple(int(count) for count in groups["partition"].split("-"))}
    ((name, value),) = groups.items()
    return {name: int(value) if value.isdecimal() else True}


def write_plan(plan: ExecutionPlan, *, cpu_threads: int = DEFAULT_CPU_THREADS) -> str:
    """Write a plan as text from which `read_plan` restores it, given its devices and global batch.

    ``cpu_threads`` are the usual CPU threads, as in `read_plan`; only other numbers are written.

    Examples
    --------
    >>> write_plan(ExecutionPlan(dp=4, tp=4, pp=2, global_batch_size=16, micro_batch_size=4))
    '244'
    >>> write_plan(ExecutionPlan(dp=2, pp=2, zero_stage=1, global_batch_size=16, micro_batch_size=8))
    '212+zero1'
    """
    family = plan.plan_family
    if family in (PlanFamily.TP_PP, PlanFamily.DP_TP_PP):
        degrees = (plan.pp, plan.tp, plan.dp)
        start = ("" if max(degrees) <= 9 else "-").join(str(degree) for degree in degrees)
    elif family is PlanFamily.GC:
        start = PlanFamily.DP.word  # checkpointing is a suffix
    else:
        start = PlanFamily.ZERO_OFFLOAD.word if family in _OFFLOADED else family.word
    usual = _start_fields(start, plan.n_gpus)
    parts = [start]
    if plan.zero_stage != usual.get("zero_stage", 0):
        parts.append(f"zero{plan.zero_stage}")
    if plan.offload != usual.get("offload", False):
        parts.append("offload")
    fraction, is_full = plan.checkpoint_fraction, plan.checkpoint_method == "full"
    if fraction != 0 or not is_full:
        parts.append(("gc" if is_full else "selective") + ("" if fraction == 1 else repr(float(fraction))))
    parts += {"1f1b": [], "gpipe": ["gpipe"], "interleaved": [f"interleaved{plan.interleave}"]}[plan.schedule]
    if plan.partition is not None:
        parts.append("layers" + "-".join(str(count) for count in plan.partition))
    if plan.sequence_parallel:
        parts.append("sp")
    if plan.grad_accum_steps > 1:
        parts.append(f"a{plan.grad_accum_steps}")
    if plan.cpu_threads != cpu_threads:
        parts.append(f"cpu{plan.cpu_threads}")
    return "+".join(parts[1:] if parts[:2] == ["ga", "gc"] else parts)


def write_exec_plan(plan: ExecutionPlan) -> str:
    """Write a plan as in the column ``exec_plan`` of tables: without micro-batches and CPU threads.

    The rule of the workload sets the micro-batch, and CPU threads have their own column.
    """
    return write_plan(plan.with_micro_batch(plan.replica_batch_size), cpu_threads=plan.cpu_threads)


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
    """Return every plan of some families whose structure is valid; memory is not checked.

    Each has the whole batch of a replica as one micro-batch; they come in the order of the families, then by
    pipeline and tensor degree.

    Parameters
    ----------
    n_gpus, global_batch_size
        Devices that each plan must use, and samples per optimiser step; the data-parallel degree must divide
        them.
    n_layers, heads, max_tp
        Bounds: layers and attention heads of the model (a multiple of the tensor-parallel degree), and the
        largest tensor-parallel degree, usually the devices of a node.

    """
    texts: list[str] = []
    for family in dict.fromkeys(PlanFamily(family) for family in families):
        if family.word:
            if family is not PlanFamily.TP_GA or (n_gpus <= max_tp and heads % n_gpus == 0):
                texts.append(family.word)
        else:
            texts += [
                f"{pp}-{tp}-{n_gpus // (pp * tp)}"
                for pp in range(1, min(n_gpus, n_layers) + 1)
                for tp in range(1, min(n_gpus // pp, max_tp) + 1)
                if n_gpus % (pp * tp) == 0
                and heads % tp == 0
                and _degrees_family(n_gpus // (pp * tp)) is family
            ]
    plans = []
    for text in texts:
        try:
            plans.append(
                read_plan(text, n_gpus=n_gpus, global_batch_size=global_batch_size, cpu_threads=cpu_threads)
            )
        except PlanError:
            continue  # the batch cannot be split over so many replicas
    return plans
