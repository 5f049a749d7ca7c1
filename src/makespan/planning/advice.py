"""Judge a user's measured rows: the effect of each, contradictions among them, and what to measure next."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from makespan.arguments import check_range, typed
from makespan.errors import InfeasiblePlanError, InputError
from makespan.planning.factors import Z90
from makespan.planning.layout import Layout
from makespan.planning.pricing import MeasuredStep, Pricer, calibrated_by, feasible_table, plan
from makespan.planning.steptime import Grid
from makespan.units import GIB

_CONTRADICTS = 2.5  # spreads from which a row contradicts the others


@dataclass(frozen=True, slots=True)
class Advice:
    """Effect of measured rows on predictions, and layouts to measure next.

    Parameters
    ----------
    lessons
        One row per measured row: ``row`` (counted from 1), ``n_gpus``, ``layout``, ``step_s`` as measured;
        ``others_s``, predicted from the other rows, with its interval ``others_low_s`` and
        ``others_high_s``; ``spreads``, by how many spreads of that prediction the row is off; ``narrowed``,
        the share by which the row narrows the intervals of ties, and ``moved``, by how much it moves their
        predictions, a mean of absolute changes [1].
    contradicting
        Rows that are 2.5 spreads off or more, the furthest first; each is left out for those after it.
    ties
        Layouts that only a measurement can tell apart.
    half_width_before, half_width
        Mean half width of their intervals without and with the rows [1].
    to_measure
        One row per layout to measure, in this order: ``layout``, its predicted ``step_s``, ``memory_gib``,
        and the expected ``spread`` of a comparison of two ties after it and those before it [1].
    spread
        Spread of a comparison of two ties now [1].
    """

    lessons: pd.DataFrame
    contradicting: tuple[int, ...]
    ties: tuple[Layout, ...]
    half_width_before: float
    half_width: float
    to_measure: pd.DataFrame
    spread: float


@typed
def advise(pricer: Pricer, measured: Sequence[MeasuredStep], n_next: int = 3) -> Advice:
    """Report the effect of each measured row, rows that contradict the others, and layouts to measure next.

    Each row is left out in turn. The layout to measure next is the tie whose measurement is expected to lower
    the mean variance of comparisons of two ties most, in the normal approximation at the mode; layouts
    after the first assume that those before them are measured.

    Parameters
    ----------
    pricer
        Pricer of the run; rows that have refined it before are not used.
    measured
        Measured steps, as `read_measured` returns them.
    n_next
        The most layouts to measure.

    Raises
    ------
    InfeasiblePlanError
        No layout of the run fits.
    """
    check_range("n_next", n_next)
    refined = calibrated_by(pricer, measured)
    found = plan(refined, 1)
    grid = Grid.of(found.ties)
    with_all_s = refined.parts_s(grid).sum(axis=1)
    lessons = []
    for at, (_, layout, where, step_s) in enumerate(measured):
        without = calibrated_by(pricer, [*measured[:at], *measured[at + 1 :]])
        others_s, spread, spreads = _off(without, measured[at])
        lessons.append(
            {
                "row": at + 1,
                "n_gpus": where.n_gpus,
                "layout": layout.text,
                "step_s": step_s,
                "others_s": others_s,
                "others_low_s": others_s * math.exp(-Z90 * spread),
                "others_high_s": others_s * math.exp(Z90 * spread),
                "spreads": spreads,
                "narrowed": 1 - _half_width(refined, grid) / _half_width(without, grid),
                "moved": float(np.abs(with_all_s / without.parts_s(grid).sum(axis=1) - 1).mean()),
            }
        )
    joint = refined.joint(found.ties)
    to_measure: list[dict[str, Any]] = []
    after = joint
    is_open = np.array([len(found.ties) > 1 and refined.measured_s(one) is None for one in found.ties])
    while is_open.any() and len(to_measure) < n_next:
        falls = np.where(is_open, after.expected_falls(), -np.inf)
        best = int(np.argmax(np.round(falls, 9)))  # equal falls do not depend on the processor
        is_open[best] = False
        after = after.given(best)
        one = refined.price(found.ties[best])
        to_measure.append(
            {
                "layout": one.layout.text,
                "step_s": one.step_s,
                "memory_gib": one.total_memory_bytes / GIB,
                "spread": math.sqrt(after.comparison_variance),
            }
        )
    return Advice(
        lessons=pd.DataFrame(lessons),
        contradicting=contradicting_rows(pricer, measured),
        ties=found.ties,
        half_width_before=_half_width(calibrated_by(pricer, []), grid),
        half_width=_half_width(refined, grid),
        to_measure=pd.DataFrame(to_measure),
        spread=math.sqrt(joint.comparison_variance),
    )


@typed
def contradicting_rows(pricer: Pricer, measured: Sequence[MeasuredStep]) -> tuple[int, ...]:
    """Return the rows, counted from 1, that are 2.5 spreads off what the others predict, the furthest first.

    The furthest row is left out before the next one is looked for, since it makes good rows look bad. Of two
    rows that contradict each other both are returned: nothing says which is wrong.
    """
    left, found = list(range(len(measured))), list[int]()
    while left:
        spreads = [
            abs(_off(calibrated_by(pricer, [measured[i] for i in left if i != at]), measured[at])[2])
            for at in left
        ]
        worst = int(np.argmax(spreads))
        if spreads[worst] < _CONTRADICTS:
            break
        if len(left) == 2:
            return (*found, *(at + 1 for at in left))
        found.append(left.pop(worst) + 1)
    return tuple(found)


def _off(pricer: Pricer, row: MeasuredStep) -> tuple[float, float, float]:
    """Return the predicted step of a row [s], its spread, and by how many spreads the row is off."""
    parts_s = pricer.steps_of([row])
    predicted_s = float(parts_s.sum())
    known = pricer.calibrated.with_terms(parts_s.shape[1])
    spread = float(known.spread(parts_s, pricer.has_rows(row[0]))[0])
    return predicted_s, spread, math.log(row[3] / predicted_s) / spread


def _half_width(pricer: Pricer, grid: Grid) -> float:
    """Return the mean half width of the intervals of layouts [1]."""
    return float(np.expm1(Z90 * pricer.spread(pricer.parts_s(grid))).mean())


@typed
def validate_rows(
    pricer: Pricer, measured: Sequence[MeasuredStep], memory_gib: Sequence[float] = ()
) -> pd.DataFrame:
    """Compare predictions with measured rows.

    Parameters
    ----------
    pricer, measured
        Pricer of the run, and measured steps, as `read_measured` returns them.
    memory_gib
        Memory that was allocated in each row [GiB], NaN if unknown, as `read_memory` returns it.

    Returns
    -------
    pandas.DataFrame
        One row per measured row: ``row`` (counted from 1), ``n_gpus``, ``layout``, ``step_s``, and the
        predicted step with its relative error [1] three times: without any row (``before_s``,
        ``before_error``), from all rows (``after_s``, ``after_error``), and from the rows of other layouts
        (``left_out_s``, ``left_out_error``), with ``is_inside`` if the row is in the interval of 90 % of
        the last. If any memory is known, also ``memory_gib`` and ``counted_gib``, the count of what programs
        allocate.
    """
    if len(memory_gib) not in (0, len(measured)):
        raise InputError(
            f"memory_gib has {len(memory_gib)} values for {len(measured)} measured rows; expected one each"
        )
    before, after = calibrated_by(pricer, []), calibrated_by(pricer, measured)
    rows = []
    for at, row in enumerate(measured):
        run, layout, where, step_s = row
        # Repeated measurements of a layout would predict each other.
        others = [one for one in measured if one[:2] != (run, layout) or one[2].n_gpus != where.n_gpus]
        before_s, after_s = _off(before, row)[0], _off(after, row)[0]
        left_out_s, _, spreads = _off(calibrated_by(pricer, others), row)
        rows.append(
            {
                "row": at + 1,
                "n_gpus": where.n_gpus,
                "layout": layout.text,
                "step_s": step_s,
                "before_s": before_s,
                "before_error": before_s / step_s - 1,
                "after_s": after_s,
                "after_error": after_s / step_s - 1,
                "left_out_s": left_out_s,
                "left_out_error": left_out_s / step_s - 1,
                "is_inside": abs(spreads) <= Z90,
            }
        )
    table = pd.DataFrame(rows)
    if not np.isnan(memory_gib).all():
        table["memory_gib"] = memory_gib
        table["counted_gib"] = [_allocated_gib(pricer, row) for row in measured]
    return table


def _allocated_gib(pricer: Pricer, row: MeasuredStep) -> float:
    """Return the memory that programs allocate in a measured row [GiB]."""
    run, layout, where, _ = row
    one = replace(pricer, training=run, cluster=where).price(layout)
    return (one.total_memory_bytes - one.memory_bytes["reserve"]) / GIB


@typed
def frontier(pricer: Pricer) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return throughput against the number of devices, and memory against time.

    Returns
    -------
    tuple
        One row per number of devices on which the run has a layout that fits, the powers of two below that
        of the cluster and its own: ``n_gpus``, ``layout``, ``step_s``, and ``tokens_per_s`` of all devices
        with the ends ``low`` and ``high`` of its interval of 90 %. And the feasible layouts of the cluster,
        as `feasible_table` has them, with ``is_pareto`` where none is faster and smaller.
    """
    cluster, tokens = pricer.cluster, pricer.training.tokens_per_step
    sizes = [2**k for k in range((cluster.n_gpus - 1).bit_length())] + [cluster.n_gpus]
    rows = []
    for n_gpus in sizes:
        there = replace(cluster.with_gpus(n_gpus), name=cluster.name)
        try:
            best = plan(replace(pricer, cluster=there), 1).best[0]
        except InfeasiblePlanError:  # too small for the model, or more devices than the batch has samples
            continue
        rows.append(
            {
                "n_gpus": n_gpus,
                "layout": best.layout.text,
                "step_s": best.step_s,
                "tokens_per_s": tokens / best.step_s,
                "low": tokens / best.high_s,
                "high": tokens / best.low_s,
            }
        )
    table = feasible_table(pricer)
    # Rows are in the order of their steps: a layout is on the front if it needs less than all faster ones.
    least = table["memory_gib"].cummin().shift(fill_value=math.inf)
    return pd.DataFrame(rows), table.assign(is_pareto=table["memory_gib"] < least)
