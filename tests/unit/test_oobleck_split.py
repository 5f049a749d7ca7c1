"""Layers of resilient pipelines whose backward passes cannot run in two parts."""

import pytest

pytest.importorskip("torch")

from chain_nodes import Nodes, plan_of, small_job

from makespan.errors import InputError

CHAIN = """
import torch
from torch import nn
from makespan.oobleck.chain import Chain

class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs, weight):
        context.save_for_backward(inputs, weight)
        return inputs @ weight

    @staticmethod
    def backward(context, gradient):
        inputs, weight = context.saved_tensors
        return gradient @ weight.T, inputs.T @ gradient + torch.rand_like(weight)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

class Drawing(Layer):
    def forward(self, inputs):
        return Noisy.apply(inputs, self.weight)

class Reentrant(Layer):
    def forward(self, inputs):
        return torch.utils.checkpoint.checkpoint(lambda one: one @ self.weight, inputs, use_reentrant=True)

def chain(kind):
    made = {"drawing": Drawing, "reentrant": Reentrant}[kind]
    return Chain(
        layers=[lambda: nn.Linear(4, 4), made],
        loss=lambda outputs, targets: (outputs - targets).square().mean(),
        samples=[(torch.full((4,), float(number)), torch.zeros(4)) for number in range(24)],
    )
"""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "drawing",
            "parts give another gradient of 'weight' of layer 1 than whole ones; expected .* 1f1b",
        ),
        ("reentrant", "in two parts: .*use_reentrant=True.*; expected the order of passes 1f1b"),
    ],
)
def test_layers_that_cannot_be_passed_in_two_parts_are_refused_before_the_first_step(kind, message, tmp_path):
    path = tmp_path / "layers.py"
    path.write_text(CHAIN)
    job = small_job(model=f"{path}:chain", model_options={"kind": kind})
    plan = plan_of(((0, 1), (1, 2), 6))
    nodes = Nodes(job, pass_order="zero-bubble")
    nodes.connect(plan)
    with pytest.raises(InputError, match=message):
        nodes.iterate(0)
    nodes = Nodes(job)
    nodes.connect(plan)
    nodes.iterate(0)
