"""Tensor parallelism: attention heads and MLP columns over the devices of a mesh axis."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from makespan.training.zoo._models import Attention, Layer, SmallTransformer

__all__ = ["shard_tensors"]


def shard_tensors(model: SmallTransformer, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Distribute the matrices of a model, or of a pipeline stage, in place.

    Queries, keys, values and the first MLP layers are cut by columns, the layers after them by rows,
    the classifier by columns where the axis divides it. Embeddings and norms stay whole. With
    sequence parallelism the hidden states between layers are cut along the sequence.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    for layer in (module for module in model.modules() if isinstance(module, Layer)):
        parallelize_module(layer, mesh, _layer_plan(layer, between))
    if model.embedding is not None and sequence_parallel:
        whole = (Replicate(),) * model.embedding.n_states
        cut = (between,) * model.embedding.n_states
        parallelize_module(
            model.embedding, mesh, PrepareModuleOutput(output_layouts=whole, desired_output_layouts=cut)
        )
    if model.head is not None:
        plan: dict[str, ParallelStyle] = {}
        divides = model.head.classifier.out_features % mesh.size() == 0
        if divides or sequence_parallel:
            plan["classifier"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
        if sequence_parallel:
            plan["norm"] = SequenceParallel()
        if plan:
            parallelize_module(model.head, mesh, plan)


def _layer_plan(layer: Layer, between: Shard | Replicate) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    for name, part in layer.named_children():
        if isinstance(part, Attention):
            plan |= {
                name: PrepareModuleInput(
                    input_layouts=(between, between), desired_input_layouts=(Replicate(), Replicate())
                ),
                **{f"{name}.{one}": ColwiseParallel() for one in ("query", "key", "value")},
                f"{name}.output": RowwiseParallel(output_layouts=between),
            }
        elif name == "mlp":
            plan |= _mlp_plan(part, between)
        elif isinstance(between, Shard):
            plan[name] = SequenceParallel()
    return plan


def _mlp_plan(mlp: nn.Module, between: Shard | Replicate) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if getattr(mlp, "gate", None) is not None:
        plan["mlp.gate"] = ColwiseParallel()
    return plan
