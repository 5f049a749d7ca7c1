"""Record what the results of a source were made with: results/<source>/provenance.json."""

from makespan.config import check_settings, provenance
from makespan.files import write_text
from makespan.logs import logged_to
from makespan.tables import read_provenances

with logged_to(snakemake.log[0]):
    settings, rows = check_settings(snakemake.params.settings), read_provenances(snakemake.input.times)
    record = provenance(settings, snakemake.wildcards.source, snakemake.input.pins, rows)
    write_text(record, snakemake.output.record)
