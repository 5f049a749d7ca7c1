"""What holds of schedules in a group of processes; every function runs in each of them."""

import copy

import torch
import torch.distributed as dist
from parallel_cases import HIDDEN, Mlp, assert_same, drawn, seeded, shard_mlp
from schedules import check_invariants
from torch import nn

from makespan.slapo import create_schedule, replay


def gathered(value):
    """Return the value of every process."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def copies_and_replays():
    reference, model = seeded(Mlp)
    sch = create_schedule(model, group=dist.new_group(range(dist.get_world_size())))
    sch["up"].annotate("weight", "role", "wide")
    shard_mlp(sch)
    sch.checkpoint()
    assert sch.mod.up.weight.role == "wide"
    copied = copy.deepcopy(sch)
    assert copied.group is sch.group and copied["up"].world_size == dist.get_world_size()
    again = replay(copy.deepcopy(reference), sch.dump())
    for one in (sch, copied, again):
        check_invariants(one)
        assert str(one) == str(sch)
        assert_same(reference, one.mod, drawn(2, 3, HIDDEN))
    copied["norm"].replace(nn.Identity())
    assert isinstance(sch["norm"].mod, nn.LayerNorm) and len(sch.metadata.journal) == 6


def masks_of_ranks():
    """Masks differ between processes and between calls; recomputation repeats them; all stay in step."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    sch = create_schedule(model)
    sch["0"].fork_rng()
    sch.checkpoint()
    data = torch.ones(64, requires_grad=True)
    outputs = []
    for _ in range(2):
        output = model[0](data)
        outputs.append(tuple(output.tolist()))
    masks = [mask for one in gathered(outputs) for mask in one]
    assert len(set(masks)) == len(masks)
    assert len(set(gathered(tuple(torch.get_rng_state().tolist())))) == 1
    output = model(data)
    output.sum().backward()
    assert torch.equal(data.grad, output)  # the mask of the backward pass is that of the output
