"""Morphling as published: five rules on sensitivity curves, and where they had to be read in one way.

A curve is the speed of a job over its speed as requested, by devices, on its best plan for each shape.

Reading: the slope of a waiting job is its gain a device from nothing to the size at which that is steepest,
of a guaranteed job to its minimum; that is what it starts with, and rule 4 makes it larger.
Reading: a running job's slope is what it would lose a device at that smaller size which costs least.
Reading: the steps go from size to size, because not every number of devices has a plan.
Reading: age is the time that a job has waited since it last ran; the paper names no limit, here it is an
hour. Starving jobs of a class go by it, oldest first.
Reading: fewest nodes first means the fewest for one number of devices, then the fastest shape; a share goes
to the node that it fills best. A plan with fewer CPU threads or less host memory is taken where a node lacks
what the faster one wants.
Reading: best-effort jobs take from jobs whose slope is lower and whose gate is open; the minimum of a
best-effort job is nothing, so it may be stopped. What turns out not to be needed is given back.
Reading: stopped jobs may start again in the same decision on what is free, without taking from others.
Reading: of the gate, T is the time with devices so far, restarts included; a job that has never run, or that
changes in this decision already, has none to pass. A decision follows when a gate opens or a job starts to
starve.
Reading: a plan that the job has run counts with the time that was observed; a guarantee rests on known times
alone, so the minimum of a guaranteed job is its request until more is known.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from makespan.hardware import ClusterSpec
from makespan.policies._placing import Fit, Places, Room
from makespan.policies.morphling._options import FULL_FREEDOM, LESS, Freedom, allowed
from makespan.sim import Allocation, Catalogue, ClusterView, Configuration, Decision, JobView

__all__ = ["POLICIES", "Curve", "Curves", "Draft", "Morphling", "Step", "Task"]


@dataclass(frozen=True, slots=True)
class Step:
    """A size that a job could change to, the change of its speed a device, and the shapes of that size."""

    slope: float
    n_gpus: int
    items: tuple[Configuration, ...]


class Curve:
    """Sensitivity curve: speeds relative to the request, and the steps up and down from each."""

    __slots__ = ("_down", "_options", "_up", "least_gpus", "speeds", "starts")

    def __init__(self, job: JobView, items: Iterable[Configuration], reference: Configuration) -> None:
        requested_s = job.step_s(reference)
        self.speeds = {item: requested_s / job.step_s(item) for item in items}
        is_guaranteed = job.spec.is_guaranteed
        sure = [item for item in self.speeds if job.assures(item)] if is_guaranteed else list(self.speeds)
        self._options = self._worth_it(sure)
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
        """Return the smaller sizes down to the minimum, the one that costs least a device first."""
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
            slope = (max(self.speeds[item] for item in group) - speed) / (size - n_gpus)
            steps.append(Step(slope, size, tuple(group)))
        return tuple(sorted(steps, key=lambda step: (-step.slope, step.n_gpus)))

    def _worth_it(self, items: Iterable[Configuration]) -> list[Configuration]:
        """Leave out what needs no less than a faster configuration on the same shape."""
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
    """Curves by what they depend on: a kind of request, and what a job of it has run."""

    catalogue: Catalogue
    freedom: Freedom
    _of_kind: dict[object, Curve] = field(default_factory=dict)
    _of_job: dict[str, tuple[object, Curve]] = field(default_factory=dict)

    def of(self, job: JobView) -> Curve:
        """Return the curve of a job by what is known of it now."""
        held = job.allocation
        moment = (job.generation, held is not None and job.has_run(held.configuration))
        found = self._of_job.get(job.spec.job_id)
        if found is None or found[0] != moment:
            found = self._of_job[job.spec.job_id] = (moment, self._look_up(job))
        return found[1]

    def _look_up(self, job: JobView) -> Curve:
        spec = job.spec
        items = allowed(self.catalogue, spec, self.freedom)
        observed = frozenset(item for item in items if job.has_run(item))
        key = (spec.workload, spec.plan, spec.n_gpus, spec.is_guaranteed, observed)
        if key not in self._of_kind:
            self._of_kind[key] = Curve(job, items, self.catalogue.requested(spec))
        return self._of_kind[key]


class Task:
    """A job in one decision: its curve, what it holds, and whether its gate is open."""

    __slots__ = ("curve", "held", "index", "is_guaranteed", "is_open", "job")

    def __init__(self, job: JobView, curve: Curve, *, is_open: bool) -> None:
        self.job = job
        self.curve = curve
        self.index = job.index
        self.is_guaranteed = job.spec.is_guaranteed
        self.is_open = is_open
        held = job.allocation
        self.held: Fit | None = None if held is None else (held.configuration, held.nodes[::-1])


class Draft:
    """What every job would hold; copied where victims are tried."""

    __slots__ = ("room", "slots")

    def __init__(self, room: Room, slots: dict[Task, Fit]) -> None:
        self.room = room
        self.slots = slots

    def place(self, task: Task, fit: Fit) -> None:
        """Let a job that has nothing hold something."""
        self.room.take(*fit)
        self.slots[task] = fit

    def remove(self, task: Task) -> Fit | None:
        """Take everything from a job and return what it was."""
        fit = self.slots.pop(task, None)
        if fit is not None:
            self.room.give(*fit)
        return fit

    def start(self, task: Task) -> bool:
        """Place a job on what is free at the steepest step of its curve that fits, if any does."""
        for step in task.curve.starts:
            found = self.room.first_fit(step.items) if step.n_gpus <= self.room.n_gpus else None
            if found is not None:
                self.place(task, found)
                return True
        return False

    def make_room(self, task: Task) -> bool:
        """Start a job at its first step by shrinking the lowest slopes; change nothing if in vain."""
        wanted = task.curve.starts[0]
        limit = inf if task.is_guaranteed else wanted.slope
        victims = [
            other
            for other, fit in self.slots.items()
            if (task.is_guaranteed or other.is_open) and fit[0].n_gpus > other.curve.least_gpus
        ]
        most = sum(self.slots[other][0].n_gpus - other.curve.least_gpus for other in victims)
        if self.room.n_gpus + most < wanted.n_gpus:
            return False
        trial = Draft(self.room.copy(), self.slots.copy())
        shrunk: dict[Task, None] = {}
        while trial.room.first_fit(wanted.items) is None:
            victim = trial.shrink_lowest(victims, limit)
            if victim is None:
                return False
            shrunk[victim] = None
        trial.spare(shrunk, self.slots, wanted.items)
        found = trial.room.first_fit(wanted.items)
        if found is None:
            return False
        trial.place(task, found)
        self.room, self.slots = trial.room, trial.slots
        return True

    def shrink_lowest(self, victims: Iterable[Task], limit: float) -> Task | None:
        """Take the cheapest step down of all victims below a slope; return whose it was."""
        steps = [
            (step.slope, -task.index, order, task, step)
            for task in victims
            if task in self.slots
            for order, step in enumerate(task.curve.down(self.slots[task][0]))
            if step.slope < limit
        ]
        for _, _, _, task, step in sorted(steps, key=lambda entry: entry[:3]):
            fit = self.slots[task]
            self.room.give(*fit)
            smaller = self.room.first_fit(step.items)
            if smaller is not None or not step.items:
                del self.slots[task]
                if smaller is not None:
                    self.place(task, smaller)
                return task
            self.room.take(*fit)
        return None

    def spare(
        self,
        shrunk: Iterable[Task],
        before: dict[Task, Fit],
        items: tuple[Configuration, ...],
    ) -> None:
        """Give back what was taken from jobs, the last first, where a newcomer fits all the same."""
        for task in reversed(list(shrunk)):
            smaller = self.remove(task)
            if self.room.take_if_free(*before[task]):
                if self.room.first_fit(items) is not None:
                    self.slots[task] = before[task]
                    continue
                self.room.give(*before[task])
            if smaller is not None:
                self.place(task, smaller)

    def grow(self) -> None:
        """Hand free devices to the steepest curves, one step at a time, until no job gains."""
        while self.room.n_gpus:
            best: tuple[float, Task, Fit] | None = None
            for task, fit in self.slots.items():
                if fit is not task.held or task.is_open:
                    found = self._larger(task, fit, 0.0 if best is None else best[0])
                    best = best if found is None else (found[0], task, found[1])
            if best is None:
                return
            self.remove(best[1])
            self.place(best[1], best[2])

    def _larger(self, task: Task, fit: Fit, above: float) -> tuple[float, Fit] | None:
        """Return the first step up, steeper than a bound, that fits once a job gives back what it holds."""
        most = self.room.n_gpus + fit[0].n_gpus
        steps = [step for step in task.curve.up(fit[0]) if above < step.slope and step.n_gpus <= most]
        if not steps:
            return None
        self.room.give(*fit)
        found = None
        for step in steps:
            larger = self.room.first_fit(step.items)
            if larger is not None:
                found = (step.slope, larger)
                break
        self.room.take(*fit)
        return found

    def decision(self, tasks: Iterable[Task], wake_up_s: float) -> Decision:
        """Return what must change for the jobs to hold what the draft says."""
        changes: dict[str, Allocation | None] = {}
        for task in tasks:
            fit = self.slots.get(task)
            if fit != task.held:
                changes[task.job.spec.job_id] = None if fit is None else fit[0].on(fit[1])
        return Decision(changes, wake_up_s if wake_up_s < inf else None)


@dataclass(frozen=True, slots=True)
class RulesState:
    """Curves, and where what fits."""

    curves: Curves
    places: Places


@dataclass(frozen=True, slots=True)
class Morphling:
    """Choose devices and plans together by the five rules of the paper.

    Parameters
    ----------
    gate_share
        Share of its time with devices that a running job must not spend on restarts, the next one included.
    age_limit_s
        Waiting time from which a job starves [s].
    """

    freedom: Freedom = FULL_FREEDOM
    gate_share: float = 0.97
    age_limit_s: float = 3600.0
    name: str = "morphling"
    title: str = "Morphling"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = True
    references: tuple[str, ...] = (
        "Morphling: Exploiting Job Reconfigurability for Deep Learning Cluster Scheduling. MLSys 2025.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> RulesState:
        """Return no curves yet."""
        fitting = catalogue.on(cluster)
        return RulesState(Curves(fitting, self.freedom), Places.on(cluster, fitting))

    def decide(self, view: ClusterView, state: RulesState) -> tuple[Decision, RulesState]:
        """Start waiting jobs, at the cost of others where they may, and hand out what is left."""
        waiting, running = (
            [Task(job, state.curves.of(job), is_open=self.opens_s(job, view) <= view.time_s) for job in jobs]
            for jobs in (view.pending, view.running)
        )
        held = {task: task.held for task in running if task.held is not None}
        draft = Draft(state.places.room(view), held)
        refused: set[Curve] = set()
        for task in sorted(waiting, key=lambda task: self.rank(task, view.time_s)):
            if task.curve not in refused and not (draft.start(task) or draft.make_room(task)):
                refused.add(task.curve)
        stopped = [task for task in running if task not in draft.slots]
        for task in sorted(stopped, key=lambda task: self.rank(task, view.time_s)):
            draft.start(task)
        draft.grow()
        return draft.decision([*running, *waiting], self._wake_up_s(draft, waiting, view)), state

    def rank(self, task: Task, now_s: float) -> tuple[bool, bool, float, float, int]:
        """Order in which jobs are served: guaranteed first, then starving, then steep ones."""
        job, slope = task.job, task.curve.starts[0].slope
        since_s = now_s if job.allocation is not None else job.waiting_since_s
        is_starving = now_s - since_s >= self.age_limit_s
        return not task.is_guaranteed, not is_starving, since_s if is_starving else 0.0, -slope, task.index

    def opens_s(self, job: JobView, view: ClusterView, n_changes: int = 1) -> float:
        """When ``(T - N delay) / T`` of a job reaches the gate if it keeps its devices until then [s]."""
        if job.first_start_s is None:
            return view.time_s
        lost_s = (job.restart_count + n_changes) * view.restart_delay_s
        spent_s = job.running_time_s + job.restart_time_s
        missing_s = lost_s - (1.0 - self.gate_share) * spent_s
        return (
            view.time_s if missing_s <= 1e-9 * spent_s else view.time_s + missing_s / (1.0 - self.gate_share)
        )

    def _wake_up_s(self, draft: Draft, waiting: Iterable[Task], view: ClusterView) -> float:
        """When the next gate opens or the next job starts to starve [s]; infinity if never."""
        moments = [
            self.opens_s(task.job, view, 1 if fit == task.held else 2) for task, fit in draft.slots.items()
        ]
        moments += [
            task.job.waiting_since_s + self.age_limit_s for task in waiting if task not in draft.slots
        ]
        return min((moment for moment in moments if moment > view.time_s), default=inf)


POLICIES = (
    Morphling(),
    *(
        Morphling(freedom, name=f"morphling{suffix}", title=f"Morphling ({title})")
        for suffix, (freedom, title) in LESS.items()
    ),
)
"""The policy, and what it loses with less to choose."""
