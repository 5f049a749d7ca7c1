"""Throughput tables in the canonical schema: reading and checking them, and the source of own ones."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pandas as pd

from makespan.errors import InputError, MissingDataError, TraceError, cell_error
from makespan.plans import PLAN_TEXTS, Placement, read_plan, write_plan
from makespan.tables import PROVENANCES, THROUGHPUT, read_csv
from makespan.workloads import is_in_zoo, workload, workload_keys

__all__ = ["FLAG_FAILED", "MeasuredSource", "canonical_rows", "check_times", "read_throughput"]

FLAG_FAILED = "failed run"
"""Flag of rows in which nothing ran."""


@dataclass(frozen=True, slots=True)
class MeasuredSource:
    """Tables measured on the user's own devices: a file ``<workload>.csv`` each, in the canonical schema.

    Workloads that the zoo lacks are as welcome as its own, and the global batch is that of the table.
    """

    directory: Path
    name: ClassVar[str] = "measured"

    def workload_keys(self) -> tuple[str, ...]:
        """Return the workloads of the zoo that have a file."""
        keys = tuple(key for key in workload_keys() if self._path(key).is_file())
        if not keys:
            raise MissingDataError(
                f"{self.directory}: no measured traces; accepted: a directory with <workload>.csv in the "
                f"throughput schema ({', '.join(THROUGHPUT.names)}) for one or more of "
                f"{', '.join(workload_keys())}; measure them first or choose another source"
            )
        return keys

    def load(self, workload_key: str) -> pd.DataFrame:
        """Read and check the trace of one workload, of the zoo or not."""
        key = self._key(workload_key)
        if key is None:
            names = sorted(path.stem for path in self.directory.glob("*.csv"))
            if not names:
                self.workload_keys()  # says what is accepted
            raise MissingDataError(
                f"{self.directory}: no measured trace {workload_key}.csv; it has: {', '.join(names)}"
            )
        return read_throughput(self._path(key), key)

    def batch_of(self, name: str) -> int | None:
        """Return the global batch of the trace of a workload, None if there is no such trace."""
        key = self._key(name)
        return None if key is None else int(self.load(key)["global_batch_size"].iloc[0])

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.csv"

    def _key(self, name: str) -> str | None:
        """Return the name by which there is a file: as it is, or what it is an alias of."""
        is_known = is_in_zoo(name)
        keys = [name, workload(name).key] if is_known else [name]
        return next((key for key in keys if Path(key).name == key and self._path(key).is_file()), None)


def read_throughput(path: str | Path, key: str | None = None) -> pd.DataFrame:
    """Read a throughput table of one workload, ``key`` if given, and check its rows.

    All rows must have the same global batch.
    """
    frame, where = read_csv(path, THROUGHPUT), str(path)
    keys = sorted(set(frame["workload"]))
    if len(keys) != 1:
        found = ", ".join(keys) or "no rows"
        raise TraceError(f"{where}: column 'workload': found {found}; accepted: one workload a file")
    wanted = key or (workload(keys[0]).key if is_in_zoo(keys[0]) else keys[0])
    batch = int(frame["global_batch_size"].iloc[0])
    if batch < 1:
        raise cell_error(where, 1, "global_batch_size", batch, "a whole number, at least 1")
    accepted: dict[str, str | int] = {"workload": wanted, "global_batch_size": batch}
    for column, value in accepted.items():
        for row, found_value in enumerate(frame[column], 1):
            if found_value != value:
                raise cell_error(where, row, column, found_value, str(value))
    _check_measured(frame, where)
    return canonical_rows(frame, batch, where)


def _check_measured(frame: pd.DataFrame, where: str) -> None:
    cells = zip(frame["cpu_threads"], frame["feasible"], frame["iter_time_s"], strict=True)
    for row, (threads, feasible, time) in enumerate(cells, 1):
        if threads < 1:
            raise cell_error(where, row, "cpu_threads", threads, "a whole number, at least 1")
        if not feasible and not math.isnan(time):
            raise cell_error(where, row, "iter_time_s", time, "no value where feasible is false")
    for row, value in enumerate(frame["provenance"], 1):
        if value not in PROVENANCES:
            raise cell_error(where, row, "provenance", value, ", ".join(PROVENANCES))
    for phase in ("forward_s", "overlap_sync_s", "optimize_s"):
        check_times(frame[phase].fillna(0.0), phase, where, "a time, not negative")


def check_times(values: Iterable[float], column: str, where: str, accepted: str) -> None:
    """Check that times are finite and not negative."""
    for row, value in enumerate(values, 1):
        if not (math.isfinite(value) and value >= 0):
            raise cell_error(where, row, column, value, accepted)


def canonical_rows(frame: pd.DataFrame, global_batch_size: int, where: str) -> pd.DataFrame:
    """Check plans and placements and write them in canonical notation: equal ones have equal text.

    Refused are texts that cannot be read, plans whose degrees do not multiply to the GPUs of the
    placement, and (plan, placement, threads) that occur twice.
    """
    cells = zip(frame["exec_plan"], frame["placement"], frame["cpu_threads"], frame["feasible"], strict=True)
    texts = [_canonical(row, cell, global_batch_size, where) for row, cell in enumerate(cells, 1)]
    plans, placements = zip(*texts, strict=True)
    result = frame.assign(exec_plan=plans, placement=placements)
    _reject_duplicates(result, where)
    return result


def _canonical(
    row: int, cell: tuple[str, str, int, bool], global_batch_size: int, where: str
) -> tuple[str, str]:
    plan_text, placement_text, cpu_threads, feasible = *cell[:2], int(cell[2]), cell[3]
    try:
        placement = Placement.parse(placement_text)
    except InputError as error:
        accepted = f"one digit a node such as 44 or 1124 ({error})"
        raise cell_error(where, row, "placement", placement_text, accepted) from error
    # A run that failed may have asked for more replicas than the batch has samples.
    batch = global_batch_size if feasible else placement.n_gpus
    try:
        plan = read_plan(plan_text, n_gpus=placement.n_gpus, global_batch_size=batch, cpu_threads=cpu_threads)
    except InputError as error:
        accepted = f"{PLAN_TEXTS}, for the {placement.n_gpus} GPU(s) of placement {placement.text} ({error})"
        raise cell_error(where, row, "exec_plan", plan_text, accepted) from error
    return write_plan(plan, cpu_threads=cpu_threads), placement.text


def _reject_duplicates(frame: pd.DataFrame, where: str) -> None:
    first: dict[tuple[str, str, int], int] = {}
    triples = zip(frame["exec_plan"], frame["placement"], frame["cpu_threads"], strict=True)
    for row, (plan, placement, threads) in enumerate(triples, 1):
        known = first.setdefault((str(plan), str(placement), int(threads)), row)
        if known != row:
            accepted = (
                "one row for each plan, placement (in any order) and CPU threads; row "
                f"{known} is the same run ({plan} on {placement} with {threads} threads)"
            )
            raise cell_error(where, row, "exec_plan", plan, accepted)
