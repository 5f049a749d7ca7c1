"""The machine of the paper's measurements as a small model: time and memory of one training step."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from math import floor
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

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
# What training a model costs a sample, by its sizes: matrix products, kept activations, parameters.

_BYTES = 2  # of an activation or weight at 16 bit
_MACS = 2
_COLUMNS = ("query", "key and value", "feed-forward in", "convolution 1", "convolution 3")
_ROWS = ("attention output", "feed-forward out", "convolution 2")
_MASK, _DROPPED, _NORM_INPUTS, _INPUTS = 1, 2, 4, 4


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix products of one shape.

    Parameters
    ----------
    place
        ``layer``, ``head`` or ``scores``, products of attention.
    flop
        Of all of them, a sample and forward pass [FLOP].
    inputs, outputs, tokens
        Rows and columns of the matrix, and positions of a sample that it multiplies.
    split
        ``columns``, ``rows`` or empty: how tensor parallelism divides it.
    """

    place: str
    flop: float
    inputs: int
    outputs: int
    tokens: int
    split: str

    def width(self, samples: float, tp: int) -> float:
        """Return the smallest dimension of the product on one of ``tp`` devices, for so many samples."""
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
        Layers that can be recomputed, of encoder and decoder, or bottlenecks.
    products
        Matrix products of the forward pass.
    split_parameters, whole_parameters, vocabulary_parameters
        Weights that tensor parallelism divides, that every device keeps, and the table of the vocabulary.
    largest_layer_parameters
        Of one layer.
    kept_split_bytes, kept_whole_bytes
        Activations for the backward pass, divided by tensor parallelism and not [B].
    fusable
        Tokens times channels behind which fused kernels need not keep what they computed.
    scores, kept_score_bytes
        Attention scores, and what is kept of each if attention is not one kernel [B].
    input_bytes
        Inputs of the layers, which is what recomputation keeps [B].
    exchanged_bytes, n_exchanges
        What tensor parallelism reduces or gathers in a forward pass [B], and how often.
    embedded_bytes
        Output of the embedding [B].
    logits
        Numbers that the head puts out.
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
        """Matrix products of a sample and forward pass [FLOP]."""
        return sum(one.flop for one in self.products)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.split_parameters + self.whole_parameters + self.vocabulary_parameters


@cache
def model_costs(spec: FamilySpec) -> ModelCosts:
    """Count what a model costs.

    Parameters
    ----------
    spec
        A model of `makespan.training.zoo`.

    Returns
    -------
    ModelCosts
        Kept activations of transformers follow Korthikanti et al. 2022, section 4, for any width of the
        feed-forward part; those of convolutions are the maps in front of each norm and convolution.
    """
    return _convolutions(spec) if isinstance(spec, ConvolutionSpec) else _transformer(spec)


def _products(weights: tuple[Weights, ...]) -> Iterator[Product]:
    """Yield the products of every shape, equal ones together."""
    flop: dict[tuple[str, int, int, int, str], float] = {}
    for one in weights:
        name = one.name.removeprefix("cross ")
        split = "columns" if name in (*_COLUMNS, "logits") else "rows" if name in _ROWS else ""
        if one.tokens:
            place = "layer" if one.place == "layer" else "head"
            key = (place, one.inputs, one.outputs, one.tokens, split)
            flop[key] = flop.get(key, 0.0) + one.flop
    for (place, inputs, outputs, tokens, split), total in flop.items():
        yield Product(place, total, inputs, outputs, tokens, split)


def _parameters(weights: tuple[Weights, ...]) -> tuple[int, int, int]:
    """Return the parameters that are divided, those that are not, and those of the vocabulary."""
    split = whole = vocabulary = 0
    for one in weights:
        if one.name == "logits" or (one.place, one.name) == ("embedding", "tokens"):
            vocabulary += one.parameters
        elif one.name.removeprefix("cross ") in (*_COLUMNS, *_ROWS):
            split += one.parameters
        else:
            whole += one.parameters
    return split, whole, vocabulary


@dataclass(frozen=True, slots=True)
class _Run:
    """Equal layers: how many, their tokens, and the tokens of an encoder that they attend to, or 0."""

    n_layers: int
    seq: int
    memory_seq: int


def _transformer(spec: TransformerSpec) -> ModelCosts:
    weights = family_weights(spec)
    runs = [_Run(spec.n_layers, spec.seq, 0)]
    if spec.n_decoder_layers:
        runs.append(_Run(spec.n_decoder_layers, spec.decoder_seq, spec.seq))
    scores = [run.n_layers * run.seq * (run.seq + run.memory_seq) for run in runs]
    attention = [
        Product("scores", 2.0 * _MACS * rows * spec.inner, spec.head_size, run.seq, run.seq, "columns")
        for rows, run in zip(scores, runs, strict=True)
    ]
    split, whole, vocabulary = _parameters(weights)
    n_layers = sum(run.n_layers for run in runs)
    token_layers = sum(run.n_layers * run.seq for run in runs)
    crossed = sum(run.n_layers * run.seq for run in runs if run.memory_seq)
    remembered = sum(run.n_layers * run.memory_seq for run in runs)
    per_token = _INPUTS + _NORM_INPUTS + 2 * _MASK * (spec.dropout > 0)
    inner, kv_inner = spec.inner, spec.kv_heads * spec.head_size
    n_ffn = 3 if spec.family == "llama" else 2
    kept_split = _BYTES * (
        token_layers * (2 * inner + 2 * kv_inner + n_ffn * spec.ffn)
        + crossed * 2 * inner
        + remembered * 2 * kv_inner
    )
    return ModelCosts(
        n_layers=n_layers,
        products=(*_products(weights), *attention),
        split_parameters=split,
        whole_parameters=whole,
        vocabulary_parameters=vocabulary,
        largest_layer_parameters=split / n_layers,
        kept_split_bytes=float(kept_split),
        kept_whole_bytes=float(spec.hidden * (token_layers * per_token + crossed * (per_token // 2))),
        fusable=float(spec.hidden * token_layers),
        scores=float(spec.heads * sum(scores)),
        kept_score_bytes=float(_BYTES + (_MASK + _DROPPED) * (spec.attention_dropout > 0)),
        input_bytes=float(_BYTES * spec.hidden * (token_layers + remembered)),
        exchanged_bytes=float(_BYTES * spec.hidden * (2 * token_layers + crossed)),
        n_exchanges=2 * n_layers + spec.n_decoder_layers,
        embedded_bytes=float(_BYTES * spec.hidden * sum(run.seq for run in runs)),
        logits=float((spec.decoder_seq or spec.seq) * spec.vocab),
    )


def _convolutions(spec: ConvolutionSpec) -> ModelCosts:
    weights = family_weights(spec)
    maps = dict.fromkeys(("convolution 1", "convolution 2", "convolution 3", "way past", "stem"), 0.0)
    blocks: list[int] = []
    for one in weights:
        if one.tokens and one.name in maps:
            maps[one.name] += one.tokens * one.outputs
        if one.name == "convolution 1":
            blocks.append(0)
        if one.place == "layer":
            blocks[-1] += one.parameters
    split, whole, vocabulary = _parameters(weights)
    inside = 2 * _BYTES * maps["convolution 1"]  # in front of the norm, and in front of the next convolution
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
# The machine of the paper's measurements as a small model: time and memory of one training step.

GPUS_PER_NODE = 8
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
                f"tp {self.tp}, pp {self.pp}, {self.n_microbatches} micro-batches; expected tp x pp that "
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
        """Tell whether all devices are in one node."""
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
        """Tell whether the run fits into memory."""
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


# ------------------------------------------------------------------------------------------------
# The fit of the hardware model to the printed grid of Fig. 10, and what it predicts of unseen cells.

GRID_CAPACITY_BYTES = 16e9
"""Memory of the devices of Fig. 10, V100 with 16 GB; inferred from the batch sizes that fit."""
_N_GPUS = 8
_BATCH, _RATIO, _RATE = "global_batch_size", "ckpt_ratio", "published_samples_per_s"


def grid_spec() -> FamilySpec:
    """Return the model of the grid."""
    return family_spec("opt", "350m")


def grid_run(batch: int, ratio: float) -> Run:
    """Return a point of the grid: ZeRO-3 on eight devices with Slapo's kernels."""
    return Run("slapo-zero3", _N_GPUS, batch, ratio)


def on_grid_machine(c: Constants) -> Constants:
    """Return the constants of the machine that the grid was measured on."""
    return replace(c, capacity_bytes=GRID_CAPACITY_BYTES)


def fit_grid(cells: pd.DataFrame, c: Constants) -> Constants:
    """Fit the least time of a step, the time of a sample and its recomputation, and the usable memory.

    Parameters
    ----------
    cells
        Printed cells of the grid, at least four that fit and one that does not.
    c
        Constants; those of `FITTED` do not matter.

    Returns
    -------
    Constants
        Time is linear in the batch, with and without the recomputed layers, so relative errors are least
        where a linear system says; the border of memory is in the middle between the two points that it
        separates, of all that classify most points right.

    Raises
    ------
    FitError
        The cells do not determine the constants.
    """
    fits = cells[cells[_RATE].notna()]
    if len(fits) < 4 or len(fits) == len(cells):
        raise FitError(
            f"found {len(fits)} of {len(cells)} points that fit; expected four or more, and one not"
        )
    fixed_s, sample_s, again_s = grid_times(fits)
    return _border(cells, _scaled(c, fixed_s, sample_s, again_s))


def grid_times(fits: pd.DataFrame) -> tuple[float, float, float]:
    """Return the time of a step, a sample, and the recomputation of a sample, by least relative squares."""
    batch = fits[_BATCH].to_numpy(float)
    time_s = batch / fits[_RATE].to_numpy(float)
    share = np.array([_share(float(ratio)) for ratio in fits[_RATIO]])
    features = np.stack([np.ones_like(batch), batch, batch * share], axis=1)
    solution, _, rank, _ = np.linalg.lstsq(features / time_s[:, None], np.ones_like(time_s), rcond=None)
    if rank < 3 or (solution <= 0).any():
        raise FitError(f"found times {solution.tolist()}; expected cells that decide three positive times")
    fixed_s, sample_s, again_s = solution.tolist()
    return fixed_s, sample_s, again_s


def _share(ratio: float) -> float:
    costs = model_costs(grid_spec())
    return recomputed_layers(costs, grid_run(_N_GPUS, ratio)) / costs.n_layers


def _scaled(c: Constants, fixed_s: float, sample_s: float, again_s: float) -> Constants:
    """Turn times of the grid into constants that hold for other models."""
    costs, run = model_costs(grid_spec()), grid_run(_N_GPUS, 0.0)
    traits = IMPLEMENTATIONS[run.implementation]
    plain = replace(c, zero_layer_s=0.0, best_efficiency=1.0, recomputed_share=0.0, usable_share=1.0)
    step = simulate(grid_spec(), run, plain)
    zero_layer_s = (fixed_s - step.times_s["data_exchange"] - step.times_s["optimizer"]) / costs.n_layers
    # Efficiency depends on the width alone as soon as a device has more tokens than the model is wide.
    one = sum(forward_s(costs, traits, run, plain))
    without = sum(forward_s(costs, traits, run, replace(plain, best_efficiency=np.inf)))
    products_s = sample_s * _N_GPUS / 3.0 - without
    if products_s <= 0:
        raise FitError("element-wise traffic alone takes longer than a sample does")
    found = replace(plain, zero_layer_s=zero_layer_s, best_efficiency=(one - without) / products_s)
    layers_s, _ = forward_s(costs, traits, run, found)
    return replace(found, recomputed_share=again_s * _N_GPUS / layers_s)


def _border(cells: pd.DataFrame, c: Constants) -> Constants:
    needed = _needed(cells, c)
    is_ok = cells[_RATE].notna().to_numpy()
    order = np.sort(np.unique(needed))
    borders = np.concatenate([[order[0] / 2], (order[1:] + order[:-1]) / 2, [2 * order[-1]]])
    right = np.array([((needed <= border) == is_ok).sum() for border in borders])
    best = borders[right == right.max()]
    return replace(c, usable_share=float(best[len(best) // 2]) / GRID_CAPACITY_BYTES)


def _needed(cells: pd.DataFrame, c: Constants) -> NDArray[np.float64]:
    pairs = zip(cells[_BATCH], cells[_RATIO], strict=True)
    return np.array([needed_bytes(grid_spec(), grid_run(int(b), float(r)), c) for b, r in pairs])


def predictions(cells: pd.DataFrame, c: Constants) -> list[Mapping[str, object]]:
    """Return what the model predicts of every printed cell, in sample and leaving one batch size out.

    Parameters
    ----------
    cells
        Printed cells of the grid.
    c
        Constants; those of `FITTED` do not matter.

    Returns
    -------
    list
        One row a protocol and cell.
    """
    batches = cells[_BATCH].to_numpy()
    everywhere = np.ones(len(cells), dtype=bool)
    left_out = [batches == batch for batch in np.unique(batches)]
    rows: list[Mapping[str, object]] = []
    for name, parts in (("in sample", [everywhere]), ("one batch size left out", left_out)):
        for part in parts:
            seen = cells if part.all() else cells[~part]
            found = on_grid_machine(fit_grid(seen, c))
            rows += [_predicted(name, row, found) for _, row in cells[part].iterrows()]
    return rows


def _predicted(protocol: str, row: "pd.Series[Any]", c: Constants) -> Mapping[str, object]:
    batch, ratio, printed = int(row[_BATCH]), float(row[_RATIO]), float(row[_RATE])
    step = simulate(grid_spec(), grid_run(batch, ratio), c)
    rate = batch / step.iter_time_s
    return {
        "oracle": "model", "protocol": protocol, _BATCH: batch, _RATIO: ratio, _RATE: printed,
        "is_feasible": bool(step.fits), "published_is_feasible": bool(np.isfinite(printed)),
        "predicted_samples_per_s": rate, "relative_error": abs(rate / printed - 1.0),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------
# Two answers to how fast a run is: the hardware model of the paper's machine, and the emulator as it is.


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of an oracle about a run.

    Parameters
    ----------
    throughput_samples_per_s
        Whether or not memory is enough.
    memory_ratio
        Memory that is needed over what there is [1].
    largest_batch_size
        Largest global batch that fits with as many recomputed layers; None where the oracle is not asked.
    """

    throughput_samples_per_s: float
    memory_ratio: float
    largest_batch_size: int | None

    @property
    def is_feasible(self) -> bool:
        """Tell whether the run fits into memory."""
        return self.memory_ratio <= 1.0


Oracle = Callable[[FamilySpec, Run], Answer | None]
"""Says how fast a run is; None where it knows nothing of such a model."""


def modelled(c: Constants, *, bounds: bool = True) -> Oracle:
    """Return the hardware model as an oracle; ``bounds``: whether it says how large a batch may be."""

    def ask(spec: FamilySpec, run: Run) -> Answer:
        step = simulate(spec, run, c)
        return Answer(
            run.global_batch_size / step.iter_time_s,
            step.needed_bytes / step.usable_bytes,
            _largest(spec, run, c) if bounds else None,
        )

    return ask


def _largest(spec: FamilySpec, run: Run, c: Constants) -> int:
    """Return the largest batch that fits: memory is linear in it."""
    unit = run.dp * run.n_microbatches
    one, two = (needed_bytes(spec, replace(run, global_batch_size=n * unit), c) for n in (1, 2))
    return max(0, floor((c.usable_share * c.capacity_bytes - one) / (two - one)) + 1) * unit


# --- the emulator -----------------------------------------------------------------------------------

_FAMILIES = {"bert": "bert", "roberta": "bert", "gpt": "gpt2", "opt": "gpt2", "t5": "t5", "llama": "llama"}
_STACKS = {True: "zero-eager", False: "megatron"}
_UNLIMITED_BYTES = 1e15
_NETWORK = Network(latency_s=2e-5)  # of a cloud, card to card


def emulated(gpu_memory_bytes: float | None = None) -> Oracle:
    """Return the emulator as it is shipped as an oracle, on nodes of eight V100; it knows no convolutions."""

    def ask(spec: FamilySpec, run: Run) -> Answer | None:
        if not isinstance(spec, TransformerSpec) or spec.family not in _FAMILIES:
            return None
        traits = IMPLEMENTATIONS[run.implementation]
        plan = ExecutionPlan(
            dp=run.dp, tp=run.tp, pp=run.pp, global_batch_size=run.global_batch_size,
            micro_batch_size=run.micro_batch_size, grad_accum_steps=run.n_microbatches,
            zero_stage=3 if traits.is_partitioned else 0, checkpoint_fraction=run.ckpt_ratio,
        )  # fmt: skip
        n_nodes, workload = -(-run.n_gpus // GPUS_PER_NODE), _workload(spec, run)
        place, own = Placement.packed(run.n_gpus, GPUS_PER_NODE), _machine(n_nodes, gpu_memory_bytes)
        needed = memory_estimate(plan, workload, own.node, place).device_bytes / own.node.gpu.memory_bytes
        # Where memory is short the emulator would split the batch; the run in question does not.
        terms = explain(workload, Point(plan, place), _machine(n_nodes, _UNLIMITED_BYTES)).terms_s
        return Answer(run.global_batch_size / sum(terms.values()), needed, None)

    return ask


@cache
def _machine(n_nodes: int, gpu_memory_bytes: float | None) -> ClusterSpec:
    own = node("p3dn")
    if gpu_memory_bytes is not None:
        own = replace(own, gpu=replace(own.gpu, memory_bytes=gpu_memory_bytes))
    return homogeneous(own, n_nodes, _NETWORK)


def _workload(spec: TransformerSpec, run: Run) -> Workload:
    traits = IMPLEMENTATIONS[run.implementation]
    own = replace(stack(_STACKS[traits.is_partitioned]), fused_attention=traits.fuses_attention)
    return Workload(
        key=f"{spec.family}-{spec.size}", aliases=(), model=_model(spec), families=(), precision="fp16",
        global_batch_size=run.global_batch_size, max_microbatches=run.n_microbatches, source=spec.source,
        data_parallel_stack=own, model_parallel_stack=own,
    )  # fmt: skip


def _model(spec: TransformerSpec) -> ModelSpec:
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
