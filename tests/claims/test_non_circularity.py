"""The emulator is richer than the model that is fitted to it: a residual must remain.

Each model is emulated by the constants that have not seen it, without noise, and the
seven-parameter form is fitted to the single-node data-parallel and offload rows by its own
procedure. An emulator that it fits perfectly would test nothing.
"""

import numpy as np
import pytest

from makespan.emulator import emulate, load_calibration, trace_points
from makespan.hardware import cluster
from makespan.perf import fit, load_environment, measured_from_table, points_from_table
from makespan.plans import Placement
from makespan.workloads import workload

WHERE = cluster("a800-64")
ENVIRONMENT = load_environment("a800-64")
MODELS = ("roberta", "bert", "t5", "gpt2")
FAMILIES = ("ga", "gc", "zero-dp", "zero-offload")


@pytest.fixture(scope="module")
def residuals() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Relative errors [%] on the fitted single-node rows and on multi-node rows."""
    found = {}
    for name in MODELS:
        spec = workload(name)
        frame = emulate(spec, trace_points(spec, WHERE), WHERE, load_calibration("L1"), noise=0.0)
        frame = frame[frame["feasible"] & frame["exec_plan"].isin(FAMILIES)].reset_index(drop=True)
        single = np.array([Placement.parse(text).n_nodes == 1 for text in frame["placement"]])
        points, measured = points_from_table(frame, name, ENVIRONMENT), measured_from_table(frame)
        fitted = fit(
            "published",
            points_from_table(frame[single], name, ENVIRONMENT),
            measured_from_table(frame[single]),
            ENVIRONMENT,
        )
        error = 100.0 * np.abs(fitted.predict(points) / measured.iter_time_s - 1.0)
        found[name] = (error[single], error[~single])
    return found


def test_a_residual_remains_on_single_node_rows(residuals):
    for name in MODELS:
        assert 2.0 <= residuals[name][0].mean() <= 20.0


def test_rows_on_several_nodes_are_predicted_worse(residuals):
    for name in MODELS:
        single, several = residuals[name]
        assert several.mean() > single.mean()


def test_the_worst_error_is_not_small(residuals):
    for name in MODELS:
        assert max(residuals[name][0].max(), residuals[name][1].max()) > 5.0
