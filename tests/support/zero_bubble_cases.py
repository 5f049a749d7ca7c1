"""Pipelines that give gradients of weights later; every function runs in each process."""

import copy
import itertools
import warnings
from contextlib import contextmanager

import pipeline_cases
import pytest
import sequence_models
import torch
import torch.distributed as dist
from expert_cases import few
from parallel_cases import labelled
from sequence_cases import gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from makespan.plans import zero_bubble_order
from makespan.slapo import BuildError, apply_plan, build, create_schedule
from makespan.slapo.split_stages import SplitStage
from makespan.training.split import SplitBackward

COUNT = 4
WORDS = torch.cat([sequence_models.words(seed=seed) for seed in range(COUNT)])
TARGET = torch.randn(
    len(WORDS), sequence_models.SEQ, sequence_models.WORDS, generator=torch.Generator().manual_seed(2)
)


def planned():
    """Plans say so, with sharded stages, replicas, recomputed layers, or several stages per process."""
    n = dist.get_world_size()
    words = {
        2: ["pp2", "pp2 vp2", "pp2 recompute=full", "pp2 vp2 recompute=operators:0.5"],
        4: ["pp4 recompute=selective", "tp2 pp2", "tp2 pp2 nosp recompute=full", "cp2 pp2", "dp2 pp2"],
    }
    for plan in words[n]:
        _has_gradients_of_the_whole("Layer", plan, depth=4)


def experts():
    """Experts of the processes of a stage get their tokens in either part, also those without a token."""
    for plan in ("dp2 pp2 ep2", "tp2 pp2 ep2", "tp2 pp2 ep2 nosp recompute=full"):
        _has_gradients_of_the_whole("ChoiceLayer", plan, depth=2, prefers=few)


def draws():
    """Dropout draws what it draws under 1F1B, and layers that are computed again draw it once more."""
    for words in ("", "recompute=full", "recompute=operators", "recompute=selective"):
        found = []
        for order in ("1f1b", "zero-bubble"):
            torch.manual_seed(5)
            sch = apply_plan(sequence_models.seeded("Layer", depth=4), f"pp2 mb1 {words}", WORDS[:2])
            stage, pipeline = build(sch, "pipeline", n_microbatches=COUNT, loss_fn=F.mse_loss, schedule=order)
            pipeline.step(WORDS, target=TARGET)
            found.append({name: one.grad for name, one in stage.train().named_parameters()})
        for name, wanted in found[0].items():
            torch.testing.assert_close(found[1][name], wanted, msg=labelled(f"{words} {name}"))


class Counted(pipeline_cases.Block):
    """A block that counts how often it runs."""

    runs = 0

    def forward(self, hidden, mask):
        Counted.runs += 1
        return super().forward(hidden, mask)


def weights_come_later():
    """Passes are those of the order; a second part has the gradients that the first one left out."""
    size = dist.get_world_size()
    source, target, answers = pipeline_cases.sample()
    orders = [("zero-bubble", size)]
    if size == 2:
        orders += [("zero-bubble", 4), ("zero-bubble-v", 4), ("dual-pipe-v", 4)]
    for order, n_stages in orders:
        sch = pipeline_cases.cut(pipeline_cases.seeded(), pipeline_cases.CUTS[n_stages])
        stage, pipeline = build(
            sch, "pipeline", n_microbatches=COUNT, loss_fn=pipeline_cases.loss_of, schedule=order
        )
        with _recorded() as passes:
            pipeline.step(source, target, target=answers)
        names = {id(one): name for name, one in stage.named_parameters()}
        for index in {index for index, *_ in passes}:
            own = [(kind, {names[one] for one in given}) for number, kind, given in passes if number == index]
            kinds = [kind for kind, _ in own]
            if index == 0:  # nothing waits for it: its second parts are whole
                assert kinds == ["full"] * COUNT
                continue
            assert kinds.count("weight") == kinds.count("input") == COUNT - kinds.count("full")
            assert "full" not in kinds or order == "dual-pipe-v"  # which splits some
            for kind, given in own:
                linear = {name for name in given if "up" in name or "down" in name}
                assert bool(linear) == (kind != "input"), (order, index, kind, given)
        if order == "zero-bubble" and n_stages == size and dist.get_rank():
            said = zero_bubble_order(dist.get_rank(), size, COUNT)
            wanted = [{"B": "input", "W": "weight"}[kind] for kind, _ in said if kind != "F"]
            assert [kind for _, kind, _ in passes] == wanted
            assert wanted[:2] == ["input", "input"]  # later than the next first part, not right after its own


def layers_run_again_once():
    """A layer that is computed again is so once per micro-batch, whatever is left for the second part."""
    source, target, answers = pipeline_cases.sample()
    for keep in ((), ("mm", "addmm")):
        whole = pipeline_cases.seeded()
        model = copy.deepcopy(whole)
        for stack in (model.encoder, model.decoder):
            for block in stack.block:
                block.__class__ = Counted
        sch = pipeline_cases.create_schedule(model)
        for part, index in itertools.product(("encoder", "decoder"), range(3)):
            sch[f"{part}.block.{index}"].checkpoint(keep=keep)
        sch.trace_until(["encoder", "decoder"])
        sch["encoder.block.1"].cut_pipeline_stage()
        stage, pipeline = build(
            sch, "pipeline", n_microbatches=COUNT, loss_fn=pipeline_cases.loss_of, schedule="zero-bubble"
        )
        Counted.runs = 0
        pipeline.step(source, target, target=answers)
        own = (2, 4)[dist.get_rank()]
        # One to learn shapes, and one more where both parts are tried.
        assert Counted.runs == own * (1 + dist.get_rank() + 2 * COUNT)
        pipeline_cases.by_hand(whole, source, target, answers)
        pipeline_cases.check_stage(stage, whole)


def compiled():
    """Layers that are compiled give all gradients at once, and are refused."""
    sch = apply_plan(sequence_models.seeded("Layer"), "pp2 zero-bubble mb1", WORDS[:2], compiler="aot_eager")
    with pytest.raises(BuildError, match=r"'layers\.\d' is compiled, .*; leave it uncompiled, or use sched"):
        build(sch, "pipeline", n_microbatches=COUNT, loss_fn=F.mse_loss)


class Reentrant(pipeline_cases.Block):
    """A block whose backward pass runs another one, which gives gradients of weights at once."""

    def forward(self, hidden, mask):
        return checkpoint(super().forward, hidden, mask, use_reentrant=True)


class _Varying(torch.autograd.Function):
    """A product with a gradient that is another one each time."""

    @staticmethod
    def forward(context, hidden, weight):
        context.save_for_backward(hidden, weight)
        return hidden @ weight

    @staticmethod
    def backward(context, gradient):
        hidden, weight = context.saved_tensors
        return gradient @ weight.T, (hidden.flatten(0, -2).T @ gradient.flatten(0, -2)) * torch.rand(())


class Random(pipeline_cases.Block):
    def forward(self, hidden, mask):
        return _Varying.apply(super().forward(hidden, mask), self.turn)


def refused_in_all_processes():
    """Stages that cannot be passed in two parts are found before the first step, in every process."""
    source, target, answers = pipeline_cases.sample()
    for kind, said in ((Reentrant, "cannot run in two parts: .*use_reentrant"), (Random, "gives another")):
        model = pipeline_cases.seeded()
        model.decoder.block[2].__class__ = kind
        model.decoder.block[2].turn = nn.Parameter(torch.eye(pipeline_cases.HIDDEN).double())
        sch = create_schedule(model)
        sch.trace_until(["encoder", "decoder"], leaf_modules=[kind.__name__])
        sch["encoder.block.1"].cut_pipeline_stage()
        _, pipeline = build(
            sch, "pipeline", n_microbatches=COUNT, loss_fn=pipeline_cases.loss_of, schedule="zero-bubble"
        )
        with pytest.raises(BuildError, match=f"stage 1 of 2: its backward pass .*{said}.*expected sched"):
            pipeline.step(source, target, target=answers)
        assert all(one.grad is None for one in pipeline.module.parameters())


@contextmanager
def _recorded():
    """Record stage, kind of pass, and the parameters that got gradients in it."""
    passes, given, run = [], set(), SplitStage.backward_maybe_with_nosync

    def recorded(self, kind, *args, **kwargs):
        handles = [
            one.register_post_accumulate_grad_hook(lambda one: given.add(id(one)))
            for one in self.submod.parameters()
        ]
        result = run(self, kind, *args, **kwargs)
        assert kind != "input" or isinstance(result[1], SplitBackward)
        passes.append((self.stage_index, kind, set(given)))
        given.clear()
        for handle in handles:
            handle.remove()
        return result

    SplitStage.backward_maybe_with_nosync = recorded
    try:
        yield passes
    finally:
        SplitStage.backward_maybe_with_nosync = run


def _has_gradients_of_the_whole(kind, plan, depth, prefers=None):
    degrees = {word[:2]: int(word[2:]) for word in plan.split() if word[:2] in ("pp", "tp", "cp", "dp", "ep")}
    shared = next((name for name in ("ep", "tp", "cp", "dp") if name in degrees), None)
    if degrees.get("tp"):
        shared = "tp"
    names = ("pp",) if shared is None else ("pp", shared)
    mesh = init_device_mesh("cpu", tuple(degrees[name] for name in names), mesh_dim_names=names)
    has_own = shared in ("dp", "ep")
    groups = {}
    if shared in ("tp", "ep"):
        groups["group"] = mesh.get_group(shared)
    elif shared == "cp":
        groups["context_group"] = mesh.get_group("cp")
    whole, model = (sequence_models.seeded(kind, depth=depth).eval() for _ in range(2))
    if shared in (None, "dp"):
        model = create_schedule(model, group=pipeline_cases.own_group())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "apply_plan of")
        sch = apply_plan(model, f"{plan} zero-bubble mb1", WORDS[:2], **groups)
    assert "stages run in the order zero-bubble" in sch.metadata.structure.notes
    n = 2 if has_own else COUNT
    stage, pipeline = build(sch, "pipeline", mesh=mesh, n_microbatches=n, loss_fn=F.mse_loss)
    if prefers is not None:
        for layer in (*whole.layers, *sch.mod.layers):
            layer.choice.choice.register_forward_hook(prefers)
    F.mse_loss(whole(WORDS), TARGET).backward()
    own = slice(None) if not has_own else slice(*(4 * (mesh.get_local_rank(shared) + at) for at in (0, 1)))
    with _recorded() as passes:
        pipeline.step(WORDS[own], target=TARGET[own])
    assert {kind for index, kind, _ in passes if index} <= {"input", "weight"}
    for one in stage if isinstance(stage, nn.ModuleList) else [stage]:
        for name, wanted, found in gradients(one, whole):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=labelled(f"{plan}: {name}"))
