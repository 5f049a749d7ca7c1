"""Checkpoints on disk: complete or not there, with a checksum of every file; no torch.

A directory of checkpoints holds ``step-<number>`` directories. One is written beside them under a
name that readers ignore, gets its manifest with checksums last, and is renamed then. Whatever kills
the writer, the checkpoints before it stay as they were.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from makespan.errors import CheckpointError, ChecksumError
from makespan.training._files import read_json, write_json
from makespan.training._job import TrainingJob, job_from, job_values

__all__ = ["Checkpoint", "finish_checkpoint", "latest_checkpoint", "start_checkpoint"]

_MANIFEST = "manifest.json"
_PARTIAL = ".partial"
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
_KEPT = 2
_MUST_AGREE = ("model", "seed", "data_seed", "learning_rate", "warmup_steps", "weight_decay")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint.

    Parameters
    ----------
    path
        Its directory.
    step
        Optimiser steps done.
    save_s
        Time that writing it took.
    job
        The job that wrote it.
    checksums
        Digest of every file by name.
    """

    path: Path
    step: int
    save_s: float
    job: TrainingJob
    checksums: Mapping[str, str]

    def verify(self) -> None:
        """Check every file.

        Raises
        ------
        ChecksumError
            A file is missing or differs from what was written.
        """
        for name, wanted in self.checksums.items():
            path = self.path / name
            if not path.is_file():
                raise ChecksumError(f"{path}: the file of the checkpoint is missing")
            if (found := _digest(path)) != wanted:
                raise ChecksumError(f"{path}: checksum is {found}, the checkpoint was written with {wanted}")

    def check_continues(self, job: TrainingJob) -> None:
        """Check that a job continues the run of the checkpoint; plan and processes may differ.

        Raises
        ------
        CheckpointError
            Model, seeds, optimiser or global batch differ, or no step is left.
        """
        for name in _MUST_AGREE:
            found, wanted = getattr(self.job, name), getattr(job, name)
            if found != wanted:
                raise CheckpointError(f"{self.path}: written with {name} {found}, the job has {wanted}")
        found, wanted = self.job.plan.global_batch_size, job.plan.global_batch_size
        if found != wanted:
            raise CheckpointError(f"{self.path}: written with global batch {found}, the plan has {wanted}")
        if self.step >= job.steps:
            raise CheckpointError(f"{self.path}: {self.step} steps are done, the job asks for {job.steps}")


def latest_checkpoint(directory: str | Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a directory, None if there is none."""
    found = [(key, path) for path in Path(directory).glob("step-*") if (key := _key(path)) is not None]
    if not found:
        return None
    path = max(found)[1]
    manifest = read_json(path / _MANIFEST)
    return Checkpoint(
        path, manifest["step"], manifest["save_s"], job_from(manifest["job"]), manifest["files"]
    )


def start_checkpoint(directory: Path) -> Path:
    """Return an empty directory in which a checkpoint can be written; what a killed run left is removed."""
    partial = directory / _PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def finish_checkpoint(directory: Path, job: TrainingJob, step: int, save_s: float) -> Path:
    """Turn what was written since `start_checkpoint` into a complete checkpoint; keep the newest two.

    Parameters
    ----------
    directory
        Directory of checkpoints.
    job, step, save_s
        For the manifest.

    Returns
    -------
    pathlib.Path
        Directory of the checkpoint.
    """
    partial = directory / _PARTIAL
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    manifest: dict[str, Any] = {"step": step, "save_s": save_s, "job": job_values(job)}
    manifest["files"] = {str(path.relative_to(partial)): _digest(path) for path in files}
    write_json(manifest, partial / _MANIFEST)
    for path in [*files, partial / _MANIFEST, partial]:
        _to_disk(path)
    target = directory / f"step-{step:08d}"
    again = 0
    while target.exists():
        again += 1
        target = directory / f"step-{step:08d}.{again}"
    partial.rename(target)
    _to_disk(directory)
    complete = sorted((key, path) for path in directory.glob("step-*") if (key := _key(path)) is not None)
    for _, old in complete[:-_KEPT]:
        if old != target:
            shutil.rmtree(old, ignore_errors=True)
    return target


def _key(path: Path) -> tuple[int, int] | None:
    match = _NAME.fullmatch(path.name)
    if match is None or not (path / _MANIFEST).is_file():
        return None
    return int(match[1]), int(match[2] or 0)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
