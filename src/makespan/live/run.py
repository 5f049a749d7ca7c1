"""Live runs: profile the slots, predict, run jobs with real processes, and compare with the prediction."""

import hashlib
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from makespan.arguments import check_range, typed
from makespan.cleanup import temporary_directory
from makespan.easyscale import ElasticTrainer
from makespan.easyscale.trainer import RunFolder
from makespan.errors import InputError
from makespan.files import read_json, read_text, write_text
from makespan.hardware import ClusterSpec, NodeSpec, cluster, homogeneous
from makespan.live.elastic import (
    ElasticProcessTrainer,
    ElasticRun,
    elastic_trainer,
    measured_pause_s,
    steady_pace_s,
)
from makespan.live.engine import (
    Executor,
    LaunchOn,
    LiveClock,
    LiveEngine,
    ProcessTrainer,
    Trainer,
    check_live_events,
    check_live_recovery,
    read_state,
    restore,
    save_state,
    slots_of,
    steady_wall_s,
)
from makespan.live.workload import (
    LiveSetting,
    LiveSettings,
    LiveWorkload,
    live_jobs,
    live_settings,
    live_workload,
)
from makespan.metrics import Goodput, job_goodput, summary
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
from makespan.runtime import RunDirectory, held_directory, latest_checkpoint, memory_bytes
from makespan.runtime.joining import PROCESSES
from makespan.sim import (
    DECISION_LIMIT_S,
    FailureModel,
    Failures,
    NodeEvent,
    Observer,
    Policy,
    Recovery,
    RecoveryKind,
    Scenario,
    Schedule,
    StalledError,
    Violation,
    check_jobs,
    check_policy,
    events_table,
    losses_table,
    node_events,
    ordered_node_events,
    outcomes_table,
    simulate,
    validate_schedule,
)
from makespan.tables import LIVE, LIVE_FAILURES, LIVE_JOBS
from makespan.training import TrainingJob, read_progress, request_stop, train
from makespan.workloads import workload

# --- Prediction and comparison ----------------------------------------------------------------------

_RULES = ("order", "row", "life", "capacity", "failure")
"""Rules that a real schedule must satisfy; the other rules of the validator concern simulated times."""
_EXPECTED = "a prediction of a live run"
_JCT, _MAKESPAN = "avg_jct_s", "makespan_s"
_BOUNDS, _PERCENTILES = (f"low_{_JCT}", f"high_{_JCT}"), (5, 95)
_NOMINAL = "undisturbed_"  # prefix in the file and in columns
_COSTS = ("n_interruptions", "lost_steps", "goodput")  # of failures, in total and of each job


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of a live run: a file that was written before its first job started.

    ``text`` is the content of the file, in which all times are wall times. Average JCT and makespan are
    medians over simulations with perturbed step times; the jobs are those of the nominal run, the simulation
    with step times as profiled.
    """

    text: str

    @classmethod
    def load(cls, path: Path) -> "Prediction | None":
        """Read the prediction of an interrupted run; None if there is none."""
        return None if read_json(path) is None else cls(read_text(path, _EXPECTED))

    @property
    def sha256(self) -> str:
        """Digest of the file."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def values(self) -> dict[str, Any]:
        """Content of the file."""
        values: dict[str, Any] = json.loads(self.text)
        return values

    @property
    def interval_s(self) -> tuple[float, float]:
        """Interval of the average JCT in nine of ten perturbed simulations [s]; NaN in older files."""
        low_s, high_s = (float(self.values.get(name, "nan")) for name in _BOUNDS)
        return low_s, high_s

    @property
    def jobs(self) -> pd.DataFrame:
        """One row per job: start, end, and number of restarts."""
        return pd.DataFrame(self.values["jobs"])


def predict_live(
    setting: LiveSetting,
    policy: Policy,
    cluster: ClusterSpec,
    path: Path,
    decision_limit_s: float | None = DECISION_LIMIT_S,
) -> Prediction:
    """Simulate the jobs of a setting, and write the prediction of the live run into a file.

    A schedule can depend on the order of two close events, which a single simulation cannot predict. Average
    JCT and makespan are therefore medians of many simulations with slightly perturbed step times; the file
    also has the interval of nine of ten of them.

    Parameters
    ----------
    setting, policy, cluster
        As for `run_live`; the setting has only values that were measured before the run.
    path
        The file. An existing file is kept: a resumed run is compared with the first prediction.
    decision_limit_s
        As for `run_live`.
    """
    earlier = Prediction.load(path)
    if earlier is not None:
        return earlier
    simulated = _simulated(setting, setting, policy, cluster, decision_limit_s)
    outcomes = simulated.outcomes
    perturbed = _perturbed_totals(setting, setting, policy, cluster, decision_limit_s)
    columns = ["job_id", "workload", "n_gpus", "plan", "steps", "submit_time_s"]
    columns += ["first_start_s", "finish_time_s", "n_restarts"]
    failures: dict[str, Any] = {}
    if setting.node_events:
        by_job = job_goodput(simulated.events, simulated.losses)
        outcomes = outcomes.merge(by_job[["job_id", *_COSTS]], on="job_id", validate="1:1")
        columns += _COSTS
        failures = {
            "n_nodes": setting.n_nodes,
            "checkpoint_s": dict(setting.checkpoint_s),
            "recovery": setting.recovery,
            "pause_s": setting.pause_s,
            "node_events": [[event.time_s, event.node_id, event.kind.value] for event in setting.node_events],
            **_costs(by_job),
        }
    values = {
        "written_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "policy": setting.policy,
        "workload": setting.workload,
        "seed": setting.seed,
        "n_slots": setting.n_slots,
        "first_start_s": setting.first_start_s,
        "restart_delay_s": setting.restart_delay_s,
        "step_times_s": {
            key: dict(
                zip(table["exec_plan"] + " on " + table["placement"], table["iter_time_s"], strict=True)
            )
            for key, table in setting.tables.items()
        },
        **_medians(outcomes, perturbed),
        **dict(zip(_BOUNDS, _percentiles(perturbed[_JCT], *_PERCENTILES), strict=True)),
        **{_NOMINAL + name: value for name, value in _totals(outcomes).items()},
        **failures,
        "jobs": outcomes[columns].to_dict("records"),
    }
    written = Prediction(json.dumps(values, indent=1) + "\n")
    write_text(written.text, path)
    return written


@dataclass(frozen=True, slots=True)
class LiveResult:
    """Live run together with its prediction; all times are wall times.

    ``comparison`` is one row of schema `LIVE`, ``jobs`` a table of schema `LIVE_JOBS`; if nodes fail, both
    also have the columns of `LIVE_FAILURES`. Events, outcomes and losses of the run, and events and outcomes
    of the hindcast (a simulation with the mean of the profiles before and after the run), have the schemas of
    the simulator. ``violations`` lists events of the run that break a rule of schedules.
    """

    comparison: pd.DataFrame
    jobs: pd.DataFrame
    prediction: Prediction
    live_events: pd.DataFrame
    live_outcomes: pd.DataFrame
    live_losses: pd.DataFrame
    hindcast_events: pd.DataFrame
    hindcast_outcomes: pd.DataFrame
    violations: tuple[Violation, ...]


def compare_live(
    setting: LiveSetting,
    policy: Policy,
    cluster: ClusterSpec,
    engine: LiveEngine,
    prediction: Prediction,
    profiled: LiveSetting | None = None,
    decision_limit_s: float | None = DECISION_LIMIT_S,
) -> LiveResult:
    """Compare a live run with its prediction, and with a hindcast.

    The hindcast is a simulation with the ``profiled`` times, the mean of the profiles before and after the
    run; the default is the profile before it. ``decision_limit_s`` is as for `run_live`.
    """
    profiled = profiled or setting
    catalogue, jobs = setting.catalogue().on(cluster), setting.scaled_jobs()
    finished = sorted(engine.finished, key=lambda entry: entry[0].index)
    events, outcomes = events_table(engine.rows), outcomes_table(finished, catalogue)
    delays = setting.scaled_delays()
    violations = validate_schedule(events, jobs, cluster, catalogue, delays, extra_steps=0, is_live=True)
    hindcast = _simulated(setting, profiled, policy, cluster, decision_limit_s)
    tables = (events, outcomes, losses_table(engine.losses))
    live_events, live_outcomes, live_losses = (_on_wall(table, setting.scale) for table in tables)
    live = summary(
        live_events, live_outcomes, cluster, restart_delay_s=setting.restart_delay_s, extra_steps=0
    )
    overheads_s = [value / setting.scale for value in engine.overheads_s]
    perturbed = _perturbed_totals(setting, profiled, policy, cluster, decision_limit_s)
    expected = _medians(hindcast.outcomes, perturbed)
    row = {
        "live_restart_delay_s": sum(overheads_s) / len(overheads_s) if overheads_s else float("nan"),
        "live_gpu_allocation_ratio": live.gpu_allocation_ratio,
        "began_at": engine.began_at,
    }
    comparison = _comparison(setting, profiled, row, live_outcomes, prediction, expected)
    by_job = _job_table(
        setting.policy, live_outcomes, prediction.jobs, hindcast.outcomes, engine.final_losses
    )
    if setting.node_events:
        costs = job_goodput(live_events, live_losses).set_index("job_id").loc[by_job["job_id"]]
        comparison = _with_costs(comparison, pd.DataFrame([_costs(costs)]), pd.DataFrame([prediction.values]))
        by_job = _with_costs(by_job, costs, prediction.jobs.set_index("job_id").loc[by_job["job_id"]])
    return LiveResult(
        comparison=comparison,
        jobs=by_job,
        prediction=prediction,
        live_events=live_events,
        live_outcomes=live_outcomes,
        live_losses=live_losses,
        hindcast_events=hindcast.events,
        hindcast_outcomes=hindcast.outcomes,
        violations=tuple(violation for violation in violations if violation.rule in _RULES),
    )


def _costs(by_job: pd.DataFrame) -> dict[str, float]:
    """Return what failures cost all jobs of a table of `job_goodput`."""
    total = Goodput.of(by_job)
    return dict(zip(_COSTS, (total.n_interruptions, total.lost_steps, total.ratio), strict=True))


def _with_costs(table: pd.DataFrame, live: pd.DataFrame, predicted: pd.DataFrame) -> pd.DataFrame:
    """Return a table with the costs of failures, live and predicted; their rows are in its order."""
    further = {name: live[name].to_numpy() for name in _COSTS}
    further |= {f"predicted_{name}": predicted[name].to_numpy(dtype=float) for name in _COSTS}
    costs = LIVE_FAILURES.validate(pd.DataFrame(further), where="live run")
    return table.assign(**{name: costs[name] for name in LIVE_FAILURES.names})


def _scenario(
    setting: LiveSetting,
    profiled: LiveSetting,
    cluster: ClusterSpec,
    decision_limit_s: float | None,
) -> Scenario:
    """Return the jobs of a setting with profiled times, in the time of the policy, without colocation.

    If nodes fail, jobs recover from checkpoints, which each writes after so many steps as the trainer does,
    counted in the time of its requested configuration, or from memory, after the profiled pause.
    """
    recovery = None
    if setting.node_events or setting.recovery != "restart":
        requested, settings = profiled.catalogue().on(cluster).requested, live_settings()
        pause_s = None if setting.recovery == "restart" else profiled.pause_s * setting.scale
        recovery = {
            job.job_id: Recovery(
                setting.recovery,
                checkpoint_interval_s=_checkpoint_every(setting.tables[job.workload], settings)
                * requested(job).iter_time_s,
                checkpoint_s=profiled.checkpoint_s.get(job.workload, 0.0) * setting.scale,
                pause_s=pause_s,
            )
            for job in setting.jobs
        }
    return Scenario(
        setting.workload,
        tuple(setting.scaled_jobs()),
        cluster,
        profiled.catalogue(),
        profiled.scaled_delays(),
        decision_limit_s=decision_limit_s,
        extra_steps=0,
        shares_devices=False,
        failures=setting.scaled_node_events(),
        recovery=recovery,
    )


def _simulated(
    setting: LiveSetting,
    profiled: LiveSetting,
    policy: Policy,
    cluster: ClusterSpec,
    decision_limit_s: float | None,
) -> Schedule:
    """Return a simulation with its tables in wall time."""
    scenario = _scenario(setting, profiled, cluster, decision_limit_s)
    with _time_explained(setting.scale):
        schedule = simulate(scenario, policy)
    tables = (schedule.events, schedule.outcomes, schedule.losses)
    events, outcomes, losses = (_on_wall(table, setting.scale) for table in tables)
    return replace(schedule, events=events, outcomes=outcomes, losses=losses)


@contextmanager
def _time_explained(scale: float) -> Iterator[None]:
    """Add to the error of a deadlock that its times are those of the policy."""
    try:
        yield
    except StalledError as error:
        raise StalledError(
            f"{error}; times are those of the policy, {scale:.3g} s for each of the run"
        ) from None


def _perturbed_totals(
    setting: LiveSetting,
    profiled: LiveSetting,
    policy: Policy,
    cluster: ClusterSpec,
    decision_limit_s: float | None,
) -> pd.DataFrame:
    """Return average JCT and makespan of simulations with perturbed step times [s]."""
    settings = live_settings()
    # Antithetic pairs: each draw is used with both signs, so that the perturbations balance.
    draws = [
        profiled.perturbed(np.random.default_rng([setting.seed, 1, pair]), sign * settings.noise_log_sd)
        for pair in range(settings.noise_simulations // 2)
        for sign in (1, -1)
    ]
    return pd.DataFrame(
        [_totals(_simulated(setting, draw, policy, cluster, decision_limit_s).outcomes) for draw in draws]
    )


def _medians(outcomes: pd.DataFrame, perturbed: pd.DataFrame) -> dict[str, float]:
    """Return medians of average JCT and makespan over the perturbed simulations and the nominal one."""
    return {name: _percentiles([value, *perturbed[name]], 50)[0] for name, value in _totals(outcomes).items()}


def _percentiles(values: Sequence[float] | pd.Series, *which: float) -> list[float]:
    return [float(value) for value in np.percentile(values, which)]


def _on_wall(table: pd.DataFrame, scale: float) -> pd.DataFrame:
    times = [str(name) for name in table.columns if str(name).endswith("_s")]
    return table.assign(**{name: table[name] / scale for name in times})


def _totals(outcomes: pd.DataFrame) -> dict[str, float]:
    """Return mean completion time and makespan of finished jobs [s]."""
    ends, begins = outcomes["finish_time_s"], outcomes["submit_time_s"]
    return {_JCT: float((ends - begins).mean()), _MAKESPAN: float(ends.max() - begins.min())}


def _comparison(
    setting: LiveSetting,
    profiled: LiveSetting,
    row: Mapping[str, Any],
    outcomes: pd.DataFrame,
    prediction: Prediction,
    hindcast: Mapping[str, float],
) -> pd.DataFrame:
    """Compare a run with prediction and hindcast: one row of schema `LIVE`."""
    live, predicted = _totals(outcomes), prediction.values
    n_jobs, n_restarts = len(outcomes), int(outcomes["n_restarts"].sum())
    nominal_s = predicted.get(_NOMINAL + _JCT, predicted[_JCT])
    # Change from the profile before the run to the one after it: twice the change to their mean.
    changes = [
        2 * (profiled.tables[key]["iter_time_s"] / table["iter_time_s"] - 1)
        for key, table in setting.tables.items()
    ]
    values: dict[str, Any] = {}
    for name, total in (("jct", _JCT), ("makespan", _MAKESPAN)):
        values |= {
            f"live_{total}": live[total],
            f"predicted_{total}": predicted[total],
            f"{name}_difference_pct": 100 * (predicted[total] / live[total] - 1),
            f"retrodiction_{total}": hindcast[total],
            f"retrodiction_{name}_difference_pct": 100 * (hindcast[total] / live[total] - 1),
        }
    values |= {
        "predicted_low_avg_jct_s": prediction.interval_s[0],
        "predicted_high_avg_jct_s": prediction.interval_s[1],
        "undisturbed_jct_difference_pct": 100 * (nominal_s / live[_JCT] - 1),
        "policy": setting.policy,
        "workload": setting.workload,
        "seed": setting.seed,
        "jobs": n_jobs,
        "restart_delay_s": (setting.first_start_s * n_jobs + setting.restart_delay_s * n_restarts)
        / (n_jobs + n_restarts),
        "n_restarts": n_restarts,
        "predicted_n_restarts": int(prediction.jobs["n_restarts"].sum()),
        "profile_drift_pct": 100 * float(pd.concat(changes).mean()),
        "predicted_at": prediction.values["written_at"],
        "prediction_sha256": prediction.sha256,
    }
    return LIVE.validate(pd.DataFrame([{**row, **values}])[list(LIVE.names)], where="live run")


def _job_table(
    policy: str,
    live: pd.DataFrame,
    predicted: pd.DataFrame,
    hindcast: pd.DataFrame,
    losses: Mapping[str, float],
) -> pd.DataFrame:
    """Compare the jobs of a run with prediction and hindcast: a table of schema `LIVE_JOBS`."""
    begins = live["submit_time_s"]
    forecast, again = (table.set_index("job_id").loc[live["job_id"]] for table in (predicted, hindcast))
    table = live.assign(
        policy=policy,
        live_first_start_s=live["first_start_s"],
        predicted_first_start_s=forecast["first_start_s"].to_numpy(),
        live_jct_s=live["finish_time_s"] - begins,
        predicted_jct_s=forecast["finish_time_s"].to_numpy() - begins,
        retrodiction_jct_s=again["finish_time_s"].to_numpy() - begins,
        predicted_n_restarts=forecast["n_restarts"].to_numpy(),
        final_loss=live["job_id"].map(losses).astype(float),
    )
    return LIVE_JOBS.validate(table[list(LIVE_JOBS.names)], where="live run")


# --- Slots and their profile ------------------------------------------------------------------------

Slots = tuple[int, ...]
_PATTERN = "a800-64"
_TURNS = 2  # a first start, and a resumption under another plan
_ENDLESS = 1_000_000  # steps of a neighbour, which trains until it is stopped
_POLL_WALL_S = 0.05
_SMALL_BYTES = 2e9  # smallest memory of a slot


def slot_cluster(n_slots: int, n_nodes: int = 1) -> ClusterSpec:
    """Return nodes whose devices are slots, each with a CPU thread and its share of the memory.

    Bandwidths are those of some catalogued node: times come from the profile, and a live run reads no
    bandwidth. An `InputError` is raised if the slots cannot be spread evenly.
    """
    if n_nodes < 1 or n_slots % n_nodes:
        raise InputError(
            f"{n_slots} slot(s) on {n_nodes} node(s); expected as many slots on each node, one or more"
        )
    per_node = n_slots // n_nodes
    base = cluster(_PATTERN)
    share = max(memory_bytes() / n_slots, _SMALL_BYTES)
    node = replace(
        base.nodes[0],
        name="slots",
        gpu=replace(
            base.nodes[0].gpu, name="slot", kind="slot", memory_bytes=share, reserved_bytes=0.0, shares=None
        ),
        n_gpus=per_node,
        n_nics=1,
        gpus_per_nic=per_node,
        cpu_threads=per_node,
        host_memory_bytes=share * per_node,
    )
    return homogeneous(node, n_nodes, base.network, name=f"slots-{n_slots}")


def prepare_setting(
    directory: Path,
    policy: str,
    spec: LiveWorkload,
    slots_cluster: ClusterSpec,
    seed: int,
    launch_on: LaunchOn,
    settings: LiveSettings,
    tell: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] | None = None,
    failing: tuple[NodeEvent, ...] = (),
    recovery: RecoveryKind = "restart",
) -> LiveSetting:
    """Return the setting of an interrupted run in a directory, or measure and write a new one."""
    n_nodes = slots_cluster.n_nodes
    earlier = LiveSetting.load(directory)
    if earlier is not None:
        earlier.check_same(policy, spec.name, slots_cluster.n_gpus, seed, n_nodes, failing, recovery)
        tell("resuming the interrupted run")
        return earlier
    kept = directory / "profile.jsonl"
    measured = profile(
        spec, slots_cluster, launch_on, settings, tell, kept, progress,
        spreads_checkpoints=not failing, recovery=recovery,
    )  # fmt: skip

    def iter_time_s(key: str, n_slots: int, plan: str) -> float:
        table = measured.tables[key]
        rows = table[(table["exec_plan"] == plan) & (table["placement"] == str(n_slots))]
        return float(rows["iter_time_s"].iloc[0])

    jobs = live_jobs(spec, iter_time_s, seed)
    setting = LiveSetting(
        policy=policy,
        workload=spec.name,
        n_slots=slots_cluster.n_gpus,
        seed=seed,
        first_start_s=measured.first_start_s,
        restart_delay_s=measured.restart_delay_s,
        scale=settings.policy_restart_delay_s / measured.restart_delay_s,
        jobs=tuple(jobs),
        seeds={job.job_id: number for number, job in enumerate(jobs)},
        tables=measured.tables,
        n_nodes=n_nodes,
        node_events=failing,
        checkpoint_s=measured.checkpoint_s if failing else {},
        recovery=recovery,
        pause_s=measured.pause_s,
        n_logical_workers=0 if recovery == "restart" else max(spec.slots),
    )
    setting.save(directory)
    kept.unlink(missing_ok=True)
    return setting


class LiveProfile(NamedTuple):
    """Tables of a live workload, and times of a first start, a resumption and a checkpoint of each [s].

    ``pause_s`` is the time until a job that loses a process resumes from memory, 0 for jobs that restart.
    """

    tables: dict[str, pd.DataFrame]
    first_start_s: float
    restart_delay_s: float
    checkpoint_s: dict[str, float]
    pause_s: float = 0.0


def profile(
    spec: LiveWorkload,
    slots_cluster: ClusterSpec,
    launch_on: LaunchOn,
    settings: LiveSettings,
    tell: Callable[[str], None],
    path: Path,
    progress: Callable[[int, int], None] | None,
    *,
    spreads_checkpoints: bool = True,
    recovery: RecoveryKind = "restart",
) -> LiveProfile:
    """Measure the tables of a live workload, and the times of starts and checkpoints [s].

    If ``spreads_checkpoints``, those during the run count as part of the steps. The ``path`` is that of
    `Measurements`. Unless jobs restart, elastic jobs are measured.
    """
    n_slots, launcher = slots_cluster.n_gpus, launch_on((0,))
    tell(f"measuring {len(spec.workloads)} workload(s) on {n_slots} slot(s)")
    conditions = measured_by(map(workload, spec.workloads), _procedure(settings)) | {
        "processes": [type(launcher).__name__, launcher.device, n_slots],
        "plans": dict(spec.plans),
        "restart_steps": settings.restart_steps,
    }
    is_elastic = recovery != "restart"
    if is_elastic:
        conditions["n_logical_workers"] = max(spec.slots)
    # Runs of all points and, for each workload and number of slots, a start and a resumption.
    runs_per_workload = sum(len(spec.plans[size]) * settings.repetitions + _TURNS for size in spec.slots)
    has_pause = is_elastic and max(spec.slots) > 1  # otherwise no job has a process left
    total = len(spec.workloads) * (runs_per_workload + has_pause)
    kept = Measurements(path, conditions, total, progress, tell)
    profiler: Profiler = (ElasticProfiler if is_elastic else Profiler)(
        spec, n_slots, slots_cluster.node, launch_on, settings, kept
    )
    tables, restarts = profiler.tables(), profiler.restarts()
    pause_s = profiler.pause_s() if isinstance(profiler, ElasticProfiler) and has_pause else 0.0
    checkpoint_s = {
        key: fmean(restart.save_s for restart in restarts if restart.workload == key) for key in tables
    }
    if spreads_checkpoints:
        for key, table in tables.items():
            table["iter_time_s"] += checkpoint_s[key] / _checkpoint_every(table, settings)
    first_start_s, delay_s = (
        fmean(restart.overhead_s for restart in restarts if restart.is_first == is_first)
        for is_first in (True, False)
    )
    pause = f", resuming from memory {pause_s:.2f} s" if has_pause else ""
    tell(f"a first start takes {first_start_s:.2f} s, a resumption {delay_s:.2f} s{pause}")
    return LiveProfile(tables, first_start_s, delay_s, checkpoint_s, pause_s)


def _procedure(settings: LiveSettings) -> Procedure:
    return Procedure(settings.warmup_steps, settings.steps, settings.repetitions, is_paced=True)


def _checkpoint_every(table: pd.DataFrame, settings: LiveSettings) -> int:
    """Return the steps between checkpoints of a workload."""
    return max(round(settings.checkpoint_interval_s / float(table["iter_time_s"].min())), 1)


def _training_job(key: str, plan: str, size: int, node: NodeSpec, n_steps: int) -> TrainingJob:
    point = ProfilePoint(plan, Placement((size,)), 1)
    return TrainingJob(model_of(workload(key)), point_plan(point, workload(key), node), n_steps)


def warm_up(
    spec: LiveWorkload,
    slots_cluster: ClusterSpec,
    launch_on: LaunchOn,
    recovery: RecoveryKind = "restart",
) -> None:
    """Train one step on as many slots as any job may request.

    The fork server loads libraries at its first request, which must not slow a measured start. It is started
    here with keyboard interrupts blocked, and all processes that it forks inherit the mask: only the
    scheduler receives interrupts, and it lets the processes write their checkpoints.
    """
    size = max(spec.slots)
    job = _training_job(next(iter(spec.workloads)), spec.plans[size][0], size, slots_cluster.node, 1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        if recovery == "restart":
            train(job, launcher=launch_on(tuple(range(size))))
        else:
            with temporary_directory("warm-up") as directory:
                trainer = elastic_trainer(next(iter(spec.workloads)), size, 1, 0, directory)
                ElasticRun().train(trainer, tuple(range(size)), launch_on, 1, steps=1, checkpoint_every=0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def process_trainer(
    directory: Path,
    setting: LiveSetting,
    slots_cluster: ClusterSpec,
    launch_on: LaunchOn,
    settings: LiveSettings,
) -> ProcessTrainer | ElasticProcessTrainer:
    """Return the trainer of a setting, with checkpoints at about equal time intervals."""
    every = {key: _checkpoint_every(table, settings) for key, table in setting.tables.items()}
    jobs, node = directory / "jobs", slots_cluster.node
    if setting.recovery != "restart":
        n_workers = setting.n_logical_workers
        return ElasticProcessTrainer(jobs, launch_on, setting.seeds, every, n_workers, node.n_gpus)
    return ProcessTrainer(jobs, node, launch_on, setting.seeds, every)


@dataclass(frozen=True, slots=True)
class _Restart:
    """Times of a start or a resumption without its warm steps, and of the checkpoint at its end [s]."""

    workload: str
    is_first: bool
    overhead_s: float
    save_s: float


class Profiler:
    """Measures the plans of a live workload while its other models train on all other slots.

    Jobs of the live run have the same load next to them. Different workloads are measured on different slots.
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
        """Measure the steps of every plan; one table of schema `makespan.tables.THROUGHPUT` per workload.

        Every round has one run of each point, so a disturbance of a few seconds affects few runs of a point
        and hardly changes their median.
        """
        parts: dict[str, list[dict[str, Any]]] = {key: [] for key in self._spec.workloads}
        for turn in range(self._settings.repetitions):
            for key, rounds in parts.items():
                rounds += [self._points(key, size, turn) for size in sorted(self._spec.slots)]
        return {key: profile_table(rounds, workload(key)) for key, rounds in parts.items()}

    def restarts(self) -> list[_Restart]:
        """Measure a start and a resumption under another plan for every workload and number of slots."""
        restarts = []
        for size in sorted(self._spec.slots):
            for key in self._spec.workloads:
                slots, neighbours = self._places(key, size)
                measure = partial(self._turns, key, slots, neighbours)
                turns = self._kept.measure(f"restarts of {key}, slots {_listed(slots)}", measure, _TURNS)
                restarts += [_Restart(key, not turn, *cost) for turn, cost in enumerate(turns)]
        return restarts

    def _points(self, key: str, size: int, turn: int) -> dict[str, Any]:
        slots, neighbours = self._places(key, size)
        once = replace(_procedure(self._settings), repetitions=1)
        points = [ProfilePoint(plan, Placement((size,)), 1) for plan in self._spec.plans[size]]
        return measure_points(
            workload(key), points, self._node, self._launch_on(slots), once, kept=self._kept,
            where=f", slots {_listed(slots)}, round {turn + 1}",
            alongside=lambda: self._neighbours(neighbours),
        )  # fmt: skip

    def _places(self, key: str, size: int) -> tuple[Slots, dict[Slots, str]]:
        """Return the slots on which a workload is measured, and its neighbours on the other slots."""
        keys, n_lanes = list(self._spec.workloads), max(self._n_slots // size, 1)
        turn = keys.index(key)
        groups = [tuple(range(lane * size, (lane + 1) * size)) for lane in range(n_lanes)]
        others = {
            groups[(turn + step) % n_lanes]: keys[(turn + step) % len(keys)] for step in range(1, n_lanes)
        }
        return groups[turn % n_lanes], others

    @contextmanager
    def _neighbours(self, others: dict[Slots, str]) -> Iterator[None]:
        """Train workloads on other slots, past their first step from the start of the block to its end."""
        with temporary_directory("neighbours") as name, ThreadPoolExecutor(len(others) or 1) as pool:
            places = {Path(name, _listed(slots)): (slots, key) for slots, key in others.items()}
            ends = {
                place: pool.submit(self._train, key, slots, place) for place, (slots, key) in places.items()
            }
            try:
                for place, end in ends.items():
                    # Neighbours disturb as in a live run only after their first step.
                    while not end.done() and self._steps_in(place) == 0:
                        time.sleep(_POLL_WALL_S)
                yield
            finally:
                # A run that is still starting has no directory yet, so request the stop repeatedly.
                while not all(end.done() for end in ends.values()):
                    for place in filter(Path.exists, places):
                        self._stop(place)
                    time.sleep(_POLL_WALL_S)
            for end in ends.values():
                end.result()

    def _steps_in(self, place: Path) -> int:
        """Return the steps of a neighbour, by its directory."""
        state = read_progress(place)
        return 0 if state is None else state.step

    def _stop(self, place: Path) -> None:
        """Request that a neighbour ends."""
        request_stop(place)

    def _train(self, key: str, slots: Slots, place: Path) -> None:
        job = _training_job(key, self._spec.plans[len(slots)][0], len(slots), self._node, _ENDLESS)
        train(job, launcher=self._launch_on(slots), run_dir=place)

    def _turns(self, key: str, slots: Slots, others: dict[Slots, str]) -> list[tuple[float, float]]:
        """Measure the overhead of each turn, and the time of its checkpoint [s]."""
        costs, plans, size = [], self._spec.plans[len(slots)], len(slots)
        with self._neighbours(others), temporary_directory("restart") as directory:
            for turn in range(_TURNS):
                n_steps = self._settings.restart_steps * (turn + 1)
                job = _training_job(key, plans[turn % len(plans)], size, self._node, n_steps)
                began, source = time.monotonic(), directory if turn else None
                result = train(job, launcher=self._launch_on(slots), checkpoint_dir=directory, resume=source)
                overhead_s = time.monotonic() - began - steady_wall_s(result)
                costs.append((overhead_s, sum(result.save_s)))
        return costs


class ElasticProfiler(Profiler):
    """Measures elastic jobs: their steps on each number of slots, starts, and the pause after a loss."""

    def pause_s(self) -> float:
        """Measure the mean time until a job that loses a process resumes from memory, over workloads [s]."""
        return fmean(
            self._kept.measure(f"pause of {key}", partial(self._pause_s, key)) for key in self._spec.workloads
        )

    def _trainer(self, key: str, n_steps: int, directory: Path) -> ElasticTrainer:
        return elastic_trainer(key, max(self._spec.slots), n_steps, 0, directory)

    def _pause_s(self, key: str) -> float:
        slots, n_steps = tuple(range(max(self._spec.slots))), self._settings.restart_steps
        with temporary_directory("pause") as directory:
            trainer = self._trainer(key, 3 * n_steps, directory)
            return measured_pause_s(trainer, slots, self._launch_on, n_steps)

    def _points(self, key: str, size: int, turn: int) -> dict[str, Any]:
        slots, neighbours = self._places(key, size)
        (plan,) = self._spec.plans[size]
        where = f"{key} on {size}, slots {_listed(slots)}, round {turn + 1}"
        measure = partial(self._measured, key, slots, neighbours)
        point = {
            "exec_plan": plan, "placement": Placement((size,)).text, "cpu_threads": 1, "reason": "",
            "runs": [self._kept.measure(where, measure)],
        }  # fmt: skip
        return {"workload": key, "points": [point]}

    def _measured(self, key: str, slots: Slots, neighbours: dict[Slots, str]) -> dict[str, float]:
        """Return the time of a step [s]; its phases overlap in the elastic runtime and are unknown."""
        n_steps = self._settings.warmup_steps + self._settings.steps + 1
        run, unknown = ElasticRun(), float("nan")
        with self._neighbours(neighbours), temporary_directory("profile") as directory:
            trainer = self._trainer(key, n_steps, directory)
            run.train(trainer, slots, self._launch_on, 1, steps=n_steps, checkpoint_every=0)
        (marks,) = run.marks
        step_s = steady_pace_s([marks[-self._settings.steps - 2 :]])
        phases = dict.fromkeys(("forward_s", "overlap_sync_s", "optimize_s"), unknown)
        return {"iter_time_s": step_s, **phases}

    def _steps_in(self, place: Path) -> int:
        state = RunDirectory(place / PROCESSES).progress()
        return 0 if state is None else int(state["step"])

    def _stop(self, place: Path) -> None:
        RunFolder(place).request_placing({})

    def _train(self, key: str, slots: Slots, place: Path) -> None:
        place.mkdir()
        trainer = self._trainer(key, _ENDLESS, place)
        ElasticRun().train(trainer, slots, self._launch_on, 1, steps=_ENDLESS, checkpoint_every=0)

    def _turns(self, key: str, slots: Slots, others: dict[Slots, str]) -> list[tuple[float, float]]:
        costs = []
        with self._neighbours(others), temporary_directory("restart") as directory:
            for turn in range(_TURNS):
                n_steps, run = self._settings.restart_steps, ElasticRun()
                total = n_steps * (turn + 1)
                trainer = self._trainer(key, n_steps * _TURNS, directory)
                began = time.monotonic()
                run.train(trainer, slots, self._launch_on, 1, steps=total, checkpoint_every=0)
                overhead_s = time.monotonic() - began - n_steps * steady_pace_s(run.marks)
                newest = latest_checkpoint(directory / "checkpoints")
                costs.append((overhead_s, 0.0 if newest is None else newest.save_s))
        return costs


def _listed(slots: Slots) -> str:
    return ",".join(map(str, slots))


# --- Live runs --------------------------------------------------------------------------------------

_STATE = "state.json"
_PREDICTION = "prediction.json"
_FILES = {
    "lock", "setting.json", "profile.jsonl", "profile.jsonl.old", "profile-again.jsonl",
    "profile-again.jsonl.old", _STATE, _PREDICTION, "jobs",
}  # fmt: skip
"""Names in the directory of a live run."""


def run_live(
    setting: LiveSetting,
    policy: Policy,
    cluster: ClusterSpec,
    trainer: Trainer,
    directory: Path | None = None,
    observers: Sequence[Observer] = (),
    decision_limit_s: float | None = DECISION_LIMIT_S,
) -> LiveEngine:
    """Run the jobs of a setting, or the unfinished jobs of an interrupted run.

    Parameters
    ----------
    setting, policy, cluster, trainer
        Jobs to run, policy, nodes whose devices are the slots, and trainer of the segments.
    directory, observers
        Directory of the state, None to save no state; observers of every event, in the time scale of
        policies.
    decision_limit_s
        Wall time after which one call of the policy is interrupted [s], None or 0 for no limit.

    Raises
    ------
    InputError, WorkerError
        A job can never run; its processes crashed several times without progress.
    PolicyError
        The policy raised an error, timed out or made an infeasible decision; completed work is saved.
    """
    scenario = _scenario(setting, setting, cluster, decision_limit_s)
    check_jobs(scenario.jobs, cluster, scenario.catalogue.on(cluster))
    state = None if directory is None else read_state(directory / _STATE)
    clock = LiveClock(setting.scale, 0.0 if state is None else state["time_s"])
    engine = LiveEngine(
        scenario,
        policy,
        Executor(trainer, setting.n_slots, setting.n_nodes),
        clock,
        lambda engine: None if directory is None else save_state(engine, directory / _STATE),
    )
    engine.observers += observers
    engine.load()
    if state is not None:
        restore(engine, state)
    with _time_explained(setting.scale):
        engine.run()
    return engine


@typed
def live_experiment(
    policy: Policy,
    workload: str,
    directory: Path,
    *,
    n_slots: int = 2,
    n_nodes: int = 1,
    failures: Failures | None = None,
    recovery: RecoveryKind = "restart",
    seed: int = 0,
    launcher: str = "local",
    device: str = "cpu",
    observe: Callable[[LiveSetting, Sequence[float]], Sequence[Observer]] = lambda setting, ends_s: (),
    tell: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] | None = None,
    decision_limit_s: float | None = DECISION_LIMIT_S,
) -> LiveResult:
    """Profile, predict, run live, profile again and compare; an interrupted run is resumed.

    The prediction is written before the first job starts. The speed of a shared machine drifts within
    minutes, so a second simulation, the hindcast, uses the mean of the profiles before and after the run; it
    shows the part of the prediction error that is drift. Neither uses values measured during the run.

    Parameters
    ----------
    policy, workload, n_slots, seed
        Policy, name of a live workload, number of devices to use, and seed of the job list.
    n_nodes, failures, recovery
        Nodes over which the devices are spread evenly; failures as of a simulation, with times since the
        start of the run [s of real time]; what interrupted jobs do, see `makespan.sim.Recovery`. Unless they
        restart, jobs are elastic: as many logical workers as the largest request of the workload has slots
        train their batch, under plans of data parallelism alone.
    directory
        Directory of measurements, state and checkpoints; removed at the end. It must hold nothing else.
    launcher, device
        ``local`` or ``slurm``, ``cpu`` or ``cuda``.
    observe, tell, progress
        Maps the setting, and the wall times at which the prediction lets jobs finish [s], to observers of
        every event; called with a line of text about each phase; as for `Measurements`.
    decision_limit_s
        As for `run_live`.

    Raises
    ------
    InputError, WorkerError
        The directory holds other files, another run is active there, the interrupted run has other inputs, a
        name is unknown, or nodes are to fail in a way or in a place where they cannot; the processes of a job
        crashed several times without progress.
    """
    check_policy(policy)
    for name, number, least in (("n_slots", n_slots, 1), ("n_nodes", n_nodes, 1), ("seed", seed, 0)):
        check_range(name, number, least)
    temporary = tuple(f".{name.partition('.')[0]}-" for name in _FILES)
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        # The directory is removed at the end.
        if path.name not in _FILES and not path.name.startswith(temporary):
            raise InputError(
                f"{directory}: {path.name} is no file of a live run, whose directory is removed at its end; "
                "expected a directory of its own"
            )
    check_live_recovery(recovery, launcher, device)
    if launcher != "local" and (n_nodes > 1 or failures is not None):
        raise InputError(
            f"launcher {launcher!r} with several nodes or failures: only processes of this machine can be "
            "killed at once; expected launcher 'local'"
        )
    slots_cluster, settings = slot_cluster(n_slots, n_nodes), live_settings()
    failing: tuple[NodeEvent, ...] = ()
    if failures is not None:
        events, origin = node_events(failures, slots_cluster)
        failing = tuple(ordered_node_events(events, slots_cluster))
        check_live_events(failing)
        tell(f"{origin}; times count from the start of the run")
    slots = slots_of(launcher, device, n_slots)
    spec = live_workload(workload).fitting(n_slots)
    if recovery != "restart":
        spec = spec.data_parallel()
    with held_directory(directory, "run"):
        warm_up(spec, slots_cluster, slots, recovery)
        setting = prepare_setting(
            directory, policy.name, spec, slots_cluster, seed, slots, settings, tell, progress, failing,
            recovery,
        )  # fmt: skip
        prediction = predict_live(setting, policy, slots_cluster, directory / _PREDICTION, decision_limit_s)
        forecast, (low_s, high_s) = prediction.values, prediction.interval_s
        tell(
            f"predicted at {forecast['written_at']}: average JCT {forecast['avg_jct_s']:.1f} s "
            f"({low_s:.1f} to {high_s:.1f} s in nine of ten simulations with perturbed step times), "
            f"makespan {forecast['makespan_s']:.1f} s; SHA-256 {prediction.sha256}"
        )
        observers = observe(setting, sorted(prediction.jobs["finish_time_s"]))
        trainer = process_trainer(directory, setting, slots_cluster, slots, settings)
        engine = run_live(setting, policy, slots_cluster, trainer, directory, observers, decision_limit_s)
        kept = directory / "profile-again.jsonl"
        if isinstance(failures, FailureModel) and engine.view.time_s / setting.scale > failures.end_s:
            tell(f"failures were generated for {failures.end_s:g} s only, and the run took longer")
        again = profile(
            spec, slots_cluster, slots, settings, tell, kept, progress,
            spreads_checkpoints=not failing, recovery=recovery,
        )  # fmt: skip
        averaged = setting.averaged(*again)
        result = compare_live(setting, policy, slots_cluster, engine, prediction, averaged, decision_limit_s)
        shutil.rmtree(directory, ignore_errors=True)
    return result
