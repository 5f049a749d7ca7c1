"""Memory of a device under a layout, by component.

Activations follow Korthikanti et al. 2022, section 4, with fused attention and without dropout, and states
Rajbhandari et al. 2020, section 3. A device of the first pipeline stage is the fullest, as it keeps the
activations of as many micro-batches as there are stages.
"""

import numpy as np
from numpy.typing import NDArray

from makespan.planning.architecture import Experts
from makespan.planning.machines import Machines
from makespan.planning.stacks import Software, Training
from makespan.planning.steptime import Grid, weights

Array = NDArray[np.float64]

COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "reserve")
"""Components of the memory of a device, in the order of their columns."""
_OPTIMIZER_BYTES = 12.0  # fp32 copy of a parameter and two moments
_RESERVE_BYTES = 1.0 * 2**30  # context, libraries, buffers of collectives
_BUCKET_LAYERS = 2.0  # layers that fully sharded data parallelism holds at once


def memory_table(training: Training, grid: Grid, machines: Machines, stack: Software) -> Array:
    """Return the memory of a device [B], (n_layouts, n_components), columns as in `COMPONENTS`."""
    model = training.model
    hidden, tp = float(model.hidden), grid.tp
    width = 4.0 if training.precision in ("fp32", "tf32") else 2.0
    expert, other = weights(training, grid)
    held = expert + other
    # Devices that hold the same experts are fewer than those that hold the same dense part.
    peers = grid.dp * grid.cp
    of_experts = np.maximum(peers * tp / grid.ep / tp, 1.0)
    over = np.where(grid.shard < peers, grid.shard, peers)

    def sharded(stage: int, each: float) -> Array:
        is_sharded = grid.zero >= stage
        dense = other / np.where(is_sharded, over, 1.0)
        return each * (dense + expert / np.where(is_sharded, np.minimum(over, of_experts), 1.0))

    gradient = width if width == 4.0 else float(stack.gradient_bytes)
    table = {
        "parameters": sharded(3, width),
        "gradients": sharded(2, gradient),
        # A copy of the parameters is needed beside them at 16 bits alone.
        "optimizer": sharded(1, _OPTIMIZER_BYTES if width == 2.0 else 8.0),
    }
    tokens = grid.micro_batch * training.seq * training.computed_share / grid.cp
    kept = np.zeros_like(tp)
    working = np.zeros_like(tp)
    largest = 0.0
    for run in model.kinds:
        length = grid.micro_batch * model.tokens(run, training.seq) * training.computed_share / grid.cp
        attention = run.attention
        inner = attention.heads * attention.head_dim + attention.kv_heads * (
            attention.head_dim + attention.value_dim
        )
        replicated = width * 4.0 * hidden / np.where(grid.sequence_parallel > 0, tp, 1.0)
        if isinstance(run.ffn, Experts):
            size = float(run.ffn.size * run.ffn.per_token * (run.ffn.capacity or 1.0) + run.ffn.shared_size)
            dispatched = width * 2.0 * hidden * run.ffn.per_token / tp
        else:
            size, dispatched = float(run.ffn.size), np.zeros_like(tp)
        divided = width * (inner + hidden + size * (3.0 if run.ffn.n_matrices == 3 else 2.0)) / tp
        scores = np.zeros_like(tp)
        if stack.attention == "unfused":
            seq = model.tokens(run, training.seq) * training.computed_share / grid.cp
            scores = 2.5 * width * attention.heads * seq / tp
        layer = length * (replicated + divided + dispatched + scores)
        core = length * (scores + width * inner / tp)
        entry = length * width * hidden / np.where(grid.sequence_parallel > 0, tp, 1.0)
        # Fully recomputed layers keep their input, selective recomputation drops the attention core, and that
        # by operator about half of the rest.
        is_full, is_core = (
            (grid.again == 1.0) | ((grid.again > 0) & (grid.again_core > 0)),
            grid.again_core > 0,
        )
        by_operator = (grid.again > 0) & ~is_core
        alone = np.where(
            is_full,
            grid.again * entry + (1 - grid.again) * layer,
            np.where(is_core, layer - core, np.where(by_operator, 0.5 * layer, layer)),
        )
        kept = kept + run.n_layers * alone
        working = np.maximum(working, np.where(is_full, layer, 0.0))
        largest = max(largest, float(run.parameters(model.hidden)))
    in_flight = np.where(
        grid.pp > 1,
        np.minimum(
            np.maximum(training.global_batch / (grid.dp * grid.micro_batch), 1.0),
            grid.pp * np.where(grid.interleave > 1, 1.0 + (grid.pp - 1) / (grid.pp * grid.interleave), 1.0),
        ),
        1.0,
    )
    table["activations"] = kept / grid.pp * in_flight + working
    is_lm = model.head in ("lm", "masked-lm")
    table["logits"] = (
        tokens * stack.logit_bytes * model.vocab / tp * is_lm * (1.0 if model.head == "lm" else 0.15)
    )
    # Where a pipeline gathers once a step, the whole stage is there until its last micro-batch.
    whole = (grid.pp > 1) & (not stack.regathers)
    gathered = np.where(whole, 2.0 * width * held, _BUCKET_LAYERS * width * largest / tp)
    table["gathered"] = np.where(grid.zero == 3, gathered, 0.0)
    used = np.stack([table[name] for name in COMPONENTS[:-1]], axis=1)
    # Where the head lies on another stage than the fullest, the larger of the two counts.
    first, last = used[:, 3].copy(), used[:, 4].copy()
    of_last = kept / grid.pp * np.minimum(in_flight, 1.0)
    is_last = (grid.pp > 1) & (of_last + last > first)
    used[:, 3] = np.where(is_last, of_last, first)
    used[:, 4] = np.where((grid.pp > 1) & ~is_last, 0.0, last)
    return np.column_stack([used, np.full(len(tp), _RESERVE_BYTES)])


def fits(table: Array, machines: Machines) -> NDArray[np.bool_]:
    """Tell which layouts fit into the memory of a device."""
    return np.asarray(table.sum(axis=1) <= machines.device.memory_bytes)
