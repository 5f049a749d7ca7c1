"""Judge predicted steps against published rows: the protocol, its baselines, and tables of the errors.

A group is source, device and precision with at least six rows. Nothing that is judged was fitted: factors
are fitted to the rows of all other sources, then refined by a few rows of the group, drawn by plan, since
most plans occur in several releases of the software. Ten draws have written seeds. Beside each error stand
those of two baselines from the same rows: one utilisation for all, and one scale on the prediction.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from makespan.planning.factors import (
    Z90,
    Knowledge,
    calibrate_rows,
    fit_knowledge,
    knowledge,
    terms_of,
    uncalibrated,
)
from makespan.planning.memory import fits, memory_table
from makespan.planning.rows import Measured, Refused
from makespan.planning.steptime import Grid
from makespan.tables import csv_text, parse_csv

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
SEEDS = tuple(range(1, 11))
"""Seeds of the draws of the protocol."""
DRAWN = (1, 3, 5)
"""Rows drawn for calibration, besides none."""
LEAST_ROWS = 6
"""Rows that a group needs to be judged."""
ALLOWED_GROWTH = 0.005
"""How much larger than recorded an error may be [1], half a percentage point."""
_FOLDS = 5


@dataclass(frozen=True, slots=True)
class _Group:
    logs: Array
    terms: Array
    step_s: Array
    mfu: Array
    plans: NDArray[np.str_]
    models: NDArray[np.str_]

    @classmethod
    def of(cls, rows: Sequence[Measured], terms: Array, known: Knowledge) -> "_Group":
        return cls(
            logs=np.array([known.logs(row.stack.family, row.cluster.gpu.kind, row.training) for row in rows]),
            terms=terms,
            step_s=np.array([row.step_s for row in rows]),
            mfu=np.array([row.mfu for row in rows]),
            plans=np.array([row.plan for row in rows]),
            models=np.array([row.training.model.name for row in rows]),
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
    """Judge predictions by the protocol; rows of a single source are predicted by the factors that ship.

    Returns
    -------
    pandas.DataFrame
        One row per group and number of calibration rows (0, 1, 3, 5; -1 for five folds by plan), with the
        mean relative errors [1] of prediction, constant utilisation and scale, the ratio of predicted to
        measured times, and the share of rows inside the interval of 90 %.
    """
    all_terms = terms_of(rows)
    fitted = _fits(rows, all_terms)
    members: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(row.group, []).append(i)
    found: list[dict[str, Any]] = []
    for name, at in sorted(members.items()):
        if len(at) < LEAST_ROWS:
            continue
        group = _Group.of([rows[i] for i in at], all_terms[at], fitted(rows[at[0]].source))

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


def _fits(rows: Sequence[Measured], terms: Array) -> Callable[[str], Knowledge]:
    """Return a function from a source to the factors fitted to the rows of all other sources."""

    @cache
    def fitted(source: str) -> Knowledge:
        others = [i for i, row in enumerate(rows) if row.source != source]
        # Rows of one source alone, a user's own, are predicted by what ships.
        return fit_knowledge([rows[i] for i in others], terms[others]) if others else knowledge()

    return fitted


def predictions(rows: Sequence[Measured]) -> pd.DataFrame:
    """Predict every row from the rows of all other sources.

    Returns
    -------
    pandas.DataFrame
        One row per measured row, in the same order: group, source, device, precision and model, measured
        and predicted time of a step with its interval of 90 % [s], and measured utilisation [1].
    """
    terms = terms_of(rows)
    fitted, prior = _fits(rows, terms), uncalibrated()
    found = []
    for row, ideal in zip(rows, terms, strict=True):
        kind = row.cluster.gpu.kind
        parts_s = prior.parts_s(fitted(row.source).logs(row.stack.family, kind, row.training), ideal[None, :])
        step_s, spread = float(parts_s.sum()), float(prior.spread(parts_s)[0])
        found.append(
            {
                "group": row.group,
                "source": row.source,
                "device": kind,
                "precision": row.training.precision,
                "model": row.training.model.name,
                "n_gpus": row.cluster.n_gpus,
                "measured_step_s": row.step_s,
                "predicted_step_s": step_s,
                "low_step_s": step_s * math.exp(-Z90 * spread),
                "high_step_s": step_s * math.exp(Z90 * spread),
                "mfu": row.mfu,
            }
        )
    return pd.DataFrame(found)


def judge_memory(rows: Sequence[Measured]) -> pd.DataFrame:
    """Judge the memory that is predicted for rows, all of which ran.

    Returns
    -------
    pandas.DataFrame
        One row per source: its rows, how many of them are called impossible, and how many of these do not
        say what they compute again; how many state their memory, of which kind, and the mean signed and
        mean absolute error [1] of these, NaN without any.
    """
    found: dict[str, list[tuple[Measured, float, bool]]] = {}
    for row in rows:
        table = memory_table(row.training, Grid.of([row.layout]), row.stack)
        possible = bool(fits(table, row.cluster)[0])
        found.setdefault(row.source, []).append((row, float(table.sum()), possible))
    lines = []
    for source, several in sorted(found.items()):
        off = [predicted / row.memory_bytes - 1 for row, predicted, _ in several if row.memory_bytes]
        impossible = [row for row, _, possible in several if not possible]
        lines.append(
            {
                "source": source,
                "rows": len(several),
                "impossible": len(impossible),
                "impossible_unsaid": sum(row.recomputes_unsaid for row in impossible),
                "stated": len(off),
                "kind": several[0][0].memory_kind if off else "",
                "signed_error": float(np.mean(off)) if off else math.nan,
                "error": float(np.mean(np.abs(off))) if off else math.nan,
            }
        )
    return pd.DataFrame(lines)


def recorded_errors() -> pd.DataFrame:
    """Return the errors of this release, as `judge` found them when its factors were fitted."""
    content = resources.files("makespan.planning").joinpath("presets/judged.csv").read_bytes()
    return cast(pd.DataFrame, parse_csv(content, "judged.csv", "recorded errors"))


def recorded_text(table: pd.DataFrame) -> str:
    """Return errors as the CSV that `recorded_errors` reads, six digits each."""
    return csv_text(table.map(lambda cell: float(f"{cell:.6g}") if isinstance(cell, float) else cell))


def growth(table: pd.DataFrame, recorded: pd.DataFrame) -> list[str]:
    """Say which errors are larger than recorded by more than `ALLOWED_GROWTH`, a line each.

    Errors are compared by group and number of drawn rows, and in the mean over groups. A group that is
    recorded and not judged is a line too, since old rows are kept.
    """
    now, known = (_errors_of(one) for one in (table, recorded))
    lines = []
    for (name, drawn), before in known.items():
        where = f"{name}, {_DRAWS[drawn]}"
        if (name, drawn) not in now:
            lines.append(f"{where}: an error of {before:.1%} is recorded, but it is not judged")
        elif now[name, drawn] > before + ALLOWED_GROWTH:
            lines.append(f"{where}: error {now[name, drawn]:.1%}, recorded {before:.1%}")
    return lines


def _errors_of(table: pd.DataFrame) -> dict[tuple[str, int], float]:
    """Return errors by group and number of drawn rows, and their means over groups."""
    means = table.groupby("drawn", as_index=False)["error"].mean().assign(group="mean over groups")
    every = pd.concat([table, means])
    keys = zip(every["group"].astype(str), every["drawn"].astype(int), strict=True)
    return dict(zip(keys, every["error"].astype(float), strict=True))


def _errors(group: _Group, taken: list[int], rest: Indices) -> dict[str, float]:
    """Return the errors on some rows, after calibration by others."""
    measured, utilisation = group.step_s[rest], group.mfu[rest]
    known = uncalibrated()
    prior_s = known.parts_s(group.logs, group.terms).sum(axis=1)
    if taken:
        known = calibrate_rows(group.logs[taken], group.terms[taken], group.step_s[taken])
    parts_s = known.parts_s(group.logs[rest], group.terms[rest])
    predicted = parts_s.sum(axis=1)
    spread = known.spread(parts_s, np.isin(group.models[rest], group.models[taken]))
    inside = np.abs(np.log(predicted / measured)) <= Z90 * spread
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
    lines += ["", "Memory of rows, all of which ran:"]
    for one in judge_memory(rows).to_dict("records"):
        text = f"  {one['source']}: {one['impossible']} of {one['rows']} called impossible"
        if one["impossible_unsaid"]:
            text += f", {one['impossible_unsaid']} of them without a word on what they compute again"
        if one["stated"]:
            text += (
                f"; {one['stated']} state {one['kind']} memory, predicted with an error of "
                f"{one['signed_error']:+.1%} in the mean, {one['error']:.1%} in size"
            )
        lines.append(text)
    for title, counts in (("Assumed, where rows do not say:", assumed), ("Not used:", reasons)):
        lines += ["", title] if counts else []
        lines += [f"  {count:>4}  {source}: {text}" for (source, text), count in sorted(counts.items())]
    return "\n".join(lines)
