"""A live run from profile and prediction to comparison."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from makespan.hardware import ClusterSpec
from makespan.live._compare import LiveResult, compare_live, predict_live
from makespan.live._engine import LiveClock, LiveEngine
from makespan.live._prepare import prepare_setting, process_trainer, profile, slot_cluster, warm_up
from makespan.live._segments import Executor, Trainer, slots_of
from makespan.live._state import read_state, restore, save_state
from makespan.live._workload import LiveSetting, live_settings, live_workload
from makespan.sim import DECISION_LIMIT_S, Observer, Policy, check_jobs, check_policy, round_length

__all__ = ["live_experiment", "run_live"]

_STATE = "state.json"
_PREDICTION = "prediction.json"


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
        setting.scaled_delays(),
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
    """Profile, predict, run live, profile again and compare; go on with a run that was left.

    The prediction is written before the first job starts, and the run is judged by it. The speed of a
    machine that others use too drifts within minutes, so a second simulation takes the mean of the profiles
    before and after the run; it tells how much of the error is drift. Nothing of the run enters either.

    Parameters
    ----------
    policy, workload, n_slots, seed
        What decides, the name of a live workload, devices to use, and which jobs.
    directory
        Where measurements, state and checkpoints are kept until the end; then it is removed.
    launcher, device
        ``local`` or ``slurm``, ``cpu`` or ``cuda``.
    observe, tell, progress
        From the setting, and the times on the wall at which the prediction lets jobs finish [s], to who is
        told of every event; is told what is done; as for `Measurements`.
    decision_limit_s
        As for `run_live`.

    Raises
    ------
    InputError, WorkerError
        The run that was left is another one, or a name is unknown; the processes of a job died
        several times without getting any further.
    """
    check_policy(policy)
    where, settings, slots = slot_cluster(n_slots), live_settings(), slots_of(launcher, device, n_slots)
    spec = live_workload(workload).fitting(n_slots)
    warm_up(spec, where, slots)
    setting = prepare_setting(directory, policy.name, spec, where, seed, slots, settings, tell, progress)
    prediction = predict_live(setting, policy, where, directory / _PREDICTION, decision_limit_s)
    foreseen, (low_s, high_s) = prediction.values, prediction.interval_s
    tell(
        f"predicted at {foreseen['written_at']}: average JCT {foreseen['avg_jct_s']:.1f} s "
        f"({low_s:.1f} to {high_s:.1f} s in nine of ten simulations with step times somewhat off), "
        f"makespan {foreseen['makespan_s']:.1f} s; SHA-256 {prediction.sha256}"
    )
    observers = observe(setting, sorted(prediction.jobs["finish_time_s"]))
    trainer = process_trainer(directory, setting, where, slots, settings, is_here=launcher == "local")
    engine = run_live(setting, policy, where, trainer, directory, observers, decision_limit_s)
    kept = directory / "profile-again.jsonl"
    again = setting.averaged(*profile(spec, where, slots, settings, tell, kept, progress))
    result = compare_live(setting, policy, where, engine, prediction, again)
    shutil.rmtree(directory, ignore_errors=True)
    return result
