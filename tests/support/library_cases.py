"""Schedules of the families in groups of processes; each process calls every function."""

import torch
import torch.distributed as dist

from makespan.papers.slapo.language import SCHEDULES, Verify, apply_schedule, create_schedule
from makespan.training.zoo import build_family, family_batch, family_spec

EVERYTHING = {
    "shard_embedding": True, "attn": "sdpa", "fuse": True, "compiler": None, "ckpt_ratio": 0.5,
    "broadcast_input": True,
}  # fmt: skip


def every_family():
    """Verify each schedule plainly and with all options, and that heads are left to each process."""
    for family in SCHEDULES:
        batch = family_batch(family_spec(family), 2, 0)
        for options in ({}, EVERYTHING):
            sch = create_schedule(build_family(family))
            with Verify(sch, batch.inputs):
                apply_schedule(sch, family, **options)
            n_local = sum(weight.numel() for weight in sch.mod.parameters())
            assert n_local < sum(weight.numel() for weight in build_family(family).parameters())


def samples_of_the_first():
    """Without hooks processes would compute with samples of their own."""
    spec = family_spec("opt")
    (tokens,) = family_batch(spec, 2, dist.get_rank()).inputs
    before = tokens.clone()
    model = apply_schedule(build_family("opt"), "opt", broadcast_input=True).mod.eval()
    first = build_family("opt").eval()(*family_batch(spec, 2, 0).inputs)
    torch.testing.assert_close(model(tokens), first)
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
