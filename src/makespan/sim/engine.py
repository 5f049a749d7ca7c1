"""Event-driven engine: ask a policy, check its decision, apply it, and record what happens.

Job semantics follow the simulator released with Morphling, except that progress is conserved: a job makes
progress while, and only while, it holds devices. Invariants:

- A decision is checked as a whole before any part of it is applied; a rejected one changes nothing.
- At one instant node events come first, then completions, arrivals, the decision, and last the speeds of
  guests, so that a policy sees every event of the instant and guests are rated once.
- Releasing an allocation and rating a guest raise the generation of the job. Queued completions carry the
  generation for which they hold; outdated ones are skipped, not removed from the queue.
"""

import ctypes
import math
import re
import reprlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import pandas as pd

from makespan.arguments import typed
from makespan.errors import InputError, MakespanError, failed_at, short_path
from makespan.hardware import ClusterSpec
from makespan.notebook import Display, Displayed, Span, schedule_svg
from makespan.sim.catalogue import Allocation, Catalogue, Configuration, restart_cost
from makespan.sim.interruptions import Interruptions, Loss, LossOutcome
from makespan.sim.recovery import Recovery
from makespan.sim.scenario import Scenario, check_jobs
from makespan.sim.sharing import memory_by_device, oversubscribed_bytes
from makespan.sim.state import (
    CheckpointingJobView,
    ClusterState,
    ClusterView,
    Event,
    EventKind,
    EventQueue,
    JobView,
    NodeEvent,
    NodeEventKind,
    Nodes,
    Observer,
    absent_nodes,
    ordered_node_events,
)
from makespan.sim.validator import Violation, validate_schedule
from makespan.tables import EVENTS, LOSSES, OUTCOMES, TableSchema
from makespan.units import US, format_bytes

# --- Time limit of a policy's calls ---

_TICKS = 8  # checks of a call until it counts as too long; more if `_MAX_TICK_S` bounds their distance
_MIN_TICK_S, _MAX_TICK_S = 0.001, 1.0
_RETRY_TICKS = 16  # ticks until a call that swallowed the exception is interrupted again


class DecisionTimeout(BaseException):
    """Raised inside a call that exceeds the limit; no ``except Exception`` of a policy swallows it."""


class Watch:
    """Interrupt calls that exceed a time limit, by a thread that checks the running call periodically.

    Unlike a signal, this works in every thread and does not conflict with other users of signals. Time in
    which the process is stopped does not count, as the thread is stopped too. Only Python code can be
    interrupted, not a C call that never returns.
    """

    def __init__(self, limit_s: float | None) -> None:
        if limit_s is not None and not (math.isfinite(limit_s) and limit_s >= 0):
            raise InputError(f"decision_limit_s is {limit_s!r}; expected a time in s, 0 or None for no limit")
        self.limit_s = limit_s
        self._number = 0
        self._is_open = self._is_interrupted = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watch":
        """Start to watch the calls of this thread."""
        if self.limit_s:
            # A new thread each time: threads do not survive a fork, and forking with one running warns.
            self._over = threading.Event()
            watched = threading.get_ident()
            self._thread = threading.Thread(
                target=self._check_calls, args=(watched, self.limit_s), name="makespan-watch", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the thread."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a function and return what it returns, or let `DecisionTimeout` through."""
        try:
            try:
                self._number += 1
                self._is_open = True
                return function(*arguments)
            finally:
                self._close()
        except DecisionTimeout:
            self._close()  # the exception may have arrived inside the first `_close`
            raise

    def _close(self) -> None:
        with self._lock:
            self._is_open = False
            was_interrupted, self._is_interrupted = self._is_interrupted, False
        if was_interrupted:
            # The exception may not have arrived yet: wait for it here, or it would hit later code.
            # Cancelling it instead would leave the interpreter checking for it, slower from then on. A thread
            # has one slot for such an exception, so raising it again replaces one that is still on its way.
            with suppress(DecisionTimeout):
                _raise_in(threading.get_ident(), DecisionTimeout)
                while True:
                    pass

    def _check_calls(self, watched: int, limit_s: float) -> None:
        tick_s = min(max(limit_s / _TICKS, _MIN_TICK_S), _MAX_TICK_S)
        n_ticks = max(round(limit_s / tick_s), 1)
        seen = ticks = 0
        while not self._over.wait(tick_s):
            ticks = ticks + 1 if self._is_open and self._number == seen else 0
            seen = self._number
            if ticks < n_ticks or (ticks - n_ticks) % _RETRY_TICKS:
                continue
            with self._lock:
                if self._is_open and self._number == seen:
                    self._is_interrupted = True
                    _raise_in(watched, DecisionTimeout)


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in a thread at its next Python instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


# --- Policies and decisions ---

_NAME = re.compile(r"\w[\w.+-]*", re.ASCII)
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
_MAX_SHOWN = 160


@dataclass(frozen=True, slots=True)
class Decision:
    """Changes that a policy wants, applied all at once, so that jobs may swap devices.

    Parameters
    ----------
    changes
        From job to its new allocation, or None to suspend it; all other jobs stay as they are.
    wake_up_s
        Ask again at this time [s], or in the first round after it, even if nothing happens before. Later
        decisions do not cancel it.
    """

    changes: Mapping[str, Allocation | None] = field(default_factory=dict)
    wake_up_s: float | None = None


class Policy(Protocol):
    """A scheduling policy: an immutable object with typed fields and one pure function.

    Between calls it keeps only the state that `decide` returns; a random generator must be part of that.
    """

    @property
    def name(self) -> str:
        """Key in the registry and in tables: lower case words joined by ``-``."""

    @property
    def title(self) -> str:
        """Name in figures."""

    @property
    def interval_s(self) -> float | None:
        """Length of a round [s]; None to be asked after every arrival, completion and node event."""

    @property
    def is_clairvoyant(self) -> bool:
        """Declaration that the policy reads `JobView.steps_left`, which raises for all others."""

    @property
    def honours_guarantees(self) -> bool:
        """Promise, enforced by the engine: no guaranteed job is suspended or slower than requested."""

    @property
    def references(self) -> tuple[str, ...]:
        """Literature that the policy implements."""

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Any:
        """Return the state before the first decision; None if the policy keeps none."""

    def decide(self, view: ClusterView, state: Any) -> tuple[Decision, Any]:
        """Return the decision and the new state; the view is valid during the call only."""


class PolicyError(MakespanError):
    """A policy is invalid, raised, timed out or returned no decision; names its file, and line if known."""


class InfeasibleDecision(PolicyError):
    """A decision cannot be carried out; nothing of it was applied, so ``view`` is as the policy saw it."""

    def __init__(self, message: str, view: ClusterView) -> None:
        super().__init__(message)
        self.view = view


class StalledError(MakespanError):
    """Deadlock: jobs are left, and no event is, or the policy never starts one or never lets one run."""


def _shown(value: object) -> str:
    text = _REPR.repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _file(policy: object) -> str:
    kind = policy if isinstance(policy, type) else type(policy)
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def policy_label(policy: Policy, line: int | None = None) -> str:
    """Return file, line if known, and name of a policy for messages; its class where no file is known."""
    file = _file(policy)
    where = short_path(file) if file else f"class {type(policy).__name__}"
    return f"{where}{f', line {line}' if line else ''}: policy {policy.name!r}"


def _is_time(value: object) -> bool:
    """Return whether a value is a number that a float can hold, and finite."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (
        lambda it: isinstance(it, str) and _NAME.fullmatch(it) is not None,
        "letters, digits, and '-', '_', '.' or '+' after the first",
    ),
    "title": (lambda it: isinstance(it, str) and it.isprintable() and bool(it), "a text"),
    "interval_s": (
        lambda it: it is None or (_is_time(it) and float(it) >= 0),
        "a finite time in s, or None",
    ),
    "is_clairvoyant": (lambda it: isinstance(it, bool), "True or False"),
    "honours_guarantees": (lambda it: isinstance(it, bool), "True or False"),
    "references": (
        lambda it: isinstance(it, tuple) and all(isinstance(text, str) for text in it),
        "a tuple of texts",
    ),
    "initial_state": (callable, "a method"),
    "decide": (callable, "a method"),
}


def check_policy(policy: Policy) -> None:
    """Check that an object is a policy: that it has every field and method of `Policy`, of the right kind.

    Raises
    ------
    PolicyError
        A field or method is missing or of the wrong kind.
    """
    kind = policy if isinstance(policy, type) else type(policy)
    where = f"{short_path(_file(policy))}: " if _file(policy) else ""
    if isinstance(policy, type):
        raise PolicyError(f"{where}{kind.__name__} is a class; expected an object of it, {kind.__name__}()")
    for name, (accepts, accepted) in _FIELDS.items():
        try:
            value = getattr(policy, name)
        except Exception as error:
            found_text = (
                f"{kind.__name__} is not a policy: it has no {name} ({type(error).__name__}: {error})"
            )
            raise PolicyError(f"{where}{found_text}; expected an object like makespan.sim.Policy") from error
        if not accepts(value):
            raise PolicyError(f"{where}{kind.__name__}.{name} is {_shown(value)}; expected {accepted}")


class Adviser:
    """Call a policy under the time limit, and check the type of its answers."""

    def __init__(self, policy: Policy, limit_s: float | None) -> None:
        self.policy = policy
        self.watch = Watch(limit_s)

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Any:
        """Return the policy's state before the first decision."""
        with self.watch:
            return self._call(self.policy.initial_state, None, cluster, catalogue)

    def decide(self, view: ClusterView, state: Any) -> tuple[Decision, Any]:
        """Return the policy's decision and its new state."""
        answer = self._call(self.policy.decide, view, view, state)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Decision)):
            accepted = "a pair of a Decision and what to remember, (Decision(changes), state)"
            raise self._infeasible(view, f"decide returned {_shown(answer)}; expected {accepted}")
        changes, wake_up_s = (getattr(answer[0], name) for name in ("changes", "wake_up_s"))
        if not isinstance(changes, Mapping):
            accepted = "a mapping from the name of a job to an Allocation or None, each job once"
            found = f"changes are {_shown(changes)}"
            raise self._infeasible(view, f"{found}; expected {accepted}")
        if wake_up_s is not None and not (_is_time(wake_up_s) and float(wake_up_s) > view.time_s):
            raise self._infeasible(
                view, f"wake_up_s is {_shown(wake_up_s)}; expected a time after {view.time_s} s"
            )
        return answer

    def _infeasible(self, view: ClusterView, problem: str) -> InfeasibleDecision:
        return InfeasibleDecision(f"{policy_label(self.policy)} at {view.time_s} s: {problem}", view)

    def _call(self, function: Callable[..., Any], view: ClusterView | None, *arguments: object) -> Any:
        try:
            return self.watch.call(function, *arguments)
        except (Exception, SystemExit, DecisionTimeout) as error:
            line = failed_at(error.__traceback__, _file(self.policy))
            at = "" if view is None else f" at {view.time_s} s"
            problem = f"{getattr(function, '__name__', 'the call')} raised {type(error).__name__}: {error}"
            if isinstance(error, DecisionTimeout):
                problem = (
                    f"interrupted by the decision limit, {self.watch.limit_s:g} s for one call; expected "
                    "a policy that decides sooner, or a higher limit (--decision-limit, decision_limit_s)"
                )
            raise PolicyError(f"{policy_label(self.policy, line)}{at}: {problem}") from error


def checked_changes(
    decision: Decision, state: ClusterState, policy: Policy
) -> list[tuple[JobView, Allocation | None]]:
    """Check a decision; return its effective changes: suspensions, then running jobs, then starts."""
    changes, view = [], state.view
    # Policies are user code and dataclasses check no types, so nothing is assumed of keys and values.
    entries: Iterable[tuple[object, object]] = decision.changes.items()
    for job_id, new in entries:
        job = state.find(job_id) if isinstance(job_id, str) else None
        if job is None:
            raise _error(view, policy, job_id, "is neither pending nor running; expected a job of the view")
        if new is not None:
            configuration, nodes, is_guest = (
                getattr(new, name, None) for name in ("configuration", "nodes", "is_guest")
            )
            is_whole = isinstance(nodes, tuple) and all(isinstance(node, Integral) for node in nodes)
            is_typed = is_whole and isinstance(configuration, Configuration) and isinstance(is_guest, bool)
            if not (isinstance(new, Allocation) and is_typed):
                accepted = "an Allocation of a Configuration on numbers of nodes, or None to suspend the job"
                raise _error(view, policy, job_id, f"cannot have {_shown(new)}; expected {accepted}")
            if not all(type(node) is int for node in new.nodes):
                # Numbers of NumPy would overflow in sets of nodes, which are the bits of a number.
                new = Allocation(new.configuration, tuple(map(int, new.nodes)), new.is_guest)
        if new == job.allocation:
            continue
        problem = _problem(job, new, view, policy)
        if problem:
            raise _error(view, policy, job_id, problem)
        changes.append((job, new))
    changes.sort(key=lambda change: (change[1] is not None, change[0].allocation is None, change[0].index))
    _check_resources(changes, view, state.nodes, policy)
    return changes


def _error(view: ClusterView, policy: Policy, job_id: object, problem: str) -> InfeasibleDecision:
    where = f"{policy_label(policy)} at {view.time_s} s: job {_shown(job_id)}"
    return InfeasibleDecision(f"{where}: {problem}", view)


def _problem(job: JobView, new: Allocation | None, view: ClusterView, policy: Policy) -> str:
    """Return why a job must not have an allocation even if all devices were free; empty if it may."""
    keeps = policy.honours_guarantees and job.spec.is_guaranteed
    if new is None:
        return "is guaranteed and must not be suspended" if keeps else ""
    chosen = new.configuration
    if new.is_guest and (keeps or not view.shares_devices):
        why = "it is guaranteed" if keeps else "this cluster does not share devices"
        return f"cannot be a guest: {why}"
    if not view.catalogue.accepts(chosen):
        return f"{_configuration_text(chosen)} is not in the catalogue of this cluster"
    if chosen.workload != job.spec.workload:
        return f"trains {job.spec.workload!r}, not {chosen.workload!r}"
    if keeps:
        reference = view.catalogue.requested(job.spec)
        if not job.guarantees(chosen):
            certainty = (
                ""
                if job.is_time_known(chosen) and job.is_time_known(reference)
                else ", by prediction only; expected a configuration whose time is known"
            )
            return (
                f"is guaranteed {job.step_s(reference)} s per step, but {_configuration_text(chosen)} takes "
                f"{job.step_s(chosen)} s{certainty}"
            )
    return ""


def _configuration_text(chosen: Configuration) -> str:
    return f"plan {chosen.plan!r} on {chosen.placement.text} with {chosen.cpu_threads} thread(s) per GPU"


def _check_resources(
    changes: list[tuple[JobView, Allocation | None]], view: ClusterView, nodes: Nodes, policy: Policy
) -> None:
    """Check that all changes together fit: apply them to the accounts of the nodes, and undo that."""
    done: list[tuple[Allocation, int]] = []
    try:
        # Releases first: jobs may swap devices, which no order of single changes allows.
        for job, _ in changes:
            if job.allocation is not None:
                nodes.move(job.allocation, 1)
                done.append((job.allocation, -1))
        for job, new in changes:
            if new is None:
                continue
            shortage = nodes.shortage(new)
            if shortage:
                raise _error(view, policy, job.spec.job_id, f"cannot have {new.text}: {shortage}")
            nodes.move(new, -1)
            done.append((new, 1))
        if any(nodes.guests):
            _check_memory(changes, view, policy)
    finally:
        for allocation, sign in reversed(done):
            nodes.move(allocation, sign)


def _check_memory(
    changes: list[tuple[JobView, Allocation | None]], view: ClusterView, policy: Policy
) -> None:
    """Check that each guest finds a device with enough memory."""
    sharing, touched = view.sharing(), set[int]()
    for job, _ in changes:
        if job.allocation is not None:
            sharing.remove(job.index, job.allocation)
            touched.update(job.allocation.nodes)
    for job, new in changes:
        if new is not None:
            sharing.add(job.index, new)
            touched.update(new.nodes)
    for node in sorted(touched):
        guest_bytes = sharing.on(node).oversubscribed_bytes
        if guest_bytes is not None:
            after = {job.spec.job_id: job.allocation for job in view.running}
            after |= {job.spec.job_id: new for job, new in changes}
            job_id = next(
                name
                for name, held in after.items()
                if held is not None
                and held.is_guest
                and node in held.nodes
                and held.configuration.device_memory_bytes_per_gpu == guest_bytes
            )
            usable = format_bytes(view.cluster.nodes[node].gpu.usable_bytes)
            need = f"needs {format_bytes(guest_bytes)} on a device of node {node} beside what others need"
            raise _error(view, policy, job_id, f"{need}; expected {usable} for both")


# --- The engine ---

# Priorities at one instant. The policy is asked after all events, so that it decides once on all of them;
# speeds of guests depend on its decision.
_NODE, _COMPLETION, _ARRIVAL, _ASK, _SPEED = range(5)
_MAX_IDLE_ROUNDS = 10_000  # rounds without any job on devices before a policy counts as stuck
# Decisions that change something, but let no job make progress, before a policy counts as stuck.
_MAX_CHANGES = 10_000
_ROUNDING = 1e-9  # of a checkpoint interval: a checkpoint due at this instant counts as written
_NAN = float("nan")


class Engine:
    """Run a trace under a policy in simulated time.

    The engine of live runs overrides how the ends of restarts and jobs become known (`schedule_ends`), how
    time advances (`run`), and what a lost node costs (`jobs_on`, `lost_from_memory`, `loss_of`, `given_up`).

    ``rows`` are those of the events table so far, plain tuples in the order of the fields of `Event`;
    ``finished`` has the finished jobs with their times [s]; ``losses`` are the rows of the table `LOSSES`.
    """

    def __init__(self, scenario: Scenario, policy: Policy) -> None:
        self.scenario, self.policy = scenario, policy
        cluster, catalogue = scenario.cluster, scenario.catalogue.on(scenario.cluster)
        cost = restart_cost(scenario.restart_delay_s)
        self.adviser = Adviser(policy, scenario.decision_limit_s)
        self.cluster_state = ClusterState(
            cluster,
            catalogue,
            cost,
            round_length(policy, scenario.interval_s),
            shows_remaining_work=policy.is_clairvoyant,
            shares_devices=scenario.shares_devices,
            placement=scenario.placement,
        )
        self.view: ClusterView = self.cluster_state.view
        self.policy_state = self.adviser.initial_state(cluster, catalogue)
        self.rows: list[tuple[Any, ...]] = []
        self.observers: list[Observer] = []
        self.finished: list[tuple[JobView, float]] = []
        self.losses: list[tuple[Any, ...]] = []
        self.policy_wall_s = 0.0
        self.n_decisions = self._n_starts = self._n_known_starts = 0
        self.queue: EventQueue[tuple[Callable[..., None], Any, Any]] = EventQueue()
        self.arrivals: list[JobView] = []
        self.n_arrived = 0
        self._ask_times: set[float] = set()
        self._n_node_events_left = 0
        self._idle_rounds = self._n_changes = 0
        self._steps_left: dict[int, float] | None = None  # of all jobs, at the last check for progress
        self._speed_update_s = _NAN
        self._interruptions = Interruptions(scenario.extra_steps)

    # --- the loop ---------------------------------------------------------------------------

    def load(self) -> None:
        """Queue the first arrival and the node events."""
        node_events = ordered_node_events(self.scenario.failures, self.scenario.cluster)
        order = sorted(self.scenario.jobs, key=lambda job: job.submit_time_s)
        self.arrivals = [
            (CheckpointingJobView if recovery is not None and recovery.stalls else JobView)(
                job, index, float(job.steps + self.scenario.extra_steps), self.view, recovery
            )
            for index, (job, recovery) in enumerate((job, self.scenario.recovery_of(job)) for job in order)
        ]
        if order:
            self.load_nodes(node_events)
            self.push_arrival()

    def load_nodes(self, node_events: Sequence[NodeEvent]) -> None:
        """Take down the nodes that are absent at first, and queue the node events, which are in order."""
        for node in absent_nodes(node_events):
            self.cluster_state.nodes.fail(node)
            self._record_node(EventKind.NODE_FAILED, node, "absent until it joins")
        self.queue_node_events(node_events)

    def queue_node_events(self, node_events: Sequence[NodeEvent]) -> None:
        """Queue the node events that are still to come."""
        self._n_node_events_left = len(node_events)
        for event in node_events:
            if event.notice_s:
                self.queue.push(event.time_s, _NODE, (self._announce, event, None))
            self.queue.push(event.in_force_s, _NODE, (self._change_node, event, None))

    def run(self) -> None:
        """Handle events until no job is left."""
        queue, pop, advance = self.queue, self.queue.pop, self.cluster_state.advance
        n_jobs, finished = len(self.arrivals), self.finished
        with self.adviser.watch:
            while queue and len(finished) < n_jobs:
                time_s, (handler, first, second) = pop()
                advance(time_s)
                handler(first, second)
        if len(finished) < n_jobs:
            raise self.stalled()
        queue.clear()  # outdated entries refer to the engine and would keep all of it alive

    def stalled(self, reason: str = "no event left") -> StalledError:
        """Return the error of a deadlock; it names the first pending job and counts nodes that are down."""
        waiting = self.view.pending or self.view.running
        state = "pending" if self.view.pending else "running"
        names = [job.spec.job_id for job in waiting]
        n_nodes = self.view.n_nodes
        n_down = sum(not self.view.is_up(node) for node in range(n_nodes))
        down = f"while {n_down} of {n_nodes} nodes are down; expected nodes that return, and"
        expected = f", {down}" if n_down else "; expected"
        return StalledError(
            f"{policy_label(self.policy)} at {self.view.time_s:.6g} s: deadlock: "
            f"{len(names)} {state} job(s) and {reason} (first job: {names[0]!r}){expected} a policy "
            "that starts every job and lets it run"
        )

    # --- events of jobs ---------------------------------------------------------------------

    def push_arrival(self) -> None:
        """Queue the next arrival; only one at a time, which keeps the queue short."""
        if self.n_arrived < len(self.arrivals):
            job = self.arrivals[self.n_arrived]
            self.n_arrived += 1
            self.queue.push(job.spec.submit_time_s, _ARRIVAL, (self._submit, job, None))

    def _submit(self, job: JobView, _: None) -> None:
        self.cluster_state.submit(job)
        if self.scenario.predictions == "requests":
            self.cluster_state.reveal(job, self.view.catalogue.requested(job.spec))
        self.record(EventKind.SUBMITTED, job, "trace")
        self.push_arrival()
        self.request_decision()

    @property
    def known_starts(self) -> float:
        """Share of all starts and changes to a configuration whose time the job knew before [1]."""
        return self._n_known_starts / self._n_starts if self._n_starts else _NAN

    def hold(self, job: JobView, allocation: Allocation) -> None:
        """Allocate devices to a job that has none."""
        self._n_starts += 1
        self._n_known_starts += job.is_time_known(allocation.configuration)
        recovery = job._recovery
        delay_s = None if recovery is None else self._interruptions.start(job, recovery)
        self.schedule_ends(job, self.cluster_state.hold(job, allocation, delay_s=delay_s))

    def continue_sharing(self, job: JobView, allocation: Allocation, ready_s: float) -> None:
        """Continue a job on the same devices after it began or ceased to share them; no restart."""
        self.cluster_state.hold(job, allocation, max(ready_s, self.view.time_s))
        self.schedule_ends(job, job.ready_time_s, is_ready=ready_s <= self.view.time_s)

    def release(self, job: JobView) -> None:
        """Release the devices of a job."""
        self.cluster_state.release(job)

    def schedule_ends(self, job: JobView, ready_s: float, *, is_ready: bool = False) -> None:
        """Queue the end of the restart [s], unless it is over, and the last step, which follows from it."""
        if job.allocation is None:
            return
        if not is_ready:
            self.queue.push(ready_s, _COMPLETION, (self._become_ready, job, job.generation))
        self.queue.push(job._finish_s(), _COMPLETION, (self._complete, job, job.generation))

    def _become_ready(self, job: JobView, generation: int) -> None:
        if job.generation == generation:
            self.record(EventKind.READY, job, "restart over")

    def _complete(self, job: JobView, generation: int) -> None:
        if job.generation == generation:
            self.finish(job)

    def finish(self, job: JobView) -> None:
        """Finish a job at the present time."""
        self.release(job)
        if job._recovery is not None:
            self._interruptions.save(job)
        self.cluster_state.finish(job)
        self.finished.append((job, self.view.time_s))
        self.record(EventKind.FINISHED, job, "last step")
        self._schedule_speed_update()
        self.request_decision()

    def evict(
        self, jobs: Sequence[JobView], node: int = -1, n_left: Sequence[int] | None = None
    ) -> list[Loss]:
        """Release the devices of jobs, take from each what it loses, and queue the jobs again.

        ``node`` is the one that was lost, all but ``n_left`` devices there of each job. Returns the losses,
        in the order of the jobs.
        """
        losses = []
        for job, count in zip(jobs, n_left or [0] * len(jobs), strict=True):
            loss = self.loss_of(job, node, count)
            self.release(job)
            self.cluster_state.set_steps_left(job, job._steps_left + loss.steps)
            losses.append(loss)
        self.cluster_state.queue_again(jobs)
        return losses

    def loss_of(self, job: JobView, node: int, n_left: int = 0) -> Loss:
        """Return what a job loses that still holds its devices, all but ``n_left`` on ``node`` being lost.

        A job without a `Recovery` returns to its last checkpoint.
        """
        recovery, held = job._recovery, job.allocation
        if recovery is not None:
            return self._interruptions.interrupt(job, recovery, node, self.view.time_s, n_left)
        steps, since_s = self._since_checkpoint(job)
        if held is None or not steps:
            gpu_s = 0.0
        elif held.is_guest:
            gpu_s = job._unheld_gpu_s(float, since_s)
        else:
            gpu_s = steps * job._step_s * held.n_gpus
        return Loss(steps, gpu_s, LossOutcome.CHECKPOINT)

    # --- events of nodes --------------------------------------------------------------------

    def jobs_on(self, node: int) -> list[JobView]:
        """Return the jobs that lose devices if a node fails, in the order in which they last started."""
        return self.cluster_state.holders(node)

    def lost_from_memory(self, node: int) -> Iterator[tuple[JobView, Loss]]:
        """Yield the waiting jobs whose progress was in the memory of a node that failed, and their losses."""
        return self._interruptions.lose_node(node)

    def given_up(self) -> Iterator[tuple[JobView, Loss]]:
        """Yield the waiting jobs whose state in memory the policy gave no devices to, and their losses."""
        return self._interruptions.give_up()

    def _announce(self, event: NodeEvent, _: None) -> None:
        self.cluster_state.announce(event)
        reason = f"{event.kind.value} at {event.in_force_s} s"
        self._record_node(EventKind.CAPACITY_ANNOUNCED, event.node_id, reason, event.n_gpus or 0)
        self.request_decision()

    def _change_node(self, event: NodeEvent, _: None) -> None:
        self._n_node_events_left -= 1
        node, nodes, n_gpus = event.node_id, self.cluster_state.nodes, event.n_gpus or 0
        gone: list[tuple[JobView, Loss]] = []
        evicted, losses = list[JobView](), list[Loss]()
        if event.kind is NodeEventKind.JOINED:
            nodes.join(node)
            self._record_node(EventKind.NODE_JOINED, node, "joined")
        elif event.kind is NodeEventKind.RETURNED:
            self.cluster_state.change_capacity(event, -n_gpus)
            self._record_node(EventKind.CAPACITY_RETURNED, node, "returned", n_gpus)
        elif event.kind is NodeEventKind.WITHDRAWN:
            evicted, n_left = self._jobs_to_evict(node, n_gpus)
            if n_gpus == self.view.gpus_per_node[node]:
                gone = list(self.lost_from_memory(node))
            # Before the change: only free devices can be withdrawn.
            losses = self.evict(evicted, node, n_left)
            self.cluster_state.change_capacity(event, n_gpus)
            self._record_node(EventKind.CAPACITY_WITHDRAWN, node, "withdrawn", n_gpus)
        else:
            evicted = self.jobs_on(node)
            # Jobs that wait with their state in memory lose that of this node before others join them.
            gone = list(self.lost_from_memory(node))
            losses = self.evict(evicted, node)
            nodes.fail(node)
            self._record_node(EventKind.NODE_FAILED, node, "failed")
        self.cluster_state.devices_changed(node)
        for job, loss in gone:
            self._roll_back(job, loss, node, f"node {node} {event.kind.value}")
        for job, loss in zip(evicted, losses, strict=True):
            self.record_loss(job, loss, node)
            self.record(EventKind.INTERRUPTED, job, f"node {node} {event.kind.value}")
        for job in evicted:
            if job._recovery is not None and job._recovery.kind == "resilient":
                self._regroup(job, job._recovery)
        self._schedule_speed_update()
        self.request_decision()

    def _regroup(self, job: JobView, recovery: Recovery) -> None:
        """Resume a resilient job on the devices that it has left, if a configuration fits there.

        A guest does not resume: the devices that are left are those of others.
        """
        before, left = job._last, self._interruptions.devices_left(job)
        if before is None or before.is_guest or not left:
            return
        keeps = self.policy.honours_guarantees and job.spec.is_guaranteed
        for offered in allocations_on(before, left, job, self.view.catalogue):
            fitting = [
                new
                for new in offered
                if not (keeps and not job.guarantees(new.configuration))
                and not self.cluster_state.nodes.shortage(new)
                and self._leaves_guests_memory(job, new)
            ]
            if fitting:
                new = min(fitting, key=lambda new: job.step_s(new.configuration))
                delay_s = self._interruptions.start(job, recovery)
                self.schedule_ends(job, self.cluster_state.hold(job, new, delay_s=delay_s))
                self.record(EventKind.REGROUPED, job, f"{before.n_gpus - new.n_gpus} GPUs fewer")
                return

    def _leaves_guests_memory(self, job: JobView, new: Allocation) -> bool:
        """Return whether the guests on the nodes of an allocation have enough memory beside it."""
        if not any(self.cluster_state.nodes.guests[node] for node in new.nodes):
            return True
        sharing = self.view.sharing()
        sharing.add(job.index, new)
        return all(sharing.on(node).oversubscribed_bytes is None for node in new.nodes)

    def _roll_back(self, job: JobView, loss: Loss, node: int, reason: str) -> None:
        """Return a waiting job to its last checkpoint, since its state in memory is gone."""
        self.cluster_state.set_steps_left(job, job._steps_left + loss.steps)
        self.record_loss(job, loss, node)
        self.record(EventKind.ROLLED_BACK, job, reason)

    def record_loss(self, job: JobView, loss: Loss, node: int) -> None:
        """Append a row to the table of losses; the row of the event comes next."""
        kind = "" if job._recovery is None else job._recovery.kind
        head = (self.view.time_s, len(self.rows), job.spec.job_id, node, kind)
        self.losses.append((*head, loss.outcome.value, loss.steps, loss.gpu_s))

    def _jobs_to_evict(self, node: int, n_gpus: int) -> tuple[list[JobView], list[int]]:
        """Return the jobs to evict before devices of a node are withdrawn, and how many each has left there.

        The job that started last comes first, and loses as many devices as are still missing. A guest that
        lacks memory has none left.
        """
        nodes, evicted, n_left = self.cluster_state.nodes, list[JobView](), list[int]()
        if not nodes.up[node]:
            return evicted, n_left
        missing = {False: n_gpus - nodes.free_gpus[node], True: n_gpus - nodes.unshared(node)}  # by is_guest
        for job in reversed(self.cluster_state.holders(node)):
            held = job.allocation
            if held is not None and missing[held.is_guest] > 0:
                count = dict(held.shares)[node]
                evicted.append(job)
                n_left.append(max(count - missing[held.is_guest], 0))
                missing[held.is_guest] -= count
        crowded = self._guests_without_memory(node, n_gpus, evicted)
        return evicted + crowded, n_left + [0] * len(crowded)

    def _guests_without_memory(self, node: int, n_gpus: int, leaving: Sequence[JobView]) -> list[JobView]:
        """Return the guests that lack memory after devices and evicted jobs left, the last started first."""
        usable_bytes = self.view.cluster.nodes[node].gpu.usable_bytes
        left = [job for job in self.cluster_state.holders(node) if job not in leaving]
        guests = [job for job in left if job.allocation is not None and job.allocation.is_guest]
        n_devices, evicted = self.view.gpus_per_node[node] - n_gpus, list[JobView]()
        while guests:
            kept = [job.allocation for job in left if job not in evicted]
            holders, guests_bytes = (bytes_on[node] for bytes_on in memory_by_device(kept, self.view.n_nodes))
            if oversubscribed_bytes(holders, guests_bytes, n_devices, usable_bytes) is None:
                break
            evicted.append(guests.pop())
        return evicted

    def _since_checkpoint(self, job: JobView) -> tuple[float, float]:
        """Return the steps since the last checkpoint, which an interruption loses, and when that was [s].

        Checkpoints are written at multiples of the interval in running time, that is, from ready on.
        """
        every_s = self.scenario.checkpoint_interval_s
        now_s = self.view.time_s
        if every_s is None or job.allocation is None:
            return 0.0, now_s
        elapsed_s = max(now_s - job.ready_time_s, 0.0)
        lost_s = elapsed_s - math.floor(elapsed_s / every_s + _ROUNDING) * every_s
        if lost_s <= 0 or not job.allocation.is_guest:
            return max(lost_s, 0.0) / job._step_s, now_s - lost_s
        # The speed of a guest changes during an allocation: interpolate its steps between the changes.
        times_s, steps_left = zip(*job._marks, (now_s, job._steps_left_now()), strict=True)
        return float(np.interp(now_s - lost_s, times_s, steps_left) - steps_left[-1]), now_s - lost_s

    # --- guests -----------------------------------------------------------------------------

    def _schedule_speed_update(self) -> None:
        """Update the speeds of guests at the end of this instant, once all its changes are known."""
        if self._speed_update_s != self.view.time_s and any(self.cluster_state.nodes.guests):
            self._speed_update_s = self.view.time_s
            self.queue.push(self.view.time_s, _SPEED, (self._update_speeds, None, None))

    def _update_speeds(self, _: None, __: None) -> None:
        self._speed_update_s = _NAN
        for job in self.cluster_state.guests_on_changed_nodes():
            is_other = self.cluster_state.update_unheld(job)
            if self.cluster_state.update_speed(job):
                self.schedule_ends(job, job.ready_time_s, is_ready=job.ready_time_s <= self.view.time_s)
                self.record(EventKind.SPEED_CHANGED, job, "idle time")
            elif is_other:
                self.record(EventKind.SPEED_CHANGED, job, "holders", job._steps_left_now())

    # --- decisions --------------------------------------------------------------------------

    def request_decision(self) -> None:
        """Ask the policy after all events of this instant, or in the next round."""
        self._ask_at(self.view.time_s)

    def _ask_at(self, time_s: float) -> None:
        interval_s = self.view.interval_s
        if interval_s is not None:
            # The first multiple of the interval that is not before the time; the rounded quotient alone may
            # give one that is.
            number = math.ceil(time_s / interval_s)
            while number * interval_s < time_s:
                number += 1
            if not math.isfinite(number * interval_s):
                raise InputError(
                    f"interval_s is {interval_s!r}: no such round at {time_s} s; expected a longer one"
                )
            time_s = number * interval_s
        if time_s not in self._ask_times:
            self._ask_times.add(time_s)
            self.queue.push(time_s, _ASK, (self._ask, None, None))

    def _ask(self, _: None, __: None) -> None:
        view = self.view
        self._ask_times.discard(view.time_s)
        if self.cluster_state.is_empty:
            return
        began = time.perf_counter()
        decision, self.policy_state = self.adviser.decide(view, self.policy_state)
        self.policy_wall_s += time.perf_counter() - began
        self.n_decisions += 1
        n_rows = len(self.rows)
        if decision.changes:
            self._apply(decision)
        has_changed = len(self.rows) > n_rows
        if self._interruptions.waiting:
            for job, loss in self.given_up():
                self._roll_back(job, loss, -1, "no devices in time")
        if decision.wake_up_s is not None:
            self._ask_at(float(decision.wake_up_s))
        self._check_idle()
        if has_changed:
            self._check_progress()

    def _check_progress(self) -> None:
        """Raise if a policy changes jobs again and again and none of them makes progress."""
        if self._n_node_events_left or self.n_arrived < len(self.arrivals):
            self._n_changes, self._steps_left = 0, None
            return
        self._n_changes += 1
        if self._n_changes < _MAX_CHANGES:
            return
        jobs = (*self.view.pending, *self.view.running)
        left, before = {job.index: job._steps_left_now() for job in jobs}, self._steps_left
        if before is not None and left == before:
            raise self.stalled(f"none made progress in {_MAX_CHANGES} decisions that changed something")
        self._n_changes, self._steps_left = 0, left

    def _check_idle(self) -> None:
        """Raise if a policy wakes up again and again without starting a pending job."""
        if self.view.running or self._n_node_events_left or self.n_arrived < len(self.arrivals):
            self._idle_rounds = 0
            return
        self._idle_rounds += 1
        if self._idle_rounds > _MAX_IDLE_ROUNDS:
            raise self.stalled(f"none started in {_MAX_IDLE_ROUNDS} rounds")

    def _apply(self, decision: Decision) -> None:
        changes = checked_changes(decision, self.cluster_state, self.policy)
        suspended = [job for job, new in changes if new is None]
        moved = {job.index for job, new in changes if new is not None and job.allocation is not None}
        ready_s: dict[int, float] = {}  # of jobs that only begin or cease to share their devices
        # All releases before any start, as jobs may swap devices.
        for job, new in changes:
            if job.allocation is not None:
                if new is not None and new.colocated(job.allocation.is_guest) == job.allocation:
                    ready_s[job.index] = job.ready_time_s
                self.release(job)
                if job._recovery is not None:
                    self._interruptions.save(job)
        if suspended:
            self.cluster_state.queue_again(suspended)
        # The speed of a guest depends on all jobs of the decision, also on those that start after it.
        self.cluster_state.expect(changes)
        for job, new in changes:
            if new is None:
                self.record(EventKind.SUSPENDED, job, "policy")
                continue
            if job.index in ready_s:
                self.continue_sharing(job, new, ready_s[job.index])
                self.record(EventKind.SHARING, job, "policy")
                continue
            self.hold(job, new)
            self.record(EventKind.RECONFIGURED if job.index in moved else EventKind.STARTED, job, "policy")
        self._schedule_speed_update()

    # --- records ----------------------------------------------------------------------------

    def record(self, kind: EventKind, job: JobView, reason: str, steps_left: float | None = None) -> None:
        """Append a row about a job to the events table, and notify the observers.

        ``steps_left`` is given where the job continues at the same speed.
        """
        held, rows = job.allocation, self.rows
        steps_left = job._steps_left if steps_left is None else steps_left
        head = (self.view.time_s, len(rows), kind._value_, job.spec.job_id)
        if held is None:
            rows.append((*head, "", 0, "", reason, "", 0, _NAN, steps_left, ""))
        else:
            item, nodes, shared_nodes = held.configuration, job._held_text, ""
            if held.is_guest:
                nodes, shared_nodes = shared_nodes, nodes
            resources = (nodes, job._n_gpus, item.plan, reason, item.family, item.cpu_threads, job._step_s)
            rows.append((*head, *resources, steps_left, shared_nodes))
        if self.observers:
            self._tell_observers()

    def _record_node(self, kind: EventKind, node: int, reason: str, n_gpus: int = 0) -> None:
        head = (self.view.time_s, len(self.rows), kind._value_, "")
        self.rows.append((*head, str(node), n_gpus, "", reason, "", 0, _NAN, _NAN, ""))
        if self.observers:
            self._tell_observers()

    def _tell_observers(self) -> None:
        event = Event(*self.rows[-1])
        for observer in self.observers:
            observer.observe(event, self.view)


# --- Allocations for what is left of a job ---


def allocations_on(
    before: Allocation, left: Mapping[int, int], job: JobView, catalogue: Catalogue
) -> Iterator[list[Allocation]]:
    """Yield the allocations of a job to the devices that it has left by node, those of all devices first.

    Then come those of one device fewer each time, if all are of one type.
    """
    types = before.configuration.gpu_types or ("",) * len(before.nodes)
    shares = [
        (left[node], gpu_type, node)
        for gpu_type, node in zip(types, before.nodes, strict=True)
        if node in left
    ]
    total = Counter[str]()
    for count, gpu_type, _ in shares:
        total[gpu_type] += count
    vectors = (
        [total]
        if len(total) > 1
        else [Counter({kind: n}) for kind in total for n in range(total[kind], 0, -1)]
    )
    for vector in vectors:
        items = catalogue.holding(job.spec.workload, tuple(sorted(vector.items())))
        yield [new for item in items if (new := _placed(item, shares)) is not None]


def _placed(item: Configuration, shares: Sequence[tuple[int, str, int]]) -> Allocation | None:
    """Return a configuration on nodes of shares (devices, their type, node), or None if it does not fit."""
    unused, nodes = sorted(shares, key=lambda share: (-share[0], share[2])), list[int]()
    for count, gpu_type in zip(item.counts, item.types_by_count, strict=True):  # largest first
        fits = (share for share in unused if share[0] >= count and gpu_type in ("", share[1]))
        if (first := next(fits, None)) is None:
            return None
        unused.remove(first)
        nodes.append(first[2])
    return item.on(nodes)


# --- Simulations and their tables ---


_ENDS_SPAN = {
    EventKind.STARTED,
    EventKind.RECONFIGURED,
    EventKind.SUSPENDED,
    EventKind.INTERRUPTED,
    EventKind.REGROUPED,
    EventKind.FINISHED,
}  # events after which a job no longer holds the devices that it held as before


@dataclass(frozen=True, slots=True, repr=False)
class Schedule(Displayed):
    """Result of a simulation: its tables, and its costs.

    Parameters
    ----------
    events, outcomes
        Tables of the schemas `EVENTS` and, one row per job in the order of submission, `OUTCOMES`.
    wall_s, policy_wall_s, n_decisions
        Wall time of the simulation and of the policy alone [s]; number of decisions.
    known_starts
        Share of starts and changes to a configuration whose time the job knew before, see
        `JobView.is_time_known` [1].
    losses
        Losses of interrupted jobs, a table of schema `LOSSES`.
    """

    events: pd.DataFrame
    outcomes: pd.DataFrame
    wall_s: float
    policy_wall_s: float
    n_decisions: int
    known_starts: float
    losses: pd.DataFrame

    def violations(self, scenario: Scenario, policy: Policy) -> list[Violation]:
        """Return the violations that `validate_schedule` finds for a scenario and a policy."""
        return validate_schedule(
            self.events,
            scenario.jobs,
            scenario.cluster,
            scenario.catalogue,
            scenario.restart_delay_s,
            interval_s=round_length(policy, scenario.interval_s),
            checkpoint_interval_s=scenario.checkpoint_interval_s,
            extra_steps=scenario.extra_steps,
            keeps_guarantees=policy.honours_guarantees,
            outcomes=self.outcomes,
            recovery_of=scenario.recovery_of,
            losses=self.losses,
        )

    def spans(self) -> list[Span]:
        """Return the times in which jobs held or shared devices, in the order in which these ended."""
        held: dict[str, Span] = {}
        ended = []
        columns = ("time_s", "kind", "job_id", "plan", "nodes", "shared_nodes", "family")
        for time_s, kind, job, plan, nodes, shared, family in zip(
            *(self.events[name].tolist() for name in columns), strict=True
        ):
            before = held.get(job)
            if kind == EventKind.READY and before is not None:
                held[job] = before._replace(ready_s=time_s)
            if kind not in _ENDS_SPAN:
                continue
            if before is not None:
                ended.append(held.pop(job)._replace(ready_s=min(before.ready_s, time_s), end_s=time_s))
            if places := nodes or shared:  # devices of others, for a guest
                text = f"{job}: {plan} on node:GPUs {places} from {time_s:.0f} s"
                held[job] = Span(job, time_s, math.inf, math.inf, family, text)
        return ended

    def display(self) -> Display:
        """Return a row per job: submission, first start, end and restarts."""
        names = ["job_id", "submit_time_s", "first_start_s", "finish_time_s", "n_restarts"]
        rows = self.outcomes.reindex(columns=names).to_dict("records")
        title = f"schedule of {len(self.outcomes)} jobs in {len(self.events)} events"
        return Display(title, rows)

    def _repr_html_(self) -> str:
        """Return the schedule as a chart, one row per job."""
        submitted_s = zip(
            *(self.outcomes[name].tolist() for name in ("job_id", "submit_time_s")), strict=True
        )
        return schedule_svg(dict(submitted_s), self.spans())


@typed
def simulate(scenario: Scenario, policy: Policy, observers: Sequence[Observer] = ()) -> Schedule:
    """Run the jobs of a scenario under a policy; equal arguments give equal tables.

    Observers receive every event.

    Raises
    ------
    InputError
        Before anything runs: a job, a node event or an option cannot be used.
    PolicyError
        The policy is invalid, raised, timed out or, an `InfeasibleDecision`, decided what cannot be done.
    StalledError
        Deadlock: jobs are pending and no event is left.
    """
    began = time.perf_counter()
    check_policy(policy)
    fitting = scenario.catalogue.on(scenario.cluster)
    check_jobs(scenario.jobs, scenario.cluster, fitting)
    engine = Engine(scenario, policy)
    engine.observers += observers
    engine.load()
    engine.run()
    finished = sorted(engine.finished, key=lambda entry: entry[0].index)
    tables = events_table(engine.rows), outcomes_table(finished, fitting)
    wall_s = time.perf_counter() - began
    losses = losses_table(engine.losses)
    walls_s = wall_s, engine.policy_wall_s
    return Schedule(*tables, *walls_s, engine.n_decisions, engine.known_starts, losses)


def events_table(rows: Sequence[tuple[Any, ...]]) -> pd.DataFrame:
    """Return rows in the order of the fields of `Event` as a table of schema `EVENTS`."""
    return _table(rows, EVENTS)


def losses_table(rows: Sequence[tuple[Any, ...]]) -> pd.DataFrame:
    """Return rows as in `Engine.losses` as a table of schema `LOSSES`."""
    return _table(rows, LOSSES)


def outcomes_table(jobs: Sequence[tuple[JobView, float]], catalogue: Catalogue) -> pd.DataFrame:
    """Return finished jobs with their finish times [s], in order, as a table of schema `OUTCOMES`."""
    references = [catalogue.requested(job.spec) for job, _ in jobs]
    rows = [
        (
            job.spec.job_id,
            job.spec.submit_time_s,
            job.spec.workload,
            job.spec.n_gpus,
            job.spec.plan,
            job.spec.steps,
            job.spec.is_guaranteed,
            job.spec.tenant,
            reference.iter_time_s,
            reference.plan,
            reference.cpu_threads,
            reference.provenance,
            job.first_start_s,
            finish_time_s,
            job.restart_count,
            job._held_gpu_s,
            job._waiting_s,
            job._running_s,
            job._restart_s,
        )
        for (job, finish_time_s), reference in zip(jobs, references, strict=True)
    ]
    return _table(rows, OUTCOMES)


_DTYPES: dict[str, Any] = {"int": "int64", "float": "float64", "bool": bool}


def _table(rows: Sequence[tuple[Any, ...]], schema: TableSchema) -> pd.DataFrame:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema.columns)
    # Through numpy arrays, which takes a third of the time of pandas' own conversion.
    arrays: dict[str, Any] = {}
    for column, values in zip(schema.columns, columns, strict=True):
        if column.kind == "text":
            arrays[column.name] = pd.array(np.array(values, dtype=object), dtype="str")
        else:
            arrays[column.name] = np.array(values, dtype=_DTYPES[column.kind])
    return pd.DataFrame(arrays, copy=False)


def round_length(policy: Policy, interval_s: float | None) -> float | None:
    """Return the length of a round [s], or None if the policy is asked after each event.

    ``interval_s`` is the choice of the experiment: None for the policy's own, 0 for no rounds. Raises
    InputError for other lengths below a microsecond, to which times of a month are exact, and infinite ones.
    """
    length_s = policy.interval_s if interval_s is None else interval_s
    if length_s and not US <= length_s < math.inf:
        raise InputError(
            f"interval_s is {length_s!r}; expected a time in s, {US:g} or more, or 0 for no rounds"
        )
    return float(length_s) if length_s else None
