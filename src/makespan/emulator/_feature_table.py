"""The cache of features: integer work once for each distinct point, arrays from then on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from makespan.emulator._features import FEATURE_NAMES, Features, feature_row, stage_nodes
from makespan.emulator._points import Point
from makespan.hardware import ClusterSpec
from makespan.plans import ExecutionPlan, Verdict, memory_estimate, resolve_micro_batch
from makespan.workloads import Workload

__all__ = ["FeatureTable", "feature_table"]


def _empty_matrix() -> NDArray[np.float64]:
    return np.zeros((0, len(FEATURE_NAMES)), dtype=np.float64)


@dataclass(slots=True)
class FeatureTable:
    """Cached feature rows of one workload on one cluster.

    The table grows as points are asked for; equal points share a row. It holds no other state,
    so the order of requests does not matter.
    """

    workload: Workload
    cluster: ClusterSpec
    _codes: dict[Point, int] = field(default_factory=dict)
    _rows: list[NDArray[np.float64]] = field(default_factory=list)
    _plans: list[ExecutionPlan] = field(default_factory=list)
    _verdicts: list[Verdict] = field(default_factory=list)
    _matrix: NDArray[np.float64] = field(default_factory=_empty_matrix)

    def codes(self, points: Sequence[Point]) -> NDArray[np.int64]:
        """Return the row number of each point, adding the rows that are new, (n_points,)."""
        known = self._codes
        missing = [point for point in points if point not in known]
        for point in missing:
            if point not in known:
                self._add(point)
        if missing:
            self._matrix = np.vstack([self._matrix, *self._rows[len(self._matrix) :]])
        return np.fromiter((known[point] for point in points), dtype=np.int64, count=len(points))

    def features(self, codes: NDArray[np.int64]) -> Features:
        """Return the features of rows as named arrays, each (n_points,)."""
        chosen = self._matrix[codes]
        return {name: chosen[:, index] for index, name in enumerate(FEATURE_NAMES)}

    def plan(self, code: int) -> ExecutionPlan:
        """Return the plan of a row with its micro-batch size resolved."""
        return self._plans[code]

    def verdict(self, code: int) -> Verdict:
        """Return the memory verdict of a row."""
        return self._verdicts[code]

    def feasible(self, codes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each row can run, (n_points,)."""
        return np.array([self._verdicts[code].feasible for code in codes], dtype=bool)

    def _add(self, point: Point) -> None:
        nodes = stage_nodes(self.cluster, point.placement.n_nodes)
        smallest = min(nodes, key=lambda kind: kind.gpu.memory_bytes)
        plan = resolve_micro_batch(point.plan, self.workload, smallest)
        verdict = memory_estimate(plan, self.workload, smallest, point.placement)
        if verdict.bytes_by_component:
            row = feature_row(self.workload, plan, point, self.cluster)
        else:
            row = np.full(len(FEATURE_NAMES), np.nan)  # the structure alone forbids it
        self._codes[point] = len(self._rows)
        self._rows.append(row)
        self._plans.append(plan)
        self._verdicts.append(verdict)


@lru_cache(maxsize=64)
def feature_table(workload: Workload, cluster: ClusterSpec) -> FeatureTable:
    """Return the cached feature table of a workload on a cluster."""
    return FeatureTable(workload, cluster)
