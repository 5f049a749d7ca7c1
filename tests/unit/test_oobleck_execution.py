"""What one process of a resilient job does: instructions, layers, sums, refusals, and peers that are lost.

Where each case of failure and each edge of execution is tested:

- one layer, one pipeline, one node: `test_any_cut_of_a_small_model_gives_the_bits_of_the_oracle`
- layers without trained weights, ties, dropout, several states: ``differential/test_oobleck_training.py``
- fewer microbatches than pipelines, a plan that leaves layers out, several GPUs a stage, a node twice:
  `test_a_plan_that_cannot_be_run_is_refused`
- samples that are no multiple of a global batch: `test_windows_of_an_epoch_follow_its_permutation`
- statistics that differ between pipelines: `test_state_that_differs_between_pipelines_is_refused`
- loss of the first or last stage, of a whole pipeline, of two replicas of a stage, in passes and in sums:
  `test_whoever_waits_is_released_when_nodes_are_lost`
- loss while groups are built and while layers are copied: `test_a_loss_while_meeting_or_copying_is_told`
- a node of an older generation: `test_a_node_of_an_older_generation_meets_nobody`
- ties of order, such as threads that come first: sums have one order; every comparison with the oracle
"""

import itertools
import json
import os
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from chain_nodes import SMALL, Nodes, plan_of, small_job
from own_chain import Words

from makespan.errors import InputError, UnknownNameError
from makespan.oobleck.chain import Chain, load_chain, load_microbatch
from makespan.oobleck.job import ChainJob
from makespan.oobleck.oracle import ReferenceTrainer
from makespan.oobleck.plan import HybridPlan, Pipeline, PipelineTemplate, Stage
from makespan.oobleck.requests import (
    FIXED_RUNS,
    NODE,
    PROFILING,
    WORK,
    FixedRun,
    NodeRequest,
    ProfilingRequest,
    Work,
)
from makespan.oobleck.stage import (
    HeldLayers,
    LostPeerError,
    PeerGroups,
    StageExecutor,
    checked_loss,
    instructions,
    n_buffers,
)
from makespan.training import SmallModel
from makespan.training.zoo import build_link, n_links
from makespan.training.zoo.small import build_model

SIZES = list(itertools.product(("1f1b", "zero-bubble"), range(1, 7), range(1, 13)))
PAIRS = {"send_act": ("recv_act", 1), "send_grad": ("recv_grad", -1)}
OWN = "own_chain.py"


# --- instructions -----------------------------------------------------------------------------------


def streams(pass_order, n_stages, n_microbatches):
    return [list(instructions(stage, n_stages, n_microbatches, pass_order)) for stage in range(n_stages)]


def passes(stream, kind):
    return [one.microbatch for one in stream if one.kind == kind]


@pytest.mark.parametrize(("pass_order", "n_stages", "n_microbatches"), SIZES)
def test_each_microbatch_passes_each_stage_once_forward_and_then_once_backward(
    pass_order, n_stages, n_microbatches
):
    everything = list(range(n_microbatches))
    for stage, stream in enumerate(streams(pass_order, n_stages, n_microbatches)):
        assert passes(stream, "fwd") == passes(stream, "bwd") == everything
        order = [(one.kind, one.microbatch) for one in stream]
        assert len(set(order)) == len(order)
        assert all(order.index(("fwd", k)) < order.index(("bwd", k)) for k in everything)
        assert passes(stream, "load") == (everything if stage in (0, n_stages - 1) else [])
        kinds = [one.kind for one in stream if one.kind in ("fwd", "bwd")]
        assert kinds.index("bwd") == min(n_microbatches, n_stages - stage)
        is_split = pass_order == "zero-bubble"
        assert passes(stream, "bwd_weights") == (everything if is_split else [])
        assert all(order.index(("bwd", k)) < order.index(("bwd_weights", k)) for k in everything * is_split)


@pytest.mark.parametrize(("pass_order", "n_stages", "n_microbatches"), SIZES)
def test_no_stage_keeps_more_microbatches_than_it_has_buffers(pass_order, n_stages, n_microbatches):
    for stage, stream in enumerate(streams(pass_order, n_stages, n_microbatches)):
        room, kept = n_buffers(stage, n_stages, n_microbatches, pass_order), {}
        held = n_stages - stage if pass_order == "1f1b" else n_stages
        assert room == max(2, min(held, n_microbatches))
        last = "bwd_weights" if pass_order == "zero-bubble" else "send_grad" if stage else "bwd"
        for one in stream:
            assert kept.setdefault(one.buffer, one.microbatch) == one.microbatch, "a buffer in use is taken"
            if one.kind == last:
                del kept[one.buffer]
            assert len(kept) <= room
            assert one.buffer < room


@pytest.mark.parametrize(("pass_order", "n_stages", "n_microbatches"), SIZES)
def test_neighbours_send_and_receive_in_the_same_order(pass_order, n_stages, n_microbatches):
    found = streams(pass_order, n_stages, n_microbatches)
    for stage, stream in enumerate(found):
        for kind, (other, step) in PAIRS.items():
            if 0 <= stage + step < n_stages:
                assert passes(stream, kind) == passes(found[stage + step], other)
            else:
                assert passes(stream, kind) == []


@pytest.mark.parametrize(("pass_order", "n_stages", "n_microbatches"), SIZES)
def test_transfers_that_block_until_both_sides_are_there_never_wait_for_each_other(
    pass_order, n_stages, n_microbatches
):
    waiting = streams(pass_order, n_stages, n_microbatches)
    while any(waiting):
        moved = False
        for stage, stream in enumerate(waiting):
            while stream and stream[0].kind in ("load", "fwd", "bwd", "bwd_weights"):
                stream.pop(0)
                moved = True
            if stream and stream[0].kind in PAIRS:
                other, step = PAIRS[stream[0].kind]
                there = waiting[stage + step]
                if there and (there[0].kind, there[0].microbatch) == (other, stream[0].microbatch):
                    stream.pop(0)
                    there.pop(0)
                    moved = True
        assert moved, [stream[:1] for stream in waiting]


@pytest.mark.parametrize(("pass_order", "n_stages", "n_microbatches"), SIZES)
def test_an_iteration_takes_as_long_as_its_order_of_passes_promises(pass_order, n_stages, n_microbatches):
    waiting, arrived, clock = streams(pass_order, n_stages, n_microbatches), {}, [0] * n_stages
    while any(waiting):
        for stage, stream in enumerate(waiting):
            while stream:
                one = stream[0]
                if one.kind.startswith("recv"):
                    sent = arrived.get((stage, one.kind, one.microbatch))
                    if sent is None:
                        break
                    clock[stage] = max(clock[stage], sent)
                elif one.kind in PAIRS:
                    other, step = PAIRS[one.kind]
                    arrived[stage + step, other, one.microbatch] = clock[stage]
                else:
                    # Each part of a backward pass takes as long as a forward pass.
                    times = {"fwd": 1, "bwd": 2 if pass_order == "1f1b" else 1, "bwd_weights": 1}
                    clock[stage] += times.get(one.kind, 0)
                stream.pop(0)
    if pass_order == "1f1b":
        assert max(clock) == 3 * (n_microbatches + n_stages - 1)
    elif n_microbatches >= n_stages:
        assert max(clock) == 3 * n_microbatches + n_stages - 1
    else:
        assert max(clock) < 3 * (n_microbatches + n_stages - 1)


# --- what is trained --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt", "llama", "bert", "t5", "vit"])
def test_links_are_the_parts_of_the_whole_model(family):
    spec = SmallModel(family, 3, 16, 2, 2, 32, 8, 16)
    whole = dict(build_model(spec, 5).named_parameters())
    found = {}
    for index in range(n_links(spec)):
        name = {0: "embedding", n_links(spec) - 1: "head"}.get(index, f"layers.{index - 1}")
        found |= dict(build_link(spec, 5, index).named_parameters(name))
    assert found.keys() == whole.keys()
    assert all(torch.equal(one, whole[name]) for name, one in found.items())
    with pytest.raises(InputError, match="link 5 of a model with 5; expected 0 to 4"):
        build_link(spec, 5, 5)


def test_requests_are_read_as_they_were_written(tmp_path):
    job = small_job(clip_norm=0.5, optimizer="adamw", optimizer_options={"weight_decay": 0.1})
    plan = plan_of(((0,), (6,), 2), ((1, 2), (4, 6), 4))
    work = Work(plan.pipelines, ((3, 0, 2),), 7, tmp_path, True, ("borrow",), 1)
    for codec, request in (
        (NODE, NodeRequest(job, tmp_path)),
        (WORK, work),
        (FIXED_RUNS, [FixedRun(job, plan, 3, with_states=True)]),
        (PROFILING, ProfilingRequest(job, 5, 2)),
    ):
        written = json.loads(json.dumps(codec.dump_python(request, mode="json")))
        assert codec.validate_python(written) == request
    with pytest.raises(InputError, match="n_microbatches is 0"):
        NODE.validate_python({"job": job.values() | {"n_microbatches": 0}, "partial": "x"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gtp"}, "unknown model 'gtp'.*file.py:function.*'gpt'"),
        ({"model_options": {"width": 3}}, "model_options are {'width': 3}.*width"),
        ({"model_options": {"hidden": 7}}, "hidden 7"),
        ({"optimizer": "adams"}, "unknown optimizer 'adams'; expected adam, adamw, sgd"),
        ({"dtype": "float16"}, "unknown dtype"),
        ({"reduction": "ring"}, "unknown reduction"),
        ({"n_microbatches": 0}, "n_microbatches is 0; expected a whole number >= 1"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; expected a number"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"clip_norm": "x"}, "clip_norm is 'x'; expected a number or None"),
        ({"microbatch_size": True}, "microbatch_size is True; expected a whole number"),
        ({"seed": "1"}, "seed is '1'; expected a whole number"),
        ({"bucketed": "no"}, "bucketed is 'no'; expected True or False"),
        ({"model": None}, "model is None; expected text"),
        ({"model_options": {"hidden": "64"}}, "hidden is '64'; expected a whole number"),
        ({"optimizer_options": {"lr": object()}}, "optimizer_options are .*; expected plain values by name"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises((InputError, UnknownNameError), match=message):
        ChainJob(**changes)


def own_job(root, name, **changes):
    return small_job(model=f"{root / 'tests' / 'support' / OWN}:{name}", model_options={}, **changes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chains", "chains is None there; expected a function"),
        ("no_chain", "returned Linear; expected a Chain"),
        ("without_layers", "a chain without layers; expected one or more"),
    ],
)
def test_a_function_that_returns_no_usable_chain_is_refused(root, name, message):
    with pytest.raises(InputError, match=message):
        load_chain(own_job(root, name))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("1 + 'a'", r"mine.py, line 6: TypeError: unsupported operand"),
        ("Chain(3, len, D())", "a chain without layers; expected one or more"),
        (
            "Chain([nn.ReLU()], len, D())",
            "layer 0 is a ReLU; expected a function without arguments that builds",
        ),
        ("Chain([nn.ReLU], None, D())", "loss is None; expected a function"),
        ("Chain([nn.ReLU], len, 3)", "samples is a int without a length; expected a map-style data set"),
        ("Chain([nn.ReLU], len, D(), rate=0.1)", "rate is 0.1; expected a function"),
        ("Chain([nn.ReLU], len, D(), rate=str)", "rate of iteration 0 is '0'; expected a number"),
        ("Chain([nn.ReLU], len, D(), optimizer='sgd')", "optimizer is 'sgd'; expected a function"),
    ],
)
def test_what_a_function_of_a_user_raises_or_puts_into_a_chain_is_told(made, message, tmp_path):
    head = "from torch import nn\nfrom makespan.oobleck import Chain\nclass D(list):\n    pass\n"
    file = tmp_path / "mine.py"
    file.write_text(head.replace("pass", "__len__ = lambda self: 99") + f"def build():\n    return {made}\n")
    with pytest.raises(InputError, match=message) as error:
        load_chain(ChainJob(f"{file}:build"))
    assert "\n" not in str(error.value)


def test_a_loss_without_a_gradient_is_refused():
    with pytest.raises(InputError, match="the loss of the chain requires no gradient, so that nothing would"):
        checked_loss(torch.tensor(1.0))


def test_options_and_samples_of_a_chain_are_checked(root, tmp_path):
    with pytest.raises(InputError, match="no such file"):
        load_chain(small_job(model=f"{tmp_path / 'gone.py'}:chain", model_options={}))
    file = root / "tests" / "support" / OWN
    with pytest.raises(InputError, match=r"unexpected keyword argument 'depth'.*given: {'depth': 3}"):
        load_chain(small_job(model=f"{file}:chain", model_options={"depth": 3}))
    with pytest.raises(InputError, match="11 samples; expected those of a global batch or more, 6 micro"):
        load_chain(small_job(model=f"{file}:chain", model_options={"n_samples": 11}))
    with pytest.raises(InputError, match=r"layer 1 is int; expected a torch\.nn\.Module"):
        StageExecutor(own_job(root, "of_numbers")).hold([1])


@pytest.mark.parametrize(
    ("ties", "message"),
    [
        ([((0, "weight"), (9, "weight"))], "layer 9; expected layers 0 to 1"),
        ([((1, "weight"), (0, "weight"))], "expected an earlier layer, then a later"),
        ([((0, "weight"), (1, "bias"))], "tied weight 'bias' of layer 1; expected weight"),
    ],
)
def test_ties_of_what_is_not_there_are_refused(ties, message, tmp_path, monkeypatch):
    layers = [lambda: torch.nn.Linear(3, 3, bias=False)] * 2
    file = tmp_path / "tied.py"
    file.write_text("from makespan.oobleck import Chain\nchain = None\n")
    monkeypatch.setattr(
        "makespan.oobleck.chain.load_file",
        lambda path: type("Module", (), {"chain": lambda: Chain(layers, len, Words(12), ties)}),
    )
    with pytest.raises(InputError, match=message):
        StageExecutor(small_job(model=f"{file}:chain", model_options={})).hold([0, 1])


def test_windows_of_an_epoch_follow_its_permutation(root):
    job, cpu = own_job(root, "chain"), torch.device("cpu")
    chain, batch = load_chain(job), job.global_batch_size
    seen = [
        [int(row[0]) for number in range(job.n_microbatches)
         for row in load_microbatch(chain, job, iteration, number, cpu)[1]]
        for iteration in range(10)
    ]  # fmt: skip
    first = [*itertools.chain(*seen[:5])]  # 64 samples make five windows of 12
    assert len(first) == 5 * batch
    words = [int(Words(64)[index][1][0]) for index in range(64)]
    assert all(first.count(one) <= words.count(one) for one in set(first))
    assert [*itertools.chain(*seen[5:])] != first
    again = load_microbatch(chain, job, 3, 2, cpu)
    load_microbatch(chain, job, 7, 1, cpu)
    repeated = load_microbatch(chain, job, 3, 2, cpu)
    assert torch.equal(again[0][0], repeated[0][0]), "what a sample draws follows from its place"


@pytest.mark.parametrize(
    ("name", "message"),
    [("with_statistics", "layer 1, 1: BatchNorm1d keeps running statistics"),
     ("with_averages", "layer 1: a pass changes its buffer 'mean', and each pipeline sees other samples")],
)  # fmt: skip
def test_state_that_differs_between_pipelines_is_refused(root, name, message):
    nodes = Nodes(own_job(root, name))
    with pytest.raises(InputError, match=message):
        nodes.connect(plan_of(((0,), (3,), 6)))
        nodes.iterate(0)


def test_layers_that_draw_from_numpy_or_python_follow_from_the_position(root):
    """One node runs all layers, so that no other thread draws in between."""
    job, plan = own_job(root, "with_draws"), plan_of(((0,), (4,), 6))
    losses = []
    for shift in range(2):
        np.random.seed(shift)  # noqa: NPY002 - what a process has drawn before changes nothing
        random.seed(shift)
        nodes = Nodes(job)
        nodes.connect(plan)
        losses.append([one.loss for one in nodes.iterate(0, 2)[0]])
    oracle = ReferenceTrainer(job)
    assert losses[0] == losses[1] == [oracle.iterate(iteration, plan) for iteration in range(2)]
    assert {layer: {oracle.checksum(layer)} for layer in range(4)} == nodes.checksums()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("with_generator", r"layer 1 \(OwnGenerator\) returns another output for the same input, position"),
        ("with_count", r"layer 1 \(Counting\) returns another output .*keep no state from pass to pass"),
        ("with_mask", r"layer 1 \(WithMask\) returns a tuple with NoneType at place 1; expected a tensor"),
        ("with_nothing", r"layer 1 \(Silent\) returns NoneType; expected a tensor or a tuple of tensors"),
        ("with_late_buffer", r"layer 1 \(Late\): a pass adds or removes 'mean'"),
        (
            "with_sparse_gradients",
            r"layer 1 \(Looked\): the gradient of 'table.weight' has the layout sparse_coo",
        ),
        ("with_extra_state", r"layer 1, itself: Extra keeps extra state \(get_extra_state\)"),
        ("with_double", "layer 1, itself: Linear has weight in float64; expected float32: a job has one"),
        ("with_lazy_layer", r"layer 1, itself: LazyLinear has no shape yet for its parameter 'weight'"),
        ("with_loss_and_logs", "the loss of the chain returned tuple; expected a tensor with one value"),
        (
            "with_triples",
            r"sample \d+ of the data set is a tuple of 3; expected a pair of inputs and targets",
        ),
        ("with_dictionaries", r"sample \d+ of the data set is a dict of 2; expected a pair"),
    ],
)
def test_what_pipelines_cannot_train_is_rejected_by_name_before_the_first_step(root, name, message):
    job = own_job(root, name)
    n_layers = load_chain(job).n_layers
    nodes = Nodes(job)
    with pytest.raises(InputError, match=message):
        nodes.connect(plan_of(((0,), (n_layers,), 6)))
        nodes.iterate(0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("with_annealed_loss", "losses of the same outputs and targets differ when they are computed again"),
        ("with_counted_samples", "samples of the data set Counted differ when they are computed again"),
        ("with_trained_loss", "the loss has a parameter 'weight', which no layer holds"),
        ("with_counted_rate", "learning rate of iteration 0 is 0.5 in one call and 0.25 in the next"),
    ],
)
def test_losses_and_samples_that_keep_state_are_rejected_before_the_first_step(root, name, message):
    with pytest.raises(InputError, match=message):
        nodes = Nodes(own_job(root, name))
        nodes.connect(plan_of(((0,), (2,), 6)))
        nodes.iterate(0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lbfgs", "optimizer LBFGS of the chain has a step that needs an argument"),
        ("attribute", "optimizer Numbered of the chain changes its attribute 'n_steps' in a step"),
        ("group", "optimizer Grouped of the chain changes its value 'k' of group 0 in a step"),
        ("inner", "optimizer Wrapping of the chain changes its attribute 'inner' in a step"),
        ("number", "optimizer CountingWeights of the chain keeps n = 1; expected state per weight"),
        ("none", "optimizer of the chain returned NoneType"),
    ],
)
def test_an_optimizer_whose_state_nodes_cannot_copy_is_rejected_when_layers_are_built(root, name, message):
    job = replace(own_job(root, "with_optimizer"), model_options={"name": name})
    with pytest.raises(InputError, match=message):
        ReferenceTrainer(job)


@pytest.mark.parametrize("name", ["with_random_loss", "with_optimizer"])
def test_what_is_looked_at_before_the_first_step_changes_no_bit(root, name):
    job, plan = own_job(root, name), plan_of(((0,), (2,), 6))
    if name == "with_optimizer":
        job = replace(job, model_options={"name": "adam"})
    nodes, oracle = Nodes(job), ReferenceTrainer(job)
    nodes.connect(plan)
    losses = [one.loss for one in nodes.iterate(0, 2)[0]]
    assert losses == [oracle.iterate(iteration, plan) for iteration in range(2)]


def test_draws_of_a_backward_pass_follow_from_its_position(root):
    """Between the passes of a microbatch a stage may do those of others."""
    job, gradients = own_job(root, "with_noisy_backward"), []
    for n_draws in range(2):
        held = HeldLayers(job, load_chain(job), torch.device("cpu"))
        held.hold(range(4))
        state = torch.ones(2, 4)
        for layer in range(4):
            state = held.apply_layer(layer, (state,), 0, 1)
        loss = state.sum()
        torch.rand(n_draws), [random.random() for _ in range(n_draws)]
        loss.backward()
        gradients.append({name: one.grad for name, one in held.modules[1].named_parameters()})
    for name, one in gradients[0].items():
        assert torch.equal(one, gradients[1][name]), name


def bad_plan(kind):
    stages = {"gap": (Stage(0, 2, 1, 1.0), Stage(3, 6, 1, 1.0)), "gpus": (Stage(0, 6, 2, 1.0),)}
    if kind in stages:
        template = PipelineTemplate(len(stages[kind]), 2, stages[kind], 1.0)
        return HybridPlan((Pipeline(tuple(range(len(stages[kind]))), template, 6),))
    return {
        "short": plan_of(((0,), (5,), 6)),
        "batch": plan_of(((0,), (6,), 5)),
        "none": plan_of(((0,), (6,), 6), ((1,), (6,), 0)),
        "twice": plan_of(((0,), (6,), 3), ((0,), (6,), 3)),
        "nodes": plan_of(((0, 1), (6,), 6)),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gap", r"stages that end at \[2, 6\]; expected all 6 layers"),
        ("short", r"stages that end at \[5\]; expected all 6 layers"),
        ("gpus", "pipeline 0 on nodes .* has a stage on 2 GPUs; expected one GPU per stage"),
        ("batch", "plan of 5 microbatches; expected those of the job, 6"),
        ("none", "pipeline 1 on nodes .* has 0 microbatches; expected 1 or more"),
        ("twice", "expected each node once"),
        ("nodes", "has 1 stages; expected one per node"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(kind, message):
    with pytest.raises(InputError, match=message):
        StageExecutor(small_job()).connect(bad_plan(kind), 0, dist.HashStore())


def test_an_optimizer_says_what_it_cannot_do(root):
    with pytest.raises(InputError, match=r"optimizer_options of sgd are {'betas': 1}"):
        StageExecutor(small_job(optimizer="sgd", optimizer_options={"betas": 1})).hold([0])
    executor = StageExecutor(small_job())
    executor.hold([0, 1])
    with pytest.raises(InputError, match=r"state of layer 1 with .*; expected .* with the same shapes"):
        executor.load_layer_state(1, executor.layer_state(0))


# --- plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        (plan_of(((0,), (6,), 6)), {}),
        (plan_of(((0, 1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6), 6)), {}),
        (plan_of(((0, 1), (1, 6), 1), ((2,), (6,), 3), ((3, 4), (5, 6), 2)), {"clip_norm": 0.3}),
        (plan_of(((0, 1), (3, 6), 4), ((2, 3), (3, 6), 2)), {"reduction": "allreduce"}),
        (plan_of(((0, 1), (2, 6), 1), ((2, 3), (4, 6), 5)), {"model": "t5", "bucketed": False}),
        (plan_of(((0,), (6,), 3), ((1,), (6,), 3)), {"model": "vit", "optimizer": "sgd"}),
    ],
)
@pytest.mark.parametrize("pass_order", ["1f1b", "zero-bubble"])
def test_any_cut_of_a_small_model_gives_the_bits_of_the_oracle(plan, changes, pass_order):
    job = small_job(warmup_steps=2, **changes)
    nodes, oracle = Nodes(job, pass_order=pass_order), ReferenceTrainer(job)
    nodes.connect(plan)
    facts = nodes.iterate(0, 3)
    assert [one.loss for one in facts[0]] == [oracle.iterate(iteration, plan) for iteration in range(3)]
    assert nodes.checksums() == {layer: {oracle.checksum(layer)} for layer in range(6)}


def test_shapes_are_sent_once_a_plan_and_must_stay_as_they_are(root, monkeypatch):
    sent, send = [], PeerGroups.send_values
    monkeypatch.setattr(
        PeerGroups, "send_values", lambda self, *rest: sent.append(self.own) or send(self, *rest)
    )
    nodes = Nodes(small_job())
    for _ in range(2):
        nodes.connect(plan_of(((0, 1, 2), (2, 4, 6), 6)))
        nodes.iterate(0, 3)
    assert sorted(sent) == [0, 0, 1, 1]
    nodes = Nodes(own_job(root, "with_ragged_rows"))
    nodes.connect(plan_of(((0, 1), (2, 3), 6)))
    with pytest.raises(
        InputError,
        match=r"layer 1 returned .*\((1|2), 4\).* after .*\((1|2), 4\).*; expected the same",
    ):
        nodes.iterate(0)


def test_layers_with_the_same_owners_are_summed_together_or_one_by_one():
    plan = plan_of(((0, 1), (3, 6), 3), ((2,), (6,), 3))
    counts = []
    for bucketed in (True, False):
        nodes = Nodes(small_job(bucketed=bucketed))
        nodes.connect(plan)
        counts.append([nodes.iterate(0)[node][0].n_sums for node in plan.nodes])
    assert counts == [[1, 1, 2], [3, 3, 6]]


def test_a_sequence_of_plans_with_copies_gives_the_bits_of_the_oracle():
    job = small_job(optimizer="adamw", clip_norm=1.0)
    first = plan_of(((0, 1), (3, 6), 3), ((2, 3), (2, 6), 3))
    second = plan_of(((0,), (6,), 2), ((2, 1), (4, 6), 4))  # node 3 is gone, 0 and 2 lack layers
    third = plan_of(((5, 2), (3, 6), 5), ((1,), (6,), 1))  # node 0 leaves, 5 is new
    nodes, oracle = Nodes(job), ReferenceTrainer(job)
    nodes.connect(first)
    nodes.iterate(0, 2)
    nodes.connect(second, copies=[(layer, 1, 0) for layer in (3, 4, 5)] + [(2, 0, 2), (3, 1, 2)])
    nodes.iterate(2, 2)
    copies = [
        *((layer, 0, 5) for layer in range(3)),
        *((layer, 2, 1) for layer in range(4)),
        (4, 0, 2),
        (5, 0, 2),
    ]
    nodes.connect(third, also=[0], copies=copies)
    nodes.iterate(4, 2)
    for iteration, plan in enumerate([first, first, second, second, third, third]):
        oracle.iterate(iteration, plan)
    assert nodes.checksums() == {layer: {oracle.checksum(layer)} for layer in range(6)}
    assert nodes.executors[0].layers == ()


def test_a_state_that_was_loaded_is_a_copy():
    job = small_job()
    nodes = Nodes(job)
    nodes.connect(plan_of(((0,), (6,), 6)))
    nodes.iterate(0)
    source, other = nodes.executors[0], StageExecutor(job)
    other.hold([2])
    assert other.checksum(2) != source.checksum(2)
    other.load_layer_state(2, source.layer_state(2))
    kept = other.checksum(2)
    assert kept == source.checksum(2)
    nodes.iterate(1)
    assert other.checksum(2) == kept != source.checksum(2)


def test_a_step_is_done_once_and_never_without_its_gradients():
    nodes = Nodes(small_job())
    nodes.connect(plan_of(((0,), (6,), 6)))
    nodes.iterate(0)
    executor = nodes.executors[0]
    with pytest.raises(InputError, match="there are no reduced gradients; call reduce before apply"):
        executor.apply()
    executor.compute(1)
    executor.reduce()
    executor.disconnect()
    before = nodes.checksums()
    with pytest.raises(InputError, match="there are no reduced gradients"):
        executor.apply()
    assert nodes.checksums() == before


# --- peers that are lost ----------------------------------------------------------------------------

THREE = plan_of(((0,), (6,), 2), ((1, 2, 3), (2, 3, 6), 2), ((4, 5), (3, 6), 2))


class GoneError(Exception):
    """What ends a node in the middle of something."""


class Losses:
    """Ends chosen nodes when they have announced so many phases of a kind."""

    def __init__(self):
        self.left = {}

    def announce(self, node):
        def say(phase):
            if (node, phase) in self.left:
                self.left[node, phase] -= 1
                if self.left[node, phase] < 0:
                    raise GoneError(f"{node} {phase}")

        return say


@pytest.mark.parametrize("reduction", ["ordered", "allreduce"])
@pytest.mark.parametrize(
    "lost",
    [
        {(0, "forward"): 1},
        {(1, "forward"): 0},
        {(3, "backward"): 1},
        {(2, "reduction"): 0},
        {(0, "reduction"): 2},
        {(4, "forward"): 1, (5, "backward"): 0},
        {(2, "backward"): 1, (4, "reduction"): 0},
    ],
    ids=lambda lost: ", ".join(f"{node} in {phase} {count}" for (node, phase), count in lost.items()),
)
def test_whoever_waits_is_released_when_nodes_are_lost(lost, reduction):
    job, losses = small_job(reduction=reduction), Losses()
    nodes, errors = Nodes(job, losses.announce), {}
    nodes.connect(THREE)
    nodes.iterate(0)
    before = nodes.checksums()
    losses.left = dict(lost)

    def work(node, executor):
        try:
            executor.compute(1)
            executor.reduce()
        except (LostPeerError, GoneError) as error:
            errors[node] = error  # kept, with all its frames
        executor.disconnect()
        return time.monotonic()

    nodes.all_well(THREE.nodes, work)
    gone = {node for node, _ in lost}
    assert {node for node, error in errors.items() if isinstance(error, GoneError)} <= gone
    assert errors.keys() == set(THREE.nodes)
    assert nodes.checksums() == before, "nothing that lasts has changed"
    losses.left = {}
    survivors = [node for node in THREE.nodes if node not in gone]
    plan = plan_of(((survivors[0],), (6,), 4), (tuple(survivors[1:3]), (4, 6), 2))
    copies = [
        (layer, next(node for node in survivors if layer in nodes.executors[node].layers), node)
        for one in plan.pipelines
        for node, stage in zip(one.nodes, one.template.stages, strict=True)
        for layer in stage.layers
        if layer not in nodes.executors[node].layers
    ]
    also = [node for node in survivors if node not in plan.nodes]
    nodes.connect(plan, also, copies)
    nodes.iterate(1, 2)
    oracle = ReferenceTrainer(job)
    for iteration, one in enumerate([THREE, plan, plan]):
        oracle.iterate(iteration, one)
    if reduction == "ordered":
        assert nodes.checksums() == {layer: {oracle.checksum(layer)} for layer in range(6)}
    else:
        assert all(len(one) == 1 for one in nodes.checksums().values())


def test_a_loss_while_meeting_or_copying_is_told():
    plan = plan_of(((0,), (6,), 3), ((1,), (6,), 3))
    nodes = Nodes(small_job())
    nodes.connect(plan)

    def copy(node, executor):
        if node == 0:
            executor.disconnect()
        else:
            executor.receive_layer(0, 0)

    found = nodes.each(plan.nodes, copy)
    assert isinstance(found[1], LostPeerError)
    executor = StageExecutor(small_job(), timeout_s=0.5)
    with pytest.raises(LostPeerError, match=r"node 1 could not build groups with nodes \[0, 1\]"):
        executor.connect(plan, 1, dist.HashStore())
    for call in (executor.reduce, lambda: executor.send_layer(0, 0), lambda: executor.compute(0)):
        with pytest.raises((LostPeerError, InputError), match=r"has no connections|no stage in a plan"):
            call()


@pytest.mark.parametrize("is_stuck", [False, True], ids=["in the store", "in gloo"])
def test_who_closes_the_store_releases_those_who_build_groups(is_stuck, monkeypatch):
    never = threading.Event()
    if is_stuck:  # as when another node dies between its address and its connection
        monkeypatch.setattr(PeerGroups, "_build", lambda self, name, among, store: never.wait(3600))
    plan = plan_of(((0,), (6,), 3), ((1,), (6,), 3))
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store, errors = dist.TCPStore("127.0.0.1", server.port, None, False), []

    def connect():
        try:
            StageExecutor(small_job()).connect(plan, 0, store)
        except LostPeerError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=connect, daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    del server
    waiting.join(1800)
    never.set()
    assert not waiting.is_alive()
    assert "node 0 could not build groups with nodes [0, 1]" in errors[0]


def test_a_node_of_an_older_generation_meets_nobody():
    plan = plan_of(((0,), (6,), 3), ((1,), (6,), 3))
    stores = {0: dist.HashStore(), 1: dist.HashStore()}
    executors = Nodes(small_job())
    executors.each(plan.nodes, lambda node, executor: None)
    for executor in executors.executors.values():
        executor._timeout_s = 0.5
    found = executors.each(plan.nodes, lambda node, executor: executor.connect(plan, node, stores[node]))
    assert all(isinstance(one, LostPeerError) for one in found.values())


def test_disconnecting_closes_every_connection():
    nodes = Nodes(small_job(reduction="allreduce"))
    nodes.connect(THREE)
    open_files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        nodes.iterate(0)
        for executor in nodes.executors.values():
            executor.disconnect()
            executor.disconnect()
        deadline = time.monotonic() + 3600
        while (left := len(os.listdir("/proc/self/fd"))) >= open_files - 30:  # six nodes, all with all
            assert time.monotonic() < deadline, (left, open_files)
            time.sleep(0.01)
        nodes.connect(THREE)


def test_sizes_of_the_small_job_are_those_of_six_layers():
    assert ReferenceTrainer(small_job()).n_layers == SMALL["n_layers"] + 2
