"""Requests from launching processes to the processes of Oobleck runs, and their form as JSON.

The launching process dumps a request with a `TypeAdapter`, and a process of the run validates it with the
same one, which builds and checks the dataclasses anew. Both sides import this module, so it does not load
torch.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from makespan.oobleck.job import ChainJob, PassOrder
from makespan.oobleck.plan import HybridPlan, Pipeline


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """Request to a node.

    Parameters
    ----------
    job, partial
        The job, and the folder in which a checkpoint is written.
    pass_order
        Order of the passes.
    reroutes
        Whether microbatches may be re-routed, so that layers for which this would change bits are rejected.
    is_divided
        Whether the optimizer state of a layer is divided among its nodes.
    """

    job: ChainJob
    partial: Path
    pass_order: PassOrder = "1f1b"
    reroutes: bool = False
    is_divided: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """Instructions to the members of a generation: its plan, and how its layers reach the nodes.

    Parameters
    ----------
    plan
        Pipelines in the order in which their gradients are added.
    copies
        Layer, node that sends it, and node that receives it.
    copies_bytes
        Size of all copies [B].
    origin
        Checkpoint from which layers are loaded; None if there is none, or if nodes hold them.
    is_start
        Whether the run begins, so that nodes load or initialise their layers.
    kinds
        Actions of the reconfiguration.
    f
        Number of simultaneous losses that the plan tolerates.
    lost
        Nodes of the plan whose microbatches run on their peers.
    fallback
        Why microbatches were not rerouted under recovery ``reroute``; empty otherwise.
    pieces
        If optimizer state is divided: piece (`makespan.oobleck.shards`), node that sends it, and node that
        receives it, instead of ``copies``.
    holders
        If optimizer state is divided: layer, number of a weight there, and the nodes that hold its state.
        Empty at the start, when no size is known but to the nodes, which choose them.
    hosts
        If optimizer state is divided: nodes and their machines, by which holders are chosen.
    """

    plan: tuple[Pipeline, ...]
    copies: tuple[tuple[int, int, int], ...]
    copies_bytes: int
    origin: Path | None
    is_start: bool
    kinds: tuple[str, ...]
    f: int
    lost: tuple[int, ...] = ()
    fallback: str = ""
    pieces: tuple[tuple[str, int, int], ...] = ()
    holders: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    hosts: tuple[tuple[int, str], ...] = ()

    @property
    def hybrid_plan(self) -> HybridPlan:
        """Return the pipelines as a plan."""
        return HybridPlan(self.plan, self.lost)


@dataclass(frozen=True, slots=True)
class FixedRun:
    """A job, the plan under which it is trained from its start, and the number of iterations.

    ``with_checksums`` and ``with_states`` add checksums per iteration and final states to the result.
    """

    job: ChainJob
    plan: HybridPlan
    n_iterations: int
    with_checksums: bool = False
    with_states: bool = False
    pass_order: PassOrder = "1f1b"


@dataclass(frozen=True, slots=True)
class ProfilingRequest:
    """Request to time the layers of a job, and sums among replicas, after ``warm_ups`` untimed runs."""

    job: ChainJob
    repeats: int
    warm_ups: int


NODE = TypeAdapter(NodeRequest)
"""Codec of the request to `makespan.oobleck.worker`."""
WORK = TypeAdapter(Work)
"""Codec of the field ``work`` of `makespan.runtime.messages.Form`."""
FIXED_RUNS = TypeAdapter(list[FixedRun])
"""Codec of the request to `makespan.oobleck.fixed_worker`: one entry per run."""
PROFILING = TypeAdapter(ProfilingRequest)
"""Codec of the request to `makespan.oobleck.profiling_worker`."""
