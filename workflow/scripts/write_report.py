"""Write the report over all results: results/report.html."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from makespan.config import check_settings
from makespan.logs import logged_to
from makespan.report import write_report


def main(page: str, settings: Mapping[str, Any]) -> None:
    """Write one self-contained page over what is there."""
    write_report(check_settings(settings), page, Path(page).parent)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        main(snakemake.output.page, snakemake.params.settings)
