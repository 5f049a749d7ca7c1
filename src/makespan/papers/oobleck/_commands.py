"""Plan pipelines, train through the loss of nodes, and simulate systems that lose them."""

import click

from makespan.papers.oobleck._commands_live import drain_command, join_command, run_command
from makespan.papers.oobleck._commands_plan import INSTANTIATE, PLAN
from makespan.papers.oobleck._commands_simulate import simulate_command

__all__ = ["COMMANDS"]


@click.group("oobleck", help=__doc__)
def COMMANDS() -> None:
    """Hold the commands together."""


for command in (PLAN, INSTANTIATE, run_command, join_command, drain_command, simulate_command):
    COMMANDS.add_command(command)
