"""Checks of the studies of steady losses."""

import pandas as pd

from makespan.claims import Check, Claim, Finding, Tables, number

__all__ = ["INTERVAL_CHECKS"]


def _wide(tables: Tables, study: str) -> pd.DataFrame:
    """Return the quantities of a study, one row a case."""
    table = tables["studies"]
    rows = table[table["study"] == study]
    return rows.assign(value=number(rows, "value")).pivot(index="case", columns="quantity", values="value")


def _analytic_near(tables: Tables, claim: Claim) -> Finding | None:
    wide = _wide(tables, "analytic model")
    if wide.empty:
        return None
    off = wide["difference_pct"].abs()
    n_near = int((off <= claim.limit).sum())
    text = f"{n_near} of {len(off)}, at most {off.max():.1f} % off"
    return Finding(text, n_near == len(off), f"furthest: {off.idxmax()}")


def _by_model(tables: Tables) -> pd.DataFrame:
    wide = _wide(tables, "checkpoint intervals")
    return wide.dropna(subset=["best_share"]) if "best_share" in wide else wide.iloc[:0]


def _young_daly_near(tables: Tables, claim: Claim) -> Finding | None:
    wide = _by_model(tables)
    if wide.empty:
        return None
    lost = 1.0 - wide["young_daly_share"] / wide["best_share"]
    pairs = zip(wide["young_daly_steps"], wide["best_steps"], strict=True)
    steps = ", ".join(f"{theirs:.0f} and {best:.0f}" for theirs, best in pairs)
    text = f"{100 * lost.max():.2f} % lost at most"
    return Finding(text, bool((lost <= claim.limit).all()), f"steps, theirs and the best: {steps}")


def _oobleck_keeps_more(tables: Tables, claim: Claim) -> Finding | None:
    wide = _by_model(tables)
    if wide.empty:
        return None
    pairs = zip(wide["oobleck_share"], wide["best_share"], strict=True)
    text = ", ".join(f"{own:.3f} and {theirs:.3f}" for own, theirs in pairs)
    return Finding(text, bool((wide["oobleck_share"] > wide["best_share"]).all()))


INTERVAL_CHECKS: tuple[Check, ...] = (_analytic_near, _young_daly_near, _oobleck_keeps_more)
