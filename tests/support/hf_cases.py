"""What processes do with models of the transformers package."""

import copy

import hf_models
import torch
from hf_models import layers_of, tokens, visible
from torch.nn import functional as F

from makespan.slapo import Verify, build, create_schedule


def _scheduled(name):
    """Split, fuse and recompute a model, and verify outputs and gradients."""
    sch = create_schedule(getattr(hf_models, name)())
    with Verify(sch, (tokens(),)):
        getattr(hf_models, f"shard_{name}")(sch)
        getattr(hf_models, f"fuse_{name}")(sch)
        layers_of(sch)[0].checkpoint()
    return sch


def bert():
    build(_scheduled("bert"))


def llama():
    build(_scheduled("llama"))


def llama_with_cache():
    """A process keeps keys and values of its own heads; recomputed layers fill the cache once."""
    sch = create_schedule(hf_models.llama_with_cache())
    with Verify(sch, {"input_ids": tokens()}) as check:
        hf_models.shard_llama(sch)
        for layer in layers_of(sch):
            layer.checkpoint()
    assert check.report.count("output") == 1 + 4 * (sch.world_size == 1)  # parts are seen to be parts
    model, _ = build(sch)
    found = model(input_ids=tokens())
    found.logits.sum().backward()
    cache = found.past_key_values
    assert cache.get_seq_length() == hf_models.SEQ
    assert cache.layers[0].keys.shape[1] == 2 // sch.world_size


def gpt2():
    build(_scheduled("gpt2"))


def _loss(output, target):
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def _cut(name, *more):
    """Run a model as two stages; loss and gradients are those of the whole model."""
    model, targets, inputs = getattr(hf_models, name)().eval(), tokens(4, seed=1), (tokens(4), *more)
    whole = copy.deepcopy(model)
    sch = create_schedule(model)
    hf_models.trace_to_layers(sch, ("input_ids", "attention_mask")[: len(inputs)])
    layers_of(sch)[0].cut_pipeline_stage()
    _, engine = build(sch, "pipeline", n_microbatches=2, loss_fn=_loss)
    losses = []
    engine.step(*inputs, target=targets, losses=losses)
    loss = _loss(whole(*inputs), targets)
    loss.backward()
    if losses:
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
    gradients = {path: one.grad for path, one in whole.named_parameters(remove_duplicate=False)}
    found = dict(engine.module.named_parameters())
    assert len(found) > 5
    for path, one in found.items():
        torch.testing.assert_close(one.grad, gradients[path], rtol=1e-4, atol=1e-6)


def cut_bert():
    _cut("bert", visible(4))


def cut_llama():
    _cut("llama", visible(4))


def cut_gpt2():
    _cut("gpt2")
