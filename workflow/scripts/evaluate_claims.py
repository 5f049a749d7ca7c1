"""Judge the statements of a paper by the results of a source: results/<source>/<paper>/claims.csv."""

from makespan.claims import judge
from makespan.logs import logged_to
from makespan.papers import paper_named
from makespan.tables import CLAIMS, read_csv, read_provenances, shown_source, write_result

with logged_to(snakemake.log[0]):
    ledger = paper_named(snakemake.wildcards.paper).ledger()
    source, paths = snakemake.wildcards.source, dict(snakemake.input.items())
    shown = shown_source(source, read_provenances(paths.pop("times")))
    tables = {name: read_csv(path, ledger.tables[name]) for name, path in paths.items()}
    params = snakemake.params
    verdicts = judge(ledger, tables, source, options=params.options, shown=shown, untimed=params.untimed)
    write_result(verdicts, snakemake.output.claims, CLAIMS)
