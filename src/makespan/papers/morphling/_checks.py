"""The ledger of the paper: how each statement is checked against result tables."""

import itertools
import math
from collections.abc import Mapping

import pandas as pd

from makespan.claims import Check, Claim, Finding, Ledger, Tables, number
from makespan.papers.morphling._fig7 import MORPHLING
from makespan.papers.morphling._fig9 import OTHER_SEED, SWITCHING
from makespan.papers.morphling._tables import PUBLISHED, SCHEMAS, TABLE4
from makespan.tables import LIVE, SENSITIVITY, SENSITIVITY_FAMILIES

__all__ = ["LEDGER"]

_NON_CLAIRVOYANT, _CLAIRVOYANT = "morphling-lookahead", "morphling-work"
_RIVALS = ("sia", "synergy", "antman")
_CLAIRVOYANT_RIVALS = ("sjf", "srtf")
_PARAMETERS = {"load": "load_factor", "large_models": "large_share"}


def _worst_family_error(tables: Tables, claim: Claim) -> Finding | None:
    table = tables["table2"]
    own = table[(table["model"] == claim.subject) & (table["form"] == claim.options["form"])]
    judged = own.assign(error=number(own, "avg_error_pct")).dropna(subset=["error"])
    if judged.empty:
        return None
    worst = judged.iloc[int(judged["error"].argmax())]
    unmeasured = sorted(set(own["plan_family"]) - set(judged["plan_family"]))
    note = f"no held-out rows: {', '.join(unmeasured)}" if unmeasured else ""
    text = f"worst {worst['error']:.3f} % ({worst['plan_family']}, {len(judged)} families)"
    return Finding(text, bool(worst["error"] <= claim.limit), note)


def _best_family_changes(tables: Tables, claim: Claim) -> Finding | None:
    curves, families = tables["sensitivity"], tables["sensitivity_families"]
    used = curves[number(curves, "throughput_samples_per_s") > 0]
    names = families.set_index(["model", "plan"])["plan_family"].to_dict()
    pairs = zip(used["model"], used["best_plan"], strict=True)
    found = pd.DataFrame({"model": model, "family": names.get((model, plan), plan)} for model, plan in pairs)
    if found.empty:
        return None
    counts = found.groupby("model")["family"].nunique()
    changing = int((counts > 1).sum())
    return Finding(f"{changing} of {len(counts)} models", changing >= claim.limit * len(counts))


def _throughputs(tables: Tables) -> dict[str, dict[str, float]]:
    """Throughput [samples/s] by strategy and stage, both in order."""
    values: dict[str, dict[str, float]] = {}
    columns = (tables["fig7"][name] for name in ("strategy", "stage"))
    numbers = number(tables["fig7"], "throughput_samples_per_s")
    for strategy, stage, value in zip(*columns, numbers, strict=True):
        values.setdefault(str(strategy), {})[str(stage)] = float(value)
    return values


def _fig7_never_slower(tables: Tables, claim: Claim) -> Finding | None:
    values = _throughputs(tables)
    own = values.pop(MORPHLING)
    best = {stage: max(other[stage] for other in values.values()) for stage in own}
    slower = [stage for stage in own if own[stage] < best[stage]]
    note = ", ".join(f"{stage}: {own[stage] / best[stage]:.3f} of the best" for stage in slower)
    return Finding(f"{len(own) - len(slower)} of {len(own)} stages", not slower, note)


def _fig7_always_runs(tables: Tables, claim: Claim) -> Finding | None:
    own = _throughputs(tables)[MORPHLING]
    running = [stage for stage, value in own.items() if value > 0]
    return Finding(f"{len(running)} of {len(own)} stages", len(running) == len(own))


def _fig7_plan_changes(tables: Tables, claim: Claim) -> Finding | None:
    own = tables["fig7"][tables["fig7"]["strategy"] == MORPHLING]
    changes = sum(first != second for first, second in itertools.pairwise(own["plan"]))
    names = " -> ".join(plan or "none" for plan in own["plan"])
    return Finding(f"{changes} changes", changes >= claim.limit, names)


def _fig7_cpu_speedup(tables: Tables, claim: Claim) -> Finding | None:
    table = tables["fig7"]
    own = table[(table["strategy"] == MORPHLING) & (number(table, "gpus") == 1)]
    ordered = own.assign(threads=number(own, "cpu_threads")).sort_values("threads")
    values = number(ordered, "throughput_samples_per_s").tolist()
    if len(values) != 2 or values[0] <= 0:
        return None
    ratio = values[1] / values[0]
    return Finding(f"{ratio:.2f}x", ratio >= claim.limit)


def _fig7_equals_published(tables: Tables, claim: Claim) -> Finding | None:
    table = tables["fig7"]
    return _equal_cells(number(table, "iter_time_s"), number(table, "published_iter_time_s"), 0.0)


def _equal_cells(found: pd.Series, wanted: pd.Series, tolerance: float) -> Finding:
    cells = wanted.notna()
    equal = (found[cells] - wanted[cells]).abs() <= tolerance
    return Finding(f"{int(equal.sum())} of {int(cells.sum())} cells", bool(equal.all() and cells.any()))


def _fig8_more_gpus(tables: Tables, claim: Claim) -> Finding | None:
    more, fewer = claim.subject.split("/")
    table = tables["fig8"]
    own = table[table["scheduler"] == MORPHLING].set_index("job")["gpus"].astype(int)
    if more not in own.index or fewer not in own.index:
        return None
    return Finding(f"{own[more]} and {own[fewer]}", bool(own[more] > own[fewer]))


def _fig8_gain(tables: Tables, claim: Claim) -> Finding | None:
    table = tables["fig8"]
    totals = table.assign(value=number(table, claim.subject)).groupby("scheduler")["value"]
    sums = totals.sum(min_count=int(totals.size().max()))
    own, simple = float(sums[MORPHLING]), float(sums["Simple"])
    if math.isnan(own) or math.isnan(simple):
        return None
    return Finding(f"{own / simple:.2f}x ({own:.2f} against {simple:.2f})", own >= claim.limit * simple)


def _fig8_equals_published(tables: Tables, claim: Claim) -> Finding | None:
    table = tables["fig8"]
    return _equal_cells(number(table, "speedup"), number(table, "published_speedup"), claim.limit)


def _fig9_reconfiguration(tables: Tables, claim: Claim) -> Finding | None:
    table = tables["fig9"]
    differences = table.assign(value=number(table, "abs_difference")).groupby("run", sort=False)["value"]
    if not {SWITCHING, OTHER_SEED} <= set(differences.groups):
        return None
    other = float(differences.mean()[OTHER_SEED])
    largest = differences.max().drop(OTHER_SEED)
    worst, plans = float(largest.max()), len(largest) - 1
    note = f"{plans} plans and a run that switches; largest in run {largest.idxmax()!r}"
    return Finding(f"{worst:.2g}, other seed {other:.2g}", worst < claim.limit * other, note)


def _live_fidelity(tables: Tables, claim: Claim) -> Finding | None:
    table = tables["live"]
    differences = number(table, claim.subject).abs()
    if differences.empty:
        return None
    late = int((table["predicted_at"] >= table["began_at"]).sum())
    afterwards = number(table, "retrodiction_jct_difference_pct").abs()
    note = (
        f"{len(table)} runs under {', '.join(dict.fromkeys(table['policy']))}; "
        f"worst {differences.max():.1f} %; by the profiles before and after {afterwards.mean():.1f} %"
    )
    if late:
        note = f"{late} prediction(s) not written before the first job; {note}"
    holds = bool(differences.mean() <= claim.limit) and not late
    return Finding(f"{differences.mean():.1f} %", holds, note)


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
    note = f"most {_named(most)}, least {ratios[least]:.2f}x {_named(least)}"
    return Finding(found, shorter == len(ratios), note)


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
    rivals = [name for name in policies if not name.startswith("morphling")]
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


_CHECKS: tuple[Check, ...] = (
    *(_worst_family_error, _best_family_changes, _live_fidelity),
    *(_fig7_never_slower, _fig7_always_runs, _fig7_plan_changes, _fig7_cpu_speedup, _fig7_equals_published),
    *(_fig8_more_gpus, _fig8_gain, _fig8_equals_published, _fig9_reconfiguration),
    *(_beats_rivals, _guarantees, _identical, _leads, _undercuts_released),
)

LEDGER = Ledger(
    paper="Morphling",
    package="makespan.papers.morphling",
    checks={check.__name__.removeprefix("_"): check for check in _CHECKS},
    tables={schema.name: schema for schema in (*SCHEMAS, SENSITIVITY, SENSITIVITY_FAMILIES, LIVE)}
    | {"getting_started": TABLE4, "table4_published": PUBLISHED["table4"]},
)
"""What the paper states; checks know the form of the performance model as the option ``form``."""
