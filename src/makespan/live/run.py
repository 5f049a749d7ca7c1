"""Live runs: profile the slots, predict, run the jobs for real, and compare with the prediction."""

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
from typing import Any

import numpy as np
import pandas as pd

from makespan.cleanup import temporary_directory
from makespan.files import read_json, read_text, write_text
from makespan.hardware import ClusterSpec, NodeSpec, cluster, homogeneous
from makespan.live.engine import (
    Executor,
    LaunchOn,
    LiveClock,
    LiveEngine,
    ProcessTrainer,
    Trainer,
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
from makespan.metrics import summary
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
from makespan.sim import (
    DECISION_LIMIT_S,
    Observer,
    Policy,
    Scenario,
    Violation,
    check_jobs,
    check_policy,
    events_table,
    outcomes_table,
    simulate,
    validate_schedule,
)
from makespan.tables import LIVE, LIVE_JOBS
from makespan.training import TrainingJob, read_progress, request_stop, train
from makespan.workloads import workload

# --- Prediction and comparison ----------------------------------------------------------------------

_RULES = ("order", "row", "life", "capacity")
"""Rules that a real schedule must obey; the other rules of the validator concern simulated times."""
_EXPECTED = "a prediction of a live run"
_JCT, _MAKESPAN = "avg_jct_s", "makespan_s"
_BOUNDS, _PERCENTILES = (f"low_{_JCT}", f"high_{_JCT}"), (5, 95)
_UNDISTURBED = "undisturbed_"


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of a live run, as a file that was written before its first job started.

    ``text`` is the content of the file, in which all times are wall times. Average JCT and makespan are
    medians over simulations with disturbed step times; the jobs are those of the simulation with step times
    as profiled.
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
        """Interval of the average JCT in nine of ten disturbed simulations [s]; NaN in files without it."""
        low_s, high_s = (float(self.values.get(name, "nan")) for name in _BOUNDS)
        return low_s, high_s

    @property
    def jobs(self) -> pd.DataFrame:
        """One row per job: its start, its end, and the number of its restarts."""
        return pd.DataFrame(self.values["jobs"])


def predict_live(
    setting: LiveSetting,
    policy: Policy,
    cluster: ClusterSpec,
    path: Path,
    decision_limit_s: float | None = DECISION_LIMIT_S,
) -> Prediction:
    """Simulate the jobs of a setting, and write the prediction of the live run into a file.

    A schedule can depend on which of two close events comes first, which one simulation cannot predict. So
    average JCT and makespan are medians of many simulations with slightly disturbed step times, given
    together with the interval of nine of ten of them.

    Parameters
    ----------
    setting, policy, cluster
        As for `run_live`; the setting has only values measured before.
    path
        The file. An existing one is left unchanged: a resumed run is judged by the first prediction.
    decision_limit_s
        As for `run_live`.
    """
    earlier = Prediction.load(path)
    if earlier is not None:
        return earlier
    outcomes = _foreseen(setting, setting, policy, cluster, decision_limit_s)
    disturbed = _disturbed(setting, setting, policy, cluster, decision_limit_s)
    columns = ["job_id", "workload", "n_gpus", "plan", "steps", "submit_time_s"]
    columns += ["first_start_s", "finish_time_s", "n_restarts"]
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
        **_medians(outcomes, disturbed),
        **dict(zip(_BOUNDS, _percentiles(disturbed[_JCT], *_PERCENTILES), strict=True)),
        **{_UNDISTURBED + name: value for name, value in _totals(outcomes).items()},
        "jobs": outcomes[columns].to_dict("records"),
    }
    written = Prediction(json.dumps(values, indent=1) + "\n")
    write_text(written.text, path)
    return written


@dataclass(frozen=True, slots=True)
class LiveResult:
    """Live run together with its prediction; all times are wall times.

    ``comparison`` is one row of schema `LIVE`, ``jobs`` a table of schema `LIVE_JOBS`. Events and outcomes,
    of the run and of a simulation with the profiles before and after it, have the schemas of the simulator.
    ``violations`` lists whatever in the run should not be possible.
    """

    comparison: pd.DataFrame
    jobs: pd.DataFrame
    prediction: Prediction
    live_events: pd.DataFrame
    live_outcomes: pd.DataFrame
    retrodicted_events: pd.DataFrame
    retrodicted_outcomes: pd.DataFrame
    violations: tuple[Violation, ...]


def compare_live(
    setting: LiveSetting,
    policy: Policy,
    cluster: ClusterSpec,
    engine: LiveEngine,
    prediction: Prediction,
    profiled: LiveSetting | None = None,
) -> LiveResult:
    """Compare a live run with its prediction, and with a simulation of what was ``profiled``.

    ``profiled`` is the mean of the profiles before and after the run; by default the one before it.
    """
    profiled = profiled or setting
    catalogue, jobs = setting.catalogue().on(cluster), setting.scaled_jobs()
    finished = sorted(engine.finished, key=lambda entry: entry[0].index)
    events, outcomes = events_table(engine.rows), outcomes_table(finished, catalogue)
    delays = setting.scaled_delays()
    violations = validate_schedule(events, jobs, cluster, catalogue, delays, extra_steps=0, is_live=True)
    again = simulate(_scenario(setting, profiled, cluster), policy)
    live_events, live_outcomes, retrodicted_events, retrodicted_outcomes = (
        _on_wall(table, setting.scale) for table in (events, outcomes, again.events, again.outcomes)
    )
    live = summary(
        live_events, live_outcomes, cluster, restart_delay_s=setting.restart_delay_s, extra_steps=0
    )
    overheads_s = [value / setting.scale for value in engine.overheads_s]
    expected = _medians(retrodicted_outcomes, _disturbed(setting, profiled, policy, cluster))
    row = {
        "live_restart_delay_s": sum(overheads_s) / len(overheads_s) if overheads_s else float("nan"),
        "live_gpu_allocation_ratio": live.gpu_allocation_ratio,
        "began_at": engine.began_at,
    }
    losses = engine.final_losses
    return LiveResult(
        comparison=_comparison(setting, profiled, row, live_outcomes, prediction, expected),
        jobs=_job_table(setting.policy, live_outcomes, prediction.jobs, retrodicted_outcomes, losses),
        prediction=prediction,
        live_events=live_events,
        live_outcomes=live_outcomes,
        retrodicted_events=retrodicted_events,
        retrodicted_outcomes=retrodicted_outcomes,
        violations=tuple(violation for violation in violations if violation.rule in _RULES),
    )


def _scenario(
    setting: LiveSetting,
    profiled: LiveSetting,
    cluster: ClusterSpec,
    decision_limit_s: float | None = DECISION_LIMIT_S,
) -> Scenario:
    """Return the jobs of a setting with profiled times, in the time of the policy, without colocation."""
    return Scenario(
        setting.workload,
        tuple(setting.scaled_jobs()),
        cluster,
        profiled.catalogue(),
        profiled.scaled_delays(),
        decision_limit_s=decision_limit_s,
        extra_steps=0,
        shares_devices=False,
    )


def _foreseen(
    setting: LiveSetting,
    profiled: LiveSetting,
    policy: Policy,
    cluster: ClusterSpec,
    decision_limit_s: float | None,
) -> pd.DataFrame:
    """Return the outcomes of a simulation, in wall time."""
    scenario = _scenario(setting, profiled, cluster, decision_limit_s)
    return _on_wall(simulate(scenario, policy).outcomes, setting.scale)


def _disturbed(
    setting: LiveSetting,
    profiled: LiveSetting,
    policy: Policy,
    cluster: ClusterSpec,
    decision_limit_s: float | None = DECISION_LIMIT_S,
) -> pd.DataFrame:
    """Return average JCT and makespan of simulations with disturbed step times [s]."""
    settings = live_settings()
    # Antithetic pairs: each draw is used with both signs, so that the disturbances balance.
    draws = [
        profiled.disturbed(np.random.default_rng([setting.seed, 1, pair]), sign * settings.noise_log_sd)
        for pair in range(settings.noise_simulations // 2)
        for sign in (1, -1)
    ]
    return pd.DataFrame(
        [_totals(_foreseen(setting, draw, policy, cluster, decision_limit_s)) for draw in draws]
    )


def _medians(outcomes: pd.DataFrame, disturbed: pd.DataFrame) -> dict[str, float]:
    """Return medians of average JCT and makespan over the disturbed simulations and the undisturbed one."""
    return {name: _percentiles([value, *disturbed[name]], 50)[0] for name, value in _totals(outcomes).items()}


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
    again: Mapping[str, float],
) -> pd.DataFrame:
    """Compare a run with prediction and retrodiction: one row of schema `LIVE`."""
    live, predicted = _totals(outcomes), prediction.values
    n_jobs, n_restarts = len(outcomes), int(outcomes["n_restarts"].sum())
    undisturbed_s = predicted.get(_UNDISTURBED + _JCT, predicted[_JCT])
    # From the profile before the run to the one after it, which is as far from their mean on the other side.
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
            f"retrodiction_{total}": again[total],
            f"retrodiction_{name}_difference_pct": 100 * (again[total] / live[total] - 1),
        }
    values |= {
        "predicted_low_avg_jct_s": prediction.interval_s[0],
        "predicted_high_avg_jct_s": prediction.interval_s[1],
        "undisturbed_jct_difference_pct": 100 * (undisturbed_s / live[_JCT] - 1),
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
    again: pd.DataFrame,
    losses: Mapping[str, float],
) -> pd.DataFrame:
    """Compare the jobs of a run with prediction and retrodiction: a table of schema `LIVE_JOBS`."""
    begins = live["submit_time_s"]
    foreseen, afterwards = (table.set_index("job_id").loc[live["job_id"]] for table in (predicted, again))
    table = live.assign(
        policy=policy,
        live_first_start_s=live["first_start_s"],
        predicted_first_start_s=foreseen["first_start_s"].to_numpy(),
        live_jct_s=live["finish_time_s"] - begins,
        predicted_jct_s=foreseen["finish_time_s"].to_numpy() - begins,
        retrodiction_jct_s=afterwards["finish_time_s"].to_numpy() - begins,
        predicted_n_restarts=foreseen["n_restarts"].to_numpy(),
        final_loss=live["job_id"].map(losses).astype(float),
    )
    return LIVE_JOBS.validate(table[list(LIVE_JOBS.names)], where="live run")


# --- Slots and their profile ------------------------------------------------------------------------

Slots = tuple[int, ...]
_PATTERN = "a800-64"
_TURNS = 2  # a start, and a continuation under another plan
_ENDLESS = 1_000_000  # steps of a neighbour, which trains until it is asked to stop
_POLL_WALL_S = 0.05
_SMALL_BYTES = 2e9  # smallest memory of a slot


def slot_cluster(n_slots: int) -> ClusterSpec:
    """Return one node whose devices are slots, each with a CPU thread and its share of the memory.

    Bandwidths are those of some catalogued node: times come from the profile, and a live run reads no
    bandwidth.
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
    """Return the setting of an interrupted run in a directory, or measure and write a new one."""
    earlier = LiveSetting.load(directory)
    if earlier is not None:
        earlier.check_same(policy, spec.name, where.n_gpus, seed)
        tell("continuing the run that was left")
        return earlier
    kept = directory / "profile.jsonl"
    tables, first_start_s, delay_s = profile(spec, where, launch_on, settings, tell, kept, progress)

    def iter_time_s(key: str, n_slots: int, plan: str) -> float:
        table = tables[key]
        rows = table[(table["exec_plan"] == plan) & (table["placement"] == str(n_slots))]
        return float(rows["iter_time_s"].iloc[0])

    jobs = live_jobs(spec, iter_time_s, seed)
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
    """Measure the tables of a live workload, and the times of a first start and of a resumption [s].

    Checkpoints during the run count as a part of each step. The ``path`` is that of `Measurements`.
    """
    n_slots, launcher = where.n_gpus, launch_on((0,))
    tell(f"measuring {len(spec.workloads)} workload(s) on {n_slots} slot(s)")
    conditions = measured_by(map(workload, spec.workloads), _procedure(settings)) | {
        "processes": [type(launcher).__name__, launcher.device, n_slots],
        "plans": dict(spec.plans),
        "restart_steps": settings.restart_steps,
    }
    # Runs of all points and, for each workload and number of slots, a start and a resumption.
    runs_per_workload = sum(len(spec.plans[size]) * settings.repetitions + _TURNS for size in spec.slots)
    kept = Measurements(path, conditions, len(spec.workloads) * runs_per_workload, progress, tell)
    profiler = Profiler(spec, n_slots, where.node, launch_on, settings, kept)
    tables, restarts = profiler.tables(), profiler.restarts()
    for key, table in tables.items():
        save_s = fmean(restart.save_s for restart in restarts if restart.workload == key)
        table["iter_time_s"] += save_s / _checkpoint_every(table, settings)
    first_start_s, delay_s = (
        fmean(restart.overhead_s for restart in restarts if restart.is_first == is_first)
        for is_first in (True, False)
    )
    tell(f"a first start takes {first_start_s:.2f} s, a continuation {delay_s:.2f} s")
    return tables, first_start_s, delay_s


def _procedure(settings: LiveSettings) -> Procedure:
    return Procedure(settings.warmup_steps, settings.steps, settings.repetitions, is_paced=True)


def _checkpoint_every(table: pd.DataFrame, settings: LiveSettings) -> int:
    """Return the steps between checkpoints of a workload."""
    return max(round(settings.checkpoint_interval_s / float(table["iter_time_s"].min())), 1)


def _training_job(key: str, plan: str, size: int, node: NodeSpec, n_steps: int) -> TrainingJob:
    point = ProfilePoint(plan, Placement((size,)), 1)
    return TrainingJob(model_of(workload(key)), point_plan(point, workload(key), node), n_steps)


def warm_up(spec: LiveWorkload, where: ClusterSpec, launch_on: LaunchOn) -> None:
    """Train one step on as many slots as any job may have.

    The fork server loads libraries at its first request, and no later start should pay for that. It is
    started here with keyboard interrupts blocked, and all processes that it forks inherit the mask: only the
    scheduler receives interrupts, and lets the processes write their checkpoints.
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
    """Return the trainer of a setting, with checkpoints at about equal time intervals."""
    every = {key: _checkpoint_every(table, settings) for key, table in setting.tables.items()}
    jobs, node = directory / "jobs", where.node
    return ProcessTrainer(jobs, node, launch_on, setting.seeds, every, is_here=is_here)


@dataclass(frozen=True, slots=True)
class _Restart:
    """Cost of a start or a resumption without its warm steps, and of the checkpoint at its end alone [s]."""

    workload: str
    is_first: bool
    overhead_s: float
    save_s: float


class Profiler:
    """Measures the plans of a live workload while other models of it train on all other slots.

    The jobs will run under the same load. Different workloads are measured on different slots.
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

        Every round has one run of each point, so a disturbance of some seconds affects few runs of a point
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
            beside=lambda: self._neighbours(neighbours),
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
    def _neighbours(self, beside: dict[Slots, str]) -> Iterator[None]:
        """Train workloads on other slots, past their first step from the start of the block to its end."""
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
                # A run that is only starting has no directory yet, so ask repeatedly.
                while not all(end.done() for end in ends.values()):
                    for place in filter(Path.exists, places):
                        request_stop(place)
                    time.sleep(_POLL_WALL_S)
            for end in ends.values():
                end.result()

    def _train(self, key: str, slots: Slots, place: Path) -> None:
        job = _training_job(key, self._spec.plans[len(slots)][0], len(slots), self._node, _ENDLESS)
        train(job, launcher=self._launch_on(slots), run_dir=place)

    def _turns(self, key: str, slots: Slots, beside: dict[Slots, str]) -> list[tuple[float, float]]:
        """Measure the overhead of each turn, and the time of its checkpoint [s]."""
        costs, plans, size = [], self._spec.plans[len(slots)], len(slots)
        with self._neighbours(beside), temporary_directory("restart") as directory:
            for turn in range(_TURNS):
                n_steps = self._settings.restart_steps * (turn + 1)
                job = _training_job(key, plans[turn % len(plans)], size, self._node, n_steps)
                began, source = time.monotonic(), directory if turn else None
                result = train(job, launcher=self._launch_on(slots), checkpoint_dir=directory, resume=source)
                overhead_s = time.monotonic() - began - steady_wall_s(result)
                costs.append((overhead_s, sum(result.save_s)))
        return costs


def _trains(place: Path) -> bool:
    """Return True if the run in a directory has done its first step."""
    progress = read_progress(place)
    return progress is not None and progress.step > 0


def _listed(slots: Slots) -> str:
    return ",".join(map(str, slots))


# --- Live runs --------------------------------------------------------------------------------------

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
    """Run the jobs of a setting, or resume the unfinished jobs of an interrupted run.

    Parameters
    ----------
    setting, policy, cluster, trainer
        Jobs to run, policy that decides, one node whose devices are the slots, and trainer of the segments.
    directory, observers
        Directory of the state, None to keep none; observers of every event, in the time of the policy.
    decision_limit_s
        Wall time after which one call of the policy is interrupted [s], None or 0 for no limit.

    Raises
    ------
    InputError, WorkerError
        A job can never run; its processes died several times without progress.
    PolicyError
        The policy raised, took too long or made an impossible decision; completed work is kept.
    """
    scenario = _scenario(setting, setting, cluster, decision_limit_s)
    check_jobs(scenario.jobs, cluster, scenario.catalogue.on(cluster))
    state = None if directory is None else read_state(directory / _STATE)
    clock = LiveClock(setting.scale, 0.0 if state is None else state["time_s"])
    engine = LiveEngine(
        scenario,
        policy,
        Executor(trainer, setting.n_slots),
        clock,
        lambda engine: None if directory is None else save_state(engine, directory / _STATE),
    )
    engine.observers += observers
    engine.load()
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
    """Profile, predict, run live, profile again and compare; resumes an interrupted run.

    The prediction is written before the first job starts, and the run is judged by it. The speed of a
    shared machine drifts within minutes, so a second simulation takes the mean of the profiles before and
    after the run; it shows how much of the error is drift. Neither uses anything measured during the run.

    Parameters
    ----------
    policy, workload, n_slots, seed
        Policy, name of a live workload, number of devices to use, and seed of the job list.
    directory
        Directory of measurements, state and checkpoints; removed at the end.
    launcher, device
        ``local`` or ``slurm``, ``cpu`` or ``cuda``.
    observe, tell, progress
        Maps the setting, and the wall times at which the prediction lets jobs finish [s], to observers of
        every event; called with a line of text about each stage; as for `Measurements`.
    decision_limit_s
        As for `run_live`.

    Raises
    ------
    InputError, WorkerError
        The interrupted run is a different one, or a name is unknown; the processes of a job died
        several times without progress.
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
