"""Record what the results of a source were made with: results/<source>/provenance.json."""

from collections.abc import Mapping, Sequence
from typing import Any

from makespan.config import check_settings, provenance
from makespan.files import write_text
from makespan.logs import logged_to
from makespan.tables import read_provenances


def main(record: str, settings: Mapping[str, Any], source: str, pins: str, times: Sequence[str]) -> None:
    """Write configuration, seed, version, pins and what the iteration times are as JSON."""
    write_text(provenance(check_settings(settings), source, pins, read_provenances(times)), record)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given, source = snakemake.params, snakemake.wildcards.source
        main(snakemake.output.record, given.settings, source, snakemake.input.pins, snakemake.input.times)
