"""Reading and writing of files: what is written is whole or not there, what is read is bounded.

The other end may be another process, a user or a full disk, so errors name the file and say what is accepted.
"""

import io
import json
import os
import stat
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from makespan.errors import InputError, MissingDataError
from makespan.leftovers import temporary_directory, temporary_file
from makespan.units import format_bytes

__all__ = [
    "atomic_path", "check_target", "is_stream", "open_seekable", "read_bytes", "read_json", "read_text",
    "read_toml", "read_yaml", "write_json", "write_text",
]  # fmt: skip

_LARGEST = 1 << 29  # bytes that are read at once; the largest public job lists have a third of it
_LARGEST_SETTINGS = 1 << 22  # configurations and constants have kilobytes; YAML takes minutes for more
_MOST_YAML_NODES = 100_000  # counted as often as they are referred to: aliases of aliases grow without end
_PROBE_BYTES = 1 << 16
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
    """Type bits of what a path leads to, None if there is nothing."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return None


# --- writing ----------------------------------------------------------------------------------------


def is_stream(path: str | Path | None) -> bool:
    """Whether what is written there goes to the standard output, also by a symbolic link to it."""
    if path is not None and Path(path).is_symlink() and str(path) not in _STANDARD_OUTPUT:
        path = Path(path).readlink()
    return str(path) in _STANDARD_OUTPUT


def check_target(path: str | Path) -> None:
    """Refuse what is there and no regular file: replacing a device or a pipe would destroy it."""
    kind = None if is_stream(path) else _kind(Path(path))
    if kind is not None and kind != stat.S_IFREG:
        accepted = "a file, there already or not, or - for the standard output"
        raise InputError(f"{path}: is {_KINDS.get(kind, 'no regular file')}; accepted: {accepted}")


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Temporary path, with the same directory and suffix, that replaces ``path`` when the block ends well.

    Directories are created, symbolic links followed to what they name, and ``-`` and ``/dev/stdout`` are the
    standard output. A failed block leaves nothing behind, nor a directory that was made for it. Raises
    `InputError` for what is no regular file, and an `OSError` that names the file.
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
    """Permissions of a file that is replaced, else those of a new one."""
    with suppress(FileNotFoundError):
        return stat.S_IMODE(target.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def write_text(text: str, path: str | Path) -> None:
    """Write a text file atomically, in UTF-8 with Unix line ends."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(values: Any, path: str | Path, indent: int | None = None) -> None:
    """Write plain values atomically, as JSON; with an indent if people read them."""
    write_text(json.dumps(values, indent=indent) + ("" if indent is None else "\n"), path)


# --- reading ----------------------------------------------------------------------------------------


@contextmanager
def open_seekable(
    path: str | Path, expected: str, error: type[InputError] = InputError, largest: int | None = _LARGEST
) -> Iterator[IO[bytes]]:
    """Open a file, a pipe or, for ``-``, the standard input; what is no text or too large is refused at once.

    ``expected`` names what should be there for messages, and ``largest`` is a number of bytes, None for files
    that are read in pieces. Raises `MissingDataError` if there is nothing, ``error`` for what cannot be read.
    """
    is_input = str(path) in _STANDARD_INPUT
    kind = stat.S_IFIFO if is_input else _kind(Path(path))
    if kind is None:
        raise MissingDataError(f"{path}: no such file; expected {expected}")
    if kind not in (stat.S_IFREG, stat.S_IFIFO):
        found = _KINDS.get(kind, "no regular file")
        raise error(f"{path}: is {found}; accepted: a file, a pipe or - for the standard input: {expected}")
    if kind == stat.S_IFREG and largest is not None:
        _check_size(Path(path).stat().st_size, largest, path, expected, error)
    if kind == stat.S_IFREG:
        with Path(path).open("rb") as stream:
            _check_text(stream.read(_PROBE_BYTES), path, expected, error)
            stream.seek(0)
            yield stream
        return
    content = _drained(sys.stdin.buffer, path, expected, error) if is_input else None
    if content is None:
        with Path(path).open("rb") as pipe:
            content = _drained(pipe, path, expected, error)
    yield io.BytesIO(content)


def _drained(pipe: IO[bytes], path: str | Path, expected: str, error: type[InputError]) -> bytes:
    head = pipe.read(_PROBE_BYTES)
    _check_text(head, path, expected, error)
    content = head + pipe.read(_LARGEST - len(head) + 1)
    _check_size(len(content), _LARGEST, path, expected, error)
    return content


def _check_size(size: int, largest: int, path: str | Path, expected: str, error: type[InputError]) -> None:
    if size > largest:
        accepted = f"{expected} of at most {format_bytes(largest)}"
        raise error(f"{path}: has {format_bytes(size)} or more; accepted: {accepted}")


def _check_text(head: bytes, path: str | Path, expected: str, error: type[InputError]) -> None:
    if b"\0" in head:
        raise error(f"{path}: cannot be read as {expected}: it has zero bytes; accepted: text in UTF-8")


def read_bytes(
    path: str | Path, expected: str, error: type[InputError] = InputError, largest: int = _LARGEST
) -> bytes:
    """Content of a text file, a pipe or the standard input, see `open_seekable`."""
    with open_seekable(path, expected, error, largest) as stream:
        content = stream.read(largest + 1)
    _check_size(len(content), largest, path, expected, error)
    return content


def read_text(
    path: str | Path, expected: str, error: type[InputError] = InputError, largest: int = _LARGEST
) -> str:
    """Text in UTF-8, without byte order mark, see `read_bytes`."""
    try:
        return read_bytes(path, expected, error, largest).decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        found = f"byte 0x{wrong.object[wrong.start]:02x} at position {wrong.start}"
        raise error(f"{path}: cannot be read as {expected}: {found} is not UTF-8") from None


def read_json(path: str | Path, error: type[Exception] = InputError) -> Any:
    """Plain values of a JSON file, None if there is no such file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as wrong:
        raise error(f"{path}: cannot be read as JSON: {_reason(wrong)}") from None


def read_toml(path: str | Path, expected: str, error: type[InputError] = InputError) -> dict[str, Any]:
    """Tables of a TOML file; further arguments as for `open_seekable`."""
    text = read_text(path, expected, error, _LARGEST_SETTINGS)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise error(f"{path}: cannot be read as {expected}: {_reason(wrong)}") from None


def read_yaml(path: str | Path, expected: str, error: type[InputError] = InputError) -> Any:
    """Plain values of a YAML file; arguments as for `open_seekable`.

    Refused are a key that is given twice, of which YAML would forget one, and values that contain themselves.
    """
    import yaml  # here, because most who write files read no YAML

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
    """Refuse repeated keys, nodes within themselves, and aliases that stand for more than anybody writes."""
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
                    raise ValueError(f"{found}; accepted: once")
                seen.add((key.tag, key.value))
            visit(value, (*above, id(node)))

    visit(root, ())


def _reason(wrong: Exception) -> str:
    """Say in a line what is wrong."""
    if isinstance(wrong, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(wrong).split())
