"""What stands at the beginning of a live run: the slots as a cluster, the profile, the jobs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pandas as pd

from makespan.hardware import ClusterSpec, cluster, homogeneous
from makespan.live._profile import measure_restarts_s, measure_tables
from makespan.live._run import LiveResult, LiveSetting, compare_live, discard_run, run_live
from makespan.live._trainer import LaunchOn, ProcessTrainer, slots_of
from makespan.live._workload import (
    LiveSettings,
    LiveWorkload,
    live_jobs,
    live_settings,
    live_workload,
)
from makespan.runtime import memory_bytes
from makespan.sim import Observer, Policy

__all__ = ["fitting_workload", "live_experiment", "process_trainer", "slot_cluster", "take_setting"]

_PATTERN = "a800-64"
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


def fitting_workload(spec: LiveWorkload, n_slots: int) -> LiveWorkload:
    """Return a workload without the requests for which there are not enough slots."""
    slots = {count: share for count, share in spec.slots.items() if count <= n_slots}
    return replace(spec, slots=slots, plans={count: spec.plans[count] for count in slots})


def take_setting(
    directory: Path,
    policy: str,
    spec: LiveWorkload,
    where: ClusterSpec,
    seed: int,
    launch_on: LaunchOn,
    settings: LiveSettings,
    tell: Callable[[str], None] = lambda text: None,
) -> LiveSetting:
    """Return the setting of the run that was left in a directory, or measure and write a new one.

    Parameters
    ----------
    directory
        Where the run keeps its state.
    policy, spec, seed
        What runs.
    where
        The slots.
    launch_on
        Where processes run.
    settings
        How it is measured.
    tell
        Is told what is done.

    Raises
    ------
    InputError
        The run that was left is another one.
    """
    left = LiveSetting.load(directory)
    if left is not None:
        left.check_same(policy, spec.name, where.n_gpus, seed)
        tell("continuing the run that was left")
        return left
    tables, delay_s = _profile(spec, where, launch_on, settings, tell)
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
    return setting


def _profile(
    spec: LiveWorkload,
    where: ClusterSpec,
    launch_on: LaunchOn,
    settings: LiveSettings,
    tell: Callable[[str], None],
) -> tuple[dict[str, pd.DataFrame], float]:
    n_slots, node = where.n_gpus, where.nodes[0]
    tell(f"measuring {len(spec.workloads)} workload(s) on {n_slots} slot(s)")
    tables = measure_tables(spec, n_slots, node, launch_on, settings)
    delay_s = mean(measure_restarts_s(spec, n_slots, node, launch_on, settings))
    tell(f"a start or a change takes {delay_s:.2f} s")
    return tables, delay_s


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
    """Return the trainer of a setting, with checkpoints at about equal times.

    Parameters
    ----------
    directory
        Where the run keeps its state.
    setting, where, launch_on, settings
        Those of the run.
    is_here
        Whether processes run on this machine.
    """
    every = {
        key: max(round(settings.checkpoint_interval_s / float(table["iter_time_s"].min())), 1)
        for key, table in setting.tables.items()
    }
    return ProcessTrainer(
        directory / "jobs", where.nodes[0], launch_on, setting.seeds, every, is_here=is_here
    )


def live_experiment(
    policy: Policy,
    workload: str,
    directory: Path,
    *,
    n_slots: int = 2,
    seed: int = 0,
    launcher: str = "local",
    device: str = "cpu",
    observe: Callable[[LiveSetting], Sequence[Observer]] = lambda setting: (),
    tell: Callable[[str], None] = lambda text: None,
) -> LiveResult:
    """Profile, run live, profile again, simulate and compare; go on with a run that was left.

    The speed of a machine that others use too drifts within minutes. The simulation therefore takes the
    mean of the profiles before and after; nothing of the run itself enters it.

    Parameters
    ----------
    policy
        What decides.
    workload
        Name of a live workload.
    directory
        Where state and checkpoints are kept until the end; then it is removed.
    n_slots, seed
        Devices to use; which jobs.
    launcher, device
        As for `slots_of`.
    observe
        From the setting to who is told of every event.
    tell
        Is told what is done.

    Raises
    ------
    InputError
        The run that was left is another one, or a name is unknown.
    WorkerError
        The processes of a job died several times without getting any further.
    """
    where, settings, slots = slot_cluster(n_slots), live_settings(), slots_of(launcher, device)
    spec = fitting_workload(live_workload(workload), n_slots)
    setting = take_setting(directory, policy.name, spec, where, seed, slots, settings, tell)
    trainer = process_trainer(directory, setting, where, slots, settings, is_here=launcher == "local")
    engine = run_live(setting, policy, where, trainer, directory, observe(setting))
    again = setting.averaged(*_profile(spec, where, slots, settings, tell))
    result = compare_live(setting, policy, where, engine, again)
    discard_run(directory)
    return result
