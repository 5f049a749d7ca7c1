"""Judge the statements of a paper by the results of a source: results/<source>/<paper>/claims.csv."""

from collections.abc import Mapping
from typing import Any

from makespan.claims import judge
from makespan.logs import logged_to
from makespan.papers import paper_named
from makespan.tables import CLAIMS, read_csv, read_provenances, shown_source, write_result


def main(tables: Mapping[str, str], claims: str, paper: str, source: str, **more: Any) -> None:
    """Write the ledger of a paper for one source."""
    ledger = paper_named(paper).ledger()
    results = {name: read_csv(path, ledger.tables[name]) for name, path in tables.items()}
    write_result(judge(ledger, results, source, **more), claims, CLAIMS)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        paper, source = snakemake.wildcards.paper, snakemake.wildcards.source
        tables, given = dict(snakemake.input.items()), snakemake.params
        shown = shown_source(source, read_provenances(tables.pop("times")))
        more = {"options": given.options, "shown": shown, "untimed": given.untimed}
        main(tables, snakemake.output.claims, paper, source, **more)
