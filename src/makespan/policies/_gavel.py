"""Gavel: max-min fair shares of time by water filling, realised round by round."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from makespan.hardware import ClusterSpec
from makespan.policies._queue import acceptable, serve
from makespan.sim import Catalogue, ClusterView, Configuration, Decision, JobView

__all__ = ["POLICIES", "Gavel", "fair_shares"]


def fair_shares(sizes: Mapping[int, int], n_gpus: int) -> dict[int, float]:
    """Share of time that each job of a size should run, from the number of jobs by size: water filling."""
    if sum(size * number for size, number in sizes.items()) <= n_gpus:  # nothing to share out
        return dict.fromkeys(sizes, 1.0)
    levels, numbers = (np.array(values) for values in zip(*sorted(sizes.items()), strict=True))
    rising = np.cumsum(numbers[::-1])[::-1]
    heights = np.diff(levels, prepend=0)
    used = np.cumsum(heights * rising)
    left = np.maximum(n_gpus - (used - heights * rising), 0)
    level = float(np.minimum(heights, left / rising).sum())
    return {size: min(level / size, 1.0) for size in sizes}


@dataclass(frozen=True, slots=True)
class Gavel:
    """Give all jobs the same share of the cluster's time, as far as they can use it.

    Deviation: one type of device, so shares have no second index; and a job is displaced only after a turn of
    ``turn_s`` or ``turn_delays`` restart delays, the larger, by one with ``advantage`` times its priority.
    """

    turn_s: float = 360.0  # least time with devices before a job can be displaced
    turn_delays: float = 3.0  # the same in restart delays; the larger of both counts
    advantage: float = 2.0  # least ratio of priorities at which a job displaces another
    max_slowdown: float = 1.5  # ratio of predicted steps up to which a job accepts more nodes
    name: str = "gavel"
    title: str = "Gavel"
    interval_s: float | None = 360.0
    is_clairvoyant: bool = False
    honours_guarantees: bool = False
    references: tuple[str, ...] = (
        "D. Narayanan et al. Heterogeneity-aware cluster scheduling policies for deep learning workloads. "
        "OSDI 2020.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> None:
        """Return nothing: the shares follow from the view alone."""

    def decide(self, view: ClusterView, state: None) -> tuple[Decision, None]:
        """Compute the shares, then serve jobs by how far behind their share they are."""
        catalogue, now_s = view.catalogue, view.time_s
        jobs = (*view.pending, *view.running)
        shares = fair_shares(Counter(job.spec.n_gpus for job in jobs), view.n_gpus)
        turn_s = max(self.turn_s, self.turn_delays * view.restart_delay_s)
        priority = {job: shares[job.spec.n_gpus] / _held_share(job, view) for job in jobs}
        over = sorted(
            (job for job in view.running if now_s - job.held_since_s >= turn_s),
            key=lambda job: (priority[job], job.index),
        )

        def order(job: JobView) -> tuple[float, float]:
            return (-priority[job], job.spec.submit_time_s)

        def options(job: JobView) -> tuple[Configuration, ...]:
            return acceptable(catalogue.as_requested(job.spec), 1.0, 0.0, self.max_slowdown)

        def victims(job: JobView) -> list[JobView]:
            return [other for other in over if priority[other] * self.advantage <= priority[job]]

        decision = serve(view, order, options, victims)
        return Decision(decision.changes, _next_turn_s(view, turn_s)), state


def _next_turn_s(view: ClusterView, turn_s: float) -> float | None:
    """Return when to look again although nothing happened [s]: shares shift while jobs wait."""
    if not view.pending:
        return None
    ends = (job.held_since_s + turn_s for job in view.running)
    return min((end for end in ends if end > view.time_s), default=view.time_s + turn_s)


def _held_share(job: JobView, view: ClusterView) -> float:
    """Return the share of its time in the system that a job held devices, counting one round more."""
    round_s = view.interval_s or 1.0
    held_s = job.running_time_s + job.restart_time_s
    return (held_s + round_s) / (view.time_s - job.spec.submit_time_s + round_s)


POLICIES = (Gavel(),)
