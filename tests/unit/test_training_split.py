"""Backward passes in two parts: bits of whole ones, and what waits."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from makespan.training.split import SplitBackward


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


def test_weights_can_be_told_to_come_early_and_the_others_come_from_the_last_to_the_first():
    model, inputs = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.randn(3, 8, requires_grad=True)
    outputs, order = model(inputs), []
    for index, layer in enumerate(model):
        layer.weight.register_hook(lambda gradient, index=index: order.append(index))
    early = list(model[1].parameters())
    split = SplitBackward([outputs], [torch.ones(3, 8)], [inputs], model.parameters(), early)
    assert order == [1] and all(weight.grad is not None for weight in early)
    split.finish()
    assert order == [1, 2, 0]
