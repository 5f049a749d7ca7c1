"""Command-line options made from the fields of a dataclass."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def field_options(
    options: type[Any], *, without: Collection[str] = (), names: Mapping[str, str] | None = None
) -> Callable[[Command], Command]:
    """Return a decorator that adds one option per field of a dataclass, in the order of the fields.

    The command receives each value under the name of its field. Type, default and choices are those of the
    field; the help text is the first sentence of its entry under ``Parameters`` in the docstring.

    Parameters
    ----------
    options
        Dataclass. Its fields are numbers, texts, switches or literals, or one of these or None.
    without
        Fields that get no option.
    names
        Names of options that differ from that of their field, for example ``{"hang_s": "hang"}``.
    """
    types, help_texts, names = get_type_hints(options), _help_texts(options), names or {}

    def add(command: Command) -> Command:
        # Decorators apply from the last option to the first.
        for field in reversed([field for field in fields(options) if field.name not in without]):
            name = names.get(field.name, field.name).replace("_", "-")
            flag, shown = f"--{name}", _value(types[field.name])
            if shown.get("type") is bool:
                flag, shown = f"--{name}/--no-{name}", {}
            if field.default is MISSING:
                shown |= {"required": True}
            else:
                shown |= {"default": field.default, "show_default": field.default is not None}
            command = click.option(flag, field.name, help=help_texts.get(field.name), **shown)(command)
        return command

    return add


def _value(hint: Any) -> dict[str, Any]:
    """Return the type and the placeholder of an option; None is what it has when it is not given."""
    accepted = [kind for kind in get_args(hint) if kind is not NoneType]
    if get_origin(hint) is Literal:
        return {"type": click.Choice(accepted)}
    kind = accepted[0] if NoneType in get_args(hint) else hint
    return {"type": kind, "metavar": "NAME" if kind is str else "NUMBER"}


def _help_texts(options: type[Any]) -> dict[str, str]:
    """Return the first sentence of each entry under ``Parameters``, without marks of code."""
    text = inspect.getdoc(options) or ""  # python -OO leaves none
    section = text.partition("\nParameters\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^(\w[\w, ]*)\n((?: +.*\n?)+)", section, re.MULTILINE)
    first = {name: re.split(r"(?<=\.) ", " ".join(text.split()))[0] for name, text in entries}
    return {name: sentence.replace("`", "") for name, sentence in first.items()}
