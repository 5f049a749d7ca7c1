"""The stages of elastic runs: one set of processes after the other, each from a checkpoint to the next."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pandas as pd

from makespan import errors
from makespan.easyscale._placing import Placing
from makespan.easyscale._run_folder import RunFolder
from makespan.easyscale.runtime import AUTO, ElasticJob
from makespan.errors import (
    CheckpointError,
    InputError,
    LostWorkerError,
    TrainingError,
    WorkerError,
    unknown_name,
)
from makespan.leftovers import temporary_directory
from makespan.runtime import (
    Checkpoint,
    Launch,
    Launcher,
    LocalLauncher,
    RunDirectory,
    check_gpus,
    describe_machine,
    discard_partial,
    latest_checkpoint,
)

__all__ = ["ElasticResult", "RunOptions", "options_from", "settled", "train_stages"]

_WORKER = "makespan.easyscale.runtime._stage"
_SCAN_WORKER = "makespan.easyscale.runtime._scan_worker"
_FORMAT = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ElasticResult:
    """What came of a run so far.

    Parameters
    ----------
    state
        ``finished``, or ``pending`` if it was suspended; the same call goes on then.
    step
        Mini-batches done.
    steps
        A row for each mini-batch and logical worker, table ``steps``: losses, hashes, times.
    reconfigurations
        A row for each set of processes, table ``reconfigurations``.
    rates_per_s
        Micro-batches a second on each device, from the median of their times; C_i of the planner.
    checkpoint
        Directory of the newest checkpoint, None before the first.
    """

    state: Literal["finished", "pending"]
    step: int
    steps: pd.DataFrame
    reconfigurations: pd.DataFrame
    rates_per_s: dict[str, float]
    checkpoint: Path | None


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run is done; none of it decides a bit.

    Parameters
    ----------
    resume
        Whether a run in the directory is continued; otherwise one is refused.
    checkpoint_every
        Mini-batches from one checkpoint to the next; 0 for none by their number.
    checkpoint_every_s
        Time from one checkpoint to the next, at least twenty times what writing one takes [s]; 0 for none by
        the clock. There is one at the end and on request in any case.
    hash_every
        Mini-batches from one set of hashes to the next; 0 for none.
    loader_processes, prefetch
        Processes that load samples for each process, and batches that they are ahead.
    max_restarts
        How often in a row processes are started again from the last checkpoint after one was killed.
    mixes_devices
        Whether devices of several types are allowed at a time to a job without D2, whose bits they change.
    ends_on_signals
        Whether SIGINT, SIGTERM and SIGHUP end the mini-batch that goes on, write a checkpoint, and only then
        do what they do otherwise; a second one does so at once. In the main thread only; None for whether
        this is that. A signal that this process ignores stays ignored.
    launcher
        Where processes run; None for this machine.
    on_progress
        Called now and then with mini-batches done and the newest loss.
    """

    resume: bool = True
    checkpoint_every: int = 0
    checkpoint_every_s: float = 600.0
    hash_every: int = 1
    loader_processes: int = 1
    prefetch: int = 2
    max_restarts: int = 2
    mixes_devices: bool = False
    ends_on_signals: bool | None = None
    launcher: Launcher | None = None
    on_progress: Callable[[int, float], object] | None = None

    def __post_init__(self) -> None:
        least = {
            "checkpoint_every": 0,
            "hash_every": 0,
            "loader_processes": 0,
            "prefetch": 1,
            "max_restarts": 0,
        }
        for name, number in least.items():
            found = getattr(self, name)
            if not isinstance(found, int) or found < number:
                raise InputError(f"{name} is {found!r}; accepted: a whole number >= {number}")
        every_s: object = self.checkpoint_every_s
        if not isinstance(every_s, int | float) or isinstance(every_s, bool) or not every_s >= 0:
            raise InputError(f"checkpoint_every_s is {every_s!r}; accepted: a number >= 0")


def options_from(given: Mapping[str, Any]) -> RunOptions:
    """Return options by their names; an `makespan.errors.UnknownNameError` lists those that there are."""
    known = [one.name for one in fields(RunOptions)]
    for name in given:
        if name not in known:
            raise unknown_name("option of a run", name, known)
    return RunOptions(**given)


class _Run:
    """One run while its directory is held."""

    def __init__(
        self, job: ElasticJob, folder: RunFolder, steps: int, placing: Placing, options: RunOptions
    ) -> None:
        self.job, self.folder = job, folder
        self.steps, self.placing, self.options = steps, placing, options
        self.checkpoint: Checkpoint | None = None
        self.cause, self.n_failures, self.is_suspended = "run", 0, False

    @property
    def done(self) -> int:
        """Mini-batches that the newest checkpoint has."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def is_unfinished(self) -> bool:
        """Whether it needs another set of processes."""
        return not self.is_suspended and self.done < self.steps

    def begin(self) -> None:
        """Find out where it is."""
        self.placing.check_types(self.job, self.options.mixes_devices)
        self.checkpoint = self.folder.checkpoint()
        if self.checkpoint is not None and not self.options.resume:
            found = f"run_dir is {self.folder.path}, which has a checkpoint after {self.done} mini-batches"
            raise InputError(f"{found}; accepted: resume=True, or a directory without one")
        if self.checkpoint is not None:
            _check_continues(self.checkpoint, self.job, self.placing)
        if self.done > self.steps:
            raise InputError(f"steps is {self.steps}; accepted: at least {self.done}, which are done")
        self.folder.forget_after(self.done)
        self._write_state("running")

    def request(self, is_first: bool, fold_dir: Path) -> dict[str, Any]:
        """Return what the processes are asked for."""
        before = None if self.checkpoint is None else self.checkpoint.values
        stage, options = 0 if before is None else before["stage"] + 1, self.options
        manifest = {
            "format": _FORMAT, "job": self.job.values(), "stage": stage, **self.placing.values(),
            "machine": describe_machine(), "code": self.job.code(),
        }  # fmt: skip
        old = {"mapping": "", "devices": []} if before is None else before
        change = {
            "step": self.done, "cause": "start" if before is None and self.cause == "run" else self.cause,
            "old_mapping": old["mapping"], "new_mapping": str(self.placing.mapping),
            "old_devices": ",".join(old["devices"]), "new_devices": ",".join(self.placing.devices),
            "save_s": 0.0 if self.checkpoint is None else self.checkpoint.save_s,
        }  # fmt: skip
        return {
            "job": self.job.values(), **self.placing.values(), "manifest": manifest, "stage": stage,
            "change": change,
            "run_dir": str(self.folder.path.resolve()), "fold_dir": str(fold_dir),
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint.path.resolve()),
            "fold": None if before is None else before["fold"], "first_step": self.done, "steps": self.steps,
            "checkpoint_every": options.checkpoint_every, "checkpoint_every_s": options.checkpoint_every_s,
            "hash_every": options.hash_every,
            "loader_processes": options.loader_processes, "prefetch": options.prefetch,
            "asked": str(self.folder.wanted_path.resolve()), "is_first": is_first,
        }  # fmt: skip

    def take(self, result: dict[str, Any] | None) -> None:
        """Take over what a set of processes did; None if it was lost."""
        done = self.done
        self.checkpoint = self.folder.checkpoint()
        self.n_failures = 0 if self.done > done else self.n_failures
        if result is None:
            self.cause, self.n_failures = "failure", self.n_failures + 1
            self.folder.forget_after(self.done)
            return
        self.folder.write_tables()
        wanted = self.folder.take_wanted()
        if result["ending"] == "signalled" or wanted == {}:
            self.is_suspended = self.done < self.steps
        elif wanted is not None and self.is_unfinished:
            self.cause, self.placing = "request", Placing.from_values(self.job, wanted)
        elif wanted is not None:
            _log.warning("%s: the request came after the last mini-batch", self.folder.path)

    def _write_state(self, state: str) -> None:
        mixes = self.options.mixes_devices
        self.folder.write_state(state, self.done, self.job.values(), mixes_devices=mixes)

    def result(self) -> ElasticResult:
        """Tell what came of it."""
        state: Literal["finished", "pending"] = "pending" if self.is_suspended else "finished"
        self._write_state(state)
        steps, changes = self.folder.write_tables()
        times = steps.groupby("device")["micro_batch_s"].median()
        rates = {str(device): 1.0 / time_s for device, time_s in times.items()}
        path = None if self.checkpoint is None else self.checkpoint.path
        return ElasticResult(state, self.done, steps, changes, rates, path)


def settled(job: ElasticJob, folder: RunFolder) -> ElasticJob:
    """Return the job with a determinism level: that of the run so far, else what a scan of its model says."""
    if job.determinism != AUTO:
        return job
    if (checkpoint := folder.checkpoint()) is not None:
        return replace(job, determinism=checkpoint.values["job"]["determinism"])
    with temporary_directory("scan") as path:
        directory = RunDirectory(path)
        try:
            LocalLauncher().run(Launch(_SCAN_WORKER, job.values(), 1, path))
        except WorkerError as error:
            raise _cause(directory, 1) or error from None
        found = directory.result()
    level, slow = ("D1+D2", "") if found["d2_cheap"] else ("D1", ", ".join(found["operators"]))
    _log.info("determinism %s%s", level, f"; slow under D2: {slow}" if slow else "")
    return replace(job, determinism=level)


def train_stages(
    jobs: Sequence[tuple[ElasticJob, RunFolder]], steps: int, placing: Placing, options: RunOptions
) -> list[ElasticResult]:
    """Train jobs together for as long as they need the same processes, then each by itself."""
    with ExitStack() as held:
        runs = [_Run(job, folder, steps, placing, options) for job, folder in jobs]
        for run in runs:
            held.enter_context(run.folder.hold())
            run.folder.take_wanted()  # of a run before this one
        is_main = threading.current_thread() is threading.main_thread()
        if is_main if options.ends_on_signals is None else options.ends_on_signals:
            held.enter_context(_suspended_by_signals([run.folder for run in runs]))
        for run in runs:
            run.begin()
        _launch([run for run in runs if run.is_unfinished], options)
        for run in runs:
            while run.is_unfinished:
                _launch([run], options)
        return [run.result() for run in runs]


@contextmanager
def _suspended_by_signals(folders: Sequence[RunFolder]) -> Iterator[None]:
    """Let the first signal that asks for the end suspend runs, and come again when they are."""
    if threading.current_thread() is not threading.main_thread():
        raise InputError("ends_on_signals is True in a thread; accepted: False there, or the main thread")
    came: list[int] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def suspend(number: int, frame: FrameType | None) -> None:
        came.append(number)
        restore()
        for folder in folders:
            folder.want({})
        name = signal.Signals(number).name
        _log.warning("%s: ending after this mini-batch, with a checkpoint; a second one ends at once", name)

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
    for number in came:
        for folder in folders:
            checkpoint = latest_checkpoint(folder.checkpoints)
            done = 0 if checkpoint is None else checkpoint.step
            _log.warning("%s: %d mini-batches are saved; the same call goes on from there", folder.path, done)
        signal.raise_signal(number)


def _launch(runs: Sequence[_Run], options: RunOptions) -> None:
    """Let one set of processes train runs as far as it gets."""
    if not runs:
        return
    launcher = options.launcher if options.launcher is not None else LocalLauncher()
    placing, directory = runs[0].placing, RunDirectory(runs[0].folder.path.resolve() / "processes")
    n_processes = placing.mapping.n_processes
    check_gpus(launcher, n_processes)
    requests = [run.request(number == 0, directory.path) for number, run in enumerate(runs)]

    def tell() -> None:
        values = directory.progress()
        for notice in [] if values is None else values.get("notices", []):
            notify(notice)
        if values is not None and options.on_progress is not None:
            options.on_progress(values["step"], values["loss"])

    told = set[str]()

    def notify(notice: str) -> None:
        if notice not in told:
            told.add(notice)
            _log.warning("%s: %s", runs[0].folder.path, notice)

    launch = Launch(
        _WORKER, requests, n_processes, directory.path, options=placing.options(runs[0].job), on_beat=tell
    )
    lost: LostWorkerError | None = None
    try:
        launcher.run(launch)
        tell()
    except LostWorkerError as error:
        lost = error
    except WorkerError as error:
        for run in runs:
            discard_partial(run.folder.checkpoints)
        raise _cause(directory, n_processes) or error from None
    n_begun = next((number for number in range(len(runs)) if directory.result(number) is None), len(runs)) + 1
    for number, run in enumerate(runs[:n_begun]):
        for notice in (directory.result(number) or {}).get("notices", []):
            notify(notice)
        run.take(directory.result(number))
        if lost is not None and run.n_failures > options.max_restarts:
            raise lost
    if lost is not None:
        _log.warning("%s; going on from the last checkpoint", str(lost).splitlines()[0])


def _cause(directory: RunDirectory, n_processes: int) -> TrainingError | InputError | None:
    """Error that a process raised on purpose, without its traceback; None if there is no such."""
    for rank in range(n_processes):
        report = directory.error(rank)
        name, _, text = (report["error"] if report else "").partition(": ")
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, InputError | TrainingError):
            return kind(text)
    return None


def _check_continues(checkpoint: Checkpoint, job: ElasticJob, placing: Placing) -> None:
    """Refuse a checkpoint of another job, and warn of one with which bits may not be kept."""
    values, path = checkpoint.values, checkpoint.path
    if values.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: format is {values.get('format')!r}; accepted: {_FORMAT}")
    found = values["job"] | ({"fold": values["fold"]} if job.fold != "auto" else {})
    if differences := job.differences(found):
        raise CheckpointError(f"{path}: is that of another job; {'; '.join(differences)}")
    before, now, doubts = values["machine"], describe_machine(), []
    versions = [one["versions"].get("torch") for one in (before, now)]
    doubts += [
        f"{file} has changed since" for file, sha in job.code().items() if values["code"].get(file) != sha
    ]
    if versions[0] != versions[1]:
        doubts.append(f"written with torch {versions[0]}, going on with {versions[1]}")
    if not job.level.pins_kernels:
        if before["processor"] != now["processor"]:
            doubts.append(f"written on {before['processor']}, going on with {now['processor']} without D2")
        if set(values["devices"]) != set(placing.devices):
            kinds = [",".join(sorted(set(one))) for one in (values["devices"], placing.devices)]
            doubts.append(f"written on devices {kinds[0]}, going on with {kinds[1]} without D2")
    for doubt in doubts:
        _log.warning("%s: %s; equal bits are not promised", path, doubt)
