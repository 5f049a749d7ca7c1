"""Fetch the authors' traces from their pinned commits and check them against the register."""

from collections.abc import Sequence

from makespan.logs import logged_to
from makespan.traces import fetch, find_dataset, read_register


def main(names: Sequence[str], directory: str, register: str) -> None:
    """Fetch each named data set into a directory."""
    entries = read_register(register)
    for name in names:
        fetch(find_dataset(entries, name), directory)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        main(snakemake.params.names, snakemake.params.directory, snakemake.input.register)
