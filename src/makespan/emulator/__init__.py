"""Testbed emulator: the time of one training iteration from hardware, workload and plan.

The emulator is a deterministic, seeded model. Its named terms add up to the iteration time, its calibrated
constants state their origin, and a fixed grid of points makes a trace::

    frame = emulate(workload("bert"), trace_points(workload("bert"), cluster("a800-64")),
                    cluster("a800-64"))

Its numbers are emulated, not measured.
"""

from makespan.emulator.constants import (
    CONSTANTS as CONSTANTS,
    CalibrationSet as CalibrationSet,
    calibration_names as calibration_names,
    calibration_text as calibration_text,
    load_calibration as load_calibration,
)
from makespan.emulator.model import (
    EMULATED_NOTE as EMULATED_NOTE,
    LEGACY_UNITS as LEGACY_UNITS,
    MAX_NOISE as MAX_NOISE,
    Anomalies as Anomalies,
    Disturbances as Disturbances,
    Explanation as Explanation,
    NoiseModel as NoiseModel,
    Stragglers as Stragglers,
    emulate as emulate,
    exact_pipeline as exact_pipeline,
    explain as explain,
    feature_table as feature_table,
    iteration_time_s as iteration_time_s,
    pipeline_time_s as pipeline_time_s,
    write_trace as write_trace,
)
from makespan.emulator.points import (
    Point as Point,
    equal_placements as equal_placements,
    read_point as read_point,
    trace_points as trace_points,
)
from makespan.emulator.validation import (
    CalibrationFit as CalibrationFit,
    Observations as Observations,
    calibrate as calibrate,
    calibration_set as calibration_set,
    observe as observe,
    refined_set as refined_set,
    validate as validate,
)
