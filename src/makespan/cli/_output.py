"""What verbs print."""

import click

from makespan.units import printable

__all__ = ["say"]


def say(text: str, *, err: bool = False) -> None:
    """Print a text; names in it that come from files cannot steer the terminal."""
    click.echo(printable(text), err=err)
