"""Signatures of the performance model; the bodies follow."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.hardware import ClusterSpec
from makespan.plans import ExecutionPlan, Placement

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

FORMS: tuple[str, ...] = ("published", "extended")


@dataclass(frozen=True, slots=True)
class Environment:
    """Constants of a cluster that all models share; see ``load_environment``."""

    name: str


@dataclass(frozen=True, slots=True)
class Points:
    """Struct of arrays: everything a form needs to know about n (plan, placement) pairs."""

    workload: str

    def __len__(self) -> int:
        raise NotImplementedError

    def take(self, index: npt.NDArray[np.intp] | Bools) -> "Points":
        """Select points by index or mask."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured times of n points, each an array (n,) in seconds, NaN where not reported."""

    iter_time_s: Floats
    forward_s: Floats
    overlap_sync_s: Floats
    optimize_s: Floats


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted form: values, standard errors, identifiability, residuals, observations."""

    form: str
    workload: str
    parameters: tuple[str, ...]
    values: Floats
    std_err: Floats
    identified: Bools

    def predict(self, points: Points) -> Floats:
        """Iteration time [s] of each point, (n,)."""
        raise NotImplementedError

    def refit(self, points: Points, measured: Measured) -> "Fit":
        """Fit again with further observations added to those already used."""
        raise NotImplementedError

    def table(self) -> pd.DataFrame:
        """Parameters as a table of schema FIT."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TableFit:
    """A fit to the sampled rows of a throughput table and its predictions of all rows."""

    fit: Fit
    frame: pd.DataFrame
    fitted: Bools
    predicted_s: Floats

    def rows(self) -> pd.DataFrame:
        """One row a feasible table row, schema TABLE2_ROWS."""
        raise NotImplementedError

    def errors(self) -> pd.DataFrame:
        """One row a plan family plus one ``all``, schema TABLE2."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class RankedPlan:
    """A feasible plan and its predicted iteration time."""

    plan: ExecutionPlan
    placement: Placement
    iter_time_s: float


def load_environment(name: str) -> Environment:
    """Load the shared constants of a cluster."""
    raise NotImplementedError


def points_from_table(frame: pd.DataFrame, workload: str, environment: Environment) -> Points:
    """Read the points of a THROUGHPUT table (rows of that workload, in table order)."""
    raise NotImplementedError


def points_from_plans(
    pairs: Sequence[tuple[ExecutionPlan, Placement]], workload: str, environment: Environment
) -> Points:
    """Build points from plans and placements."""
    raise NotImplementedError


def measured_from_table(frame: pd.DataFrame) -> Measured:
    """Read the measured columns of a THROUGHPUT table."""
    raise NotImplementedError


def sampling_design(frame: pd.DataFrame, workload: str) -> Bools:
    """Mask of the rows to fit: up to seven data-parallel or offload rows and three 3D rows."""
    raise NotImplementedError


def fit(form: str, points: Points, measured: Measured) -> Fit:
    """Fit a form to observations."""
    raise NotImplementedError


def fit_table(
    frame: pd.DataFrame, workload: str, form: str, environment: Environment
) -> TableFit:
    """Sample, fit and predict the rows of one workload in a throughput table."""
    raise NotImplementedError


def regret(frame: pd.DataFrame, predicted_s: Floats) -> pd.DataFrame:
    """Lost throughput when the predicted best plan of each placement is run.

    Columns ``workload, placement, best_plan, chosen_plan, regret_pct``; one row a
    placement on which at least two clean plans were measured.
    """
    raise NotImplementedError


def rank_plans(
    fit: Fit,
    placement: Placement,
    cluster: ClusterSpec,
    cpu_threads: int | None = None,
    plans: Iterable[ExecutionPlan] | None = None,
) -> list[RankedPlan]:
    """Feasible plans on a placement, fastest first; all families unless ``plans`` is given.

    ``cpu_threads`` are threads a GPU; default: the node's threads divided by its GPUs.
    """
    raise NotImplementedError


def best_plan(
    fit: Fit, placement: Placement, cluster: ClusterSpec, cpu_threads: int | None = None
) -> RankedPlan:
    """Return the fastest feasible plan; raise InfeasiblePlanError if there is none."""
    raise NotImplementedError


def sensitivity_families(
    fit: Fit,
    cluster: ClusterSpec,
    gpu_counts: Iterable[int],
    cpu_threads: Iterable[int] = (),
) -> pd.DataFrame:
    """Best plan of each family at each GPU count (packed placement), SENSITIVITY_FAMILIES."""
    raise NotImplementedError


def envelope(families: pd.DataFrame, gpu_counts: Iterable[int] | None = None) -> pd.DataFrame:
    """Best plan with at most g GPUs, schema SENSITIVITY."""
    raise NotImplementedError


def sensitivity_curve(
    fit: Fit, cluster: ClusterSpec, gpu_counts: Iterable[int]
) -> pd.DataFrame:
    """``envelope(sensitivity_families(...))`` in one call."""
    raise NotImplementedError


_ = Mapping
