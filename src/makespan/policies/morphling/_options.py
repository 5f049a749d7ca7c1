"""What each job may run as, by how much a policy may change of the request."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from makespan.policies._placing import fastest_by_placement, keeps_plan
from makespan.sim import Catalogue, Configuration
from makespan.workloads import JobSpec

__all__ = ["FULL_FREEDOM", "LESS", "Freedom", "OptionTable", "allowed", "undominated"]


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
        return catalogue.as_requested(job)
    reference = catalogue.requested(job)
    return tuple(
        item
        for item in catalogue.all(job.workload)
        if (freedom.plan or keeps_plan(reference, item)) and (freedom.resources or item.n_gpus == job.n_gpus)
    )


@dataclass(frozen=True, slots=True)
class OptionTable:
    """Options of jobs, looked up in the catalogue once a kind of request."""

    catalogue: Catalogue
    freedom: Freedom
    _known: dict[tuple[str, str, int, bool], tuple[Configuration, ...]] = field(default_factory=dict)
    _faster: dict[tuple[tuple[Configuration, ...], Configuration], tuple[Configuration, ...]] = field(
        default_factory=dict
    )

    def of(self, job: JobSpec) -> tuple[Configuration, ...]:
        """Return the options of a job, by devices, nodes and counts; never none."""
        key = (job.workload, job.plan, job.n_gpus, job.is_guaranteed)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._look_up(job)
        return found

    def upgrades(self, options: tuple[Configuration, ...], item: Configuration) -> tuple[Configuration, ...]:
        """Return the options that are faster than one configuration and have more devices."""
        found = self._faster.get((options, item))
        if found is None:
            found = self._faster[options, item] = tuple(
                other
                for other in options
                if other.n_gpus > item.n_gpus and other.predicted_iter_time_s < item.predicted_iter_time_s
            )
        return found

    def _look_up(self, job: JobSpec) -> tuple[Configuration, ...]:
        reference = self.catalogue.requested(job)
        items = allowed(self.catalogue, job, self.freedom)
        if job.is_guaranteed:
            items = tuple(item for item in items if item.assures(reference))
        options = fastest_by_placement(items)
        return undominated(options) if self.freedom.resources else tuple(options)


def undominated(items: Iterable[Configuration]) -> tuple[Configuration, ...]:
    """Leave out every configuration that another one beats: as fast or faster in part of its room."""
    kept: list[Configuration] = []
    for item in items:
        if not any(_beats(other, item) for other in kept):
            kept = [other for other in kept if not _beats(item, other)]
            kept.append(item)
    return tuple(kept)


def _beats(one: Configuration, other: Configuration) -> bool:
    return (
        one.predicted_iter_time_s <= other.predicted_iter_time_s
        and one.n_nodes <= other.n_nodes
        and all(mine <= theirs for mine, theirs in zip(one.counts, other.counts, strict=False))
        and all(a in ("", b) for a, b in zip(one.types_by_count, other.types_by_count, strict=False))
        and one.cpu_threads <= other.cpu_threads
        and one.host_memory_bytes_per_gpu <= other.host_memory_bytes_per_gpu
    )
