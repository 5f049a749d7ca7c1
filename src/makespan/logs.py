"""Log files of workflow jobs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from makespan.errors import MakespanError
from makespan.leftovers import end_with_run
from makespan.units import printable

__all__ = ["logged_to"]

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Lines(logging.Formatter):
    """Writes messages so that names in them cannot steer the terminal on which the file is read."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


@contextmanager
def logged_to(path: str | Path) -> Iterator[None]:
    """Send log messages to a new file while a block runs, and an expected error to the terminal in one line.

    A `MakespanError` becomes a `SystemExit`: its message says what to do, and a traceback would bury it.
    Any other exception passes through, and its traceback is in the file. The job ends when the run of the
    workflow that started it is killed.
    """
    handler = logging.FileHandler(path, mode="w", encoding="utf-8")
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
        handler.close()
