"""Models that a plan schedules by their structure; each process calls every function."""

import odd_transformers
import torch
import torch.distributed as dist

from makespan.slapo import (
    Verify,
    apply_plan,
    build,
    create_schedule,
    full_state_dict,
    init_empty_weights,
    replay,
)
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
    for kind in ("Forest", "Harbour", "Square"):
        model = odd_transformers.seeded(kind)
        n_whole = sum(one.numel() for one in model.parameters())
        sch = _verified(model, odd_transformers.INPUTS[kind], f"tp{n} mb1 recompute=full")
        assert sum(one.numel() for one in sch.mod.parameters()) < 0.9 * n_whole
        before = {name: tuple(one.shape) for name, one in odd_transformers.seeded(kind).state_dict().items()}
        build(sch)
        whole = full_state_dict(sch)
        assert {name: tuple(one.shape) for name, one in whole.items()} == before


def experts_without_tokens():
    """Experts that no token of the example reached are split like others, and right when some do."""
    sch, few = create_schedule(odd_transformers.seeded("Market")), odd_transformers.words()[:1, :2]
    many = torch.arange(odd_transformers.WORDS).view(2, -1)
    with Verify(sch, many) as check:
        apply_plan(sch, f"tp{dist.get_world_size()} mb1", few)
    assert check.report.is_equal
    rows = [part.path for part in sch.metadata.structure.parts if part.how == "rows"]
    assert len(rows) == 2 * 24
    build(sch)


def families():
    """So are models of the zoo."""
    n = dist.get_world_size()
    for family in ("bert", "gpt", "llama", "t5"):
        inputs = family_batch(family_spec(family), 2, seed=0).inputs
        build(_verified(build_family(family), inputs, f"tp{n} mb1"))


def recomputed():
    """Layers whose attention, or whose products but some, are computed again have the same gradients."""
    n = dist.get_world_size()
    for what in ("selective", "operators:0.67"):
        for kind in ("Forest", "Harbour", "Square"):
            _verified(
                odd_transformers.seeded(kind), odd_transformers.INPUTS[kind], f"tp{n} mb1 recompute={what}"
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
            apply_plan(sch, f"tp{n} mb1{words}", inputs, compiler="aot_eager")
        assert check.report.is_equal and check.report.count("parameter gradient")
        assert [entry.op for entry in sch.metadata.journal].count("compile") > 1


def replayed():
    """The journal of a plan makes the same schedule of a fresh model."""
    inputs = odd_transformers.INPUTS["Square"]
    first = apply_plan(odd_transformers.seeded("Square"), "tp2 mb1", inputs)
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
