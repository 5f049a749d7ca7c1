"""Models whose processes share sequences, too; every function runs in each process."""

import warnings

import pytest
import sequence_models
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from makespan.slapo import (
    ArgumentError,
    BuildError,
    ShardError,
    Verify,
    apply_plan,
    build,
    create_schedule,
    replay,
    saved_tensors,
)
from makespan.slapo.layouts import sharding_of
from makespan.training.zoo import build_family, family_batch, family_spec


def verified(model, inputs, plan, **options):
    """Apply a plan to a model, and compare outputs and all gradients with the original in both modes."""
    sch = create_schedule(model)
    with warnings.catch_warnings(), Verify(sch, inputs, input_grads=[]) as check:
        warnings.filterwarnings("ignore", "apply_plan of")
        apply_plan(sch, plan, inputs, **options)
    assert check.report.is_equal and check.report.count("parameter gradient in training")
    assert not any("not compared" in note for note in check.report.notes), check.report.notes
    return sch


def exchanges(sch):
    return {entry.arguments.get("sync_op_or_fn") for entry in sch.metadata.journal if entry.op == "sync"}


def families():
    """Models of the zoo share sequences, with layers that are recomputed or cut into stages."""
    n = dist.get_world_size()
    for family, words in (
        ("bert", "recompute=full"), ("gpt", "pp2"),
        ("llama", "recompute=selective"), ("t5", "recompute=full:0.5"), ("albert", ""),
    ):  # fmt: skip
        inputs = family_batch(family_spec(family), 2, seed=0).inputs
        sch = verified(build_family(family), inputs, f"tp{n} mb1 {words}")
        assert {"RR->SR", "all_gather", "reduce_scatter", "SR->RR"} <= exchanges(sch)
        build(sch)


def layers():
    """So do layers that read whole sequences elsewhere, and those with parts that stay whole."""
    n, words = dist.get_world_size(), sequence_models.words()
    for kind in ("Layer", "ChoiceLayer", "StallLayer", "NearLayer"):
        sch = verified(sequence_models.seeded(kind), words, f"tp{n} mb1 recompute=full:0.5")
        assert ("scatter" in exchanges(sch)) == (
            kind in ("ChoiceLayer", "StallLayer")
        )  # attention or experts see whole sequences
        again = replay(sequence_models.seeded(kind).eval(), sch.dump())
        assert str(again) == str(sch)
        build(sch)
        assert torch.equal(again.mod(words), sch.mod.eval()(words))
        with pytest.raises(
            ShardError, match=rf"'layers.0'.*\(2, 7, 16\) does not divide among {n} processes"
        ):
            sch.mod(sequence_models.words(7))


def compiled():
    """Layers that are compiled exchange parts of sequences, too."""
    n, words = dist.get_world_size(), sequence_models.words()
    verified(sequence_models.seeded("Layer"), words, f"tp{n} mb1 recompute=full", compiler="aot_eager")


def trained():
    """Weights that all processes hold stay the same on all of them, although dropout draws apart."""
    sch = apply_plan(
        sequence_models.seeded("Layer"), f"tp{dist.get_world_size()} mb1", sequence_models.words()
    )
    model, _ = build(sch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)  # as a launcher does for processes that share a model
    for step in range(3):
        optimizer.zero_grad()
        model(sequence_models.words(seed=step)).square().mean().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        if own not in sharding_of(model.get_submodule(owner)).tensors:
            others = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            dist.all_gather(others, parameter.detach())
            assert all(torch.equal(other, parameter) for other in others), name


def sharded():
    """Sharded data parallelism composes with shared sequences."""
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "tp"))
    whole, batch = (
        sequence_models.seeded("Layer").eval(),
        torch.cat([sequence_models.words(seed=s) for s in (0, 1)]),
    )
    whole(batch).square().mean().backward()
    model = sequence_models.seeded("Layer").eval()
    sch = apply_plan(model, f"tp{n // 2} fsdp mb1 recompute=full:0.5", batch, group=mesh.get_group("tp"))
    build(sch, "fsdp", mesh=mesh)
    model(batch.chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        shard, wanted = (
            sharding_of(model.get_submodule(owner)).tensors.get(own),
            whole.get_parameter(name).grad,
        )
        wanted = wanted if shard is None else shard.part_of(wanted)
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted, rtol=1e-4, atol=1e-6, msg=name)


def experts():
    """Each process computes its experts for their tokens, with whole sequences or parts of them."""
    n, words = dist.get_world_size(), sequence_models.words()
    for more in ("nosp", "recompute=full:0.5")[: 4 // n]:  # four processes share sequences below
        sch = verified(sequence_models.seeded("ChoiceLayer"), words, f"tp{n} ep{n} mb1 {more}")
        held = sch.mod.layers[0].choice.experts
        assert held.wide.shape[0] == held.experts == 4 // n
        again = replay(sequence_models.seeded("ChoiceLayer").eval(), sch.dump())
        build(sch)
        assert torch.equal(again.mod(words), sch.mod.eval()(words))


def experts_of_own_samples():
    """Processes with samples of their own send tokens to experts; gradients are those of all samples."""
    n = dist.get_world_size()
    words = torch.cat([sequence_models.words(seed=seed) for seed in range(n)])
    sch = verified(sequence_models.seeded("ChoiceLayer"), words, f"dp{n} ep{n} mb1 recompute=full:0.5")
    assert sch.mod.layers[0].choice.experts.wide.shape[0] == 4 // n
    assert not sch.metadata.structure.kept_whole
    again = replay(sequence_models.seeded("ChoiceLayer").eval(), sch.dump())
    build(sch)
    mine = words.chunk(n)[dist.get_rank()]
    assert torch.equal(again.mod(mine), sch.mod.eval()(mine))
    for prefers in (torch.zeros(4), torch.tensor([30.0, 20.0, 0.0, 0.0])):  # the latter two experts alone
        _has_gradients_of_all(sch.mod, sch.mod, words, prefers)


def other_seeds():
    """Processes that have built their models from other seeds are named before they train."""
    n, rank, words = dist.get_world_size(), dist.get_rank(), sequence_models.words()
    for plan in (f"dp{n} ep{n}", f"tp{n} ep{n} nosp", f"cp{n}"):
        model = sequence_models.seeded("ChoiceLayer" if "ep" in plan else "Layer")
        if rank == n - 1:
            torch.nn.init.normal_(model.layers[1].before.weight)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "apply_plan of")
            sch = apply_plan(model, f"{plan} mb1", words)
        with pytest.raises(
            BuildError, match=r"'layers.1.before.weight' has other values in process \d of the"
        ):
            build(sch)
        build(sch, check=False)


def replicated_experts():
    """So do processes whose groups of experts are replicas of each other."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "ep"))
    words = torch.cat([sequence_models.words(seed=seed) for seed in range(mesh.size())])
    sch = create_schedule(sequence_models.seeded("ChoiceLayer"), group=mesh.get_group("ep"))
    apply_plan(sch, f"dp{mesh.size()} ep{mesh.size(1)} mb1", words)
    assert "left to the launcher: dp2, zero1, mb1" in sch.metadata.structure.notes
    with pytest.raises(ArgumentError, match=r"ep of the mesh is \[.*mesh.get_group\(\"ep\"\)"):
        build(sch, "ddp", mesh=init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "ep")))
    model, _ = build(sch, "ddp", mesh=mesh)
    _has_gradients_of_all(model, sch.mod, words, torch.zeros(4))
    sch = create_schedule(sequence_models.seeded("ChoiceLayer"), group=mesh.get_group("ep"))
    apply_plan(sch, f"dp{mesh.size()} ep{mesh.size(1)} fsdp mb1", words)
    # A dimension of one process says that layers are not shared.
    mesh = init_device_mesh("cpu", (2, mesh.size(1), 1), mesh_dim_names=("dp", "ep", "tp"))
    model, _ = build(sch, "fsdp", mesh=mesh)
    _has_gradients_of_all(model, sch.mod, words, torch.zeros(4))


def _has_gradients_of_all(model, part, words, prefers):
    """Compare results and gradients with those of the whole model for the samples of all processes."""
    n, whole = dist.get_world_size(), sequence_models.seeded("ChoiceLayer").eval()
    handles = [
        layer.choice.choice.register_forward_hook(lambda module, args, scores: scores + prefers)
        for one in (whole, part) for layer in one.layers
    ]  # fmt: skip
    expected, mine = whole(words), words.chunk(n)[dist.get_rank()]
    expected.square().mean().backward()
    model.eval().zero_grad()
    made = model(mine)
    torch.testing.assert_close(made, expected.chunk(n)[dist.get_rank()], rtol=1e-4, atol=1e-5)
    made.square().mean().backward()
    for name, wanted, found in gradients(part, whole):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=name)
    for handle in handles:
        handle.remove()


def gradients(model, whole):
    """Iterate over the name of each parameter, the gradient that its part should have, and the one it has."""
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        shard, of_whole = sharding_of(model.get_submodule(owner)).tensors.get(own), whole.get_parameter(name)
        wanted = torch.zeros_like(of_whole) if of_whole.grad is None else of_whole.grad
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found = found.full_tensor() if isinstance(found, DTensor) else found
        yield name, wanted if shard is None else shard.part_of(wanted), found


def experts_without_tokens():
    """Processes whose experts no token chose exchange the same gradients as the others."""
    n, words = dist.get_world_size(), sequence_models.words()
    models = [sequence_models.seeded("ChoiceLayer").eval() for _ in range(2)]
    sch = create_schedule(models[1])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "apply_plan of")
        apply_plan(sch, f"tp{n} ep{n} mb1", words)
    for model in models:  # every token chooses the first two experts
        for layer in model.layers:
            layer.choice.choice.register_forward_hook(
                lambda module, args, scores: scores + torch.tensor([30.0, 20.0, 0.0, 0.0])
            )
        model(words).square().mean().backward()
    held = sch.mod.layers[0].choice.experts
    assert n < 4 or (held.wide.grad is None or not held.wide.grad.any()) == (dist.get_rank() > 1)
    for name, wanted, found in gradients(sch.mod, models[0]):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=name)


def staged():
    """Stages on processes of their own, one or two each, hand parts of sequences to each other."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "tp"))
    words = torch.cat([sequence_models.words(seed=seed) for seed in (0, 1)])
    target = torch.randn(
        4, sequence_models.SEQ, sequence_models.WORDS, generator=torch.Generator().manual_seed(2)
    )
    for stages, schedule, depth in (("pp2", "1f1b", 2), ("pp2 vp2", "interleaved", 4)):
        whole = sequence_models.seeded("Layer", depth=depth).eval()
        torch.nn.functional.mse_loss(whole(words), target).backward()
        model, tp = sequence_models.seeded("Layer", depth=depth).eval(), mesh.get_group("tp")
        sch = apply_plan(model, f"tp{mesh.size(1)} {stages} mb1 recompute=full:0.5", words, group=tp)
        options = {"n_microbatches": 2, "loss_fn": torch.nn.functional.mse_loss, "schedule": schedule}
        own, pipeline = build(sch, "pipeline", mesh=mesh, **options)
        pipeline.step(words, target=target)
        for stage in own if schedule == "interleaved" else [own]:
            for name, parameter in stage.named_parameters():
                owner, _, last = name.rpartition(".")
                shard, wanted = (
                    sharding_of(stage.get_submodule(owner)).tensors.get(last),
                    whole.get_parameter(name).grad,
                )
                wanted = wanted if shard is None else shard.part_of(wanted)
                torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6, msg=name)


def staged_experts():
    """Stages of processes with samples of their own send tokens to experts of the same stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    words = torch.cat([sequence_models.words(seed=seed) for seed in range(4)])
    shape = (len(words), sequence_models.SEQ, sequence_models.WORDS)
    target = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    whole, model = (sequence_models.seeded("ChoiceLayer").eval() for _ in range(2))
    torch.nn.functional.mse_loss(whole(words), target).backward()
    mine, ep = (
        (tensor.chunk(2)[mesh.get_local_rank("ep")] for tensor in (words, target)),
        mesh.get_group("ep"),
    )
    sch = apply_plan(model, "pp2 dp2 ep2 mb1", words[:2], group=ep)
    loss = torch.nn.functional.mse_loss
    stage, pipeline = build(sch, "pipeline", mesh=mesh, n_microbatches=2, loss_fn=loss, schedule="1f1b")
    given, expected = mine
    pipeline.step(given, target=expected)
    for name, wanted, found in gradients(stage, whole):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=name)


def kept():
    """A process that holds parts of sequences keeps fewer bytes for the backward pass."""
    n, words, sizes = dist.get_world_size(), sequence_models.words(), {}
    for plan in ("nosp", "", "nosp recompute=full", "recompute=full"):
        sch = apply_plan(sequence_models.seeded("Layer", depth=4), f"tp{n} mb1 {plan}", words)
        with saved_tensors(sch.mod) as saved:
            sch.mod(words)
        sizes[plan] = saved.n_bytes
    assert sizes[""] < sizes["nosp"] and sizes["recompute=full"] < sizes["nosp recompute=full"], sizes
