"""The verb ``jobs``."""

from pathlib import Path
from typing import Any

import click

from makespan.cli._options import check_target, list_options
from makespan.cli._output import say
from makespan.files import is_stream

__all__ = ["jobs_command"]


@click.command("jobs")
@list_options
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("-"),
    show_default=True,
    help="File for the list (.csv); - for standard output.",
)
def jobs_command(output: Path, **request: Any) -> None:
    """Write the jobs of a workload as a list.

    The list has what was generated, or drawn for a foreign trace, with its load. Given as --workload it is
    read back unchanged, so every simulation of it has the same result. What was dropped and repaired is
    printed on the error stream.
    """
    from makespan.studies import scenario as assemble
    from makespan.traces import write_jobs

    check_target(output, is_directory=False)
    scenario = assemble(**request)
    say(scenario.report, err=True)
    write_jobs(scenario.jobs, output)
    if not is_stream(output):
        say(f"{output}: {len(scenario.jobs)} jobs")
