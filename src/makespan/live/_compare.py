"""What a live run is judged by: its prediction, written before the first job, and a simulation afterwards."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from makespan.files import read_json, read_text, write_text
from makespan.hardware import ClusterSpec
from makespan.live._engine import LiveEngine
from makespan.live._workload import LiveSetting, live_settings
from makespan.metrics import summary
from makespan.sim import (
    DECISION_LIMIT_S,
    Policy,
    SimulationResult,
    Violation,
    events_table,
    outcomes_table,
    simulate,
    validate_schedule,
)
from makespan.tables import LIVE, LIVE_JOBS

__all__ = ["LiveResult", "Prediction", "compare_live", "predict_live"]

_RULES = ("order", "row", "life", "capacity")
"""What must hold of a schedule that happened; the other rules are about times as simulated."""

_EXPECTED = "a prediction of a live run"

_JCT, _MAKESPAN = "avg_jct_s", "makespan_s"
_BOUNDS, _PERCENTILES = (f"low_{_JCT}", f"high_{_JCT}"), (5, 95)
_UNDISTURBED = "undisturbed_"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was expected of a live run, as a file that was written before its first job started.

    ``text`` is the file, in which all times are on the wall. Average JCT and makespan are medians over
    simulations with disturbed step times; the jobs are those of the one with step times as profiled.
    """

    text: str

    @classmethod
    def load(cls, path: Path) -> "Prediction | None":
        """Read the prediction of a run that was left; None if there is none."""
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
        """What nine of ten simulations with disturbed step times lie between [s]; NaN in files without it."""
        low_s, high_s = (float(self.values.get(name, "nan")) for name in _BOUNDS)
        return low_s, high_s

    @property
    def jobs(self) -> pd.DataFrame:
        """A row a job: when it starts and ends, and how often it restarts."""
        return pd.DataFrame(self.values["jobs"])


def predict_live(
    setting: LiveSetting,
    policy: Policy,
    cluster: ClusterSpec,
    path: Path,
    decision_limit_s: float | None = DECISION_LIMIT_S,
) -> Prediction:
    """Simulate the jobs of a setting, and write what is expected of the live run into a file.

    A schedule can hang on an instant, and one simulation cannot say which side of it will come. So average
    JCT and makespan are the medians of many whose step times are somewhat off, and beside them stands
    between which values nine of ten lie.

    Parameters
    ----------
    setting, policy, cluster
        As for `run_live`; the setting has nothing but what was measured before.
    path
        The file. One that is there stays as it is: a run that goes on is judged by what was written first.
    decision_limit_s
        As for `run_live`.
    """
    left = Prediction.load(path)
    if left is not None:
        return left
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
        "step_times_s": {key: _step_times_s(table) for key, table in setting.tables.items()},
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
    """A live run beside its prediction; all times on the wall.

    One row of schema `LIVE`, a table of schema `LIVE_JOBS`, the prediction, what happened, and what a
    simulation with the profiles before and after the run says, in the schemas of the simulator; and what of
    the run should not be possible, nothing if all is well.
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
    """Compare what ran live with its prediction, and with what would be predicted by what was ``profiled``.

    That is the mean of profiles before and after the run, by default the one before it.
    """
    profiled = profiled or setting
    catalogue, jobs = setting.catalogue().on(cluster), setting.scaled_jobs()
    finished = sorted(engine.finished, key=lambda entry: entry[0].index)
    events, outcomes = events_table(engine.rows), outcomes_table(finished, catalogue)
    delays = setting.scaled_delays()
    found = validate_schedule(events, jobs, cluster, catalogue, delays, extra_steps=0, is_live=True)
    again = _simulated(setting, profiled, policy, cluster)
    tables = [_on_wall(table, setting.scale) for table in (events, outcomes, again.events, again.outcomes)]
    live = summary(tables[0], tables[1], cluster, restart_delay_s=setting.restart_delay_s, extra_steps=0)
    overheads_s = [value / setting.scale for value in engine.overheads_s]
    expected = _medians(tables[3], _disturbed(setting, profiled, policy, cluster))
    row = {
        "live_restart_delay_s": sum(overheads_s) / len(overheads_s) if overheads_s else float("nan"),
        "live_gpu_allocation_ratio": live.gpu_allocation_ratio,
        "began_at": engine.began_at,
    }
    return LiveResult(
        comparison=_comparison(setting, profiled, row, tables[1], prediction, expected),
        jobs=_job_table(setting.policy, tables[1], prediction.jobs, tables[3], engine.final_losses),
        prediction=prediction,
        live_events=tables[0],
        live_outcomes=tables[1],
        retrodicted_events=tables[2],
        retrodicted_outcomes=tables[3],
        violations=tuple(violation for violation in found if violation.rule in _RULES),
    )


def _simulated(
    setting: LiveSetting,
    profiled: LiveSetting,
    policy: Policy,
    cluster: ClusterSpec,
    decision_limit_s: float | None = DECISION_LIMIT_S,
) -> SimulationResult:
    """Simulate the jobs of a setting with what was profiled, in the time of the policy, without guests."""
    return simulate(
        setting.scaled_jobs(),
        cluster,
        profiled.catalogue().on(cluster),
        policy,
        restart_delay_s=profiled.scaled_delays(),
        extra_steps=0,
        decision_limit_s=decision_limit_s,
        shares_devices=False,
    )


def _foreseen(
    setting: LiveSetting,
    profiled: LiveSetting,
    policy: Policy,
    cluster: ClusterSpec,
    decision_limit_s: float | None,
) -> pd.DataFrame:
    """Simulate as `_simulated`; the outcomes of the jobs, on the wall."""
    return _on_wall(_simulated(setting, profiled, policy, cluster, decision_limit_s).outcomes, setting.scale)


def _disturbed(
    setting: LiveSetting,
    profiled: LiveSetting,
    policy: Policy,
    cluster: ClusterSpec,
    decision_limit_s: float | None = DECISION_LIMIT_S,
) -> pd.DataFrame:
    """Average JCT and makespan of simulations with disturbed step times, in pairs of opposite ones [s]."""
    how = live_settings()
    draws = [
        profiled.disturbed(np.random.default_rng([setting.seed, 1, pair]), sign * how.noise_log_sd)
        for pair in range(how.noise_simulations // 2)
        for sign in (1, -1)
    ]
    return pd.DataFrame(
        [_totals(_foreseen(setting, one, policy, cluster, decision_limit_s)) for one in draws]
    )


def _medians(outcomes: pd.DataFrame, disturbed: pd.DataFrame) -> dict[str, float]:
    """Medians of average JCT and makespan over the simulations, that with step times as profiled included."""
    return {name: _percentiles([value, *disturbed[name]], 50)[0] for name, value in _totals(outcomes).items()}


def _percentiles(values: Sequence[float] | pd.Series, *which: float) -> list[float]:
    return [float(one) for one in np.percentile(values, which)]


def _on_wall(table: pd.DataFrame, scale: float) -> pd.DataFrame:
    times = [str(name) for name in table.columns if str(name).endswith("_s")]
    return table.assign(**{name: table[name] / scale for name in times})


def _step_times_s(table: pd.DataFrame) -> dict[str, float]:
    """Return what a step takes by plan and slots [s]."""
    points = table["exec_plan"] + " on " + table["placement"]
    return dict(zip(points, table["iter_time_s"], strict=True))


def _totals(outcomes: pd.DataFrame) -> dict[str, float]:
    """Mean completion time and makespan of finished jobs [s]."""
    ends, begins = outcomes["finish_time_s"], outcomes["submit_time_s"]
    return {_JCT: float((ends - begins).mean()), _MAKESPAN: float(ends.max() - begins.min())}


def _drift_pct(before: LiveSetting, mean: LiveSetting) -> float:
    """Mean relative change of the step times from the first profile to the second [%]."""
    name, tables = "iter_time_s", before.tables.items()
    changes = [2 * (mean.tables[key][name] / table[name] - 1) for key, table in tables]
    return 100 * float(pd.concat(changes).mean())


def _comparison(
    setting: LiveSetting,
    profiled: LiveSetting,
    row: Mapping[str, Any],
    outcomes: pd.DataFrame,
    prediction: Prediction,
    again: Mapping[str, float],
) -> pd.DataFrame:
    """Put a run beside prediction and retrodiction: one row of schema `LIVE`."""
    live, predicted = _totals(outcomes), prediction.values
    n_jobs, n_restarts = len(outcomes), int(outcomes["n_restarts"].sum())
    undisturbed_s = predicted.get(_UNDISTURBED + _JCT, predicted[_JCT])
    values: dict[str, Any] = {}
    for what, total in (("jct", _JCT), ("makespan", _MAKESPAN)):
        values |= {
            f"live_{total}": live[total],
            f"predicted_{total}": predicted[total],
            f"{what}_difference_pct": 100 * (predicted[total] / live[total] - 1),
            f"retrodiction_{total}": again[total],
            f"retrodiction_{what}_difference_pct": 100 * (again[total] / live[total] - 1),
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
        "profile_drift_pct": _drift_pct(setting, profiled),
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
    """Put the jobs of a run beside prediction and retrodiction: a table of schema `LIVE_JOBS`."""
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
