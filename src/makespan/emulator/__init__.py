"""The testbed emulator: the time of one training iteration from hardware, workload and plan.

A deterministic, seeded model with named terms that add up, calibrated constants with
provenance, and a designed grid of points that makes a trace::

    frame = emulate(workload("bert"), trace_points(workload("bert"), cluster("a800-64")),
                    cluster("a800-64"))

Its numbers are emulated, not measured.
"""

from makespan.emulator._calibration import (
    CONSTANTS,
    CalibrationSet,
    calibration_names,
    calibration_text,
    load_calibration,
)
from makespan.emulator._emulate import (
    MAX_NOISE,
    Anomalies,
    Disturbances,
    Explanation,
    NoiseModel,
    Stragglers,
    emulate,
    explain,
    iteration_time_s,
)
from makespan.emulator._features import feature_table
from makespan.emulator._observations import Observations, observe
from makespan.emulator._points import Point, equal_placements, read_point, trace_points
from makespan.emulator._protocols import CalibrationFit, calibrate, calibration_set, refined_set
from makespan.emulator._schedule import exact_pipeline, pipeline_time_s
from makespan.emulator._trace import EMULATED_NOTE, LEGACY_UNITS, write_trace
from makespan.emulator._validate import validate

__all__ = [
    "Anomalies",
    "CONSTANTS",
    "CalibrationFit",
    "CalibrationSet",
    "Disturbances",
    "EMULATED_NOTE",
    "Explanation",
    "LEGACY_UNITS",
    "MAX_NOISE",
    "NoiseModel",
    "Observations",
    "Point",
    "Stragglers",
    "calibrate",
    "calibration_names",
    "calibration_set",
    "calibration_text",
    "emulate",
    "equal_placements",
    "exact_pipeline",
    "explain",
    "feature_table",
    "iteration_time_s",
    "load_calibration",
    "observe",
    "pipeline_time_s",
    "read_point",
    "refined_set",
    "trace_points",
    "validate",
    "write_trace",
]
