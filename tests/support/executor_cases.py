"""The executor's small transformer, scheduled as it is, against the executor's own tensor parallelism."""

import torch
import torch.distributed as dist
from parallel_cases import labelled
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from makespan.papers.slapo.language import build, create_schedule
from makespan.papers.slapo.language._layouts import sharding_of
from makespan.training.zoo import MODEL_FAMILIES, SmallModel
from makespan.training.zoo._models import Attention, Layer, Mlp, build_model
from makespan.training.zoo._tensor import shard_tensors

SIZES = {"n_layers": 2, "hidden": 16, "heads": 4, "ffn": 32, "seq": 8, "vocab": 16}


def schedule(sch, along_sequence):
    """Cut heads and MLPs, and between them the sequence, if that is asked for."""
    before = ("fwd_pre", "all_gather", {"axis": 1}) if along_sequence else ("bwd_post", "all_reduce", {})
    after = ("reduce_scatter", {"axis": 1}) if along_sequence else ("all_reduce", {})
    for path, node in list(sch.named_schedules()):
        if isinstance(node.mod, Attention | Mlp):
            mode, op, options = before
            node.sync(mode, op, **options)
            for name, child in node.child.items():
                if name in ("output", "down"):
                    child.shard("weight", 1)
                    child.sync("fwd_post", after[0], **after[1])
                else:
                    child.shard([name for name, _ in child.mod.named_parameters()], 0)
        elif along_sequence and (path == "head.norm" or isinstance(node.parent and node.parent.mod, Layer)):
            node.sync("bwd_post", "all_reduce", on="parameters")
    head = sch["head.classifier"]
    head.sync(before[0], before[1], **before[2])
    head.shard("weight", 0)
    head.sync("fwd_post", "all_gather", tensor_parallel_output_grad=False)
    if along_sequence:
        for output in range(2) if sch.mod.embedding.n_states == 2 else [None]:
            sch["embedding"].sync("fwd_post", "RR->SR", output=output)


def samples_of(spec):
    drawn = torch.Generator().manual_seed(3)
    if spec.family == "vit":
        return torch.randn(2, spec.seq, spec.patch_features, generator=drawn, dtype=torch.float64)
    shape = (2, 2, spec.seq) if spec.family == "t5" else (2, spec.seq)
    return torch.randint(spec.vocab, shape, generator=drawn)


def everywhere_like_the_executor():
    size = dist.get_world_size()
    for family in MODEL_FAMILIES:
        for along_sequence in (False, True):
            if family == "vit" and along_sequence:  # it averages over patches, of which a process has a part
                continue
            spec = SmallModel(family, **SIZES)
            compare(spec, along_sequence, size)


def compare(spec, along_sequence, size):
    theirs, ours, whole = (build_model(spec, 1).double() for _ in range(3))
    samples = samples_of(spec)
    shard_tensors(theirs, init_device_mesh("cpu", (size,)), along_sequence)
    sch = create_schedule(ours)
    schedule(sch, along_sequence)
    model, _ = build(sch)
    outputs = []
    for one in (whole, theirs, model):
        output = one(samples)
        output = output.full_tensor() if isinstance(output, DTensor) else output
        output.square().mean().backward()
        outputs.append(output)
    where = f"{spec.family}, {'along the sequence' if along_sequence else 'whole sequences'}"
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], msg=labelled(where))
    for path, module in model.named_modules():
        shards = sharding_of(module).tensors
        for name, parameter in module.named_parameters(recurse=False):
            key = f"{path}.{name}"
            gradient = theirs.get_parameter(key).grad
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            part = shards[name].part_of(gradient) if name in shards else gradient
            expected = whole.get_parameter(key).grad
            torch.testing.assert_close(parameter.grad, part, msg=labelled(f"{where}: {key}"))
            torch.testing.assert_close(gradient, expected, msg=labelled(f"executor, {where}: {key}"))
