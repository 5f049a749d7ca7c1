"""Iteration time of what a job asks for, looked up in throughput tables."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from makespan.errors import TraceError, unknown_name
from makespan.plans import Placement, read_plan, write_plan
from makespan.workloads import workload

__all__ = ["Reference", "ReferenceTimes", "placement_order", "reference_plan"]


def placement_order(counts: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the sort key of placements, given devices a node, largest first: fewest nodes first."""
    return len(counts), counts


def reference_plan(plan: str, measured: Iterable[tuple[str, tuple[int, ...], float]]) -> str:
    """Return the plan that stands for a requested one: itself if it was measured, else the fastest.

    ``measured``: plan, devices a node (largest first) and iteration time [s] of runs on as many devices.
    """
    rows = list(measured)
    if any(name == plan for name, _, _ in rows):
        return plan
    return min(rows, key=lambda row: (row[2], *placement_order(row[1]), row[0]))[0]


@dataclass(frozen=True, slots=True)
class Reference:
    """A configuration that stands for a request: plan in trace notation, placement, iteration time [s]."""

    plan: str
    placement: str
    iter_time_s: float


_Measured = tuple[Reference, tuple[int, ...]]
"""A configuration that ran, and its devices a node, largest first."""


@dataclass(frozen=True)
class ReferenceTimes:
    """Reference configuration of every request, from the throughput tables of a source.

    The requested plan counts on its measured placement with the fewest nodes. Where that plan was
    not measured with as many GPUs, the fastest plan measured with them counts instead, see
    Morphling, section 7.3. ``tables`` are throughput tables (schema `THROUGHPUT`) by workload key.
    """

    tables: Mapping[str, pd.DataFrame]

    @cached_property
    def _measured(self) -> dict[str, dict[int, list[_Measured]]]:
        """What ran, by workload and number of GPUs."""
        return {key: _by_gpus(table) for key, table in self.tables.items()}

    def workload_keys(self) -> tuple[str, ...]:
        """Return the workloads that have a table, sorted."""
        return tuple(sorted(self.tables))

    def gpu_counts(self, workload_key: str) -> tuple[int, ...]:
        """Return the GPU counts with which a workload can run, ascending."""
        return tuple(sorted(self._of(workload_key)))

    def requested(self, workload_key: str, n_gpus: int, plan: str) -> Reference:
        """Return the reference configuration of a request.

        Raises `UnknownNameError` for workloads without table, `TraceError` if nothing was measured with that
        many GPUs.
        """
        rows = self._with(workload_key, n_gpus)
        text = write_plan(read_plan(plan, n_gpus=n_gpus, global_batch_size=self._batch(workload_key)))
        chosen = reference_plan(text, ((row.plan, counts, row.iter_time_s) for row, counts in rows))
        same = [pair for pair in rows if pair[0].plan == chosen]
        return min(same, key=lambda pair: (*placement_order(pair[1]), pair[0].iter_time_s))[0]

    def best(self, workload_key: str, n_gpus: int) -> Reference:
        """Return the fastest configuration with that many GPUs, on any placement; raises as `requested`."""
        return min((row for row, _ in self._with(workload_key, n_gpus)), key=lambda row: row.iter_time_s)

    def steps(self, workload_key: str, n_gpus: int, plan: str, duration_s: float) -> int:
        """Return how many optimiser steps fill a duration, at least one."""
        return max(1, round(duration_s / self.requested(workload_key, n_gpus, plan).iter_time_s))

    def _batch(self, workload_key: str) -> int:
        """Return the global batch of the measured runs, which may differ from that of the zoo."""
        table = self.tables[workload_key]
        if "global_batch_size" in table:
            return int(table["global_batch_size"].iloc[0])
        return workload(workload_key).global_batch_size

    def _with(self, workload_key: str, n_gpus: int) -> list[_Measured]:
        rows = self._of(workload_key).get(n_gpus)
        if not rows:
            counts = ", ".join(str(count) for count in self.gpu_counts(workload_key))
            raise TraceError(
                f"workload {workload_key!r}: no throughput on {n_gpus} GPUs; accepted: {counts or 'none'}"
            )
        return rows

    def _of(self, workload_key: str) -> dict[int, list[_Measured]]:
        if workload_key not in self._measured:
            raise unknown_name("workload with throughput", workload_key, self.tables)
        return self._measured[workload_key]


def _by_gpus(table: pd.DataFrame) -> dict[int, list[_Measured]]:
    found: dict[int, list[_Measured]] = {}
    ran = table[table["feasible"].astype(bool)]
    for plan, text, time in zip(ran["exec_plan"], ran["placement"], ran["iter_time_s"], strict=True):
        placement = Placement.parse(str(text))
        row = Reference(str(plan), str(text), float(time))
        found.setdefault(placement.n_gpus, []).append((row, placement.gpus_per_node[::-1]))
    return found
