"""Checks of what the simulators say; averages over seeds are compared.

A subject begins with the mode, and may name a model behind it.
"""

import itertools

import pandas as pd

from makespan.claims import Check, Claim, Finding, Tables, number

__all__ = ["SIMULATION_CHECKS"]

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
    artifact, system = claim.subject.split()
    found = _means(tables[artifact], "compat")
    printed = _means(tables[artifact], "compat", "published_samples_per_s")
    off = {
        key: abs(found[key] / value - 1.0) if value > 0 else found[key]
        for key, value in printed.items()
        if key[2] == system and key != _UNSTABLE
    }
    if not off:
        return None
    worst = max(off, key=lambda key: off[key])
    n_near = sum(value <= claim.limit for value in off.values())
    text = f"{n_near} of {len(off)}, at most {100 * off[worst]:.2g} % off"
    return Finding(text, n_near == len(off), f"furthest: {worst[1]} at {worst[0]}")


def _losses_of_oobleck(tables: Tables, claim: Claim) -> Finding | None:
    means = _means(tables["fig9"], claim.subject)
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
    means = _means(tables["fig9"], claim.subject)
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
    means = _means(tables["fig9"], mode)
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
    means = _means(tables["fig9"], claim.subject)
    cases = [(trace, model) for trace in ("6h", "3h") for model in ("GPT-2", "GPT-3 Medium")]
    if any((*case, "varuna") not in means for case in cases):
        return None
    ratios = [_ratio(means, trace, model) for trace, model in cases]
    return Finding(" ".join(f"{ratio:.3f}" for ratio in ratios), max(ratios) < claim.limit)


def _at_10m(tables: Tables, claim: Claim) -> Finding | None:
    means = _means(tables["fig9"], claim.subject)
    if any(("10m", model, "varuna") not in means for model in _AT_10M):
        return None
    ratios = {model: _ratio(means, "10m", model) for model in _AT_10M}
    wrong = [model for model, least in _AT_10M.items() if ratios[model] < least]
    return Finding(" ".join(map(_text, ratios.values())), not wrong, ", ".join(wrong))


def _ratio_grows(tables: Tables, claim: Claim) -> Finding | None:
    means = _means(tables["fig9"], claim.subject)
    traces, wrong = _frequencies(means), []
    if len(traces) < 2:
        return None
    for model in _models(means):
        is_exempt = claim.subject == "compat" and (traces[-1], model, "varuna") == _UNSTABLE
        ratios = [_ratio(means, trace, model) for trace in traces[: -1 if is_exempt else None]]
        wrong += [model for one, other in itertools.pairwise(ratios) if other < one]
    n_models = len(_models(means))
    return Finding(f"{n_models - len(set(wrong))} of {n_models} models", not wrong, ", ".join(wrong))


def _over_bamboo(tables: Tables, claim: Claim) -> Finding | None:
    means = _means(tables["fig9"], claim.subject)
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
    table = tables["fig9"]
    fits = table[table["system"] == "bamboo"].groupby("model", sort=False)["feasible"].any()
    large = {str(model): bool(value) for model, value in fits.items() if str(model).startswith("GPT-3")}
    if not large:
        return None
    return Finding(f"{sum(not fit for fit in large.values())} of {len(large)}", not any(large.values()))


def _largest_ratio(tables: Tables, claim: Claim) -> Finding | None:
    means = _means(tables["fig9"], claim.subject)
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


SIMULATION_CHECKS: tuple[Check, ...] = (
    *(_printed_averages, _losses_of_oobleck, _varuna_loses_more, _over_varuna, _varuna_ahead, _at_10m),
    *(_ratio_grows, _over_bamboo, _bamboo_does_not_fit, _largest_ratio),
)
