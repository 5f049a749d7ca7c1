"""Run an experiment of a paper: results/<source>/<paper>/<table>.csv of each of its tables."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from makespan.logs import logged_to
from makespan.papers.experiment import Experiment, paper_named, read_inputs
from makespan.tables import write_result


def main(
    paper: str, experiment: str, options: str, paths: Mapping[str, Any], tables: Mapping[str, str],
    workloads: Sequence[str], **given: Any,
) -> None:  # fmt: skip
    """Run the experiment, ``module:class``, with its options as JSON, and write its tables."""
    module, name = experiment.split(":")
    found: type[Experiment] = getattr(import_module(module), name)
    chosen = found.from_json(options)
    inputs = read_inputs(paper_named(paper), chosen, paths=paths, workloads=workloads, **given)
    for table, rows in chosen.run(inputs).items():
        write_result(rows, tables[table])


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        main(
            given.paper, given.experiment, given.options, dict(snakemake.input.items()),
            dict(zip(given.tables, snakemake.output, strict=True)), given.workloads,
            source=snakemake.wildcards.source, n_threads=snakemake.threads,
            published=given.published and tuple(map(Path, given.published)),
        )  # fmt: skip
