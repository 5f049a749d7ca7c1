"""Judge every statement over all sources: results/claims.csv."""

from makespan.claims import join_claims
from makespan.logs import logged_to
from makespan.tables import CLAIMS, JOINED_CLAIMS, read_csv, write_result

with logged_to(snakemake.log[0]):
    ledgers = {
        source: [read_csv(path, CLAIMS) for path in paths] for source, paths in snakemake.input.items()
    }
    write_result(join_claims(ledgers), snakemake.output.claims, JOINED_CLAIMS)
