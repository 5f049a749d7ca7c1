"""What is run live: workloads of the packaged preset, their jobs, and the setting of one run."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

from makespan.errors import InputError, unknown_name
from makespan.files import read_json, read_preset, write_json
from makespan.sim import Catalogue, RestartDelays
from makespan.studies import TableCatalogue
from makespan.tables import THROUGHPUT
from makespan.traces import apportion
from makespan.workloads import JobSpec

_PACKAGE, _PRESET, _SETTINGS = "makespan.live", "live", "measurement"
_GAP_JITTER = 0.4  # of the mean interval, to both sides
_POINT = ["exec_plan", "placement", "cpu_threads"]
_SETTING = "setting.json"


@dataclass(frozen=True, slots=True)
class LiveWorkload:
    """Statistics of a live workload; fields as in the preset."""

    name: str
    jobs: int
    workloads: Mapping[str, float]  # share of the jobs that train each
    slots: Mapping[int, float]  # share of the jobs that ask for so many
    plans: Mapping[int, tuple[str, ...]]  # asked for in turn, by number of slots
    median_duration_s: float  # log-normal, alone as requested
    duration_log_sd: float
    mean_interval_s: float  # between submissions
    source: str

    def fitting(self, n_slots: int) -> "LiveWorkload":
        """Leave out the requests for which there are not enough slots."""
        slots = {count: share for count, share in self.slots.items() if count <= n_slots}
        return replace(self, slots=slots, plans={count: self.plans[count] for count in slots})


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """How a live run is measured and timed; fields as in the preset.

    The time that policies see is scaled so that the measured restart delay looks as long as
    ``policy_restart_delay_s``, for which their parameters are made. ``noise_log_sd`` is how far the step
    times of a profile may be off, and ``noise_simulations`` how often that is tried.
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
    """Return how live runs are measured."""
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
    """Generate the jobs of a workload from measured times of a step [s], the first submitted at 0 s.

    Shares are apportioned and quantiles of the durations stratified, so that a seed decides which
    job gets what, and not how much work there is.
    """
    rng = np.random.default_rng(seed)
    keys = rng.permutation(_shared_out(spec.workloads, spec.jobs))
    slots = rng.permutation(_shared_out(spec.slots, spec.jobs))
    normal = NormalDist(sigma=spec.duration_log_sd)
    spread = [np.exp(normal.inv_cdf((rank + 0.5) / spec.jobs)) for rank in range(spec.jobs)]
    durations_s = rng.permutation(spec.median_duration_s * np.array(spread))
    gaps_s = spec.mean_interval_s * (1 + _GAP_JITTER * rng.uniform(-1, 1, spec.jobs))
    submit_s = np.concatenate([[0.0], np.cumsum(gaps_s)[:-1]])
    taken: dict[int, int] = {}
    jobs = []
    for number, (key, n_slots) in enumerate(zip(keys.tolist(), slots.tolist(), strict=True)):
        plans = spec.plans[n_slots]
        plan = plans[taken.setdefault(n_slots, 0) % len(plans)]
        taken[n_slots] += 1
        duration_s = float(durations_s[number])
        steps = max(round(duration_s / iter_time_s(key, n_slots, plan)), 1)
        jobs.append(
            JobSpec(f"{number:02d}-{key}", float(submit_s[number]), key, n_slots, n_slots, plan, steps,
                    duration_s=duration_s)
        )  # fmt: skip
    return jobs


def _shared_out(shares: Mapping[Any, float], total: int) -> Any:
    """Each value as often as its share says."""
    return np.repeat(np.array(list(shares)), apportion(np.array(list(shares.values())), total))


@dataclass(frozen=True, slots=True)
class LiveSetting:
    """What a live run is given; all times on the wall.

    Parameters
    ----------
    policy, workload, n_slots, seed
        Names of policy and live workload, how many slots jobs run on, and what the job list was drawn with.
    first_start_s, restart_delay_s
        Measured means of the first start of a job, and of a continuation from a checkpoint [s].
    scale
        Seconds that policies see in a second on the wall.
    jobs, seeds
        The job list, and the seed of each job's training by its name.
    tables
        Throughput just measured, by workload; `makespan.tables.THROUGHPUT`.
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

    def save(self, directory: Path) -> None:
        """Write the setting where the run keeps its state."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values["jobs"] = [asdict(job) for job in self.jobs]
        tables = self.tables.items()  # to every digit: a schedule is checked with what was read back
        values["tables"] = {key: table.to_dict(orient="split", index=False) for key, table in tables}
        write_json(values, directory / _SETTING)

    @classmethod
    def load(cls, directory: Path) -> "LiveSetting | None":
        """Read the setting of a run that was left in a directory; None if there is none."""
        path = directory / _SETTING
        values: dict[str, Any] | None = read_json(path)
        if values is None:
            return None
        values["jobs"] = tuple(JobSpec(**job) for job in values["jobs"])
        values["tables"] = {
            key: THROUGHPUT.validate(pd.DataFrame(table["data"], columns=table["columns"]), where=str(path))
            for key, table in values["tables"].items()
        }
        return cls(**values)

    def scaled_delays(self) -> RestartDelays:
        """Return the restart delays as policies see them."""
        again_s = self.restart_delay_s * self.scale
        return RestartDelays(self.first_start_s * self.scale, again_s, again_s)

    def catalogue(self) -> Catalogue:
        """Catalogue of what may run, with times as policies see them."""
        name, tables = "iter_time_s", self.tables.values()
        return TableCatalogue.from_tables([one.assign(**{name: one[name] * self.scale}) for one in tables])

    def scaled_jobs(self) -> list[JobSpec]:
        """List the jobs with submission times as policies see them."""
        return [replace(job, submit_time_s=job.submit_time_s * self.scale) for job in self.jobs]

    def averaged(
        self, tables: Mapping[str, pd.DataFrame], first_start_s: float, restart_delay_s: float
    ) -> "LiveSetting":
        """Return the same with the mean of its profile and of another one; points lacking there stay."""
        means = {}
        for key, table in self.tables.items():
            there = tables[key].set_index(_POINT).reindex(pd.MultiIndex.from_frame(table[_POINT]))
            there.index = table.index
            times = [name for name in table.columns if name.endswith("_s")]
            mean = {name: (table[name] + there[name].fillna(table[name])) / 2 for name in times}
            means[key] = table.assign(**mean)
        return replace(
            self,
            tables=means,
            first_start_s=(self.first_start_s + first_start_s) / 2,
            restart_delay_s=(self.restart_delay_s + restart_delay_s) / 2,
        )

    def disturbed(self, rng: np.random.Generator, log_sd: float) -> "LiveSetting":
        """Return the same with step times that are off by log-normal factors, one for all and one each.

        The same draws with ``-log_sd`` are as much off to the other side.
        """
        together = rng.standard_normal()
        factors = {
            key: np.exp(log_sd * (together + rng.standard_normal(len(it)))) for key, it in self.tables.items()
        }
        tables = {
            key: it.assign(iter_time_s=it["iter_time_s"] * factors[key]) for key, it in self.tables.items()
        }
        return replace(self, tables=tables)

    def check_same(self, policy: str, workload: str, n_slots: int, seed: int) -> None:
        """Check that a run which was left is the one that is asked for."""
        wanted = {"policy": policy, "workload": workload, "n_slots": n_slots, "seed": seed}
        for name, value in wanted.items():
            if (left := getattr(self, name)) != value:
                found = f"the run that was left has {name} {left!r}, asked for is {value!r}"
                raise InputError(f"{found}; accepted: the same, or another directory")
