"""Read and write files: writes are atomic, reads are bounded.

The other end may be another process, a user or a full disk, so errors name the file and say what is accepted.
Compressed text and text in UTF-16 are read as the text that they hold, within the same bounds.
"""

import bz2
import codecs
import gzip
import importlib
import io
import json
import lzma
import os
import stat
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import islice, takewhile
from pathlib import Path
from typing import IO, Any, cast

from makespan.cleanup import temporary_directory, temporary_file
from makespan.errors import InputError, MakespanError, MissingDataError, unknown_name
from makespan.units import format_bytes

PARQUET = b"PAR1"
"""First bytes of a Parquet file, the only table format that is read and is not text."""
_LARGEST = 1 << 29  # bytes that are read at once; the largest public job lists have a third of it
_LARGEST_SETTINGS = 1 << 22  # configurations and constants have kilobytes; YAML takes minutes for more
_MOST_YAML_NODES = 100_000  # each reference to an alias counts: aliases of aliases grow exponentially
_PROBE_BYTES = 1 << 16
_MOST_EXPANDED = 100  # times the packed size, for files read in pieces; job lists expand tenfold
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MOST_LAYERS = 3  # a list in an archive that is compressed once more
_STANDARD_OUTPUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
_STANDARD_INPUT = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def _kind(path: Path) -> int | None:
    """Return the type bits of what a path leads to, None if there is nothing."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # below a file; a name that no file can have
        return None


# --- Writing ----------------------------------------------------------------------------------------


def is_stream(path: str | Path | None) -> bool:
    """Return True if a path is the standard output, or a symbolic link to it."""
    if path is not None and Path(path).is_symlink() and str(path) not in _STANDARD_OUTPUT:
        path = Path(path).readlink()
    return str(path) in _STANDARD_OUTPUT


def is_standard_input(path: str | Path) -> bool:
    """Return True if a path is the standard input, which can be read once only."""
    return str(path) in _STANDARD_INPUT


def check_target(path: str | Path) -> None:
    """Reject an existing target that is not a regular file: replacing a device or a pipe would destroy it."""
    kind = None if is_stream(path) else _kind(Path(path))
    if kind is not None and kind != stat.S_IFREG:
        accepted = "a file, there already or not, or - for the standard output"
        raise InputError(f"{path}: is {_KINDS.get(kind, 'no regular file')}; expected {accepted}")


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path with the same directory and suffix; it replaces ``path`` if the block succeeds.

    Directories are created, symbolic links are followed, and ``-`` and ``/dev/stdout`` are the standard
    output. A failed block leaves nothing behind, not even a directory that was made for it. Raises
    `InputError` if ``path`` is not a regular file, and an `OSError` that names the file.
    """
    check_target(path)
    if is_stream(path):
        with temporary_directory("output") as folder:
            temporary = Path(folder, "output")
            yield temporary
            sys.stdout.flush()
            sys.stdout.buffer.write(temporary.read_bytes())
            sys.stdout.buffer.flush()
        return
    target = Path(os.path.realpath(path))
    made = list(takewhile(lambda parent: not parent.exists(), target.parents))
    prefix, is_written = f".{target.stem}-", False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary_file(target.parent, prefix, target.suffix) as temporary:
            yield temporary
            temporary.chmod(_mode(target))
            temporary.replace(target)
            is_written = True
    except OSError as error:
        is_ours = error.filename is None or Path(os.fsdecode(error.filename)).name.startswith(prefix)
        if error.errno is not None and is_ours:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        for parent in [] if is_written else made:
            with suppress(OSError):
                parent.rmdir()


def _mode(target: Path) -> int:
    """Return the permissions of the file that is replaced, or those of a new one."""
    with suppress(FileNotFoundError):
        return stat.S_IMODE(target.stat().st_mode)
    umask = os.umask(0)  # the mask can only be read by setting it
    os.umask(umask)
    return 0o666 & ~umask


def write_text(text: str, path: str | Path) -> None:
    """Write a text file atomically, in UTF-8 with Unix line endings."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(values: Any, path: str | Path, indent: int | None = None) -> None:
    """Write plain values atomically, as JSON; with an indent if people read them."""
    write_text(json.dumps(values, indent=indent) + ("" if indent is None else "\n"), path)


def is_plain(values: object) -> bool:
    """Return True for a dictionary with names as keys, which JSON can hold with all of its values."""
    try:
        json.dumps(values)
    except (TypeError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and all(isinstance(name, str) for name in values)


# --- Reading ----------------------------------------------------------------------------------------


@contextmanager
def open_seekable(
    path: str | Path,
    expected: str,
    error: type[InputError] = InputError,
    largest: int | None = _LARGEST,
    *,
    binary: bytes | None = None,
) -> Iterator[IO[bytes]]:
    """Open a file, a pipe or, for ``-``, the standard input; reject what is too large or is not text.

    A file packed by gzip, bzip2, xz, zstd, zip or tar is opened as the one file that it holds, and text in
    UTF-16 or UTF-32 as UTF-8. Bounds apply to the unpacked text.

    Parameters
    ----------
    path, expected, error
        The file; what it should hold, for messages; the type of the errors.
    largest
        Number of bytes; None for files that are read in pieces.
    binary
        First bytes of a format that is accepted although it is no text.

    Raises
    ------
    MissingDataError
        There is no such file.
    InputError
        The file cannot be read; of type ``error``.
    """
    is_input = is_standard_input(path)
    kind = stat.S_IFIFO if is_input else _kind(Path(path))
    if kind is None:
        raise MissingDataError(f"{path}: no such file; expected {expected}")
    if kind not in (stat.S_IFREG, stat.S_IFIFO):
        found = _KINDS.get(kind, "no regular file")
        raise error(f"{path}: is {found}; expected a file, a pipe or - for the standard input: {expected}")
    packed = _Packed(str(path), expected, error, largest, binary)
    if kind == stat.S_IFREG:
        size = Path(path).stat().st_size
        if largest is not None:
            packed.check_size(size, largest)
        with Path(path).open("rb") as stream:
            yield packed.text(stream, size)
        return
    content = packed.drained(sys.stdin.buffer) if is_input else None
    if content is None:
        with Path(path).open("rb") as pipe:
            content = packed.drained(pipe)
    yield packed.text(io.BytesIO(content), len(content))


@dataclass(frozen=True, slots=True)
class _Packed:
    """A file that may be compressed, archived or not in UTF-8; arguments as for `open_seekable`."""

    path: str
    expected: str
    error: type[InputError]
    largest: int | None
    binary: bytes | None

    def check_size(self, size: int, largest: int) -> None:
        if size > largest:
            accepted = f"{self.expected} of at most {format_bytes(largest)}"
            raise self.error(f"{self.path}: has {format_bytes(size)} or more; expected {accepted}")

    def drained(self, pipe: IO[bytes]) -> bytes:
        """Read a whole pipe; reject binary content after its first bytes."""
        head = pipe.read(_PROBE_BYTES)
        if not any(is_kind(head) for is_kind, _ in _UNPACKERS):
            self._check_text(head)
        content = head + pipe.read(_LARGEST - len(head) + 1)
        self.check_size(len(content), _LARGEST)
        return content

    def text(self, stream: IO[bytes], size: int) -> IO[bytes]:
        """Unpack a seekable stream of ``size`` bytes until it is text."""
        limit = self.largest if self.largest is not None else max(_LARGEST, _MOST_EXPANDED * size)
        for layer in range(_MOST_LAYERS + 1):
            head = _head(stream)
            unpack = next((unpack for is_kind, unpack in _UNPACKERS if is_kind(head)), None)
            if unpack is None:
                break
            if layer == _MOST_LAYERS:
                raise self.error(f"{self.path}: packed more than {_MOST_LAYERS} times; expected at most that")
            with self._unpacking():
                stream = io.BufferedReader(_Bounded(unpack(stream), limit, self))
            with self._unpacking():
                head = _head(stream)
        self._check_text(head)
        if head.startswith(_LFS_POINTER):
            raise self.error(
                f"{self.path}: is a pointer of Git LFS, not the file; fetch it with 'git lfs pull'"
            )
        encoding = _encoding(head)
        if encoding is None:
            return stream
        content = stream.read(limit + 1)
        self.check_size(len(content), limit)
        try:
            return io.BytesIO(content.decode(encoding).encode())
        except UnicodeDecodeError:
            raise self.error(f"{self.path}: cannot be read as {self.expected}: broken {encoding}") from None

    def _check_text(self, head: bytes) -> None:
        is_known = self.binary is not None and head.startswith(self.binary)
        if b"\0" in head and not is_known and _encoding(head) is None:
            found = "it has zero bytes; expected text in UTF-8 or UTF-16, compressed or not"
            raise self.error(f"{self.path}: cannot be read as {self.expected}: {found}")

    @contextmanager
    def _unpacking(self) -> Iterator[None]:
        """Turn any exception of a library for a broken archive into an error of one line."""
        try:
            yield
        except MakespanError:
            raise
        except Exception as wrong:  # noqa: BLE001 - of six libraries, some of them not installed
            found = _reason(wrong) or type(wrong).__name__
            raise self.error(f"{self.path}: cannot be unpacked as {self.expected}: {found}") from None


class _Bounded(io.RawIOBase):
    """Unpacked bytes, up to a limit: a few kilobytes may expand to terabytes."""

    def __init__(self, source: IO[bytes], limit: int, packed: _Packed) -> None:
        self._source, self._limit, self._packed, self._position = source, limit, packed, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._packed._unpacking():
            content = self._source.read(len(buffer))
        self._position += len(content)
        self._packed.check_size(self._position, self._limit)
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET:
            offset = self._reached(offset, whence)
        self._packed.check_size(offset, self._limit)
        with self._packed._unpacking():
            self._position = self._source.seek(offset)
        return self._position

    def _reached(self, offset: int, whence: int) -> int:
        if whence == io.SEEK_CUR:
            return self._position + offset
        while self.read(_PROBE_BYTES):  # archives begin their search at the end
            pass
        return self._position + offset

    def tell(self) -> int:
        return self._position


def _head(stream: IO[bytes]) -> bytes:
    head = stream.read(_PROBE_BYTES)
    stream.seek(0)
    return head


def _starts(magic: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(magic)


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def _only(members: Iterable[tuple[str, Any]], kind: str) -> Any:
    """Return the only member of an archive, ignoring the files that macOS adds."""
    visible = (
        (name, member)
        for name, member in members
        if not Path(name).name.startswith(".") and "__MACOSX" not in name
    )
    first = list(islice(visible, 2))  # lazily: a tar archive is read member by member
    if not first:
        raise ValueError(f"the {kind} archive has no file; expected one")
    if len(first) > 1:
        names = " and ".join(repr(name) for name, _ in first)
        raise ValueError(f"the {kind} archive has several files, {names} among them; expected one: unpack it")
    return first[0][1]


def _gzip(stream: IO[bytes]) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(fileobj=stream))


def _xz(stream: IO[bytes]) -> IO[bytes]:
    return cast(IO[bytes], lzma.LZMAFile(stream))


def _zip_member(stream: IO[bytes]) -> IO[bytes]:
    archive = zipfile.ZipFile(stream)
    files = [info for info in archive.infolist() if not info.is_dir()]
    if any(info.filename == "[Content_Types].xml" for info in files):
        raise ValueError("it is a workbook or document of an office; save the table as CSV")
    return archive.open(_only(((info.filename, info) for info in files), "zip"))


def _tar_member(stream: IO[bytes]) -> IO[bytes]:
    archive = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115 - closed with the stream
    member = _only(((info.name, info) for info in archive if info.isfile()), "tar")
    return cast(IO[bytes], archive.extractfile(member))


def _zstd(stream: IO[bytes]) -> IO[bytes]:
    try:
        return cast(IO[bytes], importlib.import_module("compression.zstd").ZstdFile(stream))
    except ImportError:
        pass  # Python before 3.14
    try:
        library = importlib.import_module("zstandard")
    except ImportError:
        raise ValueError("zstd needs the package zstandard; install it, or unpack the file") from None
    # The reader of zstandard only seeks forward; the text is read to its end anyway, so unpack it at once.
    reader, content = library.ZstdDecompressor().stream_reader(stream, read_across_frames=True), io.BytesIO()
    while content.tell() <= _LARGEST and (piece := reader.read(_PROBE_BYTES)):
        content.write(piece)
    content.seek(0)
    return content


_UNPACKERS: tuple[tuple[Callable[[bytes], bool], Callable[[IO[bytes]], IO[bytes]]], ...] = (
    (_starts(b"\x1f\x8b"), _gzip),
    (_starts(b"BZh"), lambda stream: cast(IO[bytes], bz2.BZ2File(stream))),
    (_starts(b"\xfd7zXZ\0"), _xz),
    (_starts(b"\x28\xb5\x2f\xfd"), _zstd),
    (_starts(b"PK\x03\x04"), _zip_member),
    (_is_tar, _tar_member),
)


def _encoding(head: bytes) -> str | None:
    """Return the encoding of a text whose first bytes show that it is not UTF-8, else None."""
    # UTF-32 first: its little-endian mark begins with that of UTF-16.
    for encoding, mark in (("utf-32", codecs.BOM_UTF32_LE), ("utf-32", codecs.BOM_UTF32_BE)):
        if head.startswith(mark):
            return encoding
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    # Without a mark: job lists are mostly ASCII, so every other byte is zero in UTF-16.
    even, odd = head[0::2], head[1::2]
    if len(odd) > 1 and b"\0" not in even and odd.count(0) == len(odd):
        return "utf-16-le"
    if len(odd) > 1 and b"\0" not in odd and even.count(0) == len(even):
        return "utf-16-be"
    return None


def read_bytes(
    path: str | Path,
    expected: str,
    error: type[InputError] = InputError,
    largest: int = _LARGEST,
    *,
    binary: bytes | None = None,
) -> bytes:
    """Read a text file, a pipe or the standard input; arguments as for `open_seekable`."""
    with open_seekable(path, expected, error, largest, binary=binary) as stream:
        content = stream.read(largest + 1)
    _Packed(str(path), expected, error, largest, binary).check_size(len(content), largest)
    return content


def read_text(
    path: str | Path, expected: str, error: type[InputError] = InputError, largest: int = _LARGEST
) -> str:
    """Read text in UTF-8, without its byte order mark; arguments as for `read_bytes`."""
    try:
        return read_bytes(path, expected, error, largest).decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        found = f"byte 0x{wrong.object[wrong.start]:02x} at position {wrong.start}"
        raise error(f"{path}: cannot be read as {expected}: {found} is not UTF-8") from None


def parse_json(text: str | bytes) -> Any:
    """Return the plain values of a JSON text; a `ValueError` says what is wrong, also if it is too deep."""
    try:
        return json.loads(text)
    except RecursionError as wrong:
        raise ValueError(_reason(wrong)) from None


def read_json(path: str | Path, error: type[Exception] = InputError) -> Any:
    """Read the plain values of a JSON file; None if there is no such file."""
    try:
        return parse_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as wrong:
        raise error(f"{path}: cannot be read as JSON: {_reason(wrong)}") from None


def read_toml(path: str | Path, expected: str, error: type[InputError] = InputError) -> dict[str, Any]:
    """Read the tables of a TOML file; arguments as for `open_seekable`."""
    text = read_text(path, expected, error, _LARGEST_SETTINGS)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise error(f"{path}: cannot be read as {expected}: {_reason(wrong)}") from None


def read_yaml(path: str | Path, expected: str, error: type[InputError] = InputError) -> Any:
    """Read the plain values of a YAML file; arguments as for `open_seekable`.

    Duplicate keys are rejected, because YAML would drop one silently, and so are values that contain
    themselves.
    """
    import yaml  # here, because most callers of this module read no YAML

    loader = yaml.SafeLoader(read_text(path, expected, error, _LARGEST_SETTINGS))
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(loader, node)
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as wrong:
        raise error(f"{path}: cannot be read as YAML: {_reason(wrong)}") from None
    finally:
        loader.dispose()


def _check_nodes(loader: Any, root: Any) -> None:
    """Reject duplicate keys, nodes within themselves, and aliases that expand to too many nodes."""
    count = 0

    def visit(node: Any, above: tuple[int, ...]) -> None:
        nonlocal count
        count += 1
        line = f"line {node.start_mark.line + 1}"
        if id(node) in above:
            raise ValueError(f"{line}: the value contains itself")
        if count > _MOST_YAML_NODES:
            raise ValueError(f"more than {_MOST_YAML_NODES} values, aliases written out")
        if isinstance(node.value, str):
            return
        seen = set()
        for child in node.value:
            key, value = child if isinstance(child, tuple) else (None, child)
            if key is not None and isinstance(key.value, str):
                if (key.tag, key.value) in seen:
                    found = f"line {key.start_mark.line + 1}: key {key.value!r} is given twice"
                    raise ValueError(f"{found}; expected once")
                seen.add((key.tag, key.value))
            visit(value, (*above, id(node)))

    visit(root, ())


def _reason(wrong: Exception) -> str:
    """Describe an error in one line."""
    if isinstance(wrong, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(wrong).split())


# --- Presets: data files of the package, one table per entry ----------------------------------------


@cache
def read_preset(package: str, name: str) -> dict[str, Any]:
    """Return the content of ``presets/<name>.toml`` of a package; it is shared, so do not change it."""
    path = resources.files(package).joinpath(f"presets/{name}.toml")
    return tomllib.loads(path.read_text("utf-8"))


def preset_entry(package: str, name: str, kind: str, key: str) -> dict[str, Any]:
    """Return a copy of one entry of a preset, called ``kind`` in messages; raises `UnknownNameError`."""
    entries = read_preset(package, name)
    if key not in entries:
        raise unknown_name(kind, key, entries)
    return dict(entries[key])
