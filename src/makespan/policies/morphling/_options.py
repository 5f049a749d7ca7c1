"""What each job may run as, by how much a policy may change of the request and what is known of its times."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from makespan.policies._placing import keeps_plan
from makespan.sim import Catalogue, Configuration, JobView
from makespan.workloads import JobSpec

__all__ = ["FULL_FREEDOM", "LESS", "Freedom", "OptionTable", "Options", "allowed"]

_Kind = tuple[str, str, int, bool, frozenset[Configuration]]


@dataclass(frozen=True, slots=True)
class Freedom:
    """What a policy may choose for a job; the ablations take one or both away.

    Parameters
    ----------
    plan
        Its execution plan; otherwise the kind asked for, data-parallel degree following the devices.
    resources
        Its devices; otherwise as many as asked for.
    """

    plan: bool = True
    resources: bool = True


FULL_FREEDOM = Freedom()
"""Plan and resources."""

LESS = {
    "-e": (Freedom(resources=False), "plan only"),
    "-r": (Freedom(plan=False), "resources only"),
    "-n": (Freedom(plan=False, resources=False), "neither"),
}
"""Endings of the ablations' names, with what is left to each."""


def allowed(catalogue: Catalogue, job: JobSpec, freedom: Freedom) -> tuple[Configuration, ...]:
    """Return what a job may run as if no more of its request is changed than a policy is free to."""
    if not freedom.plan and not freedom.resources:
        return tuple(catalogue.as_requested(job))
    reference = catalogue.requested(job)
    return tuple(
        item
        for item in catalogue.all(job.workload)
        if (freedom.plan or keeps_plan(reference, item)) and (freedom.resources or item.n_gpus == job.n_gpus)
    )


class Options:
    """Options of a job by devices, nodes and counts, and the time of a step in each of them [s]."""

    __slots__ = ("_by_step", "_faster", "items", "pairs", "step_s")

    def __init__(self, items: tuple[Configuration, ...], step_s: Mapping[Configuration, float]) -> None:
        self.items = items
        self.step_s = step_s
        self.pairs = tuple((step_s[item], item.n_gpus) for item in items)
        self._by_step: list[tuple[float, Configuration]] | None = None
        self._faster: dict[tuple[int, float], tuple[Configuration, ...]] = {}

    @property
    def by_step(self) -> list[tuple[float, Configuration]]:
        """Return the time of a step [s] in each option, with the option, the fastest first."""
        if self._by_step is None:
            times = [(self.step_s[item], order, item) for order, item in enumerate(self.items)]
            self._by_step = [(step_s, item) for step_s, _, item in sorted(times, key=lambda it: it[:2])]
        return self._by_step

    def upgrades(self, item: Configuration, step_s: float) -> tuple[Configuration, ...]:
        """Return the options that are faster than a step [s] of a configuration, on no fewer devices."""
        key = (item.n_gpus, step_s)
        found = self._faster.get(key)
        if found is None:
            found = self._faster[key] = tuple(
                other for other in self.items if other.n_gpus >= item.n_gpus and self.step_s[other] < step_s
            )
        return found


@dataclass(frozen=True, slots=True)
class OptionTable:
    """Options of jobs, looked up in the catalogue once a kind of request and what such a job has shown."""

    catalogue: Catalogue
    freedom: Freedom
    _known: dict[_Kind, Options] = field(default_factory=dict)
    _fitting: dict[tuple[Configuration, Configuration], bool] = field(default_factory=dict)

    def of(self, job: JobView) -> Options:
        """Return the options of a job; never none."""
        spec, observed = job.spec, job.observed
        request = (spec.workload, spec.plan, spec.n_gpus, spec.is_guaranteed)
        found = self._known.get((*request, observed))
        if found is None:
            news = frozenset(item for item in observed if not item.is_known)
            found = self._known.get((*request, news)) or self._look_up(job)
            self._known[*request, news] = self._known[*request, observed] = found
        return found

    def _look_up(self, job: JobView) -> Options:
        items = allowed(self.catalogue, job.spec, self.freedom)
        if job.spec.is_guaranteed:
            items = tuple(item for item in items if job.assures(item))
        step_s = {item: item.predicted_iter_time_s for item in items}
        step_s |= {item: job.step_s(item) for item in job.observed if item in step_s}
        found = _fastest_by_placement(step_s)
        if self.freedom.resources:
            found = self._undominated(found, step_s)
        return Options(tuple(found), step_s)

    def _undominated(
        self, items: Iterable[Configuration], step_s: Mapping[Configuration, float]
    ) -> list[Configuration]:
        """Leave out, in order of devices, what another one beats: as fast or faster in part of its room."""
        kept: list[Configuration] = []
        for item in items:
            time_s = step_s[item]
            if any(step_s[other] <= time_s and self._fits_into(other, item) for other in kept):
                continue
            if kept and kept[-1].n_gpus == item.n_gpus:  # those before have fewer devices
                kept = [other for other in kept if time_s > step_s[other] or not self._fits_into(item, other)]
            kept.append(item)
        return kept

    def _fits_into(self, one: Configuration, other: Configuration) -> bool:
        """Whether a configuration needs no more than another one of anything, on any node."""
        found = self._fitting.get((one, other))
        if found is None:
            found = self._fitting[one, other] = (
                one.n_nodes <= other.n_nodes
                and all(mine <= theirs for mine, theirs in zip(one.counts, other.counts, strict=False))
                and all(a in ("", b) for a, b in zip(one.types_by_count, other.types_by_count, strict=False))
                and one.cpu_threads <= other.cpu_threads
                and one.host_memory_bytes_per_gpu <= other.host_memory_bytes_per_gpu
            )
        return found


def _fastest_by_placement(step_s: Mapping[Configuration, float]) -> list[Configuration]:
    """Return the fastest configuration on each placement, in the order of placements."""
    best: dict[tuple[tuple[int, ...], tuple[str, ...]], Configuration] = {}
    for item, time_s in step_s.items():
        key = (item.counts, item.types_by_count)
        if key not in best or time_s < step_s[best[key]]:
            best[key] = item
    return list(best.values())
