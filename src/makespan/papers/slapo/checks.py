"""Checks of what is counted and measured of schedules; how fast CPU cores are decides nothing."""

import numpy as np
import pandas as pd

from makespan.claims import Claim, Finding, Tables, number
from makespan.papers.slapo.throughput import CONCLUSIONS

# ------------------------------------------------------------------------------------------------
# Checks of searches.


def _of(table: pd.DataFrame, oracle: str, strategy: str) -> pd.DataFrame:
    return table[(table["oracle"] == oracle) & (table["strategy"] == strategy)]


def _recomputation_costs(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: the oracle. Along every batch size a larger share is never faster."""
    rows = _of(tables["fig10"], claim.subject, "exhaustive")
    if rows.empty:
        return None
    fits = rows[rows["status"] == "ok"].sort_values("ckpt_ratio")
    steps = number(fits, "throughput_samples_per_s").groupby(fits["global_batch_size"]).diff().dropna()
    return Finding(f"{int((steps <= 0).sum())} of {len(steps)} steps", bool((steps <= 0).all()))


def _batches_gain(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: the oracle; limit: least ratio of throughput from one batch size to the next larger one."""
    rows = _of(tables["fig10"], claim.subject, "exhaustive")
    if rows.empty:
        return None
    fits = rows[rows["status"] == "ok"].sort_values("global_batch_size")
    rates = number(fits, "throughput_samples_per_s").groupby(fits["ckpt_ratio"])
    gains = (1 + rates.pct_change()).dropna()
    text = f"at least {gains.min():.3f}, more in {int((gains >= 1).sum())} of {len(gains)} steps"
    return Finding(text, bool((gains >= claim.limit).all()))


def _memory_is_monotone(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: the oracle. What runs out of memory does with a larger batch or a smaller share too."""
    rows = _of(tables["fig10"], claim.subject, "exhaustive")
    if rows.empty:
        return None
    wrong = memory_exceptions(rows)
    return Finding(f"{wrong} exceptions", wrong == 0)


def memory_exceptions(rows: pd.DataFrame) -> int:
    """Count points that fit although a smaller batch, or a larger share of recomputed layers, does not."""
    is_full = (rows["status"] == "oom").astype(int)
    wide = rows.assign(is_full=is_full).pivot_table("is_full", "global_batch_size", "ckpt_ratio")
    full = wide.to_numpy(float)
    return int((np.diff(full, axis=0) < 0).sum() + (np.diff(full, axis=1) > 0).sum())


# ------------------------------------------------------------------------------------------------
# Checks of what is counted and measured of schedules; how fast CPU cores are decides nothing.

_MIB = float(1 << 20)
_TIMED_ON_CPU = "times of CPU cores decide nothing"


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


def _search(results: Tables, claim: Claim) -> pd.DataFrame:
    """Return the rows of the strategy that is the subject."""
    table = results["tuner"]
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


# ------------------------------------------------------------------------------------------------
# Checks of what the hardware model and the emulator say of Figs 7 to 10.


def _conclusion(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: the name of a conclusion. The note says on which constants of the model it depends."""
    table, judge = CONCLUSIONS[claim.subject]
    rows = tables[table]
    oracles = set(rows["oracle"]) - {"published"}
    found = judge(rows)
    if found is None:
        return None
    text, holds = found
    return Finding(text, holds, _dependence(tables, claim.subject) if oracles == {"model"} else "")


def _dependence(tables: Tables, conclusion: str) -> str:
    rows = tables["inequalities"]
    rows = rows[rows["inequality"] == conclusion]
    own = rows["holds"][rows["constant"] == ""]
    if own.empty:
        return ""
    others = rows[rows["holds"] != bool(own.iloc[0])]
    changed = [
        f"{name} x {factor:g}" for name, factor in zip(others["constant"], others["factor"], strict=True)
    ]
    if not changed:
        return "the same with every unfitted constant halved and doubled"
    return f"otherwise with {', '.join(changed)}"


def _below_limits(tables: Tables, claim: Claim) -> Finding | None:
    """Compare every bar with the printed limit of its axis."""
    rows = tables["fig7"][tables["fig7"]["kind"] == "published"]
    limits = tables["limits_published"].set_index("model")["published_samples_per_s"].to_dict()
    highest = number(rows, "throughput_samples_per_s").groupby(rows["model"]).max().to_dict()
    known = {model: (highest[model], limit) for model, limit in limits.items() if model in highest}
    if not known:
        return None
    text = ", ".join(f"{model} {rate:.1f} of {float(limit):g}" for model, (rate, limit) in known.items())
    return Finding(text, all(rate < float(limit) for rate, limit in known.values()))


# ------------------------------------------------------------------------------------------------
# Checks of what is verified.


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
