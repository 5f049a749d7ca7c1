"""Times of a micro-batch on each type of GPU, from the cells that the paper prints.

The logs behind the authors' simulator are not public. A micro-batch of b samples takes alpha + beta b on a
V100, on the line through the two batch sizes that are printed: the step under D1 of Fig. 12, and the
micro-batch with context switches of Fig. 11. Where both are of one size, a tenth of the time does not depend
on it.
Other types take longer by the ratio of their steps under D1.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.easyscale.planner import PLAN, JobKind, PlannedCatalogue
from makespan.errors import InputError, TraceError, unknown_name
from makespan.files import read_preset
from makespan.hardware import ClusterSpec, NodeSpec, cluster
from makespan.metrics import allocation_over_time, time_average
from makespan.papers.easyscale.tables import FIG14, FIG14_JOBS, FIG15, SENSITIVITY, SERVING, SERVING_ROUNDS
from makespan.sim import NodeEvent, NodeEventKind, RestartDelays
from makespan.studies import Case, Run, Scenario, run_all
from makespan.throughput import Dataset, find_dataset, verify
from makespan.traces import EASYSCALE_JOBS, apportion, read_easyscale_jobs
from makespan.units import HOUR
from makespan.workloads import JobSpec

_LOG = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------
# Times of a micro-batch on each type of GPU, from the cells that the paper prints.
#
# The logs behind the authors' simulator are not public. A micro-batch of b samples takes alpha + beta b on
# a V100, on the line through the two batch sizes that are printed: the step under D1 of Fig. 12, and the
# micro-batch with context switches of Fig. 11. Where both are of one size, a tenth of the time does not
# depend on it. Other types take longer by the ratio of their steps under D1.

_REFERENCE = "v100"
_SIZE, _D1, _D2 = _CELLS = ("micro_batch_size", "published_d1_s", "published_d1d2_s")
_FIXED_SHARE = 0.1  # of a step that does not depend on the batch, where only one size is printed


@dataclass(frozen=True, slots=True)
class Profile:
    """What a micro-batch takes.

    Parameters
    ----------
    alpha_s, beta_s_per_sample
        By model, on the reference type [s], [s/sample].
    slowdown, d2_penalty
        By model and type: time over that on the reference type, and under D1+D2 over that under D1 [1].
    """

    alpha_s: Mapping[str, float]
    beta_s_per_sample: Mapping[str, float]
    slowdown: Mapping[str, Mapping[str, float]]
    d2_penalty: Mapping[str, Mapping[str, float]]

    def micro_batch_s(self, model: str, gpu: str, n_samples: int, *, under_d2: bool = False) -> float:
        """Return the time of a micro-batch [s].

        Parameters
        ----------
        model, gpu
            Names as in the authors' job list; raises `UnknownNameError` for others.
        n_samples
            Samples of the micro-batch, at least 1 or an `InputError`.
        under_d2
            Whether kernels are those that every type of GPU can run.
        """
        if model not in self.alpha_s:
            raise unknown_name("model of the profile", model, self.alpha_s)
        if gpu not in self.slowdown[model]:
            raise unknown_name("type of GPU of the profile", gpu, self.slowdown[model])
        if n_samples < 1:
            raise InputError(f"micro-batch of {n_samples} samples; accepted: 1 or more")
        penalty = self.d2_penalty[model][gpu] if under_d2 else 1.0
        line_s = self.alpha_s[model] + self.beta_s_per_sample[model] * n_samples
        return self.slowdown[model][gpu] * line_s * penalty


def published_profile(fig11: pd.DataFrame, fig12: pd.DataFrame) -> Profile:
    """Return the profile that the printed cells give.

    Parameters
    ----------
    fig11, fig12
        Cells as from `read_published`.

    Raises
    ------
    TraceError
        A model is in one table only, or has no step on the reference type.
    """
    micro = {
        str(row["model"]): (float(row["micro_batch_size"]), float(row["published_enable_s"]))
        for row in fig11.to_dict("records")
    }
    steps: dict[str, dict[str, Mapping[str, float]]] = {}
    for row in fig12.to_dict("records"):
        cells = {name: float(row[name]) for name in _CELLS}
        steps.setdefault(str(row["model"]), {})[str(row["gpu"])] = cells
    wanting = set(micro) ^ set(steps) | {model for model, rows in steps.items() if _REFERENCE not in rows}
    if wanting:
        raise TraceError(
            f"cells of Figs 11 and 12: {', '.join(sorted(wanting))}; accepted: models with a time in both, "
            f"on {_REFERENCE} in Fig. 12"
        )
    lines = {model: _line(rows[_REFERENCE], *micro[model]) for model, rows in steps.items()}
    base = {model: rows[_REFERENCE][_D1] for model, rows in steps.items()}
    return Profile(
        {model: alpha for model, (alpha, _) in lines.items()},
        {model: beta for model, (_, beta) in lines.items()},
        {model: {gpu: row[_D1] / base[model] for gpu, row in rows.items()} for model, rows in steps.items()},
        {model: {gpu: row[_D2] / row[_D1] for gpu, row in rows.items()} for model, rows in steps.items()},
    )


def _line(step: Mapping[str, float], larger: float, larger_s: float) -> tuple[float, float]:
    """Return the time of an empty micro-batch [s] and that of a sample [s], by two batch sizes."""
    size, time_s = step[_SIZE], step[_D1]
    if larger == size:
        return _FIXED_SHARE * time_s, (1.0 - _FIXED_SHARE) * time_s / size
    slope = (larger_s - time_s) / (larger - size)
    return time_s - slope * size, slope


# ------------------------------------------------------------------------------------------------
# Job lists with the statistics of the authors' own, for any number of jobs and any seed.
#
# Counts are apportioned exactly and epochs are stratified over their quantiles, so a seed decides which job
# has which value and when it arrives, but not the statistics of the whole. Values are drawn independently
# of each other, but for the home type, which follows the number of logical workers.

_STATISTICS = read_preset("makespan.papers.easyscale", "jobs")
_QUANTILES = (0.0, 0.5, 1.0)
_MAX_JOBS = 10_000
N_JOBS = sum(entry["jobs"] for entry in _STATISTICS["models"].values())
"""Jobs of the authors' list."""


def generated_jobs(seed: int, n_jobs: int = N_JOBS) -> pd.DataFrame:
    """Generate a job list; schema `makespan.traces.EASYSCALE_JOBS`, in order of submission.

    However many jobs, they arrive at the rate of the authors' list.

    Parameters
    ----------
    seed
        Of all random choices, not negative.
    n_jobs
        From 2 to 10000 or an `InputError`.
    """
    if not (2 <= n_jobs <= _MAX_JOBS and seed >= 0):
        raise InputError(
            f"{n_jobs} jobs with seed {seed}; accepted: from 2 to {_MAX_JOBS} jobs, a seed of 0 or more"
        )
    rng = np.random.default_rng([seed, n_jobs])
    models = _STATISTICS["models"]
    counts = apportion(np.array([entry["jobs"] for entry in models.values()], dtype=float), n_jobs)
    parts = [_of_model(name, int(count), rng) for name, count in zip(models, counts, strict=True) if count]
    table = pd.concat(parts, ignore_index=True)
    for size, rows in table.groupby("max_parallelism"):
        table.loc[rows.index, "home_gpu"] = _shuffled(_STATISTICS["homes"][str(size)], len(rows), rng)
    table = table.iloc[rng.permutation(n_jobs)].assign(submit_time_s=_arrivals(n_jobs, rng))
    table["job_id"] = [f"{model}-{number}" for number, model in enumerate(table["workload"])]
    return EASYSCALE_JOBS.validate(table, where="generated jobs")


def _of_model(name: str, count: int, rng: np.random.Generator) -> pd.DataFrame:
    entry = _STATISTICS["models"][name]
    logs = np.log(np.asarray(entry["epochs"], dtype=float))
    shares = (rng.permutation(count) + rng.uniform(0.0, 1.0, count)) / count
    return pd.DataFrame(
        {
            "workload": name,
            "max_parallelism": [int(size) for size in _shuffled(entry["max_parallelism"], count, rng)],
            "micro_batch_size": [int(size) for size in _shuffled(entry["micro_batch_size"], count, rng)],
            "epochs": np.maximum(np.round(np.exp(np.interp(shares, _QUANTILES, logs))), 1.0),
            "is_heterogeneous": entry["is_heterogeneous"],
            "home_gpu": "",
        }
    )


def _shuffled(weights: Mapping[str, Any], count: int, rng: np.random.Generator) -> list[str]:
    """Return so many names, each as often as its weight says, in random order."""
    parts = apportion(np.array(list(weights.values()), dtype=float), count)
    return [str(name) for name in rng.permutation(np.repeat(np.array(list(weights)), parts))]


def _arrivals(n_jobs: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Spread jobs over the intervals of the list on whole seconds; the first and the last are as there."""
    scale, width = n_jobs / N_JOBS, _STATISTICS["bin_s"]
    first, last = _STATISTICS["first_s"], _STATISTICS["last_s"]
    counts = apportion(np.array(_STATISTICS["arrivals"], dtype=float), n_jobs)
    bounds = [(max(number * width, first), min((number + 1) * width, last)) for number in range(len(counts))]
    drawn = [rng.uniform(low, high, count) for (low, high), count in zip(bounds, counts, strict=True)]
    times = np.sort(np.concatenate(drawn))
    times[0], times[-1] = first, last
    return np.asarray(np.floor(times * scale), dtype=np.float64)


# ------------------------------------------------------------------------------------------------
# From a job list of EasyScale to what is simulated: cluster, jobs, and what they may run as.

_DATASET = "easyscale-workload"
Infeasible = Literal["clamp", "reject"]


@dataclass(frozen=True, slots=True)
class ClusterJobs:
    """What is simulated.

    Parameters
    ----------
    jobs, catalogue
        Jobs in order of submission, and what they may run as.
    clamped, rejected
        Names of the jobs whose gang is larger than the cluster has GPUs of its type: those that run on all
        of them instead, and those that are left out.
    """

    jobs: tuple[JobSpec, ...]
    catalogue: PlannedCatalogue
    clamped: tuple[str, ...]
    rejected: tuple[str, ...]


def published_jobs(
    directory: str | Path, register: Iterable[Dataset], dedup: Literal["rename", "artifact"]
) -> pd.DataFrame:
    """Read the authors' job list; schema `makespan.traces.EASYSCALE_JOBS`.

    Parameters
    ----------
    directory, register
        A directory with the published files, and their checksums.
    dedup
        What becomes of names that occur again, as for `makespan.traces.read_easyscale_jobs`.

    Raises
    ------
    MissingDataError, ChecksumError
        The file is not there or not the registered one.
    """
    table, report = read_easyscale_jobs(verify(find_dataset(register, _DATASET), directory), dedup)
    _LOG.info("%s", report.text)
    return table


def pooled(cluster: ClusterSpec) -> ClusterSpec:
    """Return a cluster with one node a type of device, because the layout of nodes plays no part here."""
    groups: dict[str, list[NodeSpec]] = {}
    for node in cluster.nodes:
        groups.setdefault(node.gpu_type, []).append(node)
    nodes = tuple(
        replace(
            group[0],
            name=f"{gpu_type} pool",
            n_gpus=sum(node.n_gpus for node in group),
            n_nics=sum(node.n_nics for node in group),
            cpu_threads=sum(node.cpu_threads for node in group),
            host_memory_bytes=sum(node.host_memory_bytes for node in group),
        )
        for gpu_type, group in groups.items()
    )
    return replace(cluster, name=f"{cluster.name}, one pool a type", nodes=nodes)


def cluster_jobs(
    table: pd.DataFrame,
    cluster: ClusterSpec,
    profile: Profile,
    samples_per_epoch: Mapping[str, float],
    *,
    infeasible: Infeasible = "clamp",
    d2_penalty: bool = False,
) -> ClusterJobs:
    """Return jobs and catalogue for a job list.

    Parameters
    ----------
    table, cluster
        A list of schema `makespan.traces.EASYSCALE_JOBS`, and the cluster, see `pooled`.
    profile, samples_per_epoch
        Times of micro-batches, and samples of an epoch by model, a real number.
    infeasible
        What becomes of a gang that is larger than the cluster has GPUs of its home type: it runs on all
        of them, its logical workers sharing GPUs (``clamp``), or it is left out (``reject``).
    d2_penalty
        Whether jobs on several types at once take longer, by the printed cost of D2.

    Raises
    ------
    InputError, TraceError, UnknownNameError
        The cluster lacks a type, no job is left, or a model is unknown.
    """
    checked = EASYSCALE_JOBS.validate(table, where="job list")
    available = dict.fromkeys(cluster.gpu_types, 0)
    for node in cluster.nodes:
        available[node.gpu_type] += node.n_gpus
    kinds: dict[str, JobKind] = {}
    jobs: list[JobSpec] = []
    too_large: list[str] = []
    for row in checked.to_dict("records"):
        kind = _kind(row, tuple(available), profile, samples_per_epoch, d2_penalty)
        if kind.n_logical_workers > available[kind.home]:
            too_large.append(str(row["job_id"]))
            if infeasible == "reject":
                continue
        kinds[kind.key] = kind
        name, submit_s = str(row["job_id"]), float(row["submit_time_s"])
        jobs.append(JobSpec(name, submit_s, kind.key, kind.n_logical_workers, 0, PLAN, kind.steps))
    if not jobs:
        raise TraceError("job list: no job; accepted: at least one whose GPUs the cluster has")
    if too_large:
        _LOG.warning("gangs larger than the cluster, %s: %s", infeasible, ", ".join(too_large))
    lists = (tuple(too_large), ()) if infeasible == "clamp" else ((), tuple(too_large))
    return ClusterJobs(tuple(jobs), PlannedCatalogue(kinds.values()), *lists)


def _kind(
    row: Mapping[Any, Any],
    types: tuple[str, ...],
    profile: Profile,
    samples_per_epoch: Mapping[str, float],
    d2_penalty: bool,
) -> JobKind:
    model, home = str(row["workload"]), _full_name(str(row["home_gpu"]), types)
    n_samples, n_workers = int(row["micro_batch_size"]), int(row["max_parallelism"])
    if model not in samples_per_epoch:
        raise unknown_name("model with a number of samples an epoch", model, samples_per_epoch)
    epochs, is_mixed = float(row["epochs"]), bool(row["is_heterogeneous"])
    allowed = types if is_mixed else (home,)

    def times(under_d2: bool) -> tuple[tuple[str, float], ...]:
        return tuple(
            (name, profile.micro_batch_s(model, _short_name(name), n_samples, under_d2=under_d2))
            for name in sorted(allowed)
        )

    return JobKind(
        key=f"{model} {n_workers}x{n_samples}, {epochs:g} epochs, {home}{' or any' if is_mixed else ''}",
        n_logical_workers=n_workers,
        home=home,
        micro_batch_s=times(under_d2=False),
        mini_batches=samples_per_epoch[model] * epochs / (n_samples * n_workers),
        mixed_micro_batch_s=times(under_d2=True) if d2_penalty and is_mixed else (),
    )


def _short_name(gpu_type: str) -> str:
    """Return a type of GPU as the paper writes it, without its memory."""
    return gpu_type.partition("-")[0]


def _full_name(short: str, types: tuple[str, ...]) -> str:
    found = [name for name in types if _short_name(name) == short]
    if len(found) != 1:
        raise InputError(
            f"type of GPU {short!r} of a job list; accepted: {', '.join(_short_name(name) for name in types)}"
        )
    return found[0]


# ------------------------------------------------------------------------------------------------
# Training beside online serving: elastic jobs use GPUs that serving leaves idle, and give them back in
# time.
#
# What serving needs follows the hours of the day. In each round it says how many GPUs of each type it will
# have in the next one: the most that it needed in the last few rounds, and some headroom. More of them are
# withdrawn from training with one round of notice; fewer come back at once.

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


# ------------------------------------------------------------------------------------------------
# The cluster experiments: completion times and makespan (Fig. 14), GPUs over time (Fig. 15), sensitivity.

CONCURRENT, SERIAL = "fifo", "fifo-serial"
"""Gang scheduling as clusters do it, to which gains refer, and what the paper's bar is of."""
Charge = Literal["every", "first_only"]


@dataclass(frozen=True, slots=True)
class _Setting:
    """One setting of the simulations: what differs from the default, and times [s]."""

    parameter: str
    value: str
    interval_s: float
    restart_delay_s: float
    charge: Charge


def cluster_experiments(
    table: pd.DataFrame,
    cells: Mapping[str, pd.DataFrame],
    *,
    cluster_name: str,
    gang_policies: Sequence[str],
    elastic_policies: Sequence[str],
    interval_s: float,
    restart_delay_s: float,
    charge: Charge,
    intervals_s: Sequence[float],
    restart_delays_s: Sequence[float],
    jobs: Mapping[str, Any],
    n_processes: int = 1,
) -> dict[str, pd.DataFrame]:
    """Simulate a job list under all policies; return the tables ``fig14, fig14_jobs, fig15, sensitivity``.

    Parameters
    ----------
    table, cells
        Job list of schema `makespan.traces.EASYSCALE_JOBS`; printed cells of figs 11, 12, 14 and 15 by name.
    cluster_name
        Cluster of the catalogue whose devices are simulated as one pool a type.
    gang_policies, elastic_policies
        Policies that know jobs by their gangs alone, and those that may run them on other GPUs.
    interval_s, restart_delay_s, charge
        Length of a round, time without progress after a start or change [s], and which of these it follows.
    intervals_s, restart_delays_s, jobs
        What the sensitivity table varies, one at a time [s]; further options of `cluster_jobs`.

    Raises
    ------
    ImpossibleScheduleError
        A schedule breaks a rule of the validator.
    """
    where = pooled(cluster(cluster_name))
    found = cluster_jobs(table, where, published_profile(cells["fig11"], cells["fig12"]), **jobs)
    base = _Setting("default", "", interval_s, restart_delay_s, charge)
    settings = [base, *_varied(base, intervals_s, restart_delays_s)]
    cases = [
        (setting, Case(_scenario(found, where, setting, is_gang=is_gang), name, keeps_tables=setting is base))
        for setting in settings
        for is_gang, names in ((True, gang_policies), (False, elastic_policies))
        for name in names
    ]
    runs = run_all([case for _, case in cases], n_processes)
    first_s = min(job.submit_time_s for job in found.jobs)
    rows = [
        {"parameter": setting.parameter, "value": setting.value, "policy": run.policy}
        | _measures(run, first_s)
        for (setting, _), run in zip(cases, runs, strict=True)
    ]
    own = [run for (setting, _), run in zip(cases, runs, strict=True) if setting is base]
    return {
        "fig14": _fig14(own, first_s, interval_s, cells["fig14"]),
        "fig14_jobs": _fig14_jobs(own, set(found.clamped)),
        "fig15": _fig15(own, where, interval_s, cells["fig15"]),
        "sensitivity": SENSITIVITY.validate(pd.DataFrame(rows), where="sensitivity"),
    }


def _varied(
    base: _Setting, intervals_s: Sequence[float], restart_delays_s: Sequence[float]
) -> list[_Setting]:
    other: Charge = "first_only" if base.charge == "every" else "every"
    rounds = [replace(base, parameter="interval_s", value=f"{s:g}", interval_s=s) for s in intervals_s]
    delays = [
        replace(base, parameter="restart_delay_s", value=f"{s:g}", restart_delay_s=s)
        for s in restart_delays_s
    ]
    return [*rounds, *delays, replace(base, parameter="charge", value=other, charge=other)]


def _scenario(found: ClusterJobs, where: ClusterSpec, setting: _Setting, *, is_gang: bool) -> Scenario:
    delays = RestartDelays.constant if setting.charge == "every" else RestartDelays.first_start_only
    name = f"{setting.parameter} {setting.value}".strip()
    catalogue = found.catalogue.gangs() if is_gang else found.catalogue
    cost = delays(setting.restart_delay_s)
    return Scenario(name, found.jobs, where, catalogue, cost, setting.interval_s)


def _measures(run: Run, first_s: float) -> dict[str, float]:
    """Return the metrics of a run, of whose jobs the first is submitted at ``first_s`` [s]."""
    found = run.metrics
    names = ("avg_jct_s", "p50_jct_s", "p95_jct_s", "makespan_s", "reconfigurations_per_job")
    return {name: getattr(found, name) for name in names} | {
        "makespan_from_zero_s": first_s + found.makespan_s
    }


def _fig14(runs: Sequence[Run], first_s: float, interval_s: float, cells: pd.DataFrame) -> pd.DataFrame:
    table = pd.DataFrame(
        {"policy": run.policy, "jobs": run.metrics.n_jobs} | _measures(run, first_s) for run in runs
    )
    ends_s = table["makespan_from_zero_s"]
    table["makespan_round_s"] = [math.ceil(end_s / interval_s) * interval_s for end_s in ends_s]
    base = table.set_index("policy")
    table["jct_gain"] = base["avg_jct_s"].get(CONCURRENT, math.nan) / table["avg_jct_s"]
    table["makespan_gain"] = base["makespan_from_zero_s"].get(CONCURRENT, math.nan) / ends_s
    table["jct_gain_to_serial"] = base["avg_jct_s"].get(SERIAL, math.nan) / table["avg_jct_s"]
    printed = cells.drop(columns="source")
    return FIG14.validate(table.merge(printed, on="policy", how="left"), where="fig14")


def _fig14_jobs(runs: Sequence[Run], clamped: set[str]) -> pd.DataFrame:
    parts = []
    for run in runs:
        jobs = run.result.outcomes
        jct_s = jobs["finish_time_s"] - jobs["submit_time_s"]
        is_clamped = jobs["job_id"].isin(clamped)
        parts.append(jobs.assign(policy=run.policy, jct_s=jct_s, is_clamped=is_clamped)[FIG14_JOBS.names])
    return FIG14_JOBS.validate(pd.concat(parts, ignore_index=True), where="fig14_jobs")


def _fig15(runs: Sequence[Run], where: ClusterSpec, interval_s: float, cells: pd.DataFrame) -> pd.DataFrame:
    last_s = cells.groupby("policy")["time_s"].max()
    held = pd.concat(
        _held(run, where, interval_s, float(last_s.get(run.policy, 0.0))).assign(policy=run.policy)
        for run in runs
    )
    printed = cells.drop(columns="source")
    return FIG15.validate(held.merge(printed, on=["policy", "time_s"], how="left"), where="fig15")


def _held(run: Run, where: ClusterSpec, interval_s: float, last_s: float) -> pd.DataFrame:
    """Return the GPUs of each type held after each round, to the last completion and ``last_s`` [s]."""
    types = [node.gpu_type.partition("-")[0] for node in where.nodes]
    changes = []
    before: dict[str, dict[str, int]] = {}
    events = run.result.events
    for time_s, job_id, nodes in zip(events["time_s"], events["job_id"], events["nodes"], strict=True):
        shares = (share.split(":") for share in nodes.split())
        now = {types[int(node)]: int(count) for node, count in shares}
        old = before.get(job_id, {})
        before[job_id] = now
        changes.append({name: now.get(name, 0) - old.get(name, 0) for name in types} | {"time_s": time_s})
    totals = pd.DataFrame(changes).groupby("time_s").sum().cumsum()
    n_rounds = math.ceil(max(float(totals.index.max()), last_s) / interval_s)
    rounds = pd.Index([interval_s * number for number in range(n_rounds + 1)], name="time_s")
    held = totals.reindex(rounds, method="ffill").fillna(0).astype("int64")
    return held.assign(gpus=held.sum(axis=1)).reset_index()
