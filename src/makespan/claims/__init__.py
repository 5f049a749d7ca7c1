"""The ledger: statements of the papers, judged against the results of every source.

A paper hands in a `Ledger`: its ``claims.csv``, the tables that decide, and the checks by name::

    one = judge(ledger, tables, "emulated", {"form": "extended"})
    whole = join_claims({"emulated": [one], "published": [other]})

`read_targets` and `measured_targets` do the same for goals that this project sets itself.
"""

from makespan.claims._judge import join_claims, judge
from makespan.claims._ledger import Check, Claim, Finding, Ledger, Tables, number
from makespan.claims._targets import Target, measured_targets, read_targets

__all__ = [
    "Check",
    "Claim",
    "Finding",
    "Ledger",
    "Tables",
    "Target",
    "join_claims",
    "judge",
    "measured_targets",
    "number",
    "read_targets",
]
