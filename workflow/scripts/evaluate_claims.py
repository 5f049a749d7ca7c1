"""Compare the statements of the papers with the results: results/<source>/claims.csv."""

from collections.abc import Mapping

from makespan.logs import logged_to
from makespan.papers.morphling import evaluate_claims, read_published
from makespan.tables import CLAIMS, SCHEMAS, TABLE4, read_csv, write_csv


def main(tables: Mapping[str, str], published: str, claims: str, source: str, form: str) -> None:
    """Write the ledger of claims."""
    schemas = {schema.name: schema for schema in SCHEMAS} | {"getting_started": TABLE4}
    results = {name: read_csv(path, schemas[name]) for name, path in tables.items()}
    results["table4_published"] = read_published("table4", published)
    write_csv(evaluate_claims(results, source, form), claims, CLAIMS)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        tables = dict(snakemake.input.items())
        main(
            tables,
            tables.pop("table4_published"),
            snakemake.output.claims,
            snakemake.wildcards.source,
            snakemake.params.form,
        )
