"""How statements about the cluster simulation are checked against its tables."""

from collections.abc import Mapping

import pandas as pd

from makespan.claims import Check, Claim, Finding, Tables, number

__all__ = ["CLUSTER_CHECKS"]

_NON_CLAIRVOYANT, _CLAIRVOYANT = "morphling", "morphling-work"
_RIVALS = ("sia", "synergy", "antman")
_CLAIRVOYANT_RIVALS = ("sjf", "srtf")
_PARAMETERS = {"load": "load_factor", "large_models": "large_share"}


def _cells(table: pd.DataFrame, column: str) -> dict[tuple[str, float, str], float]:
    """Return a column by trace, restart delay and policy."""
    keys = zip(table["trace"], number(table, "restart_delay_s"), table["policy"], strict=True)
    return dict(zip(keys, number(table, column), strict=True))


def _beats_rivals(tables: Tables, claim: Claim) -> Finding | None:
    cells = _cells(tables["table4"], claim.subject)
    ratios = {
        (trace, delay_s, policy): value / cells[trace, delay_s, _NON_CLAIRVOYANT]
        for (trace, delay_s, policy), value in cells.items()
        if policy in _RIVALS and (trace, delay_s, _NON_CLAIRVOYANT) in cells
    }
    if not ratios:
        return None
    shorter = sum(ratio > 1 for ratio in ratios.values())
    least, most = (pick(ratios, key=lambda key: ratios[key]) for pick in (min, max))
    found = f"up to {ratios[most]:.2f}x, {shorter} of {len(ratios)} comparisons"
    return Finding(
        found, shorter == len(ratios), f"most {_named(most)}, least {ratios[least]:.2f}x {_named(least)}"
    )


def _named(key: tuple[str, float, str]) -> str:
    trace, delay_s, policy = key
    return f"{policy} on {trace} at {delay_s:g} s"


def _guarantees(tables: Tables, claim: Claim) -> Finding | None:
    kept: list[float] = []
    for name in ("table4", "perturbed"):
        rows = tables[name][tables[name]["policy"].isin((_NON_CLAIRVOYANT, _CLAIRVOYANT))]
        kept += number(rows, "sla_attainment").dropna().tolist()
    if not kept:
        return None
    return Finding(f"{100 * min(kept):.1f} % at least, {len(kept)} cells", min(kept) >= claim.limit)


def _identical(tables: Tables, claim: Claim) -> Finding | None:
    table = tables["table4"]
    repeats, same = number(table, "n_repeats"), number(table, "n_identical")
    if not repeats.sum():
        return None
    return Finding(f"{int(same.sum())} of {int(repeats.sum())} repetitions", bool((same == repeats).all()))


def _leads(tables: Tables, claim: Claim) -> Finding | None:
    parameter = _PARAMETERS[claim.subject]
    rows = tables[claim.subject]
    means = number(rows, "avg_jct_s").groupby([number(rows, parameter), rows["policy"]]).mean()
    behind: dict[float, str] = {}
    values = sorted({float(str(value)) for value, _ in means.index})
    n_compared = 0
    for value in values:
        of_value = {str(name): float(mean) for name, mean in means.xs(value, level=0).items()}
        for rival, own in _pairs(of_value):
            n_compared += 1
            if of_value[own] >= of_value[rival]:
                behind.setdefault(value, f"{rival} is ahead of {own} at {value:g}")
    if not n_compared:
        return None
    found = f"{len(values) - len(behind)} of {len(values)} points"
    return Finding(found, not behind, ", ".join(behind.values()))


def _pairs(policies: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return each rival with the variant that knows no more than it."""
    rivals = [name for name in policies if not name.startswith(_NON_CLAIRVOYANT)]
    paired = [(name, _CLAIRVOYANT if name in _CLAIRVOYANT_RIVALS else _NON_CLAIRVOYANT) for name in rivals]
    return [(rival, own) for rival, own in paired if own in policies]


def _undercuts_released(tables: Tables, claim: Claim) -> Finding | None:
    cells = tables["table4_published"]
    printed = cells[(cells["trace"] == claim.subject) & (cells["reading"] == "printed")]
    own = tables["getting_started" if claim.subject == "naive" else "table4"]
    if printed.empty:
        return None
    delay_s, interval_s = (float(printed[name].iloc[0]) for name in ("restart_delay_s", "interval_s"))
    rows = own[
        (own["trace"] == claim.subject)
        & (own["policy"] == _CLAIRVOYANT)
        & (number(own, "restart_delay_s") == delay_s)
        & (number(own, "interval_s") == interval_s)
    ]
    if rows.empty:
        return None
    jct_s, makespan_s = (float(number(rows, name).iloc[0]) for name in ("avg_jct_s", "makespan_s"))
    limit_s = float(printed["published_avg_jct_s"].iloc[0])
    return Finding(f"{jct_s:.1f} s and {makespan_s / 1000:.1f} ks", jct_s <= limit_s)


CLUSTER_CHECKS: dict[str, Check] = {
    "beats_rivals": _beats_rivals,
    "guarantees": _guarantees,
    "identical": _identical,
    "leads": _leads,
    "undercuts_released": _undercuts_released,
}
