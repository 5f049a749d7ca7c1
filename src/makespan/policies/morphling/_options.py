"""What each job may run as, by how much a policy may change of the request and what is known of its times."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from makespan.policies._placing import keeps_plan
from makespan.sim import Catalogue, Configuration, JobView
from makespan.workloads import JobSpec

__all__ = ["FULL_FREEDOM", "LESS", "Freedom", "OptionTable", "Options", "allowed"]

_Request = tuple[str | int | bool, ...]
# How often what a job holds has changed, whether it has run as now, and its options since then.
_Known = tuple[int, bool, "Options"]
Times = tuple[list[tuple[float, int]], float]  # time [s] and devices by option, and the least area [GPU s]
Upgrades = tuple[list[tuple[float, Configuration]], float]  # steps [s] and options, and the least step
Choices = tuple[tuple[Configuration, ...], int]  # some options, and the fewest devices of any

_MAX_TIMES = 1024  # numbers of steps for which the times of a kind of job are kept


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

    __slots__ = ("_by_step", "_choices", "_faster", "_times", "items", "step_s")

    def __init__(self, items: tuple[Configuration, ...], step_s: Mapping[Configuration, float]) -> None:
        self.items = items
        self.step_s = step_s
        self._by_step: list[tuple[float, Configuration]] | None = None
        self._faster: dict[tuple[int, float], Upgrades] = {}
        self._times: dict[tuple[float, float], Times] = {}
        self._choices: dict[tuple[int, ...], Choices] = {}

    @property
    def by_step(self) -> list[tuple[float, Configuration]]:
        """Return the time of a step [s] in each option, with the option, the fastest first."""
        if self._by_step is None:
            times = [(self.step_s[item], order, item) for order, item in enumerate(self.items)]
            self._by_step = [(step_s, item) for step_s, _, item in sorted(times, key=lambda it: it[:2])]
        return self._by_step

    def times(self, steps: float, delay_s: float) -> Times:
        """Return how long so many steps take after a delay [s], and on how many devices, in each option.

        The least product of the two comes with it.
        """
        found = self._times.get((steps, delay_s))
        if found is None:
            if len(self._times) > _MAX_TIMES:
                self._times.clear()
            pairs = [(delay_s + steps * self.step_s[item], item.n_gpus) for item in self.items]
            found = self._times[steps, delay_s] = pairs, min([time_s * n_gpus for time_s, n_gpus in pairs])
        return found

    def choices(self, ranks: tuple[int, ...]) -> Choices:
        """Return the options at some positions, always the same tuple, and the fewest devices of any."""
        found = self._choices.get(ranks)
        if found is None:
            items = tuple([self.items[rank] for rank in ranks])
            found = self._choices[ranks] = items, min([item.n_gpus for item in items])
        return found

    def upgrades(self, item: Configuration, step_s: float) -> Upgrades:
        """Return the options that are faster than a step [s] of a configuration, on no fewer devices.

        Each comes with its step [s], and all with the least of these, infinite if there are none.
        """
        key = (item.n_gpus, step_s)
        found = self._faster.get(key)
        if found is None:
            larger = [(self.step_s[other], other) for other in self.items if other.n_gpus >= item.n_gpus]
            faster = [pair for pair in larger if pair[0] < step_s]
            found = self._faster[key] = faster, min([pair[0] for pair in faster], default=inf)
        return found


@dataclass(frozen=True, slots=True)
class OptionTable:
    """Options of jobs, looked up in the catalogue once a kind of request and what such a job has shown."""

    catalogue: Catalogue
    freedom: Freedom
    _known: dict[tuple[_Request, frozenset[Configuration]], Options] = field(default_factory=dict)
    _of_job: dict[int, _Known] = field(default_factory=dict)
    _menus: dict[_Request, "_Menu"] = field(default_factory=dict)

    def of(self, job: JobView) -> Options:
        """Return the options of a job; never none."""
        known, held = self._of_job.get(job.index), job.allocation
        is_old = known is None or known[0] != job.generation
        if known is None or is_old or not (known[1] or held is None or not job.has_run(held.configuration)):
            has_run = held is not None and job.has_run(held.configuration)
            known = self._of_job[job.index] = job.generation, has_run, self._of_kind(job)
        return known[2]

    def _of_kind(self, job: JobView) -> Options:
        news = frozenset([item for item in job.observed if not item.is_known])
        key = (self._request(job.spec, job.spec.is_guaranteed), news)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._look_up(job)
        return found

    def _look_up(self, job: JobView) -> Options:
        menu, observed = self._menu(job.spec), job.observed
        step_s = {item: item.predicted_iter_time_s for item in menu.items}
        step_s |= {item: job.step_s(item) for item in observed if item in step_s}
        if job.spec.is_guaranteed:
            step_s = {item: time_s for item, time_s in step_s.items() if job.assures(item)}
        return Options(menu.best(step_s, by_room=self.freedom.resources), step_s)

    def _menu(self, spec: JobSpec) -> "_Menu":
        key = self._request(spec)
        found = self._menus.get(key)
        if found is None:
            found = self._menus[key] = _Menu(allowed(self.catalogue, spec, self.freedom))
        return found

    def _request(self, spec: JobSpec, is_guaranteed: bool = False) -> _Request:
        """Return what of a request its options depend on."""
        if self.freedom == FULL_FREEDOM and not is_guaranteed:
            return (spec.workload,)
        return spec.workload, spec.plan, spec.n_gpus, spec.n_cpus, is_guaranteed


class _Menu:
    """What kinds of requests may run as, by placement, and which placements are parts of which."""

    def __init__(self, items: tuple[Configuration, ...]) -> None:
        self.items = items
        groups: dict[tuple[tuple[int, ...], tuple[str, ...]], list[Configuration]] = {}
        for item in items:
            groups.setdefault((item.counts, item.types_by_count), []).append(item)
        self._groups = list(groups.values())
        firsts = [group[0] for group in self._groups]
        self._parts = [
            [rank for rank, one in enumerate(firsts) if one is not other and _is_part(one, other)]
            for other in firsts
        ]

    def best(self, step_s: Mapping[Configuration, float], *, by_room: bool) -> tuple[Configuration, ...]:
        """Return the fastest on each placement of those with a time [s], in the order of placements.

        ``by_room`` leaves out what another one beats: as fast or faster in part of its room.
        """
        groups = ([item for item in group if item in step_s] for group in self._groups)
        found = [min(group, key=step_s.__getitem__) if group else None for group in groups]
        kept = []
        for item, ranks in zip(found, self._parts, strict=True):
            if item is not None:
                smaller = [found[rank] for rank in ranks] if by_room else []
                if not any(it and step_s[it] <= step_s[item] and _is_lean(it, item) for it in smaller):
                    kept.append(item)
        return tuple(kept)


def _is_part(one: Configuration, other: Configuration) -> bool:
    """Whether a configuration has no more devices than another one on any node, and of the same types."""
    return (
        one.n_nodes <= other.n_nodes
        and all(mine <= theirs for mine, theirs in zip(one.counts, other.counts, strict=False))
        and all(a in ("", b) for a, b in zip(one.types_by_count, other.types_by_count, strict=False))
    )


def _is_lean(one: Configuration, other: Configuration) -> bool:
    """Whether a configuration needs no more CPU threads and host memory than another one for a device."""
    has_threads = one.cpu_threads <= other.cpu_threads
    return has_threads and one.host_memory_bytes_per_gpu <= other.host_memory_bytes_per_gpu
