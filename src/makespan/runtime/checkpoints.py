"""Checkpoints on disk: complete or absent, with a checksum for every file.

A directory of checkpoints holds ``step-<number>`` directories. A new checkpoint is written next to them under
a name that readers ignore, gets its manifest with checksums last, and is then renamed. A writer that is
killed at any point leaves earlier checkpoints intact.

Torch unpickles checkpoint files, which can run code, so readers open only files that the manifest lists.
Checksums detect damaged and mixed files; they do not prove who wrote them.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from makespan.errors import CheckpointError, ChecksumError
from makespan.files import read_json, write_json

_log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_PARTIAL = ".partial"
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
_KEPT = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint.

    Parameters
    ----------
    path, step, save_s
        Its directory, steps done, and the time that writing it took [s].
    values, checksums
        Plain values that the writer stored in the manifest; SHA-256 of every file by name.
    """

    path: Path
    step: int
    save_s: float
    values: Mapping[str, Any]
    checksums: Mapping[str, str]

    def verify(self) -> None:
        """Check every file; call this before anything else opens one.

        The distributed format of torch unpickles its ``.metadata``, which can run any code, and finds files
        by name. Files that pass are as they were written, but not necessarily by a trusted writer.

        Raises
        ------
        ChecksumError
            A file is missing, differs from what was written, is not a regular file, or is not listed in the
            manifest; the message names it.
        """
        for path in sorted(self.path.rglob("*")):
            name, mode = path.relative_to(self.path).as_posix(), path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ChecksumError(
                    f"{path}: is not a regular file; expected only regular files in a checkpoint"
                )
            if stat.S_ISREG(mode) and name not in self.checksums and name != _MANIFEST:
                raise ChecksumError(f"{path}: is not in the manifest of the checkpoint; it was added later")
        for name, expected in self.checksums.items():
            path = self.path / name
            if not path.is_file():
                raise ChecksumError(f"{path}: the file of the checkpoint is missing")
            if (digest := _digest(path)) != expected:
                raise ChecksumError(
                    f"{path}: checksum is {digest}, the checkpoint was written with {expected}"
                )


def latest_checkpoint(directory: str | Path) -> Checkpoint | None:
    """Return the newest checkpoint of a directory that has a manifest, None if there is none.

    Its files are not checked: call `Checkpoint.verify` before torch loads and unpickles them.

    Raises
    ------
    CheckpointError, ChecksumError
        The manifest was not written by `finish_checkpoint` for this step; it has been changed.
    """
    complete = _complete(Path(directory))
    return _read(complete[-1]) if complete else None


def sound_checkpoint(directory: str | Path) -> Checkpoint | None:
    """Return the newest checkpoint whose files are all as they were written, None if there are none.

    Damaged checkpoints are skipped with a warning.

    Raises
    ------
    CheckpointError
        All checkpoints are damaged; the message has the damage of each.
    """
    problems = []
    for path in reversed(_named(Path(directory))):
        try:
            checkpoint = _read(path)
            checkpoint.verify()
        except (CheckpointError, ChecksumError) as error:
            problems.append(str(error))
            continue
        for problem in problems:
            _log.warning("%s; resuming from %s", problem, path)
        return checkpoint
    if problems:
        raise CheckpointError(f"{directory}: all checkpoints are damaged; {'; '.join(problems)}")
    return None


def _read(directory: Path) -> Checkpoint:
    path = directory / _MANIFEST
    manifest = read_json(path, CheckpointError)
    try:
        expected = manifest.pop("digest")
        if (digest := _digest_of(manifest)) != expected:
            raise ChecksumError(f"{path}: checksum is {digest}, the manifest was written with {expected}")
        step, save_s, files = (manifest.pop(name) for name in ("step", "save_s", "files"))
    except (AttributeError, KeyError, TypeError):
        raise CheckpointError(
            f"{path}: is not a manifest of a checkpoint; expected step, save_s, files and digest"
        ) from None
    name = _NAME.fullmatch(directory.name)
    if name is None or int(name[1]) != step:
        raise CheckpointError(f"{path}: was written for step {step}, not for this directory")
    return Checkpoint(directory, step, save_s, manifest, files)


def start_checkpoint(directory: Path) -> Path:
    """Create an empty directory for a new checkpoint; the remains of a killed run are removed."""
    partial = directory / _PARTIAL
    discard_partial(directory)
    partial.mkdir(parents=True)
    return partial


def discard_partial(directory: Path) -> None:
    """Remove an unfinished checkpoint, to free space on a disk that may be full."""
    shutil.rmtree(directory / _PARTIAL, ignore_errors=True)


def finish_checkpoint(
    directory: Path, step: int, save_s: float, values: Mapping[str, Any], keep: int = _KEPT
) -> Path:
    """Complete the checkpoint begun by `start_checkpoint`, and return its directory.

    Parameters
    ----------
    directory, keep
        Directory of checkpoints, and number of newest ones to keep; the others are fields of `Checkpoint`.
    """
    partial = directory / _PARTIAL
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    digests = {str(path.relative_to(partial)): _digest(path) for path in files}
    manifest = {**values, "step": step, "save_s": save_s, "files": digests}
    write_json({**manifest, "digest": _digest_of(manifest)}, partial / _MANIFEST)
    # Everything reaches the disk before the rename, so a power failure cannot leave an incomplete checkpoint
    # under a final name.
    for path in [*files, partial / _MANIFEST, partial]:
        _to_disk(path)
    target = directory / f"step-{step:08d}"
    again = 0
    while target.exists():  # a run that resumed from an earlier step reaches this step again
        again += 1
        target = directory / f"step-{step:08d}.{again}"
    partial.rename(target)
    _to_disk(directory)
    complete = _complete(directory)
    for path in complete[: max(len(complete) - keep, 0)]:
        if path != target:
            shutil.rmtree(path, ignore_errors=True)
    return target


def _complete(directory: Path) -> list[Path]:
    """Return the checkpoint directories that have a manifest, in the order of `_named`."""
    return [path for path in _named(directory) if (path / _MANIFEST).is_file()]


def _named(directory: Path) -> list[Path]:
    """Return the directories with the name of a checkpoint, by step and then in the order of writing."""
    keyed = [(match, path) for path in directory.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, _, path in sorted((int(name[1]), int(name[2] or 0), path) for name, path in keyed)]


def _digest_of(values: Mapping[str, Any]) -> str:
    """Hash plain values so that the digest is the same before they are written and after they are read."""
    text = json.dumps(json.loads(json.dumps(values)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
