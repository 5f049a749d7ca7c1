"""Time of the searches for pipeline templates, one GPU a node.

Run with ``pytest benchmarks/bench_oobleck.py --benchmark-only``.
"""

from collections.abc import Callable

import pytest

from makespan.oobleck.profile import LayerProfile, ModelProfile, random32
from makespan.oobleck.templates import make_templates

CASES = {
    "uniform-96-layers-12-nodes": (96, 1.0, 12),
    "skewed-32-layers-12-nodes": (32, 4.0, 12),
    "skewed-96-layers-12-nodes": (96, 4.0, 12),
    "skewed-96-layers-30-nodes": (96, 4.0, 30),
}
"""Layers, the last of them over the first, and nodes."""


@pytest.mark.parametrize("name", CASES)
def test_exact_template(benchmark: Callable[..., object], name: str) -> None:
    """Time one template by the exact search."""
    n_layers, steepest, n_nodes = CASES[name]
    growth = [1.0 + (steepest - 1.0) * index / (n_layers - 1) for index in range(n_layers)]
    profile = ModelProfile(name, tuple(LayerProfile(0.05e-3 * one, 0.1e-3 * one) for one in growth))
    assert benchmark(make_templates, profile, [n_nodes])


def test_published_templates(benchmark: Callable[..., object]) -> None:
    """Time all templates up to 12 nodes by the published search."""
    assert benchmark(make_templates, random32(0), range(1, 13), 1, "dc")
