"""The machine of the paper's measurements as a small model: time and memory of one training step."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import floor
from types import MappingProxyType

from makespan.errors import InputError
from makespan.papers.slapo._costs import ModelCosts, Product, model_costs
from makespan.presets import read_preset
from makespan.training.zoo import FamilySpec

__all__ = [
    "FITTED",
    "GPUS_PER_NODE",
    "IMPLEMENTATIONS",
    "UNFITTED",
    "Constants",
    "Run",
    "Step",
    "constants",
    "forward_s",
    "needed_bytes",
    "recomputed_layers",
    "simulate",
]

GPUS_PER_NODE = 8
_BYTES = 2  # of a weight, gradient or activation at 16 bit
_STATE_BYTES = 16.0  # fp16 weight and gradient, fp32 master weight and two moments
_LOGIT_BYTES = 6.0  # at 16 bit, and the fp32 copy of the loss
_GATHERED_LAYERS = 2  # whole at once under ZeRO-3: one in use, one on its way
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of the model; ``presets/hardware.toml`` has their values and says where they come from."""

    peak_flop_per_s: float
    memory_bandwidth_bytes_per_s: float
    memory_efficiency: float
    capacity_bytes: float
    ring_bandwidth_bytes_per_s: float
    ring_latency_s: float
    network_bandwidth_bytes_per_s: float
    network_latency_s: float
    half_width: float
    traffic_per_kept_byte: float
    score_traffic_bytes: float
    fusion_factor: float
    fused_saving_bytes: float
    optimizer_bytes: float
    zero_overlap: float
    tensor_layer_s: float
    zero_layer_s: float
    best_efficiency: float
    recomputed_share: float
    usable_share: float


FITTED = ("zero_layer_s", "best_efficiency", "recomputed_share", "usable_share")
"""Constants that the printed grid decides."""
UNFITTED = tuple(field.name for field in fields(Constants) if field.name not in FITTED)
"""Constants with a source of their own."""


def constants() -> Constants:
    """Return the frozen constants."""
    preset = read_preset("makespan.papers.slapo", "hardware")
    return Constants(**{name: one["value"] for name, one in preset["unfitted"].items()}, **preset["fitted"])


@dataclass(frozen=True, slots=True)
class Traits:
    """What an implementation does, as far as it changes time or memory."""

    is_partitioned: bool = False  # ZeRO-3; tensor parallelism otherwise
    fuses_kernels: bool = False
    fuses_attention: bool = False
    shards_embedding: bool = True


IMPLEMENTATIONS: Mapping[str, Traits] = MappingProxyType(
    {
        "megatron": Traits(fuses_kernels=True),
        "slapo-tp": Traits(fuses_kernels=True, fuses_attention=True),
        "deepspeed": Traits(is_partitioned=True),
        "slapo-zero3": Traits(is_partitioned=True, fuses_kernels=True, fuses_attention=True),
        "eager": Traits(),
        "slapo-kernels": Traits(fuses_kernels=True, fuses_attention=True),
        "slapo-tp-layers": Traits(fuses_kernels=True, fuses_attention=True, shards_embedding=False),
    }
)
"""What is compared: baselines, schedules, and the steps of the ablation."""


@dataclass(frozen=True, slots=True)
class Run:
    """One way to train.

    Parameters
    ----------
    implementation
        One of `IMPLEMENTATIONS`.
    n_gpus, tp, pp
        Devices; tensor- and pipeline-parallel degree, of which ZeRO-3 has neither.
    global_batch_size, n_microbatches
        Samples of a step, and passes of one replica through its pipeline.
    ckpt_ratio
        Share of the layers that are recomputed.
    """

    implementation: str
    n_gpus: int
    global_batch_size: int
    ckpt_ratio: float
    tp: int = 1
    pp: int = 1
    n_microbatches: int = 1

    def __post_init__(self) -> None:
        if self.n_gpus % (self.tp * self.pp) or self.global_batch_size % (self.dp * self.n_microbatches):
            raise InputError(
                f"run of {self.implementation} on {self.n_gpus} GPUs: batch {self.global_batch_size}, "
                f"tp {self.tp}, pp {self.pp}, {self.n_microbatches} micro-batches; accepted: tp x pp that "
                "divides the GPUs, and a batch that replicas and micro-batches divide"
            )

    @property
    def dp(self) -> int:
        """Replicas of the model."""
        return self.n_gpus // (self.tp * self.pp)

    @property
    def micro_batch_size(self) -> int:
        """Samples of a replica and pass."""
        return self.global_batch_size // (self.dp * self.n_microbatches)

    @property
    def is_on_one_node(self) -> bool:
        """Whether all devices are in one node."""
        return self.n_gpus <= GPUS_PER_NODE


@dataclass(frozen=True, slots=True)
class Step:
    """One training step.

    Parameters
    ----------
    memory_bytes
        What has to fit, by what it is for [B].
    usable_bytes
        What there is [B].
    times_s
        Terms of the time of the step, which add up [s].
    global_batch_size
        Samples of it.
    """

    memory_bytes: Mapping[str, float]
    usable_bytes: float
    times_s: Mapping[str, float]
    global_batch_size: int

    @property
    def needed_bytes(self) -> float:
        """All memory that is needed [B]."""
        return sum(self.memory_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return self.needed_bytes <= self.usable_bytes

    @property
    def iter_time_s(self) -> float:
        """Time of the step [s], whether or not it fits."""
        return sum(self.times_s.values())

    @property
    def throughput_samples_per_s(self) -> float | None:
        """Samples a second; None out of memory."""
        return self.global_batch_size / self.iter_time_s if self.fits else None


def simulate(spec: FamilySpec, run: Run, c: Constants) -> Step:
    """Compute time and memory of one training step on the machine of the paper.

    Parameters
    ----------
    spec
        Model of `makespan.training.zoo`.
    run
        How it is trained.
    c
        Constants of the machine.

    Returns
    -------
    Step
        Deterministic; the memory of the fullest pipeline stage.
    """
    costs, traits = model_costs(spec), IMPLEMENTATIONS[run.implementation]
    return Step(
        _memory(costs, traits, run, c),
        c.usable_share * c.capacity_bytes,
        _times(costs, traits, run, c),
        run.global_batch_size,
    )


def needed_bytes(spec: FamilySpec, run: Run, c: Constants) -> float:
    """Return the memory of a step alone [B]."""
    return sum(_memory(model_costs(spec), IMPLEMENTATIONS[run.implementation], run, c).values())


def recomputed_layers(costs: ModelCosts, run: Run) -> int:
    """Return how many layers are recomputed: whole ones, as many as the share has."""
    return floor(costs.n_layers * run.ckpt_ratio + _SLACK)


# --- memory -----------------------------------------------------------------------------------------


def _kept_bytes(costs: ModelCosts, traits: Traits, tp: int, c: Constants) -> float:
    """Return the activations of all layers and one sample on one device."""
    scores = 0.0 if traits.fuses_attention else costs.scores * costs.kept_score_bytes / tp
    saved = costs.fusable * c.fused_saving_bytes if traits.fuses_kernels else 0.0
    return costs.kept_whole_bytes - min(saved, costs.kept_whole_bytes) + costs.kept_split_bytes / tp + scores


def _held_parameters(costs: ModelCosts, traits: Traits, run: Run) -> float:
    """Return the parameters of the fullest device without ZeRO-3: the stage with the vocabulary."""
    vocabulary = costs.vocabulary_parameters / (run.tp if traits.shards_embedding else 1)
    return (costs.split_parameters / run.tp + costs.whole_parameters) / run.pp + vocabulary


def _memory(costs: ModelCosts, traits: Traits, run: Run, c: Constants) -> dict[str, float]:
    per_layer = _kept_bytes(costs, traits, run.tp, c) / costs.n_layers
    n_recomputed = recomputed_layers(costs, run)
    kept = (costs.n_layers - n_recomputed) * per_layer
    inputs = n_recomputed * costs.input_bytes / costs.n_layers
    in_flight = min(run.pp, run.n_microbatches)
    split = run.tp if traits.shards_embedding else 1
    if traits.is_partitioned:
        states = _STATE_BYTES * costs.parameters / run.n_gpus
        states += _GATHERED_LAYERS * _BYTES * costs.largest_layer_parameters
    else:
        states = _STATE_BYTES * _held_parameters(costs, traits, run)
    return {
        "states": states,
        "activations": run.micro_batch_size * (kept + inputs) * in_flight / run.pp,
        "recomputed": run.micro_batch_size * per_layer if n_recomputed else 0.0,
        "logits": run.micro_batch_size * costs.logits * _LOGIT_BYTES / split,
    }


# --- time -------------------------------------------------------------------------------------------


def _product_s(product: Product, traits: Traits, run: Run, c: Constants) -> float:
    """Return the forward time of products for one micro-batch on one device of a tensor group."""
    is_split = bool(product.split) and (product.place != "head" or traits.shards_embedding)
    tp = run.tp if is_split else 1
    width = product.width(run.micro_batch_size, tp)
    efficiency = c.best_efficiency * width / (width + c.half_width)
    return product.flop * run.micro_batch_size / tp / (c.peak_flop_per_s * efficiency)


def element_wise_s(costs: ModelCosts, traits: Traits, run: Run, c: Constants) -> float:
    """Return the forward time of everything but matrix products, all layers and one micro-batch."""
    kept = costs.kept_whole_bytes + costs.kept_split_bytes / run.tp
    traffic = kept * c.traffic_per_kept_byte * (c.fusion_factor if traits.fuses_kernels else 1.0)
    if not traits.fuses_attention:
        traffic += costs.scores / run.tp * c.score_traffic_bytes
    return run.micro_batch_size * traffic / (c.memory_bandwidth_bytes_per_s * c.memory_efficiency)


def forward_s(costs: ModelCosts, traits: Traits, run: Run, c: Constants) -> tuple[float, float]:
    """Return the forward time of all layers and of the rest, one micro-batch."""
    layers = sum(_product_s(one, traits, run, c) for one in costs.products if one.place != "head")
    rest = sum(_product_s(one, traits, run, c) for one in costs.products if one.place == "head")
    return layers + element_wise_s(costs, traits, run, c), rest


def _times(costs: ModelCosts, traits: Traits, run: Run, c: Constants) -> dict[str, float]:
    layers, rest = forward_s(costs, traits, run, c)
    again = c.recomputed_share * layers * recomputed_layers(costs, run) / costs.n_layers
    n_passes = run.n_microbatches + run.pp - 1  # of one stage, waiting for others among them
    share = n_passes / run.pp
    fixed = c.zero_layer_s if traits.is_partitioned else c.tensor_layer_s
    return {
        "compute": 3.0 * (layers + rest) * share,
        "recompute": again * share,
        "tensor_exchange": _tensor_exchange_s(costs, traits, run, c) * share,
        "stage_transfer": _stage_transfer_s(costs, run, c),
        "data_exchange": _data_exchange_s(costs, traits, run, c),
        "optimizer": _optimizer_s(costs, traits, run, c),
        "fixed": fixed * costs.n_layers * share,
    }


def _tensor_exchange_s(costs: ModelCosts, traits: Traits, run: Run, c: Constants) -> float:
    """Reductions of one micro-batch: in the forward pass, again if recomputed, and in the backward pass."""
    if run.tp == 1:
        return 0.0
    passes = 2.0 + recomputed_layers(costs, run) / costs.n_layers
    volume = passes * costs.exchanged_bytes + 2.0 * costs.embedded_bytes * traits.shards_embedding
    n_starts = passes * costs.n_exchanges
    ring = 2.0 * (run.tp - 1) / run.tp * volume * run.micro_batch_size / c.ring_bandwidth_bytes_per_s
    return ring + n_starts * c.ring_latency_s


def _stage_transfer_s(costs: ModelCosts, run: Run, c: Constants) -> float:
    """Activations and their gradients over the network between stages, all micro-batches."""
    if run.pp == 1:
        return 0.0
    boundary = costs.input_bytes / costs.n_layers * run.micro_batch_size
    once = boundary / c.network_bandwidth_bytes_per_s + c.network_latency_s
    return 2.0 * once * run.n_microbatches


def _data_exchange_s(costs: ModelCosts, traits: Traits, run: Run, c: Constants) -> float:
    """Parameters and gradients under ZeRO-3, gradients of replicas otherwise."""
    n = run.dp
    if n == 1:
        return 0.0
    if traits.is_partitioned:
        rate = c.ring_bandwidth_bytes_per_s if run.is_on_one_node else c.network_bandwidth_bytes_per_s
        volume = 3.0 * _BYTES * costs.parameters * (n - 1) / n * run.n_microbatches
        return volume / rate * max(0.0, 1.0 - c.zero_overlap)
    sharing = min(GPUS_PER_NODE, run.n_gpus // n)  # rings of as many model shards leave each node
    rate = c.network_bandwidth_bytes_per_s / sharing
    if run.is_on_one_node:
        rate = c.ring_bandwidth_bytes_per_s
    gradients = _BYTES * _held_parameters(costs, traits, run)
    return 2.0 * (n - 1) / n * gradients / rate


def _optimizer_s(costs: ModelCosts, traits: Traits, run: Run, c: Constants) -> float:
    held = costs.parameters / run.n_gpus if traits.is_partitioned else _held_parameters(costs, traits, run)
    return held * c.optimizer_bytes / (c.memory_bandwidth_bytes_per_s * c.memory_efficiency)
