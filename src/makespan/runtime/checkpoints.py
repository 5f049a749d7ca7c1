"""Checkpoints on disk: complete or not there, with a checksum of every file.

A directory of checkpoints holds ``step-<number>`` directories. One is written beside them under a
name that readers ignore, gets its manifest with checksums last, and is renamed then. Whatever kills
the writer, the checkpoints before it stay as they were.

Whoever reads the files with torch runs what is pickled in them, so nothing is read that the manifest does
not vouch for. Checksums tell damaged and mixed files, not who wrote them.
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
        Plain values that its writer left in the manifest; SHA-256 of every file by name.
    """

    path: Path
    step: int
    save_s: float
    values: Mapping[str, Any]
    checksums: Mapping[str, str]

    def verify(self) -> None:
        """Check every file before anything else opens it.

        The distributed format of torch unpickles its ``.metadata``, which can run any code, and looks for
        files by name. What passes is what was written, not necessarily by someone to be trusted.

        Raises
        ------
        ChecksumError
            It names a file that is missing, differs from what was written, is no regular file, or lies there
            without being in the manifest.
        """
        for path in sorted(self.path.rglob("*")):
            name, mode = path.relative_to(self.path).as_posix(), path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ChecksumError(f"{path}: is no regular file; a checkpoint has no others")
            if stat.S_ISREG(mode) and name not in self.checksums and name != _MANIFEST:
                raise ChecksumError(f"{path}: is not in the manifest of the checkpoint; it was added later")
        for name, wanted in self.checksums.items():
            path = self.path / name
            if not path.is_file():
                raise ChecksumError(f"{path}: the file of the checkpoint is missing")
            if (found := _digest(path)) != wanted:
                raise ChecksumError(f"{path}: checksum is {found}, the checkpoint was written with {wanted}")


def latest_checkpoint(directory: str | Path) -> Checkpoint | None:
    """Newest complete checkpoint of a directory, None if there is none; one without a manifest is none.

    Its files are not looked at: call `Checkpoint.verify` before torch loads them, which runs what is pickled.

    Raises
    ------
    CheckpointError, ChecksumError
        The manifest is none that `finish_checkpoint` wrote for this step; it was changed since.
    """
    found = _complete(Path(directory))
    if not found:
        return None
    return _read(found[-1])


def sound_checkpoint(directory: str | Path) -> Checkpoint | None:
    """Newest checkpoint of which every file is as it was written, None if there never was one.

    One that is damaged is left out with a warning.

    Raises
    ------
    CheckpointError
        There are checkpoints, and all are damaged; the message says what is wrong with each.
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
            _log.warning("%s; going on from %s", problem, path)
        return checkpoint
    if problems:
        raise CheckpointError(f"{directory}: no sound checkpoint is left; {'; '.join(problems)}")
    return None


def _read(directory: Path) -> Checkpoint:
    path = directory / _MANIFEST
    manifest = read_json(path, CheckpointError)
    try:
        wanted = manifest.pop("digest")
        if (digest := _digest_of(manifest)) != wanted:
            raise ChecksumError(f"{path}: checksum is {digest}, the manifest was written with {wanted}")
        step, save_s, files = (manifest.pop(name) for name in ("step", "save_s", "files"))
    except (AttributeError, KeyError, TypeError):
        expected = "one that makespan wrote, with step, save_s, files and digest"
        raise CheckpointError(f"{path}: is no manifest of a checkpoint; accepted: {expected}") from None
    if _step_of(directory) != step:
        raise CheckpointError(f"{path}: was written for step {step}, not for this directory")
    return Checkpoint(directory, step, save_s, manifest, files)


def start_checkpoint(directory: Path) -> Path:
    """Empty directory in which a checkpoint can be written; what a killed run left there is removed."""
    partial = directory / _PARTIAL
    discard_partial(directory)
    partial.mkdir(parents=True)
    return partial


def discard_partial(directory: Path) -> None:
    """Remove what a run that ended amid a checkpoint left of it, which takes room on a disk that is full."""
    shutil.rmtree(directory / _PARTIAL, ignore_errors=True)


def finish_checkpoint(
    directory: Path, step: int, save_s: float, values: Mapping[str, Any], keep: int = _KEPT
) -> Path:
    """Turn what was written since `start_checkpoint` into a complete checkpoint, and return its directory.

    Parameters
    ----------
    directory, keep
        Directory of checkpoints, and how many of the newest stay; the others are fields of `Checkpoint`.
    """
    partial = directory / _PARTIAL
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    digests = {str(path.relative_to(partial)): _digest(path) for path in files}
    manifest = {**values, "step": step, "save_s": save_s, "files": digests}
    write_json({**manifest, "digest": _digest_of(manifest)}, partial / _MANIFEST)
    for path in [*files, partial / _MANIFEST, partial]:
        _to_disk(path)
    target = directory / f"step-{step:08d}"
    again = 0
    while target.exists():
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
    """Directories of checkpoints with a manifest, in the order of `_named`."""
    return [path for path in _named(directory) if (path / _MANIFEST).is_file()]


def _named(directory: Path) -> list[Path]:
    """Directories with the name of a checkpoint by step, and of one step in the order of writing."""
    keyed = [(match, path) for path in directory.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, _, path in sorted((int(one[1]), int(one[2] or 0), path) for one, path in keyed)]


def _step_of(directory: Path) -> int | None:
    name = _NAME.fullmatch(directory.name)
    return None if name is None else int(name[1])


def _digest_of(values: Mapping[str, Any]) -> str:
    """Digest of plain values, the same before they are written and after they are read."""
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
