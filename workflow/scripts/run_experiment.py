"""Run an experiment of a paper: results/<source>/<paper>/<table>.csv of each of its tables."""

from importlib import import_module
from pathlib import Path

from makespan.logs import logged_to
from makespan.papers.experiment import paper_named, read_inputs
from makespan.tables import write_result

with logged_to(snakemake.log[0]):
    params = snakemake.params
    module, name = params.experiment.split(":")
    experiment = getattr(import_module(module), name).from_json(params.options)
    inputs = read_inputs(
        paper_named(params.paper),
        experiment,
        source=snakemake.wildcards.source,
        paths=dict(snakemake.input.items()),
        workloads=params.workloads,
        n_threads=snakemake.threads,
        published=params.published and tuple(map(Path, params.published)),
    )
    results = experiment.run(inputs)
    for table, path in zip(params.tables, snakemake.output, strict=True):
        write_result(results[table], path)
