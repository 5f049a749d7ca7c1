"""Morphling as published: five rules on sensitivity curves, and the options of jobs that they choose from.

A curve gives the speed of a job relative to its speed as requested, by number of GPUs, on its best plan for
each shape. The paper leaves some rules open. Our reading of each rests on the paper (P), on the released
scheduler (R), or is our own choice (O). Names in parentheses are fields of `Morphling`; ``readings.csv`` has
the cost of the alternatives.

- Past the age limit a waiting job starves and its slope counts as the largest. So it takes GPUs from every
  job with a lower slope, and does not only move up the queue (R; ``starving_takes``). The oldest starving job
  is served first (O; ``starving_order``). Age counts from submission, however long the job has run since
  (R; ``age_since``). The paper states no limit, and that of the release, 200,000 s, is never reached on the
  published job lists; ours is an hour (O; ``age_limit_s``).
- If the steepest size of a waiting job cannot be reached, GPUs are taken for its smaller sizes too, in the
  order of their slopes (R; ``forces_smaller``).
- N of the gate counts the reconfigurations for the job's own gain. A restart because others stopped or
  shrank the job does not count (P: the gate bounds what a job spends on its own reconfigurations;
  ``gate_counts``). T is the time with GPUs so far, restarts included (O; ``gate_time``).
- Best-effort jobs take GPUs from jobs with a lower slope whose gate would be open for one more change
  (O; ``victim_counts``). This holds for starving jobs too (O; ``starving_passes_gates``), and a job past the
  age limit yields like any other (O; ``old_yield``). The minimum of a best-effort job is no GPU, so it can
  be stopped.
- The slope of a waiting job is its largest gain per GPU from nothing to any size, of a guaranteed job that to
  its minimum. The job starts with that size, and rule 4 makes it larger (P). The slope of a running job is
  its loss per GPU at the smaller size with the least loss (P).
- Steps go from size to size, because not every number of GPUs has a plan (O).
- Fewest nodes first means the fewest for one number of GPUs, then the fastest shape (P; ``shape_order``). A
  share goes to the node that it fills best. If a node lacks the CPU threads or host memory of the fastest
  plan, a plan that needs less is used (O).
- GPUs that were taken from others and turn out not to be needed are given back (O; ``gives_back``). Stopped
  jobs may start again in the same decision on free GPUs, without taking from others (O;
  ``restarts_stopped``).
- A job that has never run, or that already changes in this decision, has no gate to pass. The policy decides
  again when a gate opens or a job starts to starve (O).
- Once a job has run a plan, the observed time counts. Guarantees rest on known times alone, so the minimum
  of a guaranteed job is its request until more is known (O).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from makespan.hardware import ClusterSpec
from makespan.policies.placing import Fit, FreeResources, PlacementCache, keeps_plan
from makespan.sim import Allocation, Catalogue, ClusterView, Configuration, Decision, JobView
from makespan.workloads import JobSpec

# --- Options of jobs ---

_Request = tuple[str | int | bool, ...]
# Generation of a job, True once it has run its present configuration, and its options as long as both hold.
_Known = tuple[int, bool, "Options"]
Times = tuple[list[tuple[float, int]], float]  # time [s] and devices by option, and the least area [GPU s]
Upgrades = tuple[list[tuple[float, Configuration]], float]  # steps [s] and options, and the least step [s]
Choices = tuple[tuple[Configuration, ...], int]  # some options, and the fewest devices of any
_MAX_TIMES = 1024  # entries of the cache of times of one kind of job


@dataclass(frozen=True, slots=True)
class Freedom:
    """Parts of a job's request that a policy may change; the ablations remove one or both.

    Parameters
    ----------
    plan
        True if any execution plan is allowed; False if only that of the request, whose data-parallel degree
        follows the number of devices.
    resources
        True if any number of devices is allowed; False if only that of the request.
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
"""Suffixes of the ablations' names, with the freedom of each."""


def allowed(catalogue: Catalogue, job: JobSpec, freedom: Freedom) -> tuple[Configuration, ...]:
    """Return the configurations of a job that change only what a policy may change of its request."""
    if not freedom.plan and not freedom.resources:
        return tuple(catalogue.as_requested(job))
    reference = catalogue.requested(job)
    return tuple(
        item
        for item in catalogue.all(job.workload)
        if (freedom.plan or keeps_plan(reference, item)) and (freedom.resources or item.n_gpus == job.n_gpus)
    )


class Options:
    """Options of a job, sorted by devices, nodes and counts, and the time of a step in each of them [s]."""

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
        """Return all options, each behind the time of a step in it [s], fastest first."""
        if self._by_step is None:
            times = [(self.step_s[item], order, item) for order, item in enumerate(self.items)]
            self._by_step = [(step_s, item) for step_s, _, item in sorted(times, key=lambda it: it[:2])]
        return self._by_step

    def times(self, steps: float, delay_s: float) -> Times:
        """Return the run time [s] and the devices of each option, and the least product of the two.

        The run time is that of ``steps`` steps after a delay [s].
        """
        times = self._times.get((steps, delay_s))
        if times is None:
            if len(self._times) > _MAX_TIMES:
                self._times.clear()
            pairs = [(delay_s + steps * self.step_s[item], item.n_gpus) for item in self.items]
            times = self._times[steps, delay_s] = pairs, min([time_s * n_gpus for time_s, n_gpus in pairs])
        return times

    def choices(self, ranks: tuple[int, ...]) -> Choices:
        """Return the options at some positions, and the fewest devices of any.

        Equal positions give the same tuple object, so that caches by tuple find it quickly.
        """
        choices = self._choices.get(ranks)
        if choices is None:
            items = tuple([self.items[rank] for rank in ranks])
            choices = self._choices[ranks] = items, min([item.n_gpus for item in items])
        return choices

    def upgrades(self, item: Configuration, step_s: float) -> Upgrades:
        """Return the options with a step shorter than ``step_s`` [s] on at least as many devices.

        Each comes with its step time [s]. Also returns the least step time, infinite without options.
        """
        key = (item.n_gpus, step_s)
        upgrades = self._faster.get(key)
        if upgrades is None:
            larger = [(self.step_s[other], other) for other in self.items if other.n_gpus >= item.n_gpus]
            faster = [pair for pair in larger if pair[0] < step_s]
            upgrades = self._faster[key] = faster, min([pair[0] for pair in faster], default=inf)
        return upgrades


@dataclass(frozen=True, slots=True)
class OptionTable:
    """Cache of options by kind of request and by the configurations that a job has run."""

    catalogue: Catalogue
    freedom: Freedom
    _known: dict[tuple[_Request, frozenset[Configuration]], Options] = field(default_factory=dict)
    _of_job: dict[int, _Known] = field(default_factory=dict)
    _menus: dict[_Request, "_Menu"] = field(default_factory=dict)

    def of(self, job: JobView) -> Options:
        """Return the options of a job, at least one."""
        known, held = self._of_job.get(job.index), job.allocation
        # The options of a job change with its generation, and once it has run its present configuration.
        if known is not None and known[0] == job.generation and known[1]:
            return known[2]
        has_run = held is not None and job.has_observed(held.configuration)
        if known is None or known[:2] != (job.generation, has_run):
            known = self._of_job[job.index] = job.generation, has_run, self._of_kind(job)
        return known[2]

    def _of_kind(self, job: JobView) -> Options:
        learned = frozenset([item for item in job.observed if not item.is_known])
        key = (self._request(job.spec, job.spec.is_guaranteed), learned)
        options = self._known.get(key)
        if options is None:
            options = self._known[key] = self._look_up(job)
        return options

    def _look_up(self, job: JobView) -> Options:
        menu, observed = self._menu(job.spec), job.observed
        step_s = {item: item.predicted_iter_time_s for item in menu.items}
        step_s |= {item: job.step_s(item) for item in observed if item in step_s}
        if job.spec.is_guaranteed:
            step_s = {item: time_s for item, time_s in step_s.items() if job.guarantees(item)}
        return Options(menu.best(step_s, by_room=self.freedom.resources), step_s)

    def _menu(self, spec: JobSpec) -> "_Menu":
        key = self._request(spec)
        menu = self._menus.get(key)
        if menu is None:
            menu = self._menus[key] = _Menu(allowed(self.catalogue, spec, self.freedom))
        return menu

    def _request(self, spec: JobSpec, is_guaranteed: bool = False) -> _Request:
        """Return the parts of a request on which its options depend."""
        if self.freedom == FULL_FREEDOM and not is_guaranteed:
            return (spec.workload,)
        return spec.workload, spec.plan, spec.n_gpus, spec.n_cpus, is_guaranteed


class _Menu:
    """Configurations of a kind of request by placement, and for each placement the smaller ones inside it."""

    def __init__(self, items: tuple[Configuration, ...]) -> None:
        self.items = items
        groups: dict[tuple[tuple[int, ...], tuple[str, ...]], list[Configuration]] = {}
        for item in items:
            groups.setdefault((item.counts, item.types_by_count), []).append(item)
        self._groups = list(groups.values())
        # A placement is part of another one if it has no more devices on any node, of the same types.
        firsts = [group[0] for group in self._groups]
        self._parts = [
            [
                rank
                for rank, part in enumerate(firsts)
                if part is not whole
                and part.n_nodes <= whole.n_nodes
                and all(few <= many for few, many in zip(part.counts, whole.counts, strict=False))
                and all(a in ("", b) for a, b in zip(part.types_by_count, whole.types_by_count, strict=False))
            ]
            for whole in firsts
        ]

    def best(self, step_s: Mapping[Configuration, float], *, by_room: bool) -> tuple[Configuration, ...]:
        """Return the fastest configuration with a time [s] on each placement, in the order of placements.

        ``by_room`` leaves out each configuration that another one dominates: one that is no slower, on a part
        of the same placement, with no more CPU threads and host memory per device.
        """
        groups = ([item for item in group if item in step_s] for group in self._groups)
        fastest = [min(group, key=step_s.__getitem__) if group else None for group in groups]
        kept = []
        for item, ranks in zip(fastest, self._parts, strict=True):
            if item is not None:
                smaller = [fastest[rank] for rank in ranks] if by_room else []
                is_dominated = any(
                    part
                    and step_s[part] <= step_s[item]
                    and part.cpu_threads <= item.cpu_threads
                    and part.host_memory_bytes_per_gpu <= item.host_memory_bytes_per_gpu
                    for part in smaller
                )
                if not is_dominated:
                    kept.append(item)
        return tuple(kept)


# --- Sensitivity curves ---


@dataclass(frozen=True, slots=True)
class Step:
    """A size that a job could change to: change of speed per device, number of devices, configurations."""

    slope: float
    n_gpus: int
    items: tuple[Configuration, ...]


class Curve:
    """Sensitivity curve: speeds relative to the request, and the steps up and down from each."""

    __slots__ = ("_by_speed", "_down", "_options", "_up", "least_gpus", "speeds", "starts")

    def __init__(
        self,
        job: JobView,
        items: Iterable[Configuration],
        reference: Configuration,
        *,
        by_speed: bool = False,
        held: Configuration | None = None,
    ) -> None:
        self._by_speed = by_speed
        requested_s = job.step_s(reference)
        self.speeds = {item: requested_s / job.step_s(item) for item in items}
        is_guaranteed = job.spec.is_guaranteed
        sure = [item for item in self.speeds if job.guarantees(item)] if is_guaranteed else list(self.speeds)
        self._options = self._worth_it(sure)
        if held is not None:  # no option: a resilient job may hold what the policy would not give it
            self.speeds[held] = requested_s / job.step_s(held)
        self.least_gpus = min(item.n_gpus for item in self._options) if is_guaranteed else 0
        self.starts = self._steps(self._options, 0, 0.0)
        if is_guaranteed:
            self.starts = tuple(sorted(self.starts, key=lambda step: step.n_gpus))
        self._up: dict[Configuration, tuple[Step, ...]] = {}
        self._down: dict[Configuration, tuple[Step, ...]] = {}

    def up(self, item: Configuration) -> tuple[Step, ...]:
        """Return the larger sizes on which the job is faster, the steepest first."""
        if item not in self._up:
            speed = self.speeds[item]
            better = [o for o in self._options if o.n_gpus > item.n_gpus and self.speeds[o] > speed]
            self._up[item] = self._steps(better, item.n_gpus, speed)
        return self._up[item]

    def down(self, item: Configuration) -> tuple[Step, ...]:
        """Return the smaller sizes down to the minimum, the one that costs least per device first."""
        if item not in self._down:
            speed = self.speeds[item]
            smaller = [o for o in self._options if o.n_gpus < item.n_gpus]
            steps = self._steps(smaller, item.n_gpus, speed)
            if not self.least_gpus:
                steps = (*steps, Step(speed / item.n_gpus, 0, ()))
            self._down[item] = tuple(sorted(steps, key=lambda step: (step.slope, -step.n_gpus)))
        return self._down[item]

    def _steps(self, items: Iterable[Configuration], n_gpus: int, speed: float) -> tuple[Step, ...]:
        sizes: dict[int, list[Configuration]] = {}
        for item in items:
            sizes.setdefault(item.n_gpus, []).append(item)
        steps = []
        for size, group in sizes.items():
            group.sort(key=lambda item: (item.n_nodes, -self.speeds[item], item.cpu_threads))
            if self._by_speed:
                group.sort(key=lambda item: -self.speeds[item])
            slope = (max(self.speeds[item] for item in group) - speed) / (size - n_gpus)
            steps.append(Step(slope, size, tuple(group)))
        return tuple(sorted(steps, key=lambda step: (-step.slope, step.n_gpus)))

    def _worth_it(self, items: Iterable[Configuration]) -> list[Configuration]:
        """Leave out configurations for which a faster one on the same shape needs no more."""
        shapes: dict[object, list[Configuration]] = {}
        for item in sorted(items, key=lambda item: (-self.speeds[item], item.cpu_threads)):
            others = shapes.setdefault((item.counts, item.types_by_count), [])
            if all(
                item.cpu_threads < other.cpu_threads
                or item.host_memory_bytes_per_gpu < other.host_memory_bytes_per_gpu
                for other in others
            ):
                others.append(item)
        return [item for others in shapes.values() for item in others]


@dataclass(frozen=True, slots=True)
class Curves:
    """Cache of curves by kind of request and by the configurations that a job has run."""

    catalogue: Catalogue
    freedom: Freedom
    by_speed: bool = False
    _of_kind: dict[object, Curve] = field(default_factory=dict)
    _of_job: dict[str, tuple[object, Curve]] = field(default_factory=dict)

    def of(self, job: JobView) -> Curve:
        """Return the curve of a job by what it has run so far."""
        held = job.allocation
        moment = (job.generation, held is not None and job.has_observed(held.configuration))
        known = self._of_job.get(job.spec.job_id)
        if known is None or known[0] != moment:
            known = self._of_job[job.spec.job_id] = (moment, self._look_up(job))
        return known[1]

    def _look_up(self, job: JobView) -> Curve:
        spec = job.spec
        items = allowed(self.catalogue, spec, self.freedom)
        observed = frozenset(item for item in items if job.has_observed(item))
        held = None if job.allocation is None else job.allocation.configuration
        foreign = None if held in items else held
        is_observed = foreign is not None and job.has_observed(foreign)
        key = (spec.workload, spec.plan, spec.n_gpus, spec.is_guaranteed, observed, foreign, is_observed)
        if key not in self._of_kind:
            reference = self.catalogue.requested(spec)
            self._of_kind[key] = Curve(job, items, reference, by_speed=self.by_speed, held=foreign)
        return self._of_kind[key]


# --- Decisions ---


class Task:
    """A job within one decision: its curve, its allocation, and what the gate and its age allow.

    ``is_open``: the gate allows a reconfiguration for its own gain. ``yields``: best-effort jobs may take
    devices from it. ``is_starving``: it is past the age limit.
    """

    __slots__ = ("curve", "held", "index", "is_guaranteed", "is_open", "is_starving", "job", "yields")

    def __init__(
        self, job: JobView, curve: Curve, *, is_open: bool, yields: bool = True, is_starving: bool = False
    ) -> None:
        self.job = job
        self.curve = curve
        self.index = job.index
        self.is_guaranteed = job.spec.is_guaranteed
        self.is_open = is_open
        self.yields = yields
        self.is_starving = is_starving
        held = job.allocation
        self.held: Fit | None = None if held is None else (held.configuration, held.nodes[::-1])


class Draft:
    """Tentative allocations of all jobs; copied to try out victims.

    Invariant: ``free`` and ``slots`` together are all devices of the cluster.
    """

    __slots__ = ("free", "slots")

    def __init__(self, free: FreeResources, slots: dict[Task, Fit]) -> None:
        self.free = free
        self.slots = slots

    def place(self, task: Task, fit: Fit) -> None:
        """Place a job that holds nothing."""
        self.free.take(*fit)
        self.slots[task] = fit

    def remove(self, task: Task) -> Fit | None:
        """Remove a job and return what it held."""
        fit = self.slots.pop(task, None)
        if fit is not None:
            self.free.give(*fit)
        return fit

    def start(self, task: Task) -> bool:
        """Place a job on free devices at the steepest step of its curve that fits, if any does."""
        for step in task.curve.starts:
            fit = self.free.first_fit(step.items) if step.n_gpus <= self.free.n_gpus else None
            if fit is not None:
                self.place(task, fit)
                return True
        return False

    def make_room(self, task: Task, rules: "Morphling") -> bool:
        """Start a job by shrinking the jobs with the lowest slopes; change nothing if that is not enough."""
        takes_all = task.is_guaranteed or (task.is_starving and rules.starving_takes)
        ignores_gates = task.is_guaranteed or (task.is_starving and rules.starving_passes_gates)
        victims = [
            other
            for other, fit in self.slots.items()
            if fit[0].n_gpus > other.curve.least_gpus
            and (ignores_gates or other.yields)
            and (rules.old_yield or task.is_guaranteed or not other.is_starving)
        ]
        # Free devices with all that victims could release; a larger step needs no trial.
        most = self.free.n_gpus
        most += sum(self.slots[other][0].n_gpus - other.curve.least_gpus for other in victims)
        steps = task.curve.starts if rules.forces_smaller else task.curve.starts[:1]
        for step in steps:
            limit = inf if takes_all else step.slope
            if step.n_gpus <= most and self._force(task, step, victims, limit, gives_back=rules.gives_back):
                return True
        return False

    def _force(
        self, task: Task, wanted: Step, victims: Iterable[Task], limit: float, *, gives_back: bool
    ) -> bool:
        """Shrink jobs with a slope below ``limit``, lowest first, until a step fits, or change nothing."""
        # Tried on a copy: enough free devices in total can still be on too many nodes for every shape.
        trial = Draft(self.free.copy(), self.slots.copy())
        shrunk: dict[Task, None] = {}
        while trial.free.first_fit(wanted.items) is None:
            victim = trial.shrink_lowest(victims, limit)
            if victim is None:
                return False
            shrunk[victim] = None
        if gives_back:
            trial.spare(shrunk, self.slots, wanted.items)
        fit = trial.free.first_fit(wanted.items)
        if fit is None:
            return False
        trial.place(task, fit)
        self.free, self.slots = trial.free, trial.slots
        return True

    def shrink_lowest(self, victims: Iterable[Task], limit: float) -> Task | None:
        """Carry out the cheapest step down of any victim below a slope and return the victim, or None.

        Equal slopes: the job submitted last shrinks first.
        """
        steps = [
            (step.slope, -task.index, order, task, step)
            for task in victims
            if task in self.slots
            for order, step in enumerate(task.curve.down(self.slots[task][0]))
            if step.slope < limit
        ]
        for _, _, _, task, step in sorted(steps, key=lambda entry: entry[:3]):
            fit = self.slots[task]
            self.free.give(*fit)
            smaller = self.free.first_fit(step.items)
            if smaller is not None or not step.items:
                del self.slots[task]
                if smaller is not None:
                    self.place(task, smaller)
                return task
            self.free.take(*fit)
        return None

    def spare(
        self,
        shrunk: Iterable[Task],
        before: dict[Task, Fit],
        items: tuple[Configuration, ...],
    ) -> None:
        """Give back what was taken from each job, the last one first, if the new job still fits."""
        for task in reversed(list(shrunk)):
            smaller = self.remove(task)
            if self.free.take_if_free(*before[task]):
                if self.free.first_fit(items) is not None:
                    self.slots[task] = before[task]
                    continue
                self.free.give(*before[task])
            if smaller is not None:
                self.place(task, smaller)

    def grow(self) -> None:
        """Hand free devices to the steepest curves, one step at a time, until no job gains."""
        while self.free.n_gpus:
            best: tuple[float, Task, Fit] | None = None
            for task, fit in self.slots.items():
                # A job that changes in this decision restarts anyway, so it has no gate to pass.
                if fit is not task.held or task.is_open:
                    larger = self._larger(task, fit, 0.0 if best is None else best[0])
                    best = best if larger is None else (larger[0], task, larger[1])
            if best is None:
                return
            self.remove(best[1])
            self.place(best[1], best[2])

    def _larger(self, task: Task, fit: Fit, above: float) -> tuple[float, Fit] | None:
        """Return the first step up, steeper than ``above``, that fits once a job has released its devices."""
        most = self.free.n_gpus + fit[0].n_gpus
        steps = [step for step in task.curve.up(fit[0]) if above < step.slope and step.n_gpus <= most]
        if not steps:
            return None
        self.free.give(*fit)
        result = None
        for step in steps:
            larger = self.free.first_fit(step.items)
            if larger is not None:
                result = (step.slope, larger)
                break
        self.free.take(*fit)
        return result

    def decision(self, tasks: Iterable[Task], wake_up_s: float) -> Decision:
        """Return the changes that lead from the present allocations to the draft."""
        changes: dict[str, Allocation | None] = {}
        for task in tasks:
            fit = self.slots.get(task)
            if fit != task.held:
                changes[task.job.spec.job_id] = None if fit is None else fit[0].on(fit[1])
        return Decision(changes, wake_up_s if wake_up_s < inf else None)


@dataclass(frozen=True, slots=True)
class RulesState:
    """State between decisions; ``own_changes`` counts the reconfigurations of each job for its own gain."""

    curves: Curves
    placements: PlacementCache
    own_changes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Morphling:
    """Choose GPUs and plans together by the five rules of the paper.

    Parameters
    ----------
    gate_share
        Least share of its time with GPUs that a running job must have left after its restarts, the next one
        included.
    age_limit_s
        Age from which a waiting job starves [s].
    starving_takes
        True if a starving job takes GPUs from every job with a lower slope, False if it only moves up the
        queue.
    age_since
        Start of the age of a job: its submission, or when it last lost its GPUs.
    starving_order
        Order of starving jobs.
    forces_smaller
        True if GPUs are taken for smaller sizes of a job too, False if for the steepest alone.
    gate_counts
        N of the gate: changes for the job's own gain, or all restarts.
    gate_time
        T of the gate: time with GPUs, or time with progress.
    victim_counts
        True if the gate of a job from which others take GPUs counts that change.
    starving_passes_gates
        True if starving jobs take GPUs from jobs whose gate is closed.
    old_yield
        True if jobs past the age limit yield to best-effort jobs.
    gives_back
        True if jobs get back GPUs that were taken from them and are not needed.
    restarts_stopped
        True if stopped jobs may start again in the same decision.
    shape_order
        Order in which shapes of one size are tried.
    """

    freedom: Freedom = FULL_FREEDOM
    gate_share: float = 0.97
    age_limit_s: float = 3600.0
    starving_takes: bool = True
    age_since: Literal["submission", "waiting"] = "submission"
    starving_order: Literal["age", "slope"] = "age"
    forces_smaller: bool = True
    gate_counts: Literal["own", "all"] = "own"
    gate_time: Literal["held", "progress"] = "held"
    victim_counts: bool = True
    starving_passes_gates: bool = False
    old_yield: bool = True
    gives_back: bool = True
    restarts_stopped: bool = True
    shape_order: Literal["nodes", "speed"] = "nodes"
    name: str = "morphling"
    title: str = "Morphling"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = True
    references: tuple[str, ...] = (
        "Morphling: Exploiting Job Reconfigurability for Deep Learning Cluster Scheduling. MLSys 2025.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> RulesState:
        """Return an empty table of curves."""
        fitting = catalogue.on(cluster)
        curves = Curves(fitting, self.freedom, by_speed=self.shape_order == "speed")
        return RulesState(curves, PlacementCache.on(cluster, fitting))

    def decide(self, view: ClusterView, state: RulesState) -> tuple[Decision, RulesState]:
        """Start waiting jobs, at the cost of others where allowed, and hand out the free devices."""
        waiting, running = (
            [self._task(job, view, state) for job in jobs] for jobs in (view.pending, view.running)
        )
        held = {task: task.held for task in running if task.held is not None}
        draft = Draft(state.placements.free_resources(view), held)
        blocked: set[tuple[Curve, bool]] = set()  # kinds of jobs that cannot start, so need no second try
        for task in sorted(waiting, key=self.rank):
            kind = task.curve, task.is_starving
            if kind not in blocked and not (draft.start(task) or draft.make_room(task, self)):
                blocked.add(kind)
        if self.restarts_stopped:
            for task in sorted((task for task in running if task not in draft.slots), key=self.rank):
                draft.start(task)
        draft.grow()
        # A change counts as the job's own if it makes the job faster; shrinking by others does not count.
        gained = [
            task.job.spec.job_id
            for task in running
            if task.held is not None
            and (fit := draft.slots.get(task, task.held)) != task.held
            and task.curve.speeds[fit[0]] > task.curve.speeds[task.held[0]]
        ]
        if gained:
            before = state.own_changes
            counted = {job_id: before.get(job_id, 0) + 1 for job_id in gained}
            state = replace(state, own_changes={**before, **counted})
        return draft.decision([*running, *waiting], self._wake_up_s(draft, waiting, view, state)), state

    def _task(self, job: JobView, view: ClusterView, state: RulesState) -> Task:
        return Task(
            job,
            state.curves.of(job),
            is_open=self.opens_s(job, view, state) <= view.time_s,
            yields=self.opens_s(job, view, state, n_more=int(self.victim_counts)) <= view.time_s,
            is_starving=self.starves_from_s(job, view) <= view.time_s,
        )

    def starves_from_s(self, job: JobView, view: ClusterView) -> float:
        """Return when a job that gets no GPUs reaches the age limit [s]."""
        if self.age_since == "submission":
            return job.spec.submit_time_s + self.age_limit_s
        since_s = view.time_s if job.allocation is not None else job.waiting_since_s
        return since_s + self.age_limit_s

    def rank(self, task: Task) -> tuple[bool, bool, float, float, int]:
        """Return the sorting key of a job: guaranteed jobs first, then starving ones, then by slope."""
        job, by_age = task.job, task.is_starving and self.starving_order == "age"
        # A job that has GPUs does not wait, and a NaN in its key would leave the order undefined.
        waiting_since_s = inf if job.allocation is not None else job.waiting_since_s
        since_s = job.spec.submit_time_s if self.age_since == "submission" else waiting_since_s
        slope = task.curve.starts[0].slope
        return (
            not task.is_guaranteed, not task.is_starving, since_s if by_age else 0.0, -slope, task.index
        )  # fmt: skip

    def opens_s(self, job: JobView, view: ClusterView, state: RulesState, n_more: int = 1) -> float:
        """Return the time at which the gate of a job opens if it keeps its GPUs until then [s].

        The gate is open while ``(T - N delay) / T >= gate_share``; N is the number of changes so far plus
        ``n_more``.
        """
        if job.first_start_s is None:
            return view.time_s
        is_own = self.gate_counts == "own"
        n_before = state.own_changes.get(job.spec.job_id, 0) if is_own else job.restart_count
        lost_s = (n_before + n_more) * view.restart_delay_s
        spent_s = job.running_time_s + (job.restart_time_s if self.gate_time == "held" else 0.0)
        missing_s = lost_s - (1.0 - self.gate_share) * spent_s
        return (
            view.time_s if missing_s <= 1e-9 * spent_s else view.time_s + missing_s / (1.0 - self.gate_share)
        )

    def _wake_up_s(
        self, draft: Draft, waiting: Iterable[Task], view: ClusterView, state: RulesState
    ) -> float:
        """Return the time at which the next gate opens or the next job starts to starve [s], or infinity."""
        # A change of this decision is already counted in `own_changes`, but not yet in the restarts.
        is_counted = self.gate_counts == "own"
        moments = [
            self.opens_s(task.job, view, state, 1 if is_counted or fit == task.held else 2)
            for task, fit in draft.slots.items()
        ]
        moments += [self.starves_from_s(task.job, view) for task in waiting if task not in draft.slots]
        return min((moment for moment in moments if moment > view.time_s), default=inf)


POLICIES = (
    Morphling(),
    *(
        Morphling(freedom, name=f"morphling{suffix}", title=f"Morphling ({title})")
        for suffix, (freedom, title) in LESS.items()
    ),
)
"""The policy and its ablations."""
