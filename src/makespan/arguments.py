"""Checks of arguments and fields by their annotations: a value of another kind is refused in one line.

Numbers of numpy count as those of Python, and become these. True, False and NaN are no numbers. Lists stand
for tuples, texts for paths.
"""

import inspect
import math
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from numbers import Integral, Real
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from makespan.errors import InputError, MakespanError, shown, unknown_name

_INF, _MOST = math.inf, sys.float_info.max
P = ParamSpec("P")
T = TypeVar("T")


class _Kind(NamedTuple):
    """What an annotation accepts."""

    exact: frozenset[type]  # types whose values are taken as they are
    convert: Callable[[Any], Any]  # returns any other value as it should be, or raises TypeError
    accepted: str


def typed(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function refuse arguments that its annotations do not allow, by an `InputError`."""
    names = tuple(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        kinds = _kinds(function)
        given = [_checked(kinds, name, value, "") for name, value in zip(names, args, strict=False)]
        named = {name: _checked(kinds, name, value, "") for name, value in kwargs.items()}
        return function(*given, *args[len(given) :], **named)  # type: ignore[arg-type]

    return checked


def check_fields(
    record: object,
    where: str | None = None,
    error: type[InputError] = InputError,
    *,
    positive: Iterable[str] = (),
    not_negative: Iterable[str] = (),
) -> None:
    """Raise an ``error`` if a field of a frozen record is NaN, or not what its annotation allows.

    Parameters
    ----------
    where
        Begin of messages, a format of the record as ``job {0.job_id!r}`` (default: the name of its class).
    positive, not_negative
        Names of finite numbers above 0, and of 0 or more; None passes where the annotation allows it.
    """
    owner: Any = type(record)
    values_of, numbers, sound = _fields(owner)
    values = values_of(record)
    if tuple(map(type, values)) not in sound:
        kinds, place = _kinds(owner), _place(record, where)
        for name, value in zip(kinds, values, strict=False):
            new = _checked(kinds, name, value, place, error)
            if new is not value:
                object.__setattr__(record, name, new)
        if all(type(value) in kind.exact for kind, value in zip(kinds.values(), values, strict=False)):
            sound.add(tuple(map(type, values)))
    for at in numbers:
        value = values[at]
        # Not NaN, and no whole number beyond all floats.
        if value != value or (type(value) is int and not -_MOST <= value <= _MOST):
            name = list(_kinds(owner))[at]
            raise error(
                f"{_place(record, where)}{name} is {shown(value)}; expected {_kinds(owner)[name].accepted}"
            )
    for names, least in ((positive, 1), (not_negative, 0)):
        for name in names:
            value = getattr(record, name)
            if value is not None and not (0 < value < _INF or value == least):
                what = _kinds(owner)[name].accepted.removesuffix(" or None")
                bound = " above 0" if least and what == "a number" else f" >= {least}"
                raise error(f"{_place(record, where)}{name} is {shown(value)}; expected {what}{bound}")


def check_choices(record: object) -> None:
    """Raise an `UnknownNameError` if a field is none of the values that its annotation lists."""
    for name, annotation in get_type_hints(type(record)).items():
        if get_origin(annotation) is Literal:
            check_kind(name, getattr(record, name), annotation)


def check_range(name: str, value: object, least: int = 0, most: int | None = None) -> int:
    """Return an argument as a whole number; raise an `InputError` if it is none, or out of range."""
    number = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if number is None or number < least or (most is not None and number > most):
        accepted = f" >= {least}" if most is None else f", {least} to {most:,}"
        raise InputError(f"{name} is {shown(value)}; expected a whole number{accepted}")
    return number


def check_kind(name: str, value: Any, annotation: Any, error: type[MakespanError] = InputError) -> Any:
    """Return an argument as its annotation allows it; raise an ``error`` if it does not."""
    if get_origin(annotation) is Literal and value not in (accepted := get_args(annotation)):
        raise unknown_name(name, value, accepted)
    return _checked({name: _kind(annotation)}, name, value, "", error)


def _place(record: object, where: str | None) -> str:
    place = " ".join((type(record).__name__ if where is None else where.format(record)).split())
    return place and f"{place}: "


def _checked(
    kinds: Mapping[str, _Kind], name: str, value: Any, place: str, error: type[MakespanError] = InputError
) -> Any:
    kind = kinds.get(name, _ANY)
    if type(value) in kind.exact:
        return value
    try:
        return kind.convert(value)
    except TypeError:
        raise error(f"{place}{name} is {shown(value)}; expected {kind.accepted}") from None


@cache
def _kinds(owner: Any) -> dict[str, _Kind]:
    """Return what the fields of a class, or the arguments of a function, accept."""
    hints = get_type_hints(owner)
    hints.pop("return", None)
    given = hints if not is_dataclass(owner) else [one.name for one in fields(owner) if one.init]
    return {name: kind for name in given if (kind := _kind(hints[name])) is not _ANY}


@cache
def _fields(owner: type) -> tuple[Callable[[Any], tuple[Any, ...]], list[int], set[tuple[type, ...]]]:
    """Return what reads the checked fields of a record, which may be NaN, and types that need no other check.

    Records are made by thousands: the types of all their fields are compared at once.
    """
    kinds = _kinds(owner)
    numbers = [at for at, kind in enumerate(kinds.values()) if float in kind.exact]
    return attrgetter(*kinds, "__class__"), numbers, set()  # with one name alone, no tuple is read


def _refuse(value: Any) -> Any:
    raise TypeError(value)


def _whole(value: Any) -> int:
    return _refuse(value) if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(value)
    return int(value) if isinstance(value, Integral) else float(value)


def _switch(value: Any) -> bool:
    # Of numpy, which is not imported here, as it takes longer than everything else.
    is_of_numpy = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    return bool(value) if is_of_numpy or isinstance(value, bool) else _refuse(value)


def _path(value: Any) -> Path:
    return Path(value) if isinstance(value, str | os.PathLike) else _refuse(value)


def _nothing(value: Any) -> None:
    if value is not None:
        raise TypeError(value)


_ANY = _Kind(frozenset(), lambda value: value, "anything")
_PLAIN = {
    int: _Kind(frozenset((int,)), _whole, "a whole number"),
    float: _Kind(frozenset((int, float)), _number, "a number"),
    bool: _Kind(frozenset((bool,)), _switch, "True or False"),
    Path: _Kind(frozenset((type(Path()),)), _path, "a path"),
    type(None): _Kind(frozenset((type(None),)), _nothing, "None"),
}


def _kind(annotation: Any) -> _Kind:
    if annotation in (Any, object):
        return _ANY
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _kind(str)  # which ones, the owner says
    if origin in (Union, types.UnionType):
        return _any_of([_kind(part) for part in parts])
    if origin in (Mapping, dict):
        return _mapping(*map(_kind, parts))
    if Callable in (origin, annotation):
        return _Kind(frozenset(), lambda value: value if callable(value) else _refuse(value), "a function")
    if origin is tuple and ... not in parts:
        return _row([_kind(part) for part in parts])
    if origin in (tuple, list, Sequence, Collection, Iterable):
        return _each(_kind(parts[0]))
    if isinstance(annotation, type) and origin is None and not getattr(annotation, "_is_protocol", False):
        name = annotation.__name__
        return _of_class(annotation, "text" if annotation is str else f"a{'n' * (name[0] in 'AEIO')} {name}")
    return _ANY


def _of_class(accepted: type, words: str) -> _Kind:
    def convert(value: Any) -> Any:
        return value if isinstance(value, accepted) else _refuse(value)

    return _Kind(frozenset((accepted,)), convert, words)


def _any_of(kinds: Sequence[_Kind]) -> _Kind:
    if _ANY in kinds:
        return _ANY

    def convert(value: Any) -> Any:
        for kind in kinds:
            try:
                return kind.convert(value)
            except TypeError:
                continue
        raise TypeError(value)

    words = " or ".join(kind.accepted for kind in kinds)
    return _Kind(frozenset().union(*(kind.exact for kind in kinds)), convert, words)


def _each(kind: _Kind) -> _Kind:
    def convert(value: Any) -> Any:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise TypeError(value)
        return tuple(map(kind.convert, value))

    return _Kind(frozenset(), convert, "a list" if kind is _ANY else f"a list, each {kind.accepted}")


def _row(kinds: Sequence[_Kind]) -> _Kind:
    def convert(value: Any) -> Any:
        if not isinstance(value, tuple | list) or len(value) != len(kinds):
            raise TypeError(value)
        return tuple(kind.convert(one) for kind, one in zip(kinds, value, strict=True))

    return _Kind(frozenset(), convert, f"({', '.join(kind.accepted for kind in kinds)})")


def _mapping(key: _Kind, item: _Kind) -> _Kind:
    def convert(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise TypeError(value)
        for one, of_it in value.items():
            key.convert(one)
            item.convert(of_it)
        return value

    return _Kind(frozenset(), convert, f"a mapping from {key.accepted} to {item.accepted}")
