"""Schedules of the families in groups of processes; each process calls every function."""

import inspect
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from makespan.slapo import SCHEDULES, Verify, apply_schedule, build, create_schedule
from makespan.training.zoo import build_family, family_batch, family_loss, family_spec

EVERYTHING = {
    "shard_embedding": True, "attn": "sdpa", "fuse": True, "compiler": None, "ckpt_ratio": 0.5,
    "broadcast_input": True,
}  # fmt: skip


def every_family():
    """Verify each schedule with all options, and that parts of the parameters are left to each process."""
    for family in SCHEDULES:
        sch = create_schedule(build_family(family))
        with Verify(sch, family_batch(family_spec(family), 2, 0).inputs):
            apply_schedule(sch, family, **EVERYTHING)
        n_local = sum(weight.numel() for weight in sch.mod.parameters())
        assert n_local < sum(weight.numel() for weight in build_family(family).parameters())


def nothing_is_forgotten():
    """Building finds every split layer whole and every exchange in its place."""
    for family in SCHEDULES:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            build(apply_schedule(build_family(family), family, shard_embedding=True))


def stages_of_parts():
    """Two stages of two processes each train as one process does."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    for family in ("gpt", "llama"):
        batch, whole = family_batch(family_spec(family), 4, 0), build_family(family)
        loss = family_loss(whole(*batch.inputs), batch.targets)
        loss.backward()
        sch = create_schedule(build_family(family), group=mesh.get_group("tp"))
        apply_schedule(sch, family, **EVERYTHING | {"broadcast_input": False, "pipeline_cuts": 2})
        stage, pipeline = build(sch, "pipeline", mesh=mesh, n_microbatches=2, loss_fn=family_loss)
        losses = []
        pipeline.step(*batch.inputs, target=batch.targets, losses=losses)
        assert len(losses) == 2 * (mesh.get_local_rank("pp") == 1)
        if losses:
            torch.testing.assert_close(torch.stack(losses).mean(), loss)
        gradients = {name: weight.grad for name, weight in whole.named_parameters(remove_duplicate=False)}
        named = dict(stage.named_parameters())
        assert len(named) >= 10  # an embedding and a layer
        for name, weight in named.items():
            shard = vars(weight).get("shard")
            expected = gradients[name] if shard is None else shard.part_of(gradients[name])
            torch.testing.assert_close(weight.grad, expected, rtol=1e-4, atol=1e-5, msg=name)


def samples_of_the_first():
    """Without hooks processes would compute with samples of their own."""
    spec = family_spec("opt")
    (tokens,) = family_batch(spec, 2, dist.get_rank()).inputs
    before = tokens.clone()
    model = apply_schedule(build_family("opt"), "opt", broadcast_input=True).mod.eval()
    first = build_family("opt").eval()(*family_batch(spec, 2, 0).inputs)
    torch.testing.assert_close(model(tokens), first)
    (name,) = inspect.signature(build_family("opt").forward).parameters
    torch.testing.assert_close(model(**{name: tokens}), first)
    assert torch.equal(tokens, before)


def dropout_of_heads_differs():
    """In training each process drops other shares of its own heads, and the same of what all have."""
    sch = apply_schedule(build_family("bert").train(), "bert")
    dropout = sch["bert.encoder.layer.0.attention.self.dropout"].mod
    torch.manual_seed(0)
    dropped = dropout(torch.ones(64, 64))
    common = sch["bert.encoder.layer.0.output.dropout"].mod(torch.ones(64, 64))
    for values, agree in ((dropped, False), (common, True)):
        everybody = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, values)
        assert all(torch.equal(everybody[0], other) for other in everybody[1:]) == agree
