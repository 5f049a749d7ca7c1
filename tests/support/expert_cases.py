"""Models whose experts are shared by processes of data parallelism, beside tensor parallelism of all else.

Every function runs in each of four processes, or of eight if there are replicas or stages, too.
"""

import tempfile
import warnings

import pytest
import sequence_models
import torch
import torch.distributed as dist
from context_cases import alone
from parallel_cases import labelled
from sequence_cases import gradients
from torch.distributed.device_mesh import init_device_mesh

from makespan.slapo import (
    ArgumentError,
    BuildError,
    Verify,
    apply_plan,
    build,
    clip_grad_norm,
    create_schedule,
    full_state_dict,
    load_sharded,
    replay,
    save_sharded,
)
from makespan.slapo.passes import without_dropout
from makespan.slapo.sharding import ranks_of

SEQ = sequence_models.SEQ
NONE, FIRST_TWO, FEW = torch.zeros(8, SEQ, 4), torch.zeros(8, SEQ, 4), torch.zeros(8, SEQ, 4)
"""What is added to the scores of experts for each token of all samples: nothing; so much that the latter two
get no token; or only the first tokens of a single sample, so that few processes hand any to them."""
FIRST_TWO[:], FEW[:] = torch.tensor([30.0, 20.0, 0.0, 0.0]), torch.tensor([30.0, 20.0, 0.0, 0.0])
FEW[2, : SEQ // 2] = torch.tensor([0.0, 0.0, 20.0, 30.0])


def few(module, args, scores):
    """Let few tokens choose the last two experts, so that most micro-batches have none for them."""
    first, last = torch.tensor([30.0, 20.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 20.0, 30.0])
    return scores + torch.where(scores[..., :1] > 0.9, last, first)


def own_samples():
    """Gradients in training mode, and a step, are those of all samples, also if experts get no token."""
    mesh, words = _mesh(), _samples(2)
    for kind, plan in (
        ("SharedLayer", "ep2 nosp"), ("SharedLayer", "ep2"), ("SharedLayer", "ep4 nosp recompute=full"),
        ("ChoiceLayer", "ep4 recompute=full:0.5"),
    ):  # fmt: skip
        sch = _scheduled(kind, f"dp2 tp2 {plan} mb1", mesh)
        assert sch.mod.layers[0].choice.experts.wide.shape[0] == (1 if "ep4" in plan else 2)
        model, _ = build(sch, mesh=mesh)
        for prefers in (NONE, FIRST_TWO, FEW):
            whole = _has_gradients_of_all(sch, model, kind, words, (mesh.get_local_rank("ep"), 2), prefers)
        if "recompute" not in plan or kind == "ChoiceLayer":
            _counts_once(sch, whole, kind)


def verified():
    """A verification hands all processes the same samples; journals are replayed, and dp may be left out."""
    mesh, words = _mesh(), sequence_models.words(seed=dist.get_rank())
    for plan in ("ep2 mb1", "ep4 nosp mb1"):
        sch = create_schedule(sequence_models.seeded("SharedLayer"), **_groups(mesh))
        with warnings.catch_warnings(), Verify(sch, words, input_grads=[], by_layers="ep4" in plan) as check:
            warnings.filterwarnings("ignore", "apply_plan of")
            apply_plan(sch, f"tp2 {plan}", words)
        report = check.report
        assert report.world_size == 4 and report.count("parameter gradient in training")
        assert not any("compared as a whole" in note for note in report.notes), report.notes
        again = replay(sequence_models.seeded("SharedLayer").eval(), sch.dump(), **_groups(mesh))
        build(sch, mesh=mesh)
        assert str(again) == str(sch)
        assert torch.equal(again.mod(words), sch.mod.eval()(words))


def refused():
    """Groups that do not fit the plan are named, and so are models that differ."""
    mesh, words = _mesh(), sequence_models.words()
    model, groups = sequence_models.seeded("SharedLayer"), _groups(mesh)
    with pytest.raises(ArgumentError, match=r"experts out to 2 processes .* has 1; pass .* as expert_g"):
        apply_plan(model, "dp2 tp2 ep2 mb1", words, group=groups["group"])
    with pytest.raises(ArgumentError, match=r"experts out to 4 processes .* has 2; pass .* as expert_g"):
        apply_plan(model, "dp4 tp2 ep4 mb1", words, **groups)
    sch = _scheduled("SharedLayer", "dp2 tp2 ep2 mb1", mesh)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ArgumentError, match=r"of expert parallelism are \[.*\], ep of the mesh is \[\]; use"):
        build(sch, "ddp", mesh=other)
    if dist.get_rank() == 3:  # two processes hold other experts, and would wait for the others
        torch.nn.init.normal_(sch.mod.layers[1].choice.experts.wide)
    with pytest.raises(BuildError, match=r"'layers.1.choice.experts.wide' has other values in process \d of"):
        build(sch, mesh=mesh)


def across_sequences():
    """Processes that hold parts of sequences hold some experts each, also beside those that share layers."""
    n = dist.get_world_size()
    cases = [("ChoiceLayer", (n,), ("cp",), f"cp{n} ep{n} recompute=full")]
    if n == 4:
        rest = ("ep2", "ep2 nosp", "ep4 recompute=full")
        cases += [("SharedLayer", (2, 2), ("cp", "tp"), f"cp2 tp2 {words}") for words in rest]
        cases += [("SharedLayer", (2, 2), ("ep", "cp"), "dp2 cp2 ep4")]
        cases += [("SharedLayer", (2, 2), ("dp", "cp"), "dp2 cp2 ep2 fsdp")]
    for kind, sizes, names, plan in cases:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        groups = {"context_group": mesh.get_group("cp")}
        groups |= {"group": mesh.get_group("tp")} if "tp" in names else {}
        groups |= {"expert_group": mesh.get_group("ep")} if "ep" in names else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "apply_plan of")
            sch = apply_plan(_whole(kind), f"{plan} mb1", sequence_models.words(), **groups)
        held = 4 // int(plan.partition("ep")[2][0])
        assert all(layer.choice.experts.wide.shape[0] == held for layer in sch.mod.layers), plan
        model, _ = build(sch, "fsdp" if "fsdp" in plan else None, mesh=mesh)
        apart = next((name for name in ("dp", "ep") if name in names), None)
        place = (mesh.get_local_rank(apart), 2) if apart else (0, 1)
        words = _samples(place[1])
        for prefers in (FIRST_TWO, FEW) if n == 2 else (FEW,):
            whole = _has_gradients_of_all(sch, model, kind, words, place, prefers)
        if "ep4" in plan or names == ("cp",):
            _counts_once(sch, whole, kind)


def verified_across_sequences():
    """A verification runs such processes together, and journals are replayed."""
    n, words = dist.get_world_size(), sequence_models.words()
    names = ("cp", "tp") if n > 2 else ("cp",)
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    groups = {"context_group": mesh.get_group("cp"), "group": mesh.get_group(names[-1])}
    for plan in ("cp2 ep2",) if n == 2 else ("cp2 tp2 ep2", "cp2 tp2 ep4 nosp"):
        sch = create_schedule(sequence_models.seeded("SharedLayer"), **groups)
        with warnings.catch_warnings(), Verify(sch, words, input_grads=[]) as check:
            warnings.filterwarnings("ignore", "apply_plan of")
            apply_plan(sch, f"{plan} mb1", words)
        assert check.report.world_size == n and check.report.count("parameter gradient in training")
        again = replay(sequence_models.seeded("SharedLayer").eval(), sch.dump(), **groups)
        build(sch, mesh=mesh)
        assert str(again) == str(sch)
        assert torch.equal(again.mod(words), sch.mod.eval()(words))


def staged_across_sequences():
    """Stages of such processes give gradients of weights later, also those without a token."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    words, loss = _samples(2), torch.nn.functional.mse_loss
    shape = (len(words), SEQ, sequence_models.WORDS)
    target = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    for order in ("", "zero-bubble"):
        whole, group = _whole("ChoiceLayer"), mesh.get_group("cp")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "apply_plan of")
            plan = f"pp2 cp2 ep2 {order} mb1"
            sch = apply_plan(_whole("ChoiceLayer"), plan, words[:2], context_group=group)
        for layer in (*sch.mod.layers, *whole.layers):
            layer.choice.choice.register_forward_hook(few)
        loss(whole(words), target).backward()
        stage, pipeline = build(sch, "pipeline", mesh=mesh, n_microbatches=2, loss_fn=loss)
        pipeline.step(words, target=target)
        for name, wanted, found in gradients(stage, whole):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=labelled(name))


def replicated():
    """Groups that share experts are replicas of each other, with FSDP or DDP over them."""
    mesh, words = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp")), _samples(4)
    place = 2 * mesh.get_local_rank("dp") + mesh.get_local_rank("ep"), 4
    for plan, left in (("ep2 fsdp", "dp2, zero3, mb1"), ("ep2 zero0 nosp", "dp2, mb1")):
        sch = _scheduled("SharedLayer", f"dp4 tp2 {plan} mb1", mesh)
        assert f"left to the launcher: {left}" in sch.metadata.structure.notes
        model, _ = build(sch, "fsdp" if "fsdp" in plan else "ddp", mesh=mesh)
        for prefers in (NONE, FEW):
            _has_gradients_of_all(sch, model, "SharedLayer", words, place, prefers)


def staged():
    """Stages of processes with samples of their own send tokens to experts of the same stage."""
    mesh, words = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "ep", "tp")), _samples(4)
    shape = (len(words), sequence_models.SEQ, sequence_models.WORDS)
    target, own = torch.randn(shape, generator=torch.Generator().manual_seed(2)), mesh.get_local_rank("ep")
    loss, whole = torch.nn.functional.mse_loss, _whole("SharedLayer")
    for layer in whole.layers:
        layer.choice.choice.register_forward_hook(few)
    loss(whole(words), target).backward()
    for plan in ("ep2", "ep4 nosp", "ep2 zero-bubble", "ep2 nosp zero-bubble"):
        sch = _scheduled("SharedLayer", f"pp2 dp2 tp2 {plan} mb1", mesh)
        for layer in sch.mod.layers:
            layer.choice.choice.register_forward_hook(few)
        stage, pipeline = build(sch, "pipeline", mesh=mesh, n_microbatches=2, loss_fn=loss)
        pipeline.step(words.chunk(2)[own], target=target.chunk(2)[own])
        for name, wanted, found in gradients(stage, whole):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=labelled(name))


def _mesh():
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("ep", "tp"))


def _groups(mesh):
    return {"group": mesh.get_group("tp"), "expert_group": mesh.get_group("ep")}


def _samples(count):
    return torch.cat([sequence_models.words(seed=seed) for seed in range(count)])


def _whole(kind):
    return sequence_models.seeded(kind).eval()


def _scheduled(kind, plan, mesh):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "apply_plan of")
        return apply_plan(_whole(kind), plan, sequence_models.words(), **_groups(mesh))


def _counts_once(sch, whole, kind):
    """Clip gradients, make a step and save: norms, states and checkpoints count each expert once."""
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm(sch, 0.1), expected)
    for model in (sch.mod, whole):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    state = full_state_dict(sch)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=labelled(name))
    with tempfile.TemporaryDirectory() as mine:
        paths = [mine]
        dist.broadcast_object_list(paths, src=0)
        save_sharded(sch, paths[0], step=1)
        other = create_schedule(sequence_models.seeded(kind), group=alone())
        assert load_sharded(other, paths[0]) == 1
        dist.barrier()
    assert all(torch.equal(value, state[name]) for name, value in other.mod.state_dict().items())


def _has_gradients_of_all(sch, model, kind, words, place, prefers):
    """Compare results and gradients in training mode with those of the whole model, and return it."""
    whole, part, (own, count) = _whole(kind), sch.mod, place
    prefers = prefers[: len(words)]
    mine = prefers.chunk(count)[own]

    def prefer(module, args, scores):
        of_all = prefers if scores.numel() == prefers.numel() else mine
        # The part of each sequence that this process holds, of those of context parallelism first.
        for ranks in (sch.metadata.context, ranks_of(sch)):
            if scores.numel() < of_all.numel():
                of_all = of_all.chunk(ranks.size, 1)[ranks.rank]
        return scores + of_all.reshape(scores.shape)

    handles = [
        layer.choice.choice.register_forward_hook(prefer) for one in (whole, part) for layer in one.layers
    ]
    with without_dropout():
        expected = whole.train()(words)
        expected.square().mean().backward()
        model.train().zero_grad()
        made = model(words.chunk(count)[own])
        torch.testing.assert_close(made, expected.chunk(count)[own], rtol=1e-4, atol=1e-5)
        made.square().mean().backward()
    for name, wanted, found in gradients(part, whole):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=labelled(name))
    for handle in handles:
        handle.remove()
    return whole
