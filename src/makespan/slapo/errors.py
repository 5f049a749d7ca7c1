"""Errors of the schedule language, each also of the kind that Python users expect.

::

    MakespanError
    └── ScheduleError
        ├── PathError            (KeyError)        no such module in the schedule
        ├── MemberError          (AttributeError)  no such primitive, parameter, buffer or attribute
        ├── ArgumentError        (ValueError)      a value that a primitive does not accept
        ├── KindError            (TypeError)       an argument of another kind than accepted
        ├── ConflictError        (RuntimeError)    contradicts a primitive that was applied before
        ├── ShardError           (RuntimeError)    a tensor cannot be split that way
        ├── TracingError         (RuntimeError)    no graph can be captured
        ├── BuildError           (RuntimeError)    the scheduled model cannot be made ready to run
        ├── ReplayError          (RuntimeError)    a journal cannot be applied to this model
        └── VerificationError    (AssertionError)  scheduled and original model differ
"""

import difflib
from collections.abc import Iterable
from typing import Any

from makespan.errors import MakespanError
from makespan.units import printable

_SHOWN_CHARACTERS = 120
_SHOWN_ELEMENTS = 4


class ScheduleError(MakespanError):
    """Base of all errors of the schedule language."""


class PathError(ScheduleError, KeyError):
    """The schedule has no module of that path; the message says where the path stops and what is near."""

    def __str__(self) -> str:
        """Print the message as it is; a `KeyError` would print it in quotation marks."""
        return str(self.args[0]) if self.args else ""


class MemberError(ScheduleError, AttributeError):
    """There is no primitive, parameter, buffer or attribute of that name; the message lists what there is."""


class ArgumentError(ScheduleError, ValueError):
    """A primitive does not accept a value; the model is as it was."""


class KindError(ScheduleError, TypeError):
    """An argument is of another kind than accepted, missing or superfluous."""


class ConflictError(ScheduleError, RuntimeError):
    """A primitive contradicts one that was applied before, which the message quotes."""


class ShardError(ScheduleError, RuntimeError):
    """A tensor cannot be split that way; the message says sizes, axis and processes."""


class TracingError(ScheduleError, RuntimeError):
    """No graph can be captured of a module; the message says where and what to do."""


class BuildError(ScheduleError, RuntimeError):
    """A scheduled model cannot be made ready to run."""


class ReplayError(ScheduleError, RuntimeError):
    """A journal cannot be applied to this model; the message names the step."""


class VerificationError(ScheduleError, AssertionError):
    """The scheduled model does not compute what the original one does; the message says where first."""


def close_names(found: str, known: Iterable[str]) -> str:
    """Return the end of a message: up to five known names like the one found, or all if there are few."""
    names = list(known)
    close = difflib.get_close_matches(found, names, n=5, cutoff=0.5)
    if close:
        return "close: " + ", ".join(map(repr, close))
    if not names:
        return "there is none"
    return "known: " + ", ".join(map(repr, names[:12])) + (", ..." if len(names) > 12 else "")


def shown(value: Any) -> str:
    """Return a value as messages print it: short, and of a tensor its shape and type alone."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    if type(value) in (tuple, list):
        parts = [shown(one) for one in value[:_SHOWN_ELEMENTS]]
        parts += [f"{len(value) - _SHOWN_ELEMENTS} more"] if len(value) > _SHOWN_ELEMENTS else []
        opening, closing = "[]" if isinstance(value, list) else ("(", ",)" if len(parts) == 1 else ")")
        return f"{opening}{', '.join(parts)}{closing}"
    if type(value) is dict:
        items = [f"{key!r}: {shown(one)}" for key, one in list(value.items())[:_SHOWN_ELEMENTS]]
        items += [f"{len(value) - _SHOWN_ELEMENTS} more"] if len(value) > _SHOWN_ELEMENTS else []
        return "{" + ", ".join(items) + "}"
    try:
        text = " ".join(printable(repr(value)).split())
    except Exception:  # noqa: BLE001 - whatever the class of a user does
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
