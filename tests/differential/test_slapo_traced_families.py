"""Unmodified models of the zoo, traced and cut, against themselves."""

import copy

import pytest

pytest.importorskip("torch")

import torch
from schedules import check_invariants

from makespan.slapo import create_schedule, partition
from makespan.training.zoo import FAMILIES, build_family, family_batch, family_loss, family_spec

CUTS = {
    "bert": ("bert.encoder", "layer"),
    "roberta": ("roberta.encoder", "layer"),
    "gpt": ("transformer", "h"),
    "opt": ("model.decoder", "layers"),
    "llama": ("model", "layers"),
}


def trained(model, batch):
    """Loss, gradients and buffers of a step with dropout."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = family_loss(model.train()(*batch.inputs), batch.targets)
    loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return loss.detach(), gradients, dict(model.named_buffers())


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_traced_as_it_is(family, flatten):
    model, batch = build_family(family), family_batch(family_spec(family, "tiny"), 2, seed=0)
    reference, keys = copy.deepcopy(model), list(model.state_dict())
    sch = create_schedule(model)
    sch.trace(flatten=flatten)
    check_invariants(sch)
    assert not sch.metadata.slots["trace"]
    assert list(sch.mod.state_dict()) == keys
    for found, wanted in zip(trained(sch.mod, batch), trained(reference, batch), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert torch.equal(sch.mod.eval()(*batch.inputs), reference.eval()(*batch.inputs))


@pytest.mark.parametrize("family", [*CUTS, "t5"])
def test_every_layer_can_end_a_stage(family):
    model, batch = build_family(family).eval(), family_batch(family_spec(family, "tiny"), 2, seed=0)
    expected, keys = model(*batch.inputs), set(model.state_dict())
    owners = [("encoder", "block"), ("decoder", "block")] if family == "t5" else [CUTS[family]]
    sch = create_schedule(model)
    sch.trace_until([owner for owner, _ in owners])
    for owner, layers in owners:
        for name in [name for name in sch[owner].child if name.startswith(f"{layers}.")]:
            sch[owner][name].cut_pipeline_stage()
    parts = partition(sch)
    assert torch.equal(parts.run(*batch.inputs), expected)
    assert set().union(*(stage.state_dict() for stage in parts.stages)) == keys


def test_a_layer_that_is_called_again_and_again_ends_no_stage():
    sch = create_schedule(build_family("albert"))
    path = "albert.encoder.albert_layer_groups.0"
    sch.trace_until("albert.encoder")
    with pytest.raises(ValueError, match="its owner calls it 3 times; expected one call"):
        sch[path].cut_pipeline_stage()
