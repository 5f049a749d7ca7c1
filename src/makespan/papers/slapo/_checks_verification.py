"""Checks of what is verified."""

from makespan.claims import Check, Claim, Finding, Tables

__all__ = ["VERIFICATION_CHECKS"]


def _verified(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: numbers of processes; limit: families that must be among those verified on each."""
    rows = tables["verify"]
    counts = [int(one) for one in claim.subject.split()]
    rows = rows[rows["n_processes"].isin(counts)]
    families = {count: set(of["family"]) for count, of in rows.groupby("n_processes")}
    if set(families) != set(counts) or any(len(names) < claim.limit for names in families.values()):
        return None
    n_equal = int(rows["is_equal"].sum())
    text = (
        f"{n_equal} of {len(rows)}, {int(rows['gradients'].sum())} gradients of parameters, "
        f"largest error {max(rows['output_error'].max(), rows['gradient_error'].max()):.1g}"
    )
    is_compared = bool((rows["gradients"] > 0).all() and (rows["outputs"] > 0).all())
    return Finding(text, n_equal == len(rows) and is_compared)


VERIFICATION_CHECKS: tuple[Check, ...] = (_verified,)
