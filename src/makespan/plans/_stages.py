"""Pipeline stages: which layers each holds, and the sums over them."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from makespan.errors import PlanError
from makespan.plans._plan import ExecutionPlan
from makespan.workloads import Head, Layer, ModelSpec, head, layers

__all__ = ["Stage", "chunk_layers", "one_f_one_b_order", "stages"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Sums over the layers of one pipeline stage, per sample and forward pass.

    Parameters
    ----------
    n_layers, parameters
        Layers, and weights with embedding and head, scaled so that all stages together have the published
        count.
    flop, attention_flop, head_flop
        Matrix products of the layers, of the attention cores in them, and of the output head.
    replicated_bytes, sharded_bytes, attention_bytes
        Kept bytes, see `makespan.workloads.Layer`.
    input_bytes
        Inputs of all layers, which full checkpointing keeps [B].
    all_reduce_bytes, n_all_reduces, n_kernels
        All-reduces of tensor parallelism and device kernels in one forward pass.
    boundary_bytes, logit_bytes
        What leaves the stage, 0 for the last one; logits and their copy, 0 but for the last one [B].
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


def chunk_layers(n_layers: int, plan: ExecutionPlan) -> tuple[range, ...]:
    """Return the layers of every model chunk of a plan, in the order of the model.

    The split of everything that knows pipelines: executor, time model and memory estimate. Chunk k
    belongs to pipeline stage k mod *p*; without interleaving, chunks are stages. The partition of the
    plan decides, or else a split as even as possible.
    Raises `PlanError` for fewer layers than chunks and for partitions that do not add up to the layers.
    """
    count, sizes = plan.n_chunks, plan.partition
    if count > n_layers:
        raise PlanError(f"{count} pipeline stages or chunks, but the model has {n_layers} layers")
    if sizes is None:
        bounds = [(index * n_layers + count // 2) // count for index in range(count + 1)]
    elif sum(sizes) == n_layers:
        bounds = list(accumulate(sizes, initial=0))
    else:
        raise PlanError(f"partition {sizes} does not add up to the {n_layers} layers of the model")
    return tuple(range(low, high) for low, high in pairwise(bounds))


def stages(model: ModelSpec, plan: ExecutionPlan) -> tuple[Stage, ...]:
    """Sum up the layers of each pipeline stage of a plan, first to last; raises as `chunk_layers` does."""
    return _stages(model, plan.pp, chunk_layers(model.n_layers, plan))


@lru_cache(maxsize=4096)
def _stages(model: ModelSpec, pp: int, chunks: tuple[range, ...]) -> tuple[Stage, ...]:
    all_layers, ends = layers(model), head(model)
    own = ends.embedding_parameters + ends.head_parameters
    scale = model.parameters / (own + sum(layer.parameters for layer in all_layers))
    held = [[all_layers[index] for chunk in chunks[stage::pp] for index in chunk] for stage in range(pp)]
    return tuple(
        _stage(ends, part, scale, is_first=stage == 0, is_last=stage == pp - 1)
        for stage, part in enumerate(held)
    )


def _stage(ends: Head, held: list[Layer], scale: float, *, is_first: bool, is_last: bool) -> Stage:
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


def one_f_one_b_order(stage: int, n_stages: int, n_microbatches: int) -> list[tuple[str, int]]:
    """Return the passes of a pipeline stage in the order of 1F1B without interleaving.

    It runs ``min(n_microbatches, n_stages - 1 - stage)`` forward passes to warm up, then one forward and one
    backward pass in turn, then the backward passes that are left.

    Returns
    -------
    list
        ``("F", k)`` and ``("B", k)``, forward and backward pass of micro-batch k.
    """
    warm_up = min(n_microbatches, n_stages - 1 - stage)
    order = [("F", k) for k in range(warm_up)]
    for k in range(n_microbatches - warm_up):
        order += [("F", warm_up + k), ("B", k)]
    return order + [("B", k) for k in range(n_microbatches - warm_up, n_microbatches)]
