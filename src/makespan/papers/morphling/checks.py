"""The ledger of the paper: how each statement is checked against result tables."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from makespan.claims import Claim, Finding, Tables, number
from makespan.numerics import intervals
from makespan.papers.morphling.accuracy import OTHER_SEED, SWITCHING
from makespan.papers.morphling.adaptation import MORPHLING
from makespan.papers.morphling.comparisons import CHOSEN, RECONFIGURING, REQUESTED, paired, threads_worth

_OURS, _AS_IGNORANT = "morphling", "morphling-lookahead"
_LISTS = 10  # that a mean must be of to decide what knowledge is worth
_GPUS = 64  # of the paper's testbed
_LISTS_SETTING = ("trace", "gpus", "restart_delay_s")
_Row = Mapping[str, Any]
_PARAMETERS = {"load": "load_factor", "large_models": "large_share"}


def _worst_family_error(tables: Tables, claim: Claim) -> Finding | None:
    table = tables[claim.table]
    of_model = table[(table["model"] == claim.subject) & (table["form"] == claim.options["form"])]
    judged = of_model.assign(error=number(of_model, "avg_error_pct")).dropna(subset=["error"])
    if judged.empty:
        return None
    worst = judged.iloc[int(judged["error"].argmax())]
    unmeasured = sorted(set(of_model["plan_family"]) - set(judged["plan_family"]))
    note = f"no held-out rows: {', '.join(unmeasured)}" if unmeasured else ""
    text = f"worst {worst['error']:.3f} % ({worst['plan_family']}, {len(judged)} families)"
    return Finding(text, bool(worst["error"] <= claim.limit), note)


def _best_family_changes(tables: Tables, claim: Claim) -> Finding | None:
    curves, families = tables[claim.table], tables[f"{claim.table}_families"]
    used = curves[number(curves, "throughput_samples_per_s") > 0]
    names = families.set_index(["model", "plan"])["plan_family"].to_dict()
    pairs = zip(used["model"], used["best_plan"], strict=True)
    families_used = pd.DataFrame(
        {"model": model, "family": names.get((model, plan), plan)} for model, plan in pairs
    )
    if families_used.empty:
        return None
    counts = families_used.groupby("model")["family"].nunique()
    changing = int((counts > 1).sum())
    return Finding(f"{changing} of {len(counts)} models", changing >= claim.limit * len(counts))


def _never_slower(tables: Tables, claim: Claim) -> Finding | None:
    values: dict[str, dict[str, float]] = {}  # throughput [samples/s] by strategy and stage, both in order
    columns = (tables[claim.table][name] for name in ("strategy", "stage"))
    numbers = number(tables[claim.table], "throughput_samples_per_s")
    for strategy, stage, value in zip(*columns, numbers, strict=True):
        values.setdefault(str(strategy), {})[str(stage)] = float(value)
    ours = values.pop(MORPHLING)
    best = {stage: max(other[stage] for other in values.values()) for stage in ours}
    slower = [stage for stage in ours if ours[stage] < best[stage]]
    note = ", ".join(f"{stage}: {ours[stage] / best[stage]:.3f} of the best" for stage in slower)
    return Finding(f"{len(ours) - len(slower)} of {len(ours)} stages", not slower, note)


def _plan_changes(tables: Tables, claim: Claim) -> Finding | None:
    ours = tables[claim.table][tables[claim.table]["strategy"] == MORPHLING]
    changes = sum(first != second for first, second in itertools.pairwise(ours["plan"]))
    names = " -> ".join(plan or "none" for plan in ours["plan"])
    return Finding(f"{changes} changes", changes >= claim.limit, names)


def _cpu_speedup(tables: Tables, claim: Claim) -> Finding | None:
    table = tables[claim.table]
    on_one_gpu = table[(table["strategy"] == MORPHLING) & (number(table, "gpus") == 1)]
    ordered = on_one_gpu.assign(threads=number(on_one_gpu, "cpu_threads")).sort_values("threads")
    values = number(ordered, "throughput_samples_per_s").tolist()
    if len(values) != 2 or values[0] <= 0:
        return None
    ratio = values[1] / values[0]
    return Finding(f"{ratio:.2f}x", ratio >= claim.limit)


def _summed_gain(tables: Tables, claim: Claim) -> Finding | None:
    table = tables[claim.table]
    totals = table.assign(value=number(table, claim.subject)).groupby("scheduler")["value"]
    sums = totals.sum(min_count=int(totals.size().max()))
    ours, simple = float(sums[MORPHLING]), float(sums["Simple"])
    if math.isnan(ours) or math.isnan(simple):
        return None
    return Finding(f"{ours / simple:.2f}x ({ours:.2f} against {simple:.2f})", ours >= claim.limit * simple)


def _reconfigured_losses(tables: Tables, claim: Claim) -> Finding | None:
    table = tables[claim.table]
    differences = table.assign(value=number(table, "abs_difference")).groupby("run", sort=False)["value"]
    if not {SWITCHING, OTHER_SEED} <= set(differences.groups):
        return None
    other = float(differences.mean()[OTHER_SEED])
    largest = differences.max().drop(OTHER_SEED)
    worst, plans = float(largest.max()), len(largest) - 1
    note = f"{plans} plans and a run that switches; largest in run {largest.idxmax()!r}"
    return Finding(f"{worst:.2g}, other seed {other:.2g}", worst < claim.limit * other, note)


def _live_fidelity(tables: Tables, claim: Claim) -> Finding | None:
    table = tables[claim.table]
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


def _leads_on_lists(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: policy, trace, ratio, and ``keeping`` where only rivals that keep all guarantees count."""
    policy, trace, ratio, *only = claim.subject.split()
    pairs = _of_rivals(tables[claim.table], policy)
    pairs = pairs[(pairs["trace"] == trace) & (pairs["gpus"] == _GPUS)]
    if only:
        pairs = pairs[pairs["rival_sla_attainment"].fillna(1.0) == 1.0]
    return _lead(pairs, ratio, claim.limit, _at_delay)


def _leads_today(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: policy and ratio."""
    policy, ratio = claim.subject.split()
    pairs = _of_rivals(tables[claim.table], policy)
    return _lead(pairs, ratio, claim.limit, lambda _: "with models of today")


def _goodput_falls(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: kind of recovery; each size and policy is a case."""
    table = tables[claim.table]
    rows = table[table["recovery"] == claim.subject].sort_values("per_day", kind="stable")
    cases = {
        f"{policy} on {gpus} GPUs": number(own, "goodput_mean")
        for (policy, gpus), own in rows.groupby(["policy", "gpus"], sort=False)
        if len(own) > 1
    }
    if not cases:
        return None
    rising = [name for name, means in cases.items() if (means.diff().dropna() >= 0).any()]
    ends = [f"{means.iloc[0]:.2f} to {means.iloc[-1]:.2f}" for means in cases.values()]
    text = f"{len(cases) - len(rising)} of {len(cases)} cases: {', '.join(ends)}"
    return Finding(text, not rising, f"not {', '.join(rising)}" if rising else "")


def _recovery_gains(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: kind of recovery, ratio, and failures a day; the limit is how many seeds decide."""
    kind, ratio, per_day = claim.subject.split()
    table = tables[claim.table]
    rows = table[(table["recovery"] == kind) & (number(table, "per_day") == float(per_day))]
    cases = rows.assign(lists=rows["seeds"], rival=[f"{row['policy']}" for row in _records(rows)])
    return _lead(cases, ratio, claim.limit, lambda row: f"on {row['gpus']} GPUs")


def _recovery_indifferent(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: failures a day; the limit is the largest difference of a ratio from 1."""
    table = tables[claim.table]
    rows = table[number(table, "per_day") == float(claim.subject)]
    if rows.empty:
        return None
    off = (number(rows, "goodput_ratio_mean") - 1.0).abs()
    worst = rows.iloc[int(off.to_numpy().argmax())]
    where = f"{worst['recovery']} under {worst['policy']} on {worst['gpus']} GPUs"
    return Finding(f"at most {100 * off.max():.1f} % apart", bool(off.max() <= claim.limit), where)


def _model_agrees(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: policy; the limit is the largest difference of goodput from the analytic model."""
    table = tables[claim.table]
    rows = table[(table["policy"] == claim.subject) & (table["recovery"] == "restart")]
    if rows.empty:
        return None
    off = number(rows, "goodput_mean") - number(rows, "expected_goodput")
    worst = rows.iloc[int(off.abs().to_numpy().argmax())]
    where = f"largest on {worst['gpus']} GPUs at {worst['per_day']:g} failures a day"
    text = f"{100 * off.min():+.1f} to {100 * off.max():+.1f} points"
    return Finding(text, bool(off.abs().max() <= claim.limit), where)


def _leads_under_failures(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: policy; the limit is how many seeds decide."""
    table = tables[claim.table].assign(
        setting=lambda rows: rows["gpus"].astype(str) + " GPUs, " + rows["recovery"]
    )
    parts = []
    for rival in dict.fromkeys(table["policy"]):
        if rival != claim.subject:
            by = ["setting", "per_day", "seed"]
            own = table[table["policy"] == claim.subject][[*by, "avg_jct_s"]]
            both = own.merge(table[table["policy"] == rival], on=by, suffixes=("", "_rival"))
            parts.append(both.assign(rival=rival, jct_ratio=both["avg_jct_s_rival"] / both["avg_jct_s"]))
    if not parts:
        return None
    pairs = intervals(pd.concat(parts), ["rival", "setting", "per_day"], ["jct_ratio"])
    named = pairs.rename(columns={"n": "lists"})
    return _lead(
        named, "jct_ratio", claim.limit, lambda row: f"at {row['per_day']:g} a day, {row['setting']}"
    )


def _wins_on_other_sizes(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: policy and trace; of rivals that break guarantees nothing is asked."""
    policy, trace = claim.subject.split()
    pairs = _of_rivals(tables[claim.table], policy)
    pairs = pairs[(pairs["trace"] == trace) & (pairs["gpus"] != _GPUS)]
    pairs = pairs[pairs["rival_sla_attainment"].fillna(1.0) == 1.0]
    n_cases = int(pairs["lists"].sum())
    if not n_cases:
        return None
    n_wins = int(pairs["jct_wins"].sum())
    lost = _records(pairs[pairs["jct_wins"] < pairs["lists"]])
    note = ", ".join(
        f"{row['rival']} on {row['gpus']} GPUs {_at_delay(row)}: {row['jct_wins']} of {row['lists']}"
        for row in lost
    )
    wins = f"{n_wins} of {n_cases} cases ({100 * n_wins / n_cases:.1f} %)"
    return Finding(wins, n_wins >= claim.limit * n_cases, note)


def _of_rivals(pairs: pd.DataFrame, policy: str) -> pd.DataFrame:
    """Select the comparisons of a policy with those of other authors."""
    return pairs[(pairs["policy"] == policy) & ~pairs["rival"].str.startswith(_OURS)]


def _lead(
    pairs: pd.DataFrame, ratio: str, least_lists: float, setting: Callable[[_Row], str]
) -> Finding | None:
    """Judge the ratio of every rival by its interval: ahead above 1, behind below it, else undecided."""
    if pairs.empty:
        return None
    n_lists = int(pairs["lists"].min())
    means, low, high = (number(pairs, f"{ratio}_{end}") for end in ("mean", "low", "high"))
    ahead, behind = low > 1, high < 1
    text = (
        f"{means.min():.2f}x to {means.max():.2f}x, ahead in {int(ahead.sum())} of {len(pairs)} comparisons"
    )
    text += f" on {n_lists} lists each"
    notes = [f"at least {least_lists:g} lists decide"] if n_lists < least_lists else []
    for row in _records(pairs[~ahead]):
        ends = f"{row[f'{ratio}_mean']:.2f}x ({row[f'{ratio}_low']:.2f} to {row[f'{ratio}_high']:.2f})"
        kept = row.get("rival_sla_attainment", math.nan)
        broken = f", keeps {100 * kept:.1f} % of guarantees" if kept < 1 else ""
        notes.append(f"{row['rival']} {ends} {setting(row)}{broken}")
    if n_lists < least_lists:
        holds = None
    elif behind.any():
        holds = False
    else:
        holds = True if ahead.all() else None
    return Finding(text, holds, "; ".join(notes))


def _records(table: pd.DataFrame) -> list[_Row]:
    return [{str(name): cell for name, cell in row.items()} for row in table.to_dict("records")]


def _at_delay(row: _Row) -> str:
    return f"at {row['restart_delay_s']:g} s"


def _rivals_at_their_best(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: how many simulations decide; the limit is a ratio to what is shipped."""
    table = tables[claim.table]
    varied = table[table["parameter"].fillna("") != ""]
    if varied.empty:
        return None
    n_runs, least_runs = int(varied["runs"].min()), int(claim.subject)
    better = varied[number(varied, "ratio_high") < claim.limit].sort_values("ratio_mean")
    notes = [f"at least {least_runs} simulations decide"] if n_runs < least_runs else []
    notes += [
        f"{row['policy']} with {row['parameter']} {row['value']}: {row['ratio_mean']:.3f}x"
        for row in _records(better)
    ]
    text = f"{len(better)} of {len(varied)} other values are better, {n_runs} simulations each"
    return Finding(text, better.empty if n_runs >= least_runs else None, "; ".join(notes))


def _threads_pay(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: policy and share of jobs that offload."""
    policy, share = claim.subject.split()
    table = tables[claim.table]
    of_policy = table[(table["policy"] == policy) & (number(table, "offload_share") == float(share))]
    if of_policy.empty:
        return None
    pairs = threads_worth(of_policy)
    judged = _lead(
        pairs.assign(rival=REQUESTED, lists=pairs["n"]), "ratio", claim.limit, lambda row: "threads"
    )
    mean = float(pairs["ratio_mean"].iloc[0])
    held = of_policy.groupby("threads")["threads_per_gpu"].mean()
    text = f"{mean:.2f}x with {held[CHOSEN]:.1f} threads a GPU for {held[REQUESTED]:.1f}"
    return None if judged is None else replace(judged, reproduced=text)


def _guarantees(tables: Tables, claim: Claim) -> Finding | None:
    kept: list[float] = []
    for name in (claim.table, "lists"):
        rows = tables[name][tables[name]["policy"].str.startswith(_OURS)]
        kept += number(rows, "sla_attainment").dropna().tolist()
    if not kept:
        return None
    return Finding(f"{100 * min(kept):.1f} % at least, {len(kept)} schedules", min(kept) >= claim.limit)


def _no_idle_devices(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: a policy; limit: how long half of the devices may lie idle beside its jobs [s]."""
    table = tables[claim.table]
    rows = table[table["policy"] == claim.subject]
    rows = rows.assign(idle_s=number(rows, "idle_s")).dropna(subset=["idle_s"])
    if rows.empty:
        return None
    worst = rows.iloc[int(rows["idle_s"].argmax())]
    text = f"{worst['idle_s'] / 60:.0f} min at most, {len(rows)} schedules"
    return Finding(text, bool(worst["idle_s"] <= claim.limit), f"longest on {worst['trace']}")


def _leads(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: a policy."""
    parameter = _PARAMETERS[claim.table]
    pairs = _of_rivals(paired(tables[claim.table], [parameter], ["seed"]), claim.subject)
    return _lead(pairs, "jct_ratio", claim.limit, lambda row: f"at {row[parameter]:g}")


def _worth_of_reconfiguring(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: a policy; beside it the best that changes neither plans nor resources, and its ablations."""
    lists, pairs = tables[claim.table], _of_rivals(tables[f"{claim.table}_pairs"], claim.subject)
    ablated = {f"{claim.subject}-{ending}": ending.upper() for ending in "sern"}
    rows = lists[lists["policy"].isin([claim.subject, *ablated])]
    settings = rows[rows["policy"].isin(ablated)][list(_LISTS_SETTING)].drop_duplicates()
    if len(settings) != 1:
        return None
    of_policy = paired(rows.merge(settings), _LISTS_SETTING, ["draw", "seed"])
    of_policy = of_policy[of_policy["policy"] == claim.subject]
    fixed = pairs.merge(settings)
    fixed = fixed[~fixed["rival"].isin(RECONFIGURING)].sort_values("jct_ratio_mean").head(1)
    if fixed.empty:
        return None
    parts = [f"-{ablated[row['rival']]} {row['jct_ratio_mean']:.2f}x" for row in _records(of_policy)]
    judged = _lead(fixed, "jct_ratio", claim.limit, _at_delay)
    text = f"{fixed['jct_ratio_mean'].iloc[0]:.2f}x over {fixed['rival'].iloc[0]}; {', '.join(parts)}"
    return None if judged is None else replace(judged, reproduced=text)


def _knowledge(tables: Tables, claim: Claim) -> Finding | None:
    """Judge what more knowledge costs, or what less of it costs against knowing everything."""
    table = tables[claim.table]
    rows = table[table["mode"] == "exact"] if claim.subject == "less" else table[table["mode"] != "sampled"]
    if rows.empty:
        return None
    ratios = number(rows, "jct_ratio_mean") ** (-1 if claim.subject == "less" else 1)
    worst, lists = rows.iloc[int(ratios.argmax())], int(number(rows, "lists").min())
    where = f"{worst['policy']} on {worst['trace']}, mode {worst['mode']}"
    holds = bool(ratios.max() <= claim.limit) if lists >= _LISTS else None
    needed = "" if lists >= _LISTS else f"; a verdict takes {_LISTS}"
    note = f"{where}; {len(rows)} means over {lists} lists{needed}"
    return Finding(f"{ratios.max():.3f}x at worst", holds, note)


def _undercuts_released(tables: Tables, claim: Claim) -> Finding | None:
    cells = tables["table4_published"]
    printed = cells[cells["trace"] == claim.subject]
    simulated = tables[claim.table]
    if printed.empty:
        return None
    delay_s, interval_s = (float(printed[name].iloc[0]) for name in ("restart_delay_s", "interval_s"))
    rows = simulated[
        (simulated["trace"] == claim.subject)
        & (number(simulated, "restart_delay_s") == delay_s)
        & (number(simulated, "interval_s") == interval_s)
    ]
    columns = (number(rows, name) for name in ("avg_jct_s", "makespan_s"))
    found = {
        str(name): (float(jct_s), float(makespan_s))
        for name, jct_s, makespan_s in zip(rows["policy"], *columns, strict=True)
    }
    if _AS_IGNORANT not in found:
        return None
    texts = {name: f"{jct_s:.1f} s and {span_s / 1000:.1f} ks" for name, (jct_s, span_s) in found.items()}
    note = f"{_OURS}: {texts[_OURS]}" if _OURS in found else ""
    limit_s = float(printed["published_avg_jct_s"].iloc[0])
    return Finding(texts[_AS_IGNORANT], found[_AS_IGNORANT][0] <= limit_s, note)
