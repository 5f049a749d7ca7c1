"""A live run from profile to comparison with the simulation."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from makespan.hardware import ClusterSpec
from makespan.live._engine import LiveClock, LiveEngine
from makespan.live._prepare import prepare_setting, process_trainer, profile, slot_cluster
from makespan.live._segments import Executor, Trainer, slots_of
from makespan.live._state import read_state, restore, save_state
from makespan.live._workload import LiveSetting, live_settings, live_workload
from makespan.metrics import summary
from makespan.sim import (
    DECISION_LIMIT_S,
    Observer,
    Policy,
    SimulationResult,
    Violation,
    check_jobs,
    check_policy,
    events_table,
    outcomes_table,
    round_length,
    simulate,
    validate_schedule,
)
from makespan.tables import LIVE, LIVE_JOBS

__all__ = ["LiveResult", "compare_live", "live_experiment", "run_live"]

_STATE = "state.json"
_RULES = ("order", "row", "life", "capacity")
"""What must hold of a schedule that happened; the other rules are about times as simulated."""


@dataclass(frozen=True, slots=True)
class LiveResult:
    """A live run beside its simulation; all times on the wall.

    One row of schema `LIVE`, a table of schema `LIVE_JOBS`, what happened in the schemas of the
    simulator, and what of it should not be possible; nothing if all is well.
    """

    comparison: pd.DataFrame
    jobs: pd.DataFrame
    live_events: pd.DataFrame
    simulated_events: pd.DataFrame
    live_outcomes: pd.DataFrame
    simulated_outcomes: pd.DataFrame
    violations: tuple[Violation, ...]


def run_live(
    setting: LiveSetting,
    policy: Policy,
    cluster: ClusterSpec,
    trainer: Trainer,
    directory: Path | None = None,
    observers: Sequence[Observer] = (),
    decision_limit_s: float | None = DECISION_LIMIT_S,
) -> LiveEngine:
    """Run the jobs of a setting, or what a run that was left in a directory has not finished.

    Parameters
    ----------
    setting, policy, cluster, trainer
        What to run, what decides, one node whose devices are the slots, and what trains.
    directory, observers
        Where the state is kept, None to keep none; who is told of every event, in the time of the policy.
    decision_limit_s
        Wall time after which one call of the policy is interrupted [s], None or 0 for no limit.

    Raises
    ------
    InputError, WorkerError
        A job can never run; its processes died several times without getting any further.
    PolicyError
        The policy raised, took too long or decided what cannot be done; what ran is kept.
    """
    catalogue, jobs = setting.catalogue().on(cluster), setting.scaled_jobs()
    check_jobs(jobs, cluster, catalogue)
    state = None if directory is None else read_state(directory / _STATE)
    clock = LiveClock(setting.scale, 0.0 if state is None else state["time_s"])
    engine = LiveEngine(
        cluster,
        catalogue,
        policy,
        setting.restart_delay_s * setting.scale,
        round_length(policy, None),
        Executor(trainer, setting.n_slots),
        clock,
        lambda engine: None if directory is None else save_state(engine, directory / _STATE),
        decision_limit_s,
    )
    engine.observers += observers
    engine.load(jobs)
    if state is not None:
        restore(engine, state)
    engine.run()
    return engine


def compare_live(
    setting: LiveSetting,
    policy: Policy,
    cluster: ClusterSpec,
    engine: LiveEngine,
    profiled: LiveSetting | None = None,
) -> LiveResult:
    """Simulate what ran live, with what was profiled around it (by default before it), and compare."""
    profiled = profiled or setting
    catalogue, jobs = setting.catalogue().on(cluster), setting.scaled_jobs()
    delay_s = setting.restart_delay_s * setting.scale
    simulated = _simulated(setting, profiled, policy, cluster)
    finished = sorted(engine.finished, key=lambda entry: entry[0].index)
    events, outcomes = events_table(engine.rows), outcomes_table(finished, catalogue)
    found = validate_schedule(events, jobs, cluster, catalogue, delay_s, extra_steps=0)
    all_tables = (events, outcomes, simulated.events, simulated.outcomes)
    tables = [_on_wall(table, setting.scale) for table in all_tables]
    overheads_s = [value / setting.scale for value in engine.overheads_s]
    return LiveResult(
        comparison=_comparison(setting, profiled, cluster, tables, overheads_s),
        jobs=_job_table(setting.policy, tables[1], tables[3], engine.final_losses),
        live_events=tables[0],
        live_outcomes=tables[1],
        simulated_events=tables[2],
        simulated_outcomes=tables[3],
        violations=tuple(violation for violation in found if violation.rule in _RULES),
    )


def _simulated(
    setting: LiveSetting,
    profiled: LiveSetting,
    policy: Policy,
    cluster: ClusterSpec,
    decision_limit_s: float | None = DECISION_LIMIT_S,
) -> SimulationResult:
    """Simulate the jobs of a setting with what was profiled, in the time of the policy."""
    return simulate(
        setting.scaled_jobs(),
        cluster,
        profiled.catalogue().on(cluster),
        policy,
        restart_delay_s=profiled.restart_delay_s * setting.scale,
        extra_steps=0,
        decision_limit_s=decision_limit_s,
    )


def _on_wall(table: pd.DataFrame, scale: float) -> pd.DataFrame:
    times = [str(name) for name in table.columns if str(name).endswith("_s")]
    return table.assign(**{name: table[name] / scale for name in times})


def _drift_pct(before: LiveSetting, mean: LiveSetting) -> float:
    """Mean relative change of the step times from the first profile to the second [%]."""
    name, tables = "iter_time_s", before.tables.items()
    changes = [2 * (mean.tables[key][name] / table[name] - 1) for key, table in tables]
    return 100 * float(pd.concat(changes).mean())


def _comparison(
    setting: LiveSetting,
    profiled: LiveSetting,
    cluster: ClusterSpec,
    tables: Sequence[pd.DataFrame],
    overheads_s: Sequence[float],
) -> pd.DataFrame:
    delay_s = profiled.restart_delay_s
    live, simulated = (
        summary(events, outcomes, cluster, restart_delay_s=delay_s, extra_steps=0)
        for events, outcomes in (tables[:2], tables[2:])
    )
    row = {
        "policy": setting.policy,
        "jobs": live.n_jobs,
        "live_avg_jct_s": live.avg_jct_s,
        "simulated_avg_jct_s": simulated.avg_jct_s,
        "jct_difference_pct": 100 * (simulated.avg_jct_s / live.avg_jct_s - 1),
        "live_makespan_s": live.makespan_s,
        "simulated_makespan_s": simulated.makespan_s,
        "makespan_difference_pct": 100 * (simulated.makespan_s / live.makespan_s - 1),
        "restart_delay_s": delay_s,
        "live_restart_delay_s": sum(overheads_s) / len(overheads_s) if overheads_s else float("nan"),
        "n_restarts": int(tables[1]["n_restarts"].sum()),
        "simulated_n_restarts": int(tables[3]["n_restarts"].sum()),
        "live_gpu_allocation_ratio": live.gpu_allocation_ratio,
        "profile_drift_pct": _drift_pct(setting, profiled),
    }
    return LIVE.validate(pd.DataFrame([row]), where="live run")


def _job_table(
    policy: str, live: pd.DataFrame, simulated: pd.DataFrame, losses: Mapping[str, float]
) -> pd.DataFrame:
    both = live.merge(simulated, on="job_id", suffixes=("", "_simulated"), validate="one_to_one")
    table = both.assign(
        policy=policy,
        live_first_start_s=both["first_start_s"],
        simulated_first_start_s=both["first_start_s_simulated"],
        live_jct_s=both["finish_time_s"] - both["submit_time_s"],
        simulated_jct_s=both["finish_time_s_simulated"] - both["submit_time_s"],
        simulated_n_restarts=both["n_restarts_simulated"],
        final_loss=both["job_id"].map(losses).astype(float),
    )
    return LIVE_JOBS.validate(table[list(LIVE_JOBS.names)], where="live run")


def live_experiment(
    policy: Policy,
    workload: str,
    directory: Path,
    *,
    n_slots: int = 2,
    seed: int = 0,
    launcher: str = "local",
    device: str = "cpu",
    observe: Callable[[LiveSetting, Sequence[float]], Sequence[Observer]] = lambda setting, ends_s: (),
    tell: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] | None = None,
    decision_limit_s: float | None = DECISION_LIMIT_S,
) -> LiveResult:
    """Profile, run live, profile again, simulate and compare; go on with a run that was left.

    The speed of a machine that others use too drifts within minutes. The simulation therefore takes the
    mean of the profiles before and after; nothing of the run itself enters it.

    Parameters
    ----------
    policy, workload, n_slots, seed
        What decides, the name of a live workload, devices to use, and which jobs.
    directory
        Where measurements, state and checkpoints are kept until the end; then it is removed.
    launcher, device
        ``local`` or ``slurm``, ``cpu`` or ``cuda``.
    observe, tell, progress
        From the setting, and the times on the wall at which the simulation by the first profile lets jobs
        finish [s], to who is told of every event; is told what is done; as for `Measurements`.
    decision_limit_s
        As for `run_live`.

    Raises
    ------
    InputError, WorkerError
        The run that was left is another one, or a name is unknown; the processes of a job died
        several times without getting any further.
    """
    check_policy(policy)
    where, settings, slots = slot_cluster(n_slots), live_settings(), slots_of(launcher, device)
    spec = live_workload(workload).fitting(n_slots)
    setting = prepare_setting(directory, policy.name, spec, where, seed, slots, settings, tell, progress)
    foreseen = _simulated(setting, setting, policy, where, decision_limit_s).outcomes["finish_time_s"]
    observers = observe(setting, sorted(foreseen / setting.scale))
    trainer = process_trainer(directory, setting, where, slots, settings, is_here=launcher == "local")
    engine = run_live(setting, policy, where, trainer, directory, observers, decision_limit_s)
    kept = directory / "profile-again.jsonl"
    again = setting.averaged(*profile(spec, where, slots, settings, tell, kept, progress))
    result = compare_live(setting, policy, where, engine, again)
    shutil.rmtree(directory, ignore_errors=True)
    return result
