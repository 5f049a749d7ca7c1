"""Memory of a device under a layout, by component.

Activations follow Korthikanti et al. 2022, section 4, with fused attention and without dropout, and states
Rajbhandari et al. 2020, section 3. A device of the first pipeline stage is the fullest, as it keeps the
activations of as many micro-batches as there are stages.
"""

import numpy as np
from numpy.typing import NDArray

from makespan.hardware import ClusterSpec
from makespan.planning.architecture import Architecture, Experts
from makespan.planning.columns import Column, at_least, at_most, table_of, where
from makespan.planning.stacks import Software, Training
from makespan.planning.steptime import Grid, weights

Array = NDArray[np.float64]

COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "reserve")
"""Components of the memory of a device, in the order of their columns."""
RECURRENT_COMPONENTS = ("scan",)
"""Further components of models with recurrent layers: activations that recurrent parts keep."""
_OPTIMIZER_BYTES = 12.0  # fp32 copy of a parameter and two moments
_RESERVE_BYTES = 1.0 * 2**30  # context, libraries, buffers of collectives
_OPERATORS_SAVE = 0.5  # of what a layer keeps, where half of its products are computed again
_WRITTEN_GELU = 5.75  # copies of its input that a tanh GELU of eight operators keeps, in 32 bits
# Bytes per channel of the residual stream that a layer keeps where Python runs operator by operator: two
# norms in 32 bits, and with autocast what each product casts. Keys: root-mean-square norms, and autocast.
_WRITTEN_ENTRIES = {(False, True): 18.0, (True, True): 34.0, (False, False): 16.0, (True, False): 24.0}
_BUCKET_LAYERS = 2.0  # layers that fully sharded data parallelism holds at once


def components_of(model: Architecture) -> tuple[str, ...]:
    """Return the components of the memory of a device that trains a model, in the order of their columns."""
    return (*COMPONENTS, *RECURRENT_COMPONENTS) if model.is_recurrent else COMPONENTS


def memory_table(training: Training, grid: Grid, stack: Software) -> Array:
    """Return the memory of a device [B], (n_layouts, n_components), columns as `components_of` the model."""
    model, width = training.model, training.element_bytes
    hidden, tp = float(model.hidden), grid.tp
    expert, other = weights(training, grid)
    # Fewer devices share an expert than share other parts: one alone where each has experts of its own.
    of_experts = grid.expert_shard
    trained = 0.0 if training.is_adapter else 1.0

    def sharded(stage: int, each: float) -> Column:
        is_sharded = grid.zero >= stage
        dense = other / where(is_sharded, grid.shard, 1.0)
        return each * (dense + expert / where(is_sharded, of_experts, 1.0))

    table = {
        "parameters": sharded(3, width),
        "gradients": trained * sharded(2, stack.bytes_of_gradient(training)),
        # A copy of the parameters is needed beside them at 16 bits alone.
        "optimizer": trained * sharded(1, _OPTIMIZER_BYTES if width == 2.0 else 8.0),
    }
    kept: Column = 0.0
    kept_by_scans: Column = 0.0
    working: Column = 0.0
    largest: Column = 0.0
    for run, (held, experts) in zip(model.kinds, model.kind_parameters, strict=True):
        tokens, attention, recurrent = grid.tokens(training, run), run.attention, run.recurrent
        # Channels of queries, keys, values and output, and of a gate and the output that it has multiplied.
        inner = 0.0
        keys_of_encoder: Column = 0.0
        for part in (attention, run.cross_attention):
            if part is not None:
                inner += part.heads * (part.head_dim + part.value_dim) + 2.0 * part.gate_size
        if attention is not None:
            inner += attention.key_size
        if run.cross_attention is not None:
            keys_of_encoder = grid.tokens(training, model.layers[0]) * run.cross_attention.key_size
        size = float(run.ffn.size) if run.ffn else 0.0
        dispatched: Column = 0.0
        if isinstance(run.ffn, Experts):
            size = float(run.ffn.size * run.ffn.per_token * (run.ffn.capacity or 1.0) + run.ffn.shared_size)
            dispatched = 2.0 * hidden * run.ffn.per_token * grid.expert_cut
        scores = 0.0
        if stack.attention == "unfused":
            for part, seen in ((attention, run), (run.cross_attention, model.layers[0])):
                if part is not None:
                    scores += 2.5 * part.heads * model.tokens(seen, training.seq) * training.computed_share
        entry = tokens * width * hidden / grid.undivided
        entries, matrices, residual = 2.0 * run.n_halves, float(run.ffn.n_matrices) if run.ffn else 0.0, 1.0
        if stack.is_written_out:
            is_gated = matrices > 2  # models with gates have root-mean-square norms, too
            written = _WRITTEN_ENTRIES[is_gated or model.is_recurrent, width == 2.0]
            entries, residual = written * run.n_halves / 2 / width, 4.0 / width
            matrices += is_gated + _WRITTEN_GELU * (model.writes_gelu_out and run.ffn is not None)
            # Norms of queries and keys, in 32 bits, before and after scaling.
            if attention is not None and attention.n_norms:
                inner = inner + 4 * (attention.heads + attention.kv_heads) * attention.head_dim
        core = tokens * width * scores / tp
        # One matrix up and its activation, or two up and their product.
        layer = entries * entry + core + tokens * width * (inner + size * matrices + dispatched) / tp
        layer = layer + width * keys_of_encoder / tp
        scan: Column = 0.0
        if recurrent is not None:
            scan = tokens * width * recurrent.kept / tp
            layer = layer + scan
            kept_by_scans = kept_by_scans + run.n_layers * scan * (
                1.0 - grid.full - grid.operators * _OPERATORS_SAVE
            )
        # A layer that is computed again keeps its input; without the scores of its attention, or half of its
        # products, it keeps the rest.
        saved = (
            grid.full * (layer - residual * entry)
            + grid.cores * core
            + grid.operators * _OPERATORS_SAVE * layer
        )
        kept = kept + run.n_layers * (layer - saved)
        works = where(grid.full > 0, layer, 0.0)
        if recurrent is not None:
            works = works + tokens * recurrent.state_bytes / tp
        working = at_least(working, works)
        gathered_experts = (of_experts > 1) * experts / (grid.ep * grid.expert_cut)
        largest = at_least(largest, (held - experts) / tp + gathered_experts)
    # The first stage of a pipeline keeps the activations of as many micro-batches as there are stages.
    most = grid.pp * where(grid.interleave > 1, 1.0 + (grid.pp - 1) / (grid.pp * grid.interleave), 1.0)
    in_flight = where(grid.pp > 1, at_most(grid.microbatches(training), most), 1.0)
    first, second = grid.shares_of_stages(model)
    # How many times a device keeps what all layers keep; the second stage has one micro-batch less.
    times = at_least(first * in_flight, second * in_flight * (grid.pp - 1) / grid.pp)
    table["activations"] = kept * times + working
    with_logits = grid.micro_batch * stack.head_tokens(training) / grid.cp
    table["logits"] = with_logits * stack.logit_bytes * model.vocab / tp
    # Where a pipeline gathers once a step, the whole stage is there until its last micro-batch, and so are
    # its gradients, added up in 32 bits.
    whole = (grid.pp > 1) & (not stack.regathers)
    of_whole = (width + 4.0 * trained) * (other + (of_experts > 1) * expert)
    # The head is gathered beside the last layer, and may be larger than the layer after it.
    in_turn = at_least(_BUCKET_LAYERS * largest, largest + model.head_parameters / tp)
    gathered = where(whole, of_whole, width * in_turn)
    table["gathered"] = where(grid.zero == 3, gathered, 0.0)
    # The last stage keeps one micro-batch and its logits; the fuller of both ends counts.
    of_last = kept * first + working
    is_last = (grid.pp > 1) & (of_last + table["logits"] > table["activations"])
    table["activations"] = where(is_last, of_last, table["activations"])
    times = where(is_last, first, times)
    table["logits"] = where(is_last | (grid.pp == 1), table["logits"], 0.0)
    if stack.frees_gradients:
        # Gradients are complete where all logits and all layers but one are gone, unless a micro-batch before
        # has left its own: the fuller of both moments counts.
        comes_back = (grid.peers == 1) & (grid.microbatches(training) == 1) & (grid.pp == 1)
        before, one = table["activations"] + table["logits"], kept / model.n_layers + working
        after = table["gradients"] + one
        is_before, is_after = comes_back & (before >= after), comes_back & (before < after)
        table["gradients"] = where(is_before, 0.0, table["gradients"])
        table["logits"] = where(is_after, 0.0, table["logits"])
        table["activations"] = where(is_after, one, table["activations"])
        times = where(is_after, 1.0 / model.n_layers, times)
    table["reserve"] = _RESERVE_BYTES
    if model.is_recurrent:
        table["scan"] = kept_by_scans * times
        table["activations"] = table["activations"] - table["scan"]
    return table_of(table, components_of(model), len(grid))


def fits(table: Array, cluster: ClusterSpec) -> NDArray[np.bool_]:
    """Tell which layouts fit into the memory of a device."""
    return np.asarray(table.sum(axis=1) <= cluster.gpu.sustained.memory_bytes)
