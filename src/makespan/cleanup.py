"""Clean up after killed processes: temporary files and directories, stale locks, child processes.

A process locks what belongs to it with ``flock``; the kernel releases the lock when the process ends, however
it ends. The next process removes whatever is unlocked. On a file system without locks nothing is removed.
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


# --- Files and directories --------------------------------------------------------------------------


@contextmanager
def temporary_directory(kind: str) -> Iterator[Path]:
    """Create a directory that is removed at the end, or by the next process that makes one after a kill."""
    _sweep_once(tempfile.gettempdir())
    path, handle = _held(lambda: tempfile.mkdtemp(".tmp", f"makespan-{kind}-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        _close(handle)


@contextmanager
def temporary_file(directory: Path, prefix: str, suffix: str) -> Iterator[Path]:
    """Create an empty file ``.<name>-<random>.tmp<suffix>``, removed like a `temporary_directory`."""
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
            path = Path(entry.path)
            with suppress(OSError):
                if not _OURS.fullmatch(path.name) or path.lstat().st_uid != os.getuid():
                    continue
                handle = _take(path)  # fails while the owner lives
                try:
                    if path.is_dir():
                        shutil.rmtree(path)
                    else:
                        path.unlink()
                finally:
                    os.close(handle)


_sweep_once = cache(sweep)


def _take(path: Path) -> int:
    """Lock a file or directory until the handle is closed; an `OSError` if it is locked or gone."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between opening and locking, another process may have removed the path or put something new there.
        if not os.path.samestat(os.fstat(handle), path.lstat()):
            raise FileNotFoundError(path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _held(make: Callable[[], str]) -> tuple[Path, int | None]:
    """Create a file or directory and lock it; try again if another process removed it in between."""
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


# --- Runs of the workflow ---------------------------------------------------------------------------


def register_run(*temporary: str | Path) -> str:
    """Register this process as a run of the workflow in this directory, and clean up after killed runs.

    When all registered runs are dead processes of this host, the locks of Snakemake and the ``temporary``
    directories of those runs are removed. Otherwise the returned text names the runs that may still be alive
    and says what to do; it is empty if nothing is locked.
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
        earlier = sorted(marks.iterdir())
        alive = [mark for mark in earlier if not _is_over(mark)]
        if earlier and not alive:
            # Besides its locks, Snakemake leaves the copies of scripts with which it started jobs.
            for path in [*_SNAKEMAKE.glob("locks/*.lock"), *_SNAKEMAKE.glob("scripts/tmp*.py")]:
                path.unlink(missing_ok=True)
            for mark in earlier:
                for path in map(Path, mark.read_text("utf-8").splitlines()):
                    if _OF_SNAKEMAKE.fullmatch(path.name):
                        shutil.rmtree(path, ignore_errors=True)
                mark.unlink(missing_ok=True)
        own_mark = marks / f"{os.getpid()}@{socket.gethostname()}"
        handle = os.open(own_mark, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # never closed: held until this process ends
        os.write(handle, "\n".join(map(str, temporary)).encode())
        os.environ[_RUN] = str(own_mark.absolute())
        atexit.register(own_mark.absolute().unlink, missing_ok=True)
    except OSError:
        return ""
    finally:
        os.close(guard)
    if not any((_SNAKEMAKE / "locks").glob("*.lock")):
        return ""
    if not alive:
        return "a run that is not known here locked this directory; if it is over: snakemake --unlock"
    who = ", ".join("process {} on {}".format(*mark.name.split("@", 1)) for mark in alive)
    if all(mark.name.endswith(f"@{socket.gethostname()}") for mark in alive):
        return f"this directory is in use by {who}; wait for its end, or end it"
    files = " ".join(map(str, alive))
    return f"this directory is locked by {who}; if that run is over: rm {files}; snakemake --unlock"


def leave_run() -> None:
    """Detach this process from the run that started it, for jobs that a batch system controls."""
    os.environ.pop(_RUN, None)


def end_with_run() -> None:
    """End this process, a job, as soon as the run of the workflow that started it is gone."""
    mark = os.environ.get(_RUN, "")
    if mark.rpartition("@")[2] == socket.gethostname():
        threading.Thread(target=_await_end, args=(Path(mark),), daemon=True).start()


def _is_over(mark: Path) -> bool:
    """Return True if a run is a dead process of this host and none of its jobs is still ending."""
    if mark.name.rpartition("@")[2] != socket.gethostname():
        return False
    deadline = time.monotonic() + _ENDING_S
    with suppress(FileNotFoundError), mark.open("r+b") as stream:
        try:
            # The run holds the lock exclusively; its jobs wait for a shared lock and get it when it is gone.
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Jobs keep their shared lock until they have ended.
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(_POLL_S / 10)
        return False
    return True


def _await_end(mark: Path) -> None:
    try:
        stream = mark.open("rb")
    except FileNotFoundError:
        pass  # the run has ended already
    else:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH)
        except OSError:
            return
    _log.error("the run of the workflow that started this job is gone; so the job ends")
    os._exit(1)


# --- Processes --------------------------------------------------------------------------------------


def end_with_parent(parent: int) -> None:
    """End this process as soon as ``parent``, the process that started it, is gone."""
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)
