"""Train through the loss of nodes: start the nodes of a run, coordinate them, and tell what came of it."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pandas as pd

from makespan import errors
from makespan.errors import CheckpointError, InputError, WorkerError
from makespan.files import write_text
from makespan.oobleck._faults import Faults
from makespan.oobleck._record import Record
from makespan.oobleck._tables import ITERATIONS, RECOVERIES
from makespan.oobleck.planning import HybridPlan, ModelProfile, TemplateSet, covering_templates
from makespan.oobleck.reconfiguration import InsufficientNodes
from makespan.oobleck.runtime import ChainJob, Coordination, Coordinator, Decider, Event, Limits
from makespan.runtime import (
    Launch,
    Launcher,
    LocalLauncher,
    Process,
    RunDirectory,
    check_gpus,
    describe_machine,
    finish_checkpoint,
    sound_checkpoint,
    start_checkpoint,
    take,
)
from makespan.tables import TableSchema, csv_text

__all__ = ["LiveOptions", "LiveResult", "saved_text", "train_resilient"]

WORKER = "makespan.oobleck.runtime._worker"
PROCESSES = "processes"
_FORMAT = 1
_STATE_FACTOR = 3
"""Bytes of state a byte of parameters: itself and two moments."""
_SAME_NOTICE_S = 1.0
"""Signals that follow the first within this time are the same notice: Ctrl-C, then SIGTERM of a wrapper."""
_START_S, _SLOW_START_S = 60.0, 300.0
"""Until a forked process must have connected, and one that starts from nothing or waits for Slurm."""
_TABLE_SHARE = 20
"""Tables are written at checkpoints as long as that takes at most one part in so many of the time."""


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """How a job is run; none of it decides a bit but the plans that follow.

    Parameters
    ----------
    n_nodes
        Processes at the start, one a node.
    f, n0
        Losses at once that must be survived, and the fewest nodes of a pipeline.
    template_set
        ``full`` or ``minimal``, see `covering_templates`.
    policy
        Below ``(f + 1) n0`` nodes: ``stop`` with a checkpoint, or ``degrade``, go on and survive less.
        ``relaunch``: any loss ends the run, as without Oobleck; the same call goes on from the checkpoint.
    checkpoint_every
        Iterations between checkpoints; 0 for none by count.
    checkpoint_interval_s
        Longest time between checkpoints [s]: one is written after the iteration that runs then; 0 for none
        by time. With both at 0 a checkpoint is written at the end, at a notice, and when too few nodes are
        left.
    n_replacements
        New processes that are started for lost ones.
    hang_s
        A process that is silent for so long is killed [s].
    resume
        Whether a run in the directory is continued; otherwise one is refused.
    first_sizes
        Nodes of the pipelines at the start; none for the best plan.
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

    def __post_init__(self) -> None:
        least = {"n_nodes": 1, "f": 0, "n0": 1, "checkpoint_every": 0, "n_replacements": 0}
        for name, number in least.items():
            found = getattr(self, name)
            if not isinstance(found, int) or found < number:
                raise InputError(f"{name} is {found!r}; accepted: a whole number >= {number}")
        if not self.hang_s > 0:
            raise InputError(f"hang_s is {self.hang_s!r}; accepted: a time > 0")
        if not self.checkpoint_interval_s >= 0:
            found = f"checkpoint_interval_s is {self.checkpoint_interval_s!r}"
            raise InputError(f"{found}; accepted: a time >= 0, 0 for no checkpoints by time")
        if self.n_nodes < (self.f + 1) * self.n0:
            needed = f"{(self.f + 1) * self.n0} or more, f + 1 pipelines of {self.n0}"
            raise InputError(f"n_nodes is {self.n_nodes}; accepted: {needed}")


@dataclass(frozen=True, slots=True)
class LiveResult:
    """What came of a run, from its start or its continuation on.

    Parameters
    ----------
    step
        Iterations done in all.
    iterations, recoveries
        Tables of what happened.
    plans
        Each plan with the first iteration that was done under it; a replay needs no more.
    pids
        Process ids by node.
    checkpoint
        The newest.
    """

    step: int
    iterations: pd.DataFrame
    recoveries: pd.DataFrame
    plans: tuple[tuple[int, HybridPlan], ...]
    pids: dict[int, int]
    checkpoint: Path | None


def train_resilient(
    job: ChainJob,
    profile: ModelProfile,
    iterations: int,
    run_dir: str | Path,
    options: LiveOptions,
    *,
    launcher: Launcher | None = None,
    watch: Callable[[Event], object] = lambda event: None,
    faults: Faults | None = None,
    record: Record | None = None,
) -> LiveResult:
    """Train until so many iterations are done, through losses, joins and drains.

    In the main thread SIGINT and SIGTERM are notices: the running iteration ends, a checkpoint and the tables
    are written, and only then the signal does what it does otherwise. A second one does so at once. There is
    no time limit.

    Parameters
    ----------
    job, profile
        What is trained, and the times of its layers, by which pipelines are cut.
    iterations
        In all, those of earlier calls included.
    run_dir
        Directory of the run, which all nodes see, with the newest two checkpoints and the tables. A further
        call resumes from the newest checkpoint.
    options, launcher
        How, and where processes run, None for this machine.
    watch
        Told every event of the coordinator, in its process.
    faults
        What kills nodes at chosen moments, to try the run.
    record
        What gathers events; one that has those of an earlier call goes on with them.

    Returns
    -------
    LiveResult
        Its tables are appended to ``iterations.csv`` and ``recoveries.csv``, at checkpoints and at the end.

    Raises
    ------
    InputError
        An argument cannot be used, a run is going on in the directory, or there are too few GPUs.
    CheckpointError
        A checkpoint is that of another job, or all are damaged.
    StateLost, InsufficientNodes
        Too much was lost; after the second a checkpoint has all.
    WorkerError
        Something failed that is no loss.
    """
    launcher = launcher or LocalLauncher()
    check_gpus(launcher, options.n_nodes)
    folder = Path(run_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    handle = take(folder / "lock")
    if handle is None:
        raise InputError(f"run_dir is {run_dir}, where a run is going on; accepted: a directory of its own")
    try:
        record = record or Record()
        run = _Run(job, profile, iterations, folder, options, launcher, watch, faults, record)
        with _notices(run.take_notice) as came:
            result = run.run()
    finally:
        os.close(handle)
    for number in came[:1]:
        signal.raise_signal(number)
    return result


@contextmanager
def _notices(take: Callable[[str], object]) -> Iterator[list[int]]:
    """Hand the first signal that asks for the end to a function, and leave a second one its usual effect."""
    came: list[int] = []
    first_s = 0.0
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    # A process in the background may have been told to ignore Ctrl-C.
    found = {one: signal.getsignal(one) for one in numbers}
    before = {one: handler for one, handler in found.items() if handler not in (signal.SIG_IGN, None)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        if not came:
            came.append(number)
            first_s = time.monotonic()
            take(signal.Signals(number).name)
        elif time.monotonic() - first_s > _SAME_NOTICE_S:
            restore()
            signal.raise_signal(number)

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield came
    finally:
        restore()


def saved_text(run_dir: str | Path) -> str:
    """Say which checkpoint a run directory has, and what the same call would do with it."""
    found = sound_checkpoint(Path(run_dir) / "checkpoints")
    if found is None:
        return f"{run_dir} has no checkpoint; the same call starts from iteration 0"
    return f"saved: {found.path}, {found.step} iteration(s); the same call resumes from there"


class _History:
    """A table of the run directory, to which every call appends its rows."""

    def __init__(self, schema: TableSchema, folder: Path, n_known: int) -> None:
        self._path, self._n_known = folder / f"{schema.name}.csv", n_known
        header = ",".join(schema.names) + "\n"
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else header
        self._before = text[: text.rfind("\n") + 1]
        first, *rows = self._before.splitlines(keepends=True) or [""]
        if first != header:
            found = f"{self._path} has the columns {first.strip() or 'of no table'}"
            raise InputError(f"{found}; accepted: {header.strip()}, or no such file")
        calls = [cell for row in rows if (cell := row.partition(",")[0]).isdecimal()]
        self.n_calls = max(map(int, calls), default=0)

    def write(self, table: pd.DataFrame) -> None:
        """Write the earlier rows and those of this call, which are the last of a table."""
        own = csv_text(table.iloc[self._n_known :], header=False)
        write_text(self._before + own, self._path)


def _gpus_of(launcher: Launcher) -> Sequence[int]:
    """Return the GPUs of this machine, by their places, that nodes may have; empty where they use none."""
    named = launcher.gpus if isinstance(launcher, LocalLauncher) else None
    return range(launcher.n_devices or 0) if named is None else named


class _Run:
    """One run while its directory is held."""

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
        self.faults, self.on_gpu = faults, dict[int, Process]()
        self.gpus = _gpus_of(launcher)
        self.coordinator: Coordinator[HybridPlan] | None = None
        self.notice, self._write_next_s = "", 0.0
        self.started = self._start(iterations)
        self.histories = (
            _History(ITERATIONS, folder, len(record.rows)),
            _History(RECOVERIES, folder, len(record.recoveries)),
        )
        record.call = max(one.n_calls for one in self.histories) + 1
        templates = covering_templates(
            profile, options.n_nodes, options.f, options.n0, template_set=options.template_set
        )
        self.decider = Decider(
            profile, templates, options.n_nodes, options.f, options.n0, job.n_microbatches,
            [round(_STATE_FACTOR * one.parameter_bytes) for one in profile.layers],
            policy=options.policy, first_sizes=options.first_sizes,
            origin=None if self.started is None else str(self.started.path),
        )  # fmt: skip
        self.protocol = Coordination(
            self.decider, range(options.n_nodes), iterations,
            step=0 if self.started is None else self.started.step,
            save_every=options.checkpoint_every, failed=WorkerError, rejected=InputError,
        )  # fmt: skip
        self.launch = Launch(WORKER, {}, options.n_nodes, folder / PROCESSES, on_loss="tell")

    def _start(self, iterations: int) -> Any:
        """Find the checkpoint from which the run goes on, if there is one."""
        found = sound_checkpoint(self.checkpoints)
        if found is None:
            return None
        if not self.options.resume:
            where = f"run_dir is {self.folder}, which has a checkpoint after {found.step} iterations"
            raise InputError(f"{where}; accepted: resume, or a directory without one")
        if found.values.get("format") != _FORMAT or found.values.get("job") != self._plain_job():
            raise CheckpointError(f"{found.path}: is that of another job")
        if found.step > iterations:
            raise InputError(f"iterations is {iterations}; accepted: at least {found.step}, which are done")
        return found

    def _plain_job(self) -> Any:
        return json.loads(json.dumps(self.job.values()))

    def run(self) -> LiveResult:
        """Train."""
        if self.started is not None and self.started.step >= self.protocol.end:
            return self._result()
        request = {"job": self.job.values(), "partial": str(self.checkpoints / ".partial")}
        RunDirectory(self.launch.run_dir).prepare(request)
        self.coordinator = coordinator = Coordinator(
            self.protocol, self.launch.run_dir, request, self, self._take_event,
            begin_checkpoint=lambda: start_checkpoint(self.checkpoints), finish_checkpoint=self._finish,
            limits=Limits(
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
        except InsufficientNodes as error:
            # A notice may have reached the nodes first, all of which leave then.
            if not self.notice or self.protocol.saved != self.protocol.step:
                raise self._at_start(error) from None
        finally:
            self._write()
        if self.notice and self.protocol.step < self.protocol.end:
            self._take_event(Event("stopped", time.monotonic(), None, self._stopped()))
        return self._result()

    def _at_start(self, error: InsufficientNodes) -> Exception:
        """Return what processes reported that ended before a plan was made, else the error itself."""
        directory = RunDirectory(self.launch.run_dir)
        for node in range(self.options.n_nodes if self.protocol.plan is None else 0):
            kind, _, text = ((directory.error(node) or {}).get("error") or "").partition(": ")
            if kind:
                is_input = issubclass(getattr(errors, kind, Exception), InputError)
                found = f"node {node} ended at the start: {text if is_input else f'{kind}: {text}'}"
                return InputError(found) if is_input else WorkerError(found)
        return error

    def take_notice(self, name: str) -> None:
        """End the run with a checkpoint after the running iteration; a signal handler calls it."""
        self.notice = name
        if self.coordinator is not None:
            self.coordinator.stop(name)

    def _stopped(self) -> dict[str, Any]:
        return {"signal": self.notice, "step": self.protocol.step, "saved": saved_text(self.folder)}

    def start(self, node: int) -> Process:
        """Start the process of a node, on a GPU that no other has if there are any; of a `Starter`."""
        launcher = self.launcher
        if not (self.gpus and isinstance(launcher, LocalLauncher)):
            return launcher.start(self.launch, node)
        free = [gpu for gpu in self.gpus if gpu not in self.on_gpu or self.on_gpu[gpu].poll() is not None]
        gpu = free[0] if free else self.gpus[node % len(self.gpus)]
        self.on_gpu[gpu] = replace(launcher, gpus=(gpu,)).start(self.launch, node)
        return self.on_gpu[gpu]

    @property
    def is_forked(self) -> bool:
        """Whether processes are forked from one that has torch loaded."""
        return isinstance(self.launcher, LocalLauncher) and self.launcher.device == "cpu"

    def end(self, process: Process) -> None:
        """End a process; of a `Starter`."""
        self.launcher.end(process)

    def _take_event(self, event: Event) -> None:
        self.record(event)
        self.watch(event)
        if self.faults is not None:
            self.faults(event)

    def _finish(self, step: int) -> None:
        # Tables first, so that whoever finds the checkpoint finds its iterations too.
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
        found = sound_checkpoint(self.checkpoints)
        return LiveResult(
            self.protocol.step, self.record.iterations(), self.record.recovery_table(),
            tuple(self.record.plans), dict(self.record.pids), None if found is None else found.path,
        )  # fmt: skip
