"""Write the report on all available results."""

from pathlib import Path
from typing import Any

import click

from makespan.cli.options import check_default, check_target, json_option, say_result
from makespan.config import DEFAULT_FILES, check_settings, load_settings
from makespan.files import read_json
from makespan.papers.experiment import SOURCES
from makespan.report import write_report
from makespan.units import format_bytes


@click.command("report")
@click.option(
    "--results", default="results", show_default=True, help="Directory of results.",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)  # fmt: skip
@click.option(
    "--benchmarks", default="benchmarks/results", show_default=True, type=click.Path(path_type=Path),
    help="Directory of Snakemake's benchmark files.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path),
    help="Page to write.  [default: report.html in the directory of results]",
)  # fmt: skip
@json_option
def report_command(results: Path, benchmarks: Path, output: Path | None, form: str | None) -> None:
    """Write one HTML page on all available results.

    It lists missing results by the configuration that the results were made with, if they record it, else by
    that in config/. For example: makespan report --results results
    """
    path = output or results / "report.html"
    check_target(path, is_directory=False)
    write_report(check_settings(_configuration(results)), path, results, benchmarks)
    n_bytes = path.stat().st_size
    say_result({"output": path, "n_bytes": n_bytes}, f"{path}: {format_bytes(n_bytes)}", form)


def _configuration(results: Path) -> dict[str, Any]:
    records = (results / source / "provenance.json" for source in SOURCES)
    made = next((read_json(path) for path in records if path.is_file()), None)
    if made is not None:
        return dict(made["config"])
    check_default(
        Path(DEFAULT_FILES[0]),
        Path(DEFAULT_FILES[0]),
        f"{results} does not record the configuration of its results, so go to a checkout of makespan",
    )
    return load_settings().model_dump(mode="json")
