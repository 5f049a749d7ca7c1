"""Live workloads of the packaged preset, their jobs, and the setting of one live run."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

from makespan.errors import InputError, unknown_name
from makespan.files import read_json, read_preset, write_json
from makespan.plans import Placement, PlanFamily, enumerate_placements
from makespan.sim import Catalogue, FailureModel, NodeEvent, RecoveryKind, RestartDelays
from makespan.studies import TableCatalogue
from makespan.tables import THROUGHPUT
from makespan.traces import apportion
from makespan.units import DAY, HOUR
from makespan.workloads import JobSpec, workload

REPAIR_WALL_S = 30.0
"""Mean time until a node of a live run is back [s]; a choice: as long as jobs train between checkpoints."""
_FAILURE_HOURS = 2.0  # for which failures are generated; a choice, more than a run takes
_PACKAGE, _PRESET, _SETTINGS = "makespan.live", "live", "measurement"
_GAP_JITTER = 0.4  # of the mean interval, to both sides
_POINT = ["exec_plan", "placement", "cpu_threads"]
_SETTING = "setting.json"


@dataclass(frozen=True, slots=True)
class LiveWorkload:
    """Statistics of a live workload; fields as in the preset."""

    name: str
    jobs: int
    workloads: Mapping[str, float]  # share of the jobs that train each workload
    slots: Mapping[int, float]  # share of the jobs that request each number of slots
    plans: Mapping[int, tuple[str, ...]]  # requested in turn, by number of slots
    median_duration_s: float  # of a log-normal distribution; each job alone, as requested
    duration_log_sd: float
    mean_interval_s: float  # between submissions
    source: str

    def fitting(self, n_slots: int) -> "LiveWorkload":
        """Return the workload without requests for more than ``n_slots`` slots."""
        slots = {count: share for count, share in self.slots.items() if count <= n_slots}
        return replace(self, slots=slots, plans={count: self.plans[count] for count in slots})

    def data_parallel(self) -> "LiveWorkload":
        """Return the workload with plans of data parallelism alone, which elastic jobs can train.

        An `InputError` is raised if there is none for a number of slots, or if a number of slots does not
        divide the global batch of a model.
        """
        plans = {
            count: tuple(text for text in texts if text == PlanFamily.DP.word)
            for count, texts in self.plans.items()
        }
        for count, texts in plans.items():
            if not texts:
                raise InputError(
                    f"live workload {self.name!r} has plans {', '.join(self.plans[count])} on {count} "
                    f"slot(s); expected {PlanFamily.DP.word!r} among them, the only plan of elastic jobs"
                )
        for key in self.workloads:
            batch_size = workload(key).global_batch_size
            for n_slots in plans:
                if batch_size % n_slots:
                    raise InputError(
                        f"live workload {self.name!r} has requests for {n_slots} slots and {key!r} a global "
                        f"batch of {batch_size}; expected a divisor of it, because each slot trains an equal "
                        "part"
                    )
        return replace(self, plans=plans)


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """Settings of measurement and timing of live runs; fields as in the preset.

    The time that policies see is scaled so that the measured restart delay appears as
    ``policy_restart_delay_s``, for which their parameters are chosen. ``noise_log_sd`` is the assumed error
    of the step times of a profile, and ``noise_simulations`` the number of simulations with such errors.
    """

    policy_restart_delay_s: float
    warmup_steps: int
    steps: int
    repetitions: int
    restart_steps: int
    checkpoint_interval_s: float
    noise_log_sd: float
    noise_simulations: int
    source: str


def live_workloads() -> tuple[str, ...]:
    """Return the names of the live workloads."""
    return tuple(name for name in read_preset(_PACKAGE, _PRESET) if name != _SETTINGS)


def live_settings() -> LiveSettings:
    """Return the settings of the preset."""
    return LiveSettings(**read_preset(_PACKAGE, _PRESET)[_SETTINGS])


def live_workload(name: str) -> LiveWorkload:
    """Return a live workload by its name."""
    if name not in live_workloads():
        raise unknown_name("live workload", name, live_workloads())
    entry = dict(read_preset(_PACKAGE, _PRESET)[name])
    slots = {int(count): share for count, share in entry.pop("slots").items()}
    plans = {int(count): tuple(texts) for count, texts in entry.pop("plans").items()}
    return LiveWorkload(name=name, slots=slots, plans=plans, **entry)


def live_jobs(spec: LiveWorkload, iter_time_s: Callable[[str, int, str], float], seed: int) -> list[JobSpec]:
    """Generate the jobs of a workload from measured step times [s], the first submitted at 0 s.

    Shares are apportioned and quantiles of the durations stratified, so that the seed decides only how these
    are assigned to jobs, not the total amount of work.
    """
    rng = np.random.default_rng(seed)
    keys = rng.permutation(_shared_out(spec.workloads, spec.jobs))
    slots = rng.permutation(_shared_out(spec.slots, spec.jobs))
    normal = NormalDist(sigma=spec.duration_log_sd)
    spread = [np.exp(normal.inv_cdf((rank + 0.5) / spec.jobs)) for rank in range(spec.jobs)]
    durations_s = rng.permutation(spec.median_duration_s * np.array(spread))
    gaps_s = spec.mean_interval_s * (1 + _GAP_JITTER * rng.uniform(-1, 1, spec.jobs))
    submit_s = np.concatenate([[0.0], np.cumsum(gaps_s)[:-1]])
    n_jobs: dict[int, int] = {}  # so far, by number of slots: their plans are requested in turn
    jobs = []
    for number, (key, n_slots) in enumerate(zip(keys.tolist(), slots.tolist(), strict=True)):
        plans = spec.plans[n_slots]
        plan = plans[n_jobs.setdefault(n_slots, 0) % len(plans)]
        n_jobs[n_slots] += 1
        duration_s = float(durations_s[number])
        steps = max(round(duration_s / iter_time_s(key, n_slots, plan)), 1)
        jobs.append(
            JobSpec(f"{number:02d}-{key}", float(submit_s[number]), key, n_slots, n_slots, plan, steps,
                    duration_s=duration_s)
        )  # fmt: skip
    return jobs


def _shared_out(shares: Mapping[Any, float], total: int) -> Any:
    """Repeat each value in proportion to its share, ``total`` values in all."""
    return np.repeat(np.array(list(shares)), apportion(np.array(list(shares.values())), total))


def live_failures(per_hour: float, repair_s: float = REPAIR_WALL_S, seed: int = 1) -> FailureModel:
    """Return random failures of a live run, so many an hour in the whole cluster, for its first two hours.

    Times are real ones; see `makespan.sim.FailureModel` for ``repair_s``, ``seed`` and errors.
    """
    return FailureModel(per_hour * DAY / HOUR, repair_s, seed=seed, days=_FAILURE_HOURS * HOUR / DAY)


@dataclass(frozen=True, slots=True)
class LiveSetting:
    """Inputs of a live run; all times are wall times.

    Parameters
    ----------
    policy, workload, n_slots, seed
        Names of policy and live workload, number of slots, and seed of the job list.
    first_start_s, restart_delay_s
        Measured means of the first start of a job, and of a resumption from a checkpoint [s].
    scale
        Seconds that policies see per second of wall time.
    jobs, seeds
        The job list, and the seed of each job's training by its name.
    tables
        Measured throughput by workload; schema `makespan.tables.THROUGHPUT`. Without node events, step times
        include their share of the checkpoints.
    n_nodes, node_events
        Nodes over which the slots are spread evenly; nodes that fail and join, in time since the start of the
        run, without pauses between an interrupt and the resumption.
    checkpoint_s
        Measured mean time of a checkpoint of each workload [s], if there are node events.
    recovery, pause_s
        Recovery of the jobs, and the measured mean time without progress when one resumes from memory [s].
    n_logical_workers
        Logical workers of each job that resumes from memory; 0 for jobs that restart.
    """

    policy: str
    workload: str
    n_slots: int
    seed: int
    first_start_s: float
    restart_delay_s: float
    scale: float
    jobs: tuple[JobSpec, ...]
    seeds: Mapping[str, int]
    tables: Mapping[str, pd.DataFrame]
    n_nodes: int = 1
    node_events: tuple[NodeEvent, ...] = ()
    checkpoint_s: Mapping[str, float] = field(default_factory=dict)
    recovery: RecoveryKind = "restart"
    pause_s: float = 0.0
    n_logical_workers: int = 0

    def save(self, directory: Path) -> None:
        """Write the setting into the directory of the run."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["jobs"] = [asdict(job) for job in self.jobs]
        values["node_events"] = [asdict(event) for event in self.node_events]
        tables = self.tables.items()  # with all digits: a schedule is validated with the values read back
        values["tables"] = {key: table.to_dict(orient="split", index=False) for key, table in tables}
        write_json(values, directory / _SETTING)

    @classmethod
    def load(cls, directory: Path) -> "LiveSetting | None":
        """Read the setting of an interrupted run from a directory; None if there is no such run."""
        path = directory / _SETTING
        values: dict[str, Any] | None = read_json(path)
        if values is None:
            return None
        try:
            values["jobs"] = tuple(JobSpec(**job) for job in values["jobs"])
            values["node_events"] = tuple(NodeEvent(**event) for event in values.get("node_events", ()))
            values["tables"] = {
                key: THROUGHPUT.validate(
                    pd.DataFrame(table["data"], columns=table["columns"]), where=str(path)
                )
                for key, table in values["tables"].items()
            }
            return cls(**values)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise InputError(
                f"{path}: is no setting of a live run ({error!r}); use another directory"
            ) from None

    def scaled_delays(self) -> RestartDelays:
        """Return the restart delays as policies see them."""
        again_s = self.restart_delay_s * self.scale
        return RestartDelays(self.first_start_s * self.scale, again_s, again_s)

    def catalogue(self) -> Catalogue:
        """Return the catalogue of configurations, with times as policies see them.

        Nodes only group slots, so a step takes as long wherever its slots are.
        """
        tables = [
            table.assign(iter_time_s=table["iter_time_s"] * self.scale) for table in self.tables.values()
        ]
        if self.n_nodes > 1:
            tables = [self._spread(table) for table in tables]
        return TableCatalogue.from_tables(tables)

    def _spread(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return a table with every placement on the nodes of as many slots as each row has."""
        per_node = self.n_slots // self.n_nodes
        rows = [
            {**row, "placement": place.text}
            for row in table.to_dict("records")
            for place in enumerate_placements(
                Placement.parse(str(row["placement"])).n_gpus, per_node, self.n_nodes
            )
        ]
        return pd.DataFrame(rows, columns=table.columns)

    def scaled_jobs(self) -> list[JobSpec]:
        """List the jobs with submission times as policies see them."""
        return [replace(job, submit_time_s=job.submit_time_s * self.scale) for job in self.jobs]

    def scaled_node_events(self) -> tuple[NodeEvent, ...]:
        """Return the node events with times as policies see them."""
        return tuple(replace(event, time_s=event.time_s * self.scale) for event in self.node_events)

    def averaged(
        self,
        tables: Mapping[str, pd.DataFrame],
        first_start_s: float,
        restart_delay_s: float,
        checkpoint_s: Mapping[str, float] | None = None,
        pause_s: float | None = None,
    ) -> "LiveSetting":
        """Return the setting with the mean of its profile and another one, where that has the point."""
        means = {}
        for key, table in self.tables.items():
            other = tables[key].set_index(_POINT).reindex(pd.MultiIndex.from_frame(table[_POINT]))
            other.index = table.index
            times = [name for name in table.columns if name.endswith("_s")]
            mean = {name: (table[name] + other[name].fillna(table[name])) / 2 for name in times}
            means[key] = table.assign(**mean)
        return replace(
            self,
            tables=means,
            first_start_s=(self.first_start_s + first_start_s) / 2,
            restart_delay_s=(self.restart_delay_s + restart_delay_s) / 2,
            checkpoint_s={
                key: (cost_s + (checkpoint_s or {}).get(key, cost_s)) / 2
                for key, cost_s in self.checkpoint_s.items()
            },
            pause_s=(self.pause_s + (self.pause_s if pause_s is None else pause_s)) / 2,
        )

    def perturbed(self, rng: np.random.Generator, log_sd: float) -> "LiveSetting":
        """Return the setting with step times multiplied by log-normal factors, one common and one per point.

        The same draws with ``-log_sd`` give the inverse factors.
        """
        together = rng.standard_normal()
        tables = {}
        for key, table in self.tables.items():
            factors = np.exp(log_sd * (together + rng.standard_normal(len(table))))
            tables[key] = table.assign(iter_time_s=table["iter_time_s"] * factors)
        return replace(self, tables=tables)

    def check_same(
        self,
        policy: str,
        workload: str,
        n_slots: int,
        seed: int,
        n_nodes: int = 1,
        node_events: tuple[NodeEvent, ...] = (),
        recovery: RecoveryKind = "restart",
    ) -> None:
        """Check that an interrupted run has what is requested."""
        requested = {"policy": policy, "workload": workload, "n_slots": n_slots, "seed": seed}
        requested |= {"n_nodes": n_nodes, "recovery": recovery}
        for name, value in requested.items():
            if (before := getattr(self, name)) != value:
                raise InputError(
                    f"the interrupted run has {name} {before!r}, but {value!r} is requested; expected the "
                    "same, or another directory"
                )
        if self.node_events != node_events:
            raise InputError(
                f"the interrupted run has {len(self.node_events)} node events, other than the "
                f"{len(node_events)} that are requested; expected the same failures, or another directory"
            )
