"""Clipping in one process: the bits are torch's own, and what is a part says so."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn.utils import clip_grad_norm_

from makespan.errors import InputError, MakespanError
from makespan.oobleck.chain import Chain
from makespan.oobleck.job import ChainJob
from makespan.oobleck.stage import HeldLayers
from makespan.slapo import ArgumentError, clip_grad_norm as clip_scheduled, create_schedule
from makespan.training import PartialNormError, clip_grad_norm, refuse_plain_clipping


def trained(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].bias.requires_grad_(False)
    model(torch.randn(3, 4)).square().sum().backward()
    return model


@pytest.mark.parametrize("kind", [1.0, 2.0, 3.5, float("inf")])
def test_what_nothing_is_split_of_is_clipped_as_torch_does_to_the_bit(kind):
    plain, ours, scheduled = trained(), trained(), trained()
    expected = clip_grad_norm_(plain.parameters(), 0.5, kind)
    assert torch.equal(clip_grad_norm(ours.parameters(), 0.5, kind), expected)
    assert torch.equal(clip_scheduled(create_schedule(scheduled), 0.5, kind), expected)
    for model in (ours, scheduled):
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad)


def test_a_part_of_a_model_is_not_taken_for_the_whole():
    model, others = trained(), trained(1)
    before = model[2].weight.grad.clone()
    refuse_plain_clipping([model[2].weight], "the option `limit` of the job")
    with pytest.raises(
        PartialNormError, match="whose norm is not that of the whole; expected the option `limit`"
    ):
        clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(MakespanError):
        nn.utils.clip_grad_norm_(model[2].weight, 0.1)
    assert torch.equal(model[2].weight.grad, before)
    clip_grad_norm_(others.parameters(), 0.1)
    clip_grad_norm_(model[0].parameters(), 0.1)


def test_limits_kinds_and_nodes_are_checked():
    model = trained()
    for limit, kind in ((0.0, 2.0), (-1.0, 2.0), (float("nan"), 2.0), (1.0, 0.0)):
        with pytest.raises(InputError, match="expected numbers > 0"):
            clip_grad_norm(model.parameters(), limit, kind)
    with pytest.raises(ArgumentError, match="clip_grad_norm of '0': expected the schedule of a whole model"):
        clip_scheduled(create_schedule(model)["0"], 1.0)
    model[0].weight.grad[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm(model.parameters(), 1.0, error_if_nonfinite=True)


class Clipping(torch.optim.SGD):
    """An optimizer that limits the norm of what it is given, which is one layer of a pipeline."""

    def step(self, closure=None):
        clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 0.1)
        return super().step(closure)


def test_an_optimizer_of_a_layer_that_clips_is_told_of_the_limit_of_the_job():
    layers = [lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 1)]
    chain = Chain(layers, nn.functional.mse_loss, None, optimizer=lambda weights: Clipping(weights, lr=0.1))
    held = HeldLayers(ChainJob(), chain, torch.device("cpu"))
    held.hold([0, 1])
    held.apply_layer(1, (held.apply_layer(0, (torch.ones(2, 4),), 0, 0),), 0, 0).sum().backward()
    with pytest.raises(PartialNormError, match="expected clip_norm of the job"):
        held.step([0, 1], 0)
