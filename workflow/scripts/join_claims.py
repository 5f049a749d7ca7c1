"""Judge every statement over all sources: results/claims.csv."""

from collections.abc import Mapping, Sequence

from makespan.claims import join_claims
from makespan.logs import logged_to
from makespan.tables import CLAIMS, JOINED_CLAIMS, read_csv, write_result


def main(ledgers: Mapping[str, Sequence[str]], claims: str) -> None:
    """Join the ledgers of each source."""
    found = {source: [read_csv(path, CLAIMS) for path in paths] for source, paths in ledgers.items()}
    write_result(join_claims(found), claims, JOINED_CLAIMS)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        main(dict(snakemake.input.items()), snakemake.output.claims)
