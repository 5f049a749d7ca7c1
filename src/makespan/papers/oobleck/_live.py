"""Train through the loss of nodes: start the nodes of a run, coordinate them, and tell what came of it."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from makespan.errors import CheckpointError, InputError, WorkerError
from makespan.papers.oobleck._faults import Faults
from makespan.papers.oobleck._record import Record
from makespan.papers.oobleck._tables_live import ITERATIONS, RECOVERIES
from makespan.papers.oobleck.planning import HybridPlan, ModelProfile, TemplateSet, covering_templates
from makespan.papers.oobleck.runtime import (
    ChainJob,
    Coordination,
    Coordinator,
    Decider,
    Event,
    Limits,
)
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
from makespan.tables import write_csv

__all__ = ["LiveOptions", "LiveResult", "train_resilient"]

WORKER = "makespan.papers.oobleck.runtime._worker"
PROCESSES = "processes"
_FORMAT = 1
_STATE_FACTOR = 3
"""Bytes of state a byte of parameters: itself and two moments."""


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
        Iterations between checkpoints; 0 for none but the one at the end.
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

    Parameters
    ----------
    job, profile
        What is trained, and the times of its layers, by which pipelines are cut.
    iterations
        In all, those of earlier calls included.
    run_dir
        Directory of the run, which all nodes see; the newest two checkpoints and the tables lie there.
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
        Also written as ``iterations.csv`` and ``recoveries.csv``.

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
        return _Run(job, profile, iterations, folder, options, launcher, watch, faults, record).run()
    finally:
        os.close(handle)


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
        self.started = self._start(iterations)
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
            save_every=options.checkpoint_every, failed=WorkerError,
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
        coordinator = Coordinator(
            self.protocol, self.launch.run_dir, request, self, self._take_event,
            begin_checkpoint=lambda: start_checkpoint(self.checkpoints), finish_checkpoint=self._finish,
            limits=Limits(hang_s=self.options.hang_s), n_replacements=self.options.n_replacements,
        )  # fmt: skip
        self.decider.hosts = coordinator.hosts
        if self.faults is not None:
            self.faults.hold = coordinator.hold
        try:
            coordinator.run()
        finally:
            self._write()
        return self._result()

    def start(self, node: int) -> Process:
        """Start the process of a node, on a GPU that no other has if there are any; of a `Starter`."""
        launcher = self.launcher
        if not (self.gpus and isinstance(launcher, LocalLauncher)):
            return launcher.start(self.launch, node)
        free = [gpu for gpu in self.gpus if gpu not in self.on_gpu or self.on_gpu[gpu].poll() is not None]
        gpu = free[0] if free else self.gpus[node % len(self.gpus)]
        self.on_gpu[gpu] = replace(launcher, gpus=(gpu,)).start(self.launch, node)
        return self.on_gpu[gpu]

    def end(self, process: Process) -> None:
        """End a process; of a `Starter`."""
        self.launcher.end(process)

    def _take_event(self, event: Event) -> None:
        self.record(event)
        self.watch(event)
        if self.faults is not None:
            self.faults(event)

    def _finish(self, step: int) -> None:
        values = {"format": _FORMAT, "job": self.job.values(), "machine": describe_machine()}
        finish_checkpoint(self.checkpoints, step, 0.0, values)

    def _write(self) -> None:
        write_csv(self.record.iterations(), self.folder / f"{ITERATIONS.name}.csv")
        write_csv(self.record.recovery_table(), self.folder / f"{RECOVERIES.name}.csv")

    def _result(self) -> LiveResult:
        found = sound_checkpoint(self.checkpoints)
        return LiveResult(
            self.protocol.step, self.record.iterations(), self.record.recovery_table(),
            tuple(self.record.plans), dict(self.record.pids), None if found is None else found.path,
        )  # fmt: skip
