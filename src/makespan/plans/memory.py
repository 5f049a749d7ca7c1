"""Memory of a plan on device and host, the decision whether it fits, and the rule for micro-batch sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from makespan.arguments import check_fields
from makespan.errors import PlanError
from makespan.hardware import NodeSpec
from makespan.plans.plan import ExecutionPlan, Placement, Stage, chunk_layers, stages
from makespan.units import format_bytes
from makespan.workloads import BoundWorkload, Stack, Workload

# Bytes per parameter of all states under Adam with an fp32 master copy: 2 + 2 + 12 with 16-bit weights and
# gradients (Rajbhandari et al. 2020, "ZeRO", section 3.1), 4 + 4 + 8 where the fp32 weights are the master
# copy. The host keeps an fp32 gradient in place of the 16-bit weight and gradient.
_STATES = 16
_HOST_STATE = 16


@dataclass(frozen=True, slots=True)
class MemoryRules:
    """Parameters of the memory model that depend on the software, not on the plan.

    Parameters
    ----------
    fragmentation
        Factor on activations, logits and workspace for what the allocator loses [1].
    bucket_bytes, workspace_bytes, offload_bucket_bytes
        One of two buckets of the gradient exchange, library workspaces, and the staging buffer of the offload
        path on the device [B].
    """

    fragmentation: float = 1.06
    bucket_bytes: float = 25e6
    workspace_bytes: float = 0.5e9
    offload_bucket_bytes: float = 0.5e9

    def __post_init__(self) -> None:
        rest = ("bucket_bytes", "workspace_bytes", "offload_bucket_bytes")
        check_fields(self, positive=("fragmentation",), not_negative=rest)


DEFAULT_MEMORY_RULES = MemoryRules()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Memory verdict of a plan: feasible or not, the reason, and bytes by component.

    Parameters
    ----------
    feasible, reason
        True if the plan can run; the reason if it cannot, empty if it can.
    bytes_by_component
        Device memory of the fullest pipeline stage [B]: ``states``, ``activations``, ``logits``,
        ``workspace``, ``fragmentation``, ``reserved``.
    host_bytes_by_component
        Host memory of the node with most processes [B]: ``optimizer``.
    warnings
        Unusual properties of plans that published traces have nevertheless run.
    """

    feasible: bool
    bytes_by_component: Mapping[str, float]
    host_bytes_by_component: Mapping[str, float]
    reason: str
    warnings: tuple[str, ...] = ()

    @property
    def device_bytes(self) -> float:
        """Device memory of the fullest stage [B]."""
        return sum(self.bytes_by_component.values())

    @property
    def host_bytes(self) -> float:
        """Host memory of the node with most processes [B]."""
        return sum(self.host_bytes_by_component.values())


def memory_estimate(
    plan: ExecutionPlan,
    workload: Workload,
    node: NodeSpec,
    placement: Placement | None = None,
    rules: MemoryRules = DEFAULT_MEMORY_RULES,
) -> Verdict:
    """Decide whether a plan fits in memory.

    The activation counts follow Korthikanti et al. 2022, section 4; the states follow
    Rajbhandari et al. 2020, section 3. A plan whose structure does not fit has no byte counts.

    Parameters
    ----------
    plan
        The plan, with its micro-batch size resolved.
    node, placement
        Kind of node (on a mixed cluster the one with the least memory), and the placement of the plan; nodes
        filled one after another if not given.
    """
    bound = workload.for_plan(plan)
    place = placement or Placement.packed(plan.n_gpus, node.n_gpus)
    problem = _structural_problem(plan, bound, node, place)
    odd = bound.model.heads % plan.tp
    warnings = (f"tp={plan.tp} does not divide {bound.model.heads} attention heads",) if odd else ()
    if problem:
        return Verdict(False, {}, {}, problem, warnings)
    per_stage: list[dict[str, float]] = []
    workspace = 2 * rules.bucket_bytes + rules.workspace_bytes
    for index, stage in enumerate(stages(bound.model, plan)):
        activations = _activation_bytes(plan, bound, index, stage)
        logits = plan.micro_batch_size * stage.logit_bytes / plan.tp
        parts = {
            "states": _state_bytes(plan, bound.stack, stage, rules),
            "activations": activations,
            "logits": logits,
            "workspace": workspace,
            "fragmentation": (rules.fragmentation - 1.0) * (activations + logits + workspace),
            "reserved": node.gpu.reserved_bytes,
        }
        per_stage.append(parts)
    device = max(per_stage, key=lambda parts: sum(parts.values()))
    host: dict[str, float] = {}
    if plan.offload:
        shard = bound.model.parameters / (plan.tp * plan.pp * plan.dp)
        host = {"optimizer": _HOST_STATE * shard * place.gpus_per_node[-1]}
    used, host_used = sum(device.values()), sum(host.values())
    reason = ""
    if used > node.gpu.memory_bytes:
        largest = max(device, key=lambda name: device[name])
        reason = (
            f"needs {format_bytes(used)} on a device of {format_bytes(node.gpu.memory_bytes)}; "
            f"the largest part is {largest} with {format_bytes(device[largest])}"
        )
    elif host_used > node.host_memory_bytes:
        reason = (
            f"needs {format_bytes(host_used)} of host memory on a node of "
            f"{format_bytes(node.host_memory_bytes)}"
        )
    return Verdict(not reason, device, host, reason, warnings)


def _structural_problem(
    plan: ExecutionPlan, bound: BoundWorkload, node: NodeSpec, placement: Placement
) -> str:
    if plan.n_gpus != placement.n_gpus:
        return f"the plan needs {plan.n_gpus} GPUs, the placement {placement.text} has {placement.n_gpus}"
    if placement.gpus_per_node[-1] > node.n_gpus:
        return f"placement {placement.text} puts more GPUs on a node than the {node.n_gpus} it has"
    if plan.global_batch_size != bound.global_batch_size:
        return (
            f"the plan is for a global batch of {plan.global_batch_size}, the workload "
            f"{bound.key!r} has {bound.global_batch_size}"
        )
    try:
        chunk_layers(bound.model.n_layers, plan)
    except PlanError as error:
        return str(error)
    return ""


def _state_bytes(plan: ExecutionPlan, stack: Stack, stage: Stage, rules: MemoryRules) -> float:
    held, shards = stage.parameters / plan.tp, plan.dp
    # A gradient has one width, in memory as on the wire, and a weight that of its gradient.
    width = stack.gradient_bytes if plan.zero_stage == 0 else stack.partitioned_bytes
    weight, gradient, optimizer = width, width, _STATES - 2 * width
    if plan.offload:
        return (weight + gradient / shards) * held + rules.offload_bucket_bytes
    if plan.zero_stage == 0:
        return (weight + gradient + optimizer) * held
    if plan.zero_stage == 1:
        return (weight + gradient + optimizer / shards) * held
    if plan.zero_stage == 2:
        # A step that accumulates keeps a whole gradient beside the shard.
        transient = gradient * held if plan.grad_accum_steps > 1 and shards > 1 else 0.0
        return (weight + (gradient + optimizer) / shards) * held + transient
    # Weights and gradient of the largest layer are gathered while it runs.
    largest = (weight + gradient) * stage.largest.parameters / plan.tp
    return (weight + gradient + optimizer) * held / shards + largest


def _activation_bytes(plan: ExecutionPlan, bound: BoundWorkload, index: int, stage: Stage) -> float:
    """Return the kept bytes of one stage with all its micro-batches in flight."""
    fraction = 1.0 if bound.stack.full_checkpointing else plan.checkpoint_fraction
    replicated = stage.replicated_bytes
    if plan.sequence_parallel or bound.stack.sequence_parallel:
        replicated /= plan.tp
    attention = 0.0 if bound.stack.fused_attention else stage.attention_bytes / plan.tp
    rest = replicated + stage.sharded_bytes / plan.tp
    per_layer = (rest + attention) / stage.n_layers
    if plan.checkpoint_method == "selective" and not bound.stack.full_checkpointing:
        kept, recomputed = rest + (1.0 - fraction) * attention, attention / stage.n_layers
    else:
        kept = (1.0 - fraction) * (rest + attention) + fraction * stage.input_bytes
        recomputed = per_layer
    m, p = plan.n_microbatches, plan.pp
    in_flight = float(min(m, p - index))  # 1F1B: stage i starts p - i micro-batches before its first backward
    if p == 1:
        in_flight = 1.0  # without a pipeline each micro-batch is finished before the next begins
    elif plan.schedule == "gpipe":
        in_flight = float(m)
    elif plan.schedule == "interleaved":
        in_flight = min(float(m), in_flight + (p - 1) / plan.interleave)
    # Layers recompute one at a time, so the activations of one layer come on top.
    return plan.micro_batch_size * (in_flight * kept + (recomputed if fraction > 0 else 0.0))


@lru_cache(maxsize=65536)
def resolve_micro_batch(
    plan: ExecutionPlan, workload: Workload, node: NodeSpec, rules: MemoryRules = DEFAULT_MEMORY_RULES
) -> ExecutionPlan:
    """Choose the micro-batch size by the rule of the plan's stack.

    A plan that accumulates already keeps its micro-batch. Other plans without model parallelism start from
    the whole batch of a replica and halve it until it fits in memory; model-parallel plans split the batch
    into at most as many micro-batches as the workload's traces used. If no micro-batch fits, the plan has the
    smallest one that was tried, and `memory_estimate` gives the reason.
    """
    if plan.grad_accum_steps > 1:
        return plan
    batch = plan.replica_batch_size
    if plan.is_model_parallel:
        most = min(workload.for_plan(plan).max_microbatches, batch)
        steps = max(count for count in range(1, most + 1) if batch % count == 0)
        return plan.with_micro_batch(batch // steps)
    resolved = plan.with_micro_batch(batch)
    while (
        resolved.micro_batch_size % 2 == 0
        and not memory_estimate(resolved, workload, node, None, rules).feasible
    ):
        resolved = plan.with_micro_batch(resolved.micro_batch_size // 2)
    return resolved
