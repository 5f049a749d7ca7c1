"""What a live run begins with: the slots as a cluster, and a profile of them with all slots busy."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

import pandas as pd

from makespan.hardware import ClusterSpec, NodeSpec, cluster, homogeneous
from makespan.leftovers import temporary_directory
from makespan.live._segments import LaunchOn, ProcessTrainer, steady_wall_s
from makespan.live._workload import LiveSetting, LiveSettings, LiveWorkload, live_jobs
from makespan.plans import Placement
from makespan.profiling import (
    Measurements,
    Procedure,
    ProfilePoint,
    measure_points,
    measured_by,
    model_of,
    point_plan,
    profile_table,
)
from makespan.runtime import memory_bytes
from makespan.training import TrainingJob, train
from makespan.workloads import workload

__all__ = [
    "measure_restarts_s", "measure_tables", "prepare_setting", "process_trainer", "profile", "slot_cluster",
]  # fmt: skip

Slots = tuple[int, ...]
Result = TypeVar("Result")

_PATTERN = "a800-64"
_TURNS = 2  # a start, and a continuation under another plan
_SMALL_BYTES = 2e9  # of a slot where memory cannot be divided into something sensible


def slot_cluster(n_slots: int) -> ClusterSpec:
    """Return one node whose devices are slots, each with a CPU thread and its share of the memory.

    Bandwidths are those of some catalogued node: times come from the profile, and nothing of a
    live run reads them.
    """
    base = cluster(_PATTERN)
    share = max(memory_bytes() / n_slots, _SMALL_BYTES)
    node = replace(
        base.nodes[0],
        name="slots",
        gpu=replace(base.nodes[0].gpu, name="slot", memory_bytes=share, reserved_bytes=0.0),
        n_gpus=n_slots,
        n_nics=1,
        gpus_per_nic=n_slots,
        cpu_threads=n_slots,
        host_memory_bytes=share * n_slots,
    )
    return homogeneous(node, 1, base.network, name=f"slots-{n_slots}")


def prepare_setting(
    directory: Path,
    policy: str,
    spec: LiveWorkload,
    where: ClusterSpec,
    seed: int,
    launch_on: LaunchOn,
    settings: LiveSettings,
    tell: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] | None = None,
) -> LiveSetting:
    """Return the setting of the run that was left in a directory, or measure and write a new one."""
    left = LiveSetting.load(directory)
    if left is not None:
        left.check_same(policy, spec.name, where.n_gpus, seed)
        tell("continuing the run that was left")
        return left
    kept = directory / "profile.jsonl"
    tables, delay_s = profile(spec, where, launch_on, settings, tell, kept, progress)
    jobs = live_jobs(spec, lambda key, slots, plan: _time_s(tables[key], slots, plan), seed)
    setting = LiveSetting(
        policy=policy,
        workload=spec.name,
        n_slots=where.n_gpus,
        seed=seed,
        restart_delay_s=delay_s,
        scale=settings.policy_restart_delay_s / delay_s,
        jobs=tuple(jobs),
        seeds={job.job_id: number for number, job in enumerate(jobs)},
        tables=tables,
    )
    setting.save(directory)
    kept.unlink(missing_ok=True)
    return setting


def profile(
    spec: LiveWorkload,
    where: ClusterSpec,
    launch_on: LaunchOn,
    settings: LiveSettings,
    tell: Callable[[str], None],
    path: Path,
    progress: Callable[[int, int], None] | None,
) -> tuple[dict[str, pd.DataFrame], float]:
    """Measure the tables of a live workload and what a restart takes [s]; ``path`` as for `Measurements`."""
    n_slots, node, launcher = where.n_gpus, where.node, launch_on((0,))
    tell(f"measuring {len(spec.workloads)} workload(s) on {n_slots} slot(s)")
    how = measured_by(map(workload, spec.workloads), _procedure(settings)) | {
        "processes": [type(launcher).__name__, launcher.device, n_slots],
        "plans": dict(spec.plans),
        "restart_steps": settings.restart_steps,
    }
    kept = Measurements(path, how, _n_runs(spec, n_slots, settings), progress, tell)
    tables = measure_tables(spec, n_slots, node, launch_on, settings, kept)
    delay_s = mean(measure_restarts_s(spec, n_slots, node, launch_on, settings, kept))
    tell(f"a start or a change takes {delay_s:.2f} s")
    return tables, delay_s


def _procedure(settings: LiveSettings) -> Procedure:
    return Procedure(settings.warmup_steps, settings.steps, settings.repetitions)


def _n_runs(spec: LiveWorkload, n_slots: int, settings: LiveSettings) -> int:
    """Count the runs of a profile: points and, on each group of slots, a start and a continuation."""
    runs = {size: len(spec.workloads) * len(spec.plans[size]) * settings.repetitions for size in spec.slots}
    return sum(_n_lanes(size, n_slots) * (runs[size] + _TURNS) for size in spec.slots)


def _n_lanes(size: int, n_slots: int) -> int:
    return max(n_slots // size, 1)


def _time_s(table: pd.DataFrame, n_slots: int, plan: str) -> float:
    rows = table[(table["exec_plan"] == plan) & (table["placement"] == str(n_slots))]
    return float(rows["iter_time_s"].iloc[0])


def process_trainer(
    directory: Path,
    setting: LiveSetting,
    where: ClusterSpec,
    launch_on: LaunchOn,
    settings: LiveSettings,
    *,
    is_here: bool = True,
) -> ProcessTrainer:
    """Return the trainer of a setting, with checkpoints at about equal times."""
    every = {
        key: max(round(settings.checkpoint_interval_s / float(table["iter_time_s"].min())), 1)
        for key, table in setting.tables.items()
    }
    jobs, node = directory / "jobs", where.node
    return ProcessTrainer(jobs, node, launch_on, setting.seeds, every, is_here=is_here)


def measure_tables(
    spec: LiveWorkload,
    n_slots: int,
    node: NodeSpec,
    launch_on: LaunchOn,
    settings: LiveSettings,
    kept: Measurements | None = None,
) -> dict[str, pd.DataFrame]:
    """Profile every plan of a live workload, side by side on all slots, because so the jobs will run."""
    parts: dict[str, list[dict[str, Any]]] = {key: [] for key in spec.workloads}

    def measure(key: str, slots: Slots) -> dict[str, Any]:
        size = len(slots)
        points = [ProfilePoint(plan, Placement((size,)), 1) for plan in spec.plans[size]]
        where = f", slots {_listed(slots)}"
        procedure = _procedure(settings)
        return measure_points(
            workload(key), points, node, launch_on(slots), procedure, kept=kept, where=where
        )

    for size in sorted(spec.slots):
        for part in _side_by_side(measure, list(spec.workloads), size, n_slots):
            parts[part["workload"]].append(part)
    return {key: profile_table([_joined(found)], workload(key)) for key, found in parts.items()}


def _side_by_side(
    measure: Callable[[str, Slots], Result], items: Sequence[str], size: int, n_slots: int
) -> list[Result]:
    """Measure every item once on each group of slots, all groups at once, each with another item."""
    n_lanes = _n_lanes(size, n_slots)
    results: list[Result] = []
    with ThreadPoolExecutor(n_lanes) as pool:
        for turn in range(len(items)):
            chosen = [items[(turn + lane) % len(items)] for lane in range(n_lanes)]
            groups = [tuple(range(lane * size, (lane + 1) * size)) for lane in range(n_lanes)]
            results += pool.map(measure, chosen, groups)
    return results


def _listed(slots: Slots) -> str:
    return ",".join(map(str, slots))


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the runs of each point; parts of one size hold the same points in the same order."""
    by_key: dict[tuple[str, str], dict[str, Any]] = {}
    for part in parts:
        for point in part["points"]:
            key = (point["exec_plan"], point["placement"])
            by_key.setdefault(key, {**point, "runs": []})["runs"].extend(point["runs"])
    return {**parts[0], "points": list(by_key.values())}


def measure_restarts_s(
    spec: LiveWorkload,
    n_slots: int,
    node: NodeSpec,
    launch_on: LaunchOn,
    settings: LiveSettings,
    kept: Measurements | None = None,
) -> list[float]:
    """Measure what a start, a stop and a continuation under another plan cost."""
    known = kept or Measurements()

    def measure(key: str, slots: Slots) -> list[float]:
        def restarts_s() -> list[float]:
            return _restarts_s(key, spec.plans[len(slots)], slots, node, launch_on, settings.restart_steps)

        found: list[float] = known.measure(f"restarts of {key}, slots {_listed(slots)}", restarts_s, _TURNS)
        return found

    first = list(spec.workloads)[:1]
    found = (_side_by_side(measure, first, size, n_slots) for size in sorted(spec.slots))
    return [overhead_s for results in found for result in results for overhead_s in result]


def _restarts_s(
    key: str, plans: Sequence[str], slots: Slots, node: NodeSpec, launch_on: LaunchOn, n_steps: int
) -> list[float]:
    overheads_s = []
    with temporary_directory("restart") as directory:
        for turn in range(_TURNS):
            point = ProfilePoint(plans[turn % len(plans)], Placement((len(slots),)), 1)
            plan = point_plan(point, workload(key), node)
            job = TrainingJob(model_of(workload(key)), plan, n_steps * (turn + 1))
            began, source = time.monotonic(), directory if turn else None
            result = train(job, launcher=launch_on(slots), checkpoint_dir=directory, resume=source)
            overheads_s.append(time.monotonic() - began - steady_wall_s(result))
    return overheads_s
