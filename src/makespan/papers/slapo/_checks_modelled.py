"""Checks of what the hardware model and the emulator say of Figs 7 to 10."""

from makespan.claims import Check, Claim, Finding, Tables, number
from makespan.papers.slapo._inequalities import CONCLUSIONS

__all__ = ["MODELLED_CHECKS"]


def _conclusion(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: the name of a conclusion. The note says on which constants of the model it depends."""
    table, judge = CONCLUSIONS[claim.subject]
    rows = tables[table]
    oracles = set(rows["oracle"]) - {"published"}
    found = judge(rows)
    if found is None:
        return None
    text, holds = found
    return Finding(text, holds, _dependence(tables, claim.subject) if oracles == {"model"} else "")


def _dependence(tables: Tables, conclusion: str) -> str:
    rows = tables["inequalities"]
    rows = rows[rows["inequality"] == conclusion]
    own = rows["holds"][rows["constant"] == ""]
    if own.empty:
        return ""
    others = rows[rows["holds"] != bool(own.iloc[0])]
    changed = [
        f"{name} x {factor:g}" for name, factor in zip(others["constant"], others["factor"], strict=True)
    ]
    if not changed:
        return "the same with every unfitted constant halved and doubled"
    return f"otherwise with {', '.join(changed)}"


def _below_limits(tables: Tables, claim: Claim) -> Finding | None:
    """Compare every bar with the printed limit of its axis."""
    rows = tables["fig7"][tables["fig7"]["kind"] == "published"]
    limits = tables["limits_published"].set_index("model")["published_samples_per_s"].to_dict()
    highest = number(rows, "throughput_samples_per_s").groupby(rows["model"]).max().to_dict()
    known = {model: (highest[model], limit) for model, limit in limits.items() if model in highest}
    if not known:
        return None
    text = ", ".join(f"{model} {rate:.1f} of {float(limit):g}" for model, (rate, limit) in known.items())
    return Finding(text, all(rate < float(limit) for rate, limit in known.values()))


def _classified(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: the protocol; limit: points whose memory must be predicted right."""
    table = tables["fig10_fit"]
    rows = table[table["protocol"] == claim.subject]
    if rows.empty:
        return None
    right = int((rows["is_feasible"] == rows["published_is_feasible"]).sum())
    return Finding(f"{right} of {len(rows)}", right >= claim.limit)


def _predicted(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: the protocol and the largest error in per cent; limit: the mean error in per cent."""
    protocol, _, largest = claim.subject.rpartition(" ")
    table = tables["fig10_fit"]
    errors = 100 * number(table[table["protocol"] == protocol], "relative_error").dropna()
    if errors.empty:
        return None
    text = f"{errors.mean():.1f} % on average, {errors.max():.1f} % at most"
    return Finding(text, bool(errors.mean() <= claim.limit and errors.max() <= float(largest)))


def _synthetic(tables: Tables, claim: Claim) -> Finding | None:
    """Subject: the column of shares; limit: what the worst grid must reach."""
    rows = tables["fig10_grids"]
    if rows.empty:
        return None
    shares = number(rows, claim.subject)
    text = (
        f"{int((shares >= claim.limit).sum())} of {len(rows)}, the worst at {100 * shares.min():.1f} %, "
        f"{number(rows, 'explored').max():.0f} points at most"
    )
    return Finding(text, bool((shares >= claim.limit).all()))


MODELLED_CHECKS: tuple[Check, ...] = (_conclusion, _below_limits, _classified, _predicted, _synthetic)
