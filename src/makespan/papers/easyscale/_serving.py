"""Training beside online serving: elastic jobs use GPUs that serving leaves idle, and give them back in time.

What serving needs follows the hours of the day. In each round it says how many GPUs of each type it will have
in the next one: the most that it needed in the last few rounds, and some headroom. More of them are withdrawn
from training with one round of notice; fewer come back at once.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.hardware import ClusterSpec, cluster
from makespan.metrics import allocation_over_time, time_average
from makespan.papers.easyscale._jobs import cluster_jobs, pooled
from makespan.papers.easyscale._profile import published_profile
from makespan.papers.easyscale._tables import SERVING, SERVING_ROUNDS
from makespan.sim import NodeEvent, NodeEventKind, RestartDelays
from makespan.studies import Case, Run, Scenario, run_all
from makespan.units import HOUR

__all__ = ["serving_experiment"]

Counts = npt.NDArray[np.int64]
_DAY_S = 24 * HOUR
_SHOWN_EVERY_S = 600.0


@dataclass(frozen=True, slots=True)
class _Demand:
    """What serving needs and has in each round, by pool of GPUs: ``(n_rounds, n_nodes)``."""

    needed: Counts
    held: Counts
    interval_s: float

    @property
    def n_delayed(self) -> int:
        """Rounds in which some pool lacks GPUs."""
        return int((self.needed > self.held).any(axis=1).sum())

    def events(self) -> Iterator[NodeEvent]:
        """Yield the changes of what training may use."""
        before = np.zeros_like(self.held[0])
        for number, now in enumerate(self.held):
            time_s = number * self.interval_s
            for node, change in enumerate((now - before).tolist()):
                if change > 0 and number == 0:
                    yield NodeEvent(time_s, node, NodeEventKind.WITHDRAWN, change)
                elif change > 0:
                    notice_s = self.interval_s
                    yield NodeEvent(time_s - notice_s, node, NodeEventKind.WITHDRAWN, change, notice_s)
                elif change < 0:
                    yield NodeEvent(time_s, node, NodeEventKind.RETURNED, -change)
            before = now


def serving_experiment(
    table: pd.DataFrame,
    cells: Mapping[str, pd.DataFrame],
    *,
    cluster_name: str,
    policies: Sequence[str],
    interval_s: float,
    restart_delay_s: float,
    copies: int,
    hours: float,
    demand: Mapping[str, Any],
    jobs: Mapping[str, Any],
    n_processes: int = 1,
) -> dict[str, pd.DataFrame]:
    """Simulate a job list, again and again, beside serving; return the tables ``serving, serving_rounds``.

    Parameters
    ----------
    table, cells, cluster_name, interval_s, restart_delay_s, jobs
        As for `cluster_experiments`.
    policies
        Elastic policies.
    copies, hours
        How often the list is submitted, and the time over which that is spread and measured [h].
    demand
        Options of what serving needs: ``mean_share`` and ``amplitude`` of the GPUs over a day, ``noise_std``,
        ``headroom_share``, ``hold_rounds``, for how many rounds it keeps what it has, and ``seed``.

    Raises
    ------
    ImpossibleScheduleError
        A schedule breaks a rule of the validator.
    """
    where, horizon_s = pooled(cluster(cluster_name)), hours * HOUR
    wanted = _demand(where, horizon_s, interval_s, **demand)
    repeated = _repeated(table, copies, horizon_s / copies)
    found = cluster_jobs(repeated, where, published_profile(cells["fig11"], cells["fig12"]), **jobs)
    scenario = Scenario(
        *("serving", found.jobs, where, found.catalogue, RestartDelays.constant(restart_delay_s), interval_s),
        failures=tuple(wanted.events()),
    )
    runs = run_all([Case(scenario, name, keeps_tables=True) for name in policies], n_processes)
    rows = pd.DataFrame([_row(run, where, wanted, horizon_s) for run in runs])
    rows = rows.merge(cells["serving"].drop(columns="source"), on="policy", how="left")
    rounds = pd.concat([_rounds(run, where, wanted) for run in runs], ignore_index=True)
    return {
        "serving": SERVING.validate(rows, where="serving"),
        "serving_rounds": SERVING_ROUNDS.validate(rounds, where="serving_rounds"),
    }


def _demand(
    where: ClusterSpec,
    horizon_s: float,
    interval_s: float,
    *,
    mean_share: float,
    amplitude: float,
    noise_std: float,
    headroom_share: float,
    hold_rounds: int,
    seed: int,
) -> _Demand:
    times = np.arange(math.ceil(horizon_s / interval_s)) * interval_s
    noise = np.random.default_rng(seed).normal(0.0, noise_std, len(times))
    share = np.clip(mean_share + amplitude * np.sin(2 * np.pi * times / _DAY_S) + noise, 0.0, 1.0)
    sizes = np.array([node.n_gpus for node in where.nodes], dtype=np.int64)
    needed = np.ceil(np.outer(share, sizes)).astype(np.int64)
    headroom = np.ceil(headroom_share * sizes).astype(np.int64)
    known = np.vstack([needed[:1], needed[:-1]])  # in the round before
    recent = np.stack(
        [known[max(0, end - hold_rounds) : end].max(axis=0) for end in range(1, len(known) + 1)]
    )
    return _Demand(needed, np.minimum(recent + headroom, sizes), interval_s)


def _repeated(table: pd.DataFrame, copies: int, period_s: float) -> pd.DataFrame:
    parts = [
        table.assign(
            job_id=table["job_id"] + f"/{number}", submit_time_s=table["submit_time_s"] + number * period_s
        )
        for number in range(copies)
    ]
    return pd.concat(parts).sort_values("submit_time_s", kind="stable", ignore_index=True)


def _row(run: Run, where: ClusterSpec, wanted: _Demand, horizon_s: float) -> dict[str, Any]:
    events = run.result.events
    held = allocation_over_time(events, where)
    training = time_average(held["time_s"], held["gpus_held"], 0.0, horizon_s) / where.n_gpus
    serving = float(wanted.needed.sum(axis=1).mean()) / where.n_gpus
    of_jobs = events[events["job_id"] != ""]
    before = of_jobs.groupby("job_id")["n_gpus"].shift(fill_value=0)
    kinds, within = of_jobs["kind"], of_jobs["time_s"] <= horizon_s
    return {
        "policy": run.policy,
        "jobs": run.metrics.n_jobs,
        "serving_ratio": serving,
        "shared_ratio": serving + training,
        "gain_pct": 100.0 * training / serving,
        "delayed_rounds": wanted.n_delayed,
        "shrinks": int(((kinds == "reconfigured") & (of_jobs["n_gpus"] < before) & within).sum()),
        "suspensions": int(((kinds == "suspended") & within).sum()),
        "interruptions": int((kinds == "interrupted").sum()),
        "avg_jct_s": run.metrics.avg_jct_s,
    }


def _rounds(run: Run, where: ClusterSpec, wanted: _Demand) -> pd.DataFrame:
    """Return what serving needs and has and what training holds, now and then."""
    held = allocation_over_time(run.result.events, where).set_index("time_s")["gpus_held"]
    every = max(round(_SHOWN_EVERY_S / wanted.interval_s), 1)
    times = pd.Index(np.arange(0, len(wanted.needed), every) * wanted.interval_s)
    return pd.DataFrame(
        {
            "policy": run.policy,
            "time_s": times,
            "serving_gpus": wanted.needed.sum(axis=1)[::every],
            "reserved_gpus": wanted.held.sum(axis=1)[::every],
            "training_gpus": held.reindex(times, method="ffill").fillna(0).to_numpy(),
        }
    )
