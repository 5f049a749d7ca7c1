"""Time of writing a schedule for a BERT-large whose parameters have no values.

Run with ``pytest benchmarks/bench_slapo.py --benchmark-only``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from makespan.slapo import Schedule, call_module, create_schedule
from makespan.training.zoo import build_family, family_spec

LAYERS = [f"bert.encoder.layer.{index}" for index in range(family_spec("bert", "large").n_layers)]


def bias_gelu(product: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Bias and activation."""
    return F.gelu(product + bias)


def residual_norm(features: torch.Tensor, residual: torch.Tensor) -> Any:
    """Dropout, sum and norm."""
    return call_module("LayerNorm", F.dropout(features, 0.1) + residual)


def fresh() -> tuple[tuple[Schedule], dict[str, Any]]:
    """Return the arguments of a step: a schedule without any."""
    return (create_schedule(build_family("bert", "large", meta=True)),), {}


def traced() -> tuple[tuple[Schedule], dict[str, Any]]:
    """Return a schedule whose feed-forward parts are traced."""
    (sch,), _ = fresh()
    trace(sch)
    return (sch,), {}


def split(sch: Schedule) -> None:
    """Shard and synchronise all layers."""
    for layer in LAYERS:
        for name in ("query", "key", "value"):
            sch[layer][f"attention.self.{name}"].shard(["weight", "bias"], axis=0)
        for first in ("attention.self", "intermediate.dense"):
            sch[layer][first].sync("bwd_post", "all_reduce")
        sch[layer]["intermediate.dense"].shard(["weight", "bias"], axis=0)
        for last in ("attention.output.dense", "output.dense"):
            sch[layer][last].shard("weight", axis=1)
            sch[layer][last].sync("fwd_post", "all_reduce")


def trace(sch: Schedule) -> None:
    """Capture the graphs of the feed-forward parts."""
    for layer in LAYERS:
        sch[layer]["intermediate.dense"].decompose()
        for part in ("intermediate", "attention.output", "output"):
            sch[layer][part].trace()


def find(sch: Schedule) -> int:
    """Look for what can be fused."""
    found = 0
    for layer in LAYERS:
        found += len(sch[layer]["intermediate"].find(bias_gelu))
        found += sum(len(sch[layer][part].find(residual_norm)) for part in ("attention.output", "output"))
    return found


def fuse(sch: Schedule) -> None:
    """Fuse it; what compiles it does so when the model runs."""
    for layer in LAYERS:
        for part, pattern in (
            ("intermediate", bias_gelu),
            ("attention.output", residual_norm),
            ("output", residual_norm),
        ):
            (match,) = sch[layer][part].find(pattern)
            sch[layer][part].fuse(match, compiler="dynamo")


def whole() -> Schedule:
    """Create a schedule and apply all of this."""
    (sch,), _ = fresh()
    split(sch)
    trace(sch)
    fuse(sch)
    for layer in LAYERS[::2]:
        sch[layer].checkpoint()
    return sch


def test_create_schedule(benchmark: Callable[..., object]) -> None:
    """Time the tree of the model."""
    model = build_family("bert", "large", meta=True)
    assert benchmark(create_schedule, model)


@pytest.mark.parametrize("step", [split, trace], ids=lambda one: one.__name__)
def test_step_on_a_fresh_schedule(benchmark: Any, step: Callable[[Schedule], object]) -> None:
    """Time steps that need nothing before."""
    benchmark.pedantic(step, setup=fresh, rounds=3)


@pytest.mark.parametrize("step", [find, fuse], ids=lambda one: one.__name__)
def test_step_on_traced_layers(benchmark: Any, step: Callable[[Schedule], object]) -> None:
    """Time steps that look at graphs."""
    benchmark.pedantic(step, setup=traced, rounds=3)


def test_whole_schedule(benchmark: Any) -> None:
    """Time all scheduling, the building of the model without values included."""
    sch = benchmark.pedantic(whole, rounds=3)
    assert len(sch.metadata.journal) > 10 * len(LAYERS)
