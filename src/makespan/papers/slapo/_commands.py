"""Search for the best schedule of a model."""

import click

from makespan.papers.slapo._commands_tune import tune_command

__all__ = ["COMMANDS"]


@click.group("slapo", help=__doc__)
def COMMANDS() -> None:
    """Hold the commands together."""


for command in (tune_command,):
    COMMANDS.add_command(command)
