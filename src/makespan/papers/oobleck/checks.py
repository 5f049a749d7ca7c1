"""Checks of the paper's statements: training through kills, templates and plans, simulations, studies."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.claims import Claim, Finding, Tables, number
from makespan.numerics import half_widths
from makespan.papers.oobleck.reconfiguration import ENDS
from makespan.papers.oobleck.studies import burst_table

# ------------------------------------------------------------------------------------------------
# Checks of the studies of steady losses.


def _wide(table: pd.DataFrame, study: str) -> pd.DataFrame:
    """Return the quantities of a study, one row per case."""
    rows = table[table["study"] == study]
    return rows.assign(value=number(rows, "value")).pivot(index="case", columns="quantity", values="value")


def _analytic_near(tables: Tables, claim: Claim) -> Finding | None:
    wide = _wide(tables[claim.table], "analytic model")
    if wide.empty:
        return None
    off = wide["difference_pct"].abs()
    n_near = int((off <= claim.limit).sum())
    text = f"{n_near} of {len(off)}, at most {off.max():.1f} % off"
    return Finding(text, n_near == len(off), f"furthest: {off.idxmax()}")


def _by_model(table: pd.DataFrame) -> pd.DataFrame:
    wide = _wide(table, "checkpoint intervals")
    return wide.dropna(subset=["best_share"]) if "best_share" in wide else wide.iloc[:0]


def _young_daly_near(tables: Tables, claim: Claim) -> Finding | None:
    wide = _by_model(tables[claim.table])
    if wide.empty:
        return None
    lost = 1.0 - wide["young_daly_share"] / wide["best_share"]
    pairs = zip(wide["young_daly_steps"], wide["best_steps"], strict=True)
    steps = ", ".join(f"{theirs:.0f} and {best:.0f}" for theirs, best in pairs)
    text = f"{100 * lost.max():.2f} % lost at most"
    return Finding(text, bool((lost <= claim.limit).all()), f"steps, theirs and the best: {steps}")


def _oobleck_keeps_more(tables: Tables, claim: Claim) -> Finding | None:
    wide = _by_model(tables[claim.table])
    if wide.empty:
        return None
    pairs = zip(wide["oobleck_share"], wide["best_share"], strict=True)
    text = ", ".join(f"{oobleck:.3f} and {varuna:.3f}" for oobleck, varuna in pairs)
    return Finding(text, bool((wide["oobleck_share"] > wide["best_share"]).all()))


# ------------------------------------------------------------------------------------------------
# Checks of what came of training whose nodes were killed; the subject of a table's rows is a system.


def _of(table: pd.DataFrame, system: str) -> pd.DataFrame:
    return table[table["run"].str.endswith(f", {system}")]


def _state_is_equal(tables: Tables, claim: Claim) -> Finding | None:
    """Check that all state has the bits of one process that repeats the plans."""
    table = _of(tables[claim.table], claim.subject)
    if table.empty:
        return None
    kills, n_equal = int(number(table, "kills").sum()), int(table["equal"].sum())
    largest = number(_of(tables[claim.table.removesuffix("_summary")], claim.subject), "abs_difference").max()
    text = f"{n_equal} of {len(table)} jobs after {kills} kills, losses {largest:g} apart"
    return Finding(text, n_equal == len(table) and largest == 0)


def _ahead_of_relaunch(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: a column that should be larger, or, with a minus before it, smaller."""
    column = claim.subject.removeprefix("-")
    table = tables[claim.table].assign(job=lambda rows: rows["run"].str.split(",").str[0])
    ours, theirs = (_of(table, system).set_index("job")[column] for system in ("oobleck", "relaunch"))
    both = pd.DataFrame({"ours": ours, "theirs": theirs}).dropna()
    if both.empty:
        return None
    is_ahead = both["ours"] < both["theirs"] if claim.subject != column else both["ours"] > both["theirs"]
    pairs = "; ".join(f"{oobleck:.3g} and {relaunch:.3g}" for oobleck, relaunch in both.to_numpy())
    return Finding(pairs, bool(is_ahead.all()))


# ------------------------------------------------------------------------------------------------
# Checks of templates and plans.

_LAYER_S = 0.15e-3  # forward and backward pass of a uniform layer
_CLOSE = 1e-9
_PICOSECOND = 1e-12


def _uniform_costs(tables: Tables, claim: Claim) -> Finding | None:
    table = tables[claim.table]
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


def _printed(table: pd.DataFrame, mode: str) -> pd.Series | None:
    rows = table[(table["profile"] == "printed") & (table["batch_mode"] == mode)]
    return None if rows.empty else rows.iloc[0]


def _printed_plan(tables: Tables, claim: Claim) -> Finding | None:
    row, cells = _printed(tables[claim.table], "per_template"), tables[f"{claim.table}_published"]
    if row is None:
        return None
    printed = cells.to_dict("records")
    counts = " ".join(f"{cell['n_pipelines']}x{cell['n_nodes']}" for cell in printed)
    batches = " ".join(str(cell["microbatches"]) for cell in printed for _ in range(int(cell["n_pipelines"])))
    holds = row["counts"] == counts and row["microbatches"] == batches
    return Finding(f"{row['counts']}, {row['microbatches']}", bool(holds))


def _own_batches(tables: Tables, claim: Claim) -> Finding | None:
    ours, theirs = (_printed(tables[claim.table], mode) for mode in ("per_pipeline", "per_template"))
    if ours is None or theirs is None:
        return None
    gain = 1.0 - float(ours["iter_time_s"]) / float(theirs["iter_time_s"])
    return Finding(f"{100 * gain:.1f} % with {ours['counts']}", gain >= claim.limit)


def _same_plan(tables: Tables, claim: Claim) -> Finding | None:
    keys = ["profile", "n_nodes", "global_microbatches", "counts"]
    rows = tables[claim.table]
    rows = rows[rows["profile"] != "printed"]
    ours = rows[(rows["batch_mode"] == "per_pipeline") & (rows["estimator"] == "1f1b")]
    theirs = rows[rows["batch_mode"] == "per_template"]
    both = ours.merge(theirs, on=keys, suffixes=("", "_template"))
    if both.empty:
        return None
    slower = number(both, "iter_time_s") > number(both, "iter_time_s_template") * (1 + _CLOSE)
    return Finding(f"{len(both) - int(slower.sum())} of {len(both)} pairs", not slower.any())


# ------------------------------------------------------------------------------------------------
# Checks of statements about pipelines after losses.

_BEYOND = "beyond"


def _losses(tables: Tables, claim: Claim) -> pd.DataFrame | None:
    """Return losses of up to f nodes, or beyond, with n0, f and the number of nodes and of lost ones."""
    table = tables[claim.table]
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
    pairs = [part.split("x") for part in counts.split()]
    return [int(size) for times, size in pairs for _ in range(int(times))]


def _after(rows: pd.DataFrame, count: Callable[[list[int]], int]) -> "pd.Series[int]":
    """Return what is counted in the sizes of the pipelines that are left after each loss."""
    # Without rows pandas would return text, which it refuses to compare with numbers if it has pyarrow.
    return rows["counts_after"].map(lambda text: count(_sizes(text))).astype("int64")


def _worked_cases(tables: Tables, claim: Claim) -> Finding | None:
    table = tables[claim.table]
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
    n_idle = int((_after(going, sum) != going["left"]).sum())
    return Finding(f"{n_idle} of {len(going)} losses leave idle nodes", n_idle == 0)


def _enough_pipelines(tables: Tables, claim: Claim) -> Finding | None:
    rows = _losses(tables, claim)
    if rows is None:
        return None
    going = rows[~rows["action"].isin(ENDS)]
    n_few = int((_after(going, len) <= going["f"]).sum())
    return Finding(f"{n_few} of {len(going)} losses leave fewer than f + 1", n_few == 0)


def _ends_where_it_must(tables: Tables, claim: Claim) -> Finding | None:
    rows = _losses(tables, claim)
    if rows is None:
        return None
    ended = rows["action"] == "insufficient-nodes"
    n_wrong = int((ended & rows["is_enough"]).sum() + (~rows["is_enough"] & ~rows["action"].isin(ENDS)).sum())
    return Finding(f"{int(ended.sum())} of {len(rows)} losses leave too few", n_wrong == 0)


def _below_grows(tables: Tables, claim: Claim) -> Finding | None:
    table = burst_table(tables[claim.table])
    if table.empty:
        return None
    below = table.pivot_table(index=["nodes", "shape"], columns="f", values="below_share")
    last = below.iloc[:, -1]
    text = f"{last.min():.2f} to {last.max():.2f} at f = {below.columns[-1]}"
    return Finding(text, bool((below.diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)))


def _spread_keeps_more(tables: Tables, claim: Claim) -> Finding | None:
    table = burst_table(tables[claim.table])
    if table.empty:
        return None
    lost = table.pivot_table(index=["f", "nodes"], columns="shape", values="state_lost_share")
    gain = lost["rack"] - lost["rack, spread"]
    text = f"{lost['rack, spread'].max():.2f} of bursts at most, {lost['rack'].max():.2f} otherwise"
    return Finding(text, bool((gain >= 0).all() and (gain > 0).any()))


def _singles_keep_state(tables: Tables, claim: Claim) -> Finding | None:
    table = burst_table(tables[claim.table])
    singles = table[table["nodes"] == 1] if len(table) else table
    if singles.empty:
        return None
    worst = float(singles["state_lost_share"].max())
    return Finding(f"{worst:.2f} of losses", worst == 0)


# ------------------------------------------------------------------------------------------------
# Checks of what the simulators say; averages over seeds are compared.
#
# A subject begins with the mode, and may name a model behind it.

_FREQUENCIES = ("6h", "3h", "1h", "30m", "10m")
_UNSTABLE = ("10m", "GPT-3 6.7B", "varuna")  # a restart takes nearly as long as failures are apart
_SLOW_LOSS = {"BERT-Large": 0.03, "GPT-2": 0.03}
_LARGEST_LOSS = 0.25
_AT_10M = {"BERT-Large": 1.5, "GPT-2": 1.05, "GPT-3 Medium": 1.3, "GPT-3 2.7B": 2.0, "GPT-3 6.7B": 3.0}
Means = dict[tuple[str, str, str], float]


def _means(table: pd.DataFrame, mode: str, column: str = "throughput_samples_per_s") -> Means:
    """Return means over seeds by trace, model and system, of those that fit and what is printed of them."""
    rows = table[(table["mode"] == mode) & (table["defects"] == "") & table["feasible"]]
    values = rows.assign(value=number(rows, column)).dropna(subset=["value"])
    means = values.groupby(["trace", "model", "system"], sort=False)["value"].mean().reset_index()
    return {(row["trace"], row["model"], row["system"]): row["value"] for row in means.to_dict("records")}


def _models(means: Means) -> list[str]:
    return list(dict.fromkeys(model for _, model, _ in means))


def _frequencies(means: Means) -> list[str]:
    there = {trace for trace, _, _ in means}
    return [trace for trace in _FREQUENCIES if trace in there]


def _ratio(means: Means, trace: str, model: str, other: str = "varuna") -> float:
    """Return Oobleck over another system; infinite where that makes no progress."""
    theirs = means[trace, model, other]
    return means[trace, model, "oobleck"] / theirs if theirs > 0 else float("inf")


def _text(ratio: float) -> str:
    return "–" if ratio == float("inf") else f"{ratio:.2f}"


def _printed_averages(tables: Tables, claim: Claim) -> Finding | None:
    simulated = _means(tables[claim.table], "compat")
    printed = _means(tables[claim.table], "compat", "published_samples_per_s")
    off = {
        key: abs(simulated[key] / value - 1.0) if value > 0 else simulated[key]
        for key, value in printed.items()
        if key[2] == claim.subject and key != _UNSTABLE
    }
    if not off:
        return None
    worst = max(off, key=lambda key: off[key])
    n_near = sum(value <= claim.limit for value in off.values())
    text = f"{n_near} of {len(off)}, at most {100 * off[worst]:.2g} % off"
    return Finding(text, n_near == len(off), f"furthest: {worst[1]} at {worst[0]}")


def _losses_of_oobleck(tables: Tables, claim: Claim) -> Finding | None:
    means = _means(tables[claim.table], claim.subject)
    traces = _frequencies(means)
    if len(traces) < 2:
        return None
    losses, wrong = {}, []
    for model in _models(means):
        values = [means[trace, model, "oobleck"] for trace in traces]
        losses[model] = 1.0 - values[-1] / values[0]
        if losses[model] > _SLOW_LOSS.get(model, _LARGEST_LOSS):
            wrong.append(f"{model} loses {100 * losses[model]:.1f} %")
        if any(later > earlier for earlier, later in itertools.pairwise(values)):
            wrong.append(f"{model} does not fall with every frequency")
    text = " ".join(f"{100 * loss:.1f}" for loss in losses.values())
    return Finding(f"{text} %", not wrong, ", ".join(wrong))


def _varuna_loses_more(tables: Tables, claim: Claim) -> Finding | None:
    means = _means(tables[claim.table], claim.subject)
    traces = _frequencies(means)
    if len(traces) < 2:
        return None
    first, last = traces[0], traces[-1]
    kept = {
        model: [means[last, model, system] / means[first, model, system] for system in ("varuna", "oobleck")]
        for model in _models(means)
    }
    wrong = [model for model, (varuna, oobleck) in kept.items() if varuna >= oobleck]
    text = " ".join(f"{100 * (1 - varuna):.0f}" for varuna, _ in kept.values())
    return Finding(f"{text} %", not wrong, ", ".join(wrong))


def _over_varuna(tables: Tables, claim: Claim) -> Finding | None:
    mode, _, only = claim.subject.partition(" ")
    means = _means(tables[claim.table], mode)
    ratios = [
        _ratio(means, trace, model)
        for trace in _frequencies(means)
        for model in _models(means)
        if only in ("", model)
    ]
    if not ratios:
        return None
    return Finding(f"{_text(min(ratios))} to {_text(max(ratios))}", min(ratios) >= claim.limit)


def _varuna_ahead(tables: Tables, claim: Claim) -> Finding | None:
    means = _means(tables[claim.table], claim.subject)
    cases = [(trace, model) for trace in ("6h", "3h") for model in ("GPT-2", "GPT-3 Medium")]
    if any((*case, "varuna") not in means for case in cases):
        return None
    ratios = [_ratio(means, trace, model) for trace, model in cases]
    return Finding(" ".join(f"{ratio:.3f}" for ratio in ratios), max(ratios) < claim.limit)


def _at_10m(tables: Tables, claim: Claim) -> Finding | None:
    means = _means(tables[claim.table], claim.subject)
    if any(("10m", model, "varuna") not in means for model in _AT_10M):
        return None
    ratios = {model: _ratio(means, "10m", model) for model in _AT_10M}
    wrong = [model for model, least in _AT_10M.items() if ratios[model] < least]
    return Finding(" ".join(map(_text, ratios.values())), not wrong, ", ".join(wrong))


def _ratio_grows(tables: Tables, claim: Claim) -> Finding | None:
    means = _means(tables[claim.table], claim.subject)
    traces, wrong = _frequencies(means), []
    if len(traces) < 2:
        return None
    for model in _models(means):
        is_exempt = claim.subject == "compat" and (traces[-1], model, "varuna") == _UNSTABLE
        ratios = [_ratio(means, trace, model) for trace in traces[: -1 if is_exempt else None]]
        wrong += [model for earlier, later in itertools.pairwise(ratios) if later < earlier]
    n_models = len(_models(means))
    return Finding(f"{n_models - len(set(wrong))} of {n_models} models", not wrong, ", ".join(wrong))


def _over_bamboo(tables: Tables, claim: Claim) -> Finding | None:
    means = _means(tables[claim.table], claim.subject)
    ratios = {
        (trace, model): _ratio(means, trace, model, "bamboo")
        for trace, model, system in means
        if system == "bamboo"
    }
    if not ratios:
        return None
    least = min(ratios, key=lambda key: ratios[key])
    text = f"{_text(ratios[least])} to {_text(max(ratios.values()))}"
    return Finding(text, ratios[least] >= claim.limit, f"least: {least[1]} at {least[0]}")


def _bamboo_does_not_fit(tables: Tables, claim: Claim) -> Finding | None:
    table = tables[claim.table]
    fits = table[table["system"] == "bamboo"].groupby("model", sort=False)["feasible"].any()
    large = {str(model): bool(value) for model, value in fits.items() if str(model).startswith("GPT-3")}
    if not large:
        return None
    return Finding(f"{sum(not fit for fit in large.values())} of {len(large)}", not any(large.values()))


def _largest_ratio(tables: Tables, claim: Claim) -> Finding | None:
    means = _means(tables[claim.table], claim.subject)
    ratios = {
        (trace, model, system): _ratio(means, trace, model, system)
        for trace, model, system in means
        if system != "oobleck" and trace in _FREQUENCIES
    }
    if not ratios:
        return None
    most = max(ratios, key=lambda key: ratios[key])
    where = f"{most[2].capitalize()}, {most[1]} at {most[0]}"
    return Finding(f"{ratios[most]:.1f}", round(ratios[most], 1) >= claim.limit, where)


# ------------------------------------------------------------------------------------------------
# Checks of what the simulators say on spot traces, and of where time goes.
#
# A single spot trace can say anything, so only the authors' own is judged alone. Over generated ones the
# mean is judged, and where its 95 % interval holds both answers the statement is undecided.

Floats = npt.NDArray[np.float64]
_SCALED = ("gcp_scaled", "p3_scaled")
_REPAIRED = {"BERT-Large": 1.15, "GPT-2": 1.03, "GPT-3 Medium": 1.03, "GPT-3 2.7B": 2.0, "GPT-3 6.7B": 3.0}
_LARGEST = "GPT-3 6.7B"


@dataclass(frozen=True, slots=True)
class _Judged:
    """Outcome of one comparison, and the way it was decided."""

    text: str
    holds: bool | None


def _joined(comparisons: Mapping[str, _Judged]) -> Finding | None:
    """Join comparisons: all must hold, and one that fails decides."""
    if not comparisons:
        return None
    failing = [name for name, judged in comparisons.items() if judged.holds is False]
    undecided = [name for name, judged in comparisons.items() if judged.holds is None]
    notes = [f"not {', '.join(failing)}"] if failing else []
    if undecided:
        notes.append(f"within the interval over seeds: {', '.join(undecided)}")
    verdict = False if failing else None if undecided else True
    return Finding(" ".join(judged.text for judged in comparisons.values()), verdict, "; ".join(notes))


def _seeds(table: pd.DataFrame, trace: str, model: str, system: str, defects: str) -> Floats:
    """Return averages by seed, as released but for these defects."""
    rows = table[
        (table["trace"] == trace)
        & (table["model"] == model)
        & (table["system"] == system)
        & (table["mode"] == "compat")
        & (table["defects"] == defects)
        & table["feasible"]
    ]
    return np.asarray(number(rows.sort_values("seed"), "throughput_samples_per_s"), dtype=np.float64)


def _interval(values: Floats) -> tuple[float, float]:
    """Return the ends of the 95 % interval of the mean; of one value the value itself."""
    series = pd.Series(values)
    half = float(half_widths(series.groupby(np.zeros(len(values))))[0]) if len(values) > 1 else 0.0
    return float(values.mean()) - half, float(values.mean()) + half


def _above_zero(values: Floats) -> bool | None:
    """Tell whether a mean is above 0; None if its interval holds both."""
    low, high = _interval(values)
    return True if low > 0 else False if high <= 0 else None


def _ratio_text(values: Floats, base: Floats) -> str:
    return f"{values.mean() / base.mean():.2f}" if base.mean() > 0 else "–"


def _against(
    table: pd.DataFrame, trace: str, model: str, other: str, limit: float, defects: str = ""
) -> _Judged | None:
    """Judge whether Oobleck is more than so many times as fast as another system."""
    oobleck, theirs = (_seeds(table, trace, model, system, defects) for system in ("oobleck", other))
    if not len(oobleck) or len(oobleck) != len(theirs):
        return None
    return _Judged(_ratio_text(oobleck, theirs), _above_zero(oobleck - limit * theirs))


def _spot_ahead(tables: Tables, claim: Claim) -> Finding | None:
    """Judge the ratio to another system: ``<trace or both> <system> <models separated by commas or all>``."""
    trace, other, models = claim.subject.split(" ", 2)
    table, found = tables[claim.table], dict[str, _Judged]()
    traces = _SCALED if trace == "both" else (trace,)
    for name, model in itertools.product(traces, _spot_models(table, models)):
        judged = _against(table, name, model, other, claim.limit)
        if judged is not None:
            found[f"{model} on {name}"] = judged
    return _joined(found)


def _spot_models(table: pd.DataFrame, names: str) -> list[str]:
    return list(dict.fromkeys(table["model"])) if names == "all" else names.split(",")


def _spot_near(tables: Tables, claim: Claim) -> Finding | None:
    """Judge whether Oobleck and Varuna are as far apart as the limit at most, on GCP."""
    trace, models = claim.subject.split(" ", 1)
    found = {}
    for model in models.split(","):
        oobleck, varuna = (
            _seeds(tables[claim.table], trace, model, name, "") for name in ("oobleck", "varuna")
        )
        if not len(oobleck) or not varuna.any():
            continue
        low, high = _interval((oobleck - varuna) / varuna.mean())
        inside = -claim.limit <= low and high <= claim.limit
        outside = high < -claim.limit or low > claim.limit
        found[f"{model} on {trace}"] = _Judged(
            _ratio_text(oobleck, varuna), True if inside else False if outside else None
        )
    return _joined(found)


def _varuna_stuck(tables: Tables, claim: Claim) -> Finding | None:
    found = {}
    for trace in _SCALED:
        values = _seeds(tables[claim.table], trace, _LARGEST, "varuna", "")
        if len(values):
            found[trace] = _Judged(f"{values.mean():.3f}", _above_zero(claim.limit - values))
    return _joined(found)


def _ahead_when_repaired(tables: Tables, claim: Claim) -> Finding | None:
    table, found = tables[claim.table], dict[str, _Judged]()
    for trace, (model, least) in itertools.product(_SCALED, _REPAIRED.items()):
        judged = _against(table, trace, model, "varuna", least, claim.subject)
        if judged is not None:
            found[f"{model} on {trace}"] = judged
    return _joined(found)


def _repair_raises(tables: Tables, claim: Claim) -> Finding | None:
    table, found = tables[claim.table], dict[str, _Judged]()
    for trace, model, system in itertools.product(_SCALED, _spot_models(table, "all"), ("oobleck", "varuna")):
        before, after = (_seeds(table, trace, model, system, defects) for defects in ("", claim.subject))
        if len(before) and len(before) == len(after):
            found[f"{system} {model} on {trace}"] = _Judged(
                _ratio_text(after, before), _above_zero(after - before)
            )
    return _joined(found)


def _repair_lowers_varuna(tables: Tables, claim: Claim) -> Finding | None:
    table, found = tables[claim.table], dict[str, _Judged]()
    for trace, model in itertools.product(_SCALED, _spot_models(table, "all")):
        kept = {}
        for system in ("oobleck", "varuna"):
            before, after = (_seeds(table, trace, model, system, defects) for defects in ("", claim.subject))
            if len(before) and len(before) == len(after) and before.mean() > 0:
                kept[system] = after / before.mean()
        if len(kept) == 2 and model != _LARGEST:
            text = f"{kept['varuna'].mean():.2f}/{kept['oobleck'].mean():.2f}"
            found[f"{model} on {trace}"] = _Judged(text, _above_zero(kept["oobleck"] - kept["varuna"]))
    return _joined(found)


def _shares(table: pd.DataFrame, model: str, category: str) -> dict[tuple[str, str], float]:
    """Return the share of a category as released, by trace and system."""
    wanted = (table["mode"] == "compat") & (table["model"] == model) & (table["category"] == category)
    rows = table[wanted & table["trace"].isin(_FREQUENCIES)]
    values = zip(rows["trace"], rows["system"], number(rows, "share"), strict=True)
    return {(str(trace), str(system)): share for trace, system, share in values}


def _printed_times(tables: Tables, claim: Claim) -> Finding | None:
    printed, table = tables[f"{claim.table}_published"], tables[claim.table]
    keys = ["trace", "model", "system", "category"]
    pairs = printed.merge(table[table["mode"] == "compat"], on=keys)
    pairs = pairs[pairs["system"].isin(claim.subject.split())]
    if pairs.empty:
        return None
    simulated_s, printed_s = number(pairs, "time_s"), number(pairs, "published_time_s")
    if claim.limit < 1e-2:  # a time [s]; else a share
        off = (simulated_s - printed_s).abs()
    else:
        totals = printed_s.groupby(pairs["system"]).transform("sum")
        off = (number(pairs, "share") - printed_s / totals).abs()
    n_near = int((off <= claim.limit).sum())
    return Finding(f"{n_near} of {len(off)}, largest difference {off.max():.3g}", n_near == len(off))


def _oobleck_useful(tables: Tables, claim: Claim) -> Finding | None:
    least, others = {}, []
    for model in dict.fromkeys(tables[claim.table]["model"]):
        shares = _shares(tables[claim.table], model, "useful")
        oobleck = {trace: share for (trace, system), share in shares.items() if system == "oobleck"}
        least[model] = min(oobleck.values(), default=0.0)
        others += [f"{model} at {trace}" for (trace, _), share in shares.items() if share > oobleck[trace]]
    if claim.subject not in least:
        return None
    notes = [f"another system has more: {', '.join(others)}"] if others else []
    holds = least[claim.subject] >= claim.limit and not others
    return Finding(f"at least {least[claim.subject]:.3f}", holds, ", ".join(notes))


def _varuna_useful_falls(tables: Tables, claim: Claim) -> Finding | None:
    wrong, texts = [], []
    for model in dict.fromkeys(tables[claim.table]["model"]):
        shares = _shares(tables[claim.table], str(model), "useful")
        values = [shares[trace, "varuna"] for trace in _FREQUENCIES if (trace, "varuna") in shares]
        if len(values) > 1:
            texts.append(" ".join(f"{value:.2f}" for value in values))
            wrong += [str(model) for earlier, later in itertools.pairwise(values) if later >= earlier]
    return Finding("; ".join(texts), not wrong, ", ".join(wrong)) if texts else None


# ------------------------------------------------------------------------------------------------
# Checks of ReCycle beside the other systems; the subject is the other system.

_ABSTRACT_WITHIN = 0.15  # the tolerance of what ReCycle's abstract says


def _recycle_ratios(tables: Tables, claim: Claim) -> pd.DataFrame:
    rows = tables[claim.table]
    rows = rows[rows["other"] == claim.subject]
    return rows.assign(ratio=number(rows, "ratio"), half_width=number(rows, "half_width")).dropna(
        subset=["ratio"]
    )


def _recycle_lead(tables: Tables, claim: Claim) -> Finding | None:
    """Judge the largest ratio: the limit is the published one."""
    rows = _recycle_ratios(tables, claim)
    if rows.empty:
        return None
    most = rows.sort_values("ratio", kind="stable").iloc[-1]
    where = f"{most['model']} at {most['trace']}, {most['losses']}; least {rows['ratio'].min():.2f}"
    return Finding(
        f"{most['ratio']:.2f}", bool(abs(most["ratio"] / claim.limit - 1.0) <= _ABSTRACT_WITHIN), where
    )


def _recycle_ahead(tables: Tables, claim: Claim) -> Finding | None:
    rows = _recycle_ratios(tables, claim)
    if rows.empty:
        return None
    found = {}
    for row in rows.to_dict("records"):
        low, high = row["ratio"] - row["half_width"], row["ratio"] + row["half_width"]
        judged = True if low > claim.limit else False if high <= claim.limit else None
        found[f"{row['model']} at {row['trace']}, {row['losses']}"] = _Judged("", judged)
    joined = _joined(found)
    text = f"{rows['ratio'].min():.2f} to {rows['ratio'].max():.2f}"
    return joined and Finding(text, joined.holds, joined.note)
