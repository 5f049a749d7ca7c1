"""Train for Fig. 9 or for the accuracy gap: results/measured/easyscale/fig9*.csv or gap*.csv."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.papers.easyscale import fig9_experiment, gap_experiment, read_published
from makespan.tables import write_result

EXPERIMENTS = {"fig9": fig9_experiment, "gap": gap_experiment}


def main(experiment: str, published: str, paths: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Write the tables, with the printed cells beside."""
    cells = {experiment: read_published(experiment, published)}
    for name, table in EXPERIMENTS[experiment](cells, **options).items():
        write_result(table, paths[name])


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        main(given.experiment, snakemake.input.published, dict(snakemake.output.items()), given.options)
