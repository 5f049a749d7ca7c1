"""Simulate systems that lose nodes."""

import click

from makespan.papers.oobleck._commands_job import PROFILE
from makespan.papers.oobleck._commands_simulate import simulate_command

__all__ = ["COMMANDS"]


@click.group("oobleck", help=__doc__)
def COMMANDS() -> None:
    """Hold the commands together."""


COMMANDS.add_command(PROFILE)
COMMANDS.add_command(simulate_command)
