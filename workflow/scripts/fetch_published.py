"""Fetch one of the authors' traces from its pinned commit and check it against the register."""

from makespan.logs import logged_to
from makespan.throughput import fetch, find_dataset, read_register

with logged_to(snakemake.log[0]):
    params = snakemake.params
    fetch(find_dataset(read_register(snakemake.input.register), params.name), params.directory)
