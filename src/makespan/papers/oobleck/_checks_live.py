"""Checks of what came of training whose nodes were killed; the subject of a table's rows is a system."""

import pandas as pd

from makespan.claims import Check, Claim, Finding, Tables, number

__all__ = ["LIVE_CHECKS"]


def _of(table: pd.DataFrame, system: str) -> pd.DataFrame:
    return table[table["run"].str.endswith(f", {system}")]


def _state_is_equal(tables: Tables, claim: Claim) -> Finding | None:
    """Whether all state has the bits of one process that repeats the plans."""
    table = _of(tables["hybrid_summary"], claim.subject)
    if table.empty:
        return None
    kills, n_equal = int(number(table, "kills").sum()), int(table["equal"].sum())
    largest = number(_of(tables["hybrid"], claim.subject), "abs_difference").max()
    text = f"{n_equal} of {len(table)} jobs after {kills} kills, losses {largest:g} apart"
    return Finding(text, n_equal == len(table) and largest == 0)


def _one_iteration_is_lost(tables: Tables, claim: Claim) -> Finding | None:
    """Whether no more iterations were done again than processes were killed."""
    table = _of(tables["hybrid_summary"], claim.subject)
    if table.empty:
        return None
    kills, repeated = int(number(table, "kills").sum()), int(number(table, "repeated").sum())
    return Finding(f"{repeated} iterations after {kills} kills", repeated <= kills)


def _nobody_starts_again(tables: Tables, claim: Claim) -> Finding | None:
    """Whether all who were not killed kept their processes and read no checkpoint."""
    table = _of(tables["hybrid_summary"], claim.subject)
    if table.empty:
        return None
    kept, reads = int(table["pids_kept"].sum()), int(number(table, "checkpoint_reads").sum())
    return Finding(f"{kept} of {len(table)} jobs, {reads} checkpoints read", kept == len(table) and not reads)


def _kinds_of_kills(tables: Tables, claim: Claim) -> Finding | None:
    """Whether every phase was struck, as announced by the victim itself."""
    table = _of(tables["hybrid_kills"], claim.subject)
    if table.empty:
        return None
    counts = table["kind"].value_counts()
    struck = ", ".join(
        f"{counts.get(kind, 0)} {kind}" for kind in ("compute", "reduction", "commit", "recovery")
    )
    return Finding(struck, len(counts) == 4)


def _pause(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: system and column; the limit is that of the longest."""
    system, column = claim.subject.split()
    times = number(_of(tables["hybrid_kills"], system), column).dropna()
    if times.empty:
        return None
    return Finding(
        f"median {times.median():.2f} s, worst {times.max():.2f} s", bool(times.max() < claim.limit)
    )


def _ahead_of_relaunch(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: a column that should be larger, or, with a minus before it, smaller."""
    column = claim.subject.removeprefix("-")
    table = tables["hybrid_summary"].assign(job=lambda rows: rows["run"].str.split(",").str[0])
    ours, theirs = (_of(table, system).set_index("job")[column] for system in ("oobleck", "relaunch"))
    both = pd.DataFrame({"ours": ours, "theirs": theirs}).dropna()
    if both.empty:
        return None
    is_ahead = both["ours"] < both["theirs"] if claim.subject != column else both["ours"] > both["theirs"]
    pairs = "; ".join(f"{one:.3g} and {other:.3g}" for one, other in both.to_numpy())
    return Finding(pairs, bool(is_ahead.all()))


LIVE_CHECKS: tuple[Check, ...] = (
    _state_is_equal,
    _one_iteration_is_lost,
    _nobody_starts_again,
    _kinds_of_kills,
    _pause,
    _ahead_of_relaunch,
)
