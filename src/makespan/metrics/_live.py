"""Means over live runs."""

import pandas as pd

from makespan.tables import LIVE_SUMMARY

__all__ = ["live_summary"]

_ALL = "all"


def live_summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Summarise runs of schema `LIVE`: one row of schema `LIVE_SUMMARY` a policy, and one over all.

    Sizes of differences are averaged, not differences, so that those of both signs do not cancel.
    """
    groups = [*runs.groupby("policy", sort=False), (_ALL, runs)]
    return LIVE_SUMMARY.validate(
        pd.DataFrame([_summary_row(str(name), group) for name, group in groups]), where="live runs"
    )


def _summary_row(policy: str, runs: pd.DataFrame) -> dict[str, object]:
    row: dict[str, object] = {"policy": policy, "runs": len(runs)}
    for what in ("jct", "undisturbed_jct", "retrodiction_jct", "makespan"):
        sizes = runs[f"{what}_difference_pct"].abs()
        row |= {f"mean_{what}_difference_pct": sizes.mean(), f"worst_{what}_difference_pct": sizes.max()}
    live_s = runs["live_avg_jct_s"]
    is_within = live_s.between(runs["predicted_low_avg_jct_s"], runs["predicted_high_avg_jct_s"])
    return row | {
        "bias_jct_difference_pct": runs["jct_difference_pct"].mean(),
        "mean_profile_drift_pct": runs["profile_drift_pct"].abs().mean(),
        "restart_delay_s": runs["restart_delay_s"].mean(),
        "live_restart_delay_s": runs["live_restart_delay_s"].mean(),
        "all_predicted_before": bool((runs["predicted_at"] < runs["began_at"]).all()),
        "interval_runs": int(is_within.sum()),
    }
