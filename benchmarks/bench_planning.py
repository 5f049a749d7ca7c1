"""Cost of predictions for models and clusters of one's own: single points, grids, and a whole search."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from makespan.planning import (
    Architecture,
    Attention,
    Experts,
    FeedForward,
    Latent,
    Layers,
    Layout,
    Pricer,
    Training,
    plan,
    read_machines,
    read_model,
    software,
)
from makespan.planning.pricing import layouts
from makespan.planning.steptime import Grid

MACHINES = read_machines("64xh100-80")
STACK = software("megatron-bridge")


def _dense(i: int) -> tuple[Layers, ...]:
    return (Layers(16 + i, Attention(32, 8, 128, 128), FeedForward(14336, True)),)


def _mixture(i: int) -> tuple[Layers, ...]:
    attention = Attention(128, 128, 192, 128, latent=Latent(1536, 512, 64))
    experts = Experts(256, 8, 2048, 2048, n_groups=8, groups_per_token=4)
    return (Layers(3, attention, FeedForward(18432, True)), Layers(16 + i, attention, experts))


def _alternating(i: int) -> tuple[Layers, ...]:
    """Return 36 layers, every second one with a window."""
    experts = Experts(128, 4, 2880 + 4 * i, has_bias=True)
    return tuple(Layers(1, Attention(64, 8, 64, 64, window=128 * (k % 2)), experts) for k in range(36))


def _local_and_global(i: int) -> tuple[Layers, ...]:
    """Return 36 dense layers, every sixth one without a window."""
    return tuple(
        Layers(
            1,
            Attention(32, 16, 128, 128, window=1024 * (k % 6 != 5), n_norms=2),
            FeedForward(21504 + 4 * i, True),
            norm_vectors=4,
        )
        for k in range(36)
    )


@pytest.mark.parametrize("n_points", [400])
@pytest.mark.parametrize("layers", [_dense, _mixture, _alternating, _local_and_global])
def test_points_with_a_model_each(
    benchmark: Any, layers: Callable[[int], tuple[Layers, ...]], n_points: int
) -> None:
    """Points per second, each with a model of its own."""

    def price() -> float:
        total = 0.0
        for i in range(n_points):
            model = Architecture(f"own-{i}", "llama", 4096, layers(i), 128256)
            pricer = Pricer(Training(model, 8192, 256), MACHINES, STACK)
            total += pricer.price(Layout(dp=16, tp=4)).step_s
        return total

    assert benchmark(price) > 0
    if benchmark.stats is not None:  # None where nothing is timed
        benchmark.extra_info["per_second"] = n_points / benchmark.stats["min"]


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_grid_of_layouts(benchmark: Any, is_warm: bool) -> None:
    """Points per second of one model, from layouts or from their columns."""
    pricer = Pricer(Training(read_model("llama3-70b"), 8192, 256), MACHINES, STACK)
    few = list(itertools.islice(layouts(pricer.training, MACHINES), 1000))
    tried = few * 50
    grid = Grid.of(tried)

    def price() -> float:
        return float(pricer.parts_s(grid if is_warm else Grid.of(tried)).sum())

    assert benchmark(price) > 0
    if benchmark.stats is not None:  # None where nothing is timed
        benchmark.extra_info["per_second"] = len(tried) / benchmark.stats["min"]


def test_a_search(benchmark: Any) -> None:
    """The best layouts of a 70B model on 512 GPUs."""
    training, machines = Training(read_model("llama3-70b"), 8192, 1024), read_machines("512xh100-80")
    found = benchmark(lambda: plan(Pricer(training, machines, STACK)))
    assert found.best
