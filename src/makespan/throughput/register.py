"""Register of published data sets: origin and checksum of each file.

The register is a reviewed CSV file, one row per file, with the commit that the file was taken from and the
checksum of its content. It holds no data; files are found in a directory that the user names, or fetched
from the pinned commit.
"""

import hashlib
import logging
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Protocol

from makespan.errors import (
    ChecksumError,
    MissingDataError,
    OfflineError,
    TraceError,
    cell_error,
    unknown_name,
)
from makespan.files import atomic_path, read_bytes
from makespan.tables import parse_csv

_LOG = logging.getLogger(__name__)

_TIMEOUT_S = 30.0


class _Readable(Protocol):
    def read(self) -> bytes: ...


Opener = Callable[[str], AbstractContextManager[_Readable]]
"""Function that opens an address and returns a stream with ``read()``; replaced in tests."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """One registered file.

    Parameters
    ----------
    name
        Key of the file in the register.
    path, upstream_path
        Path of the file in a directory with the published files, and in a clone of the repository.
    version, licence
        Short name of the state of the source, and the licence that the authors state.
    size_bytes, sha256
        Length of the file and checksum of its content, hexadecimal.
    repository, commit
        Owner and name of the authors' repository, and full hash of the pinned commit.
    url
        Pattern of its address, filled from the other fields; empty if it cannot be fetched.
    note
        Remarks for readers, for example on changes to the file.
    """

    name: str
    path: str
    version: str
    licence: str
    size_bytes: int
    sha256: str
    repository: str
    commit: str
    upstream_path: str
    url: str
    note: str

    @property
    def address(self) -> str:
        """Address of the file at the pinned commit, empty if it cannot be fetched."""
        return self.url.format(**asdict(self))


def read_register(path: str | Path) -> tuple[Dataset, ...]:
    """Read the register of data sets, a CSV file with the fields of `Dataset` as columns, in file order.

    Raises
    ------
    MissingDataError, TraceError
        There is no such file, a column is missing, a cell has no accepted value, or a name occurs twice.
    """
    expected = "a register of data sets"
    table = parse_csv(read_bytes(path, expected, TraceError), str(path), expected, dtype=str, na_filter=False)
    missing = [field.name for field in fields(Dataset) if field.name not in table.columns]
    if missing:
        raise TraceError(f"{path}: register lacks column(s) {', '.join(missing)}")
    entries = []
    for number, row in enumerate(table.to_dict("records"), start=1):
        relative = PurePosixPath(row["path"])
        is_inside = not relative.is_absolute() and ".." not in relative.parts
        is_digest = re.fullmatch("[0-9a-f]{64}", row["sha256"]) is not None
        for column, is_good, accepted in (
            ("size_bytes", row["size_bytes"].isdigit(), "a whole number of bytes"),
            ("sha256", is_digest, "64 lower-case hexadecimal digits"),
            ("path", is_inside, "a relative path that stays inside the directory"),
        ):
            if not is_good:
                raise cell_error(str(path), number, column, row[column], accepted)
        text = {field.name: row[field.name] for field in fields(Dataset) if field.name != "size_bytes"}
        entries.append(Dataset(size_bytes=int(row["size_bytes"]), **text))
    names = [entry.name for entry in entries]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise TraceError(f"{path}: column 'name': {', '.join(repeated)} occur(s) more than once")
    return tuple(entries)


@cache
def shipped_register() -> tuple[Dataset, ...]:
    """Return the register of the package."""
    with resources.as_file(resources.files("makespan.throughput").joinpath("presets/datasets.csv")) as path:
        return read_register(path)


def find_dataset(register: Iterable[Dataset], name: str) -> Dataset:
    """Look up a data set by name; raises `UnknownNameError` with the names of the register."""
    by_name = {entry.name: entry for entry in register}
    if name not in by_name:
        raise unknown_name("data set", name, by_name)
    return by_name[name]


def locate(dataset: Dataset, directory: str | Path) -> Path:
    """Find a registered file in a directory with the published files or a clone of the repository.

    Its content is not checked, see `verify`; raises `MissingDataError` if neither layout has the file.
    """
    base = Path(directory)
    candidates = [base / dataset.path, base / dataset.upstream_path]
    candidates += [base.joinpath(*PurePosixPath(dataset.path).parts[1:])]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = ", ".join(str(candidate) for candidate in candidates[:2])
    raise MissingDataError(
        f"data set {dataset.name!r} is not in {base} (looked for {looked}); point "
        "MAKESPAN_PUBLISHED_DIR at a directory with the published files or at a clone of "
        f"{dataset.repository}, or fetch it"
    )


def verify(dataset: Dataset, directory: str | Path) -> Path:
    """Find a registered file, see `locate`, and check its content; raises `ChecksumError` if it differs."""
    path = locate(dataset, directory)
    check_content(dataset, path)
    return path


def check_content(dataset: Dataset, path: Path) -> None:
    """Check that a file has the registered content; the error names the difference and the remedy."""
    size = path.stat().st_size
    if size > 2 * dataset.size_bytes:  # converted line ends cannot explain this, so it is not read
        found = f"data set {dataset.name!r} has {size} bytes; registered: {dataset.size_bytes} bytes"
        raise ChecksumError(
            f"{path}: {found} (commit {dataset.commit}); delete it and fetch or copy it again"
        )
    _check(path.read_bytes(), dataset, where=str(path))


def fetch(dataset: Dataset, directory: str | Path, opener: Opener | None = None) -> Path:
    """Fetch a registered file from its pinned commit into ``directory``, unless it is there already.

    The fetched content is checked; a failed fetch leaves no file behind. ``opener`` opens an address.
    Raises `MissingDataError` without address, `OfflineError` without answer, `ChecksumError` for wrong files.
    """
    target = Path(directory) / dataset.path
    if target.is_file():
        check_content(dataset, target)
        return target
    if not dataset.address:
        raise MissingDataError(
            f"data set {dataset.name!r} cannot be fetched ({dataset.note or 'no address'}); "
            f"put it at {target}"
        )
    try:
        with (opener or _open)(dataset.address) as stream:
            content = stream.read()
    except OSError as error:  # URLError, HTTPError and time-outs are all OSError
        raise OfflineError(
            f"data set {dataset.name!r} could not be fetched from {dataset.address}: {error}; connect "
            f"to the network and run again, put the file at {target} by hand, or set "
            "MAKESPAN_PUBLISHED_DIR to a directory that has it"
        ) from error
    _check(content, dataset, where=dataset.address)
    with atomic_path(target) as temporary:
        temporary.write_bytes(content)
    _LOG.info("fetched %s (%d bytes) from %s", dataset.name, len(content), dataset.address)
    return target


def _open(address: str) -> AbstractContextManager[_Readable]:
    if not address.startswith("https://"):
        raise urllib.error.URLError(f"only https addresses are fetched, not {address}")
    stream: AbstractContextManager[_Readable] = urllib.request.urlopen(address, timeout=_TIMEOUT_S)
    return stream


def _check(content: bytes, dataset: Dataset, where: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found == dataset.sha256:
        return
    hint = "; its line ends were converted, switch that off and copy it again"
    normal = hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest() == dataset.sha256
    raise ChecksumError(
        f"{where}: data set {dataset.name!r} has sha256 {found} and {len(content)} bytes; registered: "
        f"{dataset.sha256} and {dataset.size_bytes} bytes (commit {dataset.commit})"
        + (hint if normal else "; delete the file and fetch or copy it again")
    )
