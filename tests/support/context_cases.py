"""Models whose processes share sequences throughout the layers; every function runs in each process."""

import tempfile

import context_models
import pytest
import sequence_models
import torch
import torch.distributed as dist
from sequence_cases import verified
from torch.distributed.device_mesh import init_device_mesh

from makespan.slapo import (
    ArgumentError,
    ShardError,
    apply_plan,
    build,
    clip_grad_norm,
    create_schedule,
    load_sharded,
    replay,
    save_sharded,
    saved_tensors,
)
from makespan.slapo.layouts import sharding_of


def layers():
    """Attention is handed masks, rotations, a second sequence and learnt biases, or lies in the layer."""
    n = dist.get_world_size()
    for kind, words in (("Turning", ""), ("Translator", "recompute=full:0.5")):
        verified(context_models.seeded(kind), context_models.inputs(kind), f"cp{n} mb1 {words}")
    for kind, words in (("Layer", "recompute=selective"), ("Inside", ""), ("ChoiceLayer", "pp2")):
        sch = verified(sequence_models.seeded(kind), sequence_models.words(), f"cp{n} mb1 {words}")
        build(sch)
        with pytest.raises(
            ShardError, match=rf"'layers.0'.*\(2, 7, 16\) does not divide among {n} processes"
        ):
            sch.mod(sequence_models.words(7))


def replayed():
    """A journal can be replayed with the group of context parallelism."""
    n, words = dist.get_world_size(), sequence_models.words()
    sch = apply_plan(sequence_models.seeded("Layer").eval(), f"cp{n} mb1", words)
    model = sequence_models.seeded("Layer").eval()
    again = replay(model, sch.dump(), context_group=dist.group.WORLD)
    assert str(again) == str(sch) and torch.equal(again.mod(words), sch.mod(words))
    with pytest.raises(ArgumentError, match="a context_group of 2 processes, but the plan has no cp2"):
        apply_plan(sequence_models.seeded("Layer"), "mb1", words, context_group=dist.group.WORLD)
    with pytest.raises(ArgumentError, match="shares sequences among 3 processes, the group has 2; pass"):
        apply_plan(sequence_models.seeded("Layer"), "cp3 mb1", words)


def compiled():
    """Layers that are compiled gather keys and values, too."""
    n, words = dist.get_world_size(), context_models.inputs("Turning")
    verified(context_models.seeded("Turning"), words, f"cp{n} mb1 recompute=full", compiler="aot_eager")


def trained():
    """Weights stay the same in all processes; dropout draws apart, and gradients are clipped once."""
    words = sequence_models.words()
    sch = apply_plan(sequence_models.seeded("Layer"), f"cp{dist.get_world_size()} mb1", words)
    model, _ = build(sch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)  # as a launcher does for processes that share a model
    drawn = []
    model.layers[0].drop.register_forward_hook(lambda module, args, output: drawn.append(output == 0))
    for step in range(3):
        optimizer.zero_grad()
        model(sequence_models.words(seed=step)).square().mean().backward()
        norm = clip_grad_norm(sch, 0.5)
        expected = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
        assert norm > 0.5 and abs(float(expected) - 0.5) < 1e-4
        optimizer.step()
    for name, parameter in model.named_parameters():
        others = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(others, parameter.detach())
        assert all(torch.equal(other, parameter) for other in others), name
    others = [torch.empty_like(drawn[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(others, drawn[0])
    assert not torch.equal(*others[:2])


def kept():
    """Activations of layers take their share of the memory, but for keys and values."""
    n, words, sizes = dist.get_world_size(), sequence_models.words(), {}
    for plan in ("mb1", f"cp{n} mb1"):
        sch = create_schedule(sequence_models.seeded("Layer", depth=4))
        apply_plan(sch, plan, words)
        with saved_tensors(sch.mod) as saved:
            sch.mod(words)
        sizes[plan] = saved.n_bytes
    whole, part = sizes.values()
    assert part < 0.75 * whole, sizes


def gradients_agree(model, whole):
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        shard = sharding_of(model.get_submodule(owner)).tensors.get(own)
        wanted = whole.get_parameter(name).grad
        wanted = wanted if shard is None else shard.part_of(wanted)
        found = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=name)


def alone():
    """Return a group of this process."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def meshes():
    """Context parallelism composes with tensor, sequence and sharded data parallelism."""
    cp2 = {"tp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp")),
           "dp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))}  # fmt: skip
    mesh = cp2["tp"]
    groups = {"group": mesh.get_group("tp"), "context_group": mesh.get_group("cp")}
    for kind, words in (("Layer", ""), ("Turning", "nosp recompute=full"), ("Translator", "nosp")):
        source = sequence_models if kind == "Layer" else context_models
        given = context_models.inputs(kind)
        whole, model = (source.seeded(kind).eval() for _ in range(2))
        whole(*given).square().mean().backward()
        sch = apply_plan(model, f"tp2 cp2 mb1 {words}", given, **groups)
        build(sch, mesh=mesh)
        model(*given).square().mean().backward()
        gradients_agree(model, whole)
        norm = clip_grad_norm(sch, 1.0)
        with tempfile.TemporaryDirectory() as mine:
            paths = [mine]
            dist.broadcast_object_list(paths, src=0)
            save_sharded(sch, paths[0], step=1)
            other = create_schedule(source.seeded(kind), group=alone())
            for parameter in other.mod.parameters():
                parameter.data.zero_()
            assert load_sharded(other, paths[0]) == 1
            dist.barrier()
        for name, parameter in other.mod.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name
        assert abs(float(norm - torch.stack([one.grad.norm() for one in whole.parameters()]).norm())) < 1e-4
    with pytest.raises(ArgumentError, match="the group has 1; pass the group of context parallelism as con"):
        apply_plan(sequence_models.seeded("Layer"), "tp2 cp2 mb1", given[:1], group=groups["group"])
    mesh = cp2["dp"]
    whole, model = (sequence_models.seeded("Layer").eval() for _ in range(2))
    batch = torch.cat([sequence_models.words(seed=seed) for seed in (0, 1)])
    whole(batch).square().mean().backward()
    sch = apply_plan(model, "cp2 fsdp mb1", batch, context_group=mesh.get_group("cp"))
    build(sch, "fsdp", mesh=mesh)
    model(batch.chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
    gradients_agree(model, whole)


def staged():
    """Stages hand parts of sequences to each other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    words = torch.cat([sequence_models.words(seed=seed) for seed in (0, 1)])
    target = torch.randn(
        4, sequence_models.SEQ, sequence_models.WORDS, generator=torch.Generator().manual_seed(2)
    )
    whole, model = (sequence_models.seeded("Layer").eval() for _ in range(2))
    torch.nn.functional.mse_loss(whole(words), target).backward()
    sch = apply_plan(model, "cp2 pp2 mb1", words, context_group=mesh.get_group("cp"))
    stage, pipeline = build(
        sch, "pipeline", mesh=mesh, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss, schedule="1f1b"
    )
    pipeline.step(words, target=target)
    gradients_agree(stage, whole)
