"""Checks of templates and plans."""

import math

import pandas as pd

from makespan.claims import Check, Claim, Finding, Tables, number

__all__ = ["PLANNING_CHECKS"]

_LAYER_S = 0.15e-3  # forward and backward pass of a uniform layer
_CLOSE = 1e-9
_PICOSECOND = 1e-12


def _template_count(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: f and n0."""
    f, n0 = map(int, claim.subject.split())
    table = tables["templates"]
    rows = table[(table["f"] == f) & (table["n0"] == n0) & (table["profile"] == "uniform24")]
    sizes = sorted(set(rows["n_nodes"]))
    if not sizes:
        return None
    holds = sizes == list(range(n0, n0 + int(claim.limit)))
    return Finding(f"{len(sizes)}, of {sizes[0]} to {sizes[-1]} nodes", holds)


def _one_stage_a_node(tables: Tables, claim: Claim) -> Finding | None:
    table = tables["templates"]
    equal = number(table, "n_stages") == number(table, "n_nodes")
    return Finding(f"{int(equal.sum())} of {len(table)} templates", bool(equal.all())) if len(table) else None


def _exact_is_best(tables: Tables, claim: Claim) -> Finding | None:
    keys = ["profile", "n_nodes"]
    table = tables["templates"].drop_duplicates([*keys, "mode"])
    times = table.pivot(index=keys, columns="mode", values="iter_time_s")
    if not {"exact", "dc"} <= set(times):
        return None
    both = times.dropna()
    ratio = number(both, "dc") / number(both, "exact")
    n_equal, most = int((ratio <= 1 + _CLOSE).sum()), 100 * (ratio.max() - 1)
    text = f"{n_equal} of {len(ratio)} equal, at most {most:.2g} % off"
    return Finding(text, bool((ratio >= 1 - _CLOSE).all()))


def _uniform_costs(tables: Tables, claim: Claim) -> Finding | None:
    table = tables["templates"]
    rows = table[table["profile"].str.startswith("uniform")].drop_duplicates(["profile", "mode", "n_nodes"])
    if rows.empty:
        return None
    off = []
    for row in rows.to_dict("records"):
        n_layers, n_nodes = int(str(row["profile"]).removeprefix("uniform")), int(row["n_nodes"])
        slowest = math.ceil(n_layers / n_nodes)
        layers = 2 * n_layers + (2 * n_nodes + 1) * slowest if n_nodes > 1 else 4 * n_layers
        off.append(abs(float(row["iter_time_s"]) - layers * _LAYER_S) > _PICOSECOND)
    return Finding(f"{len(off) - sum(off)} of {len(off)} templates", not any(off))


def _imbalance(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: nodes of the templates."""
    nodes = list(map(int, claim.subject.split()))
    table = tables["templates"]
    rows = table[table["profile"].str.startswith("random") & table["n_nodes"].isin(nodes)]
    worst = number(rows[rows["mode"] == "exact"], "imbalance").max()
    return None if rows.empty else Finding(f"at most {worst:.3f}", bool(worst <= claim.limit))


def _search_time(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: layers of the model."""
    table = tables["templates"]
    rows = table[(table["mode"] == "exact") & table["profile"].str.endswith(claim.subject)]
    if rows.empty:
        return None
    longest_s = float(number(rows, "wall_s").max())
    return Finding(f"at most {1000 * longest_s:.0f} ms", longest_s < claim.limit)


def _only_plan(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: nodes, and the counts."""
    nodes, counts = claim.subject.split(" ", 1)
    rows = tables["instantiation"]
    rows = rows[(rows["n_nodes"] == int(nodes)) & (rows["profile"] != "printed")]
    if rows.empty:
        return None
    holds = (rows["n_plans"] == 1) & (rows["counts"] == counts)
    return Finding(f"{int(holds.sum())} of {len(rows)} choices", bool(holds.all()))


def _printed(tables: Tables, mode: str) -> pd.Series | None:
    rows = tables["instantiation"]
    rows = rows[(rows["profile"] == "printed") & (rows["batch_mode"] == mode)]
    return None if rows.empty else rows.iloc[0]


def _printed_plan(tables: Tables, claim: Claim) -> Finding | None:
    row, cells = _printed(tables, "per_template"), tables["instantiation_published"]
    if row is None:
        return None
    counts = " ".join(f"{one['n_pipelines']}x{one['n_nodes']}" for one in cells.to_dict("records"))
    batches = " ".join(
        str(one["microbatches"]) for one in cells.to_dict("records") for _ in range(int(one["n_pipelines"]))
    )
    holds = row["counts"] == counts and row["microbatches"] == batches
    return Finding(f"{row['counts']}, {row['microbatches']}", bool(holds))


def _own_batches(tables: Tables, claim: Claim) -> Finding | None:
    ours, theirs = _printed(tables, "per_pipeline"), _printed(tables, "per_template")
    if ours is None or theirs is None:
        return None
    gain = 1.0 - float(ours["iter_time_s"]) / float(theirs["iter_time_s"])
    return Finding(f"{100 * gain:.1f} % with {ours['counts']}", gain >= claim.limit)


def _gap(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: batch mode and estimator of the choice that ours is compared with."""
    mode, estimator = claim.subject.split()
    rows = tables["instantiation"]
    rows = rows[
        (rows["batch_mode"] == mode) & (rows["estimator"] == estimator) & (rows["profile"] != "printed")
    ]
    gaps = number(rows, "gap_pct")
    if rows.empty:
        return None
    text = f"{gaps.min():.2f} to {gaps.max():.2f} %, mean {gaps.mean():.2f} %"
    return Finding(text, bool(gaps.min() >= claim.limit))


def _same_plan(tables: Tables, claim: Claim) -> Finding | None:
    keys = ["profile", "n_nodes", "global_microbatches", "counts"]
    rows = tables["instantiation"]
    rows = rows[rows["profile"] != "printed"]
    ours = rows[(rows["batch_mode"] == "per_pipeline") & (rows["estimator"] == "1f1b")]
    theirs = rows[rows["batch_mode"] == "per_template"]
    both = ours.merge(theirs, on=keys, suffixes=("", "_template"))
    if both.empty:
        return None
    slower = number(both, "iter_time_s") > number(both, "iter_time_s_template") * (1 + _CLOSE)
    return Finding(f"{len(both) - int(slower.sum())} of {len(both)} pairs", not slower.any())


def _by_program(tables: Tables, claim: Claim) -> Finding | None:
    rows = tables["instantiation"]
    rows = rows[number(rows, "program_time_s").notna()]
    if rows.empty:
        return None
    off = (number(rows, "estimated_time_s") / number(rows, "program_time_s") - 1.0).abs()
    return Finding(f"{int((off <= _CLOSE).sum())} of {len(rows)} plans", bool((off <= _CLOSE).all()))


def _estimate(tables: Tables, claim: Claim) -> Finding | None:
    rows = tables["instantiation"]
    rows = rows[rows["estimator"] == "1f1b"]
    if rows.empty:
        return None
    off = (number(rows, "estimated_time_s") / number(rows, "iter_time_s") - 1.0).abs()
    return Finding(f"at most {100 * off.max():.2f} %", bool(off.max() <= claim.limit))


def _guarantee(tables: Tables, claim: Claim) -> Finding | None:
    table = tables["studies"]
    rows = table[table["study"] == "guarantee"].pivot(index="case", columns="quantity", values="value")
    if rows.empty:
        return None
    equal = number(rows, "least_templates") == number(rows, "formula_templates")
    return Finding(f"{int(equal.sum())} of {len(rows)} pairs of n0 and f", bool(equal.all()))


PLANNING_CHECKS: tuple[Check, ...] = (
    *(_template_count, _one_stage_a_node, _exact_is_best, _uniform_costs, _imbalance, _search_time),
    *(_only_plan, _printed_plan, _own_batches, _gap, _same_plan, _by_program, _estimate, _guarantee),
)
