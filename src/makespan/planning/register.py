"""Register of tables of published rows: the documents behind each, and the checksum of its content.

The tables are transcripts of public documents at a pinned commit. No address has them as files: they are
read from a directory, in the folder ``public-rows`` beside the authors' files.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from makespan.arguments import typed
from makespan.errors import ChecksumError, InputError, MissingDataError
from makespan.files import read_bytes, read_preset

FOLDER = "public-rows"
"""Folder of the tables in a directory of published files."""


@dataclass(frozen=True, slots=True)
class PublicTable:
    """A registered table of published rows.

    Parameters
    ----------
    file, sha256
        Name of the file, and checksum of its content, hexadecimal.
    repository, commit
        Owner and name of the repository on GitHub, and full hash of the pinned commit; empty for papers.
    documents
        Paths of the documents in it, or the paper and its table.
    licence
        Licence that the source states.
    """

    file: str
    sha256: str
    repository: str
    commit: str
    documents: tuple[str, ...]
    licence: str

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the documents at the pinned commit; the names of papers as they are."""
        if not self.repository:
            return self.documents
        return tuple(
            f"https://github.com/{self.repository}/tree/{self.commit}/{one}" for one in self.documents
        )

    def difference(self, path: Path) -> str:
        """Say in one line how the content of a file differs from the registered one; empty if it does not."""
        found = hashlib.sha256(read_bytes(path, "a table of measured rows (CSV)", InputError)).hexdigest()
        if found == self.sha256:
            return ""
        return (
            f"{path}: differs from the registered table {self.file!r}: sha256 {found[:12]}, registered "
            f"{self.sha256[:12]}; copy it again, or rename it if its rows are yours"
        )


@cache
def public_tables() -> tuple[PublicTable, ...]:
    """Return the registered tables, by name of the file."""
    entries = read_preset("makespan.planning", "register")["tables"]
    return tuple(PublicTable(**{**one, "documents": tuple(one["documents"])}) for one in entries)


@typed
def differences(paths: Iterable[str | Path]) -> list[str]:
    """Return a line for each file that has the name of a registered table and another content."""
    known = {one.file: one for one in public_tables()}
    lines = [known[path.name].difference(path) for path in map(Path, paths) if path.name in known]
    return [line for line in lines if line]


@typed
def find_tables(directory: str | Path) -> list[Path]:
    """Return the paths of all registered tables in a directory of published files, after checking them.

    Raises
    ------
    MissingDataError
        There is no folder ``public-rows``, or it lacks a table.
    ChecksumError
        The content of a table differs from the registered one.
    """
    folder = Path(directory) / FOLDER
    paths = [folder / one.file for one in public_tables()]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        lacks = f"lacks {missing[0]}" if folder.is_dir() else "no such folder"
        raise MissingDataError(
            f"{folder}: {lacks}; expected the {len(paths)} tables of published rows; point "
            "MAKESPAN_PUBLISHED_DIR at a directory that has them"
        )
    if lines := differences(paths):
        raise ChecksumError(lines[0])
    return paths
