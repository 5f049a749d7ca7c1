"""Checks of what was trained and timed."""

from makespan.claims import Check, Claim, Finding, Tables, number

__all__ = ["EXECUTION_CHECKS"]


def _predictions_rank(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: the column of predictions."""
    table = tables["predictions"]
    if len(table) < 2:
        return None
    ranks = number(table, claim.subject).rank()
    found = ranks.corr(number(table, "iter_wall_s").rank())
    text = f"{found:.2f} over {len(table)} plans on {table['n_cores'].iloc[0]} cores"
    return Finding(text, bool(found >= claim.limit))


EXECUTION_CHECKS: tuple[Check, ...] = (_predictions_rank,)
