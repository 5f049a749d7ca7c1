"""Checkpoints that are written under one layout and read under another; every process calls each function."""

import odd_transformers
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from makespan.errors import CheckpointError
from makespan.slapo import (
    ArgumentError,
    ShardError,
    apply_plan,
    build,
    create_schedule,
    full_state_dict,
    load_sharded,
    save_sharded,
)


def trained(kind="Forest", steps=2):
    """Return a model after a few steps of Adam in one process, and the optimizer.

    Gradients that vanish but for rounding, as those of biases of keys, must not make steps of full size.
    """
    model = odd_transformers.seeded(kind).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3, foreach=False)
    for _ in range(steps):
        step(model, optimizer, kind)
    return model, optimizer


def step(model, optimizer, kind):
    optimizer.zero_grad()
    model(*odd_transformers.INPUTS[kind]).square().mean().backward()
    optimizer.step()


def scheduled(kind, layout):
    """Return schedule and trained part of a model that has other weights."""
    inputs = odd_transformers.INPUTS[kind]
    n = dist.get_world_size()
    model = odd_transformers.seeded(kind).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if layout == "fsdp":
        sch = create_schedule(model)
        build(sch, "fsdp", mesh=init_device_mesh("cpu", (n,), mesh_dim_names=("dp",)))
        return sch, sch.mod
    if layout == "tp2 fsdp":
        mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("dp", "tp"))
        sch = apply_plan(model, "tp2 nosp mb1", inputs, group=mesh.get_group("tp"))
        build(sch, "fsdp", mesh=mesh)
        return sch, sch.mod
    if layout == "pp":
        sch = create_schedule(model)
        apply_plan(sch, f"pp{n} mb1", inputs)
        mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("pp",))
        stage, _ = build(sch, "pipeline", mesh=mesh, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
        return sch, stage
    sch = apply_plan(model, f"tp{n} nosp mb1 recompute=full", inputs)
    build(sch)
    return sch, sch.mod


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.5, eps=1e-3, foreach=False)


def read(kind, layout, directory):
    """Read what one process has written, and go on training as it does; write what comes of it."""
    reference, of_reference = trained(kind)
    sch, part = scheduled(kind, layout)
    optimizer = adam(part)
    assert load_sharded(sch, directory, optimizer=optimizer) == 2
    for key, tensor in full_state_dict(sch).items():
        assert torch.equal(tensor, reference.state_dict()[key]), key
    assert optimizer.param_groups[0]["lr"] == 0.01
    if layout != "pp":
        step(reference, of_reference, kind)
        step(part, optimizer, kind)
    steps = 2 if layout == "pp" else 3
    again = f"{directory}-{layout.replace(' ', '-')}"
    path = save_sharded(sch, again, step=steps, optimizer=optimizer)
    assert path.parent.name in again and path.name.endswith(f"{steps}")
    own, of_own = scheduled(kind, layout)
    assert load_sharded(own, again, optimizer=adam(of_own)) == steps
    for key, tensor in full_state_dict(own).items():
        torch.testing.assert_close(tensor, reference.state_dict()[key], rtol=1e-4, atol=1e-5)


def refused(directory):
    """All processes refuse what does not fit, and change nothing."""
    sch, part = scheduled("Forest", "tp")
    before = full_state_dict(sch)
    with pytest.raises(CheckpointError, match="has no checkpoint; expected a directory that save_sharded"):
        load_sharded(sch, f"{directory}-missing")
    with pytest.raises(ArgumentError, match=r"the checkpoint has no 'optimizer\.state"):
        load_sharded(sch, f"{directory}-plain", optimizer=adam(part))
    with pytest.raises(ArgumentError, match=r"the checkpoint has no 'model\.moss\.weight'"):
        load_sharded(sch, f"{directory}-other")
    wider = odd_transformers.seeded("Forest")
    wider.moss.weight = wider.sky.weight = torch.nn.Parameter(torch.zeros(64, odd_transformers.WIDTH))
    wider.moss.num_embeddings = wider.sky.out_features = 64
    other = apply_plan(wider, f"tp{dist.get_world_size()} nosp mb1", odd_transformers.INPUTS["Forest"])
    build(other)
    with pytest.raises(
        ShardError, match=r"'model.moss.weight' has shape \(32, 16\) in the checkpoint; expected \(64"
    ):
        load_sharded(other, f"{directory}-plain")
    assert all(torch.equal(one, before[key]) for key, one in full_state_dict(sch).items())
