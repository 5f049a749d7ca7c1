"""Elastic training as one call: processes come and go, what they train keeps its bits."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from makespan.easyscale._placing import Placing
from makespan.easyscale._run_folder import RunFolder
from makespan.easyscale._stages import ElasticResult, options_from, settled, train_stages
from makespan.easyscale.runtime import job_from
from makespan.errors import CheckpointError, InputError
from makespan.files import atomic_path

__all__ = ["ElasticTrainer", "export_model", "request_change", "run_together"]

_MODEL_FILE = "model.pt"


class ElasticTrainer:
    """Trains a job for N logical workers on any number of processes, with the same bits.

    What lasts lies in a directory: checkpoints, ``steps.csv`` and ``reconfigurations.csv``. Only the
    processes that train load torch.

    Parameters
    ----------
    model, optimizer, data
        What is trained, by name; fields of `ElasticJob`.
    run_dir
        Directory of the run, which all processes see.
    job
        Further fields of `ElasticJob`; an `makespan.errors.InputError` says which one is not accepted.
    """

    def __init__(
        self,
        model: str,
        optimizer: str = "sgd",
        data: str | None = None,
        *,
        run_dir: str | Path = "run",
        **job: Any,
    ) -> None:
        self.job = job_from({"model": model, "optimizer": optimizer, "data": data} | job)
        self.folder = RunFolder(Path(run_dir))

    def run(
        self,
        steps: int,
        mapping: str | None = None,
        devices: str | Sequence[str] | None = None,
        **options: Any,
    ) -> ElasticResult:
        """Train until so many mini-batches are done, and write a checkpoint there.

        Parameters
        ----------
        steps
            Mini-batches in all, those of earlier calls included; where they are done nothing starts.
        mapping, devices
            Who hosts whom, ``0,1/2/3``, and the kernel set of each process, ``A,B,B``. Without a mapping the
            logical workers are spread evenly over the devices; without either each has a process of its own.
        options
            Fields of `RunOptions`, for example ``resume`` and ``checkpoint_every``.

        Returns
        -------
        ElasticResult
            All of the run, earlier calls included.

        Raises
        ------
        makespan.errors.InputError
            An argument, or what a function of the job returned, cannot be used.
        makespan.errors.CheckpointError
            A checkpoint is that of another job, or all are damaged.
        makespan.errors.WorkerError
            A process failed, or was killed too often.
        """
        (result,) = run_together([self], steps, mapping, devices, **options)
        return result

    def request(self, mapping: str | None = None, devices: str | Sequence[str] | None = None) -> None:
        """Ask a run that is going on for another mapping; see `request_change`."""
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
    """Train several jobs, one after the other in one set of processes, which saves their starts.

    Parameters
    ----------
    trainers
        Jobs with equally many logical workers and levels that start processes in the same way.
    steps, mapping, devices, options
        As for `ElasticTrainer.run`.

    Returns
    -------
    list of ElasticResult
        One for each.

    Raises
    ------
    makespan.errors.InputError, makespan.errors.CheckpointError, makespan.errors.WorkerError
        As for `ElasticTrainer.run`; or the jobs cannot share processes.
    """
    if not trainers:
        return []
    if steps < 0:
        raise InputError(f"steps is {steps!r}; accepted: a whole number >= 0")
    how, placing = options_from(options), Placing.of(trainers[0].job, mapping, devices)
    jobs = [(settled(trainer.job, trainer.folder), trainer.folder) for trainer in trainers]
    first, wanted = jobs[0][0], placing.options(jobs[0][0])
    for job, _ in jobs:
        if Placing.of(job, str(placing.mapping), devices).options(job) != wanted:
            found = f"determinism is {job.determinism} and {first.determinism}"
            raise InputError(f"{found}; accepted together: levels whose processes have the same kernels")
    return train_stages(jobs, steps, placing, how)


def request_change(
    run_dir: str | Path, mapping: str | None = None, devices: str | Sequence[str] | None = None
) -> None:
    """Ask for another mapping from the next boundary of mini-batches on.

    Parameters
    ----------
    run_dir
        Directory of a run that is going on, in this process or in another one.
    mapping, devices
        As for `ElasticTrainer.run`. No devices at all, ``""``, suspend the run: it writes a checkpoint and
        ends as ``pending``.

    Raises
    ------
    makespan.errors.InputError
        No run is going on there, or the job cannot run so.
    """
    folder = RunFolder(Path(run_dir))
    state = folder.state()
    job = job_from(state["job"])
    if not folder.is_held():
        raise InputError(f"run_dir is {run_dir}, where no run is going on; accepted: that of one that is")
    is_suspended = devices is not None and not len(devices)
    if is_suspended and mapping is not None:
        raise InputError(f"devices is empty, and mapping is {mapping!r}; accepted: no mapping then")
    wanted = {}
    if not is_suspended:
        placing = Placing.of(job, mapping, devices)
        placing.check_types(job, state["mixes_devices"])
        wanted = placing.values()
    folder.want(wanted)


def export_model(run_dir: str | Path, path: str | Path) -> Path:
    """Write the model of the newest checkpoint as a plain ``state_dict``, with the first one's buffers.

    Parameters
    ----------
    run_dir, path
        Directory of the run, and the file to write, which ``torch.load`` with ``weights_only=True`` reads.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    makespan.errors.CheckpointError
        There is no checkpoint, or all are damaged.
    """
    checkpoint = RunFolder(Path(run_dir)).checkpoint()
    if checkpoint is None:
        raise CheckpointError(
            f"run_dir is {run_dir}, where no checkpoint is; accepted: the directory of a run"
        )
    with atomic_path(path) as target:
        shutil.copyfile(checkpoint.path / _MODEL_FILE, target)
    return Path(path)
