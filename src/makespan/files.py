"""Small files that other processes read while they are written: whole or not there."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from makespan.leftovers import temporary_file

__all__ = ["atomic_path", "read_json", "write_json", "write_text"]


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Temporary path, with the same directory and suffix, that replaces ``path`` when the block ends well.

    The directory is created. A failed block leaves neither the target nor the temporary file behind.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_file(target.parent, target.stem, target.suffix) as temporary:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)


def write_text(text: str, path: str | Path) -> None:
    """Write a text file atomically, in UTF-8 with Unix line ends."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(values: Any, path: str | Path) -> None:
    """Write plain values atomically, as JSON."""
    write_text(json.dumps(values), path)


def read_json(path: str | Path) -> Any:
    """Plain values of a JSON file, None if there is no such file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
