"""The ledger of the paper: how each statement is checked against result tables.

The subject of a statement names policies, in the order that it states, shortest first.
"""

import itertools
from collections.abc import Mapping

import pandas as pd

from makespan.claims import Check, Claim, Finding, Ledger, Tables, number
from makespan.papers.easyscale._checks_accuracy import ACCURACY_CHECKS
from makespan.papers.easyscale._checks_overheads import CHECKS as OF_OVERHEADS
from makespan.papers.easyscale._tables import FIG14, FIG15, PUBLISHED, SENSITIVITY, SERVING
from makespan.papers.easyscale._tables_accuracy import FIG9, GAP, GAP_CURVES, GAP_SPREAD
from makespan.papers.easyscale._tables_overheads import OVERHEADS

__all__ = ["LEDGER"]

_JCT, _MAKESPAN = "avg_jct_s", "makespan_from_zero_s"
_BUSY_S = (720.0, 5400.0)  # the window over which the paper's allocation is averaged
_COMPARED_UNTIL_S = 5460.0


def _of_policies(table: pd.DataFrame, column: str, policies: list[str]) -> dict[str, float] | None:
    """Return a column by policy, in the order of the names, or None if one is missing."""
    values = dict(zip(table["policy"], number(table, column), strict=True))
    return {name: float(values[name]) for name in policies} if set(policies) <= set(values) else None


def _is_ordered(values: Mapping[str, float], *, may_tie: bool) -> bool:
    """Whether values grow; the first two may be equal if ``may_tie``."""
    pairs = list(itertools.pairwise(values.values()))
    first = pairs[0][0] <= pairs[0][1] if may_tie else pairs[0][0] < pairs[0][1]
    return first and all(one < other for one, other in pairs[1:])


def _shorter(tables: Tables, claim: Claim, column: str, *, may_tie: bool) -> Finding | None:
    values = _of_policies(tables["fig14"], column, claim.subject.split())
    if values is None:
        return None
    return Finding(
        " and ".join(f"{value:.0f}" for value in values.values()) + " s", _is_ordered(values, may_tie=may_tie)
    )


def _jct_order(tables: Tables, claim: Claim) -> Finding | None:
    return _shorter(tables, claim, _JCT, may_tie=False)


def _makespan_order(tables: Tables, claim: Claim) -> Finding | None:
    return _shorter(tables, claim, _MAKESPAN, may_tie=True)


def _jct_gain(tables: Tables, claim: Claim) -> Finding | None:
    values = _of_policies(tables["fig14"], _JCT, claim.subject.split())
    if values is None:
        return None
    own, other = values.values()
    return Finding(f"{other / own:.2f}x", other / own >= claim.limit)


def _held(tables: Tables, policies: list[str], low_s: float, high_s: float) -> list[pd.Series] | None:
    """Return the GPUs that policies hold in each round of a window [s]; 0 after their last job."""
    table = tables["fig15"]
    times = number(table, "time_s")
    rows = table[(times >= low_s) & (times <= high_s)]
    wide = rows.assign(gpus=number(rows, "gpus")).pivot_table(
        index="time_s", columns="policy", values="gpus", fill_value=0
    )
    return [wide[name] for name in policies] if set(policies) <= set(wide.columns) else None


def _largest_allocation(tables: Tables, claim: Claim) -> Finding | None:
    held = _held(tables, [claim.subject], 0.0, float("inf"))
    return None if held is None else Finding(f"{held[0].max():.0f} GPUs", bool(held[0].max() >= claim.limit))


def _busy_allocation(tables: Tables, claim: Claim) -> Finding | None:
    held = _held(tables, claim.subject.split(), *_BUSY_S)
    if held is None:
        return None
    own, other = (float(series.mean()) for series in held)
    return Finding(f"{own:.1f} and {other:.1f} GPUs", own >= claim.limit * other)


def _rounds_with_more(tables: Tables, claim: Claim) -> Finding | None:
    held = _held(tables, claim.subject.split(), 0.0, _COMPARED_UNTIL_S)
    if held is None:
        return None
    share = float((held[0] >= held[1]).mean())
    return Finding(f"{100 * share:.0f} % of the rounds", share >= claim.limit)


def _order_in_all_settings(tables: Tables, claim: Claim) -> Finding | None:
    policies, exceptions, n_settings = claim.subject.split(), [], 0
    for key, rows in tables["sensitivity"].groupby(["parameter", "value"], sort=False):
        jct, makespan = (_of_policies(rows, column, policies) for column in (_JCT, _MAKESPAN))
        if jct is None or makespan is None:
            return None
        n_settings += 1
        for what, values, may_tie in (("JCT", jct, False), ("makespan", makespan, True)):
            if not _is_ordered(values, may_tie=may_tie):
                exceptions.append(f"not the {what} with {' '.join(map(str, key)).strip()}")
    found = f"{2 * n_settings - len(exceptions)} of {2 * n_settings} orders"
    return Finding(found, not exceptions and n_settings > 0, ", ".join(exceptions))


def _serving_gain(tables: Tables, claim: Claim) -> Finding | None:
    gains = _of_policies(tables["serving"], "gain_pct", [claim.subject])
    if gains is None:
        return None
    return Finding(f"{gains[claim.subject]:.1f} %", gains[claim.subject] > claim.limit)


def _serving_undisturbed(tables: Tables, claim: Claim) -> Finding | None:
    table = tables["serving"]
    if table.empty:
        return None
    delayed, lost = (int(number(table, name).sum()) for name in ("delayed_rounds", "interruptions"))
    return Finding(f"{delayed} rounds and {lost} interruptions", delayed == lost == 0)


_CHECKS: tuple[Check, ...] = (
    *(_jct_order, _makespan_order, _jct_gain, _order_in_all_settings),
    *(_largest_allocation, _busy_allocation, _rounds_with_more, _serving_gain, _serving_undisturbed),
)

_TRAINED = {"fig9": FIG9, "gap": GAP, "gap_spread": GAP_SPREAD, "gap_curves": GAP_CURVES}
_PRINTED = {f"{name}_published": PUBLISHED[name] for name in OVERHEADS}
_SIMULATED = {"fig14": FIG14, "fig15": FIG15, "sensitivity": SENSITIVITY, "serving": SERVING}

LEDGER = Ledger(
    paper="EasyScale",
    package="makespan.papers.easyscale",
    checks={check.__name__.removeprefix("_"): check for check in (*_CHECKS, *ACCURACY_CHECKS, *OF_OVERHEADS)},
    tables=_TRAINED | OVERHEADS | _PRINTED | _SIMULATED,
)
"""What the paper states of its scheduler, and of training: bits and accuracy, memory and time."""
