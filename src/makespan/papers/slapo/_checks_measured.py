"""Checks of what is counted and measured of schedules; how fast CPU cores are decides nothing."""

import numpy as np
import pandas as pd

from makespan.claims import Check, Claim, Finding, Tables, number
from makespan.papers.slapo._checks_tuning import memory_exceptions

__all__ = ["MEASURED_CHECKS"]

_MIB = float(1 << 20)
_TIMED_ON_CPU = "times of CPU cores decide nothing"


def _lines_at_most(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: the count; limit: the most that a schedule may have."""
    rows = tables["table4"]
    if rows.empty:
        return None
    counts = number(rows, claim.subject)
    longest = rows["family"].iloc[int(counts.to_numpy().argmax())]
    text = f"{counts.min():.0f} to {counts.max():.0f}, the most for {longest}"
    return Finding(text, bool((counts <= claim.limit).all()))


def _same_results(tables: Tables, claim: Claim) -> Finding | None:
    """Limit: largest difference of outputs and gradients, over the largest value of a tensor."""
    rows = tables["fig9"][tables["fig9"]["oracle"] == "measured"]
    if rows.empty:
        return None
    outputs, gradients = (float(number(rows, f"{one}_error").max()) for one in ("output", "gradient"))
    text = f"{len(rows)} runs: outputs within {outputs:.1e}, gradients within {gradients:.1e}"
    return Finding(text, max(outputs, gradients) <= claim.limit)


def _memory_falls(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: steps in order, each at its largest number of processes."""
    rows, steps = tables["fig9"][tables["fig9"]["oracle"] == "measured"], claim.subject.split()
    largest = rows.sort_values("n_gpus").groupby("step").last()
    if not set(steps) <= set(largest.index):
        return None
    held = number(largest, "saved_bytes") + number(largest, "parameter_bytes")
    found = held.loc[steps].to_numpy() / _MIB
    text = ", ".join(f"{name} {value:.1f}" for name, value in zip(steps, found, strict=True)) + " MiB"
    return Finding(text, bool((np.diff(found) < 0).all()))


def _faster_kernels(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: two steps; the second is timed against the first, in one process."""
    rows = tables["fig9"]
    alone = rows[(rows["oracle"] == "measured") & (rows["n_gpus"] == 1)].set_index("step")
    before, after = claim.subject.split()
    if not {before, after} <= set(alone.index):
        return None
    rates = number(alone, "throughput_samples_per_s").to_dict()
    return Finding(f"{rates[after] / rates[before]:.2f}x on CPU cores", None, _TIMED_ON_CPU)


def _search(tables: Tables, claim: Claim) -> pd.DataFrame:
    """Return the rows of the strategy that is the subject."""
    table = tables["tuner"]
    return table[table["strategy"] == claim.subject]


def _explored_share(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: a strategy; limit: the most of the space that it may evaluate."""
    rows, space = _search(tables, claim), tables["tuner"]
    n_space = int((space["strategy"] == "exhaustive").sum())
    if rows.empty or not n_space:
        return None
    n_oom = int((rows["status"] == "oom").sum())
    text = f"{len(rows)} of {n_space} points, {n_oom} beyond the budget"
    return Finding(text, len(rows) <= claim.limit * n_space)


def _found_share(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: a strategy; limit: the share of the best throughput that it should find."""
    rows, space = _search(tables, claim), tables["tuner"]
    if rows.empty:
        return None
    rates = "throughput_samples_per_s"
    share = float(number(rows, rates).max() / number(space, rates).max())
    return Finding(f"{100 * share:.1f} % of the best point", None, _TIMED_ON_CPU)


def _budget_is_monotone(tables: Tables, claim: Claim) -> Finding | None:
    """Check that what exceeds the budget does so with a larger batch or a smaller share, too."""
    rows = tables["tuner"][tables["tuner"]["strategy"] == "exhaustive"]
    if rows.empty:
        return None
    n_full, wrong = int((rows["status"] == "oom").sum()), memory_exceptions(rows)
    return Finding(f"{wrong} exceptions, {n_full} of {len(rows)} points exceed it", wrong == 0)


MEASURED_CHECKS: tuple[Check, ...] = (
    *(_lines_at_most, _same_results, _memory_falls, _faster_kernels),
    *(_explored_share, _found_share, _budget_is_monotone),
)
