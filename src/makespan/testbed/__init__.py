"""The testbed emulator: the time of one training iteration from hardware, workload and plan.

A deterministic, seeded model with named terms that add up, calibrated constants with
provenance, and a designed grid of points that makes a trace::

    frame = emulate(workload("bert"), trace_points(workload("bert"), cluster("a800-64")),
                    cluster("a800-64"))

Its numbers are emulated, not measured.
"""

from makespan.testbed._calibrate import CalibrationFit, calibrate
from makespan.testbed._calibration import (
    Calibration,
    CalibrationSet,
    calibration_names,
    calibration_text,
    load_calibration,
)
from makespan.testbed._coarse import (
    CoarseWorkload,
    coarse_names,
    coarse_step_time_s,
    coarse_workload,
    colocated_memory_bytes,
    colocated_step_time_s,
    fit_coarse,
)
from makespan.testbed._constants import (
    CONSTANT_NAMES,
    CONSTANTS,
    Constant,
    prior_theta,
    theta_array,
    theta_mapping,
)
from makespan.testbed._emulate import Disturbances, Explanation, emulate, explain, iteration_time_s
from makespan.testbed._features import FEATURE_NAMES, Features, FeatureTable, feature_table
from makespan.testbed._geometry import Boundary, Geometry, Group, geometry, intra_bandwidth
from makespan.testbed._grid import data_parallel_placements, equal_placements, trace_points
from makespan.testbed._noise import Anomalies, NoiseModel, Stragglers, row_generator, row_seed
from makespan.testbed._observations import PLAN_CLASSES, Observations, observe
from makespan.testbed._phases import phases
from makespan.testbed._points import Point, points_from_frame, read_point
from makespan.testbed._shipping import calibration_set, data_digest
from makespan.testbed._timemodel import TERM_NAMES, predict, predict_terms

__all__ = [
    "CONSTANTS",
    "CONSTANT_NAMES",
    "FEATURE_NAMES",
    "PLAN_CLASSES",
    "TERM_NAMES",
    "Anomalies",
    "Boundary",
    "Calibration",
    "CalibrationFit",
    "CalibrationSet",
    "CoarseWorkload",
    "Constant",
    "Disturbances",
    "Explanation",
    "FeatureTable",
    "Features",
    "Geometry",
    "Group",
    "NoiseModel",
    "Observations",
    "Point",
    "Stragglers",
    "calibrate",
    "calibration_names",
    "calibration_set",
    "calibration_text",
    "coarse_names",
    "coarse_step_time_s",
    "coarse_workload",
    "colocated_memory_bytes",
    "colocated_step_time_s",
    "data_digest",
    "data_parallel_placements",
    "emulate",
    "equal_placements",
    "explain",
    "feature_table",
    "fit_coarse",
    "geometry",
    "intra_bandwidth",
    "iteration_time_s",
    "load_calibration",
    "observe",
    "phases",
    "points_from_frame",
    "predict",
    "predict_terms",
    "prior_theta",
    "read_point",
    "row_generator",
    "row_seed",
    "theta_array",
    "theta_mapping",
    "trace_points",
]
