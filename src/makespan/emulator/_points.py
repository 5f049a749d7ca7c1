"""What is emulated: a plan in a placement."""

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from makespan.errors import InputError, TraceError
from makespan.plans import ExecutionPlan, Placement, read_plan, write_plan
from makespan.workloads import Workload

__all__ = ["Point", "points_from_frame", "read_point"]


@dataclass(frozen=True, slots=True)
class Point:
    """One plan in one placement.

    Parameters
    ----------
    plan
        The plan; its micro-batch size is set by the rule of the workload when it is emulated.
    placement
        Where it runs.
    """

    plan: ExecutionPlan
    placement: Placement

    @property
    def text(self) -> str:
        """Plan, placement and CPU threads in trace notation."""
        threads = self.plan.cpu_threads
        return f"{write_plan(self.plan, cpu_threads=threads)} on {self.placement.text} with {threads} threads"


def read_point(workload: Workload, exec_plan: str, placement: str, cpu_threads: int) -> Point:
    """Read a point in trace notation.

    Raises
    ------
    NotationError
        A text cannot be read.
    PlanError
        Plan, placement and batch contradict each other.
    """
    place = Placement.parse(placement)
    plan = read_plan(
        exec_plan,
        n_gpus=place.n_gpus,
        global_batch_size=workload.global_batch_size,
        cpu_threads=cpu_threads,
    )
    return Point(plan, place)


def points_from_frame(workload: Workload, frame: pd.DataFrame, where: str = "points") -> list[Point]:
    """Read the columns ``exec_plan``, ``placement`` and ``cpu_threads`` of a table.

    Raises
    ------
    TraceError
        A row cannot be read; names the row.
    """
    rows: Iterable[tuple[str, str, int]] = zip(
        frame["exec_plan"], frame["placement"], frame["cpu_threads"], strict=True
    )
    points = []
    for number, (exec_plan, placement, cpu_threads) in enumerate(rows, start=1):
        try:
            points.append(read_point(workload, str(exec_plan), str(placement), int(cpu_threads)))
        except InputError as error:
            raise TraceError(f"{where}: row {number}: {error}") from error
    return points
