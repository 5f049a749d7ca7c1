"""Models of the zoo, scheduled as they are, against other implementations of tensor parallelism."""

import warnings

import torch
import torch.distributed as dist
from parallel_cases import labelled
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from makespan.slapo import build, create_schedule
from makespan.slapo.layouts import sharding_of
from makespan.training.zoo import MODEL_FAMILIES, SmallModel, build_family, family_batch, family_spec
from makespan.training.zoo.small import Attention, Layer, Mlp, build_model, shard_tensors

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
    compare_parameters(where, whole, theirs, model)


# --- models of others' architectures against parallelize_module ---------------------------------------

COLUMNS = ("query", "key", "value", "q_proj", "k_proj", "v_proj", "q", "k", "v", "c_fc", "fc1", "wi", "ffn",
           "gate_proj", "up_proj", "intermediate.dense", "relative_attention_bias")  # fmt: skip
ROWS = ("out_proj", "o_proj", "o", "c_proj", "fc2", "wo", "down_proj", "output.dense", "ffn_output",
        "attention.dense")  # fmt: skip


def ends_with(path, names):
    return any(path.endswith(f".{name}") for name in names)


def like_parallelize_module():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for family in ("bert", "albert", "gpt", "opt", "t5", "llama"):
        whole, theirs, ours = (build_family(family, seed=2).double().eval() for _ in range(3))
        plan = {path: ColwiseParallel() for path, _ in theirs.named_modules() if ends_with(path, COLUMNS)}
        plan |= {path: RowwiseParallel() for path, _ in theirs.named_modules() if ends_with(path, ROWS)}
        parallelize_module(theirs, mesh, plan)
        for module in theirs.modules():
            if hasattr(module, "num_heads"):
                for key, value in heads_of(module).items():
                    setattr(module, key, value // mesh.size())
        sch = create_schedule(ours)
        for path, node in sch.named_schedules():
            if ends_with(path, COLUMNS):
                is_table = isinstance(node.mod, nn.Embedding)
                node.shard([name for name, _ in node.mod.named_parameters()], int(is_table))
                if not is_table:
                    node.sync("bwd_post", "all_reduce")
            elif ends_with(path, ROWS):
                node.shard("weight", 1)
                node.sync("fwd_post", "all_reduce")
            elif hasattr(node.mod, "num_heads"):
                heads = {key: value // sch.world_size for key, value in heads_of(node.mod).items()}
                node.set_attr(**heads)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no exchange is forgotten
            build(sch)
        compare_gradients(family, whole, theirs, ours)


def heads_of(module):
    return {key: value for key, value in vars(module).items() if key in ("num_heads", "num_kv_heads")}


def compare_gradients(family, whole, theirs, ours):
    batch = family_batch(family_spec(family), 2, seed=4)
    outputs = []
    for one in (whole, theirs, ours):
        output = one(*batch.inputs)
        output.square().mean().backward()
        outputs.append(output)
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], msg=labelled(family))
    compare_parameters(family, whole, theirs, ours)


def compare_parameters(where, whole, theirs, ours):
    for path, module in ours.named_modules():
        shards = sharding_of(module).tensors
        for name, parameter in module.named_parameters(recurse=False):
            key = f"{path}.{name}"
            gradient = theirs.get_parameter(key).grad
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            part = shards[name].part_of(gradient) if name in shards else gradient
            torch.testing.assert_close(parameter.grad, part, msg=labelled(f"{where}: {key}"))
            expected = whole.get_parameter(key).grad
            torch.testing.assert_close(gradient, expected, msg=labelled(f"torch, {where}: {key}"))
