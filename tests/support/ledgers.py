"""Verdicts of a paper's statements on tables of a test."""

from makespan.claims import judge


def findings(ledger, tables, source, artifacts=None, **options):
    """Return the ledger of a source by statement, of these artifacts if any are given."""
    found = judge(ledger, tables, source, options)
    own = found if artifacts is None else found[found["artifact"].isin(artifacts)]
    return own.set_index("statement")


def finding(ledger, tables, source, part, **options):
    """Return verdict, value and note of the one statement that has this part."""
    found = findings(ledger, tables, source, **options)
    (row,) = found[found.index.str.contains(part, regex=False)].to_dict("records")
    return row["verdict"], row["reproduced"], row["note"]
