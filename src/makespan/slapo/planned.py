"""Schedules from plans: what a schedule realises of a plan is applied to any transformer, the rest is named.

A plan is the text that ``makespan plan`` prints, such as ``tp2 pp2 mb1 recompute=full``, or the notation of
execution plans, such as ``221+gc``. A schedule realises tensor, sequence and context parallelism, stages and
recomputation. Data parallelism, ZeRO and micro-batches belong to whoever launches the run. Whatever would
change what a process computes, and has no primitive, is refused before any work.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from makespan.errors import NotationError, PlanError
from makespan.planning import Layout, parse_layout
from makespan.planning.layout import Recompute
from makespan.plans import ExecutionPlan, read_plan
from makespan.slapo.compiling import check_compiler
from makespan.slapo.errors import ArgumentError, warn
from makespan.slapo.layouts import Ranks
from makespan.slapo.library import undone_on_error
from makespan.slapo.passes import Call
from makespan.slapo.pipelining import default_cuts
from makespan.slapo.recomputing import ATTENTION, PRODUCTS, select_layers
from makespan.slapo.schedule import Schedule, create_schedule, ranks_in
from makespan.slapo.sharding import ranks_of
from makespan.slapo.structure import Structure, call_of, find_structure

Plan = str | Layout | ExecutionPlan


@dataclass(frozen=True, slots=True)
class Division:
    """The part of a plan that a schedule realises.

    Parameters
    ----------
    tp, n_stages
        Processes that share a layer or its experts, and stages of the model; with interleaving, several per
        process.
    recomputed
        Share of the layers that are recomputed.
    recompute
        What of such a layer: ``full`` for all, ``selective`` for the core of attention, ``operators`` for
        everything but attention and every other product.
    stages
        Layers of each stage; empty to deal them evenly.
    ends_as_layers
        True if what comes before and after the layers counts as a layer each.
    left
        What is left to the launcher, in words.
    sequence_parallel
        True if the processes that share a layer also share sequences between its parts.
    deal_experts
        True if each of them holds some experts whole, instead of a part of every expert.
    cp
        Processes that hold parts of every sequence throughout the layers.
    has_own_samples
        True if processes have samples of their own and share nothing but experts.
    n_data
        Processes with samples of their own, beside those that share layers, that hold some experts each.
    order
        Order of micro-batches, which `build` takes if it is given no other.
    deal_to_context
        True if the processes that hold parts of a sequence hold some experts each.
    """

    tp: int
    n_stages: int
    recomputed: float = 0.0
    stages: tuple[int, ...] = ()
    ends_as_layers: bool = False
    left: tuple[str, ...] = field(default=())
    recompute: Recompute = "full"
    sequence_parallel: bool = False
    deal_experts: bool = False
    cp: int = 1
    has_own_samples: bool = False
    n_data: int = 1
    order: str = "1f1b"
    deal_to_context: bool = False

    def cuts(self, n_layers: int) -> list[int]:
        """Return the layers after which a stage ends; an `ArgumentError` says why they do not fit."""
        if self.stages:
            if sum(self.stages) != n_layers:
                raise ArgumentError(
                    f"plan: {sum(self.stages)} layers in {self.n_stages} stages; the model has {n_layers} "
                    "layers"
                )
            return [sum(self.stages[: index + 1]) - 1 for index in range(self.n_stages - 1)]
        if self.n_stages > n_layers:
            raise ArgumentError(f"plan: {self.n_stages} stages; the model has {n_layers} layers")
        if not self.ends_as_layers:
            return default_cuts(n_layers, self.n_stages)
        ends = [index - 1 for index in default_cuts(n_layers + 2, self.n_stages)]
        if ends and (ends[0] < 0 or ends[-1] >= n_layers - 1):
            raise ArgumentError(f"plan: {n_layers} layers leave a stage of {self.n_stages} without a layer")
        return ends


def read_division(plan: Plan) -> Division:
    """Return what a schedule realises of a plan.

    Raises
    ------
    NotationError, PlanError
        The text is no plan, or its words contradict each other.
    ArgumentError
        A schedule cannot realise the plan; the message names the word.
    """
    if isinstance(plan, str):
        plan = _read(plan)
    if not isinstance(plan, Layout | ExecutionPlan):
        raise PlanError(f"plan is {plan!r}; expected a text such as 'tp2 pp2', a Layout or an ExecutionPlan")
    return _of_layout(plan) if isinstance(plan, Layout) else _of_execution_plan(plan)


def _read(text: str) -> Layout | ExecutionPlan:
    degrees = {name: int(number) for name, number in re.findall(r"\b(tp|pp|cp|dp|ep)(\d{1,15})\b", text)}
    n_gpus, ep = 1, degrees.pop("ep", 1)
    for degree in degrees.values():
        n_gpus *= max(degree, 1)
    if "dp" not in degrees and ep > 1 and dist.is_initialized():
        # The planner leaves dp out, which says where experts are: it follows from the number of processes.
        n_gpus *= max(dist.get_world_size() // n_gpus, 1)
    try:
        return parse_layout(text, n_gpus)
    except PlanError as error:
        least = ep // math.gcd(ep, n_gpus // max(degrees.get("pp", 1), 1)) if ep else 1
        if "dp" in degrees or least == 1:
            raise
        parse_layout(text, n_gpus * least)  # raises what else is wrong
        raise PlanError(f"{error}; add what the planner leaves out, as in 'dp{least} {text}'") from None
    except NotationError as error:
        # Three degrees such as 221, or 1-8-16, name their devices themselves.
        start = re.match(r"(\d)(\d)(\d)(?!\d)|(\d{1,15})-(\d{1,15})-(\d{1,15})", text.strip())
        if start is None:
            raise NotationError(f"{error}; or three degrees PP, TP, DP such as 221+gc") from None
        n_gpus = 1
        for number in filter(None, start.groups()):
            n_gpus *= int(number)
        return read_plan(text, n_gpus=n_gpus, global_batch_size=None)


def _refuse(what: str, why: str) -> None:
    raise ArgumentError(f"plan: {what} cannot be realised by a schedule: {why}")


def _of_layout(layout: Layout) -> Division:
    # As the planner has it, processes with other tokens come first, then those of tensor parallelism. Of the
    # former, those of a sequence come before those with other samples, as in other libraries.
    deal_to_context = layout.ep > 1 and layout.cp > 1
    n_context = layout.cp if deal_to_context else 1
    n_data = math.gcd(layout.ep // n_context, layout.dp)
    has_own_samples = layout.ep > 1 and layout.tp == 1 and not deal_to_context
    if layout.ep % n_context:
        why = "experts are dealt out to all processes that share sequences; a multiple of"
        _refuse(f"ep{layout.ep}", f"{why} {n_context} would do")
    if layout.ep // (n_context * n_data) not in (1, layout.tp):
        n_apart = n_context * n_data
        why = f"experts are dealt out to all processes that share layers, or to none; ep {n_apart} or "
        _refuse(f"ep{layout.ep}", f"{why}{n_apart * layout.tp} would do")
    n_replicas = layout.dp // n_data
    left = [f"dp{n_replicas}"] if n_replicas > 1 else []
    left += [f"zero{layout.zero}"] if layout.zero else []
    is_left = layout.interleave > 1 and layout.pipeline == "1f1b"
    left += ["interleaved order of micro-batches"] if is_left else []
    left.append(f"mb{layout.micro_batch}")
    share = 0.0 if layout.recompute == "none" else layout.recompute_share
    return Division(
        layout.ep if has_own_samples else layout.tp, layout.pp * layout.interleave, share, (),
        layout.ends_as_layers, tuple(left), layout.recompute, layout.sequence_parallel and layout.tp > 1,
        layout.ep > n_context * n_data or has_own_samples, layout.cp, has_own_samples,
        1 if has_own_samples else n_data, layout.pipeline, deal_to_context,
    )  # fmt: skip


def _of_execution_plan(plan: ExecutionPlan) -> Division:
    left = [f"dp{plan.dp}"] if plan.dp > 1 else []
    left += [f"zero{plan.zero_stage}"] if plan.zero_stage else []
    left += ["offload"] if plan.offload else []
    left += [f"{plan.schedule} order of micro-batches"] if plan.pp > 1 else []
    stages = tuple(plan.partition or ())
    share, method = plan.checkpoint_fraction, plan.checkpoint_method
    return Division(plan.tp, plan.n_chunks, share, stages, False, tuple(left), method, plan.sequence_parallel)


def apply_plan(
    model: nn.Module | Schedule,
    plan: Plan,
    example_inputs: Any = None,
    *,
    group: dist.ProcessGroup | None = None,
    context_group: dist.ProcessGroup | None = None,
    expert_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    compiler: str | None = None,
) -> Schedule:
    """Schedule any transformer by a plan; its structure is found by a run, not by names.

    ``print(schedule.metadata.structure)`` shows what was found, how it is cut, and what is left whole, with
    reasons. A warning names parts of layers that stay whole although processes share the model.

    Parameters
    ----------
    model
        Any transformer, with values in its parameters, or its schedule, which has no steps yet.
    plan
        Text as ``makespan plan`` prints it (``tp2 pp2 mb1 recompute=full``) or in the notation of execution
        plans (``221+gc``), a `makespan.planning.Layout`, or an `makespan.plans.ExecutionPlan`. With ``ep``
        and without ``dp``, the latter follows from the number of all processes.
    example_inputs
        Small inputs, as of `find_structure`; stages branch on shapes, lengths and types as these do.
    group
        Processes of tensor parallelism, or without it of expert parallelism, as for `create_schedule`; as
        many as the plan shares a layer or its experts among. In a single process nothing is cut, but the
        structure is found for the plan.
    context_group
        Processes of context parallelism; None for those of ``group`` if the plan does not share layers.
    expert_group
        Processes of data parallelism that share experts, if the plan shares layers or sequences, too: as many
        as the greatest divisor that ``dp`` and ``ep`` have in common (``ep`` divided by ``cp``, if both are
        given), one of each ``group``.
    seed
        Seed of inputs that are drawn.
    compiler
        Backend of the primitive ``compile``, such as ``inductor``, by which each layer is compiled by itself;
        None to compile nothing.

    Returns
    -------
    The schedule; `build` and `Verify` take it like any other.

    Raises
    ------
    NotationError, PlanError
        The plan cannot be read.
    ArgumentError
        A schedule cannot realise the plan, or a group has another number of processes.
    StructureError
        No structure is found; the message names the model and the reason.
    ScheduleError
        A primitive rejects a step, such as a cut of a model without a graph. The model has not changed.
    """
    division = read_division(plan)
    if division.has_own_samples:
        group, expert_group = group or expert_group, None
    if isinstance(model, Schedule):
        sch, model = model, model.mod
    else:
        alone = context_group if division.tp == 1 and group is None else None
        sch = create_schedule(model, group=alone or group)
    if division.tp > 1 and sch.world_size not in (1, division.tp):
        what = ("experts", "expert") if division.has_own_samples else ("layers", "tensor")
        raise ArgumentError(
            f"apply_plan: the plan shares {what[0]} among {division.tp} processes, the group has "
            f"{sch.world_size}; pass the group of {what[1]} parallelism as group"
        )
    context = _context(sch, division, context_group)
    experts = _experts(sch, division, expert_group)
    if compiler is not None:
        check_compiler("apply_plan", compiler, model)
    structure = find_structure(
        model, example_inputs, n_processes=division.tp, seed=seed,
        along_sequence=division.sequence_parallel, deal_experts=division.deal_experts,
        n_context=division.cp, has_own_samples=division.has_own_samples, n_data=division.n_data,
        deal_to_context=division.deal_to_context,
    )  # fmt: skip
    layers = [path for paths in structure.layers for path in paths]
    cuts = [layers[index] for index in division.cuts(len(layers))]
    is_shared = sch.world_size * context.size * experts.size > 1
    with undone_on_error(sch):
        sch.metadata.context, sch.metadata.experts, sch.metadata.order = context, experts, division.order
        for step in structure.steps:
            # A process alone keeps all heads: what is sharded stays whole, and attributes keep their values.
            if is_shared or step.op != "set_attr":
                step.apply(sch)
        chosen = [layers[index] for index in select_layers(len(layers), division.recomputed)]
        _recompute(sch, structure, chosen, division.recompute)
        for path in layers if compiler is not None else ():
            sch[path].compile(compiler)
        if cuts:
            _cut_stages(sch, cuts, call_of(model, example_inputs, seed))
    _report(structure, division, cuts)
    sch.metadata.structure = structure
    return sch


def _context(sch: Schedule, division: Division, group: dist.ProcessGroup | None) -> Ranks:
    """Return the processes of context parallelism; reject another number than that of the plan."""
    known = sch.metadata.context if group is None else ranks_in(group)
    if division.cp == 1:
        if known.size > 1:
            raise ArgumentError(
                f"apply_plan: a context_group of {known.size} processes, but the plan has no cp{known.size}"
            )
        return known
    if known.size == 1 and division.tp == 1:  # the only processes that share anything
        known = ranks_of(sch)
    is_alone = known.size == 1 and sch.world_size == 1
    if not is_alone and (known.size != division.cp or (division.tp == 1 and sch.world_size != division.cp)):
        is_passed = known.size == division.cp
        raise ArgumentError(
            f"apply_plan: the plan shares sequences among {division.cp} processes, the group has "
            f"{sch.world_size if is_passed else known.size}; pass the group of context parallelism "
            f"{'to create_schedule as group, too' if is_passed else 'as context_group'}"
        )
    return known


def _experts(sch: Schedule, division: Division, group: dist.ProcessGroup | None) -> Ranks:
    """Return the processes that share experts beside layers; reject another number than that of the plan."""
    known = sch.metadata.experts if group is None else ranks_in(group)
    if known.size not in (1, division.n_data) or (known.size == 1 < division.n_data and sch.world_size > 1):
        raise ArgumentError(
            f"apply_plan: the plan deals experts out to {division.n_data} processes with other samples, the "
            f"group has {known.size}; pass the group of these processes as expert_group"
        )
    return known


def _recompute(sch: Schedule, structure: Structure, layers: Sequence[str], what: Recompute) -> None:
    """Recompute layers, or what a plan says of them, and note it."""
    if not layers:
        return
    of_all = f"of {sum(map(len, structure.layers))} layers"
    if what == "full":
        for path in layers:
            sch[path].checkpoint()
        structure.notes.append(f"{len(layers)} {of_all} are recomputed")
    elif what == "operators":
        for path in layers:
            sch[path].checkpoint(keep=[PRODUCTS, ATTENTION], every=2)
        structure.notes.append(f"{len(layers)} {of_all} keep attention and every other product")
    else:
        _recompute_cores(sch, structure, layers, of_all)


def _recompute_cores(sch: Schedule, structure: Structure, layers: Sequence[str], of_all: str) -> None:
    """Recompute what lies between the projections of an attention and its output."""
    cores = [core for core in structure.cores if core.layer in layers]
    if not cores:
        raise ArgumentError(
            f"plan: recompute=selective, but no attention is found in the layers of {structure.model}; "
            "expected recompute=operators or recompute=full"
        )
    blended = list(dict.fromkeys(core.layer for core in cores if core.path == core.layer))
    for core in cores:
        within = [path.removeprefix(f"{core.path}.") for path in core.projections]
        if core.path in blended:
            sch[core.path].checkpoint(keep=PRODUCTS)
        elif core.layer not in blended:
            sch[core.path].checkpoint(keep=PRODUCTS if within else (), within=within)
    alike = {core.layer for core in cores} - {*blended}
    if alike:
        structure.notes.append(f"{len(alike)} {of_all} recompute their cores of attention")
    if blended:
        structure.notes.append(
            f"{len(blended)} {of_all} keep their products alone, as attention is no module of its own there"
        )
    if len(alike) + len(blended) < len(layers):
        structure.notes.append(f"{len(layers) - len(alike) - len(blended)} {of_all} have no attention")


def _cut_stages(sch: Schedule, paths: Sequence[str], call: Call) -> None:
    """End a stage after each path; stages branch on shapes, lengths and types as a call does."""
    owners = [sch[path].parent for path in paths]
    known = dict.fromkeys(owner.path for owner in owners if owner is not None)
    sch.trace_until(list(known), example_inputs=call.kwargs or call.args)
    for path in paths:
        sch[path].cut_pipeline_stage()


def _report(structure: Structure, division: Division, cuts: Sequence[str]) -> None:
    """Note what becomes of the plan, and warn about parts that stay whole."""
    if cuts:
        structure.notes.append(f"stages end after {', '.join(cuts)}")
        if division.order != "1f1b":
            structure.notes.append(f"stages run in the order {division.order}")
    if division.left:
        structure.notes.append(f"left to the launcher: {', '.join(division.left)}")
    if division.tp > 1 and structure.kept_whole:
        reasons = dict.fromkeys(f"{part.path}: {part.reason}" for part in structure.kept_whole)
        shown = list(reasons)[:3] + ([f"{len(reasons) - 3} more"] if len(reasons) > 3 else [])
        warn(f"apply_plan of {structure.model}: every process holds these whole: {'; '.join(shown)}")
