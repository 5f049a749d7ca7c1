"""Bytes that a forward pass keeps for the backward one, and an artificial end of them."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.utils.checkpoint import checkpoint

from makespan.slapo import OutOfBudgetError, saved_tensors

BATCH, WIDTH = 5, 8
INPUT_BYTES = 4 * BATCH * WIDTH


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def test_inputs_and_results_count_once_and_parameters_do_not(model):
    inputs = torch.randn(BATCH, WIDTH, requires_grad=True)
    with saved_tensors(model) as kept:
        model(inputs).sum().backward()
    # The input of the first layer; the result of the tanh, which is the input of the second one too.
    assert kept.n_bytes == 2 * INPUT_BYTES


def test_views_of_one_storage_count_once():
    tensor = torch.randn(BATCH, WIDTH, requires_grad=True)
    doubled = tensor * 2
    with saved_tensors(nn.Identity()) as kept:
        (doubled[:2] * doubled[2:4]).sum()
    assert kept.n_bytes == INPUT_BYTES


def test_a_checkpointed_region_keeps_its_inputs_only(model):
    inputs = torch.randn(BATCH, WIDTH, requires_grad=True)
    with saved_tensors(model) as kept:
        result = checkpoint(model, inputs, use_reentrant=False)
        forward = kept.n_bytes
        result.sum().backward()
    assert forward == INPUT_BYTES


def test_the_budget_ends_the_pass_where_it_is_exceeded(model):
    inputs = torch.randn(BATCH, WIDTH, requires_grad=True)
    with saved_tensors(model, budget_bytes=2 * INPUT_BYTES):
        model(inputs)
    with (
        pytest.raises(OutOfBudgetError, match=f"saved {2 * INPUT_BYTES} bytes.*budget is {INPUT_BYTES}"),
        saved_tensors(model, budget_bytes=INPUT_BYTES),
    ):
        model(inputs)
    assert issubclass(OutOfBudgetError, MemoryError)


def test_gradients_are_those_without_counting(model):
    inputs = torch.randn(BATCH, WIDTH)
    model(inputs).sum().backward()
    plain = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    with saved_tensors(model):
        model(inputs).sum().backward()
    assert all(torch.equal(one, other.grad) for one, other in zip(plain, model.parameters(), strict=True))
