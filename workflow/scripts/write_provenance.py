"""Record what the results of a source were made with: results/<source>/provenance.json."""

from collections.abc import Mapping
from typing import Any

from makespan.config import check_settings, provenance
from makespan.logs import logged_to
from makespan.tables import write_text


def main(record: str, settings: Mapping[str, Any], source: str, pins: str) -> None:
    """Write configuration, seed, version and pins as JSON."""
    write_text(provenance(check_settings(settings), source, pins), record)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given, source = snakemake.params, snakemake.wildcards.source
        main(snakemake.output.record, given.settings, source, snakemake.input.pins)
