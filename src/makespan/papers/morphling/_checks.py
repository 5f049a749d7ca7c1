"""The ledger of the paper: how each statement is checked against result tables."""

import itertools
import math

import pandas as pd

from makespan.claims import Check, Claim, Finding, Ledger, Tables, number
from makespan.papers.morphling._cluster_checks import CLUSTER_CHECKS
from makespan.papers.morphling._fig9 import OTHER_SEED, SWITCHING
from makespan.papers.morphling._names import MORPHLING
from makespan.papers.morphling._published import PUBLISHED
from makespan.papers.morphling._tables import FIG7, FIG8, FIG9, LARGE_MODELS, LOAD, PERTURBED, TABLE2, TABLE4
from makespan.tables import LIVE, SENSITIVITY, SENSITIVITY_FAMILIES

__all__ = ["LEDGER"]


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
    names = dict(
        zip(zip(families["model"], families["plan"], strict=True), families["plan_family"], strict=True)
    )
    pairs = zip(used["model"], used["best_plan"], strict=True)
    found = pd.DataFrame({"model": model, "family": names.get((model, plan), plan)} for model, plan in pairs)
    if found.empty:
        return None
    counts = found.groupby("model")["family"].nunique()
    changing = int((counts > 1).sum())
    return Finding(f"{changing} of {len(counts)} models", changing >= claim.limit * len(counts))


def _throughputs(tables: Tables) -> dict[str, dict[str, float]]:
    """Throughput [samples/s] by strategy and stage, both in order."""
    table = tables["fig7"]
    values: dict[str, dict[str, float]] = {}
    numbers = number(table, "throughput_samples_per_s")
    for strategy, stage, value in zip(table["strategy"], table["stage"], numbers, strict=True):
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
    wanted = number(table, "published_iter_time_s")
    cells = wanted.notna()
    equal = number(table, "iter_time_s")[cells] == wanted[cells]
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
    text = f"{own / simple:.2f}x ({own:.2f} against {simple:.2f})"
    return Finding(text, own >= claim.limit * simple)


def _fig8_equals_published(tables: Tables, claim: Claim) -> Finding | None:
    table = tables["fig8"]
    wanted = number(table, "published_speedup")
    cells = wanted.notna()
    equal = (number(table, "speedup")[cells] - wanted[cells]).abs() <= claim.limit
    return Finding(f"{int(equal.sum())} of {int(cells.sum())} cells", bool(equal.all() and cells.any()))


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
    note = f"{int(number(table, 'jobs').iloc[0])} jobs under {', '.join(table['policy'])}"
    return Finding(f"{differences.mean():.1f} %", bool(differences.mean() <= claim.limit), note)


_CHECKS: dict[str, Check] = {
    "worst_family_error": _worst_family_error,
    "best_family_changes": _best_family_changes,
    "fig7_never_slower": _fig7_never_slower,
    "fig7_always_runs": _fig7_always_runs,
    "fig7_plan_changes": _fig7_plan_changes,
    "fig7_cpu_speedup": _fig7_cpu_speedup,
    "fig7_equals_published": _fig7_equals_published,
    "fig8_more_gpus": _fig8_more_gpus,
    "fig8_gain": _fig8_gain,
    "fig8_equals_published": _fig8_equals_published,
    "fig9_reconfiguration": _fig9_reconfiguration,
    "live_fidelity": _live_fidelity,
    **CLUSTER_CHECKS,
}

LEDGER = Ledger(
    paper="Morphling",
    package="makespan.papers.morphling",
    checks=_CHECKS,
    tables={
        schema.name: schema
        for schema in (
            TABLE2,
            SENSITIVITY,
            SENSITIVITY_FAMILIES,
            FIG7,
            FIG8,
            TABLE4,
            PERTURBED,
            LOAD,
            LARGE_MODELS,
            FIG9,
            LIVE,
        )
    }
    | {"getting_started": TABLE4, "table4_published": PUBLISHED["table4"]},
)
"""What the paper states; checks know the form of the performance model as the option ``form``."""
