"""Checks of what the paper states of accuracy: bits of Fig. 9, and what other elastic schemes end at."""

import itertools

import pandas as pd

from makespan.claims import Check, Claim, Finding, Tables, number

__all__ = ["ACCURACY_CHECKS"]

_INCONCLUSIVE = "inconclusive (profiles coincide)"


def _fig9_bits(tables: Tables, claim: Claim) -> Finding | None:
    """Compare a level with its row of the truth table; the subject is ``<level> <= or !=> ...`` by stage."""
    setting, *expected = claim.subject.split()
    table = tables["fig9"][tables["fig9"]["setting"] == setting]
    stages = table.assign(differs=~table["equal"]).groupby(["model", "stage"], sort=False)
    counts = stages["differs"].agg(["sum", "size"])
    if set(counts.index.get_level_values("stage")) != set(range(len(expected))):
        return None
    found, wrong, silent = dict[str, list[str]](), list[str](), list[str]()
    for (model, stage), (n_different, n_steps) in zip(counts.index, counts.to_numpy(), strict=True):
        found.setdefault(model, []).append("!=" if n_different else "=")
        told = f"{model}, stage {stage}: {n_different} of {n_steps} steps differ"
        if expected[stage] == "=" and n_different:
            wrong.append(told)
        elif expected[stage] == "!=" and not n_different:
            silent.append(told)
    largest = number(table, "diff").abs().max()
    reproduced = ", ".join(f"{model} {' '.join(signs)}" for model, signs in found.items())
    notes = [f"{_INCONCLUSIVE}: {'; '.join(silent)}"] if silent else []
    hooked = sorted({name for name in table["reference"] if "hooked" in name})
    notes = [*wrong, *notes, *(f"reference {name}" for name in hooked)]
    holds = False if wrong else None if silent else True
    return Finding(f"{reproduced}; differences to {largest:.2g}", holds, "; ".join(notes))


def _gap_exact(tables: Tables, claim: Claim) -> Finding | None:
    """Whether no bit of a scheme depends on the number of devices."""
    table = tables["gap"][tables["gap"]["scheme"] == claim.subject]
    if table.empty or table["devices"].nunique() < 2:
        return None
    spread = (
        number(table, "accuracy_pct")
        .groupby([table["seed"], table["class"]])
        .agg(lambda one: one.max() - one.min())
    )
    bits = table.groupby("seed")["param_sha"].nunique()
    found = (
        f"largest spread {spread.max():g} %, {int((bits == 1).sum())} of {len(bits)} seeds with equal bits"
    )
    return Finding(found, bool((spread == 0).all() and (bits == 1).all()))


def _gap_spread(tables: Tables, claim: Claim) -> Finding | None:
    """Whether accuracy depends on the number of devices more than on the seed, under one scheme at least."""
    *schemes, which = claim.subject.split()
    table = tables["gap_spread"][tables["gap_spread"]["class"] == which].set_index("scheme")
    if not set(schemes) <= set(table.index):
        return None
    own, seeds = number(table.loc[schemes], "spread_pct"), number(table.loc[schemes], "seed_spread_pct")
    found = " and ".join(f"{value:.1f}" for value in own)
    between = " and ".join(f"{value:.1f}" for value in seeds)
    holds = True if (own > seeds).any() else None if (own > 0).any() else False
    return Finding(f"{found} %, between seeds {between} %", holds)


def _last(curves: pd.DataFrame) -> pd.DataFrame:
    last: pd.DataFrame = curves[curves["epoch"] == curves["epoch"].max()]
    return last


def _gamma_bits(tables: Tables, claim: Claim) -> Finding | None:
    """Whether curves have the same bits until the learning rate decays, and the order of gamma then."""
    curves = tables["gap_curves"][tables["gap_curves"]["scheme"] == claim.subject]
    if curves["gamma"].nunique() < 2 or curves["devices"].nunique() < 2:
        return None
    rate = number(curves, "learning_rate")
    before = curves[rate == rate.max()]
    early = before.groupby("epoch")["param_sha"].nunique()
    late = curves[rate < rate.max()].groupby(["epoch", "gamma"])["param_sha"].nunique()
    last = number(_last(curves), "loss").groupby(_last(curves)["gamma"]).mean()
    in_order = bool(last.is_monotonic_increasing and last.is_unique)
    n_same = int((early == 1).sum())
    found = f"{n_same} of {len(early)} epochs with equal bits before the decay, last losses "
    found += ", ".join(f"{value:.3f}" for value in last)
    return Finding(found, bool((early == 1).all() and (late == 1).all() and in_order))


def _gamma_hidden(tables: Tables, claim: Claim) -> Finding | None:
    """Whether the last losses of two gammas overlap, each over all numbers of devices."""
    curves = _last(tables["gap_curves"][tables["gap_curves"]["scheme"] == claim.subject])
    if curves["gamma"].nunique() < 2 or curves["devices"].nunique() < 2:
        return None
    ranges = number(curves, "loss").groupby(curves["gamma"]).agg(["min", "max"])
    pairs = itertools.combinations(ranges.to_numpy(), 2)
    overlapping = sum(bool(a[0] <= b[1] and b[0] <= a[1]) for a, b in pairs)
    found = ", ".join(f"{low:.3f} to {high:.3f}" for low, high in ranges.to_numpy())
    return Finding(f"last losses {found}", overlapping > 0)


ACCURACY_CHECKS: tuple[Check, ...] = (_fig9_bits, _gap_exact, _gap_spread, _gamma_bits, _gamma_hidden)
