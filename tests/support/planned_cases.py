"""Models that a plan schedules by their structure; each process calls every function."""

import odd_transformers
import sequence_models
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from makespan.slapo import (
    Verify,
    apply_plan,
    build,
    create_schedule,
    full_state_dict,
    init_empty_weights,
    replay,
)
from makespan.slapo.layouts import sharding_of
from makespan.training.zoo import build_family, family_batch, family_spec


def _verified(model, inputs, plan):
    sch = create_schedule(model)
    with Verify(sch, inputs, input_grads=[]) as check:
        apply_plan(sch, plan, inputs)
    assert check.report.is_equal and check.report.count("parameter gradient")
    assert not any("not compared" in note for note in check.report.notes), check.report.notes
    return sch


def unusual():
    """Transformers with names of their own are split, and their gradients are right in training, too."""
    n = dist.get_world_size()
    for kind in ("Forest", "Harbour", "Square", "Canal"):
        model = odd_transformers.seeded(kind)
        n_whole = sum(one.numel() for one in model.parameters())
        sch = _verified(model, odd_transformers.INPUTS[kind], f"tp{n} nosp mb1 recompute=full")
        assert sum(one.numel() for one in sch.mod.parameters()) < 0.9 * n_whole
        before = {name: tuple(one.shape) for name, one in odd_transformers.seeded(kind).state_dict().items()}
        build(sch)
        whole = full_state_dict(sch)
        assert {name: tuple(one.shape) for name, one in whole.items()} == before
    sch = _verified(sequence_models.seeded("NearLayer"), (sequence_models.words(),), f"tp{n} nosp mb1")
    assert len(sch.metadata.structure.kept_whole) == 2  # what makes biases of scores, in two layers


def experts_without_tokens():
    """Experts that no token of the example reached are split like others, and right when some do."""
    sch, few = create_schedule(odd_transformers.seeded("Market")), odd_transformers.words()[:1, :2]
    many = torch.arange(odd_transformers.WORDS).view(2, -1)
    with Verify(sch, many) as check:
        apply_plan(sch, f"tp{dist.get_world_size()} nosp mb1", few)
    assert check.report.is_equal
    rows = [part.path for part in sch.metadata.structure.parts if part.how == "rows"]
    assert len(rows) == 2 * 24
    build(sch)


def families():
    """So are models of the zoo."""
    n = dist.get_world_size()
    for family in ("bert", "gpt", "llama", "t5"):
        inputs = family_batch(family_spec(family), 2, seed=0).inputs
        build(_verified(build_family(family), inputs, f"tp{n} nosp mb1"))


def recomputed():
    """Layers whose attention, or whose products but some, are computed again have the same gradients."""
    n = dist.get_world_size()
    for what in ("selective", "operators:0.67"):
        for kind in ("Forest", "Harbour", "Square"):
            _verified(
                odd_transformers.seeded(kind),
                odd_transformers.INPUTS[kind],
                f"tp{n} nosp mb1 recompute={what}",
            )
        inputs = family_batch(family_spec("llama"), 2, seed=0).inputs
        _verified(build_family("llama"), inputs, f"tp{n} mb1 recompute={what}")


def compiled():
    """Layers that are compiled one by one exchange what they must, recomputed or not."""
    n = dist.get_world_size()
    for kind, words in (("Harbour", ""), ("Forest", " recompute=operators")):
        inputs = odd_transformers.INPUTS[kind]
        sch = create_schedule(odd_transformers.seeded(kind))
        with Verify(sch, inputs) as check:
            apply_plan(sch, f"tp{n} nosp mb1{words}", inputs, compiler="aot_eager")
        assert check.report.is_equal and check.report.count("parameter gradient")
        assert [entry.op for entry in sch.metadata.journal].count("compile") > 1


def sharded():
    """Plans that leave FSDP to the launcher compose with it: gradients are those of the whole batch."""
    n, draw = dist.get_world_size(), torch.Generator().manual_seed(4)
    for kind, words, compiler in (
        ("Forest", "recompute=operators", "aot_eager"),
        ("Forest", "recompute=selective:0.67", None),
        ("Square", "recompute=full", None),
    ):
        batch = torch.randint(odd_transformers.WORDS, (4, odd_transformers.SEQ), generator=draw)
        whole = odd_transformers.seeded(kind).eval()
        whole(batch).square().mean().backward()
        mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "tp"))
        model, tp = odd_transformers.seeded(kind).eval(), mesh.get_group("tp")
        sch = apply_plan(model, f"tp{n // 2} nosp fsdp mb1 {words}", batch, group=tp, compiler=compiler)
        assert any(note.startswith("left to the launcher: zero3") for note in sch.metadata.structure.notes)
        build(sch, "fsdp", mesh=mesh)
        model(batch.chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
        expected = dict(whole.named_parameters())
        for name, parameter in model.named_parameters():
            owner, _, own = name.rpartition(".")
            shard = sharding_of(model.get_submodule(owner)).tensors.get(own)
            wanted = expected[name].grad if shard is None else shard.part_of(expected[name].grad)
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted, rtol=1e-4, atol=1e-6)


def replayed():
    """The journal of a plan makes the same schedule of a fresh model."""
    inputs = odd_transformers.INPUTS["Square"]
    first = apply_plan(odd_transformers.seeded("Square"), "tp2 nosp mb1", inputs)
    again = replay(odd_transformers.seeded("Square"), first.dump())
    assert str(again) == str(first)
    assert torch.equal(first.mod.eval()(*inputs), again.mod.eval()(*inputs))
    with init_empty_weights():
        empty = odd_transformers.Square()
    model, _ = build(replay(empty, first.dump()), seed=0, init_weights=_drawn)
    assert model(*inputs).shape == (*inputs[0].shape, odd_transformers.WORDS)


def _drawn(module):
    for parameter in module.parameters(recurse=False):
        torch.nn.init.normal_(parameter)
