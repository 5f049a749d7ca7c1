"""The verb ``policies``."""

import textwrap
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from makespan.sim import Policy

__all__ = ["policies_command"]

_WIDTH = 100


@click.command("policies")
def policies_command() -> None:
    """List the scheduling policies.

    For each its name, title, what it needs or promises, and what it implements.
    """
    from makespan.policies import REGISTRY

    width = max(len(name) for name in REGISTRY)
    indent = " " * (width + 2)
    for entry in REGISTRY.values():
        click.echo(f"{entry.name:<{width}}  {entry.title}: {_needs(entry)}")
        for reference in entry.references:
            click.echo(textwrap.fill(reference, _WIDTH, initial_indent=indent, subsequent_indent=indent))


def _needs(entry: "Policy") -> str:
    found = ["knows the steps left"] if entry.is_clairvoyant else ["knows nothing of the steps left"]
    if entry.interval_s is not None:
        found.append(f"rounds of {entry.interval_s:g} s")
    if entry.honours_guarantees:
        found.append("keeps guarantees")
    return ", ".join(found)
