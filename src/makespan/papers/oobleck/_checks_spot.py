"""Checks of what the simulators say on spot traces, and of where time goes.

A single spot trace can say anything, so only the authors' own is judged alone. Over generated ones the mean
is judged, and where its 95 % interval holds both answers the statement is undecided.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.claims import Check, Claim, Finding, Tables, number
from makespan.confidence import half_widths

__all__ = ["SPOT_CHECKS"]

Floats = npt.NDArray[np.float64]

_SCALED = ("gcp_scaled", "p3_scaled")
_REPAIRED = {"BERT-Large": 1.15, "GPT-2": 1.03, "GPT-3 Medium": 1.03, "GPT-3 2.7B": 2.0, "GPT-3 6.7B": 3.0}
_LARGEST = "GPT-3 6.7B"
_FREQUENCIES = ("6h", "3h", "1h", "30m", "10m")


@dataclass(frozen=True, slots=True)
class _Judged:
    """What one comparison says, and in which way it was decided."""

    text: str
    holds: bool | None


def _joined(found: Mapping[str, _Judged]) -> Finding | None:
    """Join comparisons: all must hold, and one that fails decides."""
    if not found:
        return None
    failing = [name for name, one in found.items() if one.holds is False]
    open_ones = [name for name, one in found.items() if one.holds is None]
    notes = [f"not {', '.join(failing)}"] if failing else []
    if open_ones:
        notes.append(f"within the interval over seeds: {', '.join(open_ones)}")
    verdict = False if failing else None if open_ones else True
    return Finding(" ".join(one.text for one in found.values()), verdict, "; ".join(notes))


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


def _ratio_text(one: Floats, other: Floats) -> str:
    return f"{one.mean() / other.mean():.2f}" if other.mean() > 0 else "–"


def _against(
    table: pd.DataFrame, trace: str, model: str, other: str, limit: float, defects: str = ""
) -> _Judged | None:
    """Judge whether Oobleck is more than so many times as fast as another system."""
    own, theirs = (_seeds(table, trace, model, system, defects) for system in ("oobleck", other))
    if not len(own) or len(own) != len(theirs):
        return None
    return _Judged(_ratio_text(own, theirs), _above_zero(own - limit * theirs))


def _spot_ahead(tables: Tables, claim: Claim) -> Finding | None:
    """Judge the ratio to another system: ``<trace or both> <system> <models separated by commas or all>``."""
    trace, other, models = claim.subject.split(" ", 2)
    table, found = tables["fig10"], dict[str, _Judged]()
    for name, model in itertools.product(_traces(trace), _models(table, models)):
        judged = _against(table, name, model, other, claim.limit)
        if judged is not None:
            found[f"{model} on {name}"] = judged
    return _joined(found)


def _traces(name: str) -> Sequence[str]:
    return _SCALED if name == "both" else (name,)


def _models(table: pd.DataFrame, names: str) -> list[str]:
    return list(dict.fromkeys(table["model"])) if names == "all" else names.split(",")


def _spot_near(tables: Tables, claim: Claim) -> Finding | None:
    """Judge whether Oobleck and Varuna are as far apart as the limit at most, on GCP."""
    trace, models = claim.subject.split(" ", 1)
    found = {}
    for model in models.split(","):
        own, theirs = (_seeds(tables["fig10"], trace, model, name, "") for name in ("oobleck", "varuna"))
        if not len(own) or not theirs.any():
            continue
        low, high = _interval((own - theirs) / theirs.mean())
        inside = -claim.limit <= low and high <= claim.limit
        outside = high < -claim.limit or low > claim.limit
        found[f"{model} on {trace}"] = _Judged(
            _ratio_text(own, theirs), True if inside else False if outside else None
        )
    return _joined(found)


def _varuna_stuck(tables: Tables, claim: Claim) -> Finding | None:
    found = {}
    for trace in _SCALED:
        values = _seeds(tables["fig10"], trace, _LARGEST, "varuna", "")
        if len(values):
            found[trace] = _Judged(f"{values.mean():.3f}", _above_zero(claim.limit - values))
    return _joined(found)


def _ahead_when_repaired(tables: Tables, claim: Claim) -> Finding | None:
    table, found = tables["ablation"], dict[str, _Judged]()
    for trace, (model, least) in itertools.product(_SCALED, _REPAIRED.items()):
        judged = _against(table, trace, model, "varuna", least, claim.subject)
        if judged is not None:
            found[f"{model} on {trace}"] = judged
    return _joined(found)


def _repair_raises(tables: Tables, claim: Claim) -> Finding | None:
    table, found = tables["ablation"], dict[str, _Judged]()
    for trace, model, system in itertools.product(_SCALED, _models(table, "all"), ("oobleck", "varuna")):
        before, after = (_seeds(table, trace, model, system, defects) for defects in ("", claim.subject))
        if len(before) and len(before) == len(after):
            found[f"{system} {model} on {trace}"] = _Judged(
                _ratio_text(after, before), _above_zero(after - before)
            )
    return _joined(found)


def _repair_lowers_varuna(tables: Tables, claim: Claim) -> Finding | None:
    table, found = tables["ablation"], dict[str, _Judged]()
    for trace, model in itertools.product(_SCALED, _models(table, "all")):
        kept = {}
        for system in ("oobleck", "varuna"):
            before, after = (_seeds(table, trace, model, system, defects) for defects in ("", claim.subject))
            if len(before) and len(before) == len(after) and before.mean() > 0:
                kept[system] = after / before.mean()
        if len(kept) == 2 and model != _LARGEST:
            text = f"{kept['varuna'].mean():.2f}/{kept['oobleck'].mean():.2f}"
            found[f"{model} on {trace}"] = _Judged(text, _above_zero(kept["oobleck"] - kept["varuna"]))
    return _joined(found)


def _shares(tables: Tables, model: str, category: str) -> dict[tuple[str, str], float]:
    """Return the share of a category as released, by trace and system."""
    table = tables["fig12"]
    wanted = (table["mode"] == "compat") & (table["model"] == model) & (table["category"] == category)
    rows = table[wanted & table["trace"].isin(_FREQUENCIES)]
    values = zip(rows["trace"], rows["system"], number(rows, "share"), strict=True)
    return {(str(trace), str(system)): share for trace, system, share in values}


def _printed_times(tables: Tables, claim: Claim) -> Finding | None:
    printed, table = tables["fig12_published"], tables["fig12"]
    keys = ["trace", "model", "system", "category"]
    pairs = printed.merge(table[table["mode"] == "compat"], on=keys)
    pairs = pairs[pairs["system"].isin(claim.subject.split())]
    if pairs.empty:
        return None
    own, theirs = number(pairs, "time_s"), number(pairs, "published_time_s")
    if claim.limit < 1e-2:  # a time [s]; else a share
        off = (own - theirs).abs()
    else:
        totals = theirs.groupby(pairs["system"]).transform("sum")
        off = (number(pairs, "share") - theirs / totals).abs()
    n_near = int((off <= claim.limit).sum())
    return Finding(f"{n_near} of {len(off)}, largest difference {off.max():.3g}", n_near == len(off))


def _oobleck_useful(tables: Tables, claim: Claim) -> Finding | None:
    least, others = {}, []
    for model in dict.fromkeys(tables["fig12"]["model"]):
        shares = _shares(tables, model, "useful")
        own = {trace: share for (trace, system), share in shares.items() if system == "oobleck"}
        least[model] = min(own.values(), default=0.0)
        others += [f"{model} at {trace}" for (trace, _), share in shares.items() if share > own[trace]]
    if claim.subject not in least:
        return None
    notes = [f"another system has more: {', '.join(others)}"] if others else []
    holds = least[claim.subject] >= claim.limit and not others
    return Finding(f"at least {least[claim.subject]:.3f}", holds, ", ".join(notes))


def _varuna_useful_falls(tables: Tables, claim: Claim) -> Finding | None:
    wrong, told = [], []
    for model in dict.fromkeys(tables["fig12"]["model"]):
        shares = _shares(tables, str(model), "useful")
        values = [shares[trace, "varuna"] for trace in _FREQUENCIES if (trace, "varuna") in shares]
        if len(values) > 1:
            told.append(" ".join(f"{value:.2f}" for value in values))
            wrong += [str(model) for one, other in itertools.pairwise(values) if other >= one]
    return Finding("; ".join(told), not wrong, ", ".join(wrong)) if told else None


def _bamboo_redundant(tables: Tables, claim: Claim) -> Finding | None:
    shares = [
        share
        for model in dict.fromkeys(tables["fig12"]["model"])
        for (_, system), share in _shares(tables, str(model), "redundant").items()
        if system == "bamboo"
    ]
    return Finding(f"{min(shares):.2f} and more", min(shares) > claim.limit) if shares else None


def _without_checkpoints(tables: Tables, claim: Claim) -> Finding | None:
    """Judge the ratio of two systems of Fig. 13: ``<one> <other> <traces separated by commas>``."""
    one, other, names = claim.subject.split()
    table = tables["fig13"]
    rows = table[(table["mode"] == "compat") & table["trace"].isin(names.split(","))]
    means = (
        rows.assign(value=number(rows, "throughput_samples_per_s"))
        .groupby(["trace", "system"])["value"]
        .mean()
    )
    traces = [trace for trace in names.split(",") if (trace, one) in means.index]
    if not traces:
        return None
    ratios = [float(means[trace, one] / means[trace, other]) for trace in traces]
    return Finding(" ".join(f"{ratio:.2f}" for ratio in ratios), min(ratios) >= claim.limit)


SPOT_CHECKS: tuple[Check, ...] = (
    *(_spot_ahead, _spot_near, _varuna_stuck, _ahead_when_repaired, _repair_raises, _repair_lowers_varuna),
    *(_printed_times, _oobleck_useful, _varuna_useful_falls, _bamboo_redundant, _without_checkpoints),
)
