"""Times of layers from the emulator, for a model and a cluster that nobody has timed yet."""

from dataclasses import replace

from makespan.emulator import CalibrationSet, Point, exact_pipeline, explain, load_calibration
from makespan.errors import InputError
from makespan.hardware import Network, NodeSpec, homogeneous
from makespan.oobleck.planning._profile import LayerProfile, ModelProfile
from makespan.plans import ExecutionPlan, Placement, Stage, stages
from makespan.presets import preset_entry
from makespan.workloads import BlockSpec, ModelSpec, Workload, stack

__all__ = ["layer_times", "paper_model", "pipeline_workload"]

_WEIGHT_BYTES = 2.0  # at 16 bit, of which a limit of memory says how many times they are held
_PACKAGE = "makespan.oobleck"


def pipeline_workload(model: ModelSpec, global_batch_size: int, precision: str = "fp16") -> Workload:
    """Return the training of a model in a pipeline by eager software.

    Parameters
    ----------
    model
        Its shape.
    global_batch_size
        Samples an optimiser step.
    precision
        Of matrix products, such as ``fp16`` or ``fp32``.

    Raises
    ------
    InputError
        The batch has no sample.
    """
    plain = stack("zero-eager")
    return Workload(
        key=model.key,
        aliases=(),
        model=model,
        global_batch_size=global_batch_size,
        precision=precision,
        families=("TP+PP",),
        data_parallel_stack=plain,
        model_parallel_stack=plain,
        max_microbatches=1,
        used_for_calibration=False,
        source=model.source,
    )


def paper_model(name: str) -> ModelSpec:
    """Return the shape of a model of the paper.

    Parameters
    ----------
    name
        As in the printed throughput, for example ``GPT-3 2.7B``.

    Raises
    ------
    UnknownNameError
        There is none of this name.
    """
    entry = preset_entry(_PACKAGE, "models", "model", name)
    blocks = tuple(BlockSpec(**block) for block in entry.pop("blocks"))
    return ModelSpec(key=name, title=name, blocks=blocks, **entry)


def layer_times(
    workload: Workload,
    node: NodeSpec,
    network: Network,
    micro_batch_size: int,
    calibration: CalibrationSet | None = None,
    most_replicas: int = 64,
) -> ModelProfile:
    """Return what the emulator says of every layer of a model: its passes, exchanges and memory.

    A layer is a pipeline stage of its own on one GPU; the embedding belongs to the first layer, the output
    head to the last. The exchange of a layer's gradients is its share, by parameters, of that of the whole
    model, with nothing hidden; replicas are on nodes with a GPU each.

    Parameters
    ----------
    workload
        What is trained; its model, precision and the stack of model-parallel plans count.
    node, network, micro_batch_size
        Kind of node, what connects nodes, and samples of a microbatch.
    calibration
        Constants of the emulator; those that are shipped unless given.
    most_replicas
        Exchanges across nodes are given for 2 replicas up to these.

    Returns
    -------
    ModelProfile
        Emulated times [s] and bytes: weights at 16 bit, and activations without checkpointing.

    Raises
    ------
    InputError
        A microbatch of no sample, or a device without the precision of the workload.
    """
    if micro_batch_size < 1 or most_replicas < 1:
        raise InputError(
            f"microbatch of {micro_batch_size} samples, {most_replicas} replicas; accepted: 1 or more"
        )
    constants = calibration or load_calibration()
    plan = _layer_by_layer(workload, micro_batch_size)
    one_batch, alone = _exposed(workload, micro_batch_size), replace(node, n_gpus=1)
    point = Point(plan, Placement.packed(plan.pp, 1))
    passes = exact_pipeline(one_batch, point, homogeneous(alone, plan.pp, network), constants)
    held = stages(one_batch.for_plan(plan).model, plan)
    total = sum(stage.parameters for stage in held)
    inside, across = _exchanges_s(workload, node, network, constants, most_replicas)
    fused = one_batch.model_parallel_stack.fused_attention
    layers = (
        LayerProfile(
            forward_s,
            backward_s,
            {width: time_s * stage.parameters / total for width, time_s in inside.items()},
            {count: time_s * stage.parameters / total for count, time_s in across.items()},
            _WEIGHT_BYTES * stage.parameters,
            micro_batch_size * _kept_bytes(stage, fused_attention=fused),
        )
        for stage, forward_s, backward_s in zip(held, passes.forward_s, passes.backward_s, strict=True)
    )
    return ModelProfile(f"{workload.model.title} on {node.name}", tuple(layers), micro_batch_size)


def _layer_by_layer(workload: Workload, micro_batch_size: int) -> ExecutionPlan:
    """Return the plan that puts every layer on a GPU of its own, for one microbatch."""
    return ExecutionPlan(
        pp=workload.model.n_layers,
        global_batch_size=micro_batch_size,
        micro_batch_size=micro_batch_size,
        partition=(1,) * workload.model.n_layers,
    )


def _exposed(workload: Workload, global_batch_size: int) -> Workload:
    """Return a workload of so many samples a step that hides no exchange behind its backward pass."""
    plain = replace(workload.model_parallel_stack, overlaps_gradients=False)
    return replace(
        workload,
        global_batch_size=global_batch_size,
        max_microbatches=1,
        data_parallel_stack=plain,
        model_parallel_stack=plain,
    )


def _exchanges_s(
    workload: Workload, node: NodeSpec, network: Network, constants: CalibrationSet, most_replicas: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the exchange of all gradients among GPUs of a node and among replicas, by their number [s]."""

    def exchange_s(place: NodeSpec, gpus_per_node: tuple[int, ...]) -> float:
        count = sum(gpus_per_node)
        point = Point(ExecutionPlan(dp=count, global_batch_size=count), Placement(gpus_per_node))
        machines = homogeneous(place, len(gpus_per_node), network)
        return explain(_exposed(workload, count), point, machines, constants).terms_s["gradient_exchange"]

    alone = replace(node, n_gpus=1)
    widths = (1 << bit for bit in range(1, node.n_gpus.bit_length()))
    inside = {width: exchange_s(node, (width,)) for width in widths}
    return inside, {count: exchange_s(alone, (1,) * count) for count in range(2, most_replicas + 1)}


def _kept_bytes(stage: Stage, *, fused_attention: bool) -> float:
    """Return what a sample keeps in a stage for the backward pass [B]."""
    attention = 0.0 if fused_attention else stage.attention_bytes
    return stage.replicated_bytes + stage.sharded_bytes + attention + stage.logit_bytes
