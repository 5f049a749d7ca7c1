"""Iteration times of models of the user: every plan on every placement, as `makespan.planning` predicts them.

A workload of a job list is then a model with the facts of a run, in one text that is its key everywhere::

    llama3-8b seq4096 batch512 bf16 megatron-bridge

The model is one of `makespan.planning.model_names`, or the path of a file; what is left out has a default.
Tables name a plan by its degrees, the stage of ZeRO and full recomputation, as those of other sources do. All
else is tuned: of the layouts with the same name, the fastest that fits stands for it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.emulator import equal_placements
from makespan.errors import InfeasiblePlanError, InputError, unknown_name
from makespan.hardware import ClusterSpec
from makespan.numerics import significant
from makespan.planning import (
    PRECISIONS,
    Grid,
    Layout,
    Pricer,
    Software,
    Training,
    fits,
    layouts,
    memory_table,
    model_names,
    parse_layout,
    read_model,
    software,
    stack_names,
)
from makespan.plans import DEFAULT_CPU_THREADS, ExecutionPlan, Placement, read_plan, write_plan
from makespan.tables import THROUGHPUT, cached_table
from makespan.throughput.sources import ThroughputSource
from makespan.units import GIB
from makespan.workloads import BlockSpec, ModelSpec, Workload, is_in_zoo, stack

_SEQ, _BATCH, _PRECISION, _STACK = 4096, 512, "bf16", "megatron-bridge"  # as of ``makespan plan``
_KEY = re.compile(r"(?P<model>.+) seq(?P<seq>\d+) batch(?P<batch>\d+) (?P<precision>\S+) (?P<stack>\S+)")
_FILES = (".json", ".toml")
_SAMPLED = 10  # rows, as `makespan.perf.sampling_design` chooses at most
_PLANNED_BY = (
    "makespan.planning", "makespan.plans", "makespan.emulator.points", "makespan.numerics", __name__,
)  # fmt: skip
FASTEST = "fastest"
"""Plan of a job that asks for the fastest one that fits on its GPUs."""
PREDICTED = "predicted"
"""Provenance of times that `makespan.planning` predicts, and name of their source."""


# --- Workloads -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedWorkload:
    """A model with the facts of its run; ``model`` is its name in the catalogue, or the path of its file."""

    model: str
    training: Training
    stack: Software

    @property
    def key(self) -> str:
        """The workload in one text, which `planned_workload` reads."""
        run = self.training
        return f"{self.model} seq{run.seq} batch{run.global_batch} {run.precision} {self.stack.name}"


def is_planned(text: str) -> bool:
    """Return True if a text names a model of the user or of the planning catalogue, and no zoo workload.

    A name that both catalogues have is a workload of the zoo, unless its text states more.
    """
    if _KEY.fullmatch(text):
        return True
    is_file = Path(text).suffix in _FILES or "/" in text
    return not is_in_zoo(text) and (text in model_names() or is_file)


def planned_workload(
    text: str,
    *,
    seq: int | None = None,
    batch: int | None = None,
    precision: str | None = None,
    stack_name: str | None = None,
) -> PlannedWorkload:
    """Return the workload of a model: a name of the planning catalogue, a path, or a key with all facts.

    Parameters
    ----------
    text
        What `is_planned` accepts.
    seq, batch, precision, stack_name
        Tokens of a sample (default: 4096, or as many as the model takes), samples of a step (512), precision
        (bf16) and software (megatron-bridge). A key states them itself.

    Raises
    ------
    InputError
        The model cannot be read, a value is out of range, or a key and an argument contradict each other.
    """
    stated: dict[str, Any] = {"seq": seq, "batch": batch, "precision": precision, "stack": stack_name}
    name = text
    if key := _KEY.fullmatch(text):
        name = key["model"]
        of_key = {"seq": int(key["seq"]), "batch": int(key["batch"]), **{
            part: key[part] for part in ("precision", "stack")
        }}  # fmt: skip
        for part, value in of_key.items():
            if stated[part] not in (None, value):
                raise InputError(f"workload {text!r}: {part} is stated as {stated[part]!r}, too")
        stated = of_key
    for what, accepted in (("precision", PRECISIONS), ("stack", stack_names())):
        if stated[what] is not None and stated[what] not in accepted:
            raise unknown_name(f"{what} of workload {name!r}", stated[what], accepted)
    model = read_model(name)
    usual = min(_SEQ, model.max_seq) if model.max_seq else _SEQ
    training = Training(
        model, stated["seq"] or usual, stated["batch"] or _BATCH, stated["precision"] or _PRECISION
    )
    return PlannedWorkload(name, training, software(stated["stack"] or _STACK))


@lru_cache(maxsize=256)
def fitted_workload(planned: PlannedWorkload) -> Workload:
    """Return a workload as the fitted performance model sees it: size, hidden state, layers and batch.

    One block stands for all layers, with a feed-forward part as large as the parameters say; a mixture of
    experts counts with all of them, and a model without attention has the heads of its recurrent layers.
    """
    model, run = planned.training.model, planned.training
    hidden, heads, kv_heads, head_dim = model.hidden, 1, 1, model.hidden
    attention = next((run.attention for run in model.layers if run.attention is not None), None)
    recurrent = next((run.recurrent for run in model.layers if run.recurrent is not None), None)
    if attention is not None:
        heads, kv_heads, head_dim = attention.heads, attention.kv_heads, attention.head_dim
    elif recurrent is not None:
        heads, kv_heads, head_dim = recurrent.heads, recurrent.groups, recurrent.head_dim
    in_attention = 2 * hidden * head_dim * (heads + kv_heads)
    per_layer = model.layer_parameters / model.n_layers
    source = f"counts of {planned.model}"
    return Workload(
        key=planned.key,
        aliases=(),
        model=ModelSpec(
            key=planned.key,
            title=planned.model,
            family="llama",
            blocks=(
                BlockSpec(
                    n_layers=model.n_layers,
                    kind="causal",
                    seq=run.seq,
                    hidden=hidden,
                    heads=heads,
                    kv_heads=kv_heads,
                    ffn=max(round((per_layer - in_attention) / (3 * hidden)), 1),
                    gated=True,
                    kv_channels=head_dim,
                ),
            ),
            vocab=max(round(model.embedding_parameters / hidden), 1),
            tied_head=model.is_tied,
            max_positions=0,
            parameters=0,
            source=source,
        ),
        global_batch_size=run.global_batch,
        precision=run.precision,
        families=(),
        data_parallel_stack=stack("modern"),
        model_parallel_stack=stack("modern"),
        max_microbatches=run.global_batch,
        used_for_calibration=False,
        source=source,
    )


# --- Plans ---------------------------------------------------------------------------------------------


def plan_label(layout: Layout) -> str:
    """Return the plan of a layout as tables name it.

    Context parallelism counts as tensor parallelism: both divide a sample.
    """
    plan = ExecutionPlan(
        dp=layout.dp,
        tp=layout.tp * layout.cp,
        pp=layout.pp,
        global_batch_size=layout.dp,
        zero_stage=layout.zero,
        checkpoint_fraction=float(layout.recompute == "full"),
    )
    return write_plan(plan)


def is_layout(text: str) -> bool:
    """Return True if a text is a layout such as ``tp4 pp2 mb1``, no plan in the notation of tables."""
    words = text.split()
    return len(words) > 1 or bool(re.fullmatch(r"(?:tp|pp|cp|ep|dp|mb)\d+|fsdp|hsdp\d+|zero\d", text))


def requested_label(text: str, n_gpus: int, batch: int) -> str:
    """Return the plan that a job states, as tables name it; `FASTEST` stays.

    Parameters
    ----------
    text
        `FASTEST`, a layout such as ``tp4 pp2 mb1``, or a plan in the notation of tables.

    Raises
    ------
    NotationError, PlanError
        It cannot be read, or its degrees do not multiply to the GPUs or split the batch.
    """
    if text in ("", FASTEST):
        return FASTEST
    if not is_layout(text):
        return write_plan(read_plan(text, n_gpus=n_gpus, global_batch_size=batch))
    layout = parse_layout(text, n_gpus)
    layout.microbatches(batch)
    return plan_label(layout)


# --- Source --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedSource:
    """Predicted times of models of the user on one type of device, beside another source for the zoo.

    Parameters
    ----------
    base
        Source of the workloads of the zoo.
    pool
        The equal nodes; what their devices sustain is known.
    is_alone
        True if no job trains a workload of the zoo.
    """

    base: ThroughputSource
    pool: ClusterSpec
    is_alone: bool = False

    @property
    def name(self) -> str:
        """``predicted``, or the name of the other source if both are used."""
        return PREDICTED if self.is_alone else self.base.name

    def workload_keys(self) -> tuple[str, ...]:
        """Return the workloads of the zoo; models of the user are known by their text alone."""
        return self.base.workload_keys()

    def load(self, workload_key: str) -> pd.DataFrame:
        """Return the table of a workload: of a model of the user only plans that fit into memory.

        Raises
        ------
        InfeasiblePlanError
            No plan fits on this cluster; the message says how much memory the smallest one needs.
        """
        if not is_planned(workload_key):
            return self.base.load(workload_key)
        return _shown(planned_workload(workload_key), self.pool).copy(deep=False)

    def layouts(self, workload_key: str) -> dict[tuple[str, str], str]:
        """Return the layout behind each plan and placement of a model of the user, in words."""
        found = _priced(planned_workload(workload_key), self.pool)
        return {(plan, placement): layout.text for plan, placement, _, layout in found}


@lru_cache(maxsize=128)
def _shown(planned: PlannedWorkload, pool: ClusterSpec) -> pd.DataFrame:
    facts = (planned, pool.n_nodes, pool.node, pool.gpu.shares, pool.network)
    return cached_table(THROUGHPUT, facts, _PLANNED_BY, lambda: _table(planned, pool))


def _table(planned: PlannedWorkload, pool: ClusterSpec) -> pd.DataFrame:
    rows = _priced(planned, pool)
    plans, placements, times_s = ([row[column] for row in rows] for column in range(3))
    frame = pd.DataFrame(
        {
            "workload": planned.key,
            "exec_plan": plans,
            "placement": placements,
            "cpu_threads": min(DEFAULT_CPU_THREADS, pool.node.cpu_threads_per_gpu),
            "global_batch_size": planned.training.global_batch,
            "iter_time_s": significant(np.array(times_s)),
            "forward_s": np.nan,
            "overlap_sync_s": np.nan,
            "optimize_s": np.nan,
            "feasible": True,
            "clean": True,
            "flag": "",
            "provenance": PREDICTED,
        }
    )
    return THROUGHPUT.validate(frame, where=f"predicted times of {planned.key}")


@lru_cache(maxsize=128)
def _priced(planned: PlannedWorkload, pool: ClusterSpec) -> list[tuple[str, str, float, Layout]]:
    """Return plan, placement, time of a step [s] and layout of every plan that fits, by devices.

    Nodes of a placement give equally many devices, as those of the planner do.
    """
    found: dict[tuple[str, str], tuple[float, Layout]] = {}
    least, n_layers = (np.inf, 0), planned.training.model.n_layers
    for placement in _placements(pool):
        there = pool.with_gpus(placement.n_gpus, placement.gpus_per_node[-1])
        tried = [one for one in layouts(planned.training, there) if _is_even(one, n_layers)]
        if not tried:
            continue
        grid = Grid.of(tried)
        memory = memory_table(planned.training, grid, planned.stack)
        fit = fits(memory, there)
        if not fit.any():
            least = min(least, (float(memory.sum(axis=1).min()), placement.n_gpus))
            continue
        times_s = Pricer(planned.training, there, planned.stack).parts_s(grid).sum(axis=1)
        for index in np.flatnonzero(fit):
            key = (plan_label(tried[index]), placement.text)
            if key not in found or times_s[index] < found[key][0]:
                found[key] = (float(times_s[index]), tried[index])
    if not found:
        needed, n_gpus = least
        if n_gpus == 0:
            raise InfeasiblePlanError(
                f"workload {planned.key!r}: no layout divides a batch of {planned.training.global_batch} "
                f"samples over the devices of {pool.name!r}"
            )
        raise InfeasiblePlanError(
            f"workload {planned.key!r}: no layout fits on {pool.name!r}: the smallest needs "
            f"{needed / GIB:.0f} GiB on each of {n_gpus} devices with "
            f"{pool.gpu.sustained.memory_bytes / GIB:.0f} GiB"
        )
    return [(plan, placement, time_s, layout) for (plan, placement), (time_s, layout) in found.items()]


def _is_even(layout: Layout, n_layers: int) -> bool:
    """Return True if all pipeline stages have equally many layers, with the ends as layers or not."""
    return layout.ends_as_layers or n_layers % (layout.pp * layout.interleave) == 0


def _placements(pool: ClusterSpec) -> Iterable[Placement]:
    """Return the placements with equally many devices on each node of a cluster, by devices."""
    return (placement for n_gpus in range(1, pool.n_gpus + 1) for placement in equal_placements(n_gpus, pool))


def sampled_plans(table: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Choose ten rows of a table to fit, as many as of a workload of the zoo, by plan and placement alone.

    The first one is nearest to the middle of all; each further one is the farthest from those chosen, in the
    logarithms of degrees and nodes, the stage of ZeRO and recomputation.

    Returns
    -------
    numpy.ndarray
        Mask, (n_rows,).
    """
    rows = []
    for text, placement in zip(table["exec_plan"], table["placement"], strict=True):
        place = Placement.parse(placement)
        plan = read_plan(text, n_gpus=place.n_gpus, global_batch_size=None)
        degrees = np.log2([plan.dp, plan.tp, plan.pp, place.n_nodes]).tolist()
        rows.append([*degrees, plan.zero_stage, 2 * plan.checkpoint_fraction])
    at = np.array(rows)
    chosen = np.zeros(len(at), dtype=bool)
    row = int(np.abs(at - np.median(at, axis=0)).sum(axis=1).argmin())
    distance = np.full(len(at), np.inf)
    for _ in range(min(_SAMPLED, len(at))):
        chosen[row] = True
        distance = np.minimum(distance, np.abs(at - at[row]).sum(axis=1))
        row = int(distance.argmax())
    return chosen


def best_plans(table: pd.DataFrame) -> Mapping[int, str]:
    """Return the fastest plan of a table for each number of devices, on the fewest nodes that have one."""
    sizes = table["placement"].map(lambda text: Placement.parse(text))
    keyed = table.assign(n_gpus=[one.n_gpus for one in sizes], n_nodes=[one.n_nodes for one in sizes])
    ordered = keyed[keyed["feasible"]].sort_values(["n_gpus", "n_nodes", "iter_time_s"], kind="stable")
    return dict(
        zip(*(ordered.drop_duplicates("n_gpus")[name] for name in ("n_gpus", "exec_plan")), strict=True)
    )
