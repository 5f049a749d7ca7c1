"""What a killed process leaves behind: temporary files and directories, stale locks, processes it started.

A process holds what is its own by a lock that the kernel takes back when it ends, however it ends. What
nobody holds is removed by the next process that comes along. Where a file system has no locks nothing is.
"""

import atexit
import fcntl
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_log = logging.getLogger(__name__)

_OURS = re.compile(r"(makespan-[a-z]+-[a-z0-9_]{8}\.tmp)|(\..*-[a-z0-9_]{8}\.tmp(\.[^.]+)?)")
_OF_SNAKEMAKE = re.compile(r"(snakemake|tmp)[a-z0-9_]{8}")
_RUN = "MAKESPAN_RUN"
_SNAKEMAKE = Path(".snakemake")
_PRODUCTS = ("results", "benchmarks/results")
_ENDING_S = 60.0  # longest wait for jobs that end because their run was killed
_POLL_S = 0.5


# --- files and directories --------------------------------------------------------------------------


@contextmanager
def temporary_directory(kind: str) -> Iterator[Path]:
    """Directory that is removed at the end, or by the next process that wants one if this one is killed."""
    _sweep_once(tempfile.gettempdir())
    path, handle = _held(lambda: tempfile.mkdtemp(".tmp", f"makespan-{kind}-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        _close(handle)


@contextmanager
def temporary_file(directory: Path, prefix: str, suffix: str) -> Iterator[Path]:
    """Empty file ``.<name>-<random>.tmp<suffix>``, removed at the end or later like `temporary_directory`."""
    _sweep_once(str(directory))

    def make() -> str:
        created, name = tempfile.mkstemp(f".tmp{suffix}", prefix, directory)
        os.close(created)
        return name

    path, handle = _held(make)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        _close(handle)


def sweep(directory: str | Path) -> None:
    """Remove the temporary files and directories of dead processes of this user from a directory."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if _OURS.fullmatch(entry.name):
                with suppress(OSError):
                    _remove_unheld(Path(entry.path))


_sweep_once = cache(sweep)


def _remove_unheld(path: Path) -> None:
    if path.lstat().st_uid != os.getuid():
        return
    handle = _take(path)
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    finally:
        os.close(handle)


def _take(path: Path) -> int:
    """Lock a file or directory until the handle is closed; an `OSError` if another has it or it is gone."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(handle), path.lstat()):
            raise FileNotFoundError(path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _held(make: Callable[[], str]) -> tuple[Path, int | None]:
    """Make something and hold it; made anew if another process removed it in between."""
    while True:
        path = Path(make())
        try:
            return path, _take(path)
        except (BlockingIOError, FileNotFoundError):
            continue
        except OSError:  # a file system without locks
            return path, None


def _close(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)


# --- runs of the workflow ---------------------------------------------------------------------------


def register_run(*temporary: str | Path) -> str:
    """Note that this process runs the workflow in this directory, and remove what killed runs left here.

    Locks of Snakemake are removed when all runs that were noted are dead processes of this host, and the
    ``temporary`` directories that those had. Otherwise the answer says who may still be running and what to
    do; it is empty where nothing is locked.
    """
    sweep(tempfile.gettempdir())
    for product in _PRODUCTS:
        for directory, _, _ in os.walk(product):
            sweep(directory)
    sweep(_SNAKEMAKE)
    marks = _SNAKEMAKE / "makespan-runs"
    try:
        marks.mkdir(parents=True, exist_ok=True)
        guard = os.open(marks, os.O_RDONLY)
    except OSError:
        return ""
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        found = sorted(marks.iterdir())
        alive = [mark for mark in found if not _is_over(mark)]
        if found and not alive:
            _remove_locks()
            for mark in found:
                _forget(mark)
        _mark(marks / f"{os.getpid()}@{socket.gethostname()}", "\n".join(map(str, temporary)))
    except OSError:
        return ""
    finally:
        os.close(guard)
    return _told(alive) if any((_SNAKEMAKE / "locks").glob("*.lock")) else ""


def leave_run() -> None:
    """Take no part in the run that started this process, for jobs that a batch system looks after."""
    os.environ.pop(_RUN, None)


def end_with_run() -> None:
    """End this process, a job, as soon as the run of the workflow that started it is gone."""
    mark = os.environ.get(_RUN, "")
    if mark.rpartition("@")[2] == socket.gethostname():
        threading.Thread(target=_await_end, args=(Path(mark),), daemon=True).start()


def _mark(path: Path, text: str) -> None:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the handle is never closed
    os.write(handle, text.encode())
    os.environ[_RUN] = str(path.absolute())
    atexit.register(path.absolute().unlink, missing_ok=True)


def _is_over(mark: Path) -> bool:
    """Whether a run is a dead process of this host, none of whose jobs is about to end."""
    if mark.name.rpartition("@")[2] != socket.gethostname():
        return False
    deadline = time.monotonic() + _ENDING_S
    with suppress(FileNotFoundError), mark.open("r+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)  # which its jobs do, once it is gone
        except BlockingIOError:
            return False
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(_POLL_S / 10)
        return False
    return True


def _forget(mark: Path) -> None:
    for path in map(Path, mark.read_text("utf-8").splitlines()):
        if _OF_SNAKEMAKE.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    mark.unlink(missing_ok=True)


def _remove_locks() -> None:
    """Remove the locks of Snakemake, and the copies of scripts with which it started jobs."""
    left = [*_SNAKEMAKE.glob("locks/*.lock"), *_SNAKEMAKE.glob("scripts/tmp*.py")]
    for path in left:
        path.unlink(missing_ok=True)


def _told(alive: list[Path]) -> str:
    if not alive:
        return "a run that is not known here locked this directory; if it is over: snakemake --unlock"
    who = ", ".join("process {} on {}".format(*mark.name.split("@", 1)) for mark in alive)
    if all(mark.name.endswith(f"@{socket.gethostname()}") for mark in alive):
        return f"this directory is in use by {who}; wait for its end, or end it"
    files = " ".join(map(str, alive))
    return f"this directory is locked by {who}; if that run is over: rm {files}; snakemake --unlock"


def _await_end(mark: Path) -> None:
    try:
        stream = mark.open("rb")
    except FileNotFoundError:
        pass  # over already
    else:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH)
        except OSError:
            return
    _log.error("the run of the workflow that started this job is gone; so the job ends")
    os._exit(1)


# --- processes --------------------------------------------------------------------------------------


def end_with_parent(parent: int) -> None:
    """End this process as soon as ``parent``, the process that started it, is gone."""
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)
