"""Time of one training step, as a sum of terms that are linear in a few factors.

Every term is an ideal time, from counts of the model and from what the device sustains, times a factor that
says how much longer the software of a stack takes, or which share of a transfer is not hidden. A term depends
on the layout and never on a factor, so that fitting factors to measured rows is a problem of least squares in
their logarithms, and a grid of layouts is one pass over arrays.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from makespan.hardware import ClusterSpec
from makespan.planning.architecture import Architecture, Attention, Experts, Layers, Recurrent
from makespan.planning.columns import (
    Column,
    at_least,
    at_most,
    ceil,
    common_divisor,
    doublings,
    floor,
    power,
    table_of,
    where,
)
from makespan.planning.layout import Layout
from makespan.planning.stacks import Software, Training

Array = NDArray[np.float64]
Products = Callable[[Column, Column, Column, Column], Column]
"""Time of products [s] by their outputs, inner size, tokens, and how often they run again."""

TERMS: dict[str, str] = {
    "products": "matrix products of attention and dense feed-forward parts",
    "experts": "matrix products of experts",
    "expert_traffic": "permutation of tokens, and weights of experts read for each micro-batch",
    "attention": "fused attention kernels",
    "scores": "attention cores of separate kernels",
    "odd_heads": "attention cores whose head size is no multiple of 8",
    "elements": "element-wise kernels: norms, activations, residuals, dropout, softmax",
    "casts": "conversions to 8 bits and back",
    "accumulation": "gradients of a micro-batch added to those before",
    "head": "output head and loss",
    "tensor": "collectives of tensor parallelism that nothing hides",
    "tensor_beside": "collectives of tensor parallelism beside the products",
    "context": "keys and values sent around by context parallelism",
    "dispatch": "tokens sent to experts and back",
    "stages": "activations sent between pipeline stages",
    "launches": "gaps between kernels",
    "expert_launches": "gaps between the kernels of experts, and waiting for their counts",
    "step": "fixed part of a step",
    "gradients": "exchange of gradients and parameters, once a step",
    "gradients_beyond": "exchange of gradients for which the backward pass is too short",
    "shards": "gathered and scattered parameters of fully sharded data parallelism",
    "shards_beyond": "gathered and scattered parameters for which the computation is too short",
    "optimizer": "update of the states",
}
"""Terms of a step with their descriptions, in the order of their columns."""
RECURRENT_TERMS: dict[str, str] = {"scan": "scans of recurrent layers, whose projections are matrix products"}
"""Further terms of models with recurrent layers, whose columns follow; other models do not have them."""
NAMES = tuple(TERMS)
ALL_NAMES = (*NAMES, *RECURRENT_TERMS)
COMPUTE = np.array(
    [name in ("products", "experts", "attention", "scores", "odd_heads", "head") for name in ALL_NAMES]
)
"""Marks the terms that the sustained share of the device scales."""

_GEMM_PASSES = 3.0  # forward, and two products of the same size backward
_CORE_PASSES = 3.5  # the backward pass of a fused attention kernel has five products for two (Dao 2023)
_SCAN_PASSES = 4.0  # the backward pass computes states again, and two gradients per product (Dao & Gu 2024)
_STREAMING = 0.8  # share of the memory bandwidth that element-wise kernels reach
_LINK, _NETWORK, _ALL_TO_ALL = 0.75, 0.8, 0.6  # shares of the bandwidth that collectives reach
_KERNELS_PER_LAYER, _KERNELS_OF_EXPERTS, _GAP_S = 15.0, 200.0, 5e-6
_STEP_S = 20e-3
_WINDOW = 0.6  # share of the backward pass of one micro-batch that can hide an exchange
_SHARD_WINDOW = 0.8  # the same for all computation, with parameters gathered ahead
_SMALL_HEAD = 0.8  # attention kernels with heads of 64 channels, over those with 128
_SCORE_BYTES = 8.0  # per head and pair of tokens: scores, softmax, mask and dropout, read and written
_CAST_BYTES = 1.0
_BIASED_PASSES = 12.0
# Bytes that a forward pass moves per channel where Python runs operator by operator under autocast: two norms
# in 32 bits with conversions for every product behind them, and two residual sums; rotated queries and keys;
# their norms; activations by one kernel, by eight (tanh GELU), and the product with a gate.
_WRITTEN_LAYER_NORMS, _WRITTEN_RMS_NORMS, _WRITTEN_ROTATION, _WRITTEN_HEAD_NORMS = 72.0, 100.0, 24.0, 40.0
_WRITTEN_ACTIVATION, _WRITTEN_TANH_GELU, _WRITTEN_PRODUCT = 4.0, 60.0, 6.0
_WRITTEN_KERNELS, _HOST_GAP_S = 40.0, 20e-6  # per layer and pass, where Python runs operator by operator
_BLOCK = 4096  # layouts whose terms fit into the caches of a processor
_OPERATORS = 0.5  # share of the products that selective recomputation by operator repeats


def names_of(model: Architecture) -> tuple[str, ...]:
    """Return the terms of the steps of a model, in the order of their columns."""
    return ALL_NAMES if model.is_recurrent else NAMES


@dataclass(frozen=True, slots=True)
class Grid:
    """Columns of the fields of layouts: float arrays of one length, or plain floats for a single layout."""

    dp: Column
    tp: Column
    pp: Column
    cp: Column
    ep: Column
    interleave: Column
    micro_batch: Column
    zero: Column
    shard: Column
    full: Column  # share of the layers that are computed again as a whole
    cores: Column  # whose attention cores alone are
    operators: Column  # whose products are by half
    sequence_parallel: Column
    zero_bubble: Column
    ends: Column

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> "Grid":
        """Return the columns of layouts."""
        rows = [
            (
                one.dp,
                one.tp,
                one.pp,
                one.cp,
                one.ep,
                one.interleave,
                one.micro_batch,
                one.zero,
                one.shard or one.dp * one.cp,
                one.recompute_share * (one.recompute == "full"),
                one.recompute_share * (one.recompute == "selective"),
                one.recompute_share * (one.recompute == "operators"),
                one.sequence_parallel,
                one.pipeline == "zero-bubble",
                one.ends_as_layers,
            )
            for one in layouts
        ]
        if len(rows) == 1:
            return cls(*map(float, rows[0]))
        columns = np.array(rows, dtype=float).reshape(len(rows), len(cls.__slots__)).T
        return cls(*np.ascontiguousarray(columns))

    def __len__(self) -> int:
        return len(self.dp) if isinstance(self.dp, np.ndarray) else 1

    def blocks(self) -> Iterator["Grid"]:
        """Yield parts whose columns fit into the caches of a processor together, in order."""
        if len(self) <= _BLOCK:
            yield self
            return
        columns = [getattr(self, name) for name in self.__slots__]
        for start in range(0, len(self), _BLOCK):
            yield Grid(*(column[start : start + _BLOCK] for column in columns))

    @property
    def again(self) -> Column:
        """Share of the products that run once more in the backward pass [1]."""
        return self.full + _OPERATORS * self.operators

    @property
    def again_core(self) -> Column:
        """Share of the attention cores that run once more in the backward pass [1]."""
        return self.full + self.cores

    @property
    def peers(self) -> Column:
        """Devices that hold the same part of the model."""
        return self.dp * self.cp

    @property
    def undivided(self) -> Column:
        """Divisor of what tensor parallelism repeats: 1, or its degree if it is sequence parallel."""
        return where(self.sequence_parallel > 0, self.tp, 1.0)

    @property
    def expert_peers(self) -> Column:
        """Devices that hold the same experts."""
        return at_least(self.peers * self.tp / (self.ep * self.expert_cut), 1.0)

    @property
    def expert_shard(self) -> Column:
        """Devices that share out the states of an expert, where those of other parts are sharded."""
        return at_most(self.shard * self.tp / self.expert_cut, self.expert_peers)

    @property
    def expert_cut(self) -> Column:
        """Parts of an expert: tensor parallelism cuts those that nothing deals out, as in Megatron-LM."""
        return where(self.ep == 1, self.tp, 1.0)

    def microbatches(self, training: Training) -> Column:
        """Return the micro-batches of a step."""
        return at_least(training.global_batch / (self.dp * self.micro_batch), 1.0)

    def items_per_stage(self, model: Architecture) -> Column:
        """Return the layers of the longest pipeline stage, embedding and loss among them if they count."""
        chunks = self.pp * self.interleave
        return ceil((model.n_layers + 2.0 * self.ends) / chunks) * self.interleave

    def shares_of_stages(self, model: Architecture) -> tuple[Column, Column]:
        """Return the share of the layers on the first pipeline stage, and on one behind it [1]."""
        longest = self.items_per_stage(model)
        first = at_most((longest - self.ends) / model.n_layers, 1.0)
        # With two stages, or one, all have an end.
        return first, where(self.pp > 2, at_most(longest / model.n_layers, 1.0), first)

    def tokens(self, training: Training, run: Layers) -> Column:
        """Return the tokens of a micro-batch that a device computes in a run of layers."""
        own = training.model.tokens(run, training.seq) * training.computed_share
        return self.micro_batch * own / self.cp


class Rates(NamedTuple):
    """Rates of links and memory of a device [B/s per direction], times that a message needs [s], and nodes.

    Parameters
    ----------
    n_gpus, per_node, smallest
        Devices in all, those of a full node, which the fast link joins, and those of the smallest node.
    """

    link: float
    network: float
    memory: float
    link_latency_s: float
    network_latency_s: float
    n_gpus: int
    per_node: int
    smallest: int

    @classmethod
    def of(cls, cluster: ClusterSpec) -> "Rates":
        """Return the rates of a cluster of equal devices; those that share a card have equal parts of it."""
        node = cluster.nodes[0]
        card = node.nic_bandwidth_bytes_per_s / node.gpus_per_nic
        return cls(
            node.intra_bandwidth_bytes_per_s,
            card * cluster.network.bandwidth_factor,
            node.gpu.memory_bandwidth_bytes_per_s,
            node.intra_latency_s,
            cluster.network.latency_s,
            cluster.n_gpus,
            cluster.gpus_per_node,
            min(node.n_gpus for node in cluster.kinds),
        )


class Collective(NamedTuple):
    """How long a group of devices takes to gather, or to scatter.

    Parameters
    ----------
    byte_s
        Time per byte of what all of them have together [s/B]. An all-reduce is a scatter and a gather.
    start_s
        Time that the shortest message needs [s].
    """

    byte_s: Column
    start_s: Column


def collective(size: Column, inner: Column, rates: Rates) -> Collective:
    """Return the times of a group of ``size`` devices, every ``inner``-th of the order.

    In a node, each device takes what the others have over the link. Between nodes, each device of a node
    first brings in an equal part of what other nodes have over its own card, and then the parts go round in
    the node: times add up. The node with the fewest devices of the group has the fewest cards for that: one
    that the group begins or ends in, or a smaller last one.
    """
    link, network = rates.link * _LINK, rates.network * _NETWORK
    per_node, span = rates.per_node, size * inner
    aligned = common_divisor(per_node, span)
    is_near = (span <= per_node) & ((aligned == span) | (rates.n_gpus <= per_node))
    local = at_least(floor(per_node / inner), 1.0)
    of_ends = where(span == rates.n_gpus, float(per_node), aligned)
    fewest = at_least(floor(at_most(of_ends, float(rates.smallest)) / inner), 1.0)
    elsewhere = at_least(1.0 - fewest / size, 0.0)
    across = elsewhere / (fewest * network) + (local - 1.0) / local / link
    n_nodes = at_least(ceil(size / local), 2.0)
    return Collective(
        where(is_near, (size - 1.0) / size / link, across),
        where(is_near, rates.link_latency_s, rates.network_latency_s * doublings(n_nodes)),
    )


def weights(training: Training, grid: Grid) -> tuple[Column, Column]:
    """Return the parameters held by a device of the fullest stage: those of experts, and all others.

    That is the first one, with the embedding; where embedding and loss count as layers, it may be the second.
    """
    model = training.model
    expert, other = 0.0, 0.0
    for run, (held, own) in zip(model.kinds, model.kind_parameters, strict=True):
        expert, other = expert + run.n_layers * own, other + run.n_layers * held - run.n_layers * own
    ends = model.embedding_parameters + model.extra_parameters
    head = 0 if model.is_tied else model.head_parameters
    # Embedding and head lie on different stages, if there are several.
    at_ends = where(grid.pp > 1, float(max(ends, model.head_parameters)), float(ends + head))
    experts, others, at_ends = expert / (grid.ep * grid.expert_cut), other / grid.tp, at_ends / grid.tp
    first, second = grid.shares_of_stages(model)
    is_first = (experts + others) * first + at_ends >= (experts + others) * second
    return experts * where(is_first, first, second), where(
        is_first, others * first + at_ends, others * second
    )


class _Routed(NamedTuple):
    """Computation, memory traffic and transfers of the experts of one layer for a micro-batch, per device.

    Parameters
    ----------
    here
        Experts of a device.
    products_s
        Matrix products of one of them [s].
    moved
        Traffic through memory of a pass, of permuted tokens and weights [B].
    sent, sent_s, start_s
        Tokens sent to experts and back [B], how long a byte takes, and the shortest message both ways [s].
    """

    here: Column
    products_s: Column
    moved: Column
    sent: Column
    sent_s: Column
    start_s: Column

    @classmethod
    def of(
        cls,
        ffn: Experts,
        tokens: Column,
        training: Training,
        grid: Grid,
        rates: Rates,
        products_s: Products,
    ) -> "_Routed":
        """Count the experts of a layer that computes ``tokens`` on each device."""
        bytes_per = training.element_bytes
        hidden, tp, again = float(training.model.hidden), grid.tp, grid.again
        # Devices that cut experts compute a part of each for all tokens of the group, the others all of
        # it for their own tokens.
        cut = grid.expert_cut
        routed = tokens * cut / tp * ffn.per_token * (ffn.capacity or 1.0)
        # Every expert has products of its own, with the tokens of all devices that it serves.
        here = at_least(ffn.n_experts / grid.ep, 1.0)
        up = products_s(ffn.size / cut, hidden, routed / here, again)
        down = products_s(hidden, ffn.size / cut, routed / here, again)
        # Biases come with a gate of several kernels: they are added, and both halves are clipped.
        gated = 3.0 + _BIASED_PASSES * ffn.has_bias
        permuted = routed * (4.0 * hidden + gated * ffn.size / cut) * bytes_per
        read = 2.0 * ffn.expert_parameters(training.model.hidden) / (grid.ep * cut)
        width = 1.5 if training.is_narrow else 2.0
        # A token goes once to every node that has one of its experts, and from there over the fast link.
        # Its groups of experts are on some nodes alone: a part of all, or as many as they meet by chance.
        open_nodes = nodes = at_least(grid.ep / rates.per_node, 1.0)
        if ffn.reach < 1:
            met = nodes * (1.0 - power(1.0 - 1.0 / nodes, ffn.groups_per_token))
            open_nodes = where(nodes >= ffn.n_groups, nodes * ffn.reach, met)
        visited = open_nodes * (1.0 - power(1.0 - 1.0 / open_nodes, ffn.per_token))
        inside = at_most(grid.ep, float(rates.per_node))
        open_devices = at_least(grid.ep * ffn.reach, 1.0)
        near = at_most(open_devices, float(ffn.per_token)) * (1.0 - 1.0 / inside)
        far = visited * (1.0 - 1.0 / nodes)
        near_s = near / (rates.link * _ALL_TO_ALL)
        far_s = far / (rates.network * _NETWORK)
        return cls(
            here=here,
            products_s=(ffn.n_matrices - 1) * up + down,
            moved=permuted + read,
            sent=2.0 * tokens / tp * hidden * width,
            sent_s=near_s + far_s,
            start_s=2.0
            * (grid.ep > 1)
            * where(nodes > 1, float(rates.network_latency_s), float(rates.link_latency_s)),
        )


def ideal_terms(training: Training, grid: Grid, cluster: ClusterSpec, stack: Software) -> Array:
    """Return the ideal time of every term [s], (n_layouts, n_terms), columns as `names_of` the model.

    Nodes are equal, as a `Pricer` checks; the last may be smaller. Raises `UnknownNameError` for a precision
    that the device does not have, `InputError` if its sustained rates are unknown.
    """
    model, rates, gpu = training.model, Rates.of(cluster), cluster.nodes[0].gpu
    peak, peak16 = gpu.sustained_peak(training.precision), gpu.sustained_peak(training.core_precision)
    share, half = gpu.sustained.products[training.precision]
    attention_shares = gpu.sustained.attention
    memory = rates.memory * _STREAMING
    bytes_per, is_narrow = training.element_bytes, training.is_narrow
    hidden, tp, cp, pp = float(model.hidden), grid.tp, grid.cp, grid.pp
    count, again, again_core = grid.microbatches(training), grid.again, grid.again_core
    # Terms of one micro-batch, all layers, per device [s].
    per_microbatch: dict[str, Column] = dict.fromkeys(names_of(model), 0.0)
    routed: dict[tuple[Experts, int], _Routed] = {}

    def products_s(out: Column, size: Column, tokens: Column, again: Column) -> Column:
        """Return the time of a product, forward, backward, and ``again`` times in between."""
        # The gradient of the input sums over the output, that of the weights over the tokens.
        passes = (1.0 + again) * (1.0 + half / size) + 1.0 + half / out
        if not training.is_adapter:
            passes = passes + 1.0 + half / tokens
        return 2.0 * tokens * out * size * passes / (peak * share)

    tensor, ring = collective(tp, 1.0, rates), collective(cp, tp, rates)
    n_encoded, encoder_tokens = (
        model.tokens(model.layers[0], training.seq),
        grid.tokens(training, model.layers[0]),
    )
    for run in model.kinds:
        seq = model.tokens(run, training.seq) * training.computed_share
        tokens = grid.tokens(training, run)
        n = float(run.n_layers)
        dense: Column = 0.0
        for part, is_cross in ((run.attention, False), (run.cross_attention, True), (run.recurrent, False)):
            if part is None:
                continue
            projections = [(*each, tokens) for each in part.products(model.hidden)]
            if isinstance(part, Attention) and is_cross:  # keys and values are those of the encoder's tokens
                out, inner, is_divided, _ = projections[0]
                projections[0] = out - part.key_size, inner, is_divided, tokens
                projections.append((part.key_size, inner, is_divided, encoder_tokens))
            for out, inner, is_divided, projected in projections:
                # Heads divide the longer side of a projection.
                divide = tp if is_divided else 1.0
                if out >= inner or (isinstance(part, Attention) and part.latent is not None):
                    dense = dense + products_s(out / divide, float(inner), projected, again)
                else:
                    dense = dense + products_s(float(out), inner / divide, projected, again)
            if isinstance(part, Recurrent):
                per_microbatch["scan"] += (
                    n * _scan_s(part, training, tokens, seq, cluster) / tp * (_SCAN_PASSES + grid.full)
                )
                continue
            # Separate kernels compute masked scores as well.
            computed = replace(part, window=0, chunk=0) if stack.attention == "unfused" else part
            core_flop = computed.core_flop(round(seq), n_encoded if is_cross else None)
            core = grid.micro_batch * core_flop / (tp * cp)
            passes = _CORE_PASSES + again_core
            is_odd = part.head_dim % 8 != 0
            if stack.attention == "unfused":
                full = 2.0 * core if part.is_causal else core
                in_core = full / (peak16 * share) * (1.0 + 0.5 * half / part.head_dim)
                per_microbatch["scores"] += n * in_core * (_GEMM_PASSES + again_core)
                if is_odd:
                    per_microbatch["odd_heads"] += n * in_core * (_GEMM_PASSES + again_core)
            else:
                reached, length = attention_shares[stack.attention]
                # The first kernels have smaller tiles for heads of 128 channels: those of 64 are as fast.
                is_slower = part.head_dim <= 64 and stack.attention != "first"
                small = _SMALL_HEAD if is_slower else 1.0
                in_core = core / (peak16 * reached * small * seq / (seq + length))
                per_microbatch["attention"] += n * in_core * passes
            sent_heads = part.heads if stack.repeats_keys else part.kv_heads
            sent = cp * tokens * sent_heads / tp * (part.head_dim + part.value_dim) * bytes_per
            per_microbatch["context"] += n * 3.0 * (sent * ring.byte_s + ring.start_s) * (cp > 1)
        # Element-wise traffic: what every device of a tensor group repeats, and what they divide.
        scores: Column = 0.0
        mixed = 0.0  # channels that attention and recurrent part read and write
        for attention, seen in ((run.attention, seq), (run.cross_attention, float(n_encoded))):
            if attention is not None:
                mixed += 3.0 * attention.heads * attention.head_dim + 3.0 * attention.gate_size
                if stack.attention == "unfused":
                    scores += _SCORE_BYTES / 2 * bytes_per * attention.heads / tp * seen * tokens
        if run.recurrent is not None:
            mixed += run.recurrent.streamed
        size, mats = run.ffn_size, run.ffn.n_matrices if run.ffn else 0
        replicated = 5.0 * run.n_halves * tokens / grid.undivided * hidden * bytes_per
        divided = tokens / tp * (mixed + mats * size) * bytes_per
        passes = _GEMM_PASSES + again
        moved = stack.element_passes * (replicated + divided + scores)
        if stack.is_written_out:
            alike, parted = _written_bytes(model, run, size)
            moved = stack.element_passes * (tokens * (alike / grid.undivided + parted / tp) + scores)
        per_microbatch["elements"] += n * moved / memory * passes
        if is_narrow:
            per_microbatch["casts"] += (
                n * stack.cast_passes * tokens * _CAST_BYTES * (2 * run.n_halves * hidden + 2 * size / tp)
                / memory * passes
            )  # fmt: skip
        # Outputs of attention and of a recurrent part beside it are added before they are reduced.
        reductions: Column = float(run.n_halves - (run.ffn is not None))
        if isinstance(run.ffn, Experts):
            ffn = run.ffn
            if ffn.shared_size:
                dense = dense + (mats - 1) * products_s(ffn.shared_size / tp, hidden, tokens, again)
                dense = dense + products_s(hidden, ffn.shared_size / tp, tokens, again)
                reductions = reductions + 1.0
            reductions = reductions + (grid.expert_cut > 1)
            if (ffn, run.seq) not in routed:  # layers that differ in their attention have the same experts
                routed[ffn, run.seq] = _Routed.of(ffn, tokens, training, grid, rates, products_s)
            mixture = routed[ffn, run.seq]
            per_microbatch["experts"] += n * mixture.here * mixture.products_s * stack.expert_share
            per_microbatch["expert_traffic"] += n * mixture.moved / memory * passes * stack.expert_share
            per_microbatch["expert_launches"] += (
                n * stack.launched_share * _KERNELS_OF_EXPERTS * _GAP_S * passes
            )
            sent_s = mixture.sent * mixture.sent_s + mixture.start_s
            per_microbatch["dispatch"] += n * sent_s * (2.0 + again)
        elif run.ffn is not None:
            dense = (
                dense
                + (mats - 1) * products_s(size / tp, hidden, tokens, again)
                + products_s(hidden, size / tp, tokens, again)
            )
            reductions = reductions + 1.0
        per_microbatch["products"] += n * dense
        volume = reductions * 2.0 * tokens * hidden * bytes_per
        if run.recurrent is not None and run.recurrent.kind == "selective":
            # Time steps, keys and queries follow from all channels (Dao & Gu 2024, section 8.1).
            small = run.recurrent.rank + 2.0 * run.recurrent.state_dim
            reductions, volume = reductions + 1.0, volume + 2.0 * tokens * small * bytes_per
        moved_s = n * (volume * tensor.byte_s + reductions * tensor.start_s) * (2.0 + again) * (tp > 1)
        per_microbatch["tensor_beside"] += moved_s * stack.overlaps_tensor
        per_microbatch["tensor"] += moved_s * (1.0 - stack.overlaps_tensor)
        if stack.regathers_inputs:
            # Of the input of each pair of products a device keeps its part, and gathers the rest once more
            # beside the gradient of that input (Korthikanti et al. 2022, section 4.2.2).
            half_s = n * (volume / 2.0 * tensor.byte_s + reductions * tensor.start_s) * (tp > 1)
            per_microbatch["tensor_beside"] += half_s * (grid.sequence_parallel > 0)
        gaps_s = _WRITTEN_KERNELS * _HOST_GAP_S if stack.is_written_out else _KERNELS_PER_LAYER * _GAP_S
        parts = (run.attention, run.cross_attention, run.recurrent, run.ffn)
        n_kernels = sum(part is not None for part in parts) / 2
        per_microbatch["launches"] += n * stack.launched_share * (gaps_s * n_kernels) * passes

    # Per device: the slowest stage runs all micro-batches, the ramp runs a mean stage.
    items = model.n_layers + 2.0 * grid.ends
    uneven = grid.items_per_stage(model) * pp / items
    # Chunks shorten it for as many micro-batches as there are stages; fewer wait for their own last stage.
    late = at_least(pp - count, 0.0)
    ramp = late + (at_most(count, pp) - 1) / grid.interleave
    # Gradients of weights fill it, but a single micro-batch has them last: it crosses all stages before.
    crossing = 2 * pp - 3 * count + (2 * count - 1) / grid.interleave
    filled = at_least(late + (pp - 1) / grid.interleave, crossing) * (1 / 3)
    ramp = where(grid.zero_bubble > 0, filled, ramp)
    repeats = (count * uneven + ramp) / pp
    terms = {name: values * repeats for name, values in per_microbatch.items()}
    _add_head(terms, training, grid, count, stack, memory, products_s)
    _add_transfers(terms, training, grid, rates, stack, count)
    return table_of(terms, names_of(model), len(grid))


def _scan_s(part: Recurrent, training: Training, tokens: Column, seq: float, cluster: ClusterSpec) -> Column:
    """Return the ideal time of the forward scan of a micro-batch of ``tokens`` on one device [s].

    Its products have small inner sizes, and its kernels read and write more than others do, so that both
    add up. Their states have 32 bits, and vector operations run at the peak of that precision.
    """
    gpu = cluster.nodes[0].gpu
    share, half = gpu.sustained.products[training.core_precision]
    length = max(round(seq), 1)
    flop = part.core_flop(length) / length / (gpu.sustained_peak(training.core_precision) * share)
    if flop:
        inner = min(part.state_dim, part.head_dim, part.chunk, length)
        flop *= 1.0 + half / inner
    vector = part.vector_flop(length) / length
    if vector:
        vector /= gpu.sustained_peak("fp32")
    memory = Rates.of(cluster).memory * _STREAMING
    return tokens * (flop + vector + part.scan_bytes(training.element_bytes) / memory)


def _written_bytes(model: Architecture, run: Layers, size: float) -> tuple[float, float]:
    """Return the bytes per token of the element-wise operators of a forward pass, run one by one.

    The first are those of norms and residual sums, the second those that tensor parallelism divides.
    """
    attention, recurrent = run.attention, run.recurrent
    copied = 6.0 * attention.heads * attention.head_dim + 6.0 * attention.gate_size if attention else 0.0
    if recurrent is not None:  # in kernels of their own packages, which have 16 bits
        copied += 2.0 * recurrent.streamed
    activation = _WRITTEN_TANH_GELU if model.writes_gelu_out else _WRITTEN_ACTIVATION
    norms = run.n_halves / 2 * model.hidden
    if run.ffn is not None and run.ffn.n_matrices == 2 and not model.is_recurrent:
        return _WRITTEN_LAYER_NORMS * norms, copied + activation * size
    # Models with gates have root-mean-square norms and rotated heads, too.
    rotated = 0.0
    if attention is not None:
        per_channel = _WRITTEN_ROTATION + _WRITTEN_HEAD_NORMS * (attention.n_norms > 0)
        rotated = per_channel * (attention.heads + attention.kv_heads) * attention.head_dim
    gated = activation + _WRITTEN_PRODUCT * (run.ffn is not None and run.ffn.n_matrices > 2)
    return _WRITTEN_RMS_NORMS * norms, rotated + copied + gated * size


def _add_head(
    terms: dict[str, Column],
    training: Training,
    grid: Grid,
    count: Column,
    stack: Software,
    memory: float,
    products_s: Products,
) -> None:
    """Add output head and loss, which the last stage computes beside its layers."""
    model = training.model
    if not stack.head_tokens(training):  # one row of classes per sample, or no head: too little to count
        terms["head"] = 0.0
        return
    tokens = grid.micro_batch * stack.head_tokens(training) / grid.cp
    products = products_s(model.vocab / grid.tp, float(model.hidden), tokens, 0.0)
    loss = stack.logit_bytes * tokens * model.vocab / grid.tp / memory
    own = count * (products + loss)
    # Where embedding and loss count as layers, the last stage has one layer less.
    layer = terms["products"] + terms["attention"] + terms["scores"]
    if "scan" in terms:
        layer = layer + terms["scan"]
    layer = layer / (model.n_layers / grid.pp)
    terms["head"] = where(grid.ends > 0, at_least(own - layer, 0.0), own)


def _add_transfers(
    terms: dict[str, Column],
    training: Training,
    grid: Grid,
    rates: Rates,
    stack: Software,
    count: Column,
) -> None:
    """Add what goes over links once a step or once a micro-batch, and the update of the states."""
    model, bytes_per = training.model, training.element_bytes
    network, memory = rates.network * _NETWORK, rates.memory * _STREAMING
    tokens = grid.tokens(training, model.layers[-1])
    sent = tokens * model.hidden / grid.undivided * bytes_per
    is_near = grid.dp * grid.tp * grid.cp * grid.pp <= rates.per_node
    rate = where(is_near, rates.link * _LINK, network)
    start_s = where(is_near, float(rates.link_latency_s), float(rates.network_latency_s))
    crossings = 2.0 * grid.interleave * (count + grid.pp - 1)
    terms["stages"] = (grid.pp > 1) * crossings * (sent / rate + start_s)
    terms["step"] = _STEP_S

    expert, other = weights(training, grid)
    gradient = stack.bytes_of_gradient(training)
    trains = 0.0 if training.is_adapter else 1.0
    # Without a pipeline, parameters are gathered for the forward and the backward pass of every micro-batch.
    rounds = where((grid.pp == 1) | stack.regathers, count, 1.0)
    exchanged: Column = 0.0
    sharded: Column = 0.0
    states: Column = 0.0
    layers = model.n_layers / grid.pp  # each has collectives of its own
    # Sharded gradients are scattered in every micro-batch, others once.
    scatters = where(grid.zero == 2, count, 1.0)
    # Devices with the same experts are fewer than those with the same other part, and further apart.
    parts = [(other, grid.peers, grid.shard, grid.tp)]
    if any(isinstance(run.ffn, Experts) for run in model.kinds):
        parts.append((expert, grid.expert_peers, grid.expert_shard, grid.ep * grid.expert_cut))
    for held, peers, shard, apart in parts:
        trained = trains * held
        plain, partitioned = 2.0 * trained * gradient, trained * (scatters * gradient + bytes_per)
        among, among_shards = collective(peers, apart, rates), collective(shard, apart, rates)
        messages = layers * trains * (1.0 + scatters) * (peers > 1)
        exchanged += where(grid.zero == 0, plain, partitioned) * among.byte_s + messages * among.start_s
        gathered = rounds * (2.0 * held + trained) * bytes_per
        messages = layers * rounds * (2.0 + trains) * (shard > 1)
        groups = peers / shard
        between = 2.0 * (groups - 1) / groups * trained / shard * gradient / network
        sharded += gathered * among_shards.byte_s + messages * among_shards.start_s + between
        states += trained * 16.0 / where(grid.zero >= 1, shard, 1.0)
    exchanged, sharded = exchanged * (grid.zero < 3), sharded * (grid.zero == 3)
    trained = trains * (expert + other)
    # A gradient of 16 bits is written and read again, and the sum is read and written.
    terms["accumulation"] = count * trained * (2.0 * bytes_per + 2.0 * gradient) / memory
    computed = terms["products"] + terms["experts"] + terms["attention"] + terms["scores"] + terms["elements"]
    if "scan" in terms:
        computed = computed + terms["scan"]
    terms["gradients"] = exchanged
    terms["gradients_beyond"] = at_least(exchanged - _WINDOW * computed * scatters / count, 0.0)
    terms["shards"] = sharded
    terms["shards_beyond"] = at_least(sharded - _SHARD_WINDOW * computed, 0.0)
    terms["optimizer"] = (4.0 * trained + 1.5 * states) / memory
    if stack.is_written_out:  # the host runs ahead, and the device waits for it where it has less to do
        terms["launches"] = at_least(terms["launches"] - computed - terms["head"], 0.0)
