"""Profile layers, plan pipelines, regroup them when nodes are lost, and simulate systems that lose nodes."""

import click

from makespan.papers.oobleck._commands_job import PROFILE
from makespan.papers.oobleck._commands_plan import INSTANTIATE, PLAN
from makespan.papers.oobleck._commands_reconfigure import RECONFIGURE
from makespan.papers.oobleck._commands_simulate import simulate_command

__all__ = ["COMMANDS"]


@click.group("oobleck", help=__doc__)
def COMMANDS() -> None:
    """Hold the commands together."""


for command in (PROFILE, PLAN, INSTANTIATE, RECONFIGURE, simulate_command):
    COMMANDS.add_command(command)
