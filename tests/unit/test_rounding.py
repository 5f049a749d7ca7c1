"""Rounding: what it keeps, and that decisions do not depend on the processor."""

import os
import platform
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from makespan.least_squares import least_squares
from makespan.numerics import significant

# Sets of linear-algebra kernels that every processor of a family can run.
KERNELS = {"x86_64": ("Haswell", "Prescott"), "aarch64": ("ARMV8", "NEOVERSEN1")}


def test_digits_are_kept_and_what_has_none_stays():
    values = [0.0, -1.23456789012, 987654321.987, 1e-290, float("inf")]
    assert significant(values, 4).tolist() == [0.0, -1.235, 987700000.0, 1e-290, float("inf")]
    assert np.isnan(significant(float("nan")))
    assert significant([[1.0, 2.0]]).shape == (1, 2)


@given(st.floats(1e-200, 1e200), st.integers(1, 15))
@example(9.500000000000001e199, 1)
@example(9.4999e-190, 3)
def test_rounding_is_close_idempotent_and_blind_to_the_last_digits(value, digits):
    once = significant(value, digits)
    assert abs(once - value) <= 0.5000001 * 10.0 ** (1 - digits) * value
    assert significant(once, digits) == once
    nearby = significant(np.nextafter(value, np.inf), digits)
    assert nearby == once or abs(nearby - once) > 0.1 * 10.0 ** (-digits) * value


def test_settled_parameters_are_at_the_optimum_and_rounded():
    at = np.array([0.123456789, -1.987654321])

    def residuals(z):
        return np.concatenate([z - at, (z**2).sum(axis=-1, keepdims=True) * 0.1], axis=-1)

    rough, _ = least_squares(residuals, np.zeros(2), (-3.0, 3.0), 1e-6, tolerance=1e-3)
    exact, _ = least_squares(residuals, np.zeros(2), (-3.0, 3.0), 1e-6, tolerance=1e-14)
    settled, cost = least_squares(residuals, np.zeros(2), (-3.0, 3.0), 1e-6, tolerance=1e-3, decimals=6)
    assert np.abs(settled - exact).max() < 1e-6 < np.abs(rough - exact).max()
    assert settled.tolist() == [round(value, 6) for value in settled.tolist()]
    assert cost == pytest.approx(0.5 * np.sum(residuals(settled) ** 2))


def test_settled_parameters_stay_within_bounds():
    def residuals(z):
        return z - np.array([2.0, 0.5])

    bounds = (np.array([-1.0, -1.0]), np.array([1.0, 1.0]))
    found, _ = least_squares(residuals, np.zeros(2), bounds, 1e-6, tolerance=1e-8, decimals=5)
    assert found.tolist() == [1.0, 0.5]


def test_schedules_are_the_same_under_every_set_of_kernels():
    """Fit, predict and schedule in processes that sum in different orders; all bytes must agree."""
    code = """
import hashlib
from makespan.studies import run, scenario

base = scenario("mt", n_jobs=80)
digest = hashlib.sha256()
for name in ("sia", "gavel", "morphling", "morphling-e", "morphling-lookahead"):
    digest.update(run(base, name).result.events.to_csv().encode())
for item in (it for key in base.catalogue.workloads for it in base.catalogue.all(key)):
    digest.update(repr((item.predicted_iter_time_s, item.iter_time_s, item.busy)).encode())
print("digest", digest.hexdigest())
"""
    cores, digests = set(), set()
    for kernel in KERNELS.get(platform.machine(), ()):
        environment = os.environ | {"OPENBLAS_CORETYPE": kernel, "OPENBLAS_VERBOSE": "2"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        cores.update(re.findall(r"Core: (\w+)", done.stdout + done.stderr))
        digests.update(re.findall(r"digest (\w+)", done.stdout))
    if len(cores) < 2:
        pytest.skip(f"this numpy has one set of kernels here: {', '.join(cores) or 'unknown'}")
    assert len(digests) == 1
