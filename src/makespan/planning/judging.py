"""How well steps are predicted: the protocol, its baselines, and tables of what came out.

A group is source, device and precision with at least six rows. Nothing that is judged was fitted: factors
are fitted to the rows of all other sources, then refined by a few rows of the group, drawn by plan, since
most plans occur in several releases of the software. Ten draws have written seeds. Beside each error stand
those of two baselines from the same rows: one utilisation for all, and one scale on the prediction.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from makespan.planning.factors import Knowledge, calibrate_rows, fit_knowledge, terms_of, uncalibrated
from makespan.planning.rows import Measured, Refused

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
SEEDS = tuple(range(1, 11))
"""Seeds of the draws of the protocol."""
DRAWN = (1, 3, 5)
"""Rows drawn for calibration, besides none."""
LEAST_ROWS = 6
_FOLDS = 5
_Z90 = 1.645  # half width of an interval of 90 %, in spreads


@dataclass(frozen=True, slots=True)
class _Group:
    logs: Array
    terms: Array
    step_s: Array
    mfu: Array
    plans: NDArray[np.str_]

    @classmethod
    def of(cls, rows: Sequence[Measured], terms: Array, known: Knowledge) -> "_Group":
        return cls(
            logs=np.array(
                [known.logs(row.stack.family, row.machines.device.name, row.training) for row in rows]
            ),
            terms=terms,
            step_s=np.array([row.step_s for row in rows]),
            mfu=np.array([row.mfu for row in rows]),
            plans=np.array([row.plan for row in rows]),
        )

    def draw(self, k: int, seed: int) -> tuple[list[int], Indices]:
        """Return ``k`` rows of different plans, and all rows of the other plans."""
        rng = np.random.default_rng(seed)
        plans = rng.permutation(np.unique(self.plans))
        if len(plans) <= k:
            return [], np.array([], dtype=np.intp)
        taken = [int(rng.choice(np.flatnonzero(self.plans == plan))) for plan in plans[:k]]
        return taken, np.flatnonzero(~np.isin(self.plans, plans[:k]))

    def folds(self, seed: int) -> list[tuple[list[int], Indices]]:
        """Return the rows of the other folds, and those of one fold, for each; folds divide plans."""
        plans = np.random.default_rng(seed).permutation(np.unique(self.plans))
        parts = np.array_split(plans, min(_FOLDS, len(plans)))
        chosen = [np.isin(self.plans, part) for part in parts]
        return [(list(np.flatnonzero(~one)), np.flatnonzero(one)) for one in chosen if not one.all()]


def judge(rows: Sequence[Measured], seeds: Sequence[int] = SEEDS) -> pd.DataFrame:
    """Judge predictions by the protocol.

    Returns
    -------
    pandas.DataFrame
        One row per group and number of calibration rows (0, 1, 3, 5; -1 for five folds by plan), with the
        mean relative errors [1] of prediction, constant utilisation and scale, the ratio of predicted to
        measured times, and the share of rows inside the interval of 90 %.
    """
    all_terms = terms_of(rows)
    members: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(row.group, []).append(i)
    found: list[dict[str, Any]] = []
    for name, at in sorted(members.items()):
        if len(at) < LEAST_ROWS:
            continue
        others = [i for i, row in enumerate(rows) if row.source != rows[at[0]].source]
        known = fit_knowledge([rows[i] for i in others], all_terms[others])
        group = _Group.of([rows[i] for i in at], all_terms[at], known)

        def add(drawn: int, results: list[dict[str, float]], name: str = name, size: int = len(at)) -> None:
            if results:
                mean = {key: float(np.mean([one[key] for one in results])) for key in results[0]}
                found.append({"group": name, "rows": size, "drawn": drawn, **mean})

        add(0, [_errors(group, [], np.arange(len(at)))])
        for k in DRAWN:
            draws = [group.draw(k, seed) for seed in seeds]
            add(k, [_errors(group, taken, rest) for taken, rest in draws if len(rest)])
        folds = [fold for seed in seeds for fold in group.folds(seed)]
        add(-1, [_errors(group, taken, rest) for taken, rest in folds])
    return pd.DataFrame(found)


def _errors(group: _Group, taken: list[int], rest: Indices) -> dict[str, float]:
    """Return the errors on some rows, after calibration by others."""
    measured, utilisation = group.step_s[rest], group.mfu[rest]
    known = uncalibrated()
    prior_s = known.parts_s(group.logs, group.terms).sum(axis=1)
    if taken:
        known = calibrate_rows(group.logs[taken], group.terms[taken], group.step_s[taken])
    parts_s = known.parts_s(group.logs[rest], group.terms[rest])
    predicted = parts_s.sum(axis=1)
    inside = np.abs(np.log(predicted / measured)) <= _Z90 * known.spread(parts_s)
    result = {
        "error": float(np.abs(predicted / measured - 1).mean()),
        "bias": float(np.exp(np.log(predicted / measured).mean())),
        "covered": float(inside.mean()),
        "utilisation_error": float("nan"),
        "scale_error": float("nan"),
    }
    if taken:
        constant = np.exp(np.log(group.mfu[taken]).mean())
        scale = np.exp(np.median(np.log(group.step_s[taken] / prior_s[taken])))
        result["utilisation_error"] = float(np.abs(utilisation / constant - 1).mean())
        result["scale_error"] = float(np.abs(prior_s[rest] * scale / measured - 1).mean())
    return result


_DRAWS = {0: "no row", 1: "1 row", 3: "3 rows", 5: "5 rows", -1: "5 folds"}
_MEANS = {
    "error": ("**mean over groups**", ".1%"),
    "scale_error": ("baseline: one scale", ".1%"),
    "utilisation_error": ("baseline: one utilisation", ".1%"),
    "bias": ("predicted over measured", ".3f"),
    "covered": ("inside the interval of 90 %", ".1%"),
}


def judged_cells(table: pd.DataFrame) -> list[list[str]]:
    """Return errors by group and number of drawn rows, then means and baselines, as rows of texts."""

    def texts(values: dict[Any, float], form: str) -> list[str]:
        return ["-" if math.isnan(values.get(k, math.nan)) else f"{values[k]:{form}}" for k in _DRAWS]

    sizes = table.groupby("group")["rows"].first().to_dict()
    wide = table.pivot(index="group", columns="drawn", values="error")
    lines = [["group", "rows", *_DRAWS.values()]]
    lines += [
        [str(name), str(sizes[name]), *texts(values.to_dict(), ".1%")] for name, values in wide.iterrows()
    ]
    means = table.groupby("drawn")[list(_MEANS)].mean()
    return lines + [
        [title, "", *texts(means[column].to_dict(), form)] for column, (title, form) in _MEANS.items()
    ]


def judged_table(table: pd.DataFrame) -> str:
    """Return `judged_cells` as a table of Markdown."""
    head, *rest = (f"| {' | '.join(cells)} |" for cells in judged_cells(table))
    return "\n".join([head, "| --- |" + " ---: |" * (len(_DRAWS) + 1), *rest]) + "\n"


def judged_text(table: pd.DataFrame, rows: Sequence[Measured], refused: Sequence[Refused]) -> str:
    """Return what was judged as lines: errors, baselines, what was assumed, and why rows were refused."""
    lines = [
        f"{len(rows)} rows are used, {len(refused)} are not. Mean relative error of a step, by rows drawn:",
        "",
    ]
    lines += [
        f"{name.strip('*'):<32}{size:>6}" + "".join(f"{cell:>9}" for cell in cells)
        for name, size, *cells in judged_cells(table)
    ]
    assumed = Counter((row.source, what) for row in rows for what in row.assumed)
    reasons = Counter((one.source, one.reason) for one in refused)
    for title, counts in (("Assumed, where rows do not say:", assumed), ("Not used:", reasons)):
        lines += ["", title] if counts else []
        lines += [f"  {count:>4}  {source}: {text}" for (source, text), count in sorted(counts.items())]
    return "\n".join(lines)
