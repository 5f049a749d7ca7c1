"""A short profile of what live jobs may run as, with all slots busy, and of what a restart costs."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from makespan.hardware import NodeSpec
from makespan.live._trainer import LaunchOn, steady_wall_s
from makespan.live._workload import LiveSettings, LiveWorkload
from makespan.plans import Placement
from makespan.profiling import Procedure, ProfilePoint, measure_points, model_of, point_plan, profile_table
from makespan.training import TrainingJob, train
from makespan.workloads import workload

__all__ = ["measure_restarts_s", "measure_tables"]

Slots = tuple[int, ...]
Item = TypeVar("Item")
Result = TypeVar("Result")


def measure_tables(
    spec: LiveWorkload, n_slots: int, node: NodeSpec, launch_on: LaunchOn, settings: LiveSettings
) -> dict[str, pd.DataFrame]:
    """Profile every plan of a live workload.

    Runs that need few slots are measured side by side on all of them, because that is how they will
    run: processes share caches and memory.

    Parameters
    ----------
    spec
        Its plans and small workloads.
    n_slots
        Slots of the machine.
    node
        Decides micro-batch sizes.
    launch_on
        Where processes run.
    settings
        Steps and repetitions.

    Returns
    -------
    dict
        Throughput table by workload.
    """
    procedure = Procedure(settings.warmup_steps, settings.steps, settings.repetitions)
    parts: dict[str, list[dict[str, Any]]] = {key: [] for key in spec.workloads}
    for size in sorted(spec.slots):
        points = [ProfilePoint(plan, Placement((size,)), 1) for plan in spec.plans[size]]

        def measure(key: str, slots: Slots, points: Sequence[ProfilePoint] = points) -> dict[str, Any]:
            return measure_points(workload(key), points, node, launch_on(slots), procedure)

        for part in _side_by_side(measure, list(spec.workloads), size, n_slots):
            parts[part["workload"]].append(part)
    return {key: profile_table([_joined(found)], workload(key)) for key, found in parts.items()}


def _side_by_side(
    measure: Callable[[Item, Slots], Result], items: Sequence[Item], size: int, n_slots: int
) -> list[Result]:
    """Measure every item once on each group of slots, all groups at once, each with another item."""
    n_lanes = max(n_slots // size, 1)
    results: list[Result] = []
    with ThreadPoolExecutor(n_lanes) as pool:
        for turn in range(len(items)):
            chosen = [items[(turn + lane) % len(items)] for lane in range(n_lanes)]
            groups = [tuple(range(lane * size, (lane + 1) * size)) for lane in range(n_lanes)]
            results += pool.map(measure, chosen, groups)
    return results


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the runs of each point; parts of one size hold the same points in the same order."""
    by_key: dict[tuple[str, str], dict[str, Any]] = {}
    for part in parts:
        for point in part["points"]:
            key = (point["exec_plan"], point["placement"])
            known = by_key.setdefault(key, {**point, "runs": []})
            known["runs"] = [*known["runs"], *point["runs"]]
    return {**parts[0], "points": list(by_key.values())}


def measure_restarts_s(
    spec: LiveWorkload, n_slots: int, node: NodeSpec, launch_on: LaunchOn, settings: LiveSettings
) -> list[float]:
    """Measure what a start, a stop and a continuation under another plan cost.

    Parameters
    ----------
    spec, n_slots, node, launch_on, settings
        As for `measure_tables`.

    Returns
    -------
    list of float
        Wall time of each run less that of as many warm steps [s]: starting processes, building the
        model, reading and writing checkpoints, the first step, ending.
    """
    overheads_s: list[float] = []
    for size in sorted(spec.slots):

        def measure(key: str, slots: Slots, size: int = size) -> list[float]:
            return _restarts_s(key, spec.plans[size], slots, node, launch_on, settings.restart_steps)

        for found in _side_by_side(measure, list(spec.workloads)[:1], size, n_slots):
            overheads_s += found
    return overheads_s


def _restarts_s(
    key: str, plans: Sequence[str], slots: Slots, node: NodeSpec, launch_on: LaunchOn, n_steps: int
) -> list[float]:
    overheads_s = []
    with tempfile.TemporaryDirectory(prefix="makespan-restart-") as name:
        directory = Path(name)
        for turn in range(2):
            point = ProfilePoint(plans[turn % len(plans)], Placement((len(slots),)), 1)
            plan = point_plan(point, workload(key), node)
            job = TrainingJob(model_of(workload(key)), plan, n_steps * (turn + 1))
            began = time.monotonic()
            result = train(
                job,
                launcher=launch_on(slots),
                checkpoint_dir=directory,
                resume=directory if turn else None,
            )
            overheads_s.append(time.monotonic() - began - steady_wall_s(result))
    return overheads_s
