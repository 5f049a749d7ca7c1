"""Exact event schedule of a pipeline: the slow reference for the closed form."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from makespan.emulator._calibration import Calibration, CalibrationSet
from makespan.emulator._features import Features, feature_table, stage_features
from makespan.emulator._points import Point
from makespan.emulator._timemodel import predict_terms
from makespan.errors import InputError
from makespan.hardware import ClusterSpec
from makespan.plans import one_f_one_b_order
from makespan.workloads import Workload

__all__ = ["ExactPipeline", "closed_form_time_s", "exact_pipeline", "pipeline_time_s"]


def closed_form_time_s(
    forward_s: Sequence[float], backward_s: Sequence[float], n_microbatches: int, interleave: int = 1
) -> float:
    """Return the pipeline time without transfers: all stages once, the slowest for the rest."""
    both = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    return n_microbatches * max(both) + (sum(both) - max(both)) / interleave


def pipeline_time_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    n_microbatches: int,
    transfer_s: Sequence[float] | float = 0.0,
) -> float:
    """Run the 1F1B schedule event by event and return when the last stage is idle."""
    p, m = len(forward_s), n_microbatches
    edges = [float(transfer_s)] * (p - 1) if isinstance(transfer_s, int | float) else list(transfer_s)
    if p < 1 or m < 1 or len(backward_s) != p or len(edges) != p - 1:
        raise InputError(
            f"schedule of {p} forward and {len(backward_s)} backward times, {len(edges)} transfers and "
            f"{m} micro-batches; accepted: one or more stages with both times, one transfer fewer, and "
            "one micro-batch or more"
        )
    orders = [one_f_one_b_order(stage, p, m) for stage in range(p)]
    finished: dict[tuple[int, str, int], float] = {}
    clock, position = [0.0] * p, [0] * p
    remaining = sum(len(order) for order in orders)
    while remaining:
        for stage in range(p):
            while position[stage] < len(orders[stage]):
                kind, k = orders[stage][position[stage]]
                ready = _ready_at(finished, edges, stage, kind, k)
                if ready is None:
                    break
                duration = forward_s[stage] if kind == "F" else backward_s[stage]
                clock[stage] = max(clock[stage], ready) + duration
                finished[stage, kind, k] = clock[stage]
                position[stage] += 1
                remaining -= 1
    return max(clock)


def _ready_at(
    finished: dict[tuple[int, str, int], float], edges: list[float], stage: int, kind: str, k: int
) -> float | None:
    """Return when the input of an operation has arrived; None if it is not known yet."""
    if kind == "F" and stage == 0:
        return 0.0
    if kind == "B" and stage == len(edges):
        return finished.get((stage, "F", k))
    source, edge = (stage - 1, edges[stage - 1]) if kind == "F" else (stage + 1, edges[stage])
    done = finished.get((source, kind, k))
    return None if done is None else done + edge


@dataclass(frozen=True, slots=True)
class ExactPipeline:
    """Pipeline of a point, stage by stage."""

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
    workload: Workload, point: Point, cluster: ClusterSpec, calibration: CalibrationSet | Calibration
) -> ExactPipeline:
    """Work out the stage times of a point.

    Raises
    ------
    PlanError
        The degrees do not fit the placement or the model.
    """
    constants = calibration.for_workload(workload)
    theta = constants.vector
    table = feature_table(workload, cluster)
    code = table.codes([point])
    plan, whole = table.plans[code[0]], table.features(code)
    per_stage = stage_features(workload, plan, point.placement, cluster)
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
        n_microbatches=plan.n_microbatches,
    )
