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
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import Field

from makespan.easyscale.planner import PLAN, JobKind, PlannedCatalogue
from makespan.errors import InputError, TraceError, unknown_name
from makespan.files import read_preset
from makespan.hardware import ClusterSpec, NodeSpec, cluster, cluster_names
from makespan.metrics import allocation_over_time, time_average
from makespan.papers.experiment import Experiment, Explore, Figure, Given
from makespan.policies import policy_names
from makespan.settings import Block, one_of, option, shared
from makespan.sim import NodeEvent, NodeEventKind, RestartDelays
from makespan.studies import Run, Scenario, SimulationSpec, run_all
from makespan.tables import schemas_of
from makespan.throughput import Dataset, find_dataset, read_register, verify
from makespan.traces import apportion, read_easyscale_jobs
from makespan.units import HOUR
from makespan.workloads import JobSpec

_LOG = logging.getLogger(__name__)
_PolicyName = Annotated[str, one_of(policy_names)]
_of_all = partial(option, changes="fig14, fig15, sensitivity")
_ours = partial(_of_all, source="a choice")


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
    """Time and memory of a micro-batch.

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
            raise InputError(f"micro-batch of {n_samples} samples; expected 1 or more")
        penalty = self.d2_penalty[model][gpu] if under_d2 else 1.0
        line_s = self.alpha_s[model] + self.beta_s_per_sample[model] * n_samples
        return self.slowdown[model][gpu] * line_s * penalty


def published_profile(fig11: pd.DataFrame, fig12: pd.DataFrame) -> Profile:
    """Return the profile that the printed cells give.

    Parameters
    ----------
    fig11, fig12
        Printed cells of these figures.

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
            f"cells of Figs 11 and 12: {', '.join(sorted(wanting))}; expected models with a time in both, "
            f"on {_REFERENCE} in Fig. 12"
        )
    # Time of an empty micro-batch [s] and that of a sample [s], by two batch sizes.
    lines: dict[str, tuple[float, float]] = {}
    for model, rows in steps.items():
        size, time_s = rows[_REFERENCE][_SIZE], rows[_REFERENCE][_D1]
        larger, larger_s = micro[model]
        if larger == size:
            lines[model] = _FIXED_SHARE * time_s, (1.0 - _FIXED_SHARE) * time_s / size
        else:
            slope = (larger_s - time_s) / (larger - size)
            lines[model] = time_s - slope * size, slope
    base = {model: rows[_REFERENCE][_D1] for model, rows in steps.items()}
    return Profile(
        {model: alpha for model, (alpha, _) in lines.items()},
        {model: beta for model, (_, beta) in lines.items()},
        {model: {gpu: row[_D1] / base[model] for gpu, row in rows.items()} for model, rows in steps.items()},
        {model: {gpu: row[_D2] / row[_D1] for gpu, row in rows.items()} for model, rows in steps.items()},
    )


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
    """Generate a job list in order of submission, with the columns of `makespan.traces.EASYSCALE_JOBS`.

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
            f"{n_jobs} jobs with seed {seed}; expected from 2 to {_MAX_JOBS} jobs, a seed of 0 or more"
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
    return table.reset_index(drop=True)


def _of_model(name: str, count: int, rng: np.random.Generator) -> pd.DataFrame:
    """Draw the jobs of a model, without their home types; epochs are stratified over their quantiles."""
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
    """Spread jobs over the intervals of the authors' list on whole seconds; the first and last stay."""
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
    """Jobs and cluster of a simulation.

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


class JobList(Experiment):
    """Generate the job list, or read that of the authors where their files are given."""

    name = "jobs"
    tables = {"jobs": "the job list of the cluster experiments"}
    on_the_way = frozenset({"jobs"})
    reads_files = True
    is_local = True
    minutes = 5

    jobs: int = _of_all("jobs", 68, source="EasyScale artifact: 68", ge=2)
    seed: int = _ours("seed of all that is drawn", 1, ge=0)
    dedup: Literal["rename", "artifact"] = shared("easyscale.simulation.dedup")

    def policies_run(self) -> Sequence[str]:
        """Return nothing, because nothing is scheduled."""
        return ()

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per job."""
        if given.published is None:
            return {"jobs": generated_jobs(self.seed, self.jobs)}
        directory, register = given.published
        return {"jobs": published_jobs(directory, read_register(register), self.dedup)}


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
        A job list of schema `makespan.traces.EASYSCALE_JOBS`, and the cluster, see `pooled`.
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
    available = dict.fromkeys(cluster.gpu_types, 0)
    for node in cluster.nodes:
        available[node.gpu_type] += node.n_gpus
    kinds: dict[str, JobKind] = {}
    jobs: list[JobSpec] = []
    too_large: list[str] = []
    for row in table.to_dict("records"):
        kind = _kind(row, tuple(available), profile, samples_per_epoch, d2_penalty)
        if kind.n_logical_workers > available[kind.home]:
            too_large.append(str(row["job_id"]))
            if infeasible == "reject":
                continue
        kinds[kind.key] = kind
        name, submit_s = str(row["job_id"]), float(row["submit_time_s"])
        jobs.append(JobSpec(name, submit_s, kind.key, kind.n_logical_workers, 0, PLAN, kind.steps))
    if not jobs:
        raise TraceError("job list: no job; expected at least one whose GPUs the cluster has")
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
    """Return what a row of a job list trains, on which types of GPU, and how long that takes."""
    model, short_home = str(row["workload"]), str(row["home_gpu"])
    homes = [name for name in types if _short_name(name) == short_home]
    if len(homes) != 1:
        raise InputError(
            f"type of GPU {short_home!r} of a job list; expected {', '.join(map(_short_name, types))}"
        )
    (home,) = homes
    n_samples, n_workers = int(row["micro_batch_size"]), int(row["max_parallelism"])
    if model not in samples_per_epoch:
        raise unknown_name("model with a number of samples per epoch", model, samples_per_epoch)
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
    """GPUs that serving needs and has in each round, by pool: ``(n_rounds, n_nodes)``."""

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


_beside = partial(option, source="a choice", changes="serving")


class Demand(Block):
    """Demand of serving for GPUs."""

    mean_share: float = _beside("share of the GPUs on average over a day", 0.35, ge=0, le=1)
    amplitude: float = _beside("how far that rises and falls in a day", 0.25, ge=0, le=1)
    noise_std: float = _beside("standard deviation of the share in a round", 0.02, ge=0, le=1)
    headroom_share: float = _beside(
        "share of the GPUs of each type that serving has beyond its need", 0.1, ge=0, le=1
    )
    hold_rounds: int = _beside("rounds for which serving keeps GPUs that it needed", 10, unit="rounds", ge=1)
    seed: int = _beside("seed of the noise", 1, ge=0)

    def over(self, where: ClusterSpec, horizon_s: float, interval_s: float) -> _Demand:
        """Return what serving needs and has in each round, by pool."""
        times = np.arange(math.ceil(horizon_s / interval_s)) * interval_s
        noise = np.random.default_rng(self.seed).normal(0.0, self.noise_std, len(times))
        wave = self.amplitude * np.sin(2 * np.pi * times / _DAY_S)
        share = np.clip(self.mean_share + wave + noise, 0.0, 1.0)
        sizes = np.array([node.n_gpus for node in where.nodes], dtype=np.int64)
        needed = np.ceil(np.outer(share, sizes)).astype(np.int64)
        headroom = np.ceil(self.headroom_share * sizes).astype(np.int64)
        known = np.vstack([needed[:1], needed[:-1]])  # in the round before
        recent = np.stack(
            [known[max(0, end - self.hold_rounds) : end].max(axis=0) for end in range(1, len(known) + 1)]
        )
        return _Demand(needed, np.minimum(recent + headroom, sizes), interval_s)


class Serving(Experiment):
    """Simulate a job list, again and again, beside online serving.

    Raises `makespan.studies.ImpossibleScheduleError` if a schedule breaks a rule of the validator.
    """

    name = "serving"
    tables = {
        "serving": "GPUs in use by serving alone and with training beside it, and what training gave back",
        "serving_rounds": "GPUs of serving and of training, every tenth minute",
    }
    cells = ("fig11", "fig12", "serving")
    reads = ("jobs",)
    unjudged = frozenset({"serving_rounds"})
    figures = (
        Figure(
            "serving",
            "Training beside serving",
            "GPUs over time that serving needs, and on top of them those that "
            "elastic jobs hold, from one simulation per policy. The demand of "
            "serving is generated. Jobs are of source {source}; emulated jobs are "
            "a generated list, submitted several times. Where the upper edge is "
            "flat, training uses all GPUs that serving leaves.",
            tables=("serving_rounds",),
            explore=Explore(
                "areas",
                ("time_s",),
                ("serving_gpus", "training_gpus"),
                panels=("policy",),
                unit_x="time [s]",
                unit_y="GPUs",
            ),
        ),
    )

    policies: tuple[_PolicyName, ...] = _beside(
        "elastic policies", ("easyscale-homo", "easyscale-heter"), min_length=1
    )
    copies: int = _beside("how often the job list is submitted, at equal distances", 15, ge=1)
    hours: float = _beside("time over which that is spread and measured", 48.0, unit="h", gt=0)
    demand: Demand = option("what serving needs", Demand())
    cluster: str = shared("easyscale.simulation.cluster")
    samples_per_epoch: dict[str, float] = shared("easyscale.simulation.samples_per_epoch")
    interval_s: float = shared("easyscale.simulation.interval_s")
    restart_delay_s: float = shared("easyscale.simulation.restart_delay_s")
    infeasible: Infeasible = shared("easyscale.simulation.infeasible")
    d2_penalty: bool = shared("easyscale.simulation.d2_penalty")

    def n_threads(self, all_cores: int) -> int:
        """Return a core per policy of the default."""
        return 2

    def policies_run(self) -> Sequence[str]:
        """Return the elastic policies."""
        return self.policies

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per policy, and per policy and round."""
        where, horizon_s = pooled(cluster(self.cluster)), self.hours * HOUR
        wanted = self.demand.over(where, horizon_s, self.interval_s)
        listed, period_s = given.tables["jobs"], horizon_s / self.copies
        submissions = [
            listed.assign(
                job_id=listed["job_id"] + f"/{number}",
                submit_time_s=listed["submit_time_s"] + number * period_s,
            )
            for number in range(self.copies)
        ]
        repeated = pd.concat(submissions).sort_values("submit_time_s", kind="stable", ignore_index=True)
        workload = _simulated(self, repeated, where, given)
        cost = RestartDelays.constant(self.restart_delay_s)
        scenario = Scenario(
            *("serving", workload.jobs, where, workload.catalogue, cost, self.interval_s),
            failures=tuple(wanted.events()),
        )
        runs = run_all(
            [SimulationSpec(scenario, name, keeps_tables=True) for name in self.policies], given.n_threads
        )
        rows = pd.DataFrame([_row(run, where, wanted, horizon_s) for run in runs])
        rows = rows.merge(given.cells["serving"].drop(columns="source"), on="policy", how="left")
        rounds = pd.concat([_rounds(run, where, wanted) for run in runs], ignore_index=True)
        return {"serving": rows, "serving_rounds": rounds}


def _simulated(
    options: "Serving | Simulation", table: pd.DataFrame, where: ClusterSpec, given: Given
) -> ClusterJobs:
    """Return the jobs of a list with the times that printed cells give."""
    profile = published_profile(given.cells["fig11"], given.cells["fig12"])
    return cluster_jobs(
        table, where, profile, options.samples_per_epoch,
        infeasible=options.infeasible, d2_penalty=options.d2_penalty,
    )  # fmt: skip


def _row(run: Run, where: ClusterSpec, wanted: _Demand, horizon_s: float) -> dict[str, Any]:
    """Return the shares of GPUs in use up to a horizon, and how often training gave GPUs back."""
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
    """Return the GPUs that serving needs and has and that training holds, every ten minutes."""
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


_varied_option = partial(option, source="a choice", changes="sensitivity")
_Samples = Annotated[float, Field(gt=0)]
_Time = Annotated[float, Field(ge=0)]
_PositiveTime = Annotated[float, Field(gt=0)]


class Simulation(Experiment):
    """Simulate the job list under all policies, on pools of devices, and with other rounds and delays.

    Raises `makespan.studies.ImpossibleScheduleError` if a schedule breaks a rule of the validator.
    """

    name = "simulate"
    tables = {
        "fig14": "completion time and makespan under each policy, with the paper's values",
        "fig14_jobs": "submission, start and completion of every job",
        "fig15": "GPUs of each type that jobs hold after every round, with the paper's values",
        "sensitivity": "completion time and makespan with other rounds and restart delays",
    }
    cells = ("fig11", "fig12", "fig14", "fig15")
    reads = ("jobs",)
    unjudged = frozenset({"fig14_jobs"})
    unused = frozenset({"job_list", "dedup"})
    figures = (
        Figure(
            "fig14",
            "Fig. 14",
            "Makespan from time 0 and average completion time of one list of "
            "{jobs: largest fig14.jobs} under gang scheduling and "
            "EasyScale, on times that follow from printed cells. Jobs are of "
            "source {source}; emulated jobs are a generated list. Hollow diamonds "
            "are the published values, which are of the authors' list; that of "
            "YARN-CS belongs to one job at a time. The axes are logarithmic, and "
            "numbers are the values of the dots beside which they stand.",
            tables=("fig14",),
        ),
        Figure(
            "fig15",
            "Fig. 15",
            "GPUs that jobs hold after every round under EasyScale, from one "
            "simulation per policy on times that follow from printed cells. Jobs "
            "are of source {source}; emulated jobs are a generated list. Grey "
            "with hollow diamonds is the curve that the paper prints for the "
            "authors' list.",
            tables=("fig15",),
            values={"policies": ("easyscale-homo", "easyscale-heter")},
            explore=Explore(
                "steps",
                ("time_s",),
                ("gpus", "published_gpus"),
                ("policy",),
                unit_x="time [s]",
                unit_y="GPUs",
            ),
        ),
        Figure(
            "sensitivity",
            "Sensitivity of Fig. 14",
            "Average completion time and makespan of Fig. 14 against the length "
            "of a round and the restart delay, one varied at a time, one "
            "simulation per point. Jobs are of source {source}; emulated jobs are "
            "a generated list. Lines that do not cross keep the order of the "
            "policies.",
            tables=("sensitivity",),
        ),
    )

    cluster: Annotated[str, one_of(cluster_names)] = _of_all(
        "cluster whose devices are simulated as one pool a type",
        "v100-p100-t4-64",
        source="EasyScale artifact: 32 V100, 16 P100, 16 T4",
    )
    job_list: JobList = option("generated job list; the published source has the authors' own", JobList())
    dedup: Literal["rename", "artifact"] = _ours(
        "what becomes of names that occur again in the authors' list: rename keeps every row, artifact does "
        "as the released simulator",
        "rename",
    )
    samples_per_epoch: dict[str, _Samples] = _of_all(
        "samples of an epoch by model, a real number",
        {
            "shufflenetv2": 12800.0,
            "resnet50": 12800.0,
            "vgg19": 12800.0,
            "swintransformer": 12800.0,
            "yolov3": 165.51,
            "bert": 886.41,
            "electra": 886.41,
            "ncf": 49708.45,
        },
        unit="samples",
        source="EasyScale artifact: 1 % of the real data sets",
        min_length=1,
    )
    interval_s: float = _of_all("length of a round", 60.0, unit="s", source="EasyScale artifact: 60 s", gt=0)
    restart_delay_s: float = _of_all(
        "time without progress after a start or change",
        20.0,
        unit="s",
        source="EasyScale artifact: 20 s",
        ge=0,
    )
    charge: Charge = _ours(
        "what the delay follows: every, each start and change; first_only, the first start, as in the "
        "released simulator",
        "every",
    )
    infeasible: Infeasible = _ours(
        "what becomes of a gang that is larger than the cluster has GPUs of its type: clamp, it runs on all "
        "of them; reject, it is left out",
        "clamp",
    )
    d2_penalty: bool = _ours("whether jobs on several types at once pay the printed price of D2", False)
    gang_policies: tuple[_PolicyName, ...] = _of_all(
        "policies that run every job on all GPUs that it asks for",
        ("fifo-serial", "fifo"),
        source="EasyScale, Fig. 14: YARN-CS",
        min_length=1,
    )
    elastic_policies: tuple[_PolicyName, ...] = _of_all(
        "policies that may run jobs on other GPUs",
        ("easyscale-homo", "easyscale-heter-growth", "easyscale-heter"),
        source="EasyScale, Fig. 14",
        min_length=1,
    )
    intervals_s: tuple[_PositiveTime, ...] = _varied_option(
        "lengths of a round", (30.0, 60.0, 120.0), unit="s"
    )
    restart_delays_s: tuple[_Time, ...] = _varied_option(
        "times without progress", (0.0, 20.0, 60.0), unit="s"
    )

    def n_threads(self, all_cores: int) -> int:
        """Return four cores, among which runs are dealt."""
        return 4

    def policies_run(self) -> Sequence[str]:
        """Return the policies of all runs."""
        return [*self.gang_policies, *self.elastic_policies]

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per policy, per job, per round and per setting, each for every policy."""
        where = pooled(cluster(self.cluster))
        workload = _simulated(self, given.tables["jobs"], where, given)
        base = _Setting("default", "", self.interval_s, self.restart_delay_s, self.charge)
        cases = []
        for setting in (base, *_varied(base, self.intervals_s, self.restart_delays_s)):
            delays = RestartDelays.constant if setting.charge == "every" else RestartDelays.first_start_only
            cost, title = delays(setting.restart_delay_s), f"{setting.parameter} {setting.value}".strip()
            for catalogue, names in (
                (workload.catalogue.gangs(), self.gang_policies),
                (workload.catalogue, self.elastic_policies),
            ):
                scenario = Scenario(title, workload.jobs, where, catalogue, cost, setting.interval_s)
                for name in names:
                    cases.append((setting, SimulationSpec(scenario, name, keeps_tables=setting is base)))
        runs = run_all([case for _, case in cases], given.n_threads)
        first_s = min(job.submit_time_s for job in workload.jobs)
        rows = [
            {"parameter": setting.parameter, "value": setting.value, "policy": run.policy}
            | _measures(run, first_s)
            for (setting, _), run in zip(cases, runs, strict=True)
        ]
        of_base = [run for (setting, _), run in zip(cases, runs, strict=True) if setting is base]
        job_columns = schemas_of("makespan.papers.easyscale")["fig14_jobs"].names
        clamped, printed = set(workload.clamped), given.cells["fig15"]
        jobs, held = [], []
        last_s = printed.groupby("policy")["time_s"].max()
        for run in of_base:
            done = run.result.outcomes
            jct_s, is_clamped = done["finish_time_s"] - done["submit_time_s"], done["job_id"].isin(clamped)
            jobs.append(done.assign(policy=run.policy, jct_s=jct_s, is_clamped=is_clamped)[job_columns])
            until_s = float(last_s.get(run.policy, 0.0))
            held.append(_held(run, where, self.interval_s, until_s).assign(policy=run.policy))
        return {
            "fig14": _fig14(of_base, first_s, self.interval_s, given.cells["fig14"]),
            "fig14_jobs": pd.concat(jobs, ignore_index=True),
            "fig15": pd.concat(held).merge(
                printed.drop(columns="source"), on=["policy", "time_s"], how="left"
            ),
            "sensitivity": pd.DataFrame(rows),
        }


def _varied(
    base: _Setting, intervals_s: Sequence[float], restart_delays_s: Sequence[float]
) -> list[_Setting]:
    """Return the settings that differ from the default in one option."""
    other: Charge = "first_only" if base.charge == "every" else "every"
    rounds = [replace(base, parameter="interval_s", value=f"{s:g}", interval_s=s) for s in intervals_s]
    delays = [
        replace(base, parameter="restart_delay_s", value=f"{s:g}", restart_delay_s=s)
        for s in restart_delays_s
    ]
    return [*rounds, *delays, replace(base, parameter="charge", value=other, charge=other)]


def _measures(run: Run, first_s: float) -> dict[str, float]:
    """Return the metrics of a run, of whose jobs the first is submitted at ``first_s`` [s]."""
    names = ("avg_jct_s", "p50_jct_s", "p95_jct_s", "makespan_s", "reconfigurations_per_job")
    return {name: getattr(run.metrics, name) for name in names} | {
        "makespan_from_zero_s": first_s + run.metrics.makespan_s
    }


def _fig14(runs: Sequence[Run], first_s: float, interval_s: float, cells: pd.DataFrame) -> pd.DataFrame:
    """Compare policies with gang scheduling of many jobs and of one at a time, beside printed cells."""
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
    return table.merge(printed, on="policy", how="left")


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
