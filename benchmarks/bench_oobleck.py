"""Time of the searches for pipeline templates, one GPU a node, and of backward passes in two parts.

Run with ``pytest benchmarks/bench_oobleck.py --benchmark-only``.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from makespan.oobleck.profile import LayerProfile, ModelProfile, random32
from makespan.oobleck.templates import make_templates
from makespan.training.split import SplitBackward

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


@pytest.mark.parametrize("parts", ["whole", "first", "both"])
def test_backward_pass_of_transformer_layers(benchmark: Callable[..., object], parts: str) -> None:
    """Time backward passes of four layers: whole, the first part alone, and both parts."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def passed() -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, object]]:
        model.zero_grad()
        inputs = torch.randn(8, 64, 128, requires_grad=True)
        return (model(inputs).square().mean(), inputs), {}

    def backward(loss: torch.Tensor, inputs: torch.Tensor) -> None:
        if parts == "whole":
            torch.autograd.backward(loss)
            return
        split = SplitBackward([loss], [torch.ones_like(loss)], [inputs], model.parameters())
        if parts == "both":
            split.finish()

    benchmark.pedantic(backward, setup=passed, rounds=20, warmup_rounds=2)  # type: ignore[attr-defined]
