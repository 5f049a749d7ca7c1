"""What a live run begins with: the slots as a cluster, and a profile of them with all slots busy."""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

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
from makespan.training import TrainingJob, read_progress, request_stop, train
from makespan.workloads import workload

__all__ = [
    "Profiler", "prepare_setting", "process_trainer", "profile", "slot_cluster", "warm_up",
]  # fmt: skip

Slots = tuple[int, ...]

_PATTERN = "a800-64"
_TURNS = 2  # a start, and a continuation under another plan
_ENDLESS = 1_000_000  # steps of a neighbour, which trains until it is asked to stop
_POLL_WALL_S = 0.05
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
    tables, first_start_s, delay_s = profile(spec, where, launch_on, settings, tell, kept, progress)
    jobs = live_jobs(spec, lambda key, slots, plan: _time_s(tables[key], slots, plan), seed)
    setting = LiveSetting(
        policy=policy,
        workload=spec.name,
        n_slots=where.n_gpus,
        seed=seed,
        first_start_s=first_start_s,
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
) -> tuple[dict[str, pd.DataFrame], float, float]:
    """Measure the tables of a live workload, and what a first start and a continuation take [s].

    Checkpoints on the way count as a part of each step. The ``path`` is that of `Measurements`.
    """
    n_slots, launcher = where.n_gpus, launch_on((0,))
    tell(f"measuring {len(spec.workloads)} workload(s) on {n_slots} slot(s)")
    how = measured_by(map(workload, spec.workloads), _procedure(settings)) | {
        "processes": [type(launcher).__name__, launcher.device, n_slots],
        "plans": dict(spec.plans),
        "restart_steps": settings.restart_steps,
    }
    kept = Measurements(path, how, _n_runs(spec, settings), progress, tell)
    profiler = Profiler(spec, n_slots, where.node, launch_on, settings, kept)
    tables, restarts = profiler.tables(), profiler.restarts()
    for key, table in tables.items():
        save_s = fmean(one.save_s for one in restarts if one.workload == key)
        table["iter_time_s"] += save_s / _checkpoint_every(table, settings)
    first_start_s, delay_s = (
        fmean(one.overhead_s for one in restarts if one.is_first == is_first) for is_first in (True, False)
    )
    tell(f"a first start takes {first_start_s:.2f} s, a continuation {delay_s:.2f} s")
    return tables, first_start_s, delay_s


def _procedure(settings: LiveSettings) -> Procedure:
    return Procedure(settings.warmup_steps, settings.steps, settings.repetitions, is_paced=True)


def _n_runs(spec: LiveWorkload, settings: LiveSettings) -> int:
    """Count the runs of a profile: points and, of each workload, a start and a continuation."""
    each = (len(spec.plans[size]) * settings.repetitions + _TURNS for size in spec.slots)
    return len(spec.workloads) * sum(each)


def _time_s(table: pd.DataFrame, n_slots: int, plan: str) -> float:
    rows = table[(table["exec_plan"] == plan) & (table["placement"] == str(n_slots))]
    return float(rows["iter_time_s"].iloc[0])


def _checkpoint_every(table: pd.DataFrame, settings: LiveSettings) -> int:
    """Return the steps between checkpoints of a workload."""
    return max(round(settings.checkpoint_interval_s / float(table["iter_time_s"].min())), 1)


def _training_job(key: str, plan: str, size: int, node: NodeSpec, n_steps: int) -> TrainingJob:
    point = ProfilePoint(plan, Placement((size,)), 1)
    return TrainingJob(model_of(workload(key)), point_plan(point, workload(key), node), n_steps)


def warm_up(spec: LiveWorkload, where: ClusterSpec, launch_on: LaunchOn) -> None:
    """Train one step on as many slots as any job may have.

    What starts processes loads libraries when it is first asked, which no later start pays for. It begins
    here, with interrupts from the keyboard blocked, as they then are in all that it starts: the scheduler
    alone hears of them, and lets the processes write their checkpoints.
    """
    size = max(spec.slots)
    job = _training_job(next(iter(spec.workloads)), spec.plans[size][0], size, where.node, 1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        train(job, launcher=launch_on(tuple(range(size))))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    every = {key: _checkpoint_every(table, settings) for key, table in setting.tables.items()}
    jobs, node = directory / "jobs", where.node
    return ProcessTrainer(jobs, node, launch_on, setting.seeds, every, is_here=is_here)


@dataclass(frozen=True, slots=True)
class _Restart:
    """What a start or a continuation cost beside its warm steps, and the checkpoint at its end alone [s]."""

    workload: str
    is_first: bool
    overhead_s: float
    save_s: float


class Profiler:
    """Measures the plans of a live workload while other models of it train on all other slots.

    So the jobs will run. Where a workload is measured moves from slot to slot.
    """

    def __init__(
        self,
        spec: LiveWorkload,
        n_slots: int,
        node: NodeSpec,
        launch_on: LaunchOn,
        settings: LiveSettings,
        kept: Measurements | None = None,
    ) -> None:
        self._spec, self._n_slots, self._node = spec, n_slots, node
        self._launch_on, self._settings, self._kept = launch_on, settings, kept or Measurements()

    def tables(self) -> dict[str, pd.DataFrame]:
        """Measure the steps of every plan; a table of schema `makespan.tables.THROUGHPUT` a workload.

        Every round has one run of each point, so whatever slows the machine for some seconds falls on few
        runs of a point, and their median does not know of it.
        """
        parts: dict[str, list[dict[str, Any]]] = {key: [] for key in self._spec.workloads}
        for turn in range(self._settings.repetitions):
            for key, found in parts.items():
                found += [self._points(key, size, turn) for size in sorted(self._spec.slots)]
        return {key: profile_table(found, workload(key)) for key, found in parts.items()}

    def restarts(self) -> list[_Restart]:
        """Measure, of every workload, a start and a continuation under another plan."""
        found = []
        for size in sorted(self._spec.slots):
            for key in self._spec.workloads:
                slots, beside = self._places(key, size)
                how = partial(self._turns, key, slots, beside)
                turns = self._kept.measure(f"restarts of {key}, slots {_listed(slots)}", how, _TURNS)
                found += [_Restart(key, not turn, *cost) for turn, cost in enumerate(turns)]
        return found

    def _points(self, key: str, size: int, turn: int) -> dict[str, Any]:
        slots, beside = self._places(key, size)
        once = replace(_procedure(self._settings), repetitions=1)
        points = [ProfilePoint(plan, Placement((size,)), 1) for plan in self._spec.plans[size]]
        return measure_points(
            workload(key), points, self._node, self._launch_on(slots), once, kept=self._kept,
            where=f", slots {_listed(slots)}, round {turn + 1}", beside=lambda: self._neighbours(beside),
        )  # fmt: skip

    def _places(self, key: str, size: int) -> tuple[Slots, dict[Slots, str]]:
        """Slots on which a workload is measured, and which ones train on the other groups of so many."""
        keys, n_lanes = list(self._spec.workloads), max(self._n_slots // size, 1)
        turn = keys.index(key)
        groups = [tuple(range(lane * size, (lane + 1) * size)) for lane in range(n_lanes)]
        others = {
            groups[(turn + step) % n_lanes]: keys[(turn + step) % len(keys)] for step in range(1, n_lanes)
        }
        return groups[turn % n_lanes], others

    @contextmanager
    def _neighbours(self, beside: dict[Slots, str]) -> Iterator[None]:
        """Let workloads train on slots, warm from the beginning of the block to its end."""
        with temporary_directory("neighbours") as name, ThreadPoolExecutor(len(beside) or 1) as pool:
            places = {Path(name, _listed(slots)): (slots, key) for slots, key in beside.items()}
            ends = {
                place: pool.submit(self._train, key, slots, place) for place, (slots, key) in places.items()
            }
            try:
                for place, end in ends.items():
                    while not (end.done() or _trains(place)):
                        time.sleep(_POLL_WALL_S)
                yield
            finally:
                while not all(end.done() for end in ends.values()):  # one may be only about to begin
                    for place in filter(Path.exists, places):
                        request_stop(place)
                    time.sleep(_POLL_WALL_S)
            for end in ends.values():
                end.result()

    def _train(self, key: str, slots: Slots, place: Path) -> None:
        job = _training_job(key, self._spec.plans[len(slots)][0], len(slots), self._node, _ENDLESS)
        train(job, launcher=self._launch_on(slots), run_dir=place)

    def _turns(self, key: str, slots: Slots, beside: dict[Slots, str]) -> list[tuple[float, float]]:
        """Overhead of each turn, and the time of its checkpoint [s]."""
        found, plans, size = [], self._spec.plans[len(slots)], len(slots)
        with self._neighbours(beside), temporary_directory("restart") as directory:
            for turn in range(_TURNS):
                n_steps = self._settings.restart_steps * (turn + 1)
                job = _training_job(key, plans[turn % len(plans)], size, self._node, n_steps)
                began, source = time.monotonic(), directory if turn else None
                result = train(job, launcher=self._launch_on(slots), checkpoint_dir=directory, resume=source)
                overhead_s = time.monotonic() - began - steady_wall_s(result)
                found.append((overhead_s, sum(result.save_s)))
        return found


def _trains(place: Path) -> bool:
    """Whether the run in a directory has a step behind it."""
    progress = read_progress(place)
    return progress is not None and progress.step > 0


def _listed(slots: Slots) -> str:
    return ",".join(map(str, slots))
