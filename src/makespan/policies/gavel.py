"""Gavel: an objective sets each job's share of the time of each device type; rounds realise the shares."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from makespan.hardware import ClusterSpec
from makespan.policies.base import Queue, acceptable, serve
from makespan.policies.placing import PlacementCache
from makespan.sim import Catalogue, ClusterView, Configuration, Decision, JobView
from makespan.workloads import JobSpec

Objective = Literal["max-min", "finish-time-fairness", "makespan"]
Floats = NDArray[np.float64]
_HALVINGS = 40  # bisection steps of the level: it is then known to 1e-12, below the tolerance of the solver
_LEAST_STEPS = 1e-9  # lower bound of the steps left, so that a job that ends now divides nothing by zero


def fair_shares(sizes: Mapping[int, int], n_gpus: int) -> dict[int, float]:
    """Return the max-min fair share of time by job size, given the number of jobs of each size.

    Water filling: all jobs hold the same number of devices on average (the level), except jobs smaller than
    the level, which run all the time.
    """
    if sum(size * number for size, number in sizes.items()) <= n_gpus:  # all jobs can run all the time
        return dict.fromkeys(sizes, 1.0)
    # Between two neighbouring sizes the level rises for all larger jobs together, until the devices are used.
    levels, numbers = (np.array(values) for values in zip(*sorted(sizes.items()), strict=True))
    rising = np.cumsum(numbers[::-1])[::-1]
    heights = np.diff(levels, prepend=0)
    used = np.cumsum(heights * rising)
    left = np.maximum(n_gpus - (used - heights * rising), 0)
    level = float(np.minimum(heights, left / rising).sum())
    return {size: min(level / size, 1.0) for size in sizes}


@dataclass(frozen=True, slots=True)
class Matrix:
    """Throughput of jobs by type of device, and numbers of devices.

    Shares of time have the shape of ``rates``; those of a job add up to at most 1.
    """

    rates: Floats  # (n_jobs, n_types), steps/s; 0 where a job cannot run
    sizes: Floats  # (n_jobs,), devices of each job
    n_gpus: Floats  # (n_types,), devices of each type

    @property
    def fastest(self) -> Floats:
        """Rate of each job if it runs all the time on its best type."""
        fastest: Floats = self.rates.max(axis=1)
        return fastest

    @property
    def equal(self) -> Floats:
        """Rate of each job if it runs on every type in proportion to the number of devices."""
        rates: Floats = np.sum(self.rates * (self.n_gpus / max(self.n_gpus.sum(), 1.0)), axis=1)
        return rates

    def shares(self, needed: Floats) -> Floats | None:
        """Return shares that give each job a rate, or None if the devices do not suffice."""
        n_jobs, n_types = self.rates.shape
        if n_types == 1:
            single: Floats = needed / self.rates[:, 0]
            return single[:, None] if np.sum(single * self.sizes) <= self.n_gpus[0] else None
        from scipy.optimize import linprog  # imported here: half of the import time of the module

        # The variables are the shares, job by job. The program minimises device time, so each job uses its
        # fastest type as long as there are devices of it. Rates are relative to the best of the job, so that
        # the solver sees the same numbers in any unit of time. Rows: needed rates, at most the whole time of
        # each job, at most the devices of each type.
        fastest = self.fastest
        jobs = np.repeat(np.arange(n_jobs), n_types)
        types = np.tile(np.arange(n_types), n_jobs)
        columns = np.arange(n_jobs * n_types)
        limits = np.zeros((2 * n_jobs + n_types, n_jobs * n_types))
        limits[jobs, columns] = -(self.rates / fastest[:, None]).ravel()
        limits[n_jobs + jobs, columns] = 1.0
        limits[2 * n_jobs + types, columns] = self.sizes[jobs]
        bounds = np.concatenate([-needed / fastest, np.ones(n_jobs), self.n_gpus])
        costs = np.where(self.rates.ravel() > 0, self.sizes[jobs], 1e6)  # no time where a job cannot run
        solution = linprog(costs, A_ub=limits, b_ub=bounds)
        if solution.x is None:
            return None
        return np.maximum(solution.x.reshape(n_jobs, n_types), 0.0)


def needed_shares(matrix: Matrix, rates_at: Callable[[float], Floats]) -> Floats:
    """Return the shares at the highest level from 0 to 1 at which the devices can serve all rates.

    No rate exceeds that of the job on its best type all the time. Rates grow with the level, so bisection
    finds the highest one.
    """
    low, high = 0.0, 1.0
    best = matrix.shares(np.minimum(rates_at(high), matrix.fastest))
    if best is not None:
        return best
    best = np.zeros_like(matrix.rates)
    for _ in range(_HALVINGS):
        level = (low + high) / 2
        shares = matrix.shares(np.minimum(rates_at(level), matrix.fastest))
        if shares is None:
            high = level
        else:
            low, best = level, shares
    return best


@dataclass(slots=True)
class Turns:
    """Options by type of device, computed once per kind of request, and time received by each job [s]."""

    placements: PlacementCache
    time_s: float = 0.0
    received_s: dict[str, dict[str, float]] = field(default_factory=dict)
    _known: dict[tuple[str, str, int], dict[str, tuple[Configuration, ...]]] = field(default_factory=dict)

    def update(self, view: ClusterView) -> None:
        """Credit running jobs with the time since the last decision, and forget finished ones."""
        kept: dict[str, dict[str, float]] = {}
        for job in (*view.pending, *view.running):
            received = kept[job.spec.job_id] = self.received_s.get(job.spec.job_id, {})
            if job.allocation is not None:
                since_s = max(self.time_s, job.held_since_s)
                held_type = _type_of(job.allocation.configuration)
                received[held_type] = received.get(held_type, 0.0) + view.time_s - since_s
        self.time_s, self.received_s = view.time_s, kept

    def options(self, spec: JobSpec, catalogue: Catalogue) -> Mapping[str, tuple[Configuration, ...]]:
        """Return the options of a job by type of device."""
        key = (spec.workload, spec.plan, spec.n_gpus)
        if key not in self._known:
            groups: dict[str, list[Configuration]] = {}
            for item in catalogue.as_requested(spec):
                groups.setdefault(_type_of(item), []).append(item)
            self._known[key] = {name: tuple(items) for name, items in groups.items()}
        return self._known[key]


def _type_of(item: Configuration) -> str:
    """Return the device type of a configuration: joined names if it mixes types, empty if any type fits."""
    return "+".join(dict.fromkeys(item.types_by_count))


@dataclass(frozen=True, slots=True)
class Gavel:
    """Give every job its share of the time of each type of device, by an objective.

    ``max-min`` maximises the least device time. ``finish-time-fairness`` minimises the worst ratio of a job's
    completion time to that with an equal part of the cluster, and ``makespan`` minimises the last completion;
    these two know the steps left. The priority of a job is its share of time over the part of its time that
    it received.

    Deviations: a job keeps its devices for a turn, the larger of ``turn_s`` and ``turn_delays`` restart
    delays; after that, only a job with at least ``advantage`` times its priority displaces it. Idle devices
    go to any job.
    """

    objective: Objective = "max-min"
    turn_s: float = 360.0  # least time with devices before a job can be displaced
    turn_delays: float = 3.0  # the same in restart delays; the larger of both counts
    advantage: float = 2.0  # least ratio of priorities at which a job displaces another
    max_slowdown: float = 1.5  # ratio of steps up to which a job accepts more nodes
    name: str = "gavel"
    title: str = "Gavel"
    interval_s: float | None = 360.0
    is_clairvoyant: bool = False
    honours_guarantees: bool = False
    references: tuple[str, ...] = (
        "D. Narayanan et al. Heterogeneity-aware cluster scheduling policies for deep learning workloads. "
        "OSDI 2020.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Turns:
        """Return the state in which no job has received anything."""
        return Turns(PlacementCache.on(cluster, catalogue))

    def decide(self, view: ClusterView, state: Turns) -> tuple[Decision, Turns]:
        """Compute the shares, then serve jobs by the ratio of their share to what they have received."""
        state.update(view)
        if not view.n_gpus:
            return Decision(), state  # no node is up: nobody has a share of anything
        now_s = view.time_s
        jobs = (*view.pending, *view.running)
        choices = {job: state.options(job.spec, view.catalogue) for job in jobs}
        # Priority by type: the share over the part of its age for which a job held such devices. One round is
        # added to both times: without it the priorities of new jobs would be infinite.
        round_s = view.interval_s or 1.0
        by_type: dict[JobView, dict[str, float]] = {}
        for job, shares in zip(jobs, self._shares(jobs, choices, view), strict=True):
            received_s, age_s = state.received_s[job.spec.job_id], now_s - job.spec.submit_time_s + round_s
            by_type[job] = {
                name: share * age_s / (received_s.get(name, 0.0) + round_s) for name, share in shares.items()
            }
        # The priority of a running job is that for the type that it holds, of a waiting job its largest one.
        priority = {
            job: max(by_type[job].values())
            if job.allocation is None
            else by_type[job].get(_type_of(job.allocation.configuration), 0.0)
            for job in jobs
        }
        turn_s = max(self.turn_s, self.turn_delays * view.restart_delay_s)
        displaceable = sorted(
            (job for job in view.running if now_s - job.held_since_s >= turn_s),
            key=lambda job: (priority[job], job.index),
        )

        def order(job: JobView) -> tuple[float, float]:
            return (-priority[job], job.spec.submit_time_s)

        def options(job: JobView) -> tuple[Configuration, ...]:
            ranked = sorted(by_type[job], key=lambda name: -by_type[job][name])
            parts = [acceptable(job, choices[job][name], 1.0, 0.0, self.max_slowdown) for name in ranked]
            return parts[0] if len(parts) == 1 else tuple(item for part in parts for item in part)

        def victims(job: JobView) -> list[JobView]:
            return [other for other in displaceable if priority[other] * self.advantage <= priority[job]]

        decision = serve(view, order, options, victims, Queue(state.placements))
        if not view.pending:
            return Decision(decision.changes), state
        # Priorities shift while jobs wait, so decide again at the end of a turn even without an event.
        ends = (job.held_since_s + turn_s for job in view.running)
        again_s = min((end for end in ends if end > now_s), default=now_s + turn_s)
        return Decision(decision.changes, again_s), state

    def _shares(
        self,
        jobs: Sequence[JobView],
        choices: Mapping[JobView, Mapping[str, tuple[Configuration, ...]]],
        view: ClusterView,
    ) -> Sequence[Mapping[str, float]]:
        """Return the share of time of each job on each type."""
        types = sorted({name for job in jobs for name in choices[job]})
        if len(types) == 1 and self.objective == "max-min":
            shares = fair_shares(Counter(job.spec.n_gpus for job in jobs), view.n_gpus)
            return [{types[0]: shares[job.spec.n_gpus]} for job in jobs]
        rates = np.zeros((len(jobs), len(types)))
        for row, job in enumerate(jobs):
            for column, name in enumerate(types):
                if name in choices[job]:
                    rates[row, column] = 1.0 / min(job.step_s(item) for item in choices[job][name])
        n_gpus = view.gpus_by_type
        present = np.array([float(n_gpus.get(name, view.n_gpus)) for name in types])
        rates[:, present == 0] = 0.0
        # While no node is up with the devices that a job needs, it has no share and no part in the objective.
        able = np.flatnonzero(rates.any(axis=1))
        asked = [jobs[int(row)] for row in able]
        matrix = Matrix(rates[able], np.array([float(job.spec.n_gpus) for job in asked]), present)
        rates_at = {
            "max-min": _least_service,
            "finish-time-fairness": _finish_times,
            "makespan": _last_completion,
        }[self.objective]
        table = np.zeros_like(rates)
        if asked:
            table[able] = needed_shares(matrix, rates_at(asked, matrix, view))
        return [
            {name: table[row, column] for column, name in enumerate(types) if name in choices[job]}
            for row, job in enumerate(jobs)
        ]


# --- Objectives: the rates that jobs need at a level ---
#
# An objective returns a function from a level to needed rates [steps/s], (n_jobs,). Level 1 is the best that
# any single job could reach; `needed_shares` finds the highest level that all reach together.


def _least_service(jobs: Sequence[JobView], matrix: Matrix, _: ClusterView) -> Callable[[float], Floats]:
    unit = matrix.equal / matrix.sizes
    most = float(np.max(matrix.fastest / unit, initial=0.0))
    return lambda level: level * most * unit


def _finish_times(jobs: Sequence[JobView], matrix: Matrix, view: ClusterView) -> Callable[[float], Floats]:
    left, age_s = _left(jobs), np.array([view.time_s - job.spec.submit_time_s for job in jobs])
    done = np.array([job.running_time_s for job in jobs]) * matrix.fastest
    # Share of its time for which a job would run with an equal part of the cluster.
    part = np.minimum(view.n_gpus / (len(jobs) * matrix.sizes), 1.0)
    alone_s = (done + left) / (matrix.equal * part)
    least = float(np.min((age_s + left / matrix.fastest) / alone_s, initial=np.inf))

    def rates_at(level: float) -> Floats:
        until_s = alone_s * least / level - age_s
        needed: Floats = np.full(len(left), np.inf)
        np.divide(left, until_s, out=needed, where=until_s > 0)
        return needed

    return rates_at


def _last_completion(jobs: Sequence[JobView], matrix: Matrix, _: ClusterView) -> Callable[[float], Floats]:
    left = _left(jobs)
    least_s = float(np.min(left / matrix.fastest, initial=np.inf))
    return lambda level: level / least_s * left


def _left(jobs: Sequence[JobView]) -> Floats:
    return np.maximum([job.steps_left for job in jobs], _LEAST_STEPS)


POLICIES = (
    Gavel(),
    Gavel(
        "finish-time-fairness",
        advantage=8.0,
        max_slowdown=1.0,
        name="gavel-ftf",
        title="Gavel, finish-time fairness",
        is_clairvoyant=True,
    ),
    Gavel(
        "makespan",
        turn_s=1440.0,
        turn_delays=12.0,
        advantage=8.0,
        max_slowdown=1.0,
        name="gavel-makespan",
        title="Gavel, makespan",
        is_clairvoyant=True,
    ),
)
