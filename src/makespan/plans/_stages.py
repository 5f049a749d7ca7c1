"""Pipeline stages: which layers each holds, and the sums over them."""

from dataclasses import dataclass
from functools import lru_cache

from makespan.errors import PlanError
from makespan.workloads import Layer, ModelSpec, head, layers

__all__ = ["Stage", "stages"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Sums over the layers of one pipeline stage, per sample and forward pass.

    Parameters
    ----------
    n_layers
        Layers of the stage.
    parameters
        Weights of the stage, embedding and head included, scaled so that all stages together
        have the published count.
    flop, attention_flop, head_flop
        Matrix products of the layers, of the attention cores in them, and of the output head.
    replicated_bytes, sharded_bytes, attention_bytes
        Kept bytes, see `makespan.workloads.Layer`.
    input_bytes
        Inputs of all layers, which full checkpointing keeps [B].
    all_reduce_bytes, n_all_reduces
        All-reduces of tensor parallelism in one forward pass.
    n_kernels
        Device kernels in one forward pass.
    boundary_bytes
        What leaves the stage [B]; 0 for the last one.
    logit_bytes
        Logits and their copy; 0 but for the last stage.
    largest
        The layer that keeps most.
    """

    n_layers: int
    parameters: float
    flop: float
    attention_flop: float
    head_flop: float
    replicated_bytes: float
    sharded_bytes: float
    attention_bytes: float
    input_bytes: float
    all_reduce_bytes: float
    n_all_reduces: int
    n_kernels: int
    boundary_bytes: float
    logit_bytes: float
    largest: Layer


@lru_cache(maxsize=4096)
def stages(model: ModelSpec, pp: int, partition: tuple[int, ...] | None = None) -> tuple[Stage, ...]:
    """Split a model into pipeline stages.

    Parameters
    ----------
    model
        Architecture with the sequence lengths in use.
    pp
        Number of stages.
    partition
        Layers of each stage; None for a split as even as possible.

    Returns
    -------
    tuple of Stage
        First to last.

    Raises
    ------
    PlanError
        There are fewer layers than stages, or ``partition`` does not add up to the layers.
    """
    all_layers = layers(model)
    if pp > len(all_layers):
        raise PlanError(f"{pp} pipeline stages, but model {model.key!r} has {len(all_layers)} layers")
    if partition is not None and sum(partition) != len(all_layers):
        raise PlanError(
            f"partition {partition} has {sum(partition)} layers, but model {model.key!r} has "
            f"{len(all_layers)}"
        )
    ends = head(model)
    counted = sum(layer.parameters for layer in all_layers)
    counted += ends.embedding_parameters + ends.head_parameters
    scale = model.parameters / counted
    bounds = _bounds(len(all_layers), pp, partition)
    return tuple(
        _stage(model, all_layers[bounds[i] : bounds[i + 1]], scale, is_first=i == 0, is_last=i == pp - 1)
        for i in range(pp)
    )


def _bounds(n_layers: int, pp: int, partition: tuple[int, ...] | None) -> list[int]:
    if partition is None:
        return [(i * n_layers + pp // 2) // pp for i in range(pp + 1)]
    bounds = [0]
    for count in partition:
        bounds.append(bounds[-1] + count)
    return bounds


def _stage(
    model: ModelSpec, held: tuple[Layer, ...], scale: float, *, is_first: bool, is_last: bool
) -> Stage:
    ends = head(model)
    parameters = sum(layer.parameters for layer in held)
    parameters += ends.embedding_parameters * is_first + ends.head_parameters * is_last
    return Stage(
        n_layers=len(held),
        parameters=parameters * scale,
        flop=sum(layer.flop for layer in held),
        attention_flop=sum(layer.attention_flop for layer in held),
        head_flop=ends.flop * is_last,
        replicated_bytes=sum(layer.replicated_bytes for layer in held),
        sharded_bytes=sum(layer.sharded_bytes for layer in held),
        attention_bytes=sum(layer.attention_bytes for layer in held),
        input_bytes=sum(layer.input_bytes for layer in held),
        all_reduce_bytes=sum(layer.n_all_reduces * layer.input_bytes for layer in held),
        n_all_reduces=sum(layer.n_all_reduces for layer in held),
        n_kernels=sum(layer.n_kernels for layer in held),
        boundary_bytes=0.0 if is_last else held[-1].boundary_bytes,
        logit_bytes=ends.logit_bytes * is_last,
        largest=max(held, key=lambda layer: layer.kept_bytes(1)),
    )
