"""Elastic trainer: start, change and resume runs, share processes between jobs, and write their tables.

A run is a sequence of generations (column ``stage`` of its tables). A generation is one set of processes with
one mapping, from a checkpoint to the next. This module starts the processes and does not load torch;
`makespan.easyscale.worker` is their code.

The directory of a run outlives its generations: ``checkpoints/`` has the newest two, ``records/`` the rows
and changes between them, ``steps.csv`` and ``reconfigurations.csv`` the tables made of these, ``state.json``
the state of the run, and ``wanted.json`` a requested mapping.
"""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pandas as pd

from makespan import errors
from makespan.arguments import check_kind, check_range
from makespan.cleanup import temporary_directory
from makespan.easyscale.job import (
    AUTO,
    MODEL_FILE,
    TRAINING_LOCK,
    ElasticJob,
    Placing,
    RankMapping,
    RunOptions,
    job_from,
)
from makespan.easyscale.kernels import KERNEL_SET_VARIABLE, process_options
from makespan.easyscale.recovery import ASSEMBLY, Assembly, RecoveryPlanner, RecoveryProtocol
from makespan.easyscale.requests import GENERATIONS, GenerationRequest, Reconfiguration
from makespan.errors import (
    CheckpointError,
    InputError,
    LostWorkerError,
    TrainingError,
    WorkerError,
    unknown_name,
)
from makespan.files import check_target, read_json, write_json
from makespan.notebook import Display, Displayed
from makespan.runtime import (
    Checkpoint,
    GpuSlots,
    Launch,
    Launcher,
    LocalLauncher,
    Process,
    RunDirectory,
    SlurmLauncher,
    acquire,
    check_gpus,
    describe_machine,
    discard_partial,
    finish_checkpoint,
    is_locked,
    latest_checkpoint,
    sound_checkpoint,
    start_checkpoint,
)
from makespan.runtime.coordinator import Coordinator, Event, Timeouts
from makespan.runtime.joining import PROCESSES, drain, join_with
from makespan.runtime.messages import Cause
from makespan.runtime.node import ADDRESS_FILE
from makespan.tables import table_schema, write_csv
from makespan.training.weights import check_weights_path, copy_weights

_log = logging.getLogger(__name__)


# --- Tables of a run ---

ELASTIC_STEPS = table_schema(
    "steps",
    ("stage", "int", "1", "number of the set of processes, from 0"),
    ("step", "int", "1", "number of the mini-batch, from 1"),
    ("rank", "int", "1", "virtual rank of the logical worker"),
    ("process", "int", "1", "process that hosts the logical worker"),
    ("device", "text", "", "device of that process"),
    ("loss", "float", "1", "loss of its micro-batch", True),
    ("loss_hex", "text", "", "loss in hexadecimal, with every bit"),
    (
        "parameter_sha",
        "text",
        "",
        "SHA-256 of the parameters after the mini-batch; empty if not requested",
    ),
    ("optimizer_sha", "text", "", "SHA-256 of state and options of the optimizer"),
    ("context_sha", "text", "", "SHA-256 of buffers and random states of the logical worker"),
    (
        "micro_batch_s",
        "float",
        "s",
        "forward and backward pass of its micro-batch, with the context switch; empty if the process was "
        "lost before the next checkpoint, as is the next column",
        True,
    ),
    ("sync_s", "float", "s", "sum of gradients and optimizer step in that process", True),
)
RECONFIGURATIONS = table_schema(
    "reconfigurations",
    ("step", "int", "1", "mini-batches done before the change"),
    (
        "cause",
        "text",
        "",
        "start, run (another call), request, failure of a process (from the checkpoint); or, from the memory "
        "of the other processes, recovery from a loss, drain or join",
    ),
    ("old_mapping", "text", "", "mapping before; empty at the start"),
    ("new_mapping", "text", "", "mapping from then on"),
    ("old_devices", "text", "", "device of each process before"),
    ("new_devices", "text", "", "device of each process from then on"),
    (
        "restart_s",
        "float",
        "s",
        "writing the checkpoint, start of the processes, and building from the checkpoint; of a recovery, "
        "drain or join, the pause in the table recoveries",
    ),
)
ELASTIC_RECOVERIES = table_schema(
    "recoveries",
    ("stage", "int", "1", "number of the set of processes that continued"),
    ("step", "int", "1", "mini-batches done in the state from which they continued"),
    ("kind", "text", "", "lost, failed, drained or joined; of several the first of these"),
    ("lost", "text", "", "lost processes of the mapping before; empty after a failure without a loss"),
    ("drained", "text", "", "processes of the mapping before that left on notice"),
    ("joined", "text", "", "processes of the new mapping that joined; empty if they wait as spares"),
    ("workers", "text", "", "logical workers of the lost and drained processes"),
    ("n_behind", "int", "1", "processes that copied parameters and optimizer from another one"),
    ("attempts", "int", "1", "times that the processes met; each further loss adds one"),
    ("formed_s", "float", "s", "begin (below) until all had connected and copied"),
    (
        "pause_s",
        "float",
        "s",
        "begin until all had done the next mini-batch; a loss begins with its detection, a drain or join "
        "when all have done the mini-batch before and reported it",
    ),
)
"""Changes from memory; the table exists in runs with ``survives`` only."""


# --- Directory of a run ---

_PREDECESSOR_S = 60.0  # longest wait for training processes of a killed run to end
_RECORD = re.compile(r"step-(\d+)\.json")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Files of a run; one process at a time holds them."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Directory of checkpoints."""
        return self.path / "checkpoints"

    @property
    def change_request_path(self) -> Path:
        """File that requests another placing."""
        return self.path / "wanted.json"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the directory for this process; an `InputError` is raised if another process holds it.

        Training processes end soon after their run was killed; until then they may write checkpoints, so this
        waits for them.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        expected = "a directory of its own for each run"
        handle = acquire(self.path / "lock")
        if handle is None:
            raise InputError(f"run_dir is {self.path}, where another run is active; expected {expected}")
        try:
            # Training processes share this lock. Once it is free, those of an earlier run have ended; it is
            # released again for those of this run.
            training = acquire(self.path / TRAINING_LOCK, _PREDECESSOR_S)
            if training is None:
                raise InputError(
                    f"run_dir is {self.path}, where processes of an earlier run still train after "
                    f"{_PREDECESSOR_S:g} s; expected {expected}"
                )
            os.close(training)
            yield
        finally:
            os.close(handle)

    def is_held(self) -> bool:
        """Return True while a run holds the directory."""
        return is_locked(self.path / "lock")

    def checkpoint(self) -> Checkpoint | None:
        """Newest undamaged checkpoint, see `makespan.runtime.sound_checkpoint`."""
        return sound_checkpoint(self.checkpoints)

    def discard_records_after(self, step: int) -> None:
        """Remove the records of mini-batches after the last checkpoint."""
        for path, end in self._records():
            if end > step:
                path.unlink()

    def _records(self) -> list[tuple[Path, int]]:
        """Record files in order, each with its last mini-batch."""
        matches = [(path, _RECORD.fullmatch(path.name)) for path in sorted((self.path / "records").glob("*"))]
        return [(path, int(match[1])) for path, match in matches if match is not None]

    def write_tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Write ``steps.csv`` and ``reconfigurations.csv`` from all records, and return both tables."""
        records = [read_json(path, CheckpointError) for path, _ in self._records()]
        # A generation with several checkpoints repeats its change; the last record counts.
        changes: dict[int, Any] = {}
        steps: list[Any] = []
        for (path, _), record in zip(self._records(), records, strict=True):
            try:
                changes |= record.get("changes") or {str(record["rows"][0]["stage"]): record["change"]}
                steps += record["rows"]
            except (TypeError, ValueError, LookupError, AttributeError):
                raise CheckpointError(f"{path}: is no record of mini-batches and their changes") from None
        recoveries = [row for record in records for row in record.get("recoveries", ())]
        schemas = [
            (ELASTIC_STEPS, steps),
            (RECONFIGURATIONS, [changes[stage] for stage in sorted(changes, key=int)]),
        ]
        if any("recoveries" in record for record in records):
            schemas.append((ELASTIC_RECOVERIES, recoveries))
        tables = []
        for schema, rows in schemas:
            path = self.path / f"{schema.name}.csv"
            tables.append(schema.validate(pd.DataFrame(rows, columns=schema.names), str(path)))
            write_csv(tables[-1], path)
        return tables[0], tables[1]

    def write_state(self, state: str, step: int, job: dict[str, Any], *, mixes_devices: bool) -> None:
        """Write the state of the run, its mini-batches done, its job, and whether it mixes devices."""
        values = {"state": state, "step": step, "job": job, "mixes_devices": mixes_devices}
        write_json(values, self.path / "state.json")

    def state(self) -> dict[str, Any]:
        """Return the last written state; an `InputError` is raised if there is none."""
        state = read_json(self.path / "state.json")
        if not isinstance(state, dict) or "job" not in state:
            raise InputError(f"run_dir is {self.path}, which holds no run; expected the directory of a run")
        return state

    def request_placing(self, values: dict[str, Any]) -> None:
        """Request another placing, by its values; an empty dictionary suspends the run."""
        write_json(values, self.change_request_path)

    def pop_requested_placing(self) -> dict[str, Any] | None:
        """Return the values of the requested placing and remove the request; None without one."""
        taken = self.path / "taken.json"
        try:
            self.change_request_path.replace(taken)  # a later request is kept
        except FileNotFoundError:
            return None
        values: dict[str, Any] | None = read_json(taken)
        return values


# --- Generations of a run ---

_WORKER = "makespan.easyscale.worker"
_RECOVERING_WORKER = "makespan.easyscale.recovering_worker"
_SCAN_WORKER = "makespan.easyscale.scan_worker"
_FORMAT = 1  # of checkpoints
_NO_END = 1 << 62
"""Transactions of a run that survives losses: it ends when a report of its processes says so."""


@dataclass(frozen=True, slots=True, repr=False)
class ElasticResult(Displayed):
    """Result of a run so far.

    Parameters
    ----------
    state
        ``finished``, also if its loop stopped early, or ``pending`` if it was suspended; the same call then
        resumes it.
    step
        Mini-batches done.
    steps
        One row per mini-batch and logical worker, table ``steps``: losses, hashes, times.
    reconfigurations
        One row per set of processes, table ``reconfigurations``.
    rates_per_s
        Micro-batches per second on each device, from the median of their times; C_i of the planner.
    checkpoint
        Directory of the newest checkpoint, None before the first.
    """

    state: Literal["finished", "pending"]
    step: int
    steps: pd.DataFrame
    reconfigurations: pd.DataFrame
    rates_per_s: dict[str, float]
    checkpoint: Path | None

    def display(self) -> Display:
        """Return the state, and a row per set of processes."""
        rows = self.reconfigurations.to_dict("records")
        return Display(f"{self.state} after {self.step} mini-batches", rows)


class _ElasticRun:
    """One run while this process holds its directory.

    The newest checkpoint is the state of the run: ``done`` and everything sent to the next generation follow
    from it. The run ends when all mini-batches are done or when it is suspended.
    """

    def __init__(
        self, job: ElasticJob, folder: RunFolder, steps: int, placing: Placing, options: RunOptions
    ) -> None:
        self.job, self.folder = job, folder
        self.steps, self.placing, self.options = steps, placing, options
        self.checkpoint: Checkpoint | None = None
        self.cause, self.n_failures, self.is_suspended = "run", 0, False

    @property
    def done(self) -> int:
        """Mini-batches done in the newest checkpoint."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def is_unfinished(self) -> bool:
        """True if the run needs another generation."""
        return not self.is_suspended and not self.is_stopped and self.done < self.steps

    @property
    def is_stopped(self) -> bool:
        """True if the loop of the job stopped early, after the mini-batches of the newest checkpoint."""
        return self.checkpoint is not None and bool(self.checkpoint.values.get("is_stopped"))

    def begin(self) -> None:
        """Find the newest checkpoint and check that this call can resume it."""
        self.placing.check_types(self.job, self.options.mixes_devices)
        self.checkpoint = self.folder.checkpoint()
        if self.checkpoint is not None and not self.options.resume:
            raise InputError(
                f"run_dir is {self.folder.path}, which has a checkpoint after {self.done} mini-batches; "
                "expected resume=True, or a directory without one"
            )
        if self.checkpoint is not None:
            _check_continues(self.checkpoint, self.job, self.placing)
        if self.done > self.steps:
            raise InputError(f"steps is {self.steps}; expected at least {self.done}, which are already done")
        self.folder.discard_records_after(self.done)
        for name in (ELASTIC_STEPS.name, RECONFIGURATIONS.name):
            check_target(self.folder.path / f"{name}.csv")
        if self.checkpoint is not None:
            self.folder.write_tables()  # which fails before training if a record is damaged
        self._write_state("running")

    def request(self, is_first: bool, gloo_order_dir: Path) -> GenerationRequest:
        """Return the request to the processes of the next generation."""
        checkpoint, options, placing = self.checkpoint, self.options, self.placing
        if checkpoint is None:
            generation, old_mapping, old_devices, fold = 0, "", "", None
        else:
            values = checkpoint.values
            generation, fold = values["stage"] + 1, values["fold"]
            old_mapping, old_devices = values["mapping"], ",".join(values["devices"])
        return GenerationRequest(
            job=self.job,
            placing=placing,
            generation=generation,
            is_first=is_first,
            change=Reconfiguration(
                step=self.done,
                cause="start" if checkpoint is None and self.cause == "run" else self.cause,
                old_mapping=old_mapping,
                new_mapping=str(placing.mapping),
                old_devices=old_devices,
                new_devices=",".join(placing.devices),
                save_s=0.0 if checkpoint is None else checkpoint.save_s,
            ),
            manifest={
                "format": _FORMAT,
                "job": self.job.values(),
                "stage": generation,
                **placing.values(),
                "machine": describe_machine(),
                "code": self.job.code(),
            },
            run_dir=self.folder.path.resolve(),
            gloo_order_dir=gloo_order_dir,
            change_request_path=self.folder.change_request_path.resolve(),
            checkpoint=None if checkpoint is None else checkpoint.path.resolve(),
            fold=fold,
            first_step=self.done,
            steps=self.steps,
            checkpoint_every=options.checkpoint_every,
            checkpoint_every_s=options.checkpoint_every_s,
            hash_every=options.hash_every,
            loader_processes=options.loader_processes,
            prefetch=options.prefetch,
            progress_s=options.progress_s,
            zero_stage=options.zero_stage,
        )

    def end_generation(self, result: dict[str, Any] | None) -> None:
        """Take the result of a generation; None if one of its processes was killed."""
        done = self.done
        self.checkpoint = self.folder.checkpoint()
        self.n_failures = 0 if self.done > done else self.n_failures  # progress ends a series of failures
        if result is None:
            self.cause, self.n_failures = "failure", self.n_failures + 1
            self.folder.discard_records_after(self.done)
            return
        self.folder.write_tables()
        wanted = self.folder.pop_requested_placing()
        if result["ending"] == "signalled" or wanted == {}:  # an empty placing has no devices
            self.is_suspended = self.is_unfinished
        elif wanted is not None and self.is_unfinished:
            self.cause, self.placing = "request", Placing.from_values(self.job, wanted)
        elif wanted is not None:
            _log.warning("%s: the request came after the last mini-batch", self.folder.path)

    def _write_state(self, state: str) -> None:
        mixes = self.options.mixes_devices
        self.folder.write_state(state, self.done, self.job.values(), mixes_devices=mixes)

    def result(self) -> ElasticResult:
        """Write the tables and the final state, and return the result."""
        state: Literal["finished", "pending"] = "pending" if self.is_suspended else "finished"
        self._write_state(state)
        steps, changes = self.folder.write_tables()
        times = steps.groupby("device")["micro_batch_s"].median()
        rates = {str(device): 1.0 / time_s for device, time_s in times.items()}
        path = None if self.checkpoint is None else self.checkpoint.path
        return ElasticResult(state, self.done, steps, changes, rates, path)


def with_determinism_level(job: ElasticJob, folder: RunFolder) -> ElasticJob:
    """Replace the level ``auto`` of a job by that of its checkpoint, or else of a scan of its model."""
    if job.determinism != AUTO:
        return job
    if (checkpoint := folder.checkpoint()) is not None:
        return replace(job, determinism=checkpoint.values["job"]["determinism"])
    with temporary_directory("scan") as path:
        directory = RunDirectory(path)
        try:
            LocalLauncher().run(Launch(_SCAN_WORKER, job.values(), 1, path))
        except WorkerError as error:
            raise _reported_error(directory, 1) or error from None
        scan = directory.result()
    level, slow = ("D1+D2", "") if scan["d2_cheap"] else ("D1", ", ".join(scan["operators"]))
    _log.info("determinism %s%s", level, f"; slow under D2: {slow}" if slow else "")
    return replace(job, determinism=level)


def train_generations(
    jobs: Sequence[tuple[ElasticJob, RunFolder]], steps: int, placing: Placing, options: RunOptions
) -> list[ElasticResult]:
    """Train jobs together while they need the same processes, then each one alone.

    Jobs that survive losses have processes of their own, because a loss concerns the state of one job.
    """
    if options.survives:
        _check_survives(placing, options)
    for job, _ in jobs:
        if options.zero_stage and job.loop is not None:
            raise InputError(
                f"zero_stage is {options.zero_stage} and loop is {job.loop!r}; expected zero_stage=0, "
                "because a loop may change the state of its optimizers anywhere"
            )
    with ExitStack() as held:
        runs = [_ElasticRun(job, folder, steps, placing, options) for job, folder in jobs]
        for run in runs:
            held.enter_context(run.folder.hold())
            run.folder.pop_requested_placing()  # drops a request to an earlier run
        is_main = threading.current_thread() is threading.main_thread()
        if is_main if options.ends_on_signals is None else options.ends_on_signals:
            held.enter_context(_suspended_by_signals([run.folder for run in runs]))
        for run in runs:
            run.begin()
        if not options.survives:
            _launch([run for run in runs if run.is_unfinished], options)
        # Requests, signals and killed processes leave runs unfinished, and requests give them new placings.
        for run in runs:
            while run.is_unfinished:
                _launch([run], options)
        return [run.result() for run in runs]


@contextmanager
def _suspended_by_signals(folders: Sequence[RunFolder]) -> Iterator[None]:
    """Suspend runs on the first terminating signal, and raise the signal again when they are suspended."""
    if threading.current_thread() is not threading.main_thread():
        raise InputError("ends_on_signals is True in a background thread; expected False, or the main thread")
    received: list[int] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def suspend(number: int, frame: FrameType | None) -> None:
        received.append(number)
        restore()  # a second signal has its usual effect
        for folder in folders:
            folder.request_placing({})
        _log.warning(
            "%s: ending after this mini-batch, with a checkpoint; a second signal ends at once",
            signal.Signals(number).name,
        )

    before = {
        number: handler
        for number in map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
    }
    for number in before:
        signal.signal(number, suspend)
    try:
        yield
    finally:
        restore()
    for number in received:
        for folder in folders:
            checkpoint = latest_checkpoint(folder.checkpoints)
            done = 0 if checkpoint is None else checkpoint.step
            _log.warning("%s: %d mini-batches are saved; the same call resumes the run", folder.path, done)
        signal.raise_signal(number)


def _launch(runs: Sequence[_ElasticRun], options: RunOptions) -> None:
    """Train runs with one set of processes, until all are done or one is interrupted."""
    if not runs:
        return
    launcher = options.launcher if options.launcher is not None else LocalLauncher()
    placing, directory = runs[0].placing, RunDirectory(runs[0].folder.path.resolve() / PROCESSES)
    n_processes = placing.mapping.n_processes
    check_gpus(launcher, n_processes)
    requests = [run.request(number == 0, directory.path) for number, run in enumerate(runs)]
    surviving = None
    if options.survives:
        survives = min(options.survives, n_processes - 1)
        if survives < options.survives:
            _log.warning(
                "%s: %d processes survive the loss of %d", runs[0].folder.path, n_processes, survives
            )
        is_heard = options.on_event is not None
        # More may join, so the processes themselves take the lesser of this and the number of others.
        requests = [
            replace(requests[0], survives=options.survives, announces=is_heard, device=launcher.device)
        ]
        surviving = _SurvivingRun(runs[0], requests[0], options, launcher, directory)
    notified = set[str]()

    def notify(notices: Sequence[str]) -> None:
        for notice in notices:
            if notice not in notified:
                notified.add(notice)
                _log.warning("%s: %s", runs[0].folder.path, notice)

    def report_progress() -> None:
        values = directory.progress()
        if values is None:
            return
        notify(values.get("notices", []))
        if options.on_progress is not None:
            options.on_progress(values["step"], values["loss"])

    launch = Launch(
        _WORKER if surviving is None else _RECOVERING_WORKER,
        GENERATIONS.dump_python(requests, mode="json"),
        n_processes,
        directory.path,
        options=placing.options(runs[0].job),
        on_loss="end" if surviving is None else "tell",
        on_beat=report_progress,
    )
    lost: LostWorkerError | None = None
    try:
        if surviving is None:
            launcher.run(launch)
        else:
            surviving.run(launch)
        report_progress()
    except LostWorkerError as error:
        lost = error
    except WorkerError as error:
        for run in runs:
            discard_partial(run.folder.checkpoints)
        raise _reported_error(directory, n_processes) or error from None
    # Jobs are trained in order: those after the first one without a result have not begun.
    n_begun = next((number for number in range(len(runs)) if directory.result(number) is None), len(runs)) + 1
    for number, run in enumerate(runs[:n_begun]):
        result = directory.result(number)
        notify((result or {}).get("notices", []))
        run.end_generation(result)
        if lost is not None and run.n_failures > options.max_restarts:
            raise lost
    if lost is not None:
        _log.warning("%s; resuming from the last checkpoint", str(lost).splitlines()[0])


def _check_survives(placing: Placing, options: RunOptions) -> None:
    """Reject what cannot be recovered from the memory of processes, before anything starts."""
    survives, n_processes = options.survives, placing.mapping.n_processes
    if survives >= n_processes:
        raise InputError(
            f"survives is {survives} with {n_processes} process(es); expected at most {n_processes - 1}, "
            "because one must remain"
        )
    _check_launcher(options.launcher, f"survives is {survives}")
    if isinstance(options.launcher, SlurmLauncher) and "SLURM_JOB_ID" not in os.environ:
        raise InputError(
            f"survives is {survives} with SlurmLauncher outside an allocation; expected a call in a job of "
            "Slurm, whose steps the processes are, by sbatch or salloc"
        )


def _check_launcher(launcher: Launcher | None, problem: str) -> None:
    """Reject a launcher that processes which recover from memory cannot have."""
    if launcher is None:
        return
    if not isinstance(launcher, LocalLauncher | SlurmLauncher):
        raise InputError(
            f"{problem} with a {type(launcher).__name__}; expected a LocalLauncher or a SlurmLauncher"
        )
    for limit in ("timeout_s", "stall_timeout_s", "meet_timeout_s", "silence_timeout_s"):
        if (value := getattr(launcher, limit)) != getattr(type(launcher)(), limit):
            raise InputError(
                f"{problem} and the launcher has {limit} {value!r}; expected a launcher without limits of "
                "its own, because only hang_s applies"
            )


class _SurvivingRun:
    """Launching side of a generation that survives losses: its processes, its checkpoints, its recoveries."""

    def __init__(
        self,
        run: _ElasticRun,
        request: GenerationRequest,
        options: RunOptions,
        launcher: Launcher,
        directory: RunDirectory,
    ) -> None:
        self.generation, self.request, self.options = run, request, options
        self.launcher, self.directory, self.folder = launcher, directory, run.folder
        self.slots, self.kernel_sets = GpuSlots(launcher), dict[int, str]()  # of replacements, by node
        self.planner = RecoveryPlanner(
            request.placing.mapping, request.generation, request.first_step, lambda: self.failure,
            before=options.on_regroup or (lambda: None),
        )  # fmt: skip
        self.protocol = RecoveryProtocol(
            self.planner, range(request.placing.mapping.n_processes), _NO_END,
            suspend=self._suspend, failed=WorkerError, rejected=InputError,
            place=lambda _: f"mini-batch {self.assembly.step if self.assembly else self.request.first_step}",
        )  # fmt: skip
        self.failure: WorkerError | None = None
        self.report: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.changes: dict[str, dict[str, Any]] = {}
        self.recoveries: list[dict[str, Any]] = []
        self.assembly: Assembly | None = None  # the newest one, and the last one under which all trained
        self.trained: Assembly | None = None
        self.begin_s: float | None = None  # of a recovery, in seconds of the coordinator's clock
        self.formed_s, self.n_attempts, self.saving_s = 0.0, 0, 0.0
        self.lost, self.first, self.has_failed = set[int](), set[int](), False

    def run(self, launch: Launch) -> None:
        """Train until the run is done, or a change of the mapping or its suspension is requested."""
        self.launch = launch
        self.directory.prepare(launch.request)
        coordinator = Coordinator(
            self.protocol, self.directory.path, {"stage": self.request.generation}, self, self.take,
            begin_checkpoint=self._begin_checkpoint, finish_checkpoint=self._finish_checkpoint,
            limits=Timeouts(hang_s=self.options.hang_s), n_replacements=self.options.n_replacements,
        )  # fmt: skip
        self.planner.hosts = coordinator.hosts
        try:
            coordinator.run()
        except LostWorkerError as error:
            raise LostWorkerError(
                ": ".join(filter(None, (str(error), coordinator.ends("process"))))
            ) from None
        self.directory.write_result(self.report)

    def start(self, node: int, replaced: int | None = None) -> Process:
        """Start the process of a node, with the kernel set of one that it replaces (see `ProcessStarter`)."""
        launch = self.launch
        if replaced is not None:
            self.kernel_sets[node] = name = self.device(replaced)
            options = process_options(name, self.request.job.level)
            variables = {**options.environment, KERNEL_SET_VARIABLE: name}
            # An additional process has the options of the first.
            launch = replace(launch, options=[replace(options, environment=variables), *launch.options[1:]])
        return self.slots.start(launch, node, replaced)

    def device(self, node: int) -> str:
        """Return the name of the kernel set of a node."""
        return self.kernel_sets.get(node, self.request.placing.device(node))

    def end(self, process: Process) -> None:
        """Kill a process (see `ProcessStarter`)."""
        self.launcher.end(process)

    def take(self, event: Event) -> None:
        """Handle an event of the coordinator."""
        node, values = event.node, event.values
        match event.kind:
            case "failed" if values["cause"] == Cause.OWN:
                self.failure = WorkerError(f"process {node} failed: {values['error']}")
            case "lost" if node is not None:
                if (report := self.directory.error(node)) is not None:
                    _log.warning("%s: process %d ended: %s", self.folder.path, node, report["error"])
                self.failure = None  # the loss explains it
                self.lost.add(node)
                self._begin(event.time_s)
            case "failure":
                self.has_failed = True
                self._begin(event.time_s)
            case "freeze":
                self._begin(event.time_s)  # somebody leaves or joins, unless it has begun
            case "gone" if node is not None and (report := self.directory.error(node)) is not None:
                _log.warning("%s: a process that was to join failed: %s", self.folder.path, report["error"])
            case "plan":
                self.assembly, self.n_attempts = ASSEMBLY.validate_python(values["work"]), self.n_attempts + 1
                self.first.clear()
            case "resume":
                self.formed_s = event.time_s
                if self.trained is None:
                    self.trained, self.n_attempts = self.assembly, 0
            case "announce" if values["phase"] == "trained" and node is not None:
                self.first.add(node)
                if self.assembly is not None and self.first >= set(self.assembly.nodes):
                    self.failure = None
                    self.protocol.made_progress()
                    self._end(event.time_s)
            case "announce" if values["phase"] == "progress":
                self.launch.on_beat()
            case "commit":
                self._end(event.time_s)  # if all had nothing left to do
                for report in values["reports"].values():
                    if report is None or "rows" not in report:
                        continue
                    self.rows += report.pop("rows")
                    change = asdict(self.request.change) | {"restart_s": report["restart_s"]}
                    self.changes.setdefault(str(self.request.generation), change)
                    self.report = report
        if self.options.on_event is not None:
            self.options.on_event(event)

    def _suspend(self) -> None:
        _log.warning("%s: all processes are asked to leave; suspending the run", self.folder.path)
        self.folder.request_placing({})

    def _begin(self, time_s: float) -> None:
        if self.trained is not None and self.begin_s is None:
            self.begin_s, self.n_attempts = time_s, 0

    def _end(self, time_s: float) -> None:
        """Record a change of the processes, once all have done the first mini-batch after it."""
        if self.begin_s is None or self.assembly is None or self.trained is None:
            return
        if self.assembly is self.trained:  # nobody met again, because nothing was left to train
            _log.warning(
                "%s: process(es) %s lost behind the loop; the others continue",
                self.folder.path, ", ".join(map(str, sorted(self.lost))),
            )  # fmt: skip
            self.begin_s, self.lost = None, set()
            return
        old, new, device = self.trained, self.assembly, self.device
        hosted = RankMapping.parse(old.mapping).hosted
        left = [place for place, node in enumerate(old.nodes) if node not in new.nodes]
        lost = [place for place, node in enumerate(old.nodes) if node in self.lost]
        drained = [place for place in left if place not in lost]
        joined = [place for place, node in enumerate(new.nodes) if node not in old.nodes]
        workers = sorted(rank for place in lost + drained for rank in hosted[place])
        if self.lost or self.has_failed:
            kind, cause = "lost" if self.lost else "failed", "recovery"
        else:
            kind, cause = ("drained", "drain") if drained else ("joined", "join")
        pause_s = time_s - self.begin_s
        places = {"lost": lost, "drained": drained, "joined": joined, "workers": workers}
        self.recoveries.append(
            {
                "stage": new.stage, "step": new.step, "kind": kind,
                **{name: " ".join(map(str, numbers)) for name, numbers in places.items()},
                "n_behind": len(new.behind), "attempts": self.n_attempts,
                "formed_s": self.formed_s - self.begin_s, "pause_s": pause_s,
            }
        )  # fmt: skip
        change = Reconfiguration(
            step=new.step, cause=cause, old_mapping=old.mapping, new_mapping=new.mapping,
            old_devices=",".join(map(device, old.nodes)), new_devices=",".join(map(device, new.nodes)),
            save_s=0.0,
        )  # fmt: skip
        self.changes[str(new.stage)] = asdict(change) | {"restart_s": pause_s}
        told = [
            f"{name} {', '.join(map(str, numbers))}"
            for name, numbers in (("lost", lost), ("drained", drained), ("joined", joined))
            if numbers
        ]
        _log.log(
            logging.WARNING if cause == "recovery" else logging.INFO,
            "%s: process(es) %s; resumed from memory after mini-batch %d with mapping %s in %.2f s",
            self.folder.path, "; ".join(told) or kind, new.step, new.mapping, pause_s,
        )  # fmt: skip
        survives = min(self.request.survives, len(new.nodes) - 1)
        if survives < min(self.request.survives, len(old.nodes) - 1):
            _log.warning("%s: the remaining processes survive the loss of %d", self.folder.path, survives)
        self.trained, self.begin_s, self.lost, self.has_failed = new, None, set(), False

    def _begin_checkpoint(self) -> None:
        self.saving_s = time.monotonic()
        start_checkpoint(self.folder.checkpoints)

    def _finish_checkpoint(self, _: int) -> None:
        """Write the record of the mini-batches since the last checkpoint, then complete the checkpoint."""
        if self.trained is None:
            raise WorkerError("a checkpoint is complete before anybody trained")
        done, device = self.report["last_step"], self.device
        record = {"changes": self.changes, "rows": self.rows, "recoveries": self.recoveries}
        values = {
            **self.request.manifest, "fold": self.report["fold"], "stage": self.trained.stage,
            "mapping": self.trained.mapping, "devices": list(map(device, self.trained.nodes)),
        }  # fmt: skip
        if self.report["ending"] == "stopped":
            values["is_stopped"] = True
        try:
            write_json(record, self.folder.path / "records" / f"step-{done:08d}.json")
            finish_checkpoint(self.folder.checkpoints, done, time.monotonic() - self.saving_s, values)
        except OSError as error:
            problem = f"{error.filename or self.folder.checkpoints}: {error.strerror}"
            raise CheckpointError(f"{problem}; earlier checkpoints are intact") from error
        self.rows, self.recoveries = [], []
        self.changes = {key: change for key, change in self.changes.items() if int(key) >= self.trained.stage}


def _reported_error(directory: RunDirectory, n_processes: int) -> TrainingError | InputError | None:
    """Input or training error that a process raised, without its traceback; None if there is none."""
    for rank in range(n_processes):
        report = directory.error(rank)
        name, _, text = (report["error"] if report else "").partition(": ")
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, InputError | TrainingError):
            return kind(text)
    return None


def _check_continues(checkpoint: Checkpoint, job: ElasticJob, placing: Placing) -> None:
    """Reject a checkpoint of another job; warn of differences that may change bits."""
    values, path = checkpoint.values, checkpoint.path
    if values.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: format is {values.get('format')!r}; expected {_FORMAT}")
    if "fold" not in values:
        raise CheckpointError(
            f"{path}: is that of another kind of run; expected an elastic run, or no checkpoint"
        )
    saved_job = values["job"] | ({"fold": values["fold"]} if job.fold != "auto" else {})
    if differences := job.differences(saved_job):
        raise CheckpointError(f"{path}: belongs to another job; {'; '.join(differences)}")
    before, now = values["machine"], describe_machine()
    doubts = [
        f"{file} has changed since" for file, sha in job.code().items() if values["code"].get(file) != sha
    ]
    versions = [machine["versions"].get("torch") for machine in (before, now)]
    if versions[0] != versions[1]:
        doubts.append(f"written with torch {versions[0]}, resumed with {versions[1]}")
    if not job.level.pins_kernels:  # only D2 runs the same kernels everywhere
        if before["processor"] != now["processor"]:
            doubts.append(f"written on {before['processor']}, resumed on {now['processor']} without D2")
        if set(values["devices"]) != set(placing.devices):
            kinds = [",".join(sorted(set(devices))) for devices in (values["devices"], placing.devices)]
            doubts.append(f"written on devices {kinds[0]}, resumed on {kinds[1]} without D2")
    for doubt in doubts:
        _log.warning("%s: %s; equal bits are not guaranteed", path, doubt)


# --- Joining and draining a run from outside ---


def join_run(run_dir: str | Path, launcher: Launcher | None = None) -> str:
    """Join an active run with one more process, until the run is over or the process leaves it.

    The process enters between two mini-batches, and copies parameters, optimizer and contexts from one that
    trains. If each logical worker has a process already, it waits for a loss. It leaves without a loss on
    SIGTERM; see `makespan.runtime.joining.join_with`.

    Parameters
    ----------
    run_dir
        Directory of an active run with ``survives``: on this machine, or in a job of Slurm, on any machine
        that reaches its first one over the network.
    launcher
        Launcher of the process, without limits of its own and with the device of the run; None for this
        machine. On this machine ``CUDA_VISIBLE_DEVICES`` has to name a GPU that the run does not use yet.

    Returns
    -------
    str
        Reason for which the process ended: ``finished``, ``drained``, or an error of the run.

    Raises
    ------
    makespan.errors.InputError
        No run with ``survives`` is active there, it has several types of devices or trains on another kind,
        or the process has no GPU that is free.
    makespan.errors.WorkerError
        The process failed or was killed.
    """
    run_path = Path(run_dir).resolve()
    processes = _surviving_run(run_path)
    (request,) = GENERATIONS.validate_python(RunDirectory(processes).request())
    if len(set(request.placing.devices)) > 1:
        raise InputError(
            f"run_dir is {run_dir}, whose run has the devices {','.join(request.placing.devices)}; expected "
            "one type of device, because all that join have the device of the first"
        )
    _check_launcher(launcher, "a process joins")
    launcher = launcher or LocalLauncher("cuda" if request.device == "cuda" else "cpu")
    if launcher.device != request.device:
        raise InputError(
            f"a process joins on device {launcher.device} and the run in {run_dir} trains on "
            f"{request.device}; expected device {request.device}"
        )
    options = request.placing.options(request.job)[:1]
    return join_with(run_path, Launch(_RECOVERING_WORKER, {}, 1, processes, options=options), launcher)


def drain_processes(run_dir: str | Path, processes: Collection[int]) -> tuple[int, ...]:
    """Let processes leave an active run after the mini-batch that runs; the others continue from memory.

    If none would be left, the run is suspended: it writes a checkpoint and ends as ``pending``.

    Parameters
    ----------
    run_dir
        Directory of an active run with ``survives``.
    processes
        Numbers of the processes, at least one: those of the start from 0 on, then those that joined, in
        order.

    Returns
    -------
    tuple
        Numbers that the run does not have; the others leave. A run of this process warns of them instead.

    Raises
    ------
    makespan.errors.InputError
        No run with ``survives`` is active there, it has none of the processes or does not answer, or no
        process is given.
    """
    if not processes:
        raise InputError(
            "no process to drain; expected numbers of processes, or request_change with devices=''"
        )
    _surviving_run(Path(run_dir).resolve())
    return drain(run_dir, processes)


def _surviving_run(path: Path) -> Path:
    """Return the directory of the processes of a run that they may join and leave."""
    if not RunFolder(path).is_held():
        raise InputError(
            f"run_dir is {path}, where no run is active; expected the directory of an active run"
        )
    if not (path / PROCESSES / ADDRESS_FILE).exists():
        raise InputError(
            f"run_dir is {path}, whose processes cannot come and go now; expected a run with survives >= 1 "
            "that has started"
        )
    return path / PROCESSES


# --- Public functions ---


class ElasticTrainer:
    """Trains a job for N logical workers on any number of processes, with bitwise equal results.

    The directory of the run holds checkpoints, ``steps.csv`` and ``reconfigurations.csv``. Only the training
    processes load torch.

    Parameters
    ----------
    model, optimizer, data
        Names of the trained parts; fields of `ElasticJob`. A job with a ``loop`` has none of them.
    run_dir
        Directory of the run, on a file system that all processes share.
    job
        Further fields of `ElasticJob`; a `makespan.errors.InputError` names an invalid one.
    """

    def __init__(
        self,
        model: str | None = None,
        optimizer: str = "sgd",
        data: str | None = None,
        *,
        run_dir: str | Path = "run",
        **job: Any,
    ) -> None:
        check_kind("run_dir", run_dir, str | Path)
        self.job = job_from({"model": model, "optimizer": optimizer, "data": data} | job)
        self.folder = RunFolder(Path(run_dir))

    def run(
        self,
        steps: int,
        mapping: str | None = None,
        devices: str | Sequence[str] | None = None,
        **options: Any,
    ) -> ElasticResult:
        """Train up to a number of mini-batches, and write a checkpoint at the end.

        Parameters
        ----------
        steps
            Mini-batches in total, including those of earlier calls; no process starts if they are done.
        mapping, devices
            Logical workers of each process, ``0,1/2/3``, and the kernel set of each process, ``A,B,B``.
            Without a mapping the logical workers are spread evenly over the devices; without either each has
            its own process.
        options
            Fields of `RunOptions`, for example ``resume`` and ``checkpoint_every``.

        Returns
        -------
        ElasticResult
            Result of the whole run, including earlier calls.

        Raises
        ------
        makespan.errors.InputError
            An argument, or the return value of a function of the job, cannot be used.
        makespan.errors.CheckpointError
            A checkpoint belongs to another job, or all are damaged.
        makespan.errors.WorkerError
            A process failed, or was killed too often.
        """
        (result,) = run_together([self], steps, mapping, devices, **options)
        return result

    def request(self, mapping: str | None = None, devices: str | Sequence[str] | None = None) -> None:
        """Request another mapping of the active run; see `request_change`."""
        request_change(self.folder.path, mapping, devices)

    def export(self, path: str | Path) -> Path:
        """Write the model as a plain ``state_dict``; see `export_model`."""
        return export_model(self.folder.path, path)


def run_together(
    trainers: Sequence[ElasticTrainer],
    steps: int,
    mapping: str | None = None,
    devices: str | Sequence[str] | None = None,
    **options: Any,
) -> list[ElasticResult]:
    """Train several jobs one after the other in one set of processes, which starts only once.

    With ``survives`` each job has processes of its own, which start when those of the job before have ended.

    Parameters
    ----------
    trainers
        Jobs with equally many logical workers, and with levels whose processes start with the same options.
    steps, mapping, devices, options
        As for `ElasticTrainer.run`.

    Returns
    -------
    list of ElasticResult
        One result per job.

    Raises
    ------
    makespan.errors.InputError, makespan.errors.CheckpointError, makespan.errors.WorkerError
        As for `ElasticTrainer.run`; or the jobs cannot share processes.
    """
    listed: object = trainers
    if not isinstance(listed, Sequence) or not all(isinstance(each, ElasticTrainer) for each in listed):
        raise InputError(f"trainers is {listed!r}; expected a list of ElasticTrainer")
    if not trainers:
        return []
    steps = check_range("steps", steps)
    names = [field.name for field in fields(RunOptions)]
    for name in options:
        if name not in names:
            raise unknown_name("option of a run", name, names)
    run_options, placing = RunOptions(**options), Placing.of(trainers[0].job, mapping, devices)
    jobs = [(with_determinism_level(trainer.job, trainer.folder), trainer.folder) for trainer in trainers]
    first, shared = jobs[0][0], placing.options(jobs[0][0])
    for job, _ in jobs:
        if Placing.of(job, str(placing.mapping), devices).options(job) != shared:
            raise InputError(
                f"determinism is {job.determinism} and {first.determinism}; expected levels whose processes "
                "use the same kernels, because the jobs share processes"
            )
    return train_generations(jobs, steps, placing, run_options)


def request_change(
    run_dir: str | Path, mapping: str | None = None, devices: str | Sequence[str] | None = None
) -> None:
    """Request another mapping from the next mini-batch on.

    Parameters
    ----------
    run_dir
        Directory of an active run, in this process or in another one.
    mapping, devices
        As for `ElasticTrainer.run`. Empty devices, ``""``, suspend the run: it writes a checkpoint and ends
        as ``pending``.

    Raises
    ------
    makespan.errors.InputError
        No run is active there, or the job cannot run with this mapping.
    """
    folder = RunFolder(Path(run_dir))
    state = folder.state()
    job = job_from(state["job"])
    if not folder.is_held():
        raise InputError(
            f"run_dir is {run_dir}, where no run is active; expected the directory of an active run"
        )
    is_suspended = devices is not None and not len(devices)
    if is_suspended and mapping is not None:
        raise InputError(
            f"devices is empty and mapping is {mapping!r}; expected no mapping with empty devices"
        )
    values = {}
    if not is_suspended:
        placing = Placing.of(job, mapping, devices)
        placing.check_types(job, state["mixes_devices"])
        values = placing.values()
    folder.request_placing(values)


def export_model(run_dir: str | Path, path: str | Path) -> Path:
    """Write the model of the newest checkpoint, with the buffers of rank 0, as a plain ``state_dict``.

    Parameters
    ----------
    run_dir, path
        Directory of the run, and the file to write: ``.safetensors``, if that package is installed, or a file
        that ``torch.load`` reads with ``weights_only=True``.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    makespan.errors.CheckpointError
        There is no checkpoint, or all are damaged.
    makespan.errors.InputError
        The file is to be ``.safetensors``, and the package is missing or an entry is not a tensor; or it is
        a file of the run itself.
    """
    check_weights_path(path, run_dir)
    checkpoint = RunFolder(Path(run_dir)).checkpoint()
    if checkpoint is None:
        raise CheckpointError(
            f"run_dir is {run_dir}, which has no checkpoint; expected the directory of a run that saved one"
        )
    return copy_weights(checkpoint.path / MODEL_FILE, path)
