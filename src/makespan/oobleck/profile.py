"""Layer times and sizes of a model: read, check and write profiles, or compute one with the emulator."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from makespan.arguments import check_fields, check_range, typed
from makespan.emulator import CalibrationSet, Point, exact_pipeline, explain, load_calibration
from makespan.errors import InputError
from makespan.files import parse_json, preset_entry, read_text, write_json
from makespan.hardware import Network, NodeSpec, homogeneous
from makespan.plans import ExecutionPlan, Placement, stages
from makespan.units import MS
from makespan.workloads import BlockSpec, ModelSpec, Workload, stack

PICOSECONDS = 10**12
"""Picoseconds per second; costs are compared as whole picoseconds, so that equal costs compare equal."""
_LONGEST_S = 1_000.0  # of all layers together; costs of a hundred stages then fit 64 bits
_EXPECTED = "a layer profile (JSON)"


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Times of one layer for a microbatch, and its memory.

    Parameters
    ----------
    forward_s, backward_s
        Passes of one microbatch on one GPU [s].
    allreduce_in_node_s, allreduce_across_nodes_s
        Exchange of its gradients, by number of GPUs of a node and by number of replicas [s].
    parameter_bytes, activation_bytes
        Its parameters, and the activations that one microbatch keeps for the backward pass [B].

    Raises
    ------
    InputError
        A pass takes no time, a value is negative or not finite, or a number of GPUs is less than 1.
    """

    forward_s: float
    backward_s: float
    allreduce_in_node_s: Mapping[int, float] = field(default_factory=dict)
    allreduce_across_nodes_s: Mapping[int, float] = field(default_factory=dict)
    parameter_bytes: float = 0.0
    activation_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "")
        for name in ("forward_s", "backward_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value * PICOSECONDS >= 1):
                raise InputError(f"{name} is {value}; expected a finite time above 0")
        for name in ("parameter_bytes", "activation_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} is {value}; expected a finite number of bytes, 0 or more")
        for name in ("allreduce_in_node_s", "allreduce_across_nodes_s"):
            for count, value in getattr(self, name).items():
                if count < 1 or not (math.isfinite(value) and value >= 0):
                    raise InputError(
                        f"{name} has {value} for {count}; expected finite times, 0 or more, for 1 or more"
                    )


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The layers of a model, first to last, as timed with one microbatch size.

    Parameters
    ----------
    name
        Label of the profiled model.
    layers
        One or more layers.
    micro_batch_size
        Samples of a microbatch.

    Raises
    ------
    InputError
        There is no layer, no sample, or the layers take more than 1,000 s together.
    """

    name: str
    layers: tuple[LayerProfile, ...]
    micro_batch_size: int = 1

    def __post_init__(self) -> None:
        check_fields(self, "profile {0.name!r:.80}")
        if not self.layers or self.micro_batch_size < 1:
            raise InputError(
                f"profile {self.name!r}: {len(self.layers)} layers, {self.micro_batch_size} samples per "
                "microbatch; expected one or more of both"
            )
        total = sum(layer.forward_s + layer.backward_s for layer in self.layers)
        if total > _LONGEST_S:
            raise InputError(
                f"profile {self.name!r}: its layers take {total:.0f} s; expected at most {_LONGEST_S:.0f} s"
            )

    @property
    def n_layers(self) -> int:
        """Return the number of layers."""
        return len(self.layers)

    def sync_time_s(self, n_replicas: int) -> float:
        """Return the time that an iteration waits for the gradients of replicas, those of layer 0 [s].

        The exchange of the other layers is assumed to overlap with the backward pass. Raises `InputError` if
        the profile has no time for this number of replicas; nothing is interpolated.
        """
        times = self.layers[0].allreduce_across_nodes_s
        if n_replicas not in times and n_replicas > 1:
            known = ", ".join(map(str, sorted(times))) or "none"
            raise InputError(
                f"profile {self.name!r}: layer 0 has no allreduce_across_nodes_ms for {n_replicas} replicas; "
                f"it has: {known}"
            )
        return times.get(n_replicas, 0.0)


# --- files ------------------------------------------------------------------------------------------


@typed
def read_profile(path: str | Path) -> ModelProfile:
    """Read the times of layers, in milliseconds.

    The file is that of `write_profile`, or only its list of layers, or a list of numbers: the sum of forward
    and backward pass of each layer, of which the forward pass is taken to be a third.
    Raises `InputError`, which names file, layer and key.
    """
    try:
        parsed = parse_json(read_text(path, _EXPECTED))
    except ValueError as error:
        raise InputError(f"{path}: cannot be read as {_EXPECTED}: {error}") from None
    content = parsed if isinstance(parsed, dict) else {"layers": parsed}
    layers = content.get("layers")
    if not isinstance(layers, list):
        raise InputError(f"{path}: has no list of layers; expected {_EXPECTED} with the key 'layers'")
    size = content.get("micro_batch_size", 1)
    if not isinstance(size, int) or isinstance(size, bool):
        raise InputError(f"{path}: micro_batch_size is {size!r}; expected a whole number")
    read = tuple(_layer(entry, f"{path}: layer {index}") for index, entry in enumerate(layers))
    without = [not isinstance(entry, dict) or "mem_required" not in entry for entry in layers]
    if any(without) and not all(without):
        index = without.index(True)
        raise InputError(
            f"{path}: layer {index}: 'mem_required' is missing; expected in all layers or in none"
        )
    try:
        return ModelProfile(str(content.get("model", Path(path).stem)), read, size)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _layer(entry: Any, where: str) -> LayerProfile:
    if isinstance(entry, int | float) and not isinstance(entry, bool):
        both = _number(entry, where)
        entry = {"forward_ms": both / 3, "backward_ms": both * 2 / 3}
    if not isinstance(entry, dict):
        raise InputError(f"{where}: is {entry!r}; expected an object with forward_ms, or a number")
    accepted = {
        "forward_ms",
        "backward_ms",
        "allreduce_in_node_ms",
        "allreduce_across_nodes_ms",
        "mem_required",
    }
    for key in [*(entry.keys() - accepted - {"name"}), *({"forward_ms", "backward_ms"} - entry.keys())]:
        problem = "is missing" if key in accepted else "is unknown"
        raise InputError(f"{where}: {key!r} {problem}; expected name, {', '.join(sorted(accepted))}")
    memory = entry.get("mem_required", [0, 0])
    if not isinstance(memory, list) or len(memory) != 2:
        raise InputError(f"{where}: mem_required is {memory!r}; expected bytes of parameters, of activations")
    try:
        return LayerProfile(
            _number(entry["forward_ms"], f"{where}: forward_ms") * MS,
            _number(entry["backward_ms"], f"{where}: backward_ms") * MS,
            _times(entry.get("allreduce_in_node_ms", {}), where),
            _times(entry.get("allreduce_across_nodes_ms", {}), where),
            *(_number(size, f"{where}: mem_required") for size in memory),
        )
    except InputError as error:
        text = str(error)
        raise InputError(text if text.startswith(where) else f"{where}: {text}") from None


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where} is {value!r}; expected a number")
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{where} is larger than any; expected a number") from None


def _times(times: Any, where: str) -> dict[int, float]:
    if not isinstance(times, dict) or not all(str(count).isdecimal() for count in times):
        raise InputError(f"{where}: exchange times are {times!r}; expected milliseconds by number of GPUs")
    return {int(count): _number(value, f"{where}: {count}") * MS for count, value in times.items()}


@typed
def write_profile(profile: ModelProfile, path: str | Path) -> None:
    """Write the times of layers, in milliseconds, in the format of `read_profile`."""
    write_json(as_plain(profile), path, indent=1)


def as_plain(profile: ModelProfile) -> dict[str, Any]:
    """Return a profile as plain values, in milliseconds."""

    def times(by_count: Mapping[int, float]) -> dict[str, float]:
        return {str(count): by_count[count] / MS for count in sorted(by_count)}

    layers = [
        {
            "forward_ms": layer.forward_s / MS,
            "backward_ms": layer.backward_s / MS,
            "allreduce_in_node_ms": times(layer.allreduce_in_node_s),
            "allreduce_across_nodes_ms": times(layer.allreduce_across_nodes_s),
            "mem_required": [layer.parameter_bytes, layer.activation_bytes],
        }
        for layer in profile.layers
    ]
    return {"model": profile.name, "micro_batch_size": profile.micro_batch_size, "layers": layers}


# --- the profiles of the artifact -------------------------------------------------------------------


def _made_up(name: str, passes_ms: list[tuple[float, float]], n_replicas: int) -> ModelProfile:
    in_node = dict.fromkeys(range(1, 5), 0.2 * MS)
    across = dict.fromkeys(range(1, n_replicas + 1), 0.5 * MS)
    layers = (
        LayerProfile(forward * MS, backward * MS, in_node, across, 1024, 1024)
        for forward, backward in passes_ms
    )
    return ModelProfile(name, tuple(layers))


def uniform24() -> ModelProfile:
    """Return a profile of 24 equal layers, as in the tests of the artifact."""
    return _made_up("uniform24", [(0.05, 0.10)] * 24, 16)


@typed
def random32(seed: int) -> ModelProfile:
    """Return a profile of 32 layers with random times, drawn as in the tests of the artifact.

    The artifact sets no seed, and its exchange times end at 16 replicas; these go up to 64.
    """
    check_range("seed", seed)
    rng = np.random.default_rng(seed)
    passes = [(0.03 + 0.02 * rng.random(), 0.08 + 0.02 * rng.random()) for _ in range(32)]
    return _made_up(f"random32-{seed}", passes, 64)


# --- emulated profiles ------------------------------------------------------------------------------

_WEIGHT_BYTES = 2.0  # at 16 bit; `MemoryLimit.state_factor` adds gradients, moments and working copies
_PACKAGE = "makespan.oobleck"


@typed
def pipeline_workload(model: ModelSpec, global_batch_size: int, precision: str = "fp16") -> Workload:
    """Return the workload of training a model in a pipeline by eager software.

    Parameters
    ----------
    model
        Shape of the model.
    global_batch_size
        Samples per optimizer step.
    precision
        Precision of matrix products, such as ``fp16`` or ``fp32``.

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


@typed
def paper_model(name: str) -> ModelSpec:
    """Return the shape of a model of the paper.

    Parameters
    ----------
    name
        Name in the published table of throughput, for example ``GPT-3 2.7B``.

    Raises
    ------
    UnknownNameError
        There is none of this name.
    """
    entry = preset_entry(_PACKAGE, "models", "model", name)
    blocks = tuple(BlockSpec(**block) for block in entry.pop("blocks"))
    return ModelSpec(key=name, title=name, blocks=blocks, **entry)


@typed
def layer_times(
    workload: Workload,
    node: NodeSpec,
    network: Network,
    micro_batch_size: int,
    calibration: CalibrationSet | None = None,
    most_replicas: int = 64,
) -> ModelProfile:
    """Return the emulated passes, exchanges and memory of every layer of a model.

    A layer is a pipeline stage of its own on one GPU; the embedding belongs to the first layer, the output
    head to the last. The exchange of a layer's gradients is its share, by parameters, of the exchange of the
    whole model without overlap; replicas are on nodes with one GPU each.

    Parameters
    ----------
    workload
        Workload whose model, precision and stack of model-parallel plans are used.
    node, network, micro_batch_size
        Kind of node, network between nodes, and samples per microbatch.
    calibration
        Constants of the emulator; None for those that are shipped.
    most_replicas
        Exchanges across nodes are given for 2 replicas up to this number.

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
            f"microbatch of {micro_batch_size} samples, {most_replicas} replicas; expected 1 or more"
        )
    constants = calibration or load_calibration()
    # Every layer on a GPU of its own, for one microbatch.
    plan = ExecutionPlan(
        pp=workload.model.n_layers,
        global_batch_size=micro_batch_size,
        micro_batch_size=micro_batch_size,
        partition=(1,) * workload.model.n_layers,
    )
    one_batch, alone = _exposed(workload, micro_batch_size), replace(node, n_gpus=1)
    point = Point(plan, Placement.packed(plan.pp, 1))
    passes = exact_pipeline(one_batch, point, homogeneous(alone, plan.pp, network), constants)
    held = stages(one_batch.for_plan(plan).model, plan)
    total = sum(stage.parameters for stage in held)
    inside, across = _exchanges_s(workload, node, network, constants, most_replicas)
    fused = one_batch.model_parallel_stack.fused_attention
    layers = []
    for stage, forward_s, backward_s in zip(held, passes.forward_s, passes.backward_s, strict=True):
        attention = 0.0 if fused else stage.attention_bytes  # fused kernels never store the scores
        kept_bytes = stage.replicated_bytes + stage.sharded_bytes + attention + stage.logit_bytes
        layers.append(
            LayerProfile(
                forward_s,
                backward_s,
                {width: time_s * stage.parameters / total for width, time_s in inside.items()},
                {count: time_s * stage.parameters / total for count, time_s in across.items()},
                _WEIGHT_BYTES * stage.parameters,
                micro_batch_size * kept_bytes,
            )
        )
    return ModelProfile(f"{workload.model.title} on {node.name}", tuple(layers), micro_batch_size)


def _exposed(workload: Workload, global_batch_size: int) -> Workload:
    """Return a workload with this batch that does not overlap exchanges with the backward pass."""
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
    """Return the exchange times of all gradients among GPUs of a node, and among replicas, by number [s]."""

    def exchange_s(place: NodeSpec, gpus_per_node: tuple[int, ...]) -> float:
        count = sum(gpus_per_node)
        point = Point(ExecutionPlan(dp=count, global_batch_size=count), Placement(gpus_per_node))
        machines = homogeneous(place, len(gpus_per_node), network)
        return explain(_exposed(workload, count), point, machines, constants).terms_s["gradient_exchange"]

    alone = replace(node, n_gpus=1)
    widths = (1 << bit for bit in range(1, node.n_gpus.bit_length()))
    inside = {width: exchange_s(node, (width,)) for width in widths}
    return inside, {count: exchange_s(alone, (1,) * count) for count in range(2, most_replicas + 1)}
