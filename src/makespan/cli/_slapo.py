"""Print schedules, verify them, and search for the best one."""

import click

from makespan.cli._slapo_tune import tune_command
from makespan.cli._slapo_verify import show_command, verify_command

__all__ = ["COMMANDS"]


@click.group("slapo", help=__doc__)
def COMMANDS() -> None:
    """Hold the commands together."""


for command in (show_command, verify_command, tune_command):
    COMMANDS.add_command(command)
