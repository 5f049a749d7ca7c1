"""Write the report over all results: results/report.html."""

from pathlib import Path

from makespan.config import check_settings
from makespan.logs import logged_to
from makespan.report import write_report

with logged_to(snakemake.log[0]):
    page = snakemake.output.page
    write_report(check_settings(snakemake.params.settings), page, Path(page).parent)
