"""Checks and canonical form of the rows of a throughput table, whatever file they come from."""

import math
from dataclasses import dataclass

import pandas as pd

from makespan.errors import InputError, TraceError
from makespan.plans import PLAN_TEXTS, Placement, read_plan, write_plan
from makespan.workloads import Workload

__all__ = ["RowNames", "canonical_rows", "check_times", "reject_duplicates"]


@dataclass(frozen=True, slots=True)
class RowNames:
    """How a file calls its columns, for messages.

    Parameters
    ----------
    where
        The file.
    iter_time
        Header of the iteration time.
    """

    where: str
    iter_time: str

    def error(self, row: int, column: str, found: object, accepted: str) -> TraceError:
        """Build the error for one cell; ``row`` counts data rows from zero."""
        return TraceError(
            f"{self.where}: row {row + 1}, column {column!r}: found {found!r}; accepted: {accepted}"
        )


def canonical_rows(frame: pd.DataFrame, workload: Workload, names: RowNames) -> pd.DataFrame:
    """Check plans and placements and write them in canonical notation.

    Parameters
    ----------
    frame
        Table with text columns ``exec_plan`` and ``placement``, and columns ``cpu_threads`` and
        ``feasible``.
    workload
        What was run; its global batch size must fit the plan of every feasible row.
    names
        For messages.

    Returns
    -------
    pandas.DataFrame
        A copy in which equal plans and placements have equal text.

    Raises
    ------
    TraceError
        A text cannot be read, the degrees of a plan do not multiply to the GPUs of its
        placement, or a (plan, placement, threads) triple occurs twice.
    """
    result = frame.copy()
    cells = zip(frame["exec_plan"], frame["placement"], frame["cpu_threads"], frame["feasible"], strict=True)
    texts = [_canonical(row, cell, workload, names) for row, cell in enumerate(cells)]
    result["exec_plan"] = [plan for plan, _ in texts]
    result["placement"] = [placement for _, placement in texts]
    reject_duplicates(result, names)
    return result


def _canonical(
    row: int, cell: tuple[str, str, int, bool], workload: Workload, names: RowNames
) -> tuple[str, str]:
    plan_text, placement_text, cpu_threads, feasible = cell
    try:
        placement = Placement.parse(placement_text)
    except InputError as error:
        raise names.error(
            row, "placement", placement_text, f"one digit a node such as 44 or 1124 ({error})"
        ) from error
    # A run that failed may have asked for more replicas than the batch has samples.
    batch = workload.global_batch_size if feasible else placement.n_gpus
    try:
        plan = read_plan(
            plan_text,
            n_gpus=placement.n_gpus,
            global_batch_size=batch,
            cpu_threads=int(cpu_threads),
        )
    except InputError as error:
        accepted = f"{PLAN_TEXTS}, for the {placement.n_gpus} GPU(s) of placement {placement.text} ({error})"
        raise names.error(row, "exec_plan", plan_text, accepted) from error
    return write_plan(plan, cpu_threads=int(cpu_threads)), placement.text


def check_times(frame: pd.DataFrame, columns: dict[str, str], names: RowNames) -> None:
    """Check that times are finite and not negative.

    Parameters
    ----------
    frame
        Table of numbers.
    columns
        From column of ``frame`` to header in the file.
    names
        For messages.

    Raises
    ------
    TraceError
        A time is negative, infinite or not a number.
    """
    for column, header in columns.items():
        for row, value in enumerate(frame[column]):
            if not (math.isfinite(value) and value >= 0):
                unit = "a time, not negative" + (
                    "; 0 marks a run that failed" if column == "iter_time_s" else ""
                )
                raise names.error(row, header, value, unit)


def reject_duplicates(frame: pd.DataFrame, names: RowNames) -> None:
    """Raise if a (plan, placement, threads) triple occurs twice.

    Raises
    ------
    TraceError
        Names both rows.
    """
    first: dict[tuple[str, str, int], int] = {}
    triples = zip(frame["exec_plan"], frame["placement"], frame["cpu_threads"], strict=True)
    for row, (plan, placement, threads) in enumerate(triples):
        key = (str(plan), str(placement), int(threads))
        if key in first:
            raise names.error(
                row,
                "exec_plan",
                plan,
                f"one row for each plan, placement (in any order) and CPU threads; row "
                f"{first[key] + 1} is the same run ({plan} on {placement} with {threads} threads)",
            )
        first[key] = row
