"""Exceptions that the package raises on purpose.

A message says what was found, what is accepted, and where.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

_MOST_LETTERS, _MOST_LINES = 1_000, 100


def bounded(text: str) -> str:
    """Cut the middle out of lines longer than 1,000 letters, and out of texts longer than 100 lines.

    Messages quote files of any size: a header may have megabytes. The beginning of a message says where and
    what was found, the end says what is accepted.
    """
    lines = text.split("\n")
    if len(lines) > _MOST_LINES:
        half, n_left_out = _MOST_LINES // 2, len(lines) - _MOST_LINES
        lines[half:-half] = [f"[... {n_left_out:,} lines left out ...]"]
    start, end = _MOST_LETTERS * 6 // 10, _MOST_LETTERS * 3 // 10
    for number, line in enumerate(lines):
        if len(line) > _MOST_LETTERS:
            n_left_out = len(line) - start - end
            lines[number] = f"{line[:start]} [... {n_left_out:,} letters left out ...] {line[-end:]}"
    return "\n".join(lines)


class MakespanError(Exception):
    """Base of all errors raised on purpose; catch it to catch them all. Its message has a bounded length."""

    def __str__(self) -> str:
        """Return the message, shortened by `bounded`."""
        return bounded(super().__str__())


class InputError(MakespanError):
    """Something the user gave cannot be used; correct it and run again."""


class NotationError(InputError):
    """The text of a plan or of a placement does not follow the notation."""


class UnknownNameError(InputError):
    """A name is not in the catalogue; the message lists the accepted ones."""


class PlanError(InputError):
    """The degrees, batch sizes or options of an execution plan contradict each other."""


class InfeasiblePlanError(InputError):
    """A well-formed plan cannot run on the hardware given; the message says why."""


class TraceError(InputError):
    """A table does not follow its schema; the message names file, row and column."""


class ConfigError(InputError):
    """A configuration key is unknown or its value is not accepted."""


class DataError(MakespanError):
    """A data file is not available; the message says what to do."""


class MissingDataError(DataError):
    """A data file or directory is not where it is expected."""


class ChecksumError(DataError):
    """The content of a data file differs from the registered checksum."""


class OfflineError(DataError):
    """A data file could not be fetched from its registered address."""


class FitError(MakespanError):
    """A performance model cannot be fitted to the observations given."""


class TrainingError(MakespanError):
    """A training run failed."""


class CheckpointError(TrainingError):
    """There is no checkpoint, or it does not fit the run that should continue from it."""


class WorkerError(TrainingError):
    """A training process died or hung; the message names the process and what it reported."""


class LostWorkerError(WorkerError):
    """A training process was ended by a signal; the same run may succeed another time."""


_MOST_BEGINNINGS = 3
_MOST_SHOWN = 100


def shown(value: object) -> str:
    """Return a value of any kind in one short line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def unknown_name(kind: str, found: object, accepted: Iterable[str]) -> UnknownNameError:
    """Build the error for a name that is not in a catalogue, with the accepted ones and similar ones."""
    names = sorted(accepted)
    if not isinstance(found, str):
        return UnknownNameError(f"unknown {kind} {shown(found)}; expected {', '.join(names)}.")
    begins = [name for name in names if found and name.lower().startswith(found.lower())]
    # A name without its end, such as h100, means those that begin so; h200 has as many letters in common.
    close = begins[:_MOST_BEGINNINGS] or difflib.get_close_matches(found, names, n=1)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return UnknownNameError(f"unknown {kind} {found!r}; expected {', '.join(names)}.{hint}")


def cell_error(where: str, row: int, column: str, found: object, accepted: str) -> TraceError:
    """Build the error for one cell of a table: file or producer, data row counted from 1, column, value."""
    return TraceError(f"{where}: row {row}, column {column!r}: found {found!r}; expected {accepted}")


def short_path(path: str | Path) -> str:
    """Return a path relative to the working directory if it is below it."""
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def failed_at(trace: TracebackType | None, file: str) -> int | None:
    """Return the line at which an error left the code of a file, None if it was never there."""
    line = None
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == file else line
        trace = trace.tb_next
    return line


def raised_in(trace: TracebackType | None) -> str:
    """Return file and line at which an error left code of a user, which no package has; empty without any."""
    packages, place = (str(Path(__file__).parent), str(Path(difflib.__file__).parent)), ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((*packages, "<")) and "site-packages" not in file:
            place = f"{short_path(file)}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return place
