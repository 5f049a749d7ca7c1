"""The testbed emulator: the time of one training iteration from hardware, workload and plan.

A deterministic, seeded model with named terms that add up, calibrated constants with
provenance, and a designed grid of points that makes a trace::

    frame = emulate(workload("bert"), trace_points(workload("bert"), cluster("a800-64")),
                    cluster("a800-64"))

Its numbers are emulated, not measured.
"""

from makespan.emulator._calibrate import CalibrationFit, calibrate
from makespan.emulator._calibration import (
    Calibration,
    CalibrationSet,
    calibration_names,
    calibration_text,
    load_calibration,
)
from makespan.emulator._coarse import (
    CoarseWorkload,
    coarse_names,
    coarse_step_time_s,
    coarse_workload,
    colocated_memory_bytes,
    colocated_step_time_s,
    fit_coarse,
)
from makespan.emulator._collectives import ALGORITHMS, CollectiveLatency, all_reduce_time_s
from makespan.emulator._constants import (
    CONSTANT_NAMES,
    CONSTANTS,
    Constant,
    prior_theta,
    theta_array,
    theta_mapping,
)
from makespan.emulator._emulate import Disturbances, Explanation, emulate, explain, iteration_time_s
from makespan.emulator._exact import ExactPipeline, exact_pipeline
from makespan.emulator._feature_table import FeatureTable, feature_table
from makespan.emulator._features import FEATURE_NAMES, Features
from makespan.emulator._geometry import Boundary, Geometry, Group, geometry, intra_bandwidth
from makespan.emulator._grid import data_parallel_placements, equal_placements, trace_points
from makespan.emulator._metrics import Agreement, agreement, relative_errors
from makespan.emulator._noise import Anomalies, NoiseModel, Stragglers, row_generator, row_seed
from makespan.emulator._observations import PLAN_CLASSES, Observations, observe
from makespan.emulator._phases import phases
from makespan.emulator._points import Point, points_from_frame, read_point
from makespan.emulator._protocols import (
    Protocol,
    anchor_rows,
    anchor_scale,
    anchored,
    few_rows,
    few_shot,
    five_fold,
    leave_out,
    public_constants,
    refine,
)
from makespan.emulator._provenance import preset_digests, preset_sources
from makespan.emulator._schedule import closed_form_time_s, one_f_one_b_order, pipeline_time_s
from makespan.emulator._shipping import calibration_set, data_digest, refined_set
from makespan.emulator._timemodel import TERM_NAMES, predict, predict_terms
from makespan.emulator._trace import (
    EMULATED_NOTE,
    LEGACY_UNITS,
    explanation_record,
    legacy_frame,
    write_trace,
)
from makespan.emulator._validate import Target, Validation, predict_speed, targets, validate

__all__ = [
    "ALGORITHMS",
    "CONSTANTS",
    "CONSTANT_NAMES",
    "EMULATED_NOTE",
    "FEATURE_NAMES",
    "LEGACY_UNITS",
    "PLAN_CLASSES",
    "TERM_NAMES",
    "Agreement",
    "Anomalies",
    "Boundary",
    "Calibration",
    "CalibrationFit",
    "CalibrationSet",
    "CoarseWorkload",
    "CollectiveLatency",
    "Constant",
    "Disturbances",
    "ExactPipeline",
    "Explanation",
    "FeatureTable",
    "Features",
    "Geometry",
    "Group",
    "NoiseModel",
    "Observations",
    "Point",
    "Protocol",
    "Stragglers",
    "Target",
    "Validation",
    "agreement",
    "all_reduce_time_s",
    "anchor_rows",
    "anchor_scale",
    "anchored",
    "calibrate",
    "calibration_names",
    "calibration_set",
    "calibration_text",
    "closed_form_time_s",
    "coarse_names",
    "coarse_step_time_s",
    "coarse_workload",
    "colocated_memory_bytes",
    "colocated_step_time_s",
    "data_digest",
    "data_parallel_placements",
    "emulate",
    "equal_placements",
    "exact_pipeline",
    "explain",
    "explanation_record",
    "feature_table",
    "few_rows",
    "few_shot",
    "fit_coarse",
    "five_fold",
    "geometry",
    "intra_bandwidth",
    "iteration_time_s",
    "leave_out",
    "legacy_frame",
    "load_calibration",
    "observe",
    "one_f_one_b_order",
    "phases",
    "pipeline_time_s",
    "points_from_frame",
    "predict",
    "predict_speed",
    "predict_terms",
    "preset_digests",
    "preset_sources",
    "prior_theta",
    "public_constants",
    "read_point",
    "refine",
    "refined_set",
    "relative_errors",
    "row_generator",
    "row_seed",
    "targets",
    "theta_array",
    "theta_mapping",
    "trace_points",
    "validate",
    "write_trace",
]
