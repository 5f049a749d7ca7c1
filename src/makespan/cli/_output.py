"""What verbs print: text for people, or the same rows as JSON or CSV."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import click

from makespan.units import printable

__all__ = ["form_options", "say", "say_rows"]

Command = TypeVar("Command", bound=Callable[..., Any])


def say(text: str, *, err: bool = False) -> None:
    """Print a text; names in it that come from files cannot steer the terminal."""
    click.echo(printable(text), err=err)


def form_options(command: Command) -> Command:
    """Add ``--json`` and ``--csv``; the command gets what was chosen as ``form``, else None."""
    for name, text in (("csv", "Print the rows as CSV."), ("json", "Print the rows as JSON.")):
        command = click.option(f"--{name}", "form", flag_value=name, default=None, help=text)(command)
    return command


def say_rows(rows: Iterable[Mapping[Any, Any]], form: str) -> None:
    """Print rows, with the columns of the first, as ``json`` or ``csv``; what is missing is null or empty."""
    listed = [{name: _plain(value) for name, value in row.items()} for row in rows]
    if form == "json":
        say(json.dumps(listed, indent=1))
        return
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(listed[0]) if listed else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(listed)
    say(stream.getvalue().removesuffix("\n"))


def _plain(value: Any) -> Any:
    """Return a number of a table as one of Python, and None for one that is missing."""
    plain = value.item() if hasattr(value, "item") else value
    return None if plain != plain else plain
