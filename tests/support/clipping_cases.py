"""Gradients that are clipped by the norm of the whole model; each process of a group calls every function."""

import copy
import math

import parallel_cases
import pipeline_cases
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

from makespan.slapo import build, clip_grad_norm, create_schedule, full_state_dict
from makespan.training import PartialNormError

KINDS = (2.0, 1.0, math.inf)


def whole_norms(model, max_share=0.3):
    """Return norms of all kinds, a limit below the second, and clip by it."""
    gradients = [one.grad for one in model.parameters()]
    norms = {kind: torch.nn.utils.get_total_norm(gradients, kind) for kind in KINDS}
    limit = max_share * norms[2.0].item()
    clip_grad_norm_(model.parameters(), limit)
    return norms, limit


def check_clipped(sch, parameters, model, what):
    """Clip a scheduled model as the whole one was; all kinds of norms agree, and so does a step."""
    norms, limit = whole_norms(model)
    for kind, expected in norms.items():
        found = clip_grad_norm(sch, 1e9, kind)  # nothing is scaled
        torch.testing.assert_close(found, expected, msg=parallel_cases.labelled(f"{what}, norm {kind}"))
    torch.testing.assert_close(clip_grad_norm(sch, limit), norms[2.0])
    torch.optim.SGD(parameters, lr=0.1).step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected = model.state_dict()
    for key, one in full_state_dict(sch).items():
        torch.testing.assert_close(one, expected[key], msg=lambda text, key=key: f"{what}, {key}: {text}")


def refuse_plain(model, what):
    """Check that torch's own clipping says what to call, and changes nothing."""
    before = [one.grad.clone() for one in model.parameters()]
    with pytest.raises(PartialNormError, match=r"slapo\.clip_grad_norm\(schedule, max_norm\)"):
        clip_grad_norm_(model.parameters(), 1e-3)
    assert all(torch.equal(one.grad, old) for one, old in zip(model.parameters(), before, strict=True)), what


def tensor_parallel():
    """What all processes have counts once, and stays the same on all of them."""
    for cut in (parallel_cases.shard_layers, parallel_cases.shard_along_sequence):
        reference, model = parallel_cases.seeded(parallel_cases.Stack)
        sch = create_schedule(model)
        cut(sch)
        rows = parallel_cases.drawn(2, 4, parallel_cases.HIDDEN)
        for one in (reference, model):
            one(rows).square().mean().backward()
        if sch.world_size > 1:
            refuse_plain(model, cut.__name__)
            refuse_plain(build(sch)[0], cut.__name__)
            refuse_plain(model.layers[0].up, cut.__name__)
        clip_grad_norm_(model.last.parameters(), 1e9)  # what all processes have whole may be clipped alone
        check_clipped(sch, model.parameters(), reference, cut.__name__)
        for one in (model.last.weight, model.layers[0].norm.weight):
            everybody = [torch.empty_like(one) for _ in range(sch.world_size)]
            dist.all_gather(everybody, one.detach())
            assert all(torch.equal(one, other) for other in everybody)


def data_parallel():
    """With DDP and FSDP over all processes, then with two of tensor parallelism in each."""
    size = dist.get_world_size()
    for target in ("ddp", "fsdp"):
        for tp in (1, 2) if size == 4 else (1,):
            mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp"))
            reference, model = parallel_cases.seeded(parallel_cases.Stack)
            sch = create_schedule(model, group=mesh.get_group("tp"))
            parallel_cases.shard_layers(sch)
            _, engine = build(sch, target, mesh=mesh)
            rows = parallel_cases.drawn(4, 2, parallel_cases.HIDDEN)
            reference(rows).square().mean().backward()
            engine(rows.chunk(size // tp)[mesh.get_local_rank("dp")]).square().mean().backward()
            if tp > 1:
                with pytest.raises(PartialNormError):
                    clip_grad_norm_(engine.parameters(), 1e-3)
            check_clipped(sch, engine.parameters(), reference, f"{target}, {tp}")


def stages():
    """A parameter that two stages share counts once."""
    size = dist.get_world_size()
    for schedule, n_stages in [("1f1b", size)] + ([("interleaved", 4)] if size == 2 else []):
        whole = pipeline_cases.seeded()
        sch = pipeline_cases.cut(copy.deepcopy(whole), pipeline_cases.CUTS[n_stages])
        stage, engine = build(
            sch, "pipeline", n_microbatches=pipeline_cases.N_MICROBATCHES, loss_fn=pipeline_cases.loss_of,
            schedule=schedule,
        )  # fmt: skip
        source, target, answers = pipeline_cases.sample()
        pipeline_cases.by_hand(whole, source, target, answers)
        engine.step(source, target, target=answers)
        refuse_plain(stage, schedule)
        check_clipped(sch, stage.parameters(), whole, schedule)


def shards_in_stages():
    """Two stages of two processes each, which share the linear layers."""
    if dist.get_world_size() != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    whole = pipeline_cases.seeded()
    sch = create_schedule(copy.deepcopy(whole), group=mesh.get_group("tp"))
    for path in [f"{part}.block.{index}" for part in ("encoder", "decoder") for index in range(3)]:
        parallel_cases.shard_mlp(sch[path])
    sch.trace_until(["encoder", "decoder"])
    sch["encoder.block.1"].cut_pipeline_stage()
    stage, engine = build(sch, "pipeline", mesh=mesh, n_microbatches=4, loss_fn=pipeline_cases.loss_of)
    source, target, answers = pipeline_cases.sample()
    pipeline_cases.by_hand(whole, source, target, answers)
    engine.step(source, target, target=answers)
    check_clipped(sch, stage.parameters(), whole, "shards in stages")
