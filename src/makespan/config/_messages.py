"""From a validation failure to one line an option: key, what was found, what is accepted."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

__all__ = ["explain"]

_MOST_FAILURES = 20


def explain(details: Sequence[ErrorDetails], root: type[BaseModel]) -> list[str]:
    """Turn the details of a failed validation of ``root`` into messages: one line each, of many the first."""
    places = [detail["loc"] for detail in details]
    shown = [detail for detail in details if not _follows(detail, places)]
    lines = [_line(detail, root) for detail in shown[:_MOST_FAILURES]]
    return lines + [f"and {len(shown) - len(lines):,} more"] * (len(shown) > len(lines))


def _follows(detail: ErrorDetails, places: Sequence[tuple[int | str, ...]]) -> bool:
    """Whether a list is too short only because one of its entries was not accepted."""
    place = detail["loc"]
    return detail["type"] == "too_short" and any(
        other[: len(place)] == place and len(other) > len(place) for other in places
    )


def _line(detail: ErrorDetails, root: type[BaseModel]) -> str:
    key = _dotted(detail["loc"])
    if detail["type"] == "extra_forbidden":
        return _unknown_key(key, detail["loc"], root)
    if detail["type"] == "missing":
        return f"{key}: found nothing; accepted: a value, there is no default"
    return f"{key}: found {_shown(detail['input'])}; accepted: {_accepted(detail)}"


def _dotted(location: Sequence[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "configuration"


def _unknown_key(key: str, location: Sequence[int | str], root: type[BaseModel]) -> str:
    accepted = _keys_at(location[:-1], root)
    close = difflib.get_close_matches(str(location[-1]), accepted, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{key}: unknown key; accepted: {', '.join(accepted)}.{hint}"


def _keys_at(location: Sequence[int | str], root: type[BaseModel]) -> list[str]:
    block = root
    for part in location:
        if isinstance(part, str):
            block = _block_of(block.model_fields[part].annotation)
    return list(block.model_fields)


def _block_of(annotation: Any) -> type[BaseModel]:
    while not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        annotation = annotation.__args__[0]
    return annotation


def _shown(value: object) -> str:
    text = repr(dict(value) if isinstance(value, Mapping) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_PHRASES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "tuple_type": "a list",
    "model_type": "a group of options",
    "model_attributes_type": "a group of options",
    "string_too_short": "a text that is not empty",
}
_LIMITS = {
    "greater_than_equal": ("ge", "at least {}"),
    "greater_than": ("gt", "more than {}"),
    "less_than_equal": ("le", "at most {}"),
    "too_short": ("min_length", "a list of at least {}"),
    "literal_error": ("expected", "{}"),
    "value_error": ("error", "{}"),
}


def _accepted(detail: ErrorDetails) -> str:
    kind = detail["type"]
    if kind in _LIMITS:
        name, phrase = _LIMITS[kind]
        return phrase.format(detail["ctx"][name])
    return _PHRASES.get(kind, detail["msg"])
