"""Backward passes in two parts: bits of whole ones, what waits, and what is refused."""

import pytest

torch = pytest.importorskip("torch")

from chain_nodes import Nodes, plan_of, small_job
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from makespan.errors import InputError
from makespan.oobleck.split import SplitBackward

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


class Twice(nn.Module):
    """A weight that two operators use, one after the other."""

    def __init__(self):
        super().__init__()
        self.shared, self.own = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs):
        return self.shared(F.gelu(self.own(self.shared(inputs))))


class Beside(nn.Module):
    """Weights beside the way to the input: a table, a layer used twice, an output of weights."""

    def __init__(self):
        super().__init__()
        self.table, self.mix, self.scale = nn.Embedding(4, 8), nn.Linear(8, 8), nn.Parameter(torch.rand(8))

    def forward(self, inputs):
        places = self.mix(self.table(torch.arange(4)))
        return self.mix(inputs)[:, :4] + places, self.scale.exp()


class Recomputed(nn.Module):
    """Layers that run again in the backward pass, with dropout."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8))

    def forward(self, inputs):
        return checkpoint(self.inner, inputs, use_reentrant=False)


class Recurrent(nn.Module):
    """A recurrent layer, whose weights are used in every position."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(8, 8, batch_first=True)

    def forward(self, inputs):
        return self.cell(inputs)[0]


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), 0),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 0),
    "twice": (Twice, 2),
    "beside": (Beside, 2),
    "recomputed": (Recomputed, 0),
    "recurrent": (Recurrent, 2),
    "frozen": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.ReLU()), 0),
}


def passed(model, parts):
    """Return the gradients of inputs and weights, and how many weights had theirs after the first part."""
    torch.manual_seed(1)
    inputs = torch.randn(3, 5, 8, requires_grad=True)
    model.zero_grad()
    outputs = model(inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    gradients = [torch.randn_like(output) for output in outputs]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    n_first = len(weights)
    if parts:
        split = SplitBackward(outputs, gradients, [inputs], weights)
        n_first = sum(weight.grad is not None for weight in weights)
        split.finish()
    else:
        torch.autograd.backward(outputs, gradients)
    return [inputs.grad, *(weight.grad for weight in weights)], n_first


@pytest.mark.parametrize("name", MODELS)
def test_two_parts_give_the_bits_of_a_whole_pass(name):
    build, expected_first = MODELS[name]
    torch.manual_seed(0)
    model = build()
    (whole, n_weights), (parts, n_first) = passed(model, False), passed(model, True)
    assert len(whole) == 1 + n_weights and all(map(torch.equal, whole, parts))
    assert n_first == expected_first


def test_a_second_part_adds_to_the_gradients_that_are_there():
    torch.manual_seed(0)
    model, inputs = nn.Linear(8, 8), torch.randn(2, 3, 8)
    splits = []
    for one in inputs:
        one.requires_grad_()
        outputs = model(one)
        splits.append(SplitBackward([outputs], [torch.ones_like(outputs)], [one], model.parameters()))
    assert model.weight.grad is None
    for split in splits:
        split.finish()
        split.finish()  # a second time there is nothing left
    found = model.weight.grad.clone()
    model.zero_grad()
    for one in inputs:
        model(one.detach()).sum().backward()
    assert torch.equal(found, model.weight.grad)


def test_each_operator_runs_once():
    """Products count: one for the input and one for the weights of each layer, as in a whole pass."""
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(3, 8, requires_grad=True)
    outputs = model(inputs)

    def products(run):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            result = run()
        return result, sum(one.count for one in profiler.key_averages() if one.key == "aten::mm")

    weights = list(model.parameters())
    split, n_first = products(lambda: SplitBackward([outputs], [torch.ones(3, 8)], [inputs], weights))
    _, n_second = products(split.finish)
    assert (n_first, n_second) == (2, 2)


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
