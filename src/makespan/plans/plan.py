"""Placements, execution plans and pipeline stages: how a job uses its devices."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, cast

from makespan.arguments import check_fields, typed
from makespan.errors import NotationError, PlanError, shown, unknown_name
from makespan.hardware import MOST_GPUS
from makespan.units import whole
from makespan.workloads import Layer, ModelSpec, head, layers

# --- Placement of a job on nodes, its communication groups there, and the network cards that they share ---
#
# Ranks fill the nodes in order; tensor rank runs fastest, then data, then pipeline. A group spreads its
# traffic evenly over the cards of its members on a node.

_SEPARATOR = "-"
Position = tuple[int, int]
"""Node, and device or network card there."""
Cards = dict[int, tuple[set[int], int]]


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of a job on each node that holds at least one, as a multiset.

    The order of the nodes has no meaning: counts, at least 1, are sorted on construction, so equal
    placements compare equal.
    """

    gpus_per_node: tuple[int, ...]

    def __post_init__(self) -> None:
        if type(self.gpus_per_node) is not tuple or {*map(type, self.gpus_per_node)} - {int}:
            check_fields(self, "placement", PlanError)
        if not self.gpus_per_node or min(self.gpus_per_node) < 1:
            raise PlanError(f"placement {self.gpus_per_node}: expected one count or more, each >= 1")
        object.__setattr__(self, "gpus_per_node", tuple(sorted(self.gpus_per_node)))

    @classmethod
    def parse(cls, text: str) -> "Placement":
        """Read a placement: one digit per node, or counts joined by ``-``.

        A single node with ten devices or more is written with a trailing ``-``, as ``16-``; raises
        `NotationError` for other texts.

        Examples
        --------
        >>> Placement.parse("35").gpus_per_node
        (3, 5)
        >>> Placement.parse("16-16").n_gpus
        32

        """
        if not isinstance(text, str):
            raise NotationError(f"placement is {shown(text)}; expected text")
        stripped = text.strip()
        joined = _SEPARATOR in stripped
        parts = stripped.removesuffix(_SEPARATOR).split(_SEPARATOR) if joined else list(stripped)
        counts = tuple(whole(part) or 0 for part in parts)
        if not counts or not all(counts):
            raise NotationError(
                f"placement {text!r} cannot be read; expected one digit 1-9 per node, such as "
                "'4444', or counts joined by '-', such as '16-16'"
            )
        return cls(counts)

    @classmethod
    @typed
    def packed(cls, n_gpus: int, gpus_per_node: int) -> "Placement":
        """Return the placement on as few nodes as possible, all full but perhaps one; counts are >= 1."""
        if n_gpus < 1 or gpus_per_node < 1:
            raise PlanError(f"cannot pack {n_gpus} GPUs on nodes of {gpus_per_node}; expected both >= 1")
        if n_gpus > MOST_GPUS:
            raise PlanError(f"cannot pack {n_gpus} GPUs; expected at most {MOST_GPUS:,}")
        full, rest = divmod(n_gpus, gpus_per_node)
        return cls((gpus_per_node,) * full + ((rest,) if rest else ()))

    @property
    def text(self) -> str:
        """The placement in trace notation, smallest count first."""
        joint = "" if max(self.gpus_per_node) <= 9 else _SEPARATOR
        text = joint.join(str(count) for count in self.gpus_per_node)
        return text if joint == "" or self.n_nodes > 1 else f"{text}{_SEPARATOR}"

    @property
    def n_gpus(self) -> int:
        """Devices on all nodes."""
        return sum(self.gpus_per_node)

    @property
    def n_nodes(self) -> int:
        """Nodes that hold at least one device."""
        return len(self.gpus_per_node)

    def fits(self, gpus_per_node: int, n_nodes: int) -> bool:
        """Return True if an empty cluster of equal nodes could hold the placement."""
        return self.n_nodes <= n_nodes and self.gpus_per_node[-1] <= gpus_per_node


@lru_cache(maxsize=4096)
def enumerate_placements(n_gpus: int, gpus_per_node: int, n_nodes: int) -> tuple[Placement, ...]:
    """Return every placement on a cluster of equal nodes: fewest nodes first, then by counts."""
    placements = [Placement(counts) for counts in _partitions(n_gpus, gpus_per_node, n_nodes)]
    return tuple(sorted(placements, key=lambda p: (p.n_nodes, p.gpus_per_node)))


def _partitions(total: int, largest: int, parts: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    elif parts > 0:
        for first in range(min(total, largest), 0, -1):
            for rest in _partitions(total - first, first, parts - 1):
                yield (first, *rest)


@dataclass(frozen=True, slots=True)
class RankGroups:
    """Positions of all ranks, in order, and of the members of each tensor- and data-parallel group."""

    ranks: list[Position]
    tensor: list[list[Position]]
    data: list[list[Position]]

    @classmethod
    def of(cls, gpus_per_node: Sequence[int], pp: int, tp: int, dp: int) -> "RankGroups":
        """Arrange the ranks of a plan; the degrees multiply to the devices."""
        ranks = [(node, local) for node, count in enumerate(gpus_per_node) for local in range(count)]
        width = tp * dp
        stages = [ranks[first : first + width] for first in range(0, pp * width, width)]
        return cls(
            ranks=ranks,
            tensor=[stage[first : first + tp] for stage in stages for first in range(0, width, tp)],
            data=[stage[offset::tp] for stage in stages for offset in range(tp)],
        )


def cards_by_node(group: Iterable[Position], gpus_per_nic: Sequence[int]) -> Cards:
    """Return cards and number of members of a group on each node, given the devices per card there."""
    by_node: Cards = {}
    for node, local in group:
        cards, count = by_node.get(node, (set(), 0))
        cards.add(local // gpus_per_nic[node])
        by_node[node] = (cards, count + 1)
    return by_node


def card_loads(groups: Iterable[Cards]) -> dict[Position, float]:
    """Add up the shares of traffic that concurrent groups, those across nodes, push through each card.

    A load of 1 is all the traffic that one group has at a node.
    """
    load: defaultdict[Position, float] = defaultdict(float)
    for by_node in groups:
        if len(by_node) > 1:
            for node, (cards, _) in by_node.items():
                for card in cards:
                    load[node, card] += 1.0 / len(cards)
    return load


def boundary_flows(
    ranks: Sequence[Position], first: int, width: int, gpus_per_nic: Sequence[int]
) -> tuple[Counter[Position], Counter[Position]]:
    """Count what each card sends and receives over a pipeline boundary that leaves its node.

    The sending stage has ``width`` ranks from ``first`` on; ``gpus_per_nic`` devices of a node share a card.
    """
    pairs = zip(ranks[first : first + width], ranks[first + width : first + 2 * width], strict=True)
    sent: Counter[Position] = Counter()
    received: Counter[Position] = Counter()
    for (node, local), (to_node, to_local) in pairs:
        if node != to_node:
            sent[node, local // gpus_per_nic[node]] += 1
            received[to_node, to_local // gpus_per_nic[to_node]] += 1
    return sent, received


# --- Execution plan ---

DEFAULT_CPU_THREADS = 8
"""Default CPU threads per GPU of a job (Morphling, workload table)."""
_COUNTS = (
    "dp", "tp", "pp", "global_batch_size", "micro_batch_size", "grad_accum_steps", "interleave",
    "cpu_threads", "zero_stage",
)  # fmt: skip
_SCHEDULES = ("1f1b", "gpipe", "interleaved")
_CHECKPOINT_METHODS = ("full", "selective")


class PlanFamily(Enum):
    """Families of execution plans, named as in the tables of Morphling."""

    DP = "DP"
    """Data parallel, with gradient accumulation where memory requires it."""
    GC = "GC"
    """Data parallel with activation checkpointing."""
    ZERO_DP = "ZeRO-DP+GA"
    """Data parallel with partitioned optimiser and gradients."""
    ZERO_OFFLOAD = "ZeRO-Offload"
    """Partitioned, with optimiser state and step on the host."""
    ZERO_OFFLOAD_GC = "ZeRO-Offload+GC"
    """The same with activation checkpointing."""
    TP_GA = "TP+GA"
    """Tensor parallel on all devices, with gradient accumulation."""
    TP_PP = "TP+PP"
    """Tensor and pipeline parallel, one replica."""
    DP_TP_PP = "DP+TP+PP"
    """Tensor and pipeline parallel, several replicas."""

    @property
    def title(self) -> str:
        """Name for tables and legends."""
        return str(self.value)

    @property
    def word(self) -> str:
        """Text of the family's plain plans; empty for families that are written by their degrees."""
        return _WORDS.get(self, "")

    @property
    def is_model_parallel(self) -> bool:
        """True for families whose plans may split the model over devices."""
        return self in (PlanFamily.TP_GA, PlanFamily.TP_PP, PlanFamily.DP_TP_PP)


_WORDS = {
    PlanFamily.DP: "ga",
    PlanFamily.GC: "gc",
    PlanFamily.ZERO_DP: "zero-dp",
    PlanFamily.ZERO_OFFLOAD: "zero-offload",
    PlanFamily.ZERO_OFFLOAD_GC: "zero-offload+gc",
    PlanFamily.TP_GA: "tp+ga",
}


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Execution plan: how a job uses its devices; raises `PlanError` if values contradict each other.

    Parameters
    ----------
    dp, tp, pp
        Data-, tensor- and pipeline-parallel degree.
    global_batch_size
        Samples per optimiser step, *B = b a d*.
    micro_batch_size
        Samples per replica and forward pass, *b*.
    grad_accum_steps
        Passes per optimiser step and replica, *a*; under pipeline parallelism these are the
        micro-batches in flight.
    zero_stage
        0 none, 1 optimiser state, 2 plus gradients, 3 plus parameters.
    offload
        True if optimiser state and step are on the host; needs ``zero_stage >= 1``.
    checkpoint_fraction, checkpoint_method
        Share of the layers with activation checkpointing in [0, 1]; ``full`` or ``selective``.
    schedule, interleave
        Pipeline schedule ``1f1b``, ``gpipe`` or ``interleaved``, and model chunks per stage.
    cpu_threads
        CPU threads per GPU.
    sequence_parallel
        True if tensor parallelism also shards norms and dropout.
    partition
        Layers of each model chunk, in the order of the model: one chunk per pipeline stage, or
        ``interleave`` chunks dealt to the stages in turn; None for an even split.
    family
        Family of the plan; derived from the degrees if not given.

    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    global_batch_size: int = 1
    micro_batch_size: int = 1
    grad_accum_steps: int = 1
    zero_stage: int = 0
    offload: bool = False
    checkpoint_fraction: float = 0.0
    checkpoint_method: Literal["full", "selective"] = "full"
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    interleave: int = 1
    cpu_threads: int = DEFAULT_CPU_THREADS
    sequence_parallel: bool = False
    partition: tuple[int, ...] | None = None
    family: PlanFamily | None = None

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_options()
        product = self.micro_batch_size * self.grad_accum_steps * self.dp
        if product != self.global_batch_size:
            raise PlanError(
                f"batch identity broken: micro_batch_size {self.micro_batch_size} x "
                f"grad_accum_steps {self.grad_accum_steps} x dp {self.dp} = {product}, "
                f"but global_batch_size is {self.global_batch_size}"
            )
        if self.family is None:
            object.__setattr__(self, "family", _derive_family(self))
            return
        family, derived = self.plan_family, _derive_family(self)
        # Several model-parallel families can have the same degrees, so the family of a plan may be stated.
        allowed = {
            PlanFamily.TP_GA: self.dp == 1 and self.pp == 1,
            PlanFamily.TP_PP: self.dp == 1,
            PlanFamily.DP_TP_PP: self.dp != 1,
        }
        if family != derived and not allowed.get(family, False):
            raise PlanError(
                f"family {family.title!r} does not fit dp={self.dp} tp={self.tp} pp={self.pp} "
                f"zero_stage={self.zero_stage} offload={self.offload}; these make {derived.title!r}"
            )

    def _check_ranges(self) -> None:
        check_fields(self, "plan", PlanError)
        for name in _COUNTS:
            value, least = getattr(self, name), int(name != "zero_stage")
            if value < least:
                raise PlanError(f"{name} is {value}; expected a whole number >= {least}")
        if self.zero_stage > 3:
            raise PlanError(f"zero_stage is {self.zero_stage}; expected 0, 1, 2, 3")
        if not 0.0 <= self.checkpoint_fraction <= 1.0:
            raise PlanError(f"checkpoint_fraction is {self.checkpoint_fraction}; expected [0, 1]")

    def _check_options(self) -> None:
        if self.schedule not in _SCHEDULES:
            raise unknown_name("pipeline schedule", self.schedule, _SCHEDULES)
        if self.checkpoint_method not in _CHECKPOINT_METHODS:
            raise unknown_name("checkpoint method", self.checkpoint_method, _CHECKPOINT_METHODS)
        if self.offload and self.zero_stage == 0:
            raise PlanError("offload needs a partitioned optimiser; expected zero_stage >= 1")
        if self.interleave > 1 and self.schedule != "interleaved":
            raise PlanError(f"interleave {self.interleave} needs schedule 'interleaved'")
        if self.partition is not None and (len(self.partition) != self.n_chunks or min(self.partition) < 1):
            raise PlanError(
                f"partition {self.partition} must give at least one layer to each of pp={self.pp} x "
                f"interleave={self.interleave} model chunks"
            )

    @property
    def n_gpus(self) -> int:
        """Devices that the plan needs, *d t p*."""
        return self.dp * self.tp * self.pp

    @property
    def n_chunks(self) -> int:
        """Model chunks of a pipeline; chunk k belongs to stage k mod *p*."""
        return self.pp * self.interleave

    @property
    def n_microbatches(self) -> int:
        """Micro-batches through each pipeline in one optimiser step."""
        return self.grad_accum_steps

    @property
    def activation_checkpointing(self) -> bool:
        """True if any layer recomputes its activations."""
        return self.checkpoint_fraction > 0

    @property
    def plan_family(self) -> PlanFamily:
        """Family of the plan; the field ``family`` after construction."""
        return cast(PlanFamily, self.family)

    @property
    def is_model_parallel(self) -> bool:
        """True if the plan belongs to a family that may split the model."""
        return self.plan_family.is_model_parallel

    @property
    def replica_batch_size(self) -> int:
        """Samples of one replica in one optimiser step, *b a*."""
        return self.micro_batch_size * self.grad_accum_steps

    def with_micro_batch(self, micro_batch_size: int) -> "ExecutionPlan":
        """Return the plan with another micro-batch size, which divides the replica's batch."""
        steps, rest = divmod(self.replica_batch_size, max(micro_batch_size, 1))
        if rest or micro_batch_size < 1:
            raise PlanError(
                f"micro_batch_size {micro_batch_size} does not divide the replica's batch of "
                f"{self.replica_batch_size} samples"
            )
        return replace(self, micro_batch_size=micro_batch_size, grad_accum_steps=steps)

    def with_cpu_threads(self, cpu_threads: int) -> "ExecutionPlan":
        """Return the plan with another number of CPU threads per GPU."""
        return replace(self, cpu_threads=cpu_threads)


def _derive_family(plan: ExecutionPlan) -> PlanFamily:
    if plan.tp * plan.pp > 1:
        return PlanFamily.TP_PP if plan.dp == 1 else PlanFamily.DP_TP_PP
    if plan.offload:
        checkpointed = plan.activation_checkpointing
        return PlanFamily.ZERO_OFFLOAD_GC if checkpointed else PlanFamily.ZERO_OFFLOAD
    if plan.zero_stage:
        return PlanFamily.ZERO_DP
    return PlanFamily.GC if plan.activation_checkpointing else PlanFamily.DP


# --- Pipeline stages: the layers of each, and the sums over them ---


@dataclass(frozen=True, slots=True)
class Stage:
    """Sums over the layers of one pipeline stage, per sample and forward pass.

    Parameters
    ----------
    n_layers, parameters
        Layers, and weights with embedding and head, scaled so that all stages together have the published
        count.
    flop, attention_flop, head_flop
        Matrix products of the layers, of the attention cores in them, and of the output head.
    replicated_bytes, sharded_bytes, attention_bytes
        Kept bytes, see `makespan.workloads.Layer`.
    input_bytes
        Inputs of all layers, which full checkpointing keeps [B].
    all_reduce_bytes, n_all_reduces, n_kernels
        All-reduces of tensor parallelism and device kernels in one forward pass.
    boundary_bytes, logit_bytes
        Output of the stage, 0 for the last one; logits and their copy, 0 except for the last one [B].
    largest
        The layer that keeps most.
    """

    n_layers: int
    parameters: float
    flop: float
    attention_flop: float
    head_flop: float
    replicated_bytes: float
    sharded_bytes: float
    attention_bytes: float
    input_bytes: float
    all_reduce_bytes: float
    n_all_reduces: int
    n_kernels: int
    boundary_bytes: float
    logit_bytes: float
    largest: Layer


def chunk_layers(n_layers: int, plan: ExecutionPlan) -> tuple[range, ...]:
    """Return the layers of every model chunk of a plan, in the order of the model.

    Executor, time model and memory estimate all use this split. Chunk k belongs to pipeline stage k mod *p*;
    without interleaving, chunks are stages. The partition of the plan decides, or else a split as even as
    possible.

    Raises `PlanError` for fewer layers than chunks and for partitions that do not add up to the layers.
    """
    count, sizes = plan.n_chunks, plan.partition
    if count > n_layers:
        raise PlanError(f"{count} pipeline stages or chunks, but the model has {n_layers} layers")
    if sizes is None:
        bounds = [(index * n_layers + count // 2) // count for index in range(count + 1)]
    elif sum(sizes) == n_layers:
        bounds = list(accumulate(sizes, initial=0))
    else:
        raise PlanError(f"partition {sizes} does not add up to the {n_layers} layers of the model")
    return tuple(range(low, high) for low, high in pairwise(bounds))


def stages(model: ModelSpec, plan: ExecutionPlan) -> tuple[Stage, ...]:
    """Sum up the layers of each pipeline stage of a plan, first to last; raises as `chunk_layers` does."""
    return _stages(model, plan.pp, chunk_layers(model.n_layers, plan))


@lru_cache(maxsize=4096)
def _stages(model: ModelSpec, pp: int, chunks: tuple[range, ...]) -> tuple[Stage, ...]:
    all_layers, ends = layers(model), head(model)
    outside = ends.embedding_parameters + ends.head_parameters
    scale = model.parameters / (outside + sum(layer.parameters for layer in all_layers))
    result = []
    for index in range(pp):
        is_first, is_last = index == 0, index == pp - 1
        held = [all_layers[number] for chunk in chunks[index::pp] for number in chunk]
        parameters = sum(layer.parameters for layer in held)
        parameters += ends.embedding_parameters * is_first + ends.head_parameters * is_last
        stage = Stage(
            n_layers=len(held),
            parameters=parameters * scale,
            flop=sum(layer.flop for layer in held),
            attention_flop=sum(layer.attention_flop for layer in held),
            head_flop=ends.flop * is_last,
            replicated_bytes=sum(layer.replicated_bytes for layer in held),
            sharded_bytes=sum(layer.sharded_bytes for layer in held),
            attention_bytes=sum(layer.attention_bytes for layer in held),
            input_bytes=sum(layer.input_bytes for layer in held),
            all_reduce_bytes=sum(layer.n_all_reduces * layer.input_bytes for layer in held),
            n_all_reduces=sum(layer.n_all_reduces for layer in held),
            n_kernels=sum(layer.n_kernels for layer in held),
            boundary_bytes=0.0 if is_last else held[-1].boundary_bytes,
            logit_bytes=ends.logit_bytes * is_last,
            largest=max(held, key=lambda layer: layer.kept_bytes(1)),
        )
        result.append(stage)
    return tuple(result)


def one_f_one_b_order(stage: int, n_stages: int, n_microbatches: int) -> list[tuple[str, int]]:
    """Return the passes of a pipeline stage in the order of 1F1B without interleaving.

    It runs ``min(n_microbatches, n_stages - 1 - stage)`` forward passes to warm up, then one forward and one
    backward pass in turn, then the backward passes that are left.

    Returns
    -------
    list
        ``("F", k)`` and ``("B", k)``, forward and backward pass of micro-batch k.
    """
    warm_up = min(n_microbatches, n_stages - 1 - stage)
    order = [("F", k) for k in range(warm_up)]
    for k in range(n_microbatches - warm_up):
        order += [("F", warm_up + k), ("B", k)]
    return order + [("B", k) for k in range(n_microbatches - warm_up, n_microbatches)]


def zero_bubble_order(stage: int, n_stages: int, n_microbatches: int) -> list[tuple[str, int]]:
    """Return the passes of a pipeline stage in the order of ZB-H1, with backward passes in two parts.

    Forward passes and first parts are in the order of `one_f_one_b_order`. Stage i leaves i second parts
    behind, and makes up for them while it would wait for gradients at the end. If all passes take equally
    long, an iteration of m >= p micro-batches takes 3m + p - 1 of them instead of 3m + 3(p - 1), one of fewer
    2m + 2p - 1, and no stage keeps more than p micro-batches, as many as the first one under 1F1B.

    Returns
    -------
    list
        ``("F", k)``, ``("B", k)`` and ``("W", k)``: forward pass, gradients of the inputs and gradients of
        the weights of micro-batch k.

    Source: P. Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024.
    """
    warm_up = min(n_microbatches, n_stages - 1 - stage)
    whole = [(kind, 0, k) for kind, k in one_f_one_b_order(stage, n_stages, n_microbatches)]
    return [(kind, k) for kind, _, k in _in_parts(whole, stage, warm_up)]


def interleaved_order(
    place: int, n_places: int, n_chunks: int, n_microbatches: int, splits_backward: bool = False
) -> list[tuple[str, int, int]]:
    """Return the passes of a device that runs several chunks of a pipeline, in the order of interleaved 1F1B.

    Chunk c of all runs on device c mod ``n_places``. Micro-batches are taken in groups of about ``n_places``,
    which pass one chunk of the device after the other. Device i runs ``2 (n_places - 1 - i)`` forward passes
    to warm up, and a group for each chunk but the last; then one forward and one backward pass in turn; then
    the backward passes that are left. If backward passes take twice as long as forward ones and chunks
    equally long, an iteration of m >= p micro-batches takes 3m + 3(p - 1)/v forward passes of a device
    instead of 3m + 3(p - 1), and 3m + (p - 1)/v with backward passes in two parts. One of fewer takes
    3p + 3(m - 1)/v, and the larger one of 2m + p + (p - 1)/v and 2p + (2m - 1)/v with two parts.

    Deviation: Megatron-LM wants groups of exactly ``n_places`` micro-batches. Here the number of devices need
    not divide that of micro-batches: there are as many groups of ``n_places`` or more as there can be, about
    equal, or a single one of fewer. The limits of memory and time hold for any number.

    Parameters
    ----------
    place, n_places
        Number of the device, and devices of the pipeline.
    n_chunks, n_microbatches
        Chunks of each device, and micro-batches of an iteration.
    splits_backward
        True for backward passes in two parts, as in `zero_bubble_order`.

    Returns
    -------
    list
        ``("F", c, k)`` and ``("B", c, k)``: forward and backward pass of micro-batch k through the chunk c of
        the device, from 0; with two parts also ``("W", c, k)``.

    Source: D. Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021.
    """
    n_groups = max(1, n_microbatches // n_places)
    bounds = [
        -(-group * n_microbatches // n_groups) for group in range(n_groups + 1)
    ]  # the first one is the longest
    groups = [range(low, high) for low, high in pairwise(bounds)]
    forward = [("F", c, k) for group in groups for c in range(n_chunks) for k in group]
    backward = [("B", c, k) for group in groups for c in reversed(range(n_chunks)) for k in group]
    warm_up = min(len(forward), 2 * (n_places - 1 - place) + (n_chunks - 1) * len(groups[0]))
    order = forward[:warm_up]
    for ahead, behind in zip(forward[warm_up:], backward, strict=False):
        order += [ahead, behind]
    order += backward[len(backward) - warm_up :]
    return list(_in_parts(order, place, warm_up)) if splits_backward else order


def _in_parts(
    order: Sequence[tuple[str, int, int]], n_behind: int, n_ending: int
) -> Iterator[tuple[str, int, int]]:
    """Yield passes with the second part of each backward pass.

    ``n_behind`` of them are left behind, until the last ``n_ending`` backward passes, among which they follow
    one by one.
    """
    left: deque[tuple[str, int, int]] = deque()
    n_backward = [kind for kind, _, _ in order].count("B")
    for kind, chunk, microbatch in order:
        yield kind, chunk, microbatch
        if kind == "B":
            n_backward -= 1
            left.append(("W", chunk, microbatch))
            if n_backward < n_ending or len(left) > n_behind:
                yield left.popleft()
    yield from left
