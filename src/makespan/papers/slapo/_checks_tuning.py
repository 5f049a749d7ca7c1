"""Checks of searches."""

import numpy as np
import pandas as pd

from makespan.claims import Check, Claim, Finding, Tables, number

__all__ = ["TUNING_CHECKS", "memory_exceptions"]


def _of(table: pd.DataFrame, oracle: str, strategy: str) -> pd.DataFrame:
    return table[(table["oracle"] == oracle) & (table["strategy"] == strategy)]


def _feasible(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: the oracle; limit: points that fit."""
    rows = _of(tables["fig10_searches"], claim.subject, "exhaustive")
    if rows.empty:
        return None
    n_space, n_oom = (int(rows[name].iloc[0]) for name in ("space", "explored_oom"))
    return Finding(f"{n_space - n_oom} of {n_space}", n_space - n_oom == claim.limit)


def _optimum(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: oracle, strategy, batch size, share; limit: most evaluations."""
    oracle, strategy, batch, ratio = claim.subject.split()
    rows = _of(tables["fig10_searches"], oracle, strategy)
    if rows.empty:
        return None
    row = rows.iloc[0]
    is_found = (row["best_global_batch_size"], row["best_ckpt_ratio"]) == (int(batch), float(ratio))
    text = (
        f"{row['best_samples_per_s']:.1f} samples/s at {row['best_global_batch_size']} and "
        f"{row['best_ckpt_ratio']:g}, {row['explored']} of {row['space']} points, "
        f"{row['explored_oom']} out of memory"
    )
    return Finding(text, bool(is_found and row["explored"] <= claim.limit))


def _starts(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: oracle and strategy; limit: least share of seeds that reach the optimum."""
    rows = _of(tables["fig10_searches"], *claim.subject.split())
    if rows.empty:
        return None
    ratios = number(rows, "optimum_ratio")
    share = float((ratios >= 1).mean())
    text = (
        f"{int((ratios >= 1).sum())} of {len(rows)}, the worst at {100 * ratios.min():.1f} %, "
        f"{number(rows, 'explored').mean():.0f} points on average"
    )
    return Finding(text, share >= claim.limit)


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


TUNING_CHECKS: tuple[Check, ...] = (
    *(_feasible, _optimum, _starts, _recomputation_costs, _batches_gain, _memory_is_monotone),
)
