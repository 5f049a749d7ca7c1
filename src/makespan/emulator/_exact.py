"""Stage times of a point and its exact pipeline schedule, for checks and explanations."""

from dataclasses import dataclass

import numpy as np

from makespan.emulator._calibration import Calibration, CalibrationSet
from makespan.emulator._feature_table import feature_table
from makespan.emulator._features import Features, stage_features
from makespan.emulator._points import Point
from makespan.emulator._schedule import closed_form_time_s, pipeline_time_s
from makespan.emulator._timemodel import predict_terms
from makespan.hardware import ClusterSpec
from makespan.workloads import Workload

__all__ = ["ExactPipeline", "exact_pipeline"]


@dataclass(frozen=True, slots=True)
class ExactPipeline:
    """Pipeline of a point, stage by stage.

    Parameters
    ----------
    forward_s, backward_s
        Time of one micro-batch on each stage, tensor-parallel exchange and recomputation
        included [s].
    transfer_s
        Mean time of one transfer between neighbouring stages [s].
    n_microbatches
        Micro-batches.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    transfer_s: float
    n_microbatches: int

    @property
    def closed_form_s(self) -> float:
        """Closed form, with two transfers a boundary on the critical path [s]."""
        transfers = 2.0 * (len(self.forward_s) - 1) * self.transfer_s
        return closed_form_time_s(self.forward_s, self.backward_s, self.n_microbatches) + transfers

    @property
    def event_schedule_s(self) -> float:
        """Exact event schedule of 1F1B [s]."""
        return pipeline_time_s(self.forward_s, self.backward_s, self.n_microbatches, self.transfer_s)


def exact_pipeline(
    workload: Workload,
    point: Point,
    cluster: ClusterSpec,
    calibration: CalibrationSet | Calibration,
) -> ExactPipeline:
    """Work out the stage times of a point.

    Raises
    ------
    PlanError
        The degrees do not fit the placement or the model.
    """
    constants = calibration.for_workload(workload) if isinstance(calibration, CalibrationSet) else calibration
    theta = constants.vector
    table = feature_table(workload, cluster)
    code = table.codes([point])
    whole = table.features(code)
    per_stage = stage_features(workload, table.plan(int(code[0])), point.placement, cluster)
    x: Features = {name: np.repeat(values, len(per_stage)) for name, values in whole.items()}
    x |= {name: np.array([stage[name] for stage in per_stage]) for name in per_stage[0]}
    terms = predict_terms(theta, x, constants.compute_scale)
    exchange = terms["tensor_exchange"] / x["tensor_passes"]
    backward = terms["backward"] + terms["recompute"] + exchange * (x["tensor_passes"] - 1.0)
    crossings = max(2.0 * (len(per_stage) - 1), 1.0)
    transfer = predict_terms(theta, whole, constants.compute_scale)["stage_transfer"][0] / crossings
    return ExactPipeline(
        forward_s=tuple(float(value) for value in terms["forward"] + exchange),
        backward_s=tuple(float(value) for value in backward),
        transfer_s=float(transfer),
        n_microbatches=table.plan(int(code[0])).n_microbatches,
    )
