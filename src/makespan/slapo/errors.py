"""Errors of the schedule language; each also has the base class that Python users expect.

::

    MakespanError
    └── ScheduleError
        ├── PathError            (KeyError)        no such module in the schedule
        ├── MemberError          (AttributeError)  no such primitive, parameter, buffer or attribute
        ├── ArgumentError        (ValueError)      a value that a primitive rejects
        ├── KindError            (TypeError)       an argument of the wrong type
        ├── ConflictError        (RuntimeError)    contradicts a primitive that was applied before
        ├── ShardError           (RuntimeError)    a tensor cannot be split that way
        ├── TracingError         (RuntimeError)    no graph can be captured
        ├── BuildError           (RuntimeError)    the scheduled model cannot be made ready to run
        ├── ReplayError          (RuntimeError)    a journal cannot be applied to this model
        └── VerificationError    (AssertionError)  scheduled and original model differ
"""

import difflib
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from makespan.errors import MakespanError
from makespan.units import printable

_PACKAGE = "makespan.slapo"
_SHOWN_CHARACTERS = 120
_SHOWN_ELEMENTS = 4


class ScheduleError(MakespanError):
    """Base of all errors of the schedule language."""


class PathError(ScheduleError, KeyError):
    """The schedule has no module at that path; the message names the last module on it and close names."""

    def __str__(self) -> str:
        """Return the message unchanged; a `KeyError` would put it in quotation marks."""
        return str(self.args[0]) if self.args else ""


class MemberError(ScheduleError, AttributeError):
    """There is no primitive, parameter, buffer or attribute of that name; the message lists known names."""


class ArgumentError(ScheduleError, ValueError):
    """A primitive rejects a value; the model has not changed."""


class KindError(ScheduleError, TypeError):
    """An argument has the wrong kind, is missing or superfluous."""


def check_device(where: str, device: Any) -> None:
    """Reject a device that torch does not know; the text ``where`` begins the message."""
    import torch

    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError):
        raise ArgumentError(f"{where}device is {device!r}; expected one of torch, such as 'cpu'") from None


class ConflictError(ScheduleError, RuntimeError):
    """A primitive contradicts an earlier one; the message quotes it."""


class ShardError(ScheduleError, RuntimeError):
    """A tensor cannot be split that way; the message names sizes, axis and processes."""


class StructureError(ScheduleError, ValueError):
    """The structure of a model is not found; the message names the model and the reason."""


class TracingError(ScheduleError, RuntimeError):
    """No graph of a module can be captured; the message names the place and a remedy."""


class BuildError(ScheduleError, RuntimeError):
    """A scheduled model cannot be made ready to run."""


class ReplayError(ScheduleError, RuntimeError):
    """A journal cannot be applied to this model; the message names the step."""


class VerificationError(ScheduleError, AssertionError):
    """The scheduled model differs from the original one; the message is the report."""


def close_names(name: str, known: Iterable[str]) -> str:
    """Return the end of a message: up to five close names, else the known names."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
    if close:
        return "close: " + ", ".join(map(repr, close))
    if not names:
        return "there is none"
    return "known: " + ", ".join(map(repr, names[:12])) + (", ..." if len(names) > 12 else "")


def short_repr(value: Any) -> str:
    """Return a short text for a value in a message; a tensor is shown by shape and type."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    if type(value) in (tuple, list):
        parts = [short_repr(element) for element in value[:_SHOWN_ELEMENTS]]
        parts += [f"{len(value) - _SHOWN_ELEMENTS} more"] if len(value) > _SHOWN_ELEMENTS else []
        opening, closing = "[]" if isinstance(value, list) else ("(", ",)" if len(parts) == 1 else ")")
        return f"{opening}{', '.join(parts)}{closing}"
    if type(value) is dict:
        items = [f"{key!r}: {short_repr(element)}" for key, element in list(value.items())[:_SHOWN_ELEMENTS]]
        items += [f"{len(value) - _SHOWN_ELEMENTS} more"] if len(value) > _SHOWN_ELEMENTS else []
        return "{" + ", ".join(items) + "}"
    try:
        text = " ".join(printable(repr(value)).split())
    except Exception:  # noqa: BLE001 - whatever the class of a user does
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def warn(message: str) -> None:
    """Warn at the nearest line outside this package: that of the user's schedule."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level + 1)
