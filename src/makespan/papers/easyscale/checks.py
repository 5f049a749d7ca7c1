"""Checks of what the paper states of accuracy: bits of Fig. 9, and what other elastic schemes end at."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from math import hypot, inf, sqrt

import pandas as pd

from makespan.claims import Check, Claim, Finding, Tables, number

# ------------------------------------------------------------------------------------------------
# Checks of what the paper states of accuracy: bits of Fig. 9, and what other elastic schemes end at.

_INCONCLUSIVE = "inconclusive (profiles coincide)"


def _rows(tables: Tables, claim: Claim, **equal: str) -> pd.DataFrame:
    """Return the rows of the table that decides a statement with these values in these columns."""
    table = tables[claim.table]
    for column, value in equal.items():
        table = table[table[column] == value]
    return table


def _bits_by_stage(tables: Tables, claim: Claim) -> Finding | None:
    """Compare a level with its row of the truth table; the subject is ``<level> <= or !=> ...`` by stage."""
    setting, *expected = claim.subject.split()
    table = _rows(tables, claim, setting=setting)
    stages = table.assign(differs=~table["equal"]).groupby(["model", "stage"], sort=False)
    counts = stages["differs"].agg(["sum", "size"])
    if set(counts.index.get_level_values("stage")) != set(range(len(expected))):
        return None
    found, wrong, silent = dict[str, list[str]](), list[str](), list[str]()
    for (model, stage), (n_different, n_steps) in zip(counts.index, counts.to_numpy(), strict=True):
        found.setdefault(model, []).append("!=" if n_different else "=")
        note = f"{model}, stage {stage}: {n_different} of {n_steps} steps differ"
        if expected[stage] == "=" and n_different:
            wrong.append(note)
        elif expected[stage] == "!=" and not n_different:
            silent.append(note)
    largest = number(table, "diff").abs().max()
    reproduced = ", ".join(f"{model} {' '.join(signs)}" for model, signs in found.items())
    notes = [f"{_INCONCLUSIVE}: {'; '.join(silent)}"] if silent else []
    hooked = sorted({name for name in table["reference"] if "hooked" in name})
    notes = [*wrong, *notes, *(f"reference {name}" for name in hooked)]
    holds = False if wrong else None if silent else True
    return Finding(f"{reproduced}; differences to {largest:.2g}", holds, "; ".join(notes))


def _exact_accuracy(tables: Tables, claim: Claim) -> Finding | None:
    """Check that no bit of a scheme depends on the number of devices."""
    table = _rows(tables, claim, scheme=claim.subject)
    if table.empty or table["devices"].nunique() < 2:
        return None
    spread = (
        number(table, "accuracy_pct")
        .groupby([table["seed"], table["class"]])
        .agg(lambda accuracies: accuracies.max() - accuracies.min())
    )
    bits = table.groupby("seed")["param_sha"].nunique()
    found = (
        f"largest spread {spread.max():g} %, {int((bits == 1).sum())} of {len(bits)} seeds with equal bits"
    )
    return Finding(found, bool((spread == 0).all() and (bits == 1).all()))


def _accuracy_spread(tables: Tables, claim: Claim) -> Finding | None:
    """Check that accuracy depends on devices more than on the seed, under at least one scheme."""
    *schemes, which = claim.subject.split()
    table = _rows(tables, claim, **{"class": which}).set_index("scheme")
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
    """Check that curves have equal bits until the learning rate decays, and then the order of gamma."""
    curves = _rows(tables, claim, scheme=claim.subject)
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
    """Check whether the last losses of two gammas overlap, each over all numbers of devices."""
    curves = _last(_rows(tables, claim, scheme=claim.subject))
    if curves["gamma"].nunique() < 2 or curves["devices"].nunique() < 2:
        return None
    ranges = number(curves, "loss").groupby(curves["gamma"]).agg(["min", "max"])
    pairs = itertools.combinations(ranges.to_numpy(), 2)
    overlapping = sum(bool(a[0] <= b[1] and b[0] <= a[1]) for a, b in pairs)
    found = ", ".join(f"{low:.3f} to {high:.3f}" for low, high in ranges.to_numpy())
    return Finding(f"last losses {found}", overlapping > 0)


# ------------------------------------------------------------------------------------------------
# Checks of what was measured of logical workers, Figs 10 to 13.
#
# The subject of a statement says what decides it, ``measured`` or ``printed`` cells, and then names models.
# A median is known up to the notch of its box plot; where a limit lies within that nothing is decided.

_NOTCH = 1.57  # inter-quartile ranges over the root of the number of values: McGill, Tukey, Larsen, 1978
_MEASURED, _OVERHEAD_CELLS = "measured", "printed"
_CONVOLUTIONS = ("shufflenetv2", "resnet50", "vgg19")
_COSTLY = (*_CONVOLUTIONS, "yolov3")
_COMPARED = ("A", "B")  # C is a control: it has the kernels that D2 has
_SHORTEST_S = 0.05
_QUIET = 0.9  # share of a core that timed processes must have had
_N_PRINTED = 8  # logical workers on a GPU in the printed cells
_FIELDS = ("value", "half")


@dataclass(frozen=True, slots=True)
class _Value:
    """A number, and how far off it may be."""

    value: float
    half: float = 0.0

    def decides(self, accepts: Callable[[float], bool]) -> bool | None:
        """Tell whether it is accepted; None if that depends on where within its spread it lies."""
        found = {accepts(self.value + sign * self.half) for sign in (-1, 0, 1)}
        return found.pop() if len(found) == 1 else None

    def over(self, other: "_Value") -> "_Value":
        """Return the ratio to another number."""
        ratio = self.value / other.value
        return _Value(ratio, ratio * hypot(self.half / self.value, other.half / other.value))


def _values(table: pd.DataFrame, column: str, spread: str) -> list[_Value]:
    """Return the numbers of a column; printed cells come without spread."""
    if spread not in table.columns:
        return [_Value(float(value)) for value in number(table, column)]
    cells = zip(*(number(table, name) for name in (column, spread, "samples")), strict=True)
    return [
        # One value says nothing of the spread.
        _Value(float(value), _NOTCH * float(iqr) / sqrt(int(count)) if int(count) > 1 else inf)
        for value, iqr, count in cells
    ]


def _median(values: Iterable[_Value]) -> _Value:
    listed = list(values)
    return _Value(
        *(float(pd.Series([getattr(value, name) for value in listed]).median()) for name in _FIELDS)
    )


def _mean(values: Iterable[_Value]) -> _Value:
    listed = list(values)
    return _Value(*(sum(getattr(value, name) for value in listed) / len(listed) for name in _FIELDS))


def _verdict(
    values: Mapping[str, _Value], accepts: Callable[[float], bool], reproduced: str
) -> Finding | None:
    """Judge values: all must be accepted, one that is not decides, and a wide spread leaves it open."""
    if not values:
        return None
    decided = {name: value.decides(accepts) for name, value in values.items()}
    if False in decided.values():
        return Finding(reproduced, False)
    wide = [
        f"{name} {value.value:.3g} +- {value.half:.2g}"
        for name, value in values.items()
        if decided[name] is None
    ]
    note = f"measurements spread across the limit: {', '.join(wide)}" if wide else ""
    return Finding(reproduced, None if wide else True, note)


def _range(values: Iterable[_Value], unit: str = "") -> str:
    listed = sorted(value.value for value in values)
    ends = [f"{listed[0]:.3g}{unit}", f"{listed[-1]:.3g}{unit}"] if listed else [""]
    return " to ".join(dict.fromkeys(ends))


def _source(claim: Claim) -> str:
    return claim.subject.split()[0]


def _named(claim: Claim) -> list[str]:
    return claim.subject.split()[1:]


def _table(tables: Tables, claim: Claim) -> pd.DataFrame:
    """Return the measured table of a statement, or its printed cells under the same names."""
    if _source(claim) == _MEASURED:
        return tables[claim.table]
    cells = tables[f"{claim.table}_published"]
    return cells.rename(columns=lambda name: str(name).removeprefix("published_"))


def _on_quiet_cores(check: Check) -> Check:
    """Make a check of times undecided where something else used the cores meanwhile."""

    @wraps(check)
    def guarded(tables: Tables, claim: Claim) -> Finding | None:
        found = check(tables, claim)
        if found is None or _source(claim) == _OVERHEAD_CELLS:
            return found
        share = float(number(tables[claim.table], "cpu_share").min())
        if not share < _QUIET:
            return found
        why = f"timed processes had {100 * share:.0f} % of a core, because something else ran"
        return Finding(found.reproduced, None, why)

    return guarded


# --- Fig. 10 --------------------------------------------------------------------------------------------


def _sharing(tables: Tables, claim: Claim, method: str) -> dict[str, pd.DataFrame]:
    """Return the rows of a method by model, in the order of k, with ``is_over``."""
    table = _table(tables, claim)
    own = table[table["method"] == method].assign(k=lambda rows: number(rows, "k"))
    over = number(own, "micro_batch_s").isna()  # printed or measured, no time means out of memory
    grouped = own.assign(is_over=over).sort_values("k").groupby("model", sort=False)
    return {str(model): rows.reset_index(drop=True) for model, rows in grouped}


def _peaks(rows: pd.DataFrame) -> dict[int, _Value]:
    """Return the memory of those that fit, by how many share the device; printed cells have no range."""
    fits, spread = rows[~rows["is_over"]], "peak_mem_range_mib"
    halves = number(fits, spread) / 2 if spread in fits else pd.Series(0.0, fits.index)
    cells = zip(fits["k"], number(fits, "peak_mem_mib"), halves, strict=True)
    return {int(k): _Value(float(peak), float(half)) for k, peak, half in cells}


def _memory_of_sharing(tables: Tables, claim: Claim) -> Finding | None:
    found = {}
    for model, rows in _sharing(tables, claim, "easyscale").items():
        memory = list(_peaks(rows).values())
        if len(memory) > 1:
            found[model] = memory[-1].over(memory[0])
    return _verdict(found, lambda ratio: ratio <= claim.limit, _range(found.values(), "x"))


def _memory_of_packing(tables: Tables, claim: Claim) -> Finding | None:
    found = {}
    for model, rows in _sharing(tables, claim, "packing").items():
        shares = [memory.over(_Value(k)) for k, memory in _peaks(rows).items()]
        if len(shares) > 1:
            found[model] = min(shares[1:], key=lambda share: share.value).over(shares[0])
    return _verdict(found, lambda ratio: ratio >= claim.limit, _range(found.values(), "x k"))


def _out_of_memory(tables: Tables, claim: Claim) -> Finding | None:
    (model,) = _named(claim)
    packing, shared = (_sharing(tables, claim, method).get(model) for method in ("packing", "easyscale"))
    if packing is None or shared is None:
        return None
    largest = int(packing["k"].max())
    if shared["is_over"].any():
        return Finding(f"EasyScale from {int(shared['k'][shared['is_over']].min())}", False)
    if not packing["is_over"].any():
        return Finding(
            "", None, f"packed processes fit the device up to {largest}, the most that was measured"
        )
    first = int(packing["k"][packing["is_over"]].min())
    note = "" if first < largest else "packed processes exceed it at the largest number that was tried alone"
    return Finding(f"packing from {first}, EasyScale never up to {largest}", None if note else True, note)


def _micro_batches(rows: pd.DataFrame) -> dict[int, _Value]:
    fits = rows[~rows["is_over"]]
    return dict(zip(fits["k"].astype(int), _values(fits, "micro_batch_s", "micro_batch_iqr_s"), strict=True))


@_on_quiet_cores
def _throughput_of_sharing(tables: Tables, claim: Claim) -> Finding | None:
    packing, found = _sharing(tables, claim, "packing"), {}
    for model, rows in _sharing(tables, claim, "easyscale").items():
        packed = _micro_batches(packing[model])
        for k, own in _micro_batches(rows).items():
            if k in packed:
                found[f"{model} k={k}"] = packed[k].over(own)
    return _verdict(found, lambda ratio: ratio >= claim.limit, _range(found.values(), "x"))


@_on_quiet_cores
def _flat_throughput(tables: Tables, claim: Claim) -> Finding | None:
    found = {}
    for model, rows in _sharing(tables, claim, "easyscale").items():
        several = sorted(
            (value for k, value in _micro_batches(rows).items() if k >= 2), key=lambda value: value.value
        )
        if len(several) > 1:
            found[model] = several[-1].over(several[0])
    return _verdict(found, lambda ratio: ratio <= claim.limit, _range(found.values(), "x"))


# --- Fig. 11 --------------------------------------------------------------------------------------------


def _switching(tables: Tables, of: Claim) -> tuple[dict[str, _Value], float]:
    """Return time with over time without context switches by model, and the shortest micro-batch [s]."""
    table = _table(tables, of)
    disable = number(table, "disable_s")
    if _source(of) == _OVERHEAD_CELLS:
        table = table.assign(ratio=number(table, "enable_s") / disable)
    return dict(zip(table["model"], _values(table, "ratio", "ratio_iqr"), strict=True)), float(disable.min())


def _long_enough(claim: Claim, shortest_s: float, found: Finding | None) -> Finding | None:
    if found is None or _source(claim) == _OVERHEAD_CELLS or shortest_s >= _SHORTEST_S:
        return found
    what = f"micro-batches of {1e3 * shortest_s:.0f} ms; only {1e3 * _SHORTEST_S:.0f} ms or more decide"
    return Finding(found.reproduced, None, what)


@_on_quiet_cores
def _switch_median(tables: Tables, claim: Claim) -> Finding | None:
    ratios, shortest_s = _switching(tables, claim)
    if not ratios:
        return None
    median = _median(ratios.values())
    found = _verdict({"median": median}, lambda ratio: ratio <= claim.limit, f"{median.value:.4f}")
    return _long_enough(claim, shortest_s, found)


@_on_quiet_cores
def _switch_largest(tables: Tables, claim: Claim) -> Finding | None:
    ratios, shortest_s = _switching(tables, claim)
    shown = f"{max((ratio.value for ratio in ratios.values()), default=0.0):.4f}"
    return _long_enough(claim, shortest_s, _verdict(ratios, lambda ratio: ratio <= claim.limit, shown))


# --- Fig. 12 --------------------------------------------------------------------------------------------


def _levels(tables: Tables, claim: Claim, level: str) -> dict[str, list[_Value]]:
    """Return time under a level over the baseline by model, on all GPUs that are compared."""
    table = _table(tables, claim)
    if _source(claim) == _OVERHEAD_CELLS:
        table = table.assign(**{f"{level}_norm": number(table, f"{level}_s") / number(table, "baseline_s")})
    else:
        table = table[table["device"].isin(_COMPARED)]
    found: dict[str, list[_Value]] = {}
    values = _values(table, f"{level}_norm", f"{level}_norm_iqr")
    for model, value in zip(table["model"], values, strict=True):
        found.setdefault(str(model), []).append(value)
    return found


def _of_kind(found: Mapping[str, list[_Value]], *, convolutions: bool) -> list[_Value]:
    """Return the values of models of convolutions, or of those without any."""
    kept = [name for name in found if (name in _CONVOLUTIONS if convolutions else name not in _COSTLY)]
    return [value for name in kept for value in found[name]]


@_on_quiet_cores
def _d1_nearly_free(tables: Tables, claim: Claim) -> Finding | None:
    values = [value for of_model in _levels(tables, claim, "d1").values() for value in of_model]
    if not values:
        return None
    median = _median(values)
    return _verdict({"median": median}, lambda ratio: ratio <= claim.limit, f"{median.value:.3f}")


@_on_quiet_cores
def _d2_costly(tables: Tables, claim: Claim) -> Finding | None:
    values = _of_kind(_levels(tables, claim, "d1d2"), convolutions=True)
    if not values:
        return None
    mean = _mean(values)
    return _verdict({"mean": mean}, lambda ratio: ratio > claim.limit, f"{mean.value:.2f}x")


@_on_quiet_cores
def _d2_order(tables: Tables, claim: Claim) -> Finding | None:
    levels = _levels(tables, claim, "d1d2")
    both = [_of_kind(levels, convolutions=convolutions) for convolutions in (True, False)]
    if not all(both):
        return None
    costly, others = map(_mean, both)
    text = f"{costly.value:.2f}x and {others.value:.2f}x"
    return _verdict({"ratio": costly.over(others)}, lambda ratio: ratio > 1.0, text)


def _d2_free_for_others(tables: Tables, claim: Claim) -> Finding | None:
    values = _of_kind(_levels(tables, claim, "d1d2"), convolutions=False)
    if not values:
        return None
    mean = _mean(values)
    if _source(claim) == _MEASURED:
        why = "kernels that every kind of CPU has lack vector instructions and slow down all models"
        return Finding(f"{mean.value:.2f}x", None, why)
    return _verdict({"mean": mean}, lambda ratio: ratio <= claim.limit, f"{mean.value:.3f}x")


def _d2_scan(tables: Tables, claim: Claim) -> Finding | None:
    table = _table(tables, claim)
    cheap = dict(zip(table["model"], table["d2_cheap"].astype(str).str.lower() == "true", strict=True))
    wrong = [model for model, is_cheap in cheap.items() if is_cheap == (model in _COSTLY)]
    if not cheap:
        return None
    return Finding(f"{len(cheap) - len(wrong)} of {len(cheap)} models", not wrong, ", ".join(wrong))


# --- Fig. 13 --------------------------------------------------------------------------------------------


def _copying(tables: Tables, of: Claim) -> tuple[dict[str, tuple[_Value, _Value]], int, bool]:
    """Return first and last logical workers over a stock step by model, how many, and if cores sufficed."""
    table = _table(tables, of)
    n, has_cores = _N_PRINTED, True
    if _source(of) == _OVERHEAD_CELLS:
        ddp = number(table, "ddp_s")
        norms = {f"{name}_norm": number(table, f"est_{name}_s") / ddp for name in ("first", "last")}
        table = table.assign(**norms)
    elif len(table):
        n = int(number(table, "logical_workers").max())
        has_cores = bool((number(table, "cores") >= number(table, "logical_workers")).all())
    pairs = zip(
        *(_values(table, f"{name}_norm", f"{name}_norm_iqr") for name in ("first", "last")), strict=True
    )
    return dict(zip(table["model"], pairs, strict=True)), n, has_cores


@_on_quiet_cores
def _last_synchronises(tables: Tables, claim: Claim) -> Finding | None:
    pairs, _, _ = _copying(tables, claim)
    found = {model: last.over(first) for model, (first, last) in pairs.items()}
    return _verdict(found, lambda ratio: ratio > 1.0, _range(found.values(), "x"))


@_on_quiet_cores
def _below_stock(tables: Tables, claim: Claim) -> Finding | None:
    pairs, n, has_cores = _copying(tables, claim)
    if not pairs:
        return None
    mean = _mean(_mean([first] * (n - 1) + [last]) for first, last in pairs.values())
    if not has_cores:
        why = "there are fewer cores than stock processes, which then wait for each other"
        return Finding(f"{mean.value:.3f}x", None, why)
    return _verdict({"mean": mean}, lambda ratio: ratio < claim.limit, f"{mean.value:.3f}x")


def _last_above_stock(tables: Tables, claim: Claim) -> Finding | None:
    pairs, _, _ = _copying(tables, claim)
    above = [model for model, (_, last) in pairs.items() if last.value > 1.0]
    return Finding(", ".join(above), set(above) == set(_named(claim))) if pairs else None


# ------------------------------------------------------------------------------------------------
# The ledger of the paper: how each statement is checked against result tables.
#
# The subject of a statement names policies, in the order that it states, shortest first.

_JCT, _MAKESPAN = "avg_jct_s", "makespan_from_zero_s"


def _order_in_all_settings(tables: Tables, claim: Claim) -> Finding | None:
    policies, exceptions, n_settings = claim.subject.split(), [], 0
    for key, rows in tables[claim.table].groupby(["parameter", "value"], sort=False):
        if not set(policies) <= set(rows["policy"]):
            return None
        n_settings += 1
        for metric, column, may_tie in (("JCT", _JCT, False), ("makespan", _MAKESPAN, True)):
            by_policy = dict(zip(rows["policy"], number(rows, column), strict=True))
            values = [float(by_policy[name]) for name in policies]
            grows = [earlier < later for earlier, later in itertools.pairwise(values)]
            # The makespans of the first two policies may be equal.
            grows[0] |= may_tie and values[0] == values[1]
            if not all(grows):
                exceptions.append(f"not the {metric} with {' '.join(map(str, key)).strip()}")
    found = f"{2 * n_settings - len(exceptions)} of {2 * n_settings} orders"
    return Finding(found, not exceptions and n_settings > 0, ", ".join(exceptions))
