"""Fetch one of the authors' traces from its pinned commit and check it against the register."""

from makespan.logs import logged_to
from makespan.throughput import fetch, find_dataset, read_register


def main(name: str, directory: str, register: str) -> None:
    """Fetch a data set into a directory."""
    fetch(find_dataset(read_register(register), name), directory)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        main(snakemake.params.name, snakemake.params.directory, snakemake.input.register)
