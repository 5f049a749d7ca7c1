"""Cost of the performance model: one fit, one prediction, one set of sensitivity curves.

The observations are made by the model itself, so no data are needed.
"""

from typing import Any

import numpy as np
import pytest

from makespan.hardware import cluster
from makespan.perf import (
    FORMS,
    Fit,
    Measured,
    Points,
    fit,
    load_environment,
    points_from_plans,
    sensitivity_curve,
)
from makespan.perf.forms import Profile, Terms
from makespan.plans import Placement, read_plan, resolve_micro_batch
from makespan.workloads import workload

ENVIRONMENT = load_environment("a800-64")
CLUSTER = cluster("a800-64")
ROWS = (
    ("ga", "2"),
    ("ga", "8"),
    ("ga", "2222"),
    ("zero-dp", "44"),
    ("zero-offload", "2"),
    ("zero-offload", "8"),
    ("zero-offload", "2222"),
    ("181", "8"),
    ("811", "11111111"),
    ("441", "4444"),
)


def sampled_rows() -> tuple[Points, Measured]:
    """Return the ten rows of a full sampling design with times of the extended form."""
    spec = workload("t5")
    pairs = []
    for text, place in ROWS:
        placement = Placement.parse(place)
        plan = read_plan(text, n_gpus=placement.n_gpus, global_batch_size=spec.global_batch_size)
        pairs.append((resolve_micro_batch(plan, spec, ENVIRONMENT.node), placement))
    points = points_from_plans(pairs, spec, ENVIRONMENT)
    priors = ENVIRONMENT.priors["extended"]
    theta = np.array([priors[name].median for name in FORMS["extended"].parameters])
    terms = Terms(points, Profile(0.18, 8.0, 1.0, "given"), ENVIRONMENT.constants)
    phases = FORMS["extended"].phases(theta, terms)
    noise = np.exp(0.02 * np.random.default_rng(1).standard_normal(len(points)))
    forward = np.where(points.is_data_parallel & (points.n_gpus == 2), 0.18, np.nan)
    overlap = phases.compute_s - np.nan_to_num(forward)
    return points, Measured(phases.iter_time_s * noise, forward, overlap, phases.optimize_s)


@pytest.fixture(scope="module")
def fitted() -> Fit:
    """Return one fitted model."""
    return fit("extended", *sampled_rows(), ENVIRONMENT)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_fit_of_one_model(benchmark: Any, form: str) -> None:
    """Target: below 0.3 s."""
    points, measured = sampled_rows()
    result = benchmark(fit, form, points, measured, ENVIRONMENT)
    assert len(result.values) == len(FORMS[form].parameters)


def test_prediction_of_ten_thousand_points(benchmark: Any, fitted: Fit) -> None:
    """Struct-of-arrays prediction without building the points."""
    points, _ = sampled_rows()
    many = points.take(np.resize(np.arange(len(points)), 10_000))
    assert len(benchmark(fitted.predict, many)) == 10_000


def test_sensitivity_curves_of_one_model(benchmark: Any, fitted: Fit) -> None:
    """Every family at 1 to 64 GPUs, feasibility included; caches are warm after the first round."""
    curve = benchmark(sensitivity_curve, fitted, CLUSTER, range(1, 65))
    assert len(curve) == 64
