"""What a job may run as, and where it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from makespan.errors import InputError
from makespan.plans import Placement

__all__ = ["Allocation", "Configuration"]

_TOLERANCE = 1e-9  # of rounding, in comparisons with a guarantee


@dataclass(frozen=True, slots=True, eq=False)
class Configuration:
    """One execution plan on one placement, with the time of a step.

    A catalogue makes each configuration once, so two of them are equal only if they are the same
    object; comparing and hashing is therefore cheap.

    Parameters
    ----------
    workload
        Key of what is trained.
    plan
        Execution plan in trace notation.
    family
        Title of its plan family.
    placement
        Devices a node.
    cpu_threads
        CPU threads a GPU.
    host_memory_bytes_per_gpu
        Host memory that the job takes on a node, for each of its GPUs there [B].
    iter_time_s
        Time of an optimiser step in the source of throughput [s]; what the engine runs by. Policies
        must not read it.
    predicted_iter_time_s
        The same as a performance model predicts it [s]; what policies decide by.
    provenance
        Where ``iter_time_s`` comes from.
    is_known
        Whether a policy may rely on the prediction for a guarantee: it was measured beforehand, or
        predictions are trusted in general.
    counts
        Devices a node, largest first; the order in which placing is easiest.
    n_gpus, n_nodes
        Devices and nodes in all.
    """

    workload: str
    plan: str
    family: str
    placement: Placement
    cpu_threads: int
    host_memory_bytes_per_gpu: float
    iter_time_s: float
    predicted_iter_time_s: float
    provenance: str
    is_known: bool = True
    counts: tuple[int, ...] = field(init=False)
    n_gpus: int = field(init=False)
    n_nodes: int = field(init=False)

    def __post_init__(self) -> None:
        """Derive the counts that policies read in their inner loops."""
        object.__setattr__(self, "counts", self.placement.gpus_per_node[::-1])
        object.__setattr__(self, "n_gpus", self.placement.n_gpus)
        object.__setattr__(self, "n_nodes", self.placement.n_nodes)

    def assures(self, reference: "Configuration") -> bool:
        """Whether this is sure to be at least as fast as a reference, as far as anybody can know.

        What was requested assures itself. Anything else must be known, like the reference, and not slower.
        """
        if self is reference:
            return True
        limit_s = reference.predicted_iter_time_s * (1 + _TOLERANCE)
        return self.is_known and reference.is_known and self.predicted_iter_time_s <= limit_s

    def on(self, nodes: Sequence[int]) -> "Allocation":
        """Return the allocation on nodes given in the order of `counts`, largest share first."""
        return Allocation(self, tuple(nodes)[::-1])


@dataclass(frozen=True, slots=True)
class Allocation:
    """A configuration on certain nodes.

    Parameters
    ----------
    configuration
        What runs.
    nodes
        Node numbers, aligned with ``configuration.placement.gpus_per_node`` (smallest share first).

    Raises
    ------
    InputError
        The number of nodes is not that of the placement, or a node occurs twice.
    """

    configuration: Configuration
    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that every share has its own node."""
        if len(self.nodes) != self.configuration.n_nodes or len(set(self.nodes)) != len(self.nodes):
            raise InputError(
                f"allocation of placement {self.configuration.placement.text}: nodes are {self.nodes}; "
                f"accepted: {self.configuration.n_nodes} different node(s)"
            )

    @property
    def shares(self) -> tuple[tuple[int, int], ...]:
        """Pairs of node number and devices there, by node number."""
        return tuple(sorted(zip(self.nodes, self.configuration.placement.gpus_per_node, strict=True)))

    @property
    def text(self) -> str:
        """The shares as ``node:devices``, joined by spaces; the form of the events table."""
        return " ".join(f"{node}:{count}" for node, count in self.shares)
