"""Two answers to how fast a run is: the hardware model of the paper's machine, and the emulator as it is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import floor
from typing import Literal

from makespan.emulator import Point, explain
from makespan.hardware import ClusterSpec, Network, homogeneous, node
from makespan.papers.slapo._hardware import (
    GPUS_PER_NODE,
    IMPLEMENTATIONS,
    Constants,
    Run,
    needed_bytes,
    simulate,
)
from makespan.plans import ExecutionPlan, Placement, memory_estimate
from makespan.training.zoo import FamilySpec, TransformerSpec, parameter_count
from makespan.workloads import BlockSpec, ModelSpec, Workload, stack

__all__ = ["Answer", "Oracle", "emulated", "modelled"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What an oracle says of a run.

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
        """Whether it fits."""
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
