"""Profile layers, plan pipelines, train through the loss of nodes, and simulate systems that lose nodes."""

import click

from makespan.cli._oobleck_job import PROFILE
from makespan.cli._oobleck_live import drain_command, export_command, join_command, run_command
from makespan.cli._oobleck_plan import INSTANTIATE, PLAN
from makespan.cli._oobleck_reconfigure import RECONFIGURE
from makespan.cli._oobleck_simulate import simulate_command

__all__ = ["COMMANDS"]


@click.group("oobleck", help=__doc__)
def COMMANDS() -> None:
    """Hold the commands together."""


for command in (
    PROFILE, PLAN, INSTANTIATE, RECONFIGURE, run_command, join_command, drain_command, export_command,
    simulate_command,
):  # fmt: skip
    COMMANDS.add_command(command)
