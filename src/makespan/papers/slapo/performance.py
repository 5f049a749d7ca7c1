"""Performance models of the Slapo paper: a hardware model of its machine, and the emulator.

`simulate` computes time and memory of one training step from the sizes of a model (`model_costs`) and a few
constants (`constants`). `fit_grid` takes four of the constants from the printed grid of Fig. 10; the rest
come from data sheets and stated assumptions. `modelled` and `emulated` offer the hardware model and the
emulator behind one interface, `Oracle`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from math import floor
from types import MappingProxyType
from typing import Literal

import numpy as np
import pandas as pd

from makespan.emulator import Point, explain
from makespan.errors import FitError, InputError
from makespan.files import read_preset
from makespan.hardware import ClusterSpec, Network, homogeneous, node
from makespan.plans import ExecutionPlan, Placement, memory_estimate
from makespan.training.zoo import (
    ConvolutionSpec,
    FamilySpec,
    TransformerSpec,
    Weights,
    family_spec,
    family_weights,
    parameter_count,
)
from makespan.workloads import BlockSpec, ModelSpec, Workload, stack

# ------------------------------------------------------------------------------------------------
# Costs of training a model, per sample: matrix products, kept activations, parameters.

_BYTES = 2  # of an activation or weight at 16 bit
_FLOP_PER_MAC = 2
# Weights that tensor parallelism divides by columns, and by rows.
_COLUMNS = ("query", "key and value", "feed-forward in", "convolution 1", "convolution 3")
_ROWS = ("attention output", "feed-forward out", "convolution 2")
# Bytes that the backward pass needs, per token and channel: a mask of dropout, what dropout returns, the
# inputs of two norms, and the inputs of the two blocks of a layer.
_MASK, _DROPPED, _NORM_INPUTS, _INPUTS = 1, 2, 4, 4


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix products of one shape.

    Parameters
    ----------
    place
        ``layer``, ``head``, or ``scores`` for the products of attention.
    flop
        FLOP of all of them, per sample and forward pass [FLOP].
    inputs, outputs, tokens
        Rows and columns of the matrix, and positions of a sample that it multiplies.
    split
        Dimension that tensor parallelism divides: ``columns``, ``rows``, or empty for none.
    """

    place: str
    flop: float
    inputs: int
    outputs: int
    tokens: int
    split: str

    def width(self, samples: float, tp: int) -> float:
        """Return the smallest dimension of the product on one of ``tp`` devices, for a number of samples."""
        if self.place == "scores":
            return min(self.inputs, self.outputs)
        inputs = self.inputs / tp if self.split == "rows" else self.inputs
        outputs = self.outputs / tp if self.split == "columns" else self.outputs
        return min(inputs, outputs, self.tokens * samples)


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Counts of a model; bytes and scores are those of one sample and all layers.

    Parameters
    ----------
    n_layers
        Layers that can be recomputed: those of encoder and decoder, or bottlenecks.
    products
        Matrix products of the forward pass.
    split_parameters, whole_parameters, vocabulary_parameters
        Weights that tensor parallelism divides, weights that every device keeps, and the vocabulary table.
    largest_layer_parameters
        Parameters of the largest layer.
    kept_split_bytes, kept_whole_bytes
        Activations kept for the backward pass: those that tensor parallelism divides, and the others [B].
    fusable
        Tokens times channels whose intermediate values fused kernels do not keep.
    scores, kept_score_bytes
        Attention scores, and bytes kept per score unless attention is one kernel [B].
    input_bytes
        Inputs of the layers, which recomputation keeps [B].
    exchanged_bytes, n_exchanges
        Volume that tensor parallelism reduces or gathers in a forward pass [B], and number of collectives.
    embedded_bytes
        Output of the embedding [B].
    logits
        Number of logits.
    """

    n_layers: int
    products: tuple[Product, ...]
    split_parameters: int
    whole_parameters: int
    vocabulary_parameters: int
    largest_layer_parameters: float
    kept_split_bytes: float
    kept_whole_bytes: float
    fusable: float
    scores: float
    kept_score_bytes: float
    input_bytes: float
    exchanged_bytes: float
    n_exchanges: int
    embedded_bytes: float
    logits: float

    @property
    def forward_flop(self) -> float:
        """FLOP of matrix products, per sample and forward pass [FLOP]."""
        return sum(product.flop for product in self.products)

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.split_parameters + self.whole_parameters + self.vocabulary_parameters


@cache
def model_costs(spec: FamilySpec) -> ModelCosts:
    """Count matrix products, activations and parameters of a model.

    Parameters
    ----------
    spec
        A model of `makespan.training.zoo`.

    Returns
    -------
    ModelCosts
        Kept activations of transformers follow Korthikanti et al. 2022, section 4, generalised to any width
        of the feed-forward part; those of convolutions are the inputs of each norm and convolution.
    """
    return _convolutions(spec) if isinstance(spec, ConvolutionSpec) else _transformer(spec)


def _products(weights: tuple[Weights, ...]) -> Iterator[Product]:
    """Yield one product per shape, with the FLOP of all weights of that shape."""
    flop: dict[tuple[str, int, int, int, str], float] = {}
    for weight in weights:
        name = weight.name.removeprefix("cross ")
        split = "columns" if name in (*_COLUMNS, "logits") else "rows" if name in _ROWS else ""
        if weight.tokens:
            place = "layer" if weight.place == "layer" else "head"
            key = (place, weight.inputs, weight.outputs, weight.tokens, split)
            flop[key] = flop.get(key, 0.0) + weight.flop
    for (place, inputs, outputs, tokens, split), total in flop.items():
        yield Product(place, total, inputs, outputs, tokens, split)


def _parameters(weights: tuple[Weights, ...]) -> tuple[int, int, int]:
    """Return numbers of parameters: divided by tensor parallelism, not divided, and of the vocabulary."""
    split = whole = vocabulary = 0
    for weight in weights:
        if weight.name == "logits" or (weight.place, weight.name) == ("embedding", "tokens"):
            vocabulary += weight.parameters
        elif weight.name.removeprefix("cross ") in (*_COLUMNS, *_ROWS):
            split += weight.parameters
        else:
            whole += weight.parameters
    return split, whole, vocabulary


@dataclass(frozen=True, slots=True)
class _EqualLayers:
    """Equal layers: their number, their tokens, and the tokens of an encoder that they attend to."""

    n_layers: int
    seq: int
    encoder_seq: int


def _transformer(spec: TransformerSpec) -> ModelCosts:
    weights = family_weights(spec)
    groups = [_EqualLayers(spec.n_layers, spec.seq, 0)]
    if spec.n_decoder_layers:
        groups.append(_EqualLayers(spec.n_decoder_layers, spec.decoder_seq, spec.seq))
    scores = [group.n_layers * group.seq * (group.seq + group.encoder_seq) for group in groups]
    attention = [
        Product("scores", 2.0 * _FLOP_PER_MAC * n * spec.inner, spec.head_size, part.seq, part.seq, "columns")
        for n, part in zip(scores, groups, strict=True)
    ]
    split, whole, vocabulary = _parameters(weights)
    n_layers = sum(group.n_layers for group in groups)
    layer_tokens = sum(group.n_layers * group.seq for group in groups)
    cross_tokens = sum(group.n_layers * group.seq for group in groups if group.encoder_seq)
    encoder_tokens = sum(group.n_layers * group.encoder_seq for group in groups)
    per_token = _INPUTS + _NORM_INPUTS + 2 * _MASK * (spec.dropout > 0)
    inner, kv_inner = spec.inner, spec.kv_heads * spec.head_size
    n_ffn = 3 if spec.family == "llama" else 2
    kept_split = _BYTES * (
        layer_tokens * (2 * inner + 2 * kv_inner + n_ffn * spec.ffn)
        + cross_tokens * 2 * inner
        + encoder_tokens * 2 * kv_inner
    )
    return ModelCosts(
        n_layers=n_layers,
        products=(*_products(weights), *attention),
        split_parameters=split,
        whole_parameters=whole,
        vocabulary_parameters=vocabulary,
        largest_layer_parameters=split / n_layers,
        kept_split_bytes=float(kept_split),
        kept_whole_bytes=float(spec.hidden * (layer_tokens * per_token + cross_tokens * (per_token // 2))),
        fusable=float(spec.hidden * layer_tokens),
        scores=float(spec.heads * sum(scores)),
        kept_score_bytes=float(_BYTES + (_MASK + _DROPPED) * (spec.attention_dropout > 0)),
        input_bytes=float(_BYTES * spec.hidden * (layer_tokens + encoder_tokens)),
        exchanged_bytes=float(_BYTES * spec.hidden * (2 * layer_tokens + cross_tokens)),
        n_exchanges=2 * n_layers + spec.n_decoder_layers,
        embedded_bytes=float(_BYTES * spec.hidden * sum(group.seq for group in groups)),
        logits=float((spec.decoder_seq or spec.seq) * spec.vocab),
    )


def _convolutions(spec: ConvolutionSpec) -> ModelCosts:
    weights = family_weights(spec)
    maps = dict.fromkeys(("convolution 1", "convolution 2", "convolution 3", "way past", "stem"), 0.0)
    blocks: list[int] = []
    for weight in weights:
        if weight.tokens and weight.name in maps:
            maps[weight.name] += weight.tokens * weight.outputs
        if weight.name == "convolution 1":  # the first of a block
            blocks.append(0)
        if weight.place == "layer":
            blocks[-1] += weight.parameters
    split, whole, vocabulary = _parameters(weights)
    inside = 2 * _BYTES * maps["convolution 1"]  # input of the norm, and input of the next convolution
    outside = 2 * _BYTES * (sum(maps.values()) - maps["convolution 1"])
    return ModelCosts(
        n_layers=sum(spec.blocks),
        products=tuple(_products(weights)),
        split_parameters=split,
        whole_parameters=whole,
        vocabulary_parameters=vocabulary,
        largest_layer_parameters=float(max(blocks)),
        kept_split_bytes=inside,
        kept_whole_bytes=outside,
        fusable=0.0,
        scores=0.0,
        kept_score_bytes=0.0,
        input_bytes=_BYTES * maps["convolution 3"],
        exchanged_bytes=_BYTES * (maps["convolution 2"] + maps["convolution 3"]),
        n_exchanges=2 * sum(spec.blocks),
        embedded_bytes=0.0,
        logits=float(spec.n_classes),
    )


# ------------------------------------------------------------------------------------------------
# The hardware model: time and memory of one training step.

GPUS_PER_NODE = 8
_STATE_BYTES = 16.0  # fp16 weight and gradient, fp32 master weight and two moments
_LOGIT_BYTES = 6.0  # 16-bit value, and the fp32 copy for the loss
_GATHERED_LAYERS = 2  # held whole under ZeRO-3: the one in use, and the one being fetched
_SLACK = 1e-9  # so that rounding of a share never loses a layer


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of the model; ``presets/hardware.toml`` holds their values and sources."""

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
"""Constants that are fitted to the printed grid."""
UNFITTED = tuple(field.name for field in fields(Constants) if field.name not in FITTED)
"""Constants with a source of their own."""


def constants() -> Constants:
    """Read the constants from the preset."""
    preset = read_preset("makespan.papers.slapo", "hardware")
    unfitted = {name: entry["value"] for name, entry in preset["unfitted"].items()}
    return Constants(**unfitted, **preset["fitted"])


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of an implementation that change time or memory."""

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
"""Implementations by name: baselines, schedules, and the steps of the ablation."""


@dataclass(frozen=True, slots=True)
class Run:
    """Settings of a training run.

    Parameters
    ----------
    implementation
        One of `IMPLEMENTATIONS`.
    n_gpus, tp, pp
        Devices; tensor- and pipeline-parallel degree, both 1 under ZeRO-3.
    global_batch_size, n_microbatches
        Samples per step, and micro-batches per replica and step.
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
                f"tp {self.tp}, pp {self.pp}, {self.n_microbatches} micro-batches; expected GPUs "
                "divisible by tp x pp, and a batch divisible by replicas x micro-batches"
            )

    @property
    def dp(self) -> int:
        """Replicas of the model."""
        return self.n_gpus // (self.tp * self.pp)

    @property
    def micro_batch_size(self) -> int:
        """Samples per replica and micro-batch."""
        return self.global_batch_size // (self.dp * self.n_microbatches)

    @property
    def is_on_one_node(self) -> bool:
        """Tell whether all devices are in one node."""
        return self.n_gpus <= GPUS_PER_NODE


@dataclass(frozen=True, slots=True)
class Step:
    """Memory and time of one training step.

    Parameters
    ----------
    memory_bytes
        Memory of the fullest device, by purpose [B].
    usable_bytes
        Memory that it may use [B].
    times_s
        Terms of the iteration time, which is their sum [s].
    global_batch_size
        Samples of the step.
    """

    memory_bytes: Mapping[str, float]
    usable_bytes: float
    times_s: Mapping[str, float]
    global_batch_size: int

    @property
    def needed_bytes(self) -> float:
        """Needed memory, the sum over all purposes [B]."""
        return sum(self.memory_bytes.values())

    @property
    def fits(self) -> bool:
        """Tell whether the run fits into memory."""
        return self.needed_bytes <= self.usable_bytes

    @property
    def iter_time_s(self) -> float:
        """Time of the step [s], whether or not it fits."""
        return sum(self.times_s.values())

    @property
    def throughput_samples_per_s(self) -> float | None:
        """Throughput [samples/s]; None if out of memory."""
        return self.global_batch_size / self.iter_time_s if self.fits else None


def simulate(spec: FamilySpec, run: Run, c: Constants) -> Step:
    """Compute time and memory of one training step on the machine of the paper.

    Parameters
    ----------
    spec
        Model of `makespan.training.zoo`.
    run
        Settings of the run.
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
    """Return the memory of a step, without its time [B]."""
    return sum(_memory(model_costs(spec), IMPLEMENTATIONS[run.implementation], run, c).values())


def recomputed_layers(costs: ModelCosts, run: Run) -> int:
    """Return the number of recomputed layers: the share of all layers, rounded down."""
    return floor(costs.n_layers * run.ckpt_ratio + _SLACK)


# --- memory -----------------------------------------------------------------------------------------


def _held_parameters(costs: ModelCosts, traits: Traits, run: Run) -> float:
    """Return the parameters of the fullest device without ZeRO-3: one of the stage with the vocabulary."""
    vocabulary = costs.vocabulary_parameters / (run.tp if traits.shards_embedding else 1)
    return (costs.split_parameters / run.tp + costs.whole_parameters) / run.pp + vocabulary


def _memory(costs: ModelCosts, traits: Traits, run: Run, c: Constants) -> dict[str, float]:
    scores = 0.0 if traits.fuses_attention else costs.scores * costs.kept_score_bytes / run.tp
    saved = costs.fusable * c.fused_saving_bytes if traits.fuses_kernels else 0.0
    whole = costs.kept_whole_bytes - min(saved, costs.kept_whole_bytes)
    per_layer = (whole + costs.kept_split_bytes / run.tp + scores) / costs.n_layers
    n_recomputed = recomputed_layers(costs, run)
    kept = (costs.n_layers - n_recomputed) * per_layer
    inputs = n_recomputed * costs.input_bytes / costs.n_layers
    # The first stage of a 1F1B schedule holds the activations of as many micro-batches as there are stages.
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
        # The backward pass recomputes one layer at a time.
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
    """Return the forward time of element-wise kernels, all layers and one micro-batch: memory traffic."""
    kept = costs.kept_whole_bytes + costs.kept_split_bytes / run.tp
    traffic = kept * c.traffic_per_kept_byte * (c.fusion_factor if traits.fuses_kernels else 1.0)
    if not traits.fuses_attention:
        traffic += costs.scores / run.tp * c.score_traffic_bytes
    return run.micro_batch_size * traffic / (c.memory_bandwidth_bytes_per_s * c.memory_efficiency)


def forward_s(costs: ModelCosts, traits: Traits, run: Run, c: Constants) -> tuple[float, float]:
    """Return the forward time of all layers, and that of the head, for one micro-batch."""
    layers = sum(_product_s(each, traits, run, c) for each in costs.products if each.place != "head")
    rest = sum(_product_s(each, traits, run, c) for each in costs.products if each.place == "head")
    return layers + element_wise_s(costs, traits, run, c), rest


def _times(costs: ModelCosts, traits: Traits, run: Run, c: Constants) -> dict[str, float]:
    layers, rest = forward_s(costs, traits, run, c)
    again = c.recomputed_share * layers * recomputed_layers(costs, run) / costs.n_layers
    # A stage has 1 / pp of the layers. It takes as long as m + pp - 1 micro-batches: its own m, and the
    # bubble.
    share = (run.n_microbatches + run.pp - 1) / run.pp
    fixed = c.zero_layer_s if traits.is_partitioned else c.tensor_layer_s
    held = costs.parameters / run.n_gpus if traits.is_partitioned else _held_parameters(costs, traits, run)
    optimizer_traffic = held * c.optimizer_bytes
    return {
        "compute": 3.0 * (layers + rest) * share,
        "recompute": again * share,
        "tensor_exchange": _tensor_exchange_s(costs, traits, run, c) * share,
        "stage_transfer": _stage_transfer_s(costs, run, c),
        "data_exchange": _data_exchange_s(costs, traits, run, c),
        "optimizer": optimizer_traffic / (c.memory_bandwidth_bytes_per_s * c.memory_efficiency),
        "fixed": fixed * costs.n_layers * share,
    }


def _tensor_exchange_s(costs: ModelCosts, traits: Traits, run: Run, c: Constants) -> float:
    """Return the time of reductions of one micro-batch: forward, backward, and again where recomputed."""
    if run.tp == 1:
        return 0.0
    passes = 2.0 + recomputed_layers(costs, run) / costs.n_layers
    volume = passes * costs.exchanged_bytes + 2.0 * costs.embedded_bytes * traits.shards_embedding
    n_starts = passes * costs.n_exchanges
    ring = 2.0 * (run.tp - 1) / run.tp * volume * run.micro_batch_size / c.ring_bandwidth_bytes_per_s
    return ring + n_starts * c.ring_latency_s


def _stage_transfer_s(costs: ModelCosts, run: Run, c: Constants) -> float:
    """Return the time of sending activations and their gradients between stages, all micro-batches."""
    if run.pp == 1:
        return 0.0
    boundary = costs.input_bytes / costs.n_layers * run.micro_batch_size
    once = boundary / c.network_bandwidth_bytes_per_s + c.network_latency_s
    return 2.0 * once * run.n_microbatches


def _data_exchange_s(costs: ModelCosts, traits: Traits, run: Run, c: Constants) -> float:
    """Return the time of gathering and reducing under ZeRO-3, or of reducing gradients of replicas."""
    n = run.dp
    if n == 1:
        return 0.0
    if traits.is_partitioned:
        rate = c.ring_bandwidth_bytes_per_s if run.is_on_one_node else c.network_bandwidth_bytes_per_s
        volume = 3.0 * _BYTES * costs.parameters * (n - 1) / n * run.n_microbatches
        return volume / rate * max(0.0, 1.0 - c.zero_overlap)
    sharing = min(GPUS_PER_NODE, run.n_gpus // n)  # rings that leave a node, one per model shard
    rate = c.network_bandwidth_bytes_per_s / sharing
    if run.is_on_one_node:
        rate = c.ring_bandwidth_bytes_per_s
    gradients = _BYTES * _held_parameters(costs, traits, run)
    return 2.0 * (n - 1) / n * gradients / rate


# ------------------------------------------------------------------------------------------------
# The fit of the hardware model to the printed grid of Fig. 10, and its predictions of unseen cells.

GRID_CAPACITY_BYTES = 16e9
"""Memory of the devices of Fig. 10, V100 with 16 GB: inferred from the batch sizes that fit [B]."""
_N_GPUS = 8
_BATCH, _RATIO, _RATE = "global_batch_size", "ckpt_ratio", "published_samples_per_s"


def grid_spec() -> FamilySpec:
    """Return the model of the grid, OPT-350M."""
    return family_spec("opt", "350m")


def grid_run(batch: int, ratio: float) -> Run:
    """Return the run of a point of the grid: ZeRO-3 on eight devices with Slapo's kernels."""
    return Run("slapo-zero3", _N_GPUS, batch, ratio)


def on_grid_machine(c: Constants) -> Constants:
    """Return the constants with the device memory of the grid."""
    return replace(c, capacity_bytes=GRID_CAPACITY_BYTES)


def fit_grid(cells: pd.DataFrame, c: Constants) -> Constants:
    """Fit the constants of `FITTED` to printed cells.

    The time of a step is linear in the batch size and in the batch size times the recomputed share, so
    three times follow from linear least squares of relative errors (`grid_times`). The usable memory is a
    border between points that fit and points that do not: of all borders that classify the most points
    correctly, the median one, halfway between the two points that it separates.

    Parameters
    ----------
    cells
        Printed cells of the grid, at least four that fit and one that does not.
    c
        Constants; the values of `FITTED` are ignored.

    Returns
    -------
    Constants
        ``c`` with the fitted constants.

    Raises
    ------
    FitError
        The cells do not determine the constants.
    """
    fits = cells[cells[_RATE].notna()]
    if len(fits) < 4 or len(fits) == len(cells):
        raise FitError(
            f"found {len(fits)} of {len(cells)} points that fit; expected four or more, and one that does not"
        )
    fitted = _scaled(c, *grid_times(fits))
    points = zip(cells[_BATCH], cells[_RATIO], strict=True)
    needed = np.array([needed_bytes(grid_spec(), grid_run(int(b), float(r)), fitted) for b, r in points])
    is_ok = cells[_RATE].notna().to_numpy()
    order = np.sort(np.unique(needed))
    borders = np.concatenate([[order[0] / 2], (order[1:] + order[:-1]) / 2, [2 * order[-1]]])
    n_right = np.array([((needed <= border) == is_ok).sum() for border in borders])
    best = borders[n_right == n_right.max()]
    return replace(fitted, usable_share=float(best[len(best) // 2]) / GRID_CAPACITY_BYTES)


def grid_times(fits: pd.DataFrame) -> tuple[float, float, float]:
    """Fit the fixed time of a step, the time per sample, and the time of recomputing a sample [s].

    Raises
    ------
    FitError
        The cells do not determine three positive times.
    """
    batch = fits[_BATCH].to_numpy(float)
    time_s = batch / fits[_RATE].to_numpy(float)
    costs = model_costs(grid_spec())
    n_recomputed = [recomputed_layers(costs, grid_run(_N_GPUS, float(ratio))) for ratio in fits[_RATIO]]
    share = np.array([number / costs.n_layers for number in n_recomputed])
    features = np.stack([np.ones_like(batch), batch, batch * share], axis=1)
    solution, _, rank, _ = np.linalg.lstsq(features / time_s[:, None], np.ones_like(time_s), rcond=None)
    if rank < 3 or (solution <= 0).any():
        raise FitError(
            f"the cells give times {solution.tolist()}; expected cells that determine three positive times"
        )
    fixed_s, sample_s, again_s = solution.tolist()
    return fixed_s, sample_s, again_s


def _scaled(c: Constants, fixed_s: float, sample_s: float, again_s: float) -> Constants:
    """Turn times of the grid into constants that apply to other models.

    A simulation with all fitted constants neutral tells the known parts of each time; the rest is the
    constant.
    """
    costs, run = model_costs(grid_spec()), grid_run(_N_GPUS, 0.0)
    traits = IMPLEMENTATIONS[run.implementation]
    plain = replace(c, zero_layer_s=0.0, best_efficiency=1.0, recomputed_share=0.0, usable_share=1.0)
    step = simulate(grid_spec(), run, plain)
    zero_layer_s = (fixed_s - step.times_s["data_exchange"] - step.times_s["optimizer"]) / costs.n_layers
    # One sample per device is enough to compare: a device has more tokens than the model is wide, so the
    # efficiency of products depends on the width alone. Infinite efficiency leaves the element-wise time.
    whole_s = sum(forward_s(costs, traits, run, plain))
    element_wise = sum(forward_s(costs, traits, run, replace(plain, best_efficiency=np.inf)))
    products_s = sample_s * _N_GPUS / 3.0 - element_wise
    if products_s <= 0:
        raise FitError(
            "element-wise traffic alone takes longer than the fitted time per sample; expected a smaller "
            "traffic_per_kept_byte or fusion_factor, or a larger memory bandwidth"
        )
    scaled = replace(plain, zero_layer_s=zero_layer_s, best_efficiency=(whole_s - element_wise) / products_s)
    layers_s, _ = forward_s(costs, traits, run, scaled)
    return replace(scaled, recomputed_share=again_s * _N_GPUS / layers_s)


def predictions(cells: pd.DataFrame, c: Constants) -> list[Mapping[str, object]]:
    """Predict every printed cell by the fitted model: in sample, and with its batch size left out.

    Parameters
    ----------
    cells
        Printed cells of the grid.
    c
        Constants; the values of `FITTED` are ignored.

    Returns
    -------
    list
        One row per protocol and cell.
    """
    batches = cells[_BATCH].to_numpy()
    everywhere = np.ones(len(cells), dtype=bool)
    left_out = [batches == batch for batch in np.unique(batches)]
    rows: list[Mapping[str, object]] = []
    for protocol, parts in (("in sample", [everywhere]), ("one batch size left out", left_out)):
        for part in parts:
            seen = cells if part.all() else cells[~part]
            fitted = on_grid_machine(fit_grid(seen, c))
            for _, cell in cells[part].iterrows():
                batch, ratio, printed = int(cell[_BATCH]), float(cell[_RATIO]), float(cell[_RATE])
                step = simulate(grid_spec(), grid_run(batch, ratio), fitted)
                rate = batch / step.iter_time_s
                rows.append({
                    "oracle": "model", "protocol": protocol, _BATCH: batch, _RATIO: ratio, _RATE: printed,
                    "is_feasible": bool(step.fits), "published_is_feasible": bool(np.isfinite(printed)),
                    "predicted_samples_per_s": rate, "relative_error": abs(rate / printed - 1.0),
                })  # fmt: skip
    return rows


# ------------------------------------------------------------------------------------------------
# Two oracles of throughput and memory: the hardware model of the paper's machine, and the emulator.


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of an oracle about a run.

    Parameters
    ----------
    throughput_samples_per_s
        Throughput, even if the run does not fit into memory.
    memory_ratio
        Needed over usable memory [1].
    largest_batch_size
        Largest global batch that fits with the same recomputed share; None if it was not computed.
    """

    throughput_samples_per_s: float
    memory_ratio: float
    largest_batch_size: int | None

    @property
    def is_feasible(self) -> bool:
        """Tell whether the run fits into memory."""
        return self.memory_ratio <= 1.0


Oracle = Callable[[FamilySpec, Run], Answer | None]
"""Predict a run; None if the oracle cannot simulate such a model."""


def modelled(c: Constants, *, bounds: bool = True) -> Oracle:
    """Return the hardware model as an oracle; ``bounds``: also compute the largest batch that fits."""

    def ask(spec: FamilySpec, run: Run) -> Answer:
        step = simulate(spec, run, c)
        largest = None
        if bounds:
            # Memory is linear in the batch, so two batch sizes determine the largest one that fits.
            unit = run.dp * run.n_microbatches
            first, second = (needed_bytes(spec, replace(run, global_batch_size=n * unit), c) for n in (1, 2))
            n_units = floor((c.usable_share * c.capacity_bytes - first) / (second - first)) + 1
            largest = max(0, n_units) * unit
        return Answer(
            run.global_batch_size / step.iter_time_s, step.needed_bytes / step.usable_bytes, largest
        )

    return ask


# --- the emulator -----------------------------------------------------------------------------------

_FAMILIES = {"bert": "bert", "roberta": "bert", "gpt": "gpt2", "opt": "gpt2", "t5": "t5", "llama": "llama"}
_STACKS = {True: "zero-eager", False: "megatron"}  # with ZeRO-3, and with tensor parallelism
_UNLIMITED_BYTES = 1e15
_NETWORK = Network(latency_s=2e-5)  # between network cards of a cloud


def emulated(gpu_memory_bytes: float | None = None) -> Oracle:
    """Return the emulator as shipped as an oracle, on nodes of eight V100; it has no convolutions."""

    def ask(spec: FamilySpec, run: Run) -> Answer | None:
        if not isinstance(spec, TransformerSpec) or spec.family not in _FAMILIES:
            return None
        traits = IMPLEMENTATIONS[run.implementation]
        plan = ExecutionPlan(
            dp=run.dp, tp=run.tp, pp=run.pp, global_batch_size=run.global_batch_size,
            micro_batch_size=run.micro_batch_size, grad_accum_steps=run.n_microbatches,
            zero_stage=3 if traits.is_partitioned else 0, checkpoint_fraction=run.ckpt_ratio,
        )  # fmt: skip
        software = replace(stack(_STACKS[traits.is_partitioned]), fused_attention=traits.fuses_attention)
        workload = Workload(
            key=f"{spec.family}-{spec.size}", aliases=(), model=_emulated_model(spec), families=(),
            precision="fp16", global_batch_size=run.global_batch_size, max_microbatches=run.n_microbatches,
            source=spec.source, data_parallel_stack=software, model_parallel_stack=software,
        )  # fmt: skip
        n_nodes, place = -(-run.n_gpus // GPUS_PER_NODE), Placement.packed(run.n_gpus, GPUS_PER_NODE)
        server = _cluster(n_nodes, gpu_memory_bytes).node
        estimate = memory_estimate(plan, workload, server, place)
        # With little memory the emulator would split the batch, which the run does not do; so it gets plenty.
        terms = explain(workload, Point(plan, place), _cluster(n_nodes, _UNLIMITED_BYTES)).terms_s
        memory_ratio = estimate.device_bytes / server.gpu.memory_bytes
        return Answer(run.global_batch_size / sum(terms.values()), memory_ratio, None)

    return ask


@cache
def _cluster(n_nodes: int, gpu_memory_bytes: float | None) -> ClusterSpec:
    server = node("p3dn")
    if gpu_memory_bytes is not None:
        server = replace(server, gpu=replace(server.gpu, memory_bytes=gpu_memory_bytes))
    return homogeneous(server, n_nodes, _NETWORK)


def _emulated_model(spec: TransformerSpec) -> ModelSpec:
    """Return a model of the zoo as the emulator describes models."""

    def block(n_layers: int, kind: Literal["enc", "dec", "causal"], seq: int) -> BlockSpec:
        return BlockSpec(
            n_layers=n_layers, kind=kind, seq=seq, hidden=spec.hidden, heads=spec.heads,
            kv_heads=spec.kv_heads, ffn=spec.ffn, gated=spec.family == "llama", kv_channels=spec.head_size,
        )  # fmt: skip

    is_causal = _FAMILIES[spec.family] in ("gpt2", "llama")
    blocks = [block(spec.n_layers, "causal" if is_causal else "enc", spec.seq)]
    if spec.n_decoder_layers:
        blocks.append(block(spec.n_decoder_layers, "dec", spec.decoder_seq))
    return ModelSpec(
        key=f"{spec.family}-{spec.size}", title=spec.title, family=_FAMILIES[spec.family],
        blocks=tuple(blocks), vocab=spec.vocab, tied_head=spec.family != "llama", source=spec.source,
        max_positions=spec.max_positions, parameters=parameter_count(spec),
    )  # fmt: skip
