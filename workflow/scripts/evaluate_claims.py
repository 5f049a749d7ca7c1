"""Compare the statements of the papers with the results: results/<source>/claims.csv."""

from collections.abc import Mapping

from makespan.logs import logged_to
from makespan.papers.morphling import evaluate_claims
from makespan.tables import CLAIMS, SCHEMAS, read_csv, write_csv


def main(tables: Mapping[str, str], claims: str, source: str, form: str) -> None:
    """Write the ledger of claims."""
    schemas = {schema.name: schema for schema in SCHEMAS}
    results = {name: read_csv(path, schemas[name]) for name, path in tables.items()}
    write_csv(evaluate_claims(results, source, form), claims, CLAIMS)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        main(
            dict(snakemake.input.items()),
            snakemake.output.claims,
            snakemake.wildcards.source,
            snakemake.params.form,
        )
