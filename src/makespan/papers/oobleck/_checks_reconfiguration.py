"""Checks of statements about pipelines after losses."""

import pandas as pd

from makespan.claims import Check, Claim, Finding, Tables
from makespan.papers.oobleck._bursts import burst_table
from makespan.papers.oobleck._losses import ENDS

__all__ = ["RECONFIGURATION_CHECKS"]

_BEYOND = "beyond"


def _losses(tables: Tables, claim: Claim) -> pd.DataFrame | None:
    """Return losses of up to f nodes, or beyond, with n0, f and the number of nodes and of lost ones."""
    table = tables["reconfiguration"]
    numbers = table["case"].str.extract(r"^n0=(\d+) f=(\d+) N=(\d+)").astype(float)
    rows = table.assign(n0=numbers[0], f=numbers[1], nodes=numbers[2])[numbers[0].notna()]
    is_beyond = rows["case"].str.endswith(_BEYOND)
    rows = rows[is_beyond if claim.subject == _BEYOND else ~is_beyond]
    if rows.empty:
        return None
    left = rows["nodes"] - rows["lost_nodes"].str.count(" ") - 1
    return rows.assign(left=left, is_enough=left >= (rows["f"] + 1) * rows["n0"])


def _sizes(counts: str) -> list[int]:
    """Return the nodes of each pipeline of counts such as ``2x3 1x4``."""
    pairs = [one.split("x") for one in counts.split()]
    return [int(size) for times, size in pairs for _ in range(int(times))]


def _worked_cases(tables: Tables, claim: Claim) -> Finding | None:
    table = tables["reconfiguration"]
    rows = table[table["case"].str.startswith("worked")]
    expected = claim.subject.split()
    if len(rows) != len(expected):
        return None
    return Finding(", ".join(rows["action"]), rows["action"].tolist() == expected)


def _state_kept(tables: Tables, claim: Claim) -> Finding | None:
    rows = _losses(tables, claim)
    if rows is None:
        return None
    n_lost = int((rows["action"] == "state-lost").sum())
    return Finding(f"{n_lost} of {len(rows)} losses", n_lost == 0)


def _no_idle_node(tables: Tables, claim: Claim) -> Finding | None:
    rows = _losses(tables, claim)
    if rows is None:
        return None
    going = rows[~rows["action"].isin(ENDS)]
    n_idle = int((going["counts_after"].map(lambda text: sum(_sizes(text))) != going["left"]).sum())
    return Finding(f"{n_idle} of {len(going)} losses leave idle nodes", n_idle == 0)


def _enough_pipelines(tables: Tables, claim: Claim) -> Finding | None:
    rows = _losses(tables, claim)
    if rows is None:
        return None
    going = rows[~rows["action"].isin(ENDS)]
    n_pipelines = going["counts_after"].map(lambda text: len(_sizes(text)))
    n_few = int((n_pipelines <= going["f"]).sum())
    return Finding(f"{n_few} of {len(going)} losses leave fewer than f + 1", n_few == 0)


def _ends_where_it_must(tables: Tables, claim: Claim) -> Finding | None:
    rows = _losses(tables, claim)
    if rows is None:
        return None
    ended = rows["action"] == "insufficient-nodes"
    n_wrong = int((ended & rows["is_enough"]).sum() + (~rows["is_enough"] & ~rows["action"].isin(ENDS)).sum())
    return Finding(f"{int(ended.sum())} of {len(rows)} losses leave too few", n_wrong == 0)


def _below_grows(tables: Tables, claim: Claim) -> Finding | None:
    table = burst_table(tables["studies"])
    if table.empty:
        return None
    below = table.pivot_table(index=["nodes", "shape"], columns="f", values="below_share")
    last = below.iloc[:, -1]
    text = f"{last.min():.2f} to {last.max():.2f} at f = {below.columns[-1]}"
    return Finding(text, bool((below.diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)))


def _spread_keeps_more(tables: Tables, claim: Claim) -> Finding | None:
    table = burst_table(tables["studies"])
    if table.empty:
        return None
    lost = table.pivot_table(index=["f", "nodes"], columns="shape", values="state_lost_share")
    gain = lost["rack"] - lost["rack, spread"]
    text = f"{lost['rack, spread'].max():.2f} of bursts at most, {lost['rack'].max():.2f} otherwise"
    return Finding(text, bool((gain >= 0).all() and (gain > 0).any()))


def _singles_keep_state(tables: Tables, claim: Claim) -> Finding | None:
    table = burst_table(tables["studies"])
    singles = table[table["nodes"] == 1] if len(table) else table
    if singles.empty:
        return None
    worst = float(singles["state_lost_share"].max())
    return Finding(f"{worst:.2f} of losses", worst == 0)


RECONFIGURATION_CHECKS: tuple[Check, ...] = (
    _worked_cases,
    _state_kept,
    _no_idle_node,
    _enough_pipelines,
    _ends_where_it_must,
    _below_grows,
    _spread_keeps_more,
    _singles_keep_state,
)
