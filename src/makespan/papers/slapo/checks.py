"""Checks that decide statements of the Slapo paper where no comparison of a table can.

Each reads the table that its row of ``claims.csv`` names. The speed of CPU cores decides no statement: checks
of measured times report them, and leave the verdict open.
"""

import numpy as np
import pandas as pd

from makespan.claims import Claim, Finding, Tables, number
from makespan.papers.slapo.throughput import CONCLUSIONS, Inequalities

_RATE = "throughput_samples_per_s"
_MIB = float(1 << 20)
_TIMED_ON_CPU = "times of CPU cores decide nothing"

# ------------------------------------------------------------------------------------------------
# Searches of the tuning grid: the premises of the search along the border of memory.


def _all_points(tables: Tables, claim: Claim) -> pd.DataFrame:
    """Return the rows of the exhaustive search of the oracle that is the subject."""
    table = tables[claim.table]
    return table[(table["oracle"] == claim.subject) & (table["strategy"] == "exhaustive")]


def _recomputation_costs(tables: Tables, claim: Claim) -> Finding | None:
    """Check that a larger recomputed share is never faster for any batch size. Subject: the oracle."""
    rows = _all_points(tables, claim)
    if rows.empty:
        return None
    fits = rows[rows["status"] == "ok"].sort_values("ckpt_ratio")
    steps = number(fits, _RATE).groupby(fits["global_batch_size"]).diff().dropna()
    return Finding(f"{int((steps <= 0).sum())} of {len(steps)} steps", bool((steps <= 0).all()))


def _batches_gain(tables: Tables, claim: Claim) -> Finding | None:
    """Compare the throughput of each batch size with that of the next larger one.

    Subject: the oracle; limit: least ratio of the larger batch to the smaller one.
    """
    rows = _all_points(tables, claim)
    if rows.empty:
        return None
    fits = rows[rows["status"] == "ok"].sort_values("global_batch_size")
    gains = (1 + number(fits, _RATE).groupby(fits["ckpt_ratio"]).pct_change()).dropna()
    text = f"at least {gains.min():.3f}, more in {int((gains >= 1).sum())} of {len(gains)} steps"
    return Finding(text, bool((gains >= claim.limit).all()))


def _memory_is_monotone(tables: Tables, claim: Claim) -> Finding | None:
    """Check that memory runs out for larger batches and smaller shares too. Subject: the oracle."""
    rows = _all_points(tables, claim)
    if rows.empty:
        return None
    n_exceptions = memory_exceptions(rows)
    return Finding(f"{n_exceptions} exceptions", n_exceptions == 0)


def memory_exceptions(rows: pd.DataFrame) -> int:
    """Count points that fit although a smaller batch, or a larger share of recomputed layers, does not."""
    is_full = (rows["status"] == "oom").astype(int)
    wide = rows.assign(is_full=is_full).pivot_table("is_full", "global_batch_size", "ckpt_ratio")
    full = wide.to_numpy(float)
    return int((np.diff(full, axis=0) < 0).sum() + (np.diff(full, axis=1) > 0).sum())


# ------------------------------------------------------------------------------------------------
# Measurements of schedules on this machine.


def _memory_falls(tables: Tables, claim: Claim) -> Finding | None:
    """Check that each step holds less memory than the one before.

    Subject: steps in order; each counts at its largest number of processes.
    """
    table, steps = tables[claim.table], claim.subject.split()
    largest = table[table["oracle"] == "measured"].sort_values("n_gpus").groupby("step").last()
    if not set(steps) <= set(largest.index):
        return None
    held_bytes = number(largest, "saved_bytes") + number(largest, "parameter_bytes")
    held = held_bytes.loc[steps].to_numpy() / _MIB
    text = ", ".join(f"{name} {value:.1f}" for name, value in zip(steps, held, strict=True)) + " MiB"
    return Finding(text, bool((np.diff(held) < 0).all()))


def _faster_kernels(tables: Tables, claim: Claim) -> Finding | None:
    """Report the speedup of the second step over the first, both in one process. Subject: two steps."""
    rows = tables[claim.table]
    alone = rows[(rows["oracle"] == "measured") & (rows["n_gpus"] == 1)].set_index("step")
    before, after = claim.subject.split()
    if not {before, after} <= set(alone.index):
        return None
    rates = number(alone, _RATE).to_dict()
    return Finding(f"{rates[after] / rates[before]:.2f}x on CPU cores", None, _TIMED_ON_CPU)


def _explored_share(tables: Tables, claim: Claim) -> Finding | None:
    """Count the evaluations of a search. Subject: its strategy; limit: largest share of the space."""
    table = tables[claim.table]
    rows = table[table["strategy"] == claim.subject]
    n_space = int((table["strategy"] == "exhaustive").sum())
    if rows.empty or not n_space:
        return None
    n_oom = int((rows["status"] == "oom").sum())
    text = f"{len(rows)} of {n_space} points, {n_oom} beyond the budget"
    return Finding(text, len(rows) <= claim.limit * n_space)


def _found_share(tables: Tables, claim: Claim) -> Finding | None:
    """Report the best throughput of a search over that of the whole space. Subject: its strategy."""
    table = tables[claim.table]
    rows = table[table["strategy"] == claim.subject]
    if rows.empty:
        return None
    share = float(number(rows, _RATE).max() / number(table, _RATE).max())
    return Finding(f"{100 * share:.1f} % of the best point", None, _TIMED_ON_CPU)


def _budget_is_monotone(tables: Tables, claim: Claim) -> Finding | None:
    """Check that larger batches and smaller shares exceed the budget too."""
    table = tables[claim.table]
    rows = table[table["strategy"] == "exhaustive"]
    if rows.empty:
        return None
    n_full, n_exceptions = int((rows["status"] == "oom").sum()), memory_exceptions(rows)
    return Finding(f"{n_exceptions} exceptions, {n_full} of {len(rows)} points exceed it", n_exceptions == 0)


def _verified(tables: Tables, claim: Claim) -> Finding | None:
    """Check that every schedule was compared with its model, and is equal to it.

    Subject: numbers of processes; limit: least number of families verified on each.
    """
    table = tables[claim.table]
    counts = [int(text) for text in claim.subject.split()]
    rows = table[table["n_processes"].isin(counts)]
    families = {count: set(group["family"]) for count, group in rows.groupby("n_processes")}
    if set(families) != set(counts) or any(len(names) < claim.limit for names in families.values()):
        return None
    n_equal = int(rows["is_equal"].sum())
    text = (
        f"{n_equal} of {len(rows)}, {int(rows['gradients'].sum())} gradients of parameters, "
        f"largest error {max(rows['output_error'].max(), rows['gradient_error'].max()):.1g}"
    )
    is_compared = bool((rows["gradients"] > 0).all() and (rows["outputs"] > 0).all())
    return Finding(text, n_equal == len(rows) and is_compared)


# ------------------------------------------------------------------------------------------------
# Conclusions of Figs 7 to 9 from the hardware model and the emulator.


def _conclusion(tables: Tables, claim: Claim) -> Finding | None:
    """Judge a conclusion. Subject: its name.

    The note names the constants of the hardware model that would turn the verdict if halved or doubled.
    """
    _, decide = CONCLUSIONS[claim.subject]
    rows = tables[claim.table]
    outcome = decide(rows)
    if outcome is None:
        return None
    text, holds = outcome
    if set(rows["oracle"]) - {"published"} != {"model"}:
        return Finding(text, holds)
    varied = tables[Inequalities.name]
    varied = varied[varied["inequality"] == claim.subject]
    unchanged = varied["holds"][varied["constant"] == ""]
    if unchanged.empty:
        return Finding(text, holds)
    turned = varied[varied["holds"] != bool(unchanged.iloc[0])]
    changes = [f"{name} x {by:g}" for name, by in zip(turned["constant"], turned["factor"], strict=True)]
    same = "the same with every unfitted constant halved and doubled"
    return Finding(text, holds, f"otherwise with {', '.join(changes)}" if changes else same)


def _below_limits(tables: Tables, claim: Claim) -> Finding | None:
    """Compare the highest bar of each model with the printed limit of its axis."""
    table = tables[claim.table]
    rows = table[table["kind"] == "published"]
    limits = tables["limits_published"].set_index("model")["published_samples_per_s"].to_dict()
    highest = number(rows, _RATE).groupby(rows["model"]).max().to_dict()
    known = {model: (highest[model], limit) for model, limit in limits.items() if model in highest}
    if not known:
        return None
    text = ", ".join(f"{model} {rate:.1f} of {float(limit):g}" for model, (rate, limit) in known.items())
    return Finding(text, all(rate < float(limit) for rate, limit in known.values()))
