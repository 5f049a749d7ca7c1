"""Log files of workflow jobs, and the output of native libraries."""

import fcntl
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from makespan.cleanup import end_with_run
from makespan.errors import MakespanError
from makespan.units import printable

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OUTPUT, _FIRST_FREE = 1, 3  # file descriptors


class _Lines(logging.Formatter):
    """Escape control characters, so that names in messages cannot steer the terminal that shows the file."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


@contextmanager
def logged_to(path: str | Path) -> Iterator[None]:
    """Log to a new file while a block runs, and report an expected error on the terminal in one line.

    A `MakespanError` becomes a `SystemExit`: its message says what to do, and a traceback would bury it.
    Any other exception passes through, and its traceback is in the file. The job ends when the run of the
    workflow that started it is killed. The file also receives what native libraries print.
    """
    with Path(path).open("w", encoding="utf-8") as stream:
        divert_native_output(stream.fileno())
        handler = logging.StreamHandler(stream)
        handler.setFormatter(_Lines(_FORMAT))
        root = logging.getLogger()
        level = root.level
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        end_with_run()
        try:
            yield
        except MakespanError as error:
            root.error("%s: %s", type(error).__name__, error)
            raise SystemExit(printable(f"{type(error).__name__}: {error}")) from None
        except BaseException:
            root.exception("failed")
            raise
        finally:
            root.setLevel(level)
            root.removeHandler(handler)


def divert_native_output(place: int) -> None:
    """Redirect the descriptor of the standard output to ``place``; only ``sys.stdout`` still writes there.

    Solvers print to the descriptor and would spoil tables, JSON and the output of the workflow. The
    redirection lasts until the process ends, because C buffers its output until then. A stream that a test or
    a notebook has put in place of ``sys.stdout`` is left alone.
    """
    stream = sys.stdout
    try:
        if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != _OUTPUT:
            return
    except OSError:
        return
    stream.flush()
    kept = fcntl.fcntl(_OUTPUT, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    raw = io.FileIO(kept, "wb", closefd=False)
    sys.stdout = io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # the first without buffers, as python -u
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    try:
        os.dup2(place, _OUTPUT)
    except OSError:  # closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _OUTPUT)
        os.close(nowhere)
