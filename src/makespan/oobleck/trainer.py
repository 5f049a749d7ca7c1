"""Train through failures: start, join, drain and resume resilient runs, inject faults, write their tables.

The process that calls `train_resilient` is the coordinator. `Record` and `Faults` listen to its events and do
not influence its decisions.
"""

import json
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pandas as pd

from makespan import errors
from makespan.arguments import check_choices, check_fields, check_range, typed
from makespan.errors import (
    CheckpointError,
    InputError,
    LostWorkerError,
    WorkerError,
    unknown_name,
)
from makespan.files import write_text
from makespan.notebook import Display, Displayed
from makespan.oobleck.interleaving import interleaved_templates
from makespan.oobleck.job import ChainJob, PassOrder
from makespan.oobleck.peers import rerouted_counts
from makespan.oobleck.plan import HybridPlan
from makespan.oobleck.planner import (
    STATES_PER_WEIGHT,
    ReconfigurationPlanner,
    Recovery as RecoveryKind,
    check_first_sizes,
    reroutable_sizes,
)
from makespan.oobleck.profile import ModelProfile
from makespan.oobleck.reconfiguration import InsufficientNodes, StateLost
from makespan.oobleck.requests import NODE, WORK, NodeRequest, Work
from makespan.oobleck.templates import TemplateSet, covering_templates
from makespan.runtime import (
    Checkpoint,
    GpuSlots,
    Launch,
    Launcher,
    LocalLauncher,
    Process,
    RunDirectory,
    acquire,
    check_gpus,
    describe_machine,
    finish_checkpoint,
    sound_checkpoint,
    start_checkpoint,
)
from makespan.runtime.coordinator import Coordinator, Event, Timeouts
from makespan.runtime.joining import PROCESSES, drain, join_with
from makespan.runtime.protocol import CoordinatorProtocol
from makespan.tables import TableSchema, csv_text, parse_csv, table_schema

_log = logging.getLogger(__name__)

# --- Schemas of the tables of a run -----------------------------------------------------------------

_TIMES = (
    ("frozen_wall_s", "float", "s", "until the last remaining node had dropped its groups"),
    ("decided_wall_s", "float", "s", "until the plan was made"),
    ("built_wall_s", "float", "s", "until the last node had built its groups"),
    ("copied_wall_s", "float", "s", "until the last node had its layers"),
    ("first_wall_s", "float", "s", "until the first instruction of the next iteration"),
)
_CALL = ("call", "int", "1", "call of the run, from 1; each call appends its rows")
ITERATIONS = table_schema(
    "iterations",
    _CALL,
    ("iteration", "int", "1", "iteration, from 0"),
    ("loss", "float", "1", "mean over all microbatches"),
    ("generation", "int", "1", "generation in which the iteration was committed"),
    ("attempts", "int", "1", "number of times the iteration was begun"),
    ("n_pipelines", "int", "1", "pipelines of the plan"),
    ("n_nodes", "int", "1", "nodes of the plan"),
    ("end_wall_s", "float", "s", "commit of the iteration, from the start of the call"),
)
RECOVERIES = table_schema(
    "recoveries",
    _CALL,
    ("generation", "int", "1", "generation that resumed training"),
    ("iteration", "int", "1", "iteration with which it resumed"),
    ("cause", "text", "", "start, loss, join, drain or failure, the first of them"),
    ("lost", "text", "", "nodes that were lost, with the phase in which each was"),
    ("joined", "text", "", "nodes that joined"),
    ("action", "text", "", "actions that changed the pipelines; reroute if none moved"),
    ("fallback", "text", "", "why microbatches were not rerouted under recovery 'reroute'"),
    ("rerouted", "text", "", "microbatches of lost nodes that each node runs, as node:count"),
    ("n_microbatches", "text", "", "microbatches of the pipelines"),
    (
        "layers",
        "text",
        "",
        "layers of the stages of the pipelines, of which interleaved ones go round its nodes",
    ),
    ("nodes", "text", "", "nodes of the pipelines, - for one whose microbatches run on others"),
    ("copies_bytes", "float", "B", "state that was copied"),
    (
        "begin_wall_s",
        "float",
        "s",
        "detection, from the start of the call; the times below count from it",
    ),
    *_TIMES,
)


_LATER_COLUMNS = {"fallback", "rerouted"}
"""Columns that tables of earlier versions lack; they are empty in their rows."""


# --- Fault injection: kill nodes within phases that they announced ----------------------------------

PHASES = {
    "forward": "compute", "backward": "compute", "reduction": "reduction", "prepared": "commit",
    "regroup": "recovery", "group build": "recovery", "copy": "recovery",
}  # fmt: skip
"""Phases in which a node can be killed, with the kind of each.

A fault may also name ``committed``, from the commit of its iteration until the next phase, and ``weights``,
in which runs with ``zero_stage`` 1 exchange the weights of the iteration before.
"""
KINDS = tuple(dict.fromkeys(PHASES.values()))


@dataclass(frozen=True, slots=True)
class Fault:
    """Injected loss of a node.

    Parameters
    ----------
    phase
        Phase in which the victim is killed; see `PHASES`. A phase of a recovery is that of the recovery
        from the previous fault.
    iteration
        Iteration of the fault; ignored for a phase of a recovery.
    victim
        Number of the victim among the nodes of the plan, modulo their count.
    delay_s
        Time from the start of the phase to the signal [s]; the victim waits for it at the end of the phase.
    number
        Signal; SIGKILL unless the process should hang.
    follows
        Whether the fault belongs to the previous one, as faults in a phase of a recovery always do. Victims
        that follow each other in one phase are killed together, ``delay_s`` of the first after all are in it.
    """

    phase: str
    iteration: int = -1
    victim: int = 0
    delay_s: float = 0.0
    number: int = signal.SIGKILL
    follows: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "", not_negative=("victim",))
        check_range("iteration", self.iteration, -1)
        if self.phase not in (known := (*PHASES, "committed", "weights")):
            raise unknown_name("phase", self.phase, known)
        if not self.delay_s >= 0:
            raise InputError(f"delay_s is {self.delay_s!r}; expected a number >= 0")

    @property
    def is_next(self) -> bool:
        """True if it comes together with the previous fault, or in the recovery from it."""
        return self.follows or PHASES.get(self.phase) == "recovery"


@dataclass(slots=True)
class Killed:
    """Outcome of a fault, in seconds of the coordinator's clock; None for events that did not happen.

    ``armed`` is the iteration that was next when the victim was chosen, ``phase`` the last phase that it
    announced before its connection closed, ``iteration`` the first iteration that began after that.
    """

    fault: Fault
    node: int
    armed: int
    killed_s: float | None = None
    phase: str = ""
    is_over: bool = False
    released_s: float | None = None
    first_s: float | None = None
    iteration: int = -1


class Faults:
    """Listens to a coordinator, and injects faults in turn.

    Parameters
    ----------
    faults
        Faults in order. A fault in a phase of a recovery is armed with the previous fault, any other when its
        iteration is next and as many nodes train as at the start.
    waits_for
        Number of nodes that must train before the next fault is armed; None for that of the start.
    """

    def __init__(self, faults: Sequence[Fault], waits_for: int | None = None) -> None:
        self.pending, self.done, self.n_nodes = list(faults), list[Killed](), waits_for
        self.hold: Callable[[int, str, int], None] = lambda node, phase, iteration: None
        self._armed: list[list[Killed]] = []  # the victims of each list are killed together
        self._reached: set[int] = set()  # victims in the phase where they are killed
        self._pids: dict[int, int] = {}
        self._phases: dict[int, str] = {}
        self._nodes: list[int] = []

    def __call__(self, event: Event) -> None:
        """Handle an event."""
        node, values = event.node, event.values
        match event.kind:
            case "hello" if node is not None:
                self._pids[node] = values["pid"]
            case "plan":
                work = values["work"]
                named = {node for part in work["plan"] for node in part["nodes"]}
                self._nodes = sorted(named.difference(work.get("lost", ())))
                self.n_nodes = self.n_nodes or len(self._nodes)
            case "resume":
                for victim in self.done:
                    victim.is_over |= bool(victim.phase)
                self._arm(values["step"])
            case "commit":
                self._arm(values["iteration"] + 1)
            case "announce" if node is not None:
                self._phases[node] = values["phase"]
                at = (node, values["phase"], values["iteration"])
                victims = (victim for group in self._armed for victim in group)
                if any((victim.node, victim.fault.phase, victim.armed) == at for victim in victims):
                    self._reached.add(node)
                    self._kill_groups()
                if values["phase"] == "forward":
                    for victim in self.done:
                        if victim.is_over and victim.first_s is None:
                            victim.first_s, victim.iteration = event.time_s, values["iteration"]
            case "frozen":
                for victim in self.done:
                    if victim.phase and not victim.is_over:
                        victim.released_s = event.time_s
            case "lost":
                for victim in self.done:
                    if victim.node == node and not victim.phase:
                        victim.phase = self._phases.get(victim.node, "")
                self._armed = [[victim for victim in group if victim.node != node] for group in self._armed]
                self._kill_groups()

    @property
    def is_over(self) -> bool:
        """True if training has resumed after the last fault."""
        return (
            not self.pending and not self._armed and all(victim.first_s is not None for victim in self.done)
        )

    def _arm(self, iteration: int) -> None:
        """Choose the victim of the next fault, if it is due, and the victims of faults that follow it."""
        is_dying = any(not victim.is_over for victim in self.done)
        if not self.pending or self._armed or is_dying or len(self._nodes) < (self.n_nodes or 0):
            return
        if self.pending[0].iteration > iteration:
            return
        chosen: set[int] = set()
        self._reached.clear()
        while self.pending and (not chosen or self.pending[0].is_next):
            left = [node for node in self._nodes if node not in chosen]
            if not left:  # all nodes are victims already
                break
            fault = self.pending.pop(0)
            victim = left[fault.victim % len(left)]
            chosen.add(victim)
            if not (fault.follows and self._armed and self._armed[-1][0].fault.phase == fault.phase):
                self._armed.append([])
            # The recovery from a loss after a commit is one before the next iteration.
            first = next(iter(self._armed[0]), None)
            is_late = first is not None and first.fault.phase == "committed" != fault.phase
            self._armed[-1].append(Killed(fault, victim, iteration + is_late))
            self.hold(victim, fault.phase, iteration + is_late)

    def _kill_groups(self) -> None:
        """Kill the victims of each group of which all have reached their phase."""
        for group in self._armed:
            if group and self._reached.issuperset(victim.node for victim in group):
                self.done += group
                threading.Timer(group[0].fault.delay_s, self._kill, [group]).start()
        self._armed = [
            group for group in self._armed if not self._reached.issuperset(victim.node for victim in group)
        ]

    def _kill(self, group: Sequence[Killed]) -> None:
        for victim in group:
            victim.killed_s = time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(self._pids[victim.node], victim.fault.number)


# --- Record of a run --------------------------------------------------------------------------------


@dataclass(slots=True)
class Recovery:
    """Interruption between two stretches of training, in seconds of the coordinator's clock."""

    begin_s: float
    cause: str
    call: int = 1
    lost: dict[int, str] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    generation: int = 0
    iteration: int = 0
    frozen_s: float = 0.0
    decided_s: float = 0.0
    built_s: float = 0.0
    copied_s: float = 0.0
    first_s: float | None = None
    work: Work | None = None

    def row(self, start_s: float, plan: HybridPlan) -> dict[str, Any]:
        """Return the row of the table of recoveries."""
        marks = ("frozen", "decided", "built", "copied", "first")
        times = {
            f"{name}_wall_s": (getattr(self, f"{name}_s") or self.begin_s) - self.begin_s for name in marks
        }
        return {
            "call": self.call, "generation": self.generation, "iteration": self.iteration,
            "cause": self.cause,
            "lost": " ".join(f"{node}:{phase}" for node, phase in sorted(self.lost.items())),
            "joined": " ".join(map(str, sorted(self.joined))),
            "action": " ".join(self.work.kinds if self.work else ()) or "none",
            "fallback": self.work.fallback if self.work else "",
            "rerouted": " ".join(f"{node}:{count}" for node, count in rerouted_counts(plan).items()),
            "n_microbatches": "+".join(str(pipeline.n_microbatches) for pipeline in plan.pipelines),
            "layers": "+".join(
                "/".join(str(len(stage.layers)) for stage in pipeline.template.stages)
                for pipeline in plan.pipelines
            ),
            "nodes": plan.nodes_text(),
            "copies_bytes": float(self.work.copies_bytes if self.work else 0),
            "begin_wall_s": self.begin_s - start_s, **times,
        }  # fmt: skip


class Record:
    """Listens to a coordinator, and gathers its events into tables."""

    def __init__(self) -> None:
        self.call = 1
        self.start_s: float | None = None
        self.pids: dict[int, int] = {}
        self.hosts: dict[int, str] = {}
        self.phases: dict[int, tuple[str, int]] = {}
        self.plans: list[tuple[int, HybridPlan]] = []
        self.rows: list[dict[str, Any]] = []
        self.recoveries: list[Recovery] = []
        self.attempts: Counter[int] = Counter()
        self.members: set[int] = set()
        self.generation, self.n_reads = 0, 0
        self.n_greetings: Counter[int] = Counter()
        self._open: Recovery | None = None
        self._begun = (0, -1)

    def __call__(self, event: Event) -> None:
        """Handle an event with the method ``_on_<kind>``, if there is one."""
        if self.start_s is None:
            self.start_s = event.time_s
            self._open = Recovery(event.time_s, "start", self.call)
        if (handle := getattr(self, f"_on_{event.kind}", None)) is not None:
            handle(event)

    @property
    def n_repeated(self) -> int:
        """Number of times that an iteration was begun again."""
        return sum(count - 1 for count in self.attempts.values())

    @property
    def first_wall_s(self) -> float:
        """Time from the start of the run to the start of training [s]."""
        return (self.recoveries[0].copied_s or 0.0) - (self.start_s or 0.0)

    @property
    def keeps_processes(self) -> bool:
        """True if each node had one process."""
        return all(count == 1 for count in self.n_greetings.values())

    def iterations(self) -> pd.DataFrame:
        """Return the table of iterations."""
        rows = [row | {"attempts": self.attempts[row["iteration"]]} for row in self.rows]
        return ITERATIONS.validate(pd.DataFrame(rows, columns=ITERATIONS.names), "iterations of the run")

    def recovery_table(self) -> pd.DataFrame:
        """Return the table of recoveries."""
        rows = [
            recovery.row(self.start_s or 0.0, plan)
            for recovery, (_, plan) in zip(self.recoveries, self.plans, strict=True)
        ]
        return RECOVERIES.validate(pd.DataFrame(rows, columns=RECOVERIES.names), "recoveries of the run")

    # --- events -------------------------------------------------------------------------------

    def _begin(self, event: Event, cause: str) -> Recovery:
        if self._open is None:
            self._open = Recovery(event.time_s, cause, self.call)
        return self._open

    def _on_hello(self, event: Event) -> None:
        if event.node is not None:
            self.n_greetings[event.node] += 1
            self.pids[event.node], self.hosts[event.node] = event.values["pid"], event.values["host"]

    def _on_announce(self, event: Event) -> None:
        phase, iteration = event.values["phase"], event.values["iteration"]
        if event.node is not None:
            self.phases[event.node] = phase, iteration
        if self._open is not None:
            if phase == "copy":
                self._open.built_s = event.time_s
            return
        if phase == "forward":
            latest = self.recoveries[-1]
            if latest.first_s is None:
                latest.first_s = event.time_s
            if self._begun != (self.generation, iteration):
                self._begun = self.generation, iteration
                self.attempts[iteration] += 1

    def _on_lost(self, event: Event) -> None:
        if event.node is not None:
            phase, _ = self.phases.get(event.node, ("start", 0))
            self._begin(event, "loss").lost[event.node] = phase

    def _on_failure(self, event: Event) -> None:
        self._begin(event, "failure")

    def _on_freeze(self, event: Event) -> None:
        joined = set(event.values["members"]) - self.members
        self._begin(event, "join" if joined else "drain").joined = joined

    def _on_frozen(self, event: Event) -> None:
        if self._open is not None:
            self._open.frozen_s = event.time_s

    def _on_plan(self, event: Event) -> None:
        if self._open is not None:
            work: Work = WORK.validate_python(event.values["work"])
            self._open.decided_s, self._open.work = event.time_s, work
            self.n_reads += work.origin is not None

    def _on_copied(self, event: Event) -> None:
        if self._open is not None:
            self._open.copied_s = event.time_s

    def _on_resume(self, event: Event) -> None:
        if (recovery := self._open) is None:
            return
        recovery.generation, recovery.iteration = event.values["generation"], event.values["step"]
        if recovery.work is None:
            raise WorkerError(f"generation {recovery.generation} resumed without a plan")
        plan = recovery.work.hybrid_plan
        self.generation, self.members = recovery.generation, set(plan.nodes)
        self.plans.append((recovery.iteration, plan))
        self.recoveries.append(recovery)
        self._open, self._begun = None, (0, -1)

    def _on_commit(self, event: Event) -> None:
        reports = [report for report in event.values["reports"].values() if report]
        plan = self.plans[-1][1]
        loss = reports[0]["loss"] if reports else float("nan")
        self.rows.append(
            {
                "call": self.call, "iteration": event.values["iteration"], "loss": loss,
                "generation": self.generation, "attempts": 0, "n_pipelines": len(plan.pipelines),
                "n_nodes": len(plan.nodes), "end_wall_s": event.time_s - (self.start_s or 0.0),
            }
        )  # fmt: skip


# --- Training ---------------------------------------------------------------------------------------

WORKER = "makespan.oobleck.worker"
_FORMAT = 1
_SAME_NOTICE_S = 1.0
"""Signals that follow the first within this time are the same notice: Ctrl-C, then SIGTERM of a wrapper."""
_START_S, _SLOW_START_S = 60.0, 300.0
"""Time to connect for a forked process, and for one that starts from scratch or waits for Slurm."""
_TABLE_SHARE = 20
"""Tables are written at checkpoints only if that takes at most this fraction (1 / 20) of the time."""


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """Options of a run; they influence results only through the plans.

    Parameters
    ----------
    n_nodes
        Processes at the start, one per node.
    f
        Simultaneous losses to survive.
    n0
        Fewest nodes of a pipeline.
    template_set
        All sizes that a pipeline may have (``full``), or as few as use every number of nodes (``minimal``).
        See `covering_templates`.
    policy
        Below ``(f + 1) n0`` nodes: ``stop`` with a checkpoint, or ``degrade``: continue and survive fewer
        losses. ``relaunch``: any loss ends the run, as without Oobleck; the same call resumes from the
        checkpoint.
    checkpoint_every
        Iterations between checkpoints; 0 for none by count.
    checkpoint_interval_s
        Longest time between checkpoints [s]; 0 for none by time. A checkpoint is written after the iteration
        that runs then. With both at 0 a checkpoint is written at the end, at a notice, and when too few nodes
        are left.
    n_replacements
        Processes that may be started to replace lost ones.
    hang_s
        Time without a sign of life after which a process is killed [s].
    resume
        Resume the run in the directory; without it, a directory with a checkpoint is rejected.
    first_sizes
        Nodes of the pipelines at the start; none for the best plan.
    pass_order
        Order of the passes in a pipeline: ``1f1b``, or ``zero-bubble``, whose backward passes give the
        gradients of inputs first and those of weights later, while a stage would wait. The bits are the same.
        Plans are made with the times of ``1f1b``.
    recovery
        After a loss: regroup the pipelines and copy layers (``reconfigure``), or let the other nodes of its
        stage run the microbatches of the lost node, while nothing moves (``reroute``). Pipelines still
        regroup if nodes join, or if fewer than f + 1 nodes of a stage would be left.
    interleave
        Stages of each node of a pipeline, which are interleaved if there are several, so that pipelines fill
        and drain sooner. The bits are the same, and plans count the gain. A pipeline has fewer where there
        are no layers for more, and one on a single node. Not with ``reroute``.
    zero_stage
        Stage of ZeRO: with 1, the optimizer state of each layer is divided among the nodes that have it. The
        state of every weight stays on ``f + 1`` of these nodes, so that ``f`` losses at once are survived as
        with 0; the bits are the same, too.
    """

    n_nodes: int
    f: int = 1
    n0: int = 1
    template_set: TemplateSet = "full"
    policy: Literal["stop", "degrade", "relaunch"] = "stop"
    checkpoint_every: int = 0
    checkpoint_interval_s: float = 600.0
    n_replacements: int = 0
    hang_s: float = 10.0
    resume: bool = True
    first_sizes: Sequence[int] = ()
    pass_order: PassOrder = "1f1b"
    recovery: RecoveryKind = "reconfigure"
    interleave: int = 1
    zero_stage: int = 0

    def __post_init__(self) -> None:
        stage: object = self.zero_stage
        if not isinstance(stage, int) or isinstance(stage, bool) or stage not in (0, 1):
            raise InputError(
                f"zero_stage is {stage!r}; expected 0, or 1 to divide the optimizer state; "
                "gradients (2) and weights (3) of a stage are whole in each of its nodes"
            )
        check_choices(self)
        not_negative = ("f", "checkpoint_every", "n_replacements")
        check_fields(self, "", positive=("n_nodes", "n0", "interleave"), not_negative=not_negative)
        if self.recovery == "reroute" and self.policy == "relaunch":
            raise InputError("recovery is 'reroute' and policy 'relaunch'; expected stop or degrade")
        if self.recovery == "reroute" and self.interleave > 1:
            raise InputError(
                f"recovery is 'reroute' and interleave {self.interleave}; expected 1 stage per node, or "
                "recovery 'reconfigure'"
            )
        if not self.hang_s > 0:
            raise InputError(f"hang_s is {self.hang_s!r}; expected a time > 0")
        if not self.checkpoint_interval_s >= 0:
            problem = f"checkpoint_interval_s is {self.checkpoint_interval_s!r}"
            raise InputError(f"{problem}; expected a time >= 0, 0 for no checkpoints by time")
        if self.n_nodes < (self.f + 1) * self.n0:
            needed = f"{(self.f + 1) * self.n0} or more, f + 1 pipelines of {self.n0}"
            raise InputError(f"n_nodes is {self.n_nodes}; expected {needed}")


@dataclass(frozen=True, slots=True, repr=False)
class LiveResult(Displayed):
    """Result of a call that trained.

    Parameters
    ----------
    step
        Iterations done in total.
    iterations, recoveries
        Tables of the call.
    plans
        Each plan with the first iteration under it; sufficient for a replay.
    pids
        Process ids by node.
    checkpoint
        Newest checkpoint, None if there is none.
    """

    step: int
    iterations: pd.DataFrame
    recoveries: pd.DataFrame
    plans: tuple[tuple[int, HybridPlan], ...]
    pids: dict[int, int]
    checkpoint: Path | None

    def display(self) -> Display:
        """Return the number of iterations, and a row per plan."""
        return Display(f"{self.step} iterations", self.recoveries.to_dict("records"))


@typed
def train_resilient(
    job: ChainJob,
    profile: ModelProfile,
    iterations: int,
    run_dir: str | Path,
    options: LiveOptions,
    *,
    launcher: Launcher | None = None,
    watch: Callable[[Event], object] | None = None,
    faults: Faults | None = None,
    record: Record | None = None,
) -> LiveResult:
    """Train a number of iterations, through losses, joins and drains.

    In the main thread SIGINT and SIGTERM are notices: the running iteration ends, a checkpoint and the tables
    are written, and only then the signal has its usual effect. A second signal has it at once. There is no
    time limit.

    Parameters
    ----------
    job, profile
        Job to train, and the times of its layers, by which it is cut into stages.
    iterations
        Total number of iterations, including those of earlier calls.
    run_dir
        Directory of the run, which all nodes see, with the newest two checkpoints and the tables. A further
        call resumes from the newest checkpoint.
    options, launcher
        Options of the run; launcher of the processes, None for this machine.
    watch
        Called with every event of the coordinator, in its process. By default a signal, and what is saved
        where it ends the run, are logged as warnings.
    faults
        Faults to inject.
    record
        Record that gathers events; it may continue that of an earlier call.

    Returns
    -------
    LiveResult
        Its tables are appended to ``iterations.csv`` and ``recoveries.csv``, at checkpoints and at the end.

    Raises
    ------
    InputError
        An argument is invalid, another run uses the directory, or there are too few GPUs.
    CheckpointError
        A checkpoint is that of another job, or every checkpoint is damaged.
    StateLost, InsufficientNodes
        Too many nodes were lost; with `InsufficientNodes` a checkpoint has the complete state.
    WorkerError
        A node failed for another reason than a loss.
    """
    check_range("iterations", iterations)
    launcher = launcher or LocalLauncher()
    check_gpus(launcher, options.n_nodes)
    folder = Path(run_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    handle = acquire(folder / "lock")
    if handle is None:
        raise InputError(
            f"run_dir is {run_dir}, where another run is in progress; expected a directory without one"
        )
    try:
        record = record or Record()
        seen = watch or partial(_log_signals, folder)
        run = _Run(job, profile, iterations, folder, options, launcher, seen, faults, record)
        with _notices(run.take_notice) as received:
            result = run.run()
    finally:
        os.close(handle)
    for number in received[:1]:
        signal.raise_signal(number)
    return result


def _log_signals(folder: Path, event: Event) -> None:
    """Log that a signal ends the run, and what is saved then."""
    if event.kind == "notice":
        text = "ending after this iteration, with a checkpoint; a second signal ends at once"
        _log.warning("%s: %s", event.values["signal"], text)
    elif event.kind == "stopped":
        values = event.values
        _log.warning(
            "%s: stopped after %d iterations, with tables; %s", folder, values["step"], values["saved"]
        )


@contextmanager
def _notices(take: Callable[[str], object]) -> Iterator[list[int]]:
    """Pass the first SIGINT or SIGTERM to a function, and give a second one its usual effect."""
    received: list[int] = []
    first_s = 0.0
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    # A process in the background may have been started with Ctrl-C ignored.
    handlers = {number: signal.getsignal(number) for number in numbers}
    before = {
        number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)
    }

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        if not received:
            received.append(number)
            first_s = time.monotonic()
            take(signal.Signals(number).name)
        elif time.monotonic() - first_s > _SAME_NOTICE_S:
            restore()
            signal.raise_signal(number)

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield received
    finally:
        restore()


def saved_text(run_dir: str | Path) -> str:
    """Describe the checkpoint of a run directory, and the iteration from which the same call resumes."""
    checkpoint = sound_checkpoint(Path(run_dir) / "checkpoints")
    if checkpoint is None:
        return f"{run_dir} has no checkpoint; the same call starts from iteration 0"
    return f"saved: {checkpoint.path}, {checkpoint.step} iteration(s); the same call resumes from there"


class _History:
    """Table in the run directory, to which every call appends its rows."""

    def __init__(self, schema: TableSchema, folder: Path, n_known: int) -> None:
        self._path, self._n_known = folder / f"{schema.name}.csv", n_known
        header = ",".join(schema.names) + "\n"
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else header
        self._before = text[: text.rfind("\n") + 1]  # without an incomplete last line
        earlier = ",".join(name for name in schema.names if name not in _LATER_COLUMNS) + "\n"
        if earlier != header and self._before.startswith(earlier):
            content, where = self._before.encode(), str(self._path)
            before = parse_csv(content, where, f"the table {schema.name}", dtype=str, keep_default_na=False)
            self._before = csv_text(before.reindex(columns=list(schema.names), fill_value=""))
        first, *rows = self._before.splitlines(keepends=True) or [""]
        if first != header:
            problem = f"{self._path} has the columns {first.strip() or 'of no table'}"
            raise InputError(f"{problem}; expected {header.strip()}, or no such file")
        calls = [cell for row in rows if (cell := row.partition(",")[0]).isdecimal()]
        self.n_calls = max(map(int, calls), default=0)

    def write(self, table: pd.DataFrame) -> None:
        """Write the earlier rows and those of this call, the last rows of ``table``."""
        rows = csv_text(table.iloc[self._n_known :], header=False)
        write_text(self._before + rows, self._path)


class _Run:
    """Run whose directory is locked: sets up the coordinator, and starts and kills processes for it."""

    def __init__(
        self,
        job: ChainJob,
        profile: ModelProfile,
        iterations: int,
        folder: Path,
        options: LiveOptions,
        launcher: Launcher,
        watch: Callable[[Event], object],
        faults: Faults | None,
        record: Record,
    ) -> None:
        self.job, self.folder, self.options, self.launcher = job, folder, options, launcher
        self.watch, self.record, self.checkpoints = watch, record, folder / "checkpoints"
        self.faults, self.slots = faults, GpuSlots(launcher)
        self.coordinator: Coordinator[HybridPlan] | None = None
        self.notice, self._write_next_s = "", 0.0
        self.started = self._start(iterations)
        self.histories = (
            _History(ITERATIONS, folder, len(record.rows)),
            _History(RECOVERIES, folder, len(record.recoveries)),
        )
        record.call = max(history.n_calls for history in self.histories) + 1
        templates = interleaved_templates(
            covering_templates(
                profile, options.n_nodes, options.f, options.n0, template_set=options.template_set
            ),
            profile, options.interleave,
        )  # fmt: skip
        first_sizes = tuple(options.first_sizes)
        if first_sizes:
            check_first_sizes(templates, options.n_nodes, job.n_microbatches, first_sizes)
        if options.recovery == "reroute":
            first_sizes = reroutable_sizes(
                templates, options.n_nodes, options.f, job.n_microbatches, first_sizes
            )
        self.decider = ReconfigurationPlanner(
            profile, templates, options.n_nodes, options.f, options.n0, job.n_microbatches,
            [round((1 + STATES_PER_WEIGHT) * layer.parameter_bytes) for layer in profile.layers],
            policy=options.policy, first_sizes=first_sizes,
            origin=None if self.started is None else self.started.path, recovery=options.recovery,
            is_divided=options.zero_stage == 1, interleave=options.interleave,
        )  # fmt: skip
        self.protocol = CoordinatorProtocol(
            self.decider, range(options.n_nodes), iterations,
            step=0 if self.started is None else self.started.step,
            save_every=options.checkpoint_every, failed=WorkerError, rejected=InputError,
        )  # fmt: skip
        self.launch = Launch(WORKER, {}, options.n_nodes, folder / PROCESSES, on_loss="tell")

    def _start(self, iterations: int) -> Checkpoint | None:
        """Return the checkpoint from which the run resumes, None if there is none."""
        saved = sound_checkpoint(self.checkpoints)
        if saved is None:
            return None
        if not self.options.resume:
            where = f"run_dir is {self.folder}, which has a checkpoint after {saved.step} iterations"
            raise InputError(f"{where}; expected resume, or a directory without one")
        job = json.loads(json.dumps(self.job.values()))  # tuples become lists, as in the checkpoint
        if saved.values.get("format") != _FORMAT or saved.values.get("job") != job:
            raise CheckpointError(f"{saved.path}: is that of another job")
        if saved.step > iterations:
            raise InputError(f"iterations is {iterations}; expected at least {saved.step}, which are done")
        return saved

    def run(self) -> LiveResult:
        """Train to the end."""
        if self.started is not None and self.started.step >= self.protocol.end:
            return self._result()
        asked = NodeRequest(
            self.job, self.checkpoints / ".partial", self.options.pass_order,
            reroutes=self.options.recovery == "reroute", is_divided=self.options.zero_stage == 1,
        )  # fmt: skip
        request = NODE.dump_python(asked, mode="json")
        RunDirectory(self.launch.run_dir).prepare(request)
        self.coordinator = coordinator = Coordinator(
            self.protocol, self.launch.run_dir, request, self, self._take_event,
            begin_checkpoint=lambda: start_checkpoint(self.checkpoints), finish_checkpoint=self._finish,
            limits=Timeouts(
                hang_s=self.options.hang_s, start_s=_START_S if self.is_forked else _SLOW_START_S,
                checkpoint_s=self.options.checkpoint_interval_s,
            ),
            n_replacements=self.options.n_replacements,
        )  # fmt: skip
        self.decider.hosts = coordinator.hosts
        if self.faults is not None:
            self.faults.hold = coordinator.hold
        if self.notice:
            coordinator.stop(self.notice)
        try:
            coordinator.run()
        except (InsufficientNodes, StateLost) as error:
            # A notice may reach the nodes first; then all of them leave, and the run has not failed.
            if not self.notice or self.protocol.saved != self.protocol.step:
                raise self._explained(error) from None
        except LostWorkerError:
            # Policy relaunch. After a notice the run ends here, and the signal has its effect: relaunching
            # would swallow it.
            if not self.notice:
                raise
        finally:
            self._write()
        if self.notice and self.protocol.step < self.protocol.end:
            stopped = {"signal": self.notice, "step": self.protocol.step, "saved": saved_text(self.folder)}
            self._take_event(Event("stopped", time.monotonic(), None, stopped))
        return self._result()

    def _explained(self, error: InsufficientNodes | StateLost) -> Exception:
        """Return the report of a process that ended before a plan was made, else the error and its causes."""
        directory = RunDirectory(self.launch.run_dir)
        for node in range(self.options.n_nodes):
            kind, _, text = ((directory.error(node) or {}).get("error") or "").partition(": ")
            if kind and self.protocol.plan is not None:
                error.args = (f"{error}; node {node} ended: {kind}: {text}",)
                return error
            if kind:
                is_input = issubclass(getattr(errors, kind, Exception), InputError)
                message = f"node {node} ended at the start: {text if is_input else f'{kind}: {text}'}"
                return InputError(message) if is_input else WorkerError(message)
        if self.coordinator is not None and (ends := self.coordinator.ends("node")):
            error.args = (f"{error}; {ends}",)
        return error

    def take_notice(self, name: str) -> None:
        """End the run with a checkpoint after the running iteration; a signal handler calls it."""
        self.notice = name
        if self.coordinator is not None:
            self.coordinator.stop(name)

    def start(self, node: int, replaced: int | None = None) -> Process:
        """Start the process of a node (see `ProcessStarter`)."""
        return self.slots.start(self.launch, node, replaced)

    @property
    def is_forked(self) -> bool:
        """True if processes are forked from one that has loaded torch."""
        return isinstance(self.launcher, LocalLauncher) and self.launcher.device == "cpu"

    def end(self, process: Process) -> None:
        """Kill a process (see `ProcessStarter`)."""
        self.launcher.end(process)

    def _take_event(self, event: Event) -> None:
        self.record(event)
        self.watch(event)
        if self.faults is not None:
            self.faults(event)

    def _finish(self, step: int) -> None:
        # Tables first, so that a checkpoint never lacks its iterations in them.
        begin_s = time.monotonic()
        if begin_s >= self._write_next_s:
            self._write()
            now_s = time.monotonic()
            self._write_next_s = now_s + _TABLE_SHARE * (now_s - begin_s)
        values = {"format": _FORMAT, "job": self.job.values(), "machine": describe_machine()}
        try:
            finish_checkpoint(self.checkpoints, step, 0.0, values)
        except OSError as error:
            where = f"{self.checkpoints}: the checkpoint after {step} iterations cannot be written"
            raise CheckpointError(f"{where}: {error.strerror}") from None

    def _write(self) -> None:
        iterations, recoveries = self.histories
        iterations.write(self.record.iterations())
        recoveries.write(self.record.recovery_table())

    def _result(self) -> LiveResult:
        checkpoint = sound_checkpoint(self.checkpoints)
        return LiveResult(
            self.protocol.step, self.record.iterations(), self.record.recovery_table(),
            tuple(self.record.plans), dict(self.record.pids), None if checkpoint is None else checkpoint.path,
        )  # fmt: skip


# --- Baseline: relaunch all processes from a checkpoint after each loss -----------------------------


def train_relaunching(
    job: ChainJob,
    profile: ModelProfile,
    iterations: int,
    run_dir: str | Path,
    options: LiveOptions,
    *,
    record: Record,
    faults: Faults | None = None,
) -> LiveResult:
    """Train as `train_resilient`, but relaunch all processes from the newest checkpoint after each loss.

    Processes are forked from one that has loaded torch, so that a relaunch is as short as possible.
    ``record`` has the events of all launches; the result is that of the last one.
    """
    while True:
        try:
            return train_resilient(
                job, profile, iterations, run_dir, replace(options, policy="relaunch", n_replacements=0),
                record=record, faults=faults,
            )  # fmt: skip
        except LostWorkerError:
            continue


# --- Joining and draining a run from outside --------------------------------------------------------


def join_run(run_dir: str | Path, launcher: Launcher | None = None) -> str:
    """Join a run with one more process; see `makespan.runtime.joining.join_with`.

    Parameters
    ----------
    run_dir, launcher
        Directory of an active run, on a file system that this machine sees; where the process runs.

    Returns
    -------
    str
        Why the process ended.

    Raises
    ------
    InputError
        No run is active there, or several GPUs are visible.
    WorkerError
        The process failed or was killed.
    """
    return join_with(run_dir, Launch(WORKER, {}, 1, Path(run_dir).resolve() / PROCESSES), launcher)


def drain_nodes(run_dir: str | Path, nodes: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Release nodes of a run at the next boundary of iterations, or end it there with a checkpoint.

    Parameters
    ----------
    run_dir, nodes
        Directory of an active run, and the nodes to release; none to end the run.

    Returns
    -------
    tuple
        Nodes that the run does not have; the others leave. A run of this process warns of them instead.

    Raises
    ------
    InputError
        No run is active there, it has none of the nodes, or it does not answer.
    """
    return drain(run_dir, nodes)
